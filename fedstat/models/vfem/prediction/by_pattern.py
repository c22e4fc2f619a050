"""Prediction where columns depend between institutions: coefficients for every set of columns that is seen.

Of the columns M that an entity lacks, the mean given those that it has, S, is linear in them, with slopes
C = Sigma_MS Sigma_SS^-1. The mean of the response is a + b'(x_S - mu_S), b = beta_S + C'beta_M, its variance
v = s2 + beta_M'Q_MM^-1 beta_M with Q the concentration of the columns; b moves by E'dbeta with beta,
E = (I; C), and by -E'dQ h with Q, h = Q_MM^-1 beta_M; v moves by 2 h'dbeta - h'dQ h. Where the response is
not normal all this is said of its linear predictor, and s2 is no part of v.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedstat.errors import NotAvailableError
from fedstat.federation.rounds.engine import Rounds
from fedstat.models.vertical.moments import number_patterns
from fedstat.models.vertical.prediction.protocol import OpenedBlocks
from fedstat.models.vfem.blocks.glm_distribution import NORMAL
from fedstat.models.vfem.blocks.request import ask
from fedstat.models.vfem.covariance.psi import Places
from fedstat.models.vfem.iteration.fit import NormalLaw, VFEMFit
from fedstat.typing import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class SeenLaw:
    """Law of the response given the columns that are seen.

    `slopes` (P,) are zero at columns that are not; `variance` is that of the response. `factor` (1 + P, r) is
    a root of the covariance of mean and slopes, for columns less their means; zero where not seen, too. A
    last row, (2 + P, r), is that of the variance, where the response is not normal.
    """

    slopes: Floats
    variance: float
    factor: Floats | None


def seen_law(
    law: NormalLaw, s2: float, seen: Bools, psi: Floats | None, *, of_variance: bool = False
) -> SeenLaw:
    """Take the law of the response given the columns in `seen` (P,); `psi` has the covariance of all."""
    P = len(seen)
    Q = np.linalg.inv(law.cov[:-1, :-1])
    beta = Q @ law.cov[:-1, -1]
    lacks = ~seen
    E, h = np.eye(P) * seen, np.zeros(P)
    if lacks.any():
        E[np.ix_(lacks, seen)] = -np.linalg.solve(Q[np.ix_(lacks, lacks)], Q[np.ix_(lacks, seen)])
        h[lacks] = np.linalg.solve(Q[np.ix_(lacks, lacks)], beta[lacks])
    slopes, variance = E.T @ beta, s2 + float(beta @ h)
    if psi is None:
        return SeenLaw(slopes, variance, None)
    i, j = np.nonzero(np.triu(law.edges))
    by_Q = -(E.T[:, i] * h[j] + np.where(i == j, 0.0, E.T[:, j] * h[i]))
    J = np.zeros((1 + P + int(of_variance), 2 + 2 * P + len(i)))
    J[0, 0] = 1.0
    J[0, 2 + P : 2 + 2 * P] = -slopes
    J[1 : 1 + P, 2 : 2 + P], J[1 : 1 + P, 2 + 2 * P :] = E.T, by_Q
    if of_variance:
        J[-1, 2 : 2 + P], J[-1, 2 + 2 * P :] = 2.0 * h, -np.where(i == j, 1.0, 2.0) * h[i] * h[j]
    values, vectors = np.linalg.eigh(J @ psi @ J.T)
    factor = np.asarray(vectors * np.sqrt(values.clip(min=0.0)))
    factor[1 : 1 + P][lacks] = 0.0  # and not nearly: nothing is asked of a column that is missing
    return SeenLaw(slopes, variance, factor)


@dataclass(frozen=True, slots=True, eq=False)
class LawPrediction:
    """Mean and variance of the response by entity (n,), and their derivatives times a factor (n, r).

    Those of the variance are zero where the response is normal.
    """

    mean: Floats
    variance: Floats
    gradients: tuple[Floats, Floats] | None


def predict_by_pattern(
    fit: VFEMFit, clients: tuple[str, ...], psi: Floats | None, opened: OpenedBlocks
) -> Rounds[LawPrediction]:
    """Ask every institution for one linear predictor of each entity, by the columns that the entity has."""
    law = fit.law
    assert law is not None
    places = block_places(fit, clients)
    seen = seen_columns(opened, clients, places)
    first, code, _ = number_patterns(seen)
    whole = None if psi is None else column_order(psi, fit, clients)
    normal, P = fit.distribution == NORMAL, len(law.mean) - 1
    laws = [seen_law(law, fit.s2, row, whole, of_variance=not normal) for row in seen[first]]
    mean = np.full(len(seen), law.mean[-1])
    slopes = np.array([one.slopes for one in laws])
    replies = yield [
        ask(
            k,
            "predict_by_pattern",
            opened.session,
            slopes=slopes[:, places[k]],
            code=code[rows],
        )
        for k, rows in opened.rows.items()
    ]
    for (k, rows), reply in zip(opened.rows.items(), replies, strict=True):
        mean[rows] += reply.arrays["linear_predictor"] - (slopes[:, places[k]] @ fit.mu[k])[code[rows]]
    variance = np.array([one.variance for one in laws])[code]
    if psi is None:
        return LawPrediction(mean, variance, None)
    factors = np.array([one.factor for one in laws])
    gradient = factors[code, 0]
    replies = yield [
        ask(
            k,
            "project_by_pattern",
            opened.session,
            mu=fit.mu[k],
            factors=factors[:, 1 : 1 + P][:, places[k]],
            code=code[rows],
        )
        for k, rows in opened.rows.items()
    ]
    for rows, reply in zip(opened.rows.values(), replies, strict=True):
        gradient[rows] += reply.arrays["projection"]
    return LawPrediction(mean, variance, (gradient, 0.0 * gradient if normal else factors[code, -1]))


def block_places(fit: VFEMFit, clients: tuple[str, ...]) -> Mapping[str, slice]:
    """Where each institution's columns stand in the law."""
    ends = np.cumsum([len(fit.beta[k]) for k in clients]).tolist()
    return {k: slice(end - len(fit.beta[k]), end) for k, end in zip(clients, ends, strict=True)}


def seen_columns(opened: OpenedBlocks, clients: tuple[str, ...], places: Mapping[str, slice]) -> Bools:
    """Which columns each entity has, (n, P)."""
    sizes = [places[k].stop - places[k].start for k in clients]
    seen = ~np.repeat(opened.missing, sizes, axis=1)
    for client, has in opened.has.items():
        seen[opened.rows[client], places[client]] = has
    return seen


def column_order(psi: Floats, fit: VFEMFit, clients: tuple[str, ...]) -> Floats:
    """Bring the covariance of (a, s2, beta_1, mu_1, beta_2, ..., Q) to (a, s2, beta, mu, Q)."""
    places = Places(tuple(len(fit.beta[k]) for k in clients))
    every = np.arange(len(psi))
    if len(psi) == places.total:
        raise NotAvailableError(
            "get_prediction: standard errors for entities that lack columns need the covariance of all "
            "covariances, which a fit of so many columns, or with correction='skewness', does not hold; "
            "predict() does without"
        )
    beta = [every[places.beta(k)] for k in range(len(clients))]
    mu = [every[places.mu(k)] for k in range(len(clients))]
    order: Ints = np.concatenate([[0, 1], *beta, *mu, every[places.total :]])
    return psi[np.ix_(order, order)]
