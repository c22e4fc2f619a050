"""Tables over sites: the functions that users call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import combinations, product
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from fedstat.errors import DataWarning, DesignError, FormulaError, ModelError, PolicyError, Remedy, warn
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.formula.expression import quoted_name
from fedstat.federation.design.formula.parse import Formula, SiteTerms, parse_formula, parse_pooled_formula
from fedstat.federation.design.formula.syntax_tree import Category, Column
from fedstat.federation.design.formula.terms import parse_term
from fedstat.federation.design.site_rows import quantile_places
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.dry_run.execution import DrySite
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.explanation import Explanation
from fedstat.models.checks import check_choice, check_integer, check_layout, check_masked, checks_names
from fedstat.models.copula.private_release import USUAL_DELTA
from fedstat.models.descriptive.columns import ColumnPair, PairTable
from fedstat.models.descriptive.frames import TableFrame, table_frame
from fedstat.models.descriptive.noisy_model import NoiseSetting
from fedstat.models.descriptive.noisy_results import (
    Figures,
    RequestedTable,
    noisy_corr,
    noisy_crosstab,
    noisy_histogram,
    noisy_quantile_table,
    noisy_table_one,
)
from fedstat.models.descriptive.protocol import (
    DIVISIONS,
    ENDS,
    CategoryTable,
    NumberTable,
    category_table,
    correlation,
    number_table,
    rank_correlation,
    request_of,
)
from fedstat.models.descriptive.steps import FAMILY
from fedstat.models.descriptive.synthetic import with_synthetic_cells, with_synthetic_ranks
from fedstat.models.descriptive.table_one import Groups, TableOne, TableVariable
from fedstat.models.explain import DryRunPlan
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.typing import Floats

STEPS = 1024
"""Fewest steps of a public range, to one of which a quantile is known."""
QUARTERS = (0.25, 0.5, 0.75)
ROWS = "rows of the table"
"""A name that stands where the parser wants a response."""
Bounds = Mapping[str, Any]
"""By column the ends of a range as a tuple, or for tables with epsilon a list of levels."""


class TablePlan(DryRunPlan):
    """The plan of a table: how many intervals are divided depends on where its quantiles are."""

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        edges, shares, groups = given["edges"], given["shares"], len(model.group_names)
        if edges is not None and len(shares):
            # Of all rows and of each group, the row before and the row after each quantile.
            divided = min(len(edges) - 1, len(ENDS) * len(shares) * (groups + 1))
            intervals = len(edges) + 1 + divided * (DIVISIONS - 1)
            self.largest = {("count_cells", "cells"): groups * intervals}


class TableModel(HorizontalModel):
    """One column of a table: a number or a category, by groups."""

    model_name: ClassVar[str] = "Table"
    _columns_from = "columns"
    _plan = TablePlan
    _goes_on = True

    def __init__(
        self,
        partition: ClientPartition,
        groups: Sequence[str],
        number: str = "",
        category: str = "",
        complete: Sequence[str] = (),
        subset: str | None = None,
    ) -> None:
        check_layout("A table", partition, "horizontal")
        self.groups, self.number, self.category = tuple(groups), number, category
        coded = dict.fromkeys((*groups, *([category] if category else [])))
        terms = [f"C({quoted_name(name)})" for name in coded] + ([quoted_name(number)] if number else [])
        columns = (*coded, *([number] if number else []))
        text = f"~ {' + '.join(terms)}"
        formula = Formula(text, "", None, (), True, (SiteTerms("", tuple(terms), columns),))
        super().__init__(formula, partition, complete=complete, subset=subset)
        if number and self.agreement.spec.kinds[number] == "category":
            self.number, self.category = "", number

    def _report_missing(self, missing: object) -> None:
        """Leave missing values to the table, which counts them."""

    def fit(
        self,
        edges: Floats | None = None,
        moments: bool = True,
        shares: Sequence[float] = (),
        masked: bool | None = None,
    ) -> Any:
        """Count the column; `edges`, `moments` and `shares` are for numbers."""
        call = Call.of(self.fit, locals())
        return run_fit(self, call, TableModel._count, edges, moments, shares, masked)

    def _count(
        self,
        attempt: FitAttempt,
        edges: Floats | None,
        moments: bool,
        shares: Sequence[float],
        masked: object,
    ) -> tuple[NumberTable | CategoryTable, Ledger]:
        session = self._open_session(FAMILY, check_masked(masked, len(self.sites), self._masks_wanted))
        request = request_of(session, self.groups, self.number, self.category)
        found: NumberTable | CategoryTable
        if self.category:
            found = attempt.run(category_table(session, request), session.masked_sites)
        else:
            protocol = number_table(session, request, edges, moments, shares)
            found = attempt.run(protocol, session.masked_sites)
        return found, attempt.ledger

    def _invent_sites(self, plan: DryRunPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        sites = super()._invent_sites(plan, policies)
        return with_synthetic_cells(sites, self.agreement, self.groups, self.category)

    @property
    def group_names(self) -> list[tuple[Any, ...]]:
        """Combinations of levels of the groups, in the order of their codes."""
        return list(product(*(self.agreement.spec.levels[name] for name in self.groups)))

    @property
    def missing(self) -> int | None:
        """Rows that lack the column or a group; None with a subset, outside of which other rows are."""
        if self.question.subset:
            return None
        return sum(row.n_rows - row.n for row in self.agreement.sites)


def _check_partition(partition: object) -> None:
    """Require a partition, of either layout."""
    if not isinstance(partition, ClientPartition):
        check_layout("A table", partition, "horizontal")


def _check_column(argument: str, name: object) -> None:
    """Require the name of one column."""
    if not isinstance(name, str) or not name:
        several = isinstance(name, Sequence) and not isinstance(name, str)
        remedy = "; call the function for each column" if several else ""
        raise ModelError(f"{argument}: expected the name of one column, received {name!r}{remedy}")


def _right_side(formula: str | Sequence[str]) -> str:
    """Return the terms of a formula, or of a list of columns."""
    if isinstance(formula, str):
        return formula.strip().removeprefix("~").strip()
    if not isinstance(formula, Sequence) or not formula:
        raise ModelError(
            f"formula: expected columns, as in 'age + C(stage)' or ['age', 'stage'], received {formula!r}"
        )
    for name in formula:
        _check_column("formula", name)
    return " + ".join(map(quoted_name, formula))


def _holder(partition: ClientPartition, column: str, by: str | None) -> ClientPartition:
    """Return the rows that have a column: in the vertical layout those of the site that holds it."""
    _check_column("column", column)
    if by is not None:
        _check_column("by", by)
        if by == column:
            raise ModelError(f"by: {by!r} is the column itself; name a column of groups")
    _check_partition(partition)
    if partition.layout == "horizontal":
        return partition
    holders = [site for site, held in partition.columns.items() if column in held]
    if len(holders) != 1:
        where = "several sites hold it; rename it at one" if holders else "no site holds it"
        raise ModelError(f"column: {column!r}: {where}")
    if by is not None and by not in partition.columns[holders[0]]:
        raise ModelError(
            f"by: {by!r} is not at site {holders[0]!r}, which holds {column!r}. Each site counts its own "
            "columns on intervals",
            remedy=Remedy(
                "table_one(partition, [{column!r}], by={by!r})",
                "{call} has means and standard deviations by a group of another site",
            ).filled(column=column, by=by),
        )
    return replace(partition._among(holders), layout="horizontal")


def _number_model(
    partition: ClientPartition, column: str, by: str | None, complete: Sequence[str], subset: str | None
) -> TableModel:
    """Make the table of a number by groups."""
    model = TableModel(
        partition, () if by is None else (by,), number=column, complete=complete, subset=subset
    )
    if model.category:
        raise ModelError(f"column: {column!r} is a category; quantiles and histograms are of numbers")
    return model


@checks_names
def crosstab(
    partition: ClientPartition,
    row: str,
    column: str,
    *,
    bounds: Bounds | None = None,
    complete: Sequence[str] = (),
    subset: str | None = None,
    masked: bool | None = None,
    epsilon: float | None = None,
    delta: float = USUAL_DELTA,
) -> TableFrame:
    """Count the rows by two categories.

    No cell has few rows at a site: such a cell is hidden (missing), and with it other ones of the same row
    and column, since it would follow by subtraction. In the vertical layout, two sites count the entities
    that both have by a secure product, and refuse a table with a cell of few entities.

    Parameters
    ----------
    partition : ClientPartition
    row, column : str
        Columns of categories; numbers count as categories.
    bounds : mapping of str to sequence, optional
        Public levels of both columns for `epsilon`, where the sites publish none.
    complete : sequence of str, optional
        Columns that the rows must have as well, so that tables and models describe the same rows; in the
        horizontal layout.
    subset : str, optional
        Use only rows for which comparisons hold, as in ``"age >= 65 & sex == 'f'"``; in the horizontal
        layout. ``attrs["missing"]`` is then None.
    masked : bool, optional
        Whether pairwise masks hide each site's part of the counts; by default with at least three sites.
    epsilon : float, optional
        Release the table with noise, at this epsilon of differential privacy for one row added or removed,
        charged to the budgets of the sites. Nothing is hidden then; see :func:`explain_table` for the price.
    delta : float
        At most 1e-5; for `epsilon`.

    Returns
    -------
    TableFrame
        A DataFrame that ``plot()`` draws: levels of `row` by levels of `column`. ``attrs["ledger"]`` has the
        ledger, ``attrs["missing"]`` the number of rows that lack a value, and ``attrs["left_out"]`` the sites
        that leave complete rows out as well, so that rows do not differ by few from those of other
        analyses.

    Raises
    ------
    PolicyError
        A level has few rows at a site, or the counts and earlier releases would reveal few rows.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> fs.crosstab(partition, "arm", "stage").loc["surgery"].to_dict()
    {'I': 141, 'II': 133, 'III': 94}
    """
    _check_partition(partition)
    _check_column("row", row)
    _check_column("column", column)
    if row == column:
        raise ModelError(f"column: {column!r} is the column of the rows as well; name two columns")
    if epsilon is not None:
        return _with_noise(TableFrame, crosstab, locals())
    left_out: tuple[str, ...] = ()
    missing: int | None
    if partition.layout == "vertical":
        _check_all_rows(complete, subset)
        pair, levels_of, ledger = _pair(
            partition, [f"C({quoted_name(name)})" for name in (row, column)], masked
        )
        counts, (rows, levels) = np.rint(pair.products), (levels_of[row], levels_of[column])
        missing = partition.n_entities - pair.n
    else:
        model = TableModel(partition, (row,), category=column, complete=complete, subset=subset)
        table, ledger = model.fit(masked=masked)
        counts, levels, missing = table.counts, model.agreement.spec.levels[column], model.missing
        left_out = model.agreement.leaving_out
        rows = tuple(name for (name,) in model.group_names)
    frame = pd.DataFrame(counts, index=pd.Index(rows, name=row), columns=pd.Index(levels, name=column))
    frame = frame.astype("Int64" if frame.isna().to_numpy().any() else np.int64)
    return table_frame(frame, "counts", ledger=ledger, missing=missing, left_out=left_out)


def _check_all_rows(complete: Sequence[str], subset: str | None) -> None:
    """Require that no rows are selected where sites hold different columns."""
    if len(complete) or subset is not None:
        raise ModelError(
            f"{'complete' if len(complete) else 'subset'}: where sites hold different columns, a table "
            "describes the entities that have its columns; leave it out"
        )


def _pair(
    partition: ClientPartition, terms: Sequence[str], masked: object, squares: bool = False
) -> tuple[PairTable, Mapping[str, Sequence[Any]], Ledger]:
    """Sum two columns of sites that hold different columns, or one; also return levels and ledger."""
    if masked is not None:
        raise ModelError("masked: sites that hold different columns have no sums to mask; leave it out")
    model = ColumnPair(partition, terms)
    table, ledger = model.fit(squares=squares)
    return table, model.levels, ledger


def _range_of(partition: ClientPartition, column: str, bounds: Bounds | None) -> tuple[float, float]:
    """Return the public range of a column: that of the argument, or that which the sites publish."""
    if bounds is not None and not isinstance(bounds, Mapping):
        raise ModelError(f"bounds: expected a range by column, as in bounds={{{column!r}: (0, 120)}}")
    if bounds and column in bounds:
        ends = np.asarray(getattr(bounds[column], "range", None) or bounds[column], dtype=object).ravel()
        if len(ends) != 2 or not all(isinstance(end, int | float | np.number) for end in ends):
            raise ModelError(f"bounds: expected two numbers for {column!r}, as in {{{column!r}: (0, 120)}}")
        low, high = map(float, ends)
    else:
        holders = [site for name, site in partition.sites.items() if column in partition.columns[name]]
        if not holders:
            raise ModelError(f"there is no column {column!r} at any site")
        published = [site.published.get(column) for site in holders]
        ranges = [one.range for one in published if one is not None and one.range is not None]
        if not ranges or len(ranges) < len(holders):
            raise ModelError(
                f"bounds: quantiles and histograms of {column!r} need a public range, as in "
                f"bounds={{{column!r}: (0, 120)}}, or one that all sites publish"
            )
        low, high = min(one[0] for one in ranges), max(one[1] for one in ranges)
    if not -np.inf < low < high < np.inf:
        raise ModelError(f"bounds: expected two finite ends for {column!r}, the smaller first")
    return low, high


@dataclass(frozen=True, slots=True)
class QuantileGrid:
    """Intervals of a public range for quantiles: each is :data:`DIVISIONS` steps long.

    A step is one, two or five times a power of ten, and steps have their middle at the lower end of the range
    and at multiples of the step from there. So many equal values, such as zeros, whole numbers or a constant,
    are in the middle of a step, which is what is reported.
    """

    low: float
    high: float
    column: str = ""

    @property
    def step(self) -> float:
        """Length of a step."""
        most = (self.high - self.low) / STEPS
        unit = 10.0 ** np.floor(np.log10(most))
        return float(max(many for many in (1.0, 2.0, 5.0) if many * unit <= most * (1.0 + 1e-9)) * unit)

    @property
    def edges(self) -> Floats:
        """Ends of the intervals; the last one includes the upper end of the range."""
        step = self.step
        count = int(np.ceil((np.round((self.high - self.low) / step) + 1.0) / DIVISIONS))
        return np.asarray(self.low + step * (DIVISIONS * np.arange(count + 1) - 0.5))

    def quantiles(self, table: NumberTable, shares: Floats) -> Floats:
        """Return quantiles (G, Q) by numpy's rule from counts; beyond the range, warn and return an end."""
        assert table.counts is not None
        edges, counts = table.counts.edges, table.counts.cells.sum(axis=2)
        middle = (edges[:-1] + edges[1:]) / 2.0
        middle = self.low + self.step * np.round((middle - self.low) / self.step)
        middle = np.concatenate([[self.low], middle, [self.high]])
        # numpy's rule: the position q (n - 1) lies between two ordered rows.
        places = np.array([quantile_places(counts, shares, end) for end in ENDS])
        if np.isin(places[:, counts.any(axis=1)], (0, len(middle) - 1)).any():
            warn(
                f"column {self.column!r}: a quantile is outside of the range {self.low:g} to {self.high:g}, "
                "and the end of the range is reported. Give a wider range in bounds.",
                DataWarning,
            )
        low, high = middle[places]
        position = shares * (counts.sum(axis=1, keepdims=True) - 1.0)
        rest = position - np.floor(position)
        return np.where(position >= 0.0, (1.0 - rest) * low + rest * high, np.nan)


def _numbers(values: object) -> Floats:
    """Return numbers, or NaN for what is not a number."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        return np.array([np.nan])


def _bin_edges(bins: Any, find_range: Callable[[], tuple[float, float]]) -> Floats:
    """Return the ends of bins: of a number of equal ones in a range, or the given ends."""
    if isinstance(bins, int | np.integer) and not isinstance(bins, bool):
        check_integer("bins", bins, 1)
        return np.linspace(*find_range(), int(bins) + 1)
    edges = _numbers(bins)
    if edges.ndim != 1 or len(edges) < 2 or not (np.diff(edges) > 0.0).all() or np.isinf(edges).any():
        raise ModelError("bins: expected a number of intervals, or at least two finite ends that ascend")
    return edges


@checks_names
def histogram(
    partition: ClientPartition,
    column: str,
    *,
    bins: int | Sequence[float] = 20,
    by: str | None = None,
    bounds: Bounds | None = None,
    complete: Sequence[str] = (),
    subset: str | None = None,
    masked: bool | None = None,
    epsilon: float | None = None,
    delta: float = USUAL_DELTA,
) -> TableFrame:
    """Count a number on public intervals, by group.

    To avoid small cells, each site first replaces the numbers of every few successive rows of a group with
    their mean: as many rows as its policy requires for a level.

    Parameters
    ----------
    partition : ClientPartition
        In the vertical layout, the site that holds the column counts its own entities.
    column : str
        A number.
    bins : int or sequence of float
        Number of intervals of the range, or their ends, ascending.
    by : str, optional
        Column of the groups; in the vertical layout at the same site.
    bounds : mapping of str to (float, float), optional
        Public range of the column, where the sites publish none.
    complete : sequence of str, optional
        Columns that the rows must have as well, so that tables and models describe the same rows; in the
        horizontal layout.
    subset : str, optional
        Use only rows for which comparisons hold, as in ``"age >= 65 & sex == 'f'"``; in the horizontal
        layout. ``attrs["missing"]`` is then None.
    masked : bool, optional
        Whether pairwise masks hide each site's part of the counts.
    epsilon : float, optional
        Release the table with noise, at this epsilon of differential privacy for one row added or removed,
        charged to the budgets of the sites. Nothing is hidden then; see :func:`explain_table` for the price.
    delta : float
        At most 1e-5; for `epsilon`.

    Returns
    -------
    TableFrame
        Counts, indexed by intervals (low, high], of which the first includes its lower end. They begin and
        end with open ones where rows are outside of the range; one column for each group. ``attrs["ledger"]``
        has the ledger.

    Raises
    ------
    ModelError
        There is no public range, or the ends do not ascend.
    PolicyError
        A site refuses.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> fs.histogram(partition, "age", bins=[20, 40, 60, 80, 100], by="arm")["drugs"].tolist()
    [3, 189, 231, 9]
    """
    if epsilon is not None:
        return _with_noise(TableFrame, histogram, locals())
    partition = _holder(partition, column, by)
    edges = _bin_edges(bins, lambda: _range_of(partition, column, bounds))
    model = _number_model(partition, column, by, complete, subset)
    # Averages of equal values differ from them by rounding, and must not leave the range by it.
    beyond = 1e-9 * (edges[-1] - edges[0])
    counted = np.concatenate([[edges[0] - beyond], edges[1:-1], [edges[-1] + beyond]])
    table, ledger = model.fit(edges=counted, moments=False, masked=masked)
    counts = table.counts.cells.sum(axis=2).astype(np.int64).T
    ends = np.concatenate([[-np.inf], edges, [np.inf]])
    index = pd.IntervalIndex.from_arrays(ends[:-1], ends[1:], name=column)
    names = [name for (name,) in model.group_names] if by is not None else ["rows"]
    frame = pd.DataFrame(counts, index=index, columns=pd.Index(names, name=by))
    inside = np.ones(len(frame), dtype=bool)
    inside[[0, -1]] = frame.iloc[[0, -1]].to_numpy().any(axis=1)
    more = {"missing": model.missing, "left_out": model.agreement.leaving_out}
    return table_frame(frame[inside], "histogram", ledger=ledger, **more)


@checks_names
def quantiles(
    partition: ClientPartition,
    column: str,
    q: float | Sequence[float] = QUARTERS,
    *,
    by: str | None = None,
    bounds: Bounds | None = None,
    complete: Sequence[str] = (),
    subset: str | None = None,
    masked: bool | None = None,
    epsilon: float | None = None,
    delta: float = USUAL_DELTA,
) -> TableFrame:
    """Return quantiles of a number, by group, from counts on intervals of a public range.

    The range has 32 to 80 intervals. Those in which the quantiles are get divided into 32 steps, and are
    counted once more. A step is one, two or five times a power of ten. A quantile is the middle of a step,
    and so known to 1/2,048 of the range, and to the averages over few rows that each site takes first; see
    :func:`histogram`. Where many values are equal, such as zeros at the lower end of the range, the quantile
    is this value.

    Parameters
    ----------
    partition : ClientPartition
        In the vertical layout, the site that holds the column counts its own entities.
    column : str
        A number.
    q : float or sequence of float
        Shares between 0 and 1.
    by : str, optional
        Column of the groups; in the vertical layout at the same site.
    bounds : mapping of str to (float, float), optional
        Public range of the column, where the sites publish none.
    complete : sequence of str, optional
        Columns that the rows must have as well, so that tables and models describe the same rows; in the
        horizontal layout.
    subset : str, optional
        Use only rows for which comparisons hold, as in ``"age >= 65 & sex == 'f'"``; in the horizontal
        layout. ``attrs["missing"]`` is then None.
    masked : bool, optional
        Whether pairwise masks hide each site's part of the counts.
    epsilon : float, optional
        Release the table with noise, at this epsilon of differential privacy for one row added or removed,
        charged to the budgets of the sites. Nothing is hidden then; see :func:`explain_table` for the price.
    delta : float
        At most 1e-5; for `epsilon`.

    Returns
    -------
    TableFrame
        One row for each group, one column for each share; for a quantile beyond the range an end of it, with
        a warning, and NaN for a group without rows. ``attrs["ledger"]`` has the ledger, ``attrs["error"]``
        half a step.

    Raises
    ------
    ModelError
        There is no public range, or a share is not between 0 and 1.
    PolicyError
        A site refuses.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> fs.quantiles(partition, "age", bounds={"age": (0, 120)}).round(1).iloc[0].tolist()
    [55.7, 61.6, 67.9]
    """
    shares = np.atleast_1d(_numbers(q))
    if shares.ndim != 1 or not len(shares) or not ((shares > 0.0) & (shares < 1.0)).all():
        raise ModelError(f"q: expected shares between 0 and 1, as in [0.25, 0.5, 0.75], received {q!r}")
    if epsilon is not None:
        return _with_noise(TableFrame, quantiles, locals())
    partition = _holder(partition, column, by)
    grid = QuantileGrid(*_range_of(partition, column, bounds), column)
    model = _number_model(partition, column, by, complete, subset)
    table, ledger = model.fit(edges=grid.edges, moments=False, shares=tuple(shares.tolist()), masked=masked)
    found = grid.quantiles(table, shares)
    names = [name for (name,) in model.group_names] if by is not None else ["all rows"]
    frame = pd.DataFrame(found, index=pd.Index(names, name=by), columns=pd.Index(shares, name=column))
    more = {"missing": model.missing, "left_out": model.agreement.leaving_out}
    return table_frame(frame, "quantiles", ledger=ledger, error=grid.step / 2.0, **more)


class CorrelationModel(HorizontalModel):
    """Correlations of numbers."""

    model_name: ClassVar[str] = "Correlations"
    _columns_from = "columns"
    _plan = DryRunPlan
    _goes_on = True

    def fit(self, edges: Floats | None = None, masked: bool | None = None) -> Any:
        """Sum the products of the columns, or with `edges` (p, J) of the ranks of their intervals."""
        return run_fit(self, Call.of(self.fit, locals()), CorrelationModel._sum, edges, masked)

    def _sum(
        self, attempt: FitAttempt, edges: Floats | None, masked: object
    ) -> tuple[Sequence[str], Floats, Floats | None, Ledger]:
        session = self._open_session(FAMILY, check_masked(masked, len(self.sites), self._masks_wanted))
        if edges is None:
            design, found = attempt.run(correlation(session), session.masked_sites)
            return design.names[int(design.intercept) :], found, None, attempt.ledger
        names = self.question.columns
        found, error = attempt.run(rank_correlation(session, names, edges), session.masked_sites)
        return names, found, error, attempt.ledger

    def _invent_sites(self, plan: DryRunPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        return with_synthetic_ranks(super()._invent_sites(plan, policies))

    def _report_missing(self, missing: object) -> None:
        """Leave missing values to the result, which counts them."""


@checks_names
def corr(
    partition: ClientPartition,
    formula: str | Sequence[str],
    *,
    method: str = "pearson",
    bins: int = 100,
    bounds: Bounds | None = None,
    complete: Sequence[str] = (),
    subset: str | None = None,
    masked: bool | None = None,
    epsilon: float | None = None,
    delta: float = USUAL_DELTA,
) -> TableFrame:
    """Return correlations of numbers over the complete rows of all sites.

    In the vertical layout, each pair is correlated over the entities that have both, by secure products.

    Parameters
    ----------
    partition : ClientPartition
    formula : str or sequence of str
        The columns, as in ``"age + log(income) + bmi"`` or ``["age", "bmi"]``; in the horizontal layout,
        levels of categories are columns of zeros and ones. Spearman's correlations need plain columns of
        numbers.
    method : {"pearson", "spearman"}
        Pearson's correlations, or in the horizontal layout Spearman's rank correlations.
    bins : int
        Number of intervals of the range of each column, which have the ranks of ``method="spearman"``.
    bounds : mapping of str to (float, float), optional
        Public ranges of the columns for ``method="spearman"``, where the sites publish none.
    complete : sequence of str, optional
        Columns that the rows must have as well, so that tables and models describe the same rows; in the
        horizontal layout.
    subset : str, optional
        Use only rows for which comparisons hold, as in ``"age >= 65 & sex == 'f'"``; in the horizontal
        layout. ``attrs["missing"]`` is then None.
    masked : bool, optional
        Whether pairwise masks hide each site's part of the sums; by default with at least three sites.
    epsilon : float, optional
        Release the table with noise, at this epsilon of differential privacy for one row added or removed,
        charged to the budgets of the sites. Nothing is hidden then; see :func:`explain_table` for the price.
    delta : float
        At most 1e-5; for `epsilon`.

    Returns
    -------
    TableFrame
        Correlations; ``attrs["ledger"]`` has the ledger, ``attrs["nobs"]`` the complete rows and
        ``attrs["missing"]`` the others. For ranks, ``attrs["error"]`` has the largest possible error of each
        pair because of the intervals; see Notes. In the vertical layout ``attrs["ledgers"]`` has the
        ledgers of the pairs, and ``attrs["nobs"]`` the entities of each.

    Raises
    ------
    DesignError
        A column is constant.
    FormulaError
        Ranks of a term that is no column of numbers.
    ModelError
        Ranks of a column without a public range, or in the vertical layout.
    PolicyError
        A site refuses, for instance where a product of two columns is nonzero in few rows.

    Notes
    -----
    Spearman's correlation is that of the mid-ranks of intervals, from their counts over all sites. If each
    value has an interval of its own, it is the correlation of the ranks. Otherwise the mid-ranks are a
    projection of the ranks, and ``attrs["error"]`` follows from the counts. It is about 0.02 for columns
    that fill 100 intervals equally and have a correlation of 0. It is larger where few intervals have most
    rows. It does not know about equal values, so it is far too large for a column of two values.

    Sites first average the numbers of every few successive rows, as many as the policy requires for a level;
    see :func:`histogram`. The error of these averages is not in ``attrs["error"]``. It is small where sites
    have many rows, and zero if the minimum of the policy is 1.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fs.corr(partition, "age + trestbps + thalach").round(2).loc["age"].tolist()
    [1.0, 0.02, -0.14]
    >>> ranges = {"age": (0, 100), "trestbps": (0, 250), "thalach": (50, 250)}
    >>> ranks = fs.corr(partition, "age + trestbps + thalach", method="spearman", bounds=ranges)
    >>> ranks.round(2).loc["age"].tolist()
    [1.0, 0.02, -0.14]
    """
    check_choice("method", method, ("pearson", "spearman"))
    _check_partition(partition)
    if epsilon is not None:
        return _with_noise(TableFrame, corr, locals())
    right = _right_side(formula)
    if partition.layout == "vertical":
        if method != "pearson":
            raise ModelError(
                "method: sites that hold different columns do not exchange ranks; only 'pearson' is available"
            )
        _check_all_rows(complete, subset)
        return _corr_of_columns(partition, right, masked)
    parsed = _parse_columns(partition, right)
    edges = _rank_edges(partition, parsed.sites, bins, bounds) if method == "spearman" else None
    text = f"~ {right}"
    one_sided = Formula(text, "", None, (), True, parsed.sites)
    model = CorrelationModel(one_sided, partition, complete=complete, subset=subset)
    if edges is not None and (texts := list(model.agreement.spec.levels)):
        raise FormulaError(f"formula: ranks are of numbers, and column {texts[0]!r} is a category")
    names, found, error, ledger = model.fit(edges, masked=masked)
    labels = list(names)
    frame = pd.DataFrame(found, index=labels, columns=labels)
    n = sum(row.n for row in model.agreement.sites)
    missing = None if subset is not None else partition.n_entities - n
    left_out = model.agreement.leaving_out
    more: dict[str, Any] = (
        {} if error is None else {"error": pd.DataFrame(error, index=labels, columns=labels).to_dict()}
    )
    return table_frame(
        frame, "correlations", ledger=ledger, nobs=n, missing=missing, left_out=left_out, **more
    )


def _parse_columns(partition: ClientPartition, right: str) -> Formula:
    """Parse the terms of correlations of sites that hold different rows."""
    columns = [*partition.pooled_columns, ROWS]
    return parse_pooled_formula(f"`{ROWS}` ~ {right}", columns, (ROWS, partition.site_column))


def _rank_edges(
    partition: ClientPartition, sites: Sequence[SiteTerms], bins: int, bounds: Bounds | None
) -> Floats:
    """Return the ends of the intervals of each column, (p, J + 1)."""
    check_integer("bins", bins, 2)
    names = _plain_columns(sites, "ranks are", "; functions that ascend do not change ranks")
    ranges = [_range_of(partition, name, bounds) for name in names]
    return np.array([np.linspace(low, high, int(bins) + 1) for low, high in ranges])


def _plain_columns(sites: Sequence[SiteTerms], what: str, more: str = "") -> list[str]:
    """Return the columns of terms that are columns; a FormulaError for other terms."""
    names = []
    for text in (term for site in sites for term in site.terms):
        match [factor.tree for factor in parse_term(text)]:
            case [Column(name=name)]:
                names.append(name)
            case _:
                raise FormulaError(f"formula: {what} of columns, as in 'age + bmi', received {text!r}{more}")
    return names


def _terms_of_columns(partition: ClientPartition, right: str) -> list[str]:
    """Return the terms in the order written, not by site, where sites hold different columns."""
    parse_formula(f"~ {right}", partition.columns, response=False)  # for its errors, which name the sites
    columns = dict.fromkeys(name for held in partition.columns.values() for name in held)
    parsed = parse_pooled_formula(f"`{ROWS}` ~ {right}", [*columns, ROWS], (ROWS,))
    return [term for site in parsed.sites for term in site.terms]


def _corr_of_columns(partition: ClientPartition, right: str, masked: object) -> TableFrame:
    """Correlate numbers of sites that hold different columns, each pair over the entities that have both."""
    terms = _terms_of_columns(partition, right)
    found, n, ledgers = np.eye(len(terms)), np.full((len(terms),) * 2, np.nan), []
    for i, j in combinations(range(len(terms)), 2):
        pair, levels, ledger = _pair(partition, (terms[i], terms[j]), masked)
        if pair.products.shape != (1, 1) or levels:
            raise FormulaError(
                f"formula: {terms[i]!r} and {terms[j]!r} must be numbers where sites hold different columns"
            )
        found[i, j] = found[j, i] = np.clip(pair.products[0, 0] / pair.n, -1.0, 1.0)
        n[i, j] = n[j, i] = pair.n
        ledgers.append(ledger)
    frame = pd.DataFrame(found, index=terms, columns=terms)
    counts = pd.DataFrame(n, index=terms, columns=terms).to_dict()
    return table_frame(frame, "correlations", ledgers=ledgers, nobs=counts)


@checks_names
def table_one(
    partition: ClientPartition,
    formula: str | Sequence[str],
    *,
    by: str | None = None,
    nonnormal: Sequence[str] = (),
    bounds: Bounds | None = None,
    smd: bool = False,
    pvalues: bool = False,
    complete: Sequence[str] = (),
    subset: str | None = None,
    masked: bool | None = None,
    epsilon: float | None = None,
    delta: float = USUAL_DELTA,
) -> TableOne:
    """Describe the rows of all sites, by group: the first table of a study.

    A site that has no value of a column is left out of its figures; its rows count as missing. "missing"
    counts the rows that lack the column, and "all" describes all others, with or without a group; tests and
    differences are of the rows with a group. Where a site refuses sums over all rows, because few of
    them have no group, "all" and "missing" are of the rows with a group, and a note says so. In the
    vertical layout, a column is described over the entities that have it and the group. Where the group is at
    another site, counts and sums come from a secure product; both sites refuse cells of few entities.

    Parameters
    ----------
    partition : ClientPartition
    formula : str or sequence of str
        The columns, as in ``"age + bmi + C(stage)"`` or ``["age", "bmi", "sex"]``; ``C()`` and columns of
        texts are categories.
    by : str, optional
        Column of the groups.
    nonnormal : sequence of str
        Numbers that are described by median and quartiles instead of mean and standard deviation; in the
        vertical layout without groups of another site.
    bounds : mapping of str to (float, float), optional
        Public ranges of these, where the sites publish none.
    smd : bool
        Show the largest standardized mean difference between two groups.
    pvalues : bool
        Show tests of equal groups: Welch's analysis of variance, for medians Kruskal and Wallis's test of
        the counts on intervals, for categories Pearson's chi-squared. Reporting guidelines advise against
        them for randomized groups.
    complete : sequence of str, optional
        Columns that the rows must have as well, so that tables and models describe the same rows; in the
        horizontal layout.
    subset : str, optional
        Use only rows for which comparisons hold, as in ``"age >= 65 & sex == 'f'"``; in the horizontal
        layout. "missing" then counts rows of the subset.
    masked : bool, optional
        Whether pairwise masks hide each site's part; by default with at least three sites.
    epsilon : float, optional
        Release the table with noise, at this epsilon of differential privacy for one row added or removed,
        charged to the budgets of the sites. Nothing is hidden then; see :func:`explain_table` for the price.
    delta : float
        At most 1e-5; for `epsilon`.

    Returns
    -------
    TableOne
        ``to_frame()``, ``summary()``, ``to_latex()``, ``to_docx(path)``; prints as a table.

    Raises
    ------
    FormulaError
        A term is no column.
    ModelError
        A column of `nonnormal` is not in the table, or has no public range.
    PolicyError
        A site refuses.

    References
    ----------
    Yang and Dalton, "A unified approach to measuring the effect size between two groups using SAS", SAS
    Global Forum 335 (2012).

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> table = fs.table_one(partition, "age + C(stage)", by="arm", smd=True)
    >>> table.to_frame().loc[("age", "mean (sd)"), "drugs"]
    '61.6 (9.0)'
    """
    _check_partition(partition)
    if by is not None:
        _check_column("by", by)
    if epsilon is not None and (smd or pvalues):
        raise ModelError(
            "smd, pvalues: there are none with epsilon, since they would not have the noise in their errors. "
            "The limits of tidy() have it"
        )
    if isinstance(nonnormal, str):
        raise ModelError(f"nonnormal: expected a list of columns, received a text; write [{nonnormal!r}]")
    variables = _variables(partition, _right_side(formula), by)
    if by in variables:
        raise ModelError(f"by: column {by!r} is in the table as well; leave it out of the formula")
    if wrong := [name for name in nonnormal if variables.get(name, True)]:
        raise ModelError(f"nonnormal: expected numbers of the table, received {', '.join(map(repr, wrong))}")
    if epsilon is not None:
        return _with_noise(TableOne, table_one, locals())
    ranges = {name: QuantileGrid(*_range_of(partition, name, bounds), name) for name in nonnormal}
    if partition.layout == "vertical":
        _check_all_rows(complete, subset)
    describe = _ColumnsDescribed if partition.layout == "vertical" else _RowsDescribed
    among = RowsChosen(partition.n_entities, complete)
    if subset is not None:
        alone = TableModel(partition, (), subset=subset)
        partition = alone.partition
        among = RowsChosen(sum(row.n for row in alone.agreement.sites), complete, subset)
    described = [
        (_RowsDescribed if name in ranges else describe)(
            partition, name, category, ranges.get(name), masked, among
        )
        for name, category in variables.items()
    ]
    ledgers: list[Ledger] = []
    grouped = [one.fit(by, ledgers) for one in described]
    labels = described[0].labels
    if by is None:
        no_groups = Groups((), None, 0, ())
        return TableOne(tuple(grouped), by, no_groups, among.n, smd, pvalues, ledgers, among.subset)
    groups, found = _all_rows(
        describe(partition, "", False, None, masked, among), by, described, grouped, ledgers
    )
    return TableOne(found, by, groups(labels), among.n, smd, pvalues, ledgers, among.subset)


def _all_rows(
    alone: _RowsDescribed | _ColumnsDescribed,
    by: str,
    described: Sequence[_RowsDescribed | _ColumnsDescribed],
    grouped: Sequence[TableVariable],
    ledgers: list[Ledger],
) -> tuple[Callable[[tuple[str, ...]], Groups], tuple[TableVariable, ...]]:
    """Add what is about rows without a group or without a variable, as far as the sites release it.

    These sums are over other rows than those by group. A site refuses rows that differ by a few, and counts
    the refusals: after the first one nothing else is requested. So variables that lack the fewest rows come
    first.
    """
    nobs, names = alone.among.n, tuple(one.name for one in described)
    try:
        alone.open(by)
    except PolicyError:
        return lambda labels: Groups(labels, None, None, names), tuple(grouped)
    with_group, found, refused = alone.total(by), list(grouped), False
    unknown = nobs - with_group
    for place in sorted(range(len(described)), key=lambda at: grouped[at].missing):
        one = described[place]
        found[place] = replace(grouped[place], missing=with_group - one.total(by))
        if refused or not unknown:
            continue
        try:
            total = one.fit(None, ledgers)
        except PolicyError:
            refused = True
        else:
            left_out = tuple(dict.fromkeys((*grouped[place].left_out, *total.left_out)))
            found[place] = replace(grouped[place], missing=total.missing, total=total, left_out=left_out)
    complete = [one.rows for one in grouped if round(float(one.rows.sum())) == with_group]
    sizes = complete[0] if complete else None
    if sizes is None and not refused:
        try:
            sizes = alone.fit(by, ledgers).rows
        except PolicyError:
            sizes = None
    partly = tuple(one.name for one in found if unknown and one.total is None)
    return lambda labels: Groups(labels, sizes, unknown, partly), tuple(found)


@dataclass(frozen=True, slots=True)
class RowsChosen:
    """The `n` rows of a first table: those of a subset that have further columns."""

    n: int
    complete: Sequence[str] = ()
    subset: str | None = None


class _RowsDescribed:
    """A column of sites that hold different rows, by group and over all rows; no column: the groups alone."""

    def __init__(
        self,
        partition: ClientPartition,
        name: str,
        category: bool,
        grid: QuantileGrid | None,
        masked: bool | None,
        among: RowsChosen,
    ) -> None:
        self.partition, self.name, self.grid, self.masked = partition, name, grid, masked
        self.among = among
        self.number, self.category = ("" if category else name), (name if category else "")
        self.models: dict[str | None, TableModel] = {}
        self.labels: tuple[str, ...] = ()

    def open(self, by: str | None) -> TableModel:
        """Agree on the rows by group, or on all."""
        if by not in self.models:
            held = self.partition
            if held.layout == "vertical":
                held = _holder(held, self.name, by)
            model = _described(held, () if by is None else (by,), self.number, self.category, self.among)
            self.models[by] = model
            if by is not None:
                self.labels = tuple(str(label) for (label,) in model.group_names)
        return self.models[by]

    def total(self, by: str | None) -> int:
        """Return the number of rows that have the column and the group, or the column."""
        return sum(row.n for row in self.open(by).agreement.sites)

    def fit(self, by: str | None, ledgers: list[Ledger]) -> TableVariable:
        """Describe the rows by group, or all."""
        model, missing = self.open(by), self.among.n - self.total(by)
        if self.name:
            variable, ledger = _variable_of_rows(model, self.name, missing, self.grid, self.masked)
        else:
            table, ledger = model.fit(moments=False, masked=self.masked)
            variable = TableVariable(self.name, missing, table.rows)
        ledgers.append(ledger)
        if self.partition.layout == "vertical":
            return variable
        without = tuple(site for site in self.partition.sites if site not in model.partition.sites)
        return replace(variable, without=without, left_out=model.agreement.leaving_out)


class _ColumnsDescribed:
    """The same of a column of one site, by groups that another site may hold."""

    def __init__(
        self,
        partition: ClientPartition,
        name: str,
        category: bool,
        grid: QuantileGrid | None,
        masked: bool | None,
        among: RowsChosen,
    ) -> None:
        self.partition, self.name, self.masked, self.among = partition, name, masked, among
        self.own = [f"C({quoted_name(name)})" if category else quoted_name(name)] if name else []
        self.pairs: dict[str | None, ColumnPair] = {}
        self.labels: tuple[str, ...] = ()

    def open(self, by: str | None) -> ColumnPair:
        """Agree on the entities that have the column and the group, or the column."""
        if self.masked is not None:
            raise ModelError("masked: sites that hold different columns have no sums to mask; leave it out")
        if by not in self.pairs:
            terms = [*self.own, *([] if by is None else [f"C({quoted_name(by)})"])]
            self.pairs[by] = pair = ColumnPair(self.partition, terms)
            if by is not None:
                self.labels = tuple(map(str, pair.levels[by]))
        return self.pairs[by]

    def total(self, by: str | None) -> int:
        """Return the number of entities that have the column and the group, or the column."""
        return self.open(by).n_both

    def fit(self, by: str | None, ledgers: list[Ledger]) -> TableVariable:
        """Describe the entities by group, or all."""
        pair = self.open(by)
        table, ledger = pair.fit(squares=True)
        ledgers.append(ledger)
        missing = self.partition.n_entities - table.n
        return _variable_of_columns(table, pair.levels, self.name, by, missing)


def _variable_of_rows(
    model: TableModel, name: str, missing: int, grid: QuantileGrid | None, masked: bool | None
) -> tuple[TableVariable, Ledger]:
    """Describe a column of sites that hold different rows, by quartiles if its range has a `grid`."""
    if model.category:
        if grid is not None:
            raise ModelError(f"nonnormal: expected numbers of the table, received {name!r}")
        table, ledger = model.fit(masked=masked)
        levels = tuple(map(str, model.agreement.spec.levels[name]))
        return TableVariable(name, missing, table.rows, levels=levels, counts=table.counts), ledger
    if grid is None:
        table, ledger = model.fit(masked=masked)
        return TableVariable(name, missing, table.rows, table.mean, table.variance), ledger
    table, ledger = model.fit(edges=grid.edges, shares=QUARTERS, masked=masked)
    quarters = np.vstack([_overall(table, grid), grid.quantiles(table, np.array(QUARTERS))])
    intervals = table.counts.cells.sum(axis=2)
    return TableVariable(name, missing, table.rows, table.mean, table.variance, quarters, intervals), ledger


def _variable_of_columns(
    table: PairTable, levels: Mapping[str, Sequence[Any]], name: str, by: str | None, missing: int
) -> TableVariable:
    """Describe a column of one site by groups that another site may hold; without a name the groups alone."""
    first, second = table.moments
    if not name:
        return TableVariable(name, missing, np.rint(first))
    rows = np.rint(second) if by is not None else np.array([float(table.n)])
    if name in levels:
        counts = np.rint(table.products.T if by is not None else first[None])
        own = tuple(map(str, levels[name]))
        return TableVariable(name, missing, rows, levels=own, counts=counts)
    mean, sd = first
    # Sums of the standardized number and of its square, by group.
    total, squares = table.products if by is not None else (np.zeros(1), rows)
    with np.errstate(divide="ignore", invalid="ignore"):
        center, spread = total / rows, (squares - total**2 / rows) / (rows - 1.0)
    figures = (mean + sd * center, sd**2 * np.where(rows > 1.0, spread, np.nan))
    return TableVariable(name, missing, rows, *figures)


def _described(
    partition: ClientPartition,
    groups: Sequence[str],
    number: str,
    category: str,
    among: RowsChosen,
) -> TableModel:
    """Make the table of a column among the sites that have it."""
    while True:
        try:
            return TableModel(
                partition, groups, number, category, complete=among.complete, subset=among.subset
            )
        except DesignError as error:
            rest = [site for site in partition.sites if site != error.empty_site]
            if not rest or len(rest) == len(partition.sites):
                raise
            partition = partition._among(rest)


def _overall(table: NumberTable, grid: QuantileGrid) -> Floats:
    """Return the quartiles over all groups, (3,)."""
    assert table.counts is not None
    cells = table.counts.cells.sum(axis=0, keepdims=True)
    merged = type(table.counts)(table.counts.edges, cells)
    one = NumberTable(table.rows[:1], table.mean[:1], table.variance[:1], merged)
    return np.asarray(grid.quantiles(one, np.array(QUARTERS))[0])


def _variables(partition: ClientPartition, right: str, by: str | None) -> dict[str, bool]:
    """Return the columns of a table, and whether each is written as a category."""
    out: dict[str, bool] = {}
    if partition.layout == "vertical":
        terms = _terms_of_columns(partition, right)
    else:
        parsed = parse_pooled_formula(f"`{ROWS}` ~ {right}", [*partition.pooled_columns, ROWS], (ROWS,))
        terms = [term for site in parsed.sites for term in site.terms]
    for text in terms:
        match [factor.tree for factor in parse_term(text)]:
            case [Column(name=name)]:
                out[name] = False
            case [Category(column=name)]:
                out[name] = True
            case _:
                raise FormulaError(
                    f"formula: a table has columns, as in 'age + bmi + C(stage)', received {text!r}; compute "
                    "other terms before"
                )
    return out


# ----------------------------------------------------------------------------------------------------
# Tables with noise, charged to the budgets of sites with different rows.


def _crosstab_with_noise(given: Mapping[str, Any], setting: NoiseSetting) -> RequestedTable[Any]:
    return noisy_crosstab(given["partition"], given["row"], given["column"], setting)


def _histogram_with_noise(given: Mapping[str, Any], setting: NoiseSetting) -> RequestedTable[Any]:
    partition, column = given["partition"], given["column"]
    _holder(partition, column, given["by"])
    edges = _bin_edges(given["bins"], lambda: setting.range(partition, column))
    return noisy_histogram(partition, column, edges, given["by"], setting)


def _quantiles_with_noise(given: Mapping[str, Any], setting: NoiseSetting) -> RequestedTable[Any]:
    partition, column = given["partition"], given["column"]
    _holder(partition, column, given["by"])
    shares = np.atleast_1d(_numbers(given["q"]))
    return noisy_quantile_table(partition, column, shares, given["by"], setting)


def _corr_with_noise(given: Mapping[str, Any], setting: NoiseSetting) -> RequestedTable[Any]:
    if given["method"] != "pearson":
        raise ModelError("method: with epsilon, only 'pearson' is available")
    parsed = _parse_columns(given["partition"], _right_side(given["formula"]))
    names = _plain_columns(parsed.sites, "correlations with epsilon are")
    return noisy_corr(given["partition"], names, setting)


def _table_one_with_noise(given: Mapping[str, Any], setting: NoiseSetting) -> RequestedTable[Any]:
    partition, by = given["partition"], given["by"]
    variables = _variables(partition, _right_side(given["formula"]), by)
    return noisy_table_one(partition, variables, by, given["nonnormal"], setting)


WITH_NOISE: Mapping[str, Callable[[Mapping[str, Any], NoiseSetting], RequestedTable[Any]]] = {
    "crosstab": _crosstab_with_noise,
    "histogram": _histogram_with_noise,
    "quantiles": _quantiles_with_noise,
    "corr": _corr_with_noise,
    "table_one": _table_one_with_noise,
}
"""Tables that have a form with noise, by the name of their function."""
SETTINGS = ("epsilon", "delta", "bounds", "complete", "subset", "masked")


def _requested(table: Callable[..., Any], given: Mapping[str, Any]) -> RequestedTable[Any]:
    check_layout(f"{table.__name__} with epsilon", given["partition"], "horizontal")
    setting = NoiseSetting.of(**{name: given[name] for name in SETTINGS})
    return WITH_NOISE[table.__name__](given, setting)


def _with_noise(kind: type[Figures], table: Callable[..., Any], given: Mapping[str, Any]) -> Figures:
    """Return a table with noise, of the `kind` of its function, from the arguments of this function."""
    found = _requested(table, given).release()
    assert isinstance(found, kind)
    return found


def explain_table(table: Callable[..., Any], *args: Any, **given: Any) -> Explanation:
    """Return the price of a table with noise, its charge and its releases, without sending a request.

    Parameters
    ----------
    table : callable
        :func:`crosstab`, :func:`histogram`, :func:`quantiles`, :func:`corr` or :func:`table_one`.
    *args, **given
        Its arguments, with `epsilon`.

    Returns
    -------
    Explanation
        Its notes state how much wider intervals are than without noise, and which share of each budget the
        table costs.

    Raises
    ------
    ModelError
        The function makes no such table, or there is no epsilon.

    Examples
    --------
    >>> import fedstat as fs
    >>> owners = fs.Policy(privacy=fs.Budget(epsilon=2.0, delta=1e-6))
    >>> table = fs.datasets.make_survival()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital", policy=owners)
    >>> bounds = {"arm": ["surgery", "drugs"], "stage": ["I", "II", "III"]}
    >>> price = fs.explain_table(fs.crosstab, partition, "arm", "stage", epsilon=1.0, bounds=bounds)
    >>> price.passes, price.notes[1][:46]
    (True, 'Price: at 800 rows, epsilon 1 makes 95 % inter')
    """
    name = getattr(table, "__name__", "")
    if name not in WITH_NOISE:
        raise ModelError(f"table: expected one of {', '.join(f'fs.{one}' for one in WITH_NOISE)}")
    bound = signature(table).bind(*args, **given)
    bound.apply_defaults()
    if bound.arguments["epsilon"] is None:
        raise ModelError("epsilon: the price is that of a table with noise; name an epsilon")
    found = _requested(table, bound.arguments).model.explain()
    shown = [f"{one}={value!r}" for one, value in given.items() if one != "bounds"]
    return replace(found, call=f"{name}({', '.join([*map(repr, args[1:]), *shown])})")
