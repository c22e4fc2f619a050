"""Meta-analysis of estimates that sites report: the public function and its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import ModelError
from fedstat.inference import meta_analysis
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.heterogeneity import FEW_SITES
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.plots import plot_forest
from fedstat.inference.summary import WIDTH, Report
from fedstat.inference.tables import Sheet, number
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMON, RANDOM, FURTHER = "common effect", "random effects", "a further site"
METHODS = {
    "REML": "restricted maximum likelihood (REML)",
    "DL": "moments (DerSimonian and Laird 1986)",
    "PM": "the generalized Q (Paule and Mandel 1982)",
}
TESTS = {
    "adhoc": "Student's t with {df} and Hartung and Knapp's standard error, never below the usual one",
    "knha": "Student's t with {df} and Hartung and Knapp's standard error",
    "z": "a normal quantile, which is too short for few sites",
}
EFFECT_WIDTHS = (26, 11, 11, 10, 8, 11, 11)
SITE_WIDTHS = (26, 11, 11, 11, 11, 10, 10)
NOTES = Catalogue(
    warning={
        "verdict/differ": "The effects differ between sites. The common effect is then an average, and its "
        "interval is too short: report the random effects and the interval of a further site.",
    },
    info={
        "verdict": "There is no evidence that effects differ between sites. This does not show that they "
        "are equal: see the interval of I2.",
        "two_estimators": "tau2 is {tau2} by {method} and {moments} by moments (method='DL'). Use the "
        "interval of tau2, because the data do not determine it well.",
        "few_sites": "With {sites} sites Q has little power and tau2 is poorly determined: the intervals of "
        "random effects are wide.",
        "methods": "tau2 is by {estimator}; the interval of random effects uses {tests}. Standard errors of "
        "sites are taken as known.",
        "assumptions": "The sites must have different people and must estimate the same quantity: the same "
        "model, columns, units and reference levels.",
    },
)


@dataclass(frozen=True, slots=True, eq=False)
class MetaResults(Report):
    """Estimates of one effect from several sites, compared and averaged; made by :func:`fedstat.meta`.

    Attributes
    ----------
    estimates, std_errors : Series
        Those of the sites, index site.
    common, common_se : float
        Mean with weights ``1 / std_error^2``: the effect, if it is the same at all sites.
    fit : RandomEffectsFit
        Mean of random effects ``re_estimate`` with standard error and interval, the interval ``pred_low`` to
        ``pred_high`` of a further site, and Cochran's ``Q`` with ``df`` and ``p_value``.
    tau2, tau2_low, tau2_high : float
        Variance of the effect between sites, with the interval of the Q profile (Viechtbauer 2007).
    I2, I2_low, I2_high : float
        ``tau2 / (tau2 + s2)`` in [0, 1], with the typical variance s2 of Higgins and Thompson (2002), as in
        metafor; the interval follows from that of `tau2`.
    alpha : float
        One minus the level of intervals.
    method, test : str
        As given.

    Examples
    --------
    >>> import fedstat as fs
    >>> found = fs.meta({"A": 0.47, "B": 0.54, "C": 0.23}, {"A": 0.02, "B": 0.07, "C": 0.13})
    >>> found.to_frame().index.tolist(), found.tidy()["term"].tolist()
    (['A', 'B', 'C'], ['common effect', 'random effects', 'a further site'])
    >>> bool(found.plot_forest().has_data()), "I2" in found.summary().as_text()
    (True, True)
    >>> 0.0 == found.tau2_low <= found.tau2 <= found.tau2_high, found.fit.df
    (True, 2)
    """

    estimates: pd.Series
    std_errors: pd.Series
    common: float
    common_se: float
    fit: meta_analysis.RandomEffectsFit
    tau2: float
    tau2_low: float
    tau2_high: float
    I2: float
    I2_low: float
    I2_high: float
    alpha: float
    method: str
    test: str

    def to_frame(self) -> pd.DataFrame:
        """Return one row per site.

        Returns
        -------
        DataFrame
            Index site; ``estimate``, ``std_error``, ``conf_low``, ``conf_high`` (normal), and the shares
            ``weight_common`` and ``weight_random`` of the site in the two means.
        """
        b, se = self.estimates.to_numpy(), self.std_errors.to_numpy()
        half = float(stats.norm.isf(self.alpha / 2.0)) * se
        weights = [1.0 / (se**2 + tau2) for tau2 in (0.0, self.tau2)]
        return pd.DataFrame(
            {
                "estimate": b,
                "std_error": se,
                "conf_low": b - half,
                "conf_high": b + half,
                "weight_common": weights[0] / weights[0].sum(),
                "weight_random": weights[1] / weights[1].sum(),
            },
            index=self.estimates.index,
        )

    def tidy(self) -> pd.DataFrame:
        """Return the common effect, the mean of random effects and the interval of a further site.

        Returns
        -------
        DataFrame
            ``term``, ``estimate``, ``std_error``, ``statistic``, ``p_value``, ``conf_low``, ``conf_high``.
            The interval of a further site is nan for two sites.
        """
        fit = self.fit
        half = float(stats.norm.isf(self.alpha / 2.0)) * self.common_se
        z, t = self.common / self.common_se, fit.re_estimate / fit.re_std_error
        random = stats.norm if self.test == "z" else stats.t(fit.df)
        ends = self.common - half, self.common + half
        p_values = 2.0 * stats.norm.sf(abs(z)), 2.0 * random.sf(abs(t))
        rows = (
            (COMMON, self.common, self.common_se, z, p_values[0], *ends),
            (RANDOM, fit.re_estimate, fit.re_std_error, t, p_values[1], fit.re_low, fit.re_high),
            (FURTHER, fit.re_estimate, np.nan, np.nan, np.nan, fit.pred_low, fit.pred_high),
        )
        columns = ["term", "estimate", "std_error", "statistic", "p_value", "conf_low", "conf_high"]
        return pd.DataFrame(rows, columns=columns)

    def plot_forest(
        self, ax: Axes | None = None, *, exponentiate: bool = False, effect: str = "estimate"
    ) -> Axes:
        """Draw the sites' estimates, both means, and the interval of a further site.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            A new figure by default.
        exponentiate : bool
            Draw exponentials, such as odds ratios, on a logarithmic scale.
        effect : str
            Name of the axis and title.

        Returns
        -------
        matplotlib Axes
        """
        rows = pd.DataFrame({"estimate": self.estimates, "std_error": self.std_errors, "problem": ""})
        names = ("re_estimate", "re_low", "re_high", "pred_low", "pred_high", "Q", "df", "p_value")
        numbers = {name: getattr(self.fit, name) for name in names}
        numbers |= {"estimate": self.common, "std_error": self.common_se}
        numbers |= {"I2": self.I2, "I2_low": self.I2_low, "I2_high": self.I2_high}
        combined = pd.Series(numbers, name=effect)
        return plot_forest(rows, combined, ax=ax, alpha=self.alpha, exponentiate=exponentiate, effect=effect)

    def _glance(self) -> dict[str, float]:
        fit = self.fit
        return {
            "n_sites": fit.sites,
            "Q": fit.Q,
            "df": fit.df,
            "p_value": fit.p_value,
            "I2": self.I2,
            "tau2": self.tau2,
        }

    def _sheets(self) -> Iterator[Sheet]:
        fit, level = self.fit, f"{100 * (1 - self.alpha):g} %"
        p = "<0.001" if fit.p_value < 0.0005 else f"{fit.p_value:.3f}"
        tau2 = f"{number(self.tau2)} [{number(self.tau2_low)}, {number(self.tau2_high)}]"
        share = f"{100 * self.I2:.0f} % [{100 * self.I2_low:.0f}, {100 * self.I2_high:.0f}]"
        rows = (
            ("Sites:", str(fit.sites), f"Q({fit.df}), equal effects:", f"{fit.Q:.2f}, P {p}"),
            ("tau2 by:", self.method, f"tau2, {level} interval:", tau2),
            ("Intervals:", level, f"I2, {level} interval:", share),
        )
        yield Sheet(("",) * 4, rows, "lrlr", (12, 16, 32, WIDTH - 66), "Meta-analysis", gap=2)
        low, high = f"[{self.alpha / 2:.4g}", f"{1 - self.alpha / 2:.4g}]"
        effects = tuple(
            (row[0], *map(_cell, row[1:4]), "" if np.isnan(row[4]) else f"{row[4]:.3f}", *map(_cell, row[5:]))
            for row in self.tidy().itertuples(index=False)
        )
        yield Sheet(
            ("", "estimate", "std err", "z or t", "P", low, high), effects, "l" + "r" * 6, EFFECT_WIDTHS
        )
        sites = tuple(
            (str(row[0]), *map(_cell, row[1:5]), *(f"{100 * share:.1f} %" for share in row[5:]))
            for row in self.to_frame().itertuples()
        )
        heads = ("site", "estimate", "std err", low, high, "w. common", "w. random")
        yield Sheet(heads, sites, "l" + "r" * 6, SITE_WIDTHS)

    def _summary_notes(self) -> Iterator[Note]:
        fit = self.fit
        if fit.p_value < self.alpha:
            yield NOTES.note("verdict/differ")
        else:
            yield NOTES.note("verdict")
        moments = meta_analysis.dersimonian_laird(self.estimates.to_numpy(), self.std_errors.to_numpy() ** 2)
        if (moments > 0.0) != (self.tau2 > 0.0):
            yield NOTES.note(
                "two_estimators", tau2=number(self.tau2), method=self.method, moments=number(moments)
            )
        if fit.sites < FEW_SITES:
            yield NOTES.note("few_sites", sites=fit.sites)
        df = f"{fit.df} degree{'s' * (fit.df > 1)} of freedom"
        yield NOTES.note("methods", estimator=METHODS[self.method], tests=TESTS[self.test].format(df=df))
        yield NOTES.note("assumptions")

    def __repr__(self) -> str:
        return self.summary().as_text()


def _cell(value: float) -> str:
    return "" if np.isnan(value) else number(value)


Values = Mapping[str, float] | pd.Series | Sequence[float] | Floats


@takes_alpha
def meta(
    estimates: Values,
    errors: Values,
    *,
    method: Literal["REML", "DL", "PM"] = "REML",
    test: Literal["adhoc", "knha", "z"] = "adhoc",
    prediction: Literal["confidence", "t"] = "confidence",
    alpha: float = 0.05,
) -> MetaResults:
    """Combine the estimates of one effect that sites made alone.

    No site is asked for anything: the function needs only estimates and standard errors that the sites have
    reported, by whatever program.

    Parameters
    ----------
    estimates, errors : Series, mapping of site to number, or sequence
        Estimates and their standard errors (not variances). Ratios such as odds ratios must be given as
        logarithms. Two Series or mappings are matched by site, sequences by position.
    method : {"REML", "DL", "PM"}
        Variance tau2 between sites: by restricted maximum likelihood, DerSimonian and Laird, or Paule and
        Mandel.
    test : {"adhoc", "knha", "z"}
        Interval of the mean of random effects, in metafor's words: Hartung and Knapp's standard error with
        quantiles of Student's t ("knha"), the same never below the usual standard error ("adhoc"), or the
        usual one with normal quantiles ("z"), which is too short for few sites.
    prediction : {"confidence", "t"}
        Interval of the effect at a further site: after Nagashima, Noma and Furukawa (2019), or that of
        metafor's ``predict``, which takes tau2 as known.
    alpha : float
        One minus the level of intervals.

    Returns
    -------
    MetaResults

    Raises
    ------
    ModelError
        Fewer than two sites, sites that differ or are named twice, an estimate that is not finite, a standard
        error that is not positive, or an option that does not exist.

    See Also
    --------
    pool : fits on several imputations of the same rows.
    combine : fits on several synthetic tables.

    References
    ----------
    Higgins, J. P. T. and Thompson, S. G. (2002). Quantifying heterogeneity in a meta-analysis. Statistics in
    Medicine 21, 1539-1558.
    Paule, R. C. and Mandel, J. (1982). Consensus values and weighting factors. Journal of Research of the
    National Bureau of Standards 87, 377-385.
    Viechtbauer, W. (2007). Confidence intervals for the amount of heterogeneity in meta-analysis. Statistics
    in Medicine 26, 37-52.

    Examples
    --------
    >>> import fedstat as fs
    >>> found = fs.meta({"A": 0.471, "B": 0.542, "C": 0.232}, {"A": 0.022, "B": 0.069, "C": 0.134})
    >>> round(found.common, 3), round(found.common_se, 3)
    (0.472, 0.021)
    """
    for what, given in (("method", method), ("test", test), ("prediction", prediction)):
        if given not in meta_analysis.CHOICES[what]:
            listed = ", ".join(map(repr, meta_analysis.CHOICES[what]))
            raise ModelError(f"meta: expected {what} to be one of {listed}, received {given!r}")
    b, se = _series(estimates, "estimates"), _series(errors, "errors")
    if not b.index.equals(se.index):
        if set(b.index) != set(se.index):
            apart = ", ".join(sorted(map(repr, set(b.index) ^ set(se.index)))[:5])
            raise ModelError(
                f"meta: estimates and errors have different sites: {apart}; give both of each site"
            )
        se = se.loc[b.index]
    if len(b) < 2:
        raise ModelError(f"meta: expected estimates of at least 2 sites, received {len(b)}")
    wrong = b.index[~(np.isfinite(b) & np.isfinite(se) & (se > 0.0))].tolist()
    if wrong:
        raise ModelError(
            "meta: expected finite estimates and positive standard errors; leave out or correct "
            f"{', '.join(map(repr, wrong[:5]))}"
        )
    values, variances = b.to_numpy(), se.to_numpy() ** 2
    fit = meta_analysis.combine_sites(
        values, variances, alpha, meta_analysis.RandomEffectsOptions(method, test, prediction)
    )
    mean, variance, _ = (float(part) for part in meta_analysis.weighted_mean(values, variances, 0.0))
    spread = np.array([fit.tau2, *meta_analysis.tau2_interval(values, variances, alpha)])
    w = 1.0 / variances
    typical = (len(w) - 1) * w.sum() / (w.sum() ** 2 - w @ w)
    shares = spread / (spread + typical)
    return MetaResults(
        estimates=b,
        std_errors=se,
        common=mean,
        common_se=variance**0.5,
        fit=fit,
        tau2=fit.tau2,
        tau2_low=float(spread[1]),
        tau2_high=float(spread[2]),
        I2=float(shares[0]),
        I2_low=float(shares[1]),
        I2_high=float(shares[2]),
        alpha=alpha,
        method=method,
        test=test,
    )


def _series(given: Values, what: str) -> pd.Series:
    """Read numbers as a Series with index site; a sequence has the sites "1", "2", ..."""
    named = (
        given if isinstance(given, pd.Series) else pd.Series(given) if isinstance(given, Mapping) else None
    )
    try:
        if named is None:
            values = np.asarray(given, dtype=np.float64)
            if values.ndim != 1:
                raise ValueError
            named = pd.Series(values, index=[str(k) for k in range(1, len(values) + 1)])
        named = named.astype(np.float64).rename_axis("site").rename(None)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"meta: expected {what} as numbers, one per site: a Series, a mapping or a sequence"
        ) from error
    if named.index.has_duplicates:
        twice = named.index[named.index.duplicated()][0]
        raise ModelError(f"meta: {what}: site {twice!r} is there more than once")
    return named
