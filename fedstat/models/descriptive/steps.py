"""Steps of a site for tables: counts of rows in cells, of which none has few rows.

A cell is a group of categories, an interval of a number, and whether there was an event. Intervals are
public, and may be as narrow as the analyst likes, since a site averages the number over blocks of rows: it
sorts the rows of a group, with and without the event, and every few successive rows (as many as a level must
have) get their mean (microaggregation; Domingo-Ferrer and Mateo-Sanz 2002). So a cell has no row or whole
blocks, and the intervals of two tables reveal means of blocks at most, never the number of one row.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd

from fedstat.errors import DesignError, MessageError
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.formula.syntax_tree import iter_columns
from fedstat.federation.design.horizontal_steps import (
    OPEN_ROWS,
    OpenRows,
    rows_of,
    translation,
    unknown_levels,
)
from fedstat.federation.design.site_rows import CompleteRows, RowsRequest, find_complete_rows
from fedstat.federation.disclosure.facts import (
    ColumnSums,
    EntityCount,
    GroupSums,
    LevelRowCounts,
    LevelsRequested,
    OutcomeCounts,
    RowCount,
    RowGroups,
    RowsUsed,
    SummedColumns,
    SummedProducts,
)
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, check_lengths, control
from fedstat.federation.tables.columns import as_numbers
from fedstat.federation.tables.table import keep_result
from fedstat.inference.survival_curves import log_rank
from fedstat.models.horizontal.blocks import block_means, count_blocks
from fedstat.models.horizontal.rows import summed
from fedstat.typing import Array, Floats, Ints

FAMILY = "descriptive"
MOST_CELLS = 2**20
CELLS = (EntityCount, RowCount, RowsUsed, RowGroups, LevelRowCounts, LevelsRequested, ColumnSums)
"""Facts behind whatever is counted of the rows that a session opened."""


@dataclass(frozen=True, slots=True)
class CellsRequest:
    """The rows and their coding, the columns of the groups, and the column that is divided into intervals.

    `question` and `spec` are a :class:`RowsRequest` and a :class:`BlockSpec` in JSON. The number is the time
    of ``Surv(time, event)`` where `number` is empty. The levels of `category` are counted within groups.
    """

    question: str
    spec: str
    groups: tuple[str, ...] = ()
    number: str = ""
    category: str = ""


@dataclass(slots=True, eq=False)
class OpenCells:
    """The rows of one table: the group of each (n,), its number or time, and which event it had, 0 for none.

    `averaged` are the numbers with which the rows are counted, `start` the times at which rows enter.
    """

    MADE_AGAIN: ClassVar = ("group", "number", "averaged", "start", "level", "event", "rows")
    """The parts that are read again when a session is resumed."""

    data: SiteData
    request: CellsRequest
    groups: int
    levels: int = 1
    group: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    number: Floats = field(default_factory=lambda: np.zeros(0))
    averaged: Floats = field(default_factory=lambda: np.zeros(0))
    start: Floats = field(default_factory=lambda: np.zeros(0))
    level: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    event: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    rows: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def make_again(self) -> None:
        """Read the rows."""
        question, spec = RowsRequest.from_json(self.request.question), BlockSpec.from_json(self.request.spec)
        group, number, start, level, event, used = [], [], [], [], [], []
        category = (self.request.category,) if self.request.category else ()
        for rows in find_complete_rows(self.data, question):
            used.append(rows.complete)
            if not len(rows.frame):
                continue
            group.append(group_codes(rows.frame, spec, self.request.groups))
            level.append(group_codes(rows.frame, spec, category))
            event.append((rows.y if question.has_times else np.zeros(len(rows.frame))).astype(np.int64))
            number.append(self._number(rows))
            start.append(np.zeros(len(rows.frame)) if rows.times is None else rows.times[:, 0])
        self.group, self.event, self.level = map(np.concatenate, (group, event, level))
        self.number, self.start = np.concatenate(number), np.concatenate(start)
        self.rows = np.flatnonzero(np.concatenate(used))
        self.averaged = block_means(self.outcome, self.number, self.data.policy.min_level_count)

    def _number(self, rows: CompleteRows) -> Floats:
        if self.request.number:
            return as_numbers(rows.frame[self.request.number], self.data.name, self.request.number)
        return np.zeros(len(rows.frame)) if rows.times is None else np.asarray(rows.times[:, 1])

    @property
    def outcomes(self) -> int:
        """Outcomes of a row: none, and each event."""
        survival = RowsRequest.from_json(self.request.question).survival
        return 1 + max(len(survival.causes) if survival else 0, 1)

    @property
    def outcome(self) -> Ints:
        """Return the number of each row's group and outcome, (n,)."""
        return self.group * self.outcomes + self.event

    def block_sums(self, start: bool = False) -> ColumnSums:
        """Return the fact on the means of blocks, which intervals of any width reveal.

        Other groups have other blocks: from several divisions of the same rows, their numbers would follow.
        """
        columns: tuple[str, ...] = (self.request.number,)
        code = self.group if start else self.outcome
        survival = RowsRequest.from_json(self.request.question).survival
        if survival is not None:
            columns = tuple(dict.fromkeys(iter_columns(survival.times[0 if start else -1])))
        names = block_names(code, self.data.policy.min_level_count)
        used = np.zeros(self.data.table.n_rows, dtype=bool)
        used[self.rows] = True
        return ColumnSums([], used, blocks=dict.fromkeys(columns, names))

    def cells(self, edges: Floats) -> Ints:
        """Return the cell of each row: group, interval up to each edge and beyond, event."""
        interval = np.searchsorted(edges, self.averaged)
        return np.asarray((self.group * (len(edges) + 1) + interval) * self.outcomes + self.event)


def block_names(code: Ints, size: int) -> list[str]:
    """Name the blocks of :func:`block_means` of rows with these codes (n,)."""
    division = hashlib.sha256(code.tobytes()).hexdigest()[:16]
    return [f"block {division} {place}" for place in range(count_blocks(code, size))]


def group_codes(frame: pd.DataFrame, spec: BlockSpec, groups: tuple[str, ...]) -> Ints:
    """Return the number of each row's combination of levels, (m,); a DesignError for an unknown level."""
    code = np.zeros(len(frame), dtype=np.int64)
    for name in groups:
        levels = list(spec.levels[name])
        own = pd.Index(levels, dtype=object).get_indexer(pd.Index(frame[name].to_numpy(dtype=object)))
        if (own < 0).any():
            raise DesignError(f"column {name!r} has levels that were not agreed; make the table again")
        code = code * len(levels) + own
    return code


@step(
    FAMILY,
    request=CellsRequest,
    requests=control("columns of a table, with the levels of its groups", common=True),
    releases={"rows": summed("rows, and rows with the event, by group", 2, behind=CELLS)},
    begins=True,
)
def open_cells(data: SiteData, state: State, request: CellsRequest) -> dict[str, Array]:
    """Read the rows and count them by group: ``rows`` (G, 1 + C), without an event and with each."""
    question, spec = RowsRequest.from_json(request.question), BlockSpec.from_json(request.spec)
    state.report(*question.requested())
    coded = {*request.groups, request.category} - {""}
    if not coded <= set(spec.levels) or not {request.number} - {""} <= set(question.columns):
        raise MessageError(f"{data.name}: the table names columns that it does not read")
    groups = int(np.prod([len(spec.levels[name]) for name in request.groups], dtype=np.int64))
    if groups > MOST_CELLS:
        raise MessageError(f"{data.name}: the table has more than {MOST_CELLS:,} groups")
    for place, rows in enumerate(find_complete_rows(data, question)):
        if len(rows.frame):
            key = (question.to_json(), spec.to_json(), place, "levels of a table")
            state.report(*keep_result(data.table, key, partial(unknown_levels, rows, spec)))
    levels = len(spec.levels[request.category]) if request.category else 1
    opened = OpenCells(data, request, groups, levels)
    opened.make_again()
    n = len(opened.rows)
    used = np.zeros(data.table.n_rows, dtype=bool)
    used[opened.rows] = True
    state.report(RowCount(n, 1), RowsUsed(used), question.column_sums(used))
    width = opened.outcomes
    counts = np.bincount(opened.outcome, minlength=width * groups).reshape(groups, width)
    state.report(LevelRowCounts(", ".join(request.groups) or "rows", counts.sum(axis=1).tolist()))
    state.report(LevelsRequested(used, {name: spec.levels[name] for name in request.groups}))
    if question.has_times:
        for without, *events in counts.tolist():
            state.report(*(OutcomeCounts((without, one), question.response) for one in events))
    # Groups and outcomes are compared with everything that was released before.
    state.report(LevelRowCounts("groups of the table", counts.ravel().tolist()))
    state.report(RowGroups("", opened.outcome, opened.rows, data.policy.min_level_count))
    state.play(question.needed)
    state.keep(FAMILY, opened, n, columns=len(question.columns))
    return {"rows": counts.astype(np.float64)}


def cells_of(state: State) -> OpenCells:
    """Return the rows of this table; MessageError if it was not opened here."""
    absent = "this table was not opened here; request 'open_cells' first"
    return state.use(FAMILY, OpenCells, absent)


@step(
    FAMILY,
    "open_cells sum_number count_cells",
    takes={"edges": aggregate("upper ends of the intervals", common=True)},
    releases={"cells": summed("rows by group, interval and event", 3, behind=CELLS)},
)
def count_cells(data: SiteData, state: State, edges: Floats) -> dict[str, Array]:
    """Count the rows: ``cells`` (G, J + 1, 1 + C), the last interval beyond all `edges` (J,), by event."""
    opened = cells_of(state)
    check_edges(data, opened, edges)
    code = opened.cells(edges)
    shape = (opened.groups, len(edges) + 1, opened.outcomes)
    counts = np.bincount(code, minlength=int(np.prod(shape)))
    state.report(LevelRowCounts("cells of the table", counts.tolist()))
    state.report(opened.block_sums())
    return {"cells": counts.reshape(shape).astype(np.float64)}


def check_edges(data: SiteData, opened: OpenCells, edges: Floats) -> None:
    """Require edges that ascend, and not too many cells."""
    if (np.diff(edges) <= 0.0).any() or opened.groups * (len(edges) + 1) > MOST_CELLS:
        raise MessageError(f"{data.name}: array 'edges' must ascend, and give at most {MOST_CELLS:,} cells")


@step(
    FAMILY,
    "open_cells count_cells",
    takes={"edges": aggregate("upper ends of the intervals", common=True)},
    releases={"entered": summed("rows that enter, by group and interval", 2, behind=CELLS)},
)
def count_entries(data: SiteData, state: State, edges: Floats) -> dict[str, Array]:
    """Count rows by the interval in which they enter: ``entered`` (G, J + 1), which begins at its lower end.

    Starts are averaged over blocks of a group whatever the event: rows enter before it is known.
    """
    opened = cells_of(state)
    check_edges(data, opened, edges)
    averaged = block_means(opened.group, opened.start, data.policy.min_level_count)
    shape = (opened.groups, len(edges) + 1)
    code = opened.group * shape[1] + np.searchsorted(edges, averaged, side="right")
    counts = np.bincount(code, minlength=int(np.prod(shape)))
    state.report(LevelRowCounts("cells of the table", counts.tolist()))
    state.report(opened.block_sums(start=True))
    return {"entered": counts.reshape(shape).astype(np.float64)}


@step(
    FAMILY,
    "open_cells count_cells count_entries",
    releases={
        "observed": summed("events by group", behind=CELLS),
        "expected": summed("expected events by group", behind=CELLS),
        "covariance": summed("covariance of their differences", 2, behind=CELLS),
    },
)
def sum_log_rank(data: SiteData, state: State) -> dict[str, Array]:
    """Sum the log-rank test over the site's own times: observed, expected (G,), their covariance (G, G)."""
    opened = cells_of(state)
    event = opened.event > 0
    times = np.unique(opened.number[event])
    G, J = opened.groups, len(times)
    if not J:
        zeros = np.zeros(G)
        return {"observed": zeros, "expected": zeros, "covariance": np.zeros((G, G))}
    ends = np.searchsorted(times, opened.number, side="right")
    leaving = np.bincount(opened.group * (J + 1) + ends, minlength=G * (J + 1)).reshape(G, J + 1)
    late = opened.start.any()
    starts = np.searchsorted(times, opened.start, side="right") if late else np.zeros_like(ends)
    entering = np.bincount(opened.group * (J + 1) + starts, minlength=G * (J + 1)).reshape(G, J + 1)
    at_risk = (entering - leaving).cumsum(axis=1)[:, :-1]
    died = opened.group[event] * J + ends[event] - 1
    events = np.bincount(died, minlength=G * J).reshape(G, J)
    found = log_rank(events.astype(np.float64), at_risk.astype(np.float64))
    return {"observed": found.observed, "expected": found.expected, "covariance": found.covariance}


# ----------------------------------------------------------------------------------------------------
# Tables: moments of a number by group, and counts of the levels of a category by group.


@step(
    FAMILY,
    "open_cells",
    releases={
        "moments": summed(
            "rows, sum, squares within and of the mean, by group", 2, behind=(*CELLS, GroupSums)
        )
    },
)
def sum_number(data: SiteData, state: State) -> dict[str, Array]:
    """Sum the number by group: ``moments`` (G, 4), about the site's own means, which keeps their digits."""
    opened = cells_of(state)
    state.report(GroupSums(opened.group, summed=SummedColumns(opened.number[:, None], opened.group)))
    n = np.bincount(opened.group, minlength=opened.groups).astype(np.float64)
    total = np.bincount(opened.group, opened.number, minlength=opened.groups)
    mean = np.divide(total, n, out=np.zeros_like(total), where=n > 0.0)
    within = np.bincount(opened.group, (opened.number - mean[opened.group]) ** 2, minlength=opened.groups)
    return {"moments": np.column_stack([n, total, within, n * mean**2])}


@step(
    FAMILY,
    "open_cells",
    releases={
        "small": control("whether a cell has few rows, and is not empty", 2, maskable=True),
        "large": control("whether a cell has enough rows", 2, maskable=True),
    },
)
def flag_levels(data: SiteData, state: State) -> dict[str, Array]:
    """Tell which cells have few rows, and which enough: ``small``, ``large`` (G, L)."""
    opened = cells_of(state)
    counts, least = level_counts(opened), data.policy.min_level_count
    return {"small": (counts > 0) & (counts < least), "large": counts >= max(least, 1)}


@step(
    FAMILY,
    "flag_levels",
    takes={"shown": control("which cells are counted", 2, common=True)},
    releases={"counts": summed("rows by group and level, zero where hidden", 2, behind=CELLS)},
)
def count_levels(data: SiteData, state: State, shown: Array) -> dict[str, Array]:
    """Count the rows of the cells that are `shown` (G, L); refused if hidden ones follow by subtraction."""
    opened = cells_of(state)
    counts = level_counts(opened)
    if shown.shape != counts.shape:
        raise MessageError(f"{data.name}: array 'shown' must have the shape {counts.shape}")
    kept = np.asarray(shown, dtype=bool)
    state.report(LevelRowCounts("cells of the table", counts[kept].tolist()))
    # Groups are known in full: what is hidden of one is known together, and must not be few rows.
    hidden = np.where(kept, 0, counts).sum(axis=1)
    state.report(LevelRowCounts("hidden cells of a group", hidden.tolist()))
    code = opened.group * opened.levels + opened.level
    place = np.where(kept.ravel()[code], code, -1)
    state.report(RowGroups("", place, opened.rows, data.policy.min_level_count))
    return {"counts": np.where(kept, counts, 0).astype(np.float64)}


def level_counts(opened: OpenCells) -> Ints:
    """Count the rows by group and level, (G, L)."""
    code = opened.group * opened.levels + opened.level
    size = opened.groups * opened.levels
    return np.bincount(code, minlength=size).reshape(opened.groups, opened.levels)


@step(
    FAMILY,
    takes={
        "shift": aggregate("means of the columns over all sites", common=True),
        "scale": aggregate("standard deviations of the columns over all sites", common=True),
    },
    releases={"products": summed("products of the standardized columns", 2, behind=OPEN_ROWS)},
)
def sum_products(data: SiteData, state: State, shift: Floats, scale: Floats) -> dict[str, Array]:
    """Sum products of columns standardized over all sites: ``products`` (p, p), with the intercept."""
    opened = rows_of(state)
    check_lengths(data.name, shift=(shift, len(opened.shift)), scale=(scale, len(opened.shift)))
    if not (scale > 0.0).all():
        raise MessageError(f"{data.name}: array 'scale' must be positive")
    # The same at every request, as the moments of least squares are.
    state.report(opened.question.column_sums(opened.used, True))
    to_own = translation(opened.shift, opened.scale, shift, scale)
    total = np.zeros((len(scale), len(scale)))
    for _, X in opened.chunks():
        total += X.T @ X
    return {"products": to_own.T @ total @ to_own}


# ----------------------------------------------------------------------------------------------------
# Ranks: counts of every column on public intervals, and products of the mid-ranks of the intervals.

EDGES = aggregate("ends of the intervals of each column", 2, common=True)


def row_intervals(opened: OpenRows, edges: Floats) -> Ints:
    """Return the interval of each row in each column, (n, p): up to each of `edges` (p, J), or beyond.

    As for histograms, every few successive numbers are averaged first. A column is not changed if each value
    has enough rows: the averages of an indicator would differ from it in few rows.
    """
    data, names, size = opened.data, opened.names, opened.data.policy.min_level_count
    check_lengths(data.name, edges=(edges, len(names)))
    if (np.diff(edges, axis=1) <= 0.0).any() or edges.size > MOST_CELLS:
        raise MessageError(f"{data.name}: array 'edges' must ascend, and give at most {MOST_CELLS:,} cells")
    if not set(names) <= set(opened.question.columns) - set(opened.spec.levels):
        raise MessageError(f"{data.name}: ranks are of columns of numbers")
    n = int(opened.used.sum())
    out = np.zeros((n, len(names)), dtype=np.int64)
    for j, name in enumerate(names):
        # As the table has them: a number must not cross the end of an interval by rounding.
        parts = [as_numbers(rows.frame[name], data.name, name) for rows, _ in opened.chunks()]
        values = np.concatenate(parts)
        if np.unique(values, return_counts=True)[1].min(initial=size) < size:
            values = block_means(np.zeros(n, dtype=np.int64), values, size)
        out[:, j] = np.searchsorted(edges[j], values)
    return out


def interval_counts(places: Ints, edges: Floats) -> Ints:
    """Count the rows by column and interval, (p, J + 1)."""
    return np.array([np.bincount(column, minlength=edges.shape[1] + 1) for column in places.T])


def ranked_sums(opened: OpenRows, ranks: str = "") -> ColumnSums:
    """Return the fact on the means of blocks of each column, and on `ranks` of its intervals."""
    code = np.zeros(int(opened.used.sum()), dtype=np.int64)
    names = block_names(code, opened.data.policy.min_level_count) + ([ranks] if ranks else [])
    return ColumnSums([], opened.used, blocks=dict.fromkeys(opened.names, names))


@step(
    FAMILY,
    takes={"edges": EDGES},
    releases={"counts": summed("rows by column and interval", 2, behind=(*OPEN_ROWS, LevelRowCounts))},
)
def count_columns(data: SiteData, state: State, edges: Floats) -> dict[str, Array]:
    """Count the rows of every column on its intervals: ``counts`` (p, J + 1)."""
    opened = rows_of(state)
    counts = interval_counts(row_intervals(opened, edges), edges)
    state.report(LevelRowCounts("cells of the table", counts.ravel().tolist()), ranked_sums(opened))
    return {"counts": counts.astype(np.float64)}


@step(
    FAMILY,
    "count_columns",
    takes={
        "edges": EDGES,
        "ranks": aggregate("mid-rank of each interval, standardized over all sites", 2, common=True),
    },
    releases={"products": summed("products of the coded ranks", 2, behind=(*OPEN_ROWS, LevelRowCounts))},
)
def sum_ranks(data: SiteData, state: State, edges: Floats, ranks: Floats) -> dict[str, Array]:
    """Sum products of the ranks (p, J + 1) of the rows' intervals: ``products`` (p, p).

    The coded columns are released columns: no product of two, and no combination with earlier ones, may be
    about few rows.
    """
    opened = rows_of(state)
    places = row_intervals(opened, edges)
    if ranks.shape != (len(edges), edges.shape[1] + 1) or (np.diff(ranks, axis=1) < 0.0).any():
        raise MessageError(f"{data.name}: array 'ranks' must have a rank for each interval, and ascend")
    R = np.column_stack([row[place] for row, place in zip(ranks, places.T, strict=True)])
    digest = hashlib.sha256(edges.tobytes() + ranks.tobytes()).hexdigest()[:16]
    names = [f"rank of {name}" for name in opened.names]
    cells = interval_counts(places, edges)
    state.report(LevelRowCounts("cells of the table", cells.ravel().tolist()))
    state.report(SummedProducts(lambda: [R], names, np.flatnonzero(opened.used)))
    state.report(ranked_sums(opened, f"ranks {digest}"))
    return {"products": R.T @ R}
