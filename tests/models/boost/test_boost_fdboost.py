"""Boosting from sums against FDboost on the pooled rows, and against boosting row by row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from curve_cases import LOOSE, by_site, declared, reference_table, simulated

import fedstat as fs
from fedstat.kernels.curves import difference_penalty, integration_weights, spline_basis

STORED = json.loads((Path(__file__).parents[2] / "reference/boost/fdboost.json").read_text())


def check_equal(result, frame, known):
    """Hold a path against FDboost's: learners taken, loss, and fitted values."""
    labels = list(result.learners.index)
    assert [labels.index(name) + 1 for name in result.path["learner"]] == known["xselect"]
    left = (1 - result.path["rsquared"].iloc[-1]) * result._boosting.total_squares
    assert left == pytest.approx(known["risk"], rel=1e-7)
    fitted = result.predict(frame).to_numpy().ravel(order="F")
    np.testing.assert_allclose(fitted, known["fitted"], atol=1e-6)


def test_the_path_is_that_of_fdboost_on_pooled_rows():
    frame = reference_table()
    z = frame["z"]
    ends = f"lower_bound={z.min()!r}, upper_bound={z.max()!r}"
    text = (
        "y(t) ~ 1 + bsignal(x1, knots=8, df=4) + bsignal(x2, knots=8, df=4) + bsignal(x3, knots=8, df=4)"
        f" + bols(z, df=1) + bbs(z, df=4, knots=10, {ends}) + bols(g, df=2)"
    ).replace("np.float64", "")
    frame["site"] = np.where(np.arange(90) < 37, 0, 1)
    partition = by_site(frame, "x1", "x2", "x3", "y", policy=LOOSE)
    model = fs.FedFunctionBoost.from_formula(
        text, partition, time="bbs(t, knots=10, df=3)", penalty="fdboost"
    )
    check_equal(model.fit(steps=150), frame, STORED["A"])


@pytest.mark.parametrize("sites", [2, 5])
def test_missing_points_and_an_effect_at_the_same_point_are_those_of_fdboost(sites):
    frame = reference_table().assign(site=np.arange(90) % sites)
    # Where points are missing FDboost's intercept has four degrees of freedom, whatever those of its time
    # formula; the others have twelve, four and six.
    model = fs.FedFunctionBoost.from_formula(
        "lacking(t) ~ bsignal(x2, knots=8, df=3) + bconcurrent(xc, knots=10, df=4) + bols(z, df=1.5)",
        by_site(frame, "x2", "lacking", "xc", policy=LOOSE),
        time="bbs(t, knots=10, df=4)",
        penalty="fdboost",
    )
    offset = frame.filter(regex="^y_").to_numpy().mean(axis=0)
    check_equal(model.fit(steps=80, offset=offset), frame, STORED["B"])


@pytest.mark.parametrize("sites", [1, 2, 48])
def test_effects_of_the_past_of_curves_are_those_of_fdboost(sites):
    frame = reference_table().assign(site=np.arange(90) % sites)
    model = fs.FedFunctionBoost.from_formula(
        "y(t) ~ bhist(x1, knots=6, df=10) + bhist(x2, knots=6, df=10)",
        by_site(frame, "x1", "x2", "y", policy=fs.Policy(max_parameters=20.0, min_count=1)),
        time="bbs(t, knots=10, df=10)",
        penalty="fdboost",
    )
    check_equal(model.fit(steps=60), frame, STORED["C"])


def boost_rows(frame, steps, nu=0.1):
    """Boosting of y on x1 and x2 row by row, with FDboost's penalty, one learner after the other."""
    t, s = np.linspace(0, 1, 12), np.linspace(0, 1, 30)
    Y = frame.filter(regex="^y_").to_numpy()
    b = spline_basis(t, 0, 1, 4)
    X = [frame.filter(regex=f"^{name}_").to_numpy() for name in ("x1", "x2")]
    Z = [np.ones((len(Y), 1)), *((x * integration_weights(s)) @ spline_basis(s, 0, 1, 5) for x in X)]
    K2, designs, hats = difference_penalty(8, 2), [], []
    for p, z in enumerate(Z):
        D = np.kron(b, z)  # rows (t slow), columns (basis of t slow)
        k = z.shape[1]
        K = np.kron(K2, np.eye(k)) + (0 if p == 0 else np.kron(np.eye(8), difference_penalty(k, 1)))
        goal = 3.0 if p == 0 else 12.0
        low, high = -40.0, 40.0
        gram = D.T @ D
        for _ in range(200):
            middle = (low + high) / 2
            H = np.linalg.solve(gram + np.exp(middle) * K, gram)
            low, high = (middle, high) if 2 * np.trace(H) - np.trace(H @ H) > goal else (low, middle)
        designs.append(D)
        hats.append(np.linalg.solve(gram + np.exp(middle) * K, D.T))
    left, chosen = (Y - Y.mean(axis=0)).ravel(order="F"), []
    for _ in range(steps):
        fits = [D @ (H @ left) for D, H in zip(designs, hats, strict=True)]
        best = int(np.argmin([((left - fit) ** 2).sum() for fit in fits]))
        left = left - nu * fits[best]
        chosen.append(best)
    return chosen, float(left @ left)


def test_sums_give_what_boosting_row_by_row_gives():
    frame = simulated(120)
    chosen, left = boost_rows(frame, 40)
    model = fs.FedFunctionBoost.from_formula(
        "y(t) ~ bsignal(x1, knots=5, df=4) + bsignal(x2, knots=5, df=4)",
        by_site(frame, "x1", "x2", "y", policy=LOOSE),
        time="bbs(t, knots=4, df=3)",
        penalty="fdboost",
    )
    result = model.fit(steps=40)
    labels = list(result.learners.index)
    assert [labels.index(name) for name in result.path["learner"]] == chosen
    found = (1 - result.path["rsquared"].iloc[-1]) * result._boosting.total_squares
    assert found == pytest.approx(left, rel=1e-6)


@pytest.mark.parametrize(("penalty", "sites"), [("fdboost", 2), ("separable", 12)])
def test_neither_number_nor_order_of_sites_matters(penalty, sites):
    text = "y(t) ~ bsignal(x1, knots=5) + bols(g) + bbs(age, knots=5, lower_bound=20, upper_bound=80)"
    frame, fits = simulated(240), []
    for site in (np.zeros(240, int), np.arange(240) % sites, -np.arange(240) % sites):
        partition = by_site(frame.assign(site=site), "x1", "x2", "y", policy=LOOSE)
        fits.append(fs.FedFunctionBoost.from_formula(text, partition, penalty=penalty).fit(steps=80))
    one, *others = fits
    for other in others:
        assert list(one.path["learner"]) == list(other.path["learner"])
        np.testing.assert_allclose(one.coef, other.coef, atol=1e-6 * np.abs(one.coef).max())


def test_many_steps_without_smoothing_are_least_squares():
    frame = simulated(300)
    model = fs.FedFunctionBoost.from_formula(
        "mean ~ bols(age, df=1) + bols(g, df=2)", by_site(frame, "x1", "x2", "y")
    )
    found = model.fit(steps=3000).predict(frame)
    X = np.column_stack([np.ones(300), frame["age"], frame["g"] == "b", frame["g"] == "c"]).astype(float)
    fitted = X @ np.linalg.lstsq(X, frame["mean"].to_numpy(), rcond=None)[0]
    np.testing.assert_allclose(found, fitted, atol=1e-6)


@pytest.mark.parametrize("penalty", ["separable", "fdboost"])
def test_a_fold_is_judged_by_the_fit_of_the_others(penalty):
    frame = simulated(300)
    text = "y(t) ~ bsignal(x1, knots=5) + bols(g)"
    partition = by_site(frame, "x1", "x2", "y", policy=LOOSE)
    result = fs.FedFunctionBoost.from_formula(text, partition, penalty=penalty).fit(steps=30, folds=3, seed=4)
    boosting = result._record.boosting
    for f in range(3):
        rest = np.arange(3) != f
        moments = boosting.moments
        alone = type(moments)(*(getattr(moments, name)[rest] for name in moments.__slots__))
        offset, test = alone.total.mean, moments.over(~rest)
        path = type(boosting)(alone, boosting.design, boosting.basis, boosting.nu).over(np.ones(2, bool), 30)[
            1
        ]
        left = test.about(offset, boosting.basis)
        B, G = path.coef, boosting.gram
        loss = left.yy - 2 * (left.T * B).sum() + ((left.S @ B @ G) * B).sum()
        assert result._cv[f, -1] * test.n * 12 == pytest.approx(loss, rel=1e-9)


def test_predictors_may_be_measured_at_other_points_elsewhere():
    frame = simulated(400)
    coarse = frame[frame["site"] == 1]
    thinned = coarse.drop(columns=[f"x1_{j}" for j in range(30) if j % 2])
    tables = {"fine": frame[frame["site"] != 1].drop(columns="site"), "coarse": thinned.drop(columns="site")}
    curves = {**declared("x2", "y"), "x1": fs.Curve("x1_*", domain=(0, 1))}
    partition = fs.ClientPartition.from_frames(tables, layout="horizontal", curves=curves)
    text = "y(t) ~ bsignal(x1, knots=5)"
    mixed = fs.FedFunctionBoost.from_formula(text, partition).fit(steps=100)
    same = fs.FedFunctionBoost.from_formula(text, by_site(frame, "x1", "x2", "y")).fit(steps=100)
    assert mixed.score(frame)["rsquared"] == pytest.approx(same.score(frame)["rsquared"], abs=0.02)
