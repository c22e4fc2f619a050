"""Few neighbours among many sites: a ring in an order that nobody chooses, and keys with these alone.

Of K sites that mask a sum each shares masks with the h before and the h after it on a ring, where ::

    h = ceil(3/2 log2(K)),    complete where 2h >= K - 1, up to 13 sites

(the randomly permuted Harary graph of Bell et al. 2020, doi:10.1145/3372297.3417885). Masks, signatures that
are checked, and exchanged keys then grow with K log K over all sites and not with K^2.

*Privacy.* Coordinator and c sites in league learn the sum over each connected part of the other sites, and
no more: the sum over all others, as with all pairs, unless these fall apart. That takes two stretches of h
neighbours on the ring that are all in league: never where c < 2h, and else with the probability
:func:`chance_apart`: of 200 sites with a third in league 1e-9, with half of them 7e-5.

*Order.* Sites stand on the ring by SHA-256 of a seed and their name; the seed is the digest of all keys of
the session. Each site is bound to its key before it is shown any other: it says SHA-256 of its key
(:attr:`NeighbourAgreement.commitment`), signs with its key what all have said, once, and derives nothing
where a key is not the one that was said. So the order is uniform if one site is honest. A coordinator can
break an agreement off and have another, in which all draw new keys and which stands in all accounts: in G
agreements the chance is at most G times as large, and no computing of its own adds to it.

*Bytes.* Names and 64 bytes of every site go to each, 0.1 kB per site, and some 0.5 kB of each neighbour.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedstat.errors import SecurityError
from fedstat.federation.crypto.keys import (
    KEY_BYTES,
    Agreement,
    Identity,
    PairKeys,
    PublicIdentity,
    encode,
    pin,
    plain_fingerprint,
)


def reach(n_sites: int) -> int:
    """Neighbours on either side of a site."""
    return math.ceil(1.5 * math.log2(max(n_sites, 2)))


def is_sparse(n_sites: int) -> bool:
    """Whether of so many sites each masks with some of the others only."""
    return 2 * reach(n_sites) < n_sites - 1


def all_neighbours(keys: Mapping[str, bytes], session: str) -> dict[str, tuple[str, ...]]:
    """Names of each site's neighbours, sorted, from the keys of all sites of a session."""
    ring = _ring(keys, session)
    return {site: _beside(ring, at) for at, site in enumerate(ring)}


def neighbours(keys: Mapping[str, bytes], session: str, site: str) -> tuple[str, ...]:
    """Names of one site's neighbours."""
    ring = _ring(keys, session)
    return _beside(ring, ring.index(site))


def _ring(keys: Mapping[str, bytes], session: str) -> list[str]:
    parts = [part for name in sorted(keys) for part in (name, keys[name])]
    seed = hashlib.sha256(encode("fedstat ring 1", session, *parts)).digest()
    return sorted(keys, key=lambda name: hashlib.sha256(seed + name.encode()).digest())


def _beside(ring: Sequence[str], at: int) -> tuple[str, ...]:
    K = len(ring)
    places = {(at + sign * step) % K for step in range(1, reach(K) + 1) for sign in (1, -1)} - {at}
    return tuple(sorted(ring[place] for place in places))


def chance_apart(n_sites: int, in_league: int) -> float:
    r"""Probability that sites not in league fall apart, so that sums over less than all of them are told.

    The gaps between m = K - c such sites on the ring are a uniform composition of c; two of h or more cut
    the ring. By inclusion and exclusion over the sets of j long gaps ::

        P = sum_{j >= 2} (-1)^j (j - 1) C(m, j) C(c - jh + m - 1, m - 1) / C(c + m - 1, m - 1)
    """
    h, m, c = reach(n_sites), n_sites - in_league, in_league
    if m < 2:
        return 0.0
    apart = sum(
        (-1) ** j * (j - 1) * math.comb(m, j) * math.comb(c - j * h + m - 1, m - 1)
        for j in range(2, min(m, c // h) + 1)
    )
    return float(apart / math.comb(c + m - 1, m - 1))


def join_words(words: Mapping[str, bytes]) -> str:
    """Write 32 bytes of each site, in the order of names, as one text."""
    return base64.b64encode(b"".join(words[name] for name in sorted(words))).decode()


def split_words(names: Sequence[str], text: str) -> dict[str, bytes]:
    """Read what :func:`join_words` wrote of these sites; SecurityError where it is none."""
    try:
        joined = base64.b64decode(text, validate=True)
    except ValueError:
        joined = b""
    if len(joined) != KEY_BYTES * len(names) or len(set(names)) != len(names):
        raise SecurityError(f"expected {KEY_BYTES} bytes of each of {len(names)} sites with different names")
    places = range(0, len(joined), KEY_BYTES)
    return {name: joined[at : at + KEY_BYTES] for name, at in zip(sorted(names), places, strict=True)}


class NeighbourAgreement(Agreement):
    """One site's part in agreeing on keys with its neighbours, in a session of many sites."""

    def __init__(self, identity: Identity, session: str, site: str) -> None:
        self.site, self.session, self.sites = site, session, ()
        self._identity = identity
        self._pinned: dict[str, str] = {}
        self._public: dict[str, PublicIdentity] = {}
        self._begin(X25519PrivateKey.generate())
        self._committed: Mapping[str, bytes] = {}
        self._digests: Mapping[str, bytes] = {}

    @property
    def commitment(self) -> bytes:
        """What binds the site to its key before it has seen another."""
        return _commitment(self.session, self.site, self._open().public_key().public_bytes_raw())

    def sign(self, committed: Mapping[str, bytes], pinned: Mapping[str, str]) -> str:
        """Show the key, signed together with what all sites are bound to.

        `pinned` are the fingerprints that were agreed with these sites. A SecurityError where the site's own
        part is not what it said, where two sites have one key, and where this was asked before: a second list
        could be made to fit the key that is known by then.
        """
        if self._committed:
            raise SecurityError(f"{self.site}: it has shown its key in this agreement; begin another one")
        digests = {name: bytes.fromhex(plain_fingerprint(pinned[name])) for name in committed}
        own = (committed.get(self.site), digests.get(self.site))
        if own != (self.commitment, self._identity.public.digest) or len(committed) < 2:
            raise SecurityError(f"{self.site}: the list of sites does not hold this site with its own key")
        if len(set(digests.values())) < len(digests):
            raise SecurityError(f"{self.site}: two sites have the same key; they count as one institution")
        self.sites = tuple(sorted(committed))
        parts = [part for name in self.sites for part in (name, digests[name], committed[name])]
        self._roster = hashlib.sha256(encode("fedstat many sites 1", self.session, *parts)).digest()
        self._committed, self._digests = dict(committed), digests
        return self.announce()

    def meet(
        self,
        keys: Mapping[str, bytes],
        public: Mapping[str, PublicIdentity],
        announcements: Mapping[str, str],
    ) -> PairKeys:
        """Derive keys with the neighbours, from the keys of all sites and what the neighbours announced.

        SecurityError where a key is not the one that its site was bound to, or a neighbour's identity is not
        the pinned one, its signature wrong, or it is missing: nothing is derived then.
        """
        fresh = self._open()
        if keys.keys() != set(self.sites):
            raise SecurityError(f"{self.site}: expected the keys of the sites that it signed a list of")
        other = [n for n in self.sites if _commitment(self.session, n, keys[n]) != self._committed[n]]
        if other:
            raise SecurityError(
                f"{self.site}: not the key that was said before any was shown: {', '.join(other)}"
            )
        near = neighbours(keys, self.session, self.site)
        if announcements.keys() != set(near):
            raise SecurityError(f"{self.site}: expected announcements of its neighbours {', '.join(near)}")
        pin({name: self._digests[name].hex() for name in near}, public)
        self._public = dict(public)
        for name in near:
            if self._verified(name, announcements[name]) != keys[name]:
                raise SecurityError(f"{self.site}: the announcement of '{name}' has another key than is said")
        parts = [part for n in self.sites for part in (n, self._digests[n], keys[n])]
        transcript = hashlib.sha256(encode("fedstat transcript 1", self.session, *parts)).digest()
        shared = {name: self._exchange(fresh, name, keys[name]) for name in near}
        self._close()
        return PairKeys(self.site, self.session, transcript, shared, self.sites)


def _commitment(session: str, site: str, key: bytes) -> bytes:
    return hashlib.sha256(encode("fedstat commitment 1", session, site, key)).digest()
