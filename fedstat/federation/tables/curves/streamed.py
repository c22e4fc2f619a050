"""A table whose rows are streamed, with curves in the place of their columns: a chunk of curves at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Protocol

import numpy as np
import pandas as pd

from fedstat.errors import DesignError, PartitionError
from fedstat.federation.tables.curves.array import Curve, CurveArray
from fedstat.federation.tables.curves.declared import AnyCurve, checked, columns_of, read_columns
from fedstat.federation.tables.curves.long import LongCurve

CURVES_PER_CHUNK = 4096


class Streamed(Protocol):
    """Rows that come in chunks of a length."""

    rows_per_chunk: int
    n_rows: int
    columns: tuple[str, ...]

    def chunks(self, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Go through the rows."""
        ...


class CurveTable:
    """A streamed table with declared curves; `curves` are none of them, and tell their points.

    All rows are gone through once when it is opened, so that what is wrong with a curve is told then.
    """

    def __init__(self, where: str, table: Streamed, curves: Mapping[str, AnyCurve]) -> None:
        self.where, self.table = where, copy(table)
        self.table.rows_per_chunk = min(table.rows_per_chunk, CURVES_PER_CHUNK)
        self.declared: dict[str, Curve] = {}
        self.held: dict[str, list[str]] = {}
        for name, curve in curves.items():
            if isinstance(curve, LongCurve):
                raise PartitionError(
                    f"{where}, curve '{name}': a long table is read beside tables in memory, and this one is "
                    "streamed. Put arrays in its cells: Curve(..., at=...)"
                )
            self.declared[name], self.held[name] = curve, columns_of(curve, table.columns)
        used = {column for columns in self.held.values() for column in columns}
        plain = [name for name in table.columns if name not in used]
        twice = [name for name in curves if name in plain]
        if twice:
            raise PartitionError(f"{where}: '{twice[0]}' is a curve and a column of the table; rename one")
        self.columns: tuple[str, ...] = (*plain, *curves)
        self.n_rows = table.n_rows
        self.curves: dict[str, CurveArray] = {}
        self.curves = self._look()

    def without(self, key: Sequence[str]) -> CurveTable:
        """Return the table without the columns of a key, which no model sees."""
        other = copy(self)
        other.columns = tuple(name for name in self.columns if name not in key)
        return other

    def chunks(self, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Yield frames of at most `CURVES_PER_CHUNK` rows; DesignError where the points have changed."""
        absent = [name for name in columns if name not in self.columns]
        if absent:
            raise DesignError(f"{self.where}: the table has no column {', '.join(map(repr, absent))}")
        asked = dict.fromkeys(raw for name in columns for raw in self.held.get(name, [name]))
        for frame in self.table.chunks(list(asked)):
            parts: dict[str, Any] = {
                name: pd.Series(self._read(name, frame), index=frame.index)
                if name in self.held
                else frame[name]
                for name in columns
            }
            yield pd.DataFrame(parts, index=frame.index, copy=False)

    def _read(self, name: str, frame: pd.DataFrame) -> CurveArray:
        told = self.curves.get(name)
        at = f"{self.where}, curve '{name}'"
        curve = self.declared[name]
        if told is not None and self._none(name, frame):
            width = len(told.grid)
            at_none = np.zeros((len(frame), 0)) if told.own else None
            return CurveArray(
                np.full((len(frame), width), np.nan), told.grid, told.domain, told.declared, at_none
            )
        found = checked(at, read_columns(at, frame, self.held[name], curve))
        if told is None or (told.own and found.own) or np.array_equal(told.grid, found.grid):
            return found
        if told.own:
            points = np.tile(found.grid, (len(frame), 1))
            return CurveArray(found.values, told.grid, found.domain, found.declared, points)
        raise DesignError(f"{at}: its points are others than when the table was opened. Open it again")

    def _none(self, name: str, frame: pd.DataFrame) -> bool:
        """Whether a chunk has no curve."""
        return all(frame[raw].isna().all() for raw in self.held[name] if raw != self.declared[name].at)

    def _look(self) -> dict[str, CurveArray]:
        """Go through all curves once."""
        found: dict[str, CurveArray] = {}
        gaps: dict[str, bool] = {}
        for frame in self.table.chunks([raw for columns in self.held.values() for raw in columns]):
            for name, raws in self.held.items():
                if raws and self._none(name, frame):
                    continue
                one = self._read(name, frame)
                first = found.setdefault(name, one[:0])
                if not first.own and not np.array_equal(first.grid, one.grid):
                    if self.declared[name].at is None:
                        raise PartitionError(
                            f"{self.where}, curve '{name}': arrays in its cells are not of one length. Name "
                            "the column with their points by Curve(..., at=...)"
                        )
                    found[name] = CurveArray(
                        np.zeros((0, 0)), np.zeros(0), one.domain, one.declared, np.zeros((0, 0))
                    )
                gaps[name] = gaps.get(name, False) or one.gaps
        lacking = [name for name in self.held if name not in found]
        if lacking:
            raise PartitionError(f"{self.where}, curve '{lacking[0]}': there is no curve in any row")
        return {name: one.told(gaps[name]) for name, one in found.items()}
