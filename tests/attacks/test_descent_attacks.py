"""Descent at chosen points: start values, batches, learning rates and epochs that would single out rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from served import ServedSites, run

import fedstat as fs
from fedstat.errors import ConsentError, EstimationError, PolicyError
from fedstat.federation.message import pack_request, unpack_request
from fedstat.federation.protocols.engine import LocalEngine

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = (fs.FedAvg, fs.FedAvgM, fs.FedProx, fs.QFedAvg)
SITES = ("North", "South", "West")
BINOMIAL = sm.families.Binomial()
LOOSE = fs.Policy(min_count=1, min_level_count=1)  # of owners with no least number of rows


def table(n=180):
    random = np.random.default_rng(2)
    x, z = random.uniform(0, 10, n).round(3), random.uniform(20, 80, n).round(1)
    y = (random.random(n) < 1.0 / (1.0 + np.exp(5.0 - x))).astype(float)
    return pd.DataFrame({"site": np.resize(SITES, n), "x": x, "z": z, "y": y, "c": random.poisson(3, n)})


FRAME = table()


def partition(policy="strict"):
    return fs.ClientPartition.from_frame(FRAME, by="site", policy=policy)


def fit(p, kind=fs.FedAvg, formula="y ~ x + z", family=BINOMIAL, **options):
    given = {"rounds": 2, "local_epochs": 1, "batch_size": None, "learning_rate": 1.0, "standardize": True}
    return kind.from_formula(formula, p, family=family).fit(**given | options)


def row_between_cuts(policy):
    """The row between two cuts, and what the difference of the gradients at two start values reports."""
    xs = np.sort(FRAME["x"].to_numpy())
    at, steps = len(xs) // 2, []
    for cut in (xs[at - 1 : at + 2][:-1] + xs[at : at + 2]) / 2.0:
        init = np.array([-1e6 * cut, 1e6, 0.0])
        found = fit(partition(policy), rounds=1, standardize=False, init=init)
        steps.append(init - found.params.to_numpy())
    change = (steps[0] - steps[1]) * len(FRAME)
    return xs[at], change[1] / change[0]


def test_start_values_would_report_the_row_between_two_cuts():
    assert np.isclose(*row_between_cuts(LOOSE), rtol=1e-6)
    with pytest.raises(PolicyError, match="starts an iteration at zeros only"):
        row_between_cuts("strict")


@pytest.mark.parametrize("kind", KINDS)
def test_strict_sites_start_at_zeros_and_take_all_rows(kind):
    p, family = partition(), sm.families.Gaussian() if kind is fs.FedProx else BINOMIAL
    for options, words in (({"init": [0.0, 0.0, 1e-9]}, "init"), ({"batch_size": 1}, "batch_size=None")):
        with pytest.raises(PolicyError, match=words):
            fit(p, kind, family=family, **options)
        planned = kind.from_formula("y ~ x + z", p, family=family).explain(
            rounds=2, standardize=True, **options
        )
        assert not planned.passes and words in str(planned)
    # The refusals were known before a row was read: they do not count, and other fits are answered.
    fit(p, kind, family=family, init=[0.0, 0.0, 0.0])
    assert not p.sites["North"].site_ledger.refusals


@pytest.mark.parametrize("rule", ["max_share", "remember"])
def test_owners_can_allow_batches_and_start_values(rule):
    allowed = {"max_share": ("batch_size", 8), "remember": ("init", [0.1, 0.0, 0.0])}
    loosened = {"max_share": {"max_share": 1.0}, "remember": {"remember": "rows"}}
    name, value = allowed[rule]
    fit(partition(fs.Policy.strict(**loosened[rule])), **{name: value})


OTHER_PATHS = {
    "learning_rate": {"learning_rate": 0.5},
    "local_epochs": {"local_epochs": 2},
    "standardize": {"standardize": False, "learning_rate": 1e-4},
    "another order": {"formula": "y ~ z + x"},
    "another origin": {"formula": "y ~ center(x) + z"},
    "twice": {"formula": "y ~ x + scale(x) + z"},
    "momentum": {"kind": fs.FedAvgM},
    "mu": {"kind": fs.FedProx, "mu": 0.1},
    "q": {"kind": fs.QFedAvg, "q": 2.0},
}


@pytest.fixture(scope="module")
def descended():
    """Strict sites that have answered one descent, and its result."""
    p = partition()
    return p, fit(p)


@pytest.mark.parametrize("path", OTHER_PATHS)
def test_a_model_has_one_path_over_all_sessions(path, descended):
    with pytest.raises(PolicyError, match="answered this model along another path"):
        fit(descended[0], **OTHER_PATHS[path])


def test_the_same_path_and_other_models_are_answered(descended):
    p, first = descended
    pd.testing.assert_series_equal(fit(p).params, first.params, check_exact=True)
    fit(p, rounds=4, seed=9)  # further along the same path; without batches nothing is drawn
    fit(p, formula="y ~ x")  # another model
    fit(p, family=sm.families.Binomial(sm.families.links.Probit()))
    fit(p, family=sm.families.Poisson(), formula="c ~ x + z", learning_rate=0.1)


def test_least_squares_has_the_same_sums_along_every_path():
    p = partition()
    for rate in (0.5, 0.2):
        fit(p, family=sm.families.Gaussian(), learning_rate=rate)


def test_a_descent_that_was_not_answered_leaves_no_path():
    p = partition()
    with pytest.raises(fs.errors.FedstatError):
        fit(p, formula="c ~ x + z", family=sm.families.Poisson(), learning_rate=1e9)
    fit(p, formula="c ~ x + z", family=sm.families.Poisson(), learning_rate=0.1)


def test_far_coefficients_of_a_path_are_refused_as_those_of_a_fit():
    """A learning rate beyond all measure makes cuts: few rows have weight. No path has begun by it."""
    p = partition()
    with pytest.raises(EstimationError, match="smaller learning_rate"):
        fit(p, learning_rate=1e5, local_epochs=3)
    fit(p)


class Deviating(LocalEngine):
    """A coordinator that replaces arrays of the rounds of averaging."""

    def __init__(self, sites, replaced):
        super().__init__(sites)
        self.replaced = replaced

    def _send(self, request, ledger):
        if request.step == "run_epochs":
            number = int(request.arrays["number"])
            request = replace(request, arrays={**request.arrays, **self.replaced(number)})
        return super()._send(request, ledger)


@pytest.mark.parametrize(
    ("replaced", "match"),
    [
        (lambda number: {"beta": np.array([1.0, 2.0, 3.0])}, "at the coefficients of the start"),
        (lambda number: {"number": np.array(number + 1)}, "expects round 1"),
        (lambda number: {"number": np.array(7)}, "expects round 1"),
    ],
)
@pytest.mark.parametrize("policy", ["open", "strict"])
def test_a_path_begins_at_its_start_and_leaves_out_no_round(replaced, match, policy):
    model = fs.FedAvg.from_formula("y ~ x + z", partition(policy), family=BINOMIAL)
    model.engine = Deviating(model.partition.sites, replaced)
    with pytest.raises(PolicyError, match=match):
        model.fit(rounds=2, batch_size=None)


def test_a_coordinator_cannot_choose_the_coefficients_of_a_later_round_twice():
    p = partition()
    fit(p)
    model = fs.FedAvg.from_formula("y ~ x + z", p, family=BINOMIAL)
    model.engine = Deviating(p.sites, lambda number: {"beta": np.full(3, 0.1)} if number else {})
    with pytest.raises(PolicyError, match="another path"):
        model.fit(rounds=2, batch_size=None, local_epochs=1, learning_rate=1.0, standardize=True)


PUBLISHED = {
    "x": {"kind": "number", "range": [0, 10]},
    "z": {"kind": "number", "range": [20, 80]},
    "y": {"kind": "number", "range": [0, 1], "levels": [0, 1]},
    "c": {"kind": "number", "range": [0, 20]},
}


class DeviatingSites(ServedSites):
    """Served sites whose messages a coordinator changes on their way."""

    replaced: Mapping[str, object] = MappingProxyType({})

    def send(self, site, request):
        message = unpack_request(request)
        if message.step == "start" and self.replaced:
            request = pack_request(replace(message, arrays={**message.arrays, **self.replaced}))
        return super().send(site, request)


def test_served_sites_remember_the_path_and_plans_bind_start_and_settings(tmp_path):
    frames = {name: FRAME[FRAME["site"] == name].drop(columns="site") for name in SITES}
    sites = DeviatingSites(tmp_path, frames, PUBLISHED)
    first = fit(sites.connect())
    for options, words in (
        ({"init": [1.0, 0.0, 0.0]}, "zeros only"),
        ({"batch_size": 4}, "batches"),
        ({"learning_rate": 0.5}, "another path"),
    ):
        with pytest.raises(PolicyError, match=words):
            fit(sites.connect(), **options)
    sites.restart()
    with pytest.raises(PolicyError, match="another path"):
        fit(sites.connect(), learning_rate=0.5)
    pd.testing.assert_series_equal(fit(sites.connect()).params, first.params, check_exact=True)
    # Owners of a site with looser rules approve every plan, with the start and the settings of the fit.
    for name in SITES:
        rules = tmp_path / name / "policy.toml"
        text = rules.read_text().replace('approval = "auto"', 'approval = "owner"')
        rules.write_text(
            text.replace('remember = "all"', 'remember = "rows"').replace(
                "max_share = 0.2", "max_share = 1.0"
            )
        )
    sites.restart()

    def approve():
        for name in SITES:
            for digest in list(sites.servers[name].site.pending):
                run("site", "approve", tmp_path / name, digest)

    given = {"init": [0.1, 0.0, 0.0], "batch_size": 8, "learning_rate": 0.25, "seed": 5}
    with pytest.raises(ConsentError):
        fit(sites.connect(), **given)
    (plan,) = sites.servers["North"].site.pending.values()
    bound = " ".join(text for step in plan.steps for text in step.texts)
    assert '"batch_size":8' in bound and '"learning_rate":0.25' in bound and '"seed":5' in bound
    approve()
    for changed in ({"seed": 6}, {"batch_size": 4}, {"learning_rate": 0.5}, {"init": [0.2, 0.0, 0.0]}):
        with pytest.raises(ConsentError, match="pending"):
            fit(sites.connect(), **given | changed)
    sites.replaced = {"init": np.array([9.0, 0.0, 0.0])}
    with pytest.raises(ConsentError):
        fit(sites.connect(), **given)
    sites.replaced = {}
    with pytest.raises(ConsentError, match="pending"):  # the attempt used the approval up
        fit(sites.connect(), **given)
    approve()
    fit(sites.connect(), **given)


@pytest.mark.parametrize("steep", [1e3, 1e8])
def test_cuts_in_a_later_round_are_not_answered(steep):
    """Probabilities of zero and one make a score the sum of the rows on one side of a cut."""
    model = fs.FedAvg.from_formula("y ~ x + z", partition(), family=BINOMIAL)
    cut = {"beta": np.array([0.0123 * steep, steep, 0.0])}
    model.engine = Deviating(model.partition.sites, lambda number: cut if number else {})
    with pytest.raises(EstimationError, match="nearly all weight"):
        model.fit(rounds=2, batch_size=None, local_epochs=1, learning_rate=1.0, standardize=True)
