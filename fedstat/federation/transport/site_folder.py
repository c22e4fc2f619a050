"""The folder of one site: data sources, keys, trusted keys, policy, records and waiting plans."""

from __future__ import annotations

import getpass
import os
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import pandas as pd

from fedstat.codec import from_json, from_plain, to_json
from fedstat.errors import FedstatError, PartitionError, SecurityError
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.audit.event_log import PlanDecision, SiteLedger
from fedstat.federation.audit.ledger_file import (
    ANSWERED_FILENAME,
    CHECKPOINT_FILENAME,
    LEDGER_FILENAME,
    SECRET_FILENAME,
    open_ledger,
    row_count_problem,
)
from fedstat.federation.crypto.keys import Identity, PublicIdentity, encode_parts
from fedstat.federation.disclosure.approval import AnalysisPlan, complete_digest, read_plan
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.release_history import ReleaseHistory
from fedstat.federation.disclosure.site import Site, load_families
from fedstat.federation.disclosure.state import SiteTrust
from fedstat.federation.files import is_open_to_others, read_private, write_atomic
from fedstat.federation.tables.aligned_table import (
    ALIGNMENT,
    AlignedTable,
    order_fingerprint,
    places_of,
    row_fingerprints,
)
from fedstat.federation.tables.published import Published, description_problems, read_published
from fedstat.federation.tables.sources import Source, open_source, read_source
from fedstat.federation.tables.table import FrameTable, Table, read_at
from fedstat.federation.transport.mailbox import is_bucket, resolve_exchange
from fedstat.typing import Array

# ----------------------------------------------------------------------------------------------------
# Plans that wait in a site's folder for its owner, and what the owner decides while the site is served.
#
# ::
#
#     pending/DIGEST.json        a plan that was proposed (all of these with mode 0600, the folders 0700)
#     pending/DIGEST.decision    what the owner decided, signed with the site's keys
#     decided/DIGEST.json        a plan of which the site's account has the decision
#
# The process that serves the site holds its account. A decision is laid beside the plan, and entered into
# the account when the site next looks: signed, since a file that somebody else put there decides nothing.

PENDING, DECIDED = "pending", "decided"
PLAN, DECISION = ".json", ".decision"
LONGEST = 16_000_000
FORM = "fedstat decision"


@dataclass(frozen=True, slots=True)
class SignedDecision:
    """A decision, with the signature of the site."""

    decision: PlanDecision
    signature: str

    @classmethod
    def of(cls, decision: PlanDecision, identity: Identity) -> SignedDecision:
        """Sign a decision."""
        return cls(decision, identity.signing.sign(_message(decision, identity.public)).hex())

    def is_of(self, keys: PublicIdentity) -> bool:
        """Whether the site with these keys signed it."""
        try:
            signature = bytes.fromhex(self.signature)
        except ValueError:
            return False
        return keys.has_signed(_message(self.decision, keys), signature)


def _message(decision: PlanDecision, keys: PublicIdentity) -> bytes:
    return encode_parts(FORM, keys.digest, decision.plan, decision.verdict, decision.who, str(decision.when))


@dataclass(frozen=True, slots=True)
class PlanFolder:
    """The plans in the folder of a site.

    What is there and is no plan or no decision of this site is passed over: it must not stop the others.
    """

    site: str
    folder: Path
    keys: PublicIdentity
    _read: dict[str, AnalysisPlan] = field(default_factory=dict)

    def keep(self, digest: str, plan: AnalysisPlan) -> None:
        """Keep a plan that waits."""
        self._write(PENDING, f"{digest}{PLAN}", to_json(plan))

    def waiting(self) -> Mapping[str, AnalysisPlan]:
        """Plans that wait, by digest, the oldest first."""
        paths = self._plans(PENDING)
        found = {path.stem: self._plan(path) for path in paths if not path.with_suffix(DECISION).exists()}
        return {digest: plan for digest, plan in found.items() if plan is not None}

    def find(self, digest: str) -> AnalysisPlan:
        """Return the plan whose digest begins so, whether it waits or was decided about."""
        known = {path.stem: path for place in (DECIDED, PENDING) for path in self._plans(place)}
        whole = complete_digest(self.site, digest, known)
        plan = self._plan(known[whole])
        if plan is None:
            raise PartitionError(f"'{known[whole]}' is not the plan that was proposed; propose it again")
        return plan

    def decide(self, identity: Identity, digest: str, verdict: Literal["approved", "denied"]) -> AnalysisPlan:
        """Decide, as whoever runs this process, about the plan whose digest begins so; also anew."""
        plan = self.find(digest)
        decision = PlanDecision(plan.digest, verdict, _whoever(), time.time_ns())
        self._write(PENDING, f"{plan.digest}{DECISION}", to_json(SignedDecision.of(decision, identity)))
        return plan

    def decided(self) -> Iterator[PlanDecision]:
        """Decisions that the account may not have yet, the oldest first."""
        found = [self._decision(path) for path in (self.folder / PENDING).glob(f"*{DECISION}")]
        yield from sorted((one for one in found if one is not None), key=lambda one: one.when)

    def settle(self, decision: PlanDecision) -> None:
        """Put a plan aside of which the account has the decision."""
        path = self.folder / PENDING / f"{decision.plan}{PLAN}"
        (self.folder / DECIDED).mkdir(mode=0o700, exist_ok=True)
        if path.exists():
            path.replace(self.folder / DECIDED / path.name)
        path.with_suffix(DECISION).unlink(missing_ok=True)

    def _write(self, place: str, name: str, content: str) -> None:
        (self.folder / place).mkdir(mode=0o700, exist_ok=True)
        write_atomic(self.folder / place / name, content.encode())

    def _plans(self, place: str) -> list[Path]:
        return sorted((self.folder / place).glob(f"*{PLAN}"), key=_changed)

    def _plan(self, path: Path) -> AnalysisPlan | None:
        if path.stem not in self._read:
            try:
                plan = read_plan(read_private(path, LONGEST), f"'{path}'")
            except (FedstatError, OSError):
                return None
            if plan.digest != path.stem:
                return None
            self._read[path.stem] = plan
        return self._read[path.stem]

    def _decision(self, path: Path) -> PlanDecision | None:
        try:
            signed = from_json(SignedDecision, read_private(path, LONGEST), f"'{path}'")
        except (FedstatError, OSError):
            return None
        return signed.decision if path.stem == signed.decision.plan and signed.is_of(self.keys) else None


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # a site that serves has put it aside meanwhile
        return 0


def _whoever() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # an account without a name
        return "owner"


# ----------------------------------------------------------------------------------------------------
# The folder of one institution: where its data are, its keys, whom it trusts, what may leave and what left.
#
# It is its owner's alone (mode 0700, its files 0600), and not served where others may read or write it.
#
# ::
#
#     site.toml       name, where the data are, fingerprints of the coordinator and of the other sites
#     policy.toml     what may leave (fedstat.Policy)
#     columns.toml    what everybody may know of the columns; see :mod:`fedstat.federation.tables.published`
#     in_force.json   what a service goes by; see :mod:`fedstat.federation.transport.live_config`
#     reload          when its owner asked that the records be read anew
#     refusals.log    why questions were refused, for its owner alone (mode 0600)
#     identity.json   the site's private keys, for its owner alone (mode 0600)
#     ledger.jsonl    what left; see :mod:`fedstat.federation.audit.ledger_file`
#     sessions        what sessions hold, sealed; see :mod:`fedstat.federation.transport.session_store`
#     pending, decided  plans of analyses; see :mod:`fedstat.federation.transport.site_folder`
#     alignment.npz   vertical layout: numbers of the entities; see
# :mod:`fedstat.federation.tables.aligned_table`

DESCRIPTION, POLICY, IDENTITY = "site.toml", "policy.toml", "identity.json"
COLUMNS, REFUSALS, RELOAD = "columns.toml", "refusals.log", "reload"
PRIVATE = (
    DESCRIPTION,
    POLICY,
    IDENTITY,
    REFUSALS,
    LEDGER_FILENAME,
    CHECKPOINT_FILENAME,
    SECRET_FILENAME,
    ANSWERED_FILENAME,
    ALIGNMENT,
)
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
    exchange = resolve_exchange(found.exchange, path.parent) if found.exchange else ""
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


def apply_trust(site: Site, description: SiteDescription) -> None:
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


def comparison_problem(table: Table, identity: Identity, kept: Mapping[str, Array], then: int) -> str:
    """Say why answers over so many rows cannot be held against new ones; empty where they can.

    Records with a key may come and go. Others are known by all that they hold: one that is gone may have been
    changed, and a table with another column has none of them.
    """
    if "marks" not in kept:
        return row_count_problem(then, table.n_rows)
    if isinstance(table, AlignedTable):
        return ""
    here = places_of(kept["marks"], row_fingerprints(table, identity.secret("row marks")))
    lost = len(kept["marks"]) - int((here >= 0).sum())
    if not lost:
        return ""
    return (
        f"there are {table.n_rows:,} records, and earlier answers were over {then:,}, of which {lost:,} are "
        "gone or changed: without a key they cannot be known again, and a difference of two answers could "
        "disclose a few rows"
    )


def restore_row_groups(account: SiteLedger, table: Table, identity: Identity) -> ReleaseHistory:
    """Take up the groups of rows behind the answers of earlier processes.

    A SecurityError where they are not whole: a new answer might differ from earlier ones by one person's row.
    """
    if not account.recalled:
        return ReleaseHistory()
    try:
        return ReleaseHistory.from_arrays(account.recalled, table, identity.secret("row marks"))
    except (ValueError, LookupError, TypeError) as error:
        raise SecurityError("the memory of earlier answers is not whole; declare the loss") from error


def refusal_log(folder: str | Path) -> Callable[[str], None]:
    """Return what appends one line a refusal to ``refusals.log``."""

    def append(reason: str) -> None:
        with suppress(OSError):  # on a full disk: a refusal is not held up by its reason
            handle = os.open(Path(folder, REFUSALS), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(handle, "a", encoding="utf-8") as file:
                file.write(f"{utc_text(time.time_ns())} {' '.join(reason.split())}\n")

    return append


def open_records(folder: str | Path, description: SiteDescription) -> Table:
    """Open the records of a site, without their key; in the vertical layout in the order of its alignment."""
    source, folder, now = description.source, Path(folder), utc_text(time.time_ns())
    table = _open_table(source, folder, bool(description.site_column))
    if isinstance(table, FrameTable):
        table.as_of = now
    return table


def _open_table(source: Source, folder: Path, by_rows: bool) -> Table:
    if by_rows:
        return open_source(source, folder)
    # The families of the vertical layout need the table in memory.
    if source.key:
        return AlignedTable(source.site, read_source(source, folder), source.key, folder)
    table = open_source(source)
    return FrameTable(pd.concat(list(table.chunks(table.columns)), ignore_index=True))


def reload_records(folder: Path, site: Site) -> str:
    """Read the records of a site anew, and let it go on with them; what became of it, for the owner.

    A PartitionError where they are not what its description or its public columns say, SecurityError where
    they cannot be held against earlier answers: the site goes on with those that it has.
    """
    table = open_records(folder, read_description(folder))
    read_site_columns(folder, site.name, table)
    same = order_fingerprint(table) == order_fingerprint(site.data.table)
    if not same:
        site.change_records(table, partial(comparison_problem, table, site.trust.identity))
    site.account.as_of = read_at(table)
    ends = (
        "they are the same as before" if same else "they have changed, and sessions that were open have ended"
    )
    return f"read its records anew, {table.n_rows:,} rows: {ends}"


def mode_problems(folder: str | Path) -> Iterator[str]:
    """Name what others than the owner may read or write of a site, with the commands that mend it."""
    folder = Path(folder)
    files = [folder / name for name in PRIVATE if is_open_to_others(folder / name)]
    commands = [f"chmod 700 '{folder}'"] if is_open_to_others(folder) else []
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
        trust=SiteTrust(
            dict(description.pinned), identity, dict(description.consent), dict(description.roster)
        ),
        account=open_ledger(folder, description.name, identity, partial(comparison_problem, table, identity)),
        published=read_site_columns(folder, description.name, table),
        log=refusal_log(folder),
        plans=PlanFolder(description.name, Path(folder), identity.public),
    )
    site.account.as_of = read_at(table)
    site.approvals.take_up()
    # rows behind answers of earlier processes: a difference to a new answer would tell of single entities
    site.remember(restore_row_groups(site.account, table, identity))
    return site
