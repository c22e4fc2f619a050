"""An exchange folder that has run for long: a warm fit and an idle site, with 50,000 old pairs.

    python tests/benchmarks/bench_exchange.py [PAIRS]

Three sites are served as processes over a folder; one of them has the old pairs of requests and replies, as
if they had never been moved. Seconds of a fit are medians of three. CPU seconds are those of the site,
because wall time depends on other programs of the machine.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd

import fedstat as fs

sys.path.insert(0, str(Path(__file__).parents[1] / "federation" / "transport"))
from operating import make_federation, served_sites

FITS, STARTED, IDLE, YEAR = 3, 40.0, 15.0, 365 * 86400.0


def processor_seconds(process: int) -> float:
    """Seconds of processors that a process has taken."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def put_old_pairs(part: Path, pairs: int) -> None:
    """Lay down questions with their answers, a year old."""
    then = time.time() - YEAR
    for kind in ("asks/{}.ask", "replies/{}.reply"):
        (part / kind).parent.mkdir(parents=True, exist_ok=True)
    for _ in range(pairs):
        number = secrets.token_hex(16)
        for kind in ("asks/{}.ask", "replies/{}.reply"):
            path = part / kind.format(number)
            path.write_bytes(b"old")
            os.utime(path, (then, then))


def measure(pairs: int) -> dict[str, float]:
    """Leave the sites alone, fit until warm and some times more, and leave them alone again."""
    rng = np.random.default_rng(0)
    frames = {name: pd.DataFrame({"x": rng.normal(size=200), "y": rng.integers(0, 2, 200)}) for name in "ABC"}
    with TemporaryDirectory() as place:
        home = Path(place)
        study = make_federation(home, frames)
        put_old_pairs(study / "exchange" / "A", pairs)
        with served_sites(home, frames) as running:
            site = running["A"].pid
            reported = {"pairs": float(pairs)}

            def idle(name: str, wait: float) -> None:
                used = processor_seconds(site)
                time.sleep(wait)
                reported[f"idle {name}, share of a core"] = (processor_seconds(site) - used) / wait

            idle("when it has started", STARTED)
            seconds, taken = [], []
            for i in range(FITS + 1):
                begun, used = time.perf_counter(), processor_seconds(site)
                assert fs.GLORE.from_formula("y ~ x", fs.ClientPartition.connect(study)).fit().converged
                if i:
                    seconds.append(time.perf_counter() - begun)
                    taken.append(processor_seconds(site) - used)
            reported["a warm fit, s"] = median(seconds)
            reported["the site in it, processor s"] = median(taken)
            idle("after it", IDLE)
            reported["left where sites look"] = float(len(os.listdir(study / "exchange" / "A" / "asks")))
    return reported


if __name__ == "__main__":
    for number in map(int, sys.argv[1:] or ["0", "50000"]):
        print("; ".join(f"{name}: {value:.3g}" for name, value in measure(number).items()), flush=True)
