"""Commands that print or write what runs a site, or a coordinator's server, for long."""

from __future__ import annotations

from pathlib import Path

from fedstat.errors import PartitionError
from fedstat.federation.carry.exchange.part import is_bucket
from fedstat.federation.carry.flare.kit import FLARE
from fedstat.federation.carry.site_folder import read_description
from fedstat.federation.partition.federation_file import read_federation
from fedstat.operator.flare_commands import is_carried
from fedstat.operator.running.unit import Served, service_name
from fedstat.operator.writing.screen import typed


def site_unit(folder: Path) -> int:
    """Print the systemd unit of a site."""
    print(site_served(folder).unit(), end="")
    return 0


def site_compose(folder: Path, into: Path) -> int:
    """Write Dockerfile and compose file of a site."""
    return _write(site_served(folder), into)


def federation_unit(folder: Path) -> int:
    """Print the systemd unit of a coordinator's server."""
    print(_server(folder).unit(), end="")
    return 0


def federation_compose(folder: Path, into: Path) -> int:
    """Write Dockerfile and compose file of a coordinator's server."""
    return _write(_server(folder), into)


def site_served(folder: Path) -> Served:
    """Say how a site is run, by what its description names."""
    description, source, folder = read_description(folder), read_description(folder).source, folder.resolve()
    by_flare, by_bucket = is_carried(folder), is_bucket(description.exchange)
    if not by_flare and not description.exchange:
        raise PartitionError(f"the site in '{folder}' has neither an exchange nor a kit yet")
    exchange = [] if by_flare or by_bucket else [Path(description.exchange)]
    extras = {"flare"} if by_flare else {"s3"} if by_bucket else set[str]()
    extras |= {"sql"} if source.kind == "sql" else {"parquet"} if source.kind == "parquet" else set()
    return Served(
        name=service_name(description.name),
        folder=folder,
        words=("site", "serve"),
        writes=(folder, *exchange),
        reads=[Path(place) for place in (source.path, source.file) if place],
        variables=[source.env] if source.env else (),
        extras=tuple(sorted(extras)),
        by_network=by_flare or by_bucket or source.kind == "sql",
        health=("site", "health"),
    )


def _server(folder: Path) -> Served:
    federation = read_federation(folder)
    if federation.carrier != FLARE:
        raise PartitionError(
            f"the coordinator of {federation.name} has no server: over a {federation.carrier}, it asks when "
            "an analyst connects; only sites are run for long (fedstat site unit, fedstat site compose)"
        )
    return Served(
        name=service_name(federation.name),
        folder=folder.resolve(),
        words=("federation", "serve"),
        writes=(folder.resolve(),),
        extras=("flare",),
        by_network=True,
        health=("federation", "status"),
        port=federation.port,
    )


def _write(served: Served, into: Path) -> int:
    served.write_compose(into)
    print(f"'{into}' has Dockerfile and compose.yaml. Put the wheel there, and start it:\n")
    print(f"  pip wheel --no-deps --wheel-dir {typed(into)} SOURCE")
    print(f"  docker compose --project-directory {typed(into)} up --build --detach")
    return 0
