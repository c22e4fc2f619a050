"""Seconds, memory, rounds and bytes of federated GLMs and pooled ones.

Every figure comes from a process of its own, on data that were drawn beforehand. The peers see all rows in
one place: statsmodels' GLM and glum, each given the design as an array, so that only the fit is timed.

    python tests/benchmarks/bench_glm.py                    all, and writes results/glm.md
    python tests/benchmarks/bench_glm.py million stream     some, and prints them
    FEDSTAT_EARLIER=/its/bin/python python tests/benchmarks/bench_glm.py small    next to another version
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
from datetime import date
from math import nan
from pathlib import Path

from clock import Clock, in_a_process, peak

ROWS, COLUMNS = 1_000_000, 30
REPEATS = 3
STREAM_ROWS, STREAM_COLUMNS = 20_000_000, 10
CHUNK = 1_000_000
SMALL_FITS, ROUNDS = 10, 3
RESULTS = Path(__file__).parent / "results" / "glm.md"


def draw(n, p, seed=0):
    import numpy as np
    import pandas as pd

    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, p))
    beta = np.random.default_rng(1).normal(size=p) / 8
    frame = pd.DataFrame(X, columns=[f"x{j}" for j in range(p)])
    frame["y"] = (rng.uniform(size=n) < 1 / (1 + np.exp(0.3 - X @ beta))).astype(float)
    return frame


# ---- in a process of its own ---------------------------------------------------------------------


def federated(folder, sites):
    """Partition and agreement on columns, then the fit: coding, sites' own fits, Newton's steps, "
    "judgment."""
    import numpy as np
    import pandas as pd

    import fedstat as fs

    clock = Clock()
    frame = pd.read_parquet(Path(folder) / "million.parquet")
    frame["site"] = np.random.default_rng(2).integers(0, int(sites), len(frame)).astype(str)
    small = fs.ClientPartition.from_frame(frame.head(20_000 * int(sites)), by="site")
    fs.GLORE.from_formula("y ~ .", small).fit()
    before = peak()
    partition = clock.time("partition", fs.ClientPartition.from_frame, frame, by="site")
    del frame
    for _ in range(REPEATS):
        model = clock.time("agreement", fs.GLORE.from_formula, "y ~ .", partition)
        result = clock.time("fit", model.fit)
    clock.time("fit without sites' own fits", model.fit, local=False)
    return {
        "stages": clock.stages,
        "rounds": result.ledger.rounds,
        "bytes": result.ledger.bytes,
        "params": result.params.tolist(),
        "bse": result.bse.tolist(),
        "before": before,
        "peak": peak(),
    }


def statsmodels(folder):
    import numpy as np
    import pandas as pd
    import statsmodels.api as sm

    clock = Clock()
    frame = pd.read_parquet(Path(folder) / "million.parquet")
    y = frame.pop("y").to_numpy()
    X = np.column_stack([np.ones(len(frame)), frame.to_numpy()])
    result = clock.time("fit", sm.GLM(y, X, family=sm.families.Binomial()).fit)
    return {
        "stages": clock.stages,
        "params": result.params.tolist(),
        "bse": result.bse.tolist(),
        "peak": peak(),
    }


def glum(folder):
    """With standard errors, which glum computes after the fit."""
    import numpy as np
    import pandas as pd
    from glum import GeneralizedLinearRegressor

    clock = Clock()
    frame = pd.read_parquet(Path(folder) / "million.parquet")
    y = frame.pop("y").to_numpy()
    X = np.ascontiguousarray(frame.to_numpy())

    def fit():
        model = GeneralizedLinearRegressor(family="binomial", alpha=0, gradient_tol=1e-8)
        model.fit(X, y)
        covariance = model.covariance_matrix(X, y, robust=False, expected_information=True)
        return model, np.sqrt(np.diag(covariance))

    for _ in range(REPEATS):
        model, bse = clock.time("fit", fit)
    params = [float(model.intercept_), *map(float, model.coef_)]
    return {"stages": clock.stages, "params": params, "bse": bse.tolist(), "peak": peak()}


def streamed(folder):
    """One site whose table is a Parquet file that is never in memory as a whole."""
    import fedstat as fs

    clock = Clock()
    path = Path(folder) / "stream.parquet"
    partition = clock.time("partition", fs.ClientPartition.from_files, {"A": path}, layout="horizontal")
    model = clock.time("agreement", fs.GLORE.from_formula, "y ~ .", partition)
    result = clock.time("fit", model.fit)
    return {
        "stages": clock.stages,
        "evaluations": len(result._fit.trace),
        "converged": result.converged,
        "peak": peak(),
        "error": max(abs(result.params.to_numpy()[1:] - truth(STREAM_COLUMNS)) / result.bse.to_numpy()[1:]),
    }


def hospitals(rules, fits):
    """CPU seconds of formula, fit and printed summary over four sites of about 230 rows, after three fits."""
    import time
    import warnings

    import fedstat as fs

    warnings.simplefilter("ignore")
    frame = fs.datasets.make_hospitals()
    policies = {name: fs.Policy.strict() for name in frame["hospital"].unique()} if rules == "strict" else {}
    partition = fs.ClientPartition.from_frame(frame, by="hospital", policies=policies)
    seconds = []
    for _ in range(3 + int(fits)):
        begun = time.process_time()
        str(fs.GLORE.from_formula("num > 0 ~ age + sex + C(cp) + trestbps", partition).fit().summary())
        seconds.append(time.process_time() - begun)
    return {"cpu": seconds[3:]}


def truth(p):
    import numpy as np

    return np.random.default_rng(1).normal(size=p) / 8


# ---- in this process -----------------------------------------------------------------------------


def write_million(folder):
    draw(ROWS, COLUMNS).to_parquet(folder / "million.parquet", index=False)


def write_stream(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    for part in range(STREAM_ROWS // CHUNK):
        table = pa.Table.from_pandas(draw(CHUNK, STREAM_COLUMNS, seed=part), preserve_index=False)
        writer = writer or pq.ParquetWriter(folder / "stream.parquet", table.schema)
        writer.write_table(table)
    writer.close()


def middle(run, stage, what="wall"):
    rows = sorted(row[what] for row in run["stages"][stage])
    return rows[len(rows) // 2]


def million(folder):
    import numpy as np

    write_million(folder)
    ours = in_a_process(__file__, "federated", folder, 10)
    peers = {name: in_a_process(__file__, name, folder) for name in ("statsmodels", "glum")}
    fastest = min(middle(peer, "fit") for peer in peers.values())
    lines = [
        f"## {ROWS:,} rows, {COLUMNS} columns, logistic",
        "",
        "fedstat: 10 sites in one process, from a formula, the sites' own fits and comparison included. "
        "Peers: the fit on an array that is ready, with standard errors.",
        "",
        "| | wall s | CPU s | over the fastest peer | peak MB | largest difference in standard errors |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    reference = peers["statsmodels"]
    rows = {
        "fedstat, partition, model and fit": sum(middle(ours, s) for s in ("partition", "agreement", "fit")),
        "fedstat, fit": middle(ours, "fit"),
        "fedstat, fit without the sites' own": middle(ours, "fit without sites' own fits"),
    }
    away = np.max(np.abs(np.subtract(ours["params"], reference["params"])) / reference["bse"])
    for name, wall in rows.items():
        cpu = f"{middle(ours, 'fit', 'cpu'):.2f}" if name == "fedstat, fit" else ""
        lines.append(
            f"| {name} | {wall:.2f} | {cpu} | {wall / fastest:.2f} | {ours['peak']:.0f} | {away:.1e} |"
        )
    for name, peer in peers.items():
        wall = middle(peer, "fit")
        away = np.max(np.abs(np.subtract(peer["params"], reference["params"])) / reference["bse"])
        lines.append(
            f"| {name} | {wall:.2f} | {middle(peer, 'fit', 'cpu'):.2f} | {wall / fastest:.2f} | "
            f"{peer['peak']:.0f} | {away:.1e} |"
        )
    return [
        *lines,
        "",
        f"Rounds {ours['rounds']}, {ours['bytes'] / 1e3:.0f} kB between sites.".replace("nan", ""),
    ]


def sites(folder):
    if not (folder / "million.parquet").exists():
        write_million(folder)
    runs = {k: in_a_process(__file__, "federated", folder, k) for k in (2, 10, 50)}
    lines = [
        "## More sites, the same rows",
        "",
        "| sites | agreement s | fit s | rounds | kB | peak MB | of which before |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    return lines + [
        f"| {k} | {middle(r, 'agreement'):.2f} | {middle(r, 'fit'):.2f} | {r['rounds']} | "
        f"{r['bytes'] / 1e3:.0f} | {r['peak']:.0f} | {r['before']:.0f} |"
        for k, r in runs.items()
    ]


def stream(folder):
    write_stream(folder)
    run = in_a_process(__file__, "streamed", folder)
    total = sum(middle(run, stage) for stage in ("partition", "agreement", "fit"))
    return [
        f"## {STREAM_ROWS / 1e6:.0f} million rows of {STREAM_COLUMNS} columns, streamed from Parquet at a "
        "site",
        "",
        f"{total:.0f} s in all, {total / (STREAM_ROWS / 1e6):.2f} s per million rows (agreement "
        f"{middle(run, 'agreement'):.0f} s, fit {middle(run, 'fit'):.0f} s with {run['evaluations']} "
        f"evaluations); peak memory {run['peak']:.0f} MB with all libraries; largest error "
        f"{run['error']:.1f} standard errors.",
    ]


def small_fits(rules, python=sys.executable, fits=SMALL_FITS):
    """Median CPU seconds of small fits in one process."""
    return statistics.median(in_a_process(__file__, "hospitals", rules, fits, python=python)["cpu"])


def small(folder):
    """Small fits, next to those of an earlier version whose Python is named by FEDSTAT_EARLIER."""
    earlier = os.environ.get("FEDSTAT_EARLIER", "")
    lines = [
        "## Four sites of about 230 rows, logistic: formula, fit and summary, warm, CPU milliseconds",
        "",
        "| rules | now | earlier | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for rules in ("default", "strict"):
        # In turn, so that other load of the machine counts for both.
        runs = [(small_fits(rules), small_fits(rules, earlier) if earlier else nan) for _ in range(ROUNDS)]
        now, then = (statistics.median(column) for column in zip(*runs, strict=True))
        ratio = statistics.median(a / b for a, b in runs)
        lines.append(f"| {rules} | {1e3 * now:.0f} | {1e3 * then:.0f} | {ratio:.2f} |".replace("nan", "-"))
    return lines


PARTS = {"million": million, "sites": sites, "stream": stream, "small": small}


def main(names):
    text = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names or PARTS:
            text += [*PARTS[name](Path(folder)), ""]
            print("\n".join(text[-30:]), flush=True)
    if not names:
        head = [
            "# Federated generalized linear models",
            "",
            f"{date.today()}, {platform.machine()}, medians of 3.",
        ]
        RESULTS.write_text("\n".join([*head, "", *text]).rstrip() + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["task"]:
        print(json.dumps(globals()[sys.argv[2]](*sys.argv[3:])))
    else:
        main(sys.argv[1:])
