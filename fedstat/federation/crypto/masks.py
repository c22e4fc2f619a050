"""Secure aggregation: masks that cancel in a sum, and the neighbors with which a site shares them."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from threading import Lock
from typing import ClassVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedstat.errors import EstimationError, MessageError, SecurityError
from fedstat.federation.crypto.keys import (
    KEY_BYTES,
    Identity,
    KeyAgreement,
    KeyStream,
    PairKeys,
    PublicIdentity,
    check_fingerprints,
    encode_parts,
    normalize_fingerprint,
)
from fedstat.kernels.ring import Words, add_words, encode_floats, subtract_words, sum_words
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Few neighbors among many sites: a ring in random order, and keys with the neighbors alone.
#
# Of K sites that mask a sum each shares masks with the h before and the h after it on a ring, where ::
#
#     h = ceil(3/2 log2(K)),    complete where 2h >= K - 1, up to 13 sites
#
# (the randomly permuted Harary graph of Bell et al. 2020, doi:10.1145/3372297.3417885). Masks, signatures
# that are checked, and exchanged keys then grow with K log K over all sites and not with K^2.
#
# *Privacy.* Coordinator and c sites in league learn the sum over each connected part of the other sites, and
# no more: the sum over all others, as with all pairs, unless these fall apart. That takes two stretches of h
# neighbors on the ring that are all in league: never where c < 2h, and else with a small
# probability: of 200 sites with a third in league 1e-9, with half of them 7e-5 (``test_neighbors.py``).
#
# *Order.* The order of sites on the ring is by SHA-256 of a seed and their name; the seed is the digest of
# all keys of the session. Each site commits to its key before it sees any other key: it sends SHA-256 of its
# key (:attr:`NeighborAgreement.commitment`), signs all commitments once with its key, and derives nothing if
# a key does not match its commitment. So the order is uniform if one site is honest. A coordinator can abort
# an agreement and start another one, in which all draw new keys and which is in all ledgers: over G
# agreements the probability is at most G times as large, and computation alone does not increase it.
#
# *Bytes.* Names and 64 bytes of every site go to each, 0.1 kB per site, and some 0.5 kB of each neighbor.


FEW_SESSIONS = 4
"""Sessions at a time for which sites in one process share what all of them compute from public keys."""


def neighbor_reach(n_sites: int) -> int:
    """Neighbors on either side of a site."""
    return math.ceil(1.5 * math.log2(max(n_sites, 2)))


def is_sparse(n_sites: int) -> bool:
    """Return whether each of this number of sites masks with some of the others only."""
    return 2 * neighbor_reach(n_sites) < n_sites - 1


def all_neighbors(keys: Mapping[str, bytes], session: str) -> dict[str, tuple[str, ...]]:
    """Names of each site's neighbors, sorted, from the keys of all sites of a session."""
    ring = _ring(keys, session)
    return {site: _adjacent(ring, at) for at, site in enumerate(ring)}


def neighbors_of(keys: Mapping[str, bytes], session: str, site: str) -> tuple[str, ...]:
    """Names of one site's neighbors."""
    ring = _ring(keys, session)
    return _adjacent(ring, ring.index(site))


def _ring(keys: Mapping[str, bytes], session: str) -> Sequence[str]:
    names = tuple(sorted(keys))
    return _shuffled(_digest("fedstat ring 1", session, names, tuple(keys[name] for name in names)), names)


@lru_cache(FEW_SESSIONS)
def _digest(label: str, session: str, *columns: tuple[str | bytes, ...]) -> bytes:
    """Digest what is known of all sites, (K,) each."""
    parts = [part for row in zip(*columns, strict=True) for part in row]
    return hashlib.sha256(encode_parts(label, session, *parts)).digest()


@lru_cache(FEW_SESSIONS)
def _shuffled(seed: bytes, names: tuple[str, ...]) -> tuple[str, ...]:
    """Order names by a seed; sites in one process all need the same order."""
    return tuple(sorted(names, key=lambda name: hashlib.sha256(seed + name.encode()).digest()))


def _adjacent(ring: Sequence[str], at: int) -> tuple[str, ...]:
    K = len(ring)
    places = {(at + sign * step) % K for step in range(1, neighbor_reach(K) + 1) for sign in (1, -1)} - {at}
    return tuple(sorted(ring[place] for place in places))


def join_commitments(words: Mapping[str, bytes]) -> str:
    """Write 32 bytes of each site, in the order of names, as one text."""
    return base64.b64encode(b"".join(words[name] for name in sorted(words))).decode()


def split_commitments(names: Sequence[str], text: str) -> dict[str, bytes]:
    """Read the output of :func:`join_commitments` for these sites; SecurityError if it is invalid."""
    try:
        joined = base64.b64decode(text, validate=True)
    except ValueError:
        joined = b""
    if len(joined) != KEY_BYTES * len(names) or len(set(names)) != len(names):
        raise SecurityError(f"expected {KEY_BYTES} bytes of each of {len(names)} sites with different names")
    places = range(0, len(joined), KEY_BYTES)
    return {name: joined[at : at + KEY_BYTES] for name, at in zip(sorted(names), places, strict=True)}


class NeighborAgreement(KeyAgreement):
    """One site's part in agreeing on keys with its neighbors, in a session of many sites."""

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
        """Commitment of the site to its key before it has seen another."""
        return _commitment(self.session, self.site, self._open().public_key().public_bytes_raw())

    def sign(self, committed: Mapping[str, bytes], pinned: Mapping[str, str]) -> str:
        """Show the key, signed together with what all sites are bound to.

        `pinned` are the fingerprints that were agreed with these sites. A SecurityError where the site's own
        part is not what it said, where two sites have one key, and where this was asked before: a second list
        could be made to fit the key that is known by then.
        """
        if self._committed:
            raise SecurityError(f"{self.site}: it has shown its key in this agreement; begin another one")
        digests = {name: bytes.fromhex(normalize_fingerprint(pinned[name])) for name in committed}
        own = (committed.get(self.site), digests.get(self.site))
        if own != (self.commitment, self._identity.public.digest) or len(committed) < 2:
            raise SecurityError(f"{self.site}: the list of sites does not hold this site with its own key")
        if len(set(digests.values())) < len(digests):
            raise SecurityError(f"{self.site}: two sites have the same key; they count as one site")
        self.sites = tuple(sorted(committed))
        known = (tuple(words[name] for name in self.sites) for words in (digests, committed))
        self._roster = _digest("fedstat many sites 1", self.session, self.sites, *known)
        self._committed, self._digests = dict(committed), digests
        return self.announce()

    def agree_keys(
        self,
        keys: Mapping[str, bytes],
        public: Mapping[str, PublicIdentity],
        announcements: Mapping[str, str],
    ) -> PairKeys:
        """Derive keys with the neighbors, from the keys of all sites and what the neighbors announced.

        SecurityError where a key is not the one that its site was bound to, or a neighbor's identity is not
        the pinned one, its signature wrong, or it is missing: nothing is derived then.
        """
        fresh = self._open()
        if keys.keys() != set(self.sites):
            raise SecurityError(f"{self.site}: expected the keys of the sites that it signed a list of")
        shown, said = (tuple(words[name] for name in self.sites) for words in (keys, self._committed))
        other = _not_committed(self.session, self.sites, shown, said)
        if other:
            raise SecurityError(
                f"{self.site}: not the key that was said before any was shown: {', '.join(other)}"
            )
        near = neighbors_of(keys, self.session, self.site)
        if announcements.keys() != set(near):
            raise SecurityError(f"{self.site}: expected announcements of its neighbors {', '.join(near)}")
        check_fingerprints({name: self._digests[name].hex() for name in near}, public)
        self._public = dict(public)
        for name in near:
            if self._verified(name, announcements[name]) != keys[name]:
                raise SecurityError(f"{self.site}: the announcement of '{name}' has another key than is said")
        known = tuple(self._digests[name] for name in self.sites), shown
        transcript = _digest("fedstat transcript 1", self.session, self.sites, *known)
        shared = {name: self._exchange(fresh, name, keys[name]) for name in near}
        self._close()
        return PairKeys(self.site, self.session, transcript, shared, self.sites)


@lru_cache(FEW_SESSIONS)
def _not_committed(
    session: str, sites: tuple[str, ...], shown: tuple[bytes, ...], said: tuple[bytes, ...]
) -> tuple[str, ...]:
    """Return the sites whose key is not the one that they said; sites in one process all ask the same."""
    triples = zip(sites, shown, said, strict=True)
    return tuple(name for name, key, committed in triples if _commitment(session, name, key) != committed)


def _commitment(session: str, site: str, key: bytes) -> bytes:
    return hashlib.sha256(encode_parts("fedstat commitment 1", session, site, key)).digest()


# ----------------------------------------------------------------------------------------------------
# Sums over sites of which the coordinator sees nothing but the sum.
#
# Site k encodes x_k in fixed point as an integer mod 2^64, 2^128 or 2^384, and sends
#
#     x_k + sum_{l > k} m_kl - sum_{l < k} m_lk
#
# over all other sites l, or from 14 sites on over its neighbors on a ring
# (:mod:`fedstat.federation.crypto.masks`), with masks m_kl that k and l draw from the ChaCha20 keystream (RFC
# 8439, section 2.4) under the secret of the pair, nonce = (round, array). Each mask enters once with each
# sign and cancels exactly in the sum (Bonawitz et al. 2017, doi:10.1145/3133956.3133982, section 4). A masked
# array is uniform and independent of x_k without the masks of one pair.
#
# *Precision.* Floats are carried in 64.64 bits (:data:`FLOATS`): no scale has to be agreed. Every x with
# |x| >= 2^-12 = 2.4e-4 goes in exactly, smaller ones to within 2^-65 = 2.7e-20. The sum is taken without
# rounding and does not depend on the order of sites; it comes out to the last place of a double. Per site
# |x| <= 2^47/K = 1.4e14/K is allowed; the bits between that and 2^63 show whether masks have canceled: those
# that have not pass in one element with probability 2^-15. Other bits of scale serve other magnitudes, and
# ``Encoding(1, 32)`` halves the bytes, to within 2.3e-10. Sums of products of columns in any units are
# carried in 192.192 bits (:data:`WIDE`): up to 2^175/K = 4.8e52/K, to within 2^-193 = 8e-59. Integers and
# booleans are carried exactly.
#
# *Adversary.* Semi-honest coordinator and sites. The coordinator and any c of K sites together learn the sum
# over the others, and no more. With neighbors only, they learn the sum over each connected part of the
# others, which is all of them except with probability 1e-9 if a third of 200 sites collude. Not protected:
# the sum itself, and the difference of two sums over lists of sites that differ by one; sums of two sites,
# against these two (:func:`hides`); shapes and names of arrays; the sum against a site that sends false
# numbers. If a site is absent there is no sum, and the others compute it again under keys of a new session.
# See :mod:`fedstat.federation.crypto`.

GUARD_BITS = 16
MOST_ROUNDS = 2**32
MOST_WORDS, MASKS_AT_ONCE = 2**27, 2**18
"""Words of an array, and of masks of several peers that are added up at once."""

TWO_SITES = (
    "A masked sum over two sites hides neither from the other: the sum minus one's own part is the "
    "other's. It protects only against a coordinator that is at neither site and passes the sum to "
    "neither. Add a third site, or treat each part as released to the other site."
)
"""The warning for two sites."""


def hides(n_sites: int) -> bool:
    """Return whether a masked sum over this number of sites hides each part from every other site."""
    return n_sites >= 3


@dataclass(frozen=True, slots=True)
class Encoding:
    """Fixed point: x is stored as round(x * 2^scale_bits) in two's complement, in `limbs` words of 64 bits.

    One limb with no bits behind the point carries integers, and nothing else.
    """

    limbs: int = 2
    scale_bits: int = 64

    @property
    def integer(self) -> bool:
        """Whether it carries integers."""
        return self.limbs == 1 and self.scale_bits == 0

    def limit(self, terms: int) -> float:
        """Largest magnitude at one of this number of sites."""
        return math.ldexp(1.0 / terms, 64 * self.limbs - 1 - GUARD_BITS - self.scale_bits)


FLOATS = Encoding(2, 64)
WIDE = Encoding(6, 192)
COUNTS = Encoding(1, 0)
USUAL = {encoding.limbs: encoding for encoding in (COUNTS, FLOATS, WIDE)}


def encoding_of(values: Array) -> Encoding:
    """:data:`FLOATS` for float64, :data:`COUNTS` for int64 and bool."""
    return FLOATS if values.dtype == np.float64 else COUNTS


def encode_all(arrays: Mapping[str, Array], terms: int, encoding: Encoding) -> Words:
    """Fixed-point integers of arrays that K = `terms` sites add, of float64, int64 or bool: (limbs, total).

    EstimationError where a value is not finite, or larger in magnitude than the encoding holds for K terms;
    MessageError for floats in an encoding of integers, or the reverse.
    """
    for name, values in arrays.items():
        if values.dtype not in (np.float64, np.int64, np.bool_) or encoding.integer == (
            values.dtype == np.float64
        ):
            kind = "integers or booleans" if encoding.integer else "float64"
            raise MessageError(f"array '{name}' is of type {values.dtype}; its masked sum carries {kind}")
    flat = np.concatenate([values.reshape(-1) for values in arrays.values()])
    # The bits above the limit stay free: no sum of K terms reaches them, and masks that do not cancel do.
    limit = encoding.limit(terms)
    if not _is_within(flat, limit):
        name = next(name for name, values in arrays.items() if not _is_within(values, limit))
        raise EstimationError(
            f"array '{name}': a value is not finite, or exceeds {limit:.4g}, the largest magnitude allowed "
            f"in a masked sum over {terms} sites. Rescale the columns behind it (larger units, or centered), "
            "agree on an encoding for a larger bound"
        )
    if encoding.integer:
        return flat.astype(np.int64, copy=False).view(np.uint64).reshape(1, -1)
    words: Words = np.empty((encoding.limbs, flat.size), np.uint64)
    encode_floats(flat, 2.0 ** (encoding.scale_bits - 64 * (encoding.limbs - 1)), words)
    return words


def _is_within(values: Array, limit: float) -> bool:
    # This form is false for NaN; extremes, since the least int64 has no magnitude.
    return not values.size or bool(values.min() >= -limit and values.max() <= limit)


def _places(sizes: Mapping[str, int]) -> dict[str, slice]:
    """Places of arrays of these sizes, one after the other."""
    ends = [0, *accumulate(sizes.values())]
    return {name: slice(start, end) for name, (start, end) in zip(sizes, pairwise(ends), strict=True)}


def decode_all(places: Mapping[str, slice], words: Words, encoding: Encoding) -> Array:
    """Return the numbers of a sum of fixed-point integers: (limbs, size) -> (size,) float64 or int64.

    They are within one unit in the last place of the exact sum of the encoded values. SecurityError if a
    number is outside the range of possible sums: masks did not cancel. It names the array, by its place.
    """
    top = words[-1].view(np.int64)
    # Twice what terms at their limit give, since each is rounded.
    largest = 1 << (64 - GUARD_BITS)
    if not _is_within(top, largest):
        name = next(name for name, place in places.items() if not _is_within(top[place], largest))
        raise SecurityError(
            f"array '{name}': its masks did not cancel. A site is missing or entered twice, or the sites do "
            "not share the same session, round, array and encoding, or received different values of common "
            "arrays. Send the request again in a new session"
        )
    if encoding.integer:
        integer: Ints = top.copy()
        return integer
    magnitude = words.copy()
    negative = top < 0
    _negate(magnitude, negative)
    value: Floats = np.zeros(magnitude.shape[1])
    for place, word in enumerate(magnitude):  # from the least, so that what is lost is less than a last place
        value += np.ldexp(word.astype(np.float64), 64 * place - encoding.scale_bits)
    return np.negative(value, out=value, where=negative)


class Masker:
    """Masks one site's parts of the sums of one session; all sites of the session are terms.

    Keys that have a masker already are a SecurityError: masks would serve twice.
    """

    RECOMPUTED: ClassVar = ("_streams",)

    def __init__(self, keys: PairKeys) -> None:
        self.site, self.sites = keys.site, keys.sites
        self._keys = {peer: keys.secret(peer, "masks") for peer in keys.peers}
        self.recompute()
        self._used: set[bytes] = set()
        self._lock = Lock()

    def recompute(self) -> None:
        """Open the key streams of all pairs."""
        self._streams = {peer: KeyStream(key) for peer, key in self._keys.items()}

    def mask_all(
        self,
        arrays: Mapping[str, Array],
        round_number: int,
        encodings: Mapping[str, Encoding],
        bound: str = "",
    ) -> dict[str, Ints]:
        r"""Hide arrays that will be added over the sites: int64 arrays, shape (limbs, \*values.shape).

        They are uniform without this site's keys. Each name is unique within the round. Names, round (from 0,
        below 2^32) and encodings are the same at every site. So is `bound`, a digest of the common arrays;
        otherwise the masks do not cancel. EstimationError if a value is out of range (no mask was used then),
        SecurityError if the masks of this round and array were used before, MessageError for an array too
        long or of another type.
        """
        for name, values in arrays.items():
            if values.size * (limbs := encodings[name].limbs) > MOST_WORDS:
                raise MessageError(
                    f"array '{name}' has {values.size} numbers, at most {MOST_WORDS // limbs} are "
                    "masked at once; send parts"
                )
        # Arrays of one encoding are encoded and added up together: most of them are small.
        groups = {one: [n for n in arrays if encodings[n] == one] for one in encodings.values()}
        encoded = {
            one: encode_all({name: arrays[name] for name in names}, len(self.sites), one)
            for one, names in groups.items()
        }
        masked: dict[str, Ints] = {}
        # Both sites draw the same words: by the order of names one adds and the other subtracts.
        added = [stream for peer, stream in self._streams.items() if self.site < peer]
        subtracted = [stream for peer, stream in self._streams.items() if self.site > peer]
        for one, names in groups.items():
            words, nonces = encoded[one], {name: self._claim(name, round_number, bound) for name in names}
            places = _places({name: arrays[name].size for name in names})
            with self._lock:  # a stream is read at one place at a time
                for combine, streams in ((add_words, added), (subtract_words, subtracted)):
                    for masks in _sums_of_masks(streams, words.shape, places, nonces):
                        combine(words, masks)
            for name, place in places.items():
                masked[name] = words[:, place].view(np.int64).reshape(one.limbs, *arrays[name].shape)
        return {name: masked[name] for name in arrays}

    def _claim(self, name: str, round_number: int, bound: str) -> bytes:
        """Nonce of a round and array, given out once."""
        if not 0 <= round_number < MOST_ROUNDS:
            raise SecurityError(
                f"{self.site}: round {round_number} of array '{name}' is outside 0 to {MOST_ROUNDS - 1}; "
                "start a new session"
            )
        array = hashlib.sha256(encode_parts("fedstat array 1", name, *([bound] if bound else []))).digest()[
            :8
        ]
        nonce = int(round_number).to_bytes(4, "little") + array
        used = encode_parts(str(round_number), name)
        with self._lock:
            if used in self._used or nonce in self._used:
                raise SecurityError(
                    f"{self.site}: array '{name}' of round {round_number} was masked before; the same masks "
                    "on other values would disclose their difference. Ask in a new round"
                )
            self._used |= {used, nonce}
        return nonce


def _sums_of_masks(
    streams: Sequence[KeyStream],
    shape: tuple[int, ...],
    places: Mapping[str, slice],
    nonces: Mapping[str, bytes],
) -> Iterator[Words]:
    """Yield sums of the masks of some peers at once, (limbs, total), as memory allows."""
    limbs, total = shape
    at_once = max(MASKS_AT_ONCE // max(limbs * total, 1), 1)
    for some in (streams[start : start + at_once] for start in range(0, len(streams), at_once)):
        masks: Words = np.empty((len(some), limbs, total), np.uint64)
        for own, stream in zip(masks, some, strict=True):
            for name, place in places.items():
                drawn = stream.words(nonces[name], limbs * (place.stop - place.start))
                own[:, place] = drawn.view(np.uint64).reshape(limbs, -1)
        yield sum_words(masks) if len(some) > 1 else masks[0]


def unmask_sums(masked: Mapping[str, Sequence[Ints]], encoding: Encoding | None = None) -> dict[str, Array]:
    r"""Sum over all sites of a session of what :meth:`Masker.mask_all` gave at each, in any order.

    From int64 arrays of shape (limbs, \*shape), all of one shape (otherwise MessageError), a float64 or int64
    array. The encoding is that of the sites; by default that of :data:`USUAL` with this number of limbs.
    SecurityError if the masks did not cancel: a site is missing, or used other keys.
    """
    groups: dict[tuple[Encoding, int], list[str]] = {}
    for name, parts in masked.items():
        shapes = {np.shape(array) for array in parts}
        first = parts[0] if parts else np.empty(0)
        held = encoding or USUAL.get(next(iter(np.shape(first)), 0), FLOATS)
        if len(shapes) != 1 or first.ndim < 1 or len(first) != held.limbs:
            raise MessageError(
                f"array '{name}': expected masked parts of one shape, with {held.limbs} words per number "
                f"first; received {len(parts)} of shapes {sorted(shapes)}"
            )
        if any(array.dtype != np.int64 for array in parts):
            raise MessageError(f"array '{name}': a masked part is not of type int64")
        groups.setdefault((held, len(parts)), []).append(name)
    sums: dict[str, Array] = {}
    for (held, n_sites), names in groups.items():
        places = _places({name: masked[name][0].size // held.limbs for name in names})
        total = np.zeros((held.limbs, places[names[-1]].stop), np.uint64)
        for site in range(n_sites):
            parts = [masked[name][site].reshape(held.limbs, -1).view(np.uint64) for name in names]
            add_words(total, np.concatenate(parts, axis=1))
        numbers = decode_all(places, total, held)
        for name in names:
            sums[name] = numbers[places[name]].reshape(masked[name][0].shape[1:])
    return {name: sums[name] for name in masked}


def _negate(words: Words, where: Bools) -> None:
    """Apply two's complement in place, if requested: invert all bits and add one."""
    send = where.astype(np.uint64)
    words ^= np.uint64(0) - send
    for word in words:
        word += send
        send = (word < send).astype(np.uint64)
