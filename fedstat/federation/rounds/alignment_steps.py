"""Steps of a site in private entity alignment; see :mod:`fedstat.federation.rounds.alignment`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedstat.errors import MessageError, SecurityError
from fedstat.federation.crypto.boxes import Channel
from fedstat.federation.door.facts import AlignmentAsked, ListToRaise
from fedstat.federation.door.site import FAMILIES
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.federation.rounds.key_agreement import keys_of
from fedstat.federation.tables.hashed_keys import (
    POINT_BYTES,
    SALT_BYTES,
    KeyTable,
    as_points,
    as_tokens,
    raise_points,
)
from fedstat.federation.tables.linked import LinkedTable
from fedstat.records import Least, to_json
from fedstat.typing import Array, Ints

FAMILY = "align"


@dataclass(frozen=True, slots=True)
class DescribedKeys:
    """What a site tells of its keys: their columns, what each holds, and the number of records."""

    key: tuple[str, ...]
    kinds: tuple[str, ...]
    rows: Annotated[int, Least(0)]


@dataclass(frozen=True, slots=True)
class ListsToRaise:
    """The secret scalar by which a site raises lists of keys, and how many lists it has yet to raise."""

    scalar: X25519PrivateKey
    left: int


def describe_keys(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Say what the keys are made of, and how many there are."""
    keys = _keys(data)
    return {}, to_json(DescribedKeys(keys.key, keys.kinds, keys.n_rows))


def draw_salt(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Draw the salt, and seal it for every other site, in the order of the ring in `text`.

    Released are `boxes` (K - 1, length of a box), one sealed message per row.
    """
    ring = _ring(data, state, text)
    salt = secrets.token_bytes(SALT_BYTES)
    state.keep("salt", salt)
    boxes = [_channel(data, state, site).seal(salt) for site in ring if site != data.name]
    return {"boxes": np.stack([_array(box) for box in boxes])}, ""


def enter_keys(
    data: SiteData, state: State, text: str, salt: Array | None = None
) -> tuple[dict[str, Array], str]:
    """Hash, raise and sort the site's own keys, and seal them for the next site of the ring in `text`.

    The salt is sealed by the first site, and left out for that site itself.
    """
    ring, keys = _ring(data, state, text), _keys(data)
    if salt is not None:
        if ring[0] == data.name:
            raise MessageError(f"{data.name}: it draws the salt, and was sent one")
        state.keep("salt", _channel(data, state, ring[0]).open(salt.tobytes()))
    # Once a session: under another scalar, lists that are on their way would not match any longer.
    if "lists" in state or "order" in state:
        raise MessageError(f"{data.name}: its keys were entered already in this session")
    state.tell(AlignmentAsked(tuple(site for site in ring if site != data.name)))
    scalar = X25519PrivateKey.generate()
    raised = raise_points(data.name, keys.points(state.use("salt", bytes)), scalar)
    # Sorted, the list tells nothing of the order of the records.
    order = np.argsort(as_tokens(raised))
    state.keep("order", order)
    state.keep("lists", ListsToRaise(scalar, len(ring) - 1))
    return {"points": _sealed_for_next(data, state, ring, raised[order])}, ""


def pass_list(data: SiteData, state: State, text: str, points: Array) -> tuple[dict[str, Array], str]:
    """Raise another site's list, and seal it for the next site."""
    ring = _ring(data, state, text)
    if _lists(state).left < 2:
        raise MessageError(f"{data.name}: the last list is for the coordinator, not for another site")
    return {"points": _sealed_for_next(data, state, ring, _raised(data, state, ring, points))}, ""


def show_tokens(data: SiteData, state: State, text: str, points: Array) -> tuple[dict[str, Array], str]:
    """Raise the last list, and hand its tokens (n, 32) to the coordinator; the scalar is dropped.

    They are in the order that the list's owner gave it.
    """
    ring = _ring(data, state, text)
    # Every list is raised by all before the coordinator sees it; a list raised by some could be tried against
    # guesses.
    if _lists(state).left != 1:
        raise MessageError(f"{data.name}: a list is not for the coordinator before every site has raised it")
    tokens = _raised(data, state, ring, points)
    # Without its scalar the site can raise no further list, nor can whoever breaks in later.
    state.forget("lists")
    return {"tokens": tokens}, ""


def take_places(data: SiteData, state: State, places: Array) -> dict[str, Array]:
    """Take the numbers of the site's own entities, and bring them into the order of its rows."""
    if not isinstance(data.table, KeyTable):
        raise MessageError(f"{data.name}: what it holds is aligned for good (keep_places), or not at all")
    data.table.accept(_numbers(data, state, places))
    return {}


def keep_places(data: SiteData, state: State, text: str, places: Array) -> tuple[dict[str, Array], str]:
    """Take the numbers of the site's own entities for all sessions to come, and keep them in its folder.

    The text names the alignment. Released is `seen` (n,): which of the entities have a record here, in the
    order of `places`; others are a key alone.
    """
    if not isinstance(data.table, LinkedTable):
        raise MessageError(f"{data.name}: it has no records that are linked by a key")
    name, order = json.loads(text), state.use("order", np.ndarray)
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
    numbers[state.use("order", np.ndarray)] = places
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
    if not isinstance(ring, list) or sorted(ring) != list(keys_of(state).sites):
        raise MessageError(f"{data.name}: the ring is not made of the sites that agreed on keys")
    return ring


def _channel(data: SiteData, state: State, peer: str) -> Channel:
    name = f"channel {peer}"
    if name not in state:
        state.keep(name, Channel(keys_of(state), peer, FAMILY))
    return state.use(name, Channel)


def _sealed_for_next(data: SiteData, state: State, ring: list[str], points: Array) -> Array:
    following = ring[(ring.index(data.name) + 1) % len(ring)]
    return _array(_channel(data, state, following).seal(points.tobytes()))


def _lists(state: State) -> ListsToRaise:
    return state.use("lists", ListsToRaise, "it has not entered its keys, or has raised every list already")


def _raised(data: SiteData, state: State, ring: list[str], points: Array) -> Array:
    """Open a list from the site before, and raise it; each site does so for every other site once."""
    before = ring[ring.index(data.name) - 1]
    opened = _channel(data, state, before).open(points.tobytes())
    if len(opened) % POINT_BYTES:
        raise SecurityError(f"{data.name}: the list from '{before}' is not one of points")
    # Whoever ends up with the tokens can compare only lists that this site has raised.
    state.tell(ListToRaise(len(opened) // POINT_BYTES, _keys(data).n_rows))
    lists = _lists(state)
    state.keep("lists", ListsToRaise(lists.scalar, lists.left - 1))
    return raise_points(f"{data.name}: the list from '{before}'", as_points(opened), lists.scalar)


def _array(box: bytes) -> Array:
    return np.frombuffer(box, dtype=np.uint8)


RING = Declared("control", "names of the sites, in the order of the ring")
WHO = "who has a record is public, as the guarantee says"
POINTS = Declared(
    "sealed", "hashed keys, raised by secret scalars, for the next site", dtype="uint8", unpaid=WHO
)
PLACES = Declared("presence", "numbers of the site's entities", 1, dtype="int64")
STEPS: Mapping[str, Step] = {
    "describe_keys": Step(
        describe_keys,
        text_in=Declared("control", "nothing"),
        text_out=Declared("schema", "names and types of the key, number of records"),
        public=True,
    ),
    "draw_salt": Step(
        draw_salt,
        gives={
            "boxes": Declared(
                "sealed", "salt of the hashes, for the other sites", 2, dtype="uint8", unpaid=WHO
            )
        },
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
        gives={
            "tokens": Declared("presence", "keys raised by every site's scalar", 2, dtype="uint8", unpaid=WHO)
        },
        text_in=RING,
    ),
    "take_places": Step(
        take_places,
        takes={"places": PLACES},
        public=True,
    ),
    "keep_places": Step(
        keep_places,
        takes={"places": PLACES},
        gives={"seen": Declared("presence", "which entities have a record", dtype="bool", unpaid=WHO)},
        text_in=Declared("control", "name of the alignment"),
    ),
}
FAMILIES[FAMILY] = STEPS
