"""Observed information with a non-canonical link: products of columns over the rows of one outcome."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from refusals import refused_for

import fedstat as fs
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.sums import Rows, evaluate
from fedstat.models.horizontal.session import add
from fedstat.models.run import FitAttempt

pytestmark = pytest.mark.filterwarnings("ignore")
N = 600
PUBLISHED = {
    name: {"kind": "number", "range": limits}
    for name, limits in {"a": [0, 1], "z": [20, 80], "y": [0, 9]}.items()
}
LINKS = {
    "probit": sm.families.Binomial(sm.families.links.Probit()),
    "cloglog": sm.families.Binomial(sm.families.links.CLogLog()),
    "square root": sm.families.Poisson(sm.families.links.Sqrt()),
}


def table(few=1):
    """A table where of the rows with a, only `few` of each site have the rarer outcome."""
    random = np.random.default_rng(7)
    site = np.array(["A", "B", "C"])[np.arange(N) % 3]
    a = (random.random(N) < 0.2) * 1.0
    y = (random.random(N) < 0.5) * 1.0
    for name in "ABC":
        rows = np.flatnonzero((a == 1.0) & (site == name))
        y[rows] = 1.0
        y[rows[: few if few > 1 or name == "A" else 0]] = 0.0
    return pd.DataFrame({"a": a, "z": random.uniform(20, 80, N), "y": y, "site": site})


def request(frame, policy, family, beta=(0.5, 0.0, 0.0)):
    """Sums over sites that a deviating coordinator receives at coefficients of its own."""
    published = dict.fromkeys("ABC", PUBLISHED)
    partition = fs.ClientPartition.from_frame(frame, by="site", policy=policy, published=published)
    model = fs.FederatedGLM.from_formula("y ~ a + z", partition, family=family)
    session = model._open_session("glm", masked=True)
    at = {"shift": np.zeros(3), "scale": np.ones(3), "observed": np.array(True), "beta": np.array(beta)}

    def protocol():
        yield session.opening() + session.request_all("start", {}, model.distribution.to_json())
        replies = yield session.request_all("sum_scores", at)
        return {name: add(replies, name) for name in replies[0].arrays}

    return FitAttempt(model, model._new_ledger()).run(protocol(), session.masked_sites)


def over_outcome(reported, family, outcome, other):
    """Products of columns over the rows of an outcome, from both informations at an intercept of .5."""
    weights = {}
    for y in (outcome, other):
        sums = evaluate(
            [Rows(np.ones((1, 1)), np.array([y]))],
            np.array([0.5]),
            DistributionSpec.of(family),
            observed=True,
        )
        weights[y], expected = sums.observed[0, 0], sums.information[0, 0]
    every = reported["information"] / expected
    return (reported["observed"] - weights[other] * every) / (weights[outcome] - weights[other])


def swapped(frame, family):
    """Counts have no second side: there the rarer outcome is an event."""
    return frame if isinstance(family, sm.families.Binomial) else frame.assign(y=1.0 - frame["y"])


@pytest.mark.parametrize("link", LINKS)
def test_the_only_row_of_a_level_with_an_outcome_is_not_revealed(link):
    family = LINKS[link]
    frame = swapped(table(), family)
    outcome = 0.0 if isinstance(family, sm.families.Binomial) else 1.0
    (person,) = np.flatnonzero((frame["a"] == 1.0) & (frame["y"] == outcome))
    # Where the owner does not ask for the rows behind products, the value of z follows.
    products = over_outcome(
        request(frame, fs.Policy.strict(products="any"), family), family, outcome, 1.0 - outcome
    )
    np.testing.assert_allclose(products[1, 1:], [1.0, frame["z"][person]], rtol=1e-9)
    with refused_for("rows behind a product", site="A"):
        request(frame, fs.Policy.strict(), family)


@pytest.mark.parametrize("link", LINKS)
def test_levels_with_enough_rows_of_each_outcome_are_no_obstacle(link):
    family = LINKS[link]
    assert "observed" in request(swapped(table(12), family), fs.Policy.strict(), family)


def test_a_canonical_link_has_no_such_products():
    reported = request(table(), fs.Policy.strict(), sm.families.Binomial())
    np.testing.assert_array_equal(reported["observed"], reported["information"])
