"""Which networks serve which predictions of a batch, and how outputs are put together for the holder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedstat.federation.message import Reply
from fedstat.kernels.subsets import sets_within
from fedstat.models.laser.training.tasks import Assembly, table_of_weights
from fedstat.typing import Bools, Floats, Ints


@dataclass(slots=True, eq=False)
class Serving:
    """Which networks serve which predictions of a batch; see the holder's step for the arrays.

    `sets` (b,) are the institutions that are asked for each entity where outputs are masked; None: all that
    have it. `group` numbers the sets `judged` behind the predictions, where it matters. `rows` are places in
    the batch of the entities that each institution answered for.
    """

    assembly: Assembly
    code: Ints
    weights: Floats
    members: Bools
    sizes: Ints
    head: Ints
    sets: Ints | None = None
    group: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    judged: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    rows: dict[str, Ints] = field(default_factory=dict)

    @classmethod
    def clear(
        cls, seen: Sequence[int], code: Ints, drawn: Sequence[Mapping[int, float]], assembly: Assembly
    ) -> Serving:
        """Serve all sets of each pattern from the same outputs."""
        weights, members = table_of_weights(assembly, seen, drawn), assembly.members
        used = weights[np.unique(code)].any(axis=0)
        members = members[used]
        sizes = members.sum(axis=1).astype(np.int64)
        return cls(assembly, code, weights[:, used], members, sizes, assembly.head_of[used])

    @classmethod
    def judging(cls, seen: Sequence[int], code: Ints, assembly: Assembly) -> Serving:
        """Let every set within a pattern predict for its entities; `group` has the set of each prediction."""
        within = {s for one in seen for s in sets_within(one)} if len(seen) else set()
        judged = [s for s in sorted(within) if assembly.predicting(s)]
        pairs = [(g, t) for g, s in enumerate(judged) for t in assembly.predicting(s)]
        tasks, group = [t for _, t in pairs], np.array([g for g, _ in pairs], dtype=np.int64)
        members = assembly.members[tasks]
        weights = np.array([[float(judged[g] & one == judged[g]) for g, _ in pairs] for one in seen])
        sizes = members.sum(axis=1).astype(np.int64)
        sets = np.array(judged, dtype=np.int64)
        return cls(assembly, code, weights, members, sizes, assembly.head_of[tasks], group=group, judged=sets)

    @classmethod
    def masked(cls, sets: Ints, weights: Floats, assembly: Assembly) -> Serving:
        """Serve one set an entity, with its weight, from a sum; `group` has the set of each prediction."""
        (of_sets, at_set), (of_weights, at_weight) = (
            np.unique(one, return_inverse=True) for one in (sets, weights)
        )
        kinds, chosen = np.unique(at_set * len(of_weights) + at_weight, return_inverse=True)
        of_set, of_weight = np.divmod(kinds, len(of_weights))
        pairs = list(zip(of_sets[of_set].tolist(), of_weights[of_weight].tolist(), strict=True))
        judged = sorted({s for s, _ in pairs if assembly.of_set(s)})
        tasks = [(g, s, t) for g, (s, _) in enumerate(pairs) for t in assembly.of_set(s)]
        table = np.zeros((len(pairs), len(tasks)))
        for place, (g, s, _) in enumerate(tasks):
            table[g, place] = pairs[g][1] / len(assembly.of_set(s))
        return cls(
            assembly,
            chosen.astype(np.int64),
            table,
            np.ones((len(tasks), 1), dtype=np.bool_),
            np.array([s.bit_count() for _, s, _ in tasks], dtype=np.int64),
            assembly.head_of[[t for _, _, t in tasks]],
            sets,
            np.array([judged.index(s) for _, s, _ in tasks], dtype=np.int64),
            np.array(judged, dtype=np.int64),
        )

    def part(self, client: int, kept: Ints, entities: Ints) -> Bools:
        """For which entities an institution is asked, (b,)."""
        if self.sets is not None:
            return np.asarray(self.sets >> client & 1, dtype=np.bool_)
        return np.isin(entities, kept)

    def collect(self, replies: Sequence[Reply], batch: int, width: int) -> Floats:
        """Put the answers of the institutions together."""
        if self.sets is not None:
            return np.asarray(np.sum([reply.arrays["outputs"] for reply in replies], axis=0))[None]
        out = np.zeros((len(self.assembly.networks), batch, width))
        for k, reply in enumerate(replies):
            for place, i in enumerate(self.assembly.at(k)):
                part = slice(place * width, (place + 1) * width)
                out[i, self.rows[reply.site]] = reply.arrays["outputs"][:, part]
        return out
