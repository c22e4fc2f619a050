"""Generalized linear models when sites hold different rows: the fit of the pooled table."""

from fedstat.federation.disclosure.protocol_order import in_order
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.models.glm.overdispersion import OVERDISPERSION_STEPS
from fedstat.models.glm.post_fit_steps import POST_FIT_ORDER as FURTHER_ORDER
from fedstat.models.glm.post_fit_steps import POST_FIT_STEPS as FURTHER_STEPS
from fedstat.models.glm.steps import CLUSTER_STEPS, FAMILY, ORDER, STEPS

FAMILIES[FAMILY] = in_order(
    {**STEPS, **CLUSTER_STEPS, **OVERDISPERSION_STEPS, **FURTHER_STEPS}, {**ORDER, **FURTHER_ORDER}
)

__all__ = ["FAMILIES"]
