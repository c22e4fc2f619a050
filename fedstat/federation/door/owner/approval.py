"""Consent of a site's owner to each analysis: plans that wait, decisions, and what a session keeps to.

A decision is about the digest of a plan, and a consent serves for one run of it: numbers at points of the
asker's choosing add up, run by run. What is agreed on before a plan can be made (kinds, levels, counts, who
has which entity) is answered before, as far as the other rules let it, and stands in the plan.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from fedstat.errors import ConsentError, PartitionError
from fedstat.federation.account.chain import SiteAccount
from fedstat.federation.account.decision import Decision
from fedstat.federation.door.owner.plan import DESIGN, AnalysisPlan, PlannedStep, PreparedStep, bound_text
from fedstat.federation.message import Ask, Kind, Step
from fedstat.typing import Array

APPROVAL = "approval"
"""Family that proposes plans."""
PREPARING: tuple[Kind, ...] = ("control", "schema", "presence")
"""Kinds of values that are told before there can be a plan."""
MOST_WAITING, MOST_PREPARED = 100, 1000
Status: TypeAlias = Literal["approved", "pending", "denied"]


class PlanStore(Protocol):
    """Where plans wait beyond the life of a process, and where their owner decides."""

    def keep(self, digest: str, plan: AnalysisPlan) -> None:
        """Keep a plan that waits."""
        ...

    def waiting(self) -> Mapping[str, AnalysisPlan]:
        """Plans that wait."""
        ...

    def decided(self) -> Iterable[Decision]:
        """Decisions that the owner has made since."""
        ...

    def settle(self, decision: Decision) -> None:
        """Put a plan aside of which the account has the decision."""
        ...


@dataclass(slots=True)
class Approvals:
    """Plans that were proposed to a site, and what its owner has decided."""

    site: str
    account: SiteAccount
    store: PlanStore | None = None
    _waiting: dict[str, AnalysisPlan] = field(default_factory=dict)

    @property
    def pending(self) -> Mapping[str, AnalysisPlan]:
        """Plans that wait for the owner, by digest."""
        return self._waiting if self.store is None else self.store.waiting()

    def decide(self, digest: str, verdict: Literal["approved", "denied"], who: str) -> None:
        """Decide about a plan, also anew, given by its digest or the beginning of it."""
        whole = find_digest(self.site, digest, self.pending.keys() | self.account.decisions.keys())
        self._settle(Decision(whole, verdict, who, time.time_ns()))

    def status(self, digest: str) -> Status:
        """Tell how it stands with a plan; a consent that has served is none."""
        self.take_up()
        decision = self.account.decisions.get(digest)
        if decision is None or decision.name in self.account.spent:
            return "pending"
        return decision.verdict

    def propose(self, plan: AnalysisPlan) -> tuple[str, Status]:
        """Take in a plan: its digest, and how it stands with it."""
        digest = plan.digest
        status = self.status(digest)
        if status == "pending" and digest not in self.pending:
            if len(self.pending) >= MOST_WAITING:
                raise ConsentError(
                    f"{self.site}: its policy (approval) keeps {MOST_WAITING} plans for its owner, who has "
                    "to decide about these first: 'fedstat site pending FOLDER'"
                )
            if self.store is None:
                self._waiting[digest] = plan
            else:
                self.store.keep(digest, plan)
        return digest, status

    def begin(self, digest: str) -> None:
        """Use up the consent to a plan.

        Raises
        ------
        ConsentError
            There is none.
        """
        status = self.status(digest)
        if status != "approved":
            raise ConsentError(f"{self.site}: its policy (approval) {REFUSED[status].format(digest=digest)}")
        # Before anything leaves: an attempt that fails later has shown something, and asks again.
        self.account.spend(self.account.decisions[digest].name)

    def take_up(self) -> None:
        """Enter into the account what the owner has decided elsewhere."""
        for decision in () if self.store is None else self.store.decided():
            self._settle(decision)

    def _settle(self, decision: Decision) -> None:
        known = self.account.decisions.get(decision.plan)
        # A decision that is put back to be taken up again is older than the newest, or the same.
        if known is None or known.when < decision.when:
            self.account.decide(decision)
        self._waiting.pop(decision.plan, None)
        if self.store is not None:
            self.store.settle(decision)


REFUSED: Mapping[str, str] = {
    "pending": "asks its owner about every analysis, and this one is pending: tell the owner digest "
    "{digest}, who decides by 'fedstat site approve FOLDER {digest:.12}' (in one process by "
    "site.approve(digest)); then run the same analysis again",
    "denied": "asks its owner about every analysis, who has denied this one, digest {digest}. Ask for less, "
    "or leave the site out",
}
"""What is said of a plan without consent."""


def find_digest(site: str, given: str, plans: Iterable[str]) -> str:
    """Complete the beginning of a digest; a PartitionError where no plan or several begin so."""
    found = [digest for digest in plans if given and digest.startswith(given.lower())]
    if len(found) != 1:
        many = f"{len(found)} plans have digests that begin" if found else "no plan has a digest that begins"
        raise PartitionError(f"{site}: {many} with '{given}'; 'fedstat site pending FOLDER' shows them whole")
    return found[0]


@dataclass(slots=True)
class FollowedPlan:
    """What a session was asked before its plan, the plan, and how far it has followed it."""

    prepared: list[PreparedStep] = field(default_factory=list)
    plan: AnalysisPlan | None = None
    digest: str = ""
    begun: bool = False
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)

    def follow(self, plan: AnalysisPlan, digest: str) -> None:
        """Keep to another plan from now on."""
        self.plan, self.digest, self.begun = plan, digest, False
        self.asked.clear()

    def admit(self, approvals: Approvals, ask: Ask, step: Step) -> None:
        """Hold a question against the plan that was consented to, before anything is computed.

        Raises
        ------
        ConsentError
            It is not in the plan, or there is none, or no consent.
        """
        if self.plan is None:
            if _prepares(ask, step) and len(self.prepared) < MOST_PREPARED:
                return
            raise self._refusal(
                approvals,
                f"asks its owner about every analysis, and step '{ask.step}' is of none that was proposed. "
                "fit(), search(), evaluate(), score_test() and predict() propose what they ask; no more is "
                "answered",
            )
        planned, address = self.plan.find(ask), (ask.family, ask.step)
        if planned is None:
            raise self._departs(approvals, f"step '{ask.step}' is not in")
        if self.asked[address] >= planned.most:
            raise self._departs(approvals, f"step '{ask.step}' more than {planned.most:,} times is not in")
        if planned.masked and ask.masked is None:
            raise self._departs(approvals, f"step '{ask.step}' without masks is not in")
        if bound_text(ask) not in planned.texts:
            raise self._departs(approvals, f"step '{ask.step}' is asked for something else than in")
        if not self.begun:
            approvals.begin(self.digest)
            self.begun = True
        self.asked[address] += 1

    def hold(
        self, approvals: Approvals, ask: Ask, arrays: Mapping[str, Array], columns: Iterable[str]
    ) -> None:
        """Hold an answer against the plan before it leaves, and take down a question that came before it.

        Raises
        ------
        ConsentError
            Other columns stand behind it, or more numbers leave, than the owner has consented to.
        """
        if self.plan is None:
            asked = PreparedStep.of(ask)
            self.prepared += [] if asked in self.prepared else [asked]
            return
        further = sorted(set(columns) - set(self.plan.columns))
        if further:
            raise self._departs(approvals, f"columns {', '.join(further)} are not in")
        planned = self.plan.find(ask)
        assert planned is not None
        for name, array in arrays.items():
            if not _fits(planned, name, array):
                raise self._departs(approvals, f"array '{name}' of step '{ask.step}' is not, or smaller, in")

    def _departs(self, approvals: Approvals, what: str) -> ConsentError:
        return self._refusal(
            approvals, f"answers what its owner has consented to: {what} the plan of digest {self.digest:.12}"
        )

    def _refusal(self, approvals: Approvals, why: str) -> ConsentError:
        return ConsentError(f"{approvals.site}: its policy (approval) {why}")


def _prepares(ask: Ask, step: Step) -> bool:
    """Whether a question agrees on a design, and gives nothing that is a sum or a value."""
    agrees = ask.family == DESIGN or step.prepares
    return agrees and all(declared.kind in PREPARING for declared in step.given.values())


def _fits(planned: PlannedStep, name: str, array: Array) -> bool:
    return any(one.array == name and (not one.numbers or array.size <= one.numbers) for one in planned.gives)
