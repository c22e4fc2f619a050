"""Masked sums over fifteen sites, each of which masks with few others: what the coordinator and an ally read.

The target is one site. The coordinator holds every message; its ally is another site, which hands over the
masks that it shares with all others.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from wiretap import TappedEngine, Wire

import fedstat as fs
from fedstat.errors import DescriptionError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.crypto.masks import GUARD_BITS, Masker, is_sparse
from fedstat.federation.design.horizontal_design import moment_requests, open_requests
from fedstat.federation.protocols.masked_sums import masked_protocol

SITES = tuple(f"S{k:02d}" for k in range(15))
TARGET, ALLY = "S03", "S07"
SUMS, LIMBS, PLACES = "moments", 6, 192
MODULUS = 1 << (64 * LIMBS)


def patients():
    rng = np.random.default_rng(2)
    x = rng.normal(50, 9, 30 * len(SITES)).round(1)
    return pd.DataFrame({"site": np.repeat(SITES, 30), "x": x, "y": rng.integers(0, 2, len(x))})


@pytest.fixture(scope="module")
def model():
    made = fs.ClientPartition.from_frame(patients(), by="site", policy="strict")
    return fs.GLORE.from_formula("y ~ x", made)


def take_sums(model, sites, session):
    """Let sites sum the moments of their columns, as any fit begins; return all messages, and the sums."""
    chosen = tuple(row for row in model.agreement.sites if row.site in sites)
    rows, wire = replace(model.agreement, sites=chosen), Wire()

    def protocol():
        replies = yield open_requests(rows, session) + moment_requests(rows, session)
        return np.sum([reply.arrays[SUMS] for reply in replies[len(sites) :]], axis=0)

    engine = TappedEngine(model.partition.sites, wire)
    request = masked_protocol(protocol(), sites, session, sums_only=True)
    return wire, engine.run(request, Ledger())


def part_of(wire, site):
    """Integer behind the masked sum of x at a site, mod 2^384."""
    (words,) = wire.sent_by(site, "sum_columns", SUMS)
    assert len(words) == LIMBS
    return complete(words[:, 1, -1])


def complete(words):
    return sum(int(np.uint64(word)) << (64 * place) for place, word in enumerate(words.view(np.uint64)))


def number(value):
    """Number encoded by an integer; None if masks are left in it."""
    value = (value + MODULUS // 2) % MODULUS - MODULUS // 2
    return value / 2**PLACES if abs(value) < MODULUS >> GUARD_BITS else None


def sums_that_are_read(parts, without=None):
    """Every set of sites with the target whose parts add up to a number, by trying all."""
    others = [site for site in parts if site not in (TARGET, without)]
    found = {}
    for size in range(len(others) + 1):
        for some in combinations(others, size):
            total = number(sum(parts[site] for site in (TARGET, *some)))
            if total is not None:
                found[(TARGET, *some)] = total
    return found


def test_no_sum_over_fewer_sites_is_read(model):
    assert is_sparse(len(SITES))
    wire, _ = take_sums(model, SITES, "all")
    found = sums_that_are_read({site: part_of(wire, site) for site in SITES})
    (sites,) = found
    assert set(sites) == set(SITES)
    assert found[sites] == pytest.approx(patients().x.sum(), rel=1e-12)


@pytest.fixture
def masks_of_ally(monkeypatch):
    """Masks of the ally with each other site, by session."""
    nonces, masks = {}, defaultdict(dict)
    claim, mask_all = Masker._claim, Masker.mask_all

    def remember(masker, name, *args):
        nonces[masker, name] = claim(masker, name, *args)
        return nonces[masker, name]

    def listen(masker, arrays, *args, **kwargs):
        masked = mask_all(masker, arrays, *args, **kwargs)
        for name, words in masked.items():
            if masker.site == ALLY and name.endswith(SUMS):
                for peer, stream in masker._streams.items():
                    drawn = np.asarray(stream.words(nonces[masker, name], words.size)).reshape(words.shape)
                    masks[id(masker)][peer] = complete(drawn[:, 1, -1])
        return masked

    monkeypatch.setattr(Masker, "_claim", remember)
    monkeypatch.setattr(Masker, "mask_all", listen)
    return masks


def test_an_ally_learns_the_sum_over_all_others_and_no_other(model, masks_of_ally):
    wire, _ = take_sums(model, SITES, "ally")
    (masks,) = masks_of_ally.values()
    assert len(masks) < len(SITES) - 1
    parts = {site: part_of(wire, site) for site in SITES if site != ALLY}
    for site, mask in masks.items():
        parts[site] += mask if site > ALLY else -mask
    found = sums_that_are_read(parts)
    (sites,) = found
    assert set(sites) == set(SITES) - {ALLY}
    assert found[sites] == pytest.approx(patients().query("site != @ALLY").x.sum(), rel=1e-12)


def test_parts_before_and_after_a_restart_do_not_cancel(model):
    """A fit that starts again without a lost site asks for the same sums: no part has changed."""
    rest = tuple(site for site in SITES if site != "S11")
    before, after = take_sums(model, SITES, "before")[0], take_sums(model, rest, "after")[0]
    for site in rest:
        assert number(part_of(before, site) - part_of(after, site)) is None
    totals = [sum(part_of(wire, site) for site in rest) for wire in (before, after)]
    assert number(totals[0]) is None and number(totals[1]) is not None


def test_a_site_is_the_difference_of_two_sums_unless_owners_forbid_both(model):
    rest = tuple(site for site in SITES if site != TARGET)
    n, x = (take_sums(model, SITES, "1")[1] - take_sums(model, rest, "2")[1])[:2, -1]
    own = patients().query("site == @TARGET").x
    assert (n, x) == pytest.approx((len(own), own.sum()), rel=1e-12)
    policy = fs.Policy.strict(apart=2)
    made = fs.ClientPartition.from_frame(patients(), by="site", policy="strict", policies={ALLY: policy})
    guarded = fs.GLORE.from_formula("y ~ x", made)
    take_sums(guarded, SITES, "1")
    take_sums(guarded, tuple(site for site in rest if site != "S04"), "2")
    with pytest.raises(DescriptionError, match=rf"{ALLY}: its policy \(apart\)"):
        take_sums(guarded, rest, "3")
