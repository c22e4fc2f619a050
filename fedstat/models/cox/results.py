"""Results of a Cox regression: hazard ratios, tests, concordance, and the comparison of sites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.covariance import gvif
from fedstat.inference.estimate import Estimate
from fedstat.inference.heterogeneity import Heterogeneity, heterogeneity
from fedstat.inference.summary import WIDTH, CoefficientBlock, Note, Report, released_kinds
from fedstat.inference.survival_evaluation import SurvivalEvaluation
from fedstat.inference.tables import Sheet, human_range, number
from fedstat.models.checks import check_choice
from fedstat.models.cox.baseline import BaselineHazard
from fedstat.models.cox.common_baseline import CommonFit
from fedstat.models.cox.evaluation import evaluate_survival
from fedstat.models.cox.protocol import (
    NOT_REQUESTED,
    CoxFit,
    average_hazard,
    common_hazard,
    common_time_scores,
    time_scores,
)
from fedstat.models.cox.steps import FAMILY, NO_EVENTS
from fedstat.models.horizontal.blocks import grid_points
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.prediction import PredictedRows, code_frame, predict_rows
from fedstat.models.horizontal.results import MASKED, DesignResults, RowsBasis
from fedstat.models.results import EstimateRecord
from fedstat.spline_names import short_names
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMAT = "fedstat cox results 2"
FEW_EVENTS = 10
"""Events per coefficient below which Wald intervals are unreliable (Peduzzi et al. 1995)."""
FEW_CLUSTERS = 30
"""Clusters below which the sandwich is too small (Cameron and Miller 2015, section VI)."""
DIFFER = 0.05
FEW_INTERVALS, MOST_ENDS = 10, 8
SITE_WIDTHS = (24, 9, 12, 14, WIDTH - 24 - 9 - 12 - 14 - 8)
TIES = {"efron": "Efron", "breslow": "Breslow"}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CoxRecord(EstimateRecord):
    """What a file of results holds."""

    fit: CoxFit
    basis: RowsBasis


class CoxResults(DesignResults, saved_as=FORMAT, record=CoxRecord):
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

    @classmethod
    def _of(cls, model: HorizontalModel, fit: CoxFit, cov_type: str, ledger: Ledger) -> Self:
        """Make results of a fit."""
        width = len(fit.design.names)
        evaluations = len(fit.trace) + (0 if fit.common is None else len(fit.common.trace))
        problem = "" if fit.converged else f"not converged after {evaluations} evaluations"
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
            llf=fit.loglik,
            cov_type=cov_type,
            privacy="none (no noise is added)",
            blocks=tuple(
                CoefficientBlock(row.site, width, row.n, 1.0 - row.n / row.n_rows)
                for row in model.agreement.sites
            ),
            reasons={"rsquared": "a Cox model has concordance instead"},
        )
        record = CoxRecord(estimate=estimate, fit=fit, basis=RowsBasis.of(model))
        return cls(record, ledger, model)

    @property
    def events(self) -> int:
        """Rows with an event."""
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
        return fit.null if fit.common is None else fit.common.null

    def global_tests(self) -> pd.DataFrame:
        """Test that all coefficients are zero: likelihood ratio, Wald, score, as ``summary(coxph)``.

        Returns
        -------
        DataFrame
            Index ``likelihood ratio``, ``Wald``, ``score``; columns ``statistic``, ``df``, ``p_value``. The
            Wald test uses the covariance of the fit, the two others suppose independent rows. There is no
            score test with a common baseline: sums of columns by interval at zero are not requested.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition).fit()
        >>> fit.global_tests().round(1)["statistic"].to_dict()
        {'likelihood ratio': 53.7, 'Wald': 53.7, 'score': 53.4}
        """
        params, fit = self.estimate.params, self._record.fit
        statistics = {
            "likelihood ratio": 2.0 * (self.llf - self.llnull),
            "Wald": float(params @ np.linalg.solve(self._cov(), params)),
            "score": fit.score_test,
        }
        if fit.common is not None:
            del statistics["score"]
        df = len(params)
        frame = pd.DataFrame({"statistic": statistics, "df": dict.fromkeys(statistics, df)})
        return frame.assign(p_value=stats.chi2.sf(frame["statistic"], df))

    # -- concordance -----------------------------------------------------------------------------

    @property
    def concordance(self) -> float:
        """Share of the pairs of rows of one site and stratum whose events come in the predicted order."""
        agree, disagree, tied, _ = self._record.fit.pairs.tolist()
        total = agree + disagree + tied
        return (agree + tied / 2.0) / total if total else float("nan")

    @property
    def concordance_se(self) -> float:
        """Standard error of :attr:`concordance`, by the infinitesimal jackknife as in R's survival."""
        agree, disagree, tied, _ = self._record.fit.pairs.tolist()
        total = agree + disagree + tied
        if not total:
            return float("nan")
        share = (agree - disagree) / total
        ss, sn, nn = self._record.fit.squares.tolist()
        return float(np.sqrt(max(ss - 2.0 * share * sn + share**2 * nn, 0.0)) / (2.0 * total))

    # -- hazard ratios and predictions -----------------------------------------------------------

    def hazard_ratios(self, alpha: float = 0.05) -> pd.DataFrame:
        """Return hazard ratios with intervals of level ``1 - alpha``.

        Returns
        -------
        DataFrame
            ``hazard_ratio``, ``conf_low``, ``conf_high``, by coefficient.
        """
        limits = self.conf_int(alpha)
        columns = {"hazard_ratio": self.params, "conf_low": limits[0], "conf_high": limits[1]}
        return pd.DataFrame({name: np.exp(column) for name, column in columns.items()})

    def predict(
        self,
        frame: pd.DataFrame | None = None,
        which: Literal["ratio", "linear"] = "ratio",
        *,
        reference: Literal["mean", "zero"] = "mean",
    ) -> pd.Series:
        """Predict hazard ratios, or linear predictors, for rows that the caller holds.

        Parameters
        ----------
        frame : DataFrame
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
        found = self._predicted(frame).linear
        if reference == "mean":
            found = found - float(self._fit.design.mean @ self.estimate.params)
        return found if which == "linear" else np.exp(found)

    def _predicted(self, frame: pd.DataFrame | None) -> PredictedRows:
        if frame is None:
            raise NotAvailableError(
                "predict needs a frame of rows that you hold; those of the fit stay at the sites"
            )
        return predict_rows(self.basis.agreement, self._fit.design, self.estimate.params, frame)

    def compare_profiles(
        self, frame: pd.DataFrame, reference: pd.DataFrame, *, alpha: float = 0.05
    ) -> pd.DataFrame:
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
        if len(reference) != 1:
            raise ModelError(f"reference: expected one row, received {len(reference)}")
        agreement, design = self.basis.agreement, self._fit.design
        seen, X = code_frame(agreement, design, frame)
        known, base = code_frame(agreement, design, reference)
        if not (seen.all() and known.all()):
            raise ModelError("compare_profiles: expected rows without missing values")
        contrast = X - base
        estimate = contrast @ self.estimate.params
        half = stats.norm.isf(alpha / 2.0) * np.sqrt(((contrast @ self._cov()) * contrast).sum(axis=1))
        columns = {"hazard_ratio": estimate, "conf_low": estimate - half, "conf_high": estimate + half}
        return pd.DataFrame({name: np.exp(column) for name, column in columns.items()}, index=frame.index)

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
            The results were read from a file.
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
        if self._model is None:
            raise NotAvailableError(
                "test_proportional_hazards: this result was read from a file and has no partition; fit the "
                "model again"
            )
        fit = self._record.fit
        requested = time_scores if fit.common is None else common_time_scores

        def protocol(model: HorizontalModel) -> FitProtocol[tuple[Floats, Floats, Floats]]:
            session = model._open_session(FAMILY, fit.masked)
            return session.hide(requested(session, fit, transform))

        call = f"test_proportional_hazards({transform!r})"
        score, cross, square = self._model._run_after_fit(call, protocol)
        information = square - cross @ np.linalg.solve(fit.information, cross.T)
        rows = []
        terms = np.array(fit.design.term_names, dtype=object)
        for term in [*dict.fromkeys(fit.design.term_names), "GLOBAL"]:
            places = np.flatnonzero(terms == term) if term != "GLOBAL" else np.arange(len(terms))
            part = score[places]
            statistic = float(part @ np.linalg.solve(information[np.ix_(places, places)], part))
            rows.append((term, statistic, len(places), float(stats.chi2.sf(statistic, len(places)))))
        table = pd.DataFrame(rows, columns=["term", "statistic", "df", "p_value"])
        return ProportionalHazardsTest(table, transform, fit.request.ties)

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
        if self._model is None:
            raise NotAvailableError(
                "baseline_hazard: this result was read from a file and has no partition; fit the model again"
            )

        def protocol(model: HorizontalModel) -> FitProtocol[tuple[Floats, Floats, Floats]]:
            session = model._open_session(FAMILY, fit.masked)
            return session.hide(average_hazard(session, fit, edges))

        found = self._model._run_after_fit(f"baseline_hazard(until={edges[-1]:g})", protocol)
        return self._baseline(edges, found)

    def _baseline(self, edges: Floats, found: tuple[Floats, Floats, Floats]) -> BaselineHazard:
        fit = self._record.fit
        params, cov, agreement = self.estimate.params, self._cov(), self.basis.agreement
        common = fit.common is not None
        return BaselineHazard(edges, *found, params, cov, agreement, fit.design, common=common)

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
        points, fit = grid_points(times, None), self._record.fit
        if fit.request.strata or self.basis.agreement.question.response.count(",") > 1:
            raise NotAvailableError("evaluate: it takes models without strata and without late entry")
        if partition is None:
            if self._model is None:
                raise NotAvailableError(
                    "evaluate: this result was read from a file and has no partition; give one"
                )
            partition = self._model.partition
        if baseline is None:
            baseline = self.baseline_hazard() if fit.common is not None else self.baseline_hazard(points)
        found, self.evaluation_ledger = evaluate_survival(
            self.basis.agreement,
            fit.design,
            self.estimate.params,
            baseline.hazard_at(points),
            points,
            partition,
        )
        own = self._model is not None and partition is self._model.partition
        return replace(found, own_rows=own)

    # -- sites -----------------------------------------------------------------------------------

    @property
    def site_estimates(self) -> pd.DataFrame:
        """Every site's own fit, (sites, coefficients); NaN where a site does not determine one."""
        rows = {
            own.site: np.full(len(self.params), np.nan) if own.beta is None else own.beta
            for own in self._record.fit.local
        }
        return pd.DataFrame.from_dict(rows, orient="index", columns=list(self.estimate.names))

    @cached_property
    def heterogeneity(self) -> Heterogeneity:
        """Agreement of the sites' coefficients: Cochran's Q, I2, random effects, the fit without each site.

        Raises
        ------
        NotAvailableError
            There is one site.
        """
        fit, est = self._record.fit, self.estimate
        if len(fit.local) == 1:
            raise NotAvailableError("no heterogeneity: it compares sites, and this fit has one")
        try:
            return heterogeneity(
                est.names, est.params, 1.0, fit.local, masked=fit.masked_parts, terms=est.terms
            )
        except EstimationError as error:
            raise NotAvailableError(f"no heterogeneity: {error}") from error

    def plot_forest(
        self, coefficient: str, ax: Axes | None = None, *, exponentiate: bool = True, unit: float = 1.0
    ) -> Axes:
        """Draw a forest plot of a coefficient over the sites.

        `exponentiate` draws hazard ratios on a logarithmic scale; ``unit=10`` draws the effect of ten units
        of the column.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition).fit()
        >>> fit.plot_forest("age", unit=10).get_xlabel()
        'hazard ratio per 10 units, with 95 % interval'
        """
        effect, ratio, _ = self._effect_words()
        named = ratio if exponentiate else effect
        return self.heterogeneity.plot_forest(
            coefficient, ax, exponentiate=exponentiate, effect=named, unit=unit
        )

    def vif(self) -> pd.DataFrame:
        """Variance inflation factor of every term; generalized ones for terms with several columns."""
        return gvif(self._record.fit.naive, self.estimate.names, self.estimate.terms)

    # -- summary ---------------------------------------------------------------------------------

    def _effect_words(self) -> tuple[str, str, str]:
        return "effect on the log hazard", "hazard ratio", "Hazard ratios"

    def _glance(self) -> dict[str, float]:
        return super()._glance() | {
            "events": self.events,
            "concordance": self.concordance,
            "concordance_se": self.concordance_se,
        }

    def _sheets(self, alpha: float = 0.05) -> Iterator[Sheet]:
        sheets = list(super()._sheets(alpha))
        yield from sheets[:2]
        yield self._ratio_sheet(alpha)
        yield from sheets[2:]

    def _ratio_sheet(self, alpha: float) -> Sheet:
        frame = self.hazard_ratios(alpha)
        labels = ("", "hazard ratio", "1 / ratio", f"[{alpha / 2:.4g}", f"{1 - alpha / 2:.4g}]")
        names = short_names(list(self.estimate.names))
        rows = tuple(
            (name, number(ratio), number(1.0 / ratio), number(low), number(high))
            for name, (ratio, low, high) in zip(names, frame.to_numpy().tolist(), strict=True)
        )
        width = 14
        return Sheet(labels, rows, "lrrrr", (WIDTH - 4 * (width + 1), *[width] * 4))

    def _summary_left(self) -> list[tuple[str, str]]:
        fit, est, tests = self._record.fit, self.estimate, self.global_tests()
        groups = [("Strata", ", ".join(fit.request.strata))] if fit.request.strata else []
        clusters = (
            f" ({', '.join(fit.request.clusters)}, {fit.clusters:,})" if fit.clusters is not None else ""
        )
        weights = self.basis.agreement.question.weights
        return [
            ("Dep. Variable", est.response),
            ("Model", self.model_name),
            ("Baseline Hazard", _baseline_words(fit)),
            *groups,
            ("Ties", TIES[fit.request.ties]),
            ("No. Observations", f"{est.nobs:,}"),
            ("Events", f"{fit.events:,}"),
            *([("Freq. Weights", weights["freq_weights"])] if "freq_weights" in weights else []),
            ("Df Model", f"{est.df_model:g}"),
            ("Log-Likelihood", number(self.llf, 2)),
            ("LL-Null", number(self.llnull, 2)),
            ("LR Test", _test(tests, "likelihood ratio")),
            ("Wald Test", _test(tests, "Wald")),
            *([("Score Test", _test(tests, "score"))] if "score" in tests.index else []),
            (
                "Concordance",
                f"{self.concordance:.3f} (se {self.concordance_se:.3f})" + (" by site" if fit.common else ""),
            ),
            ("AIC", number(self.aic, 2)),
            ("Covariance Type", self.cov_type + clusters),
            ("Converged", "yes" if self.converged else "NO"),
        ]

    def _summary_right(self) -> list[tuple[str, str]]:
        fit, blocks = self._record.fit, self.estimate.blocks
        own = sum(one.beta is not None for one in fit.local)
        requested = any(one.problem != NOT_REQUESTED for one in fit.local)
        lines = [
            ("Sites", str(len(blocks))),
            ("Rows by site", human_range(block.entities for block in blocks)),
            ("Own fits", f"{own} of {len(blocks)} sites" if requested else "not requested (local=False)"),
            ("Heterogeneity", self._joint()),
        ]
        if self._ledger is not None:
            lines.append(("Sums", f"masked over {len(blocks)} sites" if fit.masked else "unmasked"))
        return [*lines, *self._ledger_lines(), ("Privacy spent", self.estimate.privacy)]

    def _joint(self) -> str:
        if len(self._record.fit.local) == 1:
            return "not defined (one site)"
        try:
            joint = self.heterogeneity.joint
        except NotAvailableError:
            return "not defined"
        return f"{joint}, p {_p(joint.pvalue)}" if joint.df else "not defined"

    def _site_sheet(self) -> Sheet:
        kinds = None if self._ledger is None else self._ledger.kinds_by_site()
        p, rows = len(self.estimate.names), []
        for block, known in zip(
            self.estimate.blocks, self.site_estimates.notna().sum(axis=1).tolist(), strict=True
        ):
            own = "none" if not known else "yes" if known == p else f"{known} of {p}"
            left = released_kinds(block.site, kinds)
            rows.append((block.site, f"{block.entities:,}", f"{100 * block.missing:.2f} %", own, left))
        headers = ("site", "rows", "left out", "own fit", "released")
        return Sheet(headers, tuple(rows), "lrrrl", SITE_WIDTHS, gap=2, wrap=True)

    def _summary_notes(self) -> Iterator[Note]:
        yield from super()._summary_notes()
        fit = self._record.fit
        if fit.events < FEW_EVENTS * len(fit.design.names):
            yield Note(
                "few_events",
                f"There are {fit.events / len(fit.design.names):.1f} events for each coefficient. With fewer "
                f"than {FEW_EVENTS}, estimates are biased away from zero and intervals are unreliable.",
                "warning",
            )
        if fit.clusters is not None and fit.clusters < FEW_CLUSTERS:
            yield Note(
                "few_clusters",
                f"There are {fit.clusters} clusters. With fewer than {FEW_CLUSTERS}, these standard errors "
                "are usually too small.",
                "warning",
            )
        if fit.common is not None:
            yield from _common_notes(fit.common)
        if dropped := self.basis.left_out:
            yield Note(
                "left_out", f"Rows left out because they lack one of the model's columns: {dropped:,}."
            )
        yield Note(
            "proportional",
            "Hazard ratios are assumed to be the same at all times; test_proportional_hazards() tests it. "
            "Censoring is assumed to be independent of the time of the event, given the columns.",
        )
        yield from self._site_notes()

    def _site_notes(self) -> Iterator[Note]:
        fit, K = self._record.fit, len(self._record.fit.local)
        if fit.masked:
            except_own = any(own.problem != NOT_REQUESTED for own in fit.local)
            text = MASKED.format(", except the own fits" if except_own else "")
            yield Note("masking", f"Sums over rows were masked over {K} sites: {text}")
        elif K > 1:
            yield Note("masking", "Sums were not masked: the coordinator saw each site's part.")
        lacking: dict[str, list[str]] = {}
        for own in fit.local:
            if own.problem and own.problem != NOT_REQUESTED:
                lacking.setdefault(own.problem, []).append(own.site)
        if lacking:
            listed = "; ".join(f"{', '.join(names)} ({problem})" for problem, names in lacking.items())
            except_empty = NO_EVENTS in lacking and fit.common is None
            rest = ", except those of a site without events." if except_empty else "."
            text = f"No fit of their own: {listed}. Their rows count in the estimate all the same{rest}"
            yield Note("own_fits", text)
        if K == 1 or fit.clusters is not None:
            return
        try:
            compared = self.heterogeneity
        except NotAvailableError as error:
            yield Note("heterogeneity", f"The sites are not compared: {error}")
            return
        if compared.joint.df and compared.joint.pvalue < DIFFER:
            yield Note(
                "heterogeneity",
                f"The sites differ: score test of equal coefficients {compared.joint}, p "
                f"{_p(compared.joint.pvalue)}. Each coefficient is an average over sites: .heterogeneity.",
                "warning",
            )


def _baseline_words(fit: CoxFit) -> str:
    if fit.common is None:
        return "one for each site" + (" and stratum" if fit.request.strata else "")
    plural = "s" if len(fit.common.edges) > 1 else ""
    each = ", one for each stratum" if fit.request.strata else ""
    return f"common, {len(fit.common.edges)} interval{plural}{each}"


def _common_notes(common: CommonFit) -> Iterator[Note]:
    J, requested = len(common.edges), common.requested
    if requested > J:
        yield Note(
            "merged_intervals",
            f"The sites merged {requested} intervals to {J}, so that none has few rows; their ends are "
            f"{human_list(common.edges)}. With few intervals hazard ratios are biased towards one, most of "
            "all with ties='breslow'. Use fewer columns, or baseline='site', which needs no intervals.",
            "warning" if J < FEW_INTERVALS else "info",
        )
    by_stratum = common.at.events[0].reshape(-1, J).sum(axis=1)
    combinations = product(*common.request.stratum_levels)
    empty = [":".join(map(str, one)) for one, d in zip(combinations, by_stratum, strict=True) if d == 0.0]
    if empty:
        yield Note("strata_without_events", f"Strata without events do not count: {', '.join(empty)}.")
    yield Note(
        "common_baseline",
        "All sites are assumed to have the same baseline hazard. Times count as the end of their interval.",
    )


def human_list(edges: Floats) -> str:
    """Return the ends of intervals in words, the first and the last ones of many."""
    words = [f"{edge:g}" for edge in edges.tolist()]
    return ", ".join(words if len(words) <= MOST_ENDS else [*words[:4], "...", words[-1]])


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def _test(tests: pd.DataFrame, name: object) -> str:
    statistic, df, p = tests.loc[[name], ["statistic", "df", "p_value"]].to_numpy(dtype=float)[0].tolist()
    return f"{statistic:.2f} on {df:.0f} df, p {_p(p)}"


class ProportionalHazardsTest(Report):
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

    def __init__(self, table: pd.DataFrame, transform: str, ties: str) -> None:
        self._table, self.transform, self._ties = table, transform, ties

    def tidy(self) -> pd.DataFrame:
        """One row per term, and one for all: ``term``, ``statistic``, ``df``, ``p_value``."""
        return self._table.copy()

    def _glance(self) -> Mapping[str, float]:
        last = self._table.iloc[-1]
        return {
            "statistic": float(last["statistic"]),
            "df": int(last["df"]),
            "p_value": float(last["p_value"]),
        }

    def _sheets(self) -> tuple[Sheet, ...]:
        rows = tuple(
            (str(term), number(statistic), str(df), number(p, 3) if p >= 0.001 else "< 0.001")
            for term, statistic, df, p in self._table.itertuples(index=False)
        )
        title = f"Proportional hazards: score test of x g(t), g = {self.transform}"
        return (Sheet(("", "chi2", "df", "P>chi2"), rows, "lrrr", (WIDTH - 39, 12, 12, 12), title),)

    def _summary_notes(self) -> Iterator[Note]:
        if float(self._table["p_value"].iloc[-1]) < DIFFER:
            yield Note(
                "not_proportional",
                "Coefficients change with time: a hazard ratio of the fit is an average over the times of "
                "the events. Let the column define strata, or let its effect change with time.",
                "warning",
            )

    def __repr__(self) -> str:
        return f"<Proportional hazards: {_test(self._table, len(self._table) - 1)}; see .summary()>"
