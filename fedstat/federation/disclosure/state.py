"""State of a site: its data, the keys that it trusts, and the state of each session."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeAlias, TypeVar

import pandas as pd

from fedstat.errors import DesignError, MessageError, PartitionError, Remedy, SecurityError
from fedstat.federation.audit.event_log import NO_SUBJECT, SiteLedger
from fedstat.federation.audit.ledger_file import HistoryCheck
from fedstat.federation.crypto.keys import Identity, normalize_fingerprint
from fedstat.federation.disclosure.approval import AdmittedRoles, Approvals, FollowedPlan, Role
from fedstat.federation.disclosure.facts import EntityCount, FactorsRequested
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.privacy_budget import NoiseRequired, RepeatedRelease
from fedstat.federation.disclosure.release_history import ReleaseHistory
from fedstat.federation.tables.published import Published
from fedstat.federation.tables.table import FrameTable, LabeledTable, Table
from fedstat.typing import Array

KeptT = TypeVar("KeptT")
MAX_SESSIONS = 32
"""Sessions that a site keeps at the same time; a served site's owner sets another number."""
CONNECTING_FAMILY = "schema"
"""Family of the requests of a connection, which keep nothing for later ones."""
STALLED, MOST_OVER = 5.0, 4
"""Seconds without requests after which a served site opens one session too many; the most, as a multiple.

Two analyses could otherwise wait for each other, each with a session at one site and none at the other.
"""
IDLE = 900.0
"""Seconds without a request after which another session may replace one whose run has not ended."""
SESSION_END_REASONS = {
    "restart": "it was started again since this session began, and the state of the fit is gone; its "
    "ledger continues. Make the model again with from_formula",
    "newer": "newer sessions have replaced this one, which had no requests for the longest time. Make the "
    "model again with from_formula. The site's owner sets the number of sessions in site.toml, sessions",
    "rules": "its owner has made its rules stricter since this session began. Make the model again with "
    "from_formula",
    "records": "its data were read again since this session began, and have changed. Make the model "
    "again with from_formula",
}
"""Reasons for which a site has ended a session."""


@dataclass(slots=True)
class SiteTrust:
    """A site's keys, the fingerprints that its owner has pinned, and the owner's consents.

    `pinned` has the fingerprint of every site with which this one exchanges secrets, and its own. `consents`
    has the time at which the owner consented to one alignment of keys with a site, and `rosters` the digests
    of the accepted rosters, by number. `studies` has the fingerprint of each study's coordinator, and `roles`
    what persons may request. `study_rosters` are the accepted rosters of other coordinators, by fingerprint.
    """

    pinned: dict[str, str] = field(default_factory=dict)
    _identity: Identity | None = None
    consents: dict[str, str] = field(default_factory=dict)
    rosters: dict[str, str] = field(default_factory=dict)
    studies: dict[str, str] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    study_rosters: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def rosters_of(self, client: str) -> Mapping[str, str]:
        """Return the accepted rosters of the coordinator with this fingerprint."""
        return self.study_rosters.get(normalize_fingerprint(client), self.rosters)

    @property
    def identity(self) -> Identity:
        """The site's keys, made when they are first needed."""
        if self._identity is None:
            self._identity = Identity.generate()
        return self._identity


Recall: TypeAlias = Callable[[str, Collection[str]], tuple[bytes, dict[str, Array]] | None]
"""Finds parts of a complete earlier release, and the digest of its session."""


@dataclass(frozen=True, slots=True)
class SiteData:
    """Data and settings that a step receives: the rows of one site, and nothing else.

    Parameters
    ----------
    name : str
        Name of the site.
    table : Table
        Its records, one row per entity in the partition's order, without the key.
    shared_seed : int or None
        See :attr:`common_seed`.
    policy : Policy
        What the site's owner allows.
    memory : ReleaseHistory
        The groups of rows behind earlier releases; see :mod:`fedstat.federation.disclosure.release_history`.
    trust : SiteTrust
    site_ledger : SiteLedger
        The site's own ledger of all requests and releases.
    published : mapping of str to PublishedColumn
        What the owner has published of the columns, by which formulas are checked.
    approvals : Approvals
        Proposed plans of analyses, and the owner's decisions.
    imputations : dict of str to ImputedCells
        Missing cells that the site has drawn, by the token of the imputation; they are not stored.
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
    imputations: dict[str, Any] = field(default_factory=dict)

    def with_records(self, table: Table, fits: HistoryCheck) -> SiteData:
        """Return the same with other data; SecurityError if these do not fit earlier releases."""
        kept = self.memory.to_arrays(self.table, self.mark_key)
        if kept and (why := fits(kept, self.table.n_rows)):
            raise SecurityError(f"{self.name}: {why}")
        memory = ReleaseHistory.from_arrays(kept, table, self.mark_key) if kept else ReleaseHistory()
        if isinstance(self.table, LabeledTable):
            table = LabeledTable(table, self.table.name, self.table.label)
        return replace(self, table=table, memory=memory)

    @property
    def common_seed(self) -> int:
        """A secret that the sites share and the coordinator does not have, for common random draws.

        Raises
        ------
        PartitionError
            The owners have not agreed on one. Separate draws would make results wrong without a sign of it.
        """
        if self.shared_seed is None:
            raise PartitionError(
                f"{self.name}: this site has no secret in common with the other sites. Sketches, and "
                "labels that several sites hold, need one",
                remedy=Remedy(
                    "fedstat site seed FOLDER",
                    "One owner draws it with '{call}', and all owners write that line, seed = \"...\", into "
                    "their site.toml",
                ),
            )
        return self.shared_seed

    @property
    def mark_key(self) -> bytes:
        """Key of the digests by which rows are recognized."""
        return self.trust.identity.secret("row marks")

    @property
    def min_count(self) -> int:
        """Smallest number of entities behind a sum, by the owner's policy."""
        return self.policy.min_count

    @property
    def frame(self) -> pd.DataFrame:
        """All rows, for steps that need them at once.

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
    """The state of one session at a site: its design and its fits.

    Every item is stored with the number of entities behind it. The entities behind a reply are the fewest of
    those behind the items that its step used, or none if it used none. A design is stored with the number of
    its columns, and every item with the facts that were reported of it.
    """

    def __init__(self, site: str) -> None:
        self.site = site
        self._items: dict[str, Any] = {}
        self._counts: dict[str, int | None] = {}
        self._columns: dict[str, int] = {}
        self._facts: dict[str, frozenset[type]] = {}
        self._behind: int | None = None
        self._check_fact: Callable[[Any], None] | None = None
        self.check_noise: Callable[[], None]  # of the present request, set when it begins
        self.recall: Recall  # earlier releases with noise, for the present request
        self.mark: Callable[[], int]  # digest of the records, for noise in shares
        self.reported: set[type] = set()
        self.masked_among: tuple[str, ...] = ()  # sites that mask the present reply
        self.owed: dict[str, NoiseRequired | RepeatedRelease] = {}  # by array of the present reply
        self.used_columns: set[str] = set()
        self.last: dict[str, str] = {}  # the latest step of each family
        self.begun: dict[str, bytes] = {}  # common values that all sites received, by their step
        # Not restored after a refusal: every request counts.
        self.analysis = FollowedPlan()
        self.requested: tuple[FactorsRequested, ...] = ()  # of the latest request with a formula
        self._formula_begins = True
        self.admitted = AdmittedRoles(site, {})  # roles of the present request
        self.subject = NO_SUBJECT
        self.used, self.run_ended = time.monotonic(), False

    def __contains__(self, name: object) -> bool:
        return name in self._items

    @property
    def is_empty(self) -> bool:
        """Whether nothing is stored for a later request."""
        return not self._items

    @property
    def is_connection(self) -> bool:
        """Whether there were only requests of a connection, which keep nothing."""
        return self.is_empty and set(self.last) <= {CONNECTING_FAMILY}

    @property
    def may_be_replaced(self) -> bool:
        """Whether no analysis is lost if another session replaces this one."""
        return self.is_connection or self.run_ended or time.monotonic() - self.used > IDLE

    @property
    def entities(self) -> int:
        """Number of entities behind the reply to the present request."""
        return self._behind or 0

    @property
    def columns(self) -> int:
        """Most design columns of this site that are open at once."""
        return max(self._columns.values(), default=0)

    def begin(
        self,
        check_fact: Callable[[Any], None],
        masked_among: tuple[str, ...],
        check_noise: Callable[[], None],
        recall: Recall,
        mark: Callable[[], int],
    ) -> None:
        """Start counting for a new request, whose facts the site examines."""
        self._behind, self._check_fact = None, check_fact
        self.reported, self.masked_among = set(), masked_among
        self._formula_begins = True
        self.check_noise, self.recall, self.mark = check_noise, recall, mark
        self.owed.clear()

    def end(self) -> None:
        """Drop the checks of a request, which refer to this state: the cycle would keep the site's rows."""
        self._check_fact = None
        for name in ("check_noise", "recall", "mark"):
            self.__dict__.pop(name, None)

    def report(self, *facts: Any) -> None:
        """Report what is behind the reply: see :mod:`fedstat.federation.disclosure.facts`.

        The checks run at once, since a later error in a step may depend on few rows.

        Raises
        ------
        PolicyError
            The site's owner does not allow it.
        """
        for fact in facts:
            self.reported.add(type(fact))
            if isinstance(fact, EntityCount):
                self.count_entities(fact.n)
            if isinstance(fact, NoiseRequired | RepeatedRelease):
                self.owed[fact.array] = fact
            if isinstance(fact, FactorsRequested):
                # Before a row is read: a later refusal could depend on rows of these columns.
                self.admitted.check_columns({name for one in fact.factors for name in one.columns})
                self.requested = (fact,) if self._formula_begins else (*self.requested, fact)
                self._formula_begins = False
            if self._check_fact is not None:
                self._check_fact(fact)

    def copy(self) -> State:
        """Return the present state, for :meth:`restore`."""
        earlier = State(self.site)
        earlier.restore(self)
        earlier._items = {name: snapshot(item) for name, item in self._items.items()}
        return earlier

    def restore(self, earlier: State) -> None:
        """Restore an earlier state."""
        self._items, self._counts = dict(earlier._items), dict(earlier._counts)
        self._columns, self._behind = dict(earlier._columns), earlier._behind
        self._facts, self.reported = dict(earlier._facts), set(earlier.reported)
        self.used_columns = set(earlier.used_columns)

    def count_entities(self, entities: int) -> None:
        """Declare that the reply is computed from at most `entities` entities."""
        self._behind = entities if self._behind is None else min(self._behind, entities)

    def use_columns(self, names: Iterable[str]) -> None:
        """Declare which columns of the site's table the replies of this session may use."""
        self.used_columns.update(names)

    def keep(self, name: str, item: Any, entities: int | None = None, columns: int = 0) -> None:
        """Store an item with the number of entities behind it; by default none, for example for a key.

        A design declares how many columns of this site it has.
        """
        self._items[name] = item
        self._counts[name] = entities
        self._columns[name] = columns
        self._facts[name] = frozenset(self.reported)
        if entities is not None:
            self.count_entities(entities)

    def forget(self, name: str) -> None:
        """Drop items that can be used only once."""
        del self._items[name], self._counts[name], self._columns[name], self._facts[name]

    def forget_all(self, beginning: str) -> None:
        """Drop all items whose names have a prefix."""
        for name in [name for name in self._items if name.startswith(beginning)]:
            self.forget(name)

    def look_at(self, name: str) -> Any:
        """Return a stored item whose entities are counted elsewhere."""
        return self._items[name]

    def use(self, name: str, kind: type[KeptT], absent: str = "") -> KeptT:
        """Return the item of this kind that an earlier step stored, and count its entities for the reply.

        Raises
        ------
        MessageError
            There is none; the text is that of `absent`, which names the missing request.
        """
        if name not in self._items:
            default = f"this session has no '{name}' here: the request is out of order; make the model again"
            raise MessageError(f"{self.site}: {absent or default}")
        item: KeptT = self._items[name]
        entities = self._counts[name]
        self.reported |= self._facts[name]
        if entities is not None:
            self.count_entities(entities)
        return item


def snapshot(item: Any) -> Any:
    """Copy an item that steps change in place: its lists, mappings and fields, not arrays, keys or masks."""
    if isinstance(item, list):
        return [snapshot(part) for part in item]
    if isinstance(item, dict):
        return {name: snapshot(part) for name, part in item.items()}
    kind: Any = type(item)
    changing = _changing_fields(kind)
    if not changing:
        return item
    held = copy(item)
    for name in changing:
        setattr(held, name, snapshot(getattr(item, name)))
    return held


@cache
def _changing_fields(kind: type) -> tuple[str, ...]:
    """Return the fields of a dataclass that is not frozen; none of another type."""
    params = getattr(kind, "__dataclass_params__", None)
    return () if params is None or params.frozen else tuple(part.name for part in fields(kind))
