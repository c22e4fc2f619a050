"""The joint normal model of all columns with free covariances along edges, and its maximum likelihood.

Derivatives are exact, so Newton's method reaches in six to ten steps the maximum that EM approaches in
hundreds. If the information is not positive definite, the step is Fisher scoring. Steps are halved until the
log-likelihood increases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from fedstat.errors import EstimationError
from fedstat.inference.convergence import rounding_error
from fedstat.inference.covariance import symmetrize
from fedstat.models.vertical.joint_normal.blocks import (
    LONGEST_LOG,
    BlocksPoint,
    blocks_likelihood,
    centered_information,
    differentiate_blocks,
    variance_information,
)
from fedstat.models.vertical.joint_normal.edges import (
    INDEPENDENT,
    name_sparse,
    not_determined,
    undetermined_pairs,
)
from fedstat.models.vertical.joint_normal.likelihood import (
    FreeParameters,
    JointNormalDerivatives,
    JointNormalPoint,
    differentiate_joint_normal,
    joint_normal_likelihood,
)
from fedstat.models.vertical.joint_normal.products import InformationProducts
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vertical.newton import NewtonAscent, NewtonFit, solve_information
from fedstat.typing import Floats

SMALLEST_STEP = 2.0**-20
SUFFICIENT = 1e-4
VANISHING, NEARLY_VANISHING = 1e-12, 1e-4
"""Shares of the response's variance: one that counts as zero, and one below which rounding hides the
trend."""
SINGULAR = 1e-8
"""Smallest eigenvalue of the correlation matrix of the columns below which it counts as singular."""

MAX_FULL_INVERSE = 2_000
"""Largest number of parameters for which the complete covariance is kept, and formed."""
MOST_FORMED = 600
"""Largest number of parameters whose information is formed for a Newton step: about thirty columns."""
NEAR_STEP = 1e-6
"""Relative error of a Newton step that conjugate gradients find."""

Point: TypeAlias = JointNormalPoint | BlocksPoint


@dataclass(frozen=True, slots=True, eq=False)
class JointNormalModel:
    """A joint normal model of standardized columns and response; `moves` are its free parameters.

    With `profiled`, the edges are those of complete blocks that are independent between sites. Their
    covariances have a closed form, so the likelihood is a function of few other parameters: points are of
    :mod:`fedstat.models.vertical.joint_normal.blocks`. `columns`, the largest log-likelihood of the columns
    alone, is subtracted from the log-likelihood.
    """

    moments: PatternMoments
    moves: FreeParameters
    profiled: bool = False
    columns: float = 0.0

    def log_likelihood(self, point: Point) -> float:
        """Return the log-likelihood, minus infinity if the model is not valid."""
        if isinstance(point, BlocksPoint):
            return blocks_likelihood(point)
        try:
            if point.s2 > 0.0:
                return joint_normal_likelihood(self.moments, point.mean, point.cov) - self.columns
        except np.linalg.LinAlgError:  # outside of the positive definite covariances
            pass
        return -np.inf

    def differentiate(
        self, point: Point, *, expected: bool = False, information: bool = True
    ) -> JointNormalDerivatives:
        """Compute log-likelihood, score and information, observed or `expected`, of the free parameters.

        Without `information`, it may be empty: it takes most of the time unless the model is `profiled`.
        """
        if isinstance(point, BlocksPoint):
            return differentiate_blocks(point, self.moves.effects, expected=expected)
        try:
            at = differentiate_joint_normal(
                self.moments, point, self.moves, expected=expected, information=information
            )
        except np.linalg.LinAlgError:
            raise not_determined(self.moments, point.Q) from None
        return replace(at, log_likelihood=at.log_likelihood - self.columns)

    @property
    def parameters(self) -> int:
        """Number of free parameters of a model that is not profiled."""
        return len(self.moves.order)

    @property
    def invertible(self) -> bool:
        """Whether the complete covariance is kept: there are not too many parameters."""
        return self.profiled or self.parameters <= MAX_FULL_INVERSE

    def products(self, point: JointNormalPoint, *, expected: bool = False) -> InformationProducts:
        """Return the information, observed or `expected`, of many parameters, to be solved with."""
        return InformationProducts(self.moments, point, self.moves, expected=expected)

    def inverse_columns(self, point: Point, count: int, *, expected: bool = False) -> Floats:
        """First columns (d, count) of the inverse information; see :meth:`information`.

        Raises EstimationError if the information is not positive definite.
        """
        try:
            if isinstance(point, JointNormalPoint) and not self.invertible:
                return self.products(point, expected=expected).solve(np.eye(self.parameters, count))
            information = self.information(point, expected=expected)
            return solve_information(information, np.eye(len(information), count))
        except np.linalg.LinAlgError:
            raise not_determined(self.moments, point.Q) from None

    def leading_inverse(self, point: Point, count: int, *, expected: bool = False) -> Floats:
        """First rows and columns (count, count) of the inverse information, as :meth:`inverse_columns`."""
        if isinstance(point, BlocksPoint) or self.invertible:
            return symmetrize(self.inverse_columns(point, count, expected=expected)[:count])[0]
        products, corner = self.products(point, expected=expected), np.eye(self.parameters, count)
        try:
            return symmetrize(products.inverse_between(corner))[0]
        except np.linalg.LinAlgError:
            raise not_determined(self.moments, point.Q) from None

    def information(self, point: Point, *, expected: bool = False) -> Floats:
        """Information, observed or `expected`, of (a, s2, beta, mu) and the parameters of covariances."""
        if isinstance(point, BlocksPoint):
            return centered_information(point, self.moves.effects, expected=expected)
        return self.differentiate(point, expected=expected).information

    def variance_information(self, point: Point) -> float:
        """Return the expected information on the parameter of the residual variance alone."""
        if isinstance(point, BlocksPoint):
            return variance_information(point)
        return float(self.products(point, expected=True).product(np.eye(self.parameters, 2))[1, 1])

    def step(self, point: Point, by: Floats) -> Point:
        """Change a point by a vector in the order of its derivatives."""
        if isinstance(point, BlocksPoint):
            return point.moved(by, self.moves.effects)
        return self.moves.step(point, by)

    def longest(self, direction: Floats) -> float:
        """Return the share of a step that is tried first: a variance changes at most by a factor e.

        The quadratic model is not valid farther away. Where covariances are parameters, invalid models bound
        the step.
        """
        if not self.profiled:
            return 1.0
        lam = len(self.moments.sizes)
        logs = np.abs(np.append(direction[1], direction[-lam:])).max()
        return min(1.0, LONGEST_LOG / logs) if logs > 0.0 else 1.0

    def check(self, point: Point) -> None:
        """Raise EstimationError at the border of the valid models, where there is no maximum."""
        if point.s2 <= VANISHING:
            raise EstimationError(vanishing_variance_message(self.moments))
        if not self.profiled and np.linalg.eigvalsh(point.Q)[-1] > 1.0 / SINGULAR:
            raise not_determined(self.moments, point.Q)

    # ---- maximum likelihood --------------------------------------------------------------------

    def maximize(self, point: Point, tol: float, maxiter: int) -> NewtonFit[Point]:
        """Maximize by Newton steps from a point, until the maximum is nearer than `tol` standard errors.

        Raises EstimationError if there is no maximum.
        """
        formed = self.profiled or self.parameters <= MOST_FORMED

        def evaluate(at: Point) -> JointNormalDerivatives:
            return self.differentiate(at, information=formed)

        ascent = NewtonAscent(self.moments.nobs, evaluate, self.direction, self.line_search)
        found = ascent.ascend(point, tol, maxiter)
        # At the border the score of log s2 vanishes with s2, and the iteration ends there as at a maximum.
        border = self.profiled and found.point.s2 < NEARLY_VANISHING
        if border and self.differentiate(found.point).information[1, 1] < 1.0:
            raise EstimationError(vanishing_variance_message(self.moments))
        return found

    def direction(self, point: Point, at: JointNormalDerivatives) -> tuple[str, Floats]:
        """Take a Newton step if the information is positive definite, otherwise Fisher scoring."""
        for name, expected in (("newton", False), ("scoring", True)):
            try:
                if isinstance(point, JointNormalPoint) and not len(at.information):
                    return name, self.products(point, expected=expected).solve(at.score, NEAR_STEP)
                here = self.differentiate(point, expected=True) if expected else at
                return name, solve_information(here.information, at.score)
            except np.linalg.LinAlgError:
                continue
        if not self.profiled:
            raise not_determined(self.moments, point.Q)
        raise EstimationError(
            "the information on the coefficients is not positive definite; the columns are probably "
            "collinear across sites, or too few entities are shared by several of them: leave out "
            "columns or sites"
        )

    def line_search(
        self, point: Point, at: JointNormalDerivatives, direction: Floats
    ) -> tuple[Point, float, bool]:
        """Halve a step until the log-likelihood has increased enough.

        Returns the point, the largest change of a parameter, and whether the step was shortened. Raises
        EstimationError if it decreases along the direction for every step length, or a variance vanishes.
        """
        slope, step = float(at.score @ direction), self.longest(direction)
        # Near the maximum, the increase is below the rounding of the log-likelihood, and no step would
        # suffice.
        slack = rounding_error(at.log_likelihood, self.moments.nobs) / 2.0
        while step >= SMALLEST_STEP:
            trial = self.step(point, step * direction)
            if self.log_likelihood(trial) >= at.log_likelihood + SUFFICIENT * step * slope - slack:
                self.check(trial)
                return trial, float(np.abs(step * direction).max()), step < 1.0
            step /= 2.0
        raise self.no_ascent(point)

    def no_ascent(self, point: Point) -> EstimationError:
        """Return the error that the log-likelihood decreases along every step, however short."""
        if point.s2 >= NEARLY_VANISHING:
            if not self.profiled:
                return not_determined(self.moments, point.Q)
            return EstimationError(
                "the log-likelihood decreases along every step, however short; the columns are probably "
                "collinear across sites"
            )
        named = name_sparse(self.moments) if undetermined_pairs(self.moments) else ""
        # Independent blocks assume the same of sites without shared entities, so they are no remedy.
        why = vanishing_variance_message(self.moments)
        if named and not self.profiled:
            why += f". {named} The data may contradict this independence; leave out one of them"
        return EstimationError(why, remedy=None if named or self.profiled else INDEPENDENT)


def vanishing_variance_message(moments: PatternMoments) -> str:
    """Explain why there is no maximum."""
    return (
        f"a variance goes to zero, where the likelihood has no maximum: {moments.n_complete} of the "
        f"{int(moments.nobs)} entities are complete, and the coefficients may reproduce their "
        "response without error; leave out columns or sites"
    )
