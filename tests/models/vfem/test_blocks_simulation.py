"""Intervals where blocks of different clients correlate; ``blocks_simulation.py`` says what is drawn."""

import numpy as np
import pytest
from blocks_simulation import DESIGNS, RUNS, draw, simulate
from scipy import linalg, stats

LOW, HIGH = 0.935, 0.965


@pytest.mark.parametrize("rho", [0.1, 0.7])
def test_every_two_blocks_have_the_canonical_correlation(rho):
    design = DESIGNS["four"]
    C, owner = design.correlations(rho), np.array(design.owner)
    roots = [linalg.inv(linalg.cholesky(C[np.ix_(owner == k, owner == k)], lower=True)) for k in range(4)]
    for j in range(4):
        for k in range(j):
            between = C[np.ix_(owner == j, owner == k)]
            values = linalg.svdvals(roots[j] @ between @ roots[k].T)
            np.testing.assert_allclose(values, [rho, 0.0], atol=1e-12)


@pytest.mark.parametrize("mechanism", ["mcar", "mar on y", "mar on A"])
def test_records_are_missing_as_said(mechanism):
    X, y = draw(DESIGNS["large"], mechanism, 0.4, run=0)
    gone = np.isnan(X)
    np.testing.assert_allclose(gone[:, :6:2].mean(axis=0), [0.2, 0.4, 0.6], atol=0.02)
    assert gone[:, 6:].all(axis=1).mean() == pytest.approx(0.802, abs=0.02)
    assert (gone[:, 6] != gone[:, 7]).mean() == pytest.approx(0.2 * 0.18, abs=0.01)
    seen = ~gone[:, 0]
    by_y = stats.pearsonr(gone[:, 4], y).statistic
    by_a = stats.pearsonr(gone[seen, 4], X[seen, 0]).statistic
    if mechanism == "mcar":
        assert max(abs(by_y), abs(by_a)) < 0.04
    else:
        assert (by_y if mechanism == "mar on y" else by_a) < -0.3


def ratios(table):
    """Bias in standard errors, and the simulation's error of a coverage of .95."""
    return (table["bias"] / table["mean_se"]).abs(), np.sqrt(0.95 * 0.05 / table["runs"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "four", "large"])
def test_the_free_model_covers(name):
    table = simulate(name, "free", RUNS[name]["free"])
    bias, error = ratios(table)
    assert table.groupby(["mechanism", "correlation"])["coverage"].mean().between(LOW, HIGH).all()
    assert (table["coverage"] + 3.0 * error >= LOW).all() and (table["coverage"] - 3.0 * error <= HIGH).all()
    # Maximum likelihood in small samples: D lacks four entities in five of 2,000.
    assert bias.max() < {"two": 0.1, "four": 0.25, "large": 0.12}[name]
    assert (table["mean_se"] / table["sd"]).between(0.92, 1.06).all()


@pytest.mark.slow
def test_all_intervals_cover_without_the_bias_of_a_small_sample():
    table = simulate("four", "small sample", RUNS["four"]["small sample"])
    bias, error = ratios(table)
    assert (table["coverage"] + 2.0 * error >= LOW).all() and (table["coverage"] - 2.0 * error <= HIGH).all()
    assert bias.max() < 0.1 + 2.0 / np.sqrt(1_000)
    # A standard deviation from 1,000 runs has an error of 2.2 %.
    assert (table["mean_se"] / table["sd"] - 1.0).abs().max() < 0.05 + 2.0 / np.sqrt(2_000)


@pytest.mark.slow
def test_independent_blocks_and_mean_imputation_do_not():
    for method in ("independent", "mean imputation"):
        table = simulate("two", method, RUNS["two"][method])
        of_a = table[table["coefficient"] == "A1"].set_index("correlation")
        assert of_a.loc[0.0, "coverage"] > LOW - 3.0 * np.sqrt(0.05 * 0.95 / 500)
        assert of_a.loc[0.4, "coverage"] < 0.05
