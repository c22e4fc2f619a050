"""A fit without data: its own questions, carried to stand-ins of the sites.

:class:`Rehearsal` is an engine without data: a fit carries its own protocol to stand-ins of the sites, which
answer with arrays of the declared names and the right shapes. Questions, rounds, masks and texts are those of
the fit, since it is the fit that asks; each question is held against the site's policy by the functions that
its door calls, and what would pass is entered as an engine enters it. Only the numbers are made up.

A family lists how its stand-ins answer, one function per step. An array that a step declares and its stand-in
lacks is an error, so that a forecast cannot fall behind the family.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn, TypeAlias

import numpy as np
import pandas as pd

from fedstat.errors import NotAvailableError, PolicyError
from fedstat.federation.account.entry import Entry
from fedstat.federation.account.ledger import Ledger
from fedstat.federation.crypto.keys import Agreement, Identity
from fedstat.federation.crypto.masks import WIDE, encode_values, encoding_of
from fedstat.federation.door.policy import (
    Policy,
    Refusal,
    check_columns,
    check_counts,
    check_mask,
    refusals,
    rules_in_force,
)
from fedstat.federation.door.site import FAMILIES, RECEIPT
from fedstat.federation.door.state import SiteData
from fedstat.federation.message import Ask, Declared, Reply, Step, check_arrays
from fedstat.federation.rounds.engine import Fit, Rounds, enter, leaves
from fedstat.federation.tables.table import FrameTable
from fedstat.typing import Array


class Rehearsed(Exception):  # noqa: N818  (no error: the end of a fit that was not to be finished)
    """The protocol of a rehearsal has ended."""


@dataclass(slots=True)
class StandIn:
    """A site as the coordinator knows it: name and policy, and no data.

    Parameters
    ----------
    name : str
    policy : Policy
    memory : dict
        What a stand-in's answers keep for later ones.
    columns : int
        Design columns that it has opened.
    n_masked : int
        Sites with which it has agreed on masks.
    refused : list of Refusal
        By rules that only a step can apply, in the present answer.
    """

    name: str
    policy: Policy
    memory: dict[str, Any] = field(default_factory=dict)
    columns: int = 0
    n_masked: int = 0
    refused: list[Refusal] = field(default_factory=list)

    @property
    def data(self) -> SiteData:
        """What a rule that only a step can apply is handed: no rows."""
        return SiteData(self.name, FrameTable(pd.DataFrame()), 0, self.policy)

    def hold(self, rule: str, check: Callable[..., object], *arguments: object, array: str = "") -> bool:
        """Apply a rule, note whether it refuses the array or the whole answer, and tell whether it passes."""
        try:
            check(*arguments)
        except PolicyError as error:
            self.refused.append(Refusal(rule, array, str(error)))
            return False
        return True

    def reply(self, arrays: Mapping[str, Array] | None = None, text: str = "", entities: int = 0) -> Reply:
        """Answer as this site."""
        return Reply(self.name, {} if arrays is None else arrays, text, entities)


Answer: TypeAlias = Callable[[StandIn, Ask], Reply]
Answers: TypeAlias = Mapping[tuple[str, str], Answer]
"""How stand-ins answer, by family and step."""


@dataclass(frozen=True, slots=True)
class Course:
    """What one rehearsal went through.

    Parameters
    ----------
    at : str or None
        Where the coordinator sits.
    entries : tuple of Entry
        As the ledger of the fit would have them.
    rounds : tuple of tuple of str
        Steps of every round trip between institutions.
    declared : mapping of (str, str, str) to (Declared, Policy)
        What each site's array is, by site, step and array, and the policy that it meets.
    refused : mapping of (str, str) to tuple of Refusal
        What policies would refuse, by site and step.
    n_masked : int
        Sites of the masked sums; 0 where there are none.
    earlier : mapping of str to tuple of str
        Kinds of what has left each institution already, when the model was made.
    """

    at: str | None
    entries: tuple[Entry, ...]
    rounds: tuple[tuple[str, ...], ...]
    declared: Mapping[tuple[str, str, str], tuple[Declared, Policy]]
    refused: Mapping[tuple[str, str], tuple[Refusal, ...]]
    n_masked: int
    earlier: Mapping[str, tuple[str, ...]]

    def rules(self, entry: Entry) -> tuple[str, ...]:
        """Rules of the sender's policy that an array meets."""
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
    """An engine whose sites are stand-ins.

    Parameters
    ----------
    policies : mapping of str to Policy
        Of every site.
    answers : mapping of (str, str) to callable
        See :data:`Answers`; how sites agree on keys is known.
    """

    def __init__(self, policies: Mapping[str, Policy], answers: Answers) -> None:
        self._sites = {name: StandIn(name, policy) for name, policy in policies.items()}
        self._answers = {**KEY_ANSWERS, **answers}
        self._declared: dict[tuple[str, str, str], tuple[Declared, Policy]] = {}
        self._refused: dict[tuple[str, str], dict[Refusal, None]] = {}
        self._rounds: list[tuple[str, ...]] = []
        self._ledger = Ledger()
        self._earlier: Mapping[str, tuple[str, ...]] = {}

    @property
    def _n_masked(self) -> int:
        """Sites of the masked sums; keys may also serve sealed messages alone."""
        if not any(entry.masked for entry in self._ledger.entries):
            return 0
        return max(site.n_masked for site in self._sites.values())

    @property
    def course(self) -> Course:
        """What the rehearsal went through."""
        return Course(
            self._ledger.at,
            tuple(self._ledger.entries),
            tuple(self._rounds),
            self._declared,
            {place: tuple(found) for place, found in self._refused.items()},
            self._n_masked,
            self._earlier,
        )

    def run(self, protocol: Rounds[Fit], ledger: Ledger) -> NoReturn:
        """Carry a protocol's questions to the stand-ins.

        Raises
        ------
        Rehearsed
            The protocol has ended; what it returns rests on made up numbers, and is not handed on.
        """
        self._ledger, self._earlier = Ledger(at=ledger.at), ledger.kinds_by_client()
        try:
            asks = next(protocol)
            while True:
                if asks and all(ask.family == RECEIPT for ask in asks):
                    raise Rehearsed  # what follows is the sites' statements on what has passed
                crossing = [ask for ask in asks if leaves(ask, ledger)]
                if crossing:
                    self._ledger.begin_round()
                    self._rounds.append(tuple(dict.fromkeys(ask.step for ask in crossing)))
                asks = protocol.send([self._carry(ask) for ask in asks])
        except StopIteration:
            raise Rehearsed from None

    def _carry(self, ask: Ask) -> Reply:
        site, step = self._sites[ask.site], FAMILIES[ask.family][ask.step]
        where = f"{ask.site}, step '{ask.step}'"
        check_arrays(where, step.takes, ask.arrays)
        if (ask.family, ask.step) not in self._answers:
            raise NotAvailableError(
                f"no forecast: it is not known what step '{ask.step}' of family '{ask.family}' answers; fit, "
                "and look at result.ledger"
            )
        reply = self._answers[ask.family, ask.step](site, ask)
        check_arrays(f"the stand-in of {where}", step.gives, reply.arrays)
        self._hold_against_policy(site, ask, step, reply)
        if ask.masked is not None:
            reply = Reply(reply.site, masked_arrays(site, step, reply.arrays), reply.text, reply.entities)
        enter(ask, reply, self._ledger)
        return reply

    def _hold_against_policy(self, site: StandIn, ask: Ask, step: Step, reply: Reply) -> None:
        """Note what the site's policy would refuse; the door stops at the first, a forecast does not."""
        known = (site.name, site.policy, ask, step)
        site.refused += refusals(*known)
        if ask.masked is not None:
            site.hold("two sites", check_mask, site.name, site.policy, site.n_masked)
        if not site.hold("maximum columns", check_columns, site.name, site.policy, ask, site.columns):
            site.columns = 0  # refused, they are not open
        for name in (*reply.arrays, *(["text"] if reply.text else [])):
            site.hold("minimum count", check_counts, *known, [name], reply.entities, array=name)
        self._refused.setdefault((ask.site, ask.step), {}).update(dict.fromkeys(site.refused))
        site.refused = []
        texts = {} if step.text_out is None else {"text": step.text_out}
        for name, declared in {**step.gives, **texts}.items():
            self._declared[ask.site, ask.step, name] = (declared, site.policy)


def masked_arrays(site: StandIn, step: Step, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Encode what masks would hide, as a site does, and leave the masks out."""
    hidden = dict(arrays)
    for name in (name for name in arrays if step.gives[name].maskable):
        values = np.asarray(arrays[name])
        encoding = WIDE if step.gives[name].wide else encoding_of(values)
        hidden[name] = np.zeros((encoding.limbs, *values.shape), dtype=np.int64)
        if values.any():  # zero stands as zero, and most stand-ins answer with it
            words = encode_values(name, values, site.n_masked, encoding)
            hidden[name][:] = words.view(np.int64).reshape(hidden[name].shape)
    return hidden


@cache
def _key_texts() -> tuple[str, str]:
    """Return a public identity and an announcement; all of them have the same length."""
    one, two = Identity.generate(), Identity.generate()
    public = {"a": one.public, "b": two.public}
    pinned = {name: key.fingerprint for name, key in public.items()}
    return one.public.to_json(), Agreement(one, "session", "a", public, pinned).announce()


def _introduce(site: StandIn, ask: Ask) -> Reply:
    return site.reply(text=_key_texts()[0])


def _announce(site: StandIn, ask: Ask) -> Reply:
    return site.reply(text=_key_texts()[1])


def _finish(site: StandIn, ask: Ask) -> Reply:
    site.n_masked = len(json.loads(ask.text))
    return site.reply()


KEY_ANSWERS: Answers = {
    ("secure", "introduce"): _introduce,
    ("secure", "announce"): _announce,
    ("secure", "finish"): _finish,
}
"""How stand-ins agree on keys."""
