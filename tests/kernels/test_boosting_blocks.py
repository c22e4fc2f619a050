"""Paths from products of all columns, with learners of any columns, against boosting row by row."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedstat.kernels.boosting import boost_blocks, demmler_reinsch
from fedstat.kernels.curves import difference_penalty

WIDTHS, NU, STEPS = (1, 6, 5), 0.3, 60
NOTHING = np.zeros((0, 0))


def row_by_row(X, y, X_test, y_test):
    """Selections, losses and coefficients of boosting on rows themselves."""
    ends = np.cumsum([0, *WIDTHS])
    left, left_test, coef, chosen, risk, risk_test = y.copy(), y_test.copy(), np.zeros(12), [], [], []
    hats = []
    for p, k in enumerate(WIDTHS):
        own = X[:, ends[p] : ends[p + 1]]
        penalty = difference_penalty(k, 1) if k > 1 else np.zeros((1, 1))
        lam = demmler_reinsch(own.T @ own, penalty, min(k, 3.0)).smoothing
        hats.append(np.linalg.solve(own.T @ own + lam * penalty, own.T))
    for _ in range(STEPS):
        fits = [hat @ left for hat in hats]
        losses = [((left - X[:, ends[p] : ends[p + 1]] @ b) ** 2).sum() for p, b in enumerate(fits)]
        p = int(np.argmin(losses))
        part = slice(ends[p], ends[p + 1])
        left, left_test = left - NU * X[:, part] @ fits[p], left_test - NU * X_test[:, part] @ fits[p]
        coef[part] += NU * fits[p]
        chosen.append(p)
        risk.append(left @ left)
        risk_test.append(left_test @ left_test)
    return chosen, risk, risk_test, coef


@pytest.mark.parametrize("tested", [True, False])
def test_a_path_of_any_columns_is_that_of_the_rows(tested):
    random = np.random.default_rng(1)
    X, X_test = (np.column_stack([np.ones(n), random.normal(size=(n, 11))]) for n in (80, 30))
    y, y_test = (A @ np.r_[1.0, np.linspace(-1, 1, 11)] + random.normal(size=len(A)) for A in (X, X_test))
    starts, turns, shrunk = np.cumsum([0, *WIDTHS]), [], []
    for lo, hi in itertools.pairwise(starts):
        penalty = difference_penalty(hi - lo, 1) if hi - lo > 1 else np.zeros((1, 1))
        fit = demmler_reinsch(X[:, lo:hi].T @ X[:, lo:hi], penalty, min(float(hi - lo), 3.0))
        turns.append(np.ascontiguousarray(fit.V.T).ravel())
        shrunk.append(fit.h)
    at = np.cumsum([0, *map(len, turns)])[:-1]
    selected, risk, risk_test, coef = (
        np.empty(STEPS, np.int64),
        np.empty(STEPS),
        np.empty(STEPS),
        np.zeros(12),
    )
    test = (X_test.T @ X_test, X_test.T @ y_test, y_test @ y_test) if tested else (NOTHING, np.zeros(0), 0.0)
    boost_blocks(
        X.T @ X, X.T @ y, np.concatenate(turns), at, np.concatenate(shrunk), starts, NU, y @ y,
        *test, selected, risk, risk_test, coef,
    )  # fmt: skip
    chosen, left, left_test, expected = row_by_row(X, y, X_test, y_test)
    assert selected.tolist() == chosen
    np.testing.assert_allclose(coef, expected, atol=1e-10)
    np.testing.assert_allclose(risk, left, rtol=1e-10)
    if tested:
        np.testing.assert_allclose(risk_test, left_test, rtol=1e-10)
