"""Numbers of a federated GLM: deviances, criteria, sites' own fits and how far they agree."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import pandas as pd

from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.design.by_rows import RowsAgreement, RowsDesign
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.estimate import Estimate
from fedstat.inference.heterogeneity.heterogeneity import Heterogeneity, heterogeneity
from fedstat.inference.likelihood import cox_snell, mcfadden
from fedstat.inference.results import FederatedResults
from fedstat.inference.vif import gvif
from fedstat.models.checks import check_choice
from fedstat.models.glm.fit import GLMFit
from fedstat.models.glm.overdispersion import Overdispersion
from fedstat.models.glm.record import Basis
from fedstat.models.horizontal.evaluation import RowEvaluation
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.prediction import RowPredictions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAR = 1e5
"""Means, in standard deviations, beyond which sums of squares lose ten of their sixteen digits."""


class GLMStatements(RowPredictions, RowEvaluation, FederatedResults):
    """What follows from a fit in numbers, with statsmodels' names and meanings.

    Attributes
    ----------
    family : statsmodels family
    fit_ : GLMFit
        Sums over sites at the estimate.
    basis : Basis
        What is kept of the model, with which new rows are coded.
    model : HorizontalModel or None
        None where the results were read from a file.
    overdispersion : Overdispersion or None
        The negative binomial's alpha with its standard error, where it was estimated.
    """

    def __init__(
        self,
        estimate: Estimate,
        ledger: Ledger | None,
        fit: GLMFit,
        basis: Basis,
        overdispersion: Overdispersion | None = None,
        model: HorizontalModel | None = None,
    ) -> None:
        super().__init__(estimate, ledger)
        self.fit_, self.basis = fit, basis
        self.model = cast("HorizontalModel", model)  # None after load
        self.overdispersion = overdispersion
        self.distribution = fit.family
        self.family = fit.family.make()
        self.model_name = basis.model_name

    # -- statements ------------------------------------------------------------------------------

    @property
    def deviance(self) -> float:
        """Deviance of the model."""
        return self.fit_.total.deviance

    @property
    def null_deviance(self) -> float:
        """Deviance of the model with an intercept (and offset) only."""
        return float(self.fit_.fit[2])

    @property
    def llnull(self) -> float:
        """Log-likelihood of the model with an intercept (and offset) only."""
        value = float(self.fit_.fit[1])
        return self._need("llf", None if np.isnan(value) else value)

    @property
    def pearson_chi2(self) -> float:
        """Sum of squared Pearson residuals."""
        return self.fit_.total.pearson

    @property
    def df_resid(self) -> float:
        """Sum of the frequency weights less the number of coefficients."""
        return self.fit_.total.weight - len(self.estimate.names)

    @property
    def df_null(self) -> float:
        """Residual degrees of freedom of the model with an intercept (and offset) only."""
        return self.fit_.total.weight - 1.0

    @property
    def bic(self) -> float:
        """Schwarz's criterion; the sample size is the sum of the frequency weights."""
        return -2.0 * self.llf + float(np.log(self.fit_.total.weight)) * self._n_parameters

    def pseudo_rsquared(self, kind: Literal["cs", "mcf"] = "cs") -> float:
        """Pseudo R-squared of Cox and Snell ("cs") or McFadden ("mcf"), as in statsmodels."""
        if kind == "mcf":
            return mcfadden(self.llf, self.llnull)
        if kind == "cs":
            return cox_snell(self.llf, self.llnull, self.nobs)
        raise NotAvailableError(f"pseudo_rsquared: expected 'cs' or 'mcf', received {kind!r}")

    def info_criteria(
        self, crit: Literal["aic", "bic", "qaic"], scale: float | None = None, dk_params: int = 0
    ) -> float:
        """Information criterion, as in statsmodels.

        Parameters
        ----------
        crit : {"aic", "bic", "qaic"}
        scale : float, optional
            For "qaic": the dispersion of the largest of the models that are compared.
        dk_params : int
            Parameters to count beside the coefficients, such as the dispersion.
        """
        check_choice("crit", crit, ("aic", "bic", "qaic"))
        if crit == "bic":
            return self.bic + dk_params * float(np.log(self.fit_.total.weight))
        if crit == "aic":
            return self.aic + 2.0 * dk_params
        if scale is None or self.distribution.estimates_scale:
            raise ModelError("info_criteria: 'qaic' is for counts and proportions, and needs a scale")
        return -2.0 * self.llf * self.scale / scale + 2.0 * (self._n_parameters + dk_params)

    @property
    def trace(self) -> pd.DataFrame:
        """Deviance, Newton's step in standard errors and its largest move, by evaluation of the sums."""
        frame = pd.DataFrame([asdict(row) for row in self.fit_.trace])
        return frame.set_axis(pd.RangeIndex(1, len(frame) + 1, name="evaluation"))

    # -- sites -----------------------------------------------------------------------------------

    @property
    def site_estimates(self) -> pd.DataFrame:
        """Every site's own fit, (sites, coefficients); NaN where a site does not determine one."""
        rows = {
            fit.site: np.full(len(self.params), np.nan) if fit.beta is None else fit.beta
            for fit in self.fit_.local
        }
        return pd.DataFrame.from_dict(rows, orient="index", columns=list(self.estimate.names))

    @cached_property
    def heterogeneity(self) -> Heterogeneity:
        """How far the sites agree: Cochran's Q, I2, random effects, the fit without each site.

        It needs no message: sites sent their own fits with the start, and what the score test adds up with
        the rest. Without own fits (``local=False``) there is no Q; of masked sums there is no fit without
        each site.

        Raises
        ------
        NotAvailableError
            There is one site, or the sums do not tell a column from the intercept.
        """
        if len(self.fit_.local) == 1:
            raise NotAvailableError("no heterogeneity: it compares sites, and this fit has one")
        est, columns = self.estimate, self.fit_.coordinates
        far = np.abs(columns.shift) > FAR * columns.scale
        if far.any():
            listed = ", ".join(name for name, is_far in zip(est.names, far, strict=True) if is_far)
            raise NotAvailableError(
                f"no heterogeneity: columns too far from zero for their spread: {listed}. Centre them, as in "
                "center(year)"
            )
        try:
            return heterogeneity(
                est.names, est.params, self.scale, self.fit_.local, masked=self.fit_.masked_parts
            )
        except EstimationError as error:
            raise NotAvailableError(f"no heterogeneity: {error}") from error

    def plot_forest(self, coefficient: str, ax: Axes | None = None) -> Axes:
        """Forest plot of a coefficient over the sites."""
        return self.heterogeneity.plot_forest(coefficient, ax)

    def vif(self) -> pd.DataFrame:
        """Variance inflation factor of every term; generalised ones of terms with several columns."""
        return gvif(self._cov(), self.estimate.names, self.estimate.terms)

    def _agreed(self) -> tuple[RowsAgreement, ClientPartition | None]:
        return self.basis.agreement, None if self.model is None else self.model.partition

    def _coding(self) -> tuple[RowsAgreement, RowsDesign]:
        return self.basis.agreement, self.fit_.coordinates.design
