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

from fedstat.kernels import INNER
from fedstat.kernels.row_products import invert
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


# Plain loops over scalars: a slice, a product of matrices or an assignment of arrays takes longer to compile
# than ten loops.


@njit(cache=True, nogil=True)
def jet_product(X: Floats, Y: Floats, rule: Ints, out: Floats) -> None:
    """Write the product of two jets of matrices, (J, a, b) and (J, b, c), to `out` (J, a, c)."""
    for o in range(out.shape[0]):
        for i in range(out.shape[1]):
            for j in range(out.shape[2]):
                out[o, i, j] = 0.0
    for r in range(len(rule)):
        o, x, y = rule[r, 0], rule[r, 1], rule[r, 2]
        for i in range(X.shape[1]):
            for s in range(X.shape[2]):
                factor = X[x, i, s]
                for j in range(Y.shape[2]):
                    out[o, i, j] += factor * Y[y, s, j]


@njit(cache=True, nogil=True, **INNER)
def _traced_product(A: Floats, B: Floats) -> float:
    """Return the trace of A B."""
    total = 0.0
    for i in range(A.shape[0]):
        for j in range(A.shape[0]):
            total += A[i, j] * B[j, i]
    return total


def jet_inverse(F: Floats, rule: Ints, out: Floats, logdet: Floats) -> None:
    """Write the inverse of a jet of matrices (J, a, a) to `out`, and add log det F to the jet `logdet` (J,).

    From F F^-1 = I: all products that contribute to one derivative add up to zero. In the same way
    (log det F)_k = tr(F^-1 F_k).
    """
    _jet_inverse(F, rule, out, logdet, np.empty(F.shape[1:]))


@njit(cache=True, nogil=True)
def _jet_inverse(F: Floats, rule: Ints, out: Floats, logdet: Floats, total: Floats) -> None:
    """See :func:`jet_inverse`; `total` (a, a) is room."""
    a = F.shape[1]
    for i in range(a):
        for j in range(a):
            total[i, j] = F[0, i, j]
    logdet[0] += invert(total, out[0])
    K = int((np.sqrt(8.0 * len(F) + 1.0) - 3.0) / 2.0 + 0.5)
    for r in range(1, len(rule)):
        o, x, y = rule[r, 0], rule[r, 1], rule[r, 2]
        for i in range(a):
            for j in range(a):
                total[i, j] = 0.0 if o != rule[r - 1, 0] else total[i, j]
                for s in range(a):
                    total[i, j] += F[x, i, s] * out[y, s, j] if x else 0.0
        if r + 1 == len(rule) or rule[r + 1, 0] != o:
            for i in range(a):
                for j in range(a):
                    out[o, i, j] = 0.0
                    for s in range(a):
                        out[o, i, j] -= out[0, i, s] * total[s, j]
    for k in range(K):
        logdet[1 + k] += _traced_product(out[0], F[1 + k])
        for m in range(k, K):
            at = 1 + K + k * K - k * (k - 1) // 2 + (m - k)
            logdet[at] += _traced_product(out[0], F[at]) + _traced_product(out[1 + m], F[1 + k])


def cluster_products(W: Floats, weight: Floats, code: Ints, clusters: int) -> Floats:
    """Sum the products of columns (n, w) by cluster: (clusters, 1, w, w)."""
    out = np.zeros((clusters, 1, W.shape[1], W.shape[1]))
    _cluster_products(W, weight, code, out)
    _fill_upper(out)
    return out


@njit(cache=True, nogil=True)
def _cluster_products(W: Floats, weight: Floats, code: Ints, out: Floats) -> None:
    for i in range(len(W)):
        for a in range(W.shape[1]):
            factor, row = weight[i] * W[i, a], out[code[i], 0, a]
            for b in range(a + 1):
                row[b] += factor * W[i, b]


@njit(cache=True, nogil=True)
def _fill_upper(out: Floats) -> None:
    for c in range(len(out)):
        for a in range(out.shape[2]):
            for b in range(a):
                out[c, 0, b, a] = out[c, 0, a, b]


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

    J, q, w = len(T), T.shape[1], S.shape[2]
    out, logdet, P = np.zeros((groups, J, w - q, w - q)), np.zeros(J), np.zeros((len(S), J, q, q))
    A, F, inverse = np.zeros((3, J, q, q))
    B, PB = np.zeros((2, J, q, w - q))
    _integrate(
        S, T, wide, outer, rule(before, own), rule(both, both), rule(own, both), rule(both, before),
        rule(before, both), A, F, inverse, B, PB, np.zeros((J, w - q, q)), np.zeros((J, w - q, w - q)), out,
        logdet, P, np.zeros((q, q)),
    )  # fmt: skip
    return out, logdet, P


@njit(cache=True, nogil=True, **INNER)
def _split_products(S: Floats, wide: Ints, A: Floats, B: Floats, Bt: Floats, out: Floats) -> None:
    """Write the blocks of the products of one cluster to A, B and its transpose; add the last to `out`."""
    q, w = A.shape[1], S.shape[1]
    for j in range(len(wide)):
        at = wide[j]
        for a in range(w):
            for b in range(w):
                if a < q and b < q:
                    A[at, a, b] = S[j, a, b]
                elif a < q:
                    B[at, a, b - q] = S[j, a, b]
                elif b < q:
                    Bt[at, a - q, b] = S[j, a, b]
                else:
                    out[at, a - q, b - q] += S[j, a, b]


@njit(cache=True, nogil=True)
def _integrate(
    S: Floats,
    T: Floats,
    wide: Ints,
    outer: Ints,
    rule_AT: Ints,
    rule_inverse: Ints,
    rule_TF: Ints,
    rule_PB: Ints,
    rule_BPB: Ints,
    A: Floats,
    F: Floats,
    inverse: Floats,
    B: Floats,
    PB: Floats,
    Bt: Floats,
    BPB: Floats,
    out: Floats,
    logdet: Floats,
    P: Floats,
    room: Floats,
) -> None:
    for c in range(len(S)):
        _split_products(S[c], wide, A, B, Bt, out[outer[c]])
        jet_product(A, T, rule_AT, F)
        for i in range(F.shape[1]):
            F[0, i, i] += 1.0
        _jet_inverse(F, rule_inverse, inverse, logdet, room)
        jet_product(T, inverse, rule_TF, P[c])
        jet_product(P[c], B, rule_PB, PB)
        jet_product(Bt, PB, rule_BPB, BPB)
        for j in range(BPB.shape[0]):
            for a in range(BPB.shape[1]):
                for b in range(BPB.shape[2]):
                    out[outer[c], j, a, b] -= BPB[j, a, b]


# ----------------------------------------------------------------------------------------------------
# Responses that are not normal: adaptive quadrature around the mode of each cluster's effects.

LOGIT, LOG, NEGATIVE_BINOMIAL, GAMMA = 0, 1, 2, 3
"""Binomial (logit link), and Poisson, negative binomial and gamma (log link); the last two have a shape."""
MOST_STEPS, SMALL_STEP = 100, 1e-11


@njit(cache=True, nogil=True, **INNER)
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


@njit(cache=True, nogil=True, **INNER)
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


@njit(cache=True, nogil=True, **INNER)
def _fill_rows(
    kind: int, shape: float, y: Floats, w: Floats, eta: Floats, A: Floats, u: Floats, begin: int, end: int,
    rows: Floats,
) -> float:  # fmt: skip
    """Write density, mean and derivatives of rows at effects u to `rows` (n, 4); return their log-density."""
    total = 0.0
    for i in range(begin, end):
        at = eta[i]
        for s in range(len(u)):
            at += A[i, s] * u[s]
        rows[i, 0], rows[i, 1], rows[i, 2], rows[i, 3] = _row(kind, shape, y[i], at)
        total += w[i] * rows[i, 0]
    return total


@njit(cache=True, nogil=True, **INNER)
def _mode(
    kind: int, shape: float, y: Floats, w: Floats, eta: Floats, A: Floats, u: Floats, begin: int, end: int,
    H: Floats, inverse: Floats, rows: Floats, trial: Floats, move: Floats,
) -> tuple[float, float]:  # fmt: skip
    """Find the mode u (q,) of f(u) = sum w l(y, eta + A u) - u'u / 2 over the rows of a cluster, in place.

    It writes the inverse of the negative Hessian there to `inverse` (q, q), and density, mean and derivatives
    to `rows` (n, 4). Returns f(u) and log det of the negative Hessian. H, `trial` and `move` are room.
    """
    q, value, logdet = len(u), -np.inf, 0.0
    for s in range(q):
        move[s] = 0.0
    for step in range(MOST_STEPS):
        # f is concave: some halved step increases it, or changes it by less than rounding.
        for _ in range(40):
            square = 0.0
            for s in range(q):
                trial[s] = u[s] + move[s]
                square += trial[s] * trial[s]
            found = -0.5 * square + _fill_rows(kind, shape, y, w, eta, A, trial, begin, end, rows)
            if found >= value - 1e-12 * (1.0 + abs(value)):
                break
            for s in range(q):
                move[s] *= 0.5
        value, largest, last = found, 0.0, 0.0
        for a in range(q):
            u[a] = trial[a]
            largest, last = max(largest, abs(u[a])), max(last, abs(move[a]))
            for b in range(q):
                H[a, b] = 1.0 if a == b else 0.0
        for i in range(begin, end):
            for a in range(q):
                for b in range(q):
                    H[a, b] += w[i] * rows[i, 2] * A[i, a] * A[i, b]
        logdet = invert(H, inverse)
        if step and last < SMALL_STEP * (1.0 + largest):
            break
        for s in range(q):
            trial[s] = -u[s]
            for i in range(begin, end):
                trial[s] += w[i] * (y[i] - rows[i, 1]) * A[i, s]
        last = 0.0
        for a in range(q):
            move[a] = 0.0
            for b in range(q):
                move[a] += inverse[a, b] * trial[b]
            last = max(last, abs(move[a]))
        if last < 1e-14:
            break
    return value, logdet


def marginal_score(
    kind: int,
    shape: float,
    y: Floats,
    w: Floats,
    eta: Floats,
    A: Floats,
    begin: Ints,
    nodes: Floats,
    weights: Floats,
    modes: Floats,
    means: Floats,
) -> tuple[float, Floats]:
    """Return the marginal log-likelihood without constants, and its derivatives by row.

    Adaptive Gauss-Hermite quadrature with several nodes for a single effect, otherwise Laplace's
    approximation (Pinheiro and Chao 2006, JCGS 15). The derivatives are those of the approximation: mode and
    curvature move with the parameters.

    Parameters
    ----------
    kind : int
        :data:`LOGIT`, :data:`LOG`, :data:`NEGATIVE_BINOMIAL` or :data:`GAMMA`.
    shape : float
        One over alpha, or over the dispersion, for the last two.
    y, w, eta : (n,) arrays
        Response, weight (binomial trials), and linear predictor without effects; rows in the order of their
        clusters.
    A : (n, q) array
        Columns of independent effects of unit variance.
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
    slopes : (n, q + 2) array
        Derivatives by the linear predictor and by each column of `A` of a row, and its part of that by the
        shape.
    """
    (n, q), slopes = A.shape, np.zeros((len(A), A.shape[1] + 2))
    rows, products, mu = np.zeros((n, 4)), np.zeros((n, q + 1)), np.zeros((len(nodes), n))
    H, inverse = np.zeros((2, q, q))
    fixed = kind, shape, y, w, eta, A, begin, modes, means, slopes, rows, H, inverse
    if len(nodes) == 1:
        llf = _laplace(*fixed, products, *np.zeros((3, q)))
    else:
        room = *np.zeros((2, len(nodes))), *np.zeros((2, q))
        llf = _several_nodes(*fixed, nodes, weights, mu, *room)
    return llf, slopes


@njit(cache=True, nogil=True)
def _laplace(
    kind: int, shape: float, y: Floats, w: Floats, eta: Floats, A: Floats, begin: Ints, modes: Floats,
    means: Floats, slopes: Floats, rows: Floats, H: Floats, inverse: Floats, products: Floats, v: Floats,
    trial: Floats, move: Floats,
) -> float:  # fmt: skip
    """Write the rows' derivatives of Laplace's approximation to `slopes`; return its value."""
    q, llf = A.shape[1], 0.0
    for c in range(len(begin) - 1):
        u, first, end = modes[c], begin[c], begin[c + 1]
        value, logdet = _mode(kind, shape, y, w, eta, A, u, first, end, H, inverse, rows, trial, move)
        llf += value - 0.5 * logdet
        for s in range(q):
            v[s] = 0.0
        for i in range(first, end):
            # Row i of A times the inverse, and its product with row i.
            products[i, q] = 0.0
            for s in range(q):
                products[i, s] = 0.0
                for t in range(q):
                    products[i, s] += A[i, t] * inverse[t, s]
                products[i, q] += products[i, s] * A[i, s]
            for s in range(q):
                v[s] += w[i] * rows[i, 3] * products[i, q] * products[i, s]
        for i in range(first, end):
            along, at = 0.0, eta[i]
            for s in range(q):
                along += A[i, s] * v[s]
                at += A[i, s] * u[s]
            r, g = w[i] * (y[i] - rows[i, 1]), w[i] * rows[i, 2]
            e = r - 0.5 * w[i] * rows[i, 3] * products[i, q] + 0.5 * g * along
            means[i] = rows[i, 1]
            slopes[i, 0] = e
            for t in range(q):
                slopes[i, 1 + t] = u[t] * e - g * products[i, t] - 0.5 * r * v[t]
            if kind >= NEGATIVE_BINOMIAL:
                by, slope, curve = _row_by_shape(kind, shape, y[i], at)
                slopes[i, 1 + q] = w[i] * (by - 0.5 * curve * products[i, q] - 0.5 * slope * along)
    return llf


@njit(cache=True, nogil=True)
def _several_nodes(
    kind: int, shape: float, y: Floats, w: Floats, eta: Floats, A: Floats, begin: Ints, modes: Floats,
    means: Floats, slopes: Floats, rows: Floats, H: Floats, inverse: Floats, nodes: Floats, weights: Floats,
    mu: Floats, share: Floats, at: Floats, trial: Floats, move: Floats,
) -> float:  # fmt: skip
    """Write the rows' derivatives of quadrature for one effect to `slopes`; return its value."""
    K, llf = len(nodes), 0.0
    for c in range(len(begin) - 1):
        u, first, end = modes[c], begin[c], begin[c + 1]
        _mode(kind, shape, y, w, eta, A, u, first, end, H, inverse, rows, trial, move)
        spread, top, total = np.sqrt(inverse[0, 0]), -np.inf, 0.0
        for k in range(K):
            at[k] = u[0] + spread * nodes[k]
            share[k] = np.log(weights[k]) + 0.5 * nodes[k] ** 2 - 0.5 * at[k] ** 2
            for i in range(first, end):
                log, mu[k, i], _, _ = _row(kind, shape, y[i], eta[i] + A[i, 0] * at[k])
                share[k] += w[i] * log
            top = max(top, share[k])
        for k in range(K):
            share[k] = np.exp(share[k] - top)
            total += share[k]
        llf += np.log(spread) + top + np.log(total) - 0.5 * np.log(2.0 * np.pi)
        D = E = 0.0  # mean slope of f at the nodes, and its mean product with them
        for k in range(K):
            share[k] /= total
            slope = -at[k]
            for i in range(first, end):
                slope += w[i] * (y[i] - mu[k, i]) * A[i, 0]
            D += share[k] * slope
            E += share[k] * slope * nodes[k]
        third = 0.0
        for i in range(first, end):
            third += w[i] * rows[i, 3] * A[i, 0] ** 3
        # d log s = -(s^2 / 2) d kappa; the mode moves kappa by its third derivative.
        by_kappa = -0.5 * spread**2 * (1.0 + spread * E)
        by_mode = (D + by_kappa * third) * inverse[0, 0]
        for i in range(first, end):
            r, mean = 0.0, 0.0
            for k in range(K):
                mean += share[k] * mu[k, i]
                r += share[k] * (y[i] - mu[k, i]) * at[k]
            g = w[i] * rows[i, 2] * A[i, 0]
            fixed = by_kappa * w[i] * rows[i, 3] * A[i, 0] ** 2 - by_mode * g
            means[i] = mean
            slopes[i, 0] = w[i] * (y[i] - mean) + fixed
            slopes[i, 1] = w[i] * r + fixed * u[0] + 2.0 * by_kappa * g + by_mode * w[i] * (y[i] - rows[i, 1])
            if kind >= NEGATIVE_BINOMIAL:
                _, slope, curve = _row_by_shape(kind, shape, y[i], eta[i] + A[i, 0] * u[0])
                slopes[i, 2] = w[i] * (by_kappa * curve * A[i, 0] ** 2 + by_mode * slope * A[i, 0])
                for k in range(K):
                    by = _row_by_shape(kind, shape, y[i], eta[i] + A[i, 0] * at[k])
                    slopes[i, 2] += w[i] * share[k] * by[0]
    return llf
