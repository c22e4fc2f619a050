"""Pages of what left, and of what was refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from fedstat.errors import PartitionError
from fedstat.federation.account.chain import Chain, SiteAccount
from fedstat.operator.page.frame import note, section
from fedstat.operator.page.markup import Markup, joined, link, pairs, table, tag
from fedstat.operator.page.owner import OwnerView
from fedstat.operator.page.passed import (
    HEAD,
    RIGHT,
    arrays_left,
    bytes_left,
    families_of,
    kinds_left,
    only_agreed,
    refusals_of,
    statements_of,
)


def ledger(view: OwnerView, root: str, month: str = "") -> Iterator[Markup]:
    """Show the sessions of a month, by default the newest, day by day."""
    account = view.account
    for when, reason in account.losses:
        yield tag(
            "p", f"Its owner declared on {when} that the account before was lost: {reason}", class_="problem"
        )
    chains = used(account)
    if not chains:
        yield note("The site has not answered anything yet.")
        return
    months = list(dict.fromkeys(_began(chain)[:7] for chain in chains))
    month = month or months[-1]
    if len(months) > 1:
        words = [
            link(f"{root}ledger/{one}", one, **({"aria_current": "page"} if one == month else {}))
            for one in reversed(months)
        ]
        yield tag("nav", *words, class_="months")
    here = [chain for chain in chains if _began(chain)[:7] == month]
    yield from sessions(here, root)
    n_entries = sum(len(chain.links) for chain in chains)
    yield note(f"{n_entries:,} entries in {len(chains):,} sessions. Every entry fits the chain of digests.")


def used(account: SiteAccount) -> list[Chain]:
    """Sessions in which something passed."""
    return [chain for chain in account.chains if chain.links]


def _began(chain: Chain) -> str:
    return chain.links[0].time


def sessions(chains: Iterable[Chain], root: str) -> Iterator[Markup]:
    """List sessions day by day, the newest first."""
    newest = sorted(chains, key=lambda chain: (_began(chain), chain.ordinal), reverse=True)
    for day, found in groupby(newest, lambda chain: _began(chain)[:10]):
        by_use: dict[bool, list[Chain]] = {}
        for chain in found:
            by_use.setdefault(only_agreed(chain), []).append(chain)
        yield tag("h3", day)
        if analyses := by_use.get(False):
            yield _lines(analyses, root)
        if agreed := by_use.get(True):
            told = (
                f"{len(agreed):,} more, in which only names, kinds of columns, counts and signed heads were "
                f"told: {sum(map(bytes_left, agreed)):,} bytes"
            )
            yield tag("details", tag("summary", told), _lines(agreed, root))
    if not newest:
        yield note("The site has not answered anything yet.")


def _lines(chains: Iterable[Chain], root: str) -> Markup:
    rows = [
        (
            link(f"{root}ledger/{chain.ordinal}", _began(chain)[11:19]),
            ", ".join(families_of(chain)) or "receipts",
            "; ".join(f"{kind} ({n:,})" for kind, n in kinds_left(chain).items()) or "nothing",
            f"{chain.round:,}",
            f"{bytes_left(chain):,}",
            f"{len(refusals_of(chain)):,}",
            f"{len(statements_of(chain)):,}",
        )
        for chain in chains
    ]
    head = ("UTC", "asked for", "left (messages)", "rounds", "bytes", "refused", "receipts")
    return table(head, rows, range(3, 7), "sessions")


def session(view: OwnerView, root: str, ordinal: int) -> Iterator[Markup]:
    """Show what left in one session, array by array."""
    chain = next((chain for chain in view.account.chains if chain.ordinal == ordinal), None)
    if chain is None:
        raise PartitionError(f"there is no session {ordinal}")
    links = chain.links
    yield pairs(
        [
            (
                "Session",
                tag("code", chain.session) if chain.session else "messages that belong to no session",
            ),
            ("To", "the coordinator"),
            ("From", links[0].time if links else "never"),
            ("Until", links[-1].time if links else "never"),
            ("Rounds", f"{chain.round:,}"),
            ("Bytes that left", f"{bytes_left(chain):,}"),
            ("Receipts signed", ", ".join(one.time for one in statements_of(chain)) or "none"),
            ("Digest of the last entry", tag("code", chain.head)),
        ]
    )
    rows = arrays_left(chain)
    if rows:
        yield table(HEAD[: len(rows[0])], rows, RIGHT, "arrays")
    refused = [(one.time, one.entry.step, one.entry.rule) for one in refusals_of(chain)]
    if refused:
        yield joined(tag("h2", "Refused"), table(("when", "step", "rule"), refused))


def refusals(view: OwnerView, root: str) -> Iterator[Markup]:
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
        yield note("Nothing was refused.")
    for asker, n in view.account.refusals.items():
        if n:
            yield note(
                f"{n:,} of those asked by {asker:.12} depended on rows; "
                "fedstat site answer-again forgives them."
            )


def _reasons(view: OwnerView) -> Iterator[Markup]:
    lines = view.reasons()
    if lines:
        yield note("Why questions were refused because of the records. Nobody else is told.")
        yield table(("when", "why"), [line.partition(" ")[::2] for line in lines], kind="log")
    else:
        yield note("It is empty.")
