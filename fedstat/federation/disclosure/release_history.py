"""Release history: the groups of rows behind all earlier sums, and combinations of these sums.

A sum over a group of rows is a row of zeros and ones that is multiplied with the table. Differences, and any
other combinations, of sums are combinations of these rows. A combination that is nonzero in fewer than
`min_count` entries is a sum over fewer rows than the owner allows. A comparison of pairs is not enough: four
sums, no two of which differ by few rows, can have an alternating sum that is one row.

Rows that are in the same groups are one *cell*. So the size of the history grows with the number of different
divisions and not with the number of releases: 10,000 unions of 60 patterns are 60 cells and 60 groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.linalg import qr

from fedstat.federation.tables.aligned_table import MARK_BYTES, order_of, places_of, row_fingerprints
from fedstat.federation.tables.table import Table
from fedstat.typing import Array, Bools, Floats, Ints

ZERO_TOLERANCE = 1e-7
"""Relative size below which a combination counts as zero. Larger is safer: nearly zero is nearly revealed."""


@dataclass(frozen=True, slots=True, eq=False)
class ReleasedGroups:
    """Groups of rows over which sums were released.

    Parameters
    ----------
    cells : (n_rows,) array of int
        Cell of every row of the table.
    basis : (r, c) array of bool
        Independent groups that every group released so far is a combination of, as sets of cells.
    weights : (n_rows, m) array
        Weights from outside under which estimates were released.
    columns : (n_rows, k) array of float32
        Orthonormal basis of all columns of which sums were released; see
        :mod:`fedstat.federation.disclosure.products`.
    """

    cells: Ints
    basis: Bools
    weights: Floats
    columns: Array

    @classmethod
    def none(cls, n_rows: int) -> ReleasedGroups:
        """Return the history before the first release: all rows are one cell."""
        return cls(
            np.zeros(n_rows, dtype=np.int64),
            np.zeros((0, 1), dtype=np.bool_),
            np.zeros((n_rows, 0)),
            np.zeros((n_rows, 0), dtype=np.float32),
        )

    @property
    def sizes(self) -> Ints:
        """Number of rows of every cell: (c,)."""
        return np.bincount(self.cells, minlength=self.basis.shape[1])

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

    def with_weights(self, weights: Floats) -> ReleasedGroups:
        """Return the history after further estimates under weights, (n_rows, q)."""
        return replace(self, weights=np.hstack([self.weights, weights]))

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
        weights, columns = (
            np.concatenate([np.where((places >= 0)[:, None], held[places], held.dtype.type(0)), held[gone]])
            for held in (self.weights, self.columns)
        )
        return ReleasedGroups(np.concatenate([here, self.cells[gone]]), basis, weights, columns), gone

    def fewest_isolated(self, min_count: int) -> int:
        """Return the number of rows that a combination of the sums isolates, if below `min_count`; else 0.

        Combinations that vanish on all cells of `min_count` rows or more are a space N. If it has a basis of
        vectors with disjoint supports, every combination's support is a union of these, and the smallest one
        decides. Otherwise 1 is returned without a search for the vector with the fewest entries, which is
        hard: few real divisions need it, and refusing them is safe.
        """
        sizes = self.sizes
        small = sizes < min_count
        if not small.any() or not len(self.basis):
            return 0
        groups = self.basis.astype(np.float64)
        U, s, _ = np.linalg.svd(groups[:, ~small], full_matrices=True)
        rank = int((s > ZERO_TOLERANCE * max(s.max(initial=0.0), 1.0)).sum())
        if rank == len(groups):
            return 0
        reduced = np.abs(row_echelon(U[:, rank:].T @ groups[:, small])) > ZERO_TOLERANCE
        if (reduced.sum(axis=0) > 1).any():
            return 1
        rows = reduced @ sizes[small]
        fewest = int(rows.min(initial=min_count))
        return fewest if fewest < min_count else 0

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
        for name, held in (("weights", self.weights), ("columns", self.columns)):
            if held.size:
                reported[name] = held
        return reported

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
        nothing = np.zeros((len(cells), 0))
        weights = np.asarray(arrays.get("weights", nothing), dtype=np.float64)
        columns = np.asarray(arrays.get("columns", nothing), dtype=np.float32)
        for held in (weights, columns):
            if held.ndim != 2 or len(held) != len(cells) or not np.isfinite(held).all():
                raise ValueError("the release history is not complete")
        return cls(cells, basis, weights, columns)


@dataclass(slots=True)
class ReleaseHistory:
    """The release history of a site: the groups of rows behind all releases; None before the first.

    `marks` (n_rows, 16) are digests of the table's rows, in an `order` of them, once they are needed; `gone`
    (k, 16) those of rows that it had earlier.
    """

    released: ReleasedGroups | None = None
    gone: Array = field(default_factory=lambda: np.empty((0, MARK_BYTES), dtype=np.uint8))
    marks: Array | None = None
    order: str = ""

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], table: Table, secret: bytes) -> ReleaseHistory:
        """Restore the result of :meth:`to_arrays`, for a table that may have other rows since.

        ValueError if the arrays do not belong together.
        """
        released, known = ReleasedGroups.from_arrays(arrays), arrays.get("marks")
        if known is None:
            return cls(released, order=order_of(table))
        if known.shape != (len(released.cells), MARK_BYTES):
            raise ValueError("the release history is not complete")
        marks = row_fingerprints(table, secret)
        released, gone = released.carried(places_of(known, marks))
        return cls(released, known[gone], marks, order_of(table))

    def to_arrays(self, table: Table, secret: bytes) -> dict[str, Array]:
        """Return the arrays by name, for a file."""
        if self.released is None:
            return {}
        if self.marks is None:
            self.marks = row_fingerprints(table, secret)
        return self.released.to_arrays() | {"marks": np.concatenate([self.marks, self.gone])}

    def follow(self, table: Table, secret: bytes) -> None:
        """Reorder the history as the rows of the table are now."""
        if order_of(table) == self.order and (self.marks is not None or not self.order):
            return
        marks = row_fingerprints(table, secret)
        if self.released is not None and self.marks is not None:
            known = np.concatenate([self.marks, self.gone])
            self.released, gone = self.released.carried(places_of(known, marks))
            self.gone = known[gone]
        self.marks, self.order = marks, order_of(table)


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
