"""EM over sites: state of a mixture, exchange of posteriors, and starting values."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import logsumexp

from fedstat.codec import to_json
from fedstat.federation.message import Reply, Request
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.inference.convergence import gains_little
from fedstat.inference.likelihood import bic, ebic
from fedstat.inference.mixtures import hard_assignment, integrated_criterion
from fedstat.models.m2sem.request import (
    NONE,
    BeginRequest,
    MixtureUpdateRequest,
    RoundRequest,
    by_pattern,
    digest_posteriors,
)
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# The state of one mixture during maximization, at the coordinator.

GAIN, CHANGE = 0.005, 1e-3
"""A mixture has converged if a round gains less than this, and no posterior changes by more."""
AGREE = 0.95
"""Smallest share of entities in the same clusters for a start to count as one that reached the best."""
ALIKE = 0.01
"""Largest share of entities that may be in other clusters in two mixtures that count as one."""
NEAR = 0.1
"""Gain of a round below which a mixture is close enough to its maximum to be compared with others."""
REST_OF_WEIGHT = 1e-3


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of loadings and of means, first for a fit of all columns, then adapted `anew` to refits."""

    lam1: float = 0.0
    lam2: float = 0.0
    anew: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        again = f", anew {self.anew[0]}.{self.anew[1]}" if self.anew[0] else ""
        return f"{self.lam1:g}, {self.lam2:g}{again}"


@dataclass(frozen=True, slots=True, eq=False)
class EntityIndex:
    """Which sites have which entities: sites in the order of their names, positions among `total`.

    `pattern` (N,) are the presence patterns, and `members` (G, M) are the sites of each. `least` is the
    smallest number of entities that each site requires for a cluster, and the largest share that a single one
    may have.
    """

    sites: tuple[str, ...]
    place: Mapping[str, Ints]
    pattern: Ints
    members: Bools
    least: Mapping[str, tuple[int, float]]

    @property
    def total(self) -> int:
        """Number of entities."""
        return len(self.pattern)

    def too_few(self, r: Floats) -> tuple[str, int] | None:
        """Find a site at which a cluster of posteriors r (N, K) has too few entities for its owner."""
        for site in self.sites:
            count, share = self.least[site]
            at = r[self.place[site]]
            total, squares = at.sum(axis=0), (at * at).sum(axis=0)
            heavy = share * total < at.max(axis=0, initial=0.0)
            wrong = (total**2 < count * squares) | ~(total > 0.0) | heavy
            # The few largest weights must not have nearly all of the total, either.
            if 1 < count <= len(at):
                rest = np.partition(at, len(at) - count + 1, axis=0)[: len(at) - count + 1].sum(axis=0)
                wrong |= rest < 1.01 * REST_OF_WEIGHT * total
            if wrong.any():
                return site, int(np.argmax(wrong))
        return None


@dataclass(slots=True, eq=False)
class MixtureState:
    """A mixture of K clusters and Q factors during maximization: posteriors r (N, K), shares w.

    `slot` names it at the sites, and `source` the mixture that it continues. `trace` has the penalized
    log-likelihood after every round; `change` is the largest change of a posterior in the latest one. `half`
    (N,) are the entities with positive weight, all if it is None. `starts` counts the starts with these
    clusters, and all of them.
    """

    clusters: int
    factors: int
    r: Floats
    name: str = ""
    slot: int = NONE
    source: int = NONE
    penalties: Penalties = field(default_factory=Penalties)
    fixed: bool = False
    weigh: bool = False
    report: bool = False
    nodes: int = 7
    half: Floats | None = None
    w: Floats = field(default_factory=lambda: np.ones(1))
    loglik: float = -np.inf
    penalty: float = 0.0
    parameters: int = 0
    support: Mapping[str, Bools] = field(default_factory=dict)
    trace: list[float] = field(default_factory=list)
    change: float = np.inf
    emptied: list[str] = field(default_factory=list)
    failed: str = ""
    starts: tuple[int, int] = (1, 1)

    @property
    def penalized(self) -> float:
        """Penalized observed log-likelihood."""
        return self.loglik - self.penalty

    @property
    def gain(self) -> float:
        """Gain of the latest round."""
        return self.trace[-1] - self.trace[-2] if len(self.trace) > 1 else np.inf

    @property
    def converged(self) -> bool:
        """Whether it has converged or failed."""
        return gains_little(self.gain, self.loglik, len(self.r), GAIN) and self.change < CHANGE

    @property
    def settled(self) -> bool:
        """Whether it is close enough to its maximum to be compared with others."""
        return self.gain < NEAR

    @property
    def sent(self) -> Floats:
        """Posteriors in the form that is sent."""
        return self.r if self.half is None else self.r * self.half[:, None]

    @property
    def free(self) -> int:
        """Number of free parameters."""
        return self.parameters + self.clusters - 1

    def criterion(self, select: str, n: int, chosen: int = 0, columns: int = 0) -> float:
        """BIC, EBIC or ICL of the mixture on n entities, with `chosen` columns; lower is better.

        EBIC adds twice the logarithm of the number of supports of the same size (Chen and Chen 2008, gamma
        1); ICL adds twice the entropy of the posteriors.
        """
        twice = -2.0 * self.loglik
        if select == "ebic":
            return float(ebic(twice, self.free, n, chosen=chosen, candidates=columns, gamma=1.0))
        return (
            integrated_criterion(twice, self.free, n, self.r)
            if select == "icl"
            else float(bic(twice, self.free, n))
        )

    def settle(self, D: Floats, totals: Floats) -> None:
        """Record differences of log densities (N, K - 1), summed over sites, and the three totals."""
        a = np.log(np.maximum(self.w, 1e-300)) + np.column_stack([D, np.zeros(len(D))])
        top = logsumexp(a, axis=1)
        r = np.exp(a - top[:, None])
        self.loglik = float(top.sum() + totals[0])
        self.penalty, self.parameters = float(totals[1]), round(float(totals[2]))
        self.change = float(np.abs(r - self.r).max(initial=0.0))
        self.r = r
        self.trace.append(self.penalized)

    def refill(self, k: int, rng: np.random.Generator) -> None:
        """Restart an emptied cluster as a random half of the largest one."""
        labels = np.argmax(self.r, axis=1)
        largest = int(np.argmax(np.bincount(labels, minlength=self.clusters)))
        members = np.flatnonzero(labels == largest)
        labels[rng.permutation(members)[: len(members) // 2]] = k
        self.r = soft(labels, self.clusters)
        self.trace, self.change = [], np.inf


def same_clusters(a: MixtureState, b: MixtureState) -> bool:
    """Whether two mixtures have the same clusters, in any order."""
    return overlap(a.r, b.r) >= 1.0 - ALIKE and abs(a.penalized - b.penalized) < 1.0


def overlap(a: Floats, b: Floats) -> float:
    """Share of entities in the same most likely clusters, in any order, of posteriors (n, K)."""
    return float(np.sort(hard_assignment(a).T @ hard_assignment(b), axis=1)[:, -1].sum() / len(a))


def soft(labels: Ints, clusters: int, certain: float = 0.8) -> Floats:
    """Posteriors (N, K) around labels (N,); the same for all clusters where a label is -1."""
    r = np.full((len(labels), clusters), (1.0 - certain) / clusters)
    known = labels >= 0
    r[known, labels[known]] += certain
    r[~known] = 1.0 / clusters
    return r


# ----------------------------------------------------------------------------------------------------
# Rounds of a mixture: sites receive posteriors, and return differences of log densities, which are added.

SALT = 16
RESTARTS = 2
"""Largest number of restarts of a mixture because a cluster was emptied."""


@dataclass(slots=True, eq=False)
class MixtureExchange:
    """The exchange between coordinator and sites of one fit, round by round."""

    requester: SecureProductSession
    subjects: EntityIndex
    nodes: int
    rng: np.random.Generator
    most: int
    past: str = ""
    rounds: int = 0
    slots: int = 0
    skewed: Mapping[str, Bools] = field(default_factory=dict)
    history: list[tuple[int, str, float]] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Number of remaining rounds."""
        return max(self.most - self.rounds, 0)

    def begin(self, factors: Sequence[int]) -> FitProtocol[None]:
        """Let every site analyze the factors of its modalities."""
        request = to_json(BeginRequest(tuple(factors), self.nodes))
        s = self.subjects
        self.past = ""
        replies = yield [
            self.requester.request(
                site,
                "begin",
                request,
                place=s.place[site],
                pattern=s.pattern,
                members=s.members,
                number=np.array(number),
            )
            for number, site in enumerate(s.sites)
        ]
        self.skewed = {reply.site: reply.arrays["skewed"] for reply in replies}

    def improve(
        self,
        courses: Sequence[MixtureState],
        steps: int,
        *,
        kept: Sequence[MixtureState] = (),
        scores: bool = False,
        extra: Sequence[Request] = (),
    ) -> FitProtocol[list[Reply]]:
        """Run one round for some mixtures; return the replies to the additional requests."""
        for one in courses:
            one.w = one.sent.sum(axis=0) / one.sent.sum()
            if one.slot < 0:
                one.slot, self.slots = self.slots, self.slots + 1
        requests = [*extra, *self._requests(courses, steps, [one.slot for one in kept], scores)]
        replies = yield requests
        self.rounds += 1
        self._settle(courses, replies[len(extra) :], scores)
        return replies[: len(extra)]

    def _requests(
        self, courses: Sequence[MixtureState], steps: int, kept: Sequence[int], scores: bool
    ) -> list[Request]:
        s = self.subjects
        r = np.hstack([one.sent for one in courses])
        groups = by_pattern(s.pattern, len(s.members))
        salts = [secrets.token_bytes(SALT) for _ in groups]
        slots = tuple(_update_request(one, steps, scores) for one in courses)
        digests = tuple(digest_posteriors(salt, r[rows]) for salt, rows in zip(salts, groups, strict=True))
        request = RoundRequest(slots, tuple(kept), digests, self.past)
        text = to_json(request)
        self.past = request.follow(text)
        shares = np.concatenate([one.w for one in courses])
        table = np.frombuffer(b"".join(salts), dtype=np.uint8).reshape(-1, SALT)
        requests = []
        for number, site in enumerate(s.sites):
            # A site must not receive the salts of patterns without it: it could test guesses of posteriors.
            own = np.where(s.members[:, number, None], table, 0).astype(np.uint8)
            requests.append(
                self.requester.request(site, "improve", text, r=r[s.place[site]], shares=shares, salts=own)
            )
        return requests

    def _settle(self, courses: Sequence[MixtureState], replies: Sequence[Reply], scores: bool) -> None:
        """Add up the replies, in any order of the sites, and give every mixture its part."""
        D = add_exactly([reply.arrays["differences"] for reply in replies])
        totals = add_exactly([reply.arrays["totals"] for reply in replies])
        first = reported = 0
        for number, one in enumerate(courses):
            if one.report:
                one.support = {reply.site: reply.arrays["support"][reported] for reply in replies}
                reported += 1
            one.settle(D[:, first : first + one.clusters - 1], totals[number])
            first += one.clusters - 1
            if not scores:
                one.source, one.weigh = one.slot, False
                self.history.append((self.rounds, one.name, one.penalized))

    def ascend(
        self,
        courses: Sequence[MixtureState],
        steps: int,
        most: int,
        kept: Sequence[MixtureState] = (),
        enough: Callable[[MixtureState], bool] = lambda one: one.converged,
    ) -> FitProtocol[None]:
        """Improve mixtures until each is good enough, for at most this many rounds."""
        for _ in range(most):
            for one in courses:
                self._refill(one)
            active = [one for one in courses if not one.failed and not enough(one)]
            if not active or not self.left:
                return
            done = [one for one in courses if one not in active and one.slot >= 0]
            yield from self.improve(active, steps, kept=[*kept, *done])

    def _refill(self, one: MixtureState) -> None:
        """Restart a cluster that has too few entities at a site; give up after several restarts."""
        while not one.failed and (found := self.subjects.too_few(one.sent)) is not None:
            site, k = found
            if len(one.emptied) >= RESTARTS or one.fixed or one.penalties.lam1 or one.half is not None:
                one.failed = f"a cluster has too few entities at '{site}'"
                return
            one.emptied.append(site)
            one.refill(k, self.rng)

    def release(self, one: MixtureState, order: Array) -> FitProtocol[list[Reply]]:
        """Request the parameters of a mixture, with its clusters in an order."""
        replies = yield [
            self.requester.request(site, "release_modalities", slot=np.array(one.slot), order=order)
            for site in self.subjects.sites
        ]
        return replies


def _update_request(one: MixtureState, steps: int, scores: bool) -> MixtureUpdateRequest:
    return MixtureUpdateRequest(
        one.slot,
        one.source,
        one.clusters,
        one.factors,
        steps,
        one.penalties.lam1,
        one.penalties.lam2,
        one.fixed,
        scores,
        one.weigh,
        one.report,
        one.nodes,
    )


def add_exactly(parts: Sequence[Floats]) -> Floats:
    """Add arrays in a precision in which their order hardly matters; masked sums are exact."""
    total: Any = np.zeros(parts[0].shape, dtype=np.longdouble)
    for part in parts:
        total = total + part
    return np.asarray(total, dtype=np.float64)


# ----------------------------------------------------------------------------------------------------
# Starting values: k-means of the factor scores of all sites, and each site's own clusters.

MEANS_ROUNDS, SHORT_ROUNDS = 6, 8
GOING_ON = 2
"""Number of starts that are continued."""
FAR_BEHIND = 5
"""A start is dropped if this many of its latest gains do not reach the best one."""


@dataclass(frozen=True, slots=True)
class StartPlan:
    """Number of starts by k-means, whether to use the sites' own clusters, and local steps at first."""

    means: int
    own: bool
    steps: int
    local_steps: int
    rounds: int


def start(
    exchange: MixtureExchange, sizes: Sequence[tuple[int, int]], plan: StartPlan
) -> FitProtocol[list[MixtureState]]:
    """Fit mixtures of sizes (K, Q) without penalty, in parallel, from the best of several starts.

    If all starts of a size fail, the returned mixture of that size has failed.
    """
    begun = yield from _first(exchange, sizes, plan)
    for state in begun:
        # All continue for a while, because the best one cannot be known earlier.
        state.trace.clear()
    yield from exchange.ascend(begun, plan.steps, SHORT_ROUNDS)
    early = [(one.clusters, one.factors, one.r) for one in begun if not one.failed]
    tried = [(one.clusters, one.factors) for one in begun]
    going: list[list[MixtureState]] = []
    for size in sizes:
        going.append(_foremost([one for one in begun if (one.clusters, one.factors) == size])[:GOING_ON])
    for _ in range(plan.rounds):
        # Two starts that have become equal continue as one.
        going = [some[:1] if len(some) > 1 and same_clusters(*some) else some for some in going]
        every = [one for some in going for one in some]
        yield from exchange.ascend(every, plan.local_steps, 1, enough=lambda one: one.settled)
        going = [_near(_foremost(some)) for some in going]
    for (K, Q), (best, *_) in zip(sizes, going, strict=True):
        alike = sum((k, q) == (K, Q) and overlap(r, best.r) >= AGREE for k, q, r in early)
        best.starts = (alike, tried.count((K, Q)))
    return [some[0] for some in going]


def most_rounds(plan: StartPlan) -> int:
    """Return the largest number of rounds that the starts take."""
    return (MEANS_ROUNDS if plan.means else 0) + int(plan.own) + SHORT_ROUNDS + plan.rounds


def _foremost(some: Sequence[MixtureState]) -> list[MixtureState]:
    """Sort mixtures that have not failed, the best first; a failed one if all have failed."""
    left = sorted((one for one in some if not one.failed), key=lambda one: -one.penalized)
    return left or list(some[:1])


def _near(some: Sequence[MixtureState]) -> list[MixtureState]:
    """Keep the best one, which is first, and those that may still reach it."""
    best = some[0].penalized
    return [one for one in some if one is some[0] or best - one.penalized <= FAR_BEHIND * one.gain]


def _first(
    exchange: MixtureExchange, sizes: Sequence[tuple[int, int]], plan: StartPlan
) -> FitProtocol[list[MixtureState]]:
    """Cluster factor scores: squared distances add over sites."""
    rng, n = exchange.rng, exchange.subjects.total
    moving = [
        MixtureState(K, Q, hard_assignment(rng.random((n, K))), f"start {number + 1}", nodes=exchange.nodes)
        for K, Q in sizes
        if K > 1
        for number in range(plan.means)
    ]
    begun = [MixtureState(1, Q, np.ones((n, 1)), "start", nodes=exchange.nodes) for K, Q in sizes if K == 1]
    own = (
        yield from _own_clusters(exchange, [size for size in sizes if size[0] > 1]) if plan.own else nothing()
    )
    for _ in range(MEANS_ROUNDS if moving else 0):
        for one in moving:
            one.r = _filled(hard_assignment(one.r), exchange)
        yield from exchange.improve(moving, 0, scores=True)
    found = [(one.clusters, one.factors, np.argmax(one.r, axis=1), one.name) for one in moving]
    for K, Q, labels, name in [*found, *own]:
        begun.append(MixtureState(K, Q, soft(labels, K), name, nodes=exchange.nodes))
    return begun


def nothing() -> FitProtocol[list[tuple[int, int, Ints, str]]]:
    """Request nothing."""
    yield from ()
    return []


def _filled(r: Floats, exchange: MixtureExchange) -> Floats:
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
    return hard_assignment(exchange.rng.random(r.shape))


def _own_clusters(
    exchange: MixtureExchange, sizes: Sequence[tuple[int, int]]
) -> FitProtocol[list[tuple[int, int, Ints, str]]]:
    """Request from every site clusters of its entities by its own columns."""
    s, pairs = exchange.subjects, []
    requests = []
    for K, Q in sizes:
        for site in s.sites:
            pairs.append((K, Q, site))
            requests.append(
                exchange.requester.request(
                    site,
                    "own_clusters",
                    clusters=np.array(K),
                    factors=np.array(Q),
                )
            )
    replies = yield requests
    exchange.rounds += 1
    out = []
    for (K, Q, site), reply in zip(pairs, replies, strict=True):
        labels = np.full(s.total, -1, dtype=np.int64)
        labels[s.place[site]] = reply.arrays["labels"]
        out.append((K, Q, labels, f"clusters of {site}"))
    return out
