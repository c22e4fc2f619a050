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
HALVINGS = 46
FLAT = 1e-9
"""Range of a product of scores below which a correlation is not told by it."""


def expand_steps(thresholds: Floats, scores: Floats, order: int = ORDER) -> Floats:
    """Return c_m = E[s(Z) h_m(Z)], m = 1, ..., order, of scores (k,) between thresholds (k + 1,), exactly.

    The outer thresholds may be infinite; c_0, the mean, is not returned.
    """
    t = np.where(np.isfinite(thresholds), thresholds, 0.0)
    density = np.exp(-0.5 * t * t) / math.sqrt(2.0 * math.pi) * np.isfinite(thresholds)
    out = np.empty(order)
    # h_m(t) phi(t) is an integral of h_{m+1} phi; in normalised polynomials by a stable recurrence.
    now, before = np.ones_like(t), np.zeros_like(t)
    for m in range(1, order + 1):
        at = now * density
        out[m - 1] = scores @ (at[:-1] - at[1:]) / math.sqrt(m)
        now, before = (t * now - math.sqrt(m - 1) * before) / math.sqrt(m), now
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
def _series(a: Floats, b: Floats, r: float) -> float:
    total = 0.0
    for m in range(a.shape[0] - 1, -1, -1):
        total = (total + a[m] * b[m]) * r
    return total


@njit(cache=True, nogil=True)
def _products(a: Floats, b: Floats, r: Floats, out: Floats) -> None:
    for q in range(r.shape[0]):
        out[q] = _series(a[q], b[q], r[q])


@njit(cache=True, nogil=True)
def _invert(target: Floats, a: Floats, b: Floats, out: Floats) -> None:
    for q in range(target.shape[0]):
        low, high = -LARGEST, LARGEST
        if _series(a[q], b[q], high) - _series(a[q], b[q], low) < FLAT:
            out[q] = 0.0
            continue
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            if _series(a[q], b[q], middle) < target[q]:
                low = middle
            else:
                high = middle
        out[q] = 0.5 * (low + high)
