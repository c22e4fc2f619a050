"""Predictions of a federated GLM for rows that the caller holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import NotAvailableError
from fedstat.inference.estimate import Estimate
from fedstat.models.checks import check_choice
from fedstat.models.horizontal.prediction import PredictedRows, predict_rows

if TYPE_CHECKING:
    from fedstat.models.glm.fit import GLMFit
    from fedstat.models.glm.record import Basis


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


def at_the_sites(what: str) -> property:
    """Make a property of results that says where one value per row is."""

    def refuse(self: RowPredictions) -> NoReturn:
        raise NotAvailableError(
            f"no {what}: they are one value per row, which stay at the sites. predict(frame) predicts rows "
            "that you hold, and evaluate() judges the predictions where the rows are"
        )

    return property(refuse, doc=f"Not available: {what} stay at the sites.")


class RowPredictions:
    """Statements about rows, for results: those that the caller holds; the fit's stay at the sites."""

    estimate: Estimate
    family: Any
    fit_: GLMFit
    basis: Basis

    fittedvalues = at_the_sites("fitted values")
    mu = at_the_sites("fitted values")
    resid = at_the_sites("residuals")
    resid_response = at_the_sites("residuals")
    resid_pearson = at_the_sites("residuals")
    resid_deviance = at_the_sites("residuals")
    resid_anscombe = at_the_sites("residuals")
    resid_working = at_the_sites("residuals")

    def predict(
        self, frame: pd.DataFrame | None = None, which: Literal["mean", "linear"] = "mean"
    ) -> pd.Series:
        """Predict for rows that the caller holds.

        Parameters
        ----------
        frame : DataFrame
            With the columns of the model, and of its offset or exposure; rows that lack one give NaN.
        which : {"mean", "linear"}

        Returns
        -------
        Series

        Raises
        ------
        DesignError
            A column is absent, of another type, or holds a level that the fit did not know.
        NotAvailableError
            No frame is given: the rows of the fit stay at the sites.
        """
        check_choice("which", which, ("mean", "linear"))
        eta = self._predicted(frame).linear
        if which == "linear":
            return eta
        return pd.Series(self.family.link.inverse(eta.to_numpy()), index=eta.index)

    def get_prediction(self, frame: pd.DataFrame | None = None) -> GLMPrediction:
        """Predict with standard errors and intervals; see :meth:`GLMPrediction.summary_frame`."""
        rows = self._predicted(frame)
        assert self.estimate.cov is not None
        return GLMPrediction(rows.linear, rows.standard_errors(self.estimate.cov), self.family)

    def _predicted(self, frame: pd.DataFrame | None) -> PredictedRows:
        if frame is None:
            raise NotAvailableError(
                "predict needs a frame of rows that you hold; those of the fit stay at the sites, where "
                "evaluate() judges their predictions"
            )
        design = self.fit_.coordinates.design
        return predict_rows(self.basis.agreement, design, self.estimate.params, frame)
