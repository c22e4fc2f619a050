"""Clusters between sites: an EM step, its growth with rows, a complete fit and one of StepMix.

    python tests/benchmarks/bench_m2sem.py                       all, and writes results/m2sem.md
    python tests/benchmarks/bench_m2sem.py step rows             some, and prints them
    FEDSTAT_STEPMIX=/one/bin/python python tests/benchmarks/bench_m2sem.py fit

StepMix (``pip install stepmix``) may live in another environment, and is left out where there is none.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
from clock import in_a_process

sys.path.insert(0, str(Path(__file__).parents[1] / "models" / "m2sem"))
from experiments_simulation import accuracy, stepmix

RESULTS = Path(__file__).parent / "results" / "m2sem.md"
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
GOALS = {"step": 4.0, "cpu": 6.0, "rounds": 160}
FITS = {
    "masks, with errors (the default)": {},
    "masks, without errors": {"cov_type": None},
    "no masks, without errors": {"masked": False, "cov_type": None},
}
ROWS, REPEATS, SETS = (1_000, 10_000, 100_000), 7, 5


def modalities(n, seed=0):
    """Eight modalities of twenty columns, four continuous and four ordinal, and posteriors (n, 3)."""
    from fedstat.models.m2sem.modality.categorical import CategoricalModality
    from fedstat.models.m2sem.modality.gaussian import GaussianModality

    rng = np.random.default_rng(seed)
    k, made = rng.integers(0, 3, n), []
    for number in range(8):
        eta = 1.5 * rng.standard_normal((3, 2))[k] + rng.standard_normal((n, 2))
        x = eta @ rng.uniform(-1, 1, (20, 2)).T + 3.0 * rng.standard_normal((n, 20))
        names = [f"x{p}" for p in range(20)]
        if number < 4:
            made.append(GaussianModality(x, names, 2))
        else:
            codes = np.searchsorted([-3.0, 0.0, 3.0], x)
            made.append(CategoricalModality(codes, names, 2, ["ordinal"] * 20, [4] * 20))
    return made, 0.8 * np.eye(3)[k] + 0.2 / 3


def least(call, repeats=REPEATS):
    """Fewest CPU milliseconds of some calls, after one that compiles."""
    call()
    found = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return 1e3 * min(found)


def step():
    """One EM step of all modalities at 400 rows, in a round of twelve."""
    made, r = modalities(400)
    out = {}
    for name, some in {"continuous": made[:4], "ordinal": made[4:], "all": made}.items():
        for m in some:
            m.begin(3)
            m.begin_means(r)

        def ascend(some=some):
            for m in some:
                m.improve(r, 1.0, 1.0, 12)
                m.log_densities()

        state = [m.state() for m in some]

        def again(some=some, state=state, ascend=ascend):
            for m, one in zip(some, state, strict=True):
                m.restore(one)
            ascend()

        out[name] = least(again, 15) / 12
    return out


def rows(n):
    """E-step of one modality of either kind."""
    made, _ = modalities(int(n))
    out = {}
    for name, m in {"continuous": made[0], "ordinal": made[4]}.items():
        m.means = np.array([[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
        state = m.state()

        def e_step(m=m, state=state):
            m.restore(state + 1e-9 * np.random.default_rng().random())
            m.log_densities()

        out[name] = least(e_step, 3)
    return out


def fit():
    """Whole fits of 400 x 160, after one that compiles; StepMix on the same data: medians."""
    import fedstat as fs

    warnings.simplefilter("ignore", fs.errors.FedstatWarning)
    small = fs.datasets.make_cluster_experiment("noisy", 120, seed=1)
    small_partition = fs.ClientPartition.from_frames(small.frames, on=small.key)
    fs.M2SEM(small_partition, 3, 2).fit(maxiter=20)
    found = []
    for seed in range(SETS):
        data = fs.datasets.make_cluster_experiment("noisy", seed=seed)
        partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        for name, options in FITS.items():
            start = time.process_time()
            result = fs.M2SEM(partition, 3, 2).fit(**options)
            cpu = time.process_time() - start
            found.append((name, cpu, result.ledger.rounds, accuracy(result.labels, data.labels)))
        right, cpu = stepmix(data)
        if cpu == cpu:
            found.append(("StepMix, ten starts", cpu, np.nan, right))
    table = pd.DataFrame(found, columns=["fit", "CPU s", "rounds", "accuracy"])
    return table.groupby("fit", sort=False).median().to_dict("index")


def main():
    os.environ |= THREADS
    if sys.argv[1:2] == ["task"]:
        print(json.dumps({"step": step, "rows": rows, "fit": fit}[sys.argv[2]](*sys.argv[3:])))
        return
    wanted = sys.argv[1:] or ["step", "rows", "fit"]
    parts = [
        "# Clusters over institutions",
        "`python tests/benchmarks/bench_m2sem.py`, one thread, CPU seconds.",
    ]
    if "step" in wanted:
        ms = in_a_process(__file__, "step")
        parts += [
            "## An EM step, 400 rows, 8 modalities of 20 columns, K = 3, Q = 2, 7 nodes a factor",
            f"Milliseconds, means over a round of twelve local steps; goal {GOALS['step']:g} for all.",
            "\n".join(
                ["| modalities | ms |", "| --- | --- |", *(f"| {k} | {v:.2f} |" for k, v in ms.items())]
            ),
        ]
    if "rows" in wanted:
        grown = {n: in_a_process(__file__, "rows", n) for n in ROWS}
        lines = ["| rows | continuous | ordinal |", "| --- | --- | --- |"]
        lines += [f"| {n:,} | {m['continuous']:.2f} | {m['ordinal']:.2f} |" for n, m in grown.items()]
        parts += ["## E-step of one modality of 20 columns, ms", "\n".join(lines)]
    if "fit" in wanted:
        fits = in_a_process(__file__, "fit")
        lines = ["| fit | CPU s | rounds | accuracy |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {k} | {v['CPU s']:.1f} | {v['rounds']:.0f} | {v['accuracy']:.3f} |".replace("nan", "")
            for k, v in fits.items()
        ]
        parts += [
            f"## Whole fit of 400 x 160, code compiled: medians of {SETS} data sets",
            f"StepMix gives no standard errors. Goals: {GOALS['cpu']:g} s, {GOALS['rounds']} rounds.",
            "\n".join(lines),
        ]
    text = "\n\n".join(parts) + "\n"
    if not sys.argv[1:]:
        RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
