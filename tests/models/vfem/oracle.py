"""The observed-data log-likelihood of VFEM on pooled data, written out entity by entity.

Beside it: simulated data of which sites hold parts, and what is needed to compare them with a fit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pandas as pd
from statsmodels.tools.numdiff import approx_fprime_cs, approx_hess_cs

import fedstat as fs

ITERATIVE = {"exchange": "iterative", "masked": False}


class Pooled:
    """Pooled data: y (n,), a list of blocks (n, p_k) with nan rows where a client lacks an entity."""

    def __init__(self, y, blocks):
        self.y, self.blocks = np.asarray(y, dtype=float), [np.asarray(b, dtype=float) for b in blocks]
        self.sizes = [b.shape[1] for b in blocks]
        self.seen = np.column_stack([~np.isnan(b).any(axis=1) for b in blocks])

    def unpack(self, theta):
        """Read theta = (beta0, s2, beta..., mu..., vech Sigma...)."""
        beta0, s2 = theta[:2]
        at, betas, mus, Sigmas = 2, [], [], []
        for out in (betas, mus):
            for p in self.sizes:
                out.append(theta[at : at + p])
                at += p
        for p in self.sizes:
            S = np.zeros((p, p), dtype=theta.dtype)
            i, j = np.tril_indices(p)
            S[i, j] = theta[at : at + len(i)]
            S[j, i] = theta[at : at + len(i)]
            Sigmas.append(S)
            at += len(i)
        return beta0, s2, betas, mus, Sigmas

    def pack(self, beta0, s2, betas, mus, Sigmas):
        tril = [S[np.tril_indices(len(S))] for S in Sigmas]
        return np.concatenate([[beta0, s2], *betas, *mus, *tril])

    def loglike(self, theta):
        return self.loglike_obs(theta).sum()

    def loglike_obs(self, theta):
        beta0, s2, betas, mus, Sigmas = self.unpack(np.asarray(theta))
        mean = np.full(len(self.y), beta0, dtype=np.asarray(theta).dtype)
        v = np.full(len(self.y), s2, dtype=np.asarray(theta).dtype)
        out = np.zeros(len(self.y), dtype=np.asarray(theta).dtype)
        for k, (b, m, S) in enumerate(zip(betas, mus, Sigmas, strict=True)):
            has = self.seen[:, k]
            X = self.blocks[k][has]
            mean[has] += X @ b
            mean[~has] += m @ b
            v[~has] += b @ S @ b
            U = X - m
            out[has] += -0.5 * (
                np.log(2 * np.pi) * len(m)
                + np.log(np.linalg.det(S))
                + np.sum(U.T * np.linalg.solve(S, U.T), axis=0)
            )
        return out - 0.5 * (np.log(2 * np.pi * v) + (self.y - mean) ** 2 / v)

    def score(self, theta):
        return approx_fprime_cs(theta, self.loglike)

    def hessian(self, theta):
        return approx_hess_cs(theta, self.loglike)

    @property
    def reported(self):
        """Places of beta0 and beta in theta."""
        return [0, *range(2, 2 + sum(self.sizes))]

    def scores(self, theta):
        """Score of every entity, (n, d)."""
        return approx_fprime_cs(theta, self.loglike_obs)

    def saturated(self):
        """Largest log-likelihood of the blocks alone: normal, at each block's own mean and covariance."""
        total = 0.0
        for X in self.seen_rows():
            n, p = X.shape
            _, log_det = np.linalg.slogdet(np.cov(X.T, bias=True).reshape(p, p))
            total -= 0.5 * n * (p * np.log(2 * np.pi) + log_det + p)
        return total

    def seen_rows(self):
        return [X[has] for X, has in zip(self.blocks, self.seen.T, strict=True)]

    def relative_score(self, theta, information):
        """Largest score in standard deviations of the score, that is over the root of the information."""
        return np.abs(self.score(theta) / np.sqrt(np.diag(information))).max()

    def joint_moments(self, theta):
        """Mean and covariance of (x_1, ..., x_K, y)."""
        beta0, s2, betas, mus, Sigmas = self.unpack(np.asarray(theta))
        beta, mu, p = np.concatenate(betas), np.concatenate(mus), sum(self.sizes)
        S = np.zeros((p, p), dtype=np.asarray(theta).dtype)
        edges = np.cumsum([0, *self.sizes])
        for k, Sigma in enumerate(Sigmas):
            S[edges[k] : edges[k + 1], edges[k] : edges[k + 1]] = Sigma
        C = np.block([[S, (S @ beta)[:, None]], [(beta @ S)[None, :], np.array([[s2 + beta @ S @ beta]])]])
        return np.append(mu, beta0 + mu @ beta), C

    def predict(self, theta, X=None):
        """E[y | seen columns] and Var[y | seen columns], (n,) each: conditioning in the joint normal law."""
        m, C = self.joint_moments(theta)
        X = np.column_stack(self.blocks) if X is None else X
        mean, variance = np.empty(len(X), dtype=m.dtype), np.empty(len(X), dtype=m.dtype)
        for i, row in enumerate(X):
            has = np.flatnonzero(~np.isnan(row))
            weights = np.linalg.solve(C[np.ix_(has, has)], C[has, -1]) if len(has) else np.zeros(0)
            mean[i] = m[-1] + weights @ (row[has] - m[has])
            variance[i] = C[-1, -1] - weights @ C[has, -1]
        return mean, variance


@dataclass(frozen=True)
class Study:
    """A table whose rows are entities, and who holds which columns; a client lacks a row where all are nan.

    Parameters
    ----------
    table : DataFrame
        Column "y" and the covariates.
    columns : dict of str to list of str
        Covariates of each client.
    holder : str
        Client of the response; among `columns`, or with the response alone.
    """

    table: pd.DataFrame
    columns: dict[str, list[str]]
    holder: str

    @property
    def covariates(self):
        return [name for names in self.columns.values() for name in names]

    def frames(self):
        out = {}
        for site in dict.fromkeys([self.holder, *self.columns]):
            names = self.columns.get(site, [])
            frame = self.table[["y", *names]] if site == self.holder else self.table[names].dropna(how="all")
            out[site] = frame.rename_axis("id").reset_index()
        return out

    def partition(self, **options):
        return fs.ClientPartition.from_frames(self.frames(), on="id", **({"shared_seed": 7} | options))

    def model(self, formula="y ~ .", **options):
        """Model of the publication, whose blocks are independent, unless the options say otherwise."""
        options = {"between": "independent"} | options
        return fs.VFEMRegression.from_formula(formula, self.partition(), **options)

    def pooled(self):
        return Pooled(self.table["y"], [self.table[names] for names in self.columns.values()])

    def theta(self, model, result):
        """All parameters of the fit that was made last, as :class:`Pooled` packs them."""
        found = [block_parameters(model, site) for site in self.columns]
        return self.pooled().pack(result.params["Intercept"], result.scale, *zip(*found, strict=True))


def block_parameters(model, site):
    """beta, mu, Sigma in the units of the data, from what the client's site remembers of the last fit."""
    block = model.partition.sites[site].states[model._session].look_at("vfem")
    at, scale = block.current, block.scale
    return at.beta / scale, block.shift + scale * at.mu, at.Sigma * np.outer(scale, scale)


def simulate(seed=0, n=500, holder="Bank", missing="mar", slopes=None):
    """Three sites with two, three and two columns of different scales; one column has no effect.

    With missing="mar" the Court lacks records where y is small and the Bank's own columns are there half the
    time; all records are present with missing="none".
    """
    rng = np.random.default_rng(seed)
    mix = np.array([[1.0, 0.4, 0.2], [0.0, 1.0, 0.3], [0.0, 0.0, 0.8]])
    blocks = {
        "Bank": rng.normal(size=(n, 2)) @ [[1.0, 0.5], [0.0, 1.0]],
        "Court": rng.normal(size=(n, 3)) @ mix + [3.0, 0.0, -2.0],
        "Tax": rng.normal(size=(n, 2)) * [10.0, 0.1] + [100.0, 0.0],
    }
    slopes = slopes or {"Bank": [0.5, -0.3], "Court": [0.4, 0.0, -0.6], "Tax": [0.05, 3.0]}
    y = 1.0 + sum(X @ slopes[site] for site, X in blocks.items()) + rng.normal(size=n)
    columns = {site: [f"{site.lower()}{j}" for j in range(X.shape[1])] for site, X in blocks.items()}
    table = pd.concat([pd.DataFrame(X, columns=columns[c]) for c, X in blocks.items()], axis=1)
    table.insert(0, "y", y)
    if missing != "none":
        lacks_court = 1.0 / (1.0 + np.exp((y - y.mean()) / y.std()))
        for site, share in {"Bank": 0.25, "Court": lacks_court, "Tax": 0.4}.items():
            table.loc[rng.random(n) < share, columns[site]] = np.nan
    return Study(table, columns, holder)


def packed(**given):
    """Arguments of a fit, with the options of the iterative exchange in one ``fs.Iteration``."""
    own = {one.name: given.pop(one.name) for one in fields(fs.Iteration) if one.name in given}
    return given | ({"iteration": fs.Iteration(**own)} if own else {})
