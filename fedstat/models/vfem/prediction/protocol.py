"""Linear predictors of new entities, whatever the distribution of the response: who is asked what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedstat.errors import ModelError
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.design.by_columns import design_ask
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Rounds
from fedstat.models.vfem.blocks.request import ask
from fedstat.models.vfem.covariance.protocol import Places
from fedstat.models.vfem.iteration.fit import VFEMFit
from fedstat.models.vfem.prediction.coding import ResponseSource
from fedstat.typing import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class VFEMPredictor:
    """What prediction needs of a fit.

    Parameters
    ----------
    fit : VFEMFit
    clients : tuple of str
    psi : (2 + 2p, 2 + 2p) or (2 + 2p + K, 2 + 2p + K) array or None
        Covariance of (a, s2, beta_1, mu_1, ...); where the response is not normal t_1, ..., t_K follow.
    specs : mapping of str to str
        How each client's columns are coded.
    response : ResponseSource
    """

    fit: VFEMFit
    clients: tuple[str, ...]
    psi: Floats | None
    specs: Mapping[str, str]
    response: ResponseSource

    @property
    def places(self) -> Places:
        """Where each client's beta and mu stand in psi."""
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
    """Linear predictors given what an entity has, of entities named by `index`.

    Parameters
    ----------
    mean, variance : Series, (n,)
        The variance is that of what is missing, zero for an entity with every block.
    blocks : Series of int, (n,)
        Clients of the fit that have the entity.
    gradients : Gradients or None
    ledger : Ledger
        What passed.
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

    Raises
    ------
    ModelError
        The partition is horizontal, or shares no client with the fit.
    DesignError
        A client's columns cannot be coded as in the fit.
    """
    present = present_clients(predictor.clients, partition)
    ledger = new_ledger(predictor, partition)
    asked = _linear_predictors(predictor, partition, present, mean_only or predictor.psi is None)
    mean, missing, gradients = partition.engine.run(asked, ledger)
    variance = missing @ np.array([predictor.fit.t[k] for k in predictor.clients])
    index, blocks = partition.entities, (~missing).sum(axis=1)
    return LinearPredictors(
        mean=pd.Series(mean, index=index),
        variance=pd.Series(variance, index=index),
        blocks=pd.Series(blocks, index=index),
        gradients=gradients,
        ledger=ledger,
    )


def present_clients(clients: Sequence[str], partition: ClientPartition) -> tuple[str, ...]:
    """Clients of a fit that a partition has, too.

    Raises
    ------
    ModelError
        The partition is horizontal, or has none of them.
    """
    if partition.layout != "vertical":
        raise ModelError("predict: expected a vertical partition, received a horizontal one")
    present = tuple(k for k in clients if k in partition.sites)
    if not present:
        raise ModelError(
            f"predict: expected at least one of the clients {', '.join(clients)}; the partition "
            f"has {', '.join(partition.clients)}"
        )
    return present


def new_ledger(predictor: VFEMPredictor, partition: ClientPartition) -> Ledger:
    """Start an account; the coordinator sits at the response holder where the partition has it."""
    return Ledger(at=partition.coordinator_at(predictor.response.client))


def _linear_predictors(
    predictor: VFEMPredictor, partition: ClientPartition, present: tuple[str, ...], mean_only: bool
) -> Rounds[tuple[Floats, Bools, Gradients | None]]:
    fit, session, n = predictor.fit, partition.new_session(), partition.n_entities
    replies = yield [
        design_ask(k, "open_new_block", session, {"spec": predictor.specs[k], "partial": partition.partial})
        for k in present
    ]
    rows = {k: partition.rows[k][r.arrays["seen"]] for k, r in zip(present, replies, strict=True)}
    replies = yield [ask(k, "predict_block", session, beta=fit.beta[k], mu=fit.mu[k]) for k in present]
    mean, missing = np.full(n, fit.a), np.ones((n, len(predictor.clients)), dtype=bool)
    for k, reply in zip(present, replies, strict=True):
        mean[rows[k]] += reply.arrays["linear_predictor"]
        missing[rows[k], predictor.clients.index(k)] = False
    gradients = None
    if not mean_only:
        gradients = yield from _derivatives(predictor, rows, missing, session)
    return mean, missing, gradients


def _derivatives(
    predictor: VFEMPredictor, rows: Mapping[str, Ints], missing: Bools, session: str
) -> Rounds[Gradients]:
    """Project the derivatives of every linear predictor by the parameters on the covariance of these."""
    fit, places, number = predictor.fit, predictor.places, predictor.clients.index
    factor = covariance_factor(predictor)
    replies = yield [
        ask(k, "project_block", session, mu=fit.mu[k], factor=factor[places.beta(number(k))]) for k in rows
    ]
    by_mean = np.tile(factor[0], (len(missing), 1))
    for k, reply in zip(rows, replies, strict=True):
        by_mean[rows[k]] += reply.arrays["projection"] - fit.beta[k] @ factor[places.mu(number(k))]
    of_t = factor[places.total :]
    by_variance = missing @ of_t if len(of_t) else np.zeros_like(by_mean)
    return Gradients(by_mean, by_variance)


def covariance_factor(predictor: VFEMPredictor) -> Floats:
    """R with R R' the covariance of psi."""
    assert predictor.psi is not None
    values, vectors = np.linalg.eigh(predictor.psi)
    return np.asarray(vectors * np.sqrt(values.clip(min=0.0)))


def prediction_rsquared(predictor: VFEMPredictor, partition: ClientPartition) -> float:
    """R-squared of the predictions for the entities of a partition that every client has.

    Raises
    ------
    ModelError
        The partition lacks a client or the response, or fewer than two of its entities are complete.
    """
    holder = predictor.response.client
    lacking = [k for k in (*predictor.clients, holder) if k not in partition.sites]
    if lacking:
        raise ModelError(f"R-squared of predictions: the partition lacks client {', '.join(lacking)}")
    predictions = predict_linear(predictor, partition, mean_only=True)
    mean = predictions.mean.to_numpy()
    complete = predictions.blocks.to_numpy() == len(predictor.clients)

    def protocol() -> Rounds[Floats]:
        session, rows = partition.new_session(), partition.rows[holder]
        question = {"response": predictor.response.text, "columns": predictor.response.columns}
        yield [design_ask(holder, "open_response", session, question)]
        use = complete[rows]
        (reply,) = yield [ask(holder, "prediction_errors", session, use=use, predicted=mean[rows[use]])]
        return reply.arrays["sums"]

    n, sse, sst = partition.engine.run(protocol(), new_ledger(predictor, partition))
    if n < 2 or sst <= 0.0:
        raise ModelError(
            f"R-squared of predictions: {n:.0f} entities of the partition have the response and every block"
        )
    return float(1.0 - sse / sst)
