"""Private generalized linear models: formula, bounds and epsilon in, results out."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
import statsmodels.genmod.families as sm_families

from fedstat.docstrings import inherits_signature
from fedstat.errors import ConvergenceWarning, DataWarning, ModelError, Remedy, warn
from fedstat.federation.design.formula.parse import Formula, parse_formula
from fedstat.federation.dry_run.execution import DryRunEngine
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.federation.tables.published import Published
from fedstat.kernels.glm.distributions import DistributionSpec, Family
from fedstat.models.checks import check_choice, check_integer, check_layout, checks_arguments, takes_parsed
from fedstat.models.copula.bounds import Bounds, IntoBound
from fedstat.models.copula.explain import bounds_problems
from fedstat.models.copula.private_release import USUAL_DELTA, PrivateRelease, held_columns
from fedstat.models.copula_glm.design import ScoredColumn, check_response, columns_by_site, score_columns
from fedstat.models.copula_glm.estimation import bootstrap
from fedstat.models.copula_glm.explain import TIMES, PrivateGLMPlan, failure_notes, noise_ratio, step_ratio
from fedstat.models.copula_glm.notes import NO_ROOT, left_out
from fedstat.models.copula_glm.protocol import (
    MomentReleasePlan,
    fit_private,
    release_complete_rows,
    release_moments,
    release_row_moments,
)
from fedstat.models.copula_glm.request import FamilyName, MomentPlan
from fedstat.models.copula_glm.results import PrivateGLMResults
from fedstat.models.copula_glm.score import OF_STEP, CopulaTest, simulated_move
from fedstat.models.copula_glm.steps import DRY_RUN_STEPS, FAMILY
from fedstat.models.explain import DryRunPlan
from fedstat.models.run import Call, FitAttempt, run_fit

LINKS: Mapping[str, FamilyName] = {"Binomial": "Binomial", "Gaussian": "Gaussian", "Poisson": "Poisson"}
ESTIMATORS = ("moments",)
Estimator: TypeAlias = Literal["moments"]
LITTLE_NOISE = 0.5
"""Expected noise of a step, relative to the sampling error, below which it is the default."""
NO_STEP = (
    "polish=1: a step sums residuals. For the Poisson family they, and the noise, are as large as the "
    "largest count within the bounds, so that no step is available for counts"
)


class PrivateCopulaGLM(PrivateRelease):
    """Generalized linear regression under differential privacy, on columns of several sites.

    Every site releases the margins of its columns, and all sites together release the products of bounded
    scores of the columns and the response. Each site adds noise to its own part first, which makes both
    differentially private. Coefficients solve the moment equations E[v (y - mu(x'b))] = 0. The part with y
    uses the released products; the part with mu is an integral over the released distribution of x, a
    Gaussian copula. Standard errors come from releases simulated from the estimate, and include the noise.
    ``fit(polish=1)`` takes one further step on the score of the rows, for which the distribution of the
    columns matters little; it is the default if its noise is small, and tests the copula. Sites with
    different rows of the same columns release sums over their rows, with noise. Each site's owner has to
    allow a budget: ``Policy(privacy=Budget(epsilon, delta))``.

    Make one with :meth:`from_formula`.

    Parameters
    ----------
    formula : Formula
        A parsed formula: main effects of numbers, of their log, sqrt or exp, and of categories.
    partition : ClientPartition
        In the vertical or the horizontal layout. Entities that are not complete at every site, and rows that
        are not complete, are left out.
    epsilon : float
        Differential privacy of the whole record of one entity, replaced by any other; in the horizontal
        layout of one row, added or removed.
    bounds : Bounds or mapping, optional
        Public description of every column; by default the owners' published one. A binary response has two
        levels, of which the second is the event; a normal response has a range; counts begin at 0.
    family : statsmodels family, optional
        ``Gaussian()``, ``Binomial()`` or ``Poisson()`` with the canonical link.
    delta : float
        At most 1e-6.
    coordinator : str, optional
        The site of the coordinator, or ``"apart"``, the default.

    Raises
    ------
    ModelError
        An argument is invalid, columns lack bounds, or a term takes more than one column.

    Examples
    --------
    >>> import fedstat as fs, numpy as np, pandas as pd, statsmodels.api as sm
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((20_000, 2))
    >>> y = rng.uniform(size=20_000) < 1.0 / (1.0 + np.exp(-x[:, 0]))
    >>> table = pd.DataFrame({"y": y.astype(int), "a": x[:, 0], "b": x[:, 1]})
    >>> held = {"Registry": ["y"], "Bank": ["a"], "Shop": ["b"]}
    >>> budget = fs.Policy(privacy=fs.Budget(epsilon=3.0, delta=1e-6))
    >>> partition = fs.ClientPartition.from_frame(table, columns=held, policy=budget)
    >>> bounds = {"y": [0, 1], "a": (-5, 5), "b": (-5, 5)}
    >>> model = fs.PrivateCopulaGLM.from_formula(
    ...     "y ~ a + b", partition, family=sm.families.Binomial(), epsilon=2.0, bounds=bounds
    ... )
    >>> fit = model.fit(draws=20)
    >>> bool(abs(fit.params["a"] - 1.0) < 0.3), bool(abs(fit.params["b"]) < 0.3)
    (True, True)
    """

    _plan: ClassVar[type[DryRunPlan] | None] = PrivateGLMPlan
    _polish = 0
    _instead = DRY_RUN_STEPS
    _family_name = FAMILY

    @takes_parsed
    def __init__(
        self,
        formula: Formula,
        partition: ClientPartition,
        *,
        epsilon: float,
        bounds: Bounds | Mapping[str, IntoBound] | None = None,
        family: Family | None = None,
        delta: float = USUAL_DELTA,
        coordinator: str | None = None,
    ) -> None:
        check_layout(type(self).__name__, partition, "vertical", "horizontal")
        self.formula = formula
        self.distribution = DistributionSpec.of(sm_families.Gaussian() if family is None else family)
        if self.distribution.name not in LINKS or not self.distribution.canonical:
            raise ModelError(
                f"family: expected Gaussian(), Binomial() or Poisson() with the canonical link, received "
                f"{self.distribution}"
            )
        columns = columns_by_site(formula, tuple(held_columns(partition)))
        super().__init__(partition, epsilon, delta, columns, bounds, coordinator)
        described = {name: column for own in self.bounds.values() for name, column in own.items()}
        check_response(formula, self.distribution.name, described)
        self._design = score_columns(formula, described)
        self.bounds = _without_order(self.bounds, self._design)

    @classmethod
    @checks_arguments
    @inherits_signature(__init__)
    def from_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula : str
            ``response ~ terms``; ``.`` is every other column of every site. A term is a column, ``C(x)``,
            ``log(x)``, ``sqrt(x)`` or ``exp(x)``.
        partition, epsilon, family, bounds, delta, coordinator
            See the class.

        Raises
        ------
        FormulaError
            The formula has an invalid expression, or an unknown column.
        ModelError
            See the class.
        """
        check_layout(cls.__name__, partition, "vertical", "horizontal")
        extra = (partition.site_column,) if partition.layout == "horizontal" else ()
        parsed = parse_formula(formula, held_columns(partition), extra=extra)
        return cls(parsed, partition, **settings)

    @property
    def _description(self) -> str:
        """Description of the request."""
        return f"{self.formula.text} at epsilon {self.epsilon:g}"

    @property
    def _question(self) -> MomentReleasePlan:
        of_step = self._rho * OF_STEP * self._polish
        return MomentReleasePlan(
            bounds=self.bounds,
            design=self._design,
            holder=str(self.formula.response_site),
            response=LINKS[self.distribution.name],
            rho=self._rho - of_step,
            of_step=of_step,
            rows=self._pooled,
        )

    def _with_steps(self, polish: int | None) -> Self:
        """Return the model whose plan includes this number of steps after the moments.

        By default a step where its noise is expected to be small. This depends on public numbers only, so
        that the decision reveals nothing, and precedes the release, since both share one budget.
        """
        found = copy(self)
        if polish is None and self._pooled is not None:
            polish = 0
        if polish is None:
            n = min(len(rows) for rows in self._rows.values())
            stepped = self._with_steps(int(self.distribution.name != "Poisson"))._planned
            polish = int(bool(stepped.of_step) and step_ratio(stepped, n) < LITTLE_NOISE)
        found._polish = polish
        vars(found).pop("_planned", None)
        return found

    @cached_property
    def _planned(self) -> MomentPlan:
        """The noise plan if every entity is complete."""
        return self._question.plan(self._counts)

    _release_rows = staticmethod(release_complete_rows)

    def _noise_for(self, n: int) -> MomentPlan:
        """Plan the noise of a release of n complete entities, for an audit."""
        return replace(self._question, rows=self._pooled_of(n)).plan(dict.fromkeys(self.bounds, n))

    @checks_arguments
    def fit(
        self,
        *,
        estimator: Estimator = "moments",
        polish: int | None = None,
        draws: int = 50,
        seed: int | None = 0,
        progress: bool | None = None,
    ) -> PrivateGLMResults:
        """Request one release from the sites, under their budgets, and estimate.

        Parameters
        ----------
        estimator : {"moments"}
            Method that computes coefficients from the release.
        polish : {0, 1}, optional
            With 1, half of the budget is for one step from these coefficients on the score of the rows: sums
            of scores of the columns times residuals, with noise. The distribution of the columns then matters
            little, at the price of more noise. How far the step goes also tests the copula
            (:attr:`PrivateGLMResults.copula_test`). Not available for counts. By default there is a step if
            its noise is expected to be below half of the sampling error; this follows from `epsilon`, the
            formula and the number of entities, which are public. Both requests share `epsilon`. Not available
            in the horizontal layout, where ``FederatedGLM(...).fit(epsilon=)`` sums scores of rows.
        draws : int
            Number of simulated releases for the standard errors, at least 10. After a step errors are in
            closed form, and draws are for the test of the copula and :meth:`PrivateGLMResults.select`.
        seed : int or None
            Seed of these draws, None for other ones in every fit. The noise of the sites does not depend on
            it.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        PrivateGLMResults

        Raises
        ------
        DescriptionError
            A budget does not allow the release, or is spent; the error states what is left, and the line of
            the policy.
        EstimationError
            Values of a column are not in its bounds, or too few entities are complete.
        ModelError
            The coordinator is at one of two sites, so that no third party can deal random numbers.

        Warns
        -----
        DataWarning
            Entities are left out, since they are not complete at every site; or the bounds of a column do not
            suit its released margin.
        ConvergenceWarning
            No coefficients solve the released moments: the noise is too large. Before anything is charged if
            this is likely; ``warnings.simplefilter("error", fs.errors.ConvergenceWarning)`` stops the fit.
        """
        call = Call.of(self.fit, locals())
        check_choice("estimator", estimator, ESTIMATORS)
        check_choice("polish", polish, (0, 1, None))
        check_integer("draws", draws, 10)
        if polish and self.distribution.name == "Poisson":
            raise ModelError(NO_STEP, remedy=Remedy("fit(..., polish=0)", "Use {arguments}"))
        if polish and self._pooled is not None:
            raise ModelError(
                "polish=1: the step needs scores over sites with different columns",
                remedy=Remedy("fit(..., polish=0)", "Use {arguments}"),
            )
        rng = np.random.default_rng(seed)
        return run_fit(self, call, PrivateCopulaGLM._estimate, polish, draws, rng)

    def _warn_of_failure(self) -> None:
        """Warn before anything is charged if the noise probably leaves no estimate."""
        n = min(len(rows) for rows in self._rows.values())
        if isinstance(self.engine, DryRunEngine) or noise_ratio(self._planned, n) <= TIMES:
            return
        for note in failure_notes(self._planned, n):
            warn(f"Nothing is charged yet. {note}", ConvergenceWarning)

    def _estimate(
        self, attempt: FitAttempt, polish: int | None, draws: int, rng: np.random.Generator
    ) -> PrivateGLMResults:
        planned = self._with_steps(polish)
        planned._check_budgets()
        planned._warn_of_failure()
        requester, question = (
            SecureProductSession(FAMILY, self._session, attempt.ledger.at),
            planned._question,
        )
        sites, n = tuple(self.partition.sites), self.partition.n_entities
        if self._pooled is None:
            release = release_moments(requester, question, self._rows, sites, n)
        else:
            release = release_row_moments(requester, question, self._policies)
        protocol = fit_private(requester, question, release, sites, isinstance(self.engine, DryRunEngine))
        done = attempt.run(protocol, self._masked_at)
        released, fit, step = done.released, done.fit, done.step
        errors, test = None, None
        if not isinstance(self.engine, DryRunEngine):
            for text in (*bounds_problems(*released.margins), left_out(released)):
                warn(text, DataWarning) if text else None
        if fit.root.converged:
            move = None if step is None else simulated_move
            errors = bootstrap(fit, released.n, released.noise, draws, rng, move)
        if step is not None and errors is not None:
            test = CopulaTest.of(step, errors.moves, errors.noise)
        if not fit.root.converged:
            warn(f"{NO_ROOT}; there are no standard errors, tests and intervals", ConvergenceWarning)
        return PrivateGLMResults._of(
            response=self.formula.response,
            distribution=self.distribution,
            released=released,
            fit=fit,
            step=step,
            errors=errors if step is None else None,
            test=test,
            budget=(self.epsilon, self.delta),
            ledger=attempt.ledger,
            draws=draws,
            rng=rng,
        )


def _without_order(
    bounds: Mapping[str, Published], design: Mapping[str, tuple[ScoredColumn, ...]]
) -> dict[str, Published]:
    """Describe columns with one effect of each level as levels without an order, unless declared ordered."""
    out: dict[str, Published] = {}
    for site, columns in bounds.items():
        names = list(columns)
        coded = {names[one.source] for one in design.get(site, ()) if one.above}
        out[site] = {
            name: replace(column, ordered=False) if name in coded and column.ordered is None else column
            for name, column in columns.items()
        }
    return out
