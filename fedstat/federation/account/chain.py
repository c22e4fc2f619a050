"""A site's own account of what passed, in one chain of digests per session.

What passes is entered twice: by the coordinator as it carried it, and here. A site's chain is ::

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

import hmac
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from fedstat.errors import SecurityError
from fedstat.federation.account.charges import Charge, Charges
from fedstat.federation.account.decision import Decision
from fedstat.federation.account.entry import (
    COORDINATOR,
    Content,
    Entered,
    Entry,
    answered,
    asked,
    refused,
)
from fedstat.federation.account.head import AccountHead, told
from fedstat.federation.account.link import ChainLink, NumbersPassed, content_digest, extend, genesis
from fedstat.federation.account.released import SHARE, counted, distinct_numbers, numbers_each
from fedstat.federation.crypto.keys import PublicIdentity, encode
from fedstat.federation.message import Ask, Reply, Step
from fedstat.typing import Array


class ChainStore(Protocol):
    """Where a site's chains outlive its process."""

    @property
    def broken(self) -> str:
        """Why nothing can be kept any more; empty where it can."""
        ...

    def close(self) -> None:
        """Let another process write."""
        ...

    def opened(self, chain: Chain) -> None:
        """Keep that a session was opened."""
        ...

    def entered(self, chain: Chain, links: Sequence[tuple[ChainLink, str]]) -> None:
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

    def decided(self, decision: Decision) -> None:
        """Keep what the owner decided about a plan."""
        ...

    def charged(self, charges: Sequence[Charge]) -> None:
        """Keep charges to the privacy budget, before anything of them leaves."""
        ...

    def answered(self, arrays: Mapping[str, Array], n_rows: int) -> None:
        """Keep the rows behind earlier answers; see :mod:`fedstat.federation.door.guards`."""
        ...

    def disputed(self, why: str) -> None:
        """Keep that the account was found not to be whole."""
        ...

    def holds(self, head: AccountHead) -> bool:
        """Whether what is kept had this head."""
        ...

    @property
    def head(self) -> AccountHead:
        """The newest."""
        ...


class Chain:
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
        account: SiteAccount,
    ) -> None:
        self.site, self.session, self.ordinal, self.previous = site, session, ordinal, previous
        self.as_of = account.as_of if session else ""
        self.links: list[ChainLink] = []
        self.round = 0
        self.numbers = NumbersPassed()
        self.vectors = 0
        self.resumed = False
        self._account = account
        self._waiting: list[tuple[ChainLink, str]] = []
        self._secret = hmac.digest(account.secret, encode("session", str(ordinal), session), "sha256")
        self._digests = [genesis(site, keys, session, ordinal, previous)]
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

    def ask(self, ask: Ask, step: Step) -> None:
        """Enter what came in, which is written with what becomes of it.

        A site that is killed in between has answered nothing, and can be asked the same again.
        """
        self._waiting += self._linked_all(asked(ask, step, self.round), {}, 1)

    def reply(
        self,
        ask: Ask,
        step: Step,
        reply: Reply,
        clear: Mapping[str, Array],
        n_sites: int,
        costs: Mapping[str, str],
    ) -> list[Entry]:
        """Enter what leaves, and what it was charged.

        `clear` are the arrays before they were masked, for a sum over `n_sites`.
        """
        new = self._linked_all(answered(ask, step, reply, self.round), clear, n_sites, costs)
        self._keep(new)
        return [link.entry for link, _ in new]

    def refusal(self, ask: Ask, error: Exception) -> None:
        """Enter that nothing left, and the rule."""
        link = ChainLink(refused(ask, error, self.round), self._time, 0, 1, "")
        self._append(link, "")
        self._keep([(link, "")])

    def restore(self, link: ChainLink, mark: str) -> None:
        """Take back an entry that was kept."""
        self.resumed, self.round = True, max(self.round, link.entry.round)
        self._append(link, mark)

    def _linked_all(
        self,
        entered: Entered,
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
        if not isinstance(clear, str) and counted(entry.kind, outward):
            mark = hmac.digest(self._account.secret, encode("seen", digest), "sha256").hex()
            numbers = 0 if mark in self._account.seen else distinct_numbers(clear)
        sealed = hmac.digest(self.entry_key(len(self.links)), digest, "sha256").hex()
        among = n_sites if entry.masked else 2 if outward and entry.kind == SHARE else 1
        return ChainLink(entry, self._time, numbers, among, sealed), mark

    def _append(self, link: ChainLink, mark: str) -> None:
        if mark:
            self._account.seen.add(mark)
        self.numbers.add([link])
        # What has left before tells nothing new.
        out = link.entry.receiver == COORDINATOR and link.entry.kind == "per entity"
        self.vectors += numbers_each(link.entry.shape) if out and link.numbers else 0
        self.links.append(link)
        self._digests.append(extend(self._digests[-1], link))

    def _keep(self, new: Sequence[tuple[ChainLink, str]]) -> None:
        new, self._waiting = [*self._waiting, *new], []
        if self._account.store is not None and new:
            self._account.store.entered(self, new)


class SiteAccount:
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
        self.decisions: dict[str, Decision] = {}
        self.charges = Charges()
        self.disputed = ""
        self.as_of = ""
        self.losses: list[tuple[str, str]] = []
        self.recalled: dict[str, Array] = {}
        self._chains: dict[str, Chain] = {}
        self._present = ""

    @property
    def chains(self) -> tuple[Chain, ...]:
        """All chains, in the order in which their sessions were opened."""
        return tuple(self._chains.values())

    @property
    def vectors(self) -> int:
        """How many numbers for each entity have left, of all sessions."""
        return sum(chain.vectors for chain in self._chains.values())

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

    def spend(self, once: str) -> None:
        """Keep that something was answered that is answered once."""
        self.spent.add(once)
        if self.store is not None:
            self.store.spent(once)

    def decide(self, decision: Decision) -> None:
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

    def hold_against(self, site: str, keys: PublicIdentity, earlier: AccountHead) -> None:
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
                f"its account does not hold what it signed on {told(earlier.time)}: the files in its folder "
                "were put back to an earlier state, and what it has answered since is not known"
            )
            self.store.disputed(self.disputed)
        self.check_undisputed(site)
