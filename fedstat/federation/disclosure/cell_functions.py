"""Sums of functions of one column over few rows: how many a site releases.

A few functions of a column, such as x, x^2 and sqrt(x), determine its values in a cell of few rows: from four
sums over seven persons follow their seven ages. So the sums of functions of one column that, alone or
combined, rest on some of the rows are at most a share of these rows, like the sums over all rows
(:mod:`fedstat.federation.disclosure.column_sums`).

Which sums these are follows from the release history. For a set S of cells, the combinations of sums that are
zero outside of S form a space; its dimension is the number of sums over S. If it is above a share of the rows
of S, so is the sum of leverages over S, since each combination has a leverage of one there. Hence a cell of S
has a leverage above this share, and most columns are cleared by the leverages alone. Sets
of as many rows as a site whose own fit is shown are judged as such a site.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from fedstat.federation.disclosure.weight_spaces import (
    ISOLATED,
    ComponentWeights,
    WeightSpaces,
    basis_of_sums,
    combinations_inside,
    orthonormal_columns,
    shape_of_sums,
)
from fedstat.typing import Bools, Floats, Ints


def find_cell_functions(
    spaces: WeightSpaces,
    first: int,
    share: float,
    most: int,
    persons: Ints | None,
    has_many_values: Callable[[str], bool],
) -> tuple[str, int, int] | None:
    """Find a column of which sums from `first` on add too many over some of its rows.

    Parameters
    ----------
    spaces : WeightSpaces
    first : int
        The sums before were released earlier.
    share : float
        Most sums for each row.
    most : int
        Rows from which on a set is not examined.
    persons : (n_rows,) array of int, optional
        The person of each row, if some have several.
    has_many_values : callable
        Tells whether a column has many numbers, and not few or other values.

    Returns
    -------
    tuple of str, int and int, or None
        The column, and how many sums of it there are over how many rows.
    """
    new = {i for one in spaces.sums[first:] for _, a in one for i in a if i >= 0}
    with_atom: dict[int, set[int]] = defaultdict(set)
    for k, one in enumerate(spaces.sums):
        for i in {i for _, a in one for i in a}:
            with_atom[i].add(k)

    def sums_of(atoms: set[int]) -> list[int]:
        """List the sums of functions of these atoms alone."""
        found = sorted(set().union(*(with_atom[i] for i in atoms)))
        return [k for k in found if all(atoms.issuperset(a) for _, a in spaces.sums[k])]

    def weights_of(members: list[int]) -> _Sums | None:
        """Return the weights of sums; None if no cell is small enough."""
        if not members or members[-1] < first:
            return None
        weights = ComponentWeights.of(spaces, members, min(int(len(members) / share), most - 1), persons)
        if weights is None:
            return None
        quantities = dict.fromkeys(a for k in members for _, a in spaces.sums[k])
        kept = [q for q, a in enumerate(quantities) if a]
        return _Sums(weights.M[:, kept], np.array(members) < first, weights.unit, weights.persons)

    clear: set[object] = set()
    for column in dict.fromkeys(name for i in sorted(new) for name in spaces.columns[i]):
        atoms = {i for i, names in enumerate(spaces.columns) if column in names}
        members = sums_of(atoms)
        if not members or members[-1] < first:
            continue
        shape = shape_of_sums(spaces.sums, members, first)
        if shape in clear:  # one column for several of the same shape
            continue
        judged = weights_of(members)
        if judged is None or not judged.may_exceed(share):
            clear.add(shape)
        elif has_many_values(column):
            others = {name for i in atoms for name in spaces.columns[i]} - {column}
            many = {name for name in others if has_many_values(name)}
            judged = weights_of(sums_of({i for i in atoms if not many & set(spaces.columns[i])}))
            for sums, rows in judged.exceeding(share, most) if judged else ():
                return column, sums, rows
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """Sums of functions of one column: `M` (d, Q, E) as in :class:`ComponentWeights`, without counts.

    Of these, `known` (d,) were released before.
    """

    M: Floats
    known: Bools
    unit: Ints
    persons: Floats

    def may_exceed(self, share: float) -> bool:
        """Return whether a cell has a leverage that is a large share of its rows."""
        M = self._flat
        basis = basis_of_sums(M)
        if basis is None:
            return True
        return bool(self._above((basis @ M).T.reshape(*self.M.shape[1:], len(basis)), share).any())

    def exceeding(self, share: float, most: int) -> Iterator[tuple[int, int]]:
        """Yield numbers of sums and rows of sets of cells with more sums than `share` of their rows."""
        span, before = self._span(self._flat), self._span(self._flat[self.known])
        units = np.flatnonzero(self._above(span, share))
        for chosen in [units, *(units[[k]] for k in range(len(units)))]:
            inside = self._support(span, np.isin(self.unit, chosen))
            rows = float(self.persons[np.unique(self.unit[inside])].sum())
            sums = _alone(span, inside).shape[2]
            if rows < most and sums > max(share * rows, _alone(before, inside).shape[2]):
                yield sums, round(rows)

    @property
    def _flat(self) -> Floats:
        """The sums as (d, Q E)."""
        return self.M.reshape(len(self.M), -1)

    def _span(self, M: Floats) -> Floats:
        """Orthonormal columns (Q, E, r) that span sums (d, Q E)."""
        U = orthonormal_columns(M.T)
        return U.reshape(*self.M.shape[1:], U.shape[1])

    def _above(self, span: Floats, share: float) -> Bools:
        leverage = np.bincount(self.unit, np.einsum("qer,qer->e", span, span), len(self.persons))
        return np.asarray(leverage > share * self.persons)

    def _support(self, span: Floats, inside: Bools) -> Bools:
        """Entries that combinations on the entries `inside` alone belong to."""
        found = _alone(span, inside)
        return np.asarray(inside & (np.einsum("qek,qek->e", found, found) > ISOLATED**2))


def _alone(span: Floats, inside: Bools) -> Floats:
    """Return combinations (Q, E, k) of orthonormal columns (Q, E, r) that are zero but `inside`, (E,)."""
    Q, _, r = span.shape
    return span @ combinations_inside(span[:, inside].reshape(Q * int(inside.sum()), r)).T
