"""``federation.toml``: the sites of a federation and the transport that reaches them.

::

    federation.toml    layout, transport, and the fingerprints of the sites
    identity.json      the coordinator's private keys, for its owner alone (mode 0600)
    heads.json         what the sites signed of their accounts: see
    :mod:`fedstat.federation.transport.journal`
    alignment.npz      vertical layout: see :mod:`fedstat.federation.protocols.linkage`
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from fedstat.errors import PartitionError, Remedy, SecurityError
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.files import WRITERS, is_open_to_others
from fedstat.federation.message import NO_PURPOSE, Purpose
from fedstat.federation.partition.describe import Layout
from fedstat.federation.transport.bucket import BucketTransport, open_bucket
from fedstat.federation.transport.flare.analysis import open_analysis
from fedstat.federation.transport.flare.provision import FLARE, START
from fedstat.federation.transport.folder import FolderTransport
from fedstat.federation.transport.mailbox import resolve_exchange
from fedstat.federation.transport.remote import Transport
from fedstat.federation.transport.site_folder import IDENTITY, load_identity, read_entries

FEDERATION_FILENAME, FOLDER_TRANSPORT, BUCKET_TRANSPORT = "federation.toml", "folder", "bucket"
LAYOUTS = ("horizontal", "vertical")
APART = "apart"


@dataclass(frozen=True, slots=True)
class FederationFile:
    """The entries of ``federation.toml``.

    `layout` is "horizontal" or "vertical"; `sites` has a fingerprint by site, in the order of the partition;
    `name` is for people. `exchange` is the folder of requests and replies, relative to that of the file, or
    the address of a bucket; `timeout` the seconds until a site counts as silent; `min_count` the fewest
    entities of a category level in a design. `transport` transfers requests to the sites: "folder", "bucket",
    "flare", whose server is at `host` and `port`, or the name of a transport that is passed to
    :func:`connect`. `coordinator` is the site of this coordinator, or "apart". `revoked` has the names of
    removed sites, by the fingerprint of their keys. `person`, `study` and `purpose` are stated to the sites
    with each request; see :meth:`fedstat.ClientPartition.connect`.
    """

    layout: str
    sites: Mapping[str, str]
    name: str = ""
    exchange: str = "exchange"
    timeout: float = 3600.0
    min_count: int = 5
    transport: str = FOLDER_TRANSPORT
    host: str = ""
    port: int = 0
    coordinator: str = APART
    revoked: Mapping[str, str] = field(default_factory=dict)
    person: str = ""
    study: str = ""
    purpose: str = ""

    def stated_purpose(self, given: Purpose = NO_PURPOSE) -> Purpose:
        """Return what the sites are informed of; texts that are not given are those of the file.

        Raises
        ------
        PartitionError
            A text cannot be shown to an owner.
        """
        found = Purpose(
            given.person or self.person, given.study or self.study or self.name, given.purpose or self.purpose
        )
        if problem := found.problem():
            raise PartitionError(problem)
        return found


@dataclass(frozen=True, slots=True)
class FederationDescription(FederationFile):
    """What ``federation.toml`` says, and the `folder` where it is, with the coordinator's keys."""

    layout: Layout
    folder: Path = Path()


def read_federation(path: str | Path) -> FederationDescription:
    """Read ``federation.toml``, given itself or by its folder."""
    path = Path(path)
    path = path / FEDERATION_FILENAME if path.is_dir() else path
    if is_open_to_others(path, WRITERS):
        raise SecurityError(
            f"others can write '{path}', and so replace the pinned sites by their own: chmod go-w '{path}'"
        )
    folder = path.parent if path.suffix else path  # a folder that is not there is named as it was given
    file = read_entries(FederationFile, path, f"make it with 'fedstat federation new {folder}'")
    if file.layout not in LAYOUTS:
        raise PartitionError(
            f"'{path}': layout: expected \"horizontal\" (sites hold different rows of the same columns) or "
            '"vertical" (different columns of entities that they share)'
        )
    if file.coordinator != APART and file.coordinator not in file.sites:
        raise PartitionError(
            f"'{path}': coordinator: expected \"{APART}\", or the name of the site at which it runs"
        )
    entries = {entry.name: getattr(file, entry.name) for entry in fields(file)}
    entries |= {"exchange": resolve_exchange(file.exchange, path.parent), "folder": path.parent}
    return FederationDescription(**entries)


def open_transport(
    federation: FederationDescription, timeout: float | None = None, sites: Sequence[str] | None = None
) -> Transport:
    """Open what the file of a federation names, with the coordinator's keys.

    `timeout`, by default that of the file, is the seconds until a site counts as silent and in which it has
    to connect; without any of `sites`, by default all, no job of NVIDIA FLARE is started. PartitionError if
    the file names another transport or the keys are absent, SecurityError if others may read them; see also
    :func:`fedstat.federation.transport.flare.analysis.open_analysis`.
    """
    if federation.transport == BUCKET_TRANSPORT:
        return open_bucket_transport(federation, timeout)
    if federation.transport != FLARE:
        return open_folder_transport(federation, timeout)
    return open_analysis(
        federation.folder,
        coordinator_identity(federation.folder),
        federation.sites,
        tuple(federation.sites) if sites is None else sites,
        federation.timeout,
        START if timeout is None else timeout,
    )


def join_remedy(folder: Path) -> Remedy:
    """Return what helps a federation without sites."""
    return Remedy("fedstat federation join {folder} CARD", "add one with '{call}'").filled(
        folder=shlex.quote(str(folder))
    )


def open_folder_transport(federation: FederationDescription, timeout: float | None = None) -> FolderTransport:
    """Open the folder of a federation, with the coordinator's keys."""
    if federation.transport != FOLDER_TRANSPORT:
        raise PartitionError(
            f"'{federation.folder / FEDERATION_FILENAME}': transport: expected \"{FOLDER_TRANSPORT}\", "
            f'"{BUCKET_TRANSPORT}" or "{FLARE}"; a transport of your own is the argument transport= of '
            "ClientPartition.connect"
        )
    return FolderTransport(
        Path(federation.exchange),
        coordinator_identity(federation.folder),
        federation.sites,
        federation.timeout if timeout is None else timeout,
    )


def open_bucket_transport(federation: FederationDescription, timeout: float | None = None) -> BucketTransport:
    """Open the bucket of a federation, with the coordinator's keys."""
    return BucketTransport(
        open_bucket(federation.exchange),
        coordinator_identity(federation.folder),
        federation.sites,
        federation.timeout if timeout is None else timeout,
    )


def coordinator_identity(folder: Path) -> Identity:
    """Read the coordinator's keys."""
    if not (folder / IDENTITY).exists():
        raise PartitionError(
            f"'{folder / IDENTITY}', the coordinator's keys, is absent; take it from a backup, or make a new "
            "federation, whose fingerprint the sites then have to pin"
        )
    return load_identity(folder)
