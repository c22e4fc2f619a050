"""Correlations from Gram matrices of cut scores: without noise they are those of the copula."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import ndtri

from fedstat.models.copula.bounds import Bounds
from fedstat.models.copula.correlation import invert_products
from fedstat.models.copula.margins import Bins, Margin

N = 200_000
OMEGA = np.array([[1.0, 0.6, -0.3, 0.2], [0.6, 1.0, 0.1, 0.5], [-0.3, 0.1, 1.0, 0.4], [0.2, 0.5, 0.4, 1.0]])
CUTS = [None, ndtri([0.8]), ndtri([0.2, 0.5, 0.9]), None]
BOUNDS = Bounds({"a": (-4, 4), "b": [0, 1], "c": range(4), "d": (-4, 4)})


@pytest.fixture(scope="module")
def scored():
    rng = np.random.default_rng(8)
    Z = rng.standard_normal((N, 4)) @ np.linalg.cholesky(OMEGA).T
    values = [z if cut is None else np.searchsorted(cut, z) for z, cut in zip(Z.T, CUTS, strict=True)]
    margins, scores = [], []
    for name, x in zip(BOUNDS, values, strict=True):
        bins = Bins.of(name, BOUNDS[name], 8)
        codes = bins.code(pd.Series(x))
        margins.append(Margin.of_counts(bins, bins.tally(codes).astype(float), N))
        scores.append(margins[-1].scores[codes])
    return margins, np.column_stack(scores)


@pytest.mark.parametrize("squared", [100.0, 2.4, 1.6])
def test_correlations_are_found_whatever_is_cut(scored, squared):
    margins, U = scored
    blocks = [slice(0, 2), slice(2, 4)]
    cut = U.copy()
    for block in blocks:
        length = np.sqrt((U[:, block] ** 2).sum(axis=1, keepdims=True))
        cut[:, block] *= np.minimum(1.0, np.sqrt(squared) / length)
    found = invert_products(cut.T @ cut / N, margins, blocks, [squared, squared])
    # three standard errors of a tetrachoric correlation at this n
    assert np.abs(found.correlation - OMEGA).max() < 0.012
    assert found.moved == pytest.approx(0.0, abs=1e-9)


def test_pairs_that_contradict_each_other_are_moved_and_reported_by_column(scored):
    margins, U = scored
    products = U.T @ U / N
    products[0, 2] = products[2, 0] = 0.6 * np.sqrt(margins[0].variance * margins[2].variance)
    products[1, 2] = products[2, 1] = -0.6 * np.sqrt(margins[1].variance * margins[2].variance)
    moved = invert_products(products, margins, [slice(0, 2), slice(2, 4)], [100.0, 100.0]).moved
    assert moved.shape == (4,)
    assert moved[:3].min() > 0.05 and moved.argmin() == 3
