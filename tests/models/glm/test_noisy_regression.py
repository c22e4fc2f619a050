"""Regression under a privacy budget over rows: noiseless limit, sensitivity, charges, intervals."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from noisy_rows import (
    GRID,
    RARE,
    Coverage,
    bounds_of,
    coverage,
    data_of,
    draw,
    model_of,
    pooled_fit,
    read_coverage,
)
from scipy import optimize, stats
from scipy.special import expit

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import (
    ConvergenceWarning,
    DataWarning,
    DescriptionError,
    EstimationError,
    ModelError,
    PolicyError,
)
from fedstat.federation.disclosure.site import Site
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.tables.table import FrameTable
from fedstat.models.glm.noisy_fit import noisy_question
from fedstat.models.glm.noisy_newton import (
    CUT,
    FAMILIES,
    KEPT_SHARE,
    KEPT_SQUARE,
    NoisyIteration,
    NoisyPoint,
    binary_family,
    bounded_sums,
    cut_square,
    enough_rows,
    huber_moments,
    plan_steps,
    unpack_information,
    variance_share,
    whole_radius,
)
from fedstat.models.glm.noisy_steps import NoisySumsRequest, coded_rows
from fedstat.privacy.gaussian_dp import mu_interval
from fedstat.privacy.zcdp import epsilon_of_zcdp, rho_of_budget

NOISELESS = 1e15
BUDGET = fs.Policy(privacy=fs.Budget(5.0, 1e-6, colluding=1))
SLICE, SLICE_RUNS = [case for case in GRID if case[2] <= 10_000][::12], 100


def weighted_root(family, X, y, A, radius, start, scale, typical, largest):
    """Solve the weighted estimating equations by an independent optimizer."""

    def score(free):
        beta, s = (free[:-1], math.exp(free[-1])) if family == "Gaussian" else (free, scale)
        eta, Z = X @ beta, X @ A
        if family == "Poisson":
            mu = np.exp(eta)
            k = np.arange(0, 400)
            p = stats.poisson.pmf(k[:, None], mu)
            kept = np.clip((k[:, None] - mu) / np.sqrt(mu), -CUT, CUT)
            psi, Z = (
                np.clip((y - mu) / np.sqrt(mu), -CUT, CUT) - (p * kept).sum(axis=0),
                np.sqrt(mu / typical)[:, None] * Z,
            )
        elif family == "Gaussian":
            psi = np.clip((y - eta) / s, -CUT, CUT)
        else:
            psi = y - expit(eta)
        squares = (Z**2).sum(axis=1)
        if family == "Binomial":
            squares *= np.maximum(1.0, expit(eta) * expit(-eta) / largest)
        w = np.minimum(1.0, radius / squares)
        g = (w * psi) @ Z / len(y)
        return np.append(g, w @ (psi**2 - KEPT_SQUARE) / len(y)) if family == "Gaussian" else g

    free = np.append(start, math.log(scale)) if family == "Gaussian" else start
    found = optimize.root(score, free, tol=1e-14, options={"xtol": 1e-14})
    assert np.abs(score(found.x)).max() < 1e-11
    return found.x[: len(start)]


@pytest.mark.parametrize(
    ("family", "sites", "intercept"),
    [
        ("Binomial", 1, 0.0),
        ("Binomial", 3, 0.0),
        ("Binomial", 3, -2.0),
        ("Gaussian", 3, 0.0),
        ("Poisson", 3, 0.0),
    ],
)
def test_the_noiseless_limit_is_the_weighted_estimator(family, sites, intercept):
    table, _ = draw(family, "skewed", 1_500, np.random.default_rng(4), intercept, q=3)
    bounds = bounds_of(family, "skewed", q=3)
    model = model_of(table, family, sites)
    fit = model.fit(epsilon=NOISELESS, bounds=bounds)
    X, y = data_of(table)
    question = noisy_question(model, NOISELESS, 1e-6, bounds)
    iteration, params, sampling, _ = pooled_fit(question, X, y)
    np.testing.assert_allclose(fit.params, params, rtol=0, atol=2e-8)
    np.testing.assert_allclose(fit.cov_params(), sampling, rtol=1e-5, atol=1e-9)
    root = weighted_root(
        family,
        X,
        y,
        iteration.transform,
        question.plan.squared_radius,
        params,
        iteration.scale,
        iteration.scale,
        iteration.scale,
    )
    # The sites' noise has a deviation of one unit of the sums at least, which is 5e-9 in a coefficient.
    np.testing.assert_allclose(params, root, rtol=0, atol=1e-8 if family == "Binomial" else 1e-6)
    assert fit.converged and fit.price == pytest.approx(1.0, abs=1e-6)


def test_at_epsilon_a_million_only_little_noise_is_left():
    table, _ = draw("Binomial", "normal", 2_000, np.random.default_rng(1), q=2)
    model, bounds = model_of(table, "Binomial"), bounds_of("Binomial", "normal", q=2)
    fit, exact = (model.fit(epsilon=epsilon, bounds=bounds) for epsilon in (1e6, NOISELESS))
    assert np.abs(fit.params - exact.params).max() < 1e-4 < fit.bse.min()


@pytest.mark.parametrize("mu", [0.03, 0.7, 4.0, 37.5])
def test_moments_of_cut_counts(mu):
    k = np.arange(0, 400)
    p, r = stats.poisson.pmf(k, mu), (k - mu) / math.sqrt(mu)
    mean, slope = huber_moments(np.array([mu]))
    psi = np.clip(r, -CUT, CUT)
    np.testing.assert_allclose([mean[0], slope[0]], [p @ psi, p @ (psi * r)], rtol=0, atol=1e-12)
    assert abs(mean[0]) <= FAMILIES["Poisson"].psi - CUT and 0.0 <= slope[0] <= 1.0


@pytest.mark.parametrize(("mean", "spread"), [(0.2, 0.0), (-1.0, 0.7), (2.0, 1.0)])
def test_the_variance_of_cut_counts_over_their_information(mean, spread):
    t = np.linspace(-5.0, 5.0, 501)
    mu, weights, k = np.exp(mean + spread * t), stats.norm.pdf(t), np.arange(1_500)[:, None]
    p, psi = stats.poisson.pmf(k, mu), np.clip((k - mu) / np.sqrt(mu), -CUT, CUT)
    variance = (p * psi**2).sum(axis=0) - (p * psi).sum(axis=0) ** 2
    slope = (p * psi * (k - mu) / np.sqrt(mu)).sum(axis=0)
    found = variance_share(mean, spread)
    # Both moments jump where a count is cut, which 40 points of the quadrature smooth.
    assert found == pytest.approx(weights @ (mu * variance) / (weights @ (mu * slope)), abs=3e-3)
    assert 0.9 < found < 1.0


def test_constants_of_a_cut_normal_variable():
    for sd in (0.3, 1.0, 2.5):
        inside = stats.norm.expect(lambda r: r**2, scale=sd, lb=-CUT, ub=CUT)
        assert cut_square(sd) == pytest.approx(inside + CUT**2 * 2 * stats.norm.sf(CUT / sd), abs=1e-12)
    assert cut_square(1.0) == KEPT_SQUARE
    assert pytest.approx(stats.norm.cdf(CUT) - stats.norm.cdf(-CUT), abs=1e-14) == KEPT_SHARE


# -- sensitivity -----------------------------------------------------------------------------------


def point_of(family, stage, p, rng, radius=6.0):
    transform = np.linalg.qr(rng.normal(size=(p, p)))[0] * rng.uniform(0.2, 3.0, p)
    return NoisyPoint(family, stage, transform, rng.normal(size=p), rng.uniform(0.2, 3.0), radius, 0.5, 0.5)


@pytest.mark.parametrize("stage", ["means", "products", "start", "step"])
@pytest.mark.parametrize("family", ["Binomial", "Gaussian", "Poisson"])
def test_no_row_moves_a_sum_by_more_than_is_charged_and_some_by_as_much(family, stage):
    """The largest change by one row added or removed, over that which is charged, for rows of any size."""
    rng, places, largest = np.random.default_rng(3), 16, np.zeros(2)
    for _ in range(12):
        point = point_of(family, stage, 3, rng)
        X = np.column_stack([np.ones(200), rng.normal(size=(200, 2)) * 10.0 ** rng.uniform(-2, 4, (200, 1))])
        high = {"Binomial": 1.0, "Gaussian": 50.0, "Poisson": 90.0}[family]
        y = np.where(rng.random(200) < 0.7, high * (rng.random(200) < 0.5), np.abs(rng.normal(size=200)))
        y = np.clip(np.rint(y) if family == "Poisson" else y, 0.0, high)
        charged = [whole_radius(one, places) for one in (point.score_radius, point.information_radius)]
        for i in range(len(X)):
            moved = bounded_sums(point, X[i : i + 1], y[i : i + 1], places)
            ratios = [
                int((part.astype(object) ** 2).sum()) / bound
                for part, bound in zip(moved, charged, strict=True)
            ]
            largest = np.maximum(largest, ratios)
    assert (largest <= 1.0).all()
    # Reached, except for counts, whose bound adds two terms that no row has at once.
    assert (largest > (0.7 if family == "Poisson" or (family, stage) == ("Gaussian", "step") else 0.9)).all()


def test_a_longer_row_would_move_the_information_without_the_square_in_its_weight():
    """With w = min(1, R / |z|) a row has w |z|^2 = R |z|, which no R bounds."""
    rng = np.random.default_rng(0)
    point = point_of("Binomial", "step", 3, rng)
    X = np.array([[1.0, 400.0, -300.0]])
    z = X @ point.transform
    assert (
        min(1.0, math.sqrt(point.squared_radius) / np.linalg.norm(z)) * (z @ z.T).item()
        > 10 * point.squared_radius
    )
    score, information = bounded_sums(point, X, np.ones(1), 16)
    assert np.linalg.norm(unpack_information(information * 2.0**-16, 3)) <= point.squared_radius / 4
    assert np.linalg.norm(score * 2.0**-16) <= math.sqrt(point.squared_radius)


def data_and_request(frame, bounds, family="binomial", formula="y ~ a + C(g)"):
    """Make a site's data with any frame, and the request of a step."""
    clean = pd.DataFrame(
        {"a": np.linspace(-2, 2, 80), "g": ["u", "v"] * 40, "y": [0, 1, 1, 0] * 20, "site": "A"}
    )
    partition = fs.ClientPartition.from_frame(
        pd.concat([clean, clean.assign(site="B")]), by="site", policy=BUDGET
    )
    model = fs.FederatedGLM.from_formula(formula, partition, family=family)
    question = noisy_question(model, 100.0, 1e-6, bounds)
    iteration = NoisyIteration.begin(question.family, question.plan, question.base, question.response)
    p, n = len(iteration.beta), float(question.n)
    iteration.take(
        n * np.append(iteration.ones / (iteration.ones @ iteration.ones), 0.0), np.zeros(0), (0.0, 0.0)
    )
    first, second = np.triu_indices(p)
    iteration.take(np.zeros(0), np.where(first == second, n, 0.0), (0.0, 0.0))
    iteration.take(np.zeros(p), np.zeros(0), (0.0, 0.0))
    request = question.request(iteration, question.plan.rhos[3], Fraction(0), None)
    return replace(partition.sites["A"].data, table=FrameTable(frame)), request


MESSY = {
    "a": [0.5, "text", math.inf, -math.inf, None, 1e308, -3.0, "1.5"],
    "g": ["u", "v", None, "unlisted", "u", "v", 7, "u"],
    "y": [1, 0, 1, "yes", None, 2.5, -1, "1"],
}


def sums_of(data, request):
    """Exact sums of a site, and the number of rows behind them."""
    parts = [*coded_rows(data, request)]
    X, y = np.vstack([X for X, _ in parts]), np.concatenate([y for _, y in parts])
    return bounded_sums(request.point, X, y, request.places), len(y)


def test_a_row_with_any_content_moves_a_reply_by_no_more_than_is_charged():
    rng, n, reported = np.random.default_rng(2), 60, []
    values = rng.normal(size=n), rng.choice(["u", "v"], n), rng.integers(0, 2, n)
    frame = pd.DataFrame(dict(zip("agy", values, strict=True))).astype(object)
    bounds = {"a": (-3.0, 3.0), "g": ["u", "v"], "y": (0.0, 1.0)}
    none, request = data_and_request(frame, bounds)
    without = sums_of(none, request)[0]
    for k in range(len(MESSY["a"])):
        for place in range(3):
            row = {name: one[(k + place * j) % len(one)] for j, (name, one) in enumerate(MESSY.items())}
            data, same = data_and_request(pd.concat([frame, pd.DataFrame([row], dtype=object)]), bounds)
            assert request == same
            found, rows = sums_of(data, request)
            for a, b, squared in zip(found, without, request.squared, strict=True):
                assert ((a - b).astype(object) ** 2).sum() <= squared
            reported.append(rows)
    assert {n, n + 1} == set(reported)


# -- charges ---------------------------------------------------------------------------------------


def small(seed=0, n=3_000, **policy):
    table, _ = draw("Binomial", "normal", n, np.random.default_rng(seed), q=2)
    return table, model_of(table, "Binomial", policy=fs.Policy(privacy=BUDGET.privacy, **policy))


BOUNDS = bounds_of("Binomial", "normal", q=2)


def test_the_epsilon_that_is_printed_is_that_of_the_charges_and_a_repeat_is_free():
    _, model = small(exact="none")
    fit = model.fit(epsilon=1.0, bounds=BOUNDS)
    for site in model.partition.sites.values():
        spent = site.site_ledger.charges.spent
        assert fit.epsilon == epsilon_of_zcdp(spent, 1e-6) and 0.999 < fit.epsilon <= 1.0
    assert f"epsilon {fit.epsilon:.4g}" in fit.summary().as_text()
    repeated = fs.FederatedGLM.from_formula(model.formula.text, model.partition, family="binomial").fit(
        epsilon=1.0, bounds=BOUNDS
    )
    np.testing.assert_array_equal(repeated.params, fit.params)
    assert model.partition.sites["A"].site_ledger.charges.spent == spent
    other = model.fit(epsilon=1.01, bounds=BOUNDS)
    assert (other.params != fit.params).all()
    assert model.partition.sites["A"].site_ledger.charges.spent > 2 * spent


def test_several_studies_share_one_budget_until_it_is_spent():
    _, model = small()
    for epsilon in (1.0, 2.0, 3.0):
        model.fit(epsilon=epsilon, bounds=BOUNDS)
    left = {name: site.privacy.left for name, site in model.partition.sites.items()}
    with pytest.raises(DescriptionError, match=r"this analysis costs .* Reduce the request, or repeat"):
        model.fit(epsilon=4.0, bounds=BOUNDS)
    assert left == {name: site.privacy.left for name, site in model.partition.sites.items()}


def test_what_no_budget_allows_is_refused_before_a_request():
    table, model = small()
    with pytest.raises(
        DescriptionError, match=r"this one costs 6\. Use a smaller epsilon; no request was sent"
    ):
        model.fit(epsilon=6.0, bounds=BOUNDS)
    without = model_of(table, "Binomial", policy=fs.Policy())
    with pytest.raises(DescriptionError, match=r"is none, and releases with noise are charged"):
        without.fit(epsilon=1.0, bounds=BOUNDS)
    with pytest.raises(PolicyError, match=r"releases sums over rows only with noise, .*epsilon="):
        model.fit()
    assert not any(site.site_ledger.charges.made for site in model.partition.sites.values())


@pytest.mark.parametrize("epsilon", [0.3, 1.0])
def test_too_few_rows_are_refused_before_a_charge_with_a_number_that_would_do(epsilon):
    _, model = small(n=150)
    with pytest.raises(
        EstimationError, match=r"150 records are too few .* about [\d,]+ records would do"
    ) as caught:
        model.fit(epsilon=epsilon, bounds=BOUNDS)
    assert not any(site.site_ledger.charges.made for site in model.partition.sites.values())
    least = int(str(caught.value).split("about ")[1].split(" records")[0].replace(",", ""))
    rho, noise = rho_of_budget(epsilon, 1e-6), Fraction(3, 2)
    assert math.isfinite(plan_steps("Binomial", 3, least, rho, noise).price)
    assert not math.isfinite(plan_steps("Binomial", 3, int(0.9 * least), rho, noise).price)
    assert least == enough_rows(150, lambda n: plan_steps("Binomial", 3, n, rho, noise))


def test_a_plan_spends_its_budget_and_no_more():
    for family in FAMILIES:
        for n, K in ((3_000, 1), (50_000, 3)):
            rho = rho_of_budget(1.0, 1e-6)
            plan = plan_steps(family, 5, n, rho, Fraction(K))
            assert sum(a + b for a, b in plan.rhos) == rho and plan.rhos[0][1] == plan.rhos[1][0] == 0
            more = plan_steps(family, 5, 4 * n, rho, Fraction(K))
            assert 1.0 < more.price < plan.price < 3.0


def test_explain_states_the_price_before_anything_is_charged():
    _, model = small()
    text = str(model.explain(epsilon=1.0, bounds=BOUNDS))
    assert "Expected price: epsilon 1 makes standard errors about" in " ".join(text.split())
    assert not any(site.site_ledger.charges.made for site in model.partition.sites.values())
    assert model.explain(epsilon=1.0, bounds=BOUNDS).passes


@pytest.mark.parametrize(
    ("formula", "arguments", "text"),
    [
        ("y ~ x1", {"cov_type": "HC0"}, "does not take cov_type"),
        ("y ~ x1", {"delta": 0.1}, "delta: expected"),
        ("y ~ x1", {"epsilon": -1.0}, "epsilon: expected"),
        ("y ~ x1 - 1", {}, "without intercept"),
        ("y ~ scale(x1)", {}, "whose state follows from the data"),
        ("y ~ x1 + x2", {"bounds": {"y": [0, 1], "x1": (-5, 5)}}, "1 of 3 columns have none"),
        ("y ~ log(x1)", {}, "within the public ranges, .*logarithm of zero"),
        ("y ~ x1 + I(2 * x1)", {}, "collinear"),
    ],
)
def test_arguments_that_have_no_meaning_are_refused(formula, arguments, text):
    _, model = small()
    model = fs.FederatedGLM.from_formula(formula, model.partition, family="binomial")
    with pytest.raises(ModelError, match=text):
        model.fit(**{"epsilon": 1.0, "bounds": BOUNDS} | arguments)


def test_a_subset_is_fitted_and_refused_for_no_reason_that_depends_on_rows():
    table, _ = draw("Binomial", "normal", 3_000, np.random.default_rng(0), q=2)
    policy = fs.Policy.strict(privacy=BUDGET.privacy, exact="none", formulas="any")
    partition = model_of(table, "Binomial", policy=policy).partition
    for cut in (0.0, 4.9):  # many rows and about none are above
        model = fs.GLORE.from_formula("y ~ x1", partition, subset=f"x2 <= {cut}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert np.isfinite(model.fit(epsilon=2.0, bounds=BOUNDS).params).all()


def test_rows_of_a_person_and_weights_are_refused():
    _, model = small()
    partition = model.partition
    for more, text in ({"labels": ["x2"]}, "all rows of a person"), ({"freq_weights": "x2"}, "weights"):
        one = fs.FederatedGLM.from_formula("y ~ x1", partition, family="binomial", **more)
        with pytest.raises(ModelError, match=text):
            one.fit(epsilon=1.0, bounds=BOUNDS)
    with pytest.raises(ModelError, match="epsilon is missing"):
        model.fit(bounds=BOUNDS)


def test_bounds_that_do_not_suit_are_announced_from_what_is_released():
    _, model = small(n=12_000)
    with pytest.warns(DataWarning, match=r"'x1' has mean .* probably cut to the ends"):
        model.fit(epsilon=1.0, bounds=BOUNDS | {"x1": (-0.4, 0.4)})
    with pytest.warns(DataWarning, match=r"'x2' has standard deviation .* A narrower range"):
        model.fit(epsilon=4.0, bounds=BOUNDS | {"x2": (-25.0, 25.0)})
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        model.fit(epsilon=0.5, bounds=BOUNDS)


def test_bounds_are_by_default_what_owners_publish():
    table, _ = draw("Poisson", "normal", 3_000, np.random.default_rng(0), q=1)
    held = table.assign(site=np.repeat(["A", "B"], 1_500))
    published = {
        name: {"y": {"kind": "number", "range": [0.0, 30.0]}, "x1": {"kind": "number", "range": [low, 5.0]}}
        for name, low in (("A", -5.0), ("B", -4.0))
    }
    partition = fs.ClientPartition.from_frame(held, by="site", policy=BUDGET, published=published)
    model = fs.FederatedGLM.from_formula("y ~ x1 + C(site)", partition, family="poisson")
    fit = model.fit(epsilon=2.0)
    stated = model.fit(epsilon=2.0, bounds={"y": (0.0, 30.0), "x1": (-5.0, 5.0)})
    np.testing.assert_array_equal(fit.params, stated.params)
    assert fit.params.index.tolist() == ["Intercept", "x1", "C(site)[T.B]"]
    assert abs(fit.params["x1"] - 0.35) < 0.1 and len(fit.predict(table.assign(site="A").head(3))) == 3


def test_ols_and_glore_fit_with_noise_as_well(tmp_path):
    table, beta = draw("Gaussian", "normal", 6_000, np.random.default_rng(5), q=2)
    partition = model_of(table, "Gaussian", policy=BUDGET).partition
    fit = fs.FederatedOLS.from_formula("y ~ x1 + x2", partition).fit(
        epsilon=2.0, bounds=bounds_of("Gaussian", "normal", q=2)
    )
    assert (np.abs(fit.params - beta[:3]) < 5 * fit.bse).all() and abs(math.sqrt(fit.scale) - 1.5) < 0.15
    np.testing.assert_allclose((fit.bse_parts**2).sum(axis=1), fit.bse**2)
    fit.save(tmp_path / "fit")
    assert fs.load(tmp_path / "fit").price == fit.price
    binary = table.assign(y=(table["y"] > 0) * 1)
    glore = fs.GLORE.from_formula("y > 0 ~ x1", model_of(binary, "Binomial", policy=BUDGET).partition)
    result = glore.fit(epsilon=2.0, bounds={"y": [0, 1], "x1": (-5, 5)})
    assert result.model_name == "Private Binomial regression" and result.params["x1"] > 0.0


def test_what_noise_leaves_unclear_is_not_called_converged(monkeypatch):
    table, _ = draw("Gaussian", "skewed", 2_000, np.random.default_rng(8))
    question = noisy_question(
        model_of(table, "Gaussian", sites=1), 1.0, 1e-6, bounds_of("Gaussian", "skewed")
    )
    run = pooled_fit(question, *data_of(table), np.random.default_rng(0), 16)[0]
    assert run.converged
    run.moved = run.moved * 60.0
    assert not run.converged
    _, model = small()
    monkeypatch.setattr(NoisyIteration, "converged", False)
    with pytest.warns(ConvergenceWarning, match="the noise is too large for this model"):
        fit = model.fit(epsilon=1.0, bounds=BOUNDS)
    assert not fit.converged and "noise is too large" in " ".join(fit.summary().as_text().split())


@pytest.mark.parametrize("off", [0.2, 0.5, 3.0])
def test_a_wrong_spread_of_residuals_is_found_within_three_steps(off):
    table, _ = draw("Gaussian", "normal", 3_000, np.random.default_rng(8))
    question = noisy_question(model_of(table, "Gaussian"), NOISELESS, 1e-6, bounds_of("Gaussian", "normal"))
    iteration = pooled_fit(question, *data_of(table))[0]
    right, iteration.scale = iteration.scale, off * iteration.scale
    changes = []
    for _ in range(3):
        sums = [part.sum(axis=0) for part in iteration.point.rows(*data_of(table))]
        iteration.take(*sums, (0.0, 0.0))
        changes.append(iteration.converged)
    assert iteration.scale == pytest.approx(right, rel=0.02)
    # After the first step from a spread that is too small, residuals have been cut: this is not converged.
    assert changes == [off > 0.6, True, True]


def test_noise_on_the_start_does_not_lose_the_spread_of_residuals():
    """The start is moved up by its noise; a start near zero would cut all residuals."""
    found = []
    table, _ = draw("Gaussian", "skewed", 2_000, np.random.default_rng(8))
    question = noisy_question(model_of(table, "Gaussian"), 1.0, 1e-6, bounds_of("Gaussian", "skewed"))
    for seed in range(30):
        iteration = pooled_fit(question, *data_of(table), np.random.default_rng(seed))[0]
        found += [iteration.scale] * iteration.converged
    assert len(found) >= 24 and min(found) > 1.2 and max(found) < 2.4


def test_requests_that_are_malformed_are_refused_without_a_charge():
    _, model = small()
    question = noisy_question(model, 1.0, 1e-6, BOUNDS)
    iteration = NoisyIteration.begin(question.family, question.plan, question.base, question.response)
    request = question.request(iteration, question.plan.rhos[0], Fraction(0), None)
    for wrong in (
        replace(request, beta=(0.0,)),
        replace(request, transform=((math.nan,) * 3,) * 3),
        replace(request, squared_radius=1e7),
        replace(request, bounds={}),
        replace(request, response=(1.0, 0.0)),
        replace(request, half=0.0),
    ):
        with pytest.raises(fs.errors.MessageError):
            NoisySumsRequest.check(wrong)


# -- what an attacker sees -------------------------------------------------------------------------


def test_the_best_test_of_a_row_shows_no_more_than_is_charged_and_nearly_as_much():
    """An attacker knows all other rows and guesses one from the replies of sites with keys of their own."""
    rng, trials = np.random.default_rng(11), 400
    values = np.linspace(-2, 2, 40), np.array(["u", "v"] * 20), np.array([0, 1, 1, 0] * 10)
    frame = pd.DataFrame(dict(zip("agy", values, strict=True)))
    bounds = {"a": (-3.0, 3.0), "g": ["u", "v"], "y": (0.0, 1.0)}
    data, request = data_and_request(frame, bounds)
    request = replace(request, variances=tuple(max(1, one // 4) for one in request.squared))
    # The row that moves both sums most, by what is charged.
    rows = pd.DataFrame(
        {"a": rng.uniform(-3, 3, 60), "g": rng.choice(["u", "v"], 60), "y": rng.integers(0, 2, 60)}
    )
    best, mu, moved = None, 0.0, ()
    for k in range(len(rows)):
        parts = sums_of(replace(data, table=FrameTable(rows.iloc[[k]])), request)[0]
        found = math.sqrt(
            sum((part.astype(float) ** 2).sum() / v for part, v in zip(parts, request.variances, strict=True))
        )
        if found > mu:
            best, mu, moved = k, found, parts
    with_row = pd.concat([frame, rows.iloc[[best]]], ignore_index=True)
    base, policy = sums_of(data, request)[0], fs.Policy(privacy=fs.Budget(500.0, 1e-6))
    packed, hits = pack_request(Request("A", "glm", "sum_noisy_scores", {}, "s", to_json(request))), 0
    for truth in rng.integers(0, 2, trials):
        site = Site("A", with_row if truth else frame, policy)
        reply = unpack_reply(site.answer(packed)).arrays
        score = sum(
            float((reply[name] - exact).astype(float) @ part.astype(float)) / v
            for name, exact, part, v in zip(
                ("score", "information"), base, moved, request.variances, strict=True
            )
        )
        hits += (score > mu**2 / 2) == bool(truth)
    charged = site.site_ledger.charges.spent
    low, high = mu_interval(hits, trials, 1e-4)
    assert low <= math.sqrt(2 * charged) and high > 0.5 * math.sqrt(2 * charged)
    assert epsilon_of_zcdp(low**2 / 2, 1e-6) <= epsilon_of_zcdp(charged, 1e-6)


# -- rare outcomes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "spread"), [(0.05, 0.0), (0.05, 0.8), (0.3, 1.5), (0.5, 0.5)])
def test_a_share_and_a_spread_describe_binary_outcomes_of_normal_columns(share, spread):
    family, (first, second, skew), middle = binary_family(share, spread)
    grid = np.linspace(-9.0, 9.0, 20_001)
    mu, weights = expit(middle + spread * grid), stats.norm.pdf(grid) * (grid[1] - grid[0])
    assert weights @ mu == pytest.approx(share, rel=1e-9)
    kappa = weights * mu * (1.0 - mu)
    # Stein: the covariance of y with a standardized column is E kappa times its coefficient.
    assert weights @ (mu * grid) == pytest.approx(spread * family.usual, abs=1e-6)
    found = np.array([kappa @ grid, kappa @ grid**2, kappa @ (1.0 - 2.0 * mu)]) / kappa.sum()
    np.testing.assert_allclose([first, second, skew], found, rtol=0, atol=1e-5)
    assert family.kappa == min(0.25, 2.0 * family.usual)


def test_a_fit_whose_outcome_is_too_rare_ends_as_early_as_its_sums_show_it():
    table, _ = draw("Binomial", "normal", 2_000, np.random.default_rng(3), intercept=-3.5)
    model, bounds = model_of(table, "Binomial", policy=BUDGET), bounds_of("Binomial", "normal")
    notes = " ".join(str(model.explain(epsilon=1.0, bounds=bounds)).split())
    assert "If only 5% of the responses are ones, these are too few records." in notes
    assert "If the first one, epsilon 0.15, shows that too few records have the rarer response" in notes
    text = (
        r"about [\d.]+% of the records, or fewer, .* 2,000 are too few for 7 .* at least [\d,]+ are needed\. "
        r"The fit ended after the first round of noisy sums\. Epsilon 0\.15 is charged, and the other 97% of "
        r"the charge of this fit, as rho, is not\. It costs 0\.16% of the budget of A, B and C, epsilon 5\. "
        "A repetition is free"
    )
    with pytest.raises(EstimationError, match=text):
        model.fit(epsilon=1.0, bounds=bounds)
    spent = [site.privacy.epsilon_spent for site in model.partition.sites.values()]
    assert len(set(spent)) == 1 and abs(spent[0] - 0.155) < 0.001
    with pytest.raises(EstimationError, match=text):
        model.fit(epsilon=1.0, bounds=bounds)
    assert spent[0] == model.partition.sites["A"].privacy.epsilon_spent


def test_an_outcome_that_may_have_enough_ones_is_not_refused_by_the_first_sums():
    """A share of ones is refused first only if two deviations of its noise more would be too rare as well."""
    question = noisy_question(
        model_of(draw("Binomial", "normal", 2_000, np.random.default_rng(0))[0], "Binomial"),
        1.0,
        1e-6,
        bounds_of("Binomial", "normal"),
    )
    for share, ends in ((0.05, True), (0.3, False), (0.95, True), (0.7, False)):
        iteration = NoisyIteration.begin("Binomial", question.plan, question.base, question.response)
        ones = iteration.ones
        score = np.append(2_000 * ones / (ones @ ones), 2_000 * (2 * share - 1) * iteration.point.spread_unit)
        iteration.take(score, np.zeros(0), (30.0 * iteration.point.spread_unit, 0.0))
        assert iteration.ended is ends, share


def test_rows_that_are_less_rare_than_others_do_not_exceed_the_bound_of_the_information():
    rng = np.random.default_rng(4)
    point = replace(point_of("Binomial", "step", 3, rng), scale=0.06)
    X = np.column_stack([np.ones(500), rng.normal(size=(500, 2)) * 3.0])
    score, information = point.rows(X, rng.integers(0, 2, 500) * 1.0)
    lengths = np.linalg.norm(information, axis=1)
    assert (
        lengths.max() <= 0.06 * point.squared_radius * (1.0 + 1e-12) == pytest.approx(lengths.max(), rel=1e-3)
    )
    assert math.sqrt(point.information_radius) == pytest.approx(0.06 * point.squared_radius)
    assert np.linalg.norm(score, axis=1).max() <= math.sqrt(point.squared_radius)


# -- intervals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Binomial", "Gaussian", "Poisson"])
def test_intervals_cover_in_a_small_simulation(family):
    found = coverage(family, "normal", 4_000, 1.0, 3, 40, 1)
    assert 0.90 <= found.mean <= 0.99 and 1.0 < found.price < 2.0 and found.failed <= 0.1


def test_intervals_cover_for_a_rare_outcome():
    found = coverage("Binomial", "normal", 5_000, 1.0, 3, 40, 1, intercept=RARE)
    assert 0.90 <= found.mean <= 0.99 and 1.5 < found.price < 2.7 and found.failed <= 0.2
    assert abs(found.price / found.expected - 1.0) < 0.25


def check_coverage(case, found, runs):
    """Coverage of the fits that are not refused; refusals are for small n and epsilon, or rare outcomes."""
    *_, n, epsilon, _, intercept = case
    if found is None:
        assert n * epsilon <= (10_000 if intercept else 4_000), case
        return
    slack = 3.0 * math.sqrt(0.05 * 0.95 / (runs * 7))
    assert 0.93 - slack <= found.mean <= 0.97 + slack, case
    assert found.worst >= 0.90 - 2.0 * math.sqrt(0.1 * 0.9 / runs) and found.failed <= 0.15, case


@pytest.mark.parametrize(("kind", "intercept", "ends"), [("skewed", 0.0, False), ("normal", RARE, True)])
def test_rows_that_are_cut_before_means_are_known_do_not_end_a_fit(kind, intercept, ends):
    """Two thirds of the rows of skewed columns are, in the first sums; a rare outcome ends a fit there."""
    rng = np.random.default_rng([7, 0])
    table, _ = draw("Binomial", kind, 2_000, rng, intercept)
    policy = fs.Policy(privacy=fs.Budget(50.0, 1e-6, colluding=1))
    bounds, epsilon = bounds_of("Binomial", kind), 1.0 if ends else 3.0
    question = noisy_question(model_of(table, "Binomial", 3, policy), epsilon, 1e-6, bounds)
    iteration, params, *_ = pooled_fit(question, *data_of(table), rng)
    assert (params is None) == ends
    assert (iteration.step == 1) == ends


def test_intervals_cover_in_the_table_of_all_settings():
    """``python tests/models/glm/noisy_rows.py`` writes the table, which the vignette shows."""
    table = read_coverage()
    assert set(table.index) == set(GRID) and len(table) == len(GRID)
    for case, row in table.iterrows():
        refused = math.isnan(row["mean"])
        found = None if refused else Coverage(**row.drop("runs"))
        check_coverage(case, found, row["runs"])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLICE)
def test_intervals_cover_in_a_slice_of_the_settings(case):
    """New draws of a few settings of the table, in about two minutes."""
    try:
        found = coverage(*case[:5], SLICE_RUNS, 8, case[5])
    except EstimationError:
        found = None
    check_coverage(case, found, SLICE_RUNS)
