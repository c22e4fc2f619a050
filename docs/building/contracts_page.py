"""The page of contracts: what holds for every family, and why a contract does not apply to one.

``python docs/building/contracts_page.py`` writes ``docs/contracts.md`` from the registry in tests/contracts.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from contracts.families import FAMILIES
from contracts.over_families import CONTRACTS
from contracts.terms import FURTHER_WEIGHTS, stated

from fedstat.federation.disclosure.site import FAMILIES as STEPS
from fedstat.federation.disclosure.site import load_families

PAGE = Path(__file__).parents[1] / "contracts.md"
INTRODUCTION = """# What holds for every model

<!-- Written by docs/building/contracts_page.py. -->

A contract is one test that runs over all public models and analyses. `tests/contracts/families.py` is the
registry: a small partition and some fits of each model, and a reason for each contract that does not apply. A
public name that is not in the registry fails a test, so a new model has these properties from its first day.
`python -m pytest tests/contracts` runs them.

The same folder has golden files: the printed summary of each fit, the numbers behind it, and what its sites
released. A change of any of them fails a test. Where it is meant,
`python -m pytest tests/contracts/test_golden.py --write-golden` writes the files again.
"""


def page() -> str:
    """Return the text of the page."""
    parts = _contracts(), _table(), _reasons(), _row_level_values(), _sums_without_terms()
    return "\n".join([INTRODUCTION, *(line for part in parts for line in (*part, ""))])


def _contracts() -> Iterator[str]:
    yield "## Contracts\n"
    yield "| contract | what holds |"
    yield "|---|---|"
    for name, text in CONTRACTS.items():
        yield f"| {name} | {text} |"


def _numbers() -> dict[str, int]:
    """Return the number of each reason, in order of appearance."""
    reasons = dict.fromkeys(reason for family in FAMILIES.values() for reason in family.gaps.values())
    return {reason: number for number, reason in enumerate(reasons, 1)}


def _table() -> Iterator[str]:
    numbers, names = _numbers(), list(CONTRACTS)
    yield "## By model\n"
    yield "`+` means that the contract is tested; a number is the reason below why it does not apply.\n"
    yield f"| | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for family in FAMILIES.values():
        cells = (str(numbers[family.gaps[name]]) if name in family.gaps else "+" for name in names)
        yield f"| `{family.name}` | {' | '.join(cells)} |"


def _reasons() -> Iterator[str]:
    yield "## Reasons\n"
    for reason, number in _numbers().items():
        yield f"{number}. {reason[0].upper()}{reason[1:]}."


def _row_level_values() -> Iterator[str]:
    load_families()
    yield "## Values with one number for each entity\n"
    yield (
        "A site releases these arrays only where its policy allows numbers for each entity (`per_entity`), "
        "or raw columns. The strict policy allows none.\n"
    )
    yield "| family | step | array | kind | what |"
    yield "|---|---|---|---|---|"
    for family, steps in sorted(STEPS.items()):
        for name, step in sorted(steps.items()):
            own = getattr(step.run, "__module__", "").startswith("fedstat.")  # and no family of a test
            for array, one in step.given.items():
                if own and one.kind in ("per entity", "raw columns"):
                    yield f"| {family} | {name} | {array} | {one.kind} | {one.what} |"


def _sums_without_terms() -> Iterator[str]:
    yield "## Sums that the release history does not compare\n"
    yield (
        "A site compares the weights of its sums over rows with those of all earlier sums. For the steps "
        "below, it does so not at all, or not for all weights. `*` means all other steps of the family.\n"
    )
    yield "| family | step | reason |"
    yield "|---|---|---|"
    for (family, step), reason in sorted((stated() | FURTHER_WEIGHTS).items()):
        yield f"| {family} | {step} | {reason[0].upper()}{reason[1:]}. |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
