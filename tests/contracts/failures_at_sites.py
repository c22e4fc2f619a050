"""Errors at sites, of owners and of coordinators, whose remedies are commands or arguments of a partition."""

from __future__ import annotations

import contextlib
import functools
import io
import tempfile
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from contracts.failures import FAILURES, Failure, Wrong, clean, fedstat
from contracts.remedies import by_site, rows
from operating import make_federation, served_sites

import fedstat as fs
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.crypto.rosters import check_rosters
from fedstat.federation.disclosure.approval import AnalysisPlan, PlannedStep, complete_digest
from fedstat.federation.disclosure.checks import check_refusals_left
from fedstat.federation.disclosure.facts import KeyAlignmentRequest
from fedstat.federation.disclosure.request_checks import check_factors
from fedstat.federation.disclosure.row_checks import check_alignment
from fedstat.federation.partition.connect import ConnectedSite
from fedstat.federation.protocols.linkage import load_alignment
from fedstat.federation.transport.mailbox import untrusted_note
from fedstat.federation.transport.signed import SignedSite
from fedstat.federation.transport.site_folder import load_identity, open_site

WORDS = {"TEXT": "removed", "NAME": "North"}


def split() -> dict[str, pd.DataFrame]:
    """Return columns of two sites."""
    rng, key = np.random.default_rng(5), np.arange(60)
    return {name: pd.DataFrame({"id": key, name.lower(): rng.normal(size=60)}) for name in "AB"}


@functools.cache
def shared() -> Mapping[str, Any]:
    """Return the folders of a federation of two sites, for commands that leave it in order."""
    kept = tempfile.TemporaryDirectory()
    return federation(Path(kept.name)) | {"kept": kept}


def federation(home: Path, key: tuple[str, ...] = ("id",)) -> dict[str, Any]:
    """Make the folders of a federation of two sites, by columns or by rows."""
    frames = split() if key else {name: rows()[["x", "y"]] for name in "AB"}
    with contextlib.redirect_stdout(io.StringIO()):
        study = make_federation(home, frames, key)
    return {"home": home, "study": study, "STUDY": study, "FOLDER": home / "A", "CARD": home / "A", **WORDS}


by_rows = functools.partial(federation, key=())


def impatient(home: Path) -> dict[str, Any]:
    """Make a federation by rows whose coordinator waits for half a second at first."""
    names, patience = by_rows(home), iter((0.5, 60.0))
    file = names["study"] / "federation.toml"
    text = file.read_text()

    def connect() -> fs.ClientPartition:
        file.write_text(text.replace("timeout = 3600", f"timeout = {next(patience)}"))
        return fs.ClientPartition.connect(names["study"])

    return {**names, "connect": connect}


@dataclass(frozen=True)
class Served(Wrong):
    """A call of which the remedy needs sites that answer, and possibly another command `first`."""

    first: str = ""

    def succeed(self, remedy: str, names: Mapping[str, Any]) -> Any:
        """Serve the sites meanwhile, which is what a command that serves one does."""
        with served_sites(names["home"], "AB"):
            if self.first:
                self.evaluate(self.first, names)
            if remedy.startswith("fedstat site serve"):
                return self.evaluate(self.call, names)
            return super().succeed(remedy, names)


def cut(home: Path) -> dict[str, Any]:
    """Return a folder whose ledger was removed."""
    names = federation(home)
    open_site(names["FOLDER"])._data.site_ledger.store.close()
    (names["FOLDER"] / "ledger.jsonl").unlink()
    return {**names, "open_site": open_site}


def damaged(home: Path) -> dict[str, Any]:
    """Return a federation with a file that is no alignment."""
    names = federation(home)
    (names["study"] / "alignment.npz").write_bytes(b"none")
    return {**names, "load_alignment": load_alignment}


def with_roster(home: Path) -> dict[str, Any]:
    """Return what a site without a roster announces."""
    names = federation(home)
    fedstat("federation", "roster", names["study"])
    return {**names, "check_rosters": check_rosters}


def proposed(home: Path) -> dict[str, Any]:
    """Return a plan that waits for the owner of a site."""
    names = federation(home)
    step = PlannedStep("toy", "count", 2, masked=False, texts=("",), gives=())
    plan = AnalysisPlan("A", "fit()", "y ~ x", "Gaussian", ("x", "y"), (step,), 7, ())
    site = open_site(names["FOLDER"])
    approvals = site._data.approvals
    approvals.propose(plan)
    site._data.site_ledger.store.close()
    return {**names, "approvals": approvals, "plan": plan}


def unpinned(home: Path) -> dict[str, Any]:
    """Return a site that trusts no coordinator."""
    names = federation(home)
    fedstat("site", "revoke", names["FOLDER"], "coordinator")
    return {**names, "SignedSite": SignedSite, "folder": names["FOLDER"], "CARD": names["study"]}


def distrusted() -> dict[str, Any]:
    """Return a function that raises what a site reports that has pinned another coordinator."""

    def refuse() -> None:
        raise untrusted_note("A", "none", Identity.generate())

    return {**shared(), "refuse": refuse}


def unaligned(home: Path) -> dict[str, Any]:
    """Return the table of a site whose records have not been aligned."""
    names = federation(home)
    site = open_site(home / "A")
    site._data.site_ledger.store.close()
    return {**names, "FOLDER": names["study"], "table": site._data.table}


def new(home: Path) -> Path:
    """Make a federation without sites."""
    fedstat("federation", "new", home / "empty")
    return home / "empty"


def described(home: Path) -> dict[str, Any]:
    """Return a federation whose coordinator has written a dictionary of the study."""
    names = federation(home)
    (names["study"] / "dictionary.toml").write_text('[a]\nkind = "number"\nunit = "m"\n')
    return names


def renamed(home: Path) -> dict[str, Any]:
    """Return a site with the key of another."""
    names, path = federation(home), home / "A" / "card.toml"
    path.write_text(path.read_text().replace('name = "A"', 'name = "C"'))
    return {**names, "renamed": home / "A"}


def without_exchange(home: Path) -> dict[str, Any]:
    """Return a site without a folder for requests."""
    names, path = described(home), home / "A" / "site.toml"
    for made in ("roster", "dictionary"):
        fedstat("federation", made, names["study"])
    lines = path.read_text().splitlines(True)
    path.write_text("".join(line for line in lines if not line.startswith("exchange")))
    return {
        **names,
        "ROSTER": names["study"] / "roster.json",
        "DICTIONARY": names["study"] / "dictionary.json",
    }


def refused_often() -> dict[str, Any]:
    """Return a request of a client whose requests were refused too often."""
    data = types.SimpleNamespace(name="A", site_ledger=types.SimpleNamespace(refusals={"c": 9}))
    context = types.SimpleNamespace(policy=fs.Policy(max_refusals=3), receipt=False, client="c", data=data)
    return {**shared(), "context": context, "check_refusals_left": check_refusals_left}


def unpublished() -> dict[str, Any]:
    """Return a formula of a column that the owner has not published."""
    data = types.SimpleNamespace(name="A", policy=fs.Policy(formulas="simple"), published={})
    asked = types.SimpleNamespace(factors=(types.SimpleNamespace(columns=("x",)),))
    return {**shared(), "data": data, "asked": asked, "check": check_factors}


def at_a_site(**given: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that names the data of a site."""
    policy = fs.Policy(alignment="ask")
    return lambda: {
        **shared(),
        **given,
        "data": replace(clean().sites["a"]._data, policy=policy, shared_seed=None),
    }


def sampled(names: str = "3210", ragged: bool = False) -> pd.DataFrame:
    """Return rows with a curve y, in columns or in cells."""
    rng, n = np.random.default_rng(7), 40
    t = pd.DataFrame({"site": np.resize(list("ab"), n), "x": rng.normal(size=n)})
    if not ragged:
        return t.assign(**{f"y_{j}": rng.normal(size=n) for j in names})
    lengths = rng.integers(5, 9, n)
    return t.assign(y=[rng.normal(size=m) for m in lengths], t=[np.linspace(0, 1, m) for m in lengths])


AGAIN = {"again": True}
HELD = "ClientPartition.from_frame(table, by='site', curves={'y': Curve('y_*')})"
CELLS = "ClientPartition.from_frame(table, by='site', curves={'y': Curve('y', domain=(0, 1))})"
FAILURES += [
    # ---- partitions and formulas ----
    Failure(
        "FederatedOrdinal",
        "t ~ x",
        lambda: by_site(rows().assign(t=lambda t: t["w"].map(dict(enumerate("abcd"))))),
    ),
    Wrong(
        "FederatedOLS.from_formula(\"y ~ cr(x, constraints='center')\", partition).fit()",
        lambda: {"partition": clean(), "low": -9, "high": 9},
    ),
    Wrong("Policy.from_toml('absent.toml')"),
    Wrong("Curve('y_*', at='t', grid=(0, 1))"),
    Wrong(HELD, lambda: {"table": sampled(), "grid": (0, 1, 2, 3)}),
    Wrong(CELLS, lambda: {"table": sampled(ragged=True), "at": "t"}),
    # ---- owners ----
    Wrong("open_site(FOLDER)", cut),
    Wrong("check_rosters('A', 's', {'1': 'a'}, {}, {'B': '{}'})", with_roster, **AGAIN),
    Wrong("approvals.begin(plan.digest)", proposed, **AGAIN),
    Wrong("complete_digest('A', 'f', [])", lambda: {**shared(), "complete_digest": complete_digest}, **AGAIN),
    Wrong("check_refusals_left(context)", refused_often, **AGAIN),
    Wrong("check(data, None, asked)", unpublished, **AGAIN),
    Wrong(
        "check(data, None, asked)",
        at_a_site(check=check_alignment, asked=KeyAlignmentRequest(("B",))),
        **AGAIN,
    ),
    Wrong("data.common_seed", at_a_site(), **AGAIN),
    Wrong(
        "site.frames",
        lambda: {
            **shared(),
            "site": ConnectedSite("A", "", types.SimpleNamespace(policy=0, published=0, privacy=0)),
        },
        **AGAIN,
    ),
    Wrong("SignedSite(folder)", unpinned, **AGAIN),
    Wrong("refuse()", distrusted, **AGAIN),
    Wrong(
        "load_identity(home / 'new')", lambda home: {"home": home, "load_identity": load_identity, **WORDS}
    ),
    Wrong("fedstat('site', 'consent', FOLDER, 'C')", shared, **AGAIN),
    # ---- coordinators ----
    Wrong("fedstat('federation', 'roster', empty)", lambda home: {**shared(), "empty": new(home)}),
    Wrong("fedstat('federation', 'unit', study)", shared, **AGAIN),
    Wrong("fedstat('federation', 'accept', study, CARD)", federation, **AGAIN),
    Wrong("fedstat('site', 'accept', FOLDER)", without_exchange, **AGAIN),
    Wrong("fedstat('site', 'accept', FOLDER)", federation, **AGAIN),
    Wrong("fedstat('site', 'dictionary', FOLDER)", without_exchange, **AGAIN),
    Wrong("fedstat('site', 'dictionary', FOLDER)", described, **AGAIN),
    Wrong("fedstat('federation', 'join', study, renamed)", renamed, **AGAIN),
    # ---- sites that answer ----
    Served("connect()", impatient),
    Served("table.check_session('other')", unaligned, **AGAIN),
    Served("load_alignment(study)", damaged, first="(study / 'alignment.npz').unlink()"),
    Served(
        "ClientPartition.connect(study, quorum=1)", federation, first="fedstat('federation', 'align', study)"
    ),
    Served(
        "ClientPartition.connect(study)",
        by_rows,
        constants={
            "fedstat.federation.partition.connect.last_alive": lambda exchange, name: 1e9 * (name == "B"),
            "fedstat.federation.partition.connect.SEEN_AGAIN": 0.0,
        },
    ),
]
