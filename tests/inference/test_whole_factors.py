"""Random effects of several coefficients together: published figures, brute force, and one alone."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from scipy import optimize, stats
from scipy.linalg import block_diag

import fedstat as fs
from fedstat.errors import EstimationError, ModelError
from fedstat.inference.meta_analysis import (
    RandomEffectsOptions,
    SiteCoefficients,
    combine_sites,
)
from fedstat.inference.meta_analysis import (
    combine_factor as combine_coefficients,
)

combine_factor = partial(combine_coefficients, sources=())

# Berkey et al. (1998), five trials of periodontal treatment: probing depth and attachment level.
ESTIMATES = np.array([[0.47, -0.32], [0.20, -0.60], [0.40, -0.12], [0.26, -0.31], [0.56, -0.39]])
PARTS = [
    (0.0075, 0.0030, 0.0077),
    (0.0057, 0.0009, 0.0008),
    (0.0021, 0.0007, 0.0014),
    (0.0029, 0.0009, 0.0015),
    (0.0148, 0.0072, 0.0304),
]
COVARIANCES = np.array([[[a, c], [c, d]] for a, c, d in PARTS])
NAMES = ("PD", "AL")


def test_the_published_example():
    """metafor's ``rma.mv(yi, V, mods=~0 + outcome, random=~outcome | trial, struct="UN")``; metaSEM's Q.

    Both have the data as dat.berkey1998 and Berkey98.
    """
    found = combine_factor(NAMES, ESTIMATES, COVARIANCES, test="z")
    assert found.estimate == pytest.approx([0.3534, -0.3392], abs=5e-5)
    assert found.std_error == pytest.approx([0.05885, 0.08791], abs=5e-6)
    assert found.tau**2 == pytest.approx([0.01173, 0.03265], abs=5e-6)
    assert found.correlation.loc["PD", "AL"] == pytest.approx(0.6088, abs=5e-5)
    assert pytest.approx(128.2267, abs=5e-5) == found.Q and found.Q_df == 8


@pytest.mark.parametrize("case", ["berkey", "missing"])
def test_mean_errors_and_q_follow_from_the_variances_by_generalized_least_squares(case):
    """Written out with one stacked design and covariance; Q at a variance of zero, I2 from it."""
    estimates, covariances = (ESTIMATES, COVARIANCES) if case == "berkey" else missing_some()
    K, p = estimates.shape
    found = combine_factor(tuple("abc")[:p], estimates, covariances, test="z")
    known = np.isfinite(estimates).ravel()
    X, y = np.tile(np.eye(p), (K, 1))[known], estimates.ravel()[known]

    def least_squares(Psi):
        V = block_diag(*(np.nan_to_num(S) + Psi for S in covariances))[np.ix_(known, known)]
        cov = np.linalg.inv(X.T @ np.linalg.solve(V, X))
        mean = cov @ X.T @ np.linalg.solve(V, y)
        return mean, cov, (y - X @ mean) @ np.linalg.solve(V, y - X @ mean)

    mean, cov, _ = least_squares(found.Psi)
    np.testing.assert_allclose(found.estimate, mean, rtol=1e-9)
    np.testing.assert_allclose(found.cov, cov, rtol=1e-9)
    Q, df = least_squares(np.zeros((p, p)))[2], known.sum() - p
    assert (found.Q, found.Q_df, found.I2) == pytest.approx((Q, df, 1 - df / Q))


def loss_of(estimates, covariances):
    """Minus twice the restricted log-likelihood, from contrasts that do not depend on the mean."""
    K, p = estimates.shape
    known = np.isfinite(estimates).ravel()
    X, y = np.tile(np.eye(p), (K, 1))[known], estimates.ravel()[known]
    free = np.zeros((K * p, known.sum() - p))
    free[known] = np.linalg.svd(X)[0][:, p:]
    z, within = free[known].T @ y, free.T @ block_diag(*np.nan_to_num(covariances)) @ free
    by_site = free.reshape(K, p, -1)

    def loss(x):
        L = np.zeros((p, p))
        L[np.tril_indices(p)] = x
        parts = np.einsum("ij,kif->kjf", L, by_site).reshape(K * p, -1)
        C = within + parts.T @ parts
        return np.linalg.slogdet(C)[1] + z @ np.linalg.solve(C, z)

    return loss


def missing_some():
    rng = np.random.default_rng(7)
    estimates, covariances = np.empty((8, 3)), np.empty((8, 3, 3))
    for k in range(8):
        A = 0.2 * rng.standard_normal((3, 5))
        covariances[k] = A @ A.T
        effect = rng.multivariate_normal([1.0, 0.0, -1.0], 0.1 * np.eye(3) + 0.1)
        estimates[k] = rng.multivariate_normal(effect, covariances[k])
    estimates[2, 1] = np.nan
    covariances[2, 1] = covariances[2, :, 1] = np.nan
    return estimates, covariances


@pytest.mark.parametrize("case", ["berkey", "missing"])
def test_the_likelihood_is_largest_there(case):
    estimates, covariances = (ESTIMATES, COVARIANCES) if case == "berkey" else missing_some()
    found = combine_factor(tuple("abc")[: estimates.shape[1]], estimates, covariances)
    p = estimates.shape[1]
    rng = np.random.default_rng(1)
    starts = [rng.normal(0.0, 0.3, p * (p + 1) // 2) for _ in range(4)]
    options = {"maxiter": 20000, "maxfev": 20000, "xatol": 1e-9, "fatol": 1e-12}
    loss = loss_of(estimates, covariances)
    runs = [optimize.minimize(loss, x, method="Nelder-Mead", options=options) for x in starts]
    best = min(runs, key=lambda run: run.fun)
    L = np.zeros((p, p))
    L[np.tril_indices(p)] = best.x
    np.testing.assert_allclose(found.Psi, L @ L.T, rtol=1e-4, atol=1e-6)


def test_the_derivative_is_that_of_the_likelihood():
    effects = SiteCoefficients.of(*missing_some())
    Psi = np.array([[0.2, 0.05, 0.0], [0.05, 0.1, 0.02], [0.0, 0.02, 0.3]])
    gradient = effects.mean(Psi)[4]
    for i in range(3):
        for j in range(3):
            D = np.zeros((3, 3))
            D[i, j] += 0.5e-6
            D[j, i] += 0.5e-6
            change = (effects.mean(Psi + D)[3] - effects.mean(Psi - D)[3]) / 2e-6
            assert gradient[i, j] == pytest.approx(change, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("test", ["adhoc", "knha", "z"])
def test_one_coefficient_is_combined_as_by_itself(test):
    b, v = ESTIMATES[:, 0], COVARIANCES[:, 0, 0]
    one = combine_sites(b, v, 0.05, RandomEffectsOptions(test=test))
    found = combine_factor(("PD",), b[:, None], v[:, None, None], test=test)
    row = found.to_frame().iloc[0]
    assert row["tau"] ** 2 == pytest.approx(one.tau2, rel=1e-6)
    np.testing.assert_allclose(
        row[["estimate", "std_error", "conf_low", "conf_high"]].to_numpy(dtype=float),
        [one.re_estimate, one.re_std_error, one.re_low, one.re_high],
        rtol=1e-6,
    )
    assert (found.Q, found.Q_df, found.I2) == pytest.approx((one.Q, one.df, one.I2))


def test_the_joint_test_does_not_depend_on_the_reference_level():
    estimates, covariances = missing_some()
    estimates, covariances = estimates[[0, 1, 3, 4, 5, 6, 7]], covariances[[0, 1, 3, 4, 5, 6, 7]]
    T = np.array([[1.0, 0.0, 0.0], [-1.0, 1.0, 0.0], [0.3, 0.0, 1.0]])
    one = combine_factor(tuple("abc"), estimates, covariances)
    other = combine_factor(tuple("abc"), estimates @ T.T, T @ covariances @ T.T)
    assert other.statistic == pytest.approx(one.statistic, rel=1e-5)
    assert pytest.approx((one.Q, one.I2), rel=1e-9) == (other.Q, other.I2)
    np.testing.assert_allclose(other.estimate, T @ one.estimate, rtol=1e-4, atol=1e-6)


def test_the_f_test_is_that_of_jackson_and_riley():
    z, knha = (combine_factor(NAMES, ESTIMATES, COVARIANCES, test=test) for test in ("z", "knha"))
    spread = SiteCoefficients.of(ESTIMATES, COVARIANCES).mean(z.Psi)[2] / 8
    np.testing.assert_allclose(knha.cov, spread * z.cov)
    assert knha.pvalue == pytest.approx(stats.f.sf(z.statistic / spread, 2, 8))
    assert z.pvalue == pytest.approx(stats.chi2.sf(2 * z.statistic, 2))


def fitted():
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"site": np.repeat(list("ABCDEF"), 200), "g": rng.choice(list("xyz"), 1200)})
    shift = pd.Series(dict(zip("ABCDEF", rng.normal(0.0, 0.5, 6), strict=True)))
    frame["y"] = (frame["g"] == "y") * (0.5 + frame["site"].map(shift)) + rng.standard_normal(1200)
    frame.loc[(frame["site"] == "F") & (frame["g"] == "z"), "g"] = "x"
    partition = fs.ClientPartition.from_frame(frame, by="site")
    return fs.FederatedGLM.from_formula("y ~ C(g)", partition, family=sm.families.Gaussian()).fit()


def test_a_factor_of_a_fit_is_requested_by_its_term():
    comparison = fitted().heterogeneity
    found = comparison.random_effects_of("C(g)")
    assert found.names == ("C(g)[T.y]", "C(g)[T.z]") and found.sites == 6
    assert found.Q_df == 6 + 5 - 2 and found.Q_pvalue < 0.01  # one site has no row of level z
    same = comparison.random_effects_of(["C(g)[T.y]", "C(g)[T.z]"])
    assert same.statistic == found.statistic
    text = " ".join(str(found).split())
    assert "No effect, F(2, 9):" in text and "Equal effects, Q(9):" in text and "Jackson and Riley" in text
    assert max(map(len, str(found).splitlines())) <= 98
    with pytest.raises(ModelError, match=r"'C\(h\)' is no term and no coefficient; there are: .*C\(g\)"):
        comparison.random_effects_of("C(h)")
    with pytest.raises(ModelError, match="expected test to be one of"):
        comparison.random_effects_of("C(g)", test="t")


def test_a_coefficient_of_one_site_has_no_random_effects():
    estimates = np.where(np.arange(5)[:, None] > 0, [1.0, np.nan], ESTIMATES)
    with pytest.raises(EstimationError, match="fewer than two sites determine AL"):
        combine_factor(NAMES, estimates, COVARIANCES)
