"""Sets and intervals of split conformal prediction, from counts of scores in bins (Vovk et al. 2005).

A score says how well a prediction agrees with what was observed: ascending bins agree less. Of n scores of
entities from which nothing was learned, the k-th smallest with k = ceil((n + 1)(1 - alpha)) is not exceeded
by that of a new entity with probability 1 - alpha or more, if they are exchangeable; whatever the model is.
"""

from __future__ import annotations

import numpy as np

from fedstat.typing import Floats, Ints


def threshold_bins(counts: Floats, alpha: float) -> Ints:
    """Find the bins up to which new entities agree with probability 1 - alpha or more: (groups,).

    `counts` (groups, B) are scores by group, in bins that agree less and less. Where a group has too few for
    the level, every bin: B.

    Examples
    --------
    >>> threshold_bins(np.array([[10, 5, 4, 1, 0], [1, 0, 0, 0, 0]]), alpha=0.1)
    array([2, 5])
    """
    n = counts.sum(axis=1)
    # Rounding must not ask for one more where (n + 1)(1 - alpha) is whole.
    needed = np.ceil((n + 1.0) * (1.0 - alpha) - 1e-9)
    first = (counts.cumsum(axis=1) < needed[:, None]).sum(axis=1)
    return np.asarray(np.where(needed > n, counts.shape[1], first), dtype=np.int64)


def merge_towards_worse(counts: Ints, least: int) -> Ints:
    """Count scores so that no bin holds 1 to ``least - 1``: those of a smaller one count in a later bin.

    What is left at the end joins the last full bin, which then ends where these do. A threshold from the
    counts is never smaller than one from the scores. (B,) -> (B,), a place for every bin.

    Examples
    --------
    >>> merge_towards_worse(np.array([3, 0, 4, 9, 2, 0]), 5)
    array([2, 2, 2, 4, 4, 5])
    """
    place, waiting, held = np.arange(len(counts)), [], 0
    full: list[list[int]] = []
    for b in np.flatnonzero(counts).tolist():
        waiting.append(b)
        held += int(counts[b])
        if held >= least:
            full.append(waiting)
            waiting, held = [], 0
    if waiting and full:
        full[-1] += waiting
    for group in full:
        place[group[0] : group[-1] + 1] = group[-1]
    return place
