"""Printed summaries, the numbers behind them and the releases of all families equal stored ones.

Where a change is meant, ``python -m pytest tests/contracts/test_golden.py --write-golden`` writes the files
again; ``-k "cox"`` writes those of some fits. The commit says why they change.
"""

import numpy as np
import pytest
from contracts import golden
from contracts.families import FITS, MADE, result

ROWS_BY_NOISE = {"kaplan-meier with noise", "table one with noise"}
"""Fits whose tables have more or fewer rows by chance."""
NAMES = [name for name in (*FITS, *MADE) if name not in ROWS_BY_NOISE]


@pytest.mark.parametrize("name", NAMES)
def test_golden_summary_and_numbers(name, writes_golden):
    found = result(name)
    if writes_golden:
        golden.write(name, found)
    text, numbers = golden.read(name)
    # What is made of a fit may be found by iteration, and repeats its rounding errors.
    tolerance = 10.0 * FITS[MADE[name][0]].tolerance if name in MADE else FITS[name].tolerance
    wrong = golden.text_differences(text, golden.text_of(found), tolerance)
    wrong += golden.differences(
        numbers, golden.json.loads(golden.json.dumps(golden.numbers_of(found))), tolerance
    )
    assert not wrong, "\n".join(wrong[:40])


def test_golden_files_are_those_of_the_registry():
    stored = {path.name for path in golden.FOLDER.iterdir()}
    assert stored == {f"{name.replace(' ', '-')}{end}" for name in NAMES for end in (".txt", ".json")}


def test_golden_comparison_sees_each_kind_of_difference():
    assert not golden.text_differences("a 1.234 b 5", "a 1.235 b 5")
    assert not golden.text_differences("a 1.234 b 5", "a 2 b 50.1", np.inf)
    assert golden.text_differences("a 1.234 b 5", "a 2 c 50.1", np.inf)
    for changed in ("a 1.236 b 5", "a 1.234 b 6", "c 1.234 b 5", "a 1.234 b 5\nmore", "a  1.234 b 5"):
        assert golden.text_differences("a 1.234 b 5", changed), changed
    table = {"term": ["x"], "estimate": [2.0]}
    assert not golden.differences(table, {"term": ["x"], "estimate": [2.0 + 1e-9]}, 1e-9)
    for changed in (
        {"term": ["z"], "estimate": [2.0]},
        {"term": ["x"], "estimate": [2.0 + 1e-8]},
        {"term": ["x"]},
    ):
        assert golden.differences(table, changed, 1e-9), changed
