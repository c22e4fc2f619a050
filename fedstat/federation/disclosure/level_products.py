"""Products of columns of few values, and whether other sites have rows behind them.

Sums with weights of many values must not belong to few rows. A combination of products of columns that is
zero in all but one row of a site is such a sum if it is zero in all rows of the other sites as well. With
masks, no one knows a site's part where other sites have rows behind the same combination. So each site
reports to the others, in sealed messages, which combinations of products are nonzero in enough of its rows.
It reports them as a linear space: a combination that is not orthogonal to it is nonzero in that many rows.
Most often the space has all products of levels that occur together. With a row of this site, as many rows of
two others are enough: for a minimum of three rows, one row of each.

Sites with the same columns form the products in the same order: of the constant and all columns of few
values, each with itself and with the later ones. They report columns of up to a hundred values, since a
column may have fewer at another site.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.disclosure.weight_spaces import (
    FEW_VALUES,
    MOST_PRODUCTS,
    ROUNDED,
    Expressions,
    Pattern,
    Polynomial,
    WeightSpaces,
    cells_of,
    find_isolated,
    pattern_of_few_values,
)
from fedstat.typing import Floats, Ints

SEALING = "sum_columns"
"""Step that seals what a site reports for the other sites."""
REPORTED_VALUES = 100
"""Most values of a column that a site reports."""
MOST_CELLS = 8192
"""Combinations of values that a site reports; of more, a part is as good."""
MOST_TRIALS = 6
"""Divisions of rows that are tried for a larger space."""
SAME_SPACE, SAME_SPAN, ZERO = 1e-9, 1e-10, 1e-6
"""Tolerances: of directions that several spaces have, of eigenvalues, and of entries of single precision."""
SHORTEST, LONGEST = 512, 2**24
"""Bytes of a message; its length is a power of two, and says little about its content."""
LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class LevelSpace:
    """What one site reports of its rows.

    Parameters
    ----------
    opening : str
        Digest of the request by which all sites opened their rows.
    least : int
        Rows, of different persons, in which a combination is nonzero unless it is orthogonal to `basis`.
    places : tuple of int
        Columns of few values, by their places in the design. The constant is 0.
    pairs : (m,) array of int
        Products of two of these that are nonzero in some row.
    basis : (r, m) array
    """

    opening: str
    least: int
    places: tuple[int, ...]
    pairs: Ints
    basis: Floats

    def to_bytes(self) -> bytes:
        """Write the space, padded to a power of two."""
        head = json.dumps(
            {
                "opening": self.opening,
                "least": self.least,
                "places": self.places,
                "pairs": self.pairs.tolist(),
                "rank": len(self.basis),
            }
        ).encode()
        packed = zlib.compress(head + b"\0" + self.basis.astype("<f4").tobytes(), 1)
        size = max(SHORTEST, 1 << (len(packed) + LENGTH.size - 1).bit_length())
        return (LENGTH.pack(len(packed)) + packed).ljust(size, b"\0")

    @classmethod
    def from_bytes(cls, message: bytes, where: str) -> LevelSpace:
        """Read a space that another site has sent; a MessageError if it is none."""
        try:
            (size,) = LENGTH.unpack_from(message)
            head, _, rest = (
                zlib.decompressobj().decompress(message[LENGTH.size :][:size], LONGEST).partition(b"\0")
            )
            found = json.loads(head)
            places = tuple(int(one) for one in found["places"])
            pairs = np.array(found["pairs"], dtype=np.int64)
            basis = np.frombuffer(rest, dtype="<f4").astype(np.float64)
            basis = basis.reshape(int(found["rank"]), len(pairs))
            space = cls(str(found["opening"]), int(found["least"]), places, pairs, basis)
        except (ValueError, KeyError, TypeError, struct.error, zlib.error) as error:
            raise MessageError(f"{where}: not a space of products of levels") from error
        within = len(pairs) == 0 or (pairs.min() >= 0 and pairs.max() < count_pairs(len(places)))
        if not within or not np.isfinite(basis).all():
            raise MessageError(f"{where}: a space of products of levels with other sizes")
        return space

    def of_products(self, places: Sequence[int]) -> Floats | None:
        """Return the basis for the products of fewer columns, (r, d); None if the space lacks one."""
        if not set(places) <= set(self.places):
            return None
        at = np.array([self.places.index(one) for one in places])
        i, j = np.triu_indices(len(places))
        every = np.zeros((len(self.basis), count_pairs(len(self.places))))
        every[:, self.pairs] = self.basis
        return every[:, _place_of(at[i], at[j], len(self.places))]


def _place_of(i: Ints, j: Ints, f: int) -> Ints:
    """Return the places of products of f columns with each other; they ascend in both."""
    low, high = np.minimum(i, j), np.maximum(i, j)
    return np.asarray(low * f - low * (low - 1) // 2 + high - low)


def reported_rows(least: int) -> int:
    """Return how many persons have a reported combination: with two sites, and one more, the minimum."""
    return max(-(-(least - 1) // 2), 1)


def count_pairs(f: int) -> int:
    """Return the number of products of two of f columns, squares included."""
    return f * (f + 1) // 2


@dataclass(frozen=True, eq=False)
class OwnLevels:
    """Columns of few values of the rows that a site has opened.

    Parameters
    ----------
    places : tuple of int
        Their places in the design; the first is 0, the constant.
    values : (C, f) array
        Values of every cell of rows.
    cell : (n,) array of int
        Cell of every row.
    person : (n,) array of int, optional
        Whose rows they are, if several may belong to one person.
    """

    places: tuple[int, ...]
    values: Floats
    cell: Ints
    person: Ints | None = None

    @classmethod
    def of(cls, columns: Iterable[tuple[int, Floats]], n: int, person: Ints | None = None) -> OwnLevels:
        """Find the columns that a site reports among those at some places of a design, (n,) each."""
        patterns = ((place, pattern_of_few_values(x, REPORTED_VALUES)) for place, x in columns)
        found = {place: one for place, one in patterns if one is not None}
        first, cell = cells_of([*found.values()], n)
        by_column = [one.values[one.codes[first]] for one in found.values()]
        values = np.column_stack([np.ones(len(first)), *by_column])
        whole = np.rint(values)  # after a change of units and back
        close = np.abs(values - whole) <= ROUNDED * np.abs(whole)
        return cls((0, *found), np.where(close, whole, values), cell.astype(np.int32), person)

    def only(self, rows: Ints) -> OwnLevels:
        """Return the columns in some of the rows."""
        cells, cell = np.unique(self.cell[rows], return_inverse=True)
        person = None if self.person is None else self.person[rows]
        return replace(self, values=self.values[cells], cell=cell.ravel(), person=person)

    def examined(self) -> OwnLevels:
        """Return the columns of few values."""
        patterns = [Pattern.of(x) for x in self.values.T]
        few = [j for j, one in enumerate(patterns) if len(one.values) <= FEW_VALUES]
        if len(few) == len(patterns):
            return self
        first, merged = cells_of([patterns[j] for j in few], len(self.values))
        places, values = tuple(self.places[j] for j in few), self.values[first][:, few]
        return OwnLevels(places, values, merged[self.cell], self.person)

    @cached_property
    def pairs(self) -> Ints:
        """Products of two columns, (m, 2), that are nonzero in some row; squares included."""
        there = np.array(self.values != 0.0, dtype=np.float32)
        return np.argwhere(np.triu(there.T @ there > 0.0))

    @cached_property
    def products(self) -> Floats:
        """Products of every two columns in every cell, (C, d)."""
        i, j = np.triu_indices(len(self.places))
        return self.values[:, i] * self.values[:, j]

    def single_out(self, least: int) -> bool:
        """Return whether a combination of the products belongs to fewer persons."""
        rows = self._enough_rows(least)
        made = Expressions(WeightSpaces(len(rows)))
        columns = [made.pattern(x) for x in self.values[self.cell[rows]].T]
        sums = [made.product(columns[i], columns[j]) for i, j in self.pairs.tolist()]
        return self._isolate(made, sums, rows, least)

    def space(self, least: int, opening: str) -> LevelSpace:
        """Return combinations that are nonzero in rows of at least `least` persons.

        Cells of as many persons count. All other rows are divided into `least` groups, by person: what is in
        the span of each group is nonzero in each of them.
        """
        if len(self.pairs) > MOST_PRODUCTS:
            return LevelSpace(opening, least, (0,), np.zeros(0, dtype=np.int64), np.zeros((0, 0)))
        P = self.values[:, self.pairs[:, 0]] * self.values[:, self.pairs[:, 1]]
        size = np.abs(P).max(axis=0, initial=0.0)
        P = P / size
        first = self._enough_rows(least)
        common = np.bincount(self.cell[first], minlength=len(P)) >= least
        rare = first[~common[self.cell[first]]]
        whole = _span(P[common][:: max(1, -(-int(common.sum()) // MOST_CELLS))])
        if len(rare):
            persons = rare if self.person is None else self.person[rare]
            whole = _largest_space(P, whole, self.cell[rare], persons, least)
        pairs = _place_of(self.pairs[:, 0], self.pairs[:, 1], len(self.places))
        return LevelSpace(opening, least, self.places, pairs, _echelon(whole) * size)

    def are_covered(self, others: Sequence[LevelSpace], least: int) -> bool:
        """Return whether no combination belongs to few persons here and to none at two other sites.

        One other site may collude with the coordinator; then the sum of the others is known.
        """
        spaces = [
            one
            for other in others
            if other.least >= reported_rows(least) and (one := other.of_products(self.places)) is not None
        ]
        if len(spaces) < 2:
            return False
        size = np.abs(self.products).max(axis=0)
        size[size == 0.0] = 1.0
        P, rows = self.products / size, self._enough_rows(least)
        # Not made longer: of directions in other columns, rounding alone may be left.
        grams = [one.T @ one for one in (space / size for space in spaces)]
        total = np.sum(grams, axis=0)
        for one in grams:
            weights = P @ _outside(total - one)
            weights[np.abs(weights) < ZERO] = 0.0
            made = Expressions(WeightSpaces(len(rows)))
            sums = [made.pattern(x) for x in weights[self.cell[rows]].T]
            if self._isolate(made, sums, rows, least):
                return False
        return True

    def _enough_rows(self, least: int) -> Ints:
        """Return rows of as many persons of each cell, by cell: more do not matter."""
        rows = np.arange(len(self.cell))
        if self.person is not None:
            key = self.cell.astype(np.int64) * (int(self.person.max(initial=0)) + 1) + self.person
            rows = np.unique(key, return_index=True)[1]
        found, cell = [], self.cell[rows]
        for _ in range(least):
            first = np.full(len(self.values), -1)
            first[cell[::-1]] = np.arange(len(cell))[::-1]
            found.append(rows[first[first >= 0]])
            left = np.ones(len(cell), dtype=np.bool_)
            left[first[first >= 0]] = False
            rows, cell = rows[left], cell[left]
        every = np.concatenate(found)
        return every[np.argsort(self.cell[every], kind="stable")]

    def _isolate(self, made: Expressions, sums: Sequence[Polynomial], rows: Ints, least: int) -> bool:
        persons = None if self.person is None else self.person[rows]
        return bool(find_isolated(made.result().with_sums(sums), 0, least - 1, persons))


def _largest_space(P: Floats, common: Floats, cells: Ints, persons: Ints, least: int) -> Floats:
    """Return a basis of directions that rows of at least as many persons span.

    `common` are directions that are known to be such; `cells` and `persons`, (k,) each, are the other rows.
    """
    who = np.unique(persons, return_inverse=True)[1].ravel()
    step = max(1, -(-len(cells) // MOST_CELLS))
    most = len(_span(np.concatenate([common, P[np.unique(cells[::step])]])))
    best, rng = common, np.random.default_rng(len(cells))
    for trial in range(MOST_TRIALS):
        if len(best) == most:
            break
        # First by person as they come, since rows are sorted by cell: equal ones get into different groups.
        order = np.arange(who.max() + 1) if not trial else rng.permutation(who.max() + 1)
        group = (order % least)[who]
        parts = [
            _span(np.concatenate([common, P[np.unique(cells[group == k][::step])]])) for k in range(least)
        ]
        values, vectors = np.linalg.eigh(np.sum([one.T @ one for one in parts], axis=0) / least)
        # A combination that is not orthogonal to a sum of spaces is not orthogonal to one of them.
        best = _span(np.concatenate([best, vectors[:, values > 1.0 - SAME_SPACE].T]))
    return best


def _span(rows: Floats) -> Floats:
    """Return an orthonormal basis of the span of rows, (r, d)."""
    if not len(rows):
        return rows
    values, vectors = np.linalg.eigh(rows.T @ rows)
    return vectors[:, values > SAME_SPAN * max(float(values[-1]), 1.0)].T


def _outside(gram: Floats) -> Floats:
    """Return an orthonormal basis of what is orthogonal to a space, (d, r), by its cross-products."""
    values, vectors = np.linalg.eigh(gram)
    return vectors[:, values <= SAME_SPACE * max(float(values[-1]), 1.0)]


def _echelon(basis: Floats) -> Floats:
    """Return a basis of the same space in reduced echelon form: mostly zeros and ones for levels."""
    rows, at = basis.copy(), 0
    for k in range(len(rows)):
        while at < rows.shape[1]:
            lead = k + int(np.abs(rows[k:, at]).argmax())
            if abs(rows[lead, at]) > ZERO:
                break
            rows[k:, at] = 0.0
            at += 1
        else:
            return rows[:k]
        rows[[k, lead]] = rows[[lead, k]]
        rows[k] /= rows[k, at]
        other = np.arange(len(rows)) != k
        rows[other] -= np.outer(rows[other, at], rows[k])
        at += 1
    rows[np.abs(rows) < ZERO] = 0.0
    return rows
