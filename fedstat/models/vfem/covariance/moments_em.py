"""The exact EM map of VFEM from moments.

What is missing stands at its conditional expectation mu_k + w_k z_i, w_k = Sigma_k beta_k and z_i = r_i / v_g
(TWFL (4)), which is linear in what is seen: the expected Gram matrix of (1, x, y) follows from those of the
patterns. The M-step is a regression and the blocks' own moments (TWFL (5), (6)).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.models.vertical.likelihood import Standard
from fedstat.typing import Array, Floats


@dataclass(frozen=True, slots=True, eq=False)
class EMPoint:
    """Parameters of standardised columns; complex where derivatives are taken by a complex step.

    Intercept at the origin, residual variance, beta and mu (P,), and the block diagonal Sigma (P, P).
    """

    beta0: complex
    s2: complex
    beta: Array
    mu: Array
    Sigma: Array


def expected_gram(standard: Standard, at: EMPoint) -> Array:
    """Return the expected sum of (1, x, y)(1, x, y)' given what is seen, (P + 2, P + 2)."""
    moments, missing = standard.moments, standard.missing
    w = at.Sigma @ at.beta
    v = at.s2 + missing @ ((at.beta * w) @ standard.member)
    absent = ~moments.seen
    weights = np.empty((len(v), standard.P + 2), dtype=v.dtype)
    weights[:, 0] = -at.beta0 - missing @ ((at.mu * at.beta) @ standard.member)
    weights[:, 1:-1], weights[:, -1] = -at.beta, 1.0
    sums = np.matmul(moments.grams.astype(v.dtype), weights[:, :, None])[:, :, 0]
    squares = np.sum(weights * sums, axis=1)
    mean, slope = np.zeros_like(weights), np.zeros_like(weights)
    mean[:, 1:-1], slope[:, 1:-1] = absent * at.mu, absent * w / v[:, None]
    seen = moments.grams.sum(axis=0)
    mixed = mean.T @ (moments.grams[:, 0] + sums[:, :1] * slope) + slope.T @ sums
    T = seen + mixed + mixed.T
    T += (mean * moments.n[:, None]).T @ mean + (slope * (squares - moments.n * v)[:, None]).T @ slope
    T[1:-1, 1:-1] += at.Sigma * (moments.nobs - standard.count)
    return np.asarray(T)


def maximise(standard: Standard, T: Array) -> EMPoint:
    """M-step from an expected Gram matrix."""
    n = standard.moments.nobs
    coefficients = np.linalg.solve(T[:-1, :-1], T[:-1, -1])
    mu = T[0, 1:-1] / n
    return EMPoint(
        coefficients[0],
        (T[-1, -1] - T[-1, :-1] @ coefficients) / n,
        coefficients[1:],
        mu,
        (T[1:-1, 1:-1] / n - np.outer(mu, mu)) * standard.within,
    )


def em_step(standard: Standard, at: EMPoint) -> EMPoint:
    """One iteration of the exact EM algorithm."""
    return maximise(standard, expected_gram(standard, at))


def centred(T: Array, mu: Floats) -> Floats:
    """Take the expected sum of (1, x - mu)(1, x - mu)' from that of (1, x, y)(1, x, y)'."""
    shift = np.eye(len(mu) + 1)
    shift[1:, 0] = -mu
    return np.asarray(shift @ T[:-1, :-1] @ shift.T, dtype=np.float64)
