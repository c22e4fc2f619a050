"""What passed, entered twice: by the coordinator as it carried it, and by each site in a chain of its own.

A site's chain is ::

    d_0 = SHA-256(site, digest of its public keys, session, its place among the site's sessions, head before)
    d_i = SHA-256(d_{i-1}, canonical JSON of entry i)

so that the last digest, the head, stands for every entry, for their order, and for the session that the site
opened before this one. Each entry commits to the content of its array by ::

    HMAC-SHA-256(k_i, SHA-256(array)),    k_i = HMAC-SHA-256(secret of the session, i)

The bare digest of a flag, a count or a column of zeros and ones could be found by trying all candidates;
without k_i, which stays at the site, the commitment tells nothing. By giving away the one key k_i the site
can prove later what array i was, and discloses no other.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from fedstat.federation.account.released import SHARE, counted, distinct_numbers
from fedstat.federation.crypto.keys import PublicIdentity, encode
from fedstat.federation.message import Ask, Declared, Reply, Step
from fedstat.typing import Array

COORDINATOR = "coordinator"
REFUSAL = "refusal"
LONGEST_NAME = 80
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_RULE = re.compile(r"its policy \(([a-z ]{1,60})\)")


class Passed(NamedTuple):
    """One array, text or refusal, as both sides saw it.

    Attributes
    ----------
    round : int
        Which of the asks to this site in this session, from 1.
    sender, receiver : str
        The institution and ``"coordinator"``, or the reverse.
    family, step, array : str
        The question, and the array's name in it; "text" for a text, empty for a refusal.
    kind : str
        See :data:`fedstat.federation.message.Kind`; "refusal" where the site did not answer.
    masked : bool
    shape : tuple of int
        Of what the masks hide where they do.
    bytes, entities : int
    rule : str
        Of a refusal: the class of the error, and the rule of the policy where it names one.
    """

    round: int
    sender: str
    receiver: str
    family: str
    step: str
    array: str
    kind: str
    masked: bool
    shape: tuple[int, ...]
    bytes: int
    entities: int
    rule: str


class Link(NamedTuple):
    """One entry of a site's chain: :class:`Passed`, and what the site alone knows.

    Attributes
    ----------
    time : str
        UTC, to the second.
    numbers : int
        Distinct numbers that are functions of data, of those that count as equations; see
        :mod:`fedstat.federation.account.released`.
    among : int
        Over how many sites they are sums.
    commitment : str
        To the content; empty for a refusal.
    """

    passed: Passed
    time: str
    numbers: int
    among: int
    commitment: str


def canonical(value: Any) -> str:
    """Write JSON in the one form that is hashed and signed."""
    return _CANONICAL.encode(value)


def link_row(link: Link) -> list[Any]:
    """Flatten an entry, in the order of its fields."""
    return [*link.passed, *link[1:]]


def genesis(site: str, keys: PublicIdentity, session: str, ordinal: int, previous: str) -> bytes:
    """Digest before the first entry."""
    parts = ("fedstat chain 1", site, keys.digest, session, str(ordinal), previous)
    return hashlib.sha256(encode(*parts)).digest()


def extend(digest: bytes, link: Link) -> bytes:
    """Digest after one more entry."""
    return hashlib.sha256(digest + canonical(link_row(link)).encode()).digest()


def content_digest(content: Array | str) -> bytes:
    """SHA-256 of type, shape and numbers, or of a text; memory is read once and not copied."""
    if isinstance(content, str):
        return hashlib.sha256(encode("text", content)).digest()
    array = np.ascontiguousarray(content)
    digest = hashlib.sha256(encode(array.dtype.str, str(np.shape(content))))
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.digest()


def commitment(key: bytes, content: Array | str) -> str:
    """Commit to a content under the key of an entry; who has both can check the entry."""
    return hmac.digest(key, content_digest(content), "sha256").hex()


def rule_of(error: Exception) -> str:
    """Name the class of a refusal, and the rule of the policy where the error names one; never its values."""
    rule = _RULE.search(str(error))
    return type(error).__name__ + (f" ({rule[1]})" if rule else "")


def asked(ask: Ask, step: Step, number: int) -> Iterator[tuple[Passed, Array | str]]:
    """Entries of an ask's arrays and text, in the order of their declaration."""
    head = (number, COORDINATOR, ask.site, ask.family, ask.step)
    for name, line in step.takes.items():
        if name in ask.arrays:
            array = ask.arrays[name]
            yield Passed(*head, name, line.kind, False, array.shape, array.nbytes, 0, ""), array
    yield from _text(head, ask.text, step.text_in)


def answered(ask: Ask, step: Step, reply: Reply, number: int) -> Iterator[tuple[Passed, Array | str]]:
    """Entries of a reply's arrays, as they travel, and text."""
    head = (number, ask.site, COORDINATOR, ask.family, ask.step)
    for name, line in step.gives.items():
        if name in reply.arrays:
            array, hidden = reply.arrays[name], line.maskable and ask.masked is not None
            shape = array.shape[1:] if hidden else array.shape
            yield Passed(*head, name, line.kind, hidden, shape, array.nbytes, reply.entities, ""), array
    yield from _text(head, reply.text, step.text_out)


def refused(ask: Ask, error: Exception, number: int) -> Passed:
    """Entry of a refusal: the question and the rule."""
    family, step = ask.family[:LONGEST_NAME], ask.step[:LONGEST_NAME]
    return Passed(number, ask.site, COORDINATOR, family, step, "", REFUSAL, False, (), 0, 0, rule_of(error))


def _text(
    head: tuple[int, str, str, str, str], text: str, line: Declared | None
) -> Iterator[tuple[Passed, Array | str]]:
    if text and line is not None:
        yield Passed(*head, "text", line.kind, False, (), len(text.encode()), 0, ""), text


class Account:
    """The coordinator's own entries of all that it carried in one session.

    The ledgers of all runs of one model share it: a copy of it is the same account.
    """

    def __init__(self) -> None:
        self._passed: list[Passed] = []
        self._rounds: Counter[str] = Counter()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    def passed(self) -> tuple[Passed, ...]:
        """All entries so far."""
        return tuple(self._passed)

    def ask(self, ask: Ask, step: Step | None) -> None:
        """Enter a question; a step that is not installed has nothing to enter."""
        self._rounds[ask.site] += 1
        if step is not None:
            self._passed += [entry for entry, _ in asked(ask, step, self._rounds[ask.site])]

    def reply(self, ask: Ask, step: Step, reply: Reply) -> None:
        """Enter its answer."""
        self._passed += [entry for entry, _ in answered(ask, step, reply, self._rounds[ask.site])]

    def refusal(self, ask: Ask, error: Exception) -> None:
        """Enter that there is none, and why."""
        self._passed.append(refused(ask, error, self._rounds[ask.site]))


class Store(Protocol):
    """Where a site's entries outlive its process."""

    def opened(self, chain: Chain) -> None:
        """Keep that a session was opened."""
        ...

    def entered(self, chain: Chain, links: Sequence[tuple[Link, str]]) -> None:
        """Keep new entries, each with the mark of its content, before anything leaves."""
        ...

    def noted(self, columns: set[str], entities: int) -> None:
        """Keep which columns were in play, and behind how many entities."""
        ...

    def answered(self, bitmaps: Sequence[Array]) -> None:
        """Keep the rows behind earlier answers; see :mod:`fedstat.federation.door.guards`."""
        ...


class Chain:
    """One site's entries of one session.

    Parameters
    ----------
    site : str
    keys : PublicIdentity
        The site's.
    session : str
    ordinal : int
        Place of the session among those that this site opened, from 1.
    previous : str
        Head of the session opened before, as it was when this one was opened; empty for the first.
    books : Books
        Those that the chain belongs to.

    Attributes
    ----------
    resumed : bool
        Whether its first entries were made before the site was started again.
    """

    def __init__(
        self, site: str, keys: PublicIdentity, session: str, ordinal: int, previous: str, books: Books
    ) -> None:
        self.site, self.session, self.ordinal, self.previous = site, session, ordinal, previous
        self.links: list[Link] = []
        self.round = 0
        self.released: Counter[int] = Counter()
        self.received = 0
        self.resumed = False
        self._books = books
        self._secret = hmac.digest(books.secret, encode("session", str(ordinal), session), "sha256")
        self._digests = [genesis(site, keys, session, ordinal, previous)]
        self._new: list[tuple[Link, str]] = []
        self._before = 0
        self._time = ""

    @property
    def head(self) -> str:
        """Digest of the newest entry."""
        return self._digests[-1].hex()

    def before_this_ask(self) -> tuple[list[Link], str]:
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

    def ask(self, ask: Ask, step: Step) -> None:
        """Enter what came in."""
        for entry, content in asked(ask, step, self.round):
            self._add(entry, content, content, 1)
        self._keep()

    def reply(self, ask: Ask, step: Step, reply: Reply, clear: Mapping[str, Array], n_sites: int) -> None:
        """Enter what leaves; `clear` are the arrays before they were masked, for a sum over `n_sites`."""
        for entry, content in answered(ask, step, reply, self.round):
            among = n_sites if entry.masked else 2 if entry.kind == SHARE else 1
            self._add(entry, content, clear.get(entry.array, content), among)
        self._keep()

    def refusal(self, ask: Ask, error: Exception) -> None:
        """Enter that nothing left, and the rule."""
        self._append(Link(refused(ask, error, self.round), self._time, 0, 1, ""), "")
        self._keep()

    def restore(self, link: Link, mark: str) -> None:
        """Take back an entry that was kept."""
        self.resumed, self.round = True, max(self.round, link.passed.round)
        self._count(link)
        if mark:
            self._books.seen.add(mark)
        self.links.append(link)
        self._digests.append(extend(self._digests[-1], link))

    def _add(self, entry: Passed, content: Array | str, clear: Array | str, among: int) -> None:
        digest = content_digest(content)
        numbers, mark = 0, ""
        if not isinstance(clear, str) and counted(entry.kind, entry.receiver == COORDINATOR):
            mark = hmac.digest(self._books.secret, encode("seen", digest), "sha256").hex()
            numbers = 0 if mark in self._books.seen else distinct_numbers(clear)
            self._books.seen.add(mark)
        sealed = hmac.digest(self.entry_key(len(self.links)), digest, "sha256").hex()
        link = Link(entry, self._time, numbers, among, sealed)
        self._count(link)
        self._append(link, mark)

    def _count(self, link: Link) -> None:
        if link.passed.receiver == COORDINATOR:
            self.released[link.among] += link.numbers
        else:
            self.received += link.numbers

    def _append(self, link: Link, mark: str) -> None:
        self.links.append(link)
        self._digests.append(extend(self._digests[-1], link))
        self._new.append((link, mark))

    def _keep(self) -> None:
        if self._books.store is not None and self._new:
            self._books.store.entered(self, self._new)
        self._new = []


class Books:
    """All chains of one site, and which of its columns were in play.

    Parameters
    ----------
    secret : bytes, optional
        Of the site: the keys of all commitments are drawn from it. Drawn anew when not given.

    Attributes
    ----------
    seen : set of str
        Marks of all that the site has released or received: a repetition tells nothing new. A mark is the
        keyed digest of a content, and tells nothing without the secret.
    store : Store or None
        Where entries are kept; nowhere by default.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self.secret = secrets.token_bytes(32) if secret is None else secret
        self.seen: set[str] = set()
        self.store: Store | None = None
        self.columns: set[str] = set()
        self.entities = 0
        self._chains: dict[str, Chain] = {}
        self._present = ""

    @property
    def chains(self) -> tuple[Chain, ...]:
        """All chains, in the order in which their sessions were opened."""
        return tuple(self._chains.values())

    @property
    def present(self) -> Chain:
        """Chain of the ask that is being answered."""
        return self._chains[self._present]

    @property
    def others(self) -> list[Chain]:
        """Chains of all other sessions."""
        return [chain for name, chain in self._chains.items() if name != self._present]

    def chain(self, site: str, keys: PublicIdentity, session: str) -> Chain:
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

    def open(self, site: str, keys: PublicIdentity, session: str) -> Chain:
        """Open the chain of a new session, after the head of the one that was opened last."""
        last = next(reversed(self._chains.values()), None)
        previous = "" if last is None else last.head
        chain = Chain(site, keys, session, len(self._chains) + 1, previous, self)
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

    def keep_answered(self, bitmaps: Sequence[Array]) -> None:
        """Keep the rows behind earlier answers beyond the life of the process."""
        if self.store is not None:
            self.store.answered(bitmaps)
