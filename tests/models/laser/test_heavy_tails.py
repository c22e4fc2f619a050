"""Columns with heavy tails as inputs of networks: robust units, and asinh of these.

The gain, as areas under the ROC curve at test entities, is measured by::

    python tests/models/laser/test_heavy_tails.py
"""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats

import fedstat as fs
from fedstat.models.laser.steps import HEAVY, robust_units


def study(seed, n, tails, shift=0.0):
    """Three sites with three columns each, monotone functions of normal scores that cause the response."""
    rng = np.random.default_rng(seed)
    U = rng.normal(size=(n, 9)) @ np.linalg.cholesky(0.3 + 0.7 * np.eye(9)).T
    eta = U[:, 0] + 0.8 * U[:, 3] - 0.7 * U[:, 6] + 0.6 * U[:, 1] - 0.5 * U[:, 4]
    y = (rng.random(n) < 1.0 / (1.0 + np.exp(-eta))).astype(float)
    X = {"normal": U, "heavy": np.sinh(2.2 * U), "log-normal": np.exp(1.5 * U)}[tails] + shift
    frames = {}
    for k, site in enumerate("ABC"):
        frames[site] = pd.DataFrame(X[:, 3 * k : 3 * k + 3], columns=[f"{site}{j}" for j in range(3)])
        frames[site]["id"] = range(n)
    frames["A"]["y"] = y
    return frames


def partition(frames, rows=slice(None)):
    return fs.ClientPartition.from_frames({k: t.iloc[rows] for k, t in frames.items()}, on="id")


def area(result, frames, rows):
    y = frames["A"]["y"].to_numpy()[rows]
    ranks = stats.rankdata(result.predict_proba(partition(frames, rows)).iloc[:, -1])
    ones = y.sum()
    return (ranks[y == 1].sum() - ones * (ones + 1) / 2) / (ones * (len(y) - ones))


def test_robust_units_maximize_the_likelihood_of_a_t_distribution():
    x = 40.0 + 3.0 * np.random.default_rng(1).standard_t(1.2, size=3_000)
    ((location,), (scale,)) = robust_units(x[:, None])

    def loss(at):
        return -stats.t.logpdf(x, 3.0, at[0], np.exp(at[1])).sum()

    found = optimize.minimize(loss, [np.median(x), 1.0], method="Nelder-Mead", options={"xatol": 1e-9})
    np.testing.assert_allclose([location, scale], [found.x[0], np.exp(found.x[1])], rtol=1e-5)


def test_only_columns_with_heavy_tails_have_robust_units():
    n, rng = 2_000, np.random.default_rng(2)
    normal, rare = rng.normal(size=n), (rng.random(n) < 0.02) * 1.0
    mostly_zero = np.where(rng.random(n) < 0.9, 0.0, np.exp(5.0 * rng.normal(size=n)))
    X = np.column_stack([normal, rare, np.ones(n), mostly_zero, 1e9 + rng.standard_cauchy(size=n)])
    assert (robust_units(X)[1] > 0.0).tolist() == [False, False, False, False, True]
    # One value far away, at the limit: the standard deviation in robust units is just below and above it.
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = 0.5 * (low + high)
        one_far = np.append(normal, middle)[:, None]
        low, high = (low, middle) if robust_units(one_far)[1, 0] > 0.0 else (middle, high)
    far = np.append(normal, high)[:, None]
    assert far.std() / robust_units(far)[1, 0] == pytest.approx(HEAVY, rel=1e-6)


def test_predictions_use_the_units_of_the_fit():
    frames = study(1, 1_200, "heavy", shift=1e3)
    some = slice(0, 1_000)
    model = fs.LASER.from_formula("y ~ .", partition(frames, some), hidden=[6], width=4)
    result = model.fit(epochs=3, seed=2)
    fitted, new = result._record.fitted, slice(1_000, 1_200)
    outputs = []
    for site in "ABC":
        trained = fitted.trained
        assert trained.compressed[site].all()
        own = frames[site].drop(columns=["id", "y"], errors="ignore").to_numpy()
        np.testing.assert_allclose(
            robust_units(own[some]), [trained.shift[site], trained.scale[site]], rtol=1e-6
        )
        x = np.arcsinh((own[new] - trained.shift[site]) / trained.scale[site])
        theta = trained.networks[site][0]
        hidden = np.maximum(x @ theta[:18].reshape(6, 3).T + theta[18:24], 0.0)
        outputs.append(hidden @ theta[24:48].reshape(4, 6).T + theta[48:])
    head = fitted.trained.heads[0]
    score = np.mean(outputs, axis=0) @ head[:8].reshape(2, 4).T + head[8:]
    expected = np.exp(score) / np.exp(score).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(result.predict_proba(partition(frames, new)), expected, atol=1e-10)
    assert "A" in result.ledger.kinds_by_site()


def test_normal_columns_are_as_without_and_the_publication_has_standard_units():
    frames = study(3, 800, "normal")
    model = fs.LASER.from_formula("y ~ .", partition(frames), hidden=[4], width=2)
    plain, robust = (model.fit(epochs=2, seed=1, compress=c) for c in (False, None))
    for site in "ABC":
        np.testing.assert_array_equal(
            plain._record.fitted.trained.networks[site], robust._record.fitted.trained.networks[site]
        )
    heavy = fs.LASER.from_formula("y ~ .", partition(study(3, 800, "heavy")), hidden=[4], width=2)
    for options in ({"paper": True, "batch_size": 800}, {"standardize": False}):
        found = heavy.fit(epochs=1, seed=1, **options)._record.fitted.trained.compressed
        assert not any(columns.any() for columns in found.values())


def test_heavy_tails_cost_less():
    frames, learned, new = study(1, 4_000, "heavy"), slice(0, 3_000), slice(3_000, 4_000)
    model = fs.LASER.from_formula("y ~ .", partition(frames, learned))
    plain, robust = (area(model.fit(seed=1, compress=c), frames, new) for c in (False, True))
    assert robust > plain + 0.01


def main():
    for tails in ("normal", "log-normal", "heavy"):
        rows = []
        for seed in range(10):
            frames = study(seed, 6_000, tails)
            model = fs.LASER.from_formula("y ~ .", partition(frames, slice(0, 4_500)))
            fits = [model.fit(seed=seed, compress=c) for c in (False, True)]
            rows.append([area(fit, frames, slice(4_500, 6_000)) for fit in fits])
        standard, default = np.mean(rows, axis=0)
        print(f"{tails}: standard units {standard:.3f}, by default {default:.3f}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
