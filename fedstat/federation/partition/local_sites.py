"""Sites in this process: one for each site of a partition, and the settings that their tables share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedstat.federation.account.ledger import Ledger
from fedstat.federation.design.observed import Partial
from fedstat.federation.door.owner.policy import Policy, site_policies
from fedstat.federation.door.site import Site
from fedstat.federation.partition.describe import Layout
from fedstat.federation.partition.division import Division
from fedstat.federation.rounds.alignment import align_entities
from fedstat.federation.rounds.engine import Engine, LocalEngine
from fedstat.federation.tables import checks as check
from fedstat.federation.tables.hashed_keys import KeyTable
from fedstat.federation.tables.keys import Alignment
from fedstat.federation.tables.published import (
    IntoPublished,
    Published,
    as_published,
    description_problems,
    propose,
)
from fedstat.federation.tables.table import Table
from fedstat.typing import Ints

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
        check.refuse(check.option_problems(self.partial, self.min_count))

    def settled(self, clients: Sequence[str]) -> PartitionOptions:
        """Read what files say, and draw the shared secret, so that sites can be opened alike again."""
        given = dict(self.published or {})
        check.refuse(
            f"published names '{name}', which is no institution" for name in given if name not in clients
        )
        return replace(
            self,
            policy=None,
            policies=site_policies(clients, self.policy, self.policies),
            shared_seed=secrets.randbits(SEED_BITS) if self.shared_seed is None else self.shared_seed,
            published={name: as_published(one, f"published[{name!r}]") for name, one in given.items()},
        )

    def open_sites(self, tables: Mapping[str, Table], site_column: str = "") -> dict[str, Site]:
        """One site per institution, all with the same shared secret and each other's fingerprints."""
        rules = site_policies(tuple(tables), self.policy, self.policies)
        given = self.published or {}
        sites = {
            client: Site(
                client,
                table,
                rules[client],
                self.shared_seed,
                site_column,
                published=described(client, table, rules[client], given.get(client)),
            )
            for client, table in tables.items()
        }
        # what owners do by cards: sums are masked together only with whom one has pinned
        fingerprints = {client: site.trust.identity.public.fingerprint for client, site in sites.items()}
        for site in sites.values():
            site.trust.pinned.update(fingerprints)
        return sites

    def align_privately(
        self, tables: Mapping[str, pd.DataFrame], key: Sequence[str]
    ) -> tuple[pd.Index[Any], dict[str, Ints]]:
        """Let sites that hold the institutions' keys, and nothing else, number their entities."""
        # sites that hold keys and no column: nothing else can leave while entities are numbered
        keys = {client: KeyTable(client, frame, key) for client, frame in tables.items()}
        sites = replace(self, published=None).settled(tuple(keys)).open_sites(keys)
        for site in sites.values():
            site.trust.consents.update(dict.fromkeys(sites, "by whoever made the partition"))
        protocol = align_entities(tuple(sites), secrets.token_hex(8))
        n_entities = LocalEngine(sites).run(protocol, Ledger()).n_entities
        return pd.RangeIndex(n_entities), {client: table.places for client, table in keys.items()}


@dataclass(frozen=True, slots=True)
class PartitionParts:
    """What a partition is made of; the fields are those of :class:`~fedstat.ClientPartition`."""

    layout: Layout
    key: tuple[str, ...]
    alignment: Alignment
    options: PartitionOptions
    sites: Mapping[str, Any]
    site_column: str = ""
    engine: Engine | None = None
    aligned_as: str = ""
    coordinator: str = ""
    division: Division = field(default_factory=Division)
    quorum: int = 0

    def opened(self) -> PartitionParts:
        """Open sites in this process, with keys and accounts of their own."""
        tables = self.alignment.tables
        options = self.options.settled(tuple(tables))
        return replace(self, options=options, sites=options.open_sites(tables, self.site_column))


def described(client: str, table: Table, policy: Policy, given: IntoPublished | None) -> Published | None:
    """Take a description, or propose what an owner would publish, where the policy asks for it.

    A PartitionError where the table is not as described: whoever gives both is its owner here.
    """
    if given is not None:
        published = as_published(given, f"published[{client!r}]")
        check.refuse(description_problems(client, published, table))
        return published
    if policy.formulas == policy.discrete == "any":
        return None
    return propose(table, policy.min_level_count)
