"""The moment equations against rows, maximum likelihood and numerical derivatives."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from copula_design import (
    POINTS,
    draw_columns,
    draw_response,
    released,
    response_bins,
)

from fedstat.models.copula.bounds import Bounds
from fedstat.models.copula.margins import Bins, Margin
from fedstat.models.copula_glm.design import ScoredColumn, ScoredDesign, ScoredResponse
from fedstat.models.copula_glm.estimation import bootstrap, estimate
from fedstat.models.copula_glm.released_distribution import ReleaseNoise, release_rows

FAMILIES = {
    "Binomial": sm.families.Binomial(),
    "Gaussian": sm.families.Gaussian(),
    "Poisson": sm.families.Poisson(),
}
N = 10_000


@pytest.fixture(scope="module", params=FAMILIES)
def fitted(request):
    family, rng = request.param, np.random.default_rng(5)
    columns = draw_columns(N, rng)
    y = draw_response(family, columns, rng)
    design, release = released(family, columns, y)
    known = sm.GLM(y, sm.add_constant(columns.to_numpy()), family=FAMILIES[family]).fit()
    return family, estimate(design, release, POINTS), known


def test_without_noise_it_is_maximum_likelihood_up_to_efficiency_and_misfit(fitted):
    _, fit, known = fitted
    assert fit.root.converged
    away = (fit.root.params - known.params) / known.bse
    # Another weighting of the same rows, and a law of columns that is estimated: a fraction of an error.
    assert np.sqrt(np.mean(away**2)) < 0.6 and np.abs(away).max() < 1.5


def test_the_scale_is_that_of_the_residuals(fitted):
    family, fit, known = fitted
    if family == "Gaussian":
        assert fit.root.scale == pytest.approx(np.sqrt(known.scale), rel=0.02)


def test_the_root_is_that_of_rows_of_the_law(fitted):
    """Integrals over the law are those over rows drawn from it: a step of Newton on these moves little."""
    _, fit, _ = fitted
    rng, distribution, response, b = (
        np.random.default_rng(3),
        fit.distribution,
        fit.release.response,
        fit.root.params,
    )
    shift, spread = distribution.values.mean(axis=0), distribution.values.std(axis=0)
    r, J, rows = np.zeros(11), np.zeros((11, 11)), 50_000
    for _ in range(8):
        latents = distribution.draw(rows, rng)
        V = np.column_stack(
            [np.ones(rows), distribution.design.score(distribution.code(latents), distribution.tables)]
        )
        X = distribution.design.values(latents, distribution.margins)
        found = response.mean(b[0] + X @ b[1:], fit.root.scale)
        r += found.mean @ V / (8 * rows)
        J += (
            (V * found.slope[:, None]).T @ np.column_stack([np.ones(rows), (X - shift) / spread]) / (8 * rows)
        )
    move = np.linalg.solve(J, np.concatenate([[response.mean_score], fit.release.products[-1, :-1]]) - r)
    # of standardized columns; standard errors are .01 (normal, counts) to .03 (binary)
    assert np.abs(move).max() < 0.005


@pytest.mark.parametrize("family", FAMILIES)
def test_mean_scores_are_those_of_the_distribution(family):
    bins = response_bins(family, 5)
    rng = np.random.default_rng(2)
    codes = rng.integers(bins.count, size=3000)
    response = ScoredResponse(family, Margin.of_counts(bins, bins.tally(codes).astype(float), 3000))
    eta = np.array([-1.0, 0.3, 1.4])
    found = response.mean(eta, 1.3)
    for j, at in enumerate(eta):
        scores = response.table[response.draw(np.full(400_000, at), 1.3, rng)]
        assert found.mean[j] == pytest.approx(scores.mean(), abs=5.0 * scores.std() / np.sqrt(len(scores)))
    for power in (1, 2):
        up, down = (response.mean(eta + h, 1.3, power).mean for h in (1e-5, -1e-5))
        assert response.mean(eta, 1.3, power).slope == pytest.approx((up - down) / 2e-5, abs=1e-7)
        up, down = (response.mean(eta, 1.3 * np.exp(h), power).mean for h in (1e-5, -1e-5))
        assert response.mean(eta, 1.3, power).by_scale == pytest.approx((up - down) / 2e-5, abs=1e-7)


def test_a_spline_through_means_of_a_normal_response_is_them():
    bins = response_bins("Gaussian", 6)
    p = np.random.default_rng(1).dirichlet(np.full(bins.count, 0.3))
    response, eta = ScoredResponse("Gaussian", Margin(bins, p)), np.random.default_rng(2).normal(0, 2, 5_000)
    for scale in (0.2, 1.0, 4.0):
        for power in (1, 2):
            many = response.mean(eta, scale, power)
            few = [response.mean(part, scale, power) for part in np.split(eta, 500)]
            for found, exact in zip(many, map(np.concatenate, zip(*few, strict=True)), strict=True):
                assert found == pytest.approx(exact, abs=3e-6)


def test_errors_by_simulation_are_those_of_the_information(fitted):
    _, fit, known = fitted
    errors = bootstrap(fit, N, None, 40, np.random.default_rng(1))
    assert errors.failed == 0 and not errors.noise.any()
    share = np.sqrt(np.diag(errors.covariance)) / known.bse
    # 40 draws leave 11 % in each; a slightly less efficient estimate has a few more
    assert 0.95 < share.mean() < 1.25 and share.min() > 0.7 and share.max() < 1.6


def test_errors_of_many_rows_are_found_from_fewer(monkeypatch):
    """Margins, products and estimates from some of the rows, with noise as large as the sampling error."""
    rng = np.random.default_rng(8)
    columns = draw_columns(N, rng)
    y = draw_response("Binomial", columns, rng)
    fit = estimate(*released("Binomial", columns, y), POINTS)
    noise = ReleaseNoise(np.full(10, 60.0), 60.0, np.full((11, 11), 0.012))
    complete = bootstrap(fit, N, noise, 40, np.random.default_rng(1))
    monkeypatch.setattr("fedstat.models.copula_glm.estimation.MOST_ROWS", N // 4)
    part = bootstrap(fit, N, noise, 40, np.random.default_rng(2))
    for kind in ("sampling", "noise"):
        share = getattr(part, kind).std(axis=0) / getattr(complete, kind).std(axis=0)
        assert np.exp(np.log(share).mean()) == pytest.approx(1.0, abs=0.15), kind


def test_levels_of_a_category_are_estimated_whatever_the_reference():
    rng = np.random.default_rng(4)
    z = rng.standard_normal((40_000, 2)) @ np.linalg.cholesky([[1.0, 0.5], [0.5, 1.0]]).T
    level, x = np.searchsorted([-0.5, 0.4, 1.0], z[:, 0]), z[:, 1]
    effects = np.array([0.0, 0.8, -0.5, 0.3])
    y = (rng.uniform(size=len(x)) < 1.0 / (1.0 + np.exp(-(effects[level] + 0.5 * x)))).astype(int)
    names = np.array(["low", "middle", "high", "top"])
    bounds = Bounds({"g": list(names), "x": (-5, 5)})
    bins = tuple(Bins.of(name, bounds[name], 8) for name in bounds)
    codes = np.column_stack([bins[0].code(pd.Series(names[level])), bins[1].code(pd.Series(x))])
    others = [0, 1, 3]  # "high" is the reference
    coded = [ScoredColumn(f"g[T.{names[j]}]", "g", "A", 0, level=j, above=m) for m, j in enumerate(others, 1)]
    design = ScoredDesign(bins, (*coded, ScoredColumn("x", "x", "B", 1)), ("A", "B"))
    release = release_rows(design, "Binomial", Bins("y", (0, 1)), codes, y)
    fit = estimate(design, release, POINTS[:, :2])
    D = np.column_stack([np.ones(len(x)), *(level == j for j in others), x]).astype(float)
    known = sm.GLM(y, D, family=sm.families.Binomial()).fit()
    assert np.abs((fit.root.params - known.params) / known.bse).max() < 1.0


def test_bounds_of_counts_that_go_far_cost_nothing():
    bins = Bins.of("y", Bounds({"y": (0, 1e6)})["y"], 10)
    p = np.zeros(bins.count)
    p[0] = 1.0
    response = ScoredResponse("Poisson", Margin(bins, p))
    assert response.mean(np.full(5_000, 0.5), 1.0).mean[0] == pytest.approx(0.0, abs=1e-6)


def test_a_cut_row_is_no_longer_than_its_radius(fitted):
    _, fit, _ = fitted
    for block, squared in zip(
        fit.distribution.design.blocks, fit.distribution.design.squared_radii, strict=True
    ):
        lengths = (fit.distribution.scores[:, block] ** 2).sum(axis=1)
        assert lengths.max() <= squared * (1.0 + 1e-12) and (lengths > 0.999 * squared).any()
