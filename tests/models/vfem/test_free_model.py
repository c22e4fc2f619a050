"""Columns that are free to depend between clients, against the likelihood of the rows written out."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from oracle import Study
from pattern_moments import complete, moments_of_arrays
from scipy import stats
from scipy.optimize import minimize
from statsmodels.tools.numdiff import approx_fprime, approx_hess

import fedstat as fs
from fedstat.errors import AssumptionWarning, EstimationError, ModelError, NotAvailableError
from fedstat.models.vertical.joint_normal import model as joint_model
from fedstat.models.vertical.joint_normal.edges import edges_between, sparse_pairs
from fedstat.models.vertical.joint_normal.fit import (
    all_effects,
    estimates_covariance,
    extremes,
    fit_joint_model,
    fit_joint_normal,
)
from fedstat.models.vertical.joint_normal.likelihood import (
    differentiate_joint_normal,
    joint_normal_likelihood,
)
from fedstat.models.vfem import submodels

SIZES = {"Bank": 2, "Court": 2, "Tax": 1}


def draw(seed, n=700, rho=0.4, missing="mcar", apart=False, cells=0.0):
    """Correlated columns of three clients; "mar": records hang on the response and on a bank's column.

    Of the cells a share is missing by itself.
    """
    rng = np.random.default_rng([seed, 77])
    names = [f"{site.lower()}{j}" for site, size in SIZES.items() for j in range(size)]
    Z = rng.normal(size=(n, 5)) * np.sqrt(1.0 - rho) + np.sqrt(rho) * rng.normal(size=(n, 1))
    y = 2.0 + Z @ [1.0, -0.5, 0.8, 0.0, 0.6] + rng.normal(size=n)
    table = pd.DataFrame(Z * [1.0, 10.0, 1.0, 0.1, 1.0] + [0.0, 5.0, 0.0, 0.0, -3.0], columns=names)
    table.insert(0, "y", y)
    lead = y / y.std() + Z[:, 0] if missing == "mar" else np.zeros(n)
    lacks = {"Court": rng.random(n) < stats.norm.cdf(0.8 * lead - 0.2), "Tax": rng.random(n) < 0.6}
    if apart:
        lacks["Tax"] = ~lacks["Court"] | (rng.random(n) < 0.2)
    columns = {site: [c for c in names if c.startswith(site.lower())] for site in SIZES}
    for site, gone in lacks.items():
        table.loc[gone, columns[site]] = np.nan
    table[names] = table[names].mask(rng.random((n, 5)) < cells)
    return Study(table, columns, "Bank")


def moments_of(study):
    X, y = study.table[study.covariates].to_numpy(), study.table["y"].to_numpy()
    sizes = [len(names) for names in study.columns.values()]
    return moments_of_arrays(X, y, sizes, sites=list(study.columns), names=study.covariates, partial=True)


def by_pattern(study, moments):
    """Standardized rows of covariates and response with each pattern of what is there."""
    rows = (study.table[[*study.covariates, "y"]].to_numpy() - moments.center) / moments.scale
    seen = ~np.isnan(rows)
    return [(pattern, rows[(seen == pattern).all(axis=1)][:, pattern]) for pattern in np.unique(seen, axis=0)]


def of_rows(patterns, theta, edges):
    """Log densities of rows at (a, s2, beta, mu, free entries of the concentration)."""
    P = len(edges)
    i, j = np.nonzero(np.triu(edges))
    Q = np.zeros((P, P))
    Q[i, j] = Q[j, i] = theta[2 + 2 * P :]
    a, s2, beta, mu = theta[0], theta[1], theta[2 : 2 + P], theta[2 + P : 2 + 2 * P]
    Sigma = np.linalg.inv(Q)
    w = Sigma @ beta
    cov = np.block([[Sigma, w[:, None]], [w[None, :], np.array([[s2 + beta @ w]])]])
    found, mean = [], np.append(mu, a)
    for pattern, rows in patterns:
        root = np.linalg.cholesky(cov[np.ix_(pattern, pattern)])
        z = np.linalg.solve(root, (rows - mean[pattern]).T)
        log_scale = np.log(np.diag(root)).sum() + 0.5 * len(root) * np.log(2.0 * np.pi)
        found.append(-0.5 * (z**2).sum(axis=0) - log_scale)
    return np.concatenate(found)


def theta_of(fit):
    i, j = np.nonzero(np.triu(fit.moves.edges))
    point = fit.point
    return np.concatenate([[point.a, point.s2], point.beta, point.mu, point.Q[i, j]])


DESIGNS = {
    "mcar": {},
    "mar": {"missing": "mar"},
    "two clients that share no entity": {"apart": True},
    "single cells": {"missing": "mar", "cells": 0.1},
}


@pytest.mark.parametrize(
    ("design", "between"), [*[(design, "free") for design in DESIGNS], ("single cells", "independent")]
)
def test_score_and_information_are_those_of_the_rows(design, between):
    study = draw(1, **DESIGNS[design])
    moments = moments_of(study)
    fit = fit_joint_model(moments, between)
    edges, theta = fit.moves.edges, theta_of(fit)
    assert moments.complete == (design != "single cells")
    assert fit.converged and edges.all() == (
        design != "two clients that share no entity" and between == "free"
    )
    patterns = by_pattern(study, fit.moments)
    at_fit = of_rows(patterns, theta, edges)
    assert fit.joint == pytest.approx(at_fit.sum(), rel=1e-12)

    def of_theta(at):
        return (of_rows(patterns, at, edges) - at_fit).sum()  # a sum of differences loses fewer digits

    information = -approx_hess(theta, of_theta)
    score = approx_fprime(theta, of_theta, centered=True)
    # In standard deviations of the score.
    assert np.abs(score / np.sqrt(np.diag(information))).max() < 1e-6
    numerical = np.sqrt(np.diag(np.linalg.inv(information)))
    exact = differentiate_joint_normal(fit.moments, fit.point, fit.moves).information
    np.testing.assert_allclose(np.sqrt(np.diag(np.linalg.inv(exact))), numerical, rtol=1e-5)


def test_derivatives_are_those_of_the_likelihood_away_from_the_maximum():
    moments = moments_of(draw(2, missing="mar")).standardized()
    edges = np.ones((5, 5), dtype=bool)
    edges[:2, 4] = edges[4, :2] = False
    moves = all_effects(edges)
    fit = fit_joint_normal(moments, edges)
    rng = np.random.default_rng(0)
    theta = rng.normal(scale=0.05, size=len(theta_of(fit)))
    at = moves.step(fit.point, theta)

    def likelihood(by):
        joint = moves.step(at, by)
        return joint_normal_likelihood(moments, joint.mean, joint.cov)

    found, zero = differentiate_joint_normal(moments, at, moves), np.zeros_like(theta)
    score = approx_fprime(zero, likelihood, epsilon=1e-5, centered=True)
    np.testing.assert_allclose(found.score, score, rtol=1e-6, atol=1e-5 * np.abs(score).max())
    columns = [
        -(differentiate_joint_normal(moments, moves.step(at, h), moves).score - found.score) / 1e-6
        for h in 1e-6 * np.eye(len(theta))
    ]
    np.testing.assert_allclose(found.information, columns, atol=2e-5 * np.abs(found.information).max())


def test_without_edges_between_sites_it_is_the_law_of_independent_blocks():
    moments = moments_of(draw(3))
    free = fit_joint_normal(moments, edges_between(moments, "independent"))
    ours = fit_joint_model(moments, "independent")
    np.testing.assert_allclose(free.params, ours.params, rtol=1e-7)
    assert free.log_likelihood == pytest.approx(ours.log_likelihood, rel=1e-10)
    assert (free.s2, free.rsquared) == pytest.approx((ours.s2, ours.rsquared), rel=1e-7)
    np.testing.assert_allclose(free.t, ours.t, rtol=1e-6)


def test_complete_data_are_least_squares():
    moments = complete(moments_of(draw(3)))
    free = fit_joint_normal(moments, np.ones((5, 5), dtype=bool))
    ours = fit_joint_model(moments, "independent")
    np.testing.assert_allclose(free.params, ours.params, rtol=1e-9)
    assert free.log_likelihood == pytest.approx(ours.log_likelihood, rel=1e-12)


@pytest.fixture(scope="module")
def study():
    return draw(5, n=900, missing="mar")


@pytest.fixture(scope="module")
def result(study):
    return study.model(between="free").fit()


def test_free_is_the_default(study, result):
    assert fs.VFEMRegression.from_formula("y ~ .", study.partition()).fit(cov_type="none").between == "free"
    fit = fit_joint_normal(moments_of(study), np.ones((5, 5), dtype=bool))
    np.testing.assert_allclose(result.params, fit.params, rtol=1e-6)
    assert result.between == "free" and result.converged
    assert "covariance is free between sites" in " ".join(str(result.summary()).split())


def test_covariances_agree(study, result):
    """Supplemented EM is the observed information in another way; expected, of MCAR, is near it."""
    sem = study.model(between="free").fit(cov_type="sem")
    np.testing.assert_allclose(sem.bse, result.bse, rtol=1e-6)
    assert sem.covariance.asymmetry < 1e-6
    mcar = draw(6, n=4_000).model(between="free")
    ratio = mcar.fit(cov_type="expected").bse / mcar.fit().bse
    assert ratio.between(0.96, 1.04).all()
    # About 90 degrees of freedom between random groups: a standard error of .075.
    assert (mcar.fit(cov_type="robust").bse / mcar.fit().bse).between(0.75, 1.25).all()


def test_of_many_columns_the_part_that_is_kept_is_the_same(study, monkeypatch):
    fit = fit_joint_normal(moments_of(study), np.ones((5, 5), dtype=bool))
    all_complete = estimates_covariance(fit)
    monkeypatch.setattr(joint_model, "MAX_FULL_INVERSE", 10)
    np.testing.assert_allclose(estimates_covariance(fit), all_complete[:12, :12], rtol=1e-8, atol=1e-14)
    result = study.model(between="free").fit()
    assert result.predict(result.model.partition).notna().all()
    with pytest.raises(NotAvailableError, match="covariance of all"):
        result.get_prediction()


def test_predictions_condition_on_what_is_seen(study, result):
    fit = fit_joint_normal(moments_of(study), np.ones((5, 5), dtype=bool))
    mean, cov = np.append(fit.mu, fit.a), fit.cov
    X = study.table[study.covariates].to_numpy()
    expected, variance = np.empty(len(X)), np.empty(len(X))
    for i, row in enumerate(X):
        has = np.flatnonzero(~np.isnan(row))
        slopes = np.linalg.solve(cov[np.ix_(has, has)], cov[has, -1])
        expected[i] = mean[-1] + slopes @ (row[has] - mean[has])
        variance[i] = cov[-1, -1] - slopes @ cov[has, -1]
    prediction = result.get_prediction()
    np.testing.assert_allclose(prediction.predicted_mean, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(prediction.var_resid, variance, rtol=1e-5)
    np.testing.assert_allclose(result.predict(result.model.partition), prediction.predicted_mean)


def test_standard_errors_of_predictions_are_those_of_the_delta_method(study, result):
    fit = fit_joint_normal(moments_of(study), np.ones((5, 5), dtype=bool))
    V = np.linalg.inv(differentiate_joint_normal(fit.moments, fit.point, fit.moves).information)
    X = (study.table[study.covariates].to_numpy() - fit.moments.center[:-1]) / fit.moments.scale[:-1]
    errors = result.get_prediction().se_mean.to_numpy()
    patterns, first = np.unique(np.isnan(X), axis=0, return_index=True)
    assert len(patterns) == 4
    for row in first:
        has = ~np.isnan(X[row])

        def predicted(by, has=has, row=row):
            joint = fit.moves.step(fit.point, by)
            cov, mean = joint.cov, joint.mean
            seen = np.flatnonzero(has)
            slopes = np.linalg.solve(cov[np.ix_(seen, seen)], cov[seen, -1])
            return mean[-1] + slopes @ (X[row, seen] - mean[seen])

        gradient = approx_fprime(np.zeros(len(V)), predicted, epsilon=1e-5, centered=True)
        expected = fit.moments.scale[-1] * np.sqrt(gradient @ V @ gradient)
        assert errors[row] == pytest.approx(expected, rel=1e-4)


def test_a_file_keeps_what_predictions_need(result, tmp_path):
    result.save(tmp_path / "fit")
    again = fs.load(tmp_path / "fit")
    partition = result.model.partition
    frame = again.get_prediction(partition).summary_frame()
    pd.testing.assert_frame_equal(frame, result.get_prediction().summary_frame(), check_names=False)
    assert again.between == "free"
    with pytest.raises(NotAvailableError, match="wald_test"):
        again.compare_lr_test(result.refit("y ~ bank0"))


def test_likelihood_ratios_keep_what_is_left_out_in_the_law(study, result):
    """Twice the fall of the joint likelihood of the rows where the coefficients are zero."""
    moments = moments_of(study)
    edges = np.ones((5, 5), dtype=bool)
    smaller = result.refit("y ~ . - tax0 - court1")
    fresh = fit_joint_normal(moments.submodel(["bank0", "bank1", "court0"]), edges[:3, :3])
    np.testing.assert_allclose(smaller.params, fresh.params, rtol=1e-6)
    test = result.compare_lr_test(smaller)
    fit = fit_joint_normal(moments, edges)
    theta, fixed = theta_of(fit), [2 + 3, 2 + 4]
    free = np.setdiff1d(np.arange(len(theta)), fixed)
    patterns = by_pattern(study, fit.moments)

    def negative(values):
        at = np.zeros_like(theta)
        at[free] = values
        return -of_rows(patterns, at, edges).sum()

    lowest = minimize(negative, theta[free], method="BFGS", options={"gtol": 1e-4})
    assert test.statistic == pytest.approx(2.0 * (fit.joint + lowest.fun), abs=1e-4)
    assert test.df_diff == 2
    table = result.leave_one_out()
    assert table.loc["tax0", "statistic"] == pytest.approx(
        result.compare_lr_test(result.refit("y ~ . - tax0")).statistic, rel=1e-6
    )
    with pytest.raises(ModelError, match="independence_lr_test"):
        result.compare_lr_test(study.model().fit())


def test_independence_is_tested_and_warned_of(study, result):
    test = result.independence_lr_test()
    assert test.df_diff == 8 and test.pvalue < 1e-20
    with pytest.warns(AssumptionWarning, match="between='free'"):
        other = study.model().fit()
    assert other.independence_lr_test() == pytest.approx(tuple(test))
    notes = " ".join(str(other.summary()).split())
    assert "Most correlated blocks" in notes and "The assumption does not hold" in notes


def test_nothing_is_warned_of_where_blocks_are_independent():
    with warnings.catch_warnings():
        warnings.simplefilter("error", AssumptionWarning)
        result = draw(8, rho=0.0).model().fit()
    assert "does not hold" not in str(result.summary())


# ---- clients that share no entity ----------------------------------------------------------------


@pytest.fixture(scope="module")
def apart():
    return draw(9, n=1_500, apart=True)


def test_two_sites_that_share_no_entity_are_named_with_how_much_hangs_on_it(apart):
    result = apart.model(between="free").fit()
    notes = " ".join(str(result.summary()).split())
    assert "'Court' and 'Tax' 0" in notes and ".sensitivity()" in notes
    table = result.sensitivity()
    assert set(zip(table["first"], table["second"], table["n"], strict=True)) == {("Court", "Tax", 0)}
    assert (table["low"] <= table["high"]).all()
    assert table.set_index("term").loc["tax0"].pipe(lambda row: row["low"] < 0.6 < row["high"])


def test_an_interval_contains_what_the_data_leave_open(apart, tmp_path):
    """A has all entities, B and C share none: the normal interval around the estimate covers no slope."""

    def fitted(seed):
        rng = np.random.default_rng(seed)
        n, at = 600, np.arange(600)
        x, z = rng.normal(size=(2, n))
        w = 0.6 * z + 0.8 * rng.normal(size=n)
        y = 1.0 + x + 0.5 * z + 0.5 * w + rng.normal(size=n)
        frames = {
            "A": pd.DataFrame({"id": at, "y": y, "x": x}),
            "B": pd.DataFrame({"id": at[:300], "z": z[:300]}),
            "C": pd.DataFrame({"id": at[300:], "w": w[300:]}),
        }
        partition = fs.ClientPartition.from_frames(frames, on="id")
        model = fs.VFEMRegression.from_formula("y ~ .", partition, between="free")
        with pytest.warns(AssumptionWarning, match="do not determine all coefficients"):
            return model.fit()

    results = [fitted(seed) for seed in range(6)]
    truth = pd.Series({"Intercept": 1.0, "x": 1.0, "z": 0.5, "w": 0.5})
    for result in results:
        limits = result.conf_int()
        assert (limits[0] < truth).all() and (truth < limits[1]).all()
        alone = result.params["z"] - 2.0 * result.bse["z"]
        assert alone > truth["z"]
    result = results[0]
    # The limits are those of the sensitivity analysis and the normal quantile.
    table = result.sensitivity().set_index("term")
    half = stats.norm.isf(0.025) * result.bse
    np.testing.assert_allclose(limits_of(result, table.index)[0], table["low"] - half[table.index])
    np.testing.assert_allclose(limits_of(result, table.index)[1], table["high"] + half[table.index])
    # A test of zero agrees with the interval: zero is excluded if all values of the range are far from it.
    excluded = (result.conf_int()[0] > 0.0) | (result.conf_int()[1] < 0.0)
    assert ((result.pvalues < 0.05) == excluded).all() and not excluded["x"]
    text = str(result.summary())
    assert text.startswith("*** NOT IDENTIFIED") and " lowest   highest\n" in text
    assert (result.tvalues[["z", "w"]] == 0.0).all() == (result.pvalues[["z", "w"]] == 1.0).all()
    result.save(tmp_path / "open.fed")
    pd.testing.assert_frame_equal(fs.load(tmp_path / "open.fed").conf_int(), result.conf_int())


@pytest.mark.parametrize("between", ["free", "independent"])
def test_sites_without_common_entities_are_left_out_where_the_data_contradict_independence(between):
    """Both coefficients of the pairs are 1.6, which needs more variance than the response has."""
    rng = np.random.default_rng(0)
    z, w = rng.multivariate_normal([0.0, 0.0], [[1.0, 0.6], [0.6, 1.0]], 600).T
    at, x = np.arange(600), rng.normal(size=600)
    frames = {
        "A": pd.DataFrame({"id": at, "x": x, "y": x + z + w + rng.normal(size=600)}),
        "B": pd.DataFrame({"id": at, "z": z})[:300],
        "C": pd.DataFrame({"id": at, "w": w})[300:],
    }
    partition = fs.ClientPartition.from_frames(frames, on="id")
    with pytest.raises(
        EstimationError, match=r"a variance goes to zero.*leave out columns or sites"
    ) as error:
        fs.VFEMRegression.from_formula("y ~ .", partition, between=between).fit()
    assert "between=" not in str(error.value)


def limits_of(result, names):
    limits = result.conf_int().loc[names]
    return limits[0], limits[1]


def test_a_refusal_names_sites_that_share_no_entity():
    rng = np.random.default_rng(1)
    n, at = 600, np.arange(600)
    z = rng.normal(size=n)
    w = 0.6 * z + 0.8 * rng.normal(size=n)
    frames = {
        "A": pd.DataFrame({"id": at, "y": z + w + rng.normal(size=n), "x": rng.normal(size=n)}),
        "B": pd.DataFrame({"id": at[:300], "z": z[:300]}),
        "C": pd.DataFrame({"id": at[300:], "w": w[300:]}),
    }
    model = fs.VFEMRegression.from_formula("y ~ .", fs.ClientPartition.from_frames(frames, on="id"))
    with pytest.raises(EstimationError, match=r"'B' and 'C' 0.*contradict"):
        model.fit()


def test_extremes_have_the_likelihood_of_the_fit():
    """One column a side: the smallest and largest coefficient over all covariances of the same likelihood."""
    rng = np.random.default_rng(3)
    X = rng.multivariate_normal(np.zeros(3), 0.5 + 0.5 * np.eye(3), size=3_000)
    y = X @ [1.0, 0.5, -0.5] + rng.normal(size=3_000)
    X[:1_500, 1], X[1_500:, 2] = np.nan, np.nan
    moments = moments_of_arrays(X, y, [1, 1, 1])
    fit = fit_joint_normal(moments, edges_between(moments, "free"))
    (pair,) = sparse_pairs(moments)
    low, high = extremes(fit, pair)[:, 1:]
    scale, cov = fit.moments.scale, fit.point.cov
    best = joint_normal_likelihood(fit.moments, fit.point.mean, cov)
    rest, pair_at = [0, 3], [1, 2]
    slopes = np.linalg.solve(cov[np.ix_(rest, rest)], cov[np.ix_(rest, pair_at)])
    partial = cov[np.ix_(pair_at, pair_at)] - slopes.T @ cov[np.ix_(rest, pair_at)]
    middle, reach = cov[1, 2] - partial[0, 1], np.sqrt(partial[0, 0] * partial[1, 1])
    found = []
    for value in middle + (1.0 - 1e-9) * reach * np.cos(np.linspace(0.0, np.pi, 4_001)):
        trial = cov.copy()
        trial[1, 2] = trial[2, 1] = value
        assert joint_normal_likelihood(fit.moments, fit.point.mean, trial) == pytest.approx(best, rel=1e-7)
        found.append(np.linalg.solve(trial[:-1, :-1], trial[:-1, -1]) * scale[-1] / scale[:-1])
    np.testing.assert_allclose(low, np.min(found, axis=0), atol=0.01)
    np.testing.assert_allclose(high, np.max(found, axis=0), atol=0.01)
    assert (low <= fit.beta).all() and (fit.beta <= high).all()


def test_iteration_and_other_families_say_what_they_assume(study):
    with pytest.raises(ModelError, match="between='independent'"):
        study.model(between="free").fit(exchange="iterative")
    with pytest.raises(ModelError, match="between"):
        study.model(between="dependent")


def test_a_smaller_site_is_reported_alike(study):
    """The releases are the same as with independent blocks."""
    free, ours = (study.model(between=joint).fit().ledger for joint in ("free", "independent"))
    columns = ["sender", "receiver", "array", "kind", "numbers"]
    kept = [c for c in columns if c in free.to_frame()]
    pd.testing.assert_frame_equal(free.to_frame()[kept], ours.to_frame()[kept])


def test_estimates_do_not_drift_with_correlation():
    """y = 1 + a + b + e, half of b missing: independent blocks miss the truth, the free law does not."""
    errors = {"free": [], "independent": []}
    for seed in range(20):
        rng = np.random.default_rng([seed, 5])
        a = rng.normal(size=2_000)
        b = 0.4 * a + np.sqrt(1 - 0.16) * rng.normal(size=2_000)
        y = 1.0 + a + b + rng.normal(size=2_000)
        X = np.column_stack([a, np.where(rng.random(2_000) < 0.5, np.nan, b)])
        moments = moments_of_arrays(X, y, [1, 1])
        for joint, out in errors.items():
            out.append(fit_joint_normal(moments, edges_between(moments, joint)).params[1] - 1.0)
    assert abs(np.mean(errors["free"])) < 0.02
    assert np.mean(errors["independent"]) > 0.1


def test_the_summary_says_what_freedom_costs_and_whether_the_data_ask_for_it():
    for rho, verdict in ((0.0, "do not contradict"), (0.4, "contradict")):
        study = draw(8, rho=rho)
        free, other = (study.model(between=joint).fit() for joint in ("free", "independent"))
        notes = " ".join(free.notes)
        ratio = (free.bse / other.bse).drop("Intercept")
        assert f"are {ratio.median():.2f} times (median; {ratio.min():.2f} to {ratio.max():.2f})" in notes
        assert f"The data {verdict} independence" in notes and "times (median" not in " ".join(other.notes)


def test_a_variance_that_vanishes_is_named():
    """Three complete entities for five parameters: the likelihood grows as the fit reproduces them."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 4))
    y = X @ [1.0, 1.0, -1.0, 1.0] + 0.3 * rng.normal(size=200)
    X[3:100, :2], X[100:, 2:] = np.nan, np.nan
    with pytest.raises(EstimationError, match=r"a variance goes to zero.*leave out one of them"):
        fit_joint_normal(moments_of_arrays(X, y, [2, 2]), np.ones((4, 4), dtype=bool))
    with pytest.raises(EstimationError, match="a variance goes to zero"):  # so that is no remedy
        fit_joint_model(moments_of_arrays(X, y, [2, 2]), "independent")


def test_a_column_without_which_there_is_no_maximum_has_no_row(result, monkeypatch):
    plain, fit_without = result.leave_one_out(), submodels.without_effects

    def refused(fit, keep):
        if not keep[1]:
            raise EstimationError("no maximum")
        return fit_without(fit, keep)

    monkeypatch.setattr(submodels, "without_effects", refused)
    table = result.leave_one_out()
    values = table.columns.drop("site")
    assert table.loc["bank1", values].isna().all()
    pd.testing.assert_frame_equal(table.drop("bank1"), plain.drop("bank1"))


def three_sites():
    rng, ids = np.random.default_rng(1), np.arange(600)
    x, z, w = rng.normal(size=(3, 600))
    A = pd.DataFrame({"id": ids, "y": x + z + w + rng.normal(size=600), "x": x})
    return A, pd.DataFrame({"id": ids, "z": z}), pd.DataFrame({"id": ids, "w": w})


@pytest.mark.parametrize(
    ("column", "named"),
    [
        (lambda A, C: 2.0 * A["x"], r"'x' \(A\) and 'combined' \(B\) are collinear"),
        (lambda A, C: A["x"] + C["w"], r"'x' \(A\), 'combined' \(B\) and 'w' \(C\) are collinear"),
    ],
)
def test_collinear_columns_of_several_sites_are_named_and_no_others(column, named):
    A, B, C = three_sites()
    tables = {"A": A, "B": B.assign(combined=column(A, C)), "C": C.iloc[:400]}
    with pytest.raises(EstimationError, match=named):
        fs.VFEMRegression.from_formula("y ~ .", fs.ClientPartition.from_frames(tables, on="id")).fit()


def test_units_do_not_make_a_column_constant():
    A, B, C = three_sites()
    units = {"z": 1e12, "w": 1e-14}
    plain, scaled = (
        fs.VFEMRegression.from_formula(
            "y ~ .", fs.ClientPartition.from_frames({"A": A, "B": b, "C": c}, on="id")
        ).fit()
        for b, c in ((B, C), (B.assign(z=B["z"] * units["z"]), C.assign(w=C["w"] * units["w"])))
    )
    for name, unit in units.items():
        assert scaled.params[name] * unit == pytest.approx(plain.params[name], rel=1e-6)
        assert scaled.bse[name] * unit == pytest.approx(plain.bse[name], rel=1e-6)
