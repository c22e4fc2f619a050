"""Keys with few neighbors on a ring: the chance that sites fall apart, a coordinator that would choose."""

import math

import numpy as np
import pytest

from fedstat.errors import SecurityError
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.crypto.masks import (
    FLOATS,
    Masker,
    NeighborAgreement,
    all_neighbors,
    is_sparse,
    join_commitments,
    neighbor_reach,
    neighbors_of,
    split_commitments,
    unmask_sums,
)
from fedstat.federation.disclosure.threat_statements import OTHER_SITE, STRICT_LEARNS

NAMES = tuple(f"site {k:02d}" for k in range(20))
IDENTITIES = {name: Identity.generate() for name in NAMES}
PUBLIC = {name: identity.public for name, identity in IDENTITIES.items()}
PINNED = {name: key.fingerprint for name, key in PUBLIC.items()}


def begin(session="fit 1"):
    return {name: NeighborAgreement(IDENTITIES[name], session, name) for name in NAMES}


def key_of(agreement):
    return agreement._open().public_key().public_bytes_raw()


def signed(agreements):
    committed = {name: one.commitment for name, one in agreements.items()}
    announced = {name: one.sign(committed, PINNED) for name, one in agreements.items()}
    return {name: key_of(one) for name, one in agreements.items()}, announced


def met(agreements, keys, announced, site):
    near = neighbors_of(keys, "fit 1", site)
    return agreements[site].agree_keys(keys, {n: PUBLIC[n] for n in near}, {n: announced[n] for n in near})


def test_each_site_has_about_three_log2_neighbors_and_they_are_mutual():
    assert [is_sparse(n) for n in (2, 12, 13, 14, 500)] == [False, False, False, True, True]
    rng = np.random.default_rng(1)
    for K in (14, 50, 200):
        keys = {str(k): rng.bytes(32) for k in range(K)}
        near = all_neighbors(keys, "s")
        assert all(len(one) == 2 * neighbor_reach(K) for one in near.values())
        assert all(a in near[b] for a, one in near.items() for b in one)
        assert near["3"] == neighbors_of(keys, "s", "3")
        assert 3 * math.log2(K) <= 2 * neighbor_reach(K) < 3 * math.log2(K) + 2


def test_the_order_is_that_of_all_keys_and_the_session():
    rng = np.random.default_rng(2)
    keys = {str(k): rng.bytes(32) for k in range(40)}
    other = keys | {"7": rng.bytes(32)}
    sets = [neighbors_of(*args, "3") for args in ((keys, "s"), (other, "s"), (keys, "t"))]
    assert len(set(sets)) == 3
    assert neighbors_of(dict(reversed(keys.items())), "s", "3") == sets[0]


def connected(near, honest):
    """Whether sites reach each other through their own neighbors: searched, not derived."""
    start = next(iter(honest))
    seen, ahead = {start}, [start]
    while ahead:
        new = [name for name in near[ahead.pop()] if name in honest and name not in seen]
        seen.update(new)
        ahead += new
    return seen == honest


def disconnection_probability(n_sites: int, in_league: int) -> float:
    r"""Probability that honest sites are disconnected, so that sums over fewer than all of them are revealed.

    The gaps between m = K - c such sites on the ring are a uniform composition of c; two of h or more cut
    the ring. By inclusion and exclusion over the sets of j long gaps ::

        P = sum_{j >= 2} (-1)^j (j - 1) C(m, j) C(c - jh + m - 1, m - 1) / C(c + m - 1, m - 1)
    """
    h, m, c = neighbor_reach(n_sites), n_sites - in_league, in_league
    if m < 2:
        return 0.0
    apart = sum(
        (-1) ** j * (j - 1) * math.comb(m, j) * math.comb(c - j * h + m - 1, m - 1)
        for j in range(2, min(m, c // h) + 1)
    )
    return float(apart / math.comb(c + m - 1, m - 1))


@pytest.mark.parametrize("K, c", [(20, 15), (20, 16), (50, 34), (50, 40)])
def test_the_chance_that_honest_sites_fall_apart_is_what_simulation_finds(K, c):
    rng, runs, apart = np.random.default_rng(3), 1500, 0
    names = [str(k) for k in range(K)]
    honest = set(names[c:])
    for _ in range(runs):
        keys = {name: rng.bytes(32) for name in names}
        apart += not connected(all_neighbors(keys, "s"), honest)
    P = disconnection_probability(K, c)
    assert 0.002 < P < 0.9
    assert abs(apart / runs - P) < 4.0 * math.sqrt(P * (1.0 - P) / runs)


def test_the_chances_that_are_stated():
    for K in (14, 50, 200, 500):
        assert (
            disconnection_probability(K, 2 * neighbor_reach(K) - 1)
            == 0.0
            < disconnection_probability(K, min(2 * neighbor_reach(K), K - 2))
        )
    assert disconnection_probability(200, 66) < 1e-9 and disconnection_probability(200, 100) == pytest.approx(
        7e-5, rel=0.05
    )
    claimed = STRICT_LEARNS[OTHER_SITE]
    (claim,) = [one for one in claimed if "a third of at least 14 sites" in one]
    assert "in one of 100 million key agreements" in claim
    assert max(disconnection_probability(K, K // 3) for K in (*range(14, 200), 300, 500)) < 1e-8


def test_masks_with_neighbors_cancel_over_all():
    agreements = begin()
    keys, announced = signed(agreements)
    maskers = [Masker(met(agreements, keys, announced, name)) for name in NAMES]
    assert all(masker.sites == NAMES and len(masker._keys) == 2 * neighbor_reach(20) for masker in maskers)
    parts = np.random.default_rng(4).normal(size=(20, 5))
    sent = [
        one.mask_all({"x": part}, 0, {"x": FLOATS})["x"] for one, part in zip(maskers, parts, strict=True)
    ]
    np.testing.assert_allclose(unmask_sums({"x": sent})["x"], parts.sum(axis=0), rtol=1e-14)
    with pytest.raises(SecurityError, match="did not cancel"):
        unmask_sums({"x": sent[1:]})["x"]


# A coordinator that would choose the order


def test_a_site_signs_one_list_only():
    """With all keys known, a coordinator and a site in league try keys of that site until the order suits."""
    agreements = begin()
    signed(agreements)
    in_league = NeighborAgreement(IDENTITIES[NAMES[0]], "fit 1", NAMES[0])
    committed = {name: one.commitment for name, one in agreements.items()}
    for name in NAMES[1:]:
        with pytest.raises(SecurityError, match="has shown its key"):
            agreements[name].sign(committed | {NAMES[0]: in_league.commitment}, PINNED)


def test_a_key_that_was_not_said_before_is_refused_at_every_site():
    agreements = begin()
    keys, announced = signed(agreements)
    late = keys | {NAMES[0]: key_of(NeighborAgreement(IDENTITIES[NAMES[0]], "fit 1", NAMES[0]))}
    # also a site that is no neighbor of the one in league sees it
    for name in NAMES[1:]:
        with pytest.raises(SecurityError, match=f"not the key that was said before.*{NAMES[0]}"):
            met(agreements, late, announced, name)


def test_neighbors_of_a_coordinators_choosing_are_refused():
    agreements = begin()
    keys, announced = signed(agreements)
    chosen = [n for n in NAMES if n not in neighbors_of(keys, "fit 1", NAMES[0])][1:]
    with pytest.raises(SecurityError, match="expected announcements of its neighbors"):
        agreements[NAMES[0]].agree_keys(
            keys, {n: PUBLIC[n] for n in chosen}, {n: announced[n] for n in chosen}
        )


def test_another_identity_signature_or_list_is_refused():
    agreements = begin()
    keys, announced = signed(agreements)
    site = NAMES[5]
    near = neighbors_of(keys, "fit 1", site)
    public, texts = {n: PUBLIC[n] for n in near}, {n: announced[n] for n in near}
    with pytest.raises(SecurityError, match="not the pinned key"):
        agreements[site].agree_keys(keys, public | {near[0]: Identity.generate().public}, texts)
    with pytest.raises(SecurityError, match="wrong signature"):
        agreements[site].agree_keys(keys, public, texts | {near[0]: announced[near[1]]})
    other = begin()
    _, foreign = signed(other)
    with pytest.raises(SecurityError, match="another session, or for another list"):
        agreements[site].agree_keys(keys, public, texts | {near[0]: foreign[near[0]]})
    assert agreements[site].agree_keys(keys, public, texts).peers == near


def test_a_list_without_the_site_or_with_one_key_twice_is_refused():
    agreements = begin()
    committed = {name: one.commitment for name, one in agreements.items()}
    first = agreements[NAMES[0]]
    with pytest.raises(SecurityError, match="does not hold this site"):
        first.sign(committed | {NAMES[0]: bytes(32)}, PINNED)
    with pytest.raises(SecurityError, match="same key"):
        first.sign(committed, PINNED | {NAMES[2]: PINNED[NAMES[1]]})


@pytest.mark.parametrize("text", ["", "AAAA", "*", "A" * 43 + "=" * 3])
def test_words_that_do_not_fit_the_sites_are_refused(text):
    words = {"B": bytes(32), "A": bytes(range(32))}
    assert split_commitments(("B", "A"), join_commitments(words)) == words
    with pytest.raises(SecurityError, match="32 bytes of each"):
        split_commitments(("A", "B"), text)
