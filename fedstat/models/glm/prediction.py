"""Predictions of a federated GLM for rows that the caller holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.federation.block import apply_block
from fedstat.federation.block_response import build_offset
from fedstat.typing import Bools, Floats

if TYPE_CHECKING:
    from fedstat.models.glm.model import FederatedGLM
    from fedstat.models.glm.protocol import GLMFit


@dataclass(frozen=True, slots=True, eq=False)
class PredictedRows:
    """Linear predictor of every row (NaN where a column is missing), and the design of the whole ones."""

    linear: pd.Series
    whole: Bools
    X: Floats


@dataclass(frozen=True, slots=True, eq=False)
class GLMPrediction:
    """Predicted means with standard errors.

    Parameters
    ----------
    linear, se_linear : Series
        Linear predictor and its standard error.
    family : statsmodels family
    """

    linear: pd.Series
    se_linear: pd.Series
    family: Any

    @property
    def predicted_mean(self) -> pd.Series:
        """Mean of the response."""
        return pd.Series(self.family.link.inverse(self.linear.to_numpy()), index=self.linear.index)

    @property
    def se_mean(self) -> pd.Series:
        """Standard error of the mean, by the delta method."""
        slope = np.abs(self.family.link.inverse_deriv(self.linear.to_numpy()))
        return pd.Series(slope * self.se_linear.to_numpy(), index=self.linear.index)

    def conf_int(self, alpha: float = 0.05) -> pd.DataFrame:
        """Intervals of the mean: those of the linear predictor, transformed."""
        half = stats.norm.ppf(1.0 - alpha / 2.0) * self.se_linear
        ends = np.column_stack(
            [self.family.link.inverse((self.linear + sign * half).to_numpy()) for sign in (-1.0, 1.0)]
        )
        return pd.DataFrame(np.sort(ends, axis=1), index=self.linear.index, columns=[0, 1])

    def summary_frame(self, alpha: float = 0.05) -> pd.DataFrame:
        """Table with ``mean``, ``mean_se``, ``mean_ci_lower``, ``mean_ci_upper``, as in statsmodels."""
        limits = self.conf_int(alpha)
        return pd.DataFrame(
            {
                "mean": self.predicted_mean,
                "mean_se": self.se_mean,
                "mean_ci_lower": limits[0],
                "mean_ci_upper": limits[1],
            }
        )


def predict_rows(model: FederatedGLM, fit: GLMFit, frame: pd.DataFrame) -> PredictedRows:
    """Code rows as the sites coded theirs, and compute the linear predictor."""
    question, design = model.question, fit.coordinates.design
    first = int(design.intercept)
    if question.terms:
        spec = replace(model.agreement.spec, names=design.names[first:], term_names=design.term_names[first:])
        block = apply_block(frame, spec)
        seen, X = block.seen, block.X
    else:
        seen, X = np.ones(len(frame), dtype=bool), np.empty((len(frame), 0))
    if design.intercept:
        X = np.column_stack([np.ones(len(X)), X])
    linear = np.full(len(frame), np.nan)
    linear[seen] = X @ fit.params
    if question.offsets:
        linear += build_offset(frame, question.offsets, question.offset_columns, "")
    if "exposure" in question.weights:
        linear += np.log(frame[question.weights["exposure"]].to_numpy(dtype=np.float64, na_value=np.nan))
    return PredictedRows(pd.Series(linear, index=frame.index), seen, X)


def design_of(rows: PredictedRows) -> Floats:
    """Design of all rows, NaN where a column is missing: (m, p)."""
    X = np.full((len(rows.linear), rows.X.shape[1]), np.nan)
    X[rows.whole] = rows.X
    return X
