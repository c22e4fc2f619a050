"""Commands of a coordinator on shared entities: number them, see who holds which numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from fedstat.errors import PartitionError
from fedstat.federation.carry.remote import RemoteEngine, RemoteSite
from fedstat.federation.door.families import load_families
from fedstat.federation.partition.connect import open_carrier, read_federation
from fedstat.federation.partition.connect_vertical import align_federation, standing
from fedstat.federation.rounds.lasting_alignment import LastingAlignment, load_alignment
from fedstat.federation.rounds.schema import TableSchema
from fedstat.operator.screen import columns, heading


def align(folder: Path, timeout: float | None) -> int:
    """Align the entities of all sites of a federation, once for all models."""
    load_families()
    federation = read_federation(folder)
    if federation.layout != "vertical":
        raise PartitionError(
            f"'{folder}' is of the horizontal layout, in which no records are linked: nothing to align"
        )
    if len(federation.sites) < 2:
        raise PartitionError(
            f"there are {len(federation.sites)} sites, and at least 2 are aligned; add one with 'fedstat "
            f"federation join {folder} CARD'"
        )
    earlier = load_alignment(federation.folder)
    carrier = open_carrier(federation, timeout)
    engine = RemoteEngine({site: RemoteSite(site, carrier) for site in federation.sites})
    began = time.monotonic()
    try:
        alignment = align_federation(engine, tuple(federation.sites), federation.folder)
    finally:
        engine.close()
    print(heading(f"Federation {federation.name}: aligned as {alignment.name}"))
    print(sizes(alignment))
    print(f"\n  {alignment.n_entities:,} entities in all, in {time.monotonic() - began:.1f} s")
    if earlier is not None:
        print(f"  Models that rest on the alignment before, {earlier.name}, are answered no longer.")
    return 0


def sizes(alignment: LastingAlignment) -> str:
    """Keys and records of every site."""
    rows = [("site", "keys", "with a record")]
    rows += [
        (site, f"{len(numbers):,}", f"{int(alignment.seen[site].sum()):,}")
        for site, numbers in alignment.listed.items()
    ]
    return columns(rows, head=True, right=(1, 2))


def alignment_table(folder: Path, schemas: Mapping[str, TableSchema]) -> str:
    """Say of every site that answers whether it is aligned as the coordinator knows it."""
    known = load_alignment(folder)
    rows = [("site", "key", "aligned")]
    for site, schema in schemas.items():
        key = ", ".join(schema.link.key) if schema.link is not None else ""
        rows.append((site, key, standing(known, site, schema)))
    return columns(rows, head=True)
