"""Where mixtures begin: k-means of the factor scores of all sites, and each site's own clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedstat.federation.rounds.engine import Rounds
from fedstat.inference.mixture.classification import hard
from fedstat.models.m2sem.course.exchange import Exchange
from fedstat.models.m2sem.course.mixture import Course, same_clusters, soft
from fedstat.typing import Floats, Ints

MEANS_ROUNDS, SHORT_ROUNDS = 6, 8
GOING_ON = 2
"""How many of the starts go on."""
FAR_BEHIND = 5
"""Latest gains by which one that is behind the best is given up."""


@dataclass(frozen=True, slots=True)
class StartPlan:
    """How many starts by k-means, whether institutions' own clusters too, local steps while many go on."""

    means: int
    own: bool
    steps: int
    local_steps: int
    rounds: int


def start(exchange: Exchange, sizes: Sequence[tuple[int, int]], plan: StartPlan) -> Rounds[list[Course]]:
    """Fit mixtures of sizes (K, Q) without penalty, from the best of several starts, side by side.

    One of a size at which all fail has failed itself.
    """
    begun = yield from _first(exchange, sizes, plan)
    for course in begun:
        # All go on for a while: which is the best cannot be seen before.
        course.trace.clear()
    yield from exchange.ascend(begun, plan.steps, SHORT_ROUNDS)
    going: list[list[Course]] = []
    for size in sizes:
        going.append(_foremost([one for one in begun if (one.clusters, one.factors) == size])[:GOING_ON])
    for _ in range(plan.rounds):
        # Two that have become one go on as one.
        going = [some[:1] if len(some) > 1 and same_clusters(*some) else some for some in going]
        every = [one for some in going for one in some]
        yield from exchange.ascend(every, plan.local_steps, 1, enough=lambda one: one.settled)
        going = [_near(_foremost(some)) for some in going]
    return [some[0] for some in going]


def most_rounds(plan: StartPlan) -> int:
    """Count the rounds that starting takes at most."""
    return (MEANS_ROUNDS if plan.means else 0) + int(plan.own) + SHORT_ROUNDS + plan.rounds


def _foremost(some: Sequence[Course]) -> list[Course]:
    """Sort mixtures that have not failed, the best first; one that failed where all have."""
    left = sorted((one for one in some if not one.failed), key=lambda one: -one.penalised)
    return left or list(some[:1])


def _near(some: Sequence[Course]) -> list[Course]:
    """Keep the best, which is the first, and those that may yet come up with it."""
    best = some[0].penalised
    return [one for one in some if one is some[0] or best - one.penalised <= FAR_BEHIND * one.gain]


def _first(exchange: Exchange, sizes: Sequence[tuple[int, int]], plan: StartPlan) -> Rounds[list[Course]]:
    """Cluster factor scores: squared distances add over institutions."""
    rng, n = exchange.rng, exchange.subjects.total
    moving = [
        Course(K, Q, hard(rng.random((n, K))), f"start {number + 1}", nodes=exchange.nodes)
        for K, Q in sizes
        if K > 1
        for number in range(plan.means)
    ]
    begun = [Course(1, Q, np.ones((n, 1)), "start", nodes=exchange.nodes) for K, Q in sizes if K == 1]
    own = (
        yield from _own_clusters(exchange, [size for size in sizes if size[0] > 1]) if plan.own else nothing()
    )
    for _ in range(MEANS_ROUNDS if moving else 0):
        for one in moving:
            one.r = _filled(hard(one.r), exchange)
        yield from exchange.improve(moving, 0, scores=True)
    found = [(one.clusters, one.factors, np.argmax(one.r, axis=1), one.name) for one in moving]
    for K, Q, labels, name in [*found, *own]:
        begun.append(Course(K, Q, soft(labels, K), name, nodes=exchange.nodes))
    return begun


def nothing() -> Rounds[list[tuple[int, int, Ints, str]]]:
    """Ask for nothing."""
    yield from ()
    return []


def _filled(r: Floats, exchange: Exchange) -> Floats:
    """Give clusters that are too small a random part of the largest one."""
    K = r.shape[1]
    for _ in range(4 * K):
        found = exchange.subjects.too_few(r)
        if found is None:
            return r
        labels = np.argmax(r, axis=1)
        members = np.flatnonzero(labels == np.argmax(np.bincount(labels, minlength=K)))
        labels[exchange.rng.permutation(members)[: len(members) // 2]] = found[1]
        r = np.eye(K)[labels]
    return hard(exchange.rng.random(r.shape))


def _own_clusters(
    exchange: Exchange, sizes: Sequence[tuple[int, int]]
) -> Rounds[list[tuple[int, int, Ints, str]]]:
    """Ask every institution for clusters of its entities by its own columns."""
    s, pairs = exchange.subjects, []
    asks = []
    for K, Q in sizes:
        for client in s.clients:
            pairs.append((K, Q, client))
            asks.append(
                exchange.asking.ask(
                    client,
                    "own_clusters",
                    clusters=np.array(K),
                    factors=np.array(Q),
                )
            )
    replies = yield asks
    exchange.rounds += 1
    out = []
    for (K, Q, client), reply in zip(pairs, replies, strict=True):
        labels = np.full(s.total, -1, dtype=np.int64)
        labels[s.place[client]] = reply.arrays["labels"]
        out.append((K, Q, labels, f"clusters of {client}"))
    return out
