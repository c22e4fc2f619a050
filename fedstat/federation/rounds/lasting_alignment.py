"""One alignment for all sessions of a federation: what its coordinator keeps of it.

The sites run the ring of :mod:`fedstat.federation.rounds.alignment` once. Each keeps the numbers of its own
entities (:class:`~fedstat.federation.tables.linked.LinkedTable`), and the coordinator keeps who has which
number::

    alignment.npz    name of the alignment, size of the union, numbers by site (mode 0600)

The name goes along with every session, so that no question is answered in another order of the records than
that which the coordinator means.

Since the numbers stay, whatever leaves for each entity in one model can be put beside what leaves for it in
another, as with models of one partition in one process. Aligning again draws other numbers, but tells the
coordinator the pattern again, by which many entities can be recognised.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from fedstat.errors import MessageError, PartitionError
from fedstat.federation.files import read_arrays, write_whole
from fedstat.federation.message import Ask
from fedstat.federation.rounds.alignment import number_entities
from fedstat.federation.rounds.alignment_steps import FAMILY
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.tables.linked import ALIGNMENT
from fedstat.typing import Array, Bools, Ints


@dataclass(frozen=True, slots=True)
class LastingAlignment:
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

    def among(self, sites: Sequence[str]) -> LastingAlignment:
        """Leave out the other sites, and the entities that they alone list; the order stays."""
        listed = np.zeros(self.n_entities, dtype=bool)
        for site in sites:
            listed[self.listed[site]] = True
        number = np.cumsum(listed) - 1
        return LastingAlignment(
            self.name,
            int(listed.sum()),
            MappingProxyType({site: number[self.listed[site]] for site in sites}),
            MappingProxyType({site: self.seen[site] for site in sites}),
        )

    def save(self, folder: Path) -> Path:
        """Write it into the coordinator's folder, whole or not at all."""
        head = {"name": self.name, "n_entities": self.n_entities, "sites": list(self.listed)}
        arrays: dict[str, Any] = {"head": np.frombuffer(json.dumps(head).encode(), dtype=np.uint8)}
        for place, site in enumerate(self.listed):
            arrays |= {f"listed {place}": self.listed[site], f"seen {place}": self.seen[site]}
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        write_whole(folder / ALIGNMENT, content.getvalue())
        return folder / ALIGNMENT


def load_alignment(folder: Path) -> LastingAlignment | None:
    """Read the alignment of a federation; None where there is none yet.

    A PartitionError where the file holds something else.
    """
    path = folder / ALIGNMENT
    if not path.exists():
        return None
    try:
        content = read_arrays(path.read_bytes())
        head = json.loads(content["head"].tobytes())
        sites = [str(site) for site in head["sites"]]
        listed = {site: content[f"listed {place}"] for place, site in enumerate(sites)}
        seen = {site: content[f"seen {place}"] for place, site in enumerate(sites)}
        for site in sites:
            _check_numbers(listed[site], seen[site], int(head["n_entities"]))
        if int(head["n_entities"]) > sum(map(len, listed.values())):
            raise ValueError("more entities than sites list")
        return LastingAlignment(
            str(head["name"]), int(head["n_entities"]), MappingProxyType(listed), MappingProxyType(seen)
        )
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise PartitionError(
            f"'{path}' is no alignment of a federation; run 'fedstat federation align {folder}' again"
        ) from error


def _check_numbers(listed: Array, seen: Array, n_entities: int) -> None:
    """Require ascending numbers of entities, and a mark for each; a ValueError where they are none."""
    if listed.dtype != np.int64 or seen.dtype != np.bool_ or listed.ndim != 1 or listed.shape != seen.shape:
        raise ValueError("numbers")
    if len(listed) and not (listed[0] >= 0 and listed[-1] < n_entities and (np.diff(listed) > 0).all()):
        raise ValueError("numbers out of range")


def align_lastingly(sites: Sequence[str], session: str, name: str) -> Rounds[LastingAlignment]:
    """Align the entities of two sites or more, in a ring; each keeps the numbers of its own.

    `name` has 16 hexadecimal digits and was that of no alignment before. Errors are those of
    :func:`~fedstat.federation.rounds.alignment.align_entities`, and an EngineError where a site cannot write
    it into its folder. Some sites may have taken the new alignment then, and are not answering under the old
    one any longer.
    """
    numbered = yield from number_entities(sites, session)
    places = numbered.places
    replies = yield [
        Ask(site, FAMILY, "keep_places", {"places": places[site]}, session, json.dumps(name))
        for site in sites
    ]
    listed, seen = {}, {}
    for site, reply in zip(sites, replies, strict=True):
        marks = reply.arrays["seen"]
        if marks.shape != places[site].shape:
            raise MessageError(f"{site}: told of {len(marks)} records, and was given {len(places[site])}")
        # Sites answer in the order of their sorted tokens; the coordinator's rows ascend by number.
        order = np.argsort(places[site])
        listed[site], seen[site] = places[site][order], marks[order]
    return LastingAlignment(name, numbered.n_entities, MappingProxyType(listed), MappingProxyType(seen))
