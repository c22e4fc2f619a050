"""Release history: what a site has summed over its rows, in all sessions, and how it is stored.

Sums are weights times quantities (:mod:`fedstat.federation.disclosure.weight_spaces`). A comparison of pairs
is not enough: four sums, no two of which differ by few rows, can have an alternating sum that is one row.

A record that was corrected is in the history twice, as it was and as it is: sums before and after differ by
both. They are versions of one person, and count as one.

Sums that are combinations of earlier ones are not stored: 10,000 unions of 60 patterns are one division.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from fedstat.federation.audit.ledger_file import ANSWERED_FILENAME
from fedstat.federation.disclosure.weight_spaces import Expressions, WeightSpaces, find_isolated
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
from fedstat.typing import Array, Bools, Ints

ResultT = TypeVar("ResultT")

MOST_REQUESTS = 32
"""Requests whose complete rows are remembered while a site runs."""


@dataclass(frozen=True, slots=True, eq=False)
class ReleasedSums:
    """What was summed over rows.

    Parameters
    ----------
    spaces : WeightSpaces
        Weights times quantities.
    sets : (n_rows,) array of int
        Class of every row: rows of one class were together in all analyses over rows; 0 for rows in none.
    persons : (n_rows,) array of int, optional
        Person of every row, if some have several versions.
    """

    spaces: WeightSpaces
    sets: Ints
    persons: Ints | None = None

    @classmethod
    def none(cls, n_rows: int) -> ReleasedSums:
        """Return the history before the first release."""
        return cls(WeightSpaces(n_rows), np.zeros(n_rows, dtype=np.int64))

    @property
    def n_rows(self) -> int:
        """Rows of the table, and those that are gone, which come last."""
        return self.spaces.n_rows

    def with_groups(self, code: Ints) -> ReleasedSums:
        """Return the history after further sums by group; see :meth:`WeightSpaces.with_groups`."""
        return replace(self, spaces=self.spaces.with_groups(code))

    def isolates(self, least: int, known: ReleasedSums | None = None) -> bool:
        """Return whether sums, not those `known` alone, reveal something about fewer than `least` persons."""
        first = 0 if known is None else len(known.spaces.sums)
        return bool(least > 1 and find_isolated(self.spaces, first, least - 1, self.persons))

    def with_set(self, used: Bools) -> ReleasedSums:
        """Return the history after an analysis of these rows, (n_rows,); itself if no class is divided."""
        inside = np.append(used, np.zeros(self.n_rows - len(used), dtype=bool))
        code = 2 * self.sets + inside
        there = np.bincount(code, minlength=2) > 0
        there = np.append(there, np.zeros(len(there) % 2, dtype=bool))
        if not there[1] and not (there[::2] & there[1::2]).any():
            return self
        # Rows that were in no analysis have the number 0.
        return replace(self, sets=(np.cumsum(there) - there[0])[code])

    def carried(self, places: Ints) -> tuple[ReleasedSums, Ints]:
        """Return the history of a table with other rows, and which rows are gone.

        `places` (n,) are the positions of its rows among the earlier ones, -1 for new ones, which are in no
        sum yet. Rows that are gone stay in their sums, after all others: a sum without them differs from one
        with them.
        """
        gone = np.setdiff1d(np.arange(self.n_rows), places)
        sets = np.append(self.sets, 0)[np.append(places, gone)]  # -1 for new rows
        return ReleasedSums(self.spaces.carried(places, gone), sets), gone

    def to_arrays(self) -> dict[str, Array]:
        """Return the arrays by name, for a file."""
        return {"sets": self.sets.astype(np.int32), **self.spaces.to_arrays()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> ReleasedSums:
        """Restore the result of :meth:`to_arrays`; ValueError if the arrays do not belong together."""
        sets = np.asarray(arrays["sets"], dtype=np.int64)
        if sets.ndim != 1 or sets.min(initial=0) < 0:
            raise ValueError("the release history is not complete")
        return cls(WeightSpaces.from_arrays(arrays, len(sets)), sets)


@dataclass(slots=True)
class ReleaseHistory:
    """The release history of a site: the groups of rows behind all releases; None before the first.

    `marks` (n_rows, 16) are digests of the table's rows, in an `order` of them, once they are needed; `gone`
    (k, 16) those of rows that it had earlier. `changed` is the time since which the table has other records
    than those of earlier releases, empty if it has the same; `changes` counts the records that were
    corrected, added and removed at the last reading. `is_new` means that the stored history is an earlier
    one, `is_converted` that it has the format of an earlier version.
    """

    released: ReleasedSums | None = None
    gone: Array = field(default_factory=lambda: np.empty((0, MARK_BYTES), dtype=np.uint8))
    marks: Array | None = None
    order: str = ""
    changed: str = ""
    changes: tuple[int, int, int] = (0, 0, 0)
    is_new: bool = False
    is_converted: bool = False
    _rows: dict[str, tuple[Bools, Ints | None, Bools | None]] = field(default_factory=dict)
    _of_table: dict[Hashable, Any] = field(default_factory=dict)

    def rows_of(
        self, request: str, complete: Callable[[], Bools], leave_out: Callable[[Bools], Bools]
    ) -> Bools | None:
        """Return the rows that a request uses, None for all complete ones; again after other analyses."""
        sets = None if self.released is None else self.released.sets
        found = self._rows.get(request)
        n_rows = None if self.released is None else self.released.n_rows - len(self.gone)
        if found is None or found[1] is not sets or n_rows not in (None, len(found[0])):
            rows = complete() if found is None else found[0]
            self._rows.pop(request, None)
            while len(self._rows) >= MOST_REQUESTS:
                del self._rows[next(iter(self._rows))]
            kept = leave_out(rows)
            self._rows[request] = found = rows, sets, None if kept is rows else kept
        return found[2]

    def of_table(self, key: Hashable, find: Callable[[], ResultT]) -> ResultT:
        """Return what was found before in the rows of the table, or find it."""
        if key not in self._of_table:
            self._of_table[key] = find()
        found: ResultT = self._of_table[key]
        return found

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], table: Table, secret: bytes) -> ReleaseHistory:
        """Restore the result of :meth:`to_arrays`, for a table that may have other rows since.

        ValueError if the arrays do not belong together, EngineError if a later version wrote them.
        """
        arrays, is_converted = convert_history(arrays, table)
        released, known = ReleasedSums.from_arrays(arrays), arrays.get("marks")
        if known is None:
            return cls(released, order=order_of(table), is_new=is_converted, is_converted=is_converted)
        if known.shape != (released.n_rows, MARK_BYTES):
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

    def _with_persons(self, released: ReleasedSums, by_key: bool) -> ReleasedSums:
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
        self._of_table.clear()
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


def _divide_rows(arrays: dict[str, Array], table: Table) -> dict[str, Array]:
    """Format 5: groups as sets of cells, (r, c), become divisions; classes of rows may be missing."""
    r, c = (int(size) for size in arrays.pop("c"))
    packed, cells = arrays.pop("basis"), np.asarray(arrays.pop("cells"), dtype=np.int64)
    if packed.shape != (r, (c + 7) // 8) or (len(cells) and not 0 <= cells.min() <= cells.max() < c):
        raise ValueError("the release history is not complete")
    groups = np.unpackbits(np.asarray(packed, dtype=np.uint8), axis=1, count=c).astype(np.bool_)
    if "sets" not in arrays:  # rows in the same groups were together in all analyses
        arrays["sets"] = np.where(groups[:, cells].any(axis=0), cells + 1, 0)
    divisions = list[Ints]()
    for group in groups:
        code = next((one for one in divisions if not one[group].any()), None)
        if code is None:
            divisions.append(code := np.zeros(c, dtype=np.int64))
        code[group] = code.max() + 1
    spaces = WeightSpaces.from_arrays(arrays, len(cells))
    for code in divisions:
        spaces = spaces.with_groups(code[cells] - 1)
    return arrays | spaces.to_arrays()


CONVERSIONS: Mapping[int, Callable[[dict[str, Array], Table], dict[str, Array]]] = {
    0: _name_mark_form,
    1: _express_columns,
    2: _separate_patterns,
    3: _enter_levels_and_weights,
    4: lambda arrays, table: arrays,  # without the columns of atoms, which later requests name
    5: _divide_rows,
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
