"""Size of the tests of equal coefficients where sites differ in residual variance only.

``python tests/inference/unequal_dispersions.py``
"""

import numpy as np

from fedstat.inference.homogeneity_tests import SiteScores, SiteWelchTerms, welch_test

VARIANCES = (2.5, 1.0, 0.6)
ROWS = [(60, 60, 60), (40, 100, 400), (400, 100, 40), (12, 20, 60), (15, 15, 15)]


def both_tests(rng, rows, variances=VARIANCES, p=4):
    """P-values with own dispersions, and of the score test with one; a linear model, p coefficients."""
    X = [np.column_stack([np.ones(n), rng.normal(size=(n, p - 1))]) for n in rows]
    y = [np.sqrt(v) * rng.normal(size=n) for v, n in zip(variances, rows, strict=True)]
    all_X, all_y = np.vstack(X), np.concatenate(y)
    beta = np.linalg.lstsq(all_X, all_y)[0]
    phi = ((all_y - all_X @ beta) ** 2).sum() / (len(all_y) - p)
    scores = np.array([x.T @ (z - x @ beta) for x, z in zip(X, y, strict=True)])
    informations = np.array([x.T @ x for x in X])
    parts = []
    for x, z, score, information in zip(X, y, scores, informations, strict=True):
        own = ((z - x @ np.linalg.lstsq(x, z)[0]) ** 2).sum() / (len(z) - p)
        parts.append(SiteWelchTerms(score / own, information / own, len(z) - p))
    one = SiteScores.of(scores, informations, phi, [str(j) for j in range(p)]).joint_test()
    return welch_test(parts).pvalue, one.pvalue


def size(rows, runs=2000, seed=0, **how):
    """Share of p-values below .05: own dispersions, one dispersion."""
    rng = np.random.default_rng([seed, *rows])
    return np.mean([np.array(both_tests(rng, rows, **how)) < 0.05 for _ in range(runs)], axis=0)


if __name__ == "__main__":
    print("rows at sites       own dispersions   one dispersion")
    for rows in ROWS:
        print(f"{rows!s:20}" + "{:12.3f}{:17.3f}".format(*size(rows)))
    print("equal variances   " + "{:14.3f}{:17.3f}".format(*size((40, 100, 400), variances=(1.0, 1.0, 1.0))))
