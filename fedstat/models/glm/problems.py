"""What can be wrong with the sums of a GLM, in words: which columns, at which sites."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.linalg import qr, solve_triangular

from fedstat.errors import EstimationError
from fedstat.models.glm.coordinates import Coordinates
from fedstat.typing import Floats

RANK_TOLERANCE = 1e-10
SHARE = 1e-4
LOADING = 0.3


def check_rank(information: Floats, names: Sequence[str]) -> None:
    """Require linearly independent columns.

    Raises
    ------
    EstimationError
        Columns are exactly collinear over all sites, and which.
    """
    size = np.sqrt(np.diag(information))
    if (size == 0.0).any():
        raise EstimationError(f"design column {names[int(np.argmin(size))]!r} carries no information")
    scaled = information / np.outer(size, size)
    values, vectors = np.linalg.eigh(scaled)
    if values[0] > RANK_TOLERANCE * values[-1]:
        return
    root = (np.sqrt(np.maximum(values, 0.0)) * vectors).T
    R, pivot = qr(root, mode="r", pivoting=True)
    rank = max(int((np.abs(np.diag(R)) > np.sqrt(RANK_TOLERANCE)).sum()), 1)
    shares = np.abs(solve_triangular(R[:rank, :rank], R[:rank, rank:]))
    groups = []
    for column, share in zip(pivot[rank:], shares.T, strict=True):
        *others, last = (repr(names[i]) for i in sorted([column, *pivot[:rank][share > SHARE]]))
        groups.append(f"{last} follows exactly from {', '.join(others)}" if others else f"{last} is zero")
    raise EstimationError(
        f"design columns are exactly collinear over all sites: {'; '.join(groups)}. Leave one of each group "
        "out."
    )


def separation(
    gamma: Floats, information: Floats, names: Sequence[str], sites: Sequence[str], coordinates: Coordinates
) -> EstimationError:
    """Say which columns separate the outcomes: their coefficients grow without bound."""
    size = np.sqrt(np.maximum(np.diag(information), np.finfo(float).tiny))
    _, vectors = np.linalg.eigh(information / np.outer(size, size))
    loadings = np.abs(vectors[:, 0]) * (np.abs(gamma) > 0.1 * np.abs(gamma).max())
    culprits = [j for j in np.argsort(-loadings) if loadings[j] > LOADING * loadings.max() and j > 0]
    culprits = culprits or [int(np.argmax(np.abs(gamma)))]
    varies = np.array([coordinates.varies(k) for k in range(len(sites))])
    where = [site for k, site in enumerate(sites) if varies[k, culprits].any()]
    listed = ", ".join(repr(names[j]) for j in culprits)
    return EstimationError(
        f"perfect separation: the response follows exactly from {listed} (which vary at "
        f"{', '.join(where)}), so that their coefficients grow without bound. Leave the terms out, or merge "
        "their levels with others."
    )
