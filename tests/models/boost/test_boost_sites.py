"""Releases of boosting, refusals by owners, and what is printed and stored."""

from __future__ import annotations

import numpy as np
import pytest
from curve_cases import by_site, curve_table, simulated

import fedstat as fs
from fedstat.errors import (
    DesignError,
    FormulaError,
    ModelError,
    NotAvailableError,
    PartitionError,
    PolicyError,
)
from fedstat.models.boost.row_source import RowSource

FRAME = simulated()
TEXT = "y(t) ~ bsignal(x1, knots=5) + x2 + bols(g) + bbs(age, knots=5, lower_bound=20, upper_bound=80)"


def fitted(text=TEXT, frame=FRAME, steps=60, options=None, **settings):
    partition = by_site(frame, "x1", "x2", "y", **(options or {}))
    return fs.FedFunctionBoost.from_formula(text, partition).fit(steps=steps, **settings)


@pytest.fixture(scope="module")
def result():
    return fitted()


def test_one_round_of_masked_sums_leaves_whatever_the_number_of_steps(result):
    left = result.ledger.to_frame().query("sender != 'coordinator' and kind == 'aggregate'")
    assert set(left["array"]) == {"gram", "score", "spread", "totals"}
    assert left["masked"].all() and len(left) == 12
    assert (left["entities"] == 200).all()
    assert fitted(steps=10).ledger.rounds == result.ledger.rounds


def test_a_curve_counts_with_all_its_points(result):
    one = result.ledger.receipt.statements["site 0"]
    assert one.columns == 30 + 30 + 12 + 2


def test_the_dry_run_names_what_leaves_and_how_well_rows_are_traced():
    model = fs.FedFunctionBoost.from_formula(TEXT, by_site(FRAME, "x1", "x2", "y"))
    reported = model.explain(select="cv", folds=2)
    table = reported.table.query("sender == 'site 0' and step == 'sum_curves'")
    assert table.set_index("array")["shape"]["score"] == (2, 1 + 9 + 14 + 3 + 9, 14)
    assert table["passes"].all()
    assert "AUC about 0.85" in str(reported)  # Phi((36 + 14) / (2 sqrt 600))
    fit = model.fit(steps=5, select="cv", folds=2)
    sent = fit.ledger.to_frame().query("sender == 'site 0' and array == 'score'")["shape"]
    assert sent.tolist() == [(2, 36, 14)]


@pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")
def test_a_strict_site_answers_learners_of_what_it_publishes():
    frame = simulated(900)
    curve = {name: {"kind": "curve", "domain": [0, 1]} for name in ("x1", "x2", "y")}
    known = {
        **curve,
        "age": {"kind": "number", "range": [20, 80]},
        "g": {"kind": "category", "levels": ["a", "b", "c"]},
    }
    options = {"policy": "strict", "published": {f"site {k}": known for k in range(3)}}
    text = "y(t) ~ x1 + x2 + g + bbs(age, knots=5)"
    strict = fitted(text, frame, options=options)
    assert strict.score(frame)["rsquared"] == pytest.approx(
        fitted(text.replace("knots=5", "knots=5, lower_bound=20, upper_bound=80"), frame).score(frame)[
            "rsquared"
        ],
        rel=1e-9,
    )
    with pytest.raises(PolicyError, match="formulas"):
        fitted(text.replace("knots=5", "knots=5, lower_bound=39, upper_bound=41"), frame, options=options)
    del known["y"]
    with pytest.raises(PolicyError, match="column 'y' is not published"):
        fitted(text, frame, options=options)


def test_fewer_rows_than_three_for_each_column_are_refused_and_what_passes_is_named():
    with pytest.raises(DesignError, match=r"knots=3 in every bsignal\(\)"):
        fitted("y(t) ~ bsignal(x1) + bsignal(x2)", simulated(150), masked=False)
    assert (
        fitted("y(t) ~ bsignal(x1, knots=3) + bsignal(x2, knots=3)", simulated(150), masked=False).mstop == 60
    )


def test_the_site_counts_rows_for_columns_by_itself(monkeypatch):
    monkeypatch.setattr(RowSource, "_check_size", lambda *_: None)
    with pytest.raises(PolicyError, match="maximum parameters per row"):
        fitted("y(t) ~ bsignal(x1) + bsignal(x2)", simulated(150), masked=False)
    with pytest.raises(PolicyError, match="maximum parameters per row"):
        fitted("y(t) ~ bsignal(x1, knots=3)", simulated(150), masked=False, folds=5)


def test_a_basis_along_the_response_has_df_for_what_is_free_of_its_penalty():
    with pytest.raises(FormulaError, match="2 directions are free"):
        fs.FedFunctionBoost.from_formula("y(t) ~ x1", by_site(FRAME, "x1", "y"), time="bbs(t, df=1)")


def test_cross_validation_takes_the_step_of_least_loss_and_folds_are_drawn_again_by_their_seed():
    noise = FRAME.assign(mean=np.random.default_rng(1).normal(size=len(FRAME)))
    first = fitted("mean ~ x1 + x2 + bols(g)", noise, 200, select="cv", folds=5, seed=1)
    assert first.mstop == first.cv["loss"].to_numpy().argmin() + 1 < 100
    again = fitted("mean ~ x1 + x2 + bols(g)", noise, 200, select="cv", folds=5, seed=1)
    assert (first.cv.to_numpy() == again.cv.to_numpy()).all()
    with pytest.raises(NotAvailableError, match="folds"):
        fitted(steps=5).plot("cv")


def test_what_explains_is_found(result):
    table = result.learners
    assert table["explained"].sum() == pytest.approx(1.0)
    assert table.loc["bsignal(x2)", "explained"] < 0.01 < table.loc["bsignal(x1)", "explained"]
    assert result.score(FRAME)["rsquared"] == pytest.approx(result.rsquared, rel=1e-9)


def test_rows_with_a_long_gap_or_without_a_curve_are_left_out_and_short_gaps_are_not():
    frame = FRAME.copy()
    frame.loc[:9, [f"x1_{j}" for j in range(10, 20)]] = np.nan
    frame.loc[10:19, "x1_15"] = np.nan
    frame.loc[20:29, [f"y_{j}" for j in range(12)]] = np.nan
    with pytest.warns(fs.errors.DataWarning, match="rows that lack"):
        result = fitted(frame=frame)
    assert result.nobs == len(FRAME) - 20 and "20 rows with missing values" in str(result.summary())
    missing = result.predict(frame).isna().all(axis=1)
    assert missing.tolist() == [i < 10 for i in range(len(frame))]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("y ~ x1", FormulaError, r"write 'y\(t\)'"),
        ("age(t) ~ x1", FormulaError, "curves of all sites"),
        ("y(t) ~ bsignal(age)", FormulaError, "needs a curve"),
        ("y(t) ~ bols(x1)", FormulaError, "use bsignal"),
        ("y(t) ~ y", FormulaError, "right side too"),
        ("y(t) ~ x1 + bsignal(x1)", FormulaError, "occurs twice"),
        ("y(t) ~ bbs(age)", FormulaError, "lower_bound"),
        ("y(t) ~ bsignal(x1, knots=__import__('os'))", FormulaError, "are numbers"),
        ("y(t) ~ bsignal(x1, lag=3)", FormulaError, "no option 'lag'"),
        ("y(t) ~ btree(g)", FormulaError, "no learner"),
        ("y(t) ~ bsignal(x1, df=1, differences=2)", FormulaError, "leaves 2 directions free"),
        ("y(t) ~ bsignal(x1, knots=0, degree=0)", FormulaError, "too few knots"),
        ("y(t) ~ bbs(g, lower_bound=0, upper_bound=1)", FormulaError, "takes a column of numbers"),
        ("y(t) ~ bbs(age, lower_bound=0)", FormulaError, "lower_bound and upper_bound"),
        ("y(t) ~ nothing", ModelError, "nothing"),
    ],
)
def test_what_is_no_formula_is_named(text, error, words):
    with pytest.raises(error, match=words):
        fs.FedFunctionBoost.from_formula(text, by_site(FRAME, "x1", "x2", "y"))


@pytest.mark.parametrize(
    ("curve", "words"),
    [
        (fs.Curve("w_*"), "no column of the table fits"),
        (fs.Curve("y_*", grid=(0.0, 1.0)), "12 points, and its grid 2"),
        (fs.Curve("y_*", grid=tuple(range(12)), domain=(0, 5)), "outside its domain"),
        (fs.Curve("g"), "arrays"),
    ],
)
def test_what_is_wrong_with_a_curve_is_named(curve, words):
    with pytest.raises((PartitionError, ValueError), match=words):
        fs.ClientPartition.from_frame(FRAME, by="site", curves={"y": curve})


def test_curves_stand_in_cells_as_well():
    cells = FRAME[["age", "g", "site"]].assign(
        y=list(FRAME.filter(regex="^y_").to_numpy()), x1=list(FRAME.filter(regex="^x1_").to_numpy())
    )
    curves = {name: fs.Curve(name, domain=(0, 1)) for name in ("x1", "y")}
    partition = fs.ClientPartition.from_frame(cells, by="site", curves=curves)
    found = fs.FedFunctionBoost.from_formula("y(t) ~ x1", partition).fit(steps=20)
    same = fitted("y(t) ~ x1", steps=20)
    np.testing.assert_allclose(found.coef, same.coef, rtol=1e-9)


def test_other_models_do_not_see_the_columns_of_a_curve():
    partition = by_site(FRAME, "x1", "x2", "y")
    assert "x1_3" not in partition.pooled_columns
    with pytest.raises(FormulaError, match="no column 'x1'"):
        fs.FederatedGLM.from_formula("age ~ x1", partition)
    fit = fs.FederatedGLM.from_formula("age ~ .", partition).fit()
    assert list(fit.params.index) == ["Intercept", "g[T.b]", "g[T.c]", "mean"]


def test_sites_agree_on_domain():
    one = curve_table(y=np.random.default_rng(1).normal(size=(30, 8)))
    two = curve_table(y=np.random.default_rng(2).normal(size=(30, 9)))
    with pytest.raises(PartitionError, match="has domain"):
        open_ended = {"y": fs.Curve("y_*")}
        fs.ClientPartition.from_frames({"a": one, "b": two}, layout="horizontal", curves=open_ended)


def test_pictures_are_drawn(result):
    for what in ("surface", "path", "importance"):
        assert result.plot(what).has_data()
    assert result.plot("surface", "g").has_data() and result.plot("surface", "age").has_data()
    effects = result.plot("effects")
    assert effects.shape == (2, 2) and effects[0, 0].get_title(loc="left") == result.importance.index[0]
    assert list(result.effects) == [label for label in result.importance.index if label in result.effects]
    lines = result.plot("fitted", new=FRAME).get_lines()
    np.testing.assert_allclose(lines[1].get_ydata(), result.predict(FRAME).iloc[0])
    np.testing.assert_allclose(lines[0].get_ydata(), FRAME.filter(regex="^y_").iloc[0])
    assert fitted("mean ~ x1", steps=5).plot("fitted", new=FRAME).has_data()
    for what, words in (("fitted", "your own rows"), ("effects", "their own figure")):
        with pytest.raises(ModelError, match=words):
            result.plot(what, ax=effects[0, 0])
    with pytest.raises(ModelError, match="learner"):
        result.plot("surface", "height")


def test_a_model_of_columns_alone_is_explained():
    partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    model = fs.FedFunctionBoost.from_formula("num ~ age + sex", partition)
    assert type(model) is fs.FedFunctionBoost and model.sites == tuple(partition.sites)
    reported = model.explain(steps=20)
    assert reported.passes and "FedFunctionBoost.fit(steps=20)" in str(reported)
    assert repr(model).startswith("<FedFunctionBoost: num ~ age + sex")


def test_a_fit_without_noise_has_no_table_by_epsilon():
    found = fitted(steps=5)
    assert found.epsilon is None and found.delta is None
    with pytest.raises(NotAvailableError, match="the sums of this fit have no noise"):
        found.by_epsilon  # noqa: B018
