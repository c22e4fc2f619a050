"""Cover of the intervals of PrivateCopulaGLM, with the noise that sites would add.

    OMP_NUM_THREADS=1 python tests/models/copula_glm/private_coverage_simulation.py run FILE.csv 200 0
    python tests/models/copula_glm/private_coverage_simulation.py table FILE.csv OUT.csv 0

The first writes the rows of 200 repetitions, and continues where the file ends; the second summarizes them by
cell and coefficient. The last argument is `polish`, 0 or 1. Columns and coefficients are those of
``copula_design``: ten columns of mixed kinds at three institutions, the response at a fourth, a Gaussian
copula for the columns. Noise is numpy's Gaussian with the planned variances; no sites take part, which
``test_private_glm`` tests.
"""

import csv
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm
from copula_design import BOUNDS, OWNERS, POINTS, RESPONSES, coefficients, draw_columns, draw_response
from scipy import stats

from fedstat.models.copula.bounds import Bounds
from fedstat.models.copula.request import ALL
from fedstat.models.copula_glm.design import ScoredColumn
from fedstat.models.copula_glm.estimation import bootstrap, estimate
from fedstat.models.copula_glm.protocol import MomentReleasePlan, complete_design
from fedstat.models.copula_glm.released_distribution import ReleaseNoise, release_rows
from fedstat.models.copula_glm.request import MomentPlan, radius_of
from fedstat.models.copula_glm.score import OF_STEP, ScoreSensitivity, plan_score, take_step
from fedstat.privacy.zcdp import rho_of_budget

FAMILIES = {
    "Binomial": sm.families.Binomial(),
    "Gaussian": sm.families.Gaussian(),
    "Poisson": sm.families.Poisson(),
}
LARGE = 1e4
"""Epsilon whose bins are as fine as they can be, for none."""


def make_plan(family, epsilon, n, of_step=0, rows=None) -> MomentPlan:
    """Plan the release of four institutions with different columns, or with different `rows`."""
    if rows is not None:
        bounds = {ALL: {**BOUNDS, "y": Bounds({"y": RESPONSES[family]})["y"]}}
        design = {ALL: tuple(ScoredColumn(name, name, ALL, j) for j, name in enumerate(BOUNDS))}
        plan = MomentReleasePlan(bounds, design, ALL, family, rho_of_budget(epsilon, 1e-6), rows=rows)
        return plan.plan({ALL: n})
    sites = sorted(set(OWNERS.values()))
    bounds = {site: {k: BOUNDS[k] for k in BOUNDS if OWNERS[k] == site} for site in sites}
    design = {
        site: tuple(ScoredColumn(name, name, site, j) for j, name in enumerate(own))
        for site, own in bounds.items()
    }
    bounds["Y"] = {"y": Bounds({"y": RESPONSES[family]})["y"]}
    rho = rho_of_budget(epsilon if np.isfinite(epsilon) else LARGE, 1e-6)
    found = MomentReleasePlan(bounds, design, "Y", family, rho * (1 - of_step))
    return found.plan(dict.fromkeys(bounds, n))


def noise_of(plan: MomentPlan, n: int) -> ReleaseNoise:
    """Noise of a release in which the holder of the response has nothing else."""
    counts = [plan.count_deviation(c, j) for c, own in plan.columns.items() for j in range(len(own))]
    if plan.rows is not None:
        products = np.full((len(counts), len(counts)), plan.product_deviation(1) / n)
        return ReleaseNoise(np.array(counts[:-1]), counts[-1], products)
    owners = np.array([c for c, own in plan.design.items() for _ in own] + [plan.holder])
    shares = np.where(owners[:, None] == owners, 1, 2)
    return ReleaseNoise(np.array(counts[:-1]), counts[-1], np.sqrt(shares) * plan.product_deviation(1) / n)


def simulate(family, epsilon, repetitions, polish=0, rows=None):
    """Errors and standard errors of the slopes, and those of maximum likelihood: (repetitions, 6, p)."""
    cell = Cell(family, epsilon, 5_000, DRAWS, polish, rows)
    return np.array([cell.repeat(seed) for seed in range(repetitions)])


class Cell:
    """Values that all repetitions of a family, an epsilon and a number of entities share."""

    def __init__(self, family, epsilon, n, draws, polish=0, rows=None):
        self.family, self.n, self.draws, self.polish = family, n, draws, polish
        self.plan = make_plan(family, epsilon, n, OF_STEP if polish else 0, rows)
        self.design, self.y_bins = complete_design(self.plan), self.plan.columns[self.plan.holder][-1]
        self.noise = noise_of(self.plan, n) if np.isfinite(epsilon) else None

    def repeat(self, seed):
        """Errors, standard errors, their parts; errors of maximum likelihood, its standard errors: (6, p)."""
        rng = np.random.default_rng([seed, 17])
        X = draw_columns(self.n, rng)
        y = draw_response(self.family, X, rng)
        known = sm.GLM(y, sm.add_constant(X.to_numpy()), family=FAMILIES[self.family]).fit()
        b = coefficients(self.family)
        params, *errors = self.estimates(X, y, rng)
        parts = [params - b, *errors, known.params - b, known.bse]
        return np.array(parts)[:, 1:] * X.std().to_numpy()

    def estimates(self, X, y, rng):
        """Coefficients, standard errors, their parts of sampling and of noise: (p + 1,) each."""
        codes = np.column_stack([bins.code(X[bins.name]) for bins in self.design.bins])
        y_codes = np.asarray(self.y_bins.code(X.assign(y=y)["y"]))
        noise = self.noise
        released = release_rows(
            self.design, self.family, self.y_bins, codes, y_codes, noise, None if noise is None else rng
        )
        fit = estimate(self.design, released, POINTS)
        if self.polish:
            return step_on_rows(self.plan, fit, X.to_numpy(), codes, y_codes, noise is not None, rng)
        errors = bootstrap(fit, self.n, noise, self.draws, rng)
        parts = (part.std(axis=0, ddof=1) for part in (errors.sampling, errors.noise))
        return fit.root.params, np.sqrt(np.diag(errors.covariance)), *parts


def step_on_rows(plan, fit, values, codes, y_codes, noisy, rng):
    """Coefficients after a step on rows, standard errors, their parts (sampling, noise): (p + 1,) each.

    In real numbers, with the noise that all institutions add together.
    """
    n, design, response = len(values), fit.distribution.design, fit.release.response
    radii = {c: float(radius_of(len(own), "")) for c, own in plan.design.items() if own}
    request = plan_score(fit, plan.holder, n, np.sqrt(1.0 + sum(radii.values())))
    found = ScoreSensitivity.of(request.mean, radii, plan.holder)
    rho = float(plan.rho * OF_STEP / (1 - OF_STEP))
    deviation = np.sqrt(max(sum(found.parts.values()), found.complete) / (2.0 * rho)) if noisy else 0.0
    V = np.column_stack([np.ones(n), design.score(codes, fit.distribution.tables)])
    blocks = zip(design.sites, design.blocks, strict=True)
    parts = {c: values[:, block] @ fit.root.params[1:][block] for c, block in blocks}
    w = np.sum([request.mean.part(c, part - request.middles[c]) for c, part in parts.items()], axis=0)
    score = response.table[y_codes]
    y = score if response.has_scale else (score + 1.0) / 2.0
    sums = V.T @ (y - request.mean.at(w)) + deviation * rng.standard_normal(V.shape[1])
    step = take_step(fit, request, sums, n, deviation)
    errors = (np.sqrt(np.diag(part)) for part in (step.covariance, step.sampling, step.noise))
    return step.params, *errors


def quantile_of(polish):
    return 1.96 if polish else stats.t.ppf(0.975, DRAWS - 1)


def covers(found, polish=0):
    """Which intervals of level .95 hold the truth."""
    return np.abs(found[:, 0]) < quantile_of(polish) * found[:, 1]


CELLS = list(product(["Binomial", "Gaussian"], [5_000, 10_000], [1.0, 3.0, np.inf]))
DRAWS = 20
KEYS = ["family", "n", "epsilon", "seed"]
PARTS = ["error", "se", "sampling", "noise", "ml_error", "ml_se"]


def run(path, repetitions, polish=0):
    """Write a row per repetition and coefficient; rows that the file already has are not computed again."""
    path, cells = Path(path), {}
    header = [*KEYS, "coefficient", *PARTS]
    if not path.exists():
        path.write_text(",".join(header) + "\n")
    old = pd.read_csv(path)
    done = set(old[KEYS].itertuples(index=False, name=None))
    with path.open("a", newline="") as file:
        out = csv.writer(file)
        for seed, (family, n, epsilon) in product(range(repetitions), CELLS):
            if (family, n, epsilon, seed) in done:
                continue
            if (family, n, epsilon) not in cells:
                cells[family, n, epsilon] = Cell(family, epsilon, n, DRAWS, polish)
            found = cells[family, n, epsilon].repeat(seed)
            for name, column in zip(BOUNDS, found.T, strict=True):
                out.writerow([family, n, epsilon, seed, name, *(f"{x:.6g}" for x in column)])
            file.flush()


def table(path, out, polish=0):
    """Cover, bias and errors by cell and coefficient; the last line of each cell is of all of them."""
    rows = pd.read_csv(path)
    ours = rows["error"].abs() < quantile_of(polish) * rows["se"]
    rows = rows.assign(cover=ours, ml_cover=rows["ml_error"].abs() < 1.96 * rows["ml_se"])
    lines = []
    for key, cell in rows.groupby(KEYS[:-1], sort=False):
        for name, one in [*cell.groupby("coefficient", sort=False), ("all", cell)]:
            lines.append(
                {
                    **dict(zip(KEYS[:-1], key, strict=True)),
                    "coefficient": name,
                    "repetitions": one["seed"].nunique(),
                    "cover": one["cover"].mean(),
                    "bias": one["error"].mean(),
                    "rmse": np.sqrt((one["error"] ** 2).mean()),
                    "standard error": np.sqrt((one["se"] ** 2).mean()),
                    "noise over sampling": np.sqrt(((one["noise"] / one["sampling"]) ** 2).mean()),
                    "times maximum likelihood": one["se"].mean() / one["ml_se"].mean(),
                    "cover of maximum likelihood": one["ml_cover"].mean(),
                }
            )
    found = pd.DataFrame(lines)
    found.to_csv(out, index=False, float_format="%.4g")
    print(found[found["coefficient"] == "all"].round(3).to_string(index=False))


if __name__ == "__main__":
    what, path, to, polish = sys.argv[1:]
    run(path, int(to), int(polish)) if what == "run" else table(path, to, int(polish))
