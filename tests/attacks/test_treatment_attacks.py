"""Outcomes of single persons from effects of a treatment, by arms, cuts and weights of the attacker's choice.

Each attack reads a value where nothing is protected; under the strict policy one of its requests is refused.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import DescriptionError, EstimationError, PolicyError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.kernels.treatment import ALL, MEANS
from fedstat.models.treatment.protocol import TreatmentNewton
from fedstat.models.treatment.steps import FAMILY

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, VICTIM, SITES = 240, 17, ("S0", "S1", "S2")
NUMBER = {"kind": "number"}
ARMS = {"kind": "category", "levels": ["new", "old"]}
PUBLISHED = {
    "income": NUMBER | {"range": [0.5, 9.0]},
    "age": NUMBER | {"range": [20.0, 90.0]},
    "arm": ARMS,
    "other": ARMS,
}
STRICT = fs.Policy.strict(reasons="sent")
UNMASKED = fs.Policy.strict(reasons="sent", masked_only=False)
NOTHING = fs.Policy(min_count=1, min_level_count=1)


def table() -> pd.DataFrame:
    """Two columns of arms, which differ for the victim alone."""
    rng = np.random.default_rng(3)
    n = ROWS * len(SITES)
    arm = rng.choice(["new", "old"], n)
    other = arm.copy()
    other[VICTIM] = "old" if arm[VICTIM] == "new" else "new"
    return pd.DataFrame(
        {
            "site": np.repeat(SITES, ROWS),
            "age": rng.uniform(25.0, 85.0, n).round(2),
            "arm": arm,
            "other": other,
            "income": rng.uniform(1.0, 8.0, n).round(3),
        }
    )


FRAME = table()


def partition(policy=None, **more) -> fs.ClientPartition:
    return fs.ClientPartition.from_frame(
        FRAME, by="site", policy=policy, published=dict.fromkeys(SITES, PUBLISHED), **more
    )


def model(at, arm="arm", **given):
    return fs.TreatmentEffect.from_formula("income ~ 1", at, treatment=f"{arm} ~ age", **given)


def arm_sums(at, arm, **given):
    """Rows and sums of the outcome by arm at site S0, which a fit starts with."""
    one = model(at, arm, **given)
    session = one._open_session(FAMILY, False)
    replies = LocalEngine(at.sites).run(started(session, one, "ipw"), Ledger())
    return replies[2 * len(SITES)].arrays["arms"]


def started(session, one, method):
    return (yield session.opening() + session.request_all("start", {}, to_json(one._request(method))))


def test_arms_that_differ_in_one_person():
    open_to_all = partition(fs.Policy())
    apart = arm_sums(open_to_all, "arm") - arm_sums(open_to_all, "other")
    assert abs(abs(apart[0, 1]) - FRAME["income"][VICTIM]) < 1e-6
    strict = partition(STRICT)
    model(strict).fit("ipw")
    with pytest.raises(PolicyError):
        model(strict, "other").fit("ipw")


def balance_sums(at, arm):
    """Sums of the ages of each arm over all sites, by the balance of the arms."""
    balance = model(at, arm).balance(overlap=False, masked=False)
    weights, mean = balance._fit.weights[0], balance._fit.mean[0]
    return weights[:, 1] * mean[:, 0]


def test_balance_of_arms_that_differ_in_one_person():
    """No outcome is read, but the difference of two tables is the age of the victim."""
    open_to_all = partition(fs.Policy())
    apart = balance_sums(open_to_all, "arm") - balance_sums(open_to_all, "other")
    assert np.allclose(np.abs(apart), FRAME["age"][VICTIM], atol=1e-6)
    strict = partition(STRICT)
    model(strict).balance(overlap=False)
    with pytest.raises(PolicyError):
        model(strict, "other").balance(overlap=False)


@pytest.mark.parametrize("column", ["even", "drawn"])
def test_sampling_weights_that_differ_in_one_person(column):
    """The difference of the weighted sums is the victim's outcome, unless the second ones are refused."""
    drawn = np.random.default_rng(0).uniform(0.5, 2.0, len(FRAME))
    weight = np.ones(len(FRAME)) if column == "even" else drawn
    table = FRAME.drop(columns="other").assign(w=weight, other=weight + (FRAME.index == VICTIM))
    public = PUBLISHED | {name: NUMBER | {"range": [0.0, 10.0]} for name in ("w", "other")}

    given = {"by": "site", "published": dict.fromkeys(SITES, public)}
    at = fs.ClientPartition.from_frame(table, policy=fs.Policy(), **given)
    found = [arm_sums(at, "arm", weights=name) for name in ("w", "other")]
    assert abs(np.abs(found[1] - found[0])[:, 1].max() - FRAME["income"][VICTIM]) < 1e-6
    at = fs.ClientPartition.from_frame(table, policy=STRICT, **given)
    model(at, weights="w").fit("ipw")
    with pytest.raises(PolicyError):
        model(at, weights="other").fit("ipw")


def sums_at(at, points, stage, method="ipw", **given):
    """Replies of site S0 at propensity coefficients (constant, slope of age) and the outcome of mean zero."""
    one = model(at, **given)
    session, found = one._open_session(FAMILY, False), []
    replies = LocalEngine(at.sites).run(started(session, one, method), Ledger())
    design = session.opened(replies[: 2 * len(SITES)])
    p = len(design.names)
    for gamma in points:
        arrays = {"shift": np.zeros(p), "scale": np.ones(p), "beta": np.array([*gamma, 0.0, 0.0])}
        arrays["stage"] = np.array(stage)
        request = Request("S0", FAMILY, "sum_scores", arrays, session.session)
        found.append(unpack_reply(at.sites["S0"].answer(pack_request(request))).arrays)
    return found


def next_to_victim():
    """Return ages between the victim and both neighbors in age at its site."""
    ages = np.sort(FRAME["age"][:ROWS].to_numpy())
    age = FRAME["age"][VICTIM]
    place = int(np.searchsorted(ages, age))
    return (ages[place - 1] + age) / 2.0, (age + ages[place + 1]) / 2.0


def weight_of_victim(gamma):
    e = 1.0 / (1.0 + np.exp(-(gamma[0] + gamma[1] * FRAME["age"][VICTIM])))
    return 1.0 / (e if FRAME["arm"][VICTIM] == "old" else 1.0 - e)


def test_a_trimmed_row():
    """Rows with e below the bound are left out: a nearly flat score moves the cut from row to row."""
    slope, bound = 1e-5, 0.3
    cut = np.log(bound / (1.0 - bound))
    points = [(cut - slope * age, slope) for age in next_to_victim()]
    without, with_ = (one["score"] for one in sums_at(partition(NOTHING), points, MEANS, trim=bound))
    found = np.abs(with_ - without)[2:].max() / weight_of_victim(points[0])
    assert abs(found - FRAME["income"][VICTIM]) < 0.05
    for policy in (fs.Policy(), UNMASKED):
        with pytest.raises(PolicyError, match=r"differ|single out"):
            sums_at(partition(policy), points, MEANS, trim=bound)


def test_a_jump_in_the_derivative_of_matching_weights():
    slope = 1e-7
    points = [(-slope * age, slope) for age in next_to_victim()]
    one, two = (
        found["information"] for found in sums_at(partition(NOTHING), points, ALL, estimand="matching")
    )
    found = np.abs(one - two)[2:, 0].max()
    assert abs(found - FRAME["income"][VICTIM]) < 1e-2
    for policy in (fs.Policy(), UNMASKED):
        with pytest.raises(PolicyError, match=r"differ|single out"):
            sums_at(partition(policy), points, ALL, estimand="matching")


def test_matching_weights_that_are_those_of_the_treated_but_for_one_row():
    """Both differ in the rows with e above one half. The attacker leaves the oldest one there."""
    ages = np.sort(FRAME["age"][:ROWS].to_numpy())
    oldest, slope = FRAME["age"][:ROWS].idxmax(), 0.02
    points = [(-slope * ages[-2:].mean(), slope)]

    def apart(at):
        sums = [sums_at(at, points, MEANS, estimand=one)[0] for one in ("matching", "ATT")]
        score, weight = (sums[0][name] - sums[1][name] for name in ("score", "information"))
        return np.abs(score[2:]).max() / np.abs(weight[2:, 2:]).max()

    assert abs(apart(partition(NOTHING)) - FRAME["income"][oldest]) < 1e-6
    for policy in (fs.Policy(), UNMASKED):
        with pytest.raises(PolicyError, match=r"differ|single out"):
            apart(partition(policy))


def test_matching_weights_of_other_models(fitted):
    """The same for the weights of a balance in a regression."""
    ages = np.sort(FRAME["age"][:ROWS].to_numpy())
    gamma = (-0.02 * ages[-2:].mean(), 0.02)

    def apart(at):
        one, two = (weighted_sums(at, Forged(fitted, gamma, estimand=name)) for name in ("matching", "ATT"))
        return (one[1] - two[1]) / (one[0] - two[0])

    assert abs(apart(partition(NOTHING)) - FRAME["income"][FRAME["age"][:ROWS].idxmax()]) < 1e-6
    for policy in (fs.Policy(), UNMASKED):
        with pytest.raises(PolicyError, match=r"differ|single out"):
            apart(partition(policy))


@pytest.mark.parametrize("stage", [0, MEANS, ALL])
def test_probabilities_of_zero_and_one_are_no_cut(stage):
    """Sums at steep scores would be over the rows on one side: nothing is summed, whatever the policy."""
    points = [(-1e5 * age, 1e5) for age in next_to_victim()]
    for policy in (NOTHING, UNMASKED):
        assert not any(found["spread"] for found in sums_at(partition(policy), points, stage))


def test_an_arm_of_few_rows_is_refused_by_name():
    few = FRAME.assign(arm=np.where(FRAME.index % ROWS < 4, "new", "old"))
    at = fs.ClientPartition.from_frame(few, by="site", policy=fs.Policy(min_level_count=5))
    with pytest.raises(PolicyError, match="levels of column 'arm' have fewer"):
        model(at)


def test_few_rows_with_nearly_all_weight_are_refused():
    """At coefficients of the attacker's choice, the weights of an arm rest on its oldest persons."""
    (found,) = sums_at(partition(UNMASKED), [(20.0, -1.2)], MEANS)
    assert not found["spread"] and not found["score"].any()


def test_ordinary_analyses_pass_under_the_strict_policy():
    strict = partition(STRICT)
    balance = model(strict, propensity="common").balance(overlap=False)
    assert balance.arms["rows"].sum() == len(FRAME)
    fits = [model(strict).fit(method) for method in ("ipw", "ipw")]
    assert fits[0].params.equals(fits[1].params)
    both = fs.TreatmentEffect.from_formula("income ~ age", strict, treatment="arm ~ age", estimand="ATO")
    assert both.fit("aipw").converged and both.balance(overlap=False).arms["weighted"].sum() == len(FRAME)


ESTIMANDS = [{}, {"estimand": "ATT"}, {"estimand": "ATO"}, {"target": "S1"}, {"target": "S0"}]


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 3, 0, 1)])
def test_all_populations_pass_under_the_strict_policy(order):
    """In any order, with two targets and three missing cells."""
    frame = FRAME.assign(b=np.random.default_rng(8).normal(size=len(FRAME)).round(3))
    for row, column in ((5, "age"), (300, "b"), (600, "income")):
        frame.loc[row, column] = np.nan
    public = PUBLISHED | {"b": NUMBER | {"range": [-6.0, 6.0]}}
    at = fs.ClientPartition.from_frame(
        frame, by="site", policy=STRICT, published=dict.fromkeys(SITES, public)
    )
    for place in order:
        one = fs.TreatmentEffect.from_formula(
            "income ~ age + b", at, treatment="arm ~ age + b", **ESTIMANDS[place]
        )
        assert one.balance(overlap=False).arms["rows"].sum() == len(frame) - 3
        assert one.fit("aipw").converged and one.fit("ipw").converged


def test_products_are_judged_with_the_columns_of_their_equation():
    """One row has nearly all of a sum of squares that no equation has; means have no columns."""
    frame = FRAME.drop(columns="other").assign(age=np.random.default_rng(9).normal(size=len(FRAME)))
    here = frame.index[(frame["site"] == "S0") & (frame["arm"] == "new")][0]
    for income, passes in ((20.0, True), (60.0, False)):
        frame.loc[here, ["age", "income"]] = 6.5, income
        at = fs.ClientPartition.from_frame(frame, by="site", policy=STRICT)
        if passes:
            assert model(at, estimand="ATT").fit("ipw").converged
            continue
        with pytest.raises(PolicyError, match="one row makes up nearly all"):
            model(at, estimand="ATT").fit("ipw")


def test_a_masked_sum_to_which_one_site_adds():
    """Means over the rows of one site are a masked sum with zeros of all others, which hides nothing."""
    at = partition(STRICT)
    one = model(at, target="S0")
    session = one._open_session(FAMILY, True)
    request = one._request("standardization")
    newton = TreatmentNewton(session, request, 20, 1e-8)
    with pytest.raises(DescriptionError, match="only 1 would add"):
        LocalEngine(at.sites).run(session.hide(newton.run(False)), Ledger())


# ---- weights of other models, at coefficients of the attacker's choice --------------------------------


class Forged:
    """In place of a result: a propensity model that was never fitted."""

    def __init__(self, fitted, gamma, arm="arm", estimand="ATO"):
        weights = replace(fitted.weights, arm=arm, coefficients=tuple(gamma), estimand=estimand)
        self.propensity = replace(fitted, weights=replace(weights, shift=(0.0, 0.0), scale=(1.0, 1.0)))


def weighted_sums(at, given):
    """Sums of weights and of weighted outcomes at site S0, with which a weighted fit starts."""
    one = fs.FederatedOLS.from_formula("income ~ 1", at, weights=given)
    session = one._open_session("glm", False)
    text = one.distribution.to_json()

    def protocol():
        return (yield session.opening() + session.request_all("start", {}, text))

    return LocalEngine(at.sites).run(protocol(), Ledger())[2 * len(SITES)].arrays["response"]


@pytest.fixture(scope="module")
def fitted():
    return model(partition(NOTHING)).balance(overlap=False).propensity


def test_weights_that_jump_next_to_one_person(fitted):
    """Weights of overlap at a steep score are those of the rows on one side of a cut."""
    points = [(-1e5 * age, 1e5) for age in next_to_victim()]
    at = partition(NOTHING)
    one, two = (weighted_sums(at, Forged(fitted, gamma)) for gamma in points)
    assert abs(abs(one[1] - two[1]) - FRAME["income"][VICTIM]) < 1e-6
    for policy in (fs.Policy(), UNMASKED):
        at = partition(policy)
        with pytest.raises(PolicyError):
            for gamma in points:
                weighted_sums(at, Forged(fitted, gamma))


def test_weights_of_arms_that_differ_in_one_person(fitted):
    gamma = (0.4, 0.0)
    at = partition(NOTHING)
    one, two = (weighted_sums(at, Forged(fitted, gamma, arm)) for arm in ("arm", "other"))
    assert abs(abs(one[1] - two[1]) / abs(one[0] - two[0]) - FRAME["income"][VICTIM]) < 1e-6
    strict = partition(UNMASKED)
    with pytest.raises(PolicyError):
        for arm in ("arm", "other"):
            weighted_sums(strict, Forged(fitted, gamma, arm))


def test_weights_that_few_rows_carry(fitted):
    """Inverse probabilities at coefficients of the attacker's choice rest on the oldest persons."""
    given = Forged(fitted, (60.0, -1.2), estimand="ATT")
    with pytest.raises(PolicyError, match="nearly all weight"):
        fs.FederatedOLS.from_formula("income ~ 1", partition(UNMASKED), weights=given).fit()


def test_products_of_weighted_scores_at_two_propensity_models(fitted):
    """Both are near to one another: the difference of the covariances is no sum over few rows."""
    strict = partition(STRICT)
    balance = model(strict).balance(overlap=False)
    fits = [fs.FederatedOLS.from_formula("income ~ arm", strict, weights=balance).fit() for _ in range(2)]
    assert fits[0].cov_params().equals(fits[1].cov_params())
    moved = tuple(np.add(balance.propensity.weights.coefficients, (0.0, 1e-9)))
    with pytest.raises((PolicyError, EstimationError)):
        near = Forged(balance.propensity, moved, estimand="ATE")
        fs.FederatedOLS.from_formula("income ~ arm", strict, weights=near).fit()


def test_ordinary_weighted_models_pass_under_the_strict_policy():
    """In any order, and after the effect of the same treatment."""
    strict = partition(STRICT)
    effect = model(strict).fit("ipw")
    for given in (effect, model(strict).balance(overlap=False)):
        fit = fs.FederatedOLS.from_formula("income ~ arm", strict, weights=given).fit()
        assert abs(fit.params.iloc[1] + effect.params.iloc[0]) < 1e-6 or fit.converged
    fs.FederatedGLM.from_formula("income ~ arm + age", strict, weights=effect, family="poisson").fit()


@pytest.mark.parametrize("estimand", ["matching", "ATO"])
def test_all_models_report_the_sides_of_matching_weights(estimand):
    """Two rows of each site have a probability above one half."""
    rng = np.random.default_rng(4)
    n = ROWS * len(SITES)
    x = np.clip(rng.normal(size=n), -2.5, 2.5).round(3)
    x[np.arange(n) % ROWS < 2] = 4.0 + np.arange(n)[np.arange(n) % ROWS < 2] / n
    arm = np.where(rng.random(n) < 1.0 / (1.0 + np.exp(1.5 - 0.45 * x)), "new", "old")
    frame = FRAME.assign(x=x, arm=arm, time=rng.uniform(1.0, 9.0, n).round(1), event=rng.integers(0, 2, n))
    at = fs.ClientPartition.from_frame(frame, by="site", policy=fs.Policy())
    given = {"treatment": 'C(arm, levels=["old", "new"]) ~ x', "estimand": estimand}
    one = fs.TreatmentEffect.from_formula("income ~ 1", at, **given)
    times = fs.SurvivalEffect.from_formula("Surv(time, event) ~ 1", at, **given)
    allowed = fs.ClientPartition.from_frame(frame, by="site", policy=NOTHING)
    weights = fs.TreatmentEffect.from_formula("income ~ 1", allowed, **given).balance(overlap=False)
    found = weights.propensity.weights
    predictors = (np.column_stack([np.ones(n), x]) - found.shift) / found.scale @ found.coefficients
    assert (predictors.round(9) > 0.0).sum() == 6
    weighted = fs.FederatedOLS.from_formula
    for call in (
        lambda: one.balance(overlap=False),
        lambda: one.fit("ipw"),
        times.fit,
        lambda: times.fit(grid=[3.0, 9.0]),
        lambda: weighted("income ~ arm", at, weights=weights).fit(),
    ):
        if estimand == "ATO":
            assert call() is not None
            continue
        with pytest.raises(PolicyError, match="groups of entities"):
            call()
