"""The model: arguments of the analyst, and the fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, Self

from fedstat.docstrings import inherits_signature
from fedstat.errors import ConvergenceWarning, FormulaError, ModelError, Remedy, warn
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.design.vertical_design import MissingRule
from fedstat.federation.dry_run.execution import DryRunRecord
from fedstat.federation.dry_run.expected_releases import ExpectedReleases, IterationLoop
from fedstat.federation.dry_run.synthetic import coded_names
from fedstat.federation.partition.partition import ClientPartition
from fedstat.models import checks
from fedstat.models.explain import DryRunPlan
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.session import RULES_ON_ROWS
from fedstat.models.mixed.protocol import MixedNewton
from fedstat.models.mixed.results import MixedResults
from fedstat.models.mixed.steps import FAMILY, KINDS, MOST_NODES, kind_of
from fedstat.models.run import Call, FitAttempt, run_fit


class MixedPlan(DryRunPlan):
    """Facts about the fit of a mixed model before it is fitted."""

    def loops(self, dry_run: DryRunRecord) -> Sequence[IterationLoop]:
        """Name the evaluations of Newton's method."""
        return [IterationLoop(("sum_products", "sum_scores"), int(self.given["maxiter"]))]

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """State what is unknown."""
        yield RULES_ON_ROWS
        yield "How many groups there are, and how they are nested, is known to the sites alone."


class FederatedMixed(HorizontalModel):
    """Mixed model over sites that hold different rows, with random effects of groups inside sites.

    Groups are local: equal labels at two sites are two groups, which the summary counts at its top. So the
    likelihood is a product over sites.
    Each site integrates its own random effects, and the estimate is that of the pooled table: lme4's
    ``lmer``, ``glmer`` for binomial and Poisson responses, and glmmTMB for others. Make one with
    :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula with random effects.
    partition : ClientPartition
        In the horizontal layout.
    reml : bool
        Whether variances maximize the restricted likelihood; for normal responses.
    nagq : int
        Nodes of adaptive Gauss-Hermite quadrature, from 1 (Laplace's approximation) to 25; for other
        responses.
    **settings
        Those of :meth:`from_formula`.

    References
    ----------
    Bates, Maechler, Bolker and Walker, "Fitting linear mixed-effects models using lme4", Journal of
    Statistical Software 67 (2015).

    Notes
    -----
    ``glmer`` takes the expected curvature of negative binomial log-densities instead of the observed one. So
    its Laplace approximation differs slightly; with several nodes both are the integral. Its likelihood of
    gamma responses is a different one, and so are its variances.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_repeated(), by="hospital")
    >>> formula = "score ~ month * arm + (1 + month | patient) + (1 | hospital)"
    >>> model = fs.FederatedMixed.from_formula(formula, partition)
    >>> model.fit().params.round(1).to_dict()
    {'Intercept': 40.0, 'month': 0.5, 'arm[T.treated]': 1.1, 'month:arm[T.treated]': 0.6}
    """

    model_name: ClassVar[str] = "Federated mixed model"
    _goes_on = True
    _random = True
    _plan = MixedPlan
    _hints: ClassVar = dict.fromkeys(
        ("groups", "group", "random", "re_formula", "vc_formula"),
        "write random effects in the formula, as in 'y ~ x + (1 | patient)'",
    )
    """Arguments of other packages that the formula replaces."""

    @checks.takes_parsed
    def __init__(
        self,
        formula: Formula,
        partition: ClientPartition,
        *,
        reml: bool | None = None,
        nagq: int | None = None,
        family: Any = None,
        offset: str | None = None,
        exposure: str | None = None,
        var_weights: str | None = None,
        labels: Sequence[str] = (),
        complete: Sequence[str] = (),
        missing: MissingRule = "drop",
        subset: str | None = None,
    ) -> None:
        if not formula.random:
            raise FormulaError(
                "formula: a mixed model needs a random effect, as in 'y ~ x + (1 | patient)'",
                remedy=Remedy(
                    "FederatedGLM.from_formula(...).fit()", "without one use FederatedGLM or FederatedOLS"
                ),
            )
        self._groups = tuple(dict.fromkeys(name for term in formula.random for name in term.columns))
        super().__init__(
            formula,
            partition,
            family=family,
            offset=offset,
            exposure=exposure,
            var_weights=var_weights,
            labels=(*self._groups, *labels),
            complete=complete,
            missing=missing,
            subset=subset,
        )
        # Sites code each term by itself, and report its columns under these names.
        self._effects = coded_names(self.agreement).effects
        for term, names in zip(formula.random, self._effects, strict=True):
            if not names:
                raise FormulaError(f"formula: {term.text} has no column. Leave the term out")
        self._check_likelihood(reml, nagq)

    @classmethod
    @checks.checks_arguments
    @inherits_signature(__init__)
    def from_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula : str
            As in :meth:`HorizontalModel.from_formula`, with random effects ``(terms | group)``: an intercept
            of each group ``(1 | patient)``, with a slope ``(1 + month | patient)``, independent of it
            ``(1 + month || patient)``. Terms are coded as in R, by themselves: ``(0 + arm | group)`` has an
            effect of each arm. The group is a column, also that of the sites, or a combination ``a:b``;
            ``(1 | a/b)`` is ``(1 | a) + (1 | a:b)``. Groups of several terms are nested, and the response is
            then normal: for others nested effects have no closed form.
        partition : ClientPartition
            In the horizontal layout.
        reml : bool, optional
            Whether variances maximize the restricted likelihood, as they do by default for normal responses.
        nagq : int, optional
            Nodes of adaptive Gauss-Hermite quadrature for other responses: 1, the default, is Laplace's
            approximation; 2 to 25 are for a single random intercept or slope.
        family : statsmodels family, optional
            Gaussian, Binomial or Poisson with the canonical link; NegativeBinomial or Gamma with the log
            link. Alpha of the negative binomial is estimated, from that of the family on, and so is the scale
            of the gamma; errors of the coefficients account for this.
        offset, exposure : str, optional
            Columns; the logarithm of the exposure is an offset.
        var_weights : str, optional
            A column, for normal responses: residual variances are the variance over the weight.
        labels, complete : sequence of str, optional
            Further columns that the rows must have.
        missing : {"drop", "raise"}
            Rows that lack a value which the model reads are left out and counted, or an error.
        subset : str, optional
            Comparisons that hold for all rows that are used, as in ``"age >= 65 & sex == 'f'"``.

        Raises
        ------
        FormulaError
            The formula holds something that is not allowed, or has no random effect.
        ModelError
            There are no mixed models of this family, or not with so many nodes.
        PolicyError
            A site's owner does not allow it.

        Examples
        --------
        >>> import fedstat as fs, statsmodels.api as sm
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> model = fs.FederatedMixed.from_formula("num ~ age + (1 | hospital)", partition)
        >>> model.reml, model.formula.random[0].text
        (True, '(1 | hospital)')
        """
        return super().from_formula(formula, partition, **settings)

    def _check_likelihood(self, reml: bool | None, nagq: int | None) -> None:
        normal = self.distribution.least_squares
        if normal and nagq is not None:
            raise ModelError(
                "nagq: the likelihood of a linear mixed model needs no quadrature",
                remedy=Remedy("from_formula(..., nagq=None).fit()", "leave it out"),
            )
        if not normal and reml:
            raise ModelError(
                f"reml: there is no restricted likelihood for {self.distribution}",
                remedy=Remedy("from_formula(..., reml=None).fit()", "leave it out"),
            )
        if not normal and kind_of(self.distribution) is None:
            taken = ", ".join(f"{name}(link={link})" for name, link in KINDS)
            raise ModelError(
                f"family: a mixed model takes {taken} and Gaussian(link=Identity), received "
                f"{self.distribution}"
            )
        if not normal and "var_weights" in self.weights:
            raise ModelError("var_weights: only linear mixed models have them; use cbind(events, others)")
        if not normal and len({term.group for term in self.formula.random}) > 1:
            raise ModelError(
                "formula: random effects of several groups are for normal responses, where nested integrals "
                f"have a closed form; the family is {self.distribution}. Effects of the outer groups would "
                "make one integral with a dimension for each group inside them. Use a fixed effect for the "
                "outer groups, such as C(site)"
            )
        self.reml = normal if reml is None else bool(reml)
        self.nagq = 1 if nagq is None else nagq
        checks.check_integer("nagq", self.nagq, 1)
        scalar = sum(map(len, self._effects)) == 1
        if self.nagq > MOST_NODES or (self.nagq > 1 and not scalar):
            raise ModelError(
                f"nagq: expected 1 to {MOST_NODES} nodes, and more than 1 for a single random intercept or "
                f"slope only, received {self.nagq}"
            )

    @checks.checks_arguments
    def fit(
        self,
        *,
        cov_type: Literal["model", "robust"] = "model",
        maxiter: int = 100,
        tol: float = 1e-7,
        masked: bool | None = None,
        progress: bool | None = None,
    ) -> MixedResults:
        """Maximize the marginal likelihood.

        Parameters
        ----------
        cov_type : {"model", "robust"}
            Errors of the coefficients: those of the model, or from products of the scores of the outermost
            groups, which hold if a random slope is left out or variances differ. Scores are corrected for
            their leverage (Bell and McCaffrey 2002), and tests are Student's t with the effective number of
            groups.
        maxiter : int
            Most steps of Newton's method.
        tol : float
            Length of the last step, in standard errors.
        masked : bool, optional
            Whether pairwise masks hide each site's part of the sums; by default with at least three sites,
            and with two where an owner requires it.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        MixedResults

        Raises
        ------
        EstimationError
            There are as many groups as rows, fewer groups than effects, or columns are collinear.
        DesignError
            Groups of two terms cross at a site.
        PolicyError
            A site refuses, for instance because it has few groups.

        Warns
        -----
        ConvergenceWarning
            The iteration did not converge.
        """
        checks.check_choice("cov_type", cov_type, ("model", "robust"))
        checks.check_integer("maxiter", maxiter, 1)
        checks.check_positive("tol", tol)
        call = Call.of(self.fit, locals())

        def estimate(model: FederatedMixed, attempt: FitAttempt) -> MixedResults:
            session = model._open_session(
                FAMILY, checks.check_masked(masked, len(model.sites), model._masks_wanted)
            )
            newton = MixedNewton(session, model.formula.random, model.distribution, model.nagq, maxiter, tol)
            normal = model.distribution.least_squares
            fit = attempt.run(newton.normal(model.reml) if normal else newton.other(), session.masked_sites)
            if not fit.converged:
                warn(f"{model.model_name} did not converge after {len(fit.trace)} steps", ConvergenceWarning)
            return MixedResults._of(model, fit, attempt.ledger, cov_type)

        return run_fit(self, call, estimate)
