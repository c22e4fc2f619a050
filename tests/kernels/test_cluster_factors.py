"""Information of clusters with few rows: factors give what decompositions of p x p matrices give."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from fedstat.kernels import clusters
from fedstat.kernels.clusters import MANY_COLUMNS, adjusted_scores, corrected_sums, information_factors

P, ROWS = 24, (1, 2, 5, 7)
RNG = np.random.default_rng(3)


def draw(p, rows, G=40):
    """Scores and information of clusters with these numbers of rows, and the inverse of their sum."""
    score, information = np.empty((G, p)), np.empty((G, p, p))
    scales = 10.0 ** RNG.uniform(-3.0, 3.0, p)
    for g in range(G):
        X = RNG.normal(size=(rows[g % len(rows)], p)) * scales
        score[g], information[g] = X.T @ RNG.normal(size=len(X)), X.T @ X
    return score, information, np.linalg.inv(information.sum(axis=0) + np.diag(scales**2))


def test_factors_have_the_rank_and_the_products_of_the_information():
    _, information, _ = draw(P, ROWS)
    information[3] = 0.0
    factors = information_factors(information)
    assert factors.shape[1] == max(ROWS)
    scale = np.sqrt(np.einsum("gjj->gj", information)).max(axis=0)
    products = factors.transpose(0, 2, 1) @ factors
    assert_allclose(products / np.outer(scale, scale), information / np.outer(scale, scale), atol=1e-12)


def test_few_columns_and_clusters_of_many_rows_have_no_factors():
    assert information_factors(draw(MANY_COLUMNS - 1, (2,))[1]) is None
    assert information_factors(draw(MANY_COLUMNS, (2,))[1]) is not None
    assert information_factors(draw(P, (P // 3 - 1,))[1]) is not None
    assert information_factors(draw(P, (2, P // 3 + 1))[1]) is None
    assert information_factors(np.zeros((0, P, P))) is None


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_corrected_sums_do_not_depend_on_factors(power, monkeypatch):
    score, information, inverse = draw(P, ROWS)
    with_factors = corrected_sums(score, information, inverse, np.eye(P), power)
    monkeypatch.setattr(clusters, "information_factors", lambda information: None)
    without = corrected_sums(score, information, inverse, np.eye(P), power)
    scale = np.sqrt(np.diag(without.meat))
    assert_allclose(
        with_factors.meat / np.outer(scale, scale), without.meat / np.outer(scale, scale), atol=1e-9
    )
    assert_allclose(with_factors.concentration, without.concentration, rtol=1e-9)
    assert_allclose(with_factors.leverages, without.leverages, atol=1e-9)


def test_a_leverage_of_one_is_found_from_factors():
    score, information, _ = draw(P, ROWS)
    X = np.eye(P)[:1]
    score[0], information[0] = X[0], X.T @ X
    information[1:, 0], information[1:, :, 0] = 0.0, 0.0
    inverse = np.linalg.pinv(information.sum(axis=0))
    root = np.linalg.cholesky(inverse + 1e-18 * np.eye(P))
    factors = information_factors(information)
    out, largest = adjusted_scores(score, information, root, 0.5, factors=factors)
    assert largest[0] >= clusters.AT_ONE
    assert not out.any()
