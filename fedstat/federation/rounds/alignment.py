"""Private entity alignment: which sites have which entities, while no site shows its keys.

Private set intersection by a commutative map (Meadows 1986, doi:10.1109/SP.1986.10022; Huberman, Franklin and
Hogg 1999, doi:10.1145/336992.337012), for K sites in a ring:

1. The sites agree on pairwise keys (:mod:`fedstat.federation.secure`), and the first draws a salt for all.
2. Every site hashes its keys with the salt, raises them by a secret scalar that it draws for this session
   (:mod:`fedstat.federation.tables.hashed_keys`), and sorts the outcome, an order that tells nothing.
3. Every list goes round the ring. Each site raises it by its own scalar; from site to site it is sealed.
4. The last site of each list hands it to the coordinator. It has been raised by all K scalars, so that equal
   keys have become equal tokens at whichever site they were. The coordinator numbers the union of the tokens
   in their sorted order, and tells every site the numbers of its own list.

Aligning in clear (:mod:`fedstat.federation.tables.keys`) stays the default; this is for keys that must
not be put side by side. The records are linked alike. The order of the entities is another one, that of the
tokens, which is random and drawn anew in every session.

**Who learns what**, all doing what the protocol says (semi-honest), and nobody colluding:

* The coordinator: the number of records of every site, and the pattern, that is, which of the numbered
  entities are at which sites. No key, no hash and no salt. To try out a guessed key it would need the salt
  and the scalars of *all* sites.
* A site: the sizes of the lists that pass through its hands. They have been raised by at least one scalar
  that it does not have: random points under the decisional Diffie-Hellman assumption, but for one bit a key
  that is tied to no row. It also learns the numbers of its own entities. From their range the size of the
  union, and of two sites that of the intersection, can be told; which of its own entities another site has,
  only as far as the pattern is told to it later.
* Whoever listens on the line: sizes, and what the coordinator learns where the line is not encrypted.

**Colluding.** Two sites together, or one with the coordinator, can find out which of their own keys another
site has. Keys of a site that colludes with nobody stay its own, unless a colluder has or guesses them *and*
entered them. **Not protected:** a site that enters keys which it has made up learns through the pattern
whether others have them, as in every such protocol; one that leaves out or alters keys spoils the alignment.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedstat.errors import MessageError, PartitionError, SecurityError
from fedstat.federation.crypto.boxes import Channel
from fedstat.federation.door.site import FAMILIES
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Ask, Declared, Reply, Step, check_lengths
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.key_agreement import agree_keys, keys_of
from fedstat.federation.tables.hashed_keys import (
    POINT_BYTES,
    SALT_BYTES,
    KeyTable,
    as_points,
    as_tokens,
    raise_points,
)
from fedstat.federation.tables.linked import LinkedTable
from fedstat.typing import Array, Ints

FAMILY = "align"


def describe_keys(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Say what the keys are made of, and how many there are."""
    keys = _keys(data)
    return {}, json.dumps({"key": keys.key, "kinds": keys.kinds, "rows": keys.n_rows})


def draw_salt(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Draw the salt, and seal it for every other site, in the order of the ring.

    Parameters
    ----------
    text : str
        JSON: the ring, names of all sites.

    Returns
    -------
    boxes : uint8 array, (K - 1, length of a box)
        One sealed message per row.
    """
    ring = _ring(data, state, text)
    salt = secrets.token_bytes(SALT_BYTES)
    state.keep("salt", salt)
    boxes = [_channel(data, state, site).seal(salt) for site in ring if site != data.name]
    return {"boxes": np.stack([_array(box) for box in boxes])}, ""


def enter_keys(
    data: SiteData, state: State, text: str, salt: Array | None = None
) -> tuple[dict[str, Array], str]:
    """Hash, raise and sort the site's own keys, and seal them for the next site.

    Parameters
    ----------
    text : str
        JSON: the ring, names of all sites.
    salt : uint8 array, optional
        Sealed by the first site; left out for that site itself.

    Returns
    -------
    points : uint8 array
        Sealed.
    """
    ring, keys = _ring(data, state, text), _keys(data)
    if salt is not None:
        if ring[0] == data.name:
            raise MessageError(f"{data.name}: it draws the salt, and was sent one")
        state.keep("salt", _channel(data, state, ring[0]).open(salt.tobytes()))
    if "scalar" in state or "order" in state:
        raise MessageError(f"{data.name}: its keys were entered already in this session")
    state.keep("scalar", X25519PrivateKey.generate())
    raised = raise_points(data.name, keys.points(state.use("salt")), state.use("scalar"))
    order = np.argsort(as_tokens(raised))
    state.keep("order", order)
    state.keep("left", len(ring) - 1)
    return {"points": _sealed_for_next(data, state, ring, raised[order])}, ""


def pass_list(data: SiteData, state: State, text: str, points: Array) -> tuple[dict[str, Array], str]:
    """Raise another site's list, and seal it for the next site."""
    ring = _ring(data, state, text)
    if _lists_left(data, state) < 2:
        raise MessageError(f"{data.name}: the last list is for the coordinator, not for another site")
    return {"points": _sealed_for_next(data, state, ring, _raised(data, state, ring, points))}, ""


def show_tokens(data: SiteData, state: State, text: str, points: Array) -> tuple[dict[str, Array], str]:
    """Raise the last list, and hand its tokens to the coordinator; the scalar is dropped.

    Returns
    -------
    tokens : uint8 array, (n, 32)
        In the order that the list's owner gave it.
    """
    ring = _ring(data, state, text)
    if _lists_left(data, state) != 1:
        raise MessageError(f"{data.name}: a list is not for the coordinator before every site has raised it")
    tokens = _raised(data, state, ring, points)
    state.forget("scalar")
    return {"tokens": tokens}, ""


def take_places(data: SiteData, state: State, places: Array) -> dict[str, Array]:
    """Take the numbers of the site's own entities, and bring them into the order of its rows."""
    if not isinstance(data.table, KeyTable):
        raise MessageError(f"{data.name}: what it holds is aligned for good (keep_places), or not at all")
    data.table.accept(_numbers(data, state, places))
    return {}


def keep_places(data: SiteData, state: State, text: str, places: Array) -> tuple[dict[str, Array], str]:
    """Take the numbers of the site's own entities for all sessions to come, and keep them in its folder.

    Parameters
    ----------
    text : str
        JSON: the name of the alignment.

    Returns
    -------
    seen : bool array, (n,)
        Which of the entities have a record here, in the order of `places`; others are a key alone.
    """
    if not isinstance(data.table, LinkedTable):
        raise MessageError(f"{data.name}: it has no records that are linked by a key")
    name, order = json.loads(text), state.use("order")
    if not isinstance(name, str):
        raise MessageError(f"{data.name}: expected the name of an alignment")
    data.table.keep(name, _numbers(data, state, places))
    state.forget("order")
    return {"seen": data.table.seen[order]}, ""


def _numbers(data: SiteData, state: State, places: Array) -> Ints:
    """Bring the numbers of a list that this site sorted into the order of its rows."""
    n_rows = _keys(data).n_rows
    check_lengths(data.name, places=(places, n_rows))
    if len(np.unique(places)) < len(places) or (len(places) and places.min() < 0):
        raise MessageError(f"{data.name}: expected a different number for each of its entities")
    numbers = np.empty(n_rows, dtype=np.int64)
    numbers[state.use("order")] = places
    return numbers


def _keys(data: SiteData) -> KeyTable:
    """Return the keys that the site's owner has laid out; no column of another table can be asked for."""
    if isinstance(data.table, KeyTable):
        return data.table
    if isinstance(data.table, LinkedTable):
        return data.table.keys
    raise MessageError(
        f"{data.name}: its owner offers no keys to align by. In its site.toml the section [data] names them "
        'by key = ["..."], and there is no site_column'
    )


def _ring(data: SiteData, state: State, text: str) -> list[str]:
    ring = json.loads(text)
    if not isinstance(ring, list) or sorted(ring) != list(keys_of(data, state).sites):
        raise MessageError(f"{data.name}: the ring is not made of the sites that agreed on keys")
    return ring


def _channel(data: SiteData, state: State, peer: str) -> Channel:
    name = f"channel {peer}"
    if name not in state:
        state.keep(name, Channel(keys_of(data, state), peer, FAMILY))
    channel: Channel = state.use(name)
    return channel


def _sealed_for_next(data: SiteData, state: State, ring: list[str], points: Array) -> Array:
    following = ring[(ring.index(data.name) + 1) % len(ring)]
    return _array(_channel(data, state, following).seal(points.tobytes()))


def _lists_left(data: SiteData, state: State) -> int:
    if "scalar" not in state:
        raise MessageError(f"{data.name}: it has not entered its keys, or has raised every list already")
    left: int = state.use("left")
    return left


def _raised(data: SiteData, state: State, ring: list[str], points: Array) -> Array:
    """Open a list from the site before, and raise it; each site does so for every other site once."""
    before = ring[ring.index(data.name) - 1]
    opened = _channel(data, state, before).open(points.tobytes())
    if len(opened) % POINT_BYTES:
        raise SecurityError(f"{data.name}: the list from '{before}' is not one of points")
    state.keep("left", state.use("left") - 1)
    return raise_points(f"{data.name}: the list from '{before}'", as_points(opened), state.use("scalar"))


def _array(box: bytes) -> Array:
    return np.frombuffer(box, dtype=np.uint8)


RING = Declared("control", "names of the sites, in the order of the ring")
POINTS = Declared("sealed", "hashed keys, raised by secret scalars, for the next site", 1, dtype="uint8")
PLACES = Declared("presence", "numbers of the site's entities", 1, dtype="int64")
STEPS: Mapping[str, Step] = {
    "describe_keys": Step(
        describe_keys,
        text_in=Declared("control", "nothing"),
        text_out=Declared("schema", "names and types of the key, number of records"),
    ),
    "draw_salt": Step(
        draw_salt,
        gives={"boxes": Declared("sealed", "salt of the hashes, for the other sites", 2, dtype="uint8")},
        text_in=RING,
    ),
    "enter_keys": Step(
        enter_keys,
        takes={
            "salt": Declared("sealed", "salt of the hashes", 1, optional=True, dtype="uint8"),
        },
        gives={"points": POINTS},
        text_in=RING,
    ),
    "pass_list": Step(pass_list, takes={"points": POINTS}, gives={"points": POINTS}, text_in=RING),
    "show_tokens": Step(
        show_tokens,
        takes={"points": POINTS},
        gives={"tokens": Declared("presence", "keys raised by every site's scalar", 2, dtype="uint8")},
        text_in=RING,
    ),
    "take_places": Step(
        take_places,
        takes={"places": PLACES},
    ),
    "keep_places": Step(
        keep_places,
        takes={"places": PLACES},
        gives={"seen": Declared("presence", "which entities have a record", 1, dtype="bool")},
        text_in=Declared("control", "name of the alignment"),
    ),
}
FAMILIES[FAMILY] = STEPS


@dataclass(frozen=True, slots=True)
class EntityNumbers:
    """What the coordinator knows after a private alignment.

    Attributes
    ----------
    n_entities : int
        Size of the union.
    rows : mapping of str to int64 array
        Numbers of each site's entities, ascending.
    """

    n_entities: int
    rows: Mapping[str, Ints]


@dataclass(frozen=True, slots=True)
class Numbered:
    """Numbers that the coordinator has given, before the sites have taken them.

    Attributes
    ----------
    n_entities : int
        Size of the union.
    places : mapping of str to int64 array
        Numbers of each site's entities, in the order of the list that the site made.
    """

    n_entities: int
    places: Mapping[str, Ints]


def align_entities(sites: Sequence[str], session: str) -> Rounds[EntityNumbers]:
    """Give the entities of all sites numbers, which each site's table, a :class:`KeyTable`, keeps.

    Six rounds and one for every site. A site raises every list by itself, which takes some 43 microseconds a
    key; `cryptography` holds Python's lock meanwhile, so that threads would not help.

    Parameters
    ----------
    sites : sequence of str
        At least two, in the order of the ring.
    session : str

    Raises
    ------
    PartitionError
        The keys of two sites are of different types, or under different names.
    SecurityError
        A key of a site is not the pinned one, or a list was altered.
    MessageError
        A site's list came back with another length, or with equal tokens.
    """
    numbered = yield from number_entities(sites, session)
    yield [Ask(site, FAMILY, "take_places", {"places": numbered.places[site]}, session) for site in sites]
    rows = {site: np.sort(numbered.places[site]) for site in sites}
    return EntityNumbers(numbered.n_entities, MappingProxyType(rows))


def number_entities(sites: Sequence[str], session: str) -> Rounds[Numbered]:
    """Give the entities of all sites numbers, before sites are told; see :func:`align_entities`."""
    ring = json.dumps(list(sites))

    def ask(site: str, step: str, text: str = ring, **arrays: Array) -> Ask:
        return Ask(site, FAMILY, step, arrays, session, text)

    replies = yield [ask(site, "describe_keys", "{}") for site in sites]
    n_rows = _agreed(replies)
    if len(sites) < 2:
        raise PartitionError(f"{', '.join(sites)}: there is no other site to align with")
    yield from agree_keys(sites, session)
    (reply,) = yield [ask(sites[0], "draw_salt")]
    boxes = reply.arrays["boxes"]
    if len(boxes) != len(sites) - 1:
        raise MessageError(f"{sites[0]}: expected a salt for each of {len(sites) - 1} sites")
    first = ask(sites[0], "enter_keys")
    replies = yield [
        first,
        *(ask(site, "enter_keys", salt=box) for site, box in zip(sites[1:], boxes, strict=True)),
    ]
    for turn in range(1, len(sites)):
        step = "show_tokens" if turn == len(sites) - 1 else "pass_list"
        lists = [reply.arrays["points"] for reply in replies]
        replies = yield [ask(site, step, points=lists[number - 1]) for number, site in enumerate(sites)]
    # site number i ended the list of the site after it
    owners = [*sites[1:], sites[0]]
    tokens = {owner: reply.arrays["tokens"] for owner, reply in zip(owners, replies, strict=True)}
    return _number(tokens, n_rows)


def _agreed(replies: Sequence[Reply]) -> dict[str, int]:
    """Require keys of the same names and types; the number of records by site."""
    described: dict[str, Any] = {reply.site: json.loads(reply.text) for reply in replies}
    filled = {site: d for site, d in described.items() if d["rows"]} or described
    first, *others = filled
    for site in others:
        a, b = ([*zip(filled[s]["key"], filled[s]["kinds"], strict=True)] for s in (first, site))
        if a != b:
            texts = (", ".join(f"{name!r} ({kind})" for name, kind in x) for x in (a, b))
            raise PartitionError(
                f"client {site!r}: its key is not made as that of client {first!r}: expected "
                f"{next(texts)}, found {next(texts)}. Convert or rename the columns of one of them."
            )
    return {site: int(d["rows"]) for site, d in described.items()}


def _number(tokens: Mapping[str, Array], n_rows: Mapping[str, int]) -> Numbered:
    """Give the union of all tokens numbers, in their sorted order."""
    for site, points in tokens.items():
        if points.shape != (n_rows[site], POINT_BYTES):
            raise MessageError(f"{site}: {len(points)} tokens came for its {n_rows[site]} keys")
        if len(np.unique(as_tokens(points))) < len(points):
            raise MessageError(f"{site}: some of its tokens are equal; keys have to be different")
    union, numbers = np.unique(as_tokens(np.concatenate(list(tokens.values()))), return_inverse=True)
    ends = np.cumsum([len(points) for points in tokens.values()])[:-1]
    parts = np.split(numbers.astype(np.int64, copy=False), ends)
    return Numbered(len(union), dict(zip(tokens, parts, strict=True)))
