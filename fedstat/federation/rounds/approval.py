"""A plan is proposed to the sites whose owners are asked, before the analysis asks for anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedstat.errors import ConsentError, MessageError
from fedstat.federation.door.owner.approval import APPROVAL, REFUSED, Status
from fedstat.federation.door.owner.plan import AnalysisPlan, misdeclared, read_plan
from fedstat.federation.door.site import FAMILIES
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Ask, Declared, Step
from fedstat.federation.rounds.engine import Rounds
from fedstat.records import from_json, to_json
from fedstat.typing import Array

LONGEST = 2_000_000
"""Characters of a plan."""


@dataclass(frozen=True, slots=True)
class PlanStanding:
    """What a site says of a plan: its digest there, and whether its owner has decided."""

    digest: str
    status: Status


def propose_plan(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Take in the plan of this session, and say how it stands with the owner's consent."""
    where = f"{data.name}: the plan of an analysis"
    if len(text) > LONGEST:
        raise MessageError(f"{where}: longer than {LONGEST:,} characters")
    plan = read_plan(text, where)
    if plan.site != data.name or plan.prepared:
        raise MessageError(f"{where}: meant for another site, or says what only the site knows")
    if wrong := misdeclared(plan, FAMILIES):
        raise MessageError(f"{where}: {wrong} is not declared so here")
    # What was asked before is entered here, whatever the coordinator says of it.
    plan = replace(plan, prepared=tuple(state.analysis.prepared))
    digest, status = data.approvals.propose(plan)
    state.analysis.follow(plan, digest)
    return {}, to_json(PlanStanding(digest, status))


STEPS: Mapping[str, Step] = {
    "propose_plan": Step(
        propose_plan,
        text_in=Declared("control", "the plan of the analysis"),
        text_out=Declared("control", "whether its owner has consented"),
        public=True,
    )
}
FAMILIES[APPROVAL] = STEPS


def propose_plans(plans: Mapping[str, AnalysisPlan], session: str) -> Rounds[None]:
    """Propose a session's plans, by site.

    Raises
    ------
    ConsentError
        Not all owners have consented; names sites, digests and commands.
    """
    replies = yield [
        Ask(site, APPROVAL, "propose_plan", {}, session, to_json(plan)) for site, plan in plans.items()
    ]
    found = {
        reply.site: from_json(PlanStanding, reply.text, f"{reply.site}: how it stands with a plan")
        for reply in replies
    }
    lacking = [
        f"{site}: its policy (approval) {REFUSED[one.status].format(digest=one.digest)}"
        for site, one in found.items()
        if one.status != "approved"
    ]
    if lacking:
        raise ConsentError("\n".join(lacking))
