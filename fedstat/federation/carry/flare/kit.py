"""Files of a FLARE participant: what its kit allows, the job, and what both ends agree on."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedstat.federation.files import write_private, write_whole

SOCKET, KEY = "fedstat.socket", "fedstat.key"
"""In the server's folder: where the analyst's process is heard, and in ``local`` the secret that opens it."""

FOLDER = "fedstat"
"""In ``local`` of a site's kit: the folder of :mod:`fedstat.federation.carry.site_folder`."""

FLARE, SERVER, ANALYST, KIT = "flare", "server", "analyst", "kit"
"""In the coordinator's folder ``flare``, with the kits of server and analyst; in a site's, with its kit."""

STORE = "store"
"""In the server's kit: jobs, and what FLARE notes of them."""

USER = "analyst@fedstat.org"
"""Name under which the analyst submits the job."""

# seconds, as the controller of the job takes them
TIMEOUT, AGAIN_AFTER, START, IDLE = 3600.0, 10.0, 120.0, 4 * 3600.0
ALLOWED = [f"fedstat.federation.carry.flare.job.{name}" for name in ("FlareController", "FlareExecutor")]
NO_CODE = {"clone_job": "none", "byoc": "none", "shell_commands": "none", "server-predeployed-flwr": "none"}
RIGHTS = dict.fromkeys(("submit_job", "manage_job", "download_job", "view", "operate"), "any") | NO_CODE


def write_local(kit: str | Path) -> None:
    """Let the FLARE participant of a kit run this package's two classes, and no code that comes with a job.

    Logs hold warnings only and do not travel, and the server's job store is in a private folder of the kit.
    """
    kit = Path(kit).resolve()
    resources = json.loads((kit / "local" / "resources.json.default").read_text())
    resources |= {"class_list_enforcement_mode": "enforce", "class_allow_list": ALLOWED}
    resources["allow_log_streaming"] = False
    # what a site logs is for its owner, and names what went wrong with his records
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


def forget_jobs(server: str | Path) -> None:
    """Remove what a server that ended without a word left of its jobs, which would be running forever."""
    for part in Path(server, STORE).glob("*"):
        shutil.rmtree(part)


def turn_away(server: str | Path, names: Iterable[str]) -> None:
    """Write whose certificates a server refuses when it is started."""
    content = json.dumps({"disabled_clients": sorted(names)})
    write_whole(Path(server, "disabled_clients.json"), content.encode())


def write_key(server: str | Path) -> None:
    """Draw the secret with which the analyst's process opens the server's socket; for its owner alone."""
    path = Path(server, "local", KEY)
    path.unlink(missing_ok=True)
    write_private(path, secrets.token_bytes(32))


def write_job(
    folder: str | Path, sites: Sequence[str], timeout: float = TIMEOUT, again_after: float = AGAIN_AFTER
) -> Path:
    """Write what to submit for the job that serves an analysis: a specification that names two classes.

    For `timeout` and `again_after`, seconds, see
    :class:`~fedstat.federation.carry.flare.job.FlareController`.
    """
    config = Path(folder, "app", "config")
    config.mkdir(parents=True, exist_ok=True)
    controller, executor = ALLOWED
    arguments = {"timeout": timeout, "again_after": again_after}
    server = {
        "format_version": 2,
        "workflows": [{"id": "fedstat", "path": controller, "args": arguments}],
    }
    client = {
        "format_version": 2,
        "executors": [{"tasks": ["none"], "executor": {"id": "fedstat", "path": executor, "args": {}}}],
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
    Path(folder, "meta.json").write_text(json.dumps(meta, indent=2))
    return Path(folder)
