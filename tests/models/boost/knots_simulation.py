"""Knots that are too few: coverage of the refit, the test of knots, and the refit with doubled knots.

python knots_simulation.py REPS N DESIGN: effects of "smooth", "rough" or "rough along t" shape, with 4 knots.
"""

from __future__ import annotations

import sys

import numpy as np

from fedstat.kernels.curves import integration_weights, spline_basis
from fedstat.kernels.multiple_tests import adjust
from fedstat.models.boost.learning.boosting import Boosting
from fedstat.models.boost.learning.knots import doubled, given_knots, knot_sums
from fedstat.models.boost.learning.learners import Learner
from fedstat.models.boost.learning.moments import CurveMoments
from fedstat.models.boost.learning.prepared_learners import BoostDesign
from fedstat.models.boost.report.refit import band, refit, test_effect

S = T = np.linspace(0, 1, 30)
KNOTS, P, ACTIVE = 4, 3, 2
EFFECTS = {
    "smooth": [3 * np.outer(np.sin(np.pi * S), np.cos(np.pi * T)), 2 * np.subtract.outer(S, T)],
    "rough": [3 * np.outer(np.sin(6 * np.pi * S), np.cos(np.pi * T)), 2 * np.outer(np.cos(5 * np.pi * S), T)],
    "rough along t": [
        3 * np.outer(np.cos(np.pi * S), np.sin(6 * np.pi * T)),
        2 * np.outer(S, np.cos(5 * np.pi * T)),
    ],
}
LEARNERS = (Learner("1"), *(Learner("bsignal", f"x{p}", knots=KNOTS, high=1.0) for p in range(P)))
TIME = Learner("bbs", "t", knots=KNOTS, differences=2, df=3.0, high=1.0)


def design_of(learners, time):
    starts = tuple(np.cumsum([0, 1, *[one.splines for one in learners[1:]]]).tolist())
    return BoostDesign(learners, starts, time, "separable")


def draw(n, name, random):
    """Sums for doubled knots of curves with 20 waves, and of a response with correlated errors."""
    waves = np.cos(np.pi * np.outer(S, np.arange(20)))
    scores = random.normal(size=(P, n, 20)) * 3.0 / np.sqrt(np.arange(1, 21))
    X = scores @ waves.T * integration_weights(S)
    mean = sum(x @ effect for x, effect in zip(X, EFFECTS[name], strict=False))
    level = random.normal(size=(n, 1))
    Y = mean + 0.3 * level + 0.3 * random.normal(size=(n, 30))
    fine = spline_basis(S, 0, 1, 2 * KNOTS + 1)
    Z = np.column_stack([np.ones(n), *(x @ fine for x in X)])
    C = Y @ fine
    parts = (Z.T @ Z, Z.T @ C, C.T @ C, Y.sum(axis=0), (Y * Y).sum())
    return CurveMoments(*(np.asarray(part)[None] for part in parts)), fine


def study(n, seeds, name):
    """Coverage of active effects with given and with doubled knots; whether the test finds few knots."""
    coarse = design_of(LEARNERS, TIME)
    wide = design_of(tuple(map(doubled, LEARNERS)), doubled(TIME))
    given_basis, found = spline_basis(S, 0, 1, KNOTS), []
    for seed in seeds:
        random = np.random.default_rng(seed)
        moments, basis = draw(n, name, random)
        fine = Boosting(moments, wide, basis, 0.1)
        own = given_knots(fine, coarse, given_basis)
        row = []
        for one, at in ((own, given_basis), (fine, basis)):
            sums = one.moments.total
            fitted = refit(sums.about(sums.mean, one.basis), one.design, one.gram, range(1, P + 1))
            for p in range(1, ACTIVE + 1):
                made = band(fitted, p, at, one.basis, 0.95, 500, random)
                off = np.abs(made.estimate - EFFECTS[name][p - 1]) / made.se
                row += [np.mean(off <= 1.959964), np.all(off <= made.factor)]
        sums = moments.total
        tested = knot_sums(sums.about(sums.mean, basis), coarse, fine.gram, range(1, P + 1))
        p_values = adjust([test_effect(one.sums, one.place).p_value for one in tested])
        found.append([*row, min(p_values) < 0.05])
    return np.array(found, dtype=float)


if __name__ == "__main__":
    runs = study(int(sys.argv[2]), range(int(sys.argv[1])), sys.argv[3])
    half = 2 * ACTIVE
    for what, part in (("given knots", runs[:, :half]), ("doubled knots", runs[:, half:-1])):
        print(what, "pointwise", part[:, ::2].mean().round(3), "simultaneous", part[:, 1::2].mean().round(3))
    print("found", runs[:, -1].mean().round(3))
