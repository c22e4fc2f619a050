"""Systemd units, container files and Kubernetes manifests for a site or a coordinator's server."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import metadata
from pathlib import Path

from fedstat.errors import PartitionError, Remedy
from fedstat.federation.message import VERSION
from fedstat.federation.partition.federation_file import read_federation
from fedstat.federation.transport.flare.provision import FLARE
from fedstat.federation.transport.mailbox import is_bucket
from fedstat.federation.transport.site_folder import read_description, table_folders
from fedstat.operator.flare_commands import uses_flare
from fedstat.operator.site_status import FOR_GOOD
from fedstat.operator.terminal import shell_path

# ----------------------------------------------------------------------------------------------------
# A systemd unit, a Dockerfile and a compose file for a site or the server of a coordinator, with its paths.
#
# The process may write to its folder and to the exchange, and may read its data. Nothing else is accessible.

UNIT = """\
# /etc/systemd/system/fedstat-{name}.service, then:
#   systemctl daemon-reload && systemctl enable --now fedstat-{name}
# Its log:  journalctl -u fedstat-{name}   (journald rotates it)
[Unit]
Description=fedstat: {name}
After=network-online.target
Wants=network-online.target
RequiresMountsFor={mounts}

[Service]
User={user}
WorkingDirectory={folder}
ExecStart={command}
Restart=on-failure
# Another process uses its kit, or the site was removed: a restart would fail, or replace the other process.
RestartPreventExitStatus={for_good}
RestartSec=10
# A request in progress is completed first.
TimeoutStopSec=300
# No watchdog, because one request may take minutes. Use  fedstat site health  in a monitor.
UMask=0077
NoNewPrivileges=true
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths={writes}
PrivateTmp={private_tmp}
PrivateDevices=true
ProtectKernelTunables=true
ProtectKernelModules=true
ProtectKernelLogs=true
ProtectControlGroups=true
ProtectClock=true
ProtectHostname=true
ProtectProc=invisible
RestrictNamespaces=true
RestrictRealtime=true
RestrictSUIDSGID=true
LockPersonality=true
CapabilityBoundingSet=
RestrictAddressFamilies={families}
SystemCallArchitectures=native
SystemCallFilter=@system-service
# Compiled loops are kept here. They are written and then run, so MemoryDenyWriteExecute stays off.
CacheDirectory=fedstat-{name}
CacheDirectoryMode=0700
Environment=NUMBA_CACHE_DIR=/var/cache/fedstat-{name}

[Install]
WantedBy=multi-user.target
"""
DOCKERFILE = """\
# To make the wheel in this folder from the source tree:  pip wheel --no-deps --wheel-dir . SOURCE
FROM python:3.12-slim
LABEL org.opencontainers.image.title="fedstat" \\
      org.opencontainers.image.description="{summary}" \\
      org.opencontainers.image.version="{version}" \\
      org.opencontainers.image.licenses="{license}" \\
      org.opencontainers.image.base.name="docker.io/library/python:3.12-slim"
COPY fedstat-{version}-py3-none-any.whl /tmp/
RUN pip install --no-cache-dir "/tmp/fedstat-{version}-py3-none-any.whl{extras}"
# The bill of materials, in the format of CycloneDX; its tool leaves with the same layer.
RUN python -m venv /tmp/sbom \\
    && /tmp/sbom/bin/pip install --no-cache-dir "cyclonedx-bom==7.*" \\
    && mkdir -p {sbom_folder} \\
    && /tmp/sbom/bin/cyclonedx-py environment --output-reproducible \\
        --output-file {sbom} /usr/local/bin/python3 \\
    && rm -r /tmp/sbom
# Without root; the compose file names the owner of the folder instead.
USER {user}
ENV NUMBA_CACHE_DIR=/tmp/numba HOME=/tmp PYTHONUNBUFFERED=1
ENTRYPOINT ["fedstat"]
"""


SBOM = "/usr/share/doc/fedstat/sbom.cdx.json"
"""The bill of materials in the image."""


KUBERNETES = """\
# kubectl create secret generic {name}-folder --from-file=folder.tar.gz    the first time; see docs/running.md
# kubectl apply -f {name}.yaml
#
# The folder of the site is on a volume, at the path of this machine. The first start unpacks it from the
# secret; from then on the volume has the ledger, and the secret can be deleted.
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {name}-site
spec:
  accessModes: [ReadWriteOnce]
  resources:
    requests:
      storage: 5Gi
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {name}
spec:
  podSelector:
    matchLabels:
      app: {name}
  policyTypes: [Ingress, Egress]
  ingress: []
  egress: {egress}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {name}
  labels:
    app: {name}
spec:
  # Two processes would write two histories of one site.
  replicas: 1
  serviceName: {name}
  selector:
    matchLabels:
      app: {name}
  template:
    metadata:
      labels:
        app: {name}
    spec:
      automountServiceAccountToken: false
      enableServiceLinks: false
      # A request in progress is completed first.
      terminationGracePeriodSeconds: 300
      securityContext:
        runAsNonRoot: true
        runAsUser: {user}
        runAsGroup: {user}
        # Only the top of a new volume is handed over: the site refuses files that a group can read.
        fsGroup: {user}
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile:
          type: RuntimeDefault
      initContainers:
        - name: unpack
          image: {image}
          command: [sh, -c, "{unpack}"]
          securityContext: &restricted
            readOnlyRootFilesystem: true
            allowPrivilegeEscalation: false
            capabilities:
              drop: [ALL]
          volumeMounts:
            - name: folder
              mountPath: /run/fedstat/folder
              readOnly: true
            - name: secrets
              mountPath: /run/fedstat/secrets
              readOnly: true
{written}      containers:
        - name: site
          image: {image}
          args: {command}
          securityContext: *restricted
          # No liveness probe: one request may take minutes, and a restart ends open analyses.
          readinessProbe:
            exec:
              command: {health}
            periodSeconds: 60
            timeoutSeconds: 30
{variables}          volumeMounts:
            - name: tmp
              mountPath: /tmp
{mounts}      volumes:
        - name: tmp
          emptyDir: {{}}
        - name: folder
          secret:
            secretName: {name}-folder
            optional: true
        - name: secrets
          secret:
            secretName: {name}-secrets
            optional: true
{volumes}"""
NOBODY = 10001
"""User of a pod where the folder belongs to root."""
UNPACKED, SECRETS, PRIVATE = "/run/fedstat/folder", "/run/fedstat/secrets", "private"
"""Where a pod finds the archive of the folder and the secrets; kind of the volume for private copies."""


@dataclass(frozen=True, slots=True)
class PodVolume:
    """A volume of a pod: a claim, or memory for private copies of secrets."""

    name: str
    path: str
    is_read_only: bool = False

    def mount(self) -> str:
        """Write where a container has it."""
        only = "              readOnly: true\n" if self.is_read_only else ""
        return f"            - name: {self.name}\n              mountPath: {self.path}\n{only}"

    def volume(self, service: str) -> str:
        """Write what it is."""
        if self.name.startswith(PRIVATE):
            return f"        - name: {self.name}\n          emptyDir:\n            medium: Memory\n"
        only = "            readOnly: true\n" if self.is_read_only else ""
        claim = f"            claimName: {service}-{self.name}\n{only}"
        return f"        - name: {self.name}\n          persistentVolumeClaim:\n{claim}"


@dataclass(frozen=True, slots=True)
class ServiceUnit:
    """A service: its arguments after ``fedstat``, what it writes and reads, and what it needs.

    `variables` are the names of the environment variables that it uses; their values are not written.
    `secrets` are the files that it reads which have a connection string.
    """

    name: str
    folder: Path
    words: Sequence[str]
    writes: Sequence[Path]
    reads: Sequence[Path] = ()
    extras: Sequence[str] = ()
    by_network: bool = False
    health: Sequence[str] = ()
    port: int = 0
    variables: Sequence[str] = ()
    secrets: Sequence[str] = ()

    def unit(self) -> str:
        """Write the systemd unit."""
        places = [_plain(path) for path in (*self.writes, *self.reads)]
        words = [_plain(Path(sys.executable)), "-m", "fedstat.operator", *self.words, _plain(self.folder)]
        masked = any(path.startswith(("/tmp/", "/var/tmp/")) for path in places)
        return UNIT.format(
            name=self.name,
            mounts=" ".join(dict.fromkeys(places)),
            user=self._owner(),
            for_good=FOR_GOOD,
            folder=_plain(self.folder),
            command=" ".join(words),
            writes=" ".join(dict.fromkeys(_plain(path) for path in self.writes)),
            private_tmp="false" if masked else "true",
            families="AF_UNIX AF_INET AF_INET6" if self.by_network else "AF_UNIX",
        )

    def _owner(self) -> str:
        try:
            return self.folder.owner()
        except KeyError:  # an account without a name, for example in a container
            return str(self.folder.stat().st_uid)

    def dockerfile(self) -> str:
        """Write the Dockerfile."""
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        about = metadata("fedstat")
        return DOCKERFILE.format(
            version=VERSION,
            extras=extras,
            summary=about["Summary"],
            license=about["License-Expression"] or about["License"],
            sbom=SBOM,
            sbom_folder=os.path.dirname(SBOM),
            user=NOBODY,
        )

    def compose(self) -> str:
        """Write the compose file; folders have the same paths inside the container, as site.toml has them."""
        status = self.folder.stat()
        lines = [
            "# docker compose up --build --detach; paths in the container are those of this machine",
            "services:",
            f"  {self.name}:",
            "    build: .",
            f"    command: {_listed([*self.words, _plain(self.folder)])}",
            f'    user: "{status.st_uid}:{status.st_gid}"',
            "    restart: on-failure:5",
            "    init: true",
            "    stop_grace_period: 5m",
            "    read_only: true",
            "    tmpfs: [/tmp]",
            "    cap_drop: [ALL]",
            "    security_opt: [no-new-privileges:true]",
        ]
        if not self.by_network:
            lines.append("    network_mode: none")
        if self.variables:
            lines.append(f"    environment: {_listed(self.variables)}")
        if self.port:
            lines.append(f'    ports: ["{self.port}:{self.port}"]')
        lines.append("    volumes:")
        writes = dict.fromkeys(_plain(path) for path in self.writes)
        reads = [path for path in dict.fromkeys(map(_plain, self.reads)) if path not in writes]
        lines += [f"      - {path}:{path}" for path in writes]
        lines += [f"      - {path}:{path}:ro" for path in reads]
        if self.health:
            test = _listed(["CMD", "fedstat", *self.health, _plain(self.folder)])
            lines += ["    healthcheck:", f"      test: {test}", "      interval: 1m", "      timeout: 30s"]
            lines += ["      start_period: 2m", "      retries: 3"]
        return "\n".join(lines) + "\n"

    def kubernetes(self, image: str) -> str:
        """Write the manifests of a pod; folders have the same paths inside it, as site.toml has them."""
        folder = _plain(self.folder)
        volumes = self._volumes(os.path.dirname(folder))
        steps = [f"test -e {folder} || tar -xzpf {UNPACKED}/folder.tar.gz -C {os.path.dirname(folder)}"]
        # The site reads no file with a connection string that its group may read, as mounted secrets are.
        steps += [f"install -m 600 {SECRETS}/{os.path.basename(path)} {path}" for path in self.secrets]
        variables = [
            f"            - name: {name}\n              valueFrom:\n                secretKeyRef:\n"
            f"                  name: {self.name}-secrets\n                  key: {name}\n"
            for name in self.variables
        ]
        return KUBERNETES.format(
            name=self.name,
            egress="[{}]" if self.by_network else "[]",
            user=self.folder.stat().st_uid or NOBODY,
            image=image,
            unpack=f"({') && ('.join(steps)})",
            command=_listed([*self.words, folder]),
            health=_listed(["fedstat", *self.health, folder]),
            variables="".join(["          env:\n", *variables]) if variables else "",
            mounts="".join(one.mount() for one in volumes),
            written="".join(one.mount() for one in volumes if not one.is_read_only),
            volumes="".join(one.volume(self.name) for one in volumes),
        )

    def _volumes(self, parent: str) -> list[PodVolume]:
        """Return what the pod sees of other machines; places inside of another one need no volume."""
        found = {parent: PodVolume("site", parent)}

        def add(path: str, kind: str, is_read_only: bool) -> None:
            if not any(_is_inside(path, known) for known in found):
                found[path] = PodVolume(f"{kind}-{len(found)}", path, is_read_only)

        for path in map(_plain, self.writes):
            add(path, "exchange", False)
        for path in map(_plain, self.reads):
            is_secret = path in self.secrets
            add(os.path.dirname(path), PRIVATE if is_secret else "records", not is_secret)
        return list(found.values())

    def write_compose(self, into: Path) -> None:
        """Write both files into a folder, or raise a PartitionError if one of them exists."""
        into.mkdir(parents=True, exist_ok=True)
        for name, text in (("Dockerfile", self.dockerfile()), ("compose.yaml", self.compose())):
            if (into / name).exists():
                raise PartitionError(f"'{into / name}' exists; choose another folder")
            (into / name).write_text(text, encoding="utf-8")


def service_name(name: str) -> str:
    """Return the name of the service: ASCII letters, digits and dashes of the name of the site."""
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower())
    return kept.strip("-") or "site"


def _plain(path: Path) -> str:
    """Write a path so that units and compose files read it without quotes."""
    text = os.path.abspath(path)
    if not all(letter.isalnum() or letter in "/._-+" for letter in text):
        raise PartitionError(
            f"'{text}': a unit or compose file accepts paths of letters, digits and . _ - + only; "
            "move the folder"
        )
    return text


def _is_inside(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _listed(words: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{word}"' for word in words) + "]"


# ----------------------------------------------------------------------------------------------------
# Commands that print or write the configuration of a service.


def site_unit(folder: Path) -> int:
    """Print the systemd unit of a site."""
    service = site_service(folder)
    print(service.unit(), end="")
    _warn_of_root(folder, "User=root")
    return 0


def _warn_of_root(folder: Path, entry: str) -> None:
    """Warn that a service would run as root."""
    if folder.stat().st_uid == 0:
        print(
            f"the folder '{folder}' belongs to root, and the service would run as root ({entry}). Give the "
            "folder to an account of its own first: chown -R ACCOUNT FOLDER",
            file=sys.stderr,
        )


def site_compose(folder: Path, into: Path) -> int:
    """Write the Dockerfile and the compose file of a site."""
    return _write(site_service(folder), into)


def site_kubernetes(folder: Path, image: str) -> int:
    """Print Kubernetes manifests of a site."""
    print(site_service(folder).kubernetes(image), end="")
    return 0


def federation_unit(folder: Path) -> int:
    """Print the systemd unit of the server of a coordinator."""
    print(_server(folder).unit(), end="")
    return 0


def federation_compose(folder: Path, into: Path) -> int:
    """Write the Dockerfile and the compose file of the server of a coordinator."""
    return _write(_server(folder), into)


def site_service(folder: Path) -> ServiceUnit:
    """Describe the service of a site, from its site.toml."""
    description, folder = read_description(folder), folder.resolve()
    tables = [read_description(place) for place in table_folders(folder).values()]
    sources, exchanges = [one.source for one in tables], [place for one in tables for place in one.exchanges]
    by_flare, by_bucket = uses_flare(folder), any(map(is_bucket, exchanges))
    if not by_flare and not exchanges:
        raise PartitionError(f"the site in '{folder}' has no 'exchange' and no kit yet")
    places = [] if by_flare else [Path(one) for one in exchanges if not is_bucket(one)]
    extras = {"flare"} if by_flare else {"s3"} if by_bucket else set[str]()
    kinds = {source.kind for source in sources}
    extras |= kinds & {"sql", "parquet"}
    return ServiceUnit(
        name=service_name(description.name),
        folder=folder,
        words=("site", "serve"),
        writes=(folder, *places),
        reads=[Path(place) for source in sources for place in (source.path, source.file) if place],
        secrets=[os.path.abspath(source.file) for source in sources if source.file],
        variables=list(dict.fromkeys(source.env for source in sources if source.env)),
        extras=tuple(sorted(extras)),
        # The owner's command for waiting plans usually sends a message.
        by_network=by_flare or by_bucket or "sql" in kinds or any(one.on_pending for one in tables),
        health=("site", "health"),
    )


def _server(folder: Path) -> ServiceUnit:
    federation = read_federation(folder)
    if federation.transport != FLARE:
        raise PartitionError(
            f"Federation '{federation.name}': the coordinator needs no server. With the transport "
            f'"{federation.transport}", it sends requests while an analyst is connected. Only sites run as '
            "services",
            remedy=Remedy("fedstat site unit FOLDER", "use '{call}' or 'fedstat site compose'"),
        )
    return ServiceUnit(
        name=service_name(federation.name),
        folder=folder.resolve(),
        words=("federation", "serve"),
        writes=(folder.resolve(),),
        extras=("flare",),
        by_network=True,
        health=("federation", "status"),
        port=federation.port,
    )


def _write(served: ServiceUnit, into: Path) -> int:
    served.write_compose(into)
    _warn_of_root(served.folder, f'user: "0:{served.folder.stat().st_gid}"')
    print(f"'{into}' has a Dockerfile and a compose.yaml. Put the wheel there, and start the service:\n")
    print(f"  pip wheel --no-deps --wheel-dir {shell_path(into)} SOURCE")
    print(f"  docker compose --project-directory {shell_path(into)} up --build --detach")
    return 0
