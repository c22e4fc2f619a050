"""A site's account on disk: appended to before anything leaves, and gone on with after a restart.

::

    ledger.jsonl    one line per session opened, per entry of its chain, and per change of what was in play
    ledger.head     the newest signed head (mode 0600): a ledger that lacks it was cut
    ledger.key      secret from which the keys of all commitments are drawn, for its owner alone (mode 0600)
    answered.npz    the rows behind earlier answers, so that a restart does not forget them (mode 0600)

The account is begun with the site's folder. From then on a file that is absent, cut, altered or put back is a
refusal to serve, and so is a file of earlier answers that is not the one which the ledger names: an answer
could otherwise be asked for again over a few rows less. Only what a crash can do is mended: lines without a
signature at the end, whose answer has not left, and a head that is older than the ledger.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedstat.errors import EngineError, SecurityError
from fedstat.federation.account.chain import Chain, SiteAccount
from fedstat.federation.account.charges import Charge
from fedstat.federation.account.decision import Decision
from fedstat.federation.account.head import AccountHead, fold
from fedstat.federation.account.ledger_lines import (
    ANSWERED,
    HEAD,
    LEDGER,
    SECRET,
    AnsweredLine,
    BegunLine,
    DisputedLine,
    InPlayLine,
    OpenedLine,
    Reading,
    RefusalsLine,
    SpentLine,
    read_lines,
    remedy,
    whole_lines,
)
from fedstat.federation.account.link import ChainLink, canonical
from fedstat.federation.crypto.keys import Identity, PublicIdentity
from fedstat.federation.files import lock, read_arrays, read_private, write_private, write_whole
from fedstat.records import from_json, to_json, to_plain
from fedstat.typing import Array

NEXT = "answered.next"
Fits: TypeAlias = Callable[[Mapping[str, Array], int], str]
"""Says why earlier answers over so many rows cannot be held against new ones; empty where they can."""
SECRET_BYTES, HEAD_BYTES = 32, 2048
PATIENCE = 10.0
NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class LedgerFile:
    """The file that a site's entries are appended to; EngineError where another process serves the site.

    A process that is about to end is waited for, `patience` seconds. A ledger that is absent, or no plain
    file, is a SecurityError.
    """

    def __init__(self, folder: str | Path, patience: float = PATIENCE) -> None:
        self.folder = Path(folder)
        self.path = self.folder / LEDGER
        try:
            self._file = open(os.open(self.path, os.O_RDWR | os.O_APPEND | NO_LINK), "ab", 0)  # noqa: SIM115
        except OSError:
            raise absent(self.path) from None
        self._broken: OSError | None = None
        self.followed: Callable[[], None] = lambda: None
        """Called after every line."""
        until = time.monotonic() + patience
        while not lock(self._file):
            if time.monotonic() > until:
                self._file.close()
                raise EngineError(
                    f"another process serves the site in '{folder}'; stop it first: two would write two "
                    "histories of one site"
                )
            time.sleep(0.05)
        self.found = self.stamp()

    def stamp(self) -> tuple[int, int]:
        """Size of the file, and when it was changed last, which nobody sets who writes to files."""
        now = os.fstat(self._file.fileno())
        return now.st_size, now.st_ctime_ns

    def go_on(self, identity: Identity, reading: Reading) -> None:
        """Take up an account that was read, and sign what comes."""
        self._identity, self._read_as = identity, (reading.site, reading.keys, reading.secret)
        self._lines, self._digest, self.lost = reading.lines, reading.digest, reading.lost
        self._size = self.path.stat().st_size
        if reading.lines:
            self._show(reading.head)

    @property
    def broken(self) -> str:
        """Why nothing can be written any more; empty where it can."""
        return "" if self._broken is None else str(self._broken.strerror or self._broken)

    def close(self) -> None:
        """Let another process write."""
        self._file.close()

    def opened(self, chain: Chain) -> None:
        """Append that a session was opened."""
        self.append([to_plain(OpenedLine(chain.session, chain.ordinal, chain.previous, chain.as_of))])

    def entered(self, chain: Chain, links: Sequence[tuple[ChainLink, str]]) -> None:
        """Append entries, with the head of the chain after the last of them."""
        lines: list[dict[str, Any]] = [
            {"ordinal": chain.ordinal, "entry": link.signed, "mark": mark} for link, mark in links
        ]
        lines[-1]["head"] = chain.head
        self.append(lines)

    def noted(self, columns: set[str], entities: int) -> None:
        """Append what was in play."""
        self.append([to_plain(InPlayLine(sorted(columns), entities))])

    def spent(self, once: str) -> None:
        """Append that something was answered that is answered once."""
        self.append([to_plain(SpentLine(once))])

    def refused(self, asker: str, count: int) -> None:
        """Append how many refusals one who asks has had."""
        self.append([to_plain(RefusalsLine(asker, count))])

    def decided(self, decision: Decision) -> None:
        """Append what the owner decided about a plan."""
        self.append([to_plain(decision)])

    def charged(self, charges: Sequence[Charge]) -> None:
        """Append charges to the privacy budget, all or none."""
        self.append([to_plain(charge) for charge in charges])

    def disputed(self, why: str) -> None:
        """Append that the account does not hold what the site signed."""
        self.append([to_plain(DisputedLine(why))])

    def answered(self, arrays: Mapping[str, Array], n_rows: int) -> None:
        """Replace the rows behind earlier answers.

        The ledger names the new file before it takes the place of the old one: whenever a crash comes, one of
        the two is what the ledger names.
        """
        content = io.BytesIO()
        np.savez_compressed(content, **dict(arrays))  # type: ignore[arg-type]
        try:
            write_whole(self.folder / NEXT, content.getvalue())
        except OSError as error:
            self._broken = error
            raise self._full(error) from error
        self.append([to_plain(AnsweredLine(hashlib.sha256(content.getvalue()).hexdigest(), n_rows))])
        (self.folder / NEXT).replace(self.folder / ANSWERED)

    def holds(self, head: AccountHead) -> bool:
        """Whether the account, as it is on disk now, had this head."""
        try:
            now = read_lines(self.folder, *self._read_as)
        except (SecurityError, OSError):
            return False
        found = now.heads.get(head.lines)
        return found is not None and found.digest == head.digest

    def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write lines, the last of them signed, and the new head beside."""
        # After a line that may be cut no other is whole: what went wrong first is told until a new start.
        if self._broken is not None:
            raise self._full(self._broken) from self._broken
        self._check_untouched()
        digest = self._digest
        for line in lines:
            digest = fold(digest, canonical(line))
        # A clock that was set back does not make a head older than the one before.
        now = max(time.time_ns(), self.head.time + 1 if self._lines else 0)
        head = AccountHead(self._lines + len(lines), digest.hex(), now, self.lost).sign(self._identity)
        signed = {**lines[-1], "signed": {"time": now, "signature": head.signature}}
        content = "".join(canonical(line) + "\n" for line in [*lines[:-1], signed]).encode()
        try:
            if self._file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
            self._lines, self._digest, self._size = head.lines, digest, self._size + len(content)
            self._show(head)
            self.followed()
        except OSError as error:
            self._broken = error
            raise self._full(error) from error

    def _show(self, head: AccountHead) -> None:
        """Write the head in the place of the last: not waited for, since an older one is mended."""
        self.head = head
        flags = os.O_WRONLY | os.O_CREAT | NO_LINK
        with open(os.open(self.folder / HEAD, flags, 0o600), "wb", 0) as file:
            file.write(to_json(head).encode().ljust(HEAD_BYTES))

    def _check_untouched(self) -> None:
        """Refuse to go on where somebody else wrote, cut or exchanged the file since the last line."""
        held = os.fstat(self._file.fileno())
        found = self.path.stat() if self.path.exists() else None
        if found is None or (found.st_ino, found.st_size) != (held.st_ino, self._size):
            raise SecurityError(
                f"'{self.path}' was changed while the site was served, and not by it. {remedy(self.folder)}"
            )

    def _full(self, error: OSError) -> EngineError:
        return EngineError(
            f"the ledger in the site's folder cannot be written ({error.strerror}), and nothing leaves that "
            "is not written down; its owner makes room and starts the site again"
        )


def begin_account(folder: str | Path, identity: Identity) -> None:
    """Begin the account of a site that has answered nothing yet; FileExistsError where there is one."""
    begin_file(Path(folder), identity).close()


def begin_file(folder: Path, identity: Identity) -> LedgerFile:
    """Begin an account, and keep its file open."""
    write_private(folder / LEDGER, b"")
    if not (folder / SECRET).exists():
        write_private(folder / SECRET, secrets.token_bytes(SECRET_BYTES))
    store, secret = LedgerFile(folder), _secret(folder)
    store.go_on(identity, Reading("", identity.public, secret))
    store.append([to_plain(BegunLine(time.time_ns(), hashlib.sha256(secret).hexdigest()))])
    return store


def open_account(
    folder: str | Path, site: str, identity: Identity, fits: Fits | None = None, patience: float = PATIENCE
) -> SiteAccount:
    """Open a site's account, and go on with it.

    Another process that serves the site is an EngineError; an account that is not whole, or was written under
    other keys, or remembers answers over records among which those there are cannot be known again (`fits`),
    a SecurityError.
    """
    store, reading = open_whole(folder, site, identity, patience)
    account = reading.account
    try:
        account.check_undisputed(site)
        account.recalled = recall(store.folder, reading.answered)
        if account.recalled and fits is not None and (why := fits(account.recalled, reading.answered.rows)):
            raise SecurityError(f"{site}: {why}")
    except SecurityError as error:
        store.close()
        raise SecurityError(f"{error}. {remedy(store.folder)}") from error
    account.store = store
    return account


def open_whole(
    folder: str | Path, site: str, identity: Identity, patience: float = PATIENCE
) -> tuple[LedgerFile, Reading]:
    """Open the file of an account whose lines are whole, and read it."""
    store = LedgerFile(folder, patience)
    try:
        _mend(store.path)
        reading = _read_whole(store.folder, site, identity.public)
    except SecurityError:
        store.close()
        raise
    store.go_on(identity, reading)
    return store, reading


def read_account(folder: str | Path, site: str, keys: PublicIdentity) -> SiteAccount:
    """Read a site's account, and hold it against its chains, its signatures and the head beside it.

    SecurityError where it is absent or cut, or a line is not what was written under these keys.
    """
    return _read_whole(Path(folder), site, keys).account


def _read_whole(folder: Path, site: str, keys: PublicIdentity) -> Reading:
    if not (folder / LEDGER).exists():
        raise absent(folder / LEDGER)
    # The head first: a site that serves meanwhile writes it last, and what is read then has it.
    head = _read_head(folder, keys)
    reading = read_lines(folder, site, keys, _secret(folder))
    if head.lines not in reading.heads or reading.heads[head.lines].digest != head.digest:
        raise SecurityError(
            f"'{folder / LEDGER}' ends before what this site wrote last: it was cut, or put back to an "
            f"earlier state. {remedy(folder)}"
        )
    return reading


def _read_head(folder: Path, keys: PublicIdentity) -> AccountHead:
    path = folder / HEAD
    try:
        head = from_json(AccountHead, read_private(path, HEAD_BYTES), f"'{path}'", SecurityError)
    except FileNotFoundError:
        raise absent(path) from None
    if not head.is_of(keys):
        raise SecurityError(f"'{path}' is not signed with the keys of this site. {remedy(folder)}")
    return head


def absent(path: Path) -> SecurityError:
    """Error about a file without which an account is not whole."""
    return SecurityError(
        f"'{path}' is absent: it was removed, or is that of an earlier version. {remedy(path.parent)}"
    )


def _mend(path: Path) -> None:
    """Drop lines whose signature was not written: their answer has not left."""
    content = path.read_bytes()
    whole = sum(len(line) + 1 for line in whole_lines(content))
    if 0 < whole < len(content):
        os.truncate(path, whole)


def recall(folder: Path, named: AnsweredLine) -> dict[str, Array]:
    """Read the rows behind earlier answers, which have to be those that the ledger names."""
    path = folder / ANSWERED
    if not named.answered:
        if path.exists():
            raise SecurityError(f"'{path}' is not from this site, which remembers no answers")
        return {}
    for place in (folder / NEXT, path):
        content = read_private(place) if place.exists() else b""
        if hashlib.sha256(content).hexdigest() == named.answered:
            kept = read_arrays(content)
            place.replace(path)
            return kept
    raise SecurityError(
        f"'{path}' is {'altered' if path.exists() else 'absent'}: what this site has answered is not known "
        "any more, and a difference of two answers could disclose a few rows"
    )


def changed_rows(then: int, now: int) -> str:
    """Say that earlier answers were over another number of rows; empty where they were not."""
    if then == now:
        return ""
    return (
        f"there are {now:,} records, and earlier answers were over {then:,}: they cannot be held against "
        "new ones, and a difference of two answers could disclose a few rows"
    )


def _secret(folder: Path) -> bytes:
    """Read the secret of the commitments."""
    path = folder / SECRET
    if not path.exists():
        raise absent(path)
    content = read_private(path)
    if len(content) != SECRET_BYTES:
        raise SecurityError(f"'{path}' does not hold {SECRET_BYTES} bytes. {remedy(folder)}")
    return content
