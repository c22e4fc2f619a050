"""Results of a GLM, and of least squares."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from scipy import stats

from fedstat.errors import NotAvailableError
from fedstat.federation.audit.ledger import Ledger
from fedstat.inference.hypotheses import Hypothesis
from fedstat.inference.likelihood import FTest, LRTest
from fedstat.inference.notes import Note
from fedstat.models.checks import HeldRows
from fedstat.models.effects import no_times
from fedstat.models.glm.fit import GLMFit
from fedstat.models.glm.notes import NOTES, OLS_SUMMARY, SUMMARY, fit_notes, show_number
from fedstat.models.glm.overdispersion import Overdispersion
from fedstat.models.glm.post_fit import (
    ScoreTest,
    compare_deviances,
    compare_likelihoods,
    marginal_effects,
    response_functions,
    score_test,
    wild_bootstrap,
)
from fedstat.models.glm.statistics import WITHOUT_LIKELIHOOD, GLMBasis, GLMRecord, GLMStatements
from fedstat.models.glm.variance import CovarianceChoice, Variance
from fedstat.models.glm.wild_bootstrap import WildBootstrap
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.prediction import GLMPrediction
from fedstat.models.horizontal.response import RowsResponse
from fedstat.models.horizontal.results import rows_estimate
from fedstat.models.margins import MarginalEffects
from fedstat.models.results import CoefficientResults
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Results of a federated GLM: statistics, their summary, and the file format.


class GLMResults(GLMStatements, saved_as="fedstat glm results 8", record=GLMRecord):
    """Results of :meth:`fedstat.FederatedGLM.fit`, with statsmodels' names and meanings.

    Attributes
    ----------
    family : statsmodels family
    model : HorizontalModel
        For results that were read from a file, only the names of response and coefficients.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
    >>> fit
    <GLORE results: num > 0, 3 coefficients, 920 rows at 4 sites; see .summary()>
    >>> "age" in fit.summary().as_text(), fit.estimates_dispersion
    (True, False)
    >>> small = fs.GLORE.from_formula("num > 0 ~ age", partition).fit()
    >>> fit.compare_lr_test(small).df_diff
    1.0
    """

    @classmethod
    def _of(
        cls,
        model: HorizontalModel,
        fit: GLMFit,
        variance: Variance,
        choice: CovarianceChoice,
        estimates_dispersion: bool,
        use_t: bool | None,
        ledger: Ledger,
        overdispersion: Overdispersion | None = None,
        method: str = "ml",
    ) -> GLMResults:
        """Make results of a fit."""
        reasons = {"rsquared": "a GLM has pseudo_rsquared() instead"}
        df = fit.total.weight - fit.design.rank
        if variance.counts is not None:
            clusters, strata = variance.counts
            df = clusters - (strata if choice.cov_type == "survey" else 1)
        if use_t is None:
            use_t = estimates_dispersion or variance.counts is not None
        clustering = variance.clustering
        df_by_coefficient = clustering.df if use_t and clustering and clustering.corrected else None
        if df_by_coefficient is not None:
            df = float(df_by_coefficient.min())
        estimate = rows_estimate(
            model,
            fit.design,
            params=fit.params,
            cov=variance.cov,
            converged=fit.converged,
            convergence=fit.reason,
            llf=float(fit.fit[0]) if method == "ml" else np.nan,
            n_parameters=fit.design.rank + (overdispersion is not None),
            scale=fit.dispersion,
            df=df_by_coefficient,
            cov_type=choice.cov_type,
            reasons=reasons if method == "ml" else reasons | {"llf": WITHOUT_LIKELIHOOD[method]},
        )
        basis = GLMBasis.of(
            model,
            clusters=choice.clusters,
            strata=choice.strata,
            counts=variance.counts,
            estimates_dispersion=estimates_dispersion,
            df_inference=float(df) if use_t else None,
            method=method,
            clustering=clustering,
            spread=variance.spread,
        )
        record = GLMRecord(estimate=estimate, fit=fit, basis=basis, overdispersion=overdispersion)
        return cls(record, ledger, model)

    def compare_lr_test(self, restricted: CoefficientResults) -> LRTest:
        """Likelihood ratio test of this fit against a nested one, both maximized over the dispersion.

        For Gamma, inverse Gaussian and Gaussian families these are not the printed log-likelihoods, which use
        Pearson's dispersion as in statsmodels; there the larger fit may have the lower one.

        Parameters
        ----------
        restricted : GLMResults
            A fit of the same family to the same rows, without some of the coefficients.

        Returns
        -------
        (statistic, pvalue, df_diff)

        Raises
        ------
        ModelError
            The two fits are not nested, use different data, or have different families.
        NotAvailableError
            The family's likelihood is not known at its maximum over an estimated dispersion (a
            quasi-likelihood, Tweedie, Gamma with ``var_weights``); use :meth:`compare_f_test`. Or a fit is
            for a survey, with a pseudo-likelihood; use :meth:`wald_test`.
        EstimationError
            The restricted fit has the larger log-likelihood.
        """
        return compare_likelihoods(self, restricted)

    def compare_f_test(self, restricted: CoefficientResults) -> FTest:
        """F test of this fit against a nested one, for an estimated dispersion.

        The statistic is the difference of the deviances per coefficient over the dispersion of this fit, on
        `df_resid` degrees of freedom, as R's ``anova(restricted, this, test="F")``. For the linear model it
        is the F test of least squares.

        Parameters
        ----------
        restricted : GLMResults
            See :meth:`compare_lr_test`.

        Returns
        -------
        (statistic, pvalue, df_diff)

        Raises
        ------
        ModelError
            See :meth:`compare_lr_test`.
        NotAvailableError
            The dispersion of this fit was not estimated, or a fit is for a survey.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> large = fs.FederatedGLM.from_formula("num ~ age + sex", partition).fit()
        >>> small = fs.FederatedGLM.from_formula("num ~ age", partition).fit()
        >>> large.compare_f_test(small).df_diff
        1.0
        """
        return compare_deviances(self, restricted)

    def score_test(self, terms: str) -> ScoreTest:
        """Score (Rao) test of terms that the fit does not have.

        The larger model is not fitted: sites evaluate its score once, at this estimate.

        Parameters
        ----------
        terms : str
            The right side of a formula, such as ``"chol + C(slope)"``.

        Returns
        -------
        (statistic, pvalue, df)

        Raises
        ------
        The terms add no coefficient, or some rows of the fit lack their columns.
            The terms add no coefficient, or rows of the fit lack their columns.
        NotAvailableError
            The results were read from a file.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age", partition).fit()
        >>> test = fit.score_test("sex")
        >>> test.df, bool(test.pvalue < 0.001)
        (1, True)
        """
        if self._model is None:
            raise NotAvailableError(
                "score_test: this result was read from a file and has no partition; fit the model again, "
                "or fit the larger one"
            )
        return score_test(self, terms)

    def _response(self, call: str, times: Sequence[float] | Floats | None = None) -> RowsResponse:
        no_times(call, times)
        self._require_levels(call)
        return response_functions(self)

    def get_margeff(
        self,
        at: Literal["overall", "mean", "zero"] = "overall",
        method: Literal["dydx", "eyex", "dyex", "eydx"] = "dydx",
        atexog: Mapping[int | str, float] | None = None,
        dummy: bool = False,
        count: bool = False,
        columns: bool = False,
    ) -> MarginalEffects:
        """Marginal effects of the variables on the mean of the response, with errors by the delta method.

        The effect of a number is the derivative of the mean through all terms that contain it: of ``x`` in
        ``x + I(x ** 2) + np.log(x) + x:z`` through all of them. That of a level of a category is the
        difference between the mean at this level and at the reference level, in all terms. These are the
        effects of R's marginaleffects; ``columns=True`` gives those of statsmodels, of single columns. At a
        knot where a spline has a kink, the derivative is the mean of both slopes. A comparison such as
        ``I(x > 3)`` is a category if no other term contains ``x``; otherwise ``x`` has no effect, and a note.

        With ``at="overall"`` sites sum the changes of the mean over their rows, masked as in the fit, with
        frequency weights and the rows' own offsets. Effects at one row need no message; there, variables
        whose derivative is no combination of the columns, such as ``x`` in ``log(x)``, have a note.

        Parameters
        ----------
        at : {"overall", "mean", "zero"}
            Average over all rows, or at one row: the means of the columns, or zeros.
        method : {"dydx", "eyex", "dyex", "eydx"}
            Derivative, elasticity, or one of the two semi-elasticities.
        atexog : dict, optional
            Fixed values for columns of the design, by their names or positions.
        dummy : bool
            Change from 0 to 1 of numbers that are 0 or 1, which are recognized by their moments.
        count : bool
            Not available: sites do not report which columns are counts.
        columns : bool
            Effects of the columns of the design, one by one, as statsmodels has them: also of ``I(x ** 2)``,
            which does not change while ``x`` stays as it is.

        Returns
        -------
        MarginalEffects
            ``margeff``, ``margeff_se``, ``summary_frame()``, ``summary()``; tests use the fit's distribution.

        Raises
        ------
        NotAvailableError
            ``at="all"`` or ``"median"`` need values of rows; effects at one row are not available with an
            offset; averages are not available for results that were read from a file.
        ModelError
            An argument is invalid here.
        EstimationError
            A mean is outside the family's domain.
        PolicyError
            A site refuses.

        Examples
        --------
        >>> import fedstat as fs
        >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> result = fs.GLORE.from_formula("num > 0 ~ age + sex", hospitals).fit()
        >>> result.get_margeff(dummy=True).margeff.round(2).to_dict()
        {'age': 0.01, 'sex': 0.33}
        """
        self._require_levels("get_margeff")
        return marginal_effects(self, at, method, atexog, dummy, count, columns)

    def wild_cluster_bootstrap(
        self,
        r_matrix: Hypothesis,
        reps: int = 999,
        weights: Literal["rademacher", "webb"] = "rademacher",
        seed: int | np.random.Generator | None = None,
    ) -> WildBootstrap:
        """Test linear hypotheses with sites as clusters, for few sites, by a restricted wild bootstrap.

        Each site's residuals under the hypothesis are multiplied by one random number, and t, with errors
        clustered by site, is computed again. For linear models this is exact, from every site's score and
        information (Cameron, Gelbach and Miller 2008; Roodman, MacKinnon, Nielsen and Webb 2019). For other
        families the sites' scores at the fit under the hypothesis are multiplied (Kline and Santos 2012); for
        these, sites sum scores at its coefficients.

        It needs every site's own sums. If these were masked, those of a linear model with an intercept and
        without weights follow from the sites' own fits, which are released unmasked unless ``local=False``.
        Otherwise the bootstrap is refused, and needs ``fit(masked=False)``: sums of scores with signs of the
        analyst's choice would reveal each site's scores.

        Parameters
        ----------
        r_matrix : str, list of str, array or (array, array)
            See :meth:`t_test`.
        reps : int
            Number of draws; all possible ones if there are fewer: K sites have 2^K draws of Rademacher's
            signs.
        weights : {"rademacher", "webb"}
            Signs; or Webb's six values, for fewer than about twelve sites.
        seed : int or numpy Generator, optional

        Returns
        -------
        WildBootstrap
            ``statistic``, ``pvalue``, ``conf_int`` (one restriction of a linear model), ``boot_statistics``.

        Raises
        ------
        ModelError
            The hypothesis has an unknown coefficient, or an argument is invalid.
        NotAvailableError
            Sums were masked, and do not follow from own fits; or results of a model that is not linear were
            read from a file.
        EstimationError
            There are as many restrictions as sites or more; or the restricted fit does not converge.
        PolicyError
            A site refuses.

        Examples
        --------
        >>> import fedstat as fs
        >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> result = fs.FederatedOLS.from_formula("num ~ age + sex", hospitals).fit()
        >>> found = result.wild_cluster_bootstrap("age = 0")
        >>> found.enumerated, found.draws.shape, found.pvalue
        (True, (16, 4), 0.125)
        """
        return wild_bootstrap(self, r_matrix, reps, weights, seed)

    # -- summary ---------------------------------------------------------------------------------

    def __repr__(self) -> str:
        est, sites = self.estimate, len(self._fit.local)
        state = "" if est.converged else ", NOT CONVERGED"
        return (
            f"<{self.model_name} results: {est.response}, {show_number(len(est.names), 'coefficient')}, "
            f"{show_number(est.nobs, 'row')} at {show_number(sites, 'site')}{state}; see .summary()>"
        )

    _SUMMARY = SUMMARY

    def _summary_notes(self) -> Iterator[Note]:
        yield from super()._summary_notes()
        yield from fit_notes(self)


# ----------------------------------------------------------------------------------------------------
# Results of least squares over rows: R-squared, F and t tests, intervals of new responses.

LEVEL_IN_FULL = re.compile(r"\[(?![A-Z]\.)[^\]]*\]$")
"""Ending of a column of a factor with one column per level, as in formulas without an intercept."""


class OLSResults(GLMResults, saved_as="fedstat ols results 3", record=GLMRecord):
    """Results of :meth:`fedstat.FederatedOLS.fit`, with the names and meanings of statsmodels' OLS, or WLS.

    All statistics follow from the sums of a Gaussian GLM: the deviance is the sum of squared residuals, and
    that of the model without covariates the centered total.

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
        """1 if columns span a constant: an intercept, or a column for every level of a factor.

        Otherwise 0.
        """
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
        """Number of coefficients minus the constant."""
        return float(len(self.estimate.names) - self.k_constant)

    @property
    def ssr(self) -> float:
        """Sum of squared residuals, weighted if rows have weights."""
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
        """Explained share of the sum of squares; about zero instead of about the mean, without a constant."""
        return self.ess / (self.ess + self.ssr)

    @property
    def fvalue(self) -> float:
        """F statistic of all coefficients but the constant; Wald's for robust errors.

        As in statsmodels it is nan if errors are robust and the constant is spanned by several columns. It is
        also nan if there are no more clusters than these coefficients, since their covariance is then
        singular.
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
        counts = self.basis.counts
        # Clusters minus one, as in statsmodels also if tests of single coefficients are normal.
        df: float = self.df_resid if counts is None else counts[0] - (counts[1] if self.basis.strata else 1)
        if self.estimate.df is not None:
            df = float(np.min(self.estimate.df[self._k_constant :])) - self.df_model + 1.0
        return float(stats.f.sf(self.fvalue, self.df_model, df)) if self.df_model else float("nan")

    def get_prediction(self, exog: HeldRows | None = None) -> GLMPrediction:
        """Predict with standard errors, and intervals of mean and response (``obs_ci_lower``, ``_upper``)."""
        found = super().get_prediction(exog)
        return GLMPrediction(found.linear, found.se_linear, found.family, found.test_distribution, self.scale)

    _SUMMARY = OLS_SUMMARY
    _GLANCE = (
        *GLMResults._GLANCE,
        ("adj_r_squared", "rsquared_adj"),
        ("sigma", "_sigma"),
        ("statistic", "fvalue"),
        ("p_value", "f_pvalue"),
    )

    @property
    def _sigma(self) -> float:
        return float(self.scale**0.5)

    def _summary_notes(self) -> Iterator[Note]:
        yield from super()._summary_notes()
        if not self.k_constant and not self.basis.agreement.question.absorbed:
            yield NOTES.note("no_constant")
