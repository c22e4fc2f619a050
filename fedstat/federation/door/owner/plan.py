"""The plan of an analysis as one site's owner is asked to consent to it: what would be asked, and what leave.

The plan comes from the coordinator, in whose words it says what the analysis is and who could learn what.
What the site holds a session to is checked against its own declarations: columns, steps with their texts, how
often each is asked, what each gives and how much of it; and what the session has asked already is entered by
the site itself. Nothing in a plan is drawn at random, so that the same analysis has the same plan.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fedstat.federation.account.link import canonical
from fedstat.federation.message import Ask, Step
from fedstat.records import Least, from_json, to_plain

DESIGN = "design"
"""Family whose texts are the formula, and so bound to the letter."""
CHANGING = frozenset({"number", "slots", "kept", "posteriors", "past"})
"""Fields of a text that differ from round to round: the number of a product, which mixtures, digests."""
TARGETS = "targets"
"""Field of a text of a design that names transforms, with their state so far."""
QUESTION, CODING, STATES = "question", "spec", "state"
"""Fields of a text of a design: what is asked of rows, and the coding of columns, which has the states."""
WRITTEN = ("bs(", "cr(", "cc(")
"""Beginnings of transforms whose state is written in the formula, and does not follow from sums."""
CENTRED = "constraints="
"""In one of these: means of its columns are sums, and its knots are those of its text."""
READS: Mapping[str, str] = {
    "response": "response",
    "terms": "terms",
    "offsets": "offset",
    "weights": "weights",
    "labels": "groups",
    "columns": "columns",
}
"""What the texts of a design ask for, by field, in words for the owner."""
SHOWN = 12

Count = Annotated[int, Least(0)]


@dataclass(frozen=True, slots=True)
class ReleasedArray:
    """One array that a step gives: of so many `numbers` at the most each time; 0: not known in advance.

    `entities` stand behind it, 0 where none do.
    """

    array: str
    kind: str
    what: str
    masked: bool
    numbers: Count
    entities: Count


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of a plan, asked `most` times at the most: its arrays masked or not, its texts as bound."""

    family: str
    step: str
    most: Count
    masked: bool
    texts: tuple[str, ...]
    gives: tuple[ReleasedArray, ...]


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A question that the session had asked before the plan was proposed, with the digest of its arrays."""

    step: str
    text: str
    digest: str

    @classmethod
    def of(cls, ask: Ask) -> PreparedStep:
        """Take down a question."""
        digest = hashlib.sha256()
        for name in sorted(ask.arrays):
            digest.update(repr((name, ask.arrays[name].shape)).encode() + ask.arrays[name].tobytes())
        return cls(ask.step, ask.text, digest.hexdigest() if ask.arrays else "")


@dataclass(frozen=True, slots=True)
class AnalysisPlan:
    """What one site would be asked in one analysis.

    `call`, `formula`, `distribution` and `learned` are the coordinator's words; `columns` are those of this
    site; `rounds` are the most that the analysis takes at all sites. `prepared` is entered by the site.
    """

    site: str
    call: str
    formula: str
    distribution: str
    columns: tuple[str, ...]
    steps: tuple[PlannedStep, ...]
    rounds: Count
    learned: tuple[str, ...]
    prepared: tuple[PreparedStep, ...] = ()

    @property
    def digest(self) -> str:
        """SHA-256 of the whole plan, by which its owner decides about it."""
        return hashlib.sha256(canonical(to_plain(self)).encode()).hexdigest()

    def find(self, ask: Ask) -> PlannedStep | None:
        """Return the step that is asked; None where it is not in the plan."""
        address = (ask.family, ask.step)
        return next((step for step in self.steps if (step.family, step.step) == address), None)

    def numbers(self) -> dict[str, int]:
        """Numbers that leave at the most, by kind; of arrays of unknown size none are counted."""
        total: dict[str, int] = {}
        for step in self.steps:
            for array in step.gives:
                kind = f"{array.kind}, masked" if array.masked else array.kind
                total[kind] = total.get(kind, 0) + step.most * array.numbers
        return total


def read_plan(text: str | bytes, where: str) -> AnalysisPlan:
    """Read a plan as if a stranger had written it; a MessageError where it is none."""
    return from_json(AnalysisPlan, text, where)


def bound_text(ask: Ask) -> str:
    """Return what of a question's text an owner consents to: all that is said of the design, else its words.

    Estimates that come back in a text, such as a parameter of the distribution, are not known in advance.
    """
    try:
        content = json.loads(ask.text)
    except (ValueError, RecursionError):
        return ask.text
    if ask.family == DESIGN:
        return _bound_design(content) or ask.text
    if not isinstance(content, dict | list):
        return ""
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name not in CHANGING}
    return canonical(_without_numbers(content))


def _bound_design(content: Any) -> str:
    """Return what of a design's text is bound where it depends on sums for transforms; empty where none does.

    What is asked again for every state of a transform is bound by the question that it is about; in the
    coding of rows, states that follow from sums are not known before.
    """
    if not isinstance(content, dict) or QUESTION not in content:
        return ""
    if TARGETS in content:
        return str(content[QUESTION])
    try:
        coding = json.loads(content[CODING])
        states = {
            text: state if text.startswith(WRITTEN) and CENTRED not in text else _without_numbers(state)
            for text, state in coding[STATES].items()
        }
        return canonical({**content, CODING: canonical({**coding, STATES: states})})
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
        return ""


def _without_numbers(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _without_numbers(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_without_numbers(value) for value in content]
    return 0 if isinstance(content, int | float) and not isinstance(content, bool) else content


def misdeclared(plan: AnalysisPlan, families: Mapping[str, Mapping[str, Step]]) -> str:
    """Name a step or an array of a plan that is not declared so here; empty where all are."""
    for planned in plan.steps:
        step = families.get(planned.family, {}).get(planned.step)
        if step is None:
            return f"step '{planned.step}' of family '{planned.family}'"
        for array in planned.gives:
            declared = step.given.get(array.array)
            if declared is None or (declared.kind, declared.what) != (array.kind, array.what):
                return f"array '{array.array}' of step '{planned.step}'"
    return ""


def described(plan: AnalysisPlan) -> Iterator[str]:
    """Say in plain words what a plan asks for, line by line, for the site's owner."""
    for line in dict.fromkeys(_lines(plan)):
        # Names come from elsewhere: what moves a terminal's cursor could write over what is asked for.
        yield "".join(letter if letter.isprintable() else "?" for letter in line)


def _lines(plan: AnalysisPlan) -> Iterator[str]:
    yield f"Analysis, in the coordinator's words: {plan.call}, of {plan.formula}, {plan.distribution}"
    yield f"Columns of {plan.site} that it reads: {', '.join(plan.columns) or 'none'}"
    for text in dict.fromkeys(_asked_texts(plan)):
        yield from _read(text)
    asked = Counter(one.step for one in plan.prepared)
    told = ", ".join(f"{step} ({times} times)" if times > 1 else step for step, times in asked.items())
    yield f"Told before it, of names, kinds, levels, counts and who has which entity: {told or 'nothing'}"
    yield f"Rounds, at the most: {plan.rounds:,}"
    yield "Steps, in their order, and what each gives:"
    for step in plan.steps:
        gives = "; ".join(map(_told, step.gives)) or "nothing"
        often = "once" if step.most == 1 else f"at most {step.most:,} times"
        yield f"  {step.step} ({step.family}), {often}: {gives}"
    sums = ", ".join(f"{n:,} ({kind})" for kind, n in plan.numbers().items() if n)
    yield f"Numbers that leave in all, at the most: {sums or 'none'}"
    yield "Who could learn what, in the coordinator's words:"
    yield from (f"  {sentence}" for sentence in plan.learned or ("Nobody learns anything.",))


def _told(array: ReleasedArray) -> str:
    hidden = ", only in a masked sum" if array.masked else ""
    if array.numbers:
        size = "1 number" if array.numbers == 1 else f"{array.numbers:,} numbers"
    else:
        size = "a text" if array.array == "text" else "any size"
    behind = f" over {array.entities:,} records" if array.entities else ""
    return f"{array.what} ({array.kind}{hidden}; {size}{behind})"


def _asked_texts(plan: AnalysisPlan) -> Iterator[str]:
    yield from (one.text for one in plan.prepared)
    yield from (text for step in plan.steps if step.family == DESIGN for text in step.texts)


def _read(text: str) -> Iterator[str]:
    """Say what a text of a design asks for, as it stands in the question."""
    try:
        content = json.loads(text)
        if isinstance(content, dict) and isinstance(content.get("question"), str):
            content = json.loads(content["question"])
    except (ValueError, RecursionError):
        return
    if not isinstance(content, dict):
        return
    parts = [f"{word} {_named(content[name])}" for name, word in READS.items() if content.get(name)]
    if content.get("terms") or content.get("response"):  # the columns stand above
        parts = [part for part in parts if not part.startswith("columns ")]
    if parts:
        yield f"It asks for: {'; '.join(parts)}"


def _named(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{role} {name}" for role, name in value.items()]
    if not isinstance(value, Sequence) or isinstance(value, str):
        return str(value)
    more = f" and {len(value) - SHOWN} more" if len(value) > SHOWN else ""
    return ", ".join(map(str, value[:SHOWN])) + more
