"""Does a sequence of released sums single out rows, by combinations that an attacker can know?

A released sum over rows is t'1 with terms t, (n,). The sums of a sequence are the columns of T, (n, d). A
combination c with T c zero outside of a set S of few rows reveals a sum over S. With values of many digits
such c often exist by chance, but cannot be known: they change with the values. A c that an attacker can
know is the same for every table of the same discrete structure. So the columns of many values are drawn
several times, T of all draws is stacked, and the block of S of the hat matrix then has an eigenvalue of one.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from fedstat.typing import Floats, Ints

CERTAIN = 1.0 - 1e-7
ZERO = 1e-9
PRESENT = 1e-3
DIFFERENT = 1e-2
MOST_CANDIDATES = 30


class TooFewDrawsError(Exception):
    """The sums have more dimensions than the draws can distinguish."""


def singled_out(draws: list[Floats], fewest: int, persons: Ints | None = None) -> list[tuple[int, ...]]:
    """Return the smallest sets of fewer than `fewest` rows that the sums single out in all draws alike.

    `draws` are the terms (n, d) of each draw of the columns of many values. If several rows may be of one of
    the `persons`, (n,) numbers from 0, the sets are of persons.
    """
    n, M = len(draws[0]), len(draws)
    U = _basis(draws)
    if U.shape[1] >= M * (n - fewest):
        raise TooFewDrawsError
    basis = U.reshape(M, n, -1)
    of_person = [[i] for i in range(n)]
    if persons is not None:
        of_person = [np.flatnonzero(persons == one).tolist() for one in range(int(persons.max()) + 1)]
    # A combination that is zero outside of S has at least a share of 1 / |S| in one row of S.
    blocks = [basis[:, rows].reshape(M * len(rows), -1) for rows in of_person]
    share = np.array([np.linalg.eigvalsh(block @ block.T)[-1] for block in blocks])
    rows = np.flatnonzero(share > 1.0 / (fewest - 1) - 1e-6)
    rows = rows[np.argsort(-share[rows])][:MOST_CANDIDATES]
    found: list[tuple[int, ...]] = []
    for count in range(1, fewest):
        for S in combinations(sorted(rows.tolist()), count):
            if any(set(one) <= set(S) for one in found):
                continue
            inside = [i for one in S for i in of_person[one]]
            block = basis[:, inside].reshape(M * len(inside), -1)
            values, vectors = np.linalg.eigh(block @ block.T)
            # A combination that is zero in the first draw, the table itself, reveals no row of it.
            if values[-1] > CERTAIN and np.abs(vectors[: len(inside), values > CERTAIN]).max() > PRESENT:
                found.append(S)
    return found


def reveals_numbers(draws: list[Floats], rows: tuple[int, ...]) -> bool:
    """Return whether the sum over rows that are singled out differs between draws.

    Otherwise it is a count, in whatever units of the columns.
    """
    basis = _basis(draws).reshape(len(draws), len(draws[0]), -1)
    block = basis[:, list(rows)].reshape(len(draws) * len(rows), -1)
    values, vectors = np.linalg.eigh(block @ block.T)
    found = vectors[:, values > CERTAIN].reshape(len(draws), len(rows), -1)
    return bool(np.abs(found - found.mean(axis=0)).max(initial=0.0) > DIFFERENT)


def _basis(draws: list[Floats]) -> Floats:
    """Return orthonormal columns that span the terms of all draws."""
    stacked = np.vstack(draws)
    size = np.abs(stacked).max(axis=0, initial=0.0)
    U, s, _ = np.linalg.svd(stacked[:, size > 0.0] / size[size > 0.0], full_matrices=False)
    return np.asarray(U[:, s > s.max(initial=0.0) * ZERO])
