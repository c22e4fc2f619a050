"""Quadratics with a group penalty, minimised exactly: one root of one dimension serves loadings and means."""

from __future__ import annotations

import numpy as np
from numba import njit

from fedstat.kernels.glm.loops import fixed
from fedstat.typing import Floats

MOST_STEPS, SETTLED = 100, 1e-14


def group_prox(D: Floats, z: Floats, lam: Floats) -> Floats:
    """Return argmin over l of l'diag(D_p)l/2 - z_p'l + lam_p |l| for every row p, (P, Q).

    Curvatures D (P, Q) are positive, z (P, Q), lam (P,) not negative.
    """
    out = np.zeros(z.shape)
    _prox(fixed(D), fixed(z), fixed(lam), out)
    return out


def shrink_rows(S: Floats, s: Floats, lam: Floats) -> Floats:
    """Return argmin over l of l'S_p l/2 - s_p'l + lam_p |l| for every row p, (P, Q).

    S (P, Q, Q), or (1, Q, Q) for all rows, is positive definite; s (P, Q), lam (P,).
    """
    d, V = np.linalg.eigh(S)
    # Turned into the basis of eigenvectors the penalty stays what it is.
    turned = np.matmul(s[:, None, :], V)[:, 0]
    d = np.maximum(d, 1e-12 * d[:, -1:])
    turned_l = group_prox(np.broadcast_to(d, s.shape), turned, lam)
    return np.asarray(np.matmul(turned_l[:, None, :], V.transpose(0, 2, 1))[:, 0])


def shrink_means(N: Floats, m: Floats, lam: float) -> Floats:
    """Return argmin over U (K, Q) of sum_k N_k |u_k - m_k|^2 / 2 + lam |U|: N (K,), m (K, Q)."""
    K, Q = m.shape
    D = np.repeat(np.maximum(N, 1e-12), Q)[None]
    z = (N[:, None] * m).reshape(1, -1)
    return group_prox(D, z, np.array([lam])).reshape(K, Q)


@njit(cache=True, nogil=True)
def _prox(D: Floats, z: Floats, lam: Floats, out: Floats) -> None:
    """Newton's steps on 1 / |z / (D rho + lam)| = 1 in rho = |l|.

    The left side is concave in rho, so that steps from the left never pass the root; without a penalty it is
    linear, and the first one is there.
    """
    P, Q = z.shape
    for p in range(P):
        size = np.sqrt(np.sum(z[p] * z[p]))
        if size <= lam[p]:
            continue
        rho = (size - lam[p]) / np.max(D[p])
        for _ in range(MOST_STEPS):
            s = slope = 0.0
            for q in range(Q):
                u = D[p, q] * rho + lam[p]
                t = z[p, q] / u
                s += t * t
                slope += t * t * D[p, q] / u
            s = np.sqrt(s)
            step = (1.0 - 1.0 / s) * s * s * s / slope
            rho += step
            if step <= SETTLED * rho:
                break
        for q in range(Q):
            out[p, q] = z[p, q] * rho / (D[p, q] * rho + lam[p])
