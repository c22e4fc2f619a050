"""Results of a vertical generalized linear model: path, selection, refit, prediction, summary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import ModelError, NotAvailableError
from fedstat.federation.audit.ledger import Ledger
from fedstat.inference.estimate import INTERCEPT, Estimate, LedgerLike
from fedstat.inference.results import FederatedResults
from fedstat.inference.summary import SummaryContent, build_summary
from fedstat.inference.tables import SheetSummary, number
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.saved import SavedLedger, Serializable
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vglm.em_fit import MissingBlockTests
from fedstat.models.vglm.notes import fit_notes
from fedstat.models.vglm.outcome import (
    SPENT,
    Selection,
    SelectionOutcome,
    column_means,
    make_debiased,
    make_estimate,
    make_refit,
    mean_predictors,
)
from fedstat.models.vglm.plots import SelectionPlots
from fedstat.models.vglm.prediction import Predictor, SelectionPredictions
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Claims of standard errors after a selection, and results that make one claim.

MISSED, CALLED, APART_MISSED, APART_CALLED = 0.12, 0.54, 0.06, 0.07
"""Intervals that miss and null columns that are rejected, after BIC and by a split: vignette, simulation."""
SIMULATED_CLAIM = (
    " Simulated with 200 entities and 30 skewed columns, of which ten have effects of .05 to 1 residual "
    f"standard deviations: {MISSED:.2f} of the 95 % intervals after BIC missed (false coverage rate), and "
    f"{CALLED:.2f} of the selected columns without an effect had a p-value below .05; with inference='split' "
    f"{APART_MISSED:.2f} and {APART_CALLED:.2f}."
)
CONDITIONAL_CLAIM = (
    "Conditional on selection: standard errors, tests and intervals take the selected columns as given. They "
    "ignore the search among columns, which is harmless only where no true coefficient is near zero. "
    "fit(inference='debiased') and fit(lam=0) have intervals of all columns that do not depend on a "
    "selection, fit(inference='split') those of selected columns on other entities." + SIMULATED_CLAIM
)
DEBIASED_CLAIM = (
    "Debiased: a lasso tuned for prediction (smallest AIC), and one step of Newton with the nodewise lasso's "
    "inverse of the information. Intervals hold for every column by itself, selected or not, near zero or "
    "not, as the number of entities grows, if the model with all columns and its variance are right. They "
    "are not adjusted for the number of columns, and ignore the tuning of the lasso."
)
SPLIT_CLAIM = (
    "Sample splitting: a random half of the entities selected the columns, the other half estimated. "
    "Intervals are conditional on these columns: they are for the coefficients of the model with these "
    "alone, which are those of the model with all columns only where none that matters was left out. Another "
    "split would select otherwise; fit(inference='split', splits=50, folds=10) looks at many (normal family)."
    + SIMULATED_CLAIM
)
COVARIANCES = {"debiased": "debiased", "split": "observed, other half"}
TITLES = {
    "conditional": ", conditional on selection",
    "debiased": ", debiased: all columns, whatever is selected",
    "split": ", sample splitting: selected in one half, estimated in the other",
}
CLAIMS = {"conditional": CONDITIONAL_CLAIM, "debiased": DEBIASED_CLAIM, "split": SPLIT_CLAIM}


class PostSelectionResults(FederatedResults):
    """Other estimates of a fit that selected: its link, and the deviations of its columns."""

    parent: FederatedResults | None = None

    def _link(self) -> DistributionSpec | None:
        return None if self.parent is None else self.parent._link()

    def _deviations(self) -> pd.Series:
        return super()._deviations() if self.parent is None else self.parent._deviations()


class RefitResults(PostSelectionResults):
    """Maximum likelihood on the selected columns; inference is conditional on their selection.

    `parent` is the fit that selected the columns.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_selection(300, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> refit = fs.VerticalGLM.from_formula("y ~ .", partition).fit(n_lambdas=5).refit
    >>> refit.method_name, refit.model_name
    ('maximum likelihood', 'Vertical GLM on the selected columns')
    """

    model_name = "Vertical GLM on the selected columns"
    method_name = "maximum likelihood"

    def __init__(self, estimate: Estimate, ledger: LedgerLike | None, claim: str) -> None:
        super().__init__(estimate, ledger)
        self._claim = claim

    def _summary_notes(self) -> list[str]:
        return [*super()._summary_notes(), self._claim]


class DebiasedResults(PostSelectionResults):
    """Debiased (desparsified) estimates of all columns; no claim depends on what was selected.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_selection(300, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> fit = fs.VerticalGLM.from_formula("y ~ .", partition).fit(n_lambdas=5, inference="debiased")
    >>> fit.debiased.bse.shape, fit.debiased.model_name
    ((101,), 'Vertical GLM, all columns')
    """

    model_name = "Vertical GLM, all columns"
    method_name = "debiased lasso"

    def _summary_notes(self) -> list[str]:
        return [*super()._summary_notes(), DEBIASED_CLAIM]


# ----------------------------------------------------------------------------------------------------
# Results of a vertical generalised linear model: path, selection, refit, prediction, summary.


@dataclass(frozen=True, slots=True, eq=False)
class SelectionRecord:
    """What a file of results holds; the estimate is the predictor's."""

    predictor: Predictor
    selection: Selection
    refit: Estimate | None
    debiased: Estimate | None
    notes: tuple[str, ...]
    ledger: SavedLedger | None


class VerticalGLMResults(
    Serializable,
    MissingBlockTests,
    SelectionPlots,
    SelectionPredictions,
    saved_as="fedstat vglm results 3",
    record=SelectionRecord,
):
    """Results of :meth:`fedstat.VerticalGLM.fit`, with statsmodels' names and meanings.

    ``params`` are the penalised estimates, zero for columns that were not selected. With SCAD, MCP or
    without a penalty, ``bse`` and what follows come from the observed information of the selected columns
    at their maximum likelihood estimate; the lasso and the elastic net have these for :attr:`refit` only.

    With ``fit(inference="debiased")``, :attr:`debiased` has estimates and intervals of all columns, and the
    summary shows these; with ``inference="split"``, :attr:`refit` is of the entities that did not select.

    Attributes
    ----------
    selection : Selection

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_selection(300, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> fs.VerticalGLM.from_formula("y ~ .", partition).fit(n_lambdas=8).lam > 0.0
    True
    """

    model_name = "Vertical GLM"

    def __init__(
        self,
        estimate: Estimate,
        ledger: Ledger | None,
        selection: Selection,
        refit: Estimate | None,
        predictor: Predictor,
        notes: list[str],
        model: VerticalModel | None = None,
        debiased: Estimate | None = None,
    ) -> None:
        super().__init__(estimate, ledger)
        self.selection, self._refit, self._predictor = selection, refit, predictor
        self._notes, self._model, self._debiased = notes, model, debiased
        self.method_name = selection.penalty if selection.lam > 0.0 else "maximum likelihood"

    @classmethod
    def _of(cls, model: VerticalModel, outcome: SelectionOutcome, ledger: Ledger) -> VerticalGLMResults:
        """Make results of a fit."""
        selection, response = Selection.of(outcome), model.formula.response
        refit = make_refit(response, outcome)
        estimate = make_estimate(response, outcome, refit)
        layout, means = outcome.layout, mean_predictors(estimate, outcome)
        predictor = Predictor(
            estimate, layout.clients, outcome.distribution, {}, layout.active, means, column_means(outcome)
        )
        results = cls(
            estimate=estimate,
            ledger=ledger,
            selection=selection,
            refit=refit,
            predictor=predictor,
            notes=fit_notes(outcome, ledger),
            model=model,
            debiased=make_debiased(response, outcome),
        )
        results.observed, results.scales = outcome.observed, outcome.units.scale
        results._centres = outcome.units.shift if outcome.observed is None else outcome.observed.means
        return results

    # -- selection -------------------------------------------------------------------------------

    @property
    def lam(self) -> float:
        """The lambda that was chosen."""
        return self.selection.lam

    @property
    def path(self) -> pd.DataFrame:
        """One row per lambda: half the mean deviance, criteria, status, violation of stationarity.

        A fit of ``status`` "solved" has ``kkt``, the violation at its coefficients as a share of lambda_max.
        One "proposed" by a quadratic model of the loss is approximate, has none and has not ``converged``.
        """
        return self.selection.table

    @property
    def path_params(self) -> pd.DataFrame:
        """Coefficients at every lambda; :attr:`path` tells which are solutions."""
        s, index = self.selection, self.path.index
        values = np.column_stack([s.intercepts, s.coefficients])
        return pd.DataFrame(values, index=index, columns=list(self.estimate.names))

    @property
    def refit(self) -> RefitResults:
        """Maximum likelihood on the selected columns.

        Conditional on their selection; with ``inference="split"`` on the entities that did not select.
        """
        if self._refit is None:
            raise NotAvailableError(f"no fit on the selected columns: {SPENT}")
        claim = SPLIT_CLAIM if self.selection.inference == "split" else CONDITIONAL_CLAIM
        found = RefitResults(self._refit, self._ledger, claim)
        found.parent = self
        return found

    @property
    def debiased(self) -> DebiasedResults:
        """Debiased estimates of all columns, whatever was selected.

        References
        ----------
        van de Geer, S., Buehlmann, P., Ritov, Y. and Dezeure, R. (2014). On asymptotically optimal confidence
        regions and tests for high-dimensional models. Annals of Statistics 42, 1166-1202.
        doi:10.1214/14-AOS1221.
        """
        if self._debiased is None:
            raise NotAvailableError("no debiased estimates: fit with inference='debiased'")
        found = DebiasedResults(self._debiased, self._ledger)
        found.parent = self
        return found

    def selection_report(self) -> pd.DataFrame:
        """One row per column: what was selected, when, and what it is worth.

        Returns
        -------
        DataFrame
            ``client``, ``name``, ``term``, ``selected``; ``coef``, the penalised estimate; ``refit``, the
            estimate on the selected columns, with ``std_err``, ``z`` and ``p`` conditional on the selection
            (with ``inference="split"`` on the entities that did not select);
            ``lambda_entry``, the largest lambda of the path at which it is selected, and ``order`` of entry
            from 1; ``frequency``, the share of random halves in which it is selected at the chosen lambda
            (nan without ``draws``). With ``inference="debiased"`` as well ``debiased``,
            ``debiased_std_err`` and ``debiased_p``, which do not depend on the selection; with many splits
            ``split_p``: rejecting those of at most alpha makes any false rejection with probability alpha at
            most, where every half selects all columns that matter.
        """
        # What a selected column is worth comes from the refit, if there is one.
        est, s = self.estimate, self.selection
        frame = pd.DataFrame({"client": est.clients[1:], "name": est.names[1:], "term": est.terms[1:]})
        frame["selected"] = s.coefficients[s.chosen] != 0.0
        frame["coef"] = est.params[1:]
        for label in ("refit", "std_err", "z", "p"):
            frame[label] = np.nan
        if self._refit is not None and self._refit.cov is not None:
            at = pd.Index(self._refit.names[1:]).get_indexer(pd.Index(frame["name"]))
            se = np.sqrt(np.diag(self._refit.cov))[1:]
            here = at >= 0
            frame.loc[here, "refit"] = self._refit.params[1:][at[here]]
            frame.loc[here, "std_err"] = se[at[here]]
            frame["z"] = frame["refit"] / frame["std_err"]
            frame["p"] = 2.0 * stats.norm.sf(frame["z"].abs())
        frame["lambda_entry"] = s.entry
        frame["order"] = frame["lambda_entry"].rank(method="dense", ascending=False)
        frame["frequency"] = np.nan if s.frequencies is None else s.frequencies[s.chosen]
        if s.split_p is not None:
            frame["split_p"] = s.split_p
        if self._debiased is not None:
            found = self.debiased
            frame["debiased"] = found.params.to_numpy()[1:]
            frame["debiased_std_err"] = found.bse.to_numpy()[1:]
            frame["debiased_p"] = found.pvalues.to_numpy()[1:]
        return frame

    def stable(self, threshold: float = 0.9, lam: float | None = None) -> tuple[pd.DataFrame, float]:
        """Columns that a share of random halves selects at some lambda down to `lam`, with an error bound.

        Parameters
        ----------
        threshold : float
            The share, above one half.
        lam : float, optional
            Where the path ends; by default the chosen lambda. The bound wants it chosen beforehand.

        Returns
        -------
        (DataFrame, float)
            ``client``, ``name``, ``frequency``, the largest over these lambdas; and the bound
            ``q^2 / ((2 threshold - 1) p)`` on the expected number of columns among them that have no effect,
            q being the mean number that a half selects at any of these lambdas. It needs columns without
            effect that are exchangeable.

        References
        ----------
        Meinshausen, N. and Buehlmann, P. (2010). Stability selection. Journal of the Royal Statistical
        Society B 72, 417-473, theorem 1.
        """
        s = self.selection
        frequencies = self._frequencies()
        if not 0.5 < threshold <= 1.0:
            raise ModelError(f"stable: expected a threshold in (0.5, 1], received {threshold!r}")
        within = s.lambdas >= (self.lam if lam is None else lam)
        if not within.any():
            raise ModelError(f"stable: expected lam of at most {s.lambdas[0]:g}, received {lam!r}")
        frame = self.selection_report()[["client", "name"]]
        frame["frequency"] = frequencies[within].max(axis=0)
        assert s.numbers is not None
        # Theorem 1: q is over the whole path down to the last lambda, which `numbers` accumulates.
        bound = float(s.numbers[within][-1]) ** 2 / ((2.0 * threshold - 1.0) * frequencies.shape[1])
        return frame[frame["frequency"] >= threshold].reset_index(drop=True), bound

    @property
    def llnull(self) -> float:
        """Log-likelihood of the intercept alone."""
        return self.selection.null

    # -- keeping ---------------------------------------------------------------------------------

    def _to_record(self) -> SelectionRecord:
        """Take the results apart for a file."""
        ledger, predictor = SavedLedger.of(self._ledger), self._with_specs()
        return SelectionRecord(
            predictor, self.selection, self._refit, self._debiased, tuple(self._notes), ledger
        )

    @classmethod
    def _of_record(cls, record: SelectionRecord) -> VerticalGLMResults:
        """Rebuild results that have no partition."""
        ledger = None if record.ledger is None else record.ledger.restore()
        return cls(
            record.predictor.estimate,
            ledger,
            record.selection,
            record.refit,
            record.predictor,
            list(record.notes),
            debiased=record.debiased,
        )

    # -- hooks -----------------------------------------------------------------------------------

    def summary(self, alpha: float = 0.05) -> SheetSummary:
        """Estimate, federation, selected columns by institution, notes.

        The coefficients are those of the selected columns with standard errors: the estimates themselves for
        SCAD, MCP and no penalty, those of :attr:`refit` for the lasso and the elastic net, and with
        ``inference="split"``; with ``inference="debiased"`` those of all columns. The title says which.

        Parameters
        ----------
        alpha : float
            One minus the level of the intervals.
        """
        own = self.estimate.cov is not None or self._refit is None
        if self._debiased is not None:
            frame = self.debiased.tidy(1.0 - alpha)
        else:
            frame = self.tidy(1.0 - alpha) if own else self.refit.tidy(1.0 - alpha)
            frame = frame[(frame["estimate"] != 0.0) | (frame["name"] == INTERCEPT)]
        title = f"{self.model_name} results"
        if self.lam > 0.0 or self._debiased is not None:
            title += TITLES[self.selection.inference]
        if not own and self.selection.inference == "conditional":
            title += " (refit on the selected columns)"
        return build_summary(
            SummaryContent(
                title=title,
                left=self._summary_left(),
                right=self._summary_right(),
                coefficients=frame,
                inference=self._refit is not None or self._debiased is not None,
                alpha=alpha,
                blocks=self.estimate.blocks,
                kinds=None if self._ledger is None else self._ledger.kinds_by_client(),
                notes=self._summary_notes(),
                alarm=self._alarm(),
            )
        )

    def _summary_left(self) -> list[tuple[str, str]]:
        rows, s = dict(super()._summary_left()), self.selection
        if self.estimate.rsquared is None:
            del rows["R-squared"]
        rows["Model Family"] = s.family
        if s.inference != "conditional":
            rows["Covariance Type"] = COVARIANCES[s.inference]
        if self.lam > 0.0:
            rows["Selected"] = f"{np.count_nonzero(s.coefficients[s.chosen])} of {s.coefficients.shape[1]}"
            rows["Lambda"] = number(self.lam)
            rows["Chosen by"] = s.select if len(s.lambdas) > 1 else "given"
        if not s.solved.all():
            rows["Lambdas solved"] = f"{s.solved.sum()} of {len(s.lambdas)}"
        rows["KKT violation"] = f"{s.kkt[s.chosen]:.1e} of lambda_max"
        return list(rows.items())

    def _summary_notes(self) -> list[str]:
        claim = self.selection.inference
        conditional = [] if claim == "conditional" and self.lam == 0.0 else [CLAIMS[claim]]
        base = super()._summary_notes()
        # Columns that were not selected have no standard error, and need no sentence each.
        base = [note for note in base if not note.startswith("The covariance does not determine")]
        if claim != "conditional":
            base = [note for note in base if not note.startswith("No standard errors")]
        return [*base, *conditional, *self._notes]

    def _frequencies(self) -> Floats:
        if self.selection.frequencies is None:
            raise NotAvailableError("no selection frequencies: fit with draws=50 and folds=10, or the like")
        return self.selection.frequencies
