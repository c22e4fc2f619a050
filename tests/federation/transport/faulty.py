"""Three sites with ledgers on disk, a transport with injected faults, and an analysis of 20 rounds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

import fedstat as fs
from fedstat.errors import EngineError, FedstatError
from fedstat.federation.audit.ledger_file import begin_ledger, open_ledger, read_ledger
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import Site
from fedstat.federation.disclosure.state import SiteTrust
from fedstat.federation.message import unpack_reply, unpack_request
from fedstat.federation.tables.table import LabeledTable
from fedstat.federation.transport.journal import Journal
from fedstat.federation.transport.remote import RemoteEngine, RemoteSite, SiteServer

ROUNDS = 20
"""Questions of :func:`analysis`: the design, three for keys, fifteen under masks, the receipt."""

Fault = Callable[["Study", Callable[[bytes], bytes], bytes], bytes]
"""Fault of one request on its way to site B; the request may be delivered."""


class Killed(BaseException):
    """The coordinator's process ends here."""


def patients() -> pd.DataFrame:
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(
        {"x": rng.normal(size=90), "z": rng.normal(size=90), "h": np.repeat(list("ABC"), 30)}
    )
    frame["y"] = (rng.random(90) < 1 / (1 + np.exp(-frame["x"]))).astype(int)
    return frame


def enterprises():
    """Two institutions and a coordinator apart, which draws the random numbers for their product."""
    frame = patients()
    frame["w"] = frame["y"] + frame["x"] + frame["z"] ** 2
    columns = {"A": ["w", "x"], "B": ["z"]}
    return fs.ClientPartition.from_frame(frame, columns=columns, shared_seed=1)


def analysis(partition: fs.ClientPartition, formula: str = "y ~ x + z"):
    """Federated averaging under masks: twenty rounds, in each of which every site is asked once."""
    return fs.FedAvg.from_formula(formula, partition).fit(rounds=10, seed=1, masked=True)


def rows(passed):
    """Entries; a statement is longer by the length of the numbers of earlier sessions in it."""
    return [replace(entry, bytes=0) if entry.family == "receipt" else entry for entry in passed]


@dataclass
class Place:
    """A site's folder, and the process that serves it, as far as one can have it in a test."""

    folder: Path
    site: Site
    policy: Policy
    keys: Identity = field(init=False)
    server: SiteServer = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.keys = self.site.trust.identity
        begin_ledger(self.folder, self.keys)
        self.start()

    def start(self) -> None:
        data, trust = self.site._data, SiteTrust(dict(self.site.trust.pinned), self.keys)
        site_ledger = open_ledger(self.folder, self.site.name, self.keys)
        table = data.table.table if isinstance(data.table, LabeledTable) else data.table
        column = "h" if isinstance(data.table, LabeledTable) else ""
        site = Site(self.site.name, table, self.policy, data.shared_seed, column, trust, site_ledger)
        self.server = SiteServer(site)

    def restart(self) -> None:
        """The site loses its memory and keeps its folder."""
        self.server.site.site_ledger.store.close()
        self.start()

    def site_ledger(self) -> dict[str, list]:
        """Lines of the file by session; every line is compared with the chain."""
        site_ledger = read_ledger(self.folder, self.site.name, self.keys.public)
        return {
            chain.session: [entry.in_round(entry.round) for entry in chain.entries]
            for chain in site_ledger.chains
        }


class Study:
    """The sites, what they are asked, and what they answer."""

    def __init__(self, home: Path, policy: Policy | None = None) -> None:
        frame = patients()
        self.partition = fs.ClientPartition.from_frame(frame, by="h", shared_seed=1)
        policies = {"B": policy or Policy()}
        self.places = {
            name: Place(home / name, site, policies.get(name, Policy()))
            for name, site in self.partition.sites.items()
        }
        self.requested: list[bytes] = []
        self.came: dict[bytes, str] = {}

    def connected(
        self, journal: Path | None = None, fault: Fault | None = None, turn: int = 0
    ) -> fs.ClientPartition:
        """The partition over a transport that fails when B receives its `turn`-th request."""
        study = self

        class Wires:
            def send(self, site: str, request: bytes) -> bytes:
                requested, deliver = unpack_request(request), study.places[site].server.answer
                if site == "B":
                    study.requested.append(request)
                if site == "B" and fault is not None and turn in (requested.turn, 0):
                    answer = fault(study, deliver, request)
                else:
                    answer = study.places[site].server.answer(request)
                study.note(requested.session, answer)
                return answer

        wires = Wires()
        sites = {name: RemoteSite(name, wires) for name in self.places}
        return replace(
            self.partition, _engine=RemoteEngine(sites, None if journal is None else Journal(journal))
        )

    def note(self, session: str, answer: bytes) -> None:
        """Remember in which session the numbers of an answer came."""
        try:
            reply = unpack_reply(answer)
        except FedstatError:
            return
        for array in reply.arrays.values():
            self.came[array.tobytes()] = session

    def accounts(self) -> dict[str, dict[str, list]]:
        return {name: place.site_ledger() for name, place in self.places.items()}


def silent(study: Study, deliver, request: bytes) -> bytes:
    """The network is cut, or the site hangs."""
    raise EngineError("'B' did not answer within 1 s")


def late(study: Study, deliver, request: bytes) -> bytes:
    """The site answers after the coordinator has stopped waiting."""
    deliver(request)
    raise EngineError("'B' did not answer within 1 s")


def killed(study: Study, deliver, request: bytes) -> bytes:
    """The coordinator dies before it asks."""
    raise Killed


def killed_with_the_answer(study: Study, deliver, request: bytes) -> bytes:
    """The coordinator dies when the site has answered."""
    deliver(request)
    raise Killed


def restarted(study: Study, deliver, request: bytes) -> bytes:
    """The site is started again between two questions."""
    study.places["B"].restart()
    return study.places["B"].server.answer(request)


def forgotten(study: Study, deliver, request: bytes) -> bytes:
    """The site is started again, and what was kept of its sessions is gone."""
    shutil.rmtree(study.places["B"].folder / "sessions")
    return restarted(study, deliver, request)


def died_with_the_answer(study: Study, deliver, request: bytes) -> bytes:
    """The site dies when the answer is in its account, and is started again."""
    deliver(request)
    study.places["B"].restart()
    raise EngineError("'B' did not answer within 1 s")
