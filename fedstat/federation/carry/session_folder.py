"""Sessions that outlive the process of a site, beside its account on disk.

::

    sessions/anchor           when the ledger was written last, under a key of the site's identity
    sessions/<id>/state       what the site remembers of a session, and its latest answers (mode 0600)
    sessions/<id>/<name>.part an array of a megabyte or more, written once for as long as it is used

All is sealed by AES-GCM under keys of the site's identity. A state is written after every message, before its
answers leave, and is of its place in the account: session, number of questions and head of the chain are
associated data, so that only the state after the latest entry of the ledger opens. With an older one masks
would serve twice, and the difference of two answers under the same masks is one of what the site hid. Ledger
and state put back together would agree: the anchor has the time at which the operating system saw the ledger
change, which nobody sets who writes files, and where it is another one no session is taken up. A snapshot of
a whole disk that is put back has this time as well: remove the folder of sessions before the site runs again.

Whoever reads the folder of the site has its identity, and with it what is kept here: the keys of the sessions
of the last two weeks. A state is removed when its session is not asked for so long, when newer sessions have
taken its place, or when anything does not fit, such as the version of fedstat: the session has then ended, as
it would without being kept.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedstat.errors import FedstatError
from fedstat.federation.account.chain import Chain
from fedstat.federation.account.ledger_file import LedgerFile
from fedstat.federation.carry.bundle import Answered
from fedstat.federation.carry.written_state import read_state, write_state
from fedstat.federation.crypto.keys import encode
from fedstat.federation.door.site import Site
from fedstat.federation.door.state import SESSIONS_KEPT, State
from fedstat.federation.files import check_folder, read_private
from fedstat.federation.message import VERSION
from fedstat.federation.tables.row_marks import order_mark
from fedstat.federation.tables.table import FrameTable, LabelledTable, Table
from fedstat.records import to_json
from fedstat.typing import Array

SESSIONS, ANCHOR, STATE = "sessions", "anchor", "state"
CHANGES_TOLD = os.name == "posix"
"""Whether the system tells when a file was changed; without it a folder put back would not be seen."""
OLD = 14 * 24 * 3600.0
"""Seconds after which a session that was not asked is not kept."""
LARGE, LARGEST = 2**20, 2**28
"""Bytes of an array that is kept by itself, and of a state that is not kept."""
NONCE, LENGTH_BYTES = 12, 8
NAME = re.compile("[0-9a-f]{32}")
"""Names of the folders of sessions; no other is removed."""
UNFIT = (
    FedstatError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    RecursionError,
    OSError,
)
"""What goes wrong with a state ends its session, and no service."""
KEPT = ("_items", "_counts", "_columns", "_facts", "told", "in_play", "last", "begun", "analysis")
"""What a state holds between two questions."""
Answers: TypeAlias = dict[bytes, Answered]
"""Latest answers of a session by the digest of the question."""


class SessionFolder:
    """Sessions of a site whose account is a file."""

    def __init__(self, site: Site, store: LedgerFile) -> None:
        self._site, self._store = site, store
        self.folder = store.folder / SESSIONS
        self._seal = AESGCM(site.trust.identity.secret("sessions"))
        self._digest = AESGCM(site.trust.identity.secret("session parts"))
        self._key = site.trust.identity.secret("session names")
        self._parts: dict[str, set[str]] = {}
        self._untold = True
        self._table: tuple[object, str] = (None, "")
        self._judged: tuple[object, object, str] = (None, None, "")
        # What is removed here must not lie behind a link that somebody put in its place.
        check_folder(self.folder)
        with suppress(OSError):  # a full disk ends sessions, and no service
            self.folder.mkdir(mode=0o700, exist_ok=True)
        if self._anchored() != store.found:
            for path in self._kept():
                shutil.rmtree(path, ignore_errors=True)
        self._remove_old()
        store.followed = self._anchor
        self._anchor()

    @classmethod
    def of(cls, site: Site) -> SessionFolder | None:
        """Return those of a site; none where its account is in memory, or :data:`CHANGES_TOLD` is false."""
        store = site.account.store
        return cls(site, store) if isinstance(store, LedgerFile) and CHANGES_TOLD else None

    def keep(self, session: str, answers: Answers) -> None:
        """Keep a session as it is after an answer; one that cannot be kept ends with the process."""
        chain, state = self._chain(session), self._site.states.get(session)
        # One that has ended here has refusals for answers, and is not to begin anew.
        if chain is None or state is None or not session:
            return
        held = {name: getattr(state, name) for name in KEPT}
        try:
            text, arrays = write_state(held, self._outside())
            if sum(array.nbytes for array in arrays) > LARGEST:
                raise TypeError(f"more than {LARGEST:,} bytes")
            self._write(chain, text, arrays, answers)
        except UNFIT as error:
            self.remove(session)
            if self._untold:
                self._untold = False
                self._site.refusals.note(
                    f"a session is not kept beyond this process, which holds what is not written: {error}"
                )

    def take_up(self, session: str) -> dict[str, Answers]:
        """Go on with a session of an earlier process; its latest answers, nothing where it has ended."""
        chain = self._chain(session)
        path = self._place(session) / STATE
        if chain is None or not chain.resumed or not path.exists():
            return {}
        try:
            told, arrays = self._read(chain, path)
            if told["version"] != VERSION:
                raise ValueError("it is of another version of fedstat")
            if told["records"] != self._records():
                raise ValueError("the records have changed")
            if told["rules"] != self._rules():
                raise ValueError("policy or public description have changed")
            held = read_state(told["state"], arrays[: told["arrays"]], self._outside())
            packed = arrays[told["arrays"] :]
            answers = {
                bytes.fromhex(digest): Answered(one.tobytes(), refused)
                for (digest, refused), one in zip(told["answers"], packed, strict=True)
            }
        except (InvalidTag, *UNFIT) as error:
            self.remove(session)
            self._site.refusals.note(
                f"a session is not gone on with: what was kept of it is not of its latest answer ({error})"
            )
            return {}
        state = State(self._site.name)
        for name, value in held.items():
            setattr(state, name, value)
        self._site.states[session] = state
        chain.resumed = False
        return {session: answers}

    def remove(self, session: str) -> None:
        """Keep a session no longer."""
        self._parts.pop(session, None)
        shutil.rmtree(self._place(session), ignore_errors=True)

    def _write(self, chain: Chain, text: str, arrays: list[Array], answers: Answers) -> None:
        place, known = self._place(chain.session), self._parts.setdefault(chain.session, set())
        packed = [np.frombuffer(answer, dtype=np.uint8) for answer, _ in answers.values()]
        place.mkdir(mode=0o700, exist_ok=True)
        specs, pieces, used = [], [], set[str]()
        for array in [*arrays, *packed]:
            order = "C" if array.flags.c_contiguous else "F"
            flat = (array if order == "C" else array.T).reshape(-1)
            content, part = flat.view(np.uint8).data, ""
            if len(content) >= LARGE:
                # The tag of the cipher is a keyed digest, and ten times as fast as another; it is not shown.
                tag = self._digest.encrypt(bytes(NONCE), b"", content)
                part = hmac.digest(self._key, tag, "sha256").hex()[:32]
                used.add(part)
                if part not in known:
                    _write(place / f"{part}.part", self._sealed(content, "part", part))
            else:
                pieces.append(content)
            specs.append([array.dtype.str, list(array.shape), order, part])
        told = {
            "state": text,
            "arrays": len(arrays),
            "specs": specs,
            "version": VERSION,
            "answers": [[digest.hex(), refused] for digest, (_, refused) in answers.items()],
            "records": self._records(),
            "rules": self._rules(),
        }
        header = json.dumps(told).encode()
        whole = len(header).to_bytes(LENGTH_BYTES, "little") + header + b"".join(pieces)
        _write(place / STATE, self._sealed(whole, *_address(chain)))
        for part in known - used:
            (place / f"{part}.part").unlink(missing_ok=True)
        self._parts[chain.session] = used
        self._remove_old()

    def _read(self, chain: Chain, path: Path) -> tuple[dict[str, Any], list[Array]]:
        content = self._opened(read_private(path), *_address(chain))
        place = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
        told, arrays = json.loads(content[LENGTH_BYTES:place]), []
        for dtype, shape, order, part in told["specs"]:
            if part:
                held = self._opened(read_private(path.with_name(f"{part}.part")), "part", part)
            else:
                size = math.prod(shape) * np.dtype(dtype).itemsize
                held, place = content[place : place + size], place + size
            arrays.append(np.frombuffer(held, dtype=dtype).reshape(shape, order=order).copy(order="K"))
        self._parts[chain.session] = {part for *_, part in told["specs"] if part}
        return told, arrays

    def _sealed(self, content: bytes | memoryview, *place: str) -> bytes:
        nonce = secrets.token_bytes(NONCE)
        return nonce + self._seal.encrypt(nonce, content, self._bound(*place))

    def _opened(self, sealed: bytes, *place: str) -> bytes:
        return self._seal.decrypt(sealed[:NONCE], sealed[NONCE:], self._bound(*place))

    def _bound(self, *place: str) -> bytes:
        return encode("fedstat session 1", self._site.name, *place)

    def _chain(self, session: str) -> Chain | None:
        return next((chain for chain in self._site.account.chains if chain.session == session), None)

    def _place(self, session: str) -> Path:
        return self.folder / hmac.digest(self._key, session.encode(), "sha256").hex()[:32]

    def _kept(self) -> list[Path]:
        """Folders of sessions, the newest first."""
        there = self.folder.iterdir() if self.folder.exists() else ()
        found = [path for path in there if NAME.fullmatch(path.name) and not path.is_symlink()]
        return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)

    def _remove_old(self) -> None:
        """Remove what was not asked for long, and what newer sessions have taken the place of."""
        now = time.time()
        for place, path in enumerate(self._kept()):
            if place >= SESSIONS_KEPT or now - path.stat().st_mtime > OLD:
                shutil.rmtree(path, ignore_errors=True)
                self._parts = {
                    session: parts for session, parts in self._parts.items() if self._place(session) != path
                }

    def _anchor(self) -> None:
        """Keep when the ledger was written last; not waited for, since without it sessions end."""
        stamp = json.dumps(self._store.stamp())
        mark = hmac.digest(self._key, encode(ANCHOR, self._site.name, stamp), "sha256").hex()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
        with suppress(OSError), open(os.open(self.folder / ANCHOR, flags, 0o600), "w") as file:
            file.write(json.dumps([stamp, mark]))

    def _anchored(self) -> tuple[int, int] | None:
        try:
            stamp, mark = json.loads(read_private(self.folder / ANCHOR, 2 * LARGE))
            known = hmac.digest(self._key, encode(ANCHOR, self._site.name, stamp), "sha256").hex()
            size, changed = json.loads(stamp)
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        return (size, changed) if hmac.compare_digest(mark, known) else None

    def _outside(self) -> Mapping[str, object]:
        data = self._site.data
        table = data.table.table if isinstance(data.table, LabelledTable) else data.table
        named = {
            "data": data,
            "identity": data.trust.identity,
            "trust": data.trust,
            "policy": data.policy,
            "account": data.account,
            "approvals": data.approvals,
            "published": data.published,
            "table": data.table,
            "inner table": table,
        }
        return named | ({"frame": table.frame} if isinstance(table, FrameTable) else {})

    def _rules(self) -> str:
        """Digest of policy and public description, by which what a state holds was judged."""
        policy, published = self._site.policy, self._site.published
        if self._judged[0] is not policy or self._judged[1] is not published:
            told = encode(policy.to_toml(), to_json(dict(published)))
            self._judged = policy, published, hmac.digest(self._key, told, "sha256").hex()
        return self._judged[2]

    def _records(self) -> str:
        """Keyed digest of records that are held, in their order, and of what a file tells of others."""
        outer: Table = self._site.data.table
        table = outer.table if isinstance(outer, LabelledTable) else outer
        told = json.dumps([table.n_rows, list(table.columns)]).encode()
        if (path := getattr(table, "path", None)) is not None:
            stat = Path(path).stat()
            file = json.dumps([stat.st_size, stat.st_mtime_ns]).encode()
            return hmac.digest(self._key, encode(told, file), "sha256").hex()
        # a frame is replaced where its rows come into another order, and a query's rows never
        held = table.frame if isinstance(table, FrameTable) else table
        if self._table[0] is not held:
            self._table = held, hmac.digest(self._key, encode(told, order_mark(table)), "sha256").hex()
        return self._table[1]


def _write(path: Path, content: bytes) -> None:
    """Write a file whole, without waiting for the disk: what a power cut takes away ends a session."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _address(chain: Chain) -> tuple[str, ...]:
    """Place of a state in the account."""
    return chain.session, str(chain.ordinal), str(chain.round), chain.head
