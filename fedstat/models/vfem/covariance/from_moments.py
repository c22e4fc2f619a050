"""Covariance of (a, s2, beta, mu) from moments: observed, expected, supplemented EM.

The profile likelihood of :mod:`fedstat.models.vertical.likelihood` has Sigma_1..Sigma_K maximised
out, so the inverse of its information is the covariance with every nuisance parameter accounted for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from scipy.linalg import block_diag

from fedstat.errors import NotAvailableError
from fedstat.inference.covariance import symmetrise
from fedstat.models.vertical.covariance import in_units, information_inverse
from fedstat.models.vertical.fit import MomentsFit
from fedstat.models.vertical.law.covariance import law_covariance
from fedstat.models.vertical.law.fit import LawFit
from fedstat.models.vertical.law.pairs import Between, fit_between
from fedstat.models.vertical.likelihood import Standard, block_covariance, residuals
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vfem.covariance.law_sem import sem_of_law
from fedstat.models.vfem.covariance.moments_em import EMPoint, centred, em_step, expected_gram
from fedstat.models.vfem.covariance.psi import Covariance
from fedstat.models.vfem.covariance.sem_protocol import SEMPoint, complete_information, solve_sem, to_psi
from fedstat.typing import Floats

CovType: TypeAlias = Literal["observed", "expected", "sem", "robust", "none"]
HOW = "moments"
COMPLEX_STEP = 1e-30


def check_cov_type(cov_type: CovType) -> None:
    """Refuse "robust", which is not a function of second moments."""
    if cov_type == "robust":
        raise NotAvailableError(
            "cov_type='robust' needs sums of fourth moments of the columns, and exchange='moments' releases "
            "second moments; use cov_type='observed', or fit with exchange='iterative'"
        )


@dataclass(frozen=True, slots=True)
class MomentsOptions:
    """How estimates are made from moments; see :meth:`fedstat.VFEMRegression.fit`."""

    cov_type: CovType
    between: Between
    maxiter: int


def estimate_from_moments(
    moments: PatternMoments, asked: MomentsOptions
) -> tuple[MomentsFit | LawFit, Covariance | None]:
    """Maximum likelihood estimates and their covariance."""
    found = fit_between(moments, asked.between, asked.maxiter)
    return found, None if asked.cov_type == "none" else moments_covariance(found, asked.cov_type)


def moments_covariance(fit: MomentsFit | LawFit, cov_type: CovType = "observed") -> Covariance:
    """Covariance of (a, s2, beta_1, mu_1, beta_2, mu_2, ...) in the units of the data, after convergence.

    "observed" inverts the observed information; "expected" that of data missing completely at random, where
    blocks are independent between institutions with cross-products of two institutions at zero; "sem" is
    supplemented EM.
    """
    check_cov_type(cov_type)
    expected = cov_type == "expected"
    if isinstance(fit, LawFit):
        return free_covariance(fit, cov_type)
    if cov_type == "sem":
        return sem_covariance(fit)
    return Covariance(information_inverse(fit, expected=expected), "none" if expected else HOW)


def free_covariance(fit: LawFit, cov_type: CovType) -> Covariance:
    """Covariance under a law that is free between sites; the concentration of the columns comes last."""
    if cov_type == "sem":
        V, asymmetry = sem_of_law(fit)
        return Covariance(V, HOW, asymmetry=asymmetry)
    return Covariance(law_covariance(fit, expected=cov_type == "expected"), HOW)


# ---- supplemented EM -------------------------------------------------------------------------


def sem_covariance(fit: MomentsFit) -> Covariance:
    """Supplemented EM (Meng and Rubin 1991), V = I_oc^-1 (I - DM)^-1.

    The Jacobian DM of the exact EM map is taken by complex steps, without the error of a difference. Raises
    EstimationError where the map does not contract at the estimate.
    """
    standard, moments = fit.standard, fit.moments
    Sigma = block_covariance(standard, fit.point, residuals(standard, fit.point))
    at = EMPoint(fit.point.b, np.exp(fit.point.log_s2), fit.point.beta, fit.point.mu, Sigma)
    centre = split(moments, at)
    complete = complete_information(centre, centred(expected_gram(standard, at), at.mu), int(moments.nobs))
    V = solve_sem(complete, em_jacobian(standard, at))
    psi = np.zeros((2 + 2 * standard.P, len(V)))
    psi[:, : len(psi)] = to_psi(centre, [np.ones(p) for p in moments.sizes])
    cov, asymmetry = symmetrise(psi @ V @ psi.T)
    return Covariance(in_units(moments, cov), HOW, asymmetry=asymmetry)


def em_jacobian(standard: Standard, at: EMPoint) -> Floats:
    """Return d M_j / d theta_i at (i, j), theta = (beta0, s2, beta_1, mu_1, ..., vech Sigma_1, ...)."""
    moments = standard.moments
    theta = split(moments, at).pack()
    rows = []
    for i in range(len(theta)):
        moved = theta.astype(complex)
        # Im f(x + ih) / h has no difference in which digits could cancel, so that h may be tiny.
        moved[i] += 1j * COMPLEX_STEP
        image = em_step(standard, join(SEMPoint.unpack(moved, moments.sizes)))
        rows.append(split(moments, image).pack().imag / COMPLEX_STEP)
    return np.array(rows)


def split(moments: PatternMoments, at: EMPoint) -> SEMPoint:
    """Parameters of all columns by institution."""
    places = [moments.places(k) for k in range(len(moments.sizes))]
    beta, mu = ([values[here] for here in places] for values in (at.beta, at.mu))
    return SEMPoint(at.beta0, at.s2, beta, mu, [at.Sigma[here, here] for here in places])


def join(point: SEMPoint) -> EMPoint:
    """Parameters of all columns from those by institution."""
    beta, mu = np.concatenate(point.beta), np.concatenate(point.mu)
    return EMPoint(point.beta0, point.s2, beta, mu, np.asarray(block_diag(*point.Sigma)))
