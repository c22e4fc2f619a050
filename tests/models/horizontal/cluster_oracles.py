"""CR2 on the pooled rows in dense algebra: hat matrices of clusters, row by row and event by event."""

from __future__ import annotations

import numpy as np
import statsmodels.formula.api as smf


def power_of(matrix, power):
    """Power of a symmetric matrix; directions of eigenvalue zero stay zero."""
    values, vectors = np.linalg.eigh(matrix)
    return vectors * np.where(values > 1e-9, np.maximum(values, 1e-9) ** power, 0.0) @ vectors.T


def covariance(blocks, inverse):
    """Covariance and effective clusters from each cluster's standardized columns (m, p) and residuals."""
    meat, shares = np.zeros_like(inverse), []
    for D, r in blocks:
        score = D.T @ power_of(np.eye(len(r)) - D @ inverse @ D.T, -0.5) @ r
        meat += np.outer(score, score)
        shares.append(np.diag(inverse @ D.T @ D @ inverse) / np.diag(inverse))
    return inverse @ meat @ inverse, 1.0 / (np.array(shares) ** 2).sum(axis=0)


def glm(formula, table, family, groups, **given):
    """Pooled GLM: covariance and effective clusters."""
    model = smf.glm(formula, table, family=family, **given)
    fit = model.fit(tol=1e-14, maxiter=200)
    slope, w = family.link.deriv(fit.mu), given.get("freq_weights", np.ones(len(table)))
    root = np.sqrt(np.asarray(w) / (slope**2 * family.variance(fit.mu)))
    D, r = model.exog * root[:, None], root * slope * (model.endog - fit.mu)
    rows = table.groupby(groups).indices.values()
    return covariance([(D[own], r[own]) for own in rows], np.linalg.inv(D.T @ D))


def multinomial(X, y, B, code):
    """Baseline logits B (J - 1, p): the score of each cluster and a root of its information, as rows."""
    width = len(B)
    eta = np.column_stack([np.zeros(len(X)), X @ B.T])
    P = np.exp(eta) / np.exp(eta).sum(axis=1, keepdims=True)
    blocks = []
    for own in (np.flatnonzero(code == one) for one in np.unique(code)):
        parts = []
        for i in own:
            p = P[i, 1:]
            H, g = np.diag(p) - np.outer(p, p), (np.arange(1, width + 1) == y[i]) - p
            L = np.linalg.cholesky(H)
            parts.append((np.kron(L.T, X[i]), np.linalg.solve(L, g)))
        blocks.append(tuple(np.concatenate([part[k] for part in parts]) for k in (0, 1)))
    inverse = np.linalg.inv(sum(D.T @ D for D, _ in blocks))
    return covariance(blocks, inverse)


def ordinal(X, y, thresholds, slopes, code):
    """Proportional odds, parameters thresholds and slopes: the same."""
    F = lambda eta: 1.0 / (1.0 + np.exp(-eta))  # noqa: E731
    ends = np.concatenate([[-np.inf], thresholds, [np.inf]])
    K, blocks = len(thresholds), []
    for own in (np.flatnonzero(code == one) for one in np.unique(code)):
        parts = []
        for i in own:
            high, low = (F(end - X[i] @ slopes) for end in (ends[y[i] + 1], ends[y[i]]))
            # log(F(a) - F(b)) has derivatives 1 - F(a) - F(b) by the slopes, and those of a and b apart.
            up, down = high * (1.0 - high), low * (1.0 - low)
            g, Z = np.array([up, -down]) / (high - low), np.zeros((2, K + len(slopes)))
            H = np.outer(g, g) - np.diag([up * (1 - 2 * high), -down * (1 - 2 * low)]) / (high - low)
            for row, end in enumerate((y[i], y[i] - 1)):
                if 0 <= end < K:
                    Z[row, end] = 1.0
                Z[row, K:] = -X[i]
            there = [row for row, end in enumerate((y[i], y[i] - 1)) if 0 <= end < K]
            L = np.linalg.cholesky(H[np.ix_(there, there)])
            parts.append((L.T @ Z[there], np.linalg.solve(L, g[there])))
        blocks.append(tuple(np.concatenate([part[k] for part in parts]) for k in (0, 1)))
    inverse = np.linalg.inv(sum(D.T @ D for D, _ in blocks))
    return covariance(blocks, inverse)


def cox(table, columns, beta, baselines, groups="cluster"):
    """Breslow's partial likelihood as Poisson regression: a row for each row at risk at each event time.

    Each value of `baselines` has a hazard at each event time. Its level is a column of the regression that
    leverage is computed with; hazards that differ in form alone are taken as known.
    """
    rows, level = [], 0
    for _, part in table.groupby(baselines):
        X, time, event = part[columns].to_numpy(), part["time"].to_numpy(), part["event"].to_numpy() == 1
        risk = np.exp(X @ beta)
        for t in np.unique(time[event]):
            there = time >= t
            mean = risk[there] @ X[there] / risk[there].sum()
            hazard = (event & (time == t)).sum() / risk[there].sum()
            for i in np.flatnonzero(there):
                e = hazard * risk[i]
                died = float(event[i] and time[i] == t)
                rows.append((part[groups].iloc[i], level, e, died - e, *(X[i] - mean)))
        level += 1
    rows = np.array(rows, dtype=float)
    code, stratum, e, residual, Z = rows[:, 0], rows[:, 1].astype(int), rows[:, 2], rows[:, 3], rows[:, 4:]
    levels = np.eye(level)[stratum] / np.sqrt(np.bincount(stratum, e))[stratum, None]
    D, r = np.column_stack([levels, Z]) * np.sqrt(e)[:, None], residual / np.sqrt(e)
    inverse = np.eye(D.shape[1])
    inverse[level:, level:] = np.linalg.inv(D[:, level:].T @ D[:, level:])
    # A cluster may have thousands of such rows; the function of the hat matrix has the rank of the columns.
    meat, shares, root = np.zeros_like(inverse), [], power_of(inverse, 0.5)
    for one in np.unique(code):
        own = code == one
        Q = root @ D[own].T @ D[own] @ root
        score = np.linalg.solve(root, power_of(np.eye(len(Q)) - Q, -0.5) @ root @ D[own].T @ r[own])
        meat += np.outer(score, score)
        V = inverse[level:, level:]
        shares.append(np.diag(V @ (D[own].T @ D[own])[level:, level:] @ V) / np.diag(V))
    cov = inverse @ meat @ inverse
    return cov[level:, level:], 1.0 / (np.array(shares) ** 2).sum(axis=0)
