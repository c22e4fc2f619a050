"""Curves of entities: values on points of a domain, one curve in a cell of a table.

Sites agree on domain and unit of a curve, not on its points: each site integrates on its own points. In a
table a curve is given by wide columns, one for each point, by one array per cell, or by rows of a long table.
At a site it is one column of curves, on common points or on points of each curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
from pandas.api.extensions import ExtensionArray, ExtensionDtype

from fedstat.errors import PartitionError, Remedy
from fedstat.typing import Bools, Floats, Ints

LARGEST_GAP = 0.1
"""Share of the domain within which a predictor may be unknown at a stretch, unless it is declared."""
ROUNDING = 1e-9
SHOWN = 40
"""Points of a domain at which effects of curves with points of their own are shown."""


@dataclass(frozen=True, slots=True)
class Curve:
    """How a table stores a curve, and the sites' agreement about it.

    Parameters
    ----------
    columns : str
        Wide columns by a pattern with one star, such as ``"ecg_*"``, in the order of the table; or the name
        of one column with an array in every cell.
    grid : sequence of float, optional
        The points, ascending. By default the values of the star in the names if these are numbers, moved into
        the domain, or otherwise equidistant points of the domain.
    domain : (float, float), optional
        First and last point that a curve may have; by default those of the grid.
    unit : str
        Unit of the points, such as ``"h"``, for labels.
    at : str, optional
        A second column, with the points of every cell's own array, ascending; it needs a domain.
    max_gap : float, optional
        Longest stretch, as a share of the domain, within which a curve may be unknown, its ends included; a
        curve with a longer one counts as missing, and with 0 every curve that was not measured at all points.
        By default a tenth where a curve is integrated, and any where it is the response. If the sites hold
        different columns, or if too few curves of a response lack points, these points are interpolated
        in stretches of at most `max_gap`, by default a tenth.

    Examples
    --------
    >>> import fedstat as fs
    >>> fs.Curve("ecg_*", domain=(0, 24), unit="h").domain
    (0, 24)
    >>> fs.Curve("ecg", at="ecg_t", domain=(0, 24)).at
    'ecg_t'
    """

    columns: str
    grid: tuple[float, ...] | None = None
    domain: tuple[float, float] | None = None
    unit: str = ""
    at: str | None = None
    max_gap: float | None = None

    def __post_init__(self) -> None:
        if self.grid is not None:
            object.__setattr__(self, "grid", tuple(float(x) for x in self.grid))
            if len(self.grid) < 2 or np.any(np.diff(self.grid) <= 0.0):
                raise PartitionError("Curve: expected a grid of two points or more that ascend")
        check_domain("Curve", self.domain, self.max_gap)
        if self.at is not None and ("*" in self.columns or self.grid is not None or self.domain is None):
            raise PartitionError(
                "Curve: at=... names the points of arrays in the cells of one column",
                remedy=Remedy(
                    "Curve({column!r}, at={at!r}, domain=(0.0, 1.0))",
                    "give that column and its first and last point, and no grid, as in {call}",
                ).filled(column=self.columns.rstrip("*_"), at=self.at),
            )


def check_domain(where: str, domain: tuple[float, float] | None, max_gap: float | None) -> None:
    """Require a domain that ascends, and a gap that is a share of it."""
    if domain is not None and not (len(domain) == 2 and domain[0] < domain[1]):
        raise PartitionError(f"{where}: expected a domain (first, last) with first < last")
    if max_gap is not None and not 0.0 <= max_gap <= 1.0:
        raise PartitionError(f"{where}: expected max_gap as a share of the domain, received {max_gap!r}")


@dataclass(frozen=True, slots=True)
class CurveShape:
    """The public description of a site's curve: points, form in the table, and whether some have gaps.

    There are no points if every curve has its own.
    """

    grid: tuple[float, ...]
    declared: Curve
    gaps: bool = False

    def check(self) -> None:
        """Require two points or more that ascend, or none, and a domain."""
        if len(self.grid) == 1 or np.any(np.diff(self.grid) <= 0.0) or self.declared.domain is None:
            raise PartitionError("a curve has two points or more that ascend, and a domain")

    def empty(self) -> CurveArray:
        """Make a column of no such curves."""
        domain = self.declared.domain or (self.grid[0], self.grid[-1])
        at = None if self.grid else np.zeros((0, 0))
        return CurveArray(
            np.zeros((0, len(self.grid))), np.array(self.grid), domain, self.declared, at, self.gaps
        )


class CurveDtype(ExtensionDtype):
    """Type of a column of curves."""

    type = np.ndarray
    name = "curve"
    na_value = None

    @classmethod
    def construct_array_type(cls) -> Any:
        """Name the array."""
        return CurveArray


class CurveArray(ExtensionArray):
    """A column of curves: values (n, m), NaN where a point was not measured.

    On common points `grid` (m,), or each on its own, `at` (n, m), in their order and NaN behind the last; the
    grid is then empty. A curve without a value is a missing cell. `declared` is how a table of other entities
    holds such curves.
    """

    def __init__(
        self,
        values: Floats,
        grid: Floats,
        domain: tuple[float, float],
        declared: Curve,
        at: Floats | None = None,
        gaps_reported: bool = False,
    ) -> None:
        self.values, self.grid, self.domain, self.declared = values, grid, domain, declared
        self.at, self._gaps_reported = at, gaps_reported

    @classmethod
    def _from_sequence(cls, scalars: Sequence[Any], *, dtype: Any = None, copy: bool = False) -> Self:
        raise TypeError("curves are made by fs.Curve")

    @classmethod
    def _concat_same_type(cls, to_concat: Sequence[Self]) -> Self:
        first = to_concat[0]
        if len({part.own for part in to_concat}) > 1 or any(
            not np.array_equal(part.grid, first.grid) for part in to_concat
        ):
            raise TypeError("curves on different points cannot be put in one column")
        values = stacked([part.values for part in to_concat])
        at = stacked([part.at for part in to_concat if part.at is not None]) if first.own else None
        return first._like(values, at)

    def _like(self, values: Floats, at: Floats | None) -> Self:
        return type(self)(values, self.grid, self.domain, self.declared, at, self._gaps_reported)

    def reported(self, gaps: bool) -> Self:
        """Return the same curves as of a column in which some have gaps, or none has."""
        return type(self)(self.values, self.grid, self.domain, self.declared, self.at, gaps)

    @property
    def dtype(self) -> CurveDtype:
        """Type of the column."""
        return CurveDtype()

    @property
    def nbytes(self) -> int:
        """Bytes of the values, and of points of their own."""
        return self.values.nbytes + (0 if self.at is None else self.at.nbytes)

    @property
    def unit(self) -> str:
        """Unit of the points."""
        return self.declared.unit

    @property
    def own(self) -> bool:
        """Whether every curve has points of its own."""
        return self.at is not None

    @property
    def shown(self) -> Floats:
        """Points at which effects along the curve are shown."""
        return np.linspace(*self.domain, SHOWN) if self.own else self.grid

    @property
    def seen(self) -> Bools:
        """Points that were measured, (n, m)."""
        return ~np.isnan(self.values)

    @property
    def uneven(self) -> Bools:
        """Curves, (n,), that were not measured at all common points; all that have points of their own."""
        return np.ones(len(self), dtype=bool) if self.own else np.asarray(~self.seen.all(axis=1))

    @property
    def gaps(self) -> bool:
        """Whether curves that count, by their `max_gap`, were measured at different points."""
        return self.own or self._gaps_reported or bool((self.uneven & ~self.isna() & ~self.gappy(1.0)).any())

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, int | np.integer):
            return self.values[item]
        rows = pd.api.indexers.check_array_indexer(self, item)
        return self._like(self.values[rows], None if self.at is None else self.at[rows])

    def isna(self) -> Bools:
        """Curves without a value, (n,)."""
        return np.asarray(np.isnan(self.values).all(axis=1))

    def gappy(self, largest: float = LARGEST_GAP) -> Bools:
        """Return the curves, (n,), with an unknown stretch longer than `max_gap`, or else `largest`.

        With common points a step counts as known. A curve with one point is checked for gaps.
        """
        largest = largest if self.declared.max_gap is None else self.declared.max_gap
        out = np.zeros(len(self), dtype=bool)
        if largest >= 1.0:
            return out
        rows = np.flatnonzero(self.uneven)
        seen = self.seen[rows]
        if largest == 0.0 and not self.own:
            out[rows] = True
            return out
        low, high = self.domain
        points = self.at[rows] if self.at is not None else np.broadcast_to(self.grid, seen.shape)
        ends = np.full(len(rows), low), np.full(len(rows), high)
        places = np.column_stack([ends[0], np.where(seen, points, np.nan), ends[1]])
        last = np.fmax.accumulate(places, axis=1)
        stretch = np.fmax.reduce(places[:, 1:] - last[:, :-1], axis=1)
        step = 0.0 if self.own else float(np.diff(self.grid).max())
        width = (largest + ROUNDING) * (high - low) + step * (1.0 + ROUNDING)
        out[rows] = (stretch > width) | (seen.sum(axis=1) < 2)
        return out

    def filled(self) -> Self:
        """Replace missing points in short gaps by linear interpolation, at the ends by the nearest value.

        A gap is short if its stretch is at most `max_gap`, or else a tenth of the domain. Other curves, and
        curves with points of their own, stay as they are.
        """
        rows = np.flatnonzero(self.uneven & ~self.isna() & ~self.gappy())
        if self.own or not len(rows):
            return self
        values = self.values.copy()
        for row in rows:
            seen = ~np.isnan(values[row])
            values[row] = np.interp(self.grid, self.grid[seen], values[row, seen])
        return self._like(values, None)

    def flat(self) -> tuple[Floats, Floats, Ints]:
        """All points that were measured, and their values, (N,), and of how many rows each has, (n,)."""
        seen = self.seen
        points = self.at if self.at is not None else np.broadcast_to(self.grid, seen.shape)
        return points[seen], self.values[seen], np.asarray(seen.sum(axis=1), dtype=np.int64)

    def take(self, indices: Any, *, allow_fill: bool = False, fill_value: Any = None) -> Self:
        """Take curves by place, -1 for a missing one where `allow_fill`."""
        places: Ints = np.asarray(indices, dtype=np.int64)
        lost = (places < 0) if allow_fill else np.zeros(len(places), dtype=bool)

        def taken(table: Floats) -> Floats:
            rows = table[places] if len(table) else np.full((len(places), table.shape[1]), np.nan)
            return np.where(lost[:, None], np.nan, rows) if lost.any() else rows

        return self._like(taken(self.values), None if self.at is None else taken(self.at))

    def copy(self) -> Self:
        """Copy the values."""
        return self._like(self.values.copy(), None if self.at is None else self.at.copy())

    @property
    def shape_reported(self) -> CurveShape:
        """Points and declaration."""
        return CurveShape(tuple(self.grid.tolist()), self.declared, self.gaps)

    def drawn(
        self, n: int, random: np.random.Generator, draw: Callable[[Floats], Floats] = np.asarray
    ) -> Self:
        """Draw n curves of the same points, or of their own; `draw` takes normal values to others."""
        if not self.own:
            return self._like(draw(random.normal(size=(n, len(self.grid)))), None)
        at = np.sort(random.uniform(*self.domain, size=(n, SHOWN)), axis=1)
        return self._like(draw(random.normal(size=at.shape)), at)

    def _hash_pandas_object(self, **options: Any) -> Any:
        """Hash every curve by its values and points, so that a row is known again."""
        if self.at is None:
            return pd.util.hash_pandas_object(pd.DataFrame(self.values), index=False).to_numpy()
        points, values, lengths = self.flat()
        rows = np.split(np.column_stack([points, values]), np.cumsum(lengths)[:-1])
        return pd.util.hash_array(np.array([row.tobytes().hex() for row in rows], dtype=object))

    def _formatter(self, boxed: bool = False) -> Any:
        return lambda curve: f"curve of {int((~np.isnan(curve)).sum())} points"


def stacked(parts: Sequence[Floats]) -> Floats:
    """Tables of rows one below the other, NaN behind the ends of shorter rows."""
    width = max(part.shape[1] for part in parts)
    padded = [np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=np.nan) for p in parts]
    return np.concatenate(padded)


def is_curve(series: pd.Series[Any]) -> bool:
    """Whether a column holds curves."""
    return isinstance(series.dtype, CurveDtype)


def curves_of(series: pd.Series[Any]) -> CurveArray:
    """Curves of a column."""
    array = series.array
    if not isinstance(array, CurveArray):
        raise PartitionError(
            f"column {series.name!r} holds no curves, which a partition declares by its argument curves"
        )
    return array


def measured_differently(held: Sequence[CurveArray]) -> bool:
    """Whether curves of several sites were measured at different points, at sites or within."""
    return any(one.gaps or not same_grid(one.grid, held[0].grid) for one in held)


def same_grid(a: Floats, b: Floats) -> bool:
    """Whether points are the same but for rounding."""
    return len(a) == len(b) and (not len(a) or bool(np.abs(a - b).max() <= ROUNDING * np.ptp(a)))


def all_points(grids: Sequence[Floats]) -> Floats:
    """Points of several grids, each once, in order."""
    points = np.unique(np.concatenate(grids))
    return points[np.diff(points, prepend=-np.inf) > ROUNDING * np.ptp(points)]
