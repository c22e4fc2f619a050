"""Predictions of new entities by the networks of the clients that have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedstat.errors import ModelError
from fedstat.federation.crypto.masks import hides
from fedstat.federation.design.by_columns import design_ask
from fedstat.federation.message import Ask, Reply
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.masked_sums import masked as mask_sums
from fedstat.federation.rounds.products import Conversation
from fedstat.models.consent import FurtherAnalysis
from fedstat.models.laser.training.asked import FAMILY, Outcome
from fedstat.models.laser.training.course import Trained, Training
from fedstat.models.laser.training.holder_steps import average
from fedstat.models.laser.training.losses import of_scores
from fedstat.models.laser.training.networks import Networks, Optimiser
from fedstat.models.laser.training.scoring import ScoreCounts, read_scores
from fedstat.models.laser.training.tasks import Assembly, Heads, Method, assemble, members_of
from fedstat.models.vertical.prediction.coding import ResponseSource
from fedstat.models.vertical.prediction.protocol import (
    FittedBlocks,
    new_ledger,
    open_blocks,
    prediction_analysis,
    present_clients,
)
from fedstat.records import to_json
from fedstat.typing import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class FittedNetworks:
    """Trained networks and heads, with all that predictions need of a fit."""

    clients: tuple[str, ...]
    specs: Mapping[str, str]
    kind: Outcome
    method: Method
    heads_of: Heads
    hidden: tuple[int, ...]
    width: int
    head_hidden: tuple[int, ...]
    trained: Trained
    holder: str
    response: str
    modules: Mapping[str, str]

    @classmethod
    def of(
        cls, model: Any, method: Any, training: Training, trained: Trained, specs: Mapping[str, str]
    ) -> FittedNetworks:
        """Take what predictions need of a fit."""
        return cls(
            clients=model.layout.clients,
            specs=specs,
            kind=model.outcome,
            method=method,
            heads_of=model.heads,
            hidden=training.hidden,
            width=training.width,
            head_hidden=training.head_hidden,
            trained=trained,
            holder=model.layout.active,
            response=model.formula.response,
            modules=training.modules,
        )

    @property
    def assembly(self) -> Assembly:
        """Networks, heads and tasks of the method."""
        return assemble(self.method, len(self.clients), self.heads_of)

    def beside(self, client: str) -> dict[str, Any]:
        """Parameters and outputs of the network that stands beside a client's columns, where there is one."""
        own = self.trained.distilled
        return {"distilled": own[client], "joint": self.trained.joint} if own else {}

    @property
    def one_each(self) -> bool:
        """Whether predictions need the sum of one network of each client, and no more."""
        return self.method in ("laser", "standard")

    def analysis(self, call: str, partition: ClientPartition) -> FurtherAnalysis:
        """Say what a prediction is, for owners who are asked."""
        return prediction_analysis(call, self.blocks, self.response, self.kind, partition)

    @property
    def blocks(self) -> FittedBlocks:
        """Clients and codings, for the opening of blocks."""
        return FittedBlocks(self.clients, self.specs, {}, 0.0, {})


@dataclass(frozen=True, slots=True, eq=False)
class PredictedSets:
    """Probabilities (n, classes), or standardised means (n, 1), and the clients behind each, as bits (n,)."""

    predicted: Floats
    sets: Ints
    clients: tuple[str, ...]
    session: str

    def name_of(self, clients: int) -> str:
        """Write a set of clients."""
        return " + ".join(self.clients[k] for k in members_of(clients))


def predict_networks(fitted: FittedNetworks, partition: ClientPartition, call: str) -> PredictedSets:
    """Predict the entities of a partition, from the clients that have each."""

    def asking() -> Rounds[PredictedSets]:
        return predicting(fitted, partition)

    analysis = fitted.analysis(call, partition)
    return analysis.run(asking(), asking, new_ledger(partition, fitted.holder))


def predicting(fitted: FittedNetworks, partition: ClientPartition) -> Rounds[PredictedSets]:
    """Ask the clients that a partition has for the outputs of their networks.

    Where a prediction needs only the sum of these, and masks hide each, they are masked.
    """
    present = present_clients(fitted.clients, partition)
    if not present:
        raise ModelError(
            f"predict: expected at least one of the clients {', '.join(fitted.clients)}; the partition has "
            f"{', '.join(partition.clients)}"
        )
    opened = yield from open_blocks(fitted.blocks, present, partition, FAMILY)
    to, n, width = Conversation(FAMILY, opened.session, None), partition.n_entities, fitted.width
    hidden = np.array(fitted.hidden, dtype=np.int64)
    asks = [
        to.ask(
            k,
            "represent",
            json.dumps(fitted.modules.get(k, "")),
            parameters=fitted.trained.networks[k],
            hidden=hidden,
            width=width,
            shift=fitted.trained.shift[k],
            scale=fitted.trained.scale[k],
            rows=opened.rows[k],
            n=n,
            **fitted.beside(k),
        )
        for k in present
    ]
    summed = fitted.one_each and hides(len(present))
    replies = yield from (mask_sums(ask_once(asks), present, opened.session) if summed else ask_once(asks))
    outputs = np.zeros((len(fitted.assembly.networks), n, width))
    for reply in replies:
        for place, i in enumerate(fitted.assembly.at(fitted.clients.index(reply.site))):
            outputs[i] = reply.arrays["outputs"][:, place * width : (place + 1) * width]
    sets = ((~opened.missing) @ (1 << np.arange(len(fitted.clients)))).astype(np.int64)
    return PredictedSets(predict_sets(fitted, outputs, sets), sets, fitted.clients, opened.session)


def ask_once(asks: list[Ask]) -> Rounds[list[Reply]]:
    """Ask one round."""
    return (yield asks)


def count_predictions(
    fitted: FittedNetworks, response: ResponseSource, partition: ClientPartition
) -> ScoreCounts:
    """Count how well predictions agree with the response of a partition, by set of clients."""
    holder = response.client
    if holder not in partition.sites:
        raise ModelError(f"evaluate: the partition lacks client '{holder}', which has the response")

    def asking() -> Rounds[ScoreCounts]:
        found = yield from predicting(fitted, partition)
        question = {"response": response.text, "columns": response.columns}
        yield [design_ask(holder, "open_response", found.session, question)]
        rows = partition.rows[holder]
        use = found.sets[rows] > 0
        sets, code = np.unique(found.sets[rows[use]], return_inverse=True)
        units = np.array([fitted.trained.mean, fitted.trained.sd, len(sets)])
        arrays = {"predicted": found.predicted[rows[use]], "use": use, "code": code, "units": units}
        to = Conversation(FAMILY, found.session, None)
        (reply,) = yield [to.ask(holder, "score", to_json(fitted.trained.outcome), **arrays)]
        return read_scores(reply, sets)

    analysis = fitted.analysis("evaluate()", partition)
    columns = {**analysis.columns, holder: (*analysis.columns.get(holder, ()), *response.columns)}
    analysis = replace(analysis, columns=columns)
    return analysis.run(asking(), asking, new_ledger(partition, holder))


def predict_sets(fitted: FittedNetworks, outputs: Floats, sets: Ints) -> Floats:
    """Predict each entity, with outputs (I, n, d), from the clients of its set (n,); nan without any."""
    classes = max(len(fitted.trained.outcome.classes), 1)
    out = np.full((len(sets), classes), np.nan)
    for s in np.unique(sets).tolist():
        at = np.flatnonzero(sets == s)
        found = [task_scores(fitted, t, outputs[:, at]) for t in fitted.assembly.predicting(s)]
        if found:
            out[at] = average(found, fitted.method == "ensemble")
        elif s and classes > 1:
            out[at] = 1.0 / classes  # the method has no prediction for such a set: a guess
        elif s:
            out[at] = 0.0
    return out


def task_scores(fitted: FittedNetworks, task: int, outputs: Floats) -> Floats:
    """Probabilities of one task, (n, classes), or means (n, 1)."""
    one = fitted.assembly.tasks[task]
    classes = max(len(fitted.trained.outcome.classes), 1)
    widths = np.array([fitted.width, *fitted.head_hidden, classes], dtype=np.int64)
    heads = Networks(widths, np.ascontiguousarray(fitted.trained.heads), Optimiser(1.0, 0.0))
    # A masked sum stands in the place of the first client; outputs of clients that an entity lacks are zero.
    members = slice(None) if fitted.one_each else list(one.members)
    mean = np.ascontiguousarray(outputs[members].sum(axis=0).T / len(one.members))
    F = heads.output(heads.activate(one.head, mean))
    return of_scores(F, len(fitted.trained.outcome.classes))
