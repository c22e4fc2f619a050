"""Response functions of Cox's model: survival at given times, as a function of coded rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.linalg import block_diag

from fedstat.errors import ModelError, Remedy
from fedstat.inference.effects import Means
from fedstat.models.cox.baseline import BaselineHazard
from fedstat.models.horizontal.response import RowsResponse
from fedstat.typing import Floats

NO_AVERAGE = "sites do not average survival over their rows"


@dataclass(frozen=True, eq=False, kw_only=True)
class SurvivalResponse(RowsResponse):
    """Survival ``S_j = exp(-H_j exp(x'b))`` at J times, with p coefficients and J cumulative hazards.

    The hazard H_j is estimated by ``G_j - (b - b0)'c_j``, where G_j does not depend on the coefficients: its
    increments are independent, and c_j is the sum of the hazard times the mean column at risk.

    Parameters
    ----------
    call : str
        Method of the result that needs the functions.
    hazard : (J,) array
    centers : (J, p) array
    """

    call: str
    hazard: Floats
    centers: Floats

    def _curves(self, frame: pd.DataFrame) -> tuple[Floats, Floats, Floats]:
        """Return coded rows X (m, p), their ratios exp(x'b) (m, 1), and survival (m, J)."""
        if not len(self.hazard):
            raise ModelError(
                f"{self.call}: survival is predicted at given times",
                remedy=Remedy("{method}(..., times=[12, 24])", "give them, as in {arguments}").filled(
                    method=self.call
                ),
            )
        X, offset = self.coded(frame)
        ratio = np.exp(X @ self.B[0] + offset)[:, None]
        return X, ratio, np.exp(-ratio * self.hazard)

    def _slopes(self, X: Floats) -> tuple[Floats, Floats]:
        """Return derivatives of the cumulative hazard over its ratio, and the identity, for G."""
        J = len(self.hazard)
        return X[:, None, :] * self.hazard[:, None] - self.centers, np.eye(J)[None]

    def means(self, frame: pd.DataFrame) -> Means:
        """Return survival of rows."""
        X, ratio, S = self._curves(frame)
        by_params, by_hazard = self._slopes(X)
        scale = -(ratio * S)[..., None]
        return Means(S, np.concatenate([scale * by_params, scale * by_hazard], axis=2))

    def derivatives(self, frame: pd.DataFrame, name: str) -> Means:
        """Return derivatives of survival of rows by a number: ``-S H r D'b``, with r the ratio."""
        (X, ratio, S), D = self._curves(frame), self.derivative(frame, name)
        along = (D @ self.B[0])[:, None]
        by_params, by_hazard = self._slopes(X)
        # The derivative of H r S by each parameter, by way of H r, which changes by r times the slopes.
        scale = -(along * ratio * S * (1.0 - ratio * self.hazard))[..., None]
        own = -(ratio * S * self.hazard)[..., None] * D[:, None, :]
        return Means(
            -along * ratio * S * self.hazard,
            np.concatenate([scale * by_params + own, scale * by_hazard], axis=2),
        )


def hazard_at(
    baseline: BaselineHazard | None, times: Sequence[float] | Floats, p: int
) -> tuple[Floats, Floats, Floats]:
    """Return cumulative hazards (J,) at times, their centers (J, p), and the covariance (J, J) of G."""
    if baseline is None:
        return np.zeros(0), np.zeros((0, p)), np.zeros((0, 0))
    part = baseline._part(np.asarray(times, dtype=np.float64))
    return part.hazard, part._centers, np.minimum.outer(part._variance, part._variance)


def joint_covariance(cov: Floats, of_hazard: Floats) -> Floats:
    """Return the covariance of coefficients and G."""
    return np.asarray(block_diag(cov, of_hazard)) if len(of_hazard) else cov
