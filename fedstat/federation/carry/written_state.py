"""What a site remembers of a session, as text and arrays, and back.

A state holds records of families, arrays, keys and counters. Each is written by its kind: plain values, lists
and tables as they are, objects of this package by the name of their class and their fields, arrays by type,
shape and bytes. Nothing in what is written runs, and no other class than those of this package is made of it.
What belongs to the site itself (its table, its identity, its policy) is named, and taken from the site that
goes on. Two places that hold one object hold one object again.
"""

from __future__ import annotations

import functools
import importlib
import json
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from fractions import Fraction
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedstat.typing import Array

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
