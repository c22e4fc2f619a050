"""How often intervals of `combine` contain the truth; prints the figures of its note.

``python combine_simulation.py 3 40`` has epsilon 3 and 40 runs of about 7 seconds. With an epsilon the tables
are those of `CopulaSynthesizer`. Without one each table is drawn from parameters of its own, around the
estimate, as the rule assumes.
"""

import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd

import fedstat as fs

N, P = 10_000, 4


def fit(X, y, logistic):
    """Coefficients and standard errors of a regression with intercept."""
    Z = np.column_stack([np.ones(len(X)), X])
    b = np.zeros(Z.shape[1])
    for _ in range(25 if logistic else 1):
        mean = 1.0 / (1.0 + np.exp(-Z @ b)) if logistic else Z @ b
        weight = mean * (1.0 - mean) if logistic else np.ones(len(y))
        information = Z.T @ (weight[:, None] * Z)
        step = np.linalg.solve(information, Z.T @ (y - mean))
        b = b + step
    cov = np.linalg.inv(information)
    if not logistic:
        cov *= ((y - Z @ b) ** 2).sum() / (len(y) - len(b))
    names = ["Intercept", *(f"x{j}" for j in range(1, Z.shape[1]))]
    errors = pd.Series(np.sqrt(np.diag(cov)), names)
    return SimpleNamespace(params=pd.Series(b, names), bse=errors, cov=cov, nobs=len(y))


def ideal(tables, n, runs, seed=0):
    """Share of 95 % intervals that contain the slope of a line."""
    rng, hits = np.random.default_rng(seed), []

    def drawn(mean):
        x = rng.standard_normal((n, 1))
        return fit(x, mean[0] + mean[1] * x[:, 0] + rng.standard_normal(n), logistic=False)

    for _ in range(runs):
        own = drawn((1.0, 2.0))
        means = rng.multivariate_normal(own.params, own.cov, size=tables)
        low, high = fs.combine([drawn(mean) for mean in means]).conf_int().loc["x1"]
        hits.append(low < 2.0 < high)
    return np.mean(hits)


def latent(n, rng):
    """Rows of a Gaussian copula: four uniform columns, and a binary one."""
    from scipy import stats

    R = 0.3 + 0.7 * np.eye(P + 1)
    Z = rng.multivariate_normal(np.zeros(P + 1), R, size=n)
    table = pd.DataFrame(stats.norm.cdf(Z[:, :P]), columns=[f"x{j}" for j in range(1, P + 1)])
    return table.assign(y=(Z[:, P] > 0.5).astype(int))


def fit_table(table):
    columns = [f"x{j}" for j in range(1, P + 1)]
    return fit(table[columns].to_numpy(float), table["y"].to_numpy(float), logistic=True)


def synthetic(epsilon, runs, tables=20):
    """Shares of 95 % intervals that contain each coefficient, of the regression in the population."""
    truth = fit_table(latent(2_000_000, np.random.default_rng(99))).params
    hits = []
    for run in range(runs):
        frame = latent(N, np.random.default_rng(run)).assign(id=np.arange(N))
        frames = {"A": frame[["id", "x1", "x2"]], "B": frame[["id", "x3", "x4", "y"]]}
        policy = fs.Policy(privacy=fs.Budget(epsilon=epsilon + 1e-9, delta=1e-6))
        partition = fs.ClientPartition.from_frames(frames, on="id", policy=policy)
        bounds = {f"x{j}": (0.0, 1.0) for j in range(1, P + 1)} | {"y": [0, 1]}
        made = fs.CopulaSynthesizer(partition, epsilon, bounds).fit(seed=run)
        limits = fs.combine([fit_table(t) for t in made.sample_tables(tables, N, seed=run)]).conf_int()
        hits.append((limits[0] < truth) & (truth < limits[1]))
    return np.mean(hits, axis=0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        shares = synthetic(float(sys.argv[1]), int(sys.argv[2]))
        print(f"epsilon {sys.argv[1]}: mean {shares.mean():.3f}, worst {shares.min():.3f}", shares)
    else:
        for count in (5, 10, 20, 50):
            print(f"{count} tables: {ideal(count, 100, 1000):.3f}")
