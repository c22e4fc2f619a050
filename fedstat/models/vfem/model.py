"""Models of VFEM: a normal response, and other distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from fedstat.docstrings import inherits_params
from fedstat.errors import AssumptionWarning, ModelError, Remedy, warn
from fedstat.federation.disclosure.row_checks import entities_per_equation
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.models.checks import check_choice, check_integer, check_share, checks_arguments, kind_of
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.models.vertical.exchange.patterns import (
    MORE_MOVED,
    PatternExchange,
    SmallPatterns,
    exchange_patterns,
)
from fedstat.models.vertical.joint_normal.assumption_tests import warn_of_dependence
from fedstat.models.vertical.layout import Layout
from fedstat.models.vfem.base_model import (
    IterativeOptions,
    LinearMethod,
    VFEMMethod,
    VFEMModel,
    check_variances,
    check_weights,
)
from fedstat.models.vfem.corrections import Correction, apply_correction, check_correction
from fedstat.models.vfem.covariance.cross_products import product_session
from fedstat.models.vfem.covariance.from_moments import (
    GROUPS,
    CovType,
    MomentsOptions,
    check_cov_type,
    estimate_from_moments,
)
from fedstat.models.vfem.explain import VFEMGLMPlan, VFEMPlan
from fedstat.models.vfem.iteration.glm_protocol import QuasiNewtonIteration
from fedstat.models.vfem.iteration.protocol import EMIteration
from fedstat.models.vfem.iteration.site_state import NORMAL, kernel_of
from fedstat.models.vfem.iteration.state import (
    FAMILY,
    SMALLEST_MEMORY,
    CrossSource,
    InitialValues,
    Iteration,
    IterationOptions,
    Progress,
    SketchKind,
    fit_by_site,
)
from fedstat.models.vfem.joint_protocol import LEAST_OF_ALPHA, LEAST_PATTERN, JointIteration
from fedstat.models.vfem.outcome import SessionArtifacts, VFEMOutcome, warn_unless_converged
from fedstat.models.vfem.protocol import IterativeResult, fit_glm, fit_joint, fit_normal
from fedstat.models.vfem.results import VFEMGLMResults, VFEMResults
from fedstat.models.vfem.weighted import (
    JACKKNIFE,
    exchange_weighted,
    unexplained_difference,
    weighted_fit,
)
from fedstat.typing import Floats

WITHOUT_PATTERNS = ", or from_formula(..., between='independent'), which uses no sums by missing pattern"
"""What else helps if no site can deal random numbers, or patterns are too small."""
INDEPENDENT_ALTERNATIVE = MORE_MOVED.filled(otherwise=WITHOUT_PATTERNS)
"""Remedy if too many entities are in patterns that are too small."""
BLOCKS = Remedy("from_formula(..., between='independent').fit(...)", "use from_formula(..., {arguments})")
OPTIONS_OF_INIT = IterationOptions(tol_score=1e-4, tol_change=np.inf)
"""Limits of the fit that gives the first coefficients: a small score suffices, even if coefficients still
move."""
ITERATIVE_ALTERNATIVE = MORE_MOVED.filled(
    otherwise=", or from_formula(..., between='independent') and fit(exchange='iterative'), which assumes "
    "independent blocks and releases values per entity"
)
"""Remedy of VFEM if too many entities are in missing patterns that are too small."""


def warn_of_open_ranges(result: VFEMResults) -> None:
    """Warn if the data do not determine the coefficients, which the banner of the summary states in full."""
    if result._included_ranges is not None:
        warn(
            "the data do not determine all coefficients, because two sites share too few entities for a "
            "covariance of their columns. Intervals and p-values contain all values that the data leave "
            "open",
            AssumptionWarning,
            remedy=Remedy("sensitivity()", "see {call}"),
        )


class VFEMRegression(VFEMModel):
    """Linear regression where whole blocks of columns are missing for some entities.

    Sites hold different columns of the same entities. If a site has no record of an entity, the entity lacks
    the whole block of that site. The model is y = beta0 + sum_k x_k'beta_k + eps with normal errors and
    jointly normal columns. Their covariance between sites is free (``between="free"``), or zero as in the
    publication (``between="independent"``); see :meth:`from_formula` for the default. With zero covariance,
    coefficients are biased if blocks are correlated, under any missing-data mechanism. Estimates maximize the
    likelihood of the observed values, and are valid if missingness depends on observed values only (MAR). If
    nothing is missing, estimates, standard errors and tests are those of ordinary least squares.

    Make one with :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula.
    partition : ClientPartition
        In the vertical layout.
    family, between, offset, freq_weights, var_weights, missing, coordinator
        See :meth:`from_formula`.

    Raises
    ------
    ModelError
        The formula leaves out the intercept; this model centers blocks at their means.

    References
    ----------
    Tang, Wang, Feng and Li, "Enterprise profit prediction using multiple data sources with missing
    values through vertical federated learning" (TWFL).

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> model = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI + LP", partition)
    >>> model.fit().params.round(2).to_dict()
    {'Intercept': -0.08, 'ROA': 0.09, 'CI': -0.79, 'LP': -0.06}
    """

    _plan = VFEMPlan
    _conditions = True
    _moved: ClassVar[Mapping[str, str]] = {
        one.name: f"exchange='iterative', iteration=fs.Iteration({one.name}=...)" for one in fields(Iteration)
    }

    def _check_distribution(self) -> None:
        if self.distribution != NORMAL:
            raise ModelError(
                f"family: VFEMRegression is for a normal response, received {self.distribution}",
                remedy=Remedy(
                    "VFEMGLM.from_formula(...).fit()",
                    "use fs.VFEMGLM.from_formula(formula, partition, family=...)",
                ),
            )

    @checks_arguments
    def fit(
        self,
        *,
        method: LinearMethod = "vfem",
        cov_type: CovType = "observed",
        exchange: Literal["moments", "iterative"] = "moments",
        iteration: Iteration | None = None,
        maxiter: int = 5000,
        progress: bool | None = None,
        max_moved: float | None = None,
        correction: Correction | None = None,
    ) -> VFEMResults:
        """Maximize the likelihood of the observed data.

        Parameters
        ----------
        method : {"vfem", "weighted", "cc", "impute", "single"}
            "vfem": maximum likelihood of all entities. "weighted": moments of the entities that two sites
            share, with weights by which they represent all entities, augmented with those that only one of
            the two has. This assumes no distribution, for missingness that depends on the response and the
            columns of its site, which must be complete. Standard errors come from a jackknife over random
            groups; `cov_type`, `iteration` and `max_moved` do not apply. "cc": the entities that every site
            has. "impute": all entities, with missing blocks replaced by the site's mean. "single": the
            columns of the response holder alone. The last three are least squares, as is "vfem" if nothing is
            missing: the residual variance has n - p - 1 degrees of freedom, and tests use Student's t.
        cov_type : {"observed", "expected", "sem", "robust", "none"}
            Inverse of the observed information; the same with cross-products between sites set to their
            expected value, zero, so that none are requested (requires missingness completely at random);
            supplemented EM; sandwich; or none. With exchange="moments", the sandwich needs between="free":
            each missing pattern is split into up to 25 random groups, whose sums are released instead of
            those of the pattern, and tests use Student's t. All but "none" account for the estimated means,
            covariances and residual variance.
        exchange : {"moments", "iterative"}
            What the sites exchange. "moments": sums of products of the columns by missing pattern, once;
            products of two sites' columns come from secure multiplication. No row-level values leave a site.
            The coordinator computes the rest: Newton's method continues until the estimate is within 1e-9
            standard errors of the maximum. A pattern is not released if it has fewer entities than the
            partition's `min_count`, or than twice its number of columns and response; its entities then count
            as missing at a site that has them. "iterative": linear predictors and residuals of every entity,
            in every round. The estimates are the same. With between="independent",
            cov_type="robust" requires it.
        iteration : Iteration, optional
            Options of exchange="iterative", such as ``fs.Iteration(step="gradient")``.
        maxiter : int
            Largest number of iterations, for both exchanges.
        progress : bool
            Print iteration, log-likelihood, score and the remaining time to standard error.
        max_moved : float, optional
            With exchange="moments": largest share of the entities in missing patterns that are too small to
            be released. These entities count as missing at a site that has them, with all its columns; a
            warning reports single values that count as missing. The default is .05, or any share if a site's
            policy counts the bits that sums reveal about columns of few values.
        correction : {"small-sample", "skewness"}, optional
            With exchange="moments", computed from the same sums. "small-sample" removes the bias of order 1/n
            (Cox and Snell 1968) and computes standard errors from the residual variance with its degrees of
            freedom; if nothing is missing, nothing remains to be corrected. "skewness" models columns as
            shifted log-normal, with the skewness that their sites reported; missingness may depend on the
            response and on columns that no entity lacks, and covariances between sites are free. The estimate
            is the model whose simulated sample has the estimates of the normal model (indirect inference,
            Gourieroux, Monfort and Renault 1993). It has its own standard errors. If no such model is found,
            the closest one is used, and the summary says so at the top.

        Returns
        -------
        VFEMResults

        Raises
        ------
        ModelError
            An argument has no meaning here or belongs to the other exchange, or no third party can deal for
            two sites.
        NotAvailableError
            cov_type="robust" from moments.
        EstimationError
            The entities used do not determine the estimate, or too many are in small patterns.
        PolicyError
            A site refuses a release.

        Warns
        -----
        ConvergenceWarning
            The iteration stopped before its tolerances.
        AssumptionWarning
            With between="independent", blocks are correlated. With free covariances, two sites share too few
            entities to determine all coefficients.
        DataWarning
            More than 5 % of the entities are in patterns that are too small to be released, and `max_moved`
            allows this.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
        >>> fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition).fit(method="cc").nobs
        340
        """
        call = Call.of(self.fit, locals())
        check_choice("method", method, get_args(LinearMethod))
        check_choice("cov_type", cov_type, get_args(CovType))
        check_choice("exchange", exchange, ("moments", "iterative"))
        if method == "weighted":
            given: dict[str, object] = {"cov_type": cov_type, "exchange": exchange}
            given |= {"max_moved": max_moved, "correction": correction}
            check_weighted(given, iteration, self._roles, self.between)
            return run_fit(self, call, VFEMRegression._fit_weighted, Iteration()._options(maxiter))
        if exchange == "moments":
            weighted = self._roles.keys() - {"offset"}
            free = method == "vfem" and self.between != "independent" and not weighted
            check_cov_type(cov_type, free=free)
            if iteration is not None:
                raise ModelError(
                    "iteration: has no effect with exchange='moments', which exchanges sums once and "
                    "chooses its own start",
                    remedy=Remedy("fit(..., iteration=None)", "Leave it out, or use exchange='iterative'"),
                )
        elif self.between != "independent":
            raise ModelError(
                "exchange='iterative' requires between='independent', as in the publication",
                remedy=Remedy(
                    "from_formula(..., between='independent').fit(...)",
                    ": use from_formula(..., {arguments}), or keep exchange='moments'",
                ),
            )
        check_correction(correction, cov_type, method, self.between, exchange)
        check_weights(self._roles, exchange, correction)
        check_share("max_moved", max_moved)
        iteration = Iteration() if iteration is None else iteration
        if not isinstance(iteration, Iteration):
            raise ModelError(f"iteration: expected fs.Iteration(...), received {kind_of(iteration)}")
        check_integer("memory", iteration.memory, SMALLEST_MEMORY)
        options = iteration._options(maxiter)
        if exchange == "moments":
            between = self.between if method == "vfem" else "independent"
            if correction == "skewness":
                between = "free"
            request = MomentsOptions(cov_type, between, maxiter, jointly=correction is not None)
            return run_fit(
                self, call, VFEMRegression._fit_moments, method, request, options, max_moved, correction
            )
        covariance = self._covariance_options(cov_type, iteration)
        wanted = IterativeOptions(method, options, covariance, iteration.init)
        return run_fit(self, call, VFEMRegression._fit_by_iteration, wanted, VFEMResults)

    def _fit_weighted(self, attempt: FitAttempt, options: IterationOptions) -> VFEMResults:
        layout = self._begin("weighted")
        session = product_session(layout, self._session, self._agreement.at)
        sums = attempt.run(exchange_weighted(layout, self.partition.min_count, session))
        fit, covariance = weighted_fit(layout, sums)
        outcome = VFEMOutcome("weighted", JACKKNIFE, "zero", options, fit, covariance)
        held = SessionArtifacts(unexplained=unexplained_difference(layout, sums))
        return VFEMResults._of(self, layout, outcome, held, attempt.ledger)

    def _fit_moments(
        self,
        attempt: FitAttempt,
        method: VFEMMethod,
        request: MomentsOptions,
        options: IterationOptions,
        max_moved: float | None,
        correction: Correction | None,
    ) -> VFEMResults:
        # Owners who allow sums over fewer entities lose no information by merged patterns.
        each = max(entities_per_equation(site.policy) for site in self.partition.sites.values())
        small = SmallPatterns(self.partition.min_count, max_moved, ITERATIVE_ALTERNATIVE, each)
        groups = GROUPS if request.cov_type == "robust" else 1

        def protocol() -> FitProtocol[tuple[Layout, PatternExchange]]:
            yield from self._open_weights()
            layout = self._begin(method, partly=method == "vfem")
            check_variances(self._roles, layout)
            session = product_session(layout, self._session, self._agreement.at)
            return layout, (yield from exchange_patterns(layout, small, session, groups=groups))

        layout, exchange = attempt.run(protocol())
        self._keep_division(layout, exchange)
        estimate = estimate_from_moments(exchange.moments, request, exchange.by_group)
        made = apply_correction(estimate.found, estimate.covariance, correction)
        if method == "vfem" and self.between == "independent":
            warn_of_dependence(exchange.moments)
        fit = fit_by_site(made.reported, estimate.between)
        outcome = VFEMOutcome(
            method,
            request.cov_type,
            "zero",
            options,
            fit,
            made.covariance,
            correction=correction,
            gap=made.gap,
            choice=estimate.choice,
        )
        held = SessionArtifacts(exchange=exchange, moments_fit=estimate.found)
        result = VFEMResults._of(self, layout, outcome, held, attempt.ledger)
        warn_unless_converged(result._fit)
        warn_of_open_ranges(result)
        return result

    def _iterate(
        self, wanted: IterativeOptions, layout: Layout, report: Progress | None
    ) -> FitProtocol[IterativeResult]:
        iteration = EMIteration(layout, wanted.options, self._session, report)
        first = self._first_point(layout, wanted.options, wanted.init)
        return fit_normal(iteration, first, wanted.covariance)

    def _first_point(
        self, layout: Layout, options: IterationOptions, init: InitialValues
    ) -> FitProtocol[Mapping[str, Floats] | None]:
        if not isinstance(init, str):
            return self._given_point(init)
        check_choice("init", init, ("zero", "cc", "impute"))
        if init == "zero":
            return None
        coarse = replace(OPTIONS_OF_INIT, maxiter=options.maxiter, masked=options.masked)
        fit = yield from EMIteration(self._layout(init), coarse, self._session).maximize()
        return fit.beta

    def _given_point(self, init: Sequence[float] | Mapping[str, float] | Floats) -> Mapping[str, Floats]:
        names, blocks = self.param_names[1:], self.design.blocks
        if isinstance(init, Mapping):
            lacking = [name for name in names if name not in init]
            if lacking:
                raise ModelError(f"init: no value for {', '.join(lacking)}")
            init = [init[name] for name in names]
        values = np.asarray(init, dtype=float)
        if values.shape != (len(names),) or not np.isfinite(values).all():
            raise ModelError(
                f"init: expected {len(names)} finite coefficients (without the intercept), "
                f"received an array of shape {values.shape}"
            )
        edges = np.cumsum([len(block.names) for block in blocks])[:-1]
        return dict(zip([b.site for b in blocks], np.split(values, edges), strict=True))


class VFEMGLM(VFEMModel):
    """Generalized linear regression where whole blocks of columns are missing for some entities.

    The response is binary (logit or probit link) or a count (log link; Poisson or negative binomial), with
    linear predictor beta0 + sum_k x_k'beta_k. Columns are jointly normal; their covariance between sites is
    free (``between="free"``) or zero (``"independent"``), as in :class:`fedstat.VFEMRegression`. The missing
    columns of an entity enter its likelihood through one normal variable, the sum of their linear predictors.
    The observed-data likelihood is therefore an integral over one dimension. Estimates maximize the joint
    likelihood of response and columns over all parameters, including those of the distribution of the
    columns. They are valid if missingness depends on observed values only (MAR), including the response. If
    nothing is missing, they are the estimates of the generalized linear model. With ``between="free"``, an
    entity that has only some of a site's columns takes part with these columns.

    Make one with :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula.
    partition : ClientPartition
        In the vertical layout.
    family : statsmodels family
        ``Binomial()``, also with the probit link, ``Poisson()`` or ``NegativeBinomial(alpha=...)``.
    between, offset, missing, coordinator
        See :meth:`from_formula`.

    Raises
    ------
    ModelError
        The formula leaves out the intercept, or the family is not supported.

    Examples
    --------
    >>> import fedstat as fs, statsmodels.api as sm
    >>> data = fs.datasets.make_sme_risk(1_000)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> binomial = sm.families.Binomial()
    >>> model = fs.VFEMGLM.from_formula("RISK ~ PL1 + CA1", partition, family=binomial)
    >>> model.fit(cov_type="none").params.index.tolist()
    ['Intercept', 'PL1', 'CA1']
    """

    _plan = VFEMGLMPlan
    _conditions = True

    def _check_distribution(self) -> None:
        if self.distribution == NORMAL:
            raise ModelError(
                "family: VFEMGLM is for a response that is not normal, such as sm.families.Binomial()",
                remedy=Remedy(
                    "VFEMRegression.from_formula(...).fit()", "use fs.VFEMRegression for a normal response"
                ),
            )
        kernel_of(self.distribution)
        weights = [name for name in ("freq_weights", "var_weights") if name in self._roles]
        if weights:
            raise ModelError(
                f"{weights[0]}: only a normal response can have weights. Give every entity that a row "
                "represents a row and a key of its own, at all sites, or use FederatedGLM if sites hold "
                "complete rows"
            )

    @checks_arguments
    @inherits_params(VFEMRegression.fit)
    def fit(
        self,
        *,
        method: VFEMMethod = "vfem",
        cov_type: Literal["observed", "robust", "none"] = "observed",
        dispersion: Literal["ml"] | None = None,
        masked: bool | None = None,
        cross_products: CrossSource = "secure",
        sketch: SketchKind = "structured",
        sketch_size: int = 20_000,
        memory: int = 12,
        maxiter: int = 200,
        tol: float = 1e-8,
        progress: bool | None = None,
        max_moved: float | None = None,
    ) -> VFEMGLMResults:
        """Maximize the likelihood of the observed data.

        Parameters
        ----------
        method
            As in :meth:`VFEMRegression.fit`.
        cov_type : {"observed", "robust", "none"}
            Inverse of the observed information of all parameters, including means and covariances; the
            sandwich of Huber and White with this information as its outer factors (statsmodels: HC0); or
            none. The sandwich requires neither normal columns nor the variance of the family, as long as the
            estimates are consistent. It is available for between="independent".
        dispersion : "ml", optional
            Estimate the dispersion of the family NegativeBinomial, its alpha, by maximum likelihood, starting
            at the given value; all standard errors account for it. By default alpha is known.
        masked : bool, optional
            Whether pairwise masks hide each site's linear predictors, likelihoods and scores, which is the
            default; see :class:`fedstat.Iteration`, also for the next three.
        cross_products : {"secure", "sketch", "exact"}
            With between="independent": source of the products of two sites' columns, which the covariance
            needs. With between="free", these products are always secure.
        sketch : {"structured", "gaussian"}
            Kind of projection.
        sketch_size : int
            Number of rows of the sketch.
        memory : int
            Number of earlier steps that shape the next one.
        maxiter : int
            Largest number of iterations.
        tol : float
            Stop when the score, scaled by the local information and the root of the number of entities, is
            smaller, and no parameter (of standardized columns) moved by more than 100 times this.
        progress
            As in :meth:`VFEMRegression.fit`.
        max_moved : float, optional
            With between="free", which uses sums by missing pattern: largest share of the entities in patterns
            that are too small. These entities count as missing at a site that has them. The default is .05.

        Returns
        -------
        VFEMGLMResults

        Raises
        ------
        ModelError
            An argument has no meaning here, or no third party can deal for two sites.
        EstimationError
            The response does not fit the family or is constant; the entities do not determine the estimate;
            columns separate the response; or Poisson counts vary more than 1.5 times as much as the family
            allows (Pearson's chi2 / n) while entities lack blocks, which biases the coefficients.
        PolicyError
            A site refuses a release.

        Warns
        -----
        ConvergenceWarning
            The iteration stopped before its tolerances.

        Examples
        --------
        >>> import fedstat as fs, statsmodels.api as sm
        >>> data = fs.datasets.make_sme_risk(1_000)
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        >>> binomial = sm.families.Binomial()
        >>> model = fs.VFEMGLM.from_formula("RISK ~ PL1 + CA1", partition, family=binomial)
        >>> model.fit(cov_type="none").converged
        True
        """
        call = Call.of(self.fit, locals())
        check_choice("method", method, get_args(VFEMMethod))
        check_robust(method, cov_type)
        self._check_dispersion(dispersion)
        check_choice("cov_type", cov_type, ("observed", "robust", "none"))
        iteration = Iteration(masked, cross_products, sketch, sketch_size, memory=memory, tol=tol)
        options, covariance = iteration._options(maxiter), self._covariance_options(cov_type, iteration)
        wanted = IterativeOptions(method, options, covariance, estimates_alpha=dispersion is not None)
        check_share("max_moved", max_moved)
        if self._fits_jointly(method):
            if cov_type == "robust":
                raise ModelError(
                    "cov_type='robust' is not available with between='free', which has cov_type='observed'",
                    remedy=BLOCKS,
                )
            if cross_products != "secure":
                raise ModelError(
                    f"cross_products={cross_products!r} is not available with between='free', whose "
                    "cross-products are always secure",
                    remedy=BLOCKS,
                )
            least = max(self.partition.min_count, LEAST_PATTERN + LEAST_OF_ALPHA * wanted.estimates_alpha)
            wanted = replace(
                wanted,
                small=SmallPatterns(least, max_moved, INDEPENDENT_ALTERNATIVE),
            )
        return run_fit(self, call, VFEMGLM._fit_by_iteration, wanted, VFEMGLMResults)

    def _linear(self) -> VFEMRegression:
        """Make the linear regression of the response on the same columns, without the offset.

        Tests of the assumptions on columns and missing patterns use its sums, for any distribution of the
        response.
        """
        return VFEMRegression(
            self.formula, self.partition, missing=self._missing, coordinator=self.coordinator
        )

    def _check_dispersion(self, dispersion: str | None) -> None:
        if dispersion is not None and (dispersion != "ml" or self.distribution.alpha is None):
            raise ModelError(
                f"dispersion: expected 'ml' with the family NegativeBinomial, received {dispersion!r} with "
                f"{self.distribution}",
                remedy=Remedy(
                    "from_formula(..., family=sm.families.NegativeBinomial()).fit(dispersion='ml')",
                    "use {arguments}, or give a known alpha to the family",
                ),
            )

    def _fits_jointly(self, method: VFEMMethod) -> bool:
        """Whether a covariance between sites is estimated, which a single block does not have."""
        return self.between != "independent" and method == "vfem" and len(self.design.blocks) > 1

    def _iterate(
        self, wanted: IterativeOptions, layout: Layout, report: Progress | None
    ) -> FitProtocol[IterativeResult]:
        shared: dict[str, Any] = {
            "distribution": self.distribution,
            "at": wanted.covariance.cross.at,
            "curved": wanted.covariance.cov_type != "none",
            "min_count": wanted.covariance.cross.min_count,
        }
        if wanted.small is None:
            iteration = QuasiNewtonIteration(
                layout,
                wanted.options,
                self._session,
                report,
                **shared,
                estimates_alpha=wanted.estimates_alpha,
            )
            return fit_glm(iteration, wanted.covariance)
        conversation = SecureProductSession(
            FAMILY, self._session, shared["at"], WITHOUT_PATTERNS, layout.least
        )

        def make(narrowed: Layout, exchange: PatternExchange) -> JointIteration:
            return JointIteration(
                narrowed,
                wanted.options,
                self._session,
                report,
                **shared,
                exchange=exchange,
                estimates_alpha=wanted.estimates_alpha,
                between=self.between,
            )

        return fit_joint(layout, wanted.small, conversation, make)


def check_weighted(
    given: Mapping[str, object],
    iteration: Iteration | None,
    roles: Mapping[str, str],
    between: str | None,
) -> None:
    """Refuse arguments that the weighted estimate does not have."""
    default = {"cov_type": "observed", "exchange": "moments", "max_moved": None, "correction": None}
    other = [name for name, value in given.items() if value != default[name]]
    other += ["iteration"] * (iteration is not None) + [name for name in roles if name != "offset"]
    if other:
        raise ModelError(
            f"method='weighted': has no {', '.join(other)}. Its standard errors come from a jackknife over "
            "random groups",
            remedy=Remedy("fit(method='weighted')", "leave the argument out"),
        )
    if between == "independent":
        raise ModelError(
            "method='weighted': requires free covariances between sites",
            remedy=Remedy(
                "from_formula(..., between=None).fit(...)",
                "leave between='independent' out of from_formula(...)",
            ),
        )


def check_robust(method: str, cov_type: str) -> None:
    """Refuse robust standard errors of imputed rows, which are not entities."""
    if cov_type == "robust" and method == "impute":
        raise ModelError(
            "cov_type='robust': not with method='impute', whose standard errors ignore the imputation",
            remedy=Remedy("fit(..., method='vfem')", "use {arguments}"),
        )
