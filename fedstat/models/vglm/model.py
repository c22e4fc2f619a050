"""The user interface of a vertical generalized linear model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np
import statsmodels.genmod.families as sm_families

from fedstat.docstrings import inherits_params, inherits_signature
from fedstat.errors import ConvergenceWarning, ModelError, Remedy, warn
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.design.vertical_design import MissingRule
from fedstat.federation.disclosure.row_checks import MIN_ENTITIES_PER_EQUATION
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.kernels.glm.distributions import DistributionSpec, Family
from fedstat.kernels.penalized.path import Algorithm
from fedstat.kernels.penalized.penalties import Penalty
from fedstat.models.checks import (
    check_choice,
    check_integer,
    check_positive,
    check_share,
    checks_arguments,
    masks_rows,
    takes_parsed,
)
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.models.vertical.exchange.patterns import (
    MORE_MOVED,
    SmallPatterns,
    remember_patterns,
    reuse_patterns,
)
from fedstat.models.vertical.group_folds import GroupFolds, split_folds
from fedstat.models.vertical.joint_normal.assumption_tests import warn_of_dependence
from fedstat.models.vertical.joint_normal.edges import Between
from fedstat.models.vertical.model import VerticalModel, read_roles
from fedstat.models.vglm.distributions import POINTS, check_distribution
from fedstat.models.vglm.explain import VGLMPlan
from fedstat.models.vglm.notes import FREE_ALTERNATIVE
from fedstat.models.vglm.options import (
    FOLDS,
    ChoiceOptions,
    ExchangeOptions,
    FitPlan,
    Inference,
    check_steps,
    read_lambdas,
)
from fedstat.models.vglm.outcome import SelectionOutcome
from fedstat.models.vglm.path_setup import PathSetup, Select, make_groups, make_layout, warn_of_incomplete
from fedstat.models.vglm.protocol import FitRun, fit_blocks, fit_normal, fit_other
from fedstat.models.vglm.results import VerticalGLMResults
from fedstat.models.vglm.steps import FAMILY
from fedstat.typing import Floats

TOLERANCES = (1e-7, 1e-5)
"""Default tolerances of a fit, and of one by ADMM."""
MOST_FREE = 80
PRODUCTS = Remedy("fit(..., exchange='products')", "use {arguments}")
"""Limit of the columns whose covariances are estimated along a path: the information has millions of
entries."""


class VerticalGLM(VerticalModel):
    """Generalized linear regression on columns of several sites, with selection of columns.

    Minimizes half the mean deviance plus a penalty that selects columns (lasso, elastic net, SCAD, MCP) or
    shrinks their coefficients (ridge), over the entities that all sites have. Sites standardize their
    columns; coefficients are in the units of the data. The intercept is not penalized.

    For the normal family, every site releases sums of products once; products of two sites' columns come from
    secure multiplication. For the other families, Newton steps exchange sums of linear predictors, residuals,
    and a few weighted sums of products.

    Make one with :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula.
    partition : ClientPartition
        In the vertical layout.
    family : statsmodels family, optional
        ``Gaussian()``, ``Binomial()``, ``Poisson()``, ``Gamma()``, ``InverseGaussian()`` or
        ``NegativeBinomial(alpha=...)`` with the canonical link; the last three also with a log link, by
        Fisher scoring.
    penalty : {"scad", "mcp", "lasso", "elastic_net", "ridge"}
        "ridge" selects no columns: estimates of all columns are shrunken, and have no standard errors.
    a : float, optional
        Shape of SCAD (3.7 by default) and MCP (3).
    l1_ratio : float
        Share of the selecting part of the penalty; the rest is ridge.
    adaptive : float
        Power of the unpenalized coefficients by which the penalties are divided; 0: no adaptation.
    group_terms : bool
        Penalize the columns of a term (the levels of a factor) together.
    unpenalized : sequence of str
        Columns or terms without a penalty.
    missing : {"raise", "drop", "em"}
        Entities without a response are an error, or left out and counted. Both also leave out entities that a
        site lacks.
        "em" (normal family) uses them: the estimate is the limit of penalized EM under normal columns, valid
        if blocks are missing at random; entities without a response are left out.
    between : {"free", "independent"}, optional
        For missing="em": whether the covariance between columns of two sites is estimated, or they are
        independent, which biases estimates if they are correlated. The default is that of
        :class:`fedstat.VFEMRegression`. The time of "free" increases with the sixth power of the number of
        columns: seconds for twenty; the limit is eighty.
    offset, freq_weights, var_weights : str, optional
        Columns at the response's site, as those of :class:`fedstat.VFEMRegression`, for
        exchange="products". With weights, columns are standardized by their weighted moments, as in glmnet,
        and the loss is half the weighted mean deviance. Weights of variances are for the normal family and
        complete entities, without inference="split". For other families the coordinator receives the
        offset of every entity, and every site can compute it from residuals.
    coordinator
        See :meth:`from_formula`.

    Raises
    ------
    ModelError
        The formula leaves out the intercept, or an argument has no meaning here.

    References
    ----------
    Tang, Feng, Li and Wang, "Data privatization in vertical federated learning with client-wise missing
    problem", arXiv 2511.20876, section 4.
    Fan, J. and Li, R. (2001). Variable selection via nonconcave penalized likelihood and its oracle
    properties. Journal of the American Statistical Association 96, 1348-1360.
    Hoerl, A. and Kennard, R. (1970). Ridge regression: biased estimation for nonorthogonal problems.
    Technometrics 12, 55-67.
    Zou, H. and Li, R. (2008). One-step sparse estimates in nonconcave penalized likelihood models. Annals of
    Statistics 36, 1509-1533.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_selection(300, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> model = fs.VerticalGLM.from_formula("y ~ .", partition)
    >>> model.fit(n_lambdas=10).model_name
    'Vertical GLM'
    """

    family: ClassVar[str] = FAMILY
    _plan = VGLMPlan

    @takes_parsed
    def __init__(
        self,
        formula: Formula,
        partition: Any,
        *,
        family: Family | None = None,
        penalty: str = "scad",
        a: float | None = None,
        l1_ratio: float = 1.0,
        adaptive: float = 0.0,
        group_terms: bool = False,
        unpenalized: Sequence[str] = (),
        missing: MissingRule | Literal["em"] = "raise",
        between: Between | None = None,
        offset: str | None = None,
        freq_weights: str | None = None,
        var_weights: str | None = None,
        coordinator: str | None = None,
    ) -> None:
        if between is not None:
            check_choice("between", between, get_args(Between))
        self.between: Between | None = between
        self.distribution = DistributionSpec.of(sm_families.Gaussian() if family is None else family)
        check_distribution(self.distribution)
        if not formula.intercept:
            raise ModelError(
                f"'{formula.text}' leaves out the intercept, but VerticalGLM needs one: drop '- 1' or '0 +'"
            )
        if isinstance(unpenalized, str):
            raise ModelError(
                "unpenalized: expected a list, received a text",
                remedy=Remedy("from_formula(..., unpenalized=[{given!r}]).fit()", "write [{given!r}]").filled(
                    given=unpenalized
                ),
            )
        if adaptive and not adaptive > 0.0:
            raise ModelError(f"adaptive: expected a power of zero or more, received {adaptive!r}")
        self._em = missing == "em"
        if self._em and self.distribution.name != "Gaussian":
            raise ModelError(
                "missing='em' requires the normal family",
                remedy=Remedy(
                    "from_formula(..., missing='drop').fit()",
                    "with {family} use 'drop', or VFEMGLM, which has no selection",
                ).filled(family=self.distribution),
            )
        self._roles = read_roles(formula, partition, offset, freq_weights, var_weights)
        check_roles(self._roles, self.distribution, self._em)
        self.penalty = Penalty(penalty, a, l1_ratio)
        if penalty == "ridge" and (adaptive or group_terms):
            raise ModelError(
                "penalty='ridge' shrinks all columns alike",
                remedy=Remedy(
                    "from_formula(..., adaptive=0.0, group_terms=False).fit()",
                    ": leave adaptive and group_terms out",
                ),
            )
        self.adaptive, self.group_terms = float(adaptive), group_terms
        self.unpenalized = tuple(unpenalized)
        rule: MissingRule = "drop" if missing == "em" else missing
        super().__init__(formula, partition, missing=rule, coordinator=coordinator)
        layout = make_layout(
            self.design, (site.policy for site in partition.sites.values()), incomplete=self._em
        )
        layout = replace(layout, frequencies="freq_weights" in self._roles)
        self.layout = self._with_dealer(reuse_patterns(layout, partition, complete=not self._em))
        if self._em and between != "independent" and self.layout.p > MOST_FREE:
            raise ModelError(
                f"missing='em' with between='free' supports at most {MOST_FREE} columns; received "
                f"{self.layout.p}",
                remedy=Remedy(
                    "from_formula(..., between='independent').fit()",
                    "Leave columns out, or use {arguments}, which is biased if columns of two sites are "
                    "correlated",
                ),
            )
        self._groups = make_groups(self.layout, group_terms, self.unpenalized)
        warn_of_incomplete(self.layout)

    @classmethod
    @checks_arguments
    @inherits_params(VerticalModel.from_formula)
    @inherits_signature(__init__)
    def from_formula(cls, formula: str, partition: ClientPartition, **options: Any) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula, partition
            As in :meth:`VerticalModel.from_formula`.
        family, penalty, a, l1_ratio, adaptive, group_terms, unpenalized, missing, between
            See the class.
        offset, freq_weights, var_weights
            See the class.
        coordinator
            As in :meth:`VerticalModel.from_formula`.

        Raises
        ------
        FormulaError
            The formula contains something that is not allowed, an unknown column, or a term that needs
            columns of two sites.
        DesignError
            The columns that it names cannot be used; the message states why.
        ModelError
            See the class.

        Examples
        --------
        >>> import fedstat as fs
        >>> data = fs.datasets.make_blocks(200, seed=1)
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        >>> fs.VerticalGLM.from_formula("y ~ .", partition, missing="em").param_names[:3]
        ['Intercept', 'A1', 'A2']
        """
        return super().from_formula(formula, partition, **options)

    @checks_arguments
    def fit(
        self,
        *,
        select: Select | None = None,
        lam: float | None = None,
        lambdas: Sequence[float] | Floats | None = None,
        n_lambdas: int = 50,
        ratio: float = 1e-3,
        algorithm: Algorithm = "lla",
        steps: int | None = None,
        path: Literal["quadratic", "exact"] = "quadratic",
        exchange: Literal["products", "admm"] = "products",
        inference: Inference | None = None,
        splits: int = 1,
        maxiter: int = 1000,
        folds: int | str | tuple[str, int] = 5,
        draws: int = 0,
        seed: int | None = 0,
        masked: bool | None = None,
        tol: float | None = None,
        max_moved: float | None = None,
        progress: bool | None = None,
    ) -> VerticalGLMResults:
        """Fit a path of penalized models, choose one, and refit on the columns that it selects.

        Parameters
        ----------
        select : {"bic", "ebic", "aic", "cv", "1se"}, optional
            Criterion for the choice: an information criterion, or cross-validation. By default "bic", and
            "cv" with fewer than two entities for each column, since information criteria then prefer fits
            without residuals. Among equal fits, the one
            with the largest lambda. "1se" chooses the largest lambda whose cross-validated error is at most
            one standard error above the smallest (Breiman et al. 1984). Degrees of freedom are the
            nonzero coefficients; for ridge and the elastic net, the trace of the hat matrix of these (Zou,
            Hastie and Tibshirani 2007). An estimated dispersion is that of
            maximum likelihood at every fit. Cross-validation is exact for the normal family. For the
            others, it uses quadratic models of every fold's deviance at the chosen fit, which are accurate
            there and rough at distant lambdas.
        lam : float, optional
            A single lambda instead; 0 is the model without a penalty, with full inference. For the gamma and
            inverse normal families, it is in the unit of the linear predictor in which the weight of an
            entity at the mean response is one, so that no fit depends on the unit of the response.
        lambdas : sequence of float, optional
            The path; the default is a geometric grid of `n_lambdas` from the lambda at which all coefficients
            are zero to `ratio` times that. For ridge it begins where at most 1 % of any coefficient is left,
            and ends at `ratio` times the mean curvature of the loss.
        n_lambdas, ratio : int, float
            See above.
        algorithm : {"lla", "descent"}
            For SCAD and MCP: local linear approximation from the lasso of the same lambda, or along the path
            of stationary points.
        steps : int, optional
            For SCAD and MCP with algorithm="lla": take this many approximations from the unpenalized estimate
            (the one-step estimator of Zou and Li 2008 and those after it), instead of all from the lasso to a
            fixed point. Each is a weighted lasso, which has a unique solution; it finds small effects that
            the lasso itself leaves out. The entities must determine the unpenalized estimate, and the path
            begins at a larger lambda, where the first approximation selects nothing.
        path : {"quadratic", "exact"}
            For families other than the normal one: whether fits are solved only at a few lambdas that lead to
            the chosen one, and a quadratic model of the loss proposes the others (``status`` of
            :attr:`VerticalGLMResults.path`), or at all lambdas. Every solved fit takes several rounds of
            linear predictors, and about as many rounds as there are columns reveal the rows.
        exchange : {"products", "admm"}
            What is exchanged. "products": as described for the class. "admm": in every round the masked
            linear predictors of the sites' own penalized least squares, for any family; coefficients reach
            the coordinator only at the end of each lambda. It takes hundreds of rounds.
        inference : {"debiased", "conditional", "split"}, optional
            "debiased": the summary prints estimates and intervals of ALL columns that do not depend on the
            selection (:attr:`VerticalGLMResults.debiased`; van de Geer et al. 2014). "conditional": naive
            intervals of the selected columns, which ignore the selection. "split": a random half of the
            entities selects, the other half estimates; its intervals are those of the model with the selected
            columns. The default is "debiased" where it needs no further release: for the normal family with
            exchange="products", unless missing="em" or nothing is penalized. Elsewhere the default is
            "conditional", with a banner; "debiased" then takes more linear predictors.
        splits : int
            For inference="split" and the normal family: with more than one, selection and tests are repeated
            in that many random halves of the folds, for one p-value of each column
            (:meth:`VerticalGLMResults.selection_report`, ``split_p``; 6 folds or more).
        maxiter : int
            For exchange="admm": largest number of rounds for one lasso.
        folds : int, column or (column, int)
            Number of random parts of the entities whose sums are released separately, for select="cv"
            or "1se" and `draws`. With the name of a column of a site, such as "person", entities with the
            same value are in one fold; five folds, or as many as in ``("person", 3)``. That site then reveals
            the fold of each entity.
        draws : int
            Pairs of random halves of the folds, in each of which the path is fitted again, for selection
            frequencies (6 folds or more); for families other than the normal one by quadratic models, as in
            cross-validation.
        seed : int or None
            Seed of folds and halves; None draws one.
        masked : bool, optional
            Whether linear predictors of the other families are added up under pairwise masks, which hide a
            site's part of one step, but not of many; see the notes of the summary. Masks are the default
            with two sites as well, because they hide row-level values from the coordinator.
        tol : float, optional
            Largest violation of the stationarity conditions, as a share of the lasso's largest lambda, of
            every solved fit: 1e-7 by default. With exchange="admm", the tolerance of primal and dual
            residual, absolute and relative: 1e-5 by default; with 1e-3, the second digit is inaccurate.
        max_moved : float, optional
            For missing="em": largest share of the entities in missing patterns that are too small to be
            released. These entities count as missing at a site that has them. The default is .05, or any
            share if a policy counts the bits that sums reveal about columns of few values.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        VerticalGLMResults

        Raises
        ------
        ModelError
            An argument has no meaning here, or no third party can deal for two sites.
        EstimationError
            Too few entities for the folds, or columns do not determine an estimate.
        PolicyError
            A site refuses a release.

        Warns
        -----
        ConvergenceWarning
            A fit of the path is not a stationary point.
        AssumptionWarning
            For missing="em" and between="independent": blocks of two sites are correlated, which biases the
            estimates.
        """
        call = Call.of(self.fit, locals())
        normal = self.distribution.name == "Gaussian" and exchange == "products"
        given = read_lambdas(lam, lambdas)
        if lam is not None and select is not None:
            raise ModelError(
                "lam, select: one lambda leaves nothing to choose",
                remedy=Remedy("fit(..., select=None)", "leave select out, or give lambdas="),
            )
        if select is None:
            few = self.layout.n < MIN_ENTITIES_PER_EQUATION * (self.layout.p + 1)
            select = "cv" if few and given is None and exchange == "products" and not self._em else "bic"
        if inference is None:
            # The sums of the normal family determine debiased estimates: nothing else is released for them.
            penalized = self._groups.penalized.any() and (given is None or given.any())
            debias = normal and penalized and not self._em and self.penalty.selecting > 0.0
            inference = "debiased" if debias else "conditional"
        parts, by = split_folds(folds, FOLDS)
        choice = ChoiceOptions(select, inference, folds=parts, draws=draws, splits=splits, by=by)
        limit = TOLERANCES[exchange == "admm"] if tol is None else tol
        check_positive("tol", limit)
        passing = ExchangeOptions(exchange, path, use_masks=masks_rows(masked), tol=limit, maxiter=maxiter)
        check_choice("algorithm", algorithm, get_args(Algorithm))
        check_steps(steps, self.penalty, algorithm, exchange)
        check_integer("n_lambdas", n_lambdas, 2)
        check_share("max_moved", max_moved)
        self._check_together(choice, passing, normal)
        choice.check_folds(given)
        setup = PathSetup(
            penalty=self.penalty,
            groups=self._groups,
            adaptive=self.adaptive,
            lambdas=given,
            size=n_lambdas,
            ratio=ratio,
            algorithm=algorithm,
            tol=TOLERANCES[0] if exchange == "admm" else limit,
            steps=steps,
        )
        plan = self._fit_plan(choice, passing, setup, max_moved, np.random.default_rng(seed))
        plan = replace(plan, groups=GroupFolds.of(by, self.partition, self._session, seed))
        fit = fit_blocks if self._em else fit_normal if normal else fit_other
        return run_fit(self, call, VerticalGLM._estimate, fit, plan)

    def _fit_plan(
        self,
        choice: ChoiceOptions,
        passing: ExchangeOptions,
        setup: PathSetup,
        max_moved: float | None,
        random: np.random.Generator,
    ) -> FitPlan:
        """Combine options and the agreement with the sites."""
        return FitPlan(
            layout=self.layout,
            distribution=self.distribution,
            product_session=SecureProductSession(
                FAMILY, self._session, self._agreement.at, least=self.layout.least
            ),
            small=SmallPatterns(self.partition.min_count, max_moved, MORE_MOVED, self.layout.each),
            # Without a penalty, there is nothing that first estimates could divide, or steps linearize.
            setup=replace(setup, adaptive=0.0, steps=None) if setup.unpenalized else setup,
            choice=choice,
            # One site's linear predictor is the sum itself: masks cannot hide it.
            passing=replace(passing, use_masks=passing.use_masks and len(self.layout.sites) > 1),
            random=random,
            between=self.between,
            opened=self._opened_in_fit(),
        )

    def _opened_in_fit(self) -> tuple[str, ...]:
        """Return the values of entities that a fit requests."""
        # The site subtracts the offset from a normal response.
        normal = self.distribution.name == "Gaussian"
        return tuple(name for name in self._role_columns() if name != "offset" or not normal)

    def _estimate(
        self, attempt: FitAttempt, fit: Callable[[FitPlan, FitRun], SelectionOutcome], plan: FitPlan
    ) -> VerticalGLMResults:
        outcome = fit(plan, attempt.run)
        if outcome.observed is not None:
            exchange = outcome.observed.exchange
            remember_patterns(plan.layout, self.partition, exchange.plan, exchange.released, exchange.columns)
            if self.between == "independent":
                assumed = "missing='em' assumes independent blocks"
                warn_of_dependence(exchange.moments, assumed, f"{FREE_ALTERNATIVE}.")
        result = VerticalGLMResults._of(self, outcome, attempt.ledger, sources=())
        warn_unless_converged(outcome)
        return result

    def _check_together(self, choice: ChoiceOptions, passing: ExchangeOptions, normal: bool) -> None:
        """Refuse options that have no meaning together; `normal`: sums of products determine all fits."""
        if self._em and (not normal or choice.divides):
            raise ModelError(
                "missing='em' requires exchange='products', select='bic', 'ebic' or 'aic' and "
                "inference='conditional', because sums by missing pattern are not also released by fold. "
                "Leave exchange, inference, select='cv' or '1se' and draws out",
                remedy=Remedy("from_formula(..., missing='drop').fit(...)", ", or use {arguments}"),
            )
        if self._roles and passing.exchange == "admm":
            raise ModelError(f"{', '.join(self._roles)}: exchange='admm' has none", remedy=PRODUCTS)
        if "var_weights" in self._roles and choice.split:
            raise ModelError(
                "var_weights: inference='split' has none, because the weights of a half have another mean",
                remedy=Remedy("fit(..., inference='debiased')", "leave {arguments}"),
            )
        ridge = not self.penalty.selecting
        if ridge and passing.exchange == "admm":
            raise ModelError("penalty='ridge' has no exchange='admm'", remedy=PRODUCTS)
        if ridge and (choice.draws or choice.inference != "conditional"):
            raise ModelError(
                "penalty='ridge' selects no columns",
                remedy=Remedy(
                    "from_formula(..., penalty='lasso').fit(...)",
                    ": leave draws and inference out, or use {arguments}",
                ),
            )
        canonical = self.distribution.name in POINTS and self.distribution.canonical
        if passing.exchange == "admm" and not canonical:
            raise ModelError(
                f"exchange='admm' supports the families {', '.join(POINTS)}, received {self.distribution}",
                remedy=PRODUCTS,
            )
        if passing.exchange == "admm" and choice.divides:
            raise ModelError(
                "select='cv' or '1se', draws and inference='debiased' or 'split' need sums by fold or "
                "half, which exchange='admm' does not release",
                remedy=PRODUCTS,
            )
        if choice.by and choice.split and not normal:
            raise ModelError(
                "folds: expected a number; with inference='split' the halves are random, so that no groups "
                "stay together, unless the normal family has exchange='products'"
            )
        if choice.splits > 1 and (not normal or not choice.split or choice.cross_validates):
            raise ModelError(
                "splits: more than one requires inference='split', the normal family with "
                "exchange='products', and select='bic', 'ebic' or 'aic'"
            )


def check_roles(roles: Mapping[str, str], distribution: DistributionSpec, em: bool) -> None:
    """Refuse weights and offset where a fit has none."""
    if distribution.name != "Gaussian" and "var_weights" in roles:
        raise ModelError(
            f"var_weights: only the normal family has them, received {distribution}; use freq_weights if a "
            "row represents several entities"
        )
    if "var_weights" in roles and em:
        raise ModelError(
            "var_weights: if entities lack blocks, the likelihood is not a function of weighted sums",
            remedy=Remedy(
                "from_formula(..., missing='drop').fit()",
                "Use {arguments}, or freq_weights if a row represents several entities",
            ),
        )


def warn_unless_converged(outcome: SelectionOutcome) -> None:
    """Warn of fits that are not stationary points."""
    path, tol = outcome.fitted.path, outcome.plan.setup.tol
    wrong = int((path.solved & ~path.converged).sum())
    if wrong:
        warn(
            f"{wrong} of the {path.solved.sum()} solved fits of the path did not converge (largest "
            f"violation {np.nanmax(path.kkt):.1e} of lambda_max, tolerance {tol:.0e}); see .path",
            ConvergenceWarning,
        )
