"""Printed account of what left a site, from its own chain of entries; the declaration that it was lost."""

from __future__ import annotations

import json
from fractions import Fraction
from functools import partial
from pathlib import Path

from fedstat.errors import PartitionError
from fedstat.federation.account.chain import Chain
from fedstat.federation.account.ledger_file import read_account
from fedstat.federation.account.ledger_lines import LEDGER
from fedstat.federation.account.loss import declare_loss
from fedstat.federation.carry.site_folder import (
    POLICY,
    load_identity,
    open_records,
    read_description,
    read_site_policy,
    unfit,
)
from fedstat.federation.door.owner.charging import budget_spent
from fedstat.operator.page.passed import HEAD, RIGHT, arrays_left, refusals_of
from fedstat.operator.writing.screen import columns, heading


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
                print(json.dumps({"session": chain.session} | link.named))
        return 0
    print(heading(f"What left {name}"))
    if (spent := budget_spent(read_site_policy(folder), account)) is not None:
        print(f"Of its privacy budget {spent}.")
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
    budget = read_site_policy(folder).privacy
    whole = Fraction(0) if budget is None else budget.rho
    loss = declare_loss(folder, description.name, identity, reason, fits, whole)
    print(heading(f"Account of {description.name}"))
    print(f"  Found: {loss.found}\n")
    if loss.files:
        print(f"  Set aside in '{loss.aside}': {', '.join(loss.files)}.")
    if loss.forgotten:
        print(
            "  Earlier answers are not held against new ones: two that differ by a few rows may both leave.\n"
        )
    if loss.charged:
        print(
            "  What was charged to the privacy budget is not known any more, and all of it counts as spent: "
            f"more is\n  answered where a larger epsilon stands in '{folder / POLICY}'.\n"
        )
    print("The loss is declared. It stands in the account, and every receipt tells the others of it.")
    return 0


def _show(chain: Chain) -> None:
    links = chain.links
    if not links:
        return
    what = f"Session {chain.session}" if chain.session else "Messages that belong to no session"
    print(f"\n{what}, to the coordinator, {links[0].time} to {links[-1].time}")
    print(f"over records as of {chain.as_of}\n" if chain.as_of else "")
    rows = arrays_left(chain)
    if rows:
        print(columns([HEAD[: len(rows[0])], *rows], head=True, right=RIGHT[: len(rows[0]) - RIGHT[0]]))
    for link in refusals_of(chain):
        print(f"  refused: step '{link.entry.step}' by {link.entry.rule}, {link.time}")
    print(f"\n  digest of the last entry  {chain.head}\n")
