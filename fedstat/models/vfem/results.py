"""What can be said after a VFEM fit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, NotAvailableError
from fedstat.federation.ledger import Ledger
from fedstat.federation.partition import ClientPartition
from fedstat.inference.covariance import delta_method
from fedstat.inference.estimate import INTERCEPT, Estimate
from fedstat.inference.likelihood import LRTest
from fedstat.inference.plots import plot_convergence
from fedstat.inference.results import FederatedResults
from fedstat.inference.summary import ClientBlock
from fedstat.models.saved import READERS
from fedstat.models.vfem.covariance_protocol import Covariance, Places
from fedstat.models.vfem.layout import Layout, complete
from fedstat.models.vfem.moments_fit import MomentsFit
from fedstat.models.vfem.moments_protocol import Exchange
from fedstat.models.vfem.moments_results import MomentStatements
from fedstat.models.vfem.notes import fit_notes
from fedstat.models.vfem.prediction import (
    PredictionResults,
    Predictor,
    Response,
    predict_entities,
    prediction_rsquared,
    released_specs,
)
from fedstat.models.vfem.protocol import Fit, Options
from fedstat.models.vfem.storage import FORMAT, read_saved, save_result
from fedstat.typing import Array, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedstat.models.vfem.model import VFEMRegression

METHODS = {
    "vfem": "maximum likelihood",
    "cc": "complete entities only",
    "impute": "mean imputation",
    "single": "response holder alone",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fit hands over: how it was made, and the numbers."""

    method: str
    cov_type: str
    options: Options
    fit: Fit
    covariance: Covariance | None
    fitted: Mapping[str, Array]
    init: str
    exchange: Exchange | None = None
    moments_fit: MomentsFit | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Entities that the fit used and left out.

    Parameters
    ----------
    n, dropped : int
        Entities of the fit; of the partition without a response.
    partial : mapping of str to int
        Entities with some but not all of a client's columns.
    unused : int
        Entities with a response that the method leaves out.
    patterns : str
        Digest of who has which entity, to tell whether two fits saw the same records.
    """

    n: int
    dropped: int
    partial: Mapping[str, int]
    unused: int
    patterns: Mapping[str, str]


class VFEMResults(MomentStatements, FederatedResults):
    """Results of :meth:`fedstat.VFEMRegression.fit`, with statsmodels' names and meanings.

    ``llf`` is the log-likelihood of what is observed, less the largest value that the likelihood of
    the clients' own blocks can take: with nothing missing it is that of ordinary least squares, and
    differences between nested fits are likelihood ratios. ``rsquared`` is the share of variance
    explained for a fully observed entity, 1 - s2 / Var(y), with Var(y) = s2 + sum t_k under the model (the
    variance of the response itself for the methods without missing blocks).

    Attributes
    ----------
    method, init : str
    fit_ : Fit
        a, s2, and by client beta, mu and t.
    covariance : Covariance or None
        Of (a, s2, beta, mu).
    counts : Counts
    """

    model_name = "VFEM regression"

    def __init__(
        self,
        estimate: Estimate,
        ledger: Ledger | None,
        outcome: Outcome,
        counts: Counts,
        names: Mapping[str, tuple[str, ...]],
        notes: list[str],
        response: Response,
        model: VFEMRegression | None = None,
        specs: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(estimate, ledger)
        self.method, self.init = outcome.method, outcome.init
        self.method_name = METHODS[outcome.method]
        self.options, self.fit_, self.covariance = outcome.options, outcome.fit, outcome.covariance
        self.counts, self.names, self.response = counts, names, response
        self.model = model
        self._fitted = outcome.fitted
        self.moments_fit = outcome.moments_fit
        self._notes = notes
        self._specs = specs

    @classmethod
    def of(cls, model: VFEMRegression, layout: Layout, outcome: Outcome, ledger: Ledger) -> VFEMResults:
        """Make results of a fit."""
        blocks = {b.client: b for b in model.design.blocks if b.client in layout.clients}
        counts = Counts(
            layout.n,
            model.design.n_dropped,
            {k: b.n_partial for k, b in blocks.items() if b.n_partial},
            model.design.n - layout.n,
            {k: digest(model.design.entities[b.rows]) for k, b in blocks.items()},
        )
        names = {k: b.names for k, b in blocks.items()}
        estimate = make_estimate(model, layout, outcome)
        notes = fit_notes(layout, outcome, counts, ledger)
        formula = model.formula
        response = Response(model.design.active, formula.response, formula.response_columns)
        return cls(estimate, ledger, outcome, counts, names, notes, response, model)

    # -- statements ------------------------------------------------------------------------------

    @property
    def rsquared_adj(self) -> float:
        """R-squared with the degrees of freedom taken off."""
        return 1.0 - (1.0 - self.rsquared) * (self.nobs - 1) / self.df_resid

    @property
    def nobs_by_client(self) -> pd.Series:
        """Entities of the fit that each client has."""
        return pd.Series({b.client: b.entities for b in self.estimate.blocks if b.columns}, dtype=np.int64)

    @property
    def fittedvalues(self) -> pd.Series:
        """Expected response given the blocks that an entity has; held by the response holder."""
        return self._per_entity("fitted")

    @property
    def resid(self) -> pd.Series:
        """Response less :attr:`fittedvalues`."""
        return self._per_entity("residuals")

    @property
    def trace(self) -> pd.DataFrame:
        """Log-likelihood, relative score, largest change, kind of move and seconds of every iteration."""
        return pd.DataFrame([asdict(row) for row in self.fit_.trace]).set_index("iteration")

    def plot_convergence(self, ax: Axes | None = None) -> Axes:
        """Draw the relative score and the distance to the last log-likelihood over the iterations.

        Parameters
        ----------
        ax : matplotlib Axes, optional
        """
        return plot_convergence(self.trace, tolerance=self.options.tol_score, ax=ax)

    def compare_lr_test(self, restricted: FederatedResults) -> LRTest:
        """Likelihood ratio test against a fit with fewer columns on the same records.

        Raises
        ------
        ModelError
            The two are not nested, or columns that were left out changed who counts as having a record.
        """
        if isinstance(restricted, VFEMResults):
            if restricted.method != self.method:
                raise ModelError(
                    f"compare_lr_test: one fit has method='{self.method}', the other '{restricted.method}'"
                )
            for client, patterns in restricted.counts.patterns.items():
                if self.counts.patterns.get(client) != patterns:
                    raise ModelError(
                        f"compare_lr_test: '{client}' counts as having other entities in the two fits, "
                        "because some are only partly filled there; use wald_test on the larger fit"
                    )
        return super().compare_lr_test(restricted)

    # -- prediction ------------------------------------------------------------------------------

    def predict(self, partition: ClientPartition | None = None) -> pd.Series:
        """Predict the response from whatever blocks an entity has.

        Parameters
        ----------
        partition : ClientPartition, optional
            New entities, with any pattern of missing blocks; clients may be absent, and the response
            is not needed (see ``new_data=True`` of its constructors). By default the entities of the fit.

        Returns
        -------
        Series
            By entity.
        """
        if partition is None:
            return self.fittedvalues.rename(None)
        return self.get_prediction(partition, _mean_only=True).predicted_mean

    def get_prediction(
        self, partition: ClientPartition | None = None, *, _mean_only: bool = False
    ) -> PredictionResults:
        """Predict with intervals, which are wider for entities that lack more.

        The standard error of the mean needs projections of every client's columns on the covariance of
        the estimates, which disclose the columns to the coordinator; :meth:`predict` does without.

        Parameters
        ----------
        partition : ClientPartition, optional
            As in :meth:`predict`; by default that of the fit.

        Returns
        -------
        PredictionResults
        """
        if partition is None:
            partition = self._need_model("get_prediction without a partition").partition
        return predict_entities(self._predictor(), partition, mean_only=_mean_only)

    def prediction_rsquared(self, partition: ClientPartition) -> float:
        """Empirical R-squared on new entities that every client has.

        Parameters
        ----------
        partition : ClientPartition
            With every client of the fit and the response.

        Returns
        -------
        float
            One minus the ratio of the squared errors to the squared deviations from the mean.
        """
        return prediction_rsquared(self._predictor(), partition)

    def _predictor(self) -> Predictor:
        cov = None if self.covariance is None else self.covariance.psi
        fit = self.fit_
        if self.method == "impute":  # its residuals hold what missing blocks would have explained
            fit = replace(fit, t=dict.fromkeys(fit.t, 0.0))
        return Predictor(fit, tuple(self.names), cov, self._coding(), self.response)

    def _coding(self) -> Mapping[str, str]:
        if self._specs is None:
            self._specs = released_specs(self._need_model("prediction"), tuple(self.names))
        return self._specs

    # -- keeping ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the results to a file of arrays and JSON; read it with :func:`fedstat.load`.

        It holds the estimates, their covariance, the ledger, and how columns are coded (with means and
        knots of transforms), and no value per entity.

        Parameters
        ----------
        path : str or Path
        """
        save_result(Path(path), self, self._coding())

    # -- hooks and small things ------------------------------------------------------------------

    def _summary_left(self) -> list[tuple[str, str]]:
        rows = super()._summary_left()
        at = [label for label, _ in rows].index("R-squared") + 1
        rows.insert(at, ("Adj. R-squared", self._or_dash(lambda: self.rsquared_adj)))
        rows.insert(at + 1, ("Error Variance", f"{self.fit_.s2:.5g}"))
        return rows

    def _summary_right(self) -> list[tuple[str, str]]:
        rows = super()._summary_right()
        row = self.fit_.trace[-1]
        at = None if not isinstance(self._ledger, Ledger) else self._ledger.at
        rows.insert(1, ("Coordinator", f"at {at}" if at else "apart"))
        return [*rows, ("Iterations", str(row.iteration)), ("Relative score", f"{row.score:.1e}")]

    def _summary_notes(self) -> list[str]:
        return [*super()._summary_notes(), *self._notes]

    def _per_entity(self, what: str) -> pd.Series:
        if what not in self._fitted:
            raise NotAvailableError(
                f"no {what} values: one per entity, they stay with the response holder; fit with the "
                "coordinator there (the default), and read them before saving"
            )
        model = self._need_model(what)
        index = model.partition.entities[model.design.entities]
        if len(index) != len(self._fitted[what]):
            blocks = tuple(b for b in model.design.blocks if b.client in self.names)
            index = index[complete(blocks, model.design.n)]
        return pd.Series(self._fitted[what], index=index, name=what)

    def _need_model(self, what: str) -> VFEMRegression:
        if self.model is None:
            raise NotAvailableError(
                f"{what}: this result was read from a file and has no partition; give one"
            )
        return self.model


def digest(positions: Array) -> str:
    """Short digest of positions."""
    return hashlib.sha256(np.ascontiguousarray(positions, dtype=np.int64).tobytes()).hexdigest()[:16]


def make_estimate(model: VFEMRegression, layout: Layout, outcome: Outcome) -> Estimate:
    """Coefficients with the intercept at the origin, and their covariance by the delta method."""
    fit = outcome.fit
    blocks = [b for b in model.design.blocks if b.client in layout.clients]
    beta0 = fit.a - sum(float(fit.mu[b.client] @ fit.beta[b.client]) for b in blocks)
    params = np.concatenate([[beta0], *[fit.beta[b.client] for b in blocks]])
    cov = None
    if outcome.covariance is not None:
        cov = delta_method(outcome.covariance.psi, origin_jacobian(fit, layout.clients))
    row = fit.trace[-1]
    spread = fit.s2 + sum(fit.t.values()) if outcome.method == "vfem" else float(fit.response_moments[1])
    return Estimate(
        params=params,
        cov=cov,
        names=(INTERCEPT, *[name for b in blocks for name in b.names]),
        clients=("", *[b.client for b in blocks for _ in b.names]),
        terms=(INTERCEPT, *[term for b in blocks for term in b.term_names]),
        response=model.formula.response,
        nobs=layout.n,
        df_model=float(len(params) - 1),
        converged=fit.converged,
        convergence=f"{fit.reason}; relative score {row.score:.1e} after {row.iteration} iterations",
        llf=fit.log_likelihood,
        rsquared=1.0 - fit.s2 / spread,
        scale=fit.s2,
        privacy="none (no noise is added)",
        cov_type=cov_name(outcome),
        blocks=client_blocks(model, layout),
        reasons={"cov_params": "cov_type='none' was asked for"},
    )


def cov_name(outcome: Outcome) -> str:
    """Covariance type as printed."""
    how = outcome.covariance.how if outcome.covariance is not None else ""
    return outcome.cov_type + (f" ({how})" if how in ("sketch", "exact") else "")


def origin_jacobian(fit: Fit, clients: tuple[str, ...]) -> Floats:
    """Jacobian of (beta0, beta) by psi = (a, s2, beta_1, mu_1, ...); beta0 = a - sum mu'beta."""
    places = Places(tuple(len(fit.beta[k]) for k in clients))
    J = np.zeros((1 + sum(places.sizes), places.total))
    J[0, 0], at = 1.0, 1
    for j, k in enumerate(clients):
        J[0, places.beta(j)], J[0, places.mu(j)] = -fit.mu[k], -fit.beta[k]
        J[at : at + places.sizes[j], places.beta(j)] = np.eye(places.sizes[j])
        at += places.sizes[j]
    return J


def client_blocks(model: VFEMRegression, layout: Layout) -> tuple[ClientBlock, ...]:
    """List what each client brought, the response holder first where it holds no columns."""
    rows = []
    if layout.active not in layout.clients:
        rows.append(ClientBlock(layout.active, 0, layout.n, 0.0))
    for block in model.design.blocks:
        if block.client in layout.clients:
            has = len(layout.kept[block.client])
            rows.append(ClientBlock(block.client, len(block.names), has, 1.0 - has / layout.n))
    return tuple(rows)


def from_file(header: Mapping[str, str], arrays: Mapping[str, Array]) -> VFEMResults:
    """Rebuild results from what a file holds."""
    saved = read_saved(header, arrays)
    cov_type = saved.estimate.cov_type
    outcome = Outcome(saved.method, cov_type, saved.options, saved.fit, saved.covariance, {}, saved.init)
    return VFEMResults(
        saved.estimate,
        saved.ledger,
        outcome,
        Counts(**saved.counts),
        saved.names,
        saved.notes,
        saved.response,
        specs=saved.specs,
    )


READERS[FORMAT] = from_file
