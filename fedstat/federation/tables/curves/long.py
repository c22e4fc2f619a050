"""Curves in a table of their own, with one row for each value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import narwhals as nw
import numpy as np
import pandas as pd

from fedstat.errors import PartitionError
from fedstat.federation.tables.curves.array import Curve, CurveArray, check_domain
from fedstat.federation.tables.curves.cells import Cells, own_points


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
        Of the points, such as ``"h"``, for labels.
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
    points, values = (Cells(numbers[column][here][order], lengths) for column in (curve.at, curve.value))
    declared = Curve(name, domain=curve.domain, unit=curve.unit, at=curve.at, max_gap=curve.max_gap)
    return own_points(where, values, points, declared)


def _frame(where: str, table: Any) -> pd.DataFrame:
    if isinstance(table, str | Path):
        path = Path(table)
        readers: dict[str, Any] = {".csv": pd.read_csv, ".parquet": pd.read_parquet}
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
