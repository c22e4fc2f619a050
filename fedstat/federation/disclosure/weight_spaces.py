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

Sums over groups of rows whose quantities are not examined, for example since only the rows of an analysis are
compared, count as sums of one quantity more.

Columns are expressed by *patterns*, which have few values, and *atoms*, which have many. A column that equals
a multiple of an atom except in few rows is a pattern times this atom, plus another atom in the other rows:

    a:z = a z,    c = (1 - s) z + s c',    center(z) = z - m,    I(z**2) = z z.

These are identities. So a combination that is found does belong to few rows, whatever the atoms are.

Rows with the same values of all patterns that are compared are one *cell*. Only cells of few rows can be
singled out. Most sums are cleared at once, because no cell is that small, or because no small cell has a
large share of any combination. The others are searched.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations
from typing import TypeAlias

import numpy as np
import pandas as pd
from scipy.sparse.csgraph import connected_components

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
"""Rows up to which a column is no linear function of an atom, and by which one of several is compared."""
TRIALS, NEAR_A_LINE = 8, 1e-4
"""Sets of rows in which a linear function of several atoms is sought, and its relative error there."""
MOST_CANCELLED = 100.0
"""Size of the parts of a linear function, relative to a column, above which it is none."""
FEW_APART = 0.1
"""Largest share of the rows of a column in which it is not the linear function of several atoms."""
LARGEST_DIVISOR = 100
"""Largest denominator of a simple coefficient."""
SMALL_PARTS = (1e-2, 1e-4, SAME_RATIO)
"""Sizes relative to a column below which parts of it are left out, the largest first."""
NEW_DIRECTION = 1e-6
"""Length of what earlier weights leave of new ones, relative to them, below which they add nothing."""
NEW_ON_ROWS = 1e-3
"""Length of what allowed combinations leave of one on the same rows, above which it is another one."""
ISOLATED = 1e-4
"""How much less than one the share may be of a combination that a group of rows holds alone."""
DEPENDENT = 1e-14
"""Eigenvalue of cross-products of columns of length one that is zero but for rounding."""
SAME_SPAN = 1e-12
"""The same where the ranks of cross-products are compared."""
MOST_SHARE = 0.9
"""Share of a person in a combination, times persons, below which a group of rows does not hold it alone."""
SAMPLE_CELLS = 1024
"""Fewest cells of a sample in which combinations of sums are compared with all cells."""
LARGEST_SPAN = 2**62
"""Numbers of cells above which they are numbered again."""
MOST_PRODUCTS = 1200
"""Products of columns of few values above which counts enter by column, and not by pairs of columns."""
MOST_GROUPS = 400
"""Groups of rows above which their counts do not enter."""
MOST_SEEDS, MOST_PARTNERS = 400, 12

Quantity: TypeAlias = tuple[int, ...]
"""Atoms that are multiplied, sorted."""
Monomial: TypeAlias = tuple[tuple[int, ...], Quantity]
"""Patterns and atoms that are multiplied, each sorted."""
Polynomial: TypeAlias = Mapping[Monomial, float]
"""A sum of monomials with coefficients."""
Match: TypeAlias = tuple[dict[Monomial, float], Floats]
"""What a column was expressed by, and what that leaves of it, (n_rows,)."""
ONE: Polynomial = {((), ()): 1.0}
ESTIMATE: Quantity = (-1,)
"""What rows contribute to an estimate under weights from outside; no atom has its values."""
GROUPS: Quantity = (-2,)
"""Any quantity that is summed over groups of rows. The values of its pattern number the groups; 0 is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """A column of few values.

    Parameters
    ----------
    values : (k,) array
        Ascending.
    codes : (n_rows,) array of unsigned int
        Place of the value of every row of the table.
    digest : bytes
        Equal for equal columns.
    """

    values: Floats
    codes: Array
    digest: bytes

    @classmethod
    def of(cls, x: Floats) -> Pattern:
        """Return the pattern of a column (n_rows,) without missing values."""
        is_small = np.abs(x).max(initial=0.0) <= LARGEST_CODE
        if is_small and ((small := x.astype(np.int8)) == x).all():
            place = small.view(np.uint8)
            there = np.roll(np.bincount(place, minlength=256) > 0, 128)
            code = np.roll(np.cumsum(there) - 1, -128).astype(np.uint8)
            return cls.stored(np.flatnonzero(there).astype(np.float64) - 128.0, code[place])
        codes, found = pd.factorize(x + 0.0)
        order = np.argsort(found)
        rank = np.empty(len(found), dtype=np.min_scalar_type(max(len(found) - 1, 0)))
        rank[order] = np.arange(len(found))
        return cls.stored(found[order].astype(np.float64), rank[codes])

    @classmethod
    def of_rows(cls, inside: Bools) -> Pattern:
        """Return the indicator of rows, (n_rows,)."""
        values = np.flatnonzero(np.array([not inside.all(), inside.any()])).astype(np.float64)
        return cls.stored(values, (inside if len(values) > 1 else np.zeros_like(inside)).astype(np.uint8))

    @classmethod
    def stored(cls, values: Floats, codes: Array) -> Pattern:
        """Return the pattern with these values and codes."""
        digest = hashlib.blake2b(values.tobytes(), digest_size=16)
        digest.update(codes.tobytes())
        return cls(values, codes, digest.digest())

    @property
    def column(self) -> Floats:
        """The values of all rows, (n_rows,)."""
        return self.values[self.codes]

    @property
    def is_indicator(self) -> bool:
        """Whether all values are zero or one."""
        return bool(((self.values == 0.0) | (self.values == 1.0)).all())


@dataclass(frozen=True, slots=True, eq=False)
class WeightSpaces:
    """Patterns, atoms, and the sums of products of them that were released.

    Parameters
    ----------
    n_rows : int
    patterns : tuple of Pattern
    atoms : tuple of (n_rows,) arrays of float32
        Columns of many values; NaN where a value is not known.
    columns : tuple of tuple of str
        Columns of the table from which each atom is computed; none if they are not known.
    sums : tuple of polynomials
        Each one is summed over all rows.
    """

    n_rows: int
    patterns: tuple[Pattern, ...] = ()
    atoms: tuple[Array, ...] = ()
    columns: tuple[tuple[str, ...], ...] = ()
    sums: tuple[Polynomial, ...] = ()
    _known: frozenset[frozenset[tuple[Monomial, float]]] = field(default_factory=frozenset)

    @classmethod
    def of_weights(cls, weights: Floats) -> WeightSpaces:
        """Return the spaces after rows were counted with these weights, (n_rows, k)."""
        spaces = cls(len(weights), tuple(Pattern.of(column) for column in weights.T))
        return spaces.with_sums({((j,), ()): 1.0} for j in range(weights.shape[1]))

    def with_sums(self, sums: Iterable[Polynomial]) -> WeightSpaces:
        """Return the spaces after further sums; itself if all were there before."""
        new = {frozenset(one.items()): one for one in sums if one}
        added = [key for key in new if key not in self._known]
        if not added:
            return self
        return replace(self, sums=(*self.sums, *(new[key] for key in added)), _known=self._known.union(added))

    def weights_of(self, quantity: Quantity) -> Floats:
        """Return the weights under which a quantity alone was summed, (n_rows, q), each a pattern."""
        found = [self.patterns[p[0]].column for one in self.sums for p, a in one if a == quantity]
        return np.column_stack(found) if found else np.zeros((self.n_rows, 0))

    def kept(self, before: WeightSpaces) -> WeightSpaces:
        """Return what is remembered of these spaces: no more atoms than before if they are too many."""
        if len(self.atoms) * self.n_rows <= MOST_KEPT:
            return self
        known = len(before.atoms)
        sums = [one for one in self.sums if all(i < known for _, a in one for i in a)]
        fewer = replace(self, atoms=self.atoms[:known], columns=self.columns[:known], sums=())
        return replace(fewer, _known=frozenset()).with_sums(sums)

    def with_groups(self, code: Ints) -> WeightSpaces:
        """Return the spaces after sums of any quantity by group, (m,), -1 for none, as for further rows."""
        made = Expressions(self)
        column = np.zeros(self.n_rows)
        column[: len(code)] = code + 1
        sums = [{(p, GROUPS): value} for (p, _), value in made.pattern(column).items()]
        return made.result().with_sums(sums)

    def carried(self, places: Ints, gone: Ints) -> WeightSpaces:
        """Return the spaces of a table with other rows; see :meth:`ReleasedSums.carried`.

        New rows are in no sum yet: their patterns are zero.
        """
        from_before = np.append(np.where(places >= 0, places, self.n_rows), gone)

        def carry(column: Array, new: float) -> Array:
            here: Array = np.append(column, column.dtype.type(new))[from_before]
            return here

        patterns = tuple(Pattern.of(carry(one.column, 0.0)) for one in self.patterns)
        atoms = tuple(carry(one, np.nan) for one in self.atoms)
        return replace(self, n_rows=len(from_before), patterns=patterns, atoms=atoms)

    def to_arrays(self) -> dict[str, Array]:
        """Return the arrays by name, for a file."""
        if not self.sums:
            return {}
        text = json.dumps([[[*key, value] for key, value in one.items()] for one in self.sums])
        nothing = np.zeros((self.n_rows, 0), dtype=np.float32)
        return {
            "weight codes": np.column_stack([one.codes for one in self.patterns] or [nothing]),
            "weight values": np.concatenate([one.values for one in self.patterns] or [np.zeros(0)]),
            "weight counts": np.array([len(one.values) for one in self.patterns], dtype=np.int32),
            "weight atoms": np.column_stack(self.atoms or [nothing]),
            "weight columns": np.frombuffer(json.dumps(self.columns).encode(), dtype=np.uint8),
            "weight sums": np.frombuffer(text.encode(), dtype=np.uint8),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], n_rows: int) -> WeightSpaces:
        """Restore the result of :meth:`to_arrays`; ValueError if the arrays do not belong together."""
        if "weight sums" not in arrays:
            return cls(n_rows)
        if not {"weight codes", "weight values", "weight counts", "weight atoms"} <= set(arrays):
            raise ValueError("the release history is not complete")
        codes, atoms = arrays["weight codes"], np.asarray(arrays["weight atoms"], dtype=np.float32)
        values = np.asarray(arrays["weight values"], dtype=np.float64)
        counts = np.asarray(arrays["weight counts"], dtype=np.int64)
        sums = [
            {(tuple(p), tuple(a)): float(value) for p, a, value in one}
            for one in json.loads(arrays["weight sums"].tobytes())
        ]
        names = ((),) * atoms.shape[1]
        if "weight columns" in arrays:
            names = tuple(tuple(map(str, one)) for one in json.loads(arrays["weight columns"].tobytes()))
        used = [key for one in sums for key in one]
        whole = (
            codes.ndim == atoms.ndim == 2
            and len(codes) == len(atoms) == n_rows
            and len(counts) == codes.shape[1]
            and len(names) == atoms.shape[1]
            and counts.sum() == len(values)
            and np.isfinite(values).all()
            and (not codes.size or (codes.min() >= 0 and (codes.max(axis=0) < counts).all()))
            and all(0 <= i < len(counts) for p, _ in used for i in p)
            and all(a in (ESTIMATE, GROUPS) or all(0 <= i < atoms.shape[1] for i in a) for _, a in used)
            and all(len(p) == len(one) == 1 for one in sums for p, a in one if a == GROUPS)
        )
        if not whole:
            raise ValueError("the release history is not complete")
        parts = np.split(values, np.cumsum(counts)[:-1]) if len(counts) else []
        columns = (
            np.ascontiguousarray(one.astype(np.min_scalar_type(max(len(part) - 1, 0))))
            for one, part in zip(codes.T, parts, strict=True)
        )
        patterns = tuple(Pattern.stored(part, one) for part, one in zip(parts, columns, strict=True))
        return cls(n_rows, patterns, tuple(np.ascontiguousarray(one) for one in atoms.T), names).with_sums(
            sums
        )


# ----------------------------------------------------------------------------------------------------
# Columns as polynomials of patterns and atoms.


class Expressions:
    """Expresses columns, (n_rows,), by the patterns and atoms of a history, and adds what is new to these."""

    def __init__(self, spaces: WeightSpaces) -> None:
        self.spaces = spaces
        self.n = spaces.n_rows
        self._every = np.arange(self.n)
        self._patterns = [*spaces.patterns]
        self._atoms: list[Array] = [*spaces.atoms]
        self._columns: list[tuple[str, ...]] = [*spaces.columns]
        self._place = {one.digest: j for j, one in reversed([*enumerate(spaces.patterns)])}
        self._indicators = {j for j, one in enumerate(spaces.patterns) if one.is_indicator}
        self._factors: list[tuple[int, Polynomial]] = []

    def of(self, x: Floats, depth: int = 0) -> Polynomial:
        """Return a column, zero in rows without a part in the sums, as a polynomial."""
        if len(x) < self.n:  # rows that are gone come last, and are in no sum any more
            x = np.concatenate([x, np.zeros(self.n - len(x))])
        size = float(max(x.max(initial=0.0), -x.min(initial=0.0)))
        if not size:
            return {}
        if not SMALLEST < size < LARGEST:  # a unit, which no combination depends on
            x = np.ldexp(x, -int(np.frexp(size)[1]))
        pattern = pattern_of_few_values(x)
        if pattern is not None:
            return {((self._place_of(pattern),), ()): 1.0}
        rows = self._every if np.count_nonzero(x) == self.n else np.flatnonzero(x)
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

    def computed_from(self, columns: Sequence[str], found: Polynomial) -> Polynomial:
        """Remember from which columns of the table an expressed column is computed, and return it."""
        for i in {i for _, a in found for i in a}:
            self._columns[i] = self._columns[i] or tuple(columns)
        return found

    def rows(self, inside: Bools) -> Polynomial:
        """Return the indicator of rows, (n_rows,); rows that are gone come last and are not inside."""
        inside = np.append(inside, np.zeros(self.n - len(inside), dtype=np.bool_))
        return {((self._rows(inside),), ()): 1.0} if inside.any() else {}

    def pattern(self, x: Floats) -> Polynomial:
        """Return a column that follows from those of few values, however many values it has."""
        return {((self._pattern(x),), ()): 1.0} if x.any() else {}

    def estimate(self, weights: Floats) -> Polynomial:
        """Return weights from outside, (n_rows,), times what the rows contribute to an estimate."""
        return {((self._pattern(weights),), ESTIMATE): 1.0} if weights.any() else {}

    def is_indicator(self, x: Polynomial) -> bool:
        """Return whether a column is zero or one in every row."""
        return len(x) == 1 and all(
            not a and len(p) == 1 and p[0] in self._indicators and value == 1.0 for (p, a), value in x.items()
        )

    def product(self, *factors: Polynomial) -> Polynomial:
        """Return the product of polynomials; an indicator times itself is itself."""
        out: Polynomial = ONE
        for factor in factors:
            if out is ONE or factor is ONE:
                out = factor if out is ONE else out
                continue
            product: dict[Monomial, float] = defaultdict(float)
            for (p, a), one in out.items():
                for (q, b), other in factor.items():
                    pattern = sorted((*p, *(i for i in q if i not in p or i not in self._indicators)))
                    product[tuple(pattern), tuple(sorted((*a, *b))) if a and b else a or b] += one * other
            out = product
        return out

    def result(self) -> WeightSpaces:
        """Return the history with all patterns and atoms, and its sums."""
        atoms = tuple(np.asarray(one, dtype=np.float32) for one in self._atoms)
        patterns, columns = tuple(self._patterns), tuple(self._columns)
        spaces = replace(self.spaces, patterns=patterns, atoms=atoms, columns=columns)
        if not self._factors:
            return spaces
        fewer = replace(spaces, sums=(), _known=frozenset())
        return fewer.with_sums(self.factored(one) for one in self.spaces.sums)

    def factor_atoms(self) -> None:
        """Express atoms by products of later ones, once all columns of a request are expressed.

        z u may be summed before u and c are, where c equals z but for one row.
        """
        count, first = len(self._atoms), len(self.spaces.atoms)
        if not first <= count - 1 < MOST_FACTORS or count * self.n > MOST_KEPT:
            return
        one, other = np.triu_indices(count)
        for k in range(count - 1):
            later = other >= max(k + 1, first)
            rows = np.flatnonzero(~np.isnan(self._atoms[k]) & (self._atoms[k] != 0.0))
            found = self._match_product(self._atoms[k], rows, one[later], other[later]) if len(rows) else None
            if found is None:
                continue
            factors, rest = found
            there = rest != 0.0
            if there.any():
                factors[(self._rows(there),), (k,)] = 1.0
            self._atoms[k] = np.where(there, rest, np.nan)
            self._factors.append((k, factors))

    def factored(self, polynomial: Polynomial) -> Polynomial:
        """Replace the atoms that :meth:`factor_atoms` expressed by their factors."""
        for k, factors in self._factors:
            if any(k in a for _, a in polynomial):
                out: dict[Monomial, float] = defaultdict(float)
                for (p, a), value in polynomial.items():
                    others = {(p, tuple(i for i in a if i != k)): value}
                    for key, one in self.product(others, *[factors] * a.count(k)).items():
                        out[key] += one
                polynomial = out
        return polynomial

    def _pattern(self, x: Floats) -> int:
        return self._place_of(Pattern.of(x))

    def _rows(self, inside: Bools) -> int:
        return self._place_of(Pattern.of_rows(inside))

    def _place_of(self, found: Pattern) -> int:
        whole = np.rint(found.values)
        if (found.values != whole).any() and (
            np.abs(found.values - whole) <= ROUNDED * np.abs(whole)
        ).all():  # after a change of units and back
            found = Pattern.of(whole[found.codes])
        place = self._place.setdefault(found.digest, len(self._patterns))
        if place == len(self._patterns):
            self._patterns.append(found)
            if found.is_indicator:
                self._indicators.add(place)
        return place

    def _new(self, x: Floats, rows: Ints) -> dict[Monomial, float]:
        """Add a column as an atom; its most frequent value is a pattern if half of the rows have it."""
        sample = x[rows[:: max(len(rows) // SAMPLE_ROWS, 1)]]
        value, counts = np.unique(sample, return_counts=True)
        common, out = float(value[counts.argmax()]), dict[Monomial, float]()
        if counts.max() > 1 and (x == common).sum() >= EXPLAINED * len(rows):
            out[((self._rows(x == common),), ())] = common
            x = np.where(x == common, 0.0, x)
        place, there = len(self._atoms), x != 0.0
        self._atoms.append(x if there.all() else np.where(there, x, np.nan))
        self._columns.append(())
        out[((self._rows(there),), (place,))] = 1.0
        return out

    def _match(self, x: Floats, rows: Ints, without: frozenset[int] = frozenset()) -> Match | None:
        """Express a column by an atom or a product of two; None if nothing matches.

        The atoms `without` are known in none of the rows.
        """
        return next((found for found in self._matches(x, rows, without) if found is not None), None)

    def _matches(self, x: Floats, rows: Ints, without: frozenset[int]) -> Iterator[Match | None]:
        """Yield what :meth:`_match` tries, in this order."""
        count = len(self._atoms)
        sample = rows[:: max(len(rows) // SAMPLE_ROWS, 1)]
        held = np.full((len(sample), count), np.nan)
        for j in range(count):
            if j not in without:
                held[:, j] = self._atoms[j][sample]
        x_here = x[sample]
        lines = _maybe_lines(x_here, held) if len(rows) > FEWEST_OF_A_LINE else []
        for j in lines:  # a line through all rows, since repeated values have few ratios, too
            line = _line(x_here, held[:, j])
            if line is not None and abs(line[0]) > SAME_RATIO * np.abs(x_here).max():
                found = self._affine(x, rows, j, *line)
                yield None if found is None or found[1].any() else found
        for j in _maybe_multiples(x_here, held):
            if _ratios(x_here, held[:, j]) is not None:
                yield self._times(x, rows, (j,), without)
        unknown = np.isnan(held).mean(axis=0) > EXPLAINED
        for j in np.flatnonzero(unknown).tolist():  # atoms that are known in few of the sampled rows
            v = self._atoms[j]
            both = rows[~np.isnan(v[rows])]
            if j not in without and len(both) and _ratios(x[both], v[both]) is not None:
                yield self._times(x, rows, (j,), without)
        for j in lines:
            line = _line(x_here, held[:, j])
            if line is not None:
                yield self._affine(x, rows, j, *line)
        if count <= MOST_FACTORS:
            yield self._match_product(x, rows, *np.triu_indices(count))
            yield self._match_total(x, rows)

    def _match_product(self, x: Floats, rows: Ints, one: Ints, other: Ints) -> Match | None:
        """Express a column by a product of two atoms, `one` and `other`, as :meth:`_match` does."""
        sample = rows[:: max(len(rows) // SAMPLE_ROWS, 1)]
        x_here = x[sample].astype(np.float64)
        held = np.array([v[sample] for v in self._atoms], dtype=np.float64).reshape(-1, len(sample)).T
        for k in _maybe_products(x_here, held, one, other):
            i, j = int(one[k]), int(other[k])
            if _ratios(x_here, held[:, i] * held[:, j]) is not None:
                found = self._times(np.nan_to_num(x.astype(np.float64)), rows, (i, j))
                if found is not None:
                    return found
        return None

    def _match_total(self, x: Floats, rows: Ints) -> Match | None:
        """Express a column that is a linear function of atoms but for few rows, as a total is of its parts.

        Or an atom times such a function. Equality in all rows counts only with simple coefficients. Many
        functions of a spline are equal on an interval, and rounding errors would look like a combination of
        their own.
        """
        sample = rows[:: max(len(rows) // SAMPLE_ROWS, 1)]
        atoms = [j for j, v in enumerate(self._atoms) if not np.isnan(v[sample]).all()]
        needed = len(atoms) + 1 + FEWEST_OF_A_LINE
        if len(atoms) < 2 or len(rows) < needed:
            return None
        rng = np.random.default_rng(len(atoms))
        drawn = np.array([rng.choice(rows, needed, replace=False) for _ in range(TRIALS)])
        A = np.ones((*drawn.shape, len(atoms) + 1))
        for k, j in enumerate(atoms, 1):
            A[..., k] = self._atoms[j][drawn]
        np.copyto(A, 0.0, where=np.isnan(A))
        with np.errstate(divide="ignore"):
            first = _linear_function(x[drawn][:, :, None] / A, A)
        if first is None:
            return None
        place, coefficients = first
        A = np.column_stack([np.ones(self.n), *(np.nan_to_num(self._atoms[j]) for j in atoms)])
        factor = np.where(A[:, place] == 0.0, np.nan, A[:, place])
        quotient = x / factor
        there = rows[~np.isnan(factor[rows])]
        near = there[_are_linear(quotient[there], A[there], coefficients, NEAR_A_LINE)]
        if len(near) < max((1.0 - FEW_APART) * len(rows), needed):
            return None
        found = _few_parts(quotient[near], A[near])
        simple = np.array([float(Fraction(value).limit_denominator(LARGEST_DIVISOR)) for value in found])
        is_simple = bool((np.abs(simple - found) <= SAME_RATIO * np.abs(found)).all())
        found = simple if is_simple else found
        same = _are_linear(quotient, A, found, SAME_RATIO)
        apart = int((~same[rows]).sum())
        if apart > FEW_APART * len(rows) or not (apart or is_simple):
            return None
        common, out = (atoms[place - 1],) if place else (), dict[Monomial, float]()
        for part, value in zip([(), *((j,) for j in atoms)], found.tolist(), strict=True):
            if value:  # an atom is zero where it has no value
                known = same & ~np.isnan([self._atoms[j] for j in (*part, *common)]).any(axis=0)
                out[((self._rows(known),), tuple(sorted((*part, *common))))] = value
        return out, np.where(same, 0.0, x)

    def _times(
        self, x: Floats, rows: Ints, atoms: tuple[int, ...], without: frozenset[int] = frozenset()
    ) -> Match | None:
        v = np.prod([self._atoms[j][rows] for j in atoms], axis=0, dtype=np.float64)
        if (np.abs(v - x[rows]) <= SAME_RATIO * np.abs(v)).all():
            return {((self._rows(x != 0.0),), tuple(sorted(atoms))): 1.0}, np.zeros(self.n)
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
            more, values = rows[~there], np.array(self._atoms[j], dtype=np.float64)
            x_more = np.zeros(self.n)
            x_more[more] = x[more]
            other = self._match(x_more, more, without | {j})
            if other is not None:  # a part of the same column, which another atom has
                out, left = other
                out[(self._pattern(weight),), (j,)] = 1.0
                return out, left + np.where((weight == 0.0) & (x_more == 0.0), x, 0.0)
            values[more] = x[more] / ratios[0]
            weight[more] = ratios[0]
            self._atoms[j] = values if j >= len(self.spaces.atoms) else values.astype(np.float32)
        rest = np.where(weight == 0.0, x, 0.0)
        return {((self._pattern(weight),), tuple(sorted(atoms))): 1.0}, rest

    def _affine(self, x: Floats, rows: Ints, j: int, start: float, slope: float) -> Match | None:
        v = self._atoms[j].astype(np.float64)
        size = np.abs(slope * v) + abs(start) + np.abs(x)
        with np.errstate(invalid="ignore"):
            same = np.abs(x - start - slope * v) <= SAME_RATIO * size  # where both are zero, too
        if same[rows].sum() < EXPLAINED * (~np.isnan(v[rows])).sum():
            return None
        pattern = self._rows(same)
        return {((pattern,), ()): start, ((pattern,), (j,)): slope}, np.where(same, 0.0, x)


def pattern_of_few_values(x: Floats, most: int = FEW_VALUES) -> Pattern | None:
    """Return the pattern of a column of at most this number of values; None for another one.

    A number that is zero in all but few rows has few values, too. It is a column of many values there, unless
    its values are repeated or are small whole numbers.
    """
    if not may_have_few_values(x, most):
        return None
    found = Pattern.of(x)
    values = found.values[found.values != 0.0]
    if len(found.values) > most:
        return None
    small = bool((np.abs(values) <= LARGEST_CODE).all() and (values == np.rint(values)).all())
    is_few = len(values) < 2 or small or np.count_nonzero(x) >= 2 * len(values)
    return found if is_few else None


def may_have_few_values(x: Floats, most: int = FEW_VALUES) -> bool:
    """Return whether the first rows of a column, which rule out most columns, have few values."""
    return len(np.unique(x[: 4 * most])) <= most


def has_few_values(x: Floats) -> bool:
    """Return whether a column has few values."""
    return pattern_of_few_values(x) is not None


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


def _are_linear(X: Floats, A: Floats, B: Floats, tolerance: float) -> Bools:
    """Return the rows in which X (..., n[, r]) is the linear function A (..., n, q) B (..., q[, r]).

    No row, if the parts are so much larger than a column of X that what is rounded off of them would hide it.
    """
    size, axis = np.abs(A) @ np.abs(B) + np.abs(X), A.ndim - 2
    most, of_x = (np.nanmax(one, axis=axis, keepdims=True, initial=0.0) for one in (size, np.abs(X)))
    return np.asarray((np.abs(X - A @ B) <= tolerance * size) & (most <= MOST_CANCELLED * of_x))


def _few_parts(x: Floats, A: Floats) -> Floats:
    """Return coefficients of the fewest columns of A (n, q) whose linear function x (n,) is in as many rows.

    Least squares gives each column a share of what is rounded off. So parts that are small next to x are left
    out first, and come back only if x needs them.
    """
    sizes = np.abs(A).max(axis=0) + (A == 0.0).all(axis=0)
    scaled, largest, tried = A / sizes, np.abs(x).max(), list[Floats]()
    full = np.linalg.lstsq(scaled, x, rcond=NEAR_A_LINE)[0]
    for least in SMALL_PARTS:
        kept, found = np.abs(full) > least * largest, np.zeros(len(full))
        found[kept] = np.linalg.lstsq(scaled[:, kept], x, rcond=None)[0] / sizes[kept]
        # Atoms are kept with fewer digits, and a repeated request has the same coefficients.
        tried.append(np.array([float(f"{value:.7g}") for value in found]))
    return max(tried, key=lambda one: _are_linear(x, A, one, SAME_RATIO).sum())


def _linear_function(X: Floats, A: Floats) -> tuple[int, Floats] | None:
    """Find a column of X (T, m, r) that is a linear function of A (T, m, q) in one of T sets of rows.

    Return its place, and the coefficients. Some rows may be apart: a square system of the first rows of each
    set is solved, and compared with others.
    """
    q = A.shape[2]
    sizes = np.abs(A).max(axis=(0, 1)) + (A == 0.0).all(axis=(0, 1))
    inverses = _short_inverses(A[:, :q] / sizes)
    finite = np.flatnonzero(np.isfinite(X).all(axis=(0, 1)))
    solved = inverses @ X[:, :q, finite] / sizes[:, None]
    same = _are_linear(X[:, q:, finite], A[:, q:], solved, NEAR_A_LINE)
    for k, one in np.argwhere((~same).sum(axis=1).T <= 1).tolist():
        return int(finite[k]), np.asarray(solved[one, :, k])
    return None


def _short_inverses(A: Floats) -> Floats:
    """Return matrices (T, q, q) that give the shortest solutions, since some parts may depend on others.

    Where no singular value is as small as those that such a solution leaves out, it is the only solution.
    """
    with suppress(np.linalg.LinAlgError):
        inverses = np.linalg.inv(A)
        # Norms of Frobenius are at least the largest singular values, of A and of its inverse.
        if (np.linalg.norm(A, axis=(1, 2)) * np.linalg.norm(inverses, axis=(1, 2)) < 1.0 / NEAR_A_LINE).all():
            return np.asarray(inverses)
    return np.asarray(np.linalg.pinv(A, rcond=NEAR_A_LINE))


# ----------------------------------------------------------------------------------------------------
# Combinations of sums that belong to few rows.


def find_isolated(
    spaces: WeightSpaces,
    first: int,
    few: int,
    persons: Ints | None = None,
    tolerated: Collection[int] = (),
    cleared: Collection[Quantity] = (),
) -> list[int]:
    """Return which sums from `first` on reveal, with earlier ones, something about at most `few` persons.

    Combinations of earlier sums do not count, and combinations of the `tolerated` sums do not. Sums of
    `cleared` quantities reveal nothing; see :func:`find_cleared`. Sums over groups of any quantity count as
    revealing where too many combinations would have to be searched.
    """
    judged: set[object] = set()
    for members in _components(spaces.sums, first):
        if next(iter(spaces.sums[members[0]]))[1] in cleared:
            continue
        key = shape_of_sums(spaces.sums, members, first)
        if key in judged:  # one component for several of the same shape
            continue
        judged.add(key)
        weights = ComponentWeights.of(spaces, members, few, persons)
        if weights is None or weights.have_small_shares():
            continue
        if found := _isolated_in(weights, first, tolerated):
            return found
    return []


def find_cleared(spaces: WeightSpaces, first: int, few: int, persons: Ints | None = None) -> set[Quantity]:
    """Return quantities of sums of which no combination belongs to at most `few` persons.

    Quantities without a sum from `first` on are left out.
    """
    cleared: set[Quantity] = set()
    judged: dict[object, bool] = {}
    for members in _components(spaces.sums, first):
        key = shape_of_sums(spaces.sums, members, first)
        if key not in judged:
            weights = ComponentWeights.of(spaces, members, few, persons)
            judged[key] = weights is None or weights.have_small_shares()
        if judged[key]:
            cleared.update(a for k in members for _, a in spaces.sums[k])
    return cleared


def adds_groups(spaces: WeightSpaces, first: int) -> bool:
    """Return whether sums by group from `first` on are no combinations of earlier ones."""
    members = [k for k, one in enumerate(spaces.sums) if any(a == GROUPS for _, a in one)]
    weights = ComponentWeights.of(spaces, members, spaces.n_rows, None) if members[-1:] >= [first] else None
    if weights is None:
        return False
    M, known = weights.M[:, 0], np.array(weights.members) < first
    M = M / np.linalg.norm(M, axis=1, keepdims=True)
    gram = M @ M.T
    rank, before = (np.linalg.matrix_rank(G, SAME_SPAN, True) for G in (gram, gram[known][:, known]))
    return bool(rank > before)


def _components(sums: Sequence[Polynomial], first: int) -> list[list[int]]:
    """Divide sums by the quantities that they share; those without a new sum are left out."""
    parent: dict[Quantity, Quantity] = {}

    def root(q: Quantity) -> Quantity:
        while (up := parent.get(q, q)) != q:
            parent[q] = q = parent.get(up, up)
        return q

    for one in sums:
        if len(one) > 1:
            first_of, *others = {root(a) for _, a in one}
            parent |= dict.fromkeys(others, first_of)
    members: dict[Quantity, list[int]] = defaultdict(list)
    for place, one in enumerate(sums):
        members[root(next(iter(one))[1])].append(place)
    return [found for found in members.values() if found[-1] >= first]


def shape_of_sums(sums: Sequence[Polynomial], members: list[int], first: int) -> object:
    """Return what decides about a component: its weights, without the names of its quantities.

    Counts, the quantity of no atoms, and groups are judged by other rules and keep their name.
    """
    names: dict[tuple[int, ...], int] = {(): 0, GROUPS: -1}
    if len(members) == len(sums[members[0]]) == 1:  # most quantities are summed once
        (((p, a), value),) = sums[members[0]].items()
        return p, value, names.get(a)
    parts = [
        (
            k >= first,
            frozenset((p, names.setdefault(a, len(names)), value) for (p, a), value in sums[k].items()),
        )
        for k in members
    ]
    return frozenset(parts)


@dataclass(frozen=True, slots=True, eq=False)
class ComponentWeights:
    """The weights of the sums that share quantities, by cells of rows.

    Parameters
    ----------
    members : list of int
        Places of the d sums.
    M : (d, Q, E) array
        Weights for each of the Q quantities in each of the E entries, which are cells, or parts of them that
        belong to persons with several versions; times the root of the number of rows.
    unit : (E,) array of int
        Units that are singled out together: the entries of one person, or one entry.
    persons : array
        Number of persons of every unit.
    small : (E,) array of bool
        Entries of units of at most `few` persons.
    few : int
    by_person : bool
        Whether persons have several entries.
    of_groups : bool
        Whether these are sums of any quantity by group: each group is a row of `M`.
    """

    members: list[int]
    M: Floats
    unit: Ints
    persons: Floats
    small: Bools
    few: int
    by_person: bool
    of_groups: bool

    @classmethod
    def of(
        cls, spaces: WeightSpaces, members: list[int], few: int, persons: Ints | None
    ) -> ComponentWeights | None:
        """Return the weights; None if no cell has few persons, so that no person can be singled out."""
        used = sorted({i for k in members for p, _ in spaces.sums[k] for i in p})
        first_with, cell = cells_of([spaces.patterns[i] for i in used], spaces.n_rows)
        held = {i: spaces.patterns[i].values[spaces.patterns[i].codes[first_with]] for i in used}
        there = np.zeros(len(first_with), dtype=np.bool_)
        for values in held.values():
            there |= values != 0.0
        entry, size, unit, persons_of = _entries(cell, len(first_with), persons)
        small = ((persons_of <= few) & (np.bincount(unit, there[entry], len(persons_of)) > 0.0))[unit]
        if not small.any():
            return None
        quantities = {
            a: k for k, a in enumerate(dict.fromkeys(a for m in members for _, a in spaces.sums[m]))
        }
        by_person, of_groups = len(unit) != len(persons_of), GROUPS in quantities
        root = np.sqrt(size)
        if of_groups:
            patterns = {k: p[0] for k in members for p, _ in spaces.sums[k]}
            groups = [(k, level) for k in members for level in spaces.patterns[patterns[k]].values if level]
            M = np.array([held[patterns[k]] == level for k, level in groups])[:, None, entry] * root
            return cls([k for k, _ in groups], M, unit, persons_of, small, few, by_person, of_groups)
        M = np.zeros((len(members), len(quantities), len(entry)))
        products: dict[tuple[int, ...], Floats] = {}
        for place, k in enumerate(members):
            for (p, a), value in spaces.sums[k].items():
                if p not in products:
                    product = math.prod((held[i] for i in p), start=np.ones(len(there)))
                    products[p] = (product if len(entry) == len(there) else product[entry]) * root
                M[place, quantities[a]] += value * products[p]
        if () in quantities and by_person:
            # A count says nothing of a person of whom all versions of a record count alike.
            first_of, counted = np.unique(unit, return_index=True)[1], M[:, quantities[()]]
            totals = np.zeros((len(members), len(persons_of)))
            for total, one in zip(totals, counted, strict=True):
                np.add.at(total, unit, one * root)
            M[:, quantities[()]] = 0.0
            M[:, quantities[()], first_of] = totals[:, unit[first_of]] / root[first_of]
        return cls(members, M, unit, persons_of, small, few, by_person, of_groups)

    def have_small_shares(self) -> bool:
        """Return whether no unit of few persons has a large share of a combination of the sums.

        Cross-products decide it, unless columns nearly depend on each other. Where there are many cells, they
        are divided into one sample more than a group has entries. One of the samples has no entry of the
        group; if every combination has a share in each sample, none belongs to the group.
        """
        d, Q, E = self.M.shape
        M = self.M.reshape(d, -1)
        basis = basis_of_sums(M)
        if basis is None:
            return False
        if not len(basis):  # products of indicators of rows that have no row in common
            return True
        samples = self.few + 1
        step = max(E // max(SAMPLE_CELLS, 4 * len(M)), samples)
        if not self.by_person and step >= 2 * samples:
            parts = (basis @ M.reshape(-1, Q, E)[:, :, k::step].reshape(len(M), -1) for k in range(samples))
            if all(np.linalg.eigvalsh(part @ part.T)[0] > 2.0 * ISOLATED for part in parts):
                return True
        small = M if self.small.all() else M.reshape(-1, Q, E)[:, :, self.small].reshape(len(M), -1)
        U = basis @ small
        unit = self.unit[self.small]
        share = np.bincount(np.tile(unit, Q), np.einsum("re,re->e", U, U), len(self.persons))
        return bool((share[unit] / self.persons[unit]).max() < MOST_SHARE / self.few)


def basis_of_sums(M: Floats) -> Floats | None:
    """Return the matrix (r, d) that takes sums M (d, m) to orthonormal ones, by their cross-products.

    None if sums nearly depend on each other, so that their cross-products do not tell.
    """
    length = np.sqrt(np.einsum("de,de->d", M, M))
    there = length > 0.0
    size, nonzero = length[there], M if there.all() else M[there]
    values, vectors = np.linalg.eigh(nonzero @ nonzero.T / np.outer(size, size))
    kept = values > NEW_DIRECTION**1.5
    if (values[~kept] > DEPENDENT).any():
        return None
    basis = np.zeros((int(kept.sum()), len(M)))
    basis[:, there] = (vectors[:, kept] / np.sqrt(values[kept]) / size[:, None]).T
    return basis


def _isolated_in(weights: ComponentWeights, first: int, tolerated: Collection[int]) -> list[int]:
    members, (d, Q, E) = weights.members, weights.M.shape
    M = weights.M.reshape(d, -1).T
    known = np.array([k < first for k in members])
    U, new = _basis(M, known)
    if new == U.shape[1]:
        return []
    allowed = [U[:, :new].reshape(Q, E, new)]
    if tolerated:
        chosen = M[:, [k in tolerated for k in members]]
        basis, _ = _basis(chosen, np.zeros(chosen.shape[1], dtype=np.bool_))
        allowed.append(basis.reshape(Q, E, basis.shape[1]))
    if weights.of_groups:  # only combinations that are zero in all but small cells can belong to few rows
        of_small = combinations_inside(U[weights.small])
        if len(of_small) == len(combinations_inside(U[weights.small, :new])):
            return []
        U = U @ of_small.T
    direction = _isolating(weights, U.reshape(Q, E, -1), allowed)
    if direction is None:
        return []
    coefficients = np.linalg.lstsq(M, U @ direction, rcond=None)[0]
    weight = np.abs(coefficients) * np.linalg.norm(M, axis=0)
    involved = [k for k, one in zip(members, weight, strict=True) if k >= first and one > 0.1 * weight.max()]
    return involved or [k for k in members if k >= first]


def cells_of(patterns: Sequence[Pattern], n_rows: int) -> tuple[Ints, Ints]:
    """Return a row of each cell of rows with equal values, (C,), and the cell of each row, (n_rows,)."""
    code, span = np.zeros(n_rows, dtype=np.int64), 1
    for one in patterns:
        if span * len(one.values) > LARGEST_SPAN:
            code = np.unique(code, return_inverse=True)[1].ravel()
            span = n_rows
        code = code * len(one.values) + one.codes
        span *= len(one.values)
    if span > 4 * n_rows:
        _, first, cell = np.unique(code, return_index=True, return_inverse=True)
        return first, cell.ravel()
    first = np.full(span, -1, dtype=np.int64)
    first[code[::-1]] = np.arange(n_rows)[::-1]
    there = np.flatnonzero(first >= 0)
    place = np.empty(span, dtype=np.int64)
    place[there] = np.arange(len(there))
    return first[there], place[code]


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


def _basis(M: Floats, known: Bools) -> tuple[Floats, int]:
    """Return orthonormal columns that span those of M (m, d), known ones first, and how many are known."""
    U = new_directions(M[:, known], np.zeros((len(M), 0)))
    return np.hstack([U, new_directions(M[:, ~known], U)]), U.shape[1]


def new_directions(M: Floats, span: Floats, least: float = NEW_DIRECTION) -> Floats:
    """Return orthonormal columns for what those of `span` (m, r) leave of M (m, d), scaled to length one."""
    length = np.linalg.norm(M, axis=0)
    rest = M[:, length > 0.0] / length[length > 0.0]
    for _ in range(2):
        rest = rest - span @ (span.T @ rest)
    return orthonormal_columns(rest, least)


def orthonormal_columns(M: Floats, least: float = NEW_DIRECTION) -> Floats:
    """Return orthonormal columns that span those of M (m, d)."""
    if not M.shape[1]:
        return M
    U, s, _ = np.linalg.svd(M, full_matrices=False)
    return np.asarray(U[:, s > least])


def _isolating(weights: ComponentWeights, U: Floats, allowed: Sequence[Floats]) -> Floats | None:
    """Return a combination of orthonormal columns, (Q, E, r), on units of at most `few` persons.

    Combinations of the `allowed` ones, (Q, E, s) each, do not count.
    """
    unit, persons, few = weights.unit, weights.persons, weights.few
    share = np.bincount(unit, np.einsum("qer,qer->e", U, U), len(persons))
    units = np.unique(unit[weights.small])
    units = units[share[units] > ISOLATED]
    # Of the units that hold a combination alone, one has a share of 1 / few for each of its persons.
    seeds = units[share[units] >= (1.0 - ISOLATED) * persons[units] / few]
    seeds = seeds[np.argsort(-share[seeds], kind="stable")]
    some = np.arange(U.shape[2]) == 0.0  # instead of a search that could not be complete
    if weights.of_groups and len(units) > MOST_SEEDS:
        return np.asarray(some, dtype=np.float64)
    connected = _connected(U, unit, units) if weights.of_groups else units >= 0
    for seed in seeds[:MOST_SEEDS].tolist():
        near = units[connected == connected[units == seed]]
        others = _partners(U, unit, near, seed, persons, few)
        if weights.of_groups and len(others) > MOST_PARTNERS:
            return np.asarray(some, dtype=np.float64)
        for count in range(min(len(others[:MOST_PARTNERS]) + 1, few)):
            for chosen in combinations(others[:MOST_PARTNERS], count):
                group = [seed, *chosen]
                if persons[group].sum() > few or share[group].sum() < 1.0 - ISOLATED:
                    continue
                direction = _new_alone(U, allowed, np.isin(unit, group))
                if direction is not None:
                    return direction
    return None


def _connected(U: Floats, unit: Ints, units: Ints) -> Ints:
    """Return a number for each of the units, equal for those that combinations have in common."""
    inside = np.flatnonzero(np.isin(unit, units))
    V = U[:, inside].transpose(1, 0, 2).reshape(len(inside), -1)
    linked = (np.abs(V @ V.T) > SAME_SPAN**0.5) | (unit[inside, None] == unit[inside])
    label = connected_components(linked)[1]
    return np.asarray(label[np.searchsorted(unit[inside], units, sorter=np.argsort(unit[inside]))])


def _partners(U: Floats, unit: Ints, units: Ints, seed: int, persons: Floats, few: int) -> list[int]:
    """Return the units that may form a group with a unit, those that share most with it first."""
    near = units[(persons[units] + persons[seed] <= few) & (units != seed)]
    if not len(near):
        return []
    own = U[:, unit == seed].reshape(-1, U.shape[2])
    both = np.einsum("qer,sr->qes", U, own)
    coupling = np.bincount(unit, np.einsum("qes,qes->e", both, both), len(persons))
    return [*map(int, near[np.argsort(-coupling[near], kind="stable")])]


def _new_alone(U: Floats, allowed: Sequence[Floats], inside: Bools) -> Floats | None:
    """Return a combination that belongs to the entries `inside` alone, if it is none of the allowed ones."""
    V = U[:, inside].reshape(-1, U.shape[2])
    directions = combinations_inside(V)
    if not len(directions):
        return None
    vectors = directions @ V.T
    for one in allowed:
        W = one[:, inside].reshape(len(V), one.shape[2])
        known = combinations_inside(W) @ W.T
        # Vectors on these rows, so that their orthonormal basis is small.
        Q = np.linalg.svd(known, full_matrices=False)[2] if len(known) else known
        vectors = vectors - (vectors @ Q.T) @ Q
    length = np.linalg.norm(vectors, axis=1)
    return np.asarray(directions[length.argmax()]) if length.max() > NEW_ON_ROWS else None


def combinations_inside(V: Floats) -> Floats:
    """Return the combinations, (k, r), of orthonormal columns that are zero but in their rows V (m, r)."""
    if not V.shape[1]:
        return np.zeros((0, 0))
    _, s, directions = np.linalg.svd(V, full_matrices=False)
    return np.asarray(directions[s**2 >= 1.0 - ISOLATED])
