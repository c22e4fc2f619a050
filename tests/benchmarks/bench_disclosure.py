"""What disclosure checks cost: the release history, and fits under the strict policy next to the open one.

    python tests/benchmarks/bench_disclosure.py

writes results/disclosure.md; `... bench_disclosure.py fits 3` prints the fits alone, of three turns. Figures
are medians; fits of the two policies take turns in one process, and CPU seconds count.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd

import fedstat as fs
from fedstat.federation.disclosure.release_history import ReleasedSums
from fedstat.federation.disclosure.weight_spaces import adds_groups

RESULT = Path(__file__).parent / "results" / "disclosure.md"
ENTITIES, PATTERNS, GROUPS = 1_000_000, 60, 10_000


def memory_check() -> dict[str, float]:
    """One group more, over a million entities, when 10,000 unions of 60 patterns have left."""
    rng = np.random.default_rng(0)
    pattern = rng.integers(0, PATTERNS, ENTITIES)
    released = ReleasedSums.none(ENTITIES).with_groups(pattern)
    # Further unions of these patterns are combinations of them: the stored basis must stay the same.
    for _ in range(20):
        union = rng.random(PATTERNS) < 0.5
        after = released.with_groups(np.where(union[pattern], 0, -1))
        assert not adds_groups(after.spaces, len(released.spaces.sums))
    seconds = []
    for _ in range(41):
        union = rng.random(PATTERNS) < 0.5
        code = np.where(union[pattern], 0, -1)
        began = time.perf_counter()
        assert not released.with_groups(code).isolates(5, released)
        seconds.append(time.perf_counter() - began)
    return {"a group that cuts no pattern, ms": 1e3 * median(seconds)}


def division_check() -> dict[str, float]:
    """The same for requested groups that split the patterns differently."""
    rng = np.random.default_rng(1)
    released = ReleasedSums.none(ENTITIES)
    seconds = []
    for _ in range(12):
        code = np.where(rng.random(ENTITIES) < 0.7, 0, -1)
        began = time.perf_counter()
        after = released.with_groups(code)
        isolated = after.isolates(5, released)
        seconds.append(time.perf_counter() - began)
        released = released if isolated else after
    cells = len(np.unique([one.codes for one in released.spaces.patterns], axis=1).T)
    return {f"a group that cuts all {cells:,} cells, ms": 1e3 * median(seconds[-4:])}


ROWS, SITES, NUMBERS, INDICATORS = 1_000_000, 10, 24, 6
LIMITS = {"GLORE, 1,000,000 rows x 30, 10 sites": 1.25, "VFEM, packaged": 1.2}
"""Largest ratios of strict to open."""


def models(policy: str, table: pd.DataFrame, blocks: dict[str, pd.DataFrame]):
    """Fits of new partitions, whose sites remember nothing yet, by name."""
    formula = "y ~ " + " + ".join(table.columns[:-2])
    rows = fs.ClientPartition.from_frame(table, by="site", policy=policy)
    columns = fs.ClientPartition.from_frames(blocks, on="enterprise_id", policy=policy)
    calls = (
        lambda: fs.GLORE.from_formula(formula, rows).fit(masked=True),
        lambda: fs.VFEMRegression.from_formula("NPGR ~ .", columns).fit(),
    )
    return zip(LIMITS, calls, strict=True)


def fits(turns: int = 5) -> dict[str, float]:
    """CPU seconds of fits under either policy, in turns; the first turn compiles."""
    rng = np.random.default_rng(2)
    table = pd.DataFrame(rng.normal(size=(ROWS, NUMBERS)), columns=[f"x{j}" for j in range(NUMBERS)])
    for j in range(INDICATORS):
        table[f"b{j}"] = (rng.random(ROWS) < 0.1 * (j + 1)).astype(float)
    table["y"] = (rng.random(ROWS) < 1 / (1 + np.exp(-table.x0))).astype(float)
    table["site"] = rng.choice([f"S{k}" for k in range(SITES)], ROWS)
    blocks = fs.datasets.load_sme()
    seconds: dict[str, list[float]] = {}
    for turn in range(turns + 1):
        for policy in ("open", "strict"):
            for name, fit in models(policy, table, blocks):
                began = time.process_time()
                fit()
                if turn:
                    seconds.setdefault(f"{name}, {policy}, CPU s", []).append(time.process_time() - began)
    found = {name: median(values) for name, values in seconds.items()}
    return found | {
        f"{name}, strict to open, at most {most}": found[f"{name}, strict, CPU s"]
        / found[f"{name}, open, CPU s"]
        for name, most in LIMITS.items()
    }


def main(arguments: list[str]) -> None:
    warnings.simplefilter("ignore")
    alone = arguments[:1] == ["fits"]
    figures = fits(*map(int, arguments[1:])) if alone else memory_check() | division_check() | fits()
    lines = ["# What disclosure checks cost", "", "| | median |", "| --- | --- |"]
    lines += [f"| {name} | {value:,.3f} |" for name, value in figures.items()]
    lines += ["", "`python tests/benchmarks/bench_disclosure.py`"]
    if not alone:
        RESULT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
