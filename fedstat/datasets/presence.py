"""Presence of entities at institutions: records are lacking completely at random, or at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from fedstat.typing import Bools, Floats

Mechanism: TypeAlias = Literal["mcar", "mar"]

SLOPES = {"mcar": 0.0, "mar": 0.75}


@dataclass(frozen=True, slots=True)
class PresenceLaw:
    """How records come about: ``counts[k]`` of them at institution k, of n entities.

    A record at institution ``leader`` is more likely with a high response, one at any other institution
    with a high response and, where the leader has the entity, a high ``lead``, one of the leader's
    covariates. Whether a record is lacking so depends on nothing that is lacking: missing at random.
    """

    counts: tuple[int, ...]
    leader: int
    slope: float

    def draw(self, y: Floats, lead: Floats, rng: np.random.Generator) -> Bools:
        """Draw who has a record of whom, n x K, from standardised ``y`` and ``lead``."""
        seen, score = self._draw_leader(y, lead, rng)
        for k in self._others():
            seen[:, k] = _first(score, self.counts[k], rng)
        return seen

    def draw_with_complete(self, n_complete: int, y: Floats, lead: Floats, rng: np.random.Generator) -> Bools:
        """Draw as ``draw`` does, with exactly ``n_complete`` entities that every institution has."""
        seen, score = self._draw_leader(y, lead, rng)
        *middle, last = self._others()
        # first who is complete, then who else has a record: the last institution must complete nobody else
        complete = _first(np.where(seen[:, self.leader], score, -np.inf), n_complete, rng)
        for k in middle:
            seen[:, k] = _first(np.where(complete, np.inf, score), self.counts[k], rng)
        lacks_last_only = seen[:, [self.leader, *middle]].all(axis=1) & ~complete
        score = np.where(complete, np.inf, np.where(lacks_last_only, -np.inf, score))
        seen[:, last] = _first(score, self.counts[last], rng)
        return seen

    def _draw_leader(self, y: Floats, lead: Floats, rng: np.random.Generator) -> tuple[Bools, Floats]:
        seen = np.zeros((y.size, len(self.counts)), dtype=np.bool_)
        seen[:, self.leader] = _first(self.slope * y, self.counts[self.leader], rng)
        score: Floats = self.slope * (y + np.where(seen[:, self.leader], lead, 0.0))
        return seen, score

    def _others(self) -> list[int]:
        return [k for k in range(len(self.counts)) if k != self.leader]


def _first(score: Floats, count: int, rng: np.random.Generator) -> Bools:
    """Choose ``count`` entities with logistic odds in ``score``; infinite scores decide."""
    order = np.argsort(-(score + rng.logistic(size=score.size)), kind="stable")
    chosen = np.zeros(score.size, dtype=np.bool_)
    chosen[order[:count]] = True
    return chosen
