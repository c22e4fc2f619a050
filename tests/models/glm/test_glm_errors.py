"""Errors in data or arguments are named: site, column, remedy, and no value of the data."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from pooled import fit_pooled
from three_sites import FRAME, N, assert_pooled, by_site, error_of, model

import fedstat as fs
from fedstat.errors import DataWarning, DesignError, FedstatError
from fedstat.federation.tables.table import ParquetTable

F = sm.families


# -- levels ------------------------------------------------------------------------------------------


def differing():
    frame = FRAME.assign(g=np.random.default_rng(5).choice(list("abcd"), N))
    frame.loc[(frame["site"] == "A") & (frame["g"] == "d"), "g"] = "b"
    frame.loc[(frame["site"] == "B") & (frame["g"] == "a"), "g"] = "b"
    frame["k"] = np.random.default_rng(6).choice([1, 2, 3], N)
    frame["flag"] = frame["z"] > 0.3
    return frame


DIFFERING = differing()


@pytest.mark.parametrize(
    "right", ["x + g", "x + C(g, Treatment('a'))", "x + C(g, Treatment('d'))", "0 + g", "x:g"]
)
def test_levels_that_a_site_never_saw_count_as_in_the_stacked_table(right):
    assert_pooled(model(f"y ~ {right}", DIFFERING).fit(), f"y ~ {right}", DIFFERING)


def test_a_factor_that_is_constant_at_a_site_counts_as_in_the_stacked_table():
    frame = DIFFERING.assign(g=DIFFERING["g"].where(DIFFERING["site"] != "C", "b"))
    assert_pooled(model("y ~ x + g", frame).fit(), "y ~ x + g", frame)


def changed(column, change):
    tables = by_site(DIFFERING)
    tables["B"] = tables["B"].assign(**{column: change(tables["B"][column])})
    return tables


@pytest.mark.parametrize(
    ("right", "column", "change"),
    [
        ("C(k)", "k", lambda s: s.astype(float)),
        ("C(k)", "k", lambda s: s.astype("Int64")),
        ("flag", "flag", lambda s: s.astype("boolean")),
        ("flag", "flag", lambda s: s.astype(object)),
        ("g", "g", lambda s: s.astype("category")),
        ("g", "g", lambda s: pd.Categorical(s, categories=list("dcba"), ordered=True)),
        ("g", "g", lambda s: s.astype("string")),
    ],
)
def test_storage_of_levels_does_not_matter(right, column, change):
    ours = model(f"y ~ {right}", changed(column, change)).fit()
    theirs = fit_pooled(f"y ~ {right}", DIFFERING, F.Binomial())
    np.testing.assert_allclose(ours.params, theirs.params, rtol=1e-6)


def test_an_order_that_all_sites_declare_is_kept_and_another_is_sorted():
    tables = {s: t.assign(g=pd.Categorical(t["g"], list("dcba"))) for s, t in by_site(DIFFERING).items()}
    assert list(model("y ~ g", tables).fit().params.index)[1:] == ["g[T.c]", "g[T.b]", "g[T.a]"]
    tables["B"]["g"] = pd.Categorical(tables["B"]["g"].astype(str), list("bdca"))
    assert list(model("y ~ g", tables).fit().params.index)[1:] == ["g[T.b]", "g[T.c]", "g[T.d]"]


@pytest.mark.parametrize(
    ("column", "change", "expected"),
    [
        (
            "x",
            lambda s: s.astype(str),
            "column 'x' holds numbers at site 'A' and text at site 'B'",
        ),
        (
            "k",
            lambda s: s.astype(str),
            "column 'k' holds numbers at site 'A' and text at site 'B'",
        ),
        (
            "flag",
            lambda s: s.astype(int),
            "'flag' holds true/false at site 'A' and numbers at site 'B'",
        ),
        (
            "k",
            lambda s: s.astype("category"),
            "'k' holds numbers at site 'A' and numbers as categories",
        ),
    ],
)
def test_other_kinds_of_values_at_one_site_are_named(column, change, expected):
    message = str(error_of(f"y ~ {column}", changed(column, change)))
    assert expected in message and "Convert it at one of them" in message


def test_a_level_that_is_rare_over_all_sites_is_named_with_its_count():
    frame = DIFFERING.copy()
    frame.loc[frame.index[:3], "g"] = "rare"
    message = str(error_of("y ~ g", frame))
    assert "column 'g': level 'rare' (3) with fewer than 5 rows over all sites, of 5 levels" in message
    assert "Merge them with another level (the largest is '" in message


def test_a_level_that_is_rare_at_a_site_is_counted_and_not_named():
    frame = DIFFERING.copy()
    frame.loc[frame.index[[0, 1, 200, 201, 400, 401]], "g"] = "rare"
    message = str(error_of("y ~ g", frame))
    assert message.startswith(
        "A: its policy (minimum rows per level) requires at least 3 rows of every level; 1 of"
    )
    assert "column 'g'" in message and "Merge them" in message and "'rare'" not in message


def test_identifiers_and_dates_are_named():
    frame = FRAME.assign(id=[f"p{i}" for i in range(N)], day=pd.Timestamp("2020-01-01"))
    frame["day"] += pd.to_timedelta(np.arange(N), unit="D")
    assert "'id' have fewer. It looks like an identifier" in str(error_of("y ~ x + id", frame))
    assert "column 'day' at site 'A' is of type datetime64" in str(error_of("y ~ x + day", frame))


def test_a_reference_that_is_no_level_is_named_with_the_levels():
    message = str(error_of("y ~ C(g, Treatment('q'))", DIFFERING))
    assert (
        message == "column 'g': the reference 'q' is not a level; expected one of levels 'a', 'b', 'c', 'd'."
    )


@pytest.mark.parametrize(
    ("formula", "roles", "role"),
    [
        ("y ~ x + z", {}, "formula"),
        ("x ~ z", {}, "formula"),
        ("y ~ z + offset(2 * x)", {}, "formula"),
        ("y ~ z", {"offset": "x"}, "offset"),
        ("y ~ z", {"freq_weights": "x"}, "freq_weights"),
        ("y ~ z", {"labels": ["x"]}, "labels"),
    ],
)
def test_a_column_that_one_site_lacks_is_named_with_the_site(formula, roles, role):
    tables = by_site(FRAME)
    tables["C"] = tables["C"].drop(columns="x")
    message = str(error_of(formula, tables, **roles))
    assert message.startswith(f"{role}: column 'x' is not at 'C'. Add it there")
    with pytest.raises(FedstatError, match="there is no column 'X'"):
        model("y ~ X", tables)
    assert list(model("y ~ .", tables).fit().params.index)[1:] == ["z", "g[T.b]", "g[T.c]", "count"]


# -- weights, exposure, response ---------------------------------------------------------------------


def wrong():
    frame = FRAME.assign(text="u", negative=-FRAME["count"], weight=1.0, days=2.0, half=0.5, events=0)
    frame.loc[frame.index[::2], ["text", "half", "days"]] = ["v", 0.2, 3.0]
    frame.loc[frame.index[:4], "weight"] = -1.0
    frame.loc[frame.index[[0, 200]], "days"] = 0.0
    frame.loc[frame.index[0], ["events", "z"]] = [3, np.nan]
    return frame


WRONG = wrong()
POISSON = F.Poisson()
ROLES = {
    "unknown weight": (
        "count ~ x",
        POISSON,
        {"freq_weights": "no"},
        "freq_weights: there is no column 'no'",
    ),
    "unknown offset": ("count ~ x", POISSON, {"offset": "no"}, "offset: there is no column 'no'"),
    "unknown label": (
        "count ~ x",
        POISSON,
        {"labels": ["no"]},
        "labels: there is no column 'no'",
    ),
    "labels as text": ("count ~ x", POISSON, {"labels": "text"}, r"labels: .*write \['text'\]"),
    "values": (
        "count ~ x",
        POISSON,
        {"freq_weights": WRONG["weight"]},
        "freq_weights: .*received pandas Series",
    ),
    "number": ("count ~ x", POISSON, {"offset": 3}, "offset: .*the name of a column, received 3"),
    "text weight": (
        "count ~ x",
        POISSON,
        {"freq_weights": "text"},
        "'text' at site 'A' holds categories",
    ),
    "text offset": ("count ~ x", POISSON, {"offset": "text"}, "'text' at site 'A' holds categories"),
    "negative": (
        "count ~ x",
        POISSON,
        {"freq_weights": "weight"},
        "'weight' at site 'A': 4 weights are",
    ),
    "variance": (
        "count ~ x",
        POISSON,
        {"var_weights": "weight"},
        "'weight' at site 'A': 4 weights are",
    ),
    "exposure": (
        "count ~ x",
        POISSON,
        {"exposure": "days"},
        "'days' at site 'A': 1 exposures are not pos",
    ),
    "log of it": (
        "count ~ x + offset(log(days))",
        POISSON,
        {},
        r"log\(days\).*at site 'A'.*for 1 of 200",
    ),
    "logit": ("y ~ x", F.Binomial(), {"exposure": "days"}, "exposure: it needs a log link"),
    "response": (
        "count ~ x",
        POISSON,
        {"freq_weights": "count"},
        "'count' is the response",
    ),
    "domain": (
        "negative ~ x",
        POISSON,
        {},
        "site 'A': .* response that is negative .*'negative'",
    ),
    "probability": (
        "count ~ x",
        F.Binomial(),
        {},
        "site 'A': .* response outside 0 to 1 .*'count'",
    ),
    "gamma": ("count ~ x", F.Gamma(), {}, "site 'A': .* rows with a response that is not positive .*'count'"),
    "all equal": (
        "events ~ x + z",
        POISSON,
        {},
        "'events' is the same in all rows of all sites",
    ),
    "on both sides": (
        "y ~ x + y",
        F.Binomial(),
        {},
        "'y' is in the response and also on",
    ),
    "centered": ("center(x) ~ z", F.Gaussian(), {}, "on the left side needs the rows of all sites"),
    "text response": ("text ~ x", F.Binomial(), {}, "'text' at site 'A' holds categories.*== 'level'"),
    "counts": ("cbind(count, negative) ~ x", F.Binomial(), {}, "at site 'A': a count is negative for"),
    "family": ("y ~ x", "binomal", {}, "family: expected one of .*, received 'binomal'"),
    "missing": ("y ~ x", F.Binomial(), {"missing": "no"}, 'missing: expected "drop" or "raise", received'),
    "raise": ("y ~ x + z", F.Binomial(), {"missing": "raise"}, "1 at 'A'; pass missing=\"drop\""),
    "spline": ("y ~ bs(x, df=4, knots=(1, 2))", F.Binomial(), {}, r"needs df=\.\.\. alone, or knots="),
    "short spline": ("y ~ bs(x, df=2)", F.Binomial(), {}, r"needs more degrees of freedom \(df\)"),
    "outside the spline": (
        "y ~ bs(x, knots=(0,), lower_bound=-1, upper_bound=1)",
        F.Binomial(),
        {},
        "at site 'A': .* of 200 values lie outside",
    ),
    "polynomial": ("y ~ poly(half, 3)", F.Binomial(), {}, r"'poly\(half, 3\)': .*too few distinct values"),
    "logarithm": (
        "y ~ log(x)",
        F.Binomial(),
        {},
        r"'log\(x\)' at site 'A': log\(\) gives .*not finite",
    ),
}


@pytest.mark.parametrize("case", ROLES)
def test_wrong_arguments_and_columns_are_named(case):
    formula, family, roles, expected = ROLES[case]
    message = str(error_of(formula, WRONG, family, **roles))
    assert re.search(expected, message, flags=re.DOTALL)


def test_rows_of_frequency_weight_zero_are_no_missing_rows():
    frame = FRAME.assign(w=np.tile([0.0, 1.0, 2.0], N // 3))
    result = model("y ~ x", frame, freq_weights="w", missing="raise").fit()
    assert_pooled(result, "y ~ x", frame, freq="w")
    assert result.nobs == (frame["w"] > 0).sum()


def test_infinite_values_are_counted():
    frame = FRAME.copy()
    frame.loc[frame.index[[3, 5, 250]], "x"] = [np.inf, -np.inf, np.inf]
    message = str(error_of("y ~ x", frame))
    assert "site 'A', column 'x': 2 infinite values" in message and "site 'B', column 'x': 1" in message


@pytest.mark.parametrize("column", ["x", "g", "y"])
def test_a_site_without_a_complete_row_is_named(column):
    tables = by_site(FRAME)
    tables["B"][column] = pd.Series([None] * 200, dtype=object)
    message = str(error_of("y ~ x + g", tables))
    assert message.startswith("site 'B' has no row with all of 'y', 'x', 'g' (of 200 rows): ")


def test_a_response_that_is_equal_after_rows_were_dropped_is_reported():
    frame = FRAME.assign(y=0)
    frame.loc[frame.index[:50], ["y", "x"]] = [1, np.nan]
    assert "the response 'y' is the same in all rows of all sites" in str(error_of("y ~ x", frame))


def test_data_that_a_formula_names_are_never_quoted():
    secret = 918273.5
    frame = FRAME.assign(x=FRAME["x"].where(FRAME.index != 7, secret), w=FRAME["z"] ** 2)
    frame.loc[frame.index[7], "w"] = -secret
    for formula, roles in (
        ("y ~ log(x)", {}),
        ("y ~ bs(x, knots=(0,), lower_bound=-9, upper_bound=9)", {}),
        ("y ~ C(x)", {}),
        ("y ~ z", {"freq_weights": "w"}),
        ("x ~ z", {}),
    ):
        assert "918273" not in str(error_of(formula, frame, **roles))


# -- streams -----------------------------------------------------------------------------------------


def test_a_streamed_site_gives_the_estimate_of_one_in_memory(tmp_path):
    """With levels, transforms, missing values, and a chunk without a complete row."""
    frame = DIFFERING.assign(w=np.random.default_rng(8).integers(0, 3, N).astype(float))
    frame.loc[frame.index[:64], "g"] = None
    frame.loc[frame.index[100:130], "x"] = np.nan
    tables = by_site(frame)
    tables["A"].to_parquet(tmp_path / "A.parquet")
    streamed = {**tables, "A": ParquetTable(tmp_path / "A.parquet", rows_per_chunk=64)}
    right = "poly(x, 2) + C(g) + flag + log(k) + scale(z)"
    right += " + bs(count, knots=(2,), degree=1, lower_bound=-1, upper_bound=9)"
    with pytest.warns(DataWarning):
        held = model(f"y ~ {right}", tables, freq_weights="w", labels=["g"])
    with pytest.warns(DataWarning):
        read = model(f"y ~ {right}", streamed, freq_weights="w", labels=["g"])
    clustered = {"cov_type": "cluster", "cov_kwds": {"groups": "g", "correction": "CR1"}}
    for options in ({"cov_type": "HC0"}, clustered):
        one, two = held.fit(**options), read.fit(**options)
        np.testing.assert_allclose((one.params - two.params) / one.bse, 0.0, atol=1e-12)
        np.testing.assert_allclose(one.bse, two.bse, rtol=1e-10)
    assert [row.n for row in held.agreement.sites] == [row.n for row in read.agreement.sites]


def test_refusals_of_a_streamed_site_are_those_of_one_in_memory(tmp_path):
    frame = DIFFERING.copy()
    frame.loc[frame.index[[0, 199]], "g"] = "rare"
    frame.loc[frame.index[[250, 251, 252, 450, 451, 452]], "g"] = "rare"
    tables = by_site(frame)
    for site, one in tables.items():
        one.to_parquet(tmp_path / f"{site}.parquet")
    streamed = {s: ParquetTable(tmp_path / f"{s}.parquet", rows_per_chunk=64) for s in tables}
    for formula in ("y ~ g", "y ~ log(x)", "y ~ z + q"):
        held, read = error_of(formula, tables), error_of(formula, streamed)
        assert type(held) is type(read)
        assert re.sub(r"\d+", "", str(held)) == re.sub(r"\d+", "", str(read))


def test_a_design_error_is_raised_before_anything_is_estimated():
    partition = fs.ClientPartition.from_frames(by_site(WRONG), layout="horizontal")
    with pytest.raises(DesignError):
        fs.FederatedGLM.from_formula("y ~ log(x)", partition, family=F.Binomial()).fit()
    steps = {entry.step for site in partition.sites.values() for entry in site.ledger.entries}
    assert steps == {"survey_rows", "introduce", "announce"}
