"""Sums of one quantity under several weights of rows: their combinations are the values of one person."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from attacker.attack import Campaign, attack
from refusals import refused_for

import fedstat as fs
from fedstat.federation.disclosure.weight_spaces import WeightSpaces, find_isolated

RULE = "rows behind a product"
N = 600


def people():
    """Three sites; x is 1 in the rows of a but for one; g, and b, differ from a in one row."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(
        {
            "site": np.repeat(["S0", "S1", "S2"], N // 3),
            "a": (rng.random(N) < 0.2) * 1.0,
            "x": rng.integers(0, 3, N) * 1.0,
            "z": rng.normal(40.0, 9.0, N).round(2),
            "w": rng.uniform(20.0, 60.0, N).round(1),
            "y": rng.normal(size=N),
            "e": (rng.random(N) < 0.5) * 1,
            "t": rng.exponential(10.0, N).round(1) + 0.5,
            "q": rng.choice(["late", "early"], N),
        }
    )
    inside = frame.index[frame["a"] == 1.0]
    frame.loc[inside, "x"] = 1.0
    frame.loc[inside[3], "x"] = 2.0
    outside = frame.index[(frame["a"] == 0.0) & (frame["e"] == 1)][7]
    frame["g"] = np.where((frame["a"] == 1.0) | (frame.index == outside), "u", "v")
    frame["h"] = np.where(frame["a"] == 1.0, "u", "v")
    frame["b"] = (rng.random(N) < 0.6) * 1.0
    frame.loc[inside, "b"] = 1.0
    frame.loc[inside[5], "b"] = 0.0
    frame["c"] = frame["z"].where(frame.index != inside[8], 41.234)
    return frame


def sites(policy="strict"):
    return fs.ClientPartition.from_frame(people(), by="site", policy=policy)


def ols(formula, **options):
    return lambda partition: fs.FederatedOLS.from_formula(formula, partition, **options).fit()


def hc0(formula):
    return lambda partition: fs.FederatedOLS.from_formula(formula, partition).fit(cov_type="HC0")


def glm(formula, family):
    return lambda partition: fs.FederatedGLM.from_formula(formula, partition, family=family).fit()


def table(columns, by):
    return lambda partition: fs.table_one(partition, columns, by=by)


def curve(by):
    return lambda partition: fs.KaplanMeier.from_formula(f"Surv(t, e) ~ {by}", partition).fit(
        grid=[5.0, 20.0, 60.0]
    )


def crossed(*columns):
    return lambda partition: fs.crosstab(partition, *columns)


ALONE = {
    "a product and three values": ols("y ~ a:z + x"),
    "a product, an indicator and three values": ols("y ~ a:z + a + x"),
    "powers of three values": ols("y ~ a:z + poly(x, 2)"),
    "counts of three values": ols("z ~ x + a + b"),
    "weights": ols("y ~ a + x", var_weights="w"),
    "squared residuals": hc0("z ~ a + x"),
    "logistic": glm("e ~ a:w + x", sm.families.Binomial()),
    "Poisson": glm("x ~ a:w", sm.families.Poisson()),
    "correlations": lambda partition: fs.corr(partition, "a:z + x + y"),
    "a column and another that differs in one row": ols("y ~ c + I(z**2)"),
}


@pytest.mark.parametrize("request_", ALONE.values(), ids=ALONE)
def test_the_sums_of_one_request_single_out_nobody(request_):
    assert request_(sites("open")) is not None
    with refused_for(RULE, "differencing"):
        request_(sites())


PAIRS = {
    "table by g, fit with a": (table("z", "g"), ols("z ~ a")),
    "fit with a, table by g": (ols("z ~ a"), table("z", "g")),
    "curve by g, fit with a": (curve("g"), ols("e ~ a")),
    "cells of g and e, fit with a": (crossed("g", "e"), ols("e ~ a")),
    "cells of g and q, categories by a": (
        crossed("g", "q"),
        lambda partition: fs.FederatedMultinomial.from_formula("q ~ a", partition).fit(),
    ),
    "correlations with a, table by g": (
        lambda partition: fs.corr(partition, "a + z"),
        table("z", "g"),
    ),
    "logistic with a, table by g": (glm("e ~ a + z", sm.families.Binomial()), table("z", "g")),
    "table by a, fit with a:b": (table("z", "a"), ols("z ~ a:b")),
    "cells of a and e, fit with a:b": (crossed("a", "e"), ols("e ~ a:b")),
    "curve by a, fit with a:b": (curve("a"), ols("e ~ a:b")),
    "products with c, with z": (ols("y ~ a:c"), ols("y ~ a:z")),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_sums_of_two_requests_single_out_nobody(pair):
    first, second = pair
    partition = sites()
    first(partition)
    with refused_for(RULE, "differencing"):
        second(partition)
    second(sites())
    # What was answered is answered again.
    first(partition)


def test_strata_of_two_models_do_not_differ_in_one_person():
    def cox(strata):
        formula = f"Surv(t, e) ~ z + strata({strata})"
        return fs.FederatedCox.from_formula(formula, partition).fit()

    partition = sites()
    cox("g")
    with refused_for("differencing"):
        cox("h")
    cox("g")
    partition = sites()
    cox("h")


FOUND = (2, 4, 50, 55, 100, 127, 175, 292, 341, 448, 490, 541, 690, 706, 751, 857, 914, 1065, 20124)
"""Seeds of sequences that singled out rows before the weights of sums were compared."""


@pytest.mark.parametrize("seed", FOUND)
def test_a_sequence_that_was_found_is_refused(seed):
    assert not attack(seed, Campaign())


def test_a_count_of_records_whose_versions_count_alike_is_no_new_one():
    """Two of thirty corrected rows have g = 1; the correction changed another column."""
    n = 60
    persons = np.append(np.arange(n), np.arange(30))  # the first thirty have a second version
    g = np.zeros(n + 30)
    g[[2, 5]] = g[n + 2 :][[0, 3]] = 1.0
    g[35:50] = 1.0
    before, after = g * (np.arange(n + 30) >= 30), g * (np.arange(n + 30) < n)
    for changed, found in ((False, False), (True, True)):
        again = before.copy()
        again[n + 2] = 0.0 if changed else 1.0
        spaces = WeightSpaces.of_weights(np.column_stack([after, again]))
        assert bool(find_isolated(spaces, 1, 2, persons)) is found
