"""Categorical columns apart by whether they load on factors.

What does not load is the same at all nodes: its likelihood is a number for each row, and its thresholds need
no factors. On a path of penalties, and in fits of what was selected, these are most columns.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedstat.kernels.mixtures.nodes import GroupedLevels
from fedstat.models.m2sem.modality.levels import LevelColumns
from fedstat.typing import Bools, Floats, Ints

STILL = 1e-10
"""Change of a threshold that is none."""


class PartOfColumns:
    """Some columns of a block, at places `at` (p,) of it, with the parameters that the block has."""

    def __init__(self, block: LevelColumns, at: Ints) -> None:
        self._block, self._at = block, at
        self._some = block
        if len(at) < len(block.columns):
            self._some = copy.copy(block)
            self._some.columns, self._some.shares = block.columns[at], block.shares[at]

    @property
    def columns(self) -> Ints:
        """Places of the columns in their modality, (p,)."""
        return self._some.columns

    @property
    def levels(self) -> int:
        """Number of levels."""
        return self._block.C

    def now(self) -> LevelColumns:
        """Columns at the present parameters."""
        if self._some is not self._block:
            self._some.theta = self._block.theta[self._at]
        return self._some

    def improve(self, eta: Floats, counts: Floats, table: Floats, penalties: Floats, support: Bools) -> None:
        """Take a step with these columns, and let the block have it."""
        some = self.now()
        some.improve(eta, counts, table, penalties[self.columns], support[self.columns])
        if some is not self._block:
            self._block.theta[self._at] = some.theta


class ColumnsWithoutLoadings:
    """Part of the columns (p,) of rows with codes (n, p), of which factors tell nothing."""

    def __init__(self, part: PartOfColumns, codes: Ints, group: Ints, groups: int) -> None:
        self.part = part
        p = len(part.columns)
        self._shape = groups, p, part.levels, 1
        # Cells that are not seen are at a place of their own, behind all others.
        lines = (group[:, None] * p + np.arange(p)) * part.levels + codes
        self._cells = np.where(codes >= 0, lines, groups * p * part.levels)
        self._logs: tuple[Floats, Floats] | None = None
        self._best: tuple[Floats, Floats] | None = None

    def log_densities(self) -> Floats:
        """Return the sum of log P over these columns, (n,)."""
        some = self.part.now()
        if self._logs is None or not np.array_equal(self._logs[0], some.theta):
            logs = np.append(some.table(np.zeros((1, some.Q))).ravel(), 0.0)
            self._logs = some.theta.copy(), logs[self._cells].sum(axis=1)
        return self._logs[1]

    def improve(self, w: Floats, steps: int) -> None:
        """Take Newton's steps for rows of weights w (n,), unless it is where these lead."""
        some, eta = self.part.now(), np.zeros((1, self.part.now().Q))
        best = self._best
        if best is not None and np.array_equal(best[0], some.theta) and np.array_equal(best[1], w):
            return
        weights = np.repeat(w, self._cells.shape[1])
        counts = np.asarray(
            np.bincount(self._cells.ravel(), weights, int(np.prod(self._shape)) + 1)[:-1], float
        )
        nothing = np.zeros(int(self.part.columns.max()) + 1)
        for _ in range(steps):
            old = self.part.now().theta.copy()
            table = self.part.now().table(eta)
            self.part.improve(eta, counts.reshape(self._shape), table, nothing, nothing > 0.0)
            if np.abs(self.part.now().theta - old).max() < STILL:
                self._best = self.part.now().theta.copy(), w.copy()
                return


class SplitColumns:
    """Columns that load, block after block, with their cells; and those that do not: `loaded` (P,)."""

    def __init__(
        self, blocks: Sequence[LevelColumns], rows: GroupedLevels, groups: int, loaded: Bools
    ) -> None:
        self.loaded, self._groups = loaded, groups
        self.parts: list[PartOfColumns] = []
        self.rest: list[ColumnsWithoutLoadings] = []
        for block in blocks:
            on = loaded[block.columns]
            if on.any():
                self.parts.append(PartOfColumns(block, np.flatnonzero(on)))
            if not on.all():
                part = PartOfColumns(block, np.flatnonzero(~on))
                codes = rows.codes[:, part.columns]
                self.rest.append(ColumnsWithoutLoadings(part, codes, rows.group, groups))
        order = [part.columns for part in self.parts]
        ends = np.cumsum([0, *map(len, order)]).tolist()
        self.cells = [
            np.s_[:, first:last, : part.levels]
            for part, first, last in zip(self.parts, ends[:-1], ends[1:], strict=True)
        ]
        chosen = np.concatenate(order) if order else np.zeros(0, dtype=np.int64)
        self.rows = GroupedLevels(np.ascontiguousarray(rows.codes[:, chosen]), rows.group)
        self._most = max((part.levels for part in self.parts), default=1)

    def table(self, eta: Floats) -> Floats:
        """Return logs of probabilities at nodes eta (G, Q), (J, p, C, G), of the columns that load."""
        out = np.zeros((self._groups, self.rows.codes.shape[1], self._most, len(eta)))
        for part, cells in zip(self.parts, self.cells, strict=True):
            out[cells] = part.now().table(eta)
        return out

    def log_densities_of_rest(self) -> Floats:
        """Return the sum of log P over the columns that do not load, (n,)."""
        return np.asarray(sum((one.log_densities() for one in self.rest), np.zeros(len(self.rows.codes))))


class SpreadRows(NamedTuple):
    """Rows spread over nodes at one state under r (n, K): counts at cells and nodes, densities f (n, K).

    `table` has the logs of levels' probabilities; it and the counts are of the columns that load.
    """

    columns: SplitColumns
    state: Floats
    r: Floats
    levels: Floats
    nodes: Floats
    table: Floats
    f: Floats
