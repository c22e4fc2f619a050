"""Agreement of a session's sites on pairwise keys through the coordinator, who learns none.

Three rounds: sites show their public identities, sign fresh keys, and check each other's signatures against
the fingerprints that their owners pinned (:mod:`fedstat.federation.crypto.keys`).
"""

from __future__ import annotations

import json
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
    """A session that needs keys, and the public identity of every site, in JSON."""

    session: str
    public: Mapping[str, str]


def introduce(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Show the site's public identity."""
    return {}, data.trust.identity.public.to_json()


def announce(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Sign a fresh key for this session, of which the text tells the name, and the identities by site.

    A SecurityError where an identity is not the one that this site's owner pinned.
    """
    asked = from_json(KeysQuestion, text, f"{data.name}: the question about keys")
    public = {name: PublicIdentity.from_json(key) for name, key in asked.public.items()}
    # The coordinator carries the identities, and could put its own in their place: only pinned ones count.
    pinned = {name: data.trust.pinned.get(name, "") for name in public}
    unknown = sorted(name for name, fingerprint in pinned.items() if not fingerprint)
    if unknown:
        raise SecurityError(f"{data.name}: its owner has pinned no key of {', '.join(unknown)}")
    agreement = Agreement(data.trust.identity, asked.session, data.name, public, pinned)
    state.keep("agreement", agreement)
    return {}, agreement.announce()


def finish(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Check what the others announced, and keep the keys that are shared with each, and a masker."""
    absent = "no agreement on keys was begun in this session; ask 'announce' first"
    keys = state.use("agreement", Agreement, absent).finish(json.loads(text))
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

    replies = yield [ask(site, "introduce", "{}") for site in sites]
    public = {site: reply.text for site, reply in zip(sites, replies, strict=True)}
    content = to_json(KeysQuestion(session, public))
    replies = yield [ask(site, "announce", content) for site in sites]
    announced = {site: reply.text for site, reply in zip(sites, replies, strict=True)}
    yield [ask(site, "finish", json.dumps(announced)) for site in sites]
