"""Refits, selection frequencies and tests of entry, against pooled fits where there is one."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from band_simulation import ACTIVE, study
from curve_cases import by_site, simulated
from statsmodels.multivariate.manova import MANOVA

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError
from fedstat.models.boost.learning.selection import false_selections

FRAME = simulated(1200)


def fitted(text, frame=FRAME, **settings):
    settings = {"steps": 60, "folds": 10, "seed": 1, **settings}
    model = fs.FedFunctionBoost.from_formula(
        text, by_site(frame, "x1", "x2", "y"), time="bbs(t, knots=1, df=3)"
    )
    return model.fit(**settings)


@pytest.fixture(scope="module")
def result():
    return fitted("y(t) ~ bsignal(x1, knots=4) + bsignal(x2, knots=4) + bols(g)")


def test_linear_effects_on_a_number_are_those_of_least_squares():
    refit = fitted("mean ~ age + g").refit(["age", "g"])
    ols = smf.ols("mean ~ age + g", FRAME).fit()
    age, g = refit.surface("age"), refit.surface("g")
    np.testing.assert_allclose(age["estimate"], ols.params["age"], rtol=1e-5)
    np.testing.assert_allclose(age["se"], ols.bse["age"], rtol=1e-6)
    np.testing.assert_allclose(g["se"], ols.bse[["g[T.b]", "g[T.c]"]], rtol=1e-6)
    np.testing.assert_allclose(age[["lower", "upper"]].to_numpy()[0], ols.conf_int().loc["age"], rtol=1e-2)
    known = ols.f_test("g[T.b] = g[T.c] = 0")
    assert refit.tests.loc["bols(g)", "F"] == pytest.approx(float(known.fvalue), rel=1e-6)
    assert refit.tests.loc["bols(g)", "df_resid"] == known.df_denom


def test_effects_on_a_curve_are_tested_as_by_a_manova_of_its_coefficients(result):
    refit = fitted("y(t) ~ age + g").refit(["age", "g"])
    basis = refit._held.boosting.basis
    C = pd.DataFrame(FRAME.filter(regex="^y_").to_numpy() @ basis).add_prefix("c")
    left = " + ".join(C.columns)
    known = MANOVA.from_formula(f"{left} ~ age + g", C.join(FRAME[["age", "g"]])).mv_test()
    for name in ("age", "g"):
        wilks = known.results[name]["stat"].loc["Wilks' lambda"]
        found = refit.tests.loc[f"bols({name})"]
        assert found["F"] == pytest.approx(float(wilks["F Value"]), rel=1e-6)
        assert found["df"] == wilks["Num DF"] and found["df_resid"] == pytest.approx(wilks["Den DF"])


def test_a_refit_is_less_shrunken_and_says_what_it_is_conditional_on(result):
    refit = result.refit()
    boosted, again = result.surface("x1"), refit.surface("x1")
    assert again["estimate"].abs().mean() > boosted["estimate"].abs().mean()
    inside = again["band_lower"] <= again["lower"]
    assert inside.all() and (again["lower"] < again["estimate"]).all()
    assert "conditional on the learners" in str(refit.summary())
    assert "one half of the folds" in str(result.split().summary())
    with pytest.raises(ModelError, match="received 'x2'"):
        result.refit(["g"]).surface("x2")
    assert refit.plot("g").has_data()


def test_halves_select_and_estimate_on_different_rows(result):
    boosting = result._record.boosting
    split = result.split(seed=3)
    assert split._fitted.rows < 0.6 * boosting.moments.total.n
    other = result.split(seed=4)
    assert not np.allclose(split.surface("g")["estimate"], other.surface("g")["estimate"])


def test_stable_learners_are_those_with_an_effect(result):
    found, bound = result.stability(2)
    assert found["bsignal(x1)"] == 1.0 and found["bsignal(x2)"] < 0.75
    assert bound == false_selections(2, 3, 0.75, 50)
    with pytest.raises(NotAvailableError, match="folds"):
        fitted("y(t) ~ x1", folds=1).stability(1)


def test_the_bound_is_that_of_shah_and_samworth():
    # q^2 / p = 0.9, over 2 (2 * 0.75 - 1 - 0.01), and times 4 (1 - 0.9 + 0.01) / 1.02
    assert false_selections(6, 40, 0.75, 50) == pytest.approx(0.9 / 0.98)
    assert false_selections(6, 40, 0.9, 50) == pytest.approx(0.9 * 0.44 / 1.02)


def test_entry_finds_effects_and_none_in_noise(result):
    assert result.entry_test().loc[["bsignal(x1)", "bols(g)"], "p_value"].max() < 0.01
    assert result.entry_test().loc["bsignal(x2)", "p_value"] > 0.05
    random, smallest = np.random.default_rng(8), []
    for _ in range(20):
        noise = FRAME[:240].assign(mean=random.standard_t(5, size=240))
        test = fitted("mean ~ bsignal(x1, knots=4) + age + g", noise, steps=1, folds=1).entry_test(draws=199)
        smallest.append(test["p_value"].min())
    assert np.mean(np.array(smallest) <= 0.05) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 20)
    assert np.mean(np.array(smallest) <= 0.5) > 0.25


def test_statements_of_results_read_from_a_file_are_the_same(result, tmp_path):
    result.save(tmp_path / "boost.fed")
    again = fs.load(tmp_path / "boost.fed")
    pd.testing.assert_frame_equal(again.refit().surface("x1"), result.refit().surface("x1"))
    pd.testing.assert_frame_equal(again.entry_test(), result.entry_test())


@pytest.mark.slow
def test_intervals_and_bands_cover_and_tests_keep_their_size():
    found = study(500, range(200))
    active, null = found[:, :ACTIVE].mean(axis=(0, 1)), found[:, ACTIVE:].mean(axis=(0, 1))
    assert 0.93 < active[0] < 0.985 and 0.93 < null[0] < 0.985
    assert active[1] > 0.93 and null[1] > 0.93
    assert null[2] < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)


def test_a_number_is_predicted_with_the_intervals_of_least_squares():
    result, ols = fitted("mean ~ age + g", steps=300), smf.ols("mean ~ age + g", FRAME).fit()
    found = result.get_prediction(FRAME[:50]).summary_frame(0.1)
    known = ols.get_prediction(FRAME[:50]).summary_frame(alpha=0.1)
    assert list(found) == list(known)
    np.testing.assert_allclose(found, known, rtol=1e-4)
    assert "conditional on the learners that boosting selected" in found.attrs["conditions"]
    with pytest.raises(ModelError, match="expected alpha between 0 and 1"):
        result.get_prediction(FRAME).summary_frame(95)


def test_intervals_of_a_curve_hold_new_curves():
    random = np.random.default_rng(6)
    train, new = simulated(600, seed=11), simulated(400, seed=12)
    t = np.linspace(0, 1, 12)
    for frame in (train, new):  # errors that are correlated along the curve, and larger at its end
        errors = np.outer(random.normal(size=len(frame)), 1.0 + 2.0 * t)
        frame[[f"y_{j}" for j in range(12)]] += errors + 0.3 * random.normal(size=(len(frame), 12))
    result = fitted("y(t) ~ bsignal(x1, knots=4) + bols(g)", train)
    found = result.get_prediction(new.set_index(new.index + 1000)).summary_frame(0.1)
    assert found.index.names == ["row", "t"] and found.index[13] == (1001, pytest.approx(t[1]))
    y = new.filter(regex="^y_").to_numpy().ravel()
    inside = ((found["obs_ci_lower"] < y) & (y < found["obs_ci_upper"])).to_numpy().reshape(-1, 12)
    # Curves are alike within themselves, so that the share of points that hold varies by curve.
    error = inside.mean(axis=1).std() / np.sqrt(len(inside))
    assert abs(inside.mean() - 0.9) < 3.5 * error
    assert np.ptp(inside.mean(axis=0)) < 0.08
    short = (found["mean_ci_upper"] - found["mean_ci_lower"]).mean()
    assert short < 0.5 * (found["obs_ci_upper"] - found["obs_ci_lower"]).mean()


def test_rows_that_lack_something_are_predicted_as_missing(result):
    frame = FRAME[:4].copy()
    frame.loc[1, "g"] = None
    found = result.get_prediction(frame).summary_frame()["mean"].isna().to_numpy().reshape(4, 12)
    assert found[1].all() and not found[[0, 2, 3]].any()
