"""Likelihood of a negative binomial count (NB2, log link) with a normal linear predictor given what is seen.

As :mod:`fedstat.kernels.glm.quadrature`, with derivatives by log alpha beside those by mean m and variance v:
with s the derivative of log f by the linear predictor, r that by log alpha, f'' / f = s^2 + s' and averages E
over what is missing,

    L_r = E r,   L_mr = E (rs + dr/deta) - L_m L_r,   L_rr = E (r^2 + dr/dlog alpha) - L_r^2,
    L_vr = E (r f''/f + 2 s dr/deta + d2r/deta2) / 2 - L_v L_r.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from fedstat.kernels.glm.negative_binomial import count_terms, nb2_rows, second_by_alpha, square_by_alpha
from fedstat.kernels.glm.quadrature import (
    HALF_LOG_2PI,
    LARGEST_EXPONENT,
    LARGEST_MOVE,
    MODE_STEPS,
    NEGLIGIBLE,
    STEP,
)
from fedstat.typing import Floats

BY_R, BY_MR, BY_VR, BY_RR = range(6, 10)
"""Rows of what :func:`marginal_counts` returns, after those of the other families."""

LARGEST_COUNT_STEP = 0.3
"""As small alphas are close to exp(-exp(eta)), which is bounded within +-i pi/2."""


@njit(cache=True, nogil=True)
def count_density(y: float, eta: float, alpha: float) -> tuple[float, float, float, float]:
    """Return log f but for what depends on y alone, its derivative and minus the second one, and the mean."""
    mu = math.exp(min(eta, LARGEST_EXPONENT))
    over = 1.0 + alpha * mu
    return (
        y * eta - (y + 1.0 / alpha) * math.log1p(alpha * mu),
        (y - mu) / over,
        mu * (1.0 + alpha * y) / (over * over),
        mu,
    )


@njit(cache=True, nogil=True)
def add_count_powers(y: float, mu: float, alpha: float, of_count: Floats, weight: float, A: Floats) -> None:
    """Add weighted f^(j)/f, j = 1..4, then r, rs + dr/deta, r f''/f + .., r^2 + dr/dlog alpha, to A."""
    over, above = 1.0 + alpha * mu, 1.0 + alpha * y
    s, W = (y - mu) / over, mu * above / (over * over)
    turn = 2.0 / over - 1.0
    W1 = W * turn
    W2 = W * (turn * turn - 2.0 * alpha * mu / (over * over))
    s2 = s * s
    A[0] += weight * s
    A[1] += weight * (s2 - W)
    A[2] += weight * (s * (s2 - 3.0 * W) - W1)
    A[3] += weight * (s2 * s2 - 6.0 * s2 * W + 3.0 * W * W - 4.0 * s * W1 - W2)
    q = alpha * s
    log_ratio = math.log1p(alpha * y) - math.log1p(alpha * mu)
    r = alpha * (s2 * square_by_alpha(q, log_ratio) + of_count[0])
    second = s2 * second_by_alpha(s, q, above / over, log_ratio, mu / above) + of_count[1]
    r_eta = -alpha * s * mu / over
    r_eta2 = -alpha * mu * (y - 2.0 * mu - alpha * y * mu) / (over * over * over)
    A[4] += weight * r
    A[5] += weight * (r * s + r_eta)
    A[6] += weight * (r * (s2 - W) + 2.0 * s * r_eta + r_eta2)
    A[7] += weight * (r * r + alpha * alpha * second + r)


@njit(cache=True, nogil=True)
def integrate_count(y: float, m: float, v: float, alpha: float, of_count: Floats, A: Floats) -> float:
    """Return log p(m, v) but for what depends on y alone, and fill A."""
    A[:] = 0.0
    if v <= 0.0:
        log_f, _, _, mu = count_density(y, m, alpha)
        add_count_powers(y, mu, alpha, of_count, 1.0, A)
        return log_f
    e = 0.0
    for _ in range(MODE_STEPS):
        _, s, W, _ = count_density(y, m + e, alpha)
        move = min(max((s - e / v) / (W + 1.0 / v), -LARGEST_MOVE), LARGEST_MOVE)
        e += move
        if abs(move) < 1e-3:
            break
    mode = e
    log_f, _, W, mu = count_density(y, m + mode, alpha)
    top = log_f - 0.5 * mode * mode / v
    step = min(STEP / math.sqrt(W + 1.0 / v), LARGEST_COUNT_STEP)
    total = 1.0
    add_count_powers(y, mu, alpha, of_count, 1.0, A)
    for side in (-step, step):
        e = mode + side
        log_f, _, _, mu = count_density(y, m + e, alpha)
        height = log_f - 0.5 * e * e / v - top
        while height > NEGLIGIBLE:
            weight = math.exp(height)
            total += weight
            add_count_powers(y, mu, alpha, of_count, weight, A)
            e += side
            log_f, _, _, mu = count_density(y, m + e, alpha)
            height = log_f - 0.5 * e * e / v - top
    A /= total
    return top + math.log(total * step / math.sqrt(v)) - HALF_LOG_2PI


@njit(cache=True, nogil=True)
def _marginal(y: Floats, m: Floats, v: Floats, alpha: float, constant: Floats) -> Floats:
    out, A, of_count = np.empty((10, len(y))), np.empty(8), np.empty(2)
    for i in range(len(y)):
        of_count[0], of_count[1] = count_terms(y[i], alpha)
        out[0, i] = integrate_count(y[i], m[i], v[i], alpha, of_count, A) + constant[i]
        out[1, i] = A[0]
        out[2, i] = 0.5 * A[1]
        out[3, i] = A[1] - A[0] * A[0]
        out[4, i] = 0.5 * (A[2] - A[0] * A[1])
        out[5, i] = 0.25 * (A[3] - A[1] * A[1])
        out[6, i] = A[4]
        out[7, i] = A[5] - A[0] * A[4]
        out[8, i] = 0.5 * (A[6] - A[1] * A[4])
        out[9, i] = A[7] - A[4] * A[4]
    return out


def marginal_counts(y: Floats, m: Floats, v: Floats, alpha: float) -> Floats:
    """Log-likelihood of each entity and its derivatives by m, v and log alpha: (10, n).

    The first six rows are those of :func:`fedstat.kernels.glm.quadrature.marginal_likelihood`; BY_R, BY_MR,
    BY_VR and BY_RR follow. y, m and v are (n,), alpha is positive.
    """
    at = np.log(np.maximum(y, 0.5))
    # What depends on y alone, without the cancellation of gamma functions of large numbers.
    bare = y * at - (y + 1.0 / alpha) * np.log1p(alpha * np.exp(at))
    return np.asarray(_marginal(y, m, v, alpha, nb2_rows(y, at, alpha)[5] - bare))
