"""Columns less the effects of absorbed levels: the residuals of least squares on indicators of the levels.

One effect is removed by subtracting the mean of every level (Frisch and Waugh 1933, Lovell 1963). Of two, the
first is removed exactly, and the coefficients of the second solve normal equations, here by conjugate
gradients: these are alternating projections, accelerated (Halperin 1962; Correia 2016).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fedstat.errors import EstimationError
from fedstat.typing import Floats, Ints

ZERO = 1e-12
"""Size of a residual, relative to the column's largest deviation, that is rounding."""
TOLERANCE = 1e-14
"""Relative size of the residual of the normal equations at which their solution ends."""
EXPLAINED = 1e-9
"""Largest residual, relative to the column's largest deviation, of a column that the levels explain."""
MOST_STEPS = 10_000


def absorbed_rank(codes: Sequence[Ints]) -> int:
    """Return the rank of the indicators of the levels of one or two effects, each (n,) from 0 on.

    Every connected part of two effects' levels has one redundant indicator (Abowd, Creecy and Kramarz 2002).
    """
    levels = [int(code.max(initial=-1)) + 1 for code in codes]
    if len(codes) < 2 or not len(codes[0]):
        return sum(levels)
    first, second = codes
    edges = coo_array((np.ones(len(first)), (first, levels[0] + second)), shape=(sum(levels),) * 2)
    parts, _ = connected_components(edges, directed=False)
    return sum(levels) - int(parts)


def without_levels(columns: Floats, codes: Sequence[Ints], weights: Floats | None = None) -> Floats:
    """Return columns (n, q) less the effects of the levels of one or two `codes`, each (n,) from 0 on.

    What is zero but for rounding is zero, so that rows without a part in a sum can be counted.

    Raises
    ------
    EstimationError
        The levels of two effects are so weakly connected that the equations are not solved.
    """
    w = np.ones(len(columns)) if weights is None else weights
    centered = columns - np.average(columns, axis=0, weights=w) if len(columns) else columns
    size = np.abs(centered).max(axis=0, initial=0.0)
    found = _less_means(centered, codes[0], w)
    for j in range(columns.shape[1] if len(codes) > 1 else 0):
        found[:, j] = _less_second(found[:, j], codes[0], codes[1], w)
    found[np.abs(found) <= ZERO * size] = 0.0
    found[:, np.abs(found).max(axis=0, initial=0.0) <= EXPLAINED * size] = 0.0
    return np.ascontiguousarray(found)


def _less_means(columns: Floats, code: Ints, w: Floats) -> Floats:
    """Subtract the weighted mean of every level from columns (n, q)."""
    total = np.bincount(code, w)
    means = np.column_stack([np.bincount(code, w * column) / total for column in columns.T])
    return np.asarray(columns - means[code]) if columns.shape[1] else columns.copy()


def _less_second(x: Floats, first: Ints, second: Ints, w: Floats) -> Floats:
    """Subtract the second effect from a column (n,) without the first one, which stays away."""
    diagonal = np.bincount(second, w)

    def spread(effect: Floats) -> Floats:
        return _less_means(effect[second][:, None], first, w)[:, 0]

    def levels(column: Floats) -> Floats:
        return np.asarray(np.bincount(second, w * column, len(diagonal)), dtype=np.float64)

    effect, rest = np.zeros(len(diagonal)), levels(x)
    least = TOLERANCE * float(np.linalg.norm(levels(np.abs(x))))
    scaled = rest / diagonal
    move, old = scaled.copy(), float(rest @ scaled)
    for _ in range(MOST_STEPS):
        if np.linalg.norm(rest) <= least or old <= 0.0:
            return np.asarray(x - spread(effect))
        turned = levels(spread(move))
        curvature = float(move @ turned)
        if curvature <= 0.0:  # no direction is left but those of rounding
            return np.asarray(x - spread(effect))
        length = old / curvature
        effect, rest = effect + length * move, rest - length * turned
        scaled = rest / diagonal
        new = float(rest @ scaled)
        move, old = scaled + new / old * move, new
    raise EstimationError(
        f"the levels of the two absorbed effects are connected by few rows: {MOST_STEPS:,} steps do not "
        "separate them. Absorb one of the two"
    )


def level_differences(columns: Floats, code: Ints) -> Floats:
    """Return differences within levels (n - G, q) with the same sums of products as columns less level means.

    Each is a row less the mean of those before it in its level, scaled (Helmert 1876).
    """
    order = np.argsort(code, kind="stable")
    X, own = columns[order], code[order]
    starts = np.flatnonzero(np.append(True, np.diff(own) != 0)) if len(own) else np.zeros(0, dtype=np.int64)
    sizes = np.diff(np.append(starts, len(own)))
    before = (np.arange(len(own)) - np.repeat(starts, sizes)).astype(np.float64)
    total = np.cumsum(X, axis=0) - X
    total -= np.repeat(total[starts], sizes, axis=0)
    later = before > 0.0
    k = before[later, None]
    return np.asarray((X[later] - total[later] / k) * np.sqrt(k / (k + 1.0)))
