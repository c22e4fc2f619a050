"""The joint log-likelihood of columns under one normal model and of a non-normal response.

The columns are N(mu, Sigma) with concentration Q. The response has the linear predictor a + (x - mu)'beta.
Let M be the columns that a pattern lacks; given the observed columns, their concentration is Q_MM. Let R =
Q_MM^-1, zero elsewhere, h = R beta and E = I - Q R. Given the observed columns, the linear predictor is
normal with

    mean m = a + d'(x - mu),  d = E beta = beta - Q h,  which is zero at M,
    variance v = beta'h.

A change of (beta, Q) has delta = dbeta - dQ h, and

    dd = E delta,  dv = h'delta + h'dbeta,  d2d = -2 E dQ R delta,  d2v = 2 delta'R delta.

The score of the response's likelihood is therefore computed from the sums of L_m (1, x) and of L_v by
pattern, and its information from those of second derivatives with (1, x)(1, x)'. The columns' own
log-likelihood is that of :mod:`fedstat.models.vertical.joint_normal.likelihood`. Parameters are in the order
of the model there, (a, s2, beta, mu, Q). There is no residual variance; its place is zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedstat.models.vertical.joint_normal.likelihood import (
    FreeParameters,
    JointNormalDerivatives,
    JointNormalPoint,
    differentiate_joint_normal,
    joint_normal_likelihood,
)
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vfem.covariance.information import SCALE_INDEX
from fedstat.typing import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class MissingModel:
    """Missing given observed columns: R (G, P, P), h (G, P), slopes d (G, P), variance v (G,)."""

    R: Floats
    h: Floats
    slopes: Floats
    variance: Floats


@dataclass(frozen=True, slots=True, eq=False)
class ResponseSums:
    """Sums over the entities of each pattern: of L_m (1, x), (G, 1 + P), and of L_v and -L_mm, (G,)."""

    with_columns: Floats
    by_v: Floats
    h: Floats


def missing_model(point: JointNormalPoint, seen: Bools) -> MissingModel:
    """Compute the distribution of the columns that patterns lack, given `seen` (G, P)."""
    lacks = ~seen
    both = lacks[:, :, None] & lacks[:, None, :]
    R = np.linalg.inv(np.where(both, point.Q, np.eye(len(point.Q)))) * both
    h = R @ point.beta
    # Zero at missing columns except for rounding; columns there count as zero.
    return MissingModel(R, h, (point.beta - h @ point.Q) * seen, h @ point.beta)


def columns_alone(moments: PatternMoments) -> PatternMoments:
    """Replace the response by one with mean square one that is independent of all columns."""
    grams = moments.grams.copy()
    grams[:, -1, :] = grams[:, :, -1] = 0.0
    grams[:, -1, -1] = moments.n
    return replace(moments, grams=grams)


def evaluate_columns(point: JointNormalPoint) -> JointNormalPoint:
    """Take the normal model of the columns, with such a response."""
    return JointNormalPoint(point.mu, 0.0, np.zeros_like(point.beta), 1.0, point.Q)


def columns_likelihood(alone: PatternMoments, point: JointNormalPoint) -> float:
    """Log-likelihood of the columns, up to a constant; a LinAlgError outside of the positive cone."""
    joint = evaluate_columns(point)
    return joint_normal_likelihood(alone, joint.mean, joint.cov)


def columns_derivatives(
    alone: PatternMoments, point: JointNormalPoint, edges: Bools, *, expected: bool = False
) -> JointNormalDerivatives:
    """Differentiate the columns' own log-likelihood by all parameters."""
    P = len(point.beta)
    own = differentiate_joint_normal(
        alone, evaluate_columns(point), FreeParameters(edges, np.zeros(P, dtype=bool)), expected=expected
    )
    # There a, s2, mu, Q vary; the first two belong to the placeholder response.
    places = np.arange(2 + P, P + len(own.score))
    score, information = np.zeros(P + len(own.score)), np.zeros((P + len(own.score),) * 2)
    score[places], information[np.ix_(places, places)] = own.score[2:], own.information[2:, 2:]
    return JointNormalDerivatives(own.log_likelihood, score, information)


def response_score(
    point: JointNormalPoint, joint: MissingModel, sums: ResponseSums, seen: Bools, edges: Bools
) -> Floats:
    """Score of the response's likelihood, (d,)."""
    residuals = sums.with_columns[:, 0]
    w = _centered(point, joint, sums, seen)
    by_beta = w.sum(axis=0) + 2.0 * sums.by_v @ joint.h
    cross = w.T @ joint.h
    by_Q = cross + cross.T + 2.0 * (joint.h.T * sums.by_v) @ joint.h
    i, j = np.nonzero(np.triu(edges))
    return np.concatenate(
        [[residuals.sum(), 0.0], by_beta, -residuals @ joint.slopes, -np.where(i == j, 0.5, 1.0) * by_Q[i, j]]
    )


def _centered(point: JointNormalPoint, joint: MissingModel, sums: ResponseSums, seen: Bools) -> Floats:
    """E'sum of L_m (x - mu) by pattern, (G, P)."""
    u = sums.with_columns[:, 1:] - sums.with_columns[:, :1] * seen * point.mu
    return np.asarray(u - np.einsum("gij,gj->gi", joint.R, u @ point.Q))


def response_information(
    point: JointNormalPoint,
    joint: MissingModel,
    curvatures: Floats,
    seen: Bools,
    edges: Bools,
    sums: ResponseSums | None = None,
) -> Floats:
    """Information of the response's likelihood, (d, d).

    `curvatures` (G, P + 2, P + 2) are sums by pattern of minus the second derivatives by (m, v), those by m
    with (1, x). Without `sums`, the terms with first derivatives are left out; their expectation is zero.
    """
    P = len(point.beta)
    i, j = np.nonzero(np.triu(edges))
    total = np.zeros((2 + 2 * P + len(i),) * 2)
    ws = None if sums is None else _centered(point, joint, sums, seen)
    for g, own in enumerate(seen):
        E = np.eye(P) - point.Q @ joint.R[g]
        D = np.zeros((P, len(total)))
        D[:, 2 : 2 + P] = np.eye(P)
        D[:, 2 + 2 * P :] = -elementary(joint.h[g], i, j)
        J = np.zeros((P + 2, len(total)))
        J[0, 0], J[0, 2 + P : 2 + 2 * P] = 1.0, -joint.slopes[g]
        J[1 : P + 1] = (E @ D) * own[:, None]
        J[P + 1] = joint.h[g] @ D
        J[P + 1, 2 : 2 + P] += joint.h[g]
        T = np.eye(P + 2)
        T[1 : P + 1, 0] = -(own * point.mu)
        total += J.T @ (T @ curvatures[g] @ T.T) @ J
        if sums is None or ws is None:
            continue
        B = np.zeros_like(D)
        B[:, 2 + 2 * P :] = elementary(ws[g], i, j)
        more = B.T @ joint.R[g] @ D - sums.by_v[g] * D.T @ joint.R[g] @ D
        more[2 + P : 2 + 2 * P] += sums.with_columns[g, 0] * J[1 : P + 1]
        total += more + more.T
    return total


def elementary(values: Floats, i: Ints, j: Ints) -> Floats:
    """Product of the elementary symmetric matrices at (i, j) with a vector: (P, m)."""
    out = np.zeros((len(values), len(i)))
    every = np.arange(len(i))
    out[i, every] = values[j]
    apart = i != j
    out[j[apart], every[apart]] = values[i[apart]]
    return out


def without_scale(values: Floats) -> Floats:
    """Leave out the place of the residual variance, of a vector or of both axes of a matrix."""
    for axis in range(values.ndim):
        values = np.delete(values, SCALE_INDEX, axis=axis)
    return values
