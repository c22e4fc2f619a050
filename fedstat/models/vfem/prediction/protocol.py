"""Linear predictors of new entities, whatever the distribution of the response: who is asked what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd

from fedstat.errors import ModelError
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.design.by_columns import design_ask
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Rounds
from fedstat.inference.evaluation.evaluation import Evaluation
from fedstat.kernels.glm.quadrature import marginal_mean
from fedstat.models.consent import FurtherAnalysis
from fedstat.models.vertical.prediction.coding import ResponseSource
from fedstat.models.vertical.prediction.effects import ProjectedEntities
from fedstat.models.vertical.prediction.judging import evaluate_predictions
from fedstat.models.vertical.prediction.protocol import (
    FittedBlocks,
    OpenedBlocks,
    PredictedBlocks,
    new_ledger,
    open_blocks,
    predict_blocks,
    prediction_analysis,
    present_clients,
    project_blocks,
)
from fedstat.models.vfem.blocks.glm_distribution import NORMAL, kernel_of
from fedstat.models.vfem.blocks.request import FAMILY, ask
from fedstat.models.vfem.covariance.psi import Places
from fedstat.models.vfem.iteration.fit import VFEMFit
from fedstat.models.vfem.prediction.by_pattern import predict_by_pattern
from fedstat.typing import Floats


@dataclass(frozen=True, slots=True)
class VFEMPredictor:
    """What prediction needs of a fit.

    `psi` is the covariance of (a, s2, beta_1, mu_1, ...), (2 + 2p, 2 + 2p); where the response is not normal
    t_1, ..., t_K follow. `specs` say how each institution's columns are coded.
    """

    fit: VFEMFit
    clients: tuple[str, ...]
    psi: Floats | None
    specs: Mapping[str, str]
    response: ResponseSource

    @property
    def blocks(self) -> FittedBlocks:
        """Coefficients by institution, blocks centred at their means."""
        beta, mu = self.fit.beta, self.fit.mu
        means = {k: float(mu[k] @ beta[k]) for k in self.clients}
        return FittedBlocks(self.clients, self.specs, beta, self.fit.a, means)

    def analysis(self, call: str, partition: ClientPartition) -> FurtherAnalysis:
        """Say what a prediction is, for owners who are asked."""
        return prediction_analysis(call, self.blocks, self.response.text, self.fit.distribution, partition)

    @property
    def places(self) -> Places:
        """Where each institution's beta and mu stand in psi."""
        return Places(tuple(len(self.fit.beta[k]) for k in self.clients))


@dataclass(frozen=True, slots=True)
class Gradients:
    """Derivatives of mean and variance of each linear predictor times a factor of the covariance, (n, r).

    Those of the variance are zero where the covariance does not have t_1, ..., t_K.
    """

    mean: Floats
    variance: Floats


@dataclass(frozen=True, slots=True)
class LinearPredictors:
    """Linear predictors given what an entity has, by entity (n,), and the ledger of what passed for them.

    The variance is that of what is missing, zero for an entity with every block; `blocks` counts the
    institutions of the fit that have the entity.
    """

    mean: pd.Series
    variance: pd.Series
    blocks: pd.Series
    gradients: Gradients | None
    ledger: Ledger


def predict_linear(
    predictor: VFEMPredictor, partition: ClientPartition, *, mean_only: bool
) -> LinearPredictors:
    """Ask the institutions for the linear predictors of every entity of a partition.

    Raises ModelError where the partition is horizontal, or shares no institution with the fit.
    """
    ledger, by_mean = new_ledger(partition, predictor.response.client), mean_only or predictor.psi is None
    asking = _asking(predictor, partition, mean_only=by_mean)
    analysis = predictor.analysis("predict()" if mean_only else "get_prediction()", partition)
    found, opened = analysis.run(asking(), asking, ledger)
    index, missing = partition.entities, opened.missing
    return LinearPredictors(
        mean=pd.Series(found.mean, index=index),
        variance=pd.Series(found.variance, index=index),
        blocks=pd.Series((~missing).sum(axis=1), index=index),
        gradients=found.gradients,
        ledger=ledger,
    )


def evaluate_fit(predictor: VFEMPredictor, partition: ClientPartition) -> Evaluation:
    """Hold predicted means of the entities of a partition against its response, where that is.

    Raises ModelError as :func:`predict_linear`, and where the partition lacks the response.
    """
    asking = _asking(predictor, partition, mean_only=True)
    distribution = predictor.fit.distribution

    def predicted() -> Rounds[tuple[Floats, str]]:
        found, opened = yield from asking()
        if distribution == NORMAL:
            return found.mean, opened.session
        return marginal_mean(kernel_of(distribution), found.mean, found.variance)[0], opened.session

    analysis = predictor.analysis("evaluate()", partition)
    return evaluate_predictions(
        FAMILY, predictor.response, distribution, predictor.clients, predicted, analysis
    )


def project_entities(
    predictor: VFEMPredictor, of: Sequence[str], partition: ClientPartition, factor: Floats
) -> ProjectedEntities:
    """Ask for linear predictors of entities, and projections of their columns on a factor (p + 1, r).

    `of` (p,) names the institution of each column. Raises ModelError where the partition lacks one.
    """
    clients = predictor.clients

    def asking() -> Rounds[tuple[PredictedBlocks, Floats]]:
        return project_blocks(predictor.blocks, clients, partition, FAMILY, factor, of)

    ledger = new_ledger(partition, predictor.response.client)
    found, rows = predictor.analysis("get_margeff()", partition).run(asking(), asking, ledger)
    return ProjectedEntities(found.linear, rows, np.asarray(~found.missing.any(axis=1)))


def _asking(
    predictor: VFEMPredictor, partition: ClientPartition, *, mean_only: bool
) -> Callable[[], Rounds[tuple[Predicted, OpenedBlocks]]]:
    present = present_clients(predictor.clients, partition)
    if not present:
        raise ModelError(
            f"predict: expected at least one of the institutions {', '.join(predictor.clients)}; the "
            f"partition has {', '.join(partition.clients)}"
        )
    how = _by_block if predictor.fit.law is None else _by_pattern
    return partial(how, predictor, partition, present, mean_only)


@dataclass(frozen=True, slots=True)
class Predicted:
    """Mean and variance of the linear predictor given what is seen, (n,), and their derivatives."""

    mean: Floats
    variance: Floats
    gradients: Gradients | None


def _by_block(
    predictor: VFEMPredictor, partition: ClientPartition, present: tuple[str, ...], mean_only: bool
) -> Rounds[tuple[Predicted, OpenedBlocks]]:
    found = yield from predict_blocks(predictor.blocks, present, partition, FAMILY)
    variance = found.missing @ np.array([predictor.fit.t[k] for k in predictor.clients])
    gradients = None if mean_only else (yield from _derivatives(predictor, found))
    return Predicted(found.linear, variance, gradients), found.opened


def _by_pattern(
    predictor: VFEMPredictor, partition: ClientPartition, present: tuple[str, ...], mean_only: bool
) -> Rounds[tuple[Predicted, OpenedBlocks]]:
    opened = yield from open_blocks(predictor.blocks, present, partition, FAMILY, partly=True)
    psi = None if mean_only else predictor.psi
    found = yield from predict_by_pattern(predictor.fit, predictor.clients, psi, opened)
    gradients = None if found.gradients is None else Gradients(*found.gradients)
    # Rounding must not make a variance of zero negative.
    variance = np.maximum(found.variance - predictor.fit.s2, 0.0)
    return Predicted(found.mean, variance, gradients), opened


def _derivatives(predictor: VFEMPredictor, found: PredictedBlocks) -> Rounds[Gradients]:
    """Project the derivatives of every linear predictor by the parameters on the covariance of these."""
    fit, places, number = predictor.fit, predictor.places, predictor.clients.index
    factor = covariance_factor(predictor)
    replies = yield [
        ask(k, "project_block", found.opened.session, mu=fit.mu[k], factor=factor[places.beta(number(k))])
        for k in found.opened.rows
    ]
    # a + sum (x - mu)'beta over the seen blocks moves by 1 with a, by x - mu with beta, by -beta with mu.
    by_mean = np.tile(factor[0], (len(found.linear), 1))
    for (k, rows), reply in zip(found.opened.rows.items(), replies, strict=True):
        by_mean[rows] += reply.arrays["projection"] - fit.beta[k] @ factor[places.mu(number(k))]
    of_t = factor[places.total :]
    by_variance = found.missing @ of_t if len(of_t) else np.zeros_like(by_mean)
    return Gradients(by_mean, by_variance)


def covariance_factor(predictor: VFEMPredictor) -> Floats:
    """R with R R' the covariance of psi."""
    assert predictor.psi is not None
    values, vectors = np.linalg.eigh(predictor.psi)
    return np.asarray(vectors * np.sqrt(values.clip(min=0.0)))


def prediction_rsquared(predictor: VFEMPredictor, partition: ClientPartition) -> float:
    """R-squared of the predictions for the entities of a partition that every institution has.

    Raises ModelError where it lacks an institution or the response, or fewer than two entities are complete.
    """
    holder = predictor.response.client
    lacking = [k for k in (*predictor.clients, holder) if k not in partition.sites]
    if lacking:
        raise ModelError(f"R-squared of predictions: the partition lacks institution {', '.join(lacking)}")
    rows, response = partition.rows[holder], predictor.response
    question = {"response": response.text, "columns": response.columns}

    def asking() -> Rounds[Floats]:
        # Of entities with every block; nothing that they lack has to be predicted.
        found = yield from predict_blocks(predictor.blocks, predictor.clients, partition, FAMILY)
        session = found.opened.session
        use = ~found.missing[rows].any(axis=1)
        yield [design_ask(holder, "open_response", session, question)]
        predicted = found.linear[rows[use]]
        (reply,) = yield [ask(holder, "prediction_errors", session, use=use, predicted=predicted)]
        return reply.arrays["sums"]

    analysis = predictor.analysis("prediction_rsquared()", partition)
    columns = {**analysis.columns, holder: (*analysis.columns.get(holder, ()), *response.columns)}
    analysis = replace(analysis, columns=columns)
    n, sse, sst = analysis.run(asking(), asking, new_ledger(partition, holder))
    if n < 2 or sst <= 0.0:
        raise ModelError(
            f"R-squared of predictions: {n:.0f} entities of the partition have the response and every block"
        )
    return float(1.0 - sse / sst)
