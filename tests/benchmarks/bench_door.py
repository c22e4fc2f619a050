"""What the door costs: holding a group against all that ever left, and fits under either policy.

    python tests/benchmarks/bench_door.py

writes results/door.md. Medians of several runs in one process; ratios of two policies are taken in turns.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd

import fedstat as fs
from fedstat.federation.disclosure.release_history import ReleasedGroups

RESULT = Path(__file__).parent / "results" / "door.md"
ENTITIES, PATTERNS, GROUPS = 1_000_000, 60, 10_000


def memory_check() -> dict[str, float]:
    """One group more, over a million entities, when 10,000 unions of 60 patterns have left."""
    rng = np.random.default_rng(0)
    pattern = rng.integers(0, PATTERNS, ENTITIES)
    released = ReleasedGroups.none(ENTITIES).with_groups(pattern)
    # Further unions of these patterns are combinations of them: what is kept stays as it is, which is shown.
    for _ in range(20):
        union = rng.random(PATTERNS) < 0.5
        released = released.with_groups(np.where(union[pattern], 0, -1))
    assert released.basis.shape == (PATTERNS, PATTERNS)
    seconds = []
    for _ in range(41):
        union = rng.random(PATTERNS) < 0.5
        code = np.where(union[pattern], 0, -1)
        began = time.perf_counter()
        assert not released.with_groups(code).fewest_isolated(5)
        seconds.append(time.perf_counter() - began)
    return {"a group that cuts no pattern, ms": 1e3 * median(seconds)}


def division_check() -> dict[str, float]:
    """The same where the asked groups cut the patterns anew."""
    rng = np.random.default_rng(1)
    released = ReleasedGroups.none(ENTITIES)
    seconds = []
    for _ in range(12):
        code = np.where(rng.random(ENTITIES) < 0.7, 0, -1)
        began = time.perf_counter()
        after = released.with_groups(code)
        isolated = after.fewest_isolated(5)
        seconds.append(time.perf_counter() - began)
        released = released if isolated else after
    return {f"a group that cuts all {released.basis.shape[1]:,} cells, ms": 1e3 * median(seconds[-4:])}


def fits() -> dict[str, float]:
    """Seconds of a fit under either policy, in turns."""
    rng = np.random.default_rng(2)
    n = 200_000
    frame = pd.DataFrame(rng.normal(size=(n, 10)), columns=[f"x{j}" for j in range(10)])
    frame["site"] = rng.choice(["A", "B", "C", "D"], n)
    frame["y"] = (rng.random(n) < 1 / (1 + np.exp(-frame.x0))).astype(float)
    formula = "y ~ " + " + ".join(f"x{j}" for j in range(10))
    blocks = fs.datasets.load_sme()
    seconds: dict[str, list[float]] = {}
    for turn in range(9):
        for policy in ("open", "strict"):
            rows = fs.ClientPartition.from_frame(frame, by="site", policy=policy)
            columns = fs.ClientPartition.from_frames(blocks, on="enterprise_id", policy=policy)
            for name, model in (
                ("GLORE, 200,000 rows", lambda p=rows: fs.GLORE.from_formula(formula, p).fit(masked=True)),
                ("VFEM, packaged", lambda p=columns: fs.VFEMRegression.from_formula("NPGR ~ .", p).fit()),
            ):
                began = time.perf_counter()
                model()
                if turn:
                    seconds.setdefault(f"{name}, {policy}, s", []).append(time.perf_counter() - began)
    return {name: median(values) for name, values in seconds.items()}


def main() -> None:
    warnings.simplefilter("ignore")
    figures = memory_check() | division_check() | fits()
    lines = ["# What the door costs", "", "| | median |", "| --- | --- |"]
    lines += [f"| {name} | {value:,.3f} |" for name, value in figures.items()]
    for name in ("GLORE, 200,000 rows", "VFEM, packaged"):
        ratio = figures[f"{name}, strict, s"] / figures[f"{name}, open, s"]
        lines.append(f"| {name}, strict to open | {ratio:.3f} |")
    lines += ["", "`python tests/benchmarks/bench_door.py`"]
    RESULT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
