"""A penalty of one coefficient or group: its value, its slope, and its proximal operator."""

from __future__ import annotations

import numpy as np

from fedstat.kernels.penalized.penalties import concave_slope, concave_value, threshold


def value(penalty, lam, t):
    """P_lambda(t) of one coefficient of size t >= 0."""
    ridge = (1.0 - penalty.alpha) * lam * t * t / 2.0
    return float(concave_value(penalty.kind, penalty.shape, penalty.alpha * lam, t)) + ridge


def slope(penalty, lam, t):
    """The derivative of P_lambda at t >= 0; at zero that from the right."""
    ridge = (1.0 - penalty.alpha) * lam * t
    return float(concave_slope(penalty.kind, penalty.shape, penalty.alpha * lam, t)) + ridge


def prox(penalty, lam, z, *, step=1.0):
    """Minimise ``||b - z||^2 / 2 + step P_lambda(||b||)`` for one group: (k,) -> (k,)."""
    u = float(np.linalg.norm(z))
    v = 1.0 + step * (1.0 - penalty.alpha) * lam
    t = threshold(penalty.kind, penalty.shape, penalty.alpha * lam, step, v, u)
    return np.asarray(z * (t / u) if u > 0.0 else np.zeros_like(z), dtype=np.float64)
