"""Evaluations of one model after the other: single rows lie between the cuts of two."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from scipy.special import expit

import fedstat as fs
from fedstat.errors import DescriptionError, PolicyError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import Request
from fedstat.inference.evaluation import bin_edges
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.horizontal.evaluation import _evaluation_protocol, evaluate_rows, place_of_bins

BINOMIAL = sm.families.Binomial()
pytestmark = pytest.mark.filterwarnings("ignore")


def table(n=300):
    rng = np.random.default_rng(8)
    frame = pd.DataFrame({"site": np.repeat(["S0", "S1", "S2"], n // 3), "x": rng.normal(size=n)})
    frame["w"] = rng.normal(size=n)
    for response in ("y", "v"):
        frame[response] = (rng.random(n) < expit(-0.5 + frame["x"] + 0.5 * frame["w"])).astype(float)
    return frame


FRAME = table()


def partition(policy, **rules):
    policy = Policy.strict(**rules) if policy == "strict" else policy
    return fs.ClientPartition.from_frame(FRAME, by="site", policy=policy)


def fit(sites, response="y", family=None):
    return fs.FederatedGLM.from_formula(f"{response} ~ x + w", sites, family=family).fit()


def rows_found(sites, responses):
    """Rows of which predictor and response follow from evaluations of a model at cuts that wander.

    With the same coefficients rows come in the same order, so that the sums below two cuts, of c and of c + 1
    rows, differ by one row, of the same response or of another.
    """
    results = [fit(sites, response) for response in responses]
    beta, found = results[0].params.to_numpy(), 0
    below = {site: {} for site in sites.sites}
    for place, result in zip(np.linspace(0.0, 1.0, len(results)), results, strict=True):
        design = result._fit.design
        moved = replace(design, mean=design.mean + np.array([place / beta[0], 0.0, 0.0]))
        reported, _ = evaluate_rows(result.basis.agreement, moved, result.distribution, beta, sites)
        for k, site in enumerate(reported.sites):
            sums = np.cumsum([reported.n[k], reported.expected[k], reported.observed[k]], axis=1).T
            below[site] |= {round(c): (eta, y) for c, eta, y in sums}
    for site, sums in below.items():
        own = FRAME[FRAME["site"] == site]
        truth = np.sort(beta[0] + own[["x", "w"]].to_numpy() @ beta[1:])
        pairs = [(c, sums[c + 1][0] - sums[c][0]) for c in sums if c + 1 in sums]
        found += sum(abs(truth[c] - eta) < 1e-6 for c, eta in pairs)
    return found


def test_rows_do_not_lie_between_the_cuts_of_two_evaluations_of_a_response():
    assert rows_found(partition("open"), ["y"] * 15) > 30
    with pytest.raises(DescriptionError, match='evaluation = "any"'):
        rows_found(partition("strict"), ["y"] * 15)


def test_rows_do_not_lie_between_the_cuts_of_evaluations_of_two_responses():
    assert rows_found(partition("strict", evaluation="any"), ["y", "v"]) > 0
    with pytest.raises(DescriptionError, match='evaluation = "any"'):
        rows_found(partition("strict"), ["y", "v"])


def label_of_the_largest(policy, site="S0"):
    """Whether the label follows of the row with the largest prediction, from sums that cut it off.

    Errors of predictions that are one there and zero elsewhere are all events, less two if it is one.
    """
    result, sites = fit(partition("open"), family=BINOMIAL), partition(policy)
    own = FRAME[FRAME["site"] == site]
    eta = result.predict(own, which="linear").sort_values()
    cut, slope = eta.iloc[-2:].mean(), 200.0 / (eta.iloc[-1] - eta.iloc[-2])
    beta, place = result.params.to_numpy(), place_of_bins(result._fit.design, result.params.to_numpy())

    def requester():
        requests = next(
            _evaluation_protocol(result.basis.agreement, result.distribution, beta, place, False, False)
        )
        yield requests
        gamma = {"gamma": slope * np.array([-cut, 1.0])}
        (reply,) = yield [Request(site, "evaluation", "recalibrate", gamma, requests[0].session)]
        return reply.arrays

    reported = sites.engine.run(requester(), Ledger())
    return (
        bool(reported["spread"]) and reported["squares"] == own["y"].sum() + 1 - 2 * own["y"][eta.index[-1]]
    )


def test_the_largest_prediction_reveals_no_label():
    assert label_of_the_largest(Policy(min_count=1))
    assert not label_of_the_largest("open")
    with pytest.raises(PolicyError, match="masked"):
        label_of_the_largest("strict")
    assert not label_of_the_largest(Policy.strict(masked_only=False))


def test_sums_are_taken_of_the_model_that_was_evaluated_alone():
    sites = partition("strict", masked_only=False)
    requests = [Request("S0", "evaluation", "recalibrate", {"gamma": np.array([0.0, 1.0])}, "another")]
    with pytest.raises(DescriptionError, match="order"):
        sites.engine.run(iter_once(requests), Ledger())


def iter_once(requests):
    return (yield requests)


def test_the_same_evaluation_is_answered_again():
    sites = partition("strict")
    first, again = (fit(sites, family=BINOMIAL).evaluate() for _ in range(2))
    assert np.array_equal(first.n, again.n) and first.auc == again.auc


@pytest.mark.parametrize("link", ["Logit", "Probit", "Log", "Identity"])
def test_edges_of_probabilities_do_not_depend_on_rows(link):
    edges = bin_edges(DistributionSpec("Binomial", link), 3.0, 7.0)
    assert np.array_equal(edges, bin_edges(DistributionSpec("Binomial", link), 0.0, 1.0))
    means = DistributionSpec("Binomial", link).make().link.inverse(edges)
    assert np.all(np.diff(means) > 0.0) and len(means) == 321
    assert means[0] == pytest.approx(expit(-8.0)) and means[-1] == pytest.approx(expit(8.0))


def test_edges_are_those_of_the_model_or_fixed():
    assert np.array_equal(*(bin_edges(DistributionSpec("Poisson", "Log"), at, 2.0) for at in (0.0, 5.0)))
    edges = bin_edges(DistributionSpec("Gaussian", "Identity"), 120.0, 5.0)
    assert edges[[0, 80, -1]] == pytest.approx([70.0, 120.0, 170.0]) and np.all(np.diff(edges) > 0.0)
