"""Noise in shares of the sites inside masked sums: its size, its charge, its repeats, and who may omit it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from scipy.stats import chi2

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import DescriptionError, ModelError, PartitionError, SecurityError
from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.policy import Budget, Policy, spends_no_more
from fedstat.federation.disclosure.privacy_budget import NoiseRequired, NoiseShares, honest_shares
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.message import ArrayDeclaration, Request, control
from fedstat.federation.protocols.masked_sums import masked_protocol
from fedstat.federation.protocols.noise_shares import agree_shares, coalition_of
from fedstat.privacy.zcdp import GRID, LEAST_SHARE, rho_of_noise, rho_of_shares, share_of_noise

FAMILY, SIZE = "shared counts", 400
N = {"A": 30, "B": 40, "C": 50, "D": 60}
BUDGET = Budget(50.0, 1e-6, colluding=1)


@dataclass(frozen=True, slots=True)
class CountRequest:
    """The number of cells, the variance that is left to a coalition, and the shares."""

    size: int
    variance: int
    shares: NoiseShares | None


@step(
    FAMILY,
    request=CountRequest,
    requests=control("cells", common=True),
    releases={
        "counts": ArrayDeclaration(
            "noisy aggregate",
            "numbers of rows",
            maskable=True,
            dtype="int64",
            behind=(EntityCount, NoiseRequired),
            noisy=True,
        )
    },
)
def count(data, state, request):
    """Return the number of rows, many times."""
    variance = Fraction(request.variance)
    share = share_of_noise(variance, honest_shares(request.shares))
    n, cells = data.table.n_rows, str(request.size)
    state.report(EntityCount(n), NoiseRequired("counts", cells, 1, share, shares=request.shares))
    return {"counts": np.full(request.size, n, dtype=np.int64)}


STEPS = FAMILIES.pop(FAMILY)


@pytest.fixture(scope="module", autouse=True)
def counting():
    """Let sites answer the family during these tests."""
    FAMILIES[FAMILY] = STEPS
    yield
    FAMILIES.pop(FAMILY, None)


def partition_of(n=N, **budgets):
    table = pd.DataFrame({"site": np.repeat(list(n), list(n.values())), "x": 0.0})
    policies = {name: Policy(privacy=budgets.get(name, BUDGET)) for name in n}
    return fs.ClientPartition.from_frame(table, by="site", policies=policies)


def noisy_sum(partition, variance=1000, change=lambda shares: shares):
    """Request the numbers of rows: the noisy sum, and the shares."""
    sites, session = tuple(partition.sites), secrets.token_hex(8)

    def protocol():
        policies = {name: site.policy for name, site in partition.sites.items()}
        shares = change((yield from agree_shares(policies, session)))
        request = CountRequest(SIZE, variance, shares)
        text = [Request(name, FAMILY, "count", {}, session, to_json(request)) for name in sites]
        total = yield text
        return sum(reply.arrays["counts"] for reply in total), shares

    with_masks = coalition_of({k: one.policy for k, one in partition.sites.items()}) <= len(sites) - 2
    run = masked_protocol(protocol(), sites, session) if with_masks else protocol()
    return partition.engine.run(run, fs.federation.audit.ledger.Ledger())


def within(noise, variance):
    """Whether noise has this variance; one run in a million fails."""
    low, high = chi2.ppf([5e-7, 1.0 - 5e-7], len(noise)) * variance
    return low < (noise.astype(float) ** 2).sum() < high


@pytest.mark.parametrize(("colluding", "factor"), [(1, 4 / 3), (2, 2.0), (3, 4.0), (None, 4.0)])
def test_the_sum_has_the_noise_of_all_shares(colluding, factor):
    partition = partition_of(**dict.fromkeys(N, Budget(50.0, 1e-6, colluding=colluding)))
    total, shares = noisy_sum(partition, 1200)
    noise = total - sum(N.values())
    assert within(noise, 1200 * factor) and not within(noise, 1200 * factor * 2)
    assert (shares is None) == (factor == 4.0)
    for site in partition.sites.values():
        honest = 1 if shares is None else 4 - colluding
        charged = Fraction(1, 2400) if shares is None else Fraction(1, 2 * (1200 // honest) * honest)
        assert 0 <= site.site_ledger.charges.spent - charged <= Fraction(2, GRID)


def test_the_most_cautious_owner_decides():
    partition = partition_of(B=Budget(50.0, 1e-6, colluding=2))
    assert noisy_sum(partition)[1].colluding == 2
    partition = partition_of(B=Budget(50.0, 1e-6))
    assert noisy_sum(partition)[1] is None
    with pytest.raises(DescriptionError, match=r"against 2 colluding sites, .*colluding = 1  in section"):
        noisy_sum(partition_of(B=Budget(50.0, 1e-6, 2)), change=lambda one: replace(one, colluding=1))


def test_a_repeat_is_free_and_has_the_same_noise_until_a_table_changes():
    partition = partition_of()
    first, again = noisy_sum(partition)[0], noisy_sum(partition)[0]
    np.testing.assert_array_equal(first, again)
    spent = {name: site.site_ledger.charges.spent for name, site in partition.sites.items()}
    changed = partition.sites["B"]
    changed.change_records(
        type(changed.data.table.table)(changed.data.table.table.frame.iloc[1:]), lambda kept, n: ""
    )
    third = noisy_sum(partition)[0]
    # All sites have drawn again: else the difference would have the noise of one share alone.
    assert within(third + 1 - first, 2 * 4000 / 3) and not within(third + 1 - first, 2 * 1000 / 3)
    assert all(site.site_ledger.charges.spent == 2 * spent[name] for name, site in partition.sites.items())


def test_other_sites_in_a_sum_have_other_noise():
    partition = partition_of()
    four = noisy_sum(partition)[0]
    three = noisy_sum(partition._among(["A", "B", "C"]))[0]
    # The shares of A, B and C would cancel in the difference, and only that of D be left.
    assert within(four - three - N["D"], 4000 / 3 + 3 * 1000 / 2)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda one: None, DescriptionError, None),
        (lambda one: replace(one, marks={**one.marks, "E": 0}), DescriptionError, "masked sum over"),
        (lambda one: replace(one, marks=dict(list(one.marks.items())[:3])), DescriptionError, "masked sum"),
        (lambda one: replace(one, colluding=3), DescriptionError, "two sites more"),
        (lambda one: replace(one, marks={**one.marks, "A": 0}), DescriptionError, "have changed"),
    ],
)
def test_shares_that_do_not_fit_the_sum_are_refused_before_a_charge(change, error, text):
    partition = partition_of()
    if text is None:  # without shares each site adds all of the noise
        assert within(noisy_sum(partition, change=change)[0] - sum(N.values()), 4000)
        return
    with pytest.raises(error, match=text):
        noisy_sum(partition, change=change)
    assert not any(site.site_ledger.charges.made for site in partition.sites.values())


def test_masks_do_not_cancel_if_sites_receive_other_marks():
    """A coordinator that lets B draw again and the others repeat gets no sum."""
    partition = partition_of()
    noisy_sum(partition)
    sites, session = tuple(partition.sites), secrets.token_hex(8)

    def protocol():
        policies = {name: site.policy for name, site in partition.sites.items()}
        shares = yield from agree_shares(policies, session)
        false = replace(shares, marks={**shares.marks, "A": 0})
        texts = {name: to_json(CountRequest(SIZE, 1000, shares)) for name in sites} | {
            "B": to_json(CountRequest(SIZE, 1000, false))
        }
        yield [Request(name, FAMILY, "count", {}, session, text) for name, text in texts.items()]

    with pytest.raises(SecurityError, match="did not cancel"):
        partition.engine.run(masked_protocol(protocol(), sites, session), fs.federation.audit.ledger.Ledger())


def test_shares_cost_what_one_noise_of_their_variance_costs():
    """Against the bound of Kairouz, Liu and Steinke (2021) in 60 digits."""
    from mpmath import exp, mp, mpf, pi, sqrt

    mp.dps = 80
    for squared, variance, m, d in ((9, 16, 2, 1), (10**6, 40, 50, 2**20), (1, 10**9, 1000, 10**4)):
        s2 = mpf(variance)
        tau = 10 * sum(exp(-2 * pi**2 * s2 * k / (k + 1)) for k in range(1, m))
        bound = (sqrt(mpf(squared) / (m * s2)) + tau * sqrt(mpf(d))) ** 2 / 2
        found = rho_of_shares(squared, Fraction(variance), m)
        assert mpf(found.numerator) / found.denominator >= bound
        assert found - rho_of_noise(squared, Fraction(variance) * m) == Fraction(1, GRID)
    with pytest.raises(ModelError, match="at least 16"):
        rho_of_shares(1, Fraction(15), 2)
    assert rho_of_shares(1, Fraction(1, 2), 1) == 1
    assert share_of_noise(5, 2) == LEAST_SHARE and share_of_noise(5, 1) == 5 and share_of_noise(101, 2) == 51


def test_a_policy_states_who_may_collude():
    policy = Policy(privacy=BUDGET)
    assert "colluding = 1" in policy.to_toml() and Policy.from_text("p", policy.to_toml()) == policy
    alone = Policy(privacy=Budget(50.0, 1e-6))
    assert "\ncolluding" not in alone.to_toml() and Policy.from_text("p", alone.to_toml()) == alone
    assert spends_no_more(alone.privacy, BUDGET) and not spends_no_more(BUDGET, alone.privacy)
    assert spends_no_more(replace(BUDGET, colluding=2), BUDGET) and spends_no_more(None, None)
    assert not spends_no_more(None, BUDGET) and not spends_no_more(BUDGET, None)
    assert [BUDGET.coalition(k) for k in (1, 2, 3)] == [0, 1, 1]
    for wrong in (0, 1.5, True, "all"):
        with pytest.raises(PartitionError, match="colluding: expected a whole number of at least 1"):
            Budget(1.0, 1e-6, colluding=wrong)
