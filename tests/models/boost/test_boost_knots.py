"""Sums for twice as many knots: the same path, and a test of the knots."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from curve_cases import LOOSE, by_site, declared, simulated
from knots_simulation import study

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError
from fedstat.kernels.curves import spline_basis, spline_refinement

FRAME = simulated(600)
TEXT = "y(t) ~ bsignal(x1, knots=3) + bols(g) + bbs(age, knots=4, lower_bound=20, upper_bound=80)"


def rows(text=TEXT, frame=FRAME, **settings):
    partition = by_site(frame, "x1", "x2", "y", policy=LOOSE)
    return fs.FedFunctionBoost.from_formula(text, partition, time="bbs(t, knots=3, df=3)", **settings)


def columns(text=TEXT, **settings):
    held = {"Laboratory": ["x1", "g"], "Imaging": ["age"], "Clinic": ["y", "mean"]}
    partition = fs.ClientPartition.from_frame(FRAME, columns=held, curves=declared("x1", "y"))
    return fs.FedFunctionBoost.from_formula(text, partition, time="bbs(t, knots=3, df=3)", **settings)


@pytest.mark.parametrize(("knots", "degree"), [(0, 3), (1, 1), (4, 3), (10, 2)])
def test_splines_are_combinations_of_those_with_doubled_knots(knots, degree):
    x = np.linspace(-2.0, 5.0, 57)
    fine = spline_basis(x, -2.0, 5.0, 2 * knots + 1, degree)
    found = fine @ spline_refinement(knots, degree)
    np.testing.assert_allclose(found, spline_basis(x, -2.0, 5.0, knots, degree), atol=1e-12)


@pytest.mark.parametrize("make", [rows, columns])
@pytest.mark.parametrize("text", [TEXT, TEXT.replace("y(t)", "mean")])
def test_the_path_is_that_without_the_check(make, text):
    checked = make(text, check_knots=True).fit(steps=60, folds=2)
    plain = make(text).fit(steps=60, folds=2)
    assert list(checked.path["learner"]) == list(plain.path["learner"])
    np.testing.assert_allclose(checked.coef, plain.coef, atol=1e-6)
    pd.testing.assert_frame_equal(checked.refit().tests, plain.refit().tests, rtol=1e-4)
    assert plain.refit().knots is None and len(checked.refit().knots) == (5 if "(t)" in text else 1)


def test_the_doubled_refit_is_that_of_a_model_with_so_many_knots():
    wide = TEXT.replace("knots=3", "knots=7").replace("knots=4", "knots=9")
    partition = by_site(FRAME, "x1", "x2", "y", policy=LOOSE)
    model = fs.FedFunctionBoost.from_formula(wide, partition, time="bbs(t, knots=7, df=3)")
    labels = ["bsignal(x1)", "bbs(age)"]
    same = model.fit(steps=5).refit(labels)
    found = rows(check_knots=True).fit(steps=5).refit(labels, doubled=True)
    np.testing.assert_allclose(found.surface("x1"), same.surface("x1"), atol=1e-6)
    np.testing.assert_allclose(
        found.get_prediction(FRAME[:3]).summary_frame(),
        same.get_prediction(FRAME[:3]).summary_frame(),
        atol=1e-6,
    )


def test_the_tests_of_a_number_are_f_tests_of_added_columns():
    found = rows(TEXT.replace("y(t)", "mean"), check_knots=True).fit(steps=60).refit(["x1"]).knots
    s = np.linspace(0, 1, FRAME.filter(regex="^x1_").shape[1])
    X = FRAME.filter(regex="^x1_").to_numpy() * (s[1] - s[0])
    y = FRAME["mean"].to_numpy()

    def left(knots):
        Z = np.column_stack([np.ones(len(y)), X @ spline_basis(s, 0, 1, knots)])
        return ((y - Z @ np.linalg.lstsq(Z, y, rcond=None)[0]) ** 2).sum(), Z.shape[1]

    (given, k), (wide, K) = left(3), left(7)
    expected = (given - wide) / (K - k) / (wide / (len(y) - K))
    assert found.loc[("bsignal(x1)", "s"), "F"] == pytest.approx(expected, rel=1e-6)
    assert found.loc[("bsignal(x1)", "s"), ["df", "df_resid"]].tolist() == [K - k, len(y) - K]


@pytest.mark.slow
def test_rough_effects_are_found_and_smooth_ones_are_not():
    rough, along, smooth = (study(400, range(2), name) for name in ("rough", "rough along t", "smooth"))
    assert rough[:, -1].all() and along[:, -1].all() and not smooth[:, -1].any()
    assert rough[:, 0:4:2].mean() < 0.7 < 0.85 < rough[:, 4:8:2].mean()


def banner_of(refitted):
    """Text of the notes above the table."""
    return " ".join(str(refitted.summary()).split()).partition("=====")[0]


@pytest.mark.parametrize("check", [False, True])
def test_few_knots_are_in_the_banner_whether_or_not_they_were_tested(check):
    """The test has little power for features that noise hides, so its silence says nothing about coverage."""
    banner = banner_of(rows(check_knots=check).fit(steps=20).refit())
    assert "FEW KNOTS: fewer than 8 knots in bsignal(x1), bbs(age), time." in banner
    assert ("explain no more than chance" in banner) == check
    assert ("check_knots=True) tests the knots" in banner) != check
    assert ("refit(doubled=True)" in banner) == check


@pytest.mark.parametrize(("knots", "few"), [(7, True), (8, False)])
def test_how_many_knots_are_few(knots, few):
    partition = by_site(FRAME, "x1", "x2", "y", policy=LOOSE)
    text, time = f"y(t) ~ bsignal(x1, knots={knots})", "bbs(t, knots=8, df=4)"
    model = fs.FedFunctionBoost.from_formula(text, partition, time=time)
    assert ("FEW KNOTS" in banner_of(model.fit(steps=5).refit())) == few


def test_knots_that_are_too_few_are_in_the_banner():
    many = "y(t) ~ bsignal(x1, knots=10)"
    partition = by_site(FRAME, "x1", "x2", "y", policy=LOOSE)
    assert "KNOTS" not in str(
        fs.FedFunctionBoost.from_formula(many, partition).fit(steps=5).refit().summary()
    )
    s = np.linspace(0, 1, FRAME.filter(regex="^x1_").shape[1])
    bent = FRAME.filter(regex="^x1_").to_numpy() @ np.sin(8 * np.pi * s)
    frame = FRAME.assign(mean=bent / bent.std() + 0.3 * np.random.default_rng(0).normal(size=len(FRAME)))
    fit = rows("mean ~ bsignal(x1, knots=4)", frame, check_knots=True).fit(steps=20)
    assert "TOO FEW KNOTS: bsignal(x1) along s (P = 0.000" in " ".join(str(fit.refit().summary()).split())
    assert "KNOTS" not in str(fit.refit(doubled=True).summary())


def test_what_cannot_be_checked_is_refused(tmp_path):
    with pytest.raises(ModelError, match="check_knots: needs squared loss"):
        rows(check_knots=True, loss="huber", delta=1.0)
    with pytest.raises(ModelError, match="nor check_knots"):
        rows(check_knots=True).fit(steps=5, aggregation="lsa")
    with pytest.raises(NotAvailableError, match="check_knots=True"):
        rows().fit(steps=5).refit(doubled=True)
    fit = rows(check_knots=True).fit(steps=5)
    fit.save(tmp_path / "knots.fed")
    again = fs.load(tmp_path / "knots.fed")
    pd.testing.assert_frame_equal(again.refit().knots, fit.refit().knots)


def test_the_columns_of_doubled_knots_are_counted():
    checked, plain = rows(check_knots=True), rows()
    assert checked.source._n_columns == 1 + 11 + 3 + 13 + 11
    assert plain.source._n_columns == 1 + 7 + 3 + 8 + 7
    for model in (checked, plain):
        text = f"sums of products of {model.source._n_columns} columns over 600 rows"
        assert text in " ".join(str(model.explain()).split())
        assert text in " ".join(str(model.fit(steps=5).summary()).split())
