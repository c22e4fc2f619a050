"""Columns of a table that are declared to hold curves."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeAlias

import numpy as np
import pandas as pd

from fedstat.errors import PartitionError
from fedstat.federation.tables.curves.array import Curve, CurveArray, is_curve
from fedstat.federation.tables.curves.cells import Cells, common_arrays, own_points
from fedstat.federation.tables.curves.long import LongCurve, read_long
from fedstat.typing import Floats

NUMBERS = re.compile(r"[-+]?\d+(?:\.\d+)?")


AnyCurve: TypeAlias = Curve | LongCurve


def with_curves(
    where: str, frame: pd.DataFrame, curves: Mapping[str, AnyCurve], keep: Sequence[str] = ()
) -> pd.DataFrame:
    """Put declared curves in the place of their columns; a PartitionError lists what is wrong with them.

    A column that holds curves already stays as it is, and so does a column of entities in `keep`.
    """
    used: dict[str, str] = {}
    made: dict[str, CurveArray] = {}
    entities: set[str] = set()
    for name, curve in curves.items():
        if name in frame.columns and is_curve(frame[name]):
            continue
        at = f"{where}, curve '{name}'"
        if isinstance(curve, LongCurve):
            made[name] = checked(at, read_long(at, name, curve, frame))
            entities.add(curve.entity)
            continue
        found = columns_of(curve, frame.columns)
        again = [column for column in found if column in used]
        if again:
            raise PartitionError(
                f"{where}: column '{again[0]}' is of curve '{used[again[0]]}' and of '{name}'"
            )
        used |= dict.fromkeys(found, name)
        made[name] = checked(at, read_columns(at, frame, found, curve))
    rest = frame.drop(columns=[*used, *(entities - {*keep, *used})])
    twice = [name for name in made if name in rest.columns]
    if twice:
        raise PartitionError(f"{where}: '{twice[0]}' is a curve and a column of the table; rename one")
    return pd.concat(
        [rest, pd.DataFrame({n: pd.Series(a, index=rest.index) for n, a in made.items()})], axis=1
    )


def same_everywhere(curves: Mapping[str, object]) -> dict[str, AnyCurve]:
    """Require declarations that are not by site."""
    found = {name: one for name, one in curves.items() if isinstance(one, Curve | LongCurve)}
    other = [name for name in curves if name not in found]
    if other:
        raise PartitionError(f"curve '{other[0]}': expected fs.Curve(...), the same for all institutions")
    return found


def columns_of(curve: Curve, columns: Iterable[Hashable]) -> list[str]:
    """Columns of a table that a curve takes: those of its values, then that of their points."""
    names = [name for name in columns if isinstance(name, str)]
    found = [name for name in names if _stands_for(curve.columns, name)]
    return found + [name for name in names if name == curve.at]


def apart_with_curves(
    tables: Mapping[str, pd.DataFrame], curves: Mapping[str, AnyCurve]
) -> dict[str, pd.DataFrame]:
    """Put declared curves in the place of their columns where each is at one institution."""
    own: dict[str, dict[str, AnyCurve]] = {site: {} for site in tables}
    for name, curve in curves.items():
        if isinstance(curve, LongCurve):
            raise PartitionError(f"curve '{name}': long tables of curves need the horizontal layout")
        holders = [
            site
            for site, table in tables.items()
            if any(_stands_for(curve.columns, column) for column in table.columns)
        ]
        if len(holders) != 1:
            raise PartitionError(
                f"curve '{name}': columns that fit '{curve.columns}' are at "
                f"{' and '.join(map(repr, holders)) or 'no institution'}, and a curve is at one"
            )
        own[holders[0]][name] = curve
    return {
        site: with_curves(f"institution {site!r}", table, own[site]) if own[site] else table
        for site, table in tables.items()
    }


def _stands_for(pattern: str, column: object) -> bool:
    return isinstance(column, str) and (fnmatchcase(column, pattern) if "*" in pattern else column == pattern)


def read_columns(where: str, frame: pd.DataFrame, found: Sequence[str], curve: Curve) -> CurveArray:
    """Read a curve from its columns."""
    values = [name for name in found if name != curve.at]
    if not values:
        raise PartitionError(f"{where}: no column of the table fits '{curve.columns}'")
    if curve.at is not None:
        if curve.at not in found:
            raise PartitionError(f"{where}: the table has no column '{curve.at}' with its points")
        cells, points = (Cells.of(where, frame[name]) for name in (values[0], curve.at))
        return own_points(where, cells, points, curve)
    if "*" in curve.columns:
        wrong = [name for name in values if not pd.api.types.is_numeric_dtype(frame[name].dtype)]
        if wrong:
            raise PartitionError(f"{where}: column '{wrong[0]}' holds no numbers")
        table = frame[values].to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        table = common_arrays(where, Cells.of(where, frame[values[0]]))
    grid, domain = _points(where, values, table.shape[1], curve)
    return CurveArray(np.ascontiguousarray(table), grid, domain, replace(curve, domain=domain))


def checked(where: str, curves: CurveArray) -> CurveArray:
    """Refuse infinite values."""
    infinite = int(np.isinf(curves.values).sum())
    if infinite:
        raise PartitionError(f"{where}: {infinite:,} values are infinite. Make them missing or finite")
    return curves


def _points(where: str, found: Sequence[str], m: int, curve: Curve) -> tuple[Floats, tuple[float, float]]:
    """Points of a curve and its domain."""
    grid = _from_names(found, curve) if curve.grid is None else np.array(curve.grid)
    if grid is not None and np.any(np.diff(grid) <= 0.0):
        raise PartitionError(
            f"{where}: the numbers in the names of its columns do not ascend. Order the columns, or give "
            "grid=..."
        )
    if grid is None:
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
        raise PartitionError(
            f"{where}: has points outside its domain {low:g} to {high:g}. Give the domain that all sites have"
        )
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
