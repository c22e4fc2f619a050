"""Steps of a site for tables and survival curves: counts of rows in cells, of which none has few rows.

A cell is a group of categories, an interval of a number or a time, and which event there was.

Intervals of numbers are public, and may be as narrow as the analyst likes, since a site averages the number
over blocks of rows: it sorts the rows of a group, and every few successive rows (as many as a level must
have) get their mean (microaggregation; Domingo-Ferrer and Mateo-Sanz 2002). So a cell has no row or whole
blocks, and the intervals of two tables reveal means of blocks at most, never the number of one row. Times of
survival curves are counted exactly, on intervals that are merged until no cell has few rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd

from fedstat.errors import DescriptionError, DesignError, MessageError
from fedstat.federation.audit.event_log import AnswerRecord
from fedstat.federation.crypto.masks import hides
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.formula.syntax_tree import iter_columns
from fedstat.federation.design.horizontal_steps import (
    OPEN_ROWS,
    OpenRows,
    rows_of,
    translation,
    unknown_levels,
)
from fedstat.federation.design.site_rows import (
    CompleteRows,
    RowsRequest,
    block_means,
    find_complete_rows,
    interval_names,
    rows_behind,
    rows_key,
    subset_counts,
)
from fedstat.federation.disclosure.column_sums import sums_left
from fedstat.federation.disclosure.differencing import SAME_ROWS_REMEDY
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
from fedstat.federation.disclosure.leverage import masked_among_the_same
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, check_lengths, control
from fedstat.federation.tables.columns import as_numbers, level_places
from fedstat.federation.tables.table import keep_result
from fedstat.inference.survival_curves import log_rank
from fedstat.models.horizontal.rows import summed
from fedstat.typing import Array, Bools, Floats, Ints

FAMILY = "descriptive"
MOST_CELLS = 2**20
CELLS = (EntityCount, RowCount, RowsUsed, RowGroups, LevelRowCounts, LevelsRequested, ColumnSums)
"""Facts behind whatever is counted of the rows that a session opened."""


@dataclass(frozen=True, slots=True)
class CellsRequest:
    """The rows and their coding, the columns of the groups, and the column that is divided into intervals.

    `question` and `spec` are a :class:`RowsRequest` and a :class:`BlockSpec` in JSON. The number is the time
    of ``Surv(time, event)`` where `number` is empty. The levels of `category` are counted within groups. If
    the rows of the cells of times shall be `weighted` later, each cell needs as many rows as a sum.
    """

    question: str
    spec: str
    groups: tuple[str, ...] = ()
    number: str = ""
    category: str = ""
    weighted: bool = False


@dataclass(slots=True, eq=False)
class OpenCells:
    """The rows of one table: the group of each (n,), its number or time, and which event it had, 0 for none.

    `averaged` are the numbers with which the rows are counted, `start` the times at which rows enter,
    `counted` the ends of the intervals on which times were counted last. `left` and `entered` are the times
    of every group and outcome, and the starts of every group, in ascending order. `digests` are those of
    which rows are counted, and of the group and the outcome of each.
    """

    RECOMPUTED: ClassVar = (
        *("group", "number", "averaged", "start", "level", "event", "rows"),
        *("left", "entered", "digests"),
    )
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
    counted: Floats = field(default_factory=lambda: np.zeros(0))
    left: tuple[Floats, ...] = ()
    entered: tuple[Floats, ...] = ()
    digests: tuple[str, str] = ("", "")

    def recompute(self) -> None:
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
        self.sort_times()

    def sort_times(self) -> None:
        """Put the times in order, and make digests of the rows."""
        outcome = self.outcome
        self.left = _in_order(self.number, outcome, self.groups * self.outcomes)
        self.entered = _in_order(self.start, self.group, self.groups) if self.late else ()
        rows, division = (hashlib.sha256(one.tobytes()).hexdigest()[:16] for one in (self.rows, outcome))
        self.digests = rows, division

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

    @property
    def used(self) -> Bools:
        """Return which rows of the table are counted, (n_rows,)."""
        used: Bools = np.zeros(self.data.table.n_rows, dtype=bool)
        used[self.rows] = True
        return used

    def interval_sums(self, edges: Floats) -> ColumnSums:
        """Return the fact on the counts of blocks up to each edge.

        Other groups have other blocks: from several divisions of the same rows, their numbers would follow.
        """
        names = interval_names(self.outcome, self.data.policy.min_level_count, edges)
        return ColumnSums([], self.used, blocks={self.request.number: names})

    @property
    def time_columns(self) -> tuple[str, ...]:
        """Return the columns of which the times are made."""
        survival = RowsRequest.from_json(self.request.question).survival
        times = () if survival is None else survival.times
        return tuple(dict.fromkeys(name for tree in times for name in iter_columns(tree)))

    @property
    def least(self) -> int:
        """Return the fewest rows of a cell of times."""
        policy = self.data.policy
        return max(policy.min_level_count, policy.min_count if self.request.weighted else 0)

    def grid_digest(self, requested: Floats) -> str:
        """Return a digest of a requested grid, and of what its cells need."""
        text = requested.tobytes() + (b"weighted" if self.request.weighted else b"")
        return hashlib.sha256(text).hexdigest()[:16]

    @property
    def late(self) -> bool:
        """Return whether rows may enter late."""
        survival = RowsRequest.from_json(self.request.question).survival
        return survival is not None and len(survival.times) > 1

    def time_cells(self, edges: Floats) -> tuple[Ints, ...]:
        """Return the cells of each row: group, interval up to each edge and beyond, outcome.

        If rows enter late: also group and interval in which each row enters, which begins at its lower end.
        """
        J, width = len(edges) + 1, self.outcomes
        left = (self.group * J + np.searchsorted(edges, self.number)) * width + self.event
        if not self.late:
            return (left,)
        return left, self.group * J + np.searchsorted(edges, self.start, side="right")

    def time_counts(self, edges: Floats) -> Ints:
        """Count the rows by cell, (G, J + 1, 1 + C), or with those that enter late (G, J + 1, 2 + C)."""
        up_to = [np.searchsorted(times, edges, side="right") for times in self.left]
        before = [np.searchsorted(times, edges) for times in self.entered]
        sizes = [len(times) for times in (*self.left, *self.entered)]
        counts = np.diff(np.column_stack([[*up_to, *before], sizes]), prepend=0).astype(np.int64)
        left, entered = np.split(counts, [len(up_to)])
        left = left.reshape(self.groups, self.outcomes, -1).swapaxes(1, 2)
        return np.concatenate([left, entered[:, :, None]], axis=2) if self.late else left

    def cells(self, edges: Floats) -> Ints:
        """Return the cell of each row: group, interval up to each edge and beyond, event."""
        interval = np.searchsorted(edges, self.averaged)
        return np.asarray((self.group * (len(edges) + 1) + interval) * self.outcomes + self.event)


def _in_order(times: Floats, code: Ints, count: int) -> tuple[Floats, ...]:
    """Return the times of the rows of each code from zero on, in ascending order."""
    return tuple(np.sort(times[code == one]) for one in range(count))


def group_codes(frame: pd.DataFrame, spec: BlockSpec, groups: tuple[str, ...]) -> Ints:
    """Return the number of each row's combination of levels, (m,); a DesignError for an unknown level."""
    code = np.zeros(len(frame), dtype=np.int64)
    for name in groups:
        levels = spec.levels[name]
        own = level_places(frame[name], levels)
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
    outside = 0
    for place, rows in enumerate(find_complete_rows(data, question)):
        outside += rows.outside
        if len(rows.frame):
            used_key = rows_key(data, question)
            key = (question.to_json(), spec.to_json(), place, used_key, "levels of a table")
            state.report(*keep_result(data.table, key, partial(unknown_levels, rows, spec)))
    levels = len(spec.levels[request.category]) if request.category else 1
    opened = OpenCells(data, request, groups, levels)
    opened.recompute()
    n = len(opened.rows)
    used = np.zeros(data.table.n_rows, dtype=bool)
    used[opened.rows] = True
    state.report(*subset_counts(question, n, outside))
    state.report(RowCount(n, 1), rows_behind(data, question, used), question.column_sums(used))
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
    state.use_columns(question.needed)
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
    state.report(opened.interval_sums(edges))
    return {"cells": counts.reshape(shape).astype(np.float64)}


def check_edges(data: SiteData, opened: OpenCells, edges: Floats) -> None:
    """Require edges that ascend, and not too many cells."""
    if (np.diff(edges) <= 0.0).any() or opened.groups * (len(edges) + 1) > MOST_CELLS:
        raise MessageError(f"{data.name}: array 'edges' must ascend, and give at most {MOST_CELLS:,} cells")


# ----------------------------------------------------------------------------------------------------
# Survival curves: exact counts on intervals of time. No count is about few rows.
#
# The intervals are the same at all sites. The coordinator asks about few ends at a time (:func:`flag_times`),
# from wide intervals to narrow ones, and keeps an end if no cell next to it has few rows. Where at least
# three sites mask the counts, and always the same ones, a cell must have enough rows over all sites: no site,
# or as many sites as the minimum, or one site with enough rows. Otherwise each site's own cell must.
#
# Counts on other intervals would give counts of the rows in between by subtraction. So a site remembers the
# ends of all counts of a time, and refuses counts unless the coordinator has examined these ends as well.

ENOUGH = 2**20
"""Flag of a cell with enough rows. Sums over sites keep both numbers of sites apart."""
SHARE_OF_SUMS = 2.0 / 3.0
"""Share of the sums of one column that are left which a curve may use."""


@dataclass(frozen=True, slots=True)
class CountedTimes(AnswerRecord):
    """Counts that a site has released: columns of the times, digests of rows, division and grid, and ends."""

    columns: tuple[str, ...]
    rows: str
    division: str
    requested: str
    ends: tuple[float, ...]


def _counted_before(data: SiteData, opened: OpenCells) -> list[CountedTimes]:
    if data.policy.remember == "nothing":
        return []
    times = set(opened.time_columns)
    return [one for one in data.site_ledger.records(CountedTimes) if times & set(one.columns)]


def counted_over_sites(data: SiteData, state: State) -> bool:
    """Return whether a minimum may hold for the counts over all sites.

    Sums over other sites would give a site's part by subtraction.
    """
    if data.policy.remember == "nothing":
        return hides(len(state.masked_among))
    return masked_among_the_same(data, state.masked_among)


def _most_intervals(data: SiteData, opened: OpenCells) -> float:
    """Return how many intervals the limit on sums of one column allows."""
    left = min((sums_left(data, opened.used, name) for name in opened.time_columns), default=np.inf)
    left *= SHARE_OF_SUMS
    cells = opened.groups * (opened.outcomes + opened.late)
    return float(max(min(left, float(MOST_CELLS)) // cells, 1.0))


@step(
    FAMILY,
    "open_cells flag_times",
    takes={
        "edges": aggregate("upper ends of the intervals", common=True),
        "places": control("intervals that are examined", common=True),
        "requested": aggregate("ends of the requested grid", common=True),
    },
    releases={
        "flags": control("whether a cell has few rows but some, or enough rows", 3, maskable=True),
        "over_sites": control("whether cells need enough rows over all sites only", 0, maskable=True),
        "least": control("fewest rows of a cell by the policy", 0),
        "most": control("most intervals by the policy", 0),
        "earlier": control("ends of intervals of earlier counts"),
        "repeated": control("ends of the same counts, if they were released before"),
    },
)
def flag_times(
    data: SiteData, state: State, edges: Floats, places: Ints, requested: Floats
) -> dict[str, Array]:
    """Flag cells of the intervals `places` (m,) of those that end at `edges` (J,): ``flags`` (G, m, 1 + C).

    If rows enter late, ``flags`` (G, m, 2 + C) ends with those of the rows that enter.

    A flag is 1 for few rows, :data:`ENOUGH` for enough rows, and 0 for none.
    """
    opened = cells_of(state)
    check_edges(data, opened, edges)
    before = _counted_before(data, opened)
    if not len(places) or places.min() < 0 or places.max() > len(edges):
        raise MessageError(f"{data.name}: array 'places' must name intervals between the edges")
    counts, least = opened.time_counts(edges)[:, places], opened.least
    same = [one for one in before if (one.rows, one.division) == opened.digests]
    key = (*opened.digests, opened.grid_digest(requested))
    repeated = [one.ends for one in before if (one.rows, one.division, one.requested) == key]
    return {
        "flags": np.where(counts >= max(least, 1), ENOUGH, (counts > 0).astype(np.int64)),
        "over_sites": np.array(counted_over_sites(data, state)),
        "least": np.array(float(least)),
        "most": np.array(max([_most_intervals(data, opened), *(float(len(one.ends)) for one in same)])),
        "earlier": np.unique([end for one in before for end in one.ends]).astype(np.float64),
        "repeated": np.array(repeated[0] if repeated else (), dtype=np.float64),
    }


@step(
    FAMILY,
    "flag_times",
    takes={
        "edges": aggregate("upper ends of the intervals", common=True),
        "earlier": aggregate("ends of intervals of earlier counts", common=True),
        "requested": aggregate("ends of the requested grid", common=True),
    },
    releases={"cells": summed("rows by group, interval and event", 3, behind=CELLS)},
)
def count_times(
    data: SiteData, state: State, edges: Floats, earlier: Floats, requested: Floats
) -> dict[str, Array]:
    """Count the rows: ``cells`` (G, J + 1, 1 + C), the last interval beyond all `edges` (J,), by outcome.

    If rows enter late, ``cells`` (G, J + 1, 2 + C) ends with the rows that enter in each interval. `earlier`
    are the ends of earlier counts that were examined together with these.
    """
    opened = cells_of(state)
    check_edges(data, opened, edges)
    counts, before = opened.time_counts(edges), _counted_before(data, opened)
    known = {end for one in before for end in one.ends}
    rows, division = opened.digests
    other_rows = any(one.rows != rows for one in before)
    other_groups = any(one.division != division for one in before) and data.policy.remember == "all"
    if other_rows or other_groups or not known <= {*edges.tolist(), *earlier.tolist()}:
        remedy = SAME_ROWS_REMEDY if other_rows else "Use the groups and the grid of the earlier curves"
        raise DescriptionError.of_rule(
            "differencing",
            data.name,
            "has counted these times over other rows, on other intervals or in other groups, and refuses "
            "counts that were not examined together with them: the difference may belong to few rows",
            remedy=remedy,
        )
    if not counted_over_sites(data, state):
        # Of the cells between these ends and earlier ones, those next to a new end.
        both = np.union1d(edges, earlier)
        new = np.isin(both, np.setdiff1d(edges, earlier))
        adjacent = np.append(new, False) | np.append(False, new)
        for cells in (counts, opened.time_counts(both)[:, adjacent]):
            state.report(LevelRowCounts("cells of the table", cells.ravel().tolist()))
    names = [
        f"up to {end:.17g} {division} {cell}"
        for end in edges.tolist()
        for cell in range(opened.groups * counts.shape[2])
    ]
    state.report(ColumnSums([], opened.used, blocks=dict.fromkeys(opened.time_columns, names)))
    grid, ends = opened.grid_digest(requested), tuple(edges.tolist())
    if data.policy.remember != "nothing":
        data.site_ledger.remember(CountedTimes(opened.time_columns, rows, division, grid, ends))
    opened.counted = edges
    return {"cells": counts.astype(np.float64)}


@step(
    FAMILY,
    "count_times",
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
    number = opened.number[:, None]
    state.report(GroupSums(opened.group, summed=SummedColumns(number, opened.group)))
    state.report(SummedProducts(lambda: [number], [opened.request.number], opened.rows, code=opened.group))
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


def ranked_sums(opened: OpenRows, edges: Floats, ranks: str = "") -> ColumnSums:
    """Return the fact on the counts of blocks of each column up to its edges, and on `ranks` of intervals."""
    code = np.zeros(int(opened.used.sum()), dtype=np.int64)
    least, more = opened.data.policy.min_level_count, [ranks] if ranks else []
    names = [interval_names(code, least, own) + more for own in edges]
    return ColumnSums([], opened.used, blocks=dict(zip(opened.names, names, strict=True)))


@step(
    FAMILY,
    takes={"edges": EDGES},
    releases={"counts": summed("rows by column and interval", 2, behind=(*OPEN_ROWS, LevelRowCounts))},
)
def count_columns(data: SiteData, state: State, edges: Floats) -> dict[str, Array]:
    """Count the rows of every column on its intervals: ``counts`` (p, J + 1)."""
    opened = rows_of(state)
    counts = interval_counts(row_intervals(opened, edges), edges)
    state.report(LevelRowCounts("cells of the table", counts.ravel().tolist()), ranked_sums(opened, edges))
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
    state.report(ranked_sums(opened, edges, f"ranks {digest}"))
    return {"products": R.T @ R}
