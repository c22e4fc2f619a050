"""The user interface of VFEM for a response that is not normal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args

from fedstat.errors import ModelError
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.kernels.glm.distributions import DistributionSpec, Family
from fedstat.models.checks import check_choice, check_share
from fedstat.models.vertical.exchange.patterns import PatternExchange, SmallPatterns
from fedstat.models.vertical.joint_normal.sparse_pairs import Between
from fedstat.models.vertical.layout import Layout
from fedstat.models.vfem.base_model import CrossSource, IterativeOptions, SketchKind, VFEMMethod, VFEMModel
from fedstat.models.vfem.explain import VFEMGLMPlan
from fedstat.models.vfem.iteration.distributions import kernel_of
from fedstat.models.vfem.iteration.glm_protocol import QuasiNewtonIteration
from fedstat.models.vfem.iteration.messages import FAMILY
from fedstat.models.vfem.iteration.state import IterationOptions, Progress
from fedstat.models.vfem.joint_protocol import LEAST_PATTERN, JointIteration
from fedstat.models.vfem.outcome import warn_unless_converged
from fedstat.models.vfem.protocol import IterativeResult, fit_glm, fit_joint
from fedstat.models.vfem.results import VFEMGLMResults
from fedstat.progress_line import shows_progress

INDEPENDENT_ALTERNATIVE = (
    ", or from_formula(..., between='independent'), which has no sums by missing pattern"
)
"""What there is where too many entities are in patterns that are too small, or nobody can deal."""


class VFEMGLM(VFEMModel):
    """Generalised linear regression where blocks of whole institutions are missing.

    The response is binary (logit or probit link) or a count (log link; Poisson or negative binomial),
    with linear predictor beta0 + sum_k x_k'beta_k; columns are jointly normal, with a covariance that is free
    between institutions (``between="free"``) or zero (``"independent"``), as in
    :class:`fedstat.VFEMRegression`. What an entity lacks enters its likelihood through one normal variable,
    the sum of the missing linear predictors, so that the likelihood of what is observed is an integral over
    one dimension. Estimates maximise the joint likelihood of response and columns in all parameters, those of
    the law of the columns included, and are valid when missingness depends on observed values only (MAR),
    those of the response included. With nothing missing they are those of the generalised linear model.

    Make one with ``fedstat.VFEMRegression.from_formula(formula, partition, family=...)``.

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
    >>> model = fs.VFEMRegression.from_formula("RISK ~ PL1 + CA1", partition, family=binomial)
    >>> type(model).__name__
    'VFEMGLM'
    """

    _plan = VFEMGLMPlan
    linear: Callable[[], VFEMModel] | None = None
    """Makes the linear regression of the response on the same columns."""

    def __init__(
        self, formula: Formula, partition: Any, *, family: Family, between: Between = "free", **kwargs: Any
    ) -> None:
        check_choice("between", between, get_args(Between))
        self.between: Between = between
        self.distribution = DistributionSpec.of(family)
        kernel_of(self.distribution)
        weights = [name for name in ("freq_weights", "var_weights") if kwargs.get(name) is not None]
        if weights:
            raise ModelError(
                f"{weights[0]}: weights belong to the normal response as yet; write an entity that stands "
                "for several as several, or use FederatedGLM where institutions hold whole rows"
            )
        super().__init__(formula, partition, **kwargs)

    @shows_progress
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
        """Maximise the likelihood of the observed data.

        Parameters
        ----------
        method : {"vfem", "cc", "impute", "single"}
            All entities; those that every institution has; all, with the institution's mean in the place of a
            missing block; or the columns of the response holder alone.
        cov_type : {"observed", "robust", "none"}
            Inverse observed information of all parameters, means and covariances included; the sandwich of
            Huber and White with these in its outer parts (statsmodels: HC0), which needs no normal columns
            and no variance as the family has it, as long as the estimates are consistent without; or none.
            The sandwich belongs to between="independent".
        alpha : "ml", optional
            Estimate the alpha of the family NegativeBinomial by maximum likelihood, from the one given; all
            standard errors account for it. By default it is known. It belongs to between="independent".
        masked : bool
            Whether institutions hide their linear predictors, likelihoods and scores by pairwise masks;
            as in :meth:`fedstat.VFEMRegression.fit`.
        cross_products : {"secure", "sketch", "exact"}
            Of between="independent": where products of two institutions' columns come from, which the
            covariance needs; as in :meth:`fedstat.VFEMRegression.fit`. With between="free" they are secure.
        sketch : {"structured", "gaussian"}
            Kind of projection.
        sketch_size : int
            Its rows; the relative error of a product is about sqrt(2 / rows).
        memory : int
            Earlier steps that shape the next one.
        maxiter : int
            Largest number of iterations.
        tol_score : float
            Stop when the score, in the local information and per root of entities, is below.
        tol_change : float
            and no parameter, of standardised columns, moved by more.
        progress : bool
            Print iteration, log-likelihood, score and the time left to standard error.
        max_moved : float, optional
            Of between="free", which has sums by missing pattern: largest share of the entities in patterns
            that are too small, and count as missing at an institution that has them; .05 by default.

        Returns
        -------
        VFEMGLMResults

        Raises
        ------
        ModelError
            An argument has no meaning here, or nobody is left to deal for two institutions.
        EstimationError
            The response is not one of the family or constant; the entities do not determine the estimate,
            or columns separate the response.
        PolicyError
            An institution refuses a release.

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
        >>> model = fs.VFEMRegression.from_formula("RISK ~ PL1 + CA1", partition, family=binomial)
        >>> model.fit(cov_type="none").converged
        True
        """
        check_choice("method", method, get_args(VFEMMethod))
        check_robust(method, cov_type)
        self._check_alpha(alpha)
        check_choice("cov_type", cov_type, ("observed", "robust", "none"))
        options = IterationOptions(
            memory=memory, maxiter=maxiter, tol_score=tol_score, tol_change=tol_change, masked=masked
        )
        covariance = self._covariance_options(cov_type, cross_products, sketch, sketch_size)
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
        result = self._fit_by_iteration(wanted, VFEMGLMResults)
        warn_unless_converged(result._fit)
        return result

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
        conversation = SecureProductSession(FAMILY, self._session, shared["at"], INDEPENDENT_ALTERNATIVE)

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
