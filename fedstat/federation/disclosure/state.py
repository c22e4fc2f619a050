"""State of a site: its data, whom it trusts, and what it keeps of each session."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import pandas as pd

from fedstat.errors import DesignError, MessageError, PartitionError, SecurityError
from fedstat.federation.audit.event_log import SiteLedger
from fedstat.federation.audit.ledger_file import HistoryCheck
from fedstat.federation.crypto.keys import Identity
from fedstat.federation.disclosure.approval import Approvals, FollowedPlan
from fedstat.federation.disclosure.facts import EntityCount, FactorsRequested
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.privacy_budget import NoiseRequired
from fedstat.federation.disclosure.release_history import ReleaseHistory
from fedstat.federation.tables.published import Published
from fedstat.federation.tables.table import FrameTable, LabeledTable, Table

KeptT = TypeVar("KeptT")
MAX_SESSIONS = 32
SESSION_END_REASONS = {
    "restart": "it was started again since this session began, and what it held of the fit is gone; its "
    "ledger goes on. Make the model again with from_formula",
    "newer": f"{MAX_SESSIONS} newer sessions took the place of this one. Make the model again with "
    "from_formula",
    "rules": "its owner has made its rules stricter since this session began. Make the model again with "
    "from_formula",
    "records": "its records were read anew since this session began, and they have changed. Make the model "
    "again with from_formula",
}
"""Why a site no longer goes on in a session."""


@dataclass(slots=True)
class SiteTrust:
    """A site's keys, the fingerprints that its owner has pinned, and what the owner has consented to.

    `pinned` has the fingerprint of every site that this one exchanges secrets with, its own among them, and
    `consents` when the owner consented to one alignment of keys with a site; `rosters` the digests of the
    rosters that the owner has accepted, by number.
    """

    pinned: dict[str, str] = field(default_factory=dict)
    _identity: Identity | None = None
    consents: dict[str, str] = field(default_factory=dict)
    rosters: dict[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> Identity:
        """The site's keys, made when first asked for."""
        if self._identity is None:
            self._identity = Identity.generate()
        return self._identity


@dataclass(frozen=True, slots=True)
class SiteData:
    """What a step is handed: the rows of one institution, and nothing else.

    Parameters
    ----------
    name : str
        The institution.
    table : Table
        Its records, one row per entity in the partition's order, without the key.
    shared_seed : int or None
        See :attr:`common_seed`.
    policy : Policy
        What the site's owner allows; the door insists on it.
    memory : ReleaseHistory
        The groups of rows behind earlier answers; see :mod:`fedstat.federation.disclosure.release_history`.
    trust : Trust
    site_ledger : SiteLedger
        The site's own account of all that passed its door.
    published : mapping of str to PublishedColumn
        What the owner has published of the columns, from which formulas are judged.
    approvals : Approvals
        Plans of analyses that were proposed, and what the owner has decided.
    """

    name: str
    table: Table
    shared_seed: int | None
    policy: Policy
    memory: ReleaseHistory = field(default_factory=ReleaseHistory)
    trust: SiteTrust = field(default_factory=lambda: SiteTrust())
    site_ledger: SiteLedger = field(default_factory=SiteLedger)
    published: Published = field(default_factory=dict)
    approvals: Approvals = field(default_factory=lambda: Approvals("", SiteLedger()))

    def with_records(self, table: Table, fits: HistoryCheck) -> SiteData:
        """Return the same with other records; SecurityError where these do not fit earlier answers."""
        kept = self.memory.to_arrays(self.table, self.mark_key)
        if kept and (why := fits(kept, self.table.n_rows)):
            raise SecurityError(f"{self.name}: {why}")
        memory = ReleaseHistory.from_arrays(kept, table, self.mark_key) if kept else ReleaseHistory()
        if isinstance(self.table, LabeledTable):
            table = LabeledTable(table, self.table.name, self.table.label)
        return replace(self, table=table, memory=memory)

    @property
    def common_seed(self) -> int:
        """A secret that the sites share and the coordinator does not have, for what all draw or hash alike.

        Raises
        ------
        PartitionError
            The owners have agreed on none. Drawn apart, it would make results wrong, and nobody would see.
        """
        if self.shared_seed is None:
            raise PartitionError(
                f"{self.name}: it has no secret in common with the other sites, which sketches and labels "
                "that several sites hold need. One owner draws it by 'fedstat site seed FOLDER', and all "
                'write that line, seed = "...", into their site.toml'
            )
        return self.shared_seed

    @property
    def mark_key(self) -> bytes:
        """Key of the marks by which rows are known again."""
        return self.trust.identity.secret("row marks")

    @property
    def min_count(self) -> int:
        """Smallest number of entities behind a sum, by the owner's policy."""
        return self.policy.min_count

    @property
    def frame(self) -> pd.DataFrame:
        """All records, for steps that need them at once.

        Raises
        ------
        DesignError
            The table is streamed.
        """
        table = self.table.table if isinstance(self.table, LabeledTable) else self.table
        if isinstance(table, FrameTable):
            return table.frame
        raise DesignError(
            f"{self.name}: this family needs the table in memory, and it is streamed from a file. Read it "
            "with pandas first; the families for the horizontal layout stream it."
        )


class State:
    """What a site remembers of one session: the design that it opened, and the fits on it.

    Every item is kept with the number of entities that it rests on; the entities behind an answer are
    the fewest of those behind the items that its step used, and none where it used none. A design is kept
    with the number of its columns, and every item with the facts that were told of it.
    """

    def __init__(self, site: str) -> None:
        self.site = site
        self._items: dict[str, Any] = {}
        self._counts: dict[str, int | None] = {}
        self._columns: dict[str, int] = {}
        self._facts: dict[str, frozenset[type]] = {}
        self._behind: int | None = None
        self._judge: Callable[[Any], None] | None = None
        self.check_noise: Callable[[], None]  # of the present request, set when it begins
        self.reported: set[type] = set()
        self.masked_among: tuple[str, ...] = ()  # sites that mask the present answer
        self.owed: dict[str, NoiseRequired] = {}  # by array of the present answer
        self.in_play: set[str] = set()
        self.last: dict[str, str] = {}  # the latest step of each family
        self.begun: dict[str, bytes] = {}  # what all sites were told alike, by the step that it came with
        # Not restored after a refusal: what was asked for counts.
        self.analysis = FollowedPlan()
        self.requested: tuple[FactorsRequested, ...] = ()  # of the latest request with a formula
        self._formula_begins = True

    def __contains__(self, name: object) -> bool:
        return name in self._items

    @property
    def entities(self) -> int:
        """Entities behind the answer to the present ask."""
        return self._behind or 0

    @property
    def columns(self) -> int:
        """Most design columns of this site that are open at once."""
        return max(self._columns.values(), default=0)

    def begin(
        self, judge: Callable[[Any], None], masked_among: tuple[str, ...], check_noise: Callable[[], None]
    ) -> None:
        """Start counting for a new request, whose facts the site examines."""
        self._behind, self._judge, self.reported, self.masked_among = None, judge, set(), masked_among
        self._formula_begins = True
        self.check_noise = check_noise
        self.owed.clear()

    def report(self, *facts: Any) -> None:
        """Say what stands behind the answer: see :mod:`fedstat.federation.disclosure.facts`.

        The door judges at once, since what goes wrong later in a step may say something about few rows.

        Raises
        ------
        PolicyError
            The site's owner does not allow it.
        """
        for fact in facts:
            self.reported.add(type(fact))
            if isinstance(fact, EntityCount):
                self.rest_on(fact.n)
            if isinstance(fact, NoiseRequired):
                self.owed[fact.array] = fact
            if isinstance(fact, FactorsRequested):
                self.requested = (fact,) if self._formula_begins else (*self.requested, fact)
                self._formula_begins = False
            if self._judge is not None:
                self._judge(fact)

    def copy(self) -> State:
        """Return what is kept now, for :meth:`restore`."""
        earlier = State(self.site)
        earlier.restore(self)
        earlier._items = {name: snapshot(item) for name, item in self._items.items()}
        return earlier

    def restore(self, earlier: State) -> None:
        """Go back to what was kept earlier."""
        self._items, self._counts = dict(earlier._items), dict(earlier._counts)
        self._columns, self._behind = dict(earlier._columns), earlier._behind
        self._facts, self.reported = dict(earlier._facts), set(earlier.reported)
        self.in_play = set(earlier.in_play)

    def rest_on(self, entities: int) -> None:
        """Say that the answer rests on no more than so many entities."""
        self._behind = entities if self._behind is None else min(self._behind, entities)

    def play(self, names: Iterable[str]) -> None:
        """Say which columns of the site's table the answers of this session may rest on."""
        self.in_play.update(names)

    def keep(self, name: str, item: Any, entities: int | None = None, columns: int = 0) -> None:
        """Keep an item that rests on so many entities; on none where left out, such as a key.

        A design says how many columns of this site it has.
        """
        self._items[name] = item
        self._counts[name] = entities
        self._columns[name] = columns
        self._facts[name] = frozenset(self.reported)
        if entities is not None:
            self.rest_on(entities)

    def forget(self, name: str) -> None:
        """Drop what serves only once."""
        del self._items[name], self._counts[name], self._columns[name], self._facts[name]

    def forget_all(self, beginning: str) -> None:
        """Drop all items whose names begin so."""
        for name in [name for name in self._items if name.startswith(beginning)]:
            self.forget(name)

    def look_at(self, name: str) -> Any:
        """Return what was kept under a name, whose entities are counted elsewhere."""
        return self._items[name]

    def use(self, name: str, kind: type[KeptT], absent: str = "") -> KeptT:
        """Return the item of this kind that an earlier step kept, and let the answer rest on its entities.

        Raises
        ------
        MessageError
            There is none; the words of `absent` say so, and what is to be asked first.
        """
        if name not in self._items:
            default = (
                f"this session keeps no '{name}' here: the question is out of turn; make the model again"
            )
            raise MessageError(f"{self.site}: {absent or default}")
        item: KeptT = self._items[name]
        entities = self._counts[name]
        self.reported |= self._facts[name]
        if entities is not None:
            self.rest_on(entities)
        return item


def snapshot(item: Any) -> Any:
    """Copy an item that steps change in place: its lists, mappings and fields, not arrays, keys or masks."""
    if isinstance(item, list):
        return [snapshot(part) for part in item]
    if isinstance(item, dict):
        return {name: snapshot(part) for name, part in item.items()}
    kind = getattr(item, "__dataclass_params__", None)
    if kind is None or kind.frozen or isinstance(item, type):
        return item
    held = copy(item)
    for part in fields(item):
        setattr(held, part.name, snapshot(getattr(item, part.name)))
    return held
