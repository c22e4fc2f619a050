"""Results that both VFEM models share, and the part of them that a file stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Generic, Self, TypeVar

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, NotAvailableError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.estimate import INTERCEPT, LedgerLike
from fedstat.inference.likelihood import LRTest
from fedstat.inference.plots import plot_convergence
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.results import CoefficientResults, EstimateRecord
from fedstat.models.vertical.layout import Layout, complete_at
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vertical.prediction.marginal_effects import FittedMean
from fedstat.models.vertical.prediction.predictor import VerticalPredictions
from fedstat.models.vertical.prediction.protocol import ResponseSource, released_specs
from fedstat.models.vfem.iteration.site_state import NORMAL
from fedstat.models.vfem.notes import fit_notes, role_notes
from fedstat.models.vfem.outcome import (
    EntityCounts,
    SessionArtifacts,
    VFEMOutcome,
    count_entities,
    make_estimate,
)
from fedstat.models.vfem.prediction_protocol import (
    LinearPredictors,
    VFEMPredictor,
    predict_linear,
)
from fedstat.models.vfem.prediction_results import MeanPredictions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Predictions = TypeVar("Predictions", bound=MeanPredictions)
METHODS = {
    "vfem": "maximum likelihood",
    "cc": "complete entities only",
    "impute": "mean imputation",
    "single": "response holder alone",
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class VFEMRecord(EstimateRecord):
    """What results are made of, and what a file holds of them: no value per entity.

    `specs` say how each site's columns are coded, with means and knots of transforms, empty before the
    sites were asked.
    """

    outcome: VFEMOutcome
    counts: EntityCounts
    response: ResponseSource
    has_offset: bool
    specs: Mapping[str, str] = field(default_factory=dict)


class VFEMBaseResults(VerticalPredictions, Generic[Predictions]):
    """Results of VFEM, whatever the distribution of the response.

    Attributes
    ----------
    method : str
    options : IterationOptions
        Of the maximization.
    covariance : Covariance or None
        Of (a, s2, beta_1, mu_1, ...); where the response is not normal s2 has none, and t_1, ..., t_K follow.
    counts : EntityCounts
    response : ResponseSource
        Who holds the response, and how it is written.
    model : VerticalModel
        Of results that were read from a file, the names of response and coefficients only.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> model = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition, between="independent")
    >>> fit = model.fit(exchange="iterative")
    >>> fit.names, list(fit.specs)
    ({'Credit Agency': ('ROA',), 'Market Supervision': ('CI',)}, ['Credit Agency', 'Market Supervision'])
    >>> fit.nobs_by_client.to_dict(), len(fit.fittedvalues), len(fit.resid), fit.predict(partition).shape
    ({'Credit Agency': 2682, 'Market Supervision': 620}, 5000, 5000, (5000,))
    >>> fit.get_prediction(partition).summary_frame().shape
    (5000, 6)
    >>> fit.trace.columns.tolist()
    ['log_likelihood', 'score', 'change', 'move', 'seconds']
    >>> bool(fit.plot_convergence().has_data())
    True
    """

    _record: VFEMRecord
    _model: VerticalModel | None
    _nested_otherwise: ClassVar[str] = ""
    """What to do beside a Wald test where two fits saw other entities."""

    def __init__(
        self,
        record: VFEMRecord,
        ledger: LedgerLike | None,
        held: SessionArtifacts | None = None,
        model: VerticalModel | None = None,
    ) -> None:
        super().__init__(record, ledger, model)
        outcome = record.outcome
        self.method = outcome.method
        self.method_name = METHODS[outcome.method]
        self.options, self._fit, self.covariance = outcome.options, outcome.fit, outcome.covariance
        self.counts, self.response = record.counts, record.response
        self._held = held or SessionArtifacts()

    @classmethod
    def _of(
        cls,
        model: VerticalModel,
        layout: Layout,
        outcome: VFEMOutcome,
        held: SessionArtifacts,
        ledger: Ledger,
    ) -> Self:
        """Make results of a fit."""
        counts = count_entities(model, layout, held)
        formula = model.formula
        record = VFEMRecord(
            estimate=make_estimate(model, layout, outcome, held.nobs(layout) or counts.n),
            outcome=outcome,
            counts=counts,
            notes=(*role_notes(model._roles), *fit_notes(layout, outcome, held, counts, ledger)),
            response=ResponseSource(model.design.active, formula.response, formula.response_columns),
            has_offset="offset" in model._roles,
        )
        return cls(record, ledger, held, model)

    def _link(self) -> DistributionSpec:
        return self._fit.distribution

    # -- statements ------------------------------------------------------------------------------

    @property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Columns of the fit by site."""
        clients, names = self.estimate.clients, self.estimate.names
        return {
            client: tuple(name for name, of in zip(names, clients, strict=True) if of == client)
            for client in dict.fromkeys(client for client in clients if client)
        }

    @property
    def nobs_by_client(self) -> pd.Series:
        """Entities of the fit that each site has."""
        return pd.Series({b.client: b.entities for b in self.estimate.blocks if b.columns}, dtype=np.int64)

    @property
    def trace(self) -> pd.DataFrame:
        """Log-likelihood, relative score, largest change and seconds of every iteration, and its move."""
        return pd.DataFrame([asdict(row) for row in self._fit.trace]).set_index("iteration")

    def plot_convergence(self, ax: Axes | None = None) -> Axes:
        """Draw the relative score and the distance to the last log-likelihood over the iterations.

        Parameters
        ----------
        ax : matplotlib Axes, optional
        """
        return plot_convergence(self.trace, tolerance=self.options.tol_score, ax=ax)

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

    def compare_lr_test(self, restricted: CoefficientResults) -> LRTest:
        """Likelihood ratio test against a fit with fewer columns on the same records.

        Raises
        ------
        ModelError
            The two are not nested, differ in family or method, or a site counts as having other
            entities in the two: columns that were left out changed who has a record, or which patterns have
            enough entities to be released. After ``exchange="moments"``, ``refit`` keeps both. Or the
            covariance is robust: the ratio supposes the variances that such a covariance does without.
        """
        if self.cov_type.startswith("robust"):
            raise ModelError(
                "compare_lr_test: cov_type='robust' was asked for, and a likelihood ratio rejects too often "
                "where it is needed; use wald_test, which goes by the robust covariance"
            )
        if isinstance(restricted, VFEMBaseResults) or self._fit.distribution != NORMAL:
            self._check_same_records(restricted)
        return super().compare_lr_test(restricted)

    def _check_same_records(self, restricted: CoefficientResults) -> None:
        distribution = self._fit.distribution
        if not isinstance(restricted, VFEMBaseResults) or not self._fit.same_family(restricted._fit):
            raise ModelError(f"compare_lr_test: expected another fit of VFEM with {distribution}")
        if restricted.method != self.method:
            raise ModelError(
                f"compare_lr_test: one fit has method='{self.method}', the other '{restricted.method}'"
            )
        # The likelihood of what is observed compares only over the same records.
        for client, patterns in restricted.counts.patterns.items():
            if self.counts.patterns.get(client) != patterns:
                raise ModelError(
                    f"compare_lr_test: '{client}' counts as having other entities in the two fits, "
                    "because some are only partly filled there or in patterns that are too small to be "
                    f"released; use {self._nested_otherwise}wald_test on the larger fit"
                )

    # -- prediction ------------------------------------------------------------------------------

    def predict(self, partition: ClientPartition | None = None) -> pd.Series:
        """Predict the mean response from whatever blocks an entity has.

        The mean (a probability or a rate where the response is not normal) is taken over what is missing, so
        that it is closer to the overall mean than the one at the blocks' means. Every site is asked
        for the linear predictor of each entity of the partition that it has: one number per entity leaves
        it, however the model was fitted.

        Parameters
        ----------
        partition : ClientPartition, optional
            New entities, with any pattern of missing blocks; sites may be absent, and the response
            is not needed (see ``new_data=True`` of its constructors). By default :attr:`fittedvalues`,
            where the fit has them.

        Returns
        -------
        Series
            By entity.
        """
        if partition is None:
            return self.fittedvalues.rename(None)
        return self._prediction(partition, mean_only=True).predicted_mean.rename(None)

    def get_prediction(self, partition: ClientPartition | None = None) -> Predictions:
        """Predict the mean response with intervals, which are wider for entities that lack more.

        They account for all estimated parameters. Beside the linear predictor of each entity, the standard
        error of the mean needs projections of every site's columns on the covariance of the estimates.
        These leave the site too, and disclose its columns of these entities to the coordinator;
        :meth:`predict` does without.

        Parameters
        ----------
        partition : ClientPartition, optional
            As in :meth:`predict`; by default that of the fit.

        Returns
        -------
        PredictionResults or GLMPredictionResults
            Where the response is normal, with intervals of a new response as well.
        """
        return self._prediction(partition, mean_only=False)

    def _fitted_mean(self) -> FittedMean:
        beside = {} if self._model is None else dict(self._model._roles)
        if self._record.has_offset:
            beside.setdefault("offset", "")
        fit = self._fit
        return FittedMean(
            names=self.estimate.names,
            params=self.estimate.params,
            cov=self._cov(),
            distribution=fit.distribution,
            means=np.concatenate([fit.mu[k] for k in dict.fromkeys(self.estimate.clients[1:])]),
            beside=beside,
            words=(self.model_name, self.estimate.response),
            law=self._law,
            student=self.use_t,
        )

    def _response_source(self) -> ResponseSource:
        self._check_no_offset("evaluate")
        return self.response

    def _prediction(self, partition: ClientPartition | None, *, mean_only: bool) -> Predictions:
        """Predict for the entities of a partition, by default that of the fit."""
        raise NotImplementedError

    def _linear(self, partition: ClientPartition | None, *, mean_only: bool) -> LinearPredictors:
        """Linear predictors of the entities of a partition, by default that of the fit."""
        if partition is None:
            partition = self._need_model("get_prediction without a partition").partition
        return predict_linear(self._predictor(), partition, mean_only=mean_only)

    def _predictor(self) -> VFEMPredictor:
        psi = None if self.covariance is None else self.covariance.psi
        fit = self._fit
        if self.method == "impute" and fit.distribution == NORMAL:
            # The residuals hold what missing blocks would have explained.
            fit = replace(fit, t=dict.fromkeys(fit.t, 0.0))
        return VFEMPredictor(fit, tuple(self.names), psi, self.specs, self.response)

    @property
    def specs(self) -> Mapping[str, str]:
        """How each site's columns are coded, with means and knots of transforms."""
        if not self._record.specs:
            specs = released_specs(self._need_model("prediction"), tuple(self.names))
            self._record = replace(self._record, specs=dict(specs))
        return self._record.specs

    def _saved_record(self) -> VFEMRecord:
        return replace(self._record, specs=self.specs)

    # -- hooks and small things ------------------------------------------------------------------

    def _summary_right(self) -> list[tuple[str, str]]:
        rows = super()._summary_right()
        last = self._fit.trace[-1]
        at = None if not isinstance(self._ledger, Ledger) else self._ledger.at
        rows.insert(1, ("Coordinator", f"at {at}" if at else "apart"))
        return [*rows, ("Iterations", str(last.iteration)), ("Relative score", f"{last.score:.1e}")]

    def _deviations(self) -> pd.Series:
        if self._held.exchange is None:
            raise NotAvailableError(
                "standardized: this fit has no standard deviations of its columns (one in this session with "
                "exchange='moments' or, with a family, between='free' has); give them by name of the "
                'coefficient, as standardised={"age": 12.4, ...}'
            )
        moments = self._held.exchange.moments
        return pd.Series([1.0, *moments.deviations()], index=[INTERCEPT, *moments.names])

    def _check_no_offset(self, call: str) -> None:
        """Hold no predictions at an offset of zero against responses that have another."""
        if self._record.has_offset:
            raise NotAvailableError(
                f"{call}: predictions are those at an offset of zero; predict(partition), and add the offset "
                "where it is held"
            )

    def _per_entity(self, what: str) -> pd.Series:
        """Label what the response holder computed, one value per entity of the fit, where it is at hand."""
        values = self._held.fitted.get(what)
        if values is None and self._held.exchange is not None and self._fit.distribution == NORMAL:
            raise NotAvailableError(
                f"no {what} values: exchange='moments' asks for nothing per entity. predict(partition) "
                "asks every site for its linear predictors, fit(exchange='iterative') too"
            )
        if values is None:
            raise NotAvailableError(
                f"no {what} values: one per entity, they stay with the response holder; fit with the "
                "coordinator there, and read them before saving"
            )
        model = self._need_model(what)
        index = model.partition.entities[model.design.entities]
        if len(index) != len(values):
            blocks = tuple(b for b in model.design.blocks if b.client in self.names)
            index = index[complete_at(blocks, model.design.n)]
        return pd.Series(values, index=index, name=what)
