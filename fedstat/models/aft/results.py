"""Results of an accelerated failure time model: time ratios, predictions, tests, and the sites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.genmod import families

from fedstat.codec import to_json
from fedstat.errors import ModelError, NotAvailableError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.effects import Means
from fedstat.inference.estimate import INTERCEPT, takes_alpha
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.predicted_survival import PredictedSurvival, survival_table
from fedstat.inference.survival_evaluation import SurvivalEvaluation, concordance_index
from fedstat.inference.tables import WIDTH, Sheet, exponentials, number, two_digits, yes_or_no
from fedstat.models.aft.protocol import LOG_SCALE, AFTFit, sum_effects, with_scale
from fedstat.models.aft.steps import FAMILY, MOST_TIMES, AFTRequest, TimesRequest, time_jet
from fedstat.models.checks import HeldRows, check_choice, check_level
from fedstat.models.horizontal.blocks import listed_times
from fedstat.models.horizontal.clusters import corrected_fit
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.notes import NOTES as OF_ROWS
from fedstat.models.horizontal.notes import TWICE_TOO_SMALL, few_events
from fedstat.models.horizontal.prediction import GLMPrediction
from fedstat.models.horizontal.response import RowsResponse, check_groups, divided
from fedstat.models.horizontal.results import OFFSET, RowsBasis, rows_estimate, weight_line
from fedstat.models.horizontal.site_results import (
    SiteFitsResults,
    chi_squared,
    clusters_line,
    tests_line,
)
from fedstat.models.horizontal.time_evaluation import evaluate_survival
from fedstat.models.margins import Change, MeanJet
from fedstat.models.results import EstimateRecord
from fedstat.models.rows.predictors import PredictorResults
from fedstat.spline_names import short_names
from fedstat.typing import Floats

POINTS, LAST = 100, 0.05
"""Times of a curve by default, up to the time at which the highest of them falls to a share."""
NOTES = Catalogue(
    info={
        "independent_rows": "The likelihood ratio test supposes independent rows. Wald tests allow for "
        "clusters by '{groups}'.",
        "distribution": "The distribution of times is assumed to be {words}, with one scale. Compare the AIC "
        "of other distributions.",
    },
)


def _ratio_line(result: AFTResults) -> str:
    df = result.estimate.df_model
    lr = 2.0 * (result.llf - result.llnull)
    return chi_squared(lr, df, float(stats.chi2.sf(lr, df))) if df else ""


def _scale_line(result: AFTResults) -> str:
    if LOG_SCALE not in result.estimate.names:
        return "1 (fixed)"
    low, high = np.exp(result.conf_int().loc[LOG_SCALE])
    return f"{number(result.scale)} ({number(low)} to {number(high)})"


def _concordance_line(result: AFTResults) -> str:
    return f"{result.concordance:.3f} (se {result.concordance_se:.3f}) by site"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AFTRecord(EstimateRecord):
    """What a file of results holds."""

    fit: AFTFit
    basis: RowsBasis


class AFTResults(PredictorResults, saved_as="fedstat aft results 2", record=AFTRecord):
    """Results of :meth:`fedstat.FederatedAFT.fit`; coefficients are logarithms of time ratios.

    `params` end with ``log(scale)``, the logarithm of sigma, as in R's ``survreg``, unless sigma is one.

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
    >>> fit = fs.FederatedAFT.from_formula("Surv(months, died) ~ age + C(stage)", partition).fit()
    >>> fit.events, fit.converged, round(fit.scale, 2), fit.dist, fit.llnull < fit.llf
    (413, True, 0.78, 'weibull', True)
    >>> fit.predict(table.head(2)).round(1).tolist()
    [34.5, 37.4]
    >>> fit.heterogeneity.joint.df, fit.site_estimates.shape, fit.iterations
    (15, (4, 5), 6)
    >>> round(fit.concordance, 2), round(fit.concordance_se, 3)
    (0.66, 0.016)
    """

    evaluation_ledger: Ledger | None = None
    _record: AFTRecord
    _exponentiates = True
    _joint_name = "score test of equal parameters"

    @classmethod
    def _of(cls, model: HorizontalModel, fit: AFTFit, cov_type: str, ledger: Ledger) -> Self:
        """Make results of a fit."""
        design, request, clustering = fit.design, fit.request, fit.clustering
        problem = "" if fit.converged else f"not converged after {len(fit.trace)} evaluations"
        shown = replace(design, names=fit.names, term_names=with_scale(design.term_names, request))
        scale = 1.0 if request.lifetimes.fixed else float(np.exp(fit.params[-1]))
        estimate = rows_estimate(
            model,
            shown,
            params=fit.params,
            cov=fit.cov,
            converged=fit.converged,
            convergence=problem or f"converged after {len(fit.trace)} evaluations",
            df=clustering.df if clustering and clustering.corrected else None,
            cov_type=cov_type,
            scale=scale,
            llf=fit.total.loglik,
            n_parameters=len(fit.gamma),
            reasons={"rsquared": "a model of times has a likelihood ratio test instead"},
        )
        estimate = replace(estimate, df_model=float(len(design.names) - 1))
        return cls(AFTRecord(estimate=estimate, fit=fit, basis=RowsBasis.of(model)), ledger, model)

    @property
    def dist(self) -> str:
        """Distribution of the times."""
        return self._record.fit.request.distribution

    @property
    def events(self) -> int:
        """Rows with an event, times their frequency weights."""
        return self._record.fit.events

    @property
    def concordance(self) -> float:
        """Share of the pairs of rows of one site whose events come in the predicted order."""
        return concordance_index(self._record.fit.pairs, self._record.fit.squares)[0]

    @property
    def concordance_se(self) -> float:
        """Standard error of :attr:`concordance`, by the infinitesimal jackknife as in R's survival."""
        return concordance_index(self._record.fit.pairs, self._record.fit.squares)[1]

    # -- ratios and predictions --------------------------------------------------------------------

    @takes_alpha
    def hazard_ratios(self, alpha: float = 0.05) -> pd.DataFrame:
        """Return hazard ratios exp(-b / sigma) with intervals of level ``1 - alpha``, by the delta method.

        Parameters
        ----------
        alpha : float

        Returns
        -------
        DataFrame
            ``hazard_ratio``, ``conf_low``, ``conf_high``, by coefficient, without constants.

        Raises
        ------
        NotAvailableError
            Hazards are not proportional with this distribution.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedAFT.from_formula("Surv(months, died) ~ age", partition).fit()
        >>> fit.hazard_ratios().round(2).loc["age"].tolist()
        [1.04, 1.03, 1.05]
        """
        fit, p = self._record.fit, len(self._record.fit.design.names)
        if not fit.request.lifetimes.proportional:
            raise NotAvailableError(
                f"hazard_ratios: hazards are not proportional with {self.dist!r}; ratios() has time ratios",
                remedy=Remedy("from_formula(..., distribution='weibull').fit()", "They are with {arguments}"),
            )
        beta = self.estimate.params[:p] / self.scale
        J = np.zeros((p, len(fit.gamma)))
        J[:, :p] = -np.eye(p) / self.scale
        J[:, p:] = beta[:, None]
        se = np.sqrt(np.diag(J @ self._cov() @ J.T))
        half = self._combined_distribution.isf(alpha / 2.0) * se
        frame = pd.DataFrame(
            {"hazard_ratio": -beta, "conf_low": -beta - half, "conf_high": -beta + half},
            index=list(fit.design.names),
        )
        return pd.DataFrame(exponentials(frame.drop(index=INTERCEPT)))

    def predict(
        self,
        exog: HeldRows | None = None,
        which: Literal["quantile", "mean", "linear"] = "quantile",
        p: float = 0.5,
    ) -> pd.Series:
        """Predict times of rows that the caller holds.

        Parameters
        ----------
        exog : table of pandas, polars or pyarrow, or dict of columns
            With the columns of the model, and of its offset; rows that lack one give NaN.
        which : {"quantile", "mean", "linear"}
            A quantile of the time, by default the median; its mean; or x'b.
        p : float
            Probability of an event up to the quantile.

        Returns
        -------
        Series

        Raises
        ------
        DesignError
            A column is absent, of another type, or holds a level that the fit did not know.
        NotAvailableError
            No rows are given: those of the fit stay at the sites.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedAFT.from_formula("Surv(months, died) ~ age", partition).fit()
        >>> fit.predict({"age": [50, 70]}, p=0.25).round(1).tolist()
        [24.2, 12.4]
        """
        moved, _ = self._log_shift(which, p)
        linear = self._predicted(exog, self._beta).linear
        return linear if which == "linear" else exponentials(linear + moved)

    def get_prediction(
        self,
        exog: HeldRows | None = None,
        which: Literal["quantile", "mean"] = "quantile",
        p: float = 0.5,
    ) -> GLMPrediction:
        """Predict times with standard errors and intervals, which are those of their logarithms.

        Parameters
        ----------
        exog, which, p
            As in :meth:`predict`.

        Returns
        -------
        GLMPrediction
            Of quantiles or means, and not of new times; ``mean`` is the prediction.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedAFT.from_formula("Surv(months, died) ~ age", partition).fit()
        >>> fit.get_prediction({"age": [50]}).summary_frame().round(1).to_numpy().tolist()
        [[49.9, 3.8, 43.0, 57.8]]
        """
        check_choice("which", which, ("quantile", "mean"))
        moved, slope = self._log_shift(which, p)
        found, cov = self._predicted(exog, self._beta), self._cov()
        D = np.column_stack([found.X, np.full((len(found.X), len(cov) - found.X.shape[1]), slope)])
        error = replace(found, X=D).standard_errors(cov)
        return GLMPrediction(found.linear + moved, error, families.Poisson(), self._combined_distribution)

    @takes_alpha
    def survival_function(
        self,
        frame: HeldRows,
        times: Sequence[float] | Floats | None = None,
        *,
        alpha: float = 0.05,
    ) -> PredictedSurvival:
        """Predict survival of rows that the caller holds, with intervals.

        The intervals are symmetric on the scale of ``(log t - x'b) / sigma``, which for Weibull times is the
        logarithm of the cumulative hazard.

        Parameters
        ----------
        frame : DataFrame
            With the columns of the model; its index names the curves.
        times : sequence of float, optional
            Ascending; by default 100 times up to the one at which the highest curve falls to 0.05.
        alpha : float
            One minus the level of the intervals.

        Returns
        -------
        PredictedSurvival
            ``tidy()``, ``wide()``, ``plot()``.

        Raises
        ------
        ModelError
            A row lacks a column of the model, or the times do not ascend.

        Examples
        --------
        >>> import fedstat as fs, pandas as pd
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedAFT.from_formula("Surv(months, died) ~ age", partition).fit()
        >>> fit.survival_function(pd.DataFrame({"age": [60]}), [12, 24]).tidy().round(3)
           row  time  survival  conf_low  conf_high
        0    0  12.0     0.832     0.808      0.852
        1    0  24.0     0.652     0.621      0.681
        """
        fit, frame = self._record.fit, self._held(frame)
        found = self._predicted(frame, self._beta)
        if not found.complete.all() or found.linear.isna().any():
            raise ModelError("survival_function: expected rows without missing values")
        eta, lifetimes = found.linear.to_numpy(), fit.request.lifetimes
        if times is None:
            last = float(np.exp(eta.max() + self.scale * lifetimes.quantile(1.0 - LAST)))
            times = last * np.arange(1.0, POINTS + 1.0) / POINTS
        points = listed_times("times", np.atleast_1d(times))
        z = (np.log(points) - eta[:, None]) / self.scale
        X, q = found.X, len(fit.gamma)
        # Derivatives of z by the coefficients, and by log sigma if it is estimated.
        slopes = np.zeros((*z.shape, q))
        slopes[..., : X.shape[1]] = -X[:, None, :] / self.scale
        slopes[..., X.shape[1] :] = -z[..., None]
        error = np.sqrt(np.einsum("mjp,pq,mjq->mj", slopes, self._cov(), slopes))
        half = self._combined_distribution.isf(alpha / 2.0) * error
        shares = (lifetimes.survival(one)[0] for one in (z, z + half, z - half))
        table = survival_table(frame.index, points, *shares)
        note = f"The distribution of times is assumed to be {lifetimes.words}, with one scale for all sites."
        return PredictedSurvival(table, alpha=alpha, steps=False, note=note, sources=(self,))

    def evaluate(
        self, partition: ClientPartition | None = None, *, times: Sequence[float] | Floats
    ) -> SurvivalEvaluation:
        """Evaluate predicted survival at given times: AUC, Brier score and calibration.

        Sites count as for :meth:`CoxResults.evaluate`; bins are those of minus x'b over sigma.

        Parameters
        ----------
        partition : ClientPartition, optional
            New rows; by default those of the fit, on which the figures are too good.
        times : sequence of float
            Ascending. Between two of them, every site needs no rows or enough rows with the event and
            without.

        Returns
        -------
        SurvivalEvaluation
            ``auc``, ``brier``, ``integrated_brier``, ``calibration(time)``, ``plot_auc()``,
            ``plot_calibration(time)``.

        Raises
        ------
        ModelError
            The times do not ascend.
        NotAvailableError
            Rows enter late, or no row is followed for longer than the times; or the results were read from a
            file, and there is no partition.
        PolicyError
            A site refuses.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedAFT.from_formula("Surv(months, died) ~ age", partition).fit()
        >>> fit.evaluate(times=[12, 24]).auc.round(2).tolist(), round(fit.concordance, 2)
        ([0.61, 0.65], 0.61)
        """
        points, fit, agreement = listed_times("times", times), self._record.fit, self.basis.agreement
        if agreement.question.response.count(",") > 1:
            raise NotAvailableError("evaluate: it takes models without late entry")
        partition = self._partition_for("evaluate", partition)
        arrays = {
            "beta": self._beta,
            "center": np.array(float(fit.design.mean @ self._beta)),
            "scale": np.array(self.scale),
        }
        found, self.evaluation_ledger = evaluate_survival(
            (FAMILY, "AFT"), agreement, arrays, points, partition, to_json(AFTRequest(self.dist))
        )
        own = self._model is not None and partition is self._model.partition
        return replace(found, own_rows=own)

    def _response(self, call: str, times: Sequence[float] | Floats | None = None) -> RowsResponse:
        fit = self._record.fit
        points = (
            () if times is None else tuple(float(one) for one in listed_times("times", np.atleast_1d(times)))
        )
        p, lifetimes = len(fit.design.names), fit.request.lifetimes
        B = (fit.map @ fit.params).reshape(-1, p)

        def jet(X: Floats, offset: Floats) -> MeanJet:
            return time_jet(lifetimes, B, X @ B[0] + offset, points)

        def sums(call: str, changes: Sequence[Change]) -> Means:
            if len(points) > MOST_TIMES:
                raise ModelError(
                    f"{call}: times: sites average survival at up to {MOST_TIMES} times, received "
                    f"{len(points):,}"
                )
            request = TimesRequest(tuple(changes), points)
            found = self._after_fit(call, FAMILY, lambda session: sum_effects(session, fit, request))
            assert found.counts is not None
            check_groups(changes, found.counts)
            slopes = found.slopes.reshape(*found.effects.shape, -1) @ fit.map
            return divided(found.effects, slopes, found.counts, fit.weights)

        return RowsResponse(
            agreement=self.basis.agreement,
            design=fit.design,
            B=B,
            map=fit.map,
            jet=jet,
            sums=sums,
            cov=self._cov(),
            df=None if self._df is None else float(np.min(self._df)),
            mean_words="survival" if points else "median time",
            outcomes=points or ("",),
            heading="time",
        )

    @property
    def _beta(self) -> Floats:
        return self.estimate.params[: len(self._record.fit.design.names)]

    def _log_shift(self, which: str, p: float) -> tuple[float, float]:
        """Return what is added to x'b for the logarithm of a time, and its derivative by log sigma."""
        check_choice("which", which, ("quantile", "mean", "linear"))
        check_level("p", p)
        lifetimes = self._record.fit.request.lifetimes
        if which == "mean":
            moved, slope = lifetimes.mean(self.scale)
            return moved, self.scale * slope
        moved = self.scale * lifetimes.quantile(p) if which == "quantile" else 0.0
        return moved, moved

    def _effect_part(self) -> tuple[Floats, Floats]:
        p = len(self._record.fit.design.names)
        return self._beta, self._cov()[:p, :p]

    def _deviations(self) -> pd.Series:
        design = self._record.fit.design
        return pd.Series(design.spread, index=list(design.names))

    def _constants(self) -> tuple[str, ...]:
        return (INTERCEPT, LOG_SCALE)

    # -- summary -----------------------------------------------------------------------------------

    def _effect_words(self) -> tuple[str, str, str]:
        return "effect on the log time", "time ratio", "Time ratios"

    _SUMMARY = (
        ("Dep. Variable", "estimate.response", ""),
        ("Model", "model_name", ""),
        ("Distribution", "_fit.request.lifetimes.words", ""),
        ("No. Observations", "nobs", ",d"),
        ("Events", "events", ",d"),
        weight_line("Freq. Weights", "freq_weights"),
        weight_line("Case Weights", "var_weights"),
        OFFSET,
        ("Df Model", "estimate.df_model", "g"),
        ("Scale", "", _scale_line),
        ("Log-Likelihood", "llf", two_digits),
        ("LL-Null", "llnull", two_digits),
        ("LR Test", "", _ratio_line),
        ("AIC", "aic", two_digits),
        ("BIC", "bic", two_digits),
        ("Concordance", "", _concordance_line),
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
        if self.estimate.df_model:
            yield self._ratio_sheet(alpha)
        yield from sheets[2:]

    def _ratio_sheet(self, alpha: float) -> Sheet:
        frame, width = self.ratios(alpha), 14
        labels = ("", "time ratio", f"[{alpha / 2:.4g}", f"{1 - alpha / 2:.4g}]")
        names = short_names(list(frame.index))
        rows = tuple(
            (name, *map(number, values))
            for name, values in zip(names, frame.to_numpy().tolist(), strict=True)
        )
        return Sheet(labels, rows, "lrrr", (WIDTH - 3 * (width + 1), *[width] * 3))

    def _summary_notes(self) -> Iterator[Note]:
        yield from super()._summary_notes()
        fit, est = self._record.fit, self.estimate
        yield from few_events(fit.events, len(fit.gamma))
        if fit.clustering is not None:
            yield from fit.clustering.notes(est.names, est.terms, corrected_fit(correction="CR2"))
            for shared in fit.shared:
                yield from shared.note(len(est.blocks), "clusters", TWICE_TOO_SMALL)
            yield NOTES.note("independent_rows", groups=fit.clustering.groups)
        yield from self._left_out_note()
        yield OF_ROWS.note("censoring")
        yield NOTES.note("distribution", words=fit.request.lifetimes.words)
        yield from self._masking_note()
        yield from self._own_fits_note()
        if fit.clustering is None:
            yield from self._difference_note()
