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
from dataclasses import dataclass
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
from fedstat.federation.disclosure.state import State
from fedstat.federation.files import check_folder, read_private
from fedstat.federation.message import VERSION, BundledReply
from fedstat.federation.state_formats import ANCHOR as ANCHOR_FORMAT
from fedstat.federation.state_formats import NUMBER, SESSION
from fedstat.federation.tables.aligned_table import order_fingerprint
from fedstat.federation.tables.table import FrameTable, LabeledTable, Table
from fedstat.typing import Array

# ----------------------------------------------------------------------------------------------------
# Serialization of a site's session state as text and arrays, and back.
#
# A state holds dataclasses of model families, arrays, keys and counters. Each is written by its kind: plain
# values, lists and tables directly, objects of this package by class name and fields, arrays by type, shape
# and bytes. Reading runs no stored code and creates only objects of classes of this package. Objects of the
# site itself (its table, its identity, its policy) are stored as names and taken from the site that
# continues. An object that was in two places is one object again.

PACKAGE = "fedstat."
PLAIN = (types.NoneType, bool, int, float, str)
SEQUENCES: Mapping[str, Callable[[Any], Any]] = {
    kind.__name__: kind for kind in (tuple, frozenset, list, set, deque)
}
LOCK = type(Lock())
FEW = 2**16
"""Largest size in bytes of an array that is written as a whole with any part of it."""
Node: TypeAlias = list[Any]


def write_state(state: Any, outside: Mapping[str, object]) -> tuple[str, list[Array]]:
    """Write a state; objects from `outside` are stored as names.

    TypeError names a kind that cannot be written.
    """
    writer = _StateWriter(outside)
    root = writer.write(state)
    return json.dumps({"root": root, "nodes": writer.nodes}), writer.arrays


def read_state(text: str, arrays: Sequence[Array], outside: Mapping[str, object]) -> Any:
    """Read the output of :func:`write_state`; its text must be known to come from this site."""
    reported = json.loads(text)
    return _StateReader(reported["nodes"], arrays, outside).read(reported["root"])


def fields_of(value: object) -> Iterator[str]:
    """Names of an object's attributes that are written; those that its class recomputes are left out."""
    again = getattr(type(value), "RECOMPUTED", ())
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
        # A site has one of each; an older reference means the same object.
        self._kinds = {type(one): name for name, one in outside.items() if name in ("data", "identity")}
        self._places: dict[int, int] = {}
        self._alive: list[object] = []

    def write(self, value: Any) -> Any:
        """Return a plain value unchanged, and for other values their position in the list of objects."""
        if type(value) in PLAIN:
            return value
        if id(value) not in self._places:
            self._alive.append(value)  # so that its id is not used again
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
        complete = array.base
        # A slice is written as a slice, so that later sums use the same memory layout.
        most = 2 * array.nbytes + FEW
        if type(complete) is np.ndarray and (id(complete) in self._places or complete.nbytes <= most):
            start = array.__array_interface__["data"][0] - complete.__array_interface__["data"][0]
            return [
                "part",
                self.write(complete),
                array.dtype.str,
                start,
                list(array.shape),
                list(array.strides),
            ]
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

    def read(self, reported: Any) -> Any:
        """Return a plain value, or the one object of its position."""
        if not isinstance(reported, list):
            return reported
        (place,) = reported
        if place not in self._made:
            tag, *rest = self._nodes[place]
            self._made[place] = self._make(place, tag, rest)
        return self._made[place]

    def _make(self, place: int, tag: str, rest: list[Any]) -> Any:
        match tag, rest:
            case "outside", [name]:
                return self._outside[name]
            case "list", [items]:  # may contain itself
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
            case "part", [complete, dtype, start, shape, strides]:
                base = self.read(complete)
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
        for name, reported in held.items():
            object.__setattr__(made, name, self.read(reported))
        if hasattr(kind, "RECOMPUTED"):
            made.recompute()
        return made


# ----------------------------------------------------------------------------------------------------
# Sessions that outlive the process of a site, next to its ledger on disk.
#
# ::
#
#     sessions/anchor           time of the ledger's last change, under a key of the site's identity
#     sessions/<id>/state       the state of a session and its latest replies (mode 0600)
#     sessions/<id>/<name>.part an array of a megabyte or more, written once while it is used
#
# All files are encrypted by AES-GCM under keys of the site's identity. A state is written after every
# message, before its replies leave. It is tied to its place in the ledger: session, number of requests and
# head of the chain are associated data, so that only the state after the ledger's latest entry opens. With an
# older state masks would be used twice, and the difference of two replies under the same masks equals the
# difference of the masked values. A ledger and a state that are restored together would agree with each
# other. The anchor therefore has the time at which the operating system saw the ledger change, which a person
# who writes files cannot set. If this time differs, no session continues. A restored snapshot of a whole disk
# restores this time as well: remove the folder of sessions before the site runs again.
#
# A person who can read the folder of the site has its identity, and can read what is kept here: the keys of
# the sessions of the last two weeks. A state is removed when its session had no request for this time, when
# newer sessions replace it, or when anything differs, such as the version of fedstat. The session has then
# ended, as it would if nothing were kept.

SESSIONS, ANCHOR, STATE = "sessions", "anchor", "state"
CHANGES_DETECTED = os.name == "posix"
"""Whether the system reports the time of a file's change; without it a restored folder would go unnoticed."""
OLD = 14 * 24 * 3600.0
"""Seconds without a request after which a session is removed."""
LARGE, LARGEST = 2**20, 2**28
"""Bytes from which an array has its own file, and from which a state is not kept."""
NONCE, LENGTH_BYTES, LONGEST_ANCHOR = 12, 8, 4096
NAME = re.compile("[0-9a-f]{32}")
"""Pattern of the folders of sessions; no other folder is removed."""
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
"""Errors of a state that end its session, but not the service."""
KEPT = ("_items", "_counts", "_columns", "_facts", "reported", "used_columns", "last", "begun", "analysis")
"""Contents of a session's state between two requests."""
Answers: TypeAlias = dict[bytes, BundledReply]
"""Latest replies of a session by the digest of the request."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """Size of the ledger and time of its last change as JSON text, and their keyed digest."""

    stamp: str
    mark: str


class SessionFolder:
    """Sessions of a site whose ledger is a file."""

    def __init__(self, site: Site, store: LedgerFile) -> None:
        self._site, self._store = site, store
        self.folder = store.folder / SESSIONS
        self._seal = AESGCM(site.trust.identity.secret("sessions"))
        self._digest = AESGCM(site.trust.identity.secret("session parts"))
        self._key = site.trust.identity.secret("session names")
        self._parts: dict[str, set[str]] = {}
        self._not_reported = True
        self._table: tuple[object, str] = (None, "")
        self._rules_digest: tuple[object, object, str] = (None, None, "")
        # The folder must not be a link to another place, since files are removed here.
        check_folder(self.folder)
        with suppress(OSError):  # a full disk ends sessions, but not the service
            self.folder.mkdir(mode=0o700, exist_ok=True)
        if self._anchored() != store.found:
            for path in self._kept():
                shutil.rmtree(path, ignore_errors=True)
        self._remove_old()
        store.followed = self._anchor
        self._anchor()

    @classmethod
    def of(cls, site: Site) -> SessionFolder | None:
        """Return the store of a site; None for a ledger in memory, or without :data:`CHANGES_DETECTED`."""
        store = site.site_ledger.store
        return cls(site, store) if isinstance(store, LedgerFile) and CHANGES_DETECTED else None

    def keep(self, session: str, answers: Answers) -> None:
        """Write a session's state after a reply; a session that cannot be written ends with the process."""
        chain, state = self._site.site_ledger.find(session), self._site.states.get(session)
        # A session that has ended here replies with refusals and must not start again.
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
            if self._not_reported:
                self._not_reported = False
                self._site.refusals.note(
                    f"a session will end with this process, because its state cannot be written: {error}"
                )

    def take_up(self, session: str) -> dict[str, Answers]:
        """Continue a session of an earlier process; return its latest replies, or nothing if it has ended."""
        chain = self._site.site_ledger.find(session)
        path = self._place(session) / STATE
        if chain is None or not chain.resumed or not path.exists():
            return {}
        try:
            reported, arrays = self._read(chain, path)
            if (reported["version"], reported.get(NUMBER)) != (VERSION, SESSION.number):
                raise ValueError("it belongs to another version of fedstat")
            if reported["records"] != self._records():
                raise ValueError("the rows have changed")
            if reported["rules"] != self._rules():
                raise ValueError("policy or public description have changed")
            held = read_state(reported["state"], arrays[: reported["arrays"]], self._outside())
            packed = arrays[reported["arrays"] :]
            answers = {
                bytes.fromhex(digest): BundledReply(one.tobytes(), refused)
                for (digest, refused), one in zip(reported["answers"], packed, strict=True)
            }
        except (InvalidTag, *UNFIT) as error:
            self.remove(session)
            self._site.refusals.note(
                f"a session cannot continue: its stored state does not belong to its latest reply ({error})"
            )
            return {}
        state = State(self._site.name)
        for name, value in held.items():
            setattr(state, name, value)
        self._site.states[session] = state
        chain.resumed = False
        return {session: answers}

    def remove(self, session: str) -> None:
        """Remove the state of a session."""
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
                # The cipher's tag serves as a keyed digest, ten times as fast as another; it is not released.
                tag = self._digest.encrypt(bytes(NONCE), b"", content)
                part = hmac.digest(self._key, tag, "sha256").hex()[:32]
                used.add(part)
                if part not in known:
                    _write(place / f"{part}.part", self._sealed(content, "part", part))
            else:
                pieces.append(content)
            specs.append([array.dtype.str, list(array.shape), order, part])
        reported = {
            "state": text,
            "arrays": len(arrays),
            "specs": specs,
            "version": VERSION,
            NUMBER: SESSION.number,
            "answers": [[digest.hex(), refused] for digest, (_, refused) in answers.items()],
            "records": self._records(),
            "rules": self._rules(),
        }
        header = json.dumps(reported).encode()
        complete = len(header).to_bytes(LENGTH_BYTES, "little") + header + b"".join(pieces)
        _write(place / STATE, self._sealed(complete, *_address(chain)))
        for part in known - used:
            (place / f"{part}.part").unlink(missing_ok=True)
        self._parts[chain.session] = used
        self._remove_old()

    def _read(self, chain: SessionChain, path: Path) -> tuple[dict[str, Any], list[Array]]:
        content = self._opened(read_private(path), *_address(chain))
        place = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
        reported, arrays = json.loads(content[LENGTH_BYTES:place]), []
        for dtype, shape, order, part in reported["specs"]:
            if part:
                held = self._opened(read_private(path.with_name(f"{part}.part")), "part", part)
            else:
                size = math.prod(shape) * np.dtype(dtype).itemsize
                held, place = content[place : place + size], place + size
            arrays.append(np.frombuffer(held, dtype=dtype).reshape(shape, order=order).copy(order="K"))
        self._parts[chain.session] = {part for *_, part in reported["specs"] if part}
        return reported, arrays

    def _sealed(self, content: bytes | memoryview, *place: str) -> bytes:
        nonce = secrets.token_bytes(NONCE)
        return nonce + self._seal.encrypt(nonce, content, self._bound(*place))

    def _opened(self, sealed: bytes, *place: str) -> bytes:
        return self._seal.decrypt(sealed[:NONCE], sealed[NONCE:], self._bound(*place))

    def _bound(self, *place: str) -> bytes:
        return encode_parts("fedstat session 1", self._site.name, *place)

    def _place(self, session: str) -> Path:
        return self.folder / hmac.digest(self._key, session.encode(), "sha256").hex()[:32]

    def _kept(self) -> list[Path]:
        """Return the folders of sessions, the newest first."""
        there = self.folder.iterdir() if self.folder.exists() else ()
        found = [path for path in there if NAME.fullmatch(path.name) and not path.is_symlink()]
        return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)

    def _remove_old(self) -> None:
        """Remove sessions without recent requests, and those that newer sessions replace."""
        now = time.time()
        held = {self._place(session) for session in self._site.states}
        kept = sorted(self._kept(), key=lambda path: path not in held)  # those of this process stay
        for place, path in enumerate(kept):
            if place >= self._site.max_sessions or now - path.stat().st_mtime > OLD:
                shutil.rmtree(path, ignore_errors=True)
                self._parts = {
                    session: parts for session, parts in self._parts.items() if self._place(session) != path
                }

    def _anchor(self) -> None:
        """Store the time of the ledger's last change, without waiting: a missing time only ends sessions."""
        stamp = json.dumps(self._store.stamp())
        mark = hmac.digest(self._key, encode_parts(ANCHOR, self._site.name, stamp), "sha256").hex()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
        with suppress(OSError), open(os.open(self.folder / ANCHOR, flags, 0o600), "w") as file:
            file.write(ANCHOR_FORMAT.write_record(Anchor(stamp, mark)))

    def _anchored(self) -> tuple[int, int] | None:
        try:
            text = read_private(self.folder / ANCHOR, LONGEST_ANCHOR)
            held = ANCHOR_FORMAT.read_record(Anchor, text, ANCHOR)
            known = hmac.digest(self._key, encode_parts(ANCHOR, self._site.name, held.stamp), "sha256").hex()
            size, changed = json.loads(held.stamp)
        except (OSError, ValueError, TypeError, AttributeError, FedstatError):
            return None
        return (size, changed) if hmac.compare_digest(held.mark, known) else None

    def _outside(self) -> Mapping[str, object]:
        data = self._site.data
        table = data.table.table if isinstance(data.table, LabeledTable) else data.table
        named = {
            "data": data,
            "identity": data.trust.identity,
            "trust": data.trust,
            "policy": data.policy,
            "account": data.site_ledger,
            "approvals": data.approvals,
            "published": data.published,
            "table": data.table,
            "inner table": table,
        }
        return named | ({"frame": table.frame} if isinstance(table, FrameTable) else {})

    def _rules(self) -> str:
        """Return the digest of policy and public description, under which states were written."""
        policy, published = self._site.policy, self._site.published
        if self._rules_digest[0] is not policy or self._rules_digest[1] is not published:
            reported = encode_parts(policy.to_toml(), to_json(dict(published)))
            self._rules_digest = policy, published, hmac.digest(self._key, reported, "sha256").hex()
        return self._rules_digest[2]

    def _records(self) -> str:
        """Return a keyed digest of the rows in memory, in order, and of the file facts of other sources."""
        outer: Table = self._site.data.table
        table = outer.table if isinstance(outer, LabeledTable) else outer
        reported = json.dumps([table.n_rows, list(table.columns)]).encode()
        if (path := getattr(table, "path", None)) is not None:
            stat = Path(path).stat()
            file = json.dumps([stat.st_size, stat.st_mtime_ns]).encode()
            return hmac.digest(self._key, encode_parts(reported, file), "sha256").hex()
        # a table is replaced when the order of its rows changes; the rows of a query never change
        held = table.frame if isinstance(table, FrameTable) else table
        if self._table[0] is not held:
            self._table = (
                held,
                hmac.digest(self._key, encode_parts(reported, order_fingerprint(table)), "sha256").hex(),
            )
        return self._table[1]


def _write(path: Path, content: bytes) -> None:
    """Write a file as a whole without waiting for the disk; a power failure then ends a session."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _address(chain: SessionChain) -> tuple[str, ...]:
    """Return the place of a state in the ledger."""
    return chain.session, str(chain.ordinal), str(chain.round), chain.head
