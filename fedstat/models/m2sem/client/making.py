"""From the columns that an institution opened to modalities that can be improved."""

from __future__ import annotations

from fedstat.models.m2sem.client.columns import OpenedModality
from fedstat.models.m2sem.modality.base import Modality
from fedstat.models.m2sem.modality.categorical import CategoricalModality
from fedstat.models.m2sem.modality.gaussian import GaussianModality
from fedstat.typing import Floats


def make_modality(
    opened: OpenedModality, factors: int, nodes: int, covariates: Floats | None, units: Floats | None = None
) -> Modality:
    """Make a modality of one institution's columns, with a number of factors and nodes for each.

    Of new rows `units` are those of the columns in the fit.
    """
    asked = opened.asked
    if asked.continuous:
        return GaussianModality(opened.values, asked.names, factors, covariates, units)
    kinds, levels = [c.kind for c in asked.columns], [len(c.levels) for c in asked.columns]
    return CategoricalModality(opened.values, asked.names, factors, kinds, levels, nodes, covariates, units)
