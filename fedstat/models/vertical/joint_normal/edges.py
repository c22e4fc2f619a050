"""Which covariances of columns are free: pairs of blocks with few common entities have none.

A block is a site's columns or, if entities have only some of these, a set of them that are missing together:
a unit of :class:`~fedstat.models.vertical.moments.PatternMoments`.

Where no entity, or hardly one, has the columns of both, their covariance given all other columns and the
response is not in the data: every partial covariance R_j^1/2 M R_k^1/2 with a spectral norm of M of at most
one has the same likelihood. The model takes the two as independent given the other columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Literal, TypeAlias

import numpy as np

from fedstat.errors import EstimationError, Remedy
from fedstat.models.vertical.moments import PatternMoments
from fedstat.typing import Bools, Floats

COLLINEAR = 1e5
"""Eigenvalue of the concentration of standardized columns from which an error names its columns."""
Between: TypeAlias = Literal["free", "independent"]
MIN_COMMON_ENTITIES = 10
"""Number of shared entities per column of two sites that a covariance requires.

With three, covariances of few entities fit noise: on the packaged enterprises, R-squared is then .89, and .81
with ten, where the true value is .76.
"""


@dataclass(frozen=True, slots=True)
class SparsePair:
    """Two units, by number, that share n entities, too few for a covariance of their columns."""

    first: int
    second: int
    n: int
    columns: int

    @property
    def undetermined(self) -> bool:
        """Whether the data do not determine the covariance at all, rather than with large error."""
        return self.n < self.columns


def sparse_pairs(moments: PatternMoments) -> list[SparsePair]:
    """Find the pairs of units with too few common entities for a covariance."""
    patterns, sizes = moments.patterns, [len(columns) for columns in moments.units]
    both = patterns.T @ (patterns * moments.n[:, None])
    each = ((j, k, sizes[j] + sizes[k]) for j, k in combinations(range(len(sizes)), 2))
    return [
        SparsePair(j, k, int(both[j, k]), columns)
        for j, k, columns in each
        if both[j, k] < MIN_COMMON_ENTITIES * columns
    ]


def name_sparse(moments: PatternMoments) -> str:
    """Name the pairs, and the assumption for them; empty if there are none."""
    names = moments.unit_names
    listed = [f"{names[p.first]} and {names[p.second]} {p.n:,}" for p in sparse_pairs(moments)]
    if not listed:
        return ""
    return (
        f"Too few shared entities for a covariance of the columns ({MIN_COMMON_ENTITIES} per column are "
        f"needed): {', '.join(listed)}. Such sites count as independent given all other columns. With few "
        "shared entities, the data hardly test this; with none, not at all."
    )


def edges_between(moments: PatternMoments, between: Between) -> Bools:
    """Return which columns may be correlated given all others, (P, P): of one site, or with "free" all."""
    owner, unit = moments.owner, moments.unit
    edges = np.asarray((owner[:, None] == owner) | (between == "free"))
    for pair in sparse_pairs(moments):
        here, there = unit == pair.first, unit == pair.second
        edges &= ~(np.outer(here, there) | np.outer(there, here))
    return edges


def undetermined_pairs(moments: PatternMoments) -> list[SparsePair]:
    """Find the pairs of units with a covariance that the data do not determine at all."""
    return [pair for pair in sparse_pairs(moments) if pair.undetermined]


INDEPENDENT = Remedy(
    "from_formula(..., between='independent').fit(...)", "leave out columns or sites, or use {arguments}"
)


def not_determined(moments: PatternMoments, Q: Floats, before: str = "") -> EstimationError:
    """Return the error near a point with concentration Q (P, P) of standardized columns: there is no maximum.

    If a combination of columns has no variance there, its columns are named; otherwise the pair of blocks
    with the fewest shared entities.
    """
    values, vectors = np.linalg.eigh(Q)
    if values[-1] > COLLINEAR:
        weight = np.abs(vectors[:, -1])
        owners = [moments.sites[k] for k in moments.owner]
        named = [f"'{moments.names[c]}' ({owners[c]})" for c in np.flatnonzero(weight > 0.05 * weight.max())]
        return EstimationError(
            f"{before}the covariance of all columns is not determined: {', '.join(named[:-1])} and "
            f"{named[-1]} are collinear, a combination of them is constant. Leave one of them out"
        )
    both, names = moments.patterns.T @ (moments.patterns * moments.n[:, None]), moments.unit_names
    j, k = np.unravel_index(both.argmin(), both.shape)
    return EstimationError(
        f"{before}the covariance of all columns is not determined: {names[j]} and {names[k]} share "
        f"{int(both[j, k]):,} of {int(moments.nobs):,} entities, and columns may be collinear across "
        "sites",
        remedy=INDEPENDENT,
    )
