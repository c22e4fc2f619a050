"""Likelihood of a response whose linear predictor is normal given the observed columns.

With eta = m + e and e ~ N(0, v) the likelihood of one entity is ``p(m, v) = E f(y; m + e)``, an integral
over one dimension. It solves the heat equation, dp/dv = (1/2) d2p/dm2, so that every derivative of log p
by m and v follows from ``A_j = E[f^(j)(y; m + e)] / p``, j = 1..4, and none of them divides by v:

    L_m = A_1,  L_v = A_2 / 2,  L_mm = A_2 - A_1^2,  L_mv = (A_3 - A_1 A_2) / 2,  L_vv = (A_4 - A_2^2) / 4.

The trapezoidal rule integrates from the mode of the integrand outwards, until its terms vanish. For an
integrand that is analytic in a strip around the real line, the error decreases exponentially with the step
(Trefethen and Weideman 2014, doi:10.1137/130932132, theorem 5.1), for any v; Gauss-Hermite rules need more
nodes for larger v. For the probit link the integral has a closed form.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from fedstat.typing import Floats

LOGIT, PROBIT, LOG = 0, 1, 2
"""Binomial with either link, and Poisson with the log link."""

LOG_P, BY_M, BY_V, BY_MM, BY_MV, BY_VV = range(6)
"""Rows of what :func:`marginal_likelihood` returns."""

STEP = 0.6
"""Step of the trapezoidal rule, in standard deviations of the integrand at its mode."""

LARGEST_STEP = (0.6, 0.0, 0.3)
"""By pair: the logit's poles are at +-i pi; exp(-exp(eta)) is bounded within +-i pi/2."""

NEGLIGIBLE = -38.0
"""Log of a term, relative to the largest, below which it is ignored."""

MODE_STEPS = 250
LARGEST_MOVE = 2.0
FAR_TAIL = -25.0
HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
LARGEST_EXPONENT = 700.0

LARGEST_MEAN, LARGEST_VARIANCE = 200.0, 400.0
"""Limit of a linear predictor; it is far beyond any data, and keeps the number of nodes below a thousand."""


@njit(cache=True, nogil=True)
def density(pair: int, y: float, eta: float) -> tuple[float, float, float]:
    """Return log f(y; eta), except for terms in y alone, the mean, and its derivative by eta.

    The links are canonical: the derivative is the variance, and y minus the mean the score.
    """
    if pair == LOGIT:
        e = math.exp(-abs(eta))
        d = 1.0 / (1.0 + e)
        return y * eta - max(eta, 0.0) - math.log1p(e), d if eta >= 0.0 else e * d, e * d * d
    mu = math.exp(min(eta, LARGEST_EXPONENT))
    return y * eta - mu, mu, mu


@njit(cache=True, nogil=True)
def find_mode(pair: int, y: float, m: float, v: float) -> tuple[float, float]:
    """Return the mode of f(y; m + e) exp(-e^2/2v) in e, and the standard deviation of a normal there."""
    e = 0.0
    for _ in range(MODE_STEPS):
        _, mu, W = density(pair, y, m + e)
        move = (y - mu - e / v) / (W + 1.0 / v)
        # Newton's steps overshoot where the density is flat, so their length is limited.
        move = min(max(move, -LARGEST_MOVE), LARGEST_MOVE)
        e += move
        if abs(move) < 1e-3:
            break
    _, _, W = density(pair, y, m + e)
    return e, 1.0 / math.sqrt(W + 1.0 / v)


@njit(cache=True, nogil=True)
def add_powers(pair: int, y: float, mu: float, W: float, weight: float, A: Floats) -> None:
    """Add the weighted derivatives f^(j)(y; eta) / f(y; eta), j = 1..4, to A."""
    s = y - mu
    W1, W2 = (W * (1.0 - 2.0 * mu), W * (1.0 - 6.0 * W)) if pair == LOGIT else (W, W)
    s2 = s * s
    A[0] += weight * s
    A[1] += weight * (s2 - W)
    A[2] += weight * (s * (s2 - 3.0 * W) - W1)
    A[3] += weight * (s2 * s2 - 6.0 * s2 * W + 3.0 * W * W - 4.0 * s * W1 - W2)


@njit(cache=True, nogil=True)
def integrate(pair: int, y: float, m: float, v: float, A: Floats) -> float:
    """Return log p(m, v), and fill A with A_1..A_4."""
    A[:] = 0.0
    if v <= 0.0:
        log_f, mu, W = density(pair, y, m)
        add_powers(pair, y, mu, W, 1.0, A)
        return log_f
    mode, sd = find_mode(pair, y, m, v)
    log_f, mu, W = density(pair, y, m + mode)
    top = log_f - 0.5 * mode * mode / v
    step = min(STEP * sd, LARGEST_STEP[pair])
    total = 1.0
    add_powers(pair, y, mu, W, 1.0, A)
    # Outwards from the mode, to either side.
    for side in (-step, step):
        e = mode + side
        log_f, mu, W = density(pair, y, m + e)
        height = log_f - 0.5 * e * e / v - top
        while height > NEGLIGIBLE:
            weight = math.exp(height)
            total += weight
            add_powers(pair, y, mu, W, weight, A)
            e += side
            log_f, mu, W = density(pair, y, m + e)
            height = log_f - 0.5 * e * e / v - top
    A /= total
    return top + math.log(total * step / math.sqrt(v)) - HALF_LOG_2PI


@njit(cache=True, nogil=True)
def log_normal_tail(t: float) -> tuple[float, float]:
    """Return log Phi(t) and phi(t) / Phi(t); far in the tail by the asymptotic series."""
    if t > FAR_TAIL:
        Phi = 0.5 * math.erfc(-t / math.sqrt(2.0))
        return math.log(Phi), math.exp(-0.5 * t * t - HALF_LOG_2PI) / Phi
    u = 1.0 / (t * t)
    series = 1.0 - u * (1.0 - 3.0 * u * (1.0 - 5.0 * u * (1.0 - 7.0 * u)))
    return -0.5 * t * t - HALF_LOG_2PI - math.log(-t) + math.log(series), -t / series


@njit(cache=True, nogil=True)
def integrate_probit(y: float, m: float, v: float, A: Floats) -> float:
    """Return log p(m, v) of a binary response with the probit link, Phi(+-m / sqrt(1 + v)), and fill A."""
    scale = (1.0 if y > 0.5 else -1.0) / math.sqrt(1.0 + v)
    t = scale * m
    log_p, ratio = log_normal_tail(t)
    A[0] = scale * ratio
    A[1] = -(scale**2) * t * ratio
    A[2] = scale**3 * (t * t - 1.0) * ratio
    A[3] = -(scale**4) * (t * t * t - 3.0 * t) * ratio
    return log_p


@njit(cache=True, nogil=True)
def marginal_likelihood(pair: int, y: Floats, m: Floats, v: Floats) -> Floats:
    """Log-likelihood of each entity and its derivatives by mean and variance of the linear predictor: (6, n).

    `pair` is LOGIT, PROBIT or LOG; y, m and v are (n,): response, and mean and variance of the linear
    predictor given the observed columns (v zero: all are observed). The rows are LOG_P, BY_M, BY_V, BY_MM,
    BY_MV, BY_VV.
    """
    n = len(y)
    out = np.empty((6, n))
    A = np.empty(4)
    for i in range(n):
        if pair == PROBIT:
            out[LOG_P, i] = integrate_probit(y[i], m[i], v[i], A)
        else:
            out[LOG_P, i] = integrate(pair, y[i], m[i], v[i], A)
            if pair == LOG:
                out[LOG_P, i] -= math.lgamma(y[i] + 1.0)
        out[BY_M, i] = A[0]
        # The heat equation: a derivative by v is half the second one by m.
        out[BY_V, i] = 0.5 * A[1]
        out[BY_MM, i] = A[1] - A[0] * A[0]
        out[BY_MV, i] = 0.5 * (A[2] - A[0] * A[1])
        out[BY_VV, i] = 0.25 * (A[3] - A[1] * A[1])
    return out


@njit(cache=True, nogil=True)
def logistic_mean(m: float, v: float) -> tuple[float, float, float]:
    """Return the mean of 1 / (1 + exp(-m - e)), e ~ N(0, v), and its derivatives by m and v."""
    sd = math.sqrt(v)
    step = min(STEP * sd, LARGEST_STEP[LOGIT])
    nodes = int(math.sqrt(-2.0 * NEGLIGIBLE) * sd / step) if v > 0.0 else 0
    total = mean = by_m = by_v = 0.0
    for j in range(-nodes, nodes + 1):
        weight = math.exp(-0.5 * (j * step) ** 2 / v) if v > 0.0 else 1.0
        _, mu, W = density(LOGIT, 0.0, m + j * step)
        total += weight
        mean += weight * mu
        by_m += weight * W
        by_v += 0.5 * weight * W * (1.0 - 2.0 * mu)
    return mean / total, by_m / total, by_v / total


@njit(cache=True, nogil=True)
def marginal_mean(pair: int, m: Floats, v: Floats) -> Floats:
    """Average the mean response over missing columns: E[mu(m + e)] and its derivatives by m and v, (3, n).

    The arguments are those of :func:`marginal_likelihood`.
    """
    n = len(m)
    out = np.zeros((3, n))
    for i in range(n):
        if pair == LOG:
            mu = math.exp(m[i] + 0.5 * v[i])
            out[0, i], out[1, i], out[2, i] = mu, mu, 0.5 * mu
        elif pair == PROBIT:
            scale = 1.0 / math.sqrt(1.0 + v[i])
            t = scale * m[i]
            phi = math.exp(-0.5 * t * t - HALF_LOG_2PI)
            out[0, i] = 0.5 * math.erfc(-t / math.sqrt(2.0))
            out[1, i], out[2, i] = scale * phi, -0.5 * scale * scale * t * phi
        else:
            out[0, i], out[1, i], out[2, i] = logistic_mean(m[i], v[i])
    return out
