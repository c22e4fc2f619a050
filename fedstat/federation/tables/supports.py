"""Supports of columns: the rows in which a column, or a level of a factor, is not zero.

A sum of products of two columns is over the rows that are in a support of both. Each column of a design has
two supports, so that their number reveals nothing about the column:

* A column, or the columns of one term, that take as many values as a factor of so many columns: the rows of
  each value, that of the reference level included.
* Any other column with zeros: the rows in which it is not zero.

Supports that are left over are empty. A column without zeros has none: products with it are over the rows of
the other column, which that column's site judges by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from fedstat.typing import Array, Floats, Ints

PER_COLUMN = 2
"""Supports of each column."""
FEW = 1000
"""Rows after which most columns have shown that they are no factor."""


@dataclass(frozen=True, slots=True, eq=False)
class Supports:
    """Supports as columns of zeros and ones, (rows, s), and the names of the columns that they are of."""

    columns: Array
    names: Sequence[str]

    def at(self, rows: Ints, n: int) -> Supports:
        """Place the rows at these positions among n, outside which all supports are empty."""
        placed = np.zeros((n, self.columns.shape[1]), dtype=np.uint8)
        placed[rows] = self.columns
        return Supports(placed, self.names)


def supports_of_columns(X: Floats, names: Sequence[str], terms: Sequence[str]) -> Supports:
    """Return the supports of the columns of a design, (rows, p), where nan is a value that a row lacks.

    Parameters
    ----------
    X : (rows, p) array
        In the units of the data, as they were before they were centred or moved.
    names, terms : sequences of str, (p,)
        Columns, and the term of each; columns of a term are neighbors.
    """
    out = np.zeros((len(X), PER_COLUMN * X.shape[1]), dtype=np.uint8)
    for _, places in groupby(range(X.shape[1]), lambda j: terms[j]):
        own = list(places)
        part, first = X[:, own], PER_COLUMN * own[0]
        held = ~np.isnan(part).any(axis=1)
        level = _levels(part[held], len(own) + 1) if held.any() else None
        if level is not None:
            out[held, first + level] = 1
            continue
        with np.errstate(invalid="ignore"):
            inside = (part != 0.0) & ~np.isnan(part)
        some = ~inside.all(axis=0, where=held[:, None])
        out[:, first : first + PER_COLUMN * len(own) : PER_COLUMN] = inside & some
    return Supports(out, [name for name in names for _ in range(PER_COLUMN)])


def _levels(rows: Floats, most: int) -> Ints | None:
    """Return the number of each row among the different ones; None where there are more than `most`."""
    # Level by level rather than sorted: most columns are no factors, and the others have few levels.
    for part in (rows[:FEW], rows):
        level = np.full(len(part), -1)
        for number in range(most):
            first = int(np.argmin(level))
            if level[first] >= 0:
                break
            level[(part == part[first]).all(axis=1)] = number
        if level.min() < 0:
            return None
    return level
