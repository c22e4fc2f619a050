"""Group penalties by one root, against a general minimizer and the conditions of a minimum."""

import numpy as np
import pytest
from scipy.optimize import minimize

from fedstat.kernels.penalized.group_prox import group_prox, shrink_means, shrink_rows


def cases(seed, P=6, Q=3):
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((P, Q, 2 * Q))
    return A @ A.transpose(0, 2, 1) * 10 ** rng.uniform(-1, 2), 5 * rng.standard_normal((P, Q)), rng


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_where_a_general_minimizer_ends(seed):
    S, s, rng = cases(seed)
    lam = rng.uniform(0.1, 3.0, len(s))
    found = shrink_rows(S, s, lam)
    for p, l in enumerate(found):

        def objective(b, p=p):
            return b @ S[p] @ b / 2 - s[p] @ b + lam[p] * np.sqrt(b @ b + 1e-20)

        other = minimize(objective, np.linalg.solve(S[p], s[p]), method="BFGS", options={"gtol": 1e-9})
        assert objective(l) <= other.fun + 1e-12
        assert np.allclose(l, other.x, atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_conditions_of_a_minimum(seed):
    S, s, rng = cases(seed, P=30, Q=4)
    sizes = np.linalg.norm(s, axis=1)
    lam = sizes * rng.uniform(0.0, 1.5, len(s))
    l = shrink_rows(S, s, lam)
    norms = np.linalg.norm(l, axis=1)
    assert np.array_equal(norms == 0.0, sizes <= lam)
    gradient = np.einsum("pqr,pr->pq", S, l) - s
    on = norms > 0.0
    left = gradient[on] + (lam[on] / norms[on])[:, None] * l[on]
    assert np.all(np.linalg.norm(left, axis=1) < 1e-9 * sizes[on])


def test_one_matrix_of_all_rows_and_no_penalty():
    S, s, _ = cases(3)
    assert np.allclose(shrink_rows(S[:1], s, np.zeros(6)), np.linalg.solve(S[0], s.T).T, rtol=1e-10)


def test_zero_exactly_at_its_bound():
    z = np.array([[3.0, 4.0]])
    D = np.array([[2.0, 7.0]])
    assert not group_prox(D, z, np.array([5.0])).any()
    assert group_prox(D, z, np.array([5.0 - 1e-9])).any()


def test_means_have_one_norm():
    rng = np.random.default_rng(0)
    N, m = np.array([10.0, 40.0, 25.0]), rng.standard_normal((3, 2))
    bound = np.linalg.norm(N[:, None] * m)
    assert np.allclose(shrink_means(N, m, 0.0), m)
    assert not shrink_means(N, m, bound).any()
    U = shrink_means(N, m, 0.4 * bound)
    assert np.allclose(N[:, None] * (U - m) + 0.4 * bound * U / np.linalg.norm(U), 0.0, atol=1e-9)
