"""Selection of columns from estimates alone: a penalised path on their quadratic loss.

The loss is ``(b - b*)' S^-1 (b - b*)`` in the coefficients, b* being the estimate and S its covariance (Wang
and Leng 2007): a least squares problem in moments that were repaired by the law of the columns, hence one of
a positive matrix. S is the inverse information at the estimate under that law, with the standard errors of
the bootstrap, so that noise makes a coefficient weigh less.

References
----------
Wang, H. and Leng, C. (2007). Unified lasso estimation by least squares approximation. Journal of the American
Statistical Association 102, 1039-1048.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.kernels.penalised.gram import gram_path
from fedstat.kernels.penalised.groups import Groups
from fedstat.kernels.penalised.path import PenalisedPath
from fedstat.kernels.penalised.penalties import Penalty
from fedstat.typing import Bools, Floats


@dataclass(frozen=True, slots=True, eq=False)
class QuadraticLoss:
    """Precision of the slopes of n entities in units in which its diagonal is 1: (p, p), units (p,)."""

    precision: Floats
    units: Floats
    n: int

    @classmethod
    def of(cls, covariance: Floats, errors: Floats, n: int) -> QuadraticLoss:
        """Give a covariance of slopes (p, p) other standard errors (p,), and invert it."""
        share = errors / np.sqrt(np.diag(covariance))
        precision = np.linalg.inv(covariance * np.outer(share, share)) / n
        units = np.sqrt(np.diag(precision))
        return cls(precision / np.outer(units, units), units, n)

    def path(self, slopes: Floats, penalty: Penalty) -> tuple[PenalisedPath, Floats]:
        """Follow the path from slopes (p,): coefficients in their own units, and the BIC of every fit."""
        u = slopes * self.units
        found = gram_path(self.precision, self.precision @ u, penalty, Groups.single(len(u)), algorithm="lla")
        away = found.coefficients - u
        lost = self.n * np.einsum("li,ij,lj->l", away, self.precision, away)
        return found, lost + np.log(self.n) * (found.coefficients != 0.0).sum(axis=1)

    def select(self, slopes: Floats, penalty: Penalty) -> Floats:
        """Slopes of the fit with the smallest BIC, 0 where they are not selected."""
        found, bic = self.path(slopes, penalty)
        return np.asarray(found.coefficients[int(np.argmin(bic))] / self.units)


def selection_frequencies(loss: QuadraticLoss, draws: Floats, penalty: Penalty) -> Floats:
    """Share of estimates (draws, p) that select each column: (p,)."""
    chosen: Bools = np.array([loss.select(slopes, penalty) != 0.0 for slopes in draws])
    return np.asarray(chosen.mean(axis=0))
