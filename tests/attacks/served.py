"""Strict sites in folders, opened in this process and closed again, as after a restart of their services."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

import fedstat as fs
from fedstat.federation.transport.remote import SiteServer
from fedstat.federation.transport.site_folder import open_site
from fedstat.operator.command_line import main


class ServedSites:
    """Sites with a folder each, which are opened at the first request and after every :meth:`restart`.

    Parameters
    ----------
    home : path
    frames : mapping of str to DataFrame
        Rows of each site.
    published : mapping of str to dict
        Description of every column, the same at all sites.
    """

    def __init__(
        self, home: Path, frames: Mapping[str, pd.DataFrame], published: Mapping[str, dict[str, object]]
    ) -> None:
        self.home, self.study = home, home / "study"
        self.servers: dict[str, SiteServer] = {}
        run("federation", "new", self.study)
        for name, frame in frames.items():
            frame.to_csv(home / f"{name}.csv", index=False)
            run("site", "init", home / name, "--name", name, "--data", home / f"{name}.csv")
            (home / name / "columns.toml").write_text(description(published))
            run("federation", "join", self.study, home / name)
        for name in frames:
            for other in frames:
                run("site", "pin", home / name, home / other)

    def send(self, site: str, request: bytes) -> bytes:
        if site not in self.servers:
            self.servers[site] = SiteServer(open_site(self.home / site))
        return self.servers[site].answer(request)

    def restart(self) -> None:
        """Close all sites; what they remember is in their folders."""
        for server in self.servers.values():
            server.site.site_ledger.store.close()
        self.servers.clear()

    def connect(self) -> fs.ClientPartition:
        return fs.ClientPartition.connect(self.study, transport=self)


def run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def description(published: Mapping[str, dict[str, object]]) -> str:
    """Write a columns.toml."""
    lines = []
    for name, fields in published.items():
        lines += [f'["{name}"]', *(f"{key} = {json.dumps(value)}" for key, value in fields.items()), ""]
    return "\n".join(lines)
