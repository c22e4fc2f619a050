"""Rounds of a mixture: posteriors go down, differences of log densities come up and are added."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedstat.federation.message import Ask, Reply
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Conversation
from fedstat.models.m2sem.client.asked import BeginAsked, RoundAsked, SlotAsked, by_pattern, digest_posteriors
from fedstat.models.m2sem.course.mixture import Course, Subjects
from fedstat.records import to_json
from fedstat.typing import Array, Floats

SALT = 16
RESTARTS = 2
"""How often a mixture may begin anew because a cluster was emptied."""


@dataclass(slots=True, eq=False)
class Exchange:
    """What passes between coordinator and institutions of one fit, round by round."""

    asking: Conversation
    subjects: Subjects
    nodes: int
    rng: np.random.Generator
    most: int
    past: str = ""
    rounds: int = 0
    slots: int = 0
    history: list[tuple[int, str, float]] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Rounds that are left."""
        return max(self.most - self.rounds, 0)

    def begin(self, factors: Sequence[int]) -> Rounds[None]:
        """Let every institution analyse the factors of its modalities."""
        asked = to_json(BeginAsked(tuple(factors), self.nodes))
        s = self.subjects
        self.past = ""
        yield [
            self.asking.ask(
                client,
                "begin",
                asked,
                place=s.place[client],
                pattern=s.pattern,
                members=s.members,
                client=np.array(number),
            )
            for number, client in enumerate(s.clients)
        ]

    def improve(
        self,
        courses: Sequence[Course],
        steps: int,
        *,
        kept: Sequence[Course] = (),
        scores: bool = False,
        beside: Sequence[Ask] = (),
    ) -> Rounds[list[Reply]]:
        """Take one round with all of some mixtures; return the replies to what is asked beside."""
        for one in courses:
            one.w = one.sent.sum(axis=0) / one.sent.sum()
            if one.slot < 0:
                one.slot, self.slots = self.slots, self.slots + 1
        asks = [*beside, *self._asks(courses, steps, [one.slot for one in kept], scores)]
        replies = yield asks
        self.rounds += 1
        self._settle(courses, replies[len(beside) :], scores)
        return replies[: len(beside)]

    def _asks(self, courses: Sequence[Course], steps: int, kept: Sequence[int], scores: bool) -> list[Ask]:
        s = self.subjects
        r = np.hstack([one.sent for one in courses])
        groups = by_pattern(s.pattern, len(s.members))
        salts = [secrets.token_bytes(SALT) for _ in groups]
        slots = tuple(_slot(one, steps, scores) for one in courses)
        digests = tuple(digest_posteriors(salt, r[rows]) for salt, rows in zip(salts, groups, strict=True))
        asked = RoundAsked(slots, tuple(kept), digests, self.past)
        text = to_json(asked)
        self.past = asked.follow(text)
        shares = np.concatenate([one.w for one in courses])
        table = np.frombuffer(b"".join(salts), dtype=np.uint8).reshape(-1, SALT)
        asks = []
        for number, client in enumerate(s.clients):
            # The salts of patterns without an institution are not for it: it could try posteriors out.
            own = np.where(s.members[:, number, None], table, 0).astype(np.uint8)
            asks.append(
                self.asking.ask(client, "improve", text, r=r[s.place[client]], shares=shares, salts=own)
            )
        return asks

    def _settle(self, courses: Sequence[Course], replies: Sequence[Reply], scores: bool) -> None:
        """Add up what came, whichever order institutions are in, and give every mixture its part."""
        D = add_exactly([reply.arrays["differences"] for reply in replies])
        totals = add_exactly([reply.arrays["totals"] for reply in replies])
        first = told = 0
        for number, one in enumerate(courses):
            if one.tell:
                one.support = {reply.site: reply.arrays["support"][told] for reply in replies}
                told += 1
            one.settle(D[:, first : first + one.clusters - 1], totals[number])
            first += one.clusters - 1
            if not scores:
                one.source, one.weigh = one.slot, False
                self.history.append((self.rounds, one.name, one.penalised))

    def ascend(
        self,
        courses: Sequence[Course],
        steps: int,
        most: int,
        kept: Sequence[Course] = (),
        enough: Callable[[Course], bool] = lambda one: one.converged,
    ) -> Rounds[None]:
        """Improve mixtures until each is good enough, at most so many rounds."""
        for _ in range(most):
            for one in courses:
                self._refill(one)
            active = [one for one in courses if not one.failed and not enough(one)]
            if not active or not self.left:
                return
            done = [one for one in courses if one not in active and one.slot >= 0]
            yield from self.improve(active, steps, kept=[*kept, *done])

    def _refill(self, one: Course) -> None:
        """Begin anew with a cluster that has too few entities at an institution; give up after some times."""
        while not one.failed and (found := self.subjects.too_few(one.sent)) is not None:
            client, k = found
            if len(one.emptied) >= RESTARTS or one.fixed or one.penalties.lam1 or one.half is not None:
                one.failed = f"a cluster has too few entities at '{client}'"
                return
            one.emptied.append(client)
            one.refill(k, self.rng)

    def release(self, one: Course, order: Array) -> Rounds[list[Reply]]:
        """Ask for the parameters of a mixture, with its clusters in an order."""
        replies = yield [
            self.asking.ask(client, "release_modalities", slot=np.array(one.slot), order=order)
            for client in self.subjects.clients
        ]
        return replies


def _slot(one: Course, steps: int, scores: bool) -> SlotAsked:
    return SlotAsked(
        one.slot,
        one.source,
        one.clusters,
        one.factors,
        steps,
        one.penalties.lam1,
        one.penalties.lam2,
        one.fixed,
        scores,
        one.weigh,
        one.tell,
        one.nodes,
    )


def add_exactly(parts: Sequence[Floats]) -> Floats:
    """Add arrays in a precision in which their order hardly matters: masked sums are exact."""
    total: Any = np.zeros(parts[0].shape, dtype=np.longdouble)
    for part in parts:
        total = total + part
    return np.asarray(total, dtype=np.float64)
