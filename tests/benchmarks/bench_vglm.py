"""Seconds of penalized paths and of pooled peers; rounds and bytes of the two exchanges of VerticalGLM.

Every figure comes from a process of its own with one thread, on data that were drawn beforehand. The paths
are timed without an exchange between sites; bench_user.py times a complete fit of VerticalGLM. The peers,
glmnet of R and pycasso, see all rows in one place. pycasso may live in another environment; a peer that is
not installed is left out:

    python tests/benchmarks/bench_vglm.py                        all, and writes results/vglm.md
    FEDSTAT_PEERS=/other/bin/python python tests/benchmarks/bench_vglm.py logistic
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
from importlib import metadata, util
from pathlib import Path

from clock import Clock

ROWS, COLUMNS, LAMBDAS, RATIO = 20_000, 200, 50, 1e-2
REPEATS, TURNS = 3, 2
"""Fits of a kind in a process, and processes: programs take turns, so that a busy spell meets them all."""

TOLERANCES = {
    "fedstat": ("1e-3", "1e-4", "1e-5", "1e-7"),
    "pycasso": ("1e-4", "1e-5"),
    "glmnet": ("1e-7", "1e-8", "1e-9", "1e-10", "1e-11"),
}
"""Each program's own measure: an objective compares them. The default of fedstat and glmnet is 1e-7."""

TIGHT = 1e-10
"""Tolerance of fedstat for the objectives that all others are compared with."""

LIKE = 10.0
"""A peer is about as accurate if its excess of the objective is at most this many times as large."""

ALGORITHMS = {"gaussian": ("covariance", "naive"), "binomial": ("Newton", "modified.Newton")}
"""Those of glmnet, its default first."""

RESULTS = Path(__file__).parent / "results" / "vglm.md"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def draw():
    """Equally correlated standardized columns, 20 of them with an effect, and both kinds of response."""
    import numpy as np

    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, COLUMNS)) + 0.5 * rng.normal(size=(ROWS, 1))
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    eta = X[:, :20] @ (0.3 * (-1.0) ** np.arange(20))
    binary = (rng.random(ROWS) < 1.0 / (1.0 + np.exp(-eta))).astype(float)
    held = {"X": X, "gaussian": eta + rng.normal(size=ROWS), "binomial": binary}
    for family in ("gaussian", "binomial"):
        largest = np.abs(X.T @ (held[family] - held[family].mean())).max() / ROWS
        held[f"{family} lambdas"] = largest * RATIO ** (np.arange(LAMBDAS) / (LAMBDAS - 1))
    return held


# ---- in a process of its own ---------------------------------------------------------------------


def load(file):
    import numpy as np

    with np.load(file) as held:
        return {name: held[name] for name in held.files}


def sums_of_products(X, y):
    """As every client forms them; (p, p) and (p,), over N."""
    import numpy as np

    from fedstat.kernels.row_products import column_sums, gram

    return gram(X, np.ones(ROWS)) / ROWS, column_sums(X, y) / ROWS


def gram(file):
    """Sums of products, and the paths that follow from them."""
    import numpy as np

    from fedstat.kernels.penalized.coordinate_descent import gram_path
    from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty

    data, clock = load(file), Clock()
    X, y = data["X"], data["gaussian"] - data["gaussian"].mean()
    for _ in range(REPEATS + 1):
        G, c = clock.time("sums of products", sums_of_products, X, y)
        for penalty in ("lasso", "scad", "mcp"):
            call = (G, c, Penalty(penalty), CoefficientGroups.single(COLUMNS))
            clock.time(penalty, gram_path, *call, size=LAMBDAS, ratio=RATIO, algorithm="descent")
            if penalty != "lasso":
                clock.time(f"{penalty}, lla", gram_path, *call, size=LAMBDAS, ratio=RATIO, algorithm="lla")
    return {"stages": {name: rows[1:] for name, rows in clock.stages.items()}, "p": int(np.shape(G)[0])}


def objectives(family, X, y, intercepts, coefficients, lambdas):
    """Objective of the lasso at each lambda: half the mean deviance and the penalty."""
    import numpy as np

    eta = intercepts[:, None] + coefficients @ X.T
    half_deviance = (y - eta) ** 2 / 2.0 if family == "gaussian" else np.logaddexp(0.0, eta) - y * eta
    return (half_deviance.mean(axis=1) + lambdas * np.abs(coefficients).sum(axis=1)).tolist()


def lasso_from_rows(X, y, lambdas, tol):
    """The kernel that one client with all rows runs; (L,) and (L, p)."""
    import numpy as np
    import statsmodels.api as sm
    from pooled_path import glm_path

    from fedstat.kernels.glm.distributions import DistributionSpec
    from fedstat.kernels.glm.sums import Rows
    from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty

    groups = CoefficientGroups.single(COLUMNS + 1, np.r_[0.0, np.ones(COLUMNS)])
    rows, spec = Rows(np.column_stack([np.ones(ROWS), X]), y), DistributionSpec.of(sm.families.Binomial())
    b = glm_path(rows, spec, Penalty("lasso"), groups, lambdas=lambdas, tol=tol).coefficients
    return b[:, 0], b[:, 1:]


def lasso_from_sums(X, y, lambdas, tol):
    """Sums of products about the means, and the path that follows from them; (L,) and (L, p)."""
    import numpy as np

    from fedstat.kernels.penalized.coordinate_descent import gram_path
    from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty

    mean, level = X.mean(axis=0), y.mean()
    G, c = sums_of_products(X, y)
    G, c = G - np.outer(mean, mean), c - level * mean
    b = gram_path(
        G, c, Penalty("lasso"), CoefficientGroups.single(COLUMNS), lambdas=lambdas, tol=tol
    ).coefficients
    return level - b @ mean, b


def fedstat(file, family):
    fit = {"gaussian": lasso_from_sums, "binomial": lasso_from_rows}[family]
    data, clock = load(file), Clock()
    X, y, lambdas = data["X"], data[family], data[f"{family} lambdas"]
    found = {"tight": objectives(family, X, y, *fit(X, y, lambdas, TIGHT), lambdas)}
    for tol in TOLERANCES["fedstat"]:
        for _ in range(REPEATS):
            path = clock.time(tol, fit, X, y, lambdas, float(tol))
        found[tol] = objectives(family, X, y, *path, lambdas)
    return {"name": "fedstat", "stages": clock.stages, "objective": found}


def pycasso(file, family):
    """The same by pycasso; None where it is not installed."""
    if util.find_spec("pycasso") is None:
        return None
    import numpy as np
    from pycasso import Solver

    data, clock, found = load(file), Clock(), {}
    X, y, lambdas = data["X"], data[family], data[f"{family} lambdas"]

    def fit(prec):
        options = {"prec": prec, "useintercept": True, "standardize": False}
        solver = Solver(X, y, family=family, penalty="l1", lambdas=lambdas.copy(), **options)
        solver.train()
        return solver.coef()

    for prec in TOLERANCES["pycasso"]:
        for _ in range(REPEATS):
            path = clock.time(prec, fit, float(prec))
        b, a = np.asarray(path["beta"]), np.asarray(path["intercept"])
        found[prec] = objectives(family, X, y, a, b, lambdas[: len(b)])
    name = f"pycasso {metadata.version('pycasso')}"
    return {"name": name, "stages": clock.stages, "objective": found}


def glmnet(file, family, algorithm):
    """The same by glmnet, whose seconds R takes; None where it is not installed."""
    import numpy as np

    here = shutil.which("Rscript")
    if here is None or subprocess.run([here, "-e", "library(glmnet)"], capture_output=True).returncode:
        return None
    data, stages, found = load(file), {}, {}
    X, y, lambdas = data["X"], data[family], data[f"{family} lambdas"]
    with tempfile.TemporaryDirectory() as folder:
        for name, array in {"X": X.T, "y": y, "lambdas": lambdas}.items():
            np.ascontiguousarray(array, dtype=np.float64).tofile(Path(folder) / name)
        sizes, options = (ROWS, COLUMNS), (family, algorithm, REPEATS, ",".join(TOLERANCES["glmnet"]))
        command = [here, Path(__file__).with_name("glmnet_peer.R"), folder, *sizes, *options]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
        version, *lines = done.stdout.splitlines()
        for line in lines:
            thresh, cpu, wall = line.split()
            stages.setdefault(thresh, []).append({"cpu": float(cpu), "wall": float(wall)})
        for thresh in stages:
            b = np.fromfile(Path(folder) / thresh).reshape(LAMBDAS, 1 + COLUMNS)
            found[thresh] = objectives(family, X, y, b[:, 0], b[:, 1:], lambdas)
    return {"name": f"glmnet {version.strip()}, {algorithm}", "stages": stages, "objective": found}


def exchange(file, family, how, eps):
    """One fit of five clients at one lambda or along ten, by one of the exchanges."""
    import warnings

    import numpy as np
    import statsmodels.api as sm

    import fedstat as fs

    warnings.simplefilter("ignore")
    data = fs.datasets.make_selection(1_000, family, standardize=True, seed=1)
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    families = {"normal": sm.families.Gaussian(), "binomial": sm.families.Binomial()}
    model = fs.VerticalGLM.from_formula("y ~ .", partition, family=families[family], penalty="lasso")
    options = {"exchange": how} | ({"tol": float(eps)} if how == "admm" else {})
    best = model.fit(lam=0.05, tol=1e-9)
    rows = {}
    for path, given in {"one": {"lam": 0.05}, "ten": {"lambdas": np.geomspace(0.2, 0.02, 10)}}.items():
        clock = Clock()
        fit = clock.time("fit", model.fit, **given, **options)
        predictors = fit.ledger.to_frame().query("array == 'linear_predictor' and sender != 'coordinator'")
        rows[path] = {
            "rounds": fit.ledger.rounds,
            "predictors": len(predictors) // 5,
            "bytes": fit.ledger.bytes,
            "cpu": clock.stages["fit"][0]["cpu"],
            "error": float(np.abs(fit.params - best.params)[1:].max()) if path == "one" else None,
            "converged": bool((fit.path["converged"] | (fit.path["status"] == "proposed")).all()),
        }
    return rows


# ---- in this process -----------------------------------------------------------------------------


def in_a_process(task, *arguments, python=sys.executable):
    """Run one task with one thread in a process of its own; it prints a line of JSON last."""
    command = [python, __file__, "task", task, *map(str, arguments)]
    one = dict.fromkeys(THREADS, "1")
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | one)
    if done.returncode:
        raise RuntimeError(f"{task} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def least(run, stage, what="cpu"):
    """The fastest of the repeats: what else ran at the time adds to the others."""
    return min(row[what] for row in run["stages"][stage])


def linear_table(file):
    run = in_a_process("gram", file)
    return [
        f"## Normal family: {LAMBDAS} lambdas, {ROWS:,} entities, {COLUMNS} columns, from sums of products",
        "",
        "| | CPU s | wall s |",
        "| --- | --- | --- |",
        *[
            f"| {stage} | {least(run, stage):.4f} | {least(run, stage, 'wall'):.4f} |"
            for stage in run["stages"]
        ],
    ]


def take_turns(file, family):
    """Runs of all programs by name, the stages of all turns together; None for one that is not installed."""
    python, runs = os.environ.get("FEDSTAT_PEERS", sys.executable), {}
    for _ in range(TURNS):
        turn = {"fedstat": in_a_process("fedstat", file, family)}
        turn["pycasso"] = in_a_process("pycasso", file, family, python=python)
        for algorithm in ALGORITHMS[family]:
            turn[f"glmnet, {algorithm}"] = in_a_process("glmnet", file, family, algorithm)
        for name, run in turn.items():
            for stage, rows in (runs.get(name) or {"stages": {}})["stages"].items():
                run["stages"][stage] += rows
        runs = turn
    return runs


def excesses(runs):
    """Largest excess of the objective over the least of all runs, by program and tolerance."""
    import numpy as np

    every = [values for run in runs.values() if run for values in run["objective"].values()]
    # A path that a peer cut short is compared as far as it goes.
    solved = min(map(len, every))
    floor = np.min([values[:solved] for values in every], axis=0)
    return {
        (name, tol): float(np.max(np.subtract(run["objective"][tol][:solved], floor)))
        for name, run in runs.items()
        if run
        for tol in run["stages"]
    }


def beside(seconds, others):
    return f"{seconds / min(others):.2f}" if others else "no peer"


def peer_table(file, family):
    """Seconds of the lasso, over the fastest peer, and over the fastest that is about as accurate."""
    runs = take_turns(file, family)
    excess = excesses(runs)
    seconds = {at: least(runs[at[0]], at[1]) for at in excess}
    peers = {at: cpu for at, cpu in seconds.items() if at[0] != "fedstat"}
    lines = [
        "Largest excess: of the objective above the least that any run reached at the same lambda, over all "
        f"lambdas. About as accurate: a peer whose largest excess is at most {LIKE:.0f} times as large. "
        "Tolerances of different programs do not mean the same. CPU seconds are those of the fastest of "
        f"{REPEATS * TURNS} fits.",
        "",
        "| | tolerance | CPU s | largest excess | over the fastest peer | "
        "over the fastest that is about as accurate |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (name, tol), above in excess.items():
        cpu = seconds[name, tol]
        like = [other for at, other in peers.items() if excess[at] <= LIKE * above]
        shares = [beside(cpu, peers.values()), beside(cpu, like) if name == "fedstat" else ""]
        lines.append(f"| {runs[name]['name']} | {tol} | {cpu:.2f} | {above:.1e} | {' | '.join(shares)} |")
    absent = [name for name, run in runs.items() if run is None]
    return lines + [f"| {name} | | not installed | | | |" for name in absent]


def gaussian_table(file):
    return [
        f"## Lasso of the normal family: {LAMBDAS} lambdas, {ROWS:,} rows, {COLUMNS} columns, from rows",
        "",
        "The seconds of fedstat are those of the sums of products (above) and of the path.",
        "",
        *peer_table(file, "gaussian"),
    ]


def logistic_table(file):
    return [
        f"## Logistic lasso: {LAMBDAS} lambdas, {ROWS:,} rows, {COLUMNS} columns, all at one client",
        "",
        *peer_table(file, "binomial"),
    ]


def exchange_table(file):
    lines = [
        "## Two exchanges: lasso, five clients of 20 columns, 1,000 entities",
        "",
        "Linear predictors: how often the clients released one. Error: largest difference of a coefficient "
        "from the fit at a tight tolerance; the columns have variance 1.",
        "",
        "| family | exchange | lambdas | rounds | linear predictors | MB | CPU s | error | converged |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    kinds = [("products", ""), ("admm", "1e-3"), ("admm", "1e-5")]
    for family in ("normal", "binomial"):
        for how, eps in kinds:
            for count, row in in_a_process("exchange", file, family, how, eps or "0").items():
                error = f"{row['error']:.1e}" if row["error"] is not None else ""
                lines.append(
                    f"| {family} | {how} {eps and f'(eps {eps})'} | {count} | {row['rounds']} | "
                    f"{row['predictors']} | {row['bytes'] / 1e6:.1f} | {row['cpu']:.1f} | {error} | "
                    f"{'yes' if row['converged'] else 'no'} |"
                )
    return lines


PARTS = {
    "linear": linear_table,
    "gaussian": gaussian_table,
    "logistic": logistic_table,
    "exchange": exchange_table,
}
TASKS = {task.__name__: task for task in (gram, fedstat, pycasso, glmnet, exchange)}


def main(wanted):
    import numpy as np

    lines = [
        f"# Vertical GLMs with selection\n\n{date.today()}, {platform.machine()}, one thread.\n\n"
        "The tables of one path time its kernel on data of one process, without the exchange between sites. "
        "`user.md` times what a user waits for: a complete fit of `VerticalGLM`, which is many times slower "
        "than glmnet."
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "columns.npz"
        np.savez(file, **draw())
        for part in wanted or PARTS:
            lines.append("\n".join(PARTS[part](file)))
            print(lines[-1], flush=True)
    if not wanted:
        RESULTS.write_text("\n\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["task"]:
        print(json.dumps(TASKS[sys.argv[2]](*sys.argv[3:])))
    else:
        main(sys.argv[1:])
