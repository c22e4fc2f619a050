"""Offset and weights of a selecting fit: repeated rows, weighted least squares, and glmnet."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from vglm_study import COLUMNS, make_partition, make_table, pooled_columns

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError, PolicyError

pytestmark = pytest.mark.filterwarnings("ignore")
HELD = {**COLUMNS, "Bank": [*COLUMNS["Bank"], "w", "v", "log_t"]}


def draw(n=300, seed=0):
    table, rng = make_table(n, seed), np.random.default_rng([seed, 5])
    table["w"] = rng.integers(1, 5, n) * 1.0
    table["v"] = np.exp(rng.normal(size=n))
    table["log_t"] = 3.0 * rng.normal(size=n)
    return table


def model(table, policy=None, **options):
    partition = make_partition(table, HELD, **({} if policy is None else {"policy": policy}))
    named = "y ~ . - w - v - log_t"
    roles = [options[role] for role in ("offset", "freq_weights", "var_weights") if role in options]
    for role in roles:  # the dot leaves these out
        named = named.replace(f" - {role}", "")
    return fs.VerticalGLM.from_formula(named, partition, **options)


def repeated(table):
    return table.loc[table.index.repeat(table["w"].astype(int))].reset_index(drop=True)


FITS = {
    "lasso": ({"penalty": "lasso"}, {}),
    "scad, ebic": ({}, {"select": "ebic"}),
    "adaptive groups": ({"penalty": "mcp", "adaptive": 1.0, "group_terms": True}, {}),
    "ridge": ({"penalty": "ridge"}, {"select": "aic"}),
    "no penalty": ({}, {"lam": 0.0}),
    "em": ({"missing": "em"}, {}),
}


@pytest.mark.parametrize("case", FITS)
def test_frequencies_are_repeated_entities(case):
    options, arguments = FITS[case]
    table = draw()
    ours = model(table, freq_weights="w", **options).fit(**arguments)
    theirs = model(repeated(table), **options).fit(**arguments)
    theirs = fs.VerticalGLM.from_formula(
        "y ~ . - w - v - log_t", make_partition(repeated(table), HELD), **options
    ).fit(**arguments)
    np.testing.assert_allclose(ours.path.index, theirs.path.index, rtol=1e-6)
    np.testing.assert_allclose(ours.path_params, theirs.path_params, atol=1e-5)
    for name in ("loss", "df", "aic", "bic", "ebic"):
        np.testing.assert_allclose(ours.path[name], theirs.path[name], rtol=1e-6, err_msg=name)
    for name in ("lam", "llf", "llnull", "rsquared", "scale", "bic", "nobs", "df_resid"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-6), name
    np.testing.assert_allclose(ours.scales, theirs.scales, rtol=1e-8)
    for name in ("refit", "debiased"):
        if getattr(theirs._record, name) is not None:
            mine, other = getattr(ours, name), getattr(theirs, name)
            np.testing.assert_allclose(mine.params, other.params, atol=1e-5)
            np.testing.assert_allclose(mine.bse, other.bse, rtol=1e-5)
            assert (mine.nobs, mine.scale) == pytest.approx((other.nobs, other.scale), rel=1e-6)
