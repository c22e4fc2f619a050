"""Private record linkage: its steps, its protocol, and a linkage that persists between sessions."""

from __future__ import annotations

import io
import json
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedstat.codec import Minimum, from_json, to_json
from fedstat.errors import MessageError, PartitionError, Remedy, SecurityError
from fedstat.federation import message
from fedstat.federation.crypto.envelopes import SealedChannel
from fedstat.federation.disclosure.facts import ExternalKeyList, KeyAlignmentRequest
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.files import read_arrays, write_atomic
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.key_agreement import agree_keys, keys_of
from fedstat.federation.state_formats import ALIGNMENT as ALIGNMENT_FORMAT
from fedstat.federation.tables.aligned_table import ALIGNMENT, AlignedTable
from fedstat.federation.tables.keys import (
    POINT_BYTES,
    SALT_BYTES,
    KeyTable,
    as_points,
    as_tokens,
    raise_points,
)
from fedstat.progress_line import open_line
from fedstat.typing import Array, Bools, Ints

# ----------------------------------------------------------------------------------------------------
# Steps of a site in private entity alignment; see :mod:`fedstat.federation.protocols.linkage`.

FAMILY = "align"
RING = message.control("names of the sites, in the order of the ring")
WHO = "who has a record is public, as the guarantee says"
POINTS = message.ArrayDeclaration(
    "sealed", "hashed keys, raised by secret scalars, for the next site", dtype="uint8", unpaid=WHO
)
PLACES = message.presence("numbers of the site's entities", 1, dtype="int64")


@dataclass(frozen=True, slots=True)
class KeyDescription:
    """A site's description of its keys: their columns, the type of each, and the number of records."""

    key: tuple[str, ...]
    kinds: tuple[str, ...]
    rows: Annotated[int, Minimum(0)]


@dataclass(frozen=True, slots=True)
class LinkageSecret:
    """The secret scalar by which a site raises lists of keys, and how many lists it has yet to raise."""

    scalar: X25519PrivateKey
    left: int


@step(
    FAMILY,
    requests=message.control("nothing"),
    replies=message.schema("names and types of the key, number of records"),
    public=True,
)
def describe_keys(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Say what the keys are made of, and how many there are."""
    keys = _keys(data)
    return {}, to_json(KeyDescription(keys.key, keys.kinds, keys.n_rows))


@step(
    FAMILY,
    releases={
        "boxes": message.ArrayDeclaration(
            "sealed", "salt of the hashes, for the other sites", 2, dtype="uint8", unpaid=WHO
        )
    },
    requests=RING,
)
def draw_salt(data: SiteData, state: State, text: str) -> dict[str, Array]:
    """Draw the salt, and seal it for every other site, in the order of the ring in `text`.

    Released are `boxes` (K - 1, length of a box), one sealed message per row.
    """
    ring = _ring(data, state, text)
    salt = secrets.token_bytes(SALT_BYTES)
    state.keep("salt", salt)
    boxes = [_channel(data, state, site).seal(salt) for site in ring if site != data.name]
    return {"boxes": np.stack([_array(box) for box in boxes])}


@step(
    FAMILY,
    takes={"salt": message.ArrayDeclaration("sealed", "salt of the hashes", 1, optional=True, dtype="uint8")},
    releases={"points": POINTS},
    requests=RING,
)
def enter_keys(data: SiteData, state: State, text: str, salt: Array | None = None) -> dict[str, Array]:
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
    state.report(KeyAlignmentRequest(tuple(site for site in ring if site != data.name)))
    scalar = X25519PrivateKey.generate()
    raised = raise_points(data.name, keys.points(state.use("salt", bytes)), scalar)
    # Sorted, so that the list reveals nothing about the order of the records.
    order = np.argsort(as_tokens(raised))
    state.keep("order", order)
    state.keep("lists", LinkageSecret(scalar, len(ring) - 1))
    return {"points": _sealed_for_next(data, state, ring, raised[order])}


@step(FAMILY, takes={"points": POINTS}, releases={"points": POINTS}, requests=RING)
def pass_list(data: SiteData, state: State, text: str, points: Array) -> dict[str, Array]:
    """Raise another site's list, and seal it for the next site."""
    ring = _ring(data, state, text)
    if _lists(state).left < 2:
        raise MessageError(f"{data.name}: the last list is for the coordinator, not for another site")
    return {"points": _sealed_for_next(data, state, ring, _raised(data, state, ring, points))}


@step(
    FAMILY,
    takes={"points": POINTS},
    releases={"tokens": message.presence("keys raised by every site's scalar", 2, dtype="uint8", unpaid=WHO)},
    requests=RING,
    name="show_tokens",
)
def release_tokens(data: SiteData, state: State, text: str, points: Array) -> dict[str, Array]:
    """Raise the last list, and hand its tokens (n, 32) to the coordinator; the scalar is dropped.

    They are in the order that the list's owner gave it.
    """
    ring = _ring(data, state, text)
    # Every list is raised by all before the coordinator sees it; a list raised by some could be tried against
    # guesses.
    if _lists(state).left != 1:
        raise MessageError(f"{data.name}: a list is not for the coordinator before every site has raised it")
    tokens = _raised(data, state, ring, points)
    # Without its scalar the site can encrypt no further list, and neither can a later intruder.
    state.forget("lists")
    return {"tokens": tokens}


@step(FAMILY, takes={"places": PLACES}, public=True)
def take_places(data: SiteData, state: State, places: Array) -> dict[str, Array]:
    """Take the numbers of the site's own entities, and bring them into the order of its rows."""
    if not isinstance(data.table, KeyTable):
        raise MessageError(f"{data.name}: what it holds is aligned for good (keep_places), or not at all")
    data.table.accept(_numbers(data, state, places))
    return {}


@step(
    FAMILY,
    takes={"places": PLACES},
    releases={"seen": message.presence("which entities have a record", dtype="bool", unpaid=WHO)},
    requests=message.control("name of the alignment"),
)
def keep_places(data: SiteData, state: State, text: str, places: Array) -> dict[str, Array]:
    """Take the numbers of the site's own entities for all sessions to come, and keep them in its folder.

    The text names the alignment. Released is `seen` (n,): which of the entities have a record here, in the
    order of `places`; others are a key alone.
    """
    if not isinstance(data.table, AlignedTable):
        raise MessageError(f"{data.name}: it has no records that are linked by a key")
    name, order = json.loads(text), state.use("order", np.ndarray)
    if not isinstance(name, str):
        raise MessageError(f"{data.name}: expected the name of an alignment")
    data.table.keep(name, _numbers(data, state, places))
    state.forget("order")
    return {"seen": data.table.seen[order]}


def _numbers(data: SiteData, state: State, places: Array) -> Ints:
    """Bring the numbers of a list that this site sorted into the order of its rows."""
    n_rows = _keys(data).n_rows
    message.check_lengths(data.name, places=(places, n_rows))
    if len(np.unique(places)) < len(places) or (len(places) and places.min() < 0):
        raise MessageError(f"{data.name}: expected a different number for each of its entities")
    numbers = np.empty(n_rows, dtype=np.int64)
    numbers[state.use("order", np.ndarray)] = places
    return numbers


def _keys(data: SiteData) -> KeyTable:
    """Return the keys that the site's owner has declared; no column of another table can be requested."""
    if isinstance(data.table, KeyTable):
        return data.table
    if isinstance(data.table, AlignedTable):
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


def _channel(data: SiteData, state: State, peer: str) -> SealedChannel:
    name = f"channel {peer}"
    if name not in state:
        state.keep(name, SealedChannel(keys_of(state), peer, FAMILY))
    return state.use(name, SealedChannel)


def _sealed_for_next(data: SiteData, state: State, ring: list[str], points: Array) -> Array:
    following = ring[(ring.index(data.name) + 1) % len(ring)]
    return _array(_channel(data, state, following).seal(points.tobytes()))


def _lists(state: State) -> LinkageSecret:
    return state.use("lists", LinkageSecret, "it has not entered its keys, or has raised every list already")


def _raised(data: SiteData, state: State, ring: list[str], points: Array) -> Array:
    """Open a list from the site before, and raise it; each site does so for every other site once."""
    before = ring[ring.index(data.name) - 1]
    opened = _channel(data, state, before).open(points.tobytes())
    if len(opened) % POINT_BYTES:
        raise SecurityError(f"{data.name}: the list from '{before}' is not one of points")
    # A party with the tokens can compare only lists that this site has encrypted.
    state.report(ExternalKeyList(len(opened) // POINT_BYTES, _keys(data).n_rows))
    lists = _lists(state)
    state.keep("lists", LinkageSecret(lists.scalar, lists.left - 1))
    return raise_points(f"{data.name}: the list from '{before}'", as_points(opened), lists.scalar)


def _array(box: bytes) -> Array:
    return np.frombuffer(box, dtype=np.uint8)


# ----------------------------------------------------------------------------------------------------
# Private entity alignment: which sites have which entities, while no site shows its keys.
#
# Private set intersection by a commutative map (Meadows 1986, doi:10.1109/SP.1986.10022; Huberman, Franklin
# and Hogg 1999, doi:10.1145/336992.337012), for K sites in a ring:
#
# 1. The sites agree on pairwise keys (:mod:`fedstat.federation.crypto`), and the first draws a salt for all.
# 2. Every site hashes its keys with the salt, raises them by a secret scalar that it draws for this session
#    (:mod:`fedstat.federation.tables.keys`), and sorts the result, which removes the order of the records.
# 3. Every list goes round the ring. Each site raises it by its own scalar; between sites it is sealed.
# 4. The last site of each list sends it to the coordinator. It has been raised by all K scalars, so equal
# keys have become equal tokens at all sites. The coordinator numbers the union of the tokens in their sorted
# order, and sends every site the numbers of its own list.
#
# Alignment without encryption (:mod:`fedstat.federation.tables.keys`) stays the default; this is for keys
# that no party may compare. The records are linked alike. The order of the entities differs: it is that of
# the tokens, which is random and drawn again in every session.
#
# **Who learns what**, if all follow the protocol (semi-honest) and none collude:
#
# * The coordinator: the number of records of every site, and the pattern, that is, which of the numbered
#   entities are at which sites. No key, no hash and no salt. To test a guessed key it would need the salt
#   and the scalars of *all* sites.
# * A site: the sizes of the lists that it encrypts. They have been raised by at least one scalar
# that it does not have: random points under the decisional Diffie-Hellman assumption, except for one bit per
# key that belongs to no row. It also learns the numbers of its own entities. Their range reveals the size of
# the union, and for two sites that of the intersection. It learns which of its own entities another site has
# only if it receives the pattern later. * An eavesdropper: sizes, and what the coordinator learns if the
# connection is not encrypted.
#
# **Colluding.** Two sites together, or one with the coordinator, can find out which of their own keys another
# site has. Keys of a site that does not collude stay secret, unless a colluder has or guesses them *and*
# entered them. **Not protected:** a site that enters invented keys learns through the pattern whether others
# have them, as in every such protocol. A site that leaves out or alters keys spoils the alignment.
# alignment.


@dataclass(frozen=True, slots=True)
class EntityNumbers:
    """What the coordinator knows after an alignment: size of the union, and numbers by site.

    They are in the order of the list that each site made; `rows` ascend.
    """

    n_entities: int
    places: Mapping[str, Ints]

    @property
    def rows(self) -> Mapping[str, Ints]:
        """Numbers of each site's entities, ascending."""
        return MappingProxyType({site: np.sort(numbers) for site, numbers in self.places.items()})


def align_entities(sites: Sequence[str], session: str) -> FitProtocol[EntityNumbers]:
    """Give the entities of two sites or more numbers, which each site's table, a :class:`KeyTable`, keeps.

    Takes six rounds and one for every site, in the order of the ring. A site raises every list by itself,
    which takes about 43 microseconds per key; `cryptography` holds Python's lock meanwhile, so threads would
    not help.

    Raises a PartitionError for keys of different types, or under different names; a SecurityError for a key
    of a site that is not the pinned one, or for a list that was altered; a MessageError for a list that came
    back with another length, or with equal tokens.
    """
    numbered = yield from number_entities(sites, session)
    yield [
        message.Request(site, FAMILY, "take_places", {"places": numbered.places[site]}, session)
        for site in sites
    ]
    # In the order of the partition: a list ends at the site before its owner, and numbers are sent in that
    # order.
    return EntityNumbers(numbered.n_entities, {site: numbered.places[site] for site in sites})


def number_entities(sites: Sequence[str], session: str) -> FitProtocol[EntityNumbers]:
    """Assign numbers to the entities of all sites, before these are sent; see :func:`align_entities`."""
    ring = json.dumps(list(sites))

    def request(site: str, step: str, text: str = ring, **arrays: Array) -> message.Request:
        return message.Request(site, FAMILY, step, arrays, session, text)

    replies = yield [request(site, "describe_keys", "{}") for site in sites]
    n_rows = _agreed(replies)
    if len(sites) < 2:
        raise PartitionError(f"{', '.join(sites)}: there is no other site to align with")
    yield from agree_keys(sites, session)
    (reply,) = yield [request(sites[0], "draw_salt")]
    boxes = reply.arrays["boxes"]
    if len(boxes) != len(sites) - 1:
        raise MessageError(f"{sites[0]}: expected a salt for each of {len(sites) - 1} sites")
    first = request(sites[0], "enter_keys")
    # Each time every site multiplies one list, which takes about as long as any other.
    with open_line("list", len(sites)) as line:
        replies = yield [
            first,
            *(request(site, "enter_keys", salt=box) for site, box in zip(sites[1:], boxes, strict=True)),
        ]
        line.step()
        for turn in range(1, len(sites)):
            step = "show_tokens" if turn == len(sites) - 1 else "pass_list"
            lists = [reply.arrays["points"] for reply in replies]
            replies = yield [
                request(site, step, points=lists[number - 1]) for number, site in enumerate(sites)
            ]
            line.step()
    # site number i ended the list of the site after it
    owners = [*sites[1:], sites[0]]
    tokens = {owner: reply.arrays["tokens"] for owner, reply in zip(owners, replies, strict=True)}
    return _number(tokens, n_rows)


def _agreed(replies: Sequence[message.Reply]) -> dict[str, int]:
    """Require keys of the same names and types; the number of records by site."""
    described = {
        reply.site: from_json(KeyDescription, reply.text, f"{reply.site}: description of its keys")
        for reply in replies
    }
    # An empty column has no type to speak of; a site without records agrees with every other.
    filled = {site: reported for site, reported in described.items() if reported.rows} or described
    first, *others = filled
    for site in others:
        a, b = ([*zip(filled[s].key, filled[s].kinds, strict=True)] for s in (first, site))
        if a != b:
            texts = (", ".join(f"{name!r} ({kind})" for name, kind in x) for x in (a, b))
            raise PartitionError(
                f"site {site!r}: its key is not made as that of site {first!r}: expected "
                f"{next(texts)}, found {next(texts)}. Convert or rename the columns of one of them."
            )
    return {site: reported.rows for site, reported in described.items()}


def _number(tokens: Mapping[str, Array], n_rows: Mapping[str, int]) -> EntityNumbers:
    """Give the union of all tokens numbers, in their sorted order."""
    for site, points in tokens.items():
        if points.shape != (n_rows[site], POINT_BYTES):
            raise MessageError(f"{site}: {len(points)} tokens came for its {n_rows[site]} keys")
        if len(np.unique(as_tokens(points))) < len(points):
            raise MessageError(f"{site}: some of its tokens are equal; keys have to be different")
    union, numbers = np.unique(as_tokens(np.concatenate(list(tokens.values()))), return_inverse=True)
    ends = np.cumsum([len(points) for points in tokens.values()])[:-1]
    parts = np.split(numbers.astype(np.int64, copy=False), ends)
    return EntityNumbers(len(union), dict(zip(tokens, parts, strict=True)))


# ----------------------------------------------------------------------------------------------------
# One alignment for all sessions of a federation: what its coordinator keeps of it.
#
# The sites run the ring of :mod:`fedstat.federation.protocols.linkage` once. Each keeps the numbers of its
# own entities (:class:`~fedstat.federation.tables.aligned_table.AlignedTable`), and the coordinator keeps
# which site has which number::
#
#     alignment.npz    name of the alignment, size of the union, numbers by site (mode 0600)
#
# Every session has the name of the alignment, so that no request is answered in another order of the records
# than the coordinator assumes.
#
# Since the numbers stay, the releases for each entity in one model can be combined with those in another, as
# with models of one partition in one process. A new alignment draws other numbers, but reveals the pattern to
# the coordinator again, by which many entities can be recognized.


@dataclass(frozen=True, slots=True)
class PersistentAlignment:
    """Which entities are at which sites, as the coordinator knows it.

    The name is 16 hexadecimal digits that the coordinator drew; `n_entities` is the size of the union of all
    keys. By site, in the order of the ring: `listed`, numbers of the entities whose keys a site has,
    ascending; `seen`, which of these have a record there, while the others are a key alone.
    """

    name: str
    n_entities: int
    listed: Mapping[str, Ints]
    seen: Mapping[str, Bools]

    def rows(self, site: str) -> Ints:
        """Numbers of the entities that have a record at a site, ascending."""
        return self.listed[site][self.seen[site]]

    def among(self, sites: Sequence[str]) -> PersistentAlignment:
        """Leave out the other sites, and the entities that they alone list; the order stays."""
        listed = np.zeros(self.n_entities, dtype=bool)
        for site in sites:
            listed[self.listed[site]] = True
        number = np.cumsum(listed) - 1
        return PersistentAlignment(
            self.name,
            int(listed.sum()),
            MappingProxyType({site: number[self.listed[site]] for site in sites}),
            MappingProxyType({site: self.seen[site] for site in sites}),
        )

    def save(self, folder: Path) -> Path:
        """Write it into the coordinator's folder, whole or not at all."""
        head = {"name": self.name, "n_entities": self.n_entities, "sites": list(self.listed)}
        arrays: dict[str, Any] = ALIGNMENT_FORMAT.stamp_arrays()
        arrays |= {"head": np.frombuffer(json.dumps(head).encode(), dtype=np.uint8)}
        for place, site in enumerate(self.listed):
            arrays |= {f"listed {place}": self.listed[site], f"seen {place}": self.seen[site]}
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        write_atomic(folder / ALIGNMENT, content.getvalue())
        return folder / ALIGNMENT


def load_alignment(folder: Path) -> PersistentAlignment | None:
    """Read the alignment of a federation; None where there is none yet.

    A PartitionError where the file holds something else.
    """
    path = folder / ALIGNMENT
    if not path.exists():
        return None
    try:
        content = read_arrays(path.read_bytes())
        ALIGNMENT_FORMAT.read_arrays(content, f"'{path}'")
        head = json.loads(content["head"].tobytes())
        sites = [str(site) for site in head["sites"]]
        listed = {site: content[f"listed {place}"] for place, site in enumerate(sites)}
        seen = {site: content[f"seen {place}"] for place, site in enumerate(sites)}
        for site in sites:
            _check_numbers(listed[site], seen[site], int(head["n_entities"]))
        if int(head["n_entities"]) > sum(map(len, listed.values())):
            raise ValueError("more entities than sites list")
        return PersistentAlignment(
            str(head["name"]), int(head["n_entities"]), MappingProxyType(listed), MappingProxyType(seen)
        )
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise PartitionError(
            f"'{path}' is no alignment of a federation",
            remedy=Remedy("fedstat federation align {folder}", "remove it, and run '{call}'").filled(
                folder=shlex.quote(str(folder))
            ),
        ) from error


def _check_numbers(listed: Array, seen: Array, n_entities: int) -> None:
    """Require ascending numbers of entities, and a mark for each; a ValueError where they are none."""
    if listed.dtype != np.int64 or seen.dtype != np.bool_ or listed.ndim != 1 or listed.shape != seen.shape:
        raise ValueError("numbers")
    if len(listed) and not (listed[0] >= 0 and listed[-1] < n_entities and (np.diff(listed) > 0).all()):
        raise ValueError("numbers out of range")


def align_persistently(sites: Sequence[str], session: str, name: str) -> FitProtocol[PersistentAlignment]:
    """Align the entities of two sites or more, in a ring; each keeps the numbers of its own.

    `name` has 16 hexadecimal digits and was that of no alignment before. Errors are those of
    :func:`~fedstat.federation.protocols.linkage.align_entities`, and an EngineError where a site cannot write
    it into its folder. Some sites may have taken the new alignment then, and are not answering under the old
    one any longer.
    """
    numbered = yield from number_entities(sites, session)
    places = numbered.places
    replies = yield [
        message.Request(site, FAMILY, "keep_places", {"places": places[site]}, session, json.dumps(name))
        for site in sites
    ]
    listed, seen = {}, {}
    for site, reply in zip(sites, replies, strict=True):
        marks = reply.arrays["seen"]
        if marks.shape != places[site].shape:
            raise MessageError(f"{site}: received {len(places[site])} numbers for {len(marks)} records")
        # Sites answer in the order of their sorted tokens; the coordinator's rows ascend by number.
        order = np.argsort(places[site])
        listed[site], seen[site] = places[site][order], marks[order]
    return PersistentAlignment(name, numbered.n_entities, MappingProxyType(listed), MappingProxyType(seen))
