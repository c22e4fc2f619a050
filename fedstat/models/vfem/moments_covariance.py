"""Covariance of (a, s2, beta, mu) from moments: observed, expected, supplemented EM.

The profile likelihood of :mod:`fedstat.models.vfem.moments_likelihood` has Sigma_1..Sigma_K maximised out, so the inverse
of its information is the covariance with every nuisance parameter accounted for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np

from fedstat.errors import NotAvailableError
from fedstat.inference.covariance import delta_method, invert_information, symmetrise
from fedstat.models.vfem.covariance_protocol import Covariance, Places
from fedstat.models.vfem.moments import PatternMoments
from fedstat.models.vfem.moments_em import EMPoint, centred, em_step, expected_gram
from fedstat.models.vfem.moments_fit import MomentsFit
from fedstat.models.vfem.moments_likelihood import Standard, block_covariance, evaluate, residuals
from fedstat.models.vfem.sem_protocol import Point as SEMPoint
from fedstat.models.vfem.sem_protocol import complete_information, solve_sem, to_psi
from fedstat.typing import Array, Floats

CovType: TypeAlias = Literal["observed", "expected", "sem", "robust"]
HOW = "moments"
COMPLEX_STEP = 1e-30


def moments_covariance(fit: MomentsFit, cov_type: CovType = "observed") -> Covariance:
    """Covariance of (a, s2, beta_1, mu_1, beta_2, mu_2, ...) in the units of the data.

    Parameters
    ----------
    fit : MomentsFit
        After it has converged.
    cov_type : {"observed", "expected", "sem"}
        Inverse observed information; the same with cross-products between clients at their
        expectation, zero; supplemented EM.

    Raises
    ------
    NotAvailableError
        cov_type="robust", which is not a function of second moments.
    EstimationError
        The information is not positive definite.
    """
    if cov_type == "robust":
        raise NotAvailableError(
            "cov_type='robust' needs fourth moments of the columns, and Gram matrices by missing pattern hold "
            "the second; use 'observed', or exchange='iterative'"
        )
    if cov_type == "sem":
        return sem_covariance(fit)
    information = centred_information(fit)
    if cov_type == "expected":
        beta = fit.standard.places[0]
        information[beta, beta] -= products_between(fit)
    cov = invert_information(information, names_of(fit.moments))
    size = 2 + 2 * fit.standard.P
    how = "none" if cov_type == "expected" else HOW
    return Covariance(in_units(fit, cov[:size, :size]), how)


def centred_information(fit: MomentsFit) -> Floats:
    """Observed information of (a, s2, beta, mu, lambda) of standardised columns."""
    standard, point = fit.standard, fit.point
    information = evaluate(standard, point).information
    beta, mu, _ = standard.places
    A = np.eye(len(information))  # d(b, log s2, ...) / d(a, s2, ...); b = a - sum mu'beta
    A[0, beta], A[0, mu] = -point.mu, -point.beta
    A[1, 1] = np.exp(-point.log_s2)
    return np.asarray(A.T @ information @ A)


def products_between(fit: MomentsFit) -> Floats:
    """Sum of u_j u_k'/v over the entities that two clients both have, u = x - mu; zero within clients."""
    standard, moments, mu = fit.standard, fit.moments, fit.point.mu
    h = 1.0 / residuals(standard, fit.point).v
    means = moments.seen * mu
    mixed = (moments.grams[:, 0, 1:-1] * h[:, None]).T @ means
    products = np.tensordot(h, moments.grams[:, 1:-1, 1:-1], 1) - mixed - mixed.T
    products += (means * (h * moments.n)[:, None]).T @ means
    return np.asarray(products * (1.0 - standard.within))


def names_of(moments: PatternMoments) -> list[str]:
    """Name each parameter of the information, for messages."""
    owners = [moments.clients[k] for k in moments.owner]
    columns = [f"{name} ({client})" for name, client in zip(moments.names, owners, strict=True)]
    means = [f"mean of {column}" for column in columns]
    variances = [f"variance of the block of {client}" for client in moments.clients]
    return ["Intercept", "residual variance", *columns, *means, *variances]


def in_units(fit: MomentsFit, cov: Floats) -> Floats:
    """Bring a covariance of (a, s2, beta, mu) to the units of the data and the order by client."""
    moments, P = fit.moments, fit.standard.P
    x, y = moments.scale[:-1], moments.scale[-1]
    factor = np.concatenate([[y, y**2], y / x, x])
    places = [moments.places(k) for k in range(len(moments.sizes))]
    columns = np.arange(P)
    order = [0, 1, *[i for p in places for i in (*(2 + columns[p]), *(2 + P + columns[p]))]]
    return np.asarray((cov * np.outer(factor, factor))[np.ix_(order, order)])


# ---- supplemented EM -------------------------------------------------------------------------


def sem_covariance(fit: MomentsFit) -> Covariance:
    """Supplemented EM (Meng and Rubin 1991), with the Jacobian of the exact EM map by complex steps.

    V = I_oc^-1 (I - DM)^-1; no difference is taken, so that the Jacobian is exact to rounding.
    """
    standard, moments = fit.standard, fit.moments
    at = em_point(fit)
    T = expected_gram(standard, at)
    centre = to_sem(at, moments)
    I_oc = complete_information(centre, centred(T, at.mu), int(moments.nobs))
    V = solve_sem(I_oc, em_jacobian(standard, at))
    A = np.zeros((2 + 2 * standard.P, len(V)))
    scales = [moments.scale[:-1][moments.places(k)] for k in range(len(moments.sizes))]
    A[:, : len(A)] = to_psi(centre, scales)
    cov, asymmetry = symmetrise(A @ V @ A.T)
    factor = response_factor(moments)
    return Covariance(cov * np.outer(factor, factor), HOW, asymmetry=asymmetry)


def em_point(fit: MomentsFit) -> EMPoint:
    """Return the estimates as the EM map takes them."""
    standard, point = fit.standard, fit.point
    Sigma = block_covariance(standard, point, residuals(standard, point))
    return EMPoint(point.b, float(np.exp(point.log_s2)), point.beta, point.mu, Sigma)
