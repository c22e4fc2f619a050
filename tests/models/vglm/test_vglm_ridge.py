"""Ridge: closed form, penalized likelihood of the pooled table, degrees of freedom, what it refuses."""

import numpy as np
import pytest
import statsmodels.api as sm
from scipy.special import expit

import fedstat as fs
from fedstat.errors import ModelError, NotAvailableError
from fedstat.kernels.penalized.penalties import Penalty

N = 500


@pytest.fixture(scope="module")
def data():
    return fs.datasets.make_blocks(N, missing=[0.0, 0.0, 0.0], seed=1)


@pytest.fixture(scope="module")
def pooled(data):
    table = data.complete
    X = table[[c for c in table if c not in (data.key, "y")]]
    Z = (X - X.mean()) / X.std(ddof=0)
    return Z.to_numpy(), X.std(ddof=0).to_numpy(), table["y"].to_numpy()


def model(data, formula="y ~ .", **options):
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    return fs.VerticalGLM.from_formula(formula, partition, penalty="ridge", **options)


@pytest.fixture(scope="module")
def fitted(data):
    return model(data).fit(n_lambdas=20)


def test_the_path_of_the_normal_family_is_the_closed_form(fitted, pooled):
    Z, scale, y = pooled
    for lam, params in fitted.path_params.iterrows():
        G = Z.T @ Z / N
        b = np.linalg.solve(G + lam * np.eye(len(G)), Z.T @ (y - y.mean()) / N)
        np.testing.assert_allclose(params.to_numpy()[1:] * scale, b, rtol=1e-8, atol=1e-12)
    # statsmodels penalizes an intercept as well: center the response instead.
    lam = fitted.lam
    own = sm.OLS(y - y.mean(), Z).fit_regularized(alpha=lam, L1_wt=0.0).params
    np.testing.assert_allclose(fitted.params.to_numpy()[1:] * scale, own, rtol=1e-8)


def test_degrees_of_freedom_are_the_trace_of_the_hat_matrix(fitted, pooled):
    Z, _, y = pooled
    values = np.linalg.svd(Z, compute_uv=False) ** 2 / N
    df = [1.0 + np.sum(values / (values + lam)) for lam in fitted.path.index]
    np.testing.assert_allclose(fitted.path["df"], df, rtol=1e-9)
    assert df[0] < 1.08 and df[-1] > Z.shape[1] + 0.98
    minus_twice = N * np.log(2.0 * fitted.path["loss"])
    assert fitted.lam == (minus_twice + np.log(N) * np.array(df)).idxmin()
    residual = y - y.mean() - Z @ (fitted.params.to_numpy()[1:] * pooled[1])
    assert fitted.scale == pytest.approx(residual @ residual / (N - df[fitted.selection.chosen]))


@pytest.mark.parametrize("path", ["quadratic", "exact"])
def test_the_fit_of_a_binary_response_maximizes_the_penalized_likelihood(data, pooled, path):
    Z, scale, y = pooled
    y, D = (y > 0.0).astype(float), np.column_stack([np.ones(N), Z])
    result = model(data, "I(y > 0) ~ .", family=sm.families.Binomial()).fit(path=path, n_lambdas=8, tol=1e-11)
    b, R = np.zeros(D.shape[1]), result.lam * np.diag([0.0, *np.ones(Z.shape[1])])
    for _ in range(30):
        p = expit(D @ b)
        H = D.T @ (D * (p * (1.0 - p))[:, None]) / N
        b += np.linalg.solve(H + R, D.T @ (y - p) / N - R @ b)
    np.testing.assert_allclose(result.params.to_numpy()[1:] * scale, b[1:], atol=1e-8)
    # Of the chosen fit; those of other lambdas use its weights.
    assert result.path["df"][result.lam] == pytest.approx(np.trace(np.linalg.solve(H + R, H)), rel=1e-5)


@pytest.mark.parametrize("between", ["free", "independent"])
def test_with_all_blocks_the_fit_of_missing_blocks_is_the_same(data, fitted, between):
    result = model(data, missing="em", between=between).fit(lambdas=fitted.path.index.tolist())
    np.testing.assert_allclose(result.path_params, fitted.path_params, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.path["df"], fitted.path["df"], rtol=1e-5)
    assert result.lam == fitted.lam and result.observed.refit_rsquared == result.rsquared


def test_missing_blocks_have_a_grid_of_their_own():
    data = fs.datasets.make_blocks(N, seed=1)
    result = model(data, missing="em").fit(n_lambdas=6)
    df = result.path["df"]
    assert 1.0 < df.iloc[0] < 1.2 and df.iloc[-1] > 7.9 and (np.diff(df) > 0.0).all()
    assert "No standard errors" in str(result.summary())


def test_the_one_standard_error_rule_shrinks_more(data):
    fits = {select: model(data).fit(select=select, n_lambdas=20) for select in ("cv", "1se")}
    assert fits["1se"].lam > fits["cv"].lam == fits["cv"].path["cv"].idxmin()


def test_unpenalized_columns_are_not_shrunken(data, pooled):
    Z, scale, y = pooled
    result = model(data, unpenalized=["A1"]).fit(lam=1e6)
    names = list(result.params.index[1:])
    alone = np.polyfit(Z[:, names.index("A1")], y, 1)[0]
    assert result.params["A1"] * scale[names.index("A1")] == pytest.approx(alone, rel=1e-4)
    assert np.abs(result.params.drop(["Intercept", "A1"])).max() < 1e-4


def test_no_statement_treats_a_column_as_selected(fitted):
    text = str(fitted.summary())
    assert "ridge: shrunken estimates without standard errors" in text and "No standard errors" in text
    assert "Selected" not in text and "naive" not in text.lower() and "std err" not in text
    for name in ("bse", "refit"):
        with pytest.raises(NotAvailableError, match=r"fit\(lam=0\) has unpenalized estimates"):
            getattr(fitted, name)
    with pytest.raises(NotAvailableError, match="ridge selects no columns"):
        fitted.selection_report()


def test_lambda_zero_is_the_fit_without_a_penalty(data, pooled):
    Z, _, y = pooled
    result = model(data).fit(lam=0.0)
    own = sm.OLS(y, sm.add_constant(Z)).fit()
    np.testing.assert_allclose(result.pvalues.to_numpy()[1:], own.pvalues[1:], atol=0.05)
    np.testing.assert_allclose(result.tvalues.to_numpy()[1:], own.tvalues[1:], rtol=1e-8)


@pytest.mark.parametrize(
    ("options", "fit", "says"),
    [
        ({"adaptive": 1.0}, {}, "leave adaptive and group_terms out"),
        ({"group_terms": True}, {}, "leave adaptive and group_terms out"),
        ({}, {"exchange": "admm"}, "exchange='products'"),
        ({}, {"draws": 5, "folds": 6}, "selects no columns"),
        ({}, {"inference": "split"}, "selects no columns"),
        ({"l1_ratio": 0.5}, {}, "l1_ratio = 1 for lasso and ridge"),
        ({"unpenalized": ["A", "B", "C"]}, {}, "no column"),
    ],
)
def test_what_has_no_meaning_for_ridge_is_refused(data, options, fit, says):
    with pytest.raises(ModelError, match=says.replace("(", r"\(").replace(")", r"\)")):
        model(data, **options).fit(**fit)


def test_the_elastic_net_near_ridge_has_its_estimates_and_degrees_of_freedom(data, fitted):
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    near = fs.VerticalGLM.from_formula("y ~ .", partition, penalty="elastic_net", l1_ratio=1e-6)
    result = near.fit(lambdas=fitted.path.index[-5:].tolist())
    np.testing.assert_allclose(result.path_params, fitted.path_params.iloc[-5:], atol=1e-4)
    np.testing.assert_allclose(result.path["df"], fitted.path["df"].iloc[-5:], atol=1e-3)


def test_degrees_of_freedom_of_the_elastic_net_are_those_of_its_nonzero_columns(data, pooled):
    Z, _, _ = pooled
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    result = fs.VerticalGLM.from_formula("y ~ .", partition, penalty="elastic_net", l1_ratio=0.5).fit(
        n_lambdas=10
    )
    for lam, params in result.path_params.iterrows():
        active = Z[:, params.to_numpy()[1:] != 0.0]
        values = np.linalg.svd(active, compute_uv=False) ** 2 / N
        assert result.path["df"][lam] == pytest.approx(1.0 + np.sum(values / (values + 0.5 * lam)))


def test_ridge_has_no_selecting_part():
    assert Penalty("ridge").selecting == 0.0 and Penalty("lasso").selecting == 1.0
