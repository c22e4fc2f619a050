"""Pairs of institutions with few entities in common: what is assumed of them, and how much hangs on it.

Where no entity, or hardly one, has the columns of both, their covariance given all other columns and the
response is not in the data: every partial covariance R_j^1/2 M R_k^1/2 with a spectral norm of M of at most
one has the same likelihood. The law takes the two as independent given the other columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Literal, TypeAlias

import numpy as np

from fedstat.models.vertical.law.fit import LawFit
from fedstat.models.vertical.moments import PatternMoments
from fedstat.typing import Bools, Floats, Ints

Between: TypeAlias = Literal["free", "independent"]
LEAST_TOGETHER = 10
"""Entities that two institutions must share for each of their columns, so that a covariance is estimated.

With three, covariances of few entities fit their noise: on the packaged enterprises R-squared is then .89,
with ten .81, where the truth is .76.
"""
NEARLY = 1.0 - 1e-9
"""Partial correlation of an extreme: at one the covariance is singular."""
SMALL_MOVE = 1e-5
STEPS = 201
"""Of a coefficient's way from one extreme to the other."""


@dataclass(frozen=True, slots=True)
class SparsePair:
    """Two clients, by number, that share n entities, too few for a covariance of their columns together."""

    first: int
    second: int
    n: int
    columns: int

    @property
    def undetermined(self) -> bool:
        """Whether the data leave the covariance open, and not only uncertain."""
        return self.n < self.columns


def sparse_pairs(moments: PatternMoments) -> list[SparsePair]:
    """Find the pairs of clients with too few entities in common to estimate a covariance."""
    out = []
    for j, k in combinations(range(len(moments.sizes)), 2):
        n = together(moments, j, k)
        columns = moments.sizes[j] + moments.sizes[k]
        if n < LEAST_TOGETHER * columns:
            out.append(SparsePair(j, k, int(n), columns))
    return out


def together(moments: PatternMoments, j: int, k: int) -> float:
    """Entities that two clients both have."""
    return float(moments.n[moments.patterns[:, j] & moments.patterns[:, k]].sum())


def edges_between(moments: PatternMoments, between: Between) -> Bools:
    """Which columns may depend given all others, (P, P): those of one client, and with "free" of others."""
    owner = moments.owner
    if between == "independent":
        return np.asarray(owner[:, None] == owner)
    edges = np.ones((len(owner), len(owner)), dtype=bool)
    for pair in sparse_pairs(moments):
        here, there = moments.places(pair.first), moments.places(pair.second)
        edges[here, there] = edges[there, here] = False
    return edges


def extremes(fit: LawFit, pair: SparsePair) -> Floats:
    """Coefficients (2, P), in the units of the data, at two extremes of what the data do not determine.

    For each coefficient M goes through the spectral ball along its steepest direction: with one column on
    either side these are the smallest and the largest value that any law of this likelihood has.
    """
    places = [fit.moments.places(k) for k in (pair.first, pair.second)]
    law = PartialLaw(fit.point.cov, *[np.arange(here.start, here.stop) for here in places])
    shape = tuple(here.stop - here.start for here in places)
    at = law.moved(np.zeros(shape))
    slopes = np.empty((len(at), *shape))
    for cell in np.ndindex(*shape):
        M = np.zeros(shape)
        M[cell] = SMALL_MOVE
        slopes[(slice(None), *cell)] = (law.moved(M) - at) / SMALL_MOVE
    out = np.empty((2, len(at)))
    for c, slope in enumerate(slopes):
        left, _, right = np.linalg.svd(slope, full_matrices=False)
        # No coefficient need be monotone, and all move fastest near the ends.
        along = [law.moved(r * left @ right)[c] for r in NEARLY * np.cos(np.linspace(0.0, np.pi, STEPS))]
        out[:, c] = min(along), max(along)
    scale = fit.moments.scale
    return np.asarray(out * scale[-1] / scale[:-1])


class PartialLaw:
    """A law of (x, y) as a function of the partial covariance of two sets of columns."""

    def __init__(self, cov: Floats, first: Ints, second: Ints) -> None:
        rest = np.setdiff1d(np.arange(len(cov)), np.concatenate([first, second]))
        self.cov, self.first, self.second = cov, first, second
        slopes = [np.linalg.solve(cov[np.ix_(rest, rest)], cov[np.ix_(rest, own)]) for own in (first, second)]
        self.explained = slopes[0].T @ cov[np.ix_(rest, second)]
        self.roots = [
            root_of(cov[np.ix_(own, own)] - slope.T @ cov[np.ix_(rest, own)])
            for own, slope in zip((first, second), slopes, strict=True)
        ]

    def moved(self, M: Floats) -> Floats:
        """Coefficients where the partial covariance is R_j^1/2 M R_k^1/2."""
        cov = self.cov.copy()
        block = self.explained + self.roots[0] @ M @ self.roots[1]
        cov[np.ix_(self.first, self.second)] = block
        cov[np.ix_(self.second, self.first)] = block.T
        return np.asarray(np.linalg.solve(cov[:-1, :-1], cov[:-1, -1]))


def root_of(A: Floats) -> Floats:
    """Symmetric root of a covariance."""
    values, vectors = np.linalg.eigh(A)
    return np.asarray((vectors * np.sqrt(values.clip(min=0.0))) @ vectors.T)
