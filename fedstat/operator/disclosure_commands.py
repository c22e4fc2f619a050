"""Commands of a site's owner on disclosure: column descriptions, approvals, threats, and the ledger."""

from __future__ import annotations

import json
import textwrap
from fractions import Fraction
from functools import partial
from pathlib import Path

from fedstat.errors import PartitionError
from fedstat.federation.audit.event_log import SessionChain
from fedstat.federation.audit.ledger_file import (
    LEDGER_FILENAME,
    open_ledger,
    read_ledger,
    record_declared_loss,
)
from fedstat.federation.disclosure.approval import describe_plan
from fedstat.federation.disclosure.exposure import exposure
from fedstat.federation.disclosure.privacy_budget import read_budget_spent
from fedstat.federation.disclosure.rules import PARTIES
from fedstat.federation.disclosure.threat_statements import threats_under
from fedstat.federation.files import write_atomic
from fedstat.federation.tables.published import (
    Published,
    description_problems,
    propose,
    read_published,
    write_published,
)
from fedstat.federation.transport.site_folder import (
    COLUMNS,
    POLICY,
    REFUSALS,
    PlanFolder,
    comparison_problem,
    load_identity,
    open_records,
    read_description,
    read_site_policy,
)
from fedstat.operator.page.released_arrays import (
    EXPOSURE_HEAD,
    EXPOSURE_NOTES,
    HEAD,
    RIGHT,
    exposure_rows,
    refusals_of,
    released_rows,
)
from fedstat.operator.terminal import format_columns, shell_path, underlined

# ----------------------------------------------------------------------------------------------------
# Commands by which a site's owner says what may be asked: what columns are, who goes on, which analysis.

WIDTH = 100


def describe_columns(folder: Path) -> int:
    """Propose a public description of the columns where there is none; else hold the records against it."""
    description, path = read_description(folder), folder / COLUMNS
    table = open_records(folder, description)
    print(underlined(f"What site {description.name} publishes of its columns"))
    if path.exists():
        published = read_published(path.read_text(encoding="utf-8"), f"'{path}'")
        show_columns(published, table.columns)
        problems = list(description_problems(description.name, published, table))
        print("\n".join(f"  - {problem}" for problem in problems) or f"  The records are as '{path}' says.")
        return 1 if problems else 0
    least = read_site_policy(folder).min_level_count
    published = propose(table, least)
    write_atomic(path, write_published(published).encode())
    show_columns(published, table.columns)
    print(f"  This is a proposal, made from the records and written to '{path}': read it before others do.")
    print("  Ranges are rounded outwards to two digits; better is what everybody knows of a column.")
    print(f"  Levels of fewer than {least} records are left out, and so cannot be served: merge or add them.")
    print(f"\n  Next    fedstat site check {shell_path(folder)}")
    return 0


def show_columns(published: Published, held: tuple[str, ...]) -> None:
    """Print a description as a table; columns that are held and not described are listed below."""
    rows: list[tuple[str, ...]] = [("column", "holds", "range", "levels")]
    for name, column in published.items():
        bounds = "" if column.range is None else f"{column.range[0]:g} to {column.range[1]:g}"
        shown = ", ".join(map(str, column.levels[:6])) + (", ..." if len(column.levels) > 6 else "")
        rows.append((name, column.kind, bounds, shown))
    print(format_columns(rows, head=True) + "\n")
    silent = [name for name in held if name not in published]
    if silent:
        print(f"  Not published, and so not to be asked for: {', '.join(silent)}\n")


def reset_refusals(folder: Path) -> int:
    """Let those go on whose questions were refused too often, after the owner has read why."""
    description = read_description(folder)
    site_ledger = open_ledger(folder, description.name, load_identity(folder))
    refused = {client: count for client, count in site_ledger.refusals.items() if count}
    for client in refused:
        site_ledger.set_refusals(client, 0)
    if site_ledger.store is not None:
        site_ledger.store.close()
    total = sum(refused.values())
    print(f"{description.name}: {total} refusal(s) that depended on rows are forgiven; '{folder / REFUSALS}'")
    print("says why each was. Whoever bisects a value asks the same thing again and again.")
    return 0


def show_pending(folder: Path) -> int:
    """Show the plans of analyses that wait for the owner, in plain words."""
    name, plans = read_description(folder).name, plan_folder(folder).waiting()
    for digest, plan in plans.items():
        print(underlined(f"Plan {digest}"))
        for line in describe_plan(plan):
            print(textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="      "))
        print(f"\n  To consent to one run    fedstat site approve {shell_path(folder)} {digest:.12}")
        print(f"  To refuse it             fedstat site deny {shell_path(folder)} {digest:.12}\n")
    if not plans:
        print(f"No plan waits at {name}.")
        if read_site_policy(folder).approval == "auto":
            print('Its policy asks nobody; approval = "owner" in policy.toml has every analysis wait.')
    return 0


def show_threats(folder: Path) -> int:
    """Say who can learn what under the policy of a site, party by party."""
    print(underlined(f"Who can learn what of {read_description(folder).name}"))
    reported = ""
    for threat in threats_under(read_site_policy(folder)):
        if threat.party != reported:
            reported = threat.party
            print(f"  {reported} ({PARTIES[reported]})")
        line = f"{threat.line}: {threat.learns}" if threat.line else threat.learns
        print(textwrap.fill(line, WIDTH, initial_indent="    ", subsequent_indent="    "))
    print("\nA line of policy.toml before a sentence is the line that allows it.")
    return 0


def show_exposure(folder: Path) -> int:
    """Show the largest share of one row in what was released so far, by column."""
    description = read_description(folder)
    site_ledger = read_ledger(folder, description.name, load_identity(folder).public)
    found = exposure(open_records(folder, description), site_ledger)
    print(underlined(f"Largest share of one row in what {description.name} released"))
    if not found:
        print(f"{description.name} has released nothing that rests on a column.")
        return 0
    rows = exposure_rows(found)
    print(format_columns([EXPOSURE_HEAD, *rows], head=True, right=(1, 2, 3)) + "\n")
    for line in EXPOSURE_NOTES:
        print(textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="  "))
    return 0


def approve_plan(folder: Path, digest: str) -> int:
    """Consent to one run of a plan."""
    plan = plan_folder(folder).decide(load_identity(folder), digest, "approved")
    print(f"{plan.site} answers one run of plan {plan.digest}, and nothing beyond it:")
    print(f"{plan.call}, of {plan.formula}. Who asked runs the same analysis again.")
    return 0


def deny_plan(folder: Path, digest: str) -> int:
    """Refuse a plan."""
    plan = plan_folder(folder).decide(load_identity(folder), digest, "denied")
    print(f"{plan.site} does not answer plan {plan.digest}, and says so to whoever proposes it again.")
    return 0


def plan_folder(folder: Path) -> PlanFolder:
    """Open the plans of a site."""
    return PlanFolder(read_description(folder).name, folder, load_identity(folder).public)


# ----------------------------------------------------------------------------------------------------
# Printed account of what left a site, from its own chain of entries; the declaration that it was lost.


def show_ledger(folder: Path, session: str | None, as_json: bool) -> int:
    """Show what left a site, to whom and when, and whether the account is whole."""
    name = read_description(folder).name
    site_ledger = read_ledger(folder, name, load_identity(folder).public)
    for when, reason in site_ledger.losses if not as_json else ():
        print(f"Its owner declared on {when} that the account before was lost: {reason}\n")
    for decision in site_ledger.decisions.values() if not as_json else ():
        print(f"{decision}\n")
    chains = site_ledger.chains
    if not chains:
        print(f"{name} has not answered anything yet.")
        return 0
    if session is not None:
        chains = tuple(chain for chain in chains if chain.session == session)
        if not chains:
            raise PartitionError(f"'{folder / LEDGER_FILENAME}' has no session '{session}'")
    if as_json:
        for chain in chains:
            for entry in chain.entries:
                print(json.dumps({"session": chain.session} | entry.named))
        return 0
    print(underlined(f"What left {name}"))
    if (spent := read_budget_spent(read_site_policy(folder), site_ledger)) is not None:
        print(f"Of its privacy budget {spent}.")
    for chain in chains:
        _show(chain)
    n_entries = sum(len(chain.entries) for chain in chains)
    print(f"{n_entries:,} entries in {len(chains)} sessions. Every entry fits the chain of digests.")
    return 0


def declare_ledger_loss(folder: Path, reason: str) -> int:
    """Declare that a site's account was lost, and say what became of it."""
    description = read_description(folder)
    identity = load_identity(folder)
    fits = partial(comparison_problem, open_records(folder, description), identity)
    budget = read_site_policy(folder).privacy
    integer = Fraction(0) if budget is None else budget.rho
    loss = record_declared_loss(folder, description.name, identity, reason, fits, integer)
    print(underlined(f"Account of {description.name}"))
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


def _show(chain: SessionChain) -> None:
    links = chain.entries
    if not links:
        return
    what = f"Session {chain.session}" if chain.session else "Messages that belong to no session"
    print(f"\n{what}, to the coordinator, {links[0].time} to {links[-1].time}")
    print(f"over records as of {chain.as_of}\n" if chain.as_of else "")
    rows = released_rows(chain)
    if rows:
        print(
            format_columns([HEAD[: len(rows[0])], *rows], head=True, right=RIGHT[: len(rows[0]) - RIGHT[0]])
        )
    for entry in refusals_of(chain):
        print(f"  refused: step '{entry.step}' by {entry.rule}, {entry.time}")
    print(f"\n  digest of the last entry  {chain.head}\n")
