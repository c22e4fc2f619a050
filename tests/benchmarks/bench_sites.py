"""A logistic fit over many sites in one process: seconds and bytes, masks with few neighbors or all others.

python tests/benchmarks/bench_sites.py            10, 50, 200 and 500 sites, and writes results/sites.md
python tests/benchmarks/bench_sites.py 10 200     some numbers, printed only
"""

from __future__ import annotations

import json
import platform
import sys
import time
import warnings
from datetime import date
from pathlib import Path

import numpy as np
import pandas as pd
from clock import in_a_process, peak

import fedstat as fs
from fedstat.federation.protocols import key_agreement

SITES = (10, 50, 200, 500)
ROWS = 100
RESULTS = Path(__file__).parent / "results" / "sites.md"


def patients(n_sites: int) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    n = ROWS * n_sites
    frame = pd.DataFrame({"x": rng.normal(size=n), "z": rng.normal(size=n)})
    frame["y"] = (rng.random(n) < 1 / (1 + np.exp(-frame["x"]))).astype(int)
    return frame.assign(hospital=np.repeat([f"h{k:03d}" for k in range(n_sites)], ROWS))


def fit(n_sites: int) -> dict[str, float]:
    """Agreement on columns and a fit under the strict policy; sites are there, and code is compiled."""
    partition = fs.ClientPartition.from_frame(patients(n_sites), by="hospital", policy="strict")
    wall, cpu = time.perf_counter(), time.process_time()
    result = fs.GLORE.from_formula("y ~ x + z", partition).fit()
    spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "peak": peak()}
    frame = result.ledger.to_frame()
    about_keys = frame[frame["what"].str.contains("keys") | frame["what"].str.contains("session")]
    return spent | {
        "rounds": result.ledger.rounds,
        "bytes": result.ledger.bytes / n_sites,
        "keys": about_keys["bytes"].sum() / n_sites,
    }


def task(n_sites: int, pairs: str) -> None:
    warnings.simplefilter("ignore")
    fit(4)  # compiles
    if pairs == "all":
        key_agreement.is_sparse = lambda n_sites: False
    print(json.dumps(fit(n_sites)))


def row(n_sites: int, pairs: str, found: dict[str, float]) -> str:
    cells = [n_sites, pairs, f"{found['wall']:.1f}", f"{found['cpu']:.1f}", f"{found['peak']:,.0f}"]
    cells += [f"{found['rounds']:.0f}", f"{found['bytes'] / 1e3:.1f}", f"{found['keys'] / 1e3:.1f}"]
    return f"| {' | '.join(map(str, cells))} |"


def main(numbers: tuple[int, ...]) -> None:
    head = "| sites | masks with | s | CPU s | MB | rounds | kB a site | of these for keys |"
    lines = [head, "| --- " * 8 + "|"]
    print(head)
    for n_sites in numbers:
        # all pairs of 500 are 250,000 exchanges of keys: not waited for
        for pairs in ("neighbors",) if n_sites in (10, 500) else ("neighbors", "all"):
            lines.append(row(n_sites, pairs, in_a_process(__file__, "fit", n_sites, pairs)))
            print(lines[-1], flush=True)
    if numbers == SITES:
        about = (
            "# Many sites in one process\n\n"
            f"Logistic regression of {ROWS} rows a site under the strict policy, model and fit; "
            f"{date.today()}, {platform.machine()}, two cores that were shared with many "
            "other processes: CPU seconds compare. Written by `bench_sites.py`.\n\n"
        )
        RESULTS.write_text(about + "\n".join(lines) + "\n")


if __name__ == "__main__":
    if sys.argv[1:3] == ["task", "fit"]:
        task(int(sys.argv[3]), sys.argv[4])
    else:
        main(tuple(map(int, sys.argv[1:])) or SITES)
