"""Hermite expansions of step functions of a standard normal, and correlations behind their products.

A score s(Z) = sum_m c_m h_m(Z) in normalised Hermite polynomials h_m; for a standard bivariate normal with
correlation r, Mehler's formula gives ``E[s(Z) t(W)] = sum_m c_m d_m r^m``. The coefficients of a step
function have a closed form, so that one formula serves columns that are continuous, ordinal, binary or
inflated by zeros.

References
----------
Mehler, F. G. (1866). Ueber die Entwicklung einer Function von beliebig vielen Variablen nach Laplaceschen
Functionen hoeherer Ordnung. Journal fuer die reine und angewandte Mathematik 66, 161-176.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from fedstat.kernels.glm.loops import fixed
from fedstat.typing import Floats

ORDER = 200
"""Terms of a series: up to a correlation of .95 the rest is below 1e-7."""
LARGEST = 0.995
"""Largest correlation that is looked for."""
MOST_STEPS, SETTLED = 60, 1e-13
FLAT = 1e-9
"""Range of a product of scores below which a correlation is not told by it."""


def expand_steps(thresholds: Floats, scores: Floats, order: int = ORDER) -> Floats:
    """Return c_m = E[s(Z) h_m(Z)], m = 1, ..., order, of scores (k,) between thresholds (k + 1,), exactly.

    The outer thresholds may be infinite; c_0, the mean, is not returned.
    """
    finite = np.isfinite(thresholds)
    rises = np.diff(scores, prepend=0.0, append=0.0)
    told = finite & (rises != 0.0)
    t = thresholds[told]
    out = np.zeros(order)
    _expand(fixed(t), fixed(rises[told] * np.exp(-0.5 * t * t) / math.sqrt(2.0 * math.pi)), out)
    return out


def expected_products(a: Floats, b: Floats, r: Floats) -> Floats:
    """Return E[s(Z) t(W)] less the product of means: coefficients (q, M) each, correlations (q,) -> (q,)."""
    out = np.empty(len(r))
    _products(fixed(a), fixed(b), fixed(r), out)
    return out


def latent_correlations(target: Floats, a: Floats, b: Floats) -> Floats:
    """Return the correlations at which scores have these expected products: (q,) from (q,), (q, M), (q, M).

    Scores that ascend with Z have products that ascend with r. A product that no correlation up to
    :data:`LARGEST` reaches has the nearest; 0 where a score is constant.
    """
    out = np.empty(len(target))
    _invert(fixed(target), fixed(a), fixed(b), out)
    return out


@njit(cache=True, nogil=True)
def _expand(t: Floats, rises: Floats, out: Floats) -> None:
    """Add the coefficients of steps at t, (k,), that rise by `rises` times the density there."""
    # h_m(t) phi(t) is an integral of h_{m+1} phi; in normalised polynomials by a stable recurrence.
    roots = np.sqrt(np.arange(out.shape[0] + 1))
    for i in range(t.shape[0]):
        now, before = 1.0, 0.0
        for m in range(1, out.shape[0] + 1):
            out[m - 1] += rises[i] * now / roots[m]
            now, before = (t[i] * now - roots[m - 1] * before) / roots[m], now


@njit(cache=True, nogil=True)
def _series(c: Floats, r: float) -> tuple[float, float]:
    """Return sum_m c_m r^m and its derivative."""
    total = slope = 0.0
    for m in range(c.shape[0] - 1, -1, -1):
        total = total * r + c[m]
        slope = slope * r + (m + 1) * c[m]
    return total * r, slope


@njit(cache=True, nogil=True)
def _products(a: Floats, b: Floats, r: Floats, out: Floats) -> None:
    for q in range(r.shape[0]):
        out[q] = _series(a[q] * b[q], r[q])[0]


@njit(cache=True, nogil=True)
def _invert(target: Floats, a: Floats, b: Floats, out: Floats) -> None:
    """Newton's steps, halved where they leave the interval in which the correlation is."""
    for q in range(target.shape[0]):
        c = a[q] * b[q]
        low, high = -LARGEST, LARGEST
        least, most = _series(c, low)[0], _series(c, high)[0]
        if most - least < FLAT:
            out[q] = 0.0
        elif not least < target[q] < most:
            out[q] = low if target[q] <= least else high
        else:
            r = 0.0
            for _ in range(MOST_STEPS):
                value, slope = _series(c, r)
                if value < target[q]:
                    low = r
                else:
                    high = r
                new = r + (target[q] - value) / slope if slope > 0.0 else low
                if not low < new < high:
                    new = 0.5 * (low + high)
                moved, r = abs(new - r), new
                if moved < SETTLED:
                    break
            out[q] = r
