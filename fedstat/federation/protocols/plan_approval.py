"""Approval of a plan by the owners of the sites, before any other request."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedstat.codec import from_json, to_json
from fedstat.errors import ConsentError, MessageError
from fedstat.federation.crypto.keys import encode_parts, normalize_fingerprint
from fedstat.federation.disclosure import approval
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import Request, control
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.typing import Array

LONGEST = 2_000_000
"""Characters of a plan."""


@dataclass(frozen=True, slots=True)
class PlanStatus:
    """A site's status of a plan: its digest there, and the owner's decision, if there is one."""

    digest: str
    status: approval.ApprovalStatus


@step(
    approval.APPROVAL_FAMILY,
    requests=control("the plan of the analysis"),
    replies=control("whether its owner has consented"),
    public=True,
)
def propose_plan(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Accept the plan of this session, and return the status of its approval."""
    where = f"{data.name}: the plan of an analysis"
    if len(text) > LONGEST:
        raise MessageError(f"{where}: longer than {LONGEST:,} characters")
    plan = approval.read_plan(text, where)
    if plan.site != data.name or plan.prepared or plan.person or plan.study or plan.purpose or plan.keys:
        raise MessageError(f"{where}: meant for another site, or says what only the site knows")
    if wrong := approval.undeclared_part(plan, FAMILIES):
        raise MessageError(f"{where}: {wrong} is not declared so here")
    # The site itself enters earlier requests here, and who has signed the request, whatever the plan states.
    subject = state.subject
    plan = replace(
        plan,
        prepared=tuple(state.analysis.prepared),
        person=subject.person,
        study=subject.study,
        purpose=subject.purpose,
        keys=_keys_digest(subject.client, data.trust.pinned),
    )
    digest, status = data.approvals.propose(plan, subject)
    state.analysis.follow(plan, digest)
    return {}, to_json(PlanStatus(digest, status))


def _keys_digest(client: str, pinned: Mapping[str, str]) -> str:
    """Return a digest of the keys of the coordinator and of all trusted sites.

    Another coordinator, or another site in a masked sum, is another analysis, even if its texts are equal.
    """
    if not client:
        return ""
    parts = [part for site, key in sorted(pinned.items()) for part in (site, normalize_fingerprint(key))]
    return hashlib.sha256(encode_parts(normalize_fingerprint(client), *parts)).hexdigest()


def propose_plans(plans: Mapping[str, approval.AnalysisPlan], session: str) -> FitProtocol[None]:
    """Propose a session's plans, by site.

    Raises
    ------
    ConsentError
        Not all owners have consented; names sites, digests and commands.
    """
    replies = yield [
        Request(site, approval.APPROVAL_FAMILY, "propose_plan", {}, session, to_json(plan))
        for site, plan in plans.items()
    ]
    found = {
        reply.site: from_json(PlanStatus, reply.text, f"{reply.site}: status of a plan") for reply in replies
    }
    lacking = []
    for site, one in found.items():
        if one.status != "approved":
            why, remedy = approval.why_not_approved(one.status, one.digest)
            text = f"{site}: its policy (approval) {why}"
            lacking.append(remedy.after(text) if remedy else text)
    if lacking:
        raise ConsentError("\n".join(lacking), rule="approval")
