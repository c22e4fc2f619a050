"""Sets of institutions over which the loss of a split network is taken: all of them, or drawn ones.

A set is a whole number whose bits are the institutions in it. Of an entity that the institutions of `seen`
have, the loss is the sum over all sets within `seen`; a draw stands for them with weights under which its
expectation is that sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import comb
from typing import TypeAlias

import numpy as np

from fedstat.typing import Floats, Ints

Draw: TypeAlias = Callable[[int], int]
"""Draws a whole number below another, all equally likely."""
Draws: TypeAlias = Callable[[Ints], Ints]
"""Draws one below each of some."""
MOST_LISTED = 6
"""Institutions of which all sets are taken; of more, one is drawn of each size."""


@lru_cache(maxsize=4096)
def sets_within(seen: int) -> tuple[int, ...]:
    """List all sets of one institution or more within another, ascending."""
    return tuple(s for s in range(1, seen + 1) if s & seen == s)


@lru_cache(maxsize=4096)
def sets_of_size(seen: int, size: int) -> tuple[int, ...]:
    """List those of one size; there are C(k, size)."""
    bits = [1 << k for k in range(seen.bit_length()) if seen >> k & 1]

    def choose(first: int, left: int) -> list[int]:
        if left == 0:
            return [0]
        return [
            bits[i] | rest for i in range(first, len(bits) - left + 1) for rest in choose(i + 1, left - 1)
        ]

    return tuple(choose(0, size))


def one_of_each_size(seen: int, draw: Draw) -> dict[int, float]:
    """Draw a set of each size; it has the weight of all of its size."""
    k = seen.bit_count()
    chosen = ((sets_of_size(seen, size)[draw(comb(k, size))], comb(k, size)) for size in range(1, k + 1))
    return {s: float(weight) for s, weight in chosen}


@lru_cache(maxsize=4096)
def _by_size(seen: int) -> tuple[Ints, Ints]:
    """List all sets within another by their size, and where each size begins, (k + 1,)."""
    sizes = [sets_of_size(seen, size) for size in range(1, seen.bit_count() + 1)]
    return np.concatenate(sizes), np.cumsum([0, 0, *map(len, sizes)])[:-1]


def one_set_each(seen: Ints, draw: Draws) -> tuple[Ints, Floats]:
    """Draw one set within each of `seen` (b,): its size, then one of that size.

    Its weight is one over its probability.
    """
    sets, weights = np.zeros_like(seen), np.zeros(len(seen))
    for one in np.unique(seen).tolist():
        at, k = np.flatnonzero(seen == one), one.bit_count()
        listed, begin = _by_size(one)
        of_size = np.array([comb(k, size) for size in range(k + 1)])
        size = 1 + draw(np.full(len(at), k))
        sets[at] = listed[begin[size] + draw(of_size[size])]
        weights[at] = k * of_size[size]
    return sets, weights
