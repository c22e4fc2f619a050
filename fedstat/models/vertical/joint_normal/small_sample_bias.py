"""The first-order bias of maximum likelihood in the joint normal model, and its correction.

The information is that of sums over few entities where institutions share few. Of a covariance Omega that
is free the maximum likelihood estimate has no bias of order 1/n but that of the estimated means, whatever
is missing; coefficients and residual variance are curved functions of it. With V the covariance of the
parameters theta = (a, s2, beta, mu, Q), the formula of Cox and Snell (1968, equation 20) is one step of
Fisher's scoring,

    bias(theta) = I^-1 score, at sums n_g (Omega_g - E_g) of squares, E = E2 Omega + Var(mean),

where E2 Omega is the second-order part of the expectation of Omega at the estimate:

    E2 Sigma = Sigma E[dQ Sigma dQ] Sigma,    E2(Sigma beta) = (E2 Sigma) beta - E[Sigma dQ Sigma dbeta],
    E2(beta'Sigma beta) = beta'(E2 Sigma) beta - 2 beta'E[Sigma dQ Sigma dbeta] + tr(Sigma Var beta).

With nothing missing coefficients have no bias, and the residual variance has that of its divisor n.

References
----------
Cox and Snell (1968), A general definition of residuals, Journal of the Royal Statistical Society B 30,
248-275.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedstat.errors import EstimationError
from fedstat.models.vertical.joint_normal.fit import JointNormalFit, not_determined
from fedstat.models.vertical.joint_normal.likelihood import (
    JointNormalPoint,
    differentiate_joint_normal,
    observed,
)
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vertical.newton import solve_information
from fedstat.typing import Floats


def bias_corrected(fit: JointNormalFit) -> JointNormalFit:
    """Take the bias of order 1/n off a law at its maximum.

    The residual variance is divided by 1 + bias / s2: with nothing missing it is that of least squares, with
    the divisor n - p - 1. An EstimationError where so few entities are shared that no law is left.
    """
    at = fit.point
    try:
        bias, _ = first_order_bias(fit)
    except np.linalg.LinAlgError:
        raise EstimationError(not_determined(fit.moments)) from None
    share = 1.0 + bias[1] / at.s2
    moved = fit.moves.step(at, -bias)
    s2 = at.s2 / share if share > 0.0 else -1.0
    if s2 <= 0.0 or np.linalg.eigvalsh(moved.Q)[0] <= 0.0:
        raise EstimationError(
            "correction='small-sample': the bias is as large as the estimates; " + not_determined(fit.moments)
        )
    return replace(fit, point=replace(moved, s2=s2))


def first_order_bias(fit: JointNormalFit) -> tuple[Floats, Floats]:
    """Bias (d,) of a, s2, beta, mu and the entries of Q, of standardised columns, and their variances.

    A LinAlgError where the information is not positive definite.
    """
    at, moments, moves = fit.point, fit.moments, fit.moves
    P, d = len(at.beta), 2 + 2 * len(at.beta) + len(moves.entries[0])
    V = solve_information(differentiate_joint_normal(moments, at, moves).information, np.eye(d))
    excess = second_order(fit, V)
    mean = [*range(2 + P, 2 + 2 * P), 0]
    excess += V[np.ix_(mean, mean)]
    expected = differentiate_joint_normal(expected_moments(moments, at, excess), at, moves, expected=True)
    bias = np.asarray(solve_information(expected.information, expected.score))
    # Of the intercept at the origin, a - mu'beta, that of the product: with means and coefficients that are
    # correlated, as where the response enters the missingness, it is not zero.
    bias[0] -= np.trace(V[2 + P : 2 + 2 * P, 2 : 2 + P])
    return bias, np.diag(V)


def second_order(fit: JointNormalFit, V: Floats) -> Floats:
    """Second-order part of the expectation of Omega, (P + 1, P + 1), of estimates with covariance V."""
    at, P = fit.point, len(fit.point.beta)
    beta, Q = slice(2, 2 + P), slice(2 + 2 * P, None)
    Sigma = at.covariates
    i, j = fit.moves.entries
    # Moments of dQ_ab with anything, from those of its entries on and above the diagonal.
    place = np.full((P, P), -1)
    place[i, j] = place[j, i] = np.arange(len(i))
    moves = place >= 0

    def whole(values: Floats) -> Floats:
        return np.where(moves, values[..., np.where(moves, place, 0)], 0.0)

    with_beta = whole(V[beta, Q])  # of dbeta_c, dQ_ab: (P, P, P)
    c = -Sigma @ np.einsum("cab,bc->a", with_beta, Sigma)
    M = np.zeros((P, P))
    for a in range(P):
        row = np.where(moves[a], place[a], 0)
        own = whole(V[Q, Q][row]) * moves[a][:, None, None]  # of dQ_ac, dQ_de: (c, d, e)
        M[a] = np.einsum("cde,cd->e", own, Sigma)
    second = Sigma @ M @ Sigma
    column = second @ at.beta + c
    last = at.beta @ second @ at.beta + 2.0 * at.beta @ c + np.sum(Sigma * V[beta, beta])
    return np.block([[second, column[:, None]], [column[None, :], np.array([[last]])]])


def expected_moments(moments: PatternMoments, point: JointNormalPoint, excess: Floats) -> PatternMoments:
    """Return the sums that are expected of a law with the covariance less `excess`, by the same patterns."""
    seen = observed(moments)
    mean, n = seen * point.mean, moments.n[:, None, None]
    grams = np.zeros_like(moments.grams)
    grams[:, 0, 0] = moments.n
    grams[:, 0, 1:] = grams[:, 1:, 0] = moments.n[:, None] * mean
    both = seen[:, :, None] & seen[:, None, :]
    grams[:, 1:, 1:] = n * (mean[:, :, None] * mean[:, None, :] + both * (point.cov - excess))
    return replace(moments, grams=grams)
