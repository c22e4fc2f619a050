"""Conversion of dataclasses to plain values and JSON and back, checked against the types of their fields.

A record is a dataclass or a named tuple. Plain values are those of JSON and TOML: texts, numbers, truth
values, lists and tables of these. Nothing in them is executed. Every value is checked against the type of its
field: a message or a file from an untrusted sender becomes a record, or an error that names the field but
never its value.

====================================  =========================================================
field                                 plain
====================================  =========================================================
dataclass                             table of its fields, without those that ``__init__`` lacks
named tuple                           list of its fields
str, int, float, bool, None, Literal  itself; a float may be written as a whole number
bytes                                 hexadecimal digits
tuple, list, Sequence                 list
Mapping, dict                         table; keys are texts, or whole numbers as texts
union                                 that of the first member that fits
array                                 its name among the separate arrays
Any                                   any plain values
====================================  =========================================================

``Annotated[Floats, "K p"]`` fixes the shape of an array, ``Annotated[tuple[Site, ...], "K"]`` the length of a
list: a letter means the same number in the complete record. ``Annotated[int, Least(1)]`` is at least 1. A
record with a method ``check()`` checks itself after reading.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from operator import itemgetter
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from fedstat.errors import FedstatError, MessageError
from fedstat.typing import Array

T = TypeVar("T")
MAX_DEPTH = 20
"""Largest depth of plain values without a declared type."""
SHOWN = 60
"""Characters of an external name that an error shows."""
LONGEST = 16
"""Digits of an integer that is the key of a table."""
EXACT = 2**53
"""Largest integer up to which all integers are exact floats."""
SCALARS = (str, bool, int, float, types.NoneType)
WORDS: Mapping[type, str] = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    types.NoneType: "nothing",
    list: "a list",
    dict: "a table",
    bytes: "hexadecimal digits",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Minimum:
    """The smallest number that a field may have."""

    number: float


class _DecodeError(ValueError):
    """A plain value does not fit the type of its field."""


def to_plain(record: Any, arrays: dict[str, Array] | None = None) -> Any:
    """Convert a record to plain values; its arrays go to `arrays`, named by their position in the record."""
    return _Writer(arrays).write(record, "")


def from_plain(
    kind: type[T],
    plain: Any,
    where: str,
    error: type[FedstatError] = MessageError,
    *,
    defaults: bool = False,
    arrays: Mapping[str, Array] | None = None,
) -> T:
    """Rebuild a record from untrusted plain values; numbers are restored exactly.

    `plain` is the output of :func:`to_plain`, or the content of a JSON or TOML file. `where` names the source
    in the `error`, which is raised if a field is absent, unknown, or of another type, or if an array is
    absent, unused, or of another shape. With `defaults`, fields with a default may be missing. The record has
    to use all `arrays`; without arrays, numbers have to be finite.
    """
    reader = _Reader(arrays or {}, defaults, finite=arrays is None)
    try:
        record: T = reader.read(kind, plain, "")
    except FedstatError:
        raise
    except (ValueError, TypeError, ArithmeticError) as problem:
        # Only messages from this file contain no values.
        reported = str(problem) if isinstance(problem, _DecodeError) else "its parts do not belong together"
        raise error(f"{where}: {reported}") from problem
    if unknown := reader.arrays.keys() - reader.used:
        raise error(f"{where}: unknown arrays: {_names(sorted(unknown))}")
    return record


def to_json(record: Any) -> str:
    """Write a record without arrays as JSON text."""
    return json.dumps(to_plain(record), allow_nan=False)


def from_json(
    kind: type[T],
    text: str | bytes,
    where: str,
    error: type[FedstatError] = MessageError,
    *,
    defaults: bool = False,
) -> T:
    """Rebuild a record without arrays from JSON text; see :func:`from_plain`."""
    try:
        plain = json.loads(text)
    except (ValueError, TypeError, RecursionError) as problem:
        raise error(f"{where}: not JSON") from problem
    return from_plain(kind, plain, where, error, defaults=defaults)


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return the type of every field, and whether it has a default."""
    hints = get_type_hints(kind, include_extras=True)
    if not dataclasses.is_dataclass(kind):
        return {name: (hints[name], False) for name in kind._fields}
    none = dataclasses.MISSING
    return {
        f.name: (hints[f.name], f.default is not none or f.default_factory is not none)
        for f in dataclasses.fields(kind)
        if f.init
    }


def _names(found: Any) -> str:
    return ", ".join(f"'{str(name)[:SHOWN]}'" for name in list(found)[:5])


@dataclasses.dataclass(frozen=True, slots=True)
class _Writer:
    """Converts values to plain ones; arrays go to `arrays`, if arrays are allowed."""

    arrays: dict[str, Array] | None

    def write(self, value: Any, place: str) -> Any:
        kind: Any = type(value)
        match value:
            case np.generic():
                return value.item()
            case None | bool() | int() | float() | str():
                return value
            case bytes():
                return value.hex()
            case Fraction():
                return str(value)
            case np.ndarray() if self.arrays is not None:
                return self._keep(value, place)
            case Mapping():
                return self._table(value, place)
            case list() | tuple():
                return self._list(value, place)
        if dataclasses.is_dataclass(value):
            return {n: self.write(getattr(value, n), _inside(place, n)) for n in _fields(kind)}
        raise TypeError(f"{place}: a {kind.__name__} has no plain form")

    def _keep(self, array: Array, place: str) -> str:
        assert self.arrays is not None
        while place in self.arrays:  # names of sites may contain any character, including dots
            place += "'"
        self.arrays[place] = array
        return place

    def _list(self, values: Any, place: str) -> list[Any]:
        return [self.write(value, f"{place}[{i}]") for i, value in enumerate(values)]

    def _table(self, values: Mapping[Any, Any], place: str) -> dict[str, Any]:
        if not all(type(key) in (str, int) for key in values):
            raise TypeError(f"{place}: keys must be texts or whole numbers")
        return {str(key): self.write(value, _inside(place, str(key))) for key, value in values.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """Rebuilds values by the types of fields.

    `used` are the arrays that were read, `sizes` the values of the letters of shapes so far.
    """

    arrays: Mapping[str, Array]
    defaults: bool
    finite: bool
    missing: list[int] = dataclasses.field(default_factory=lambda: [0])
    used: set[str] = dataclasses.field(default_factory=set)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)

    def read(self, kind: Any, plain: Any, place: str) -> Any:
        method, argument = _method(kind)
        return method(self, argument, plain, place)

    def _record(self, kind: Any, plain: Any, place: str) -> Any:
        fields = _fields(kind)
        table = _require(dict, plain, place)
        lacking = [
            name for name, (_, has) in fields.items() if name not in table and not (has and self.defaults)
        ]
        unknown = [name for name in table if name not in fields]
        if unknown:
            raise _DecodeError(
                f"{_place(place)}unknown entry {_names(unknown)}; known are {', '.join(fields)}"
            )
        if lacking:
            raise _DecodeError(f"{_place(place)}lacks {', '.join(lacking)}; known are {', '.join(fields)}")
        self.missing[0] += len(fields) - len(table)
        values = {n: self.read(fields[n][0], v, _inside(place, n)) for n, v in table.items()}
        record = kind(**values)
        if hasattr(record, "check"):
            record.check()
        return record

    def _row(self, kind: Any, plain: Any, place: str) -> Any:
        return kind._make(self._several([hint for hint, _ in _fields(kind).values()], plain, place))

    def _scalar(self, kind: Any, plain: Any, place: str) -> Any:
        # Other programs may write 2.0 as 2 in JSON; beyond EXACT the number would change.
        if kind is float and type(plain) is int and abs(plain) <= EXACT:
            plain = float(plain)
        # True is an int to isinstance, and 1 == True: so types are compared directly everywhere here.
        if kind is str and not is_text(plain):
            raise _decode_error(WORDS[str], plain, place)
        if type(plain) is not kind or (self.finite and kind is float and not math.isfinite(plain)):
            raise _decode_error(WORDS[kind], plain, place)
        return plain

    def _fraction(self, _: Any, plain: Any, place: str) -> Fraction:
        return Fraction(self._scalar(str, plain, place))

    def _bytes(self, _: Any, plain: Any, place: str) -> bytes:
        try:
            return bytes.fromhex(plain)
        except (TypeError, ValueError):
            raise _decode_error(WORDS[bytes], plain, place) from None

    def _any(self, _: Any, plain: Any, place: str, depth: int = 0) -> Any:
        """Require finite numbers, texts and truth values in lists and tables."""
        if depth > MAX_DEPTH:
            raise _DecodeError(f"{_place(place)}more than {MAX_DEPTH} levels deep")
        if isinstance(plain, dict):
            return {
                self._scalar(str, k, place): self._any(Any, v, place, depth + 1) for k, v in plain.items()
            }
        if isinstance(plain, list):
            return [self._any(Any, value, place, depth + 1) for value in plain]
        if type(plain) not in SCALARS:
            raise _decode_error("plain values", plain, place)
        return self._scalar(type(plain), plain, place)

    def _array(self, arguments: tuple[Any, ...], plain: Any, place: str) -> Array:
        name = _require(str, plain, place)
        if name not in self.arrays:
            raise _DecodeError(f"{_place(place)}its array is absent")
        array = self.arrays[name]
        self.used.add(name)
        (wanted,) = get_args(arguments[1])
        if wanted is not Any and array.dtype != np.dtype(wanted):
            raise _DecodeError(
                f"{_place(place)}expected an array of {np.dtype(wanted)}, received {array.dtype}"
            )
        return array

    def _list(self, arguments: tuple[Any, ...], plain: Any, place: str) -> list[Any]:
        kinds = [arguments[0]] * len(_require(list, plain, place))
        return self._several(kinds, plain, place)

    def _tuple(self, arguments: tuple[Any, ...], plain: Any, place: str) -> tuple[Any, ...]:
        read = self._list if arguments[1:] in ((), (...,)) else self._several
        return tuple(read(arguments, plain, place))

    def _several(self, kinds: Sequence[Any], plain: Any, place: str) -> list[Any]:
        values = _require(list, plain, place)
        if len(values) != len(kinds):
            raise _DecodeError(f"{_place(place)}expected {len(kinds)} entries, received {len(values)}")
        return [self.read(k, v, f"{place}[{i}]") for i, (k, v) in enumerate(zip(kinds, values, strict=True))]

    def _mapping(self, arguments: tuple[Any, ...], plain: Any, place: str) -> dict[Any, Any]:
        key, value = arguments
        table = _require(dict, plain, place)
        return {self._key(key, k, place): self.read(value, v, _inside(place, k)) for k, v in table.items()}

    def _key(self, kind: Any, key: str, place: str) -> Any:
        if kind is int:
            if not (key.isascii() and key.isdecimal() and len(key) < LONGEST):
                raise _decode_error("keys that are whole numbers", key, place)
            return int(key)
        return self.read(kind, key, place)

    def _union(self, arguments: tuple[Any, ...], plain: Any, place: str) -> Any:
        if type(plain) in arguments:  # for int | float, the type as it was written
            return self.read(type(plain), plain, place)
        found, read = list[_DecodeError](), list[tuple[int, Any]]()
        before = self.missing[0]
        for kind in arguments:
            self.missing[0] = 0
            try:
                value = self.read(kind, plain, place)
            except _DecodeError as error:
                found.append(error)
                continue
            read.append((self.missing[0], value))
            if not self.missing[0]:
                break
        if not read:
            raise found[0]
        fewest, value = min(read, key=itemgetter(0))  # records may differ in fields with a default alone
        self.missing[0] = before + fewest
        return value

    def _literal(self, arguments: tuple[Any, ...], plain: Any, place: str) -> Any:
        for value in arguments:
            if type(value) is type(plain) and value == plain:
                return value
        raise _decode_error("one of " + ", ".join(map(repr, arguments)), plain, place)

    def _annotated(self, arguments: tuple[Any, ...], plain: Any, place: str) -> Any:
        kind, *notes = arguments
        value = self.read(kind, plain, place)
        for note in notes:
            if isinstance(note, Minimum) and value is not None and value < note.number:
                raise _DecodeError(f"{_place(place)}expected at least {note.number:g}")
            if isinstance(note, str) and value is not None:
                self._check_shape(value, note, place)
        return value

    def _check_shape(self, value: Any, letters: str, place: str) -> None:
        shape = value.shape if isinstance(value, np.ndarray) else (len(value),)
        names = letters.split()
        known = [
            int(name) if name.isdecimal() else self.sizes.setdefault(name, length)
            for name, length in zip(names, shape, strict=False)
        ]
        if len(names) != len(shape) or tuple(known) != shape:
            raise _DecodeError(f"{_place(place)}expected the shape ({', '.join(names)}), received {shape}")


_BY_ORIGIN: Mapping[Any, Callable[[_Reader, tuple[Any, ...], Any, str], Any]] = {
    Annotated: _Reader._annotated,
    Literal: _Reader._literal,
    Union: _Reader._union,
    types.UnionType: _Reader._union,
    np.ndarray: _Reader._array,
    tuple: _Reader._tuple,
    list: _Reader._list,
    Sequence: _Reader._tuple,
    dict: _Reader._mapping,
    Mapping: _Reader._mapping,
}


def is_text(plain: object) -> bool:
    """Return whether a value is a text that can be written: JSON may have half characters, UTF-8 may not."""
    if not isinstance(plain, str):
        return False
    try:
        plain.encode()
    except UnicodeEncodeError:
        return False
    return True


def _require(kind: type, plain: Any, place: str) -> Any:
    if type(plain) is not kind:
        raise _decode_error(WORDS[kind], plain, place)
    return plain


def _decode_error(expected: str, plain: Any, place: str) -> _DecodeError:
    received = WORDS.get(type(plain), "something else")
    reported = f"received {received}" if received != expected else "received another one"
    return _DecodeError(f"{_place(place)}expected {expected}, {reported}")


def _inside(place: str, name: str) -> str:
    return f"{place}.{name[:SHOWN]}" if place else name[:SHOWN]


def _place(place: str) -> str:
    return f"'{place}': " if place else ""


@cache
def _method(kind: Any) -> tuple[Callable[[_Reader, Any, Any, str], Any], Any]:
    """Return the method of a reader that reads a type, and its first argument."""
    if (origin := get_origin(kind)) in _BY_ORIGIN:
        return _BY_ORIGIN[origin], get_args(kind)
    if kind is Any or kind is bytes:
        return (_Reader._any if kind is Any else _Reader._bytes), kind
    if kind in SCALARS:
        return _Reader._scalar, kind
    if kind is Fraction:
        return _Reader._fraction, kind
    if dataclasses.is_dataclass(kind):
        return _Reader._record, kind
    if hasattr(kind, "_fields"):
        return _Reader._row, kind
    raise NotImplementedError(f"no reader of {kind}")
