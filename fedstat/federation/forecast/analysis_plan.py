"""From a forecast to the plan that the owner of one site is asked to consent to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from fedstat.federation.account.entry import TEXT
from fedstat.federation.door.owner.plan import AnalysisPlan, PlannedStep, ReleasedArray
from fedstat.federation.door.site import BEFORE_ALIGNING, FAMILIES
from fedstat.federation.forecast.forecast import Forecast, Planned
from fedstat.federation.forecast.rehearsal import StepAsked

ROOM, LEAST = 2, 12
"""Times the most that a forecast tells of rounds whose number the data decide, and the least of them: a fit
that is refused at its end has shown all and gives nothing."""


@dataclass(frozen=True, slots=True)
class AnalysisWords:
    """What the coordinator says that an analysis is, and who could learn what from it."""

    call: str
    formula: str
    distribution: str
    learned: tuple[str, ...]

    def plan(
        self, site: str, columns: Sequence[str], steps: tuple[PlannedStep, ...], rounds: int
    ) -> AnalysisPlan:
        """Put a plan together."""
        words = (self.call, self.formula, self.distribution)
        return AnalysisPlan(site, *words, tuple(columns), steps, rounds, self.learned)


def told_afterwards(family: str, step: str) -> PlannedStep:
    """Plan one question of a step that takes nothing, and tells a text."""
    told = FAMILIES[family][step].given[TEXT]
    gives = ReleasedArray(TEXT, told.kind, told.what, False, 0, 0)
    return PlannedStep(family, step, 1, False, ("",), (gives,))


@dataclass(frozen=True, slots=True)
class PlanMaker:
    """Makes the plan of every site from one forecast; `guessed` are steps whose sizes are not known."""

    forecast: Forecast
    words: AnalysisWords
    guessed: frozenset[str]

    def plan(self, site: str, columns: Sequence[str], afterwards: Sequence[PlannedStep] = ()) -> AnalysisPlan:
        """Plan for one site, of which these columns are read; also steps that may be asked afterwards."""
        rounds = sum(self._with_room(kinds, max(counts)) for kinds, counts in self.forecast.rounds())
        return self.words.plan(site, columns, (*self._steps(site), *afterwards), rounds)

    def _steps(self, site: str) -> Iterator[PlannedStep]:
        asked: dict[tuple[str, str], list[StepAsked]] = {}
        for one in self.forecast.course.asked:
            if one.site == site and one.family not in BEFORE_ALIGNING:
                asked.setdefault((one.family, one.step), []).append(one)
        planned = self.forecast.planned()
        for (family, step), found in asked.items():
            most = self._with_room((step,), self.forecast.most(site, family, step))
            masked = all(one.masked for one in found)
            texts = tuple(sorted({one.text for one in found}))
            rows = [row for row in planned if row.step == step]
            gives = tuple(self._gives(family, step, found, rows, masked))
            yield PlannedStep(family, step, most, masked, texts, gives)

    def _gives(
        self, family: str, step: str, found: Sequence[StepAsked], planned: Sequence[Planned], masked: bool
    ) -> Iterator[ReleasedArray]:
        for name, declared in FAMILIES[family][step].given.items():
            gave = max((one.gave[name] for one in found if name in one.gave), default=None)
            if gave is None:
                continue
            # In a longer fit than was rehearsed arrays may be larger. What is asked in place is no message,
            # and grows as an array of the same size that is one.
            later = [
                prod(row.shape)
                for row in planned
                if row.array == name and self._rehearsed(row.sender, step, name) == gave
            ]
            unknown = step in self.guessed or name == TEXT
            numbers = 0 if unknown else max([gave, *later])
            hidden = masked and declared.maskable
            entities = max(one.entities for one in found)
            yield ReleasedArray(name, declared.kind, declared.what, hidden, numbers, entities)

    def _rehearsed(self, site: str, step: str, array: str) -> int:
        """Most numbers of an array that one answer had."""
        asked = self.forecast.course.asked
        return max(
            (one.gave.get(array, 0) for one in asked if (one.site, one.step) == (site, step)), default=0
        )

    def _with_room(self, steps: tuple[str, ...], most: int) -> int:
        decided = any(loop.steps.issuperset(steps) for loop in self.forecast.loops)
        return max(ROOM * most, LEAST) if decided else most
