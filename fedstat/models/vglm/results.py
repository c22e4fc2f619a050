"""What can be said after a fit of a vertical generalised linear model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import NotAvailableError
from fedstat.federation.ledger import Ledger
from fedstat.federation.partition import ClientPartition
from fedstat.inference.estimate import INTERCEPT, Estimate
from fedstat.inference.results import FederatedResults
from fedstat.inference.summary import ClientBlock, SummaryContent, build_summary
from fedstat.inference.tables import SheetSummary, number
from fedstat.models.saved import READERS
from fedstat.models.vglm import plots, storage
from fedstat.models.vglm.gram import Units
from fedstat.models.vglm.layout import Layout
from fedstat.models.vglm.notes import fit_notes
from fedstat.models.vglm.path import Criteria, Setup
from fedstat.models.vglm.prediction import Predictor, predict_means, released_specs
from fedstat.models.vglm.protocol import Fitted
from fedstat.typing import Array, Bools, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedstat.models.vglm.model import VerticalGLM

BIASED = (
    "the {penalty} shrinks its estimates by a bias that no covariance describes; .refit has the estimates on "
    "the selected columns without it, with standard errors that are conditional on the selection"
)
SPENT = (
    "the weighted sums of products for it would be more than the number of entities allows; use fewer columns"
)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a fit hands over: the numbers, and how they were made.

    Parameters
    ----------
    fitted : Fitted
    criteria : Criteria
    select : str
    setup : Setup
    null : float
        Log-likelihood of the intercept alone.
    units : Units
    folds : int
        Parts of the entities of which sums were released separately.
    hidden : bool
        Whether linear predictors were masked.
    frequencies : (L, p) array or None
        Share of halves of the entities in which a column was selected.
    """

    fitted: Fitted
    criteria: Criteria
    select: str
    setup: Setup
    null: float
    units: Units
    folds: int
    hidden: bool
    frequencies: Floats | None


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """A path and the fit that was chosen, as numbers and texts that a file can hold.

    Parameters
    ----------
    lambdas, intercepts, coefficients, loss, kkt : arrays
        See :class:`~fedstat.models.vglm.path.Path`.
    converged : (L,) array of bool
    criteria : mapping of str to (L,) array
        ``df``, ``aic``, ``bic``, ``ebic``, and where there are such ``cv`` and ``cv_se``.
    chosen : int
    frequencies : (L, p) array or None
    select, penalty, family : str
    null : float
        Log-likelihood of the intercept alone.
    """

    lambdas: Floats
    intercepts: Floats
    coefficients: Floats
    loss: Floats
    kkt: Floats
    converged: Bools
    criteria: Mapping[str, Floats]
    chosen: int
    frequencies: Floats | None
    select: str
    penalty: str
    family: str
    null: float

    @classmethod
    def of(cls, outcome: Outcome, family: str) -> Selection:
        """Take what a fit handed over."""
        path, criteria = outcome.fitted.path, outcome.criteria
        named = {name: getattr(criteria, name) for name in ("df", "aic", "bic", "ebic", "cv", "cv_se")}
        return cls(
            path.lambdas,
            path.intercepts,
            path.coefficients,
            path.loss,
            path.kkt,
            path.converged,
            {name: values for name, values in named.items() if values is not None},
            outcome.fitted.chosen,
            outcome.frequencies,
            outcome.select,
            outcome.setup.penalty.name,
            family,
            outcome.null,
        )

    @property
    def lam(self) -> float:
        """The lambda that was chosen."""
        return float(self.lambdas[self.chosen])

    @property
    def entry(self) -> Floats:
        """Largest lambda at which each column is selected; nan for never: (p,)."""
        selected = self.coefficients != 0.0
        first = self.lambdas[np.argmax(selected, axis=0)]
        return np.asarray(np.where(selected.any(axis=0), first, np.nan))


class RefitResults(FederatedResults):
    """Maximum likelihood on the selected columns; inference is conditional on their selection."""

    model_name = "Vertical GLM on the selected columns"
    method_name = "maximum likelihood"

    def _summary_notes(self) -> list[str]:
        return [*super()._summary_notes(), CONDITIONAL]


CONDITIONAL = (
    "Conditional on selection: standard errors, tests and intervals take the selected columns as given. They "
    "ignore the search among columns, which is harmless only where no true coefficient is near zero."
)


class VerticalGLMResults(FederatedResults):
    """Results of :meth:`fedstat.VerticalGLM.fit`, with statsmodels' names and meanings.

    ``params`` are the penalised estimates, zero for columns that were not selected. With SCAD, MCP or
    without a penalty, ``bse`` and what follows come from the observed information of the selected columns
    at their maximum likelihood estimate; the lasso and the elastic net have these for :attr:`refit` only.

    Attributes
    ----------
    selection : Selection
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
        model: VerticalGLM | None = None,
    ) -> None:
        super().__init__(estimate, ledger)
        self.selection, self._refit, self._predictor = selection, refit, predictor
        self._notes, self.model = notes, model
        self.method_name = selection.penalty if selection.lam > 0.0 else "maximum likelihood"

    @classmethod
    def of(cls, model: VerticalGLM, outcome: Outcome, ledger: Ledger) -> VerticalGLMResults:
        """Make results of a fit."""
        selection = Selection.of(outcome, model.family_spec.name)
        refit = make_refit(model, outcome)
        estimate = make_estimate(model, outcome, refit)
        predictor = Predictor(estimate, model.layout.clients, model.family_spec, {}, model.layout.active)
        notes = fit_notes(model.layout, outcome.fitted, outcome.hidden, outcome.folds, ledger.at)
        return cls(estimate, ledger, selection, refit, predictor, notes, model)

    # -- selection -------------------------------------------------------------------------------

    @property
    def lam(self) -> float:
        """The lambda that was chosen."""
        return self.selection.lam

    @property
    def path(self) -> pd.DataFrame:
        """One row per lambda: half the mean deviance, criteria, violation of stationarity, convergence."""
        s = self.selection
        columns = {"loss": s.loss, **s.criteria, "kkt": s.kkt, "converged": s.converged}
        return pd.DataFrame(columns, index=pd.Index(s.lambdas, name="lambda"))

    @property
    def path_params(self) -> pd.DataFrame:
        """Coefficients at every lambda."""
        s = self.selection
        values = np.column_stack([s.intercepts, s.coefficients])
        return pd.DataFrame(
            values, index=pd.Index(s.lambdas, name="lambda"), columns=list(self.estimate.names)
        )

    @property
    def refit(self) -> RefitResults:
        """Maximum likelihood on the selected columns, conditional on their selection."""
        if self._refit is None:
            raise NotAvailableError(f"no fit on the selected columns: {SPENT}")
        return RefitResults(self._refit, self._ledger)

    def selection_report(self) -> pd.DataFrame:
        """One row per column: what was selected, when, and what it is worth.

        Returns
        -------
        DataFrame
            ``client``, ``name``, ``term``, ``selected``; ``coef``, the penalised estimate; ``refit``, the
            estimate on the selected columns, with ``std_err``, ``z`` and ``p`` conditional on the selection;
            ``lambda_entry``, the largest lambda of the path at which it is selected, and ``order`` of entry
            from 1; ``frequency``, the share of random halves in which it is selected at the chosen lambda
            (nan without ``draws``).
        """
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
        return frame

    def stable(self, threshold: float = 0.9) -> tuple[pd.DataFrame, float]:
        """Columns that are selected somewhere on the path in a share of random halves, with an error bound.

        Parameters
        ----------
        threshold : float
            The share, above one half.

        Returns
        -------
        (DataFrame, float)
            ``client``, ``name``, ``frequency`` (the largest over the path); and the bound
            ``q^2 / ((2 threshold - 1) p)`` on the expected number of columns among them that have no effect,
            q being the mean number selected somewhere on the path. It needs columns without effect that are
            exchangeable, and a path that was chosen beforehand.

        References
        ----------
        Meinshausen, N. and Buehlmann, P. (2010). Stability selection. Journal of the Royal Statistical
        Society B 72, 417-473, theorem 1.
        """
        return plots.stable_columns(self.estimate, self._frequencies(), threshold)

    @property
    def llnull(self) -> float:
        """Log-likelihood of the intercept alone."""
        return self.selection.null

    # -- prediction ------------------------------------------------------------------------------

    def predict(self, partition: ClientPartition | None = None) -> pd.Series:
        """Predict the mean response at the penalised estimates.

        Linear predictors of every institution's columns go to the coordinator, one value per entity.

        Parameters
        ----------
        partition : ClientPartition, optional
            New entities (see ``new_data=True`` of its constructors); by default that of the fit.

        Returns
        -------
        Series
            By entity; nan where an institution lacks it.
        """
        if partition is None:
            if self.model is None:
                raise NotAvailableError("results from a file have no entities: give a partition to predict")
            partition = self.model.partition
        return predict_means(self._with_specs(), partition)

    def save(self, path: str | FilePath) -> None:
        """Write estimates, path and ledger to a file, for :func:`fedstat.load`."""
        storage.save_result(FilePath(path), self, self._with_specs())

    def _with_specs(self) -> Predictor:
        if not self._predictor.specs and self.model is not None:
            specs = released_specs(self.model, self._predictor.clients)
            self._predictor = replace(self._predictor, specs=specs)
        return self._predictor

    # -- pictures --------------------------------------------------------------------------------

    def plot_path(self, ax: Axes | None = None) -> Axes:
        """Draw the coefficients of standardised size over lambda, coloured by client."""
        return plots.plot_path(self.estimate, self.selection.lambdas, self.path_params, self.lam, ax)

    def plot_criterion(self, criterion: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw a criterion over lambda; by default the one that chose.

        Parameters
        ----------
        criterion : {"bic", "ebic", "aic", "cv"}, optional
        ax : matplotlib Axes, optional
        """
        name = self.selection.select if criterion is None else criterion
        return plots.plot_criterion(self.path, name, self.lam, ax)

    def plot_stability(self, threshold: float = 0.9, ax: Axes | None = None) -> Axes:
        """Draw how often each column is selected in random halves, over lambda.

        Parameters
        ----------
        threshold : float
            Drawn as a line.
        ax : matplotlib Axes, optional
        """
        frequencies = pd.DataFrame(self._frequencies(), columns=list(self.estimate.names[1:]))
        return plots.plot_stability(self.estimate, self.selection.lambdas, frequencies, threshold, ax)

    # -- hooks -----------------------------------------------------------------------------------

    def summary(self, alpha: float = 0.05) -> SheetSummary:
        """Estimate, federation, selected columns by client, notes.

        The coefficients are those of the selected columns with standard errors: the estimates themselves for
        SCAD, MCP and no penalty, those of :attr:`refit` for the lasso and the elastic net.

        Parameters
        ----------
        alpha : float
            One minus the level of the intervals.
        """
        own = self.estimate.cov is not None or self._refit is None
        frame = self.tidy(1.0 - alpha) if own else self.refit.tidy(1.0 - alpha)
        frame = frame[(frame["estimate"] != 0.0) | (frame["name"] == INTERCEPT)]
        conditional = ", conditional on selection" if self.lam > 0.0 else ""
        refitted = "" if own else " (refit on the selected columns)"
        return build_summary(
            SummaryContent(
                title=f"{self.model_name} results{conditional}{refitted}",
                left=self._summary_left(),
                right=self._summary_right(),
                coefficients=frame,
                inference=self._refit is not None,
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
        if self.lam > 0.0:
            rows["Selected"] = f"{np.count_nonzero(s.coefficients[s.chosen])} of {s.coefficients.shape[1]}"
            rows["Lambda"] = number(self.lam)
            rows["Chosen by"] = s.select if len(s.lambdas) > 1 else "given"
        rows["KKT violation"] = f"{s.kkt[s.chosen]:.1e} of lambda_max"
        return list(rows.items())

    def _summary_notes(self) -> list[str]:
        conditional = [CONDITIONAL] if self.lam > 0.0 else []
        base = super()._summary_notes()
        # Columns that were not selected have no standard error, and need no sentence each.
        base = [note for note in base if not note.startswith("The covariance does not determine")]
        return [*base, *conditional, *self._notes]

    def _frequencies(self) -> Floats:
        if self.selection.frequencies is None:
            raise NotAvailableError("no selection frequencies: fit with draws=50 and folds=10, or the like")
        return self.selection.frequencies


def make_refit(model: VerticalGLM, outcome: Outcome) -> Estimate | None:
    """Estimate on the selected columns; None where it could not be released."""
    refit, layout = outcome.fitted.refit, model.layout
    if refit is None:
        return None
    at = np.flatnonzero(refit.support)
    return Estimate(
        params=refit.params,
        cov=refit.cov,
        names=(INTERCEPT, *[layout.names[j] for j in at]),
        clients=("", *[layout.owners[j] for j in at]),
        terms=(INTERCEPT, *[layout.terms[j] for j in at]),
        response=model.formula.response,
        nobs=layout.n,
        df_model=float(len(at)),
        converged=not refit.problem,
        convergence=refit.problem,
        llf=refit.llf,
        rsquared=_rsquared(outcome, refit.loss),
        scale=refit.scale,
        privacy="none (no noise is added)",
        cov_type="observed",
        blocks=client_blocks(layout),
    )


def make_estimate(model: VerticalGLM, outcome: Outcome, refit: Estimate | None) -> Estimate:
    """Penalised estimate of the chosen lambda, with the covariance that it has."""
    layout, path, at = model.layout, outcome.fitted.path, outcome.fitted.chosen
    params = np.concatenate([[path.intercepts[at]], path.coefficients[at]])
    free = outcome.setup.unpenalised
    if free and refit is not None:
        params = refit.params
    convex = outcome.setup.penalty.convex and path.lambdas[at] > 0.0
    cov = None
    if refit is not None and refit.cov is not None and not convex:
        known = np.concatenate([[True], outcome.fitted.refit.support]) if outcome.fitted.refit else None
        cov = np.full((layout.p + 1, layout.p + 1), np.nan)
        cov[np.ix_(known, known)] = refit.cov  # type: ignore[arg-type]
    reason = BIASED.format(penalty=outcome.setup.penalty.name.replace("_", " ")) if convex else SPENT
    loss, chosen = float(path.loss[at]), int(np.count_nonzero(path.coefficients[at]))
    llf = layout.n * (outcome.units.constant - loss)
    if model.family_spec.name == "Gaussian":
        llf = -layout.n / 2.0 * (np.log(4.0 * np.pi * loss) + 1.0)
    return Estimate(
        params=params,
        cov=cov,
        names=(INTERCEPT, *layout.names),
        clients=("", *layout.owners),
        terms=(INTERCEPT, *layout.terms),
        response=model.formula.response,
        nobs=layout.n,
        df_model=float(chosen),
        converged=bool(path.converged[at]) and (refit is None or refit.converged),
        convergence=f"violation of stationarity {path.kkt[at]:.1e} of lambda_max",
        llf=float(llf),
        rsquared=_rsquared(outcome, loss),
        scale=1.0 if refit is None else refit.scale,
        privacy="none (no noise is added)",
        cov_type="observed" if free else "observed, conditional on selection",
        blocks=client_blocks(layout),
        reasons={"cov_params": reason, "rsquared": "only the normal family has one"},
        llf_is_maximum=free,
    )


def _rsquared(outcome: Outcome, loss: float) -> float | None:
    normal = outcome.fitted.points == 0
    return 1.0 - 2.0 * loss / outcome.units.sd**2 if normal else None


def client_blocks(layout: Layout) -> tuple[ClientBlock, ...]:
    """List what each client brought, the response holder first where it holds no columns."""
    rows = [] if layout.active in layout.clients else [ClientBlock(layout.active, 0, layout.n, 0.0)]
    pairs = zip(layout.clients, layout.sizes, strict=True)
    return (*rows, *[ClientBlock(client, size, layout.n, 0.0) for client, size in pairs])


def read_result(header: Mapping[str, str], arrays: Mapping[str, Array]) -> VerticalGLMResults:
    """Rebuild results from a file."""
    saved: Any = storage.read_saved(header, arrays)
    selection = Selection(**saved.selection)
    return VerticalGLMResults(
        saved.estimate, saved.ledger, selection, saved.refit, saved.predictor, saved.notes
    )


READERS[storage.FORMAT] = read_result
