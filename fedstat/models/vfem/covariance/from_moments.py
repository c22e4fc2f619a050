"""Covariance of (a, s2, beta, mu) from moments: observed, expected, supplemented EM.

The profile likelihood of :mod:`fedstat.models.vertical.likelihood` has Sigma_1..Sigma_K maximised
out, so the inverse of its information is the covariance with every nuisance parameter accounted for.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from fedstat.errors import NotAvailableError
from fedstat.inference.covariance import symmetrise
from fedstat.models.vertical.covariance import client_order, in_units, information_inverse
from fedstat.models.vertical.fit import MomentsFit, fit_moments
from fedstat.models.vertical.likelihood import Standard, block_covariance, residuals
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vfem.covariance.moments_em import EMPoint, centred, em_step, expected_gram
from fedstat.models.vfem.covariance.psi import Covariance
from fedstat.models.vfem.covariance.sem_protocol import SEMPoint, complete_information, solve_sem, to_psi
from fedstat.typing import Array, Floats, Ints

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


def estimate_from_moments(
    moments: PatternMoments, cov_type: CovType, maxiter: int
) -> tuple[MomentsFit, Covariance | None]:
    """Maximum likelihood estimates and their covariance."""
    found = fit_moments(moments, maxiter=maxiter)
    return found, None if cov_type == "none" else moments_covariance(found, cov_type)


def moments_covariance(fit: MomentsFit, cov_type: CovType = "observed") -> Covariance:
    """Covariance of (a, s2, beta_1, mu_1, beta_2, mu_2, ...) in the units of the data, after convergence.

    "observed" inverts the observed information, "expected" the same with cross-products between clients at
    their expectation, zero; "sem" is supplemented EM.
    """
    check_cov_type(cov_type)
    if cov_type == "sem":
        return sem_covariance(fit)
    expected = cov_type == "expected"
    return Covariance(information_inverse(fit, expected=expected), "none" if expected else HOW)


# ---- supplemented EM -------------------------------------------------------------------------


def sem_covariance(fit: MomentsFit) -> Covariance:
    """Supplemented EM (Meng and Rubin 1991), V = I_oc^-1 (I - DM)^-1.

    The Jacobian DM of the exact EM map is taken by complex steps, without the error of a difference. Raises
    EstimationError where the map does not contract at the estimate.
    """
    standard, moments = fit.standard, fit.moments
    Sigma = block_covariance(standard, fit.point, residuals(standard, fit.point))
    at = EMPoint(fit.point.b, np.exp(fit.point.log_s2), fit.point.beta, fit.point.mu, Sigma)
    places = [moments.places(k) for k in range(len(moments.sizes))]
    centre = SEMPoint(
        fit.point.b,
        float(np.exp(fit.point.log_s2)),
        [at.beta[here] for here in places],
        [at.mu[here] for here in places],
        [Sigma[here, here] for here in places],
    )
    complete = complete_information(centre, centred(expected_gram(standard, at), at.mu), int(moments.nobs))
    V = solve_sem(complete, em_jacobian(standard, at))
    psi = np.zeros((2 + 2 * standard.P, len(V)))
    psi[:, : len(psi)] = to_psi(centre, [np.ones(p) for p in moments.sizes])
    cov, asymmetry = symmetrise(psi @ V @ psi.T)
    return Covariance(in_units(moments, cov), HOW, asymmetry=asymmetry)


def em_jacobian(standard: Standard, at: EMPoint) -> Floats:
    """Return d M_j / d theta_i at (i, j), theta = (beta0, s2, beta_1, mu_1, ..., vech Sigma_1, ...)."""
    theta = pack(standard.moments, at)
    rows = []
    for i in range(len(theta)):
        moved = theta.astype(complex)
        # Im f(x + ih) / h has no difference in which digits could cancel, so that h may be tiny.
        moved[i] += 1j * COMPLEX_STEP
        image = em_step(standard, unpack(standard.moments, moved))
        rows.append(pack(standard.moments, image).imag / COMPLEX_STEP)
    return np.array(rows)


def lower_triangles(moments: PatternMoments) -> tuple[Ints, Ints]:
    """Rows and columns of vech Sigma_1, ..., vech Sigma_K in the block diagonal matrix."""
    places = [np.tril_indices(p) for p in moments.sizes]
    starts = np.cumsum([0, *moments.sizes[:-1]])
    rows, columns = (
        np.concatenate([place[side] + start for place, start in zip(places, starts, strict=True)])
        for side in (0, 1)
    )
    return rows, columns


def pack(moments: PatternMoments, at: EMPoint) -> Array:
    """(beta0, s2, beta_1, mu_1, ..., vech Sigma_1, ...)."""
    first = np.concatenate([[at.beta0, at.s2], at.beta, at.mu])[client_order(moments)]
    return np.concatenate([first, at.Sigma[lower_triangles(moments)]])


def unpack(moments: PatternMoments, theta: Array) -> EMPoint:
    """Read :func:`pack`."""
    P = len(moments.names)
    first = np.empty(2 + 2 * P, dtype=theta.dtype)
    first[client_order(moments)] = theta[: 2 + 2 * P]
    rows, columns = lower_triangles(moments)
    Sigma = np.zeros((P, P), dtype=theta.dtype)
    Sigma[rows, columns] = Sigma[columns, rows] = theta[2 + 2 * P :]
    return EMPoint(first[0], first[1], first[2 : 2 + P], first[2 + P :], Sigma)
