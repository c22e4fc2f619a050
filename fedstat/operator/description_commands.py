"""Commands by which a site's owner publishes what its columns are, and lets refused questions go on."""

from __future__ import annotations

from pathlib import Path

from fedstat.federation.account.ledger_file import open_account
from fedstat.federation.carry.site_folder import (
    COLUMNS,
    REFUSALS,
    load_identity,
    open_records,
    read_description,
    read_site_policy,
)
from fedstat.federation.files import write_whole
from fedstat.federation.tables.published import (
    Published,
    description_problems,
    propose,
    read_published,
    write_published,
)
from fedstat.operator.screen import columns, heading, typed


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
    total = sum(refused.values())
    print(f"{description.name}: {total} refusal(s) that depended on rows are forgiven; '{folder / REFUSALS}'")
    print("says why each was. Whoever bisects a value asks the same thing again and again.")
    return 0
