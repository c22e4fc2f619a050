"""Seconds and memory of boosting with curves: 1,000 curves on 20, cross-validation, 100,000 from Parquet.

Every figure comes from a process of its own, on curves that were drawn beforehand; a fit is all of
``model.fit``: disclosure checks and ledger of every site, sums, path. With R and FDboost, also its fit.

    python tests/benchmarks/bench_boost.py                   all, and writes results/boost.md
    python tests/benchmarks/bench_boost.py fit start large   some, and prints them
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from clock import Clock, in_a_process, peak

ROWS, LARGE, P, POINTS, STEPS = 1_000, 100_000, 20, 101, 100
REPEATS = 5
NAMES = [f"x{p}" for p in range(P)]
TEXT = "y(t) ~ " + " + ".join(f"bsignal({name})" for name in NAMES)
FIT = {"separable": "separable", "fdboost": "FDboost's numbers"}
GOALS = {"separable": 0.05, "fdboost": 0.2, "cv": 0.3, "large": 2.0}
RESULTS = Path(__file__).parent / "results" / "boost.md"
PEER = Path(__file__).parent / "fdboost_peer.R"


def draw(n, seed=0):
    """Predictors (P, n, 101) and responses (n, 101); five of them have an effect."""
    import numpy as np

    from fedstat.kernels.curves import spline_basis

    random, t = np.random.default_rng(seed), np.linspace(0, 1, POINTS)
    X = random.normal(size=(P, n, 9)) @ spline_basis(t, 0, 1, 5).T
    betas = [10 * np.outer(np.sin(np.pi * (p + 1) * t), np.cos(np.pi * t)) / POINTS for p in range(5)]
    return X, sum(x @ beta for x, beta in zip(X, betas, strict=False)) + random.normal(size=(n, POINTS))


def write_curves(folder):
    import numpy as np

    X, Y = draw(ROWS)
    np.savez(folder / "curves.npz", X=X, Y=Y)


def write_large(folder):
    """One row group is one chunk of a stream."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer, size = None, 4_000
    for part in range(LARGE // size):
        X, Y = draw(size, seed=part)
        ends = np.arange(0, (size + 1) * POINTS, POINTS, dtype=np.int32)
        lists = {
            n: pa.ListArray.from_arrays(ends, x.ravel()) for n, x in zip((*NAMES, "y"), (*X, Y), strict=True)
        }
        table = pa.table(lists)
        writer = writer or pq.ParquetWriter(
            folder / "large.parquet", table.schema, compression="none", use_dictionary=False
        )
        writer.write_table(table)
    writer.close()


# ---- in a process of its own ---------------------------------------------------------------------


def partition_of(folder, sites=1, **options):
    import numpy as np
    import pandas as pd

    import fedstat as fs

    held = np.load(Path(folder) / "curves.npz")
    frame = pd.DataFrame({name: list(x) for name, x in zip(NAMES, held["X"], strict=True)})
    frame = frame.assign(y=list(held["Y"]), site=np.arange(len(frame)) % int(sites))
    frame["site"] = frame["site"].map("site {}".format)
    curves = {name: fs.Curve(name, domain=(0, 1)) for name in (*NAMES, "y")}
    return fs.ClientPartition.from_frame(frame, by="site", curves=curves, **options)


def fit(folder, penalty, sites):
    """A fit under the rules that a site has by default; folds of 100 rows need an owner who allows more."""
    import fedstat as fs

    clock = Clock()
    partition = partition_of(folder, sites)
    folds = partition_of(folder, sites, policy=fs.Policy(max_parameters=10.0))
    fs.FedFunctionBoost.from_formula(TEXT, partition, penalty=penalty).fit(steps=STEPS)
    for _ in range(REPEATS):
        model = clock.time("model", fs.FedFunctionBoost.from_formula, TEXT, partition, penalty=penalty)
        result = clock.time("fit", model.fit, steps=STEPS)
        model = fs.FedFunctionBoost.from_formula(TEXT, folds, penalty=penalty)
        clock.time("cv", model.fit, steps=STEPS, select="cv", seed=1)
    return {
        "stages": clock.stages,
        "left": (1.0 - result.rsquared) * result._total_squares,
        "megabytes": result.ledger.bytes / 1e6,
    }


def start(folder):
    """The first fit of a process."""
    clock = Clock()

    def imports():
        import pandas

        import fedstat.models.boost.model as model

        return pandas, model

    _, model = clock.time("imports", imports)
    partition = clock.time("partition", partition_of, folder)
    made = clock.time("model", model.FedFunctionBoost.from_formula, TEXT, partition)
    clock.time("first fit", made.fit, steps=STEPS)
    clock.time("second fit", made.fit, steps=STEPS)
    return {"stages": clock.stages}


def large(folder):
    import fedstat as fs

    clock = Clock()
    curves = {name: fs.Curve(name, domain=(0, 1)) for name in (*NAMES, "y")}
    path = Path(folder) / "large.parquet"
    partition = clock.time(
        "partition", fs.ClientPartition.from_files, {"A": path}, layout="horizontal", curves=curves
    )
    model = clock.time("model", fs.FedFunctionBoost.from_formula, TEXT, partition)
    before = peak()
    result = clock.time("fit", model.fit, steps=STEPS)
    return {"stages": clock.stages, "before": before, "peak": peak(), "rsquared": result.rsquared}


def fdboost(folder):
    """FDboost on the pooled rows, in R; CPU seconds of its fit, or None where R lacks it."""
    import numpy as np

    rscript = shutil.which("Rscript")
    has = rscript and subprocess.run([rscript, "-e", "library(FDboost)"], capture_output=True).returncode == 0
    if not has:
        return None
    held = np.load(Path(folder) / "curves.npz")
    for name, values in zip((*NAMES, "y"), (*held["X"], held["Y"]), strict=True):
        values.ravel(order="F").tofile(Path(folder) / name)
    done = subprocess.run(
        [rscript, str(PEER), folder, str(ROWS), str(POINTS), str(P), str(STEPS)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    version, cpu, wall, left = done.stdout.split()
    return {"version": version, "cpu": float(cpu), "wall": float(wall), "left": float(left)}


# ---- in this process -----------------------------------------------------------------------------


def middle(run, stage, what="cpu"):
    rows = sorted(row[what] for row in run["stages"][stage])
    return rows[len(rows) // 2]


def verdict(found, goal):
    return f"{goal:g} ({'met' if found < goal else 'not met'})"


def fit_table(folder):
    write_curves(folder)
    peer = in_a_process(__file__, "fdboost", folder)
    lines = [
        f"## {ROWS:,} responses of {POINTS} points on {P} curves, {STEPS} steps",
        "",
        f"Medians of {REPEATS} fits with compiled code: checks, ledger, sums and path; the model separately. "
        "Ten folds of 100 rows for 281 columns are refused by a site's default rule; they are timed with an "
        "owner who allows them.",
        "",
        "| penalty | sites | model, CPU s | fit, CPU s | goal | wall s | ten-fold CV, CPU s | goal | MB |"
        + (" FDboost's CPU s over the fit's |" if peer else ""),
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |" + (" --- |" if peer else ""),
    ]
    left = 0.0
    for penalty, label in FIT.items():
        for sites, how in ((1, "1"), (3, "3, masked")):
            run = in_a_process(__file__, "fit", folder, penalty, sites)
            cpu, cv, left = middle(run, "fit"), middle(run, "cv"), run["left"]
            goals = ["", ""]
            if sites == 1:
                goals = [
                    verdict(cpu, GOALS[penalty]),
                    verdict(cv, GOALS["cv"]) if penalty == "separable" else "",
                ]
            lines.append(
                f"| {label} | {how} | {middle(run, 'model'):.3f} | {cpu:.3f} | {goals[0]} | "
                f"{middle(run, 'fit', 'wall'):.3f} | {cv:.2f} | {goals[1]} | {run['megabytes']:.1f} |"
                + (f" {peer['cpu'] / cpu:.0f} |" if peer else "")
            )
    if peer is None:
        return [*lines, "", "R has no FDboost here: no peer in this run.", ""]
    return [
        *lines,
        "",
        f"FDboost {peer['version']} in the same run: {peer['cpu']:.1f} CPU s, {peer['wall']:.1f} s; sum of "
        f"squares left {peer['left']:.6g}, ours {left:.6g}.",
        "",
    ]


def start_table(folder):
    write_curves(folder)
    lines = [
        "## The first fit of a process",
        "",
        "| | imports | partition | model | first fit | second fit |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    compiled = in_a_process(__file__, "start", folder)
    with tempfile.TemporaryDirectory() as cache:
        before = os.environ.get("NUMBA_CACHE_DIR")
        os.environ["NUMBA_CACHE_DIR"] = cache
        anew = in_a_process(__file__, "start", folder)
        os.environ.pop("NUMBA_CACHE_DIR")
        if before is not None:
            os.environ["NUMBA_CACHE_DIR"] = before
    for name, run in (("compiled before, CPU s", compiled), ("nothing compiled, CPU s", anew)):
        lines.append(f"| {name} | " + " | ".join(f"{middle(run, s):.2f}" for s in run["stages"]) + " |")
    return [*lines, ""]


def large_table(folder):
    write_large(folder)
    run = in_a_process(__file__, "large", folder)
    size = (folder / "large.parquet").stat().st_size / 1e6
    cpu, wall = middle(run, "fit"), middle(run, "fit", "wall")
    return [
        f"## {LARGE:,} responses on {P} curves, one site, streamed from Parquet ({size:,.0f} MB)",
        "",
        "| model, CPU s | fit, CPU s | goal | wall s | peak before, MB | peak, MB |",
        "| --- | --- | --- | --- | --- | --- |",
        f"| {middle(run, 'model'):.2f} | {cpu:.2f} | {verdict(cpu, GOALS['large'])} | {wall:.2f} | "
        f"{run['before']:.0f} | {run['peak']:.0f} |",
        "",
    ]


PARTS = {"fit": fit_table, "start": start_table, "large": large_table}
TASKS = {task.__name__: task for task in (fit, start, large, fdboost)}


def main(wanted):
    lines = [
        "# Boosting with curves: seconds and memory",
        "",
        f"{date.today()}, Python {platform.python_version()}, {platform.machine()}, one thread.",
        "",
    ]
    for part in wanted or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            lines += PARTS[part](Path(folder))
        print("\n".join(lines[-8:]), flush=True)
    if not wanted:
        RESULTS.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.argv[1:2] == ["task"]:
        print(json.dumps(TASKS[sys.argv[2]](*sys.argv[3:])))
    else:
        main(sys.argv[1:])
