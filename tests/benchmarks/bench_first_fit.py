"""CPU seconds of the first fit of a family, in a new process with nothing compiled.

``python tests/benchmarks/bench_first_fit.py`` writes ``results/first_fit.md``; with names of cases, it prints
these and the compiled functions.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path

from clock import in_a_process

HERE = Path(__file__).parent
ROWS = 600


def hospitals(fs):
    table = fs.datasets.make_hospitals().dropna(subset=["num", "age", "sex"]).head(ROWS)
    place = table.groupby("hospital").cumcount()
    full = place < table.groupby("hospital")["age"].transform("size") // 4 * 4
    wards = table["hospital"] + (place // 4).astype(str)
    return fs.ClientPartition.from_frame(table.assign(ward=wards)[full], by="hospital")


def survival(fs):
    return fs.ClientPartition.from_frame(fs.datasets.make_survival().head(ROWS), by="hospital")


def repeated(fs):
    table = fs.datasets.make_repeated(4)
    table = table.assign(high=table["score"] > table["score"].median())
    return fs.ClientPartition.from_frame(table, by="hospital")


def blocks(fs, missing=0.15):
    data = fs.datasets.make_blocks(ROWS, (2, 2), missing=[missing, missing], seed=1)
    holder = next(name for name, frame in data.frames.items() if "y" in frame)
    own = data.frames[holder]
    frames = {**data.frames, holder: own.assign(event=(own["y"] > own["y"].median()) * 1.0)}
    return fs.ClientPartition.from_frames(frames, on=data.key)


def clusters(fs):
    data = fs.datasets.make_clusters(ROWS, ["continuous", "ordinal"], p=3, seed=1)
    return fs.ClientPartition.from_frames(data.frames, on=data.key)


def columns(fs):
    policy = fs.Policy(privacy=fs.Budget(epsilon=200.0, delta=1e-6))
    table = fs.datasets.make_hospitals()[["age", "sex"]].dropna().head(ROWS)
    return fs.ClientPartition.from_frame(table, columns={"A": ["age"], "B": ["sex"]}, policy=policy)


BOUNDS = {"age": (20, 90), "sex": [0, 1]}
LOGISTIC, TIMES = "num > 0 ~ age + sex", "Surv(months, died) ~ age + C(arm)"
CASES = {
    "GLORE": (hospitals, lambda fs, f, p: fs.GLORE.from_formula(LOGISTIC, p).fit()),
    "OLS": (hospitals, lambda fs, f, p: fs.FederatedOLS.from_formula("num ~ age + sex", p).fit()),
    "Cox": (survival, lambda fs, f, p: fs.FederatedCox.from_formula(TIMES, p).fit()),
    "Kaplan-Meier": (
        survival,
        lambda fs, f, p: fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", p).fit(grid=1, until=60),
    ),
    "mixed linear": (
        repeated,
        lambda fs, f, p: fs.FederatedMixed.from_formula("score ~ month + (1 + month | patient)", p).fit(),
    ),
    "mixed logistic": (
        repeated,
        lambda fs, f, p: fs.FederatedMixed.from_formula(
            "high ~ month + (1 | patient)", p, family=f.Binomial()
        ).fit(),
    ),
    "GEE": (
        hospitals,
        lambda fs, f, p: fs.FederatedGEE.from_formula(
            LOGISTIC, p, groups="ward", family=f.Binomial(), cov_struct="exchangeable"
        ).fit(),
    ),
    "ordinal": (hospitals, lambda fs, f, p: fs.FederatedOrdinal.from_formula("num ~ age + sex", p).fit()),
    "VFEM": (blocks, lambda fs, f, p: fs.VFEMRegression.from_formula("y ~ . - event", p).fit()),
    "VFEMGLM": (
        blocks,
        lambda fs, f, p: fs.VFEMGLM.from_formula("event ~ . - y", p, family=f.Binomial()).fit(),
    ),
    "VerticalGLM": (
        lambda fs: blocks(fs, 0.0),
        lambda fs, f, p: fs.VerticalGLM.from_formula("event ~ . - y", p, family=f.Binomial()).fit(
            n_lambdas=8
        ),
    ),
    "LASER": (blocks, lambda fs, f, p: fs.LASER.from_formula("event ~ . - y", p).fit(epochs=5)),
    "synthesis": (columns, lambda fs, f, p: fs.CopulaSynthesizer(p, 50.0, BOUNDS).fit().sample(100)),
    "private GLM": (
        columns,
        lambda fs, f, p: fs.PrivateCopulaGLM.from_formula("age ~ sex", p, epsilon=50.0, bounds=BOUNDS).fit(
            draws=20
        ),
    ),
    "M2SEM": (
        clusters,
        lambda fs, f, p: fs.M2SEM.from_formula(
            "~ c1_1 + c1_2 + c2_1 + c2_2", p, n_clusters=2, n_factors=1
        ).fit(select=None, n_init=1),
    ),
}
"""Partition and fit of each case; a fit receives the package, statsmodels' families and the partition."""


def listen():
    """Record CPU seconds of each compiled function, without those of functions that it calls."""
    from numba.core import event

    open_, found = [], {}

    class Listener(event.Listener):
        def on_start(self, one):
            open_.append([time.process_time(), 0.0])

        def on_end(self, one):
            since, inner = open_.pop()
            spent = time.process_time() - since
            if open_:
                open_[-1][1] += spent
            name = one.data["dispatcher"].py_func.__qualname__
            found.setdefault(name, []).append(spent - inner)

    event.register("numba:compile", Listener())
    return found


def measure(case):
    """Return CPU seconds of imports and of two fits, and of compiled functions."""
    begin = time.process_time()
    from statsmodels.genmod import families

    import fedstat as fs

    compiled = listen()
    warnings.simplefilter("ignore")
    make, fit = CASES[case]
    partition = make(fs)
    seconds = {"imports": time.process_time() - begin}
    for name in ("first", "second"):
        begin = time.process_time()
        with suppress(fs.errors.PolicyError):
            fit(fs, families, make(fs) if name == "second" else partition)
        seconds[name] = time.process_time() - begin
    return seconds | {"compiled": compiled}


def run(case):
    """Measure one case in a new process with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["NUMBA_CACHE_DIR"] = cache
        return in_a_process(Path(__file__), case)


def main(names):
    lines = ["| | imports and data | first fit | second fit | compiling | functions |", "|" + "---|" * 6]
    for case in names or CASES:
        found = run(case)
        seconds = {name: sum(times) for name, times in found["compiled"].items()}
        most = sorted(seconds, key=seconds.get, reverse=True)
        lines.append(
            f"| {case} | {found['imports']:.1f} | {found['first']:.1f} | {found['second']:.2f} | "
            f"{sum(seconds.values()):.1f} | {sum(map(len, found['compiled'].values()))} |"
        )
        print(lines[-1], flush=True)
        if names:
            for name in most:
                print(f"    {name:28} {len(found['compiled'][name])} x {seconds[name]:6.2f} s")
    if not names:
        head = "# First fit\n\nCPU seconds in a new process with an empty cache, 600 rows.\n\n"
        (HERE / "results" / "first_fit.md").write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["task"]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        main(sys.argv[1:])
