"""Weighted sums of rows by group, without those that would disclose a few."""

from __future__ import annotations

import numpy as np

from fedstat.federation.door.weights import count_heavy
from fedstat.kernels.rows import column_sums
from fedstat.typing import Bools, Floats


def kept_weights(weights: Floats, groups: Bools, least: int) -> list[Floats]:
    """Weights w of all rows, and of the rows of each group: 1 + K of (n,).

    A sum to which fewer than `least` rows contribute nearly all, or all but so few, would disclose them: the
    few count as zero, their expectation.
    """
    out = [weights]
    for group in groups.T:
        # The sum over the others is the difference to the total, and is as good as released.
        few, nearly_all = (count_heavy(weights[part]) < least for part in (group, ~group))
        if few or nearly_all:
            out.append(weights if nearly_all and group.any() else np.zeros_like(weights))
        else:
            out.append(weights * group)
    return out


def weighted_sums(U: Floats, weights: Floats, groups: Bools, least: int) -> Floats:
    """Return sums of w u over all rows, and over the rows of each group: (1 + K, p); see above."""
    return np.array([column_sums(U, w) for w in kept_weights(weights, groups, least)])
