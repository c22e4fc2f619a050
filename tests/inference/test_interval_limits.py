"""Limits of intervals and of the notes that go with them: the last number of sites, tables or scores."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import ModelError
from fedstat.inference.conformal import merge_upwards, threshold_bins
from fedstat.inference.heterogeneity import adjust_holm, heterogeneity
from fedstat.inference.meta_analysis import combine_sites

# ---- conformal prediction ----------------------------------------------------------------------------


def by_sorting(counts, alpha):
    """The bin of the k-th smallest score, k = ceil((n + 1)(1 - alpha)); all bins where there is none."""
    scores = np.repeat(np.arange(len(counts)), counts)
    k = int(np.ceil(round((len(scores) + 1) * (1.0 - alpha), 9)))
    return scores[k - 1] if k <= len(scores) else len(counts)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2, 0.5, 0.9])
def test_the_threshold_is_the_smallest_score_with_the_level(alpha):
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 4, (60, 7))
    found = threshold_bins(counts, alpha)
    assert found.tolist() == [by_sorting(one, alpha) for one in counts]


@pytest.mark.parametrize(
    ("n", "alpha", "bins"),
    [(0, 0.1, 3), (1, 0.5, 0), (1, 0.49, 3), (8, 0.1, 3), (9, 0.1, 0), (19, 0.05, 0), (18, 0.05, 3)],
)
def test_so_many_scores_are_needed_for_a_level(n, alpha, bins):
    """With n = 9 scores the largest is not exceeded with probability 9 / 10; with 8 none is sure enough."""
    assert threshold_bins(np.array([[n, 0, 0]]), alpha).tolist() == [bins]


def test_each_group_has_a_threshold_of_its_own():
    assert threshold_bins(np.array([[9, 0], [8, 1], [0, 9], [8, 0]]), 0.1).tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("counts", "places"),
    [
        ([0, 0, 0], [0, 1, 2]),
        ([1, 0, 0], [0, 1, 2]),  # too few in all: nothing is merged
        ([4, 0, 0], [0, 1, 2]),
        ([5, 0, 0], [0, 1, 2]),
        ([4, 0, 1], [2, 2, 2]),
        ([5, 0, 5], [0, 2, 2]),
        ([5, 0, 4], [2, 2, 2]),
        ([5, 1, 0], [1, 1, 2]),
        ([0, 5, 5], [1, 1, 2]),
        ([6, 6, 6], [0, 1, 2]),
    ],
)
def test_groups_of_scores_reach_the_minimum_and_no_rest_is_left(counts, places):
    assert merge_upwards(np.array(counts), 5).tolist() == places


# ---- sites, tables and p-values -----------------------------------------------------------------------


def compared(m, **changes):
    """Compare `m` sites with equal estimates."""
    one = {"n": 100, "beta": np.zeros(1), "cov": np.eye(1), "problem": ""}
    each = [
        SimpleNamespace(site=f"S{k}", score=np.zeros(1), information=np.eye(1), own=None, **one | changes)
        for k in range(m)
    ]
    return heterogeneity(("x",), np.zeros(1), 1.0, each)


@pytest.mark.parametrize(("m", "few"), [(1, False), (2, True), (4, True), (5, False)])
def test_few_sites_are_noted(m, few):
    notes = " ".join(str(compared(m).summary()).split())
    assert (f"With {m} sites Q has little power" in notes) == few
    assert (f"on {m - 1} degree{'s' if m > 2 else ''} of freedom" in notes) == few


@pytest.mark.parametrize(("m", "tested"), [(1, False), (2, True)])
def test_one_site_is_compared_with_none(m, tested):
    table = compared(m).to_frame()
    assert table.loc["x", "df"] == m - 1 and np.isfinite(table.loc["x", "p_value"]) == tested


@pytest.mark.parametrize(("alpha", "fits"), [(0.0, False), (1e-9, True), (1.0 - 1e-9, True), (1.0, False)])
def test_the_level_of_a_comparison_lies_between_zero_and_one(alpha, fits):
    one = SimpleNamespace(
        site="S", n=9, beta=None, cov=None, problem="none", score=np.zeros(1), information=np.eye(1), own=None
    )
    if fits:
        assert heterogeneity(("x",), np.zeros(1), 1.0, [one], alpha=alpha).alpha == alpha
    else:
        with pytest.raises(ModelError, match="expected alpha between 0 and 1 and one site or more"):
            heterogeneity(("x",), np.zeros(1), 1.0, [one], alpha=alpha)
    with pytest.raises(ModelError, match="and 0 sites"):
        heterogeneity(("x",), np.zeros(1), 1.0, [])


@pytest.mark.parametrize("variance", [0.0, -1.0, np.nan, np.inf])
def test_an_estimate_without_a_variance_is_none(variance):
    assert compared(2, cov=np.array([[variance]])).estimates.isna().all(axis=None)
    assert not compared(2, cov=np.array([[1e-300]])).estimates.isna().any(axis=None)


@pytest.mark.parametrize("m", [0, 1, 2])
def test_random_effects_need_two_sites(m):
    found = combine_sites(np.linspace(0.0, 1.0, m), np.full(m, 0.1))
    assert np.isfinite([found.re_low, found.re_high]).all() == (m >= 2)


@pytest.mark.parametrize(
    ("p", "adjusted"),
    [([], []), ([0.04], [0.04]), ([0.04, 0.02], [0.04, 0.04]), ([0.5, 0.3, 0.9], [1.0, 0.9, 1.0])],
)
def test_holms_method_by_hand(p, adjusted):
    np.testing.assert_allclose(adjust_holm(np.array(p)), adjusted)


@pytest.mark.parametrize(("tables", "few"), [(2, True), (19, True), (20, False)])
def test_few_synthetic_tables_are_noted(tables, few):
    rng = np.random.default_rng(1)
    fits = [
        SimpleNamespace(params=pd.Series({"x": b}), bse=pd.Series({"x": 1.0}))
        for b in rng.normal(size=tables)
    ]
    assert ("Fewer than 20 tables" in " ".join(str(fs.combine(fits).summary()).split())) == few


@pytest.mark.parametrize("tables", [0, 1])
def test_one_table_is_not_combined(tables):
    fits = [SimpleNamespace(params=pd.Series({"x": 1.0}), bse=pd.Series({"x": 1.0}))] * tables
    with pytest.raises(ModelError, match=f"at least 2 tables, received {tables}"):
        fs.combine(fits)
