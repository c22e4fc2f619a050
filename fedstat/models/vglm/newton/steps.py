"""Steps of Newton's method at an institution: linear predictors, scores, weighted sums of products."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.door.facts import Entities, GivenWeights, GroupSums
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.kernels.rows import column_sums, gram, row_dots
from fedstat.models.vertical.exchange.staged import require_groups, staged_block
from fedstat.models.vertical.prediction.steps import PREDICTOR
from fedstat.typing import Array, Floats

WEIGHTED = "weighted"


def linear_predictor(data: SiteData, state: State, beta: Floats) -> dict[str, Array]:
    """Linear predictor of the block at coefficients of standardised columns, one value per entity."""
    staged = staged_block(state)
    check_lengths(data.name, beta=(beta, staged.X.shape[1]))
    return {"linear_predictor": row_dots(staged.X, beta)}


def sum_scores(data: SiteData, state: State, residual: Floats) -> dict[str, Array]:
    """Sum the columns times the residuals: (p,)."""
    staged = staged_block(state)
    check_lengths(data.name, residual=(residual, len(staged.X)))
    return {"scores": column_sums(staged.X, residual)}


def weigh(data: SiteData, state: State, weight: Floats) -> dict[str, Array]:
    """Take row weights; release the weighted sums of the columns (p,) and of their products (p, p)."""
    staged = staged_block(state)
    check_lengths(data.name, weight=(weight, len(staged.X)))
    if not (np.isfinite(weight).all() and (weight >= 0.0).all()):
        raise MessageError(f"{data.name}: array 'weight' must be finite and not negative")
    every, p = np.zeros(len(weight), dtype=np.int64), staged.X.shape[1]
    # A fold's Gram has weights of zero elsewhere, and rests on the fold.
    of_fold = np.where(weight > 0.0, 0, -1)
    require_groups(data.name, of_fold, 1, p * (p + 1), p)
    state.tell(GivenWeights(weight), GroupSums(every, p, staged.grams + 1), GroupSums(of_fold, p))
    state.rest_on(int(np.count_nonzero(weight)))
    staged.weight, staged.grams = weight, staged.grams + 1
    return {"sums": column_sums(staged.X, weight), "gram": gram(staged.X, weight)}


def weighted_columns(data: SiteData, state: State, whom: str) -> Floats:
    """Columns times the root of the latest weights, which are multiplied with another institution's."""
    staged = staged_block(state)
    if not len(staged.weight):
        raise MessageError(f"{data.name}: has no columns '{WEIGHTED}' in this session")
    return np.asarray(np.sqrt(staged.weight)[:, None] * staged.X)


def weights_released(data: SiteData, state: State) -> tuple[Floats, int]:
    """Return the latest weights, and how many matrices of products with weights were released."""
    staged = staged_block(state)
    return staged.weight, max(staged.grams, 1)


RESIDUAL = Declared("per entity", "residual of the response", dtype="float64", weighs="residuals")
WEIGHED = (Entities, GivenWeights, GroupSums)
STEPS: Mapping[str, Step] = {
    "linear_predictor": Step(
        linear_predictor,
        {"beta": Declared("control", "coefficients of standardised columns", dtype="float64")},
        {"linear_predictor": PREDICTOR},
    ),
    "sum_scores": Step(
        sum_scores,
        {"residual": RESIDUAL},
        {
            "scores": Declared(
                "aggregate", "sums of the columns times residuals", behind=(Entities, GivenWeights)
            )
        },
    ),
    "weigh": Step(
        weigh,
        {
            "weight": Declared(
                "per entity", "weight of each entity in a Newton step", dtype="float64", weighs="weights"
            )
        },
        {
            "sums": Declared("aggregate", "weighted sums of the columns", behind=WEIGHED),
            "gram": Declared("aggregate", "weighted sums of products of the columns", 2, behind=WEIGHED),
        },
    ),
}
