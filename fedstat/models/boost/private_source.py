"""Moments with noise, under differential privacy, when sites hold different columns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
from scipy.special import ndtr

from fedstat.errors import FormulaError, ModelError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.formula.syntax_tree import TREATMENT, Category, Column
from fedstat.federation.design.formula.terms import parse_term, term_columns
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import Engine
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import CoefficientBlock
from fedstat.models.boost.learning.learners import BoostFormula, Learner, parse_boost_formula
from fedstat.models.boost.learning.moments import CurveMoments
from fedstat.models.boost.learning.prepared_learners import BoostDesign
from fedstat.models.boost.private.protocol import (
    RIDGE,
    NoisyBoosting,
    ReleasedCurves,
    release_curves,
    sort_sums,
)
from fedstat.models.boost.private.public_curves import DEPTH, PublicCurve, PublicPart
from fedstat.models.boost.private.steps import DRY_RUN_STEPS, FAMILY, CurvesPlan
from fedstat.models.boost.report.record import PublicBasis
from fedstat.models.boost.results import BoostResults
from fedstat.models.boost.source import BoostOptions, MomentSource
from fedstat.models.boost.vertical.steps import curves_by_owner, find_owners
from fedstat.models.copula.bounds import Bounds, IntoBound
from fedstat.models.copula.explain import cost_statements
from fedstat.models.copula.margins import Bins
from fedstat.models.copula.private_release import USUAL_DELTA, PrivateRelease, budget_shares
from fedstat.models.run import FitAttempt
from fedstat.privacy.gaussian_dp import largest_auc
from fedstat.privacy.zcdp import epsilon_of_zcdp

IntoPublic: TypeAlias = PublicCurve | IntoBound


class PrivateSource(MomentSource, PrivateRelease):
    """All products of scores, released once with noise; boosting of them sends no further request.

    Parameters
    ----------
    boost : BoostFormula
        Formula of ``bsignal(curve)`` and ``bols(column)``.
    partition : ClientPartition
        In the vertical layout, at sites whose owners allow a budget (``Policy(privacy=Budget(...))``).
    epsilon, public, delta, coordinator
        See :meth:`fedstat.FedFunctionBoost.from_formula`.
    """

    where = "where sites hold different columns, with epsilon,"
    model_name = "Private functional boosting"
    settings = ("epsilon", "public", "delta", "coordinator")
    options = ("steps", "learning_rate")
    default_steps, default_learning_rate = 80, 0.2
    penalty = "separable"
    time = None
    _instead = DRY_RUN_STEPS

    def __init__(
        self,
        boost: BoostFormula,
        partition: ClientPartition,
        *,
        epsilon: float,
        public: Mapping[str, IntoPublic] | None = None,
        delta: float = USUAL_DELTA,
        coordinator: str | None = None,
    ) -> None:
        self.boost = boost
        self.curves = curves_by_owner(partition)
        held = {site: tuple(own) for site, own in partition.curves.items()}
        self.apart = find_owners(boost, partition.columns, held)
        self.formula = self.apart.formula
        names = [_column_of(one) for one in boost.learners[1:]]
        (response,) = self.formula.response_columns or ("",)
        if not boost.functional and boost.response != response:
            raise FormulaError(
                f"formula: a private fit needs an untransformed response column, not {boost.response}"
            )
        of_curves, others = _split(public, [*names, response], set(self.curves))
        owners = [*self.apart.owners[1:], self.apart.holder]
        plain: dict[str, list[str]] = {site: [] for site in self.apart.sites}
        for name, owner in zip([*names, response], owners, strict=True):
            if name not in self.curves and name not in plain[owner]:
                plain[owner].append(name)
        super().__init__(partition, epsilon, delta, plain, others, coordinator)
        bins = {
            name: Bins.of(name, column, DEPTH) for own in self.bounds.values() for name, column in own.items()
        }
        self.parts = tuple(
            PublicPart(name, of_curves.get(name), bins.get(name)) for name in [*names, response]
        )
        _check_response(self.parts[-1])
        self._released: tuple[ReleasedCurves, Ledger, Engine] | None = None

    @classmethod
    def of_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """See :meth:`MomentSource.of_formula`."""
        return cls(parse_boost_formula(formula, list(curves_by_owner(partition))), partition, **settings)

    @property
    def _description(self) -> str:
        """Description of the request."""
        return f"{self.formula.text} at epsilon {self.epsilon:g}"

    @cached_property
    def _planned(self) -> CurvesPlan:
        """The noise plan, which depends on public descriptions only."""
        owners = [*self.apart.owners[1:], self.apart.holder]
        parts = {
            site: tuple(part for part, k in zip(self.parts, owners, strict=True) if k == site)
            for site in self.apart.sites
        }
        return CurvesPlan(
            rho=self._rho,
            columns=dict.fromkeys(parts, ()),
            parts=parts,
            holder=self.apart.holder,
            response=self.parts[-1].width,
        )

    def expected(self, options: BoostOptions) -> tuple[list[tuple[str, str]], list[str]]:
        """See :meth:`MomentSource.expected`."""
        plan, n = self._planned, min(self._counts.values())
        costs = [("Coordinator and sites", one) for one in cost_statements(plan, self.delta)]
        learned = [*costs, ("Coordinator", f"membership inference: {tracing_statement(plan, n)}.")]
        return learned, [*budget_notes(plan, n, self.epsilon, self.delta), *self._budget_shares()]

    def boosted(self, attempt: FitAttempt, options: BoostOptions) -> BoostResults:
        """Send one request to the sites, under their budgets, and boost."""
        steps, learning_rate = self.checked(options)
        # A dry run has its own engine and must send the requests.
        if self._released is None or self._released[2] is not self.engine:
            self._released = (self._release(attempt), attempt.ledger, self.engine)
        released, ledger, _ = self._released
        sums = sort_sums(released, self.apart.owners, [1, *(part.width for part in self.parts[:-1])])
        along = PublicBasis.response_at(self.parts[-1], self._points)
        no_squares = np.zeros((1, sums.T.shape[1], sums.T.shape[1]))  # squares of the response are not needed
        boosting = NoisyBoosting(
            moments=CurveMoments(sums.S[None], sums.T[None], no_squares, along[0][None], np.array([sums.yy])),
            design=BoostDesign(self.boost.learners, sums.starts, None, self.penalty),
            basis=along[1].T,
            nu=learning_rate,
            given=along[0],
            sd=sums.sd,
            sd_response=sums.sd_response,
            owners=sums.owners,
        )
        blocks = tuple(
            CoefficientBlock(site, released.plan.width(site), released.n, 1.0 - released.n / len(rows))
            for site, rows in self._rows.items()
        )
        notes = tuple(release_notes(released, self.delta))
        basis = PublicBasis(self.model_name, self.parts, self.epsilon, self.delta, blocks, notes)
        return BoostResults._of(self, basis, boosting, steps, ledger=ledger)

    @property
    def read_curves(self) -> list[str]:
        """Curves of the formula, including the response."""
        return [part.name for part in self.parts if part.curve is not None]

    def _release(self, attempt: FitAttempt) -> ReleasedCurves:
        self._check_budgets()
        requester = SecureProductSession(FAMILY, self._session, attempt.ledger.at)
        protocol = release_curves(
            requester, self._planned, self._rows, tuple(self.partition.sites), self.partition.n_entities
        )
        return attempt.run(protocol)

    def _budget_shares(self) -> Iterator[str]:
        """State what the release leaves of each budget."""
        policies = {site: self.partition.sites[site].policy for site in self._planned.parts}
        return budget_shares(policies, self._planned.site_cost)

    def _columns_read(self, site: str) -> Sequence[str]:
        return [part.name for part in self._planned.parts.get(site, ())]


def _column_of(learner: Learner) -> str:
    """Return the column or curve of a private learner; FormulaError for another kind of learner."""
    if learner.kind == "bsignal" and not learner.by and not learner.constant:
        return learner.of
    if learner.kind == "bols" and not learner.by and not learner.constant:
        term = parse_term(learner.of)
        tree = term[0].tree
        dummies = isinstance(tree, Category) and tree.coding == TREATMENT
        plain = len(term) == 1 and (isinstance(tree, Column) or dummies)
        if plain:
            return term_columns(term)[0]
    raise FormulaError(
        f"formula: {learner.label} is not available in a private fit. It has bsignal(curve) and "
        "bols(column), with public descriptions of each"
    )


def _split(
    public: Mapping[str, IntoPublic] | None, names: Sequence[str], curves: set[str]
) -> tuple[dict[str, PublicCurve], Bounds | dict[str, Any] | None]:
    """Separate public curves from ranges and levels; a ModelError lists curves without a description."""
    given = dict(public or {})
    of_curves = {name: one for name, one in given.items() if isinstance(one, PublicCurve)}
    absent = [name for name in names if name in curves and name not in of_curves]
    if absent:
        lines = "\n".join(
            f"    {name!r}: fs.PublicCurve(grid, mean, functions, deviations)," for name in absent
        )
        raise ModelError(
            "public: a private fit takes means, functions and deviations of curves from public sources, "
            f"never from the data. Write the public description of each:\npublic={{\n{lines}\n}}"
        )
    others = {name: one for name, one in given.items() if name not in of_curves}
    strange = [name for name in of_curves if name not in curves]
    if strange:
        raise ModelError(f"public: no site has a curve {', '.join(map(repr, strange))}")
    return of_curves, others or None


def _check_response(part: PublicPart) -> None:
    if part.bins is not None and (part.bins.levels or part.bins.scale != "linear"):
        raise ModelError(
            f"public: the response '{part.name}' must be a curve, or a number with a range (low, high)"
        )


# ----------------------------------------------------------------------------------------------------
# Expectations of a private boosting: its cost, size of the noise, and success of an attack.


def tracing_statement(plan: CurvesPlan, n: float) -> str:
    """State the bound of a membership inference attack, and its success without noise."""
    columns = sum(map(plan.width, plan.parts)) + 1
    exact = float(ndtr(columns / (2.0 * math.sqrt(n))))
    bound = largest_auc(float(plan.coordinator_cost()))
    return (
        f"an attacker who knows a person's full record can detect that it is among the {n:,.0f} entities "
        f"with AUC at most {bound:.2f}, by the budget and with any further knowledge (0.5 = chance). "
        f"Without noise the AUC would be about {exact:.2f} for a typical person, and more for others"
    )


def noise_statement(plan: CurvesPlan, n: int) -> str:
    """State the size of the noise relative to sampling."""
    correlation = math.sqrt(2.0) * plan.deviation / n
    return (
        "Noise on a mean product of two standardized columns at two sites has standard deviation "
        f"{correlation:.2g}, with the response {correlation / plan.weight:.2g}; sampling has "
        f"{1.0 / math.sqrt(max(n, 1)):.2g}."
    )


def budget_notes(plan: CurvesPlan, n: int, epsilon: float, delta: float) -> Iterator[str]:
    """State the size of the noise for this number of entities, remedies, and what one release covers."""
    yield noise_statement(plan, n)
    correlation = math.sqrt(2.0) * plan.deviation / n
    if correlation > RIDGE:
        factor = correlation / RIDGE
        more = epsilon_of_zcdp(plan.rho * round(1000 * factor**2) / 1000, delta)
        yield (
            f"That is more than {RIDGE}: results will be poor. About {math.ceil(n * factor):,} entities "
            f"would suffice at epsilon {epsilon:g}, or an epsilon of about {more:.2g} at {n:,}; fewer "
            "functions of each curve need less."
        )
    yield (
        "One release, whatever the number of steps: steps, their length and refits of the same model send "
        "no further request."
    )


# ----------------------------------------------------------------------------------------------------
# Sentences below the summary of a private release of curves.


NOTES = Catalogue(
    info={
        "cost": "{cost}",
        "noise": "{noise}",
        "tracing": "Membership inference: {tracing}.",
        "left_out": "Entities that are not complete at every site are left out: {entities}.",
    },
)


def release_notes(released: ReleasedCurves, delta: float) -> Iterator[Note]:
    """State the cost of a release, the size of its noise, and the success of an attack."""
    for text in cost_statements(released.plan, delta):
        yield NOTES.note("cost", cost=text)
    yield NOTES.note("noise", noise=noise_statement(released.plan, released.n))
    yield NOTES.note("tracing", tracing=tracing_statement(released.plan, released.n))
    lost = {c: count - released.n for c, count in released.entities.items() if count > released.n}
    if lost:
        yield NOTES.note("left_out", entities=[f"{count:,} at {site}" for site, count in lost.items()])
