"""Steps of a site: sums of products by fold, and scores for losses other than squared error."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pandas as pd

from fedstat import codec
from fedstat.errors import DesignError, MessageError, PolicyError
from fedstat.federation.crypto.masks import hides
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, OpenRows, rows_of
from fedstat.federation.design.site_rows import CompleteRows
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, check_allocation, check_lengths
from fedstat.federation.tables.curves import curves_of
from fedstat.models.boost.learning.columns import (
    CurveSumsRequest,
    all_columns,
    learner_columns,
    smooth_request,
    time_basis,
)
from fedstat.models.boost.learning.learners import Learner
from fedstat.models.boost.learning.losses import LossSpec
from fedstat.models.boost.learning.moments import IrregularResponse, RegularResponse, Response
from fedstat.models.boost.learning.varying import (
    MEANS,
    VARYING,
    ColumnsAlong,
    rows_at_once,
    varying_of,
    varying_products,
)
from fedstat.typing import Array, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# A site's sums, from which all of boosting follows.
#
# Released by fold: `gram`, the upper triangle of the products of all learners' columns, (F, K (K + 1) / 2);
# `score`, their products with the response in its basis, (F, K, L); `spread`, the products of the latter, (F,
# L (L + 1) / 2); `totals`, sums of the response at each of its points, and of its square, (F, G + 1).
#
# If curves of the response were measured at different points: `gram` and `score`; `banded`, (F, r, K (K + 1)
# / 2), the products of `gram` weighted by the sums of products of overlapping splines over a curve's points;
# `totals`, (F, 2), points and sums of squares.
#
# If columns of learners vary along the response: `varying_gram`, (F, M (M + 1) / 2), the products of these
# columns times their own splines along it, over rows and points; `varying_cross`, (F, K, L, M), their
# products with the other columns times the response's basis; `varying_score`, (F, M), with the response; at
# common points `varying_means`, (F, G, k), the sums of the columns without splines.

FAMILY = "boost"
RESPONSE = "response"
POINTS = "points of the response, which Curve(..., max_gap=0) makes those of all"
BLOCK = 4096
"""Number of rows whose curves are in memory at once."""
MOST_HELD = 2**25
"""Largest number of values of learners' columns and responses that are kept for the next pass."""


SUM_FACTS = (*OPEN_ROWS, facts.SummedColumns, facts.SummedProducts, facts.RowGroups)
ASKED = ArrayDeclaration("control", "learners, with the ends of their bases; folds", common=True)


def _sum(what: str, ndim: int = 2, *more: type) -> ArrayDeclaration:
    return ArrayDeclaration("aggregate", what, ndim, maskable=True, wide=True, behind=(*SUM_FACTS, *more))


COMMON: Mapping[str, ArrayDeclaration] = {
    "gram": _sum("products of the learners' columns, by fold"),
    "score": _sum("their products with the response in its basis, by fold", 3),
    "spread": _sum("products of the response in its basis, by fold"),
    "totals": _sum("sums of the response at its points, and of its square, by fold"),
}
OWN: Mapping[str, ArrayDeclaration] = {
    "gram": _sum("products of the learners' columns, by fold", 2, facts.UnequalWeights),
    "banded": _sum("the same, weighted by pairs of splines over a curve's points", 3, facts.UnequalWeights),
    "score": _sum("their products with the response in its basis, by fold", 3, facts.UnequalWeights),
    "totals": _sum("points of the response, and sums of its square, by fold", 2, facts.UnequalWeights),
    "filled": ArrayDeclaration(
        "aggregate",
        "whether points that few curves lack are interpolated",
        0,
        dtype="bool",
        behind=(facts.UnequalWeights,),
        without_terms="one bit: whether points that few curves lack are interpolated",
    ),
}


def _along(*more: type) -> dict[str, ArrayDeclaration]:
    return {
        VARYING[0]: _sum("products of columns that vary along the response, by fold", 2, *more),
        VARYING[1]: _sum("their products with the other columns times splines along it, by fold", 4, *more),
        VARYING[2]: _sum("their products with the response, by fold", 2, *more),
    }


MEAN = {MEANS: _sum("sums of what these columns are made of, by point and fold", 3)}


@step(FAMILY, releases=COMMON, requests=ASKED)
def sum_curves(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Sum products of learners' columns and response over the open rows, by fold."""
    return _sum_by_fold(data, state, text, uneven=False)


@step(FAMILY, releases=OWN, requests=ASKED, name="sum_uneven_curves")
def sum_irregular_curves(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Sum the same if curves of the response have different points, or lack some."""
    return _sum_by_fold(data, state, text, uneven=True)


@step(FAMILY, releases={**COMMON, **_along(), **MEAN}, requests=ASKED)
def sum_curves_along(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Sum the products of :func:`sum_curves`, and of columns that vary along the response."""
    return _sum_by_fold(data, state, text, uneven=False, along=True)


@step(
    FAMILY, releases={**OWN, **_along(facts.UnequalWeights)}, requests=ASKED, name="sum_uneven_curves_along"
)
def sum_irregular_curves_along(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Sum the products of :func:`sum_irregular_curves`, and of columns that vary along the response."""
    return _sum_by_fold(data, state, text, uneven=True, along=True)


def _sum_by_fold(
    data: SiteData, state: State, text: str, *, uneven: bool, along: bool = False
) -> tuple[dict[str, Array], str]:
    request = codec.from_json(CurveSumsRequest, text, f"{data.name}: the request for sums of curves")
    if uneven and request.time is None:
        raise MessageError(f"{data.name}: the request for sums of curves has no basis along their points")
    if along != any(one.varying for one in request.learners) or (along and request.time is None):
        raise MessageError(f"{data.name}: the request for sums of curves belongs to other learners")
    state.report(smooth_request(request.learners))
    made = LearnerColumns(data, rows_of(state), request, uneven)
    n = state.entities
    made.hold(n)
    fold = deal(n, request, data.name, _together(data, state, made.opened, request))
    if along and uneven:
        _declare_weights(state, made, fold)
    elif uneven:
        made = fill_few(state, made, fold)
    declare_summed_columns(state, made, fold)
    sums: dict[str, Array] = {}
    first = 0
    for parts, response in made.blocks():
        part = response.products(np.column_stack(parts), fold[first : first + len(response)], request.folds)
        sums = {name: sums.get(name, 0.0) + array for name, array in part.items()}
        first += len(response)
    if along:
        sums |= _sum_along(made, fold)
    return sums | ({"filled": np.array(made.filled)} if uneven else {}), ""


def fill_few(state: State, made: LearnerColumns, fold: Ints) -> LearnerColumns:
    """Fill short gaps of the response where too few curves have gaps for sums with their weights.

    Every curve with a gap has weights of its own. Weights that few curves have would reveal these curves;
    filled curves have the weights of all others.
    """
    try:
        _declare_weights(state, made, fold)
    except PolicyError:
        made = replace(made, filled=True, held=())
        made.hold(len(fold))
        _declare_weights(state, made, fold)
    return made


def _sum_along(made: LearnerColumns, fold: Ints) -> dict[str, Array]:
    """Sum products of columns that vary along the response."""
    request, first = made.requested, 0
    sums: dict[str, Array] = {}
    for frame, coded, columns in made.along(varying_of(request.learners)):
        Z = all_columns(request.learners, frame, coded, made.opened.term_names)
        own = fold[first : first + len(Z)]
        part = varying_products(columns, Z, own, request.folds, means=not made.uneven)
        sums = {name: sums.get(name, 0.0) + array for name, array in part.items()}
        first += len(Z)
    return sums


def _together(data: SiteData, state: State, opened: OpenRows, request: CurveSumsRequest) -> Ints | None:
    """Return the group of each row, (n,), by the column whose rows share a fold; None for none."""
    if not request.together:
        return None
    if request.together not in opened.question.labels:
        raise MessageError(f"{data.name}: the model did not open column '{request.together}' as a label")
    found = pd.concat([rows.frame[request.together] for rows, _ in opened.chunks()])
    code = np.asarray(pd.factorize(found)[0], dtype=np.int64)
    if not len(opened.used):  # a dry run has a few synthetic labels
        return None
    if code.max() + 1 < request.folds:
        raise DesignError(
            f"{data.name}: column '{request.together}' has fewer than {request.folds} different values, so "
            f"some folds would be empty. Use fewer folds: folds=('{request.together}', 2)"
        )
    # A fold whose rows are those of few persons has sums over few persons, however many their rows are.
    people = (int(code.max()) + 1) // request.folds
    state.report(facts.ClusterCounts(request.together, people, remedy="use fewer folds"))
    return code


def deal(n: int, request: CurveSumsRequest, site: str, together: Ints | None = None) -> Ints:
    """Return the fold of each row, (n,), drawn from the seed and the name of the site.

    Rows of one group of `together` (n,) are in one fold.
    """
    if together is not None:
        groups = int(together.max()) + 1
        return deal(groups, request, site)[together]
    own = int.from_bytes(hashlib.sha256(site.encode()).digest()[:8], "big")
    random = np.random.default_rng([request.seed, own])
    return np.asarray(random.permutation(np.arange(n) % request.folds), dtype=np.int64)


def blocks(opened: OpenRows, curves: Sequence[str]) -> Iterator[tuple[CompleteRows, Floats]]:
    """Complete rows with some curves, and their coded terms in the units of the data, (m, p), by blocks."""
    first = int(opened.question.intercept)
    for rows, X in opened.chunks():
        frame = rows.frame[list(curves)]
        for start in range(0, len(X), BLOCK):
            part = slice(start, start + BLOCK)
            raw = opened.in_units(X[part])
            complete = np.ones(len(raw), dtype=bool)
            yield CompleteRows(frame.iloc[part], complete, rows.y[part], None, {}), raw[:, first:]


@dataclass(slots=True, eq=False)
class LearnerColumns:
    """Columns of all learners and the response, by blocks of rows.

    They are `held` after the first pass unless there are too many; otherwise they are computed in every pass.
    Short gaps of the response may be `filled`.
    """

    data: SiteData
    opened: OpenRows
    requested: CurveSumsRequest
    uneven: bool = False
    filled: bool = False
    held: Sequence[tuple[list[Floats], Response]] = ()

    def hold(self, n: int) -> None:
        """Compute the columns of n rows once, unless they are too many."""
        held: list[tuple[list[Floats], Response]] = []
        for parts, response in self.blocks():
            held.append((parts, response))
            if n * (sum(Z.shape[1] for Z in parts) + response.width) > MOST_HELD:
                return
        self.held = held

    def blocks(self) -> Iterator[tuple[list[Floats], Response]]:
        """Columns of all learners."""
        if self.held:
            yield from self.held
            return
        for rows, coded in blocks(self.opened, self.opened.question.read_curves):
            parts = [
                learner_columns(one, rows.frame, coded, self.opened.term_names)
                for one in self.requested.learners
            ]
            yield parts, self._of_rows(rows)

    def of(self, p: int) -> Iterator[Floats]:
        """Columns of one learner."""
        learner = self.requested.learners[p]
        if learner.varying:  # sums of a row over its points
            yield from (columns.by_row() for _, _, columns in self.along([learner]))
            return
        if self.held:
            yield from (parts[p] for parts, _ in self.held)
            return
        for rows, coded in blocks(self.opened, [learner.of] if learner.of_curve else []):
            yield learner_columns(learner, rows.frame, coded, self.opened.term_names)

    def along(self, learners: Sequence[Learner]) -> Iterator[tuple[pd.DataFrame, Floats, ColumnsAlong]]:
        """Curves and coded terms of rows, and columns of learners that vary along the response."""
        response = self.opened.question.curve_response
        for rows, coded in blocks(self.opened, self.opened.question.read_curves):
            step = rows_at_once(learners, curves_of(rows.frame[response]).values.shape[1])
            for start in range(0, len(coded), step):
                part = slice(start, start + step)
                frame = rows.frame.iloc[part]
                yield frame, coded[part], ColumnsAlong.of(learners, frame, response, self.requested)

    def side_by_side(self) -> Iterator[Floats]:
        """Yield the columns of all learners, and what a row adds up to over the response, of all rows."""
        columns = [self.of(p) for p in range(len(self.requested.learners))]
        # One by one: of learners that vary along the response the blocks are shorter.
        yield np.column_stack([np.concatenate([*one]) for one in (*columns, self.scores())])

    def responses(self) -> Iterator[Response]:
        """Responses."""
        if self.held:
            yield from (response for _, response in self.held)
            return
        for rows, _ in blocks(self.opened, self.opened.question.read_curves[:1]):
            yield self._of_rows(rows)

    def scores(self) -> Iterator[Floats]:
        """Products of the response with its basis."""
        return (response.scores for response in self.responses())

    def _of_rows(self, rows: CompleteRows) -> Response:
        if self.requested.time is None:
            return RegularResponse(rows.y[:, None], time_basis(None, np.zeros(1)))
        curves = curves_of(rows.frame[self.opened.question.curve_response])
        if self.uneven:
            offset = None if self.requested.offset is None else np.array(self.requested.offset)
            if self.filled:
                curves = curves.filled()
            return IrregularResponse.of(curves, self.requested.time, offset)
        if curves.gaps:
            raise DesignError(
                f"{self.data.name}: curves of the response were not measured at the same points, but the "
                "request assumes that they were; make the partition and the model again"
            )
        return RegularResponse(curves.values, time_basis(self.requested.time, curves.grid))


def declare_summed_columns(state: State, made: LearnerColumns, fold: Ints) -> None:
    """Return facts behind the sums: rows for the columns of all learners, the rows they single out, folds.

    Sums that at least three sites mask add up to those over all rows, so that columns of one learner at a
    time are checked against a site's own rows. Unmasked sums are checked for all columns together, by fold.
    Masks do not hide the weights of curves: if points differ by site, the sums with different weights can be
    solved for every site's own.
    """
    n, masked, request = len(fold), hides(len(state.masked_among)) and not made.uneven, made.requested
    columns: list[tuple[str, Callable[[], Iterator[Floats]]]] = [
        (one.label, partial(made.of, p)) for p, one in enumerate(request.learners)
    ]
    columns.append((RESPONSE, made.scores))
    width, sizes, names = 1, [], list[str]()
    for label, own in columns:
        held = list(own())  # one learner at a time
        k = held[0].shape[1]
        width += k if label != RESPONSE else 0
        sizes.append(_size(held))
        scaled = [Z / sizes[-1] for Z in held]
        names += [f"{label}[{j}]" for j in range(k)]
        if masked:
            state.report(facts.DesignDirections(scaled.__iter__, n, names[-k:]))
        state.report(*(facts.SummedColumns(Z) for Z in scaled))
    for one in varying_of(request.learners):
        state.report(*(facts.SummedColumns(np.sqrt(found.by_row(2))) for _, _, found in made.along([one])))
    smallest = int(np.bincount(fold, minlength=request.folds).min())
    state.report(facts.RowCount(smallest, 0 if masked else width))
    if not masked:
        size = np.concatenate(sizes)
        all_made = partial(_side_by_side, [own for _, own in columns], size)
        state.report(facts.DesignDirections(all_made, n, names))
    rows = np.flatnonzero(_used(made.opened))
    state.report(facts.SummedProducts(made.side_by_side, names, rows, code=fold))
    state.report(facts.RowGroups("", fold, rows))


def _declare_weights(state: State, made: LearnerColumns, fold: Ints) -> None:
    """Declare the sites whose curves have different weights: other weights cancel."""
    width = 1 + sum(next(made.of(p)).shape[1] for p in range(len(made.requested.learners)))
    parts = [(one.weights, one.uneven) for one in made.responses() if isinstance(one, IrregularResponse)]
    weights, n = [W for W, _ in parts], len(fold)
    r, size = weights[0].shape[1], _size(weights)
    scaled = [W / size for W in weights]
    uneven = np.concatenate([one for _, one in parts])
    by_fold = np.bincount(fold[: len(uneven)][uneven], minlength=made.requested.folds)
    # A dry run has fewer synthetic rows.
    fewest = int(min((count for count in by_fold if count), default=0) * n // max(len(uneven), 1))
    state.report(facts.UnequalWeights(fewest, width, r + 1))
    state.report(facts.DesignDirections(scaled.__iter__, n, [POINTS] * r))
    state.report(*(facts.SummedColumns(W) for W in scaled))


def _side_by_side(made: Sequence[Callable[[], Iterator[Floats]]], size: Floats) -> Iterator[Floats]:
    for parts in zip(*(columns() for columns in made), strict=True):
        yield np.column_stack(parts) / size


def _used(opened: OpenRows) -> Array:
    """Return the complete rows of the table; in a dry run, all synthetic rows."""
    return opened.used if len(opened.used) else np.concatenate([rows.complete for rows, _ in opened.chunks()])


def _size(blocks: Sequence[Floats]) -> Floats:
    """Root mean square of every column over all blocks; one where it is zero."""
    squares = np.sum([(Z * Z).sum(axis=0) for Z in blocks], axis=0)
    return np.where(squares > 0.0, np.sqrt(squares / sum(map(len, blocks))), 1.0)


# ----------------------------------------------------------------------------------------------------
# Scores of a site's rows at coefficients of boosting, for losses other than squares.
#
# Released for each of P paths, over all rows or without a fold: `score`, products of the learners' columns
# with the slopes of the loss in the basis along the response, (P, K, L); `loss`, summed over the rows of the
# path and over those of the fold left out, (P, 2); `weight`, the sum of bounds of the curvature, (P,).
#
# The scores of several exchanges together reveal products of the columns with every combination of slopes. A
# coordinator that sends coefficients that do not belong to a path could obtain slopes that differ in one row,
# and the difference of two scores would be that row. Slopes of a session are therefore kept. Their changes
# are checked by the rule on weights, their combinations by the rule on shares.

FLAT = 1e-4
"""Ratio of the mean weight to the largest possible one below which a loss is flat at nearly all rows."""


@dataclass(slots=True, eq=False)
class ScoredRows:
    """Columns that scores are summed over, the fold of each row, the number of columns and one.

    `slopes` (P, n, L) are those of the latest released scores, `changes` (P, R, n, L) the steps that led to
    them, and `reported` the scores.
    """

    made: LearnerColumns
    fold: Ints
    width: int
    slopes: Floats = field(default_factory=lambda: np.zeros((0, 0, 0)))
    changes: Floats = field(default_factory=lambda: np.zeros((0, 0, 0, 0)))
    reported: dict[str, Array] = field(default_factory=dict)


@step(FAMILY, releases={name: COMMON[name] for name in ("gram", "totals")}, requests=ASKED)
def start_scores(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Sum products of learners' columns, and the response, over the open rows, by fold, before scores.

    It releases `gram` and `totals` as :func:`fedstat.models.boost.steps.sum_curves`.
    """
    request = codec.from_json(CurveSumsRequest, text, f"{data.name}: the request for sums of curves")
    if request.loss is None:
        raise MessageError(f"{data.name}: scores need a loss other than squares")
    opened, n = rows_of(state), state.entities
    state.report(smooth_request(request.learners), *_jumps(opened, request.loss))
    made = LearnerColumns(data, opened, request)
    fold = deal(n, request, data.name, _together(data, state, opened, request))
    made.hold(n)
    declare_summed_columns(state, made, fold)
    sums: dict[str, Array] = {}
    first = 0
    for parts, response in made.blocks():
        assert isinstance(response, RegularResponse)
        request.loss.check_response(data.name, response.Y)
        part = response.products(np.column_stack(parts), fold[first : first + len(response)], request.folds)
        sums = {name: sums.get(name, 0.0) + part[name] for name in ("gram", "totals")}
        first += len(response)
        width = 1 + sum(one.shape[1] for one in parts)
    rows = ScoredRows(made, fold, width)
    if "boost" in state:  # slopes that this session has released stay in memory
        earlier: ScoredRows = state.look_at("boost")
        if earlier.changes.shape[2] == n:
            rows.slopes, rows.changes = earlier.slopes, earlier.changes
    state.keep("boost", rows, n)
    return sums, ""


def _jumps(opened: OpenRows, loss: LossSpec) -> Iterator[facts.FactorsRequested]:
    """Return facts about a loss that compares the response with numbers chosen by the analyst."""
    if loss.entry.bound == 0.0:
        columns = opened.question.response_columns or (opened.question.curve_response,)
        yield facts.FactorsRequested(
            [facts.FormulaFactor(f"{columns[0]} > predictor", columns, written=True)]
        )


SCORE_FACTS = (*OPEN_ROWS, facts.SummedColumns, facts.RowGroups, facts.WorkingWeights)


def _summed(what: str, ndim: int = 2) -> ArrayDeclaration:
    return ArrayDeclaration("aggregate", what, ndim, maskable=True, wide=True, behind=SCORE_FACTS)


@step(
    FAMILY,
    "score_curves start_scores",
    takes={
        "coef": ArrayDeclaration("aggregate", "coefficients of every path", 3, common=True),
        "offset": ArrayDeclaration("aggregate", "predictors from which paths start", 2, common=True),
        "left_out": ArrayDeclaration("control", "fold that a path leaves out", dtype="int64", common=True),
    },
    releases={
        "inside": ArrayDeclaration("control", "whether all numbers are finite", 0, maskable=True),
        "spread": ArrayDeclaration("control", "whether more than a few rows weigh", 0, maskable=True),
        "score": _summed("products of the learners' columns with slopes of the loss", 3),
        "loss": _summed("loss of the rows of each path, and of those left out"),
        "weight": _summed("curvature of the loss", 1),
    },
)
def score_curves(
    data: SiteData, state: State, coef: Floats, offset: Floats, left_out: Ints
) -> dict[str, Array]:
    """Sum scores and losses over the rows, for P paths.

    `coef` (P, K, L) are coefficients of the columns in the basis along the response, `offset` (P, G) the
    initial predictors, `left_out` (P,) the fold that takes no part in a path, -1 for none. ``inside`` is
    whether all numbers are finite; otherwise sums are zero. ``spread`` is whether the slopes of more than a
    few rows have changed since the last reply, and the weights are not those of a few rows; otherwise the
    last reply is repeated, which is zeros at first.
    """
    request = state.use(
        "boost", ScoredRows, "no scores were started in this session; request 'start_scores' first"
    )
    loss, n = request.made.requested.loss, len(request.fold)
    assert loss is not None
    P, K, L = coef.shape
    if not len(request.changes):
        request.changes, request.slopes = np.zeros((P, 0, n, L)), np.zeros((P, n, L))
    check_lengths(data.name, coef=(coef, len(request.slopes)))
    check_lengths(data.name, offset=(offset, P), left_out=(left_out, P))
    check_allocation(data.name, P * n * L, n * (K + L))
    if not ((left_out >= -1) & (left_out < request.made.requested.folds)).all():
        raise MessageError(f"{data.name}: a path leaves out a fold that does not exist")
    slopes, weights = np.empty((P, n, L)), np.empty((P, n))
    score, losses, weight = np.zeros((P, K, L)), np.zeros((P, 2)), np.zeros(P)
    first = 0
    for parts, response in request.made.blocks():
        assert isinstance(response, RegularResponse)
        Z, Y, basis = np.column_stack(parts), response.Y, response.basis
        rows = slice(first, first + len(Y))
        for p in range(P):
            within = request.fold[rows] != left_out[p]
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
        # Scores of a flat loss come from the rows on one side of the coefficients' cut.
        weights[:, 0], weights[:, 1:] = 1.0, 0.0
    again = request.reported or nothing
    _declare_score_columns(
        state, request, slopes, weights, {"inside": np.array(True), "spread": np.array(False), **again}
    )
    request.reported = answer
    return {"inside": np.array(inside), "spread": np.array(True), **answer}


def _declare_score_columns(
    state: State, request: ScoredRows, slopes: Floats, weights: Floats, instead: Mapping[str, Array]
) -> None:
    """Return whose slopes have changed, and what all released slopes single out; keep the change."""
    change = slopes - request.slopes
    sizes = np.sqrt((change**2).sum(axis=2))
    state.report(facts.WorkingWeights(lambda: np.concatenate([sizes, weights]), instead=instead))
    kept = np.concatenate([request.changes, change[:, None]], axis=1)  # (P, R, n, L)
    P, R, n, L = kept.shape
    masked = hides(len(state.masked_among))
    if masked:  # the release is a sum over sites: each path and spline is checked against this site's rows
        columns = [kept[p, :, :, j].T for p in range(P) for j in range(L)]
    else:
        columns = [kept.transpose(2, 0, 1, 3).reshape(n, P * R * L)]
    state.report(facts.RowCount(n, R if masked else request.width + P * R * L))
    together = np.zeros(n, dtype=np.int64)
    state.report(*(facts.SummedColumns(one, together) for one in columns))
    request.slopes, request.changes = slopes, kept
