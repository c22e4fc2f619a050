"""The event log: entries of a ledger, their links in a chain of digests, and a site's chain per session."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias, get_origin, get_type_hints

import numpy as np

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
# One event: an array or a text that passed an institution's door, or a refusal.
#
# It is entered once, where it passes; ledgers, chains, receipts and their counts are made of these entries.

COORDINATOR = "coordinator"
REFUSAL = "refusal"
TEXT = "text"
MAX_NAME_LENGTH = 80
SIGNED_FIELDS = (
    "round", "sender", "receiver", "family", "step", "array",
    "kind", "masked", "shape", "bytes", "entities", "rule",
)  # fmt: skip
"""Fields that are hashed and signed, in this order: all but the meaning, which goes with step and array."""
_signed = attrgetter(*SIGNED_FIELDS)


@dataclass(frozen=True, slots=True)
class AbsentSite:
    """A site that was asked in vain while a fit ran, which was then begun anew.

    Parameters
    ----------
    site : str
    round : int
        Of the ledger, from 1.
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
        what = "was started again in round {}, and takes part in the fit that was begun anew"
        if not self.back:
            what = "was lost in round {}, and its rows are not in the fit"
        return f"'{self.site}' {what.format(self.round)}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One array or text that passed, or a refusal.

    `round`, from 1, is in a ledger the round trip of the run, in an account which of the asks to this site in
    this session. `sender` and `receiver` are institutions or ``"coordinator"``. `array` is ``"text"`` for a
    text and empty for a refusal, whose kind is ``"refusal"`` and whose `rule` is the class of the error and
    the rule of the policy; `what` is the array in words. `shape` is that of what masks hide where they do
    (`masked`: the receiver learned only the sum over institutions), `bytes` the size as it travels,
    `entities` how many stand behind the array at the sending institution.
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

    @property
    def left(self) -> bool:
        """Whether something left a site."""
        return self.receiver == COORDINATOR and self.kind != REFUSAL

    @property
    def signed(self) -> list[Any]:
        """Values of :data:`SIGNED_FIELDS`."""
        return list(_signed(self))

    def in_round(self, number: int) -> Entry:
        """Return the same entry under another number."""
        return self if number == self.round else Entry(number, *_fields_after_round(self))


_fields_after_round = attrgetter(*[part.name for part in fields(Entry)][1:])

Content: TypeAlias = Array | str
RecordedContent: TypeAlias = Iterator[tuple[Entry, Content]]
"""Entries, each with what it is of."""


def request_entries(ask: Request, step: Step, number: int) -> RecordedContent:
    """Entries of an ask's arrays and text, in the order of their declaration."""
    way = number, COORDINATOR, ask.site
    for name, line in step.takes.items():
        # A door enters an ask before it refuses one with arrays that the step does not take.
        if name in ask.arrays:
            yield _entry(way, ask, name, line, ask.arrays[name])
    if ask.text and step.text_in is not None:
        yield _entry(way, ask, TEXT, step.text_in, ask.text)


def reply_entries(ask: Request, step: Step, reply: Reply, number: int) -> RecordedContent:
    """Entries of a reply's arrays, as they travel, and text; an array that is not declared is a KeyError."""
    way = number, ask.site, COORDINATOR
    places = {name: place for place, name in enumerate(step.gives)}
    for name in sorted(reply.arrays, key=places.__getitem__):
        line = step.gives[name]
        hidden = line.maskable and ask.masked is not None
        yield _entry(way, ask, name, line, reply.arrays[name], reply.entities, hidden)
    if reply.text and step.text_out is not None:
        yield _entry(way, ask, TEXT, step.text_out, reply.text)


def _entry(
    way: tuple[int, str, str],
    ask: Request,
    name: str,
    line: ArrayDeclaration,
    content: Content,
    entities: int = 0,
    hidden: bool = False,
) -> tuple[Entry, Content]:
    if isinstance(content, str):
        shape, size = (), len(content.encode())
    else:
        # What is hidden travels as several words a number: its first axis is no part of its shape.
        shape, size = content.shape[1:] if hidden else content.shape, content.nbytes
    entry = Entry(
        *way,
        step=ask.step,
        array=name,
        kind=line.kind,
        what=line.what,
        shape=shape,
        bytes=size,
        entities=entities,
        masked=hidden,
        family=ask.family,
    )
    return entry, content


def refusal_entry(ask: Request, error: Exception, number: int) -> Entry:
    """Entry of a refusal: the question and the rule."""
    family, step = ask.family[:MAX_NAME_LENGTH], ask.step[:MAX_NAME_LENGTH]
    return Entry(number, ask.site, COORDINATOR, step, "", REFUSAL, family=family, rule=refusal_reason(error))


def refusal_reason(error: Exception) -> str:
    """Name the class of a refusal, and the rule of the policy that refused; never values."""
    rule = error.rule if isinstance(error, PolicyError) else ""
    return type(error).__name__ + (f" ({rule})" if rule else "")


def read_entry(row: Sequence[Any]) -> Entry:
    """Rebuild an entry from its signed values as JSON has them; TypeError or ValueError where it is none."""
    values = typed_values(Entry, SIGNED_FIELDS, row)
    shape = values["shape"] = tuple(values["shape"])
    if any(type(length) is not int for length in shape):
        raise TypeError("shape")
    if min(values["round"], values["bytes"], values["entities"], *shape) < 0:
        raise ValueError("a negative number")
    return Entry(**values)


def typed_values(kind: Any, names: tuple[str, ...], row: Sequence[Any]) -> dict[str, Any]:
    """Name the values of a row, which have to be of the very types of these fields of a record.

    A receipt has thousands of rows, for which :mod:`fedstat.codec` is too slow.
    """
    if tuple(map(type, row)) != _types_in_json(kind, names):
        raise TypeError(f"the types of {', '.join(names)}")
    return dict(zip(names, row, strict=True))


@cache
def _types_in_json(kind: Any, names: tuple[str, ...]) -> tuple[type, ...]:
    hints = get_type_hints(kind)
    return tuple(list if get_origin(hints[name]) is tuple else hints[name] for name in names)


# ----------------------------------------------------------------------------------------------------
# The links of a site's chain: an entry with what the site alone knows of it, and the digests over them.

SITE_FIELDS = ("time", "numbers", "among", "commitment")
LINK_FIELDS = (*SIGNED_FIELDS, *SITE_FIELDS)
"""Fields of a link that are hashed, in this order."""
CHARGED_FIELD = "charged"
_CANONICAL_ENCODER = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One entry of a site's chain, and what the site alone knows of it.

    `time` is UTC to the second. `numbers` are the distinct numbers that count as equations (see
    :mod:`fedstat.federation.audit.release_counts`), sums over `among` sites. `commitment` is to the content,
    and
    empty for a refusal. `charged` is what the site charged its privacy budget for the entry, as a fraction;
    it is signed where there is such a charge, and is empty for all else.
    """

    entry: Entry
    time: str
    numbers: int
    among: int
    commitment: str
    charged: str = ""

    @property
    def signed(self) -> list[Any]:
        """Values of :data:`LINK_FIELDS`, and of a charge where there is one: the next digest is of them."""
        known = self.time, self.numbers, self.among, self.commitment
        return [*self.entry.signed, *known, *([self.charged] if self.charged else [])]

    @property
    def named(self) -> dict[str, Any]:
        """Values by the name of their field."""
        return dict(zip((*LINK_FIELDS, CHARGED_FIELD), [*self.signed, ""], strict=False))


def read_link(row: Sequence[Any]) -> ChainLink:
    """Rebuild a link from its signed values; see :func:`fedstat.federation.audit.event_log.read_entry`."""
    place, end = len(SIGNED_FIELDS), len(LINK_FIELDS)
    known = SITE_FIELDS + ((CHARGED_FIELD,) if len(row) > end else ())
    link = ChainLink(read_entry(row[:place]), **typed_values(ChainLink, known, row[place:]))
    if link.numbers < 0 or link.among < 1:
        raise ValueError("a negative number")
    if len(row) > end and not RHO_PATTERN.fullmatch(link.charged):
        raise ValueError("a charge that is none")
    return link


def canonical_json(value: Any) -> str:
    """Write JSON in the one form that is hashed and signed."""
    return _CANONICAL_ENCODER.encode(value)


def genesis_digest(site: str, keys: PublicIdentity, session: str, ordinal: int, previous: str) -> bytes:
    """Digest before the first entry."""
    parts = ("fedstat chain 1", site, keys.digest, session, str(ordinal), previous)
    return hashlib.sha256(encode_parts(*parts)).digest()


def extended_digest(digest: bytes, link: ChainLink) -> bytes:
    """Digest after one more entry."""
    return hashlib.sha256(digest + canonical_json(link.signed).encode()).digest()


def content_digest(content: Content) -> bytes:
    """SHA-256 of type, shape and numbers, or of a text; memory is read once and not copied."""
    if isinstance(content, str):
        return hashlib.sha256(encode_parts("text", content)).digest()
    array = np.ascontiguousarray(content)
    digest = hashlib.sha256(encode_parts(array.dtype.str, str(np.shape(content))))
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.digest()


@dataclass(slots=True)
class NumbersReleased:
    """Numbers that left, by how many sites they are sums over, and those that came in."""

    released: Counter[int] = field(default_factory=Counter)
    received: int = 0

    def add(self, links: Iterable[ChainLink]) -> NumbersReleased:
        """Count some more links."""
        for link in links:
            if link.entry.receiver != COORDINATOR:
                self.received += link.numbers
            elif link.numbers:
                self.released[link.among] += link.numbers
        return self

    def merge(self, other: NumbersReleased) -> None:
        """Add the numbers of another session."""
        self.released.update(other.released)
        self.received += other.received


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
    def name(self) -> str:
        """The name under which a consent is spent."""
        return f"plan {self.plan}, {self.when}"

    def __str__(self) -> str:
        return f"{self.verdict} by {self.who} on {utc_text(self.when)}: plan {self.plan}"


# ----------------------------------------------------------------------------------------------------
# A site's own account of what passed, in one chain of digests per session.
#
# What passes is entered twice: by the coordinator as it carried it, and here. A site's chain is ::
#
#     d_0 = SHA-256(site, digest of its public keys, session, its place among the site's sessions, head
# before)     d_i = SHA-256(d_{i-1}, canonical JSON of entry i)
#
# so that the last digest, the head, stands for every entry, for their order, and for the session that the
# site opened before this one. Each entry commits to the content of its array by ::
#
#     HMAC-SHA-256(k_i, SHA-256(array)),    k_i = HMAC-SHA-256(secret of the session, i)
#
# The bare digest of a flag, a count or a column of zeros and ones could be found by trying all candidates;
# without k_i, which stays at the site, the commitment tells nothing. By giving away the one key k_i the
# site can prove later what array i was, and discloses no other.


class ChainStore(Protocol):
    """Where a site's chains outlive its process."""

    @property
    def broken(self) -> str:
        """Why nothing can be kept any more; empty where it can."""
        ...

    def close(self) -> None:
        """Let another process write."""
        ...

    def opened(self, chain: SessionChain) -> None:
        """Keep that a session was opened."""
        ...

    def entered(self, chain: SessionChain, links: Sequence[tuple[ChainLink, str]]) -> None:
        """Keep new links, each with the mark of its content, before anything leaves."""
        ...

    def noted(self, columns: set[str], entities: int) -> None:
        """Keep which columns were in play, and behind how many entities."""
        ...

    def spent(self, once: str) -> None:
        """Keep that something was answered that is answered once."""
        ...

    def refused(self, asker: str, count: int) -> None:
        """Keep how many refusals one who asks has had."""
        ...

    def decided(self, decision: PlanDecision) -> None:
        """Keep what the owner decided about a plan."""
        ...

    def charged(self, charges: Sequence[Charge]) -> None:
        """Keep charges to the privacy budget, before anything of them leaves."""
        ...

    def answered(self, arrays: Mapping[str, Array], n_rows: int) -> None:
        """Keep the rows behind earlier answers; see :mod:`fedstat.federation.disclosure.row_checks`."""
        ...

    def disputed(self, why: str) -> None:
        """Keep that the account was found not to be whole."""
        ...

    def holds(self, head: SignedCheckpoint) -> bool:
        """Whether what is kept had this head."""
        ...

    @property
    def head(self) -> SignedCheckpoint:
        """The newest."""
        ...


class SessionChain:
    """One site's entries of one session, which is number `ordinal`, from 1, of those that the site opened.

    `previous` is the head of the session opened before, as it was then; empty for the first. A chain is
    `resumed` where its first entries were made before the site was started again. The records that it is
    about were read at the time `as_of`, empty where they are read for every answer.
    """

    def __init__(
        self,
        site: str,
        keys: PublicIdentity,
        session: str,
        ordinal: int,
        previous: str,
        account: SiteLedger,
    ) -> None:
        self.site, self.session, self.ordinal, self.previous = site, session, ordinal, previous
        self.as_of = account.as_of if session else ""
        self.links: list[ChainLink] = []
        self.round = 0
        self.numbers = NumbersReleased()
        self.vectors = 0
        self.resumed = False
        self._account = account
        self._waiting: list[tuple[ChainLink, str]] = []
        self._secret = hmac.digest(account.secret, encode_parts("session", str(ordinal), session), "sha256")
        self._digests = [genesis_digest(site, keys, session, ordinal, previous)]
        # A statement is on what passed before it was asked for: its own question is not in it yet.
        self._before = 0
        self._time = ""

    @property
    def head(self) -> str:
        """Digest of the newest entry."""
        return self._digests[-1].hex()

    def before_this_ask(self) -> tuple[list[ChainLink], str]:
        """Entries and head as they were before the present ask."""
        return self.links[: self._before], self._digests[self._before].hex()

    def entry_key(self, number: int) -> bytes:
        """Key of the commitment of an entry, counted from 0; giving it away discloses this entry only."""
        return hmac.digest(self._secret, number.to_bytes(8, "little"), "sha256")

    def begin(self) -> None:
        """Start the entries of a new ask."""
        self.round += 1
        self._before = len(self.links)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        # A clock that was set back does not run the account backwards.
        self._time = max(now, self.links[-1].time) if self.links else now

    def ask(self, ask: Request, step: Step) -> None:
        """Enter what came in, which is written with what becomes of it.

        A site that is killed in between has answered nothing, and can be asked the same again.
        """
        self._waiting += self._linked_all(request_entries(ask, step, self.round), {}, 1)

    def reply(
        self,
        ask: Request,
        step: Step,
        reply: Reply,
        clear: Mapping[str, Array],
        n_sites: int,
        costs: Mapping[str, str],
    ) -> list[Entry]:
        """Enter what leaves, and what it was charged.

        `clear` are the arrays before they were masked, for a sum over `n_sites`.
        """
        new = self._linked_all(reply_entries(ask, step, reply, self.round), clear, n_sites, costs)
        self._keep(new)
        return [link.entry for link, _ in new]

    def refusal(self, ask: Request, error: Exception) -> None:
        """Enter that nothing left, and the rule."""
        link = ChainLink(refusal_entry(ask, error, self.round), self._time, 0, 1, "")
        self._append(link, "")
        self._keep([(link, "")])

    def restore(self, link: ChainLink, mark: str) -> None:
        """Take back an entry that was kept."""
        self.resumed, self.round = True, max(self.round, link.entry.round)
        self._append(link, mark)

    def _linked_all(
        self,
        entered: RecordedContent,
        clear: Mapping[str, Array],
        n_sites: int,
        costs: Mapping[str, str] = MappingProxyType({}),
    ) -> list[tuple[ChainLink, str]]:
        """Enter what passes, which is still to be kept."""
        new = []
        for entry, content in entered:
            link, mark = self._linked(entry, content, clear.get(entry.array, content), n_sites)
            if entry.array in costs:
                link = replace(link, charged=costs[entry.array])
            self._append(link, mark)
            new.append((link, mark))
        return new

    def _linked(self, entry: Entry, content: Content, clear: Content, n_sites: int) -> tuple[ChainLink, str]:
        """Count what is new in a content and commit to it; with the mark by which it is known again."""
        digest, outward = content_digest(content), entry.receiver == COORDINATOR
        numbers, mark = 0, ""
        # The mark is of what travels, so that a repetition under new masks counts again; the numbers are
        # those before masks, which take several words for each.
        if not isinstance(clear, str) and counts_as_equation(entry.kind, outward):
            mark = hmac.digest(self._account.secret, encode_parts("seen", digest), "sha256").hex()
            numbers = 0 if mark in self._account.seen else distinct_numbers(clear)
        sealed = hmac.digest(self.entry_key(len(self.links)), digest, "sha256").hex()
        among = n_sites if entry.masked else 2 if outward and entry.kind == MASKED_SHARE else 1
        return ChainLink(entry, self._time, numbers, among, sealed), mark

    def _append(self, link: ChainLink, mark: str) -> None:
        if mark:
            self._account.seen.add(mark)
        self.numbers.add([link])
        # What has left before tells nothing new.
        out = link.entry.receiver == COORDINATOR and link.entry.kind == "per entity"
        self.vectors += numbers_per_entity(link.entry.shape) if out and link.numbers else 0
        self.links.append(link)
        self._digests.append(extended_digest(self._digests[-1], link))

    def _keep(self, new: Sequence[tuple[ChainLink, str]]) -> None:
        new, self._waiting = [*self._waiting, *new], []
        if self._account.store is not None and new:
            self._account.store.entered(self, new)


class SiteLedger:
    """All chains of one site, and which of its columns were in play.

    The keys of all commitments are drawn from `secret`. `seen` holds the marks of all that the site has
    released or received: a repetition tells nothing new. A mark is the keyed digest of a content, and tells
    nothing without the secret. `columns` were in play in any session; `entities` are the most behind an
    answer; `refusals` counts those that depended on rows, by who asked; `spent` names what was answered and
    is answered once; `decisions` are the owner's newest about plans, by digest; `charges` are all to its
    privacy budget. `disputed` says why the
    account is not whole, `losses` are the times at which its owner declared that the one before was lost,
    with the reasons. The records were read at the time `as_of`. `recalled` are the rows behind answers of an
    earlier process.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self.secret = secrets.token_bytes(32) if secret is None else secret
        self.seen: set[str] = set()
        self.store: ChainStore | None = None
        self.columns: set[str] = set()
        self.entities = 0
        self.refusals: Counter[str] = Counter()
        self.spent: set[str] = set()
        self.decisions: dict[str, PlanDecision] = {}
        self.charges = Charges()
        self.disputed = ""
        self.as_of = ""
        self.losses: list[tuple[str, str]] = []
        self.recalled: dict[str, Array] = {}
        self._chains: dict[str, SessionChain] = {}
        self._present = ""

    @property
    def chains(self) -> tuple[SessionChain, ...]:
        """All chains, in the order in which their sessions were opened."""
        return tuple(self._chains.values())

    @property
    def vectors(self) -> int:
        """How many numbers for each entity have left, of all sessions."""
        return sum(chain.vectors for chain in self._chains.values())

    @property
    def present(self) -> SessionChain:
        """Chain of the ask that is being answered."""
        return self._chains[self._present]

    @property
    def others(self) -> list[SessionChain]:
        """Chains of all other sessions."""
        return [chain for name, chain in self._chains.items() if name != self._present]

    def chain(self, site: str, keys: PublicIdentity, session: str) -> SessionChain:
        """Chain of a session for the next ask, opened where there is none."""
        if session not in self._chains:
            chain = self.open(site, keys, session)
            if self.store is not None:
                self.store.opened(chain)
        self._present = session
        return self._chains[session]

    def rounds(self, session: str) -> int:
        """Count the questions that were entered in a session."""
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

    def note(self, columns: set[str], entities: int) -> None:
        """Note what an answer rested on."""
        if columns <= self.columns and entities <= self.entities:
            return
        self.columns |= columns
        self.entities = max(self.entities, entities)
        if self.store is not None:
            self.store.noted(self.columns, self.entities)

    def spend(self, once: str) -> None:
        """Keep that something was answered that is answered once."""
        self.spent.add(once)
        if self.store is not None:
            self.store.spent(once)

    def decide(self, decision: PlanDecision) -> None:
        """Keep what the owner decided about a plan."""
        self.decisions[decision.plan] = decision
        if self.store is not None:
            self.store.decided(decision)

    def count_refusal(self, asker: str) -> None:
        """Count a refusal that depended on rows."""
        self.set_refusals(asker, self.refusals[asker] + 1)

    def set_refusals(self, asker: str, count: int) -> None:
        """Keep how many refusals one who asks has had; none, where the owner lets it go on."""
        self.refusals[asker] = count
        if self.store is not None:
            self.store.refused(asker, count)

    def keep_answered(self, arrays: Mapping[str, Array], n_rows: int) -> None:
        """Keep the groups of rows behind earlier answers, of so many rows, beyond the life of the process."""
        if self.store is not None:
            self.store.answered(arrays, n_rows)

    def check_undisputed(self, site: str) -> None:
        """Refuse to go on with an account that was found not to be whole, with a SecurityError."""
        if self.disputed:
            raise SecurityError(
                f"{site}: {self.disputed}; nothing is answered until its owner has declared the loss"
            )

    def hold_against(self, site: str, keys: PublicIdentity, earlier: SignedCheckpoint) -> None:
        """Hold the account against a head that the site signed once.

        SecurityError where it is not of this site; and where the account does not hold it, from then on. What
        was signed before the owner declared a loss is not asked for.
        """
        if self.store is None:
            return
        if not earlier.is_of(keys):
            raise SecurityError(
                f"{site}: the head of its account that it was shown is not one that it signed"
            )
        if earlier.time > max(self.store.head.lost, default=-1) and not self.store.holds(earlier):
            self.disputed = (
                f"its account does not hold what it signed on {utc_text(earlier.time)}: the files in its "
                "folder "
                "were put back to an earlier state, and what it has answered since is not known"
            )
            self.store.disputed(self.disputed)
        self.check_undisputed(site)
