"""Offset and weights of a selecting fit: repeated rows, weighted least squares, and glmnet."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from vglm_study import COLUMNS, make_partition, make_table, pooled_columns

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError, PolicyError

pytestmark = pytest.mark.filterwarnings("ignore")
HELD = {**COLUMNS, "Bank": [*COLUMNS["Bank"], "w", "v", "log_t"]}
GLMNET = json.loads((Path(__file__).parents[2] / "reference" / "penalized" / "weights.json").read_text())
"""The lasso of glmnet, by family and by what it has."""


def draw(n=300, seed=0):
    table, rng = make_table(n, seed), np.random.default_rng([seed, 5])
    table["w"] = rng.integers(1, 5, n) * 1.0
    table["v"] = np.exp(rng.normal(size=n))
    table["log_t"] = 3.0 * rng.normal(size=n)
    return table


def model(table, policy=None, **options):
    partition = make_partition(table, HELD, **({} if policy is None else {"policy": policy}))
    roles = {options.get(role) for role in ("offset", "freq_weights", "var_weights")}
    others = " ".join(f"- {name}" for name in ("w", "v", "log_t") if name not in roles)
    return fs.VerticalGLM.from_formula(f"y ~ . {others}", partition, **options)


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
    assert_equal_fits(ours, theirs, 1e-5)
    assert ours.rsquared == pytest.approx(theirs.rsquared, rel=1e-6)
    np.testing.assert_allclose(ours.scales, theirs.scales, rtol=1e-8)


def assert_equal_fits(ours, theirs, atol):
    """Paths, criteria, and estimates with errors of two fits."""
    np.testing.assert_allclose(ours.path.index, theirs.path.index, rtol=1e-6)
    np.testing.assert_allclose(ours.path_params, theirs.path_params, atol=atol)
    for name in ("loss", "df", "aic", "bic", "ebic"):
        np.testing.assert_allclose(ours.path[name], theirs.path[name], rtol=1e-6, err_msg=name)
    for name in ("lam", "llf", "llnull", "scale", "bic", "nobs", "df_resid"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-6), name
    for name in ("refit", "debiased"):
        if getattr(theirs._record, name) is not None:
            mine, other = getattr(ours, name), getattr(theirs, name)
            np.testing.assert_allclose(mine.params, other.params, atol=1e-5)
            np.testing.assert_allclose(mine.bse, other.bse, rtol=1e-5)
            assert (mine.nobs, mine.scale) == pytest.approx((other.nobs, other.scale), rel=1e-6)


def test_weights_of_variances_are_weighted_least_squares():
    table = draw()
    ours = model(table, var_weights="v").fit(lam=0.0)
    X = sm.add_constant(pooled_columns(table, ours.params.index[1:]))
    theirs = sm.WLS(table["y"], X, weights=table["v"]).fit()
    np.testing.assert_allclose(ours.params, theirs.params, atol=1e-7 * theirs.bse.max())
    np.testing.assert_allclose(ours.bse, theirs.bse, rtol=1e-7)
    for name in ("scale", "llf", "bic", "rsquared", "nobs", "df_resid"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-8), name
    null = sm.WLS(table["y"], np.ones(len(table)), weights=table["v"]).fit()
    assert ours.llnull == pytest.approx(null.llf, rel=1e-8)
    debiased = model(table, var_weights="v").fit().debiased
    np.testing.assert_allclose(debiased.params, theirs.params, atol=1e-6 * theirs.bse.max())
    assert debiased.scale == pytest.approx(theirs.scale, rel=1e-6)


def test_an_offset_is_subtracted_from_a_normal_response():
    table = draw()
    ours = model(table, offset="log_t").fit()
    theirs = model(table.assign(y=table["y"] - table["log_t"])).fit()
    np.testing.assert_allclose(ours.path_params, theirs.path_params, atol=1e-8)
    for name in ("lam", "llf", "llnull", "rsquared", "scale"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-8), name
    np.testing.assert_allclose(ours.debiased.bse, theirs.debiased.bse, rtol=1e-8)


def glmnet_table():
    """The same numbers as in weights.R."""
    i, j = np.ogrid[:200, :9]
    rows = np.arange(200)
    X = np.round(3.0 * np.sin(1.0 + 37.0 * i + 101.0 * j + 0.7 * i * j), 3) + 0.5 * j
    table = pd.DataFrame(X, columns=[f"x{k}" for k in range(9)])
    table["w"], table["log_t"] = 1.0 + rows % 4, np.round(np.sin(3.0 + 11.0 * rows**2), 3)
    eta = 0.3 * (X[:, 0] - 0.5 * (X[:, 4] - 2.0)) + table["log_t"]
    noise = np.round(np.cos(5.0 + 17.0 * rows**2), 3)
    table["gaussian"], table["binomial"] = 4.0 * eta + 3.0 * noise, 1.0 * (eta + 1.5 * noise > 0.0)
    return table.assign(poisson=np.floor(np.exp(0.6 * eta + noise)))


ROLES = {"weights": {"freq_weights": "w"}, "offset": {"offset": "log_t"}}
ROLES["both"] = ROLES["weights"] | ROLES["offset"]


def lasso(family, roles, **arguments):
    columns = {
        "A": [family, "w", "log_t", "x0", "x1"],
        "B": ["x2", "x3", "x4"],
        "C": ["x5", "x6", "x7", "x8"],
    }
    partition = fs.ClientPartition.from_frame(glmnet_table(), columns=columns)
    formula = f"{family} ~ {' + '.join(f'x{k}' for k in range(9))}"
    made = {
        "gaussian": sm.families.Gaussian,
        "binomial": sm.families.Binomial,
        "poisson": sm.families.Poisson,
    }
    options = {"family": made[family](), "penalty": "lasso", **roles}
    return fs.VerticalGLM.from_formula(formula, partition, **options).fit(**arguments)


@pytest.mark.parametrize("which", ROLES)
@pytest.mark.parametrize("family", GLMNET)
def test_the_lasso_is_that_of_glmnet(family, which):
    expected = GLMNET[family][which]
    ours = lasso(family, ROLES[which], lambdas=expected["lambdas"], path="exact", inference="conditional")
    np.testing.assert_allclose(ours.path_params, np.array(expected["params"]), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("options", [{"select": "cv", "folds": 3, "draws": 0}, {"inference": "split"}])
def test_equal_weights_change_nothing_of_a_fit_by_folds(options):
    table = draw().assign(w=1.0)
    ours, theirs = model(table, freq_weights="w").fit(**options), model(table).fit(**options)
    np.testing.assert_allclose(ours.params, theirs.params, atol=1e-8)
    np.testing.assert_allclose(ours.refit.bse, theirs.refit.bse, rtol=1e-8)


def test_errors_of_folds_have_the_weights():
    table = draw()
    ours = model(table, freq_weights="w", penalty="lasso").fit(select="cv", folds=3, n_lambdas=5)
    # Weights of variances with the same ratios give the same weighted errors.
    theirs = model(table, var_weights="w", penalty="lasso").fit(select="cv", folds=3, n_lambdas=5)
    np.testing.assert_allclose(ours.path["cv"], theirs.path["cv"], rtol=1e-7)


def test_predictions_are_at_an_offset_of_zero(tmp_path):
    table = draw()
    ours = model(table, offset="log_t", freq_weights="w").fit()
    expected = ours.params.iloc[0] + pooled_columns(table, ours.params.index[1:]) @ ours.params.iloc[1:]
    np.testing.assert_allclose(ours.predict(), expected, rtol=1e-8)
    text = " ".join(str(ours.summary()).split())
    assert "'log_t' enters the linear predictor" in text and "received the weights" in text
    with pytest.raises(NotAvailableError, match=r"evaluate: .* offset of zero"):
        ours.evaluate()
    ours.save(tmp_path / "fit")
    with pytest.raises(NotAvailableError, match="offset of zero"):
        fs.load(tmp_path / "fit").evaluate(make_partition(table, HELD))


def test_a_selection_after_a_fit_with_an_offset_knows_of_it():
    columns = {**HELD, "Bank": [*HELD["Bank"][:-1], "log_t"]}
    partition = make_partition(draw(), columns)
    fit = fs.VFEMRegression.from_formula("y ~ . - w - v", partition, offset="log_t").fit()
    with pytest.raises(NotAvailableError, match=r"evaluate: .* offset of zero"):
        fit.select().evaluate(partition)


@pytest.mark.parametrize(
    ("options", "arguments", "told"),
    [
        ({"freq_weights": "w", "var_weights": "v"}, {}, "give only one of them"),
        ({"offset": "x5"}, {}, "must be at the site of the response"),
        ({"var_weights": "v", "missing": "em"}, {}, "missing='drop', or freq_weights"),
        ({"var_weights": "v"}, {"inference": "split"}, "leave inference='debiased'"),
        ({"offset": "log_t"}, {"exchange": "admm"}, "use exchange='products'"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(options, arguments, told):
    with pytest.raises(ModelError, match=told):
        model(draw(), **options).fit(**arguments)


def test_weights_are_values_per_entity_and_stay_where_these_do():
    with pytest.raises(PolicyError, match="per entity"):
        model(draw(), policy="strict", freq_weights="w").fit()


def counts(table, family):
    rng, eta = np.random.default_rng(3), 0.2 * table["x0"] + 0.1 * (table["x3"] - 3.0) + table["log_t"] / 3.0
    y = {
        "poisson": rng.poisson(np.exp(0.5 * eta)),
        "binomial": (rng.random(len(eta)) < 1 / (1 + np.exp(-eta))),
    }
    y["gamma"] = np.exp(0.5 * eta) * rng.gamma(2.0, size=len(eta))
    return table.assign(y=y[family] * 1.0, log_t=table["log_t"] / 3.0)


OTHERS = {
    "poisson": sm.families.Poisson(),
    "binomial": sm.families.Binomial(),
    "gamma": sm.families.Gamma(sm.families.links.Log()),
}


@pytest.mark.parametrize("family", OTHERS)
def test_an_offset_of_other_families_is_that_of_statsmodels(family):
    table = counts(draw(), family)
    ours = model(table, offset="log_t", family=OTHERS[family]).fit(lam=0.0)
    X = sm.add_constant(pooled_columns(table, ours.params.index[1:]))
    theirs = sm.GLM(table["y"], X, offset=table["log_t"], family=OTHERS[family]).fit(tol=1e-14)
    np.testing.assert_allclose(ours.params, theirs.params, atol=1e-6 * theirs.bse.max())
    np.testing.assert_allclose(ours.bse, theirs.bse, rtol=1e-6)
    assert ours.llf == pytest.approx(theirs.llf, rel=1e-8)
    if family != "gamma":  # statsmodels fits no dispersion of the null model
        assert ours.llnull == pytest.approx(theirs.llnull, rel=1e-8)
    assert ours.path["loss"].iloc[0] == pytest.approx(theirs.deviance / 2.0 / len(table), rel=1e-8)


NEWTON = {
    "lasso": ("poisson", {"penalty": "lasso"}, {"inference": "debiased"}),
    "groups": ("binomial", {"penalty": "mcp", "group_terms": True}, {}),
    "adaptive": ("gamma", {"adaptive": 1.0}, {}),
    "no penalty": ("gamma", {}, {"lam": 0.0}),
}


@pytest.mark.parametrize("case", NEWTON)
def test_frequencies_of_other_families_are_repeated_entities(case):
    family, options, arguments = NEWTON[case]
    table = counts(draw(150), family)
    options, arguments = options | {"family": OTHERS[family]}, {"n_lambdas": 6, "path": "exact"} | arguments
    ours = model(table, freq_weights="w", offset="log_t", **options).fit(**arguments)
    theirs = model(repeated(table), offset="log_t", **options).fit(**arguments)
    assert_equal_fits(ours, theirs, 2e-5)
    np.testing.assert_allclose(ours.scales, theirs.scales, rtol=1e-6)
    np.testing.assert_allclose(ours._centers, theirs._centers, rtol=1e-6)


def test_quadratic_models_by_fold_have_the_weights():
    table = counts(draw(), "poisson")
    options = {"family": OTHERS["poisson"], "penalty": "lasso"}
    twice = table.assign(w=2.0 * table["w"])
    ours, theirs = (
        model(one, freq_weights="w", **options).fit(select="cv", folds=3, n_lambdas=6)
        for one in (table, twice)
    )
    np.testing.assert_allclose(ours.path["cv"], theirs.path["cv"], rtol=1e-6)
    # At the null model, the error of a fold is the weighted deviance about the mean of the others.
    assert ours.path["cv"].iloc[0] == pytest.approx(2.0 * ours.path["loss"].iloc[0], rel=0.05)


@pytest.mark.parametrize(
    "arguments",
    [
        {"inference": "split"},
        {"select": "cv", "folds": 3},
        {"inference": "debiased"},
    ],
)
def test_a_constant_offset_moves_the_intercept_alone(arguments):
    table = counts(draw(), "poisson").assign(log_t=0.7)
    options = {"family": OTHERS["poisson"], "penalty": "lasso", "group_terms": True}
    ours = model(table, offset="log_t", **options).fit(n_lambdas=8, **arguments)
    theirs = model(table, **options).fit(n_lambdas=8, **arguments)
    np.testing.assert_allclose(ours.params.iloc[1:], theirs.params.iloc[1:], atol=1e-6)
    assert ours.params.iloc[0] == pytest.approx(theirs.params.iloc[0] - 0.7, abs=1e-6)
    np.testing.assert_allclose(ours.refit.bse, theirs.refit.bse, rtol=1e-5)
    assert (ours.llf, ours.llnull) == pytest.approx((theirs.llf, theirs.llnull), rel=1e-8)


def test_groups_are_orthonormal_without_the_offset():
    table = counts(draw(), "poisson")
    options = {"family": OTHERS["poisson"], "penalty": "lasso", "group_terms": True, "offset": "log_t"}
    ours = model(table, **options).fit(n_lambdas=5, ratio=0.05, path="exact", inference="conditional")
    X = pooled_columns(table, ours.params.index[1:])
    Z, names = X - X.mean(axis=0), ours.params.index[1:]
    for lam, params in ours.path_params.iterrows():
        residual = table["y"] - np.exp(params.iloc[0] + X @ params.iloc[1:] + table["log_t"])
        for term in dict.fromkeys(name.split("[")[0] for name in names):
            at = [i for i, name in enumerate(names) if name.split("[")[0] == term]
            root = np.linalg.cholesky(Z[:, at].T @ Z[:, at] / len(Z))
            gradient = np.linalg.solve(root, Z[:, at].T @ residual / len(Z))
            size = root.T @ params.iloc[1:].to_numpy()[at]
            level = lam * np.sqrt(len(at))
            if not size.any():
                assert np.linalg.norm(gradient) <= level * (1.0 + 1e-5)
            else:
                np.testing.assert_allclose(gradient, level * size / np.linalg.norm(size), atol=1e-5 * level)


def test_the_offset_is_a_value_per_entity_and_effects_know_of_it(tmp_path):
    table = counts(draw(), "poisson")
    options = {"offset": "log_t", "family": OTHERS["poisson"]}
    with pytest.raises(PolicyError, match="per entity"):
        model(table, policy="strict", **options).fit()
    fit = model(table, coordinator="apart", **options).fit(n_lambdas=5)
    fit.save(tmp_path / "fit")
    for one in (fit, fs.load(tmp_path / "fit")):
        with pytest.raises(NotAvailableError, match="value of the offset"):
            one.get_margeff("mean", columns=True)
    assert "open_offset" in set(fit.ledger.to_frame()["step"])
    assert any("The coordinator received the offset" in str(note) for note in fit._record.notes)
