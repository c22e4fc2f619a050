"""Every rule of a policy: what it refuses and says, what it lets pass, and that a refusal leaves no trace."""

from fractions import Fraction

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import PartitionError, PolicyError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.disclosure.policy import Budget, Policy, site_policies
from fedstat.federation.disclosure.release_history import ReleasedSums
from fedstat.federation.disclosure.request_checks import rules_in_force
from fedstat.federation.disclosure.site import FAMILIES, Site
from fedstat.federation.disclosure.state import State
from fedstat.federation.message import ArrayDeclaration, Request, Step, pack_request, unpack_reply
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.federation.protocols.key_agreement import agree_keys
from fedstat.privacy.zcdp import rho_of_budget


def total(data, state):
    state.keep("asked", state.use("asked", int) + 1 if "asked" in state else 1, len(data.frame))
    return {"total": np.array(float(data.frame["x"].sum()))}


def requested(data, state):
    return {"asked": np.array(state.use("asked", int) if "asked" in state else 0)}


def open_columns(data, state):
    state.keep("design", data.frame, len(data.frame), columns=data.frame.shape[1])
    data.memory.released = ReleasedSums.none(3)
    return {}


def rows(data, state):
    return {"rows": data.frame["x"].to_numpy()}


def hidden(data, state):
    return {"box": np.zeros(3, dtype=np.uint8)}


def coded(data, state, text):
    state.count_entities(len(data.frame))
    return {}, "a coding"


STEPS = {
    "total": Step(
        total,
        gives={"total": ArrayDeclaration("aggregate", "sum of x", 0, maskable=True, behind=(EntityCount,))},
    ),
    "asked": Step(requested, gives={"asked": ArrayDeclaration("control", "times asked", 0)}, public=True),
    "likelihood": Step(
        total, gives={"part": ArrayDeclaration("control", "log-likelihood", 0, maskable=True)}
    ),
    "open": Step(open_columns),
    "rows": Step(rows, gives={"rows": ArrayDeclaration("raw columns", "x itself")}),
    "seal": Step(hidden, gives={"box": ArrayDeclaration("sealed", "for one other site", dtype="uint8")}),
    "share": Step(
        hidden, gives={"box": ArrayDeclaration("masked share", "one share", behind=(EntityCount,))}
    ),
    "code": Step(
        coded,
        text_in=ArrayDeclaration("control", "nothing"),
        text_out=ArrayDeclaration("aggregate", "coding of columns", behind=(EntityCount,)),
    ),
}
BUDGET = Budget(1.0, 1e-7)


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", STEPS)


def sites(names=("Bank",), n=6, **policy):
    table = pd.DataFrame({"x": np.arange(float(n)), "z": np.ones(n)})
    made = {name: Site(name, table, Policy(**policy)) for name in names}
    prints = {name: site.trust.identity.public.fingerprint for name, site in made.items()}
    for site in made.values():
        site.trust.pinned.update(prints)
    return made


def requested(site, step, family="toy", **kwds):
    return unpack_reply(site.answer(pack_request(Request(site.name, family, step, session="s", **kwds))))


REFUSALS = {
    "families": (
        {"families": frozenset({"glm"})},
        "total",
        r"\(families\) allows \['glm'\], not 'toy'.*add it",
    ),
    "refused kinds": (
        {"refused_kinds": frozenset({"aggregate"})},
        "total",
        r"\(refused kinds\) does not release 'aggregate': array 'total' of step 'total' \(sum of x\). "
        "Fit with masked=True",
    ),
    "a refused kind of text": (
        {"refused_kinds": frozenset({"aggregate"})},
        "code",
        r"\(refused kinds\) .*array 'text' of step 'code' \(coding of columns\)",
    ),
    "masked only": (
        {"masked_only": True},
        "total",
        r"\(masked only\) releases array 'total' .* only in a masked sum. Fit with masked=True",
    ),
    "minimum count": (
        {"min_count": 7},
        "total",
        r"\(minimum count\) requires at least 7 .*array 'total' .*there are 6. Leave the site out",
    ),
    "minimum count of a text": ({"min_count": 7}, "code", r"\(minimum count\) .*array 'text' of step 'code'"),
    "maximum columns": (
        {"max_columns": 1},
        "open",
        r"\(maximum columns\) allows 1 of its .*step 'open' opens 2. Use fewer .*raise max_columns",
    ),
    "privacy budget": (
        {"privacy": BUDGET},
        "total",
        r"\(privacy budget\) releases .*only with noise.*step 'total' \(sum of x\). Request .*\[priv",
    ),
    "a budget and a box": (
        {"privacy": BUDGET},
        "seal",
        r"\(privacy budget\) .*array 'box' .*encrypted for another site, and the product of columns is",
    ),
    "a budget and a part of a sum": (
        {"privacy": BUDGET},
        "likelihood",
        r"\(privacy budget\) .*array 'part' of step 'likelihood'",
    ),
    "a budget and a step that gives nothing": (
        {"privacy": BUDGET},
        "open",
        r"\(privacy budget\) allows a step to read rows only .*that of step 'open' is not. Request",
    ),
    "a budget and a share": (
        {"privacy": BUDGET},
        "share",
        r"\(privacy budget\) .*random alone, and the sum with the other share is released",
    ),
}
PASSES = {
    "families": ({"families": frozenset({"toy"})}, "total"),
    "refused kinds": ({"refused_kinds": frozenset({"raw columns"})}, "total"),
    "masked only": ({"masked_only": True}, "rows"),
    "minimum count": ({"min_count": 6}, "total"),
    "raw columns have no minimum count": ({"min_count": 7}, "rows"),
    "maximum columns": ({"max_columns": 2}, "open"),
    "privacy budget": ({"privacy": BUDGET}, "asked"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_names_site_rule_array_and_remedy_and_leaves_no_trace(case):
    policy, step, words = REFUSALS[case]
    site = sites(**policy)["Bank"]
    before = {name: dict(vars(state)) for name, state in site.states.items()}
    text = {"text": "{}"} if step == "code" else {}
    for _ in range(2):
        with pytest.raises(PolicyError, match=f"Bank: its policy {words}"):
            requested(site, step, **text)
    assert site.ledger.entries == [] and site.ledger.rounds == 0
    assert {name: dict(vars(state)) for name, state in site.states.items()} == before
    assert site._data.memory.released is None


@pytest.mark.parametrize("case", PASSES)
def test_what_a_rule_allows_passes(case):
    policy, step = PASSES[case]
    site = sites(**policy)["Bank"]
    assert set(requested(site, step).arrays) == set(STEPS[step].gives)


def test_what_was_kept_before_a_refusal_is_there_after_it():
    site = sites()["Bank"]
    requested(site, "total")
    requested(site, "open")
    site.policy = Policy(min_count=7)
    with pytest.raises(PolicyError, match="minimum count"):
        requested(site, "total")
    assert int(requested(site, "asked").arrays["asked"]) == 1
    assert site._data.memory.released.n_rows == 3


def masked_total(names, **policy):
    made = sites(names, **policy)
    LocalEngine(made).run(agree_keys(names, "s"), Ledger())
    return made, requested(made[names[0]], "total", masked=0)


def test_a_masked_sum_of_two_sites_is_refused_where_the_owner_says_so():
    with pytest.raises(
        PolicyError, match=r"Bank: its policy \(two sites\) refuses the sum. A masked sum over two"
    ):
        masked_total(("Bank", "Court"), two_sites="refuse")
    masked_total(("Bank", "Court"))
    masked_total(("Bank", "Court", "Tax"), two_sites="refuse")


def test_a_masked_sum_passes_where_the_kind_does_not():
    refused = {"refused_kinds": frozenset({"aggregate"}), "masked_only": True}
    made, reply = masked_total(("Bank", "Court", "Tax"), **refused)
    assert reply.arrays["total"].shape == (2,)
    (entry,) = [e for e in made["Bank"].ledger.entries if e.step == "total"]
    assert entry.masked


def test_a_masked_sum_is_not_charged_to_a_budget_either():
    made = sites(("Bank", "Court", "Tax"), privacy=BUDGET)
    LocalEngine(made).run(agree_keys(tuple(made), "s"), Ledger())
    with pytest.raises(PolicyError, match="part of a masked sum, and the sum is released"):
        requested(made["Bank"], "total", masked=0)


def test_a_mask_that_is_refused_is_not_used_up():
    names = ("Bank", "Court")
    made = sites(names)
    LocalEngine(made).run(agree_keys(names, "s"), Ledger())
    made["Bank"].policy = Policy(two_sites="refuse")
    with pytest.raises(PolicyError, match="two sites"):
        requested(made["Bank"], "total", masked=0)
    made["Bank"].policy = Policy()
    requested(made["Bank"], "total", masked=0)


def test_columns_are_those_that_are_open_at_once():
    state = State("S")
    assert state.columns == 0
    state.keep("a", 1, 5, columns=3)
    state.keep("b", 2, 5, columns=2)
    assert state.columns == 3
    state.forget("a")
    assert state.columns == 2


def test_rules_in_force_name_their_limits():
    declared = ArrayDeclaration("aggregate", "sum", maskable=True)
    assert list(rules_in_force(Policy(), declared)) == ["minimum count 5"]
    assert list(rules_in_force(Policy(), ArrayDeclaration("control", "step"))) == []
    numbers = ArrayDeclaration("per entity", "residuals")
    assert list(rules_in_force(Policy(), numbers)) == []
    assert list(rules_in_force(Policy(per_entity=3), numbers)) == ["per entity 3"]
    assert list(rules_in_force(Policy(per_entity=3), declared)) == ["minimum count 5"]
    for quorum, apart, sites, named in ((0, 1, 3, []), (2, 2, 3, ["quorum 2", "apart 2"]), (2, 2, 0, [])):
        masked = Policy(quorum=quorum, apart=apart)
        assert list(rules_in_force(masked, declared, sites)) == [*named, "minimum count 5"]
    strict = Policy(frozenset({"a"}), frozenset({"sketch"}), True, privacy=BUDGET)
    assert list(rules_in_force(strict, declared, 2)) == [
        "families",
        "masked only",
        "two sites: warn",
        "minimum count 5",
        "privacy budget",
    ]
    assert "refused kinds" in list(rules_in_force(strict, declared))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"families": ["glm"]}, "families: expected a list of names of families, received"),
        ({"families": frozenset()}, "families: expected a list of names"),
        (
            {"refused_kinds": frozenset({"raw column"})},
            r"received \['raw column'\] \(did you mean 'raw columns'\?\)",
        ),
        ({"masked_only": 1}, "masked_only: expected true or false, received 1"),
        ({"two_sites": "deny"}, 'two_sites: expected "warn" or "refuse", received \'deny\''),
        ({"min_count": 2.5}, "min_count: expected a whole number of at least 0, received 2.5"),
        ({"min_count": True}, "min_count: .*received True"),
        ({"min_events": -1}, "min_events: expected"),
        ({"min_level_count": "3"}, "min_level_count: expected"),
        ({"max_parameters": float("nan")}, "max_parameters: expected a number above 0, received nan"),
        ({"max_columns": 0}, "max_columns: expected a whole number of at least 1"),
        ({"remember": None}, "remember: expected"),
        ({"privacy": (1.0, 0.0)}, "privacy: expected a Budget or None, received tuple"),
        ({"min_count": -1, "min_events": -1}, "min_count: .*; min_events: "),
        ({"families": frozenset({""})}, "families: expected"),
        ({"refused_kinds": "raw columns"}, "refused_kinds: expected"),
        ({"per_entity": 1.5}, "per_entity: expected"),
        ({"per_entity": "none"}, "per_entity: expected"),
        ({"quorum": 1.5}, "quorum: expected"),
        ({"quorum": True}, "quorum: expected"),
        ({"max_share": True}, "max_share: expected"),
        ({"max_share": "1"}, "max_share: expected"),
        ({"max_parameters": True}, "max_parameters: expected"),
        ({"max_column_sums": "none"}, "max_column_sums: expected"),
        ({"max_column_sums": False}, "max_column_sums: expected"),
        ({"max_columns": True}, "max_columns: expected"),
    ],
)
def test_a_value_without_meaning_is_refused(values, words):
    with pytest.raises(PartitionError, match=f"Policy: .*{words}"):
        Policy(**values)


@pytest.mark.parametrize(
    ("epsilon", "delta", "words"),
    [
        (0.0, 1e-7, "epsilon: expected a number above 0, received 0.0"),
        (float("inf"), 1e-7, "epsilon: expected a number above 0, received inf"),
        (1.0, 2e-5, "delta: expected a number of at least 0 and at most 1e-05, received 2e-05. A larger one"),
        (1.0, "0", "delta: expected"),
        (1.0, -1e-12, "delta: expected"),
        (1.0, True, "delta: expected"),
        (True, 1e-7, "epsilon: expected"),
        ("1", 1e-7, "epsilon: expected"),
    ],
)
def test_a_budget_without_meaning_is_refused(epsilon, delta, words):
    with pytest.raises(PartitionError, match=f"Budget: {words}"):
        Budget(epsilon, delta)


@pytest.mark.parametrize(
    ("records", "delta", "fits"), [(10_000, 1e-5, True), (10_001, 1e-5, False), (10_001, 1e-6, True)]
)
def test_a_delta_is_small_for_the_records_of_a_site(records, delta, fits):
    """A tenth of one over the records, at the boundary; 1e-6 is taken by any table."""
    table, policy = pd.DataFrame({"x": np.arange(float(records))}), Policy(privacy=Budget(1.0, delta))
    if fits:
        Site("A", table, policy)
        return
    with pytest.raises(
        PartitionError, match=r"A: the delta of its privacy budget is 1e-05.* at most 1e-05, a ten"
    ):
        Site("A", table, policy)


# ---- the policies of a partition -----------------------------------------------------------------

FRAME = pd.DataFrame({"site": ["A", "B"] * 20, "x": np.arange(40.0), "y": np.arange(40.0)[::-1] ** 2})


def test_a_sites_own_policy_beats_the_common_one(tmp_path):
    file = tmp_path / "b.toml"
    file.write_text("min_count = 9\n", encoding="utf-8")
    partition = fs.ClientPartition.from_frame(
        FRAME, by="site", policy=Policy(min_count=7), policies={"B": str(file)}
    )
    assert {name: site.policy.min_count for name, site in partition.sites.items()} == {"A": 7, "B": 9}


@pytest.mark.parametrize("kind", ["from_frames", "from_frame", "from_files"])
def test_every_way_to_a_partition_takes_policies(kind, tmp_path):
    file = tmp_path / "common.toml"
    file.write_text("min_events = 4\n", encoding="utf-8")
    own = {"B": Policy(min_events=6)}
    parts = {name: part.drop(columns="site") for name, part in FRAME.groupby("site")}
    if kind == "from_frames":
        partition = fs.ClientPartition.from_frames(parts, layout="horizontal", policy=file, policies=own)
    elif kind == "from_frame":
        partition = fs.ClientPartition.from_frame(FRAME, by="site", policy=file, policies=own)
    else:
        paths = {name: tmp_path / f"{name}.csv" for name in parts}
        for name, part in parts.items():
            part.to_csv(paths[name], index=False)
        partition = fs.ClientPartition.from_files(paths, layout="horizontal", policy=file, policies=own)
    assert [site.policy.min_events for site in partition.sites.values()] == [4, 6]


@pytest.mark.parametrize(
    ("common", "own", "words"),
    [
        (
            None,
            {"C": Policy()},
            "policies: unknown sites 'C'. The sites of the partition are 'A'",
        ),
        (
            None,
            Policy(),
            "policies: expected {site: policy or path of a policy file}; for one policy for all sites use",
        ),
        (3, None, "policy: expected a fedstat.Policy or the path of a policy file, received int"),
        ("absent.toml", None, "policy file 'absent.toml': cannot be read"),
    ],
)
def test_policies_of_no_site_and_of_no_meaning(common, own, words):
    with pytest.raises(PartitionError, match=words):
        site_policies(("A", "B"), common, own)


def test_rare_levels_are_refused_in_either_layout():
    left = pd.DataFrame({"id": range(40), "y": np.arange(40.0) ** 2})
    right = pd.DataFrame({"id": range(40), "g": ["a"] * 30 + ["b"] * 10, "x": np.arange(40.0)})

    def model(least):
        policies = {"B": Policy(min_level_count=least)}
        partition = fs.ClientPartition.from_frames({"A": left, "B": right}, on="id", policies=policies)
        return fs.VFEMRegression.from_formula("y ~ x + g", partition)

    assert model(10).design.blocks[0].names == ("x", "g[T.b]")
    words = (
        r"B: its policy \(minimum rows per level\) requires at least 11 rows of every level; 1 of the 2 .*'g'"
    )
    with pytest.raises(PolicyError, match=words):
        model(11)


def test_columns_of_one_model_are_limited_in_the_vertical_layout():
    left = pd.DataFrame({"id": range(40), "y": np.arange(40.0) ** 2})
    right = pd.DataFrame({"id": range(40), "g": ["a"] * 20 + ["b"] * 10 + ["c"] * 10, "x": np.arange(40.0)})
    policies = {"B": Policy(max_columns=2)}
    partition = fs.ClientPartition.from_frames({"A": left, "B": right}, on="id", policies=policies)
    assert fs.VFEMRegression.from_formula("y ~ g", partition).design.blocks[0].names == ("g[T.b]", "g[T.c]")
    entries = len(partition.sites["B"].ledger.entries)
    with pytest.raises(PolicyError, match=r"B: its policy \(maximum columns\) .*'open_block' opens 3"):
        fs.VFEMRegression.from_formula("y ~ g + x", partition)
    assert len(partition.sites["B"].ledger.entries) == entries


ROWS = pd.DataFrame({"site": ["A", "B"] * 30, "x": np.sin(np.arange(60.0)), "w": np.cos(np.arange(60.0))})
ROWS["y"] = (np.arange(60) % 7 < 3).astype(int)
ROWS["g"] = np.where(np.arange(60) % 10 < 2, "rare", "usual")
ROWS.loc[0, "w"] = np.nan
OF_ROWS = {
    "minimum count": ("min_count", 31, 30, "y ~ x", "requires at least 31 complete rows; there are 30"),
    "minimum events": (
        "min_events",
        16,
        12,
        "y ~ x",
        "requires no rows or at least 16 rows of either outcome of 'y'",
    ),
    "minimum rows per level": (
        "min_level_count",
        7,
        6,
        "y ~ C(g)",
        "requires at least 7 rows of every level",
    ),
    "maximum parameters per row": (
        "max_parameters",
        0.05,
        0.1,
        "y ~ x + C(g)",
        "the model has 3 for 30 rows",
    ),
    "differencing": (
        "min_count",
        5,
        1,
        "y ~ x + w",
        "rows that differ in fewer than 5 rows from those of",
    ),
}


@pytest.mark.parametrize("rule", OF_ROWS)
@pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")
def test_rules_that_only_a_step_can_apply(rule):
    key, refuses, passes, formula, words = OF_ROWS[rule]

    def ready(limit):
        partition = fs.ClientPartition.from_frame(ROWS, by="site", policies={"A": Policy(**{key: limit})})
        if rule == "differencing":
            fs.GLORE.from_formula("y ~ x", partition)
        return partition

    site = (partition := ready(refuses)).sites["A"]
    with pytest.raises(PolicyError, match=rf"A: its policy \({rule}\) .*{words}") as refusal:
        fs.GLORE.from_formula(formula, partition).fit()
    assert refusal.match(r"\. [A-Z]")  # a remedy
    entered, kept = len(site.ledger.entries), site._data.memory.released
    with pytest.raises(PolicyError, match=words):
        fs.GLORE.from_formula(formula, partition).fit()
    again = {entry.step for entry in site.ledger.entries[entered:]}
    assert again <= {"survey_rows", "introduce", "announce"} and site._data.memory.released is kept
    assert fs.GLORE.from_formula(formula, ready(passes)).fit().converged


def test_no_earlier_answers_are_held_against_a_new_one_where_the_owner_keeps_none():
    partition = fs.ClientPartition.from_frame(ROWS, by="site", policy=Policy(remember="nothing"))
    fs.GLORE.from_formula("y ~ x", partition)
    with pytest.warns(fs.errors.DataWarning):
        fs.GLORE.from_formula("y ~ x + w", partition)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy(min_count=9),
        Policy.strict(),
        Policy.strict(min_count=9, refused_kinds=frozenset()),
        Policy.strict(refused_kinds=frozenset({"sketch", "aggregate"}), remember="rows"),
        Policy.strict(privacy=BUDGET),
        Policy(max_share=0.5, max_columns=3),
    ],
    ids=repr,
)
def test_a_policy_is_shown_by_what_differs_from_the_nearer_of_two(policy):
    text = repr(policy)
    assert eval(text, {"Policy": Policy, "Budget": Budget}) == policy
    assert len(text) < 140


def test_the_nearer_of_two_policies_is_named():
    assert repr(Policy(min_count=9)) == "Policy(min_count=9)"
    assert repr(Policy.strict(min_count=9)) == "Policy.strict(min_count=9)"


def test_the_rho_of_a_budget_is_on_the_grid_and_within_it():
    rho = BUDGET.rho
    assert (rho * 2**64).denominator == 1
    assert 0 <= rho_of_budget(BUDGET.epsilon, BUDGET.delta) - rho < Fraction(1, 2**64)
