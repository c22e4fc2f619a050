"""A FLARE federation on this machine: provisioned, started, and stopped again."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

import fedstat as fs
from fedstat.federation.audit.ledger_file import begin_ledger
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.files import write_private
from fedstat.federation.tables.aligned_table import AlignedTable
from fedstat.federation.transport.flare.analysis import FlareTransport
from fedstat.federation.transport.flare.provision import FOLDER, write_job, write_key, write_local
from fedstat.federation.transport.journal import Journal
from fedstat.federation.transport.remote import RemoteEngine, RemoteSite

SERVER, ANALYST = "localhost", "analyst@fedstat.org"
PROJECT = """
api_version: 3
name: federation
participants:
  - {{name: {server}, type: server, org: fedstat, fed_learn_port: {port}, admin_port: {port}}}
{clients}
  - {{name: {analyst}, type: admin, org: fedstat, role: project_admin}}
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
    args: {{template_file: [master_template.yml]}}
  - path: nvflare.lighter.impl.static_file.StaticFileBuilder
    args: {{config_folder: config, scheme: grpc}}
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""
ALIGNED_AS = "0123456789abcdef"
"""Name of the alignment of sites that hold different columns."""
CLIENT = "  - {{name: {name}, type: client, org: fedstat}}"


@dataclass
class Federation:
    """What runs, and how long each phase of its start took."""

    kits: Path
    port: int
    coordinator: Identity
    session: Session | None = None
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def serve(self, partition: fs.ClientPartition, **times: float) -> tuple[str, FlareTransport]:
        """Give the sites their tables, submit the job, and wait until it takes questions."""
        write_sites(partition, self.kits, self.coordinator)
        return self.submit(partition, **times)

    def submit(self, partition: fs.ClientPartition, **times: float) -> tuple[str, FlareTransport]:
        begun = time.monotonic()
        folder = self.kits.parent / "job"
        job = self.session.submit_job(str(write_job(folder, partition.sites, **times)))
        transport = FlareTransport(self.kits / SERVER, self.coordinator, partition.fingerprints)
        transport.wait(180)
        self.seconds["job"] = time.monotonic() - begun
        return job, transport

    def status(self, job: str, seconds: float = 120.0) -> str:
        """How a job ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            status = self.session.get_job_meta(job)["status"]
            if status.startswith("FINISHED"):
                return status
            time.sleep(0.5)
        return status

    def job_process(self, site: str) -> psutil.Process:
        """The process that holds the site's data."""
        (process,) = psutil.Process(self.processes[site].pid).children()
        return process


def connected(
    partition: fs.ClientPartition, transport: FlareTransport, journal: Path | None = None
) -> fs.ClientPartition:
    """The same partition, whose sites are asked over FLARE."""
    sites = {name: RemoteSite(name, transport) for name in partition.sites}
    return replace(partition, _engine=RemoteEngine(sites, None if journal is None else Journal(journal)))


def aligned(partition: fs.ClientPartition) -> fs.ClientPartition:
    """The same partition, with the name of the alignment that its served sites have."""
    return replace(partition, _aligned_as=ALIGNED_AS)


def write_sites(partition: fs.ClientPartition, kits: Path, coordinator: Identity) -> None:
    """Possessions of each site's owner: the table, the keys, and the pinned fingerprints."""
    for name, site in partition.sites.items():
        place = kits / name / "local" / FOLDER
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o700)
        data = site._data
        table = data.table.table if partition.site_column else data.table
        frame, key = table.frame, list(partition.key)
        if key:
            rows = partition.rows[name]
            frame = frame.assign(**partition.entities[rows].to_frame(index=False))
            AlignedTable(name, frame, key, place).keep(ALIGNED_AS, rows)
        frame.to_parquet(place / "table.parquet")
        site.trust.identity.save(place / "identity.json")
        begin_ledger(place, site.trust.identity)
        write_private(place / "policy.toml", site.policy.to_toml().encode())
        lines = [
            f"name = {json.dumps(name)}",
            f"coordinator = {json.dumps(coordinator.public.fingerprint)}",
            f"site_column = {json.dumps(partition.site_column)}",
            f'seed = "{data.shared_seed:032x}"',
            "[data]",
            'kind = "parquet"',
            'path = "table.parquet"',
            *([f"key = {json.dumps(key)}"] if key else []),
            "[pinned]",
            *(f"{json.dumps(peer)} = {json.dumps(key)}" for peer, key in site.trust.pinned.items()),
        ]
        (place / "site.toml").write_text("\n".join(lines))
        (place / "site.toml").chmod(0o600)


def provision(home: Path, sites: Sequence[str], port: int) -> Path:
    """Draw keys and certificates; the folder with one kit per participant."""
    home.mkdir(parents=True)
    clients = "\n".join(CLIENT.format(name=name) for name in sites)
    project = PROJECT.format(server=SERVER, port=port, clients=clients, analyst=ANALYST)
    (home / "project.yml").write_text(project)
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", "ws", "--force"]
    subprocess.run(command, cwd=home, check=True, capture_output=True, timeout=180)
    return home / "ws" / "federation" / "prod_00"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(kit: Path) -> subprocess.Popen:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with open(kit / "output.txt", "w") as output:
        return subprocess.Popen(
            ["bash", str(kit / "startup" / "sub_start.sh"), "--once"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def stop(processes: Mapping[str, subprocess.Popen]) -> None:
    """Kill what was started, and the job processes that it started."""
    for process in processes.values():
        try:
            family = psutil.Process(process.pid)
            for member in [*family.children(recursive=True), family]:
                member.kill()
        except psutil.NoSuchProcess:
            pass
        process.wait()


def wait_for_sites(federation: Federation, sites: Sequence[str], seconds: float = 180.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if federation.session is None:
                federation.session = new_secure_session(ANALYST, str(federation.kits / ANALYST))
            if len(federation.session.get_system_info().client_info) == len(sites):
                return
        except Exception:
            federation.session = None
        time.sleep(0.5)
    raise RuntimeError("the sites did not register with the server")


@contextmanager
def federation_of(sites: Sequence[str], home: Path) -> Iterator[Federation]:
    """Provision and start one server and the sites, each a process, and wait until all have registered."""
    begun, port = time.monotonic(), free_port()
    federation = Federation(provision(home, sites, port), port, Identity.generate())
    for name in (SERVER, *sites):
        write_local(federation.kits / name)
    write_key(federation.kits / SERVER)
    federation.seconds["provision"] = time.monotonic() - begun
    try:
        for name in (SERVER, *sites):
            federation.processes[name] = start(federation.kits / name)
        wait_for_sites(federation, sites)
        federation.seconds["start"] = time.monotonic() - begun - federation.seconds["provision"]
        yield federation
    finally:
        if federation.session is not None:
            federation.session.close()
        stop(federation.processes)
