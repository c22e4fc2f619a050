"""Consent of the sites' owners: an analysis is proposed before its first other request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.approval import AnalysisPlan
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.dry_run.adversaries import who_learns
from fedstat.federation.dry_run.execution import DryRunEnded, DryRunEngine, DrySite
from fedstat.federation.dry_run.expected_releases import (
    AnalysisDescription,
    ExpectedReleases,
    IterationLoop,
    PlanBuilder,
)
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import Fit, FitProtocol
from fedstat.federation.protocols.plan_approval import propose_plans


def owners_asked(partition: ClientPartition) -> list[str]:
    """List the sites whose owners consent to every analysis."""
    return [name for name, site in partition.sites.items() if site.policy.approval == "owner"]


def learned_in(forecast: ExpectedReleases) -> list[tuple[str, str]]:
    """Say who could learn what from what passes: pairs of a party and a sentence."""
    course = forecast.course
    return [*who_learns(forecast.planned(), course.at, course.n_masked, course.dealers)]


@dataclass(frozen=True, slots=True)
class FurtherAnalysis:
    """What is asked of the sites of a partition beside a fit, such as an evaluation.

    `call`, `formula` and `distribution` say what it is; `invent` makes sites without data that can answer
    it, under the policies of the real ones, `columns` names by site those that it reads, and `loops` are its
    rounds of which there are as many as the data ask for; `guessed` are steps whose sizes are not known. Only
    owners of sites that are asked something consent.
    """

    partition: ClientPartition
    call: str
    formula: str
    distribution: str
    invent: Callable[[Mapping[str, Policy]], Mapping[str, DrySite]]
    columns: Mapping[str, Sequence[str]]
    loops: Sequence[IterationLoop] = ()
    guessed: frozenset[str] = frozenset()

    def run(
        self, protocol: FitProtocol[Fit], rehearsed: Callable[[], FitProtocol[Fit]], ledger: Ledger
    ) -> Fit:
        """Ask what a protocol asks, in one session, once the owners who want to be asked have consented.

        `rehearsed` is the same protocol, for sites without data.

        Raises
        ------
        ConsentError
            Not all have; names sites, digests and commands.
        """
        if owners := owners_asked(self.partition):
            protocol = proposing(self._plans(owners, rehearsed(), ledger), protocol)
        return self.partition.engine.run(protocol, ledger)

    def _plans(
        self, owners: Sequence[str], protocol: FitProtocol[Any], ledger: Ledger
    ) -> dict[str, AnalysisPlan]:
        policies = {name: site.policy for name, site in self.partition.sites.items()}
        rehearsal = DryRunEngine(self.invent(policies))
        try:
            rehearsal.run(protocol, Ledger(at=ledger.at))
        except DryRunEnded:
            forecast = ExpectedReleases(rehearsal.course(), self.loops)
        learned = tuple(f"{who}: {sentence}" for who, sentence in learned_in(forecast))
        words = AnalysisDescription(self.call, self.formula, self.distribution, learned)
        maker = PlanBuilder(forecast, words, self.guessed)
        asked = {one.site for one in forecast.course.asked}
        return {site: maker.plan(site, self.columns.get(site, ())) for site in owners if site in asked}


def proposing(plans: Mapping[str, AnalysisPlan], protocol: FitProtocol[Fit]) -> FitProtocol[Fit]:
    """Propose plans in the session of a protocol, and go on with it where all owners have consented."""
    asks = next(protocol)
    yield from propose_plans(plans, asks[0].session)
    try:
        while True:
            asks = protocol.send((yield asks))
    except StopIteration as ended:
        fit: Fit = ended.value
        return fit
