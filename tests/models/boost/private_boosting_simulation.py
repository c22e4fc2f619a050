"""R-squared of private boosting by epsilon and number of entities, and of other ways to spend a budget.

    python tests/models/boost/private_boosting_simulation.py tests/benchmarks/results/boost_private.csv

One line of the file for each design, number of entities, epsilon, seed and method; lines that are there are
not computed again. Twenty curves of `columns` scores each at two institutions, the response of a third; four
of the curves have an effect. Columns have mean 0 and variance 1, as public descriptions make them. Methods:

* release: the noise of fedstat's release, on all products
* two shares: the noise that the square root of 2 times the sum of R_k^2 asks for, in each share
* label: noise on products with the response alone; nothing of x is protected
* steps: fresh noise on the residuals in each of fifty steps, the same budget in all; x is not protected
* none: no noise
"""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd

from fedstat.models.boost.private.protocol import NoisySums, run_noisy_path
from fedstat.models.boost.private.steps import radius_with, response_weight
from fedstat.models.copula.request import squared_radius
from fedstat.privacy.sensitivity import moments_sensitivity
from fedstat.privacy.zcdp import rho_of_budget

DESIGNS = {
    "2 scores": (2, 2, np.array([1.0, 0.4])),
    "4 scores": (4, 3, np.array([1.0, 0.5, 0.25, 0.12])),
    "20 coefficients": (20, 2, np.ones(20)),
}
CURVES, ACTIVE, TEST, DELTA = 20, (0, 1, 10, 11), 2000, 1e-6
EPSILONS = (0.5, 1.0, 3.0, 10.0)
STEPS, NU, NOISY_STEPS = 80, 0.2, 50
CLIP = 1.5  # of a response of standardized scores, by the root of their number


def draw(design, n, random):
    """Columns (n + TEST, d) and response (n + TEST, r), standardized over the first n."""
    q, r, variances = DESIGNS[design]
    Z = random.normal(size=(n + TEST, CURVES, q)) * np.sqrt(variances)
    B = np.zeros((CURVES, q, r))
    for p in ACTIVE:
        B[p] = random.normal(size=(q, r)) * np.array([1.0, 0.6, 0.4])[:r]
    signal = np.einsum("npq,pqr->nr", Z, B)
    Y = signal + random.normal(size=signal.shape) * signal.std(axis=0) * 0.5
    X = Z.reshape(n + TEST, -1)
    return tuple((A - A[:n].mean(axis=0)) / A[:n].std(axis=0) for A in (X, Y))


def cut(A, squared):
    lengths = np.linalg.norm(A, axis=1)
    return A * np.minimum(1.0, np.sqrt(float(squared)) / np.maximum(lengths, 1e-300))[:, None]


def sums_of(X, Y, q, sd, of_response):
    starts = tuple(range(0, X.shape[1] + 1, q))
    P = len(starts) - 1
    owners = (0,) * (P // 2) + (1,) * (P - P // 2)
    yy = float((Y * Y).sum())
    return NoisySums(len(X), X.T @ X, X.T @ Y, yy, sd, np.full(P, of_response), starts, owners)


def of_release(X, Y, q, rho, random, shares):
    """Coefficients from one noisy release; with `shares` by the looser of the two sensitivities."""
    d, r = X.shape[1], Y.shape[1]
    weight, half = response_weight(d, r), d // 2
    radii = [squared_radius(half), squared_radius(d - half), radius_with(0, d, r)]
    if shares:
        variance = float(2 * sum(radii, Fraction(0)) ** 2 / (2 * rho))
    else:
        found = moments_sensitivity(radii)
        variance = float(max(found.coordinator, *found.sites) / (2 * rho))
    sd = np.sqrt(variance)
    cut_x = np.hstack([cut(X[:, :half], radii[0]), cut(X[:, half:], radii[1])])
    exact = sums_of(cut_x, cut(weight * Y, radii[2]) / weight, q, sd, np.sqrt(2.0) * sd / weight)
    E = np.triu(random.normal(size=(d, d))) * sd
    first = np.arange(d) < half
    E = (E + np.triu(E, 1).T) * np.where(first[:, None] == first, 1.0, np.sqrt(2.0))
    T = exact.T + random.normal(size=exact.T.shape) * np.sqrt(2.0) * sd / weight
    noisy = NoisySums(exact.n, exact.S + E, T, exact.yy, sd, exact.sd_response, exact.starts, exact.owners)
    return run_noisy_path(noisy, STEPS, NU).coef


def of_labels(X, Y, q, rho, random):
    d, r = X.shape[1], Y.shape[1]
    most_x, most_y = np.sqrt(2.0 * float(squared_radius(d // 2))), CLIP * np.sqrt(r)
    sd = np.sqrt(2.0) * 2.0 * most_y * most_x / np.sqrt(2.0 * float(rho))
    exact = sums_of(X, Y, q, 0.0, sd)
    T = cut(X, most_x**2).T @ cut(Y, most_y**2) + random.normal(size=exact.T.shape) * sd
    return run_noisy_path(
        NoisySums(exact.n, exact.S, T, exact.yy, 0.0, exact.sd_response, exact.starts, exact.owners),
        STEPS,
        NU,
    ).coef


def of_steps(X, Y, q, rho, random):
    """The shape of the published mechanism, with a public clip and the same budget over all steps."""
    d, r = X.shape[1], Y.shape[1]
    sd = 2.0 * CLIP * np.sqrt(r) * np.sqrt(NOISY_STEPS) / np.sqrt(2.0 * float(rho))
    blocks = [slice(a, a + q) for a in range(0, d, q)]
    inverses = [np.linalg.inv(X[:, b].T @ X[:, b]) for b in blocks]
    coef, left = np.zeros((d, r)), Y.copy()
    for _ in range(NOISY_STEPS):
        score = X.T @ (cut(left, CLIP**2 * r) + random.normal(size=Y.shape) * sd)
        fits = [inverse @ score[b] for b, inverse in zip(blocks, inverses, strict=True)]
        p = int(np.argmax([(score[b] * fit).sum() for b, fit in zip(blocks, fits, strict=True)]))
        coef[blocks[p]] += NU * fits[p]
        left -= NU * X[:, blocks[p]] @ fits[p]
    return coef


def of_none(X, Y, q):
    exact = sums_of(X, Y, q, 0.0, 0.0)
    return run_noisy_path(exact, 300, NU).coef


def simulate(design, n, seed):
    """R-squared on other entities by method and epsilon."""
    random = np.random.default_rng([seed, n, sum(map(ord, design))])
    X, Y = draw(design, n, random)
    q = DESIGNS[design][0]
    X, X_test, Y, Y_test = X[:n], X[n:], Y[:n], Y[n:]

    def rsquared(coef):
        return 1.0 - ((Y_test - X_test @ coef) ** 2).sum() / (Y_test**2).sum()

    yield "none", np.inf, rsquared(of_none(X, Y, q))
    for epsilon in EPSILONS:
        rho = rho_of_budget(epsilon, DELTA)
        yield "release", epsilon, rsquared(of_release(X, Y, q, rho, random, shares=False))
        yield "two shares", epsilon, rsquared(of_release(X, Y, q, rho, random, shares=True))
        yield "label", epsilon, rsquared(of_labels(X, Y, q, rho, random))
        yield "steps", epsilon, rsquared(of_steps(X, Y, q, rho, random))


def main(path, seeds=5):
    names = ["design", "n", "seed", "method", "epsilon", "rsquared"]
    if not path.exists():
        path.write_text(",".join(names) + "\n")
    done = set(map(tuple, pd.read_csv(path)[["design", "n", "seed"]].itertuples(index=False)))
    for n in (5_000, 50_000):
        for design in DESIGNS:
            for seed in range(seeds):
                if (design, n, seed) in done:
                    continue
                lines = [
                    f"{design},{n},{seed},{method},{epsilon},{value:.4f}\n"
                    for method, epsilon, value in simulate(design, n, seed)
                ]
                with path.open("a") as file:
                    file.writelines(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
