"""Sites in this process: the settings that they share, and records excluded from small patterns."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.block import Partial
from fedstat.federation.disclosure.policy import Policy, site_policies
from fedstat.federation.disclosure.site import Site
from fedstat.federation.partition.describe import Layout
from fedstat.federation.protocols.engine import Engine, LocalEngine
from fedstat.federation.protocols.linkage import align_entities
from fedstat.federation.tables import checks as check
from fedstat.federation.tables.keys import Alignment, KeyTable
from fedstat.federation.tables.published import (
    IntoPublished,
    Published,
    as_published,
    description_problems,
    propose,
)
from fedstat.federation.tables.table import Table
from fedstat.typing import Bools, Ints

# ----------------------------------------------------------------------------------------------------
# Records that count as missing for good, because a missing pattern had too few to be released.
#
# Sums over the entities of two fits may differ by many entities or by none. Where a fit merged small
# patterns (:mod:`fedstat.models.vertical.pattern_merging`), the records that it set aside are set aside by
# every
# later one too: else a fit by another method, or of fewer columns, would bring back the few of them, and
# the difference of its sums to the earlier ones would be theirs.

NO_ENTITIES: Ints = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class ExcludedRecords:
    """Positions of entities whose record at a site is set aside, and of those that take no part at all.

    `values` are those of which the value of a column is set aside, by site and column.
    """

    without: dict[str, Ints] = field(default_factory=dict)
    left_out: Ints = field(default_factory=lambda: NO_ENTITIES)
    values: dict[tuple[str, str], Ints] = field(default_factory=dict)

    def set_aside(self, without: Mapping[str, Ints], left_out: Ints) -> None:
        """Set further records aside."""
        for site, entities in without.items():
            if len(entities):
                self.without[site] = np.union1d(self.without.get(site, NO_ENTITIES), entities)
        self.left_out = np.union1d(self.left_out, left_out)

    def set_values_aside(self, site: str, columns: Sequence[str], entities: Ints) -> None:
        """Set aside the values of some columns for further entities."""
        for column in columns if len(entities) else ():
            self.values[site, column] = np.union1d(self.values.get((site, column), NO_ENTITIES), entities)

    def without_values(self, site: str, read: Sequence[Sequence[str]], entities: Ints) -> Bools:
        """Whether a value that is read was set aside, of entities (n,) by what each of p columns reads."""
        gone = [
            np.concatenate(
                [NO_ENTITIES, *(self.values.get((site, column), NO_ENTITIES) for column in columns)]
            )
            for columns in read
        ]
        return np.column_stack([np.isin(entities, of) for of in gone])

    def seen(self, site: str, entities: Ints) -> Bools:
        """Return whether records of these entities count as observed at a site: (n,)."""
        aside = np.union1d(self.without.get(site, NO_ENTITIES), self.left_out)
        return np.asarray(~np.isin(entities, aside))


# ----------------------------------------------------------------------------------------------------
# Sites in this process: one for each site of a partition, and the settings that their tables share.

SEED_BITS = 128


@dataclass(frozen=True, slots=True)
class PartitionOptions:
    """Settings of a partition that do not depend on its layout; see :meth:`ClientPartition.from_frames`."""

    partial: Partial
    min_count: int
    policy: Policy | str | Path | None = None
    policies: Mapping[str, Policy | str | Path] | None = None
    shared_seed: int | None = None
    new_data: bool = False
    published: Mapping[str, IntoPublished] | None = None

    def __post_init__(self) -> None:
        check.raise_problems(check.option_problems(self.partial, self.min_count))

    def settled(self, sites: Sequence[str]) -> PartitionOptions:
        """Read what files say, and draw the shared secret, so that sites can be opened alike again."""
        given = dict(self.published or {})
        check.raise_problems(
            f"published names '{name}', which is no site" for name in given if name not in sites
        )
        return replace(
            self,
            policy=None,
            policies=site_policies(sites, self.policy, self.policies),
            shared_seed=secrets.randbits(SEED_BITS) if self.shared_seed is None else self.shared_seed,
            published={name: as_published(one, f"published[{name!r}]") for name, one in given.items()},
        )

    def open_sites(self, tables: Mapping[str, Table], site_column: str = "") -> dict[str, Site]:
        """Make one site per name, all with the same shared secret and each other's fingerprints."""
        rules = site_policies(tuple(tables), self.policy, self.policies)
        given = self.published or {}
        sites = {
            client: Site(
                client,
                table,
                rules[client],
                self.shared_seed,
                site_column,
                published=published_description(client, table, rules[client], given.get(client)),
            )
            for client, table in tables.items()
        }
        # as owners do by cards: sums are masked together only with pinned sites
        fingerprints = {client: site.trust.identity.public.fingerprint for client, site in sites.items()}
        for site in sites.values():
            site.trust.pinned.update(fingerprints)
        return sites

    def align_privately(
        self, tables: Mapping[str, pd.DataFrame], key: Sequence[str]
    ) -> tuple[pd.Index[Any], dict[str, Ints]]:
        """Let sites that hold only the keys number their entities."""
        # sites that hold keys and no column: nothing else can leave while entities are numbered
        keys = {client: KeyTable(client, frame, key) for client, frame in tables.items()}
        sites = replace(self, published=None).settled(tuple(keys)).open_sites(keys)
        for site in sites.values():
            site.trust.consents.update(dict.fromkeys(sites, "by the creator of the partition"))
        protocol = align_entities(tuple(sites), secrets.token_hex(8))
        n_entities = LocalEngine(sites).run(protocol, Ledger()).n_entities
        return pd.RangeIndex(n_entities), {client: table.places for client, table in keys.items()}


@dataclass(frozen=True, slots=True)
class PartitionParts:
    """The content of a partition; the fields are those of :class:`~fedstat.ClientPartition`."""

    layout: Layout
    key: tuple[str, ...]
    alignment: Alignment
    options: PartitionOptions
    sites: Mapping[str, Any]
    site_column: str = ""
    engine: Engine | None = None
    aligned_as: str = ""
    coordinator: str = ""
    division: ExcludedRecords = field(default_factory=ExcludedRecords)
    quorum: int = 0
    shared_keys: int = 0

    def opened(self) -> PartitionParts:
        """Open sites in this process, with keys and accounts of their own."""
        tables = self.alignment.tables
        options = self.options.settled(tuple(tables))
        return replace(self, options=options, sites=options.open_sites(tables, self.site_column))


def published_description(
    site: str, table: Table, policy: Policy, given: IntoPublished | None
) -> Published | None:
    """Take a description, or propose what an owner would publish, where the policy asks for it.

    PartitionError if the table does not match its description: the caller provides both as the owner.
    """
    if given is not None:
        published = as_published(given, f"published[{site!r}]")
        check.raise_problems(description_problems(site, published, table))
        return published
    if policy.formulas == policy.discrete == "any":
        return None
    return propose(table, policy.min_level_count)
