"""Rows of one site as the kernels of generalized linear models take them, and what a distribution allows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.typing import Bools, Floats

PIECE = 32768
"""Rows that one thread works on at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of one site.

    X (m, p) is C-contiguous, its intercept a column of ones; y (m,) is a proportion where there are trials.
    The others are (m,) or None: the known part of the linear predictor, frequency weights, variance weights,
    binomial trials.
    """

    X: Floats
    y: Floats
    offset: Floats | None = None
    freq: Floats | None = None
    var: Floats | None = None
    trials: Floats | None = None

    def __len__(self) -> int:
        return len(self.y)

    def part(self, rows: slice) -> Rows:
        """Return some of the rows, without a copy."""
        columns = (self.offset, self.freq, self.var, self.trials)
        return Rows(self.X[rows], self.y[rows], *(None if a is None else a[rows] for a in columns))

    def pieces(self) -> list[Rows]:
        """Return the rows in pieces of at most PIECE; at least one."""
        return [self.part(slice(start, start + PIECE)) for start in range(0, max(len(self), 1), PIECE)]

    @property
    def count(self) -> float:
        """Sum of the frequency weights."""
        return float(len(self) if self.freq is None else self.freq.sum())

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(len(self) if self.weight is None else self.weight.sum())

    @property
    def weight(self) -> Floats | None:
        """Product of all weights: (m,); None where there are none."""
        weight = None
        for factor in (self.freq, self.var, self.trials):
            if factor is not None:
                weight = factor if weight is None else weight * factor
        return weight


def linear_predictor(rows: Rows, beta: Floats) -> Floats:
    """Return ``X beta`` and the offset: (m,)."""
    eta: Floats = np.einsum("ij,j->i", rows.X, beta)  # one thread, so that the order of the sum is fixed
    return eta if rows.offset is None else eta + rows.offset


def in_domain(eta: Floats, mu: Floats, distribution: DistributionSpec) -> Bools:
    """Tell at which rows distribution and link allow the mean: linear predictor (m,), mean (m,) -> (m,)."""
    fine = np.isfinite(mu)
    # The inverse of such a power has a value at negative eta as well, of which eta is not the link (sqrt:
    # eta^2).
    if distribution.link_power not in (None, 1.0, -1.0):
        fine &= eta > 0.0
    if distribution.name == "Binomial":
        closed = distribution.link_entry.closed
        return fine & ((mu >= 0.0) & (mu <= 1.0) if closed else (mu > 0.0) & (mu < 1.0))
    return fine if distribution.variance_power == 0.0 else fine & (mu > 0.0)


def check_response(rows: Rows, distribution: DistributionSpec) -> str:
    """Return what is wrong with the response: a phrase with the number of rows, or ''."""
    right = distribution.support.holds(np.asarray(rows.y))
    count = len(right) - int(right.sum())
    where = distribution.support.otherwise
    return f"{count} row{'s' if count > 1 else ''} with a response {where}" if count else ""
