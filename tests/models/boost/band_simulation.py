"""Coverage of the refit's intervals and bands, and size of its tests.

python band_simulation.py REPS N [other]: with "other" surfaces, curves and errors of another design, on which
nothing was chosen.
"""

from __future__ import annotations

import sys

import numpy as np

from fedstat.kernels.curves import integration_weights, spline_basis
from fedstat.models.boost.learning.learners import Learner
from fedstat.models.boost.learning.moments import CurveMoments
from fedstat.models.boost.learning.prepared_learners import BoostDesign
from fedstat.models.boost.report.refit import band, refit

S = T = np.linspace(0, 1, 30)
KNOTS, P, ACTIVE = 3, 5, 3
THETA = spline_basis(S, 0, 1, KNOTS)
BETAS = [
    3 * np.outer(np.sin(np.pi * S), np.cos(np.pi * T)),
    4 * np.exp(-((S[:, None] - 0.4) ** 2 + (T - 0.6) ** 2) / 0.06),
    2 * np.subtract.outer(S, T),
]


def inside(beta):
    """Largest part of a surface that the bases can represent."""
    project = THETA @ np.linalg.pinv(THETA)
    return project @ beta @ project


def draw(n, random):
    """Columns of all learners and the response, with errors correlated along it."""
    common = random.normal(size=(n, 12, 1))
    scores = np.sqrt(0.5) * random.normal(size=(n, 12, P)) + np.sqrt(0.5) * common
    X = np.einsum("nkp,tk->pnt", scores, spline_basis(S, 0, 1, 8)) * integration_weights(S)
    mean = sum(X[p] @ inside(BETAS[p]) for p in range(ACTIVE))
    waves = np.array([np.ones(30), np.sqrt(2) * np.sin(2 * np.pi * T), np.sqrt(2) * np.cos(2 * np.pi * T)])
    Y = mean + random.normal(size=(n, 3)) @ waves * 0.5 + random.normal(size=(n, 30)) * 0.5
    return np.column_stack([np.ones(n), *(x @ THETA for x in X)]), Y


OTHER_BETAS = [
    2.5 * np.outer(np.cos(2 * np.pi * S), np.ones(30)),
    3 * np.outer(S**2, np.exp(-3 * T)),
    1.5 * np.sin(2 * np.pi * np.add.outer(S, T)),
]


def draw_other(n, random):
    """Rough curves that hardly correlate; errors of an autoregression with heavy tails, larger at the end."""
    common = random.normal(size=(n, 12, 1))
    scores = np.sqrt(0.8) * random.normal(size=(n, 12, P)) + np.sqrt(0.2) * common
    scores = scores * 3.0 / np.arange(1, 13)[None, :, None]
    waves = np.cos(np.pi * np.outer(S, np.arange(12)))
    X = np.einsum("nkp,tk->pnt", scores, waves) * integration_weights(S)
    mean = sum(X[p] @ inside(OTHER_BETAS[p]) for p in range(ACTIVE))
    shocks = random.standard_t(6, size=(n, 30)) * 0.6 / np.sqrt(1.5)
    errors = shocks.copy()
    for j in range(1, 30):
        errors[:, j] = 0.9 * errors[:, j - 1] + np.sqrt(1 - 0.81) * shocks[:, j]
    return np.column_stack([np.ones(n), *(x @ THETA for x in X)]), mean + errors * (1 + T)


DESIGNS = {"first": (BETAS, draw), "other": (OTHER_BETAS, draw_other)}


def study(n, seeds, name="first"):
    """Pointwise and simultaneous coverage of active and null learners, and rejections of the null ones."""
    learners = (Learner("1"), *(Learner("bsignal", f"x{p}", knots=KNOTS, differences=2) for p in range(P)))
    starts = tuple(np.cumsum([0, 1, *[KNOTS + 4] * P]).tolist())
    design = BoostDesign(
        learners, starts, Learner("bbs", "t", knots=KNOTS, differences=2, df=3.0), "separable"
    )
    basis, found = spline_basis(T, 0, 1, KNOTS), []
    betas, draws = DESIGNS[name]
    for seed in seeds:
        random = np.random.default_rng(seed)
        Z, Y = draws(n, random)
        C = Y @ basis
        parts = (Z.T @ Z, Z.T @ C, C.T @ C, Y.sum(axis=0), (Y * Y).sum())
        sums = CurveMoments(*(np.asarray(part)[None] for part in parts)).total
        fitted = refit(sums.about(sums.mean, basis), design, basis.T @ basis, range(1, P + 1))
        row = []
        for p in range(1, P + 1):
            one = band(fitted, p, THETA, basis, 0.95, 500, random)
            off = np.abs(one.estimate - (inside(betas[p - 1]) if p <= ACTIVE else 0.0)) / one.se
            row.append([np.mean(off <= 1.959964), np.all(off <= one.factor), fitted.tests[p].p_value < 0.05])
        found.append(row)
    return np.array(found, dtype=float)


if __name__ == "__main__":
    results = study(int(sys.argv[2]), range(int(sys.argv[1])), *sys.argv[3:])
    for name, part in (("active", results[:, :ACTIVE]), ("null", results[:, ACTIVE:])):
        print(name, dict(zip(("pointwise", "simultaneous", "rejected"), part.mean(axis=(0, 1)), strict=True)))
