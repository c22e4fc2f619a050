"""Generalised linear models from one private release: margins and moments of bounded scores."""

from fedstat.federation.door.site import FAMILIES
from fedstat.models.copula_glm.steps import FAMILY, STEPS

FAMILIES[FAMILY] = STEPS
