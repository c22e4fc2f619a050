"""Connecting to sites that hold different columns: the alignment that they and the coordinator keep."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from fedstat.federation.account.ledger import Ledger
from fedstat.federation.rounds.engine import Engine
from fedstat.federation.rounds.lasting_alignment import LastingAlignment, align_lastingly, load_alignment
from fedstat.federation.rounds.schema import TableSchema
from fedstat.federation.tables.checks import refuse, shared_column_problems
from fedstat.federation.tables.keys import Alignment
from fedstat.federation.tables.table import Table


def align_federation(engine: Engine, sites: Sequence[str], folder: Path) -> LastingAlignment:
    """Align the entities of all sites, and keep what the coordinator knows of it.

    What was aligned before is gone: sessions that rest on it are refused.
    """
    alignment = engine.run(align_lastingly(sites, secrets.token_hex(8), secrets.token_hex(8)), Ledger())
    alignment.save(folder)
    return alignment


def linked(
    folder: Path, schemas: Mapping[str, TableSchema], tables: Mapping[str, Table]
) -> tuple[Alignment, str]:
    """Take the alignment of a federation and its name, without the sites that are not connected to.

    Entities are numbers. PartitionError lists every site that is in the order of another alignment or of
    none, and tables that do not fit together, with what to do.
    """
    whole = load_alignment(folder)
    refuse(list(vertical_problems(schemas)))
    refuse(list(alignment_problems(folder, whole, schemas)))
    assert whole is not None
    found = whole.among(tuple(schemas))
    rows = {site: found.rows(site) for site in schemas}
    for numbers in rows.values():
        numbers.flags.writeable = False
    empty = {site: int((~found.seen[site]).sum()) for site in schemas}
    return Alignment(pd.RangeIndex(found.n_entities), tables, rows, empty), found.name


def vertical_problems(schemas: Mapping[str, TableSchema]) -> Iterator[str]:
    """One line per reason why the tables of the sites cannot be linked."""
    for site, schema in schemas.items():
        if schema.link is None:
            yield (
                f"{site}: it names no key to link its records by. Its owner writes key = [...] into the "
                "section [data] of its site.toml, takes site_column out, and starts the site again."
            )
    yield from shared_column_problems({site: tuple(schema.columns) for site, schema in schemas.items()})


def alignment_problems(
    folder: Path, known: LastingAlignment | None, schemas: Mapping[str, TableSchema]
) -> Iterator[str]:
    """One line per reason why the sites do not answer in the order that the coordinator knows."""
    links = {site: schema.link for site, schema in schemas.items() if schema.link is not None}
    remedy = f"run 'fedstat federation align {folder}'"
    if known is None:
        yield f"the entities of the sites have not been aligned yet; {remedy}."
        return
    for site, link in links.items():
        if link.changed:
            yield (
                f"{site}: its keys, or which of them have a record, are no longer those that were aligned; "
                f"{remedy}, which ends the sessions of everybody, or connect without it."
            )
        elif site not in known.listed:
            yield f"{site}: it has joined since the entities were aligned; {remedy}, or connect without it."
        elif link.alignment != known.name:
            held = "another alignment than the coordinator" if link.alignment else "no alignment any more"
            yield (
                f"{site}: it holds {held}; {remedy}, or connect without it. A journal of an earlier "
                "alignment cannot be gone on with."
            )
        elif schemas[site].n_rows != int(known.seen[site].sum()):
            yield f"{site}: it has another number of records than when it was aligned; {remedy}."


def standing(known: LastingAlignment | None, site: str, schema: TableSchema) -> str:
    """Say in a word or two how a site stands to the alignment that the coordinator knows."""
    if schema.link is None:
        return "it has no key"
    if schema.link.changed:
        return "its keys have changed"
    if known is None or not schema.link.alignment:
        return "not yet"
    return "yes" if schema.link.alignment == known.name and site in known.listed else "with others"
