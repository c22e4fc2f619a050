"""Boosting where institutions hold different columns: the fit of one table, and what leaves."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from curve_cases import by_site, declared, simulated

import fedstat as fs
from fedstat.errors import DataWarning, DesignError, FormulaError, ModelError, PartitionError, PolicyError
from fedstat.models.boost.column_source import ColumnSource

FRAME = simulated()
HELD = {"Laboratory": ["x1", "g"], "Imaging": ["x2", "age"], "Clinic": ["y", "mean"]}
TEXT = (
    "y(t) ~ bsignal(x1, knots=5) + bsignal(x2, knots=4) + bols(g) + bbs(age, lower_bound=-60, upper_bound=80)"
)


def apart(frame=FRAME, held=HELD, **options):
    return fs.ClientPartition.from_frame(frame, columns=held, curves=declared("x1", "x2", "y"), **options)


def fitted(text=TEXT, frame=FRAME, options=None, penalty="separable", held=HELD, **settings):
    model = fs.FedFunctionBoost.from_formula(text, apart(frame, held, **(options or {})), penalty=penalty)
    return model.fit(steps=60, **settings)


def of_rows(text=TEXT, frame=FRAME, sites=3, penalty="separable", **settings):
    """The same by sites of different rows; with one of them the fit of the pooled table."""
    partition = by_site(frame.assign(site=np.arange(len(frame)) % sites), "x1", "x2", "y")
    return fs.FedFunctionBoost.from_formula(text, partition, penalty=penalty).fit(steps=60, **settings)


def without(frame, column, rows):
    """A table in which an institution lacks its entities in these rows."""
    frame = frame.copy()
    names = [name for name in frame.columns if name == column or name.startswith(f"{column}_")]
    frame.loc[rows, names] = np.nan
    return frame


@pytest.fixture(scope="module")
def result():
    return fitted()


@pytest.mark.parametrize(
    ("text", "penalty"),
    [(TEXT, "separable"), (TEXT, "fdboost"), (TEXT.replace("y(t)", "mean"), "separable")],
    ids=["curves", "curves as FDboost", "a number"],
)
def test_columns_apart_rows_apart_and_one_table_give_the_same(text, penalty):
    # The age's basis has columns without a value between -60 and 20, which are zero in every layout.
    found = fitted(text, penalty=penalty)
    for sites in (1, 3):
        same = of_rows(text, sites=sites, penalty=penalty)
        assert list(found.path["learner"]) == list(same.path["learner"])
        np.testing.assert_allclose(found.predict(FRAME), same.predict(FRAME), atol=1e-7)
        np.testing.assert_allclose(found.rsquared, same.rsquared, rtol=1e-8)
    assert "bbs(age)" in set(found.path["learner"])


def test_other_learners_are_of_one_site_each():
    held = {"Laboratory": ["x1", "g"], "Imaging": ["x2", "age"], "Clinic": ["y"]}
    text = "y(t) ~ bfpc(x1) + brandom(g) + const(bsignal(x2, knots=4)) + bsignal(x2, knots=4, by=age)"
    found, same = fitted(text, held=held), of_rows(text)
    assert list(found.path["learner"]) == list(same.path["learner"])
    np.testing.assert_allclose(found.predict(FRAME), same.predict(FRAME), atol=1e-6)
    with pytest.raises(FormulaError, match="needs columns of 'Laboratory' and 'Imaging'"):
        fitted("y(t) ~ bsignal(x1, by=age)", held=held)


def test_who_holds_which_column_and_in_which_order_is_no_matter(result):
    other = {"A": ["y", "x2", "mean"], "B": ["age", "g"], "C": ["x1"]}
    np.testing.assert_allclose(fitted(held=other).coef, result.coef, atol=1e-5)


def test_two_sites_of_which_one_has_the_response_alone():
    found = fitted("y(t) ~ x1 + x2", held={"Clinic": ["y"], "Laboratory": ["x1", "x2"]})
    np.testing.assert_allclose(found.predict(FRAME), of_rows("y(t) ~ x1 + x2").predict(FRAME), atol=1e-7)


def test_entities_that_a_site_lacks_are_left_out_and_counted():
    frame = without(without(without(FRAME, "x1", range(40)), "g", range(40)), "y", range(30, 70))
    frame = without(frame, "mean", range(30, 70))
    with pytest.warns(
        DataWarning, match=r"left out 40 entities without a record at site 'Clinic' .* and 30 .*Laboratory"
    ):
        found = fitted(frame=frame)
    assert found.nobs == len(FRAME) - 70
    assert "70 entities without a response, or missing at a site, were left out" in " ".join(
        str(found.summary()).split()
    )
    same = of_rows(frame=frame.iloc[70:])
    np.testing.assert_allclose(found.predict(FRAME), same.predict(FRAME), atol=1e-7)
    with pytest.raises(DesignError, match="drop"):
        fs.FedFunctionBoost.from_formula(TEXT, apart(frame), missing="raise")


def test_a_long_gap_of_a_curve_counts_as_missing():
    frame = FRAME.copy()
    frame.loc[:9, [f"x1_{j}" for j in range(10, 20)]] = np.nan
    with pytest.warns(DataWarning, match="10 at Laboratory"):
        assert fitted(frame=frame).nobs == len(FRAME) - 10


def test_folds_are_of_all_entities_and_add_up(result):
    found = fitted(select="cv", folds=4, seed=3)
    one, four = result._record.boosting.moments, found._record.boosting.moments
    for name in ("S", "T", "Q", "y", "yy"):
        total = getattr(four, name).sum(axis=0)
        np.testing.assert_allclose(total, getattr(one, name)[0], atol=1e-6 * np.abs(total).max())
    # By seed: the loss on the fourth fold of a path from three folds, computed from rows.
    code = np.random.default_rng(3).permutation(np.arange(len(FRAME)) % 4)
    kept, left = FRAME[code != 0], FRAME[code == 0]
    path = of_rows(frame=kept, sites=1)
    y = left.filter(regex="^y_").to_numpy()
    loss = ((y - path.predict(left).to_numpy()) ** 2).mean()
    assert found._cv[0, -1] == pytest.approx(loss, rel=1e-6)
    assert (found.refit().tests["p_value"][["bsignal(x1)", "bbs(age)"]] < 0.01).all()


def test_folds_smaller_than_the_rule_need_owners_who_allow_them_and_a_warning():
    frame, text = FRAME[:129], "mean ~ bsignal(x1, knots=20) + bsignal(x2, knots=20)"
    held = {"A": ["x1"], "B": ["x2", "mean"]}
    with pytest.raises(DesignError, match=r"over at least 152.*select=\"aicc\".*max_parameters"):
        fitted(text, frame, held=held, select="cv")
    one_site = {"policies": {"A": fs.Policy(max_parameters=1000.0, min_count=1)}}
    with pytest.raises(DesignError, match="B: 12 rows a fold"):
        fitted(text, frame, one_site, held=held, select="cv")
    loose = {"policy": fs.Policy(max_parameters=1000.0, min_count=1)}
    found = fitted(text, frame, loose, held=held, select="cv")
    code = np.random.default_rng(0).permutation(np.arange(129) % 10)
    path = of_rows_loose(text, frame[code != 3])
    left = frame[code == 3]
    loss = ((left["mean"] - path.predict(left)) ** 2).mean()
    assert found._cv[3, -1] == pytest.approx(loss, rel=1e-5)
    printed = " ".join(str(found.summary(notes="all")).split())
    assert "Sums of products of up to 49 columns were released over 12 entities" in printed
    assert "Every sum is over at least 12 entities" in printed


def of_rows_loose(text, frame):
    """A path of 60 steps on one table, whose owner allows any number of columns."""
    partition = by_site(frame.assign(site="all"), "x1", "x2", policy=fs.Policy(max_parameters=1000.0))
    return fs.FedFunctionBoost.from_formula(text, partition).fit(steps=60)


def test_a_site_solves_for_rows_of_another_only_where_owners_allow_small_folds():
    # With fewer rows than columns of its own, a site that learns X_A' X_B knows X_B.
    random = np.random.default_rng(5)
    own, other = random.normal(size=(12, 25)), random.normal(size=(12, 24))
    solved = np.linalg.lstsq(own.T, own.T @ other, rcond=None)[0]
    np.testing.assert_allclose(solved, other, atol=1e-10)
    # By the default rule there are twice as many rows as columns of both sites: many tables have these sums.
    own, other = random.normal(size=(98, 25)), random.normal(size=(98, 24))
    solved = np.linalg.lstsq(own.T, own.T @ other, rcond=None)[0]
    assert np.corrcoef(solved.ravel(), other.ravel())[0, 1] < 0.7


def test_aicc_needs_no_folds_and_agrees_with_one_table():
    text = TEXT.replace("y(t)", "mean")
    found, same = fitted(text, select="aicc"), of_rows(text, sites=1, select="aicc")
    assert found._record.boosting.moments.folds == 1
    assert found.mstop == same.mstop
    np.testing.assert_allclose(found.aicc, same.aicc, rtol=1e-7)


def test_the_dry_run_counts_rounds_and_bytes_as_the_fit_does():
    model = fs.FedFunctionBoost.from_formula(TEXT, apart(), coordinator="apart")
    reported = model.explain(select="cv", folds=2)
    found = model.fit(steps=5, select="cv", folds=2, seed=1)
    assert reported.passes and sum(n for _, (_, n, _) in reported.rounds) == 7
    sent = found.ledger.to_frame()
    for site in HELD:
        request = reported.table.query("sender == @site").groupby("step")["bytes"].sum()
        left = (
            sent[(sent["sender"] == site) & sent["step"].isin(request.index)].groupby("step")["bytes"].sum()
        )
        exact = ["stage_block", "sum_products", "share_product", "open_product"]
        assert (request[exact] == left[exact]).all()
    kinds = {kind for kinds in found.ledger.kinds_by_site().values() for kind in kinds}
    assert kinds == {"control", "schema", "presence", "sealed", "masked share", "aggregate"}
    columns = model.source._n_columns
    assert columns == 1 + 9 + 8 + 3 + 24 + 14
    assert f"sums of products of {columns} columns over 600 rows" in " ".join(str(reported).split())
    assert f"sums of products of {columns} columns over 600 rows" in " ".join(str(found.summary()).split())


def test_fewer_entities_than_the_columns_want_are_refused_and_what_passes_is_named():
    text = "y(t) ~ bsignal(x1) + bsignal(x2)"
    with pytest.raises(DesignError, match=r"20 rows a fold|knots=\d+ in every bsignal"):
        fitted(text, FRAME[:60])
    with pytest.raises(DesignError, match=r"knots=(\d+)") as refusal:
        fitted(text, FRAME[:80])
    knots = int(str(refusal.value).split("knots=")[1].split()[0])
    assert fitted(f"y(t) ~ bsignal(x1, knots={knots}) + bsignal(x2, knots={knots})", FRAME[:80]).mstop == 60
    with pytest.raises(DesignError, match="fewer folds"):
        fitted(text, FRAME, folds=20)


def test_a_site_counts_entities_for_the_columns_of_all_by_itself(monkeypatch):
    monkeypatch.setattr(ColumnSource, "_check_size", lambda *_: None)
    with pytest.raises(PolicyError, match="maximum parameters per row"):
        fitted("y(t) ~ bsignal(x1) + bsignal(x2)", FRAME[:80])


@pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")
def test_strict_sites_answer_learners_of_what_they_publish():
    frame = simulated(1500)
    published = {
        "Laboratory": {
            "x1": {"kind": "curve", "domain": [0, 1]},
            "g": {"kind": "category", "levels": ["a", "b", "c"]},
        },
        "Imaging": {
            "x2": {"kind": "curve", "domain": [0, 1]},
            "age": {"kind": "number", "range": [20, 80]},
        },
        "Clinic": {"y": {"kind": "curve", "domain": [0, 1]}, "mean": {"kind": "number", "range": [-9, 9]}},
    }
    options = {"policy": "strict", "published": published}
    text = "y(t) ~ x1 + x2 + g + bbs(age, knots=5)"
    found = fitted(text, frame, options)
    assert found.score(frame)["rsquared"] > 0.85
    outside = text.replace("knots=5", "knots=5, lower_bound=39, upper_bound=41")
    with pytest.raises(PolicyError, match="formulas"):
        fitted(outside, frame, options)
    del published["Laboratory"]["x1"]
    with pytest.raises(PolicyError, match="column 'x1' is not published"):
        fitted(text, frame, options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("y(t) ~ x1:x2", "curve"),
        (
            "y(t) ~ age:g",
            "needs column 'age' at site 'Imaging' and column 'g' at site 'Laboratory'",
        ),
        ("y(t) ~ bbs(g, lower_bound=0, upper_bound=1)", "takes a column of numbers"),
        ("y(t) ~ heigth", "no column 'heigth'"),
        ("x1(t) ~ x1", "right side too"),
        ("y(t) ~ bbs(age)", "lower_bound"),
        ("y(t) ~ bconcurrent(x2)", r"bconcurrent\(x2\) needs products"),
    ],
)
def test_what_is_no_formula_is_named(text, words):
    with pytest.raises(FormulaError, match=words):
        fs.FedFunctionBoost.from_formula(text, apart())


def test_settings_of_rows_apart_are_refused_by_name():
    with pytest.raises(ModelError, match=r"'offset' is an argument of FedFunctionBoost\.fit"):
        fs.FedFunctionBoost.from_formula(TEXT, apart(), offset="smoothed")
    model = fs.FedFunctionBoost.from_formula(TEXT, apart())
    assert type(model) is fs.FedFunctionBoost and model.layout.n == 600
    for name, value in {"masked": True, "every": 3, "aggregation": "lsa", "offset": np.zeros(12)}.items():
        with pytest.raises(ModelError, match=f"{name}: where sites hold different columns the arguments are"):
            model.fit(**{name: value})
    with pytest.raises(ModelError, match="folds: expected a number or a column of a site, received 'site'"):
        model.fit(folds="site")
    with pytest.raises(ModelError, match="select: expected one of 'cv', 'aicc', None"):
        model.fit(select="aic")


def test_a_curve_is_at_one_site():
    tables = {
        "A": FRAME.filter(regex="^x1_").assign(id=FRAME.index),
        "B": FRAME[["age"]].assign(id=FRAME.index),
    }
    partition = fs.ClientPartition.from_frames(tables, on="id", curves=declared("x1"))
    assert list(partition.curves["A"]) == ["x1"] and "curves: x1 at A" in repr(partition)
    with pytest.raises(PartitionError, match="at no site, and a curve is at one"):
        fs.ClientPartition.from_frames(tables, on="id", curves=declared("x2"))
    with pytest.raises(PartitionError, match="'A' and 'B', and a curve"):
        both = {
            **tables,
            "B": tables["A"].rename(columns=lambda n: n.replace("x1_0", "x1_99")).iloc[:, [0, -1]],
        }
        fs.ClientPartition.from_frames(both, on="id", curves=declared("x1"))


def test_single_points_of_the_response_are_interpolated():
    """Half of the curves lack one point; all stay, and the fit is that of the interpolated curves."""
    names = [name for name in FRAME if name.startswith("y_")]
    lost, rng = FRAME.copy(), np.random.default_rng(2)
    rows = rng.permutation(len(FRAME))[: len(FRAME) // 2]
    Y = lost[names].to_numpy(copy=True)
    Y[rows, rng.integers(1, len(names) - 1, len(rows))] = np.nan
    lost[names] = Y
    with pytest.warns(DataWarning, match="lack points: single points are interpolated"):
        found = fitted(frame=lost)
    expected = fitted(frame=lost.assign(**pd.DataFrame(Y, columns=names).interpolate(axis=1)))
    assert found.nobs == len(FRAME)
    np.testing.assert_allclose(found.coef, expected.coef, atol=1e-6)


def test_entities_without_a_response_are_counted_by_reason():
    """No record at the site of the response, as after keys that differ, or no complete response there."""
    rng = np.random.default_rng(1)
    z = rng.normal(size=80)
    Y = np.outer(z, np.linspace(0, 1, 12)) + 0.1 * rng.normal(size=(80, 12))
    Y[:4, 3:9] = np.nan
    curves = {"y": fs.Curve("y_*", domain=(0, 1))}
    lab = pd.DataFrame(Y, columns=[f"y_{j:02d}" for j in range(12)]).assign(id=range(80)).iloc[:70]
    frames = {"Lab": lab, "Reg": pd.DataFrame({"id": range(80), "z": z})}
    partition = fs.ClientPartition.from_frames(frames, on="id", curves=curves)
    text, time = "y(t) ~ bols(z)", "bbs(t, knots=4, df=3)"
    reasons = (
        r"10 entities without a record at site 'Lab' \(the response\) and 4 entities whose response at site"
    )
    left_out = pytest.warns(DataWarning, match=f"left out {reasons}")
    with left_out, pytest.warns(DataWarning, match="longer gap"):
        assert fs.FedFunctionBoost.from_formula(text, partition, time=time).fit(steps=5).nobs == 66
    with pytest.raises(DesignError, match=f"{reasons}.*write the key alike"):
        fs.FedFunctionBoost.from_formula(text, partition, time=time, missing="raise")
