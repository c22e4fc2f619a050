"""What can be said after a fit of VFEM for other families than the normal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pandas as pd

from fedstat.errors import ModelError
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.estimate import Estimate
from fedstat.inference.likelihood import LRTest, cox_snell, mcfadden
from fedstat.inference.results import FederatedResults
from fedstat.models.checks import check_choice
from fedstat.models.saved import READERS
from fedstat.models.vfem.blocks.layout import Layout
from fedstat.models.vfem.glm_prediction import GLMPredictionResults, GLMPredictor, predict_means
from fedstat.models.vfem.glm_storage import FORMAT, read_saved, save_result
from fedstat.models.vfem.prediction import released_specs
from fedstat.models.vfem.results import METHODS
from fedstat.models.vfem.statements.ascent_results import AscentResults
from fedstat.models.vfem.statements.glm_notes import glm_notes
from fedstat.models.vfem.statements.glm_outcome import GLMOutcome, make_estimate
from fedstat.models.vfem.statements.outcome import Counts, digest
from fedstat.typing import Array

if TYPE_CHECKING:
    from fedstat.models.vfem.glm_model import VFEMGLM


class VFEMGLMResults(AscentResults):
    """Results of :meth:`fedstat.models.vfem.glm_model.VFEMGLM.fit`, with statsmodels' names and meanings.

    ``llf`` is the log-likelihood of what is observed, less the largest value that the likelihood of
    the clients' own blocks can take: with nothing missing it is that of the generalised linear model, and
    differences between nested fits are likelihood ratios.

    Attributes
    ----------
    method : str
    family : statsmodels family
    fit_ : GLMFit
        Intercept, and by client beta, mu and t.
    covariance : Covariance or None
        Of (a, 0, beta_1, mu_1, ..., t_1, ..., t_K), with `a` the mean of the linear predictor and t_k the
        variance of client k's part of it.
    counts : Counts
    notes : list of str
        Below the summary.
    holder : str
        The institution of the response.
    """

    model_name = "VFEM GLM"

    def __init__(
        self,
        estimate: Estimate,
        ledger: Ledger | None,
        outcome: GLMOutcome,
        counts: Counts,
        notes: list[str],
        holder: str,
        model: VFEMGLM | None = None,
        specs: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(estimate, ledger)
        self.method, self.method_name = outcome.method, METHODS[outcome.method]
        self.options, self.fit_, self.covariance = outcome.options, outcome.fit, outcome.covariance
        self.family_spec, self.family = outcome.fit.family, outcome.fit.family.make()
        self.counts, self.model, self.notes, self.holder = counts, model, notes, holder
        self.outcome = outcome
        self._specs = specs

    @classmethod
    def of(cls, model: VFEMGLM, layout: Layout, outcome: GLMOutcome, ledger: Ledger) -> VFEMGLMResults:
        """Make results of a fit."""
        blocks = {b.client: b for b in model.design.blocks if b.client in layout.clients}
        counts = Counts(
            layout.n,
            model.design.n_dropped,
            {k: b.n_partial for k, b in blocks.items() if b.n_partial},
            model.design.n - layout.n,
            {k: digest(model.design.entities[b.rows]) for k, b in blocks.items()},
        )
        notes = glm_notes(layout, outcome, counts, ledger)
        estimate = make_estimate(model, layout, outcome)
        return cls(estimate, ledger, outcome, counts, notes, model.design.active, model)

    # -- statements ------------------------------------------------------------------------------

    @property
    def llnull(self) -> float:
        """Log-likelihood of the model with an intercept only."""
        return float(self.fit_.null)

    def pseudo_rsquared(self, kind: Literal["cs", "mcf"] = "cs") -> float:
        """Pseudo R-squared of Cox and Snell ("cs") or McFadden ("mcf"), of the observed-data likelihood.

        With blocks missing it says how much of the response is explained by what is observed, not by all
        columns.
        """
        check_choice("kind", kind, ("cs", "mcf"))
        if kind == "mcf":
            return mcfadden(self.llf, self.llnull)
        return cox_snell(self.llf, self.llnull, self.nobs)

    @property
    def fittedvalues(self) -> pd.Series:
        """Expected response given the blocks that an entity has; held by the response holder."""
        return self._per_entity("fitted")

    @property
    def resid_response(self) -> pd.Series:
        """Response less :attr:`fittedvalues`."""
        return self._per_entity("residuals")

    def compare_lr_test(self, restricted: FederatedResults) -> LRTest:
        """Likelihood ratio test against a fit with fewer columns on the same records.

        Raises
        ------
        ModelError
            The two are not nested, differ in family or method, or columns that were left out changed who
            counts as having a record.
        """
        if not isinstance(restricted, VFEMGLMResults) or restricted.family_spec != self.family_spec:
            raise ModelError(f"compare_lr_test: expected another fit of VFEM with {self.family_spec}")
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
        """Predict the mean response (a probability, a rate) from whatever blocks an entity has.

        The mean is taken over what is missing, so that it is closer to the overall mean than the one at
        the blocks' means.

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
        return predict_means(self._predictor(), partition, mean_only=True).predicted_mean.rename(None)

    def get_prediction(self, partition: ClientPartition | None = None) -> GLMPredictionResults:
        """Predict the mean response with intervals that account for all estimated parameters.

        The standard error of the mean needs projections of every client's columns on the covariance of
        the estimates, which disclose the columns to the coordinator; :meth:`predict` does without.

        Parameters
        ----------
        partition : ClientPartition, optional
            As in :meth:`predict`; by default that of the fit.

        Returns
        -------
        GLMPredictionResults
        """
        if partition is None:
            partition = self._need_model("get_prediction without a partition").partition
        return predict_means(self._predictor(), partition, mean_only=False)

    def _predictor(self) -> GLMPredictor:
        joint = None if self.covariance is None else self.covariance.psi
        return GLMPredictor(self.fit_, tuple(self.fit_.beta), joint, self.specs, self.holder)

    @property
    def specs(self) -> Mapping[str, str]:
        """How each client's columns are coded, with means and knots of transforms."""
        if self._specs is None:
            self._specs = released_specs(self._need_model("prediction"), tuple(self.fit_.beta))
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
        save_result(Path(path), self)

    # -- hooks -----------------------------------------------------------------------------------

    def _summary_left(self) -> list[tuple[str, str]]:
        rows = dict(super()._summary_left())
        del rows["R-squared"]
        family = [("Model Family", self.family_spec.name), ("Link Function", self.family_spec.link)]
        fitness = [
            ("Pseudo R2 (CS)", f"{self.pseudo_rsquared():.4f}"),
            ("Log-Likelihood", rows.pop("Log-Likelihood")),
            ("LL-Null", f"{self.llnull:.2f}"),
        ]
        out: list[tuple[str, str]] = []
        for label, value in rows.items():
            out += [*fitness, (label, value)] if label == "AIC" else [(label, value)]
            out += family if label == "Model" else []
        return out

    def _summary_notes(self) -> list[str]:
        return [*super()._summary_notes(), *self.notes]

    def _per_entity(self, what: str) -> pd.Series:
        return self._by_entity(what, self.outcome.fitted.get(what), self.fit_.beta)


def from_file(header: Mapping[str, str], arrays: Mapping[str, Array]) -> VFEMGLMResults:
    """Rebuild results from what a file holds."""
    saved = read_saved(header, arrays)
    return VFEMGLMResults(
        saved.estimate,
        saved.ledger,
        saved.outcome,
        saved.counts,
        saved.notes,
        saved.holder,
        specs=saved.specs,
    )


READERS[FORMAT] = from_file
