"""Shapley values: the worth of all sites together, divided among them."""

from __future__ import annotations

from collections.abc import Mapping
from math import factorial

import numpy as np

from fedstat.typing import Floats


def shapley_values(worth: Mapping[int, float], K: int) -> Floats:
    """Return the mean increase in worth as each of K sites joins, over all orders in which they may, (K,).

    `worth` is that of every set of sites, whose members are the bits of its number; see Shapley (1953), "A
    value for n-person games", Contributions to the Theory of Games 2.
    """
    share = [factorial(j) * factorial(K - j - 1) / factorial(K) for j in range(K)]
    increase = [
        sum(share[s.bit_count()] * (worth[s | 1 << k] - worth[s]) for s in range(1 << K) if not s >> k & 1)
        for k in range(K)
    ]
    return np.array(increase)
