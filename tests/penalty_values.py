"""A penalty of one coefficient or group: its value, its slope, and its proximal operator."""

from __future__ import annotations

import numpy as np


def value(penalty, lam, t):
    """P_lambda(t) of one coefficient of size t >= 0."""
    ridge = (1.0 - penalty.selecting) * lam * t * t / 2.0
    return float(penalty.form.value(penalty.shape, penalty.selecting * lam, t)) + ridge


def slope(penalty, lam, t):
    """The derivative of P_lambda at t >= 0; at zero that from the right."""
    ridge = (1.0 - penalty.selecting) * lam * t
    return float(penalty.form.slope(penalty.shape, penalty.selecting * lam, t)) + ridge


def prox(penalty, lam, z, *, step=1.0):
    """Minimize ``||b - z||^2 / 2 + step P_lambda(||b||)`` for one group: (k,) -> (k,)."""
    u = float(np.linalg.norm(z))
    v = 1.0 + step * (1.0 - penalty.selecting) * lam
    t = penalty.form.threshold(penalty.shape, penalty.selecting * lam, step, v, u)
    return np.asarray(z * (t / u) if u > 0.0 else np.zeros_like(z), dtype=np.float64)
