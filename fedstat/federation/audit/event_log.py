"""The event log: one record for each array sent, and a site's chain of these records per session."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Iterator, KeysView, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from fedstat.codec import from_plain, to_plain
from fedstat.errors import PolicyError, SecurityError
from fedstat.federation.audit.budget_charges import RHO_PATTERN, Charge, Charges
from fedstat.federation.audit.checkpoints import Nanoseconds, SignedCheckpoint, utc_text
from fedstat.federation.audit.release_counts import (
    MASKED_SHARE,
    counts_as_equation,
    distinct_numbers,
    numbers_per_entity,
)
from fedstat.federation.crypto.keys import PublicIdentity, encode_parts
from fedstat.federation.message import ArrayDeclaration, Reply, Request, Step
from fedstat.typing import Array

# ----------------------------------------------------------------------------------------------------
# One event: an array or a text that was sent to or by a site, or a refusal.
#
# Each party records an event once, where it happens. Ledgers, chains, statements, receipts and their counts
# are views of these records. The canonical text of a record, which is the input of digests, is made once.

COORDINATOR = "coordinator"
REFUSAL = "refusal"
TEXT = "text"
MAX_NAME_LENGTH = 80
SIGNED_FIELDS = (
    "round", "sender", "receiver", "family", "step", "array",
    "kind", "masked", "shape", "bytes", "entities", "rule",
)  # fmt: skip
"""Fields that are hashed and signed, in this order: all but the meaning, which goes with step and array."""
SITE_FIELDS = ("time", "numbers", "among", "commitment")
"""Fields that only the site knows, hashed and signed after the others."""
LINK_FIELDS = (*SIGNED_FIELDS, *SITE_FIELDS)
CHARGED_FIELD = "charged"
_signed, _site_signed = attrgetter(*SIGNED_FIELDS), attrgetter(*LINK_FIELDS)
_ENTRY_TYPES = (int, str, str, str, str, str, str, bool, list, int, int, str)
_SITE_TYPES = (*_ENTRY_TYPES, str, int, int, str)
_quoted = json.encoder.encode_basestring
_CANONICAL_ENCODER = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)


def canonical_json(value: Any) -> str:
    """Write JSON in the one form that is hashed and signed."""
    return _CANONICAL_ENCODER.encode(value)


@dataclass(frozen=True, slots=True)
class AbsentSite:
    """A site that did not answer while a fit ran, so that the fit was started again.

    Parameters
    ----------
    site : str
    round : int
        Round of the ledger, from 1.
    back : bool
        Whether it had lost the session only, and takes part in the fit; else it is left out.

    Examples
    --------
    >>> import fedstat as fs
    >>> print(fs.results.AbsentSite("Hungary", round=4))
    'Hungary' was lost in round 4, and its rows are not in the fit
    """

    site: str
    round: int
    back: bool = False

    def __str__(self) -> str:
        what = "was restarted in round {}, and takes part in the repeated fit"
        if not self.back:
            what = "was lost in round {}, and its rows are not in the fit"
        return f"'{self.site}' {what.format(self.round)}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One array or text that was sent, or a refusal.

    `round`, from 1, counts the round trips of the run in a run's ledger; in a site's ledger it counts the
    requests to this site in this session. `sender` and `receiver` are sites or ``"coordinator"``. `array` is
    ``"text"`` for a text and empty for a refusal, whose kind is ``"refusal"`` and whose `rule` is the class
    of the error and the rule of the policy; `what` describes the array in words. `masked` arrays reveal only
    the sum over sites to the receiver; their `shape` is that before masking. `bytes` is the size of the
    message, and `entities` the number of entities that the array depends on.
    """

    round: int
    sender: str
    receiver: str
    step: str
    array: str
    kind: str
    what: str = field(default="", compare=False)
    shape: tuple[int, ...] = ()
    bytes: int = 0
    entities: int = 0
    masked: bool = False
    family: str = ""
    rule: str = ""
    _text: str = field(default="", init=False, repr=False, compare=False)

    @property
    def left(self) -> bool:
        """Whether something left a site."""
        return self.receiver == COORDINATOR and self.kind != REFUSAL

    @property
    def signed(self) -> list[Any]:
        """Values that are hashed and signed."""
        return list(_signed(self))

    @property
    def text(self) -> str:
        """Canonical JSON of :attr:`signed`, written once."""
        if not self._text:
            object.__setattr__(self, "_text", f"[{self._written()}]")
        return self._text

    def _written(self) -> str:
        names = _quoted(self.sender), _quoted(self.receiver), _quoted(self.family), _quoted(self.step)
        return (
            f"{self.round},{','.join(names)},{_quoted(self.array)},{_quoted(self.kind)},"
            f"{'true' if self.masked else 'false'},[{','.join(map(str, self.shape))}],"
            f"{self.bytes},{self.entities},{_quoted(self.rule)}"
        )

    def in_round(self, number: int) -> Entry:
        """Return the same entry under another number, without what only the site knows."""
        if number == self.round and type(self) is Entry:
            return self
        return Entry(number, *_fields_after_round(self))


_fields_after_round = attrgetter(*[part.name for part in fields(Entry) if part.init][1:])


@dataclass(frozen=True, slots=True)
class SiteEntry(Entry):
    """An entry of a site's own ledger, with what only the site knows.

    `time` is UTC to the second. `numbers` counts the distinct numbers that are equations (see
    :mod:`fedstat.federation.audit.release_counts`), as sums over `among` sites. `commitment` is to the
    content, and empty for a refusal. `charged` is the charge to the site's privacy budget, as a fraction. It
    is signed if there is one, and otherwise empty.
    """

    time: str = ""
    numbers: int = 0
    among: int = 1
    commitment: str = ""
    charged: str = ""

    @property
    def signed(self) -> list[Any]:
        """Values of :data:`LINK_FIELDS`, and the charge if there is one."""
        return [*_site_signed(self), *([self.charged] if self.charged else [])]

    def _written(self) -> str:
        charged = f",{_quoted(self.charged)}" if self.charged else ""
        return (
            f"{Entry._written(self)},{_quoted(self.time)},{self.numbers},{self.among},"
            f"{_quoted(self.commitment)}{charged}"
        )

    def agrees_with(self, entry: Entry) -> bool:
        """Whether this is the same event as another party recorded it."""
        return _signed(self) == _signed(entry)

    @property
    def named(self) -> dict[str, Any]:
        """Values by the name of their field."""
        return dict(zip((*LINK_FIELDS, CHARGED_FIELD), [*self.signed, ""], strict=False))


Content: TypeAlias = Array | str
RecordedContent: TypeAlias = Iterator[tuple[dict[str, Any], Content]]
"""Fields of entries, each with the content that the entry describes."""


def request_contents(request: Request, step: Step, number: int) -> RecordedContent:
    """Fields of the entries of a request's arrays and text, in the order of their declaration."""
    way = {"round": number, "sender": COORDINATOR, "receiver": request.site, "family": request.family}
    for name, line in step.takes.items():
        # A site records a request before it refuses one with arrays that the step does not take.
        if name in request.arrays:
            yield _described(way, request, name, line, request.arrays[name])
    if request.text and step.text_in is not None:
        yield _described(way, request, TEXT, step.text_in, request.text)


def reply_contents(request: Request, step: Step, reply: Reply, number: int) -> RecordedContent:
    """Fields of the entries of a reply's arrays, in the order of sending, and of its text.

    An array that is not declared is a KeyError.
    """
    way = {"round": number, "sender": request.site, "receiver": COORDINATOR, "family": request.family}
    places = {name: place for place, name in enumerate(step.gives)}
    for name in sorted(reply.arrays, key=places.__getitem__):
        line = step.gives[name]
        masked = line.maskable and request.masked is not None
        yield _described(way, request, name, line, reply.arrays[name], reply.entities, masked)
    if reply.text and step.text_out is not None:
        yield _described(way, request, TEXT, step.text_out, reply.text)


def _described(
    way: dict[str, Any],
    request: Request,
    name: str,
    line: ArrayDeclaration,
    content: Content,
    entities: int = 0,
    masked: bool = False,
) -> tuple[dict[str, Any], Content]:
    if isinstance(content, str):
        shape, size = (), len(content.encode())
    else:
        # A masked number is sent as several words: the first axis is no part of its shape.
        shape, size = content.shape[1:] if masked else content.shape, content.nbytes
    about = {
        "step": request.step,
        "array": name,
        "kind": line.kind,
        "what": line.what,
        "shape": shape,
        "bytes": size,
        "entities": entities,
        "masked": masked,
    }
    return way | about, content


def request_entries(request: Request, step: Step, number: int) -> list[Entry]:
    """Entries of a request, as its sender records them."""
    return [Entry(**about) for about, _ in request_contents(request, step, number)]


def reply_entries(request: Request, step: Step, reply: Reply, number: int) -> list[Entry]:
    """Entries of a reply, as its receiver records them."""
    return [Entry(**about) for about, _ in reply_contents(request, step, reply, number)]


def refusal_entry(request: Request, error: Exception, number: int) -> Entry:
    """Return the entry of a refusal: the request and the rule."""
    family, step = request.family[:MAX_NAME_LENGTH], request.step[:MAX_NAME_LENGTH]
    return Entry(
        number, request.site, COORDINATOR, step, "", REFUSAL, family=family, rule=refusal_reason(error)
    )


def refusal_reason(error: Exception) -> str:
    """Name the class of a refusal, and the rule of the policy that refused; never values."""
    rule = error.rule if isinstance(error, PolicyError) else ""
    return type(error).__name__ + (f" ({rule})" if rule else "")


def read_entry(row: Sequence[Any]) -> Entry:
    """Rebuild an entry from its signed JSON values; TypeError or ValueError if it is invalid."""
    if tuple(map(type, row)) != _ENTRY_TYPES:
        raise TypeError(f"the types of {', '.join(SIGNED_FIELDS)}")
    return Entry(*_constructor_order(row))


def read_site_entry(row: Sequence[Any]) -> SiteEntry:
    """Rebuild an entry of a site's ledger; see :func:`read_entry`."""
    place, end = len(SIGNED_FIELDS), len(LINK_FIELDS)
    if tuple(map(type, row)) not in (_SITE_TYPES, (*_SITE_TYPES, str)):
        raise TypeError(f"the types of {', '.join(LINK_FIELDS)}")
    entry = SiteEntry(*_constructor_order(row), *row[place:])
    if entry.numbers < 0 or entry.among < 1:
        raise ValueError("a negative number")
    if len(row) > end and not RHO_PATTERN.fullmatch(entry.charged):
        raise ValueError("an invalid charge")
    return entry


def _constructor_order(row: Sequence[Any]) -> tuple[Any, ...]:
    number, sender, receiver, family, step, array, kind, masked, shape, size, entities, rule = row[:12]
    if any(type(length) is not int for length in shape):
        raise TypeError("shape")
    if min(number, size, entities, *shape) < 0:
        raise ValueError("a negative number")
    return number, sender, receiver, step, array, kind, "", tuple(shape), size, entities, masked, family, rule


def genesis_digest(site: str, keys: PublicIdentity, session: str, ordinal: int, previous: str) -> bytes:
    """Digest before the first entry."""
    parts = ("fedstat chain 1", site, keys.digest, session, str(ordinal), previous)
    return hashlib.sha256(encode_parts(*parts)).digest()


def extended_digest(digest: bytes, entry: SiteEntry) -> bytes:
    """Digest after one more entry."""
    return hashlib.sha256(digest + entry.text.encode()).digest()


@lru_cache(maxsize=1024)
def _array_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    return encode_parts(dtype, str(shape))


def content_digest(content: Content) -> bytes:
    """SHA-256 of type, shape and numbers, or of a text; memory is read once and not copied."""
    if isinstance(content, str):
        return hashlib.sha256(encode_parts("text", content)).digest()
    array = np.ascontiguousarray(content)
    digest = hashlib.sha256(_array_header(array.dtype.str, content.shape))
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.digest()


@dataclass(slots=True)
class NumbersReleased:
    """Numbers that left, by how many sites they are sums over, and those that came in."""

    released: Counter[int] = field(default_factory=Counter)
    received: int = 0

    def add(self, entry: SiteEntry) -> None:
        """Count one more entry."""
        if entry.receiver != COORDINATOR:
            self.received += entry.numbers
        elif entry.numbers:
            self.released[entry.among] += entry.numbers

    def without(self, other: NumbersReleased) -> NumbersReleased:
        """Return the numbers without those of one session."""
        return NumbersReleased(self.released - other.released, self.received - other.received)


# ----------------------------------------------------------------------------------------------------
# What a site remembers of its answers, to compare later requests with them.


class AnswerRecord:
    """Something that a site has answered: a frozen dataclass, stored under the name of its class."""

    __slots__ = ()

    @property
    def line(self) -> dict[str, Any]:
        """Line of the stored ledger."""
        return {"remembered": type(self).__name__, "record": to_plain(self)}


RecordT = TypeVar("RecordT", bound=AnswerRecord)


@dataclass(frozen=True, slots=True)
class UsedApproval(AnswerRecord):
    """The approval of a plan at this time, which holds for one run."""

    plan: str
    when: Nanoseconds


# ----------------------------------------------------------------------------------------------------
# Decision of a site's owner about a plan: who, when, and about which.


@dataclass(frozen=True, slots=True)
class PlanDecision:
    """A decision about the plan with this digest."""

    plan: str
    verdict: Literal["approved", "denied"]
    who: str
    when: Nanoseconds

    @property
    def use(self) -> UsedApproval:
        """What the site remembers when an analysis has used it."""
        return UsedApproval(self.plan, self.when)

    def __str__(self) -> str:
        return f"{self.verdict} by {self.who} on {utc_text(self.when)}: plan {self.plan}"


@dataclass(frozen=True, slots=True)
class PlanProposal:
    """A plan that the coordinator with key `client` proposed; it signed the request at the time `written`."""

    plan: str
    client: str
    written: str
    proposed: Nanoseconds


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """Rules of a site from a time on, as the text of a policy file without comments."""

    policy: Nanoseconds
    rules: str


# ----------------------------------------------------------------------------------------------------
# A site's own ledger of all messages, in one chain of digests per session.
#
# Each message has two entries: one of the coordinator, which transferred it, and one here. The chain of a
# site is ::
#
# d_0 = SHA-256(site, digest of its public keys, session, its place among the site's sessions, head before)
# d_i = SHA-256(d_{i-1}, canonical JSON of entry i)
#
# so that the last digest, the head, covers every entry, their order, and the previous session of the site.
# Each entry commits to the content of its array by ::
#
#     HMAC-SHA-256(k_i, SHA-256(array)),    k_i = HMAC-SHA-256(secret of the session, i)
#
# The plain digest of a flag, a count or a column of zeros and ones could be found by trying all candidates;
# without k_i, which stays at the site, the commitment reveals nothing. By giving away the one key k_i the
# site can later prove the content of array i, without disclosing any other.


@dataclass(frozen=True, slots=True)
class Subject:
    """What a session is about, as the site knows it when it answers or refuses a request.

    `client` is the fingerprint of the coordinator's key, `written` the time of its signature. `person`,
    `study` and `purpose` are its statements. `role` is the site's own name for what this person may request.
    The site reads `formula` and `columns` from the requests themselves. `plan` is the digest of the approved
    plan.
    """

    client: str = ""
    written: str = ""
    person: str = ""
    study: str = ""
    purpose: str = ""
    role: str = ""
    formula: str = ""
    columns: tuple[str, ...] = ()
    plan: str = ""

    @property
    def who(self) -> tuple[str, ...]:
        """The client and its statements, which stay the same in a session."""
        return self.client, self.person, self.study, self.purpose


NO_SUBJECT = Subject()


class LedgerStore(Protocol):
    """A place where a site's ledger outlives its process: its lines, in order."""

    @property
    def broken(self) -> str:
        """Why nothing can be kept any more; empty if it can."""
        ...

    @property
    def head(self) -> SignedCheckpoint:
        """The newest checkpoint."""
        ...

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Keep lines before anything of them leaves, all or none."""
        ...

    def answered(self, arrays: Mapping[str, Array], n_rows: int) -> None:
        """Keep the rows behind earlier answers; see :mod:`fedstat.federation.disclosure.row_checks`."""
        ...

    def holds(self, head: SignedCheckpoint) -> bool:
        """Whether what is kept had this head."""
        ...

    def close(self) -> None:
        """Let another process write."""
        ...


class SessionChain:
    """One site's entries of one session, which is number `ordinal`, from 1, of those that the site opened.

    `previous` is the head of the session opened before, as it was then; empty for the first. A chain is
    `resumed` if its first entries were made before the site was started again. The records that it is
    about were read at the time `as_of`, empty if they are read for every answer.
    """

    def __init__(
        self,
        site: str,
        keys: PublicIdentity,
        session: str,
        ordinal: int,
        previous: str,
        site_ledger: SiteLedger,
    ) -> None:
        self.site, self.session, self.ordinal, self.previous = site, session, ordinal, previous
        self.as_of = site_ledger.as_of if session else ""
        self.entries: list[SiteEntry] = []
        self.round = 0
        self.numbers = NumbersReleased()
        self.resumed = False
        # The ledger holds its chains. A strong reference back would be a cycle, which keeps both in memory.
        self._site_ledger: SiteLedger = weakref.proxy(site_ledger)
        self._waiting: list[tuple[SiteEntry, str]] = []
        self._secret = hmac.digest(
            site_ledger.secret, encode_parts("session", str(ordinal), session), "sha256"
        )
        self._digest = self._digest_before = genesis_digest(site, keys, session, ordinal, previous)
        # A statement is about messages before its request: its own request is not in it yet.
        self._before = 0
        self._time = ""
        self._subjects: list[tuple[int, Subject]] = []
        self._described: Subject | None = None

    @property
    def subject(self) -> Subject:
        """What the session is about now."""
        return self._subjects[-1][1] if self._subjects else NO_SUBJECT

    def described_entries(self) -> Iterator[tuple[SiteEntry, Subject]]:
        """Yield each entry with what the session was about."""
        subject, coming = NO_SUBJECT, iter([*self._subjects, (len(self.entries) + 1, NO_SUBJECT)])
        start, following = next(coming)
        for number, entry in enumerate(self.entries):
            while start <= number:
                subject = following
                start, following = next(coming)
            yield entry, subject

    def describe(self, subject: Subject) -> None:
        """Note what the entries of this request are about; it is kept together with them."""
        before = self.subject
        if subject != before and replace(subject, written=before.written) != before:
            self.restore_subject(subject, len(self.entries) - len(self._waiting))
            self._described = subject

    def restore_subject(self, subject: Subject, start: int | None = None) -> None:
        """Restore the subject of the next entries."""
        start = len(self.entries) if start is None else start
        self._subjects = [one for one in self._subjects if one[0] < start]
        self._subjects.append((start, subject))

    @property
    def head(self) -> str:
        """Digest of the newest entry."""
        return self._digest.hex()

    def before_this_request(self) -> tuple[list[SiteEntry], str]:
        """Entries and head as they were before the present request."""
        return self.entries[: self._before], self._digest_before.hex()

    def entry_key(self, number: int) -> bytes:
        """Key of the commitment of an entry, counted from 0; giving it away discloses this entry only."""
        return hmac.digest(self._secret, number.to_bytes(8, "little"), "sha256")

    def begin(self) -> None:
        """Start the entries of a new request."""
        self.round += 1
        self._before, self._digest_before = len(self.entries), self._digest
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        # A clock that was set back must not reverse the times in the ledger.
        self._time = max(now, self.entries[-1].time) if self.entries else now

    def request(self, request: Request, step: Step) -> None:
        """Record a request; it is written together with its outcome.

        A site that is killed in between has answered nothing, and can be asked the same again.
        """
        self._record(request_contents(request, step, self.round), {}, 1, {})

    def reply(
        self,
        request: Request,
        step: Step,
        reply: Reply,
        clear: Mapping[str, Array],
        n_sites: int,
        costs: Mapping[str, str],
    ) -> None:
        """Record what leaves, and what it was charged.

        `clear` are the arrays before they were masked, for a sum over `n_sites`.
        """
        self._record(reply_contents(request, step, reply, self.round), clear, n_sites, costs)
        self._keep()

    def refusal(self, request: Request, error: Exception) -> None:
        """Record that nothing left, and the rule."""
        refused = refusal_entry(request, error, self.round)
        self._add(SiteEntry(*(self.round, *_fields_after_round(refused), self._time)), "")
        self._keep()

    def restore(self, entry: SiteEntry, mark: str) -> None:
        """Restore a stored entry."""
        self.resumed, self.round = True, max(self.round, entry.round)
        self._append(entry, mark)

    def _record(
        self, contents: RecordedContent, clear: Mapping[str, Array], n_sites: int, costs: Mapping[str, str]
    ) -> None:
        """Count what is new in each content, commit to it, and record it with the mark of the content."""
        for about, content in contents:
            digest, outward, array = content_digest(content), about["receiver"] == COORDINATOR, about["array"]
            plain, numbers, mark = clear.get(array, content), 0, ""
            # The mark is of what is sent, so that a repetition under new masks counts again; the numbers are
            # those before masks, which take several words for each.
            if not isinstance(plain, str) and counts_as_equation(about["kind"], outward):
                mark = hmac.digest(self._site_ledger.secret, encode_parts("seen", digest), "sha256").hex()
                numbers = 0 if mark in self._site_ledger.seen else distinct_numbers(plain)
            entry = SiteEntry(
                **about,
                time=self._time,
                numbers=numbers,
                among=n_sites if about["masked"] else 2 if outward and about["kind"] == MASKED_SHARE else 1,
                commitment=hmac.digest(self.entry_key(len(self.entries)), digest, "sha256").hex(),
                charged=costs.get(array, ""),
            )
            self._add(entry, mark)

    def _add(self, entry: SiteEntry, mark: str) -> None:
        """Record a new entry, which is kept with the outcome of the request."""
        self._append(entry, mark)
        self._waiting.append((entry, mark))

    def _append(self, entry: SiteEntry, mark: str) -> None:
        if mark:
            self._site_ledger.seen.add(mark)
        self.numbers.add(entry)
        self._site_ledger.numbers.add(entry)
        # Earlier releases reveal nothing new.
        if entry.numbers and entry.receiver == COORDINATOR and entry.kind == "per entity":
            self._site_ledger.vectors += numbers_per_entity(entry.shape)
        self.entries.append(entry)
        self._site_ledger.events.append((self, entry))
        self._digest = extended_digest(self._digest, entry)

    def _keep(self) -> None:
        """Keep the entries since the last answer, with the head of the chain after the last of them."""
        new, self._waiting = self._waiting, []
        described, self._described = self._described, None
        if self._site_ledger.store is not None and new:
            lines: list[dict[str, Any]] = [
                {"ordinal": self.ordinal, "entry": entry.signed, "mark": mark} for entry, mark in new
            ]
            lines[-1]["head"] = self.head
            about = [] if described is None else [{"of": self.ordinal, **to_plain(described)}]
            self._site_ledger.keep(*about, *lines)


class SiteLedger:
    """All events at one site, in order; the chains of its sessions and all counts are views of them.

    The keys of all commitments are drawn from `secret`. `numbers` were released or received in all sessions,
    and `vectors` counts the released numbers per entity. `seen` holds the marks of all contents that the site
    has released or received: a repetition reveals nothing new. A mark is the keyed digest of a content, and
    reveals nothing without the secret. `columns` were used in any session; `entities` is the largest number
    behind a reply; `refusals` counts those that depended on rows, by analyst; `decisions` are the owner's
    newest about plans, by digest, and `proposals` the newest of each plan; `charges` are all to its privacy
    budget. `disputed` states why the ledger is incomplete, `losses` are the times at which its owner declared
    the loss of the earlier ledger, with the reasons. The rows were read at the time `as_of`. `recalled` are
    the rows behind replies of an earlier process. `kept` has noisy arrays that were charged, for repetitions
    of their request: by keyed digest of the request, by session, by part of a reply.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self.secret = secrets.token_bytes(32) if secret is None else secret
        self.events: list[tuple[SessionChain, SiteEntry]] = []
        self.numbers = NumbersReleased()
        self.vectors = 0
        self.seen: set[str] = set()
        self.store: LedgerStore | None = None
        self.columns: set[str] = set()
        self.entities = 0
        self.refusals: Counter[str] = Counter()
        self._records: dict[type[AnswerRecord], dict[AnswerRecord, None]] = {}
        self._stored: dict[str, list[Any]] = {}  # plain records, until they are needed
        self._provisional: list[AnswerRecord] | None = None
        self.decisions: dict[str, PlanDecision] = {}
        self.proposals: dict[str, PlanProposal] = {}
        self.policies: list[PolicyRecord] = []
        self.charges = Charges()
        self.disputed = ""
        self.as_of = ""
        self.losses: list[tuple[str, str]] = []
        self.recalled: dict[str, Array] = {}
        self.is_earlier = False  # the file has the format of an earlier version
        self.kept: dict[str, dict[str, dict[str, Array]]] = {}
        self._chains: dict[str, SessionChain] = {}
        self._present = ""

    @property
    def chains(self) -> tuple[SessionChain, ...]:
        """All chains, in the order in which their sessions were opened."""
        return tuple(self._chains.values())

    @property
    def present(self) -> SessionChain:
        """Chain of the request that is being answered."""
        return self._chains[self._present]

    def chain(self, site: str, keys: PublicIdentity, session: str) -> SessionChain:
        """Return the chain of a session for the next request; it is opened if necessary."""
        if session not in self._chains:
            chain = self.open(site, keys, session)
            self.keep(
                {
                    "session": session,
                    "ordinal": chain.ordinal,
                    "previous": chain.previous,
                    "as_of": chain.as_of,
                }
            )
        self._present = session
        return self._chains[session]

    def find(self, session: str) -> SessionChain | None:
        """Return the chain of a session; None if it was not opened here."""
        return self._chains.get(session)

    def rounds(self, session: str) -> int:
        """Count the requests that were recorded in a session."""
        return self._chains[session].round if session in self._chains else 0

    def resumed(self, session: str) -> bool:
        """Whether a session began before the site was started again."""
        return session in self._chains and self._chains[session].resumed

    def open(self, site: str, keys: PublicIdentity, session: str) -> SessionChain:
        """Open the chain of a new session, after the head of the one that was opened last."""
        last = next(reversed(self._chains.values()), None)
        previous = "" if last is None else last.head
        chain = SessionChain(site, keys, session, len(self._chains) + 1, previous, self)
        self._chains[session] = chain
        return chain

    def keep(self, *lines: Mapping[str, Any]) -> None:
        """Keep lines beyond the life of the process, if there is a place for them."""
        if self.store is not None and lines:
            self.store.append(lines)

    def record_columns(self, columns: set[str], entities: int) -> None:
        """Note what an answer rested on."""
        if columns <= self.columns and entities <= self.entities:
            return
        self.columns |= columns
        self.entities = max(self.entities, entities)
        self.keep({"columns": sorted(self.columns), "entities": self.entities})

    def records(self, kind: type[RecordT]) -> KeysView[RecordT]:
        """Return all records of a kind, in their order."""
        found: dict[Any, None] = self._records.setdefault(kind, {})
        for plain in self._stored.pop(kind.__name__, ()):
            found[from_plain(kind, plain, f"ledger, '{kind.__name__}'", SecurityError)] = None
        return found.keys()

    def is_used(self, decision: PlanDecision) -> bool:
        """Return whether the approval of a plan was used, for its one run."""
        return decision.use in self.records(UsedApproval)

    @property
    def n_records(self) -> int:
        """Number of all records of answers."""
        return sum(map(len, (*self._records.values(), *self._stored.values())))

    def remember(self, *records: AnswerRecord) -> None:
        """Keep records of an answer that are not there."""
        for record in records:
            if record in self.records(type(record)):
                continue
            self._records[type(record)][record] = None
            if self._provisional is None:
                self.keep(record.line)
            else:
                self._provisional.append(record)

    def restore_record(self, kind: str, plain: Mapping[str, Any]) -> None:
        """Take a record from the stored ledger."""
        self._stored.setdefault(kind, []).append(plain)

    @contextmanager
    def provisionally(self) -> Iterator[None]:
        """Keep records that are made inside only if no error ends it: a refusal has released nothing."""
        provisional: list[AnswerRecord] = []
        self._provisional = provisional
        try:
            yield
        except BaseException:
            for record in provisional:
                del self._records[type(record)][record]
            raise
        finally:
            self._provisional = None
        self.keep(*(record.line for record in provisional))

    def record_policy(self, rules: str) -> None:
        """Keep the rules that hold from now on, if they are others than before."""
        if not self.policies or self.policies[-1].rules != rules:
            self.policies.append(PolicyRecord(time.time_ns(), rules))
            self.keep(to_plain(self.policies[-1]))

    def propose(self, proposal: PlanProposal) -> None:
        """Keep that a plan was proposed."""
        self.proposals[proposal.plan] = proposal
        self.keep(to_plain(proposal))

    def decide(self, decision: PlanDecision) -> None:
        """Keep what the owner decided about a plan."""
        self.decisions[decision.plan] = decision
        self.keep(to_plain(decision))

    def keep_charges(self, charges: Sequence[Charge]) -> None:
        """Keep charges to the privacy budget, before anything of them leaves."""
        self.keep(*map(to_plain, charges))

    def keep_release(self, question: str, run: str, part: str, array: Array) -> None:
        """Keep a noisy array of integers before it leaves, so that its request can be repeated."""
        self.kept.setdefault(question, {}).setdefault(run, {})[part] = array
        content = base64.b64encode(np.asarray(array, dtype="<i8").tobytes()).decode()
        self.keep(
            {"kept": question, "run": run, "part": part, "shape": list(array.shape), "content": content}
        )

    def restore_release(self, line: Mapping[str, Any]) -> None:
        """Restore what :meth:`keep_release` has kept; some error if the line is not one of its lines."""
        content = np.frombuffer(base64.b64decode(line["content"], validate=True), dtype="<i8")
        array = content.astype(np.int64).reshape(line["shape"])
        self.kept.setdefault(line["kept"], {}).setdefault(line["run"], {})[line["part"]] = array

    def count_refusal(self, client: str) -> None:
        """Count a refusal that depended on rows."""
        self.set_refusals(client, self.refusals[client] + 1)

    def set_refusals(self, client: str, count: int) -> None:
        """Keep how many refusals an analyst has had; none if the owner lets it go on."""
        self.refusals[client] = count
        self.keep({"client": client, "refused": count})

    def keep_answered(self, arrays: Mapping[str, Array], n_rows: int) -> None:
        """Store the groups of rows behind earlier replies, with the number of rows, beyond this process."""
        if self.store is not None:
            self.store.answered(arrays, n_rows)

    def check_undisputed(self, site: str) -> None:
        """Refuse to continue with an incomplete ledger, with a SecurityError."""
        if self.disputed:
            raise SecurityError(
                f"{site}: {self.disputed}; nothing is answered until its owner has declared the loss"
            )

    def verify_checkpoint(self, site: str, keys: PublicIdentity, earlier: SignedCheckpoint) -> None:
        """Compare the account with a head that the site signed earlier.

        SecurityError if the head does not belong to this site; and if the ledger does not contain it, from
        then on. Heads from before a declared loss are not required.
        """
        if self.store is None:
            return
        if not earlier.is_of(keys):
            raise SecurityError(
                f"{site}: the head of its ledger that was presented does not have its signature"
            )
        if earlier.time > max(self.store.head.lost, default=-1) and not self.store.holds(earlier):
            self.disputed = (
                f"its ledger does not contain its signed state of {utc_text(earlier.time)}: the files in "
                "its folder were reset to an earlier state, and its later replies are not known"
            )
            self.keep({"disputed": self.disputed})
        self.check_undisputed(site)
