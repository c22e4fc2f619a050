"""Moments by missing pattern: what they hold, and how they are written otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from moments_cases import four_clients, moments_of
from pattern_moments import merged, moments_of_arrays

from fedstat.errors import EstimationError, ModelError
from fedstat.models.vertical.joint_normal.fit import fit_joint_model
from fedstat.models.vertical.pattern_merging import PatternRule, min_entities, plan_merges


@pytest.fixture(scope="module")
def study():
    return four_clients(seed=1, n=400)


@pytest.fixture(scope="module")
def moments(study):
    return moments_of(study)


def in_raw_units(moments):
    """Center 0 and scale 1: the plain sums of (1, x, y)(1, x, y)'."""
    seen = np.column_stack([np.ones(len(moments.n)), moments.seen, np.ones(len(moments.n))])
    grams = np.empty_like(moments.grams)
    for g, has in enumerate(seen):
        back = np.diag(np.append(1.0, moments.scale)) * has[:, None]
        back[1:, 0] = moments.center * has[1:]
        grams[g] = back @ moments.grams[g] @ back.T
    return replace(moments, grams=grams, center=0.0 * moments.center, scale=np.ones_like(moments.scale))


def test_grams_are_the_sums_over_the_entities_of_a_pattern(study, moments):
    raw = in_raw_units(moments)
    X, y, seen = study.table[study.covariates].to_numpy(), study.table["y"].to_numpy(), study.pooled().seen
    assert moments.nobs == len(y)
    assert len(moments.n) == len(np.unique(seen, axis=0)) == 16
    for pattern, n, gram in zip(raw.patterns, raw.n, raw.grams, strict=True):
        rows = (seen == pattern).all(axis=1)
        Z = np.column_stack([np.ones(rows.sum()), np.nan_to_num(X[rows]), y[rows]])
        assert n == rows.sum()
        np.testing.assert_allclose(gram, Z.T @ Z, rtol=1e-10, atol=1e-6)
    assert moments.n_complete == seen.all(axis=1).sum()
    np.testing.assert_array_equal(moments.n_seen, seen.sum(axis=0))
    np.testing.assert_allclose(moments.response_moments, [y.mean(), y.var()], rtol=1e-12)


def test_a_block_with_a_hole_counts_as_missing(study, moments):
    table = study.table.copy()
    rows = np.flatnonzero(table["c1"].notna())[:7]
    table.loc[rows, "c1"] = np.nan
    complete = table.copy()
    complete.loc[rows, ["c0", "c1", "c2"]] = np.nan
    holes, blocks = (moments_of(replace(study, table=t)) for t in (table, complete))
    np.testing.assert_array_equal(holes.n, blocks.n)
    np.testing.assert_allclose(holes.grams, blocks.grams)


def test_standardized_columns_have_mean_zero_and_variance_one_where_seen(moments):
    standard = in_raw_units(moments).standardized()
    total = standard.grams.sum(axis=0)
    count = np.append(standard.n_seen[standard.owner], standard.nobs)
    np.testing.assert_allclose(total[0, 1:] / count, 0.0, atol=1e-7)
    np.testing.assert_allclose(np.diag(total)[1:] / count, 1.0, rtol=1e-7)
    np.testing.assert_allclose(standard.center, moments.center, rtol=1e-10)
    np.testing.assert_allclose(standard.scale, moments.scale, rtol=1e-7)
    np.testing.assert_allclose(standard.grams, moments.grams, atol=1e-5)


def test_units_of_the_sums_do_not_matter(moments):
    one, other = (
        fit_joint_model(moments, "independent"),
        fit_joint_model(in_raw_units(moments), "independent"),
    )
    np.testing.assert_allclose(one.params, other.params, rtol=1e-6)
    assert one.log_likelihood == pytest.approx(other.log_likelihood, rel=1e-9)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"sites": ("A",)}, "expected sites of 4, received 1"),
        ({"names": ("a0",)}, "expected names of 8, received 1"),
        ({"n": np.ones(3)}, r"expected seen of \(3, 8\), received \(16, 8\)"),
        ({"center": np.zeros(8)}, r"expected center of \(9,\)"),
        ({"scale": np.zeros(9)}, "every scale must be positive"),
        ({"grams": np.full((16, 10, 10), np.nan)}, "every sum must be finite"),
        ({"grams": np.ones((16, 10, 10))}, "and the first must be the entity count"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(moments, change, complaint):
    with pytest.raises(ModelError, match=complaint):
        replace(moments, **change)


def from_columns(**columns):
    table = np.column_stack(list(columns.values()))
    y = np.random.default_rng(0).normal(size=len(table))
    return moments_of_arrays(table, y, [table.shape[1]], sites=["Bank"], names=list(columns))


def test_constant_and_collinear_columns_are_named():
    x = np.random.default_rng(1).normal(size=50)
    with pytest.raises(EstimationError, match="Bank: constant among the 50 entities of this fit: flat; drop"):
        fit_joint_model(from_columns(x=x, flat=np.full(50, 7.0)), "independent")
    with pytest.raises(
        EstimationError, match=r"Bank: collinear among the 50 entities .*: x, twice; drop one"
    ):
        fit_joint_model(from_columns(x=x, other=x[::-1], twice=2.0 * x + 1.0), "independent")
    few = np.full(50, np.nan)
    few[0] = 1.0
    with pytest.raises(EstimationError, match="Bank: 1 of the entities of this fit have its block"):
        fit_joint_model(from_columns(few=few), "independent")
    with pytest.raises(EstimationError, match="the response is constant"):
        fit_joint_model(moments_of_arrays(x[:, None], np.ones(50), [1]), "independent")


# ---- smaller models --------------------------------------------------------------------------


def test_a_submodel_has_the_moments_of_its_columns(study, moments):
    """Columns in any order; a client without columns is gone, and patterns that differed by it are one."""
    columns = {"A": ["a1"], "C": ["c0", "c2"]}
    smaller = moments.submodel(["c2", "a1", "c0"])
    direct = moments_of(replace(study, columns=columns))
    assert (smaller.sites, smaller.sizes, smaller.names) == (direct.sites, direct.sizes, direct.names)
    one = {
        tuple(p): (n, g) for p, n, g in zip(smaller.patterns.tolist(), smaller.n, smaller.grams, strict=True)
    }
    two = {tuple(p): (n, g) for p, n, g in zip(direct.patterns.tolist(), direct.n, direct.grams, strict=True)}
    assert one.keys() == two.keys() and len(one) == 4
    for pattern, (n, gram) in one.items():
        assert n == two[pattern][0]
        np.testing.assert_allclose(gram, two[pattern][1], atol=1e-9)


@pytest.mark.parametrize(
    ("columns", "complaint"), [(["a0", "zz"], "no column 'zz'; there are a0, a1"), ([], "at least one")]
)
def test_a_submodel_needs_known_columns(moments, columns, complaint):
    with pytest.raises(ModelError, match=complaint):
        moments.submodel(columns)


# ---- small patterns --------------------------------------------------------------------------


def at_least(count, patterns):
    """Clients without columns, so that the count alone decides."""
    return PatternRule(count, (0,) * patterns.shape[1])


def test_a_pattern_needs_twice_as_many_entities_as_equations():
    """Everything that others can know of one column, except its length: products with 1, y and the rest."""
    assert min_entities(0, 1) == 2
    assert min_entities(7, 1) == 16
    assert min_entities(7, 20) == 20
    rule = PatternRule(5, (3, 2, 10))
    assert [rule.least(p) for p in ((False,) * 3, (True, False, False), (True, True, True))] == [5, 8, 32]


def test_fewer_entities_than_that_leave_a_column_undetermined():
    """With as many entities as equations the rest of the matrix fixes a column; with twice as many not."""
    rng = np.random.default_rng(0)
    others = 7  # 1, y and five columns
    for n, free in ((others, 0), (2 * others, others)):
        Z, x = np.column_stack([np.ones(n), rng.normal(size=(n, others - 1))]), rng.normal(size=n)
        found, *_ = np.linalg.lstsq(Z.T, Z.T @ x, rcond=None)
        assert n - np.linalg.matrix_rank(Z) == free
        assert np.allclose(found, x) == (free == 0)


def test_columns_decide_which_pattern_is_small():
    patterns = np.array([[1, 1], [1, 0], [0, 1]], dtype=bool)
    n = np.array([20.0, 500.0, 600.0])
    assert plan_merges(patterns, n, PatternRule(5, (5, 4))).moved == 0
    plan = plan_merges(patterns, n, PatternRule(5, (5, 5)))
    assert plan.moved == 20 and (plan.patterns.sum(axis=1) == 1).all()


def test_small_patterns_join_the_coarser_one_that_loses_least(study, moments):
    """Client D has the fewest entities: leaving its block out loses the largest share."""
    patterns = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 1], [1, 0, 0], [0, 0, 0]], dtype=bool)
    n = np.array([3.0, 500.0, 50.0, 400.0, 100.0])
    plan = plan_merges(patterns, n, at_least(5, patterns))
    np.testing.assert_array_equal(plan.patterns[plan.target[0]], [1, 0, 1])
    assert (plan.moved, plan.left_out) == (3, 0)
    plan = plan_merges(patterns, np.array([3.0, 50.0, 500.0, 400.0, 100.0]), at_least(5, patterns))
    np.testing.assert_array_equal(plan.patterns[plan.target[0]], [1, 1, 0])


def test_two_small_patterns_fill_one_that_they_have_in_common():
    patterns = np.array([[1, 1, 1, 0], [1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 1, 1]], dtype=bool)
    plan = plan_merges(patterns, np.array([3.0, 4.0, 300.0, 300.0]), at_least(5, patterns))
    assert plan.target[0] == plan.target[1]
    np.testing.assert_array_equal(plan.patterns[plan.target[0]], [1, 1, 0, 0])
    assert plan.moved == 7
    alone = plan_merges(patterns, np.array([2.0, 2.0, 300.0, 300.0]), at_least(5, patterns))
    np.testing.assert_array_equal(alone.patterns[alone.target[0]], [1, 0, 0, 0])


def test_a_pattern_that_others_cannot_fill_is_no_target():
    """(A) is cheaper to go to, but the four of (C, D) cannot join there."""
    patterns = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 1]], dtype=bool)
    plan = plan_merges(
        patterns, np.array([3.0, 2.0, 200.0, 4.0, 100.0]), at_least(8, patterns), largest_share=1.0
    )
    np.testing.assert_array_equal(plan.patterns[plan.target[0]], [0, 1, 0, 0])


def test_a_pattern_that_its_columns_keep_from_release_is_no_target():
    """(B) is cheaper to go to, and has enough for the count alone, but not for its eight columns."""
    patterns = np.array([[1, 1], [1, 0], [0, 1]], dtype=bool)
    plan = plan_merges(patterns, np.array([9.0, 500.0, 3.0]), PatternRule(5, (2, 8)))
    np.testing.assert_array_equal(plan.patterns[plan.target[0]], [1, 0])
    assert (plan.moved, plan.left_out) == (9, 3)


def test_the_few_that_lack_every_block_are_left_out():
    patterns = np.array([[0, 0], [1, 0], [1, 1]], dtype=bool)
    plan = plan_merges(patterns, np.array([2.0, 100.0, 100.0]), at_least(5, patterns))
    assert (plan.moved, plan.left_out) == (0, 2)
    assert plan.target[0] == -1 and len(plan.patterns) == 2


@pytest.mark.parametrize("seed", range(20))
def test_every_plan_leaves_no_small_pattern_and_moves_to_coarser_ones(seed):
    rng = np.random.default_rng(seed)
    K = int(rng.integers(1, 7))
    patterns = np.unique(rng.random((60, K)) < rng.uniform(0.2, 0.8), axis=0)
    n = np.floor(np.exp(rng.uniform(0.0, 6.0, size=len(patterns))))
    rule = PatternRule(10, tuple(rng.integers(0, 9, size=K).tolist()))
    plan = plan_merges(patterns, n, rule, largest_share=1.0)
    released = np.bincount(plan.target[plan.target >= 0], n[plan.target >= 0], len(plan.patterns))
    least = np.array([rule.least(tuple(p)) for p in plan.patterns.tolist()])
    assert (released >= least).all()
    assert len(np.unique(plan.patterns, axis=0)) == len(plan.patterns)
    assert released.sum() + plan.left_out == n.sum()
    stays = plan.target >= 0
    to = plan.patterns[plan.target[stays]]
    assert (patterns[stays] >= to).all()
    moved = (patterns[stays] != to).any(axis=1)
    assert plan.moved == n[stays][moved].sum()
    assert (n[stays][moved] < [rule.least(tuple(p)) for p in patterns[stays][moved].tolist()]).all()


def test_merged_moments_are_those_of_data_without_the_blocks(study, moments):
    plan = plan_merges(moments.patterns, moments.n, at_least(6, moments.patterns))
    coarser = merged(moments, plan)
    assert coarser.n.min() >= 6 > moments.n.min()
    table, seen = study.table.copy(), study.pooled().seen
    for g, to in enumerate(plan.target):
        rows = (seen == moments.patterns[g]).all(axis=1)
        for k, names in enumerate(study.columns.values()):
            if not plan.patterns[to][k]:
                table.loc[rows, names] = np.nan
    direct = moments_of(replace(study, table=table))
    assert len(direct.n) == len(coarser.n)
    one, other = fit_joint_model(coarser, "independent"), fit_joint_model(direct, "independent")
    np.testing.assert_allclose(one.params, other.params, rtol=1e-8)
    assert one.log_likelihood == pytest.approx(other.log_likelihood, rel=1e-11)
    assert np.abs(one.params / fit_joint_model(moments, "independent").params - 1.0).max() > 1e-4


def test_moving_many_entities_is_an_error_that_names_the_share(moments):
    few = plan_merges(moments.patterns, moments.n, at_least(50, moments.patterns), largest_share=1.0).moved
    share = (
        rf"{few} of 400 entities \({100 * few / 400:.1f} %\) .*too few entities to be released .*at most 5 %"
    )
    with pytest.raises(EstimationError, match=share):
        plan_merges(moments.patterns, moments.n, at_least(50, moments.patterns))


def test_nothing_is_merged_where_every_pattern_is_large(moments):
    plan = plan_merges(moments.patterns, moments.n, at_least(1, moments.patterns))
    assert (plan.moved, plan.left_out) == (0, 0)
    np.testing.assert_array_equal(plan.patterns[plan.target], moments.patterns)


def test_merging_refuses_nonsense():
    patterns = np.array([[1], [1]], dtype=bool)
    with pytest.raises(ModelError, match="distinct"):
        plan_merges(patterns, np.ones(2), at_least(5, patterns))
    with pytest.raises(ModelError, match="at least 1, received 0"):
        plan_merges(patterns[:1], np.ones(1), at_least(0, patterns[:1]))
