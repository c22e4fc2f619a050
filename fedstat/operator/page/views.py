"""Data of the pages of a site's owner: status, approvals, policy, releases and refusals."""

from __future__ import annotations

import platform
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from importlib.metadata import version
from itertools import groupby
from textwrap import shorten
from typing import Any, NamedTuple, TypeAlias

from fedstat.errors import PartitionError, SecurityError
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.audit.event_log import SessionChain, SiteLedger
from fedstat.federation.disclosure.approval import AnalysisPlan, describe_plan
from fedstat.federation.disclosure.column_sums import exposure
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.disclosure.privacy_budget import read_budget_spent
from fedstat.federation.disclosure.rules import PARTIES, rules_of, toml_line
from fedstat.federation.disclosure.threat_statements import threats_under
from fedstat.federation.transport.live_config import policy_changes
from fedstat.federation.transport.site_folder import open_records
from fedstat.operator.page.audit_export import RELEASED_AS, AuditFilter, audit_lines, group_analyses
from fedstat.operator.page.owner_view import OwnerView, Verdict
from fedstat.operator.page.plan_summary import formula_in_words, summarize_plan
from fedstat.operator.page.released_arrays import (
    EXPOSURE_HEAD,
    EXPOSURE_NOTES,
    FAMILY_WORDS,
    HEAD,
    exposure_rows,
    families_of,
    only_connection_steps,
    refusals_of,
    released_bytes,
    released_kind_counts,
    released_rows,
    statements_of,
)
from fedstat.operator.page.rendering import section_data

PageData: TypeAlias = dict[str, Any]


class PageLink(NamedTuple):
    """A cell of a table that links to another page, by its path below the root."""

    page: str
    text: str
    is_code: bool = False


# ----------------------------------------------------------------------------------------------------
# Releases and refusals, from the site's own ledger chain.


def ledger_page(view: OwnerView, month: str = "") -> PageData:
    """Return the sessions of a month, by default the latest, day by day."""
    site_ledger = view.site_ledger
    chains = [chain for chain in site_ledger.chains if chain.entries]
    months = list(dict.fromkeys(_began(chain)[:7] for chain in reversed(chains)))
    month = month or next(iter(months), "")
    n_entries = sum(len(chain.entries) for chain in chains)
    return {
        "losses": site_ledger.losses,
        "months": months,
        "month": month,
        "days": _sessions_by_day(chain for chain in chains if _began(chain)[:7] == month),
        "counted": f"{n_entries:,} entries in {len(chains):,} sessions. "
        "Every entry fits the chain of digests.",
    }


def _began(chain: SessionChain) -> str:
    return chain.entries[0].time


def _sessions_by_day(chains: Iterable[SessionChain]) -> list[dict[str, Any]]:
    """Group sessions by day, the latest first, and separate those that only connect from analyses."""
    newest = sorted(chains, key=lambda chain: (_began(chain), chain.ordinal), reverse=True)
    days = []
    for date, found in groupby(newest, lambda chain: _began(chain)[:10]):
        by_use: dict[bool, list[SessionChain]] = {True: [], False: []}
        for chain in found:
            by_use[only_connection_steps(chain)].append(chain)
        connections = by_use[True]
        summary = (
            f"{len(connections):,} more sessions, which released only names, kinds of columns, counts and "
            f"signed digests: {sum(map(released_bytes, connections)):,} bytes"
        )
        days.append(
            {
                "date": date,
                "analyses": _merged_rows(by_use[False]),
                "connections": _merged_rows(connections),
                "summary": summary,
                "repeated": [*_repeated(by_use[False]), *_repeated(connections)],
            }
        )
    return days


def _equal_rows(chains: Iterable[SessionChain]) -> list[list[tuple[str | PageLink, ...]]]:
    """Group the rows of sessions that differ by their time alone, in the order of the latest one."""
    groups: dict[tuple[str | PageLink, ...], list[tuple[str | PageLink, ...]]] = {}
    for row in map(_session_row, chains):
        groups.setdefault(row[1:], []).append(row)
    return list(groups.values())


def _merged_rows(chains: Iterable[SessionChain]) -> list[tuple[str | PageLink, ...]]:
    """Return one row for equal sessions, with their number."""
    return [
        (*rows[0][:3], f"{rows[0][3]}; {len(rows):,} times" if len(rows) > 1 else rows[0][3], *rows[0][4:])
        for rows in _equal_rows(chains)
    ]


def _repeated(chains: Iterable[SessionChain]) -> list[tuple[str, list[str | PageLink]]]:
    """Return the earlier times of equal sessions, which their row leaves out."""
    return [(str(rows[0][2]), [row[0] for row in rows[1:]]) for rows in _equal_rows(chains) if len(rows) > 1]


def _session_row(chain: SessionChain) -> tuple[str | PageLink, ...]:
    return (
        PageLink(f"ledger/{chain.ordinal}", _began(chain)[11:19]),
        chain.subject.person or chain.subject.study or "not stated",
        chain.subject.formula or ", ".join(families_of(chain)) or "signed statements",
        _kinds_in_words(chain) or "nothing",
        f"{len(refusals_of(chain)):,}",
    )


def _kinds_in_words(chain: SessionChain) -> str:
    found: Counter[str] = Counter()
    for kind, n in released_kind_counts(chain).items():
        found["parts of sums over sites" if kind.endswith(", masked") else RELEASED_AS.get(kind, kind)] += n
    return "; ".join(f"{kind} ({n:,})" for kind, n in found.items())


def session_page(view: OwnerView, ordinal: int) -> PageData:
    """Return the releases of one session, array by array."""
    chain = next((chain for chain in view.site_ledger.chains if chain.ordinal == ordinal), None)
    if chain is None:
        raise PartitionError(f"there is no session {ordinal}")
    released = released_rows(chain)
    return {
        "session": chain.session,
        "analyses": group_analyses(list(audit_lines(view.site_ledger, AuditFilter(), session=chain.session))),
        "began": chain.entries[0].time if chain.entries else "never",
        "ended": chain.entries[-1].time if chain.entries else "never",
        "rounds": f"{chain.round:,}",
        "bytes": f"{released_bytes(chain):,}",
        "receipts": ", ".join(one.time for one in statements_of(chain)) or "none",
        "head": chain.head,
        "released_head": HEAD[: len(released[0])] if released else (),
        "released": released,
        "refused": [(one.time, one.step, one.rule) for one in refusals_of(chain)],
    }


def columns_page(view: OwnerView) -> PageData:
    """List the columns about which something was released, with the number of analyses."""
    return {"rows": section_data(lambda: _column_rows(view))}


def _column_rows(view: OwnerView) -> list[tuple[str | PageLink, ...]]:
    found: dict[str, dict[str, str]] = {}
    for chain in view.site_ledger.chains:
        for entry, subject in chain.described_entries():
            for name in subject.columns if entry.left else ():
                found.setdefault(name, {})[f"{chain.ordinal} {subject.formula}"] = entry.time
    return [
        (PageLink(f"columns/{number}", name), f"{len(found[name]):,}", max(found[name].values()))
        for number, name in enumerate(sorted(found))
    ]


def column_page(view: OwnerView, ordinal: int) -> PageData:
    """Show what was released about one column, to whom and why."""
    rows = _column_rows(view)
    if ordinal >= len(rows):
        raise PartitionError(f"there is no column {ordinal}")
    column = str(getattr(rows[ordinal][0], "text", ""))
    lines = list(audit_lines(view.site_ledger, AuditFilter(column=column)))
    return {"column": column, "analyses": list(reversed(group_analyses(lines)))}


def exposure_page(view: OwnerView) -> PageData:
    """Return the largest share of one row in the releases, by column."""
    return {
        "head": EXPOSURE_HEAD,
        "exposed": section_data(
            lambda: exposure_rows(exposure(open_records(view.folder, view.description), view.site_ledger))
        ),
        "notes": EXPOSURE_NOTES,
    }


def refusals_page(view: OwnerView) -> PageData:
    """Count refusals by rule, and show the private log of them."""
    return {
        "by_rule": section_data(lambda: _refused_by_rule(view)),
        "log": section_data(lambda: [line.partition(" ")[::2] for line in view.reasons()]),
    }


def _refused_by_rule(view: OwnerView) -> PageData:
    count: dict[tuple[str, str], list[str]] = {}
    for chain in view.site_ledger.chains:
        for one in refusals_of(chain):
            count.setdefault((one.rule, one.step), []).append(one.time)
    rows = [(rule, step, f"{len(times):,}", max(times)) for (rule, step), times in count.items()]
    counted = [
        f"{n:,} refusals of requests by {client:.12} depended on the data; fedstat site answer-again resets "
        "them."
        for client, n in view.site_ledger.refusals.items()
        if n
    ]
    return {"rows": sorted(rows, key=lambda row: row[3], reverse=True), "counted": counted}


# ----------------------------------------------------------------------------------------------------
# Status, approvals and policy.

ASKED: Mapping[str, tuple[Verdict, str, str]] = {
    "approve": (
        "approved",
        "Approve one run",
        "The site will answer one run of this plan, and nothing else. A release cannot be undone.",
    ),
    "deny": (
        "denied",
        "Deny",
        "The site will refuse this plan, and inform a coordinator that proposes it again. "
        "You may approve it later.",
    ),
}
"""By the last word of the address: the decision, the button, and the meaning."""
STATE_WORDS: Mapping[str, str] = {
    "passed over": "Ignored, not signed by a coordinator",
    "arrays released": "Tables and numbers released",
    "waiting": "Requests without a reply",
    "process": "Number of the process",
    "fedstat": "Version of the service",
}
NEWEST, SHOWN = 5, 300
"""Number of sessions on the first page, and of characters of a plan in a list."""


def overview_page(view: OwnerView) -> PageData:
    """Return status, waiting plans, used budgets and the latest sessions."""
    return {
        "waiting": section_data(lambda: _waiting(view)),
        "state": section_data(lambda: _state(view)),
        "stop": section_data(lambda: _stop(view)),
        "budgets": section_data(lambda: _budgets(view)),
        "sessions": section_data(
            lambda: _sessions_by_day([c for c in view.site_ledger.chains if c.entries][-NEWEST:])
        ),
    }


def _state(view: OwnerView) -> PageData:
    state = dict(view.state(view.folder))
    families = dict.fromkeys(FAMILY_WORDS.get(one, one) for one in state.pop("families", "").split(", "))
    rows = [
        (STATE_WORDS.get(name, name.capitalize()), str(value))
        for name, value in state.items()
        if name != "site"
    ]
    known = ", ".join(filter(None, families))
    rows += [("Analyses that it knows", known)] if known else []
    return {
        "fingerprint": view.fingerprint,
        "coordinator": view.description.coordinator,
        "rows": [*rows, ("Versions", f"fedstat {version('fedstat')}, Python {platform.python_version()}")],
    }


def _stop(view: OwnerView) -> list[tuple[str, str]]:
    """Return how the owner stops requests, by what they are about."""
    place, description = shlex.quote(str(view.folder)), view.description
    found = [("One waiting analysis", "deny it on the page 'Plans'")]
    found += [("Every analysis until you approve it", 'approval = "owner" in policy.toml')]
    for name in description.studies:
        found.append((f"Study {name}", f"fedstat site revoke {place} {shlex.quote(name)}"))
    found += [("The coordinator", f"fedstat site revoke {place} coordinator")]
    return [*found, ("All requests", "stop the service: Ctrl-C, or systemctl stop")]


def _budgets(view: OwnerView) -> list[PageData]:
    policy, site_ledger = view.policy, view.site_ledger
    bars = []
    if (spent := read_budget_spent(policy, site_ledger)) is not None:
        rho, total = float(Fraction(spent.rho)), float(Fraction(spent.total))
        bars.append(_usage("Privacy budget", rho, total, str(spent)))
    if most := policy.max_refusals:
        bars += [
            _usage(f"Refusals to {client:.12}", count, most, f"{count:,} of {most:,}")
            for client, count in site_ledger.refusals.items()
            if count
        ]
    if isinstance(policy.per_entity, int) and (most := policy.per_entity):
        text = f"{site_ledger.vectors:,} of {most:,}"
        bars.append(_usage("Numbers for each entity", site_ledger.vectors, most, text))
    return bars


def _usage(name: str, part: float, integer: float, text: str) -> PageData:
    """Describe a bar that shows the used part of a budget."""
    level = "full" if part >= integer else "high" if part >= 0.8 * integer else "low"
    bounds = {"part": f"{min(part, integer):.6g}", "whole": f"{integer:.6g}"}
    return {"name": name, "level": level, "text": text, **bounds}


def plans_page(view: OwnerView) -> PageData:
    """List the waiting plans, and all decisions."""
    return {
        "waiting": section_data(lambda: _waiting(view)),
        "decided": section_data(lambda: _decisions(view)),
    }


def _waiting(view: OwnerView) -> PageData:
    plans = [_plan(view, digest, plan, SHOWN) for digest, plan in view.waiting.items()]
    return {"plans": plans, "asks_owner": view.policy.approval != "auto"}


def _plan(view: OwnerView, digest: str, plan: AnalysisPlan, width: int | None = None) -> PageData:
    """Describe a plan; texts longer than `width` are cut."""
    try:
        site_ledger = view.site_ledger
    except SecurityError:  # the sections on the ledger show the problem
        site_ledger = SiteLedger()
    found = summarize_plan(digest, plan, view.policy, site_ledger, view.plans)
    facts = [(name, text if width is None else shorten(text, width)) for name, text in found.facts]
    title = formula_in_words(plan.formula)
    return {
        "digest": digest,
        "call": plan.call if width is None else shorten(plan.call, width),
        "title": title if width is None else shorten(title, width),
        "plain": found.plain,
        "facts": facts,
    }


def _decisions(view: OwnerView) -> list[tuple[str | PageLink, ...]]:
    return [
        (
            utc_text(one.when),
            one.verdict,
            one.who,
            PageLink(f"plans/{one.plan}", f"{one.plan:.12}", is_code=True),
            became,
        )
        for one, became in view.decisions
    ]


def plan_page(view: OwnerView, digest: str) -> PageData:
    """Show one complete plan, as 'fedstat site pending' does, with the possible decisions."""
    found = view.plans.find(digest)
    return {
        "digest": digest,
        "plan": section_data(lambda: _described(view, found)),
        "decided": section_data(
            lambda: [
                (f"{one.verdict.capitalize()} by {one.who} on {utc_text(one.when)}", became)
                for one, became in view.decisions
                if one.plan == digest
            ]
        ),
        "decisions": [(word, button) for word, (_, button, _) in ASKED.items()],
    }


def _described(view: OwnerView, found: AnalysisPlan) -> PageData:
    """Group the lines that describe a plan into lists and named paragraphs."""
    return {
        "summary": _plan(view, found.digest, found),
        "description": [
            (True, [line.strip() for line in lines])
            if is_list
            else (False, [line.partition(": " if ": " in line else ":")[::2] for line in lines])
            for is_list, lines in groupby(describe_plan(found), lambda line: line.startswith("  "))
        ],
    }


def decision_page(view: OwnerView, digest: str, word: str, token: str) -> PageData:
    """Request a confirmation of a decision; this page changes nothing."""
    _, button, meaning = ASKED[word]
    plan = _plan(view, digest, view.plans.find(digest))
    return {
        "digest": digest,
        "plan": plan,
        "word": word,
        "button": button,
        "meaning": meaning,
        "token": token,
    }


def policy_page(view: OwnerView) -> PageData:
    """Return who can learn what under the policy, and the value of each rule."""
    found = view.policy
    looser = found.looser_than_strict()
    return {
        "looser": section_data(lambda: [toml_line(rule, getattr(found, rule)) for rule in looser]),
        "threats": section_data(
            lambda: [
                (party, PARTIES[party], [(one.line, one.learns) for one in threats])
                for party, threats in groupby(threats_under(found), lambda one: one.party)
            ]
        ),
        "rules": section_data(lambda: _rules(found, looser)),
        "changes": section_data(lambda: policy_rows(view.site_ledger)),
    }


def policy_rows(site_ledger: SiteLedger) -> list[tuple[str, ...]]:
    """Return one row for each change of the policy, the latest first."""
    return [
        (utc_text(one.when), "; ".join(one.weaker) or "none", "; ".join(one.stricter) or "none")
        for one in reversed(policy_changes(site_ledger.policies))
    ]


def _rules(found: Policy, looser: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [
        (
            rule.comment,
            _value(getattr(found, name)),
            _value(rule.strict),
            "yes" if name in looser else "",
            name,
        )
        for name, rule in rules_of(type(found)).items()
    ]


def _value(value: object) -> str:
    if isinstance(value, frozenset):
        return ", ".join(sorted(value)) or "none"
    if isinstance(value, Budget):
        colluding = "" if value.colluding is None else f", at most {value.colluding} colluding"
        return f"epsilon {value.epsilon:g}, delta {value.delta:g}{colluding}"
    words = {"None": "no limit", "True": "yes", "False": "no"}
    return words.get(str(value), str(value))


def check_page(view: OwnerView) -> PageData:
    """Return the problems of the site, and the output of 'fedstat site check'."""
    problems, text = view.examined()
    return {"problems": section_data(lambda: problems), "shown": section_data(lambda: text)}
