"""Groups of coefficients that are penalised together.

A group of one is a coefficient by itself. The weight of a group multiplies its penalty, its multiplier the
lambda; see the module ``penalties``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numba import njit

from fedstat.errors import ModelError
from fedstat.typing import Array, Bools, Floats, Ints


@njit(cache=True, nogil=True)
def group_norms(starts: Ints, b: Floats) -> Floats:
    """Return the Euclidean norm of each group: (m + 1,), (p,) -> (m,)."""
    norms = np.zeros(len(starts) - 1)
    for g in range(len(norms)):
        if starts[g + 1] - starts[g] == 1:
            norms[g] = abs(b[starts[g]])
        else:
            for j in range(starts[g], starts[g + 1]):
                norms[g] += b[j] * b[j]
            norms[g] = np.sqrt(norms[g])
    return norms


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Which coefficients are penalised together; a coefficient alone is a group of one.

    Group g of m is the coefficients from ``starts[g]`` up to ``starts[g + 1]``, (m + 1,). Its weight w_g,
    (m,), multiplies the penalty, 0 leaving it out; its multiplier m_g, (m,), is positive and multiplies
    lambda.
    """

    starts: Ints
    weights: Floats
    multipliers: Floats

    @classmethod
    def single(cls, p: int, weights: Floats | None = None) -> Groups:
        """Penalise each of p coefficients by itself; weights as for :meth:`of`."""
        return cls.of(np.arange(p), weights)

    @classmethod
    def of(cls, labels: Array, weights: Floats | None = None) -> Groups:
        """Penalise neighbours with the same label (p,) together, lambda times the root of their number.

        Weights (m,) are one where None. A ModelError where a label comes back after another, or weights do
        not fit.
        """
        labels = np.asarray(labels)
        starts = np.flatnonzero(np.concatenate([[True], labels[1:] != labels[:-1], [True]]))
        m = len(starts) - 1
        if len(np.unique(labels)) != m:
            raise ModelError("expected the coefficients of a group side by side; sort the columns by group")
        weights = np.ones(m) if weights is None else np.array(weights, dtype=np.float64)
        wrong = int((~(np.isfinite(weights) & (weights >= 0.0))).sum())
        if weights.shape != (m,) or wrong:
            raise ModelError(
                f"expected {m} finite weights of zero or more, one for each group; received an array of "
                f"shape {weights.shape}, {wrong} of them negative or not finite"
            )
        return cls(starts.astype(np.int64), weights, np.sqrt(np.diff(starts)))

    @property
    def p(self) -> int:
        """Number of coefficients."""
        return int(self.starts[-1])

    @property
    def sizes(self) -> Ints:
        """Number of coefficients of each group: (m,)."""
        return np.diff(self.starts)

    @property
    def penalised(self) -> Bools:
        """Tell which groups have a penalty: (m,)."""
        return self.weights > 0.0

    def norms(self, b: Floats) -> Floats:
        """Return the Euclidean norm of each group: (p,) -> (m,)."""
        norms: Floats = group_norms(self.starts, b)
        return norms

    def inner_products(self, b: Floats, other: Floats) -> Floats:
        """Return the inner product of each group of b with that of another: (p,), (p,) -> (m,)."""
        return np.add.reduceat(b * other, self.starts[:-1])

    def columns(self, which: Bools) -> Ints:
        """Return the positions of the coefficients of some groups: (m,) -> (q,), ascending."""
        return np.flatnonzero(np.repeat(which, self.sizes))

    def take(self, which: Bools) -> Groups:
        """Return some of the groups as if there were no others: (m,)."""
        starts = np.concatenate([[0], np.cumsum(self.sizes[which])]).astype(np.int64)
        return Groups(starts, self.weights[which], self.multipliers[which])


def orthonormaliser(G: Floats, groups: Groups) -> tuple[Floats, Groups]:
    """Return coordinates in which the columns of each group are orthonormal, and the groups there.

    The penalty of a group is then that of its part of the linear predictor, whatever coding made its columns
    (Breheny and Huang 2015), and a step of descent has a closed form. T (p, p) is block diagonal: the columns
    are ``X T``, Gram ``X'X/N`` and gradient become ``T'GT`` and ``T'c``, coefficients of X are ``T theta``.
    The multiplier of a group becomes the root of its rank; columns that are left over become zero, as do
    their coefficients. Groups of one column, and those without a penalty, stay as they are.
    """
    T, multipliers = np.eye(groups.p), groups.multipliers.copy()
    for g in np.flatnonzero((groups.sizes > 1) & groups.penalised):
        block = slice(groups.starts[g], groups.starts[g + 1])
        values, vectors = np.linalg.eigh(G[block, block])
        kept = values > 1e-10 * max(values[-1], 0.0)
        T[block, block] = np.where(kept, vectors / np.sqrt(np.where(kept, values, 1.0)), 0.0)
        multipliers[g] = np.sqrt(max(kept.sum(), 1))
    return T, replace(groups, multipliers=multipliers)
