"""Continuous columns on normal factors: E step by the Woodbury identity, closed M step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.linalg import block_diag

from fedstat.errors import ModelError
from fedstat.kernels.latent_factors import LOG_2PI, FactorPosterior, factor_moments, factor_posterior
from fedstat.kernels.penalized.group_prox import shrink_rows
from fedstat.models.m2sem.modality.base import BEGINNING, Modality
from fedstat.typing import Array, Bools, Floats, Ints

FLOOR = 1e-3
"""Smallest variance of an error, relative to the variance of its column."""


class GaussianModality(Modality):
    """Continuous columns x = B'z + L eta + e with eta | k ~ N(mu_k, I) and e ~ N(0, diag psi).

    Columns (n, P) are standardized locally, nan where a cell is missing, so that penalties do not depend on
    units. Log densities and profiles are those of the columns in their original units. For new rows, `units`
    (2 P,) are the means and deviations of the columns in the fit.
    """

    kind = "continuous"
    leaps = True

    def __init__(
        self,
        columns: Floats,
        names: Sequence[str],
        factors: int,
        covariates: Floats | None = None,
        units: Floats | None = None,
    ) -> None:
        super().__init__(names, len(columns), factors, covariates)
        cells = ~np.isnan(columns)
        self._cells = cells
        if units is None:
            self._center, self._scale = np.nanmean(columns, axis=0), np.nanstd(columns, axis=0)
        else:
            self._center, self._scale = units.reshape(2, -1)
        constant = [name for name, s in zip(names, self._scale, strict=True) if not s > 0.0]
        if constant:
            raise ModelError(f"expected columns that vary; received {', '.join(constant)}: leave them out")
        self.X = np.where(cells, (columns - self._center) / self._scale, 0.0)
        patterns, at = np.unique(cells, axis=0, return_inverse=True)
        self._seen: Bools = patterns
        self._complete = bool(patterns.all())
        self._pattern: Ints = at.ravel().astype(np.int64)
        self._units = patterns @ np.log(self._scale)
        self.psi = np.ones(self.P)
        self.B = np.zeros((self.P, self.Z.shape[1]))
        self.L = np.zeros((self.P, self.Q))
        self._posterior: FactorPosterior | None = None

    @property
    def loadings(self) -> Floats:
        """Loadings of standardized columns, (P, Q)."""
        return self.L

    @property
    def row_columns(self) -> Ints:
        """Each column has one row."""
        return np.arange(self.P)

    @property
    def units(self) -> Floats:
        """Means and deviations of the columns, (2 P,)."""
        return np.concatenate([self._center, self._scale])

    @property
    def at_floor(self) -> tuple[str, ...]:
        """Columns whose errors have the smallest variance that is allowed."""
        return tuple(name for name, v in zip(self.names, self.psi, strict=True) if v <= FLOOR)

    def begin(self, clusters: int) -> None:
        """Start from principal components, and a factor analysis of one cluster."""
        if self.classes:
            self.locate(clusters)
            return
        counts, X = self._cells.T.astype(float) @ self._cells, self._standardized()
        d, E = np.linalg.eigh(X.T @ X / np.maximum(counts, 1.0))
        rest = d[: -self.Q].mean() if self.Q < self.P else 0.0
        self.L = E[:, -self.Q :] * np.sqrt(np.maximum(d[-self.Q :] - rest, 0.05))
        self.psi = np.maximum(1.0 - (self.L**2).sum(axis=1), 0.1)
        self.B = np.zeros_like(self.B)
        self.means = np.zeros((1, self.Q))
        everyone = np.ones((self.n, 1))
        for _ in range(BEGINNING):
            self.log_densities()
            self._improve_columns(everyone, np.zeros(self.P))
        self.means = np.zeros((clusters, self.Q))

    def _reset(self) -> None:
        self.B, self.L, self.psi = np.zeros_like(self.B), np.zeros((self.P, self.Q)), np.ones(self.P)
        self._posterior = None

    def _standardized(self) -> Floats:
        if self.Z.shape[1] == 1:
            return self.X
        return np.where(self._cells, self.X - self.Z @ np.linalg.lstsq(self.Z, self.X)[0], 0.0)

    def log_densities(self) -> Floats:
        """Return log f(x_i | k), (n, K), of columns in their own units."""
        Y = self.X - self.Z @ self.B.T
        if not self._complete:
            Y[~self._cells] = 0.0
        if self.classes:
            self._posterior = self._of_classes(Y)
        else:
            self._posterior = factor_posterior(Y, self._pattern, self._seen, self.L, self.psi, self.means)
        return np.asarray(self._posterior.f - self._units[self._pattern][:, None])

    def _of_classes(self, Y: Floats) -> FactorPosterior:
        """Return densities of independent columns, residuals Y (n, P); the factors are the fixed means."""
        shifts, weights = self.means @ self.L.T, self._cells / self.psi
        squares = (weights * Y**2).sum(axis=1)[:, None] - 2.0 * (weights * Y) @ shifts.T
        squares += weights @ (shifts**2).T + (self._cells @ (LOG_2PI + np.log(self.psi)))[:, None]
        e = np.broadcast_to(self.means, (self.n, *self.means.shape))
        return FactorPosterior(-0.5 * squares, e, np.zeros((len(self._seen), self.Q, self.Q)))

    def factors_by_cluster(self) -> Floats:
        """Return E[eta | x_i, k], (n, K, Q)."""
        self.log_densities()
        assert self._posterior is not None
        return self._posterior.e

    def improve(
        self, r: Floats, row_penalties: Floats | float = 0.0, means_penalty: float = 0.0, steps: int = 1
    ) -> None:
        """Take M-steps for posteriors r (n, K): in closed form except for one root of each group."""
        penalties = np.broadcast_to(np.asarray(row_penalties, dtype=float), (self.P,))
        for _ in range(steps):
            self.log_densities()
            self._improve_means(*self._improve_columns(r, penalties), means_penalty)

    def _improve_columns(self, r: Floats, row_penalties: Floats) -> tuple[Floats, Floats]:
        """Improve the parameters of columns; return clusters' weights (K,) and mean factors (K, Q)."""
        assert self._posterior is not None
        moments = factor_moments(self.X, self.Z, self._pattern, self._posterior, r)
        q = self.Z.shape[1]
        M = moments.M if len(moments.M) == 1 else np.tensordot(self._seen.T.astype(float), moments.M, 1)
        # Intercepts and slopes are eliminated: S and s are the remaining second moments and products.
        inverse = (
            1.0 / np.maximum(M[:, :1, :1], 1e-300) if q == 1 else np.linalg.pinv(M[:, :q, :q], hermitian=True)
        )
        carried = np.matmul(inverse, M[:, :q, q:])
        S = M[:, q:, q:] - np.matmul(M[:, q:, :q], carried)
        z, x = moments.c[:, None, :q], moments.c[:, q:]
        s = x - np.matmul(z, carried)[:, 0]
        xx = moments.xx - np.matmul(np.matmul(z, inverse), z.transpose(0, 2, 1))[:, 0, 0]
        L = shrink_rows(S, s, row_penalties * self.psi) * self.support[:, None]
        self.B = np.matmul(z, inverse)[:, 0] - np.matmul(carried, L[:, :, None])[:, :, 0]
        self.L = L
        left = xx - 2.0 * (L * s).sum(axis=1) + np.matmul(np.matmul(L[:, None, :], S), L[:, :, None])[:, 0, 0]
        self.psi = np.maximum(left / np.maximum(M[:, 0, 0], 1e-300), FLOOR)
        return moments.N, moments.m

    def _shift(self, c: Floats) -> None:
        self.B[:, 0] += self.L @ c

    def _information(self) -> Floats:
        return np.asarray(self.L.T @ (self.L / self.psi[:, None]))

    def _free_intercepts(self) -> int:
        return self.B.size + self.P

    def state(self) -> Floats:
        """Return (B, L, psi) of every column, then the means by cluster."""
        return np.concatenate([np.column_stack([self.B, self.L, self.psi]).ravel(), self.means.ravel()])

    def restore(self, state: Floats) -> None:
        """Set the parameters."""
        q, Q = self.Z.shape[1], self.Q
        columns = state[: self.P * (q + Q + 1)].reshape(self.P, -1)
        self.B, self.L, self.psi = columns[:, :q].copy(), columns[:, q : q + Q].copy(), columns[:, -1].copy()
        self.means = state[columns.size :].reshape(-1, Q).copy()
        self._posterior = None

    @property
    def free(self) -> Bools:
        """Return which parameters of :meth:`state` were estimated."""
        columns = np.ones((self.P, self.Z.shape[1] + self.Q + 1), dtype=np.bool_)
        columns[:, self.Z.shape[1] : -1] = self.support[:, None]
        columns[:, -1] = self.psi > FLOOR
        return np.concatenate([columns.ravel(), np.full(self.means.size, not (self.silent or self.classes))])

    def scores_by_cluster(self, r: Floats) -> tuple[Floats, Floats]:
        """Return scores (n, K, p) given each cluster, and the information (p, p) of Louis' first two terms.

        Scores are quadratic in the factors: three nodes of each integrate their products exactly.
        """
        self.log_densities()
        assert self._posterior is not None
        e, V = self._posterior.e, self._posterior.V
        root = (V if self.classes else np.linalg.cholesky(V))[self._pattern]
        (P, q), (K, Q) = self.B.shape, self.means.shape
        d, nodes = q + Q + 1, self._nodes(3)
        a, H = np.zeros((self.n, K, P * d + K * Q)), np.zeros((P * d + K * Q, P * d + K * Q))
        columns = np.zeros((P, d, d))
        seen = self._cells.astype(float)
        for k in range(K):
            mean = P * d + k * Q
            for z, log_w in zip(*nodes, strict=True):
                eta, rw = e[:, k] + root @ z, r[:, k] * np.exp(log_w)
                x = np.column_stack([self.Z, eta])
                left = np.where(self._cells, self.X - x @ np.column_stack([self.B, self.L]).T, 0.0) / self.psi
                s = np.zeros((self.n, a.shape[2]))
                own = s[:, : P * d].reshape(self.n, P, d)
                own[:, :, :-1] = left[:, :, None] * x[:, None]
                own[:, :, -1] = 0.5 * left**2 - 0.5 * seen / self.psi
                s[:, mean : mean + Q] = eta - self.means[k]
                a[:, k] += np.exp(log_w) * s
                H -= (s * rw[:, None]).T @ s
                both = (rw[:, None, None] * x[:, :, None] * x[:, None]).reshape(self.n, -1)
                columns[:, :-1, :-1] += (seen.T @ both).reshape(P, d - 1, d - 1) / self.psi[:, None, None]
                slope = (left * rw[:, None]).T @ x / self.psi[:, None]
                columns[:, :-1, -1] += slope
                columns[:, -1, :-1] += slope
                columns[:, -1, -1] += rw @ (left**2 / self.psi - 0.5 * seen / self.psi**2)
            H += (a[:, k] * r[:, k, None]).T @ a[:, k]
            H[mean : mean + Q, mean : mean + Q] += r[:, k].sum() * np.eye(Q)
        H[: P * d, : P * d] += block_diag(*columns)
        return a, H

    def profile_slopes(self) -> Floats:
        """Return derivatives of the profile in the parameters of :meth:`state`, (K P, p)."""
        (P, q), (K, Q) = self.B.shape, self.means.shape
        out, d = np.zeros((K, P, P * (q + Q + 1) + K * Q)), q + Q + 1
        for p in range(P):
            out[:, p, p * d] = self._scale[p]
            out[:, p, p * d + q : p * d + q + Q] = self._scale[p] * self.means
            for k in range(K):
                out[k, p, P * d + k * Q : P * d + (k + 1) * Q] = self._scale[p] * self.L[p]
        return out.reshape(K * P, -1)

    def profile(self) -> Floats:
        """Return the columns' means by cluster, (K, P), at covariates of zero."""
        return np.asarray(self._center + self._scale * (self.B[:, 0] + self.means @ self.L.T))

    def _effects(self) -> tuple[Ints, Floats]:
        (P, q), d = self.B.shape, self.Z.shape[1] + self.Q + 1
        return np.arange(P)[:, None] * d + np.arange(1, q), self._scale

    def draw(self, labels: Ints, rng: np.random.Generator, covariates: Floats | None = None) -> Array:
        """Draw columns (n, P) of rows in clusters (n,), in their own units."""
        x = self.B[:, 0] + self.draw_factors(labels, rng) @ self.L.T
        if covariates is not None:
            x = x + covariates @ self.B[:, 1:].T
        x = x + np.sqrt(self.psi) * rng.standard_normal(x.shape)
        return np.asarray(self._center + self._scale * x)
