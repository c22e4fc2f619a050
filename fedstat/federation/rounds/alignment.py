"""Private entity alignment: which sites have which entities, while no site shows its keys.

Private set intersection by a commutative map (Meadows 1986, doi:10.1109/SP.1986.10022; Huberman, Franklin and
Hogg 1999, doi:10.1145/336992.337012), for K sites in a ring:

1. The sites agree on pairwise keys (:mod:`fedstat.federation.crypto`), and the first draws a salt for all.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from fedstat.errors import MessageError, PartitionError
from fedstat.federation.message import Ask, Reply
from fedstat.federation.rounds.alignment_steps import FAMILY, DescribedKeys
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.key_agreement import agree_keys
from fedstat.federation.tables.hashed_keys import POINT_BYTES, as_tokens
from fedstat.progress_line import open_line
from fedstat.records import from_json
from fedstat.typing import Array, Ints


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


def align_entities(sites: Sequence[str], session: str) -> Rounds[EntityNumbers]:
    """Give the entities of two sites or more numbers, which each site's table, a :class:`KeyTable`, keeps.

    Six rounds and one for every site, in the order of the ring. A site raises every list by itself, which
    takes some 43 microseconds a key; `cryptography` holds Python's lock meanwhile, so that threads would not
    help.

    A PartitionError tells of keys of different types, or under different names; a SecurityError of a key of a
    site that is not the pinned one, or of a list that was altered; a MessageError of a list that came back
    with another length, or with equal tokens.
    """
    numbered = yield from number_entities(sites, session)
    yield [Ask(site, FAMILY, "take_places", {"places": numbered.places[site]}, session) for site in sites]
    # In the order of the partition: lists end at the site before their owner's, and are told in that order.
    return EntityNumbers(numbered.n_entities, {site: numbered.places[site] for site in sites})


def number_entities(sites: Sequence[str], session: str) -> Rounds[EntityNumbers]:
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
    # Each time every site multiplies one list, which takes about as long as any other.
    with open_line("list", len(sites)) as line:
        replies = yield [
            first,
            *(ask(site, "enter_keys", salt=box) for site, box in zip(sites[1:], boxes, strict=True)),
        ]
        line.step()
        for turn in range(1, len(sites)):
            step = "show_tokens" if turn == len(sites) - 1 else "pass_list"
            lists = [reply.arrays["points"] for reply in replies]
            replies = yield [ask(site, step, points=lists[number - 1]) for number, site in enumerate(sites)]
            line.step()
    # site number i ended the list of the site after it
    owners = [*sites[1:], sites[0]]
    tokens = {owner: reply.arrays["tokens"] for owner, reply in zip(owners, replies, strict=True)}
    return _number(tokens, n_rows)


def _agreed(replies: Sequence[Reply]) -> dict[str, int]:
    """Require keys of the same names and types; the number of records by site."""
    described = {
        reply.site: from_json(DescribedKeys, reply.text, f"{reply.site}: what it tells of its keys")
        for reply in replies
    }
    # An empty column has no type to speak of; a site without records agrees with every other.
    filled = {site: told for site, told in described.items() if told.rows} or described
    first, *others = filled
    for site in others:
        a, b = ([*zip(filled[s].key, filled[s].kinds, strict=True)] for s in (first, site))
        if a != b:
            texts = (", ".join(f"{name!r} ({kind})" for name, kind in x) for x in (a, b))
            raise PartitionError(
                f"institution {site!r}: its key is not made as that of institution {first!r}: expected "
                f"{next(texts)}, found {next(texts)}. Convert or rename the columns of one of them."
            )
    return {site: told.rows for site, told in described.items()}


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
