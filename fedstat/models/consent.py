"""Consent of the sites' owners to what an analysis asks: proposed before anything else of it is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstat.federation.account.ledger import Ledger
from fedstat.federation.door.owner.plan import AnalysisPlan
from fedstat.federation.door.owner.policy import Policy
from fedstat.federation.forecast.adversary import who_learns
from fedstat.federation.forecast.analysis_plan import AnalysisWords, PlanMaker
from fedstat.federation.forecast.dry_site import DrySite
from fedstat.federation.forecast.forecast import Forecast, Loop
from fedstat.federation.forecast.rehearsal import Rehearsal, Rehearsed
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.approval import propose_plans
from fedstat.federation.rounds.engine import Fit, Rounds


def owners_asked(partition: ClientPartition) -> list[str]:
    """List the sites whose owners consent to every analysis."""
    return [name for name, site in partition.sites.items() if site.policy.approval == "owner"]


def learned_in(forecast: Forecast) -> list[tuple[str, str]]:
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
    loops: Sequence[Loop] = ()
    guessed: frozenset[str] = frozenset()

    def run(self, protocol: Rounds[Fit], rehearsed: Callable[[], Rounds[Fit]], ledger: Ledger) -> Fit:
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

    def _plans(self, owners: Sequence[str], protocol: Rounds[Any], ledger: Ledger) -> dict[str, AnalysisPlan]:
        policies = {name: site.policy for name, site in self.partition.sites.items()}
        rehearsal = Rehearsal(self.invent(policies))
        try:
            rehearsal.run(protocol, Ledger(at=ledger.at))
        except Rehearsed:
            forecast = Forecast(rehearsal.course(), self.loops)
        learned = tuple(f"{who}: {sentence}" for who, sentence in learned_in(forecast))
        words = AnalysisWords(self.call, self.formula, self.distribution, learned)
        maker = PlanMaker(forecast, words, self.guessed)
        asked = {one.site for one in forecast.course.asked}
        return {site: maker.plan(site, self.columns.get(site, ())) for site in owners if site in asked}


def proposing(plans: Mapping[str, AnalysisPlan], protocol: Rounds[Fit]) -> Rounds[Fit]:
    """Propose plans in the session of a protocol, and go on with it where all owners have consented."""
    asks = next(protocol)
    yield from propose_plans(plans, asks[0].session)
    try:
        while True:
            asks = protocol.send((yield asks))
    except StopIteration as ended:
        fit: Fit = ended.value
        return fit
