"""Coverage with and without the step on the rows, and how often the test of the copula rejects.

    OMP_NUM_THREADS=1 python tests/models/copula_glm/copula_test_simulation.py FILE.csv 40

Six thousand entities, five columns at two sites, a logistic response at a third. Columns follow a Gaussian
copula, or one of them is a noisy square of another ("humps"), which no Gaussian copula describes. Each
repetition is a fit over all messages, for each epsilon and for `polish` 0 and 1. Rows of the file are not
computed again.
"""

import csv
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm
from scipy.special import expit

import fedstat as fs

SLOPES = {"a": 1.0, "b": 1.0, "c": -0.5, "d": 0.4, "e": 0.0}
HELD = {"Registry": ["y"], "Bank": ["a", "c"], "Shop": ["b", "d", "e"]}
BOUNDS = {"y": [0, 1], "a": (-4, 4), "b": (-4, 8), "c": (-4, 4), "d": [0, 1], "e": (-4, 4)}
N, EPSILONS, DRAWS = 6_000, (3.0, 10.0), 20


def draw(shape, rng, n=N):
    """A table whose columns follow a copula, or one with `b = a^2 + e`."""
    z = rng.standard_normal((n, 5))
    z[:, 1:] += 0.4 * z[:, :1]
    if shape == "humps":
        z[:, 1] = z[:, 0] ** 2 - 1.0 + 0.3 * rng.standard_normal(n)
    table = pd.DataFrame(z, columns=list(SLOPES)).clip(-3.99, 7.99)
    table[["a", "c", "e"]] = table[["a", "c", "e"]].clip(-3.99, 3.99)
    table["d"] = (table["d"] > 0.3).astype(int)
    eta = -0.5 + table.to_numpy() @ np.array(list(SLOPES.values()))
    return table.assign(y=(rng.uniform(size=n) < expit(eta)).astype(int))


def fit(table, epsilon, seed=0, draws=DRAWS, **options):
    policy = fs.Policy(privacy=fs.Budget(epsilon + 1.0, 1e-6))
    partition = fs.ClientPartition.from_frame(table, columns=HELD, policy=policy)
    family = sm.families.Binomial()
    model = fs.PrivateCopulaGLM.from_formula(
        "y ~ a + b + c + d + e", partition, family=family, epsilon=epsilon, bounds=BOUNDS
    )
    return model.fit(draws=draws, seed=seed, **options)


def repeat(shape, epsilon, polish, seed):
    result = fit(draw(shape, np.random.default_rng([seed, 5])), epsilon, seed, polish=polish)
    low, high = result.conf_int().loc[list(SLOPES)].to_numpy().T
    truth = np.array(list(SLOPES.values()))
    covered = (low < truth) & (truth < high)
    p = result._record.test.pvalue if polish else np.nan
    return [*covered.astype(int), result._errors.ratio, p]


def main(path, repetitions):
    path, keys = Path(path), ["columns", "epsilon", "polish", "seed"]
    if not path.exists():
        path.write_text(",".join([*keys, *SLOPES, "ratio", "p"]) + "\n")
    done = set(pd.read_csv(path)[keys].itertuples(index=False, name=None))
    for seed, *cell in product(range(repetitions), ("copula", "humps"), EPSILONS, (0, 1)):
        if (*cell, seed) not in done:
            with path.open("a", newline="") as file:
                found = repeat(*cell, seed)
                csv.writer(file).writerow([*cell, seed, *(f"{x:.4g}" for x in found)])
    rows = pd.read_csv(path)
    for key, one in rows.groupby(keys[:-1]):
        rates, rejected = one[list(SLOPES)].mean(), (one["p"] < 0.05).mean()
        print(
            *key,
            len(one),
            f"cover {rates.mean():.3f}, worst {rates.min():.2f}; "
            f"noise / sampling {one['ratio'].mean():.2f}; rejected {rejected:.2f}",
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
