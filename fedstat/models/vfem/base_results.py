"""Results that both VFEM models share, and the part of them that is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Generic, Self, TypeVar

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, NotAvailableError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.inference.estimate import INTERCEPT, LedgerLike, takes_alpha
from fedstat.inference.likelihood import LRTest
from fedstat.inference.plots import plot_convergence
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.results import CoefficientResults, EstimateRecord
from fedstat.models.vertical.exchange.patterns import role_notes
from fedstat.models.vertical.joint_normal.assumption_tests import OPEN
from fedstat.models.vertical.joint_normal.fit import open_ranges
from fedstat.models.vertical.layout import Layout, complete_at
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vertical.prediction.marginal_effects import FittedMean
from fedstat.models.vertical.prediction.predictor import (
    NewEntities,
    VerticalPredictions,
    columns_read,
    entities_of,
)
from fedstat.models.vertical.prediction.protocol import ResponseSource, released_specs
from fedstat.models.vfem.iteration.site_state import NORMAL
from fedstat.models.vfem.notes import fit_notes
from fedstat.models.vfem.outcome import (
    EntityCounts,
    SessionArtifacts,
    VFEMOutcome,
    as_between,
    as_least_squares,
    count_entities,
    make_estimate,
)
from fedstat.models.vfem.prediction_protocol import (
    LinearPredictors,
    VFEMPredictor,
    predict_linear,
)
from fedstat.models.vfem.prediction_results import MeanPredictions
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Predictions = TypeVar("Predictions", bound=MeanPredictions)
KNOWN = 1e-6
"""Length of a range, relative to its limits, below which the data determine the coefficient."""
METHODS = {
    "vfem": "maximum likelihood",
    "weighted": "weighted moments",
    "cc": "complete entities only",
    "impute": "mean imputation",
    "single": "response holder alone",
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class VFEMRecord(EstimateRecord):
    """The contents of results and of a saved file: no row-level values.

    `specs` state how each site's columns are coded, with means and knots of transforms. They are empty until
    the sites have replied. `ranges` (2, 1 + P) are limits of the coefficients if the data leave open how
    columns of two sites are correlated.
    """

    outcome: VFEMOutcome
    counts: EntityCounts
    response: ResponseSource
    has_offset: bool
    ranges: Floats | None = None
    specs: Mapping[str, str] = field(default_factory=dict)


def ranges_left_open(outcome: VFEMOutcome, held: SessionArtifacts) -> Floats | None:
    """Return the ranges of coefficients with one likelihood, of a normal response.

    None if independent blocks were requested: these leave nothing open.
    """
    fit = held.moments_fit
    if fit is None or outcome.method != "vfem" or outcome.fit.distribution != NORMAL:
        return None
    return open_ranges(fit) if outcome.choice is not None or as_between(outcome) == "free" else None


class VFEMBaseResults(VerticalPredictions, Generic[Predictions]):
    """Results of VFEM, for any distribution of the response.

    Attributes
    ----------
    method : str
    options : IterationOptions
        Options of the maximization.
    covariance : Covariance or None
        Covariance of (a, s2, beta_1, mu_1, ...). If the response is not normal, s2 has none, and t_1, ...,
        t_K follow.
    counts : EntityCounts
    response : ResponseSource
        The site that holds the response, and the text of the response.
    model : VerticalModel
        For results read from a file: only the names of the response and of the coefficients.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> model = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition, between="independent")
    >>> fit = model.fit(exchange="iterative")
    >>> fit.names, list(fit.specs)
    ({'Credit Agency': ('ROA',), 'Market Supervision': ('CI',)}, ['Credit Agency', 'Market Supervision'])
    >>> fit.nobs_by_site.to_dict(), len(fit.fittedvalues), len(fit.resid), fit.predict(partition).shape
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
    """Alternative to a Wald test if two fits used different entities."""

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
        nobs, formula = held.nobs(layout) or counts.n, model.formula
        outcome = as_least_squares(layout, outcome, nobs)
        record = VFEMRecord(
            estimate=make_estimate(model, layout, outcome, nobs),
            outcome=outcome,
            counts=counts,
            notes=(*role_notes(model._roles), *fit_notes(layout, outcome, held, counts, ledger)),
            response=ResponseSource(model.design.active, formula.response, formula.response_columns),
            has_offset="offset" in model._roles,
            ranges=ranges_left_open(outcome, held),
        )
        return cls(record, ledger, held, model)

    def _link(self) -> DistributionSpec:
        return self._fit.distribution

    # -- what the data leave open ----------------------------------------------------------------

    @takes_alpha
    def conf_int(self, alpha: float = 0.05, cols: Sequence[int | str] | None = None) -> pd.DataFrame:
        """Intervals of level ``1 - alpha``.

        If two sites share too few entities for a covariance of their columns, and blocks are not taken as
        independent, an interval contains every value that has the likelihood of the estimate, and the
        sampling error at both limits.

        Parameters
        ----------
        alpha, cols
            As in :meth:`CoefficientResults.conf_int`.

        Returns
        -------
        DataFrame
            Rows by name; column 0 the lower, column 1 the upper limit.
        """
        limits, ranges = super().conf_int(alpha), self._included_ranges
        if ranges is not None:
            limits = limits + (ranges - self.params.to_numpy()).T
        return limits.iloc[self._positions(cols)]

    @property
    def _open_ranges(self) -> Floats | None:
        """Limits (2, 1 + P) of what the data leave open, which include the estimates."""
        ranges = self._record.ranges
        if ranges is None:
            return None
        params = self.estimate.params
        return np.array([np.minimum(ranges[0], params), np.maximum(ranges[1], params)])

    @property
    def _included_ranges(self) -> Floats | None:
        """The same, if tests and intervals contain them: where blocks are not taken as independent."""
        return None if as_between(self._record.outcome) == "independent" else self._open_ranges

    @property
    def tvalues(self) -> pd.Series:
        """Coefficients over their standard errors; those nearest zero of the values that are left open.

        The second applies where :meth:`conf_int` contains these values.
        """
        ranges = self._included_ranges
        if ranges is None:
            return super().tvalues
        return self._series(np.clip(0.0, *ranges)) / self.bse

    def _further_columns(self) -> dict[str, Floats]:
        ranges = self._open_ranges
        if ranges is None:
            return {}
        known = np.ptp(ranges, axis=0) <= KNOWN * np.abs(ranges).max(axis=0)
        return dict(zip(OPEN, np.where(known, np.nan, ranges), strict=True))

    # -- statements ------------------------------------------------------------------------------

    @property
    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Columns of the fit by site."""
        sites, names = self.estimate.sites, self.estimate.names
        return {
            site: tuple(name for name, of in zip(names, sites, strict=True) if of == site)
            for site in dict.fromkeys(site for site in sites if site)
        }

    @property
    def nobs_by_site(self) -> pd.Series:
        """Entities of the fit that each site has."""
        return pd.Series({b.site: b.entities for b in self.estimate.blocks if b.columns}, dtype=np.int64)

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
            After ``exchange="moments"``, which releases no row-level values, or if the coordinator is not at
            the response holder.
        """
        return self._per_entity("fitted")

    def compare_lr_test(self, restricted: CoefficientResults) -> LRTest:
        """Test against a fit with fewer columns on the same records by the likelihood ratio.

        Raises
        ------
        ModelError
            The fits are not nested, or differ in family or method. Or a site counts as having other entities
            in the two fits, because the columns left out changed who has a record, or which patterns have
            enough entities to be released; after ``exchange="moments"``, ``refit`` keeps both. Or the
            covariance is robust, because the likelihood ratio assumes the variances that a robust covariance
            does not require.
        """
        if self.cov_type.startswith("robust"):
            raise ModelError(
                "compare_lr_test: with cov_type='robust', a likelihood ratio test can reject too often; "
                "use wald_test, which uses the robust covariance"
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
        # Observed-data likelihoods can be compared only over the same records.
        for site, patterns in restricted.counts.patterns.items():
            if self.counts.patterns.get(site) != patterns:
                raise ModelError(
                    f"compare_lr_test: '{site}' counts as having other entities in the two fits, because "
                    "some have only a part of its columns or are in patterns that are too small to be "
                    f"released; use {self._nested_otherwise}wald_test on the larger fit"
                )

    # -- prediction ------------------------------------------------------------------------------

    def predict(self, exog: NewEntities | None = None) -> pd.Series:
        """Predict the mean response from the blocks that an entity has.

        The mean (a probability or a rate if the response is not normal) is averaged over the missing blocks,
        so it is closer to the overall mean than the mean at the average of these blocks. Every site releases
        its linear predictor for each of its entities in the partition: one number per entity, after either
        exchange.

        Parameters
        ----------
        exog : ClientPartition, table of pandas, polars or pyarrow, or dict of columns, optional
            New entities, with any pattern of missing blocks. Sites of a partition may be absent, and the
            response is not needed (see ``new_data=True`` of its constructors). A table has columns of the
            fit: rows that the analyst has, for which nothing is requested. A site lacks a row without a value
            in any of its columns. The default is :attr:`fittedvalues`, if the fit has them.

        Returns
        -------
        Series
            One value per entity, or per row of the table with its index.

        Raises
        ------
        ModelError
            The table has no column of the fit.

        Examples
        --------
        >>> import pandas as pd
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
        >>> fit = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition).fit()
        >>> firms = pd.DataFrame({"ROA": [0.2, None], "CI": [1.0, 0.0]}, index=["one", "other"])
        >>> fit.predict(firms).index.tolist(), fit.get_prediction(firms).summary_frame().shape
        (['one', 'other'], (2, 6))
        """
        if exog is None:
            return self.fittedvalues.rename(None)
        return self._prediction(exog, mean_only=True).predicted_mean.rename(None)

    def get_prediction(self, exog: NewEntities | None = None) -> Predictions:
        """Predict the mean response with intervals, which are wider for entities that lack more blocks.

        The intervals account for all estimated parameters. In addition to the linear predictor of each
        entity, the standard error of the mean requires projections of every site's columns on the covariance
        of the estimates. These leave the site too, and reveal its columns of these entities to the
        coordinator. :meth:`predict` does not need them.

        Parameters
        ----------
        exog : ClientPartition or table, optional
            As in :meth:`predict`; the default is the partition of the fit.

        Returns
        -------
        PredictionResults or GLMPredictionResults
            If the response is normal, with intervals of a new response as well.
        """
        return self._prediction(exog, mean_only=False)

    def _fitted_mean(self) -> FittedMean:
        fit = self._fit
        return FittedMean(
            names=self.estimate.names,
            params=self.estimate.params,
            cov=self._cov(),
            distribution=fit.distribution,
            means=np.concatenate([fit.mu[k] for k in dict.fromkeys(self.estimate.sites[1:])]),
            roles=self._role_names(),
            words=(self.model_name, self.estimate.response),
            test_distribution=self._test_distribution,
            student=self.use_t,
        )

    def _response_source(self) -> ResponseSource:
        self._check_no_offset("evaluate")
        return self.response

    def _prediction(self, exog: NewEntities | None, *, mean_only: bool) -> Predictions:
        """Predict for new entities; the default is the partition of the fit."""
        raise NotImplementedError

    def _linear(self, exog: NewEntities | None, *, mean_only: bool) -> LinearPredictors:
        """Return linear predictors of new entities; the default is the partition of the fit."""
        if exog is None:
            exog = self._need_model("get_prediction without a partition").partition
        entities, index = entities_of(exog, columns_read(self.specs))
        found = predict_linear(self._predictor(), entities, mean_only=mean_only)
        parts = {name: getattr(found, name).set_axis(index) for name in ("mean", "variance", "blocks")}
        return replace(found, **parts)

    def _predictor(self) -> VFEMPredictor:
        psi = None if self.covariance is None else self.covariance.psi
        fit = self._fit
        if self.method == "impute" and fit.distribution == NORMAL:
            # The residuals contain what missing blocks would have explained.
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

    # -- hooks and helpers -----------------------------------------------------------------------

    def _summary_right(self) -> list[tuple[str, str]]:
        rows = super()._summary_right()
        at = None if not isinstance(self._ledger, Ledger) else self._ledger.at
        rows.insert(1, ("Coordinator", f"at {at}" if at else "apart"))
        if self.method == "weighted":
            return rows
        return [*rows, ("Iterations", str(self._fit.trace[-1].iteration))]

    def _deviations(self) -> pd.Series:
        if self._held.exchange is None:
            raise NotAvailableError(
                "standardized: this fit has no standard deviations of its columns (a fit in this session "
                "with exchange='moments' or, with a family, between='free' has them); expected them by name "
                'of the coefficient, as in {"age": 12.4}'
            )
        moments = self._held.exchange.moments
        return pd.Series([1.0, *moments.deviations()], index=[INTERCEPT, *moments.names])

    @property
    def _has_offset(self) -> bool:
        return self._record.has_offset

    def _per_entity(self, what: str) -> pd.Series:
        """Label what the response holder computed, one value per entity of the fit, if it is available."""
        values = self._held.fitted.get(what)
        if values is None and self._held.exchange is not None and self._fit.distribution == NORMAL:
            raise NotAvailableError(
                f"no {what} values: exchange='moments' releases no row-level values",
                remedy=Remedy("predict(partition)", "{call} requests linear predictors from every site"),
            )
        if values is None:
            raise NotAvailableError(
                f"no {what} values: these row-level values stay with the response holder; fit with the "
                "coordinator there, and read them before saving"
            )
        model = self._need_model(what)
        index = model.partition.entities[model.design.entities]
        if len(index) != len(values):
            blocks = tuple(b for b in model.design.blocks if b.site in self.names)
            index = index[complete_at(blocks, model.design.n)]
        return pd.Series(values, index=index, name=what)
