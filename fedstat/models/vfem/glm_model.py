"""The user's side of VFEM for other families than the normal: arguments in, results out."""

from __future__ import annotations

import copy
import sys
from typing import Any, ClassVar, Literal, Self, get_args, overload

from fedstat.errors import ModelError
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.partition.partition import ClientPartition
from fedstat.kernels.glm.family import Family, FamilySpec
from fedstat.models.checks import check_choice, check_positive, check_whole
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vfem.blocks.layout import make_layout
from fedstat.models.vfem.blocks.request import FAMILY
from fedstat.models.vfem.glm_explain import VFEMGLMPlan
from fedstat.models.vfem.glm_results import VFEMGLMResults
from fedstat.models.vfem.iteration.glm_distribution import kernel_of
from fedstat.models.vfem.iteration.glm_protocol import GLMAscent, GLMOptions
from fedstat.models.vfem.iteration.progress import Progress
from fedstat.models.vfem.moments.cross_products import CrossOptions, check_dealers
from fedstat.models.vfem.protocol import fit_glm
from fedstat.models.vfem.statements.glm_outcome import GLMOutcome
from fedstat.models.vfem.statements.outcome import warn_unless_converged

Method = Literal["vfem", "cc", "impute", "single"]
CovType = Literal["observed", "none"]
NORMAL = FamilySpec("Gaussian", "Identity")


class VFEMGLM(VerticalModel):
    """Generalised linear regression with client-wise missing blocks.

    The response is binary (logit or probit link) or a count (log link), with linear predictor beta0 +
    sum_k x_k'beta_k; blocks x_k ~ N(mu_k, Sigma_k) are independent of each other, as in
    :class:`fedstat.VFEMRegression`. What an entity lacks enters its likelihood through one normal
    variable, the sum of the missing linear predictors, so that the likelihood of what is observed is an
    integral over one dimension. Estimates maximise it, and are valid when missingness depends on observed
    values only (MAR). With nothing missing they are those of the generalised linear model.

    Make one with ``fedstat.VFEMRegression.from_formula(formula, partition, family=...)``.

    Parameters
    ----------
    formula : Formula
        A parsed formula.
    partition : ClientPartition
        In the vertical layout.
    family : statsmodels family
        ``Binomial()``, also with the probit link, or ``Poisson()``.
    **kwargs
        As in :meth:`from_formula`.

    Raises
    ------
    ModelError
        The formula leaves out the intercept, or the family is another one.
    """

    family: ClassVar[str] = FAMILY
    _plan = VFEMGLMPlan

    def __init__(self, formula: Formula, partition: Any, *, family: Family, **kwargs: Any) -> None:
        self.family_spec = FamilySpec.of(family)
        kernel_of(self.family_spec)
        if not formula.intercept:
            raise ModelError(f"'{formula.text}' leaves out the intercept; VFEM has one: drop '- 1' or '0 +'")
        super().__init__(formula, partition, **kwargs)

    def fit(
        self,
        *,
        method: Method = "vfem",
        cov_type: CovType = "observed",
        masked: bool = True,
        cross_products: Literal["secure", "sketch", "exact"] = "secure",
        sketch: Literal["structured", "gaussian"] = "structured",
        sketch_size: int = 20_000,
        memory: int = 12,
        maxiter: int = 200,
        tol_score: float = 1e-8,
        tol_change: float = 1e-6,
        progress: bool = False,
    ) -> VFEMGLMResults:
        """Maximise the likelihood of the observed data.

        Parameters
        ----------
        method : {"vfem", "cc", "impute", "single"}
            All entities; those that every client has; all, with the client's mean in the place of a
            missing block; or the columns of the response holder alone.
        cov_type : {"observed", "none"}
            Inverse observed information of all parameters, means and covariances included; or none.
        masked : bool
            Whether institutions hide their linear predictors, likelihoods and scores by pairwise masks;
            as in :meth:`fedstat.VFEMRegression.fit`.
        cross_products : {"secure", "sketch", "exact"}
            Where products of two clients' columns come from, which the covariance needs; as in
            :meth:`fedstat.VFEMRegression.fit`.
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
            and no parameter, of standardised columns, moved by more.
        progress : bool
            Print iteration, log-likelihood, score and the time left to standard error.

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
        """
        check_choice("method", method, get_args(Method))
        check_choice("cov_type", cov_type, get_args(CovType))
        check_choice("masked", masked, (True, False))
        check_choice("cross_products", cross_products, ("secure", "sketch", "exact"))
        check_choice("sketch", sketch, ("structured", "gaussian"))
        check_whole("sketch_size", sketch_size, 1)
        check_whole("memory", memory, 1)
        check_whole("maxiter", maxiter, 1)
        check_positive("tol_score", tol_score)
        check_positive("tol_change", tol_change)
        options = GLMOptions(memory, maxiter, tol_score, tol_change)
        layout = make_layout(self.design, self.partition.rows[self.design.active], method)
        ledger = copy.deepcopy(self._agreement)
        how = "none" if cov_type == "none" else cross_products
        cross = CrossOptions(how, sketch, sketch_size, ledger.at, self.partition.min_count)
        check_dealers(layout, cross)
        reporter = Progress(options, sys.stderr) if progress else None
        ascent = GLMAscent(layout, self.family_spec, options, self._session, reporter)
        hidden = masked and len(layout.clients) > 1
        names = {block.client: block.names for block in self.design.blocks}
        protocol = fit_glm(ascent, hidden, cross, cov_type, names)
        fit, covariance, fitted = self.engine.run(self.receipted(protocol, ledger), ledger)
        if reporter is not None:
            reporter.close()
        outcome = GLMOutcome(method, cov_type, hidden, options, fit, covariance, fitted)
        result = VFEMGLMResults.of(self, layout, outcome, ledger)
        warn_unless_converged(fit)
        return result


class AnyFamily(VerticalModel):
    """A model of a normal response, with :class:`VFEMGLM` in its place for the other families."""

    @overload
    @classmethod
    def from_formula(
        cls, formula: str, partition: ClientPartition, *, family: None = None, **options: Any
    ) -> Self: ...

    @overload
    @classmethod
    def from_formula(
        cls, formula: str, partition: ClientPartition, *, family: Family, **options: Any
    ) -> VFEMGLM: ...

    @classmethod
    def from_formula(
        cls, formula: str, partition: ClientPartition, *, family: Family | None = None, **options: Any
    ) -> Self | VFEMGLM:
        """Make a model from a formula.

        Parameters
        ----------
        formula : str
            ``response ~ terms``; ``.`` is every other column of every client. Allowed are ``+ - : * ^``,
            ``C()``, ``log``, ``exp``, ``sqrt``, ``scale``, ``center``, ``bs``, ``poly`` and ``Q()``.
        partition : ClientPartition
            In the vertical layout.
        family : statsmodels family, optional
            Of the response; normal by default. ``Binomial()``, with the logit or the probit link, and
            ``Poisson()`` make a :class:`VFEMGLM`.
        missing : {"raise", "drop"}
            Whether entities without a response are an error or are left out and counted.
        coordinator : str, optional
            The institution at which the coordinator sits, or ``"apart"`` for none of them. By default it
            sits at the one that holds the response, and apart where two institutions take part: a
            product of their columns needs random numbers from a third party that colludes with neither.

        Raises
        ------
        FormulaError
            The formula holds something that is not allowed, an unknown column, or a term that needs
            columns of two clients.
        DesignError
            The columns that it names cannot enter a model; see the message.
        ModelError
            The family is another one.
        """
        if family is None or FamilySpec.of(family) == NORMAL:
            return super().from_formula(formula, partition, **options)
        return VFEMGLM.from_formula(formula, partition, family=family, **options)
