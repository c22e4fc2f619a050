"""The covariance of the estimates from moments: observed, expected, supplemented EM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from fedstat.errors import NotAvailableError, Remedy
from fedstat.inference.covariance import symmetrize
from fedstat.models.vertical.joint_normal.assumption_tests import BetweenChoice, choose_between
from fedstat.models.vertical.joint_normal.edges import Between
from fedstat.models.vertical.joint_normal.fit import (
    OBSERVED,
    JointNormalFit,
    estimates_covariance,
    fit_joint_model,
    in_psi,
    sandwich_covariance,
)
from fedstat.models.vertical.joint_normal.likelihood import (
    FreeParameters,
    JointNormalPoint,
    differentiate_joint_normal,
    em_step,
    form_separate_sets,
    joint_normal_covariance,
    m_step,
)
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vfem.covariance.information import PsiCovariance
from fedstat.models.vfem.covariance.sem_protocol import solve_sem
from fedstat.typing import Array, Floats

# ----------------------------------------------------------------------------------------------------
# Covariance of (a, s2, beta, mu) from moments: observed, expected, supplemented EM.
#
# Where Sigma_1..Sigma_K are profiled out, the inverse of the information is a covariance that accounts for
# every nuisance parameter.

CovType: TypeAlias = Literal["observed", "expected", "sem", "robust", "none"]
FROM_MOMENTS = "moments"
COMPLEX_STEP = 1e-30


GROUPS = 25
"""Largest number of random groups of the entities of a pattern, for cov_type="robust"."""


def check_cov_type(cov_type: CovType, *, free: bool = False) -> None:
    """Refuse "robust" unless it is of a fit with `free` covariances and sums by random group."""
    if cov_type == "robust" and not free:
        raise NotAvailableError(
            "cov_type='robust' from moments needs sums by random group of the entities",
            remedy=Remedy(
                "from_formula(..., between='free').fit(method='vfem', cov_type='robust')",
                ": fit with method='vfem', between='free', cov_type='robust' and no weights. For "
                "between='independent', use exchange='iterative'",
            ),
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

    found: JointNormalFit
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
    jointly = request.jointly or robust
    found = fit_joint_model(moments, between, jointly=jointly, maxiter=request.maxiter)
    if robust and by_group is not None:
        psi, df = sandwich_covariance(found, by_group)
        covariance: PsiCovariance | None = PsiCovariance(psi, FROM_MOMENTS, df=df)
    else:
        covariance = None if request.cov_type == "none" else moments_covariance(found, request.cov_type)
    return MomentsEstimate(found, covariance, between, choice)


def moments_covariance(fit: JointNormalFit, cov_type: CovType = "observed") -> PsiCovariance:
    """Covariance of (a, s2, beta_1, mu_1, beta_2, mu_2, ...) in the units of the data, after convergence.

    "observed" inverts the observed information. "expected" inverts that of data missing completely at random,
    with cross-products of two sites at zero because blocks are independent. "sem" is supplemented EM.
    """
    check_cov_type(cov_type)
    if cov_type == "sem":
        return sem_covariance(fit)
    expected = cov_type == "expected"
    how = "none" if expected and fit.model.profiled else FROM_MOMENTS
    return PsiCovariance(estimates_covariance(fit, expected=expected), how)


# ---- supplemented EM -------------------------------------------------------------------------


def sem_covariance(fit: JointNormalFit) -> PsiCovariance:
    """Supplemented EM (Meng and Rubin 1991), V = I_oc^-1 (I - DM)^-1.

    Complex steps compute the Jacobian DM of the exact EM map, without the error of a difference. Raises
    NotAvailableError if a pair of sites has no covariance of its own, because the M-step then has no closed
    form, and EstimationError if the map does not contract.
    """
    moments, moves, point = fit.moments, fit.moves, fit.point.with_concentration()
    if not form_separate_sets(moves.edges):
        raise NotAvailableError(
            "cov_type='sem' needs a covariance of every two sites, but some share too few entities",
            remedy=OBSERVED,
        )
    theta = np.concatenate([[point.a, point.s2], point.beta, point.mu, point.Q[moves.entries]])
    rows = []
    for place in range(len(theta)):
        moved = theta.astype(complex)
        # Im f(x + ih) / h has no difference in which digits could cancel, so h may be tiny.
        moved[place] += 1j * COMPLEX_STEP
        rows.append(em_map(moments, moves, moved).imag / COMPLEX_STEP)
    V, asymmetry = symmetrize(solve_sem(complete_information(moments, moves, point), np.array(rows)))
    if fit.model.profiled:
        V = V[: 2 + 2 * len(point.beta), : 2 + 2 * len(point.beta)]
    return PsiCovariance(in_psi(fit, V), FROM_MOMENTS, asymmetry=asymmetry)


def complete_information(moments: PatternMoments, moves: FreeParameters, point: JointNormalPoint) -> Floats:
    """Return the expected information of complete data, given the observed data."""
    mean, cov = em_step(moments, point.mean, point.cov)
    n, gram = moments.n.sum(keepdims=True), np.ones((len(mean) + 1, len(mean) + 1))
    gram[0, 1:] = gram[1:, 0] = mean
    gram[1:, 1:] = cov + np.outer(mean, mean)
    every = np.ones((1, len(point.beta)), dtype=bool)
    complete = replace(moments, seen=every, n=n, grams=n * gram[None])
    return differentiate_joint_normal(complete, point, moves).information


def em_map(moments: PatternMoments, moves: FreeParameters, theta: Array) -> Array:
    """One EM step of (a, s2, beta, mu, free entries of Q), real or complex."""
    P, (i, j) = len(moments.names), moves.entries
    a, s2, beta, mu = theta[0], theta[1], theta[2 : 2 + P], theta[2 + P : 2 + 2 * P]
    Q = np.zeros((P, P), dtype=theta.dtype)
    Q[i, j] = Q[j, i] = theta[2 + 2 * P :]
    cov = joint_normal_covariance(np.linalg.inv(Q), beta, s2)
    mean, cov = em_step(moments, np.append(mu, a), cov)
    Q, beta, s2 = m_step(cov, moves.edges)
    return np.concatenate([[mean[-1], s2], beta, mean[:-1], Q[i, j]])
