"""Predictions of new entities by the networks of the clients that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedstat.errors import ModelError
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Conversation
from fedstat.models.laser.asked import FAMILY, OutcomeTold
from fedstat.models.laser.losses import softmax
from fedstat.models.laser.networks import Networks, Optimiser
from fedstat.models.laser.tasks import Assembly, Heads, Method, assemble
from fedstat.models.vertical.prediction.protocol import FittedBlocks, new_ledger, open_blocks, present_clients
from fedstat.typing import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class FittedNetworks:
    """Trained networks by client, (m, q), and heads (H, q), with all that predictions need of a fit."""

    clients: tuple[str, ...]
    specs: Mapping[str, str]
    method: Method
    heads_of: Heads
    hidden: tuple[int, ...]
    width: int
    head_hidden: tuple[int, ...]
    networks: Mapping[str, Floats]
    heads: Floats
    shift: Mapping[str, Floats]
    scale: Mapping[str, Floats]
    outcome: OutcomeTold
    mean: float
    sd: float
    holder: str

    @property
    def assembly(self) -> Assembly:
        """Networks, heads and tasks of the method."""
        return assemble(self.method, len(self.clients), self.heads_of)

    @property
    def blocks(self) -> FittedBlocks:
        """Clients and codings, for the opening of blocks."""
        return FittedBlocks(self.clients, self.specs, {}, 0.0, {})


def predict_networks(fitted: FittedNetworks, partition: ClientPartition) -> Floats:
    """Probabilities (n, classes), or standardised means (n, 1), of the entities of a partition."""
    present = present_clients(fitted.clients, partition)
    if not present:
        raise ModelError(
            f"predict: expected at least one of the clients {', '.join(fitted.clients)}; the partition has "
            f"{', '.join(partition.clients)}"
        )

    def asking() -> Rounds[tuple[Floats, Ints]]:
        opened = yield from open_blocks(fitted.blocks, present, partition, FAMILY)
        to = Conversation(FAMILY, opened.session, None)
        n = partition.n_entities
        replies = yield [
            to.ask(
                k,
                "represent",
                parameters=fitted.networks[k],
                hidden=np.array(fitted.hidden, dtype=np.int64),
                width=fitted.width,
                shift=fitted.shift[k],
                scale=fitted.scale[k],
                rows=opened.rows[k],
                n=n,
            )
            for k in present
        ]
        outputs = np.zeros((len(fitted.assembly.networks), n, fitted.width))
        for reply in replies:
            for place, i in enumerate(fitted.assembly.at(fitted.clients.index(reply.site))):
                outputs[i] = reply.arrays["outputs"][:, place * fitted.width : (place + 1) * fitted.width]
        sets = (~opened.missing) @ (1 << np.arange(len(fitted.clients)))
        return outputs, sets.astype(np.int64)

    outputs, sets = partition.engine.run(asking(), new_ledger(partition, fitted.holder))
    return predict_sets(fitted, outputs, sets)


def predict_sets(fitted: FittedNetworks, outputs: Floats, sets: Ints) -> Floats:
    """Predict each entity, with outputs (I, n, d), from the clients of its set (n,); nan without any."""
    classes = max(len(fitted.outcome.classes), 1)
    out = np.full((len(sets), classes), np.nan)
    for s in np.unique(sets).tolist():
        at = np.flatnonzero(sets == s)
        found = [task_scores(fitted, t, outputs[:, at]) for t in tasks_for(fitted, s)]
        if found:
            out[at] = np.mean(found, axis=0)
        elif s and classes > 1:
            out[at] = 1.0 / classes  # the method has no prediction for such a set: a guess
        elif s:
            out[at] = 0.0
    return out


def tasks_for(fitted: FittedNetworks, clients: int) -> list[int]:
    """Tasks that predict for an entity of a set of clients."""
    assembly = fitted.assembly
    if fitted.method in ("local", "ensemble"):
        return [t for t, task in enumerate(assembly.tasks) if task.clients & clients]
    return assembly.of_set(clients)


def task_scores(fitted: FittedNetworks, task: int, outputs: Floats) -> Floats:
    """Probabilities of one task, (n, classes), or means (n, 1)."""
    one = fitted.assembly.tasks[task]
    classes = max(len(fitted.outcome.classes), 1)
    widths = np.array([fitted.width, *fitted.head_hidden, classes], dtype=np.int64)
    heads = Networks(widths, np.ascontiguousarray(fitted.heads), Optimiser(1.0, 0.0))
    mean = np.ascontiguousarray(outputs[list(one.members)].mean(axis=0).T)
    F = heads.output(heads.activate(one.head, mean))
    return (softmax(F) if fitted.outcome.classes else F).T
