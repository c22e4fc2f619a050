"""Commands of a site's owner on disclosure: column descriptions, approvals, threats, and the ledger."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path

from fedstat.codec import to_plain
from fedstat.errors import PartitionError
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.audit.event_log import SessionChain, SiteLedger, Subject
from fedstat.federation.audit.ledger_file import (
    LEDGER_FILENAME,
    open_ledger,
    read_ledger,
    record_declared_loss,
)
from fedstat.federation.disclosure.column_sums import exposure
from fedstat.federation.disclosure.privacy_budget import read_budget_spent
from fedstat.federation.disclosure.rules import PARTIES
from fedstat.federation.disclosure.threat_statements import threats_under
from fedstat.federation.files import write_atomic
from fedstat.federation.tables.dictionary import DataDictionary, read_accepted
from fedstat.federation.tables.published import (
    Published,
    description_problems,
    propose,
    read_published,
    withheld_columns,
    write_published,
)
from fedstat.federation.tables.table import Table
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
    table_folders,
)
from fedstat.operator.page.audit_export import AuditFilter, as_csv, audit_lines, audit_page
from fedstat.operator.page.plan_summary import summarize_plan
from fedstat.operator.page.quarter_summary import Quarter, summary_page
from fedstat.operator.page.released_arrays import (
    EXPOSURE_HEAD,
    EXPOSURE_NOTES,
    HEAD,
    RIGHT,
    exposure_rows,
    only_connection_steps,
    refusals_of,
    released_rows,
)
from fedstat.operator.site_commands import write_text_format
from fedstat.operator.terminal import format_columns, print_problems, shell_path, underlined

# ----------------------------------------------------------------------------------------------------
# Commands for the owner of a site: describe columns, reset refusals, and decide on plans.

WIDTH = 100


def describe_columns(folder: Path) -> int:
    """Propose a public description of the columns if there is none; otherwise compare the data with it."""
    write_text_format(folder)
    description, path = read_description(folder), folder / COLUMNS
    table = open_records(folder, description)
    print(underlined(f"Published description of the columns of site {description.name}"))
    dictionary = read_accepted(folder, description.coordinator)
    if path.exists():
        published = read_published(path.read_text(encoding="utf-8"), f"'{path}'")
        show_columns(published, table.columns)
        problems = list(description_problems(description.name, published, table))
        if dictionary is not None:
            problems += dictionary.problems(description.name, published)
        print("\n".join(f"  - {problem}" for problem in problems) or f"  The data agree with '{path}'.")
        if problems or not set(table.columns) <= published.keys():
            print(f"\n  '{path}' was not changed. For a new proposal, remove it and run this command again.")
        return 1 if problems else 0
    least = read_site_policy(folder).min_level_count
    if dictionary is not None:
        return _describe_from(folder, description.name, table, dictionary)
    withheld = withheld_columns(table, least)
    published = {name: one for name, one in propose(table, least).items() if name not in withheld}
    write_atomic(path, write_published(published).encode())
    show_columns(published, table.columns)
    for name, why in withheld.items():
        print(textwrap.fill(f"{name}: {why}.", WIDTH, initial_indent="  ", subsequent_indent="      "))
    print("" if not withheld else "\n", end="")
    print(f"  This proposal was made from the data and written to '{path}'. Read it before others do.")
    print("  Ranges are rounded outwards to two digits. Replace them with generally known bounds if you can.")
    print(f"\n  Next    fedstat site check {shell_path(folder)}")
    return 0


def _describe_from(folder: Path, site: str, table: Table, dictionary: DataDictionary) -> int:
    """Propose the description that the dictionary of the study gives, and compare the data with it."""
    path, published = folder / COLUMNS, dictionary.propose(table.columns)
    write_atomic(path, write_published(published).encode())
    show_columns(published, table.columns)
    print(f"  This is data dictionary {dictionary.number} of {dictionary.study}, written to '{path}'.")
    absent = [name for name in dictionary.columns if name not in table.columns]
    problems = [f"{site}: column '{name}' of the dictionary is not in the table" for name in absent]
    problems += description_problems(site, published, table)
    print_problems(problems)
    print(f"\n  Next    fedstat site check {shell_path(folder)}")
    return 1 if problems else 0


def show_columns(published: Published, held: tuple[str, ...]) -> None:
    """Print a description as a table; columns without a description are listed below."""
    rows: list[tuple[str, ...]] = [("column", "holds", "range", "levels")]
    for name, column in published.items():
        bounds = "" if column.range is None else f"{column.range[0]:g} to {column.range[1]:g}"
        shown = ", ".join(map(str, column.levels[:6])) + (", ..." if len(column.levels) > 6 else "")
        rows.append((name, column.kind, bounds, shown))
    print(format_columns(rows, head=True) + "\n")
    silent = [name for name in held if name not in published]
    if silent:
        print(f"  Not published, so not available to formulas: {', '.join(silent)}\n")


def reset_refusals(folder: Path) -> int:
    """Reset the counts of refusals; the owner reads the reasons first."""
    description = read_description(folder)
    site_ledger = open_ledger(folder, description.name, load_identity(folder))
    refused = {client: count for client, count in site_ledger.refusals.items() if count}
    for client in refused:
        site_ledger.set_refusals(client, 0)
    if site_ledger.store is not None:
        site_ledger.store.close()
    total = sum(refused.values())
    print(
        f"{description.name}: {total} refusal(s) that depended on the data were reset. '{folder / REFUSALS}'"
    )
    print("has the reason for each. A client that searches for a value repeats similar requests many times.")
    return 0


def show_pending(folder: Path) -> int:
    """Show the plans of analyses that wait for the owner, in plain words."""
    name, held, policy = read_description(folder).name, plan_folder(folder), read_site_policy(folder)
    plans = held.waiting()
    site_ledger = read_ledger(folder, name, load_identity(folder).public) if plans else SiteLedger()
    for digest, plan in plans.items():
        found = summarize_plan(digest, plan, policy, site_ledger, held)
        print(underlined(f"Plan {digest}"))
        for number, line in enumerate(found.plain, 1):
            print(textwrap.fill(f"{number}. {line}", WIDTH, initial_indent="  ", subsequent_indent="     "))
        print("\n" + textwrap.indent(format_columns(found.facts), "  "))
        print("\n  In detail:")
        for line in found.details:
            print(textwrap.fill(line, WIDTH, initial_indent="    ", subsequent_indent="        "))
        print(f"\n  To approve one run    fedstat site approve {shell_path(folder)} {digest:.12}")
        print(f"  To deny it            fedstat site deny {shell_path(folder)} {digest:.12}\n")
    if not plans:
        print(f"No plan is waiting at {name}.")
        if policy.approval == "auto":
            print('The policy does not require approval. With approval = "owner" in policy.toml, it does.')
    return 0


def show_threats(folder: Path) -> int:
    """Print what each party can learn under the policy of a site."""
    print(underlined(f"Who can learn what about {read_description(folder).name}"))
    reported = ""
    for threat in threats_under(read_site_policy(folder)):
        if threat.party != reported:
            reported = threat.party
            print(f"  {reported} ({PARTIES[reported]})")
        line = f"{threat.line}: {threat.learns}" if threat.line else threat.learns
        print(textwrap.fill(line, WIDTH, initial_indent="    ", subsequent_indent="    "))
    print("\nA sentence that starts with a line of policy.toml applies because of that line.")
    return 0


def show_exposure(folder: Path) -> int:
    """Show the largest share of one row in all releases so far, by column."""
    description = read_description(folder)
    site_ledger = read_ledger(folder, description.name, load_identity(folder).public)
    found = exposure(open_records(folder, description), site_ledger)
    print(underlined(f"Largest share of one row in the releases of {description.name}"))
    if not found:
        print(f"{description.name} has released nothing that was computed from a column.")
        return 0
    rows = exposure_rows(found)
    print(format_columns([EXPOSURE_HEAD, *rows], head=True, right=(1, 2, 3)) + "\n")
    for line in EXPOSURE_NOTES:
        print(textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="  "))
    return 0


def approve_plan(folder: Path, digest: str) -> int:
    """Approve one run of a plan."""
    plans = plan_folder(folder)
    complete = plans.find(digest).digest
    earlier = read_ledger(folder, plans.site, plans.keys).decisions.get(complete)
    if earlier is not None and earlier.verdict == "denied":
        print(f"This plan was denied before: {earlier}\n")
    plan = plans.decide(load_identity(folder), digest, "approved")
    print(f"{plan.site} will answer one run of plan {plan.digest}, and nothing else:")
    print(f"{plan.call}, of {plan.formula}. The analyst can now run the same analysis again.")
    return 0


def deny_plan(folder: Path, digest: str) -> int:
    """Deny a plan."""
    plan = plan_folder(folder).decide(load_identity(folder), digest, "denied")
    print(f"{plan.site} will refuse plan {plan.digest}. A coordinator that proposes it again is informed.")
    return 0


def plan_folder(folder: Path) -> PlanFolder:
    """Open the plans of a site."""
    return PlanFolder(read_description(folder).name, folder, load_identity(folder).public)


# ----------------------------------------------------------------------------------------------------
# The ledger in print, from the site's own chain of entries, and the declaration that it was lost.


def show_ledger(folder: Path, session: str | None, as_json: bool) -> int:
    """Show what the site released, to whom and when, and whether the ledger is complete."""
    name = read_description(folder).name
    site_ledger = read_ledger(folder, name, load_identity(folder).public)
    for when, reason in site_ledger.losses if not as_json else ():
        print(f"On {when}, the owner declared that the previous ledger was lost: {reason}\n")
    for proposal in site_ledger.proposals.values() if not as_json else ():
        print(
            f"proposed by {proposal.client or 'this process'} on {utc_text(proposal.proposed)}: plan "
            f"{proposal.plan}"
        )
    for decision in site_ledger.decisions.values() if not as_json else ():
        print(f"{decision}\n")
    chains = site_ledger.chains
    if not chains:
        print(f"{name} has not answered any request yet.")
        return 0
    if session is not None:
        chains = tuple(chain for chain in chains if chain.session == session)
        if not chains:
            raise PartitionError(f"'{folder / LEDGER_FILENAME}' has no session '{session}'")
    if as_json:
        for chain in chains:
            for entry, subject in chain.described_entries():
                print(json.dumps({"session": chain.session} | to_plain(subject) | entry.named))
        return 0
    print(underlined(f"Releases of {name}"))
    if (spent := read_budget_spent(read_site_policy(folder), site_ledger)) is not None:
        print(f"Privacy budget: {spent}.")
    for equal in _equal_sessions(chains):
        _show(equal)
    n_entries = sum(len(chain.entries) for chain in chains)
    print(f"{n_entries:,} entries in {len(chains)} sessions. Every entry fits the chain of digests.")
    print("Sessions that released the same are shown once; --json and the page show each of them.")
    return 0


def export_audit(
    folder: Path,
    since: str = "",
    until: str = "",
    study: str = "",
    person: str = "",
    formula: str = "",
    column: str = "",
    out: Path | None = None,
) -> int:
    """Print the releases of all tables of a site as CSV, or write them as CSV or as a page to print."""
    name, wanted = read_description(folder).name, AuditFilter(since, until, study, person, formula, column)
    lines = []
    for table, place in table_folders(folder).items():
        site_ledger = read_ledger(place, name, load_identity(place).public)
        lines += list(audit_lines(site_ledger, wanted, table))
    if out is None:
        sys.stdout.write(as_csv(lines))
        return 0
    if out.suffix not in (".csv", ".html"):
        raise PartitionError(f"'{out}': expected the ending .csv, or .html for a page to print")
    text = as_csv(lines) if out.suffix == ".csv" else audit_page(name, wanted, lines)
    write_atomic(out, text.encode())
    print(underlined(f"Releases of {name}"))
    print(f"  {len(lines):,} lines in '{out}'. The ledger is complete, and its signatures are valid.")
    return 0


def summarize_quarter(folder: Path, quarter: str = "", out: Path | None = None) -> int:
    """Write one page on what the site released in a quarter, for a data protection officer."""
    name, period = read_description(folder).name, Quarter.parse(quarter)
    out = Path(f"{name}-{period}.html") if out is None else out
    if out.suffix != ".html":
        raise PartitionError(f"'{out}': expected the ending .html; a browser prints the page as PDF")
    tables = {
        table: (place, read_ledger(place, name, load_identity(place).public))
        for table, place in table_folders(folder).items()
    }
    write_atomic(out, summary_page(name, period, tables).encode())
    print(underlined(f"{name} in {period}"))
    print(f"  Written to '{out}'. Print it in a browser, or save it there as PDF.")
    return 0


def declare_ledger_loss(folder: Path, reason: str) -> int:
    """Declare that the ledger of a site was lost, and print the consequences."""
    description = read_description(folder)
    identity = load_identity(folder)
    fits = partial(comparison_problem, open_records(folder, description), identity)
    budget = read_site_policy(folder).privacy
    integer = Fraction(0) if budget is None else budget.rho
    loss = record_declared_loss(folder, description.name, identity, reason, fits, integer)
    print(underlined(f"Ledger of {description.name}"))
    print(f"  Found: {loss.found}\n")
    if loss.files:
        print(f"  Moved to '{loss.aside}': {', '.join(loss.files)}.")
    if loss.forgotten:
        print(
            "  New releases are no longer compared with earlier ones: two that differ by a few rows may "
            "both pass.\n"
        )
    if loss.charged:
        print(
            "  The spent part of the privacy budget is no longer known, so all of it counts as spent. The "
            f"site answers\n  again after the owner sets a larger epsilon in '{folder / POLICY}'.\n"
        )
    print("The loss is declared. It is an entry of the ledger, and every receipt shows it to the others.")
    return 0


def _equal_sessions(chains: Sequence[SessionChain]) -> list[list[SessionChain]]:
    """Group sessions that released the same, in the order of the latest of each group.

    All sessions that only connect are one group: their messages differ by digests alone.
    """
    groups: dict[object, list[SessionChain]] = {}
    for chain in (chain for chain in chains if chain.entries):
        refused = [(entry.step, entry.rule) for entry in refusals_of(chain)]
        released = "connection" if only_connection_steps(chain) else (tuple(released_rows(chain)), *refused)
        key = chain.session == "", stated_texts(chain.subject), released
        groups[key] = [*groups.pop(key, []), chain]
    return list(groups.values())


def stated_texts(subject: Subject) -> tuple[tuple[str, str], ...]:
    """Return what a session is about, by name; without empty texts."""
    found = [("person", subject.person), ("study", subject.study), ("purpose", subject.purpose)]
    found += [("formula", subject.formula), ("columns", ", ".join(subject.columns))]
    return tuple((name, text) for name, text in found if text)


def _show(equal: Sequence[SessionChain]) -> None:
    """Print the latest of equal sessions, and how many there are."""
    chain = equal[-1]
    links = chain.entries
    what = f"Session {chain.session}" if chain.session else "Messages outside a session"
    print(f"\n{what}, to the coordinator, {links[0].time} to {links[-1].time}")
    if earlier := equal[:-1]:
        since = min(one.entries[0].time for one in earlier)
        print(f"and {len(earlier):,} earlier sessions that released the same, since {since}")
    print("; ".join(f"{name}: {text}" for name, text in stated_texts(chain.subject)))
    print(f"data as of {chain.as_of}\n" if chain.as_of else "")
    rows = released_rows(chain)
    if rows:
        print(
            format_columns([HEAD[: len(rows[0])], *rows], head=True, right=RIGHT[: len(rows[0]) - RIGHT[0]])
        )
    for entry in refusals_of(chain):
        print(f"  refused: step '{entry.step}' by {entry.rule}, {entry.time}")
    print(f"\n  digest of the last entry  {chain.head}\n")
