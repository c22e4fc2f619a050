"""Results of a Cox regression: hazard ratios, tests, concordance, and the comparison of sites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.genmod import families

from fedstat.errors import ModelError, NotAvailableError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.derivatives import code_frame
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.assumptions import Assumption
from fedstat.inference.covariance import gvif
from fedstat.inference.estimate import Estimate, takes_alpha
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.predicted_survival import PredictedSurvival
from fedstat.inference.summary import WIDTH, CoefficientBlock
from fedstat.inference.survival_evaluation import SurvivalEvaluation, concordance_index
from fedstat.inference.tables import Sheet, exponentials, number, two_digits, yes_or_no
from fedstat.models.checks import HeldRows, check_choice
from fedstat.models.cox.baseline import BaselineHazard, known_hazard
from fedstat.models.cox.common_baseline import CommonFit
from fedstat.models.cox.protocol import (
    ONE_BASELINE,
    PROPORTIONAL,
    CoxFit,
    Outcomes,
    average_hazard,
    common_hazard,
    common_time_scores,
    time_information,
    time_scores,
)
from fedstat.models.cox.response import NO_AVERAGE, SurvivalResponse, hazard_at, joint_covariance
from fedstat.models.cox.steps import FAMILY, NO_EVENTS
from fedstat.models.horizontal.blocks import grid_points, listed_times
from fedstat.models.horizontal.clusters import corrected_fit
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.notes import NOTES as OF_ROWS
from fedstat.models.horizontal.notes import TWICE_TOO_SMALL, few_events
from fedstat.models.horizontal.prediction import GLMPrediction, held_rows
from fedstat.models.horizontal.results import PROPENSITIES, RowsBasis, weight_line
from fedstat.models.horizontal.site_results import (
    AssumptionTest,
    SiteFitsResults,
    chi_squared,
    clusters_line,
    quadratic,
    score_tests,
    tests_line,
)
from fedstat.models.horizontal.time_evaluation import evaluate_survival
from fedstat.models.results import EstimateRecord
from fedstat.spline_names import short_names
from fedstat.typing import Floats

FORMAT = "fedstat cox results 4"
ASSUMPTIONS = {
    PROPORTIONAL: Assumption(
        PROPORTIONAL,
        "score test of x log(t)",
        "NON-PROPORTIONAL HAZARDS",
        "Hazard ratios are assumed to be the same at all times",
        "A hazard ratio is then an average over the times of the events.",
        Remedy(
            "test_proportional_hazards()",
            "Let the column define strata, as in strata(x), or see {call}.",
        ),
    ),
    ONE_BASELINE: Assumption(
        ONE_BASELINE,
        "log-rank test of the sites, given the columns,",
        "THE SITES DIFFER IN THEIR BASELINE HAZARDS",
        "All sites are assumed to have the same baseline hazard",
        "Effects of columns that differ between sites are then biased.",
        Remedy("fit(baseline='site')", "Fit with {arguments}."),
    ),
}
"""Assumptions that are tested with the fit, by the kind of their notes."""
NO_LIKELIHOOD = "rows weighted by a propensity model have no likelihood; use wald_test"
FEW_INTERVALS, MOST_ENDS = 20, 8
TIES = {"efron": "Efron", "breslow": "Breslow"}


MERGED = (
    "{requested} intervals of time to {count}, so that none has few rows; their ends are {ends}. With few "
    "intervals hazard ratios are biased towards one, most of all with ties='breslow'. Use fewer columns, or "
    "{remedy}"
)
BY_SITE = Remedy("fit(baseline='site')", "{arguments}, which needs no intervals.")
NOTES = Catalogue(
    critical={
        "merged_intervals/few": (
            f"CONFIDENCE INTERVALS MAY BE WRONG: the sites merged {MERGED}",
            BY_SITE,
        ),
    },
    info={
        "independent_rows": "Likelihood ratio and score test suppose independent rows. The Wald test allows "
        "for clusters by '{groups}'.",
        "merged_intervals": (
            f"The sites merged {MERGED}",
            BY_SITE,
        ),
        "strata_without_events": "Strata without events do not count: {strata}.",
        "common_baseline": "Times count as the end of their interval.",
    },
)


def _baseline_words(fit: CoxFit) -> str:
    if fit.common is None:
        return "one for each site" + (" and stratum" if fit.request.strata else "")
    plural = "s" if len(fit.common.edges) > 1 else ""
    each = ", one for each stratum" if fit.request.strata else ""
    return f"common, {len(fit.common.edges)} interval{plural}{each}"


def _test_line(name: str, result: CoxResults) -> str:
    tests = result.global_tests()
    return chi_squared(*tests.loc[name]) if name in tests.index else ""


def _concordance_line(result: CoxResults) -> str:
    by_site = " by site" if result._fit.common else ""
    return f"{result.concordance:.3f} (se {result.concordance_se:.3f}){by_site}"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CoxRecord(EstimateRecord):
    """What a file of results holds."""

    fit: CoxFit
    basis: RowsBasis


class CoxResults(SiteFitsResults, saved_as=FORMAT, record=CoxRecord):
    """Results of :meth:`fedstat.FederatedCox.fit`; coefficients are logarithms of hazard ratios.

    Attributes
    ----------
    model : HorizontalModel
        For results that were read from a file, the names of response and coefficients only.
    evaluation_ledger : Ledger or None
        Releases of the latest evaluation.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_survival()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age + C(stage)", partition).fit()
    >>> fit.events, fit.converged, fit.iterations
    (413, True, 5)
    >>> fit.predict(table.head(2)).round(2).tolist()
    [0.99, 0.89]
    >>> fit.heterogeneity.to_frame().index.tolist()
    ['age', 'C(stage)[T.II]', 'C(stage)[T.III]']
    >>> round(fit.concordance, 2), round(fit.concordance_se, 2), round(fit.llnull), round(fit.bic)
    (0.66, 0.02, -1947, 3776)
    >>> fit.site_estimates.round(2).loc["Kiel"].tolist(), fit.vif().round(2)["df"].tolist()
    ([0.06, 0.14, 0.86], [1, 2])
    >>> fit.hazard_ratios().round(2).loc["age"].tolist()
    [1.05, 1.04, 1.06]
    >>> fit.grid is None  # every site has a baseline hazard of its own
    True
    """

    evaluation_ledger: Ledger | None = None
    _record: CoxRecord
    _exponentiates = True

    @classmethod
    def _of(
        cls, model: HorizontalModel, fit: CoxFit, cov_type: str, outcomes: Outcomes, ledger: Ledger
    ) -> Self:
        """Make results of a fit."""
        width = len(fit.design.names)
        evaluations = len(fit.trace) + (0 if fit.common is None else len(fit.common.trace))
        problem = "" if fit.converged else f"not converged after {evaluations} evaluations"
        clustering = (fit.common or fit).clustering
        estimate = Estimate(
            params=fit.params,
            cov=fit.cov,
            names=fit.design.names,
            sites=("",) * width,
            terms=fit.design.term_names,
            response=model.formula.response,
            nobs=int(fit.design.n.sum()),
            df_model=float(width),
            converged=fit.converged,
            convergence=problem or f"converged after {evaluations} evaluations",
            llf=None if model.question.propensities else fit.loglik,
            df=clustering.df if clustering and clustering.corrected else None,
            cov_type=cov_type,
            privacy="none (no noise is added)",
            blocks=tuple(
                CoefficientBlock(row.site, width, row.n, 1.0 - row.n / row.n_rows)
                for row in model.agreement.sites
            ),
            reasons={"rsquared": "a Cox model has concordance instead", "llf": NO_LIKELIHOOD},
        )
        notes = tuple(ASSUMPTIONS[kind].note(outcome) for kind, outcome in outcomes.items())
        basis = RowsBasis.of(model, spread=fit.spread)
        record = CoxRecord(estimate=estimate, fit=fit, basis=basis, notes=notes)
        return cls(record, ledger, model)

    @property
    def events(self) -> int:
        """Rows with an event, times their frequency weights."""
        return self._record.fit.events

    @property
    def iterations(self) -> int:
        """Evaluations of the likelihood that the fit took."""
        fit = self._record.fit
        return len(fit.trace) + (0 if fit.common is None else len(fit.common.trace))

    @property
    def grid(self) -> Floats | None:
        """Ends of the intervals of a common baseline hazard, (J,), as far as no few rows are in one."""
        common = self._record.fit.common
        return None if common is None else common.edges

    @property
    def bic(self) -> float:
        """Schwarz's criterion, with the number of events as sample size, as in R."""
        return -2.0 * self.llf + float(np.log(self.events)) * len(self.estimate.names)

    @property
    def llnull(self) -> float:
        """Partial log-likelihood with all coefficients zero."""
        fit = self._record.fit
        if self.basis.agreement.question.propensities:
            raise NotAvailableError(f"llnull: {NO_LIKELIHOOD}")
        return fit.null if fit.common is None else fit.common.null

    def global_tests(self) -> pd.DataFrame:
        """Test that all coefficients are zero: likelihood ratio, Wald, score, as ``summary(coxph)``.

        Returns
        -------
        DataFrame
            Index ``likelihood ratio``, ``Wald``, ``score``; columns ``statistic``, ``df``, ``p_value``. The
            Wald test uses the covariance of the fit, the two others suppose independent rows. There is no
            score test with a common baseline: sums of columns by interval at zero are not requested. With
            estimated weights there is the Wald test alone.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition).fit()
        >>> fit.global_tests().round(1)["statistic"].to_dict()
        {'likelihood ratio': 53.7, 'Wald': 53.7, 'score': 53.4}
        """
        params, fit = self.estimate.params, self._record.fit
        statistics = {"Wald": float(params @ np.linalg.solve(self._cov(), params))}
        if not self.basis.agreement.question.propensities:
            statistics = {"likelihood ratio": 2.0 * (self.llf - self.llnull), **statistics}
            if fit.common is None:
                statistics["score"] = fit.score_test
        df = len(params)
        frame = pd.DataFrame({"statistic": statistics, "df": dict.fromkeys(statistics, df)})
        frame = frame.assign(p_value=stats.chi2.sf(frame["statistic"], df))
        if self.estimate.df is not None:
            frame.loc["Wald", "p_value"] = float(self.wald_test(np.eye(df)).pvalue)
        return frame

    # -- concordance -----------------------------------------------------------------------------

    @property
    def concordance(self) -> float:
        """Share of the pairs of rows of one site and stratum whose events come in the predicted order."""
        return concordance_index(self._record.fit.pairs, self._record.fit.squares)[0]

    @property
    def concordance_se(self) -> float:
        """Standard error of :attr:`concordance`, by the infinitesimal jackknife as in R's survival."""
        return concordance_index(self._record.fit.pairs, self._record.fit.squares)[1]

    # -- hazard ratios and predictions -----------------------------------------------------------

    @takes_alpha
    def hazard_ratios(self, alpha: float = 0.05) -> pd.DataFrame:
        """Return hazard ratios with intervals of level ``1 - alpha``.

        Returns
        -------
        DataFrame
            ``hazard_ratio``, ``conf_low``, ``conf_high``, by coefficient.
        """
        return self.ratios(alpha)

    def predict(
        self,
        exog: HeldRows | None = None,
        which: Literal["ratio", "linear"] = "ratio",
        *,
        reference: Literal["mean", "zero"] = "mean",
    ) -> pd.Series:
        """Predict hazard ratios, or linear predictors, for rows that the caller holds.

        Parameters
        ----------
        exog : table of pandas, polars or pyarrow, or dict of columns
            With the columns of the model; rows that lack one give NaN.
        which : {"ratio", "linear"}
            The hazard relative to the reference, or its logarithm.
        reference : {"mean", "zero"}
            A row with the means of all sites' columns; or one with zeros, as in statsmodels. R's
            ``predict(type="risk", reference="sample")`` takes zeros for indicators and means for numbers.

        Returns
        -------
        Series

        Raises
        ------
        DesignError
            A column is absent, of another type, or holds a level that the fit did not know.
        NotAvailableError
            No frame is given: the rows of the fit stay at the sites.
        """
        check_choice("which", which, ("ratio", "linear"))
        check_choice("reference", reference, ("mean", "zero"))
        found = self._predicted(exog).linear
        if reference == "mean":
            found = found - float(self._fit.design.mean @ self.estimate.params)
        return found if which == "linear" else exponentials(found)

    def get_prediction(
        self, exog: HeldRows | None = None, *, reference: Literal["mean", "zero"] = "mean"
    ) -> GLMPrediction:
        """Predict hazard ratios with standard errors and intervals.

        Parameters
        ----------
        exog, reference
            As in :meth:`predict`.

        Returns
        -------
        GLMPrediction
            Of hazard ratios to the reference, whose logarithm is linear.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition).fit()
        >>> fit.get_prediction({"age": [50, 70]}).summary_frame().iloc[:, 2:].round(2)
           mean_ci_lower  mean_ci_upper
        0           0.55           0.70
        1           1.28           1.53
        """
        check_choice("reference", reference, ("mean", "zero"))
        found, mean = self._predicted(exog), self._fit.design.mean * (reference == "mean")
        rows = replace(found, linear=found.linear - float(mean @ self.estimate.params), X=found.X - mean)
        return GLMPrediction(
            rows.linear, rows.standard_errors(self._cov()), families.Poisson(), self._combined_distribution
        )

    @takes_alpha
    def compare_profiles(self, frame: HeldRows, reference: HeldRows, *, alpha: float = 0.05) -> pd.DataFrame:
        """Return hazard ratios between rows and one reference row, with intervals.

        Parameters
        ----------
        frame : DataFrame
            Rows, complete, with the columns of the model.
        reference : DataFrame
            One row.
        alpha : float
            One minus the level of the intervals.

        Returns
        -------
        DataFrame
            ``hazard_ratio``, ``conf_low``, ``conf_high``, with the index of `frame`.

        Raises
        ------
        ModelError
            The reference is not one row, or a row lacks a value.

        Examples
        --------
        >>> import fedstat as fs, pandas as pd
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition).fit()
        >>> fit.compare_profiles(pd.DataFrame({"age": [50, 70]}), pd.DataFrame({"age": [60]})).round(2)
           hazard_ratio  conf_low  conf_high
        0          0.67      0.60       0.74
        1          1.50      1.35       1.67
        """
        frame, reference = held_rows(frame), held_rows(reference)
        if len(reference) != 1:
            raise ModelError(f"reference: expected one row, received {len(reference)}")
        agreement, design = self.basis.agreement, self._fit.design
        seen, X = code_frame(agreement, design, frame)
        known, base = code_frame(agreement, design, reference)
        if not (seen.all() and known.all()):
            raise ModelError("compare_profiles: expected rows without missing values")
        contrast = X - base
        estimate = contrast @ self.estimate.params
        half = self._combined_distribution.isf(alpha / 2.0) * np.sqrt(
            ((contrast @ self._cov()) * contrast).sum(axis=1)
        )
        columns = {"hazard_ratio": estimate, "conf_low": estimate - half, "conf_high": estimate + half}
        ratios = {name: exponentials(column) for name, column in columns.items()}
        return pd.DataFrame(ratios, index=frame.index)

    # -- proportional hazards --------------------------------------------------------------------

    def test_proportional_hazards(
        self, transform: Literal["log", "identity"] = "log"
    ) -> ProportionalHazardsTest:
        """Test whether coefficients change with time, by the score test for x g(t).

        The sites evaluate score and information of the added coefficients once, at this estimate. It is R's
        ``cox.zph(fit, transform=transform)`` of the fit that is stratified by site. With a common baseline
        it is that of times that are rounded up to its intervals.

        Parameters
        ----------
        transform : {"log", "identity"}
            The function g. R's default, Kaplan-Meier's estimate over all rows, needs the times of all sites.

        Returns
        -------
        ProportionalHazardsTest

        Raises
        ------
        NotAvailableError
            The results were read from a file, or rows have weights of a treatment.
        PolicyError
            A site refuses.

        References
        ----------
        Grambsch and Therneau, "Proportional hazards tests and diagnostics based on weighted residuals",
        Biometrika 81 (1994).

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age + C(stage)", partition).fit()
        >>> fit.test_proportional_hazards().tidy().round(2)
               term  statistic  df  p_value
        0       age       0.08   1     0.77
        1  C(stage)       1.87   2     0.39
        2    GLOBAL       1.90   3     0.59
        """
        check_choice("transform", transform, ("log", "identity"))
        fit = self._record.fit
        if self.basis.agreement.question.propensities:
            raise NotAvailableError(f"test_proportional_hazards: {NO_LIKELIHOOD}")
        requested = time_scores if fit.common is None else common_time_scores

        call = f"test_proportional_hazards({transform!r})"
        score, cross, square = self._after_fit(
            call, FAMILY, lambda session: requested(session, fit, transform)
        )
        information = time_information(fit, (score, cross, square))

        def statistic(places: list[int]) -> tuple[float, int]:
            return quadratic(score[places], information[np.ix_(places, places)]), len(places)

        return ProportionalHazardsTest(score_tests(fit.design.term_names, statistic), transform)

    def baseline_hazard(
        self, grid: float | Sequence[float] | Floats | None = None, *, until: float | None = None
    ) -> BaselineHazard:
        """Return the mean of the sites' baseline hazards, with which survival is predicted.

        The sites are weighted by their rows. So that no interval is about few events, each site first
        averages the times of every few successive events, as many as its policy requires for a level. A
        common baseline hazard is known from the fit, at the ends of its intervals.

        Parameters
        ----------
        grid : float or sequence of float
            Width of the intervals, or their ends, ascending. Left out with a common baseline.
        until : float, optional
            Last time of a grid that is given by its width; required there.

        Returns
        -------
        BaselineHazard

        Raises
        ------
        NotAvailableError
            The results were read from a file, or the model has strata within sites.
        PolicyError
            A site refuses.

        References
        ----------
        Breslow, "Discussion of the paper by D. R. Cox", Journal of the Royal Statistical Society B 34 (1972).

        Examples
        --------
        >>> import fedstat as fs, pandas as pd
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition).fit()
        >>> baseline = fit.baseline_hazard(12, until=48)
        >>> baseline.survival(pd.DataFrame({"age": [50, 70]})).round(2)["survival"].tolist()
        [0.88, 0.74, 0.61, 0.54, 0.75, 0.51, 0.33, 0.25]
        """
        fit = self._record.fit
        edges = np.zeros(0) if fit.common is not None and grid is None else grid_points(grid, until)
        if fit.request.strata:
            raise NotAvailableError("baseline_hazard: the model has strata, with a baseline hazard for each")
        if fit.common is not None:
            if grid is not None:
                raise ModelError(
                    "grid: a common baseline hazard is known at the intervals of the fit; leave it out"
                )
            return self._baseline(fit.common.edges, common_hazard(fit))
        call = f"baseline_hazard(until={edges[-1]:g})"
        found = self._after_fit(call, FAMILY, lambda session: average_hazard(session, fit, edges))
        return self._baseline(edges, found)

    @takes_alpha
    def survival_function(
        self,
        frame: HeldRows,
        times: Sequence[float] | Floats | None = None,
        *,
        alpha: float = 0.05,
    ) -> PredictedSurvival:
        """Predict survival of rows that the caller holds, with intervals, as R's ``survfit(fit, newdata)``.

        It is :meth:`baseline_hazard` and its ``survival()`` in one call. Where every site has a baseline
        hazard, the sites release sums for their mean; a common one needs no request.

        Parameters
        ----------
        frame : DataFrame
            With the columns of the model; its index names the curves.
        times : sequence of float, optional
            Ascending. Those of a common baseline hazard are ends of its intervals, by default all of them.
        alpha : float
            One minus the level of the intervals.

        Returns
        -------
        PredictedSurvival
            ``tidy()``, ``wide()``, ``plot()``.

        Raises
        ------
        ModelError
            There are no times, a row lacks a column of the model, or a common baseline hazard is not known at
            a time.
        NotAvailableError
            The model has strata; or every site has a baseline hazard, and the results were read from a file.
        PolicyError
            A site refuses.

        Examples
        --------
        >>> import fedstat as fs, pandas as pd
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition).fit()
        >>> ages = pd.DataFrame({"age": [50, 70]}, index=["age 50", "age 70"])
        >>> fit.survival_function(ages, [12, 24, 36]).wide().round(2).loc[24.0].tolist()
        [0.74, 0.51]
        """
        if self._record.fit.common is not None:
            baseline = self.baseline_hazard()
            part = baseline if times is None else baseline._part(listed_times("times", np.atleast_1d(times)))
            return part._curves(frame, alpha)
        if times is None:
            raise ModelError(
                "survival_function: survival is predicted at given times",
                remedy=Remedy("survival_function(..., times=[12, 24])", "give them, as in {arguments}"),
            )
        return self.baseline_hazard(listed_times("times", np.atleast_1d(times)))._curves(frame, alpha)

    def _baseline(self, edges: Floats, found: tuple[Floats, Floats, Floats]) -> BaselineHazard:
        fit = self._record.fit
        params, cov, agreement = self.estimate.params, self._cov(), self.basis.agreement
        common = fit.common is not None
        return BaselineHazard(
            edges, *found, params, cov, agreement, fit.design, common=common, sources=(self,)
        )

    def _response(self, call: str, times: Sequence[float] | Floats | None = None) -> SurvivalResponse:
        fit, beta, p = self._record.fit, self.estimate.params, len(self.estimate.params)
        baseline = None
        if times is not None:
            wanted = listed_times("times", np.atleast_1d(times))
            baseline = self.baseline_hazard() if fit.common is not None else self.baseline_hazard(wanted)
            times = wanted
        points = () if times is None else tuple(float(one) for one in times)
        hazard, centers, of_hazard = hazard_at(baseline, points, p)

        def unavailable(*_: object) -> Any:
            raise NotAvailableError(f"{call}: {NO_AVERAGE}")

        return SurvivalResponse(
            agreement=self.basis.agreement,
            design=fit.design,
            B=beta[None, :],
            map=np.eye(p, p + len(points)),
            jet=unavailable,
            sums=unavailable,
            cov=joint_covariance(self._cov(), of_hazard),
            df=self._df,
            mean_words="survival",
            outcomes=points,
            heading="time",
            why_no_average=NO_AVERAGE,
            call=call,
            hazard=hazard,
            centers=centers,
        )

    def evaluate(
        self,
        partition: ClientPartition | None = None,
        *,
        times: Sequence[float] | Floats,
        baseline: BaselineHazard | None = None,
    ) -> SurvivalEvaluation:
        """Evaluate predicted survival at given times: AUC, Brier score and calibration.

        Sites count events and censored rows on 200 intervals up to the last time, for weights of the inverse
        probability of not being censored, and then rows and weights by bins of the linear predictor, whose
        edges depend on no row. Times are averaged over few successive rows of a site with the event, and
        without it, as for survival curves.

        Parameters
        ----------
        partition : ClientPartition, optional
            New rows; by default those of the fit, on which the figures are too good.
        times : sequence of float
            Ascending. Between two of them, every site needs no rows or enough rows with the event and
            without.
        baseline : BaselineHazard, optional
            For the predictions, with the times among its own; by default :meth:`baseline_hazard` at the
            times, which requests it where every site has its own.

        Returns
        -------
        SurvivalEvaluation
            ``auc``, ``brier``, ``integrated_brier``, ``calibration(time)``, ``plot_auc()``,
            ``plot_calibration(time)``.

        Raises
        ------
        ModelError
            The times do not ascend, or the baseline does not have one of them.
        NotAvailableError
            The model has strata or rows that enter late, or no row is followed for longer than the times; or
            the results were read from a file, and there is no partition, or no baseline.
        PolicyError
            A site refuses.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition).fit()
        >>> fit.evaluate(times=[12, 24]).auc.round(2).tolist()
        [0.61, 0.65]
        """
        points, fit = listed_times("times", times), self._record.fit
        if fit.request.strata or self.basis.agreement.question.response.count(",") > 1:
            raise NotAvailableError("evaluate: it takes models without strata and without late entry")
        partition = self._partition_for("evaluate", partition)
        if baseline is None:
            baseline = self.baseline_hazard() if fit.common is not None else self.baseline_hazard(points)
        hazard = known_hazard(baseline, points)
        agreement, center = self.basis.agreement, float(fit.design.mean @ self.estimate.params)
        arrays = {
            "beta": np.append(np.zeros(int(agreement.question.intercept)), self.estimate.params),
            "hazard": hazard * np.exp(center),
            "center": np.array(center),
        }
        found, self.evaluation_ledger = evaluate_survival(
            (FAMILY, "Cox"), agreement, arrays, points, partition
        )
        own = self._model is not None and partition is self._model.partition
        return replace(found, own_rows=own)

    def vif(self) -> pd.DataFrame:
        """Variance inflation factor of every term; generalized ones for terms with several columns."""
        return gvif(self._record.fit.naive, self.estimate.names, self.estimate.terms)

    # -- summary ---------------------------------------------------------------------------------

    def _effect_words(self) -> tuple[str, str, str]:
        return "effect on the log hazard", "hazard ratio", "Hazard ratios"

    _SUMMARY = (
        ("Dep. Variable", "estimate.response", ""),
        ("Model", "model_name", ""),
        ("Baseline Hazard", "_fit", _baseline_words),
        ("Strata", "_fit.request.strata", ", ".join),
        ("Ties", "_fit.request.ties", TIES.__getitem__),
        ("No. Observations", "nobs", ",d"),
        ("Events", "events", ",d"),
        weight_line("Freq. Weights", "freq_weights"),
        weight_line("Case Weights", "var_weights"),
        PROPENSITIES,
        ("Df Model", "estimate.df_model", "g"),
        ("Log-Likelihood", "llf", two_digits),
        ("LL-Null", "llnull", two_digits),
        ("LR Test", "", partial(_test_line, "likelihood ratio")),
        ("Wald Test", "", partial(_test_line, "Wald")),
        ("Score Test", "", partial(_test_line, "score")),
        ("Concordance", "", _concordance_line),
        ("AIC", "aic", two_digits),
        ("Covariance Type", "", clusters_line),
        ("Tests", "", tests_line),
        ("Converged", "converged", yes_or_no),
    )
    _GLANCE = (
        *SiteFitsResults._GLANCE,
        ("events", "events"),
        ("concordance", "concordance"),
        ("concordance_se", "concordance_se"),
    )

    def _sheets(self, alpha: float = 0.05) -> Iterator[Sheet]:
        sheets = list(super()._sheets(alpha))
        yield from sheets[:2]
        yield self._ratio_sheet(alpha)
        yield from sheets[2:]

    def _ratio_sheet(self, alpha: float) -> Sheet:
        frame = self.hazard_ratios(alpha)
        labels = ("", "hazard ratio", "1 / ratio", f"[{alpha / 2:.4g}", f"{1 - alpha / 2:.4g}]")
        names = short_names(list(self.estimate.names))
        inverse = exponentials(-self.estimate.params).tolist()
        rows = tuple(
            (name, number(ratio), number(other), number(low), number(high))
            for name, other, (ratio, low, high) in zip(names, inverse, frame.to_numpy().tolist(), strict=True)
        )
        width = 14
        return Sheet(labels, rows, "lrrrr", (WIDTH - 4 * (width + 1), *[width] * 4))

    def _summary_notes(self) -> Iterator[Note]:
        yield from super()._summary_notes()
        fit = self._record.fit
        yield from few_events(fit.events, len(fit.design.names))
        yield from self._weights_notes()
        clustering = (fit.common or fit).clustering
        if clustering is not None:
            est = self.estimate
            yield from clustering.notes(est.names, est.terms, corrected_fit(correction="CR2"))
            for shared in fit.shared:
                yield from shared.note(len(est.blocks), "clusters", TWICE_TOO_SMALL)
            yield NOTES.note("independent_rows", groups=clustering.groups)
        if fit.common is not None:
            yield from _common_notes(fit.common)
        yield from self._left_out_note()
        yield OF_ROWS.note("censoring")
        yield from self._masking_note()
        empty = fit.common is None and any(own.problem == NO_EVENTS for own in fit.local)
        yield from self._own_fits_note(", except those of a site without events" if empty else "")
        if clustering is None:
            yield from self._difference_note()


def _common_notes(common: CommonFit) -> Iterator[Note]:
    J, requested = len(common.edges), common.requested
    if requested > J:
        kind = "merged_intervals/few" if J < FEW_INTERVALS else "merged_intervals"
        yield NOTES.note(kind, requested=requested, count=J, ends=format_list(common.edges))
    by_stratum = common.at.events[0].reshape(-1, J).sum(axis=1)
    combinations = product(*common.request.stratum_levels)
    empty = [":".join(map(str, one)) for one, d in zip(combinations, by_stratum, strict=True) if d == 0.0]
    if empty:
        yield NOTES.note("strata_without_events", strata=empty)
    yield NOTES.note("common_baseline")


def format_list(edges: Floats) -> str:
    """Return the ends of intervals in words, the first and the last ones of many."""
    words = [f"{edge:g}" for edge in edges.tolist()]
    return ", ".join(words if len(words) <= MOST_ENDS else [*words[:4], "...", words[-1]])


class ProportionalHazardsTest(AssumptionTest):
    """Score tests of coefficients that change with a function of time, one for each term and one for all.

    Attributes
    ----------
    transform : str
        The function of time.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition).fit()
    >>> test = fit.test_proportional_hazards("identity")
    >>> test.transform, test.glance()["df"].tolist()
    ('identity', [1])
    """

    _assumption = "Proportional hazards"
    _remedy = (
        "Coefficients change with time: a hazard ratio of the fit is an average over the times of the "
        "events. Let the column define strata, or let its effect change with time."
    )

    def __init__(self, table: pd.DataFrame, transform: str) -> None:
        super().__init__(table)
        self.transform = transform

    def _title(self) -> str:
        return f"score test of x g(t), g = {self.transform}"
