"""Private synthesis: seconds, rounds and bytes; two real tables, also with synthesizers that see all rows.

    python tests/benchmarks/bench_copula.py            all that is left to do, and writes results/copula.md
    python tests/benchmarks/bench_copula.py speed
    FEDSTAT_PEERS=/one/bin/python:/other/bin/python python tests/benchmarks/bench_copula.py peers

Peers may live in other environments (``pip install sdv``; ``pip install dpmm``, which wants Python below 3.12
and numpy 1.26); one that is not installed is left out. A run of a peer is not repeated while
``results/copula_peers.csv`` has its lines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
from clock import Clock, in_a_process
from copula_tables import DATA, REAL, mixed
from table_quality import measure, pairs_apart

import fedstat as fs

RESULTS = Path(__file__).parent / "results"
RUNS, SPEED = RESULTS / "copula_peers.csv", RESULTS / "copula_speed.csv"
PEERS = Path(__file__).parent / "copula_peers.py"
ITERATIONS = {"dpmm MST": ["500"], "dpmm AIM": ["100"]}
"""Steps of a peer's fit: its defaults, 5,000 and 1,000, take an hour."""
SEEDS = {"ours": 3, "ours, hardly any noise": 1, "rows resampled": 3, "dpmm AIM": 1}
"""Runs of a method; others have two."""
REPEATS = 5
CASES = {"one party": 1, "five institutions, secure products": 5}
OURS = ("ours", "ours, hardly any noise")


def synthesizer(table, bounds, sites, epsilon):
    """Put columns at clients whose budgets are this epsilon."""
    policy = fs.Policy(privacy=fs.Budget(epsilon, 1e-6))
    partition = fs.ClientPartition.from_frame(table, columns=sites, policy=policy)
    return fs.CopulaSynthesizer(partition, epsilon, bounds)


# ---- seconds -------------------------------------------------------------------------------------


def speed(sites):
    """Fit and sample 70,000 rows of 55 columns, after a first time that compiles."""
    table, bounds, held = mixed(sites=int(sites))
    clock = Clock()
    for _ in range(REPEATS + 1):
        fit = clock.time("fit", synthesizer(table, bounds, held, 1.0).fit)
        clock.time("sample", fit.sample, len(table), seed=1)
    for _ in range(2):
        clock.time("a table of a resampled release", lambda: fit.sample_tables(2, len(table), seed=1))
    cpu = {stage: float(np.median([row["cpu"] for row in rows[1:]])) for stage, rows in clock.stages.items()}
    cpu["a table of a resampled release"] /= 2
    return cpu | {"rounds": fit.ledger.rounds, "megabytes": fit.ledger.bytes / 1e6}


def run_speed():
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    rows = {case: in_a_process(__file__, "speed", sites) for case, sites in CASES.items()}
    pd.DataFrame(rows).T.round(3).to_csv(SPEED, index_label="case", lineterminator="\n")


# ---- quality -------------------------------------------------------------------------------------


def installed():
    """Methods of the peers that are there, and whose Python runs them."""
    pythons = os.environ.get("FEDSTAT_PEERS", sys.executable).split(":")
    found = {}
    for python in pythons:
        done = subprocess.run([python, str(PEERS), "installed"], capture_output=True, text=True, check=True)
        found |= dict.fromkeys(json.loads(done.stdout), python)
    return found


def make(method, python, coded, seed):
    """Make one table, with the CPU seconds of its making."""
    if method == "rows resampled":
        return coded.table.sample(len(coded.table), replace=True, random_state=seed), np.nan
    if method in OURS:
        clock, bounds = Clock(), {name: range(k) for name, k in coded.levels.items()}
        model = synthesizer(coded.table, bounds, coded.sites, 1.0 if method == "ours" else 10_000.0)
        made = clock.time("all", lambda: model.fit().sample(len(coded.table), seed=seed))
        return made, clock.stages["all"][0]["cpu"]
    with tempfile.TemporaryDirectory() as folder:
        codes, levels, out = (Path(folder) / name for name in ("codes.csv", "levels.json", "out.csv"))
        coded.table.to_csv(codes, index=False)
        levels.write_text(json.dumps(coded.levels))
        command = [python, str(PEERS), method, codes, levels, "1", seed, out, *ITERATIONS.get(method, [])]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{method} failed:\n{done.stderr[-2000:]}")
        return pd.read_csv(out), json.loads(done.stdout.splitlines()[-1])["cpu"]


def run_peers():
    if not DATA.exists():
        sys.exit(f"no data at {DATA}")
    methods = dict.fromkeys(("rows resampled", *OURS)) | installed()
    runs = pd.read_csv(RUNS) if RUNS.exists() else pd.DataFrame(columns=["table", "method", "seed"])
    known = set(runs[["table", "method", "seed"]].itertuples(index=False, name=None))
    for name, read in REAL.items():
        coded = read()
        for method, python in methods.items():
            for seed in range(SEEDS.get(method, 2)):
                if method in ITERATIONS and (name, method, seed) in known:
                    continue
                made, cpu = make(method, python, coded, seed)
                row = {"table": name, "method": method, "seed": seed, "CPU s": cpu}
                row |= measure(coded.table, made, coded.levels)
                if method == OURS[1]:
                    apart = pairs_apart(coded.table, made, coded.levels).sort_values(ascending=False)
                    row["worst pairs"] = "; ".join(f"{pair} {tv:.2f}" for pair, tv in apart[:5].items())
                old = (runs["table"] == name) & (runs["method"] == method) & (runs["seed"] == seed)
                runs = pd.concat([runs[~old], pd.DataFrame([row])], ignore_index=True)
                runs.to_csv(RUNS, index=False, float_format="%.5g", lineterminator="\n")
                print({key: value for key, value in row.items() if value == value}, flush=True)


# ---- the page ------------------------------------------------------------------------------------


def markdown(frame, digits):
    """Lay out a table."""
    text = frame.round(digits).astype(object).where(frame.notna(), "").reset_index().astype(str)
    lines = [list(text), ["---"] * text.shape[1], *text.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write():
    """Write the page from the figures that there are."""
    parts = ["# Private synthesis", "`python tests/benchmarks/bench_copula.py`"]
    if SPEED.exists():
        parts += [
            "## CPU seconds, 70,000 x 55, epsilon 1, one thread",
            f"Medians of {REPEATS}, code compiled. Goals: fit and sample in .6 s at one party, in 3 s with "
            "secure products of five.",
            markdown(pd.read_csv(SPEED, index_col="case"), 2),
        ]
    if RUNS.exists():
        runs = pd.read_csv(RUNS)
        steps = ", ".join(
            f"{peer} {n[0]}" for peer, n in ITERATIONS.items() if (runs["method"] == peer).any()
        )
        parts += [
            "## Two real tables, epsilon 1",
            "Codes of public grids, the same for all. Ours: blocks at four (credit) and five institutions, a "
            "record replaced. Peers see all rows; those of dpmm protect a record that is added or removed, "
            f"with fewer steps of their fits than by default ({steps}); SDV protects nothing. "
            "`pMSE ratio`: a classifier on columns, "
            "squares and products separates 8,000 rows of each table; 1 if they do not differ. "
            "`hardly any noise`: epsilon 10,000, the remaining error is misfit of the Gaussian copula.",
        ]
        for name, some in runs.groupby("table", sort=False):
            means = some.drop(columns=["table", "worst pairs"]).groupby("method", sort=False).mean()
            means["seed"] = some.groupby("method")["seed"].count()
            means = means.rename(columns={"seed": "runs"})
            parts += [f"### {name}", markdown(means, 3), *_verdict(means)]
            worst = some["worst pairs"].dropna()
            parts += [f"Pairs that are least a Gaussian copula (TV): {text}." for text in worst]
    (RESULTS / "copula.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print("\n\n".join(parts))


def _verdict(means):
    """Say how the errors of ranks and pairs compare with those of each private peer."""
    for peer in means.index.intersection(list(ITERATIONS)):
        ranks, pairs = (
            means.loc["ours", one] / means.loc[peer, one] for one in ("Spearman error", "pairs TV")
        )
        lost = "lost" if pairs > 1 else "won"
        yield f"Ours by {peer}: Spearman error {ranks:.2f} (goal: below .33), pairs TV {pairs:.2f} ({lost})."


def main():
    if sys.argv[1:2] == ["task"]:
        print(json.dumps({"speed": speed}[sys.argv[2]](*sys.argv[3:])))
        return
    warnings.simplefilter("ignore", fs.errors.FedstatWarning)
    parts = {"speed": run_speed, "peers": run_peers}
    for part in sys.argv[1:] or parts:
        parts[part]()
    write()


if __name__ == "__main__":
    main()
