"""Intervals of a response that was not observed: a refit's mean, and the errors around it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import t as t_law

from fedstat.errors import ModelError
from fedstat.models.boost.inference.refit import Refitted
from fedstat.typing import Floats

BLOCK = 256
"""Rows whose covariances along the response are in memory at once."""


def error_variances(fitted: Refitted, basis: Floats) -> Floats:
    """Variance of the errors at each point of the response, (G,); `basis` (G, L) is that along it.

    What the basis can hold of the errors has its covariance from the fit; the rest is taken as independent
    and alike at all points.
    """
    inverse = np.linalg.pinv(basis.T @ basis)
    smooth = basis @ inverse
    within = np.einsum("gj,jl,gl->g", smooth, fitted.errors, smooth)
    rest = np.maximum(1.0 - np.einsum("gj,gj->g", smooth, basis), 0.0)
    return np.asarray(within + fitted.rough * rest)


def mean_variances(fitted: Refitted, Z: Floats, basis: Floats) -> Floats:
    """Variance of the fitted mean of rows with columns Z (m, q), at each point: (m, G)."""
    q, L = fitted.B.shape
    V, out = fitted.posterior.reshape(L, q, L, q), np.empty((len(Z), len(basis)))
    for first in range(0, len(Z), BLOCK):
        z = Z[first : first + BLOCK]
        own = np.einsum("iq,lqkr,ir->ilk", z, V, z, optimize=True)
        out[first : first + BLOCK] = np.einsum("gl,ilk,gk->ig", basis, own, basis, optimize=True)
    return np.maximum(out, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class BoostPrediction:
    """Predictions with intervals, (m, G), NaN where a row lacks something.

    Rows have the names of `index`, and `t` are points of the response.

    Attributes
    ----------
    predicted_mean, var_pred_mean, var_resid : ndarray
        Mean, its variance, and that of the errors (G,).
    df_resid : float
        Rows less columns of the refit: of Student's t.
    conditions : str
        What the intervals are conditional on.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> model = fs.FedFunctionBoost.from_formula("num ~ age + sex", partition)
    >>> predicted = model.fit(steps=20, folds=6).refit().get_prediction(table.head(2))
    >>> predicted.summary_frame().columns[:2].tolist()
    ['mean', 'mean_se']
    """

    predicted_mean: Floats
    var_pred_mean: Floats
    var_resid: Floats
    df_resid: float
    conditions: str
    index: pd.Index
    t: Floats | None

    def summary_frame(self, alpha: float = 0.05) -> pd.DataFrame:
        """Means, and intervals of level 1 - alpha, with statsmodels' names.

        Returns
        -------
        DataFrame
            ``mean``, ``mean_se``, ``mean_ci_lower``, ``mean_ci_upper``, and ``obs_ci_lower`` and
            ``obs_ci_upper`` of a response that was not observed, at each point by itself; rows by those
            that were given, and by ``t`` of a curve. ``attrs["conditions"]`` says what they are conditional
            on.
        """
        if not 0.0 < alpha < 1.0:
            raise ModelError(f"alpha: expected a number between 0 and 1, received {alpha!r}")
        factor = float(t_law.isf(alpha / 2.0, self.df_resid))
        mean, se = self.predicted_mean, np.sqrt(self.var_pred_mean)
        of_one = np.sqrt(self.var_pred_mean + self.var_resid)
        columns = {"mean": mean, "mean_se": se}
        for name, size in (("mean", se), ("obs", of_one)):
            columns |= {f"{name}_ci_lower": mean - factor * size, f"{name}_ci_upper": mean + factor * size}
        index = self.index
        if self.t is not None:
            names = [str(self.index.name or "row"), "t"]
            index = pd.MultiIndex.from_product([self.index.tolist(), self.t.tolist()], names=names)
        out = pd.DataFrame({name: values.ravel() for name, values in columns.items()}, index=index)
        out.attrs["conditions"] = self.conditions
        return out
