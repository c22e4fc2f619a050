"""Negative binomial regression (NB2, log link) in coefficients and dispersion together.

Var y = mu + alpha mu^2. With theta = 1/alpha, everything is written in the relative distance
q = alpha (y - mu) / (1 + alpha mu), in Stirling's remainders, and in functions that lose no digits
where q or alpha is small, so that the limit alpha -> 0 is the Poisson model.

References
----------
Cameron and Trivedi (2013), Regression Analysis of Count Data, 3.3.1, (3.26)-(3.28).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numba import njit

from fedstat.kernels.glm.loops import fixed, weighted_sums
from fedstat.kernels.glm.rows import Rows, linear_predictor
from fedstat.typing import Floats

STIRLING = (-1 / 12, 1 / 120, -1 / 252, 1 / 240, -1 / 132, 691 / 32760, -1 / 12)
"""Coefficients of ``digamma(x) - log(x) + 1/(2x)`` in x^-2, x^-4, ... (Abramowitz and Stegun 6.3.18)."""

LARGE = 10.0
"""Where Stirling's series has all digits."""

NEAR = 0.15
"""Where the series in q is used; TERMS of them have all digits."""

TERMS = 20
HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)

TABLE = 1024
"""Counts below are worked out once."""


class NB2Sums(NamedTuple):
    """Sums over rows at (beta, alpha), alpha last: score (p + 1,), observed information (p + 1, p + 1).

    The log-likelihood is minus infinity, and the others zero, where a mean is too large to be a number.
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

    It is what the sum of j / (1 + alpha j), j < y, exceeds its integral by.
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
    """Return what depends on the count alone: for y = 0 zeros."""
    if y == 0.0:
        return 0.0, 0.0, 0.0
    theta = 1.0 / alpha
    value, slope = _discreteness(y, alpha)
    stirling = _stirling(y + theta)[0] - _stirling(y)[0] - _stirling(theta)[0]
    return value, slope, stirling - HALF_LOG_2PI - 0.5 * math.log(y * (1.0 + alpha * y))


@njit(cache=True, nogil=True)
def count_terms(y: float, alpha: float) -> tuple[float, float]:
    """Return what depends on the count alone in the first and the second derivative by alpha."""
    value, slope, _ = _of_count(y, alpha)
    return value, slope


@njit(cache=True, nogil=True)
def square_by_alpha(q: float, log_ratio: float) -> float:
    """Return what d^2 is multiplied with in the derivative by alpha."""
    return _curvature(q, log_ratio)


@njit(cache=True, nogil=True)
def second_by_alpha(d: float, q: float, ratio: float, log_ratio: float, spread: float) -> float:
    """Return what d^2 is multiplied with in the second derivative; `spread` is mu / (1 + alpha y)."""
    return d * _skewness(q, ratio, _curvature(q, log_ratio)) - spread


@njit(cache=True, nogil=True)
def nb2_rows(y: Floats, eta: Floats, alpha: float) -> Floats:
    """Return the parts (6, m) of each row's log-likelihood, from counts and linear predictors, (m,) each.

    First derivatives by eta and alpha; minus the second derivatives by eta twice, by eta and alpha, and by
    alpha twice; the log-likelihood.
    """
    m = len(y)
    out = np.empty((6, m))
    # Small counts come again and again: what depends on the count alone is worked out once for each.
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

    Weights multiply a row's log-likelihood. A ValueError where alpha is not positive.
    """
    if not alpha > 0.0:
        raise ValueError("alpha must be positive")
    p = len(beta)
    score, information, llf = np.zeros(p + 1), np.zeros((p + 1, p + 1)), 0.0
    for rows in (piece for chunk in chunks for piece in chunk.pieces()):
        with np.errstate(all="ignore"):
            parts = nb2_rows(fixed(rows.y), fixed(linear_predictor(rows, beta)), alpha)
            parts = parts if rows.weight is None else parts * rows.weight
        s, s_alpha, w, cross, w_alpha, ll = parts
        s_beta, square = weighted_sums(fixed(rows.X), fixed(s), fixed(w))
        score += np.append(s_beta, s_alpha.sum())
        information[:p, :p] += square
        information[p, :p] += np.einsum("ij,i->j", rows.X, cross)
        information[p, p] += w_alpha.sum()
        llf += float(ll.sum())
    information[:p, p] = information[p, :p]
    # A mean that is no number: the caller takes a shorter step.
    if not (np.isfinite(llf) and np.isfinite(score).all() and np.isfinite(information).all()):
        return NB2Sums(np.zeros(p + 1), np.zeros((p + 1, p + 1)), -np.inf)
    return NB2Sums(score, information, llf)
