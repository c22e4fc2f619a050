"""How far fewer exchanges of scores lead from mboost's path: python rounds_simulation.py SEEDS > FILE."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import statsmodels.api as sm

import fedstat as fs
from fedstat.kernels.curves import integration_weights, spline_basis

S = np.linspace(0, 1, 50)
CURVES = {f"x{p}": fs.Curve(f"x{p}_*", domain=(0, 1)) for p in range(10)}
BETAS = (6 * np.sin(np.pi * S), 8 * np.exp(-((S - 0.4) ** 2) / 0.05), 5 * (S - 0.5))
LOSSES = {
    "binomial": {"family": sm.families.Binomial()},
    "poisson": {"family": sm.families.Poisson()},
    "huber": {"loss": "huber", "delta": 1.0},
}
TEXT = " + ".join(f"bsignal({name}, knots=8, differences=2)" for name in CURVES)
STEPS = 200


def draw(kind, random, n=2000):
    """Ten curves, three of which have an effect on a response of a kind."""
    X = [random.normal(size=(n, 12)) @ spline_basis(S, 0, 1, 8).T for _ in CURVES]
    eta = sum((x * integration_weights(S)) @ beta for x, beta in zip(X, BETAS, strict=False))
    eta *= 1.2 / eta.std()
    if kind == "binomial":
        y = (random.uniform(size=n) < 1.0 / (1.0 + np.exp(-eta))).astype(float)
    elif kind == "poisson":
        y = random.poisson(np.exp(0.5 * eta)).astype(float)
    else:
        y = eta + 0.6 * random.standard_t(2, size=n)
    wide = np.hstack(X)
    names = [f"x{p}_{j}" for p in range(10) for j in range(len(S))]
    return pd.DataFrame(wide, columns=names).assign(y=y, site="one")


def study(kind, seed, spacings=(1, 5, 10, 20)):
    """Relative distance of predictors of new rows from those of an exchange at every step; test losses."""
    train, new = (draw(kind, np.random.default_rng([seed, part])) for part in range(2))
    partition = fs.ClientPartition.from_frame(
        train, by="site", curves=CURVES, policy=fs.Policy(max_parameters=1)
    )
    model = fs.FedFunctionBoost.from_formula(f"y ~ {TEXT}", partition, **LOSSES[kind])
    exact, rows = None, []
    for every in spacings:
        fit = model.fit(steps=STEPS, every=every)
        f = fit.predict(new, "linear").to_numpy() - fit.offset[0]
        exact = f if exact is None else exact
        far = np.linalg.norm(f - exact) / np.linalg.norm(exact)
        rows.append(
            [kind, seed, every, STEPS // every, round(float(far), 5), round(fit.score(new)["loss"], 5)]
        )
    return rows


if __name__ == "__main__":
    print("loss,seed,every,rounds,distance,test_loss")
    for kind in LOSSES:
        for seed in range(int(sys.argv[1])):
            for row in study(kind, seed):
                print(*row, sep=",", flush=True)
