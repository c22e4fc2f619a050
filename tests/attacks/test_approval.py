"""A site whose owner approves every analysis answers the plan that was approved, and no other.

Every departure is tried without approval, where it has to succeed, and with it, where nothing leaves.
"""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import people
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.codec import to_json
from fedstat.errors import ConsentError, FedstatError, MessageError, PartitionError
from fedstat.federation.disclosure.approval import describe_plan, plain_lines, read_plan
from fedstat.federation.message import Request, pack_request, unpack_reply, unpack_request
from fedstat.federation.protocols.engine import LocalEngine

pytestmark = pytest.mark.filterwarnings("ignore")


# Consent by itself: what is out of the order of a fit would be refused before a plan is looked at.
OWNER = fs.Policy.strict(approval="owner", order="any")
POLICIES = {"auto": fs.Policy.strict(), "owner": OWNER}


def rows(policy=OWNER):
    return people.rows(policy)


def model(partition, formula="y ~ age + z"):
    return fs.GLORE.from_formula(formula, partition)


def approve_all(partition):
    for site in partition.sites.values():
        for digest in list(site.pending):
            site.approve(digest)


def approved(fit, partition):
    """Run a fit that waits, consent to it at all sites, and run it again."""
    with pytest.raises(ConsentError, match="pending"):
        fit()
    approve_all(partition)
    return fit()


class Departing:
    """Sites that receive other requests than the coordinator proposed for approval."""

    def __init__(self, partition, change):
        self.answers = {name: site.answer for name, site in partition.sites.items()}
        self.change = change

    def through(self, name):
        def answer(request):
            first, *more = self.change(unpack_request(request))
            reply = self.answers[name](pack_request(first))
            for requested in more:
                self.answers[name](pack_request(requested))
            return reply

        return type("Door", (), {"answer": staticmethod(answer)})()

    @property
    def engine(self):
        return LocalEngine({name: self.through(name) for name in self.answers})


def departs(policy, change):
    """Fit as approved, with questions changed on their way; what the sites say, or None where they answer."""
    partition = rows(replace(POLICIES[policy], masked_only=False))
    fitted = model(partition)
    if policy == "owner":
        with pytest.raises(ConsentError):
            fitted.fit(masked=False)
        approve_all(partition)
    fitted.engine = Departing(partition, change).engine
    try:
        fitted.fit(masked=False)
    except FedstatError as error:
        return str(error)
    return None


def test_a_plan_waits_and_the_approved_analysis_gives_the_same_numbers():
    partition = rows()
    fitted = model(partition)
    entered = {name: site.site_ledger.entities for name, site in partition.sites.items()}
    with pytest.raises(ConsentError) as caught:
        fitted.fit()
    text = str(caught.value)
    for name, site in partition.sites.items():
        (digest,) = site.pending
        assert f"{name}: its policy (approval)" in text and digest in text and "fedstat site approve" in text
        assert site.site_ledger.entities == entered[name]
        assert site.site_ledger.refusals.total() == 0
    approve_all(partition)
    found = fitted.fit().params
    assert not any(site.pending for site in partition.sites.values())
    np.testing.assert_array_equal(found, model(rows(POLICIES["auto"])).fit().params)


def test_the_same_analysis_has_the_same_plan_and_a_consent_serves_once():
    first, second = rows(), rows()
    for partition in (first, second):
        with pytest.raises(ConsentError):
            model(partition).fit()
    digests = [[*site.pending] for site in first.sites.values()]
    assert digests == [[*site.pending] for site in second.sites.values()]
    approve_all(first)
    model(first).fit()
    with pytest.raises(ConsentError, match=digests[0][0]):
        model(first).fit()
    with pytest.raises(ConsentError, match="pending"):
        model(second, "y ~ z").fit()
    assert len(second.sites["S0"].pending) == 2


def test_a_denied_plan_is_refused_until_the_owner_decides_again():
    partition = rows()
    with pytest.raises(ConsentError):
        model(partition).fit()
    (digest,) = partition.sites["S0"].pending
    partition.sites["S0"].deny(digest[:10])
    with pytest.raises(ConsentError, match=r"S0.*denied"):
        model(partition).fit()
    with pytest.raises(PartitionError, match="no plan has"):
        partition.sites["S0"].approve("12")
    assert partition.sites["S0"].site_ledger.decisions[digest].verdict == "denied"
    approve_all(partition)
    partition.sites["S0"].approve(digest)
    assert model(partition).fit().converged


def test_the_owner_reads_what_would_be_answered():
    partition = rows()
    with pytest.raises(ConsentError):
        model(partition, "income ~ log(age)").fit(local=False)
    (plan,) = partition.sites["S1"].pending.values()
    text = "\n".join(describe_plan(plan))
    assert "Columns of S1 that it uses: income, age" in text
    assert "response income; terms log(age)" in text
    assert "only in a masked sum" in text and "sum_scores (glm), at most" in text


def other_formula(request):
    """Ask for another column than was proposed."""
    text = request.text.replace("age", "income") if request.step == "open_rows" else request.text
    return [replace(request, text=text)]


def other_family(request):
    return (
        [replace(request, text=request.text.replace("Binomial", "Gaussian"))]
        if request.step == "start"
        else [request]
    )


def more_rounds(request):
    """Ask for the sums at further points: each is as many equations in the rows."""
    if request.step != "sum_scores" or "beta" not in request.arrays:
        return [request]
    beta = request.arrays["beta"]
    return [
        request,
        *(replace(request, arrays={**request.arrays, "beta": beta + 0.01 * k}) for k in range(40)),
    ]


def in_clear(request):
    return [replace(request, masked=None)]


def other_step(request):
    if request.step != "judge":
        return [request]
    return [request, replace(request, step="fit_alone", arrays={}, text="")]


@pytest.mark.parametrize(
    "change, said",
    [
        (other_formula, "differs from the plan"),
        (more_rounds, "more than 50 times"),
        (other_step, "'fit_alone' more than 1 times"),
        (other_family, "differs from the plan"),
    ],
)
def test_another_analysis_than_the_one_approved_is_refused(change, said):
    assert said not in (departs("auto", change) or "")
    answer = departs("owner", change)
    assert answer is not None and "its policy (approval)" in answer and said in answer


def test_sums_that_were_to_be_masked_are_not_asked_unmasked():
    policy = replace(OWNER, masked_only=False, two_sites="warn")
    partition = rows(policy)
    fitted = model(partition)
    with pytest.raises(ConsentError):
        fitted.fit()
    approve_all(partition)
    fitted.engine = Departing(partition, in_clear).engine
    with pytest.raises(ConsentError, match="without masks"):
        fitted.fit()


def test_a_step_that_no_plan_has_is_refused_before_and_after():
    partition = rows()
    request = Request("S0", "glm", "fit_alone", {}, "s")
    with pytest.raises(FedstatError, match=r"its policy \(approval\).*no plan has step"):
        partition.sites["S0"].answer(pack_request(request))
    fitted = model(partition)
    approved(lambda: fitted.fit(local=False), partition)
    with pytest.raises(ConsentError, match="not in the plan"):
        partition.sites["S0"].answer(pack_request(replace(request, session=fitted._session)))


def test_a_plan_says_of_its_arrays_what_the_site_declares():
    partition = rows()
    fitted = model(partition)
    with pytest.raises(ConsentError):
        fitted.fit()
    (plan,) = partition.sites["S0"].pending.values()
    plan = replace(read_plan(to_json(plan), ""), prepared=())
    harmless = replace(plan.steps[-1].gives[0], what="nothing to worry about")
    reported = replace(plan, steps=(*plan.steps[:-1], replace(plan.steps[-1], gives=(harmless,))))
    request = Request("S0", "approval", "propose_plan", {}, fitted._session, to_json(reported))
    with pytest.raises(MessageError, match="not declared so"):
        partition.sites["S0"].answer(pack_request(request))


def proposed(change):
    """Have the owner of a site consent to a plan that says less than what is then asked."""
    partition = rows(replace(OWNER, masked_only=False))
    fitted = model(partition)
    with pytest.raises(ConsentError):
        fitted.fit(masked=False)
    site = partition.sites["S0"]
    (plan,) = site.pending.values()
    plan = change(replace(plan, prepared=()))
    unpack_reply(
        site.answer(
            pack_request(Request("S0", "approval", "propose_plan", {}, fitted._session, to_json(plan)))
        )
    )
    approve_all(partition)
    opening = Request("S0", "design", "open_rows", {}, fitted._session, plan.steps[0].texts[0])
    summing = Request("S0", "design", "sum_columns", {}, fitted._session)
    for request in (opening, summing):
        site.answer(pack_request(request))


def fewer_numbers(plan):
    first, second, *more = plan.steps
    gives = tuple(replace(array, numbers=2) for array in second.gives)
    return replace(plan, steps=(first, replace(second, gives=gives), *more))


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda plan: replace(plan, columns=("y", "age")), "columns z is not in"),
        (fewer_numbers, "'moments' of step 'sum_columns'"),
    ],
)
def test_a_plan_that_says_less_than_is_asked_is_worth_nothing(change, said):
    proposed(lambda plan: plan)
    with pytest.raises(ConsentError, match=said):
        proposed(change)


def test_words_from_elsewhere_do_not_move_the_owners_cursor():
    partition = rows()
    with pytest.raises(ConsentError):
        model(partition).fit()
    (plan,) = partition.sites["S0"].pending.values()
    lines = [*describe_plan(replace(plan, call="fit()\x1b[2J\n", learned=("nothing\r",)))]
    reported = "".join(lines)
    assert reported.isprintable() and "survey_rows" in reported
    assert "judge (glm), once: " in reported and " 1 number over 200 records" in reported
    assert len(set(lines)) == len(lines)


def test_what_was_asked_before_the_plan_stands_in_it_whatever_the_coordinator_says():
    partition = rows()
    fitted, other = model(partition), model(partition, "y ~ income")
    with pytest.raises(ConsentError):
        fitted.fit()
    (honest,) = partition.sites["S0"].pending.values()
    plan = replace(honest, prepared=())
    request = Request("S0", "approval", "propose_plan", {}, other._session, to_json(plan))
    unpack_reply(partition.sites["S0"].answer(pack_request(request)))
    (_, reported) = partition.sites["S0"].pending.values()
    assert reported.digest != honest.digest
    assert "terms income" in "\n".join(describe_plan(reported))


TRANSFORMED = "y ~ scale(age) + poly(z, 2) + bs(income, knots=(2e4,), lower_bound=0, upper_bound=1e6)"


def transforming():
    # One row has nearly all of the outer columns of a spline.
    return fs.Policy.strict(approval="owner", formulas="any", max_share=1.0)


def test_sums_for_transforms_wait_in_the_plan_of_the_fit():
    partition = rows(transforming())
    site = partition.sites["S0"]
    fitted = model(partition, TRANSFORMED)
    explained = fitted.explain()
    assert "transform_sums" in set(explained.table["step"])
    with pytest.raises(ConsentError, match="pending"):
        fitted.fit()
    assert not [e for e in site.ledger.entries if e.kind == "aggregate"]
    (plan,) = site.pending.values()
    assert [(one.step, one.most) for one in plan.steps][:2] == [("transform_sums", 3), ("open_rows", 1)]
    approve_all(partition)
    # In a process of its own, as by a script that is run again.
    again = model(partition, TRANSFORMED)
    plain = model(rows(fs.Policy.strict(formulas="any", max_share=1.0)), TRANSFORMED).fit()
    found = again.fit()
    np.testing.assert_array_equal(found.params, plain.params)
    for result in (found, approved(again.fit, partition)):
        assert "transform_sums" in set(result.ledger.to_frame()["step"])


KNOTS = "y ~ bs(age, df=4) + cr(bmi, df=3, constraints='center')"


def test_knots_from_counts_are_those_of_the_approved_analysis():
    """The plan names degrees of freedom; other splines and other functions are not in it."""
    partition = rows(transforming())
    plain = model(rows(fs.Policy.strict(formulas="any", max_share=1.0)), KNOTS).fit()
    again = model(partition, KNOTS)
    found = approved(again.fit, partition)
    np.testing.assert_array_equal(found.params, plain.params)
    assert list(found.params.index) == list(plain.params.index)
    assert "count_intervals" in set(found.ledger.to_frame()["step"])


@pytest.mark.parametrize(
    "forge",
    [
        lambda text: text.replace("bs(age", "bs(income"),
        lambda text: text.replace("df=4)", "df=5)"),
        lambda text: text.replace("extrapolation='extend'", "extrapolation='clip'"),
        lambda text: re.sub(r"bs\(age, knots=\(", "bs(age, knots=(41.0, ", text),
    ],
)
def test_another_spline_than_the_approved_one_has_no_knots_from_counts(forge):
    partition = rows(transforming())
    fitted = model(partition, KNOTS)
    with pytest.raises(ConsentError):
        fitted.fit()
    approve_all(partition)
    seen = []

    def changed(request):
        text = forge(request.text) if request.step == "open_rows" else request.text
        seen.append(text != request.text)
        return [replace(request, text=text)]

    fitted.engine = Departing(partition, changed).engine
    with pytest.raises(FedstatError):
        fitted.fit()
    assert any(seen)
    assert not [e for site in partition.sites.values() for e in site.ledger.entries if e.step == "sum_scores"]


def other_knots(request):
    """Send the knots of another spline than the approved formula has."""
    text = request.text.replace("20000.0", "90000.0") if request.step == "open_rows" else request.text
    return [replace(request, text=text)]


def other_state(request):
    """Center at a number that differs from the reported sums; which one cannot be known in advance."""
    text = (
        re.sub(r"(center\W+)[0-9.]+", r"\g<1>1.0", request.text)
        if request.step == "open_rows"
        else request.text
    )
    return [replace(request, text=text)]


def other_transform(request):
    text = (
        request.text.replace("scale(age)", "scale(income)")
        if request.step == "transform_sums"
        else request.text
    )
    return [replace(request, text=text)]


@pytest.mark.parametrize(
    "change, said",
    [(other_knots, "differs from"), (other_transform, "differs from"), (other_state, None)],
)
def test_other_transforms_than_the_ones_approved_are_refused(change, said):
    partition = rows(transforming())
    fitted = model(partition, TRANSFORMED)
    with pytest.raises(ConsentError):
        fitted.fit()
    approve_all(partition)
    seen = []

    def watched(request):
        seen.extend(one.text != request.text for one in change(request))
        return change(request)

    fitted.engine = Departing(partition, watched).engine
    if said is None:
        fitted.fit()
    else:
        with pytest.raises(ConsentError, match=said):
            fitted.fit()
    assert any(seen)


def test_a_consent_is_used_by_one_session_alone():
    partition = rows()
    one, other = model(partition), model(partition)
    for fitted in (one, other):
        with pytest.raises(ConsentError):
            fitted.fit()
    (plan,) = partition.sites["S0"].pending.values()
    approve_all(partition)
    one.fit()
    (opening,) = read_plan(to_json(plan), "").steps[0].texts
    with pytest.raises(ConsentError, match="pending"):
        partition.sites["S0"].answer(
            pack_request(Request("S0", "design", "open_rows", {}, other._session, opening))
        )


def test_a_plan_has_so_many_rounds_of_averaging():
    table = people.people(800, 4)
    partition = fs.ClientPartition.from_frame(table, by="site", policy=OWNER)
    averaged = fs.FedAvg.from_formula("y ~ age + z", partition)
    options = {"seed": 1, "batch_size": None, "standardize": True}
    assert len(approved(lambda: averaged.fit(rounds=5, **options), partition).params) == 3
    with pytest.raises(ConsentError, match="pending"):
        averaged.fit(rounds=6, **options)


def institutions(policy):
    rng = np.random.default_rng(2)
    X = rng.normal(size=(400, 6))
    k = range(400)
    return fs.ClientPartition.from_frames(
        {
            "A": pd.DataFrame(
                {"k": k, "y": X.sum(axis=1) + rng.normal(size=400), "a": X[:, 0], "b": X[:, 1]}
            ),
            "B": pd.DataFrame({"k": k, "c": X[:, 2], "d": X[:, 3]}).iloc[:340],
            "C": pd.DataFrame({"k": k, "e": X[:, 4], "f": X[:, 5]}).iloc[60:],
        },
        on="k",
        policy=policy,
    )


OF_KIND = {fs.VFEMRegression: ({}, {}), fs.VerticalGLM: ({"missing": "em"}, {"lam": 0.05})}
"""Options of a model of columns, and of its fit."""


@pytest.mark.parametrize("kind", OF_KIND)
def test_sites_with_different_columns(kind):
    missing, fitting = OF_KIND[kind]
    # Without dither, which differs between two sets of keys.
    partition = institutions(replace(OWNER, rounding="none"))
    fitted = kind.from_formula("y ~ a + c + e", partition, **missing)
    found = approved(partial(fitted.fit, **fitting), partition).params
    plain = kind.from_formula("y ~ a + c + e", institutions(fs.Policy.strict(rounding="none")), **missing)
    np.testing.assert_array_equal(found, plain.fit(**fitting).params)


def test_an_evaluation_has_a_plan_of_its_own():
    partition = rows()
    result = approved(model(partition).fit, partition)
    found = approved(result.evaluate, partition)
    plain = model(rows(POLICIES["auto"])).fit().evaluate()
    assert found.auc == plain.auc
    np.testing.assert_array_equal(found.n, plain.n)


def test_of_an_evaluation_the_counts_are_reported_that_were_approved(monkeypatch):
    partition = rows(replace(OWNER, evaluation="any"))
    result = approved(model(partition).fit, partition)
    with pytest.raises(ConsentError):
        result.evaluate()
    (plan,) = partition.sites["S0"].pending.values()
    assert [step.step for step in plan.steps] == ["open_rows", "bin_counts", "recalibrate"]
    assert plan.call == "evaluate()" and set(plan.columns) == {"y", "age", "z"}
    assert all(array.numbers for step in plan.steps for array in step.gives if array.array != "text")
    approve_all(partition)

    def twice(request):
        return [request, request] if request.step == "bin_counts" else [request]

    engine = Departing(partition, twice).engine
    monkeypatch.setattr(fs.ClientPartition, "engine", property(lambda self: engine))
    with pytest.raises(ConsentError, match="more than 1 times"):
        result.evaluate()


def test_a_score_test_has_a_plan_of_its_own():
    partition = rows(transforming())
    result = approved(model(partition).fit, partition)
    terms = "scale(bmi)"
    found = approved(lambda: result.score_test(terms), partition)
    plain = model(rows(fs.Policy.strict(formulas="any"))).fit().score_test(terms)
    assert found == plain
    with pytest.raises(ConsentError, match="pending"):
        result.score_test(terms)


PREDICTED = replace(OWNER, refused_kinds=frozenset(), per_entity="any", masked_only=False, rounding="none")


@pytest.mark.parametrize("kind", [fs.VFEMRegression, fs.VerticalGLM])
def test_predictions_have_a_plan_of_their_own(kind, tmp_path):
    missing, fitting = OF_KIND[kind]
    partition, other = institutions(PREDICTED), institutions(replace(PREDICTED, approval="auto"))
    formula = "y ~ scale(a) + c + e"
    fitted = kind.from_formula(formula, partition, **missing)
    result = approved(partial(fitted.fit, **fitting), partition)
    plain = kind.from_formula(formula, other, **missing).fit(**fitting)
    # How columns were coded is in the plan of the fit: a file of results is no analysis.
    result.save(tmp_path / "fit")
    found = approved(lambda: result.predict(partition), partition)
    pd.testing.assert_series_equal(found, plain.predict(other))
    if kind is fs.VFEMRegression:
        more = approved(result.get_prediction, partition).summary_frame()
        pd.testing.assert_frame_equal(more, plain.get_prediction().summary_frame())
        smaller = result.refit("y ~ c + e")
        smaller.save(tmp_path / "smaller")
    with pytest.raises(ConsentError, match="pending"):
        result.predict(partition)
    (plan,) = partition.sites["B"].pending.values()
    assert plan.call == "predict()" and plan.columns == ("c",)
    assert {array.kind: array.numbers for array in plan.steps[-1].gives} == {"per entity": 340}


def test_how_well_new_entities_are_predicted_is_one_analysis():
    partition, other = institutions(PREDICTED), institutions(replace(PREDICTED, approval="auto"))
    result = approved(fs.VFEMRegression.from_formula("y ~ a + c + e", partition).fit, partition)
    plain = fs.VFEMRegression.from_formula("y ~ a + c + e", other).fit()
    found = approved(lambda: result.prediction_rsquared(partition), partition)
    assert found == plain.prediction_rsquared(other)


def test_intervals_are_two_analyses_and_another_level_is_one():
    partition, other = institutions(PREDICTED), institutions(replace(PREDICTED, approval="auto"))
    result = approved(fs.VFEMRegression.from_formula("y ~ a + c + e", partition).fit, partition)
    plain = fs.VFEMRegression.from_formula("y ~ a + c + e", other).fit()
    counted = replace(PREDICTED, evaluation="any")
    calibration, new = institutions(counted), institutions(replace(counted, approval="auto"))
    with pytest.raises(ConsentError, match="pending"):
        result.predict_set(partition, calibration)
    (plan,) = calibration.sites["A"].pending.values()
    assert plan.call == "predict_set()" and "y" in plan.columns
    approve_all(calibration)
    for alpha in (0.1, 0.2):
        found = approved(lambda alpha=alpha: result.predict_set(partition, calibration, alpha), partition)
        pd.testing.assert_frame_equal(found, plain.predict_set(other, new, alpha))


@pytest.mark.parametrize(
    ("kind", "response"), [(fs.VFEMRegression, "y"), (fs.VFEMRegression, "y > 0"), (fs.VerticalGLM, "y > 0")]
)
def test_an_evaluation_over_columns_waits_once(kind, response):
    """Predictions, and what is counted of them, are one plan; every owner sees both."""
    options, fitting = ({"missing": "drop"}, {"lam": 0.05}) if kind is fs.VerticalGLM else ({}, {})
    options |= {"family": sm.families.Binomial()} if response == "y > 0" else {}
    kind = fs.VFEMGLM if "family" in options and kind is fs.VFEMRegression else kind
    policy = replace(PREDICTED, formulas="any")
    partition, other = institutions(policy), institutions(replace(policy, approval="auto"))
    formula = f"{response} ~ a + c + e"
    fitted = kind.from_formula(formula, partition, **options)
    result = approved(partial(fitted.fit, **fitting), partition)
    with pytest.raises(ConsentError, match="pending"):
        result.evaluate()
    plans = {name: list(site.pending.values()) for name, site in partition.sites.items()}
    assert all(len(found) == 1 and found[0].call == "evaluate()" for found in plans.values())
    assert "y" in plans["A"][0].columns
    assert {"open_response", "judge_predictions"} <= {step.step for step in plans["A"][0].steps}
    approve_all(partition)
    found, plain = result.evaluate(), kind.from_formula(formula, other, **options).fit(**fitting).evaluate()
    np.testing.assert_allclose(found.n, plain.n)
    assert found.recalibration.slope == pytest.approx(plain.recalibration.slope)


def test_what_is_reported_of_a_fit_afterwards_asks_nobody():
    partition = institutions(replace(OWNER, rounding="none"))
    result = approved(fs.VFEMRegression.from_formula("y ~ a + b + c + e", partition).fit, partition)
    glore = rows()
    pooled = approved(model(glore).fit, glore)
    request = [partition.sites["A"].site_ledger.entities, glore.sites["S0"].site_ledger.entities]
    result.leave_one_out(), result.mcar_test(), result.independence_tests()
    result.refit("y ~ a + c"), result.summary(), result.receipt()
    pooled.heterogeneity.summary(), pooled.site_estimates, pooled.vif(), pooled.summary(), pooled.receipt()
    assert [partition.sites["A"].site_ledger.entities, glore.sites["S0"].site_ledger.entities] == request
    assert not any(site.pending for site in (*partition.sites.values(), *glore.sites.values()))


def test_what_grows_from_round_to_round_is_foreseen_at_the_coordinators_own_site_as_well():
    """More rounds than were rehearsed, with products of as many steps as are remembered."""
    partition = institutions(fs.Policy(approval="owner"))
    binary = fs.VFEMGLM.from_formula("y > 0 ~ a + c + e", partition, family=sm.families.Binomial())
    assert binary.coordinator == "A"
    result = approved(lambda: binary.fit(tol=1e-9), partition)
    assert len(result.trace) > 4


def test_a_plan_says_what_other_sites_learn_where_sums_are_masked():
    policy = fs.Policy.strict(approval="owner")
    partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital", policy=policy)
    with pytest.raises(ConsentError):
        fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
    (plan,) = partition.sites["Hungary"].pending.values()
    _, together, _ = plain_lines(plan, policy)
    assert together.endswith(
        "The other sites learn, and the coordinator does not, which levels of two columns occur together at "
        "Hungary."
    )
