"""The joint log-likelihood of columns of one normal law and a binary or count response, on pooled data.

Entity by entity, with the covariance of all columns and a Gauss-Hermite rule with many nodes, all in numpy so
that complex steps differentiate it. Parameters: beta0, beta (P,), mu (P,), vech Sigma.
"""

import numpy as np
import pandas as pd
from glm_oracle import PooledGLM, hessian_information
from oracle import Study
from scipy.optimize import minimize
from statsmodels.tools.numdiff import approx_fprime_cs


class PooledJoint:
    """Pooled data: y (n,), X (n, P) with nan where a site lacks an entity; a link of PooledGLM.

    `zero` lists pairs of columns that are independent given all others.
    """

    def __init__(self, y, X, link, nodes=40):
        self.y, self.X = np.asarray(y, dtype=float), np.asarray(X, dtype=float)
        self.seen, self.P = np.isfinite(self.X), self.X.shape[1]
        self.glm = PooledGLM(self.y, [self.X], link, nodes)
        patterns, code = np.unique(self.seen, axis=0, return_inverse=True)
        self.groups = [(own, np.flatnonzero(code.ravel() == g)) for g, own in enumerate(patterns)]

    def unpack(self, theta):
        P = self.P
        S = np.zeros((P, P), dtype=theta.dtype)
        i, j = np.tril_indices(P)
        S[i, j] = S[j, i] = theta[1 + 2 * P :]
        return theta[0], theta[1 : 1 + P], theta[1 + P : 1 + 2 * P], S

    def pack(self, beta0, beta, mu, Sigma):
        return np.concatenate([[beta0], beta, mu, Sigma[np.tril_indices(self.P)]])

    def linear(self, theta):
        """Mean and variance of every linear predictor given what is seen."""
        beta0, beta, mu, S = self.unpack(np.asarray(theta))
        m, v = np.zeros(len(self.y), dtype=S.dtype), np.zeros(len(self.y), dtype=S.dtype)
        for own, rows in self.groups:
            C = np.linalg.solve(S[np.ix_(own, own)], S[np.ix_(own, ~own)])
            U = self.X[np.ix_(rows, own)] - mu[own]
            m[rows] = beta0 + mu @ beta + U @ (beta[own] + C @ beta[~own])
            v[rows] = beta[~own] @ (S[np.ix_(~own, ~own)] - S[np.ix_(~own, own)] @ C) @ beta[~own]
        return m, v

    def columns(self, theta):
        """Log-likelihood of the columns of every entity."""
        _, _, mu, S = self.unpack(np.asarray(theta))
        out = np.zeros(len(self.y), dtype=S.dtype)
        for own, rows in self.groups:
            V, U = S[np.ix_(own, own)], self.X[np.ix_(rows, own)] - mu[own]
            log_det = np.log(np.linalg.det(V)) if own.any() else 0.0
            square = np.sum(U.T * np.linalg.solve(V, U.T), axis=0)
            out[rows] = -0.5 * (own.sum() * np.log(2.0 * np.pi) + log_det + square)
        return out

    def loglike(self, theta):
        m, v = self.linear(theta)
        return np.sum(self.glm.log_response(m, v) + self.columns(theta))

    def score(self, theta):
        return approx_fprime_cs(theta, self.loglike)

    def information(self, theta):
        return hessian_information(theta, self.glm, self.linear, self.columns)

    @property
    def reported(self):
        """Places of beta0 and beta."""
        return np.arange(1 + self.P)

    def bse(self, information):
        return np.sqrt(np.diag(np.linalg.inv(information)))[self.reported]

    def mean(self, theta):
        """E[y | what is seen], (n,)."""
        m, v = self.linear(theta)
        eta = m[:, None] + np.sqrt(v)[:, None] * self.glm.x
        inverse = {"Logit": lambda e: 1.0 / (1.0 + np.exp(-e)), "Log": np.exp}[self.glm.link]
        return inverse(eta) @ np.exp(self.glm.log_w)

    def maximize(self, start):
        """Find the maximum from a start, by BFGS and Newton steps."""

        def loss(theta):
            if np.linalg.eigvalsh(self.unpack(theta)[3])[0] <= 0.0:
                return np.inf
            return -self.loglike(theta)

        theta = minimize(loss, start, jac=lambda t: -self.score(t), method="BFGS", options={"gtol": 1e-4}).x
        for _ in range(3):
            theta = theta + np.linalg.solve(self.information(theta), self.score(theta))
        return theta

    def start(self):
        """No effects, and moments of what is seen, with columns independent."""
        mean, var = np.nanmean(self.X, axis=0), np.nanvar(self.X, axis=0)
        return self.pack(0.0, np.zeros(self.P), mean, np.diag(var))


def correlated(seed, n, sizes=(2, 1, 2), rho=0.5, shares=(0.0, 0.4, 0.5), count=False, mar=True, holder="A"):
    """Sites A, B, ... with correlated blocks, missing for small first columns of A or by lot."""
    rng = np.random.default_rng(seed)
    P = sum(sizes)
    names = [f"{k.lower()}{i}" for k, p in zip("ABCDE", sizes, strict=False) for i in range(1, p + 1)]
    Sigma = rho * np.ones((P, P)) + (1.0 - rho) * np.eye(P)
    X = rng.multivariate_normal(np.linspace(-0.5, 1.0, P), Sigma, size=n)
    beta = np.where(np.arange(P) % 2, -0.6, 0.9)
    eta = 0.2 + X @ beta
    y = rng.poisson(np.exp(0.4 * eta)) if count else rng.random(n) < 1.0 / (1.0 + np.exp(-eta))
    table = pd.DataFrame(X, columns=names)
    table.insert(0, "y", np.asarray(y, dtype=float))
    columns, at = {}, 0
    first = X[:, 0].copy()
    for k, p, share in zip("ABCDE", sizes, shares, strict=False):
        columns[k] = names[at : at + p]
        at += p
        chance = share * 2.0 / (1.0 + np.exp(1.5 * (first - first.mean()))) if mar else np.full(n, share)
        table.loc[rng.random(n) < chance, columns[k]] = np.nan
    return Study(table, columns, holder)
