"""Curves of entities: values on points of a domain, one curve in a cell of a table.

Institutions agree on domain and unit of a curve, not on the points at which they measured: each integrates on
its own. In a table a curve stands in wide columns, one for each point, or as one array per cell; at a site
it is one column of curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
from pandas.api.extensions import ExtensionArray, ExtensionDtype

from fedstat.errors import PartitionError
from fedstat.typing import Bools, Floats, Ints

LARGEST_GAP = 0.1
"""Share of the domain within which a predictor may be unknown at a stretch."""


@dataclass(frozen=True, slots=True)
class Curve:
    """How a table holds a curve, and what the institutions agree on about it.

    Parameters
    ----------
    columns : str
        Wide columns by a pattern with one star, such as ``"ecg_*"``, in the order of the table; or the name
        of one column with an array of the same length in every cell.
    grid : sequence of float, optional
        The points, ascending. By default those that the star stands for where these are numbers, moved onto
        the domain, or else equidistant points of the domain.
    domain : (float, float), optional
        First and last point that a curve may have; by default those of the grid.
    unit : str
        Of the points, such as ``"h"``, for labels.

    Examples
    --------
    >>> import fedstat as fs
    >>> fs.Curve("ecg_*", domain=(0, 24), unit="h").domain
    (0, 24)
    """

    columns: str
    grid: tuple[float, ...] | None = None
    domain: tuple[float, float] | None = None
    unit: str = ""

    def __post_init__(self) -> None:
        if self.grid is not None:
            object.__setattr__(self, "grid", tuple(float(x) for x in self.grid))
            if len(self.grid) < 2 or np.any(np.diff(self.grid) <= 0.0):
                raise PartitionError("Curve: expected a grid of two points or more that ascend")
        if self.domain is not None and not (len(self.domain) == 2 and self.domain[0] < self.domain[1]):
            raise PartitionError("Curve: expected a domain (first, last) with first < last")


@dataclass(frozen=True, slots=True)
class CurveShape:
    """What everybody may know of a site's curve: its points, and how a table holds it."""

    grid: tuple[float, ...]
    declared: Curve

    def check(self) -> None:
        """Require two points or more that ascend, and a domain."""
        if len(self.grid) < 2 or np.any(np.diff(self.grid) <= 0.0) or self.declared.domain is None:
            raise PartitionError("a curve has two points or more that ascend, and a domain")

    def empty(self) -> CurveArray:
        """Make a column of no such curves."""
        grid, ends = np.array(self.grid), self.declared.domain or (self.grid[0], self.grid[-1])
        return CurveArray(np.zeros((0, len(grid))), grid, ends, self.declared)


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
    """A column of curves: values (n, m) on common points (m,), NaN where a point was not measured.

    A curve without a value is a missing cell. `declared` is how a table of other entities holds such curves.
    """

    def __init__(self, values: Floats, grid: Floats, domain: tuple[float, float], declared: Curve) -> None:
        self.values, self.grid, self.domain, self.declared = values, grid, domain, declared

    @classmethod
    def _from_sequence(cls, scalars: Sequence[Any], *, dtype: Any = None, copy: bool = False) -> Self:
        raise TypeError("curves are made by fs.Curve")

    @classmethod
    def _concat_same_type(cls, to_concat: Sequence[Self]) -> Self:
        first = to_concat[0]
        return first._like(np.concatenate([part.values for part in to_concat]))

    def _like(self, values: Floats) -> Self:
        return type(self)(values, self.grid, self.domain, self.declared)

    @property
    def dtype(self) -> CurveDtype:
        """Type of the column."""
        return CurveDtype()

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.values.nbytes

    @property
    def unit(self) -> str:
        """Unit of the points."""
        return self.declared.unit

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, int | np.integer):
            return self.values[item]
        return self._like(self.values[pd.api.indexers.check_array_indexer(self, item)])

    def isna(self) -> Bools:
        """Curves without a value, (n,)."""
        return np.asarray(np.isnan(self.values).all(axis=1))

    def gappy(self, largest: float = LARGEST_GAP) -> Bools:
        """Curves, (n,), of which too long a stretch is unknown to integrate them."""
        seen = ~np.isnan(self.values)
        out = np.zeros(len(seen), dtype=bool)
        width = largest * (self.domain[1] - self.domain[0]) + 1.5 * float(np.diff(self.grid).max())
        for i in np.flatnonzero(~seen.all(axis=1)):
            at = self.grid[seen[i]]
            places = np.r_[self.grid[0], at, self.grid[-1]]
            out[i] = len(at) < 2 or float(np.diff(places).max()) > width
        return out

    def take(self, indices: Any, *, allow_fill: bool = False, fill_value: Any = None) -> Self:
        """Take curves by place, -1 for a missing one where `allow_fill`."""
        places: Ints = np.asarray(indices, dtype=np.int64)
        values = self.values[places] if len(self.values) else np.full((len(places), len(self.grid)), np.nan)
        if allow_fill and (places < 0).any():
            values = np.where((places < 0)[:, None], np.nan, values)
        return self._like(values)

    def copy(self) -> Self:
        """Copy the values."""
        return self._like(self.values.copy())

    @property
    def shape_told(self) -> CurveShape:
        """Points and declaration."""
        return CurveShape(tuple(self.grid.tolist()), self.declared)

    def drawn(self, n: int, random: np.random.Generator) -> Self:
        """Draw n curves of the same points."""
        return self._like(random.normal(size=(n, len(self.grid))))

    def _hash_pandas_object(self, **options: Any) -> Any:
        """Hash every curve by its values, so that a row is known again."""
        return pd.util.hash_pandas_object(pd.DataFrame(self.values), index=False).to_numpy()

    def _formatter(self, boxed: bool = False) -> Any:
        return lambda curve: f"curve of {len(curve)} points"


def is_curve(series: pd.Series[Any]) -> bool:
    """Whether a column holds curves."""
    return isinstance(series.dtype, CurveDtype)


def curves_of(series: pd.Series[Any]) -> CurveArray:
    """Curves of a column."""
    array = series.array
    if not isinstance(array, CurveArray):
        raise PartitionError(f"column {series.name!r} holds no curves; declare them by curves=... ")
    return array
