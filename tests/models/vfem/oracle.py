"""The observed-data log-likelihood of VFEM on pooled data, written out entity by entity."""

from __future__ import annotations

import numpy as np
from statsmodels.tools.numdiff import approx_fprime_cs, approx_hess_cs


class Pooled:
    """Pooled data: y (n,), a list of blocks (n, p_k) with nan rows where a client lacks an entity."""

    def __init__(self, y, blocks):
        self.y, self.blocks = y, blocks
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
