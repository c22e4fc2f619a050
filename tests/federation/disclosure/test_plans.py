"""Plans at their limits: how often, how much and in which words an owner has consented, step by step."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fedstat.errors import ConsentError, PartitionError
from fedstat.federation.audit.event_log import PlanDecision, SiteLedger
from fedstat.federation.disclosure.approval import (
    CHANGING_FIELDS,
    DESIGN_FAMILY,
    AnalysisPlan,
    Approvals,
    FollowedPlan,
    PlannedStep,
    PreparedStep,
    ReleasedArray,
    bound_text,
    complete_digest,
    describe_plan,
    formula_of,
    plain_lines,
    undeclared_part,
)
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.message import ArrayDeclaration, Request, Step

TOTAL = ReleasedArray("total", "aggregate", "a sum", masked=False, numbers=3, entities=40)
HIDDEN = ReleasedArray("hidden", "aggregate", "a hidden sum", masked=True, numbers=1, entities=0)
WORDS = ReleasedArray("text", "control", "names", masked=False, numbers=0, entities=0)
ANY = ReleasedArray("any", "control", "of any size", masked=False, numbers=0, entities=0)
COUNT = PlannedStep("toy", "count", 2, masked=False, texts=("",), gives=(TOTAL, HIDDEN, WORDS, ANY))
PLAN = AnalysisPlan("Kiel", "fit()", "y ~ x", "Gaussian", ("x", "y"), (COUNT,), 7, ())
DECLARED = {
    "toy": {
        "count": Step(
            dict,
            gives={
                "total": ArrayDeclaration("aggregate", "a sum"),
                "hidden": ArrayDeclaration("aggregate", "a hidden sum", maskable=True),
                "any": ArrayDeclaration("control", "of any size"),
            },
            text_out=ArrayDeclaration("control", "names"),
        )
    }
}
PREPARING = Step(dict, gives={"has": ArrayDeclaration("presence", "who is there")})


def ask_count(**changes):
    return replace(Request("Kiel", "toy", "count", {}, "s"), **changes)


def followed(plan=PLAN, consent=True):
    """A session that follows a plan, and the approvals of its site."""
    approvals, session = Approvals("Kiel", SiteLedger()), FollowedPlan()
    digest, _ = approvals.propose(plan)
    if consent:
        approvals.decide(digest, "approved", "owner")
    session.follow(plan, digest)
    return session, approvals


# ---- a session that follows its plan ------------------------------------------------------------------


def test_a_step_is_asked_as_often_as_planned_and_the_consent_is_used_once():
    session, approvals = followed()
    for _ in range(COUNT.most):
        session.admit(approvals, ask_count(), DECLARED["toy"]["count"])
    with pytest.raises(ConsentError, match="more than 2 times"):
        session.admit(approvals, ask_count(), DECLARED["toy"]["count"])
    other = FollowedPlan()
    other.follow(PLAN, PLAN.digest)
    with pytest.raises(ConsentError, match="pending"):
        other.admit(approvals, ask_count(), DECLARED["toy"]["count"])


def test_a_refused_request_uses_no_consent():
    session, approvals = followed()
    for wrong in (ask_count(step="other"), ask_count(family="other"), ask_count(text='{"a": "b"}')):
        with pytest.raises(ConsentError, match="plan with digest"):
            session.admit(approvals, wrong, DECLARED["toy"]["count"])
    assert approvals.status(PLAN.digest) == "approved"


@pytest.mark.parametrize("consent", [False, True])
def test_nothing_of_a_plan_is_answered_without_consent(consent):
    session, approvals = followed(consent=consent)
    if consent:
        session.admit(approvals, ask_count(), DECLARED["toy"]["count"])
    else:
        with pytest.raises(ConsentError, match="pending"):
            session.admit(approvals, ask_count(), DECLARED["toy"]["count"])


@pytest.mark.parametrize(
    ("planned", "asked", "passes"), [(True, None, False), (True, 0, True), (False, None, True)]
)
def test_a_sum_that_was_to_be_masked_is_masked(planned, asked, passes):
    plan = replace(PLAN, steps=(replace(COUNT, masked=planned),))
    session, approvals = followed(plan)
    if passes:
        session.admit(approvals, ask_count(masked=asked), DECLARED["toy"]["count"])
    else:
        with pytest.raises(ConsentError, match="without masks"):
            session.admit(approvals, ask_count(masked=asked), DECLARED["toy"]["count"])


@pytest.mark.parametrize(
    ("arrays", "columns", "passes"),
    [
        ({"total": np.zeros(3)}, ("x", "y"), True),
        ({"total": np.zeros(2)}, ("x",), True),
        ({"total": np.zeros(4)}, ("x",), False),
        ({"any": np.zeros(400)}, (), True),
        ({"total": np.zeros(3), "hidden": np.zeros(2)}, (), False),
        ({"other": np.zeros(1)}, (), False),
        ({"total": np.zeros(3)}, ("x", "z"), False),
    ],
)
def test_a_reply_has_no_more_numbers_and_columns_than_planned(arrays, columns, passes):
    session, approvals = followed()
    if passes:
        session.hold(approvals, ask_count(), arrays, columns)
    else:
        with pytest.raises(ConsentError, match="z is not in" if "z" in columns else "of this size"):
            session.hold(approvals, ask_count(), arrays, columns)
    assert not session.prepared


@pytest.mark.parametrize(("n_sites", "passes"), [(0, False), (1, False), (2, False), (3, True), (4, True)])
def test_a_masked_sum_is_over_no_fewer_sites_than_planned(n_sites, passes):
    session, approvals = followed(replace(PLAN, among=3, steps=(replace(COUNT, masked=True),)))
    held = (approvals, ask_count(masked=0), {"total": np.zeros(3)}, ("x",), n_sites)
    if passes:
        session.hold(*held)
    else:
        with pytest.raises(ConsentError, match=f"a sum over {n_sites} sites is not in"):
            session.hold(*held)
    # Without a mask no sites are counted.
    session.hold(approvals, ask_count(), {"total": np.zeros(3)}, ("x",), n_sites)


@pytest.mark.parametrize(
    ("family", "kind", "prepares", "passes"),
    [
        (DESIGN_FAMILY, "presence", False, True),
        (DESIGN_FAMILY, "aggregate", False, False),
        ("toy", "presence", True, True),
        ("toy", "presence", False, False),
        ("toy", "aggregate", True, False),
    ],
)
def test_before_a_plan_only_its_design_is_answered(family, kind, prepares, passes):
    gives = {
        "has": ArrayDeclaration("presence", "who is there"),
        "more": ArrayDeclaration(kind, "more", behind=(type(PLAN),)),
    }
    step, session = Step(dict, gives=gives, prepares=prepares), FollowedPlan()
    approvals = Approvals("Kiel", SiteLedger())
    if passes:
        session.admit(approvals, ask_count(family=family), step)
    else:
        with pytest.raises(ConsentError, match="no plan has step"):
            session.admit(approvals, ask_count(family=family), step)


@pytest.mark.parametrize(("n", "passes"), [(999, True), (1000, False)])
def test_before_a_plan_a_thousand_requests_are_answered(n, passes):
    session, approvals = FollowedPlan(), Approvals("Kiel", SiteLedger())
    request = ask_count(family=DESIGN_FAMILY)
    for k in range(n):
        session.hold(approvals, replace(request, text=str(k)), {}, ())
        session.hold(approvals, replace(request, text=str(k)), {}, ())  # a repetition is the same request
    assert len(session.prepared) == n
    if passes:
        session.admit(approvals, request, PREPARING)
    else:
        with pytest.raises(ConsentError, match="no plan has step"):
            session.admit(approvals, request, PREPARING)


# ---- decisions of the owner ---------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "passes"), [(99, True), (100, False)])
def test_a_hundred_plans_wait(n, passes):
    approvals = Approvals("Kiel", SiteLedger())
    plans = [replace(PLAN, rounds=k) for k in range(n + 1)]
    for plan in plans[:-1]:
        approvals.propose(plan)
    assert approvals.propose(plans[0])[1] == "pending"  # it waits already
    if passes:
        approvals.propose(plans[-1])
    else:
        with pytest.raises(ConsentError, match="at most 100 waiting plans"):
            approvals.propose(plans[-1])
        approvals.decide(plans[0].digest, "denied", "owner")
        assert approvals.propose(plans[0])[1] == "denied"
        approvals.propose(plans[-1])
    assert len(approvals.pending) == min(n + 1, 100)


@pytest.mark.parametrize(("when", "verdict"), [(4, "approved"), (5, "approved"), (6, "denied")])
def test_the_newest_decision_stands(when, verdict):
    class Store:
        def __init__(self):
            self.found, self.settled = [], []

        def decided(self):
            return list(self.found)

        def settle(self, decision):
            self.settled.append(decision)

        def waiting(self):
            return {}

    store = Store()
    approvals = Approvals("Kiel", SiteLedger(), store)
    store.found = [PlanDecision("a", "approved", "owner", 5), PlanDecision("a", "denied", "owner", when)]
    assert approvals.status("a") == verdict
    assert store.settled == store.found


@pytest.mark.parametrize(
    ("given", "found"), [("ab", "abc"), ("AB", "abc"), ("abd", "abd"), ("", None), ("a", None), ("x", None)]
)
def test_the_beginning_of_a_digest_names_one_plan(given, found):
    plans = ["abc", "abd"] if len(given) != 2 else ["abc", "bcd"]
    if found is None:
        with pytest.raises(PartitionError, match="2 plans have" if given == "a" else "no plan has"):
            complete_digest("Kiel", given, plans)
    else:
        assert complete_digest("Kiel", given, plans) == found


# ---- what of a request is bound by a plan -------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("no JSON", "no JSON"),
        ('"a word"', ""),
        ("3", ""),
        ('{"b": 1, "a": 2.5}', '{"a":0,"b":0}'),
        ('{"a": true, "b": null, "c": "d"}', '{"a":true,"b":null,"c":"d"}'),
        ('{"a": [1, {"number": 4}]}', '{"a":[0,{"number":0}]}'),
        ("[1, true, [2]]", "[0,true,[0]]"),
        (json.dumps(dict.fromkeys(sorted(CHANGING_FIELDS), "x") | {"kept too": "x"}), '{"kept too":"x"}'),
    ],
)
def test_numbers_of_a_request_are_not_bound_and_its_words_are(text, bound):
    assert bound_text(ask_count(text=text)) == bound


def coding(**state):
    return json.dumps({"question": "q", "spec": json.dumps({"names": [1], "state": state})})


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (coding(**{"scale(x)": [1.0]}), coding(**{"scale(x)": [2.0]}), True),
        (coding(**{"scale(x)": [1.0]}), coding(**{"scale(z)": [1.0]}), False),
        (coding(**{"bs(x, 3)": [1.0]}), coding(**{"bs(x, 3)": [2.0]}), False),
        (coding(**{"cr(x, constraints=1)": [1.0]}), coding(**{"cr(x, constraints=1)": [2.0]}), True),
        ('{"question": "q", "targets": 1}', '{"question": "q", "targets": 2}', True),
        ('{"question": "q", "targets": 1}', '{"question": "p", "targets": 1}', False),
        ('{"question": "q", "spec": 1}', '{"question": "q", "spec": 2}', False),
        ('{"other": 1}', '{"other": 2}', False),
        ('{"targets": 1}', '{"targets": 2}', False),
        ("[1]", "[2]", False),
    ],
)
def test_a_design_is_bound_to_the_letter_but_for_states_that_follow_from_sums(one, other, same):
    first, second = (bound_text(ask_count(family=DESIGN_FAMILY, text=text)) for text in (one, other))
    assert first and (first == second) is same


def test_a_request_before_a_plan_is_kept_with_the_digest_of_its_arrays():
    a, b = np.zeros(3), np.ones(2)
    one = PreparedStep.of(ask_count(arrays={"a": a, "b": b}))
    assert one == PreparedStep.of(ask_count(arrays={"b": b, "a": a})) and len(one.digest) == 64
    others = [{"a": b, "b": a}, {"a": a}, {"a": a.reshape(3, 1), "b": b}, {"a": a, "c": b}]
    assert one not in [PreparedStep.of(ask_count(arrays=arrays)) for arrays in others]
    assert PreparedStep.of(ask_count()).digest == ""


# ---- what the owner reads -----------------------------------------------------------------------------


def test_a_plan_is_counted_by_kind():
    more = replace(COUNT, step="more", most=5, gives=(TOTAL, replace(WORDS, numbers=2)))
    assert replace(PLAN, steps=(COUNT, more)).numbers() == {
        "aggregate": 2 * 3 + 5 * 3,
        "aggregate, masked": 2,
        "control": 5 * 2,
    }


def test_the_owner_reads_every_step_with_its_size():
    once = replace(COUNT, step="once", most=1, gives=())
    lines = list(describe_plan(replace(PLAN, steps=(COUNT, once))))
    counted = next(line for line in lines if "count (toy)" in line)
    assert "at most 2 times" in counted
    assert "a sum (aggregate; 3 numbers over 40 records)" in counted
    assert "a hidden sum (aggregate, only in a masked sum; 1 number)" in counted
    assert "names (control; a text)" in counted and "of any size (control; any size)" in counted
    assert next(line for line in lines if "once (toy)" in line).endswith("once: nothing")
    assert any("6 (aggregate), 2 (aggregate, masked)" in line for line in lines)
    assert lines[-1].strip() == "No party learns anything."
    assert list(describe_plan(replace(PLAN, learned=("All of it.",))))[-1].strip() == "All of it."
    empty = list(describe_plan(replace(PLAN, steps=(), columns=())))
    assert [line.rsplit(": ", 1)[1] for line in empty if ": no" in line] == ["none", "nothing", "none"]


@pytest.mark.parametrize(("n", "more"), [(1, ""), (12, ""), (13, " and 1 more")])
def test_the_owner_reads_twelve_names(n, more):
    names = [f"v{k}" for k in range(n)]
    request = PreparedStep("survey", json.dumps({"terms": names, "weights": {"freq": "w"}, "labels": []}), "")
    (line,) = [one for one in describe_plan(replace(PLAN, prepared=(request,))) if "terms v0" in one]
    assert f"terms {', '.join(names[:12])}{more}; weights freq w" in line
    assert "groups" not in line


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"columns": ["x"]}, "columns x"),
        ({"columns": ["x"], "terms": ["z"]}, "terms z"),
        ({"columns": ["x"], "response": "y"}, "response y"),
        ({"question": '{"response": "y"}'}, "response y"),
        ({"question": 3, "response": "y"}, "response y"),
        ({}, ""),
        ([1], ""),
        ("a word", ""),
    ],
)
def test_the_owner_reads_what_a_design_asks_for(content, expected):
    design = PlannedStep(DESIGN_FAMILY, "survey", 1, masked=False, texts=(json.dumps(content),), gives=())
    lines = [one for one in describe_plan(replace(PLAN, steps=(design, COUNT))) if "It requests:" in one]
    assert [line.split(": ", 1)[1] for line in lines] == ([expected] if expected else [])
    elsewhere = replace(design, family="toy")  # its text is no design
    assert not [one for one in describe_plan(replace(PLAN, steps=(elsewhere,))) if "It requests:" in one]


def test_requests_before_the_plan_are_counted_for_the_owner():
    request = tuple(
        PreparedStep(step, "", digest) for step, digest in (("survey", "a"), ("survey", "b"), ("open", ""))
    )
    assert any(
        line.endswith(": survey (2 times), open") for line in describe_plan(replace(PLAN, prepared=request))
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, ""),
        ({"step": "other"}, "step 'other' of family 'toy'"),
        ({"family": "other"}, "step 'count' of family 'other'"),
        ({"gives": (TOTAL, replace(HIDDEN, array="other"))}, "array 'other' of step 'count'"),
        ({"gives": (TOTAL, replace(HIDDEN, kind="control"))}, "array 'hidden' of step 'count'"),
        ({"gives": (replace(TOTAL, what="nothing"), HIDDEN)}, "array 'total' of step 'count'"),
    ],
)
def test_a_plan_that_is_not_declared_so_is_named(change, named):
    plan = replace(PLAN, steps=(replace(COUNT, **change),))
    assert undeclared_part(plan, DECLARED) == named


@pytest.mark.parametrize(("length", "whole"), [(299, True), (300, True), (301, False)])
def test_a_formula_of_three_hundred_letters_is_shown_whole(length, whole):
    text = json.dumps({"response": "y", "terms": ["x" * (length - len("y ~ "))]})
    shown = formula_of(ask_count(family=DESIGN_FAMILY, text=text))
    assert shown == "y ~ " + "x" * (length - 4) if whole else len(shown) == 300 and shown.endswith("x ...")


@pytest.mark.parametrize(("least", "said"), [(0, False), (1, False), (2, True)])
def test_a_plan_names_the_fewest_records_of_a_sum_from_two_on(least, said):
    own, _, _ = plain_lines(PLAN, Policy.strict(min_count=least))
    assert ("over at least" in own) == said


@pytest.mark.parametrize(
    ("rules", "line"),
    [
        ({}, ""),
        ({"masked_only": False}, ""),  # what others learn is no matter of rows
        ({"min_count": 1}, "min_count = 1"),
        ({"products": "any"}, 'products = "any"'),
        ({"remember": "rows"}, 'remember = "rows"'),
        ({"remember": "rows", "privacy": Budget(1.0, 1e-6)}, ""),
    ],
)
def test_a_plan_says_that_no_row_leaves_where_checks_make_it_true(rules, line):
    rows = plain_lines(PLAN, Policy.strict(**rules))[2]
    assert rows.startswith("No row leaves") is not bool(line)
    assert line in rows
