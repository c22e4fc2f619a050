"""Predicted means with errors and intervals, marginal effects, and evaluation of a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import NotAvailableError
from fedstat.inference.estimate import takes_alpha
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.quadrature import marginal_mean
from fedstat.models.vfem.iteration.site_state import kernel_of
from fedstat.models.vfem.prediction_protocol import (
    LinearPredictors,
)
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Predicted means, their standard errors and intervals.


class MeanPredictions:
    """Predicted means with standard errors, for any distribution of the response.

    Attributes
    ----------
    predicted_mean : Series, (n,)
        E[y | the blocks that the entity has]: the mean over missing blocks, not the mean at their average.
    blocks : Series of int, (n,)
        Sites of the fit that have the entity.
    ledger : Ledger
        Releases of this prediction.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> fit = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition).fit()
    >>> predicted = fit.get_prediction(partition)
    >>> predicted.predicted_mean.shape, bool((predicted.se_mean > 0.0).all()), sorted(set(predicted.blocks))
    ((5000,), True, [0, 1, 2])
    >>> predicted.summary_frame().columns[:3].tolist(), predicted.conf_int().shape
    (['mean', 'mean_se', 'mean_ci_lower'], (5000, 2))
    """

    conf_int: Callable[..., pd.DataFrame]

    def __init__(
        self, linear: LinearPredictors, mean: pd.Series, gradient: Floats | None, distribution: Any
    ) -> None:
        self._test_distribution = distribution
        self.predicted_mean, self.blocks, self.ledger = mean, linear.blocks, linear.ledger
        self._gradient = gradient

    def _half_width(self, alpha: float) -> float:
        """Half the width of an interval of level 1 - alpha, in standard errors."""
        return float(self._test_distribution.ppf(1.0 - alpha / 2.0))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.predicted_mean):,} entities; see .summary_frame()>"

    @property
    def se_mean(self) -> pd.Series:
        """Standard error of the predicted mean, from all estimated parameters."""
        if self._gradient is None:
            raise NotAvailableError("no standard error of the mean: the fit has no covariance")
        lengths = np.sqrt(np.einsum("ij,ij->i", self._gradient, self._gradient))
        return pd.Series(lengths, index=self.predicted_mean.index)

    @takes_alpha
    def summary_frame(self, alpha: float = 0.05) -> pd.DataFrame:
        """One row per entity, with statsmodels' column names."""
        limits = self.conf_int(alpha=alpha)
        return pd.DataFrame(
            {
                "mean": self.predicted_mean,
                "mean_se": self.se_mean,
                "mean_ci_lower": limits[0],
                "mean_ci_upper": limits[1],
            }
        )


class PredictionResults(MeanPredictions):
    """Predicted means, their standard errors, and the variance of a new response.

    Attributes
    ----------
    predicted_mean, blocks, ledger
        See :class:`MeanPredictions`.
    var_resid : Series, (n,)
        v_g: residual variance, plus that of the blocks that the entity lacks.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> fit = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition).fit()
    >>> predicted = fit.get_prediction(partition)
    >>> bool((predicted.conf_int(obs=True)[0] < predicted.conf_int()[0]).all())
    True
    >>> predicted.summary_frame().columns[-2:].tolist()
    ['obs_ci_lower', 'obs_ci_upper']
    """

    def __init__(self, linear: LinearPredictors, s2: float, distribution: Any = stats.norm) -> None:
        gradient = None if linear.gradients is None else linear.gradients.mean
        super().__init__(linear, linear.mean, gradient, distribution)
        self.var_resid = s2 + linear.variance

    @takes_alpha
    def conf_int(self, obs: bool = False, alpha: float = 0.05) -> pd.DataFrame:
        """Return intervals of the mean, or with `obs` of a new response; columns 0 and 1.

        With `obs`, errors count as normal with equal variances, which :meth:`VFEMResults.predict_set` does
        not need.
        """
        spread = np.sqrt(self.se_mean**2 + self.var_resid) if obs else self.se_mean
        half = self._half_width(alpha) * spread
        return pd.DataFrame({0: self.predicted_mean - half, 1: self.predicted_mean + half})

    @takes_alpha
    def summary_frame(self, alpha: float = 0.05) -> pd.DataFrame:
        """One row per entity, with statsmodels' column names."""
        obs = self.conf_int(obs=True, alpha=alpha)
        return super().summary_frame(alpha).assign(obs_ci_lower=obs[0], obs_ci_upper=obs[1])


class GLMPredictionResults(MeanPredictions):
    """Predicted means with intervals.

    Attributes
    ----------
    predicted_mean, blocks, ledger
        See :class:`MeanPredictions`.
    linear : DataFrame, (n, 2)
        ``mean`` and ``variance`` of the linear predictor given these blocks; the variance is that of the
        missing blocks, zero for an entity with every block.

    Examples
    --------
    >>> import fedstat as fs, statsmodels.api as sm
    >>> data = fs.datasets.make_sme_risk(1_000)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> model = fs.VFEMGLM.from_formula("RISK ~ PL1 + CA1", partition, family=sm.families.Binomial())
    >>> predicted = model.fit().get_prediction(partition)
    >>> predicted.linear.columns.tolist(), bool(predicted.conf_int()[1].max() <= 1.0), predicted.se_mean.shape
    (['mean', 'variance'], True, (1000,))
    """

    def __init__(
        self, linear: LinearPredictors, distribution: DistributionSpec, tests: Any = stats.norm
    ) -> None:
        self.linear = pd.DataFrame({"mean": linear.mean, "variance": linear.variance})
        self._link = distribution.make().link
        m, v = (np.ascontiguousarray(values) for values in (linear.mean, linear.variance))
        mean, by_m, by_v = marginal_mean(kernel_of(distribution), m, v)
        gradient = None
        if linear.gradients is not None:
            gradient = by_m[:, None] * linear.gradients.mean + by_v[:, None] * linear.gradients.variance
        named = pd.Series(mean, index=linear.mean.index, name="predicted_mean")
        super().__init__(linear, named, gradient, tests)

    @property
    def se_mean(self) -> pd.Series:
        """Standard error of the predicted mean, from all estimated parameters."""
        return super().se_mean.rename("se_mean")

    @takes_alpha
    def conf_int(self, alpha: float = 0.05) -> pd.DataFrame:
        """Return intervals of the mean, symmetric on the scale of the link; columns 0 and 1.

        For an entity with every block, the interval is that of statsmodels.
        """
        mean = self.predicted_mean.to_numpy()
        # On the scale of the link, no limit leaves the range of the mean.
        center = self._link(mean)
        half = self._half_width(alpha) * self.se_mean.to_numpy() * self._link.deriv(mean)
        limits = {0: self._link.inverse(center - half), 1: self._link.inverse(center + half)}
        return pd.DataFrame(limits, index=self.predicted_mean.index)
