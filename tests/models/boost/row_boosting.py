"""Boosting of rows: every learner a table of columns over all seen points, without a sum of products."""

from __future__ import annotations

import numpy as np

from fedstat.kernels.curves import difference_penalty, integration_weights, spline_basis

NONE = np.zeros((1, 1))


def along(columns, basis):
    """Columns (n, k) or (n, G, k) times functions of t (G, l), for the rows of vec Y: (n G, k l), t slow."""
    columns = np.asarray(columns)
    columns = columns if columns.ndim == 3 else np.repeat(columns[:, None], len(basis), axis=1)
    D = np.einsum("ngk,gl->nglk", columns, basis)
    return D.reshape(-1, D.shape[2] * D.shape[3])


def both(K1, K2):
    """FDboost's penalty of two directions, t slow."""
    return np.kron(K2, np.eye(len(K1))) + np.kron(np.eye(len(K2)), K1)


def centered(Z):
    """Effects that add up to zero."""
    return Z @ np.linalg.qr(Z.sum(axis=0)[:, None], mode="complete")[0][:, 1:]


def integrals(x, s, knots):
    return (x * integration_weights(s)) @ spline_basis(s, 0, 1, knots)


def boost(learners, Y, steps, nu=0.1):
    """Path over learners (columns over all points, penalty, df): those taken, loss and fit (n, G)."""
    seen = ~np.isnan(Y).ravel()
    left = (Y - np.nanmean(Y, axis=0)).ravel()[seen]
    fits, chosen = [], []
    for D, K, df in learners:
        gram = D[seen].T @ D[seen]
        if df >= len(K) - 1e-9:
            middle = -60.0
        else:
            low, high = -60.0, 60.0
            for _ in range(120):
                middle = (low + high) / 2
                H = np.linalg.solve(
                    gram + np.exp(middle) * K + 1e-12 * np.trace(gram) / len(K) * np.eye(len(K)), gram
                )
                low, high = (middle, high) if 2 * np.trace(H) - (H * H.T).sum() > df else (low, middle)
        fits.append((D, np.linalg.pinv(gram + np.exp(middle) * K, hermitian=True) @ D[seen].T))
    total = np.zeros(Y.size)
    for _ in range(steps):
        coefs = [H @ left for _, H in fits]
        losses = [((left - D[seen] @ c) ** 2).sum() for (D, _), c in zip(fits, coefs, strict=True)]
        best = int(np.argmin(losses))
        step = nu * fits[best][0] @ coefs[best]
        total += step
        left = left - step[seen]
        chosen.append(best)
    return chosen, float(left @ left), total.reshape(Y.shape) + np.nanmean(Y, axis=0)


def smooth(k, order):
    return difference_penalty(k, order)
