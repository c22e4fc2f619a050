"""The lines of a site's account at rest, and their reading.

Every line is one JSON object in canonical form. The digest of a line is of all lines before as well, and the
last of those that were written at once has ``"signed"``: when, and the site's signature over that digest.
Lines after the last signature are what a crash cut, and their answer has not left.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fedstat.errors import SecurityError
from fedstat.federation.account.chain import Chain, SiteAccount
from fedstat.federation.account.charges import RHO, Charge
from fedstat.federation.account.decision import Decision
from fedstat.federation.account.head import AccountHead, Nanoseconds, first_digest, fold, told
from fedstat.federation.account.link import canonical, read_link
from fedstat.federation.crypto.keys import PublicIdentity
from fedstat.federation.files import open_regular
from fedstat.records import Least, from_plain

LEDGER, HEAD, SECRET, ANSWERED = "ledger.jsonl", "ledger.head", "ledger.key", "answered.npz"
SIGNED = b'"signed":{'
"""Stands in no line but as the name of its signature: within a text its quotes are escaped."""


@dataclass(frozen=True, slots=True)
class BegunLine:
    """The account was begun, with a secret that has this SHA-256."""

    begun: Nanoseconds
    secret: str


@dataclass(frozen=True, slots=True)
class OpenedLine:
    """A session was opened, over records that were read at a time; empty where every answer reads them."""

    session: str
    ordinal: Annotated[int, Least(1)]
    previous: str
    as_of: str = ""


@dataclass(frozen=True, slots=True)
class InPlayLine:
    """Columns that were in play in any session, and most entities behind an answer."""

    columns: list[str]
    entities: Annotated[int, Least(0)]


@dataclass(frozen=True, slots=True)
class RefusalsLine:
    """So many questions of one who asks were refused because of the rows."""

    asker: str
    refused: Annotated[int, Least(0)]


@dataclass(frozen=True, slots=True)
class SpentLine:
    """What is answered once was answered."""

    spent: str


@dataclass(frozen=True, slots=True)
class AnsweredLine:
    """SHA-256 of the file of rows behind earlier answers, empty for none, and how many rows there were."""

    answered: str = ""
    rows: Annotated[int, Least(0)] = 0


@dataclass(frozen=True, slots=True)
class DisputedLine:
    """The account was found not to hold what the site signed: why."""

    disputed: str


@dataclass(frozen=True, slots=True)
class LostLine:
    """The owner declared that the account before was lost: when and why, and where what was left of it is."""

    lost: Nanoseconds
    reason: str
    aside: str


@dataclass(slots=True)
class Reading:
    """What the lines of an account have told so far; `heads` are by number of lines, of those signed."""

    site: str
    keys: PublicIdentity
    secret: bytes
    account: SiteAccount = field(init=False)
    digest: bytes = field(init=False)
    lines: int = 0
    lost: tuple[int, ...] = ()
    answered: AnsweredLine = AnsweredLine()
    heads: dict[int, AccountHead] = field(default_factory=dict)
    _chains: dict[int, Chain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.account, self.digest = SiteAccount(self.secret), first_digest(self.keys)

    @property
    def head(self) -> AccountHead:
        """The newest."""
        return self.heads[self.lines]

    def take(self, text: bytes) -> None:
        """Take one more line; some error, where it is not one that belongs here."""
        line = json.loads(text)
        signed = line.pop("signed", None)
        self.digest, self.lines = fold(self.digest, canonical(line)), self.lines + 1
        _TAKERS[next(name for name in _TAKERS if name in line)](self, line)
        if signed is not None:
            head = AccountHead(self.lines, self.digest.hex(), signed["time"], self.lost, signed["signature"])
            self.heads[self.lines] = head

    def first_unsigned(self) -> int:
        """Line of the first signature that is not the site's; 0 where the newest is: it stands for all."""
        if self.lines in self.heads and self.head.is_of(self.keys):
            return 0
        return next((number for number, head in self.heads.items() if not head.is_of(self.keys)), self.lines)

    def _begin(self, line: dict[str, Any]) -> None:
        begun = from_plain(BegunLine, line, LEDGER, SecurityError)
        if self.lines != 1 or begun.secret != hashlib.sha256(self.secret).hexdigest():
            raise ValueError("begun")

    def _open(self, line: dict[str, Any]) -> None:
        opened = from_plain(OpenedLine, line, LEDGER, SecurityError, defaults=True)
        chain = self._chains[opened.ordinal] = self.account.open(self.site, self.keys, opened.session)
        if (chain.ordinal, chain.previous) != (opened.ordinal, opened.previous):
            raise ValueError("session")
        chain.as_of = opened.as_of

    def _enter(self, line: dict[str, Any]) -> None:
        chain = self._chains[line["ordinal"]]
        chain.restore(read_link(line["entry"]), line["mark"])
        if line.get("head", chain.head) != chain.head:
            raise ValueError("head")

    def _note(self, line: dict[str, Any]) -> None:
        noted = from_plain(InPlayLine, line, LEDGER, SecurityError)
        self.account.note(set(noted.columns), noted.entities)

    def _refuse(self, line: dict[str, Any]) -> None:
        refusals = from_plain(RefusalsLine, line, LEDGER, SecurityError)
        self.account.refusals[refusals.asker] = refusals.refused

    def _spend(self, line: dict[str, Any]) -> None:
        self.account.spent.add(from_plain(SpentLine, line, LEDGER, SecurityError).spent)

    def _charge(self, line: dict[str, Any]) -> None:
        charge = from_plain(Charge, line, LEDGER, SecurityError)
        if not RHO.fullmatch(charge.rho):
            raise ValueError("charged")
        self.account.charges.take(charge)

    def _decide(self, line: dict[str, Any]) -> None:
        self.account.decide(from_plain(Decision, line, LEDGER, SecurityError))

    def _remember(self, line: dict[str, Any]) -> None:
        self.answered = from_plain(AnsweredLine, line, LEDGER, SecurityError)

    def _dispute(self, line: dict[str, Any]) -> None:
        self.account.disputed = from_plain(DisputedLine, line, LEDGER, SecurityError).disputed

    def _lose(self, line: dict[str, Any]) -> None:
        loss = from_plain(LostLine, line, LEDGER, SecurityError)
        self.lost = (*self.lost, loss.lost)
        self.account.disputed = ""
        self.account.losses.append((told(loss.lost), loss.reason))


_TAKERS: Mapping[str, Any] = {
    "entry": Reading._enter,
    "session": Reading._open,
    "columns": Reading._note,
    "spent": Reading._spend,
    "refused": Reading._refuse,
    "verdict": Reading._decide,
    "charged": Reading._charge,
    "answered": Reading._remember,
    "begun": Reading._begin,
    "disputed": Reading._dispute,
    "lost": Reading._lose,
}
"""How a line is taken, by the field that tells its kind."""


def whole_lines(content: bytes) -> list[bytes]:
    """Split an account into its lines, without those after the last signature."""
    lines = content.split(b"\n")[:-1]
    while lines and SIGNED not in lines[-1]:
        lines.pop()
    return lines


def read_lines(folder: Path, site: str, keys: PublicIdentity, secret: bytes) -> Reading:
    """Read an account, and hold every line against chain and signatures.

    SecurityError names a line that is not what was written, or was written under other keys.
    """
    reading, path = Reading(site, keys, secret), folder / LEDGER
    with open_regular(path) as file:
        lines = whole_lines(file.read())
    for number, text in enumerate(lines, 1):
        try:
            reading.take(text)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            StopIteration,
            RecursionError,
            SecurityError,
        ):
            raise altered(path, number) from None
    if wrong := reading.first_unsigned():
        raise altered(path, wrong)
    return reading


def altered(path: Path, number: int) -> SecurityError:
    """Error about a line."""
    return SecurityError(
        f"'{path}', line {number}: not what this site wrote with the keys that it has now. "
        f"{remedy(path.parent)}"
    )


def remedy(folder: Path) -> str:
    """Say how a site goes on whose account is not whole."""
    return (
        "Nothing is answered until its owner puts the files back as they were, or declares the loss, which "
        f"the others are told: fedstat site declare-loss {folder} --reason TEXT"
    )
