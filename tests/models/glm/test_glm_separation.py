"""Separated outcomes and collinear columns are named, and hard data are no false alarm."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from formulaic import model_matrix
from pooled import fit_pooled
from three_sites import FRAME, SITES, N, assert_pooled, error_of, model

from fedstat.errors import EstimationError, PolicyError
from fedstat.federation.disclosure.policy import Policy

F, L = sm.families, sm.families.links


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
    complete = "complete separation: the responses of all rows follow exactly from "
    return {
        "binary column": ("y ~ x + b", same, None, f"^{complete}'b'{every}"),
        "half of the events": ("y ~ x + b", half, None, f"^{quasi}'b'{every}"),
        "level without events": (factor, no_events, None, f"^{quasi}{c}{every}"),
        "two levels without events": (factor, both, None, f"^{quasi}'C\\(g\\)\\[T.b\\]', {c}{every}"),
        "reference level": (factor, reference, None, f"^{quasi}the reference level of 'C\\(g\\)'{every}"),
        "no reference": ("y ~ 0 + C(g)", no_events, None, f"^{quasi}'C\\(g\\)\\[c\\]'{every}"),
        "no reference, first": ("y ~ 0 + C(g) + x", reference, None, f"^{quasi}'C\\(g\\)\\[a\\]'{every}"),
        "counts of zero": ("count ~ x + C(g)", zeros, F.Poisson(), f"^{quasi}{c}{every}"),
        "one column": ("y ~ x + z", {"y": (FRAME["x"] > 0.2).astype(int)}, None, f"^{complete}'x'{every}"),
        "two columns": ("y ~ x + z", combined, None, f"^{complete}'x', 'z'{every}"),
        "site without events": ("y ~ x + C(site)", site, None, rf"^{quasi}'C\(site\)\[T.B\]' \(at B\)"),
        "probit": (factor, no_events, F.Binomial(L.Probit()), f"^{quasi}{c}{every}"),
        "cloglog": (factor, no_events, F.Binomial(L.CLogLog()), f"^{quasi}{c}{every}"),
        "cauchit": (factor, no_events, F.Binomial(L.Cauchy()), f"^{quasi}{c}{every}"),
    }


SEPARATED = separated()
ROUNDS = 20
"""Evaluations after which separation is reported; nine or ten if a level separates."""


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("case", SEPARATED)
def test_separation_names_columns_and_sites(case, local):
    formula, changes, family, expected = SEPARATED[case]
    error = error_of(formula, FRAME.assign(**changes), family, {"local": local})
    if not local:  # sites do not report which columns vary with them
        expected = re.sub(r" \\\(at [^)]*\\\)$", r"\\.", expected)
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


def test_separation_at_one_site_is_reported_in_a_note_and_hinders_nothing():
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
def test_columns_far_from_zero_are_distinguished_from_the_intercept(column):
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
    assert message.endswith("Leave out one of each group.")


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
def test_columns_that_one_site_cannot_distinguish_are_fine(right):
    frame = DEPENDENT.assign(copied=DEPENDENT["a"].where(DEPENDENT["site"] == "A", DEPENDENT["b"]))
    frame["constant_at_two"] = DEPENDENT["a"].where(DEPENDENT["site"] == "B", 7.0)
    assert_pooled(model(f"y ~ {right}", frame).fit(), f"y ~ {right}", frame)


def test_a_column_that_is_constant_on_the_complete_rows_is_named():
    frame = FRAME.assign(w=0.0)
    frame.loc[frame.index[:30], "w"] = 1.0
    frame.loc[frame.index[:30], "x"] = np.nan
    assert "design column 'w' is constant over the complete rows of all sites" in str(
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


def test_fewer_rows_than_columns_in_all_is_reported():
    few = FRAME.groupby("site").head(2)
    policy = Policy(min_count=0, max_parameters=9.0, min_events=0, min_level_count=0, remember="nothing")
    message = str(error_of("y ~ x + z + x:z + poly(x, 2) + poly(z, 2)", few, policy=policy))
    assert message.startswith("6 complete rows at all sites together for 8 coefficients")
