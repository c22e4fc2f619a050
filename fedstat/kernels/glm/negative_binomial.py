"""Negative binomial regression (NB2, log link), with fixed or normally distributed linear predictors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numba import njit

from fedstat.kernels import as_kernel_array
from fedstat.kernels.glm.quadrature import (
    HALF_LOG_2PI,
    LARGEST_EXPONENT,
    LARGEST_MOVE,
    MODE_STEPS,
    NEGLIGIBLE,
    STEP,
)
from fedstat.kernels.glm.sums import Rows, linear_predictor
from fedstat.kernels.row_products import weighted_sums
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Negative binomial regression (NB2, log link) in coefficients and dispersion together.
#
# Var y = mu + alpha mu^2. With theta = 1/alpha, everything is written in the relative distance q = alpha (y -
# mu) / (1 + alpha mu), in Stirling's remainders, and in functions that lose no digits if q or alpha is small,
# so that the limit alpha -> 0 is the Poisson model.
#
# References
# ----------
# Cameron and Trivedi (2013), Regression Analysis of Count Data, 3.3.1, (3.26)-(3.28).

STIRLING = (-1 / 12, 1 / 120, -1 / 252, 1 / 240, -1 / 132, 691 / 32760, -1 / 12)
"""Coefficients of ``digamma(x) - log(x) + 1/(2x)`` in x^-2, x^-4, ... (Abramowitz and Stegun 6.3.18)."""

LARGE = 10.0
"""Argument above which Stirling's series has all digits."""

NEAR = 0.15
"""Range of q for its series; TERMS terms have all digits."""

TERMS = 20

TABLE = 1024
"""Counts below this are computed once."""


class NB2Sums(NamedTuple):
    """Sums over rows at (beta, alpha), alpha last: score (p + 1,), observed information (p + 1, p + 1).

    The log-likelihood is minus infinity, and the others zero, if a mean is too large for floating point.
    """

    score: Floats
    information: Floats
    log_likelihood: float


@njit(cache=True, nogil=True)
def _curvature(q: float, log_ratio: float) -> float:
    """Return ``(q - log(1 + q)) / q^2``."""
    if abs(q) >= NEAR:
        return (q - log_ratio) / (q * q)
    total = 0.0
    for k in range(TERMS, -1, -1):
        total = 1.0 / (k + 2) - q * total
    return total


@njit(cache=True, nogil=True)
def _skewness(q: float, ratio: float, curvature: float) -> float:
    """Return ``(1 / (1 + q) - 2 curvature(q)) / q``, where ratio is 1 + q."""
    if abs(q) >= NEAR:
        return (1.0 / ratio - 2.0 * curvature) / q
    total = 0.0
    for k in range(TERMS, 0, -1):
        total = -k / (k + 2) - q * total
    return total


@njit(cache=True, nogil=True)
def _distance(q: float, ratio: float, log_ratio: float) -> float:
    """Return ``(1 + q) log(1 + q) - q``, where ratio is 1 + q."""
    if abs(q) >= NEAR:
        return ratio * log_ratio - q
    return q * q * (1.0 - ratio * _curvature(q, log_ratio))


@njit(cache=True, nogil=True)
def _stirling(x: float) -> tuple[float, float, float]:
    """Return Stirling's remainder of log gamma(x), digamma(x) - log(x), and trigamma(x) - 1/x."""
    gamma = digamma = trigamma = 0.0
    at = x
    while at < LARGE:
        digamma -= 1.0 / at
        trigamma += 1.0 / (at * at)
        at += 1.0
    digamma += math.log(at / x) - 0.5 / at
    trigamma += 1.0 / at - 1.0 / x + 0.5 / (at * at)
    power = 1.0
    for k in range(1, len(STIRLING) + 1):
        power /= at * at
        term = STIRLING[k - 1] * power
        gamma += term * at / (1 - 2 * k)
        digamma += term
        trigamma -= 2 * k * term / at
    if x < LARGE:
        gamma = math.lgamma(x) - (x - 0.5) * math.log(x) + x - HALF_LOG_2PI
    return gamma, digamma, trigamma


@njit(cache=True, nogil=True)
def _discreteness(y: float, alpha: float) -> tuple[float, float]:
    """Return ``theta^2 (b(theta) - b(theta + y))``, b = digamma - log, and its derivative by alpha.

    It is the difference between the sum of j / (1 + alpha j), j < y, and its integral.
    """
    if alpha * LARGE > 1.0:
        theta = 1.0 / alpha
        _, b, b1 = _stirling(theta)
        _, c, c1 = _stirling(theta + y)
        value = theta * theta * (b - c)
        return value, -2.0 * theta * value - theta**4 * (b1 - c1)
    v = 1.0 / (1.0 + alpha * y)
    value, slope = -0.5 * y * v, 0.5 * (y * v) ** 2
    gap = alpha * y * v * (1.0 + v)  # 1 - v^2
    geometric, v_power, a_power = 0.0, 1.0, 1.0
    for k in range(1, len(STIRLING) + 1):
        c = STIRLING[k - 1]
        geometric += v_power
        v_power *= v * v
        rest = gap * geometric  # 1 - v^(2k)
        value += c * a_power * rest
        slope += c * a_power * 2 * k * v_power * y * v
        if k > 1:
            slope += c * (2 * k - 2) * a_power / alpha * rest
        a_power *= alpha * alpha
    return value, slope


@njit(cache=True, nogil=True)
def _of_count(y: float, alpha: float) -> tuple[float, float, float]:
    """Return the terms that depend only on the count: for y = 0 zeros."""
    if y == 0.0:
        return 0.0, 0.0, 0.0
    theta = 1.0 / alpha
    value, slope = _discreteness(y, alpha)
    stirling = _stirling(y + theta)[0] - _stirling(y)[0] - _stirling(theta)[0]
    return value, slope, stirling - HALF_LOG_2PI - 0.5 * math.log(y * (1.0 + alpha * y))


@njit(cache=True, nogil=True)
def count_terms(y: float, alpha: float) -> tuple[float, float]:
    """Return the terms of the first and second derivative by alpha that depend only on the count."""
    value, slope, _ = _of_count(y, alpha)
    return value, slope


@njit(cache=True, nogil=True)
def square_by_alpha(q: float, log_ratio: float) -> float:
    """Return the factor of d^2 in the derivative by alpha."""
    return _curvature(q, log_ratio)


@njit(cache=True, nogil=True)
def second_by_alpha(d: float, q: float, ratio: float, log_ratio: float, spread: float) -> float:
    """Return the factor of d^2 in the second derivative; `spread` is mu / (1 + alpha y)."""
    return d * _skewness(q, ratio, _curvature(q, log_ratio)) - spread


@njit(cache=True, nogil=True)
def nb2_rows(y: Floats, eta: Floats, alpha: float) -> Floats:
    """Return the parts (6, m) of each row's log-likelihood, from counts and linear predictors, (m,) each.

    First derivatives by eta and alpha; minus the second derivatives by eta twice, by eta and alpha, and by
    alpha twice; the log-likelihood.
    """
    m = len(y)
    out = np.empty((6, m))
    # Small counts occur many times: terms that depend only on the count are computed once for each.
    table = [_of_count(0.0, alpha)]
    for count in range(1, min(TABLE, int(min(y.max(), TABLE)) + 1) if m else 1):
        table.append(_of_count(float(count), alpha))
    theta = 1.0 / alpha
    for i in range(m):
        count, mu = y[i], math.exp(eta[i])
        tabled = count < len(table) and count == math.floor(count)
        value, slope, constant = table[int(count)] if tabled else _of_count(count, alpha)
        over, above = 1.0 + alpha * mu, 1.0 + alpha * count
        d = (count - mu) / over
        q, log_ratio = alpha * d, math.log1p(alpha * count) - math.log1p(alpha * mu)
        curvature = _curvature(q, log_ratio)
        out[0, i] = d
        out[1, i] = d * d * curvature + value
        out[2, i] = mu * above / (over * over)
        out[3, i] = d * mu / over
        out[4, i] = -d * d * (d * _skewness(q, above / over, curvature) - mu / above) - slope
        if count > 0.0:
            u, log_u = (count - mu) / mu, math.log(count) - eta[i]
            half = mu * _distance(u, count / mu, log_u)
            half -= (mu + theta) * _distance(q, above / over, log_ratio)
            out[5, i] = constant - half
        else:
            out[5, i] = -theta * math.log1p(alpha * mu)
    return out


def evaluate_nb2(chunks: Iterable[Rows], beta: Floats, alpha: float) -> NB2Sums:
    """Return score, observed information and log-likelihood of NB2 with log link at beta (p,) and alpha.

    Weights multiply a row's log-likelihood. Raises ValueError if alpha is not positive.
    """
    if not alpha > 0.0:
        raise ValueError("alpha must be positive")
    p = len(beta)
    score, information, llf = np.zeros(p + 1), np.zeros((p + 1, p + 1)), 0.0
    for rows in (piece for chunk in chunks for piece in chunk.pieces()):
        with np.errstate(all="ignore"):
            parts = nb2_rows(as_kernel_array(rows.y), as_kernel_array(linear_predictor(rows, beta)), alpha)
            parts = parts if rows.weight is None else parts * rows.weight
        s, s_alpha, w, cross, w_alpha, ll = parts
        s_beta, square = weighted_sums(rows.X, s, w)
        score += np.append(s_beta, s_alpha.sum())
        information[:p, :p] += square
        information[p, :p] += np.einsum("ij,i->j", rows.X, cross)
        information[p, p] += w_alpha.sum()
        llf += float(ll.sum())
    information[:p, p] = information[p, :p]
    # A mean is not a number: the caller takes a shorter step.
    if not (np.isfinite(llf) and np.isfinite(score).all() and np.isfinite(information).all()):
        return NB2Sums(np.zeros(p + 1), np.zeros((p + 1, p + 1)), -np.inf)
    return NB2Sums(score, information, llf)


# ----------------------------------------------------------------------------------------------------
# Likelihood of a negative binomial count (NB2, log link) with a normal linear predictor.
#
# As :mod:`fedstat.kernels.glm.quadrature`, with derivatives by log alpha in addition to those by mean m and
# variance v. With s the derivative of log f by the linear predictor, r that by log alpha, f'' / f = s^2 + s'
# and averages E over missing columns,
#
#     L_r = E r,   L_mr = E (rs + dr/deta) - L_m L_r,   L_rr = E (r^2 + dr/dlog alpha) - L_r^2,
#     L_vr = E (r f''/f + 2 s dr/deta + d2r/deta2) / 2 - L_v L_r.

BY_R, BY_MR, BY_VR, BY_RR = range(6, 10)
"""Additional rows of :func:`marginal_counts`, after those of the other families."""

LARGEST_COUNT_STEP = 0.3
"""As small alphas are close to exp(-exp(eta)), which is bounded within +-i pi/2."""


@njit(cache=True, nogil=True)
def count_density(y: float, eta: float, alpha: float) -> tuple[float, float, float, float]:
    """Return log f except for terms in y alone, its derivative and minus the second one, and the mean."""
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
    """Return log p(m, v) except for terms in y alone, and fill A."""
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
    # Terms in y alone, without the cancellation of gamma functions of large numbers.
    bare = y * at - (y + 1.0 / alpha) * np.log1p(alpha * np.exp(at))
    return np.asarray(_marginal(y, m, v, alpha, nb2_rows(y, at, alpha)[5] - bare))
