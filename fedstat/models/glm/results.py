"""What can be said after the fit of a federated GLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, cast

import numpy as np
import pandas as pd

from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.federation.ledger import Ledger
from fedstat.federation.partition import ClientPartition
from fedstat.inference.estimate import Estimate
from fedstat.inference.evaluation import Evaluation
from fedstat.inference.heterogeneity import Heterogeneity, heterogeneity
from fedstat.inference.likelihood import cox_snell, mcfadden
from fedstat.inference.results import FederatedResults
from fedstat.inference.summary import ClientBlock
from fedstat.inference.tables import SheetSummary
from fedstat.inference.vif import gvif
from fedstat.models.checks import check_choice
from fedstat.models.evaluation import evaluate_rows
from fedstat.models.glm.notes import estimate_lines, federation_lines, fit_notes, show_number, site_sheet
from fedstat.models.glm.overdispersion import Overdispersion
from fedstat.models.glm.prediction import GLMPrediction, PredictedRows, predict_rows
from fedstat.models.glm.protocol import GLMFit
from fedstat.models.glm.score_test import ScoreTest, score_test
from fedstat.models.glm.storage import FORMAT, Basis, read_saved, save_result
from fedstat.models.saved import READERS
from fedstat.typing import Array, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedstat.models.glm.model import FederatedGLM

UNDEFINED = "the family does not define a log-likelihood here"
AT_THE_SITES = (
    "no {}: they are one value per row, which stay at the sites. predict(frame) predicts rows that you hold, "
    "and evaluate() judges the predictions where the rows are"
)
SCALES = {"Logit": "log odds of {}", "Log": "log mean of {}", "Identity": "mean of {}"}
"""What a coefficient adds to, by link; the linear predictor for the others."""


def _at_the_sites(what: str) -> property:
    def refuse(self: GLMResults) -> NoReturn:
        raise NotAvailableError(AT_THE_SITES.format(what))

    return property(refuse, doc=f"Not available: {what} stay at the sites.")


class GLMResults(FederatedResults):
    """Results of :meth:`fedstat.FederatedGLM.fit`, with statsmodels' names and meanings.

    Attributes
    ----------
    family : statsmodels family
    fit_ : GLMFit
        Sums over sites at the estimate.
    basis : Basis
        What is kept of the model, with which new rows are coded.
    model : FederatedGLM or None
        None where the results were read from a file.
    overdispersion : Overdispersion or None
        The negative binomial's alpha with its standard error, where it was estimated.
    evaluation_ledger : Ledger or None
        What passed in the latest :meth:`evaluate`.
    """

    def __init__(
        self,
        estimate: Estimate,
        ledger: Ledger | None,
        fit: GLMFit,
        basis: Basis,
        overdispersion: Overdispersion | None = None,
        model: FederatedGLM | None = None,
    ) -> None:
        super().__init__(estimate, ledger)
        self.fit_, self.basis = fit, basis
        self.model = cast("FederatedGLM", model)  # None after load: see _need_model
        self.overdispersion = overdispersion
        self.family_spec = fit.family
        self.family = fit.family.make()
        self.model_name = basis.model_name
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
        basis = Basis(model.model_name, model.agreement, model.partition.site_column, *groups)
        return cls(estimate, ledger, fit, basis, overdispersion, model)

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
        if scale is None or self.family_spec.estimates_scale:
            raise ModelError("info_criteria: 'qaic' is for counts and proportions, and needs a scale")
        return -2.0 * self.llf * self.scale / scale + 2.0 * (self._n_parameters + dk_params)

    @property
    def trace(self) -> pd.DataFrame:
        """Deviance, Newton's step in standard errors and its largest move, by evaluation of the sums."""
        frame = pd.DataFrame([asdict(row) for row in self.fit_.trace])
        return frame.set_axis(pd.RangeIndex(1, len(frame) + 1, name="evaluation"))

    fittedvalues = _at_the_sites("fitted values")
    mu = _at_the_sites("fitted values")
    resid = _at_the_sites("residuals")
    resid_response = _at_the_sites("residuals")
    resid_pearson = _at_the_sites("residuals")
    resid_deviance = _at_the_sites("residuals")
    resid_anscombe = _at_the_sites("residuals")
    resid_working = _at_the_sites("residuals")

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

        It needs no message: sites sent their own fits with the start, their parts of the sums with the rest.
        Without own fits (``local=False``) there are the score test and the fit without each site.

        Raises
        ------
        NotAvailableError
            There is one site, or the sums do not tell the columns apart.
        """
        if len(self.fit_.local) == 1:
            raise NotAvailableError("no heterogeneity: it compares sites, and this fit has one")
        est = self.estimate
        try:
            return heterogeneity(est.names, est.params, self.scale, self.fit_.local)
        except EstimationError as error:
            raise NotAvailableError(
                "no heterogeneity: a column lies too far from zero for its spread to be told; centre it, as "
                "in center(year)"
            ) from error

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
        NotAvailableError
            No partition is given, and the results were read from a file.
        """
        if partition is None:
            partition = self._need_model("evaluate without a partition", "give one").partition
        evaluation, self.evaluation_ledger = evaluate_rows(
            self.basis.agreement, self.family_spec, self.params.to_numpy(), partition, bins=bins
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
        NotAvailableError
            The results were read from a file.
        """
        self._need_model("score_test", "fit the model again, or the larger one")
        return score_test(self, terms)

    # -- prediction ------------------------------------------------------------------------------

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
        return GLMPrediction(rows.linear, rows.standard_errors(self._cov()), self.family)

    def _predicted(self, frame: pd.DataFrame | None) -> PredictedRows:
        if frame is None:
            raise NotAvailableError(
                "predict needs a frame of rows that you hold; those of the fit stay at the sites, where "
                "evaluate() judges their predictions"
            )
        design = self.fit_.coordinates.design
        return predict_rows(self.basis.agreement, design, self.estimate.params, frame)

    # -- keeping ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the results to a file of arrays and JSON; read it with :func:`fedstat.load`.

        It holds the estimates, the sums of every site, the ledger, and how columns are coded (with means
        and knots of transforms), and no value of a row.

        Parameters
        ----------
        path : str or Path
        """
        save_result(path, self)

    def _need_model(self, what: str, remedy: str) -> FederatedGLM:
        if self.model is None:
            raise NotAvailableError(
                f"{what}: this result was read from a file and has no partition; {remedy}"
            )
        return self.model

    # -- summary ---------------------------------------------------------------------------------

    def summary(self, alpha: float = 0.05) -> SheetSummary:
        """Estimate, federation, coefficients, sites, notes; as :meth:`FederatedResults.summary`."""
        usual = super().summary(alpha)
        return SheetSummary([*usual.sheets[:-1], site_sheet(self)], usual.notes, usual.headline)

    def plot_coefficients(
        self, ax: Axes | None = None, *, conf_level: float = 0.95, intercept: bool = False
    ) -> Axes:
        """Coefficients with intervals on the link's scale; as :meth:`FederatedResults.plot_coefficients`."""
        ax = super().plot_coefficients(ax, conf_level=conf_level, intercept=intercept)
        scale = SCALES.get(self.family_spec.link, "linear predictor of {}")
        ax.set_xlabel(f"effect on the {scale.format(self.estimate.response)}", parse_math=False)
        return ax

    def __repr__(self) -> str:
        est, sites = self.estimate, len(self.fit_.local)
        state = "" if est.converged else ", NOT CONVERGED"
        return (
            f"<{self.model_name} results: {est.response}, {show_number(len(est.names), 'coefficient')}, "
            f"{show_number(est.nobs, 'row')} at {show_number(sites, 'site')}{state}; see .summary()>"
        )

    def _summary_left(self) -> list[tuple[str, str]]:
        return estimate_lines(self)

    def _summary_right(self) -> list[tuple[str, str]]:
        return federation_lines(self)

    def _summary_notes(self) -> list[str]:
        return [*super()._summary_notes(), *fit_notes(self)]


def from_file(header: Mapping[str, str], arrays: Mapping[str, Array]) -> GLMResults:
    """Rebuild results from what a file holds."""
    saved = read_saved(header, arrays)
    result = GLMResults(saved.estimate, saved.ledger, saved.fit, saved.basis, saved.overdispersion)
    result._auc = saved.auc
    return result


READERS[FORMAT] = from_file
