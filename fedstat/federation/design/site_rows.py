"""The rows of one site in the horizontal layout: complete rows, and their numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from fedstat import codec
from fedstat.errors import DesignError, FormulaError, MessageError
from fedstat.federation.design.block import code_rows
from fedstat.federation.design.coding import (
    STATE_KEYS,
    BlockSpec,
    CodedColumns,
    build_offset,
    build_response,
    build_times,
    read_terms,
    rows_within,
)
from fedstat.federation.design.formula.expression import parse_expression, parse_subset, quoted_name
from fedstat.federation.design.formula.facts import (
    column_facts,
    offset_facts,
    response_facts,
    subset_facts,
    term_facts,
)
from fedstat.federation.design.formula.syntax_tree import (
    Category,
    Column,
    Survival,
    Transform,
    has_knots,
    inner_knots,
    iter_transforms,
    with_places,
)
from fedstat.federation.design.formula.terms import Term
from fedstat.federation.design.imputed_cells import ImputedTable, imputed_cells
from fedstat.federation.design.propensity_weights import PropensityWeights
from fedstat.federation.disclosure.analysis_sets import leave_out_rows, leaves_out
from fedstat.federation.disclosure.column_sums import counted_up_to
from fedstat.federation.disclosure.facts import ColumnSums, FactorsRequested, LevelRowCounts, RowsUsed
from fedstat.federation.disclosure.state import SiteData
from fedstat.federation.tables.columns import (
    LevelValue,
    as_numbers,
    at_column,
    column_kind,
    missing_cells,
    pick_columns,
)
from fedstat.federation.tables.curves import LARGEST_GAP, curves_of
from fedstat.federation.tables.table import in_memory, keep_result, keeps_results
from fedstat.spline_names import without_options
from fedstat.typing import Bools, Floats, Ints

BLOCK = 4096
INTERCEPT = "Intercept"
WEIGHTS = ("freq_weights", "var_weights", "exposure")
MOST_NAMES = 10_000
"""Terms or columns of a question."""


@dataclass(frozen=True, slots=True)
class EffectTerms:
    """The terms of one random effect, which have a coding of their own; none for an intercept alone."""

    intercept: bool
    terms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """The parts of every site's table that a model reads; plain values.

    `response` is the left side, with times where it is ``Surv(...)``, categories where it is ``C(...)``,
    `offsets` are expressions inside ``offset()``, each with the columns that it reads; `terms` are empty for
    an intercept alone. `weights` are columns by role ("freq_weights", "var_weights", "exposure"), `labels`
    columns of groups: clusters, strata. `effects` are the designs of random effects, whose columns are among
    `columns` as well. `curves` are integrated, so no long stretch of one may be unknown; a
    `curve_response` replaces the response. All comparisons of `subset` hold for the rows that are used.
    With `imputed`, missing cells are those that the site has drawn.
    `placed` are the splines whose knots were found from counts: what the analyst wrote, by what the terms
    have now. `absorbed` are effects whose levels are removed from response and columns, each the labels whose
    combinations are its levels; factors are then coded as next to an intercept, which the design has not.
    Rows have the product of the weights of all `propensities`.
    """

    response: str
    response_columns: tuple[str, ...]
    terms: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    offsets: tuple[str, ...] = ()
    offset_columns: tuple[str, ...] = ()
    intercept: bool = True
    weights: Mapping[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    effects: tuple[EffectTerms, ...] = ()
    curves: tuple[str, ...] = ()
    curve_response: str = ""
    subset: tuple[str, ...] = ()
    placed: Mapping[str, str] = field(default_factory=dict)
    imputed: ImputedTable | None = None
    absorbed: tuple[tuple[str, ...], ...] = ()
    propensities: tuple[PropensityWeights, ...] = ()

    @property
    def absorbed_texts(self) -> tuple[str, ...]:
        """Names of the absorbed effects, such as ``"ward"`` and ``"ward^year"``."""
        return tuple("^".join(names) for names in self.absorbed)

    @property
    def has_times(self) -> bool:
        """Whether the response is ``Surv(...)``."""
        return self.response.startswith("Surv(")

    @property
    def survival(self) -> Survival | None:
        """Times and event of the response, where it is ``Surv(...)``."""
        tree = parse_expression(self.response, response=True).tree if self.response else None
        return tree if isinstance(tree, Survival) else None

    @property
    def has_categories(self) -> bool:
        """Whether the response is ``C(...)``."""
        return self.response.startswith("C(")

    @property
    def categories(self) -> tuple[LevelValue, ...]:
        """Levels of a response ``C(y, levels=[...])``, in order; none where it lists none."""
        tree = parse_expression(self.response, response=True).tree if self.has_categories else None
        return tree.levels if isinstance(tree, Category) else ()

    def with_categories(self, levels: Sequence[LevelValue]) -> RowsRequest:
        """Return the same question with these levels of its response; none are to be agreed on."""
        (name,) = self.response_columns
        listed = f", levels={list(levels)!r}" if levels else ""
        return replace(self, response=f"C({quoted_name(name)}{listed})")

    @property
    def needed(self) -> tuple[str, ...]:
        """All columns that are read, each once."""
        named = (*self.response_columns, *self.columns, *self.offset_columns, *self.weights.values())
        response = (self.curve_response,) if self.curve_response else ()
        of_arms = (name for one in self.propensities for name in one.needed)
        more = (*self.labels, *response, *self.curves, *self.subset_columns, *of_arms)
        return tuple(dict.fromkeys((*named, *more)))

    @property
    def subset_columns(self) -> tuple[str, ...]:
        """Columns that the subset compares, each once."""
        found = (parse_subset(text) for text in self.subset)
        return tuple(dict.fromkeys(name for several in found for one in several for name in one.columns))

    @property
    def subset_text(self) -> str:
        """The comparisons, joined; empty if all rows are used."""
        return " & ".join(self.subset)

    def describe_placed(self) -> str:
        """Return the splines whose knots were found, with the knots and bounds of each."""
        found = []
        for text in self.placed:
            options: dict[str, Any] = dict(parse_expression(text).tree.options)  # type: ignore[union-attr]
            knots = ", ".join(f"{knot:g}" for knot in options["knots"])
            inner = f"at {knots} " if knots else ""
            low, high = options["lower_bound"], options["upper_bound"]
            found.append(f"{without_options(text)} {inner}between {low:g} and {high:g}")
        return "; ".join(found)

    def to_json(self) -> str:
        """Write the question as JSON text, without a subset, found knots or imputed cells as before these."""
        plain = codec.to_plain(self)
        for name in ("subset", "placed", "imputed", "absorbed", "propensities"):
            if not plain[name]:
                del plain[name]
        return json.dumps(plain, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> RowsRequest:
        """Read a question, checked as if a stranger had written it; a MessageError where it is none."""
        return codec.from_json(cls, text, "the question about a table's rows", defaults=True)

    def check(self) -> None:
        """Refuse a response that a site cannot compute from its own rows, and too many columns.

        Raises a FormulaError for a centered or scaled response, which needs the rows of all sites, and a
        MessageError for an unknown role, or for more than `MOST_NAMES` terms or columns.
        """
        if not set(self.weights) <= set(WEIGHTS):
            raise MessageError("the question about a table's rows names unknown roles")
        n_terms = len(self.terms) + sum(1 + len(one.terms) for one in self.effects)
        if max(n_terms, len(self.needed)) > MOST_NAMES:
            raise MessageError(f"the question about a table's rows has more than {MOST_NAMES:,} names")
        if not all(_is_placed(new, old) for new, old in self.placed.items()):
            raise MessageError("the question about a table's rows has knots for other splines")
        plain = self.response and not self.response.startswith(("Surv(", "C(", "cbind("))
        labels = {name for names in self.absorbed for name in names}
        if self.absorbed and (self.intercept or self.effects or not plain or not labels <= set(self.labels)):
            raise MessageError("the question about a table's rows absorbs effects that it cannot have")
        for one in self.propensities:
            one.check()
        if self.propensities and (self.absorbed or self.effects or set(self.weights) - {"exposure"}):
            raise MessageError("the question about a table's rows has weights that do not belong together")
        if self.curve_response:
            if self.response or self.response_columns:
                raise MessageError("the question about a table's rows has two responses")
            return
        if not self.response:  # a table has columns and no response
            if self.response_columns:
                raise MessageError("the question about a table's rows has columns of a response, and none")
            return
        for transform in iter_transforms(parse_expression(self.response, response=True).tree):
            if transform.function in STATE_KEYS:
                raise FormulaError(
                    f"formula: {transform.text!r} on the left side needs the rows of all sites; compute it "
                    "before, or leave the response in its own units"
                )

    def requested(self) -> tuple[FactorsRequested, ...]:
        """Report what is to be computed, which the site checks before a row is read."""
        return (
            replace(term_facts(self.read_every_term()), counted=self.counted),
            *(term_facts(one.read_terms()) for one in self.propensities),
            *([response_facts(self.response)] if self.response else []),
            offset_facts(self.offsets),
            subset_facts(self.subset),
            column_facts((*self.weights.values(), *self.read_curves), self.labels),
        )

    @property
    def weighted(self) -> bool:
        """Whether rows have weights or an exposure."""
        return bool(self.weights or self.propensities)

    @property
    def counts_rows(self) -> bool:
        """Whether weights are the numbers of rows for which rows stand."""
        return "freq_weights" in self.weights

    @property
    def counted(self) -> bool:
        """Whether columns are named as numbers of entities, by these weights or by ``cbind()``."""
        return self.counts_rows or self.response.startswith("cbind(")

    def column_sums(self, used: Bools, products: bool = False, weights: str = "") -> ColumnSums:
        """Report which functions of columns are summed over rows, with their `products` if these are."""
        *computed, _, _ = self.requested()
        factors = [factor for fact in computed for factor in fact.factors]
        table = "" if self.imputed is None else codec.to_json(self.imputed)
        return ColumnSums(factors, used, products, weights, table=table)

    @property
    def read_curves(self) -> tuple[str, ...]:
        """All curves that are read."""
        return tuple(dict.fromkeys((*([self.curve_response] if self.curve_response else []), *self.curves)))

    def read_terms(self) -> tuple[Term, ...]:
        """Read the fixed terms of the right side again, checked."""
        return self.read_every_term()[: len(self.terms)]

    @property
    def every_term(self) -> tuple[str, ...]:
        """Texts of the fixed terms, and of those that random effects have beyond them."""
        return tuple(dict.fromkeys((*self.terms, *(text for one in self.effects for text in one.terms))))

    def read_every_term(self) -> tuple[Term, ...]:
        """Read the fixed terms, and those of random effects, again, checked."""
        return read_terms(self.every_term, self.columns) if self.every_term else ()


def _is_placed(new: str, old: str) -> bool:
    """Return whether a text is a spline with knots, and another one the same spline without."""
    spline, asked = (parse_expression(text).tree for text in (new, old))
    if not (isinstance(spline, Transform) and isinstance(asked, Transform) and has_knots(spline)):
        return False
    options: dict[str, Any] = dict(spline.options)
    places = (options["lower_bound"], *options["knots"], options["upper_bound"])
    same = inner_knots(asked) == len(options["knots"]) and not has_knots(asked)
    return same and with_places(asked, places) == new


@dataclass(frozen=True, slots=True, eq=False)
class CompleteRows:
    """The m rows of a chunk that lack nothing: their needed columns, and where in the chunk they are.

    `y` is (m,), or (m, 2) for counts; `offset` (m,) has the logarithm of the exposure in it; `weights` (m,)
    are by role, without the exposure. `weightless` counts the rows that are left out for a weight, or
    binomial trials, of zero, and `outside` complete rows outside of the subset. Of ``Surv(...)`` `y` is
    the event, and `times` (m, 2) are start and stop.
    """

    frame: pd.DataFrame
    complete: Bools
    y: Floats
    offset: Floats | None
    weights: Mapping[str, Floats]
    weightless: int = 0
    times: Floats | None = None
    outside: int = 0

    @property
    def weight(self) -> Floats | None:
        """Product of the weights and of binomial trials: (m,); None where all rows count the same."""
        factors = [*self.weights.values(), *([self.y.sum(axis=1)] if self.y.ndim == 2 else [])]
        return np.prod(factors, axis=0) if factors else None

    def with_weight(self) -> CompleteRows:
        """Leave out rows without a weight: they are behind no sum, and may be behind no count."""
        if self.weight is None or (self.weight > 0.0).all():
            return self
        has = self.weight > 0.0
        return replace(self.only(has), weightless=self.weightless + int((~has).sum()))

    def only(self, has: Bools) -> CompleteRows:
        """Leave out all rows but some, (m,)."""
        complete = self.complete.copy()
        complete[self.complete] = has
        return CompleteRows(
            self.frame[has],
            complete,
            self.y[has],
            None if self.offset is None else self.offset[has],
            {role: values[has] for role, values in self.weights.items()},
            self.weightless,
            None if self.times is None else self.times[has],
            self.outside,
        )


def find_complete_rows(data: SiteData, question: RowsRequest) -> Iterator[CompleteRows]:
    """Read a site's table in chunks, without rows that lack a value that the request reads.

    Rows of weight zero are left out as well, and rows that would differ by few from those of earlier analyses
    (:func:`leave_out_rows`). Raises a DesignError for a column that is absent or of
    an unsupported type, for a negative weight, for an exposure that is not positive, and for a response or
    offset that is not finite. A small table in memory is read once for the same request.
    """
    kept = used_rows(data, question)
    start = 0
    for rows in _every_complete_row(data, question):
        place = slice(start, start := start + len(rows.complete))
        yield rows if kept is None else _only(rows, kept[place])


def _only(rows: CompleteRows, kept: Bools) -> CompleteRows:
    has = kept[rows.complete]
    return rows if has.all() else rows.only(has)


def used_rows(data: SiteData, question: RowsRequest) -> Bools | None:
    """Return the rows, (n_rows,), that a request uses or has a subset of; None if these are all complete.

    A subset does not decide which rows are left out: their number would reveal whether few rows are
    outside of it. Imputation fills the cells that rows lack, and uses all rows.
    """
    if question.imputed is not None or not leaves_out(data):
        return None
    question = _without_subset(question)
    leave_out = partial(leave_out_rows, data, columns=question.needed)
    return data.memory.rows_of(repr(question), partial(_complete, data, question), leave_out)


def _without_subset(question: RowsRequest) -> RowsRequest:
    columns = tuple(dict.fromkeys((*question.columns, *question.subset_columns)))
    return replace(question, subset=(), columns=columns) if question.subset else question


def _complete(data: SiteData, question: RowsRequest) -> Bools:
    values_decide = question.read_curves or question.subset or "freq_weights" in question.weights
    if values_decide or keeps_results(data.table):
        parts = (rows.complete for rows in _every_complete_row(data, question))
    else:  # responses and designs of large tables are not built twice
        read = _chunks(data, question)
        parts = (_has_all_cells(chunk, pick_columns(chunk, question.needed, data.name)) for chunk in read)
    return np.concatenate([np.zeros(0, dtype=bool), *parts])


def _has_all_cells(chunk: pd.DataFrame, series: Mapping[str, pd.Series]) -> Bools:
    return np.logical_not(missing_cells(series.values(), len(chunk)).any(axis=1))


def rows_behind(data: SiteData, question: RowsRequest, used: Bools, events: Bools | None = None) -> RowsUsed:
    """Return the fact on the rows of a request, and on those of which it has a subset."""
    if not question.subset:
        return RowsUsed(used, events)
    whole = used_rows(data, question)
    return RowsUsed(used, events, _complete(data, _without_subset(question)) if whole is None else whole)


def rows_key(data: SiteData, question: RowsRequest) -> bytes:
    """Return a key of the rows that a request uses; empty if these are all complete ones."""
    kept = used_rows(data, question)
    return b"" if kept is None else hashlib.sha256(np.packbits(kept).tobytes()).digest()


def _every_complete_row(data: SiteData, question: RowsRequest) -> Iterator[CompleteRows]:
    if in_memory(data.table):
        return iter(keep_result(data.table, repr(question), lambda: list(_complete_rows(data, question))))
    return _complete_rows(data, question)


def _chunks(data: SiteData, question: RowsRequest) -> Iterator[pd.DataFrame]:
    """Read the columns of a request, with the cells that the site has imputed."""
    if question.imputed is None:
        yield from data.table.chunks(question.needed)
        return
    cells = imputed_cells(data.imputations, data.name, question.imputed, data.table.n_rows)
    (frame,) = data.table.chunks(question.needed)  # only tables in memory are imputed
    yield cells.fill(frame, question.imputed)


def _complete_rows(data: SiteData, question: RowsRequest) -> Iterator[CompleteRows]:
    for chunk in _chunks(data, question):
        series = pick_columns(chunk, question.needed, data.name)
        complete = _has_all_cells(chunk, series)
        for name in question.read_curves:
            # A response is not integrated: its points may be unknown, unless its owner says otherwise.
            largest = LARGEST_GAP if name in question.curves else 1.0
            complete &= ~curves_of(series[name]).gappy(largest)
        weightless = 0
        # Rows of weight zero are no entities; they would count towards the owner's minimum number of rows.
        if "freq_weights" in question.weights and complete.any():
            name = question.weights["freq_weights"]
            none = _numbers(chunk, name, data.name) == 0.0
            complete, weightless = complete & ~none, int(none.sum())
        outside = 0
        if question.subset and complete.any():
            within = rows_within(chunk[complete], question.subset, data.name)
            outside = int((~within).sum())
            complete[complete] = within
        if not complete.any():  # an empty column has no informative type
            yield CompleteRows(chunk[complete], complete, np.zeros(0), None, {}, weightless, outside=outside)
            continue
        frame = chunk if complete.all() else chunk[complete]
        y = _response(frame, question, data.name)
        offset, weights = _offset(frame, question, data.name), _weights(frame, question, data.name)
        times = None
        if question.has_times:
            times = build_times(frame, question.response, question.response_columns, data.name)
        found = CompleteRows(frame, complete, y, offset, weights, weightless, times, outside)
        yield found.with_weight()


def _response(frame: pd.DataFrame, question: RowsRequest, site: str) -> Floats:
    """Numbers of the left side, which are none where it is a curve or empty."""
    if not question.response:
        return np.zeros(len(frame))
    return build_response(frame, question.response, question.response_columns, site)


def _numbers(frame: pd.DataFrame, name: str, site: str) -> Floats:
    if column_kind(frame[name], site, name) != "number":
        raise DesignError(f"{at_column(site, name)} holds categories; a weight or exposure must be numbers")
    return as_numbers(frame[name], site, name)


def _offset(frame: pd.DataFrame, question: RowsRequest, site: str) -> Floats | None:
    parts = []
    if question.offsets:
        parts.append(build_offset(frame, question.offsets, question.offset_columns, site))
    if "exposure" in question.weights:
        name = question.weights["exposure"]
        exposure = _numbers(frame, name, site)
        if (exposure <= 0.0).any():
            count = int((exposure <= 0.0).sum())
            raise DesignError(
                f"{at_column(site, name)}: {count:,} exposures are not positive; leave them out"
            )
        parts.append(np.log(exposure))
    return np.sum(parts, axis=0) if parts else None


def _weights(frame: pd.DataFrame, question: RowsRequest, site: str) -> dict[str, Floats]:
    weights = {}
    if question.propensities:
        factors = [one.rows(frame, site).weights for one in question.propensities]
        weights["var_weights"] = np.prod(factors, axis=0)
    for role in ("freq_weights", "var_weights"):
        if role not in question.weights:
            continue
        name = question.weights[role]
        values = _numbers(frame, name, site)
        if (values < 0.0).any():
            count = int((values < 0.0).sum())
            raise DesignError(
                f"{at_column(site, name)}: {count:,} weights are negative; leave these rows out"
            )
        weights[role] = values
    return weights


def subset_counts(question: RowsRequest, inside: int, outside: int) -> Iterator[LevelRowCounts]:
    """Report how many complete rows are in the subset and outside of it, as those of two levels."""
    if question.subset:
        yield LevelRowCounts(question.subset_text, [inside, outside])


def design_matrix(
    frame: pd.DataFrame, question: RowsRequest, spec: BlockSpec, site: str, by: str = ""
) -> CodedColumns:
    """Code complete rows by an agreed specification, or their derivatives `by` a column of numbers.

    The design is (m, q), C-contiguous, its first column one where there is an intercept, which has no name
    and no term. Columns that only random effects have follow those of the fixed terms.
    """
    m, terms = len(frame), question.read_terms()
    plain = [name for term in terms if (name := _plain_column(term, spec)) is not None]
    # Numeric columns as they stand need no coding: formulaic would only copy them.
    if len(plain) == len(terms):
        numbers = [
            np.full(m, float(name == by)) if by else as_numbers(frame[name], site, name) for name in plain
        ]
        X = _stack(numbers, m, question.intercept)
        fixed = CodedColumns(X, tuple(plain), question.terms)
    else:
        coded = _coded(frame, question, question.terms, spec, site, by)
        X = np.column_stack([np.ones(m), coded.X]) if question.intercept else coded.X
        fixed = replace(coded, X=np.ascontiguousarray(X))
    if by and question.intercept:
        fixed.X[:, 0] = 0.0
    return _with_effects(fixed, frame, question, spec, site, by) if question.effects else fixed


def _coded(
    frame: pd.DataFrame,
    question: RowsRequest,
    terms: tuple[str, ...],
    spec: BlockSpec,
    site: str,
    by: str = "",
) -> CodedColumns:
    own = spec.part(terms)
    series = {name: frame[name] for name in own.columns}
    return code_rows(series, read_terms(own.terms, own.columns), own, len(frame), site, by)


def code_effects(
    frame: pd.DataFrame, question: RowsRequest, spec: BlockSpec, site: str, by: str = ""
) -> Iterator[CodedColumns]:
    """Code the columns of each random effect as a design of its own, as R does: (m, q), an intercept first.

    A factor whose margin is absent has a column for each level. With `by` they are derivatives by a column.
    """
    for effect in question.effects:
        X, names, terms = np.ones((len(frame), 0)), tuple[str, ...](), tuple[str, ...]()
        cells: Mapping[str, Ints] = {}
        if effect.terms:
            own = _coded(frame, question, effect.terms, replace(spec, intercept=effect.intercept), site, by)
            X, names, terms, cells = own.X, own.names, own.term_names, own.cells
        if effect.intercept:
            X, names, terms = (
                np.column_stack([np.full(len(frame), float(not by)), X]),
                (INTERCEPT, *names),
                (INTERCEPT, *terms),
            )
        yield CodedColumns(X, names, terms, cells)


def _with_effects(
    fixed: CodedColumns, frame: pd.DataFrame, question: RowsRequest, spec: BlockSpec, site: str, by: str
) -> CodedColumns:
    """Add the columns that only random effects have; equal names are equal columns."""
    known = dict.fromkeys((*((INTERCEPT,) if question.intercept else ()), *fixed.names))
    parts, names, terms, cells = [fixed.X], list(fixed.names), list(fixed.term_names), dict(fixed.cells)
    effects = []
    for own in code_effects(frame, question, spec, site, by):
        new = [j for j, name in enumerate(own.names) if name not in known]
        known |= dict.fromkeys(own.names)
        parts.append(own.X[:, new])
        names += [own.names[j] for j in new]
        terms += [own.term_names[j] for j in new]
        cells |= own.cells
        effects.append(own.names)
    X = np.ascontiguousarray(np.column_stack(parts))
    return CodedColumns(X, tuple(names), tuple(terms), cells, tuple(effects), len(fixed.names))


def _plain_column(term: Term, spec: BlockSpec) -> str | None:
    """Name of the numeric column that a term is, if it is no more than that."""
    (factor, *others) = term
    if others or not isinstance(factor.tree, Column) or spec.kinds[factor.tree.name] != "number":
        return None
    if factor.label != factor.tree.name:  # I(x) and Q('x') have names of their own
        return None
    return factor.tree.name


def _stack(columns: list[Floats], m: int, intercept: bool) -> Floats:
    """Columns side by side in row order, by blocks of rows that stay in cache."""
    first = int(intercept)
    X = np.empty((m, len(columns) + first))
    X[:, :first] = 1.0
    for start in range(0, m, BLOCK):
        rows = slice(start, start + BLOCK)
        for j, values in enumerate(columns, first):
            X[rows, j] = values[rows]
    return X


# ----------------------------------------------------------------------------------------------------
# Averages over blocks of rows, by which counts on narrow intervals are about no few rows.


def count_blocks(code: Ints, size: int) -> int:
    """Count the blocks of :func:`block_means` in which several rows are averaged."""
    sizes = np.unique(code, return_counts=True)[1]
    return int(np.maximum(sizes // size, 1).sum()) if size > 1 else 0


def block_means(code: Ints, values: Floats, size: int) -> Floats:
    """Replace values (n,) by means of blocks of `size` successive ones or more, within each code (n,).

    Blocks have equal sizes as far as possible. With `size` 1 nothing changes, nor does a block of equal
    values. Means of whole numbers are whole: intervals count up to their ends, and a part would always be
    rounded up.
    """
    if size <= 1 or not len(values):
        return values
    whole = bool((values == np.rint(values)).all())
    order = np.lexsort((values, code))
    x, sorted_code = values[order], code[order]
    starts = np.flatnonzero(np.append(True, np.diff(sorted_code) != 0))
    sizes = np.diff(np.append(starts, len(x)))
    blocks = np.maximum(sizes // size, 1)
    # The first blocks of a code have one row more than the others.
    least, longer = np.divmod(sizes, blocks)
    place = np.arange(blocks.sum()) - np.repeat(blocks.cumsum() - blocks, blocks)
    begin = np.repeat(starts, blocks) + place * np.repeat(least, blocks)
    begin += np.minimum(place, np.repeat(longer, blocks))
    lengths = np.diff(np.append(begin, len(x)))
    first, last = x[begin], x[begin + lengths - 1]
    means = np.where(first == last, first, np.add.reduceat(x, begin) / lengths)
    out = np.empty(len(x))
    out[order] = np.repeat(np.rint(means) if whole else means, lengths)
    return out


def interval_names(code: Ints, size: int, ends: Floats, of: str = "") -> list[str]:
    """Name the counts, by code (n,), of rows that :func:`block_means` averaged up to each end.

    However many ends there are, the counts reveal no more than one number for each block.
    """
    division, blocks = hashlib.sha256(code.tobytes()).hexdigest()[:16], count_blocks(code, size)
    counts = [f"{end:.17g} {one}" for end in ends for one in np.unique(code).tolist()]
    numbers = counts if len(counts) < blocks else map(str, range(blocks))
    return [counted_up_to(f"{division}{of}", blocks, one) for one in numbers]


def quantile_places(counts: Floats, shares: Floats, end: Callable[[Floats], Floats]) -> Ints:
    """Return the interval of each quantile, (G, Q), from counts (G, J): of the row before or after it."""
    upto = counts.cumsum(axis=1)
    positions = end(shares * np.maximum(upto[:, -1:] - 1.0, 0.0))
    found = [np.searchsorted(row, at, side="right") for row, at in zip(upto, positions, strict=True)]
    return np.asarray(np.minimum(np.array(found), counts.shape[1] - 1), dtype=np.int64)
