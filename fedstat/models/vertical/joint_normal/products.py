"""Solutions with the information of many parameters, which is multiplied by directions and never formed.

With P columns, the P (P + 1) / 2 entries of the concentration are most of the parameters, and the information
has the square of their number of entries. Its product with a direction is a few products of matrices of the
observed columns by pattern: with A the change of the covariance, and u that of the mean (see
:mod:`~fedstat.models.vertical.joint_normal.likelihood`),

    by covariance:  sum_g [ (K_g A W_g + W_g A K_g) + (K_g u d_g'K_g + K_g d_g u'K_g) ] / 2
    by mean:        sum_g [ n_g K_g u + K_g A K_g d_g ].

Conjugate gradients solve with it. They are preconditioned by the information of complete data from the model,
whose inverse has a closed form (Q^-1 and s2 / n Q for the concentration and the coefficients), so that the
number of iterations depends on the share of missing values, and not on the number of columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from fedstat.models.vertical.joint_normal.likelihood import (
    FreeParameters,
    JointNormalPoint,
    centered_sums,
    inverse_by_pattern,
    observed,
)
from fedstat.models.vertical.moments import PatternMoments
from fedstat.typing import Floats, Ints

AT_ONCE = 32
"""Directions that are multiplied at the same time: more need more memory, and are no faster."""
MOST_ITERATIONS = 500


@dataclass(frozen=True, slots=True, eq=False)
class _Pattern:
    """Observed columns of a pattern, and K_g, W_g, n_g and K_g d_g there."""

    columns: Ints
    K: Floats
    W: Floats
    n: float
    slope: Floats


class InformationProducts:
    """The information of the free parameters of a joint normal model at a point, observed or `expected`.

    Vectors are in the order of the derivatives: a, s2, beta, mu, free entries of the concentration. Raises
    LinAlgError if the covariance of the point is not positive definite.
    """

    def __init__(
        self,
        moments: PatternMoments,
        point: JointNormalPoint,
        moves: FreeParameters,
        *,
        expected: bool = False,
    ) -> None:
        self._point, self._n, self._basis = point, moments.nobs, point.basis()
        self._pairs, self._free = moves.pairs, len(moves.entries[0])
        self._halves = np.where(self._pairs[0] == self._pairs[1], 0.5, 1.0)
        self._order, self._place = moves.order, np.argsort(moves.order)
        seen, n = observed(moments), moments.n
        K, _ = inverse_by_pattern(point.cov, seen)
        d, D = centered_sums(moments, point.mean)
        M = np.matmul(np.matmul(K, D), K)
        W = 0.5 * n[:, None, None] * K if expected else M - 0.5 * n[:, None, None] * K
        slope = np.zeros_like(d) if expected else np.einsum("gij,gj->gi", K, d)
        self._patterns = []
        for g, own in enumerate(seen):
            columns = np.flatnonzero(own)
            both = np.ix_(columns, columns)
            self._patterns.append(_Pattern(columns, K[g][both], W[g][both], float(n[g]), slope[g, columns]))
        bend = 0.0 if expected else -1.0
        self._curved = bend * self._basis.T @ (M - n[:, None, None] * K).sum(axis=0) @ self._basis
        effects = moves.effects
        self._cov, self._covariates = point.cov, point.covariates
        self._of_effects = cho_factor(self._covariates[np.ix_(effects, effects)]) if effects.any() else None

    def product(self, directions: Floats) -> Floats:
        """Multiply the information by directions (d, m)."""
        return np.hstack([self._product(part) for part in in_parts(directions)])

    def _product(self, directions: Floats) -> Floats:
        at = directions[self._place]
        u, E = at[: len(self._cov)].T, self._symmetric(self._halves * self._pairs[2] * at[len(self._cov) :].T)
        B = self._basis
        A = B @ E @ B.T
        by_mean, by_cov = np.zeros_like(u), np.zeros_like(A)
        for one in self._patterns:
            own = one.columns
            left, moved = one.K @ A[:, own[:, None], own], u[:, own] @ one.K
            by_mean[:, own] += one.n * moved + left @ one.slope
            both = left @ one.W + moved[:, :, None] * one.slope
            by_cov[:, own[:, None], own] += 0.5 * (both + both.transpose(0, 2, 1))
        inner = B.T @ by_cov @ B
        bent = self._covariates @ E[:, :-1] @ self._curved
        inner[:, :-1] += 0.5 * bent
        inner[:, :, :-1] += 0.5 * bent.transpose(0, 2, 1)
        i, j, signs = self._pairs
        return np.concatenate([by_mean.T, (2.0 * self._halves * signs * inner[:, i, j]).T])[self._order]

    def precondition(self, scores: Floats) -> Floats:
        """Multiply scores (d, m) by the inverse information of complete data."""
        at, n, q, free = scores[self._place], self._n, len(self._cov), self._free
        out = np.empty_like(at)
        out[:q] = self._cov @ at[:q] / n
        i, j, _ = self._pairs
        Q, inner = self._point.Q, at[q:]
        G = self._symmetric(0.5 * np.pad(inner[:free].T, ((0, 0), (0, len(i) - free))))[:, :-1, :-1]
        out[q : q + free] = (2.0 / n) * (Q @ G @ Q)[:, i[:free], j[:free]].T
        if self._of_effects is not None:
            out[q + free : -1] = self._point.s2 / n * cho_solve(self._of_effects, inner[free:-1])
        out[-1] = 2.0 * self._point.s2**2 / n * inner[-1]
        return out[self._order]

    def _symmetric(self, values: Floats) -> Floats:
        """Return matrices (m, P + 1, P + 1) of values (m, k) at the pairs, plus their transposes."""
        i, j, _ = self._pairs
        out = np.zeros((len(values), *self._cov.shape))
        out[:, i, j] = values
        return out + out.transpose(0, 2, 1)

    def solve(self, right: Floats, tol: float = 1e-10) -> Floats:
        """Solve with the information for (d,) or (d, m), to a relative error of `tol`.

        Raises LinAlgError if a direction shows that the information is not positive definite, or if the
        iteration does not end.
        """
        if right.ndim == 1:
            return self.solve(right[:, None], tol)[:, 0]
        return np.hstack([self._conjugate_gradients(part, tol)[0] for part in in_parts(right)])

    def inverse_between(self, right: Floats, tol: float = 1e-6) -> Floats:
        """Return right' I^-1 right, (m, m) for (d, m), to a relative error of the order of `tol` squared.

        With approximate solutions X, it is right'X + X'(right - I X), whose error is a product of two errors
        of solutions. Raises LinAlgError as :meth:`solve`.
        """
        parts = [self._conjugate_gradients(part, tol) for part in in_parts(right)]
        found, left = (np.hstack(side) for side in zip(*parts, strict=True))
        return np.asarray(right.T @ found + found.T @ left)

    def _conjugate_gradients(self, right: Floats, tol: float) -> tuple[Floats, Floats]:
        """Return approximate solutions and what they leave of the right-hand sides, (d, m) each."""
        out, left = np.zeros_like(right), right.copy()
        ahead = self.precondition(left)
        square = np.einsum("ij,ij->j", left, ahead)
        if not (square >= 0.0).all():
            raise np.linalg.LinAlgError("complete data have no positive definite information")
        enough, at = tol**2 * square, np.flatnonzero(square > 0.0)
        ahead, square = ahead[:, at], square[at]
        for _ in range(MOST_ITERATIONS):
            if not len(at):
                return out, left
            moved = self._product(ahead)
            curvature = np.einsum("ij,ij->j", ahead, moved)
            if not (curvature > 0.0).all():
                raise np.linalg.LinAlgError("the information is not positive definite")
            step = square / curvature
            out[:, at] += step * ahead
            left[:, at] -= step * moved
            scaled = self.precondition(left[:, at])
            new = np.einsum("ij,ij->j", left[:, at], scaled)
            more = new > enough[at]
            ahead = scaled[:, more] + (new / square)[more] * ahead[:, more]
            at, square = at[more], new[more]
        raise np.linalg.LinAlgError("conjugate gradients did not end")


def in_parts(right: Floats) -> list[Floats]:
    """Split right-hand sides (d, m) into parts that are multiplied at the same time."""
    return [right[:, k : k + AT_ONCE] for k in range(0, right.shape[1], AT_ONCE)]
