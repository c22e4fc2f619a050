"""Projections of noisy counts, codes of latent normals, and the nearest correlation matrix."""

import numpy as np
import pytest
from scipy.optimize import minimize

from fedstat.kernels import copula
from fedstat.kernels.copula import (
    code_latents,
    count_tree,
    cumulate,
    fit_tree,
    interpolate_inverse,
    nearest_correlation,
    project_simplex,
    scores_of_codes,
    taper_tails,
)


def test_simplex_is_the_constrained_least_squares():
    rng = np.random.default_rng(0)
    counts = rng.normal(5, 8, 6)
    found = minimize(
        lambda v: ((v - counts) ** 2).sum(),
        np.full(6, 5.0),
        bounds=[(0, None)] * 6,
        constraints={"type": "eq", "fun": lambda v: v.sum() - 30.0},
        options={"ftol": 1e-14},
    )
    assert project_simplex(counts, 30.0) == pytest.approx(found.x, abs=1e-5)


def tree_design(depth):
    """Rows that sum leaves to nodes, in the order of the nodes."""
    leaves = 2**depth
    return np.vstack(
        [np.kron(np.eye(2**level), np.ones(leaves // 2**level)) for level in range(1, depth + 1)]
    )


def test_counts_of_a_tree_are_sums_of_its_leaves():
    leaf = np.arange(8)
    assert (count_tree(leaf) == tree_design(3) @ leaf).all()


def test_tree_is_least_squares_under_a_known_total():
    rng = np.random.default_rng(1)
    depth, total = 4, 100.0
    A = tree_design(depth)
    nodes = A @ rng.uniform(0, 12, 2**depth) + rng.normal(0, 5, len(A))
    # Lagrange: [A'A 1; 1' 0]
    one = np.ones((2**depth, 1))
    K = np.block([[A.T @ A, one], [one.T, np.zeros((1, 1))]])
    known = np.linalg.solve(K, np.append(A.T @ nodes, total))[:-1]
    assert fit_tree(nodes, total) == pytest.approx(known, abs=1e-9)


def test_distribution_function_ascends_from_zero_to_one():
    F = cumulate(np.array([5.0, -3.0, 4.0, 0.0, 6.0]), 12.0)
    assert F[0] == 0.0
    assert F[-1] == 1.0
    assert (np.diff(F) >= 0).all()


def test_tails_fall_and_keep_their_sum():
    p = np.array([0.02, 0.0, 0.03, 0.0, 0.01, 0.44, 0.44, 0.0, 0.03, 0.0, 0.03])
    out = taper_tails(p, 0.1)
    assert out.sum() == pytest.approx(p.sum())
    assert out[:1] == p[:1]  # may be an atom
    assert (np.diff(out[1:5]) >= 0).all()
    assert (np.diff(out[7:10]) <= 0).all()
    assert (out[5:7] == p[5:7]).all()


@pytest.mark.parametrize("few", [0, copula.FEW], ids=["compiled", "few"])
def test_codes_of_latents(monkeypatch, few):
    monkeypatch.setattr(copula, "FEW", few)
    thresholds = np.array([[-np.inf, 0.0, np.inf, np.inf], [-np.inf, -1.0, 1.0, np.inf]])
    codes = code_latents(np.array([[-0.1, -1.0], [0.0, 2.0], [9.0, -9.0]]), thresholds, np.array([2, 3]))
    assert codes.tolist() == [[0, 1], [1, 2], [1, 0]]


def test_nearest_correlation_is_known_and_leaves_a_correlation_alone():
    # Higham (2002), section 5: the nearest to this matrix
    C = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    known = np.array([[1.0, 0.7607, 0.1573], [0.7607, 1.0, 0.7607], [0.1573, 0.7607, 1.0]])
    assert nearest_correlation(C, 1e-9) == pytest.approx(known, abs=1e-4)
    fine = np.array([[1.0, 0.5], [0.5, 1.0]])
    assert (nearest_correlation(fine) == fine).all()
    assert np.linalg.eigvalsh(nearest_correlation(-0.9 + 1.9 * np.eye(5))).min() > 0.005


def test_codes_are_those_of_a_search_next_to_every_threshold(monkeypatch):
    monkeypatch.setattr(copula, "FEW", 0)
    rng = np.random.default_rng(3)
    inner = np.sort(np.concatenate([rng.normal(size=900), np.arange(-6, 7) / 64, [-9.0, 0.0, 7.5, 9.0]]))
    thresholds = np.concatenate([[-np.inf], inner, [np.inf]])[None]
    z = np.concatenate([rng.normal(size=5_000), inner, np.nextafter(inner, 99), np.nextafter(inner, -99)])
    codes = code_latents(z[:, None], thresholds, np.array([len(inner) + 1]))[:, 0]
    assert (codes == np.searchsorted(inner, z, side="right")).all()


def test_scores_of_bins_and_of_none():
    scores = np.array([[0.5, 1.5, 0.0], [2.0, 3.0, 4.0]])
    assert scores_of_codes(np.array([[1, 2], [-1, 0]]), scores).tolist() == [[1.5, 4.0], [0.0, 2.0]]


def test_inverse_of_a_distribution_function(monkeypatch):
    rng = np.random.default_rng(4)
    p = rng.random(300) * (rng.random(300) < 0.6)
    F = np.concatenate([[0.0], np.cumsum(p) / p.sum()]) + 1e-12 * np.arange(301)
    x, u = np.sort(rng.normal(size=301)), np.concatenate([rng.random(4_000), [0.0, 1.0], F.clip(0, 1)])
    assert interpolate_inverse(u, F, x) == pytest.approx(np.interp(u, F, x), abs=1e-9)
    few = interpolate_inverse(u, F, x)
    monkeypatch.setattr(copula, "FEW", 0)
    assert (few == interpolate_inverse(u, F, x)).all()
