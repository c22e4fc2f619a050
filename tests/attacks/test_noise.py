"""Attacks on noise and budget. Each succeeds against a door that lacks one of its rules, and fails here."""

from __future__ import annotations

import json
import secrets
import threading
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from noisy_counts import counting  # noqa: F401
from scipy.stats import beta, norm

from fedstat.errors import FedstatError
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.disclosure import privacy_budget
from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.disclosure.privacy_budget import NoiseMechanism, NoiseRequired
from fedstat.federation.disclosure.site import FAMILIES, Site
from fedstat.federation.disclosure.state import SiteTrust
from fedstat.federation.message import ArrayDeclaration, Request, Step, pack_request, unpack_reply
from fedstat.federation.tables.published import PublishedColumn
from fedstat.federation.transport.remote import SiteServer
from fedstat.privacy.zcdp import rho_of_budget, round_to_grid

N = 60
FRAME = pd.DataFrame({"x": np.repeat([-2.0, -0.5, 0.5, 2.0], N // 4)})
PUBLISHED = {"x": PublishedColumn("number", (-9.0, 9.0))}
TRUTH = np.full(4, N // 4)
WHOLE = rho_of_budget(1.0, 1e-6)
ALL = str(round_to_grid(WHOLE))
EDGES = [-1.0, 0.0, 1.0]


def site_of(frame=FRAME, epsilon=1.0, identity=None):
    policy = Policy.strict(privacy=Budget(epsilon, 1e-6))
    trust = SiteTrust(_identity=identity or Identity.generate())
    return Site("Bank", frame, policy, trust=trust, published=PUBLISHED)


def request(rho=ALL, edges=EDGES, session="s", **more):
    content = json.dumps({"column": "x", "rho": str(rho), "edges": list(edges)} | more)
    return pack_request(Request("Bank", "margins", "count_bins", {}, session, content))


def counts(site, *args, client="", **kwargs):
    return unpack_reply(site.answer(request(*args, **kwargs), client)).arrays["counts"]


def average(site, times=400):
    """Mean of repeats, in as many sessions and spellings and from several coordinators."""
    rho = Fraction(ALL)
    found = []
    for i in range(times):
        spelled = f"{rho.numerator * (i % 7 + 1)}/{rho.denominator * (i % 7 + 1)}"
        edges = EDGES if i % 2 else [-1, -0.0, 1]
        found.append(counts(site, spelled, edges, session=f"s{i % 20}", client=f"coordinator {i % 20 % 3}"))
    return np.mean(found, axis=0)


def fresh(monkeypatch):
    monkeypatch.setattr(privacy_budget, "random_bytes", lambda key: secrets.token_bytes)


def test_averaging_repeats(monkeypatch):
    site = site_of()
    first = counts(site)
    np.testing.assert_array_equal(average(site), first)
    assert site.site_ledger.charges.spent == Fraction(ALL)
    fresh(monkeypatch)
    deviation = float(Fraction(ALL)) ** -0.5 / 20.0
    assert np.abs(average(site_of()) - TRUTH).max() < 5.0 * deviation


def test_a_table_put_back_or_a_ledger_begun_again_does_not_draw_again(monkeypatch):
    """An attacker who can delete the record of a charge spends again, and receives the same noise again."""
    identity = Identity.generate()
    found = [counts(site_of(identity=identity)) for _ in range(5)]
    assert all(np.array_equal(one, found[0]) for one in found)
    fresh(monkeypatch)
    assert not np.array_equal(counts(site_of(identity=identity)), found[0])


def test_the_difference_of_two_tables(monkeypatch):
    """One person moves to another bin between two answers: equal noise would show both bins."""
    identity, moved = Identity.generate(), FRAME.copy()
    moved.loc[0, "x"] = 2.0

    def difference():
        return counts(site_of(moved, identity=identity)) - counts(site_of(identity=identity))

    assert not np.array_equal(difference(), [-1, 0, 0, 1])
    monkeypatch.setattr(NoiseMechanism, "_records", lambda self: b"")
    # Not even where the site does not see that its table is another one.
    assert not np.array_equal(difference(), [-1, 0, 0, 1])
    monkeypatch.setattr(privacy_budget, "content_digest", lambda content: b"")
    np.testing.assert_array_equal(difference(), [-1, 0, 0, 1])


@pytest.mark.parametrize(
    "more", [{"sensitivity": 1e-9}, {"squared": 0}, {"sigma": 1e-9}, {"variance": "1/10"}, {"noise": False}]
)
def test_figures_of_the_analyst_are_none(more):
    site = site_of()
    with pytest.raises(FedstatError):
        counts(site, **more)
    assert not site.site_ledger.charges.made


def test_asking_for_little_noise_is_asking_for_much_budget():
    site = site_of()
    for rho in ("100", "1/40", str(round_to_grid(WHOLE) + Fraction(1, 2**64))):
        with pytest.raises(FedstatError, match="privacy budget"):
            counts(site, rho)
    assert not site.site_ledger.charges.made
    counts(site)


def test_many_small_questions_are_one_large_one():
    """Bins that differ by nothing that matters are questions of their own: their mean is worth its price."""
    site, found = site_of(), []
    share = round_to_grid(WHOLE / 50)
    with pytest.raises(FedstatError, match="privacy budget"):
        for i in range(1000):
            found.append(counts(site, share, [*EDGES, 100.0 + i])[:4])
    assert len(found) == 50
    assert site.site_ledger.charges.spent <= WHOLE
    # No better than one question for all: of each of 4 counts a deviation of rho^-1/2.
    error = np.mean(found, axis=0) - TRUTH
    assert np.square(error).sum() * float(WHOLE) > 0.02


def test_sessions_at_once_spend_once():
    """Forty requests in forty threads, each a sixteenth of the budget: sixteen are answered."""
    server, share = SiteServer(site_of()), round_to_grid(WHOLE / 16)
    reported = []

    def one(i):
        reply = server.answer(request(share, [*EDGES, 100.0 + i], session=f"s{i}"))
        try:
            reported.append(unpack_reply(reply).arrays["counts"])
        except FedstatError as error:
            reported.append(str(error))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(not isinstance(one, str) for one in reported) == 16
    assert all("privacy budget" in one for one in reported if isinstance(one, str))
    assert server.site.site_ledger.charges.spent == 16 * share


def test_charges_of_many_threads_are_one_after_the_other(monkeypatch):
    """The account itself, without a server before it; without its lock several would see the same rest."""
    site = site_of()
    share = round_to_grid(WHOLE / 4)
    slow = threading.Event()
    site.site_ledger.store = SimpleNamespace(append=lambda _: slow.wait(0.01))
    failed = []

    def one(i):
        owed = NoiseRequired("counts", str(i), 2, 1 / share)
        question = Request("Bank", "margins", "count_bins", {}, str(i))
        try:
            step = FAMILIES["margins"]["count_bins"]
            site._noise.add(question, step, {"counts": owed}, {"counts": np.ones(1, dtype=np.int64)})
        except FedstatError as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failed) == 8 and site.site_ledger.charges.spent == 4 * share


def audit(rho, times):
    """Interval of mu, at one in ten thousand, from guesses which of two records was there."""
    out = np.random.default_rng(1)
    pair = [FRAME, FRAME.assign(x=[2.0, *FRAME["x"][1:]])]
    sites, hits = [site_of(frame, epsilon=1e6) for frame in pair], 0
    for i in range(times):
        there = int(out.integers(2))
        noisy = counts(sites[there], rho, [*EDGES, 100.0 + i])[:4] - TRUTH
        # The likelihood ratio of the two: a record in the first bin, or in the last.
        guess = noisy[3] - noisy[0] > 1 or (noisy[3] - noisy[0] == 1 and bool(out.integers(2)))
        hits += guess == bool(there)
    low, high = beta.ppf(5e-5, hits, times - hits + 1), beta.ppf(1 - 5e-5, hits + 1, times - hits)
    return 2.0 * norm.ppf(low), 2.0 * norm.ppf(high)


def test_the_worst_pair_of_records_at_the_site(monkeypatch):
    """The interval contains mu = 1 for noise that pays for mu = 1, and not for half of that noise."""
    rho, mu, times = Fraction(1, 2), 1.0, 600
    low, high = audit(rho, times)
    # The discrete noise loses a little of the Gaussian's mu.
    assert low <= mu and high >= 0.85 * mu
    draw = privacy_budget.discrete_gaussian
    monkeypatch.setattr(
        privacy_budget, "discrete_gaussian", lambda variance, *rest: draw(variance / 4, *rest)
    )
    low, _ = audit(rho, times)
    assert low > mu


def shares(monkeypatch, bound):
    """Two sites whose random shares add up to a product; each share leaves with noise of its site."""
    product, drawn, rng = 12345, {}, np.random.default_rng(7)

    def share(data, state):
        if data.name not in drawn:
            first = int(rng.integers(-(2**62), 2**62))
            drawn.update(A=first, B=product - first)
        of = np.array([1]) if bound else None
        state.report(EntityCount(N), NoiseRequired("share", "product", 1, Fraction(10**10), of=of))
        value = (drawn.pop(data.name) + 2**63) % 2**64 - 2**63
        return {"share": np.array([value], dtype=np.int64)}

    line = ArrayDeclaration(
        "masked share", "a share", noisy=True, dtype="int64", behind=(EntityCount, NoiseRequired)
    )
    monkeypatch.setitem(FAMILIES, "toy", {"share": Step(share, gives={"share": line})})
    return product


def collect(sites, session):
    packed = [pack_request(Request(name, "toy", "share", {}, session)) for name in sites]
    return [
        unpack_reply(site.answer(one)).arrays["share"]
        for site, one in zip(sites.values(), packed, strict=True)
    ]


@pytest.mark.parametrize("bound", [False, True])
def test_no_share_of_a_product_leaves_without_noise(monkeypatch, bound):
    """With the share of one site, noise and all, the sum still has the other's noise."""
    product = shares(monkeypatch, bound)
    policy = Policy.strict(privacy=Budget(9.0, 1e-6))
    sites = {name: Site(name, FRAME, policy) for name in "AB"}
    found = []
    for session in ("s", "t"):
        parts = [part.view(np.uint64) for part in collect(sites, session)]
        found.append(int((parts[0] + parts[1]).view(np.int64)[0]) - product)
    # A share and its noise are drawn again in every session, unless the noise is bound to the statistic.
    assert all(0 < abs(error) < 10**6 for error in found) and (found[0] == found[1]) == bound
    assert len(sites["A"].site_ledger.charges.made) == (1 if bound else 2)
