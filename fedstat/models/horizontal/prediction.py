"""Predictions for rows that the caller holds, coded as the sites coded theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from statsmodels.genmod import families

from fedstat.errors import DesignError, NotAvailableError
from fedstat.federation.design.coding import build_offset
from fedstat.federation.design.derivatives import code_frame
from fedstat.federation.design.horizontal_design import RowsDesign, RowsSchema
from fedstat.federation.design.site_rows import RowsRequest
from fedstat.federation.tables.columns import as_numbers, at_column, column_kind, pick_columns
from fedstat.inference.estimate import takes_alpha
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.checks import HeldRows, check_frame
from fedstat.typing import Bools, Floats

NODES, BISECTIONS = 41, 60
COUNTS = (families.Poisson, families.NegativeBinomial)
WITH_RESPONSES = ("Gaussian", "Gamma", "InverseGaussian", "Poisson", "NegativeBinomial")
"""Families whose mean and dispersion define the distribution of a new response."""


def response_dispersion(distribution: DistributionSpec, scale: float) -> float | None:
    """Dispersion of new responses; None if these are binary or their distribution does not exist."""
    counts = distribution.name in ("Poisson", "NegativeBinomial")
    known = distribution.name in WITH_RESPONSES and (scale == 1.0 or not counts)
    return scale if known else None


@dataclass(frozen=True, slots=True, eq=False)
class PredictedRows:
    """Linear predictor of every row (NaN if a column is missing), and the design of the complete rows."""

    linear: pd.Series
    complete: Bools
    X: Floats

    def standard_errors(self, cov: Floats) -> pd.Series:
        """Return the standard errors of the linear predictor."""
        variance = np.full(len(self.linear), np.nan)
        variance[self.complete] = ((self.X @ cov) * self.X).sum(axis=1)
        return pd.Series(np.sqrt(np.maximum(variance, 0.0)), index=self.linear.index)


def predict_rows(
    agreement: RowsSchema, design: RowsDesign, params: Floats, frame: pd.DataFrame
) -> PredictedRows:
    """Code rows as the sites coded theirs, and compute the linear predictor at params (p,).

    Parameters are in the units of the data; the frame needs no response. A DesignError says that a column is
    absent, of another type, or holds a level that the fit did not know.
    """
    _require_columns(frame, agreement)
    seen, X = code_frame(agreement, design, frame)
    linear = np.full(len(frame), np.nan)
    linear[seen] = X @ params
    linear += _known_part(frame, agreement.question)
    return PredictedRows(pd.Series(linear, index=frame.index), seen, X)


def held_rows(frame: HeldRows) -> pd.DataFrame:
    """Take rows that the caller holds, to be predicted, as a pandas table."""
    return check_frame(
        "predict", frame, "evaluate(partition) assesses predictions of rows that stay at the sites"
    )


def _require_columns(frame: pd.DataFrame, agreement: RowsSchema) -> None:
    """Require the columns of fixed terms, offsets and exposure; the error says what they are."""
    question = agreement.question
    columns = agreement.spec.part(question.terms).columns if question.terms else ()
    role = dict.fromkeys(columns, "a covariate of the model")
    role |= dict.fromkeys(question.offset_columns, "read by the offset of the model")
    if "exposure" in question.weights:
        role[question.weights["exposure"]] = "the exposure of the model; 1 predicts a rate"
    absent = [f"{name!r} ({what})" for name, what in role.items() if name not in frame.columns]
    if absent:
        raise DesignError(f"predict: the new rows lack the column {', '.join(absent)}")


def _known_part(frame: pd.DataFrame, question: RowsRequest) -> Floats:
    """Offset and logarithm of the exposure, NaN where a column of theirs is missing."""
    known = np.zeros(len(frame))
    if question.offsets:
        known += build_offset(frame, question.offsets, question.offset_columns, "")
    if "exposure" in question.weights:
        known += np.log(_exposure(frame, question.weights["exposure"]))
    return known


def _exposure(frame: pd.DataFrame, name: str) -> Floats:
    series = pick_columns(frame, [name], "")[name]
    if column_kind(series, "", name) != "number":
        raise DesignError(f"{at_column('', name)} holds categories; an exposure must be numbers")
    values = as_numbers(series, "", name)
    wrong = int((values <= 0.0).sum())
    if wrong:
        raise DesignError(
            f"{at_column('', name)}: {wrong:,} exposures are not positive; leave these rows out"
        )
    return values


@dataclass(frozen=True, slots=True, eq=False)
class GLMPrediction:
    """Predicted means with standard errors, from those of the linear predictor, by a statsmodels family.

    `linear` and `se_linear` are of the linear predictor; `family` is that of the model.

    `test_distribution` is the distribution of a standardized error: normal, or Student's t; `scale` the
    variance of a response about its mean in least squares, otherwise None. `dispersion` is that of the family
    if the distribution of a new response follows from it, otherwise None.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> predicted = fs.FederatedOLS.from_formula("num ~ age", partition).fit().get_prediction(table.head(2))
    >>> predicted.predicted_mean.round(2).tolist(), predicted.se_mean.round(3).tolist()
    ([0.73, 0.69], [0.043, 0.045])
    >>> predicted.conf_int(0.1).shape, predicted.conf_int_linear().shape, predicted.conf_int_obs().shape
    ((2, 2), (2, 2), (2, 2))
    >>> predicted.summary_frame().columns[0]
    'mean'
    """

    linear: pd.Series
    se_linear: pd.Series
    family: Any
    test_distribution: Any
    scale: float | None = None
    dispersion: float | None = None

    @property
    def predicted_mean(self) -> pd.Series:
        """Mean of the response."""
        return pd.Series(self.family.link.inverse(self.linear.to_numpy()), index=self.linear.index)

    @property
    def se_mean(self) -> pd.Series:
        """Standard error of the mean, by the delta method."""
        slope = np.abs(self.family.link.inverse_deriv(self.linear.to_numpy()))
        return pd.Series(slope * self.se_linear.to_numpy(), index=self.linear.index)

    @takes_alpha
    def conf_int_linear(self, alpha: float = 0.05) -> pd.DataFrame:
        """Intervals of the linear predictor."""
        half = self.test_distribution.isf(alpha / 2.0) * self.se_linear
        return pd.DataFrame({0: self.linear - half, 1: self.linear + half})

    @takes_alpha
    def conf_int(self, alpha: float = 0.05) -> pd.DataFrame:
        """Intervals of the mean: those of the linear predictor, transformed."""
        ends = self.family.link.inverse(self.conf_int_linear(alpha).to_numpy())
        return pd.DataFrame(np.sort(ends, axis=1), index=self.linear.index, columns=[0, 1])

    @takes_alpha
    def conf_int_obs(self, alpha: float = 0.05) -> pd.DataFrame:
        """Intervals of a new response, of variance weight one.

        Their limits are quantiles of the family's distribution, averaged over the distribution of the
        estimated mean. For counts they are integers.

        Raises
        ------
        NotAvailableError
            The response is binary or a share of trials, or the family has no distribution.
        """
        if self.scale is not None:
            half = self.test_distribution.isf(alpha / 2.0) * np.sqrt(self.se_linear**2 + self.scale)
            return pd.DataFrame({0: self.linear - half, 1: self.linear + half})
        if self.dispersion is None:
            raise NotAvailableError(
                "no prediction interval: the response is binary, or its family with this scale does not "
                "define the distribution of a new response. Take intervals of the mean"
            )
        low, high = (self._quantiles(level) for level in (alpha / 2.0, 1.0 - alpha / 2.0))
        return pd.DataFrame({0: low, 1: high}, index=self.linear.index)

    def _quantiles(self, level: float) -> Floats:
        """Quantiles of new responses, (rows,); nan where a row lacks a column."""
        nodes, weights = np.polynomial.legendre.leggauss(NODES)
        errors = self.test_distribution.ppf((nodes + 1.0) / 2.0)
        known = np.isfinite(self.linear.to_numpy())
        eta = self.linear.to_numpy()[known, None] + self.se_linear.to_numpy()[known, None] * errors
        response = self.family.get_distribution(self.family.link.inverse(eta), self.dispersion)
        ends = response.ppf(level)
        low, high = ends.min(axis=1) - 1.0, ends.max(axis=1)
        counts = isinstance(self.family, COUNTS)
        for _ in range(BISECTIONS):
            if counts and (high - low < 0.5).all():
                break
            middle = (low + high) / 2.0
            enough = response.cdf(middle[:, None]) @ weights / 2.0 >= level
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        out = np.full(len(known), np.nan)
        # The distribution function of a count jumps at the quantile, to which the bisection converges.
        out[known] = np.round(high) if counts else high
        return out

    @takes_alpha
    def summary_frame(self, alpha: float = 0.05) -> pd.DataFrame:
        """Table with ``mean``, ``mean_se``, ``mean_ci_lower``, ``mean_ci_upper``, as in statsmodels.

        For least squares also ``obs_ci_lower`` and ``obs_ci_upper``, of new responses.
        """
        limits = self.conf_int(alpha)
        frame = pd.DataFrame(
            {
                "mean": self.predicted_mean,
                "mean_se": self.se_mean,
                "mean_ci_lower": limits[0],
                "mean_ci_upper": limits[1],
            }
        )
        if self.scale is not None:
            frame[["obs_ci_lower", "obs_ci_upper"]] = self.conf_int_obs(alpha)
        return frame
