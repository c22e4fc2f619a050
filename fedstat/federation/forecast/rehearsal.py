"""A fit without data: its own questions, answered by its own steps on designs that are invented.

:class:`Rehearsal` is an engine whose sites are dry (:mod:`fedstat.federation.forecast.dry_site`). Questions,
answers, rounds, masks and texts are those of the fit, since it is the fit that asks and its steps that
answer; what would pass is entered as an engine enters it. Only the numbers are made up, and what the fit
makes of them is thrown away.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import NoReturn, TypeAlias

from fedstat.errors import EstimationError, PolicyError
from fedstat.federation.account.entry import TEXT, Entry
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.door.owner.plan import bound_text
from fedstat.federation.door.owner.policy import Policy
from fedstat.federation.door.owner.question import Refusal, rules_in_force
from fedstat.federation.door.site import FAMILIES, RECEIPT
from fedstat.federation.forecast.dry_site import DrySite
from fedstat.federation.message import Ask, Declared, Reply
from fedstat.federation.rounds.engine import Fit, Rounds, enter, leaves
from fedstat.federation.rounds.product_steps import read_part

OPEN_PRODUCT = "open_product"
Signature: TypeAlias = tuple[str, str, str, str, str, bool, tuple[tuple[str, str, tuple[int, ...]], ...]]


class Rehearsed(Exception):  # noqa: N818  (no error: the end of a fit that was not to be finished)
    """The protocol of a rehearsal has ended."""


@dataclass(frozen=True, slots=True)
class StepAsked:
    """One question of a rehearsal, with its text as an owner consents to it and the numbers that it gave."""

    site: str
    family: str
    step: str
    masked: bool
    text: str
    gave: Mapping[str, int]
    entities: int


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a rehearsal went through.

    `at` is where the coordinator sits; `entries` are as the ledger of the fit would have them; `rounds` are
    the steps of every round trip between institutions. `declared` tells, by site, step and array, what the
    array is and the policy that it meets; `refused` what policies would refuse, by site and step. `n_masked`
    counts the sites of the masked sums, 0 where there are none; `dealers` name who deals for the secure
    product of each two institutions, empty for the coordinator. `earlier` are kinds of what has left each
    institution already, when the model was made. `asked` are all questions, also those in place at the
    coordinator's own institution. `cut_short` is the step at which a refusal ended it, because
    no policy could let it pass.
    """

    at: str | None
    entries: tuple[Entry, ...]
    rounds: tuple[tuple[str, ...], ...]
    declared: Mapping[tuple[str, str, str], tuple[Declared, Policy]]
    refused: Mapping[tuple[str, str], tuple[Refusal, ...]]
    n_masked: int
    dealers: Mapping[tuple[str, str], str]
    earlier: Mapping[str, tuple[str, ...]]
    cut_short: str
    asked: tuple[StepAsked, ...] = ()

    def rules(self, entry: Entry) -> tuple[str, ...]:
        """Rules of the sender's policy that an array meets; none for what the coordinator sends."""
        key = (entry.sender, entry.step, entry.array)
        if key not in self.declared:
            return ()
        declared, policy = self.declared[key]
        return tuple(rules_in_force(policy, declared, self.n_masked if entry.masked else 0))

    def refusals(self, entry: Entry) -> tuple[Refusal, ...]:
        """Refusals that keep an array in: its own, and those of the whole answer."""
        found = self.refused.get((entry.sender, entry.step), ())
        return tuple(one for one in found if one.array in ("", entry.array))


class Rehearsal:
    """An engine whose sites are dry.

    The steps in `repeated` end a fit, and keep nothing; which arrays they release depends on the shapes of
    what they are asked alone. Asked again in the same shapes they are not run again: the first answer stands
    for all, and is entered as often as it is asked for.
    """

    def __init__(self, sites: Mapping[str, DrySite], repeated: Collection[str] = ()) -> None:
        self._sites = sites
        self._repeated = repeated
        self._answers: dict[Signature, Reply] = {}
        self._reused = False
        pinned = {name: site.fingerprint for name, site in sites.items()}
        for site in sites.values():
            site.trust.pinned.update(pinned)
        self._declared: dict[tuple[str, str, str], tuple[Declared, Policy]] = {}
        self._refused: dict[tuple[str, str], dict[Refusal, None]] = {}
        self._rounds: list[tuple[str, ...]] = []
        self._ledger = Ledger()
        self._dealers: dict[tuple[str, str], str] = {}
        self._earlier: Mapping[str, tuple[str, ...]] = {}
        self._cut_short = ""
        self._asked: list[StepAsked] = []

    def course(self) -> DryRun:
        """Return what the rehearsal went through."""
        # Sites that agreed on keys may have used them for sealed messages alone.
        any_masked = any(entry.masked for entry in self._ledger.entries)
        return DryRun(
            at=self._ledger.at,
            entries=tuple(self._ledger.entries),
            rounds=tuple(self._rounds),
            declared=self._declared,
            refused={place: tuple(found) for place, found in self._refused.items()},
            n_masked=max(site.n_masked for site in self._sites.values()) if any_masked else 0,
            dealers=self._dealers,
            earlier=self._earlier,
            cut_short=self._cut_short,
            asked=tuple(self._asked),
        )

    def run(self, protocol: Rounds[Fit], ledger: Ledger) -> NoReturn:
        """Carry a protocol's questions to the dry sites; ends in :class:`Rehearsed`.

        What the protocol returns rests on made up numbers, and is not handed on.
        """
        self._ledger, self._earlier = Ledger(at=ledger.at), ledger.kinds_by_client()
        try:
            asks = next(protocol)
            while True:
                if asks and all(ask.family == RECEIPT for ask in asks):
                    raise Rehearsed  # what follows is the sites' statements on what has passed
                crossing = [ask for ask in asks if leaves(ask, self._ledger)]
                if crossing:
                    self._ledger.begin_round()
                    self._rounds.append(tuple(dict.fromkeys(ask.step for ask in crossing)))
                asks = protocol.send([self._carry(ask) for ask in asks])
        except StopIteration:
            raise Rehearsed from None
        except EstimationError:
            # The same answer at every point has no derivative: what a fit makes of it at its end may fail.
            if not self._reused:
                raise
            raise Rehearsed from None

    def _carry(self, ask: Ask) -> Reply:
        same = signature(ask) if ask.step in self._repeated else None
        if same is not None and same in self._answers:
            self._reused, reply = True, self._answers[same]
        else:
            reply = self._hear(ask)
        if same is not None:
            self._answers[same] = reply
        enter(ask, reply, self._ledger)
        # What is hidden travels as several words a number: its first axis is none of its own.
        gives = FAMILIES[ask.family][ask.step].gives
        hidden = {name for name in reply.arrays if ask.masked is not None and gives[name].maskable}
        gave = {name: prod(array.shape[name in hidden :]) for name, array in reply.arrays.items()}
        gave |= {TEXT: 0} if reply.text else {}
        masked, text = ask.masked is not None, bound_text(ask)
        self._asked.append(StepAsked(ask.site, ask.family, ask.step, masked, text, gave, reply.entities))
        return reply

    def _hear(self, ask: Ask) -> Reply:
        site = self._sites[ask.site]
        try:
            reply = site.hear(ask)
        except PolicyError:
            self._cut_short = ask.step
            raise Rehearsed from None
        finally:
            self._refused.setdefault((ask.site, ask.step), {}).update(dict.fromkeys(site.refused))
        for name, declared in FAMILIES[ask.family][ask.step].given.items():
            self._declared[ask.site, ask.step, name] = (declared, site.owners)
        # The coordinator's own dealing is no message; who deals stands in the questions to both institutions.
        if ask.step == OPEN_PRODUCT:
            part = read_part(ask.text)
            self._dealers[part.product.client_a, part.product.client_b] = part.dealer
        return reply


def signature(ask: Ask) -> Signature:
    """All of a question but the numbers in its arrays, and the round whose masks hide its answer."""
    shapes = tuple((name, array.dtype.str, array.shape) for name, array in ask.arrays.items())
    return ask.site, ask.family, ask.step, ask.session, ask.text, ask.masked is None, shapes
