"""Columns of a table that are declared to hold curves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pandas as pd

from fedstat.errors import PartitionError
from fedstat.federation.tables.curves.array import Curve, CurveArray
from fedstat.typing import Floats

NUMBERS = re.compile(r"[-+]?\d+(?:\.\d+)?")


def with_curves(where: str, frame: pd.DataFrame, curves: Mapping[str, Curve]) -> pd.DataFrame:
    """Put declared curves in the place of their columns; a PartitionError lists what is wrong with them."""
    used: dict[str, str] = {}
    made: dict[str, CurveArray] = {}
    for name, curve in curves.items():
        found = [column for column in frame.columns if _stands_for(curve.columns, column)]
        again = [column for column in found if column in used]
        if again:
            raise PartitionError(
                f"{where}: column '{again[0]}' is of curve '{used[again[0]]}' and of '{name}'"
            )
        used |= dict.fromkeys(found, name)
        made[name] = _read(f"{where}, curve '{name}'", frame, found, curve)
    rest = frame.drop(columns=list(used))
    twice = [name for name in made if name in rest.columns]
    if twice:
        raise PartitionError(f"{where}: '{twice[0]}' is a curve and a column of the table; rename one")
    return pd.concat(
        [rest, pd.DataFrame({n: pd.Series(a, index=rest.index) for n, a in made.items()})], axis=1
    )


def apart_with_curves(
    tables: Mapping[str, pd.DataFrame], curves: Mapping[str, Curve]
) -> dict[str, pd.DataFrame]:
    """Put declared curves in the place of their columns where each is at one institution."""
    own: dict[str, dict[str, Curve]] = {site: {} for site in tables}
    for name, curve in curves.items():
        holders = [
            site
            for site, table in tables.items()
            if any(_stands_for(curve.columns, column) for column in table.columns)
        ]
        if len(holders) != 1:
            raise PartitionError(
                f"curve '{name}': columns that fit '{curve.columns}' are at "
                f"{' and '.join(map(repr, holders)) or 'no client'}, and a curve is at one"
            )
        own[holders[0]][name] = curve
    return {
        site: with_curves(f"client {site!r}", table, own[site]) if own[site] else table
        for site, table in tables.items()
    }


def _stands_for(pattern: str, column: object) -> bool:
    return isinstance(column, str) and (fnmatchcase(column, pattern) if "*" in pattern else column == pattern)


def _read(where: str, frame: pd.DataFrame, found: Sequence[str], curve: Curve) -> CurveArray:
    if not found:
        raise PartitionError(f"{where}: no column of the table fits '{curve.columns}'")
    if "*" in curve.columns:
        wrong = [name for name in found if not pd.api.types.is_numeric_dtype(frame[name].dtype)]
        if wrong:
            raise PartitionError(f"{where}: column '{wrong[0]}' holds no numbers")
        values = frame[list(found)].to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        values = _cells(where, frame[found[0]])
    if np.isinf(values).any():
        raise PartitionError(f"{where}: {int(np.isinf(values).sum()):,} values are infinite")
    grid, domain = _points(where, found, values.shape[1], curve)
    return CurveArray(np.ascontiguousarray(values), grid, domain, replace(curve, domain=domain))


def _cells(where: str, column: pd.Series[Any]) -> Floats:
    """Stack arrays that stand in cells; a missing cell is a curve without a value."""
    present = column.notna().to_numpy(dtype=bool)
    try:
        cells = [np.asarray(cell, dtype=np.float64).ravel() for cell in column[present]]
    except (TypeError, ValueError):
        raise PartitionError(f"{where}: expected arrays of numbers in its cells") from None
    lengths = {len(cell) for cell in cells}
    if len(lengths) != 1:
        raise PartitionError(f"{where}: expected arrays of one length in its cells, found {len(lengths)}")
    values = np.full((len(column), *lengths), np.nan)
    values[present] = cells
    return values


def _points(where: str, found: Sequence[str], m: int, curve: Curve) -> tuple[Floats, tuple[float, float]]:
    """Points of a curve and its domain."""
    grid = _from_names(found, curve) if curve.grid is None else np.array(curve.grid)
    if grid is None or np.any(np.diff(grid) <= 0.0):
        low, high = curve.domain or (1.0, float(m))
        grid = np.linspace(low, high, m)
    elif curve.grid is None and curve.domain is not None:
        low, high = curve.domain
        # Numbers beyond the domain count the columns, and are places of it.
        if grid[0] < low or grid[-1] > high:
            grid = low + (grid - grid[0]) / (grid[-1] - grid[0]) * (high - low)
    if len(grid) != m or m < 2:
        raise PartitionError(
            f"{where}: has {m:,} points, and its grid {len(grid):,}; a curve has two or more"
        )
    low, high = curve.domain or (float(grid[0]), float(grid[-1]))
    if grid[0] < low or grid[-1] > high:
        raise PartitionError(f"{where}: has points outside its domain {low:g} to {high:g}")
    return grid, (float(low), float(high))


def _from_names(found: Sequence[str], curve: Curve) -> Floats | None:
    if "*" not in curve.columns:
        return None
    head, tail = curve.columns.split("*", 1)
    parts = [name[len(head) : len(name) - len(tail)] for name in found]
    return np.array([float(part) for part in parts]) if all(map(NUMBERS.fullmatch, parts)) else None


def curve_problems(held: Mapping[str, Mapping[str, CurveArray]]) -> Iterator[str]:
    """Curves, by site and name, on which institutions do not agree: domain or unit."""
    for name in dict.fromkeys(name for curves in held.values() for name in curves):
        found = {site: curves[name] for site, curves in held.items() if name in curves}
        first, *others = found
        for other in others:
            a, b = found[first], found[other]
            if a.domain != b.domain or a.unit != b.unit:
                yield (
                    f"curve '{name}' has domain {a.domain} {a.unit} at {first!r} and {b.domain} {b.unit} at "
                    f"{other!r}. Give domain=... and unit=... of what all measured"
                )
