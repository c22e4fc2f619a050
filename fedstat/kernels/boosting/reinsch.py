"""Coordinates in which a penalised least squares fit is a shrinkage of each (Demmler and Reinsch 1975)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from scipy.linalg import LinAlgError, lapack

from fedstat.typing import Floats

SINGULAR = 1e-10
"""Share of the Gram in Gram and penalty together below which a direction has no column."""
ROUNDING = 1e-14
ALONE = np.ones(1)
WIDEST = 60.0
"""Logarithm of the largest smoothing parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class Shrinkage:
    """`V` (k, k) takes the Gram to the identity, the penalty to a diagonal; the fit of a score t is V h V't.

    `h` (k,) lies in [0, 1]; it is 0 in directions that no row has.
    """

    V: Floats
    h: Floats
    smoothing: float

    @property
    def df(self) -> float:
        """Degrees of freedom of the fit, tr(2H - H'H)."""
        return float((2.0 * self.h - self.h**2).sum())


def demmler_reinsch(gram: Floats, penalty: Floats, df: float, other: Floats = ALONE) -> Shrinkage:
    """Choose the smoothing parameter so that tr(2H - H'H) = df, as mboost does; df is at most k.

    H is the fit in both directions where another has the shrinkages `other`. Where the penalty leaves more
    directions free than df, the smoothing parameter is as large as can be.
    """
    once, twice = 2.0 * other.sum(), (other**2).sum()
    k = len(gram)
    size = float(np.trace(gram)) / k
    relative = size * k / max(float(np.trace(penalty)), 1e-300)
    # Of Gram and penalty together: the Gram alone may be singular, and a ridge would move the fit.
    both = gram + relative * penalty + ROUNDING * size * np.eye(k)
    # Of so small matrices, the checks of the general interface take longer than the decomposition.
    mu, V, info = lapack.dsygvd(penalty, both)
    if info:
        raise LinAlgError("a Gram and its penalty have no common coordinates")
    mu = np.maximum(mu, 0.0)
    own = 1.0 - relative * mu
    there = own > SINGULAR
    V = V / np.sqrt(np.where(there, own, 1.0))
    d = np.where(there, mu / np.where(there, own, 1.0), np.inf)
    if df >= (once - twice) * there.sum() - 1e-9:
        return Shrinkage(V, there.astype(float), 0.0)

    scale = float(np.log(max(d[there].max(), 1e-300)))
    smoothing = float(smoothing_by_df(d, df, once, twice, -WIDEST - scale, WIDEST - scale))
    return Shrinkage(V, 1.0 / (1.0 + smoothing * d), smoothing)


@njit(cache=True)
def smoothing_by_df(d: Floats, df: float, once: float, twice: float, low: float, high: float) -> float:
    """Smoothing parameter, its logarithm between two ends, at which h = 1 / (1 + smoothing d) have df.

    These, the sum of once h - twice h^2, fall with it: halved until no number is left between the ends.
    """
    while True:
        middle = 0.5 * (low + high)
        if middle <= low or middle >= high:
            return float(np.exp(high))
        smoothing, found = np.exp(middle), 0.0
        for x in d:
            h = 1.0 / (1.0 + smoothing * x)
            found += once * h - twice * h * h
        if found > df:
            low = middle
        else:
            high = middle
