"""Results of a mixed model: coefficients with degrees of freedom, variances, effects and predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import ModelError, NotAvailableError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.coding import build_response
from fedstat.federation.design.derivatives import Direction, code_frame, variable_directions
from fedstat.federation.design.site_rows import code_effects
from fedstat.inference.effects import Means
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.likelihood import LRTest
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import WIDTH
from fedstat.inference.tables import Sheet, number, two_digits, yes_or_no
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.mixed_effects import marginal_score
from fedstat.models.checks import HeldRows, check_choice
from fedstat.models.effects import no_times
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.notes import OTHER_MODEL
from fedstat.models.horizontal.prediction import predict_rows
from fedstat.models.horizontal.response import OVER_ROWS, RowsResponse, check_groups, divided
from fedstat.models.horizontal.results import DesignResults, RowsBasis, rows_estimate
from fedstat.models.horizontal.variable_changes import changes_request
from fedstat.models.margins import (
    AT_OVERALL,
    Change,
    ChangesRequest,
    MarginalEffects,
    at_one_row,
    directions_note,
    mean_jet,
    mean_words,
    plain_places,
    shown_effects,
)
from fedstat.models.mixed.degrees import (
    CoefficientCovariance,
    KenwardRoger,
    kenward_roger,
    satterthwaite,
)
from fedstat.models.mixed.departures import (
    compare_errors,
    model_df,
    overdispersion,
    smallest,
)
from fedstat.models.mixed.profile import increases_at_zero, intervals
from fedstat.models.mixed.protocol import MixedFit, NormalSums, predict_sites, sum_slopes
from fedstat.models.mixed.response import AveragedResponse
from fedstat.models.mixed.steps import FAMILY, KINDS
from fedstat.models.results import CoefficientResults, EstimateRecord
from fedstat.plotting import axes_for, label_x, set_headline
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMAT = "fedstat mixed results 5"
RESIDUAL = "Residual"
CONSTANT = 1e-9
"""Mean squared deviation of a combination of columns from one, where it is the constant."""
FEW_GROUPS, MEASURED_GROUPS = 5, 8
"""Groups below which a variance is hardly known (Gelman and Hill 2007, 12.9), and coverage not measured."""
USE_MODEL = Remedy("fit(cov_type='model')", ": add random slopes, and use {call}")
FEW_FOR_JACKKNIFE, WELL_DETERMINED = 10, 1.0
"""Groups below which intervals of variances are profiles, and the largest error of a logarithm for others."""
ALARM = 0.01
"""P-value below which a departure from the model stands above the summary."""
ROBUST = Remedy("fit(cov_type='robust')")
NEGATIVE_BINOMIAL = Remedy(
    "from_formula(..., family=sm.families.NegativeBinomial(alpha=1.0)).fit()",
    "family=sm.families.NegativeBinomial(alpha=1.0), or fit(cov_type='robust')",
)
MORE_TERMS = Remedy("fit(cov_type='robust')", "more terms, or {call}")


NOTES = Catalogue(
    critical={
        "overdispersion": "COUNTS VARY MORE THAN A {FAMILY} DISTRIBUTION ALLOWS, given the effects of groups "
        "(Dean's test, p {p}): errors of the model are too small. Use {remedy}.",
        "departure": (
            "STANDARD ERRORS MAY BE TOO SMALL: scores of groups vary more than the model expects (p {p}, "
            "most for {term}). A random slope may be left out, or variances may differ. Add the slope, or "
            "{remedy}.",
            ROBUST,
        ),
        "normal_tests": "INTERVALS MAY BE TOO NARROW: there are {count:.0f} groups of {group}, and coverage "
        "was measured with {least} or more. Use fixed effects of the groups, or more groups.",
    },
    warning={
        "overdispersion/robust": "The counts vary more than a {family} distribution allows, given the "
        "effects of groups (Dean's test, p {p}). Robust errors allow for it; variances of random effects, "
        "likelihood ratio tests and AIC do not.",
        "singular": "Singular fit: {effects} has zero variance, or its effects are perfectly correlated. "
        "Leave an effect out, or make effects independent with ||.",
        "few_groups": "There are few groups of {groups}: their variance is hardly known. A fixed effect is "
        "an alternative.",
    },
    info={
        "conditional": "Coefficients are for a given group. Effects averaged over groups are closer to zero.",
        "conditional/log": "Coefficients are for a given group. Means over groups are larger; ratios of "
        "means are the same, except for columns with random effects.",
        "normal_effects": "Intervals of variances assume normal effects. With exponential ones, intervals "
        "of 95 % covered 75 %, with more groups as well.",
    },
)


ERRORS_OF = {"model": "of the model", "robust": "robust, by groups"}
TESTS_OF = {"model": "t, Satterthwaite's df", "robust": "t, effective groups - 1"}
"""Standard errors and tests by `cov_type`, as the summary names them."""


def format_p(p: float) -> str:
    """Write a p-value for a text."""
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def group_labels(frame: pd.DataFrame, columns: Sequence[str]) -> pd.Series:
    """Return the label of the group of each row: a level, or several as ``"a:b"``."""
    if len(columns) == 1:
        return frame[columns[0]]
    parts = [frame[name].astype(str) for name in columns]
    return parts[0].str.cat(pd.concat(parts[1:], axis=1), sep=":")


def _method_line(fit: MixedFit) -> str:
    if fit.sums is not None:
        return "REML" if fit.reml else "maximum likelihood"
    nodes = "Laplace approximation" if fit.nodes == 1 else f"{fit.nodes} nodes of quadrature"
    return f"maximum likelihood, {nodes}"


def _group_lines(fit: MixedFit) -> list[str]:
    terms = zip(fit.effects.terms, fit.groups, strict=True)
    return [f"{term.group}: {n:,.0f}" for term, n in terms]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MixedRecord(EstimateRecord):
    """What a file of results holds."""

    fit: MixedFit
    basis: RowsBasis


class MixedResults(DesignResults, saved_as=FORMAT, record=MixedRecord):
    """Results of :meth:`fedstat.FederatedMixed.fit`.

    Tests of coefficients are Student's t with degrees of freedom by Satterthwaite's method (:attr:`df`).

    Attributes
    ----------
    model : HorizontalModel
        For results that were read from a file, the names of response and coefficients only.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_repeated(), by="hospital")
    >>> formula = "score ~ month * arm + (1 + month | patient) + (1 | hospital)"
    >>> fit = fs.FederatedMixed.from_formula(formula, partition).fit()
    >>> fit.converged, fit.iterations < 20, fit.singular, fit.nobs, fit.reml, fit.use_t
    (True, True, (), 1791, True, True)
    >>> fit.dispersion is None  # the responses are normal
    True
    >>> fit.df.round().tolist(), fit.icc.index.tolist()
    ([38.0, 348.0, 386.0, 345.0], ['patient', 'hospital'])
    >>> fit.variances["std_dev"].round(1).tolist()
    [7.9, 0.4, 1.6, 5.2]
    >>> fit.covariance("patient").round(1).to_numpy().tolist()
    [[62.3, -0.5], [-0.5, 0.2]]
    """

    _record: MixedRecord
    _summed = "groups"

    @classmethod
    def _of(cls, model: HorizontalModel, fit: MixedFit, ledger: Ledger, cov_type: str = "model") -> Self:
        """Make results of a fit."""
        problem = "" if fit.converged else f"not converged after {len(fit.trace)} steps"
        estimate = rows_estimate(
            model,
            fit.design,
            params=fit.params,
            cov=fit.cov if cov_type == "model" else fit.robust,
            converged=fit.converged,
            convergence=problem or f"converged after {len(fit.trace)} steps",
            cov_type=cov_type,
            scale=fit.scale,
            llf=-0.5 * fit.deviance,
            n_parameters=len(fit.params)
            + fit.effects.K
            + int(fit.sums is not None or fit.dispersion is not None),
            reasons={"rsquared": "a mixed model has two: r_squared()"},
        )
        return cls(MixedRecord(estimate=estimate, fit=fit, basis=RowsBasis.of(model)), ledger, model)

    def _link(self) -> DistributionSpec:
        return self._record.fit.distribution

    @property
    def iterations(self) -> int:
        """Steps of the iteration."""
        return len(self._record.fit.trace)

    @property
    def reml(self) -> bool:
        """Whether variances maximize the restricted likelihood, which :attr:`llf` then is."""
        return self._record.fit.reml

    @property
    def singular(self) -> tuple[str, ...]:
        """Random effects whose covariance is singular: a variance of zero, or a correlation of one."""
        fit = self._record.fit
        return tuple(fit.effects.terms[term].text for term in fit.effects.singular(fit.theta))

    @property
    def dispersion(self) -> pd.Series | None:
        """Alpha of negative binomial or scale of gamma responses, ``estimate`` and ``std_error``, or None."""
        found = self._record.fit.dispersion
        return None if found is None else pd.Series(found, index=["estimate", "std_error"])

    # -- coefficients ----------------------------------------------------------------------------

    def _sums(self, what: str) -> NormalSums:
        sums = self._record.fit.sums
        if sums is None:
            raise NotAvailableError(f"{what}: it is for linear mixed models")
        return sums

    @cached_property
    def _covariance(self) -> CoefficientCovariance:
        return satterthwaite(self._record.fit, self._sums("df"))

    @property
    def df(self) -> pd.Series:
        """Degrees of freedom of each coefficient.

        They are by Satterthwaite's method. For responses that are not normal it is applied to the linear
        model with the weights of the fit, and for robust errors to the shares of the groups.
        """
        fit = self._record.fit
        if self.cov_type == "robust":
            return self._series(fit.clustering.df)
        if fit.sums is None:
            return self._series(model_df(fit))
        return self._series(np.array([self._covariance.df(row) for row in np.eye(len(fit.params))]))

    @property
    def use_t(self) -> bool:
        """Whether tests and intervals are of Student's t, as all are."""
        return True

    @property
    def _test_distribution(self) -> Any:
        return stats.t(self.df.to_numpy())

    @takes_alpha
    def coefficient_tests(
        self, method: Literal["satterthwaite", "kenward-roger"] = "satterthwaite", *, alpha: float = 0.05
    ) -> pd.DataFrame:
        """Test each coefficient, with degrees of freedom by one of two methods.

        Kenward and Roger's method also corrects the standard errors for the estimation of the variances. It
        is the better one with few groups. No data leave a site.

        Parameters
        ----------
        method : {"satterthwaite", "kenward-roger"}
        alpha : float
            One minus the level of the intervals.

        Returns
        -------
        DataFrame
            ``estimate``, ``std_error``, ``df``, ``statistic``, ``p_value``, ``conf_low``, ``conf_high``.

        Raises
        ------
        NotAvailableError
            The response is not normal, errors are robust, or Kenward and Roger's method for a fit with
            ``reml=False``.

        References
        ----------
        Kenward and Roger, "Small sample inference for fixed effects from restricted maximum likelihood",
        Biometrics 53 (1997).

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_repeated(), by="hospital")
        >>> fit = fs.FederatedMixed.from_formula("score ~ arm + month + (1 | hospital)", partition).fit()
        >>> fit.coefficient_tests("kenward-roger").shape
        (3, 7)
        """
        check_choice("method", method, ("satterthwaite", "kenward-roger"))
        if self.cov_type == "robust":
            raise NotAvailableError(
                "coefficient_tests: both methods are for errors of the model",
                remedy=Remedy(
                    "fit(..., cov_type='model')", "fit with {arguments}, or use summary() for robust errors"
                ),
            )
        sums, found = self._sums("coefficient_tests"), self._covariance
        chosen: CoefficientCovariance | KenwardRoger = found
        if method == "kenward-roger":
            if not sums.reml:
                why = "kenward-roger: it needs variances by REML"
                remedy = Remedy("from_formula(..., reml=True).fit(...)", "make the model with {arguments}")
                raise NotAvailableError(why, remedy=remedy)
            chosen = kenward_roger(self._record.fit, sums)
        error = np.sqrt(np.diag(chosen.cov))
        df = np.array([chosen.df(row) for row in np.eye(len(error))])
        t, half = self.estimate.params / error, stats.t.isf(alpha / 2.0, df) * error
        columns = {
            "estimate": self.estimate.params,
            "std_error": error,
            "df": df,
            "statistic": t,
            "p_value": 2.0 * stats.t.sf(np.abs(t), df),
            "conf_low": self.estimate.params - half,
            "conf_high": self.estimate.params + half,
        }
        return pd.DataFrame(columns, index=list(self.estimate.names))

    def compare_lr_test(self, restricted: CoefficientResults) -> LRTest:
        """Likelihood ratio test against a fit with fewer coefficients and the same random effects.

        Both are fitted with ``reml=False``: restricted likelihoods of different coefficients do not compare.

        Raises
        ------
        ModelError
            A fit is by REML, or the random effects differ; :meth:`test_variances` tests these.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_repeated(), by="hospital")
        >>> formulas = "score ~ month + (1 | hospital)", "score ~ 1 + (1 | hospital)"
        >>> make = fs.FederatedMixed.from_formula
        >>> full, small = (make(formula, partition, reml=False).fit() for formula in formulas)
        >>> round(full.compare_lr_test(small)[2])
        1
        """
        if self.reml or (isinstance(restricted, MixedResults) and restricted.reml):
            raise ModelError(
                "compare_lr_test: restricted likelihoods do not compare",
                remedy=Remedy("from_formula(..., reml=False).fit(...)", "make both models with {arguments}"),
            )
        if not isinstance(restricted, MixedResults) or self._terms() != restricted._terms():
            remedy = Remedy("test_variances()", "{call} tests them")
            raise ModelError("compare_lr_test: the random effects differ", remedy=remedy)
        return super().compare_lr_test(restricted)

    def _terms(self) -> set[str]:
        return {term.text for term in self._record.fit.effects.terms}

    # -- variances -------------------------------------------------------------------------------

    @property
    def variances(self) -> pd.DataFrame:
        """Variances of the random effects, and of the residuals in linear models.

        Index ``group`` and ``effect``; columns ``variance``, ``std_dev``, and ``corr`` with each earlier
        effect of the term.
        """
        fit, rows, index = self._record.fit, [], []
        for term, names, T in zip(fit.effects.terms, fit.effects.columns, fit.matrices(), strict=True):
            sd = np.sqrt(np.diag(T))
            for a, name in enumerate(names):
                with np.errstate(invalid="ignore", divide="ignore"):
                    corr = T[a, :a] / (sd[a] * sd[:a])
                index.append((term.group, name))
                rows.append((T[a, a], sd[a], ", ".join(f"{value:.2f}" for value in corr)))
        if fit.sums is not None:
            index.append((RESIDUAL, ""))
            rows.append((fit.scale, np.sqrt(fit.scale), ""))
        names_of_rows = pd.MultiIndex.from_tuples(index, names=["group", "effect"])
        return pd.DataFrame(rows, columns=["variance", "std_dev", "corr"], index=names_of_rows)

    def covariance(self, group: str) -> pd.DataFrame:
        """Covariance matrix of the random effects of a group, (q, q); independent terms have zeros."""
        fit = self._record.fit
        found = [t for t, term in enumerate(fit.effects.terms) if term.group == group]
        if not found:
            raise ModelError(f"covariance: no random effect of {group!r}")
        names = [name for t in found for name in fit.effects.columns[t]]
        out, at = np.zeros((len(names), len(names))), 0
        for t in found:
            q = fit.effects.sizes[t]
            out[at : at + q, at : at + q] = fit.matrices()[t]
            at += q
        return pd.DataFrame(out, index=names, columns=names)

    def test_variances(self) -> pd.DataFrame:
        """Test that each random effect has no variance, by likelihood ratio; the sites evaluate a few points.

        A variance of zero is at the end of its range: without the effect, twice the difference of
        log-likelihoods is a mixture, in equal parts, of chi-squared laws with q - 1 and q degrees of freedom,
        for q effects of the term (Stram and Lee 1994, Biometrics 50). The test supposes that the other
        variances are not zero.

        Returns
        -------
        DataFrame
            Index ``group`` and ``effect``; columns ``statistic``, ``df`` (the larger one), ``p_value``.

        Raises
        ------
        NotAvailableError
            The results were read from a file.
        PolicyError
            A site refuses.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_repeated(), by="hospital")
        >>> fit = fs.FederatedMixed.from_formula("score ~ arm + month + (1 | hospital)", partition).fit()
        >>> fit.test_variances().columns.tolist()
        ['statistic', 'df', 'p_value']
        """
        statistics = self._after_fit(
            "test_variances()", FAMILY, partial(increases_at_zero, fit=self._record.fit)
        )
        fit, rows = self._record.fit, []
        sizes = [q for q in fit.effects.sizes for _ in range(q)]
        for statistic, q in zip(statistics.tolist(), sizes, strict=True):
            less = stats.chi2.sf(statistic, q - 1) if q > 1 else float(statistic <= 0.0)
            rows.append((statistic, q, (stats.chi2.sf(statistic, q) + less) / 2.0))
        index = self.variances.index[: len(rows)]
        return pd.DataFrame(rows, columns=["statistic", "df", "p_value"], index=index)

    @takes_alpha
    def conf_int_variances(
        self, alpha: float = 0.05, *, method: Literal["jackknife", "profile"] | None = None
    ) -> pd.DataFrame:
        """Return intervals of the standard deviations.

        The jackknife over the outermost groups takes logarithms of standard deviations and Student's t; its
        degrees of freedom follow from the kurtosis of the groups' influences, one step of Newton's method
        each. It needs independent groups, and no distribution of their effects: with 20 and 50 groups,
        intervals of 95 % covered 97 % (normal effects), 93 to 96 % (t with 5 degrees of freedom), and 90 to
        92 % (exponential). Profile likelihood intervals assume normal effects: they covered 96, 85 to 88, and
        75 %.

        A profile interval has all values at which -2 log L, minimized over all other parameters, is less than
        the chi-squared quantile above its minimum, as lme4's ``confint``. The likelihood is that of the fit,
        so for a fit by REML the restricted one; lme4 takes the full one. The lower end is zero if the
        likelihood ratio at zero is below the quantile; the interval then covers at least as often as its
        level says.

        Squares of the ends are intervals of the variances.

        Parameters
        ----------
        alpha : float
            One minus the level of the intervals.
        method : {"jackknife", "profile"}, optional
            By default the jackknife for standard deviations of linear models that are well determined: with
            at least 10 outermost groups, and an error of the logarithm of at most 1. Others have profile
            intervals, for which the sites evaluate some points. The jackknife reveals nothing after the fit.

        Returns
        -------
        DataFrame
            Index ``group`` and ``effect``; columns ``std_dev``, ``conf_low``, ``conf_high``, ``method``.

        Raises
        ------
        NotAvailableError
            The results were read from a file, for a profile; or there is no jackknife, for responses that are
            not normal, variances of zero, or one group that determines a variance.
        PolicyError
            A site refuses.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_repeated(), by="hospital")
        >>> fit = fs.FederatedMixed.from_formula("score ~ arm + month + (1 | hospital)", partition).fit()
        >>> fit.conf_int_variances()["method"].tolist()
        ['jackknife', 'jackknife']
        """
        fit, found = self._record.fit, self.variances[["std_dev"]]
        kept = np.zeros(len(found), dtype=bool)
        ends = np.zeros((len(found), 2))
        if method != "profile" and fit.jackknife is not None:
            error, df = fit.jackknife
            kept = (error <= WELL_DETERMINED) & (fit.groups.min() >= FEW_FOR_JACKKNIFE)
            half = np.outer(stats.t.isf(alpha / 2.0, df) * error, [-1.0, 1.0])
            ends = found.to_numpy() * np.exp(half)
        if method == "jackknife":
            if fit.jackknife is None:
                raise NotAvailableError(
                    "conf_int_variances: there is no jackknife for responses that are not normal, for "
                    "variances of zero, and where one group determines a variance",
                    remedy=Remedy("conf_int_variances(method='profile')", "use {arguments}"),
                )
            kept[:] = True
        if not kept.all():
            run = partial(intervals, fit=fit, alpha=alpha)
            profile = self._after_fit("conf_int_variances(method='profile')", FAMILY, run)
            ends = np.where(kept[:, None], ends, profile)
        used = np.where(kept, "jackknife", "profile")
        return found.assign(conf_low=ends[:, 0], conf_high=ends[:, 1], method=used)

    def _parts_of_variance(self) -> tuple[float, list[float], float]:
        """Variance of the fixed part over rows, mean variances of the terms, and residual variance."""
        fit, n = self._record.fit, float(self.nobs)
        if self.basis.agreement.question.weighted:
            raise NotAvailableError("icc, r_squared: rows have different residual variances")
        # In standardized columns, whose products have all digits.
        beta = np.linalg.solve(fit.null.units, fit.params)
        square = fit.null.products[0, :-1, :-1] / fit.weight
        mean = square[0] if fit.design.intercept else fit.null.units.T @ fit.design.mean
        constant = np.linalg.solve(square, mean)
        if abs(mean @ constant - 1.0) < CONSTANT:  # a large mean is left out before the squares
            beta = beta - (mean @ beta) * constant
        fixed = float(beta @ square @ beta - (mean @ beta) ** 2) * n / (n - 1.0)
        # Columns in the basis of the effects are uncorrelated, of unit length.
        scale = fit.scale if fit.sums is not None else 1.0
        terms = [float(scale * np.sum(L**2)) for L in fit.effects.factors(fit.theta)]
        return fixed, terms, self._residual()

    def _residual(self) -> float:
        """Variance of the response on the scale of the link, given all effects (Nakagawa et al. 2017)."""
        fit = self._record.fit
        if fit.sums is not None:
            return fit.scale
        if fit.distribution.name == "Binomial":
            return float(np.pi**2 / 3.0)
        relative = 0.0 if fit.dispersion is None else float(fit.dispersion[0])
        if fit.distribution.name != "Gamma":
            relative += 1.0 / fit.mean
        return float(np.log1p(relative))

    @property
    def icc(self) -> pd.Series:
        """Share of each group's variance in that of the response around its fixed part, by group.

        With slopes it is the mean over rows (Johnson 2014). Binary responses are on the scale of the logit,
        with residual variance pi^2 / 3; counts and positive responses on that of the logarithm, with log(1 +
        v), where v is the variance over the squared mean: 1 / mean of Poisson counts, 1 / mean + alpha of
        negative binomial ones, and the scale of gamma responses.
        """
        _, terms, residual = self._parts_of_variance()
        groups = [term.group for term in self._record.fit.effects.terms]
        return pd.Series(terms, index=groups).groupby(level=0, sort=False).sum() / (sum(terms) + residual)

    def r_squared(self) -> pd.Series:
        """Return the shares of variance explained by the fixed part, and by this with the random effects.

        Returns
        -------
        Series
            ``marginal`` and ``conditional``.

        References
        ----------
        Nakagawa, Johnson and Schielzeth, "The coefficient of determination R2 and intra-class correlation
        coefficient from generalized linear mixed-effects models revisited and expanded", J. R. Soc. Interface
        14 (2017).

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_repeated(), by="hospital")
        >>> fit = fs.FederatedMixed.from_formula("score ~ month + (1 | patient)", partition).fit()
        >>> fit.r_squared().index.tolist()
        ['marginal', 'conditional']
        """
        fixed, terms, residual = self._parts_of_variance()
        total = fixed + sum(terms) + residual
        return pd.Series({"marginal": fixed / total, "conditional": (fixed + sum(terms)) / total})

    # -- effects of groups -----------------------------------------------------------------------

    def site_effects(self) -> pd.DataFrame:
        """Return the predicted random effects of the sites; each site releases its own, unmasked.

        They are for a random effect of the column that names the sites, at the estimate.

        Returns
        -------
        DataFrame
            ``site``, ``effect``, ``estimate`` and its conditional ``std_error``.

        Raises
        ------
        NotAvailableError
            The sites have no random effect; or the results were read from a file.
        PolicyError
            A site refuses.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_repeated(), by="hospital")
        >>> model = fs.FederatedMixed.from_formula("score ~ month + (1 | hospital)", partition)
        >>> model.fit().site_effects().shape
        (16, 4)
        """
        fit, column = self._record.fit, self.basis.site_column
        pairs = zip(fit.effects.terms, fit.effects.columns, strict=True)
        names = [name for term, columns in pairs if term.group == column for name in columns]
        if not names:
            raise NotAvailableError(
                f"site_effects: the sites have no random effect such as (1 | {column or 'site'})"
            )
        found = self._after_fit("site_effects()", FAMILY, partial(predict_sites, fit=fit))
        sites = [block.site for block in self.estimate.blocks]
        rows = [
            (site, name, *both)
            for site, own in zip(sites, found, strict=True)
            for name, both in zip(names, own.T.tolist(), strict=True)
        ]
        return pd.DataFrame(rows, columns=["site", "effect", "estimate", "std_error"])

    def plot_site_effects(self, effect: str = "Intercept", ax: Axes | None = None) -> Axes:
        """Draw the sites' predicted effects in their order, with 95 % intervals (a caterpillar plot).

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_repeated(), by="hospital")
        >>> model = fs.FederatedMixed.from_formula("score ~ month + (1 | hospital)", partition)
        >>> len(model.fit().plot_site_effects().get_yticks())
        16
        """
        frame = self.site_effects().query("effect == @effect").sort_values("estimate")
        if frame.empty:
            raise ModelError(f"plot_site_effects: the sites have no random effect {effect!r}")
        ax = axes_for(ax, 6.4, 1.2 + 0.25 * len(frame))
        half, at = stats.norm.isf(0.025) * frame["std_error"], np.arange(len(frame))
        ax.errorbar(frame["estimate"], at, xerr=half, fmt="o", markersize=4, linewidth=1)
        ax.axvline(0.0, color="0.6", linewidth=0.8)
        ax.set_yticks(at, frame["site"])
        label_x(ax, f"effect of the site on {effect}, with 95 % interval")
        set_headline(ax, "Predicted effects of sites")
        return ax

    def group_effects(self, frame: HeldRows) -> pd.DataFrame:
        """Predict the random effects of groups in rows that the caller holds, from their responses.

        So every site can have the effects of its own patients from the published estimate. No data leave it.

        Parameters
        ----------
        frame : DataFrame
            Complete rows, with response and groups.

        Returns
        -------
        DataFrame
            ``group``, ``label``, ``effect``, ``estimate``.

        Raises
        ------
        DesignError
            A column is absent or of another type.
        ModelError
            A row lacks a value.

        Examples
        --------
        >>> import fedstat as fs
        >>> table = fs.datasets.make_repeated()
        >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
        >>> fit = fs.FederatedMixed.from_formula("score ~ month + (1 | patient)", partition).fit()
        >>> fit.group_effects(table[table["hospital"] == "Bonn"]).shape[1]
        4
        """
        fit, question, frame = self._record.fit, self.basis.agreement.question, self._held(frame)
        known = predict_rows(self.basis.agreement, fit.design, fit.params, frame).linear
        terms = fit.effects.terms
        read = [name for term in terms for name in (*term.columns, *term.effect_columns)]
        if known.isna().any() or frame[[*question.response_columns, *read]].isna().to_numpy().any():
            raise ModelError("group_effects: expected rows without missing values")
        y = build_response(frame, question.response, question.response_columns, "frame")
        _, X = code_frame(self.basis.agreement, fit.design, frame)
        A, labels, roots = [], [], []
        factors = zip(fit.effects.factors(fit.theta), fit.effects.factors_in_units(fit.theta), strict=True)
        for t, (Z, (L, in_units)) in enumerate(zip(self._effect_columns(frame), factors, strict=True)):
            columns, own = fit.effects.columns[t], group_labels(frame, terms[t].columns)
            code, found = pd.factorize(own)
            wide = np.zeros((len(X), len(found), len(columns)))
            wide[np.arange(len(X)), code] = Z @ L
            A.append(wide.reshape(len(X), -1))
            roots.append(np.kron(np.eye(len(found)), in_units))
            labels += [(terms[t].group, label, name) for label in found for name in columns]
        u = self._modes(frame, np.column_stack(A), X, y, known.to_numpy())
        at, estimates = 0, []
        for root in roots:
            estimates.append(root @ u[at : at + len(root)])
            at += len(root)
        found_effects = pd.DataFrame(labels, columns=["group", "label", "effect"])
        return found_effects.assign(estimate=np.concatenate(estimates))

    def _effect_columns(self, frame: pd.DataFrame) -> Iterator[Floats]:
        """Code the columns of each term's effects, in the basis of the fit, (m, q)."""
        agreement, effects = self.basis.agreement, self._record.fit.effects
        coded = code_effects(frame, agreement.question, agreement.spec, "frame")
        for own, shift, scale, basis in zip(coded, effects.shift, effects.scale, effects.basis, strict=True):
            yield ((own.X - shift) / scale) @ basis

    def _modes(self, frame: pd.DataFrame, A: Floats, X: Floats, y: Floats, eta: Floats) -> Floats:
        """Return the modes of independent effects of unit variance with columns A (m, g)."""
        fit, question = self._record.fit, self.basis.agreement.question
        if fit.sums is not None:
            weights = [frame[name].to_numpy(float) for name in question.weights.values()]
            W = A.T * (weights[0] if weights else 1.0)
            return np.asarray(np.linalg.solve(W @ A + np.eye(A.shape[1]), W @ (y - eta)))
        trials = y.sum(axis=1) if y.ndim == 2 else np.ones(len(y))
        share = y[:, 0] / trials if y.ndim == 2 else y
        modes, begin = np.zeros((1, A.shape[1])), np.array([0, len(A)])
        one = np.zeros(1), np.ones(1), modes, np.zeros(len(A))
        kind, columns = KINDS[fit.distribution.name, fit.distribution.link], np.ascontiguousarray(A)
        shape = 1.0 if fit.dispersion is None else 1.0 / float(fit.dispersion[0])
        marginal_score(kind, shape, share, trials, eta, columns, begin, *one)
        return np.asarray(modes[0])

    # -- prediction ------------------------------------------------------------------------------

    def predict(
        self,
        exog: HeldRows | None = None,
        which: Literal["mean", "linear"] = "mean",
        *,
        effects: pd.DataFrame | None = None,
    ) -> pd.Series:
        """Predict for rows that the caller holds.

        Parameters
        ----------
        exog : table of pandas, polars or pyarrow, or dict of columns
            With the columns of the model; rows that lack one give NaN.
        which : {"mean", "linear"}
            The mean of the response, or the linear predictor. Without `effects` the mean is that of a group
            whose random effects are zero; averages over groups differ where the link is not the identity.
        effects : DataFrame, optional
            Predicted effects of groups, from :meth:`group_effects`, which are added; other groups have none.

        Returns
        -------
        Series

        Raises
        ------
        DesignError
            A column is absent, of another type, or holds a level that the fit did not know.
        NotAvailableError
            No frame is given: the rows of the fit stay at the sites.

        Examples
        --------
        >>> import fedstat as fs
        >>> table = fs.datasets.make_repeated()
        >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
        >>> fit = fs.FederatedMixed.from_formula("score ~ month + (1 | patient)", partition).fit()
        >>> own = table[table["hospital"] == "Bonn"]
        >>> fit.predict(own, effects=fit.group_effects(own)).shape == fit.predict(own).shape
        True
        """
        check_choice("which", which, ("mean", "linear"))
        fit = self._record.fit
        exog = self._held(exog)
        found = self._predicted(exog)
        eta = found.linear.copy()
        if effects is not None:
            eta[found.complete] += self._added(exog[found.complete], effects)
        if which == "linear" or fit.sums is not None:
            return eta
        return pd.Series(fit.distribution.make().link.inverse(eta.to_numpy()), index=eta.index)

    def _added(self, frame: pd.DataFrame, effects: pd.DataFrame) -> Floats:
        """Return the sum of predicted effects in complete rows, (m,); other groups have none."""
        fit, agreement = self._record.fit, self.basis.agreement
        lacking = [name for term in fit.effects.terms for name in term.effect_columns if name in frame]
        if frame[lacking].isna().to_numpy().any():
            raise ModelError("predict: expected rows with all columns of the random effects")
        added = np.zeros(len(frame))
        coded = code_effects(frame, agreement.question, agreement.spec, "frame")
        for term, own in zip(fit.effects.terms, coded, strict=True):
            labels = group_labels(frame, term.columns)
            here = effects[effects["group"] == term.group]
            for name, column in zip(own.names, own.X.T, strict=True):
                known = here[here["effect"] == name].set_index("label")["estimate"]
                added += labels.map(known).fillna(0.0).to_numpy(float) * column
        return added

    def get_margeff(
        self,
        at: Literal["overall", "mean"] = "overall",
        method: Literal["dydx"] = "dydx",
        columns: bool = False,
    ) -> MarginalEffects:
        """Marginal effects on the mean of the response, averaged over the random effects.

        They are for the population: a change of a variable changes the mean over groups by so much, while
        coefficients are for a given group. A variable with random slopes also changes the variance of the
        predictor, and so the mean. Errors are by the delta method, and include those of the variances of the
        random effects. Variables are those of :meth:`fedstat.results.GLMResults.get_margeff`.

        Parameters
        ----------
        at : {"overall", "mean"}
            Average over all rows, for which the sites sum derivatives once, masked as in the fit; or at the
            means of the columns, which needs no message.
        method : {"dydx"}
        columns : bool
            Effects of the columns of the design, one by one, by the fixed terms alone.

        Returns
        -------
        MarginalEffects

        Raises
        ------
        NotAvailableError
            Averages for results that were read from a file; effects at the means with an offset.
        PolicyError
            A site refuses.

        Examples
        --------
        >>> import fedstat as fs, statsmodels.api as sm
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_repeated(), by="hospital")
        >>> formula, family = "relapse ~ month + arm + (1 | patient)", sm.families.Binomial()
        >>> fit = fs.FederatedMixed.from_formula(formula, partition, family=family).fit()
        >>> bool((fit.get_margeff().margeff.abs() < fit.params[1:].abs()).all())
        True
        """
        check_choice("at", at, ("overall", "mean"))
        check_choice("method", method, ("dydx",))
        fit, first = self._record.fit, int(self._record.fit.design.intercept)
        beta, p, K = fit.params, len(fit.params), fit.effects.K
        cov: Floats = fit.cov if self.cov_type == "model" else fit.robust
        linear, names = fit.sums is not None, list(self.estimate.names)
        directions = [] if columns else self._directions(at)
        several = [one for one in directions if one.plain is None and not one.problem]
        asked = [one for one in several if at == "overall" and not (linear and one.at_a_row)]
        single = not linear and (columns or bool(plain_places(directions)))
        (slope, by_params, by_theta), changed = (1.0, np.zeros(p), np.zeros(K)), dict[str, Any]()
        if at == "overall" and (single or asked):
            requested = changes_request(asked)
            sums = self._after_fit(
                "get_margeff()", FAMILY, partial(sum_slopes, fit=fit, single=single, requested=requested)
            )
            slope, by_params, by_theta = sums.slope, sums.by_params, sums.by_theta
            effects, slopes = sums.effects / fit.design.n.sum(), sums.slopes / fit.design.n.sum()
            changed = {one.name: both for one, *both in zip(asked, effects.tolist(), slopes, strict=True)}
        elif not linear and self.basis.agreement.question.offsets:
            why = "get_margeff: at='mean' needs a value of the offset, but its mean is unknown"
            raise NotAvailableError(why, remedy=AT_OVERALL)
        elif not linear:
            slope, by_params, by_theta = fit.slopes_at(fit.design.mean)
            changed = {one.name: fit.change_at(one, fit.design.mean) for one in several}
        if not linear and self.cov_type == "model" and fit.joint is not None:
            cov = fit.joint
        if linear:
            for one in several:
                if one.name not in changed:
                    D = one.derivative(fit.design.mean)
                    changed[one.name] = D @ beta, np.append(D, np.zeros(K))
        found = {}
        for j, name in list(enumerate(names))[first:] if columns else plain_places(directions):
            own = np.concatenate([slope * np.eye(p)[j] + beta[j] * by_params, beta[j] * by_theta])
            found[name] = slope * beta[j], own, self.df.iloc[j]
        for name, (effect, slopes) in changed.items():
            # A combination has the fewest degrees of freedom of its coefficients.
            found[name] = effect, slopes, self.df[np.abs(slopes[:p]) > 0.0].min()
        shown = shown_effects(found, directions)
        jacobian, used = np.zeros((len(shown), len(cov))), min(len(cov), p + K)
        jacobian[:, :used] = np.array([found[name][1] for name in shown])[:, :used]
        known = (
            " A variance is zero, or effects determine each other: errors take the variances as known, and "
            "are too small if the variance is not zero."
        )
        return MarginalEffects(
            shown,
            np.array([found[name][0] for name in shown]),
            jacobian,
            cov,
            test_distribution=stats.t(np.array([found[name][2] for name in shown])),
            student=True,
            options={"method": method, "at": at},
            title=(self.model_name, self.estimate.response),
            note=("Averages over all rows" if at == "overall" else "At the mean of every column")
            + ", averaged over the random effects. Errors by the delta method."
            + directions_note(directions)
            + known * (not linear and fit.joint is None)
            + " Robust errors take the variances as known." * (not linear and self.cov_type == "robust"),
            sources=(self,),
        )

    def _response(self, call: str, times: Sequence[float] | Floats | None = None) -> RowsResponse:
        no_times(call, times)
        fit, linear = self._record.fit, self._record.fit.sums is not None
        cov: Floats = fit.cov if self.cov_type == "model" else fit.robust
        if not linear and self.cov_type == "model" and fit.joint is not None:
            cov = fit.joint
        beta, p = fit.params, len(fit.params)
        width = min(len(cov), p + fit.effects.K)

        def sums(call: str, changes: Sequence[Change]) -> Means:
            requested = ChangesRequest(tuple(changes))
            protocol = partial(sum_slopes, fit=fit, single=False, requested=requested)
            found = self._after_fit(call, FAMILY, protocol)
            check_groups(changes, found.counts)
            slopes = found.slopes[:, None, :width]
            return divided(found.effects[:, None], slopes, found.counts, float(fit.design.n.sum()))

        common: dict[str, Any] = {
            "agreement": self.basis.agreement,
            "design": fit.design,
            "B": beta[None, :],
            "map": np.eye(p, width),
            "jet": lambda X, offset: mean_jet(X @ beta + offset, fit.distribution),
            "sums": sums,
            "cov": cov[:width, :width],
            "df": self.df.to_numpy(),
            "distribution": fit.distribution,
        }
        if linear:
            return RowsResponse(**common, mean_words="mean")
        words = f"{mean_words(fit.distribution.name)} over groups"
        over = f"{OVER_ROWS} and over the random effects"
        return AveragedResponse(**common, fit=fit, mean_words=words, over_rows=over)

    def _directions(self, at: str) -> list[Direction]:
        """Return how design rows change with each variable, columns of random effects included."""
        fit = self._record.fit
        found = variable_directions(self.basis.agreement, fit.design)
        if fit.sums is None:  # the mean of a linear model does not depend on random effects
            random = {name for term in fit.effects.terms for name in term.effect_columns}
            found = [replace(one, plain=None, A=None) if one.variable in random else one for one in found]
            found = [replace(one, ends=None) if one.variable in random else one for one in found]
        return at_one_row(found, at) if at == "mean" else found

    # -- summary ---------------------------------------------------------------------------------

    _GLANCE = (*DesignResults._GLANCE, ("deviance", "_fit.deviance"))

    def _sheets(self, alpha: float = 0.05) -> Iterator[Sheet]:
        sheets = list(super()._sheets(alpha))
        yield from sheets[:2]
        yield self._variance_sheet()
        yield from sheets[2:]

    def _variance_sheet(self) -> Sheet:
        fit, rows, last = self._record.fit, [], ""
        counts = dict(zip((term.group for term in fit.effects.terms), fit.groups.tolist(), strict=True))
        for (group, effect), (variance, sd, corr) in zip(
            self.variances.index, self.variances.itertuples(index=False), strict=True
        ):
            heading = "" if group == last else f"{group} ({counts[group]:,.0f})" if group in counts else group
            rows.append((heading, effect, number(variance), number(sd), corr))
            last = group
        labels = ("random effects (groups)", "effect", "variance", "std dev", "corr")
        return Sheet(labels, tuple(rows), "llrrr", (26, WIDTH - 26 - 12 - 12 - 12 - 8, 12, 12, 12), gap=2)

    _SUMMARY = (
        ("Dep. Variable", "estimate.response", ""),
        ("Model", "model_name", ""),
        ("Family", "_fit.distribution", lambda spec: f"{spec.name}(link={spec.link})"),
        ("Alpha", "", lambda result: result._dispersion_line(result._fit.distribution.alpha is not None)),
        ("Scale", "", lambda result: result._dispersion_line(result._fit.distribution.alpha is None)),
        ("Method", "_fit", _method_line),
        ("No. Observations", "nobs", ",d"),
        ("Groups", "_fit", _group_lines),
        ("ICC", "icc", lambda icc: [f"{group}: {share:.3f}" for group, share in icc.items()]),
        ("R2 (fixed / all)", "_r_squared", " / ".join),
        ("REML Log-Lik.", "", lambda result: two_digits(result.llf) if result.reml else ""),
        ("Log-Likelihood", "", lambda result: "" if result.reml else two_digits(result.llf)),
        ("AIC", "aic", two_digits),
        ("Std. Errors", "cov_type", lambda kind: ERRORS_OF.get(kind, "")),
        ("Tests", "cov_type", lambda kind: TESTS_OF.get(kind, "")),
        ("Converged", "converged", yes_or_no),
    )

    @property
    def _r_squared(self) -> list[str]:
        return [f"{value:.3f}" for value in self.r_squared()]

    def _dispersion_line(self, shown: bool) -> str:
        if self.dispersion is None or not shown:
            return ""
        value, error = map(number, self.dispersion)
        return f"{value} (std err {error})"

    def _summary_right(self) -> list[tuple[str, str]]:
        return [*super()._summary_right(), *self._sums_line()]

    def _departure_notes(self) -> Iterator[Note]:
        """Announce counts that vary too much, and errors that are too small."""
        fit = self._record.fit
        family, p = fit.distribution.name, overdispersion(fit)
        if p < ALARM and self.cov_type == "model":
            remedy = NEGATIVE_BINOMIAL if family == "Poisson" else MORE_TERMS
            yield NOTES.note("overdispersion", remedy=remedy, FAMILY=family.upper(), p=format_p(p))
        elif p < ALARM:
            yield NOTES.note("overdispersion/robust", family=family, p=format_p(p))
        p_values = compare_errors(fit)
        if self.cov_type == "model" and smallest(p_values) < ALARM:
            name = self.estimate.names[int(np.nanargmin(p_values))]
            yield NOTES.note("departure", p=format_p(smallest(p_values)), term=name)

    def _summary_notes(self) -> Iterator[Note]:
        fit = self._record.fit
        if self.singular:
            yield NOTES.note("singular", effects=self.singular)
        yield from super()._summary_notes()
        few = [
            f"{term.group} ({count:.0f})"
            for term, count in zip(fit.effects.terms, fit.groups.tolist(), strict=True)
            if count < FEW_GROUPS
        ]
        if few:
            yield NOTES.note("few_groups", groups=few)
        yield from self._departure_notes()
        if self.cov_type == "robust":
            yield from fit.clustering.notes(self.estimate.names, self.estimate.terms, None, USE_MODEL)
        lowest = min(zip(fit.groups.tolist(), (term.group for term in fit.effects.terms), strict=True))
        if fit.sums is None and lowest[0] < MEASURED_GROUPS:
            yield NOTES.note("normal_tests", count=lowest[0], group=lowest[1], least=MEASURED_GROUPS)
        if fit.sums is None:
            yield NOTES.note("conditional/log" if fit.distribution.link == "Log" else "conditional")
        yield from self._left_out_note()
        if fit.jackknife is None or lowest[0] < FEW_FOR_JACKKNIFE:
            yield NOTES.note("normal_effects")
        model = "FederatedOLS" if fit.sums is not None else "FederatedGLM"
        values = {"model": model, "or_else": "let one site hold all their rows."}
        for shared in fit.shared:
            yield from shared.note(
                len(self.estimate.blocks), "groups", "errors and variances are wrong.", OTHER_MODEL, **values
            )
        yield from self._masking_note()
