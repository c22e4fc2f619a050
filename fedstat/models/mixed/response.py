"""Response functions of mixed models: means over the random effects, as functions of coded rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedstat.federation.design.site_rows import code_effects
from fedstat.inference.effects import Means
from fedstat.models.horizontal.response import RowsResponse
from fedstat.models.mixed.protocol import MixedFit
from fedstat.models.mixed.steps import averaged_means, joint_factor
from fedstat.typing import Floats


@dataclass(frozen=True, eq=False, kw_only=True)
class AveragedResponse(RowsResponse):
    """Means ``E f(eta + z'L u)`` over standard normal u, for rows with columns z of the random effects.

    Parameters are the p coefficients, and the K entries of the factors if `cov` has them. By the half
    variance v = z'LL'z / 2 the mean has the derivative E f'', and so on.
    """

    fit: MixedFit

    def _effects(self, frame: pd.DataFrame, by: str = "") -> Floats:
        """Code the columns of the effects (m, q) in their basis, or their derivatives by a number."""
        effects, question = self.fit.effects, self.agreement.question
        coded = code_effects(frame, question, self.agreement.spec, "", by)
        parts: Iterable[tuple[Floats, Floats, Floats, Floats]] = zip(
            (one.X for one in coded), effects.shift, effects.scale, effects.basis, strict=True
        )
        return np.column_stack(
            [(X - (0.0 if by else shift)) / scale @ basis for X, shift, scale, basis in parts]
        )

    def _with_factors(self, by_params: Floats, by_factors: Floats) -> Floats:
        slopes = np.column_stack([by_params, by_factors])
        return slopes[:, None, : len(self.cov)]

    def means(self, frame: pd.DataFrame) -> Means:
        """Return the means of rows."""
        (X, offset), Z = self.coded(frame), self._effects(frame)
        L, places = joint_factor(self.fit.theta, self.fit.effects.sizes)
        rows, columns = np.array(places).T
        eta, V = X @ self.fit.params + offset, Z @ L
        mean, first, second, _, _ = averaged_means(self.fit.distribution, eta, np.linalg.norm(V, axis=1))
        by_factors = second[:, None] * (Z[:, rows] * V[:, columns])
        return Means(mean[:, None], self._with_factors(first[:, None] * X, by_factors))

    def derivatives(self, frame: pd.DataFrame, name: str) -> Means:
        """Return the derivatives of the means of rows by a number, which may have random slopes."""
        (X, offset), D = self.coded(frame), self.derivative(frame, name)
        Z, dZ = self._effects(frame), self._effects(frame, name)
        L, places = joint_factor(self.fit.theta, self.fit.effects.sizes)
        rows, columns = np.array(places).T
        beta, V, dV = self.fit.params, Z @ L, dZ @ L
        found = averaged_means(self.fit.distribution, X @ beta + offset, np.linalg.norm(V, axis=1))
        _, first, second, third, fourth = found[..., None]
        along, half = (D @ beta)[:, None], np.einsum("mq,mq->m", V, dV)[:, None]
        by_params = first * D + (second * along + third * half) * X
        # v and its derivative by the number depend on the factors as well.
        own, moved = Z[:, rows] * V[:, columns], dZ[:, rows] * V[:, columns] + Z[:, rows] * dV[:, columns]
        by_factors = (third * along + fourth * half) * own + second * moved
        return Means(first * along + second * half, self._with_factors(by_params, by_factors))
