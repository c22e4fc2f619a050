"""Results of a VFEM fit, for a normal response and for other distributions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import ModelError, NotAvailableError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.estimate import takes_alpha
from fedstat.inference.evaluation import shapley_values
from fedstat.inference.likelihood import LRTest, check_nested, cox_snell, mcfadden
from fedstat.inference.tables import number, two_digits, yes_or_no
from fedstat.kernels.glm.distributions import Family
from fedstat.models.checks import check_choice, check_integer, check_level
from fedstat.models.results import CoefficientResults
from fedstat.models.vertical.exchange.patterns import PatternExchange
from fedstat.models.vertical.joint_normal.assumption_tests import AssumptionTests
from fedstat.models.vertical.joint_normal.edges import Between
from fedstat.models.vertical.joint_normal.fit import JointNormalFit, without_effects
from fedstat.models.vertical.prediction.predictor import NewEntities
from fedstat.models.vfem.base_results import VFEMBaseResults, VFEMRecord
from fedstat.models.vfem.corrections import Correction, refuse_ratio
from fedstat.models.vfem.covariance.from_moments import CovType
from fedstat.models.vfem.diagnostics import sensitivity
from fedstat.models.vfem.iteration.state import VFEMFit
from fedstat.models.vfem.outcome import as_between, warn_unless_converged
from fedstat.models.vfem.prediction_protocol import (
    ResidualGroups,
    conformal_intervals,
    count_by_group,
    prediction_rsquared,
)
from fedstat.models.vfem.prediction_results import GLMPredictionResults, PredictionResults
from fedstat.models.vfem.selection import SelectionOptions, select_columns
from fedstat.models.vfem.submodels import leave_one_out, refit
from fedstat.models.vglm.path_setup import Select
from fedstat.models.vglm.results import VerticalGLMResults
from fedstat.typing import Floats

MOST_VALUED = 15
"""Sites of which all sets are valued."""


def _alpha_line(fit: VFEMFit) -> str:
    alpha, how = fit.distribution.alpha, "estimated" if fit.estimates_alpha else "given"
    return "" if alpha is None else f"{alpha:.4g} ({how})"


class VFEMResults(
    AssumptionTests,
    VFEMBaseResults[PredictionResults],
    saved_as="fedstat vfem results 4",
    record=VFEMRecord,
):
    """Results of :meth:`fedstat.VFEMRegression.fit`, with statsmodels' names and meanings.

    ``llf`` is the log-likelihood of the observed values, minus the largest value that the likelihood of the
    sites' own blocks can take. If nothing is missing, it is that of ordinary least squares. Differences
    between nested fits are likelihood ratios. ``rsquared`` is the share of variance explained for a fully
    observed entity, 1 - s2 / Var(y), with Var(y) = s2 + sum t_k under the model (the variance of the response
    itself for the methods without missing blocks).

    Attributes are those of :class:`~fedstat.models.vfem.base_results.VFEMBaseResults`.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> fit = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI + LP", partition).fit()
    >>> fit
    <VFEMResults: NPGR, 4 coefficients, 5,000 entities; see .summary()>
    >>> fit.rsquared > fit.rsquared_adj, fit.between, fit.correction, fit.init
    (True, 'free', None, 'zero')
    >>> fit.refit("NPGR ~ ROA + CI").params.index.tolist()
    ['Intercept', 'ROA', 'CI']
    >>> fit.compare_lr_test(fit.refit("NPGR ~ ROA + CI")).df_diff
    1.0
    >>> fit.leave_one_out().shape, len(fit.sensitivity()), fit.dealers.columns.tolist()
    ((3, 5), 0, ['first', 'second', 'dealer'])
    >>> fit.exchange.smallest > 0
    True
    """

    model_name = "VFEM regression"
    _counted: tuple[ClientPartition, int, ResidualGroups] | None = None
    """The partition, the number of ranges and the counts of the latest residuals."""
    _nested_otherwise = "refit (after exchange='moments') or "

    @property
    def init(self) -> str:
        """The values at which the iteration began."""
        return self._record.outcome.init

    @property
    def between(self) -> Between:
        """Whether columns of two sites could be correlated ("free") or not ("independent")."""
        return as_between(self._record.outcome)

    @property
    def correction(self) -> Correction | None:
        """The correction of maximum likelihood: "small-sample", "skewness" or None."""
        return self._record.outcome.correction

    @property
    def df_inference(self) -> float | None:
        """Degrees of freedom of Student's t, or None if tests are normal.

        Without missing blocks, those of least squares; with method="weighted", or "robust" from moments,
        those between random groups.
        """
        return None if self.covariance is None else self.covariance.df

    # -- from the moments that the fit exchanged, without a message ------------------------------

    @property
    def exchange(self) -> PatternExchange | None:
        """The exchange of moments, for a fit in this session."""
        return self._held.exchange

    @property
    def _moments_fit(self) -> JointNormalFit | None:
        """The fit from the moments, in this session."""
        return self._held.moments_fit

    @property
    def dealers(self) -> pd.DataFrame:
        """The dealer of the random numbers for the product of each pair of sites."""
        self._moments()
        assert self.exchange is not None
        rows = [(*pair, dealer or "coordinator") for pair, dealer in self.exchange.dealers.items()]
        return pd.DataFrame(rows, columns=["first", "second", "dealer"])

    def sensitivity(self) -> pd.DataFrame:
        """Range of the coefficients if two sites share fewer entities than they have columns.

        Such a pair counts as independent given all other columns or, with independent blocks, as independent.
        The data cannot confirm this: if the two share no entity, every partial covariance of the two has the
        same likelihood. The limits of the range
        are those of a partial correlation of one (with several columns, along the direction in which the
        coefficient changes fastest).

        Returns
        -------
        DataFrame
            A row for each such pair and coefficient: ``n`` entities that both have, the estimate, its
            smallest and largest value, ``low`` and ``high``; empty if every pair shares enough.
        """
        return sensitivity(self._moments())

    def leave_one_out(self) -> pd.DataFrame:
        """Fit the model without each column in turn: likelihood ratio, p-value, R-squared.

        With ``between="free"``, the column stays in the joint normal model of the columns, where it predicts
        missing columns; only its coefficient is removed. A row is nan if the likelihood has no maximum
        without that coefficient.

        Raises
        ------
        NotAvailableError
            After ``correction="skewness"``.
        """
        refuse_ratio("leave_one_out", self.correction)
        return leave_one_out(self._moments()).to_frame()

    def _moments(self) -> JointNormalFit:
        if self._moments_fit is None:
            raise NotAvailableError(
                "this needs the moments of a fit in this session with exchange='moments'; the iterative "
                "exchange and saved results do not have them"
            )
        return self._moments_fit

    @property
    def rsquared_adj(self) -> float:
        """R-squared adjusted for the degrees of freedom."""
        return 1.0 - (1.0 - self.rsquared) * (self.nobs - 1) / self.df_resid

    @property
    def resid(self) -> pd.Series:
        """Response minus :attr:`fittedvalues`."""
        return self._per_entity("residuals")

    def refit(self, formula: str, *, cov_type: CovType | None = None) -> VFEMResults:
        """Fit a smaller model from the moments that this fit exchanged; no message is sent.

        An entity counts as having a site's block as it did in this fit, so that the two likelihoods can be
        compared. If entities have only some of a site's columns, or if small patterns were merged, a new fit
        of the formula may use more of them.

        Parameters
        ----------
        formula : str
            Formula with the same response and some of the terms. ``.`` represents the columns of this fit, so
            that ``"y ~ . - x"`` leaves out one. All levels of a factor stay or all are left out.
        cov_type : {"observed", "expected", "sem", "none"}, optional
            The default is that of this fit.

        Returns
        -------
        VFEMResults
            With the ledger of this fit.

        Raises
        ------
        ModelError
            Another response, a term that is not in this fit, or an interaction whose coding depends on a term
            that is left out.
        NotAvailableError
            This fit has no moments: it was iterative, or was read from a file.
        """
        self._moments()
        model, exchange = self._need_model("refit"), self.exchange
        assert exchange is not None and isinstance(self.ledger, Ledger)
        smaller, layout, outcome, held = refit(model, self._record.outcome, exchange, formula, cov_type)
        warn_unless_converged(outcome.fit)
        return VFEMResults._of(smaller, layout, outcome, held, self.ledger)

    def select(
        self,
        penalty: str = "scad",
        criterion: Select = "bic",
        *,
        a: float | None = None,
        l1_ratio: float = 1.0,
        adaptive: float = 0.0,
        group_terms: bool = False,
        unpenalized: Sequence[str] = (),
        lam: float | None = None,
        lambdas: Sequence[float] | Floats | None = None,
        n_lambdas: int = 50,
        ratio: float = 1e-3,
        draws: int = 0,
        seed: int | None = 0,
    ) -> VerticalGLMResults:
        """Select columns from the moments that this fit exchanged; no message is sent.

        The estimates are those of ``VerticalGLM(missing="em")`` on the same entities: the observed-data
        likelihood with a penalty, along a path of lambdas. In addition to the path and the chosen columns,
        the results have the estimates of this fit for all columns, whose intervals do not depend on the
        selection (:attr:`VerticalGLMResults.debiased`).

        Parameters
        ----------
        penalty, a, l1_ratio, adaptive, group_terms, unpenalized
            As in :class:`VerticalGLM`.
        criterion : {"bic", "ebic", "aic"}
            Information criterion that chooses lambda.
        lam, lambdas, n_lambdas, ratio
            As in :meth:`VerticalGLM.fit`.
        draws : int
            Pairs of random halves of the entities, in each of which the path is fitted again, for selection
            frequencies. The halves are those of a simulated table of normal columns that has exactly the
            released sums, because sums of halves were not released.
        seed : int or None
            Seed of the halves.

        Returns
        -------
        VerticalGLMResults
            With the ledger of this fit. ``selection_report()`` has one row per column: selected or not, order
            of entry, frequency, and estimates with and without a penalty. ``plot_path()``,
            ``plot_criterion()`` and ``plot_stability()`` draw them.

        Raises
        ------
        ModelError
            An argument has no meaning here.
        NotAvailableError
            This fit has no moments (it was iterative, or was read from a file), or has weights.
        EstimationError
            The chosen columns have no unpenalized estimate.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
        >>> fit = fs.VFEMRegression.from_formula("NPGR ~ ROA + ROE + CI + NCI + LP", partition).fit()
        >>> found = fit.select(penalty="lasso", criterion="bic", n_lambdas=20, draws=4)
        >>> report = found.selection_report().set_index("term")
        >>> report.loc[report["selected"]].index.tolist()
        ['ROA', 'ROE', 'CI', 'NCI']
        >>> bool((report["debiased"] == fit.params[1:]).all()), found.ledger.rounds == fit.ledger.rounds
        (True, True)
        """
        self._moments()
        model, exchange = self._need_model("select"), self.exchange
        assert exchange is not None and isinstance(self.ledger, Ledger)
        options = SelectionOptions(
            penalty=penalty,
            criterion=criterion,
            a=a,
            l1_ratio=l1_ratio,
            adaptive=adaptive,
            group_terms=group_terms,
            unpenalized=unpenalized,
            lam=lam,
            lambdas=lambdas,
            n_lambdas=n_lambdas,
            ratio=ratio,
            draws=draws,
            seed=seed,
        )
        outcome = self._record.outcome
        return select_columns(model, outcome, exchange, self.estimate, self.ledger, options, sources=(self,))

    def sites(self) -> pd.DataFrame:
        """Return the data of every site, and what its columns contribute to the explained variance.

        R-squared of a set of sites is the share of the response's variance that the columns of the set
        explain in the fitted model, for entities that have all of them; it needs no message. It never
        decreases as a site joins, unlike R-squared of separate fits, which have different entities. These
        are estimates without standard errors; `pvalue` tests whether all coefficients of a site are zero.

        Returns
        -------
        DataFrame
            By site: ``columns``, ``entities``, ``missing`` (share of values), ``rsquared_alone``,
            ``rsquared_lost`` without the site, Shapley ``value`` (the mean gain over all orders in which
            sites may join; values sum to R-squared), and ``pvalue`` of the Wald test (nan without errors).

        Raises
        ------
        NotAvailableError
            Methods other than "vfem" have no model of all columns; more than 15 sites have no values.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
        >>> fit = fs.VFEMRegression.from_formula("NPGR ~ .", partition).fit()
        >>> values = fit.sites()
        >>> values["value"].idxmax(), round(float(values["value"].sum() - fit.rsquared), 9)
        ('Judicial Organ', 0.0)
        """
        names = list(self.names)
        if self.method != "vfem":
            raise NotAvailableError(f"sites: method={self.method!r} has no model of all columns; use 'vfem'")
        if len(names) > MOST_VALUED:
            raise NotAvailableError(f"sites: {len(names)} sites have too many sets; at most {MOST_VALUED}")
        worth = self._rsquared_by_set([self.estimate.sites.index(k) - 1 for k in names])
        K, every = len(names), (1 << len(names)) - 1
        rows = {b.site: (b.columns, b.entities, b.missing) for b in self.estimate.blocks}
        frame = pd.DataFrame([rows[k] for k in names], names, ["columns", "entities", "missing"])
        return frame.assign(
            rsquared_alone=[worth[1 << k] for k in range(K)],
            rsquared_lost=[worth[every] - worth[every ^ 1 << k] for k in range(K)],
            value=shapley_values(worth, K),
            pvalue=[self._pvalue_of(k) for k in names],
        ).rename_axis("site")

    def _rsquared_by_set(self, starts: Sequence[int]) -> dict[int, float]:
        """R-squared of every set of sites, whose columns begin at these places."""
        fit, sites = self._fit, list(self.names)
        sets = range(1 << len(sites))
        if fit.joint is None:  # columns of different sites are independent
            total = fit.s2 + sum(fit.t.values())
            return {s: sum(fit.t[k] for i, k in enumerate(sites) if s >> i & 1) / total for s in sets}
        cov, widths = fit.joint.cov, [len(fit.beta[k]) for k in sites]
        places = [np.arange(a, a + p) for a, p in zip(starts, widths, strict=True)]
        found = {0: 0.0}
        for s in sets[1:]:
            at = np.concatenate([places[i] for i in range(len(sites)) if s >> i & 1])
            slope = np.linalg.solve(cov[np.ix_(at, at)], cov[at, -1])
            found[s] = float(slope @ cov[at, -1] / cov[-1, -1])
        return found

    def _pvalue_of(self, site: str) -> float:
        """P-value of the hypothesis that no column of a site has an effect; nan without errors."""
        R = np.eye(len(self.estimate.names))[[of == site for of in self.estimate.sites]]
        try:
            return float(self.wald_test(R).pvalue)
        except NotAvailableError:
            return np.nan

    def compare_lr_test(self, restricted: CoefficientResults) -> LRTest:
        """Test against a fit with fewer columns on the same records by the likelihood ratio.

        With ``between="free"``, the columns that were left out stay in the joint normal model of the columns,
        where they predict missing columns. The statistic is therefore not twice the difference of both
        ``llf``.

        Raises
        ------
        ModelError
            The two are not nested, differ in family, method or ``between``, or a site counts as having other
            entities in the two; after ``exchange="moments"``, ``refit`` keeps these entities.
        NotAvailableError
            With ``between="free"``: the fit was read from a file. Or the fit has ``correction="skewness"``.
        """
        refuse_ratio("compare_lr_test", self.correction)
        fit = self._moments_fit
        if self.cov_type == "robust" or self._fit.joint is None or not isinstance(restricted, VFEMResults):
            return super().compare_lr_test(restricted)
        if fit is None:
            raise NotAvailableError(
                "compare_lr_test: with between='free', the test needs the moments of a fit in this "
                "session; use wald_test on the larger fit"
            )
        if restricted.between != self.between:
            raise ModelError(
                f"compare_lr_test: one fit has between={self.between!r}, the other {restricted.between!r}",
                remedy=Remedy("independence_lr_test()", "{call} compares the two models"),
            )
        self._check_same_records(restricted)
        df_diff = check_nested(self.estimate, restricted.estimate)
        kept = np.isin(fit.moments.names, restricted.estimate.names)
        statistic = 2.0 * (self._fit.log_likelihood - without_effects(fit, kept).log_likelihood)
        return LRTest(statistic, float(stats.chi2.sf(statistic, df_diff)), df_diff)

    # -- prediction ------------------------------------------------------------------------------

    def _prediction(self, exog: NewEntities | None, *, mean_only: bool) -> PredictionResults:
        linear = self._linear(exog, mean_only=mean_only)
        return PredictionResults(linear, self.scale, self._test_distribution)

    @takes_alpha
    def predict_set(
        self, partition: ClientPartition, calibration: ClientPartition, alpha: float = 0.1, *, groups: int = 1
    ) -> pd.DataFrame:
        """Predict intervals that contain a new response with a probability of at least 1 - alpha, on average.

        The coverage is marginal: it holds on average over the entities of a set of sites, and of a range of
        predictions with `groups`. For an entity whose response varies more than others of its group, it is
        smaller.

        Split conformal prediction by set of sites that have an entity (Vovk, Gammerman and Shafer 2005,
        section 2.2 and 4.5). Unlike the intervals of :meth:`get_prediction`, it assumes neither normal errors
        nor equal variances; entities of a set must be exchangeable with those that calibrate it. The holder
        of the response receives predictions of the calibration entities, and releases how many absolute
        residuals fall in bins of width 2 %, merged to its minimum count; no residual is released. With
        chosen predictions, these counts reveal responses, so that a site with ``evaluation="once"`` refuses.

        Parameters
        ----------
        partition : ClientPartition
            New entities, as in :meth:`predict`.
        calibration : ClientPartition
            Entities with their response that were not used in the fit.
        alpha : float
        groups : int
            Within a set, the predictions are divided into this number of ranges with equally many calibration
            entities. Each range has its own width, for variances that change with the mean.

        Returns
        -------
        DataFrame
            ``mean``, ``low`` and ``high`` by entity. If fewer than ``1 / alpha - 1`` entities calibrate a
            group, or fewer than the minimum count of the site, its intervals are infinite;
            ``frame.attrs["note"]`` names these sets.

        Raises
        ------
        ModelError
            `alpha` is not between 0 and 1, `groups` is not positive, or the calibration is the partition of
            the fit or lacks the response.
        DescriptionError
            The holder of the response has ``evaluation="once"``.

        Examples
        --------
        >>> import fedstat as fs
        >>> data, other = (fs.datasets.make_blocks(600, seed=seed) for seed in (1, 2))
        >>> partition, new = (fs.ClientPartition.from_frames(one.frames, on=one.key) for one in (data, other))
        >>> fit = fs.VFEMRegression.from_formula("y ~ .", partition).fit()
        >>> found = fit.predict_set(new, calibration=new, alpha=0.2)
        >>> found.columns.tolist(), bool((found["low"] < found["high"]).all())
        (['mean', 'low', 'high'], True)
        """
        check_level("alpha", alpha)
        self._check_no_offset("predict_set")
        check_integer("groups", groups, 1)
        if self._model is not None and calibration is self._model.partition:
            raise ModelError(
                "calibration: this is the partition of the fit, whose residuals are too small. Fit the model "
                "to a part of the entities, and calibrate with the others"
            )
        predictor, counted = self._predictor(), self._counted
        # The counts serve any level and partition; another request would need another consent.
        if counted is None or counted[0] is not calibration or counted[1] != groups:
            counted = calibration, groups, count_by_group(predictor, calibration, groups)
            self._counted = counted
        return conformal_intervals(predictor, partition, counted[2], alpha)

    def prediction_rsquared(self, partition: ClientPartition) -> float:
        """Empirical R-squared on new entities that every site has.

        Parameters
        ----------
        partition : ClientPartition
            With every site of the fit and the response.

        Returns
        -------
        float
            One minus the ratio of the squared errors to the squared deviations from the mean. It is accurate
            to about .01 if the response holder allows a single evaluation and first averages predictions over
            a few entities.

        Examples
        --------
        >>> import fedstat as fs
        >>> data = fs.datasets.make_blocks(400, missing=[0.0, 0.0, 0.0], seed=1)
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        >>> fit = fs.VFEMRegression.from_formula("y ~ .", partition).fit()
        >>> fit.prediction_rsquared(partition) > 0.3
        True
        """
        self._check_no_offset("prediction_rsquared")
        return prediction_rsquared(self._predictor(), partition)

    _SUMMARY = (
        ("Dep. Variable", "estimate.response", ""),
        ("Model", "model_name", ""),
        ("Method", "method_name", ""),
        ("No. Observations", "nobs", ",d"),
        ("Df Model", "estimate.df_model", "g"),
        ("R-squared", "rsquared", number),
        ("Adj. R-squared", "rsquared_adj", number),
        ("Error Variance", "scale", ".5g"),
        ("Log-Likelihood", "llf", two_digits),
        ("AIC", "aic", two_digits),
        ("BIC", "bic", two_digits),
        ("Covariance Type", "_covariance_words", ""),
        ("Converged", "converged", yes_or_no),
    )


class VFEMGLMResults(
    AssumptionTests,
    VFEMBaseResults[GLMPredictionResults],
    saved_as="fedstat vfem glm results 4",
    record=VFEMRecord,
):
    """Results of :meth:`fedstat.VFEMGLM.fit`, with statsmodels' names and meanings.

    ``llf`` is the log-likelihood of the observed values, minus the largest value that the likelihood of the
    sites' own blocks can take. If nothing is missing, it is that of the generalized linear model. Differences
    between nested fits are likelihood ratios.

    Attributes
    ----------
    family : statsmodels family
        The others are those of :class:`~fedstat.models.vfem.base_results.VFEMBaseResults`.

    Examples
    --------
    >>> import fedstat as fs, statsmodels.api as sm
    >>> data = fs.datasets.make_sme_risk(1_000)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> told = {"family": sm.families.Binomial(), "between": "independent"}
    >>> fit = fs.VFEMGLM.from_formula("RISK ~ PL1 + CA1", partition, **told).fit()
    >>> type(fit.family).__name__, fit.between, fit.llf > fit.llnull, round(fit.pseudo_rsquared("mcf"), 1)
    ('Binomial', 'independent', True, 0.0)
    >>> fit.linear.params.index.tolist(), len(fit.notes) > 0
    (['Intercept', 'PL1', 'CA1'], True)
    >>> small = fs.VFEMGLM.from_formula("RISK ~ PL1", partition, **told).fit()
    >>> fit.compare_lr_test(small).df_diff, type(fit.evaluate(partition)).__name__
    (1.0, 'Evaluation')
    >>> try:
    ...     residuals = fit.resid_response
    ... except fs.errors.NotAvailableError:  # where the coordinator is not at the holder of the response
    ...     residuals = None
    """

    model_name = "VFEM GLM"

    @property
    def between(self) -> Between:
        """Whether columns of two sites could be correlated ("free") or not ("independent")."""
        return as_between(self._record.outcome)

    @property
    def family(self) -> Family:
        """Distribution and link of the response, as statsmodels has them."""
        return self._fit.distribution.make()

    @property
    def llnull(self) -> float:
        """Log-likelihood of the model with an intercept only."""
        assert self._fit.null is not None
        return self._fit.null

    def pseudo_rsquared(self, kind: Literal["cs", "mcf"] = "cs") -> float:
        """Pseudo R-squared of Cox and Snell ("cs") or McFadden ("mcf"), of the observed-data likelihood.

        If blocks are missing, it is the share of the response explained by the observed columns, not by all
        columns.
        """
        check_choice("kind", kind, ("cs", "mcf"))
        if kind == "mcf":
            return mcfadden(self.llf, self.llnull)
        return cox_snell(self.llf, self.llnull, self.nobs)

    @property
    def resid_response(self) -> pd.Series:
        """Response minus :attr:`fittedvalues`."""
        return self._per_entity("residuals")

    # -- tests of the assumptions ------------------------------------------------------------------

    @cached_property
    def linear(self) -> VFEMResults:
        """Linear regression of the response on the same columns, from sums by missing pattern.

        :meth:`mcar_test`, :meth:`independence_tests` and :meth:`independence_lr_test` use these sums. They do
        not require a normal response unless patterns are small. A fit with ``between="independent"`` has no
        such sums: the first use requests them as an analysis of its own, with its own consent, refusals and
        ledger.

        Raises
        ------
        NotAvailableError
            The fit was read from a file.
        """
        model: Any = self._need_model("tests of what is assumed")
        found: VFEMResults = model._linear().fit(cov_type="none")
        return found

    def _moments(self) -> JointNormalFit:
        # With between="free", the fit already has these sums.
        return self._held.moments_fit or self.linear._moments()

    def compare_lr_test(self, restricted: CoefficientResults) -> LRTest:
        """Test against a fit with fewer columns on the same records by the likelihood ratio.

        Raises
        ------
        ModelError
            The two are not nested, differ in family or method, or a site counts as having other entities in
            the two.
        NotAvailableError
            With ``between="free"`` and missing blocks: columns that are left out predict missing columns, and
            the smaller fit has another model of the columns. Use :meth:`wald_test`.
        """
        if self.between == "free" and any(self.counts.n > n for n in self.nobs_by_site):
            raise NotAvailableError(
                "compare_lr_test: with between='free', columns that are left out predict missing columns, so "
                "the two likelihoods are not of the same records; use wald_test on the larger fit"
            )
        return super().compare_lr_test(restricted)

    # -- prediction ------------------------------------------------------------------------------

    def _prediction(self, exog: NewEntities | None, *, mean_only: bool) -> GLMPredictionResults:
        return GLMPredictionResults(self._linear(exog, mean_only=mean_only), self._fit.distribution)

    _SUMMARY = (
        ("Dep. Variable", "estimate.response", ""),
        ("Model", "model_name", ""),
        ("Model Family", "_fit.distribution.name", ""),
        ("Link Function", "_fit.distribution.link", ""),
        ("Alpha", "_fit", _alpha_line),
        ("Method", "method_name", ""),
        ("No. Observations", "nobs", ",d"),
        ("Df Model", "estimate.df_model", "g"),
        ("Pseudo R2 (CS)", "", lambda result: f"{result.pseudo_rsquared():.4f}"),
        ("Log-Likelihood", "llf", two_digits),
        ("LL-Null", "llnull", ".2f"),
        ("AIC", "aic", two_digits),
        ("BIC", "bic", two_digits),
        ("Covariance Type", "_covariance_words", ""),
        ("Converged", "converged", yes_or_no),
        ("Pearson chi2 / n", "_fit.dispersion", lambda dispersion: f"{dispersion[0]:.3f}"),
    )
