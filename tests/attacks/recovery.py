"""Attacks that recover rows from what passes in an iterative exchange.

X is a client's block with standardized columns, h^t = X beta^t its linear predictor in round t, e^t the
residuals that are handed to it.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from scipy.optimize import least_squares

from fedstat.typing import Array


def relative_error(guess: Array, truth: Array) -> float:
    """Error relative to guessing every column's mean."""
    return float(np.linalg.norm(guess - truth) / np.linalg.norm(truth - truth.mean(axis=0)))


def gram_by_nystrom(moves: Array, residuals: Array) -> Array:
    """All inner products of rows, G = XX', from h^(t+1) - h^t = G e^t: Y (E'Y)^+ Y'.

    Parameters
    ----------
    moves, residuals : (n, T) arrays
        Y and E.
    """
    return moves @ np.linalg.pinv(residuals.T @ moves, rcond=1e-9) @ moves.T


def rows_by_procrustes(gram: Array, known: Array, rows: Array) -> Array:
    """All rows from their inner products and a few rows that are known: (n, p)."""
    p = rows.shape[1]
    values, vectors = np.linalg.eigh(gram)
    factor = vectors[:, -p:] * np.sqrt(np.maximum(values[-p:], 0.0))
    U, _, Vt = np.linalg.svd(factor[known].T @ rows)
    return factor @ (U @ Vt)


def rows_by_regression(seen: Array, known: Array, rows: Array) -> Array:
    """All rows, as the linear function of what is seen that fits the known rows best."""
    if not seen.shape[1]:
        return np.tile(rows.mean(axis=0), (len(seen), 1))
    spread = seen.std(axis=0)
    # Differences in the last bits of a fixed-point number are rounding and are not scaled up.
    unit = np.where(spread > 1e-7 * spread.max(), spread, 1.0)
    Z = np.column_stack([np.ones(len(seen)), (seen - seen.mean(axis=0)) / unit])
    return Z @ np.linalg.lstsq(Z[known], rows, rcond=1e-10)[0]


def span(predictors: Array, rank: int) -> Array:
    """Orthonormal basis of the columns' space from linear predictors (n, T)."""
    return np.linalg.svd(predictors, full_matrices=False)[0][:, :rank]


def binary_columns(basis: Array, seed: int = 0) -> list[Array]:
    """Binary columns in a space: every assignment on as many rows as it has dimensions is tried."""
    n = len(basis)
    Z = np.column_stack([np.ones(n), basis])
    q = Z.shape[1]
    rng = np.random.default_rng(seed)
    choices = [rng.choice(n, q, replace=False) for _ in range(200)]
    chosen = min(choices, key=lambda rows: np.linalg.cond(Z[rows]))
    found = []
    for values in product((0.0, 1.0), repeat=q):
        column = Z @ np.linalg.solve(Z[chosen], values)
        if np.abs(column - np.rint(column)).max() < 1e-4 and set(np.rint(column)) == {0.0, 1.0}:
            found.append(np.rint(column))
    return found


def rows_of_a_client_with_gaps(
    predictors: Array, residuals: Array, s2: Array, sums: Array, n: int, eta: float
) -> Array:
    """Rows of a client with two columns that lacks entities, up to the order and sign of the columns.

    The recursion of its coefficients, means and covariance is simulated for X = F A, with F a basis of the
    linear predictors. The unknown A is fitted to what was sent, and its rotation found from the unit
    variance of standardized columns. No row is known beforehand.

    Parameters
    ----------
    predictors : (n_k, T + 1) array
        Linear predictors h^0 .. h^T of its entities.
    residuals : (n_k, T) array
        s2 z^t.
    s2 : (T,) array
        Residual variances.
    sums : (T, 3) array
        Sums of z, z^2 and 1 / v over the entities it lacks.
    n : int
        Entities of the fit.
    eta : float
        Learning rate.
    """
    n_seen = len(predictors)
    F = span(predictors, 2)
    g = F.T @ predictors
    Fe, total = F.T @ residuals, residuals.sum(axis=0)
    scale = np.linalg.norm(g)

    def simulate(values: Array) -> Array:
        A = np.array([[values[0], 0.0], [values[1], values[2]]]) * np.sqrt(n_seen)
        S2 = A.T @ A
        beta, mu, Sigma = np.zeros(2), np.zeros(2), S2 / n_seen
        out = []
        for t in range(residuals.shape[1]):
            w = Sigma @ beta
            z, z2, h = sums[t]
            score = A.T @ Fe[:, t] - mu * total[t] + s2[t] * w * (z2 - h)
            mu_new = mu - n_seen / n * mu + w * (z / n)
            d = mu - mu_new
            cross = np.outer(d, w) * z
            scatter = S2 + n_seen * np.outer(mu_new, mu_new) + cross + cross.T
            scatter += (n - n_seen) * (Sigma + np.outer(d, d)) + np.outer(w, w) * (z2 - h)
            beta, mu, Sigma = beta + eta / n * score, mu_new, scatter / n
            out.append(A @ beta)
        return (np.array(out).T - g[:, 1:]).ravel() / scale

    starts = [np.array([a, b, c]) for a in (0.6, 1.0, 1.4) for b in (-0.5, 0.0, 0.5) for c in (0.6, 1.0, 1.4)]
    fits = [least_squares(simulate, start, xtol=1e-15, ftol=1e-15, gtol=1e-15) for start in starts]
    a, b, c = min(fits, key=lambda fit: fit.cost).x
    L = np.array([[a, 0.0], [b, c]]) * np.sqrt(n_seen)
    _, vectors = np.linalg.eigh(L.T @ L)
    return F @ L @ vectors @ np.array([[1.0, -1.0], [1.0, 1.0]]) / np.sqrt(2.0)


def align_columns(guess: Array, truth: Array) -> Array:
    """Put the columns of a guess into the order and sign of the truth."""
    correlation = np.corrcoef(guess.T, truth.T)[: guess.shape[1], guess.shape[1] :]
    order = np.abs(correlation).argmax(axis=0)
    return guess[:, order] * np.sign(correlation[order, np.arange(truth.shape[1])])
