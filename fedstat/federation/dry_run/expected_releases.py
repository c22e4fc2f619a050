"""Requests and releases that a fit is expected to make, the plan for each owner, and what each party learns.

The sentences on what each party could learn follow from the kinds of the messages, from masks, from the
receivers, and from the number of sites. They hold for parties that follow the protocol, and that keep and
combine everything they see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

from fedstat.errors import PolicyError
from fedstat.federation.audit.event_log import COORDINATOR, TEXT, Entry
from fedstat.federation.crypto.masks import TWO_SITES, hides
from fedstat.federation.disclosure.approval import AnalysisPlan, PlannedStep, ReleasedArray
from fedstat.federation.disclosure.level_products import SEALING
from fedstat.federation.disclosure.site import FAMILIES, UNALIGNED_FAMILIES
from fedstat.federation.disclosure.threat_statements import COORDINATOR_LEARNS, SITE_LEARNS
from fedstat.federation.dry_run.execution import DryRunRecord, DryRunRequest
from fedstat.federation.protocols.masked_sums import TAKING

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
        for i in range(1, min(more, max(grows, 1)) + 1):
            at = tuple(n + d * i for n, d in zip(shape, step, strict=True))
            out.append((at, round(size * prod(at)) if prod(shape) else last.bytes))
        # A limit of thousands of rounds: messages that no longer grow are equal.
        return out + out[-1:] * (more - len(out))

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
            # What sites report to each other has a length that depends on their rows.
            unknown = (
                step in self.guessed or name == TEXT or (declared.kind == "sealed" and declared.optional)
            )
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


# ----------------------------------------------------------------------------------------------------
# Parties that could learn something from the releases of a fit, and what each could learn.

MAX_ARRAYS_NAMED = 4


def who_learns(
    planned: Sequence[ExpectedArray],
    at: str | None,
    n_masked: int,
    dealers: Mapping[tuple[str, str], str],
) -> Iterator[tuple[str, str]]:
    """Say who could learn what: pairs of a party and a sentence.

    `at` is the site of the coordinator; `n_masked` counts the sites of the masked sums, 0 without any;
    `dealers` name the dealer for the secure product of each two sites, empty for the coordinator.
    """
    coordinator = "Coordinator" if at is None else f"Coordinator, at {at}"
    yield from ((coordinator, sentence) for sentence in coordinator_learns(planned, at))
    yield from ((coordinator, sentence) for sentence in masked_sums_reveal(planned, n_masked))
    yield from (("Sites", sentence) for sentence in sites_learn(planned))
    noisy = any(row.kind == "noisy aggregate" for row in planned)
    yield from (("Collusion", sentence) for sentence in collusions(at, n_masked, dealers, noisy))


def coordinator_learns(planned: Sequence[ExpectedArray], at: str | None) -> Iterator[str]:
    """Say what the coordinator receives in clear, most disclosing first."""
    for kind, meaning in COORDINATOR_LEARNS.items():
        rows = [row for row in planned if row.kind == kind and not row.masked and row.sender != COORDINATOR]
        if not rows:
            continue
        senders = list(dict.fromkeys(row.sender for row in rows))
        entities = min((row.entities for row in rows if row.entities), default=0)
        # A share is random: how many entities are behind it says nothing about what it shows.
        behind = f", of {entities:,} entities or more" if entities and kind != "masked share" else ""
        yield (
            f"receives from {_join_or_count(senders, planned)}{behind} ({kind}): "
            f"{_array_meanings(rows)}. {meaning}."
        )
        if kind == "sketch" and at is not None:
            yield f"sits at {at}, which has the seed of the sketch."


def masked_sums_reveal(planned: Sequence[ExpectedArray], n_masked: int) -> Iterator[str]:
    """List what the coordinator learns in spite of masks."""
    each = [row for row in planned if row.masked and row.kind == "per entity"]
    rows = [row for row in planned if row.masked and row.kind != "per entity"]
    if rows:
        yield (
            f"receives under masks: {_array_meanings(rows)}. It learns the sums over {n_masked} sites, and "
            "no site's part."
        )
    if each:
        yield (
            f"receives sums over {n_masked} sites entity by entity, in every round: {_array_meanings(each)}. "
            "Masks hide a site's part of one round. About as many rounds as there are columns reveal the "
            "rows of all sites. If only one site has a record of an entity, the sum is that site's part."
        )


def sites_learn(planned: Sequence[ExpectedArray]) -> Iterator[str]:
    """State what the sites receive."""
    for kind, meaning in SITE_LEARNS.items():
        rows = [row for row in planned if row.kind == kind and row.sender == COORDINATOR]
        if rows:
            receivers = list(dict.fromkeys(row.receiver for row in rows))
            whom = _join_or_count(receivers, planned)
            yield f"{whom} receive ({kind}): {_array_meanings(rows)}. {meaning}."
    sealing = {row.step for row in planned if row.kind == "sealed"}
    if SEALING in sealing:
        yield "report to each other, sealed, which levels of two columns occur together, and not how often."
    if sealing - {SEALING, TAKING}:
        yield (
            "of a product receive each other's columns less random numbers, sealed, and learn nothing from "
            "them."
        )


def collusions(
    at: str | None, n_masked: int, dealers: Mapping[tuple[str, str], str], noisy: bool = False
) -> Iterator[str]:
    """State which parties learn more together; `noisy` if every site adds noise to its own shares."""
    if n_masked and not hides(n_masked):
        yield f"Masks hide nothing from the other site here. {TWO_SITES}"
    elif n_masked:
        yield (
            f"The coordinator and c of the {n_masked} sites together learn the sum over the other "
            f"{n_masked} - c; if all sites but one collude, they learn the part of the last one."
        )
    where = "the coordinator" if at is None else f"the coordinator (at {at})"
    for dealer in dict.fromkeys(dealers.values()):
        pairs = [f"{one} and {other}" for (one, other), who in dealers.items() if who == dealer]
        yield (
            f"{dealer or where} deals the random numbers for the products of {'; '.join(pairs)}. Together "
            "with one of the two it learns the other's columns at the entities that both have."
        )
    if dealers and noisy:
        yield (
            f"{where[0].upper()}{where[1:]} and all sites but one together know the sums of products with "
            "only that site's noise, which its budget was charged for."
        )
    elif dealers:
        yield (
            f"{where[0].upper()}{where[1:]} and one site of a product together know the sums of products "
            "and that site's columns: these are equations in the other site's columns. They do not "
            "determine continuous columns if a pattern has twice as many entities as columns. They can "
            "determine columns of few values, unless a policy checks sums by bits (discrete)."
        )


def join_names(names: Sequence[str]) -> str:
    """Names in a sentence."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _join_or_count(names: Sequence[str], planned: Sequence[ExpectedArray]) -> str:
    """Names in a sentence; of many that are all to which anything passes, how many they are."""
    every = {name for row in planned for name in (row.sender, row.receiver)} - {COORDINATOR}
    if len(names) > MAX_ARRAYS_NAMED and every.issubset(names):
        return f"all {len(names)} sites"
    return join_names(names)


def _array_meanings(rows: Sequence[ExpectedArray]) -> str:
    """Say what arrays are, in the words of their declarations."""
    whats = list(dict.fromkeys(row.what for row in rows))
    more = len(whats) - MAX_ARRAYS_NAMED
    return "; ".join(whats[:MAX_ARRAYS_NAMED]) + (f"; and {more} more" if more > 0 else "")
