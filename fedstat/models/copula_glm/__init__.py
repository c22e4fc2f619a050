"""Generalized linear models from one private release of margins and moments of bounded scores."""

from fedstat.federation.disclosure.site import FAMILIES
from fedstat.models.copula_glm.steps import FAMILY, STEPS

FAMILIES[FAMILY] = STEPS
