"""Counts of what a fit would ask for and of what would leave each institution, from one rehearsal.

How often an iteration passes depends on the data. A family says how often it does in a short, a usual and a
long fit; iterations are then added to those that were rehearsed, or taken away, each like the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from fedstat.federation.account.entry import Entry
from fedstat.federation.door.owner.question import Refusal
from fedstat.federation.forecast.rehearsal import DryRun

Key: TypeAlias = tuple[str, str, str, str, str, str, bool]
"""Sender, receiver, step, array, kind, meaning, masked."""

Lengths: TypeAlias = tuple[int, int, int]
"""Of a fit that is short, usual and long."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Rounds of which there are as many as the data ask for: `lengths` in a short, usual and long fit.

    There is one round of the step `counted` in an iteration, whose `steps` have it among them. An array goes
    through `sizes` shapes until it has its largest; 0 where all have the same.
    """

    counted: str
    steps: frozenset[str]
    lengths: Lengths
    sizes: int = 0

    def rehearsed(self, course: DryRun) -> int:
        """Count the iterations that were rehearsed."""
        return sum(self.counted in steps for steps in course.rounds)

    def counts(self, count: int, course: DryRun) -> Lengths:
        """Turn what was counted in the rehearsal into counts at the three lengths."""
        done = self.rehearsed(course)
        if not done:
            return count, count, count
        # Messages an iteration; a step that was left out once, as in the last iteration, still counts as one.
        each = max(1, round(count / done))
        low, usual, most = (max(count + each * (length - done), 0) for length in self.lengths)
        return low, usual, most


@dataclass(frozen=True, slots=True)
class Planned:
    """Messages of one array from one institution to another, as the account enters them (`Entry`).

    `shape` is the largest; `entities` those behind one message, 0 where none are; `messages` and `bytes` are
    counted at the fewest, the expected and the most iterations. `rules` are those of the sender's policy that
    it meets, none for what the coordinator sends, and `refusals` what that policy says against it.
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
    messages: Lengths
    bytes: Lengths
    rules: tuple[str, ...]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a fit would ask for, at the fewest, the expected and the most iterations."""

    course: DryRun
    loops: Sequence[Loop] = ()

    def rounds(self) -> list[tuple[tuple[str, ...], Lengths]]:
        """Kinds of rounds in the order in which they first come, with how many there are of each."""
        return [
            (steps, self._counts(steps, self.course.rounds.count(steps)))
            for steps in dict.fromkeys(self.course.rounds)
        ]

    def most(self, site: str, family: str, step: str) -> int:
        """Count how often a step is asked of a site at the most."""
        address = (site, family, step)
        count = sum((one.site, one.family, one.step) == address for one in self.course.asked)
        return max(self._counts((step,), count))

    def planned(self) -> list[Planned]:
        """List what would leave each institution, array by array, as the ledger's releases do."""
        found: dict[Key, list[Entry]] = {}
        for e in self.course.entries:
            key = (e.sender, e.receiver, e.step, e.array, e.kind, e.what, e.masked)
            found.setdefault(key, []).append(e)
        return [self._planned(key, entries) for key, entries in found.items()]

    def _planned(self, key: Key, entries: Sequence[Entry]) -> Planned:
        messages = self._counts((key[2],), len(entries))
        sizes = self._further(entries, max(messages) - len(entries))
        # Bytes as rehearsed, and beyond these as extrapolated: exact as long as the fit is no longer than the
        # rehearsal.
        each = [entry.bytes for entry in entries] + [n_bytes for _, n_bytes in sizes]
        low, usual, most = (sum(each[:count]) for count in messages)
        one = max(entries, key=lambda entry: entry.shape)
        return Planned(
            *key,
            shape=max([one.shape, *[shape for shape, _ in sizes]]),
            entities=max(entry.entities for entry in entries),
            messages=messages,
            bytes=(low, usual, most),
            rules=self.course.rules(one),
            refusals=self.course.refusals(one),
        )

    def _counts(self, steps: tuple[str, ...], count: int) -> Lengths:
        """Count a kind of round or message at the three lengths, where it is one of an iteration."""
        for loop in self.loops:
            # The first that fits: a loop that holds another one is listed after it.
            if loop.steps.issuperset(steps):
                return loop.counts(count, self.course)
        return count, count, count

    def _further(self, entries: Sequence[Entry], more: int) -> list[tuple[tuple[int, ...], int]]:
        """Extrapolate shapes and bytes of further messages: as the last, or growing as the last grew."""
        last, shape = entries[-1], entries[-1].shape
        sizes = len({entry.shape for entry in entries})
        grows = max((loop.sizes for loop in self.loops if last.step in loop.steps), default=0) - sizes
        step = (0,) * len(shape)
        if len(entries) > 1 and grows > 0:
            step = tuple(b - a for a, b in zip(entries[-2].shape, shape, strict=True))
        # Bytes are scaled and not counted anew: a masked number takes one word or six.
        size = last.bytes / max(prod(shape), 1)
        out = []
        for i in range(1, more + 1):
            at = tuple(n + d * min(i, max(grows, 0)) for n, d in zip(shape, step, strict=True))
            out.append((at, round(size * prod(at)) if prod(shape) else last.bytes))
        return out

    def refusals(self) -> dict[str, list[Refusal]]:
        """List what policies would refuse, by site, also in place at the coordinator's own institution."""
        out: dict[str, list[Refusal]] = {}
        for (site, _), found in self.course.refused.items():
            if found:
                out.setdefault(site, []).extend(found)
        return out
