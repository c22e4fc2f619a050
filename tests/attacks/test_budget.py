"""With a privacy budget all that depends on rows is charged or refused: also levels, presence, and texts."""

import json

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import DescriptionError, PolicyError
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.disclosure.request_checks import refusals
from fedstat.federation.disclosure.site import FAMILIES, Site, load_families
from fedstat.federation.message import Request, pack_request, unpack_reply
from fedstat.federation.tables.table import FrameTable

load_families()
BUDGET = Policy(privacy=Budget(1.0, 1e-7))
N = 60
RNG = np.random.default_rng(8)
FRAME = pd.DataFrame(
    {"id": range(N), "y": RNG.normal(size=N), "x": RNG.lognormal(size=N), "g": ["a", "b", "c"] * (N // 3)}
)
SYNTHESES = ("copula", "copula_glm")
NOISY = (*SYNTHESES, "boost_private")
"""Families that release noisy products of columns."""
PUBLIC = {
    *(("secure", step) for step in ("introduce", "announce", "finish", "commit", "sign", "meet")),
    ("secure", "mark_records"),
    *(("receipt", step) for step in ("recall_head", "state_ledger")),
    *(("align", step) for step in ("describe_keys", "take_places")),
    ("schema", "describe_table"),
    ("approval", "propose_plan"),
    *((family, "deal_product") for family in NOISY),
}
"""Steps that a budget lets pass: keys, marks of records, the site's account, the owner's decisions, random
numbers for others, and what it publishes."""
ALIGNING = ("draw_salt", "enter_keys", "pass_list", "show_tokens", "keep_places")
UNPAID = {
    *((family, step) for family in NOISY for step in ("find_complete", "open_product")),
    *(("copula_glm", step) for step in ("begin_score", "take_product")),
    *(("align", step) for step in ALIGNING),
}
"""Steps of which nothing leaves but who has a record, and what is sealed and serves a share with noise."""
WITH_NOISE = {
    ("copula_glm", "release_score"),
    ("glm", "sum_noisy_scores"),
    ("descriptive", "sum_noisy_table"),
    *((family, step) for family in SYNTHESES for step in ("release_margins", "sum_margins", "sum_products")),
    *((family, step) for family in NOISY for step in ("release_gram", "share_product")),
}
"""Steps of which all that leaves has noise, and is charged."""


REPEATED = {
    *((family, "recall_gram") for family in NOISY),
    ("copula_glm", "recall_score"),
}
"""Steps that release again what has noise and was charged, and the name of the analysis that released it."""


def passing(policy):
    """Steps of which something leaves under a policy, or that run at all, in clear or under masks."""
    return {
        (family, name)
        for family, steps in FAMILIES.items()
        for name, step in steps.items()
        for masked in (None, 0)
        if not list(refusals("S", policy, Request("S", family, name, masked=masked), step))
    }


def test_a_budget_stops_every_step_that_reads_rows():
    every = {(family, name) for family, steps in FAMILIES.items() for name in steps}
    assert passing(Policy.open()) == every
    assert passing(BUDGET) == PUBLIC | WITH_NOISE | UNPAID | REPEATED
    for family, name in WITH_NOISE:
        assert all(declared.noisy for declared in FAMILIES[family][name].given.values())
    for family, name in REPEATED:
        given = FAMILIES[family][name].given
        assert given["run"].unpaid
        assert all(declared.noisy for array, declared in given.items() if array != "run")


def test_nothing_exact_means_nothing_but_noise_and_what_is_sealed():
    none = Policy.strict(privacy=BUDGET.privacy, exact="none")
    sealed = {
        (family, name)
        for family, name in UNPAID
        if all(one.kind == "sealed" for one in FAMILIES[family][name].given.values())
    }
    assert passing(none) == PUBLIC | WITH_NOISE | sealed
    assert sealed < UNPAID and not sealed & {("copula", "find_complete")}
    assert passing(Policy(exact="none")) == passing(Policy.open())


class Unread(FrameTable):
    """A table of which no value is read but by the types of its columns."""

    def chunks(self, columns):
        for frame in super().chunks(columns):
            yield frame.iloc[:0]

    @property
    def entities(self):
        raise AssertionError("rows were read")


def test_what_passes_says_nothing_of_rows():
    """The description of a table is the same whatever its rows say, but for how many there are."""
    reported = []
    for frame in (FRAME, FRAME.assign(y=0.0, x=-1.0, g="a")):
        site = Site("Bank", Unread(frame[["y", "x", "g"]]), BUDGET)
        request = pack_request(Request("Bank", "schema", "describe_table", text="{}"))
        reported.append(unpack_reply(site.answer(request)).text)
    assert reported[0] == reported[1] and json.loads(reported[0])["n_rows"] == N


def texts(policy, formula, by):
    """Information that an analyst gets from a formula, on two tables that differ in one row."""
    reported = []
    for value, level in ((1.0, "a"), (-1.0, "z")):
        frame = FRAME.copy()
        frame.loc[7, ["x", "g"]] = value, level
        if by == "rows":
            parts = {s: frame.iloc[k::2].drop(columns="id") for k, s in enumerate("AB")}
            partition = fs.ClientPartition.from_frames(parts, layout="horizontal", policy=policy)
        else:
            parts = {"A": frame[["id", "y"]], "B": frame[["id", "x", "g"]]}
            partition = fs.ClientPartition.from_frames(parts, on="id", policy=policy)
        kind = fs.FederatedGLM if by == "rows" else fs.VFEMRegression
        try:
            kind.from_formula(formula, partition).fit()
            reported.append("made")
        except fs.errors.FedstatError as error:
            reported.append(f"{type(error).__name__}: {error}")
    return reported


@pytest.mark.parametrize("by", ["rows", "columns"])
def test_a_refusal_under_a_budget_does_not_depend_on_rows(by):
    one, other = texts("open", "y ~ log(x) + g", by)
    assert one != other
    one, other = texts(BUDGET, "y ~ log(x) + g", by)
    assert one == other and "its policy (privacy budget)" in one and "[privacy]" in one


def test_an_owner_is_reported_how_to_go_on():
    with pytest.raises(PolicyError, match=r"have the owner remove \[privacy\]") as refusal:
        fs.VFEMRegression.from_formula(
            "y ~ x",
            fs.ClientPartition.from_frames(
                {"A": FRAME[["id", "y"]], "B": FRAME[["id", "x"]]}, on="id", policies={"B": BUDGET}
            ),
        )
    assert not isinstance(refusal.value, DescriptionError) and str(refusal.value).startswith("B: ")
