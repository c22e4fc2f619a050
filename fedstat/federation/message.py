"""Messages: requests, replies and bundles of them, packed to bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import safetensors

from fedstat import errors
from fedstat.codec import is_text
from fedstat.errors import DoorError, FedstatError, MessageError, PolicyError
from fedstat.typing import Array

# ----------------------------------------------------------------------------------------------------
# Asks and replies: a step name and named arrays, packed to bytes.
#
# The wire format is safetensors: a JSON header and flat little-endian arrays. It holds no code and no
# objects, and its reader checks every length before it touches memory.

ArrayKind: TypeAlias = Literal[
    "control",
    "schema",
    "presence",
    "sealed",
    "masked share",
    "noisy aggregate",
    "aggregate",
    "sketch",
    "per entity",
    "raw columns",
]
"""What sort of information an array carries, from harmless to disclosing.

``control``      the coordinator's own choices and scalars of the iteration
``schema``       names, types, levels and counts
``presence``     which entities an institution has (taken as agreed between the institutions)
``sealed``       meant for one other institution, and hidden from who carries it
``masked share`` random by itself; with the other institution's share, a sum over many entities
``noisy aggregate`` a sum with noise that a privacy budget was charged for
``aggregate``    a sum over many entities
``per entity``   one number per entity that is a function of its values
``sketch``       random combinations of many entities' rows
``raw columns``  the values themselves
"""

VERSION = version("fedstat")
RUNS = f"fedstat {VERSION}"
MESSAGES = 1
"""What questions and answers mean: raised when two versions of fedstat no longer understand each other."""
HEADER = "fedstat"
DTYPES: dict[np.dtype[Any], str] = {
    np.dtype(np.int64): "I64",
    np.dtype(np.float64): "F64",
    np.dtype(np.uint8): "U8",
    np.dtype(np.bool_): "BOOL",
}
"""Numbers and truth values; bytes for what is sealed. In the order of safetensors, by its names."""
_TYPES = {name: dtype for dtype, name in DTYPES.items()}
_PLACES = {dtype: place for place, dtype in enumerate(DTYPES)}
_sorted = json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode
_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


COUNTED: tuple[ArrayKind, ...] = ("masked share", "noisy aggregate", "aggregate", "sketch")
"""Kinds of values that must rest on enough entities."""


@dataclass(frozen=True, slots=True)
class ArrayDeclaration:
    """What an array that passes a door is: declared where the step is defined.

    What is released without `behind`, and a value per entity that comes in without `weighs`, does not
    install: a step cannot forget a guard, since there is none to call. It declares what the door shall hold
    against the owner's policy.

    Parameters
    ----------
    kind : Kind
        See :data:`Kind`.
    what : str
        The array in the words of the field, for the ledger.
    ndim : int
        Number of dimensions that the door insists on.
    maskable : bool
        Whether the coordinator needs only the sum over institutions, so that pairwise masks may hide
        each institution's own contribution.
    optional : bool
        Whether the array may be left out.
    dtype : str
        Type that the door insists on; any where empty.
    wide : bool
        Whether a masked sum carries it in six words a number, for sums in any units.
    behind : tuple of types
        Of what a step gives: the facts (:mod:`fedstat.federation.disclosure.facts`) that stand behind it:
        what counts its entities, which columns and which weights. The step, or one whose work it uses, tells
        them, and the door has judged each of them before the array leaves.
    weighs : str or None
        Of what a step takes: in words, the weights of rows that it is, "residuals" for instance; the door
        holds them against the rule on weights before the answer leaves. Empty: it weighs no rows.
    common : bool
        Of what a step takes: it is the same at every site, and masks hide nothing but from who told sites
        different ones: these do not cancel.
    noisy : bool
        Of what a step gives: it leaves with noise that the door adds and charges to the site's privacy
        budget, and in no other way; see :mod:`fedstat.federation.disclosure.privacy_budget`.
    unpaid : str
        Of what a step gives: why it leaves under a privacy budget as it is. What the guarantee takes as
        public, or what is sealed and serves a share that leaves with noise.
    sensitivity : float or None
        By how much the array's Euclidean length changes at most where one entity's record is replaced; None:
        nothing bounds it, and no mechanism can be put before it.
    """

    kind: ArrayKind
    what: str
    ndim: int = 1
    maskable: bool = False
    optional: bool = False
    dtype: str = ""
    wide: bool = False
    behind: tuple[type, ...] = ()
    weighs: str | None = None
    common: bool = False
    sensitivity: float | None = None
    noisy: bool = False
    unpaid: str = ""


control = partial(ArrayDeclaration, "control")
schema = partial(ArrayDeclaration, "schema")
presence = partial(ArrayDeclaration, "presence")
aggregate = partial(ArrayDeclaration, "aggregate")
per_entity = partial(ArrayDeclaration, "per entity")
"""Declarations by kind: ``aggregate("sums of the columns", 2)``."""


@dataclass(frozen=True, slots=True)
class Step:
    """One question that a family may ask a site.

    Parameters
    ----------
    run : callable
        ``run(data, state, **arrays) -> {name: array}``, or, where a text is declared,
        ``run(data, state, text, **arrays) -> ({name: array}, text)``.
    takes, gives : mapping of str to Declared
        The arrays that come in and go out.
    text_in, text_out : Declared, optional
        What a plain JSON text that travels along says, either way.
    after : frozenset of str, optional
        Steps of the family of which one stands directly before it in a session; None: it may come at any
        time. See :mod:`fedstat.federation.disclosure.protocol_order`.
    begins : bool
        Every fit begins with it: what the session was told before, and in which order, no longer counts.
    prepares : bool
        It agrees on columns and entities, so that there can be a plan to consent to, and is asked before one.
    public : bool
        Whether it reads no row: what it gives, and whether it gives it, follows from the question, from keys,
        and from what the site's owner has published or keeps account of.
    """

    run: Callable[..., Any]
    takes: Mapping[str, ArrayDeclaration] = field(default_factory=dict)
    gives: Mapping[str, ArrayDeclaration] = field(default_factory=dict)
    text_in: ArrayDeclaration | None = None
    text_out: ArrayDeclaration | None = None
    after: frozenset[str] | None = None
    begins: bool = False
    public: bool = False
    prepares: bool = False

    @property
    def given(self) -> dict[str, ArrayDeclaration]:
        """Arrays of an answer, and its text."""
        return {**self.gives, **({} if self.text_out is None else {"text": self.text_out})}


@dataclass(frozen=True, slots=True)
class Request:
    """One question to one site: which of the installed steps of a family it shall run, on which arrays.

    Arrays are float64, int64, bool or uint8; the text is JSON, for steps that declare one. `session` keeps
    the local state of one fit apart from another's. `masked` is the round whose masks shall hide the maskable
    arrays of the answer; None: they come in clear. `turn` counts the questions to this site in this session,
    from 1, since a site in another process answers each once; None within one process.
    """

    site: str
    family: str
    step: str
    arrays: Mapping[str, Array] = field(default_factory=dict)
    session: str = ""
    text: str = ""
    masked: int | None = None
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What one site released: arrays, a schema as JSON, and the number of its entities behind the arrays."""

    site: str
    arrays: Mapping[str, Array]
    text: str = ""
    entities: int = 0

    @property
    def released(self) -> list[str]:
        """Names of its arrays, and of its text where there is one."""
        return [*self.arrays, *(["text"] if self.text else [])]


@dataclass(frozen=True, slots=True)
class InstalledVersion:
    """What an institution runs: its version of fedstat and of the messages, and the families installed.

    One from before versions were told has none.
    """

    version: str = ""
    messages: int = 0
    families: tuple[str, ...] = ()


REFUSALS: Mapping[str, type[FedstatError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, FedstatError)
}
"""Errors that travel, by name."""


def pack(header: Mapping[str, str], arrays: Mapping[str, Array]) -> bytes:
    """Pack a header of strings and named arrays.

    A MessageError where an array is not float64, int64, bool or uint8.
    """
    values = {name: np.asarray(array) for name, array in arrays.items()}
    for name, value in values.items():
        _check_type(name, value)
    # In one entry: several come out in any order, and the same message must be the same bytes.
    text = _sorted(dict(header))
    content: dict[str, Any] = {"__metadata__": {HEADER: text}}
    pieces, end = [], 0
    # Written here, byte for byte as safetensors does, in half of its time; it reads every message.
    for name in sorted(values, key=lambda name: (_PLACES[values[name].dtype], name)):
        value, begin = values[name], end
        end += value.nbytes
        content[name] = {"dtype": DTYPES[value.dtype], "shape": value.shape, "data_offsets": (begin, end)}
        pieces.append(value.tobytes())
    head = _compact(content).encode()
    head = head.ljust(-(-len(head) // 8) * 8)
    return b"".join([len(head).to_bytes(8, "little"), head, *pieces])


def unpack(data: bytes) -> tuple[dict[str, str], dict[str, Array]]:
    """Read header and arrays that :func:`pack` wrote; a MessageError where the bytes are no such message."""
    try:
        tensors: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        arrays = {
            name: np.frombuffer(tensor["data"], _TYPES[tensor["dtype"]]).reshape(tensor["shape"])
            for name, tensor in tensors
        }
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][HEADER])
    except (
        safetensors.SafetensorError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise MessageError(f"{len(data)} bytes that are not a fedstat message") from error
    if not isinstance(header, dict) or not all(map(is_text, header.values())):
        raise MessageError(f"{len(data)} bytes that are not a fedstat message")
    for name, array in arrays.items():
        _check_type(name, array)
    return header, arrays


def _check_type(name: str, array: Array) -> None:
    if array.dtype not in DTYPES:
        raise MessageError(
            f"array '{name}' is of type {array.dtype}; messages carry {', '.join(map(str, DTYPES))} only"
        )


def pack_request(ask: Request) -> bytes:
    """Bytes of an ask."""
    header = {"site": ask.site, "family": ask.family, "step": ask.step, "session": ask.session}
    masked, turn = ("" if number is None else str(number) for number in (ask.masked, ask.turn))
    return pack(header | {"text": ask.text, "masked": masked, "turn": turn}, ask.arrays)


def unpack_request(data: bytes) -> Request:
    """Read an ask; see :func:`unpack` for what is raised."""
    header, arrays = unpack(data)
    fields = ("site", "family", "step", "session", "text", "masked", "turn")
    missing = [k for k in fields if k not in header]
    if missing:
        raise MessageError(f"a message that is not an ask: it lacks {', '.join(missing)}")
    masked, turn = _whole(header, "masked"), _whole(header, "turn")
    plain = {name: header[name] for name in ("site", "family", "step", "session", "text")}
    return Request(**plain, arrays=arrays, masked=masked, turn=turn)


@dataclass(frozen=True)
class RequestMessage:
    """A packed request; it is unpacked once, however many readers it has."""

    packed: bytes

    @cached_property
    def request(self) -> Request:
        """The request; see :func:`unpack_request` for the errors."""
        return unpack_request(self.packed)


def _whole(header: Mapping[str, str], name: str) -> int | None:
    """Whole number of a header; None for none."""
    text = header[name]
    if text and not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise MessageError(f"a message that is not an ask: '{name}' is no number")
    return int(text) if text else None


def pack_reply(reply: Reply) -> bytes:
    """Bytes of a reply."""
    header = {"site": reply.site, "text": reply.text, "entities": str(reply.entities)}
    return pack(header, reply.arrays)


def pack_refusal(site: str, error: FedstatError) -> bytes:
    """Bytes of an error that a site answers with; its text is what the analyst reads."""
    header = {"site": site, "refusal": type(error).__name__, "text": str(error)}
    rule = error.rule if isinstance(error, PolicyError) else ""
    return pack(header | ({"rule": rule} if rule else {}), {})


def unpack_reply(data: bytes) -> Reply:
    """Read a reply; where it is a refusal, raise the error that the site raised.

    For bytes that are no message see :func:`unpack`.
    """
    header, arrays = unpack(data)
    if "refusal" in header:
        kind, text = (
            REFUSALS.get(header["refusal"], DoorError),
            header.get("text", "refused without a reason"),
        )
        if issubclass(kind, PolicyError):
            raise kind(text, rule=header.get("rule", ""), site=header.get("site", ""))
        raise kind(text)
    if not {"site", "text", "entities"} <= header.keys() or not header["entities"].isdecimal():
        raise MessageError("a message that is not a reply: it lacks its site, text or entities")
    return Reply(header["site"], arrays, header["text"], int(header["entities"]))


def check_arrays(where: str, declared: Mapping[str, ArrayDeclaration], arrays: Mapping[str, Array]) -> None:
    """Hold arrays against their declaration; `where` names site and step.

    A MessageError tells of a missing, unknown, misshapen or non-finite array.
    """
    unknown = sorted(arrays.keys() - declared.keys())
    missing = sorted(k for k in declared.keys() - arrays.keys() if not declared[k].optional)
    if unknown or missing:
        raise MessageError(
            f"{where}: expected arrays {sorted(declared)}; "
            + "; ".join(
                f"{word} {names}" for word, names in (("missing", missing), ("unknown", unknown)) if names
            )
        )
    for name, array in arrays.items():
        if array.ndim != declared[name].ndim:
            raise MessageError(
                f"{where}: array '{name}' has {array.ndim} dimensions, expected {declared[name].ndim}"
            )
        if declared[name].dtype and array.dtype != declared[name].dtype:
            raise MessageError(
                f"{where}: array '{name}' is of type {array.dtype}, expected {declared[name].dtype}"
            )
        # Neither way: inside a site NaN passes comparisons, and leaving it shows where values are missing.
        if array.dtype == np.float64 and not np.isfinite(array).all():
            raise MessageError(f"{where}: array '{name}' holds values that are not finite")


FEW_NUMBERS, MOST_NUMBERS = 2**23, 2**26
"""Numbers that any question may have a site allocate, 64 megabytes, and that none may, half a gigabyte."""
NUMBERS_A_VALUE = 32


def check_allocation(where: str, numbers: int, values: int) -> None:
    """Hold what a question makes a site allocate against the values that the site has, before it does.

    A MessageError: a shape is a few bytes, and names any number.
    """
    if not 0 <= numbers <= min(MOST_NUMBERS, max(FEW_NUMBERS, NUMBERS_A_VALUE * values)):
        raise MessageError(
            f"{where}: asked for {numbers:,} numbers at once, more than there is room for beside its "
            "rows. Use fewer columns, folds or rows of a sketch, or merge small patterns"
        )


def check_lengths(where: str, **pairs: tuple[Array, int]) -> None:
    """Hold the lengths of arrays against what a site knows: compiled loops do not check their bounds.

    A MessageError names the array, its length and the expected one.
    """
    for name, (array, length) in pairs.items():
        if len(array) != length:
            raise MessageError(f"{where}: array '{name}' has {len(array)} rows, expected {length}")


# ----------------------------------------------------------------------------------------------------
# Several questions to one site in one message, and its answers in one.
#
# A site answers them one by one, in their order, each as if it had come alone. After a refusal it answers
# no other: the bundle of answers ends with the refusal, and what was answered before it counts.
#
# A bundle is a magic word, and each message with its length before it. No single message begins with the
# word.

MAGIC = b"fedstat bundle 1\n"
LENGTH_BYTES = 8


class BundledReply(NamedTuple):
    """An answer as it leaves, and whether it is a refusal."""

    packed: bytes
    refused: bool = False


def is_bundle(message: bytes) -> bool:
    """Whether a message is of several."""
    return message.startswith(MAGIC)


def bundle(messages: Sequence[bytes]) -> bytes:
    """Put messages into one; one alone stays what it is."""
    if len(messages) == 1:
        return messages[0]
    return MAGIC + b"".join(len(one).to_bytes(LENGTH_BYTES, "little") + one for one in messages)


def unbundle(message: bytes) -> list[bytes]:
    """Take the messages out of one; a MessageError where they are not whole."""
    return list(_parts(message)) if is_bundle(message) else [message]


def _parts(message: bytes) -> Iterator[bytes]:
    place = len(MAGIC)
    while place < len(message):
        begin = place + LENGTH_BYTES
        place = begin + int.from_bytes(message[place:begin], "little")
        if not begin < place <= len(message):
            raise MessageError(f"{len(message)} bytes that are not a whole bundle of messages")
        yield message[begin:place]
