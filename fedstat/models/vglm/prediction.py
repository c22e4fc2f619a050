"""Predicted means of entities with complete or missing blocks, errors, and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import DataWarning, ModelError, NotAvailableError, warn
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.estimate import Estimate
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.horizontal.prediction import GLMPrediction
from fedstat.models.vertical.prediction.marginal_effects import FittedMean
from fedstat.models.vertical.prediction.predictor import (
    NewEntities,
    VerticalPredictions,
    VerticalPredictor,
    columns_read,
    covariance_factor,
    entities_of,
)
from fedstat.models.vertical.prediction.protocol import (
    FittedBlocks,
    ResponseSource,
    predict_blocks,
    present_sites,
    project_blocks,
    released_specs,
)
from fedstat.models.vglm.distributions import means_of
from fedstat.models.vglm.outcome import SPENT
from fedstat.typing import Bools, Floats

# ----------------------------------------------------------------------------------------------------
# Predicted means of entities that every site has, and with missing blocks of all.


@dataclass(frozen=True, slots=True)
class Predictor(VerticalPredictor):
    """The parts of a fit that prediction needs.

    `specs` state how each site's columns are coded, and are empty until the sites have replied; `holder` is
    the site of the response. For a fit with missing blocks, `means` are the mean linear predictors of each
    site's block, for entities that lack it, and `column_means` those of its columns.
    """

    steps: ClassVar[str] = "vglm"
    estimate: Estimate
    sites: tuple[str, ...]
    family: DistributionSpec
    specs: Mapping[str, str]
    holder: str
    means: Mapping[str, float] = field(default_factory=dict)
    column_means: Mapping[str, Floats] = field(default_factory=dict)

    def beta(self, site: str) -> Floats:
        """Coefficients of a site's columns."""
        return np.asarray(self.estimate.params[np.array(self.estimate.sites) == site])

    @property
    def blocks(self) -> FittedBlocks:
        """Coefficients by site."""
        beta = {k: self.beta(k) for k in self.sites}
        mean = float(self.estimate.params[0]) + sum(self.means.values())
        return FittedBlocks(self.sites, self.specs, beta, mean, self.means)

    @property
    def distribution(self) -> DistributionSpec:
        """Return the distribution of the response, with its link."""
        return self.family

    @property
    def response_at(self) -> tuple[str, str]:
        """Return the text of the response, and the site that holds it."""
        return self.estimate.response, self.holder

    @property
    def counted(self) -> Sequence[str]:
        """Return the sites with a nonzero coefficient."""
        return [k for k in self.sites if self.beta(k).any()]

    def requested(self, partition: ClientPartition) -> tuple[str, ...]:
        """Return the sites that receive requests; a ModelError if one that is needed is absent."""
        # A block without effect is not requested: its site may be absent, and learns nothing.
        needed = present_sites(self.counted, partition)
        lacking = [k for k in self.counted if k not in needed]
        if lacking and not self.means:
            raise ModelError(f"predict: the partition lacks the site {', '.join(lacking)} of the fit")
        return needed

    def predicted_means(self, partition: ClientPartition) -> Callable[[], FitProtocol[tuple[Floats, str]]]:
        """Return the protocol of predicted means (n,), nan for none, and of their session."""
        needed = self.requested(partition)

        def predicted() -> FitProtocol[tuple[Floats, str]]:
            found = yield from predict_blocks(self.blocks, needed, partition, self.steps)
            eta = _where_known(self, found.linear, found.missing, needed)
            return means_of(self.family, eta), found.opened.session

        return predicted


def predict_linear(
    predictor: Predictor, partition: ClientPartition, cov: Floats | None = None
) -> tuple[Floats, Floats | None]:
    """Request linear predictors, and with a covariance (p + 1, p + 1) of the coefficients projections.

    Returns linear predictors (n,), nan for entities without one, and a factor of their covariance (n, r).
    Coefficients without a variance are treated as known. Errors are those of :func:`predict_means`.
    """
    needed = predictor.requested(partition)
    factor = None if cov is None else covariance_factor(cov)

    def requester() -> FitProtocol[tuple[Floats, Bools, Floats | None]]:
        if factor is None:
            found = yield from predict_blocks(predictor.blocks, needed, partition, "vglm")
            return found.linear, found.missing, None
        of = predictor.estimate.sites[1:]
        found, out = yield from project_blocks(predictor.blocks, needed, partition, "vglm", factor, of)
        # The linear predictor changes by 1 with the intercept, by x with beta, and by the mean of x if x is
        # missing.
        for k in (k for k in predictor.sites if k in predictor.column_means):
            of_site = factor[1:][np.array(predictor.estimate.sites[1:]) == k]
            out += found.missing[:, [predictor.sites.index(k)]] * (predictor.column_means[k] @ of_site)
        return found.linear, found.missing, out

    call = "predict()" if cov is None else "get_prediction()"
    (linear, missing, projection), _ = predictor.run(call, partition, requester)
    return _where_known(predictor, linear, missing, needed), projection


def _where_known(predictor: Predictor, linear: Floats, missing: Bools, needed: Sequence[str]) -> Floats:
    """Set nan where a site lacks an entity, and no mean replaces it: (n,)."""
    counts = (~missing).sum(axis=1)
    return np.where((counts == len(needed)) | bool(predictor.means), linear, np.nan)


def predict_means(predictor: Predictor, partition: ClientPartition) -> pd.Series:
    """Predict for every entity of a partition; nan where a site lacks it, unless its mean is known.

    Raises ModelError if the partition is horizontal, or lacks a site of the fit, and DesignError if a site's
    columns cannot be coded as in the fit. A DataWarning names linear predictors that have no mean under the
    link.
    """
    eta, _ = predict_linear(predictor, partition)
    mean = means_of(predictor.family, eta)
    wrong = int((np.isnan(mean) & ~np.isnan(eta)).sum())
    if wrong:
        warn(
            f"predict: {wrong:,} of {len(eta):,} entities are left out (nan): {predictor.family} has no mean "
            "at their linear predictors; with a log link every entity has one",
            DataWarning,
        )
    return pd.Series(mean, index=partition.entities)


# ----------------------------------------------------------------------------------------------------
# Predictions of a selecting fit, with errors, and their agreement with the response.


class SelectionPredictions(VerticalPredictions):
    """Predictions of a vertical generalized linear model for entities."""

    _centers: Floats | None = None
    """Means of the columns, for a fit in this session."""

    def predict(self, exog: NewEntities | None = None) -> pd.Series:
        """Predict the mean response at the penalized estimates.

        The coordinator receives linear predictors of every site's columns, one value per entity.

        Parameters
        ----------
        exog : ClientPartition, table of pandas, polars or pyarrow, or dict of columns, optional
            New entities (see ``new_data=True`` of the constructors of a partition), or rows that the analyst
            has, with columns of the fit: nothing is requested for them. The default is the partition of the
            fit.

        Returns
        -------
        Series
            By entity, or by row of the table; nan where a site lacks it. With missing="em", the mean
            linear predictor replaces a block that a site lacks: the expectation given the observed blocks.
        """
        given, predictor = self._of_fit(exog, "predict"), self._with_specs()
        entities, index = entities_of(given, columns_read(predictor.specs))
        return predict_means(predictor, entities).set_axis(index)

    def get_prediction(self, exog: NewEntities | None = None) -> GLMPrediction:
        """Predict the mean response with standard errors and intervals, conditional on the selection.

        They belong to the estimates that the summary shows: with the lasso, the elastic net and
        ``inference="split"`` those of :attr:`refit`, so the mean is not that of :meth:`predict`. Errors
        include those of the selected columns' coefficients; the selection, and the means of blocks that an
        entity lacks, are treated as known. In addition to linear predictors, the coordinator receives
        projections of every site's columns on the covariance of the estimates, which reveal its selected
        columns of these entities; :meth:`predict` does not need them.

        Parameters
        ----------
        exog : ClientPartition or table, optional
            As in :meth:`predict`.

        Returns
        -------
        GLMPrediction
            By entity, with statsmodels' names: ``predicted_mean``, ``se_mean``, ``conf_int(alpha)``,
            ``summary_frame(alpha)``; nan as in :meth:`predict`.

        Raises
        ------
        NotAvailableError
            There are no standard errors, or the results were read from a file and no partition is given.
        """
        (predictor, cov), given = (
            self._with_errors(),
            self._of_fit(exog, "get_prediction"),
        )
        entities, index = entities_of(given, columns_read(predictor.specs))
        linear, projection = predict_linear(predictor, entities, cov)
        assert projection is not None
        errors = np.where(np.isnan(linear), np.nan, np.linalg.norm(projection, axis=1))
        eta, se = (pd.Series(values, index=index) for values in (linear, errors))
        return GLMPrediction(eta, se, predictor.family.make(), stats.norm)

    def _predictor(self) -> Predictor:
        return self._with_specs()

    def _margin_predictor(self) -> Predictor:
        return self._with_errors()[0]

    def _fitted_mean(self) -> FittedMean:
        predictor, cov = self._with_errors(request=False)
        return FittedMean(
            names=self.estimate.names,
            params=predictor.estimate.params,
            cov=cov,
            distribution=predictor.family,
            means=self._centers,
            roles=self._role_names(),
            words=(self.model_name, self.estimate.response),
            test_distribution=self._test_distribution,
            student=self.use_t,
        )

    @property
    def _has_offset(self) -> bool:
        return any(note.kind == "offset" for note in self._record.notes)

    def _response_source(self) -> ResponseSource:
        self._check_no_offset("evaluate")
        if self._model is None:
            raise NotAvailableError("evaluate: saved results do not contain the response's columns")
        formula = self._model.formula
        return ResponseSource(self._record.predictor.holder, formula.response, formula.response_columns)

    def _of_fit(self, exog: NewEntities | None, call: str) -> NewEntities:
        if exog is not None:
            return exog
        if self._model is None:
            raise NotAvailableError(f"results from a file have no entities: give a partition to {call}")
        return self._model.partition

    def _with_specs(self) -> Predictor:
        predictor: Predictor = self._record.predictor
        if not predictor.specs and self._model is not None:
            predictor = replace(predictor, specs=released_specs(self._model, predictor.sites))
            self._record = replace(self._record, predictor=predictor)
        return predictor

    def _with_errors(self, request: bool = True) -> tuple[Predictor, Floats]:
        """Estimates of all columns that have a covariance (p + 1, p + 1), and the covariance.

        Nan otherwise.
        """
        predictor = self._with_specs() if request else self._record.predictor
        estimate, refit = self.estimate, self._record.refit
        if estimate.cov is not None:
            return predictor, estimate.cov
        if refit is None or refit.cov is None:
            raise NotAvailableError(f"no standard errors of predictions: {SPENT}")
        at = pd.Index(estimate.names).get_indexer(pd.Index(refit.names))
        params, cov = np.zeros(len(estimate.names)), np.full((len(estimate.names),) * 2, np.nan)
        params[at], cov[np.ix_(at, at)] = refit.params, refit.cov
        sites = np.array(estimate.sites)
        means = {k: float(m @ params[sites == k]) for k, m in predictor.column_means.items()}
        return replace(predictor, estimate=replace(estimate, params=params), means=means), cov
