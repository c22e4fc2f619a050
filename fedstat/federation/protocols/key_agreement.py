"""Agreement of the sites on pairwise keys, through a coordinator that learns none of them.

Two rounds: sites show their public identities and sign fresh keys, over the fingerprints that their owners
pinned; then they hold each other's identities and signatures against these fingerprints
(:mod:`fedstat.federation.crypto.keys`). A key is signed before any other is known, which costs nothing: no
secret comes of it before the second round, and sites whose owners pinned different keys sign different lists.

Where many sites need keys for sums only, each agrees with few neighbors, in three rounds: sites bind
themselves to fresh keys, sign them, and check what their neighbors signed
(:mod:`fedstat.federation.crypto.masks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fedstat.codec import from_json, to_json
from fedstat.errors import PinError
from fedstat.federation.crypto import masks
from fedstat.federation.crypto.keys import ANNOUNCED, KeyAgreement, PairKeys, PublicIdentity, parse_key_text
from fedstat.federation.crypto.rosters import announce_roster, check_rosters, strip_roster
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import Request, control
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.typing import Array

FAMILY = "secure"
RING = "ring agreement"
"""Differs from the other name: 'finish' would make masks with no other site from it."""

PUBLIC = control("public keys, signed")


@dataclass(frozen=True, slots=True)
class KeysRequest:
    """A session that needs keys, and its sites."""

    session: str
    sites: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeysAnnounced:
    """By site, its public identity, in JSON, and what it announced."""

    public: Mapping[str, str]
    announced: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CommittedSites:
    """A session of many sites that needs keys, and by what each has bound itself to its key."""

    session: str
    sites: tuple[str, ...]
    committed: str


@dataclass(frozen=True, slots=True)
class CommittedSite:
    """One site's public identity, and by what it has bound itself to its key."""

    public: str
    committed: str


@dataclass(frozen=True, slots=True)
class KeysForwarded:
    """Keys of all sites, in the order of names, and what a site's neighbors are and announced."""

    keys: str
    public: Mapping[str, str]
    announced: Mapping[str, str]


@step(FAMILY, requests=control("nothing"), replies=PUBLIC, public=True)
def introduce(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Show the site's public identity."""
    return {}, data.trust.identity.public.to_json()


@step(FAMILY, "introduce mark_records", request=KeysRequest, requests=PUBLIC, replies=PUBLIC, public=True)
def announce(data: SiteData, state: State, request: KeysRequest) -> tuple[dict[str, Array], str]:
    """Sign a new key for this session; `request` has the name of the session and the sites.

    Raises a SecurityError if this site's owner has pinned no key of one of them.
    """
    agreement = KeyAgreement(
        data.trust.identity, request.session, data.name, None, _pinned(data, request.sites)
    )
    state.keep("agreement", agreement)
    return {}, _with_roster(data, state, request.session, agreement.announce())


def _with_roster(data: SiteData, state: State, session: str, announced: str) -> str:
    trust = data.trust
    return announce_roster(trust.identity, session, data.name, _rosters(data, state), announced)


def _rosters(data: SiteData, state: State) -> Mapping[str, str]:
    return data.trust.rosters_of(state.subject.client)


def _pinned(data: SiteData, names: Iterable[str]) -> dict[str, str]:
    """Fingerprints that the owner pinned; a SecurityError names the sites of which there is none."""
    pinned = {name: data.trust.pinned.get(name, "") for name in names}
    unknown = sorted(name for name, fingerprint in pinned.items() if not fingerprint)
    if unknown:
        raise PinError(f"{data.name}: its owner has pinned no key of {', '.join(unknown)}")
    return pinned


@step(FAMILY, "announce mark_records", request=KeysAnnounced, requests=PUBLIC, public=True)
def finish(data: SiteData, state: State, found: KeysAnnounced) -> tuple[dict[str, Array], str]:
    """Check who the others are and what they announced, and keep the keys shared with each, and a masker.

    A SecurityError where an identity is not the one that this site's owner pinned.
    """
    absent = "no agreement on keys was begun in this session; ask 'announce' first"
    agreement = state.use("agreement", KeyAgreement, absent)
    # The coordinator carries the identities, and could put its own in their place: only pinned ones count.
    public = {name: PublicIdentity.from_json(key) for name, key in found.public.items()}
    reported = check_rosters(data.name, agreement.session, _rosters(data, state), public, found.announced)
    return _keep_keys(state, agreement.finish(reported, public))


def _keep_keys(state: State, keys: PairKeys) -> tuple[dict[str, Array], str]:
    state.keep("keys", keys)
    state.keep("masker", masks.Masker(keys))
    return {}, ""


@step(FAMILY, requests=control("name of the session"), replies=PUBLIC, public=True)
def commit(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Show the site's public identity, and bind it to a fresh key for the session that the text names."""
    agreement = masks.NeighborAgreement(data.trust.identity, text, data.name)
    state.keep(RING, agreement)
    public = data.trust.identity.public.to_json()
    return {}, to_json(CommittedSite(public, masks.join_commitments({data.name: agreement.commitment})))


@step(FAMILY, "commit mark_records", request=CommittedSites, requests=PUBLIC, replies=PUBLIC, public=True)
def sign(data: SiteData, state: State, request: CommittedSites) -> tuple[dict[str, Array], str]:
    """Show the fresh key, signed with what all sites are bound to; once, and to pinned sites."""
    agreement = state.use(RING, masks.NeighborAgreement, "this site is bound to no key; ask 'commit' first")
    committed = masks.split_commitments(request.sites, request.committed)
    return {}, _with_roster(
        data, state, agreement.session, agreement.sign(committed, _pinned(data, committed))
    )


@step(FAMILY, "sign mark_records", request=KeysForwarded, requests=PUBLIC, name="meet", public=True)
def accept_neighbors(data: SiteData, state: State, request: KeysForwarded) -> tuple[dict[str, Array], str]:
    """Check the keys of all sites and what the neighbors announced; keep keys with these, and a masker."""
    agreement = state.use(RING, masks.NeighborAgreement, "this site is bound to no key; ask 'commit' first")
    public = {name: PublicIdentity.from_json(key) for name, key in request.public.items()}
    keys = masks.split_commitments(agreement.sites, request.keys)
    reported = check_rosters(data.name, agreement.session, _rosters(data, state), public, request.announced)
    return _keep_keys(state, agreement.agree_keys(keys, public, reported))


def keys_of(state: State) -> PairKeys:
    """Return the keys of this session, or say that there are none."""
    return state.use("keys", PairKeys, "the sites have not agreed on keys in this session")


LAST = ("finish", "meet")
"""Steps with which an agreement ends."""


Peers: TypeAlias = Mapping[str, tuple[str, ...]]
"""By site, those with which it has agreed on keys, in the order of their names."""


def agree_keys(sites: Sequence[str], session: str, sums_only: bool = False) -> FitProtocol[Peers]:
    """Let sites agree on pairwise keys; a SecurityError where a key is not pinned or a signature wrong.

    Of many sites whose keys serve masked sums only, each agrees with its neighbors. Returns the peers.
    """

    def request(site: str, step: str, content: str) -> Request:
        return Request(site, FAMILY, step, {}, session, content)

    if sums_only and masks.is_sparse(len(sites)):
        return (yield from agree_with_neighbors(sites, session, request))
    content = to_json(KeysRequest(session, tuple(sites)))
    introducing = [request(site, "introduce", "{}") for site in sites]
    replies = yield introducing + [request(site, "announce", content) for site in sites]
    K = len(sites)
    public, announced = (
        {site: reply.text for site, reply in zip(sites, half, strict=True)}
        for half in (replies[:K], replies[K:])
    )
    # Packed once for all sites: it grows with their number.
    content = to_json(KeysAnnounced(public, announced))
    yield [request(site, "finish", content) for site in sites]
    return {site: tuple(sorted(set(sites) - {site})) for site in sites}


def agree_with_neighbors(
    sites: Sequence[str], session: str, request: Callable[[str, str, str], Request]
) -> FitProtocol[Peers]:
    """Let each of many sites agree on keys with its neighbors, which are returned."""
    replies = yield [request(site, "commit", session) for site in sites]
    reported = {
        site: from_json(CommittedSite, reply.text, f"{site}: what binds it to its key")
        for site, reply in zip(sites, replies, strict=True)
    }
    words = {site: masks.split_commitments([site], one.committed)[site] for site, one in reported.items()}
    content = to_json(CommittedSites(session, tuple(sorted(sites)), masks.join_commitments(words)))
    replies = yield [request(site, "sign", content) for site in sites]
    announced = {site: reply.text for site, reply in zip(sites, replies, strict=True)}
    keys = {
        site: parse_key_text(
            strip_roster(text), f"the announcement of '{site}'", "fedstat agreement 1", ANNOUNCED
        )["key"]
        for site, text in announced.items()
    }
    near = masks.all_neighbors(keys, session)
    yield [
        request(site, "meet", to_json(_forwarded(keys, near[site], reported, announced))) for site in sites
    ]
    return {site: tuple(sorted(peers)) for site, peers in near.items()}


def _forwarded(
    keys: Mapping[str, bytes],
    near: Sequence[str],
    reported: Mapping[str, CommittedSite],
    announced: Mapping[str, str],
) -> KeysForwarded:
    """Put together what one site is shown of the others."""
    public = {name: reported[name].public for name in near}
    return KeysForwarded(masks.join_commitments(keys), public, {name: announced[name] for name in near})
