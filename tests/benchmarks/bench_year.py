"""A year of three served sites in fast motion: studies, analyses and corrections, then many analysts at once.

Three processes answer over folders. Twenty studies, each with a coordinator of its own, make 200 analyses,
while one site corrects its records 50 times. Then twenty analysts fit a model at the same time. Printed are
bytes of the state and of the exchange, seconds of a request, and the memory of the site that was corrected.

    python tests/benchmarks/bench_year.py                  all of it; half an hour
    python tests/benchmarks/bench_year.py 20 5 4 5         analyses, corrections, studies, analysts
    python tests/benchmarks/bench_year.py --keep FOLDER    keep the folders, for a look at the pages
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1] / "federation" / "transport"))

from forked import Forked
from operating import make_federation, serve, until_true, wait

import fedstat as fs
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.transport.live_config import ActiveRules
from fedstat.operator.command_line import main

SITES, ROWS, CORRECTED = "ABC", 2_000, 60
FORMULAS = ("y ~ x", "y ~ z", "y ~ x + z", "z ~ x")
POLICY = replace(Policy.strict(), formulas="any", reasons="sent")


def run(*words: object) -> None:
    """Run a command without its output."""
    with redirect_stdout(StringIO()):
        code = main([str(word) for word in words])
    if code:
        raise SystemExit(f"{words}: exit code {code}")


def frame(seed: int) -> pd.DataFrame:
    """Records of one site."""
    rng = np.random.default_rng(seed)
    x, z = rng.normal(size=(2, ROWS)).round(4)
    y = (x + z + rng.normal(size=ROWS)).round(4)
    return pd.DataFrame({"patient_id": np.arange(ROWS), "x": x, "z": z, "y": y})


def set_up(home: Path, studies: int) -> list[Path]:
    """Make sites and the coordinators of all studies; return the coordinators' folders."""
    with redirect_stdout(StringIO()):
        first = make_federation(home, {name: frame(seed) for seed, name in enumerate(SITES)}, policy=POLICY)
    for name in SITES:
        toml = home / name / "site.toml"
        toml.write_text(toml.read_text().replace('# key = "patient_id"', 'key = "patient_id"', 1))
    folders = [first]
    for number in range(1, studies):
        study = home / f"study{number}"
        run("federation", "new", study, "--name", study.name)
        for name in SITES:
            given = ("--name", study.name, "--exchange", study / "exchange")
            run("site", "study", home / name, study / "card.toml", *given)
            run("federation", "join", study, home / name)
        folders.append(study)
    return folders


def correct(home: Path, rng: np.random.Generator) -> None:
    """Correct records of site B, and wait until it has read them."""
    path = home / "B.csv"
    found = pd.read_csv(path, float_precision="round_trip")
    rows = rng.choice(ROWS, CORRECTED, replace=False)
    found.loc[rows, "x"] = (found.loc[rows, "x"] + 0.1).round(4)
    found.to_csv(path, index=False)
    before = ActiveRules.load(home / "B")
    run("site", "reload", home / "B")
    until_true(lambda: (ActiveRules.load(home / "B") or before) != before, 300)


def fit(study: Path, formula: str, person: str) -> None:
    """One analysis from the connection on."""
    partition = fs.ClientPartition.connect(study, person=person, purpose="The yearly report")
    found = fs.FederatedOLS.from_formula(formula, partition).fit(masked=True)
    if found.nobs != len(SITES) * ROWS:
        raise SystemExit(f"{found.nobs} rows")


def bytes_of(folder: Path, pattern: str = "*") -> tuple[int, int]:
    """Number of files and bytes below a folder."""
    sizes = [path.stat().st_size for path in folder.rglob(pattern) if path.is_file()]
    return len(sizes), sum(sizes)


def memory(process: Forked) -> float:
    """Resident memory of a process in MB."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def processor_seconds(process: Forked) -> float:
    """Seconds of the processor that a process has used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(home: Path, process: Forked, done: int, seconds: list[float]) -> None:
    """Print where the site that is corrected stands."""
    site = home / "B"
    n_requests = json.loads((site / "status.json").read_text()).get("requests", 0)
    files, exchanged = 0, 0
    for exchange in home.glob("study*/exchange/B"):
        more = bytes_of(exchange)
        files, exchanged = files + more[0], exchanged + more[1]
    state = {path.name: path.stat().st_size for path in (site / "ledger.jsonl", site / "answered.npz")}
    each = processor_seconds(process) / max(n_requests, 1)
    print(
        f"{done:4d} analyses: median {np.median(seconds[-20:]):6.2f} s each; site B: {n_requests:,} "
        f"requests, {each:.3f} s of processor each, {memory(process):.0f} MB; "
        f"ledger {state['ledger.jsonl'] / 1e3:,.0f} kB, answered {state['answered.npz'] / 1e3:,.0f} kB, "
        f"folder {bytes_of(site)[1] / 1e3:,.0f} kB; exchange {files:,} files, {exchanged / 1e3:,.0f} kB",
        flush=True,
    )


def analyze_at_once(studies: list[Path], analysts: int) -> None:
    """Fit models by many analysts at the same time, each in a study."""
    problems, seconds = [], list[float]()

    def analyze(number: int) -> None:
        began = time.perf_counter()
        try:
            fit(studies[number % len(studies)], FORMULAS[number % len(FORMULAS)], f"Analyst {number}")
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
        seconds.append(time.perf_counter() - began)

    threads = [threading.Thread(target=analyze, args=(number,)) for number in range(analysts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{analysts} analysts at once: {len(problems)} without a fit; {max(seconds):.1f} s for the slowest")
    for problem in problems[:3]:
        print(f"  {problem}")


def simulate(home: Path, analyses: int, corrections: int, studies: int, analysts: int) -> None:
    """Let a year pass."""
    rng, seconds = np.random.default_rng(9), list[float]()
    folders = set_up(home, studies)
    running = {name: serve(home / name) for name in SITES}
    try:
        for name, process in running.items():
            wait(home / name, process)
        every = max(analyses // max(corrections, 1), 1)
        for done in range(analyses):
            if done and done % every == 0:
                correct(home, rng)
            began = time.perf_counter()
            number = done % studies
            fit(folders[number], FORMULAS[number % len(FORMULAS)], f"Analyst {number}")
            seconds.append(time.perf_counter() - began)
            if (done + 1) % max(analyses // 5, 1) == 0 or not done:
                report(home, running["B"], done + 1, seconds)
        analyze_at_once(folders, analysts)
        report(home, running["B"], analyses + analysts, seconds)
    finally:
        for process in running.values():
            process.kill()
            process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", type=int, nargs="*", default=[200, 50, 20, 20])
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.keep is not None:
        given.keep.mkdir(parents=True)
        simulate(given.keep, *given.sizes)
    else:
        with tempfile.TemporaryDirectory() as place:
            simulate(Path(place), *given.sizes)
