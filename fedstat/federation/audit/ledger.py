"""Ledgers: views of the events that the coordinator, or a site, recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self, get_args

import pandas as pd

from fedstat.federation.audit import event_log
from fedstat.federation.message import ArrayKind, Reply, Request, Step

if TYPE_CHECKING:
    from fedstat.federation.audit.receipt import Receipt

LEDGER_COLUMNS = tuple(
    part.name for part in fields(event_log.Entry) if part.init and part.name not in ("family", "rule")
)
"""Columns of a ledger that is shown."""


class CoordinatorLog:
    """The coordinator's own entries of all that it carried in one session.

    The ledgers of all runs of one model share it: a copy of it is the same log.
    """

    def __init__(self) -> None:
        self._passed: list[event_log.Entry] = []
        self._requests: Counter[str] = Counter()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    def passed(self) -> tuple[event_log.Entry, ...]:
        """All entries so far."""
        return tuple(self._passed)

    def enter(self, request: Request, step: Step | None, outcome: Reply | Exception) -> list[event_log.Entry]:
        """Add a request, and its reply or refusal; a step that is not installed has no entry."""
        self._requests[request.site] += 1
        number = self._requests[request.site]
        entries = [] if step is None else event_log.request_entries(request, step, number)
        if isinstance(outcome, Exception):
            entries.append(event_log.refusal_entry(request, outcome, number))
        elif step is not None:
            entries += event_log.reply_entries(request, step, outcome, number)
        self._passed += entries
        return entries


@dataclass(slots=True)
class Ledger:
    """Every array that left one site for another, in order.

    It refers to the events that were recorded when they happened; `rounds` counts the round trips, and
    `waited` the seconds in which the coordinator waited for them. A copy refers to the same events.

    Parameters
    ----------
    at : str or None
        The site of the coordinator: messages between the two are not a release and have no entry. Messages of
        the coordinator to other sites are releases of that site.
    events : list of (int, Entry)
        Messages, each with its round of this ledger.
    log : CoordinatorLog
        The same and more, entry by entry as the sites' own chains have it; the ledgers of one model share it.
    receipt : Receipt or None
        The sites' signed statements on a run, once it has ended.
    setting : str
        Description of the places of the sites; empty if each was in its own process.
    absent : tuple of AbsentSite
        Sites without which the run was repeated; the earlier releases of all sites have entries as well.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> ledger = fs.GLORE.from_formula("num > 0 ~ age", partition).fit().ledger
    >>> ledger.bytes > 0, ledger.rounds > 0, list(ledger.kinds_by_site())
    (True, True, ['coordinator', 'Cleveland', 'Hungary', 'Long Beach', 'Switzerland'])
    >>> ledger.to_frame().columns[:3].tolist(), len(ledger.releases()) > 0
    (['round', 'sender', 'receiver'], True)
    >>> copied = fs.results.Ledger()
    >>> copied.begin_round()
    >>> copied.enter(ledger.entries[:1])
    >>> len(copied.to_frame())
    1
    """

    at: str | None = None
    events: list[tuple[int, event_log.Entry]] = field(default_factory=list)
    rounds: int = 0
    waited: float = field(default=0.0, compare=False)
    log: CoordinatorLog = field(default_factory=CoordinatorLog, repr=False, compare=False)
    receipt: Receipt | None = field(default=None, repr=False, compare=False)
    setting: str = field(default="", repr=False, compare=False)
    absent: tuple[event_log.AbsentSite, ...] = field(default=(), repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return replace(self, events=list(self.events))

    @property
    def entries(self) -> list[event_log.Entry]:
        """All entries, numbered by the rounds of this ledger."""
        return [entry.in_round(number) for number, entry in self.events]

    def __repr__(self) -> str:
        where = f", coordinator at {self.at!r}" if self.at else ""
        return (
            f"<Ledger: {self.rounds:,} rounds, {self.waited:,.1f} s waited, {len(self.events):,} arrays, "
            f"{self.bytes:,} bytes{where}; "
            "see .releases()>"
        )

    def begin_round(self) -> None:
        """Start a round trip between sites."""
        self.rounds += 1

    def enter(self, entries: Iterable[event_log.Entry]) -> None:
        """Enter what passed in the present round, texts after arrays."""
        ordered = sorted(entries, key=lambda entry: entry.array == event_log.TEXT)
        self.events += [(self.rounds, entry) for entry in ordered]

    def _goes_on_in(self, later: Ledger) -> Ledger:
        """Return a later ledger that begins with all of this one; the log is the later one's."""
        events = [(number + self.rounds, entry) for number, entry in later.events]
        return replace(
            later,
            events=[*self.events, *events],
            rounds=self.rounds + later.rounds,
            waited=self.waited + later.waited,
            absent=(*self.absent, *later.absent),
        )

    @property
    def bytes(self) -> int:
        """Bytes that were sent by a site, in either direction."""
        return sum(entry.bytes for _, entry in self.events)

    def to_frame(self) -> pd.DataFrame:
        """One row per array that passed."""
        values = attrgetter(*LEDGER_COLUMNS[1:])
        rows = [(number, *values(entry)) for number, entry in self.events]
        return pd.DataFrame(rows, columns=list(LEDGER_COLUMNS))

    def releases(self) -> pd.DataFrame:
        """List the releases of each site, array by array.

        Returns
        -------
        DataFrame
            One row per site, receiver, step and array: kind, meaning, number of messages, largest shape,
            total bytes, and the entities behind one message.
        """
        frame = self.to_frame()
        if self.at is not None:
            frame["sender"] = frame["sender"].replace(event_log.COORDINATOR, self.at)
            frame["receiver"] = frame["receiver"].replace(event_log.COORDINATOR, self.at)
        keys = ["sender", "receiver", "step", "array", "kind", "what", "masked"]
        grouped = frame.groupby(keys, sort=False, observed=True)
        table = grouped.agg(
            messages=("round", "size"),
            shape=("shape", "max"),
            bytes=("bytes", "sum"),
            entities=("entities", "max"),
        )
        return table.reset_index()

    def kinds_by_site(self) -> dict[str, tuple[str, ...]]:
        """Kinds of values that each site released, most disclosing last."""
        order = get_args(ArrayKind)
        seen: dict[str, set[str]] = {}
        for _, entry in self.events:
            sender = (
                self.at if entry.sender == event_log.COORDINATOR and self.at is not None else entry.sender
            )
            seen.setdefault(sender, set()).add(entry.kind)
        return {site: tuple(k for k in order if k in kinds) for site, kinds in seen.items()}


def released_by(log: event_log.SiteLedger, leaving_out: str) -> Ledger:
    """Ledger of all that left a site, one round per answer, without what one family released."""
    ledger, last = Ledger(), None
    for chain, entry in log.events:
        if entry.left and entry.family != leaving_out:
            if (chain, entry.round) != last:
                ledger.begin_round()
                last = chain, entry.round
            ledger.enter([entry])
    return ledger
