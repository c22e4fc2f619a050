"""Means at a site, and effects of variables on them: its rows are coded again.

A mean is that of the rows as they are, or with a variable at a value. A variable changes by its derivative
through all terms, or from one value to another. With predictors ``eta = X B'`` the mean of a row changes by
``f'(eta) D B'``, where D is the derivative of its design row, or by the difference of two means. The sums
over rows, or over those of a level, of these and of their derivatives by the coefficients are released. The
vectors by which columns are multiplied in them are reported to the disclosure checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedstat.errors import DesignError, MessageError
from fedstat.federation.design.derivatives import Direction
from fedstat.federation.design.horizontal_steps import OpenRows
from fedstat.federation.design.site_rows import CompleteRows
from fedstat.federation.disclosure.facts import (
    LevelRowCounts,
    RowBlock,
    ScoreAndInformation,
    SummedProducts,
    WorkingWeights,
)
from fedstat.federation.disclosure.state import State
from fedstat.federation.message import Reply
from fedstat.federation.tables.columns import LevelValue
from fedstat.models.margins import Change, ChangesRequest, MeanJet
from fedstat.typing import Array, Floats

MOST_CHANGES = 1_000


def changes_request(directions: Sequence[Direction], logarithmic: bool = False) -> ChangesRequest:
    """Request the effects of variables."""
    changes = (Change(one.variable, *(one.levels or ())) for one in directions)
    return ChangesRequest(tuple(changes), logarithmic)


@dataclass(frozen=True, slots=True, eq=False)
class ChangedSums:
    """Sums over rows of the changes of the means, (V, J), and their derivatives by the coefficients.

    `slopes` are (V, J, K, p + 1), where the first of the last axis belongs to a constant in the predictors.
    `counts` (V,) are the sums of the rows' weights, of changes among the rows of a level, and zero of the
    others; None without such changes.
    """

    effects: Floats
    slopes: Floats
    counts: Floats | None

    @property
    def level_counts(self) -> dict[str, Array]:
        """Counts to be released, by the name of their array."""
        return {} if self.counts is None else {"counts": self.counts}

    @property
    def finite(self) -> bool:
        """Whether all sums are finite."""
        return bool(np.isfinite(self.effects).all() and np.isfinite(self.slopes).all())


@dataclass(frozen=True, slots=True)
class VariableVectors:
    """The origin of vectors that only the step which summed with them knows."""

    changes: str

    def __call__(self, *_: Any) -> Floats:
        """Refuse to compute them for other rows."""
        raise MessageError("sums for changes of variables end a session; open the rows again")


@dataclass(frozen=True, slots=True, eq=False)
class ChangedRows(RowBlock):
    """Rows of a design as the model's own checks see them, with the vectors (m, k) of changes at `point`."""

    rows: RowBlock
    point: Any
    own: Floats

    @property
    def columns(self) -> Floats:
        """Columns of the design, and a constant."""
        return self.rows.columns

    def vectors(self, points: tuple[Any, ...]) -> Floats:
        """Return the vectors at points side by side, (m, k)."""
        found = (self.own if one == self.point else self.rows.vectors((one,)) for one in points)
        return np.column_stack(list(found))

    def every(self, first: int, step: int) -> ChangedRows:
        """Return every n-th row, from the first on."""
        return ChangedRows(self.rows.every(first, step), self.point, self.own[first::step])


class SiteMeans(Protocol):
    """The means of a model at a site, at the coefficients of a request; `groups` as of the other sums."""

    @property
    def groups(self) -> bool:
        """Whether rows are parts of groups that are integrated."""

    @property
    def point(self) -> tuple[Any, ...]:
        """What identifies the means."""

    def jet(self, rows: CompleteRows, X: Floats) -> MeanJet:
        """Return means of rows at a design (m, p) of the site's own columns, and their derivatives."""

    def count(self, rows: CompleteRows) -> Floats:
        """Return how often each row counts, (m,)."""

    def block(self, rows: CompleteRows, X: Floats) -> RowBlock:
        """Return the rows as the checks of other sums of this model see them."""


def sum_changes_of(
    state: State,
    opened: OpenRows,
    request: ChangesRequest,
    B: Floats,
    means: SiteMeans,
    flat: Callable[[], bool] | None = None,
) -> ChangedSums:
    """Sum the effects of changes over the rows of a session, and report the vectors of the sums.

    B (K, p) are coefficients of the site's own columns.
    """
    if not 0 < len(request.changes) <= MOST_CHANGES:
        raise MessageError(f"{opened.data.name}: expected 1 to {MOST_CHANGES:,} changes of variables")
    for change in request.changes:
        _check_change(opened, change)
    _report_levels(state, opened, request)
    effects, slopes, blocks, vectors = list[Floats](), list[Floats](), list[ChangedRows](), list[Floats]()
    counted, grouped = list[Floats](), [bool(change.by) for change in request.changes]
    point = (*means.point, VariableVectors(repr(request)))
    for rows, X in opened.chunks():
        found = [_changed(opened, rows, X, one, request.logarithmic, B, means) for one in request.changes]
        count = means.count(rows)
        weights = [
            count * opened.has_level(rows, change.by, change.level) if change.by else count
            for change in request.changes
        ]
        effects.append(np.array([w @ effect for w, (effect, _, _) in zip(weights, found, strict=True)]))
        slopes.append(np.array([summed(w) for w, (_, summed, _) in zip(weights, found, strict=True)]))
        # A value that is not finite becomes zero, and reveals nothing.
        own = [one * w[:, None] for w, (_, _, one) in zip(weights, found, strict=True)]
        vectors.append(np.nan_to_num(np.column_stack(own), posinf=0.0, neginf=0.0))
        counted.append(np.column_stack(weights) * grouped)
        blocks.append(ChangedRows(means.block(rows, X), point, vectors[-1]))
    V, (J, K) = np.concatenate(vectors), slopes[0].shape[1:3]
    # Effects at many coefficients add up: each session adds columns to the history of those released. Slopes
    # of several categories or predictors are compared within the session, as those of other sums are.
    first = np.cumsum([0, *(one.shape[1] for _, _, one in found)])[:-1]
    entered = V[:, (first[:, None] + np.arange(J + (J == K == 1))).ravel()]
    groups = np.unique(np.concatenate(counted)[:, grouped], axis=1)
    entered = np.column_stack([entered, groups])
    state.report(
        WorkingWeights(lambda: np.abs(V).T, flat=flat),
        ScoreAndInformation(opened, len(V), point, lambda: blocks, groups=means.groups),
        SummedProducts(
            lambda: iter([entered]),
            ["effects"] * entered.shape[1],
            np.flatnonzero(opened.used),
            multiplied=False,
        ),
    )
    counts = np.sum([one.sum(axis=0) for one in counted], axis=0) if any(grouped) else None
    return ChangedSums(np.sum(effects, axis=0), np.sum(slopes, axis=0), counts)


def level_counts(replies: Sequence[Reply], request: ChangesRequest) -> Floats:
    """Add up the counts (V,) of the rows of levels; zero without any."""
    if not any(change.by for change in request.changes):
        return np.zeros(len(request.changes))
    counts: Floats = np.sum([reply.arrays["counts"] for reply in replies], axis=0)
    return counts


def _changed(
    opened: OpenRows,
    rows: CompleteRows,
    X: Floats,
    change: Change,
    logarithmic: bool,
    B: Floats,
    means: SiteMeans,
) -> tuple[Floats, Callable[[Floats], Floats], Floats]:
    """Return changes of means (m, J), a function that sums slopes, and the vectors behind both (m, k)."""
    m, p = X.shape
    with np.errstate(all="ignore"):
        if change.low is None and (change.high is not None or not change.variable):
            Y = _placed(opened, rows, X, change, change.high)
            effect, bend, _ = means.jet(rows, Y)
            others = np.flatnonzero((Y != X).any(axis=0))
            moved = bend[..., None] * Y[:, None, None, others]
        elif change.low is None or change.high is None:
            D = opened.derivative(rows, X, change.variable, logarithmic)
            _, first, second = means.jet(rows, X)
            along = D @ B.T
            effect = np.einsum("mjk,mk->mj", first, along)
            bend = np.einsum("mjkl,ml->mjk", second, along)
            others = np.flatnonzero(D.any(axis=0))
            moved = first[..., None] * D[:, None, None, others] + bend[..., None] * X[:, None, None, others]
        else:
            low, high = (_placed(opened, rows, X, change, one) for one in (change.low, change.high))
            a, b = (means.jet(rows, one) for one in (low, high))
            effect, bend = b[0] - a[0], b[1] - a[1]
            others = np.flatnonzero(((low != X) | (high != X)).any(axis=0))
            moved = (
                b[1][..., None] * high[:, None, None, others] - a[1][..., None] * low[:, None, None, others]
            )
    rest = np.setdiff1d(np.arange(p), others)

    def slopes(w: Floats) -> Floats:
        out = np.zeros((*bend.shape[1:], p + 1))
        out[..., 0] = np.einsum("m,mjk->jk", w, bend)
        out[..., 1 + rest] = np.einsum("mjk,mq->jkq", w[:, None, None] * bend, X[:, rest])
        out[..., 1 + others] = np.einsum("m,mjkq->jkq", w, moved)
        return out

    return effect, slopes, np.column_stack([one.reshape(m, -1) for one in (effect, bend, moved)])


def _placed(
    opened: OpenRows, rows: CompleteRows, X: Floats, change: Change, value: LevelValue | None
) -> Floats:
    """Return the design (m, p) with a variable at a value, or with the value added; X without one."""
    if not change.variable or value is None:
        return X
    try:
        return opened.at_level(rows, X, change.variable, value, added=change.added)
    except DesignError:
        # Without a count of such rows, which would show their values as the change grows.
        raise DesignError(
            f"{opened.data.name}: column {change.variable!r}: a term has no value after this change, as "
            "outside the bounds of a spline. Choose two values inside them instead of a step"
        ) from None


def _report_levels(state: State, opened: OpenRows, request: ChangesRequest) -> None:
    """Report the rows of the levels over which sums are requested."""
    for by in dict.fromkeys(change.by for change in request.changes if change.by):
        levels = dict.fromkeys(change.level for change in request.changes if change.by == by)
        counts = [
            sum(int(opened.has_level(rows, by, level).sum()) for rows, _ in opened.chunks())
            for level in levels
        ]
        state.report(LevelRowCounts(by, counts))


def _check_change(opened: OpenRows, change: Change) -> None:
    """Require a variable of the design; a category changes between two of its levels."""
    spec = opened.spec.part(opened.question.terms)
    for name, values in (
        (change.variable, (change.low, change.high)),
        (change.by, (change.level,)),
    ):
        where = f"{opened.data.name}: column {name!r}"
        given = [one for one in values if one is not None]
        if name and name not in spec.columns:
            raise MessageError(f"{where} is not a column of this model")
        levels = spec.levels.get(name)
        if (name == change.by and name and (levels is None or not given)) or (
            levels is not None and (not given or not {*given} <= {*levels})
        ):
            raise MessageError(f"{where}: expected levels of a category of this model")
        numbers = [one for one in given if not isinstance(one, str) and np.isfinite(one)]
        if levels is None and (len(numbers) < len(given) or (given and change.high is None)):
            raise MessageError(f"{where}: expected finite numbers")
    if change.added and (change.variable in spec.levels or change.high is None):
        raise MessageError(f"{opened.data.name}: column {change.variable!r} is no number to add to")
