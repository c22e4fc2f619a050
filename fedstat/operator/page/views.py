"""The pages of the owner of a site: status, approvals, policy, releases and refusals, as HTML."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from fractions import Fraction
from importlib.metadata import version
from itertools import groupby
from textwrap import shorten

from fedstat.errors import PartitionError
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.audit.event_log import SessionChain, SiteLedger
from fedstat.federation.disclosure.approval import AnalysisPlan, describe_plan
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.disclosure.privacy_budget import read_budget_spent
from fedstat.federation.disclosure.threat_statements import PARTIES, policy_line, threats_under
from fedstat.operator.page.markup import (
    Markup,
    definition_list,
    html_element,
    item_list,
    join_markup,
    link,
    paragraph,
    section,
    table,
    usage_bar,
)
from fedstat.operator.page.owner_view import OwnerView, Verdict
from fedstat.operator.page.released_arrays import (
    HEAD,
    RIGHT,
    families_of,
    only_connection_steps,
    refusals_of,
    released_bytes,
    released_kind_counts,
    released_rows,
    statements_of,
)

# ----------------------------------------------------------------------------------------------------
# Pages of what left, and of what was refused.


def ledger_page(view: OwnerView, root: str, month: str = "") -> Iterator[Markup]:
    """Show the sessions of a month, by default the newest, day by day."""
    account = view.account
    for when, reason in account.losses:
        yield html_element(
            "p", f"Its owner declared on {when} that the account before was lost: {reason}", class_="problem"
        )
    chains = sessions_with_releases(account)
    if not chains:
        yield paragraph("The site has not answered anything yet.")
        return
    months = list(dict.fromkeys(_began(chain)[:7] for chain in chains))
    month = month or months[-1]
    if len(months) > 1:
        words = [
            link(f"{root}ledger/{one}", one, **({"aria_current": "page"} if one == month else {}))
            for one in reversed(months)
        ]
        yield html_element("nav", *words, class_="months")
    here = [chain for chain in chains if _began(chain)[:7] == month]
    yield from session_list(here, root)
    n_entries = sum(len(chain.entries) for chain in chains)
    yield paragraph(
        f"{n_entries:,} entries in {len(chains):,} sessions. Every entry fits the chain of digests."
    )


def sessions_with_releases(account: SiteLedger) -> list[SessionChain]:
    """Sessions in which something passed."""
    return [chain for chain in account.chains if chain.entries]


def _began(chain: SessionChain) -> str:
    return chain.entries[0].time


def session_list(chains: Iterable[SessionChain], root: str) -> Iterator[Markup]:
    """List sessions day by day, the newest first."""
    newest = sorted(chains, key=lambda chain: (_began(chain), chain.ordinal), reverse=True)
    for day, found in groupby(newest, lambda chain: _began(chain)[:10]):
        by_use: dict[bool, list[SessionChain]] = {}
        for chain in found:
            by_use.setdefault(only_connection_steps(chain), []).append(chain)
        yield html_element("h3", day)
        if analyses := by_use.get(False):
            yield _lines(analyses, root)
        if agreed := by_use.get(True):
            told = (
                f"{len(agreed):,} more, in which only names, kinds of columns, counts and signed heads were "
                f"told: {sum(map(released_bytes, agreed)):,} bytes"
            )
            yield html_element("details", html_element("summary", told), _lines(agreed, root))
    if not newest:
        yield paragraph("The site has not answered anything yet.")


def _lines(chains: Iterable[SessionChain], root: str) -> Markup:
    rows = [
        (
            link(f"{root}ledger/{chain.ordinal}", _began(chain)[11:19]),
            ", ".join(families_of(chain)) or "receipts",
            "; ".join(f"{kind} ({n:,})" for kind, n in released_kind_counts(chain).items()) or "nothing",
            f"{chain.round:,}",
            f"{released_bytes(chain):,}",
            f"{len(refusals_of(chain)):,}",
            f"{len(statements_of(chain)):,}",
        )
        for chain in chains
    ]
    head = ("UTC", "asked for", "left (messages)", "rounds", "bytes", "refused", "receipts")
    return table(head, rows, range(3, 7), "sessions")


def session_page(view: OwnerView, root: str, ordinal: int) -> Iterator[Markup]:
    """Show what left in one session, array by array."""
    chain = next((chain for chain in view.account.chains if chain.ordinal == ordinal), None)
    if chain is None:
        raise PartitionError(f"there is no session {ordinal}")
    links = chain.entries
    yield definition_list(
        [
            (
                "Session",
                html_element("code", chain.session)
                if chain.session
                else "messages that belong to no session",
            ),
            ("To", "the coordinator"),
            ("From", links[0].time if links else "never"),
            ("Until", links[-1].time if links else "never"),
            ("Rounds", f"{chain.round:,}"),
            ("Bytes that left", f"{released_bytes(chain):,}"),
            ("Receipts signed", ", ".join(one.time for one in statements_of(chain)) or "none"),
            ("Digest of the last entry", html_element("code", chain.head)),
        ]
    )
    rows = released_rows(chain)
    if rows:
        yield table(HEAD[: len(rows[0])], rows, RIGHT, "arrays")
    refused = [(one.time, one.entry.step, one.entry.rule) for one in refusals_of(chain)]
    if refused:
        yield join_markup(html_element("h2", "Refused"), table(("when", "step", "rule"), refused))


def refusals_page(view: OwnerView, root: str) -> Iterator[Markup]:
    """Count refusals by rule, and show the owner's own log of them."""
    yield section("By rule", lambda: _refused_by_rule(view))
    yield section("The private log, newest first", lambda: _reasons(view))


def _refused_by_rule(view: OwnerView) -> Iterator[Markup]:
    count: dict[tuple[str, str], list[str]] = {}
    for chain in view.account.chains:
        for one in refusals_of(chain):
            count.setdefault((one.entry.rule, one.entry.step), []).append(one.time)
    rows = [(rule, step, f"{len(times):,}", max(times)) for (rule, step), times in count.items()]
    if rows:
        rows.sort(key=lambda row: row[3], reverse=True)
        yield table(("rule", "step", "times", "last"), rows, [2])
    else:
        yield paragraph("Nothing was refused.")
    for asker, n in view.account.refusals.items():
        if n:
            yield paragraph(
                f"{n:,} of those asked by {asker:.12} depended on rows; "
                "fedstat site answer-again forgives them."
            )


def _reasons(view: OwnerView) -> Iterator[Markup]:
    lines = view.reasons()
    if lines:
        yield paragraph("Why questions were refused because of the records. Nobody else is told.")
        yield table(("when", "why"), [line.partition(" ")[::2] for line in lines], kind="log")
    else:
        yield paragraph("It is empty.")


# ----------------------------------------------------------------------------------------------------
# The pages that the owner of a site sees: functions from the site to HTML.

ASKED: Mapping[str, tuple[Verdict, str, str]] = {
    "approve": (
        "approved",
        "Approve one run",
        "The site answers one run of this plan, and nothing beyond it. What leaves cannot be taken back.",
    ),
    "deny": (
        "denied",
        "Deny",
        "The site does not answer this plan, and says so to whoever proposes it again. "
        "You may approve it later.",
    ),
}
"""By the last word of the address: what is decided, the button, and what it means."""
NEWEST, SHOWN = 5, 300
"""Sessions on the first page, and letters of a plan before it is opened."""


def overview_page(view: OwnerView, root: str) -> Iterator[Markup]:
    """Show how the site stands, what waits, what is used up of its budgets, and the newest sessions."""
    yield section("Waiting for you", lambda: _plans_waiting(view, root))
    yield section("How it stands", lambda: [definition_list(_state(view))])
    yield section("Used of what the policy allows", lambda: _budgets(view))
    yield section(
        "Newest sessions", lambda: session_list(sessions_with_releases(view.account)[-NEWEST:], root)
    )


def _state(view: OwnerView) -> Iterator[tuple[str, str]]:
    yield "Fingerprint", html_element("code", view.fingerprint)
    yield (
        "Coordinator",
        html_element("code", view.description.coordinator or "none: nobody's questions are answered"),
    )
    for name, value in view.state(view.folder).items():
        if name != "site":
            yield name.capitalize(), str(value)
    yield "Versions", f"fedstat {version('fedstat')}, Python {platform.python_version()}"


def _budgets(view: OwnerView) -> Iterator[Markup]:
    policy, account = view.policy, view.account
    rows: list[tuple[str, str]] = []
    if (spent := read_budget_spent(policy, account)) is not None:
        rho, total = float(Fraction(spent.rho)), float(Fraction(spent.total))
        rows.append(("Privacy budget", usage_bar(rho, total, str(spent))))
    if policy.max_refusals:
        most = policy.max_refusals
        rows += [
            (f"Refusals, asked by {asker:.12}", usage_bar(count, most, f"{count:,} of {most:,}"))
            for asker, count in account.refusals.items()
            if count
        ]
    if isinstance(policy.per_entity, int) and policy.per_entity:
        most = policy.per_entity
        said = f"{account.vectors:,} of {most:,}"
        rows.append(("Numbers for each entity", usage_bar(account.vectors, most, said)))
    if rows:
        yield definition_list(rows)
    else:
        yield paragraph(
            "Nothing is used up: the policy has no privacy budget, and no refusal was counted. "
            "[privacy] in policy.toml sets one."
        )


def plans_page(view: OwnerView, root: str) -> Iterator[Markup]:
    """List the plans that wait, and all decisions."""
    yield section("Waiting for you", lambda: _plans_waiting(view, root))
    yield section("Decided", lambda: _decisions(view, root))


def _plans_waiting(view: OwnerView, root: str) -> Iterator[Markup]:
    found = view.waiting
    for digest, plan in found.items():
        yield html_element(
            "article",
            html_element("h3", link(f"{root}plans/{digest}", shorten(plan.call, SHOWN))),
            definition_list(
                [
                    ("Formula", html_element("code", shorten(plan.formula, SHOWN))),
                    ("Columns", shorten(", ".join(plan.columns) or "none", SHOWN)),
                    ("Leaves at most", _numbers(plan)),
                    ("Plan", html_element("code", f"{digest:.12}")),
                ]
            ),
            class_="plan",
        )
    if not found:
        yield paragraph("No plan waits.")
        if view.policy.approval == "auto":
            yield paragraph(
                'The policy asks nobody; approval = "owner" in policy.toml has every analysis wait.'
            )


def _numbers(plan: AnalysisPlan) -> str:
    return "; ".join(f"{n:,} numbers ({kind})" for kind, n in plan.numbers().items() if n) or "no numbers"


def _decisions(view: OwnerView, root: str) -> Iterator[Markup]:
    rows = [
        (
            utc_text(one.when),
            one.verdict,
            one.who,
            link(f"{root}plans/{one.plan}", html_element("code", f"{one.plan:.12}")),
            became,
        )
        for one, became in view.decisions
    ]
    if rows:
        yield table(("when", "decision", "by", "plan", ""), rows)
    else:
        yield paragraph("Nothing was decided yet.")


def plan_page(view: OwnerView, root: str, digest: str) -> Iterator[Markup]:
    """Show one plan whole, as 'fedstat site pending' does, with what can be decided about it."""
    found = view.plans.find(digest)
    here = f"{root}plans/{digest}"
    yield section("", lambda: [_described(view, digest, found)])
    yield section("", lambda: _decided(view, digest))
    yield html_element(
        "p",
        *(link(f"{here}/{word}", f"{ASKED[word][1]} ...", class_=f"button {word}") for word in ASKED),
        class_="buttons",
    )


def _decided(view: OwnerView, digest: str) -> Iterator[Markup]:
    for one, became in view.decisions:
        if one.plan == digest:
            yield html_element(
                "p",
                html_element("b", f"{one.verdict.capitalize()} by {one.who} on {utc_text(one.when)}"),
                f": it {became}.",
            )


def _described(view: OwnerView, digest: str, found: AnalysisPlan) -> Markup:
    parts: list[Markup] = [
        definition_list(
            [
                ("Plan", html_element("code", digest)),
                (
                    "Asked by the coordinator",
                    html_element("code", view.description.coordinator or "none is trusted"),
                ),
            ]
        )
    ]
    for is_list, lines in groupby(describe_plan(found), lambda line: line.startswith("  ")):
        if is_list:
            parts.append(item_list(line.strip() for line in lines))
        else:
            parts += [
                html_element("p", html_element("b", f"{name}: "), text)
                for name, _, text in map(_split, lines)
            ]
    return join_markup(*parts)


def _split(line: str) -> tuple[str, str, str]:
    return line.partition(": ") if ": " in line else line.partition(":")


def decision_page(view: OwnerView, root: str, digest: str, word: str, token: str) -> Iterator[Markup]:
    """Ask whether a decision is meant; nothing is decided by looking at this page."""
    found = view.plans.find(digest)
    _, button, meaning = ASKED[word]
    here = f"{root}plans/{digest}"
    yield definition_list(
        [
            ("Plan", html_element("code", digest)),
            ("Analysis", found.call),
            ("Formula", html_element("code", found.formula)),
            ("Columns", ", ".join(found.columns) or "none"),
            ("Leaves at most", _numbers(found)),
        ]
    )
    yield html_element("p", meaning)
    yield html_element(
        "form",
        html_element("input", type="hidden", name="token", value=token),
        html_element("button", button, type="submit", class_=f"button {word}"),
        link(here, "Back to the plan", class_="button"),
        method="post",
        action=f"{here}/{word}",
        class_="buttons",
    )


def policy_page(view: OwnerView, root: str) -> Iterator[Markup]:
    """Say in words who can learn what under the policy, and rule by rule what it is."""
    found = view.policy
    looser = found.looser_than_strict()
    yield section("Looser than strict", lambda: _looser(found, looser))
    yield section("Who can learn what", lambda: _threats(found))
    yield section("Rule by rule", lambda: _rules(found, looser))


def _looser(found: Policy, looser: tuple[str, ...]) -> Iterator[Markup]:
    if looser:
        yield item_list(html_element("code", policy_line(found, rule)) for rule in looser)
    else:
        yield paragraph("It is as strict as a site starts.")


def _threats(found: Policy) -> Iterator[Markup]:
    for party, threats in groupby(threats_under(found), lambda one: one.party):
        yield join_markup(
            html_element("h3", party),
            paragraph(PARTIES[party]),
            item_list(
                join_markup(html_element("code", one.line), ": ", one.learns) if one.line else one.learns
                for one in threats
            ),
        )


def _rules(found: Policy, looser: tuple[str, ...]) -> Iterator[Markup]:
    strict = Policy.strict()
    rows = [
        (rule, _value(found, rule), _value(strict, rule), "looser" if rule in looser else "")
        for rule in (one.name for one in fields(found))
    ]
    yield table(("rule", "here", "strict", ""), rows)


def _value(found: Policy, rule: str) -> str:
    value = getattr(found, rule)
    if isinstance(value, frozenset):
        return ", ".join(sorted(value)) or "none"
    if isinstance(value, Budget):
        return f"epsilon {value.epsilon:g}, delta {value.delta:g}"
    return "off" if value is None else str(value).lower()


def check_page(view: OwnerView, root: str) -> Iterator[Markup]:
    """Name what is not in order, and show what 'fedstat site check' prints."""
    problems, text = view.examined()
    yield section("Problems" if problems else "In order", lambda: _problems(tuple(problems)))
    yield section("What fedstat site check shows", lambda: [html_element("pre", text)])


def _problems(problems: tuple[str, ...]) -> Iterator[Markup]:
    if problems:
        yield html_element("ul", *(html_element("li", one, class_="problem") for one in problems))
    else:
        yield paragraph("Nothing is wrong with the folder, the records, the account or the keys.")
