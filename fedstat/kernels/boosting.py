"""Component-wise boosting: losses, Demmler-Reinsch shrinkage of base learners, and boosting paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numba import njit
from scipy.linalg import LinAlgError, lapack
from scipy.special import expit, logit
from scipy.stats import norm

from fedstat.kernels.responses import COUNTS, EVENTS, REAL, Support
from fedstat.typing import Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Losses of boosting: slopes, values, and bounds of curvature, as in mboost (Hofner et al. 2014).
#
# Predictors are those of the link of a generalized linear model. mboost's Binomial takes steps on half of the
# log odds, with a loss in bits: on the log odds, its slope is that of the likelihood times 4 / log 2.

BITS = 4.0 / np.log(2.0)


@dataclass(frozen=True, slots=True)
class BoostLoss:
    """A loss of a response y at a predictor f, arrays of one shape, with its own `number`.

    `slope` is minus the derivative in f, `value` the loss, `weight` the rate at which the slope decreases at
    f, and `bound` its maximum over f, None if there is none; `mean` converts predictors to predictions,
    `start` a mean and a standard deviation to a constant predictor.
    """

    slope: Callable[[Floats, Floats, float], Floats]
    value: Callable[[Floats, Floats, float], Floats]
    weight: Callable[[Floats, Floats, float], Floats]
    bound: float | None
    mean: Callable[[Floats], Floats]
    start: Callable[[Floats, float, float], Floats]
    support: Support = REAL


def huber_value(y: Floats, f: Floats, delta: float) -> Floats:
    """Half the squared residual, and beyond `delta` its tangent."""
    size = np.abs(y - f)
    return np.where(size <= delta, size**2 / 2.0, delta * (size - delta / 2.0))


LOSSES: Mapping[str, BoostLoss] = {
    "binomial": BoostLoss(
        lambda y, f, _: BITS * (y - expit(f)),
        lambda y, f, _: np.logaddexp(0.0, f) - y * f,
        lambda y, f, _: BITS * expit(f) * expit(-f),
        BITS / 4.0,
        expit,
        lambda mean, _, __: logit(mean),
        EVENTS,
    ),
    "poisson": BoostLoss(
        lambda y, f, _: y - np.exp(f),
        lambda y, f, _: np.exp(f) - y * f,
        lambda y, f, _: np.exp(f),
        None,
        np.exp,
        lambda mean, _, __: np.log(mean),
        COUNTS,
    ),
    "huber": BoostLoss(
        lambda y, f, delta: np.clip(y - f, -delta, delta),
        huber_value,
        lambda y, f, delta: (np.abs(y - f) <= delta).astype(float),
        1.0,
        lambda f: f,
        lambda mean, _, __: mean,
    ),
    "quantile": BoostLoss(
        lambda y, f, q: np.where(y > f, q, q - 1.0),
        lambda y, f, q: np.where(y > f, q * (y - f), (1.0 - q) * (f - y)),
        lambda y, f, q: np.zeros_like(f),
        0.0,
        lambda f: f,
        lambda mean, sd, q: mean + sd * norm.ppf(q),
    ),
}
"""By name; least squares need no slopes, because sums of products suffice."""


# ----------------------------------------------------------------------------------------------------
# Coordinates in which a penalized least squares fit is a shrinkage of each (Demmler and Reinsch 1975).

SINGULAR = 1e-10
"""Share of the Gram matrix in Gram matrix and penalty together below which a direction has no column."""
ROUNDING = 1e-14
ALONE = np.ones(1)
WIDEST = 60.0
"""Logarithm of the largest smoothing parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class Shrinkage:
    """`V` (k, k) maps the Gram matrix to the identity and the penalty to a diagonal.

    The fit of a score t is V h V't.

    `h` (k,) is between 0 and 1; it is 0 in directions without rows.
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

    H is the fit in both directions if another direction has the shrinkages `other`. If the penalty leaves
    more directions free than df, the smoothing parameter has its largest value.
    """
    once, twice = 2.0 * other.sum(), (other**2).sum()
    k = len(gram)
    size = float(np.trace(gram)) / k
    relative = size * k / max(float(np.trace(penalty)), 1e-300)
    # Of Gram matrix and penalty together: the Gram matrix alone may be singular, and a ridge would change the
    # fit.
    both = gram + relative * penalty + ROUNDING * size * np.eye(k)
    # For such small matrices, the checks of the general interface take longer than the decomposition.
    mu, V, info = lapack.dsygvd(penalty, both)
    if info:
        raise LinAlgError("a Gram matrix and its penalty have no common coordinates")
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

    These, the sum of 2h - h^2, decrease with it: bisection until no number is left between the ends.
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


# ----------------------------------------------------------------------------------------------------
# Paths of component-wise L2 boosting from sums of products (Buehlmann and Hothorn 2007).
#
# Z has the columns of all learners side by side, and C = Y b the curves in a basis along t. A step fits every
# learner to the residuals, selects the one that explains most, and moves by a share nu of its fit. It needs
# only S = Z'Z and the remainder of T = Z'C: a step costs one product of S with the selected fit. The same
# sums over other rows, `S_test` and `T_test`, give the loss there after every step.


@njit(cache=True)
def boost_shrunk(
    S: Floats, T: Floats, H: Floats, starts: Ints, nu: float, rss: float, S_test: Floats, T_test: Floats,
    rss_test: float, selected: Ints, risk: Floats, risk_test: Floats, coef: Floats,
) -> None:  # fmt: skip
    """Follow a path in coordinates in which every fit is a shrinkage; writes into its arguments.

    S (K, K), T (K, k2), shrinkages H (K, k2) in [0, 1]; learner p has the rows starts[p] to starts[p + 1].
    `selected`, `risk` and `risk_test` are (steps,), `coef` (K, k2); `S_test` without rows for none.
    """
    k2 = T.shape[1]
    P = len(starts) - 1
    test = S_test.shape[0] > 0
    for m in range(len(selected)):
        best, p = -1.0, 0
        for q in range(P):
            gain = 0.0
            for i in range(starts[q], starts[q + 1]):
                for j in range(k2):
                    gain += T[i, j] * T[i, j] * H[i, j] * (2.0 - H[i, j])
            if gain > best:
                best, p = gain, q
        lo, hi = starts[p], starts[p + 1]
        B = np.empty((hi - lo, k2))
        along, size = 0.0, 0.0
        for i in range(hi - lo):
            for j in range(k2):
                B[i, j] = T[lo + i, j] * H[lo + i, j]
                along += T[lo + i, j] * B[i, j]
                size += B[i, j] * B[i, j]
                coef[lo + i, j] += nu * B[i, j]
        if test:
            rss_test -= nu * _band_product(T_test, lo, B)
            _subtract_step(T_test, S_test, lo, hi, nu, B)
            rss_test -= nu * _band_product(T_test, lo, B)
        _subtract_step(T, S, lo, hi, nu, B)
        rss += -2.0 * nu * along + nu * nu * size
        selected[m], risk[m], risk_test[m] = p, rss, rss_test


@njit(cache=True)
def boost_full(
    S: Floats, T: Floats, G: Floats, U: Floats, at: Ints, h: Floats, starts: Ints, nu: float, rss: float,
    S_test: Floats, T_test: Floats, rss_test: float, selected: Ints, risk: Floats, risk_test: Floats,
    coef: Floats,
) -> None:  # fmt: skip
    """Follow a path of learners whose penalty mixes both directions: a rotation of k1 k2 columns for each.

    S (K, K), T (K, k2), G (k2, k2) the Gram matrix along t. The rotations (k1 k2, k1 k2) of the learners are
    concatenated in U, from at[p] on, their shrinkages in `h`. A fit in vec form has t slow. The rest is as in
    :func:`boost_shrunk`.
    """
    k2 = T.shape[1]
    P = len(starts) - 1
    test = S_test.shape[0] > 0
    turned = np.empty(len(h))
    for m in range(len(selected)):
        best, p, first, taken = -1.0, 0, 0, 0
        for q in range(P):
            k1 = starts[q + 1] - starts[q]
            k = k1 * k2
            vec = np.empty(k)
            for j in range(k2):
                for i in range(k1):
                    vec[j * k1 + i] = T[starts[q] + i, j]
            turned[first : first + k] = U[at[q] : at[q] + k * k].reshape(k, k) @ vec
            gain = 0.0
            for i in range(first, first + k):
                gain += turned[i] * turned[i] * h[i] * (2.0 - h[i])
            if gain > best:
                best, p, taken = gain, q, first
            first += k
        lo, hi = starts[p], starts[p + 1]
        k1 = hi - lo
        k = k1 * k2
        t, s = turned[taken : taken + k], h[taken : taken + k]
        vec = (t * s) @ U[at[p] : at[p] + k * k].reshape(k, k)
        B = np.empty((k1, k2))
        for j in range(k2):
            for i in range(k1):
                B[i, j] = vec[j * k1 + i]
                coef[lo + i, j] += nu * B[i, j]
        BG = B @ G
        if test:
            rss_test -= nu * _band_product(T_test, lo, B)
            _subtract_step(T_test, S_test, lo, hi, nu, BG)
            rss_test -= nu * _band_product(T_test, lo, B)
        _subtract_step(T, S, lo, hi, nu, BG)
        for i in range(k):
            rss += nu * t[i] * t[i] * s[i] * (nu * s[i] - 2.0)
        selected[m], risk[m], risk_test[m] = p, rss, rss_test


@njit(cache=True)
def _band_product(T: Floats, lo: int, B: Floats) -> float:
    """Sum of T times B over B's rows of T, which begin at lo.

    A loss decreases by nu times that before a step and after it.
    """
    total = 0.0
    for i in range(B.shape[0]):
        for j in range(B.shape[1]):
            total += T[lo + i, j] * B[i, j]
    return total


@njit(cache=True)
def _subtract_step(T: Floats, S: Floats, lo: int, hi: int, nu: float, B: Floats) -> None:
    """Subtract what a step explains from T: T -= nu S[:, lo:hi] B."""
    K, k2 = T.shape
    for i in range(K):
        for a in range(hi - lo):
            s = nu * S[i, lo + a]
            for j in range(k2):
                T[i, j] -= s * B[a, j]


@njit(cache=True)
def boost_blocks(
    A: Floats, t: Floats, U: Floats, at: Ints, h: Floats, starts: Ints, nu: float, rss: float,
    A_test: Floats, t_test: Floats, rss_test: float, selected: Ints, risk: Floats, risk_test: Floats,
    coef: Floats,
) -> None:  # fmt: skip
    """Follow a path of learners whose sums have no two directions: rows were observed at different points.

    A (D, D) are products of all columns over rows and points, t (D,) those with the residuals, learner p the
    columns starts[p] to starts[p + 1]; its rotation is in U from at[p] on, its shrinkages in `h` from
    starts[p] on. `coef` is (D,). The rest is as in :func:`boost_shrunk`.
    """
    P = len(starts) - 1
    test = A_test.shape[0] > 0
    turned = np.empty(len(t))
    for m in range(len(selected)):
        best, p = -1.0, 0
        for q in range(P):
            lo, hi = starts[q], starts[q + 1]
            k = hi - lo
            turned[lo:hi] = U[at[q] : at[q] + k * k].reshape(k, k) @ t[lo:hi]
            gain = 0.0
            for i in range(lo, hi):
                gain += turned[i] * turned[i] * h[i] * (2.0 - h[i])
            if gain > best:
                best, p = gain, q
        lo, hi = starts[p], starts[p + 1]
        k = hi - lo
        fit = turned[lo:hi] * h[lo:hi]
        b = fit @ U[at[p] : at[p] + k * k].reshape(k, k)
        for i in range(k):
            coef[lo + i] += nu * b[i]
            rss += nu * fit[i] * (nu * fit[i] - 2.0 * turned[lo + i])
        if test:
            rss_test -= nu * float(t_test[lo:hi] @ b)
            t_test -= nu * (A_test[lo:hi].T @ b)
            rss_test -= nu * float(t_test[lo:hi] @ b)
        t -= nu * (A[lo:hi].T @ b)
        selected[m], risk[m], risk_test[m] = p, rss, rss_test
