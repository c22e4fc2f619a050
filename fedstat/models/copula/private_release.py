"""Shared by models of one private release: epsilon, public bounds, and budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from typing import Any, ClassVar

import numpy as np

from fedstat.errors import DescriptionError, ModelError
from fedstat.federation.audit.ledger import CoordinatorLog
from fedstat.federation.disclosure.policy import MAX_DELTA, Budget, Policy
from fedstat.federation.disclosure.privacy_budget import BUDGET_EXAMPLE
from fedstat.federation.dry_run.execution import DrySite
from fedstat.federation.dry_run.expected_releases import join_names
from fedstat.federation.message import Step
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.noise_shares import coalition_of
from fedstat.federation.protocols.secure_products import choose_dealer
from fedstat.federation.tables.published import Published, PublishedColumn
from fedstat.inference.notes import Catalogue, Note
from fedstat.models.checks import check_choice
from fedstat.models.copula.bounds import Bounds, IntoBound, bounds_of
from fedstat.models.copula.request import ALL, GramPlan, NoisePlan, PooledRows
from fedstat.models.explain import DryRunPlan, Explainable
from fedstat.privacy.zcdp import epsilon_of_zcdp, rho_of_budget

USUAL_DELTA = 1e-6
ROUNDING = Fraction(1, 2**40)
"""Share of a budget that is reserved for rounding up at the sites."""


PUBLIC_ROWS = (
    "Bounds and levels of the columns and numbers of rows are public and never taken from the data. Noise is "
    "exact discrete Gaussian from each site's own secret randomness, added before anything is released. A "
    "repetition of the same request releases the same numbers and is free, as long as no site's table has "
    "changed."
)
ROW_NOTES = Catalogue(
    info={
        "guarantee": "The charge to each site is epsilon {epsilon:.4g} at delta {delta:g}, for the values of "
        "one row added or removed. A person with several rows, at one site or more, has less protection: "
        "with k rows, rho {rho:.3g} becomes k^2 times as large.",
        "alone": "Each site adds enough noise against all others together. A number colluding in their "
        "budgets lets sites add it together: the noise of {sites} sites would be smaller.",
        "together": "{sites} sites add the noise together, in masked sums. The guarantee holds if at most "
        "{colluding} of them collude with the coordinator.",
    }
)


class PrivateRelease(Explainable):
    """A model of one release with noise, of some columns of the sites of a partition.

    `columns` are their names by site, of a horizontal partition those of `ALL` sites; `bounds` is the public
    description of them, by default the owners' published one.
    """

    _instead: ClassVar[Mapping[tuple[str, str], Step]]
    _family_name: ClassVar[str]
    _release_rows: ClassVar[Callable[..., FitProtocol[Any]]]

    def __init__(
        self,
        partition: ClientPartition,
        epsilon: float,
        delta: float,
        columns: Mapping[str, Sequence[str]],
        bounds: Bounds | Mapping[str, IntoBound] | None,
        coordinator: str | None,
    ) -> None:
        self.partition, self.engine, self.columns = partition, partition.engine, columns
        self.epsilon, self.delta = check_epsilon(epsilon), check_delta(delta)
        self._pooled = pooled_rows(partition)
        self.bounds = self._describe(bounds)
        every = {ALL: np.arange(partition.n_entities)}
        self._rows = {site: (partition.rows if self._pooled is None else every)[site] for site in columns}
        self.coordinator = coordinator or partition.coordinator or "apart"
        check_choice("coordinator", self.coordinator, ("apart", *partition.sites))
        self._session = partition._new_session()
        self._log = CoordinatorLog()
        self._agreement = self._new_ledger()

    @property
    def _rho(self) -> Fraction:
        """The budget as rho."""
        return rho_to_spend(self.epsilon, self.delta)

    @cached_property
    def _planned(self) -> NoisePlan:
        """The noise plan for records without missing values."""
        raise NotImplementedError

    def _noise_for(self, n: int) -> NoisePlan | GramPlan:
        """Plan the noise of a release of n complete entities, for an audit."""
        raise NotImplementedError

    def _pooled_of(self, n: int) -> PooledRows | None:
        """Return n rows of the sites of a horizontal partition, divided evenly; otherwise None."""
        if self._pooled is None:
            return None
        sites, K = tuple(self._pooled.records), len(self._pooled.records)
        return replace(self._pooled, records={site: (n + k) // K for k, site in enumerate(sites)})

    @property
    def _counts(self) -> dict[str, int]:
        """Records of every site."""
        return {site: len(rows) for site, rows in self._rows.items()}

    def _check_budgets(self) -> None:
        """Refuse a release without sufficient budgets or a dealer, before any site spends its own budget."""
        if self._pooled is not None:
            for site, policy in self._policies.items():
                check_budget(site, policy, self._planned.site_cost(ALL))
            return
        at = None if self.coordinator == "apart" else self.coordinator
        for a, b in combinations(self.columns, 2):
            choose_dealer(a, b, tuple(self.partition.sites), at)
        for site in self.columns:
            check_budget(site, self.partition.sites[site].policy, self._planned.site_cost(site))

    def _describe(self, bounds: Bounds | Mapping[str, IntoBound] | None) -> dict[str, Published]:
        """Public descriptions of the columns of every site."""
        partition = self.partition
        known = {name for names in partition.columns.values() for name in names}
        unknown = [name for name in bounds or () if name not in known]
        if unknown:
            raise ModelError(f"bounds: no site has a column {', '.join(map(repr, unknown))}")
        every = [name for names in self.columns.values() for name in names]
        if self._pooled is not None and partition.site_column in every:
            own = {partition.site_column: PublishedColumn("category", levels=tuple(partition.sites))}
            bounds = {**own, **(bounds or {})}
        found = bounds_of(bounds, partition.sites.values(), every)
        return {site: {name: found[name] for name in names} for site, names in self.columns.items()}

    @property
    def _policies(self) -> dict[str, Policy]:
        """Policies of the sites that take part."""
        sites = self.partition.sites
        return {site: sites[site].policy for site in (self.columns if self._pooled is None else sites)}

    @property
    def _masked_at(self) -> tuple[str, ...]:
        """Sites that add their noise together, in masked sums."""
        return () if self._pooled is None else self._pooled.masked_at

    def _columns_read(self, site: str) -> Sequence[str]:
        return tuple(self.columns.get(site if self._pooled is None else ALL, ()))

    def _invent_sites(self, plan: DryRunPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        rows = self.partition.rows
        return {
            name: DrySite(name, policy, len(rows[name]), self._instead, rows[name])
            for name, policy in policies.items()
        }


def pooled_rows(partition: ClientPartition) -> PooledRows | None:
    """Return the numbers of rows of sites with different rows, and how many may collude; otherwise None."""
    if partition.layout != "horizontal":
        return None
    policies = {name: site.policy for name, site in partition.sites.items()}
    return PooledRows({name: len(partition.rows[name]) for name in policies}, coalition_of(policies))


def held_columns(partition: ClientPartition) -> dict[str, tuple[str, ...]]:
    """Return the columns by site; of sites with different rows those that all have, and that of sites."""
    if partition.layout == "horizontal":
        return {ALL: (*partition.pooled_columns, partition.site_column)}
    return {site: tuple(names) for site, names in partition.columns.items()}


def row_guarantee(rows: PooledRows, cost: Fraction, delta: float) -> str:
    """State what each site is charged for a release over rows, and against whom this holds."""
    return (
        f"each site is charged epsilon {epsilon_of_zcdp(cost, delta):.4g} at delta {delta:g}, for the values "
        f"of one row added or removed, against {rows.observers}. Numbers of records are public. A person "
        "with several rows is protected less: m rows have m times this epsilon or more."
    )


def row_notes(rows: PooledRows, cost: Fraction, delta: float) -> Iterator[Note]:
    """State the charge of a release over rows, whom it protects, and who adds the noise."""
    K = len(rows.records)
    epsilon, rho = epsilon_of_zcdp(cost, delta), float(cost)
    yield ROW_NOTES.note("guarantee", epsilon=epsilon, delta=delta, rho=rho)
    if rows.honest > 1:
        yield ROW_NOTES.note("together", sites=K, colluding=K - rows.honest)
    elif K > 2:
        yield ROW_NOTES.note("alone", sites=K)


def rho_to_spend(epsilon: float, delta: float) -> Fraction:
    """Return the charge, as rho, of a release that is to cost at most epsilon at delta."""
    return rho_of_budget(epsilon, delta) * (1 - ROUNDING)


def budget_shares(policies: Mapping[str, Policy], cost_of: Callable[[str], Fraction]) -> Iterator[str]:
    """State what a release costs of the budgets of the sites that have one."""
    sites: dict[tuple[Budget, Fraction], list[str]] = {}
    for site, policy in policies.items():
        if policy.privacy is not None:
            sites.setdefault((policy.privacy, cost_of(site)), []).append(site)
    for (budget, cost), names in sites.items():
        total = float(rho_of_budget(budget.epsilon, budget.delta))
        share = float(cost) / total if total else math.inf
        yield f"It costs {share:.2%} of the budget of {join_names(names)}, epsilon {budget.epsilon:g}."


def check_budget(site: str, policy: Policy, cost: Fraction) -> None:
    """Refuse a release that the budget of a site could never pay for, before a request is sent."""
    budget = policy.privacy
    if budget is None:
        raise DescriptionError.of_rule(
            "privacy budget",
            site,
            "is none, and releases with noise are charged to one. The owner may set it by the "
            f"lines  {BUDGET_EXAMPLE}  in policy.toml; no request was sent",
        )
    if budget.delta and cost > rho_of_budget(budget.epsilon, budget.delta):
        raise DescriptionError.of_rule(
            "privacy budget",
            site,
            f"is epsilon {budget.epsilon:g} at delta {budget.delta:g} over all analyses, and this "
            f"one costs {epsilon_of_zcdp(cost, budget.delta):.3g}. Use a smaller epsilon; no "
            "request was sent",
        )


def check_epsilon(epsilon: Any) -> float:
    """Require a positive number."""
    number = isinstance(epsilon, int | float) and not isinstance(epsilon, bool)
    if not number or not 0.0 < epsilon < math.inf:
        more = "; without noise there is no privacy, and no site releases it" if epsilon == math.inf else ""
        raise ModelError(f"epsilon: expected a positive number, received {epsilon!r}{more}")
    return float(epsilon)


def check_delta(delta: Any) -> float:
    """Require a delta that no record could be released with."""
    if not isinstance(delta, float) or not 0.0 < delta <= MAX_DELTA:
        raise ModelError(
            f"delta: expected a number above 0 and at most {MAX_DELTA:g}, received {delta!r}; a larger "
            "one would allow the release of whole records"
        )
    return delta
