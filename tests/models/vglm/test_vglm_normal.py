"""The normal family from one exchange of sums: what an analyst with all rows would have found."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from vglm_study import COLUMNS, NAMES, make_model, make_partition, make_table, pooled_columns

import fedstat as fs
from fedstat.errors import DataWarning, EstimationError, ModelError, PolicyError
from fedstat.federation.disclosure.policy import Policy
from fedstat.kernels.penalized.coordinate_descent import gram_path
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty
from fedstat.models.vglm.path_setup import first_smallest

TABLE = make_table()
PENALTIES = [("lasso", {}), ("elastic_net", {"l1_ratio": 0.5}), ("scad", {}), ("mcp", {"a": 2.5})]


def standardize(table, names=NAMES):
    X, y = pooled_columns(table, names), table["y"].to_numpy()
    scale = X.std(axis=0)
    Z = (X - X.mean(axis=0)) / scale
    return Z, y - y.mean(), scale


def test_without_a_penalty_it_is_least_squares():
    result = make_model(TABLE).fit(lam=0.0)
    ols = sm.OLS(TABLE["y"], sm.add_constant(pooled_columns(TABLE, result.params.index[1:]))).fit()
    np.testing.assert_allclose((result.params.to_numpy() - ols.params) / ols.bse, 0.0, atol=1e-7)
    np.testing.assert_allclose(result.bse, ols.bse, rtol=1e-8)
    np.testing.assert_allclose(result.cov_params() / ols.cov_params().to_numpy(), 1.0, rtol=1e-5)
    assert result.llf == pytest.approx(ols.llf, abs=1e-6)
    assert result.bic == pytest.approx(ols.bic, abs=1e-6)
    assert result.rsquared == pytest.approx(ols.rsquared, abs=1e-9)
    assert result.scale == pytest.approx(ols.mse_resid, rel=1e-8)
    assert result.llnull == pytest.approx(sm.OLS(TABLE["y"], np.ones(len(TABLE))).fit().llf, abs=1e-6)


@pytest.mark.parametrize("algorithm", ["lla", "descent"])
@pytest.mark.parametrize(("penalty", "options"), PENALTIES)
def test_the_path_is_that_of_pooled_rows(penalty, options, algorithm):
    result = make_model(TABLE, penalty=penalty, **options).fit(algorithm=algorithm, n_lambdas=12)
    names = list(result.params.index[1:])
    Z, y, scale = standardize(TABLE, names)
    pooled = gram_path(
        Z.T @ Z / len(Z),
        Z.T @ y / len(Z),
        Penalty(penalty, **options),
        CoefficientGroups.single(len(names)),
        size=12,
        algorithm=algorithm,
    )
    np.testing.assert_allclose(result.path.index, pooled.lambdas, rtol=1e-7)
    np.testing.assert_allclose(
        result.path_params.iloc[:, 1:] * scale, pooled.coefficients, atol=2e-6 * np.abs(y).max()
    )
    assert result.converged
    assert result.path["kkt"].max() <= 1e-7


@pytest.mark.parametrize("penalty", ["lasso", "scad"])
def test_the_gradient_over_the_rows_certifies_the_optimum(penalty):
    result = make_model(TABLE, penalty=penalty).fit()
    names, lam = list(result.params.index[1:]), result.lam
    Z, _, scale = standardize(TABLE, names)
    X = np.column_stack([np.ones(len(Z)), pooled_columns(TABLE, names)])
    gradient = Z.T @ (TABLE["y"] - X @ result.params) / len(Z)
    size = np.abs(result.params[1:] * scale).to_numpy()
    slope = np.full(len(size), lam)
    if penalty == "scad":
        slope = np.where(size <= lam, lam, np.maximum(3.7 * lam - size, 0.0) / 2.7)
    zero = size == 0.0
    assert zero.any() and not zero.all()
    assert (np.abs(gradient[zero]) <= lam * (1.0 + 1e-6)).all()
    np.testing.assert_allclose(np.abs(gradient[~zero]), slope[~zero], atol=1e-6)


def test_bic_is_that_of_the_fits_and_chooses_the_smallest():
    result = make_model(TABLE, penalty="mcp").fit(select="bic")
    X = np.column_stack([np.ones(len(TABLE)), pooled_columns(TABLE, result.params.index[1:])])
    n = len(TABLE)
    rss = ((TABLE["y"].to_numpy()[:, None] - X @ result.path_params.T.to_numpy()) ** 2).sum(axis=0)
    df = np.count_nonzero(result.path_params.to_numpy(), axis=1)
    bic = n * np.log(rss / n) + np.log(n) * df
    np.testing.assert_allclose(result.path["bic"], bic, rtol=1e-7)
    assert result.path.loc[result.lam, "bic"] == pytest.approx(bic.min(), rel=1e-9)
    assert set(result.params[result.params != 0.0].index) >= {"x0", "x3", "x5", "f[T.b]"}


def test_of_lambdas_with_one_fit_the_largest_is_chosen():
    """Where SCAD is flat at all that is selected, the fit is least squares on it whatever lambda is."""
    equal = []
    for seed in range(4):
        table = make_table(400, seed)
        table["y"] = 5.0 * table["x0"] - 4.0 * table["x3"] + np.random.default_rng(seed).normal(size=400)
        result = make_model(table, penalty=("scad", "mcp")[seed % 2]).fit(n_lambdas=80)
        bic = result.path["bic"].to_numpy()
        same = np.flatnonzero(bic <= bic.min() + 1e-6)
        assert np.ptp(result.path_params.iloc[same], axis=0).max() < 1e-5
        assert result.lam == result.path.index[same[0]]
        equal.append(len(same))
    # Rounding puts the smallest number itself anywhere among them.
    assert max(equal) > 3
    assert first_smallest(np.array([3.0, 1.0 + 1e-12, 1.0, 2.0])) == 1
    assert first_smallest(np.array([3.0, 1.0 + 1e-6, 1.0, 2.0])) == 2
    assert first_smallest(np.array([1e-9, 0.0]), 400) == 0


def test_columns_without_penalty_stay_and_terms_come_whole():
    model = make_model(TABLE, penalty="lasso", group_terms=True, unpenalized=["x8"])
    path = model.fit(n_lambdas=15).path_params
    assert (path["x8"] != 0.0).all()
    levels = path[["f[T.b]", "f[T.c]", "f[T.d]"]] != 0.0
    assert (levels.all(axis=1) | ~levels.any(axis=1)).all()
    assert levels.any(axis=None) and not levels.all(axis=None)
    with pytest.raises(ModelError, match="no column or term 'x9'"):
        make_model(TABLE, unpenalized=["x9"])


def test_a_grouped_factor_does_not_depend_on_its_reference_level():
    coded = TABLE.assign(f=TABLE["f"].map({"a": "z", "b": "b", "c": "c", "d": "a"}))
    one, two = (make_model(t, penalty="mcp", group_terms=True).fit(n_lambdas=10) for t in (TABLE, coded))
    X = np.column_stack([np.ones(300), pooled_columns(TABLE, one.params.index[1:])])
    Y = np.column_stack([np.ones(300), pooled_columns(coded, two.params.index[1:])])
    np.testing.assert_allclose(X @ one.path_params.T.to_numpy(), Y @ two.path_params.T.to_numpy(), atol=1e-4)


def test_adaptive_weights_are_those_of_least_squares():
    result = make_model(TABLE, penalty="lasso", adaptive=1.0).fit(n_lambdas=8)
    names = list(result.params.index[1:])
    Z, y, scale = standardize(TABLE, names)
    G, c = Z.T @ Z / len(Z), Z.T @ y / len(Z)
    groups = CoefficientGroups.single(len(names), 1.0 / np.abs(np.linalg.solve(G, c)))
    pooled = gram_path(G, c, Penalty("lasso"), groups, lambdas=result.path.index.to_numpy())
    np.testing.assert_allclose(result.path_params.iloc[:, 1:] * scale, pooled.coefficients, atol=1e-5)


def test_cross_validation_is_that_of_rows():
    result = make_model(TABLE, penalty="lasso").fit(select="cv", folds=4, n_lambdas=6, seed=3)
    names = list(result.params.index[1:])
    code = np.random.default_rng(3).permutation(np.arange(300) % 4)
    X, y, lambdas = pooled_columns(TABLE, names), TABLE["y"].to_numpy(), result.path.index.to_numpy()
    errors = np.empty((4, 6))
    for fold in range(4):
        Z, c, scale = standardize(TABLE[code != fold], names)
        fit = gram_path(
            Z.T @ Z / len(Z),
            Z.T @ c / len(Z),
            Penalty("lasso"),
            CoefficientGroups.single(12),
            lambdas=lambdas,
        )
        beta = fit.coefficients / scale
        a = y[code != fold].mean() - beta @ X[code != fold].mean(axis=0)
        here = code == fold
        errors[fold] = ((y[here][:, None] - a - X[here] @ beta.T) ** 2).mean(axis=0)
    np.testing.assert_allclose(result.path["cv"], errors.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(result.path["cv_se"], errors.std(axis=0, ddof=1) / 2.0, rtol=1e-5)
    assert result.lam == lambdas[np.argmin(errors.mean(axis=0))]


def test_entities_that_a_site_lacks_are_left_out_and_counted():
    table = TABLE.copy()
    table.loc[:39, ["x3", "x4", "f"]] = np.nan
    table.loc[30:49, ["x5", "x6", "x7", "x8"]] = np.nan
    with pytest.warns(DataWarning, match=r"50 of 300 .*40 at Clinic, 20 at Registry"):
        model = make_model(table, penalty="lasso")
    result = model.fit(n_lambdas=6)
    complete = make_model(TABLE.iloc[50:].reset_index(drop=True), penalty="lasso").fit(n_lambdas=6)
    np.testing.assert_allclose(result.path_params, complete.path_params, atol=1e-6)
    assert result.nobs == 250
    assert "50 of 300" in " ".join(result.notes)


def test_nothing_per_entity_leaves():
    policy = Policy(refused_kinds=frozenset({"per entity", "raw columns", "sketch"}))
    result = make_model(TABLE, partition={"policy": policy}).fit(folds=4, select="cv")
    frame = result.ledger.to_frame()
    assert not set(frame["kind"]) & {"per entity", "raw columns", "sketch"}
    assert set(frame.loc[frame["array"] == "share", "shape"].map(len)) == {3}
    sums = frame[frame["kind"].isin(["aggregate", "masked share"])]
    assert (sums["entities"] >= 300).all()


def test_the_order_of_sites_and_who_deals_change_nothing():
    result = make_model(TABLE).fit(n_lambdas=6)
    columns = dict(reversed(COLUMNS.items()))
    turned = make_model(TABLE, columns, coordinator="apart").fit(n_lambdas=6)
    np.testing.assert_allclose(turned.path_params[result.path_params.columns], result.path_params, atol=1e-5)
    two = {"Bank": COLUMNS["Bank"], "Rest": [*COLUMNS["Clinic"], *COLUMNS["Registry"]]}
    np.testing.assert_allclose(
        make_model(TABLE, two).fit(n_lambdas=6).path_params[result.path_params.columns],
        result.path_params,
        atol=1e-5,
    )
    one = {"All": ["y", *[c for own in COLUMNS.values() for c in own if c != "y"]]}
    np.testing.assert_allclose(
        make_model(TABLE, one).fit(n_lambdas=6).path_params[result.path_params.columns],
        result.path_params,
        atol=1e-5,
    )


def test_too_few_entities_are_refused_by_the_coordinator_and_at_the_site():
    with pytest.raises(EstimationError, match="released only over 26 or more"):
        make_model(make_table(n=25), penalty="lasso", partition={"min_count": 1})
    with pytest.raises(EstimationError, match="use at most 11 folds"):
        make_model(TABLE).fit(select="cv", folds=20)
    model = make_model(TABLE, partition={"policies": {"Registry": Policy(min_count=80)}})
    with pytest.raises(PolicyError, match="Registry: its policy"):
        model.fit(select="cv", folds=4)


def test_arguments_without_a_meaning_are_refused():
    partition = make_partition(TABLE)
    with pytest.raises(ModelError, match="leaves out the intercept"):
        fs.VerticalGLM.from_formula("y ~ x0 + x3 - 1", partition)
    with pytest.raises(ModelError, match="family"):
        fs.VerticalGLM.from_formula("y ~ .", partition, family=sm.families.Tweedie())
    with pytest.raises(ModelError, match="no penalty 'rigid'"):
        fs.VerticalGLM.from_formula("y ~ .", partition, penalty="rigid")
    model = make_model(TABLE)
    with pytest.raises(ModelError, match="select"):
        model.fit(select="best")
    with pytest.raises(ModelError, match="give only one of them"):
        model.fit(lam=0.1, lambdas=[0.1])
    with pytest.raises(ModelError, match="zero or more"):
        model.fit(lambdas=[0.1, -1.0])
