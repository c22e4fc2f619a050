"""Every family on every engine: the same numbers to the bit; seconds, rounds and bytes.

Five institutions: in one process (LocalEngine), in five processes that exchange signed files through a
folder, and in five NVIDIA FLARE clients over mutual TLS on loopback. Needs ``pip install "fedstat[flare]"``.

    python tests/benchmarks/bench_engines.py           all, and writes results/engines.md
    python tests/benchmarks/bench_engines.py small     all families; or: sme, the enterprise study in full
"""

from __future__ import annotations

import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import statsmodels.api as sm

sys.path.insert(0, str(Path(__file__).parents[1] / "federation" / "transport"))

import serving
import serving_flare

import fedstat as fs

REPEATS = 3
SITES = ("one", "two", "three", "four", "five")
RESULTS = Path(__file__).parent / "results" / "engines.md"
SME = 166_207
MOMENTS_TARGET, ITERATIVE_TARGET = 30.0, 60.0


def patients() -> fs.ClientPartition:
    """Patients of five hospitals: the largest of four is taken as two."""
    frame = fs.datasets.make_hospitals()
    names = frame["hospital"].astype(str)
    places = {name: SITES[i] for i, name in enumerate(sorted(names.unique()))}
    site = names.map(places).where(~((names == "Cleveland") & (frame.index % 2 == 0)), SITES[-1])
    return fs.ClientPartition.from_frame(frame.assign(hospital=site), by="hospital", shared_seed=1)


def enterprises(n: int | None = None) -> fs.ClientPartition:
    """The enterprise study; the packaged sample, without its smallest institution, or n enterprises."""
    frames = fs.datasets.load_sme() if n is None else fs.datasets.make_sme(n, seed=1).frames
    if n is None:
        del frames["Law-enforcement Agency"]
    names = SITES if n is None else (*SITES, "six")
    renamed = dict(zip(names, frames.values(), strict=True))
    return fs.ClientPartition.from_frames(renamed, on="enterprise_id", shared_seed=1)


def customers() -> fs.ClientPartition:
    """Complete records of 20 columns and two responses at five institutions."""
    data = fs.datasets.make_blocks(2_000, (4,) * 5, (0.0,) * 5, seed=1, response_with_block=True)
    frames = dict(zip(SITES, data.frames.values(), strict=True))
    first = frames[SITES[0]]
    frames[SITES[0]] = first.assign(late=(first["y"] > first["y"].mean()).astype(float))
    return fs.ClientPartition.from_frames(frames, on="id", shared_seed=1)


@dataclass(frozen=True)
class Task:
    """One family, on one of the partitions."""

    name: str
    data: Callable[[], fs.ClientPartition]
    fit: Callable[[fs.ClientPartition], fs.CoefficientResults]


def vfem(**options):
    return lambda data: fs.VFEMRegression.from_formula("NPGR ~ .", data).fit(**options)


def selected(formula, family, **options):
    return lambda data: fs.VerticalGLM.from_formula(formula, data, family=family).fit(**options)


TASKS = (
    Task(
        "GLORE, logistic", patients, lambda data: fs.GLORE.from_formula("num > 0 ~ age + C(cp)", data).fit()
    ),
    Task(
        "FedAvg, 10 rounds",
        patients,
        lambda data: fs.FedAvg.from_formula("num > 0 ~ age", data).fit(rounds=10, seed=1, standardize=True),
    ),
    Task("VFEM, moments", enterprises, vfem(exchange="moments")),
    Task("VFEM, iterative", enterprises, vfem(exchange="iterative")),
    Task(
        "VFEM, logistic",
        customers,
        lambda data: fs.VFEMGLM.from_formula("late ~ . - y", data, family=sm.families.Binomial()).fit(),
    ),
    Task("Vertical GLM, SCAD, normal", customers, selected("y ~ . - late", None)),
    Task("Vertical GLM, SCAD, logistic", customers, selected("late ~ . - y", sm.families.Binomial())),
    Task(
        "Vertical GLM, SCAD, logistic, ADMM",
        customers,
        selected("late ~ . - y", sm.families.Binomial(), exchange="admm", n_lambdas=2, tol=1e-3),
    ),
)


@contextmanager
def folder(partition):
    with tempfile.TemporaryDirectory() as home, serving.served(partition, Path(home) / "sites") as running:
        yield serving.connected(partition, running["transport"])


def flare(federation):
    """The engine of a federation that runs: one job for each partition, which serves all its fits."""

    @contextmanager
    def open_job(partition):
        job, transport = federation.serve(partition)
        try:
            yield serving_flare.connected(partition, transport)
        finally:
            transport.end()
            federation.status(job)

    return open_job


def timed(fit, partition):
    """Median seconds of the fits after the first, and the first one's result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result, seconds = fit(partition), []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            fit(partition)
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds), result


def identical(here, there):
    """Whether two results are the same to the bit, and so are their ledgers' rows."""
    covs = here.estimate.cov, there.estimate.cov
    return bool(
        np.array_equal(here.params, there.params)
        and (covs[0] is covs[1] is None or np.array_equal(*covs, equal_nan=True))
        and here.ledger.bytes == there.ledger.bytes
        and here.ledger.rounds == there.ledger.rounds
    )


def compare(tasks, engines):
    """Seconds of every task on every engine, by task; the local result says what is expected."""
    found = {}
    for data in dict.fromkeys(task.data for task in tasks):
        partition, here = data(), [task for task in tasks if task.data is data]
        local = {task.name: timed(task.fit, partition) for task in here}
        for task in here:
            result = local[task.name][1]
            found[task.name] = {
                "n": len(partition.entities),
                "rounds": result.ledger.rounds,
                "MB": result.ledger.bytes / 1e6,
                "one process": local[task.name][0],
            }
        for engine, opened in engines.items():
            with opened(partition) as remote:
                for task in here:
                    seconds, result = timed(task.fit, remote)
                    found[task.name][engine] = seconds
                    found[task.name][f"{engine} equal"] = identical(local[task.name][1], result)
                    print(engine, task.name, f"{seconds:.2f} s", flush=True)
    return found


def table(found, engines):
    lines = [
        f"| fit | entities | rounds | MB | one process s | {' | '.join(f'{e} s' for e in engines)} | equal |",
        "| --- | --- | --- | --- | --- |" + " --- |" * (len(engines) + 1),
    ]
    for name, row in found.items():
        equal = all(row[f"{engine} equal"] for engine in engines)
        there = " | ".join(f"{row[engine]:.2f}" for engine in engines)
        lines.append(
            f"| {name} | {row['n']:,} | {row['rounds']} | {row['MB']:.2f} | {row['one process']:.2f} | "
            f"{there} | {'to the bit' if equal else 'NO'} |"
        )
    return lines


def small(home):
    """All families."""
    with serving_flare.federation_of(SITES, home / "small") as federation:
        engines = {"folder": folder, "FLARE": flare(federation)}
        found = compare(TASKS, engines)
        start = federation.seconds
    return [
        "## All families, five institutions",
        "",
        f"Medians of {REPEATS} fits after a first one, which the comparison takes. FLARE took "
        f"{start['provision']:.0f} s to provision, {start['start']:.0f} s to start its six processes and "
        f"{start['job']:.0f} s for the job, which then serves all fits.",
        "",
        *table(found, engines),
        "",
    ]


def sme(home):
    """The enterprise study in full: six institutions, the response at one of its own."""
    tasks = (
        Task("VFEM, moments", enterprises_in_full, vfem(exchange="moments")),
        Task("VFEM, iterative", enterprises_in_full, vfem(exchange="iterative")),
    )
    with serving_flare.federation_of((*SITES, "six"), home / "sme") as federation:
        found = compare(tasks, {"FLARE": flare(federation)})
    met = (
        found["VFEM, moments"]["FLARE"] < MOMENTS_TARGET,
        found["VFEM, iterative"]["FLARE"] < ITERATIVE_TARGET,
    )
    return [
        f"## The enterprise study, n = {SME:,}, 35 covariates, six institutions, each a process, TLS",
        "",
        f"Design, exchange and standard errors, after start-up. Targets: {MOMENTS_TARGET:.0f} s from moments "
        f"({'met' if met[0] else 'not met'}), {ITERATIVE_TARGET:.0f} s by iteration "
        f"({'met' if met[1] else 'not met'}).",
        "",
        *table(found, ["FLARE"]),
        "",
    ]


def enterprises_in_full():
    return enterprises(SME)


def main():
    parts = {"small": small, "sme": sme}
    request = sys.argv[1:] or list(parts)
    with tempfile.TemporaryDirectory() as home:
        lines = [line for name in request for line in parts[name](Path(home))]
    header = [
        "# Engines: time, rounds and bytes",
        "",
        f"`python tests/benchmarks/bench_engines.py {' '.join(sys.argv[1:])}`".replace(" `", "`")
        + f", {date.today()}: fedstat {fs.__version__}, Python {platform.python_version()}, numpy "
        f"{np.__version__}, two cores.",
        "",
    ]
    print("\n".join([*header, *lines]))
    if request == list(parts):
        RESULTS.write_text("\n".join([*header, *lines]).rstrip() + "\n")


if __name__ == "__main__":
    main()
