"""What is wrong with data or arguments is named: site, column, remedy, and no value of the data."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from formulaic import model_matrix
from pooled import fit_pooled

import fedstat as fs
from fedstat.errors import DataWarning, DesignError, EstimationError, FedstatError, PolicyError
from fedstat.federation.site import Policy
from fedstat.federation.table import ParquetTable

F, L = sm.families, sm.families.links
SITES = ("A", "B", "C")
N = 600


def table(seed=1, n=N):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "site": np.repeat(SITES, n // 3),
            "x": rng.normal(size=n),
            "z": rng.normal(size=n),
            "g": rng.choice(list("abc"), n),
        }
    )
    eta = 0.3 * frame["x"] - 0.4 * frame["z"]
    frame["y"] = (rng.uniform(size=n) < 1 / (1 + np.exp(-eta))).astype(int)
    frame["count"] = rng.poisson(np.exp(eta))
    return frame


FRAME = table()


def by_site(frame):
    return {s: part.drop(columns="site").reset_index(drop=True) for s, part in frame.groupby("site")}


def model(formula, frame, family=None, policy=None, **roles):
    tables = frame if isinstance(frame, dict) else by_site(frame)
    policies = None if policy is None else dict.fromkeys(tables, policy)
    partition = fs.ClientPartition.from_frames(tables, layout="horizontal", policies=policies)
    return fs.FederatedGLM.from_formula(formula, partition, family=family or F.Binomial(), **roles)


def error_of(formula, frame, family=None, fit=None, **known):
    with pytest.raises(FedstatError) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(formula, frame, family, **known).fit(**(fit or {}))
    return caught.value


def assert_pooled(ours, formula, frame, family=None, **roles):
    theirs = fit_pooled(formula, frame, family or F.Binomial(), **roles)
    assert list(ours.params.index) == list(theirs.params.index)
    np.testing.assert_allclose((ours.params - theirs.params) / theirs.bse, 0.0, atol=1e-7)
    np.testing.assert_allclose(ours.bse, theirs.bse, rtol=1e-7)


# -- separation --------------------------------------------------------------------------------------


def separated():
    rng = np.random.default_rng(2)
    level = FRAME["g"]
    same = {"b": FRAME["y"]}
    half = {"b": ((FRAME["y"] == 1) & (rng.uniform(size=N) < 0.5)).astype(int)}
    combined = {"y": (FRAME["x"] + 2.0 * FRAME["z"] > 0.2).astype(int)}
    no_events = {"y": FRAME["y"].where(level != "c", 0)}
    both = {"y": FRAME["y"].where(level == "a", 0)}
    reference = {"y": FRAME["y"].where(level != "a", 1)}
    zeros = {"count": FRAME["count"].where(level != "c", 0)}
    site = {"y": FRAME["y"].where(FRAME["site"] != "B", 0)}
    factor, every = "y ~ x + C(g)", r" \(at A, B, C\)"
    c = r"'C\(g\)\[T.c\]'"
    quasi = "quasi-complete separation: the responses of some rows follow exactly from "
    whole = "complete separation: the responses of all rows follow exactly from "
    return {
        "binary column": ("y ~ x + b", same, None, f"^{whole}'b'{every}"),
        "half of the events": ("y ~ x + b", half, None, f"^{quasi}'b'{every}"),
        "level without events": (factor, no_events, None, f"^{quasi}{c}{every}"),
        "two levels without events": (factor, both, None, f"^{quasi}'C\\(g\\)\\[T.b\\]', {c}{every}"),
        "reference level": (factor, reference, None, f"^{quasi}the reference level of 'C\\(g\\)'{every}"),
        "no reference": ("y ~ 0 + C(g)", no_events, None, f"^{quasi}'C\\(g\\)\\[c\\]'{every}"),
        "no reference, first": ("y ~ 0 + C(g) + x", reference, None, f"^{quasi}'C\\(g\\)\\[a\\]'{every}"),
        "counts of zero": ("count ~ x + C(g)", zeros, F.Poisson(), f"^{quasi}{c}{every}"),
        "one column": ("y ~ x + z", {"y": (FRAME["x"] > 0.2).astype(int)}, None, f"^{whole}'x'{every}"),
        "two columns": ("y ~ x + z", combined, None, f"^{whole}'x', 'z'{every}"),
        "site without events": ("y ~ x + C(site)", site, None, rf"^{quasi}'C\(site\)\[T.B\]' \(at B\)"),
        "probit": (factor, no_events, F.Binomial(L.Probit()), f"^{quasi}{c}{every}"),
        "cloglog": (factor, no_events, F.Binomial(L.CLogLog()), f"^{quasi}{c}{every}"),
        "cauchit": (factor, no_events, F.Binomial(L.Cauchy()), f"^{quasi}{c}{every}"),
    }


SEPARATED = separated()
ROUNDS = 20
"""Evaluations after which separation is told; nine or ten where it is a level's."""


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("case", SEPARATED)
def test_separation_names_columns_and_sites(case, local):
    formula, changes, family, expected = SEPARATED[case]
    error = error_of(formula, FRAME.assign(**changes), family, {"local": local})
    assert isinstance(error, EstimationError) and re.search(expected, str(error))
    assert "merge its level with another" in str(error)
    evaluations = int(re.search(r"after (\d+) evaluations", str(error))[1])
    assert evaluations <= (10 if "level" in case or case == "half of the events" else ROUNDS)


def test_a_rare_level_without_events_is_named_rather_than_the_intercept():
    rng = np.random.default_rng(2)
    n = 30_000
    frame = pd.DataFrame({"site": np.repeat(SITES, n // 3), "x": rng.normal(size=n)})
    frame["y"] = (rng.uniform(size=n) < 0.002).astype(int)
    frame["rare"] = ((rng.uniform(size=n) < 0.01) & (frame["y"] == 0)).astype(int)
    assert "follow exactly from 'rare' (at A, B, C)" in str(error_of("y ~ x + rare", frame))


def test_a_rare_and_a_frequent_level_without_events_are_both_named():
    rng = np.random.default_rng(9)
    n = 30_000
    frame = pd.DataFrame({"site": np.repeat(SITES, n // 3), "x": rng.normal(size=n)})
    frame["g"] = rng.choice(["a", "frequent", "rare"], n, p=[0.499, 0.5, 0.001])
    frame["y"] = ((rng.uniform(size=n) < 0.3) & (frame["g"] == "a")).astype(int)
    message = str(error_of("y ~ x + g", frame))
    assert "follow exactly from 'g[T.frequent]', 'g[T.rare]' (at A, B, C)" in message


def test_separation_at_one_site_is_told_in_a_note_and_hinders_nothing():
    frame = FRAME.assign(b=np.where(FRAME["site"] == "A", FRAME["y"], (FRAME["z"] > 0).astype(int)))
    result = model("y ~ x + b", frame).fit()
    assert_pooled(result, "y ~ x + b", frame)
    assert re.search("fit of their own: A.{0,12}separated", str(result.summary()))
    assert result.site_estimates.loc["A"].isna().all() and result.site_estimates.loc["B"].notna().all()


def hard():
    rng = np.random.default_rng(3)
    n = 900
    site = np.repeat(SITES, n // 3)
    x, z = rng.normal(size=(2, n))
    frame = pd.DataFrame({"site": site, "x": x, "z": z})
    for k in (6, 20, 40):
        frame[f"y{k}"] = (rng.uniform(size=n) < 1 / (1 + np.exp(-k * (x + z)))).astype(int)
    frame["year"] = 2000.0 + rng.integers(0, 23, n)
    frame["seconds"] = 1.6e9 + rng.uniform(0, 1e5, n)
    frame["far"] = 1e12 + rng.integers(0, 5, n)
    frame["g"] = rng.choice(["a", "b"], n)
    frame["uneven"] = np.where(frame["g"] == "a", rng.poisson(1e5, n), rng.uniform(size=n) < 0.05)
    return frame


HARD = hard()


def assert_optimal(result, formula, frame, family):
    """The score of the stacked table is zero: less than 1e-6 standard errors away."""
    left, right = formula.split(" ~ ")
    X = np.asarray(model_matrix(right, frame))
    score = sm.GLM(frame[left], X, family=family).score(result.params.to_numpy())
    assert score @ result.cov_params().to_numpy() @ score < 1e-12


@pytest.mark.parametrize(
    ("formula", "family"),
    [
        ("y6 ~ x + z", F.Binomial()),
        ("y20 ~ x + z", F.Binomial()),
        ("y40 ~ x + z", F.Binomial()),
        ("y40 ~ x + z", F.Binomial(L.Probit())),
        ("y20 ~ x + z", F.Binomial(L.Cauchy())),
        ("y40 ~ x + z", F.Binomial(L.Cauchy())),
        ("y6 ~ x + year", F.Binomial()),
        ("y6 ~ x + poly(year, 3)", F.Binomial()),
        ("uneven ~ x + C(g)", F.Poisson()),
    ],
)
def test_hard_data_are_no_false_alarm(formula, family):
    result = model(formula, HARD, family).fit()
    assert result.converged
    assert_optimal(result, formula, HARD, family)


@pytest.mark.parametrize("column", ["year", "seconds", "far"])
def test_columns_far_from_zero_are_told_apart_from_the_intercept(column):
    formula = f"y6 ~ x + {column}"
    result = model(formula, HARD).fit()
    near = HARD.assign(**{column: HARD[column] - HARD[column].mean()})
    theirs = fit_pooled(formula, near, F.Binomial())
    np.testing.assert_allclose(result.params.iloc[1:], theirs.params.iloc[1:], rtol=1e-7)
    np.testing.assert_allclose(result.bse.iloc[1:], theirs.bse.iloc[1:], rtol=1e-7)


@pytest.mark.parametrize("link", [L.Logit(), L.Cauchy()])
def test_one_event_in_a_thousand_is_no_separation(link):
    rng = np.random.default_rng(2)
    n = 30_000
    frame = pd.DataFrame({"site": np.repeat(SITES, n // 3), "x": rng.normal(size=n)})
    frame["y"] = (rng.uniform(size=n) < 1 / (1 + np.exp(7.2 - 0.8 * frame["x"]))).astype(int)
    assert 20 < frame["y"].sum() < 50
    result = model("y ~ x", frame, F.Binomial(link)).fit()
    assert result.converged
    assert_optimal(result, "y ~ x", frame, F.Binomial(link))


# -- rank --------------------------------------------------------------------------------------------


def dependent():
    rng = np.random.default_rng(4)
    frame = FRAME.assign(a=rng.normal(size=N), b=rng.normal(size=N))
    frame["sum"] = frame["a"] + frame["b"]
    for level in "abc":
        frame[f"is_{level}"] = (frame["g"] == level).astype(float)
    frame["beds"] = frame["site"].map({"A": 120.0, "B": 300.0, "C": 410.0})
    frame["staff"] = frame["site"].map({"A": 10.0, "B": 31.0, "C": 45.0})
    frame["tiny"] = frame["x"] * 1e-9
    frame["later"] = frame["x"] + 2000.0
    return frame


DEPENDENT = dependent()


@pytest.mark.parametrize("family", [F.Binomial(), F.Gaussian()])
@pytest.mark.parametrize(
    ("right", "expected"),
    [
        ("x + a + b + sum", "'sum' follows from 'a', 'b'. "),
        ("x + is_a + is_b + is_c", "'is_c' follows from 'Intercept', 'is_a', 'is_b'. "),
        ("0 + is_a + is_b + is_c + x + later", "'later' follows from 'is_a', 'is_b', 'is_c', 'x'. "),
        ("x + beds + C(site)", "'C(site)[T.C]' follows from 'Intercept', 'beds', 'C(site)[T.B]'. "),
        ("x + tiny", "'tiny' follows from 'x'. "),
        ("x + later", "'later' follows from 'Intercept', 'x'. "),
    ],
)
def test_collinear_columns_over_all_sites_are_named(right, expected, family):
    message = str(error_of(f"y ~ {right}", DEPENDENT, family))
    assert "design columns are collinear over all sites" in message and expected in message
    assert message.endswith("Leave one of each group out.")


@pytest.mark.parametrize(
    "right",
    [
        "x + beds",
        "x + beds + staff",
        "0 + is_a + is_b + is_c + x",
        "a + copied",
        "a + constant_at_two",
    ],
)
def test_columns_that_one_site_cannot_tell_apart_are_fine(right):
    frame = DEPENDENT.assign(copied=DEPENDENT["a"].where(DEPENDENT["site"] == "A", DEPENDENT["b"]))
    frame["constant_at_two"] = DEPENDENT["a"].where(DEPENDENT["site"] == "B", 7.0)
    assert_pooled(model(f"y ~ {right}", frame).fit(), f"y ~ {right}", frame)


def test_a_column_that_is_constant_on_the_whole_rows_is_named():
    frame = FRAME.assign(w=0.0)
    frame.loc[frame.index[:30], "w"] = 1.0
    frame.loc[frame.index[:30], "x"] = np.nan
    assert "design column 'w' is constant over the whole rows of all sites" in str(
        error_of("y ~ x + w", frame)
    )


def test_a_site_with_fewer_rows_than_columns_contributes_where_its_owner_allows_it():
    small = FRAME[FRAME["site"] == "A"].head(6).assign(site="D", y=[0, 1, 0, 1, 1, 0])
    frame = pd.concat([FRAME, small], ignore_index=True)
    formula = "y ~ z + x:z + C(g) + bs(x, knots=(0,), lower_bound=-5, upper_bound=5)"
    error = error_of(formula, frame)
    assert isinstance(error, PolicyError)
    assert str(error).startswith(
        "D: its policy (maximum parameters per row) allows 0.33 coefficients per row"
    )
    result = model(formula, frame, policy=Policy(max_parameters=5.0)).fit()
    without = model(formula, FRAME).fit()
    assert re.search(r"fit of their own:\s+D.{0,12}fewer\s+rows\s+than", str(result.summary()))
    assert np.abs(result.params - without.params).max() > 1e-6
    simple = "y ~ x + z + C(g)"
    ours = model(simple, frame, policy=Policy(max_parameters=5.0, min_level_count=0)).fit()
    assert_pooled(ours, simple, frame)


def test_fewer_rows_than_columns_in_all_is_told():
    few = FRAME.groupby("site").head(2)
    policy = Policy(min_count=0, max_parameters=9.0, min_events=0, min_level_count=0, answers_kept=0)
    message = str(error_of("y ~ x + z + x:z + poly(x, 2) + poly(z, 2)", few, policy=policy))
    assert message.startswith("6 whole rows at all sites together for 8 coefficients")


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
        ("x", lambda s: s.astype(str), "column 'x' holds numbers at client 'A' and text at client 'B'"),
        ("k", lambda s: s.astype(str), "column 'k' holds numbers at client 'A' and text at client 'B'"),
        ("flag", lambda s: s.astype(int), "'flag' holds true/false at client 'A' and numbers at client 'B'"),
        ("k", lambda s: s.astype("category"), "'k' holds numbers at client 'A' and numbers as categories"),
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
        "A: its policy (minimum rows per level) wants at least 3 rows of every level; 1 of"
    )
    assert "column 'g'" in message and "Merge them" in message and "'rare'" not in message


def test_identifiers_and_dates_are_named():
    frame = FRAME.assign(id=[f"p{i}" for i in range(N)], day=pd.Timestamp("2020-01-01"))
    frame["day"] += pd.to_timedelta(np.arange(N), unit="D")
    assert "'id' have fewer. It looks like an identifier" in str(error_of("y ~ x + id", frame))
    assert "column 'day' at client 'A' is of type datetime64" in str(error_of("y ~ x + day", frame))


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
    "values": ("count ~ x", POISSON, {"freq_weights": WRONG["weight"]}, "freq_weights: .*received Series"),
    "number": ("count ~ x", POISSON, {"offset": 3}, "offset: expected the name of a column, received int"),
    "text weight": ("count ~ x", POISSON, {"freq_weights": "text"}, "'text' at client 'A' holds categories"),
    "text offset": ("count ~ x", POISSON, {"offset": "text"}, "'text' at client 'A' holds categories"),
    "negative": (
        "count ~ x",
        POISSON,
        {"freq_weights": "weight"},
        "'weight' at client 'A': 4 weights are",
    ),
    "variance": (
        "count ~ x",
        POISSON,
        {"var_weights": "weight"},
        "'weight' at client 'A': 4 weights are",
    ),
    "exposure": ("count ~ x", POISSON, {"exposure": "days"}, "'days' at client 'A': 1 exposures are not pos"),
    "log of it": ("count ~ x + offset(log(days))", POISSON, {}, r"log\(days\).*at client 'A'.*for 1 of 200"),
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
        "'y' stands in the response and also on",
    ),
    "centred": ("center(x) ~ z", F.Gaussian(), {}, "on the left side needs the rows of all sites"),
    "text response": ("text ~ x", F.Binomial(), {}, "'text' at client 'A' holds categories.*== 'level'"),
    "counts": ("cbind(count, negative) ~ x", F.Binomial(), {}, "at client 'A': a count is negative for"),
    "family": ("y ~ x", "binomial", {}, "family is str; expected a statsmodels family"),
    "missing": ("y ~ x", F.Binomial(), {"missing": "no"}, 'missing: expected "drop" or "raise", received'),
    "raise": ("y ~ x + z", F.Binomial(), {"missing": "raise"}, "1 at 'A'; pass missing=\"drop\""),
    "spline": ("y ~ bs(x, df=4)", F.Binomial(), {}, r"needs knots=..., lower_bound=... and upper_bound"),
    "outside the spline": (
        "y ~ bs(x, knots=(0,), lower_bound=-1, upper_bound=1)",
        F.Binomial(),
        {},
        "at client 'A': .* of 200 values lie outside",
    ),
    "polynomial": ("y ~ poly(half, 3)", F.Binomial(), {}, r"'poly\(half, 3\)': .*too few distinct values"),
    "logarithm": ("y ~ log(x)", F.Binomial(), {}, r"'log\(x\)' at client 'A': log\(\) gives .*not finite"),
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
    assert "client 'A', column 'x': 2 infinite values" in message and "client 'B', column 'x': 1" in message


@pytest.mark.parametrize("column", ["x", "g", "y"])
def test_a_site_without_a_whole_row_is_named(column):
    tables = by_site(FRAME)
    tables["B"][column] = pd.Series([None] * 200, dtype=object)
    message = str(error_of("y ~ x + g", tables))
    assert message.startswith("site 'B' has no row with all of 'y', 'x', 'g' (of 200 rows).")


def test_a_response_that_is_equal_after_rows_were_dropped_is_told():
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
    """With levels, transforms, missing values, and a chunk that has no whole row."""
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
    for options in ({"cov_type": "HC0"}, {"cov_type": "cluster", "cov_kwds": {"groups": "g"}}):
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
    assert steps == {"survey_rows"}
