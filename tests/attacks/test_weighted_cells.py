"""Sums with weights that depend on coefficients: cells of few rows, and the predictor of a single row.

A logistic model of a column of few values has sums at several points, whose weights are functions of this
column. Together they are the sums over each value. With a column of many values as well, the sum of the
weights over one row reveals the predictor of this row.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from attacker.attack import Campaign, attack
from attacker.oracle import singled_out

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.federation.disclosure import weighted_sums

pytestmark = pytest.mark.filterwarnings("ignore")

STRICT = replace(fs.Policy.strict(), reasons="sent")
LOGIT, PROBIT, POISSON = (
    sm.families.Binomial(),
    sm.families.Binomial(sm.families.links.Probit()),
    sm.families.Poisson(),
)
GAMMA = sm.families.Gamma(sm.families.links.Log())
CELLS = "the weighted sums at these coefficients"
POINTS = 4


def site(seed: int, top: int, apart: int = 9) -> pd.DataFrame:
    """A score s that is 10 in `top` rows, and a = 1 with b = 0 in `apart` rows."""
    rng = np.random.default_rng(seed)
    n = 120
    a, b, s = (rng.random(n) < 0.5) * 1.0, (rng.random(n) < 0.5) * 1.0, rng.integers(0, 6, n) * 1.0
    b[np.flatnonzero((a == 1.0) & (b == 0.0))[apart:]] = 1.0
    s[:top] = 10.0
    z = rng.normal(10.0, 2.0, n).round(6)
    e = (rng.random(n) < 1.0 / (1.0 + np.exp(10.0 - z))) * 1.0
    e[:top] = np.arange(top) % 2  # both outcomes
    return pd.DataFrame({
        "a": a, "b": b, "s": s, "z": z, "e": e, "y": rng.gamma(2.0, np.exp(z / 10.0)).round(6),
        "c": rng.poisson(2.0, n) * 1.0, "x": rng.integers(0, 3, n),
        "d": rng.integers(1, 13, n) * 1.0,
    })  # fmt: skip


def pooled(top: int = 0, apart: int = 9, policy: fs.Policy = STRICT) -> fs.ClientPartition:
    frame = pd.concat([site(seed, top, apart).assign(hospital=f"H{seed}") for seed in range(3)])
    return fs.ClientPartition.from_frame(frame.reset_index(drop=True), by="hospital", policy=policy)


def glm(formula, family):
    return lambda partition: fs.FederatedGLM.from_formula(formula, partition, family=family).fit()


def model(kind, formula, **options):
    return lambda partition: getattr(fs, kind).from_formula(formula, partition, **options).fit()


FITS = {
    "logit": glm("e ~ s", LOGIT),
    "logit of a square": glm("e ~ s + I(s**2)", LOGIT),
    "counts": glm("c ~ s", POISSON),
    "responses of many values": glm("y ~ s", GAMMA),
    "ordinal": model("FederatedOrdinal", "x ~ s"),
    "multinomial": model("FederatedMultinomial", "C(x) ~ s"),
}


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("top", [0, 1, 2])
def test_points_of_a_fit_do_not_single_out_a_value(fit, top):
    partition = pooled(top)
    if not top:
        FITS[fit](partition)
        return
    with pytest.raises(PolicyError, match=r"fewer than 3 rows|in no row or in at least 3"):
        FITS[fit](partition)


def test_without_the_check_the_points_of_a_fit_single_out_a_value(monkeypatch):
    monkeypatch.setattr(weighted_sums, "check_cells", lambda *args: None)
    FITS["logit of a square"](pooled(1))
    frame = site(0, 1)
    X = np.column_stack([frame.s**0, frame.s, frame.s**2])
    beta, terms = np.zeros(3), []
    for _ in range(POINTS):
        mu = 1.0 / (1.0 + np.exp(-X @ beta))
        W = mu * (1.0 - mu)
        terms += [X[:, i] * X[:, j] * W for i in range(3) for j in range(3)]
        beta = beta + np.linalg.solve(X.T @ (X * W[:, None]), X.T @ (frame.e - mu))
    assert singled_out([np.column_stack(terms)] * 3, 3) == [(0,)]


def test_the_refusal_names_the_weighted_sums():
    with pytest.raises(PolicyError, match=CELLS):
        FITS["logit of a square"](pooled(1))


def test_a_combination_of_levels_that_a_model_counts_is_no_finding():
    """The count of a = 1, b = 0 follows from those of the levels, with and without weights."""
    result = glm("e ~ a + b", LOGIT)(pooled(apart=1))
    frame = pd.concat([site(seed, 0, 1) for seed in range(3)])
    reference = sm.GLM(frame.e, sm.add_constant(frame[["a", "b"]]), family=LOGIT).fit()
    np.testing.assert_allclose(result.params, reference.params, rtol=1e-6)


def test_outcomes_by_value_follow_from_another_link():
    """With a link that is not canonical, the response is summed with other weights at each point."""
    frame = pooled(4)
    glm("e ~ s", LOGIT)(frame)
    with pytest.raises(PolicyError, match=CELLS):
        glm("e ~ s", PROBIT)(frame)


@pytest.mark.parametrize("apart", [0, 1, 2, 3])
def test_a_site_shows_no_fit_with_the_weight_of_few_rows(apart):
    """The weights of one row at the site's own coefficients reveal its predictor, and so z."""
    policy = replace(STRICT, min_own_rows=0)
    result = glm("e ~ a + b + z", LOGIT)(pooled(apart=apart, policy=policy))
    few = 0 < apart < STRICT.min_level_count
    assert bool(result.site_estimates.isna().to_numpy().all()) == few
    assert ("few rows have a combination of levels" in " ".join(result.summary().notes)) == few


def of_wards(apart: int, wards: int = 52, n: int = 24_000) -> fs.ClientPartition:
    """Sites with so many wards that products of levels, empty ones included, are above the limit."""
    frames = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        a, b = (rng.random((2, n)) < 0.5) * 1.0
        b[np.flatnonzero((a == 1.0) & (b == 0.0))[apart if not seed else 60 :]] = 1.0
        z = rng.normal(10.0, 2.0, n)
        e = (rng.random(n) < 1.0 / (1.0 + np.exp(10.0 - z))) * 1.0
        ward = np.char.mod("w%02d", np.arange(n) % wards)
        frames.append(pd.DataFrame({"a": a, "b": b, "z": z, "e": e, "ward": ward, "hospital": f"H{seed}"}))
    return fs.ClientPartition.from_frame(pd.concat(frames, ignore_index=True), by="hospital", policy=STRICT)


@pytest.mark.parametrize("apart", [1, 3])
def test_levels_of_another_factor_do_not_end_the_examination(apart):
    own = glm("e ~ a + b + z + C(ward)", LOGIT)(of_wards(apart)).site_estimates
    assert own.isna().all(axis=1).to_dict() == {"H0": apart == 1, "H1": False, "H2": False}


def test_a_site_answers_no_fit_with_more_products_than_it_examines(monkeypatch):
    monkeypatch.setattr(weighted_sums, "MOST_PRODUCTS", 8)
    policy = replace(STRICT, min_own_rows=0)
    assert glm("e ~ a + b + z", LOGIT)(pooled(policy=policy)).site_estimates.notna().to_numpy().all()
    with pytest.raises(PolicyError, match=r"examines at most 8 products of columns .*are 10"):
        glm("e ~ a + b + s + z", LOGIT)(pooled(policy=policy))


def test_all_other_sites_read_the_predictor_of_one_row():
    """The information at the estimate, less the parts of other sites, has the weight of a row by itself."""
    result = glm("e ~ a + b + z", LOGIT)(pooled(apart=1))
    beta, information = result.params.to_numpy(), np.linalg.inv(result.cov_params().to_numpy())
    for seed in (1, 2):
        other = site(seed, 0, 1)
        X = sm.add_constant(other[["a", "b", "z"]]).to_numpy()
        mu = 1.0 / (1.0 + np.exp(-X @ beta))
        information -= X.T @ (X * (mu * (1.0 - mu))[:, None])
    weight = information[1, 1] - information[1, 2]  # of the row with a = 1, b = 0
    eta = np.arccosh(1.0 / (2.0 * weight) - 1.0)
    found = (np.array([-eta, eta]) - beta[0] - beta[1]) / beta[3]
    table = site(0, 0, 1)
    (z,) = table.z[(table.a == 1.0) & (table.b == 0.0)]
    assert np.abs(found - z).min() < 1e-4


def of_wards_within(hospitals: dict[str, int]) -> pd.DataFrame:
    """Hospitals with as many rows that have both ward p and h = k; none of ward p where the number is -1."""
    rng, frames = np.random.default_rng(4), []
    for hospital, both in hospitals.items():
        wards = ["q", "r"] if both < 0 else ["p", "q", "r"]
        frame = pd.DataFrame({"ward": rng.choice(wards, 240), "h": rng.choice(["k", "l"], 240)})
        frame.loc[np.flatnonzero((frame.ward == "p") & (frame.h == "k"))[max(both, 0) :], "h"] = "l"
        frame["z"], frame["e"] = rng.normal(10.0, 2.0, 240).round(3), (rng.random(240) < 0.45) * 1.0
        frames.append(frame.assign(hospital=hospital))
    return pd.concat(frames, ignore_index=True)


WITHIN = {
    "GLORE": model("GLORE", "e ~ C(ward) + C(h) + z"),
    "FederatedGLM": glm("e ~ C(ward) + C(h) + z", LOGIT),
    "ordinal": model("FederatedOrdinal", "C(grade, levels=[0, 1, 2]) ~ C(ward) + C(h) + z"),
    "multinomial": model("FederatedMultinomial", "C(grade) ~ C(ward) + C(h) + z"),
    "Cox": model("FederatedCox", "Surv(time, e) ~ C(ward) + C(h) + z"),
}


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.parametrize(
    ("hospitals", "passes"),
    [
        ({"A": 1, "B": -1, "C": -1}, False),
        ({"A": 1, "B": 0, "C": 0}, False),
        ({"A": 1, "B": 1, "C": 0}, False),
        ({"A": 1, "B": 40, "C": -1}, False),
        ({"A": 1, "B": 1, "C": 1}, True),
        ({"A": 2, "B": 1, "C": 1, "D": -1}, True),
        ({"A": 0, "B": 0, "C": 0}, True),
        ({"A": 3, "B": -1, "C": -1}, True),
    ],
)
def test_rows_that_few_hospitals_have_are_singled_out_by_no_masked_sum(name, hospitals, passes):
    """Wards within hospitals: if one row alone has ward p and k, the total of its weight is its own."""
    table = of_wards_within(hospitals)
    table["grade"] = np.random.default_rng(1).integers(0, 3, len(table))
    table["time"] = np.random.default_rng(2).integers(1, 40, len(table)) * 1.0
    partition = fs.ClientPartition.from_frame(table, by="hospital", policy=STRICT)
    if passes:
        WITHIN[name](partition)
        return
    with pytest.raises(PolicyError, match=CELLS):
        WITHIN[name](partition)


@pytest.mark.parametrize("then", ["evaluate", "get_margeff"])
@pytest.mark.parametrize("name", ["GLORE", "FederatedGLM", "ordinal", "multinomial"])
def test_what_follows_a_fit_is_answered_where_the_fit_is(name, then):
    """Its sums multiply other columns than those of the design that it opens."""
    table = of_wards_within({"A": 1, "B": 1, "C": 1})
    table["grade"] = np.random.default_rng(1).integers(0, 3, len(table))
    result = WITHIN[name](fs.ClientPartition.from_frame(table, by="hospital", policy=STRICT))
    assert getattr(result, then)() is not None


def test_without_the_check_an_analyst_reads_the_predictor_of_a_row(monkeypatch):
    monkeypatch.setattr(weighted_sums, "_is_hidden", lambda *args: True)
    table = of_wards_within({"A": 1, "B": -1, "C": -1})
    partition = fs.ClientPartition.from_frame(table, by="hospital", policy=STRICT)
    result = WITHIN["GLORE"](partition)
    of_row, of_q, of_r, of_l = np.eye(5)[0], *np.eye(5)[1:4]
    assert list(result.params.index)[1:4] == ["C(ward)[T.q]", "C(ward)[T.r]", "C(h)[T.l]"]
    weight = (of_row - of_q - of_r) @ np.linalg.inv(result.cov_params().to_numpy()) @ (of_row - of_l)
    eta = np.arccosh(1.0 / (2.0 * weight) - 1.0)
    (z,) = table.z[(table.ward == "p") & (table.h == "k")]
    beta = result.params.to_numpy()
    assert np.abs((np.array([-eta, eta]) - beta[0]) / beta[4] - z).min() < 1e-6


def test_the_sequence_of_the_campaign_is_refused():
    campaign = Campaign()
    assert not attack(90194, campaign)
    assert campaign.refused == 3
