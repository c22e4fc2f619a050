"""Synthetic tables from one private release of margins and a Gaussian copula."""

from fedstat.federation.disclosure.site import FAMILIES
from fedstat.models.copula.steps import FAMILY, STEPS

FAMILIES[FAMILY] = STEPS
