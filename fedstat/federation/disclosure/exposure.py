"""Exposure: how much one row contributes to the sums that a site released, by column.

Each released sum of functions of a column x is a sum over rows of f(x). A combination of such sums with
numbers is a sum of the same combination g of the functions. The share of row i in it is
g(x_i)^2 / sum g(x)^2, and its largest value over all combinations is the leverage of the row: the diagonal of
U U', where the columns of U are an orthonormal basis of the functions and a constant. A share of 1 means that
a combination is the value of one row.

The functions follow from the ledger of the site, and the values from its table. Nothing else is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedstat.federation.audit.event_log import SiteLedger
from fedstat.federation.disclosure.small_sites import released_sums
from fedstat.federation.tables.table import Table
from fedstat.typing import Floats

DEPENDENT = 1e-10
"""Singular value, relative to the largest, below which functions depend on each other."""


@dataclass(frozen=True, slots=True)
class ColumnExposure:
    """The largest share of one row in what was released of a column.

    Parameters
    ----------
    column : str
    share : float
        In [0, 1]; nan where the table has no value or no longer the column.
    rows : int
        Rows with a value.
    functions : int
        Functions of the column whose sums were released, and which the share includes.
    omitted : int
        Functions that cannot be computed from their names, such as columns of splines.
    """

    column: str
    share: float
    rows: int
    functions: int
    omitted: int = 0


def exposure(table: Table, site_ledger: SiteLedger) -> list[ColumnExposure]:
    """Compute the exposure of every column that releases of a site rest on, the most exposed first.

    Parameters
    ----------
    table : Table
    site_ledger : SiteLedger
        Names the columns that were used, and the sums of functions of each.
    """
    used = sorted(site_ledger.columns)
    sums = released_sums(site_ledger, used)
    found = [column_exposure(name, _values(table, name), _functions(sums[name])) for name in used]
    return sorted(found, key=lambda one: (-np.nan_to_num(one.share, nan=-1.0), one.column))


def column_exposure(column: str, values: pd.Series, functions: Mapping[str, None]) -> ColumnExposure:
    """Compute the exposure of one column from its values and the names of functions of it."""
    known = values.dropna()
    if not len(known):
        return ColumnExposure(column, float("nan"), 0, 0)
    if not pd.api.types.is_numeric_dtype(known) or pd.api.types.is_bool_dtype(known):
        # The columns of levels are orthogonal: the leverage of a row is one over the rows of its level.
        counts = known.value_counts()
        counts = counts[counts > 0]
        return ColumnExposure(column, 1.0 / float(counts.min()), len(known), len(counts))
    x = known.to_numpy(dtype=float)
    names = functions or {"x^1": None, "x^2": None}  # means and variances at least
    columns = {name: _evaluate(name, x) for name in names}
    usable = [one for one in columns.values() if one is not None]
    return ColumnExposure(
        column, largest_leverage(usable, len(x)), len(x), len(usable), len(names) - len(usable)
    )


def largest_leverage(columns: list[Floats], n: int) -> float:
    """Return the largest leverage of n rows in the span of columns and a constant."""
    centered = [one - one.mean() for one in columns]
    sizes = [float(np.linalg.norm(one)) for one in centered]
    kept = [one / size for one, size in zip(centered, sizes, strict=True) if size > 0.0]
    if not kept:
        return 1.0 / n
    U, s, _ = np.linalg.svd(np.column_stack(kept), full_matrices=False)
    U = U[:, s > DEPENDENT * s[0]]
    return min(1.0, 1.0 / n + float(np.einsum("ij,ij->i", U, U).max()))


def _values(table: Table, column: str) -> pd.Series:
    if column not in table.columns:
        return pd.Series(dtype=float)
    return pd.concat([frame[column] for frame in table.chunks([column])], ignore_index=True)


def _functions(sums: set[str]) -> dict[str, None]:
    """Return the names of functions without the rows and weights of their sums."""
    return dict.fromkeys(sorted(name.rpartition("|")[2] for name in sums))


def _evaluate(name: str, x: Floats) -> Floats | None:
    """Return the values of a function by its name, such as ``x^2*log``; None if it does not define one."""
    out = np.ones(len(x))
    with np.errstate(all="ignore"):
        for part in name.split("*"):
            if part.startswith("x^"):
                out = out * x ** float(part.removeprefix("x^"))
            elif part in ("log", "exp"):
                out = out * (np.log(x) if part == "log" else np.exp(x))
            else:
                return None
    return out if np.isfinite(out).all() else None
