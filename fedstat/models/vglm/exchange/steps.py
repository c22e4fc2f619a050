"""What an institution computes for a vertical generalised linear model.

Columns are standardised at their institution, over its entities of the fit. Released are sums of columns, and
of products of the institution's own columns, by fold, missing pattern or with row weights; products with
another institution's columns are the matter of :mod:`fedstat.federation.rounds.product_steps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedstat.errors import EstimationError, MessageError
from fedstat.federation.design.by_columns import block_of
from fedstat.federation.door.facts import DivisionOfRows, Entities, GivenWeights, GroupSums
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.federation.rounds.product_steps import Part, check_positions, product_steps
from fedstat.kernels.rows import column_sums, gram, row_dots
from fedstat.models.vglm.response.steps import (
    RESPONSE,
    require_groups,
    response_of,
)
from fedstat.typing import Array, Bools, Floats, Ints

BLOCK, WEIGHTED, SUMMED = "block", "weighted", "vglm rows summed"
CONSTANT = 1e-12
"""Standard deviation, relative to the mean, below which a column counts as constant."""


@dataclass(slots=True)
class Staged:
    """A client's columns during a fit.

    Parameters
    ----------
    X : (n, p) array
        Standardised columns.
    shift, scale : (p,) arrays
        Their means and standard deviations in the units of the data.
    weight : (n,) array
        Latest row weights; empty before the first.
    keep : (n_seen,) array of bool
        Rows of the opened block that take part.
    grams : int
        Weighted Gram matrices that were released.
    """

    X: Floats
    shift: Floats
    scale: Floats
    weight: Floats
    keep: Bools
    grams: int = 0

    def among_all(self, code: Ints) -> Ints:
        """Bring groups of the entities of the fit to the rows of the block, -1 where they take no part."""
        out = np.full(len(self.keep), -1, dtype=np.int64)
        out[self.keep] = code
        return out


def staged_of(data: SiteData, state: State) -> Staged:
    """Return this fit's columns, or say that the fit was not started here."""
    if "vglm block" not in state:
        raise MessageError(f"{data.name}: this fit was not started here; ask 'stage_block' first")
    staged: Staged = state.use("vglm block")
    return staged


def stage_block(data: SiteData, state: State, keep: Bools) -> dict[str, Array]:
    """Standardise the columns of the entities of a fit; release their means and standard deviations.

    Parameters
    ----------
    keep : (n_seen,) bool
        Rows of the opened block that take part.
    """
    block = block_of(data, state)
    check_lengths(data.name, keep=(keep, len(block.X)))
    X = np.ascontiguousarray(block.X[keep])
    state.tell(Entities(len(X)), DivisionOfRows(SUMMED, np.where(keep, 0, -1)))
    shift, scale = X.mean(axis=0), X.std(axis=0)
    flat = scale <= CONSTANT * np.maximum(1.0, np.abs(shift))
    if flat.any():
        names = [name for name, bad in zip(block.spec.names, flat, strict=True) if bad]
        raise EstimationError(
            f"{data.name}: constant among the {len(X):,} entities of this fit: {', '.join(names)}; drop them"
        )
    state.keep("vglm block", Staged((X - shift) / scale, shift, scale, np.empty(0), keep), len(X))
    return {"units": np.array([shift, scale])}


def sum_products(data: SiteData, state: State, code: Ints, groups: Array) -> dict[str, Array]:
    """Sum the columns and their products by fold or missing pattern.

    Returns
    -------
    dict
        ``sums`` (G, p), ``grams`` (G, p, p), of standardised columns.
    """
    staged, G = staged_of(data, state), int(groups)
    X = staged.X
    check_lengths(data.name, code=(code, len(X)))
    require_groups(data.name, code, G)
    state.tell(GroupSums(code, X.shape[1]), DivisionOfRows(SUMMED, staged.among_all(code)))
    masks = [(code == g).astype(np.float64) for g in range(G)]
    return {
        "sums": np.array([column_sums(X, mask) for mask in masks]),
        "grams": np.array([gram(X, mask) for mask in masks]),
    }


def sum_with_response(
    data: SiteData, state: State, code: Ints, groups: Array, rows: Ints | None = None
) -> dict[str, Array]:
    """Sum products of the columns with the response of the same institution by fold or pattern: (G, p).

    Parameters
    ----------
    rows : (n_k,) array of int, optional
        Positions of the entities of the block among those of the response; by default they are the same.
    """
    staged, response, G = staged_of(data, state), response_of(data, state), int(groups)
    y = response.standardised
    if rows is not None:
        check_lengths(data.name, rows=(rows, len(staged.X)))
        check_positions(data.name, rows, len(y))
        y = y[rows]
    check_lengths(data.name, code=(code, len(staged.X)), response=(y, len(staged.X)))
    require_groups(data.name, code, G)
    state.tell(GroupSums(code, staged.X.shape[1]))
    return {"products": np.array([column_sums(staged.X, np.where(code == g, y, 0.0)) for g in range(G)])}


def linear_predictor(data: SiteData, state: State, beta: Floats) -> dict[str, Array]:
    """Linear predictor of the block at coefficients of standardised columns, one value per entity."""
    staged = staged_of(data, state)
    check_lengths(data.name, beta=(beta, staged.X.shape[1]))
    return {"linear_predictor": row_dots(staged.X, beta)}


def sum_scores(data: SiteData, state: State, residual: Floats) -> dict[str, Array]:
    """Sum the columns times the residuals: (p,)."""
    staged = staged_of(data, state)
    check_lengths(data.name, residual=(residual, len(staged.X)))
    return {"scores": column_sums(staged.X, residual)}


def weigh(data: SiteData, state: State, weight: Floats) -> dict[str, Array]:
    """Take row weights, and release the weighted sums of the columns and of their products.

    Returns
    -------
    dict
        ``sums`` (p,), ``gram`` (p, p).
    """
    staged = staged_of(data, state)
    check_lengths(data.name, weight=(weight, len(staged.X)))
    if not (np.isfinite(weight).all() and (weight >= 0.0).all()):
        raise MessageError(f"{data.name}: array 'weight' must be finite and not negative")
    every, p = np.zeros(len(weight), dtype=np.int64), staged.X.shape[1]
    # A fold's Gram has weights of zero elsewhere, and rests on the fold.
    of_fold = np.where(weight > 0.0, 0, -1)
    require_groups(data.name, of_fold, 1)
    state.tell(GivenWeights(weight), GroupSums(every, p, staged.grams + 1), GroupSums(of_fold, p))
    state.rest_on(int(np.count_nonzero(weight)))
    staged.weight, staged.grams = weight, staged.grams + 1
    return {"sums": column_sums(staged.X, weight), "gram": gram(staged.X, weight)}


def columns_of(data: SiteData, state: State, which: str) -> tuple[Floats, Floats | None]:
    """Columns that this institution multiplies with another's, at a mean square of one, and their units.

    Parameters
    ----------
    which : str
        "block", or "weighted" by the root of the latest weights, or the "response".
    """
    if which == RESPONSE:
        return response_of(data, state).standardised[:, None], None
    staged = staged_of(data, state)
    if which == BLOCK:
        return staged.X, None
    if which != WEIGHTED or not len(staged.weight):
        raise MessageError(f"{data.name}: has no columns '{which}' in this session")
    columns = np.sqrt(staged.weight)[:, None] * staged.X
    units = np.sqrt(np.mean(columns**2, axis=0))
    units[units == 0.0] = 1.0
    return columns / units, units


def behind_product(data: SiteData, state: State, part: Part, rows: Ints, group: Ints) -> GroupSums:
    """Tell what the products of some rows by group rest on; one of the columns may be the response."""
    require_groups(data.name, group, part.product.groups)
    columns = part.product.columns_a + part.product.columns_b - 1
    if part.columns != WEIGHTED:
        return GroupSums(group, columns)
    staged = staged_of(data, state)
    return GroupSums(group, columns, max(staged.grams, 1), staged.weight[rows])


CODE = Declared("presence", "fold or missing pattern of each entity", dtype="int64")
GROUPS = Declared("control", "number of folds or missing patterns", 0)
ROWS = Declared(
    "presence", "positions of the block's entities among those of the response", dtype="int64", optional=True
)
STEPS: Mapping[str, Step] = {
    "stage_block": Step(
        stage_block,
        {"keep": Declared("presence", "which of the client's entities take part", dtype="bool")},
        {
            "units": Declared(
                "aggregate",
                "means and standard deviations of the columns",
                2,
                behind=(Entities, DivisionOfRows),
            )
        },
    ),
    "sum_products": Step(
        sum_products,
        {"code": CODE, "groups": GROUPS},
        {
            "sums": Declared(
                "aggregate",
                "sums of the columns by fold or pattern",
                2,
                behind=(Entities, GroupSums, DivisionOfRows),
            ),
            "grams": Declared(
                "aggregate",
                "sums of products of the columns by fold or pattern",
                3,
                behind=(Entities, GroupSums, DivisionOfRows),
            ),
        },
    ),
    "sum_with_response": Step(
        sum_with_response,
        {"code": CODE, "groups": GROUPS, "rows": ROWS},
        {
            "products": Declared(
                "aggregate",
                "sums of products with the response by fold or pattern",
                2,
                behind=(Entities, GroupSums),
            )
        },
    ),
    "linear_predictor": Step(
        linear_predictor,
        {"beta": Declared("control", "coefficients of standardised columns", dtype="float64")},
        {
            "linear_predictor": Declared(
                "per entity", "linear predictor x'beta of the client's block", maskable=True
            )
        },
    ),
    "sum_scores": Step(
        sum_scores,
        {"residual": Declared("per entity", "residual of the response", dtype="float64", weighs="residuals")},
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
            "sums": Declared(
                "aggregate", "weighted sums of the columns", behind=(Entities, GivenWeights, GroupSums)
            ),
            "gram": Declared(
                "aggregate",
                "weighted sums of products of the columns",
                2,
                behind=(Entities, GivenWeights, GroupSums),
            ),
        },
    ),
    **product_steps(columns_of, behind_product),
}
