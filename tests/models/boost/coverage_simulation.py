"""Coverage after boosting, through fits of three sites: refits, halves, entry tests, stability selection.

    python tests/models/boost/coverage_simulation.py RUNS.csv [REPLICATES] [TASK | TASK-N ...]

goes on where it was cut short; ``python ... RUNS.csv 0`` writes means over what is there to
``tests/benchmarks/results/boost_coverage.csv``.
"""

from __future__ import annotations

import csv
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
from band_simulation import ACTIVE, BETAS, KNOTS, S, T, inside
from curve_cases import curve_table, declared

import fedstat as fs
from fedstat.errors import EstimationError
from fedstat.kernels.curves import integration_weights, spline_basis
from fedstat.models.boost.learning.selection import false_selections

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "boost_coverage.csv"
FIELDS = ("task", "n", "setting", "replicate", "measure", "value")
TIME = f"bbs(t, knots={KNOTS}, df=3)"
FEW, MANY = 5, 20
LOOSE = fs.Policy(max_parameters=100.0)
STRONG, WEAK = 1.0, 0.2
"""Sizes of the effects: of those whose bands are looked at, and of those that stability has to find."""


def draw(n, P, size, random, distribution="normal"):
    """Curves (P, n, 30), correlated by half, and responses whose errors are correlated along t."""
    common = random.normal(size=(n, 12, 1))
    scores = np.sqrt(0.5) * random.normal(size=(n, 12, P)) + np.sqrt(0.5) * common
    X = np.einsum("nkp,tk->pnt", scores, spline_basis(S, 0, 1, 8))
    waves = np.array([np.ones(30), np.sqrt(2) * np.sin(2 * np.pi * T), np.sqrt(2) * np.cos(2 * np.pi * T)])
    e = random.standard_t(3, size=(n, 3)) if distribution == "t3" else random.normal(size=(n, 3))
    Y = 0.5 * e @ waves + random.normal(size=(n, 30)) * 0.5
    w = integration_weights(S)
    return X, Y + size * sum((x * w) @ inside(beta) for x, beta in zip(X, BETAS, strict=False))


def fitted(X, Y, **settings):
    """Boosting of the response on all curves over three sites."""
    names = [f"x{p}" for p in range(len(X))]
    frame = curve_table(y=Y, **{f"{name}p": x for name, x in zip(names, X, strict=True)})
    curves = {name: fs.Curve(f"{name}p_*", domain=(0, 1)) for name in names} | declared("y")
    frame = frame.assign(site=[f"site {i % 3}" for i in range(len(frame))])
    partition = fs.ClientPartition.from_frame(frame, by="site", curves=curves, policy=LOOSE)
    learners = " + ".join(f"bsignal({name}, knots={KNOTS}, differences=2)" for name in names)
    model = fs.FedFunctionBoost.from_formula(f"y(t) ~ {learners}", partition, time=TIME)
    return model.fit(masked=False, **settings)


def bands(n, setting, random, seed):
    """Shares of points, and of whole surfaces, that intervals and bands of the selected learners hold."""
    X, Y = draw(n, FEW, STRONG, random)
    result = fitted(X, Y, steps=400, select="cv", seed=seed)
    for method, request in (("refit", result.refit), ("halves", result.split)):
        try:
            fit = request(seed=seed)
        except EstimationError:  # half of few rows for all columns
            continue
        for label in fit.tests.index:
            p = int(label[9:-1])
            truth = (inside(BETAS[p]) if p < ACTIVE else np.zeros((len(S), len(T)))).ravel()
            table, kind = fit.surface(label), "active" if p < ACTIVE else "null"
            held = {
                "pointwise": (table["lower"] <= truth) & (truth <= table["upper"]),
                "simultaneous": (table["band_lower"] <= truth) & (truth <= table["band_upper"]),
            }
            yield f"{method}, {kind}, pointwise", held["pointwise"].mean()
            yield f"{method}, {kind}, simultaneous", held["simultaneous"].all()
            yield f"{method}, {kind}, rejected", fit.tests["p_value"][label] < 0.05


def entry(n, setting, random, seed):
    """Whether any of five learners without effect enters at 5 %."""
    X, Y = draw(n, FEW, 0.0, random, setting)
    found = fitted(X, Y, steps=1).entry_test(draws=199, seed=seed)
    yield "rejected", found["p_value"].min() <= 0.05


def stability(n, setting, random, seed):
    """Selections of learners without effect, among 17 of 20, and of others; the bound on the former."""
    X, Y = draw(n, MANY, WEAK, random)
    result = fitted(X, Y, steps=200, folds=10, seed=seed)
    found, bound = result.stability(6, seed=seed)
    for tau in (0.75, 0.9):
        stable = (found >= tau).to_numpy()
        yield f"tau {tau}, false", stable[ACTIVE:].sum()
        yield f"tau {tau}, bound", bound if tau == 0.75 else false_selections(6, MANY, tau, 50)
        yield f"tau {tau}, found", stable[:ACTIVE].mean()


CASES = {
    "bands": (bands, [(250, "normal"), (500, "normal")]),
    "entry": (entry, [(150, "normal"), (500, "normal"), (150, "t3"), (500, "t3")]),
    "stability": (stability, [(200, "normal"), (500, "normal")]),
}


def table(runs):
    """Means over replicates with their simulation errors; of several learners in one, the mean first."""
    each = runs.groupby(["task", "n", "setting", "measure", "replicate"], sort=False)["value"].mean()
    out = each.groupby(["task", "n", "setting", "measure"], sort=False).agg(["mean", "sem", "size"])
    return out.rename(columns={"sem": "simulation error", "size": "replicates"}).round(3)


def main(path, replicates, wanted):
    if not path.exists():
        path.write_text(",".join(FIELDS) + "\n")
    done = set(pd.read_csv(path)[["task", "n", "setting", "replicate"]].itertuples(index=False, name=None))
    warnings.simplefilter("ignore")
    for r in range(replicates):
        for task, (make, settings) in CASES.items():
            for place, (n, setting) in enumerate(settings):
                chosen = not wanted or task in wanted or f"{task}-{n}" in wanted
                if not chosen or (task, n, setting, r) in done:
                    continue
                random = np.random.default_rng([r, place, list(CASES).index(task)])
                rows = [
                    (task, n, setting, r, name, f"{float(x):.5g}") for name, x in make(n, setting, random, r)
                ]
                with path.open("a", newline="") as file:
                    csv.writer(file).writerows(rows)
    found = table(pd.read_csv(path))
    if not replicates:
        found.to_csv(TABLE)
    print(found.to_string())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200, sys.argv[3:])
