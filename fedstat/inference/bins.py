"""Bins of predictions, in which sites count their rows."""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from fedstat.errors import EstimationError
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.typing import Floats, Ints

STEP, FURTHEST = 0.05, 8.0
"""Width of a bin of log odds, and where the outer bins of a probability begin."""
LOGARITHMS = (-25.0, 30.0)
"""Between these lie the bins of the logarithm of a mean, in whatever units it is."""
HALF, BEND, WIDTHS = 80, 4.0, 10.0
"""Bins of other predictors on either side, how much wider the outer ones are, and how far they reach."""


def bin_edges(distribution: DistributionSpec, centre: float, width: float) -> Floats:
    """Ascending edges between the bins of a linear predictor, (B - 1,); they depend on no row.

    Probabilities, and means whose logarithm is linear, have the same edges whatever the model. Others have
    some about a `centre`, the wider the farther from it, in units of a `width`: those of the released model.
    """
    if distribution.name == "Binomial":
        log_odds = STEP * np.arange(-round(FURTHEST / STEP), round(FURTHEST / STEP) + 1)
        return np.unique(distribution.make().link(expit(log_odds)))
    if distribution.link == "Log":
        return np.arange(LOGARITHMS[0], LOGARITHMS[1] + STEP / 2.0, STEP)
    t = np.arange(-HALF, HALF + 1) / HALF
    return np.asarray(centre + width * WIDTHS * np.sinh(BEND * t) / np.sinh(BEND))


def probabilities(edges: Floats, distribution: DistributionSpec) -> Floats:
    """Probabilities at edges of a linear predictor that ascend from minus infinity to infinity, (B + 1,)."""
    inner = np.asarray(distribution.make().link.inverse(edges[1:-1]))
    return np.concatenate([[0.0], inner.clip(0.0, 1.0), [1.0]])


def merge_small_bins(counts: Ints, least: int) -> Ints:
    """Say which bins a site counts together, so that none of those released holds 1 to ``least - 1`` rows.

    The smallest such bin joins its nearest occupied neighbour (of two, the smaller), and so on until none is
    left; the joint bin is released in the place of the fuller of the two. Every sum over bins is preserved,
    and with it the ratio of observed to expected. Rows that moved are counted in a bin that is not theirs:
    against the rows they joined they count as ties, and against the site's other rows as before; against
    rows of other sites in the bins between they may count on the wrong side. The bounds of the AUC allow for
    it where `Evaluation` is told of `least`.

    From rows in each bin (B,) it returns the bin in which to count each one's rows, (B,); a site that has
    rows, but fewer than `least`, is an error.

    Examples
    --------
    >>> merge_small_bins(np.array([40, 3, 0, 9, 2, 0]), 5)
    array([0, 0, 2, 3, 3, 5])
    """
    total = int(counts.sum())
    if 0 < total < least:
        raise EstimationError(f"expected {least} rows or more to count in bins, received {total}")
    held = {int(b): int(counts[b]) for b in np.flatnonzero(counts)}
    groups = np.arange(len(counts))
    while held and min(held.values()) < least:
        small = min(held, key=lambda b: held[b])
        neighbour = min((b for b in held if b != small), key=lambda b: (abs(b - small), held[b]))
        kept, gone = (small, neighbour) if held[small] > held[neighbour] else (neighbour, small)
        held[kept] += held.pop(gone)
        groups[groups == gone] = kept
    return groups
