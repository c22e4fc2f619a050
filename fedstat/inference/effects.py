"""Means that a fit predicts, and comparisons of them, with errors by the delta method.

Everything here works on numbers with their derivatives by the parameters of a fit: :class:`Means`. Which
means these are, of which rows, and where the rows are, does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import ModelError, Remedy
from fedstat.inference.covariance import delta_method
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.hypotheses import DegreesOfFreedom, df_of
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.plots import draw_bands, plot_coefficients
from fedstat.inference.summary import DerivedReport, Shown
from fedstat.inference.tables import Sheet, SheetSummary, number
from fedstat.kernels.multiple_tests import adjust
from fedstat.spline_names import short_names
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTES = Catalogue(
    info={
        "conditions": "{note}",
        "logarithms": "Standard errors are those of the logarithms of the estimates.",
    }
)
NUMBER_WIDTHS = (12, 10, 9, 8, 10, 10)
WIDEST_KEY = 26
FEW_POINTS = 3
"""Values of a number from which a plot draws a curve."""


@dataclass(frozen=True, slots=True, eq=False)
class Means:
    """Numbers (m, J) with their derivatives by q parameters, (m, J, q)."""

    values: Floats
    slopes: Floats

    @property
    def finite(self) -> bool:
        """Whether all numbers are finite."""
        return bool(np.isfinite(self.values).all() and np.isfinite(self.slopes).all())

    def combined(self, weights: Floats) -> Means:
        """Return linear combinations of the m rows, by weights (k, m)."""
        return Means(weights @ self.values, np.einsum("km,mjq->kjq", weights, self.slopes))

    def part(self, rows: Any) -> Means:
        """Return some of the m rows."""
        return Means(self.values[rows], self.slopes[rows])

    def inverse_of(self, inverse: Callable[[Floats], Floats], slope: Callable[[Floats], Floats]) -> Means:
        """Return a function of the numbers, of which `slope` is the derivative."""
        return Means(inverse(self.values), slope(self.values)[..., None] * self.slopes)


def join(parts: Sequence[Means]) -> Means:
    """Return all rows of several."""
    return Means(np.concatenate([one.values for one in parts]), np.concatenate([one.slopes for one in parts]))


Pair = tuple[Floats, Floats, Floats]
"""A function of a high and a low mean, and its derivatives by these."""


def _log_odds(high: Floats, low: Floats) -> Pair:
    value = np.log(high / (1.0 - high)) - np.log(low / (1.0 - low))
    return value, 1.0 / (high * (1.0 - high)), -1.0 / (low * (1.0 - low))


COMPARISONS: Mapping[str, Callable[[Floats, Floats], Pair]] = {
    "difference": lambda high, low: (high - low, np.ones_like(high), -np.ones_like(low)),
    "ratio": lambda high, low: (high / low, 1.0 / low, -high / low**2),
    "lnratio": lambda high, low: (np.log(high / low), 1.0 / high, -1.0 / low),
    "lnor": _log_odds,
    "lift": lambda high, low: (high / low - 1.0, 1.0 / low, -high / low**2),
}
"""Functions of two means, with the names of marginaleffects."""
SIGNS = {"difference": "-", "ratio": "/", "lnratio": "/", "lnor": "/", "lift": "/"}
WORDS = {
    "difference": "difference",
    "ratio": "ratio",
    "lnratio": "log ratio",
    "lnor": "log odds ratio",
    "lift": "lift",
}
EXPONENTIALS = {"lnratio": "ratio", "lnor": "odds ratio"}
NULLS = {"ratio": 1.0}
"""Values at which means are equal, if these are not zero."""


def compare_means(high: Means, low: Means, comparison: str) -> Means:
    """Compare two sets of means, row by row and outcome by outcome."""
    with np.errstate(all="ignore"):
        value, by_high, by_low = COMPARISONS[comparison](high.values, low.values)
        return Means(value, by_high[..., None] * high.slopes + by_low[..., None] * low.slopes)


PAIRS: Mapping[str, Callable[[Sequence[Any]], Iterable[tuple[Any, Any]]]] = {
    "reference": lambda levels: ((levels[0], level) for level in levels[1:]),
    "pairwise": lambda levels: combinations(levels, 2),
    "revpairwise": lambda levels: ((high, low) for low, high in combinations(levels, 2)),
    "sequential": pairwise,
    "all": lambda levels: permutations(levels, 2),
}
"""Pairs (low, high) of levels, of which the first is the reference, with the names of marginaleffects."""

LARGE_DF = 1e5
"""Degrees of freedom of a studentized range that count as infinite."""
ADJUSTMENTS = ("holm", "bonferroni", "sidak", "tukey", "none")


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Adjustment of p-values and intervals for several tests, within families of tests.

    `means` is the number of means that differ, and `families` (n,) has the family of each test. Intervals
    that belong to Holm's method are those of Bonferroni, as in R's emmeans.
    """

    kind: str = "none"
    means: int = 0
    families: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ADJUSTMENTS:
            raise ModelError(f"adjust: expected one of {', '.join(ADJUSTMENTS)}, received {self.kind!r}")

    def pvalues(self, pvalues: Floats, statistics: Floats, df: Floats) -> Floats:
        """Return adjusted p-values (n,) from single ones, statistics and degrees of freedom."""
        if self.kind == "none":
            return pvalues
        if self.kind == "tukey":
            ranges = np.abs(statistics) * np.sqrt(2.0)
            return np.asarray(stats.studentized_range.sf(ranges, self.means, np.minimum(df, LARGE_DF)))
        out, families = np.full(len(pvalues), np.nan), np.array(self.families)
        for family in np.unique(families):
            out[families == family] = adjust(pvalues[families == family], self.kind)
        return out

    def halves(self, alpha: float, df: Floats) -> Floats:
        """Return by how many standard errors intervals reach to each side, (n,)."""
        if self.kind == "none":
            return np.asarray(stats.t.isf(alpha / 2.0, df))
        if self.kind == "tukey":
            ranges = stats.studentized_range.isf(alpha, self.means, np.minimum(df, LARGE_DF))
            return np.asarray(ranges / np.sqrt(2.0))
        n = self.families.count(self.families[0])
        single = 1.0 - (1.0 - alpha) ** (1.0 / n) if self.kind == "sidak" else alpha / n
        return np.asarray(stats.t.isf(single / 2.0, df))


@dataclass(frozen=True, slots=True, eq=False)
class EffectWords:
    """What a table of effects says: its title, the name of its numbers, and a note.

    `null` is the value that is tested, nan for no tests; `exponentiate` gives estimates and their limits as
    exponentials. `inverse` takes estimates and their limits from the scale of a linear predictor, and `slope`
    is its derivative.
    """

    title: str
    estimate: str
    note: str
    null: float = 0.0
    exponentiate: bool = False
    inverse: Callable[[Floats], Floats] = np.asarray
    slope: Callable[[Floats], Floats] = np.ones_like

    def turned(self, values: Floats) -> Floats:
        """Return numbers as they are shown."""
        return np.asarray(np.exp(values) if self.exponentiate else self.inverse(values))


class EffectEstimates(DerivedReport):
    """Predictions, comparisons, slopes or contrasts of a fit, one row for each.

    Parameters
    ----------
    keys : DataFrame
        What each of the n rows is.
    found : Means
        Numbers (n, 1) with their derivatives.
    cov : (q, q) array
        Covariance of the parameters.
    df : float, (q,) array or None
        Degrees of freedom of Student's t; None for normal tests.
    words : EffectWords
    adjustment : Adjustment
    sources : iterable

    Examples
    --------
    >>> import fedstat as fs
    >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fit = fs.GLORE.from_formula("num > 0 ~ age + C(sex)", hospitals).fit()
    >>> found = fit.comparisons("sex")
    >>> found.tidy().round(2)[["term", "contrast", "estimate", "conf_low", "conf_high"]]
      term contrast  estimate  conf_low  conf_high
    0  sex    1 - 0      0.33      0.26        0.4
    >>> found.summary_frame(alpha=0.05).equals(found.tidy())
    True
    >>> found.cov_params().shape, found.estimate.shape, found.std_error.shape
    ((1, 1), (1,), (1,))
    >>> "sex" in str(found.summary()), found.plot().has_data()
    (True, True)
    """

    def __init__(
        self,
        keys: pd.DataFrame,
        found: Means,
        cov: Floats,
        df: DegreesOfFreedom,
        *,
        words: EffectWords,
        adjustment: Adjustment | None = None,
        sources: Iterable[object],
    ) -> None:
        super().__init__(sources)
        self._keys, self._values = keys.reset_index(drop=True), found.values[:, 0]
        jacobian = found.slopes[:, 0]
        # A parameter without a variance does not affect numbers that do not depend on it.
        used = (jacobian != 0.0).any(axis=0)
        self._cov = delta_method(cov[np.ix_(used, used)], jacobian[:, used])
        own = df_of(jacobian[:, : len(np.atleast_1d(df))], df) if df is not None and np.ndim(df) else df
        self._student = df is not None
        self._df = np.broadcast_to(np.inf if own is None else np.asarray(own, dtype=float), len(keys))
        self._words, self._adjustment = words, adjustment or Adjustment()

    @property
    def estimate(self) -> pd.Series:
        """Estimates."""
        return pd.Series(self._words.turned(self._values))

    @property
    def std_error(self) -> pd.Series:
        """Standard errors; of the logarithms of exponentials."""
        return pd.Series(self._errors() * np.abs(self._words.slope(self._values)))

    def _errors(self) -> Floats:
        """Return standard errors on the scale of the intervals."""
        return np.asarray(np.sqrt(np.maximum(np.diag(self._cov), 0.0)))

    def cov_params(self) -> pd.DataFrame:
        """Covariance matrix of the estimates; of the logarithms of exponentials."""
        slope = self._words.slope(self._values)
        return pd.DataFrame(self._cov * np.outer(slope, slope))

    @takes_alpha
    def tidy(self, alpha: float = 0.05) -> pd.DataFrame:
        """One row for each estimate.

        Parameters
        ----------
        alpha : float

        Returns
        -------
        DataFrame
            What the row is: ``term``, ``contrast``, ``group`` (the category, or the time), columns by which
            means were taken, and values of a grid; then ``estimate``, ``std_error``, for effects also
            ``statistic`` and ``p_value``, ``conf_low``, ``conf_high``.
        """
        error, df, words = self._errors(), self._df, self._words
        half = self._adjustment.halves(alpha, df) * error
        frame = self._keys.assign(estimate=self.estimate, std_error=self.std_error)
        if np.isfinite(words.null):
            with np.errstate(all="ignore"):
                statistic = (self._values - words.null) / error
            single = np.asarray(2.0 * stats.t.sf(np.abs(statistic), df))
            frame["statistic"] = statistic
            frame["p_value"] = self._adjustment.pvalues(single, statistic, df)
        # An inverse link may decrease.
        ends = np.sort([words.turned(self._values + sign * half) for sign in (-1.0, 1.0)], axis=0)
        return frame.assign(conf_low=ends[0], conf_high=ends[1])

    @takes_alpha
    def summary_frame(self, alpha: float = 0.05) -> pd.DataFrame:
        """Return :meth:`tidy` with confidence 1 - `alpha`, the name that predictions have in statsmodels."""
        return self.tidy(alpha)

    @takes_alpha
    def summary(
        self, alpha: float = 0.05, *, title: str | None = None, notes: Shown = "brief"
    ) -> SheetSummary:
        """Table for print: ``as_html()``, ``as_latex()``, ``as_csv()`` as any summary."""
        return self._lay_out(self._sheets(alpha), title, notes)

    def _glance(self) -> dict[str, Any]:
        return {"estimate": self._words.estimate, "rows": len(self._keys), "adjust": self._adjustment.kind}

    def _summary_notes(self) -> Iterator[Note]:
        yield NOTES.note("conditions", note=self._words.note)
        if self._words.exponentiate:
            yield NOTES.note("logarithms")

    def _texts(self) -> pd.DataFrame:
        """Return what each row is, as text."""
        out = pd.DataFrame(index=self._keys.index)
        for name, column in self._keys.items():
            cells = [f"{one:.6g}" if isinstance(one, float) else str(one) for one in column.tolist()]
            # The variable that changes has no value in its own rows.
            cells = ["" if blank else cell for cell, blank in zip(cells, column.isna(), strict=True)]
            out[name] = short_names(cells) if name == "term" else cells
        return out

    def _sheets(self, alpha: float = 0.05) -> Iterator[Sheet]:
        frame, keys, words = self.tidy(alpha), self._texts(), self._words
        z = "t" if self._student else "z"
        tested = np.isfinite(words.null)
        labels = (z, f"P>|{z}|") if tested else ()
        headers = (
            *keys.columns,
            words.estimate,
            "std err",
            *labels,
            f"[{alpha / 2:.4g}",
            f"{1 - alpha / 2:.4g}]",
        )
        rows = []
        for cells, (_, row) in zip(keys.to_numpy().tolist(), frame.iterrows(), strict=True):
            tests = [f"{row['statistic']:.3f}", f"{row['p_value']:.3f}"] if tested else []
            ends = [number(row[name]) for name in ("conf_low", "conf_high")]
            error = row["std_error"]
            rows.append((*cells, number(row["estimate"], 4, error), number(error), *tests, *ends))
        widths = tuple(
            min(max([len(name), *map(len, keys[name])], default=4), WIDEST_KEY) for name in keys.columns
        )
        numbers = NUMBER_WIDTHS if tested else (*NUMBER_WIDTHS[:2], *NUMBER_WIDTHS[4:])
        numbers = (max(numbers[0], len(words.estimate) + 1), *numbers[1:])
        align = "l" * len(widths) + "r" * len(numbers)
        yield Sheet(tuple(map(str, headers)), tuple(rows), align, (*widths, *numbers), words.title, gap=1)

    def __repr__(self) -> str:
        return self.summary().as_text()

    @takes_alpha
    def plot(self, ax: Axes | None = None, *, alpha: float = 0.05) -> Axes:
        """Draw the estimates with their intervals: curves along a number of a grid, otherwise points.

        Parameters
        ----------
        ax : matplotlib Axes, optional
        alpha : float

        Returns
        -------
        matplotlib Axes
        """
        frame, keys, words = self.tidy(alpha), self._texts(), self._words
        ends = ["estimate", "conf_low", "conf_high"]
        varies = [str(name) for name in keys if len(set(keys[name])) > 1]
        axes = [name for name in varies if self._is_axis(name)]
        # Ordered categories are numbers as well, and have fewer values.
        along = max(axes, key=lambda name: len(set(keys[name])), default="")
        labels = [name for name in varies if name != along]
        named = [name for name in labels or [*map(str, keys)] if along or name not in ("term", "contrast")]
        said = keys.assign(**{name: f"{name} = " + keys[name] for name in named if name != "group"})
        names = [", ".join(row) for row in said[labels or [*map(str, keys)]].to_numpy().tolist()]
        if along:
            curves = frame.assign(label=names if labels else "", at=frame[along].astype(float))
            wide = curves.pivot_table(index="at", columns="label", values=ends)
            x = wide.index.to_numpy(dtype=np.float64)
            bands = {
                name: np.array([wide[end][name].to_numpy() for end in ends])
                for name in dict.fromkeys(curves["label"])
            }
            title = f"with pointwise {100 * (1 - alpha):g} % intervals"
            return draw_bands(x, bands, along, words.title, title, ax)
        shown = frame[ends].assign(term=names, site="")
        ratios = words.exponentiate or words.null == 1.0
        return plot_coefficients(
            shown, ax=ax, title=words.title, alpha=alpha, effect=words.estimate, ratios=ratios
        )

    def _is_axis(self, name: str) -> bool:
        """Whether estimates are those of curves along a number of a grid."""
        column, others = self._keys[name], [other for other in self._keys if other != name]
        if not pd.api.types.is_numeric_dtype(column) or len(set(column)) < FEW_POINTS or column.isna().any():
            return False
        # Every curve has the same points.
        curves = (
            [frozenset(rows[name]) for _, rows in self._keys.groupby(others, dropna=False)] if others else []
        )
        return not self._keys.duplicated().any() and len(set(curves)) <= 1


def averages_by(groups: pd.DataFrame) -> tuple[pd.DataFrame, Floats]:
    """Return the distinct rows of a table of m groups in order, and weights (k, m) of their means."""
    code, _ = pd.factorize(pd.MultiIndex.from_frame(groups))
    indicators = (np.arange(code.max() + 1)[:, None] == code).astype(np.float64)
    return groups.drop_duplicates().reset_index(drop=True), indicators / indicators.sum(axis=1, keepdims=True)


AT_MEAN = Remedy("{method}(..., at='mean')", "give rows, as {arguments} or at={{...}}")


def check_comparison(comparison: str, exponentiate: bool) -> None:
    """Require a known comparison, and a logarithm if it is exponentiated."""
    if comparison not in COMPARISONS:
        raise ModelError(f"comparison: expected one of {', '.join(COMPARISONS)}, received {comparison!r}")
    if exponentiate and comparison not in EXPONENTIALS:
        raise ModelError(
            f"exponentiate: {comparison!r} is no logarithm",
            remedy=Remedy("comparisons(..., comparison='lnratio')", "use {arguments} or comparison='lnor'"),
        )
