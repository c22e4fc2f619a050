"""Agreement of a session's sites on pairwise keys through the coordinator, who learns none.

Two rounds: sites show their public identities and sign fresh keys, over the fingerprints that their owners
pinned; then they hold each other's identities and signatures against these fingerprints
(:mod:`fedstat.federation.crypto.keys`). A key is signed before any other is known, which costs nothing: no
secret comes of it before the second round, and sites whose owners pinned different keys sign different lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedstat.errors import SecurityError
from fedstat.federation.crypto.keys import Agreement, PairKeys, PublicIdentity
from fedstat.federation.crypto.masks import Masker
from fedstat.federation.door.conduct import in_order
from fedstat.federation.door.site import FAMILIES
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Ask, Declared, Step
from fedstat.federation.rounds.engine import Rounds
from fedstat.records import from_json, to_json
from fedstat.typing import Array

FAMILY = "secure"


@dataclass(frozen=True, slots=True)
class KeysQuestion:
    """A session that needs keys, and its sites."""

    session: str
    sites: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeysAnnounced:
    """By site, its public identity, in JSON, and what it announced."""

    public: Mapping[str, str]
    announced: Mapping[str, str]


def introduce(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Show the site's public identity."""
    return {}, data.trust.identity.public.to_json()


def announce(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Sign a fresh key for this session, of which the text tells the name and the sites.

    A SecurityError where this site's owner has pinned no key of one of them.
    """
    asked = from_json(KeysQuestion, text, f"{data.name}: the question about keys")
    pinned = {name: data.trust.pinned.get(name, "") for name in asked.sites}
    unknown = sorted(name for name, fingerprint in pinned.items() if not fingerprint)
    if unknown:
        raise SecurityError(f"{data.name}: its owner has pinned no key of {', '.join(unknown)}")
    agreement = Agreement(data.trust.identity, asked.session, data.name, None, pinned)
    state.keep("agreement", agreement)
    return {}, agreement.announce()


def finish(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Check who the others are and what they announced, and keep the keys shared with each, and a masker.

    A SecurityError where an identity is not the one that this site's owner pinned.
    """
    absent = "no agreement on keys was begun in this session; ask 'announce' first"
    agreement = state.use("agreement", Agreement, absent)
    found = from_json(KeysAnnounced, text, f"{data.name}: the keys that it was told")
    # The coordinator carries the identities, and could put its own in their place: only pinned ones count.
    public = {name: PublicIdentity.from_json(key) for name, key in found.public.items()}
    keys = agreement.finish(found.announced, public)
    state.keep("keys", keys)
    state.keep("masker", Masker(keys))
    return {}, ""


def keys_of(state: State) -> PairKeys:
    """Return the keys of this session, or say that there are none."""
    return state.use("keys", PairKeys, "the sites have not agreed on keys in this session")


PUBLIC = Declared("control", "public keys, signed")
STEPS: Mapping[str, Step] = {
    "introduce": Step(introduce, text_in=Declared("control", "nothing"), text_out=PUBLIC, public=True),
    "announce": Step(announce, text_in=PUBLIC, text_out=PUBLIC, public=True),
    "finish": Step(finish, text_in=PUBLIC, public=True),
}
FAMILIES[FAMILY] = in_order(STEPS, {"announce": "introduce", "finish": "announce"})


def agree_keys(sites: Sequence[str], session: str) -> Rounds[None]:
    """Let sites agree on pairwise keys; a SecurityError where a key is not pinned or a signature wrong."""

    def ask(site: str, step: str, content: str) -> Ask:
        return Ask(site, FAMILY, step, {}, session, content)

    content = to_json(KeysQuestion(session, tuple(sites)))
    introducing = [ask(site, "introduce", "{}") for site in sites]
    replies = yield introducing + [ask(site, "announce", content) for site in sites]
    K = len(sites)
    public, announced = (
        {site: reply.text for site, reply in zip(sites, half, strict=True)}
        for half in (replies[:K], replies[K:])
    )
    # Packed once for all sites: it grows with their number.
    content = to_json(KeysAnnounced(public, announced))
    yield [ask(site, "finish", content) for site in sites]
