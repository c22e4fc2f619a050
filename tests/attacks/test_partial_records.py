"""Groups of entities and the columns that count as observed in them: fine groups next to coarse ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from wiretap import tapped

import fedstat as fs
from fedstat.errors import MessageError, PolicyError
from fedstat.federation.message import pack_request, unpack_reply

pytestmark = pytest.mark.filterwarnings("ignore")
TARGET = 17


def institutions(n=400, few=1):
    """Three institutions; at one of them `few` entities lack one column, and sixty the other."""
    rng = np.random.default_rng(4)
    k = np.arange(n)
    a, b = rng.normal(size=n), rng.normal(size=n)
    lacks = np.isin(k, np.arange(TARGET, TARGET + few))
    court = pd.DataFrame({"k": k, "a": np.where(k >= n - 60, np.nan, a), "b": np.where(lacks, np.nan, b)})
    frames = {
        "Bank": pd.DataFrame({"k": k, "y": a + b + rng.normal(size=n)}),
        "Court": court,
        "Tax": pd.DataFrame({"k": k, "c": rng.normal(size=n)}),
    }
    return frames, a


def requested(partition, formula, step):
    """The ask of a step to the Court, as a coordinator could send it again."""
    model = fs.VFEMRegression.from_formula(formula, partition)
    found = []

    class Engine(type(model.engine)):
        def _send(self, request, ledger):
            if (request.site, request.step) == ("Court", step):
                found.append(request)
            return super()._send(request, ledger)

    model.engine = Engine(partition.sites)
    model.fit()
    return found[0]


def total(model, column):
    """The sum of a column over the entities that count as observed, from the coordinator's messages."""
    moments = model.fit().exchange.moments
    at = moments.names.index(column)
    return float(moments.n @ moments.seen[:, at]) * moments.center[at]


def test_a_value_is_not_the_difference_of_a_finer_pattern_and_a_coarser_one():
    """One entity lacks b: with b in the formula its a is in no sum, and without b it is."""
    frames, a = institutions()
    found = {}
    for policy in ("open", "strict"):
        partition = fs.ClientPartition.from_frames(frames, on="k", policy=policy)
        try:
            complete, part = (
                total(fs.VFEMRegression.from_formula(f, partition), "a")
                for f in ("y ~ a + c", "y ~ a + b + c")
            )
            found[policy] = complete - part
        except PolicyError:
            found[policy] = None
    assert found["open"] == pytest.approx(a[TARGET], abs=1e-8)
    assert found["strict"] is None


@pytest.mark.parametrize(("policy", "told"), [("open", True), ("strict", False)])
def test_a_value_is_not_the_difference_of_two_means(policy, told):
    """The coordinator says of one entity alone that its column does not count as seen."""
    frames, a = institutions(few=60)
    partition = fs.ClientPartition.from_frames(frames, on="k", policy=policy)
    request = requested(partition, "y ~ a + b + c", "stage_block")
    seen, site = request.arrays["seen"].copy(), partition.sites["Court"]
    assert seen.shape == (400, 2) and seen[0].all()
    seen[0, 0] = False
    fewer = replace(request, arrays=request.arrays | {"seen": seen})
    if not told:
        with pytest.raises(PolicyError):
            site.answer(pack_request(fewer))
        return
    sums = [
        unpack_reply(site.answer(pack_request(one))).arrays["units"][0, 0] * one.arrays["seen"][:, 0].sum()
        for one in (request, fewer)
    ]
    assert sums[0] - sums[1] == pytest.approx(a[0], abs=1e-8)


@pytest.mark.parametrize("policy", ["open", "strict"])
def test_a_group_has_one_set_of_columns(policy):
    """Else the sum of a column over a large group would be over the few that have it."""
    frames, _ = institutions(few=60)
    partition = fs.ClientPartition.from_frames(frames, on="k", policy=policy)
    request = requested(partition, "y ~ a + b + c", "sum_products")
    mixed = replace(request, arrays=request.arrays | {"code": np.zeros_like(request.arrays["code"])})
    with pytest.raises((MessageError, PolicyError)) as refused:
        partition.sites["Court"].answer(pack_request(mixed))
    assert policy == "strict" or "have different columns" in str(refused.value)


def test_no_column_counts_as_seen_that_an_entity_lacks():
    frames, _ = institutions(few=60)
    partition = fs.ClientPartition.from_frames(frames, on="k", policy="open")
    request = requested(partition, "y ~ a + b + c", "stage_block")
    every = replace(request, arrays=request.arrays | {"seen": np.ones_like(request.arrays["seen"])})
    with pytest.raises(MessageError, match="do not have"):
        partition.sites["Court"].answer(pack_request(every))


def test_the_same_fits_go_on_at_strict_sites():
    frames, _ = institutions(few=60)
    partition = fs.ClientPartition.from_frames(frames, on="k", policy="strict")
    model = fs.VFEMRegression.from_formula("y ~ a + b + c", partition)
    with tapped(model) as wire:
        first = model.fit()
    assert wire.handed_to("Court", "stage_block", "seen")
    np.testing.assert_allclose(model.fit().params, first.params, rtol=1e-9)
    assert (fs.VFEMRegression.from_formula("y ~ a + c", partition).fit().bse > 0.0).all()
