"""The pages that the owner of a site sees: functions from the site to HTML."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import fields
from fractions import Fraction
from importlib.metadata import version
from itertools import groupby
from textwrap import shorten

from fedstat.federation.account.head import told
from fedstat.federation.door.owner.charging import budget_spent
from fedstat.federation.door.owner.claims import PARTIES, threats_under, written
from fedstat.federation.door.owner.plan import AnalysisPlan, described
from fedstat.federation.door.owner.policy import Budget, Policy
from fedstat.operator.page.frame import note, section
from fedstat.operator.page.ledger_views import sessions, used
from fedstat.operator.page.markup import Markup, bar, joined, link, listed, pairs, table, tag
from fedstat.operator.page.owner import OwnerView, Verdict

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


def overview(view: OwnerView, root: str) -> Iterator[Markup]:
    """Show how the site stands, what waits, what is used up of its budgets, and the newest sessions."""
    yield section("Waiting for you", lambda: _plans_waiting(view, root))
    yield section("How it stands", lambda: [pairs(_state(view))])
    yield section("Used of what the policy allows", lambda: _budgets(view))
    yield section("Newest sessions", lambda: sessions(used(view.account)[-NEWEST:], root))


def _state(view: OwnerView) -> Iterator[tuple[str, str]]:
    yield "Fingerprint", tag("code", view.fingerprint)
    yield "Coordinator", tag("code", view.description.coordinator or "none: nobody's questions are answered")
    for name, value in view.state(view.folder).items():
        if name != "site":
            yield name.capitalize(), str(value)
    yield "Versions", f"fedstat {version('fedstat')}, Python {platform.python_version()}"


def _budgets(view: OwnerView) -> Iterator[Markup]:
    policy, account = view.policy, view.account
    rows: list[tuple[str, str]] = []
    if (spent := budget_spent(policy, account)) is not None:
        rho, total = float(Fraction(spent.rho)), float(Fraction(spent.total))
        rows.append(("Privacy budget", bar(rho, total, str(spent))))
    if policy.max_refusals:
        most = policy.max_refusals
        rows += [
            (f"Refusals, asked by {asker:.12}", bar(count, most, f"{count:,} of {most:,}"))
            for asker, count in account.refusals.items()
            if count
        ]
    if isinstance(policy.per_entity, int) and policy.per_entity:
        most = policy.per_entity
        said = f"{account.vectors:,} of {most:,}"
        rows.append(("Numbers for each entity", bar(account.vectors, most, said)))
    if rows:
        yield pairs(rows)
    else:
        yield note(
            "Nothing is used up: the policy has no privacy budget, and no refusal was counted. "
            "[privacy] in policy.toml sets one."
        )


def plans(view: OwnerView, root: str) -> Iterator[Markup]:
    """List the plans that wait, and all decisions."""
    yield section("Waiting for you", lambda: _plans_waiting(view, root))
    yield section("Decided", lambda: _decisions(view, root))


def _plans_waiting(view: OwnerView, root: str) -> Iterator[Markup]:
    found = view.waiting
    for digest, plan in found.items():
        yield tag(
            "article",
            tag("h3", link(f"{root}plans/{digest}", shorten(plan.call, SHOWN))),
            pairs(
                [
                    ("Formula", tag("code", shorten(plan.formula, SHOWN))),
                    ("Columns", shorten(", ".join(plan.columns) or "none", SHOWN)),
                    ("Leaves at most", _numbers(plan)),
                    ("Plan", tag("code", f"{digest:.12}")),
                ]
            ),
            class_="plan",
        )
    if not found:
        yield note("No plan waits.")
        if view.policy.approval == "auto":
            yield note('The policy asks nobody; approval = "owner" in policy.toml has every analysis wait.')


def _numbers(plan: AnalysisPlan) -> str:
    return "; ".join(f"{n:,} numbers ({kind})" for kind, n in plan.numbers().items() if n) or "no numbers"


def _decisions(view: OwnerView, root: str) -> Iterator[Markup]:
    rows = [
        (
            told(one.when),
            one.verdict,
            one.who,
            link(f"{root}plans/{one.plan}", tag("code", f"{one.plan:.12}")),
            became,
        )
        for one, became in view.decisions
    ]
    if rows:
        yield table(("when", "decision", "by", "plan", ""), rows)
    else:
        yield note("Nothing was decided yet.")


def plan(view: OwnerView, root: str, digest: str) -> Iterator[Markup]:
    """Show one plan whole, as 'fedstat site pending' does, with what can be decided about it."""
    found = view.plans.find(digest)
    here = f"{root}plans/{digest}"
    yield section("", lambda: [_described(view, digest, found)])
    yield section("", lambda: _decided(view, digest))
    yield tag(
        "p",
        *(link(f"{here}/{word}", f"{ASKED[word][1]} ...", class_=f"button {word}") for word in ASKED),
        class_="buttons",
    )


def _decided(view: OwnerView, digest: str) -> Iterator[Markup]:
    for one, became in view.decisions:
        if one.plan == digest:
            yield tag(
                "p",
                tag("b", f"{one.verdict.capitalize()} by {one.who} on {told(one.when)}"),
                f": it {became}.",
            )


def _described(view: OwnerView, digest: str, found: AnalysisPlan) -> Markup:
    parts: list[Markup] = [
        pairs(
            [
                ("Plan", tag("code", digest)),
                ("Asked by the coordinator", tag("code", view.description.coordinator or "none is trusted")),
            ]
        )
    ]
    for is_list, lines in groupby(described(found), lambda line: line.startswith("  ")):
        if is_list:
            parts.append(listed(line.strip() for line in lines))
        else:
            parts += [tag("p", tag("b", f"{name}: "), text) for name, _, text in map(_split, lines)]
    return joined(*parts)


def _split(line: str) -> tuple[str, str, str]:
    return line.partition(": ") if ": " in line else line.partition(":")


def decide(view: OwnerView, root: str, digest: str, word: str, token: str) -> Iterator[Markup]:
    """Ask whether a decision is meant; nothing is decided by looking at this page."""
    found = view.plans.find(digest)
    _, button, meaning = ASKED[word]
    here = f"{root}plans/{digest}"
    yield pairs(
        [
            ("Plan", tag("code", digest)),
            ("Analysis", found.call),
            ("Formula", tag("code", found.formula)),
            ("Columns", ", ".join(found.columns) or "none"),
            ("Leaves at most", _numbers(found)),
        ]
    )
    yield tag("p", meaning)
    yield tag(
        "form",
        tag("input", type="hidden", name="token", value=token),
        tag("button", button, type="submit", class_=f"button {word}"),
        link(here, "Back to the plan", class_="button"),
        method="post",
        action=f"{here}/{word}",
        class_="buttons",
    )


def policy(view: OwnerView, root: str) -> Iterator[Markup]:
    """Say in words who can learn what under the policy, and rule by rule what it is."""
    found = view.policy
    looser = found.looser_than_strict()
    yield section("Looser than strict", lambda: _looser(found, looser))
    yield section("Who can learn what", lambda: _threats(found))
    yield section("Rule by rule", lambda: _rules(found, looser))


def _looser(found: Policy, looser: tuple[str, ...]) -> Iterator[Markup]:
    if looser:
        yield listed(tag("code", written(found, rule)) for rule in looser)
    else:
        yield note("It is as strict as a site starts.")


def _threats(found: Policy) -> Iterator[Markup]:
    for party, threats in groupby(threats_under(found), lambda one: one.party):
        yield joined(
            tag("h3", party),
            note(PARTIES[party]),
            listed(
                joined(tag("code", one.line), ": ", one.learns) if one.line else one.learns for one in threats
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


def check(view: OwnerView, root: str) -> Iterator[Markup]:
    """Name what is not in order, and show what 'fedstat site check' prints."""
    problems, text = view.examined()
    yield section("Problems" if problems else "In order", lambda: _problems(tuple(problems)))
    yield section("What fedstat site check shows", lambda: [tag("pre", text)])


def _problems(problems: tuple[str, ...]) -> Iterator[Markup]:
    if problems:
        yield tag("ul", *(tag("li", one, class_="problem") for one in problems))
    else:
        yield note("Nothing is wrong with the folder, the records, the account or the keys.")
