"""Records that count as missing for good, because a missing pattern had too few to be released.

Sums over the entities of two fits may differ by many entities or by none. Where a fit merged small patterns
(:mod:`fedstat.models.vertical.merges`), the records that it set aside are set aside by every later one too:
else a fit by another method, or of fewer columns, would bring back the few of them, and the difference of its
sums to the earlier ones would be theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedstat.typing import Bools, Ints

NOBODY: Ints = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class Division:
    """Positions of entities whose record at a site is set aside, and of those that take no part at all.

    `values` are those of which the value of a column is set aside, by site and column.
    """

    without: dict[str, Ints] = field(default_factory=dict)
    left_out: Ints = field(default_factory=lambda: NOBODY)
    values: dict[tuple[str, str], Ints] = field(default_factory=dict)

    def set_aside(self, without: Mapping[str, Ints], left_out: Ints) -> None:
        """Set further records aside."""
        for client, entities in without.items():
            if len(entities):
                self.without[client] = np.union1d(self.without.get(client, NOBODY), entities)
        self.left_out = np.union1d(self.left_out, left_out)

    def set_values_aside(self, client: str, columns: Sequence[str], entities: Ints) -> None:
        """Set aside the values of some columns for further entities."""
        for column in columns if len(entities) else ():
            self.values[client, column] = np.union1d(self.values.get((client, column), NOBODY), entities)

    def without_values(self, client: str, read: Sequence[Sequence[str]], entities: Ints) -> Bools:
        """Whether a value that is read was set aside, of entities (n,) by what each of p columns reads."""
        gone = [
            np.concatenate([NOBODY, *(self.values.get((client, column), NOBODY) for column in columns)])
            for columns in read
        ]
        return np.column_stack([np.isin(entities, of) for of in gone])

    def seen(self, client: str, entities: Ints) -> Bools:
        """Whether records of these entities count as seen at an institution: (n,)."""
        aside = np.union1d(self.without.get(client, NOBODY), self.left_out)
        return np.asarray(~np.isin(entities, aside))
