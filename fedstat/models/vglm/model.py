"""The user's side of a vertical generalised linear model: arguments in, results out."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import statsmodels.genmod.families as sm_families

from fedstat.errors import ConvergenceWarning, ModelError
from fedstat.federation.disclosure import ENTITIES_PER_EQUATION
from fedstat.federation.engine import Rounds
from fedstat.federation.formula import Formula
from fedstat.federation.ledger import Ledger
from fedstat.kernels.glm_family import Family, FamilySpec
from fedstat.kernels.penalised_path import Algorithm
from fedstat.kernels.penalties import Penalty
from fedstat.models.base import VerticalModel
from fedstat.models.checks import check_choice, check_positive, check_whole
from fedstat.models.vglm.admm import admm_path
from fedstat.models.vglm.climb import Study
from fedstat.models.vglm.gram import FAMILY, Grams, exchange_grams, stage
from fedstat.models.vglm.layout import deal_folds, make_layout, warn_of_incomplete
from fedstat.models.vglm.outcome import Outcome
from fedstat.models.vglm.path import (
    Criteria,
    Path,
    Select,
    Setup,
    choose,
    cross_validate,
    make_groups,
    normal_path,
    normal_refit,
    score_path,
    stability,
)
from fedstat.models.vglm.protocol import Fitted, fit_path
from fedstat.models.vglm.response_steps import LINKS
from fedstat.models.vglm.results import VerticalGLMResults
from fedstat.typing import Floats

FEWEST_FOLDS_OF_STABILITY = 6


class VerticalGLM(VerticalModel):
    """Generalised linear regression on columns of several institutions, with selection of columns.

    Minimises half the mean deviance plus a penalty that selects (lasso, elastic net, SCAD, MCP), over
    the entities that all institutions have. Columns are standardised where they are held; coefficients come
    back in the units of the data. The intercept is not penalised.

    For the normal family every institution releases sums of products once; products of two institutions'
    columns come from secure multiplication. For the binomial and Poisson families, with their canonical
    links, Newton steps exchange masked linear predictors, residuals, and a few weighted sums of products.

    Make one with :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula.
    partition : ClientPartition
        In the vertical layout.
    family : statsmodels family, optional
        ``Gaussian()``, ``Binomial()`` or ``Poisson()``, with the canonical link.
    penalty : {"scad", "mcp", "lasso", "elastic_net"}
    a : float, optional
        Shape of SCAD (3.7 by default) and MCP (3).
    alpha : float
        Share of the selecting part of the penalty, the rest being ridge.
    adaptive : float
        Power of the coefficients of the unpenalised fit by which the penalties are divided; 0: not at all.
    group_terms : bool
        Penalise the columns of a term (the levels of a factor) together.
    unpenalised : sequence of str
        Columns or terms without a penalty.
    **kwargs
        ``missing`` and ``coordinator``, as in :meth:`from_formula`.

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
    """

    family: ClassVar[str] = FAMILY

    def __init__(
        self,
        formula: Formula,
        partition: Any,
        *,
        family: Family | None = None,
        penalty: str = "scad",
        a: float | None = None,
        alpha: float = 1.0,
        adaptive: float = 0.0,
        group_terms: bool = False,
        unpenalised: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        self.family_spec = FamilySpec.of(sm_families.Gaussian() if family is None else family)
        if LINKS.get(self.family_spec.name) != self.family_spec.link:
            listed = ", ".join(f"{name} ({link})" for name, link in LINKS.items())
            raise ModelError(f"family: expected one of {listed}; received {self.family_spec}")
        if not formula.intercept:
            raise ModelError(
                f"'{formula.text}' leaves out the intercept; VerticalGLM centres the columns and has one: "
                "drop '- 1' or '0 +'"
            )
        if isinstance(unpenalised, str):
            raise ModelError(f"unpenalised: expected a list, received a text; write [{unpenalised!r}]")
        if adaptive and not adaptive > 0.0:
            raise ModelError(f"adaptive: expected a power of zero or more, received {adaptive!r}")
        self.penalty = Penalty(penalty, a, alpha)
        self.adaptive, self.group_terms = float(adaptive), group_terms
        self.unpenalised = tuple(unpenalised)
        super().__init__(formula, partition, **kwargs)
        self.layout = make_layout(self.design)
        self._groups = make_groups(self.layout, group_terms, self.unpenalised)
        warn_of_incomplete(self.layout)

    def fit(
        self,
        *,
        select: Select = "bic",
        lam: float | None = None,
        lambdas: Sequence[float] | Floats | None = None,
        n_lambdas: int = 50,
        ratio: float = 1e-3,
        algorithm: Algorithm = "lla",
        path: Literal["quadratic", "exact"] = "quadratic",
        exchange: Literal["products", "admm"] = "products",
        eps: float = 1e-5,
        maxiter: int = 1000,
        folds: int = 5,
        draws: int = 0,
        random_state: int | None = None,
        masked: bool = True,
        tol: float = 1e-7,
    ) -> VerticalGLMResults:
        """Fit a path of penalised models, choose one, and refit on the columns that it selects.

        Parameters
        ----------
        select : {"bic", "ebic", "aic", "cv"}
            What chooses: an information criterion, or cross-validation (normal family). Degrees of freedom
            are the coefficients that are not zero, which for an elastic net is more than it spends.
        lam : float, optional
            One lambda instead; 0 is the model without a penalty, with full inference.
        lambdas : sequence of float, optional
            The path; by default a geometric grid of `n_lambdas` from the lambda at which all coefficients are
            zero to `ratio` times that.
        n_lambdas, ratio : int, float
            See above.
        algorithm : {"lla", "descent"}
            To SCAD and MCP: local linear approximation from the lasso of the same lambda, or along the path
            of stationary points.
        path : {"quadratic", "exact"}
            Of the binomial and Poisson families: whether fits at other lambdas than the chosen one are those
            of a quadratic model of the loss at the chosen one, or exact. Every exact fit takes some rounds
            of linear predictors, and about as many of these as there are columns tell of the rows.
        exchange : {"products", "admm"}
            What passes. "products": as the class says. "admm": in every round the masked linear predictors
            of the institutions' own penalised least squares, any family; coefficients reach the coordinator
            at the end of each lambda only. It takes hundreds of rounds.
        eps : float
            Of exchange="admm": tolerance of primal and dual residual, absolute and relative; 1e-3
            leaves an error in the second digit.
        maxiter : int
            Of exchange="admm": rounds at most, for one lasso.
        folds : int
            Parts at random of the entities, of which sums are released separately, for select="cv" and
            `draws`.
        draws : int
            Pairs of random halves of the folds, in each of which the path is fitted anew, for selection
            frequencies (normal family; 6 folds or more).
        random_state : int, optional
            Of folds and halves.
        masked : bool
            Whether linear predictors of the other families are added up under pairwise masks. The sums of
            all steps together still tell of the rows; see the notes of the summary.
        tol : float
            Largest violation of the stationarity conditions, as a share of the largest lambda.

        Returns
        -------
        VerticalGLMResults

        Raises
        ------
        ModelError
            An argument has no meaning here, or nobody is left to deal for two institutions.
        EstimationError
            Too few entities for the folds, or columns do not determine an estimate.
        PolicyError
            An institution refuses a release.

        Warns
        -----
        ConvergenceWarning
            A fit of the path is no stationary point.
        """
        check_choice("select", select, get_args(Select))
        check_choice("algorithm", algorithm, get_args(Algorithm))
        check_choice("path", path, ("quadratic", "exact"))
        check_choice("exchange", exchange, ("products", "admm"))
        check_positive("eps", eps)
        check_whole("maxiter", maxiter, 1)
        check_choice("masked", masked, (True, False))
        check_whole("folds", folds, 2)
        check_whole("draws", draws, 0)
        check_whole("n_lambdas", n_lambdas, 2)
        check_positive("tol", tol)
        normal = self.family_spec.name == "Gaussian" and exchange == "products"
        if exchange == "admm" and (self.adaptive or self.unpenalised):
            raise ModelError("exchange='admm': adaptive and unpenalised belong to exchange='products'")
        if not normal and (select == "cv" or draws):
            raise ModelError(
                f"select='cv' and draws need sums by fold, which only the normal family "
                f"with exchange='products' has; use 'bic', 'ebic' or 'aic' with {self.family_spec}"
            )
        if draws and folds < FEWEST_FOLDS_OF_STABILITY:
            raise ModelError(f"draws: expected {FEWEST_FOLDS_OF_STABILITY} folds or more, received {folds}")
        setup = Setup(
            self.penalty,
            self._groups,
            self.adaptive,
            read_lambdas(lam, lambdas),
            n_lambdas,
            ratio,
            algorithm,
            tol,
        )
        if setup.unpenalised:
            setup = replace(setup, adaptive=0.0)
        ledger = copy.deepcopy(self._agreement)
        random = np.random.default_rng(random_state)
        if normal:
            outcome = self._fit_normal(setup, select, folds, draws, random, ledger)
        else:
            outcome = self._fit_other(setup, select, masked, (path, exchange, eps, maxiter), ledger)
        result = VerticalGLMResults.of(self, outcome, ledger)
        warn_unless_converged(outcome)
        return result

    def _fit_normal(
        self,
        setup: Setup,
        select: Select,
        folds: int,
        draws: int,
        random: np.random.Generator,
        ledger: Ledger,
    ) -> Outcome:
        layout, parts = self.layout, folds if select == "cv" or draws else 1
        least = max(self.partition.min_count, ENTITIES_PER_EQUATION * (layout.p + 1))
        code = deal_folds(layout.n, parts, least, random)

        def protocol() -> Rounds[Grams]:
            units = yield from stage(layout, self.family_spec, self._session)
            return (yield from exchange_grams(layout, units, code, parts, self._session, ledger.at))

        grams = self.engine.run(self.receipted(protocol(), ledger), ledger)
        S, units = grams.total(), grams.units
        path = normal_path(S, units, setup)
        criteria = score_path(path, layout.n, normal=True)
        if select == "cv":
            cv, cv_se = cross_validate(grams.products, units, setup, path)
            criteria = replace(criteria, cv=cv, cv_se=cv_se)
        chosen = choose(criteria, select)
        support = np.ones(layout.p, dtype=bool) if setup.unpenalised else path.selected[chosen]
        refit = normal_refit(S, units, support, layout.names)
        null = layout.n / -2.0 * (np.log(2.0 * np.pi * units.sd**2) + 1.0)
        halves = stability(grams.products, units, setup, path, draws, random) if draws else None
        fitted = Fitted(path, chosen, refit, 0, 0, grams.dealers)
        return Outcome(fitted, criteria, select, setup, float(null), units, parts, False, halves)

    def _fit_other(
        self, setup: Setup, select: Select, masked: bool, how: tuple[str, str, float, int], ledger: Ledger
    ) -> Outcome:
        layout, normal = self.layout, self.family_spec.name == "Gaussian"
        hidden = masked and len(layout.clients) > 1
        left = max(layout.most_grams - 1, 1)
        study = Study(layout, self._session, ledger.at, hidden, np.eye(layout.p), left)
        scored: list[Criteria] = []

        def pick(path: Path) -> int:
            scored.append(score_path(path, layout.n, normal=normal))
            return choose(scored[-1], select)

        path, exchange, eps, maxiter = how
        if exchange == "admm":
            protocol = admm_path(study, self.family_spec, setup, pick, eps, maxiter)
        else:
            protocol = fit_path(study, self.family_spec, setup, pick, exact=path == "exact")
        fitted, units, first = self.engine.run(self.receipted(protocol, ledger), ledger)
        null = layout.n * (units.constant - first)
        if normal:
            null = -layout.n / 2.0 * (np.log(4.0 * np.pi * first) + 1.0)
        return Outcome(fitted, scored[-1], select, setup, null, units, 1, hidden, None, normal, exchange)


def read_lambdas(lam: float | None, lambdas: Sequence[float] | Floats | None) -> Floats | None:
    """Return the lambdas that were given, largest first; None for none.

    Raises
    ------
    ModelError
        They are not numbers of zero or more, or both arguments were given.
    """
    if lam is None and lambdas is None:
        return None
    if lam is not None and lambdas is not None:
        raise ModelError("lam, lambdas: give one of them")
    try:
        values = np.atleast_1d(np.asarray(lambdas if lam is None else lam, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise ModelError("lam, lambdas: expected numbers") from error
    if values.ndim != 1 or not len(values) or not (np.isfinite(values) & (values >= 0.0)).all():
        raise ModelError("lam, lambdas: expected finite numbers of zero or more")
    return np.unique(values)[::-1].copy()


def warn_unless_converged(outcome: Outcome) -> None:
    """Warn of fits that are no stationary points."""
    path = outcome.fitted.path
    wrong = int((~path.converged).sum())
    if wrong:
        warnings.warn(
            f"{wrong} of the {len(path.lambdas)} fits of the path did not converge (largest violation "
            f"{np.nanmax(path.kkt):.1e} of lambda_max, tolerance {outcome.setup.tol:.0e}); see .path",
            ConvergenceWarning,
            stacklevel=3,
        )
