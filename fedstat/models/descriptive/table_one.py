"""The first table of a study: its figures, and how it is printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import ModelError
from fedstat.federation.audit.ledger import Ledger
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import WIDTH, Report
from fedstat.inference.tables import Sheet
from fedstat.models.descriptive.frames import draw_differences, draw_shares
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUPPRESSED = "hidden"
MOST_DECIMALS = 4
HALF = float(stats.norm.isf(0.025))
"""Standard errors in half of a 95 % interval."""
NOTES = Catalogue(
    warning={
        "without_values": "At some sites no row has the variable{group}, and its figures are those of the "
        "other sites: {listed}. Check the column there.",
        "hidden": "Hidden counts are of few rows at a site, or would reveal such a count by subtraction.",
        "grouped": '"all" is of the rows with {by} for {variables}{counted}: a site refuses sums over rows '
        "that differ by a few.",
    },
    info={
        "noise": "All figures have noise with epsilon {epsilon:.3g} at delta {delta:g} for one row added or "
        "removed. The number after ± is half of a 95 % interval: of a count for its noise, of a mean for "
        "noise and sampling. Missing rows that noise explains are not shown. tidy() has all limits.",
        "quartiles": "Quartiles are from counts on intervals of a public range, after each site has "
        "averaged the values of every few successive rows of a group.",
        "missing": "Percentages and means are of the rows that have the variable.",
        "left_out": "Missing rows include complete ones at {sites}: the other rows would differ in few from "
        "those of other analyses.",
        "unknown": "{by} is unknown in {unknown:,} of {rows:,} rows, which are in no group and no test.",
        "no_group": "{unknown:,} of {rows:,} rows are in no group and no test: {by} is unknown, or the site "
        "leaves the row out.",
        "sizes": "The sizes of the groups are not shown: each variable lacks rows, and a site refuses sums "
        "over rows that differ by a few.",
        "tests": "P: Welch's analysis of variance; Kruskal and Wallis's test for medians; Pearson's "
        "chi-squared test for categories.",
    },
)


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The groups of a table: their names, and their numbers of rows (G,), or None where these are not known.

    `unknown` counts the rows without a group; None if it is not known. Over all rows, `grouped` variables are
    described by those with a group alone.
    """

    labels: tuple[str, ...]
    sizes: Floats | None
    unknown: int | None
    grouped: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class VariableNoise:
    """Errors of a variable with noise: standard errors of means by group (G,), or `deviation` of all counts.

    `counts` (2, G, L) are 95 % limits of counts, `shares` (3, G, L) shares with their limits, and `quarters`
    (2, G + 1, 3) limits of the quartiles of all rows and of each group.
    """

    errors: Floats | None = None
    deviation: float = 0.0
    counts: Floats | None = None
    shares: Floats | None = None
    quarters: Floats | None = None

    def of_mean(self, rows: Floats) -> Floats:
        """Return standard errors of the mean of all rows and of each group, (G + 1,)."""
        assert self.errors is not None
        shares = rows / max(float(rows.sum()), 1.0)
        return np.append(np.sqrt(np.nansum((shares * self.errors) ** 2)), self.errors)

    def of_counts(self, groups: int) -> Floats:
        """Return standard errors of a count of all rows and of each group, (G + 1,)."""
        return self.deviation * np.append(np.sqrt(groups), np.ones(groups))


@dataclass(frozen=True, slots=True, eq=False)
class TableVariable:
    """One variable of the table: figures by group (G,); a category has `levels` and `counts` (G, L).

    `rows` are those that have the variable, and `missing` counts those that lack it. `quarters` (G + 1, 3)
    are the quartiles of all rows and of each group, from counts on `intervals` (G, J). Hidden counts are NaN.
    `total` has the same over all rows, where some have no group. No row of the sites `without` has it;
    those that leave complete rows out are `left_out`. `noise` are the errors of figures with noise.
    """

    name: str
    missing: int
    rows: Floats
    mean: Floats | None = None
    variance: Floats | None = None
    quarters: Floats | None = None
    intervals: Floats | None = None
    levels: tuple[str, ...] = ()
    counts: Floats | None = None
    total: TableVariable | None = None
    without: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    noise: VariableNoise | None = None

    @property
    def overall(self) -> tuple[float, float]:
        """Mean and variance over all rows."""
        if self.total is not None:
            return self.total.overall
        assert self.mean is not None and self.variance is not None
        there = self.rows > 0.0
        n, mean, variance = self.rows[there], self.mean[there], self.variance[there]
        center = float(n @ mean / n.sum())
        squares = float(np.where(n > 1.0, (n - 1.0) * variance, 0.0).sum() + n @ (mean - center) ** 2)
        return center, squares / (float(n.sum()) - 1.0)

    def p_value(self) -> float:
        """Return the p-value of Welch's, Kruskal and Wallis's, or Pearson's test, as the summary says."""
        if self.intervals is not None:
            return kruskal_wallis(self.intervals[self.rows > 0.0])
        if self.counts is not None:
            table = self.counts[:, self.counts.sum(axis=0) > 0.0]
            if np.isnan(self.counts).any() or min(table.shape) < 2:
                return float("nan")
            return float(stats.chi2_contingency(table, correction=False).pvalue)
        assert self.mean is not None and self.variance is not None
        there = (self.rows > 1.0) & (self.variance > 0.0)
        n, mean, variance = self.rows[there], self.mean[there], self.variance[there]
        k = len(n)
        if k < 2:
            return float("nan")
        w = n / variance
        center = float(w @ mean / w.sum())
        spread = float((((1.0 - w / w.sum()) ** 2) / (n - 1.0)).sum())
        f = float(w @ (mean - center) ** 2) / (k - 1) / (1.0 + 2.0 * (k - 2) / (k**2 - 1) * spread)
        return float(stats.f.sf(f, k - 1, (k**2 - 1) / (3.0 * spread)))

    def difference(self) -> float:
        """Return the largest standardized difference between two groups (Yang and Dalton 2012)."""
        pairs = [(a, b) for a in range(len(self.rows)) for b in range(a)]
        found = [self._difference(a, b) for a, b in pairs]
        return float(np.nanmax(found)) if found and not np.isnan(found).all() else float("nan")

    def _difference(self, a: int, b: int) -> float:
        if self.counts is None:
            assert self.mean is not None and self.variance is not None
            pooled = (self.variance[a] + self.variance[b]) / 2.0
            return float(abs(self.mean[a] - self.mean[b]) / np.sqrt(pooled)) if pooled > 0.0 else float("nan")
        if np.isnan(self.counts[[a, b]]).any():
            return float("nan")
        p, q = (self.counts[one, 1:] / self.counts[one].sum() for one in (a, b))
        covariance = (np.diag(p) - np.outer(p, p) + np.diag(q) - np.outer(q, q)) / 2.0
        return float(np.sqrt(max((p - q) @ np.linalg.pinv(covariance) @ (p - q), 0.0)))


class TableOne(Report):
    """The first table of a study; made by :func:`fedstat.table_one`.

    Attributes
    ----------
    variables : tuple of TableVariable
        Figures of each column.
    by : str or None
        Column of the groups.
    ledgers : list of Ledger
        Releases, by variable.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> table = fs.table_one(partition, "age + C(stage)", by="arm")
    >>> print(table.to_frame().to_string())
                       missing         all       drugs     surgery
    variable
    n                                  800         432         368
    age      mean (sd)       0  61.8 (9.0)  61.6 (9.0)  61.9 (9.0)
    stage    I               0  325 (40.6)  184 (42.6)  141 (38.3)
             II                 262 (32.8)  129 (29.9)  133 (36.1)
             III                213 (26.6)  119 (27.5)   94 (25.5)
    >>> table.glance()["variables"].tolist(), table.tidy().shape
    ([2], (10, 5))
    >>> table.by, len(table.ledgers), table.to_latex().count("stage") > 0, len(table.variables)
    ('arm', 2, True, 2)
    """

    def __init__(
        self,
        variables: tuple[TableVariable, ...],
        by: str | None,
        groups: Groups,
        nobs: int,
        smd: bool,
        pvalues: bool,
        ledgers: list[Ledger],
        subset: str | None = None,
        noise: tuple[float, float] | None = None,
    ) -> None:
        self.variables, self.by, self.ledgers, self._subset = variables, by, ledgers, subset
        self._noise = noise
        self._groups, self._labels = groups, groups.labels
        self._nobs, self._smd, self._pvalues = nobs, smd, pvalues

    def _columns(self) -> list[str]:
        more = [*(["SMD"] if self._smd else []), *(["P"] if self._pvalues else [])] if self._labels else []
        return ["missing", "all", *self._labels, *more]

    def to_frame(self) -> pd.DataFrame:
        """Return the table as texts: index ``variable`` and level or figure, columns the groups."""
        rows: dict[tuple[str, str], list[str]] = {}
        width = len(self._columns())
        sizes = self._groups.sizes
        known = [""] * len(self._labels) if sizes is None else [f"{n:,.0f}" for n in sizes]
        rows["n", ""] = ["", f"{self._nobs:,}", *known]
        if self._groups.unknown:
            label = "no group" if self._left_out() else f"{self.by} unknown"
            rows[label, ""] = ["", f"{self._groups.unknown:,}"]
        for one in self.variables:
            cells = _category_rows(one, self._labels) if one.levels else _number_rows(one, self._labels)
            last = self._statistics(one)
            for place, (label, values) in enumerate(cells):
                rows[one.name, label] = [f"{one.missing:,}" if not place else "", *values]
                rows[one.name, label] += last if not place else []
        index = pd.MultiIndex.from_tuples(rows, names=["variable", ""])
        texts = [row + [""] * (width - len(row)) for row in rows.values()]
        return pd.DataFrame(texts, index=index, columns=self._columns())

    def _statistics(self, one: TableVariable) -> list[str]:
        if not self._labels:
            return []
        out = [f"{one.difference():.3f}"] if self._smd else []
        if self._pvalues:
            p = one.p_value()
            out.append("" if np.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}")
        return out

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the largest standardized difference of each variable between groups, or shares of levels.

        Parameters
        ----------
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        ModelError
            A table without groups has no category.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fs.table_one(partition, "age + C(stage)", by="arm").plot().get_xlabel()
        'largest standardized difference between two groups'
        """
        if self.by is not None:
            return draw_differences({one.name: one.difference() for one in self.variables}, self.by, ax)
        shares = {
            f"{one.name}: {level}": 100.0 * float(count) / float(one.rows.sum())
            for one in self.variables
            if one.counts is not None
            for level, count in zip(one.levels, one.counts.sum(axis=0), strict=True)
        }
        if not shares:
            raise ModelError("plot: the table has neither groups nor categories; draw a histogram instead")
        return draw_shares(shares, ax)

    def tidy(self) -> pd.DataFrame:
        """Return the figures as numbers: one row for each variable, level and group.

        With noise, also ``conf_low`` and ``conf_high``, 95 % limits that include it. Those of counts are of
        the number of rows; those of shares, means and quartiles include sampling.
        """
        rows = []
        labels = self._labels or ("all",)
        for one in self.variables:
            for g, label in enumerate(labels):
                rows += [(one.name, level, label, *rest) for level, *rest in _figures(one, g)]
        columns = ["variable", "level", "group", "figure", "value", "conf_low", "conf_high"]
        frame = pd.DataFrame(rows, columns=columns)
        return frame if self._noise is not None else frame[columns[:-2]]

    def _glance(self) -> Mapping[str, float]:
        return {"nobs": self._nobs, "variables": len(self.variables), "groups": max(len(self._labels), 1)}

    def _sheets(self) -> Iterator[Sheet]:
        frame = self.to_frame()
        rows = []
        before = ""
        for (name, label), values in zip(frame.index, frame.to_numpy().tolist(), strict=True):
            text = f"{name}, {label}" if label and name != before else f"  {label}" if label else name
            rows.append((text, *values))
            before = name
        count = len(frame.columns)
        stub = max(len(row[0]) for row in rows)
        each = max(min(22, (WIDTH - stub) // count - 1), 9)
        widths = (WIDTH - count * (each + 1), *[each] * count)
        headers = ("", *frame.columns)
        title = "Table one" if self.by is None else f"Table one, by {self.by}"
        title += "" if self._subset is None else f", rows with {self._subset}"
        yield Sheet(headers, tuple(rows), "l" + "r" * count, widths, title, wrap=True)

    def _left_out(self) -> tuple[str, ...]:
        """Return the sites that leave out rows that have a variable."""
        return tuple(dict.fromkeys(site for one in self.variables for site in one.left_out))

    def _summary_notes(self) -> Iterator[Note]:
        lacking = [
            f"{one.name} at {', '.join(map(repr, one.without))}" for one in self.variables if one.without
        ]
        if lacking:
            group = f" and {self.by}" if self._labels else ""
            yield NOTES.note("without_values", group=group, listed="; ".join(lacking))
        if any(one.counts is not None and np.isnan(one.counts).any() for one in self.variables):
            yield NOTES.note("hidden")
        if self._noise is not None:
            yield NOTES.note("noise", epsilon=self._noise[0], delta=self._noise[1])
        elif any(one.quarters is not None for one in self.variables):
            yield NOTES.note("quartiles")
        if any(one.missing for one in self.variables):
            yield NOTES.note("missing")
        if left_out := self._left_out():
            yield NOTES.note("left_out", sites=", ".join(map(repr, left_out)))
        unknown = self._groups.unknown
        if unknown:
            kind = "no_group" if left_out else "unknown"
            yield NOTES.note(kind, by=self.by, unknown=unknown, rows=self._nobs)
        if self._groups.grouped and self._noise is None:
            names = ", ".join(self._groups.grouped)
            counted = "" if unknown is not None else ', and "missing" counts all others'
            yield NOTES.note("grouped", by=self.by, variables=names, counted=counted)
        if self._labels and self._groups.sizes is None:
            yield NOTES.note("sizes")
        if self._pvalues and self._labels:
            yield NOTES.note("tests")

    def __repr__(self) -> str:
        return self.summary().as_text()


def _figures(one: TableVariable, g: int) -> Iterator[tuple[str, str, float, float, float]]:
    """Yield level, name, value and limits of each figure of a group; NaN for limits that are not known."""
    unknown, noise = (np.nan, np.nan), one.noise
    if one.counts is not None:
        for k, level in enumerate(one.levels):
            limits = unknown if noise is None or noise.counts is None else noise.counts[:, g, k].tolist()
            yield level, "count", float(one.counts[g, k]), *limits
            if noise is not None and noise.shares is not None:
                yield level, "share", *noise.shares[:, g, k].tolist()
        return
    assert one.mean is not None and one.variance is not None
    mean, limits = float(one.mean[g]), unknown
    if noise is not None and noise.errors is not None:
        half = HALF * float(noise.errors[g])
        limits = mean - half, mean + half
    yield "", "mean", mean, *limits
    yield "", "sd", float(np.sqrt(one.variance[g])), *unknown
    if one.quarters is not None:
        for k, name in enumerate(("q25", "median", "q75")):
            ends = (
                unknown if noise is None or noise.quarters is None else noise.quarters[:, g + 1, k].tolist()
            )
            yield "", name, float(one.quarters[g + 1, k]), *ends


def _number_rows(one: TableVariable, labels: Sequence[str]) -> list[tuple[str, list[str]]]:
    if one.quarters is not None:
        places = range(len(labels) + 1) if labels else range(1)
        whole = None if one.total is None else one.total.quarters
        quarters = one.quarters if whole is None else np.vstack([whole, one.quarters[1:]])
        texts = ["{1:.4g} [{0:.4g}, {2:.4g}]".format(*quarters[place]) for place in places]
        return [("median [Q1, Q3]", texts)]
    assert one.mean is not None and one.variance is not None
    figures = [one.overall, *(zip(one.mean, one.variance, strict=True) if labels else [])]
    form = _form(float(np.sqrt(one.overall[1])))
    halves = [""] * len(figures)
    if one.noise is not None and one.noise.errors is not None:
        halves = [f" ± {HALF * error:{form}}" for error in one.noise.of_mean(one.rows)]
    texts = [
        f"{mean:{form}}{half} ({np.sqrt(v):{form}})" for (mean, v), half in zip(figures, halves, strict=False)
    ]
    return [("mean (sd)", texts)]


def kruskal_wallis(counts: Floats) -> float:
    """Return the p-value of Kruskal and Wallis's test from counts (G, J), corrected for ties."""
    ties = counts.sum(axis=0)
    n, groups = float(ties.sum()), counts.sum(axis=1)
    ranks = ties.cumsum() - (ties - 1.0) / 2.0
    spread = 1.0 - float((ties**3 - ties).sum()) / (n**3 - n) if n > 1.0 else 0.0
    if len(groups) < 2 or spread <= 0.0:
        return float("nan")
    statistic = 12.0 / (n * (n + 1.0)) * float(((counts @ ranks) ** 2 / groups).sum()) - 3.0 * (n + 1.0)
    return float(stats.chi2.sf(statistic / spread, len(groups) - 1))


def _form(spread: float) -> str:
    """Return the format of figures with this standard deviation: one decimal, and more where it is small.

    At least two digits of the deviation are shown, of very small ones in scientific notation.
    """
    if not spread > 0.0:
        return ",.1f"
    digits = int(max(1 - np.floor(np.log10(spread)), 1))
    return f",.{digits}f" if digits <= MOST_DECIMALS else ".2e"


def _category_rows(one: TableVariable, labels: Sequence[str]) -> list[tuple[str, list[str]]]:
    assert one.counts is not None
    whole = one if one.total is None else one.total
    assert whole.counts is not None
    counts, sizes = whole.counts.sum(axis=0)[None], np.array([whole.rows.sum()])
    if labels:
        counts, sizes = np.vstack([counts, one.counts]), np.append(sizes, one.rows)
    halves = [""] * len(sizes)
    if one.noise is not None:
        halves = [f" ± {HALF * error:,.0f}" for error in one.noise.of_counts(len(one.rows))]
    return [
        (
            level,
            [
                SUPPRESSED if np.isnan(count) else f"{count:,.0f}{half} ({100.0 * count / max(n, 1.0):.1f})"
                for count, n, half in zip(column, sizes, halves, strict=False)
            ],
        )
        for level, column in zip(one.levels, counts.T, strict=True)
    ]
