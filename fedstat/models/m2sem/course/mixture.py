"""One mixture on its way to a maximum, as the coordinator sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import logsumexp

from fedstat.inference.mixture.classification import hard, icl
from fedstat.inference.selection.criteria import bic, ebic
from fedstat.models.m2sem.client.asked import NONE
from fedstat.typing import Bools, Floats, Ints

GAIN, CHANGE = 0.005, 1e-3
"""A mixture has converged where a round gains less, and no posterior changes by more."""
ALIKE = 0.01
"""Share of entities that may be elsewhere in two mixtures that are one."""
NEAR = 0.1
"""What a round gains where a mixture that is compared with others is near enough to its end."""
REST_OF_WEIGHT = 1e-3


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of loadings and of means, before they are adapted: to a fit of all, or `anew` to refits."""

    lam1: float = 0.0
    lam2: float = 0.0
    anew: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        again = f", anew {self.anew[0]}.{self.anew[1]}" if self.anew[0] else ""
        return f"{self.lam1:g}, {self.lam2:g}{again}"


@dataclass(frozen=True, slots=True, eq=False)
class Subjects:
    """Who has whom: institutions in the order of their names, positions of their entities among `total`.

    `pattern` (N,) are the presence patterns, whose institutions `members` (G, M) tell; `least` the fewest
    entities that each institution wants behind a cluster, and the largest share that one may have.
    """

    clients: tuple[str, ...]
    place: Mapping[str, Ints]
    pattern: Ints
    members: Bools
    least: Mapping[str, tuple[int, float]]

    @property
    def total(self) -> int:
        """Number of entities."""
        return len(self.pattern)

    def too_few(self, r: Floats) -> tuple[str, int] | None:
        """Find a site at which a cluster of posteriors r (N, K) has fewer entities than its owner wants."""
        for client in self.clients:
            count, share = self.least[client]
            at = r[self.place[client]]
            total, squares = at.sum(axis=0), (at * at).sum(axis=0)
            heavy = share * total < at.max(axis=0, initial=0.0)
            wrong = (total**2 < count * squares) | ~(total > 0.0) | heavy
            # The few heaviest may not have nearly all of the weight either.
            if 1 < count <= len(at):
                rest = np.partition(at, len(at) - count + 1, axis=0)[: len(at) - count + 1].sum(axis=0)
                wrong |= rest < 1.01 * REST_OF_WEIGHT * total
            if wrong.any():
                return client, int(np.argmax(wrong))
        return None


@dataclass(slots=True, eq=False)
class Course:
    """A mixture of K clusters and Q factors that is improved: posteriors r (N, K), shares w, what it reached.

    `slot` names it at the institutions, `source` what it goes on from. `trace` has the penalised
    log-likelihood after every round; `change` is the largest of a posterior in the latest one. `half` (N,)
    are the entities that weigh, all where it is None.
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
    tell: bool = False
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

    @property
    def penalised(self) -> float:
        """Penalised observed log-likelihood."""
        return self.loglik - self.penalty

    @property
    def gain(self) -> float:
        """What the latest round has gained."""
        return self.trace[-1] - self.trace[-2] if len(self.trace) > 1 else np.inf

    @property
    def converged(self) -> bool:
        """Whether it has come to an end."""
        return self.gain < GAIN and self.change < CHANGE

    @property
    def settled(self) -> bool:
        """Whether it has come near enough to an end to be compared with others."""
        return self.gain < NEAR

    @property
    def sent(self) -> Floats:
        """Posteriors as they are sent."""
        return self.r if self.half is None else self.r * self.half[:, None]

    @property
    def free(self) -> int:
        """Number of free parameters."""
        return self.parameters + self.clusters - 1

    def criterion(self, select: str, n: int, chosen: int = 0, columns: int = 0) -> float:
        """BIC, EBIC or ICL of the mixture on n entities, with so many columns `chosen`; the lower the better.

        EBIC adds twice the logarithm of the number of supports of the size (Chen and Chen 2008, gamma 1); ICL
        twice the entropy of the posteriors.
        """
        twice = -2.0 * self.loglik
        if select == "ebic":
            return float(ebic(twice, self.free, n, chosen=chosen, candidates=columns, gamma=1.0))
        return icl(twice, self.free, n, self.r) if select == "icl" else float(bic(twice, self.free, n))

    def settle(self, D: Floats, totals: Floats) -> None:
        """Take differences of log densities (N, K - 1), summed over institutions, and the three totals."""
        a = np.log(np.maximum(self.w, 1e-300)) + np.column_stack([D, np.zeros(len(D))])
        top = logsumexp(a, axis=1)
        r = np.exp(a - top[:, None])
        self.loglik = float(top.sum() + totals[0])
        self.penalty, self.parameters = float(totals[1]), round(float(totals[2]))
        self.change = float(np.abs(r - self.r).max(initial=0.0))
        self.r = r
        self.trace.append(self.penalised)

    def refill(self, k: int, rng: np.random.Generator) -> None:
        """Let a cluster that has been emptied begin anew, as a random half of the largest one."""
        labels = np.argmax(self.r, axis=1)
        largest = int(np.argmax(np.bincount(labels, minlength=self.clusters)))
        members = np.flatnonzero(labels == largest)
        labels[rng.permutation(members)[: len(members) // 2]] = k
        self.r = soft(labels, self.clusters)
        self.trace, self.change = [], np.inf


def same_clusters(a: Course, b: Course) -> bool:
    """Whether two mixtures have come to the same clusters, in whatever order."""
    overlap = np.sort(hard(a.r).T @ hard(b.r), axis=1)[:, -1].sum()
    return bool(overlap >= (1.0 - ALIKE) * len(a.r)) and abs(a.penalised - b.penalised) < 1.0


def soft(labels: Ints, clusters: int, certain: float = 0.8) -> Floats:
    """Posteriors (N, K) around labels (N,); the same for all clusters where a label is -1."""
    r = np.full((len(labels), clusters), (1.0 - certain) / clusters)
    known = labels >= 0
    r[known, labels[known]] += certain
    r[~known] = 1.0 / clusters
    return r


def best_of(courses: Sequence[Course]) -> Course:
    """Return the one with the largest penalised log-likelihood."""
    return max(courses, key=lambda one: one.penalised)
