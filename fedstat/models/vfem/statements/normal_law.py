"""Maximum likelihood of an unrestricted normal law of all columns and the response, from pattern moments.

The law that VFEM assumes has blocks that are independent between clients; this one has not, and stands beside
it in tests of what is assumed. EM in its gradient form: with K_g the inverse of Sigma at what pattern g sees,
and zero elsewhere,

    e = Sigma sum_g K_g d_g / n,    mu += e
    Sigma += Sigma sum_g (K_g D_g K_g - n_g K_g) Sigma / n - e e'

d_g and D_g the sums of (x - mu) and (x - mu)(x - mu)' at what is seen; Anderson's acceleration on top.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.errors import EstimationError
from fedstat.kernels.anderson import anderson_weights
from fedstat.models.vertical.moments import PatternMoments
from fedstat.typing import Bools, Floats

MEMORY = 10
COLLAPSED = 1e-4
"""Share of the smallest eigenvalue at the start below which the covariance counts as singular."""


@dataclass(frozen=True, slots=True, eq=False)
class Normal:
    """A normal law of standardised (x, y), (P + 1,), and its log-likelihood of what is seen."""

    mean: Floats
    cov: Floats
    log_likelihood: float


def observed(moments: PatternMoments) -> Bools:
    """Which columns and, last, the response are seen in each pattern, (G, P + 1)."""
    return np.column_stack([moments.seen, np.ones(len(moments.n), dtype=bool)])


def inverse_by_pattern(cov: Floats, seen: Bools) -> tuple[Floats, Floats]:
    """Inverse of the covariance of what each pattern sees, zero elsewhere, and its log determinant.

    Raises LinAlgError where the covariance is not positive definite.
    """
    both = seen[:, :, None] & seen[:, None, :]
    # One in the place of what is not seen changes neither the inverse of the rest nor the determinant.
    padded = np.where(both, cov, np.eye(len(cov)))
    L = np.linalg.cholesky(padded)
    half = np.linalg.inv(L)
    K = np.matmul(half.transpose(0, 2, 1), half) * both
    return K, 2.0 * np.log(np.diagonal(L, axis1=1, axis2=2)).sum(axis=1)


def centred_sums(moments: PatternMoments, mean: Floats) -> tuple[Floats, Floats]:
    """Take the sums d_g (G, P + 1) and D_g (G, P + 1, P + 1) of what is seen, less the mean."""
    at = observed(moments) * mean
    first = moments.grams[:, 0, 1:]
    d = first - moments.n[:, None] * at
    D = moments.grams[:, 1:, 1:] - first[:, :, None] * at[:, None, :] - at[:, :, None] * d[:, None, :]
    return d, D


def normal_step(moments: PatternMoments, mean: Floats, cov: Floats) -> tuple[Floats, Floats, float]:
    """One EM step: the moves of mean and covariance, and the log-likelihood before it."""
    seen = observed(moments)
    K, log_det = inverse_by_pattern(cov, seen)
    d, D = centred_sums(moments, mean)
    KD = np.matmul(K, D)
    constant = seen.sum(axis=1) * np.log(2.0 * np.pi) + log_det
    log_likelihood = -0.5 * (moments.n @ constant + np.trace(KD, axis1=1, axis2=2).sum())
    move = cov @ np.einsum("gij,gj->i", K, d) / moments.nobs
    inner = np.tensordot(np.ones(len(K)), np.matmul(KD, K) - moments.n[:, None, None] * K, 1)
    spread = cov @ inner @ cov / moments.nobs - np.outer(move, move)
    return move, 0.5 * (spread + spread.T), float(log_likelihood)


def fit_normal(
    moments: PatternMoments, mean: Floats, cov: Floats, *, tol: float = 1e-7, maxiter: int = 2000
) -> Normal:
    """Maximise the likelihood of what is seen over all means and covariances.

    It starts at `mean` and `cov`, and stops when the step, in the complete-data information per entity, is
    below `tol`. Covariances of columns that no entity has together stay where they started; nothing depends
    on them. Raises EstimationError where the covariance becomes singular, or the iteration does not end.
    """
    # One metric for all moves: Anderson mixes by their lengths.
    root = np.linalg.inv(np.linalg.cholesky(cov))
    least = COLLAPSED * smallest_eigenvalue(cov)
    size = len(mean)
    point = np.concatenate([mean, cov.ravel()])
    images: list[Floats] = []
    moves: list[Floats] = []
    best, plain = -np.inf, point
    for _ in range(maxiter):
        mean, cov = point[:size], point[size:].reshape(size, size)
        try:
            move, spread, log_likelihood = normal_step(moments, mean, cov)
        except np.linalg.LinAlgError:
            log_likelihood = -np.inf
        if log_likelihood < best - 1e-10 * abs(best):
            point, images, moves = plain, [], []  # the mixture went too far: on from the plain step
            best = -np.inf
            continue
        best = log_likelihood
        plain = point + np.concatenate([move, spread.ravel()])
        images.append(plain)
        moves.append(np.concatenate([root @ move, (root @ spread @ root.T).ravel() / np.sqrt(2.0)]))
        if np.sqrt(moves[-1] @ moves[-1]) <= tol:
            if smallest_eigenvalue(cov) < least:
                break
            return Normal(mean, cov, log_likelihood)
        images, moves = images[-MEMORY:], moves[-MEMORY:]
        stacked = np.array(moves)
        point = anderson_weights(stacked @ stacked.T) @ np.array(images)
    raise EstimationError(singular_message(moments))


def smallest_eigenvalue(cov: Floats) -> float:
    """Smallest eigenvalue of the correlation matrix."""
    root = np.sqrt(np.diag(cov))
    return float(np.linalg.eigvalsh(cov / np.outer(root, root))[0])


def singular_message(moments: PatternMoments) -> str:
    """Say why there is no unrestricted covariance."""
    both = moments.patterns.T @ (moments.patterns * moments.n[:, None])
    j, k = np.unravel_index(np.where(both > 0.0, both, np.inf).argmin(), both.shape)
    return (
        "an unrestricted covariance of all columns is not determined: "
        f"'{moments.clients[j]}' and '{moments.clients[k]}' share {int(both[j, k]):,} entities; "
        "test under the model's own structure instead"
    )
