"""Curves from objects of other packages and from the user's own tables (``fs.curves``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from fedstat.errors import PartitionError
from fedstat.federation.tables.curve_columns import AnyCurve, CurveCells, checked, own_points, with_curves
from fedstat.federation.tables.curves import Curve, CurveArray

__all__ = ["from_skfda", "read"]


def read(table: pd.DataFrame, curves: Mapping[str, AnyCurve]) -> pd.DataFrame:
    """Replace the columns of declared curves by the curves, as a partition does with its sites' tables.

    For rows that you hold, such as those to be predicted for, whose table holds curves in another way than
    the sites'.

    Parameters
    ----------
    table : DataFrame
    curves : mapping of str to Curve or LongCurve

    Returns
    -------
    DataFrame
        A column of curves for each.

    Raises
    ------
    PartitionError
        A curve has an error.

    Examples
    --------
    >>> import pandas as pd, fedstat as fs
    >>> long = pd.DataFrame({"id": [1, 1, 2, 2], "hour": [0, 12, 3, 20], "beats": [70, 90, 60, 80]})
    >>> ecg = fs.LongCurve(long, entity="id", at="hour", value="beats", domain=(0, 24))
    >>> list(fs.curves.read(pd.DataFrame({"id": [1, 2], "age": [40, 50]}), {"ecg": ecg}))
    ['age', 'ecg']
    """
    return with_curves("the table", table, curves)


def from_skfda(fd: Any, *, unit: str = "", max_gap: float | None = None) -> CurveArray:
    """Take the curves of a scikit-fda object as a column of a table.

    Such a column needs no declaration in ``curves=``.

    Parameters
    ----------
    fd : skfda.FDataGrid or skfda.FDataIrregular
        Numbers along one argument.
    unit, max_gap
        As of :class:`fedstat.Curve`.

    Returns
    -------
    CurveArray
        ``table["ecg"] = fs.curves.from_skfda(fd)``.

    Raises
    ------
    PartitionError
        Functions of several arguments or with several values.

    Examples
    --------
    >>> import fedstat as fs
    >>> try:
    ...     from skfda import FDataGrid
    ... except ImportError:  # pip install fedstat[skfda]
    ...     curves = None
    ... else:
    ...     curves = fs.curves.from_skfda(FDataGrid([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]], [0, 1, 2]))
    >>> curves is None or len(curves) == 2
    True
    """
    where = "from_skfda"
    if getattr(fd, "dim_domain", 0) != 1 or getattr(fd, "dim_codomain", 0) != 1:
        raise PartitionError(
            f"{where}: expected an FDataGrid or FDataIrregular of one number along one argument, received "
            f"{type(fd).__name__}"
        )
    ends = tuple(float(end) for end in fd.domain_range[0])
    declared = Curve("", domain=(ends[0], ends[1]), unit=unit, max_gap=max_gap)
    if hasattr(fd, "start_indices"):
        lengths = np.diff(np.append(fd.start_indices, len(fd.points)))
        values, points = (
            CurveCells(np.asarray(one, np.float64).ravel(), lengths) for one in (fd.values, fd.points)
        )
        return checked(where, own_points(where, values, points, declared))
    if not hasattr(fd, "grid_points"):
        raise PartitionError(
            f"{where}: expected curves on points, received {type(fd).__name__}, whose to_grid() returns them"
        )
    grid = np.asarray(fd.grid_points[0], dtype=np.float64)
    table = np.ascontiguousarray(fd.data_matrix[..., 0], dtype=np.float64)
    return checked(where, CurveArray(table, grid, (ends[0], ends[1]), declared))
