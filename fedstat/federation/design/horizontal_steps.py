"""Steps of a site that holds different rows: survey, coding, counts and sums of its columns."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from fedstat import codec
from fedstat.errors import DesignError, MessageError
from fedstat.federation.design.absorbed_rows import AbsorbedRows, joined
from fedstat.federation.design.coding import BlockSpec, CodedColumns, coded_columns
from fedstat.federation.design.formula.expression import parse_expression
from fedstat.federation.design.formula.syntax_tree import (
    TREATMENT,
    Category,
    Column,
    Relation,
    Survival,
)
from fedstat.federation.design.formula.terms import Term, term_text
from fedstat.federation.design.levels import LevelCounts, SiteColumns, check_declared, declared_levels
from fedstat.federation.design.propensity_weights import CUTS, WeightedArms
from fedstat.federation.design.sealed_levels import BOXES, seal_levels
from fedstat.federation.design.site_rows import (
    INTERCEPT,
    CompleteRows,
    RowsRequest,
    design_matrix,
    find_complete_rows,
    rows_behind,
    rows_key,
    subset_counts,
)
from fedstat.federation.design.spline_knots import KnotsRequest, count_intervals
from fedstat.federation.design.transform_states import (
    ColumnExtremes,
    TransformRequest,
    combine_moments,
    transform_sums,
)
from fedstat.federation.design.vertical_design import FAMILY
from fedstat.federation.disclosure.facts import (
    AbsorbedLevels,
    CaseWeights,
    ColumnSums,
    ColumnVariation,
    DesignDirections,
    EntityCount,
    IndicatorCounts,
    LevelRowCounts,
    LevelsRequested,
    OutcomeCounts,
    RowCount,
    RowGroups,
    RowsUsed,
    SummedProducts,
    WorkingWeights,
)
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.level_products import REPORTED_VALUES
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.disclosure.weight_spaces import may_have_few_values
from fedstat.federation.message import aggregate, control, presence, schema
from fedstat.federation.tables.columns import (
    TEXT_OF_NUMBERS,
    ColumnKind,
    LevelValue,
    as_numbers,
    column_kind,
    find_levels,
    reads_as_numbers,
)
from fedstat.federation.tables.table import LabeledTable, keep_result, keeps_results
from fedstat.kernels.absorption import level_differences
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Counts of a site's first pass over its coded rows: the facts that it reports to the disclosure checks.

BLOCK = 4096
CACHED_ROWS = 1024
"""Rows of a design that stay in the cache while they are shifted and scaled."""


@dataclass(slots=True, eq=False)
class RowCounts:
    """Counts of the first pass over a site's coded rows; names are without the intercept."""

    data: SiteData
    question: RowsRequest
    names: tuple[str, ...] = ()
    term_names: tuple[str, ...] = ()
    n: int = 0
    outside: int = 0
    _used: list[Bools] = field(default_factory=list)
    _events: list[Bools] = field(default_factory=list)
    _moments: Floats | None = None
    _ones: Ints | None = None
    _outcomes: Ints = field(default_factory=lambda: np.zeros(2, dtype=np.int64))
    _binary: bool = True
    _weights: Floats = field(default_factory=lambda: np.zeros(2))
    _extremes: dict[str, ColumnExtremes] = field(default_factory=dict)
    _cells: dict[str, Counter[int]] = field(default_factory=dict)
    columns: NamedColumns | None = None

    def add_chunk(self, rows: CompleteRows) -> None:
        """Add which rows of a chunk are used, before they are coded."""
        self._used.append(rows.complete)
        self._events.append(rows.complete.copy())
        self.n += len(rows.frame)
        self.outside += rows.outside

    def add_coded(self, rows: CompleteRows, coded: CodedColumns) -> None:
        """Add the coded rows of the latest chunk."""
        X, self.names, self.term_names = coded.X, coded.names, coded.term_names
        self.columns = NamedColumns(coded.names, coded.term_names, coded.effects, coded.fixed)
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
        if self.question.response:  # a table has none, and the family reports it for curves
            self._add_response(rows)
        if rows.weight is not None:
            self._weights += rows.weight.sum(), rows.weight @ rows.weight

    def _add_response(self, rows: CompleteRows) -> None:
        y, few = rows.y, self.data.policy.min_level_count - 1
        categories = self.question.has_categories
        if categories:
            (name,) = self.question.response_columns
            self._cells.setdefault(name, Counter()).update(y.astype(int).tolist())
        elif y.ndim == 2:
            self._outcomes += (y[:, 1] > 0.0).sum(), (y[:, 0] > 0.0).sum()
        else:
            self._binary = self._binary and bool(((y == 0.0) | (y == 1.0)).all())
            self._outcomes += (y == 0.0).sum(), (y == 1.0).sum()
            self._events[-1][rows.complete] = y == 1.0
        columns = {f"the response '{self.question.response}'": y} if y.ndim == 1 and not categories else {}
        if rows.offset is not None:
            columns["the offset"] = rows.offset
        for what, values in columns.items():
            self._extremes.setdefault(what, ColumnExtremes(few)).add(values)

    def report_counts(self, state: State) -> Floats:
        """Report the counts to the disclosure checks; return rows, means and deviations, (3, p).

        Raises PolicyError if the policy refuses, DesignError if no row is complete.
        """
        name, question = self.data.name, self.question
        if self._moments is None or self._ones is None:
            raise DesignError(f"site {name!r} has no row with all of {', '.join(question.needed)}")
        more = sum(len(one.coefficients) for one in question.propensities)
        state.report(RowCount(int(self.used.sum()), len(self.names) + question.intercept + more))
        state.report(*subset_counts(question, self.n, self.outside))
        # Squares overflow above 1e154; the fit would fail later, and in words that name no column.
        large = ~np.isfinite(self._moments[:, int(question.intercept) :]).all(axis=0)
        if large.any():
            raise DesignError(
                f"design column {self.names[int(np.argmax(large))]!r} at site {name!r}: the squares of "
                "its values are larger than a number can be. Transform it, for instance by a logarithm."
            )
        # Whatever the distribution: sums over few events would reveal these entities.
        if self._binary and question.response and not question.has_categories:
            without, events = self._outcomes.tolist()
            state.report(OutcomeCounts((without, events), question.response))
        state.report(IndicatorCounts(self._ones[int(question.intercept) :], self.n, self.names))
        # Sums over a rare cell follow from those of all codings, and some have no column of zeros and ones.
        state.report(*(LevelRowCounts(term, list(cells.values())) for term, cells in self._cells.items()))
        if question.has_categories:
            (name,) = question.response_columns
            state.report(*(OutcomeCounts((self.n - rows, rows), name) for rows in self._cells[name].values()))
        state.report(*(column.variation(what) for what, column in self._extremes.items()))
        if self._weighted:
            total, squares = self._weights.tolist()
            state.report(CaseWeights(total, squares, self._weighted))
        n_rows, mean, squared = self._moments
        return np.array([n_rows, mean, np.sqrt(squared / self.n)])

    @property
    def used(self) -> Bools:
        """Rows of the table that are whole, weights included."""
        return np.concatenate(self._used) if self._used else np.zeros(0, dtype=bool)

    @property
    def rows_used(self) -> RowsUsed:
        """Rows behind all answers about this design, and which of them are events of a comparison."""
        if not self.question.response:
            return rows_behind(self.data, self.question, self.used)
        tree = parse_expression(self.question.response, response=True).tree
        compared = isinstance(tree.event if isinstance(tree, Survival) else tree, Relation)
        events = np.concatenate(self._events) if compared else None
        return rows_behind(self.data, self.question, self.used, events)

    @property
    def _weighted(self) -> list[str]:
        """Origin of the weights."""
        names = [name for role, name in self.question.weights.items() if role != "exposure"]
        names += [one.arm for one in self.question.propensities]
        trials = [self.question.response] if self.question.response.startswith("cbind") else []
        return names + trials


def most_columns(question: RowsRequest, terms: Sequence[Term], spec: BlockSpec) -> int:
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


def unknown_levels(rows: CompleteRows, spec: BlockSpec) -> list[LevelRowCounts]:
    """Count rows of levels that the specification lacks: with too few rows they are not named."""
    found = []
    for name, levels in spec.levels.items():
        series = rows.frame[name]
        unknown = ~series.isin(levels).to_numpy()
        counts = series[unknown].value_counts().tolist() if unknown.any() else []
        found.append(LevelRowCounts(name, counts, known=False))
    return found


def column_moments(X: Floats) -> Floats:
    """Rows, mean and squared deviations of every column: (m, p) -> (3, p)."""
    mean = X.mean(axis=0)
    spread = np.zeros(X.shape[1])
    for start in range(0, len(X), BLOCK):
        # By blocks, so that the centered copy stays in cache and is never as large as the design.
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


# ----------------------------------------------------------------------------------------------------
# Steps of a site that holds rows of its own: survey them, code them, sum their columns.

CONSTANT = 1e-12
FEW_VALUES = 3
"""Values of a number up to which sums of its powers that every fit releases are sums by value."""
OFFSET = "offset"
MOST_LEVELS = 1000


@dataclass(slots=True, eq=False)
class OpenRows:
    """The rows that a site opened for one model: coded once in memory, or in every pass where streamed.

    Columns are standardized by the site's own `shift` and `scale`; `own` are its means and deviations,
    (2, p), `names` and `term_names` column and term of each but the intercept, and `used` (n_rows,) the rows
    that are whole. Columns after the first `fixed` names are those of random effects alone. Where effects of
    levels are absorbed, rows and columns are those less the effects, and `absorbed` (2,) are the rank of the
    levels and the number of rows that were left out.
    """

    RECOMPUTED: ClassVar = ("held",)
    """The parts that are coded from the table again when a session is resumed."""

    data: SiteData
    question: RowsRequest
    spec: BlockSpec
    terms: tuple[Term, ...]
    shift: Floats = field(default_factory=lambda: np.zeros(1))
    scale: Floats = field(default_factory=lambda: np.ones(1))
    varies: Bools = field(default_factory=lambda: np.ones(1, dtype=bool))
    own: Floats = field(default_factory=lambda: np.zeros((2, 1)))
    held: tuple[CompleteRows, Floats] | None = None
    names: tuple[str, ...] = ()
    term_names: tuple[str, ...] = ()
    used: Bools = field(default_factory=lambda: np.zeros(0, dtype=bool))
    fixed: int = 0
    absorbed: Floats = field(default_factory=lambda: np.zeros(2))

    def chunks(self) -> Iterator[tuple[CompleteRows, Floats]]:
        """Whole rows and their standardized design, (m, p), chunk by chunk."""
        if self.held is not None:
            yield self.held
            return
        for rows in find_complete_rows(self.data, self.question):
            if len(rows.frame):
                coded = design_matrix(rows.frame, self.question, self.spec, self.data.name)
                yield rows, self.standardize(coded.X)

    @property
    def places(self) -> Ints:
        """Places of the rows in the table, (n,)."""
        return np.flatnonzero(self.used)

    def recompute(self) -> None:
        """Code the rows of a table of one chunk again, to the same numbers."""
        self.held = None
        if self.question.absorbed:
            found = self.without_levels()
            self.held = found.rows, self.standardize(found.X)
            return
        first = list(islice(self.chunks(), 2))
        self.held = first[0] if len(first) == 1 else None

    def without_levels(self) -> AbsorbedRows:
        """Code the rows again, and subtract the effects of the levels."""
        parts = list(find_complete_rows(self.data, self.question))
        frames = (rows.frame for rows in parts if len(rows.frame))
        X = [design_matrix(frame, self.question, self.spec, self.data.name).X for frame in frames]
        least = self.data.policy.min_level_count
        return AbsorbedRows.of(self.question, joined(parts), np.concatenate(X), least)

    def absorb(self, state: State) -> None:
        """Go on with the rows less the effects of the levels, and report what sums over these release.

        Facts on the columns of the data come first: the sum of products of a column with residuals is the
        same, whether the column is less the effects or not.
        """
        found, least = self.without_levels(), self.data.policy.min_level_count
        self.used = found.rows.complete
        state.report(*found.facts(self.question, self.places, least))
        self.absorbed, self.held = found.counts, (found.rows, found.X.copy())
        moments = column_moments(found.X)
        self.settle(moments[1], np.sqrt(moments[2] / len(found.X)))
        within = f"within {' and '.join(self.question.absorbed_texts)}"
        names = tuple(f"{name} {within}" for name in (*self.names, *self.offset_name))
        state.report(DesignDirections(self.directions, len(found.X), names))
        if len(found.codes) == 1:
            (code,), free = found.codes, len(found.X) - int(self.absorbed[0])
            parts = partial(self._differences, code)
            state.report(DesignDirections(parts, free, names))
        for fact in self.products():
            state.report(replace(fact, names=[f"{name} {within}" for name in fact.names]))

    def _differences(self, code: Ints) -> Iterator[Floats]:
        yield level_differences(np.concatenate(list(self.directions())), code)

    def settle(self, mean: Floats, spread: Floats) -> None:
        """Take the site's own means and deviations, (p,), and standardize what is held."""
        self.own = np.array([mean, spread])
        self.shift, self.scale = standardization(mean, spread, self.question.intercept)
        self.varies = varying(mean, spread, self.question.intercept)
        if self.held is not None:
            self.held = self.held[0], self.standardize(self.held[1])

    def standardize(self, X: Floats) -> Floats:
        """Shift and scale a design (m, p) in its place, and return it."""
        for start in range(0, len(X), CACHED_ROWS):
            part = X[start : start + CACHED_ROWS]
            part -= self.shift
            part /= self.scale
        return X

    def derivative(self, rows: CompleteRows, X: Floats, by: str, logarithmic: bool = False) -> Floats:
        """Return derivatives of the standardized design X (m, p) by a column of numbers, or its logarithm."""
        self._require_levels()
        D = design_matrix(rows.frame, self.question, self.spec, self.data.name, by).X / self.scale
        return D * as_numbers(rows.frame[by], self.data.name, by)[:, None] if logarithmic else D

    def at_level(
        self, rows: CompleteRows, X: Floats, name: str, level: LevelValue, *, added: bool = False
    ) -> Floats:
        """Return the standardized design, of which X (m, p) are the rows, with a column set to a value.

        With `added`, the value is added to the numbers of the rows.
        """
        self._require_levels()
        values = as_numbers(rows.frame[name], self.data.name, name) + level if added else [level] * len(X)  # type: ignore[operator]
        frame = rows.frame.assign(**{name: pd.Series(values, rows.frame.index)})
        coded = design_matrix(frame, self.question, self.spec, self.data.name)
        return self.standardize(coded.X)

    def _require_levels(self) -> None:
        if self.question.absorbed:
            raise MessageError(f"{self.data.name}: the rows have no means, since effects are absorbed")

    def has_level(self, rows: CompleteRows, name: str, level: LevelValue | None) -> Bools:
        """Return which rows have a level of a category, (m,)."""
        return np.asarray((rows.frame[name] == level).to_numpy(dtype=bool))

    def in_units(self, X: Floats) -> Floats:
        """Return standardized columns in the units of the data, (m, p); what was zero is zero again."""
        raw: Floats = X * self.scale
        raw += self.shift
        np.copyto(raw, 0.0, where=(0.0 - self.shift) / self.scale == X)
        return raw

    def directions(self) -> Iterator[Floats]:
        """Return the standardized design, with the offset and the columns of propensity models.

        Their sums are released as well.
        """
        if not (self.offset_name or self.question.propensities):
            yield from (X for _, X in self.chunks())
            return
        further = [
            np.column_stack(
                [*([] if rows.offset is None else [rows.offset]), *self._propensity_columns(rows)]
            )
            for rows, _ in self.chunks()
        ]
        values = np.concatenate(further)
        mean, sd = values.mean(axis=0), values.std(axis=0)
        for (_, X), more in zip(self.chunks(), further, strict=True):
            yield np.column_stack([X, (more - mean) / np.where(sd > 0.0, sd, 1.0)])

    def design_columns(self) -> Iterator[Floats]:
        """Return the design without intercept, in the units of the data, and the cells of its factors.

        Columns of propensity models follow.
        """
        return self._in_one(self._propensity_columns)

    def _propensity_columns(self, rows: CompleteRows) -> list[Floats]:
        return [one.design(rows.frame, self.data.name)[:, 1:] for one in self.question.propensities]

    def weighted_arms(self) -> list[WeightedArms]:
        """Return the rows with each propensity model by which they are weighted."""
        if not self.question.propensities:
            return []
        frame = pd.concat([rows.frame[list(self.question.needed)] for rows, _ in self.chunks()])
        return [one.rows(frame, self.data.name) for one in self.question.propensities]

    def arm_facts(self) -> Iterator[LevelRowCounts | IndicatorCounts | WorkingWeights | RowGroups]:
        """Facts on the arms, columns and weights of propensity models, as a fit of these reports them."""
        # Without propensity models no rows are read: a file may not fit into memory.
        chunks = [rows for rows, _ in self.chunks()] if self.question.propensities else []
        for one in self.question.propensities:
            Z = np.concatenate([one.design(rows.frame, self.data.name) for rows in chunks])
            arm = np.concatenate([one.arms_of(rows.frame, self.data.name) for rows in chunks])
            found = one.at(Z, arm)
            yield LevelRowCounts(one.arm, np.bincount(arm, minlength=len(one.levels)).tolist())
            yield IndicatorCounts(count_ones(Z[:, 1:]), len(Z), one.names[1:])
            yield WorkingWeights(partial(np.atleast_2d, found.weights), flat=found.is_flat)
            if one.estimand == "matching":
                yield RowGroups(CUTS, found.probabilities.argmin(axis=1), self.places, of_models=True)

    def released_columns(self) -> Iterator[Floats]:
        """Return the same, with response, offset and weights."""
        places = np.arange(len(self.question.categories))

        def more(rows: CompleteRows) -> list[Floats]:
            y = [rows.y] if self.question.response else []
            if self.question.has_categories:  # sums over the rows of a category are those with its indicator
                y = [(rows.y[:, None] == places).astype(np.float64)]
            known = [*([] if rows.offset is None else [rows.offset]), *rows.weights.values()]
            return [*y, *known, *self._propensity_columns(rows)]

        return self._in_one(more)

    def _in_one(self, more: Callable[[CompleteRows], list[Floats]]) -> Iterator[Floats]:
        first, parts = int(self.question.intercept), []
        for rows, X in self.chunks():
            added = more(rows)
            width = sum(1 if values.ndim == 1 else values.shape[1] for values in added)
            whole = np.empty((len(X), X.shape[1] - first + width))
            for start in range(0, len(X), BLOCK):
                part = slice(start, start + BLOCK)
                whole[part] = np.column_stack(
                    [self.in_units(X[part])[:, first:], *(values[part] for values in added)]
                )
            parts.append(whole)
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        q = len(self.term_names)
        cells = [column for _, column in self.cells_of_terms(joined[:, :q])]
        yield np.column_stack([joined[:, :q], *cells, joined[:, q:]]) if cells else joined

    def leveled_columns(self) -> Iterator[tuple[int, Floats]]:
        """Yield columns in the units of the data that may have few values, (n,) each, with their places.

        Columns of propensity models follow those of the design. Where effects are absorbed there are none.
        """
        if self.question.absorbed:
            return
        first, p, parts, chosen = int(self.question.intercept), len(self.scale), list[Floats](), list[int]()
        for rows, X in self.chunks():
            if not parts:
                chosen = [j for j in range(first, p) if may_have_few_values(X[:, j], REPORTED_VALUES)]
            found = np.column_stack([X[:, chosen], *self._propensity_columns(rows)])
            found[:, : len(chosen)] *= self.scale[chosen]
            found[:, : len(chosen)] += self.shift[chosen]
            parts.append(found)
        columns = np.concatenate(parts).T
        places = [*chosen, *range(p, p + len(columns) - len(chosen))]
        yield from ((j - first + 1, x) for j, x in zip(places, columns, strict=True))

    def cells_of_terms(self, X: Floats) -> Iterator[tuple[str, Floats]]:
        """Yield terms with factors of few values in every cell of these, as far as columns hide the cells.

        A column such as ``center(a):z`` is zero nowhere, and is a sum over both levels of a. Sums over one
        level follow from it and from the sum of z.
        """
        for term in self.terms:
            coded = [getattr(factor.tree, "coding", TREATMENT) != TREATMENT for factor in term]
            if len(term) < 2 and not any(coded):
                continue
            names = dict.fromkeys(name for factor in term for name in factor.columns)
            found = [
                pd.factorize(pd.concat([rows.frame[name] for rows, _ in self.chunks()]))[0]
                for name in names
                if self._has_few_values(name)
            ]
            if not found:
                continue
            _, code = np.unique(np.column_stack(found), axis=0, return_inverse=True)
            text = term_text(term)
            size = np.abs(X[:, [name == text for name in self.term_names]]).max(axis=1, initial=0.0)
            for cell in range(int(code.max()) + 1):
                yield text, np.where(code.ravel() == cell, size, 0.0)

    def _has_few_values(self, name: str) -> bool:
        if name in self.spec.levels:
            return True
        values = [rows.frame[name].iloc[:BLOCK].nunique() for rows, _ in self.chunks()]
        return (
            max(values) <= FEW_VALUES
            and len(set().union(*(rows.frame[name].unique().tolist() for rows, _ in self.chunks())))
            <= FEW_VALUES
        )

    def products(self) -> Iterator[SummedProducts]:
        """Facts on the columns whose products are summed: all columns, and those of the design by weights."""
        question = self.question
        response = [question.response] if question.response else []
        if question.response.startswith("cbind"):
            response *= 2
        if question.has_categories:
            response = [f"{question.response_columns[0]}[{level}]" for level in question.categories]
        offset = self.offset_name
        weights: dict[str, tuple[str, ...]] = {
            name: (name,) for role, name in question.weights.items() if role != "exposure"
        }
        if question.propensities:
            read_by = dict.fromkeys(name for one in question.propensities for name in one.needed)
            weights |= {"weights": tuple(read_by)}
        names, summed = self._columns()
        further, of_further = self.propensity_names()
        more = [*response, *offset, *weights, *further]
        rows = np.flatnonzero(self.used)
        kept, own = [True] * len(more), [tuple(question.response_columns)] * len(response)
        own += [tuple(question.offset_columns)] * len(offset)
        read = [*self._read(len(names)), *own, *weights.values(), *of_further]
        yield SummedProducts(self.released_columns, [*names, *more], rows, [*summed, *kept], read=read)
        if weights or question.response.startswith("cbind"):
            found = [rows.weight for rows, _ in self.chunks() if rows.weight is not None]
            yield self.products_with(np.concatenate(found))

    @property
    def offset_name(self) -> list[str]:
        """The name of the offset in messages, if there is one."""
        return [OFFSET] if self.question.offsets or "exposure" in self.question.weights else []

    def products_with(self, weights: Floats, columns: Ints | None = None) -> SummedProducts:
        """Fact on sums of products of two columns of the design with weights of the rows, (n,).

        `columns` are places of those that are multiplied, the constant among them; by default all are.
        """
        names, summed = self._columns()
        further, of_further = self.propensity_names()
        found = SummedProducts(
            self.design_columns,
            [*names, *further],
            np.flatnonzero(self.used),
            [*summed, *[True] * len(further)],
            weights=weights,
            read=[*self._read(len(names)), *of_further],
        )
        if columns is None:
            return found
        p, chosen = len(self.names), [j - 1 for j in columns.tolist() if j]
        terms = {self.term_names[j] for j in chosen}
        return found.of([*chosen, *(k for k in range(p, len(names)) if names[k] in terms)])

    def propensity_names(self) -> tuple[list[str], list[tuple[str, ...]]]:
        """Names of the columns of propensity models, and the columns of the table that each one reads."""
        models = self.question.propensities
        names = [f"{name} (of {one.arm})" for one in models for name in one.names[1:]]
        return names, [one.spec.columns for one in models for _ in one.names[1:]]

    def _read(self, count: int) -> list[tuple[str, ...]]:
        """Columns of the table from which each of `count` columns is computed, those of the design first."""
        by_term = {
            term_text(term): tuple(dict.fromkeys(name for factor in term for name in factor.columns))
            for term in self.terms
        }
        read = [by_term.get(name, ()) for name in self.term_names]
        return [*read, *[()] * (count - len(read))]

    def _columns(self) -> tuple[list[str], list[bool]]:
        """Names of the design's columns and of the cells of factors, and which are summed."""
        n = int(self.used.sum()) if self.held is None else len(self.held[1])
        cells = [text for text, _ in self.cells_of_terms(np.zeros((n, len(self.term_names))))]
        return [*self.names, *cells], [True] * len(self.names) + [False] * len(cells)


@dataclass(slots=True, eq=False)
class ColumnSurvey:
    """Kinds of a site's columns, rows of every level of those to be coded, and declared orders; by chunks.

    Of the columns in `listed` the formula, or the site's public description, says which levels they have;
    `categories` is the column of a response of categories.
    """

    site: str
    kinds: dict[str, ColumnKind] = field(default_factory=dict)
    counts: dict[str, dict[LevelValue, int]] = field(default_factory=dict)
    declared: dict[str, tuple[LevelValue, ...] | None] = field(default_factory=dict)
    listed: Mapping[str, tuple[LevelValue, ...]] = field(default_factory=dict)
    categories: tuple[str, ...] = ()

    def add(self, frame: pd.DataFrame, columns: Sequence[str], terms: Sequence[Term]) -> None:
        """Add a chunk of complete rows."""
        found = {name: column_kind(frame[name], self.site, name) for name in (*columns, *self.categories)}
        self.kinds = {name: self.kinds.get(name, kind) for name, kind in found.items()}
        for name in dict.fromkeys([*coded_columns(terms, self.kinds), *self.categories]):
            self._add_levels(frame[name], self.counts.setdefault(name, {}))
            order = _declared(frame[name], sorted_too=name not in self.categories)
            # Chunks that declare different orders declare none.
            self.declared[name] = order if self.declared.get(name, order) == order else None

    def _add_levels(self, series: pd.Series, total: dict[LevelValue, int]) -> None:
        counts = series.value_counts()
        for level in find_levels(series):
            total[level] = total.get(level, 0) + int(counts[level])
        if len(total) > MOST_LEVELS:
            identifier = "It looks like an identifier or a measurement: leave it out, or group it first"
            remedy = TEXT_OF_NUMBERS if reads_as_numbers(list(total)) else identifier
            raise DesignError(
                f"column {series.name!r} at site {self.site!r} has more than {MOST_LEVELS:,} levels. "
                f"{remedy}."
            )

    def levels(self) -> dict[str, LevelCounts]:
        """Levels of every column to be coded; a DesignError where one is not declared."""
        for name in self.counts.keys() & self.listed.keys():
            self.declared[name] = check_declared(self.site, name, self.counts[name], self.listed[name])
        return {
            name: LevelCounts(self.declared[name], tuple(total), tuple(total.values()))
            for name, total in self.counts.items()
        }


def _declared(series: pd.Series, *, sorted_too: bool) -> tuple[LevelValue, ...] | None:
    """Order that a categorical column declares; None for others, which are sorted.

    Without `sorted_too` a sorted list without an order declares none: pandas makes it from any text.
    """
    if not isinstance(series.dtype, pd.CategoricalDtype):
        return None
    if not (sorted_too or series.cat.ordered) and series.cat.categories.is_monotonic_increasing:
        return None
    return find_levels(pd.Series(series.cat.categories).astype(series.dtype))


@step(
    FAMILY,
    requests=schema("columns, terms and weights of the model"),
    replies=schema("column kinds, levels and counts of rows"),
)
def survey_rows(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Count complete rows, and release the kind of every column and the levels of categories."""
    question = RowsRequest.from_json(text)
    state.report(*question.requested())
    terms = question.read_every_term()
    listed = declared_levels(terms, data.published)
    if question.categories:
        listed |= {question.response_columns[0]: question.categories}
    key = rows_key(data, question)
    found, n, n_rows, used, outside = keep_result(
        data.table, (text, key), partial(_survey, data, question, terms)
    )
    survey = replace(found, declared=dict(found.declared), listed=listed)
    state.count_entities(n)
    behind = rows_behind(data, question, used)
    state.report(*subset_counts(question, n, outside))
    if n:  # too few rows are called so, and no difference
        state.report(RowCount(n))
    for name, total in survey.counts.items():
        counts = LevelRowCounts(name, list(total.values()), numbers=reads_as_numbers(list(total)))
        state.report(counts)
    levels = survey.levels()
    if n:
        state.report(question.column_sums(used))
        state.report(
            behind, LevelsRequested(behind.used, {name: reported.levels for name, reported in levels.items()})
        )
    return {}, codec.to_json(SiteColumns(n_rows, n, survey.kinds, levels, bool(key)))


def _survey(
    data: SiteData, question: RowsRequest, terms: Sequence[Term]
) -> tuple[ColumnSurvey, int, int, Bools, int]:
    """Survey the columns, count complete rows and rows with a weight, mark the complete ones.

    The last number is that of complete rows outside of the subset.
    """
    categories = question.response_columns if question.has_categories else ()
    survey, n, n_rows = ColumnSurvey(data.name, categories=categories), 0, data.table.n_rows
    used, outside = [np.zeros(0, dtype=bool)], 0
    for rows in find_complete_rows(data, question):
        # Rows of weight zero within a subset are not counted: two subsets could differ by few of them.
        n, n_rows = n + len(rows.frame), n_rows - (0 if question.subset else rows.weightless)
        outside += rows.outside
        used.append(rows.complete)
        if len(rows.frame):
            survey.add(rows.frame, question.columns, terms)
    return survey, n, n_rows, np.concatenate(used), outside


def varying(mean: Floats, spread: Floats, intercept: bool) -> Bools:
    """Columns that a site can say something about: those that vary, and the intercept."""
    if not intercept:
        return np.asarray((mean != 0.0) | (spread > 0.0))
    varies: Bools = spread > CONSTANT * np.abs(mean)
    # The intercept: it does not vary, and every site can say something about it.
    varies[..., 0] = True
    return varies


def standardization(mean: Floats, spread: Floats, intercept: bool) -> tuple[Floats, Floats]:
    """Shift and scale of every column from its mean and standard deviation, (..., p).

    A column that is constant at a site keeps its scale. Without an intercept nothing is shifted.
    """
    if not intercept:
        size = np.sqrt(mean**2 + spread**2)
        return np.zeros_like(mean), np.where(size > 0.0, size, 1.0)
    shift, scale = mean.copy(), np.where(varying(mean, spread, intercept), spread, 1.0)
    shift[..., 0], scale[..., 0] = 0.0, 1.0
    return shift, scale


def translation(own_shift: Floats, own_scale: Floats, shift: Floats, scale: Floats) -> Floats:
    """Matrix from coefficients of columns standardized by (shift, scale) to those of a site's own, (p, p).

    With an intercept, the first column, sum_j g_j (x_j - m_j) / s_j equals the sum over the own columns with
    d_j = g_j s_kj / s_j and the rest of it in the intercept.
    """
    T = np.diag(own_scale / scale)
    T[0, 1:] = (own_shift - shift)[1:] / scale[1:]
    T[0, 0] = own_scale[0] / scale[0]
    return T


@dataclass(frozen=True, slots=True)
class RowsCoding:
    """A :class:`RowsRequest` and the :class:`BlockSpec` by which its rows are to be coded, each in JSON."""

    question: str
    spec: str


@dataclass(frozen=True, slots=True)
class NamedColumns:
    """Design columns without the intercept, and the term of each.

    `effects` are the columns of each random effect; those that no fixed term has follow the first `fixed`
    ones.
    """

    names: tuple[str, ...]
    term_names: tuple[str, ...]
    effects: tuple[tuple[str, ...], ...] = ()
    fixed: int = -1


OPEN_ROWS = (
    EntityCount,
    RowCount,
    IndicatorCounts,
    DesignDirections,
    SummedProducts,
    RowsUsed,
    LevelsRequested,
    ColumnSums,
)
"""Facts behind whatever rests on the rows that a session opened."""


step(
    FAMILY,
    "survey_rows count_intervals transform_sums",
    request=TransformRequest,
    releases={
        "sums": aggregate(
            "sums for the transforms of the formula",
            2,
            maskable=True,
            wide=True,
            without_terms="sums of one column over the complete rows, whose sets are compared; the column "
            "enters the history when the rows are opened",
        )
    },
    rows_behind=(EntityCount, RowCount, ColumnVariation, RowsUsed),
    requests=aggregate("transforms, with their state so far", common=True),
)(transform_sums)

step(
    FAMILY,
    "survey_rows count_intervals",
    request=KnotsRequest,
    releases={
        "counts": aggregate(
            "rows by interval, for knots",
            maskable=True,
            wide=True,
            without_terms="counts of averages over successive rows, whose number is limited for each column",
        )
    },
    rows_behind=(EntityCount, RowCount, RowsUsed, LevelRowCounts, ColumnSums),
    requests=aggregate("splines of the formula, and ends of intervals", common=True),
)(count_intervals)


@step(
    FAMILY,
    requests=aggregate("coding of the columns, with the state of transforms", common=True),
    replies=schema("names of the design columns", behind=OPEN_ROWS),
    begins=True,
)
def open_rows(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Code the rows, report their counts to the disclosure checks, and name the columns."""
    request = codec.from_json(RowsCoding, text, f"{data.name}: the question about its rows")
    question, spec = RowsRequest.from_json(request.question), BlockSpec.from_json(request.spec)
    state.report(*question.requested())
    opened = OpenRows(data, question, spec, question.read_every_term())
    # Before it is coded: with far more columns than rows it may be very large.
    state.report(RowCount(data.table.n_rows, most_columns(question, opened.terms, spec)))
    tally, key = RowCounts(data, question), rows_key(data, question)
    for chunk, rows in enumerate(find_complete_rows(data, question)):
        tally.add_chunk(rows)
        if len(rows.frame):
            place = text, chunk, key
            levels = keep_result(data.table, (*place, "levels"), partial(unknown_levels, rows, spec))
            state.report(*levels)
            code = partial(design_matrix, rows.frame, question, spec, data.name)
            coded = keep_result(data.table, place, code)
            tally.add_coded(rows, coded)
            # A table of one chunk is kept as coded; with a second one, every pass reads and codes again.
            own = coded.X.copy() if keeps_results(data.table) else coded.X
            opened.held = (rows, own) if chunk == 0 else None
    n, mean, spread = tally.report_counts(state)
    opened.settle(mean, spread)
    opened.names, opened.term_names, opened.used = tally.names, tally.term_names, tally.used
    fixed = -1 if tally.columns is None else tally.columns.fixed
    opened.fixed = len(tally.names) if fixed < 0 else fixed
    head = (INTERCEPT,) if question.intercept else ()
    # Judged on standardized columns, where a direction that few rows have does not hide behind units.
    further = (*opened.offset_name, *opened.propensity_names()[0])
    design = DesignDirections(opened.directions, tally.n, (*head, *tally.names, *further))
    state.report(*opened.arm_facts(), design, *opened.products())
    outcome = {question.response_columns[0]: question.categories} if question.has_categories else {}
    state.report(tally.rows_used, LevelsRequested(tally.used, spec.levels | outcome))
    state.report(question.column_sums(tally.used))
    if question.absorbed:
        opened.absorb(state)
    state.use_columns(question.needed)
    state.keep("rows", opened, int(n[0] - opened.absorbed[1]), columns=len(tally.names))
    return {}, codec.to_json(tally.columns)


@step(
    FAMILY,
    "open_rows",
    releases={
        "moments": aggregate(
            "moments of every design column: rows, sum, squares", 2, maskable=True, wide=True
        ),
        "absorbed": aggregate(
            "rank of absorbed levels, and rows that are alone in one",
            maskable=True,
            optional=True,
            behind=(EntityCount, AbsorbedLevels, RowGroups),
        ),
        "boxes": BOXES,
    },
    rows_behind=OPEN_ROWS,
)
def sum_columns(data: SiteData, state: State) -> dict[str, Array]:
    """Sum the moments of every column over the rows.

    Released are `moments` (4, p): rows, sum, squared deviations from the site's mean, and rows times that
    mean's square; and `absorbed` (2,), where effects of levels are absorbed. Only their sums over sites are
    needed. Where masks hide them, `boxes` are what :mod:`fedstat.federation.design.sealed_levels` seals.
    """
    opened, n = rows_of(state, absorbed=True), float(state.entities)
    mean, spread = opened.own
    # Squares about the site's own mean: sums of plain squares would cancel where the mean is large.
    found = {"moments": np.array([np.full_like(mean, n), n * mean, n * spread**2, n * mean**2])}
    found |= seal_levels(data, state)
    return found | ({"absorbed": opened.absorbed} if opened.question.absorbed else {})


MOST_BUCKETS = 2**15


def hash_labels(labels: Sequence[object], key: int) -> Ints:
    """Return keyed 62-bit hashes of labels; integers and equal numbers with a zero fraction agree."""
    # Only the sites have the key: without a key a coordinator could hash likely labels and compare.
    secret = (key % 2**128).to_bytes(16, "little")
    out = np.empty(len(labels), dtype=np.int64)
    for i, label in enumerate(labels):
        plain = int(label) if isinstance(label, float) and label.is_integer() else label
        digest = hashlib.blake2b(repr(plain).encode(), key=secret, digest_size=8).digest()
        # 62 bits fit an int64; zero is reserved for "no strata".
        out[i] = (int.from_bytes(digest, "little") >> 2) + 1
    return out


def plain_labels(labels: pd.Index) -> list[object]:
    """Return labels as values of Python."""
    return [getattr(label, "item", lambda label=label: label)() for label in labels]


def are_serial(labels: Sequence[Any]) -> bool:
    """Return whether labels are numbers from zero or one on, such as a site gives to its own patients."""
    numbers = pd.to_numeric(pd.Series(labels, dtype=object), errors="coerce")
    return bool(numbers.min() in (0.0, 1.0) and numbers.max() <= SERIAL * len(numbers) + 1.0)


SERIAL = 1.2
"""Largest number among labels from one on, relative to how many these are."""


@dataclass(frozen=True, slots=True)
class LabelRequest:
    """Columns whose labels are compared between sites, and the number of buckets of their hashes."""

    columns: tuple[str, ...]
    buckets: int


@step(
    FAMILY,
    "sum_columns count_labels take_levels",
    request=LabelRequest,
    requests=schema("columns of groups, and the number of buckets"),
    releases={
        "labels": presence("labels of groups by bucket of their keyed hashes", maskable=True),
        "compared": control("whether labels are compared", 0, maskable=True),
        "serial": control("whether labels are numbers from one on", 0, maskable=True),
    },
)
def count_labels(data: SiteData, state: State, request: LabelRequest) -> dict[str, Array]:
    """Count the labels of groups by bucket: ``labels`` (buckets,).

    Over all sites a bucket with two labels has one that two sites hold, or two by chance. The coordinator has
    no key, and cannot know which labels are in a bucket. Nothing is counted where few labels would be, or
    sites have no secret in common.
    """
    opened, columns = rows_of(state, absorbed=True), list(request.columns)
    if not columns or not set(columns) <= set(opened.question.labels):
        raise MessageError(f"{data.name}: the model did not open columns {columns} as labels")
    if not 1 <= request.buckets <= MOST_BUCKETS:
        raise MessageError(f"{data.name}: expected 1 to {MOST_BUCKETS:,} buckets")
    counts = np.zeros(request.buckets)
    if isinstance(data.table, LabeledTable) and data.table.name in columns:
        # Groups inside a site that is part of their label have no equal at another site.
        return {"labels": counts, "compared": np.array(True), "serial": np.array(False)}
    frame = pd.concat([rows.frame[columns] for rows, _ in opened.chunks()]).drop_duplicates()
    compared = data.shared_seed is not None and len(frame) >= data.policy.min_count
    serial = False
    if compared:
        lines = list(zip(*(plain_labels(pd.Index(frame[name])) for name in columns), strict=True))
        labels = [tuple(map(_whole, line)) for line in lines]
        hashes = hash_labels([(*columns, *line) for line in labels], data.common_seed)
        counts += np.bincount(hashes % request.buckets, minlength=request.buckets)
        serial = len(columns) == 1 and are_serial([line[0] for line in labels])
    return {"labels": counts, "compared": np.array(compared), "serial": np.array(serial)}


def _whole(label: object) -> object:
    return int(label) if isinstance(label, float) and label.is_integer() else label


def rows_of(state: State, *, absorbed: bool = False) -> OpenRows:
    """Return the rows that this session opened, unless the site has forgotten them.

    Only steps of least squares take rows less `absorbed` effects, which have no means and no outcomes.
    """
    absent = "no rows are open in this session (a site keeps the latest ones only); make the model again"
    opened = state.use("rows", OpenRows, absent)
    if opened.question.absorbed and not absorbed:
        raise MessageError(f"{opened.data.name}: effects are absorbed from the rows of this session")
    return opened
