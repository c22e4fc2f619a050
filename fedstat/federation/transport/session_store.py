"""Sessions that outlive the process of a site, and their serialization."""

from __future__ import annotations

import functools
import hmac
import importlib
import json
import math
import os
import re
import secrets
import shutil
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from fractions import Fraction
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedstat.codec import to_json
from fedstat.errors import FedstatError
from fedstat.federation.audit.event_log import SessionChain
from fedstat.federation.audit.ledger_file import LedgerFile
from fedstat.federation.crypto.keys import encode_parts
from fedstat.federation.disclosure.site import Site
from fedstat.federation.disclosure.state import MAX_SESSIONS, State
from fedstat.federation.files import check_folder, read_private
from fedstat.federation.message import VERSION, BundledReply
from fedstat.federation.tables.aligned_table import order_fingerprint
from fedstat.federation.tables.table import FrameTable, LabelledTable, Table
from fedstat.typing import Array

# ----------------------------------------------------------------------------------------------------
# What a site remembers of a session, as text and arrays, and back.
#
# A state holds records of families, arrays, keys and counters. Each is written by its kind: plain values,
# lists and tables as they are, objects of this package by the name of their class and their fields, arrays
# by type, shape and bytes. Nothing in what is written runs, and no other class than those of this package
# is made of it. What belongs to the site itself (its table, its identity, its policy) is named, and taken
# from the site that goes on. Two places that hold one object hold one object again.

PACKAGE = "fedstat."
PLAIN = (types.NoneType, bool, int, float, str)
SEQUENCES: Mapping[str, Callable[[Any], Any]] = {
    kind.__name__: kind for kind in (tuple, frozenset, list, set, deque)
}
LOCK = type(Lock())
FEW = 2**16
"""Bytes up to which a part of an array brings all of it along."""
Node: TypeAlias = list[Any]


def write_state(state: Any, outside: Mapping[str, object]) -> tuple[str, list[Array]]:
    """Write a state, in which objects from `outside` go by their names.

    TypeError names a kind that cannot be written.
    """
    writer = _StateWriter(outside)
    root = writer.write(state)
    return json.dumps({"root": root, "nodes": writer.nodes}), writer.arrays


def read_state(text: str, arrays: Sequence[Array], outside: Mapping[str, object]) -> Any:
    """Read what :func:`write_state` wrote; its text has to be known to be this site's own."""
    told = json.loads(text)
    return _StateReader(told["nodes"], arrays, outside).read(told["root"])


def fields_of(value: object) -> Iterator[str]:
    """Names of what an object holds, and is written: without what its class makes again."""
    again = getattr(type(value), "MADE_AGAIN", ())
    held = dict.fromkeys(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        held.update(dict.fromkeys((slots,) if isinstance(slots, str) else slots))
    for name in held:
        if name not in ("__dict__", "__weakref__", *again) and hasattr(value, name):
            yield name


class _StateWriter:
    def __init__(self, outside: Mapping[str, object]) -> None:
        self.nodes: list[Node] = []
        self.arrays: list[Array] = []
        self._outside = {id(one): name for name, one in outside.items()}
        # Of these a site has one: an older one of it is the same.
        self._kinds = {type(one): name for name, one in outside.items() if name in ("data", "identity")}
        self._places: dict[int, int] = {}
        self._alive: list[object] = []

    def write(self, value: Any) -> Any:
        """Return a plain value as it is, and of all others the place in a list of its own."""
        if type(value) in PLAIN:
            return value
        if id(value) not in self._places:
            self._alive.append(value)  # so that no other takes its number
            place = self._places[id(value)] = len(self.nodes)
            self.nodes.append([])
            self.nodes[place] = self._node(value)
        return [self._places[id(value)]]

    def _node(self, value: Any) -> Node:
        kind = type(value)
        outside = self._outside.get(id(value)) or self._kinds.get(kind)
        if outside is not None:
            return ["outside", outside]
        if kind.__name__ in SEQUENCES and SEQUENCES[kind.__name__] is kind:
            return [kind.__name__, [self.write(one) for one in value]]
        if kind in (dict, Counter, types.MappingProxyType):
            return [kind.__name__, [[self.write(k), self.write(v)] for k, v in value.items()]]
        if kind is bytes:
            return ["bytes", value.hex()]
        if kind is np.ndarray:
            return self._array(value)
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return ["number", self._keep(np.asarray(value))]
        if kind is Fraction:
            return ["Fraction", str(value)]
        if kind is LOCK:
            return ["lock"]
        if isinstance(value, X25519PrivateKey):
            return ["x25519", value.private_bytes_raw().hex()]
        if isinstance(value, np.random.Generator):
            bits = value.bit_generator
            return ["generator", type(bits).__name__, self.write(bits.state)]
        if kind is functools.partial:
            parts = [value.func, value.args, value.keywords]
            return ["partial", *map(self.write, parts)]
        return self._own(value, kind)

    def _own(self, value: Any, kind: type) -> Node:
        """Write a class, a function or an object of this package."""
        if isinstance(value, type | types.FunctionType):
            return ["named", _name_of(value)]
        name = _name_of(kind)
        if isinstance(value, Enum):
            return ["enum", name, value.name]
        if isinstance(value, tuple):
            return ["row", name, [self.write(one) for one in value]]
        return ["object", name, {field: self.write(getattr(value, field)) for field in fields_of(value)}]

    def _array(self, array: Array) -> Node:
        if array.dtype.hasobject:
            return ["objects", list(array.shape), [self.write(one) for one in array.reshape(-1).tolist()]]
        whole = array.base
        # A part is written as one: sums over it then run over the same places in memory.
        most = 2 * array.nbytes + FEW
        if type(whole) is np.ndarray and (id(whole) in self._places or whole.nbytes <= most):
            start = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
            return ["part", self.write(whole), array.dtype.str, start, list(array.shape), list(array.strides)]
        return ["array", self._keep(array), array.flags.writeable]

    def _keep(self, array: Array) -> int:
        if array.dtype.fields is not None:
            raise TypeError("an array of records")
        self.arrays.append(array if array.flags.forc else np.ascontiguousarray(array))
        return len(self.arrays) - 1


def _name_of(value: Any) -> str:
    name = f"{value.__module__}:{value.__qualname__}"
    if not value.__module__.startswith(PACKAGE) or "<" in name or _named(name) is not value:
        raise TypeError(name)
    return name


def _named(name: str) -> Any:
    module, _, path = name.partition(":")
    if not module.startswith(PACKAGE):
        raise TypeError(name)
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


class _StateReader:
    def __init__(self, nodes: Sequence[Node], arrays: Sequence[Array], outside: Mapping[str, object]) -> None:
        self._nodes, self._arrays, self._outside = nodes, arrays, outside
        self._made: dict[int, Any] = {}

    def read(self, told: Any) -> Any:
        """Return a plain value, or the one object of its place."""
        if not isinstance(told, list):
            return told
        (place,) = told
        if place not in self._made:
            tag, *rest = self._nodes[place]
            self._made[place] = self._make(place, tag, rest)
        return self._made[place]

    def _make(self, place: int, tag: str, rest: list[Any]) -> Any:
        match tag, rest:
            case "outside", [name]:
                return self._outside[name]
            case "list", [items]:  # may hold itself
                self._made[place] = made = list[Any]()
                made += [self.read(one) for one in items]
                return made
            case str(), [list() as items] if tag in SEQUENCES:
                return SEQUENCES[tag](self.read(one) for one in items)
            case "dict" | "Counter" | "mappingproxy", [items]:
                self._made[place] = table = Counter[Any]() if tag == "Counter" else dict[Any, Any]()
                table.update({self.read(k): self.read(v) for k, v in items})
                return types.MappingProxyType(table) if tag == "mappingproxy" else table
            case "bytes", [digits]:
                return bytes.fromhex(digits)
            case "array", [number, writeable]:
                self._arrays[number].flags.writeable = writeable
                return self._arrays[number]
            case "part", [whole, dtype, start, shape, strides]:
                base = self.read(whole)
                return np.ndarray(shape, dtype, base.reshape(-1, order="A").view(np.uint8), start, strides)
            case "objects", [shape, items]:
                held = np.empty(len(items), dtype=object)
                held[:] = [self.read(one) for one in items]
                return held.reshape(shape)
            case "number", [number]:
                return self._arrays[number][()]
            case "Fraction", [text]:
                return Fraction(text)
            case "lock", []:
                return Lock()
            case "x25519", [digits]:
                return X25519PrivateKey.from_private_bytes(bytes.fromhex(digits))
            case "generator", [name, state]:
                bits = getattr(np.random, name)()
                bits.state = self.read(state)
                return np.random.Generator(bits)
            case "partial", [function, arguments, keywords]:
                return functools.partial(self.read(function), *self.read(arguments), **self.read(keywords))
            case "named", [name]:
                return _named(name)
            case "enum", [name, member]:
                return _named(name)[member]
            case "row", [name, items]:
                return _named(name)(*map(self.read, items))
            case "object", [name, held]:
                return self._object(place, _named(name), held)
        raise TypeError(tag)

    def _object(self, place: int, kind: Any, held: Mapping[str, Any]) -> Any:
        self._made[place] = made = object.__new__(kind)
        for name, told in held.items():
            object.__setattr__(made, name, self.read(told))
        if hasattr(kind, "MADE_AGAIN"):
            made.make_again()
        return made


# ----------------------------------------------------------------------------------------------------
# Sessions that outlive the process of a site, beside its account on disk.
#
# ::
#
#     sessions/anchor           when the ledger was written last, under a key of the site's identity
#     sessions/<id>/state       what the site remembers of a session, and its latest answers (mode 0600)
#     sessions/<id>/<name>.part an array of a megabyte or more, written once for as long as it is used
#
# All is sealed by AES-GCM under keys of the site's identity. A state is written after every message, before
# its answers leave, and is of its place in the account: session, number of questions and head of the chain
# are associated data, so that only the state after the latest entry of the ledger opens. With an older one
# masks would serve twice, and the difference of two answers under the same masks is one of what the site
# hid. Ledger and state put back together would agree: the anchor has the time at which the operating system
# saw the ledger change, which nobody sets who writes files, and where it is another one no session is taken
# up. A snapshot of a whole disk that is put back has this time as well: remove the folder of sessions
# before the site runs again.
#
# Whoever reads the folder of the site has its identity, and with it what is kept here: the keys of the
# sessions of the last two weeks. A state is removed when its session is not asked for so long, when newer
# sessions have taken its place, or when anything does not fit, such as the version of fedstat: the session
# has then ended, as it would without being kept.

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
Answers: TypeAlias = dict[bytes, BundledReply]
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
                bytes.fromhex(digest): BundledReply(one.tobytes(), refused)
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

    def _write(self, chain: SessionChain, text: str, arrays: list[Array], answers: Answers) -> None:
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

    def _read(self, chain: SessionChain, path: Path) -> tuple[dict[str, Any], list[Array]]:
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
        return encode_parts("fedstat session 1", self._site.name, *place)

    def _chain(self, session: str) -> SessionChain | None:
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
            if place >= MAX_SESSIONS or now - path.stat().st_mtime > OLD:
                shutil.rmtree(path, ignore_errors=True)
                self._parts = {
                    session: parts for session, parts in self._parts.items() if self._place(session) != path
                }

    def _anchor(self) -> None:
        """Keep when the ledger was written last; not waited for, since without it sessions end."""
        stamp = json.dumps(self._store.stamp())
        mark = hmac.digest(self._key, encode_parts(ANCHOR, self._site.name, stamp), "sha256").hex()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
        with suppress(OSError), open(os.open(self.folder / ANCHOR, flags, 0o600), "w") as file:
            file.write(json.dumps([stamp, mark]))

    def _anchored(self) -> tuple[int, int] | None:
        try:
            stamp, mark = json.loads(read_private(self.folder / ANCHOR, 2 * LARGE))
            known = hmac.digest(self._key, encode_parts(ANCHOR, self._site.name, stamp), "sha256").hex()
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
            told = encode_parts(policy.to_toml(), to_json(dict(published)))
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
            return hmac.digest(self._key, encode_parts(told, file), "sha256").hex()
        # a frame is replaced where its rows come into another order, and a query's rows never
        held = table.frame if isinstance(table, FrameTable) else table
        if self._table[0] is not held:
            self._table = (
                held,
                hmac.digest(self._key, encode_parts(told, order_fingerprint(table)), "sha256").hex(),
            )
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


def _address(chain: SessionChain) -> tuple[str, ...]:
    """Place of a state in the account."""
    return chain.session, str(chain.ordinal), str(chain.round), chain.head
