"""Intervals of split conformal prediction: their width, coverage by pattern, and what a site releases."""

import numpy as np
import pandas as pd
import pytest
from conformal_simulation import ALPHA, covered, partition, tables

import fedstat as fs
from fedstat.errors import DescriptionError, ModelError
from fedstat.federation.disclosure.policy import Policy
from fedstat.inference.conformal import count_residuals, residual_limits, threshold_bins

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning")
FORMULA = "y ~ a + b + c + d"


@pytest.fixture(scope="module")
def fit():
    return fs.VFEMRegression.from_formula(FORMULA, partition(1, 900)).fit()


@pytest.mark.parametrize("groups", [1, 3])
def test_half_the_width_is_an_order_statistic_of_the_residuals(fit, groups):
    calibration = partition(2, 600, policy=Policy(min_count=1))
    y = tables(2, 600)[1]
    found = fit.predict_set(calibration, calibration, ALPHA, groups=groups)
    has = calibration.presence()[["B", "C"]].to_numpy(dtype=bool) @ [1, 2]
    for s in range(4):
        mean, of = found["mean"][has == s], y.loc[found.index][has == s]
        code = np.searchsorted(np.quantile(mean, np.arange(1, groups) / groups), mean)
        for g in range(groups):
            residuals = np.sort(np.abs(of - mean)[code == g])
            kth = residuals[int(np.ceil((len(residuals) + 1) * (1.0 - ALPHA))) - 1]
            half = ((found["high"] - found["low"]) / 2.0)[has == s][code == g]
            # A bin has a width of 2 %.
            assert (half >= kth * (1 - 1e-9)).all() and (half <= kth * np.exp(0.021)).all()


def test_coverage_by_pattern_where_variances_differ():
    runs = pd.concat(
        [covered(seed, groups=groups).assign(g=groups) for seed in range(6) for groups in (1, 5)]
    )
    for of, rows in runs[runs["g"] == 1].groupby("set"):
        # Binomial errors of calibration and new entities; merged bins cover up to 5 entities more.
        n = 6 * 2_000 * len(rows) / len(runs[runs["g"] == 1])
        error = 3.0 * np.sqrt(ALPHA * (1 - ALPHA) * (1 / n + 1 / len(rows)))
        assert 1 - ALPHA - error < rows["conformal"].mean() < 1 - ALPHA + error + 5 * 6 / n, of
    top = runs[runs["top"]].groupby("g")[["conformal", "normal"]].mean()
    assert top.loc[1, "normal"] < 0.8 and top.loc[5, "conformal"] > 0.87


@pytest.mark.slow
def test_coverage_with_300_samples():
    runs = pd.concat([covered(seed, groups=5).assign(seed=seed) for seed in range(300)])
    of = runs.groupby("set")["conformal"].mean()
    assert of.between(0.90, 0.96).all()
    assert runs.loc[runs["top"], "conformal"].mean() > 0.88


def test_a_group_excludes_something_from_the_first_n_that_allows_the_level():
    for n, finite in ((18, False), (19, True)):
        counts = count_residuals(np.linspace(0.1, 2.0, n), np.zeros(n, dtype=np.int64), 1, 1)
        assert np.isfinite(residual_limits(threshold_bins(counts, 0.05)))[0] == finite


@pytest.mark.parametrize(("n", "calibrated"), [(7, False), (8, False), (9, True)])
def test_sets_with_few_entities_have_infinite_intervals_and_are_named(fit, n, calibrated):
    """Nine are needed at .90."""
    frames = tables(3, 400)[0]
    both = np.isin(frames["A"]["id"], frames["B"]["id"]) & np.isin(frames["A"]["id"], frames["C"]["id"])
    others = np.isin(frames["A"]["id"], frames["B"]["id"]) & ~both
    keep = pd.concat([frames["A"][both].head(n), frames["A"][others]])
    calibration = fs.ClientPartition.from_frames(
        {"A": keep, **{k: frames[k][frames[k]["id"].isin(keep["id"])] for k in "BC"}}, on="id", min_count=3
    )
    found = fit.predict_set(partition(4, 300), calibration, 0.1)
    note = found.attrs.get("note", "")
    assert ("A + B + C" in note) == (not calibrated) and "at least 9" in note
    assert "A + C" in note  # none of this set calibrates


@pytest.mark.parametrize(("minimum", "counted"), [(60, True), (61, False)])
def test_a_site_counts_no_group_below_its_minimum(minimum, counted):
    residuals, code = np.linspace(0.1, 2.0, 160), np.repeat([0, 1], [60, 100])
    counts = count_residuals(residuals, code, 2, minimum)
    assert counts.sum(axis=1).tolist() == [60 * counted, 100]
    assert ((counts == 0) | (counts >= minimum)).all()


def test_a_site_that_evaluates_once_does_not_count_residuals(fit):
    calibration = partition(2, 600, policy=Policy(evaluation="once"))
    with pytest.raises(DescriptionError, match=r'count residuals.*evaluation = "any"'):
        fit.predict_set(partition(4, 300), calibration)


def test_bad_arguments_are_named(fit):
    new = partition(4, 300)
    for wrong, message in (
        ({"calibration": fit._model.partition}, "partition of the fit"),
        ({"calibration": new, "alpha": 1.0}, "alpha"),
        ({"calibration": new, "groups": 0}, "groups"),
        (
            {"calibration": new, "groups": 90},
            "4 sets of sites with 90 ranges each are more groups than the 300",
        ),
        (
            {"calibration": fs.ClientPartition.from_frames({"B": tables(4, 300)[0]["B"]}, on="id")},
            "lacks site A",
        ),
    ):
        with pytest.raises(ModelError, match=message):
            fit.predict_set(new, **wrong)


def test_a_saved_fit_predicts_the_same_intervals(fit, tmp_path):
    fit.save(tmp_path / "fit")
    new, calibration = partition(4, 300), partition(2, 600)
    again = fs.load(tmp_path / "fit")
    pd.testing.assert_frame_equal(again.predict_set(new, calibration), fit.predict_set(new, calibration))
