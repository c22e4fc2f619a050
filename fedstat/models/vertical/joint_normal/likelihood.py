"""The observed-data log-likelihood of a joint normal model of (x, y), its score and information.

With K_g the inverse of the covariance Omega at the observed columns of pattern g, zero elsewhere, and d_g
and D_g the sums of z - m and (z - m)(z - m)' there,

    l = -sum_g [ n_g log|2 pi Omega_g| + tr K_g D_g ] / 2
    dl = sum_g K_g d_g . dm + tr(G dOmega),    G = sum_g (K_g D_g K_g - n_g K_g) / 2
    -d2l[A, B] = sum_g tr(A K_g B W_g),    W_g = K_g D_g K_g - n_g K_g / 2
    -d2l[u, A] = sum_g u'K_g A K_g d_g,    -d2l[u, u] = sum_g n_g u'K_g u

for changes u of the mean and symmetric A, B of Omega. The parameters are (a, s2, beta, mu) and the
concentration Q of x, whose entries may be fixed at zero: Omega = T Q^-1 T' + s2 e e', T = (I; beta'). In
the basis B = (T Q^-1, e), a change of Q_ab is -B (e_a e_b' + e_b e_a') B', one of beta_c the same with (c,
y) and the opposite sign, and one of s2 B e e' B'. All changes are elementary matrices, and the whole
information is one contraction of B'K_g B with B'W_g B. The curvature of Omega in these parameters is one
more such term, with (Q^-1 and zero at y) instead of K and -2 B'G B instead of W.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedstat.models.vertical.moments import PatternMoments
from fedstat.typing import Array, Bools, Floats, Ints


def joint_normal_covariance(Sigma: Array, beta: Array, s2: complex) -> Array:
    """Covariance of (x, y) for y = a + (x - mu)'beta + e with variance s2; complex for a complex step."""
    w = Sigma @ beta
    return np.block([[Sigma, w[:, None]], [w[None, :], np.array([[s2 + beta @ w]])]])


@dataclass(frozen=True, slots=True, eq=False)
class JointNormalPoint:
    """Joint normal model of standardized (x, y): mean of x (P,) and y, beta (P,), s2, concentration Q."""

    mu: Floats
    a: float
    beta: Floats
    s2: float
    Q: Floats

    @property
    def mean(self) -> Floats:
        """Mean of (x, y)."""
        return np.append(self.mu, self.a)

    @property
    def b(self) -> float:
        """Intercept at the origin of the standardized columns."""
        return float(self.a - self.mu @ self.beta)

    @property
    def log_s2(self) -> float:
        """Logarithm of the residual variance."""
        return float(np.log(self.s2))

    @property
    def variance_unit(self) -> float:
        """Derivative of s2, the parameter of the residual variance, by its logarithm."""
        return self.s2

    def with_variance(self, log_s2: float) -> JointNormalPoint:
        """Replace the residual variance."""
        return replace(self, s2=float(np.exp(log_s2)))

    def with_concentration(self) -> JointNormalPoint:
        """Return this model, whose parameters include the concentration of x."""
        return self

    def restricted(self, effects: Bools) -> JointNormalPoint:
        """Set the other coefficients to zero; their columns become part of the residuals."""
        beta = np.where(effects, self.beta, 0.0)
        gone = self.beta - beta
        return replace(self, beta=beta, s2=self.s2 + float(gone @ self.covariates @ gone))

    def basis(self) -> Floats:
        """Return (T Sigma, e), (P + 1, P + 1); a LinAlgError if Q is not positive definite."""
        Sigma = self.covariates
        B = np.zeros((len(Sigma) + 1, len(Sigma) + 1))
        B[:-1, :-1], B[-1, :-1], B[-1, -1] = Sigma, self.beta @ Sigma, 1.0
        return B

    @property
    def covariates(self) -> Floats:
        """Covariance of x."""
        half = np.linalg.inv(np.linalg.cholesky(self.Q))
        return np.asarray(half.T @ half)

    @property
    def cov(self) -> Floats:
        """Covariance of (x, y)."""
        return joint_normal_covariance(self.covariates, self.beta, self.s2)


@dataclass(frozen=True, slots=True, eq=False)
class FreeParameters:
    """Which parameters are free: entries of Q, (P, P) and symmetric, and of beta, (P,)."""

    edges: Bools
    effects: Bools

    @property
    def entries(self) -> tuple[Ints, Ints]:
        """Return rows and columns of the free entries of Q, on and above its diagonal."""
        rows, columns = np.nonzero(np.triu(self.edges))
        return rows, columns

    @property
    def pairs(self) -> tuple[Ints, Ints, Floats]:
        """Return elementary matrices of changes of (Q, beta, s2): rows, columns and signs, (m,)."""
        P = len(self.effects)
        (i, j), c = self.entries, np.flatnonzero(self.effects)
        rows, columns = np.concatenate([i, c, [P]]), np.concatenate([j, np.full(len(c) + 1, P)])
        return rows, columns, np.append(np.full(len(i), -1.0), np.ones(len(c) + 1))

    @property
    def order(self) -> Ints:
        """Return the indices of (a, s2, beta, mu, Q) in (mu, a, Q, beta, s2)."""
        P, free, moved = len(self.effects), len(self.entries[0]), int(self.effects.sum())
        Q, beta = P + 1 + np.arange(free), P + 1 + free + np.arange(moved)
        return np.concatenate([[P, P + 1 + free + moved], beta, np.arange(P), Q])

    def step(self, point: JointNormalPoint, by: Floats) -> JointNormalPoint:
        """Change a model by a vector in the order of its derivatives."""
        P, moved = len(self.effects), 2 + int(self.effects.sum())
        beta, Q = point.beta.copy(), point.Q.copy()
        beta[self.effects] += by[2:moved]
        i, j = self.entries
        Q[i, j] += by[moved + P :]
        Q[j, i] = Q[i, j]
        mu = point.mu + by[moved : moved + P]
        return JointNormalPoint(mu, point.a + float(by[0]), beta, point.s2 + float(by[1]), Q)


@dataclass(frozen=True, slots=True, eq=False)
class JointNormalDerivatives:
    """Log-likelihood, score (d,) and information (d, d), observed or expected, of the free parameters.

    In the order a, s2, beta, mu (P,), free entries of Q on and above its diagonal, row by row.
    """

    log_likelihood: float
    score: Floats
    information: Floats


def observed(moments: PatternMoments) -> Bools:
    """Return which columns and, last, the response are observed in each pattern, (G, P + 1)."""
    return np.column_stack([moments.seen, np.ones(len(moments.n), dtype=bool)])


def inverse_by_pattern(cov: Floats, seen: Bools) -> tuple[Floats, Floats]:
    """Inverse covariance of the observed columns of each pattern, zero elsewhere, and log determinant.

    Raises LinAlgError if the covariance is not positive definite.
    """
    both = seen[:, :, None] & seen[:, None, :]
    # One at missing columns changes neither the inverse of the rest nor the determinant.
    padded = np.where(both, cov, np.eye(len(cov)))
    L = np.linalg.cholesky(padded)
    half = np.linalg.inv(L)
    K = np.matmul(half.transpose(0, 2, 1), half) * both
    return K, 2.0 * np.log(np.diagonal(L, axis1=1, axis2=2)).sum(axis=1)


def centered_sums(moments: PatternMoments, mean: Array) -> tuple[Array, Array]:
    """Compute the sums d_g (G, P + 1) and D_g (G, P + 1, P + 1) of observed columns, minus the mean."""
    return center_grams(observed(moments), moments.n, moments.grams, mean)


def center_grams(seen: Bools, n: Floats, grams: Array, mean: Array) -> tuple[Array, Array]:
    """Compute sums (G, d) and products (G, d, d) of observed columns minus the mean, by pattern."""
    at = seen * mean
    first = grams[:, 0, 1:]
    d = first - n[:, None] * at
    D = grams[:, 1:, 1:] - first[:, :, None] * at[:, None, :] - at[:, :, None] * d[:, None, :]
    return d, D


def em_step(moments: PatternMoments, mean: Array, cov: Array) -> tuple[Array, Array]:
    """Return expected mean and covariance of complete data at a model; see :func:`expected_moments`."""
    return expected_moments(observed(moments), moments.n, moments.grams, mean, cov)


def expected_moments(seen: Bools, n: Floats, grams: Array, mean: Array, cov: Array) -> tuple[Array, Array]:
    """Return expected mean and covariance of complete data at a model, real or complex.

    `grams` (G, 1 + d, 1 + d) are sums of (1, x)(1, x)' over the n (G,) entities of each pattern, zero where x
    is not `seen` (G, d). With A = sum_g (K_g D_g K_g - n_g K_g) and u = sum_g K_g d_g, the mean is
    m + Omega u / n and the covariance Omega + (Omega A Omega) / n - (Omega u)(Omega u)' / n^2.
    """
    if np.iscomplexobj(cov):
        both = seen[:, :, None] & seen[:, None, :]
        K = np.linalg.inv(np.where(both, cov, np.eye(len(cov)))) * both
    else:
        K, _ = inverse_by_pattern(cov, seen)
    d, D = center_grams(seen, n, grams, mean)
    A = (np.matmul(np.matmul(K, D), K) - n[:, None, None] * K).sum(axis=0)
    move = cov @ np.einsum("gij,gj->i", K, d) / n.sum()
    return mean + move, cov + cov @ A @ cov / n.sum() - np.outer(move, move)


def m_step(cov: Array, edges: Bools) -> tuple[Array, Array, Any]:
    """Return (Q, beta, s2) of complete data with a covariance, if `edges` form separate sets of columns."""
    beta = np.linalg.solve(cov[:-1, :-1], cov[:-1, -1])
    return np.linalg.inv(cov[:-1, :-1] * edges) * edges, beta, cov[-1, -1] - beta @ cov[:-1, -1]


def form_separate_sets(edges: Bools) -> bool:
    """Whether columns that may be correlated form separate sets: the M-step then has a closed form."""
    return bool((edges == (edges.astype(float) @ edges > 0.0)).all())


def joint_normal_likelihood(moments: PatternMoments, mean: Floats, cov: Floats) -> float:
    """Observed-data log-likelihood of the standardized columns."""
    K, log_det = inverse_by_pattern(cov, observed(moments))
    _, D = centered_sums(moments, mean)
    constant = observed(moments).sum(axis=1) * np.log(2.0 * np.pi) + log_det
    return float(-0.5 * (moments.n @ constant + np.einsum("gij,gji->", K, D, optimize=True)))


def differentiate_joint_normal(
    moments: PatternMoments,
    point: JointNormalPoint,
    moves: FreeParameters,
    *,
    expected: bool = False,
    information: bool = True,
) -> JointNormalDerivatives:
    """Compute log-likelihood, score and information of the free parameters at a point.

    With `expected`, the information is that of data from the model that are missing completely at random:
    without terms of expectation zero, and positive semi-definite. Without `information` it is empty: it takes
    most of the time.
    """
    P, seen, n = len(point.beta), observed(moments), moments.n[:, None, None]
    cov, B = point.cov, point.basis()
    K, log_det = inverse_by_pattern(cov, seen)
    d, D = centered_sums(moments, point.mean)
    KD = np.matmul(K, D)
    M = np.matmul(KD, K)
    constant = seen.sum(axis=1) * np.log(2.0 * np.pi) + log_det
    log_likelihood = -0.5 * (moments.n @ constant + np.trace(KD, axis1=1, axis2=2).sum())
    G = 0.5 * (B.T @ (M - n * K).sum(axis=0) @ B)
    i, j, signs = moves.pairs
    score = np.concatenate([(K @ d[:, :, None])[:, :, 0].sum(axis=0), signs * halved_diagonal(2.0 * G, i, j)])
    if not information:
        return JointNormalDerivatives(float(log_likelihood), score[moves.order], np.empty((0, 0)))
    K_basis = B.T @ K @ B
    W = 0.5 * n * K if expected else M - 0.5 * n * K
    K_all, W_all = K_basis, B.T @ W @ B
    coupling = np.zeros((P + 1, len(i)))
    if not expected:
        curved = np.zeros_like(B)
        curved[:P, :P] = B[:P, :P]
        K_all, W_all = np.concatenate([K_all, curved[None]]), np.concatenate([W_all, -2.0 * G[None]])
        coupling = signs * mean_coupling(K @ B, np.einsum("ji,gjk,gk->gi", B, K, d, optimize=True), i, j)
    inner = np.outer(signs, signs) * contract(K_all, W_all, i, j)
    matrix = np.block([[(n * K).sum(axis=0), coupling], [coupling.T, inner]])
    order = moves.order
    return JointNormalDerivatives(float(log_likelihood), score[order], matrix[np.ix_(order, order)])


def halved_diagonal(values: Floats, i: Ints, j: Ints) -> Floats:
    """Evaluate a symmetric matrix at elementary changes; a diagonal one changes one entry and not two."""
    return np.where(i == j, 0.5, 1.0) * values[i, j]


def mean_coupling(KB: Floats, k: Floats, i: Ints, j: Ints) -> Floats:
    """Sum of u'K A K d over patterns for changes of the mean and elementary changes: (P + 1, m)."""
    total = np.tensordot(KB, k, axes=(0, 0))  # of column a of K B with entry b of B'K d
    return np.asarray(np.where(i == j, 0.5, 1.0) * (total[:, i, j] + total[:, j, i]))


def contract(K: Floats, W: Floats, i: Ints, j: Ints) -> Floats:
    """Sum of tr(A K B W) over patterns for elementary A, B at (i, j): (m, m)."""
    q = K.shape[1]
    weight = np.where(i == j, 0.5, 1.0)
    flat_K, flat_W = K.reshape(len(K), -1), W.reshape(len(W), -1)
    out = np.empty((len(i), len(i)))
    # One row of elementary matrices at a time: q^4 numbers at once would be gigabytes for a hundred columns.
    for a in np.unique(i):
        here = np.flatnonzero(i == a)
        first = (flat_K.T @ W[:, :, a]).reshape(q, q, q)  # K_bc W_da over b, c, d
        second = (flat_W.T @ K[:, :, a]).reshape(q, q, q)  # W_bc K_da
        both = first + second
        table = both[j[here]][:, i, j] + both[j[here]][:, j, i]
        out[here] = table
    return np.asarray(out * np.outer(weight, weight))
