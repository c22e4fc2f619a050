"""Predicted means of entities that every institution has, and with missing blocks of all."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from fedstat.errors import DataWarning, ModelError
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.design.by_columns import block_of, design_ask
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Rounds
from fedstat.inference.estimate import Estimate
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.kernels.rows import row_dots
from fedstat.models.vertical.exchange.protocol import Conversation
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vglm.response.distributions import means_of
from fedstat.typing import Array, Floats


def predict_block(data: SiteData, state: State, beta: Floats) -> dict[str, Array]:
    """Linear predictor of the opened rows, one value per entity."""
    X = np.ascontiguousarray(block_of(data, state).X)
    check_lengths(data.name, beta=(beta, X.shape[1]))
    return {"linear_predictor": row_dots(X, beta)}


STEPS: Mapping[str, Step] = {
    "predict_block": Step(
        predict_block,
        {"beta": Declared("aggregate", "coefficients", dtype="float64")},
        {"linear_predictor": Declared("per entity", "linear predictor x'beta of the client's block")},
    )
}


@dataclass(frozen=True, slots=True)
class Predictor:
    """What prediction needs of a fit.

    Parameters
    ----------
    estimate : Estimate
    clients : tuple of str
    family : DistributionSpec
    specs : mapping of str to str
        How each client's columns are coded; empty before the sites were asked.
    holder : str
        The institution of the response.
    means : mapping of str to float
        Of a fit with missing blocks: mean linear predictor of each client's block, for those that lack it.
    """

    estimate: Estimate
    clients: tuple[str, ...]
    family: DistributionSpec
    specs: Mapping[str, str]
    holder: str
    means: Mapping[str, float] = field(default_factory=dict)

    def beta(self, client: str) -> Floats:
        """Coefficients of a client's columns."""
        return np.asarray(self.estimate.params[np.array(self.estimate.clients) == client])


def released_specs(model: VerticalModel, clients: tuple[str, ...]) -> dict[str, str]:
    """Ask the sites of a fit how they coded their columns."""

    def protocol() -> Rounds[dict[str, str]]:
        replies = yield [design_ask(k, "release_spec", model._session) for k in clients]
        return {k: reply.text for k, reply in zip(clients, replies, strict=True)}

    return model.engine.run(protocol(), model.new_ledger())


def predict_means(predictor: Predictor, partition: ClientPartition) -> pd.Series:
    """Predict for every entity of a partition; nan where a client lacks it, unless its mean is known.

    Raises
    ------
    ModelError
        The partition is horizontal, or lacks a client of the fit.
    DesignError
        A client's columns cannot be coded as in the fit.

    Warns
    -----
    DataWarning
        Linear predictors have no mean under the link.
    """
    if partition.layout != "vertical":
        raise ModelError("predict: expected a vertical partition, received a horizontal one")
    means = predictor.means
    wanted = [k for k in predictor.clients if predictor.beta(k).any()]
    lacking = [k for k in wanted if k not in partition.sites]
    if lacking and not means:
        raise ModelError(f"predict: the partition lacks the client {', '.join(lacking)} of the fit")
    needed = [k for k in wanted if k not in lacking]
    session, n = partition.new_session(), partition.n_entities
    alone = float(predictor.estimate.params[0]) + sum(means.values())

    def protocol() -> Rounds[Floats]:
        asks = []
        for k in needed:
            content = {"spec": predictor.specs[k], "partial": partition.partial}
            asks.append(design_ask(k, "open_new_block", session, content))
        opened = yield asks
        asking = Conversation("vglm", session, None)
        replies = yield [asking.ask(k, "predict_block", beta=predictor.beta(k)) for k in needed]
        eta, seen = np.full(n, alone), np.zeros(n, dtype=np.int64)
        for k, block, reply in zip(needed, opened, replies, strict=True):
            rows = partition.rows[k][block.arrays["seen"]]
            eta[rows] += reply.arrays["linear_predictor"] - means.get(k, 0.0)
            seen[rows] += 1
        return np.where((seen == len(needed)) | bool(means), eta, np.nan)

    at = partition.coordinator_at(predictor.holder)
    eta = partition.engine.run(protocol(), Ledger(at=at)) if needed else np.full(n, alone)
    mean = means_of(predictor.family, eta)
    wrong = int((np.isnan(mean) & ~np.isnan(eta)).sum())
    if wrong:
        warnings.warn(
            f"predict: {wrong:,} of {n:,} entities are left out (nan): {predictor.family} has no mean at "
            "their linear predictors; with a log link every entity has one",
            DataWarning,
            stacklevel=3,
        )
    return pd.Series(mean, index=partition.entities)
