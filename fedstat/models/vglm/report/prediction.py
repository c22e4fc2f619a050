"""Predicted means of entities that every institution has, and with missing blocks of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from fedstat.errors import DataWarning, ModelError, warn
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Rounds
from fedstat.inference.estimate import Estimate
from fedstat.inference.evaluation.evaluation import Evaluation
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.models.vertical.prediction.coding import ResponseSource
from fedstat.models.vertical.prediction.effects import ProjectedEntities
from fedstat.models.vertical.prediction.judging import evaluate_predictions
from fedstat.models.vertical.prediction.protocol import (
    FittedBlocks,
    PredictedBlocks,
    new_ledger,
    predict_blocks,
    prediction_analysis,
    present_clients,
    project_blocks,
)
from fedstat.models.vglm.response.distributions import means_of
from fedstat.typing import Bools, Floats


@dataclass(frozen=True, slots=True)
class Predictor:
    """What prediction needs of a fit.

    `specs` tell how each institution's columns are coded, and are empty before the sites were asked; `holder`
    is the institution of the response. `means`, of a fit with missing blocks, are the mean linear predictors
    of each institution's block, for entities that lack it, and `column_means` those of its columns.
    """

    estimate: Estimate
    clients: tuple[str, ...]
    family: DistributionSpec
    specs: Mapping[str, str]
    holder: str
    means: Mapping[str, float] = field(default_factory=dict)
    column_means: Mapping[str, Floats] = field(default_factory=dict)

    def beta(self, client: str) -> Floats:
        """Coefficients of an institution's columns."""
        return np.asarray(self.estimate.params[np.array(self.estimate.clients) == client])

    @property
    def blocks(self) -> FittedBlocks:
        """Coefficients by institution."""
        beta = {k: self.beta(k) for k in self.clients}
        mean = float(self.estimate.params[0]) + sum(self.means.values())
        return FittedBlocks(self.clients, self.specs, beta, mean, self.means)


@dataclass(frozen=True, slots=True, eq=False)
class LinearPrediction:
    """Linear predictors (n,), nan for entities without one, and a factor of their covariance (n, r)."""

    eta: Floats
    projection: Floats | None


def predict_linear(
    predictor: Predictor, partition: ClientPartition, cov: Floats | None = None
) -> LinearPrediction:
    """Ask for linear predictors, and with a covariance (p + 1, p + 1) of the coefficients for projections.

    Coefficients without a variance are taken as known. Errors are those of :func:`predict_means`.
    """
    needed = _needed(predictor, partition)
    factor = None if cov is None else _factor(cov)

    def asking() -> Rounds[tuple[Floats, Bools, Floats | None]]:
        if factor is None:
            found = yield from predict_blocks(predictor.blocks, needed, partition, "vglm")
            return found.linear, found.missing, None
        of = predictor.estimate.clients[1:]
        found, out = yield from project_blocks(predictor.blocks, needed, partition, "vglm", factor, of)
        # The linear predictor moves by 1 with the intercept, by x with beta, and by the mean of x where x is
        # missing.
        for k in (k for k in predictor.clients if k in predictor.column_means):
            of_client = factor[1:][np.array(predictor.estimate.clients[1:]) == k]
            out += found.missing[:, [predictor.clients.index(k)]] * (predictor.column_means[k] @ of_client)
        return found.linear, found.missing, out

    response, call = predictor.estimate.response, "predict()" if cov is None else "get_prediction()"
    analysis = prediction_analysis(call, predictor.blocks, response, predictor.family, partition)
    linear, missing, projection = analysis.run(asking(), asking, new_ledger(partition, predictor.holder))
    return LinearPrediction(_where_known(predictor, linear, missing, needed), projection)


def _needed(predictor: Predictor, partition: ClientPartition) -> tuple[str, ...]:
    """Institutions to ask; a ModelError where one that a prediction needs is not there."""
    # A block without effect is not asked for: its institution need not be there, and learns nothing of it.
    wanted = with_effect(predictor)
    needed = present_clients(wanted, partition)
    lacking = [k for k in wanted if k not in needed]
    if lacking and not predictor.means:
        raise ModelError(f"predict: the partition lacks the institution {', '.join(lacking)} of the fit")
    return needed


def with_effect(predictor: Predictor) -> list[str]:
    """Institutions of which some coefficient is not zero."""
    return [k for k in predictor.clients if predictor.beta(k).any()]


def _where_known(predictor: Predictor, linear: Floats, missing: Bools, needed: Sequence[str]) -> Floats:
    """Put nan where an institution lacks an entity, and no mean stands for it: (n,)."""
    counts = (~missing).sum(axis=1)
    return np.where((counts == len(needed)) | bool(predictor.means), linear, np.nan)


def project_entities(predictor: Predictor, partition: ClientPartition, factor: Floats) -> ProjectedEntities:
    """Ask for linear predictors, and projections on a factor of the covariance; errors as before."""
    needed = _needed(predictor, partition)
    of = predictor.estimate.clients[1:]

    def asking() -> Rounds[tuple[PredictedBlocks, Floats]]:
        return project_blocks(predictor.blocks, needed, partition, "vglm", factor, of)

    response = predictor.estimate.response
    analysis = prediction_analysis("get_margeff()", predictor.blocks, response, predictor.family, partition)
    found, rows = analysis.run(asking(), asking, new_ledger(partition, predictor.holder))
    whole = (~found.missing).sum(axis=1) == len(needed)
    return ProjectedEntities(found.linear, rows, whole)


def evaluate_fit(predictor: Predictor, response: ResponseSource, partition: ClientPartition) -> Evaluation:
    """Hold predicted means against the response, where that is; errors as of :func:`predict_means`."""
    needed = _needed(predictor, partition)

    def predicted() -> Rounds[tuple[Floats, str]]:
        found = yield from predict_blocks(predictor.blocks, needed, partition, "vglm")
        eta = _where_known(predictor, found.linear, found.missing, needed)
        return means_of(predictor.family, eta), found.opened.session

    analysis = prediction_analysis("evaluate()", predictor.blocks, response.text, predictor.family, partition)
    return evaluate_predictions(
        "vglm", response, predictor.family, with_effect(predictor), predicted, analysis
    )


def _factor(cov: Floats) -> Floats:
    """R (p + 1, r) with R R' the covariance; rows of coefficients without a variance are zero."""
    known = np.flatnonzero(np.isfinite(np.diag(cov)))
    values, vectors = np.linalg.eigh(cov[np.ix_(known, known)])
    out = np.zeros((len(cov), len(known)))
    out[known] = vectors * np.sqrt(values.clip(min=0.0))
    return out


def predict_means(predictor: Predictor, partition: ClientPartition) -> pd.Series:
    """Predict for every entity of a partition; nan where an institution lacks it, unless its mean is known.

    A ModelError where the partition is horizontal, or lacks an institution of the fit; a DesignError where an
    institution's columns cannot be coded as in the fit; a DataWarning of linear predictors that have no mean
    under the link.
    """
    eta = predict_linear(predictor, partition).eta
    mean = means_of(predictor.family, eta)
    wrong = int((np.isnan(mean) & ~np.isnan(eta)).sum())
    if wrong:
        warn(
            f"predict: {wrong:,} of {len(eta):,} entities are left out (nan): {predictor.family} has no mean "
            "at their linear predictors; with a log link every entity has one",
            DataWarning,
        )
    return pd.Series(mean, index=partition.entities)
