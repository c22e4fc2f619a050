"""The folder of one institution: where its data are, its keys, whom it trusts, and what may leave.

::

    site.toml       name, layout, where the data are, fingerprints of the coordinator and of the other sites
    policy.toml     what may leave (fedstat.Policy)
    identity.json   the site's private keys, for its owner alone (mode 0600)
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstat.errors import PartitionError
from fedstat.federation.families import load_families
from fedstat.federation.policy import Policy
from fedstat.federation.secure.keys import Identity
from fedstat.federation.site import Site
from fedstat.federation.sources import Source, open_source

DESCRIPTION, POLICY, IDENTITY = "site.toml", "policy.toml", "identity.json"


@dataclass(frozen=True, slots=True)
class SiteDescription:
    """What ``site.toml`` says.

    Parameters
    ----------
    name : str
    source : Source
    coordinator : str
        Fingerprint of the coordinator's key; empty where the carrier knows the coordinator.
    pinned : mapping of str to str
        Fingerprint by site, its own among them.
    site_column : str
        Horizontal layout: name by which a formula may ask for the site; empty in the vertical layout.
    seed : int or None
        Secret that the sites share for common random projections.
    """

    name: str
    source: Source
    coordinator: str
    pinned: Mapping[str, str]
    site_column: str = ""
    seed: int | None = None


def read_description(folder: str | Path) -> SiteDescription:
    """Read ``site.toml``.

    Raises
    ------
    PartitionError
        It is absent, is no TOML, or lacks something; the message names file, entry and remedy.
    """
    path = Path(folder, DESCRIPTION)
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise PartitionError(f"'{path}' is absent; make it with 'fedstat site init {folder}'") from error
    except tomllib.TOMLDecodeError as error:
        raise PartitionError(f"'{path}' is not a TOML file: {error}") from error
    known = {"name": str, "data": dict, "coordinator": str, "pinned": dict, "site_column": str, "seed": int}
    for entry, value in content.items():
        if entry not in known:
            raise PartitionError(f"'{path}': unknown entry '{entry}'; known are {', '.join(known)}")
        if not isinstance(value, known[entry]):
            raise PartitionError(f"'{path}': '{entry}' must be of type {known[entry].__name__}")
    lacking = [entry for entry in ("name", "data") if entry not in content]
    if lacking:
        raise PartitionError(f"'{path}' lacks {', '.join(lacking)}")
    source = Source.from_mapping(content["name"], _from_folder(path.parent, content["data"]))
    return SiteDescription(
        content["name"],
        source,
        content.get("coordinator", ""),
        content.get("pinned", {}),
        content.get("site_column", ""),
        content.get("seed"),
    )


def _from_folder(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Take relative paths as relative to the site's folder."""
    relative = {name: str(folder / data[name]) for name in ("path", "file") if data.get(name)}
    return {**data, **relative}


def open_site(folder: str | Path) -> Site:
    """Open the site of a folder.

    Raises
    ------
    PartitionError
        Its description or its data cannot be used.
    PolicyError
        Its policy cannot be read.
    SecurityError
        Others than its owner may read the keys.
    """
    description = read_description(folder)
    load_families()
    policy = Path(folder, POLICY)
    site = Site(
        description.name,
        open_source(description.source),
        Policy.from_toml(policy) if policy.exists() else None,
        description.seed,
        description.site_column,
    )
    site.trust._identity = Identity.load(Path(folder, IDENTITY))
    site.trust.pinned.update(description.pinned)
    return site
