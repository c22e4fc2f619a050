"""The normal models of missing blocks in a selecting fit: parameters and derivatives.

Parameters stand as (intercept, log s2, beta, law of the columns), of standardised columns and response.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from fedstat.errors import EstimationError
from fedstat.models.vertical.fit import LONGEST_LOG, fit_moments
from fedstat.models.vertical.joint_normal.fit import (
    JointNormalFit,
    all_effects,
    fit_joint_normal,
    not_determined,
)
from fedstat.models.vertical.joint_normal.likelihood import (
    FreeParameters,
    JointNormalPoint,
    differentiate_joint_normal,
    joint_normal_likelihood,
)
from fedstat.models.vertical.likelihood import (
    LikelihoodDerivatives,
    LikelihoodPoint,
    StandardizedMoments,
    evaluate,
    log_likelihood,
)
from fedstat.typing import Bools, Floats


class WorkingPoint(Protocol):
    """A point of a law: intercept at the origin of the standardised columns, beta (P,), means mu (P,)."""

    @property
    def b(self) -> float:
        """Intercept."""

    @property
    def log_s2(self) -> float:
        """Logarithm of the residual variance."""

    @property
    def beta(self) -> Floats:
        """Coefficients."""

    @property
    def mu(self) -> Floats:
        """Means of the columns."""


class WorkingModel(Protocol):
    """What the path asks of a law."""

    @property
    def standard(self) -> StandardizedMoments:
        """Return the moments."""

    def start(self) -> Any:
        """Return the point of no effects."""

    def unpenalised(self) -> Floats:
        """Return the coefficients without a penalty, (P,)."""

    def evaluate(self, point: Any) -> LikelihoodDerivatives:
        """Take log-likelihood, score, observed and expected information."""

    def log_likelihood(self, point: Any) -> float:
        """Return the log-likelihood, minus infinity where the law is none."""

    def move(self, point: Any, by: Floats) -> Any:
        """Move a point."""

    def longest(self, move: Floats) -> float:
        """Return the share of a move that is tried first."""

    def with_variance(self, point: Any, log_s2: float) -> Any:
        """Put another residual variance in."""


@dataclass(frozen=True, slots=True, eq=False)
class IndependentBlocksModel:
    """Blocks that are independent between institutions: :mod:`fedstat.models.vertical.likelihood`."""

    standard: StandardizedMoments

    def start(self) -> LikelihoodPoint:
        """Return the point of no effects."""
        return self.standard.start()

    def unpenalised(self) -> Floats:
        """Return the coefficients without a penalty, (P,)."""
        return fit_moments(self.standard).point.beta

    def evaluate(self, point: LikelihoodPoint) -> LikelihoodDerivatives:
        """Take log-likelihood, score, observed and expected information."""
        return evaluate(self.standard, point)

    def log_likelihood(self, point: LikelihoodPoint) -> float:
        """Return the log-likelihood."""
        return log_likelihood(self.standard, point)

    def move(self, point: LikelihoodPoint, by: Floats) -> LikelihoodPoint:
        """Move a point."""
        return LikelihoodPoint.unpack(point.pack() + by, self.standard.P)

    def longest(self, move: Floats) -> float:
        """Return the share of a move at which no variance changes by more than a factor."""
        logs = float(np.abs(move[self.standard.places[2]]).max())
        return min(1.0, LONGEST_LOG / logs) if logs > 0.0 else 1.0

    def with_variance(self, point: LikelihoodPoint, log_s2: float) -> LikelihoodPoint:
        """Put another residual variance in."""
        return replace(point, log_s2=log_s2)


@dataclass(frozen=True, slots=True, eq=False)
class FreeCovariancePoint:
    """A point of the joint normal model, which has the mean of the response.

    See :mod:`fedstat.models.vertical.joint_normal`.
    """

    law: JointNormalPoint

    @property
    def b(self) -> float:
        """Intercept at the origin of the standardised columns."""
        return float(self.law.a - self.law.mu @ self.law.beta)

    @property
    def log_s2(self) -> float:
        """Logarithm of the residual variance."""
        return float(np.log(self.law.s2))

    @property
    def beta(self) -> Floats:
        """Coefficients."""
        return self.law.beta

    @property
    def mu(self) -> Floats:
        """Means of the columns."""
        return self.law.mu


@dataclass(frozen=True, slots=True, eq=False)
class FreeCovarianceModel:
    """Columns whose covariance is free between institutions, where `edges` (P, P) say so.

    The log-likelihood is less `columns`, the largest one that the columns have by themselves.
    """

    standard: StandardizedMoments
    edges: Bools
    whole: JointNormalFit
    columns: float

    @classmethod
    def of(cls, standard: StandardizedMoments, edges: Bools) -> FreeCovarianceModel:
        """Fit the law without a penalty, where the path begins with its columns."""
        whole = fit_joint_normal(standard, edges)
        n, sd = standard.moments.nobs, float(standard.moments.scale[-1])
        return cls(standard, edges, whole, whole.joint - whole.log_likelihood - n * float(np.log(sd)))

    @property
    def moves(self) -> FreeParameters:
        """All parameters move."""
        return all_effects(self.edges)

    def start(self) -> FreeCovariancePoint:
        """Return the point of no effects."""
        at = self.whole.point
        return FreeCovariancePoint(JointNormalPoint(at.mu, 0.0, np.zeros_like(at.beta), 1.0, at.Q))

    def unpenalised(self) -> Floats:
        """Return the coefficients without a penalty, (P,)."""
        return self.whole.point.beta

    def evaluate(self, point: FreeCovariancePoint) -> LikelihoodDerivatives:
        """Take log-likelihood, score, observed and expected information."""
        moments, s2 = self.standard.moments, point.law.s2
        try:
            at, mean = (
                differentiate_joint_normal(moments, point.law, self.moves, expected=e) for e in (False, True)
            )
        except np.linalg.LinAlgError:
            raise EstimationError(not_determined(moments)) from None
        unit = np.ones(len(at.score))
        unit[1] = s2  # by log s2
        observed, expected = (one.information * np.outer(unit, unit) for one in (at, mean))
        return LikelihoodDerivatives(self._own(at.log_likelihood), at.score * unit, observed, expected)

    def _own(self, joint: float) -> float:
        sd = float(self.standard.moments.scale[-1])
        return joint - self.columns - self.standard.moments.nobs * float(np.log(sd))

    def log_likelihood(self, point: FreeCovariancePoint) -> float:
        """Return the log-likelihood, minus infinity where the law is none."""
        try:
            return self._own(joint_normal_likelihood(self.standard.moments, point.law.mean, point.law.cov))
        except np.linalg.LinAlgError:
            return -np.inf

    def move(self, point: FreeCovariancePoint, by: Floats) -> FreeCovariancePoint:
        """Move a point."""
        straight = by.copy()
        straight[1] = point.law.s2 * np.expm1(by[1])
        return FreeCovariancePoint(self.moves.step(point.law, straight))

    def longest(self, move: Floats) -> float:
        """Return the whole: beyond the edge of positive definite covariances there is no likelihood."""
        return 1.0

    def with_variance(self, point: FreeCovariancePoint, log_s2: float) -> FreeCovariancePoint:
        """Put another residual variance in."""
        return FreeCovariancePoint(replace(point.law, s2=float(np.exp(log_s2))))
