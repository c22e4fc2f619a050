"""The account of what passed between institutions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, get_args

import pandas as pd

from fedstat.federation.account.chain import COORDINATOR, Account
from fedstat.federation.message import Declared, Kind
from fedstat.typing import Array

if TYPE_CHECKING:
    from fedstat.federation.account.receipt import Receipt

__all__ = ["COORDINATOR", "Account", "Entry", "Ledger"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One array that passed.

    Parameters
    ----------
    round : int
        The round trip it belongs to, from 1.
    sender, receiver : str
        Names of institutions, or ``"coordinator"``.
    step, array : str
        The question, and the array's name in it.
    kind, what : str
        See :data:`fedstat.federation.message.Kind`; the array in words.
    shape : tuple of int
    bytes : int
        Size of the numbers.
    entities : int
        Number of entities behind the array at the sending institution; 0 where none are.
    masked : bool
        Whether masks hid it, so that the receiver learned only the sum over institutions.
    """

    round: int
    sender: str
    receiver: str
    step: str
    array: str
    kind: str
    what: str
    shape: tuple[int, ...]
    bytes: int
    entities: int = 0
    masked: bool = False


@dataclass(slots=True)
class Ledger:
    """Every array that left one institution for another, in order.

    Parameters
    ----------
    at : str or None
        The institution at which the coordinator sits: what passes between the two is not a release
        and is not entered. What the coordinator sends to the others leaves that institution.
    account : Account
        The same and more, entry by entry as the sites' own chains have it; the ledgers of one model share it.
    receipt : Receipt or None
        The sites' signed statements on a run, once it has ended.
    """

    at: str | None = None
    entries: list[Entry] = field(default_factory=list)
    rounds: int = 0
    account: Account = field(default_factory=Account, repr=False, compare=False)
    receipt: Receipt | None = field(default=None, repr=False, compare=False)

    def begin_round(self) -> None:
        """Start a round trip between institutions."""
        self.rounds += 1

    def record(
        self,
        sender: str,
        receiver: str,
        step: str,
        arrays: Mapping[str, Array],
        declared: Mapping[str, Declared],
        entities: int = 0,
        masked: bool = False,
    ) -> None:
        """Enter the arrays of one message, in the order of their declaration.

        With `masked` those that are declared maskable were hidden; their shape is entered without the
        leading axis of words.
        """
        place = {name: i for i, name in enumerate(declared)}
        for name, array in sorted(arrays.items(), key=lambda item: place[item[0]]):
            line = declared[name]
            hidden = masked and line.maskable
            self.entries.append(
                Entry(
                    self.rounds,
                    sender,
                    receiver,
                    step,
                    name,
                    line.kind,
                    line.what,
                    array.shape[1:] if hidden else array.shape,
                    array.nbytes,
                    entities,
                    hidden,
                )
            )

    def record_text(self, sender: str, receiver: str, step: str, text: str, line: Declared | None) -> None:
        """Enter a text, such as a schema; an empty one is none."""
        if not text or line is None:
            return
        self.entries.append(
            Entry(
                self.rounds,
                sender,
                receiver,
                step,
                "text",
                line.kind,
                line.what,
                (),
                len(text.encode()),
            )
        )

    @property
    def bytes(self) -> int:
        """Bytes that left an institution, either way."""
        return sum(entry.bytes for entry in self.entries)

    def to_frame(self) -> pd.DataFrame:
        """One row per array that passed."""
        columns = list(Entry.__dataclass_fields__)
        return pd.DataFrame([asdict(entry) for entry in self.entries], columns=columns)

    def releases(self) -> pd.DataFrame:
        """List what left each institution, array by array.

        Returns
        -------
        DataFrame
            One row per institution, receiver, step and array: kind, meaning, number of messages, largest
            shape, bytes in all, and the entities behind one message.
        """
        frame = self.to_frame()
        if self.at is not None:
            frame["sender"] = frame["sender"].replace(COORDINATOR, self.at)
            frame["receiver"] = frame["receiver"].replace(COORDINATOR, self.at)
        keys = ["sender", "receiver", "step", "array", "kind", "what", "masked"]
        grouped = frame.groupby(keys, sort=False, observed=True)
        table = grouped.agg(
            messages=("round", "size"),
            shape=("shape", "max"),
            bytes=("bytes", "sum"),
            entities=("entities", "max"),
        )
        return table.reset_index()

    def kinds_by_client(self) -> dict[str, tuple[str, ...]]:
        """Kinds of values that left each institution, most disclosing last."""
        order = get_args(Kind)
        seen: dict[str, set[str]] = {}
        for entry in self.entries:
            sender = self.at if entry.sender == COORDINATOR and self.at is not None else entry.sender
            seen.setdefault(sender, set()).add(entry.kind)
        return {site: tuple(k for k in order if k in kinds) for site, kinds in seen.items()}
