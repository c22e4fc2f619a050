"""Quadratic functions with a group penalty, minimized exactly by a one-dimensional root search."""

from __future__ import annotations

import numpy as np
from numba import njit

from fedstat.kernels import INNER, as_kernel_array
from fedstat.typing import Bools, Floats

MAX_STEPS, STEP_TOLERANCE, MAX_SWEEPS = 100, 1e-14, 30
RIDGE = 1e-8
"""Ridge of an information, relative to its trace, so that a level without weight causes no division by
zero."""


def _owned(a: Floats) -> Floats:
    """Copy an array: the loops below call each other with their own arrays, which are writable."""
    return np.array(a, dtype=np.float64, order="C")


def group_prox(D: Floats, z: Floats, lam: Floats) -> Floats:
    """Return argmin over l of l'diag(D_p)l/2 - z_p'l + lam_p |l| for every row p, (P, Q).

    Curvatures D (P, Q) are positive, z (P, Q), lam (P,) not negative.
    """
    out = np.zeros(z.shape)
    _prox(_owned(D), _owned(z), _owned(lam), out)
    return out


def shrink_rows(S: Floats, s: Floats, lam: Floats) -> Floats:
    """Return argmin over l of l'S_p l/2 - s_p'l + lam_p |l| for every row p, (P, Q).

    S (P, Q, Q), or (1, Q, Q) for all rows, is positive definite; s (P, Q), lam (P,).
    """
    out = np.zeros(s.shape)
    _shrink(_owned(S), _owned(s), _owned(lam), out)
    return out


def proximal_newton(score: Floats, info: Floats, old: Floats, lam: Floats, support: Bools) -> Floats:
    """Return the step (P, d) that minimizes a quadratic model with a penalty on its last coefficients.

    Slopes (P, d) and information (P, d, d) are those of a log-likelihood; `old` (P, e) are the coefficients
    with the penalty lam_p |l_p|, the last of d. The others are eliminated. Without `support` (P,) new
    penalized ones are zero.
    """
    out = np.empty(score.shape)
    _newton(
        as_kernel_array(score),
        as_kernel_array(info),
        as_kernel_array(old),
        _owned(lam),
        as_kernel_array(support, np.bool_),
        out,
    )
    return out


def shrink_means(N: Floats, m: Floats, lam: float) -> Floats:
    """Return argmin over U (K, Q) of sum_k N_k |u_k - m_k|^2 / 2 + lam |U|: N (K,), m (K, Q)."""
    K, Q = m.shape
    D = np.repeat(np.maximum(N, 1e-12), Q)[None]
    z = (N[:, None] * m).reshape(1, -1)
    return group_prox(D, z, np.array([lam])).reshape(K, Q)


@njit(cache=True, nogil=True)
def _prox(D: Floats, z: Floats, lam: Floats, out: Floats) -> None:
    """Newton steps on 1 / |z / (D rho + lam)| = 1 in rho = |l|.

    The left side is concave in rho, so steps from the left never pass the root; without a penalty it is
    linear, and the first step reaches the root.
    """
    P, Q = z.shape
    for p in range(P):
        size, most = 0.0, D[p, 0]
        for q in range(Q):
            size += z[p, q] * z[p, q]
            most = max(most, D[p, q])
        size = np.sqrt(size)
        if size <= lam[p]:
            continue
        rho = (size - lam[p]) / most
        for _ in range(MAX_STEPS):
            s = slope = 0.0
            for q in range(Q):
                u = D[p, q] * rho + lam[p]
                t = z[p, q] / u
                s += t * t
                slope += t * t * D[p, q] / u
            s = np.sqrt(s)
            step = (1.0 - 1.0 / s) * s * s * s / slope
            rho += step
            if step <= STEP_TOLERANCE * rho:
                break
        for q in range(Q):
            out[p, q] = z[p, q] * rho / (D[p, q] * rho + lam[p])


@njit(cache=True, nogil=True, **INNER)
def _turn(A: Floats, V: Floats) -> None:
    """Diagonalize a symmetric A (Q, Q) in place by Jacobi's rotations; V gets the eigenvectors."""
    Q = len(A)
    for a in range(Q):
        for b in range(Q):
            V[a, b] = 1.0 if a == b else 0.0
    for _ in range(MAX_SWEEPS):
        off = size = 0.0
        for a in range(Q):
            size += A[a, a] * A[a, a]
            for b in range(a):
                off += A[a, b] * A[a, b]
        if off <= 1e-32 * size:
            return
        for a in range(Q - 1):
            for b in range(a + 1, Q):
                if A[a, b] != 0.0:
                    _rotate(A, V, a, b)


@njit(cache=True, nogil=True, **INNER)
def _rotate(A: Floats, V: Floats, a: int, b: int) -> None:
    """Make one element of A zero by a rotation of two coordinates (Golub and Van Loan, 8.5)."""
    tau = (A[b, b] - A[a, a]) / (2.0 * A[a, b])
    t = (1.0 if tau >= 0.0 else -1.0) / (abs(tau) + np.sqrt(1.0 + tau * tau))
    c = 1.0 / np.sqrt(1.0 + t * t)
    s = t * c
    for j in range(len(A)):
        A[j, a], A[j, b] = c * A[j, a] - s * A[j, b], s * A[j, a] + c * A[j, b]
        V[j, a], V[j, b] = c * V[j, a] - s * V[j, b], s * V[j, a] + c * V[j, b]
    for j in range(len(A)):
        A[a, j], A[b, j] = c * A[a, j] - s * A[b, j], s * A[a, j] + c * A[b, j]


@njit(cache=True, nogil=True)
def _shrink(S: Floats, s: Floats, lam: Floats, out: Floats) -> None:
    """Minimize in the basis of eigenvectors, in which the penalty is unchanged."""
    P, Q = s.shape
    V, A = np.empty((Q, Q)), np.empty((Q, Q))
    D, z, new = np.empty((1, Q)), np.empty((1, Q)), np.empty((1, Q))
    for p in range(P):
        if p < len(S):
            for q in range(Q):
                for t in range(Q):
                    A[q, t] = S[p, q, t]
            _turn(A, V)
            most = 0.0
            for q in range(Q):
                most = max(most, A[q, q])
            for q in range(Q):
                D[0, q] = max(A[q, q], 1e-12 * most)
        for q in range(Q):
            z[0, q] = new[0, q] = 0.0
            for t in range(Q):
                z[0, q] += V[t, q] * s[p, t]
        _prox(D, z, lam[p : p + 1], new)
        for q in range(Q):
            for t in range(Q):
                out[p, q] += V[q, t] * new[0, t]


@njit(cache=True, nogil=True)
def _newton(score: Floats, info: Floats, old: Floats, lam: Floats, support: Bools, out: Floats) -> None:
    P, d = score.shape
    e = old.shape[1]
    f = d - e
    A, x, S = np.empty((d, d)), np.empty(d), np.empty((1, e, e))
    s, new = np.empty((1, e)), np.empty((1, e))
    for p in range(P):
        ridge = 1.0
        for j in range(d):
            ridge += info[p, j, j]
        for j in range(d):
            x[j] = score[p, j]
            for i in range(d):
                A[j, i] = info[p, j, i]
            A[j, j] += RIDGE * ridge
        # Gauss' elimination of the first f: below them is Schur's complement.
        for j in range(f):
            for i in range(j + 1, d):
                by = A[i, j] / A[j, j]
                for c in range(j, d):
                    A[i, c] -= by * A[j, c]
                x[i] -= by * x[j]
        for a in range(e):
            s[0, a], new[0, a] = x[f + a], 0.0
            for b in range(e):
                S[0, a, b] = A[f + a, f + b]
                s[0, a] += S[0, a, b] * old[p, b]
        if support[p]:
            _shrink(S, s, lam[p : p + 1], new)
        for a in range(e):
            out[p, f + a] = new[0, a] - old[p, a]
        for j in range(f - 1, -1, -1):
            left = x[j]
            for c in range(j + 1, d):
                left -= A[j, c] * out[p, c]
            out[p, j] = left / A[j, j]
