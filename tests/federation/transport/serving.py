"""Sites of a partition in processes of their own, over a folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from forked import Forked

import fedstat as fs
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.disclosure.site import Site, load_families
from fedstat.federation.tables.table import FrameTable
from fedstat.federation.transport.folder import FolderTransport, serve_folder
from fedstat.federation.transport.journal import Journal
from fedstat.federation.transport.remote import RemoteEngine, RemoteSite


def write_sites(partition: fs.ClientPartition, home: Path, coordinator: Identity) -> None:
    """Possessions of each site's owner: the table, the keys, and the pinned fingerprints."""
    for name, site in partition.sites.items():
        place = home / name
        place.mkdir(parents=True)
        data = site._data
        table = data.table.table if partition.site_column else data.table
        table.frame.to_parquet(place / "table.parquet")
        np.save(place / "entities.npy", table.entities)
        site.trust.identity.save(place / "identity.json")
        content = {
            "pinned": site.trust.pinned,
            "coordinator": coordinator.public.fingerprint,
            "seed": data.shared_seed,
            "site_column": partition.site_column,
        }
        (place / "site.json").write_text(json.dumps(content))


def wait_until_up(folder: Path, running: dict[str, Forked], seconds: float = 600.0) -> None:
    """A site that serves has made its folders."""
    until = time.monotonic() + seconds
    while not all((folder / name / "replies").exists() for name in running):
        if time.monotonic() > until or any(process.poll() is not None for process in running.values()):
            raise RuntimeError("the sites' processes did not start")
        time.sleep(0.05)


@contextmanager
def served(partition: fs.ClientPartition, home: Path, timeout: float = 600.0) -> Iterator[dict]:
    """Start one process per site; the processes by name, which a test may stop and start again."""
    coordinator = Identity.generate()
    write_sites(partition, home, coordinator)
    folder = home / "exchange"
    running = {name: Forked(serve_table, home, name, folder) for name in partition.sites}
    keys = {name: site.trust.identity.public.fingerprint for name, site in partition.sites.items()}
    transport = FolderTransport(folder, coordinator, keys, timeout, poll=0.005)
    try:
        wait_until_up(folder, running)
        yield {"transport": transport, "running": running, "folder": folder, "home": home}
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def connected(
    partition: fs.ClientPartition, transport: FolderTransport, journal: Path | None = None
) -> fs.ClientPartition:
    """The same partition; its sites receive requests through a transport."""
    sites = {name: RemoteSite(name, transport) for name in partition.sites}
    engine = RemoteEngine(sites, None if journal is None else Journal(journal))
    return replace(partition, _engine=engine)


def serve_table(home: Path, name: str, folder: Path) -> None:
    """Run the process of a site until it is ended."""
    place = home / name
    content = json.loads((place / "site.json").read_text())
    load_families()
    table = FrameTable(pd.read_parquet(place / "table.parquet"), np.load(place / "entities.npy"))
    site = Site(name, table, None, content["seed"], content["site_column"])
    site.trust._identity = Identity.load(place / "identity.json")
    site.trust.pinned.update(content["pinned"])
    serve_folder(site, folder, content["coordinator"], poll=0.005)
