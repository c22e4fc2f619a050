"""Categorical columns of one kind and number of levels: parameters and log probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from fedstat.kernels.item_responses import (
    nominal_derivatives,
    nominal_table,
    ordinal_derivatives,
    ordinal_table,
)
from fedstat.kernels.penalized.group_prox import proximal_newton
from fedstat.typing import Bools, Floats, Ints

HALVINGS = 12
ROUNDING = 1e-11
"""Tolerance of an objective, relative to its size."""
LEAST_GAP = 1e-6
"""Smallest difference of two thresholds; their level then has almost no rows."""


class NodeCurvatures(NamedTuple):
    """Minus second derivatives of the expected log-likelihood at every node, without the slopes.

    slopes (J P, R, G) in predictors, second (J P, R, R, G) in two of them, mixed (J P, C - 1, R, G) in an
    intercept and a predictor.
    """

    slopes: Floats
    second: Floats
    mixed: Floats


class LevelColumns(ABC):
    """Columns at indices (P,), all of C levels, with covariates (J, q), each of some row.

    Parameters theta (P, d) are C - 1 intercepts, slopes of covariates, then loadings in R rows. At given
    covariates, effective parameters are intercepts and loadings: J sets of P columns.
    """

    sign: float
    """Sign with which covariates change the intercepts."""

    def __init__(self, columns: Ints, shares: Floats, factors: int, covariates: Floats) -> None:
        self.columns, self.shares = columns, shares
        self.C = int(shares.shape[1])
        self.intercepts = self.C - 1 + self.rows * covariates.shape[1]
        self.covariates = covariates
        self.reset(factors)

    def reset(self, factors: int) -> None:
        """Start from the shares of the levels, and loadings of zero on this many factors."""
        self.Q = factors
        self.theta = np.zeros((len(self.columns), self.intercepts + self.rows * factors))
        self.theta[:, : self.C - 1] = self._begin()

    @property
    @abstractmethod
    def rows(self) -> int:
        """Number of rows of the loadings of each column, R."""

    @abstractmethod
    def _begin(self) -> Floats:
        """Return intercepts (P, C - 1) without loadings, from the shares of levels (P, C)."""

    @abstractmethod
    def scores(self, codes: Ints) -> Floats:
        """Return numbers (n, P R) for levels (n, P), as a start for loadings."""

    @abstractmethod
    def _table(self, effective: Floats, eta: Floats) -> Floats:
        """Return log P(x_p = c | eta), (J P, C, G)."""

    @abstractmethod
    def _derivatives(self, effective: Floats, eta: Floats, counts: Floats) -> tuple[Floats, Floats]:
        """Return slopes (J P, d) and information (J P, d, d) in effective parameters."""

    @abstractmethod
    def curvatures(self, eta: Floats, counts: Floats) -> NodeCurvatures:
        """Return derivatives at every node under counts (J P, C, G)."""

    @abstractmethod
    def _cell_slopes(self, effective: Floats, eta: Floats) -> tuple[Floats, Floats]:
        """Return slopes of log P(x = c | eta) in intercepts (J P, C, G, C - 1), predictors (J P, C, G, R)."""

    @abstractmethod
    def information(self) -> Floats:
        """Return a row's information on the factors, approximately (Q, Q)."""

    def _feasible(self, theta: Floats) -> Floats:
        return theta

    @property
    def loadings(self) -> Floats:
        """Loadings by column and row, (P, R, Q)."""
        return self.theta[:, self.intercepts :].reshape(len(self.columns), self.rows, self.Q)

    def load(self, loadings: Floats) -> None:
        """Set the loadings, (P, R, Q)."""
        self.theta[:, self.intercepts :] = loadings.reshape(len(self.columns), -1)

    def moving(self, covariates: Floats | None = None) -> Floats:
        """Return the matrices from parameters to effective ones, (J, C - 1 + R Q, d)."""
        z = self.covariates if covariates is None else covariates
        B, (J, q), loads = self.C - 1, z.shape, self.rows * self.Q
        A = np.zeros((J, B + loads, self.theta.shape[1]))
        A[:, :B, :B], A[:, B:, self.intercepts :] = np.eye(B), np.eye(loads)
        for b in range(B):
            row = b if self.rows > 1 else 0
            A[:, b, B + row * q : B + (row + 1) * q] = self.sign * z
        return A

    def effective(self, theta: Floats, covariates: Floats | None = None) -> Floats:
        """Return effective parameters, (J P, C - 1 + R Q), at covariates (J, q) of its rows or of others."""
        if not self.covariates.shape[1]:
            return theta
        effective: Floats = np.einsum("jed,pd->jpe", self.moving(covariates), theta)
        return effective.reshape(-1, effective.shape[2])

    def table(self, eta: Floats) -> Floats:
        """Return log P(x_p = c | eta), (J, P, C, G), at nodes (G, Q)."""
        table = self._table(self.effective(self.theta), eta)
        return table.reshape(len(self.covariates), len(self.columns), self.C, -1)

    @property
    def at_zero(self) -> Ints:
        """Return indices, among a column's parameters, of the effective ones at covariates of zero."""
        return np.delete(np.arange(self.theta.shape[1]), np.s_[self.C - 1 : self.intercepts])

    def table_at_zero(self, eta: Floats) -> Floats:
        """Return log P(x_p = c | eta), (P, C, G), at covariates of zero."""
        return self._table(self.theta[:, self.at_zero], eta)

    def table_of(self, eta: Floats, covariates: Floats) -> Floats:
        """Return log P(x_p = c | eta), (P, C, n), of rows with factors (n, Q) and covariates (n, q)."""
        out = np.empty((len(self.columns), self.C, len(eta)))
        distinct, at = np.unique(covariates, axis=0, return_inverse=True)
        for j, z in enumerate(distinct):
            rows = at.ravel() == j
            out[:, :, rows] = self._table(self.effective(self.theta, z[None]), eta[rows])
        return out

    def cell_slopes(self, eta: Floats, zero: bool = False) -> tuple[Floats, Floats]:
        """Return slopes of log P(x = c | eta) in effective parameters (J P, C, G, e), in eta (J P, C, G, Q).

        Or for (P, ...) at covariates of zero.
        """
        effective = self.theta[:, self.at_zero] if zero else self.effective(self.theta)
        own, u = self._cell_slopes(effective, eta)
        by_loading = (u[..., None] * eta[:, None]).reshape(*u.shape[:-1], -1)
        L = effective[:, self.C - 1 :].reshape(-1, self.rows, self.Q)
        return np.concatenate([own, by_loading], axis=-1), np.einsum("pcgr,prq->pcgq", u, L)

    def shift(self, c: Floats) -> None:
        """Change the intercepts to compensate a change of the factors by c (Q,)."""
        self.theta[:, : self.C - 1] += self.sign * np.matmul(self.loadings, c)

    def improve(self, eta: Floats, counts: Floats, table: Floats, penalties: Floats, support: Bools) -> None:
        """Take one proximal Newton step, halved by column until its own objective does not decrease.

        `counts` and `table` (J, P, C, G) are expected rows and logs of probabilities at nodes eta;
        `penalties` (P,) are on norms of loadings.
        """
        f, P, penalized = self.intercepts, len(self.columns), bool(penalties.any())
        flat = counts.reshape(-1, *counts.shape[2:])
        if np.any(self.theta[~support, f:]):
            self.theta[~support, f:] = 0.0
            table = self.table(eta)

        def value(theta: Floats, table: Floats | None = None) -> Floats:
            table = self._table(self.effective(theta), eta) if table is None else table.reshape(flat.shape)
            fit = np.einsum("pcg,pcg->p", flat, table).reshape(-1, P).sum(axis=0)
            return np.asarray(fit - penalties * np.linalg.norm(theta[:, f:], axis=1) if penalized else fit)

        score, info = self._slopes(eta, flat)
        step = proximal_newton(score, info, self.theta[:, f:], penalties, support)
        old, size = value(self.theta, table), np.ones((len(step), 1))
        for _ in range(HALVINGS):
            new = self._feasible(self.theta + size * step)
            worse = value(new) < old - ROUNDING * (1.0 + np.abs(old))
            if not worse.any():
                break
            size[worse] /= 2.0
        self.theta = np.where(worse[:, None], self.theta, new)

    def _slopes(self, eta: Floats, counts: Floats) -> tuple[Floats, Floats]:
        """Return slopes (P, d) and information (P, d, d) in all parameters."""
        score, info = self._derivatives(self.effective(self.theta), eta, counts)
        if not self.covariates.shape[1]:
            return score, info
        A, (J, P) = self.moving(), (len(self.covariates), len(self.columns))
        info = info.reshape(J, P, *info.shape[1:])
        return (
            np.einsum("jpe,jed->pd", score.reshape(J, P, -1), A),
            np.einsum("jpef,jed,jfh->pdh", info, A, A, optimize=True),
        )

    def in_means(self, eta: Floats, counts: Floats, K: int) -> tuple[Floats, Floats]:
        """Return slopes (K, Q) and information (K, Q, Q) in the means with which nodes move.

        Counts (J, P, C, G) are at nodes eta (G, Q).
        """
        s, second, _ = self.curvatures(eta, counts.reshape(-1, *counts.shape[2:]))
        L = self._loadings_by_group()
        by_cluster = second.reshape(*second.shape[:3], K, -1).sum(axis=4)
        slopes = s.reshape(*s.shape[:2], K, -1).sum(axis=3)
        info = np.einsum("prsk,prq,pst->kqt", by_cluster, L, L, optimize=True)
        return np.einsum("prk,prq->kq", slopes, L), info

    def mixed_with_means(self, eta: Floats, counts: Floats, K: int) -> Floats:
        """Return minus second derivatives in parameters and means, (P, d, K, Q)."""
        s, second, mixed = self.curvatures(eta, counts.reshape(-1, *counts.shape[2:]))
        L = self._loadings_by_group()
        carried = np.einsum("prsg,psq->prgq", second, L)
        by_loading = np.einsum("prgq,gt->prgtq", carried, eta) - np.einsum("prg,tq->prgtq", s, np.eye(self.Q))
        both = np.concatenate(
            [
                np.einsum("pbrg,prq->pbgq", mixed, L),
                by_loading.transpose(0, 1, 3, 2, 4).reshape(len(L), -1, len(eta), self.Q),
            ],
            axis=1,
        )
        cross = both.reshape(len(self.covariates), len(self.columns), both.shape[1], K, -1, self.Q).sum(
            axis=4
        )
        return np.asarray(np.einsum("jpekq,jed->pdkq", cross, self.moving()))

    def _loadings_by_group(self) -> Floats:
        """Return the loadings of every group of rows, (J P, R, Q)."""
        return np.tile(self.loadings, (len(self.covariates), 1, 1))

    def complete_information(self, eta: Floats, counts: Floats) -> Floats:
        """Return minus second derivatives of the expected log-likelihood in parameters, (P, d, d)."""
        return self._slopes(eta, counts.reshape(-1, *counts.shape[2:]))[1]


class OrdinalColumns(LevelColumns):
    """P(x <= c) = expit(alpha_c - l'eta - b'z): a larger factor means a higher level; also binary columns."""

    rows, sign = 1, -1.0

    def _begin(self) -> Floats:
        below = np.cumsum(self.shares, axis=1)[:, :-1]
        return np.log(below / (1.0 - below))

    def scores(self, codes: Ints) -> Floats:
        """Return the levels' numbers."""
        return codes.astype(float)

    def _table(self, effective: Floats, eta: Floats) -> Floats:
        return ordinal_table(effective[:, : self.C - 1], effective[:, self.C - 1 :] @ eta.T)

    def _derivatives(self, effective: Floats, eta: Floats, counts: Floats) -> tuple[Floats, Floats]:
        alpha = effective[:, : self.C - 1]
        return ordinal_derivatives(alpha, effective[:, self.C - 1 :] @ eta.T, eta, counts)

    def _feasible(self, theta: Floats) -> Floats:
        """Keep thresholds in order; a level without rows may have an empty interval, which does no harm."""
        B = self.C - 1
        gaps = LEAST_GAP * np.arange(B)
        return np.column_stack([np.maximum.accumulate(theta[:, :B] - gaps, axis=1) + gaps, theta[:, B:]])

    def _below(self, effective: Floats, eta: Floats) -> tuple[Floats, Floats]:
        """Return thresholds (J P, C - 1) and P(x <= c | eta), (J P, C - 1, G)."""
        alpha, L = effective[:, : self.C - 1], effective[:, self.C - 1 :]
        return alpha, expit(alpha[:, :, None] - (L @ eta.T)[:, None])

    def curvatures(self, eta: Floats, counts: Floats) -> NodeCurvatures:
        """Add up the logistic regressions of all thresholds."""
        _, F = self._below(self.effective(self.theta), eta)
        below, above = counts[:, :-1], counts[:, 1:]
        weight = (below + above) * F * (1.0 - F)
        slopes = (above * F - below * (1.0 - F)).sum(axis=1)
        return NodeCurvatures(slopes[:, None], weight.sum(axis=1)[:, None, None], -weight[:, :, None])

    def _cell_slopes(self, effective: Floats, eta: Floats) -> tuple[Floats, Floats]:
        """Return F_{c-1} + F_c - 1 for the predictor, and the values for the thresholds next to a level."""
        alpha, F = self._below(effective, eta)
        B = self.C - 1
        full = np.pad(F, ((0, 0), (1, 1), (0, 0)))
        full[:, -1] = 1.0
        own = np.zeros((len(F), self.C, F.shape[2], B))
        kappa = np.zeros((len(F), self.C))
        kappa[:, 1:B] = 1.0 / np.expm1(np.diff(alpha, axis=1))
        for b in range(B):
            own[:, b, :, b] = 1.0 - F[:, b] + kappa[:, b, None]
            own[:, b + 1, :, b] = -F[:, b] - kappa[:, b + 1, None]
        return own, (full[:, :-1] + full[:, 1:] - 1.0)[..., None]

    def information(self) -> Floats:
        """Return the information of the underlying logistic variables, with variance pi^2 / 3."""
        L = self.loadings[:, 0]
        return np.asarray(3.0 / np.pi**2 * L.T @ L)


class NominalColumns(LevelColumns):
    """log P(x = c) / P(x = 0) = a_c + l_c'eta + b_c'z for every level but the first."""

    sign = 1.0

    @property
    def rows(self) -> int:
        """Each level except the first has a row."""
        return self.C - 1

    def _begin(self) -> Floats:
        return np.log(self.shares[:, 1:] / self.shares[:, :1])

    def scores(self, codes: Ints) -> Floats:
        """Return indicators of levels."""
        indicators = codes[:, :, None] == np.arange(1, self.C)
        return np.asarray(indicators.reshape(len(codes), -1), dtype=float)

    def _table(self, effective: Floats, eta: Floats) -> Floats:
        L = effective[:, self.C - 1 :].reshape(len(effective), -1, self.Q)
        return nominal_table(effective[:, : self.C - 1, None] + np.matmul(L, eta.T))

    def _derivatives(self, effective: Floats, eta: Floats, counts: Floats) -> tuple[Floats, Floats]:
        return nominal_derivatives(self._table(effective, eta), eta, counts)

    def curvatures(self, eta: Floats, counts: Floats) -> NodeCurvatures:
        """Return the derivatives of logits: canonical, so intercepts and predictors have the same form."""
        pi, N = np.exp(self._table(self.effective(self.theta), eta))[:, 1:], counts.sum(axis=1)[:, None]
        second = N[:, None] * pi[:, :, None] * (np.eye(self.C - 1)[:, :, None] - pi[:, None])
        return NodeCurvatures(counts[:, 1:] - N * pi, second, second)

    def _cell_slopes(self, effective: Floats, eta: Floats) -> tuple[Floats, Floats]:
        """Return indicators minus probabilities, for intercepts and predictors alike."""
        pi = np.exp(self._table(effective, eta))[:, 1:].transpose(0, 2, 1)
        both = np.eye(self.C)[:, None, 1:] - pi[:, None]
        return both, both

    def information(self) -> Floats:
        """Return Fisher's information of the logits at the shares of the levels."""
        pi, L = self.shares[:, 1:], self.loadings
        mean = np.einsum("pc,pcq->pq", pi, L)
        return np.asarray(np.einsum("pc,pcq,pct->qt", pi, L, L) - mean.T @ mean)
