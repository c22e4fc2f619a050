"""One institution's design matrix, against formulaic on the same table."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import formulaic
import numpy as np
import pandas as pd
import pytest

from fedstat.errors import DesignError, FormulaError
from fedstat.federation.design.block import CodedBlock, apply_block, build_block
from fedstat.federation.design.coding import BlockSpec, build_response
from fedstat.federation.design.formula.parse import SiteTerms, parse_formula, parse_pooled_formula
from fedstat.spline_names import count_from_zero

N = 400


@pytest.fixture
def table() -> pd.DataFrame:
    rng = np.random.default_rng(1)
    return pd.DataFrame(
        {
            "x": rng.normal(size=N),
            "z": rng.exponential(size=N) + 0.1,
            "k": rng.integers(1, 4, N),
            "s": rng.choice(["a", "b", "c"], N),
            "flag": rng.random(N) < 0.4,
            "odd name": rng.normal(size=N),
            "c": pd.Categorical(rng.choice(["lo", "mid", "hi"], N), categories=["lo", "mid", "hi"]),
        }
    )


def terms_of(right: str, table: pd.DataFrame) -> SiteTerms:
    columns = {"Lab": list(table.columns), "Other": ["outcome"]}
    return parse_formula(f"outcome ~ {right}", columns).sites[0]


def build(right: str, table: pd.DataFrame, **options: Any) -> CodedBlock:
    return build_block(table, terms_of(right, table), **options)


def refused(right: str, table: pd.DataFrame, *parts: str, **options: Any) -> None:
    with pytest.raises(DesignError) as error:
        build(right, table, **options)
    for part in (*parts, "'Lab'"):
        assert part in str(error.value), str(error.value)


RIGHT_SIDES = [
    "x",
    "x + z + k",
    "s",
    "flag",
    "x + s + c",
    "x*s",
    "s:c",
    "s*c*x",
    "flag:s",
    "C(k)",
    "C(s, Treatment('c'))*log(z)",
    "C(c, Treatment(reference='hi')) + s",
    "C(k, Treatment(2)):x",
    "scale(x) + center(z)",
    "scale(x, scale=False) + scale(z, center=False, ddof=0)",
    "scale(log(z + 1)):s",
    "log(scale(z) + 10)",
    "bs(x, df=4)",
    "bs(log(z), df=5, degree=2)*s",
    "bs(x, knots=(-0.5, 0.5), lower_bound=-5, upper_bound=5)",
    "poly(x, 2) + poly(z, 3, raw=True)",
    "poly(scale(x), 3):flag",
    "np.log(z) + np.exp(x / 2) + np.sqrt(z ** 2 + 1) - k",
    "`odd name` + log(`odd name` + 10)",
    "Q('odd name')",
    "(x + s + c)^2",
    "0 + s + c",
    "x + s - 1",
    "-1 + s:x",
]


@pytest.mark.parametrize("right", RIGHT_SIDES)
def test_matrix_is_that_of_formulaic_and_survives_json(right: str, table: pd.DataFrame) -> None:
    formula = parse_pooled_formula(f"y ~ {right}", ["y", *table.columns])
    block = build_block(table, formula.sites[0], intercept=formula.intercept)
    factors = table.assign(flag=table["flag"].astype("category"))
    oracle = formulaic.model_matrix(right, factors)
    names = [name for name in oracle.columns if name != "Intercept"]
    assert block.spec.names == count_from_zero(names)
    np.testing.assert_allclose(block.X, oracle[names].to_numpy(float), rtol=0, atol=1e-12)
    assert block.X.flags.c_contiguous
    assert block.X.dtype == np.float64

    spec = BlockSpec.from_json(block.spec.to_json())
    assert spec == block.spec
    new = table.sample(60, random_state=3)
    new = new[(new["x"] < new["x"].max()) & (new["s"] != "b")]
    oracle_new = oracle.model_spec.get_model_matrix(factors.loc[new.index])
    np.testing.assert_allclose(
        apply_block(new, spec).X, oracle_new[names].to_numpy(float), rtol=0, atol=1e-12
    )


def test_each_design_column_knows_its_term(table: pd.DataFrame) -> None:
    spec = build("x*s + bs(z, df=4)", table).spec
    assert dict(zip(spec.names, spec.term_names, strict=True)) == {
        "x": "x",
        "s[T.b]": "s",
        "s[T.c]": "s",
        **{f"bs(z, df=4)[{i}]": "bs(z, df=4)" for i in range(4)},
        "x:s[T.b]": "x:s",
        "x:s[T.c]": "x:s",
    }


def test_levels_with_parentheses_and_quotes(table: pd.DataFrame) -> None:
    odd = table.assign(s=table["s"].map({"a": "yes (now)", "b": "it's", "c": '"no": `x`'}))
    spec = build("C(s, Treatment('yes (now)'))", odd).spec
    assert [name.split("[T.")[1] for name in spec.names] == ['"no": `x`]', "it's]"]
    assert BlockSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("dtype", ["object", "str", "string", "category"])
def test_text_types_code_alike(dtype: str, table: pd.DataFrame) -> None:
    expected = build("s", table)
    missing = table.assign(s=table["s"].astype(dtype))
    missing.loc[:9, "s"] = None
    block = build("s", missing)
    assert block.spec.names == expected.spec.names
    assert block.spec.levels == {"s": ("a", "b", "c")}
    np.testing.assert_array_equal(block.X, expected.X[10:])


@pytest.mark.parametrize(
    ("column", "dtype"),
    [
        ("k", "Int64"),
        ("x", "Float64"),
        ("flag", "boolean"),
        ("flag", "object"),
        ("k", "object"),
        ("k", "int8"),
    ],
)
def test_nullable_types_code_alike(column: str, dtype: str, table: pd.DataFrame) -> None:
    expected = build(column, table)
    frame = table.assign(**{column: table[column].astype(dtype)})
    if dtype != "int8":
        frame.loc[:4, column] = pd.NA
    block = build(column, frame)
    assert block.spec.names == expected.spec.names
    np.testing.assert_allclose(block.X, expected.X[~frame[column].isna().to_numpy()])


def test_category_keeps_its_order_and_drops_unused_levels(table: pd.DataFrame) -> None:
    wide = table.assign(c=table["c"].cat.add_categories(["never"]))
    spec = build("c", wide).spec
    assert spec.levels == {"c": ("lo", "mid", "hi")}
    assert spec.names == ("c[T.mid]", "c[T.hi]")


def test_cut_intervals_are_levels(table: pd.DataFrame) -> None:
    cut = table.assign(c=pd.cut(table["x"], [-9, -0.5, 0.5, 9]))
    spec = build("c", cut).spec
    assert spec.levels == {"c": ("(-9.0, -0.5]", "(-0.5, 0.5]", "(0.5, 9.0]")}
    np.testing.assert_array_equal(apply_block(cut, BlockSpec.from_json(spec.to_json())).X, build("c", cut).X)


def test_whole_and_partly_missing_rows(table: pd.DataFrame) -> None:
    table = table.astype({"k": float})
    table.loc[:19, ["x", "z", "k"]] = np.nan
    table.loc[20:24, "x"] = np.nan
    block = build("x + z + k", table)
    assert block.n_partial == 5
    np.testing.assert_array_equal(block.seen, np.arange(N) >= 25)
    np.testing.assert_array_equal(block.X, table.loc[25:, ["x", "z", "k"]].to_numpy())
    refused("x + z", table, "5 entities", "'x' (5)", "partial='drop'", partial="error")


def test_partial_mean_fills_with_the_mean_of_the_used_rows(table: pd.DataFrame) -> None:
    table.loc[:4, "x"] = np.nan
    table.loc[5:7, ["x", "z"]] = np.nan
    use = np.arange(N) < 300
    block = build("x + z", table, partial="mean", use=use)
    assert block.n_partial == 5
    assert block.X.shape == (297, 2)
    np.testing.assert_allclose(block.X[:5, 0], table.loc[:299, "x"].mean())
    again = apply_block(table[:20], BlockSpec.from_json(block.spec.to_json()), partial="mean")
    np.testing.assert_allclose(again.X[:5, 0], table.loc[:299, "x"].mean())
    with pytest.raises(DesignError, match="needs the means"):
        apply_block(table[:20], build("x + z", table).spec, partial="mean")
    table.loc[0, "x"], table.loc[0, "s"] = 1.0, None
    refused("x + s", table, "'s'", "1 entities", "partial='drop'", partial="mean")


def test_rows_out_of_use_have_no_influence(table: pd.DataFrame) -> None:
    use = np.arange(N) < 250
    table.loc[250, "x"] = np.inf
    table.loc[251, "s"] = "rare"
    table.loc[252, "z"] = 1e9
    table.loc[253, "z"] = np.nan
    right = "scale(x) + s + bs(z, df=4)"
    block = build(right, table, use=use)
    np.testing.assert_array_equal(block.X, build(right, table[:250]).X)
    np.testing.assert_array_equal(block.seen, use)
    assert block.n_partial == 0
    assert block.spec == build(right, table[:250]).spec


def test_applied_rows_may_be_unseen(table: pd.DataFrame) -> None:
    spec = build("x + s + bs(z, df=4)", table).spec
    block = apply_block(table[:5].assign(x=np.nan, s=None, z=np.nan), spec)
    assert block.X.shape == (0, 7)
    assert not block.seen.any()


def test_new_rows_with_an_unknown_level(table: pd.DataFrame) -> None:
    spec = build("s", table).spec
    with pytest.raises(DesignError) as error:
        apply_block(table.assign(s=np.where(np.arange(N) < 3, "new", "a")), spec, site="Clinic")
    for part in ("'s'", "'Clinic'", "3 of 400", "'new'"):
        assert part in str(error.value)


def test_numbers_in_a_category_are_not_quoted(table: pd.DataFrame) -> None:
    spec = build("s", table).spec
    with pytest.raises(DesignError, match="2 of 2 entities have other numbers, not known") as error:
        apply_block(pd.DataFrame({"s": [3.25, 4.75]}), spec)
    assert "3.25" not in str(error.value)


def test_new_rows_that_do_not_fit(table: pd.DataFrame) -> None:
    spec = build("x + bs(z, df=4)", table).spec
    with pytest.raises(DesignError, match=r"1 of 400 values lie outside .* extrapolation='clip'"):
        apply_block(table.assign(z=table["z"].where(table.index > 0, 1e4)), spec)
    with pytest.raises(DesignError, match=r"'x' at site 'Lab': expected numbers .* found categories"):
        apply_block(table.assign(x="a"), spec)
    with pytest.raises(DesignError, match="'x' at site 'Lab': expected once, not in its table"):
        apply_block(table.drop(columns="x"), spec)


def test_values_that_are_not_finite(table: pd.DataFrame) -> None:
    table.loc[:2, "x"] = np.inf
    table.loc[:6, "z"] = 0
    refused("x", table, "'x'", "3 infinite")
    refused("log(z)", table, "'log(z)'", "7 of 400", "log(x + 1)")
    refused("exp(1 / z)", table, "7 of 400")
    refused("scale(log(z))", table, "'scale(log(z))'", "7 of 400")


def test_constant_columns(table: pd.DataFrame) -> None:
    refused("one", table.assign(one=7.5), "'one'", "constant")
    refused("one", table.assign(one="all"), "'one'", "constant")
    refused("sqrt(x**2) + log(2 + x - x)", table, "log(2 + x - x)", "constant")
    refused("flag", table.assign(flag=True), "'flag'", "constant")
    assert build("one + x", table.assign(one=7.5), intercept=False).X.shape == (N, 2)


def test_rare_levels(table: pd.DataFrame) -> None:
    table.loc[:3, "s"] = "rare"
    table.loc[4:5, "s"] = "rarer"
    refused("s", table, "'s'", "'rare' (4)", "'rarer' (2)", "fewer than 5", "Merge", "leave their")
    assert build("s", table, min_count=2).spec.names == ("s[T.b]", "s[T.c]", "s[T.rare]", "s[T.rarer]")


def test_identifiers_are_not_listed(table: pd.DataFrame) -> None:
    named = table.assign(s=[f"person {i}" for i in range(N)])
    with pytest.raises(DesignError) as error:
        build("s", named)
    assert "400 levels" in str(error.value)
    assert "person" not in str(error.value)


def test_collinear_columns_are_named(table: pd.DataFrame) -> None:
    table["total"] = 2 * table["x"] - 3 * table["z"] + 1
    table["copy"] = table["k"] * 1000.0
    refused("x + z + `odd name` + total", table, "'total' follows exactly from 'x', 'z'.")
    refused("x + z + k + total + copy", table, "'copy' follows exactly from 'k'", "from 'x', 'z'")
    refused("C(k) + k", table, "'k' follows exactly from 'C(k)[T.2]', 'C(k)[T.3]'")
    nearly = table.assign(total=table["total"] + 1e-4 * table["odd name"])
    assert build("x + z + total", nearly).X.shape == (N, 3)


def test_more_columns_than_entities(table: pd.DataFrame) -> None:
    refused("x + z + k", table[:3], "3 design columns", "3 entities")


def test_reference_must_be_a_level(table: pd.DataFrame) -> None:
    refused("C(s, Treatment('d'))", table, "'s'", "'d'", "'a', 'b', 'c'")


@pytest.mark.parametrize(
    "values",
    [
        pd.date_range("2020-01-01", periods=N),
        pd.timedelta_range("1D", periods=N),
        [1, "a"] * (N // 2),
        np.arange(N) * 1j,
    ],
    ids=["date", "duration", "mixed", "complex"],
)
def test_unsupported_types(values: object, table: pd.DataFrame) -> None:
    refused("t", table.assign(t=values), "'t'", "is of type", "Convert")


def test_no_seen_rows(table: pd.DataFrame) -> None:
    refused("x", table.assign(x=np.nan), "no entity", "'x'")
    refused("x", table, "no entity", use=np.zeros(N, dtype=bool))


def test_text_in_a_transform(table: pd.DataFrame) -> None:
    refused("log(s)", table, "'log(s)'", "'s' holds categories")


def test_options_that_do_not_fit(table: pd.DataFrame) -> None:
    refused("bs(x, df=1)", table, "'bs(x, df=1)'", "df")


def test_arguments(table: pd.DataFrame) -> None:
    with pytest.raises(DesignError, match="partial: expected one of"):
        build("x", table, partial="ignore")
    with pytest.raises(DesignError, match="one value per row"):
        build("x", table, use=np.ones(3, dtype=bool))


def test_a_forged_contribution_is_refused(table: pd.DataFrame) -> None:
    for text in ("x.__class__", "log(open('f'))", "x + z", "{x}", "1", "."):
        with pytest.raises(FormulaError):
            build_block(table, SiteTerms("Lab", (text,), ("x",)))
    with pytest.raises(FormulaError, match="other columns"):
        build_block(table, SiteTerms("Lab", ("x",), ("x", "z")))


@pytest.mark.parametrize(
    "change",
    [
        {"terms": ["log(open('f'))"]},
        {"terms": ["x"]},
        {"terms": "x"},
        {"kinds": {"x": "code", "s": "category"}},
        {"levels": {}},
        {"levels": {"s": [["a"]]}},
        {"state": {}},
        {"state": {"scale(x)": {}}},
        {"state": {"scale(x)": {"center": "0", "scale": 1.0, "ddof": 1}}},
        {"intercept": 1},
        {"names": ["x"]},
        {"extra": 1},
    ],
    ids=lambda change: json.dumps(change)[:50],
)
def test_a_forged_specification_is_refused(change: dict[str, object], table: pd.DataFrame) -> None:
    values = json.loads(build("scale(x) + s", table).spec.to_json())
    with pytest.raises((FormulaError, DesignError)):
        BlockSpec.from_json(json.dumps(values | change))
    assert BlockSpec.from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{}", "{", "[" * 100_000])
def test_what_is_no_specification_is_refused(text: str) -> None:
    with pytest.raises(DesignError, match="BlockSpec"):
        BlockSpec.from_json(text)


def test_specifications_are_checked_where_they_are_applied(table: pd.DataFrame) -> None:
    spec = build("x", table).spec
    with pytest.raises(FormulaError):
        apply_block(table, replace(spec, terms=("x.__class__",)))


def response(text: str, table: pd.DataFrame) -> np.ndarray[Any, Any]:
    formula = parse_pooled_formula(f"{text} ~ other", [*table.columns, "other"])
    return build_response(table, formula.response, formula.response_columns, "Clinic")


def test_response_is_missing_where_a_column_is(table: pd.DataFrame) -> None:
    table.loc[:4, "z"] = np.nan
    expected = np.log(table["z"].to_numpy() + 1) / 2
    np.testing.assert_allclose(response("log(z + 1) / 2", table), expected)
    np.testing.assert_array_equal(response("z", table), table["z"])


def test_response_zero_and_one(table: pd.DataFrame) -> None:
    table = table.assign(b=table["flag"].astype("boolean"), o=table["flag"].astype(object))
    table.loc[:4, ["x", "b", "o", "s"]] = None
    unknown = np.arange(N) < 5
    for text, truth in {
        "x > 0": table["x"] > 0,
        "x != 0": table["x"] != 0,
        "k <= x + 1": table["k"] <= table["x"] + 1,
        "s == 'b'": table["s"] == "b",
        "s != 'b'": table["s"] != "b",
        "b": table["flag"],
        "o": table["flag"],
    }.items():
        expected = np.where(unknown, np.nan, truth.to_numpy(dtype=object).astype(float))
        np.testing.assert_array_equal(response(text, table), expected, err_msg=text)
    np.testing.assert_array_equal(response("flag", table), table["flag"])


def test_standardized_response_ignores_missing(table: pd.DataFrame) -> None:
    table.loc[:4, "z"] = np.nan
    expected = (table["z"] - table["z"].mean()) / table["z"].std()
    np.testing.assert_allclose(response("scale(z)", table), expected)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("s", ["'s'", "categories", "s == 'level'"]),
        ("c", ["'c'", "categories"]),
        ("log(z)", ["'log(z)'", "1 of 400"]),
        ("x", ["'x'", "1 infinite"]),
        ("k == 'b'", ["'k'", "numbers"]),
    ],
)
def test_response_that_cannot_be_used(text: str, parts: list[str], table: pd.DataFrame) -> None:
    table.loc[0, "x"], table.loc[0, "z"] = np.inf, 0.0
    with pytest.raises(DesignError) as error:
        response(text, table)
    for part in (*parts, "'Clinic'"):
        assert part in str(error.value), str(error.value)


def test_forged_response_is_refused(table: pd.DataFrame) -> None:
    for text in ("open('f')", "x.__class__", "z"):
        with pytest.raises(FormulaError):
            build_response(table, text, ("x",), "Clinic")


def test_speed() -> None:
    rng = np.random.default_rng(0)
    n = 166_207
    frame = pd.DataFrame({f"x{i}": rng.normal(size=n) for i in range(12)})
    terms = SiteTerms("Lab", tuple(frame.columns), tuple(frame.columns))
    seconds = []
    for _ in range(3):
        start = time.process_time()
        build_block(frame, terms)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1.0
