"""Supplemented EM where columns are free to depend between institutions: the Jacobian by complex steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedstat.errors import NotAvailableError
from fedstat.inference.covariance import symmetrise
from fedstat.models.vertical.law.covariance import in_psi
from fedstat.models.vertical.law.derivatives import centred_sums, differentiate, joint_covariance, observed
from fedstat.models.vertical.law.fit import LawFit
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vfem.covariance.sem_protocol import solve_sem
from fedstat.typing import Array, Floats

COMPLEX_STEP = 1e-30


def sem_of_law(fit: LawFit) -> tuple[Floats, float]:
    """Covariance as :func:`~fedstat.models.vertical.law.covariance.law_covariance` has it, and its asymmetry.

    A NotAvailableError where pairs of institutions have no covariance of their own: the M-step is not in
    closed form then. An EstimationError where the map does not contract.
    """
    if not fit.moves.edges.all():
        raise NotAvailableError(
            "cov_type='sem' needs a covariance of every two institutions, and some share too few entities; "
            "use cov_type='observed'"
        )
    moments, point = fit.moments, fit.point
    i, j = fit.moves.entries
    theta = np.concatenate([[point.a, point.s2], point.beta, point.mu, point.Q[i, j]])
    rows = []
    for place in range(len(theta)):
        moved = theta.astype(complex)
        moved[place] += 1j * COMPLEX_STEP
        rows.append(em_map(moments, moved).imag / COMPLEX_STEP)
    V, asymmetry = symmetrise(solve_sem(complete_information(fit), np.array(rows)))
    return in_psi(fit, V), asymmetry


def complete_information(fit: LawFit) -> Floats:
    """Information of complete data, of which nothing but the number of entities is needed."""
    moments = fit.moments
    every = np.ones((1, len(moments.names)), dtype=bool)
    n = moments.n.sum(keepdims=True)
    grams = np.zeros((1, *moments.grams.shape[1:]))
    grams[:, 0, 0] = n
    whole = replace(moments, seen=every, n=n, grams=grams)
    return differentiate(whole, fit.point, fit.moves, expected=True).information


def em_map(moments: PatternMoments, theta: Array) -> Array:
    """One EM step of (a, s2, beta, mu, vech Q), real or complex."""
    P = len(moments.names)
    a, s2, beta, mu = theta[0], theta[1], theta[2 : 2 + P], theta[2 + P : 2 + 2 * P]
    i, j = np.triu_indices(P)
    Q = np.zeros((P, P), dtype=theta.dtype)
    Q[i, j] = Q[j, i] = theta[2 + 2 * P :]
    cov = joint_covariance(np.linalg.inv(Q), beta, s2)
    mean, cov = em_step(moments, np.append(mu, a), cov)
    Q = np.linalg.inv(cov[:-1, :-1])
    beta = Q @ cov[:-1, -1]
    s2 = cov[-1, -1] - beta @ cov[:-1, -1]
    return np.concatenate([[mean[-1], s2], beta, mean[:-1], Q[i, j]])


def em_step(moments: PatternMoments, mean: Array, cov: Array) -> tuple[Array, Array]:
    """EM of a normal law in its gradient form, from the sums of what each pattern sees."""
    seen = observed(moments)
    both = seen[:, :, None] & seen[:, None, :]
    K = np.linalg.inv(np.where(both, cov, np.eye(len(cov)))) * both
    d, D = centred_sums(moments, mean)
    move = cov @ np.matmul(K, d[:, :, None]).sum(axis=0)[:, 0] / moments.nobs
    inner = (np.matmul(np.matmul(K, D), K) - moments.n[:, None, None] * K).sum(axis=0)
    return mean + move, cov + cov @ inner @ cov / moments.nobs - np.outer(move, move)
