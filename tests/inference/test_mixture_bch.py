"""Entropy and classification of mixtures, and outside variables by cluster against simulated truth."""

from functools import partial

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.mixture import GaussianMixture

from fedstat.errors import EstimationError
from fedstat.inference.mixtures import (
    OutsideResults,
    SumsByMostLikelyCluster,
    classification_errors,
    classification_table,
    integrated_criterion,
    posterior_entropy,
    relative_entropy,
    weigh_by_cluster,
)

outside = partial(OutsideResults, sources=())
SHARES, PLACES = np.array([0.5, 0.3, 0.2]), np.array([-1.6, 0.0, 1.9])


def draw(rng, n):
    """Clusters (n,), and posteriors (n, 3) by one normal column at the true parameters."""
    labels = rng.choice(3, size=n, p=SHARES)
    x = PLACES[labels] + rng.standard_normal(n)
    r = SHARES * norm.pdf(x[:, None] - PLACES)
    return labels, r / r.sum(axis=1, keepdims=True)


def sums_of(Y, r):
    """Sums by most likely cluster, sent by the holder of an outside variable Y (n, C)."""
    modal = r.argmax(axis=1)
    parts = [Y[modal == k] for k in range(r.shape[1])]
    return SumsByMostLikelyCluster(
        np.array([float(len(part)) for part in parts]),
        np.array([part.mean(axis=0) for part in parts]),
        np.array([(part - part.mean(axis=0)).T @ (part - part.mean(axis=0)) for part in parts]),
    )


def three_step(Y, r):
    """Weighted means by the formulas of the third step, row by row, with their sandwich."""
    modal = np.eye(r.shape[1])[r.argmax(axis=1)]
    D = np.array([[r[modal[:, s] == 1, t].sum() / r[:, t].sum() for s in range(3)] for t in range(3)])
    w = modal @ np.linalg.inv(D)
    means = (w.T @ Y) / w.sum(axis=0)[:, None]
    scores = (w[:, :, None] * (Y[:, None] - means) / w.sum(axis=0)[:, None]).reshape(len(Y), -1)
    return means, scores.T @ scores, w


def test_means_and_errors_are_those_of_the_weights_row_by_row():
    rng = np.random.default_rng(1)
    labels, r = draw(rng, 800)
    for Y in (rng.standard_normal((800, 1)) + labels[:, None] + 1e4, np.eye(3)[rng.integers(3, size=800)]):
        means, cov = weigh_by_cluster(classification_errors(r), sums_of(Y, r))
        expected, expected_cov, w = three_step(Y, r)
        np.testing.assert_allclose(means, expected, rtol=1e-10)
        np.testing.assert_allclose(cov, expected_cov, rtol=1e-5, atol=1e-15)
        assert (w < 0).any()
        np.testing.assert_allclose(w.sum(axis=1), 1.0)


def test_the_truth_is_found_where_most_likely_clusters_blur_it():
    truth, rng = np.array([0.0, 2.0, 1.0]), np.random.default_rng(2)
    inside, naive, tests = [], [], []
    for _ in range(150):
        labels, r = draw(rng, 600)
        Y = truth[labels, None] + rng.standard_normal((600, 1)) * (1 + labels[:, None])
        found = outside("y", "Clinic", (), classification_errors(r), sums_of(Y, r))
        table = found.estimates
        inside.append((table["conf_low"].to_numpy() < truth) & (truth < table["conf_high"].to_numpy()))
        naive.append(sums_of(Y, r).means[:, 0])
        same = outside("y", "", (), classification_errors(r), sums_of(rng.standard_normal((600, 1)), r))
        tests.append(same.pvalue < 0.05)
    assert abs(np.mean(naive, axis=0) - truth).max() > 0.3  # what is corrected
    assert 0.92 < np.mean(inside) < 0.98
    assert 0.02 < np.mean(tests) < 0.09


def test_shares_of_levels():
    rng = np.random.default_rng(3)
    labels, r = draw(rng, 40_000)
    truth = np.array([[0.7, 0.2, 0.1], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4]])
    level = (truth[labels].cumsum(axis=1) < rng.uniform(size=(40_000, 1))).sum(axis=1)
    found = outside("ward", "Clinic", "abc", classification_errors(r), sums_of(np.eye(3)[level], r))
    np.testing.assert_allclose(found.estimates["estimate"].unstack(), truth, atol=0.03)
    np.testing.assert_allclose(found.estimates["estimate"].unstack().sum(axis=1), 1.0)
    assert (found.df, found.categorical) == (4, True)
    assert found.pvalue < 1e-10
    text = " ".join(str(found.summary()).split())
    assert "Shares of the levels of ward, held by Clinic, by cluster: 40,000 entities, Wald chi2(4) =" in text
    assert found.differences.loc[("1 - 2", "a"), "estimate"] == pytest.approx(0.5, abs=0.03)


def test_where_clusters_are_certain_they_are_plain_means():
    rng = np.random.default_rng(4)
    labels = rng.integers(2, size=100)
    Y = rng.standard_normal((100, 1)) + labels[:, None]
    r = np.eye(2)[labels]
    found = outside("y", "", (), classification_errors(r), sums_of(Y, r))
    parts = [Y[labels == k, 0] for k in (0, 1)]
    np.testing.assert_allclose(found.estimates["estimate"], [part.mean() for part in parts])
    np.testing.assert_allclose(
        found.estimates["std_error"], [part.std() / len(part) ** 0.5 for part in parts]
    )
    z = found.differences["statistic"].item()
    assert found.statistic == pytest.approx(z**2)
    assert found.df == 1 and found.pvalue == pytest.approx(found.differences["p_value"].item())


def test_clusters_that_nobody_is_in():
    r = np.tile([0.6, 0.4], (50, 1))
    sums = SumsByMostLikelyCluster(np.array([50.0, 0.0]), np.zeros((2, 1)), np.zeros((2, 1, 1)))
    with pytest.raises(EstimationError, match="most likely one of no entity"):
        outside("y", "", (), classification_errors(r), sums)
    with pytest.raises(EstimationError, match="cluster 2 has no entities"):
        outside("y", "", (), np.eye(2), sums)


def test_entropy_and_the_classification_table():
    r = np.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [1.0, 0.0]])
    by_hand = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1) + 0.6 * np.log(0.6) + 0.4 * np.log(0.4))
    by_hand -= 0.2 * np.log(0.2) + 0.8 * np.log(0.8)
    assert posterior_entropy(r) == pytest.approx(by_hand)
    assert relative_entropy(r) == pytest.approx(1 - by_hand / (4 * np.log(2)))
    assert relative_entropy(np.ones((5, 1))) == relative_entropy(np.eye(3)) == 1.0
    assert relative_entropy(np.full((5, 4), 0.25)) == pytest.approx(0.0)
    table = classification_table(r)
    np.testing.assert_allclose(table[[1, 2]], [[2.5 / 3, 0.5 / 3], [0.2, 0.8]])
    assert table["entities"].tolist() == [3, 1]
    errors = classification_errors(r)
    np.testing.assert_allclose(errors, [[2.5 / 2.7, 0.2 / 2.7], [0.5 / 1.3, 0.8 / 1.3]])
    assert classification_table(np.tile([0.6, 0.4], (3, 1))).loc[2, [1, 2]].isna().all()


def test_icl_is_bic_and_the_entropy():
    X = np.random.default_rng(5).standard_normal((200, 2)) + np.repeat([[0.0], [2.0]], 100, axis=0)
    fit = GaussianMixture(2, random_state=0).fit(X)
    llf, r = fit.score(X) * 200, fit.predict_proba(X)
    assert integrated_criterion(-2 * llf, 11, 200, r) == pytest.approx(fit.bic(X) + 2 * posterior_entropy(r))
