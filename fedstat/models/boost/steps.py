"""Sums of one institution from which all of boosting follows.

Released, by fold: `gram`, the upper triangle of the products of all learners' columns, (F, K (K + 1) / 2);
`score`, their products with the response in its basis, (F, K, L); `spread`, the products of the latter,
(F, L (L + 1) / 2); `totals`, sums of the response at each of its points, and of its square, (F, G + 1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedstat import records
from fedstat.errors import DesignError
from fedstat.federation.crypto.masks import hides
from fedstat.federation.design.row_steps import OPEN_ROWS, OpenRows, rows_of
from fedstat.federation.design.site_rows import WholeRows
from fedstat.federation.door.facts import (
    DesignDirections,
    DivisionOfRows,
    RowCount,
    SummedColumns,
)
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step
from fedstat.federation.tables.curves.array import curves_of
from fedstat.models.boost.learning.columns import CurvesAsked, learner_columns, smooth_asked, time_basis
from fedstat.typing import Array, Floats, Ints

FAMILY = "boost"
RESPONSE = "response"
BLOCK = 4096
"""Rows whose columns are in memory at once."""


def sum_curves(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Sum products of learners' columns and response over the open rows, by fold."""
    asked = records.from_json(CurvesAsked, text, f"{data.name}: the question about curves")
    state.tell(smooth_asked(asked.learners))
    made = MadeColumns(data, rows_of(state), asked)
    n = state.entities
    if n <= BLOCK:
        made.held = list(made.blocks())
    fold = deal(n, asked, data.name)
    _tell(state, made, fold)
    sums: dict[str, Array] = {}
    first = 0
    for parts, Y, basis in made.blocks():
        part = _products(np.column_stack(parts), Y, basis, fold[first : first + len(Y)], asked.folds)
        sums = {name: sums.get(name, 0.0) + array for name, array in part.items()}
        first += len(Y)
    return sums, ""


def deal(n: int, asked: CurvesAsked, site: str) -> Ints:
    """Fold of each row, (n,), drawn from the seed and the name of the site."""
    own = int.from_bytes(hashlib.sha256(site.encode()).digest()[:8], "big")
    random = np.random.default_rng([asked.seed, own])
    return np.asarray(random.permutation(np.arange(n) % asked.folds), dtype=np.int64)


def blocks(opened: OpenRows, curves: Sequence[str]) -> Iterator[tuple[WholeRows, Floats]]:
    """Whole rows with some curves, and their coded terms in the units of the data, (m, p), by blocks."""
    first = int(opened.question.intercept)
    for rows, X in opened.chunks():
        frame = rows.frame[list(curves)]
        for start in range(0, len(X), BLOCK):
            part = slice(start, start + BLOCK)
            raw = X[part] * opened.scale + opened.shift
            whole = np.ones(len(raw), dtype=bool)
            yield WholeRows(frame.iloc[part], whole, rows.y[part], None, {}), raw[:, first:]


@dataclass(slots=True, eq=False)
class MadeColumns:
    """Columns of all learners, the response, and the basis at its points, by blocks of rows.

    They are made in every pass, or `held` where there is one block.
    """

    data: SiteData
    opened: OpenRows
    asked: CurvesAsked
    held: Sequence[tuple[list[Floats], Floats, Floats]] = ()

    def blocks(self) -> Iterator[tuple[list[Floats], Floats, Floats]]:
        """All of them."""
        if self.held:
            yield from self.held
            return
        for rows, coded in blocks(self.opened, self.opened.question.read_curves):
            parts = [
                learner_columns(one, rows.frame, coded, self.opened.term_names) for one in self.asked.learners
            ]
            yield parts, *_response(self.data, self.opened, rows, self.asked)

    def of(self, p: int) -> Iterator[Floats]:
        """Columns of one learner."""
        learner = self.asked.learners[p]
        if self.held:
            yield from (parts[p] for parts, _, _ in self.held)
            return
        for rows, coded in blocks(self.opened, [learner.of] if learner.of_curve else []):
            yield learner_columns(learner, rows.frame, coded, self.opened.term_names)

    def response(self) -> Iterator[Floats]:
        """Response in its basis."""
        if self.held:
            yield from (Y @ basis for _, Y, basis in self.held)
            return
        for rows, _ in blocks(self.opened, self.opened.question.read_curves[:1]):
            Y, basis = _response(self.data, self.opened, rows, self.asked)
            yield Y @ basis


def _tell(state: State, made: MadeColumns, fold: Ints) -> None:
    """Tell what stands behind the sums: rows for the columns of all learners, whom these single out, folds.

    Sums that three sites or more hide add up to those over all rows, so that columns of one learner at a time
    are held against a site's own; in the clear all together are, by fold.
    """
    n, hidden, asked = len(fold), hides(len(state.hidden_among)), made.asked
    columns: list[tuple[str, Callable[[], Iterator[Floats]]]] = [
        (one.label, partial(made.of, p)) for p, one in enumerate(asked.learners)
    ]
    columns.append((RESPONSE, made.response))
    width, sizes = 1, []
    for label, own in columns:
        held = list(own())  # of one learner at a time
        k = held[0].shape[1]
        width += k if label != RESPONSE else 0
        sizes.append(_size(held))
        scaled = [Z / sizes[-1] for Z in held]
        state.tell(DesignDirections(scaled.__iter__, n, [f"{label}[{j}]" for j in range(k)]))
        state.tell(*(SummedColumns(Z) for Z in scaled))
    smallest = int(np.bincount(fold, minlength=asked.folds).min())
    state.tell(RowCount(smallest, 0 if hidden else width))
    if not hidden:
        size = np.concatenate(sizes)
        all_made = partial(_side_by_side, [own for _, own in columns], size)
        state.tell(DesignDirections(all_made, n, [f"column {j}" for j in range(len(size))]))
    state.tell(DivisionOfRows("", fold, np.flatnonzero(_used(made.opened))))


def _side_by_side(made: Sequence[Callable[[], Iterator[Floats]]], size: Floats) -> Iterator[Floats]:
    for parts in zip(*(columns() for columns in made), strict=True):
        yield np.column_stack(parts) / size


def _used(opened: OpenRows) -> Array:
    return np.concatenate([rows.whole for rows, _ in opened.chunks()])


def _size(blocks: Sequence[Floats]) -> Floats:
    """Root mean square of every column over all blocks; one where it is zero."""
    squares = np.sum([(Z * Z).sum(axis=0) for Z in blocks], axis=0)
    return np.where(squares > 0.0, np.sqrt(squares / sum(map(len, blocks))), 1.0)


def _response(data: SiteData, opened: OpenRows, rows: WholeRows, asked: CurvesAsked) -> tuple[Floats, Floats]:
    """Response (m, G) and the basis at its points (G, k2)."""
    if asked.time is None:
        return rows.y[:, None], time_basis(None, np.zeros(1))
    curves = curves_of(rows.frame[opened.question.curve_response])
    gaps = int(np.isnan(curves.values).any(axis=1).sum())
    if gaps:
        raise DesignError(
            f"{data.name}: {gaps:,} curves of the response were not measured at all points. Leave these rows "
            "out, or fill the points in"
        )
    return curves.values, time_basis(asked.time, curves.grid)


def _products(Z: Floats, Y: Floats, basis: Floats, fold: Ints, folds: int) -> dict[str, Array]:
    C = Y @ basis
    K, k2 = Z.shape[1], C.shape[1]
    upper, upper2 = np.triu_indices(K), np.triu_indices(k2)
    out = {
        "gram": np.zeros((folds, len(upper[0]))),
        "score": np.zeros((folds, K, k2)),
        "spread": np.zeros((folds, len(upper2[0]))),
        "totals": np.zeros((folds, Y.shape[1] + 1)),
    }
    for f in range(folds):
        z, c, y = (A if folds == 1 else A[fold == f] for A in (Z, C, Y))
        out["gram"][f] = (z.T @ z)[upper]
        out["score"][f] = z.T @ c
        out["spread"][f] = (c.T @ c)[upper2]
        out["totals"][f] = np.append(y.sum(axis=0), (y * y).sum())
    return out


BEHIND = (*OPEN_ROWS, SummedColumns, DivisionOfRows)


def _sum(what: str, ndim: int = 2) -> Declared:
    return Declared("aggregate", what, ndim, maskable=True, wide=True, behind=BEHIND)


STEPS: Mapping[str, Step] = {
    "sum_curves": Step(
        sum_curves,
        gives={
            "gram": _sum("products of the learners' columns, by fold"),
            "score": _sum("their products with the response in its basis, by fold", 3),
            "spread": _sum("products of the response in its basis, by fold"),
            "totals": _sum("sums of the response at its points, and of its square, by fold"),
        },
        text_in=Declared("control", "learners, with the ends of their bases; folds", common=True),
    ),
}
