"""Missing cells of a site's table that the site has drawn itself, for multiple imputation.

Drawn values stay at the site, in its process. A request names a table by a random token, which only the
analyst of the imputation knows, and the number of the chain. With `without`, a column is left as it is, so
that the rows that lack it are incomplete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from fedstat.errors import MessageError
from fedstat.typing import Ints

MOST_IMPUTATIONS = 4
"""Imputations that a site keeps; the oldest is forgotten first."""


@dataclass(frozen=True, slots=True)
class ImputedTable:
    """One completed table: its imputation, chain and number of draws, and the column that it leaves out."""

    token: str
    chain: int
    draws: int
    without: str = ""


@dataclass(slots=True, eq=False)
class ImputedCells:
    """Drawn cells of all chains: by column its kind, the rows (k,), and the values of each chain (k,)."""

    n_rows: int
    chains: int
    kinds: dict[str, str]
    rows: dict[str, Ints]
    values: dict[str, list[Any]] = field(default_factory=dict)
    draws: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the imputation."""
        return tuple(self.kinds)

    def fill(self, frame: pd.DataFrame, table: ImputedTable) -> pd.DataFrame:
        """Return a table with the drawn cells of one chain."""
        filled = frame.copy()
        for name, rows in self.rows.items():
            if name in filled and name != table.without and len(rows):
                column = filled[name].to_numpy(dtype=object, copy=True)
                column[rows] = self.values[name][table.chain]
                # A column of numbers stays one; categories are recognized by their texts.
                numbers = self.kinds[name] in ("number", "binary") if self.kinds[name] else False
                dtype = np.float64 if numbers else object
                filled[name] = pd.Series(column, filled.index).astype(dtype)
        return filled


def imputed_cells(held: dict[str, ImputedCells], site: str, table: ImputedTable, n_rows: int) -> ImputedCells:
    """Return the cells that a request names; a MessageError where the site has forgotten them."""
    cells = held.get(table.token)
    if cells is None or cells.n_rows != n_rows or cells.draws != table.draws:
        raise MessageError(
            f"{site}: does not hold these imputed values (a site keeps the latest {MOST_IMPUTATIONS} "
            "imputations, as long as it runs); impute again"
        )
    return cells
