"""The joint normal model with blocks that are independent between sites: their covariances in closed form.

Sigma_k enters the likelihood of y only through t_k = beta_k'Sigma_k beta_k. Given beta_k, mu_k and t_k, the
likelihood of the block splits into that of c = x'beta_k ~ N(m_k, t_k), m_k = mu_k'beta_k, and a free
regression of x on c; its maximum over Sigma_k is in closed form. Columns are centered at the means of their
own sites. With S_k their covariance, q_k = beta_k'(S_k + mu_k mu_k')beta_k and t_k = exp(lambda_k) q_k,

    l(b, s2, beta, mu, lambda) = sum_g [ -n_g log(2 pi v_g)/2 - SS_g / (2 v_g) ]
        - sum_k n_k/2 [ log(1 + mu_k'S_k^-1 mu_k) + lambda_k + exp(-lambda_k) - 1 ]
    r_i = y_i - b - sum_{k seen} x_i'beta_k - sum_{k missing} m_k
    SS_g = sum of r_i^2,    v_g = s2 + sum_{k missing} t_k

minus the largest value that the blocks' own likelihood can take. It is smooth everywhere, including beta_k
= 0, and its inverse information is that of the full likelihood for all remaining parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedstat.models.vertical.joint_normal.likelihood import (
    JointNormalDerivatives,
    JointNormalPoint,
    joint_normal_covariance,
)
from fedstat.models.vertical.moments import StandardizedMoments
from fedstat.typing import Bools, Floats

LONGEST_LOG = 1.0
"""Largest change of the logarithm of a variance in one step."""


@dataclass(frozen=True, slots=True, eq=False)
class BlocksPoint:
    """A model of standardized (x, y) in the parameters b, log s2, beta (P,), mu (P,), lambda (K,).

    The moments determine the covariances of the blocks at these parameters. It has the properties of
    :class:`~fedstat.models.vertical.joint_normal.likelihood.JointNormalPoint`.
    """

    standard: StandardizedMoments
    b: float
    log_s2: float
    beta: Floats
    mu: Floats
    lam: Floats

    @classmethod
    def start(cls, standard: StandardizedMoments) -> BlocksPoint:
        """No effects, and every block at its own moments."""
        P, K = standard.member.shape
        return cls(standard, 0.0, 0.0, np.zeros(P), np.zeros(P), np.zeros(K))

    def moved(self, by: Floats, effects: Bools) -> BlocksPoint:
        """Move by a vector in the order of the parameters, with these coefficients."""
        (P, K), moved = self.standard.member.shape, 2 + int(effects.sum())
        beta = self.beta.copy()
        beta[effects] += by[2:moved]
        mu, lam = self.mu + by[moved : moved + P], self.lam + by[moved + P : moved + P + K]
        return BlocksPoint(self.standard, self.b + float(by[0]), self.log_s2 + float(by[1]), beta, mu, lam)

    @property
    def a(self) -> float:
        """Mean of y."""
        return float(self.b + (self.mu * self.beta @ self.standard.member).sum())

    @property
    def s2(self) -> float:
        """Residual variance."""
        return float(np.exp(self.log_s2))

    @property
    def variance_unit(self) -> float:
        """Derivative of the parameter of the residual variance, log s2, by log s2."""
        return 1.0

    @property
    def mean(self) -> Floats:
        """Mean of (x, y)."""
        return np.append(self.mu, self.a)

    @property
    def covariates(self) -> Floats:
        """Return the Sigma_1..Sigma_K that maximize the likelihood, as one block diagonal matrix (P, P)."""
        standard, at = self.standard, residuals(self)
        # t differs from q only along w = S beta; if beta_k = 0 there is no such direction.
        factor = np.divide(np.expm1(self.lam), at.q, out=np.zeros_like(at.q), where=at.q > 0.0)
        around = standard.S + standard.within * np.outer(self.mu, self.mu)
        return np.asarray(around + standard.within * np.outer(at.w * (standard.member @ factor), at.w))

    @property
    def Q(self) -> Floats:  # noqa: N802
        """Concentration of x."""
        return np.asarray(np.linalg.inv(self.covariates))

    @property
    def cov(self) -> Floats:
        """Covariance of (x, y)."""
        return joint_normal_covariance(self.covariates, self.beta, self.s2)

    def with_variance(self, log_s2: float) -> BlocksPoint:
        """Replace the residual variance."""
        return replace(self, log_s2=log_s2)

    def with_concentration(self) -> JointNormalPoint:
        """Return this model with the concentration of x as a parameter."""
        return JointNormalPoint(self.mu, self.a, self.beta, self.s2, self.Q)

    def restricted(self, effects: Bools) -> BlocksPoint:
        """Set the other coefficients to zero."""
        return replace(self, beta=np.where(effects, self.beta, 0.0))


def places(standard: StandardizedMoments) -> tuple[slice, slice, slice]:
    """Return the indices of beta, mu and lambda."""
    P, K = standard.member.shape
    return slice(2, 2 + P), slice(2 + P, 2 + 2 * P), slice(2 + 2 * P, 2 + 2 * P + K)


@dataclass(frozen=True, slots=True, eq=False)
class Residuals:
    """Values of the likelihood at a point: w = (S + mu mu')beta by site (P,); m, q and t (K,); v (G,).

    `sums` (G, P + 2) are those of (1, x, y) r by pattern, `squares` (G,) those of r^2.
    """

    w: Floats
    m: Floats
    q: Floats
    t: Floats
    v: Floats
    sums: Floats
    squares: Floats


def residuals(point: BlocksPoint) -> Residuals:
    """Compute the residuals' sums at a point."""
    standard, moments = point.standard, point.standard.moments
    m = (point.mu * point.beta) @ standard.member
    w = standard.S @ point.beta + point.mu * (standard.member @ m)
    q = (point.beta * w) @ standard.member
    t = np.exp(point.lam) * q
    v = np.exp(point.log_s2) + standard.missing @ t
    # r = weights'(1, x, y) for every entity of a pattern: one product with its Gram matrix is the sum of r
    # times the row, and another that of r^2. Missing columns are zero in the Gram matrix.
    weights = np.empty((len(v), standard.P + 2))
    weights[:, 0] = -point.b - standard.missing @ m
    weights[:, 1:-1] = -point.beta
    weights[:, -1] = 1.0
    sums = np.matmul(moments.grams, weights[:, :, None])[:, :, 0]
    return Residuals(w, m, q, t, v, sums, np.sum(weights * sums, axis=1))


def blocks_likelihood(point: BlocksPoint, at: Residuals | None = None) -> float:
    """Profile log-likelihood in the units of the data, minus the blocks' own maximum."""
    at = at or residuals(point)
    standard, moments = point.standard, point.standard.moments
    response = np.sum(moments.n * np.log(2.0 * np.pi * at.v) + at.squares / at.v)
    distance = (point.mu * (standard.precision @ point.mu)) @ standard.member
    blocks = standard.n_seen @ (np.log1p(distance) + point.lam + np.expm1(-point.lam))
    return float(-0.5 * (response + blocks) - moments.nobs * np.log(moments.scale[-1]))


def differentiate_blocks(
    point: BlocksPoint, effects: Bools, *, expected: bool = False
) -> JointNormalDerivatives:
    """Compute log-likelihood, score and information of the free parameters: all, except other `effects`.

    By the chain rule through z = (b, beta, m, s2, t), in which r and v are linear. The information is the
    negative Hessian; with `expected`, it omits terms whose expectation is zero under MCAR, and is positive
    definite.
    """
    at = residuals(point)
    score_z, information_z = by_linear_parameters(point.standard, at, expected=expected)
    J = jacobian(point, at)
    score, information = block_terms(point, expected=expected)
    score += score_z @ J
    chained = J.T @ information_z @ J
    information += chained if expected else chained - curvature(point, at, score_z)
    free = free_parameters(point.standard, effects)
    return JointNormalDerivatives(blocks_likelihood(point, at), score[free], information[np.ix_(free, free)])


def variance_information(point: BlocksPoint) -> float:
    """Return the expected information on log s2 alone, as in :func:`differentiate_blocks`."""
    v = residuals(point).v
    return float(0.5 * point.s2**2 * (point.standard.moments.n / v**2).sum())


def free_parameters(standard: StandardizedMoments, effects: Bools) -> Bools:
    """Return which parameters are free, (2 + 2 P + K,): all, except other `effects`."""
    return np.concatenate([[True, True], effects, np.ones(sum(standard.member.shape), dtype=bool)])


def by_linear_parameters(
    standard: StandardizedMoments, at: Residuals, *, expected: bool
) -> tuple[Floats, Floats]:
    """Score and information, observed or `expected`, of z = (b, beta, m, s2, t)."""
    moments, missing, v = standard.moments, standard.missing, at.v
    n, grams = moments.n, moments.grams
    P, K = standard.P, missing.shape[1]
    mean, var = slice(0, 1 + P + K), slice(1 + P + K, 2 + P + 2 * K)
    D = np.column_stack([at.sums[:, :-1], missing * at.sums[:, :1]])  # sums of r times the row of the design
    A = np.column_stack([np.ones(len(v)), missing])  # of v by (s2, t)
    score = np.concatenate([(1.0 / v) @ D, (0.5 * (at.squares / v - n) / v) @ A])
    information = np.zeros((len(score), len(score)))
    information[: 1 + P, : 1 + P] = np.tensordot(1.0 / v, grams[:, :-1, :-1], 1)
    by_missing = (missing / v[:, None]).T @ grams[:, 0, :-1]
    information[1 + P : 1 + P + K, : 1 + P] = by_missing
    information[: 1 + P, 1 + P : 1 + P + K] = by_missing.T
    information[1 + P : 1 + P + K, 1 + P : 1 + P + K] = (missing * (n / v)[:, None]).T @ missing
    if expected:
        information[var, var] = (A * (0.5 * n / v**2)[:, None]).T @ A
        return score, information
    information[var, var] = (A * (at.squares / v**3 - 0.5 * n / v**2)[:, None]).T @ A
    # Sums of r alone have expectation zero: the expected information has no such block.
    information[mean, var] = (D / v[:, None] ** 2).T @ A
    information[var, mean] = information[mean, var].T
    return score, information


def jacobian(point: BlocksPoint, at: Residuals) -> Floats:
    """Differentiate z = (b, beta, m, s2, t) by the parameters."""
    standard = point.standard
    P, K = standard.member.shape
    beta, mu, lam = places(standard)
    m, t = slice(1 + P, 1 + P + K), slice(2 + P + K, 2 + P + 2 * K)
    growth = np.exp(point.lam)
    J = np.zeros((2 + P + 2 * K, 2 + 2 * P + K))
    J[0, 0] = 1.0
    J[1 : 1 + P, beta] = np.eye(P)
    J[m, beta], J[m, mu] = (standard.member.T * point.mu), (standard.member.T * point.beta)
    J[1 + P + K, 1] = np.exp(point.log_s2)
    J[t, beta] = 2.0 * growth[:, None] * (standard.member.T * at.w)
    J[t, mu] = 2.0 * (growth * at.m)[:, None] * (standard.member.T * point.beta)
    J[t, lam] = np.diag(at.t)
    return J


def curvature(point: BlocksPoint, at: Residuals, score_z: Floats) -> Floats:
    """Sum of the scores of z times the second derivatives of z."""
    standard = point.standard
    P, K = standard.member.shape
    beta, mu, lam = places(standard)
    # m, s2 and t are not linear in the parameters: their scores are multiplied by their second derivatives.
    by_m, by_s2, by_t = score_z[1 + P : 1 + P + K], score_z[1 + P + K], score_z[2 + P + K :]
    member = standard.member
    weight = 2.0 * by_t * np.exp(point.lam)
    each = (member @ weight)[:, None] * standard.within
    out = np.zeros((2 + 2 * P + K, 2 + 2 * P + K))
    out[1, 1] = by_s2 * np.exp(point.log_s2)
    out[beta, beta] = each * (standard.S + np.outer(point.mu, point.mu))
    out[mu, mu] = each * np.outer(point.beta, point.beta)
    out[beta, mu] = each * np.outer(point.mu, point.beta) + np.diag(member @ (by_m + weight * at.m))
    out[beta, lam] = member * at.w[:, None] * weight
    out[mu, lam] = member * point.beta[:, None] * (weight * at.m)
    out[lam, lam] = np.diag(by_t * at.t)
    upper = np.triu(out, 1)
    return np.asarray(upper + upper.T + np.diag(np.diag(out)))


def block_terms(point: BlocksPoint, *, expected: bool) -> tuple[Floats, Floats]:
    """Score and information, observed or `expected`, of the blocks' own likelihood."""
    standard = point.standard
    _, mu, lam = places(standard)
    member, n_seen = standard.member, standard.n_seen
    # n_k/2 log(1 + mu'S^-1 mu) of each site; the expected information omits terms that may be negative.
    u = standard.precision @ point.mu
    spread = 1.0 + member @ ((point.mu * u) @ member)
    size = 2 + 2 * standard.P + len(n_seen)
    score, information = np.zeros(size), np.zeros((size, size))
    score[mu] = -standard.count * u / spread
    score[lam] = 0.5 * n_seen * np.expm1(-point.lam)
    information[mu, mu] = (standard.count / spread)[:, None] * standard.precision
    information[lam, lam] = np.diag(0.5 * n_seen)
    if not expected:
        information[mu, mu] -= standard.within * (
            (2.0 * standard.count / spread**2)[:, None] * np.outer(u, u)
        )
        information[lam, lam] = np.diag(0.5 * n_seen * np.exp(-point.lam))
    return score, information


def centered_information(point: BlocksPoint, effects: Bools, *, expected: bool = False) -> Floats:
    """Observed information of (a, s2, beta, mu, lambda); its inverse accounts for the blocks' covariances.

    With `expected`, cross-products between sites are at their expected value, zero.
    """
    standard, every = point.standard, np.ones(len(effects), dtype=bool)
    information = differentiate_blocks(point, every).information
    beta, mu, _ = places(standard)
    A = np.eye(len(information))  # d(b, log s2, ...) / d(a, s2, ...); b = a - sum mu'beta
    A[0, beta], A[0, mu] = -point.mu, -point.beta
    A[1, 1] = np.exp(-point.log_s2)
    information = A.T @ information @ A
    if expected:
        information[beta, beta] -= products_between(point)
    free = free_parameters(standard, effects)
    return np.asarray(information[np.ix_(free, free)])


def products_between(point: BlocksPoint) -> Floats:
    """Sum of u_j u_k'/v over the entities that two sites both have, u = x - mu; zero within sites."""
    standard, moments, mu = point.standard, point.standard.moments, point.mu
    h = 1.0 / residuals(point).v
    means = moments.seen * mu
    # Sums of u_j u_k' from those of x_j, x_k and x_j x_k', each pattern weighted by its 1/v.
    mixed = (moments.grams[:, 0, 1:-1] * h[:, None]).T @ means
    products = np.tensordot(h, moments.grams[:, 1:-1, 1:-1], 1) - mixed - mixed.T
    products += (means * (h * moments.n)[:, None]).T @ means
    return np.asarray(products * (1.0 - standard.within))
