"""Boosting of losses that are no squares: paths from scores that were exchanged every so many steps.

Learners are fitted to slopes u of the loss by unweighted penalised least squares, as in mboost, so that of
the columns Z = [Z_1 .. Z_P] the products S leave once, and of the slopes the scores Z'u b alone. Between two
exchanges scores move by c S B G, with c a bound of the loss's curvature: that of the parabola above the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from fedstat.errors import NotAvailableError
from fedstat.models.boost.learning.boosting import Boosting, BoostPath, follow
from fedstat.models.boost.learning.losses import LossSpec
from fedstat.models.boost.learning.ready import Ready, Sums, make_ready
from fedstat.typing import Floats

NO_SQUARES = (
    "it follows from sums of products where squares are minimised; of this loss sites tell scores along one "
    "path and those of left-out folds only"
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoredBoosting(Boosting):
    """Boosting by exchanged scores, of P paths: that of all rows, and those without each fold.

    At exchange r, after r `every` steps, or after all: `scores` (Z'u b) and curvatures `bounds`, and losses
    summed over the rows of the path and over those left out, `risks`. `held` counts exchanges at which some
    site gave its last answer again, since a few rows alone would have changed it.
    """

    loss: LossSpec
    every: int
    taken: int
    scores: Annotated[Floats, "r p q l"]
    bounds: Annotated[Floats, "r p"]
    risks: Annotated[Floats, "r p 2"]
    held: int

    def offset(self, sums: Sums) -> Floats:
        """Predictor from which boosting of some rows starts, (G,)."""
        return first_predictor(self, self.loss, sums)

    @property
    def n_scores(self) -> int:
        """Those of every path at every exchange."""
        return int(self.risks.shape[0] * self.risks.shape[1])

    def start_risk(self) -> float:
        """Loss at the offset."""
        return float(self.risks[0, 0, 0])

    def over(self, folds: Any, steps: int, test: Any = None) -> tuple[Ready, BoostPath]:
        """Follow the path of all folds, or of all but one, again."""
        if steps > self.taken:
            raise NotAvailableError(f"scores were exchanged up to step {self.taken:,}: fit(steps={steps})")
        p = self._which(np.asarray(folds, dtype=bool))
        sums = self.moments.over(folds)
        ready = make_ready(sums, self.design, self.gram)
        parts, coef, risk = [], np.zeros(self.scores.shape[2:]), []
        risk_test = np.full(steps, np.nan)
        for r, first in enumerate(range(0, steps, self.every)):
            whole = min(self.every, self.taken - first)
            own = replace(sums, S=self.bounds[r, p] * sums.S, T=self.scores[r, p], yy=0.0)
            one = follow(ready, own, whole, self.nu)
            risk.append(self._risk(one.risk, r, p))
            if first + whole <= steps:
                risk_test[first + whole - 1] = self.risks[r + 1, p, 1]
            else:
                one = follow(ready, own, steps - first, self.nu)
            parts.append(one)
            coef += one.coef
        selected = np.concatenate([one.selected for one in parts])
        return ready, BoostPath(selected, np.concatenate(risk)[:steps], risk_test, coef)

    def _which(self, folds: Any) -> int:
        F, out = self.moments.folds, np.flatnonzero(~folds)
        if not len(out):
            return 0
        if len(out) > 1 or self.scores.shape[1] != F + 1:
            raise NotAvailableError(NO_SQUARES)
        return int(out[0]) + 1

    def _risk(self, squares: Floats, r: int, p: int) -> Floats:
        """Loss after each step between two exchanges, which tell it, by the steps' shares of the gain."""
        start, end = float(self.risks[r, p, 0]), float(self.risks[r + 1, p, 0])
        whole = squares[-1]  # of the parabolas, from zero
        share = squares / whole if whole < 0.0 else np.arange(1, len(squares) + 1) / len(squares)
        return np.asarray(start + share * (end - start))


def first_predictor(boosting: Boosting, loss: LossSpec, sums: Sums) -> Floats:
    """Predictor to start from: given, or by the mean of the response at each point, perhaps smoothed."""
    if boosting.given is not None:
        return boosting.given
    mean = sums.mean
    squares = float(sums.yy) - float(sums.cells / len(mean) * mean @ mean)
    found = loss.start(mean, float(np.sqrt(max(squares, 0.0) / sums.cells)))
    return boosting.smoothed(found) if boosting.smooth_offset else found
