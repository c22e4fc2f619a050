"""Corrections of the normal law: of small samples, and of skewed columns."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from blocks_simulation import DESIGNS, Design
from blocks_simulation import draw as draw_normal
from scipy import integrate, stats
from skewed_simulation import draw, normal_law, reported, shapes

import fedstat as fs
from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.models.vertical.joint_normal import corrections
from fedstat.models.vertical.joint_normal.corrections import (
    bias_corrected,
    correlation_of_scores,
    draw_patterns,
    first_order_bias,
    fit_pattern_probabilities,
    log_sd_of,
    signed_squares_of,
    simulated_covariance,
    skewed_columns,
    skewness_of,
    without_skewness,
)
from fedstat.models.vertical.joint_normal.fit import estimates_covariance

TWO = DESIGNS["two"]


def study(margin="log-normal", run=0, **options):
    """Fit to one data set of two columns; the response determines who has the second one."""
    return fs.VFEMRegression.from_formula("y ~ a + b", partition_of(*draw(TWO, margin, run))).fit(**options)


def partition_of(X, y, **options):
    table = pd.DataFrame({"id": range(len(y)), "y": y, "a": X[:, 0], "b": X[:, 1]})
    frames = {"Registry": table[["id", "y"]], "Bank": table[["id", "a"]], "Shop": table[["id", "b"]].dropna()}
    return fs.ClientPartition.from_frames(frames, on="id", **options)


# ---- small samples ---------------------------------------------------------------------------


def test_with_nothing_missing_the_small_sample_is_that_of_least_squares():
    random = np.random.default_rng(0)
    X = random.normal(size=(40, 2))
    y = 1.0 + X @ [1.0, -1.0] + random.normal(size=40)
    result = fs.VFEMRegression.from_formula("y ~ a + b", partition_of(X, y)).fit(correction="small-sample")
    least_squares = sm.OLS(y, sm.add_constant(X)).fit()
    np.testing.assert_allclose(result.params, least_squares.params, rtol=1e-8)
    np.testing.assert_allclose(result.bse, least_squares.bse, rtol=1e-8)
    np.testing.assert_allclose(result.scale, least_squares.scale, rtol=1e-8)


@pytest.mark.slow
def test_the_bias_is_that_of_many_small_samples():
    # Two columns in three patterns, with so few entities that the bias exceeds the simulation error.
    design = Design((0, 1), (1.0, 1.0, 1.0), (0.4, 0.6), 0.0, n=120)
    off, said = [], []
    for run in range(400):
        X, y = draw_normal(design, "mcar", 0.7, run)
        fit = normal_law(X, y)
        off.append([*fit.params[1:], np.log(fit.s2)])
        corrected = bias_corrected(fit)
        said.append([*(fit.params - corrected.params)[1:], np.log(fit.s2 / corrected.s2)])
    off, said = np.array(off) - [1.0, 1.0, 0.0], np.array(said)
    noise = off.std(axis=0) / np.sqrt(len(off))
    assert (np.abs(off.mean(axis=0)) > 3.0 * noise).any()
    assert (np.abs(off.mean(axis=0) - said.mean(axis=0)) < 3.0 * noise).all()


def test_edges_that_are_missing_keep_the_bias_of_complete_columns_at_zero():
    # Columns that everybody has do not care which of their covariances are free.
    random = np.random.default_rng(1)
    X = random.normal(size=(60, 2))
    y = X.sum(axis=1) + random.normal(size=60)
    fit = normal_law(X, y)
    moves = replace(fit.moves, edges=np.eye(2, dtype=bool))
    apart = replace(fit, model=replace(fit.model, moves=moves))
    free, _ = first_order_bias(fit)
    np.testing.assert_allclose(free[2:4], 0.0, atol=1e-10)
    assert np.isfinite(first_order_bias(apart)[0]).all()


def test_a_small_sample_is_reported_and_a_large_one_is_not():
    few = Design((0, 1), (1.0, 1.0, 1.0), (0.4, 0.8), 0.0, n=150)
    said = [
        "bias of order 1/n" in " ".join(fit_summary(draw_normal(design, "mcar", 0.7, 3)))
        for design in (few, TWO)
    ]
    assert said == [True, False]


def fit_summary(data):
    return fs.VFEMRegression.from_formula("y ~ a + b", partition_of(*data)).fit().notes


# ---- shapes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("s", [0.1, 0.75, 1.5])
def test_signed_squares_of_a_log_normal_column(s):
    column = stats.lognorm(s)
    mean, sd = column.mean(), column.std()

    def signed(z):
        x = (np.exp(s * z) - mean) / sd
        return x * abs(x) * stats.norm.pdf(z)

    parts = [
        integrate.quad(signed, *ends, epsabs=1e-12, limit=200)[0] for ends in ((-12, s / 2), (s / 2, 14))
    ]
    assert signed_squares_of(np.array(s)) == pytest.approx(sum(parts), abs=1e-8)
    back = np.array([sum(parts), -sum(parts), np.nan])
    np.testing.assert_allclose(log_sd_of(back), [s, -s, 0.0], atol=1e-3)
    assert skewness_of(back)[0] == pytest.approx(float(column.stats("s")), rel=1e-2)


def test_sites_reveal_the_shapes_of_their_columns_and_count_them():
    X, y = draw(TWO, "log-normal", 0)
    result = fs.VFEMRegression.from_formula("y ~ a + b", partition_of(X, y)).fit()
    np.testing.assert_allclose(result.exchange.moments.shape, shapes(X), rtol=1e-10)
    (was_reported,) = [one for one in result.ledger.entries if one.array == "units" and one.sender == "Shop"]
    assert was_reported.shape == (3, 1)
    assert result.exchange.numbers["Shop"] == 2 + 1 + 1 + 1  # b, b^2, b a, b y, and its shape


def test_products_of_columns_of_few_values_reveal_no_shape():
    random = np.random.default_rng(2)
    table = pd.DataFrame({"id": range(4_000), "a": random.normal(size=4_000)})
    table["f"], table["g"] = random.binomial(1, 0.2, (2, 4_000))  # balanced columns have no shape either
    table["y"] = table["a"] + table["f"] + random.normal(size=4_000)
    frames = {"Registry": table[["id", "y"]], "Bank": table[["id", "a"]], "Shop": table[["id", "f", "g"]]}
    for formula, known in (("y ~ a + f + g", True), ("y ~ a + f*g", False)):
        partition = fs.ClientPartition.from_frames(frames, on="id", policy=fs.Policy(discrete="bits"))
        shape = fs.VFEMRegression.from_formula(formula, partition).fit().exchange.moments.shape
        assert np.isfinite(shape[0])
        assert np.isfinite(shape[1:]).all() == known
        assert np.isfinite(shape[1:]).any() == known


def test_skewed_columns_are_named_where_the_response_decides():
    def named(margin, mechanism):
        X, y = draw(TWO, margin, 0)
        if mechanism == "mcar":
            full = draw_normal(TWO, "mcar", 0.4, 0)[0]
            X[:, 1] = np.where(np.isnan(full[:, 1]), np.nan, np.nan_to_num(X[:, 1]))
        return [note for note in fit_summary((X, y)) if note.startswith("Skewed columns")]

    (note,) = named("log-normal", "mar on y")
    assert "b (Shop)" in note and "a (Bank)" not in note and "correction='skewness'" in note
    assert not named("normal", "mar on y") and not named("t", "mar on y")


# ---- the sample ------------------------------------------------------------------------------


def test_columns_of_the_sample_have_the_moments_that_were_requested():
    random = np.random.default_rng(3)
    R = np.array([[1.0, 0.5, -0.3], [0.5, 1.0, 0.2], [-0.3, 0.2, 1.0]])
    log_sd = np.array([0.6, -0.4, 0.0])
    root = np.linalg.cholesky(correlation_of_scores(R, log_sd))
    X = skewed_columns(random.normal(size=(2_000_000, 3)) @ root.T, log_sd)
    np.testing.assert_allclose(np.cov(X.T), R, atol=0.01)
    expected = [stats.lognorm(0.6).stats("s"), -stats.lognorm(0.4).stats("s"), 0.0]
    np.testing.assert_allclose(stats.skew(X), expected, atol=0.06)


def test_chances_of_patterns_are_those_of_a_multinomial_logit():
    random = np.random.default_rng(4)
    causes = sm.add_constant(random.normal(size=(5_000, 2)))
    logs = np.array([[0.0, 0.0, 0.0], [0.3, 1.0, -0.5], [-1.0, -0.5, 0.2]]) @ causes.T
    code = draw_patterns(logs, random.random(5_000))
    share = np.array([causes[code == g].sum(axis=0) for g in range(3)]) / 5_000
    reference = int(np.bincount(code).argmax())
    relabeled = (code - reference) % 3
    expected = np.asarray(sm.MNLogit(relabeled, causes).fit(disp=0).params).T
    found = fit_pattern_probabilities(causes, share, np.zeros((3, 3)))
    np.testing.assert_allclose(found[[(reference + g) % 3 for g in (1, 2)]], expected, atol=1e-4)


# ---- skewed columns --------------------------------------------------------------------------


@pytest.mark.parametrize("margin", ["log-normal", "gamma", "sum"])
def test_under_skewed_columns_the_normal_law_is_off_and_the_corrected_one_is_not(margin):
    X, y = draw(replace(TWO, n=20_000), margin, 1)
    fit = normal_law(X, y)
    found = without_skewness(fit)
    normal, errors = reported(fit, estimates_covariance(fit))
    corrected, own = reported(found.reported, simulated_covariance(found))
    assert abs(normal[2] - 1.0) > 6.0 * errors[2]
    # "sum" is no such law, and gamma margins are nearly one.
    assert (np.abs(corrected - 1.0) < 3.0 * own).all()
    assert (own < 2.0 * errors).all()


def test_under_normal_columns_the_correction_changes_little():
    plain, corrected = (study("normal", correction=c) for c in (None, "skewness"))
    assert (np.abs(plain.params - corrected.params) < plain.bse).all()
    assert (corrected.bse / plain.bse).between(0.8, 1.5).all()


def test_an_incomplete_correction_is_printed_at_the_top(monkeypatch):
    """One round from the normal model is not enough for these columns."""
    monkeypatch.setattr(corrections, "MOST_ROUNDS", 1)
    monkeypatch.setattr(corrections, "FAR", 0.2)
    first = str(study(correction="skewness").summary()).split("=====")[0]
    assert "CORRECTION INCOMPLETE" in first and "standard errors" in first
    monkeypatch.undo()
    assert "CORRECTION INCOMPLETE" not in str(study(correction="skewness").summary())


def test_what_is_printed_and_saved_of_a_corrected_fit(tmp_path):
    result = study(correction="skewness")
    text = str(result.summary())
    assert "simulated" in text and "Corrected for skewness" in text and "Skewed columns" not in text
    result.save(tmp_path / "fit.json")
    assert "Corrected for skewness" in str(fs.load(tmp_path / "fit.json").summary())
    smaller = result.refit("y ~ . - a")
    assert smaller.correction == result.correction == "skewness"
    with pytest.raises(NotAvailableError, match="use wald_test"):
        result.compare_lr_test(smaller)
    with pytest.raises(NotAvailableError, match="use wald_test"):
        result.leave_one_out()
    small = study(correction="small-sample")
    assert 0.0 <= small.leave_one_out()["pvalue"].max() < 1e-6
    again = study(correction="skewness")
    np.testing.assert_array_equal(again.params, result.params)
    np.testing.assert_array_equal(again.bse, result.bse)


def test_single_cells_that_are_missing_have_no_correction_for_skewness():
    X, y = draw(TWO, "log-normal", 0)
    table = pd.DataFrame({"id": range(len(y)), "y": y, "a": X[:, 0], "b": X[:, 1]})
    frames = {"Registry": table[["id", "y"]], "Bank": table[["id", "a", "b"]]}
    model = fs.VFEMRegression.from_formula("y ~ a + b", fs.ClientPartition.from_frames(frames, on="id"))
    with pytest.raises(NotAvailableError, match="partial='drop'"):
        model.fit(correction="skewness")
    notes = " ".join(model.fit().notes)
    assert "% missing" in notes and "take logarithms" in notes and "correction='skewness'" not in notes


def test_corrections_are_of_the_free_model_from_moments():
    model = fs.VFEMRegression.from_formula("y ~ a + b", partition_of(*draw(TWO, "log-normal", 0)))
    with pytest.raises(ModelError, match="correction: expected one of 'small-sample', 'skewness'"):
        model.fit(correction="jackknife")
    with pytest.raises(ModelError, match="method='vfem' and exchange='moments'"):
        model.fit(correction="skewness", method="cc")
    blocks = fs.VFEMRegression.from_formula("y ~ a + b", model.partition, between="independent")
    with pytest.raises(ModelError, match="correction='skewness' requires between='free'"):
        blocks.fit(correction="skewness")
    with pytest.raises(ModelError, match="leave out cov_type='sem'"):
        model.fit(correction="skewness", cov_type="sem")
    with pytest.raises(EstimationError, match="shapes of columns"):
        without_skewness(unknown_shapes())


def unknown_shapes():
    fit = normal_law(*draw(TWO, "log-normal", 0))
    return replace(fit, model=replace(fit.model, moments=replace(fit.moments, shape=None)))
