"""Cover of the intervals of PrivateCopulaGLM, with the noise that sites would add.

    OMP_NUM_THREADS=1 python tests/models/copula_glm/private_coverage_simulation.py Binomial 1 100

Family, epsilon (inf for no noise), repetitions, and optionally entities, draws and the first seed. Columns
and coefficients are those of ``copula_design``: ten columns of mixed kinds at three institutions, the
response at a fourth, a Gaussian copula behind the columns. Noise is numpy's Gaussian of the planned
variances; rows do not pass through doors, of which ``test_private_glm`` is the test.
"""

import sys

import numpy as np
import statsmodels.api as sm
from copula_design import BOUNDS, OWNERS, POINTS, RESPONSES, coefficients, draw_columns, draw_response
from scipy import stats

from fedstat.models.copula.bounds import Bounds
from fedstat.models.copula_glm.asked import MomentPlan
from fedstat.models.copula_glm.moments.bootstrap import bootstrap, estimate
from fedstat.models.copula_glm.moments.columns import ScoredColumn
from fedstat.models.copula_glm.moments.release import ReleaseNoise, release_rows
from fedstat.models.copula_glm.protocol import MomentQuestion, whole_design
from fedstat.privacy.zcdp import rho_of_budget

FAMILIES = {
    "Binomial": sm.families.Binomial(),
    "Gaussian": sm.families.Gaussian(),
    "Poisson": sm.families.Poisson(),
}
LARGE = 1e4
"""Epsilon whose bins are as fine as they can be, for none."""


def make_plan(family, epsilon, n) -> MomentPlan:
    clients = sorted(set(OWNERS.values()))
    bounds = {client: {k: BOUNDS[k] for k in BOUNDS if OWNERS[k] == client} for client in clients}
    design = {
        client: tuple(ScoredColumn(name, name, client, j) for j, name in enumerate(own))
        for client, own in bounds.items()
    }
    bounds["Y"] = {"y": Bounds({"y": RESPONSES[family]})["y"]}
    rho = rho_of_budget(epsilon if np.isfinite(epsilon) else LARGE, 1e-6)
    return MomentQuestion(bounds, design, "Y", family, rho).plan(dict.fromkeys(bounds, n))


def noise_of(plan: MomentPlan, n: int) -> ReleaseNoise:
    """Noise of a release in which the holder of the response has nothing else."""
    counts = [plan.count_deviation(c, j) for c, own in plan.columns.items() for j in range(len(own))]
    owners = np.array([c for c, own in plan.design.items() for _ in own] + [plan.holder])
    shares = np.where(owners[:, None] == owners, 1, 2)
    return ReleaseNoise(np.array(counts[:-1]), counts[-1], np.sqrt(shares) * plan.product_deviation(1) / n)


def simulate(family, epsilon, repetitions, n=5_000, draws=20, first=0):
    """Errors and standard errors of the slopes, and those of maximum likelihood: (repetitions, 6, p)."""
    plan = make_plan(family, epsilon, n)
    design, y_bins = whole_design(plan), plan.columns["Y"][0]
    noise = noise_of(plan, n) if np.isfinite(epsilon) else None
    out = []
    for seed in range(first, first + repetitions):
        rng = np.random.default_rng([seed, 17])
        X = draw_columns(n, rng)
        y = draw_response(family, X, rng)
        codes = np.column_stack([bins.code(X[bins.name]) for bins in design.bins])
        y_codes = np.asarray(y_bins.code(X.assign(y=y)["y"]))
        released = release_rows(design, family, y_bins, codes, y_codes, noise, None if noise is None else rng)
        fit = estimate(design, released, POINTS)
        errors = bootstrap(fit, n, noise, draws, rng)
        known = sm.GLM(y, sm.add_constant(X.to_numpy()), family=FAMILIES[family]).fit()
        b = coefficients(family)
        parts = [
            fit.root.params - b,
            np.sqrt(np.diag(errors.covariance)),
            errors.sampling.std(axis=0, ddof=1),
            errors.noise.std(axis=0, ddof=1),
            known.params - b,
            known.bse,
        ]
        out.append(np.array(parts)[:, 1:] * X.std().to_numpy())
    return np.array(out)


def covers(found, draws=20):
    """Which intervals of level .95 hold the truth: ours, and those of maximum likelihood."""
    ours = np.abs(found[:, 0]) < stats.t.ppf(0.975, draws - 1) * found[:, 1]
    return ours, np.abs(found[:, 4]) < 1.96 * found[:, 5]


def report(family, epsilon, repetitions, n=5_000, draws=20, first=0):
    found = simulate(family, epsilon, repetitions, n, draws, first)
    ours, known = covers(found, draws)
    e, se, sampling, noise, _, ml = found.transpose(1, 0, 2)
    times, ratio = se.mean() / ml.mean(), np.sqrt(np.mean((noise / sampling) ** 2))
    print(
        f"{family} epsilon {epsilon:g} n {n:,} repetitions {repetitions}, {draws} draws: cover "
        f"{ours.mean():.3f} (worst column {ours.mean(axis=0).min():.2f}), maximum likelihood "
        f"{known.mean():.3f}; rmse {np.sqrt(np.mean(e**2)):.4f}, standard error "
        f"{np.sqrt(np.mean(se**2)):.4f}, times that of maximum likelihood {times:.2f}; noise over sampling "
        f"{ratio:.2f}; bias by column {e.mean(axis=0).round(3)}",
        flush=True,
    )


if __name__ == "__main__":
    family, epsilon, *more = sys.argv[1:]
    report(family, float(epsilon), *map(int, more))
