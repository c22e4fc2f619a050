"""Statistics of a GLM: deviances, information criteria, and agreement of the sites' own fits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, NoReturn, overload

import numpy as np
import pandas as pd

from fedstat.errors import EstimationError, ModelError, NotAvailableError, Remedy
from fedstat.inference.covariance import gvif
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.heterogeneity import Heterogeneity, heterogeneity
from fedstat.inference.likelihood import cox_snell, mcfadden
from fedstat.models.checks import HeldRows, check_choice
from fedstat.models.glm.firth import NO_LIKELIHOOD as FIRTH
from fedstat.models.glm.fit import GLMFit
from fedstat.models.glm.overdispersion import Overdispersion
from fedstat.models.horizontal.clusters import Clustering
from fedstat.models.horizontal.prediction import GLMPrediction, response_dispersion
from fedstat.models.horizontal.results import RowsBasis, RowsRecord, RowsResults
from fedstat.models.horizontal.site_results import SiteFitsResults
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Records of a fitted model in results, and in their files.


@dataclass(frozen=True, slots=True, eq=False)
class GLMBasis(RowsBasis):
    """Model record of results, with the columns of clusters and strata that the covariance uses.

    `counts` are the numbers of these clusters and strata; `estimates_dispersion` is whether the dispersion
    was estimated; `df_inference` the degrees of freedom of Student's t, None for normal tests, and the fewest
    where coefficients have their own; `method` is "ml" or "firth"; `clustering` describes the clusters.
    """

    clusters: str | None = None
    strata: str | None = None
    counts: tuple[int, int] | None = None
    estimates_dispersion: bool = False
    df_inference: float | None = None
    method: str = "ml"
    clustering: Clustering | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GLMRecord(RowsRecord):
    """Content of a file of results."""

    fit: GLMFit
    basis: GLMBasis
    overdispersion: Overdispersion | None = None

    def check(self) -> None:
        """Require parts of one fit; their shapes are checked earlier."""
        agreed, local = self.basis.agreement, self.fit.local
        in_clear = {self.fit.total.by_site is not None, *(own.score is not None for own in local)}
        together = (
            self.estimate.names == self.fit.design.names
            and [own.site for own in local] == [row.site for row in agreed.sites]
            and (agreed.question.terms, agreed.question.columns) == (agreed.spec.terms, agreed.spec.columns)
            and len(in_clear) == 1
        )
        if not (together and self.fit.trace):
            raise ModelError("coefficients, sites, columns and sums do not belong to one fit")


# ----------------------------------------------------------------------------------------------------
# Numbers of a federated GLM: deviances, criteria, sites' own fits and their agreement.

WEIGHTED = "weighted"
"""In place of a method: rows have estimated weights, and there is no likelihood."""
WITHOUT_LIKELIHOOD = {
    "firth": FIRTH,
    WEIGHTED: "rows weighted by a propensity model have no likelihood, and criteria and likelihood ratios do "
    "not exist; use wald_test",
}
"""Why there is no likelihood, by the method of the fit."""
FAR = 1e5
"""Means, in standard deviations, beyond which sums of squares lose ten of their sixteen digits."""

AT_THE_SITES = """

Examples
--------
>>> import fedstat as fs
>>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
>>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
>>> try:
...     fit.resid
... except fs.errors.NotAvailableError as error:
...     print(str(error)[:40])
no residuals: they are one value per row
"""


def at_the_sites(what: str) -> property:
    """Make a property that explains where values per row are."""

    def refuse(self: GLMStatements) -> NoReturn:
        raise NotAvailableError(
            f"no {what}: they are one value per row, which stay at the sites",
            remedy=Remedy(
                "evaluate()", "{call} assesses predictions at the sites, predict(frame) is for your own rows"
            ),
        )

    return property(refuse, doc=f"Not available: {what} stay at the sites.{AT_THE_SITES}")


class GLMStatements(SiteFitsResults, RowsResults):
    """Numbers of a fit, with statsmodels' names and meanings.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
    >>> fit.bic < fit.info_criteria("bic", dk_params=1), fit.llf > fit.llnull, fit.null_deviance > 1200
    (True, True, True)
    >>> fit.df_null, fit.df_inference, round(fit.pseudo_rsquared("mcf"), 2)
    (919.0, None, 0.12)
    >>> fit.trace.columns.tolist(), fit.vif().index.tolist(), fit.site_estimates.shape
    (['deviance', 'step', 'move'], ['age', 'sex'], (4, 3))
    >>> bool(fit.plot_forest("age").has_data()), fit.overdispersion
    (True, None)
    """

    _record: GLMRecord

    fittedvalues = at_the_sites("fitted values")
    mu = at_the_sites("fitted values")
    resid = at_the_sites("residuals")
    resid_response = at_the_sites("residuals")
    resid_pearson = at_the_sites("residuals")
    resid_deviance = at_the_sites("residuals")
    resid_anscombe = at_the_sites("residuals")
    resid_working = at_the_sites("residuals")

    @property
    def _fit(self) -> GLMFit:
        return self._record.fit

    @property
    def basis(self) -> GLMBasis:
        """Record of the model, by which new rows are coded."""
        return self._record.basis

    @property
    def overdispersion(self) -> Overdispersion | None:
        """The negative binomial's alpha with its standard error, if it was estimated."""
        return self._record.overdispersion

    # -- statements ------------------------------------------------------------------------------

    @property
    def df_inference(self) -> float | None:
        """Degrees of freedom of Student's t for tests and intervals; None if they are normal."""
        return self.basis.df_inference

    @property
    def estimates_dispersion(self) -> bool:
        """Whether the dispersion was estimated, instead of given or one."""
        return self.basis.estimates_dispersion

    @property
    def null_deviance(self) -> float:
        """Deviance of the model with an intercept (and offset) only."""
        return float(self._fit.fit[2])

    @property
    def llnull(self) -> float:
        """Log-likelihood of the model with an intercept (and offset) only."""
        value = float(self._fit.fit[1])
        return self._need("llf", None if np.isnan(value) else value)

    @property
    def df_null(self) -> float:
        """Residual degrees of freedom of the model with an intercept or absorbed levels (and offset) only."""
        return self._fit.total.weight - max(self._fit.design.absorbed.levels, 1)

    @property
    def bic(self) -> float:
        """Schwarz's criterion; the sample size is the sum of the frequency weights."""
        return -2.0 * self.llf + float(np.log(self._fit.total.weight)) * self._n_parameters

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
            For "qaic": the dispersion of the largest of the compared models.
        dk_params : int
            Number of parameters in addition to the coefficients, such as the dispersion.
        """
        check_choice("crit", crit, ("aic", "bic", "qaic"))
        if crit == "bic":
            return self.bic + dk_params * float(np.log(self._fit.total.weight))
        if crit == "aic":
            return self.aic + 2.0 * dk_params
        if scale is None or self.distribution.estimates_scale:
            raise ModelError("info_criteria: 'qaic' is for counts and proportions, and needs a scale")
        return -2.0 * self.llf * self.scale / scale + 2.0 * (self._n_parameters + dk_params)

    @property
    def trace(self) -> pd.DataFrame:
        """Deviance, Newton's step in standard errors and its largest move, by evaluation of the sums."""
        frame = pd.DataFrame([asdict(row) for row in self._fit.trace])
        return frame.set_axis(pd.RangeIndex(1, len(frame) + 1, name="evaluation"))

    # -- sites -----------------------------------------------------------------------------------

    def _compare_sites(self) -> Heterogeneity:
        est, columns = self.estimate, self._fit.coordinates
        # The scores are converted to the data's units, where such a column equals the intercept to rounding.
        far = np.abs(columns.shift) > FAR * columns.scale
        if far.any():
            listed = ", ".join(name for name, is_far in zip(est.names, far, strict=True) if is_far)
            raise EstimationError(
                f"the means of these columns are too large for their spread: {listed}. Center them, as in "
                "center(year)"
            )
        return heterogeneity(
            est.names,
            est.params,
            self.scale,
            self._fit.local,
            sources=(),
            masked=self._fit.masked_parts,
            estimated=self.estimates_dispersion,
            terms=est.terms,
        )

    def vif(self) -> pd.DataFrame:
        """Variance inflation factor of every term; generalized ones for terms with several columns."""
        return gvif(self._cov(), self.estimate.names, self.estimate.terms)

    def get_prediction(self, exog: HeldRows | None = None) -> GLMPrediction:
        """Predict with standard errors and intervals; see :meth:`GLMPrediction.summary_frame`.

        Examples
        --------
        >>> import fedstat as fs
        >>> table = fs.datasets.make_hospitals()
        >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> fit.get_prediction(table.head(2)).summary_frame().round(2)
           mean  mean_se  mean_ci_lower  mean_ci_upper
        0  0.19     0.03           0.15           0.25
        1  0.18     0.03           0.14           0.24
        """
        cov: Floats = self._cov()
        rows = self._predicted(exog)
        return GLMPrediction(
            rows.linear,
            rows.standard_errors(cov),
            self.family,
            self._combined_distribution,
            dispersion=response_dispersion(self.distribution, self.scale),
        )

    @overload
    def predict(
        self,
        exog: HeldRows | None = None,
        which: Literal["mean", "linear"] = "mean",
        *,
        interval: None = None,
        alpha: float = 0.05,
    ) -> pd.Series: ...

    @overload
    def predict(
        self,
        exog: HeldRows | None = None,
        which: Literal["mean", "linear"] = "mean",
        *,
        interval: Literal["confidence", "prediction"],
        alpha: float = 0.05,
    ) -> pd.DataFrame: ...

    @takes_alpha
    def predict(
        self,
        exog: HeldRows | None = None,
        which: Literal["mean", "linear"] = "mean",
        *,
        interval: Literal["confidence", "prediction"] | None = None,
        alpha: float = 0.05,
    ) -> pd.Series | pd.DataFrame:
        """Predict for rows that the caller holds, with intervals on request.

        Parameters
        ----------
        exog : table of pandas, polars or pyarrow, or dict of columns
            With the columns of the model, and of its offset or exposure; rows that lack one give NaN.
        which : {"mean", "linear"}
        interval : {"confidence", "prediction"}, optional
            "confidence" is an interval of the prediction, "prediction" one of a new response. The latter
            averages quantiles of the family's distribution over the uncertainty of the mean.
        alpha : float
            One minus the level of the intervals.

        Returns
        -------
        Series or DataFrame
            With an `interval` a DataFrame with ``fitted``, ``conf_low`` and ``conf_high``.

        Raises
        ------
        DesignError
            A column is absent, of another type, or holds a level that the fit did not know.
        NotAvailableError
            No frame is given: the rows of the fit stay at the sites. Or a binary response has no prediction
            interval.

        Examples
        --------
        >>> import fedstat as fs
        >>> table = fs.datasets.make_hospitals()
        >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> fit.predict(table.head(3)).round(2).tolist()
        [0.19, 0.18, 0.32]
        >>> fit.predict(table.head(1), interval="confidence").round(2).to_numpy().tolist()
        [[0.19, 0.15, 0.25]]
        """
        if interval is None:
            return super().predict(exog, which)
        check_choice("which", which, ("mean", "linear"))
        found = self.augment(exog, which=which, interval=interval, alpha=alpha)
        return found[["fitted", "conf_low", "conf_high"]]

    @takes_alpha
    def augment(
        self,
        frame: HeldRows | None = None,
        *,
        which: Literal["mean", "linear"] = "mean",
        interval: Literal["confidence", "prediction"] = "confidence",
        alpha: float = 0.05,
    ) -> pd.DataFrame:
        """Add predictions to the analyst's rows, as broom's ``augment`` does for new data.

        Rows of the fit and their residuals never leave the sites, and are not available.

        Parameters
        ----------
        frame : DataFrame
            Rows with the columns of the model, (m, k); the response is not needed, and not read.
        which : {"mean", "linear"}
            Predict the mean of the response, or the linear predictor.
        interval : {"confidence", "prediction"}
            Interval of the prediction: that of the linear predictor, transformed for the mean; or interval of
            a new response, if that is not binary.
        alpha : float

        Returns
        -------
        DataFrame
            The rows with ``fitted``, ``se_fit`` (of the mean by the delta method), ``conf_low`` and
            ``conf_high``; nan where a row lacks a column of the model.

        Raises
        ------
        NotAvailableError
            No frame is given, or the family has no prediction intervals.
        DesignError
            A column is absent, has another type, or has a level that the fit did not have.
        ModelError
            A column of the frame has the name of an added column.

        Examples
        --------
        >>> import fedstat as fs
        >>> rows = fs.datasets.make_hospitals()
        >>> hospitals = fs.ClientPartition.from_frame(rows, by="hospital")
        >>> result = fs.GLORE.from_formula("num > 0 ~ age + sex", hospitals).fit()
        >>> new = result.augment(rows[["age", "sex"]].head(2))
        >>> list(new), bool(new["fitted"].between(new["conf_low"], new["conf_high"]).all())
        (['age', 'sex', 'fitted', 'se_fit', 'conf_low', 'conf_high'], True)
        """
        check_choice("which", which, ("mean", "linear"))
        frame = self._held(frame)
        found = self.get_prediction(frame)
        taken = sorted({"fitted", "se_fit", "conf_low", "conf_high"} & set(frame.columns))
        if taken:
            raise ModelError(f"augment: the frame already has columns with these names: {', '.join(taken)}")
        check_choice("interval", interval, ("confidence", "prediction"))
        intervals = found.conf_int if which == "mean" else found.conf_int_linear
        limits = (found.conf_int_obs if interval == "prediction" else intervals)(alpha)
        return frame.assign(
            fitted=found.predicted_mean if which == "mean" else found.linear,
            se_fit=found.se_mean if which == "mean" else found.se_linear,
            conf_low=limits[0],
            conf_high=limits[1],
        )

    _GLANCE = (
        *RowsResults._GLANCE,
        ("null_deviance", "null_deviance"),
        ("df_null", "df_null"),
        ("dispersion", "scale"),
        ("left_out", "basis.left_out"),
    )
