"""Printed account of what left a site, from its own chain of entries; the declaration that it was lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fedstat.errors import PartitionError
from fedstat.federation.account.chain import Chain
from fedstat.federation.account.entry import REFUSAL, Entry
from fedstat.federation.account.ledger_file import read_account
from fedstat.federation.account.ledger_lines import LEDGER
from fedstat.federation.account.link import LINK_FIELDS
from fedstat.federation.account.loss import declare_loss
from fedstat.federation.carry.site_folder import load_identity, open_records, read_description, unfit
from fedstat.operator.screen import columns, heading

HEAD = ("step", "array", "kind", "masked", "messages", "largest", "bytes", "entities")


def ledger(folder: Path, session: str | None, as_json: bool) -> int:
    """Show what left a site, to whom and when, and whether the account is whole."""
    name = read_description(folder).name
    account = read_account(folder, name, load_identity(folder).public)
    for when, reason in account.losses if not as_json else ():
        print(f"Its owner declared on {when} that the account before was lost: {reason}\n")
    for decision in account.decisions.values() if not as_json else ():
        print(f"{decision}\n")
    chains = account.chains
    if not chains:
        print(f"{name} has not answered anything yet.")
        return 0
    if session is not None:
        chains = tuple(chain for chain in chains if chain.session == session)
        if not chains:
            raise PartitionError(f"'{folder / LEDGER}' has no session '{session}'")
    if as_json:
        for chain in chains:
            for link in chain.links:
                named = dict(zip(LINK_FIELDS, link.signed, strict=True))
                print(json.dumps({"session": chain.session} | named))
        return 0
    print(heading(f"What left {name}"))
    for chain in chains:
        _show(chain)
    n_entries = sum(len(chain.links) for chain in chains)
    print(f"{n_entries:,} entries in {len(chains)} sessions. Every entry fits the chain of digests.")
    return 0


def declare(folder: Path, reason: str) -> int:
    """Declare that a site's account was lost, and say what became of it."""
    description = read_description(folder)
    identity = load_identity(folder)
    fits = partial(unfit, open_records(folder, description), identity)
    loss = declare_loss(folder, description.name, identity, reason, fits)
    print(heading(f"Account of {description.name}"))
    print(f"  Found: {loss.found}\n")
    if loss.files:
        print(f"  Set aside in '{loss.aside}': {', '.join(loss.files)}.")
    if loss.forgotten:
        print(
            "  Earlier answers are not held against new ones: two that differ by a few rows may both leave.\n"
        )
    print("The loss is declared. It stands in the account, and every receipt tells the others of it.")
    return 0


def _show(chain: Chain) -> None:
    links = chain.links
    if not links:
        return
    what = f"Session {chain.session}" if chain.session else "Messages that belong to no session"
    print(f"\n{what}, to the coordinator, {links[0].time} to {links[-1].time}\n")
    by_array: dict[tuple[str, str, str, bool], list[Entry]] = {}
    for entry in (link.entry for link in links if link.entry.left):
        by_array.setdefault((entry.step, entry.array, entry.kind, entry.masked), []).append(entry)
    rows = [_row(key, found) for key, found in by_array.items()]
    if rows:
        print(columns([HEAD, *rows], head=True, right=(4, 5, 6, 7)))
    for link in links:
        if link.entry.kind == REFUSAL:
            print(f"  refused: step '{link.entry.step}' by {link.entry.rule}, {link.time}")
    print(f"\n  digest of the last entry  {chain.head}\n")


def _row(key: tuple[str, str, str, bool], found: Sequence[Entry]) -> tuple[str, ...]:
    step, array, kind, masked = key
    largest = max((entry.shape for entry in found), key=lambda shape: (len(shape), shape))
    return (
        step,
        array,
        kind,
        "yes" if masked else "",
        f"{len(found):,}",
        " x ".join(map(str, largest)) or "1",
        f"{sum(entry.bytes for entry in found):,}",
        f"{max(entry.entities for entry in found):,}",
    )
