"""Firth's penalized likelihood of the logit, from sums over sites."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.convergence import ConvergenceTest
from fedstat.models.glm.fit import PooledSums
from fedstat.models.glm.protocol import Newton
from fedstat.models.glm.separation import check_rank
from fedstat.models.horizontal.session import add
from fedstat.models.rows.newton import MOST_HALVINGS, falls
from fedstat.typing import Floats

NO_LIKELIHOOD = (
    "Firth's estimate does not maximize the likelihood, so likelihood ratios and criteria do not exist for it"
)


class FirthNewton(Newton):
    """Newton's method for the likelihood times the root of the information's determinant.

    The maximum is finite even where outcomes are separated. Each point costs a second round, in which sites
    receive the inverse information of all and sum the derivative of the penalty.
    """

    def maximize(self) -> FitProtocol[tuple[Floats, PooledSums, bool]]:
        """Take steps with the inverse information until they are small."""
        gamma = np.zeros(len(self.coordinates.shift))
        if self.coordinates.design.intercept and not self.offsets:
            gamma[0] = self.null
        total = yield from self.evaluate(self.point(gamma))
        if total is None:
            raise EstimationError("sums at the start are not finite; measure the offset in other units")
        check_rank(total.information, self.coordinates)
        test = ConvergenceTest(self.n, self.tol)
        while True:
            penalized = yield from self._penalize(gamma, total)
            step = penalized.step()
            converged = self.assess(penalized, step, test)
            if converged or len(self.trace) >= self.maxiter:
                return gamma, total, converged
            gamma, total = yield from self._improve(gamma, total, step)

    def _improve(
        self, gamma: Floats, total: PooledSums, step: Floats
    ) -> FitProtocol[tuple[Floats, PooledSums]]:
        """Take a step, halved until the penalized deviance decreases."""
        before = penalized_likelihood(total)
        for halving in range(MOST_HALVINGS):
            trial = gamma + step * 0.5**halving
            new = yield from self.evaluate(self.point(trial))
            if new is not None and not falls(penalized_likelihood(new), before):
                return trial, new
        raise EstimationError(
            f"no step decreases the penalized deviance ({len(self.trace)} evaluations) with weight on more "
            "than a few rows of every site. Transform columns with long tails"
        )

    def _penalize(self, gamma: Floats, total: PooledSums) -> FitProtocol[PooledSums]:
        """Add the derivative of the penalty to the score."""
        arrays = {
            "beta": gamma,
            "shift": self.coordinates.shift,
            "scale": self.coordinates.scale,
            "inverse": np.linalg.inv(total.information),
        }
        replies = yield self.session.request_all("sum_firth", arrays)
        return replace(total, score=total.score + add(replies, "penalty"))


def penalized_likelihood(total: PooledSums) -> float:
    """Return the penalized log-likelihood, but for a constant."""
    return total.loglik + float(np.linalg.slogdet(total.information)[1]) / 2.0
