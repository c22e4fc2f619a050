"""Noise that is averaged away: an analyst repeats a private fit with requests that differ in writing only.

Every answer with noise of its own has to be charged to the budget of every site that added it, until nothing
is left; then the mean of all answers discloses no more than the budget allows. An equal request gets the same
numbers, and is free.
"""

from __future__ import annotations

from itertools import chain, cycle

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.privacy.zcdp import epsilon_of_zcdp, rho_of_budget

pytestmark = pytest.mark.filterwarnings("ignore")

N, EACH, DELTA = 80, 0.4, 1e-6
BUDGET = 0.75
"""Three fits of epsilon 0.4 cost about 0.7: charges add up as rho, and epsilon grows as its root."""
LEVELS = {"a": [0, 1, 2], "b": [0, 1], "c": (-3, 3)}
POINTS = np.linspace(0.0, 1.0, 12)
WAVES = np.array([np.ones(12), np.sqrt(2) * np.cos(np.pi * POINTS)])
CURVES = ("u", "v", "y")


def strict():
    return fs.Policy.strict(privacy=fs.Budget(BUDGET, DELTA))


def synthesis():
    """A partition, and fits of it that ask for the same in other words."""
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"a": np.arange(N) % 3, "b": np.arange(N) % 2, "c": random.normal(size=N).clip(-3, 3)}, dtype=float
    )
    held = {"A": ["a"], "B": ["b"], "C": ["c"]}
    partition = fs.ClientPartition.from_frame(frame, columns=held, policy=strict())
    words = (
        {},
        {"columns": ["c", "b", "a"]},
        {"bounds": dict(reversed(LEVELS.items()))},
        {"bounds": LEVELS | {"a": [0.0, 1.0, 2.0], "c": (-3.0, 3.0)}},
        {"missing": "pairs"},
        {"coordinator": "A"},
        {"epsilon": EACH * (1.0 + 1e-9)},
    )

    def fit(request):
        return fs.CopulaSynthesizer(partition, **{"epsilon": EACH, "bounds": LEVELS} | request).fit()

    def released(result):
        """Return the noisy products, in any order of the columns: correlations may be cut to the same."""
        return np.sort(np.asarray(result._record.fit.products, dtype=float), axis=None).round(9)

    return partition, words, fit, released


def boosting():
    """The same of private boosting with curves."""
    random = np.random.default_rng(1)
    wide = [
        pd.DataFrame(random.normal(size=(N, 2)) @ WAVES).rename(columns=lambda j, c=c: f"{c}_{j}")
        for c in CURVES
    ]
    curves = {name: fs.Curve(f"{name}_*", domain=(0, 1)) for name in CURVES}
    held = {"A": ["u"], "B": ["v"], "C": ["y"]}
    partition = fs.ClientPartition.from_frame(
        pd.concat(wide, axis=1), columns=held, curves=curves, policy=strict()
    )
    public = dict.fromkeys(CURVES, fs.PublicCurve(POINTS, np.zeros(12), WAVES, np.ones(2)))
    words = ({}, {"formula": "y(t) ~ v + u"}, {"public": dict(reversed(public.items()))}, {"epsilon": 0.4})

    def fit(request):
        request = {"formula": "y(t) ~ u + v", "epsilon": EACH, "public": public} | request
        formula = request.pop("formula")
        model = fs.FedFunctionBoost.from_formula(formula, partition, **request)
        return model.source, model.fit(steps=1)

    return partition, words, fit, lambda found: found[0]._released[0].products.astype(float)


def spent(partition):
    return {name: site.site_ledger.charges.spent for name, site in partition.sites.items()}


@pytest.mark.parametrize("make", [synthesis, boosting])
def test_equivalent_requests_are_charged_until_the_budget_is_spent(make):
    partition, words, fit, released = make()
    answers, free = [], []
    with pytest.raises(PolicyError, match="privacy budget"):
        for number, request in enumerate(chain(words, words, cycle([{}]))):
            before = spent(partition)
            # Each of the words twice; then with budgets that differ a little, until all is spent.
            differ = {"epsilon": EACH * (1.0 - number * 1e-6)} if number >= 2 * len(words) else {}
            answers.append(released(fit(request | differ)))
            costs = [spent(partition)[name] - before[name] for name in before]
            noise_is_new = not any(np.array_equal(answers[-1], one) for one in answers[:-1])
            assert all(costs) if noise_is_new else not any(costs)
            free.append(not noise_is_new)
            assert len(answers) < 20
    assert any(free)
    # Noise of three fits at most was drawn, and no more was charged than the owner allows.
    distinct = {np.sort(one, axis=None).round(6).tobytes() for one in answers}
    assert len(distinct) <= 3
    assert max(spent(partition).values()) <= rho_of_budget(BUDGET, DELTA)


def test_an_analysis_that_the_budget_does_not_allow_is_charged_nothing():
    """The margins alone would fit into what is left, and the products not: neither is charged."""
    partition, _, fit, _ = synthesis()
    fit({"epsilon": 0.7})
    before = spent(partition)
    with pytest.raises(PolicyError, match=r"this analysis costs .* repeat an earlier one: it is free"):
        fit({"epsilon": 0.4})
    assert spent(partition) == before
    fit({"epsilon": 0.7})
    assert spent(partition) == before


def test_the_epsilon_of_a_synthesis_is_that_of_the_accounts():
    partition, _, fit, _ = synthesis()
    parts = fit({}).privacy.set_index("record")
    for name, rho in spent(partition).items():
        row = parts.loc[f"its part at {name}"]
        assert float(rho) == pytest.approx(row.rho_margins + row.rho_products, rel=1e-12)
        assert epsilon_of_zcdp(rho, DELTA) == pytest.approx(row.epsilon, rel=1e-9)
        assert row.epsilon <= EACH


def test_the_epsilon_of_boosting_is_that_of_the_accounts():
    partition, _, fit, _ = boosting()
    _, result = fit({})
    charged = max(spent(partition).values())
    assert epsilon_of_zcdp(charged, DELTA) <= EACH
    assert charged == pytest.approx(float(rho_of_budget(EACH, DELTA)), rel=1e-6)
    assert f"epsilon {EACH:g}" in " ".join(str(result.summary()).split())


def test_an_equal_request_to_one_site_is_free():
    """A site without others has no shares of products to repeat."""
    frame = pd.DataFrame({"a": np.arange(N) % 3, "b": np.arange(N) % 2}, dtype=float)
    partition = fs.ClientPartition.from_frame(frame, columns={"A": ["a", "b"]}, policy=strict())
    bounds = {name: LEVELS[name] for name in "ab"}
    first, again = (fs.CopulaSynthesizer(partition, EACH, bounds).fit() for _ in range(2))
    assert again.correlation.equals(first.correlation)
    assert partition.sites["A"].privacy.releases == 2
