"""Curves that stand as arrays in cells, or in rows of a long table, each on points of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from fedstat.errors import PartitionError
from fedstat.federation.tables.curves.array import Curve, CurveArray
from fedstat.typing import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Arrays of n cells one after the other, (N,), and the length of each, (n,); 0 of a missing one."""

    values: Floats
    lengths: Ints

    @classmethod
    def of(cls, where: str, column: pd.Series[Any]) -> Cells:
        """Read a column; a PartitionError where its cells hold no arrays of numbers."""
        try:
            return cls._of_arrow(column) if isinstance(column.dtype, pd.ArrowDtype) else cls._of_cells(column)
        except (TypeError, ValueError, NotImplementedError):
            pass
        # Outside of the handler: its own error may quote a value.
        raise PartitionError(
            f"{where}: expected arrays of numbers in the cells of column '{column.name}'. Convert them, or "
            "leave the curve out"
        )

    @classmethod
    def _of_arrow(cls, column: pd.Series[Any]) -> Cells:
        import pyarrow as pa  # noqa: PLC0415

        held = pa.array(column)
        parts = held.chunks if isinstance(held, pa.ChunkedArray) else [held]
        lengths = [part.value_lengths().fill_null(0).to_numpy(zero_copy_only=False) for part in parts]
        values = [part.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False) for part in parts]
        return cls(np.concatenate([np.zeros(0), *values]), np.concatenate([np.zeros(0, np.int64), *lengths]))

    @classmethod
    def _of_cells(cls, column: pd.Series[Any]) -> Cells:
        present = column.notna().to_numpy(dtype=bool)
        cells = [np.asarray(cell, dtype=np.float64) for cell in column[present]]
        if any(cell.ndim != 1 for cell in cells):
            raise TypeError
        lengths = np.zeros(len(column), dtype=np.int64)
        lengths[present] = [len(cell) for cell in cells]
        return cls(np.concatenate([np.zeros(0), *cells]), lengths)

    @property
    def rows(self) -> Ints:
        """Cell of every value, (N,)."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def kept(self, which: Bools) -> Cells:
        """Keep some of the values alone."""
        return Cells(self.values[which], np.bincount(self.rows[which], minlength=len(self.lengths)))

    def padded(self) -> Floats:
        """One row for each cell, NaN behind its end: (n, m)."""
        width = int(self.lengths.max(initial=0))
        if width and (self.lengths == width).all():
            return self.values.reshape(-1, width)
        out = np.full((len(self.lengths), width), np.nan)
        rows = self.rows
        out[rows, np.arange(len(rows)) - (np.cumsum(self.lengths) - self.lengths)[rows]] = self.values
        return out


def common_arrays(where: str, cells: Cells) -> Floats:
    """Stack arrays of one length, (n, m)."""
    found = np.unique(cells.lengths[cells.lengths > 0])
    if len(found) != 1:
        raise PartitionError(
            f"{where}: expected arrays of one length in its cells, found {len(found)}. Name the column with "
            "their points by Curve(..., at=...)"
        )
    return cells.padded()


def own_points(where: str, values: Cells, points: Cells, curve: Curve) -> CurveArray:
    """Curves on points of their own, or on common ones where all have the same."""
    points = points.kept(np.repeat(values.lengths > 0, points.lengths))  # of curves that there are
    if values.lengths.shape != points.lengths.shape or (values.lengths != points.lengths).any():
        wrong = int((values.lengths != points.lengths).sum())
        raise PartitionError(f"{where}: {wrong:,} arrays have not as many values as points in '{curve.at}'")
    low, high = curve.domain or (0.0, 1.0)
    problems = list(_point_problems(points, low, high))
    if problems:
        raise PartitionError(f"{where}: " + "; ".join(problems))
    domain = (float(low), float(high))
    present = points.lengths[points.lengths > 0]
    if len(present) and (present == present[0]).all() and present[0] > 1:
        table = points.values.reshape(len(present), -1)
        if (table == table[0]).all():
            return CurveArray(values.padded(), table[0].copy(), domain, curve)
    measured = ~np.isnan(values.values)
    own = (values.kept(measured).padded(), points.kept(measured).padded())
    return CurveArray(own[0], np.zeros(0), domain, replace(curve, domain=domain), own[1])


def _point_problems(points: Cells, low: float, high: float) -> Iterator[str]:
    """Count arrays with points that are missing, outside the domain, not in order, or twice."""
    t, rows = points.values, points.rows
    later = np.flatnonzero(rows[1:] == rows[:-1]) + 1
    step = t[later] - t[later - 1]
    found = (
        (np.isnan(t), rows, "points that are missing; drop these with their values"),
        (
            (t < low) | (t > high),
            rows,
            f"points outside the domain {low:g} to {high:g}; give the domain that all have, or drop them",
        ),
        (step < 0.0, rows[later], "points that do not ascend; sort every array by its points"),
        (step == 0.0, rows[later], "a point twice; keep one value of each, such as the mean"),
    )
    for wrong, of, what in found:
        if wrong.any():
            yield f"{len(np.unique(of[wrong])):,} of {len(points.lengths):,} curves have {what}"
