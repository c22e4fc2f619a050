"""Derivatives of design rows by a variable: the chain rule through all terms that contain it.

Rows of a design are functions of the columns of a table. The derivative of a row by one column is taken
through every term: of ``x + I(x ** 2) + x:z`` by x it is ``(1, 2 x, z)``. The functions here take a function
that codes rows, so they hold for any formula, and for a caller's table as well as for synthetic values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from fedstat.typing import Floats

CodeRows: TypeAlias = Callable[[pd.DataFrame], Floats]
"""Codes a table (m, ...) as rows of a design, (m, p)."""
STEP = float(np.finfo(float).eps) ** (1.0 / 3.0)
"""Relative step of central differences."""
IN_SPAN = 1e-6
"""Size of a residual, relative to the derivative, below which it is rounding."""


def derivative_rows(code: CodeRows, table: pd.DataFrame, variable: str) -> Floats:
    """Return the derivatives of design rows by a numeric variable, (m, p), by central differences.

    Parameters
    ----------
    code : callable
    table : DataFrame
        Values of all columns that the design reads, at which derivatives are taken.
    variable : str

    Returns
    -------
    (m, p) array
    """
    x = table[variable].to_numpy(dtype=np.float64)
    step = STEP * np.maximum(np.abs(x), 1.0)
    above, below = x + step, x - step
    upper, lower = (code(table.assign(**{variable: values})) for values in (above, below))
    return np.asarray((upper - lower) / (above - below)[:, None])


def difference_rows(code: CodeRows, table: pd.DataFrame, variable: str, low: Any, high: Any) -> Floats:
    """Return the differences of design rows between two values of a variable, (m, p)."""
    upper, lower = (code(table.assign(**{variable: value})) for value in (high, low))
    return np.asarray(upper - lower)


@dataclass(frozen=True, slots=True, eq=False)
class Direction:
    """How design rows change with a variable, as a function of the rows.

    The change of a row x (p,) is ``(1, x) @ A`` with `A` (p + 1, p). So averages of changes, weighted in any
    way, follow from averages of rows with the same weights. `A` is None where changes are no such function:
    that of ``log(x)`` is ``1 / x``. `plain` is the only column of the design that changes, one for one, or
    None.
    """

    name: str
    A: Floats | None
    plain: int | None = None


def direction_of(name: str, X: Floats, D: Floats) -> Direction:
    """Find the direction of a variable from design rows X and their changes D, (m, p) each.

    The rows need to be many more than columns, and at values that no formula favors.
    """
    changed = np.flatnonzero(np.abs(D).max(axis=0) > IN_SPAN)
    if len(changed) == 1 and np.allclose(D[:, changed[0]], 1.0, rtol=0.0, atol=IN_SPAN):
        A = np.zeros((X.shape[1] + 1, X.shape[1]))
        A[0, changed[0]] = 1.0
        return Direction(name, A, int(changed[0]))
    Z = np.column_stack([np.ones(len(X)), X])
    size = np.maximum(np.abs(Z).max(axis=0), 1e-300)
    A = np.linalg.lstsq(Z / size, D, rcond=1e-12)[0] / size[:, None]
    rest = np.abs(D - Z @ A).max(axis=0)
    if (rest > IN_SPAN * np.maximum(np.abs(D).max(axis=0), 1.0)).any():
        return Direction(name, None)
    A[np.abs(A) * size[:, None] < IN_SPAN * np.maximum(np.abs(D).max(axis=0), IN_SPAN)] = 0.0
    return Direction(name, A)
