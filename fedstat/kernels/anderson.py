"""Anderson acceleration of a fixed-point iteration, from inner products alone."""

from __future__ import annotations

import numpy as np

from fedstat.typing import Floats

LARGEST_WEIGHT = 1e4


def one_hot(index: int, size: int) -> Floats:
    """Weights that select one point unchanged."""
    weights = np.zeros(size)
    weights[index] = 1.0
    return weights


def anderson_weights(gram: Floats) -> Floats:
    """Affine weights (q,) that make the mixed move shortest (Anderson 1965; Walker and Ni 2011, (2.2)).

    From the inner products (q, q) of the moves, newest last. The weights sum to one; old points are left out
    while the weights are too large to be reliable.
    """
    size = len(gram)
    for first in range(size):
        part = gram[first:, first:]
        scale = 1.0 / np.sqrt(np.diag(part))
        R = part * np.outer(scale, scale)
        ridge = 1e-14 * np.eye(len(R))
        # The shortest affine combination solves G w = 1, up to its sum; nearly equal moves make G singular.
        weights = np.linalg.lstsq(R + ridge, scale, rcond=1e-14)[0] * scale
        total = weights.sum()
        if np.isfinite(total) and total > 0.0:
            weights /= total
            if np.abs(weights).sum() < LARGEST_WEIGHT:
                return np.concatenate([np.zeros(first), weights])
    return one_hot(size - 1, size)
