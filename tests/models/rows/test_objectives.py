"""Every likelihood over rows: its sums are those of its terms, and derivatives of its log-likelihood."""

from functools import cache

import numpy as np
import pandas as pd
import pytest
import scipy.optimize
import statsmodels.api as sm
from numpy.testing import assert_allclose
from weibull import FederatedWeibull, WeibullRows

import fedstat as fs
from fedstat.errors import MessageError
from fedstat.federation.disclosure.facts import RowTerms
from fedstat.federation.disclosure.site import FAMILIES, load_families
from fedstat.federation.message import Request, pack_request
from fedstat.kernels.glm.effects import outer_products
from fedstat.models.aft.steps import SiteTimes
from fedstat.models.glm.steps import SiteModel
from fedstat.models.rows import steps
from fedstat.models.rows.objective import OBJECTIVES, standard_place

RNG = np.random.default_rng(4)
N = 240
TABLE = pd.DataFrame({"x": RNG.normal(size=N), "z": RNG.uniform(5.0, 9.0, N)})
TABLE["site"], TABLE["g"] = RNG.choice(["Bonn", "Kiel", "Ulm"], N), RNG.choice(["a", "b"], N)
TABLE["w"] = RNG.integers(1, 4, N)
TIMES = np.exp(1.0 + 0.4 * TABLE["x"] - 0.2 * TABLE["z"] + 0.6 * np.log(RNG.exponential(size=N)))
TABLE["died"] = (TIMES < 1.5).astype(int)
TABLE["t"] = np.ceil(np.minimum(TIMES, 1.5) * 20.0) / 20.0
TABLE["entry"] = np.where(TABLE["t"] > 0.4, 0.1 * (TABLE["g"] == "a"), 0.0)
TABLE["y"] = np.digitize(TABLE["x"] + RNG.logistic(size=N), [-1.0, 1.0])
# Clusters of rows in any order: a site sorts its own.
TABLE["id"], TABLE["visit"] = RNG.permutation(N) // 3, RNG.permutation(N)
PARTITION = fs.ClientPartition.from_frame(TABLE, by="site", policy=fs.Policy(min_level_count=1))
PROBIT = sm.families.Binomial(sm.families.links.Probit())
CASES = {
    "efron": lambda: fs.FederatedCox.from_formula("Surv(t, died) ~ x + z + strata(g)", PARTITION).fit(),
    "breslow": lambda: fs.FederatedCox.from_formula(
        "Surv(entry, t, died) ~ x + z", PARTITION, var_weights="w"
    ).fit(ties="breslow"),
    "ordinal": lambda: fs.FederatedOrdinal.from_formula("y ~ x + z", PARTITION, distr="cloglog").fit(),
    "multinomial": lambda: fs.FederatedMultinomial.from_formula("y ~ x", PARTITION, freq_weights="w").fit(),
    "logit": lambda: fs.FederatedGLM.from_formula("died ~ x + z", PARTITION, freq_weights="w").fit(),
    "probit": lambda: fs.FederatedGLM.from_formula("died ~ x + z", PARTITION, family=PROBIT).fit(),
    "gamma": lambda: fs.FederatedGLM.from_formula(
        "t ~ x + z", PARTITION, family=sm.families.Gamma(sm.families.links.Log()), var_weights="w"
    ).fit(),
    "normal": lambda: fs.FederatedGLM.from_formula("z ~ x", PARTITION, offset="t").fit(),
    "exchangeable": lambda: fs.FederatedGEE.from_formula(
        "died ~ x", PARTITION, groups="id", family=PROBIT
    ).fit(),
    "autoregressive": lambda: fs.FederatedGEE.from_formula(
        "z ~ x + died", PARTITION, groups="id", time="visit", cov_struct="ar1"
    ).fit(),
    "independent": lambda: fs.FederatedGEE.from_formula(
        "y ~ x", PARTITION, groups="id", cov_struct="independence", family=sm.families.Poisson()
    ).fit(),
    "exponential times": lambda: fs.FederatedAFT.from_formula(
        "Surv(t, died) ~ x + z", PARTITION, distribution="exponential"
    ).fit(),
    "weibull times": lambda: fs.FederatedAFT.from_formula("Surv(entry, t, died) ~ x + z", PARTITION).fit(),
    "lognormal times": lambda: fs.FederatedAFT.from_formula(
        "Surv(t, died) ~ x", PARTITION, distribution="lognormal", freq_weights="w", offset="z"
    ).fit(),
    "loglogistic times": lambda: fs.FederatedAFT.from_formula(
        "Surv(entry, t, died) ~ x + z", PARTITION, distribution="loglogistic", var_weights="w"
    ).fit(),
    "weighted treatment": lambda: fs.TreatmentEffect.from_formula(
        "y ~ x + z", PARTITION, treatment="g ~ x", family=sm.families.Poisson(), estimand="ATO"
    ).fit("aipw"),
    "weibull": lambda: FederatedWeibull.from_formula("Surv(t, died) ~ x + z", PARTITION).fit(),
}
FAMILY = {"efron": "cox", "breslow": "cox", "ordinal": "categories", "multinomial": "categories"}
FAMILY |= {name: "aft" for name in CASES if name.endswith("times")}
FAMILY["weighted treatment"] = "treatment"
FAMILY |= dict.fromkeys(("exchangeable", "autoregressive", "independent"), "gee")
FAMILY |= dict.fromkeys(("logit", "probit", "gamma", "normal"), "glm")


@pytest.fixture(scope="module", autouse=True)
def weibull():
    """Let sites answer the family of the example during these tests."""
    load_families()
    steps.enter_steps(WeibullRows)
    yield
    del FAMILIES["weibull"], OBJECTIVES["weibull"]


@cache
def rows_of_fit(case):
    """Return the rows of one site, and parameters near the estimate."""
    kind, points = OBJECTIVES[FAMILY.get(case, case)], {}
    plain = kind.place

    def place(site, *args, **kwargs):
        found = plain(site, *args, **kwargs)
        # A family may evaluate another model at its rows: the first object is that of the fit.
        points[id(site)] = site, found.own
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "place", place)
        CASES[case]()
    site, own = next(iter(points.values()))
    return site, own + 0.05 * np.cos(np.arange(len(own)))


@pytest.fixture(params=CASES)
def fitted(request):
    """Rows with a fit of any kind."""
    return rows_of_fit(request.param)


@pytest.fixture(params=[case for case in CASES if FAMILY.get(case) not in ("gee", "treatment")])
def objective(request):
    """Rows with a likelihood."""
    return rows_of_fit(request.param)


def kernel_sums(site, own):
    """Return all sums of a kernel: that of a GLM has the observed information as well."""
    return site.sums(own, observed=True) if isinstance(site, SiteModel) else site.sums(own)


def added(terms):
    return np.sum([one.sums().sum(axis=0) for one in terms], axis=0)


def slope(function, own, size=1e-5):
    moves = size * np.eye(len(own))
    return np.array([(function(own + one) - function(own - one)) / (2.0 * size) for one in moves])


def test_cases_are_of_all_objectives():
    assert {FAMILY.get(name, name) for name in CASES} == set(OBJECTIVES)


def test_columns_share_clusters_of_two_rows_and_no_single_rows():
    site, _ = rows_of_fit("efron")
    there = np.concatenate([site.opened.in_units(X) for _, X in site.opened.chunks()]) != 0.0
    there[:, 0] &= np.arange(len(there)) % 3 > 0
    pairs = np.arange(len(there)) // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(site.opened), "in_units", lambda opened, X: there[: len(X)] * 1.0)
        patch.setattr(type(site.opened), "chunks", lambda opened: iter([(None, there * 1.0)]))
        alone, two = site.shared_columns(np.arange(len(there))), site.shared_columns(pairs)
    inside = np.array([there[pairs == pair].any(axis=0) for pair in range(len(there) // 2)], dtype=int)
    np.testing.assert_array_equal(two, inside.T @ inside)
    assert not alone.any()


def test_terms_add_up_to_the_sums(fitted):
    site, own = fitted
    sums, terms = kernel_sums(site, own), dict(site.terms(own))
    assert_allclose(added(terms.pop("score"))[:, 0], sums.score, rtol=1e-10, atol=1e-9)
    if "totals" in terms:
        totals = np.sum([one.sums()[:, 0, 0] for one in terms.pop("totals")], axis=0)
        assert_allclose(totals, [sums.weight, sums.deviance, sums.pearson], rtol=1e-10)
        products = outer_products(site.chunks(), own, site.distribution)
        assert_allclose(added(terms.pop("meat")), products, rtol=1e-10, atol=1e-9)
    if "pairs" in terms:
        assert_allclose(np.sum([one.sums()[:, 0, 0] for one in terms.pop("pairs")], axis=0), sums.pairs)
    assert set(terms) in ({"information"}, {"information", "observed"})
    for name, parts in terms.items():
        assert_allclose(added(parts), getattr(sums, name), rtol=1e-10, atol=1e-9)


def test_sums_are_derivatives_of_the_likelihood(objective):
    site, own = objective
    sums = kernel_sums(site, own)
    assert_allclose(slope(lambda at: site.sums(at).loglik, own), sums.score, rtol=1e-6, atol=1e-5)
    found = -slope(lambda at: site.sums(at).score, own)
    if isinstance(site, SiteTimes) and not site.request.lifetimes.fixed:
        # The information of b / sigma and 1 / sigma differs from that of b and log sigma by the score.
        found[-1, :-1] -= sums.score[:-1]
        found[:, -1] -= sums.score
    assert_allclose(found, getattr(sums, "observed", sums.information), rtol=1e-5, atol=1e-4)


def test_scores_of_rows_and_information_of_clusters_add_up(objective):
    site, own = objective
    sums, code = site.sums(own), np.arange(site.n) % 7
    scores = site.row_scores(own)
    assert scores.shape == (site.n, len(own))
    assert_allclose(scores.sum(axis=0), sums.score, rtol=1e-9, atol=1e-9)
    parts = [site.cluster_information(own, code, part) for part in (slice(0, 3), slice(3, 7))]
    assert_allclose(np.concatenate(parts).sum(axis=0), sums.information, rtol=1e-9, atol=1e-9)
    by_cluster = np.array([scores[code == k].sum(axis=0) for k in range(7)])
    assert_allclose(site.cluster_scores(own, code, 7), by_cluster, rtol=1e-9, atol=1e-9)


def test_every_weight_of_a_score_is_checked(objective):
    site, own = objective
    checked = np.concatenate([part.vectors((site.key_of(own),)) for part in site.blocks()])
    assert len(checked) == site.n
    name = "score"
    if isinstance(site, SiteModel):
        # A score is the weighted response, the same at all points, less the mean, unless the link is another.
        y = np.concatenate([rows.y * (1.0 if rows.weight is None else rows.weight) for rows in site.chunks()])
        checked = np.column_stack([checked, y[:, None] - checked])
        name = "score" if site.distribution.canonical else "information"
    for column in np.column_stack([one.weights for one in site.terms(own)[name]]).T:
        assert np.abs(np.abs(checked.T) - np.abs(column)).max(axis=1).min() < 1e-12


def test_numbers_and_shapes_of_the_own_fit_are_those_of_its_arrays(objective):
    site, own = objective
    arrays, problem = site.fit_own()
    assert problem == ""
    assert {name: one.shape for name, one in arrays.items()} == dict(site.own_shapes)
    # The information is symmetric, and mean and deviation of the constant are known.
    [columns] = arrays.keys() - {"beta", "information", "pearson", "count"}
    symmetric = len(own) * (len(own) + 1) // 2
    moments = arrays[columns].size - (2 if arrays[columns].ndim == 2 else 0)
    if isinstance(site, SiteModel):
        # Pearson's statistic; and with least squares the information is that of the columns' moments.
        moments = 1 if site.distribution.least_squares else moments + 1
    assert site.own_numbers == len(own) + symmetric + moments
    assert np.abs(site.sums(arrays["beta"]).score).max() < 1e-4


def test_terms_are_products_of_their_factors():
    left, weights, right = RNG.normal(size=(5, 2)), RNG.normal(size=(5, 3)), RNG.normal(size=(5, 4))
    expected = [left.T @ np.diag(column) @ right for column in weights.T]
    assert_allclose(RowTerms(left, weights, right).sums(), expected)


def pooled_weibull():
    X = np.column_stack([np.ones(N), TABLE[["x", "z"]]])
    logs, died = np.log(TABLE["t"]).to_numpy(), TABLE["died"].to_numpy()

    def cost(theta):
        z = (logs - X @ theta[:-1]) / np.exp(theta[-1])
        return -np.sum(died * (z - theta[-1] - logs) - np.exp(z))

    found = scipy.optimize.minimize(cost, np.zeros(4), method="BFGS", options={"gtol": 1e-9})
    return found.x, -found.fun, X


@pytest.mark.parametrize("masked", [True, False])
def test_weibull_fit_is_that_of_the_pooled_table(masked):
    model = FederatedWeibull.from_formula("Surv(t, died) ~ x + z", PARTITION)
    design, gamma, total, ended, alone, converged = model.fit("robust", masked)
    theta, loglik, _ = pooled_weibull()
    back = gamma[:-1] / np.append(1.0, design.spread[1:])
    back[0] -= design.mean[1:] @ back[1:]
    assert converged
    assert_allclose([*back, gamma[-1]], theta, atol=2e-5)
    assert_allclose(total.loglik, loglik, rtol=1e-9)
    assert np.linalg.eigvalsh(total.information)[0] > 0.0
    assert ended[0].arrays["meat"].shape == (4, 4)
    assert len(alone) == len(PARTITION.sites)
    assert not any(set(reply.arrays) - {"beta", "information", "columns"} for reply in alone)


def test_weibull_takes_an_offset_and_refuses_late_entry():
    """An offset of 2 in the logarithm of time moves the constant by minus 2, and no other coefficient."""
    sites = fs.ClientPartition.from_frame(
        TABLE.assign(by=2.0), by="site", policy=fs.Policy(min_level_count=1)
    )
    plain, moved = (
        FederatedWeibull.from_formula("Surv(t, died) ~ x + z", sites, **options).fit()[1]
        for options in ({}, {"offset": "by"})
    )
    assert_allclose(plain - moved, [2.0, 0.0, 0.0, 0.0], atol=1e-7)
    with pytest.raises(MessageError, match="late entry"):
        FederatedWeibull.from_formula("Surv(entry, t, died) ~ x + z", sites).fit()


def test_weibull_parts_are_refused_under_a_policy_that_requires_more_rows():
    partition = fs.ClientPartition.from_frame(TABLE, by="site", policy=fs.Policy(min_count=200))
    with pytest.raises(fs.errors.PolicyError, match="minimum count"):
        FederatedWeibull.from_formula("Surv(t, died) ~ x + z", partition).fit()


def test_a_point_of_another_length_or_before_the_start_is_refused():
    site = PARTITION.sites["Bonn"]
    arrays = {"shift": np.zeros(3), "scale": np.ones(3), "beta": np.zeros(4)}
    with pytest.raises(MessageError, match="no rows are open"):
        site.answer(pack_request(Request("Bonn", "weibull", "sum_scores", arrays, "another session")))


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_scale_that_is_not_positive_is_refused(scale):
    site, _ = rows_of_fit("efron")
    with pytest.raises(MessageError, match="array 'scale' must be positive"):
        standard_place(site.opened, np.zeros(3), np.array([1.0, scale, 1.0]))
