"""Requests to the steps of VFEM, and declarations and safe sums of their releases."""

from __future__ import annotations

import numpy as np

from fedstat.federation.disclosure.facts import EntityCount, ExternalWeights
from fedstat.federation.disclosure.row_checks import count_dominant_rows
from fedstat.federation.message import ArrayDeclaration, Request, aggregate
from fedstat.kernels.row_products import column_sums
from fedstat.typing import Bools, Floats

# ----------------------------------------------------------------------------------------------------
# The name of this family, and how one of its steps is asked for.

FAMILY = "vfem"
BLOCK, SQUARES = "block", "squares"
"""Columns that an institution opens for sums with what stays at the response holder."""
CROSS_STEPS = (
    "glm_information information joint_information "
    "glm_response_scores glm_scale_information glm_scores glm_scores_openly scores"
)
"""Steps that leave columns behind which are multiplied with those of others, in one of four ways."""
AFTER_INFORMATION = (
    "deal_product glm_curvature glm_curvature_openly glm_information glm_scale_curvature "
    "glm_scale_information multiply_columns release_columns share_product sketch"
)
"""Steps that stand before products of scores: the information with its products of columns."""


def vfem_request(site: str, step: str, session: str, text: str = "", **arrays: object) -> Request:
    """Address one step of this family."""
    return Request(site, FAMILY, step, {k: np.asarray(v) for k, v in arrays.items()}, session, text)


# ----------------------------------------------------------------------------------------------------
# Declarations of sums that leave an institution, with what counts the entities behind them.


def declare_sums(what: str, ndim: int = 1) -> ArrayDeclaration:
    """Declare sums over entities."""
    return aggregate(what, ndim, behind=(EntityCount,))


def declare_weighted_sums(what: str, ndim: int = 1) -> ArrayDeclaration:
    """Declare sums over entities with weights that came in, which could single out a row."""
    return aggregate(what, ndim, behind=(EntityCount, ExternalWeights))


# ----------------------------------------------------------------------------------------------------
# Weighted sums of rows by group, without those that would disclose a few.


def safe_weights(weights: Floats, groups: Bools, least: int) -> list[Floats]:
    """Weights w of all rows, and of the rows of each group: 1 + K of (n,).

    A sum to which fewer than `least` rows contribute nearly all, or all but so few, would disclose them: the
    few count as zero, their expectation.
    """
    out = [weights]
    for group in groups.T:
        # The sum over the others is the difference to the total, and is as good as released.
        few, nearly_all = (count_dominant_rows(weights[part]) < least for part in (group, ~group))
        if few or nearly_all:
            out.append(weights if nearly_all and group.any() else np.zeros_like(weights))
        else:
            out.append(weights * group)
    return out


def safe_weighted_sums(U: Floats, weights: Floats, groups: Bools, least: int) -> Floats:
    """Return sums of w u over all rows, and over the rows of each group: (1 + K, p); see above."""
    return np.array([column_sums(U, w) for w in safe_weights(weights, groups, least)])
