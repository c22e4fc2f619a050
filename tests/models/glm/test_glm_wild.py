"""Wild bootstrap with sites as clusters against one on the stacked table, with the same draws."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from pooled import partition, table
from scipy.optimize import minimize

import fedstat as fs
from fedstat.errors import EstimationError, ModelError, NotAvailableError

FRAME = table(sites=6, n=700)
F = sm.families
SITES = sorted(FRAME["site"].unique())
CODE = FRAME["site"].map(SITES.index).to_numpy()
X = np.column_stack([np.ones(len(FRAME)), FRAME[["x", "z"]]])


def statistic(y, X, w, R, q):
    """T, or Wald's statistic over its degrees of freedom, with statsmodels' clustered errors."""
    fit = sm.WLS(y, X, weights=w).fit(cov_type="cluster", cov_kwds={"groups": CODE}, use_t=True)
    off, V = R @ fit.params - q, R @ fit.cov_params() @ R.T
    return off[0] / np.sqrt(V[0, 0]) if len(q) == 1 else off @ np.linalg.solve(V, off) / len(q)


def stacked(draws, R, q, w):
    """WCR: restricted fit, its residuals times the clusters' weights, refitted by statsmodels."""
    y, G = FRAME["gauss"].to_numpy(), np.linalg.inv(X.T @ (w[:, None] * X))
    free = G @ X.T @ (w * y)
    beta = free - G @ R.T @ np.linalg.solve(R @ G @ R.T, R @ free - q)
    rest = y - X @ beta
    return np.array([statistic(X @ beta + rest * v[CODE], X, w, R, q) for v in draws])


def linear(weights=None, **fit):
    model = fs.FederatedOLS.from_formula("gauss ~ x + z", partition(FRAME), var_weights=weights)
    return model.fit(**({"masked": False} | fit))


@pytest.mark.parametrize("kind", ["rademacher", "webb"])
@pytest.mark.parametrize("weights", [None, "v"])
@pytest.mark.parametrize(
    "hypothesis, R, q",
    [
        ("x = 0", [[0, 1, 0]], [0]),
        ("x + z = 0.2", [[0, 1, 1]], [0.2]),
        ("x = 0.1, z = 0", np.eye(3)[1:], [0.1, 0]),
    ],
)
def test_statistics_are_those_of_refits_to_the_stacked_table(kind, weights, hypothesis, R, q):
    found = linear(weights).wild_cluster_bootstrap(hypothesis, reps=19, weights=kind, seed=3)
    w = np.ones(len(FRAME)) if weights is None else FRAME[weights].to_numpy()
    R, q = np.array(R, dtype=float), np.array(q, dtype=float)
    expected = statistic(FRAME["gauss"].to_numpy(), X, w, R, q)
    np.testing.assert_allclose(found.statistic, expected, rtol=1e-10)
    drawn = stacked(found.draws, R, q, w)
    np.testing.assert_allclose(found.boot_statistics, drawn, rtol=1e-8, atol=1e-10)
    assert found.pvalue == np.mean(np.abs(drawn) >= abs(expected) * (1 - 1e-9))
    assert (found.conf_int is None) == (len(q) > 1)


def test_own_statistic_is_the_t_test_of_errors_clustered_by_site():
    robust = linear(cov_type="cluster", cov_kwds={"groups": "site", "correction": "CR1"})
    found = robust.wild_cluster_bootstrap("x = 0")
    np.testing.assert_allclose(found.statistic, robust.tvalues["x"], rtol=1e-9)
    assert robust.df_inference == 5 and robust.use_t
    theirs = sm.OLS(FRAME["gauss"].to_numpy(), X).fit(
        cov_type="cluster", cov_kwds={"groups": CODE}, use_t=True
    )
    np.testing.assert_allclose(robust.conf_int(), theirs.conf_int(), rtol=1e-8)
    np.testing.assert_allclose(robust.pvalues, theirs.pvalues, rtol=1e-8)


def test_few_sites_have_all_signs_and_no_seed_counts():
    result = linear()
    found = result.wild_cluster_bootstrap("x = 0", seed=1)
    assert found.enumerated and found.draws.shape == (64, 6) and len(np.unique(found.draws, axis=0)) == 64
    assert found.pvalue == result.wild_cluster_bootstrap("x = 0", seed=2).pvalue >= 2 / 64
    webb = result.wild_cluster_bootstrap("x = 0", weights="webb", seed=1)
    assert not webb.enumerated and webb.draws.shape == (999, 6)
    np.testing.assert_allclose(np.unique(webb.draws) ** 2, [1.5, 1, 0.5, 0.5, 1, 1.5])
    assert "64 draws" in str(found) and "p = " in str(found)


def test_interval_holds_the_values_that_are_not_rejected():
    result = linear()
    low, high = result.wild_cluster_bootstrap("x = 0", seed=1, weights="webb").conf_int
    assert low < result.params["x"] < high
    for value, inside in ((low + 1e-4, True), (low - 1e-4, False), (high - 1e-4, True), (high + 1e-4, False)):
        again = result.wild_cluster_bootstrap(f"x = {value:.12f}", seed=1, weights="webb")
        assert (again.pvalue >= 0.05) == inside


def test_masked_sums_of_a_linear_model_follow_from_own_fits():
    clear = linear().wild_cluster_bootstrap("x = 0", seed=1, reps=30)
    masked = linear(masked=True)
    assert masked._fit.masked
    again = masked.wild_cluster_bootstrap("x = 0", seed=1, reps=30)
    np.testing.assert_allclose(again.boot_statistics, clear.boot_statistics, rtol=1e-8)
    with pytest.raises(NotAvailableError, match="masked=False"):
        linear(masked=True, local=False).wild_cluster_bootstrap("x = 0")


def test_scores_of_other_families_are_those_at_the_restricted_fit():
    model = fs.GLORE.from_formula("binary ~ x + z", partition(FRAME))
    found = model.fit(masked=False).wild_cluster_bootstrap("x = 0.1", reps=40, seed=5)
    y = FRAME["binary"].to_numpy()

    def loss(free):
        eta = X @ np.array([free[0], 0.1, free[1]])
        return np.logaddexp(0.0, eta).sum() - y @ eta

    fit = sm.GLM(y, X[:, [0, 2]], family=F.Binomial(), offset=0.1 * X[:, 1]).fit(tol=1e-14)
    assert minimize(loss, [0.0, 0.0]).fun == pytest.approx(loss(fit.params))
    mu = fit.mu
    A = np.linalg.inv(X.T @ ((mu * (1 - mu))[:, None] * X))
    scores = np.array([((y - mu)[:, None] * X)[k == CODE].sum(axis=0) for k in range(6)])
    n, K = len(y), 6
    factor = K / (K - 1) * (n - 1) / (n - 3)

    def t(v):
        parts = v * (scores @ A[1])
        return parts.sum() / np.sqrt(factor * ((parts - parts.mean()) ** 2).sum())

    np.testing.assert_allclose(found.statistic, t(np.ones(6)), rtol=1e-7)
    np.testing.assert_allclose(found.boot_statistics, [t(v) for v in found.draws], rtol=1e-7)
    assert found.conf_int is None
    with pytest.raises(NotAvailableError, match="masked=False"):
        model.fit().wild_cluster_bootstrap("x = 0")


def test_what_it_cannot_do_is_said(tmp_path):
    result = linear()
    with pytest.raises(ModelError, match="weights"):
        result.wild_cluster_bootstrap("x = 0", weights="mammen")
    frame = FRAME[FRAME["site"].isin(["S3", "S4"])]
    two = fs.FederatedOLS.from_formula("gauss ~ x + z", partition(frame)).fit()
    with pytest.raises(EstimationError, match="too few"):
        two.wild_cluster_bootstrap("x = 0, z = 0")
    result.save(tmp_path / "fit.fed")
    again = fs.load(tmp_path / "fit.fed").wild_cluster_bootstrap("x = 0")
    assert again.pvalue == result.wild_cluster_bootstrap("x = 0").pvalue


def test_where_no_value_can_be_rejected_the_interval_has_no_ends():
    """Two of sixteen signs of four sites give the data's own statistic, for every hypothesis: p is 1/8."""
    frame = FRAME[FRAME["site"].isin(["S2", "S3", "S4", "S5"])]
    found = (
        fs.FederatedOLS.from_formula("gauss ~ x + z", partition(frame)).fit().wild_cluster_bootstrap("x = 0")
    )
    assert found.enumerated and found.pvalue >= 0.125 and found.conf_int == (-np.inf, np.inf)
    assert "No p-value can be below 0.125" in str(found)
