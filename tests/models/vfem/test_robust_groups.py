"""Robust covariance under free covariances between sites, from sums by random group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.models.vertical.joint_normal.fit import fit_joint_normal, sandwich_covariance, scores_by_pattern
from fedstat.models.vertical.joint_normal.likelihood import differentiate_joint_normal
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vfem.covariance.from_moments import moments_covariance

TRUTH = pd.Series({"Intercept": 1.0, "x": 1.0, "z": 0.5, "w": -0.5})


def frames(seed, n=1_200, power=1.0):
    """The error's standard deviation depends on x. Records are missing completely at random: with these
    errors, maximum likelihood is biased if they are not.
    """
    rng = np.random.default_rng([seed, 3])
    at = np.arange(n)
    x, z = rng.normal(size=(2, n))
    z, w = 0.5 * x + z, 0.5 * z + rng.normal(size=n)
    y = 1.0 + x + 0.5 * z - 0.5 * w + np.exp(power * x) * rng.normal(size=n) / np.exp(power**2)
    lacks = [rng.random(n) < 0.3, rng.random(n) < 0.4]
    return {
        "A": pd.DataFrame({"id": at, "y": y, "x": x}),
        "B": pd.DataFrame({"id": at, "z": z})[~lacks[0]],
        "C": pd.DataFrame({"id": at, "w": w})[~lacks[1]],
    }


def model(tables, **options):
    return fs.VFEMRegression.from_formula("y ~ .", fs.ClientPartition.from_frames(tables, on="id", **options))


def grouped(groups, seed=0, n=1_500):
    """Sums of complete rows by random group."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 3))
    y = X @ [1.0, 0.5, -0.5] + np.exp(0.7 * X[:, 0]) * rng.normal(size=n)
    rows = np.column_stack([np.ones(n), X, y])
    grams = np.array([rows[g::groups].T @ rows[g::groups] for g in range(groups)])
    return PatternMoments(
        sites=("A", "B"),
        sizes=(1, 2),
        names=("x", "z", "w"),
        seen=np.ones((groups, 3), dtype=bool),
        n=grams[:, 0, 0],
        grams=grams,
        center=np.zeros(4),
        scale=np.ones(4),
    )


def test_scores_of_groups_add_up_to_the_score():
    moments = grouped(5)
    fit = fit_joint_normal(moments.together(np.zeros(5, dtype=int), moments.seen[:1]), np.ones((3, 3), bool))
    away = replace(fit.point, beta=fit.point.beta + 0.1, a=0.2)
    each = scores_by_pattern(moments.standardized(), away, fit.moves)
    whole = differentiate_joint_normal(fit.moments, away, fit.moves).score
    np.testing.assert_allclose(each.sum(axis=0), whole, rtol=1e-9, atol=1e-7)


def test_the_sandwich_agrees_with_the_jackknife_that_leaves_out_groups():
    groups = 150
    moments = grouped(groups)
    edges, one = np.ones((3, 3), bool), np.zeros(groups, dtype=int)
    fit = fit_joint_normal(moments.together(one, moments.seen[:1]), edges)
    psi, df = sandwich_covariance(fit, moments)
    assert df == groups - 1
    kept = []
    for g in range(groups):
        own = np.arange(groups) != g
        less = replace(moments, seen=moments.seen[own], n=moments.n[own], grams=moments.grams[own])
        kept.append(fit_joint_normal(less.together(one[own], moments.seen[:1]), edges).beta)
    jackknife = (groups - 1) / groups * ((kept - np.mean(kept, axis=0)) ** 2).sum(axis=0)
    # psi is (a, s2, beta_1, mu_1, beta_2, mu_2, ...): sites with one and two columns.
    np.testing.assert_allclose(np.diag(psi)[[2, 4, 5]], jackknife, rtol=0.12)
    observed = np.diag(moments_covariance(fit).psi)
    assert psi[2, 2] > 1.5 * observed[2]


def test_a_robust_fit_has_the_estimates_of_the_fit_and_other_errors():
    plain, robust = model(frames(1)).fit(), model(frames(1)).fit(cov_type="robust")
    np.testing.assert_allclose(robust.params, plain.params, atol=1e-8)
    assert robust.bse["x"] > 1.2 * plain.bse["x"] and robust.use_t and robust.df_inference >= 20
    assert robust.mcar_test() == pytest.approx(plain.mcar_test(), rel=1e-6)
    # Every group has enough entities to be released by itself: 2 (columns + 1), and min_count.
    groups = robust.exchange.by_group
    assert (
        groups.n >= np.maximum(20, 2 * (groups.seen.sum(axis=1) + 1))
    ).all() and robust.exchange.smallest == groups.n.min()
    assert groups.n.sum() == robust.nobs and len(groups.n) <= 25 * len(robust.exchange.moments.n)
    assert "delete-a-group jackknife" in " ".join(str(robust.summary()).split())
    again = model(frames(1)).fit(cov_type="robust")
    pd.testing.assert_series_equal(again.bse, robust.bse, rtol=1e-9)
    smaller = robust.refit("y ~ x + z")
    assert smaller.cov_type == "robust" and smaller.params.index.tolist() == ["Intercept", "x", "z"]
    with pytest.raises(ModelError, match="wald_test"):
        robust.compare_lr_test(smaller)
    with pytest.raises(NotAvailableError, match="random group"):
        plain.refit("y ~ x + z", cov_type="robust")


def test_random_groups_add_no_difference_of_few_entities_to_a_plain_fit():
    """Attack: subtract sums of the one fit from sums of the other, in any combination by group."""
    strict = model(frames(4, power=0.3), policy="strict")
    fits = [strict.fit(cov_type=one) for one in ("observed", "robust")]
    plain, groups = fits[0].exchange.moments, fits[1].exchange.by_group
    for pattern, n, gram in zip(plain.seen, plain.n, plain.grams, strict=True):
        own = (groups.seen == pattern).all(axis=1)
        # The groups divide the pattern: the sum of some is a sum over at least the smallest group, and so is
        # the rest.
        assert groups.n[own].sum() == n
        np.testing.assert_allclose(groups.grams[own].sum(axis=0), gram, rtol=1e-6, atol=1e-4)
    # Every group has fewer different sums than unknown values.
    width = groups.seen.sum(axis=1) + 1
    assert (width * (width + 3) / 2 < groups.n * width).all()
    # A second fit releases the same groups again, not other ones.
    again = strict.fit(cov_type="robust").exchange.by_group
    np.testing.assert_allclose(again.grams, groups.grams, rtol=1e-6, atol=1e-4)


def test_a_robust_covariance_needs_enough_groups():
    with pytest.raises(EstimationError, match="random groups"):
        model(frames(2, n=150)).fit(cov_type="robust")


@pytest.mark.slow
def test_robust_intervals_cover_where_variances_differ():
    runs, covered, plain = 300, np.zeros(4), np.zeros(4)
    for seed in range(runs):
        one = model(frames(seed, power=0.5))
        for cov_type, count in (("robust", covered), ("observed", plain)):
            limits = one.fit(cov_type=cov_type).conf_int()
            count += ((limits[0] < TRUTH) & (limits[1] > TRUTH)).to_numpy()
    print((covered / runs).round(3), (plain / runs).round(3))
    assert (covered / runs > 0.90).all() and plain[1] < 0.9 * runs
