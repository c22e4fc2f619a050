"""Categorical columns of one kind and number of levels: parameters, logs of probabilities, a Newton step."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from scipy.special import expit

from fedstat.kernels.mixtures.group_prox import shrink_rows
from fedstat.kernels.mixtures.nominal import nominal_derivatives, nominal_table
from fedstat.kernels.mixtures.ordinal import ordinal_derivatives, ordinal_table
from fedstat.typing import Bools, Floats, Ints

HALVINGS = 12
ROUNDING = 1e-11
"""Of an objective, relative to its size."""
RIDGE = 1e-8
"""Added to the information of a row, so that a level of no weight is no division by zero."""
LEAST_GAP = 1e-6
"""Between two thresholds, whose level has hardly any rows then."""


class LevelColumns(ABC):
    """Columns at places (P,), all of C levels; parameters theta (P, d) are intercepts, then loadings."""

    def __init__(self, columns: Ints, shares: Floats, factors: int) -> None:
        self.columns, self.shares = columns, shares
        self.C, self.Q = int(shares.shape[1]), factors
        self.theta = self._begin()

    @property
    @abstractmethod
    def rows(self) -> int:
        """Number of rows of the loadings of each column."""

    @abstractmethod
    def _begin(self) -> Floats:
        """Return parameters without loadings, from the shares of levels (P, C)."""

    @abstractmethod
    def scores(self, codes: Ints) -> Floats:
        """Return numbers (n, P rows) for levels (n, P), of which loadings can begin."""

    @abstractmethod
    def _table(self, theta: Floats, eta: Floats) -> Floats:
        """Return log P(x_p = c | eta), (P, C, G)."""

    @abstractmethod
    def _derivatives(self, theta: Floats, eta: Floats, counts: Floats) -> tuple[Floats, Floats]:
        """Return slopes (P, d) and information (P, d, d)."""

    @abstractmethod
    def shift(self, c: Floats) -> None:
        """Let the intercepts take what the factors lose, c (Q,)."""

    @abstractmethod
    def slopes(self, eta: Floats, counts: Floats) -> tuple[Floats, Floats]:
        """Return slopes of the expected log-likelihood in every node, (G, Q), and information (G, Q, Q)."""

    @abstractmethod
    def information(self) -> Floats:
        """Return what a row tells of the factors, about (Q, Q)."""

    def _feasible(self, theta: Floats) -> Floats:
        return theta

    @property
    def intercepts(self) -> int:
        """Number of parameters of a column that are no loadings."""
        return int(self.theta.shape[1] - self.rows * self.Q)

    @property
    def loadings(self) -> Floats:
        """Loadings by column and row, (P, rows, Q)."""
        return self.theta[:, self.intercepts :].reshape(len(self.columns), self.rows, self.Q)

    def load(self, loadings: Floats) -> None:
        """Put the loadings, (P, rows, Q)."""
        self.theta[:, self.intercepts :] = loadings.reshape(len(self.columns), -1)

    def table(self, eta: Floats) -> Floats:
        """Return log P(x_p = c | eta), (P, C, G), at nodes (G, Q)."""
        return self._table(self.theta, eta)

    def improve(self, eta: Floats, counts: Floats, penalties: Floats, support: Bools) -> None:
        """Take one proximal step of Newton, halved by column until its own objective does not fall.

        `counts` (P, C, G) are expected rows at nodes eta; `penalties` (P,) are on norms of loadings.
        """
        f = self.intercepts
        self.theta[~support, f:] = 0.0

        def value(theta: Floats) -> Floats:
            fit = np.einsum("pcg,pcg->p", counts, self._table(theta, eta))
            return np.asarray(fit - penalties * np.linalg.norm(theta[:, f:], axis=1))

        step = self._step(*self._derivatives(self.theta, eta, counts), penalties, support)
        old, size = value(self.theta), np.ones((len(step), 1))
        for _ in range(HALVINGS):
            new = self._feasible(self.theta + size * step)
            worse = value(new) < old - ROUNDING * (1.0 + np.abs(old))
            if not worse.any():
                break
            size[worse] /= 2.0
        self.theta = np.where(worse[:, None], self.theta, new)

    def _step(self, score: Floats, info: Floats, penalties: Floats, support: Bools) -> Floats:
        """Minimise the quadratic model, intercepts eliminated: the loadings of a column by one root."""
        f = self.intercepts
        n = np.trace(info, axis1=1, axis2=2)[:, None, None]
        info = info + RIDGE * (n + 1.0) * np.eye(info.shape[1])
        old = self.theta[:, f:]
        carried = np.linalg.solve(
            info[:, :f, :f], np.concatenate([info[:, :f, f:], score[:, :f, None]], axis=2)
        )
        slope, by = carried[:, :, -1], carried[:, :, :-1]
        S = info[:, f:, f:] - np.matmul(info[:, f:, :f], by)
        s = score[:, f:] - np.matmul(info[:, f:, :f], slope[:, :, None])[:, :, 0]
        new = shrink_rows(S, np.matmul(S, old[:, :, None])[:, :, 0] + s, penalties) * support[:, None]
        moved = new - old
        return np.concatenate([slope - np.matmul(by, moved[:, :, None])[:, :, 0], moved], axis=1)


class OrdinalColumns(LevelColumns):
    """P(x <= c) = expit(alpha_c - l'eta): more of a factor is a higher level. Binary columns have two."""

    rows = 1

    def _begin(self) -> Floats:
        below = np.cumsum(self.shares, axis=1)[:, :-1]
        return np.column_stack([np.log(below / (1.0 - below)), np.zeros((len(below), self.Q))])

    def scores(self, codes: Ints) -> Floats:
        """Return the levels' numbers."""
        return codes.astype(float)

    def _table(self, theta: Floats, eta: Floats) -> Floats:
        return ordinal_table(theta[:, : self.C - 1], theta[:, self.C - 1 :] @ eta.T)

    def _derivatives(self, theta: Floats, eta: Floats, counts: Floats) -> tuple[Floats, Floats]:
        alpha = theta[:, : self.C - 1]
        return ordinal_derivatives(alpha, theta[:, self.C - 1 :] @ eta.T, eta, counts)

    def _feasible(self, theta: Floats) -> Floats:
        """Keep thresholds in order: a level without rows may lose its place, and nothing waits for it."""
        B = self.C - 1
        gaps = LEAST_GAP * np.arange(B)
        return np.column_stack([np.maximum.accumulate(theta[:, :B] - gaps, axis=1) + gaps, theta[:, B:]])

    def shift(self, c: Floats) -> None:
        """Let thresholds fall by l'c."""
        self.theta[:, : self.C - 1] -= (self.loadings[:, 0] @ c)[:, None]

    def slopes(self, eta: Floats, counts: Floats) -> tuple[Floats, Floats]:
        """Add up slopes of the logistic regressions of all thresholds."""
        L = self.loadings[:, 0]
        F = expit(self.theta[:, : self.C - 1, None] - (L @ eta.T)[:, None])
        below, above = counts[:, :-1], counts[:, 1:]
        left = (above * F - below * (1.0 - F)).sum(axis=1)
        weight = ((below + above) * F * (1.0 - F)).sum(axis=1)
        return left.T @ L, np.einsum("pg,pq,pt->gqt", weight, L, L)

    def information(self) -> Floats:
        """Return that of the logistic variables behind the levels, of variance pi^2 / 3."""
        L = self.loadings[:, 0]
        return np.asarray(3.0 / np.pi**2 * L.T @ L)


class NominalColumns(LevelColumns):
    """log P(x = c) / P(x = 0) = a_c + l_c'eta for every level but the first."""

    @property
    def rows(self) -> int:
        """Each level but the first has a row."""
        return self.C - 1

    def _begin(self) -> Floats:
        a: Floats = np.log(self.shares[:, 1:] / self.shares[:, :1])
        return np.column_stack([a, np.zeros((len(a), (self.C - 1) * self.Q))])

    def scores(self, codes: Ints) -> Floats:
        """Return indicators of levels."""
        indicators = codes[:, :, None] == np.arange(1, self.C)
        return np.asarray(indicators.reshape(len(codes), -1), dtype=float)

    def _table(self, theta: Floats, eta: Floats) -> Floats:
        L = theta[:, self.C - 1 :].reshape(len(theta), -1, self.Q)
        return nominal_table(theta[:, : self.C - 1, None] + L @ eta.T)

    def _derivatives(self, theta: Floats, eta: Floats, counts: Floats) -> tuple[Floats, Floats]:
        return nominal_derivatives(self._table(theta, eta), eta, counts)

    def shift(self, c: Floats) -> None:
        """Let intercepts rise by l'c."""
        self.theta[:, : self.C - 1] += np.matmul(self.loadings, c)

    def slopes(self, eta: Floats, counts: Floats) -> tuple[Floats, Floats]:
        """Add up slopes of the logits."""
        L, pi, N = self.loadings, np.exp(self.table(eta))[:, 1:], counts.sum(axis=1)
        mean: Floats = np.einsum("pcg,pcq->pgq", pi, L)
        gradient: Floats = np.einsum("pcg,pcq->gq", counts[:, 1:] - N[:, None] * pi, L)
        own = np.einsum("pg,pcg,pcq,pct->gqt", N, pi, L, L, optimize=True)
        return gradient, own - np.einsum("pg,pgq,pgt->gqt", N, mean, mean)

    def information(self) -> Floats:
        """Return Fisher's information of the logits at the shares of the levels."""
        pi, L = self.shares[:, 1:], self.loadings
        mean = np.einsum("pc,pcq->pq", pi, L)
        return np.asarray(np.einsum("pc,pcq,pct->qt", pi, L, L) - mean.T @ mean)
