"""Commands by which a site's owner says what may be asked: what columns are, who goes on, which analysis."""

from __future__ import annotations

import textwrap
from pathlib import Path

from fedstat.federation.account.ledger_file import open_account
from fedstat.federation.carry.plan_folder import PlanFolder
from fedstat.federation.carry.site_folder import (
    COLUMNS,
    REFUSALS,
    load_identity,
    open_records,
    read_description,
    read_site_policy,
)
from fedstat.federation.door.owner.claims import PARTIES, threats_under
from fedstat.federation.door.owner.plan import described
from fedstat.federation.files import write_whole
from fedstat.federation.tables.published import (
    Published,
    description_problems,
    propose,
    read_published,
    write_published,
)
from fedstat.operator.writing.screen import columns, heading, typed

WIDTH = 100


def describe(folder: Path) -> int:
    """Propose a public description of the columns where there is none; else hold the records against it."""
    description, path = read_description(folder), folder / COLUMNS
    table = open_records(folder, description)
    print(heading(f"What site {description.name} publishes of its columns"))
    if path.exists():
        published = read_published(path.read_text(encoding="utf-8"), f"'{path}'")
        show_columns(published, table.columns)
        problems = list(description_problems(description.name, published, table))
        print("\n".join(f"  - {problem}" for problem in problems) or f"  The records are as '{path}' says.")
        return 1 if problems else 0
    least = read_site_policy(folder).min_level_count
    published = propose(table, least)
    write_whole(path, write_published(published).encode())
    show_columns(published, table.columns)
    print(f"  This is a proposal, made from the records and written to '{path}': read it before others do.")
    print("  Ranges are rounded outwards to two digits; better is what everybody knows of a column.")
    print(f"  Levels of fewer than {least} records are left out, and so cannot be served: merge or add them.")
    print(f"\n  Next    fedstat site check {typed(folder)}")
    return 0


def show_columns(published: Published, held: tuple[str, ...]) -> None:
    """Print a description as a table; columns that are held and not described are listed below."""
    rows: list[tuple[str, ...]] = [("column", "holds", "range", "levels")]
    for name, column in published.items():
        bounds = "" if column.range is None else f"{column.range[0]:g} to {column.range[1]:g}"
        shown = ", ".join(map(str, column.levels[:6])) + (", ..." if len(column.levels) > 6 else "")
        rows.append((name, column.kind, bounds, shown))
    print(columns(rows, head=True) + "\n")
    silent = [name for name in held if name not in published]
    if silent:
        print(f"  Not published, and so not to be asked for: {', '.join(silent)}\n")


def answer_again(folder: Path) -> int:
    """Let those go on whose questions were refused too often, after the owner has read why."""
    description = read_description(folder)
    account = open_account(folder, description.name, load_identity(folder))
    refused = {asker: count for asker, count in account.refusals.items() if count}
    for asker in refused:
        account.set_refusals(asker, 0)
    if account.store is not None:
        account.store.close()
    total = sum(refused.values())
    print(f"{description.name}: {total} refusal(s) that depended on rows are forgiven; '{folder / REFUSALS}'")
    print("says why each was. Whoever bisects a value asks the same thing again and again.")
    return 0


def pending(folder: Path) -> int:
    """Show the plans of analyses that wait for the owner, in plain words."""
    name, plans = read_description(folder).name, plan_folder(folder).waiting()
    for digest, plan in plans.items():
        print(heading(f"Plan {digest}"))
        for line in described(plan):
            print(textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="      "))
        print(f"\n  To consent to one run    fedstat site approve {typed(folder)} {digest:.12}")
        print(f"  To refuse it             fedstat site deny {typed(folder)} {digest:.12}\n")
    if not plans:
        print(f"No plan waits at {name}.")
        if read_site_policy(folder).approval == "auto":
            print('Its policy asks nobody; approval = "owner" in policy.toml has every analysis wait.')
    return 0


def threats(folder: Path) -> int:
    """Say who can learn what under the policy of a site, party by party."""
    print(heading(f"Who can learn what of {read_description(folder).name}"))
    told = ""
    for threat in threats_under(read_site_policy(folder)):
        if threat.party != told:
            told = threat.party
            print(f"  {told} ({PARTIES[told]})")
        line = f"{threat.line}: {threat.learns}" if threat.line else threat.learns
        print(textwrap.fill(line, WIDTH, initial_indent="    ", subsequent_indent="    "))
    print("\nA line of policy.toml before a sentence is what lets it be learned.")
    return 0


def approve(folder: Path, digest: str) -> int:
    """Consent to one run of a plan."""
    plan = plan_folder(folder).decide(load_identity(folder), digest, "approved")
    print(f"{plan.site} answers one run of plan {plan.digest}, and nothing beyond it:")
    print(f"{plan.call}, of {plan.formula}. Who asked runs the same analysis again.")
    return 0


def deny(folder: Path, digest: str) -> int:
    """Refuse a plan."""
    plan = plan_folder(folder).decide(load_identity(folder), digest, "denied")
    print(f"{plan.site} does not answer plan {plan.digest}, and says so to whoever proposes it again.")
    return 0


def plan_folder(folder: Path) -> PlanFolder:
    """Open the plans of a site."""
    return PlanFolder(read_description(folder).name, folder, load_identity(folder).public)
