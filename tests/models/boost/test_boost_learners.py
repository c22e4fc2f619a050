"""Every learner against boosting row by row, and what is printed of it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from curve_cases import LOOSE, by_site, curve_table, simulated
from row_boosting import along, boost, both, centered, integrals, smooth

import fedstat as fs
from fedstat.errors import EstimationError, FormulaError, NotAvailableError
from fedstat.kernels.curves import spline_basis, spline_gram

S, T = np.linspace(0, 1, 30), np.linspace(0, 1, 12)
TIME = "bbs(t, knots=4, df=3)"
B, K2 = spline_basis(T, 0, 1, 4), smooth(8, 2)
FRAME = simulated(150)
FRAME["w"] = np.random.default_rng(2).normal(size=150)
FRAME["ward"] = np.array(list("pqrstu"))[np.random.default_rng(3).integers(0, 6, 150)]
Y = FRAME.filter(regex="^y_").to_numpy()
X1 = FRAME.filter(regex="^x1_").to_numpy()


def dummies(name):
    return pd.get_dummies(FRAME[name]).to_numpy(float)


def ends(text):
    return f"{text}, lower_bound=20, upper_bound=80"


AGE = spline_basis(FRAME["age"].to_numpy(), 20, 80, 4)
INTERCEPT = (along(np.ones((150, 1)), B), K2, 3.0)
LEARNERS = {
    "brandom(ward, df=3)": (lambda: centered(dummies("ward")), np.eye(5), 9.0),
    "bols(age, by=w, df=2)": (
        lambda: centered(np.column_stack([FRAME["w"], FRAME["age"] * FRAME["w"]])),
        np.eye(1),
        6.0,
    ),
    "bsignal(x1, knots=4, by=w, df=3)": (
        lambda: integrals(X1, S, 4) * FRAME[["w"]].to_numpy(),
        smooth(8, 1),
        9.0,
    ),
}


def test_a_column_may_be_called_like_a_learner():
    frame = FRAME.rename(columns={"age": "bmi"})
    fits = [
        fs.FedFunctionBoost.from_formula(f"w ~ {name}", by_site(one, policy=LOOSE)).fit(steps=5)
        for name, one in (("bmi", frame), ("age", FRAME))
    ]
    assert fits[0].rsquared == pytest.approx(fits[1].rsquared, abs=1e-12)
    with pytest.raises(FormulaError, match="is no learner"):
        fs.FedFunctionBoost.from_formula("w ~ bspline(age)", by_site(FRAME, policy=LOOSE))


def fitted(text, steps=40, frame=FRAME, time=TIME, penalty="fdboost", options=None, **settings):
    partition = by_site(frame, "x1", "x2", "y", policy=LOOSE, **(options or {}))
    model = fs.FedFunctionBoost.from_formula(text, partition, time=time, penalty=penalty)
    return model.fit(steps=steps, **settings)


def taken(result):
    labels = list(result.learners.index)
    return [labels.index(name) for name in result.path["learner"]]


def test_learners_of_columns_are_those_of_boosting_row_by_row():
    learners = [INTERCEPT]
    for columns, K1, df in LEARNERS.values():
        Z = columns()
        learners.append((along(Z, B), both(K1[: Z.shape[1], : Z.shape[1]], K2), df))
    chosen, left, fit = boost(learners, Y, 60)
    result = fitted("y(t) ~ " + " + ".join(LEARNERS), 60)
    assert len(set(chosen)) > 2
    assert taken(result) == chosen
    assert (1 - result.rsquared) * result._boosting.total_squares == pytest.approx(left, rel=1e-8)
    np.testing.assert_allclose(result.predict(FRAME), fit, atol=1e-7)


def test_a_smooth_effect_is_multiplied_by_a_column():
    K1 = smooth(8, 2)
    Q = np.linalg.qr((AGE * FRAME[["w"]].to_numpy()).sum(axis=0)[:, None], mode="complete")[0][:, 1:]
    Z = AGE * FRAME[["w"]].to_numpy() @ Q
    chosen, left, _ = boost([INTERCEPT, (along(Z, B), both(Q.T @ K1 @ Q, K2), 9.0)], Y, 40)
    result = fitted(f"y(t) ~ bbs({ends('age, knots=4, by=w, df=3')})")
    assert taken(result) == chosen
    assert (1 - result.rsquared) * result._boosting.total_squares == pytest.approx(left, rel=1e-8)
    assert list(result.surface("bbs(age, by=w)").columns) == ["x", "t", "estimate"]


@pytest.mark.parametrize("penalty", ["fdboost", "separable"])
def test_a_constant_effect_does_not_vary_along_the_response(penalty):
    result = fitted("y(t) ~ const(bols(g)) + bsignal(x1, knots=4)", penalty=penalty)
    found = result.surface("const(bols(g))").pivot_table("estimate", "column", "t").to_numpy()
    assert np.abs(found).max() > 0.05
    np.testing.assert_allclose(found, found[:, :1] * np.ones(12), atol=1e-10)
    assert result.learners.loc["const(bols(g))", "df"] == pytest.approx(2.0)
    with pytest.raises(NotAvailableError, match=r"const\(bols\(g\)\)"):
        result.refit(["const(bols(g))"])


def test_a_constant_effect_is_that_of_boosting_row_by_row():
    one = np.ones((12, 1))
    learners = [
        INTERCEPT,
        (along(centered(dummies("ward")), one), np.eye(5), 3.0),
        (along(integrals(X1, S, 4), B), both(smooth(8, 1), K2), 9.0),
    ]
    chosen, left, _ = boost(learners, Y, 60)
    result = fitted("y(t) ~ const(brandom(ward, df=1)) + bsignal(x1, knots=4, df=3)", 60)
    assert len(set(chosen)) > 1
    assert taken(result) == chosen
    assert (1 - result.rsquared) * result._boosting.total_squares == pytest.approx(left, rel=1e-8)


def test_principal_components_are_those_of_the_curves():
    s, random = np.linspace(0, 1, 401), np.random.default_rng(4)
    X = random.normal(size=(150, 6)) * np.arange(6, 0, -1) @ spline_basis(s, 0, 1, 2).T + np.sin(5 * s)
    frame = curve_table(x=X).assign(mean=FRAME["mean"] + X[:, 100], site=FRAME["site"])
    # For curves on a grid: eigenvectors of the covariance with the weights of integrals.
    center = (X - X.mean(axis=0)) * np.sqrt(np.r_[0.5, np.ones(399), 0.5] / 400)
    values, vectors = np.linalg.eigh(center.T @ center)
    m = int(np.searchsorted(np.cumsum(values[::-1]) / values.sum(), 0.9)) + 1
    Z = np.column_stack([np.ones(150), center @ vectors[:, ::-1][:, :m]])
    fit = Z @ np.linalg.lstsq(Z, frame["mean"].to_numpy(), rcond=None)[0]
    model = fs.FedFunctionBoost.from_formula("mean ~ bfpc(x, knots=8, pve=0.9)", by_site(frame, "x"))
    result = model.fit(steps=2000)
    assert result.learners.loc["bfpc(x)", "df"] == pytest.approx(m) == 3
    # FDboost's weights count the ends of a regular grid fully: integrals differ by a step in 400.
    np.testing.assert_allclose(result.predict(frame), fit, atol=0.005 * np.ptp(fit))
    weights = result.surface("x")["estimate"].to_numpy() * np.r_[0.5, np.ones(399), 0.5] / 400
    effect = X @ weights - (X @ weights).mean()
    np.testing.assert_allclose(effect, fit - fit.mean(), atol=0.005 * np.ptp(fit))


def test_all_variance_of_the_curves_spans_what_their_integrals_do():
    text = "mean ~ bfpc(x1, knots=1, pve=1) + bsignal(x1, knots=1)"
    Z = np.column_stack([np.ones(150), integrals(X1, S, 1)])
    y = FRAME["mean"].to_numpy()
    least = Z @ np.linalg.lstsq(Z, y, rcond=None)[0]
    left = ((y - least) ** 2).sum()
    result = fitted(text, 20000)
    assert (1 - result.rsquared) * result._boosting.total_squares == pytest.approx(left, rel=1e-3)


def test_the_gram_of_splines_is_their_integral():
    x = np.linspace(0, 2, 20001)
    basis = spline_basis(x, 0, 2, 5)
    np.testing.assert_allclose(
        spline_gram(0, 2, 5), np.trapezoid(basis[:, :, None] * basis[:, None], x, axis=0), atol=1e-7
    )


def test_random_effects_are_named_by_all_levels_and_shrunken_in_a_refit():
    result = fitted("y(t) ~ brandom(ward) + bsignal(x1, knots=1)", 60)
    levels = [f"ward[T.{level}]" for level in "pqrstu"]
    assert list(dict.fromkeys(result.surface("ward")["column"])) == levels
    refit = result.refit(["ward", "x1"])
    assert refit.tests.loc["brandom(ward)", "edf"] < 5 * 8


@pytest.mark.parametrize("penalty", ["fdboost", "separable"])
def test_all_learners_have_the_same_degrees_of_freedom(penalty):
    text = f"y(t) ~ bsignal(x1) + bfpc(x2) + bols(g) + bols(age) + bbs({ends('age')}) + brandom(ward)"
    df = fitted(text, 2, penalty=penalty).learners["df"].iloc[1:]
    most = pd.Series(12.0, df.index)
    most[["bols(g)", "bols(age)"]] = [12.0, 8.0]  # those of one column have 8 along the response
    np.testing.assert_allclose(df, most, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("y(t) ~ btree(age)", "no learner; known are .*brandom"),
        ("y(t) ~ brandom(age)", r"takes a column of levels; write C\(\)"),
        ("y(t) ~ brandom(g:ward)", "takes a column of levels"),
        ("y(t) ~ bols(age, by=ward)", "ward has 6 levels"),
        ("y(t) ~ bols(age, by=x1)", "'x1' is a curve"),
        ("y(t) ~ bfpc(x1, pve=2)", "share of the variance"),
        ("y(t) ~ bfpc(age)", r"bfpc\(\) needs a curve"),
        ("mean ~ const(bols(g))", "the response is not a curve"),
        ("y(t) ~ bsignal(x1, differences=6)", r"cannot have df=4: its penalty leaves 6"),
        ("y(t) ~ const(const(bols(g)))", "const"),
    ],
)
def test_what_does_not_fit_a_learner_is_named(text, words):
    with pytest.raises(FormulaError, match=words):
        fs.FedFunctionBoost.from_formula(text, by_site(FRAME, "x1", "x2", "y"))


@pytest.mark.parametrize(("penalty", "sites"), [("fdboost", 2), ("separable", 12)])
def test_neither_number_nor_order_of_sites_matters(penalty, sites):
    text = "y(t) ~ brandom(ward) + bfpc(x1, knots=4) + bols(age, by=w) + const(bols(g))"
    policy = fs.Policy(max_parameters=60.0, min_count=1, min_level_count=1)
    fits = []
    for site in (np.zeros(150, int), np.arange(150) % sites, -np.arange(150) % sites):
        partition = by_site(FRAME.assign(site=site), "x1", "x2", "y", policy=policy)
        fits.append(
            fs.FedFunctionBoost.from_formula(text, partition, time=TIME, penalty=penalty).fit(steps=60)
        )
    for other in fits[1:]:
        assert taken(other) == taken(fits[0])
        np.testing.assert_allclose(other.predict(FRAME), fits[0].predict(FRAME), atol=1e-6)


@pytest.mark.parametrize("penalty", ["fdboost", "separable"])
def test_a_fold_is_judged_by_the_fit_of_the_others(penalty):
    text = "y(t) ~ brandom(ward) + bfpc(x1, knots=4) + bols(age, by=w) + const(bols(g))"
    result = fitted(text, 30, penalty=penalty, folds="site", select="cv")
    for k in range(3):
        others, own = FRAME[FRAME["site"] != k], FRAME[FRAME["site"] == k]
        alone = fitted(text, 30, frame=others, penalty=penalty)
        loss = ((alone.predict(own) - own.filter(regex="^y_").to_numpy()) ** 2).to_numpy().mean()
        assert result._cv[k, -1] == pytest.approx(loss, rel=1e-6)


def test_collinear_learners_boost_and_are_named_where_they_are_fitted_again():
    result = fitted("y(t) ~ bols(age) + bols(months)", 60, frame=FRAME.assign(months=12.0 * FRAME["age"]))
    assert set(taken(result)) <= {1, 2}
    with pytest.raises(EstimationError, match=r"bols\(age\) and bols\(months\) are collinear"):
        result.refit(["age", "months"])
