"""Tables, and the arithmetic of a noisy regression on pooled arrays, for its tests and simulations.

``python noisy_rows.py [minutes]`` writes coverage and price of all settings of :data:`GRID`, smaller ones
first, until the minutes are over and a setting is done. It continues a table that is not complete; ``python
noisy_rows.py again [minutes] [family]`` removes the settings of a family, or all, first; ``python
noisy_rows.py low`` prints the coverage of settings with a coefficient below 0.90 with other draws.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

import fedstat as fs
from fedstat.errors import EstimationError
from fedstat.models.glm.noisy_fit import noisy_question
from fedstat.models.glm.noisy_newton import NoisyIteration, binary_places, bounded_sums

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "noisy_regression.csv"
COLUMNS = ("family", "columns", "rows", "epsilon", "sites", "intercept")
Z = 1.959964
SITES = ("A", "B", "C", "D", "E", "F", "G", "H", "I", "J")
COUNT_LIMIT, NORMAL_LIMIT = 40.0, 10.0
BETA = np.array([-0.7, 0.5, -0.4, 0.3, 0.0, 0.6, -0.2])
KINDS = {
    "normal": lambda z: np.clip(z, -5.0, 5.0),
    "binary": lambda z: (z > 0.5) * 1.0,
    "skewed": lambda z: np.clip(np.exp(0.7 * z), 0.0, 12.0),
}
RANGES = {"normal": (-5.0, 5.0), "binary": [0, 1], "skewed": (0.0, 12.0)}
FAMILY = {"Binomial": "binomial", "Gaussian": "gaussian", "Poisson": "poisson"}
RESPONSES = {"Binomial": [0, 1], "Gaussian": (-NORMAL_LIMIT, NORMAL_LIMIT), "Poisson": (0.0, COUNT_LIMIT)}


def draw(family, kind, n, rng, intercept=0.0, q=6):
    """Draw correlated columns of a kind and a response: a table, and the true coefficients."""
    z = rng.multivariate_normal(np.zeros(q), 0.4 ** np.abs(np.subtract.outer(range(q), range(q))), n)
    x = KINDS[kind](z)
    beta = BETA[: q + 1].copy()
    beta[1:] *= 0.6 if kind == "skewed" else 0.7 if family == "Poisson" else 1.0
    beta[0] = beta[0] + intercept - (0.3 if kind == "skewed" else 0.0) + (0.9 if family == "Poisson" else 0.0)
    eta = beta[0] + x @ beta[1:]
    if family == "Binomial":
        y = (rng.random(n) < 1.0 / (1.0 + np.exp(-eta))) * 1.0
    else:
        y = eta + 1.5 * rng.normal(size=n) if family == "Gaussian" else rng.poisson(np.exp(eta)) * 1.0
    names = [f"x{j}" for j in range(1, q + 1)]
    return pd.DataFrame({"y": y, **dict(zip(names, x.T, strict=True))}), beta


def bounds_of(family, kind, q=6):
    return {"y": RESPONSES[family]} | {f"x{j}": RANGES[kind] for j in range(1, q + 1)}


def model_of(table, family, sites=3, policy=None):
    """Make a model of a table whose rows are at several sites."""
    policy = policy or fs.Policy(privacy=fs.Budget(1e16, 1e-6, colluding=1))
    held = table.assign(site=np.array(SITES[:sites])[np.arange(len(table)) % sites])
    partition = fs.ClientPartition.from_frame(held, by="site", policy=policy)
    names = " + ".join(name for name in table.columns if name != "y")
    return fs.FederatedGLM.from_formula(f"y ~ {names}", partition, family=FAMILY[family])


def pooled_fit(question, X, y, rng=None, places=None):
    """Take all steps on pooled arrays, with normal noise of the planned variance, or none.

    Coefficients and covariances are None if the start leaves no plan.
    """
    iteration = NoisyIteration.begin(question.family, question.plan, question.base, question.response)
    while not iteration.ended:
        point, rhos = iteration.point, iteration.plan.rhos[iteration.step]
        radii = point.score_radius, point.information_radius
        deviations = [
            math.sqrt(float(radius * question.noise / (2 * rho))) if rho else 0.0
            for radius, rho in zip(radii, rhos, strict=True)
        ]
        if rng is None:
            digits = binary_places(point, len(X), len(question.records)) if places is None else places
            sums = [part * 2.0**-digits for part in bounded_sums(point, X, y, digits)]
        else:
            sums = [part.sum(axis=0) for part in point.rows(X, y)]
            sums = [s + rng.normal(size=len(s)) * sd for s, sd in zip(sums, deviations, strict=True)]
        iteration.take(*sums, deviations)
    if not math.isfinite(iteration.plan.price):
        return iteration, None, None, None
    return iteration, *iteration.covariances()


RARE = -2.6
"""Change of the intercept that leaves 5 % ones."""
RUNS = {2_000: 200, 5_000: 200, 10_000: 80, 50_000: 30}
EPSILONS = (0.5, 1.0, 3.0, 10.0)
GRID = [
    *(
        (family, kind, n, epsilon, sites, 0.0)
        for family in FAMILY
        for kind in KINDS
        for n, sites in ((2_000, 3), (10_000, 1), (10_000, 10), (50_000, 3))
        for epsilon in EPSILONS
    ),
    *(
        ("Binomial", kind, n, epsilon, 3, RARE)
        for kind in ("normal", "binary")
        for n in (2_000, 5_000, 10_000, 50_000)
        for epsilon in EPSILONS
    ),
]
"""Family, columns, rows, epsilon, sites, change of the intercept."""


@dataclass(frozen=True)
class Coverage:
    """Of converged runs: mean and lowest coverage, and median price; and the shares of other runs."""

    mean: float
    worst: float
    price: float
    expected: float
    failed: float
    refused: float


def data_of(table):
    return np.column_stack([np.ones(len(table)), table.drop(columns="y")]), table["y"].to_numpy()


def coverage(family, kind, n, epsilon, sites, runs, seed, intercept=0.0):
    """Simulate intervals; an EstimationError where most runs are refused, before or after the start."""
    question, hits, prices, expected, ends = None, [], [], [], []
    for run in range(runs):
        rng = np.random.default_rng([seed, run])
        table, beta = draw(family, kind, n, rng, intercept)
        if question is None:
            model = model_of(table, family, sites, fs.Policy(privacy=fs.Budget(50.0, 1e-6, colluding=1)))
            question = noisy_question(model, epsilon, 1e-6, bounds_of(family, kind))
            _ = question.plan, question.base
        iteration, params, sampling, noise = pooled_fit(question, *data_of(table), rng)
        known = params is not None
        ends.append("refused" if not known else "converged" if iteration.converged else "failed")
        if ends[-1] == "converged":
            bse = np.sqrt(np.diag(sampling + noise))
            hits.append(np.abs(params - beta) < Z * bse)
            prices.append(np.median(bse / np.sqrt(np.diag(sampling))))
            expected.append(iteration.plan.price)
    if ends.count("refused") > 0.5 * runs:
        raise EstimationError("most runs are refused")
    by = np.mean(hits, axis=0)
    shares = (ends.count(one) / runs for one in ("failed", "refused"))
    return Coverage(by.mean(), by.min(), np.median(prices), np.median(expected), *shares)


def read_coverage():
    """Return the table of the settings that are done, by :data:`COLUMNS`."""
    table = pd.read_csv(RESULTS) if RESULTS.exists() else pd.DataFrame(columns=COLUMNS)
    return table.set_index(list(COLUMNS))


def write_coverage(minutes=math.inf, again=None):
    """Write the settings that the table lacks, those that are refused with empty figures; return the rest."""
    end, done = time.monotonic() + 60.0 * minutes, read_coverage()
    if again is not None:
        done = done[~done.index.get_level_values("family").str.contains(again)]
    left = sorted((case for case in GRID if case not in done.index), key=lambda case: case[2])
    while left and time.monotonic() < end:
        case = left.pop(0)
        try:
            found = asdict(coverage(*case[:5], RUNS[case[2]], 7, case[5]))
        except EstimationError:
            found = {}
        row = pd.DataFrame([{"runs": RUNS[case[2]]} | found], index=pd.MultiIndex.from_tuples([case]))
        done = pd.concat([done, row]).rename_axis(COLUMNS)
        done.loc[[case for case in GRID if case in done.index]].round(4).to_csv(RESULTS)
    return left


def print_low(least=0.9):
    """Simulate settings with a low coefficient again, with more and other draws."""
    low = read_coverage().query(f"worst < {least}").index
    for case in sorted((case for case in GRID if case in low), key=lambda case: case[2]):
        found = coverage(*case[:5], 400 if case[2] <= 10_000 else 200, 8, case[5])
        print(*case, f"mean {found.mean:.3f}, lowest {found.worst:.3f}", flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    if words == ["low"]:
        sys.exit(print_low())
    again = words[:1] == ["again"]
    family = next((word for word in words if word in FAMILY), "")
    minutes = next((float(word) for word in words if word.replace(".", "").isdigit()), math.inf)
    print(f"{len(write_coverage(minutes, family if again else None))} of {len(GRID)} settings are left")
