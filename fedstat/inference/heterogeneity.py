"""Heterogeneity between sites that fit the same coefficients, and its printed summary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, fields
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pandas as pd

from fedstat.errors import EstimationError, ModelError, NotAvailableError, Remedy
from fedstat.inference.covariance import invert_information
from fedstat.inference.homogeneity_tests import JointTest, SiteScores, SiteWelchTerms, joint_test, welch_test
from fedstat.inference.meta_analysis import (
    USUAL,
    FactorCombination,
    RandomEffectsFit,
    RandomEffectsOptions,
    cochran_test,
    combine_factor,
    combine_sites,
    dersimonian_laird,
)
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.plots import plot_forest
from fedstat.inference.summary import DerivedReport
from fedstat.inference.tables import Sheet, number
from fedstat.kernels.multiple_tests import adjust
from fedstat.spline_names import canonical_name, close_names, find_name, short_names
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ----------------------------------------------------------------------------------------------------
# The numbers of a comparison of sites, from which its statements are made.

NOT_REQUESTED = "not requested"
"""Problem of a site from which no fit of its own was requested."""
NO_PARTS = (
    "no fit without each site: this needs the sites' own parts of score and information, which masked sums "
    "do not have"
)
UNMASKED = Remedy("fit(..., masked=False)", "use fit({arguments}), or fit again without the site")
OWN_FITS_ONLY = (
    "no fit without each site: sites of this model release own fits alone; fit again without the site"
)
METHODS = (
    "Q, I2, tau and the random effects compare the sites' own estimates. Random effects and tau are by "
    "restricted maximum likelihood (REML), with Hartung and Knapp's standard errors; I2 = (Q - df) / Q, the "
    "share of the spread beyond chance, with its {level:g} % interval, is by moments. "
)
NOTES = Catalogue(
    info={
        "verdict": "{verdict}",
        "no_own_estimates": "No own estimates: {sites}. They enter the score test{changes}; Q, I2, tau and "
        "the random effects use the other {others} of {total} sites.",
        "few_sites": "With {sites} sites Q has little power, and tau is poorly determined: the interval of "
        "the random effects has t quantiles with {df} degree{plural} of freedom, and is wide.",
        "one_dispersion": (
            "The score test assumes the same dispersion (residual variance) at all sites: if sites differ "
            "only in the dispersion, it rejects too often. {remedy} give each its own dispersion.",
            Remedy("fit(local=True)", "Own fits of all sites ({arguments})"),
        ),
        "methods": METHODS
        + "{source}; the changes are one Newton step, in standard errors of the common model.",
        "methods/masked": (
            METHODS
            + "{source}; the estimates without each of the {sites} sites are not available, because sums are "
            "masked: see {remedy}.",
            Remedy("fit(masked=False)"),
        ),
        "methods/own": METHODS + "{source}. For the estimates without a site, fit again without it.",
        "two_estimators": "REML and moments do not agree on whether sites vary in: {terms}. tau by moments "
        "belongs to I2 (random_effects('DL')). With few sites this is uncertain: see the interval of I2.",
        "partial": "Compared only over the sites that determine it: {terms}.",
        "one_site": "Determined at fewer than two sites: {terms}.",
    },
)


@dataclass(frozen=True, eq=False)
class CombinedCoefficients:
    """Sites' own estimates, and their random effects, which are computed when they are read first.

    `estimates` and `std_errors` are (sites, coefficients), nan where a site does not determine one; `beta`
    and `errors`, (p,), are those of the common model.
    """

    estimates: pd.DataFrame
    std_errors: pd.DataFrame
    beta: Floats
    errors: Floats
    alpha: float

    @cached_property
    def table(self) -> pd.DataFrame:
        """Return one row per coefficient, as :meth:`Heterogeneity.to_frame`."""
        table = _combined(self.estimates, self.std_errors, self.alpha)
        # Coefficients that fewer than two sites determine are not tested, and cost no power.
        holm = adjust(table["p_value"].to_numpy())
        table.insert(list(table.columns).index("p_value") + 1, "p_holm", holm)
        table.insert(0, "std_error", self.errors)
        table.insert(0, "estimate", self.beta)
        return table

    @cached_property
    def flagged(self) -> tuple[str, ...]:
        """Return coefficients that differ between sites; a summary reads these, and no interval."""
        own = zip(self.estimates.to_numpy().T, self.std_errors.to_numpy().T, strict=True)
        _, p_values, I2 = np.array([cochran_test(b, se**2) for b, se in own]).reshape(-1, 3).T
        return tuple(self.estimates.columns[(I2 > LARGE_I2) & (adjust(p_values) < self.alpha)])


@dataclass(frozen=True, eq=False, kw_only=True)  # without slots: a pickle also has what it is made of
class SiteComparison:
    """Agreement of the sites on each coefficient, in numbers.

    `sites` has columns ``nobs`` and ``problem`` (why a site has no estimate of its own). `combined` has the
    sites' own estimates, and the table of random effects. `joint` tests whether all coefficients are equal at
    all sites; it assumes `one_dispersion` if that is estimated, instead of one for each site. `without_each`
    holds `left_out` and `change`, None if sums were masked. `by_parts` is whether unmasked sums have the
    sites' parts. `covariances` (K, p, p) are those of the sites' own estimates, and `terms` the term of the
    formula to which each coefficient belongs.
    """

    sites: pd.DataFrame
    combined: CombinedCoefficients
    joint: JointTest
    one_dispersion: bool
    without_each: tuple[pd.DataFrame, pd.DataFrame] | None
    covariances: Floats | None = None
    terms: tuple[str, ...] = ()
    by_parts: bool = True

    @property
    def estimates(self) -> pd.DataFrame:
        """Every site's own estimates, (sites, coefficients); nan where a site does not determine one."""
        return self.combined.estimates

    @property
    def std_errors(self) -> pd.DataFrame:
        """Their standard errors, (sites, coefficients)."""
        return self.combined.std_errors

    @property
    def alpha(self) -> float:
        """One minus the level of intervals."""
        return self.combined.alpha

    @property
    def table(self) -> pd.DataFrame:
        """One row per coefficient, as :meth:`Heterogeneity.to_frame` returns."""
        return self.combined.table

    @property
    def flagged(self) -> tuple[str, ...]:
        """Coefficients with I2 above one half and a p-value of Q, adjusted after Holm, below `alpha`."""
        return self.combined.flagged

    @property
    def left_out(self) -> pd.DataFrame:
        """Estimate without each site, (sites, coefficients); nan if the others do not determine one.

        Raises
        ------
        NotAvailableError
            Sums were masked, or the model has none by site.
        """
        return self._without_each[0]

    @property
    def change(self) -> pd.DataFrame:
        """Its distance from the estimate of all, in standard errors of the common model; as `left_out`."""
        return self._without_each[1]

    @property
    def _without_each(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        if self.without_each is not None:
            return self.without_each
        if not self.by_parts:
            raise NotAvailableError(OWN_FITS_ONLY)
        raise NotAvailableError(NO_PARTS, remedy=UNMASKED)


# ----------------------------------------------------------------------------------------------------
# The printed comparison of sites.

FEW_SITES = 5
"""Fewest sites for which the variance between them is reliable."""
HEADER_WIDTHS = (30, 16, 26, 20)
COEFFICIENT_WIDTHS = (23, 10, 10, 8, 9, 4, 6, 6, 7, 6)
SITE_WIDTHS = (24, 10, 30, 28)
MASKED_WIDTHS = (24, 10, 60)


def _header_sheet(result: SiteComparison) -> Sheet:
    joint, sites = result.joint, result.sites
    own = int(result.estimates.notna().any(axis=1).sum())
    distribution = "P > F (own dispersions):" if joint.own_dispersions else "P > chi2 (score test):"
    rows = (
        ("Sites:", str(len(sites)), "Equal coefficients:", str(joint)),
        ("With own estimates:", str(own), distribution, _probability(joint.pvalue)),
        (
            "No. Observations:",
            f"{sites['nobs'].sum():,}",
            "Coefficients that differ:",
            str(len(result.flagged)),
        ),
    )
    return Sheet(("",) * 4, rows, "lrlr", HEADER_WIDTHS, "Heterogeneity between sites", gap=2)


def _coefficient_sheet(result: SiteComparison) -> Sheet:
    headers = ("", "common", "rand. eff.", "tau", "Q", "df", "P>Q", "I2(Q)", "from", "to")
    rows = tuple(
        _coefficient_row(name, dict(zip(_names(result.table.columns), values, strict=True)))
        for name, values in zip(
            short_names(_names(result.table.index)), result.table.to_numpy().tolist(), strict=True
        )
    )
    return Sheet(headers, rows, "l" + "r" * 9, COEFFICIENT_WIDTHS)


def _coefficient_row(name: str, row: dict[str, float]) -> tuple[str, ...]:
    common = number(row["estimate"], error=row["std_error"])
    if not row["df"]:
        return (name, common, *["-"] * 3, "0", *["-"] * 4)
    return (
        name,
        common,
        number(row["re_estimate"], error=row["re_std_error"]),
        number(row["tau2"] ** 0.5),
        f"{row['Q']:.2f}",
        f"{row['df']:.0f}",
        _probability(row["p_value"]),
        *(_percent(row[share]) for share in ("I2", "I2_low", "I2_high")),
    )


def _site_sheet(result: SiteComparison) -> Sheet:
    headers = ("site", "rows", "own estimates")
    rows: tuple[tuple[str, ...], ...] = tuple(
        (
            site,
            f"{result.sites['nobs'].iloc[k]:,}",
            _coverage(result.estimates.iloc[k], result.sites["problem"].iloc[k]),
        )
        for k, site in enumerate(_names(result.sites.index))
    )
    if result.without_each is None:
        return Sheet(headers, rows, "lrl", MASKED_WIDTHS, gap=2, wrap=True)
    changes = [_largest_change(result.change.iloc[k].dropna()) for k in range(len(rows))]
    rows = tuple((*row, change) for row, change in zip(rows, changes, strict=True))
    return Sheet((*headers, "largest change without it"), rows, "lrll", SITE_WIDTHS, gap=2, wrap=True)


def _coverage(estimates: pd.Series, problem: str) -> str:
    known = int(estimates.notna().sum())
    if not known:
        return f"none: {problem}" if problem else "none"
    return "all" if known == len(estimates) else f"{known} of {len(estimates)}"


def _largest_change(change: pd.Series) -> str:
    if change.empty:
        return "not determined"
    largest = int(np.argmax(change.abs().to_numpy()))
    return f"{change.iloc[largest]:+.2f} s.e. of {change.index[largest]}"


def comparison_notes(result: SiteComparison) -> Iterator[Note]:
    """State what differs between sites, and the limits of the comparison."""
    none = result.estimates.isna().all(axis=1)
    yield NOTES.note("verdict", verdict=_verdict(result))
    if none.any():
        yield NOTES.note(
            "no_own_estimates",
            sites=", ".join(_names(none.index[none])),
            changes=" and the changes" if result.without_each is not None else "",
            others=int((~none).sum()),
            total=len(none),
        )
    yield from _partial_notes(result, result.estimates[~none])
    most = int(result.table["sites"].max())
    if 1 < most < FEW_SITES:
        yield NOTES.note("few_sites", sites=most, df=most - 1, plural="s" * (most > 2))
    if result.one_dispersion:
        yield NOTES.note("one_dispersion")
    values: dict[str, Any] = {"level": 100 * (1 - result.alpha), "source": _joint_source(result)}
    if not result.by_parts:
        yield NOTES.note("methods/own", **values)
    elif result.without_each is None:
        yield NOTES.note("methods/masked", sites=len(result.sites), **values)
    else:
        yield NOTES.note("methods", **values)
    yield from _two_estimators(result)


def _two_estimators(result: SiteComparison) -> Iterator[Note]:
    """State for which coefficients one estimator finds a variance between sites and the other does not."""
    apart = []
    for name, tau2, i2 in result.table[["tau2", "I2"]].itertuples():
        if np.isfinite(i2) and (tau2 > 0.0) != (i2 > 0.0):
            b, se = (of[name].to_numpy(dtype=float) for of in (result.estimates, result.std_errors))
            known = np.isfinite(b) & np.isfinite(se)
            moments = dersimonian_laird(b[known], se[known] ** 2) ** 0.5
            apart.append(
                f"{name} (tau {number(tau2**0.5)}, I2 {_percent(i2)}; by moments tau {number(moments)})"
            )
    if apart:
        yield NOTES.note("two_estimators", terms=apart)


def _joint_source(result: SiteComparison) -> str:
    if result.joint.own_dispersions:
        return "The joint test compares them too, each site with its own dispersion"
    masked = "a masked sum over sites, " if result.without_each is None else ""
    return f"The score test is {masked}computed from the sites' scores at the common estimate"


def _verdict(result: SiteComparison) -> str:
    tests = (result.table["df"] > 0).sum()
    if result.flagged:
        rows = result.table.loc[list(result.flagged), ["I2", "p_holm"]].to_numpy().tolist()
        found = zip(result.flagged, rows, strict=True)
        listed = ", ".join(f"{name} (I2 {_percent(i2)}, P {_probability(p)})" for name, (i2, p) in found)
        return (
            f"The sites differ in: {listed}; P adjusted for {tests} tests (Holm). {_disagreement(result)}"
            "The common coefficient is then an average that may not describe any site: give the term an "
            "interaction with the site (for the intercept: site effects), or report the random effects."
        )
    if result.joint.pvalue < result.alpha:
        also = ", and what changes without each of them" if result.without_each is not None else ""
        test = "in all coefficients together" if result.joint.own_dispersions else "score test"
        if not tests:
            return f"The sites differ ({test}); single coefficients were not tested: report the joint test."
        return (
            f"The sites differ ({test}), but not clearly in any single coefficient: report the joint "
            f"test of all coefficients, because single ones are corrected for their number ({tests}, Holm); "
            f"compare the sites' own estimates{also}."
        )
    return (
        "There is no evidence that sites differ. This does not show that they agree: see the intervals of I2."
    )


def _disagreement(result: SiteComparison) -> str:
    """State which test to report if single coefficients differ but all of them together do not."""
    if not result.joint.pvalue >= result.alpha:
        return ""
    return (
        f"The joint test of all coefficients does not show it (P {_probability(result.joint.pvalue)}): "
        "report the joint test if the question was whether sites differ at all, and the corrected single "
        "ones if it was in which coefficients, but do not choose the smaller one. "
    )


def _partial_notes(result: SiteComparison, estimates: pd.DataFrame) -> Iterator[Note]:
    """State which coefficients are compared over a part of the sites that have estimates, or over none."""
    absent, table = estimates.isna(), result.table
    partial = [
        f"{name} (not at {', '.join(_names(absent.index[absent[name]]))})"
        for name in _names(table.index[table["df"] > 0])
        if absent[name].any()
    ]
    alone = _names(table.index[table["df"] == 0]) if len(estimates) > 1 else []
    if partial:
        yield NOTES.note("partial", terms="; ".join(partial))
    if alone:
        yield NOTES.note("one_site", terms=alone)


def _names(index: pd.Index) -> Sequence[str]:
    return [str(name) for name in index]


def _probability(p: float) -> str:
    if np.isnan(p):
        return "-"
    return "<0.001" if p < 0.0005 else f"{p:.3f}"


def _percent(share: float) -> str:
    return "-" if np.isnan(share) else f"{100 * share:.0f} %"


# ----------------------------------------------------------------------------------------------------
# Comparison of sites that fit one set of coefficients: Cochran's Q, random effects, a score test,
# influence.
#
# There are two sources, and every statement names its own: the sites' own fits (a meta-analysis of each
# coefficient), and the sites' parts of the score and information at the common estimate. Any fit by sums has
# the latter, also for a site without a fit of its own. The score test needs only a sum over sites, whose
# parts masks may hide; the fit without each site needs the parts.

LARGE_I2 = 0.5
IN_UNITS = ["estimate", "std_error", "re_estimate", "re_low", "re_high", "pred_low", "pred_high"]
"""Columns of the table that are multiples of the unit of the column."""
PARTS = ("score", "information")


@dataclass(frozen=True, slots=True, eq=False)
class SiteFit:
    """One site's own fit in the units of the data, and its part of the sums at the estimate of ALL sites.

    `beta` and `cov`, with the site's own dispersion, are None if it has none, and `problem` states why. They
    are nan if its rows do not determine a coefficient of the common model: for a column that is constant
    there, and for the intercept if that constant is not zero, because the site's own intercept then contains
    the effect of the column. `score` and `information` are for dispersion ONE, None if sums are masked. `own`
    is the result of its own fit with its own dispersion, None if that is not estimated.
    """

    site: str
    n: int
    beta: Annotated[Floats, "q"] | None
    cov: Annotated[Floats, "q q"] | None
    problem: str
    score: Annotated[Floats, "q"] | None
    information: Annotated[Floats, "q q"] | None
    own: SiteWelchTerms | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MaskedSiteSums:
    """Sums over sites instead of each site's part: score (p,), information (p, p), for dispersion one.

    `form` (2,) are sums of :func:`fedstat.inference.homogeneity_tests.quadratic_form`.
    """

    score: Floats
    information: Floats
    form: Floats


@dataclass(frozen=True, eq=False, kw_only=True)
class Heterogeneity(SiteComparison, DerivedReport):
    """Agreement of the sites on each coefficient; made by `heterogeneity`.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> sites = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit(masked=False).heterogeneity
    >>> sites.to_frame().columns[:6].tolist()
    ['estimate', 'std_error', 'sites', 'Q', 'df', 'p_value']
    >>> sites.random_effects("DL").index.tolist(), sites.influence().shape[0]
    (['Intercept', 'age', 'sex'], 12)
    >>> sites.estimates.shape, sites.std_errors.shape, sites.table.equals(sites.to_frame())
    ((4, 3), (4, 3), True)
    >>> sites.flagged, sites.alpha
    ((), 0.05)
    >>> sites.left_out.shape, sites.change.shape
    ((4, 3), (4, 3))
    >>> bool(sites.plot_forest("age").has_data()), "I2" in sites.summary().as_text()
    (True, True)
    """

    sources: InitVar[Iterable[object]]

    def __post_init__(self, sources: Iterable[object]) -> None:
        DerivedReport.__init__(self, sources)

    def to_frame(self) -> pd.DataFrame:
        """One row per coefficient.

        Returns
        -------
        DataFrame
            ``estimate``, ``std_error`` of the common model; then the fields of
            `fedstat.inference.meta_analysis.RandomEffectsFit`, and ``p_holm``, the p-value of Q
            adjusted after Holm for the number of coefficients tested.
        """
        return self.table.copy()

    def random_effects(
        self,
        method: Literal["REML", "DL", "PM"] = "REML",
        test: Literal["adhoc", "knha", "z"] = "adhoc",
        prediction: Literal["confidence", "t"] = "confidence",
    ) -> pd.DataFrame:
        """Mean of each coefficient over sites, its interval, and that of a further site.

        Parameters
        ----------
        method : {"REML", "DL", "PM"}
            Variance between sites by restricted maximum likelihood, or after DerSimonian and Laird, or Paule
            and Mandel.
        test : {"adhoc", "knha", "z"}
            As in metafor: Hartung's and Knapp's standard error with t quantiles, by default never below that
            of known variances; "z" is the normal interval, which is too short for few sites.
        prediction : {"confidence", "t"}
            Interval of a further site: over all variances between sites, weighted by their confidence
            (Nagashima, Noma and Furukawa 2019), or as metafor's ``predict``, which treats the estimated
            variance as known. If the variance is small, the latter's 95 % interval contains the effect of 87
            to 90 % of further sites.

        Returns
        -------
        DataFrame
            Index coefficient; ``estimate``, ``std_error``, ``conf_low``, ``conf_high``, ``pred_low``,
            ``pred_high``, ``tau2``, ``sites``. nan if fewer than two sites (for the interval of a further
            site: fewer than three) determine the coefficient.

        Raises
        ------
        ModelError
            An argument is none of these.
        """
        how = RandomEffectsOptions(method, test, prediction)
        table = self.table if how == USUAL else _combined(self.estimates, self.std_errors, self.alpha, how)
        words = {"estimate": "estimate", "std_error": "std_error", "low": "conf_low", "high": "conf_high"}
        names = {f"re_{ours}": theirs for ours, theirs in words.items()}
        return table[[*names, "pred_low", "pred_high", "tau2", "sites"]].rename(columns=names)

    def random_effects_of(
        self, term: str | Sequence[str], test: Literal["adhoc", "knha", "z"] = "adhoc"
    ) -> FactorCombination:
        """Mean of all coefficients of a factor over sites together, by multivariate random effects.

        Single coefficients of a factor depend on its reference level, and each has its own test. Together
        they have one test of no effect, and one test of equal effects at all sites.

        Parameters
        ----------
        term : str or sequence of str
            A term of the formula, such as ``"C(stage)"``, or names of coefficients.
        test : {"adhoc", "knha", "z"}
            As of :meth:`random_effects`, extended by Jackson and Riley (2014) to several coefficients.

        Returns
        -------
        FactorCombination
            ``to_frame()``, ``summary()``; ``pvalue`` of no effect of the factor, ``Q_pvalue`` of equal
            effects at all sites, ``I2``, ``tau`` and ``correlation`` of the effects between sites.

        Raises
        ------
        ModelError
            No such term or coefficient, or an argument that is none of these.
        EstimationError
            Fewer than two sites determine one of the coefficients.

        References
        ----------
        Jackson, D., Riley, R. and White, I. R. (2011). Multivariate meta-analysis: potential and promise.
        Statistics in Medicine 30, 2481-2498.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> sites = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit().heterogeneity
        >>> together = sites.random_effects_of(["age", "sex"])
        >>> together.df, together.Q_df, bool(together.pvalue < 0.05)
        (2, 6, True)
        """
        names = [str(name) for name in self.estimates.columns]
        form = canonical_name(term) if isinstance(term, str) else ""
        of_term = [name for name, one in zip(names, self.terms, strict=False) if canonical_name(one) == form]
        wanted = of_term or [find_name(name, names) for name in ([term] if isinstance(term, str) else term)]
        unknown = [name for name in wanted if name not in names]
        if unknown or not wanted:
            known = dict.fromkeys([*self.terms, *names])
            raise ModelError(
                f"random_effects_of: {', '.join(map(repr, unknown)) or 'nothing'} is no term and no "
                f"coefficient; there are: {', '.join(known)}"
            )
        assert self.covariances is not None
        at = [names.index(name) for name in wanted]
        own = self.covariances[:, at][:, :, at]
        estimates = self.estimates.to_numpy()[:, at]
        return combine_factor(tuple(wanted), estimates, own, test=test, alpha=self.alpha, sources=(self,))

    def influence(self) -> pd.DataFrame:
        """Each coefficient without each of the sites.

        Returns
        -------
        DataFrame
            Index (``left out``, ``coefficient``); ``estimate`` by one Newton step, which is exact for the
            linear model, and ``change`` in standard errors of the common model.

        Raises
        ------
        NotAvailableError
            Sums were masked: the parts of single sites are not available.
        """
        index = pd.MultiIndex.from_product(
            [self.left_out.index, self.left_out.columns], names=["left out", "coefficient"]
        )
        parts = {"estimate": self.left_out, "change": self.change}
        return pd.DataFrame({what: part.to_numpy().ravel() for what, part in parts.items()}, index=index)

    def tidy(self) -> pd.DataFrame:
        """One row per coefficient: ``term``, and the columns of :meth:`to_frame`."""
        return self.to_frame().rename_axis("term").reset_index()

    def _glance(self) -> dict[str, float]:
        """Joint test of equal coefficients."""
        joint = self.joint
        return {
            "nobs": self.sites["nobs"].sum(),
            "n_sites": len(self.sites),
            "statistic": joint.statistic,
            "df": joint.df,
            "p_value": joint.pvalue,
        }

    def _sheets(self) -> tuple[Sheet, ...]:
        """Joint test, coefficients and sites."""
        return (_header_sheet(self), _coefficient_sheet(self), _site_sheet(self))

    def _summary_notes(self) -> Iterator[Note]:
        return comparison_notes(self)

    def plot_forest(
        self,
        coefficient: str,
        ax: Axes | None = None,
        *,
        exponentiate: bool = False,
        effect: str = "",
        unit: float = 1.0,
    ) -> Axes:
        """Forest plot of one coefficient: sites' own estimates, the common one, the mean of random effects.

        Parameters
        ----------
        coefficient : str
        ax : matplotlib Axes, optional
            A new figure by default.
        exponentiate : bool
            Draw exponentials, such as odds ratios, on a logarithmic scale.
        effect : str
            Name of the axis.
        unit : float
            Change of the column whose effect is drawn: ``unit=10`` draws that of ten years of age.

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        ModelError
            There is no such coefficient, or `unit` is not a positive number.
        """
        if not 0.0 < unit < np.inf:
            raise ModelError(f"plot_forest: expected unit to be a positive number, received {unit!r}")
        names = [str(name) for name in self.table.index]
        printed = short_names(names)
        coefficient = find_name(coefficient, [*names, *printed])
        if coefficient not in names and coefficient in printed:
            coefficient = names[printed.index(coefficient)]
        if coefficient not in names:
            close = close_names(coefficient, printed)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(printed)}"
            raise ModelError(f"plot_forest: {coefficient!r} is not a coefficient; {hint}")
        own = {"estimate": self.estimates[coefficient], "std_error": self.std_errors[coefficient]}
        rows = pd.DataFrame({name: unit * column for name, column in own.items()})
        rows["problem"] = self.sites["problem"]
        combined = self.table.iloc[names.index(coefficient)].copy()
        combined[IN_UNITS] *= unit
        effect = effect or ("exponential of the coefficient" if exponentiate else "coefficient")
        effect += "" if unit == 1.0 else f" per {unit:g} units"
        return plot_forest(rows, combined, ax=ax, alpha=self.alpha, exponentiate=exponentiate, effect=effect)

    def __repr__(self) -> str:
        flagged = ", ".join(self.flagged) or "none"
        return (
            f"<Heterogeneity: {len(self.sites)} sites; coefficients that differ: {flagged}; see .summary()>"
        )


def heterogeneity(
    names: Sequence[str],
    beta: Floats,
    scale: float,
    fits: Sequence[SiteFit],
    *,
    sources: Iterable[object],
    masked: MaskedSiteSums | None = None,
    estimated: bool = False,
    alpha: float = 0.05,
    terms: Sequence[str] = (),
) -> Heterogeneity:
    """Compare the sites of one fit with coefficients beta (p,) and dispersion `scale`.

    The scores and informations of `fits` are for dispersion ONE, and are divided by `scale` HERE. At the
    maximum the scores sum to zero; the remainder of a fit that stopped before is allowed for. `masked`
    replaces scores and informations that are hidden. If the dispersion was `estimated`, the joint test gives
    each site its own, provided that all have a fit of their own, and is `welch_test`. `alpha` is one minus
    the level of intervals, and the level of `Heterogeneity.flagged`; `terms` (p,) are those of the
    coefficients. `sources` are the results that are compared. The statistics are those of
    `random_effects.combine` and `influence.SiteScores`. Raises EstimationError if a shape does not match or
    the information of all sites is not positive definite.
    """
    if not 0.0 < alpha < 1.0 or not fits:
        raise ModelError(
            f"heterogeneity: expected alpha between 0 and 1 and one site or more, received {alpha} and "
            f"{len(fits)} sites"
        )
    for fit in fits:
        _check_shapes(fit, len(names), () if masked is not None else PARTS)
    own = np.array([_own(fit, len(names)) for fit in fits])
    without = None
    if masked is not None:
        # Masked sums contain everything that the common model needs; only the parts of single sites are lost.
        flat = [name for name, size in zip(names, np.diag(masked.information), strict=True) if not size > 0.0]
        if flat:
            listed = ", ".join(map(repr, flat))
            raise EstimationError(f"{listed}: constant at every site, so there is nothing to compare")
        errors = np.sqrt(scale * np.diag(invert_information(masked.information, names)))
        joint = joint_test(masked.form, masked.score, masked.information, scale)
    else:
        scores, informations = (np.array([getattr(fit, what) for fit in fits]) for what in PARTS)
        parts = SiteScores.of(scores, informations, scale, names)
        errors, joint, without = parts.std_errors, parts.joint_test(), parts.without_each(beta)
    index = pd.Index([fit.site for fit in fits], name="site")

    def grid(values: Floats) -> pd.DataFrame:
        return pd.DataFrame(values, index=index, columns=pd.Index(names))

    estimates, std_errors = grid(own[:, 0]), grid(np.sqrt(own[:, 1]))
    own_parts = [fit.own for fit in fits if fit.own is not None]
    if estimated and len(own_parts) == len(fits):
        joint = welch_test(own_parts)
    return Heterogeneity(
        sources=sources,
        sites=pd.DataFrame({"nobs": [f.n for f in fits], "problem": [f.problem for f in fits]}, index=index),
        combined=CombinedCoefficients(estimates, std_errors, beta, errors, alpha),
        joint=joint,
        one_dispersion=estimated and not joint.own_dispersions,
        without_each=None if without is None else (grid(without[0]), grid(without[1])),
        covariances=np.array([_own_covariance(fit, len(names)) for fit in fits]),
        terms=tuple(terms),
    )


def _own_covariance(fit: SiteFit, p: int) -> Floats:
    """Covariance of one site's estimates, (p, p); nan where it has none."""
    return np.full((p, p), np.nan) if fit.cov is None else np.asarray(fit.cov)


def _check_shapes(fit: SiteFit, p: int, parts: Sequence[str]) -> None:
    received = {part: np.shape(getattr(fit, part)) for part in parts}
    expected: dict[str, tuple[int, ...]] = {"score": (p,), "information": (p, p)}
    if fit.beta is not None and fit.cov is not None:
        received |= {"beta": fit.beta.shape, "cov": fit.cov.shape}
        expected |= {"beta": (p,), "cov": (p, p)}
    wrong = [f"{what} of shape {shape}" for what, shape in received.items() if shape != expected[what]]
    if wrong:
        raise EstimationError(
            f"heterogeneity: expected arrays for {p} coefficients of site {fit.site!r}, received "
            f"{', '.join(wrong)}"
        )


def _own(fit: SiteFit, p: int) -> Floats:
    """Estimates and variances of one site, shape (2, p); nan where it has none."""
    own = np.full((2, p), np.nan)
    if fit.beta is None or fit.cov is None:
        return own
    variance = np.diag(fit.cov)
    # A site may determine some coefficients and not others: each is handled alone.
    known = np.isfinite(fit.beta) & np.isfinite(variance) & (variance > 0.0)
    own[:, known] = fit.beta[known], variance[known]
    return own


def _combined(
    estimates: pd.DataFrame, std_errors: pd.DataFrame, alpha: float, how: RandomEffectsOptions = USUAL
) -> pd.DataFrame:
    """Random effects of each coefficient from sites' own estimates (sites, coefficients)."""
    own = zip(estimates.to_numpy().T, std_errors.to_numpy().T, strict=True)
    names = [part.name for part in fields(RandomEffectsFit)]
    values = attrgetter(*names)
    rows = [values(combine_sites(b, se**2, alpha, how)) for b, se in own]
    return pd.DataFrame(rows, columns=names, index=pd.Index(estimates.columns, name="coefficient"))
