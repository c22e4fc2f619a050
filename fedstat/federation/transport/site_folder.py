"""The folder of one site: data sources, keys, trusted keys, policy, ledger and open plans."""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Literal, TypeVar, get_type_hints

import numpy as np
import pandas as pd

from fedstat.codec import from_plain
from fedstat.errors import FedstatError, PartitionError, Remedy, SecurityError
from fedstat.federation import state_formats
from fedstat.federation.audit import ledger_file
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.audit.event_log import PlanDecision, SiteLedger
from fedstat.federation.crypto.keys import Identity, PublicIdentity, encode_parts, normalize_fingerprint
from fedstat.federation.disclosure.analysis_sets import leaves_out
from fedstat.federation.disclosure.approval import (
    AnalysisPlan,
    Role,
    Study,
    check_study_names,
    complete_digest,
)
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.release_history import ReleaseHistory, convert_history
from fedstat.federation.disclosure.site import Site, load_families
from fedstat.federation.disclosure.state import MAX_SESSIONS, SiteTrust
from fedstat.federation.files import is_open_to_others, read_private, write_atomic
from fedstat.federation.message import VERSION
from fedstat.federation.tables.aligned_table import (
    ALIGNMENT,
    AlignedTable,
    MarkForm,
    order_fingerprint,
    recognize_rows,
    row_keys,
)
from fedstat.federation.tables.dictionary import DICTIONARY, read_accepted
from fedstat.federation.tables.published import Published, description_problems, read_published
from fedstat.federation.tables.sources import Source, open_source, read_source
from fedstat.federation.tables.table import FrameTable, Table, read_at
from fedstat.federation.transport.mailbox import is_bucket, resolve_exchange
from fedstat.typing import Array

# ----------------------------------------------------------------------------------------------------
# The owner's command that runs when a plan waits for approval, for example to send a message.
#
# The command is a line of site.toml, and is run without a shell. Nothing of a plan is an argument or a
# variable of the environment except its digest: names, formula and purpose come from elsewhere, and could
# contain commands. They are in one line of JSON on standard input, without values of the data.

TIMEOUT = 60.0
"""Seconds after which the command is ended."""
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME")
"""Variables that the command receives: others may hold the address of a database."""


def split_command(command: str) -> list[str]:
    """Split a command into its words; PartitionError if a quote is not closed."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise PartitionError(f"on_pending: '{command}' is not a command: {error}") from None


def notify_owner(folder: Path, command: str, report: Callable[[str], None], plan: AnalysisPlan) -> None:
    """Run the command once for a new plan, without waiting for it; a failure is only a line of the log."""
    if words := split_command(command):
        Thread(target=_run, args=(folder, words, report, plan), daemon=True).start()


def _run(folder: Path, words: list[str], report: Callable[[str], None], plan: AnalysisPlan) -> None:
    held = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    fields = ("person", "study", "purpose", "call", "formula")
    message = {"site": plan.site, "plan": plan.digest} | {name: getattr(plan, name) for name in fields}
    try:
        with subprocess.Popen(
            words,
            cwd=folder,
            env=held | {"FEDSTAT_PLAN": plan.digest},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                process.communicate((json.dumps(message) + "\n").encode(), TIMEOUT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        problem = f"exit code {process.returncode}" if process.returncode else ""
    except (OSError, ValueError, FedstatError) as error:
        problem = type(error).__name__
    if problem:
        report(f"the command on_pending failed ({problem}); plan {plan.digest:.12} waits for the owner")


# ----------------------------------------------------------------------------------------------------
# Plans that wait in a site's folder for its owner, and the owner's decisions while the site runs.
#
# ::
#
#     pending/DIGEST.json        a plan that an analyst proposed (files have mode 0600, the folders 0700)
#     pending/DIGEST.decision    the owner's decision, signed with the site's keys
#     decided/DIGEST.json        a plan whose decision is in the site's ledger
#
# The process that runs the site holds its ledger. The decision is therefore written next to the plan and
# entered into the ledger when the site next looks. It is signed, so that a file from another person has no
# effect.

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
        """Return whether the site with these keys signed it."""
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

    Files that are not a plan or a decision of this site are skipped, so that they cannot block the others.
    """

    site: str
    folder: Path
    keys: PublicIdentity
    notify: Callable[[AnalysisPlan], None] = lambda _: None
    _read: dict[str, AnalysisPlan] = field(default_factory=dict)

    def keep(self, digest: str, plan: AnalysisPlan) -> None:
        """Store a plan that waits for a decision."""
        self._write(PENDING, f"{digest}{PLAN}", state_formats.PLAN.write_record(plan))
        self.notify(plan)

    def waiting(self) -> Mapping[str, AnalysisPlan]:
        """Return the open plans by digest, the oldest first."""
        paths = self._plans(PENDING)
        found = {path.stem: self._plan(path) for path in paths if not path.with_suffix(DECISION).exists()}
        return {digest: plan for digest, plan in found.items() if plan is not None}

    def find(self, digest: str) -> AnalysisPlan:
        """Return the plan whose digest begins with these characters, open or decided."""
        known = {path.stem: path for place in (DECIDED, PENDING) for path in self._plans(place)}
        complete = complete_digest(self.site, digest, known)
        plan = self._plan(known[complete])
        if plan is None:
            raise PartitionError(f"'{known[complete]}' is not the plan that was proposed; propose it again")
        return plan

    def decide(self, identity: Identity, digest: str, verdict: Literal["approved", "denied"]) -> AnalysisPlan:
        """Decide about a plan by the start of its digest, as the current user; the newest decision counts."""
        plan = self.find(digest)
        decision = PlanDecision(plan.digest, verdict, _whoever(), time.time_ns())
        signed = state_formats.DECISION.write_record(SignedDecision.of(decision, identity))
        self._write(PENDING, f"{plan.digest}{DECISION}", signed)
        return plan

    def decided(self) -> Iterator[PlanDecision]:
        """Return decisions that the ledger may not have yet, the oldest first."""
        found = [self._decision(path) for path in (self.folder / PENDING).glob(f"*{DECISION}")]
        yield from sorted((one for one in found if one is not None), key=lambda one: one.when)

    def settle(self, decision: PlanDecision) -> None:
        """Put aside a plan whose decision is in the ledger."""
        path = self.folder / PENDING / f"{decision.plan}{PLAN}"
        (self.folder / DECIDED).mkdir(mode=0o700, exist_ok=True)
        if path.exists():
            path.replace(self.folder / DECIDED / path.name)
        path.with_suffix(DECISION).unlink(missing_ok=True)

    def unreadable(self) -> list[Path]:
        """Return the open plans that an earlier version wrote in a form that cannot be read any more."""
        return [
            path
            for path in self._plans(PENDING)
            if self._plan(path) is None and state_formats.PLAN.is_earlier(path)
        ]

    def _write(self, place: str, name: str, content: str) -> None:
        (self.folder / place).mkdir(mode=0o700, exist_ok=True)
        write_atomic(self.folder / place / name, content.encode())

    def _plans(self, place: str) -> list[Path]:
        return sorted((self.folder / place).glob(f"*{PLAN}"), key=_changed)

    def _plan(self, path: Path) -> AnalysisPlan | None:
        if path.stem not in self._read:
            try:
                plan = state_formats.PLAN.read_record(AnalysisPlan, read_private(path, LONGEST), f"'{path}'")
            except (FedstatError, OSError):
                return None
            if plan.digest != path.stem:
                return None
            self._read[path.stem] = plan
        return self._read[path.stem]

    def _decision(self, path: Path) -> PlanDecision | None:
        try:
            signed = state_formats.DECISION.read_record(
                SignedDecision, read_private(path, LONGEST), f"'{path}'"
            )
        except (FedstatError, OSError):
            return None
        return signed.decision if path.stem == signed.decision.plan and signed.is_of(self.keys) else None


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # a running site has put it aside in the meantime
        return 0


def _whoever() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user account without a name
        return "owner"


# ----------------------------------------------------------------------------------------------------
# The folder of one site: where its data are, its keys, whom it trusts, what may be released, and the ledger.
#
# Only the owner has access (mode 0700, files 0600). The site does not run if others can read or write it.
#
# ::
#
#     site.toml       name, where the data are, fingerprints of the coordinator and of the other sites
#     policy.toml     what may be released (fedstat.Policy)
#     dictionary.json the accepted data dictionary; see :mod:`fedstat.federation.tables.dictionary`
#     columns.toml    public facts about the columns; see :mod:`fedstat.federation.tables.published`
#     in_force.json   rules in force; see :mod:`fedstat.federation.transport.live_config`
#     reload          time of the owner's last request to read the rows again
#     refusals.log    reasons of refusals, for its owner alone (mode 0600)
#     identity.json   the site's private keys, for its owner alone (mode 0600)
#     ledger.jsonl    all releases; see :mod:`fedstat.federation.audit.ledger_file`
#     sessions        encrypted state of sessions; see :mod:`fedstat.federation.transport.session_store`
#     pending, decided  plans of analyses; see :mod:`fedstat.federation.transport.site_folder`
#     before-upgrade-TIME  copies of the files that a newer version has converted
#     alignment.npz   vertical layout: numbers of the entities; see
# :mod:`fedstat.federation.tables.aligned_table`

DESCRIPTION, POLICY, IDENTITY = "site.toml", "policy.toml", "identity.json"
COLUMNS, REFUSALS, RELOAD = "columns.toml", "refusals.log", "reload"
PRIVATE = (
    DESCRIPTION,
    POLICY,
    IDENTITY,
    REFUSALS,
    ledger_file.LEDGER_FILENAME,
    ledger_file.CHECKPOINT_FILENAME,
    ledger_file.SECRET_FILENAME,
    ledger_file.ANSWERED_FILENAME,
    ALIGNMENT,
    DICTIONARY,
)
"""Files that only the owner may read or write (mode 0600)."""
STATE_FILES = (
    ledger_file.LEDGER_FILENAME,
    ledger_file.CHECKPOINT_FILENAME,
    ledger_file.SECRET_FILENAME,
    ledger_file.ANSWERED_FILENAME,
)
"""Files that an upgrade converts; a copy is kept."""
SEED_DIGITS, LEAST_DIGITS = 32, 8
SEED = re.compile(f"[0-9a-fA-F]{{{SEED_DIGITS}}}")
"""Pattern of a seed; one with fewer different digits was hardly drawn at random: 1 in 20 million is."""
TABLES = {
    "pinned": "fingerprint",
    "sites": "fingerprint",
    "consent": "time",
    "roster": "digest",
    "revoked": "name",
}
"""Tables of texts, and a description of their entries."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SiteDescription:
    """The entries of ``site.toml``.

    `data` describes the source. `coordinator` is the fingerprint of the coordinator's key, empty if none is
    trusted; `pinned` has one fingerprint by site, including the site's own. A formula uses `site_column` to
    refer to the site; it is empty in the vertical layout. `seed` is the secret that the sites share for
    common random projections. `exchange` is the folder or bucket of the requests, empty if another transport
    is used. `studies` are further studies with coordinators of their own, and `roles` what persons may
    request. `tables` has the folders of further tables, by name. `on_pending` is a command that is run when
    a plan waits. An approval is valid for `approval_days`, and requests with their replies stay in the
    exchange folder for `message_days`. `sessions` is the number of analyses that the site keeps open at the
    same time. `consent` has the time of the owner's consent to an alignment, by
    site; `roster` the digests of the accepted rosters, by number.
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
    studies: Mapping[str, Study] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)
    on_pending: str = ""
    approval_days: float = 30.0
    message_days: float = 90.0
    sessions: int = MAX_SESSIONS

    @property
    def study_keys(self) -> dict[str, str]:
        """Fingerprint of the coordinator of each study."""
        return {name: one.coordinator or self.coordinator for name, one in self.studies.items()}

    @property
    def coordinators(self) -> tuple[str, ...]:
        """Fingerprints of all coordinators whose requests are answered."""
        return tuple(dict.fromkeys(filter(None, (self.coordinator, *self.study_keys.values()))))

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Folders or buckets of the requests of all studies."""
        return tuple(
            dict.fromkeys(filter(None, (self.exchange, *(o.exchange for o in self.studies.values()))))
        )

    @property
    def source(self) -> Source:
        """Path of the site's rows."""
        return Source.from_mapping(self.name, self.data)

    @property
    def shared_seed(self) -> int | None:
        """The secret as a number; None if there is none.

        The seed has to be long and drawn at random. An attacker who knows one label of a cluster, or one
        product of columns, can try seeds until one fits; a number that a person chose is found in a second.
        """
        if self.seed == "":
            return None
        seed = str(self.seed)
        if not SEED.fullmatch(seed) or len(set(seed.lower())) < LEAST_DIGITS:
            raise PartitionError(
                f"{self.name}: seed: expected {SEED_DIGITS} hexadecimal digits in quotes, drawn at random "
                "(128 bits), the same at all sites",
                remedy=Remedy(
                    "fedstat site seed FOLDER",
                    "One owner draws it by '{call}' and passes it to the other owners, not to the "
                    "coordinator",
                ),
            )
        return int(seed, 16)

    @property
    def exchange_folder(self) -> str:
        """The folder of the requests; empty if a bucket or another transport is used."""
        return "" if is_bucket(self.exchange) else self.exchange

    def check(self) -> None:
        """Find errors when the file is read, and not only when rows or the seed are used."""
        _ = self.source, self.shared_seed, split_command(self.on_pending)
        check_study_names(self.studies)
        if min(self.approval_days, self.message_days) <= 0.0:
            raise PartitionError(f"{self.name}: approval_days and message_days are numbers of days above 0")
        if self.sessions < 1:
            raise PartitionError(f"{self.name}: sessions is a whole number of at least 1")
        if not all(number.isdecimal() for number in self.roster):
            raise PartitionError(f"{self.name}: [roster]: expected a digest for each roster number")


def read_description(folder: str | Path) -> SiteDescription:
    """Read ``site.toml``; PartitionError names file, entry and remedy."""
    path = Path(folder, DESCRIPTION)
    found = read_entries(SiteDescription, path, f"make it with 'fedstat site init {folder} --name NAME'")

    def resolved(exchange: str) -> str:
        return resolve_exchange(exchange, path.parent) if exchange else ""

    studies = {name: replace(one, exchange=resolved(one.exchange)) for name, one in found.studies.items()}
    data = _from_folder(path.parent, found.data)
    return replace(found, data=data, exchange=resolved(found.exchange), studies=studies)


def table_folders(folder: str | Path) -> dict[str, Path]:
    """Return the folders of all tables of a site: its own under an empty name, and those of ``[tables]``."""
    folder = Path(folder)
    return {"": folder} | {name: folder / place for name, place in read_description(folder).tables.items()}


def read_toml(path: Path, remedy: str) -> dict[str, Any]:
    """Read a TOML file; PartitionError if it is absent (with the remedy) or not valid TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PartitionError(f"'{path}' is absent; {remedy}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise PartitionError(f"'{path}' cannot be read ({type(error).__name__})") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # very long numbers and deep nesting raise errors of their own
        raise PartitionError(f"'{path}' is not a TOML file: {error}") from error


def read_entries(kind: type[T], path: Path, remedy: str) -> T:
    """Read a TOML file into a dataclass; entries with a default may be missing."""
    content = read_toml(path, remedy)
    for table, what in TABLES.items():
        keys = content.get(table)
        wrong = [name for name in keys if not isinstance(keys[name], str)] if isinstance(keys, dict) else []
        if wrong:
            raise PartitionError(f"'{path}', [{table}]: expected a {what} in quotes for {', '.join(wrong)}")
    if old := state_formats.renamed(content, get_type_hints(kind)):
        raise PartitionError(f"'{path}': {old}")
    return from_plain(kind, content, f"'{path}'", PartitionError, defaults=True)


def apply_trust(site: Site, description: SiteDescription) -> None:
    """Apply the owner's trusted keys and consents, and how long an approval is valid."""
    trust, site.approvals.valid_days = site.trust, description.approval_days
    site.max_sessions = description.sessions
    pairs: tuple[tuple[dict[str, Any], Mapping[str, Any]], ...] = (
        (trust.pinned, description.pinned),
        (trust.consents, description.consent),
        (trust.rosters, description.roster),
        (trust.studies, description.study_keys),
        (trust.roles, description.roles),
        (trust.study_rosters, _study_rosters(description)),
    )
    for held, given in pairs:
        held.clear()
        held.update(given)


def _study_rosters(description: SiteDescription) -> dict[str, Mapping[str, str]]:
    """Rosters of coordinators that are not the site's own, by the digits of their fingerprints."""
    own = normalize_fingerprint(description.coordinator)
    keys = {name: normalize_fingerprint(key) for name, key in description.study_keys.items()}
    return {key: description.studies[name].roster for name, key in keys.items() if key != own}


def _from_folder(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve relative paths against the site's folder."""
    relative = {name: str(folder / data[name]) for name in ("path", "file") if data.get(name)}
    return {**data, **relative}


def load_identity(folder: str | Path) -> Identity:
    """Read the keys of a folder; SecurityError if others than the owner may read them."""
    path = Path(folder, IDENTITY)
    if not path.exists():
        raise PartitionError(
            f"'{path}' is absent",
            remedy=Remedy(
                "fedstat site init {folder} --name NAME", "make a folder with keys with '{call}'"
            ).filled(folder=shlex.quote(str(folder))),
        )
    return Identity.load(path)


def read_site_policy(folder: str | Path) -> Policy:
    """Read ``policy.toml``; missing entries, or a missing file, mean the strict policy."""
    path, strict = Path(folder, POLICY), Policy.strict()
    return Policy.from_toml(path, strict) if path.exists() else strict


def read_site_columns(folder: str | Path, site: str, table: Table) -> Published:
    """Read ``columns.toml`` and check the table against it; without the file nothing is public.

    PartitionError if the table departs from it; the owner sees it when the site is opened.
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
    """Return why earlier replies cannot be compared with new ones; empty if they can.

    Rows with a key may come, go and change. Rows without a key are recognized by all their values: a missing
    one may have been changed.
    """
    kept, _ = convert_history(kept, table)
    if "marks" not in kept:
        return ledger_file.row_count_problem(then, table.n_rows)
    form = MarkForm.from_array(kept["form"]) if "form" in kept else MarkForm.of(table)
    if isinstance(table, AlignedTable):
        return ""
    if form.by_key and row_keys(table) is None:
        return 'the key of the records is no longer named. Name it under [data] in site.toml: key = "COLUMN"'
    if lacking := form.lacking(table):
        return (
            f"the records behind earlier replies had the column {', '.join(map(repr, lacking))}, which is "
            "gone. Keep it in the source; it need not be published"
        )
    here = recognize_rows(kept["marks"], form, table, identity.secret("row marks"))
    lost = len(kept["marks"]) - int((here >= 0).sum())
    if form.by_key:
        if not lost or (here >= 0).any():
            return ""
        return (
            f"there are {table.n_rows:,} rows, and none has the key of a row behind earlier replies. Write "
            "keys as before; if these are other records, declare the loss of the release history"
        )
    if not lost:
        return ""
    return (
        f"there are {table.n_rows:,} rows; earlier replies used {then:,}. Gone or changed since then: "
        f"{lost:,}. Without a key they cannot be recognized, and the difference of two replies could "
        "disclose a few rows. Restore the records, name the column that identifies them under [data] in "
        'site.toml, key = "COLUMN", and start the site with them once. From then on, records may change'
    )


def restore_row_groups(site_ledger: SiteLedger, table: Table, identity: Identity) -> ReleaseHistory:
    """Load the groups of rows behind the replies of earlier processes.

    SecurityError if they are incomplete: a new reply might differ from earlier ones by one person's row.
    """
    if not site_ledger.recalled:
        return ReleaseHistory()
    try:
        return ReleaseHistory.from_arrays(site_ledger.recalled, table, identity.secret("row marks"))
    except (ValueError, LookupError, TypeError) as error:
        raise SecurityError("the memory of earlier replies is incomplete; declare the loss") from error


def refusal_log(folder: str | Path) -> Callable[[str], None]:
    """Return a function that appends one line per refusal to ``refusals.log``."""

    def append(reason: str) -> None:
        with suppress(OSError):  # a full disk must not delay the refusal itself
            handle = os.open(Path(folder, REFUSALS), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(handle, "a", encoding="utf-8") as file:
                file.write(f"{utc_text(time.time_ns())} {' '.join(reason.split())}\n")

    return append


def open_records(folder: str | Path, description: SiteDescription) -> Table:
    """Open the rows of a site without their key; in the vertical layout in the order of its alignment."""
    source, folder, now = description.source, Path(folder), utc_text(time.time_ns())
    dictionary = read_accepted(folder, description.coordinator)
    if dictionary is not None:
        source = replace(source, dictionary=dictionary.declared)
    table = _open_table(source, folder, bool(description.site_column))
    if isinstance(table, FrameTable):
        table.as_of = now
    return table


def _open_table(source: Source, folder: Path, by_rows: bool) -> Table:
    if by_rows:
        return open_source(source, folder)
    if source.counts:
        raise PartitionError(
            f"{source.site}: counts is for sites with different rows; a row with a key represents one entity"
        )
    # The families of the vertical layout need the table in memory.
    if source.key:
        return AlignedTable(source.site, read_source(source, folder), source.key, folder)
    table = open_source(source)
    return FrameTable(pd.concat(list(table.chunks(table.columns)), ignore_index=True))


def reload_records(folder: Path, site: Site) -> str:
    """Read the rows of a site again and use them; return the outcome, for the owner.

    PartitionError if they do not fit the site's description or its public columns, SecurityError if they
    cannot be compared with earlier replies. In both cases the site keeps the current rows.
    """
    table = open_records(folder, read_description(folder))
    read_site_columns(folder, site.name, table)
    same = order_fingerprint(table) == order_fingerprint(site.data.table)
    if not same:
        site.change_records(table, partial(comparison_problem, table, site.trust.identity))
    site.site_ledger.as_of = read_at(table)
    ends = "they are the same as before"
    if not same:
        ends = f"they have changed{_counted(site.data.memory.changes)}, and open sessions have ended"
    return f"read its rows again, {table.n_rows:,} rows: {ends}{_waits(site)}"


def _counted(changes: tuple[int, int, int]) -> str:
    """Say how many records were corrected, added and removed; empty if none is known."""
    words = [f"{n:,} {what}" for n, what in zip(changes, ("corrected", "added", "removed"), strict=True) if n]
    return f" ({', '.join(words)})" if words else ""


def _waits(site: Site) -> str:
    """Say that sums over all records would single out the few that have changed; empty if they would not."""
    released, policy = site.data.memory.released, site.policy
    if released is None or policy.remember == "nothing":
        return ""
    everyone = released.with_groups(np.zeros(site.data.table.n_rows, dtype=np.int64))
    if not everyone.isolates(policy.min_count, released):
        return ""
    does = "leaves them and others out" if leaves_out(site.data) else "refuses sums over all records"
    return (
        f". Few records differ from those of earlier releases: the site {does} until at least "
        f"{policy.min_count} have changed, because a difference of sums would reveal the changes"
    )


def mode_problems(folder: str | Path) -> Iterator[str]:
    """Return an error text if others may read or write files of a site, with the commands that correct it."""
    folder = Path(folder)
    files = [folder / name for name in PRIVATE if is_open_to_others(folder / name)]
    commands = [f"chmod 700 '{folder}'"] if is_open_to_others(folder) else []
    commands += [f"chmod 600 {' '.join(repr(str(path)) for path in files)}"] if files else []
    if commands:
        yield (
            f"others can read or write the folder of the site, '{folder}', or its files. These hold the "
            f"site's secrets, its rules and the rows behind its replies: {'; '.join(commands)}"
        )


UPGRADED = "before-upgrade"
"""Beginning of the name of the folder that has copies of files before their conversion."""


def upgrade_state(
    site: Site, plans: PlanFolder, memory: ReleaseHistory, report: Callable[[str], None]
) -> None:
    """Convert the state of an earlier version, once; copies of its files are kept next to them.

    The release history is written in its present format by :meth:`Site.remember`. A plan that cannot be read
    any more is removed: its analyst proposes it again.
    """
    site_ledger, folder = site.site_ledger, plans.folder
    unreadable = plans.unreadable()
    if not (site_ledger.is_earlier or memory.is_converted or unreadable):
        return
    stamp = utc_text(time.time_ns()).replace(":", "").replace("-", "")
    copies = folder / f"{UPGRADED}-{stamp}"
    copies.mkdir(mode=0o700, exist_ok=True)
    for name in (*STATE_FILES, *(str(path.relative_to(folder)) for path in unreadable)):
        if (folder / name).exists():
            write_atomic(copies / Path(name).name, (folder / name).read_bytes())
    ledger_file.mark_upgrade(site_ledger)
    for path in unreadable:
        path.unlink()
    waits = ""
    if unreadable:
        waits = (
            f". Plans that waited for approval have another form now ({len(unreadable)} removed); their "
            "analysts run the analyses again to propose them"
        )
    report(
        f"the state of this site was written by an earlier version and is converted to that of fedstat "
        f"{VERSION}; copies of the earlier files are in '{copies.name}'{waits}"
    )


def _notify(folder: Path, report: Callable[[str], None], plan: AnalysisPlan) -> None:
    """Run the owner's command for a new plan, as site.toml is now."""
    try:
        notify_owner(folder, read_description(folder).on_pending, report, plan)
    except (FedstatError, RuntimeError) as error:  # a site goes on without its notification
        report(f"the owner was not notified of plan {plan.digest:.12}: {error}")


def open_site(
    folder: str | Path, report: Callable[[str], None] = lambda _: None, trial: bool = False
) -> Site:
    """Open the site of a folder with its existing ledger; `report` receives lines for its log.

    A `trial` changes no file.

    PartitionError if its description, data or policy cannot be used. SecurityError if others may read or
    write its folder, if the ledger is incomplete, or if its stored replies used another number of rows.
    EngineError if another process runs the site.
    """
    for problem in mode_problems(folder):
        raise SecurityError(problem)
    description = read_description(folder)
    load_families()
    identity = load_identity(folder)
    table, policy = open_records(folder, description), read_site_policy(folder)
    plans = PlanFolder(
        description.name, Path(folder), identity.public, partial(_notify, Path(folder), report)
    )
    site = Site(
        name=description.name,
        table=table,
        policy=policy,
        shared_seed=description.shared_seed,
        site_column=description.site_column,
        trust=SiteTrust(_identity=identity),
        site_ledger=ledger_file.open_ledger(
            folder, description.name, identity, partial(comparison_problem, table, identity)
        ),
        published=read_site_columns(folder, description.name, table),
        log=refusal_log(folder),
        plans=plans,
    )
    apply_trust(site, description)
    site.site_ledger.as_of = read_at(table)
    memory = restore_row_groups(site.site_ledger, table, identity)
    if not trial:
        upgrade_state(site, plans, memory, report)
        site.approvals.take_up()
    # rows behind earlier replies: their difference to a new reply could disclose single entities
    site.remember(memory, store=not trial)
    return site
