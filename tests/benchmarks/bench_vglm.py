"""Seconds of penalised paths beside pooled peers; rounds and bytes of the two exchanges of VerticalGLM.

Every figure comes from a process of its own with one thread, on data that were drawn beforehand. The peer,
pycasso, sees all rows in one place; it may live in another environment:

    python tests/benchmarks/bench_vglm.py                        all, and writes results/vglm.md
    FEDSTAT_PEERS=/other/bin/python python tests/benchmarks/bench_vglm.py logistic
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from clock import Clock

ROWS, COLUMNS, LAMBDAS, RATIO = 20_000, 200, 50, 1e-2
REPEATS = 3
PRECISIONS = (1e-4, 1e-5)
RESULTS = Path(__file__).parent / "results" / "vglm.md"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def draw():
    """Equally correlated standardised columns, of which 20 have an effect, and both kinds of response."""
    import numpy as np

    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, COLUMNS)) + 0.5 * rng.normal(size=(ROWS, 1))
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    eta = X[:, :20] @ (0.3 * (-1.0) ** np.arange(20))
    binary = (rng.random(ROWS) < 1.0 / (1.0 + np.exp(-eta))).astype(float)
    largest = np.abs(X.T @ (binary - binary.mean())).max() / ROWS
    lambdas = largest * RATIO ** (np.arange(LAMBDAS) / (LAMBDAS - 1))
    return {"X": X, "normal": eta + rng.normal(size=ROWS), "binary": binary, "lambdas": lambdas}


# ---- in a process of its own ---------------------------------------------------------------------


def load(file):
    import numpy as np

    with np.load(file) as held:
        return {name: held[name] for name in held.files}


def gram(file):
    """Sums of products, and the paths that follow from them."""
    import numpy as np

    from fedstat.kernels.penalised_gram import gram_path
    from fedstat.kernels.penalties import Penalty
    from fedstat.kernels.penalty_groups import Groups

    data, clock = load(file), Clock()
    X, y = data["X"], data["normal"] - data["normal"].mean()
    for _ in range(REPEATS + 1):
        G, c = clock.time("sums of products", lambda: (X.T @ X / ROWS, X.T @ y / ROWS))
        for penalty in ("lasso", "scad", "mcp"):
            call = (G, c, Penalty(penalty), Groups.single(COLUMNS))
            clock.time(penalty, gram_path, *call, size=LAMBDAS, ratio=RATIO, algorithm="descent")
            if penalty != "lasso":
                clock.time(f"{penalty}, lla", gram_path, *call, size=LAMBDAS, ratio=RATIO, algorithm="lla")
    return {"stages": {name: rows[1:] for name, rows in clock.stages.items()}, "p": int(np.shape(G)[0])}


def objectives(losses, coefficients, lambdas):
    """Objective of the lasso at each lambda."""
    import numpy as np

    return (np.asarray(losses) + lambdas * np.abs(coefficients).sum(axis=1)).tolist()


def logistic_losses(X, y, intercepts, coefficients):
    import numpy as np

    eta = intercepts[:, None] + coefficients @ X.T
    return np.mean(np.logaddexp(0.0, eta) - y * eta, axis=1)


def fedstat_kernel(file):
    """The kernel that one client with all rows runs."""
    import numpy as np
    import statsmodels.api as sm

    from fedstat.kernels.glm import Rows
    from fedstat.kernels.glm_family import FamilySpec
    from fedstat.kernels.penalised_glm import glm_path
    from fedstat.kernels.penalties import Penalty
    from fedstat.kernels.penalty_groups import Groups

    data, clock, found = load(file), Clock(), {}
    X, y, lambdas = data["X"], data["binary"], data["lambdas"]
    groups = Groups.single(COLUMNS + 1, np.r_[0.0, np.ones(COLUMNS)])
    spec = FamilySpec.of(sm.families.Binomial())

    def fit(tol):
        rows = Rows(np.column_stack([np.ones(ROWS), X]), y)
        return glm_path(rows, spec, Penalty("lasso"), groups, lambdas=lambdas, tol=tol)

    for tol in PRECISIONS:
        fit(tol)
        for _ in range(REPEATS):
            b = clock.time(str(tol), fit, tol).coefficients
        found[str(tol)] = objectives(logistic_losses(X, y, b[:, 0], b[:, 1:]), b[:, 1:], lambdas)
    return {"stages": clock.stages, "objective": found}


def pycasso(file):
    import numpy as np
    from pycasso import Solver

    data, clock, found = load(file), Clock(), {}
    X, y, lambdas = data["X"], data["binary"], data["lambdas"]

    def fit(prec):
        solver = Solver(
            X, y, family="binomial", penalty="l1", lambdas=lambdas.copy(), prec=prec, useintercept=True
        )
        solver.train()
        return solver.coef()

    for prec in PRECISIONS:
        for _ in range(REPEATS):
            path = clock.time(str(prec), fit, prec)
        b, a = np.asarray(path["beta"]), np.asarray(path["intercept"])
        found[str(prec)] = objectives(logistic_losses(X, y, a, b), b, lambdas[: len(b)])
    return {"stages": clock.stages, "objective": found}


def exchange(file, family, how, eps):
    """One fit of five clients at one lambda or along ten, by one of the exchanges."""
    import warnings

    import numpy as np
    import statsmodels.api as sm

    import fedstat as fs

    warnings.simplefilter("ignore")
    data = fs.datasets.make_selection(1_000, family, standardise=True, seed=1)
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    families = {"normal": sm.families.Gaussian(), "binomial": sm.families.Binomial()}
    model = fs.VerticalGLM.from_formula("y ~ .", partition, family=families[family], penalty="lasso")
    options = {"exchange": how} | ({"eps": float(eps)} if how == "admm" else {})
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
            "converged": bool(fit.path["converged"].all()),
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


def logistic_table(file):
    import numpy as np

    runs = {
        "fedstat": in_a_process("fedstat_kernel", file),
        "pycasso": in_a_process("pycasso", file, python=os.environ.get("FEDSTAT_PEERS", sys.executable)),
    }
    solved = min(len(values) for run in runs.values() for values in run["objective"].values())
    every = [values[:solved] for run in runs.values() for values in run["objective"].values()]
    floor, fastest = np.min(every, axis=0), least(runs["pycasso"], str(PRECISIONS[0]))
    lines = [
        f"## Logistic lasso: {LAMBDAS} lambdas, {ROWS:,} rows, {COLUMNS} columns, all at one client",
        "",
        "| | tolerance | CPU s | beside the peer's default | largest excess of the objective |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, run in runs.items():
        for tol in PRECISIONS:
            seconds = least(run, str(tol))
            above = np.max(np.subtract(run["objective"][str(tol)][:solved], floor))
            lines.append(f"| {name} | {tol:.0e} | {seconds:.2f} | {seconds / fastest:.2f} | {above:.1e} |")
    return lines


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


PARTS = {"linear": linear_table, "logistic": logistic_table, "exchange": exchange_table}
TASKS = {task.__name__: task for task in (gram, fedstat_kernel, pycasso, exchange)}


def main(wanted):
    import numpy as np

    lines = [f"# Vertical GLMs with selection\n\n{date.today()}, {platform.machine()}, one thread."]
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
