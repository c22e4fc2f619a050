"""Synthetic tables from one private release: margins and a Gaussian copula."""

from fedstat.federation.door.site import FAMILIES
from fedstat.models.copula.steps import FAMILY, STEPS

FAMILIES[FAMILY] = STEPS
