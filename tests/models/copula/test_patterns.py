"""Missing blocks: merged patterns by counts, what they cost, and maximum likelihood over them."""

from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

import fedstat as fs
from fedstat.errors import EstimationError
from fedstat.models.copula.correlation import SMALL, ScoredPattern, choose_groups, describe_choice, fit_normal
from fedstat.models.copula.margins import Bins
from fedstat.models.copula.request import PLACES, GramPlan, NoisePlan, squared_radius

SIZES = {"A": 2, "B": 5, "C": 1}
COLUMNS = {k: tuple(Bins(f"{k}{j}", (0, 1)) for j in range(p)) for k, p in SIZES.items()}
NOISE = NoisePlan(Fraction(1, 20), COLUMNS)


def presence(n=20_000, seed=0):
    rng = np.random.default_rng(seed)
    table = np.ones((n, 3), dtype=bool)
    table[:, 1] = rng.random(n) < 0.4
    table[:, 2] = rng.random(n) < 0.97
    return table


@pytest.mark.parametrize("moments", [False, True])
def test_no_view_of_any_pattern_costs_more_than_the_budget(moments):
    plan = GramPlan(NOISE, (("A", "B", "C"), ("A", "C"), ("A", "B"), ("C",)), moments)
    for site in SIZES:
        assert plan.site_cost(site) <= NOISE.rho
    assert plan.coordinator_cost() <= NOISE.rho
    assert plan.scales[1] > plan.scales[0]  # fewer columns, less noise
    for needed, scale in zip(plan.needed, plan.scales, strict=True):
        assert Fraction(plan.variance, scale**2) >= needed


def statistics(rows, moments):
    """All that is released of one record, and which of its products are of two institutions."""
    u = np.concatenate(rows)
    owner = np.repeat(np.arange(len(rows)), [len(part) for part in rows])
    i, j = np.triu_indices(len(u), 1)
    values, shares = (u[i] * u[j]), np.where(owner[i] == owner[j], 1.0, 2.0)
    if moments:
        values = np.concatenate([values, u**2, u])
        shares = np.concatenate([shares, np.ones(2 * len(u))])
    return values, shares


def records(rng, sizes):
    """Rows of scores of bounded length, of the shapes that move sums most."""
    kinds = rng.integers(4, size=len(sizes))
    out = []
    for kind, p in zip(kinds, sizes, strict=True):
        row = rng.standard_normal(p) if kind < 2 else np.sign(rng.standard_normal(p))
        if kind == 3:
            row = row * (rng.random(p) < 0.5)
        length = np.linalg.norm(row) or 1.0
        out.append(np.clip(row * np.sqrt(float(squared_radius(p))) / length, -np.sqrt(3), np.sqrt(3)))
    return out


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("sizes", [(2, 5, 1), (3, 3), (4,), (2, 2, 2, 2)])
def test_no_record_moves_sums_by_more_than_is_charged(sizes, moments):
    rng = np.random.default_rng(3)
    held = {f"{k}": (Bins("x", (0, 1)),) * p for k, p in enumerate(sizes)}
    plan = GramPlan(NoisePlan(Fraction(1), held), (tuple(held),), moments)
    unit = 2 * plan.variance / 16**PLACES
    complete = float(unit * (plan.coordinator_cost() - plan.noise.all_margins_cost()))
    own = [float(unit * plan.products_cost(site)) for site in held]
    worst_whole, worst_own = 0.0, np.zeros(len(sizes))
    for _ in range(500):
        u, v = records(rng, sizes), records(rng, sizes)
        if rng.random() < 0.5:
            v = [-a if rng.random() < 0.7 else b for a, b in zip(u, v, strict=True)]
        (a, shares), (b, _) = statistics(u, moments), statistics(v, moments)
        worst_whole = max(worst_whole, float(((a - b) ** 2 / shares).sum()))
        for k in range(len(sizes)):
            moved = [*u[:k], v[k], *u[k + 1 :]]
            change = (statistics(moved, moments)[0] - a) ** 2
            worst_own[k] = max(worst_own[k], float(change.sum()))
    assert worst_whole <= complete * (1 + 1e-12)
    assert (worst_own <= np.array(own) * (1 + 1e-12)).all()  # some are attained
    assert worst_whole > 0.5 * complete  # the bound is not an idle one


def test_small_patterns_lose_their_rarest_site():
    table = presence()
    groups = choose_groups(NOISE, table, "em")
    assert groups.method == "em"
    assert set(groups.plan.patterns) <= {("A", "B", "C"), ("A", "C"), ("A", "B"), ("A",)}
    assert len(groups.plan.patterns) < 4  # of 3 per cent without C, those without B join others
    assert groups.counts.sum() == len(table)
    for g, pattern in enumerate(groups.plan.patterns):
        held = table[groups.group == g]
        assert held[:, [list(SIZES).index(k) for k in pattern]].all()
        least = 8.0 * GramPlan(NOISE, (pattern,), moments=True).deviation(0, 1)
        assert len(held) >= least or len(pattern) == 1


def test_a_method_is_chosen_by_what_is_public():
    complete = np.ones((500, 3), dtype=bool)
    assert choose_groups(NOISE, complete, "em").method == "complete"
    assert choose_groups(NOISE, presence(), "pairs").method == "pairs"
    assert choose_groups(NOISE, presence(400), "auto").method == "pairs"
    large = NoisePlan(Fraction(3), COLUMNS)
    assert choose_groups(large, presence(), "auto").method == "em"


def test_a_choice_says_what_it_goes_by():
    table = presence(400)
    assert "noise of" in describe_choice(NOISE, presence()) and f"below {SMALL}" in describe_choice(
        NOISE, presence()
    )
    table[60:, 2] = False
    assert "two sites without a common entity" in describe_choice(NOISE, table)
    policy = fs.Policy(privacy=fs.Budget(1.0, 1e-6))
    partition = fs.ClientPartition.from_frame(missing_rows(), columns=HELD, policy=policy)
    reported = {
        m: str(fs.CopulaSynthesizer(partition, 1.0, BOUNDS, missing=m).explain()) for m in ("auto", "em")
    }
    assert (
        "depends on the noise alone" in reported["auto"]
        and "depends on the noise alone" not in reported["em"]
    )


def test_em_is_the_factored_estimate_of_monotone_patterns():
    rng = np.random.default_rng(5)
    x = rng.standard_normal((900, 2)) @ np.array([[1.0, 0.4], [0.0, 0.9]])
    y = x @ [0.5, -0.3] + 0.7 * rng.standard_normal(900) + 0.2
    both = np.arange(900) < 350
    z = np.column_stack([x, y])[both]
    every = [
        ScoredPattern(350, np.arange(3), z.mean(axis=0), z.T @ z / 350),
        ScoredPattern(550, np.arange(2), x[~both].mean(axis=0), x[~both].T @ x[~both] / 550),
    ]
    mean, S = fit_normal(every, 3)
    known_mean, known = x.mean(axis=0), np.cov(x.T, bias=True)
    A = np.column_stack([np.ones(350), x[both]])
    beta = np.linalg.lstsq(A, y[both], rcond=None)[0]
    rest = np.mean((y[both] - A @ beta) ** 2)
    assert mean == pytest.approx([*known_mean, beta[0] + known_mean @ beta[1:]], abs=1e-4)
    assert S[:2, :2] == pytest.approx(known, abs=1e-4)
    assert S[2, :2] == pytest.approx(known @ beta[1:], abs=1e-4)
    assert S[2, 2] == pytest.approx(rest + beta[1:] @ known @ beta[1:], abs=1e-4)


BOUNDS = {"a": (-4, 4), "b": (-4, 4), "c": (-4, 4)}
HELD = {"A": ["a"], "B": ["b"], "C": ["c"]}
OMEGA = np.array([[1.0, 0.6, 0.5], [0.6, 1.0, 0.3], [0.5, 0.3, 1.0]])


def missing_rows(n=20_000, slope=1.5):
    rng = np.random.default_rng(2)
    Z = rng.standard_normal((n, 3)) @ np.linalg.cholesky(OMEGA).T
    frame = pd.DataFrame(Z, columns=list("abc"))
    frame.loc[rng.random(n) < expit(slope * Z[:, 0]), "b"] = np.nan
    return frame


def fit(missing, epsilon=20.0):
    policy = fs.Policy(privacy=fs.Budget(epsilon, 1e-6))
    partition = fs.ClientPartition.from_frame(missing_rows(), columns=HELD, policy=policy)
    return fs.CopulaSynthesizer(partition, epsilon, BOUNDS, missing=missing).fit()


def test_em_undoes_what_missing_at_random_does_to_pairs():
    errors = {}
    for missing in ("pairs", "em"):
        found = fit(missing)
        assert found._fit.method == missing
        errors[missing] = abs(found.correlation.to_numpy()[0, 1] - 0.6)
    assert errors["pairs"] > 0.04
    assert errors["em"] < 0.025
    assert fit("auto")._fit.method == "em"


def test_sites_are_charged_once_for_disjoint_patterns():
    policy = fs.Policy(privacy=fs.Budget(20.0, 1e-6))
    partition = fs.ClientPartition.from_frame(missing_rows(), columns=HELD, policy=policy)
    result = fs.CopulaSynthesizer(partition, 20.0, BOUNDS, missing="em").fit()
    for site in HELD:
        spent = partition.sites[site].site_ledger.charges.spent
        assert 0 <= spent - result._fit.sums.site_cost(site) < 1e-12
    assert (result.privacy["epsilon"] <= 20.0).all()


def test_two_sites_that_merging_keeps_apart_are_named():
    frame = missing_rows(2_000)
    frame.loc[frame.index > 60, "c"] = np.nan
    policy = fs.Policy(privacy=fs.Budget(0.5, 1e-6))
    partition = fs.ClientPartition.from_frame(frame, columns=HELD, policy=policy)
    with pytest.raises(EstimationError, match=r"small patterns merged.*missing='pairs'"):
        fs.CopulaSynthesizer(partition, 0.5, BOUNDS, missing="em").fit()
