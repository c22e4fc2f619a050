"""Prediction sets and intervals of split conformal prediction, from counts of scores in bins.

A score measures the agreement of a prediction with the observation: higher bins agree less. Of n scores of
entities that were not used for training, the k-th smallest with k = ceil((n + 1)(1 - alpha)) is not exceeded
by that of a new entity with probability 1 - alpha or more, if they are exchangeable; this holds for any
model.
"""

from __future__ import annotations

import numpy as np

from fedstat.typing import Floats, Ints

STEP = 0.02
"""Width of a bin."""
LOG_LOW, LOG_HIGH = -6.0, 4.0
"""Range of the logarithms of absolute residuals, in a unit that does not depend on the residuals counted."""


def residual_edges() -> Floats:
    """Edges between bins of the logarithm of an absolute residual, (B - 1,)."""
    return np.asarray(np.arange(LOG_LOW, LOG_HIGH + STEP / 2.0, STEP))


def residual_limits(bins: Ints) -> Floats:
    """Largest absolute residual up to a bin, (groups,); infinite for the last bin and for every bin.

    Examples
    --------
    >>> residual_limits(np.array([300, 501, 502])).round(3)
    array([ 1., inf, inf])
    """
    return np.asarray(np.exp(np.append(residual_edges(), [np.inf, np.inf])[bins]))


def count_residuals(residuals: Floats, code: Ints, groups: int, least: int) -> Floats:
    """Count absolute residuals (n,) by group (n,) and bin: (groups, B).

    Groups with fewer than `least` residuals have no counts, and bins with fewer are merged.

    Examples
    --------
    >>> counts = count_residuals(np.array([0.5, -1.5, 2.0, 0.1]), np.array([0, 0, 0, 1]), groups=2, least=2)
    >>> counts.sum(axis=1), int(np.count_nonzero(counts))
    (array([3., 0.]), 1)
    """
    with np.errstate(divide="ignore"):
        at = np.searchsorted(residual_edges(), np.log(np.abs(residuals)))
    counts = np.zeros((groups, len(residual_edges()) + 1))
    for g in range(groups):
        bins = np.bincount(at[code == g], minlength=counts.shape[1])
        if bins.sum() >= max(least, 1):
            np.add.at(counts[g], merge_upwards(bins, least), bins)
    return counts


def threshold_bins(counts: Floats, alpha: float) -> Ints:
    """Find the bins up to which new entities agree with probability 1 - alpha or more: (groups,).

    `counts` (groups, B) are scores by group, in bins of decreasing agreement. If a group has too few for the
    level, every bin is included: B.

    Examples
    --------
    >>> threshold_bins(np.array([[10, 5, 4, 1, 0], [1, 0, 0, 0, 0]]), alpha=0.1)
    array([2, 5])
    """
    n = counts.sum(axis=1)
    # Rounding must not require one more if (n + 1)(1 - alpha) is an integer.
    needed = np.ceil((n + 1.0) * (1.0 - alpha) - 1e-9)
    first = (counts.cumsum(axis=1) < needed[:, None]).sum(axis=1)
    return np.asarray(np.where(needed > n, counts.shape[1], first), dtype=np.int64)


def merge_upwards(counts: Ints, least: int) -> Ints:
    """Group neighboring bins so that each group holds `least` or more, and count it in its last full bin.

    The rest at the end belongs to the last group. A group extends from above the previous one to the bin in
    which it counts, so that a reader of the counts knows where its members can be. (B,) -> (B,), an index for
    every bin.

    Examples
    --------
    >>> merge_upwards(np.array([3, 0, 4, 9, 2, 0]), 5)
    array([2, 2, 2, 4, 4, 5])
    """
    place, held = np.arange(len(counts)), 0
    groups: list[tuple[int, int]] = []
    first = 0
    occupied = np.flatnonzero(counts).tolist()
    for b in occupied:
        held += int(counts[b])
        if held >= least:
            groups.append((first, b))
            first, held = b + 1, 0
    if held and groups:
        groups[-1] = (groups[-1][0], occupied[-1])
    for low, high in groups:
        place[low : high + 1] = high
    return place
