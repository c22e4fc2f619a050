"""Linear hypotheses against statsmodels; names with operators, brackets and commas are read."""

import re

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fedstat.errors import FedstatWarning, ModelError, NotAvailableError
from fedstat.inference.hypotheses import read_constraints, wald_test

NAMES = (
    "Intercept",
    "x",
    "x1",
    "Sex[T.male]",
    "C(Race, Treatment('White'))[T.Other White]",
    "np.log(x)",
    "x:x1",
    "age",
    "age group",
    "C(g)[T.5-10]",
    "C(g)[T.=< 5, poor]",
)


@pytest.mark.parametrize(
    ("text", "row", "value"),
    [
        ("x = 0", {"x": 1}, 0),
        ("x1 - x", {"x1": 1, "x": -1}, 0),
        ("2 * (-x1 + x) = +3 - x", {"x1": -2, "x": 3}, 3),
        ("Sex[T.male] = 2", {"Sex[T.male]": 1}, 2),
        ("2 * np.log(x) = x", {"np.log(x)": 2, "x": -1}, 0),
        (
            "C(Race, Treatment('White'))[T.Other White] = x:x1",
            {"C(Race, Treatment('White'))[T.Other White]": 1, "x:x1": -1},
            0,
        ),
        ("x1 : x + np.log( x )", {"x:x1": 1, "np.log(x)": 1}, 0),
        ("age group = `age group` / 4 + 1e-3", {"age group": 0.75}, 1e-3),
        ("C(g)[T.5-10] + C(g)[T.=< 5, poor] = -1.5e2", {"C(g)[T.5-10]": 1, "C(g)[T.=< 5, poor]": 1}, -150),
    ],
)
def test_names_are_read_as_they_are_printed(text, row, value):
    constraints = read_constraints(text, NAMES)
    assert_allclose(constraints.R, [[row.get(name, 0.0) for name in NAMES]])
    assert_allclose(constraints.q, [value])


def test_labels_are_the_constraints():
    text = "x = -1e-3, -C(g)[T.=< 5, poor] = 1"
    assert read_constraints(text, NAMES).labels == ("x = -1e-3", "-C(g)[T.=< 5, poor] = 1")
    assert read_constraints(np.eye(len(NAMES))[[2]], NAMES).labels == ("x1",)


@pytest.mark.parametrize(
    ("hypothesis", "message"),
    [
        ("x2 = 0", "'x2', which is not a coefficient; did you mean"),
        ("Sex[T.mal] = x", r"'Sex\[T.mal\]', which is not a coefficient; did you mean 'Sex\[T.male\]'"),
        ("x1:age = 0", "'x1:age', which is not"),
        ("x = 2 * (x2 - x)", "'x2', which is not"),
        ("y - x = 0", "'y', which is not a coefficient; there are: Intercept, x, x1"),
        ("np.log(x1) = 0", r"'np.log\(x1\)', which is not"),
        ("x = = 1", "expected linear constraints"),
        ("x * x1 = 1", "expected linear constraints"),
        ("1 = 2", "no row of zeros"),
        (np.eye(3), "11 columns, one per coefficient.*received shape \\(3, 3\\)"),
        ((np.eye(11)[:2], [1.0, 2.0, 3.0]), r"one value per constraint \(2\), received 3"),
    ],
)
def test_what_cannot_be_read_is_refused(hypothesis, message):
    with pytest.raises(ModelError, match=message):
        read_constraints(hypothesis, NAMES)


HYPOTHESES = {
    "string": "x1 = sex[T.male]",
    "value": "np.log(x2) = 1",
    "two": "x1 = 0.3, C(race)[T.Other White] = C(race)[T.x-1]",
    "list": ["x1 = 0.3", "2 * sex[T.male] = 1"],
    "vector": np.eye(7)[3],
    "matrix": np.eye(7)[1:3],
    "pair": (np.eye(7)[1:3], np.array([0.1, -0.2])),
}


@pytest.mark.parametrize("hypothesis", HYPOTHESES.values(), ids=HYPOTHESES)
def test_t_test_equals_statsmodels(result, reference, hypothesis):
    ours, theirs = result.t_test(hypothesis), reference.t_test(hypothesis)
    assert_allclose(ours.effect, theirs.effect, rtol=1e-12)
    assert_allclose(np.squeeze(ours.sd), np.squeeze(theirs.sd), rtol=1e-12)
    assert_allclose(np.squeeze(ours.statistic), np.squeeze(theirs.statistic), rtol=1e-12)
    assert_allclose(ours.pvalue, theirs.pvalue, rtol=1e-11)
    assert_allclose(ours.conf_int(), theirs.conf_int().reshape(-1, 2), rtol=1e-12)
    assert len(ours.summary_frame()) == len(ours.c_names)


@pytest.mark.parametrize("hypothesis", HYPOTHESES.values(), ids=HYPOTHESES)
def test_wald_and_f_test_equal_statsmodels(result, reference, hypothesis):
    for ours, theirs in (
        (result.wald_test(hypothesis), reference.wald_test(hypothesis, use_f=False, scalar=True)),
        (result.f_test(hypothesis), reference.f_test(hypothesis)),
    ):
        assert_allclose(ours.statistic, theirs.statistic, rtol=1e-11)
        assert_allclose(ours.pvalue, theirs.pvalue, rtol=1e-10)
        assert ours.df_denom == theirs.df_denom


def test_wald_test_terms_equals_statsmodels(result, reference):
    for options in ({}, {"skip_single": True}, {"combine_terms": ["sex", "race"]}):
        ours = result.wald_test_terms(**options).table
        theirs = reference.wald_test_terms(scalar=True, **options).table
        assert sorted(ours.index) == sorted(theirs.index)
        in_order = [table.reset_index().sort_values(["index", "df_constraint"]) for table in (ours, theirs)]
        assert_allclose(*(table.iloc[:, 1:].astype(float) for table in in_order), rtol=1e-10)


def test_wald_test_terms_prints_and_refuses_an_unknown_text(result):
    assert "np.log(x2)" in str(result.wald_test_terms())
    with pytest.raises(ModelError, match="no term of the model contains 'age'"):
        result.wald_test_terms(combine_terms=["age"])


def test_repeated_constraints_count_once(result):
    once = result.wald_test("x1 = 0")
    with pytest.warns(FedstatWarning, match="2 constraints x1 = 0; 2 \\* x1 = 0 have a covariance of rank 1"):
        twice = result.wald_test("x1 = 0, 2 * x1 = 0")
    assert_allclose(twice.pvalue, once.pvalue)


def test_no_variance_is_no_test():
    constraints = read_constraints("a = 0", ("a", "b"))
    assert_array_equal(constraints.R, [[1, 0]])
    with pytest.raises(NotAvailableError, match="no variance"):
        wald_test(np.ones(2), np.zeros((2, 2)), constraints)


def test_tests_print_few_digits_at_a_prompt(result):
    for test in (
        result.t_test("x1 = 0"),
        result.wald_test("x1 = 0"),
        result.f_test("x1 = 0"),
        result.wald_test_terms(),
    ):
        assert repr(test) == str(test)
        assert not re.search(r"\d\.\d{6}|class", repr(test))
    assert repr(result.wald_test("x1 = 0", use_f=False)).splitlines()[0] == "Wald test (chi-squared)"
