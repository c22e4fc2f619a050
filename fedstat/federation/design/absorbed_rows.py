"""The rows of a site less the effects of absorbed levels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fedstat.federation.design.site_rows import CompleteRows, RowsRequest
from fedstat.federation.disclosure.facts import AbsorbedLevels, RowGroups
from fedstat.kernels.absorption import absorbed_rank, without_levels
from fedstat.typing import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class AbsorbedRows:
    """Complete rows of one site and their columns (n, p), less the effects of levels.

    Parameters
    ----------
    rows : CompleteRows
        Response and offset are less the effects as well.
    X : (n, p) array
    codes : sequence of (n,) arrays of int
        Level of each row, from 0 on, for one or two effects.
    alone : int
        Rows that were left out because they are alone in a level.
    """

    rows: CompleteRows
    X: Floats
    codes: Sequence[Ints]
    alone: int

    @classmethod
    def of(cls, question: RowsRequest, rows: CompleteRows, X: Floats, min_level_count: int) -> AbsorbedRows:
        """Leave out rows that are alone in a level, and subtract the effects of the levels.

        Fewer than `min_level_count` such rows are kept: their number is not released, and all sums over them
        are zero.
        """
        counted = rows.weights.get("freq_weights", np.ones(len(X)))
        codes = level_codes(rows.frame, question.absorbed)
        inside = within_levels(codes, counted)
        alone = int((~inside).sum())
        if alone < min_level_count or not inside.any():
            inside, alone = np.ones(len(X), dtype=np.bool_), 0
        rows = rows.only(inside)
        codes = [np.unique(code[inside], return_inverse=True)[1].ravel() for code in codes]
        offset = [] if rows.offset is None else [rows.offset]
        left = without_levels(np.column_stack([rows.y, *offset, X[inside]]), codes, rows.weight)
        y, shifted, X = left[:, 0], left[:, 1], left[:, 1 + len(offset) :]
        rows = replace(rows, y=np.ascontiguousarray(y), offset=shifted.copy() if offset else None)
        return cls(rows, np.ascontiguousarray(X), codes, alone)

    @property
    def counts(self) -> Floats:
        """Rank of the indicators of the levels, and number of rows left out: (2,)."""
        return np.array([absorbed_rank(self.codes), self.alone], dtype=np.float64)

    def facts(
        self, question: RowsRequest, places: Ints, min_level_count: int
    ) -> Iterator[AbsorbedLevels | RowGroups]:
        """Report the levels, and the rows (n,) of the table that are summed by level.

        A level of enough rows counts as a group whose sums are known. All others are one group together: no
        release has the sums of one of them.
        """
        n, rank = len(self.X), absorbed_rank(self.codes)
        for text, code in zip(question.absorbed_texts, self.codes, strict=True):
            counts = np.bincount(code)
            yield AbsorbedLevels(text, counts.tolist(), n, rank, self.X.shape[1])
            small = counts < min_level_count
            group = np.where(small, (~small).sum(), np.cumsum(~small) - 1)
            yield RowGroups("", group[code], places, min_level_count)


def level_codes(frame: pd.DataFrame, effects: Sequence[Sequence[str]]) -> list[Ints]:
    """Return the number of each row's level, (n,) from 0 on, for every effect."""
    found = []
    for names in effects:
        code = np.column_stack([pd.factorize(frame[name])[0] for name in names])
        found.append(np.unique(code, axis=0, return_inverse=True)[1].ravel())
    return found


def within_levels(codes: Sequence[Ints], counted: Floats) -> Bools:
    """Return which rows (n,) are not alone in a level; without them others may be alone, which go as well.

    `counted` (n,) are the numbers of rows for which the rows stand.
    """
    inside = np.ones(len(counted), dtype=np.bool_)
    while True:
        sizes = [np.bincount(code, counted * inside)[code] for code in codes]
        now: Bools = inside & (np.min(sizes, axis=0) > 1.0)
        if (now == inside).all():
            return now
        inside = now


def joined(parts: Sequence[CompleteRows]) -> CompleteRows:
    """Put chunks of complete rows together; some have rows."""
    found = [one for one in parts if len(one.frame)]
    first = found[0]
    return replace(
        first,
        frame=pd.concat([one.frame for one in found], ignore_index=True),
        complete=np.concatenate([one.complete for one in parts]),
        y=np.concatenate([one.y for one in found]),
        offset=None if first.offset is None else np.concatenate([one.offset for one in found]),
        weights={role: np.concatenate([one.weights[role] for one in found]) for role in first.weights},
    )
