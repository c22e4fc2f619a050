"""Scores of one institution's rows at coefficients of boosting, for losses that are no squares.

Released, for each of P paths, that of all rows or without a fold: `score`, products of the learners' columns
with the slopes of the loss in the basis along the response, (P, K, L); `loss`, summed over the rows of the
path and over those of the fold left out, (P, 2); `weight`, the sum of bounds of the curvature, (P,).

What the scores of several exchanges tell together: products of the columns with every combination of slopes.
A coordinator that sends other coefficients than those of a path could have slopes that differ in one row, and
so, of the difference of two scores, that row. Slopes of a session are therefore kept, and what they change by
is held against the rule on weights, and their combinations against that on shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedstat import records
from fedstat.errors import MessageError
from fedstat.federation.crypto.masks import hides
from fedstat.federation.design.row_steps import OPEN_ROWS, OpenRows, rows_of
from fedstat.federation.door.facts import (
    DivisionOfRows,
    FactorAsked,
    FactorsAsked,
    RowCount,
    SummedColumns,
    WorkingWeights,
)
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths, check_room
from fedstat.models.boost.learning.columns import CurvesAsked, smooth_asked
from fedstat.models.boost.learning.losses import LossSpec
from fedstat.models.boost.learning.responses import EvenResponse
from fedstat.models.boost.steps import ASKED, STEPS, MadeColumns, deal, tell_summed
from fedstat.typing import Array, Floats, Ints

FLAT = 1e-4
"""Mean weight beside the largest that a value can have below which a loss is flat at nearly all rows."""


@dataclass(slots=True, eq=False)
class ScoredRows:
    """Columns that scores are summed over, the fold of each row, the number of columns and one.

    `slopes` (P, n, L) are the latest that scores were told of, `changes` (P, R, n, L) what led to these, and
    `told` the scores.
    """

    made: MadeColumns
    fold: Ints
    width: int
    slopes: Floats = field(default_factory=lambda: np.zeros((0, 0, 0)))
    changes: Floats = field(default_factory=lambda: np.zeros((0, 0, 0, 0)))
    told: dict[str, Array] = field(default_factory=dict)


def start_scores(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Sum products of learners' columns, and the response, over the open rows, by fold; scores follow.

    Released are `gram` and `totals` as by :func:`fedstat.models.boost.steps.sum_curves`.
    """
    asked = records.from_json(CurvesAsked, text, f"{data.name}: the question about curves")
    if asked.loss is None:
        raise MessageError(f"{data.name}: scores belong to a loss that is no square")
    opened, n = rows_of(state), state.entities
    state.tell(smooth_asked(asked.learners), *_jumps(opened, asked.loss))
    made, fold = MadeColumns(data, opened, asked), deal(n, asked, data.name)
    made.hold(n)
    tell_summed(state, made, fold)
    sums: dict[str, Array] = {}
    first = 0
    for parts, response in made.blocks():
        assert isinstance(response, EvenResponse)
        asked.loss.check_response(data.name, response.Y)
        part = response.products(np.column_stack(parts), fold[first : first + len(response)], asked.folds)
        sums = {name: sums.get(name, 0.0) + part[name] for name in ("gram", "totals")}
        first += len(response)
        width = 1 + sum(one.shape[1] for one in parts)
    rows = ScoredRows(made, fold, width)
    if "boost" in state:  # slopes that this session was told of stay in memory
        earlier: ScoredRows = state.look_at("boost")
        if earlier.changes.shape[2] == n:
            rows.slopes, rows.changes = earlier.slopes, earlier.changes
    state.keep("boost", rows, n)
    return sums, ""


def _jumps(opened: OpenRows, loss: LossSpec) -> Iterator[FactorsAsked]:
    """Tell of a loss that compares the response with numbers of the asker's making."""
    if loss.entry.bound == 0.0:
        columns = opened.question.response_columns or (opened.question.curve_response,)
        yield FactorsAsked([FactorAsked(f"{columns[0]} > predictor", columns, written=True)])


def score_curves(
    data: SiteData, state: State, coef: Floats, offset: Floats, left_out: Ints
) -> dict[str, Array]:
    """Sum scores and losses over the rows, for P paths.

    `coef` (P, K, L) are coefficients of the columns in the basis along the response, `offset` (P, G) the
    predictors to start from, `left_out` (P,) the fold that takes no part in a path, -1 for none. ``inside``
    tells whether all numbers are finite; sums are zero where they are not. ``spread`` tells whether slopes of
    more than a few rows have changed since the last answer, and weights are not those of a few; where it is
    not so, the last answer is given again, zeros at first.
    """
    asked = state.use("boost", ScoredRows, "no scores were started in this session; ask 'start_scores' first")
    loss, n = asked.made.asked.loss, len(asked.fold)
    assert loss is not None
    P, K, L = coef.shape
    if not len(asked.changes):
        asked.changes, asked.slopes = np.zeros((P, 0, n, L)), np.zeros((P, n, L))
    check_lengths(data.name, coef=(coef, len(asked.slopes)))
    check_lengths(data.name, offset=(offset, P), left_out=(left_out, P))
    check_room(data.name, P * n * L, n * (K + L))
    if not ((left_out >= -1) & (left_out < asked.made.asked.folds)).all():
        raise MessageError(f"{data.name}: a path leaves out a fold that there is not")
    slopes, weights = np.empty((P, n, L)), np.empty((P, n))
    score, losses, weight = np.zeros((P, K, L)), np.zeros((P, 2)), np.zeros(P)
    first = 0
    for parts, response in asked.made.blocks():
        assert isinstance(response, EvenResponse)
        Z, Y, basis = np.column_stack(parts), response.Y, response.basis
        rows = slice(first, first + len(Y))
        for p in range(P):
            within = asked.fold[rows] != left_out[p]
            with np.errstate(over="ignore", invalid="ignore"):
                f = offset[p] + Z @ coef[p] @ basis.T
                u = np.where(within[:, None], loss.slope(Y, f), 0.0) @ basis
                value, bent = loss.value(Y, f).sum(axis=1), loss.weight(Y, f).sum(axis=1)
                score[p] += Z.T @ u
            losses[p] += value[within].sum(), value[~within].sum()
            weight[p] += bent[within].sum()
            slopes[p, rows], weights[p, rows] = u, np.where(within, bent, 0.0)
        first += len(Y)
    slopes, weights = slopes[:, :first], weights[:, :first]
    answer = {"score": score, "loss": losses, "weight": weight}
    nothing = {name: np.zeros_like(array) for name, array in answer.items()}
    inside = all(bool(np.isfinite(array).all()) for array in (*answer.values(), slopes))
    if not inside:
        slopes, weights, answer = np.zeros_like(slopes), np.ones_like(weights), nothing
    elif loss.entry.bound and (weights.mean(axis=1) < FLAT * loss.entry.bound * offset.shape[1]).any():
        # Scores of a flat loss are those of the rows on one side of the coefficients' cut.
        weights[:, 0], weights[:, 1:] = 1.0, 0.0
    again = asked.told or nothing
    _tell(state, asked, slopes, weights, {"inside": np.array(True), "spread": np.array(False), **again})
    asked.told = answer
    return {"inside": np.array(inside), "spread": np.array(True), **answer}


def _tell(
    state: State, asked: ScoredRows, slopes: Floats, weights: Floats, instead: Mapping[str, Array]
) -> None:
    """Tell whose slopes have changed, and what all that were told of single out; keep the change."""
    change = slopes - asked.slopes
    sizes = np.sqrt((change**2).sum(axis=2))
    state.tell(WorkingWeights(lambda: np.concatenate([sizes, weights]), instead=instead))
    kept = np.concatenate([asked.changes, change[:, None]], axis=1)  # (P, R, n, L)
    P, R, n, L = kept.shape
    hidden = hides(len(state.hidden_among))
    if hidden:  # what leaves is of all sites: a path and a spline at a time are held against this site's rows
        columns = [kept[p, :, :, j].T for p in range(P) for j in range(L)]
    else:
        columns = [kept.transpose(2, 0, 1, 3).reshape(n, P * R * L)]
    state.tell(RowCount(n, R if hidden else asked.width + P * R * L))
    together = np.zeros(n, dtype=np.int64)
    state.tell(*(SummedColumns(one, together) for one in columns))
    asked.slopes, asked.changes = slopes, kept


BEHIND = (*OPEN_ROWS, SummedColumns, DivisionOfRows, WorkingWeights)


def _summed(what: str, ndim: int = 2) -> Declared:
    return Declared("aggregate", what, ndim, maskable=True, wide=True, behind=BEHIND)


SCORE_STEPS: Mapping[str, Step] = {
    "start_scores": Step(
        start_scores,
        gives={name: STEPS["sum_curves"].gives[name] for name in ("gram", "totals")},
        text_in=ASKED,
    ),
    "score_curves": Step(
        score_curves,
        {
            "coef": Declared("aggregate", "coefficients of every path", 3, common=True),
            "offset": Declared("aggregate", "predictors from which paths start", 2, common=True),
            "left_out": Declared("control", "fold that a path leaves out", dtype="int64", common=True),
        },
        {
            "inside": Declared("control", "whether all numbers are finite", 0, maskable=True),
            "spread": Declared("control", "whether more than a few rows weigh", 0, maskable=True),
            "score": _summed("products of the learners' columns with slopes of the loss", 3),
            "loss": _summed("loss of the rows of each path, and of those left out"),
            "weight": _summed("curvature of the loss", 1),
        },
    ),
}
ORDER: Mapping[str, str] = {"score_curves": "score_curves start_scores"}
"""Which steps stand directly before which; sums of products may be asked for at any time."""
