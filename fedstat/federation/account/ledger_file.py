"""A site's account on disk: appended to before anything leaves, and gone on with after a restart.

::

    ledger.jsonl    one line per session opened, per entry of its chain, and per change of what was in play
    ledger.key      secret from which the keys of all commitments are drawn, for its owner alone (mode 0600)
    answered.npz    the rows behind earlier answers, so that a restart does not forget them (mode 0600)

Every entry has the head of its chain beside it. What is read is held against the heads: a line that was
altered, removed or put elsewhere is found. Only the last line may be cut, by a crash before its answer left.
"""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fedstat.errors import EngineError, SecurityError
from fedstat.federation.account.chain import Chain, ChainLink, SiteAccount, canonical, read_link
from fedstat.federation.crypto.keys import PublicIdentity
from fedstat.federation.files import lock, read_private, write_private, write_whole
from fedstat.records import Least, from_plain, to_plain
from fedstat.typing import Array

LEDGER, SECRET, ANSWERED = "ledger.jsonl", "ledger.key", "answered.npz"
SECRET_BYTES = 32
PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class OpenedLine:
    """A session was opened."""

    session: str
    ordinal: Annotated[int, Least(1)]
    previous: str


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


class LedgerFile:
    """The file that a site's entries are appended to; EngineError where another process serves the site.

    A process that is about to end is waited for, `patience` seconds.
    """

    def __init__(self, folder: str | Path, patience: float = PATIENCE) -> None:
        self.folder = Path(folder)
        self.path = self.folder / LEDGER
        self._file = open(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "ab", 0)  # noqa: SIM115
        self._broken: OSError | None = None
        until = time.monotonic() + patience
        while not lock(self._file):
            if time.monotonic() > until:
                self._file.close()
                raise EngineError(
                    f"another process serves the site in '{folder}'; stop it first: two would write two "
                    "histories of one site"
                )
            time.sleep(0.05)

    def close(self) -> None:
        """Let another process write."""
        self._file.close()

    def opened(self, chain: Chain) -> None:
        """Append that a session was opened."""
        self._append([to_plain(OpenedLine(chain.session, chain.ordinal, chain.previous))])

    def entered(self, chain: Chain, links: Sequence[tuple[ChainLink, str]]) -> None:
        """Append entries, with the head of the chain after the last of them."""
        lines: list[dict[str, Any]] = [
            {"ordinal": chain.ordinal, "entry": link.signed, "mark": mark} for link, mark in links
        ]
        lines[-1]["head"] = chain.head
        self._append(lines)

    def noted(self, columns: set[str], entities: int) -> None:
        """Append what was in play."""
        self._append([to_plain(InPlayLine(sorted(columns), entities))])

    def spent(self, once: str) -> None:
        """Append that something was answered that is answered once."""
        self._append([to_plain(SpentLine(once))])

    def refused(self, asker: str, count: int) -> None:
        """Append how many refusals one who asks has had."""
        self._append([to_plain(RefusalsLine(asker, count))])

    def answered(self, bitmaps: Sequence[Array]) -> None:
        """Replace the rows behind earlier answers."""
        content = io.BytesIO()
        arrays: dict[str, Any] = {str(place): bitmap for place, bitmap in enumerate(bitmaps)}
        np.savez_compressed(content, **arrays)
        try:
            write_whole(self.folder / ANSWERED, content.getvalue())
        except OSError as error:
            raise self._full(error) from error

    def _append(self, lines: Sequence[dict[str, Any]]) -> None:
        # After a line that may be cut no other is whole: what went wrong first is told until a new start.
        if self._broken is not None:
            raise self._full(self._broken) from self._broken
        try:
            content = "".join(canonical(line) + "\n" for line in lines).encode()
            if self._file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            self._broken = error
            raise self._full(error) from error

    def _full(self, error: OSError) -> EngineError:
        return EngineError(
            f"the ledger in the site's folder cannot be written ({error.strerror}), and nothing leaves that "
            "is not written down; its owner makes room and starts the site again"
        )


def open_account(
    folder: str | Path, site: str, keys: PublicIdentity, patience: float = PATIENCE
) -> SiteAccount:
    """Open a site's account, and go on with it.

    Another process that serves the site is an EngineError; an account that was altered, or was written under
    other keys, a SecurityError.
    """
    store = LedgerFile(folder, patience)
    try:
        _mend(store.path)
        account = read_account(folder, site, keys)
    except SecurityError:
        store.close()
        raise
    account.store = store
    return account


def read_account(folder: str | Path, site: str, keys: PublicIdentity) -> SiteAccount:
    """Read a site's account, and hold every line against the chain.

    SecurityError names a line that is not what was written, or was written under other keys.
    """
    path = Path(folder, LEDGER)
    account, chains = SiteAccount(_secret(Path(folder, SECRET))), dict[int, Chain]()
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, text in enumerate(lines, 1):
        try:
            fits = _take(account, chains, json.loads(text), site, keys)
        except (ValueError, LookupError, TypeError, SecurityError):
            fits = False
        if not fits:
            raise SecurityError(
                f"'{path}', line {number}: not what this site wrote with the keys that it has now. Take the "
                "file from a backup, or move it away and tell the others that the account begins anew"
            )
    return account


def _take(
    account: SiteAccount, chains: dict[int, Chain], line: dict[str, Any], site: str, keys: PublicIdentity
) -> bool:
    if "columns" in line:
        noted = from_plain(InPlayLine, line, LEDGER, SecurityError)
        account.note(set(noted.columns), noted.entities)
        return True
    if "spent" in line:
        account.spent.add(from_plain(SpentLine, line, LEDGER, SecurityError).spent)
        return True
    if "refused" in line:
        refusals = from_plain(RefusalsLine, line, LEDGER, SecurityError)
        account.refusals[refusals.asker] = refusals.refused
        return True
    if "session" in line:
        opened = from_plain(OpenedLine, line, LEDGER, SecurityError)
        chain = chains[opened.ordinal] = account.open(site, keys, opened.session)
        return (chain.ordinal, chain.previous) == (opened.ordinal, opened.previous)
    chain = chains[line["ordinal"]]
    chain.restore(read_link(line["entry"]), line["mark"])
    return bool(line.get("head", chain.head) == chain.head)


def _mend(path: Path) -> None:
    """Drop entries whose last line was cut: their answer has not left."""
    content = path.read_bytes()
    kept = content.split(b"\n")[:-1]
    while kept and b'"entry"' in kept[-1] and b'"head"' not in kept[-1]:
        kept.pop()
    whole = sum(len(line) + 1 for line in kept)
    if whole < len(content):
        os.truncate(path, whole)


def read_answered(folder: str | Path, n_rows: int) -> list[Array]:
    """Read the rows behind earlier answers; those of a table of another length are none of this one."""
    path = Path(folder, ANSWERED)
    if not path.exists():
        return []
    with np.load(path, allow_pickle=False) as content:
        bitmaps = [content[name] for name in content.files]
    return [bitmap for bitmap in bitmaps if bitmap.shape[1] == (n_rows + 7) // 8]


def _secret(path: Path) -> bytes:
    """Read the secret of the commitments, drawn when there is none yet."""
    if not path.exists():
        write_private(path, secrets.token_bytes(SECRET_BYTES))
    content = read_private(path)
    if len(content) != SECRET_BYTES:
        raise SecurityError(f"'{path}' does not hold {SECRET_BYTES} bytes; take it from a backup")
    return content
