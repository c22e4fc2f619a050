"""Ordinal, binary and nominal columns: likelihood against adaptive quadrature, and what every step keeps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from modality_cases import ascend, begun, categorical, levels, objective
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import norm

from fedstat.errors import ModelError
from fedstat.models.m2sem.modality.categorical import CategoricalModality

ONE_FACTOR = ("ordinal", "ordinal", "binary", "ordinal")


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    missing=st.sampled_from([0.0, 0.2, 0.5]),
    covariates=st.integers(0, 1),
    row=st.sampled_from([0.0, 1.0, 20.0]),
    means=st.sampled_from([0.0, 3.0, 40.0]),
)
def test_no_step_lowers_the_objective(seed, missing, covariates, row, means):
    m, r = categorical(seed, n=60, missing=missing, covariates=covariates)
    rng = np.random.default_rng(seed)
    values = ascend(m, r * rng.uniform(0.0, 2.0, 60)[:, None], row * rng.random(m.P), means, steps=8)
    assert np.diff(values).min() > -1e-8 * np.abs(values).max()


def graded(seed=3, K=1):
    """One factor, moderate loadings: the modality, and thresholds with loading by column."""
    codes, _, C = levels(seed, n=80, K=1, Q=1, kinds=ONE_FACTOR, missing=0.1)
    m = CategoricalModality(codes, list("abcd"), 1, ONE_FACTOR, C, nodes=41)
    rng, parameters = np.random.default_rng(0), {}
    m.means = rng.standard_normal((K, 1))
    for block in m._blocks:
        block.load(rng.uniform(-1.5, 1.5, block.loadings.shape))
        for p, row in zip(block.columns, block.theta, strict=True):
            parameters[p] = row[:-1], row[-1]
    return m, parameters


def share(parameters, c, eta):
    """P(x = c | eta) as a difference of Samejima's boundaries."""
    F = np.concatenate([[0.0], expit(parameters[0] - parameters[1] * eta), [1.0]])
    return F[c + 1] - F[c]


def integral(function):
    return quad(function, -12, 12, epsabs=1e-14, epsrel=1e-10, points=[-2, 0, 2])[0]


def test_graded_response_by_adaptive_quadrature():
    """One cluster, one factor: each row's likelihood by scipy to 1e-6."""
    m, parameters = graded()
    mu = m.means[0, 0]
    for x, f in zip(m.codes, m.log_densities()[:, 0], strict=True):
        seen = [(parameters[p], c) for p, c in enumerate(x) if c >= 0]
        complete = integral(
            lambda eta, seen=seen: norm.pdf(eta - mu) * np.prod([share(at, c, eta) for at, c in seen])
        )
        assert f == pytest.approx(np.log(complete), abs=1e-6)


def test_profiles_by_adaptive_quadrature():
    m, parameters = graded(K=2)
    profile = m.profile()
    for p, seen in enumerate(m._seen):
        assert np.all(np.isnan(profile[:, p, m.levels[p] :]))
        for c, level in enumerate(seen):
            for k, mu in enumerate(m.means[:, 0]):
                complete = integral(
                    lambda eta, c=c, mu=mu, p=p: norm.pdf(eta - mu) * share(parameters[p], c, eta)
                )
                assert profile[k, p, level] == pytest.approx(complete, abs=1e-8)


def test_nodes_of_a_search_are_near_those_of_the_end():
    m, _ = categorical(1)
    for block in m._blocks:
        block.load(np.random.default_rng(0).uniform(-0.8, 0.8, block.loadings.shape))
    f = m.log_densities()
    m.nodes = 15
    assert 0 < np.abs(m.log_densities() - f).max() < 0.05


def test_penalized_maximum_satisfies_its_conditions():
    """Numerical slopes of the observed objective on finer nodes than its steps need."""
    m, r = categorical(1, n=150, kinds=("ordinal", "nominal", "binary", "ordinal", "nominal", "ordinal"))
    rows, means = np.array([6.0, 8.0, 60.0, 6.0, 90.0, 6.0]), 2.0
    m.nodes = 21
    ascend(m, r, rows, means, steps=250)
    at, h = m.state(), 1e-5
    value = np.empty((len(at), 2))
    for j in range(len(at)):
        for s, sign in enumerate((1, -1)):
            m.restore(at + sign * h * (np.arange(len(at)) == j))
            value[j, s] = (r * m.log_densities()).sum()
    slopes = (value[:, 0] - value[:, 1]) / (2 * h)
    m.restore(at)
    norms, start = m.row_norms(), 0
    assert 0 < (norms == 0.0).sum() < 4
    for block in m._blocks:
        part = slopes[start : start + block.theta.size].reshape(block.theta.shape)
        start += block.theta.size
        assert np.abs(part[:, : block.intercepts]).max() < 2e-3
        for p, row, l in zip(block.columns, part[:, block.intercepts :], block.loadings, strict=True):
            if norms[p] == 0.0:
                assert np.linalg.norm(row) <= rows[p]
            else:
                assert np.allclose(row, rows[p] * l.ravel() / norms[p], atol=2e-3)
    by_means = slopes[start:].reshape(3, 2)
    assert np.allclose(by_means, means * m.means / np.linalg.norm(m.means), atol=2e-3)


def test_means_are_zero_from_their_bound_on():
    m, r = categorical(2)
    m.means = np.zeros_like(m.means)
    at = m.state()
    bound = np.linalg.norm(np.einsum("nk,nkq->kq", r, m.factors_by_cluster()))
    for factor, zero in ((1 + 1e-9, True), (1 - 1e-6, False)):
        m.restore(at)
        m.improve(r, 0.0, factor * bound)
        assert np.any(m.means) != zero


def test_a_state_comes_back():
    m, r = categorical(1, missing=0.1)
    f, kept = m.log_densities(), m.state()
    ascend(m, r, steps=2)
    m.restore(kept)
    assert np.array_equal(m.log_densities(), f)


def test_levels_without_rows_have_no_probability():
    codes, r, C = levels(1)
    kinds = ("ordinal", "nominal", "binary", "ordinal", "nominal")
    codes[codes[:, 0] == 2, 0] = 1
    m = CategoricalModality(codes, list("abcde"), 2, kinds, C)
    m.begin(3)
    assert np.all(m.profile()[:, 0, 2] == 0.0) and np.isfinite(objective(m, r))
    with pytest.raises(ModelError, match="that vary; received a"):
        CategoricalModality(np.where(np.arange(5) == 0, 1, codes), list("abcde"), 2, kinds, C)


def test_rows_of_no_weight_at_a_level_stop_nothing():
    codes, r, C = levels(2)
    kinds = ("ordinal", "nominal", "binary", "ordinal", "nominal")
    m = CategoricalModality(codes, list("abcde"), 2, kinds, C)
    m.begin(3)
    m.begin_means(r)
    without = r * (codes[:, 0] != 1)[:, None]
    values = ascend(m, without, steps=60)
    assert np.diff(values).min() > -1e-8 * np.abs(values).max()
    assert m.profile()[:, 0, 1].max() < 1e-4 and np.diff(values)[-1] < 0.05


@pytest.mark.parametrize("covariates", [0, 1])
def test_columns_without_loadings_need_no_nodes(covariates):
    """Their likelihood and maximum are those of the same columns on nodes, held at zero by penalties."""
    m, r = categorical(1, missing=0.1, covariates=covariates)
    rows = np.array([1e6, 1e6, 0.0, 0.0, 0.0])
    for block in m._blocks:
        block.theta[np.isin(block.columns, [0, 1]), block.intercepts :] = 0.0
    state, complete = m.state(), m.log_densities()
    held = ascend(m, r, rows, steps=25)
    m.nodes = m.nodes
    m.support[[0, 1]] = False
    m.restore(state)
    assert np.allclose(m.log_densities(), complete, rtol=0.0, atol=1e-10)
    left = ascend(m, r, steps=25)
    assert np.diff(left).min() > -1e-8 * np.abs(left).max()
    assert left[0] == pytest.approx(held[0], abs=1e-9) and left[-1] == pytest.approx(held[-1], abs=1e-3)
    assert np.array_equal(m.row_norms() == 0.0, rows > 0.0)


def test_support_and_silence_are_kept():
    m, r = categorical(1)
    m.support[[0, 1]] = False
    m.silent = True
    m.improve(r)
    assert np.array_equal(m.row_norms() > 0.0, m.support) and not m.means.any()
    # Thresholds 3 + 1 + 3, two columns of two logits; rows of loadings: one binary, one ordinal, two nominal.
    assert m.free_parameters() == 3 + 1 + 3 + 2 + 2 + 4 * 2 - 1


def test_a_covariate_is_an_offset_of_its_rows():
    """Rows of one value of z have the likelihood of a modality without covariates whose intercepts moved."""
    m, _ = categorical(3, covariates=2)
    f = m.log_densities()
    z = m.Z[:, 1:]
    for block in m._blocks:
        block.theta[:, block.C - 1 : block.intercepts] = 0.3 * np.arange(1, block.intercepts - block.C + 2)
    moved = m.log_densities()
    assert np.array_equal(np.abs(moved - f).max(axis=1) == 0.0, ~z.any(axis=1))
    twin = CategoricalModality(
        m.codes, m.names, 2, ("ordinal", "nominal", "binary", "ordinal", "nominal"), m.levels
    )
    twin.means = m.means
    for own, other in zip(m._blocks, twin._blocks, strict=True):
        other.load(own.loadings)
    for value in np.unique(z, axis=0):
        for own, other in zip(m._blocks, twin._blocks, strict=True):
            B = own.C - 1
            b = own.theta[:, B : own.intercepts].reshape(len(own.theta), -1, 2) @ value
            other.theta[:, :B] = own.theta[:, :B] + own.sign * b
        rows = (z == value).all(axis=1)
        assert np.allclose(twin.log_densities()[rows], moved[rows])


def test_new_rows_have_the_levels_of_the_fit():
    codes, r, C = levels(1)
    kinds = ("ordinal", "nominal", "binary", "ordinal", "nominal")
    codes[codes[:, 0] == 2, 0] = 1
    m = begun(CategoricalModality(codes, list("abcde"), 2, kinds, C), r)
    ascend(m, r, steps=2)
    some = CategoricalModality(codes[:7], list("abcde"), 2, kinds, C, units=m.units)
    some.restore(m.state())
    assert np.allclose(some.log_densities(), m.log_densities()[:7])
    codes[0, 0] = 2
    with pytest.raises(ModelError, match="a: 1 row"):
        CategoricalModality(codes[:7], list("abcde"), 2, kinds, C, units=m.units)


def test_parameters_out_of_their_range_have_no_likelihood():
    m, r = categorical(1)
    state = m.state()
    for block in m._blocks:
        if block.sign < 0 and block.C > 2:
            block.theta[:, : block.C - 1] = block.theta[:, : block.C - 1][:, ::-1]
    assert not (r * m.log_densities()).sum() > -np.inf
    m.restore(state)
    assert np.isfinite(m.log_densities()).all()
