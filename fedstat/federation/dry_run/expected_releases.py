"""Requests and releases that a fit is expected to make, and the plan that each owner approves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

from fedstat.errors import PolicyError
from fedstat.federation.audit.event_log import TEXT, Entry
from fedstat.federation.disclosure.approval import AnalysisPlan, PlannedStep, ReleasedArray
from fedstat.federation.disclosure.site import FAMILIES, UNALIGNED_FAMILIES
from fedstat.federation.dry_run.execution import DryRunRecord, DryRunRequest

# ----------------------------------------------------------------------------------------------------
# Counts of what a fit would request and release, from one dry run.
#
# How often an iteration is repeated depends on the data. Every count is reported three times: with one
# iteration of each loop, with as many as the dry run took, and with as many as the fit allows. Iterations are
# added to those of the dry run, or taken away, each like the last.

ArrayKey: TypeAlias = tuple[str, str, str, str, str, str, bool]
"""Sender, receiver, step, array, kind, meaning, masked."""

FitLengths: TypeAlias = tuple[int, int, int]
"""Counts with one iteration, as in the dry run, and at the limit."""


@dataclass(frozen=True, slots=True)
class IterationLoop:
    """Rounds that a fit repeats as often as the data require.

    Parameters
    ----------
    steps : tuple of str
        Steps of an iteration; there is one round of the first of them in every iteration.
    limit : int
        Most iterations that the fit allows.
    fewest : int
        Iterations where every loop takes one; more where a fit runs the loop several times.
    share : float
        Share of the fit's loops that the dry run passes.
    sizes : int
        Shapes that an array goes through until it has its largest; 0 where all have the same.
    """

    steps: tuple[str, ...]
    limit: int
    fewest: int = 1
    share: float = 1.0
    sizes: int = 0

    def has(self, steps: Sequence[str]) -> bool:
        """Whether a round of these steps is one of an iteration."""
        return set(steps) <= set(self.steps)

    def done(self, dry_run: DryRunRecord) -> int:
        """Count the iterations of the dry run."""
        return sum(self.steps[0] in steps for steps in dry_run.rounds)

    def lengths(self, dry_run: DryRunRecord) -> FitLengths:
        """Count iterations: one of every loop, as in the dry run, and at the limit."""
        usual = round(self.done(dry_run) / self.share)
        return min(self.fewest, usual), usual, max(self.limit, usual)

    def counts(self, count: int, dry_run: DryRunRecord) -> FitLengths:
        """Turn what was counted in the dry run into the three counts."""
        done = self.done(dry_run)
        if not done:
            return count, count, count
        # Messages an iteration; a step that was left out once, as in the last iteration, still counts as one.
        each = max(1, round(count / done))
        low, usual, most = (max(count + each * (length - done), 0) for length in self.lengths(dry_run))
        return low, usual, most


@dataclass(frozen=True, slots=True)
class ExpectedArray:
    """Messages of one array from one site to another, as the ledger records them (`Entry`).

    `shape` is the largest; `entities` those behind one message, 0 where none are; `messages` and `bytes` are
    counted with one iteration, as in the dry run, and at the limit. `rules` are those of the sender's policy
    that it meets, none for what the coordinator sends, and `refusals` what that policy says against it.
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
    messages: FitLengths
    bytes: FitLengths
    rules: tuple[str, ...]
    refusals: tuple[PolicyError, ...]


@dataclass(frozen=True, slots=True)
class ExpectedReleases:
    """The requests of a fit: with one iteration, as in the dry run, and at the limit.

    The fit stands if a site refuses the steps in `checks`.
    """

    dry_run: DryRunRecord
    loops: Sequence[IterationLoop] = ()
    checks: Sequence[str] = ()

    def rounds(self) -> list[tuple[tuple[str, ...], FitLengths]]:
        """Kinds of rounds in the order in which they first come, with how many there are of each."""
        return [
            (steps, self._counts(steps, self.dry_run.rounds.count(steps)))
            for steps in dict.fromkeys(self.dry_run.rounds)
        ]

    def most(self, site: str, family: str, step: str) -> int:
        """Count how often a step is asked of a site at the most."""
        address = (site, family, step)
        count = sum((one.site, one.family, one.step) == address for one in self.dry_run.requested)
        return max(self._counts((step,), count))

    def planned(self) -> list[ExpectedArray]:
        """List the releases of each site, array by array, as the ledger's releases do."""
        found: dict[ArrayKey, list[Entry]] = {}
        for e in self.dry_run.entries:
            key = (e.sender, e.receiver, e.step, e.array, e.kind, e.what, e.masked)
            found.setdefault(key, []).append(e)
        return [self._planned(key, entries) for key, entries in found.items()]

    def _planned(self, key: ArrayKey, entries: Sequence[Entry]) -> ExpectedArray:
        messages = self._counts((key[2],), len(entries))
        sizes = self._further(entries, max(messages) - len(entries))
        # Bytes as rehearsed, and beyond these as extrapolated: exact as long as the fit is no longer than the
        # rehearsal.
        each = [entry.bytes for entry in entries] + [n_bytes for _, n_bytes in sizes]
        low, usual, most = (sum(each[:count]) for count in messages)
        one = max(entries, key=lambda entry: entry.shape)
        return ExpectedArray(
            *key,
            shape=max([one.shape, *[shape for shape, _ in sizes]]),
            entities=max(entry.entities for entry in entries),
            messages=messages,
            bytes=(low, usual, most),
            rules=self.dry_run.rules(one),
            refusals=self.dry_run.refusals(one),
        )

    def _counts(self, steps: tuple[str, ...], count: int) -> FitLengths:
        """Count a kind of round or message at the three lengths, where it is one of an iteration."""
        for loop in self.loops:
            # The first that fits: a loop that holds another one is listed after it.
            if loop.has(steps):
                return loop.counts(count, self.dry_run)
        return count, count, count

    def _further(self, entries: Sequence[Entry], more: int) -> list[tuple[tuple[int, ...], int]]:
        """Extrapolate shapes and bytes of further messages: as the last, or growing as the last grew."""
        last, shape = entries[-1], entries[-1].shape
        sizes = len({entry.shape for entry in entries})
        grows = max((loop.sizes for loop in self.loops if last.step in loop.steps), default=0) - sizes
        step = (0,) * len(shape)
        if len(entries) > 1 and grows > 0:
            step = tuple(b - a for a, b in zip(entries[-2].shape, shape, strict=True))
        # Bytes are scaled and not counted again: a masked number takes one word or six.
        size = last.bytes / max(prod(shape), 1)
        out = []
        for i in range(1, more + 1):
            at = tuple(n + d * min(i, max(grows, 0)) for n, d in zip(shape, step, strict=True))
            out.append((at, round(size * prod(at)) if prod(shape) else last.bytes))
        return out

    def refusals(self) -> dict[str, list[PolicyError]]:
        """List the refusals of policies, by site, including local ones at the coordinator's own site."""
        out: dict[str, list[PolicyError]] = {}
        for (site, step), found in self.dry_run.refused.items():
            if found and step not in self.checks:
                out.setdefault(site, []).extend(found)
        return out

    def unchecked(self) -> dict[str, PolicyError]:
        """Return the first refusal of a step in `checks`, by site."""
        found = self.dry_run.refused.items()
        return {site: errors[0] for (site, step), errors in found if errors and step in self.checks}


# ----------------------------------------------------------------------------------------------------
# From a dry run to the plan for the consent of one site's owner.

MIN_ROUNDS = 12
"""Fewest rounds of a loop in a plan: a fit that is refused at its end has released all and yields nothing."""


@dataclass(frozen=True, slots=True)
class AnalysisDescription:
    """The coordinator's description of an analysis, and of who could learn what from it."""

    call: str
    formula: str
    distribution: str
    learned: tuple[str, ...]

    def plan(
        self, site: str, columns: Sequence[str], steps: tuple[PlannedStep, ...], rounds: int, among: int
    ) -> AnalysisPlan:
        """Put a plan together; masked sums are over `among` sites."""
        words = (self.call, self.formula, self.distribution)
        return AnalysisPlan(site, *words, tuple(columns), steps, rounds, self.learned, among=among)


def plan_text_release(family: str, step: str) -> PlannedStep:
    """Plan one request of a step without input that returns a text."""
    reported = FAMILIES[family][step].given[TEXT]
    gives = ReleasedArray(TEXT, reported.kind, reported.what, False, 0, 0)
    return PlannedStep(family, step, 1, False, ("",), (gives,))


@dataclass(frozen=True, slots=True)
class PlanBuilder:
    """Makes the plan of every site from one dry run.

    `guessed` are steps of unknown size. `largest` has the most numbers of arrays whose size depends on the
    data, by step and array. Where sites hold different columns, sums over the sites of a missing-data
    pattern may be over two only.
    """

    expected: ExpectedReleases
    words: AnalysisDescription
    guessed: frozenset[str]
    by_rows: bool
    largest: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def plan(self, site: str, columns: Sequence[str], afterwards: Sequence[PlannedStep] = ()) -> AnalysisPlan:
        """Plan for one site with its columns; also steps that may be requested afterwards."""
        rounds = sum(self._with_room(kinds, max(counts)) for kinds, counts in self.expected.rounds())
        steps = (*self._steps(site), *afterwards)
        n_masked = self.expected.dry_run.n_masked
        return self.words.plan(site, columns, steps, rounds, n_masked if self.by_rows else min(n_masked, 2))

    def _steps(self, site: str) -> Iterator[PlannedStep]:
        request: dict[tuple[str, str], list[DryRunRequest]] = {}
        for one in self.expected.dry_run.requested:
            if one.site == site and one.family not in UNALIGNED_FAMILIES:
                request.setdefault((one.family, one.step), []).append(one)
        planned = self.expected.planned()
        for (family, step), found in request.items():
            most = self._with_room((step,), self.expected.most(site, family, step))
            masked = all(one.masked for one in found)
            texts = tuple(sorted({one.text for one in found}))
            rows = [row for row in planned if row.step == step]
            gives = tuple(self._gives(family, step, found, rows, masked))
            yield PlannedStep(family, step, most, masked, texts, gives)

    def _gives(
        self,
        family: str,
        step: str,
        found: Sequence[DryRunRequest],
        planned: Sequence[ExpectedArray],
        masked: bool,
    ) -> Iterator[ReleasedArray]:
        for name, declared in FAMILIES[family][step].given.items():
            gave = max((one.gave[name] for one in found if name in one.gave), default=None)
            if gave is None:
                continue
            # In a longer fit than the dry run arrays may be larger. A local request is not a message, and
            # grows like an array of the same size that is one.
            later = [
                prod(row.shape)
                for row in planned
                if row.array == name and self._dry_run(row.sender, step, name) == gave
            ]
            unknown = step in self.guessed or name == TEXT
            numbers = 0 if unknown else max([gave, self.largest.get((step, name), 0), *later])
            hidden = masked and declared.maskable
            entities = max(one.entities for one in found)
            yield ReleasedArray(name, declared.kind, declared.what, hidden, numbers, entities)

    def _dry_run(self, site: str, step: str, array: str) -> int:
        """Most numbers of an array that one answer had."""
        request = self.expected.dry_run.requested
        return max(
            (one.gave.get(array, 0) for one in request if (one.site, one.step) == (site, step)), default=0
        )

    def _with_room(self, steps: tuple[str, ...], most: int) -> int:
        decided = any(loop.has(steps) for loop in self.expected.loops)
        return max(most, MIN_ROUNDS) if decided else most
