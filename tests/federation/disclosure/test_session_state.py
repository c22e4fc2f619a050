"""State that a session keeps at a site, the order of its requests, and the information in refusals."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from reporting import FAMILY, N_ROWS, STEPS, refusal_of, site_of

from fedstat.errors import (
    ConsentError,
    DescriptionError,
    DesignError,
    MessageError,
    PartitionError,
    PolicyError,
    SecurityError,
    SessionError,
)
from fedstat.federation.audit.event_log import SiteLedger
from fedstat.federation.disclosure.facts import (
    EntityCount,
    FactorsRequested,
    FormulaFactor,
    OwnFitProblem,
    RowCount,
    RowsUsed,
)
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.disclosure.refusals import MAX_REASONS_KEPT, ROWS, RefusalLog
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.disclosure.state import SiteData, SiteTrust, State, snapshot
from fedstat.federation.message import Request, pack_request
from fedstat.federation.tables.table import FrameTable, LabeledTable

BUDGET = Budget(1.0, 1e-6)


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(FAMILIES, FAMILY, STEPS)


@dataclasses.dataclass
class Sums:
    """Sums that a step adds to in place."""

    total: list
    by_name: dict


def begun(state, judge=lambda fact: None, among=()):
    state.begin(judge, among, lambda: None, lambda: None, str)
    return state


# ---- entities behind a reply --------------------------------------------------------------------------


def test_a_reply_rests_on_the_fewest_entities_behind_anything_that_it_uses():
    state = begun(State("Kiel"))
    assert state.entities == 0
    state.keep("many", 1.0, 9)
    assert state.entities == 9
    state.keep("few", 2.0, 4)
    state.keep("key", "secret")
    assert state.entities == 4
    begun(state)
    assert (state.use("key", str), state.entities) == ("secret", 0)
    assert (state.use("many", float), state.entities) == (1.0, 9)
    state.count_entities(12)
    assert state.entities == 9
    assert (state.use("few", float), state.entities) == (2.0, 4)
    state.report(EntityCount(3))
    assert state.entities == 3
    assert (state.look_at("many"), state.entities) == (1.0, 3)


def test_most_columns_that_are_open_at_once_count():
    state = begun(State("Kiel"))
    assert state.columns == 0
    for name, columns in (("a", 2), ("b", 5), ("c", 3)):
        state.keep(name, 0, columns=columns)
    assert state.columns == 5
    state.forget("b")
    assert state.columns == 3 and "b" not in state
    state.keep("c", 0)
    assert state.columns == 2


def test_facts_stay_with_what_was_kept_and_every_fact_is_judged():
    judged = []
    state = begun(State("Kiel"), judged.append)
    state.report(EntityCount(7), RowCount(7, 2))
    state.keep("rows", 0, 7)
    assert judged == [EntityCount(7), RowCount(7, 2)]
    begun(state)
    assert state.reported == set()
    state.use("rows", int)
    assert state.reported == {EntityCount, RowCount}
    assert begun(state, among=("A", "B")).masked_among == ("A", "B")


def test_the_formula_of_the_latest_request_that_has_one_is_kept():
    a, b, c = (FactorsRequested([FormulaFactor(name, (name,))]) for name in "abc")
    state = State("Kiel")
    assert state.requested == ()
    state.report(a, b)
    assert state.requested == (a, b)
    begun(state).report(EntityCount(9))
    assert state.requested == (a, b)
    begun(state).report(c)
    assert state.requested == (c,)


def test_all_of_a_beginning_is_forgotten_and_the_rest_stays():
    state = begun(State("Kiel"))
    for name in ("open a", "open b", "opened", "rows"):
        state.keep(name, 0)
    state.forget_all("open ")
    assert [name in state for name in ("open a", "open b", "opened", "rows")] == [False, False, True, True]
    with pytest.raises(MessageError, match="Kiel: first open it"):
        state.use("open a", int, "first open it")
    with pytest.raises(MessageError, match=r"Kiel: .*'open a'"):
        state.use("open a", int)


def test_what_a_refused_step_has_changed_is_undone():
    state = begun(State("Kiel"))
    sums = Sums([1, [2]], {"a": [3]})
    state.keep("sums", sums, 8, columns=2)
    state.use_columns(["x"])
    earlier = state.copy()
    sums.total[1].append(4)
    sums.by_name["a"].append(5)
    state.keep("more", 0, 3, columns=9)
    state.use_columns(["y"])
    state.report(RowCount(3, 1))
    state.restore(earlier)
    assert (state.look_at("sums").total, state.look_at("sums").by_name) == ([1, [2]], {"a": [3]})
    assert "more" not in state and state.used_columns == {"x"}
    assert (state.entities, state.columns, state.reported) == (8, 2, set())


def test_arrays_and_frozen_records_are_not_copied():
    array, frozen = np.zeros(3), EntityCount(3)
    held = snapshot([array, frozen, {"kind": Sums}])
    assert held[0] is array and held[1] is frozen and held[2]["kind"] is Sums


# ---- what a step is handed ----------------------------------------------------------------------------


def test_a_step_sees_records_in_memory_alone_and_a_secret_that_the_sites_have():
    table = pd.DataFrame({"x": [1.0]})
    assert SiteData("Kiel", FrameTable(table), 7, Policy()).common_seed == 7
    assert SiteData("Kiel", FrameTable(table), 0, Policy()).common_seed == 0
    for held in (FrameTable(table), LabeledTable(FrameTable(table), "site", "Kiel")):
        assert SiteData("Kiel", held, None, Policy()).frame is table
    streamed = SiteData("Kiel", object(), None, Policy())
    with pytest.raises(DesignError, match=r"Kiel: .*in memory"):
        _ = streamed.frame
    with pytest.raises(PartitionError, match=r"Kiel: .*seed"):
        _ = streamed.common_seed


@pytest.mark.parametrize(
    ("used", "why", "passes"), [(True, "", True), (True, "are others", False), (False, "are others", True)]
)
def test_records_that_do_not_fit_earlier_replies_are_not_taken(used, why, passes):
    site = site_of()
    if used:
        assert refusal_of(site, RowsUsed(np.ones(N_ROWS, dtype=bool))) is None
    table = FrameTable(pd.DataFrame({"x": np.arange(N_ROWS + 9.0)}))
    if passes:
        site.change_records(table, lambda *_: why)
        assert site.data.table is table
    else:
        with pytest.raises(SecurityError, match="Kiel: are others"):
            site.change_records(table, lambda *_: why)


def test_keys_are_drawn_once():
    trust = SiteTrust()
    assert trust.identity is trust.identity


# ---- turns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turn", "resumed", "error"),
    [
        (None, False, None),
        (3, False, None),
        (4, False, SessionError),
        (2, False, SecurityError),
        (1, False, SecurityError),
        (3, True, None),
        (4, True, SessionError),
        (2, True, SessionError),
        (1, True, SecurityError),
    ],
)
def test_a_request_is_answered_in_its_turn(turn, resumed, error, monkeypatch):
    site = site_of()

    def request(number):
        site.answer(pack_request(Request("Kiel", FAMILY, "report", {}, "s", turn=number)))

    assert refusal_of(site, session="other") is None
    for number in (1, 2):
        request(number)
    monkeypatch.setattr(site.site_ledger, "resumed", lambda session: resumed)
    if error is None:
        request(turn)
    else:
        with pytest.raises(error):
            request(turn)


# ---- what a refusal reveals ---------------------------------------------------------------------------

ABOUT_ROWS = (PolicyError.of_rule("minimum count", "Kiel", "wants more"), DesignError("Kiel: is singular"))
ABOUT_THE_REQUEST = (
    ConsentError.of_rule("approval", "Kiel", "is pending"),
    DescriptionError.of_rule("order", "Kiel", "comes later"),
    SecurityError("Kiel: is not pinned"),
)
POLICIES = {
    "in full": Policy(reasons="sent"),
    "in full, counted": Policy(reasons="sent", max_refusals=9),
    "logged": Policy(reasons="logged"),
    "logged, counted": Policy(reasons="logged", max_refusals=9),
    "budget": Policy(reasons="sent", privacy=BUDGET),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("error", [*ABOUT_ROWS, *ABOUT_THE_REQUEST], ids=lambda error: type(error).__name__)
def test_only_a_refusal_that_depends_on_rows_is_short_and_counted(policy, error):
    lines, site_ledger = [], SiteLedger()
    log = RefusalLog("Kiel", site_ledger, lines.append)
    data = SimpleNamespace(name="Kiel", policy=POLICIES[policy], published={})
    found = log.outward(data, [], error, "one")
    rows = error in ABOUT_ROWS
    short = rows and not policy.startswith("in full")
    assert (found is error) is not short
    assert site_ledger.refusals["one"] == (rows and policy.endswith("counted"))
    assert lines == log.reasons == ([str(error)] if short else [])
    if short:
        assert isinstance(found, PolicyError) and found.site == "Kiel"
        assert "wants more" not in str(found) and "singular" not in str(found)
        assert found.rule == ROWS  # the same for every reason


@pytest.mark.parametrize("n", [0, 1, MAX_REASONS_KEPT, MAX_REASONS_KEPT + 1])
def test_the_latest_hundred_reasons_are_kept_for_the_owner(n):
    log = RefusalLog("Kiel", SiteLedger())
    for k in range(n):
        log.note(str(k))
    assert MAX_REASONS_KEPT == 100
    assert log.reasons == [str(k) for k in range(max(n - 100, 0), n)]


@pytest.mark.parametrize(
    ("policy", "counted"), [("in full, counted", 0), ("logged, counted", 1), ("logged", 0)]
)
def test_the_problem_of_an_own_fit_is_one_bit_for_each_model(policy, counted):
    site = site_of(**{f.name: getattr(POLICIES[policy], f.name) for f in dataclasses.fields(Policy)})

    def report(model):
        shown = []
        problem = OwnFitProblem(
            "is singular", model, lambda text: shown.append(text) or ({"reported": np.array(1.0)}, "")
        )
        assert refusal_of(site, problem) is None
        return shown

    in_full = policy.startswith("in full")
    assert report("a") == report("a") == ([] if in_full else ["not shown"])
    assert site.site_ledger.refusals[""] == counted
    assert [line for line in site.refusals.reasons if "singular" in line] == (
        [] if in_full else ["own fit not shown: is singular"]
    )
    report("b")
    assert site.site_ledger.refusals[""] == 2 * counted
