"""One event: an array or a text that passed an institution's door, or a refusal.

It is entered once, where it passes; ledgers, chains, receipts and their counts are made of these entries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter
from typing import Any, TypeAlias, get_origin, get_type_hints

from fedstat.federation.message import Ask, Declared, Reply, Step
from fedstat.typing import Array

COORDINATOR = "coordinator"
REFUSAL = "refusal"
TEXT = "text"
LONGEST_NAME = 80
SIGNED_FIELDS = (
    "round", "sender", "receiver", "family", "step", "array",
    "kind", "masked", "shape", "bytes", "entities", "rule",
)  # fmt: skip
"""Fields that are hashed and signed, in this order: all but the meaning, which goes with step and array."""
_signed = attrgetter(*SIGNED_FIELDS)
_RULE = re.compile(r"its policy \(([a-z ]{1,60})\)")


@dataclass(frozen=True, slots=True)
class AbsentSite:
    """A site that was asked in vain while a fit ran, which was then begun anew.

    Parameters
    ----------
    site : str
    round : int
        Of the ledger, from 1.
    back : bool
        Whether it had lost the session only, and takes part in the fit; else it is left out.

    Examples
    --------
    >>> import fedstat as fs
    >>> print(fs.results.AbsentSite("Hungary", round=4))
    'Hungary' was lost in round 4, and its rows are not in the fit
    """

    site: str
    round: int
    back: bool = False

    def __str__(self) -> str:
        what = "was started again in round {}, and takes part in the fit that was begun anew"
        if not self.back:
            what = "was lost in round {}, and its rows are not in the fit"
        return f"'{self.site}' {what.format(self.round)}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One array or text that passed, or a refusal.

    `round`, from 1, is in a ledger the round trip of the run, in an account which of the asks to this site in
    this session. `sender` and `receiver` are institutions or ``"coordinator"``. `array` is ``"text"`` for a
    text and empty for a refusal, whose kind is ``"refusal"`` and whose `rule` is the class of the error and
    the rule of the policy; `what` is the array in words. `shape` is that of what masks hide where they do
    (`masked`: the receiver learned only the sum over institutions), `bytes` the size as it travels,
    `entities` how many stand behind the array at the sending institution.
    """

    round: int
    sender: str
    receiver: str
    step: str
    array: str
    kind: str
    what: str = field(default="", compare=False)
    shape: tuple[int, ...] = ()
    bytes: int = 0
    entities: int = 0
    masked: bool = False
    family: str = ""
    rule: str = ""

    @property
    def left(self) -> bool:
        """Whether something left a site."""
        return self.receiver == COORDINATOR and self.kind != REFUSAL

    @property
    def signed(self) -> list[Any]:
        """Values of :data:`SIGNED_FIELDS`."""
        return list(_signed(self))

    def in_round(self, number: int) -> Entry:
        """Return the same entry under another number."""
        return self if number == self.round else Entry(number, *_but_round(self))


_but_round = attrgetter(*[part.name for part in fields(Entry)][1:])

Content: TypeAlias = Array | str
Entered: TypeAlias = Iterator[tuple[Entry, Content]]
"""Entries, each with what it is of."""


def asked(ask: Ask, step: Step, number: int) -> Entered:
    """Entries of an ask's arrays and text, in the order of their declaration."""
    way = number, COORDINATOR, ask.site
    for name, line in step.takes.items():
        # A door enters an ask before it refuses one with arrays that the step does not take.
        if name in ask.arrays:
            yield _entry(way, ask, name, line, ask.arrays[name])
    if ask.text and step.text_in is not None:
        yield _entry(way, ask, TEXT, step.text_in, ask.text)


def answered(ask: Ask, step: Step, reply: Reply, number: int) -> Entered:
    """Entries of a reply's arrays, as they travel, and text; an array that is not declared is a KeyError."""
    way = number, ask.site, COORDINATOR
    places = {name: place for place, name in enumerate(step.gives)}
    for name in sorted(reply.arrays, key=places.__getitem__):
        line = step.gives[name]
        hidden = line.maskable and ask.masked is not None
        yield _entry(way, ask, name, line, reply.arrays[name], reply.entities, hidden)
    if reply.text and step.text_out is not None:
        yield _entry(way, ask, TEXT, step.text_out, reply.text)


def _entry(
    way: tuple[int, str, str],
    ask: Ask,
    name: str,
    line: Declared,
    content: Content,
    entities: int = 0,
    hidden: bool = False,
) -> tuple[Entry, Content]:
    if isinstance(content, str):
        shape, size = (), len(content.encode())
    else:
        # What is hidden travels as several words a number: its first axis is no part of its shape.
        shape, size = content.shape[1:] if hidden else content.shape, content.nbytes
    entry = Entry(
        *way,
        step=ask.step,
        array=name,
        kind=line.kind,
        what=line.what,
        shape=shape,
        bytes=size,
        entities=entities,
        masked=hidden,
        family=ask.family,
    )
    return entry, content


def refused(ask: Ask, error: Exception, number: int) -> Entry:
    """Entry of a refusal: the question and the rule."""
    family, step = ask.family[:LONGEST_NAME], ask.step[:LONGEST_NAME]
    return Entry(number, ask.site, COORDINATOR, step, "", REFUSAL, family=family, rule=rule_of(error))


def rule_of(error: Exception) -> str:
    """Name the class of a refusal, and the rule of the policy where the error names one; never its values."""
    rule = policy_rule(error)
    return type(error).__name__ + (f" ({rule})" if rule else "")


def policy_rule(error: Exception) -> str:
    """Name the rule of a policy that an error is about; empty where it is about none."""
    rule = _RULE.search(str(error))
    return rule[1] if rule else ""


def read_entry(row: Sequence[Any]) -> Entry:
    """Rebuild an entry from its signed values as JSON has them; TypeError or ValueError where it is none."""
    values = typed(Entry, SIGNED_FIELDS, row)
    shape = values["shape"] = tuple(values["shape"])
    if any(type(length) is not int for length in shape):
        raise TypeError("shape")
    if min(values["round"], values["bytes"], values["entities"], *shape) < 0:
        raise ValueError("a negative number")
    return Entry(**values)


def typed(kind: Any, names: tuple[str, ...], row: Sequence[Any]) -> dict[str, Any]:
    """Name the values of a row, which have to be of the very types of these fields of a record.

    A receipt has thousands of rows, for which :mod:`fedstat.records` is too slow.
    """
    if tuple(map(type, row)) != _types_in_json(kind, names):
        raise TypeError(f"the types of {', '.join(names)}")
    return dict(zip(names, row, strict=True))


@cache
def _types_in_json(kind: Any, names: tuple[str, ...]) -> tuple[type, ...]:
    hints = get_type_hints(kind)
    return tuple(list if get_origin(hints[name]) is tuple else hints[name] for name in names)
