"""Results with the sites' own fits: their comparison, and what a summary says of the sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import EstimationError, NotAvailableError
from fedstat.inference.estimate import Estimate
from fedstat.inference.heterogeneity import (
    NOT_REQUESTED,
    Heterogeneity,
    MaskedSiteSums,
    SiteFit,
    heterogeneity,
)
from fedstat.inference.homogeneity_tests import welch_test
from fedstat.inference.notes import Note
from fedstat.inference.summary import WIDTH, Report
from fedstat.inference.tables import Sheet, number, show_probability
from fedstat.models.horizontal.clusters import describe_tests
from fedstat.models.horizontal.notes import NOTES
from fedstat.models.horizontal.results import DesignResults
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DIFFER = 0.05
"""Level of a test below which a summary speaks of differences."""
LARGEST_LOG = 700.0
"""Logarithm of a ratio near the largest number."""
PROBLEMS = {"separated": "outcomes separated", "information is singular": "columns collinear"}


def clusters_line(result: DesignResults) -> str:
    """Return the type of the covariance, and its clusters."""
    clustering = (getattr(result._fit, "common", None) or result._fit).clustering
    return result.cov_type if clustering is None else f"{result.cov_type} {clustering}"


def tests_line(result: DesignResults) -> str:
    """State the distribution of tests and intervals."""
    return describe_tests(result.df_inference, result.estimate.df)


class SiteFitsResults(DesignResults):
    """Results of a fit for which the sites can also fit their own rows.

    Attributes
    ----------
    model : HorizontalModel
        For results that were read from a file, the names of response and coefficients only.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
    >>> fit.site_estimates.shape, fit.heterogeneity.to_frame().index.tolist()
    ((4, 3), ['Intercept', 'age', 'sex'])
    """

    _exponentiates: ClassVar[bool] = False
    """Whether forest plots are of exponentials by default."""
    _joint_name: ClassVar[str] = "score test of equal coefficients"

    def _own_fits(self) -> Sequence[SiteFit]:
        """Return the sites' own fits, for the parameters that are shown."""
        found: Sequence[SiteFit] = self._fit.local
        return found

    @property
    def _own_requested(self) -> bool:
        return any(own.problem != NOT_REQUESTED for own in self._fit.local)

    @property
    def site_estimates(self) -> pd.DataFrame:
        """Every site's own fit, (sites, coefficients); NaN where a site does not determine one."""
        rows = {
            own.site: np.full(len(self.params), np.nan) if own.beta is None else own.beta
            for own in self._own_fits()
        }
        return pd.DataFrame.from_dict(rows, orient="index", columns=list(self.estimate.names))

    @property
    def heterogeneity(self) -> Heterogeneity:
        """Agreement of the sites: Cochran's Q, I2, random effects, the fit without each site.

        It needs no message: sites sent their own fits at the start, and their parts of the score test with
        the final sums. Without own fits (``local=False``) there is no Q, and the joint test assumes that an
        estimated dispersion is equal at all sites. With masked sums there is no fit without each site.

        Raises
        ------
        NotAvailableError
            There is one site, or what the sites sent does not allow a comparison.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> fit.heterogeneity.to_frame().index.tolist()
        ['Intercept', 'age', 'sex']
        """
        if len(self._fit.local) == 1:
            raise NotAvailableError("no heterogeneity: it compares sites, and this fit has one")
        if self.basis.agreement.question.propensities:
            raise NotAvailableError(
                "no heterogeneity: own fits would take the weights of all sites as known. A TreatmentEffect "
                "compares the effects of the sites"
            )
        try:
            # The cached one has no source: a result that keeps what refers to it is freed by the collector
            # of cycles only.
            return replace(self._comparison, sources=(self,))
        except EstimationError as error:
            raise NotAvailableError(f"no heterogeneity: {error}") from error

    @cached_property
    def _comparison(self) -> Heterogeneity:
        return self._compare_sites()

    def _compare_sites(self) -> Heterogeneity:
        est = self.estimate
        return heterogeneity(
            est.names,
            est.params,
            1.0,
            self._own_fits(),
            sources=(),
            masked=self._masked_parts(),
            terms=est.terms,
        )

    def _masked_parts(self) -> MaskedSiteSums | None:
        """Return score and information in the units of the data if sums are masked."""
        found: MaskedSiteSums | None = self._fit.masked_parts
        return found

    def plot_forest(
        self, coefficient: str, ax: Axes | None = None, *, exponentiate: bool | None = None, unit: float = 1.0
    ) -> Axes:
        """Draw a forest plot of a coefficient over the sites.

        Parameters
        ----------
        coefficient : str
        ax : matplotlib Axes, optional
        exponentiate : bool, optional
            Draw exponentials, such as odds ratios, on a logarithmic scale; by default for Cox models and
            regressions of categories, unless one is beyond the range of numbers.
        unit : float
            ``unit=10`` draws the effect of ten units of the column.

        Returns
        -------
        matplotlib Axes

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition).fit()
        >>> fit.plot_forest("age", unit=10).get_xlabel()
        'hazard ratio per 10 units, with 95 % interval'
        """
        ratios = self._exponentiates if exponentiate is None else exponentiate
        if exponentiate is None and coefficient in self.params.index:
            # Ratios beyond the range of numbers have no place on an axis.
            own = self.site_estimates[coefficient].abs().max()
            reach = max(own, abs(self.params[coefficient])) + 10.0 * self.bse[coefficient]
            ratios = ratios and not abs(unit) * reach > LARGEST_LOG
        effect, ratio, _ = self._effect_words()
        return self.heterogeneity.plot_forest(
            coefficient, ax, exponentiate=ratios, effect=ratio if ratios else effect, unit=unit
        )

    # -- summary ---------------------------------------------------------------------------------

    def _summary_right(self) -> list[tuple[str, str]]:
        K = len(self._fit.local)
        own = sum(one.beta is not None for one in self._fit.local)
        count = f"{own} of {K} site{'' if K == 1 else 's'}"
        lines = [
            ("Own fits", count if self._own_requested else "not requested (local=False)"),
            ("Heterogeneity", self._joint()),
        ]
        sites, rows, *rest = super()._summary_right()
        return [sites, rows, *lines, *self._sums_line(), *rest]

    def _joint(self) -> str:
        if len(self._fit.local) == 1:
            return "not defined (one site)"
        try:
            joint = self.heterogeneity.joint
        except NotAvailableError:
            return "not defined"
        return f"{joint}, p {show_probability(joint.pvalue)}" if joint.df else "not defined"

    def _site_sheet(self) -> Sheet:
        """Add whether each site has a fit of its own."""
        p, estimates = len(self.estimate.names), self.site_estimates.notna().sum(axis=1).tolist()
        return self._rows_by_site(
            ["none" if not known else "yes" if known == p else f"{known} of {p}" for known in estimates]
        )

    def _site_by_site(self) -> list[str]:
        return [*(["the own fits"] if self._own_requested else []), *super()._site_by_site()]

    def _own_fits_note(self, but: str = "") -> Iterator[Note]:
        lacking: dict[str, list[str]] = {}
        for own in self._fit.local:
            if own.problem and own.problem != NOT_REQUESTED:
                lacking.setdefault(PROBLEMS.get(own.problem, own.problem), []).append(own.site)
        if lacking:
            listed = "; ".join(f"{', '.join(names)} ({problem})" for problem, names in lacking.items())
            yield NOTES.note("own_fits", sites=listed, but=but)

    def _difference_note(self) -> Iterator[Note]:
        """Say whether the sites differ by the joint test."""
        if len(self._fit.local) == 1:
            return
        try:
            joint = self.heterogeneity.joint
        except NotAvailableError as error:
            if self._own_requested:
                yield NOTES.note("heterogeneity/not_compared", reason=str(error))
            return
        if joint.df and joint.pvalue < DIFFER:
            p = show_probability(joint.pvalue)
            yield NOTES.note("heterogeneity", test=self._joint_name, joint=str(joint), p=p)


def compare_own_fits(estimate: Estimate, cov: Floats, fits: Sequence[SiteFit]) -> Heterogeneity:
    """Compare the sites' own estimates of the first coefficients, where no likelihood has a score.

    `cov` (q, q) is that of all coefficients; `own` of the fits are the sites' parts of the joint test.
    """
    known = [len(one.beta) for one in fits if one.beta is not None]
    if len(known) < 2:
        raise EstimationError("it compares own fits, and fewer than two sites have one")
    K = known[0]
    common = MaskedSiteSums(np.zeros(K), np.asarray(np.linalg.inv(cov[:K, :K])), np.zeros(2))
    names, terms = estimate.names[:K], estimate.terms[:K]
    found = heterogeneity(names, estimate.params[:K], 1.0, fits, sources=(), masked=common, terms=terms)
    joint = welch_test([one.own for one in fits if one.own is not None])
    return replace(found, joint=joint, sources=(), by_parts=False)


# ----------------------------------------------------------------------------------------------------
# Score tests of one assumption, for each term of the formula and for all.


def score_tests(terms: Sequence[str], statistic: Callable[[list[int]], tuple[float, int]]) -> pd.DataFrame:
    """Test every term, and all: ``term``, ``statistic``, ``df``, ``p_value``.

    `terms` (p,) are those of the columns; `statistic` takes places of columns to a statistic and its degrees
    of freedom.
    """
    rows = []
    for term in [*dict.fromkeys(terms), "GLOBAL"]:
        found, df = statistic([k for k, one in enumerate(terms) if term in (one, "GLOBAL")])
        rows.append((term, found, df, float(stats.chi2.sf(found, df))))
    return pd.DataFrame(rows, columns=["term", "statistic", "df", "p_value"])


def quadratic(score: Floats, information: Floats) -> float:
    """Return the statistic of a score test, U' V^-1 U."""
    return float(score @ np.linalg.solve(information, score))


class AssumptionTest(Report):
    """Score tests of an assumption of a model, one for each term and one for all."""

    _assumption: ClassVar[str]
    _remedy: ClassVar[str]

    def __init__(self, table: pd.DataFrame) -> None:
        self._table = table

    def tidy(self) -> pd.DataFrame:
        """One row per term, and one for all: ``term``, ``statistic``, ``df``, ``p_value``."""
        return self._table.copy()

    def _glance(self) -> dict[str, float]:
        return {str(name): value for name, value in self._table.iloc[-1].drop("term").items()}

    def _title(self) -> str:
        raise NotImplementedError

    def _sheets(self) -> tuple[Sheet, ...]:
        rows = tuple(
            (str(term), number(statistic), str(df), number(p, 3) if p >= 0.001 else "< 0.001")
            for term, statistic, df, p in self._table.itertuples(index=False)
        )
        title = f"{self._assumption}: {self._title()}"
        return (Sheet(("", "chi2", "df", "P>chi2"), rows, "lrrr", (WIDTH - 39, 12, 12, 12), title),)

    def _summary_notes(self) -> Iterator[Note]:
        if float(self._table["p_value"].iloc[-1]) < DIFFER:
            yield NOTES.note("not_proportional", meaning=self._remedy)

    def __repr__(self) -> str:
        return f"<{self._assumption}: {chi_squared(**self._glance())}; see .summary()>"


def chi_squared(statistic: float, df: float, p_value: float) -> str:
    """Write a test."""
    return f"{statistic:.2f} on {df:.0f} df, p {show_probability(p_value)}"
