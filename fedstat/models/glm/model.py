"""Federated generalized linear models: arguments, dry run, and fits."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self, TypeAlias, cast, get_args

import statsmodels.genmod.families as sm_families

from fedstat.docstrings import inherits_params, inherits_signature
from fedstat.errors import (
    ConvergenceWarning,
    DataWarning,
    DescriptionError,
    ModelError,
    Remedy,
    warn,
)
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.dry_run.execution import DryRunEngine, DryRunRecord, DrySite
from fedstat.federation.dry_run.expected_releases import ExpectedReleases, IterationLoop
from fedstat.federation.dry_run.synthetic import SYNTHETIC_GROUPS
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models import checks
from fedstat.models.copula.bounds import Bounds, IntoBound
from fedstat.models.copula.private_release import USUAL_DELTA, check_budget
from fedstat.models.explain import DryRunPlan, settled
from fedstat.models.glm.firth import FirthNewton
from fedstat.models.glm.fit import GLMFit
from fedstat.models.glm.noisy_fit import (
    NOT_CONVERGED,
    NoisyQuestion,
    bounds_warnings,
    noisy_question,
    public_agreement,
    records_of,
    run_noisy,
)
from fedstat.models.glm.noisy_results import PrivateRegressionResults
from fedstat.models.glm.noisy_steps import DRY_RUN_STEPS
from fedstat.models.glm.notes import FEW_ROWS
from fedstat.models.glm.overdispersion import Overdispersion, estimate_alpha, with_alpha
from fedstat.models.glm.protocol import Newton
from fedstat.models.glm.results import GLMResults, OLSResults
from fedstat.models.glm.statistics import WEIGHTED
from fedstat.models.glm.steps import FAMILY
from fedstat.models.glm.variance import (
    CovarianceChoice,
    Variance,
    cluster_sums,
    clustered,
    leveraged_sums,
    linearized,
    model_based,
    of_rows,
    sandwich,
)
from fedstat.models.horizontal.model import HorizontalModel, OwnFitsPlan, warn_of_far_sites
from fedstat.models.horizontal.session import add
from fedstat.models.rows.estimated_weights import STACKED, stacked_sums
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Dry run of a federated GLM: its loops, and what its releases disclose.


class GLMPlan(OwnFitsPlan):
    """Facts about a federated GLM before it is fitted."""

    guessed: ClassVar[frozenset[str]] = frozenset({"list_clusters", "sum_clusters"})

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        self.model = model
        strata = (given["cov_kwds"] or {}).get("strata")
        self.nested = () if strata is None else (strata,)

    @property
    def noisy(self) -> NoisyQuestion:
        """What is public of a fit with noise."""
        return noisy_question(self.model, *(self.given[name] for name in ("epsilon", "delta", "bounds")))

    def loops(self, dry_run: DryRunRecord) -> Sequence[IterationLoop]:
        """Describe the evaluations of Newton's method, also of that with alpha among its coefficients."""
        if self.given["epsilon"] is not None:
            return []
        fits, limit = sum("start" in steps for steps in dry_run.rounds), int(self.given["maxiter"])
        # Without the sites' own fits there is one more, at a point that needs no coefficients.
        firth = self.given["method"] == "firth"
        newton = IterationLoop(("sum_scores",), fits * (limit + (not self.given["local"])), fits)
        if self.given["rounds"] is not None:
            return []
        return [
            newton,
            *([IterationLoop(("sum_firth",), limit)] if firth else []),
            *([IterationLoop(("sum_nb2",), limit)] if self.given["dispersion"] is not None else []),
        ]

    def learned(self, expected: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """State what a site's own fit discloses, and what noisy sums do."""
        if self.given["epsilon"] is not None:
            yield "Coordinator and sites", self.noisy.guarantee()
            return
        yield from super().learned(expected)
        if any(entry.step in ("sum_firth", "sum_leveraged") for entry in expected.dry_run.entries):
            yield (
                "Sites",
                "learn the inverse information of all sites' rows together; subtracting their own leaves "
                "the sum over the others.",
            )

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """State what is unknown, and the expected price of noise."""
        if self.given["epsilon"] is not None:
            yield from self.noisy.price_notes()
            return
        if self.given["rounds"] is not None:
            yield f"rounds={self.given['rounds']} fixes the number of evaluations."
        if self.given["cov_type"] in ("cluster", "survey"):
            yield (
                "The number of clusters is not known in advance: sizes marked '?' assume "
                f"{SYNTHETIC_GROUPS} clusters per site."
            )
        if self.given["local"]:
            yield "A site whose own fit fails adds the reason as text, which takes some more bytes."
        yield from super().notes(expected)


# ----------------------------------------------------------------------------------------------------
# Federated generalized linear models: their arguments, checked, and their fits.

CovType: TypeAlias = Literal[
    "nonrobust", "robust", "HC0", "HC1", "HC2", "HC3", "cluster", "survey", "stacked"
]
COV_TYPES = get_args(CovType)
OF_ROWS = ("HC0", "HC1")
"""Sandwiches of the products of the rows' scores."""
LEVERAGE_OF_LEVELS = "the leverage of a row has a part of its levels, which only the means of the levels have"
NOT_ABSORBED = {
    "HC2": LEVERAGE_OF_LEVELS,
    "HC3": LEVERAGE_OF_LEVELS,
    "survey": "strata and clusters of a sample need the scores of the levels",
}
"""Covariances without a form for absorbed effects, and why."""
POWERS = {"HC2": 1, "HC3": 2}
"""Power of one minus a row's leverage by which its squared residual is divided."""

WITH_EPSILON = frozenset({"epsilon", "delta", "bounds", "progress"})
"""Arguments of a fit with noise."""

OTHER_FAMILIES = Remedy("FederatedGLM.from_formula(...).fit()", "use FederatedGLM")


class FederatedGLM(HorizontalModel):
    """Generalized linear model over sites that hold different rows: the fit of the pooled table.

    In each round every site returns the score and the information of its rows. Their sums are those of the
    pooled table, and so are the estimates, standard errors and tests (Wu et al. 2012, for any family and
    link). Every fit also compares the sites; see :attr:`GLMResults.heterogeneity`.

    Make one with :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula.
    partition : ClientPartition
        In the horizontal layout.
    **settings
        Those of :meth:`from_formula`.

    References
    ----------
    Wu, Jiang, Kim, Ohno-Machado, "Grid Binary LOgistic REgression (GLORE)", JAMIA 19 (2012).

    Firth, "Bias reduction of maximum likelihood estimates", Biometrika 80 (1993).

    Heinze and Schemper, "A solution to the problem of separation in logistic regression", Statistics in
    Medicine 21 (2002).

    Long and Ervin, "Using heteroscedasticity consistent standard errors in the linear regression model",
    American Statistician 54 (2000).

    Pustejovsky and Tipton, "Small-sample methods for cluster-robust variance estimation and hypothesis
    testing in fixed effects models", Journal of Business and Economic Statistics 36 (2018).

    Carter, Schnepel and Steigerwald, "Asymptotic behavior of a t-test robust to cluster heterogeneity",
    Review of Economics and Statistics 99 (2017).

    Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS (2017).

    Examples
    --------
    >>> import fedstat as fs, statsmodels.api as sm
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> model = fs.FederatedGLM.from_formula("num ~ age + sex", partition, family=sm.families.Poisson())
    >>> model.fit().params.round(2).to_dict()
    {'Intercept': -2.91, 'age': 0.04, 'sex': 1.04}
    """

    model_name: ClassVar[str] = "Federated GLM"
    _goes_on = True
    _absorbs = True
    _plan = GLMPlan
    _results: ClassVar[type[GLMResults]] = GLMResults

    @checks.takes_parsed
    @inherits_signature(HorizontalModel.__init__)
    def __init__(
        self,
        formula: Formula,
        partition: ClientPartition,
        *,
        family: Any = None,
        weights: Any = None,
        **settings: Any,
    ) -> None:
        self._weigh(weights, formula, **settings)
        super().__init__(formula, partition, family=family, **settings)

    @classmethod
    @checks.checks_arguments
    @inherits_signature(__init__)
    @inherits_params(HorizontalModel.from_formula)
    def from_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula
            As in :meth:`HorizontalModel.from_formula`.
        partition
            As in :meth:`HorizontalModel.from_formula`.
        family : statsmodels family or str, optional
            Such as ``sm.families.Poisson()``, with its link; or a name, ``"poisson"``, with the usual one.
        weights : balance or result of a TreatmentEffect, or list of these, optional
            Rows have the inverse probability weights of its propensity model, which was fitted on the same
            rows (marginal structural model); with several, the product. For a column of weights see
            `freq_weights` and `var_weights`.
        offset, exposure
            As in :meth:`HorizontalModel.from_formula`.
        freq_weights, var_weights
            As in :meth:`HorizontalModel.from_formula`.
        complete
            As in :meth:`HorizontalModel.from_formula`.
        labels
            As in :meth:`HorizontalModel.from_formula`.
        missing
            As in :meth:`HorizontalModel.from_formula`.
        subset
            As in :meth:`HorizontalModel.from_formula`.

        Raises
        ------
        FormulaError
            The formula holds something that is not allowed, or an unknown column.
        DesignError
            The columns that it names cannot enter a model; see the message.
        ModelError
            The propensity model is one of other rows.
        PolicyError
            A site's owner does not allow it.

        Warns
        -----
        DataWarning
            Rows were left out.
        SpellingWarning
            Levels of a column differ by blanks or case alone.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> treatment = fs.TreatmentEffect.from_formula("died ~ 1", partition, treatment="arm ~ age + stage")
        >>> model = fs.GLORE.from_formula("died ~ arm", partition, weights=treatment.balance())
        >>> model.fit().bse.round(3).to_dict()
        {'Intercept': 0.095, 'arm[T.surgery]': 0.136}
        """
        return super().from_formula(formula, partition, **settings)

    @checks.checks_arguments
    def fit(
        self,
        *,
        cov_type: CovType | None = None,
        cov_kwds: dict[str, str] | None = None,
        scale: float | Literal["X2", "dev"] | None = None,
        method: Literal["ml", "firth"] = "ml",
        dispersion: Literal["ml"] | None = None,
        use_t: bool | None = None,
        rounds: int | None = None,
        maxiter: int = 50,
        tol: float = 1e-8,
        local: bool = True,
        masked: bool | None = None,
        epsilon: float | None = None,
        delta: float = USUAL_DELTA,
        bounds: Bounds | Mapping[str, IntoBound] | None = None,
        progress: bool | None = None,
    ) -> GLMResults:
        """Maximize the likelihood of all sites' rows.

        Parameters
        ----------
        cov_type : str, optional
            "nonrobust", "robust", "HC0", "HC1", "HC2", "HC3", "cluster", "survey" or "stacked".
            "nonrobust", the default, is the inverse information; "stacked", the default with `weights` of a
            treatment, is the sandwich of the stacked equations of both models, which accounts for the
            estimated weights; the others take these as known. "robust" is "HC3" for fewer than 250 rows and
            "HC1" otherwise (Long and Ervin 2000); "HC0" the sandwich; "HC1" the same times n / (n - p),
            which statsmodels' GLM omits; "HC2" and "HC3" use squared residuals over 1 - h, or over its
            square, where h is the leverage (MacKinnon and White 1985). They need one more round, in which
            sites receive the inverse information of all and keep leverages. "cluster" is clustered: CR2,
            which corrects scores for the leverage of clusters (Bell and McCaffrey 2002; Pustejovsky and
            Tipton 2018); "survey" is linearized for a stratified, clustered sample.
        cov_kwds : dict, optional
            "cluster": ``{"groups": column}``; the column that names the sites makes them the clusters. With
            ``"correction": "CR1"`` errors have statsmodels' correction instead of CR2. "survey":
            ``{"clusters": column, "strata": column}``, where strata are optional. Rows without a value of
            these columns are left out; name the columns in `labels` of :meth:`from_formula` as well to
            compare fits of the same rows. Where effects are absorbed, errors have fixest's correction "CR1".
        scale : float, "X2" or "dev", optional
            Scale of the variance: a value, or Pearson's statistic or the deviance over the residual degrees
            of freedom. By default 1 for Binomial, Poisson and NegativeBinomial, and "X2" otherwise.
        method : {"ml", "firth"}
            "firth" maximizes the likelihood of a logit times the root of the information's determinant. It
            removes the bias of order 1 / n, and estimates stay finite if outcomes are separated (Firth 1993;
            Heinze and Schemper 2002), as in R's logistf and brglm2. Each iteration has one more round, in
            which sites receive the inverse information of all. Standard errors are the inverse information;
            there is no likelihood ratio test.
        dispersion : "ml", optional
            Estimate the dispersion of the family NegativeBinomial with log link, its alpha, by maximum
            likelihood, starting from the given one; standard errors of cov_type "nonrobust" account for it.
        use_t : bool, optional
            Use Student's t for tests and intervals. For "cluster" the degrees of freedom are the effective
            number of a coefficient's clusters (Carter, Schnepel and Steigerwald 2017) minus one, with CR1 the
            number of clusters minus one; for "survey" the number of clusters minus strata; otherwise
            `df_resid`. This is the default for "cluster" and "survey", and if the dispersion is estimated, as
            in R and in statsmodels' OLS. False gives normal ones, the default of statsmodels' GLM.
        rounds : int, optional
            Take this number of Newton steps from the mean of the sites' own fits, and stop there. The
            estimate is as efficient in large samples; use it if every round needs a decision at the sites.
        maxiter : int
            Largest number of evaluations.
        tol : float
            Stop when Newton's step is below this value, in standard errors.
        local : bool
            Whether every site also fits its own rows and releases that fit, with the means and deviations of
            its columns: the start of the iteration, and the comparison of the sites.
        masked : bool, optional
            Whether sites hide their parts of all sums by pairwise masks (Bonawitz et al. 2017), which cancel
            in the total: the coordinator learns the sum over sites, and no part. The fit is the same. Masks
            are the default with at least three sites. With two sites each can compute the other's part; they
            mask only if an owner requires it. Masks cost one round. Comparisons of single sites' parts (the
            fit without each site) need False. Own fits are released unmasked in any case; so are the sums for
            transforms such as ``center()``, unless an owner requires masks.
        epsilon : float, optional
            Fit with differential privacy of every row, under the budgets of the sites' owners
            (``Policy(privacy=Budget(...))``): logistic, Poisson or least squares regression from noisy sums
            of bounded scores. Standard errors include the noise. :meth:`explain` states the expected price
            before anything is charged. The other arguments above are not available.
        delta : float
            With `epsilon`: at most 1e-6.
        bounds : Bounds or mapping, optional
            With `epsilon`: the public range or levels of every column, as in ``{"age": (18, 90)}``; by
            default what the owners publish. Values outside are cut; none is taken from the data.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        GLMResults
            With `epsilon` :class:`fedstat.results.PrivateRegressionResults`.

        Raises
        ------
        ModelError
            An argument is invalid here.
        EstimationError
            Columns are collinear or the outcomes separated (the error names them), or no step is possible.
            With `epsilon`: the records, or those with the rarer response, are too few.
        PolicyError
            A site refuses.

        Warns
        -----
        ConvergenceWarning
            The iteration stopped before its tolerance.
        UnitsWarning
            Mean or spread of a column at one site is far from those at all others, according to the sites'
            own fits (`local`). Without these, masked sums hide such differences.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> model = fs.FederatedGLM.from_formula("num ~ age + sex", partition)
        >>> fit = model.fit(cov_type="cluster", cov_kwds={"groups": "hospital"})
        >>> fit.df.round(1).to_dict()  # effective clusters less one: few for four hospitals
        {'Intercept': 2.3, 'age': 2.6, 'sex': 1.7}
        """
        call = Call.of(self.fit, locals())
        if epsilon is not None:
            return cast(GLMResults, self._fit_noisy(call, epsilon, delta, bounds))
        self._check_exact(call)
        checks.check_positive("tol", tol)
        checks.check_integer("maxiter", maxiter, 1)
        if rounds is not None:
            checks.check_integer("rounds", rounds, 1)
            if not local:
                raise ModelError(
                    "rounds: the steps start from the sites' own fits, which local=False leaves out"
                )
        if not isinstance(scale, str):
            scale = None if scale is None else float(scale)
        elif scale not in ("X2", "dev"):
            raise ModelError(f"scale: expected a number, 'X2' or 'dev', received {scale!r}")
        settled_type = self._covariance_type(cov_type, method, rounds, dispersion)
        named = self._with_columns_of({"cov_kwds": cov_kwds})
        alone = local and not self.question.propensities
        choice = named._choose_covariance(settled_type, {} if cov_kwds is None else cov_kwds)

        def estimate(model: FederatedGLM, attempt: FitAttempt) -> GLMResults:
            hidden = checks.check_masked(masked, len(model.sites), model._masks_wanted)
            session = model._open_session(FAMILY, hidden)
            form = FirthNewton if method == "firth" else Newton
            most, meat = maxiter if rounds is None else rounds + 1, choice.cov_type in OF_ROWS
            newton = form(session, model.distribution, most, tol, rounds=rounds, scaletype=scale, meat=meat)
            if dispersion is None:
                protocol = model._maximize(newton, choice, alone)
            else:
                protocol = model._maximize_with_alpha(newton, alone)
            fit, variance, over = attempt.run(protocol, session.masked_sites)
            result = model._results._of(
                *(model, fit, variance, choice, newton.estimates_dispersion, use_t, attempt.ledger, over),
                model._maximizes(method),
            )
            warn_of_far_sites(model.agreement, fit.coordinates.design.names, fit.coordinates.own)
            if not fit.converged:
                warn(f"the fit did not converge: {fit.reason}", ConvergenceWarning)
            return result

        return run_fit(named, call, estimate)

    def _fit_noisy(
        self,
        call: Call,
        epsilon: float,
        delta: float,
        bounds: Bounds | Mapping[str, IntoBound] | None,
    ) -> PrivateRegressionResults:
        """Fit from noisy sums, which are charged to the budgets of the sites."""
        if others := sorted(call.arguments.keys() - WITH_EPSILON):
            raise ModelError(f"epsilon: a fit with noise does not take {', '.join(others)}")

        def estimate(model: FederatedGLM, attempt: FitAttempt) -> PrivateRegressionResults:
            asked = noisy_question(model, epsilon, delta, bounds)
            for name, policy in asked.policies.items():
                check_budget(name, policy, asked.cost)
            session = model._open_session(FAMILY, asked.rows.honest > 1)
            fit = attempt.run(run_noisy(session, asked), session.masked_sites)
            if not isinstance(model.engine, DryRunEngine):
                for text in bounds_warnings(asked, fit):
                    warn(text, DataWarning)
                if not fit.iteration.converged:
                    warn(NOT_CONVERGED, ConvergenceWarning)
            return PrivateRegressionResults._of(model, asked, fit, attempt.ledger)

        return run_fit(self, call, estimate)

    def _check_exact(self, call: Call) -> None:
        """Require sites that release exact sums, and no argument of a fit with noise."""
        if given := sorted(call.arguments.keys() & {"delta", "bounds"}):
            raise ModelError(f"{given[0]}: it belongs to a fit with noise, and epsilon is missing")
        for name in self._with_budget(self.partition):
            raise DescriptionError.of_rule(
                "privacy budget",
                name,
                "releases sums over rows only with noise, which a fit with epsilon= has, unless its owner "
                "removes [privacy] from the policy",
            )

    @staticmethod
    def _with_budget(partition: ClientPartition) -> list[str]:
        return [name for name, site in partition.sites.items() if site.policy.privacy is not None]

    def _settle(self, partition: ClientPartition, before: Ledger) -> None:
        """Agree on levels and rows; sites with a budget report none, and publish what is needed."""
        if not self._with_budget(partition):
            super()._settle(partition, before)
            return
        self.partition, self.sites, self.engine = partition, tuple(partition.sites), partition.engine
        self._session, self._assumed, self._agreement = secrets.token_hex(8), False, before
        self.agreement = public_agreement(self)

    def _invent_sites(self, plan: DryRunPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        if getattr(plan, "given", {}).get("epsilon") is None:
            return super()._invent_sites(plan, policies)
        return {name: DrySite(name, policies[name], n, DRY_RUN_STEPS) for name, n in records_of(self).items()}

    def _with_covariance(self, result: Any, arguments: Mapping[str, Any]) -> GLMResults:
        """Estimate another covariance at the estimate of a fit, in one evaluation if it needs any."""
        given = settled(self.fit, arguments)
        cov_type = self._covariance_type(
            given["cov_type"], given["method"], given["rounds"], given["dispersion"]
        )
        named, fit, over = self._with_columns_of(given), copy.copy(result._fit), result._record.overdispersion
        if [row.n for row in named.agreement.sites] != [row.n for row in self.agreement.sites]:
            return self.fit(**arguments)
        choice, ledger = named._choose_covariance(cov_type, given["cov_kwds"] or {}), result._ledger
        if cov_type == "nonrobust":
            variance = Variance(model_based(fit) if over is None else over.cov)
        elif cov_type in OF_ROWS and fit.meat is not None:
            variance = of_rows(fit, cov_type)
        else:

            def protocol(model: FederatedGLM) -> FitProtocol[tuple[Floats | None, Variance]]:
                session, meat = model._open_session(FAMILY, fit.masked), cov_type in OF_ROWS
                newton = Newton(session, fit.distribution, scaletype=given["scale"], meat=meat)
                return session.hide(model._covariance_at(newton, fit, choice))

            ledger = copy.deepcopy(ledger)
            fit.meat, variance = named._run_after_fit(f"with_covariance({cov_type!r})", protocol, ledger)
        found = self._results._of(
            *(named, fit, variance, choice, result.estimates_dispersion, given["use_t"], ledger, over),
            named._maximizes(given["method"]),
        )
        found._call = Call("fit", arguments)
        return found

    def _maximizes(self, method: str) -> str:
        """Return what the estimate maximizes, if anything."""
        return WEIGHTED if self.question.propensities else method

    def _covariance_at(
        self, newton: Newton, fit: GLMFit, choice: CovarianceChoice
    ) -> FitProtocol[tuple[Floats | None, Variance]]:
        """Request what a covariance needs at the estimate of a fit."""
        yield from newton.open(local=False)
        newton.null = fit.null
        scores = newton.session.request_all("sum_scores", newton.point(fit.gamma))
        replies = yield scores + newton.judge_requests(fit.gamma, fit.total)
        if newton.meat:
            fit = replace(fit, meat=add(replies[len(scores) :], "meat"))
        return fit.meat, (yield from self._covariance(newton, fit, choice))

    def _covariance_type(
        self, cov_type: str | None, method: str, rounds: int | None, dispersion: str | None
    ) -> str:
        """Check a covariance with the method of the fit, and settle "robust" by the number of rows."""
        checks.check_choice("cov_type", cov_type, (*COV_TYPES, None))
        weighs = bool(self.question.propensities)
        cov_type = cov_type or (STACKED if weighs else "nonrobust")
        if weighs and (cov_type == "nonrobust" or (method, rounds, dispersion) != ("ml", None, None)):
            raise ModelError(
                "weights: with those of a treatment there is no likelihood, so that cov_type='nonrobust', "
                "method='firth', rounds and dispersion have no meaning",
                remedy=Remedy("fit(cov_type='stacked')", "Use {arguments}"),
            )
        if cov_type == STACKED and not weighs:
            raise ModelError(
                "cov_type: 'stacked' accounts for weights that were estimated, and the model has none",
                remedy=Remedy("fit(cov_type='HC1')", "use {arguments}, or give weights= of a treatment"),
            )
        self._check_dispersion(dispersion, cov_type)
        self._check_method(method, cov_type, rounds, dispersion)
        if self.formula.absorbed and (why := NOT_ABSORBED.get(cov_type)):
            raise ModelError(
                f"cov_type: {cov_type!r} is not available where effects are absorbed: {why}",
                remedy=Remedy("fit(cov_type='HC1')", "Use {arguments}, or cov_type='cluster'"),
            )
        if cov_type != "robust":
            return str(cov_type)
        if self.formula.absorbed:
            return "HC1"
        return "HC3" if sum(row.n for row in self.agreement.sites) < FEW_ROWS else "HC1"

    def _choose_covariance(self, cov_type: str, kwds: object) -> CovarianceChoice:
        """Check the columns of clusters and strata."""
        if not isinstance(kwds, dict):
            raise ModelError(
                f"cov_kwds: expected {{'groups': 'column'}} or the like, received {checks.kind_of(kwds)}"
            )
        allowed = {"cluster": {"groups", "correction"}, "survey": {"clusters", "strata"}}.get(cov_type, set())
        kwds = dict(kwds)
        usual = "CR1" if self.formula.absorbed else "CR2"
        correction = kwds.pop("correction", usual) if cov_type == "cluster" else usual
        checks.check_choice("cov_kwds: correction", correction, ("CR2", "CR1"))
        if self.formula.absorbed and correction == "CR2":
            raise ModelError(
                "cov_kwds: CR2 is not available where effects are absorbed: the leverage of a cluster has a "
                "part of its levels",
                remedy=Remedy(
                    "fit(cov_type='cluster', cov_kwds={{'groups': {groups!r}, 'correction': 'CR1'}})",
                    "Leave the correction out, or write {arguments}",
                ).filled(groups=kwds.get("groups", "ward")),
            )
        if not set(kwds) <= allowed:
            raise ModelError(
                f"cov_kwds: cov_type={cov_type!r} accepts {sorted(allowed) or 'none'}, received "
                f"{sorted(kwds)}"
            )
        clusters = kwds.get("groups", kwds.get("clusters"))
        if cov_type in ("cluster", "survey") and clusters is None:
            key = "groups" if cov_type == "cluster" else "clusters"
            raise ModelError(
                f"cov_kwds: cov_type={cov_type!r} needs the column of the clusters",
                remedy=Remedy(
                    "fit(cov_type={kind!r}, cov_kwds={{{key!r}: 'ward'}})",
                    ", as in {call}, with your column's name for 'ward'",
                ).filled(kind=cov_type, key=key),
            )
        known = (
            None,
            *self.question.labels,
            *([self.partition.site_column] if cov_type == "cluster" else []),
        )
        for role, name in kwds.items():
            if not isinstance(name, str | None):
                raise ModelError(
                    f"cov_kwds: expected the name of a column as {role!r}, received {checks.kind_of(name)}. "
                    "The values must be a column of the sites' tables"
                )
            if name not in known:
                raise ModelError(
                    f"cov_kwds: {role}={name!r} is no column of every site's table that "
                    f"cov_type={cov_type!r} can use; sites as clusters are for cov_type='cluster'"
                )
        return CovarianceChoice(cov_type, clusters, kwds.get("strata"), correction)

    def _check_method(self, method: str, cov_type: str, rounds: int | None, dispersion: str | None) -> None:
        checks.check_choice("method", method, ("ml", "firth"))
        if method == "ml":
            return
        if (self.distribution.name, self.distribution.link) != ("Binomial", "Logit"):
            raise ModelError(f"method: 'firth' is for the logit, received {self.distribution}")
        if cov_type != "nonrobust" or rounds is not None or dispersion is not None:
            raise ModelError("method: 'firth' needs cov_type='nonrobust', and neither rounds nor dispersion")

    def _check_dispersion(self, dispersion: str | None, cov_type: str) -> None:
        if dispersion is None:
            return
        spec = self.distribution
        if dispersion != "ml" or (spec.name, spec.link) != ("NegativeBinomial", "Log"):
            raise ModelError(
                "dispersion: expected 'ml' with the family NegativeBinomial and the log link, received "
                f"{dispersion!r} with {spec}",
                remedy=Remedy(
                    "from_formula(..., family=sm.families.NegativeBinomial()).fit(dispersion='ml')",
                    "Counts have {arguments}; give a known alpha to the family, and a scale as scale=",
                ),
            )
        if cov_type != "nonrobust":
            raise ModelError(f"dispersion: 'ml' needs cov_type='nonrobust', received {cov_type!r}")

    def _maximize(
        self, newton: Newton, choice: CovarianceChoice, local: bool
    ) -> FitProtocol[tuple[GLMFit, Variance, Overdispersion | None]]:
        fit = yield from newton.run(local)
        return fit, (yield from self._covariance(newton, fit, choice)), None

    def _maximize_with_alpha(
        self, newton: Newton, local: bool
    ) -> FitProtocol[tuple[GLMFit, Variance, Overdispersion | None]]:
        over = yield from estimate_alpha(newton)
        # The second fit has a known alpha, as any other; its covariance is different, see `over.cov`.
        fit = yield from with_alpha(newton, over.alpha).run(local)
        return fit, Variance(over.cov), over

    def _covariance(self, newton: Newton, fit: GLMFit, choice: CovarianceChoice) -> FitProtocol[Variance]:
        if choice.cov_type == STACKED:
            found = yield from stacked_sums(newton.session, newton.estimate_point(fit.gamma))
            return Variance(sandwich(fit, found.meat), spread=found.spread)
        if choice.cov_type in OF_ROWS:
            return of_rows(fit, choice.cov_type)
        if choice.cov_type in POWERS:
            meat = yield from leveraged_sums(newton.session, fit, POWERS[choice.cov_type])
            return Variance(sandwich(fit, meat))
        if choice.clusters is None:
            return Variance(model_based(fit))
        if choice.cov_type == "cluster":
            # Sites as clusters need only the products of their scores, which masks can hide.
            by_site = choice.clusters == self.partition.site_column
            return (yield from clustered(newton.session, fit, choice, by_site))
        sums = yield from cluster_sums(newton.session, fit, choice.clusters, choice.strata)
        return Variance(linearized(fit, sums), (sums.clusters, sums.strata))


class GLORE(FederatedGLM):
    """Logistic regression over sites that hold different rows; see :class:`FederatedGLM`.

    Parameters
    ----------
    formula : Formula
        A parsed formula.
    partition : ClientPartition
        In the horizontal layout.
    **settings
        Those of :meth:`from_formula`; a ``family`` other than the binomial one is refused.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit().params.round(2).to_dict()
    {'Intercept': -4.24, 'age': 0.06, 'sex': 1.48}
    """

    model_name: ClassVar[str] = "GLORE"
    _default_family: ClassVar[Any] = sm_families.Binomial

    @checks.takes_parsed
    @inherits_signature(FederatedGLM.__init__)
    def __init__(self, formula: Formula, partition: ClientPartition, **settings: Any) -> None:
        family = settings.get("family")
        if family is not None and DistributionSpec.of(family).name != "Binomial":
            raise ModelError(
                f"family: GLORE is logistic regression, received {DistributionSpec.of(family)}",
                remedy=OTHER_FAMILIES,
            )
        super().__init__(formula, partition, **settings)


NO_OFFSET = Remedy(
    "FederatedGLM.from_formula(...).fit()",
    ": R-squared is not defined with an offset. Subtract it from the response, or use FederatedGLM",
)


class FederatedOLS(FederatedGLM):
    """Least squares over sites that hold different rows, with the statistics of statsmodels' OLS.

    The fit is that of :class:`FederatedGLM` with the Gaussian family, plus R-squared, F tests, tests and
    intervals with Student's t, and intervals of new responses. With ``var_weights`` it is statsmodels' WLS
    with these weights; a row with ``freq_weights`` two counts as two rows.

    Effects after a bar, ``y ~ x | ward``, are absorbed: the fit is that with a constant for each level of
    ``ward`` within each site. Sites subtract the means of their levels from response and columns (Frisch and
    Waugh 1933), and release sums within levels and, masked, the number of levels, which counts in the degrees
    of freedom. Levels are of their site, also if another site has an equal label: they are those of
    ``| site^ward`` in fixest and pyfixest. ``ward^year`` has a level for each combination. Two effects,
    ``| ward + shift``, are removed by conjugate gradients if no label is at two sites. Their redundant
    levels are counted exactly, where fixest counts one. Rows that are alone in a level are left out, as in
    fixest, if a site has at least ``min_level_count`` of them; fewer are levels of their own, which changes
    no coefficient. There are no predictions, and no HC2, HC3 and CR2.

    Make one with :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula.
    partition : ClientPartition
        In the horizontal layout.
    **settings
        Those of :meth:`from_formula`.

    Examples
    --------
    >>> import fedstat as fs
    >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> result = fs.FederatedOLS.from_formula("num ~ age + sex", hospitals).fit()
    >>> bool(0.0 < result.rsquared_adj < result.rsquared < 1.0), bool(result.f_pvalue < 0.001)
    (True, True)
    >>> wards = fs.datasets.make_hospitals().assign(ward=lambda table: table.index // 4)
    >>> within = fs.ClientPartition.from_frame(wards, by="hospital")
    >>> absorbed = fs.FederatedOLS.from_formula("num ~ age + sex | ward", within).fit()
    >>> absorbed.params.index.tolist(), absorbed.nobs, int(absorbed.df_resid)
    (['age', 'sex'], 920, 686)

    References
    ----------
    Frisch and Waugh, "Partial time regressions as compared with individual trends", Econometrica 1 (1933).

    Correia, "Linear models with high-dimensional fixed effects: an efficient and feasible estimator" (2016).
    """

    model_name: ClassVar[str] = "Federated OLS"
    _results: ClassVar[type[GLMResults]] = OLSResults
    _hints: ClassVar = dict.fromkeys(("offset", "exposure"), NO_OFFSET)

    @checks.takes_parsed
    @inherits_signature(FederatedGLM.__init__, without=tuple(_hints))
    def __init__(self, formula: Formula, partition: ClientPartition, **settings: Any) -> None:
        family = settings.get("family")
        if family is not None and not DistributionSpec.of(family).least_squares:
            raise ModelError(
                f"family: FederatedOLS is for a normal response, received {DistributionSpec.of(family)}",
                remedy=OTHER_FAMILIES,
            )
        if formula.offsets:
            raise ModelError("formula: FederatedOLS has no offset()", remedy=NO_OFFSET)
        super().__init__(formula, partition, **settings)

    @classmethod
    @checks.checks_arguments
    @inherits_signature(__init__)
    def from_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula : str
            As for :meth:`FederatedGLM.from_formula`, without ``offset()``; ``y ~ x | ward`` absorbs effects.
        partition : ClientPartition
            In the horizontal layout.
        family : statsmodels family or str, optional
            The Gaussian family with the identity link, if one is given.
        weights, freq_weights, var_weights, labels, complete, missing, subset
            As for :meth:`FederatedGLM.from_formula`.
        """
        return super().from_formula(formula, partition, **settings)

    @checks.checks_arguments
    @inherits_signature(FederatedGLM.fit)
    def fit(self, **settings: Any) -> OLSResults:
        """Minimize the sum of squares over all sites' rows; see :meth:`FederatedGLM.fit`.

        Tests use Student's t on `df_resid`, or on the number of clusters minus one, also for robust errors;
        statsmodels uses normal ones there unless ``use_t=True``.

        Parameters
        ----------
        **settings
            See :meth:`FederatedGLM.fit`.

        Returns
        -------
        OLSResults
            With ``rsquared``, ``rsquared_adj``, ``fvalue``, ``f_pvalue``, ``ssr``, ``ess``, ``mse_resid``.

        Examples
        --------
        >>> import fedstat as fs
        >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> model = fs.FederatedOLS.from_formula("num ~ age + sex", hospitals)
        >>> result = model.fit(cov_type="HC3")
        >>> result.use_t, int(result.df_resid), result.wald_test("age = 0, sex = 0").distribution
        (True, 917, 'F')
        """
        return cast(OLSResults, super().fit(**settings))
