"""Counts of a site's first pass over its coded rows: the facts that it tells the door."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fedstat.errors import DesignError
from fedstat.federation.design.coding import Coded
from fedstat.federation.design.formula.expression import parse_expression
from fedstat.federation.design.formula.terms import Term
from fedstat.federation.design.formula.tree import Category, Column, Relation
from fedstat.federation.design.site_rows import RowsQuestion, WholeRows
from fedstat.federation.design.spec import BlockSpec
from fedstat.federation.design.states import Extremes, combine_moments
from fedstat.federation.door.facts import (
    CaseWeights,
    IndicatorCounts,
    OutcomeCounts,
    RowCount,
    RowsByLevel,
    RowsUsed,
)
from fedstat.federation.door.state import SiteData, State
from fedstat.typing import Bools, Floats, Ints

BLOCK = 4096


@dataclass(slots=True, eq=False)
class RowTally:
    """Counts of the first pass over a site's coded rows; names are without the intercept."""

    data: SiteData
    question: RowsQuestion
    names: tuple[str, ...] = ()
    term_names: tuple[str, ...] = ()
    n: int = 0
    _used: list[Bools] = field(default_factory=list)
    _events: list[Bools] = field(default_factory=list)
    _moments: Floats | None = None
    _ones: Ints | None = None
    _outcomes: Ints = field(default_factory=lambda: np.zeros(2, dtype=np.int64))
    _binary: bool = True
    _weights: Floats = field(default_factory=lambda: np.zeros(2))
    _extremes: dict[str, Extremes] = field(default_factory=dict)
    _cells: dict[str, Counter[int]] = field(default_factory=dict)

    def look(self, rows: WholeRows) -> None:
        """Enter which rows of a chunk are used, before they are coded."""
        self._used.append(rows.whole)
        self._events.append(rows.whole.copy())
        self.n += len(rows.frame)

    def add(self, rows: WholeRows, coded: Coded) -> None:
        """Enter the coded rows of the chunk looked at last."""
        X, self.names, self.term_names = coded.X, coded.names, coded.term_names
        for term, codes in coded.cells.items():
            cells, counts = np.unique(codes, return_counts=True)
            found = dict(zip(cells.tolist(), counts.tolist(), strict=True))
            self._cells.setdefault(term, Counter()).update(found)
        moments, ones = column_moments(X), count_ones(X)
        if self._moments is None or self._ones is None:
            self._moments, self._ones = moments, ones
        else:
            pairs = np.stack([self._moments, moments])
            self._moments = np.array([combine_moments(pairs[:, :, j]) for j in range(X.shape[1])]).T
            # -1 stays -1: a column that held another number in one chunk is no indicator.
            self._ones = np.where((self._ones < 0) | (ones < 0), -1, self._ones + ones)
        if not self.question.curve_response:  # of curves the family tells
            self._add_response(rows)
        if rows.weight is not None:
            self._weights += rows.weight.sum(), rows.weight @ rows.weight

    def _add_response(self, rows: WholeRows) -> None:
        y, few = rows.y, self.data.policy.min_level_count - 1
        if y.ndim == 2:
            self._outcomes += (y[:, 1] > 0.0).sum(), (y[:, 0] > 0.0).sum()
        else:
            self._binary = self._binary and bool(((y == 0.0) | (y == 1.0)).all())
            self._outcomes += (y == 0.0).sum(), (y == 1.0).sum()
            self._events[-1][rows.whole] = y == 1.0
        columns = {f"the response '{self.question.response}'": y} if y.ndim == 1 else {}
        if rows.offset is not None:
            columns["the offset"] = rows.offset
        for what, values in columns.items():
            self._extremes.setdefault(what, Extremes(few)).add(values)

    def tell_counts(self, state: State) -> Floats:
        """Tell what was counted; return rows, mean and standard deviation of every column, (3, p).

        A PolicyError where the owner's rules refuse, a DesignError where no row is whole.
        """
        name, question = self.data.name, self.question
        if self._moments is None or self._ones is None:
            raise DesignError(f"site {name!r} has no row with all of {', '.join(question.needed)}")
        state.tell(RowCount(int(self.used.sum()), len(self.names) + question.intercept))
        # Squares overflow above 1e154; the fit would fail later, and in words that name no column.
        large = ~np.isfinite(self._moments[:, int(question.intercept) :]).all(axis=0)
        if large.any():
            raise DesignError(
                f"design column {self.names[int(np.argmax(large))]!r} at site {name!r}: the squares of "
                "its values are larger than a number can be. Transform it, for instance by a logarithm."
            )
        # Whatever the distribution: sums over few events would tell of these entities.
        if self._binary and not self.question.curve_response:
            without, events = self._outcomes.tolist()
            state.tell(OutcomeCounts((without, events), question.response))
        state.tell(IndicatorCounts(self._ones[int(question.intercept) :], self.n, self.names))
        # Sums over a rare cell follow from those of all codings, and some have no column of zeros and ones.
        state.tell(*(RowsByLevel(term, list(cells.values())) for term, cells in self._cells.items()))
        state.tell(*(column.variation(what) for what, column in self._extremes.items()))
        if self._weighted:
            total, squares = self._weights.tolist()
            state.tell(CaseWeights(total, squares, self._weighted))
        n_rows, mean, squared = self._moments
        return np.array([n_rows, mean, np.sqrt(squared / self.n)])

    @property
    def used(self) -> Bools:
        """Rows of the table that are whole, weights included."""
        return np.concatenate(self._used) if self._used else np.zeros(0, dtype=bool)

    @property
    def rows_used(self) -> RowsUsed:
        """Rows behind all answers about this design, and which of them are events of a comparison."""
        if self.question.curve_response:
            return RowsUsed(self.used)
        compared = isinstance(parse_expression(self.question.response, response=True).tree, Relation)
        return RowsUsed(self.used, np.concatenate(self._events) if compared else None)

    @property
    def _weighted(self) -> list[str]:
        """What the weights are made of."""
        names = [name for role, name in self.question.weights.items() if role != "exposure"]
        trials = [self.question.response] if self.question.response.startswith("cbind") else []
        return names + trials


def most_columns(question: RowsQuestion, terms: Sequence[Term], spec: BlockSpec) -> int:
    """Columns of a design before it is coded; fewer where there are no rows of a level."""
    columns = int(question.intercept)
    for term in terms:
        levels = 1
        for factor in term:
            tree = factor.tree
            if isinstance(tree, Column | Category) and factor.columns[0] in spec.levels:
                levels *= max(len(spec.levels[factor.columns[0]]) - 1, 1)
        columns += levels
    return columns


def unknown_levels(rows: WholeRows, spec: BlockSpec) -> list[RowsByLevel]:
    """Count rows of levels that the specification lacks: with too few rows they are not named."""
    lacking = ((name, rows.frame[name]) for name in spec.levels)
    return [
        RowsByLevel(name, series[~series.isin(spec.levels[name])].value_counts().tolist(), known=False)
        for name, series in lacking
    ]


def column_moments(X: Floats) -> Floats:
    """Rows, mean and squared deviations of every column: (m, p) -> (3, p)."""
    mean = X.mean(axis=0)
    spread = np.zeros(X.shape[1])
    for start in range(0, len(X), BLOCK):
        # By blocks, so that the centred copy stays in cache and is never as large as the design.
        part = X[start : start + BLOCK] - mean
        spread += np.einsum("ij,ij->j", part, part)
    return np.array([np.full(X.shape[1], float(len(X))), mean, spread])


def count_ones(X: Floats) -> Ints:
    """Ones of every column that holds zeros and ones only, -1 for the others: (m, p) -> (p,)."""
    # The first rows rule out most columns, which are then not read a second time.
    maybe = np.flatnonzero(((X[:BLOCK] == 0.0) | (X[:BLOCK] == 1.0)).all(axis=0))
    ones = np.full(X.shape[1], -1)
    for j in maybe:
        column = X[:, j]
        if ((column == 0.0) | (column == 1.0)).all():
            ones[j] = int(column.sum())
    return ones
