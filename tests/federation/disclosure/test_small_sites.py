"""Own fits at small sites, and sums of functions of one column: every minimum and limit at its boundary."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from reporting import FAMILY, PENDING, STEPS, refusal_of, request, rule_against, site_of

from fedstat.errors import DescriptionError
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.column_sums import SumsOfColumn, column_sums
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.tables.published import PublishedColumn

N = 200
X = PublishedColumn("number", (1.0, 9.0))


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(FAMILIES, FAMILY, STEPS)


def site(**policy):
    return site_of(pd.DataFrame({"x": np.arange(float(N))}), published={"x": X}, **policy)


def used(n):
    return np.arange(N) < n


def function(name, column="x", **options):
    functions = (name,) if name else ()
    text = f"{name}({column})" if name else column
    return facts.FormulaFactor(text, (column,), functions, options=options)


def sums(n, *functions, products=True, weights=""):
    return facts.ColumnSums([function(name) for name in functions], used(n), products, weights)


def own_fit(n, numbers=1, *functions, weights=""):
    reply = {"reported": np.array(-1.0)}
    return facts.OwnFit(numbers, sums(n, *functions, weights=weights), lambda problem: (reply, ""))


def is_shown(where, fact):
    PENDING.clear()
    PENDING.append(fact)
    return int(request(where, "report").arrays["reported"]) == 1


@pytest.mark.parametrize("n", [0, 1, 59, 60, 61])
def test_an_own_fit_needs_the_rows_that_the_owner_wants(n):
    assert is_shown(site(min_own_rows=60), own_fit(n)) == (n >= 60)
    assert is_shown(site(), own_fit(n))


@pytest.mark.parametrize("numbers", [12, 13, 21])
def test_an_own_fit_needs_five_rows_for_each_number(numbers):
    least = max(60, 5 * numbers)
    for n in (least - 1, least):
        assert is_shown(site(min_own_rows=60), own_fit(n, numbers)) == (n >= least)


@pytest.mark.parametrize(("n", "passes"), [(9, False), (10, True), (11, True)])
def test_distinct_sums_are_at_most_half_of_the_rows(n, passes):
    """x and log(x) give five sums: x, x^2, log, log^2, x log."""
    rule = rule_against(site(max_column_sums=0.5), sums(n, "", "log"))
    assert rule == ("" if passes else "maximum sums of one column")


def test_sums_add_up_over_models_and_repetitions_are_free():
    where = site(max_column_sums=0.5)
    for _ in range(2):
        assert rule_against(where, sums(10, "", "log")) == ""
    error = refusal_of(where, sums(10, "", "sqrt"))
    assert isinstance(error, DescriptionError) and "'x'" in str(error) and "max_column_sums" in str(error)
    assert rule_against(where, sums(10, "")) == ""
    again = site(max_column_sums=0.5)
    again._data = type(again._data)(**{**_fields(again._data), "site_ledger": where.site_ledger})
    assert rule_against(again, sums(10, "", "sqrt")) == "maximum sums of one column"


def _fields(record):
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def test_other_rows_are_other_sums():
    where = site(max_column_sums=0.5)
    assert rule_against(where, sums(20, "", "log")) == ""
    assert rule_against(where, sums(19, "", products=False)) == ""
    assert rule_against(where, sums(18, "", products=False)) == ""
    assert rule_against(where, sums(17, "", products=False)) == "maximum sums of one column"


def test_an_own_fit_beyond_the_limit_is_not_shown_and_leaves_no_trace():
    where = site(min_own_rows=60, max_column_sums=0.5)
    shown = [is_shown(where, own_fit(60, 1, "", weights=f"model {k}")) for k in range(20)]
    # x and x^2 without weights once, and with those of every model: 2 + 2 k <= 30
    assert shown == [k < 14 for k in range(20)]
    before = set(where.site_ledger.records(SumsOfColumn))
    assert not is_shown(where, own_fit(60, 1, "", weights="another"))
    assert where.site_ledger.records(SumsOfColumn) == before
    assert is_shown(where, own_fit(60, 1, "", weights="model 3"))


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        ([function("")], {"x^1", "x^2"}),
        ([function(""), function("sqrt")], {"x^0.5", "x^1", "x^1.5", "x^2"}),
        ([function("poly", degree=3)], {"x^1", "x^2", "x^3", "x^4", "x^5", "x^6"}),
        ([function("scale"), function("")], {"x^1", "x^2"}),
        ([function(""), function("np.log")], {"x^1", "x^2", "log", "log*log", "x^1*log"}),
        ([function("C")], set()),
        ([function("comparison")], set()),
    ],
)
def test_the_sums_of_functions_of_a_column_are_named_once(functions, expected):
    found = column_sums(functions, {"x": X}, True, "").get("x", frozenset())
    assert {name.removeprefix("|") for name in found} == expected


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (facts.FormulaFactor("I(x + 1)", ("x",), (), written=True), "I(x + 1)"),
        (facts.FormulaFactor("log(x + 1)", ("x",), ("log",), written=True), "log(x + 1)"),
        (facts.FormulaFactor("log(sqrt(x))", ("x",), ("log", "sqrt")), "log(sqrt(x))"),
        (facts.FormulaFactor("log(scale(x))", ("x",), ("log", "scale")), "log"),
        (facts.FormulaFactor("np.exp(x)", ("x",), ("np.exp",)), "exp"),
    ],
)
@pytest.mark.parametrize("published", [{"x": X}, {}], ids=["published", "not published"])
def test_a_function_that_is_not_known_has_sums_of_its_own(factor, expected, published):
    found = column_sums([factor], published, True, "w")
    assert found == {
        "x": {f"|{expected}", f"|{expected}*{expected}", f"w|{expected}", f"w|{expected}*{expected}"}
    }


def test_a_category_and_a_product_of_columns_have_no_sums_of_one_column():
    category = {"x": PublishedColumn("category", levels=("a", "b"))}
    assert column_sums([function("")], category, True, "") == {}
    assert column_sums([facts.FormulaFactor("a * x", ("a", "x"), (), True)], {"x": X}, True, "") == {}
    curve = {"x": PublishedColumn("curve", domain=(0.0, 1.0))}
    assert column_sums([function("")], curve, True, "") == {}


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({"knots": 4}, 4 + 1 + 3),
        ({"knots": 4, "degree": 2}, 4 + 1 + 2),
        ({"knots": (3.0, 6.0)}, 2 + 1 + 3),
        ({"degree": 1}, 0 + 1 + 1),
        ({}, 0 + 1 + 3),
    ],
)
@pytest.mark.parametrize("name", ["bs", "cr", "cc", "bbs"])
def test_columns_of_a_spline_follow_from_knots_and_degree(name, options, columns):
    found = column_sums([function(name, **options)], {"x": X}, False, "")["x"]
    assert len(found) == 2 * columns


@pytest.mark.parametrize("products", [True, False])
def test_without_products_a_function_has_two_sums(products):
    found = column_sums([function(""), function("log")], {"x": X}, products, "w")["x"]
    plain = {"|x^1", "|x^2", "|log", "|log*log"}
    assert found == (plain | {f"w{one}" for one in plain} | {"w|x^1*log"} if products else plain)


def test_a_polynomial_has_the_degree_that_it_names():
    assert column_sums([function("poly")], {"x": X}, False, "") == {"x": {"|x^1", "|x^2"}}
    assert column_sums([function("poly", degree=2)], {"x": X}, False, "") == {"x": {"|x^1", "|x^2", "|x^4"}}


def test_a_spline_has_a_sum_for_every_pair_of_columns():
    spline = function("bs", knots=(3.0, 6.0), degree=3)
    k = 2 + 1 + 3
    assert len(column_sums([spline], {"x": X}, True, "")["x"]) == k + k * (k + 1) // 2


def test_a_column_of_few_values_has_no_more_sums_than_values():
    flag = {"x": PublishedColumn("number", (0.0, 1.0), levels=(0, 1))}
    where = site_of(pd.DataFrame({"x": np.arange(float(N)) % 2}), published=flag, max_column_sums=0.5)
    assert rule_against(where, sums(4, "", "sqrt")) == ""
    assert rule_against(where, sums(3, "", "sqrt")) == "maximum sums of one column"
