"""The covariance of the estimates from moments: observed, expected, supplemented EM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from scipy.linalg import block_diag

from fedstat.errors import NotAvailableError
from fedstat.inference.covariance import symmetrize
from fedstat.models.vertical.fit import (
    MomentsFit,
    StandardizedMoments,
    block_covariance,
    covariance_in_units,
    information_inverse,
    residuals,
)
from fedstat.models.vertical.joint_normal.assumption_tests import BetweenChoice, choose_between
from fedstat.models.vertical.joint_normal.fit import (
    Between,
    JointNormalFit,
    centered_sums,
    differentiate_joint_normal,
    edges_between,
    estimates_covariance,
    fit_joint_model,
    fit_joint_normal,
    in_psi,
    joint_normal_covariance,
    observed,
    sandwich_covariance,
)
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vfem.covariance.information import PsiCovariance
from fedstat.models.vfem.covariance.sem_protocol import SEMPoint, complete_information, solve_sem, to_psi
from fedstat.typing import Array, Floats

# ----------------------------------------------------------------------------------------------------
# Supplemented EM if columns may be correlated between sites: the Jacobian by complex steps.

JOINT_COMPLEX_STEP = 1e-30


def joint_normal_sem(fit: JointNormalFit) -> tuple[Floats, float]:
    """Return the covariance of the estimates by supplemented EM, and its asymmetry.

    The covariance is arranged as in :func:`~fedstat.models.vertical.joint_normal.fit.estimates_covariance`.

    Raises NotAvailableError if a pair of sites has no covariance of its own, because the M-step then has no
    closed form, and EstimationError if the map does not contract.
    """
    if not fit.moves.edges.all():
        raise NotAvailableError(
            "cov_type='sem' needs a covariance of every two sites, but some share too few entities; use "
            "cov_type='observed'"
        )
    moments, point = fit.moments, fit.point
    i, j = fit.moves.entries
    theta = np.concatenate([[point.a, point.s2], point.beta, point.mu, point.Q[i, j]])
    rows = []
    for place in range(len(theta)):
        moved = theta.astype(complex)
        moved[place] += 1j * JOINT_COMPLEX_STEP
        rows.append(joint_em_map(moments, moved).imag / JOINT_COMPLEX_STEP)
    V, asymmetry = symmetrize(solve_sem(joint_complete_information(fit), np.array(rows)))
    return in_psi(fit, V), asymmetry


def joint_complete_information(fit: JointNormalFit) -> Floats:
    """Information of complete data, which depends only on the number of entities."""
    moments = fit.moments
    every = np.ones((1, len(moments.names)), dtype=bool)
    n = moments.n.sum(keepdims=True)
    grams = np.zeros((1, *moments.grams.shape[1:]))
    grams[:, 0, 0] = n
    complete = replace(moments, seen=every, n=n, grams=grams)
    return differentiate_joint_normal(complete, fit.point, fit.moves, expected=True).information


def joint_em_map(moments: PatternMoments, theta: Array) -> Array:
    """One EM step of (a, s2, beta, mu, vech Q), real or complex."""
    P = len(moments.names)
    a, s2, beta, mu = theta[0], theta[1], theta[2 : 2 + P], theta[2 + P : 2 + 2 * P]
    i, j = np.triu_indices(P)
    Q = np.zeros((P, P), dtype=theta.dtype)
    Q[i, j] = Q[j, i] = theta[2 + 2 * P :]
    cov = joint_normal_covariance(np.linalg.inv(Q), beta, s2)
    mean, cov = joint_em_step(moments, np.append(mu, a), cov)
    Q = np.linalg.inv(cov[:-1, :-1])
    beta = Q @ cov[:-1, -1]
    s2 = cov[-1, -1] - beta @ cov[:-1, -1]
    return np.concatenate([[mean[-1], s2], beta, mean[:-1], Q[i, j]])


def joint_em_step(moments: PatternMoments, mean: Array, cov: Array) -> tuple[Array, Array]:
    """EM of a joint normal model in its gradient form, from sums of each pattern's observed columns."""
    seen = observed(moments)
    both = seen[:, :, None] & seen[:, None, :]
    K = np.linalg.inv(np.where(both, cov, np.eye(len(cov)))) * both
    d, D = centered_sums(moments, mean)
    move = cov @ np.matmul(K, d[:, :, None]).sum(axis=0)[:, 0] / moments.nobs
    inner = (np.matmul(np.matmul(K, D), K) - moments.n[:, None, None] * K).sum(axis=0)
    return mean + move, cov + cov @ inner @ cov / moments.nobs - np.outer(move, move)


# ----------------------------------------------------------------------------------------------------
# The exact EM map of VFEM from moments.
#
# Missing columns are set to their conditional expectation mu_k + w_k z_i, w_k = Sigma_k beta_k and z_i = r_i
# / v_g (TWFL (4)), which is linear in the observed columns. The expected Gram matrix of (1, x, y) therefore
# follows from those of the patterns. The M-step is a regression and the blocks' own moments (TWFL (5), (6)).


@dataclass(frozen=True, slots=True, eq=False)
class EMPoint:
    """Parameters of standardized columns; complex where a complex step takes derivatives.

    Intercept at the origin, residual variance, beta and mu (P,), and the block diagonal Sigma (P, P).
    """

    beta0: complex
    s2: complex
    beta: Array
    mu: Array
    Sigma: Array


def expected_gram(standard: StandardizedMoments, at: EMPoint) -> Array:
    """Return the expected sum of (1, x, y)(1, x, y)' given observed columns, (P + 2, P + 2)."""
    moments, missing = standard.moments, standard.missing
    w = at.Sigma @ at.beta
    v = at.s2 + missing @ ((at.beta * w) @ standard.member)
    absent = ~moments.seen
    weights = np.empty((len(v), standard.P + 2), dtype=v.dtype)
    weights[:, 0] = -at.beta0 - missing @ ((at.mu * at.beta) @ standard.member)
    weights[:, 1:-1], weights[:, -1] = -at.beta, 1.0
    sums = np.matmul(moments.grams.astype(v.dtype), weights[:, :, None])[:, :, 0]
    squares = np.sum(weights * sums, axis=1)
    mean, slope = np.zeros_like(weights), np.zeros_like(weights)
    mean[:, 1:-1], slope[:, 1:-1] = absent * at.mu, absent * w / v[:, None]
    seen = moments.grams.sum(axis=0)
    mixed = mean.T @ (moments.grams[:, 0] + sums[:, :1] * slope) + slope.T @ sums
    T = seen + mixed + mixed.T
    T += (mean * moments.n[:, None]).T @ mean + (slope * (squares - moments.n * v)[:, None]).T @ slope
    T[1:-1, 1:-1] += at.Sigma * (moments.nobs - standard.count)
    return np.asarray(T)


def block_m_step(standard: StandardizedMoments, T: Array) -> EMPoint:
    """Compute the M-step from an expected Gram matrix."""
    n = standard.moments.nobs
    coefficients = np.linalg.solve(T[:-1, :-1], T[:-1, -1])
    mu = T[0, 1:-1] / n
    return EMPoint(
        coefficients[0],
        (T[-1, -1] - T[-1, :-1] @ coefficients) / n,
        coefficients[1:],
        mu,
        (T[1:-1, 1:-1] / n - np.outer(mu, mu)) * standard.within,
    )


def block_em_step(standard: StandardizedMoments, at: EMPoint) -> EMPoint:
    """One iteration of the exact EM algorithm."""
    return block_m_step(standard, expected_gram(standard, at))


def centered_moments(T: Array, mu: Floats) -> Floats:
    """Compute the expected sum of (1, x - mu)(1, x - mu)' from that of (1, x, y)(1, x, y)'."""
    shift = np.eye(len(mu) + 1)
    shift[1:, 0] = -mu
    return np.asarray(shift @ T[:-1, :-1] @ shift.T, dtype=np.float64)


# ----------------------------------------------------------------------------------------------------
# Covariance of (a, s2, beta, mu) from moments: observed, expected, supplemented EM.
#
# In the profile likelihood of :mod:`fedstat.models.vertical.fit`, Sigma_1..Sigma_K are maximized out. The
# inverse of its information is therefore a covariance that accounts for every nuisance parameter.

CovType: TypeAlias = Literal["observed", "expected", "sem", "robust", "none"]
FROM_MOMENTS = "moments"
COMPLEX_STEP = 1e-30


GROUPS = 25
"""Largest number of random groups of the entities of a pattern, for cov_type="robust"."""


def check_cov_type(cov_type: CovType, *, free: bool = False) -> None:
    """Refuse "robust" unless it is of a fit with `free` covariances and sums by random group."""
    if cov_type == "robust" and not free:
        raise NotAvailableError(
            "cov_type='robust' from moments needs sums by random group of the entities: fit with "
            "method='vfem', between='free', cov_type='robust' and no weights. For between='independent', use "
            "exchange='iterative'"
        )


@dataclass(frozen=True, slots=True)
class MomentsOptions:
    """Options of estimation from moments; see :meth:`fedstat.VFEMRegression.fit`.

    With `between` None, the moments choose. With `jointly`, independent blocks are a joint normal model too.
    """

    cov_type: CovType
    between: Between | None
    maxiter: int
    jointly: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class MomentsEstimate:
    """Maximum likelihood from moments, its covariance, and what chose the covariance between sites."""

    found: MomentsFit | JointNormalFit
    covariance: PsiCovariance | None
    between: Between
    choice: BetweenChoice | None = None


def estimate_from_moments(
    moments: PatternMoments, request: MomentsOptions, by_group: PatternMoments | None = None
) -> MomentsEstimate:
    """Maximum likelihood estimates and their covariance; the robust one needs sums `by_group`."""
    robust = request.cov_type == "robust"
    check_cov_type(request.cov_type, free=by_group is not None)
    choice = choose_between(moments, request.maxiter) if request.between is None else None
    between = request.between or (choice.between if choice else "free")
    if request.jointly or robust:
        found: MomentsFit | JointNormalFit = fit_joint_normal(
            moments, edges_between(moments, between), maxiter=request.maxiter
        )
    else:
        found = fit_joint_model(moments, between, request.maxiter)
    if robust and by_group is not None and isinstance(found, JointNormalFit):
        psi, df = sandwich_covariance(found, by_group)
        covariance: PsiCovariance | None = PsiCovariance(psi, FROM_MOMENTS, df=df)
    else:
        covariance = None if request.cov_type == "none" else moments_covariance(found, request.cov_type)
    return MomentsEstimate(found, covariance, between, choice)


def moments_covariance(fit: MomentsFit | JointNormalFit, cov_type: CovType = "observed") -> PsiCovariance:
    """Covariance of (a, s2, beta_1, mu_1, beta_2, mu_2, ...) in the units of the data, after convergence.

    "observed" inverts the observed information. "expected" inverts that of data missing completely at random,
    with cross-products of two sites at zero because blocks are independent. "sem" is supplemented EM.
    """
    check_cov_type(cov_type)
    expected = cov_type == "expected"
    if isinstance(fit, JointNormalFit):
        return free_covariance(fit, cov_type)
    if cov_type == "sem":
        return sem_covariance(fit)
    return PsiCovariance(information_inverse(fit, expected=expected), "none" if expected else FROM_MOMENTS)


def free_covariance(fit: JointNormalFit, cov_type: CovType) -> PsiCovariance:
    """Covariance with free covariances between sites; the concentration of the columns comes last."""
    if cov_type == "sem":
        V, asymmetry = joint_normal_sem(fit)
        return PsiCovariance(V, FROM_MOMENTS, asymmetry=asymmetry)
    return PsiCovariance(estimates_covariance(fit, expected=cov_type == "expected"), FROM_MOMENTS)


# ---- supplemented EM -------------------------------------------------------------------------


def sem_covariance(fit: MomentsFit) -> PsiCovariance:
    """Supplemented EM (Meng and Rubin 1991), V = I_oc^-1 (I - DM)^-1.

    Complex steps compute the Jacobian DM of the exact EM map, without the error of a difference. Raises
    EstimationError if the map does not contract at the estimate.
    """
    standard, moments = fit.standard, fit.moments
    Sigma = block_covariance(standard, fit.point, residuals(standard, fit.point))
    at = EMPoint(fit.point.b, np.exp(fit.point.log_s2), fit.point.beta, fit.point.mu, Sigma)
    center = split(moments, at)
    complete = complete_information(
        center, centered_moments(expected_gram(standard, at), at.mu), int(moments.nobs)
    )
    V = solve_sem(complete, em_jacobian(standard, at))
    psi = np.zeros((2 + 2 * standard.P, len(V)))
    psi[:, : len(psi)] = to_psi(center, [np.ones(p) for p in moments.sizes])
    cov, asymmetry = symmetrize(psi @ V @ psi.T)
    return PsiCovariance(covariance_in_units(moments, cov), FROM_MOMENTS, asymmetry=asymmetry)


def em_jacobian(standard: StandardizedMoments, at: EMPoint) -> Floats:
    """Return d M_j / d theta_i at (i, j), theta = (beta0, s2, beta_1, mu_1, ..., vech Sigma_1, ...)."""
    moments = standard.moments
    theta = split(moments, at).pack()
    rows = []
    for i in range(len(theta)):
        moved = theta.astype(complex)
        # Im f(x + ih) / h has no difference in which digits could cancel, so h may be tiny.
        moved[i] += 1j * COMPLEX_STEP
        image = block_em_step(standard, join(SEMPoint.unpack(moved, moments.sizes)))
        rows.append(split(moments, image).pack().imag / COMPLEX_STEP)
    return np.array(rows)


def split(moments: PatternMoments, at: EMPoint) -> SEMPoint:
    """Parameters of all columns by site."""
    places = [moments.places(k) for k in range(len(moments.sizes))]
    beta, mu = ([values[here] for here in places] for values in (at.beta, at.mu))
    return SEMPoint(at.beta0, at.s2, beta, mu, [at.Sigma[here, here] for here in places])


def join(point: SEMPoint) -> EMPoint:
    """Parameters of all columns from those by site."""
    beta, mu = np.concatenate(point.beta), np.concatenate(point.mu)
    return EMPoint(point.beta0, point.s2, beta, mu, np.asarray(block_diag(*point.Sigma)))
