"""Spaces of row weights: no combination of released sums belongs to few rows.

A sum over rows is a weight for each row times a quantity. In the mean of z by group, the quantity is z, and
the weights are the indicators of the groups. An entry of X'X is a quantity (a product of columns of many
values: 1, z, z^2, z u) under weights of few values (products of indicators and of columns of few values). A
count is the quantity 1.

Two sums of different quantities cancel in no way that anybody can know without the values. Sums of one
quantity do: the sum of z over the rows with a = 1 minus that over the rows with a = b = 1 is the sum of z
over the rows with a = 1 and b = 0. So, for every quantity, all weights under which it was summed are kept,
over all requests. No combination of them may be zero in all but a few rows. A request is judged by what it
adds: a combination of earlier sums was released before.

Columns are expressed by *patterns*, which have few values, and *atoms*, which have many. A column that equals
a multiple of an atom except in few rows is a pattern times this atom, plus another atom in the other rows:

    a:z = a z,    c = (1 - s) z + s c',    center(z) = z - m,    I(z**2) = z z.

These are identities. So a combination that is found does belong to few rows, whatever the atoms are.

Rows with the same values of all patterns are one *cell*. Weights are compared by cells, and only cells of few
rows can be singled out.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TypeAlias

import numpy as np

from fedstat.typing import Array, Bools, Floats, Ints

FEW_VALUES = 20
"""Most values of a pattern."""
LARGEST_CODE = 50
"""Largest whole number that is a value of a pattern even if no row repeats it."""
SAMPLE_ROWS = 64
"""Rows in which columns are first compared."""
ROUNDED = 1e-9
"""Relative difference from whole numbers below which the values of a pattern are whole numbers."""
SAME_RATIO = 1e-6
"""Relative difference of equal ratios. Atoms are stored with four bytes per number, which keep 6e-8."""
EXPLAINED = 0.5
"""Least share of the rows of a column that a multiple of an atom must explain."""
SMALLEST, LARGEST = 1e-30, 1e30
"""Sizes of columns beyond which their unit is changed."""
MOST_KEPT = 2**26
"""Values of atoms in a history above which no more atoms are kept."""
MOST_FACTORS = 40
"""Atoms up to which products of two are compared with a new column."""
SCREENED = 8
"""Rows by which most functions of atoms are ruled out."""
FEWEST_OF_A_LINE = 8
"""Rows up to which a column is no linear function of an atom."""
NEW_DIRECTION = 1e-6
"""Length of what earlier weights leave of new ones, relative to them, below which they add nothing."""
NEW_ON_ROWS = 1e-3
"""Length of what allowed combinations leave of one on the same rows, above which it is another one."""
ISOLATED = 1e-4
"""How much less than one the share may be of a combination that a group of rows holds alone."""
DEPENDENT = 1e-14
"""Eigenvalue of cross-products of columns of length one that is zero but for rounding."""
MOST_SHARE = 0.9
"""Share in a combination, times persons, below which a group of rows does not hold it alone."""
MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shifts and factors of SplitMix64 (Steele, Lea and Flood 2014)."""
MOST_PRODUCTS = 1200
"""Products of columns of few values above which counts enter by column, and not by pairs of columns."""
MOST_GROUPS = 400
"""Groups of rows above which their counts do not enter."""
MOST_SEEDS, MOST_PARTNERS = 400, 12

Monomial: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Patterns and atoms that are multiplied, each sorted."""
Polynomial: TypeAlias = Mapping[Monomial, float]
"""A sum of monomials with coefficients."""
ONE: Polynomial = {((), ()): 1.0}


@dataclass(frozen=True, slots=True, eq=False)
class WeightSpaces:
    """Patterns, atoms, and the sums of products of them that were released.

    Parameters
    ----------
    cells : (n_rows,) array of int
        Cell of every row of the table: rows with equal values of all patterns.
    patterns : (C, P) array
        Values of the patterns in every cell.
    atoms : (n_rows, A) array of float32
        Columns of many values; NaN where a value is not known.
    sums : tuple of polynomials
        Each one is summed over all rows.
    """

    cells: Ints
    patterns: Floats
    atoms: Array
    sums: tuple[Polynomial, ...] = ()
    _known: frozenset[frozenset[tuple[Monomial, float]]] = field(default_factory=frozenset)

    @classmethod
    def none(cls, n_rows: int) -> WeightSpaces:
        """Return the spaces before the first sum."""
        cells = np.zeros(n_rows, dtype=np.int64)
        return cls(cells, np.zeros((1, 0)), np.zeros((n_rows, 0), dtype=np.float32))

    @classmethod
    def of_weights(cls, weights: Floats) -> WeightSpaces:
        """Return the spaces after rows were counted with these weights, (n_rows, k)."""
        patterns, cells = np.unique(weights, axis=0, return_inverse=True)
        atoms = np.zeros((len(weights), 0), dtype=np.float32)
        spaces = cls(cells.ravel().astype(np.int64), patterns, atoms)
        return spaces.with_sums({((j,), ()): 1.0} for j in range(weights.shape[1]))

    def with_sums(self, sums: Iterable[Polynomial]) -> WeightSpaces:
        """Return the spaces after further sums; itself if all were there before."""
        new = {frozenset(one.items()): one for one in sums if one}
        added = [key for key in new if key not in self._known]
        if not added:
            return self
        return replace(self, sums=(*self.sums, *(new[key] for key in added)), _known=self._known.union(added))

    def kept(self, before: WeightSpaces) -> WeightSpaces:
        """Return what is remembered of these spaces: no more atoms than before if they are too many."""
        if self.atoms.size <= MOST_KEPT:
            return self
        known = before.atoms.shape[1]
        sums = [one for one in self.sums if all(i < known for _, a in one for i in a)]
        bare = replace(self, atoms=self.atoms[:, :known], sums=(), _known=frozenset())
        return bare.with_sums(sums)

    def carried(self, places: Ints, gone: Ints) -> WeightSpaces:
        """Return the spaces of a table with other rows; see :meth:`ReleasedGroups.carried`.

        New rows are in no sum yet: their patterns are zero.
        """
        patterns = np.vstack([self.patterns, np.zeros((1, self.patterns.shape[1]))])
        here = np.where(places >= 0, self.cells[places] if len(self.cells) else -1, len(self.patterns))
        atoms = np.full((len(places), self.atoms.shape[1]), np.nan, dtype=np.float32)
        atoms[places >= 0] = self.atoms[places[places >= 0]]
        cells = np.concatenate([here, self.cells[gone]])
        return replace(self, cells=cells, patterns=patterns, atoms=np.concatenate([atoms, self.atoms[gone]]))

    def to_arrays(self) -> dict[str, Array]:
        """Return the arrays by name, for a file."""
        if not self.sums:
            return {}
        text = json.dumps([[[*key, value] for key, value in one.items()] for one in self.sums])
        return {
            "weight cells": self.cells.astype(np.int32),
            "weight patterns": self.patterns,
            "weight atoms": self.atoms,
            "weight sums": np.frombuffer(text.encode(), dtype=np.uint8),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], n_rows: int) -> WeightSpaces:
        """Restore the result of :meth:`to_arrays`; ValueError if the arrays do not belong together."""
        if "weight sums" not in arrays:
            return cls.none(n_rows)
        if not {"weight cells", "weight patterns", "weight atoms"} <= set(arrays):
            raise ValueError("the release history is not complete")
        cells = np.asarray(arrays["weight cells"], dtype=np.int64)
        patterns = np.asarray(arrays["weight patterns"], dtype=np.float64)
        atoms = np.asarray(arrays["weight atoms"], dtype=np.float32)
        sums = [
            {(tuple(p), tuple(a)): float(value) for p, a, value in one}
            for one in json.loads(arrays["weight sums"].tobytes())
        ]
        used = [key for one in sums for key in one]
        whole = (
            len(cells) == len(atoms) == n_rows
            and patterns.ndim == atoms.ndim == 2
            and np.isfinite(patterns).all()
            and (not len(cells) or 0 <= cells.min() <= cells.max() < len(patterns))
            and all(0 <= i < patterns.shape[1] for p, _ in used for i in p)
            and all(0 <= i < atoms.shape[1] for _, a in used for i in a)
        )
        if not whole:
            raise ValueError("the release history is not complete")
        return cls(cells, patterns, atoms).with_sums(sums)


# ----------------------------------------------------------------------------------------------------
# Columns as polynomials of patterns and atoms.


class Expressions:
    """Expresses columns, (n_rows,), by the patterns and atoms of a history, and adds what is new to these."""

    def __init__(self, spaces: WeightSpaces) -> None:
        self.spaces = spaces
        self.n = len(spaces.cells)
        self._new_patterns: list[Floats] = []
        self._new_atoms: list[Floats] = []
        self._atoms = spaces.atoms
        self._extended: dict[int, Floats] = {}
        self._place: dict[bytes, int] = {}
        for j, values in enumerate(spaces.patterns.T):
            self._place.setdefault(values[spaces.cells].tobytes(), j)
        self._indicators = {j for j, values in enumerate(spaces.patterns.T) if _is_indicator(values)}

    def of(self, x: Floats, depth: int = 0) -> Polynomial:
        """Return a column, zero in rows without a part in the sums, as a polynomial."""
        if len(x) < self.n:  # rows that are gone come last, and are in no sum any more
            x = np.concatenate([x, np.zeros(self.n - len(x))])
        rows = np.flatnonzero(x)
        if not len(rows):
            return {}
        size = float(np.abs(x).max())
        if not SMALLEST < size < LARGEST:  # a unit, which no combination depends on
            x = np.ldexp(x, -int(np.frexp(size)[1]))
        if has_few_values(x):
            return {((self._pattern(x),), ()): 1.0}
        found = self._match(x, rows)
        if found is None:
            return self._new(x, rows)
        out, rest = found
        if rest.any() and depth < 4:
            for key, value in self.of(rest, depth + 1).items():
                out[key] = out.get(key, 0.0) + value
        elif rest.any():
            out |= self._new(rest, np.flatnonzero(rest))
        return out

    def pattern(self, x: Floats) -> Polynomial:
        """Return a column that follows from those of few values, however many values it has."""
        return {((self._pattern(x),), ()): 1.0} if x.any() else {}

    def is_indicator(self, x: Polynomial) -> bool:
        """Return whether a column is zero or one in every row."""
        return len(x) == 1 and all(
            not a and len(p) == 1 and p[0] in self._indicators and value == 1.0 for (p, a), value in x.items()
        )

    def product(self, *factors: Polynomial) -> Polynomial:
        """Return the product of polynomials; an indicator times itself is itself."""
        out: Polynomial = ONE
        for factor in factors:
            product: dict[Monomial, float] = defaultdict(float)
            for (p, a), one in out.items():
                for (q, b), other in factor.items():
                    pattern = sorted((*p, *(i for i in q if i not in p or i not in self._indicators)))
                    product[tuple(pattern), tuple(sorted((*a, *b)))] += one * other
            out = product
        return out

    def result(self) -> WeightSpaces:
        """Return the history with all patterns and atoms, and its sums."""
        spaces, atoms = self.spaces, self._atoms
        if self._extended or self._new_atoms:
            atoms = np.column_stack([atoms, *self._new_atoms]).astype(np.float32, copy=False)
            for j, values in self._extended.items():
                atoms[:, j] = values
        if not self._new_patterns:
            return replace(spaces, atoms=atoms)
        codes = [np.unique(one, return_inverse=True)[1].ravel() for one in self._new_patterns]
        cells = spaces.cells
        for code in codes:
            cells = np.unique(cells * (int(code.max()) + 1) + code, return_inverse=True)[1].ravel()
        first = np.zeros(int(cells.max(initial=-1)) + 1, dtype=np.int64)
        first[cells[::-1]] = np.arange(len(cells))[::-1]
        old = spaces.patterns[spaces.cells[first]]
        patterns = np.column_stack([old, *(one[first] for one in self._new_patterns)])
        return replace(spaces, cells=cells, patterns=patterns, atoms=atoms)

    def _pattern(self, x: Floats) -> int:
        whole = np.rint(x)
        if (np.abs(x - whole) <= ROUNDED * np.abs(whole)).all():  # after a change of units and back
            x = whole
        x = np.ascontiguousarray(x, dtype=np.float64) + 0.0
        key = x.tobytes()
        if key not in self._place:
            place = self.spaces.patterns.shape[1] + len(self._new_patterns)
            self._place[key] = place
            self._new_patterns.append(x)
            if _is_indicator(x):
                self._indicators.add(place)
        return self._place[key]

    def _new(self, x: Floats, rows: Ints) -> dict[Monomial, float]:
        """Add a column as an atom; its most frequent value is a pattern if half of the rows have it."""
        sample = x[rows[:: max(len(rows) // SAMPLE_ROWS, 1)]]
        value, counts = np.unique(sample, return_counts=True)
        common, out = float(value[counts.argmax()]), dict[Monomial, float]()
        if counts.max() > 1 and (x == common).sum() >= EXPLAINED * len(rows):
            out[((self._pattern((x == common) * 1.0),), ())] = common
            x = np.where(x == common, 0.0, x)
        place = self._atoms.shape[1] + len(self._new_atoms)
        self._new_atoms.append(np.where(x != 0.0, x, np.nan))
        out[((self._pattern((x != 0.0) * 1.0),), (place,))] = 1.0
        return out

    def _atom(self, j: int) -> Floats:
        if j in self._extended:
            return self._extended[j]
        known = self._atoms.shape[1]
        return self._atoms[:, j] if j < known else self._new_atoms[j - known]

    def _match(
        self, x: Floats, rows: Ints, without: frozenset[int] = frozenset()
    ) -> tuple[dict[Monomial, float], Floats] | None:
        """Express a column by an atom or a product of two; return the polynomial and what it leaves.

        The atoms `without` are known in none of the rows.
        """
        count = self._atoms.shape[1] + len(self._new_atoms)
        sample = rows[:: max(len(rows) // SAMPLE_ROWS, 1)]
        held = np.full((len(sample), count), np.nan)
        for j in range(count):
            if j not in without:
                held[:, j] = self._atom(j)[sample]
        x_here = x[sample]
        for j in _maybe_multiples(x_here, held):
            if _ratios(x_here, held[:, j]) is not None:
                found = self._times(x, rows, (j,), without)
                if found is not None:
                    return found
        unknown = np.isnan(held).mean(axis=0) > EXPLAINED
        for j in np.flatnonzero(unknown).tolist():  # atoms that are known in few of the sampled rows
            if j in without:
                continue
            v = self._atom(j)
            both = rows[~np.isnan(v[rows])]
            if len(both) and _ratios(x[both], v[both]) is not None:
                found = self._times(x, rows, (j,), without)
                if found is not None:
                    return found
        if len(rows) <= FEWEST_OF_A_LINE:
            return None
        for j in _maybe_lines(x_here, held):
            line = _line(x_here, held[:, j])
            if line is not None:
                found = self._affine(x, rows, j, *line)
                if found is not None:
                    return found
        if count <= MOST_FACTORS:
            one, other = np.triu_indices(count)
            for k in _maybe_products(x_here, held, one, other):
                i, j = int(one[k]), int(other[k])
                if _ratios(x_here, held[:, i] * held[:, j]) is not None:
                    found = self._times(x, rows, (i, j))
                    if found is not None:
                        return found
        return None

    def _times(
        self, x: Floats, rows: Ints, atoms: tuple[int, ...], without: frozenset[int] = frozenset()
    ) -> tuple[dict[Monomial, float], Floats] | None:
        v = np.prod([self._atom(j)[rows] for j in atoms], axis=0, dtype=np.float64)
        if (np.abs(v - x[rows]) <= SAME_RATIO * np.abs(v)).all():
            return {((self._pattern((x != 0.0) * 1.0),), tuple(sorted(atoms))): 1.0}, np.zeros(self.n)
        there = ~np.isnan(v)
        ratios = _ratios(x[rows[there]], v[there])
        if ratios is None:
            return None
        weight = np.zeros(self.n)
        quotient = x[rows[there]] / v[there]
        for ratio in ratios:
            weight[rows[there][np.abs(quotient - ratio) <= SAME_RATIO * abs(ratio)]] = ratio
        if len(atoms) == 1 and not there.all():
            (j,) = atoms
            more, values = rows[~there], np.array(self._atom(j), dtype=np.float64)
            x_more = np.zeros(self.n)
            x_more[more] = x[more]
            other = self._match(x_more, more, without | {j})
            if other is not None:  # a part of the same column, which another atom has
                out, left = other
                out[(self._pattern(weight),), (j,)] = 1.0
                return out, left + np.where((weight == 0.0) & (x_more == 0.0), x, 0.0)
            values[more] = x[more] / ratios[0]
            weight[more] = ratios[0]
            self._extend(j, values)
        rest = np.where(weight == 0.0, x, 0.0)
        return {((self._pattern(weight),), tuple(sorted(atoms))): 1.0}, rest

    def _affine(
        self, x: Floats, rows: Ints, j: int, start: float, slope: float
    ) -> tuple[dict[Monomial, float], Floats] | None:
        v = self._atom(j).astype(np.float64)
        size = np.abs(slope * v) + abs(start) + np.abs(x)
        with np.errstate(invalid="ignore"):
            same = np.abs(x - start - slope * v) <= SAME_RATIO * size  # where both are zero, too
        here = same.astype(np.float64)
        if here[rows].sum() < EXPLAINED * (~np.isnan(v[rows])).sum():
            return None
        pattern = self._pattern(here)
        return {((pattern,), ()): start, ((pattern,), (j,)): slope}, np.where(here == 0.0, x, 0.0)

    def _extend(self, j: int, values: Floats) -> None:
        known = self._atoms.shape[1]
        if j < known:
            self._extended[j] = values.astype(np.float32)
        else:
            self._new_atoms[j - known] = values


def has_few_values(x: Floats) -> bool:
    """Return whether a column has few values; the first rows rule out most.

    A number that is zero in all but few rows has few values, too. It is a column of many values there, unless
    its values are repeated or are small whole numbers.
    """
    if len(np.unique(x[: 4 * FEW_VALUES])) > FEW_VALUES:
        return False
    values = np.unique(x[x != 0.0])
    if len(np.unique(x)) > FEW_VALUES:
        return False
    small = bool((np.abs(values) <= LARGEST_CODE).all() and (values == np.rint(values)).all())
    return len(values) < 2 or small or bool((x != 0.0).sum() >= 2 * len(values))


def _is_indicator(x: Floats) -> bool:
    return bool(((x == 0.0) | (x == 1.0)).all())


def _maybe_multiples(x: Floats, V: Floats) -> list[int]:
    """Return the columns of V (m, q) of which x (m,) may be a multiple in many rows."""
    with np.errstate(all="ignore"):
        q = np.sort(x[:, None] / V, axis=0)
        same = np.abs(np.diff(q, axis=0)) <= SAME_RATIO * np.abs(q[1:])
    return np.flatnonzero((same.sum(axis=0) > 1) | (len(x) - np.isnan(V).sum(axis=0) < 4)).tolist()


def _maybe_lines(x: Floats, V: Floats) -> list[int]:
    """Return the columns of V (m, q) of which x (m,) may be a linear function."""
    with np.errstate(all="ignore"):
        slopes = np.diff(x[:SCREENED])[:, None] / np.diff(V[:SCREENED], axis=0)
        same = np.abs(np.diff(slopes, axis=0)) <= 1e-4 * np.abs(slopes[1:])
    return np.flatnonzero(same.any(axis=0) | np.isnan(slopes).any(axis=0)).tolist()


def _maybe_products(x: Floats, V: Floats, one: Ints, other: Ints) -> list[int]:
    """Return the pairs of columns of V (m, q) of whose product x (m,) may be a multiple."""
    with np.errstate(all="ignore"):
        q = x[:SCREENED, None] / (V[:SCREENED, one] * V[:SCREENED, other])
        same = np.abs(np.diff(q, axis=0)) <= SAME_RATIO * np.abs(q[1:])
    return np.flatnonzero(same.any(axis=0)).tolist()


def _ratios(x: Floats, v: Floats) -> list[float] | None:
    """Return the few ratios of x (m,) and v that explain most rows, the most frequent first; or None.

    v is NaN where it is not known.
    """
    there = ~np.isnan(v) & (v != 0.0)
    if not there.any():
        return None
    q = np.sort(x[there] / v[there])
    new = np.append(True, np.diff(q) > SAME_RATIO * np.abs(q[1:]))
    starts = np.flatnonzero(new)
    counts = np.diff(np.append(starts, len(q)))
    middle = q[starts + counts // 2]
    order = np.argsort(-counts, kind="stable")[:FEW_VALUES]
    order = order[(counts[order] > 1) | (np.abs(middle[order] - 1.0) <= SAME_RATIO)]
    if not len(order):
        return None
    alone = len(q) == counts[order[0]] and abs(middle[order[0]] - 1.0) <= SAME_RATIO
    if counts[order].sum() < EXPLAINED * len(q) or not (alone or counts[order[0]] > 2):
        return None
    return [1.0 if abs(one - 1.0) <= SAME_RATIO else float(one) for one in middle[order].tolist()]


def _line(x: Floats, v: Floats) -> tuple[float, float] | None:
    """Return start and slope of a line through most points (v, x); None if there is none."""
    there = ~np.isnan(v)
    x, v = x[there], v[there]
    if len(x) < FEWEST_OF_A_LINE:
        return None
    order = np.argsort(v)
    half = len(x) // 2
    with np.errstate(all="ignore"):
        slopes = (x[order][half : 2 * half] - x[order][:half]) / (v[order][half : 2 * half] - v[order][:half])
    slope = float(np.nanmedian(slopes))
    if not np.isfinite(slope) or slope == 0.0:
        return None
    if (np.abs(slopes - slope) <= 1e-4 * abs(slope)).sum() < EXPLAINED * half:
        return None
    start = float(np.median(x - slope * v))
    size = np.abs(slope * v) + abs(start) + np.abs(x)
    return (
        (start, slope) if (np.abs(x - start - slope * v) <= SAME_RATIO * size).mean() >= EXPLAINED else None
    )


# ----------------------------------------------------------------------------------------------------
# Combinations of sums that belong to few rows.


def find_isolated(
    spaces: WeightSpaces, first: int, few: int, persons: Ints | None = None, tolerated: Collection[int] = ()
) -> list[int]:
    """Return which sums from `first` on reveal, with earlier ones, something about at most `few` persons.

    Combinations of earlier sums do not count, and combinations of the `tolerated` sums do not.
    """
    judged: set[object] = set()
    for members in _components(spaces.sums, first):
        key = _shape(spaces.sums, members, first)
        if key in judged:
            continue
        judged.add(key)
        if found := _isolated_in(spaces, members, first, few, persons, tolerated):
            return found
    return []


def _components(sums: Sequence[Polynomial], first: int) -> list[list[int]]:
    """Divide sums by the quantities that they share; those without a new sum are left out."""
    parent: dict[tuple[int, ...], tuple[int, ...]] = {}

    def root(q: tuple[int, ...]) -> tuple[int, ...]:
        while parent.setdefault(q, q) != q:
            parent[q] = parent[parent[q]]
            q = parent[q]
        return q

    for one in sums:
        quantities = [a for _, a in one]
        for q in quantities[1:]:
            parent[root(q)] = root(quantities[0])
    members: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, one in enumerate(sums):
        members[root(next(iter(one))[1])].append(place)
    return [found for found in members.values() if found[-1] >= first]


def _shape(sums: Sequence[Polynomial], members: list[int], first: int) -> object:
    """Return what decides about a component: its weights, without the names of its quantities.

    Counts, the quantity of no atoms, are judged by other rules and keep their name.
    """
    names: dict[tuple[int, ...], int] = {(): 0}
    parts = [
        (
            k >= first,
            frozenset((p, names.setdefault(a, len(names)), value) for (p, a), value in sums[k].items()),
        )
        for k in members
    ]
    return frozenset(parts)


def _isolated_in(
    spaces: WeightSpaces,
    members: list[int],
    first: int,
    few: int,
    persons: Ints | None,
    tolerated: Collection[int],
) -> list[int]:
    used = sorted({i for k in members for p, _ in spaces.sums[k] for i in p})
    columns = [np.ascontiguousarray(spaces.patterns[:, i]) for i in used]
    first_with, inverse = np.unique(_row_hash(columns, len(spaces.patterns)), True, True)[1:]
    values = spaces.patterns[first_with][:, used]
    cell = inverse.ravel()[spaces.cells]
    entry, size, unit, persons_of = _entries(cell, len(values), persons)
    there: Bools = np.asarray(values.any(axis=1))
    small = (persons_of[unit] <= few) & there[entry]
    if not small.any():
        return []
    held = {i: column[first_with] for i, column in zip(used, columns, strict=True)}
    quantities = {a: k for k, a in enumerate(dict.fromkeys(a for m in members for _, a in spaces.sums[m]))}
    E, Q = len(entry), len(quantities)
    sums = np.zeros((Q, len(values), len(members)))
    for column, k in enumerate(members):
        for (p, a), value in spaces.sums[k].items():
            sums[quantities[a], :, column] += value * math.prod(held[i] for i in p)
    M: Floats = sums[:, entry] * np.sqrt(size)[:, None]
    if () in quantities and len(unit) != len(persons_of):
        # A count says nothing of a person of whom all versions of a record count alike.
        first_of, totals = np.unique(unit, return_index=True)[1], np.zeros((len(persons_of), len(members)))
        np.add.at(totals, unit, sums[quantities[()], entry] * size[:, None])
        M[quantities[()]] = 0.0
        M[quantities[()], first_of] = totals[unit[first_of]] / np.sqrt(size[first_of])[:, None]
    if _have_small_shares(M, unit, small, few):
        return []
    M = M.reshape(Q * E, -1)
    known = np.array([k < first for k in members])
    U, new = _basis(M, known)
    if new == U.shape[1]:
        return []
    allowed = [U[:, :new].reshape(Q, E, new)]
    if tolerated:
        chosen = M[:, [k in tolerated for k in members]]
        basis, _ = _basis(chosen, np.zeros(chosen.shape[1], dtype=np.bool_))
        allowed.append(basis.reshape(Q, E, basis.shape[1]))
    direction = _isolating(U.reshape(Q, E, U.shape[1]), allowed, unit, persons_of, small, few)
    if direction is None:
        return []
    coefficients = np.linalg.lstsq(M, U @ direction, rcond=None)[0]
    weight = np.abs(coefficients) * np.linalg.norm(M, axis=0)
    involved = [k for k, one in zip(members, weight, strict=True) if k >= first and one > 0.1 * weight.max()]
    return involved or [k for k in members if k >= first]


def _entries(cell: Ints, n_cells: int, persons: Ints | None) -> tuple[Ints, Floats, Ints, Floats]:
    """Divide cells by persons of several versions: cell, rows and unit of each entry; persons by unit."""
    if persons is None or len(np.unique(persons)) == len(persons):
        rows = np.bincount(cell, minlength=n_cells).astype(np.float64)
        every = np.arange(n_cells)
        return every, rows, every, rows
    several = np.bincount(persons)[persons] > 1
    both = np.where(several, persons + 1, 0) * n_cells + cell
    code, size = np.unique(both, return_counts=True)
    entry, person = code % n_cells, code // n_cells
    keys = np.where(person > 0, n_cells + person, entry)
    _, unit = np.unique(keys, return_inverse=True)
    own = np.zeros(int(unit.max(initial=-1)) + 1)
    np.maximum.at(own, unit.ravel(), np.where(person > 0, 1.0, size))
    return entry, size.astype(np.float64), unit.ravel(), own


def _row_hash(columns: Sequence[Floats], n: int) -> Array:
    """Return numbers that agree where all columns (n,) do, and differ elsewhere but by a chance of 2^-64."""
    out = np.zeros(n, dtype=np.uint64)
    for column in columns:
        out += (column + 0.0).view(np.uint64)
        for shift, factor in MIXING:
            out ^= out >> np.uint64(shift)
            out *= np.uint64(factor)
        out ^= out >> np.uint64(31)
    return out


def _have_small_shares(M: Floats, unit: Ints, small: Bools, few: int) -> bool:
    """Return whether no unit of few persons has a large share of a combination of columns, (Q, E, d).

    Cross-products decide it, unless columns nearly depend on each other.
    """
    M = M.reshape(-1, M.shape[2])
    length = np.linalg.norm(M, axis=0)
    M = M[:, length > 0.0]
    size = length[length > 0.0]
    values, vectors = np.linalg.eigh(M.T @ M / np.outer(size, size))
    there = values > NEW_DIRECTION**1.5
    if (values[~there] > DEPENDENT).any():
        return False
    U = M @ (vectors[:, there] / np.sqrt(values[there]) / size[:, None])
    share = np.bincount(np.tile(unit, len(M) // len(unit)), np.einsum("er,er->e", U, U))
    return bool(share[unit[small]].max() < MOST_SHARE / few)


def _basis(M: Floats, known: Bools) -> tuple[Floats, int]:
    """Return orthonormal columns that span those of M (m, d), known ones first, and how many are known."""
    length = np.linalg.norm(M, axis=0)
    there = length > 0.0
    M, known = M[:, there] / length[there], known[there]
    U = _orthonormal(M[:, known])
    rest = M[:, ~known]
    for _ in range(2):
        rest = rest - U @ (U.T @ rest)
    return np.hstack([U, _orthonormal(rest)]), U.shape[1]


def _orthonormal(M: Floats) -> Floats:
    if not M.shape[1]:
        return M
    U, s, _ = np.linalg.svd(M, full_matrices=False)
    return np.asarray(U[:, s > NEW_DIRECTION])


def _isolating(
    U: Floats, allowed: Sequence[Floats], unit: Ints, persons: Floats, small: Bools, few: int
) -> Floats | None:
    """Return a combination of orthonormal columns, (Q, E, r), on units of at most `few` persons.

    Combinations of the `allowed` ones, (Q, E, s) each, do not count.
    """
    share = np.bincount(unit, np.einsum("qer,qer->e", U, U), len(persons))
    units = np.unique(unit[small])
    units = units[share[units] > ISOLATED]
    seeds = units[share[units] >= (1.0 - ISOLATED) / few]
    seeds = seeds[np.argsort(-share[seeds], kind="stable")][:MOST_SEEDS]
    for seed in seeds.tolist():
        others = _partners(U, unit, units, seed, persons, few)
        for count in range(len(others) + 1):
            if count >= few:
                break
            for chosen in combinations(others, count):
                inside = np.isin(unit, [seed, *chosen])
                if persons[[seed, *chosen]].sum() > few:
                    continue
                direction = _new_alone(U, allowed, inside)
                if direction is not None:
                    return direction
    return None


def _partners(U: Floats, unit: Ints, units: Ints, seed: int, persons: Floats, few: int) -> list[int]:
    """Return the units that share most of a combination with a unit, and may form a group with it."""
    if persons[seed] >= few:
        return []
    own = U[:, unit == seed].reshape(-1, U.shape[2])
    both = np.einsum("qer,sr->qes", U, own)
    coupling = np.bincount(unit, np.einsum("qes,qes->e", both, both), len(persons))
    coupling[seed] = -1.0
    near = units[np.argsort(-coupling[units], kind="stable")]
    return [u for u in near.tolist() if u != seed and persons[u] + persons[seed] <= few][:MOST_PARTNERS]


def _new_alone(U: Floats, allowed: Sequence[Floats], inside: Bools) -> Floats | None:
    """Return a combination that belongs to the entries `inside` alone, if it is none of the allowed ones."""
    V = U[:, inside].reshape(-1, U.shape[2])
    directions = _alone(V)
    if not len(directions):
        return None
    vectors = directions @ V.T
    for one in allowed:
        W = one[:, inside].reshape(len(V), one.shape[2])
        known = _alone(W) @ W.T
        # Vectors on these rows, so that their orthonormal basis is small.
        Q = np.linalg.svd(known, full_matrices=False)[2] if len(known) else known
        vectors = vectors - (vectors @ Q.T) @ Q
    length = np.linalg.norm(vectors, axis=1)
    return np.asarray(directions[length.argmax()]) if length.max() > NEW_ON_ROWS else None


def _alone(V: Floats) -> Floats:
    """Return the combinations, (k, r), that have all of their length in the rows V (m, r)."""
    if not V.shape[1]:
        return np.zeros((0, 0))
    _, s, directions = np.linalg.svd(V, full_matrices=False)
    return np.asarray(directions[s**2 >= 1.0 - ISOLATED])
