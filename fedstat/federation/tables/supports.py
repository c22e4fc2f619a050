"""Supports of columns: the rows in which a column, or a level of a factor, is not zero.

A sum of products of two columns is over the rows that are in a support of both. How many supports a column
has follows from its term alone, so that their number reveals nothing about the rows:

* A column, or the columns of one factor, that take as many values as a factor of so many columns: the rows of
  each value, that of the reference level included. Coding does not matter: sums of products with one coding
  give those with any other.
* The columns of a term of several factors: the rows of each combination of the levels of those that have
  few, in which no number is zero.
* Any other column with zeros: the rows in which it is not zero.

Supports that are left over are empty. A column without zeros has none: products with it are over the rows of
the other column, which that column's site judges by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from fedstat.typing import Array, Bools, Floats, Ints

PER_COLUMN = 2
"""Supports of each column of a term of one factor; for each further factor there are twice as many."""
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


def supports_of_columns(
    X: Floats,
    names: Sequence[str],
    terms: Sequence[str],
    factors: Mapping[str, Sequence[Array | None]] | None = None,
) -> Supports:
    """Return the supports of the columns of a design, (rows, p), where nan is a value that a row lacks.

    Parameters
    ----------
    X : (rows, p) array
        In the units of the data, as they were before they were centered or moved.
    names, terms : sequences of str, (p,)
        Columns, and the term of each; columns of a term are neighbors.
    factors : mapping of str to sequence of (rows, d) arrays, optional
        Of terms of several factors the values that each factor is computed from, None where they are not
        known.
    """
    parts, labels = [np.zeros((len(X), 0), dtype=np.uint8)], []
    for term, places in groupby(range(X.shape[1]), lambda j: terms[j]):
        own = list(places)
        values = (factors or {}).get(term, (None,))
        each = PER_COLUMN ** len(values)
        out = np.zeros((len(X), each * len(own)), dtype=np.uint8)
        by_level = len(values) > 1 and _fill_cells(out, X[:, own], values)
        if not by_level:
            by_level = _fill_columns(out, X[:, own], each)
        parts.append(out)
        columns = [names[j] for j in own for _ in range(each)]
        labels += _level_names(out, X[:, own], columns, term) if by_level and len(own) > 1 else columns
    return Supports(np.hstack(parts), labels)


def _level_names(out: Array, X: Floats, columns: Sequence[str], term: str) -> list[str]:
    """Name supports of levels by the columns that are not zero there; levels are in the order of the rows."""
    each, found = out.shape[1] // X.shape[1], []
    for name, support in zip(columns, out.T, strict=True):
        there = np.flatnonzero(X[int(support.argmax())]).tolist() if support.any() else []
        if not support.any() or len(there) > 1:
            found.append(name)
        else:
            found.append(columns[there[0] * each] if there else f"{term}, reference level")
    return found


def _fill_columns(out: Array, X: Floats, each: int) -> bool:
    """Enter the levels of the columns of one term, (rows, q), or the rows in which each is not zero.

    Return whether these are levels.
    """
    held: Bools = np.logical_not(np.isnan(X).any(axis=1))
    level = _levels(X[held], X.shape[1] + 1)
    if level is not None:
        out[held, level] = 1
        return True
    inside: Bools = (X != 0.0) & ~np.isnan(X)
    some = ~inside.all(axis=0, where=held[:, None])
    out[:, ::each] = inside & some
    return False


def _fill_cells(out: Array, X: Floats, factors: Sequence[Array | None]) -> bool:
    """Enter the combinations of levels of the factors of a term; False where they are not known or many."""
    held = np.flatnonzero(~np.isnan(X).any(axis=1))
    cell, inside = np.zeros(len(held), dtype=np.int64), np.ones(len(held), dtype=np.bool_)
    for values in factors:
        if values is None:
            return False
        level = _levels(values[held], X.shape[1] + 1)
        if level is None:
            inside &= (values[held] != 0.0).all(axis=1)
        else:
            cell = (level.max(initial=0) + 1) * cell + level
    number = np.unique(cell[inside], return_inverse=True)[1].reshape(-1)
    if number.max(initial=0) >= out.shape[1]:
        return False
    out[held[inside], number] = 1
    return True


def _levels(rows: Floats, most: int) -> Ints | None:
    """Return the number of each row among the different ones; None where there are more than `most`."""
    # Level by level rather than sorted: most columns are no factors, and the others have few levels.
    for part in (rows[:FEW], rows):
        level = np.full(len(part), -1)
        for number in range(most):
            first = int(np.argmin(level)) if len(level) else 0
            if not len(level) or level[first] >= 0:
                break
            level[(part == part[first]).all(axis=1)] = number
        if level.min(initial=0) < 0:
            return None
    return level
