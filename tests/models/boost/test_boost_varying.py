"""Effects of a curve at the same point, and of its past, against boosting of all points row by row."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from curve_cases import LOOSE, by_site, declared, simulated
from row_boosting import along, boost, both, centered, integrals, smooth

import fedstat as fs
from fedstat.errors import FormulaError, ModelError, NotAvailableError
from fedstat.kernels.curves import integrals_up_to, spline_basis

S, T = np.linspace(0, 1, 30), np.linspace(0, 1, 12)
TIME = "bbs(t, knots=4, df=3)"
B, K2 = spline_basis(T, 0, 1, 4), smooth(8, 2)
FRAME = simulated(150)
PAST = FRAME.filter(regex="^x2_").to_numpy() * (S[1] * np.exp(-4 * S))
FRAME[[f"y_{j}" for j in range(12)]] += 3 * np.stack([PAST[:, t + 1e-9 >= S].sum(axis=1) for t in T], 1)
TEXT = (
    "y(t) ~ bconcurrent(x1, knots=3, df=9) + bhist(x2, knots=2, df=9) + bsignal(x1, knots=4, df=3)"
    " + bols(g, df=3)"
)
NAMES = [f"y_{j}" for j in range(12)]


def fitted(text=TEXT, frame=FRAME, steps=60, penalty="fdboost", policy=LOOSE, **settings):
    partition = by_site(frame, "x1", "x2", "y", policy=policy)
    return fs.FedFunctionBoost.from_formula(text, partition, time=TIME, penalty=penalty).fit(
        steps=steps, **settings
    )


def taken(result):
    labels = list(result.learners.index)
    return [labels.index(name) for name in result.path["learner"]]


def learners_by_row(frame):
    """All columns over all points, penalties and degrees of freedom."""
    x1, x2 = (frame.filter(regex=f"^{name}_").to_numpy() for name in ("x1", "x2"))
    at_t = np.array([np.interp(T, S, row) for row in x1])[:, :, None]
    theta = spline_basis(S, 0, 1, 2)
    # Weights of FDboost: the step before each point, the first as the second.
    past = np.stack([(x2 * S[1] * (t + 1e-9 >= S)) @ theta for t in T], axis=1)
    groups = np.column_stack([np.ones(len(frame)), frame["g"] == "b", frame["g"] == "c"]).astype(float)
    return [
        (along(np.ones((len(frame), 1)), B), K2, 3.0),
        (along(at_t, spline_basis(T, 0, 1, 3)), smooth(7, 1), 9.0),
        (along(past, spline_basis(T, 0, 1, 2)), both(smooth(6, 1), smooth(6, 1)), 9.0),
        (along(integrals(x1, S, 4), B), both(smooth(8, 1), K2), 9.0),
        (along(centered(groups), B), both(np.eye(2), K2), 9.0),
    ]


def test_integrals_of_the_past_are_sums_up_to_each_point():
    x, theta = np.random.default_rng(1).normal(size=(4, 30)), spline_basis(S, 0, 1, 2)
    found = integrals_up_to(S, x, theta, T)
    for j, t in enumerate(T):
        np.testing.assert_allclose(found[:, j], (x[:, t + 1e-9 >= S] * S[1]) @ theta[t + 1e-9 >= S])


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_the_path_is_that_of_boosting_row_by_row(share):
    frame = FRAME.copy()
    lost = np.random.default_rng(8).uniform(size=(150, 12)) < share
    frame[NAMES] = np.where(lost, np.nan, frame[NAMES].to_numpy())
    chosen, left, fit = boost(learners_by_row(frame), frame[NAMES].to_numpy(), 80)
    offset = np.nanmean(frame[NAMES].to_numpy(), axis=0) if share else "mean"
    result = fitted(frame=frame, steps=80, offset=offset)
    assert len(set(chosen)) > 3
    assert taken(result) == chosen
    assert result._boosting.over(np.ones(1, bool), 80)[1].risk[-1] == pytest.approx(left, rel=1e-8)
    np.testing.assert_allclose(result.predict(frame), fit, atol=1e-6)


@pytest.mark.parametrize(("penalty", "sites"), [("fdboost", 2), ("separable", 12)])
def test_neither_number_nor_order_of_sites_matters(penalty, sites):
    policy = fs.Policy(max_parameters=60.0, min_count=1, min_level_count=1)
    fits = [
        fitted(frame=FRAME.assign(site=site), penalty=penalty, policy=policy)
        for site in (np.zeros(150, int), np.arange(150) % sites, -np.arange(150) % sites)
    ]
    for other in fits[1:]:
        assert taken(other) == taken(fits[0])
        np.testing.assert_allclose(other.params, fits[0].params, atol=1e-6 * fits[0].params.abs().max())


@pytest.mark.parametrize("penalty", ["fdboost", "separable"])
def test_a_fold_is_judged_by_the_fit_of_the_others(penalty):
    result = fitted(penalty=penalty, steps=30, folds="site", select="cv")
    for k in range(3):
        others, own = FRAME[FRAME["site"] != k], FRAME[FRAME["site"] == k]
        alone = fitted(frame=others, penalty=penalty, steps=30)
        loss = ((alone.predict(own).to_numpy() - own[NAMES].to_numpy()) ** 2).mean()
        assert result._cv[k, -1] == pytest.approx(loss, rel=1e-6)


def test_learners_with_two_directions_go_the_same_way_next_to_those_without():
    text = "y(t) ~ bsignal(x1, knots=4) + bols(g) + const(bols(age))"
    for penalty in ("fdboost", "separable"):
        alone = fitted(text, penalty=penalty)
        beside = fitted(text + " + bconcurrent(x2, knots=1, df=1.001)", penalty=penalty)
        np.testing.assert_allclose(alone.learners["df"], beside.learners["df"].iloc[:-1], atol=1e-6)
        if "bconcurrent(x2)" not in set(beside.path["learner"]):
            np.testing.assert_allclose(alone.predict(FRAME), beside.predict(FRAME), atol=1e-7)


def test_all_learners_have_the_same_degrees_of_freedom():
    df = fitted("y(t) ~ bconcurrent(x1, knots=10) + bhist(x1) + bsignal(x1)", steps=1).learners["df"]
    np.testing.assert_allclose(df.iloc[1:], 12.0, atol=1e-6)


def test_curves_may_be_measured_at_other_points_elsewhere():
    fine = {"x1": 59, "x2": 59}
    frame, s = FRAME.copy(), np.linspace(0, 1, 59)
    dense = {
        f"{name}_{j}": values
        for name in fine
        for j, values in enumerate(
            np.array([np.interp(s, S, row) for row in frame.filter(regex=f"^{name}_").to_numpy()]).T
        )
    }
    other = pd.DataFrame(dense).assign(**{name: frame[name] for name in [*NAMES, "age", "g"]})
    own = frame["site"] == 1
    tables = {"a": frame[~own].drop(columns=["site", "mean"]), "b": other[own]}
    partition = fs.ClientPartition.from_frames(
        tables, layout="horizontal", curves=declared("x1", "x2", "y"), policy=LOOSE
    )
    text = "y(t) ~ bconcurrent(x1, knots=3) + bhist(x2, knots=2)"
    mixed = fs.FedFunctionBoost.from_formula(text, partition, time=TIME).fit(steps=100)
    same = fitted(text, penalty="separable", steps=100)
    np.testing.assert_allclose(mixed.surface("x1")["estimate"], same.surface("x1")["estimate"], atol=0.05)
    assert mixed.score(frame)["rsquared"] == pytest.approx(same.rsquared, abs=0.01)


def test_short_gaps_of_a_curve_are_filled_and_long_ones_leave_the_row_out():
    frame = FRAME.copy()
    frame.loc[3, "x2_7"] = np.nan
    frame.loc[5, [f"x2_{j}" for j in range(4, 20)]] = np.nan
    with pytest.warns(fs.errors.DataWarning, match="rows that lack"):
        result = fitted(frame=frame)
    assert result.nobs == 149
    filled = frame.drop(index=5)
    filled.loc[3, "x2_7"] = (filled.loc[3, "x2_6"] + filled.loc[3, "x2_8"]) / 2
    np.testing.assert_allclose(result.params, fitted(frame=filled).params, atol=1e-6)
    assert result.predict(frame).isna().all(axis=1).tolist() == [i == 5 for i in range(150)]


def test_effects_are_shown_kept_and_drawn(tmp_path):
    result = fitted(steps=150)
    now, past = result.surface("bconcurrent(x1)"), result.surface("x2")
    assert list(now.columns) == ["t", "estimate"] and len(now) == 12
    assert list(past.columns) == ["s", "t", "estimate"] and (past["s"] <= past["t"]).all()
    assert len(result.params) == result.coef.size + 7 + 36
    result.save(tmp_path / "boost.fed")
    again = fs.load(tmp_path / "boost.fed")
    pd.testing.assert_frame_equal(again.predict(FRAME), result.predict(FRAME))
    pd.testing.assert_frame_equal(again.surface("x2"), past)
    assert str(again.summary()) == str(result.summary())
    assert "refit()" not in str(result.summary())
    assert result.plot("surface", "bconcurrent(x1)").has_data()
    (mesh,) = result.plot("surface", "bhist(x2)").collections
    assert mesh.norm.vmax == pytest.approx(past["estimate"].abs().max())
    assert result.aicc["df"].is_monotonic_increasing


def test_an_effect_of_the_past_is_found():
    result = fitted(
        "y(t) ~ bhist(x2, knots=6) + bsignal(x1, knots=4) + bols(g)", steps=800, penalty="separable"
    )
    found = result.surface("x2")
    truth = 3 * np.exp(-4 * found["s"])
    assert np.corrcoef(found["estimate"], truth)[0, 1] > 0.7


def test_the_dry_run_counts_the_products_of_varying_columns():
    partition = by_site(FRAME, "x1", "x2", "y", policy=LOOSE)
    model = fs.FedFunctionBoost.from_formula(TEXT, partition, time=TIME)
    reported = model.explain()
    table = reported.table.query("sender == 'site 0' and step == 'sum_curves_along'").set_index("array")
    M, K, L = 7 + 36, 1 + 8 + 3, 8
    assert table["shape"]["varying_gram"] == (1, M * (M + 1) // 2)
    assert table["shape"]["varying_cross"] == (1, K, L, M)
    columns = int(np.ceil(np.sqrt((K + L) ** 2 + M**2 + 2 * M * (K * L + 1))))
    assert f"products of {columns} columns" in str(reported)
    result = model.fit(steps=5)
    sent = result.ledger.to_frame().query("sender == 'site 0' and kind == 'aggregate'").set_index("array")
    assert sent["shape"]["varying_cross"] == (1, K, L, M) and sent["masked"].all()
    assert f"products of {columns} columns" in str(result.summary())


def test_what_needs_errors_along_the_response_is_not_there():
    result = fitted(steps=20, folds=4, seed=1)
    for call in (result.refit, result.split, result.entry_test):
        with pytest.raises(NotAvailableError, match=r"bconcurrent\(x1\), which varies along"):
            call()
    assert result.stability(2, draws=3)[0].between(0, 1).all()
    with pytest.raises(ModelError, match="no learner that varies"):
        fitted(aggregation="average", penalty="separable")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mean ~ bhist(x1)", r"write its name with \(t\), or bsignal"),
        ("mean ~ bconcurrent(x1)", r"name with \(t\)"),
        ("y(t) ~ const(bhist(x1))", r"takes no const\(\)"),
        ("y(t) ~ bhist(age)", r"bhist\(\) needs a curve"),
        ("y(t) ~ bhist(x1, by=age)", "no option 'by'"),
        ("y(t) ~ bhist(x1, differences=3, df=8)", "leaves 9 directions free"),
        ("y(t) ~ bhist(y)", "right side too"),
    ],
)
def test_what_does_not_fit_is_named(text, words):
    with pytest.raises(FormulaError, match=words):
        fs.FedFunctionBoost.from_formula(text, by_site(FRAME, "x1", "x2", "y"))


def test_curves_of_other_domains_have_no_past_of_the_response():
    curves = {**declared("x2", "y"), "x1": fs.Curve("x1_*", domain=(0, 2))}
    partition = fs.ClientPartition.from_frame(FRAME, by="site", curves=curves)
    for name in ("bhist", "bconcurrent"):
        with pytest.raises(FormulaError, match=rf"{name}\(x1\).*domains differ: 0 to 2, and 0 to 1"):
            fs.FedFunctionBoost.from_formula(f"y(t) ~ {name}(x1)", partition)


def test_two_sites_curves_are_not_multiplied_point_by_point():
    tables = {
        "one": FRAME.filter(regex="^x1_").assign(id=range(150)),
        "two": FRAME[NAMES].assign(id=range(150)),
    }
    partition = fs.ClientPartition.from_frames(tables, on="id", curves=declared("x1", "y"))
    with pytest.raises(
        FormulaError, match=r"bconcurrent\(x1\) needs products .* If sites hold different columns"
    ):
        fs.FedFunctionBoost.from_formula("y(t) ~ bconcurrent(x1)", partition)
