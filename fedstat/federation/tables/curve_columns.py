"""Columns of curves: declared in wide tables, read from long tables, and streamed in chunks."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import narwhals as nw
import numpy as np
import pandas as pd

from fedstat.errors import DesignError, PartitionError, Remedy
from fedstat.federation.tables.curves import Curve, CurveArray, check_domain, is_curve
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Curves as arrays in cells, or in rows of a long table, each on its own points.


@dataclass(frozen=True, slots=True, eq=False)
class CurveCells:
    """Arrays of n cells one after the other, (N,), and the length of each, (n,); 0 of a missing one."""

    values: Floats
    lengths: Ints

    @classmethod
    def of(cls, where: str, column: pd.Series[Any]) -> CurveCells:
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
    def _of_arrow(cls, column: pd.Series[Any]) -> CurveCells:
        import pyarrow as pa  # noqa: PLC0415

        held = pa.array(column)
        parts = held.chunks if isinstance(held, pa.ChunkedArray) else [held]
        lengths = [part.value_lengths().fill_null(0).to_numpy(zero_copy_only=False) for part in parts]
        values = [part.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False) for part in parts]
        return cls(np.concatenate([np.zeros(0), *values]), np.concatenate([np.zeros(0, np.int64), *lengths]))

    @classmethod
    def _of_cells(cls, column: pd.Series[Any]) -> CurveCells:
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

    def kept(self, which: Bools) -> CurveCells:
        """Keep some of the values alone."""
        return CurveCells(self.values[which], np.bincount(self.rows[which], minlength=len(self.lengths)))

    def padded(self) -> Floats:
        """One row for each cell, NaN behind its end: (n, m)."""
        width = int(self.lengths.max(initial=0))
        if width and (self.lengths == width).all():
            return self.values.reshape(-1, width)
        out = np.full((len(self.lengths), width), np.nan)
        rows = self.rows
        out[rows, np.arange(len(rows)) - (np.cumsum(self.lengths) - self.lengths)[rows]] = self.values
        return out


POINTS = Remedy("Curve(..., at=at)", "Name the column with their points in Curve(..., at=...)")


def common_arrays(where: str, cells: CurveCells) -> Floats:
    """Stack arrays of one length, (n, m)."""
    found = np.unique(cells.lengths[cells.lengths > 0])
    if len(found) != 1:
        raise PartitionError(
            f"{where}: expected arrays of one length in its cells, found {len(found)}",
            remedy=POINTS,
        )
    return cells.padded()


def own_points(where: str, values: CurveCells, points: CurveCells, curve: Curve) -> CurveArray:
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


def _point_problems(points: CurveCells, low: float, high: float) -> Iterator[str]:
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


# ----------------------------------------------------------------------------------------------------
# Curves in a table of their own, with one row for each value.


@dataclass(frozen=True, slots=True, eq=False)
class LongCurve:
    """A curve in a long table, which has one row for each value.

    Parameters
    ----------
    table : pandas, polars or pyarrow table, or path
        The long table, or for an owner's source the path of its CSV or Parquet file; its rows are in any
        order. Rows of entities that are not in the table of entities are not used.
    entity : str
        Column that says of which entity a value is; the table of entities has it as well.
    at, value : str
        Columns with points and values.
    domain : (float, float)
        First and last point that a curve may have.
    unit : str
        Unit of the points, such as ``"h"``, for labels.
    max_gap : float, optional
        As of :class:`Curve`.

    Examples
    --------
    >>> import pandas as pd, fedstat as fs
    >>> long = pd.DataFrame({"id": [1, 1, 2, 2], "hour": [0, 12, 3, 20], "beats": [70, 90, 60, 80]})
    >>> fs.LongCurve(long, entity="id", at="hour", value="beats", domain=(0, 24)).domain
    (0, 24)
    """

    table: Any
    entity: str
    at: str
    value: str
    domain: tuple[float, float]
    unit: str = ""
    max_gap: float | None = None

    def __post_init__(self) -> None:
        check_domain("LongCurve", self.domain, self.max_gap)


def read_long(where: str, name: str, curve: LongCurve, frame: pd.DataFrame) -> CurveArray:
    """Take the curves of the entities of a table, in its order."""
    long = _frame(where, curve.table)
    absent = [column for column in (curve.entity, curve.at, curve.value) if column not in long.columns]
    if absent or curve.entity not in frame.columns:
        lacks = f"its long table has no column '{absent[0]}'" if absent else "its table has no such column"
        raise PartitionError(
            f"{where}: {lacks}; entity='{curve.entity}' is in both, at='{curve.at}' and "
            f"value='{curve.value}' in the long one"
        )
    entities = pd.Index(frame[curve.entity])
    if entities.hasnans or not entities.is_unique:
        raise PartitionError(
            f"{where}: column '{curve.entity}' names an entity twice, or none, in the table of entities"
        )
    row = entities.get_indexer(pd.Index(long[curve.entity]))
    if len(long) and (row < 0).all():
        raise PartitionError(
            f"{where}: no entity of its long table is in column '{curve.entity}' of the table of "
            "entities. Check that both are of one type"
        )
    numbers = {column: _numbers(where, long[column]) for column in (curve.at, curve.value)}
    here = row >= 0
    order = np.lexsort((numbers[curve.at][here], row[here]))
    lengths = np.bincount(row[here], minlength=len(frame))
    points, values = (CurveCells(numbers[column][here][order], lengths) for column in (curve.at, curve.value))
    declared = Curve(name, domain=curve.domain, unit=curve.unit, at=curve.at, max_gap=curve.max_gap)
    return own_points(where, values, points, declared)


def _frame(where: str, table: Any) -> pd.DataFrame:
    if isinstance(table, str | Path):
        path = Path(table)
        read_csv = partial(pd.read_csv, float_precision="round_trip")
        readers: dict[str, Any] = {".csv": read_csv, ".parquet": pd.read_parquet}
        if path.suffix not in readers or not path.is_file():
            raise PartitionError(f"{where}: expected its long table in a file .csv or .parquet, found none")
        return pd.DataFrame(readers[path.suffix](path))
    if not isinstance(table, pd.DataFrame):
        return pd.DataFrame(nw.from_native(table, eager_only=True).to_pandas())
    return table


def _numbers(where: str, column: pd.Series[Any]) -> Any:
    if not pd.api.types.is_numeric_dtype(column.dtype):
        raise PartitionError(f"{where}: column '{column.name}' of its long table holds no numbers")
    return column.to_numpy(dtype=np.float64, na_value=np.nan)


# ----------------------------------------------------------------------------------------------------
# Columns of a table that are declared to hold curves.

NUMBERS = re.compile(r"[-+]?\d+(?:\.\d+)?")


AnyCurve: TypeAlias = Curve | LongCurve


def with_curves(
    where: str, frame: pd.DataFrame, curves: Mapping[str, AnyCurve], keep: Sequence[str] = ()
) -> pd.DataFrame:
    """Replace the columns of declared curves by the curves; a PartitionError lists their problems.

    A column that already holds curves is unchanged, and so is a column of entities in `keep`.
    """
    curves = {
        name: curve
        for name, curve in curves.items()
        if name not in frame.columns or not is_curve(frame[name])
    }
    if not curves:
        return frame
    used: dict[str, str] = {}
    made: dict[str, CurveArray] = {}
    entities: set[str] = set()
    for name, curve in curves.items():
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
        raise PartitionError(f"curve '{other[0]}': expected fs.Curve(...), the same for all sites")
    return found


def columns_of(curve: Curve, columns: Iterable[Hashable]) -> list[str]:
    """Columns of a table that a curve takes: those of its values, then that of their points."""
    names = [name for name in columns if isinstance(name, str)]
    found = [name for name in names if _stands_for(curve.columns, name)]
    return found + [name for name in names if name == curve.at]


def split_curve_columns(
    tables: Mapping[str, pd.DataFrame], curves: Mapping[str, AnyCurve]
) -> dict[str, pd.DataFrame]:
    """Replace the columns of declared curves by the curves; each curve must be at one site."""
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
                f"{' and '.join(map(repr, holders)) or 'no site'}, and a curve is at one"
            )
        own[holders[0]][name] = curve
    return {site: with_curves(f"site {site!r}", table, own[site]) for site, table in tables.items()}


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
        cells, points = (CurveCells.of(where, frame[name]) for name in (values[0], curve.at))
        return own_points(where, cells, points, curve)
    if "*" in curve.columns:
        wrong = [name for name in values if not pd.api.types.is_numeric_dtype(frame[name].dtype)]
        if wrong:
            raise PartitionError(f"{where}: column '{wrong[0]}' holds no numbers")
        table = frame[values].to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        table = common_arrays(where, CurveCells.of(where, frame[values[0]]))
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
            f"{where}: the numbers in the names of its columns do not ascend",
            remedy=Remedy("Curve(..., grid=grid)", "Order the columns, or give {arguments}"),
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
    """Return curves, by site and name, with different domains or units at the sites."""
    for name in dict.fromkeys(name for curves in held.values() for name in curves):
        found = {site: curves[name] for site, curves in held.items() if name in curves}
        first, *others = found
        for other in others:
            a, b = found[first], found[other]
            if a.domain != b.domain or a.unit != b.unit:
                yield (
                    f"curve '{name}' has domain {a.domain} {a.unit} at {first!r} and {b.domain} {b.unit} at "
                    f"{other!r}. Declare the common domain=... and unit=..."
                )


# ----------------------------------------------------------------------------------------------------
# A streamed table with curves instead of their columns: a chunk of curves at a time.

CURVES_PER_CHUNK = 4096


class ChunkedRows(Protocol):
    """Rows that come in chunks of a length."""

    rows_per_chunk: int
    n_rows: int
    columns: tuple[str, ...]

    def chunks(self, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Go through the rows."""
        ...


class CurveTable:
    """A streamed table with declared curves; `curves` are empty and only describe their points.

    All rows are read once when it is opened, so that errors in curves are raised then.
    """

    def __init__(self, where: str, table: ChunkedRows, curves: Mapping[str, AnyCurve]) -> None:
        self.where, self.table = where, copy(table)
        self.table.rows_per_chunk = min(table.rows_per_chunk, CURVES_PER_CHUNK)
        self.declared: dict[str, Curve] = {}
        self.held: dict[str, list[str]] = {}
        for name, curve in curves.items():
            if isinstance(curve, LongCurve):
                raise PartitionError(
                    f"{where}, curve '{name}': a long table can be read with tables in memory, but this one "
                    "is streamed. Arrays in its cells can be streamed",
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
        request = dict.fromkeys(raw for name in columns for raw in self.held.get(name, [name]))
        for frame in self.table.chunks(list(request)):
            parts: dict[str, Any] = {
                name: pd.Series(self._read(name, frame), index=frame.index)
                if name in self.held
                else frame[name]
                for name in columns
            }
            yield pd.DataFrame(parts, index=frame.index, copy=False)

    def _read(self, name: str, frame: pd.DataFrame) -> CurveArray:
        reported = self.curves.get(name)
        at = f"{self.where}, curve '{name}'"
        curve = self.declared[name]
        if reported is not None and self._none(name, frame):
            width = len(reported.grid)
            at_none = np.zeros((len(frame), 0)) if reported.own else None
            return CurveArray(
                np.full((len(frame), width), np.nan),
                reported.grid,
                reported.domain,
                reported.declared,
                at_none,
            )
        found = checked(at, read_columns(at, frame, self.held[name], curve))
        if reported is None or (reported.own and found.own) or np.array_equal(reported.grid, found.grid):
            return found
        if reported.own:
            points = np.tile(found.grid, (len(frame), 1))
            return CurveArray(found.values, reported.grid, found.domain, found.declared, points)
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
                            f"{self.where}, curve '{name}': arrays in its cells are not of one length",
                            remedy=POINTS,
                        )
                    found[name] = CurveArray(
                        np.zeros((0, 0)), np.zeros(0), one.domain, one.declared, np.zeros((0, 0))
                    )
                gaps[name] = gaps.get(name, False) or one.gaps
        lacking = [name for name in self.held if name not in found]
        if lacking:
            raise PartitionError(f"{self.where}, curve '{lacking[0]}': there is no curve in any row")
        return {name: one.reported(gaps[name]) for name, one in found.items()}
