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
from fedstat.errors import DisclosureError, FedstatError, MessageError, PolicyError
from fedstat.typing import Array

# ----------------------------------------------------------------------------------------------------
# Requests and replies: a step name and named arrays, packed to bytes.
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
"""Kind of information in an array, from harmless to disclosing.

``control``      the coordinator's own choices and scalars of the iteration
``schema``       names, types, levels and counts
``presence``     which entities a site has (assumed to be agreed between the sites)
``sealed``       meant for one other site, and encrypted against the transport
``masked share`` random by itself; with the other site's share, a sum over many entities
``noisy aggregate`` a sum with noise that was charged to a privacy budget
``aggregate``    a sum over many entities
``per entity``   one number per entity that is a function of its values
``sketch``       random combinations of many entities' rows
``raw columns``  the values themselves
"""

VERSION = version("fedstat")
RUNS = f"fedstat {VERSION}"
MESSAGES = 2
"""Version of the meaning of requests and replies; raised when versions become incompatible."""
HEADER = "fedstat"
DTYPES: dict[np.dtype[Any], str] = {
    np.dtype(np.int64): "I64",
    np.dtype(np.float64): "F64",
    np.dtype(np.uint8): "U8",
    np.dtype(np.bool_): "BOOL",
}
"""Numbers and truth values; bytes for encrypted content. In the order and with the names of safetensors."""
_TYPES = {name: dtype for dtype, name in DTYPES.items()}
_PLACES = {dtype: place for place, dtype in enumerate(DTYPES)}
_sorted = json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode
_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_decode = json.JSONDecoder().decode


COUNTED: tuple[ArrayKind, ...] = ("masked share", "noisy aggregate", "aggregate", "sketch")
"""Kinds of values that must rest on enough entities."""


@dataclass(frozen=True, slots=True)
class ArrayDeclaration:
    """Declaration of an array that passes a site's checks, made where the step is defined.

    A released array without `behind`, and a received value per entity without `weighs`, cannot be installed.
    A step therefore cannot forget a check, since it calls none: it declares the facts that are checked
    against the owner's policy.

    Parameters
    ----------
    kind : Kind
        See :data:`ArrayKind`.
    what : str
        Description of the array in the terms of the field, for the ledger.
    ndim : int
        Required number of dimensions.
    maskable : bool
        Whether the coordinator needs only the sum over sites, so that pairwise masks may hide each site's own
        contribution.
    optional : bool
        Whether the array may be missing.
    dtype : str
        Required type; empty for any.
    wide : bool
        Whether a masked sum uses six words per number, for sums in any units.
    behind : tuple of types
        For released arrays: the facts behind them (:mod:`fedstat.federation.disclosure.facts`), which count
        the entities and describe columns and weights. The step, or one that provides its input, declares
        them, and each is checked before the array is released.
    weighs : str or None
        For received arrays: a description of the row weights that they contain, for instance "residuals".
        They are checked by the rule on weights before the reply is released. Empty: the array contains no row
        weights.
    common : bool
        For received arrays: it is the same at every site. Masks protect only if this is true: masks of sites
        that received different arrays do not cancel.
    noisy : bool
        For released arrays: it is released only with noise that the disclosure checks add and charge to the
        site's privacy budget; see :mod:`fedstat.federation.disclosure.privacy_budget`.
    unpaid : str
        For released arrays: the reason for a release without noise under a privacy budget. Either the
        guarantee treats the content as public, or it is encrypted and serves a share that is released with
        noise.
    bound : bool
        For received arrays: an owner who approves an analysis approves these values; see
        :mod:`fedstat.federation.disclosure.approval`.
    chooses : str
        For received arrays: what values other than zero choose, "batches" or "start values". Some policies
        accept zeros only; see :mod:`fedstat.federation.disclosure.request_checks`.
    without_terms : str
        For released sums: the reason why the release history does not compare them; see
        :mod:`fedstat.federation.disclosure.family`.
    sensitivity : float or None
        Largest change of the array's Euclidean length when one entity's record is replaced. None: there is no
        bound, and no noise mechanism is possible.
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
    bound: bool = False
    chooses: str = ""
    without_terms: str = ""


control = partial(ArrayDeclaration, "control")
schema = partial(ArrayDeclaration, "schema")
presence = partial(ArrayDeclaration, "presence")
aggregate = partial(ArrayDeclaration, "aggregate")
per_entity = partial(ArrayDeclaration, "per entity")
"""Declarations by kind: ``aggregate("sums of the columns", 2)``."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request type that a family may send to a site.

    Parameters
    ----------
    run : callable
        ``run(data, state, **arrays) -> {name: array}``, or, where a text is declared,
        ``run(data, state, text, **arrays) -> ({name: array}, text)``.
    takes, gives : mapping of str to ArrayDeclaration
        The received and released arrays.
    text_in, text_out : ArrayDeclaration, optional
        Content of the plain JSON texts in the request and the reply.
    after : frozenset of str, optional
        Steps of the family of which one must directly precede it in a session; None: it may come at any time.
        See :mod:`fedstat.federation.disclosure.request_checks`.
    begins : bool
        Every fit begins with it: earlier requests of the session, and their order, no longer count.
    prepares : bool
        It agrees on columns and entities as the basis of a plan for consent, and is requested before the
        plan.
    public : bool
        Whether it reads no row: the reply depends only on the request, on keys, and on the owner's public
        descriptions and ledger.
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
        """Return the arrays of a reply, and its text."""
        return {**self.gives, **({} if self.text_out is None else {"text": self.text_out})}


MAX_NAME_LENGTH, MAX_PURPOSE_LENGTH = 80, 500
"""Longest names of a person and of a study, and longest purpose, in characters."""


@dataclass(frozen=True, slots=True)
class Purpose:
    """Who requests an analysis, in which study, and for what; as the analyst states it.

    The coordinator signs these texts with each request, and each site keeps them in its ledger.
    """

    person: str = ""
    study: str = ""
    purpose: str = ""

    def problem(self) -> str:
        """Return what is wrong with a text; empty if they can be shown to an owner."""
        for name in PURPOSE_FIELDS:
            text = getattr(self, name)
            most = MAX_PURPOSE_LENGTH if name == "purpose" else MAX_NAME_LENGTH
            if (
                not isinstance(text, str)
                or not text.isprintable()
                or text != text.strip()
                or len(text) > most
            ):
                return f"{name}: expected one line of printable text of at most {most} characters"
        return ""


PURPOSE_FIELDS = ("person", "study", "purpose")
NO_PURPOSE = Purpose()


@dataclass(frozen=True, slots=True)
class Request:
    """One request to one site: an installed step of a family, and its arrays.

    Arrays are float64, int64, bool or uint8; the text is JSON, for steps that declare one. `session`
    separates the local state of different fits. `masked` is the round whose masks hide the maskable arrays of
    the reply; None: they are unmasked. `turn` counts the requests to this site in this session, from 1, since
    a site in another process answers each once; None within one process. `purpose` names the person, the
    study and the purpose.
    """

    site: str
    family: str
    step: str
    arrays: Mapping[str, Array] = field(default_factory=dict)
    session: str = ""
    text: str = ""
    masked: int | None = None
    turn: int | None = None
    purpose: Purpose = NO_PURPOSE


@dataclass(frozen=True, slots=True)
class Reply:
    """A site's reply: released arrays, a schema as JSON, and the number of entities behind the arrays."""

    site: str
    arrays: Mapping[str, Array]
    text: str = ""
    entities: int = 0

    @property
    def released(self) -> list[str]:
        """Return the names of its arrays, and of its text if it has one."""
        return [*self.arrays, *(["text"] if self.text else [])]


@dataclass(frozen=True, slots=True)
class InstalledVersion:
    """Software of a site: its version of fedstat and of the messages, and the installed families.

    It is empty for sites that do not report versions.
    """

    version: str = ""
    messages: int = 0
    families: tuple[str, ...] = ()


REFUSALS: Mapping[str, type[FedstatError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, FedstatError)
}
"""Errors that are transferred, by name."""


LARGE = 2**16
"""Bytes of an array from which it is worth not to copy it once more."""


def pack(header: Mapping[str, str], arrays: Mapping[str, Array]) -> bytes:
    """Pack a header of strings and named arrays.

    MessageError if an array is not float64, int64, bool or uint8.
    """
    values = {name: np.asarray(array) for name, array in arrays.items()}
    for name, value in values.items():
        _check_type(name, value)
    # One entry only: the order of several is not fixed, but equal messages must have equal bytes.
    text = _sorted(dict(header))
    content: dict[str, Any] = {"__metadata__": {HEADER: text}}
    pieces, end = [], 0
    # The same bytes as safetensors writes, in half the time; safetensors reads every message.
    for name in sorted(values, key=lambda name: (_PLACES[values[name].dtype], name)):
        value, begin = values[name], end
        end += value.nbytes
        content[name] = {"dtype": DTYPES[value.dtype], "shape": value.shape, "data_offsets": (begin, end)}
        pieces.append(value.tobytes() if value.nbytes < LARGE else np.ascontiguousarray(value).data.cast("B"))
    head = _compact(content).encode()
    head = head.ljust(-(-len(head) // 8) * 8)
    return b"".join([len(head).to_bytes(8, "little"), head, *pieces])


def unpack(data: bytes) -> tuple[dict[str, str], dict[str, Array]]:
    """Read header and arrays of :func:`pack`; MessageError if the bytes are not such a message."""
    try:
        tensors: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        arrays = {
            name: np.frombuffer(tensor["data"], _TYPES[tensor["dtype"]]).reshape(tensor["shape"])
            for name, tensor in tensors
        }
        length = int.from_bytes(data[:8], "little")
        header = _decode(_decode(data[8 : 8 + length].decode())["__metadata__"][HEADER])
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


def pack_request(request: Request) -> bytes:
    """Return the bytes of a request."""
    header = {
        "site": request.site,
        "family": request.family,
        "step": request.step,
        "session": request.session,
    }
    masked, turn = ("" if number is None else str(number) for number in (request.masked, request.turn))
    stated = {name: text for name in PURPOSE_FIELDS if (text := getattr(request.purpose, name))}
    return pack(header | {"text": request.text, "masked": masked, "turn": turn} | stated, request.arrays)


def unpack_request(data: bytes) -> Request:
    """Read a request; see :func:`unpack` for the errors."""
    header, arrays = unpack(data)
    fields = ("site", "family", "step", "session", "text", "masked", "turn")
    missing = [k for k in fields if k not in header]
    if missing:
        raise MessageError(f"a message that is not a request: it lacks {', '.join(missing)}")
    masked, turn = _integer(header, "masked"), _integer(header, "turn")
    plain = {name: header[name] for name in ("site", "family", "step", "session", "text")}
    purpose = Purpose(**{name: header.get(name, "") for name in PURPOSE_FIELDS})
    if problem := purpose.problem():
        raise MessageError(f"a message that is not a request: {problem}")
    return Request(**plain, arrays=arrays, masked=masked, turn=turn, purpose=purpose)


@dataclass(frozen=True)
class RequestMessage:
    """A packed request; it is unpacked once, however many readers it has."""

    packed: bytes

    @cached_property
    def request(self) -> Request:
        """The request; see :func:`unpack_request` for the errors."""
        return unpack_request(self.packed)


def _integer(header: Mapping[str, str], name: str) -> int | None:
    """Return an integer of a header; None for none."""
    text = header[name]
    if text and not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise MessageError(f"a message that is not a request: '{name}' is not a number")
    return int(text) if text else None


def pack_reply(reply: Reply) -> bytes:
    """Return the bytes of a reply."""
    header = {"site": reply.site, "text": reply.text, "entities": str(reply.entities)}
    return pack(header, reply.arrays)


def pack_refusal(site: str, error: FedstatError) -> bytes:
    """Return the bytes of a site's error; the analyst reads its text."""
    header = {"site": site, "refusal": type(error).__name__, "text": str(error)}
    rule = error.rule if isinstance(error, PolicyError) else ""
    return pack(header | ({"rule": rule} if rule else {}), {})


def unpack_reply(data: bytes) -> Reply:
    """Read a reply; if it is a refusal, raise the site's error.

    For invalid bytes see :func:`unpack`.
    """
    header, arrays = unpack(data)
    if "refusal" in header:
        kind, text = (
            REFUSALS.get(header["refusal"], DisclosureError),
            header.get("text", "refused without a reason"),
        )
        if issubclass(kind, PolicyError):
            raise kind(text, rule=header.get("rule", ""), site=header.get("site", ""))
        raise kind(text)
    if not {"site", "text", "entities"} <= header.keys() or not header["entities"].isdecimal():
        raise MessageError("a message that is not a reply: it lacks its site, text or entities")
    return Reply(header["site"], arrays, header["text"], int(header["entities"]))


def check_arrays(where: str, declared: Mapping[str, ArrayDeclaration], arrays: Mapping[str, Array]) -> None:
    """Check arrays against their declaration; `where` names site and step.

    MessageError for a missing, unknown, misshapen or non-finite array.
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
        # In neither direction: NaN passes comparisons at a site, and in a reply it shows missing values.
        if array.dtype == np.float64 and not np.isfinite(array).all():
            raise MessageError(f"{where}: array '{name}' holds values that are not finite")


FEW_NUMBERS, MOST_NUMBERS = 2**23, 2**26
"""Numbers that any request may allocate at a site, 64 megabytes, and that none may, half a gigabyte."""
NUMBERS_A_VALUE = 32


def check_allocation(where: str, numbers: int, values: int) -> None:
    """Check the memory that a request needs against the number of the site's values, in advance.

    It raises MessageError: a shape has few bytes, but may name any number.
    """
    if not 0 <= numbers <= min(MOST_NUMBERS, max(FEW_NUMBERS, NUMBERS_A_VALUE * values)):
        raise MessageError(
            f"{where}: the request needs {numbers:,} numbers at once, more than the limit for the site's "
            "rows. Use fewer columns, folds or rows of a sketch, or merge small patterns"
        )


def check_lengths(where: str, **pairs: tuple[Array, int]) -> None:
    """Check the lengths of arrays, since compiled loops do not check their bounds.

    A MessageError names the array, its length and the expected one.
    """
    for name, (array, length) in pairs.items():
        if len(array) != length:
            raise MessageError(f"{where}: array '{name}' has {len(array)} rows, expected {length}")


# ----------------------------------------------------------------------------------------------------
# Several requests to one site in one message, and its replies in one.
#
# A site answers them one by one, in order, each as if it had come alone. After a refusal it answers no other:
# the bundle of replies ends with the refusal, and the replies before it are valid.
#
# A bundle is a magic word, followed by each message with its length. No single message begins with this word.

MAGIC = b"fedstat bundle 1\n"
LENGTH_BYTES = 8


class BundledReply(NamedTuple):
    """Return a reply as bytes, and whether it is a refusal."""

    packed: bytes
    refused: bool = False


def is_bundle(message: bytes) -> bool:
    """Return whether a message is a bundle."""
    return message.startswith(MAGIC)


def bundle(messages: Sequence[bytes]) -> bytes:
    """Join messages into one; a single message stays unchanged."""
    if len(messages) == 1:
        return messages[0]
    return MAGIC + b"".join(len(one).to_bytes(LENGTH_BYTES, "little") + one for one in messages)


def unbundle(message: bytes) -> list[bytes]:
    """Split a bundle into messages; MessageError if they are incomplete."""
    return list(_parts(message)) if is_bundle(message) else [message]


def _parts(message: bytes) -> Iterator[bytes]:
    place = len(MAGIC)
    while place < len(message):
        begin = place + LENGTH_BYTES
        place = begin + int.from_bytes(message[place:begin], "little")
        if not begin < place <= len(message):
            raise MessageError(f"{len(message)} bytes that are not a complete bundle of messages")
        yield message[begin:place]
