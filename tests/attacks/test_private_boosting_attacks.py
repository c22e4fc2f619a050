"""Was a known person behind a release of boosting, what is one person's curve? Exact, noisy, published."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm, rankdata

import fedstat as fs
from fedstat.models.boost.explain import tracing_auc
from fedstat.models.boost.private.published import published_boosting
from fedstat.models.boost.private.steps import cut_scores
from fedstat.models.copula.request import PLACES
from fedstat.privacy.gaussian_dp import largest_auc, mu_of

pytestmark = pytest.mark.filterwarnings("ignore")
POINTS = np.linspace(0, 1, 40)
WAVES = np.array([np.ones(40), *(np.sqrt(2) * np.cos(j * np.pi * POINTS) for j in range(1, 6))])
HELD = {"A": ["x1", "x2"], "B": ["x3"], "C": ["y"]}
NAMES = ("x1", "x2", "x3", "y")


def population(n, random):
    """Curves of six standard normal scores each, which is what a public description says of them."""
    curves = {name: random.normal(size=(n, 6)) @ WAVES for name in NAMES}
    wide = [pd.DataFrame(values).rename(columns=lambda j, c=c: f"{c}_{j}") for c, values in curves.items()]
    return pd.concat(wide, axis=1)


def partition(frame, **options):
    curves = {name: fs.Curve(f"{name}_*", domain=(0, 1)) for name in NAMES}
    return fs.ClientPartition.from_frame(frame, columns=HELD, curves=curves, **options)


def auc(inside, outside):
    """Area under the curve, and its standard error (Hanley and McNeil 1982, at the null)."""
    m, k = len(inside), len(outside)
    area = (rankdata(np.concatenate([inside, outside]))[:m].sum() - m * (m + 1) / 2) / (m * k)
    return area, np.sqrt((m + k + 1) / (12.0 * m * k))


def traced(gram, n, inside, outside, reference):
    """Likelihood ratio of a record's columns, (m, K), being among those of a Gram or not."""
    sigma = reference.T @ reference / len(reference)
    W = np.linalg.inv(sigma)
    M = W @ (gram / n - sigma) @ W
    return auc(*(np.einsum("ij,jk,ik->i", u, M, u) for u in (inside, outside)))


def spline_columns(frame, result):
    """Columns of an exact fit, computed by an attacker who knows the curves."""
    from fedstat.kernels.curves import integration_weights, spline_basis

    boosting = result._record.boosting
    basis = integration_weights(POINTS)[:, None] * spline_basis(POINTS, 0, 1, 2)
    Z = [frame.filter(regex=f"^{name}_").to_numpy() @ basis for name in NAMES[:3]]
    return np.column_stack([np.ones(len(frame)), *Z, frame.filter(regex="^y_").to_numpy() @ boosting.basis])


@pytest.mark.parametrize("n", [300, 1200])
def test_exact_sums_over_sites_trace_as_the_dry_run_says_and_no_better(n):
    random = np.random.default_rng(n)
    inside, outside, reference = (population(m, random) for m in (n, 1500, 20000))
    text = " + ".join(f"bsignal({name}, knots=2)" for name in NAMES[:3])
    model = fs.FedFunctionBoost.from_formula(
        f"y(t) ~ {text}", partition(inside), time="bbs(t, knots=2, df=4)"
    )
    reported = tracing_auc(model.source._n_columns, n)
    assert f"AUC about {reported:.2f}" in " ".join(str(model.explain()).split())
    result = model.fit(steps=1)
    total = result._record.boosting.moments.total
    gram = np.block([[total.S, total.T], [total.T.T, total.Q]])
    found, se = traced(gram, n, *(spline_columns(frame, result) for frame in (inside, outside, reference)))
    assert found <= reported + 3 * se
    assert found > reported - 0.1 and found > 0.5 + 5 * se


def private_model(frame, epsilon):
    policy = fs.Policy(privacy=fs.Budget(epsilon=50.0, delta=1e-6))
    curve = fs.PublicCurve(POINTS, np.zeros(40), WAVES, np.ones(6))
    return fs.FedFunctionBoost.from_formula(
        "y(t) ~ x1 + x2 + x3",
        partition(frame, policy=policy),
        epsilon=epsilon,
        public=dict.fromkeys(NAMES, curve),
    )


def cut_columns(model, frame):
    """Columns of a private fit, computed by somebody who knows the curves: scores clipped as at the sites."""
    plan, own = model.source._planned, partition(frame)
    parts = []
    for site, held in plan.parts.items():
        columns = own.sites[site]._data.frame
        scores = np.hstack([part.scores(columns[part.name]) for part in held])
        parts.append(np.ldexp(cut_scores(plan.gram_requested(site, 1), scores).astype(float), -PLACES))
    u = np.hstack(parts) * np.where(plan.is_response(), 1.0 / plan.weight, 1.0)
    return np.column_stack([np.ones(len(u)), u])


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 10.0])
def test_noisy_sums_trace_no_better_than_the_budget_allows(epsilon):
    random = np.random.default_rng(5)
    n = 400
    inside, outside, reference = (population(m, random) for m in (n, 1500, 10000))
    model = private_model(inside, epsilon)
    result = model.fit(steps=1)
    bound = largest_auc(float(model.source._planned.coordinator_cost()))
    assert f"AUC at most {bound:.2f}" in " ".join(str(result.summary()).split())
    columns = [cut_columns(model, frame) for frame in (inside, outside, reference)]
    found, se = traced(model.source._released[0].products, n, *columns)
    assert found <= bound + 3 * se
    exact, _ = traced(columns[0].T @ columns[0], n, *columns)
    assert exact > 0.68 > 0.5 + 3 * se  # without the noise the same people are found
    assert found < exact


def canaries(n, Q, random):
    """Rows of maximal norm, of one sign or the other by a fair coin, and columns that know nothing of it."""
    signs = random.choice([-1.0, 1.0], size=n)
    return signs, signs[:, None] * np.ones((n, Q)), {"x": random.normal(size=(n, 3))}


@pytest.mark.parametrize(("epsilon", "delta"), [(10.0, 0.05), (5.0, 0.05)])
def test_the_published_mechanism_separates_canaries_better_than_its_claim_allows(epsilon, delta):
    random = np.random.default_rng(1)
    signs, Y, X = canaries(600, 10, random)
    claimed = float(norm.cdf(mu_of(epsilon, delta) / np.sqrt(2.0)))
    areas = {}
    for steps in (1, 10):
        found = published_boosting(X, Y, epsilon=epsilon, delta=delta, steps=steps, seed=random)
        reported = found.seen.sum(axis=1)
        areas[steps], _ = auc(reported[signs > 0], reported[signs < 0])
        assert found.true_epsilon > epsilon and found.worst_epsilon > found.true_epsilon
        assert f"{found.true_epsilon:,.0f}" in found.summary()
    assert areas[10] > claimed and areas[10] > 0.999


def test_the_same_canaries_are_not_distinguished_by_the_noisy_products():
    """Of all rows but one everything is known: has it a curve as long as can be, or less that?"""
    random, n = np.random.default_rng(2), 60
    frames = [population(n, random)]
    frames.append(frames[0].copy())
    long = 10.0 * np.sum(WAVES, axis=0)
    for name in NAMES:
        wide = [f"{name}_{j}" for j in range(40)]
        for frame, sign in zip(frames, (1.0, -1.0), strict=True):
            frame.loc[0, wide] = sign * long if name == "y" else long
    models = [private_model(frame, 3.0) for frame in frames]
    plan = models[0].source._planned
    exact = [
        u.T @ u for u in (cut_columns(model, frame) for model, frame in zip(models, frames, strict=True))
    ]
    weight = np.append(1.0, np.where(plan.is_response(), plan.weight, 1.0))
    widths = [plan.width(site) for site in plan.parts]
    owner = np.append(-1, np.repeat(np.arange(len(widths)), widths))
    alone = (owner[:, None] == owner) | (owner < 0)[:, None] | (owner < 0)
    deviation = plan.deviation * np.where(alone, 1.0, np.sqrt(2.0)) / np.outer(weight, weight)
    direction = np.triu((exact[0] - exact[1]) / deviation**2)
    reported = []
    for k, model in enumerate(models):
        for _ in range(25):
            model.source._released = None
            for site in model.partition.sites.values():
                site.site_ledger.kept.clear()  # otherwise a repetition has the same noise
            reported.append((k, float((model_products(model) * direction).sum())))
    scores = [np.array([value for k, value in reported if k == which]) for which in (0, 1)]
    found, se = auc(*scores)
    assert found <= largest_auc(float(plan.coordinator_cost())) + 3 * se
    # As many standard deviations apart as the two tables are, no more.
    apart = np.sqrt((np.triu((exact[0] - exact[1]) / deviation) ** 2).sum())
    assert apart <= np.sqrt(2.0 * float(plan.coordinator_cost()))
    assert (scores[0].mean() - scores[1].mean()) / scores[0].std() < apart + 1.5


def model_products(model):
    model.fit(steps=1)
    return model.source._released[0].products
