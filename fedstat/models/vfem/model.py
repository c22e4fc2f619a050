"""Models of VFEM: a normal response, and other distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from fedstat.docstrings import inherits_params
from fedstat.errors import ModelError
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.kernels.glm.distributions import DistributionSpec, Family
from fedstat.models.checks import check_choice, check_share, check_whole, checks_arguments, kind_of
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.models.vertical.exchange.patterns import PatternExchange, SmallPatterns, exchange_patterns
from fedstat.models.vertical.joint_normal.assumption_tests import warn_of_dependence
from fedstat.models.vertical.layout import Layout
from fedstat.models.vfem.base_model import (
    IterativeOptions,
    VFEMMethod,
    VFEMModel,
    check_variances,
    check_weights,
)
from fedstat.models.vfem.corrections import Correction, apply_correction, check_correction
from fedstat.models.vfem.covariance.cross_products import product_session
from fedstat.models.vfem.covariance.from_moments import (
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
from fedstat.models.vfem.joint_protocol import LEAST_PATTERN, JointIteration
from fedstat.models.vfem.outcome import SessionArtifacts, VFEMOutcome, warn_unless_converged
from fedstat.models.vfem.protocol import IterativeResult, fit_glm, fit_joint, fit_normal
from fedstat.models.vfem.results import VFEMGLMResults, VFEMResults
from fedstat.typing import Floats

INDEPENDENT_ALTERNATIVE = (
    ", or from_formula(..., between='independent'), which has no sums by missing pattern"
)
"""What there is where too many entities are in patterns that are too small, or nobody can deal."""
OPTIONS_OF_INIT = IterationOptions(tol_score=1e-4, tol_change=np.inf)
"""Of the fit that gives the first coefficients: a small score will do, whatever still moves."""
ITERATIVE_ALTERNATIVE = ", or fit with exchange='iterative', which releases values per entity"
"""What VFEM offers where too many entities are in missing patterns that are too small."""


class VFEMRegression(VFEMModel):
    """Linear regression where blocks of whole sites are missing.

    Sites hold different columns of the same entities, and an entity that a site never saw
    lacks that site's whole block. The model is y = beta0 + sum_k x_k'beta_k + eps with normal errors
    and jointly normal columns, whose covariance is free between sites as well as within
    (``between="free"``), or, in the publication's model, zero between sites
    (``between="independent"``): there coefficients are biased where blocks correlate, however their records
    are missing. Estimates maximize the likelihood of what is observed, and are valid when missingness depends
    on observed values only (MAR). With nothing missing they are those of ordinary least squares.

    Make one with :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula.
    partition : ClientPartition
        In the vertical layout.
    **kwargs
        As in :meth:`from_formula`.

    Raises
    ------
    ModelError
        The formula leaves out the intercept: blocks are centered at their means here.

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

    def __init__(
        self, formula: Formula, partition: ClientPartition, *, family: Family | None = None, **kwargs: Any
    ) -> None:
        if family is not None and DistributionSpec.of(family) != NORMAL:
            raise ModelError(
                f"family: VFEMRegression is for a normal response, received {DistributionSpec.of(family)}; "
                "use fs.VFEMGLM.from_formula(formula, partition, family=...)"
            )
        super().__init__(formula, partition, **kwargs)

    @checks_arguments
    def fit(
        self,
        *,
        method: VFEMMethod = "vfem",
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
        method : {"vfem", "cc", "impute", "single"}
            All entities; those that every site has; all, with the site's mean in the place of a
            missing block; or the columns of the response holder alone.
        cov_type : {"observed", "expected", "sem", "robust", "none"}
            Inverse observed information; the same with cross-products between sites at their
            expectation, zero, so that none are asked for (needs missingness completely at random);
            supplemented EM; sandwich; or none. All but "none" account for the estimated means,
            covariances and residual variance.
        exchange : {"moments", "iterative"}
            What passes between the sites. "moments": sums of products of the columns by missing
            pattern, once, products of two sites' columns by secure multiplication; nothing per
            entity leaves, and everything else happens at the coordinator, where Newton's method goes on until
            the maximum is within 1e-9 standard errors. Patterns with fewer entities than
            the partition's `min_count`, or than twice their columns and response, are not released: these
            entities count as missing at a site that has them. "iterative": linear predictors and
            residuals of every entity, in every round; the estimates are the same. cov_type="robust" belongs
            to it.
        iteration : Iteration, optional
            Options of exchange="iterative", such as ``fs.Iteration(step="gradient")``.
        maxiter : int
            Largest number of iterations, of either exchange.
        progress : bool
            Print iteration, log-likelihood, score and the time left to standard error.
        max_moved : float, optional
            With exchange="moments": largest share of the entities in missing patterns that are too small to
            be released, and count as missing at a site that has them (all columns of them; single
            values that count as missing are warned of). By default .05, or any share where an owner's policy
            has sums judged by the bits of columns of few values.
        correction : {"small-sample", "skewness"}, optional
            With exchange="moments" and between="free", from the same sums. "small-sample": without the bias
            of order 1/n (Cox and Snell 1968), and standard errors by the residual variance with its degrees
            of freedom; with nothing missing those of least squares. "skewness": columns are shifted
            log-normal, each as asymmetric as its site told, and the response and columns that nobody
            lacks decide on what is missing: the law whose simulated sample has the estimates of the normal
            one (indirect inference, Gourieroux, Monfort and Renault 1993), with standard errors of its own.

        Returns
        -------
        VFEMResults

        Raises
        ------
        ModelError
            An argument has no meaning here, or belongs to the other exchange; or nobody is left to deal for
            two sites.
        NotAvailableError
            cov_type="robust" from moments.
        EstimationError
            The entities of the method do not determine the estimate, or too many are in small patterns.
        PolicyError
            A site refuses a release.

        Warns
        -----
        ConvergenceWarning
            The iteration stopped before its tolerances.
        DataWarning
            More than 5 % of the entities are in patterns that are too small to be released, and `max_moved`
            allows it.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
        >>> fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition).fit(method="cc").nobs
        340
        """
        call = Call.of(self.fit, locals())
        check_choice("method", method, get_args(VFEMMethod))
        check_choice("cov_type", cov_type, get_args(CovType))
        check_choice("exchange", exchange, ("moments", "iterative"))
        if exchange == "moments":
            check_cov_type(cov_type)
            if iteration is not None:
                raise ModelError(
                    "iteration: no part of exchange='moments', which has one exchange of sums and its own "
                    "start; leave it out, or fit with exchange='iterative'"
                )
        elif self.between == "free":
            raise ModelError(
                "exchange='iterative' is that of the publication's model: "
                "from_formula(..., between='independent'), or leave exchange='moments'"
            )
        check_correction(
            correction, cov_type, (method, exchange, self.between) == ("vfem", "moments", "free")
        )
        check_weights(self._roles, exchange, correction)
        check_share("max_moved", max_moved)
        iteration = Iteration() if iteration is None else iteration
        if not isinstance(iteration, Iteration):
            raise ModelError(f"iteration: expected fs.Iteration(...), received {kind_of(iteration)}")
        check_whole("memory", iteration.memory, SMALLEST_MEMORY)
        options = iteration._options(maxiter)
        if exchange == "moments":
            asked = MomentsOptions(cov_type, self.between if method == "vfem" else "independent", maxiter)
            return run_fit(
                self, call, VFEMRegression._fit_moments, method, asked, options, max_moved, correction
            )
        covariance = self._covariance_options(cov_type, iteration)
        wanted = IterativeOptions(method, options, covariance, iteration.init)
        return run_fit(self, call, VFEMRegression._fit_by_iteration, wanted, VFEMResults)

    def _fit_moments(
        self,
        attempt: FitAttempt,
        method: VFEMMethod,
        asked: MomentsOptions,
        options: IterationOptions,
        max_moved: float | None,
        correction: Correction | None,
    ) -> VFEMResults:
        layout = self._begin(method, partly=method == "vfem")
        check_variances(self._roles, layout)
        small = SmallPatterns(self.partition.min_count, max_moved, ITERATIVE_ALTERNATIVE)
        exchanging = exchange_patterns(
            layout, small, product_session(layout, self._session, self._agreement.at)
        )
        exchange = attempt.run(exchanging)
        self._keep_division(layout, exchange)
        found, covariance = estimate_from_moments(exchange.moments, asked)
        made = apply_correction(found, covariance, correction)
        if method == "vfem" and self.between == "independent":
            warn_of_dependence(exchange.moments)
        fit = fit_by_site(made.reported, asked.between)
        outcome = VFEMOutcome(
            method, asked.cov_type, "zero", options, fit, made.covariance, correction=correction
        )
        held = SessionArtifacts(exchange=exchange, moments_fit=found)
        result = VFEMResults._of(self, layout, outcome, held, attempt.ledger)
        warn_unless_converged(result._fit)
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
        fit = yield from EMIteration(self._layout(init), coarse, self._session).maximise()
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
        return dict(zip([b.client for b in blocks], np.split(values, edges), strict=True))


class VFEMGLM(VFEMModel):
    """Generalized linear regression where blocks of whole sites are missing.

    The response is binary (logit or probit link) or a count (log link; Poisson or negative binomial),
    with linear predictor beta0 + sum_k x_k'beta_k; columns are jointly normal, with a covariance that is free
    between sites (``between="free"``) or zero (``"independent"``), as in
    :class:`fedstat.VFEMRegression`. What an entity lacks enters its likelihood through one normal variable,
    the sum of the missing linear predictors, so that the likelihood of what is observed is an integral over
    one dimension. Estimates maximize the joint likelihood of response and columns in all parameters, those of
    the law of the columns included, and are valid when missingness depends on observed values only (MAR),
    those of the response included. With nothing missing they are those of the generalized linear model.

    Make one with :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula.
    partition : ClientPartition
        In the vertical layout.
    family : statsmodels family
        ``Binomial()``, also with the probit link, ``Poisson()`` or ``NegativeBinomial(alpha=...)``.
    **kwargs
        As in :meth:`from_formula`.

    Raises
    ------
    ModelError
        The formula leaves out the intercept, or the family is another one.

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

    def __init__(
        self, formula: Formula, partition: ClientPartition, *, family: Family | None = None, **kwargs: Any
    ) -> None:
        self.distribution = NORMAL if family is None else DistributionSpec.of(family)
        if self.distribution == NORMAL:
            raise ModelError(
                "family: VFEMGLM is for a response that is not normal, such as sm.families.Binomial(); use "
                "fs.VFEMRegression for a normal one"
            )
        kernel_of(self.distribution)
        weights = [name for name in ("freq_weights", "var_weights") if kwargs.get(name) is not None]
        if weights:
            raise ModelError(
                f"{weights[0]}: weights belong to the normal response as yet; write an entity that stands "
                "for several as several, or use FederatedGLM where sites hold whole rows"
            )
        super().__init__(formula, partition, **kwargs)

    @checks_arguments
    @inherits_params(VFEMRegression.fit)
    def fit(
        self,
        *,
        method: VFEMMethod = "vfem",
        cov_type: Literal["observed", "robust", "none"] = "observed",
        alpha: Literal["ml"] | None = None,
        masked: bool = True,
        cross_products: CrossSource = "secure",
        sketch: SketchKind = "structured",
        sketch_size: int = 20_000,
        memory: int = 12,
        maxiter: int = 200,
        tol_score: float = 1e-8,
        tol_change: float = 1e-6,
        progress: bool | None = None,
        max_moved: float | None = None,
    ) -> VFEMGLMResults:
        """Maximize the likelihood of the observed data.

        Parameters
        ----------
        method
            As in :meth:`VFEMRegression.fit`.
        cov_type : {"observed", "robust", "none"}
            Inverse observed information of all parameters, means and covariances included; the sandwich of
            Huber and White with these in its outer parts (statsmodels: HC0), which needs no normal columns
            and no variance as the family has it, as long as the estimates are consistent without; or none.
            The sandwich belongs to between="independent".
        alpha : "ml", optional
            Estimate the alpha of the family NegativeBinomial by maximum likelihood, from the one given; all
            standard errors account for it. By default it is known. It belongs to between="independent".
        masked : bool
            Whether sites hide their linear predictors, likelihoods and scores by pairwise masks; see
            :class:`fedstat.Iteration`, also of the next three.
        cross_products : {"secure", "sketch", "exact"}
            Of between="independent": where products of two sites' columns come from, which the
            covariance needs. With between="free" they are secure.
        sketch : {"structured", "gaussian"}
            Kind of projection.
        sketch_size : int
            Its rows.
        memory : int
            Earlier steps that shape the next one.
        maxiter : int
            Largest number of iterations.
        tol_score : float
            Stop when the score, in the local information and per root of entities, is below.
        tol_change : float
            and no parameter, of standardized columns, moved by more.
        progress
            As in :meth:`VFEMRegression.fit`.
        max_moved : float, optional
            Of between="free", which has sums by missing pattern: largest share of the entities in patterns
            that are too small, and count as missing at a site that has them; .05 by default.

        Returns
        -------
        VFEMGLMResults

        Raises
        ------
        ModelError
            An argument has no meaning here, or nobody is left to deal for two sites.
        EstimationError
            The response is not one of the family or constant; the entities do not determine the estimate,
            or columns separate the response.
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
        self._check_alpha(alpha)
        check_choice("cov_type", cov_type, ("observed", "robust", "none"))
        iteration = Iteration(
            masked,
            cross_products,
            sketch,
            sketch_size,
            memory=memory,
            tol_score=tol_score,
            tol_change=tol_change,
        )
        options, covariance = iteration._options(maxiter), self._covariance_options(cov_type, iteration)
        wanted = IterativeOptions(method, options, covariance, estimates_alpha=alpha is not None)
        check_share("max_moved", max_moved)
        if self._fits_jointly(method):
            if cov_type == "robust" or alpha is not None:
                what = "cov_type='robust'" if cov_type == "robust" else "alpha='ml'"
                raise ModelError(
                    f"{what} belongs to from_formula(..., between='independent') as yet; between='free' has "
                    "cov_type='observed' and a known alpha"
                )
            if cross_products != "secure":
                raise ModelError(
                    f"cross_products={cross_products!r} belongs to from_formula(..., between='independent'); "
                    "with between='free' they are secure"
                )
            least = max(self.partition.min_count, LEAST_PATTERN)
            wanted = replace(wanted, small=SmallPatterns(least, max_moved, INDEPENDENT_ALTERNATIVE))
        return run_fit(self, call, VFEMGLM._fit_by_iteration, wanted, VFEMGLMResults)

    def _linear(self) -> VFEMRegression:
        """Make the linear regression of the response on the same columns, without the offset.

        Tests of what is assumed of columns and missing patterns rest on its sums, whatever the response.
        """
        return VFEMRegression(
            self.formula, self.partition, missing=self._missing, coordinator=self.coordinator
        )

    def _check_alpha(self, alpha: str | None) -> None:
        if alpha is not None and (alpha != "ml" or self.distribution.alpha is None):
            raise ModelError(
                f"alpha: expected 'ml' with the family NegativeBinomial, received {alpha!r} with "
                f"{self.distribution}; a known alpha belongs to the family"
            )

    def _fits_jointly(self, method: VFEMMethod) -> bool:
        """Whether the law of all columns is estimated: with one block nothing is between two."""
        return self.between == "free" and method == "vfem" and len(self.design.blocks) > 1

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
            FAMILY, self._session, shared["at"], INDEPENDENT_ALTERNATIVE, layout.least
        )

        def make(narrowed: Layout, exchange: PatternExchange) -> JointIteration:
            return JointIteration(
                narrowed, wanted.options, self._session, report, **shared, exchange=exchange
            )

        return fit_joint(layout, wanted.small, conversation, make)


def check_robust(method: str, cov_type: str) -> None:
    """Refuse robust standard errors of filled-in rows, which are no entities."""
    if cov_type == "robust" and method == "impute":
        raise ModelError(
            "cov_type='robust': not with method='impute', whose standard errors ignore the imputation; use "
            "method='vfem'"
        )
