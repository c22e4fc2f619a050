"""Claims beyond the selected columns: debiased estimates of all of them, and estimates in the other half."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from pooled_path import glm_path
from scipy import stats
from scipy.special import expit
from vglm_study import NAMES, make_model, make_table, pooled_columns

import fedstat as fs
from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.inference.post_selection import aggregate_splits, debias
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.sums import Rows
from fedstat.kernels.penalized.coordinate_descent import gram_path
from fedstat.kernels.penalized.nodewise import INFLATION, relaxed_inverse
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty
from fedstat.models.vglm import debiased
from fedstat.models.vglm import results as results_module

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.DisclosureWarning")

BINARY = sm.families.Binomial()
LASSO = Penalty("lasso")


def near_copies(n=500, seed=0, response="normal"):
    """Columns of which some are nearly others: their inverse would blow up the standard errors."""
    table, random = make_table(n, seed, response), np.random.default_rng([seed, 5])
    for copy, original in (("x1", "x0"), ("x6", "x5"), ("x8", "x3")):
        spread = table[original].std()
        table[copy] = table[original] + 0.2 * spread * random.normal(size=n)
    return table


def correlations(table, names):
    X = pooled_columns(table, names)
    return (X - X.mean(axis=0)) / X.std(axis=0), X.std(axis=0)


def fit_and_debiased(monkeypatch, model, **options):
    """A fit, with the numbers that became its debiased estimates."""
    made = []
    monkeypatch.setattr(results_module, "make_debiased", spy(made, results_module.make_debiased))
    result = model.fit(inference="debiased", **options)
    return result, made[0].fitted.debiased


def spy(made, function):
    def watched(model, outcome):
        made.append(outcome)
        return function(model, outcome)

    return watched


# -- the nodewise lasso ----------------------------------------------------------------------------


def test_a_row_of_the_relaxed_inverse_is_the_lasso_of_a_column_on_the_others():
    Z, _ = correlations(near_copies(), ["x0", "x1", "x3", "x8", "x5", "x6", "x2", "x4"])
    R = Z.T @ Z / len(Z)
    Theta, lambdas = relaxed_inverse(R, len(Z))
    relaxed = np.flatnonzero(lambdas > 0.0)
    assert 4 <= len(relaxed) < 8
    for j in relaxed:
        others = np.arange(8) != j
        a = Theta[j] / Theta[j, j]
        lam = np.array([lambdas[j]])
        lasso = gram_path(
            R[np.ix_(others, others)],
            R[others, j],
            LASSO,
            CoefficientGroups.single(7),
            lambdas=lam,
            tol=1e-10,
        )
        np.testing.assert_allclose(-a[others], lasso.coefficients[0], atol=1e-5)
        assert Theta[j] @ R[:, j] == pytest.approx(1.0, abs=1e-9)
        # Karush, Kuhn and Tucker: correlations with what is left are at most lambda.
        assert np.abs((R @ a)[others]).max() <= lambdas[j] * (1.0 + 1e-4)
    exact = lambdas == 0.0
    np.testing.assert_allclose(Theta[exact], np.linalg.inv(R)[exact], rtol=1e-9)


def test_less_bias_is_bought_for_a_quarter_of_the_standard_error():
    Z, _ = correlations(near_copies(), ["x0", "x1", "x3", "x8", "x5", "x6", "x2", "x4"])
    R, n = Z.T @ Z / len(Z), len(Z)
    Theta, lambdas = relaxed_inverse(R, n)
    for j in np.flatnonzero(lambdas > 0.0):
        others, taus = np.arange(8) != j, []
        grid = np.abs(R[others, j]).max() * 1e-3 ** (np.arange(400) / 399)
        path = gram_path(
            R[np.ix_(others, others)], R[others, j], LASSO, CoefficientGroups.single(7), lambdas=grid
        )
        for gamma in path.coefficients:
            a = np.insert(-gamma, j, 1.0)
            q, variance = R @ a, a @ R @ a
            eta = np.sqrt(n) * np.abs(q[others]).max() / np.sqrt(variance)
            taus.append((np.sqrt(variance) / q[j], eta))
        first = next(tau for tau, eta in taus if eta <= np.sqrt(2.0 * np.log(8)))
        tau = np.sqrt(Theta[j] @ R @ Theta[j])
        assert tau <= INFLATION * first * 1.05
        assert tau < np.sqrt(np.linalg.inv(R)[j, j])
        # The next lambda of the grid would have been too much, or there is none.
        assert tau >= INFLATION * first / 1.4 or lambdas[j] == pytest.approx(grid[-1])


def test_dependent_columns_have_a_relaxed_inverse_and_constant_ones_are_refused():
    Z, _ = correlations(make_table(), ["x0", "x3", "x5"])
    Z = np.column_stack([Z, Z[:, 0]])
    Theta, lambdas = relaxed_inverse(Z.T @ Z / len(Z), len(Z))
    assert np.isfinite(Theta).all() and (lambdas > 0.0).all()
    H = np.diag([1.0, 1.0, 0.0])
    with pytest.raises(EstimationError, match="1 of 2 columns are constant"):
        debias(np.zeros(3), np.zeros(3), H, 100)


# -- debiased estimates ----------------------------------------------------------------------------


def test_with_the_inverse_itself_it_is_least_squares():
    table = make_table(400)
    result = make_model(table, penalty="lasso").fit(inference="debiased")
    ols = sm.OLS(table["y"], sm.add_constant(pooled_columns(table, result.params.index[1:]))).fit()
    np.testing.assert_allclose(result.debiased.params, ols.params, atol=1e-6 * ols.bse.max())
    np.testing.assert_allclose(result.debiased.bse, ols.bse, rtol=1e-7)
    assert "relaxed for 0 of 12" in " ".join(str(result.summary()).split())


def test_close_columns_are_least_squares_with_enough_entities_and_announced_with_few():
    """A relaxed inverse leaves a bias where columns are near copies of others with an effect."""
    table = near_copies()
    result = make_model(table, penalty="lasso").fit(inference="debiased")
    ols = sm.OLS(table["y"], sm.add_constant(pooled_columns(table, result.params.index[1:]))).fit()
    np.testing.assert_allclose(result.debiased.params, ols.params, atol=1e-6 * ols.bse.max())
    few = make_model(near_copies(60), penalty="lasso").fit(inference="debiased")
    notes = few.diagnostics().set_index("kind")
    assert notes.loc["debiased", "severity"] == "warning"
    assert notes.loc["debiased", "values"]["correlation"] > 0.9


@pytest.mark.parametrize("penalty", ["scad", "lasso"])
def test_debiased_estimates_are_the_formula_over_the_rows(penalty, monkeypatch):
    monkeypatch.setattr(debiased, "ENOUGH", np.inf)
    table = near_copies()
    result, found = fit_and_debiased(monkeypatch, make_model(table, penalty=penalty))
    names, n = list(result.params.index[1:]), len(table)
    Z, scale = correlations(table, names)
    y = (table["y"] - table["y"].mean()).to_numpy()
    Sigma, c = Z.T @ Z / n, Z.T @ y / n
    path = gram_path(Sigma, c, LASSO, CoefficientGroups.single(12), tol=1e-10)
    rss = ((y[:, None] - Z @ path.coefficients.T) ** 2).sum(axis=0)
    aic = n * np.log(rss / n) + 2.0 * np.count_nonzero(path.coefficients, axis=1)
    b, M = path.coefficients[np.argmin(aic)], relaxed_inverse(Sigma, n)[0]
    assert found.relaxed > 0
    assert found.lam == pytest.approx(path.lambdas[np.argmin(aic)], rel=1e-6)
    expected = b + M @ (Z.T @ (y - Z @ b)) / n
    np.testing.assert_allclose(result.debiased.params[1:] * scale, expected, atol=1e-5)
    s2 = sm.OLS(y, sm.add_constant(Z)).fit().mse_resid
    np.testing.assert_allclose(
        result.debiased.bse[1:] * scale, np.sqrt(s2 / n * np.diag(M @ Sigma @ M.T)), rtol=1e-5
    )
    # The intercept belongs to columns that are not centered.
    means = pooled_columns(table, names).mean(axis=0)
    assert result.debiased.params.iloc[0] == pytest.approx(
        table["y"].mean() - means @ result.debiased.params[1:], rel=1e-8
    )


@pytest.mark.parametrize("response", ["binary", "count"])
def test_debiased_estimates_of_other_families_are_the_formula_over_the_rows(response, monkeypatch):
    monkeypatch.setattr(debiased, "ENOUGH_OTHERS", np.inf)
    table = near_copies(600, 1, response)
    family = BINARY if response == "binary" else sm.families.Poisson()
    result, found = fit_and_debiased(monkeypatch, make_model(table, family=family))
    names, n = list(result.params.index[1:]), len(table)
    Z, scale = correlations(table, names)
    Z, y = np.column_stack([np.ones(n), Z]), table["y"].to_numpy()
    groups = CoefficientGroups.single(13, np.concatenate([[0.0], np.ones(12)]))
    lambdas = np.array([found.lam])
    spec = DistributionSpec.of(family)
    b = glm_path(Rows(Z, y), spec, LASSO, groups, lambdas=lambdas, tol=1e-11).coefficients[0]
    mean = family.link.inverse(Z @ b)
    weight = family.variance(mean)
    H, score = Z.T @ (Z * weight[:, None]) / n, Z.T @ (y - mean) / n
    assert found.relaxed > 0
    # Intercept and columns together, by partial regression of the weighted columns on the intercept.
    centered = Z[:, 1:] - weight @ Z[:, 1:] / weight.sum()
    G = centered.T @ (centered * weight[:, None]) / n
    root = np.sqrt(np.diag(G))
    Theta = relaxed_inverse(G / np.outer(root, root), n)[0] / np.outer(root, root)
    expected = b[1:] + Theta @ (centered.T @ (y - mean)) / n
    np.testing.assert_allclose(result.debiased.params[1:] * scale, expected, atol=2e-5)
    np.testing.assert_allclose(
        result.debiased.bse[1:] * scale, np.sqrt(np.diag(Theta @ G @ Theta.T) / n), rtol=1e-4
    )
    assert np.abs(score[0]) < 1e-6 and H[0, 0] == pytest.approx(weight.mean())


def test_grouped_terms_are_debiased_in_the_units_of_their_columns():
    table = make_table(1200, 3, "binary")
    grouped = make_model(table, family=BINARY, group_terms=True).fit(inference="debiased").debiased
    X = sm.add_constant(pooled_columns(table, grouped.params.index[1:]))
    plain = sm.GLM(table["y"], X, family=BINARY).fit()
    assert np.abs((grouped.params.to_numpy() - plain.params.to_numpy()) / plain.bse.to_numpy()).max() < 0.1
    np.testing.assert_allclose(grouped.bse, plain.bse, rtol=0.05)


def test_few_entities_leave_no_gram_for_debiased_estimates():
    table = make_table(100, 1, "binary")
    with pytest.raises(EstimationError, match="weighted sums of products of 12 columns are needed"):
        make_model(table, family=BINARY).fit(inference="debiased")
    with pytest.raises(EstimationError, match="weighted sums of products of 12 columns are needed"):
        make_model(table, family=BINARY).fit(inference="split")


# -- sample splitting ------------------------------------------------------------------------------


@pytest.mark.parametrize("response", ["normal", "binary"])
def test_one_half_selects_and_the_other_estimates(response):
    table = make_table(600, 2, response)
    options = {} if response == "normal" else {"family": BINARY}
    result = make_model(table, **options).fit(inference="split", seed=4)
    code = np.random.default_rng(4).permutation(np.arange(600) % 2)
    first = make_model(table[code == 0].reset_index(drop=True), **options).fit()
    np.testing.assert_allclose(result.params, first.params, atol=2e-6 * np.abs(first.params).max())
    assert result.lam == pytest.approx(first.lam, rel=1e-6)
    names = list(first.params.index[1:][first.params[1:] != 0.0])
    other = table[code == 1]
    X = sm.add_constant(pooled_columns(other, names))
    pooled = sm.OLS(other["y"], X).fit() if response == "normal" else sm.GLM(other["y"], X, BINARY).fit()
    np.testing.assert_allclose(result.refit.params, pooled.params, atol=1e-6 * pooled.bse.max())
    np.testing.assert_allclose(result.refit.bse, pooled.bse, rtol=1e-6)
    assert (result.nobs, result.refit.nobs) == (300, 300)
    assert result.llf == pytest.approx(first.llf, rel=1e-7)
    assert result.llnull == pytest.approx(first.llnull, rel=1e-9)
    assert result.refit.llf == pytest.approx(pooled.llf, rel=1e-9)
    with pytest.raises(NotAvailableError, match="half of the entities that selected"):
        _ = result.bse


def test_cross_validation_within_the_half_that_selects():
    result = make_model(make_table(600)).fit(inference="split", select="cv", folds=6, seed=1)
    code = np.random.default_rng(1).permutation(np.arange(600) % 6)
    table = make_table(600)
    half = make_model(table[code < 3].reset_index(drop=True)).fit()
    np.testing.assert_allclose(result.path["loss"].iloc[0], half.path["loss"].iloc[0], rtol=1e-6)
    assert result.path["cv"].notna().all() and result.nobs == 300
    binary = make_model(make_table(2400, 1, "binary"), family=BINARY)
    fit = binary.fit(inference="split", select="cv", folds=4, n_lambdas=10, seed=1)
    assert fit.lam == fit.path["cv"].idxmin() and fit.refit.nobs == 1200


def test_many_splits_make_one_p_value():
    p_values = np.array([[0.01, 1.0], [0.02, 0.04], [0.05, 1.0], [1.0, 1.0]])
    # By hand: the smallest of p_(k) / (k / 4), times 1 - log(0.05), at most one.
    factor = 1.0 - np.log(0.05)
    np.testing.assert_allclose(aggregate_splits(p_values), [min(factor * 0.04, 1.0), min(factor * 0.16, 1.0)])
    np.testing.assert_allclose(
        aggregate_splits(p_values, 0.6),
        (1.0 - np.log(0.6)) * np.array([0.2 / 3, 1.0]).clip(max=1.0 / (1.0 - np.log(0.6))),
    )
    table = make_table(600)
    result = make_model(table).fit(inference="split", splits=8, folds=6, seed=2)
    random = np.random.default_rng(2)
    code, names = random.permutation(np.arange(600) % 6), list(result.params.index[1:])
    expected = np.ones((8, 12))
    for one in expected:
        order = random.permutation(6)
        first = np.isin(code, order[:3])
        fit = make_model(table[first].reset_index(drop=True)).fit()
        chosen = [name for name in names if fit.params[name] != 0.0]
        ols = sm.OLS(table["y"][~first], sm.add_constant(pooled_columns(table[~first], chosen))).fit()
        z = np.abs(ols.params / ols.bse)[1:]
        one[np.isin(names, chosen)] = np.minimum(2.0 * stats.norm.sf(z) * len(chosen), 1.0)
    report = result.selection_report().set_index("term")
    np.testing.assert_allclose(report["split_p"], aggregate_splits(expected), rtol=1e-4)
    assert (report["split_p"] < 0.05).sum() == 4
    with pytest.raises(ModelError, match="splits: more than one"):
        make_model(table).fit(splits=5)


# -- what is said ----------------------------------------------------------------------------------


@pytest.mark.parametrize("inference", ["debiased", "split"])
def test_the_summary_and_the_file_say_which_inference_it_is(inference, tmp_path):
    result = make_model(make_table(400)).fit(inference=inference, seed=1)
    text = str(result.summary())
    assert inference.replace("split", "sample splitting") in text.splitlines()[0]
    assert "onditional on selection" not in text
    assert ("x8" in text) == (inference == "debiased")
    assert "No standard errors" not in text
    result.save(tmp_path / "fit")
    again = fs.load(tmp_path / "fit")
    assert str(again.summary()) == text
    pd.testing.assert_frame_equal(again.selection_report(), result.selection_report())
    assert str(again.refit.summary()) == str(result.refit.summary())
    if inference == "debiased":
        report = result.selection_report().set_index("term")
        np.testing.assert_allclose(report["debiased"], result.debiased.params[1:])
        np.testing.assert_allclose(report["debiased_p"], result.debiased.pvalues[1:])
        pd.testing.assert_frame_equal(again.debiased.tidy(), result.debiased.tidy())
        assert "debiased" in str(result.debiased.summary())
        with pytest.raises(NotAvailableError, match="maximize no likelihood"):
            _ = result.debiased.llf


def test_the_normal_family_exchanges_no_more_for_debiased_estimates():
    table = make_table()
    plain, debiased = (make_model(table).fit(inference=kind) for kind in ("conditional", "debiased"))
    columns = ["step", "array", "shape", "kind"]
    pd.testing.assert_frame_equal(debiased.ledger.to_frame()[columns], plain.ledger.to_frame()[columns])
    with pytest.raises(NotAvailableError, match="inference='debiased'"):
        _ = plain.debiased
    default = make_model(table).fit()
    assert default.selection.inference == "debiased" and not default.summary().headlines
    pd.testing.assert_frame_equal(default.debiased.tidy(), debiased.debiased.tidy())
    text = " ".join(str(default.summary()).split())
    assert f"Selected by scad: {', '.join(default.params.index[1:][default.params[1:] != 0.0])}." in text


def test_the_default_inference_never_asks_for_a_release():
    """Where debiased estimates need one, or nothing was selected, intervals are conditional."""
    table = make_table()
    for options, given in (
        ({"missing": "em"}, {}),
        ({}, {"lam": 0.0}),
        ({}, {"exchange": "admm", "n_lambdas": 3, "ratio": 0.1}),
        ({"unpenalized": NAMES}, {"lam": 0.1}),
        ({"family": sm.families.Poisson()}, {"n_lambdas": 5}),
    ):
        model = make_model(table.assign(y=np.abs(table["y"]).round()), **options)
        assert model.fit(**given).selection.inference == "conditional", (options, given)


def test_arguments_that_do_not_go_together_are_refused():
    model = make_model(make_table())
    for options in ({"lam": 0.0}, {"draws": 5, "folds": 8}, {"select": "cv", "folds": 3}):
        with pytest.raises(ModelError, match=r"split'|half of the entities"):
            model.fit(inference="split", **options)
    with pytest.raises(ModelError, match="exchange='admm' does not release"):
        model.fit(inference="debiased", exchange="admm")
    with pytest.raises(ModelError, match="inference"):
        model.fit(inference="selective")


def test_a_weak_column_is_not_pulled_to_zero():
    """Where SCAD leaves a column out, its debiased estimate still has the truth in its interval."""
    random, errors = np.random.default_rng(3), []
    for _ in range(12):
        X = random.normal(size=(300, 4))
        table = pd.DataFrame(X, columns=list("abcd"))
        table["y"] = (random.random(300) < expit(X @ [1.0, 0.15, 0.0, 0.0])).astype(float)
        partition = fs.ClientPartition.from_frame(table, columns={"All": ["y", *"abcd"]})
        fit = fs.VerticalGLM.from_formula("y ~ .", partition, family=BINARY)
        found = fit.fit(inference="debiased", n_lambdas=10, ratio=1e-2).debiased
        errors.append((found.params["b"] - 0.15) / found.bse["b"])
    assert abs(np.mean(errors)) < 3.0 / np.sqrt(12)  # an estimate of zero is off by 1.1
    assert 0.6 < np.std(errors) < 1.4
