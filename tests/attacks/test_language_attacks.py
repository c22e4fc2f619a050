"""Cuts, knots and codings chosen by the analyst: comparisons in I(), cubic splines, rare cells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import statsmodels.api as sm
from people import people

import fedstat as fs
from fedstat.errors import DescriptionError, DesignError, FedstatError, PolicyError
from fedstat.federation.design.block import build_block
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.formula.parse import parse_pooled_formula
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.message import Request, pack_request

pytestmark = pytest.mark.filterwarnings("ignore")
TABLE = people()
DESCRIBED = {
    "age": {"kind": "number", "range": [19.0, 90.0], "knots": [37.0, 50.0, 65.0]},
    "bmi": {"kind": "number", "range": [5.0, 45.0], "knots": [25.0]},
    "z": {"kind": "number", "range": [-5.0, 5.0]},
    "income": {"kind": "number", "range": [100.0, 200000.0]},
    "sex": {"kind": "number", "range": [0.0, 1.0], "levels": [0.0, 1.0]},
    "y": {"kind": "number", "range": [0.0, 1.0], "levels": [0.0, 1.0]},
}


def rows(policy, table=TABLE):
    published = dict.fromkeys(("S0", "S1", "S2"), DESCRIBED) if policy == "strict" else None
    return fs.ClientPartition.from_frame(table, by="site", policy=policy, published=published)


def of_incomes(partition, term):
    """Sum of incomes where a term holds, from what a normal fit prints."""
    family = sm.families.Gaussian()
    result = fs.FederatedGLM.from_formula(f"income ~ {term}", partition, family=family).fit(masked=True)
    XX = result.scale * np.linalg.inv(result.cov_params().to_numpy())
    return (XX @ result.params.to_numpy())[1]


def test_two_cuts_next_to_a_person_reveal_an_income():
    bmi = np.sort(TABLE["bmi"].unique())
    alone = [value for value in bmi[20:-20] if (TABLE["bmi"] == value).sum() == 1]
    person = TABLE[TABLE["bmi"] == alone[0]].iloc[0]
    cuts = [f"I(bmi > {float(person['bmi']) + d!r})" for d in (-0.05, 0.05)]
    above, below = (of_incomes(rows("open"), cut) for cut in cuts)
    assert above - below == pytest.approx(person["income"], rel=1e-4)
    with pytest.raises(DescriptionError, match="not a published level or knot"):
        of_incomes(rows("strict"), cuts[0])


@pytest.mark.parametrize(
    "term",
    [
        "I(age == 37)",
        "I(age != 37)",
        "I(age == 41)",
        "I(age > 41)",
        "I(age > bmi)",
        "I(scale(age) > 0)",
        "I(exp(-1e4 * (age - 41) ** 2))",
        "I(age ** 4)",
        "I(age ** -2)",
        "I(age * age)",
        "I(age * age ** 2)",
        "I(age / z)",
        "I(age * z):bmi:log(income)",
        "cr(age, knots=(40.9, 41.1), lower_bound=19, upper_bound=90, constraints='center')",
        "cr(age, knots=(37.0,), lower_bound=36, upper_bound=90, constraints='center')",
        "cc(z, knots=(0.0,), lower_bound=-5, upper_bound=5, constraints='center')",
    ],
)
def test_columns_chosen_by_the_analyst_are_refused_by_the_question_alone(term):
    partition = rows("strict")
    response = "y" if "income" in term else "income"
    with pytest.raises(DescriptionError, match="its policy \\(simple formulas\\)"):
        fs.FederatedGLM.from_formula(f"{response} ~ {term}", partition, family=sm.families.Gaussian()).fit()
    assert not any(site.ledger.entries for site in partition.sites.values())


@pytest.mark.parametrize(
    "right",
    [
        "I(age > 50) + I(bmi <= 25)",
        "I(sex == 1):I(age > 50)",
        "I(age**2) + age",
        "I(age * z) + age + z",
        "C(sex, Sum)*I(bmi > 25)",
        "C(sex, Helmert) + C(sex, Treatment):z",
        "cr(age, knots=(37.0, 65.0), lower_bound=19.0, upper_bound=90.0, constraints='center')",
        "0 + cc(age, knots=(37.0, 50.0, 65.0), lower_bound=19.0, upper_bound=90.0)",
    ],
)
def test_what_is_made_of_published_places_is_computed(right):
    family = sm.families.Gaussian()
    strict, plain = (
        fs.FederatedGLM.from_formula(f"income ~ {right}", rows(policy), family=family).fit(masked=True)
        for policy in ("strict", "open")
    )
    np.testing.assert_allclose(strict.params, plain.params, rtol=1e-6)


RARE = TABLE.assign(
    g=np.resize(list("ab"), len(TABLE)),
    h=np.where(np.arange(len(TABLE)) % 4 < 2, "p", "q"),
)
RARE["h"] = RARE["h"].where((RARE["g"] != "b") | (RARE.groupby(["site", "g"]).cumcount() < 4), "p")


@pytest.mark.parametrize("term", ["C(g, Sum)*C(h, Sum)", "C(g, Sum):C(h, Helmert)", "C(g, Diff):I(h == 'q')"])
def test_a_cell_of_few_rows_is_refused_however_it_is_coded(term):
    """The mean income of two persons in a cell follows from all four coefficients."""
    few = RARE.groupby(["site", "g", "h"]).size().min()
    assert few == 2
    family = sm.families.Gaussian()
    loose = rows(Policy(min_level_count=1), RARE)
    reported = fs.FederatedGLM.from_formula(f"income ~ {term}", loose, family=family).fit()
    of_cell = reported.predict(RARE[(RARE.g == "b") & (RARE.h == "q")]).iloc[0]
    expected = RARE[(RARE.g == "b") & (RARE.h == "q")].income.mean()
    assert of_cell == pytest.approx(expected, rel=1e-6)
    with pytest.raises(PolicyError, match=r"minimum rows per level.* levels of column 'C"):
        fs.FederatedGLM.from_formula(f"income ~ {term}", rows("open", RARE), family=family).fit()


@pytest.mark.parametrize("spline", ["bs(age, knots=(37,), {})", "cr(age, knots=(37,), {})"])
def test_a_coding_with_knots_next_to_a_person_is_none_of_its_formula(spline):
    """The coordinator sends the states of transforms; the owner approved the knots of the formula."""
    right = "0 + " + spline.format("lower_bound=19, upper_bound=90")
    (terms,) = parse_pooled_formula(f"income ~ {right}", list(TABLE)).sites
    spec = build_block(TABLE, terms, intercept=False).spec
    assert BlockSpec.from_json(spec.to_json()) == spec
    (text,) = spec.state
    moved = {name: [40.9 if x == 37 else x for x in np.atleast_1d(v)] for name, v in spec.state[text].items()}
    forged = replace(spec, state={text: spec.state[text] | {"knots": moved["knots"]}})
    assert forged != spec
    with pytest.raises(DesignError, match="do not belong together"):
        BlockSpec.from_json(forged.to_json())


def test_weights_chosen_by_the_analyst_are_not_taken():
    """Sums with weights of one, and with one entity's a little larger, differ by that entity's row."""
    frame = TABLE.assign(id=range(len(TABLE)))
    frames = {"A": frame[["id", "income", "age"]], "B": frame[["id", "bmi", "z"]]}
    partition = fs.ClientPartition.from_frames(frames, on="id", policy="strict")
    few = {"keep": np.ones(len(frame), dtype=bool), "weights": np.ones(len(frame))}
    few["weights"][17] += 1e-3
    with pytest.raises(FedstatError, match="accepts no numbers for each entity"):
        partition.sites["B"].answer(pack_request(Request("B", "vfem", "stage_block", few, "s")))
