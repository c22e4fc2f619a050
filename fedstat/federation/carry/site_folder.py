"""The folder of one institution: where its data are, its keys, whom it trusts, what may leave and what left.

It is its owner's alone (mode 0700, its files 0600), and not served where others may read or write it.

::

    site.toml       name, where the data are, fingerprints of the coordinator and of the other sites
    policy.toml     what may leave (fedstat.Policy)
    columns.toml    what everybody may know of the columns; see :mod:`fedstat.federation.tables.published`
    in_force.json   what a service goes by; see :mod:`fedstat.federation.carry.in_force`
    reload          when its owner asked that the records be read anew
    refusals.log    why questions were refused, for its owner alone (mode 0600)
    identity.json   the site's private keys, for its owner alone (mode 0600)
    ledger.jsonl    what left; see :mod:`fedstat.federation.account.ledger_file`
    sessions        what sessions hold, sealed; see :mod:`fedstat.federation.carry.session_folder`
    pending, decided  plans of analyses; see :mod:`fedstat.federation.carry.plan_folder`
    alignment.npz   vertical layout: numbers of the entities; see :mod:`fedstat.federation.tables.linked`
"""

from __future__ import annotations

import os
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from fedstat.errors import PartitionError, SecurityError
from fedstat.federation.account.chain import SiteAccount
from fedstat.federation.account.head import told
from fedstat.federation.account.ledger_file import changed_rows, open_account
from fedstat.federation.account.ledger_lines import ANSWERED, HEAD, LEDGER, SECRET
from fedstat.federation.carry.exchange.part import is_bucket, place_of
from fedstat.federation.carry.plan_folder import PlanFolder
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.door.families import load_families
from fedstat.federation.door.memory import AnswersRemembered
from fedstat.federation.door.owner.policy import Policy
from fedstat.federation.door.site import Site
from fedstat.federation.door.state import Trust
from fedstat.federation.files import is_open
from fedstat.federation.tables.linked import ALIGNMENT, LinkedTable
from fedstat.federation.tables.published import Published, description_problems, read_published
from fedstat.federation.tables.row_marks import order_mark, places_of, row_marks
from fedstat.federation.tables.sources import Source, open_source, read_source
from fedstat.federation.tables.table import FrameTable, Table, read_at
from fedstat.records import from_plain
from fedstat.typing import Array

DESCRIPTION, POLICY, IDENTITY = "site.toml", "policy.toml", "identity.json"
COLUMNS, REFUSALS, RELOAD = "columns.toml", "refusals.log", "reload"
PRIVATE = (DESCRIPTION, POLICY, IDENTITY, REFUSALS, LEDGER, HEAD, SECRET, ANSWERED, ALIGNMENT)
"""Files that nobody but the owner may read or write (mode 0600)."""
SEED_DIGITS, LEAST_DIGITS = 32, 8
SEED = re.compile(f"[0-9a-fA-F]{{{SEED_DIGITS}}}")
"""A seed; one with fewer different digits is hardly drawn: it is one of twenty million."""
TABLES = {
    "pinned": "fingerprint",
    "sites": "fingerprint",
    "consent": "time",
    "roster": "digest",
    "revoked": "name",
}
"""Tables of texts, and what each of these is."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SiteDescription:
    """The entries of ``site.toml``.

    `data` describes the source. `coordinator` is the fingerprint of its key, empty where none is trusted;
    `pinned` has one by site, its own among them. `site_column` is the name by which a formula may ask for
    the site, empty in the vertical layout; `seed` the secret that the sites share for common random
    projections; `exchange` the folder or bucket through which questions come, empty where another carrier
    brings them; `consent` says when the owner has consented to an alignment, by site; `roster` has the
    digests of the rosters that it has accepted, by number.
    """

    name: str
    data: Mapping[str, Any]
    coordinator: str = ""
    pinned: Mapping[str, str] = field(default_factory=dict)
    site_column: str = ""
    seed: str | int = ""
    exchange: str = ""
    consent: Mapping[str, str] = field(default_factory=dict)
    roster: Mapping[str, str] = field(default_factory=dict)

    @property
    def source(self) -> Source:
        """Where its records are."""
        return Source.from_mapping(self.name, self.data)

    @property
    def shared_seed(self) -> int | None:
        """The secret as a number; None where there is none.

        Whoever knows one label of a cluster, or one product of columns, tries seeds until one fits, so that
        it has to be drawn, and long: a number that somebody thought of is found in a second.
        """
        if self.seed == "":
            return None
        seed = str(self.seed)
        if not SEED.fullmatch(seed) or len(set(seed.lower())) < LEAST_DIGITS:
            raise PartitionError(
                f"{self.name}: seed: expected {SEED_DIGITS} hexadecimal digits in quotes, drawn at random "
                "(128 bits), and the same at all sites: one owner draws it by 'fedstat site seed FOLDER', "
                "and tells it to the others, not to the coordinator"
            )
        return int(seed, 16)

    @property
    def exchange_folder(self) -> str:
        """The folder through which questions come; empty where a bucket or another carrier brings them."""
        return "" if is_bucket(self.exchange) else self.exchange

    def check(self) -> None:
        """Find what is wrong when the file is read, and not when records or the seed are asked for."""
        _ = self.source, self.shared_seed
        if not all(number.isdecimal() for number in self.roster):
            raise PartitionError(f"{self.name}: [roster]: expected digests by the number of the roster")


def read_description(folder: str | Path) -> SiteDescription:
    """Read ``site.toml``; PartitionError names file, entry and remedy."""
    path = Path(folder, DESCRIPTION)
    found = read_entries(SiteDescription, path, f"make it with 'fedstat site init {folder} --name NAME'")
    exchange = place_of(found.exchange, path.parent) if found.exchange else ""
    return replace(found, data=_from_folder(path.parent, found.data), exchange=exchange)


def read_toml(path: Path, remedy: str) -> dict[str, Any]:
    """Read a TOML file; PartitionError where it is absent (then with the remedy), or no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PartitionError(f"'{path}' is absent; {remedy}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise PartitionError(f"'{path}' cannot be read ({type(error).__name__})") from error
    except (ValueError, RecursionError) as error:  # numbers and nesting without end are errors of their own
        raise PartitionError(f"'{path}' is not a TOML file: {error}") from error


def read_entries(kind: type[T], path: Path, remedy: str) -> T:
    """Read a TOML file as a record; entries that have a default may be left out."""
    content = read_toml(path, remedy)
    for table, what in TABLES.items():
        keys = content.get(table)
        wrong = [name for name in keys if not isinstance(keys[name], str)] if isinstance(keys, dict) else []
        if wrong:
            raise PartitionError(f"'{path}', [{table}]: expected a {what} in quotes for {', '.join(wrong)}")
    return from_plain(kind, content, f"'{path}'", PartitionError, defaults=True)


def heed(site: Site, description: SiteDescription) -> None:
    """Take over whom the owner trusts now, and what it consents to."""
    trust = site.trust
    for held, given in (
        (trust.pinned, description.pinned),
        (trust.consents, description.consent),
        (trust.rosters, description.roster),
    ):
        held.clear()
        held.update(given)


def _from_folder(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Take relative paths as relative to the site's folder."""
    relative = {name: str(folder / data[name]) for name in ("path", "file") if data.get(name)}
    return {**data, **relative}


def load_identity(folder: str | Path) -> Identity:
    """Read the keys of a folder; SecurityError where others than the owner may read them."""
    path = Path(folder, IDENTITY)
    if not path.exists():
        raise PartitionError(f"'{path}' is absent; make a folder with keys by 'fedstat site init'")
    return Identity.load(path)


def read_site_policy(folder: str | Path) -> Policy:
    """Read ``policy.toml``; what it leaves out, or all without one, is strict."""
    path, strict = Path(folder, POLICY), Policy.strict()
    return Policy.from_toml(path, strict) if path.exists() else strict


def read_site_columns(folder: str | Path, site: str, table: Table) -> Published:
    """Read ``columns.toml``, and hold the table against it; nothing is published where there is none.

    PartitionError, for the owner who is there when a site is opened, where the table departs from it.
    """
    path = Path(folder, COLUMNS)
    if not path.exists():
        return {}
    published = read_published(path.read_text(encoding="utf-8"), f"'{path}'")
    problems = list(description_problems(site, published, table))
    if problems:
        raise PartitionError(f"'{path}': " + "; ".join(problems))
    return published


def unfit(table: Table, identity: Identity, kept: Mapping[str, Array], then: int) -> str:
    """Say why answers over so many rows cannot be held against new ones; empty where they can.

    Records with a key may come and go. Others are known by all that they hold: one that is gone may have been
    changed, and a table with another column has none of them.
    """
    if "marks" not in kept:
        return changed_rows(then, table.n_rows)
    if isinstance(table, LinkedTable):
        return ""
    here = places_of(kept["marks"], row_marks(table, identity.secret("row marks")))
    lost = len(kept["marks"]) - int((here >= 0).sum())
    if not lost:
        return ""
    return (
        f"there are {table.n_rows:,} records, and earlier answers were over {then:,}, of which {lost:,} are "
        "gone or changed: without a key they cannot be known again, and a difference of two answers could "
        "disclose a few rows"
    )


def recalled(account: SiteAccount, table: Table, identity: Identity) -> AnswersRemembered:
    """Take up the groups of rows behind the answers of earlier processes.

    A SecurityError where they are not whole: a new answer might differ from earlier ones by one person's row.
    """
    if not account.recalled:
        return AnswersRemembered()
    try:
        return AnswersRemembered.from_arrays(account.recalled, table, identity.secret("row marks"))
    except (ValueError, LookupError, TypeError) as error:
        raise SecurityError("the memory of earlier answers is not whole; declare the loss") from error


def refusal_log(folder: str | Path) -> Callable[[str], None]:
    """Return what appends one line a refusal to ``refusals.log``."""

    def append(reason: str) -> None:
        with suppress(OSError):  # on a full disk: a refusal is not held up by its reason
            handle = os.open(Path(folder, REFUSALS), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(handle, "a", encoding="utf-8") as file:
                file.write(f"{told(time.time_ns())} {' '.join(reason.split())}\n")

    return append


def open_records(folder: str | Path, description: SiteDescription) -> Table:
    """Open the records of a site, without their key; in the vertical layout in the order of its alignment."""
    source, folder, now = description.source, Path(folder), told(time.time_ns())
    table = _open_table(source, folder, bool(description.site_column))
    if isinstance(table, FrameTable):
        table.as_of = now
    return table


def _open_table(source: Source, folder: Path, by_rows: bool) -> Table:
    if by_rows:
        return open_source(source, folder)
    # The families of the vertical layout need the table in memory.
    if source.key:
        return LinkedTable(source.site, read_source(source, folder), source.key, folder)
    table = open_source(source)
    return FrameTable(pd.concat(list(table.chunks(table.columns)), ignore_index=True))


def read_anew(folder: Path, site: Site) -> str:
    """Read the records of a site anew, and let it go on with them; what became of it, for the owner.

    A PartitionError where they are not what its description or its public columns say, SecurityError where
    they cannot be held against earlier answers: the site goes on with those that it has.
    """
    table = open_records(folder, read_description(folder))
    read_site_columns(folder, site.name, table)
    same = order_mark(table) == order_mark(site.data.table)
    if not same:
        site.change_records(table, partial(unfit, table, site.trust.identity))
    site.account.as_of = read_at(table)
    ends = (
        "they are the same as before" if same else "they have changed, and sessions that were open have ended"
    )
    return f"read its records anew, {table.n_rows:,} rows: {ends}"


def mode_problems(folder: str | Path) -> Iterator[str]:
    """Name what others than the owner may read or write of a site, with the commands that mend it."""
    folder = Path(folder)
    files = [folder / name for name in PRIVATE if is_open(folder / name)]
    commands = [f"chmod 700 '{folder}'"] if is_open(folder) else []
    commands += [f"chmod 600 {' '.join(repr(str(path)) for path in files)}"] if files else []
    if commands:
        yield (
            f"others may read or write the folder of the site, '{folder}', or its files, in which its "
            f"secrets, its rules and the rows behind its answers stand: {'; '.join(commands)}"
        )


def open_site(folder: str | Path) -> Site:
    """Open the site of a folder, which goes on with the account that is there.

    PartitionError where its description, data or policy cannot be used, SecurityError where others may read
    or write its folder, the account is not whole, or it remembers answers over another number of records,
    EngineError where another process serves the site.
    """
    for problem in mode_problems(folder):
        raise SecurityError(problem)
    description = read_description(folder)
    load_families()
    identity = load_identity(folder)
    table, policy = open_records(folder, description), read_site_policy(folder)
    site = Site(
        name=description.name,
        table=table,
        policy=policy,
        shared_seed=description.shared_seed,
        site_column=description.site_column,
        trust=Trust(dict(description.pinned), identity, dict(description.consent), dict(description.roster)),
        account=open_account(folder, description.name, identity, partial(unfit, table, identity)),
        published=read_site_columns(folder, description.name, table),
        log=refusal_log(folder),
        plans=PlanFolder(description.name, Path(folder), identity.public),
    )
    site.account.as_of = read_at(table)
    site.approvals.take_up()
    # rows behind answers of earlier processes: a difference to a new answer would tell of single entities
    site.remember(recalled(site.account, table, identity))
    return site
