"""Masked sums under a protocol that does not know of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest

from fedstat.errors import MessageError, PolicyError, SecurityError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES, Site
from fedstat.federation.message import ArrayDeclaration, Request, Step, pack_request, unpack_reply
from fedstat.federation.protocols.engine import FitProtocol, LocalEngine
from fedstat.federation.protocols.key_agreement import agree_keys
from fedstat.federation.protocols.masked_sums import masked_protocol
from fedstat.typing import Array

SITES = ("A", "B", "C")


def total(data, state, offset: Array) -> dict[str, Array]:
    values = data.frame.to_numpy(dtype=float)
    state.count_entities(len(values))
    out = {"sum": values.sum(axis=0) + float(offset), "n": np.array(len(values)), "name": np.array(1.0)}
    if data.name == "B" or not float(offset):
        out["sometimes"] = values.sum(axis=0)
    return out


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    FAMILIES["toy"] = {
        "total": Step(
            total,
            {"offset": ArrayDeclaration("control", "offset", 0)},
            {
                "sum": ArrayDeclaration(
                    "aggregate", "sum of the columns", maskable=True, behind=(EntityCount,)
                ),
                "n": ArrayDeclaration("aggregate", "rows", 0, maskable=True, behind=(EntityCount,)),
                "name": ArrayDeclaration("control", "a constant", 0),
                "sometimes": ArrayDeclaration(
                    "aggregate", "sum of the columns", maskable=True, optional=True, behind=(EntityCount,)
                ),
            },
        )
    }
    yield
    del FAMILIES["toy"]


def make_sites(policy: Policy | None = None, names: tuple[str, ...] = SITES) -> dict[str, Site]:
    rng = np.random.default_rng(1)
    sites = {
        name: Site(name, pd.DataFrame(rng.normal(size=(20 + k, 3)), columns=list("xyz")), policy)
        for k, name in enumerate(names)
    }
    for site in sites.values():
        site.trust.pinned.update({n: s.trust.identity.public.fingerprint for n, s in sites.items()})
    return sites


def protocol(names: tuple[str, ...] = SITES, seen: list | None = None) -> FitProtocol[list[Array]]:
    """Two steps in one round, then one more; adds replies up."""
    request = [Request(name, "toy", "total", {"offset": np.array(0.0)}, "s") for name in names]
    more = [Request(name, "toy", "total", {"offset": np.array(1.5)}, "s") for name in names]
    replies = yield [*request, *more]
    last = yield more
    if seen is not None:
        seen.extend([replies, last])
    K = len(names)
    return [
        np.sum([r.arrays[name] for r in part], axis=0)
        for part in (replies[:K], replies[K:], last)
        for name in ("sum", "n")
    ]


def test_the_protocol_adds_up_the_same_and_sees_no_part():
    sites = make_sites()
    engine = LocalEngine(sites)
    plain = engine.run(protocol(), Ledger())
    seen: list = []
    ledger = Ledger()
    hidden = engine.run(masked_protocol(protocol(seen=seen), SITES, "s"), ledger)
    for a, b in zip(plain, hidden, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-15, atol=1e-14)
    for replies in (seen[0][:3], seen[0][3:], seen[1]):
        for reply in replies[1:]:
            assert not reply.arrays["sum"].any()
            assert reply.arrays["name"] == 1.0
    assert all("sometimes" in reply.arrays for reply in seen[0][:3])
    assert not any("sometimes" in reply.arrays for reply in seen[1])
    entries = [e for e in ledger.entries if e.array in ("sum", "n")]
    assert len(entries) == 18 and all(e.masked for e in entries)
    assert not any(e.masked for e in ledger.entries if e.array == "name")
    assert {e.shape for e in entries if e.array == "sum"} == {(3,)}


def test_each_masked_reply_looks_random():
    sites = make_sites()
    LocalEngine(sites).run(agree_keys(SITES, "s"), Ledger())
    request = Request("A", "toy", "total", {"offset": np.array(0.0)}, "s", masked=0)
    reply = unpack_reply(sites["A"].answer(pack_request(request)))
    assert reply.arrays["sum"].shape == (2, 3) and reply.arrays["sum"].dtype == np.int64
    assert np.abs(reply.arrays["sum"]).min() > 2**40
    with pytest.raises(SecurityError, match="masked before"):
        sites["A"].answer(pack_request(request))


def test_masks_need_keys():
    site = make_sites()["A"]
    with pytest.raises(MessageError, match="not agreed on"):
        site.answer(pack_request(Request("A", "toy", "total", {"offset": np.array(0.0)}, "s", masked=0)))


def test_a_site_left_out_of_a_sum_is_reported_before_anything_leaves():
    sites = make_sites()
    with pytest.raises(MessageError, match="a masked sum needs all of"):
        LocalEngine(sites).run(masked_protocol(protocol(("A", "B")), SITES, "s"), Ledger())


def test_masked_only_sites_refuse_what_is_not_masked():
    sites = make_sites(Policy(masked_only=True))
    engine = LocalEngine(sites)
    with pytest.raises(PolicyError, match=r"A: its policy .masked only.*'sum'.*masked=True"):
        engine.run(protocol(), Ledger())
    engine.run(masked_protocol(protocol(), SITES, "s"), Ledger())


def test_refused_kinds_pass_in_a_masked_sum():
    policy = Policy(refused_kinds=frozenset({"aggregate"}))
    engine = LocalEngine(make_sites(policy))
    with pytest.raises(PolicyError, match="refused kinds"):
        engine.run(protocol(), Ledger())
    engine.run(masked_protocol(protocol(), SITES, "s"), Ledger())


def test_two_sites():
    two = SITES[:2]
    plain = LocalEngine(make_sites(names=two)).run(protocol(two), Ledger())
    hidden = LocalEngine(make_sites(names=two)).run(masked_protocol(protocol(two), two, "s"), Ledger())
    np.testing.assert_allclose(hidden[0], plain[0], rtol=1e-15)
    refusing = LocalEngine(make_sites(Policy(two_sites="refuse"), two))
    with pytest.raises(PolicyError, match="two sites"):
        refusing.run(masked_protocol(protocol(two), two, "s"), Ledger())


def test_counts_are_held_before_masking():
    sites = make_sites(Policy(min_count=21))
    with pytest.raises(PolicyError, match=r"A: its policy .minimum count."):
        LocalEngine(sites).run(masked_protocol(protocol(), SITES, "s"), Ledger())
