"""Marginal likelihoods of nested random effects: integrals cluster by cluster, and their derivatives.

A **jet** is a matrix with its first and second derivatives in K parameters: an array whose first axis has the
value, K first derivatives, and K (K + 1) / 2 second ones, (0, 0), (0, 1), ..., (1, 1), ... The rules of
products and inverses then apply to whole likelihoods, which need one matrix of the size of the effects for
each cluster (Woodbury's identity).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import numpy as np
from numba import njit

from fedstat.typing import Floats, Ints


def pair_index(k: int, m: int, K: int) -> int:
    """Return the place of a second derivative in a jet of K parameters."""
    k, m = min(k, m), max(k, m)
    return 1 + K + k * K - k * (k - 1) // 2 + (m - k)


def jet_length(K: int) -> int:
    """Return the number of values and derivatives in a jet of K parameters."""
    return 1 + K + K * (K + 1) // 2


@lru_cache(maxsize=256)
def product_rule(K: int, left: frozenset[int], right: frozenset[int]) -> Ints:
    """Return the products in the product of two jets, (m, 3): the place of the result and of both factors.

    `left` and `right` are the parameters on which the factors depend.
    """
    rule = [(0, 0, 0)]
    for k in range(K):
        rule += [(1 + k, 1 + k, 0)] if k in left else []
        rule += [(1 + k, 0, 1 + k)] if k in right else []
    for k in range(K):
        for m in range(k, K):
            at = pair_index(k, m, K)
            rule += [(at, at, 0)] if {k, m} <= left else []
            rule += [(at, 0, at)] if {k, m} <= right else []
            rule += [(at, 1 + k, 1 + m)] if k in left and m in right else []
            rule += [(at, 1 + m, 1 + k)] if m in left and k in right else []
    return np.array(rule, dtype=np.int64)


@njit(cache=True, nogil=True)
def jet_product(X: Floats, Y: Floats, rule: Ints, out: Floats) -> None:
    """Write the product of two jets of matrices, (J, a, b) and (J, b, c), to `out` (J, a, c)."""
    out[:] = 0.0
    for r in range(len(rule)):
        o, x, y = rule[r]
        for i in range(X.shape[1]):
            for s in range(X.shape[2]):
                factor = X[x, i, s]
                for j in range(Y.shape[2]):
                    out[o, i, j] += factor * Y[y, s, j]


@njit(cache=True, nogil=True)
def jet_inverse(F: Floats, rule: Ints, out: Floats, logdet: Floats) -> None:
    """Write the inverse of a jet of matrices (J, a, a) to `out`, and add log det F to the jet `logdet` (J,).

    From F F^-1 = I: all products that contribute to one derivative add up to zero. In the same way
    (log det F)_k = tr(F^-1 F_k).
    """
    a = F.shape[1]
    out[0] = np.linalg.inv(F[0])
    logdet[0] += np.log(np.linalg.det(F[0]))
    total = np.zeros((a, a))
    K = int((np.sqrt(8.0 * len(F) + 1.0) - 3.0) / 2.0 + 0.5)
    for r in range(1, len(rule)):
        o, x, y = rule[r]
        if x:
            for i in range(a):
                for s in range(a):
                    for j in range(a):
                        total[i, j] += F[x, i, s] * out[y, s, j]
        if r + 1 == len(rule) or rule[r + 1, 0] != o:
            out[o] = 0.0
            for i in range(a):
                for s in range(a):
                    for j in range(a):
                        out[o, i, j] -= out[0, i, s] * total[s, j]
            total[:] = 0.0
    for k in range(K):
        logdet[1 + k] += np.sum(out[0] * F[1 + k].T)
        for m in range(k, K):
            at = 1 + K + k * K - k * (k - 1) // 2 + (m - k)
            logdet[at] += np.sum(out[0] * F[at].T) + np.sum(out[1 + m] * F[1 + k].T)


@njit(cache=True, nogil=True)
def cluster_products(W: Floats, weight: Floats, code: Ints, clusters: int) -> Floats:
    """Sum the products of columns (n, w) by cluster: (clusters, 1, w, w)."""
    out = np.zeros((clusters, 1, W.shape[1], W.shape[1]))
    for i in range(len(W)):
        for a in range(W.shape[1]):
            factor = weight[i] * W[i, a]
            for b in range(W.shape[1]):
                out[code[i], 0, a, b] += factor * W[i, b]
    return out


def integrate(S: Floats, T: Floats, inner: int, outer: Ints, groups: int) -> tuple[Floats, Floats, Floats]:
    """Integrate the effects of one level out of the products of columns, cluster by cluster.

    With products S = W'V^-1 W of the columns W = (Z, R), the variance V + Z T Z' has the products
    ``R'V^-1 R - R'V^-1 Z P Z'V^-1 R``, P = T (I + Z'V^-1 Z T)^-1, and adds log det(I + Z'V^-1 Z T) to the
    log-determinant (Harville 1977, JASA 72, section 5).

    Parameters
    ----------
    S : (C, J', q + r, q + r) array
        Jets in the first `inner` parameters; those of the effects come first.
    T : (J, q, q) array
        Jet of the covariance of the effects in all K parameters; it depends on those after `inner`.
    inner : int
    outer : (C,) array of int
        Number of the group, of the next level, in which each cluster lies.
    groups : int

    Returns
    -------
    products : (groups, J, r, r) array
    logdet : (J,) array
    P : (C, J, q, q) array
    """
    K = int((np.sqrt(8.0 * len(T) + 1.0) - 3.0) / 2.0 + 0.5)
    before, own = frozenset(range(inner)), frozenset(range(inner, K))
    both = before | own
    wide = np.array(
        [0, *range(1, 1 + inner), *(pair_index(k, m, K) for k in range(inner) for m in range(k, inner))]
    )

    def rule(left: Collection[int], right: Collection[int]) -> Ints:
        return product_rule(K, frozenset(left), frozenset(right))

    return _integrate(
        S, T, wide, outer, groups, rule(before, own), rule(both, both), rule(own, both), rule(both, before),
        rule(before, both),
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _integrate(
    S: Floats,
    T: Floats,
    wide: Ints,
    outer: Ints,
    groups: int,
    rule_AT: Ints,
    rule_inverse: Ints,
    rule_TF: Ints,
    rule_PB: Ints,
    rule_BPB: Ints,
) -> tuple[Floats, Floats, Floats]:
    J, q, w = len(T), T.shape[1], S.shape[2]
    out, logdet, P = np.zeros((groups, J, w - q, w - q)), np.zeros(J), np.zeros((len(S), J, q, q))
    A, B, Bt = np.zeros((J, q, q)), np.zeros((J, q, w - q)), np.zeros((J, w - q, q))
    F, inverse = np.zeros((J, q, q)), np.zeros((J, q, q))
    PB, BPB = np.zeros((J, q, w - q)), np.zeros((J, w - q, w - q))
    for c in range(len(S)):
        for j in range(len(wide)):
            A[wide[j]] = S[c, j, :q, :q]
            B[wide[j]] = S[c, j, :q, q:]
            Bt[wide[j]] = S[c, j, q:, :q]
            out[outer[c], wide[j]] += S[c, j, q:, q:]
        jet_product(A, T, rule_AT, F)
        for i in range(q):
            F[0, i, i] += 1.0
        jet_inverse(F, rule_inverse, inverse, logdet)
        jet_product(T, inverse, rule_TF, P[c])
        jet_product(P[c], B, rule_PB, PB)
        jet_product(Bt, PB, rule_BPB, BPB)
        out[outer[c]] -= BPB
    return out, logdet, P


# ----------------------------------------------------------------------------------------------------
# Responses that are not normal: adaptive quadrature around the mode of each cluster's effects.

LOGIT, LOG, NEGATIVE_BINOMIAL, GAMMA = 0, 1, 2, 3
"""Binomial (logit link), and Poisson, negative binomial and gamma (log link); the last two have a shape."""
MOST_STEPS, SMALL_STEP = 100, 1e-11


@njit(cache=True, nogil=True, inline="always")
def _row(kind: int, shape: float, y: float, eta: float) -> tuple[float, float, float, float]:
    """Log-density l without constants; response less dl, which is the mean of a canonical link; -d2l; -d3l.

    Derivatives are in eta.
    """
    if kind == LOG:
        mu = np.exp(min(eta, 500.0))
        return y * eta - mu, mu, mu, mu
    if kind == NEGATIVE_BINOMIAL:
        ratio = np.exp(min(eta, 500.0)) / shape
        part = ratio / (1.0 + ratio)
        m = (y + shape) * part
        g = m * (1.0 - part)
        return y * eta - (y + shape) * np.log1p(ratio), m, g, g * (1.0 - 2.0 * part)
    if kind == GAMMA:
        g = shape * y * np.exp(-max(eta, -500.0))
        return -shape * eta - g, y + shape - g, g, -g
    small = np.exp(-abs(eta))
    mu = 1.0 / (1.0 + small) if eta >= 0.0 else small / (1.0 + small)
    v = small / (1.0 + small) ** 2
    return y * eta - max(eta, 0.0) - np.log1p(small), mu, v, v * (1.0 - 2.0 * mu)


@njit(cache=True, nogil=True, inline="always")
def _row_by_shape(kind: int, shape: float, y: float, eta: float) -> tuple[float, float, float]:
    """Return the derivatives of l, dl and -d2l in the shape; see :func:`_row`."""
    if kind == NEGATIVE_BINOMIAL:
        ratio = np.exp(min(eta, 500.0)) / shape
        part = ratio / (1.0 + ratio)
        v = part * (1.0 - part)
        return (
            part * (y + shape) / shape - np.log1p(ratio),
            v * (y / shape - ratio),
            v * (y / shape * (2.0 * part - 1.0) + 2.0 * part),
        )
    ratio = y * np.exp(-max(eta, -500.0))
    return -eta - ratio, ratio - 1.0, ratio


@njit(cache=True, nogil=True)
def _mode(
    kind: int, shape: float, y: Floats, w: Floats, eta: Floats, A: Floats, u: Floats, H: Floats, rows: Floats
) -> float:
    """Find the mode u (q,) of f(u) = sum w l(y, eta + A u) - u'u / 2, in place.

    It writes the negative Hessian there to H (q, q), and density, mean and derivatives to `rows` (m, 4).
    Returns f(u).
    """
    m, q = A.shape
    move, value = np.zeros(q), -np.inf
    for step in range(MOST_STEPS):
        for _ in range(40):
            trial = u + move
            found = -0.5 * trial @ trial
            for i in range(m):
                rows[i] = _row(kind, shape, y[i], eta[i] + A[i] @ trial)
                found += w[i] * rows[i, 0]
            if found >= value - 1e-12 * (1.0 + abs(value)):
                break
            move *= 0.5
        u[:] = trial
        value = float(found)
        score = -u.copy()
        H[:] = np.eye(q)
        for i in range(m):
            score += w[i] * (y[i] - rows[i, 1]) * A[i]
            for a in range(q):
                for b in range(q):
                    H[a, b] += w[i] * rows[i, 2] * A[i, a] * A[i, b]
        if step and np.abs(move).max() < SMALL_STEP * (1.0 + np.abs(u).max()):
            break
        move[:] = np.linalg.solve(H, score)
        if np.abs(move).max() < 1e-14:
            break
    return value


@njit(cache=True, nogil=True)
def marginal_score(
    kind: int,
    shape: float,
    X: Floats,
    Z: Floats,
    y: Floats,
    w: Floats,
    eta: Floats,
    L: Floats,
    begin: Ints,
    nodes: Floats,
    weights: Floats,
    modes: Floats,
    means: Floats,
) -> tuple[float, Floats, Floats, float]:
    """Return the marginal log-likelihood without constants, and its derivatives in all parameters.

    Adaptive Gauss-Hermite quadrature with several nodes for a single effect, otherwise Laplace's
    approximation (Pinheiro and Chao 2006, JCGS 15). The derivatives are those of the approximation: mode and
    curvature move with the parameters.

    Parameters
    ----------
    kind : int
        :data:`LOGIT`, :data:`LOG`, :data:`NEGATIVE_BINOMIAL` or :data:`GAMMA`.
    shape : float
        One over alpha, or over the dispersion, for the last two.
    X, Z : (n, p), (n, q) arrays
        Columns of coefficients and effects; rows in the order of their clusters.
    y, w, eta : (n,) arrays
        Response, weight (binomial trials), and linear predictor without effects.
    L : (q, q) array
        Factor of the covariance of the effects.
    begin : (C + 1,) array of int
        First row of each cluster, and n.
    nodes, weights : (k,) arrays
        Of quadrature with weight exp(-x^2 / 2).
    modes : (C, q) array
        Where modes are first looked for; replaced by them.
    means : (n,) array
        Replaced by the means of the rows, averaged over the effects; with a shape, by responses less the
        derivatives of the log-densities.

    Returns
    -------
    llf : float
    score : (p,) array
    score_factor : (q, q) array
    score_shape : float
    """
    p, q, C = X.shape[1], Z.shape[1], len(begin) - 1
    llf, score, score_factor, score_shape = 0.0, np.zeros(p), np.zeros((q, q)), 0.0
    shaped = kind in (NEGATIVE_BINOMIAL, GAMMA)
    A = Z @ L
    H = np.zeros((q, q))
    for c in range(C):
        part = slice(begin[c], begin[c + 1])
        a, z, x, yc, wc, ec = A[part], Z[part], X[part], y[part], w[part], eta[part]
        m, u = len(yc), modes[c]
        rows = np.zeros((m, 4))
        value = _mode(kind, shape, yc, wc, ec, a, u, H, rows)
        inverse = np.linalg.inv(H)
        ai = a @ inverse
        if len(nodes) == 1:
            llf += value - 0.5 * np.log(np.linalg.det(H))
            v = np.zeros(q)
            for i in range(m):
                v += wc[i] * rows[i, 3] * (ai[i] @ a[i]) * ai[i]
            for i in range(m):
                r, g = wc[i] * (yc[i] - rows[i, 1]), wc[i] * rows[i, 2]
                e = r - 0.5 * wc[i] * rows[i, 3] * (ai[i] @ a[i]) + 0.5 * g * (a[i] @ v)
                means[begin[c] + i] = rows[i, 1]
                for j in range(p):
                    score[j] += e * x[i, j]
                for s in range(q):
                    for t in range(q):
                        score_factor[s, t] += z[i, s] * (u[t] * e - g * ai[i, t] - 0.5 * r * v[t])
                if shaped:
                    by, slope, curve = _row_by_shape(kind, shape, yc[i], ec[i] + a[i] @ u)
                    score_shape += wc[i] * (by - 0.5 * curve * (ai[i] @ a[i]) - 0.5 * slope * (a[i] @ v))
            continue
        # Several nodes of one effect.
        spread, K = np.sqrt(inverse[0, 0]), len(nodes)
        logs, mu = np.zeros(K), np.zeros((K, m))
        for k in range(K):
            at = u[0] + spread * nodes[k]
            logs[k] = np.log(weights[k]) + 0.5 * nodes[k] ** 2 - 0.5 * at**2
            for i in range(m):
                log, mu[k, i], _, _ = _row(kind, shape, yc[i], ec[i] + a[i, 0] * at)
                logs[k] += wc[i] * log
        top = logs.max()
        share = np.exp(logs - top)
        total = share.sum()
        share /= total
        llf += np.log(spread) + top + np.log(total) - 0.5 * np.log(2.0 * np.pi)
        D = E = 0.0  # mean slope of f at the nodes, and its mean product with them
        for k in range(K):
            at = u[0] + spread * nodes[k]
            slope = -at
            for i in range(m):
                slope += wc[i] * (yc[i] - mu[k, i]) * a[i, 0]
            D += share[k] * slope
            E += share[k] * slope * nodes[k]
        third = outer = 0.0
        for i in range(m):
            third += wc[i] * rows[i, 3] * a[i, 0] ** 3
        # d log s = -(s^2 / 2) d kappa; the mode moves kappa by its third derivative.
        by_kappa = -0.5 * spread**2 * (1.0 + spread * E)
        by_mode = D + by_kappa * third
        for i in range(m):
            r, mean = 0.0, 0.0
            for k in range(K):
                mean += share[k] * mu[k, i]
                r += share[k] * (yc[i] - mu[k, i]) * (u[0] + spread * nodes[k])
            g = wc[i] * rows[i, 2] * a[i, 0]
            fixed = by_kappa * wc[i] * rows[i, 3] * a[i, 0] ** 2 - by_mode * inverse[0, 0] * g
            e = wc[i] * (yc[i] - mean) + fixed
            means[begin[c] + i] = mean
            for j in range(p):
                score[j] += e * x[i, j]
            outer += z[i, 0] * (
                wc[i] * r
                + fixed * u[0]
                + 2.0 * by_kappa * g
                + by_mode * inverse[0, 0] * wc[i] * (yc[i] - rows[i, 1])
            )
        score_factor[0, 0] += outer
        if shaped:
            for i in range(m):
                _, slope, curve = _row_by_shape(kind, shape, yc[i], ec[i] + a[i, 0] * u[0])
                moved = by_kappa * curve * a[i, 0] ** 2 + by_mode * inverse[0, 0] * slope * a[i, 0]
                for k in range(K):
                    at = u[0] + spread * nodes[k]
                    moved += share[k] * _row_by_shape(kind, shape, yc[i], ec[i] + a[i, 0] * at)[0]
                score_shape += wc[i] * moved
    return llf, score, score_factor, score_shape
