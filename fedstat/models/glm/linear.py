"""Results of least squares over rows: R-squared, F and t tests, intervals of new responses."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.inference.tables import number
from fedstat.models.glm.notes import covariance_line, role_lines, show_count, tests_line
from fedstat.models.glm.record import GLMRecord
from fedstat.models.glm.results import GLMResults
from fedstat.models.horizontal.prediction import GLMPrediction

LEVEL_IN_FULL = re.compile(r"\[(?![A-Z]\.)[^\]]*\]$")
"""Ending of a column of a factor that has one for every level, as formulas without an intercept have."""


class OLSResults(GLMResults, saved_as="fedstat ols results 1", record=GLMRecord):
    """Results of :meth:`fedstat.FederatedOLS.fit`, with the names and meanings of statsmodels' OLS, or WLS.

    All follows from what a Gaussian GLM sums: deviance is the sum of squared residuals, and that of the model
    without covariates the centred total.

    Examples
    --------
    >>> import fedstat as fs
    >>> rows = fs.datasets.make_hospitals()
    >>> hospitals = fs.ClientPartition.from_frame(rows, by="hospital")
    >>> fit = fs.FederatedOLS.from_formula("num ~ age + sex", hospitals).fit()
    >>> fit.k_constant, fit.df_model, bool(fit.rsquared > fit.rsquared_adj)
    (1, 2.0, True)
    >>> bool(abs(fit.ess + fit.ssr - fit.centered_tss) < 1e-6), bool(fit.centered_tss < fit.uncentered_tss)
    (True, True)
    >>> bool(abs(fit.fvalue - fit.mse_model / fit.mse_resid) < 1e-9), bool(fit.f_pvalue < 0.001)
    (True, True)
    >>> bool(fit.mse_resid < fit.mse_total)
    True
    >>> list(fit.get_prediction(rows.head(2)).summary_frame())[-2:]
    ['obs_ci_lower', 'obs_ci_upper']
    """

    @property
    def k_constant(self) -> int:
        """1 where columns span a constant: an intercept, or a column for every level of a factor; else 0."""
        design = self._fit.design
        if design.intercept:
            return 1
        factors = {
            term
            for term, name in zip(design.term_names, design.names, strict=True)
            if ":" not in term and LEVEL_IN_FULL.search(name)
        }
        return int(bool(factors))

    @property
    def df_model(self) -> float:
        """Coefficients less the constant."""
        return float(len(self.estimate.names) - self.k_constant)

    @property
    def ssr(self) -> float:
        """Sum of squared residuals, weighted where rows are."""
        return self.deviance

    @property
    def centered_tss(self) -> float:
        """Sum of squared deviations of the response from its mean."""
        return self.null_deviance

    @property
    def uncentered_tss(self) -> float:
        """Sum of squares of the response."""
        fit = self._fit
        return self.ssr + float(fit.gamma @ fit.total.information @ fit.gamma)

    @property
    def ess(self) -> float:
        """Explained sum of squares."""
        return (self.centered_tss if self.k_constant else self.uncentered_tss) - self.ssr

    @property
    def mse_model(self) -> float:
        """Explained sum of squares over its degrees of freedom."""
        return self.ess / self.df_model if self.df_model else float("nan")

    @property
    def mse_resid(self) -> float:
        """Sum of squared residuals over its degrees of freedom."""
        return self.ssr / self.df_resid

    @property
    def mse_total(self) -> float:
        """Total sum of squares over its degrees of freedom."""
        return (self.ess + self.ssr) / (self.df_resid + self.df_model)

    @property
    def rsquared(self) -> float:
        """Share of the sum of squares that is explained; about zero, and not the mean, without a constant."""
        return self.ess / (self.ess + self.ssr)

    @property
    def fvalue(self) -> float:
        """F statistic of all coefficients but the constant; Wald's where errors are robust.

        As in statsmodels nan where errors are robust and no column is the constant that several span; and
        where there are no more clusters than these coefficients, whose covariance is then singular.
        """
        if self.cov_type == "nonrobust":
            return self.mse_model / self.mse_resid
        tested = np.eye(len(self.params))[self._k_constant :]
        few = self.basis.counts is not None and self.basis.counts[0] <= len(tested)
        if few or not self.df_model or self.k_constant > self._k_constant:
            return float("nan")
        return float(self.f_test(tested).statistic)

    @property
    def f_pvalue(self) -> float:
        """P-value of :attr:`fvalue`."""
        # Clusters less one, as in statsmodels also where tests of single coefficients are normal.
        counts = self.basis.counts
        df = self.df_resid if counts is None else counts[0] - (counts[1] if self.basis.strata else 1)
        return float(stats.f.sf(self.fvalue, self.df_model, df)) if self.df_model else float("nan")

    def get_prediction(self, frame: pd.DataFrame | None = None) -> GLMPrediction:
        """Predict with standard errors, and intervals of mean and response (``obs_ci_lower``, ``_upper``)."""
        found = super().get_prediction(frame)
        return GLMPrediction(found.linear, found.se_linear, found.family, found.law, self.scale)

    def _glance(self) -> dict[str, float]:
        own = {
            "adj_r_squared": self.rsquared_adj,
            "sigma": self.scale**0.5,
            "statistic": self.fvalue,
            "p_value": self.f_pvalue,
        }
        return super()._glance() | own

    def _summary_left(self) -> list[tuple[str, str]]:
        return [
            ("Dep. Variable", self.estimate.response),
            ("Model", self.model_name),
            ("Method", "Least Squares"),
            ("No. Observations", f"{self.nobs:,}"),
            *role_lines(self),
            ("Df Residuals", show_count(self.df_resid)),
            ("Df Model", f"{self.df_model:g}"),
            ("R-squared", number(self.rsquared)),
            ("Adj. R-squared", number(self.rsquared_adj)),
            ("F-statistic", number(self.fvalue)),
            ("Prob (F)", number(self.f_pvalue)),
            ("Scale", number(self.scale)),
            ("Log-Likelihood", number(self.llf, 2)),
            ("AIC", number(self.aic, 2)),
            ("BIC", number(self.bic, 2)),
            ("Covariance Type", covariance_line(self)),
            ("Tests", tests_line(self)),
        ]

    def _summary_notes(self) -> list[str]:
        about = (
            "" if self.k_constant else "R-squared is about zero and not the mean: no columns span a constant."
        )
        return [*super()._summary_notes(), *([about] if about else [])]
