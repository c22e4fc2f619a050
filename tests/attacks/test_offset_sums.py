"""Weighted sums of offsets: rows that follow from them alone, with a design column, or with an earlier sum.

A fit with an offset releases the sum of its weighted values. The attacks take the sums from the start of
the protocol, as the coordinator receives them.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from refusals import refused_for

import fedstat as fs
from fedstat.errors import DescriptionError, PolicyError
from fedstat.federation.design import horizontal_steps
from fedstat.federation.disclosure.column_sums import released_sums
from fedstat.models.glm.protocol import Newton

pytestmark = pytest.mark.filterwarnings("ignore")
N, ROW, VALUE = 600, 5, 13.0
RANGES = {
    "y": [-9, 9], "z": [0, 1], "p": [0, 100], "g": [0, 100], "w": [0, 9], "one": [0, 1], "others": [0, 1],
    "own": [0, 20], "few": [0, 1],
}  # fmt: skip


def table():
    """A table in which `g` differs from `p` in one row only; `one`, `others` and `own` single it out."""
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "site": np.array(["A", "B", "C"])[np.arange(N) % 3],
            "y": random.normal(size=N),
            "z": random.integers(0, 2, N) * 1.0,
            "p": random.integers(20, 80, N) * 1.0,
            "w": random.integers(1, 5, N) * 1.0,
            "one": (np.arange(N) == ROW) * 1.0,
            "few": (np.arange(N) < 5) * 1.0,
        }
    )
    frame["g"], frame["others"] = frame["p"] + VALUE * frame["one"], 1.0 - frame["one"]
    return frame.assign(own=VALUE * frame["one"])


FRAME = table()
POLICIES = {"open": fs.Policy.open(), "default": fs.Policy(), "strict": fs.Policy.strict()}


def sites(policy, frame=FRAME):
    published = {name: {"kind": "number", "range": limits} for name, limits in RANGES.items()}
    published["z"]["levels"] = [0, 1]
    strict = dict.fromkeys(frame["site"].unique(), published) if policy.masked_only else None
    return fs.ClientPartition.from_frame(frame, by="site", policy=policy, published=strict)


def sums(where, right, **roles):
    """Sum of the weights, of the response, and of the offset over all sites."""
    found, start = [], Newton._start_null
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Newton, "_start_null", lambda fit, sums: found.append(sums) or start(fit, sums))
        fs.FederatedGLM.from_formula(f"y ~ {right}", where, **roles).fit()
    return found[0][[0, 1, 3]]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("weights", [{}, {"freq_weights": "w"}], ids=["plain", "weighted"])
@pytest.mark.parametrize("offset", ["one", "others", "own", "few"])
def test_an_offset_of_one_row_or_of_all_but_one_is_not_summed(offset, weights, policy):
    with pytest.raises(PolicyError):
        sums(sites(POLICIES[policy]), "z", offset=offset, **weights)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_offset_that_differs_from_a_column_in_one_row_is_not_summed(policy, monkeypatch):
    where = sites(POLICIES[policy])
    with refused_for("minimum rows per level"):
        sums(where, "z + p", offset="g")
    if policy == "strict":
        return
    # Without the offset among the directions, its sum less that of the column is the value of the row.
    monkeypatch.setattr(horizontal_steps.OpenRows, "directions", lambda rows: (X for _, X in rows.chunks()))
    reported = sums(sites(POLICIES[policy]), "z + p", offset="g")
    assert reported[2] - FRAME["p"].sum() == pytest.approx(VALUE)


@pytest.mark.parametrize("second", [{"offset": "g"}, {}])
def test_two_offsets_that_differ_in_one_row_are_refused_by_the_history(second):
    """As two columns of the design are."""
    where = sites(fs.Policy.strict())
    sums(where, "z", offset="p")
    with pytest.raises(PolicyError):
        sums(where, "z" if second else "z + g", **second)


def test_two_fits_under_other_policies_add_up():
    """The documented state: without a history of products, sums of two fits are not compared."""
    where = sites(fs.Policy())
    first, second = (sums(where, "z", offset=name) for name in ("p", "g"))
    assert second[2] - first[2] == pytest.approx(VALUE)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_offset_equal_to_an_indicator_of_the_design_reveals_its_count_alone(policy):
    reported = sums(sites(POLICIES[policy]), "z", offset="z")
    np.testing.assert_allclose(reported, [N, FRAME["y"].sum(), FRAME["z"].sum()])


@pytest.mark.parametrize("offset", ["log(p + 1)", "log(p)*z", "p - g", "2*p"])
def test_functions_of_an_offset_without_end_are_not_computed(offset):
    """Sums of log(p + 1), log(p + 2) and so on over ten rows would determine the ten values."""
    with pytest.raises(DescriptionError, match="simple formulas"):
        sums(sites(fs.Policy.strict()), f"z + offset({offset})")


def test_functions_of_an_offset_count_as_functions_of_its_column():
    """With and without a site of ten rows: at most five sums of one column."""
    few = FRAME[(FRAME["site"] != "A") | (FRAME.index < 30)].copy()
    few.loc[few.index > 300, "site"] = few["site"].where(few["site"] == "C", "D")
    where, without = sites(fs.Policy.strict(), few), sites(fs.Policy.strict(), few[few["site"] != "A"])
    assert (few["site"] == "A").sum() == 10
    found = 0
    for right in (
        "z + offset(p)",
        "z + offset(log(p))",
        "z + offset(exp(p))",
        "z + p",
        "z + log(p)",
        "z + sqrt(p)",
    ):
        try:
            both = [fs.FederatedGLM.from_formula(f"y ~ {right}", one).fit() for one in (where, without)]
        except PolicyError:
            continue
        found += len(both) // 2
    assert found and len(released_sums(where.sites["A"].site_ledger, ["p"])["p"]) <= 5
