"""Counts by cell from all sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedstat.codec import to_json
from fedstat.errors import DesignError, EstimationError, Remedy
from fedstat.federation.design.formula.expression import parse_expression, quoted_name
from fedstat.federation.design.formula.syntax_tree import Column
from fedstat.federation.design.horizontal_design import RowsDesign, open_requests, rows_request
from fedstat.federation.design.horizontal_steps import standardization
from fedstat.federation.design.site_rows import quantile_places
from fedstat.federation.design.spline_knots import agree_knots
from fedstat.federation.dry_run.expected_releases import IterationLoop
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.survival_curves import LogRankSums, SurvivalCounts
from fedstat.models.descriptive.steps import ENOUGH, CellsRequest
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.typing import Bools, Floats


@dataclass(frozen=True, slots=True, eq=False)
class CellCounts:
    """Rows by group, interval (the last beyond all edges) and event, over all sites: (G, J + 1, 1 + C)."""

    edges: Floats
    cells: Floats


def request_of(
    session: RowsSession,
    groups: tuple[str, ...],
    number: str = "",
    category: str = "",
    weighted: bool = False,
) -> CellsRequest:
    """Return the request that opens the rows of a table."""
    agreement = session.agreement
    return CellsRequest(
        agreement.question.to_json(), agreement.spec.to_json(), groups, number, category, weighted
    )


def open_table(session: RowsSession, request: CellsRequest) -> FitProtocol[Floats]:
    """Open the rows at all sites, and return their numbers by group and event: (G, 1 + C)."""
    replies = yield session.request_all("open_cells", {}, to_json(request))
    return np.asarray(add(replies, "rows"))


def count_table(session: RowsSession, edges: Floats) -> FitProtocol[CellCounts]:
    """Count the rows of the open table on intervals."""
    replies = yield session.request_all("count_cells", {"edges": edges})
    return CellCounts(edges, np.asarray(add(replies, "cells")))


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Intervals of time on which counts are released, up to `ends` (J,), of `requested` ones (R,).

    No cell has fewer than `least` rows, unless it has none: over all sites with `over_sites`, or at each.
    Rows whose time is an end are counted apart where `apart` (J,). `earlier` are the ends of the sites'
    earlier counts of these times, with which these were compared.
    """

    requested: Floats
    ends: Floats
    least: int
    over_sites: bool
    earlier: Floats
    apart: Bools

    @classmethod
    def of(cls, requested: Floats, ends: Floats, flags: _Flags, apart: Bools) -> Intervals:
        """Return the intervals up to these ends, with what the sites' flags say of their policies."""
        return cls(requested, ends, flags.least, flags.over_sites, flags.earlier, apart)


@dataclass(frozen=True, slots=True, eq=False)
class SurvivalTable:
    """Counts on intervals, rows by group (G, 1 + C), and the log-rank test stratified by site.

    `entered` (G, J) are rows by the interval in which they enter, where they may enter late; `at_ends` and
    `events_at_ends` (G, J) those of the leaving rows, and of those with an event, whose time is the end of
    their interval, zero where they are not counted apart.
    """

    rows: Floats
    counts: CellCounts
    by_site: LogRankSums
    intervals: Intervals
    at_ends: Floats
    events_at_ends: Floats
    entered: Floats | None = None

    @property
    def survival_counts(self) -> SurvivalCounts:
        """Counts of events of any kind."""
        cells, edges = self.counts.cells, self.counts.edges
        events, censored = cells[:, :-1, 1:].sum(axis=2), cells[:, :-1, 0]
        return SurvivalCounts(edges, events, censored, cells[:, -1].sum(axis=1), self.entered, self.at_ends)


CHOOSE_GRID = Remedy("fit(grid=1, until=60)", "Choose the grid, as in {call}")


def find_last_time(session: RowsSession) -> FitProtocol[float]:
    """Return the rounded end of the times over all sites, as the upper bound of a spline is found.

    DesignError if the times are no column, or all rows have the same time.
    """
    question = session.agreement.question
    assert question.survival is not None
    time = question.survival.times[-1]
    if not isinstance(time, Column):
        raise DesignError(
            f"{question.response!r}: the last time is found for a column and not for a term of several",
            remedy=CHOOSE_GRID,
        )
    # The rows are those of the curve: its groups are labels here.
    bounds = f"bs({quoted_name(time.name)}, df=3)"
    labels = tuple(dict.fromkeys((*question.labels, *question.columns)))
    spline = replace(question, terms=(bounds,), columns=(time.name,), labels=labels)
    try:
        found = yield from agree_knots(spline, session.sites, rows_request(session.session))
    except DesignError as error:
        raise DesignError(
            f"{question.response!r}: the times of all rows are equal, or nearly, so that no grid is found",
            remedy=CHOOSE_GRID,
        ) from error
    (text,) = found.placed
    return float(dict(parse_expression(text).tree.options)["upper_bound"])  # type: ignore[union-attr]


def survival_table(session: RowsSession, request: CellsRequest, grid: Floats) -> FitProtocol[SurvivalTable]:
    """Count events and censored rows by group on intervals of a grid, and where rows enter late, these."""
    rows = yield from open_table(session, request)
    if not rows[:, 1:].any():
        raise EstimationError("there are no events at any site: there is no survival curve")
    intervals = yield from choose_intervals(session, grid)
    ends = intervals.ends
    edges = with_ends_apart(ends, intervals.apart)
    replies = yield session.request_all(
        "count_times", {"edges": edges, "earlier": intervals.earlier, "requested": grid}
    )
    fine, width = np.asarray(add(replies, "cells")), rows.shape[1]
    at_ends = fine[:, np.searchsorted(edges, ends), :width] * intervals.apart[:, None]
    starts = np.append(0, np.searchsorted(edges, ends) + 1)
    cells = np.add.reduceat(fine, starts, axis=1)
    survival = session.agreement.question.survival
    entered = None
    if survival is not None and len(survival.times) > 1:
        entered = cells[:, :-1, width]
    replies = yield session.request_all("sum_log_rank", {})
    parts = (np.asarray(add(replies, name)) for name in ("observed", "expected", "covariance"))
    by_outcome = at_ends.sum(axis=2), at_ends[:, :, 1:].sum(axis=2)
    counts = CellCounts(ends, cells[:, :, :width])
    return SurvivalTable(rows, counts, LogRankSums(*parts), intervals, *by_outcome, entered)


NO_ENDS: Floats = np.zeros(0)
MOST_TRIES = 5
"""Ends that are examined in one interval before it stays whole."""
LATER_TRIES = 2
"""The same for times of which earlier counts were released."""
MERGED = (
    "Intervals with few rows are merged, and it is not known in advance which. The sites reveal of each "
    "interval that is examined whether it has few rows of {} and outcome."
)
"""What a plan says of the search for intervals; the blank is the name of the groups."""


def interval_search(points: int) -> IterationLoop:
    """Name the search for intervals of a grid, for a plan."""
    return IterationLoop(("flag_times",), MOST_TRIES * int(np.ceil(np.log2(points + 1))) + 2)


ROUND_PLACES = np.array([12, 6, 4, 3, 2, 1])
"""Multiples of the first end that are preferred in this order, such as years on a grid of months."""


@dataclass(slots=True)
class _Interval:
    """Places of the requested ends of an interval, and those between which the next end is tried."""

    first: int
    last: int
    low: int
    high: int
    tries: int = 0

    def candidate(self, preferred: Bools) -> int | None:
        """Return the place of the next end to try: a `preferred` or round one near the middle."""
        if self.tries >= (LATER_TRIES if preferred.any() else MOST_TRIES) or self.high - self.low < 2:
            return None
        middle, reach = (self.low + self.high) // 2, (self.high - self.low) // 8
        near = np.arange(max(middle - reach, self.low + 1), min(middle + reach, self.high - 1) + 1)
        roundness = np.where(preferred[near], -1, ((near[:, None] + 1) % ROUND_PLACES == 0).argmax(axis=1))
        best = near[roundness == roundness.min()]
        return int(best[np.abs(best - middle).argmin()])


@dataclass(frozen=True, slots=True, eq=False)
class _Flags:
    """What the sites say about intervals: whether each is allowed, (J + 1,), and their policies."""

    allowed: Bools
    least: int
    most: int
    over_sites: bool
    earlier: Floats
    repeated: Floats


def _flag(
    session: RowsSession, edges: Floats, near: Floats, requested: Floats = NO_ENDS
) -> FitProtocol[_Flags]:
    """Ask for the flags of the intervals before and after the ends `near`, some of `edges` (J,)."""
    at = np.searchsorted(edges, near)
    places = np.union1d(at, at + 1)
    replies = yield session.request_all(
        "flag_times", {"edges": edges, "places": places.astype(np.int64), "requested": requested}
    )
    enough, few = np.divmod(np.asarray(add(replies, "flags")), ENOUGH)
    least = round(max(float(reply.arrays["least"]) for reply in replies))
    most = min(float(reply.arrays["most"]) for reply in replies)
    over_sites = round(float(add(replies, "over_sites"))) == len(replies)
    allowed = few == 0
    if over_sites:
        # Each site that has a row at all counts for one of the least number of rows.
        allowed = allowed | (enough > 0) | (few >= least)
    earlier = np.unique(np.concatenate([reply.arrays["earlier"] for reply in replies]))
    everywhere = np.ones(len(edges) + 1, dtype=np.bool_)
    everywhere[places] = allowed.all(axis=(0, 2))
    repeated = [reply.arrays["repeated"] for reply in replies]
    same = all(np.array_equal(repeated[0], one) for one in repeated)
    return _Flags(
        everywhere, least, int(min(most, 1e9)), over_sites, earlier, repeated[0] if same else NO_ENDS
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Judged:
    """Whether the intervals before and after each end are allowed, (J, 2), and the flags of these ends.

    `own` is the same without the intervals between these ends and those of earlier counts.
    """

    allowed: Bools
    own: Bools
    flags: _Flags


def _judge(session: RowsSession, ends: Floats, tried: Floats) -> FitProtocol[_Judged]:
    """Examine some of the ends (J,), also with the ends of earlier counts: differences are counts as well."""
    flags = yield from _flag(session, ends, tried)
    own = np.column_stack([flags.allowed[:-1], flags.allowed[1:]])
    allowed = own.copy()
    new = np.isin(ends, np.setdiff1d(tried, flags.earlier))
    if flags.earlier.size and new.any():
        both = np.union1d(ends, flags.earlier)
        adjacent = (yield from _flag(session, both, ends[new])).allowed
        at = np.searchsorted(both, ends[new])
        allowed[new] &= np.column_stack([adjacent[at], adjacent[at + 1]])
    return _Judged(allowed, own, flags)


def choose_intervals(session: RowsSession, requested: Floats) -> FitProtocol[Intervals]:
    """Divide the time at requested ends (R,), from wide intervals to narrow ones, as far as it is allowed.

    A narrow interval is examined only within one that is allowed: an end that is refused shows that few rows
    are in an interval, and this interval is wide.
    """
    flags = yield from _flag(session, requested[-1:], requested[-1:], requested)
    if flags.least <= 1 and flags.most >= 2 * len(requested):
        # Few rows may be counted: there is nothing to examine.
        return Intervals.of(requested, requested, flags, np.ones(len(requested), dtype=np.bool_))
    if flags.repeated.size:
        # The same counts as before, so that a repetition has the same result.
        ends = flags.repeated[~np.isin(flags.repeated, _before(flags.repeated))]
        return Intervals.of(requested, ends, flags, np.isin(_before(ends), flags.repeated))
    # Ends of earlier counts reveal nothing new, and are preferred to ends near to them.
    known = flags.earlier[(flags.earlier <= requested[-1]) & ~np.isin(flags.earlier, _before(flags.earlier))]
    offered = np.union1d(requested, known)
    preferred = np.isin(offered, known)
    R = len(offered)
    accepted: list[int] = []
    pending = [_Interval(-1, R, -1, R)]
    first = True
    while pending and len(accepted) < flags.most:
        tried: list[tuple[_Interval, int]] = []
        following: list[_Interval] = []
        for one in sorted(pending, key=lambda one: one.first - one.last):
            place = R - 1 if first else one.candidate(preferred)
            if place is None:
                continue
            if len(tried) + len(accepted) < flags.most:
                tried.append((one, place))
            else:
                following.append(one)
        if not tried:
            break
        first = False
        ends = offered[sorted([*accepted, *(place for _, place in tried)])]
        judged = yield from _judge(session, ends, offered[[place for _, place in tried]])
        flags = judged.flags
        for one, place in tried:
            at = int(np.searchsorted(ends, offered[place]))
            left, right = judged.own[at].tolist()
            if judged.allowed[at].all():
                accepted.append(place)
                following += [
                    _Interval(one.first, place, one.first, place),
                    _Interval(place, one.last, place, one.last),
                ]
            elif left or right or one.last == R:
                # A later end where the interval before it has few rows, and otherwise an earlier one.
                low, high = (place, one.high) if right and not left else (one.low, place)
                following.append(_Interval(one.first, one.last, low, high, one.tries + (one.last < R)))
        pending = following
    if not accepted:
        whole = "over all sites" if flags.over_sites else "at every site"
        raise EstimationError(
            f"no interval up to {requested[-1]:g} has no row or at least {flags.least} rows of each group "
            f"and outcome {whole}: there is no survival curve. Use fewer groups, another last time, or more "
            "sites"
        )
    ends = offered[np.sort(accepted)]
    if np.isin(requested, ends).all():
        ends = requested  # intervals that are allowed are allowed together
    # Intervals up to just before an end, and of the end alone; with earlier counts, if these have them.
    apart = np.ones(len(ends), dtype=np.bool_)
    if flags.earlier.size:
        apart = np.isin(_before(ends), flags.earlier)
    if apart.any():
        edges = with_ends_apart(ends, apart)
        allowed = (yield from _flag(session, edges, _before(ends[apart]))).allowed[:-1]
        places = np.searchsorted(edges, ends)
        apart &= allowed[places] & allowed[np.maximum(places - 1, 0)]
    apart[max(int(flags.most) - len(ends), 0) :] = False
    return Intervals.of(requested, ends, flags, apart)


def with_ends_apart(ends: Floats, apart: Bools) -> Floats:
    """Return ends (J,) and, before those that are counted apart, the largest number below each."""
    return np.sort(np.concatenate([_before(ends[apart]), ends]))


def _before(ends: Floats) -> Floats:
    """Return the largest number below each end."""
    return np.asarray(np.nextafter(ends, -np.inf))


@dataclass(frozen=True, slots=True, eq=False)
class NumberTable:
    """A number by group over all sites: rows, mean and variance (G,), and counts on intervals or none."""

    rows: Floats
    mean: Floats
    variance: Floats
    counts: CellCounts | None


def number_table(
    session: RowsSession,
    request: CellsRequest,
    edges: Floats | None,
    moments: bool = True,
    shares: Sequence[float] = (),
) -> FitProtocol[NumberTable]:
    """Sum a number by group, and count it on intervals where they are given.

    The intervals in which quantiles are, for these `shares`, of all rows or of a group, are divided and
    counted once more.
    """
    rows = (yield from open_table(session, request)).sum(axis=1)
    mean = variance = np.full(len(rows), np.nan)
    if moments:
        replies = yield session.request_all("sum_number", {})
        n, total, within, squares = np.asarray(add(replies, "moments")).T
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = total / n
            variance = (within + np.maximum(squares - n * mean**2, 0.0)) / (n - 1.0)
    counts = None if edges is None else (yield from count_table(session, edges))
    if counts is not None and len(shares):
        counts = yield from count_table(session, divided_edges(counts, np.asarray(shares)))
    return NumberTable(rows, mean, np.where(rows > 1.0, variance, np.nan), counts)


def divided_edges(counts: CellCounts, shares: Floats) -> Floats:
    """Divide the intervals in which quantiles are, of all rows and of each group."""
    by_group = counts.cells.sum(axis=2)
    low, high = (quantile_places(np.vstack([by_group.sum(axis=0), by_group]), shares, end) for end in ENDS)
    places = np.unique(np.concatenate([low.ravel(), high.ravel()]))
    edges = counts.edges
    inside = places[(places > 0) & (places < len(edges))]
    further = [np.linspace(edges[place - 1], edges[place], DIVISIONS + 1)[1:-1] for place in inside]
    return np.unique(np.concatenate([edges, *further]))


ENDS = (np.floor, np.ceil)
DIVISIONS = 32
"""Parts of an interval in which a quantile is."""


@dataclass(frozen=True, slots=True, eq=False)
class CategoryTable:
    """Rows by group (G,), and by group and level (G, L): NaN where a count is hidden."""

    rows: Floats
    counts: Floats


def category_table(session: RowsSession, request: CellsRequest) -> FitProtocol[CategoryTable]:
    """Count the levels of a category by group, without cells that have few rows at a site."""
    rows = (yield from open_table(session, request)).sum(axis=1)
    replies = yield session.request_all("flag_levels", {})
    small, large = (np.asarray(add(replies, name)) for name in ("small", "large"))
    shown = cells_shown(small > 0, large == len(replies))
    replies = yield session.request_all("count_levels", {"shown": shown})
    return CategoryTable(rows, np.where(shown, add(replies, "counts"), np.nan))


def cells_shown(small: Bools, large: Bools) -> Bools:
    """Return the cells (G, L) that are shown: no small one, and none that would reveal what is hidden.

    The rows of a group are known, and those of a level over all groups. So what is hidden of each group and
    of each level is several cells, of which one has enough rows at every site (`large`). Without such a cell
    the whole group or level is hidden.
    """
    hidden, before = small.copy(), np.zeros(0, dtype=bool)
    lines = [(hidden, large, hidden.T)] + [(hidden.T, large.T, hidden)] * (len(small) > 1)
    while not np.array_equal(hidden, before):
        before = hidden.copy()
        for cells, enough, across in lines:
            for i in np.flatnonzero(cells.any(axis=1) & ~cells.all(axis=1)).tolist():
                if cells[i].sum() > 1 and (cells[i] & enough[i]).any():
                    continue
                candidates = np.flatnonzero(enough[i] & ~cells[i])
                # Where other cells are hidden already, few further ones are needed.
                order = np.argsort(across[candidates].any(axis=1), kind="stable")
                cells[i, candidates[order][-1:] if len(candidates) else slice(None)] = True
    return np.asarray(~hidden)


def correlation(session: RowsSession) -> FitProtocol[tuple[RowsDesign, Floats]]:
    """Return the design, and the correlations of its columns without the intercept (p, p)."""
    design = session.opened((yield session.opening()))
    shift, scale = standardization(design.mean, design.spread, design.intercept)
    replies = yield session.request_all("sum_products", {"shift": shift, "scale": scale})
    first = int(design.intercept)
    products = np.asarray(add(replies, "products"))[first:, first:]
    size = np.sqrt(np.diag(products))
    return design, np.clip(products / np.outer(size, size), -1.0, 1.0)


def rank_correlation(
    session: RowsSession, names: Sequence[str], edges: Floats
) -> FitProtocol[tuple[Floats, Floats]]:
    """Count every column on its intervals, with ends `edges` (p, J), and correlate their mid-ranks.

    Returns their correlations (p, p), and bounds on the differences from those of ranks (p, p).
    """
    opening = open_requests(session.agreement, session.session)
    replies = yield opening + session.request_all("count_columns", {"edges": edges})
    counts = np.rint(add(replies[len(opening) :], "counts"))
    n = counts[0].sum()
    # Mid-ranks less their mean, and the sums of their squares.
    ranks = counts.cumsum(axis=1) - (counts + n) / 2.0
    squares = (counts * ranks**2).sum(axis=1)
    for name, one in zip(names, squares, strict=True):
        if not one > 0.0:
            raise DesignError(
                f"column {name!r}: all rows are in one interval, so their ranks are equal; give a narrower "
                "range in bounds, or leave the column out"
            )
    ranks = ranks / np.sqrt(squares / n)[:, None]
    replies = yield session.request_all("sum_ranks", {"edges": edges, "ranks": ranks})
    products = np.asarray(add(replies, "products"))
    size = np.sqrt(np.diag(products))
    found = np.clip(products / np.outer(size, size), -1.0, 1.0)
    return found, rank_error(found, counts, squares)


def rank_error(correlations: Floats, counts: Floats, squares: Floats) -> Floats:
    """Return a bound (p, p) on errors of correlations of mid-ranks, from counts (p, J) and squares (p,).

    The mid-rank of an interval is the mean of the ranks in it: the mid-ranks are a projection of the ranks.
    The angle between the two has at least the cosine that follows if no two numbers in an interval are equal.
    Angles between vectors obey the triangle inequality.
    """
    within = (counts * (counts**2 - 1.0)).sum(axis=1) / 12.0
    moved = np.arctan(np.sqrt(within / squares))
    angle = np.arccos(correlations)
    ends = (np.clip(angle + sign * np.add.outer(moved, moved), 0.0, np.pi) for sign in (-1.0, 1.0))
    error: Floats = np.max([np.abs(np.cos(end) - correlations) for end in ends], axis=0)
    np.fill_diagonal(error, 0.0)
    return error
