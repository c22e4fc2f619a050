"""What can be said after the fit of a federated GLM."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from fedstat.errors import NotAvailableError
from fedstat.federation.ledger import Ledger
from fedstat.federation.partition import ClientPartition
from fedstat.inference.estimate import Estimate
from fedstat.inference.evaluation import Evaluation
from fedstat.inference.heterogeneity import Heterogeneity, heterogeneity
from fedstat.inference.likelihood import cox_snell, mcfadden
from fedstat.inference.results import FederatedResults
from fedstat.inference.summary import ClientBlock
from fedstat.inference.tables import number
from fedstat.inference.vif import gvif
from fedstat.models.evaluation import evaluate_rows
from fedstat.models.glm.notes import fit_notes
from fedstat.models.glm.overdispersion import Overdispersion
from fedstat.models.glm.prediction import GLMPrediction, design_of, predict_rows
from fedstat.models.glm.protocol import GLMFit
from fedstat.models.glm.score_test import ScoreTest, score_test
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedstat.models.glm.model import FederatedGLM

UNDEFINED = "the family does not define a log-likelihood here"


class GLMResults(FederatedResults):
    """Results of :meth:`fedstat.FederatedGLM.fit`, with statsmodels' names and meanings.

    Attributes
    ----------
    family : statsmodels family
    fit_ : GLMFit
        Sums over sites at the estimate.
    overdispersion : Overdispersion or None
        The negative binomial's alpha with its standard error, where it was estimated.
    """

    method_name = "Newton's method from sums over sites"

    def __init__(
        self,
        estimate: Estimate,
        ledger: Ledger | None,
        fit: GLMFit,
        model: FederatedGLM,
        groups: tuple[str | None, str | None],
        overdispersion: Overdispersion | None = None,
    ) -> None:
        super().__init__(estimate, ledger)
        self.overdispersion = overdispersion
        self.family_spec = fit.family
        self.family = fit.family.make()
        self.fit_, self.model = fit, model
        self.model_name = model.model_name
        self._groups = groups
        self._auc: float | None = None
        self.evaluation_ledger: Ledger | None = None

    @classmethod
    def of(
        cls,
        model: FederatedGLM,
        fit: GLMFit,
        cov: Floats,
        cov_type: str,
        groups: tuple[str | None, str | None],
        ledger: Ledger,
        overdispersion: Overdispersion | None = None,
    ) -> GLMResults:
        """Make results of a fit."""
        design = fit.coordinates.design
        llf = float(fit.fit[0])
        estimate = Estimate(
            params=fit.params,
            cov=cov,
            names=design.names,
            clients=("",) * len(design.names),
            terms=design.term_names,
            response=model.formula.response,
            nobs=fit.n,
            df_model=float(len(design.names) - design.intercept),
            converged=fit.converged,
            convergence=fit.reason,
            llf=None if np.isnan(llf) else llf,
            n_parameters=len(design.names) + (overdispersion is not None),
            scale=fit.dispersion,
            cov_type=cov_type,
            privacy="none (no noise is added)",
            blocks=tuple(
                ClientBlock(row.site, len(design.names), row.n, 1.0 - row.n / row.n_rows)
                for row in model.agreement.sites
            ),
            reasons={"llf": UNDEFINED, "rsquared": "a GLM has pseudo_rsquared() instead"},
        )
        return cls(estimate, ledger, fit, model, groups, overdispersion)

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

        It needs no message: sites sent their own fits with the start, their parts of the sums with the rest.
        """
        return heterogeneity(self.estimate.names, self.estimate.params, self.scale, self.fit_.local)

    def plot_forest(self, coefficient: str, ax: Axes | None = None) -> Axes:
        """Forest plot of a coefficient over the sites."""
        return self.heterogeneity.plot_forest(coefficient, ax)

    def vif(self) -> pd.DataFrame:
        """Variance inflation factor of every term; generalised ones of terms with several columns."""
        return gvif(self._cov(), self.estimate.names, self.estimate.terms)

    def evaluate(self, partition: ClientPartition | None = None, *, bins: int | None = None) -> Evaluation:
        """Discrimination and calibration from counts in bins of the linear predictor.

        Parameters
        ----------
        partition : ClientPartition, optional
            New rows; by default those of the fit, on which the figures flatter.
        bins : int, optional
            By default as many as leave the smallest site enough rows in each.

        Returns
        -------
        Evaluation
            AUC over all and by site with bounds, observed and expected, ``plot_calibration()``.

        Raises
        ------
        PolicyError
            A site refuses.
        """
        chosen = self.model.partition if partition is None else partition
        evaluation, self.evaluation_ledger = evaluate_rows(
            self.model.agreement, self.family_spec, self.params.to_numpy(), chosen, bins=bins
        )
        if evaluation.binary:
            self._auc = evaluation.auc
        return evaluation

    @property
    def auc(self) -> float:
        """Area under the curve of the latest :meth:`evaluate`."""
        if self._auc is None:
            raise NotAvailableError("no AUC: call evaluate() first, which asks the sites for counts")
        return self._auc

    def score_test(self, terms: str) -> ScoreTest:
        """Score (Rao) test of terms that the fit does not have.

        The larger model is not fitted: sites evaluate its score once, at this estimate.

        Parameters
        ----------
        terms : str
            As on the right side of a formula, such as ``"chol + C(slope)"``.

        Returns
        -------
        (statistic, pvalue, df)

        Raises
        ------
        ModelError
            The terms add no coefficient, or rows of the fit lack their columns.
        """
        return score_test(self, terms)

    # -- prediction ------------------------------------------------------------------------------

    def predict(self, frame: pd.DataFrame, which: Literal["mean", "linear"] = "mean") -> pd.Series:
        """Predict for rows that the caller holds.

        Parameters
        ----------
        frame : DataFrame
            With the columns of the model; rows that lack one give NaN.
        which : {"mean", "linear"}

        Returns
        -------
        Series
        """
        eta = predict_rows(self.model, self.fit_, frame).linear
        return eta if which == "linear" else eta.map(self.family.link.inverse)

    def get_prediction(self, frame: pd.DataFrame) -> GLMPrediction:
        """Predict with standard errors and intervals; see :meth:`GLMPrediction.summary_frame`."""
        rows = predict_rows(self.model, self.fit_, frame)
        X = design_of(rows)
        se = np.sqrt(np.einsum("ij,jk,ik->i", X, self._cov(), X))
        return GLMPrediction(rows.linear, pd.Series(se, index=rows.linear.index), self.family)

    # -- summary ---------------------------------------------------------------------------------

    def _summary_left(self) -> list[tuple[str, str]]:
        left = super()._summary_left()
        spec = self.family_spec
        at = next(i for i, (label, _) in enumerate(left) if label == "Df Model")
        left[at - 2 : at - 2] = [("Model Family", spec.name), ("Link Function", spec.link)]
        rows: list[tuple[str, str]] = [
            ("Df Residuals", f"{self.df_resid:g}"),
            ("Scale", number(self.scale)),
            *([] if spec.alpha is None else [("Alpha", number(spec.alpha))]),
            ("Deviance", number(self.deviance)),
            ("Pearson chi2", number(self.pearson_chi2)),
            ("Pseudo R2 (CS)", self._or_dash(self.pseudo_rsquared)),
        ]
        left = [row for row in left if row[0] != "R-squared"]
        at = next(i for i, (label, _) in enumerate(left) if label == "Df Model") + 1
        return [*left[:at], *rows, *left[at:]]

    def _summary_notes(self) -> list[str]:
        return [*super()._summary_notes(), *fit_notes(self)]
