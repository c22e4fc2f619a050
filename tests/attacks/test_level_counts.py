"""Counts of levels over complete rows: the analyst chooses the columns, and two counts differ by few rows."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from refusals import refused_for

import fedstat as fs
from fedstat.federation.design.site_rows import RowsRequest
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import load_families
from fedstat.federation.message import Request, pack_request, unpack_reply

N = 120
RNG = np.random.default_rng(7)
PEOPLE = pd.DataFrame({"y": RNG.normal(size=N), "x": RNG.normal(size=N), "g": np.resize(["a", "b", "c"], N)})
LACKING = [0, 3, 6, 9, 12, 1]
"""Return a table where five rows of level "a" and one of level "b" lack a column."""
PEOPLE["lab"] = np.where(np.isin(np.arange(N), LACKING), np.nan, RNG.normal(size=N))
PEOPLE["many"] = np.where(np.isin(np.arange(N), [*LACKING, 4, 7]), np.nan, RNG.normal(size=N))
PEOPLE["w"] = np.where(np.isin(np.arange(N), [0, 3, 6, 9, 1]), 0.0, 1.0)
PEOPLE["hits"], PEOPLE["misses"] = (PEOPLE["w"] * (np.arange(N) % 2 == half) for half in (0, 1))
PEOPLE["one"] = np.where(np.arange(N) == 1, np.nan, 1.0) * PEOPLE["x"]


load_families()
pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning")


STRICT = Policy.strict(formulas="any", order="any")
REFUSES = replace(STRICT, small_differences="refuse")


def site(policy, frame=PEOPLE):
    three = dict.fromkeys("ABC", frame)
    return fs.ClientPartition.from_frames(three, layout="horizontal", policy=policy).sites["A"]


def survey(site, *columns, response=("y",), **roles):
    """The counts that a site reports for the rows that have all of some columns."""
    left = response[0] if len(response) == 1 else f"cbind({', '.join(response)})"
    names = ("g", *columns)
    question = RowsRequest(left, response, ("C(g)", *columns), names, weights=roles)
    reply = site.answer(pack_request(Request("A", "design", "survey_rows", {}, "s", question.to_json())))
    reported = json.loads(unpack_reply(reply).text)
    return reported["n"], dict(
        zip(reported["levels"]["g"]["levels"], reported["levels"]["g"]["counts"], strict=True)
    )


def level_of_one(policy):
    """The levels of those who lack a column, from two counts."""
    here = site(policy)
    (_, complete), (_, fewer) = survey(here), survey(here, "lab")
    return {level: complete[level] - fewer[level] for level in complete}


def test_two_fits_do_not_reveal_the_level_of_one_row():
    assert level_of_one("open") == {"a": 5, "b": 1, "c": 0}
    with refused_for("differencing", site="A"):
        level_of_one(REFUSES)
    # A strict site leaves further rows out: the counts differ by enough of each level.
    assert all(not count or count >= STRICT.min_level_count for count in level_of_one(STRICT).values())


def test_rows_that_differ_by_enough_of_every_level_are_counted():
    for policy, counts in ((REFUSES, [35, 37, 40]), (STRICT, [33, 34, 40])):
        here = site(policy)
        survey(here)
        assert [*survey(here, "many")[1].values()] == counts


def test_rows_are_held_against_those_with_the_same_levels_alone():
    partition = fs.ClientPartition.from_frames(
        dict.fromkeys("ABC", PEOPLE), layout="horizontal", policy=REFUSES
    )
    for formula in ("y ~ x", "y ~ lab", "y ~ C(g)", "y ~ C(g) + x"):
        fs.FederatedGLM.from_formula(formula, partition).fit()
    with refused_for("differencing"):
        fs.FederatedGLM.from_formula("y ~ C(g) + lab", partition)


def test_a_first_fit_with_many_levels_is_no_difference():
    """Few rows share a level of each of two columns; the rule on products counts them, and is off here."""
    frame = PEOPLE.assign(h=RNG.integers(0, 15, N).astype(str), k=RNG.integers(0, 15, N).astype(str))
    partition = fs.ClientPartition.from_frames(
        dict.fromkeys("ABC", frame), layout="horizontal", policy=Policy.strict(products="any")
    )
    result = fs.FederatedGLM.from_formula("y ~ x + g + h + k", partition).fit()
    assert result.converged and {"h[T.14]", "k[T.14]"} <= set(result.params.index)


@pytest.mark.parametrize(
    "weighted", [{"freq_weights": "w"}, {"var_weights": "w"}, {"response": ("hits", "misses")}]
)
def test_counts_are_of_the_rows_with_a_weight(weighted):
    """Rows of weight zero are in no sum; two counts of levels would otherwise reveal such a row."""
    here = site("open")
    n, levels = survey(here, **weighted)
    assert (n, levels) == (115, {"a": 36, "b": 39, "c": 40})
    assert survey(here, "one", **weighted) == (n, levels)
