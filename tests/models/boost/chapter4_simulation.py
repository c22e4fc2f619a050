"""Table 9 of chapter 4: errors of boosting with noise in every step, by the printed design.

python chapter4_simulation.py REPS STEPS: writes benchmarks/results/boost_chapter4.csv. 5,000 curves to fit,
1,250 to predict, at 101 points; 20 predictors of 20 splines at two parties, two active at each. The size of
the errors is not printed; here their standard deviation at a point is one.

Ding, Y. (2024). Statistical machine learning and data fusion methodologies: applications in healthcare.
Doctoral dissertation, Binghamton University, section 4.4.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from fedstat.kernels.curves import spline_basis
from fedstat.models.boost.private.published import published_boosting

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "boost_chapter4.csv"
T, Q, FITTED, PREDICTED = np.arange(101.0), 20, 5000, 1250
BASIS = spline_basis(T, 0.0, 100.0, Q - 4)
GRAM = BASIS.T @ BASIS
PUBLISHED = {(10.0, 0.02): 0.677, (10.0, 0.05): 0.554, (5.0, 0.02): 4.424, (5.0, 0.05): 3.363}


def draw(random):
    """Integrals of 20 predictors with the splines, by name, and the response (n, 101)."""
    n, X, mean = FITTED + PREDICTED, {}, 0.0
    for party in (1, 2):
        for p in range(1, 11):
            level = random.normal(party, 0.5, Q) + np.exp(random.normal(0.1 * p, 0.1 * party, Q))
            Z = (level + random.normal(size=(n, Q))) @ GRAM
            X[f"x{p} of party {party}"] = Z
            if p <= 2:
                mean = mean + Z @ random.normal(10.0, 1.0, (Q, Q)) @ BASIS.T
    return X, mean + random.normal(size=(n, len(T)))


def mape(Y, F):
    """Mean absolute percentage error."""
    return float(100.0 * np.abs((Y - F) / Y).mean())


def one(seed, steps):
    """Errors of one data set at all settings, with and without the bound on steps."""
    random, rows = np.random.default_rng(seed), []
    X, Y = draw(random)
    fit, new = slice(FITTED), slice(FITTED, None)
    means = {name: Z[fit].mean(axis=0) for name, Z in X.items()}
    centered = {name: Z - means[name] for name, Z in X.items()}
    level = Y[fit].mean(axis=0)
    coefficients = np.linalg.lstsq(BASIS, (Y[fit] - level).T)[0].T
    train, test = ({name: Z[part] for name, Z in centered.items()} for part in (fit, new))
    rows.append({"seed": seed, "method": "mean", "mape": mape(Y[new], level)})
    for epsilon, delta in PUBLISHED:
        for bounded in (True, False):
            budget = {"epsilon": epsilon, "delta": delta}
            settings = {"steps": steps, "bounded": bounded, "seed": random}
            found = published_boosting(train, coefficients, gram=GRAM, **budget, **settings)
            predicted = level + found.predict(test) @ BASIS.T
            lost = ((Y[new] - predicted) ** 2).sum() / ((Y[new] - level) ** 2).sum()
            active = np.mean([name.startswith(("x1 ", "x2 ")) for name in found.selected])
            rows.append(
                {
                    "seed": seed,
                    "method": "bounded steps" if bounded else "steps",
                    "epsilon": epsilon,
                    "delta": delta,
                    "mape": mape(Y[new], predicted),
                    "rsquared": 1.0 - float(lost),
                    "active": float(active),
                    "published": PUBLISHED[epsilon, delta],
                }
            )
    return rows


if __name__ == "__main__":
    reps, steps = int(sys.argv[1]), int(sys.argv[2])
    table = pd.DataFrame([row for seed in range(reps) for row in one(seed, steps)]).assign(steps=steps)
    table.round(5).to_csv(TABLE, index=False, lineterminator="\n")
    print(table.groupby(["method", "epsilon", "delta"], dropna=False)[["mape", "rsquared", "active"]].mean())
