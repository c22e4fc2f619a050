"""What can be said after a VFEM fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from fedstat.errors import ModelError, NotAvailableError
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.estimate import Estimate
from fedstat.inference.likelihood import LRTest
from fedstat.inference.results import FederatedResults
from fedstat.models.saved import READERS
from fedstat.models.vfem.blocks.layout import Layout
from fedstat.models.vfem.prediction import (
    PredictionResults,
    Predictor,
    Response,
    predict_entities,
    prediction_rsquared,
    released_specs,
)
from fedstat.models.vfem.statements.ascent_results import AscentResults
from fedstat.models.vfem.statements.moment_statements import MomentStatements
from fedstat.models.vfem.statements.notes import fit_notes
from fedstat.models.vfem.statements.outcome import Counts, Outcome, count_entities, make_estimate
from fedstat.models.vfem.statements.refit import refit
from fedstat.models.vfem.storage import FORMAT, read_saved, save_result
from fedstat.typing import Array

if TYPE_CHECKING:
    from fedstat.models.vfem.covariance.from_moments import CovType
    from fedstat.models.vfem.model import VFEMRegression

METHODS = {
    "vfem": "maximum likelihood",
    "cc": "complete entities only",
    "impute": "mean imputation",
    "single": "response holder alone",
}


class VFEMResults(MomentStatements, AscentResults):
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
        self.moments_fit, self.exchange = outcome.moments_fit, outcome.exchange
        self._notes = notes
        self._specs = specs

    @classmethod
    def of(cls, model: VFEMRegression, layout: Layout, outcome: Outcome, ledger: Ledger) -> VFEMResults:
        """Make results of a fit."""
        counts = count_entities(model, layout, outcome)
        names = {b.client: b.names for b in model.design.blocks if b.client in layout.clients}
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
    def fittedvalues(self) -> pd.Series:
        """Expected response given the blocks that an entity has; held by the response holder.

        Raises
        ------
        NotAvailableError
            After ``exchange="moments"``, which asks for nothing per entity; and where the coordinator does
            not sit at the response holder.
        """
        return self._per_entity("fitted")

    @property
    def resid(self) -> pd.Series:
        """Response less :attr:`fittedvalues`."""
        return self._per_entity("residuals")

    def compare_lr_test(self, restricted: FederatedResults) -> LRTest:
        """Likelihood ratio test against a fit with fewer columns on the same records.

        Raises
        ------
        ModelError
            The two are not nested, or an institution counts as having other entities in the two: columns
            that were left out changed who has a record, or which patterns have enough entities to be
            released. :meth:`refit` keeps both.
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
                        "because some are only partly filled there or in patterns that are too small to be "
                        "released; use refit (after exchange='moments') or wald_test on the larger fit"
                    )
        return super().compare_lr_test(restricted)

    def refit(self, formula: str, *, cov_type: CovType | None = None) -> VFEMResults:
        """Fit a smaller model from the moments that this fit exchanged; nothing further is asked for.

        An entity counts as having an institution's block as it did in this fit, so that the two
        likelihoods compare. Where entities have only some of an institution's columns, or small patterns
        were merged, a fresh fit of the formula may see more of them.

        Parameters
        ----------
        formula : str
            With the same response and some of the terms; ``.`` stands for the columns of this fit, so that
            ``"y ~ . - x"`` leaves out one. A factor stays whole or goes whole.
        cov_type : {"observed", "expected", "sem", "none"}, optional
            By default that of this fit.

        Returns
        -------
        VFEMResults
            With the ledger of this fit.

        Raises
        ------
        ModelError
            Another response, a term that is not in this fit, or an interaction whose coding depends on
            a term that is left out.
        NotAvailableError
            This fit has no moments: it was iterative, or read from a file.
        """
        return refit(self, formula, cov_type)

    # -- prediction ------------------------------------------------------------------------------

    def predict(self, partition: ClientPartition | None = None) -> pd.Series:
        """Predict the response from whatever blocks an entity has.

        Every institution is asked for the linear predictor of each entity of the partition that it has:
        one number per entity leaves it, however the model was fitted.

        Parameters
        ----------
        partition : ClientPartition, optional
            New entities, with any pattern of missing blocks; clients may be absent, and the response
            is not needed (see ``new_data=True`` of its constructors). By default :attr:`fittedvalues`,
            where the fit has them.

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

        Beside the linear predictor of each entity, the standard error of the mean needs projections of every
        client's columns on the covariance of the estimates. These leave the institution too, and
        disclose its columns of these entities to the coordinator; :meth:`predict` does without.

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

    def _summary_notes(self) -> list[str]:
        return [*super()._summary_notes(), *self._notes]

    def _per_entity(self, what: str) -> pd.Series:
        if what not in self._fitted and self.exchange is not None:
            raise NotAvailableError(
                f"no {what} values: exchange='moments' asks for nothing per entity. predict(partition) "
                "asks every institution for its linear predictors, fit(exchange='iterative') too"
            )
        return self._by_entity(what, self._fitted.get(what), self.names)


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
