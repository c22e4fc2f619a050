"""What a fit would ask for and what would leave each institution, from rehearsals of different lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fedstat.federation.account.entry import Entry
from fedstat.federation.door.policy import Refusal
from fedstat.federation.forecast.rehearsal import Course

Key: TypeAlias = tuple[str, str, str, str, str, str, bool]
"""Sender, receiver, step, array, kind, meaning, masked."""


@dataclass(frozen=True, slots=True)
class Planned:
    """Messages of one array from one institution to another.

    Parameters
    ----------
    sender, receiver, step, array, kind, what, masked
        See :class:`~fedstat.federation.account.entry.Entry`.
    shape : tuple of int
        The largest.
    entities : int
        Behind one message; 0 where none are.
    messages, bytes : tuple of int
        At the fewest, the expected and the most iterations.
    rules : tuple of str
        Rules of the sender's policy that it meets; none for what the coordinator sends.
    refusals : tuple of Refusal
        What the sender's policy says against it.
    """

    sender: str
    receiver: str
    step: str
    array: str
    kind: str
    what: str
    masked: bool
    shape: tuple[int, ...]
    entities: int
    messages: tuple[int, ...]
    bytes: tuple[int, ...]
    rules: tuple[str, ...]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a fit would ask for, at the fewest, the expected and the most iterations.

    Parameters
    ----------
    courses : tuple of Course
    """

    courses: tuple[Course, ...]

    @property
    def expected(self) -> Course:
        """The course that is most likely."""
        return self.courses[len(self.courses) // 2]

    def rounds(self) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        """Kinds of rounds in the order in which they first come, with how many there are of each."""
        kinds = list(dict.fromkeys(steps for course in reversed(self.courses) for steps in course.rounds))
        order = {steps: self.expected.rounds.index(steps) for steps in kinds if steps in self.expected.rounds}
        kinds.sort(key=lambda steps: order.get(steps, len(self.expected.rounds)))
        return [(steps, _ordered([c.rounds.count(steps) for c in self.courses])) for steps in kinds]

    def planned(self) -> list[Planned]:
        """List what would leave each institution, array by array, as the ledger's releases do."""
        counted = [_by_array(course) for course in self.courses]
        keys = dict.fromkeys(key for found in (_by_array(self.expected), *counted) for key in found)
        return [self._planned(key, counted) for key in keys]

    def _planned(self, key: Key, counted: Sequence[Mapping[Key, list[Entry]]]) -> Planned:
        found = [by_array.get(key, []) for by_array in counted]
        one = max((entry for entries in found for entry in entries), key=lambda entry: entry.shape)
        course = self.expected
        return Planned(
            *key,
            shape=one.shape,
            entities=max(entry.entities for entries in found for entry in entries),
            messages=_ordered([len(entries) for entries in found]),
            bytes=_ordered([sum(entry.bytes for entry in entries) for entries in found]),
            rules=course.rules(one),
            refusals=course.refusals(one),
        )

    def refusals(self) -> dict[str, list[Refusal]]:
        """List what policies would refuse, by site, also in place at the coordinator's own institution."""
        out: dict[str, list[Refusal]] = {}
        for (site, _), found in self.expected.refused.items():
            if found:
                out.setdefault(site, []).extend(found)
        return out


def _ordered(counts: Sequence[int]) -> tuple[int, ...]:
    """Put the fewest of the counts first, and the most last; the expected one stays.

    A fit with more iterations may have less of something: of what is asked where an iteration fails.
    """
    return tuple(counts) if len(counts) < 3 else (min(counts), *counts[1:-1], max(counts))


def _by_array(course: Course) -> dict[Key, list[Entry]]:
    """Entries by everything but round and shape."""
    out: dict[Key, list[Entry]] = {}
    for entry in course.entries:
        key = (entry.sender, entry.receiver, entry.step, entry.array, entry.kind, entry.what, entry.masked)
        out.setdefault(key, []).append(entry)
    return out
