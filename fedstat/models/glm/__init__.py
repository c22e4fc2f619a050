"""Generalized linear models over sites that hold different rows: the fit of the pooled table from sums."""

from fedstat.federation.door.conduct import in_order
from fedstat.federation.door.site import FAMILIES
from fedstat.models.glm.cluster_steps import STEPS as CLUSTER_STEPS
from fedstat.models.glm.further_steps import ORDER as FURTHER_ORDER
from fedstat.models.glm.further_steps import STEPS as FURTHER_STEPS
from fedstat.models.glm.overdispersion import STEPS as OVERDISPERSION_STEPS
from fedstat.models.glm.steps import FAMILY, ORDER, STEPS

FAMILIES[FAMILY] = in_order(
    {**STEPS, **CLUSTER_STEPS, **OVERDISPERSION_STEPS, **FURTHER_STEPS}, {**ORDER, **FURTHER_ORDER}
)

__all__ = ["FAMILIES"]
