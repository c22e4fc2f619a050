"""How many keys several sites with different rows have: people at two sites, whose rows are not independent.

Every site hashes the keys of its records under the secret that the sites share, and counts different keys by
bucket of their hashes. The coordinator, who lacks the secret, learns the sums of these counts over all sites
if there are masks, and no key. With N keys at all sites, key k at w_k of them, and B buckets with sums c_b,

    E[sum_b c_b^2] = S + (N^2 - S) / B,        S = sum_k w_k^2,

so that (S - N) / 2 follows by subtraction: the number of keys at two sites, if none is at three. Pairs of
different keys in one bucket are nearly a Poisson number, with mean N (N - 1) / (2 B).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import pdtrc

from fedstat.codec import to_json
from fedstat.errors import MessageError
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import CONNECTING_FAMILY, SiteData, State
from fedstat.federation.message import Request, control, presence, schema
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.masked_sums import masked_protocol
from fedstat.federation.tables.aligned_table import AlignedTable, has_keys, row_keys, unlabeled
from fedstat.typing import Array, Floats

FEWEST, MOST = 2**16, 2**20
"""Numbers of buckets."""
PER_KEY = 16
"""Buckets for each row of all sites, so that few keys share one by chance."""
BY_CHANCE = 1e-3
"""Probability of as many pairs by chance, below which keys count as those of several sites."""


@dataclass(frozen=True, slots=True)
class KeyCountRequest:
    """Number of buckets by which all sites count their keys."""

    buckets: int


def compares_keys(data: SiteData) -> bool:
    """Return whether a site counts keys: it has some, a secret in common, and an owner who lets it answer."""
    rules = data.policy.approval == "auto" and data.policy.privacy is None
    table = unlabeled(data.table)
    return rules and data.shared_seed is not None and not isinstance(table, AlignedTable) and has_keys(table)


@step(
    CONNECTING_FAMILY,
    request=KeyCountRequest,
    requests=schema("number of buckets"),
    releases={
        "keys": presence("keys of records by bucket of their keyed hashes", maskable=True),
        "compared": control("whether keys are counted", 0, maskable=True),
    },
)
def count_keys(data: SiteData, state: State, request: KeyCountRequest) -> dict[str, Array]:
    """Count different keys by bucket: ``keys`` (buckets,).

    Nothing is counted where there would be few, or the owner does not let it.
    """
    if not FEWEST <= request.buckets <= MOST:
        raise MessageError(f"{data.name}: expected {FEWEST:,} to {MOST:,} buckets")
    counts, keys = np.zeros(request.buckets), row_keys(data.table) if compares_keys(data) else None
    different = np.zeros(0, dtype=np.uint64) if keys is None else np.unique(keys)
    compared = len(different) >= max(data.policy.min_count, 1)
    if compared:
        counts += np.bincount(_buckets(different, data.common_seed, request.buckets), minlength=len(counts))
    return {"keys": counts, "compared": np.array(compared)}


def _buckets(keys: Array, seed: int, buckets: int) -> Array:
    """Hash keys (n,) under the common secret: (n,)."""
    secret = hashlib.blake2b((seed % 2**128).to_bytes(16, "little"), person=b"shared keys").digest()[:32]
    digests = [hashlib.blake2b(key.tobytes(), key=secret, digest_size=8).digest() for key in keys]
    return np.frombuffer(b"".join(digests), dtype="<u8") % np.uint64(buckets)


def request_shared_keys(sites: Sequence[str], n_rows: int, session: str) -> FitProtocol[int | None]:
    """Ask sites for the number of keys at several of them, about; None if one of them does not count.

    Sums are masked over three sites or more: two hide nothing from each other.
    """
    buckets = int(min(max(2 ** np.ceil(np.log2(PER_KEY * max(n_rows, 1))), FEWEST), MOST))

    def protocol() -> FitProtocol[int | None]:
        text = to_json(KeyCountRequest(buckets))
        replies = yield [Request(site, CONNECTING_FAMILY, "count_keys", {}, session, text) for site in sites]
        if int(sum(float(reply.arrays["compared"]) for reply in replies)) < len(sites):
            return None
        return shared_keys(np.sum([reply.arrays["keys"] for reply in replies], axis=0))

    counted = protocol()
    if len(sites) > 2:
        counted = masked_protocol(counted, sites, session, sums_only=True)
    return (yield from counted)


def shared_keys(counts: Floats) -> int:
    """Return about how many keys several sites have, from the sums by bucket; 0 if there may be none."""
    total, buckets = float(counts.sum()), len(counts)
    pairs = float((counts * (counts - 1.0)).sum()) / 2.0
    by_chance = total * max(total - 1.0, 0.0) / (2.0 * buckets)
    # The upper tail of a Poisson number.
    if pairs < 1.0 or pdtrc(pairs - 1.0, by_chance) >= BY_CHANCE:
        return 0
    return max(round(pairs - by_chance), 1)
