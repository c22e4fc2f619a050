"""Release history: the groups of rows behind all earlier sums, and combinations of these sums.

A sum over a group of rows is a row of zeros and ones that is multiplied with the table. Differences, and any
other combinations, of sums are combinations of these rows. A combination that is nonzero in fewer than
`min_count` entries is a sum over fewer rows than the owner allows. A comparison of pairs is not enough: four
sums, no two of which differ by few rows, can have an alternating sum that is one row.

A record that was corrected is in the history twice, as it was and as it is: sums before and after differ by
both. They are versions of one person, and count as one.

Rows that are in the same groups are one *cell*. So the size of the history grows with the number of different
divisions and not with the number of releases: 10,000 unions of 60 patterns are 60 cells and 60 groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.linalg import qr

from fedstat.federation.audit.ledger_file import ANSWERED_FILENAME
from fedstat.federation.disclosure.weight_spaces import Expressions, WeightSpaces
from fedstat.federation.state_formats import HISTORY
from fedstat.federation.tables.aligned_table import (
    KEY_MARK,
    MARK_BYTES,
    AlignedTable,
    MarkForm,
    order_of,
    places_of,
    recognize_rows,
    row_fingerprints,
    unlabeled,
)
from fedstat.federation.tables.sql_table import utc_timestamp
from fedstat.federation.tables.table import Table, read_at
from fedstat.typing import Array, Bools, Floats, Ints

ZERO_TOLERANCE = 1e-7
"""Relative size below which a combination counts as zero. Larger is safer: nearly zero is nearly revealed."""
MOST_REQUESTS = 8
"""Requests whose complete rows are remembered while a site runs."""
ROUNDING = 1e-6
"""Persons by which sums of shares may be off."""


@dataclass(frozen=True, slots=True, eq=False)
class ReleasedGroups:
    """Groups of rows over which sums were released.

    Parameters
    ----------
    cells : (n_rows,) array of int
        Cell of every row of the table.
    basis : (r, c) array of bool
        Independent groups that every group released so far is a combination of, as sets of cells.
    spaces : WeightSpaces
        What was summed over rows, as weights times quantities.
    persons : (n_rows,) array of int, optional
        Person of every row, if some have several versions.
    sets : (n_rows,) array of int
        Class of every row: rows of one class were together in all analyses over rows; 0 for rows in none.
    """

    cells: Ints
    basis: Bools
    spaces: WeightSpaces
    persons: Ints | None = None
    sets: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @classmethod
    def none(cls, n_rows: int) -> ReleasedGroups:
        """Return the history before the first release: all rows are one cell."""
        return cls(
            np.zeros(n_rows, dtype=np.int64),
            np.zeros((0, 1), dtype=np.bool_),
            WeightSpaces(n_rows),
            sets=np.zeros(n_rows, dtype=np.int64),
        )

    @property
    def sizes(self) -> Array:
        """Number of persons of every cell, (c,): each released version of a record counts for its share."""
        shares = None
        if self.persons is not None:
            used: Bools = np.asarray(self.basis.any(axis=0))
            released = used[self.cells]
            versions = np.bincount(self.persons, released)
            shares = 1.0 / np.maximum(versions, 1.0)[self.persons]
        return np.bincount(self.cells, shares, minlength=self.basis.shape[1])

    @property
    def most_versions(self) -> int:
        """Largest number of versions of one record."""
        return 1 if self.persons is None else int(np.bincount(self.persons).max(initial=1))

    def with_groups(self, code: Ints) -> ReleasedGroups:
        """Return the history after further sums by group; (n_rows,), -1 for rows in no group."""
        # Rows that are gone come last, and are in no group any more.
        code = np.concatenate([code, np.full(len(self.cells) - len(code), -1)])
        c, G = self.basis.shape[1], int(code.max(initial=-1)) + 1
        pair = self.cells * (G + 1) + (code + 1)
        counts = np.bincount(pair, minlength=c * (G + 1))
        there = np.flatnonzero(counts)
        new_cell = np.full(len(counts), -1, dtype=np.int64)
        new_cell[there] = np.arange(len(there))
        old, group = there // (G + 1), there % (G + 1) - 1
        request = group == np.arange(G)[:, None]
        basis = independent_groups(self.basis[:, old], request[request.any(axis=1)])
        return replace(self, cells=new_cell[pair], basis=basis)

    def with_set(self, used: Bools) -> ReleasedGroups:
        """Return the history after an analysis of these rows, (n_rows,); itself if no class is divided."""
        inside = np.append(used, np.zeros(len(self.cells) - len(used), dtype=bool))
        code = 2 * self.sets + inside
        there = np.bincount(code, minlength=2) > 0
        there = np.append(there, np.zeros(len(there) % 2, dtype=bool))
        if not there[1] and not (there[::2] & there[1::2]).any():
            return self
        # Rows that were in no analysis have the number 0.
        return replace(self, sets=(np.cumsum(there) - there[0])[code])

    def carried(self, places: Ints) -> tuple[ReleasedGroups, Ints]:
        """Return the history of a table with other rows, and which rows are gone.

        `places` (n,) are the positions of its rows among the earlier ones, -1 for new ones, which are in no
        sum yet. Rows that are gone stay in their groups, after all others: a sum without them differs from
        one with them.
        """
        gone = np.setdiff1d(np.arange(len(self.cells)), places)
        new = np.zeros((len(self.basis), 1), dtype=np.bool_)
        here = np.where(places >= 0, self.cells[places], self.basis.shape[1])
        basis = np.concatenate([self.basis, new], axis=1) if (places < 0).any() else self.basis
        sets = np.append(self.sets, 0)[np.append(places, gone)]  # -1 for new rows
        cells, spaces = np.concatenate([here, self.cells[gone]]), self.spaces.carried(places, gone)
        return ReleasedGroups(cells, basis, spaces, sets=sets), gone

    def fewest_isolated(self, min_count: int, known: int = 0) -> int:
        """Return the number of persons that a combination of the sums isolates, if below `min_count`; else 0.

        Combinations that vanish on all cells of `min_count` rows or more are a space N. If it has a basis of
        vectors with disjoint supports, every combination's support is a union of these, and the smallest one
        decides. Otherwise 1 is returned without a search for the vector with the fewest entries, which is
        hard: few real divisions need it, and refusing them is safe.

        Combinations of the first `known` groups of the basis were released before, possibly under a smaller
        minimum, and do not count: only what the other groups add can be refused.
        """
        sizes = self.sizes
        small = sizes < min_count - ROUNDING
        if not small.any() or not len(self.basis):
            return 0
        groups = self.basis.astype(np.float64)
        U, s, _ = np.linalg.svd(groups[:, ~small], full_matrices=True)
        rank = int((s > ZERO_TOLERANCE * max(s.max(initial=0.0), 1.0)).sum())
        if rank == len(groups):
            return 0
        isolating = U[:, rank:].T
        reduced = row_echelon(isolating @ groups[:, small])
        if known:
            # Combinations without a part in the groups that are new.
            V, t, _ = np.linalg.svd(isolating[:, known:], full_matrices=True)
            before = V[:, int((t > ZERO_TOLERANCE).sum()) :].T @ isolating @ groups[:, small]
            if len(before) == len(isolating):
                return 0
            Q = np.linalg.qr(before.T)[0]
            rest = reduced - (reduced @ Q) @ Q.T
            added = np.linalg.norm(rest, axis=1) > ZERO_TOLERANCE * np.linalg.norm(reduced, axis=1)
        else:
            added = np.ones(len(reduced), dtype=np.bool_)
        supports = np.abs(reduced) > ZERO_TOLERANCE
        if (supports.sum(axis=0) > 1).any():
            return 1
        rows = supports[added] @ sizes[small]
        fewest = float(rows.min(initial=min_count))
        return int(np.ceil(fewest - ROUNDING)) if fewest < min_count - ROUNDING else 0

    @property
    def groups(self) -> Bools:
        """Rows of every group of the basis: (r, n_rows)."""
        return self.basis[:, self.cells]

    def to_arrays(self) -> dict[str, Array]:
        """Return the arrays by name, for a file."""
        packed = np.packbits(self.basis, axis=1)
        reported: dict[str, Array] = {
            "cells": self.cells.astype(np.int32),
            "basis": packed,
            "c": np.array(self.basis.shape),
        }
        reported["sets"] = self.sets.astype(np.int32)
        return reported | self.spaces.to_arrays()

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> ReleasedGroups:
        """Restore the result of :meth:`to_arrays`; ValueError if the arrays do not belong together."""
        r, c = (int(size) for size in arrays["c"])
        if arrays["basis"].shape != (r, (c + 7) // 8):
            raise ValueError("the release history is not complete")
        cells = np.asarray(arrays["cells"], dtype=np.int64)
        basis = np.unpackbits(np.asarray(arrays["basis"], dtype=np.uint8), axis=1, count=c).astype(np.bool_)
        if basis.shape != (r, c) or (len(cells) and not 0 <= cells.min() <= cells.max() < c):
            raise ValueError("the release history is not complete")
        spaces = WeightSpaces.from_arrays(arrays, len(cells))
        # Before classes were stored, rows in the same groups were together in all analyses.
        together: Bools = np.asarray(basis.any(axis=0))
        sets = arrays["sets"] if "sets" in arrays else np.where(together[cells], cells + 1, 0)
        if sets.shape != cells.shape or sets.min(initial=0) < 0:
            raise ValueError("the release history is not complete")
        return cls(cells, basis, spaces, sets=np.asarray(sets, dtype=np.int64))


@dataclass(slots=True)
class ReleaseHistory:
    """The release history of a site: the groups of rows behind all releases; None before the first.

    `marks` (n_rows, 16) are digests of the table's rows, in an `order` of them, once they are needed; `gone`
    (k, 16) those of rows that it had earlier. `changed` is the time since which the table has other records
    than those of earlier releases, empty if it has the same; `changes` counts the records that were
    corrected, added and removed at the last reading. `is_new` means that the stored history is an earlier
    one, `is_converted` that it has the format of an earlier version.
    """

    released: ReleasedGroups | None = None
    gone: Array = field(default_factory=lambda: np.empty((0, MARK_BYTES), dtype=np.uint8))
    marks: Array | None = None
    order: str = ""
    changed: str = ""
    changes: tuple[int, int, int] = (0, 0, 0)
    is_new: bool = False
    is_converted: bool = False
    _rows: dict[str, tuple[Bools, Ints, Bools | None]] = field(default_factory=dict)

    def rows_of(
        self, request: str, complete: Callable[[], Bools], leave_out: Callable[[Bools], Bools]
    ) -> Bools | None:
        """Return the rows that a request uses, None for all complete ones; again after other analyses."""
        assert self.released is not None
        sets = self.released.sets
        found = self._rows.get(request)
        if found is None or len(found[0]) + len(self.gone) != len(sets) or found[1] is not sets:
            rows = complete() if found is None else found[0]
            self._rows.pop(request, None)
            while len(self._rows) >= MOST_REQUESTS:
                del self._rows[next(iter(self._rows))]
            kept = leave_out(rows)
            self._rows[request] = found = rows, sets, None if kept is rows else kept
        return found[2]

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], table: Table, secret: bytes) -> ReleaseHistory:
        """Restore the result of :meth:`to_arrays`, for a table that may have other rows since.

        ValueError if the arrays do not belong together, EngineError if a later version wrote them.
        """
        arrays, is_converted = convert_history(arrays, table)
        released, known = ReleasedGroups.from_arrays(arrays), arrays.get("marks")
        if known is None:
            return cls(released, order=order_of(table), is_new=is_converted, is_converted=is_converted)
        if known.shape != (len(released.cells), MARK_BYTES):
            raise ValueError("the release history is not complete")
        present, form = MarkForm.of(table), MarkForm.of(table)
        if "form" in arrays:
            form = MarkForm.from_array(arrays["form"])
        marks = row_fingerprints(table, secret)
        same = form == present
        places = places_of(known, marks) if same else recognize_rows(known, form, table, secret)
        released, gone = released.carried(places)
        # the rows that were there at the last reading come first
        lately = gone[gone < int(arrays.get("held", np.array(len(known))))]
        found = cls(released, known[gone], marks, order_of(table), is_converted=is_converted)
        found.changed = arrays["changed"].tobytes().decode() if "changed" in arrays else ""
        if len(lately) or (places < 0).any():
            found.changed = read_at(table) or utc_timestamp()
            n_new, both = int((places < 0).sum()), np.zeros(0, dtype=np.bool_)
            if form.by_key:
                both = np.isin(_key_marks(known[lately]), _key_marks(marks[places < 0]))
            corrected = int(both.sum())
            found.changes = corrected, n_new - corrected, len(lately) - corrected
        found.released = found._with_persons(released, present.by_key)
        # Stored at once: the next comparison is then with these records, in the form of their marks. Without
        # a key, added records that were not released yet may go again.
        found.is_new = is_converted or (present.by_key and (not same or found.changes != (0, 0, 0)))
        return found

    def _with_persons(self, released: ReleasedGroups, by_key: bool) -> ReleasedGroups:
        """Add the person of every row, by its key, if some have several versions."""
        if self.marks is None or not len(self.gone) or not by_key:
            return replace(released, persons=None)
        keys = _key_marks(np.concatenate([self.marks, self.gone]))
        return replace(released, persons=np.unique(keys, return_inverse=True)[1])

    def to_arrays(self, table: Table, secret: bytes) -> dict[str, Array]:
        """Return the arrays by name, for a file."""
        if self.released is None:
            return {}
        if self.marks is None:
            self.marks = row_fingerprints(table, secret)
        return self.released.to_arrays() | {
            **HISTORY.stamp_arrays(),
            "marks": np.concatenate([self.marks, self.gone]),
            "held": np.array(len(self.marks)),
            "form": MarkForm.of(table).to_array(),
            "changed": np.frombuffer(self.changed.encode(), dtype=np.uint8),
        }

    def follow(self, table: Table, secret: bytes) -> None:
        """Reorder the history as the rows of the table are now."""
        if order_of(table) == self.order and (self.marks is not None or not self.order):
            return
        marks = row_fingerprints(table, secret)
        if self.released is not None and self.marks is not None:
            known = np.concatenate([self.marks, self.gone])
            released, gone = self.released.carried(places_of(known, marks))
            self.marks, self.gone = marks, known[gone]
            self.released = self._with_persons(released, MarkForm.of(table).by_key)
        self.marks, self.order = marks, order_of(table)


def _name_mark_form(arrays: dict[str, Array], table: Table) -> dict[str, Array]:
    """Format 0: where the form of the marks is missing, they are of complete records without their key."""
    if "marks" in arrays and "form" not in arrays:
        form = replace(MarkForm.of(table), by_key=isinstance(unlabeled(table), AlignedTable))
        arrays["form"] = form.to_array()
    return arrays


def _express_columns(arrays: dict[str, Array], table: Table) -> dict[str, Array]:
    """Format 1: a basis of all released columns, (n, k), becomes k weights under which rows were counted.

    Which quantities were summed is not known, so a sum is compared with these columns as if it were a count.
    """
    columns = np.asarray(arrays.pop("columns", np.zeros((0, 0))), dtype=np.float64)
    if columns.size:
        arrays |= WeightSpaces.of_weights(columns).to_arrays()
    return arrays


def _separate_patterns(arrays: dict[str, Array], table: Table) -> dict[str, Array]:
    """Format 2: the values of all patterns by cell become a code of each row for each pattern."""
    if "weight patterns" in arrays:
        cells, values = arrays.pop("weight cells"), arrays.pop("weight patterns")
        columns = WeightSpaces.of_weights(np.asarray(values, dtype=np.float64)[cells]).to_arrays()
        arrays = columns | arrays  # the sums are those that were stored
    return arrays


def _enter_levels_and_weights(arrays: dict[str, Array], table: Table) -> dict[str, Array]:
    """Format 3: digests of levels by which rows were summed become counts; weights of estimates become sums.

    They are (n, s) and (n, q) arrays.
    """
    arrays.pop("level names", None)
    levels, weights = (arrays.pop(name, np.zeros((0, 0))) for name in ("levels", "weights"))
    if levels.size or weights.size:
        made = Expressions(WeightSpaces.from_arrays(arrays, max(len(levels), len(weights))))
        sums = [made.rows(one == level) for one in levels.T for level in np.unique(one[one > 0])]
        sums += [made.estimate(np.asarray(one, dtype=np.float64)) for one in weights.T]
        arrays |= made.result().with_sums(sums).to_arrays()
    return arrays


def _without_columns(arrays: dict[str, Array], table: Table) -> dict[str, Array]:
    """Format 4: from which columns atoms are computed is not stored; later requests name them."""
    return arrays


CONVERSIONS: Mapping[int, Callable[[dict[str, Array], Table], dict[str, Array]]] = {
    0: _name_mark_form,
    1: _express_columns,
    2: _separate_patterns,
    3: _enter_levels_and_weights,
    4: _without_columns,
}
"""How the arrays of each earlier format become those of the next one, for the present table."""


def convert_history(arrays: Mapping[str, Array], table: Table) -> tuple[dict[str, Array], bool]:
    """Return stored arrays in the present format, and whether they had an earlier one.

    EngineError if a later version wrote them.
    """
    arrays, number = dict(arrays), HISTORY.read_arrays(arrays, ANSWERED_FILENAME)
    for earlier in range(number, HISTORY.number):
        arrays = CONVERSIONS[earlier](arrays, table)
    return arrays, number < HISTORY.number


def _key_marks(marks: Array) -> Array:
    """Return the part of marks that depends on the key: (n, 16) bytes -> (n,)."""
    return np.ascontiguousarray(marks[:, :KEY_MARK]).view(np.uint64).ravel()


def independent_groups(basis: Bools, more: Bools) -> Bools:
    """Add to independent rows (r, c) those of (G, c) that are no combination of others."""
    Q = _orthonormal(basis)
    rest = more.astype(np.float64)
    rest -= (rest @ Q) @ Q.T
    size = np.sqrt(np.maximum(more.sum(axis=1), 1.0))
    open_ = np.flatnonzero(np.linalg.norm(rest, axis=1) > ZERO_TOLERANCE * size)
    if not len(open_):
        return basis
    # The pivots of the rest are rows that add a direction each.
    R, pivot = qr(rest[open_].T, mode="r", pivoting=True)
    sizes = np.abs(np.diag(R))
    added = open_[pivot[: int((sizes > ZERO_TOLERANCE * max(sizes.max(), 1.0)).sum())]]
    return np.concatenate([basis, more[added]])


def _orthonormal(basis: Bools) -> Floats:
    """Return orthonormal columns (c, r) that span the groups."""
    Q, _ = np.linalg.qr(basis.astype(np.float64).T)
    return np.asarray(Q, dtype=np.float64)


def row_echelon(A: Floats) -> Floats:
    """Reduced row echelon form by complete pivoting in each step; rows that vanish are left out."""
    A, used = A.copy(), 0
    free = np.ones(A.shape[1], dtype=np.bool_)
    while used < len(A) and free.any():
        part = np.abs(A[used:]) * free
        i, j = divmod(int(part.argmax()), part.shape[1])
        if part[i, j] <= ZERO_TOLERANCE:
            break
        A[[used, used + i]] = A[[used + i, used]]
        A[used] /= A[used, j]
        others = np.arange(len(A)) != used
        A[others] -= np.outer(A[others, j], A[used])
        free[j] = False
        used += 1
    return A[:used]
