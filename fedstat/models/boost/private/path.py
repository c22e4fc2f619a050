"""Boosting on sums with noise: eigenvalues off zero, a ridge, and no step that noise alone would explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated

import numpy as np
from scipy.linalg import block_diag

from fedstat.models.boost.learning.boosting import BoostPath, Ready, follow
from fedstat.models.boost.learning.moments import CurveSums
from fedstat.typing import Floats

FLOOR = 0.05
"""Share of the entities that eigenvalues of the products of columns have at least."""
RIDGE = 0.1
"""Share of the entities that the ridge of a learner is at least."""
PURE_NOISE = 1.5
"""By how much the gain of a step has to exceed what noise alone gains."""


@dataclass(frozen=True, slots=True, eq=False)
class NoisySums:
    """Sums over `n` entities of products of the columns of learners, and with the response, with noise.

    `S` (K, K) and `T` (K, L) are of scores of about unit variance, the first a one; `yy` the sum of squares
    of the response's scores. `sd` is the deviation of the noise on products of the learners' columns at one
    institution, `sd_response` (P,) that of each learner's with the response. `starts` (P + 1,) are
    places, and `owners` (P,) number the institutions.
    """

    n: int
    S: Annotated[Floats, "k k"]
    T: Annotated[Floats, "k l"]
    yy: float
    sd: float
    sd_response: Annotated[Floats, "p"]
    starts: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def lifted(self) -> Floats:
        """Products of columns with eigenvalues off zero."""
        return lift(self.S, FLOOR * self.n)

    @property
    def df(self) -> Floats:
        """Degrees of freedom of each learner's fit, (P,)."""
        S, out = self.lifted, []
        for (lo, hi), ridge in zip(pairwise(self.starts), self.ridges, strict=True):
            values = np.linalg.eigvalsh(S[lo:hi, lo:hi])
            h = values / (values + ridge)
            out.append(self.T.shape[1] * float((2.0 * h - h**2).sum()))
        return np.array(out)

    def rsquared(self, coef: Floats) -> float:
        """Share of the response's squares that coefficients (K, L) explain, by these sums."""
        S = self.lifted
        return float((2.0 * (coef * self.T).sum() - (coef * (S @ coef)).sum()) / self.yy)

    def drawn(self, coef: Floats, times: float, random: np.random.Generator) -> tuple[NoisySums, NoisySums]:
        """Take a fit for the truth: its sums, and these with noise that is so many times as large as here."""
        S = self.lifted
        truth = replace(self, S=S, T=S @ coef)
        place = np.repeat(np.arange(len(self.owners)), np.diff(self.starts))
        own = np.array(self.owners)[place]
        alone = (own[:, None] == own) | (place == 0) | (place == 0)[:, None]
        E = np.triu(random.normal(size=S.shape)) * np.where(alone, 1.0, np.sqrt(2.0)) * self.sd * times
        E[0, 0] = 0.0
        E_T = random.normal(size=self.T.shape) * self.sd_response[place][:, None] * times
        noisy = replace(
            truth,
            S=S + E + np.triu(E, 1).T,
            T=truth.T + E_T,
            sd=times * self.sd,
            sd_response=times * self.sd_response,
        )
        return truth, noisy

    @property
    def thresholds(self) -> Floats:
        """Gain that each learner's step has to exceed, (P,)."""
        q = np.diff(self.starts)
        noise = q * self.T.shape[1] * self.sd_response**2 / (self.n + self.ridges)
        return np.asarray(PURE_NOISE * noise)

    @property
    def ridges(self) -> Floats:
        """Ridge of each learner, (P,)."""
        return np.maximum(RIDGE * self.n, 2.0 * self.sd * np.sqrt(np.diff(self.starts)))


def lift(S: Floats, least: float) -> Floats:
    """Raise the eigenvalues of a symmetric matrix to `least`, which noise may have made negative."""
    values, U = np.linalg.eigh(S)
    return np.asarray((U * np.maximum(values, least)) @ U.T)


def follow_noisy(sums: NoisySums, steps: int, nu: float) -> BoostPath:
    """Take at most so many steps, and none after the first that gains no more than noise may."""
    S = sums.lifted
    turns, shrunk = [], []
    for (lo, hi), ridge in zip(pairwise(sums.starts), sums.ridges, strict=True):
        values, U = np.linalg.eigh(S[lo:hi, lo:hi])
        turns.append(U / np.sqrt(values))
        shrunk.append(np.repeat((values / (values + ridge))[:, None], sums.T.shape[1], axis=1))
    H, starts = np.concatenate(shrunk), np.array(sums.starts, dtype=np.int64)
    ready = Ready(block_diag(*turns), np.eye(sums.T.shape[1]), starts, (H,), (), full=False)
    moments = CurveSums(S, sums.T, np.zeros((0, 0)), np.zeros(0), sums.yy)
    path = follow(ready, moments, steps, nu)
    m = _steps_above(ready, S, sums, path.selected.tolist(), nu)
    if m < steps:
        path = follow(ready, moments, max(m, 1), nu)
    return (
        path if m else BoostPath(path.selected[:0], path.risk[:0], path.risk_test[:0], np.zeros_like(sums.T))
    )


def _steps_above(ready: Ready, S: Floats, sums: NoisySums, selected: Sequence[int], nu: float) -> int:
    """Count the steps before the first whose gain is below its learner's threshold."""
    (H,), L = ready.fit, ready.L
    S, T, thresholds = L.T @ S @ L, L.T @ sums.T, sums.thresholds
    for m, p in enumerate(selected):
        own = slice(sums.starts[p], sums.starts[p + 1])
        t, h = T[own], H[own]
        if float((t * t * h * (2.0 - h)).sum()) < thresholds[p]:
            return m
        T = T - nu * S[:, own] @ (t * h)
    return len(selected)
