"""Results of a vertical generalized linear model: path, selection, refit, prediction, summary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import ModelError, NotAvailableError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.inference.estimate import INTERCEPT, Estimate, LedgerLike, takes_alpha
from fedstat.inference.notes import Note
from fedstat.inference.summary import Shown, coefficient_sheet, critical_notes
from fedstat.inference.tables import Sheet, SheetSummary, number, two_digits, yes_or_no
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.results import CoefficientResults, EstimateRecord
from fedstat.models.vertical.exchange.patterns import role_notes
from fedstat.models.vertical.joint_normal.assumption_tests import AssumptionTests
from fedstat.models.vertical.joint_normal.fit import JointNormalFit, fit_joint_model
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vglm.em_fit import MissingBlocksFit
from fedstat.models.vglm.notes import claims_of, fit_notes
from fedstat.models.vglm.outcome import (
    SHRUNKEN,
    SPENT,
    Selection,
    SelectionOutcome,
    column_means,
    make_debiased,
    make_estimate,
    make_refit,
    mean_predictors,
)
from fedstat.models.vglm.plots import plot_criterion, plot_path, plot_stability
from fedstat.models.vglm.prediction import Predictor, SelectionPredictions
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# ----------------------------------------------------------------------------------------------------
# Statements on standard errors after a selection, and results with one such statement.

COVARIANCES = {"debiased": "debiased", "split": "observed, other half", "every": "observed"}
METHODS = {"debiased": "debiased lasso", "every": "maximum likelihood"}
TITLES = {
    "conditional": ", naive intervals, conditional on selection",
    "debiased": ", debiased: all columns, for any selection",
    "split": ", sample splitting: selected in one half, estimated in the other",
    "every": ", without a penalty: all columns, for any selection",
}


class RefitResults(CoefficientResults, saved_as="fedstat vglm refit 1", record=EstimateRecord):
    """Maximum likelihood on the selected columns; inference is conditional on their selection.

    `parent` is the fit that selected the columns; results that were read from a file have none.

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
    parent: CoefficientResults | None = None

    def _link(self) -> DistributionSpec | None:
        return None if self.parent is None else self.parent._link()

    def _deviations(self) -> pd.Series:
        return super()._deviations() if self.parent is None else self.parent._deviations()


class DebiasedResults(RefitResults, saved_as="fedstat vglm debiased 1", record=EstimateRecord):
    """Debiased (desparsified) estimates of all columns; no statement depends on the selection.

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


# ----------------------------------------------------------------------------------------------------
# Results of a vertical generalized linear model: path, selection, refit, prediction, summary.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SelectionRecord:
    """The contents of a saved file; the estimate is the predictor's."""

    notes: tuple[Note, ...]
    predictor: Predictor
    selection: Selection
    refit: Estimate | None
    debiased: Estimate | None

    @property
    def estimate(self) -> Estimate:
        """Penalized estimates."""
        return self.predictor.estimate


def _covariance_line(result: VerticalGLMResults) -> str:
    return COVARIANCES.get(result.selection.inference, result._covariance_words)


def _selected_line(result: VerticalGLMResults) -> str:
    coefficients = result.selection.coefficients[result.selection.chosen]
    shown = result.lam > 0.0 and result._selects
    return f"{np.count_nonzero(coefficients)} of {len(coefficients)}" if shown else ""


def _chosen_line(result: VerticalGLMResults) -> str:
    selection = result.selection
    if result.lam == 0.0:
        return ""
    return selection.select if len(selection.lambdas) > 1 else "given"


class VerticalGLMResults(
    AssumptionTests,
    SelectionPredictions,
    saved_as="fedstat vglm results 4",
    record=SelectionRecord,
):
    """Results of :meth:`fedstat.VerticalGLM.fit`, with statsmodels' names and meanings.

    ``params`` are the penalized estimates, zero for columns that were not selected. With SCAD, MCP or without
    a penalty, ``bse`` and what follows come from the observed information of the selected columns at their
    maximum likelihood estimate; the lasso and the elastic net have these for :attr:`refit` only.

    With ``inference="debiased"``, the default of a normal family, :attr:`debiased` has estimates and
    intervals of all columns, and the summary shows these; with ``inference="split"``, :attr:`refit` uses the
    entities that did not select.

    Attributes
    ----------
    observed : MissingBlocksFit or None
        Missing blocks, for a fit in this session with missing="em".
    scales : array or None
        Standard deviations of the columns, (p,), for a fit in this session.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_selection(300, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> fs.VerticalGLM.from_formula("y ~ .", partition).fit(n_lambdas=8).lam > 0.0
    True
    >>> data = fs.datasets.make_blocks(600, missing=[0.0, 0.0, 0.0], seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> model = fs.VerticalGLM.from_formula("y ~ .", partition)
    >>> fit = model.fit(n_lambdas=8, folds=6, draws=3, inference="debiased")
    >>> fit.selection.inference
    'debiased'
    >>> fit.lam > 0.0, fit.path.columns[:3].tolist(), fit.path_params.shape
    (True, ['loss', 'df', 'aic'], (8, 8))
    >>> len(fit.selection_report()), fit.refit.nobs, fit.debiased.nobs, fit.llnull < fit.llf
    (7, 600, 600, True)
    >>> fit.stable(0.9)[0].columns.tolist()
    ['site', 'term', 'frequency']
    >>> all(ax.has_data() for ax in (fit.plot_path(), fit.plot_criterion(), fit.plot_stability()))
    True
    >>> fit.predict(partition).shape, fit.get_prediction(partition).summary_frame().shape
    ((600,), (600, 4))
    >>> evaluation = fit.evaluate(partition)
    >>> evaluation.to_frame().columns[-2:].tolist(), len(evaluation.accuracy.rsquared)
    (['rmse', 'rsquared'], 2)
    """

    model_name = "Vertical GLM"

    _record: SelectionRecord
    observed: MissingBlocksFit | None = None
    scales: Floats | None = None
    """Standard deviations of the columns, (p,); None for results that were read from a file."""

    def __init__(
        self, record: SelectionRecord, ledger: LedgerLike | None = None, model: VerticalModel | None = None
    ) -> None:
        super().__init__(record, ledger, model)
        self.method_name = self.selection.penalty if self.lam > 0.0 else "maximum likelihood"

    @property
    def selection(self) -> Selection:
        """The path of solutions, and the selection."""
        return self._record.selection

    @classmethod
    def _of(
        cls,
        model: VerticalModel,
        outcome: SelectionOutcome,
        ledger: Ledger,
        every: Estimate | None = None,
        *,
        sources: Iterable[object],
    ) -> VerticalGLMResults:
        """Make results of a fit, with unpenalized estimates of `every` column if these are known.

        Critical notes of the `sources`, other fits from which it was made, are kept in its file.
        """
        selection, response = Selection.of(outcome), model.formula.response
        if every is not None:
            selection = replace(selection, inference="every")
        refit = make_refit(response, outcome)
        estimate = make_estimate(response, outcome, refit)
        layout, means = outcome.layout, mean_predictors(estimate, outcome)
        predictor = Predictor(
            estimate, layout.sites, outcome.distribution, {}, layout.active, means, column_means(outcome)
        )
        debiased = every or make_debiased(response, outcome)
        claims = claims_of(selection.inference, missing=outcome.observed is not None)
        inherited = [note for source in sources for note in critical_notes(source)]
        alone = selection.lam == 0.0 or selection.penalty == "ridge" or bool(outcome.fitted.unbounded)
        if selection.inference == "conditional" and alone:
            claims = ()
        record = SelectionRecord(
            notes=(*inherited, *claims, *role_notes(model._roles), *fit_notes(outcome, ledger)),
            predictor=predictor,
            selection=selection,
            refit=refit,
            debiased=debiased,
        )
        results = cls(record, ledger, model)
        results.observed, results.scales = outcome.observed, outcome.units.scale
        results._centers = outcome.units.shift if outcome.observed is None else outcome.observed.means
        return results

    # -- selection -------------------------------------------------------------------------------

    @property
    def lam(self) -> float:
        """The chosen lambda."""
        return self.selection.lam

    @property
    def path(self) -> pd.DataFrame:
        """One row per lambda: half the mean deviance, criteria, status, violation of stationarity.

        A fit of ``status`` "solved" has ``kkt``, the violation as a share of the lasso's lambda_max.
        A fit "proposed" by a quadratic model of the loss is approximate, has no ``kkt``, and has not
        ``converged``. Lambdas with the same number in ``fit`` share one fit.
        """
        return self.selection.table

    @property
    def path_params(self) -> pd.DataFrame:
        """Coefficients at every lambda; :attr:`path` states which are solutions."""
        s, index = self.selection, self.path.index
        values = np.column_stack([s.intercepts, s.coefficients])
        return pd.DataFrame(values, index=index, columns=list(self.estimate.names))

    @property
    def refit(self) -> RefitResults:
        """Maximum likelihood on the selected columns.

        Its intervals are naive (conditional on the selected model); with ``inference="split"`` they are
        those of the entities that did not select.
        """
        if self._record.refit is None:
            spent = SPENT if self._selects else SHRUNKEN
            reason = next((str(note) for note in self._record.notes if note.kind == "no_refit"), spent)
            raise NotAvailableError(f"no fit on the selected columns: {reason}")
        inference = self.selection.inference
        if inference == "conditional":  # as stated of the fit; nothing where lambda is zero
            claims = tuple(note for note in self._record.notes if note.kind == "conditional_claim")
        else:
            claims = claims_of("split" if inference == "split" else "conditional")
        record = EstimateRecord(estimate=self._record.refit, notes=(*critical_notes(self), *claims))
        found = RefitResults(record, self._ledger)
        found.parent = self
        return found

    @property
    def debiased(self) -> DebiasedResults:
        """Debiased estimates of all columns, for any selection.

        After :meth:`VFEMResults.select`, these are the estimates of that fit, without a penalty.

        References
        ----------
        van de Geer, S., Buehlmann, P., Ritov, Y. and Dezeure, R. (2014). On asymptotically optimal confidence
        regions and tests for high-dimensional models. Annals of Statistics 42, 1166-1202.
        doi:10.1214/14-AOS1221.
        """
        if self._record.debiased is None:
            raise NotAvailableError(
                "no debiased estimates",
                remedy=Remedy("fit(..., inference='debiased')", ": fit with {arguments}"),
            )
        kind = self.selection.inference
        notes = (*critical_notes(self), *claims_of(kind))
        record = EstimateRecord(estimate=self._record.debiased, notes=notes)
        found = DebiasedResults(record, self._ledger)
        found.method_name = METHODS[kind]
        found.parent = self
        return found

    def selection_report(self) -> pd.DataFrame:
        """One row per column: whether and when it was selected, and its estimates.

        Returns
        -------
        DataFrame
            ``site``, ``term``, ``selected``; ``coef``, the penalized estimate; ``refit``, the
            estimate on the selected columns, with ``std_err``, ``z`` and ``p`` conditional on the selection
            (with ``inference="split"`` over the entities that did not select); ``lambda_entry``, the largest
            lambda whose solved fit selects it, and ``order`` of entry from 1; ``frequency``, the
            share of random halves in which it is selected at the chosen lambda (nan without ``draws``). With
            ``inference="debiased"`` also ``debiased``, ``debiased_std_err`` and ``debiased_p``, which do not
            depend on the selection; with many splits ``split_p``: rejecting those of at most alpha makes any
            false rejection with probability alpha at most, if every half selects all relevant columns.
        """
        if not self._selects:
            raise NotAvailableError("ridge selects no columns; .params has its estimates of all columns")
        # The estimates of selected columns come from the refit, if there is one.
        est, s = self.estimate, self.selection
        frame = pd.DataFrame({"site": est.sites[1:], "term": est.names[1:]})
        frame["selected"] = s.coefficients[s.chosen] != 0.0
        frame["coef"] = est.params[1:]
        for label in ("refit", "std_err", "z", "p"):
            frame[label] = np.nan
        if self._record.refit is not None and self._record.refit.cov is not None:
            at = pd.Index(self._record.refit.names[1:]).get_indexer(pd.Index(frame["term"]))
            se = np.sqrt(np.diag(self._record.refit.cov))[1:]
            here = at >= 0
            frame.loc[here, "refit"] = self._record.refit.params[1:][at[here]]
            frame.loc[here, "std_err"] = se[at[here]]
            frame["z"] = frame["refit"] / frame["std_err"]
            frame["p"] = 2.0 * stats.norm.sf(frame["z"].abs())
        frame["lambda_entry"] = s.entry
        frame["order"] = frame["lambda_entry"].rank(method="dense", ascending=False)
        frame["frequency"] = np.nan if s.frequencies is None else s.frequencies[s.chosen]
        if s.split_p is not None:
            frame["split_p"] = s.split_p
        if self._record.debiased is not None:
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
            End of the path; the default is the chosen lambda. The bound requires that it is chosen
            beforehand.

        Returns
        -------
        (DataFrame, float)
            ``site``, ``term``, ``frequency``, the largest over these lambdas; and the bound ``q^2 / ((2
            threshold - 1) p)`` on the expected number of columns among them without an effect, where q is the
            mean number that a half selects at any of these lambdas. It requires columns without effect that
            are exchangeable.

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
        frame = self.selection_report()[["site", "term"]]
        frame["frequency"] = frequencies[within].max(axis=0)
        assert s.numbers is not None
        # Theorem 1: q is over the whole path down to the last lambda, which `numbers` accumulates.
        bound = float(s.numbers[within][-1]) ** 2 / ((2.0 * threshold - 1.0) * frequencies.shape[1])
        return frame[frame["frequency"] >= threshold].reset_index(drop=True), bound

    @property
    def llnull(self) -> float:
        """Log-likelihood of the intercept alone."""
        return self.selection.null

    # -- plots -----------------------------------------------------------------------------------

    def plot_path(self, ax: Axes | None = None) -> Axes:
        """Draw the coefficients over lambda, colored by site; dotted where they are proposed.

        They are in units of one standard deviation of each column, or as shares of their largest size for
        results that were read from a file, which has no deviations. Names at the right edge begin with the
        columns that are selected at the chosen lambda; the numbers at the top count columns. The chosen
        lambda is marked, and unselected columns are pale.

        Parameters
        ----------
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Axes
        """
        return plot_path(self.estimate, self.selection, self.path_params.iloc[:, 1:], self.scales, ax)

    def plot_criterion(self, criterion: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw a criterion over lambda, hollow where the fit is proposed; the default is the one that chose.

        Parameters
        ----------
        criterion : {"bic", "ebic", "aic", "cv"}, optional
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Axes
            Numbers of selected columns are at the top; the chosen lambda is marked.
        """
        name = self.selection.select if criterion is None else criterion
        return plot_criterion(self.selection, name, ax)

    def plot_stability(self, threshold: float = 0.9, ax: Axes | None = None) -> Axes:
        """Draw how often each column is selected in random halves, over lambda.

        Parameters
        ----------
        threshold : float
            Drawn as a line; columns that reach it down to the chosen lambda, those of :meth:`stable`, are
            named, the others pale.
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Axes
        """
        frequencies = pd.DataFrame(self._frequencies(), columns=list(self.estimate.names[1:]))
        return plot_stability(self.estimate, self.selection, frequencies, threshold, ax)

    def _saved_record(self) -> SelectionRecord:
        return replace(self._record, predictor=self._with_specs())

    # -- hooks -----------------------------------------------------------------------------------

    @takes_alpha
    def conf_int(self, alpha: float = 0.05, cols: Sequence[int | str] | None = None) -> pd.DataFrame:
        """Naive intervals of level ``1 - alpha`` (conditional on the selected model).

        After a selection they miss more often than `alpha`, because the same entities selected the columns.
        Those of :attr:`debiased`, and of :attr:`refit` with ``inference="split"``, do not have this error.
        Without a penalty (``lam=0``) nothing is selected, and the intervals are not naive.

        Parameters
        ----------
        alpha : float
            One minus the nominal level.
        cols : sequence of int or str, optional
            Positions or names of some coefficients.

        Returns
        -------
        DataFrame
            Rows by name; column 0 the lower, column 1 the upper limit.
        """
        return super().conf_int(alpha, cols)

    @takes_alpha
    def summary(
        self, alpha: float = 0.05, *, title: str | None = None, notes: Shown = "brief"
    ) -> SheetSummary:
        """Estimate, federation, selected columns by site, notes.

        The coefficients are those of the selected columns with standard errors: the estimates themselves for
        SCAD, MCP and no penalty, those of :attr:`refit` for the lasso and the elastic net, and with
        ``inference="split"``; with ``inference="debiased"`` those of all columns. The title states which,
        and a banner states that intervals are naive where the same entities selected the columns.

        Parameters
        ----------
        alpha : float
            One minus the level of the intervals.
        title : str, optional
            Replaces the title.
        notes : {"brief", "all"}
            As in :meth:`fedstat.models.results.CoefficientResults.summary`.
        """
        return super().summary(alpha, title=title, notes=notes)

    @property
    def _selects(self) -> bool:
        """Whether the penalty can set coefficients to zero, or nothing is penalized."""
        return self.selection.penalty != "ridge" or self.lam == 0.0

    @property
    def _refitted(self) -> bool:
        """Whether standard errors are those of the refit on the selected columns alone."""
        return self.estimate.cov is None and self._record.refit is not None

    def _title(self) -> str:
        title = super()._title()
        if not self._selects:
            title += ", ridge: shrunken estimates without standard errors"
        elif self.lam > 0.0 or self._record.debiased is not None:
            title += TITLES[self.selection.inference]
        if self._refitted and self.selection.inference == "conditional":
            title += " (refit on the selected columns)"
        return title

    def _coefficient_sheet(self, alpha: float) -> Sheet:
        if self._record.debiased is not None:
            return self.debiased._coefficient_sheet(alpha)
        frame = (self.refit if self._refitted else self)._coefficients(alpha)
        frame = frame[(frame["estimate"] != 0.0) | (frame["term"] == INTERCEPT)]
        return coefficient_sheet(frame, {}, self._record.refit is not None, alpha, "z")

    _SUMMARY = (
        ("Dep. Variable", "estimate.response", ""),
        ("Model", "model_name", ""),
        ("Method", "method_name", ""),
        ("No. Observations", "nobs", ",d"),
        ("Df Model", "estimate.df_model", "g"),
        ("R-squared", "estimate.rsquared", number),
        ("Log-Likelihood", "llf", two_digits),
        ("AIC", "aic", two_digits),
        ("BIC", "bic", two_digits),
        ("Covariance Type", "", _covariance_line),
        ("Converged", "converged", yes_or_no),
        ("Model Family", "selection.family", ""),
        ("Selected", "", _selected_line),
        ("Lambda", "lam", lambda lam: number(lam) if lam > 0.0 else ""),
        ("Chosen by", "", _chosen_line),
        ("Lambdas solved", "selection.solved", lambda s: "" if s.all() else f"{s.sum()} of {len(s)}"),
        ("KKT violation", "selection", lambda s: f"{s.kkt[s.chosen]:.1e} of lambda_max"),
    )

    def _summary_notes(self) -> Iterator[Note]:
        # Columns that were not selected have no standard error; one sentence for all of them suffices.
        without = {"undetermined_errors"}
        if self.selection.inference != "conditional":
            without.add("no_covariance")
        return (note for note in super()._summary_notes() if note.kind not in without)

    def _moments(self) -> JointNormalFit:
        if self.observed is None:
            raise NotAvailableError(
                "this needs the sums by missing pattern of a fit in this session with missing='em'; other "
                "fits and saved results do not have them"
            )
        # The selection does not matter: the models are those of all columns and the response.
        return self.observed.complete or fit_joint_model(self.observed.exchange.moments, "independent")

    def _link(self) -> DistributionSpec:
        return self._record.predictor.family

    def _deviations(self) -> pd.Series:
        if self.scales is None:
            return super()._deviations()
        return pd.Series([1.0, *self.scales], index=[INTERCEPT, *self.estimate.names[1:]])

    def _frequencies(self) -> Floats:
        if self.selection.frequencies is None:
            remedy = Remedy("fit(..., draws=50, folds=10)", "fit for instance with {arguments}")
            raise NotAvailableError("no selection frequencies", remedy=remedy)
        return self.selection.frequencies
