"""What results ask of institutions beside the fit: analyses of their own, to which owners consent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fedstat.federation.account.ledger import Ledger
from fedstat.federation.door.owner.policy import Policy
from fedstat.federation.door.site import FAMILIES
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.forecast.dry_site import DrySite
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Rounds
from fedstat.inference.mixture.bch import ModalSums
from fedstat.models.consent import FurtherAnalysis
from fedstat.models.m2sem.client.asked import FAMILY
from fedstat.models.m2sem.inference.outside import ask_outside
from fedstat.typing import Array, Floats, Ints


def analysis_of(
    partition: ClientPartition,
    call: str,
    clusters: str,
    columns: Mapping[str, Sequence[str]],
    step: str,
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
    guessed: frozenset[str] = frozenset(),
) -> FurtherAnalysis:
    """Say what one step asks of sites that read these `columns`, whose arrays have these `shapes` by site."""
    invent = partial(_invent, partition.rows, step, shapes)
    return FurtherAnalysis(
        partition, call, clusters, "a mixture of factor models", invent, columns, guessed=guessed
    )


def _invent(
    rows: Mapping[str, Ints],
    step: str,
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
    policies: Mapping[str, Policy],
) -> dict[str, DrySite]:
    declared, sites = FAMILIES[FAMILY][step], {}
    for name, policy in policies.items():
        answer = _answer(shapes.get(name, {}), declared.text_out is not None or declared.text_in is not None)
        instead = {(FAMILY, step): replace(declared, run=answer, after=None)}
        sites[name] = DrySite(name, policy, len(rows[name]), instead, rows[name])
    return sites


def _answer(shapes: Mapping[str, tuple[int, ...]], with_text: bool) -> Callable[..., Any]:
    """Return a step that gives zeros of these shapes."""

    def give(data: SiteData, state: State, *given: Array, **arrays: Array) -> Any:
        for declared in FAMILIES[FAMILY].values():
            for array in declared.given.values():
                state.told.update(array.behind)  # facts about rows that are not there
        state.rest_on(data.table.n_rows)
        out = {name: np.zeros(shape) for name, shape in shapes.items()}
        return (out, "") if with_text else out

    return give


def ask_scores(model: Any, client: str, slot: int) -> Floats:
    """Ask an institution for the factor scores of its entities in a mixture of a model's session."""

    def protocol() -> Rounds[Floats]:
        (reply,) = yield [model._asking.ask(client, "release_scores", slot=np.array(slot))]
        return reply.arrays["scores"]

    width = model.n_factors * len(model._agreed.modalities[client])
    shapes = {client: {"scores": (len(model._subjects.place[client]), width)}}
    call, columns = f"M2SEMResults.factor_scores({client!r})", {client: model._columns_read(client)}
    analysis = analysis_of(model.partition, call, model._description, columns, "release_scores", shapes)
    return analysis.run(protocol(), protocol, model._new_ledger())


def ask_sums_outside(
    model: Any, client: str, variable: str, cluster: Ints, ledger: Ledger
) -> tuple[tuple[str, ...], ModalSums]:
    """Ask an institution for sums of a variable by cluster (n_rows,), in a model's session."""
    step, K = "sum_outside", model.n_clusters
    ask = partial(ask_outside, model._asking, client, variable, cluster, K)
    shapes = {client: {"entities": (K,), "means": (K, 1), "products": (K, 1, 1)}}
    # Of a session columns stay in play.
    columns = {client: (variable, *model._columns_read(client))}
    call = f"M2SEMResults.outside({variable!r})"
    analysis = analysis_of(
        model.partition, call, model._description, columns, step, shapes, frozenset({step})
    )
    return analysis.run(ask(), ask, ledger)
