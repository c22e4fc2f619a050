"""Releases that are drawn again, tables from them, and a rehearsal on synthetic rows."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf

import fedstat as fs
from fedstat.errors import DataWarning, ModelError
from fedstat.models.copula import correlation
from fedstat.models.copula.results import redraw

N = 2_000
BOUNDS = fs.Bounds({"x": (-4, 4), "u": (-4, 4), "b": [0, 1], "y": (-8, 8)})
FRAME_COLUMNS = {"A": ["x", "b"], "B": ["u"], "C": ["y"]}


def rows(n=N, seed=0):
    rng = np.random.default_rng(seed)
    x, u = rng.standard_normal((2, n))
    b = (rng.standard_normal(n) + 0.5 * x > 0).astype(int)
    return pd.DataFrame({"x": x, "u": u, "b": b, "y": x + 0.5 * u + rng.standard_normal(n)})


def partition_of(frame, **options):
    policy = fs.Policy(privacy=fs.Budget(10.0, 1e-6))
    return fs.ClientPartition.from_frame(frame, columns=FRAME_COLUMNS, policy=policy, **options)


@pytest.fixture(scope="module")
def fit():
    """A release; for it and all redraws 2^14 simulated rows correct for the clipping of rows.

    Every inversion uses the same simulated rows, so that they do not add to the spread.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(correlation, "MOST_DRAWS", correlation.FEWEST_DRAWS)
        yield fs.CopulaSynthesizer(partition_of(rows()), 6.0, BOUNDS).fit()


@pytest.fixture(scope="module")
def redrawn(fit):
    rng = np.random.default_rng(1)
    return [redraw(fit._fit, rng) for _ in range(40)]


def test_redrawn_correlations_spread_as_sampling_and_noise_do(fit, redrawn):
    drawn = np.array([joint.inversion.correlation for joint in redrawn])
    i, j = fit.columns.index("x"), fit.columns.index("u")
    # Near zero a correlation of continuous columns has the variance 1 / n, and its noise to first order.
    expected = np.hypot(1.0 / np.sqrt(N), fit.noise.loc["x", "u"])
    assert drawn[:, i, j].std() == pytest.approx(expected, rel=4.0 / np.sqrt(2 * 40))
    assert drawn[:, i, j].mean() == pytest.approx(
        fit.correlation.loc["x", "u"], abs=4 * expected / np.sqrt(40)
    )


def test_noise_is_in_the_spread(fit, redrawn):
    """With all noise left out the spread of a margin is that of sampling alone."""
    b = fit.columns.index("b")
    shares = [joint.margins[b].probabilities[1] for joint in redrawn]
    p = fit._fit.margins[b].probabilities[1]
    deviation = np.sqrt(fit._fit.plan.margins_requested("A").of_levels / 2) / N
    expected = np.hypot(np.sqrt(p * (1 - p) / N), deviation)
    assert np.std(shares) == pytest.approx(expected, rel=4.0 / np.sqrt(2 * 40))


def test_tables_are_combined(fit):
    tables = fit.sample_tables(20, N, seed=3)
    combined = fs.combine([smf.ols("y ~ x + u", table).fit() for table in tables])
    own = smf.ols("y ~ x + u", rows()).fit()
    assert (combined.bse > 0.8 * own.bse).all()
    assert (abs(combined.params - own.params) < 4 * np.hypot(combined.bse, own.bse)).all()
    assert tables[0].equals(fit.sample_tables(2, N, seed=3)[0])
    with pytest.raises(ModelError, match="tables"):
        fit.sample_tables(1, N)


def test_a_script_runs_on_a_rehearsal():
    frame = rows().rename_axis("id").reset_index()
    frames = {"A": frame[["id", "x", "b"]], "B": frame[["id", "u"]].iloc[::2], "C": frame[["id", "y"]]}
    policy = fs.Policy(privacy=fs.Budget(10.0, 1e-6))
    real = fs.ClientPartition.from_frames(frames, on="id", policy=policy)
    with pytest.warns(DataWarning, match="rows are synthetic, from one release with epsilon 6"):
        dry_run = fs.rehearse(real, 6.0, BOUNDS, seed=4)
    assert dry_run.columns == real.columns and dry_run.key == real.key
    assert all((dry_run.rows[site] == real.rows[site]).all() for site in frames)
    fit = fs.VFEMRegression.from_formula("y ~ x + b + u", dry_run).fit()
    assert fit.params["x"] == pytest.approx(1.0, abs=0.25)
    assert {"A", "B"} <= set(fit.receipt().released["about"])
