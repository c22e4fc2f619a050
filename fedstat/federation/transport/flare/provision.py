"""Keys, certificates, kits and local settings of the participants of a FLARE federation."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import secrets
import shlex
import shutil
import site
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from fedstat.errors import EngineError, PartitionError, Remedy, SecurityError
from fedstat.federation.audit.event_log import COORDINATOR
from fedstat.federation.crypto.envelopes import Envelope, open_envelope, sign_envelope
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.files import write_atomic, write_private

# ----------------------------------------------------------------------------------------------------
# Files of a FLARE participant: what its kit allows, the job, and the settings that both ends share.

SOCKET, KEY = "fedstat.socket", "fedstat.key"
"""In the server's folder: the socket of the analyst's process, and in ``local`` the secret that opens it."""

FOLDER = "fedstat"
"""In ``local`` of a kit: the folder of its owner, of a site (:mod:`fedstat.federation.transport.site_folder`)
or of the coordinator."""

SIMULATED = "fedstat.json"
"""In ``local`` of a workspace of the simulator: the folders of all, by FLARE's name."""

SIMULATED_SERVER = "server"
"""The name of the coordinator's folder there."""

FLARE, SERVER, ANALYST, KIT = "flare", "server", "analyst", "kit"
"""In the coordinator's folder ``flare``: kits of server and analyst; in a site's folder: its kit."""

STORE = "store"
"""In the server's kit: jobs, and FLARE's records of them."""

USER = "analyst@fedstat.org"
"""Name under which the analyst submits the job."""

# seconds, as the controller of the job takes them
TIMEOUT, AGAIN_AFTER, START, IDLE = 3600.0, 10.0, 120.0, 4 * 3600.0
CONTROLLER, EXECUTOR = (
    f"fedstat.federation.transport.flare.job.{name}" for name in ("FlareController", "FlareExecutor")
)
ANALYSIS = "fedstat.flare_analysis.FlareAnalysis"
"""Server side of a job that carries out the analysis of its file :data:`ANALYSIS_FILE`."""
ANALYSIS_FILE = "analysis.toml"
ALLOWED = [CONTROLLER, EXECUTOR]
"""Classes that kits of this package allow."""
NO_CODE = {"clone_job": "none", "byoc": "none", "shell_commands": "none", "server-predeployed-flwr": "none"}
RIGHTS = dict.fromkeys(("submit_job", "manage_job", "download_job", "view", "operate"), "any") | NO_CODE


RESOURCES = "resources.json"


def write_local(kit: str | Path) -> None:
    """Let the FLARE participant of a kit run this package's two classes, but no code that comes with a job.

    Logs hold warnings only and do not travel, and the server's job store is in a private folder of the kit.
    """
    kit = Path(kit).resolve()
    resources = json.loads((kit / "local" / "resources.json.default").read_text())
    resources |= {"class_list_enforcement_mode": "enforce", "class_allow_list": ALLOWED}
    resources["allow_log_streaming"] = False
    # a site's log is for its owner only, since it describes errors in the owner's rows
    logs = ("log_receiver", "site_log_streamer")
    resources["components"] = [part for part in resources["components"] if part["id"] not in logs]
    if "snapshot_persistor" in resources:
        store = kit / STORE
        store.mkdir(mode=0o700, exist_ok=True)
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(store / "snapshots")
        manager = next(part for part in resources["components"] if part["id"] == "job_manager")
        manager["args"]["uri_root"] = str(store / "jobs")
    rights = json.loads((kit / "local" / "authorization.json.default").read_text())
    rights["permissions"] |= {"project_admin": RIGHTS, "lead": RIGHTS}
    log = json.loads((kit / "local" / "log_config.json.default").read_text())
    for logger in log["loggers"].values():
        logger["level"] = "WARNING"
    for name, content in (("resources", resources), ("authorization", rights), ("log_config", log)):
        (kit / "local" / f"{name}.json").write_text(json.dumps(content, indent=2))


def write_simulator(workspace: Path, folders: Mapping[str, Path]) -> None:
    """Let the simulator find the folders of a coordinator and of sites, and load this package's classes."""
    local = workspace / "local"
    local.mkdir(parents=True, exist_ok=True)
    found = json.loads((local / RESOURCES).read_text()) if (local / RESOURCES).exists() else {}
    added = {"class_allow_list": _allowed(found, [EXECUTOR, CONTROLLER, ANALYSIS])}
    write_atomic(local / RESOURCES, json.dumps(found | added, indent=2).encode())
    places = {name: str(folder.resolve()) for name, folder in folders.items()}
    write_atomic(local / SIMULATED, json.dumps(places, indent=2).encode())


def owner_folder(root: str, name: str) -> Path:
    """Return the folder of a participant, which its kit or the workspace of a simulator names."""
    local = Path(root, "local")
    if (local / FOLDER).exists() or not (local / SIMULATED).exists():
        return local / FOLDER
    return Path(json.loads((local / SIMULATED).read_text()).get(name, local / FOLDER))


def _allowed(resources: Mapping[str, Any], needed: Sequence[str]) -> list[str]:
    """Return the classes that a participant allows, and those that are needed in addition."""
    require_flare()
    from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST  # noqa: PLC0415

    allowed = list(resources.get("class_allow_list", DEFAULT_CLASS_ALLOW_LIST))
    return allowed if "*" in allowed else [*allowed, *(name for name in needed if name not in allowed)]


def enter_kit(kit: Path, folder: Path) -> list[str]:
    """Let a participant of somebody else's FLARE federation find a folder, and load this package's classes.

    Everything else of the kit stays as it is. Returns the classes that were added. PartitionError if `kit` is
    no startup kit, or names another folder.
    """
    local = kit / "local"
    found = [path for path in (local / RESOURCES, local / f"{RESOURCES}.default") if path.exists()]
    if not found:
        raise PartitionError(
            f"'{kit}' is no startup kit of a FLARE server or client: it has no local/{RESOURCES}.default"
        )
    resources = json.loads(found[0].read_text())
    is_client = (kit / "startup" / "fed_client.json").exists()
    needed = [EXECUTOR] if is_client else [CONTROLLER, ANALYSIS]
    allowed = _allowed(resources, needed)
    added = [name for name in needed if name not in resources.get("class_allow_list", ()) and name in allowed]
    # A site's log is for its owner only, since it describes errors in the owner's rows.
    wanted = resources | {"class_allow_list": allowed} | ({"allow_log_streaming": False} if is_client else {})
    if wanted != resources:
        write_atomic(local / RESOURCES, json.dumps(wanted, indent=2).encode())
    link = local / FOLDER
    if not link.exists():
        link.symlink_to(folder.resolve(), target_is_directory=True)
    elif link.resolve() != folder.resolve():
        raise PartitionError(f"'{link}' leads to another folder, '{link.resolve()}'; remove it first")
    return added


def remove_stale_jobs(server: str | Path) -> None:
    """Remove the jobs of a server that ended without notice; they would otherwise run forever."""
    for part in Path(server, STORE).glob("*"):
        shutil.rmtree(part)


def refuse_certificates(server: str | Path, names: Iterable[str]) -> None:
    """Write the list of certificates that a server refuses when it starts."""
    content = json.dumps({"disabled_clients": sorted(names)})
    write_atomic(Path(server, "disabled_clients.json"), content.encode())


def write_key(server: str | Path) -> None:
    """Draw the secret that opens the server's socket to the analyst's process; only its owner can read it."""
    path = Path(server, "local", KEY)
    path.unlink(missing_ok=True)
    write_private(path, secrets.token_bytes(32))


def write_job(
    folder: str | Path, sites: Sequence[str], timeout: float = TIMEOUT, again_after: float = AGAIN_AFTER
) -> Path:
    """Write the job of an analysis for submission: a specification that names two classes.

    For `timeout` and `again_after`, seconds, see
    :class:`~fedstat.federation.transport.flare.job.FlareController`.
    """
    return _write_job(Path(folder), sites, CONTROLLER, {"timeout": timeout, "again_after": again_after})


def write_analysis_job(folder: str | Path, sites: Sequence[str], analysis: str, timeout: float) -> Path:
    """Write a job for any FLARE federation: it carries out the `analysis`, the text of a TOML file.

    PartitionError if the folder exists.
    """
    if Path(folder).exists():
        raise PartitionError(f"'{folder}' exists; choose another folder for the job")
    job = _write_job(Path(folder), sites, ANALYSIS, {"timeout": timeout})
    (job / "app" / "config" / ANALYSIS_FILE).write_text(analysis, encoding="utf-8")
    return job


def _write_job(folder: Path, sites: Sequence[str], controller: str, arguments: Mapping[str, float]) -> Path:
    config = folder / "app" / "config"
    config.mkdir(parents=True, exist_ok=True)
    server = {
        "format_version": 2,
        "workflows": [{"id": "fedstat", "path": controller, "args": arguments}],
    }
    client = {
        "format_version": 2,
        "executors": [{"tasks": ["none"], "executor": {"id": "fedstat", "path": EXECUTOR, "args": {}}}],
    }
    meta = {
        "name": "fedstat",
        "resource_spec": {},
        "deploy_map": {"app": ["server", *sites]},
        "min_clients": len(sites),
        "mandatory_clients": list(sites),
    }
    (config / "config_fed_server.json").write_text(json.dumps(server, indent=2))
    (config / "config_fed_client.json").write_text(json.dumps(client, indent=2))
    (folder / "meta.json").write_text(json.dumps(meta, indent=2))
    return folder


# ----------------------------------------------------------------------------------------------------
# Keys, certificates and kits of a FLARE federation; every participant draws its own private key.
#
# FLARE's distributed provisioning has three steps. A site draws a key and writes a certificate request; the
# coordinator's certificate authority signs it; the site puts the certificate next to its key into a kit. Only
# the request and the certificate are transferred. Each is in an envelope signed with the sender's long-term
# key (:mod:`fedstat.federation.crypto.envelopes`), so that only the pinned fingerprints have to be compared.
#
# ::
#
#     <coordinator>/flare/authority/   the certificate authority
#     <coordinator>/flare/server/      kit of the server
#     <coordinator>/flare/analyst/     kit of the analyst, who submits the job
#     <site>/flare/request/            private key, until the certificate has come
#     <site>/flare/kit/                kit of the site

AUTHORITY, REQUEST, PROJECT = "authority", "request", "fedstat"
NAME, HOST = re.compile(r"[A-Za-z0-9_-]{1,64}"), re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,62}[A-Za-z0-9])?")
LONGEST_SOCKET = 100
"""Largest length of the path of a socket in bytes; the system allows about 108."""


@dataclass(frozen=True, slots=True)
class Participant:
    """A participant as FLARE knows it: `name` is that of a site, or the host for the server.

    `kind` is "client", "server" or "lead"; `more` are further entries of FLARE's description.
    """

    name: str
    kind: str
    more: Mapping[str, Any]

    def describe(self) -> str:
        """Return FLARE's description of the participant."""
        entry = {"name": self.name, "type": self.kind, "org": PROJECT}
        if self.kind == "lead":
            entry |= {"type": "admin", "role": "lead"}
        return json.dumps({"name": PROJECT, "participants": [entry | dict(self.more)]})


def check_flare_name(name: str) -> str:
    """Check that FLARE accepts a name for a site."""
    if not NAME.fullmatch(name):
        raise PartitionError(
            f"the name '{name}' is not valid for a site over NVIDIA FLARE: expected at most 64 letters, "
            "digits, '-' and '_', without blanks or accents"
        )
    return name


def check_address(host: str, port: int) -> None:
    """Check a host and a port for a FLARE server."""
    if not HOST.fullmatch(host):
        raise PartitionError(
            f"host: expected the name of a machine such as 'stats.example.org', not {host!r}"
        )
    if not 0 < port < 65536:
        raise PartitionError(f"port: expected a number from 1 to 65535, not {port}")


def require_flare() -> None:
    """Check that NVIDIA FLARE is installed; ImportError if it is not."""
    if importlib.util.find_spec("nvflare") is None:
        raise ImportError("this federation uses NVIDIA FLARE: pip install fedstat[flare]")


def prepare_server(folder: Path, host: str, port: int) -> None:
    """Make the certificate authority of a coordinator's folder, once, and the kits of server and analyst.

    Sites reach the server at `host` and `port`. PartitionError if the folder's path is too long for a socket,
    EngineError if FLARE did not make them.
    """
    check_address(host, port)
    home = (folder / FLARE).resolve()
    if len(bytes(home / SERVER / SOCKET)) > LONGEST_SOCKET:
        raise PartitionError(
            f"'{home}': the path is too long for a local socket; move the coordinator's folder up some levels"
        )
    home.mkdir(mode=0o700, exist_ok=True)
    if not (home / AUTHORITY).exists():
        _found_authority(home, host, port)
    _make_server(home, host, port)
    participant, place = Participant(USER, "lead", {}), home / f"{ANALYST}-{REQUEST}"
    assemble(place, certify(folder, create_key(place, participant), participant), home / ANALYST)
    write_local(home / SERVER)
    write_key(home / SERVER)


def _found_authority(home: Path, host: str, port: int) -> None:
    profile: dict[str, Any] = {"name": PROJECT, "scheme": "grpc", "connection_security": "mtls"}
    profile |= {"server": {"host": host, "fed_learn_port": port, "admin_port": port}}
    (home / "profile.yaml").write_text(json.dumps(profile))
    _flare(home, "cert", "init", "--profile", "profile.yaml", "-o", AUTHORITY)


def _make_server(home: Path, host: str, port: int) -> None:
    """Make the kit of the server by FLARE's central provisioning, with the authority that is here.

    The server needs an authority of its own for the certificates of jobs in versions after 2.9, which only
    somebody with the root key can make: kits of requests do not have it.
    """
    require_flare()
    from nvflare.lighter import utils  # noqa: PLC0415
    from nvflare.lighter.entity import Project  # noqa: PLC0415
    from nvflare.lighter.impl.cert import CertBuilder  # noqa: PLC0415
    from nvflare.lighter.impl.static_file import StaticFileBuilder  # noqa: PLC0415
    from nvflare.lighter.impl.workspace import WorkspaceBuilder  # noqa: PLC0415
    from nvflare.lighter.provisioner import Provisioner  # noqa: PLC0415

    root = home / AUTHORITY
    project = Project(
        PROJECT,
        "",
        props={"api_version": 3, "connection_security": "mtls"},
        serialized_root_cert=(root / "rootCA.pem").read_bytes(),
        root_private_key=utils.load_private_key_file(str(root / "rootCA.key")),
    )
    project.set_server(host, PROJECT, {"fed_learn_port": port, "admin_port": port})
    builders = [WorkspaceBuilder(), CertBuilder(), StaticFileBuilder(scheme="grpc")]
    with TemporaryDirectory(dir=home) as place:
        with redirect_stdout(io.StringIO()):
            made = Provisioner(place, builders).provision(project)
        shutil.rmtree(home / SERVER, ignore_errors=True)
        shutil.move(Path(made["current_prod_dir"], host), home / SERVER)
    (home / SERVER).chmod(0o700)


def create_key(folder: Path, participant: Participant) -> bytes:
    """Draw a private key into a folder; return its certificate request as a zip file."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as place:
        description = Path(place, "participant.yaml")
        description.write_text(participant.describe())
        reported = _flare(folder.parent, "cert", REQUEST, "-p", str(description), "--out", str(folder))
    return Path(reported["request_zip"]).read_bytes()


def certify(folder: Path, request: bytes, participant: Participant) -> bytes:
    """Sign a request with the coordinator's authority; SecurityError if it asks for other rights."""
    home = (folder / FLARE).resolve()
    with TemporaryDirectory(dir=home) as place:
        requested, signed = Path(place, "it.request.zip"), Path(place, "it.signed.zip")
        requested.write_bytes(request)
        words = ("-c", AUTHORITY, "--profile", "profile.yaml", "--out", str(signed))
        reported = _flare(home, "cert", "approve", str(requested), *words)
        # a site could request the certificate of an analyst, who can submit jobs
        if (reported["name"], reported["cert_type"]) != (participant.name, participant.kind):
            raise SecurityError(
                f"the request asks for a certificate of '{reported['name']}' as {reported['cert_type']}; "
                f"expected '{participant.name}' as {participant.kind}. No certificate was issued"
            )
        return signed.read_bytes()


def assemble(request: Path, signed: bytes, kit: Path) -> None:
    """Put a certificate next to its key into a kit, and remove the folder of the request."""
    with zipfile.ZipFile(io.BytesIO(signed)) as content:
        root = x509.load_pem_x509_certificate(content.read("rootCA.pem"))
    # FLARE asks for a confirmation; the envelope shows that the coordinator sent this authority
    fingerprint = root.fingerprint(SHA256()).hex()
    with TemporaryDirectory(dir=kit.parent) as place:
        path = Path(place, "it.signed.zip")
        path.write_bytes(signed)
        requested, root_is = (
            ("--request-dir", str(request.resolve())),
            ("--fingerprint", f"SHA256:{fingerprint}"),
        )
        reported = _flare(kit.parent, "package", str(path), "-w", place, *requested, *root_is)
        shutil.rmtree(kit, ignore_errors=True)
        shutil.move(reported["output_dir"], kit)
    kit.chmod(0o700)
    shutil.rmtree(request)


def create_kit_request(folder: Path, name: str, identity: Identity) -> bytes:
    """Draw a site's key, and return the signed certificate request."""
    request = create_key(
        (folder / FLARE / REQUEST).resolve(), Participant(check_flare_name(name), "client", {})
    )
    return sign_envelope(identity, Envelope(name, COORDINATOR, REQUEST, request))


def grant_kit(
    folder: Path, request: bytes, sites: Mapping[str, str], identity: Identity, where: str
) -> tuple[str, bytes]:
    """Certify a site that has joined; return its name and the signed content of its kit.

    SecurityError if no joined site signed the request, or if it requests more than a site's certificate.
    """
    name, envelope = _open_request(request, sites, where)
    if (envelope.sender, envelope.receiver, envelope.number) != (name, COORDINATOR, REQUEST):
        raise SecurityError(f"{where}: is not a request for a kit")
    signed = certify(folder, envelope.payload, Participant(check_flare_name(name), "client", {}))
    return name, sign_envelope(identity, Envelope(COORDINATOR, name, KIT, signed))


def accept_kit(folder: Path, granted: bytes, name: str, coordinator: str, where: str) -> Path:
    """Make a site's kit from the coordinator's envelope.

    SecurityError if the pinned coordinator did not sign it or meant it for another site, PartitionError if no
    request is open, EngineError if it is for another key.
    """
    envelope = open_envelope(granted, coordinator, where)
    if (envelope.sender, envelope.receiver, envelope.number) != (COORDINATOR, name, KIT):
        raise SecurityError(f"{where}: is a kit for '{envelope.receiver}', but this site is '{name}'")
    home = (folder / FLARE).resolve()
    if not (home / REQUEST).exists():
        raise PartitionError(
            f"no request is open for '{where}': the site has its kit, or the request is on another machine",
            remedy=Remedy("fedstat site request {folder}", "Make a new one with '{call}'").filled(
                folder=shlex.quote(str(folder))
            ),
        )
    assemble(home / REQUEST, envelope.payload, home / KIT)
    write_local(home / KIT)
    return home / KIT


def _open_request(request: bytes, sites: Mapping[str, str], where: str) -> tuple[str, Envelope]:
    """Find the site that signed a request."""
    for name, fingerprint in sites.items():
        try:
            return name, open_envelope(request, fingerprint, where)
        except SecurityError:
            continue
    there = ", ".join(sites) or "none"
    raise SecurityError(
        f"{where}: it was altered, or no joined site signed it. Joined sites: {there}",
        remedy=Remedy("fedstat federation join FOLDER CARD", "Add a site with '{call}'"),
    )


def days_left(kit: Path) -> int:
    """Return the days until the first certificate of a kit expires; negative if one has expired."""
    paths = [path for path in (kit / "startup").iterdir() if path.suffix in (".crt", ".pem")]
    ends = [x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc for path in paths]
    return (min(ends) - datetime.now(UTC)).days


def _flare(home: Path, *words: str) -> dict[str, Any]:
    """Run one of FLARE's commands; its own notes are written to the folder only."""
    require_flare()
    command = [sys.executable, "-m", "nvflare.cli", "--format", "json", *words]
    # A separate home folder for its notes, with the present Python packages.
    environment = os.environ | {"HOME": str(home), "PYTHONUSERBASE": site.getuserbase()}
    done = subprocess.run(
        command,
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    try:
        reported: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise EngineError(
            f"NVIDIA FLARE failed in '{words[0]} {words[1]}' (exit code {done.returncode})"
        ) from None
    if reported.get("status") != "ok":
        reason = f"{reported.get('message')} {reported.get('hint') or ''}"
        raise EngineError(f"NVIDIA FLARE refused the command: {reason}".rstrip())
    data: dict[str, Any] = reported["data"]
    return data
