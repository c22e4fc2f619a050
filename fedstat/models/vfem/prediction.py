"""Prediction for entities with any pattern of missing blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import ModelError, NotAvailableError
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.design.by_columns import block_of, design_ask
from fedstat.federation.design.coding import iter_transforms
from fedstat.federation.design.formula.parse import ClientTerms
from fedstat.federation.design.spec import BlockSpec, coded_columns, read_terms
from fedstat.federation.door.facts import Entities, GivenWeights
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Rounds
from fedstat.kernels.rows import row_dots
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vfem.blocks.request import ask
from fedstat.models.vfem.covariance.protocol import Places
from fedstat.models.vfem.iteration.fit import VFEMFit
from fedstat.typing import Array, Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Response:
    """Where the response of a fit was: its holder, the left side of the formula, the columns it reads."""

    client: str
    text: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Predictor:
    """What prediction needs of a fit.

    Parameters
    ----------
    fit : VFEMFit
    clients : tuple of str
    psi : (2 + 2p, 2 + 2p) array or None
        Covariance of (a, s2, beta_1, mu_1, ...).
    specs : mapping of str to str
        How each client's columns are coded.
    response : Response
    """

    fit: VFEMFit
    clients: tuple[str, ...]
    psi: Floats | None
    specs: Mapping[str, str]
    response: Response


class PredictionResults:
    """Predicted means, their standard errors, and the variance of a new response.

    Attributes
    ----------
    predicted_mean : Series, (n,)
        E[y | the blocks that the entity has].
    se_mean : Series, (n,)
        Its standard error from the estimated parameters.
    var_resid : Series, (n,)
        v_g: residual variance, with that of the blocks that the entity lacks.
    blocks : Series of int, (n,)
        Clients of the fit that have the entity.
    ledger : Ledger
        What passed for this prediction.
    """

    def __init__(
        self,
        mean: pd.Series,
        var_mean: pd.Series | None,
        var_resid: pd.Series,
        blocks: pd.Series,
        ledger: Ledger,
    ) -> None:
        self.predicted_mean, self.var_resid, self.blocks, self.ledger = mean, var_resid, blocks, ledger
        self._var_mean = var_mean

    @property
    def se_mean(self) -> pd.Series:
        """Standard error of the predicted mean."""
        if self._var_mean is None:
            raise NotAvailableError("no standard error of the mean: the fit has no covariance")
        return self._var_mean**0.5

    def conf_int(self, obs: bool = False, alpha: float = 0.05) -> pd.DataFrame:
        """Interval of the mean, or with `obs` of a new response; columns 0 and 1."""
        if not 0.0 < alpha < 1.0:
            raise ModelError(f"conf_int: expected alpha between 0 and 1, received {alpha}")
        spread = np.sqrt(self.se_mean**2 + self.var_resid) if obs else self.se_mean
        half = stats.norm.ppf(1.0 - alpha / 2.0) * spread
        return pd.DataFrame({0: self.predicted_mean - half, 1: self.predicted_mean + half})

    def summary_frame(self, alpha: float = 0.05) -> pd.DataFrame:
        """One row per entity, with statsmodels' column names."""
        mean, obs = self.conf_int(alpha=alpha), self.conf_int(obs=True, alpha=alpha)
        return pd.DataFrame(
            {
                "mean": self.predicted_mean,
                "mean_se": self.se_mean,
                "mean_ci_lower": mean[0],
                "mean_ci_upper": mean[1],
                "obs_ci_lower": obs[0],
                "obs_ci_upper": obs[1],
            }
        )


def predict_block(data: SiteData, state: State, beta: Floats, mu: Floats) -> dict[str, Array]:
    """Centred linear predictor of the opened rows."""
    X = np.ascontiguousarray(block_of(data, state).X)
    check_lengths(data.name, beta=(beta, X.shape[1]), mu=(mu, X.shape[1]))
    return {"linear_predictor": row_dots(X, beta) - float(mu @ beta)}


def project_block(data: SiteData, state: State, mu: Floats, factor: Floats) -> dict[str, Array]:
    """Project the centred rows on a factor of the covariance of the estimates."""
    return {"projection": (block_of(data, state).X - mu) @ factor}


def prediction_errors(data: SiteData, state: State, use: Bools, predicted: Floats) -> dict[str, Array]:
    """Compare predictions with the response of the rows in `use`.

    Returns
    -------
    dict
        ``sums``: rows compared, squared errors, squared deviations of the response from its mean.
    """
    response = state.use("response")
    check_lengths(data.name, use=(use, len(response)), predicted=(predicted, int(np.count_nonzero(use))))
    y = response[use]
    there = np.isfinite(y)
    y, predicted = y[there], predicted[there]
    state.rest_on(len(y))
    deviation = y - y.mean() if len(y) else y
    error = y - predicted
    return {"sums": np.array([len(y), error @ error, deviation @ deviation])}


STEPS: Mapping[str, Step] = {
    "predict_block": Step(
        predict_block,
        {"beta": Declared("aggregate", "coefficients"), "mu": Declared("aggregate", "means")},
        {
            "linear_predictor": Declared(
                "per entity", "linear predictor x'beta of the client's block", maskable=True
            )
        },
    ),
    "project_block": Step(
        project_block,
        {
            "mu": Declared("aggregate", "means"),
            "factor": Declared("aggregate", "factor of the covariance of the estimates", 2),
        },
        {
            "projection": Declared(
                "raw columns", "columns projected on the covariance of the estimates", 2, maskable=True
            )
        },
    ),
    "prediction_errors": Step(
        prediction_errors,
        {
            "use": Declared("presence", "which entities are compared", dtype="bool"),
            "predicted": Declared("per entity", "predictions", weighs="predictions"),
        },
        {
            "sums": Declared(
                "aggregate",
                "number of predictions, their squared errors, squared deviations",
                behind=(Entities, GivenWeights),
            )
        },
    ),
}


def released_specs(model: VerticalModel, clients: tuple[str, ...]) -> dict[str, str]:
    """Ask the sites of a fit how they coded their columns; those that it left out are left out here too."""
    terms = {part.client: part for part in model.formula.clients}

    def protocol() -> Rounds[dict[str, str]]:
        replies = yield [design_ask(k, "release_spec", model._session) for k in clients]
        return {k: keep_coded(reply.text, terms[k]) for k, reply in zip(clients, replies, strict=True)}

    return model.engine.run(protocol(), model.new_ledger())


def keep_coded(spec: str, terms: ClientTerms) -> str:
    """Keep the coding of some of the terms of an institution."""
    whole = BlockSpec.from_json(spec)
    if whole.terms == terms.terms:
        return spec
    parsed = read_terms(terms.terms, terms.columns)
    transforms = {t.text for term in parsed for factor in term for t in iter_transforms(factor.tree)}
    columns = [(n, t) for n, t in zip(whole.names, whole.term_names, strict=True) if t in terms.terms]
    kinds = {name: whole.kinds[name] for name in terms.columns}
    coded = coded_columns(parsed, kinds)
    return replace(
        whole,
        terms=terms.terms,
        columns=terms.columns,
        names=tuple(name for name, _ in columns),
        term_names=tuple(term for _, term in columns),
        kinds=kinds,
        levels={name: whole.levels[name] for name in coded},
        state={text: state for text, state in whole.state.items() if text in transforms},
        means={name: mean for name, mean in whole.means.items() if name in terms.columns},
    ).to_json()


def predict_entities(
    predictor: Predictor, partition: ClientPartition, *, mean_only: bool
) -> PredictionResults:
    """Predict for every entity of a partition.

    Raises
    ------
    ModelError
        The partition is horizontal, or shares no client with the fit.
    DesignError
        A client's columns cannot be coded as in the fit.
    """
    present = present_clients(predictor.clients, partition)
    ledger = new_ledger(predictor, partition)
    protocol = _prediction(predictor, partition, present, mean_only or predictor.psi is None)
    mean, var_mean, var_resid, blocks = partition.engine.run(protocol, ledger)
    index = partition.entities
    return PredictionResults(
        pd.Series(mean, index=index),
        None if var_mean is None else pd.Series(var_mean, index=index),
        pd.Series(var_resid, index=index),
        pd.Series(blocks, index=index),
        ledger,
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


def new_ledger(predictor: Predictor, partition: ClientPartition) -> Ledger:
    """Start an account; the coordinator sits at the response holder where the partition has it."""
    return Ledger(at=partition.coordinator_at(predictor.response.client))


def prediction_rsquared(predictor: Predictor, partition: ClientPartition) -> float:
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
    predictions = predict_entities(predictor, partition, mean_only=True)
    mean = predictions.predicted_mean.to_numpy()
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


def _prediction(
    predictor: Predictor, partition: ClientPartition, present: tuple[str, ...], mean_only: bool
) -> Rounds[tuple[Floats, Floats | None, Floats, Ints]]:
    fit, session, n = predictor.fit, partition.new_session(), partition.n_entities
    replies = yield [
        design_ask(k, "open_new_block", session, _content(predictor.specs[k], partition)) for k in present
    ]
    rows = {k: partition.rows[k][r.arrays["seen"]] for k, r in zip(present, replies, strict=True)}
    replies = yield [ask(k, "predict_block", session, beta=fit.beta[k], mu=fit.mu[k]) for k in present]
    mean = np.full(n, fit.a)
    var_resid, blocks = np.full(n, fit.s2 + sum(fit.t.values())), np.zeros(n, dtype=np.int64)
    for k, reply in zip(present, replies, strict=True):
        mean[rows[k]] += reply.arrays["linear_predictor"]
        var_resid[rows[k]] -= fit.t[k]
        blocks[rows[k]] += 1
    if mean_only:
        return mean, None, var_resid, blocks
    factor = covariance_factor(predictor)
    places = Places(tuple(len(fit.beta[k]) for k in predictor.clients))
    number = {k: j for j, k in enumerate(predictor.clients)}
    replies = yield [
        ask(k, "project_block", session, mu=fit.mu[k], factor=factor[places.beta(number[k])]) for k in present
    ]
    total = np.tile(factor[0], (n, 1))
    for k, reply in zip(present, replies, strict=True):
        total[rows[k]] += reply.arrays["projection"] - fit.beta[k] @ factor[places.mu(number[k])]
    return mean, np.einsum("ij,ij->i", total, total), var_resid, blocks


def covariance_factor(predictor: Predictor) -> Floats:
    """R with R R' the covariance of psi."""
    assert predictor.psi is not None
    values, vectors = np.linalg.eigh(predictor.psi)
    return np.asarray(vectors * np.sqrt(values.clip(min=0.0)))


def _content(spec: str, partition: ClientPartition) -> dict[str, Any]:
    return {"spec": spec, "partial": partition.partial}
