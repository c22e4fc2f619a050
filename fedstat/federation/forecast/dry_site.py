"""A site without data: a real door, behind it an invented design, and its owner's policy to be heard out.

A door stops at the first rule that refuses. A forecast tells every rule that would, and goes on: rules that
follow from the question alone are listed by the functions that the door itself calls; the others are left to
the door. What it refuses is asked again under a policy that allows all, for what would come after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import pandas as pd

from fedstat.errors import PolicyError
from fedstat.federation.account.entry import policy_rule
from fedstat.federation.crypto.masks import Masker
from fedstat.federation.door.owner.policy import Policy
from fedstat.federation.door.owner.question import Refusal, check_columns, check_counts, check_mask, refusals
from fedstat.federation.door.site import FAMILIES, Site
from fedstat.federation.door.state import State
from fedstat.federation.message import Ask, Reply, Step, pack_ask, unpack_reply
from fedstat.federation.tables.table import FrameTable
from fedstat.typing import Ints

ALLOWING_ALL = Policy(min_count=0, min_events=0, min_level_count=0, max_parameters=1e9, remember="nothing")
"""A policy that allows all."""

COMMON_SEED = 1


class DrySite(Site):
    """A site of which name, policy and the number of records are known, and whose design is invented.

    `instead` are steps, by family and name, that stand in the place of those that read records; `entities`
    (n_rows,) number those of the records.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        n_rows: int,
        instead: Mapping[tuple[str, str], Step] | None = None,
        entities: Ints | None = None,
    ) -> None:
        table = FrameTable(pd.DataFrame(index=range(n_rows)), entities)
        super().__init__(name, table, policy, COMMON_SEED)
        self.owners = policy  # :attr:`policy` is the one in force at the moment
        self._instead = instead or {}
        self._told_of_columns = False
        self.refused: list[Refusal] = []

    def open(self, session: str, state: State) -> None:
        """Let a session have opened an invented design."""
        self.states[session] = state

    @property
    def n_masked(self) -> int:
        """Most sites with which a session of it has agreed on masks."""
        maskers = [state.use("masker", Masker) for state in self.states.values() if "masker" in state]
        return max((len(masker.sites) for masker in maskers), default=0)

    def hear(self, ask: Ask) -> Reply:
        """Answer a question, and note in :attr:`refused` which of the owner's rules refuse the answer.

        A PolicyError where not even a policy that allows all lets the answer pass.
        """
        self.refused = list(refusals(self.name, self.owners, ask, FAMILIES[ask.family][ask.step]))
        if ask.masked is not None:
            self._hold("", "", partial(check_mask, self.name, self.owners, self.n_masked))
        # The rules above are off here: else the first of them would hide what the steps have to say.
        counts = replace(ALLOWING_ALL, **{name: getattr(self.owners, name) for name in COUNTS})
        try:
            reply = self._ask(ask, counts)
        except PolicyError as error:
            self._note(error, "")
            reply = self._ask(ask, ALLOWING_ALL)
        self._hold_reply(ask, reply)
        return reply

    def _hold_reply(self, ask: Ask, reply: Reply) -> None:
        # Columns are open for the whole session; refused once, they would be refused again at every answer.
        columns = 0 if self._told_of_columns else self.states.get(ask.session, State(self.name)).columns
        if not self._hold(
            "maximum columns", "", partial(check_columns, self.name, self.owners, ask, columns)
        ):
            self._told_of_columns = True  # refused, they are not open
        step, there = FAMILIES[ask.family][ask.step], set(reply.released)
        for name in (name for name in step.given if name in there):
            check = partial(check_counts, self.name, self.owners, ask, step, [name], reply.entities)
            self._hold("minimum count", name, check)

    def _hold(self, rule: str, array: str, check: Callable[[], object]) -> bool:
        try:
            check()
        except PolicyError as error:
            self._note(error, array, rule)
            return False
        return True

    def _note(self, error: PolicyError, array: str, rule: str = "") -> None:
        """Note a refusal; what the door said of an answer is not said again of one of its arrays."""
        message = str(error)
        if not rule:
            rule = policy_rule(error)
        earlier = [one for one in self.refused if one.message != message]
        self.refused = [*earlier, Refusal(rule, array, message)]

    def _ask(self, ask: Ask, policy: Policy) -> Reply:
        """Answer under some policy, which steps are handed with the data."""
        # Steps read the policy too, for instance how many rows stand behind a level.
        self.policy, self._data = policy, replace(self._data, policy=policy)
        return unpack_reply(self.answer(pack_ask(ask)))

    def _find_step(self, ask: Ask) -> Step:
        step = super()._find_step(ask)
        return self._instead.get((ask.family, ask.step), step)


COUNTS = ("min_count", "min_events", "min_level_count", "max_parameters", "dealer", "discrete")
"""Rules of a policy that need the answer, or all of the question."""
