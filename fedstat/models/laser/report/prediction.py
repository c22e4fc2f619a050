"""Predictions of new entities by the networks of the institutions that have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstat.errors import ModelError
from fedstat.federation.crypto.masks import hides
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Fit, Rounds
from fedstat.federation.rounds.masked_sums import masked as mask_sums
from fedstat.federation.rounds.products import Conversation
from fedstat.models.consent import FurtherAnalysis
from fedstat.models.laser.training.asked import FAMILY, Outcome
from fedstat.models.laser.training.course import Trained, Training
from fedstat.models.laser.training.holder_steps import average
from fedstat.models.laser.training.losses import of_scores
from fedstat.models.laser.training.networks import Networks, Optimiser
from fedstat.models.laser.training.tasks import Assembly, Heads, Method, assemble, members_of
from fedstat.models.vertical.prediction.protocol import (
    FittedBlocks,
    OpenedBlocks,
    new_ledger,
    open_blocks,
    prediction_analysis,
    present_clients,
)
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
        """Parameters and outputs of the network that stands beside a site's columns, where there is one."""
        own = self.trained.distilled
        return {"distilled": own[client], "joint": self.trained.joint} if own else {}

    @property
    def one_each(self) -> bool:
        """Whether predictions need the sum of one network of each institution, and no more."""
        return self.method in ("laser", "standard")

    def analysis(self, call: str, partition: ClientPartition) -> FurtherAnalysis:
        """Say what a prediction is, for owners who are asked."""
        return prediction_analysis(call, self.blocks, self.response, self.kind, partition)

    @property
    def blocks(self) -> FittedBlocks:
        """Institutions and codings, for the opening of blocks."""
        return FittedBlocks(self.clients, self.specs, {}, 0.0, {})


@dataclass(frozen=True, slots=True, eq=False)
class PredictedSets:
    """Probabilities (n, classes), or standardised means (n, 1), and the sites behind each, as bits (n,)."""

    predicted: Floats
    sets: Ints
    clients: tuple[str, ...]

    def name_of(self, clients: int) -> str:
        """Write a set of institutions."""
        return " + ".join(self.clients[k] for k in members_of(clients))


def predict_networks(
    fitted: FittedNetworks, partition: ClientPartition, call: str, head: int | None = None
) -> PredictedSets:
    """Predict the entities of a partition, from the sites that have each; by one head, or on average."""

    def asking() -> Rounds[PredictedSets]:
        opened = yield from open_networks(fitted, partition)
        return (yield from hidden(fitted, opened, predicted(fitted, opened, partition, head=head)))

    analysis = fitted.analysis(call, partition)
    return analysis.run(asking(), asking, new_ledger(partition, fitted.holder))


def open_networks(fitted: FittedNetworks, partition: ClientPartition) -> Rounds[OpenedBlocks]:
    """Open the columns of the institutions that a partition has."""
    present = present_clients(fitted.clients, partition)
    if not present:
        raise ModelError(
            f"predict: expected at least one of the institutions {', '.join(fitted.clients)}; the partition "
            f"has {', '.join(partition.clients)}"
        )
    return (yield from open_blocks(fitted.blocks, present, partition, FAMILY))


def hidden(fitted: FittedNetworks, opened: OpenedBlocks, protocol: Rounds[Fit]) -> Rounds[Fit]:
    """Mask the outputs of networks where a prediction needs only their sum, and masks hide each."""
    present = tuple(opened.rows)
    return (
        mask_sums(protocol, present, opened.session) if fitted.one_each and hides(len(present)) else protocol
    )


def predicted(
    fitted: FittedNetworks,
    opened: OpenedBlocks,
    partition: ClientPartition,
    *,
    permuted: tuple[str, int] | None = None,
    head: int | None = None,
) -> Rounds[PredictedSets]:
    """Ask the institutions for the outputs of their networks; of one that is `permuted`, by a number.

    Its columns are exchanged between the entities that it has.
    """
    to, n, width = Conversation(FAMILY, opened.session, None), partition.n_entities, fitted.width
    trained, hidden_units = fitted.trained, np.array(fitted.hidden, dtype=np.int64)
    replies = yield [
        to.ask(
            k,
            "represent",
            json.dumps(fitted.modules.get(k, "")),
            parameters=trained.networks[k],
            hidden=hidden_units,
            width=width,
            shift=trained.shift[k],
            scale=trained.scale[k],
            rows=rows,
            n=n,
            **fitted.beside(k),
            **({"permuted": permuted[1]} if permuted and permuted[0] == k else {}),
        )
        for k, rows in opened.rows.items()
    ]
    outputs = np.zeros((len(fitted.assembly.networks), n, width))
    for reply in replies:
        for place, i in enumerate(fitted.assembly.at(fitted.clients.index(reply.site))):
            outputs[i] = reply.arrays["outputs"][:, place * width : (place + 1) * width]
    sets = ((~opened.missing) @ (1 << np.arange(len(fitted.clients)))).astype(np.int64)
    return PredictedSets(predict_sets(fitted, outputs, sets, head), sets, fitted.clients)


def predict_sets(fitted: FittedNetworks, outputs: Floats, sets: Ints, head: int | None = None) -> Floats:
    """Predict each entity, with outputs (I, n, d), from the institutions of its set (n,); nan without any.

    By one `head`, nan for entities that its institution lacks, or by the average of those of the set.
    """
    classes = max(len(fitted.trained.outcome.classes), 1)
    out = np.full((len(sets), classes), np.nan)
    for s in np.unique(sets).tolist():
        at = np.flatnonzero(sets == s)
        tasks = fitted.assembly.predicting(s)
        if head is not None:
            tasks = [t for t in tasks if fitted.assembly.tasks[t].head == head]
        found = [task_scores(fitted, t, outputs[:, at]) for t in tasks]
        if found:
            out[at] = average(found, fitted.method == "ensemble")
        elif head is not None:
            continue
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
