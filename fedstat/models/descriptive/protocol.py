"""Counts by cell from all sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedstat.codec import to_json
from fedstat.errors import DesignError, EstimationError
from fedstat.federation.design.horizontal_design import RowsDesign, open_requests
from fedstat.federation.design.horizontal_steps import standardization
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.survival_curves import LogRankSums, SurvivalCounts
from fedstat.models.descriptive.steps import CellsRequest
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.typing import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class CellCounts:
    """Rows by group, interval (the last beyond all edges) and event, over all sites: (G, J + 1, 1 + C)."""

    edges: Floats
    cells: Floats


def request_of(
    session: RowsSession, groups: tuple[str, ...], number: str = "", category: str = ""
) -> CellsRequest:
    """Return the request that opens the rows of a table."""
    agreement = session.agreement
    return CellsRequest(agreement.question.to_json(), agreement.spec.to_json(), groups, number, category)


def open_table(session: RowsSession, request: CellsRequest) -> FitProtocol[Floats]:
    """Open the rows at all sites, and return their numbers by group and event: (G, 1 + C)."""
    replies = yield session.request_all("open_cells", {}, to_json(request))
    return np.asarray(add(replies, "rows"))


def count_table(session: RowsSession, edges: Floats) -> FitProtocol[CellCounts]:
    """Count the rows of the open table on intervals."""
    replies = yield session.request_all("count_cells", {"edges": edges})
    return CellCounts(edges, np.asarray(add(replies, "cells")))


@dataclass(frozen=True, slots=True, eq=False)
class SurvivalTable:
    """Counts on a grid, rows by group (G, 1 + C), and the log-rank test stratified by site.

    `entered` (G, J) are rows by the interval in which they enter, where all sites were asked.
    """

    rows: Floats
    counts: CellCounts
    by_site: LogRankSums
    entered: Floats | None = None

    @property
    def survival_counts(self) -> SurvivalCounts:
        """Counts of events of any kind."""
        cells, edges = self.counts.cells, self.counts.edges
        events, censored = cells[:, :-1, 1:].sum(axis=2), cells[:, :-1, 0]
        return SurvivalCounts(edges, events, censored, cells[:, -1].sum(axis=1), self.entered)


def survival_table(session: RowsSession, request: CellsRequest, grid: Floats) -> FitProtocol[SurvivalTable]:
    """Count events and censored rows by group on a grid of times, and where rows enter late, these."""
    rows = yield from open_table(session, request)
    if not rows[:, 1:].any():
        raise EstimationError("there are no events at any site: there is no survival curve")
    counts, entered = (yield from count_table(session, grid)), None
    survival = session.agreement.question.survival
    if survival is not None and len(survival.times) > 1:
        replies = yield session.request_all("count_entries", {"edges": grid})
        entered = np.asarray(add(replies, "entered"))[:, :-1]
    replies = yield session.request_all("sum_log_rank", {})
    parts = (np.asarray(add(replies, name)) for name in ("observed", "expected", "covariance"))
    return SurvivalTable(rows, counts, LogRankSums(*parts), entered)


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


def quantile_places(counts: Floats, shares: Floats, end: Callable[[Floats], Floats]) -> Ints:
    """Return the interval of each quantile, (G, Q), from counts (G, J): of the row before or after it."""
    upto = counts.cumsum(axis=1)
    positions = end(shares * np.maximum(upto[:, -1:] - 1.0, 0.0))
    found = [np.searchsorted(row, at, side="right") for row, at in zip(upto, positions, strict=True)]
    return np.asarray(np.minimum(np.array(found), counts.shape[1] - 1), dtype=np.int64)


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

    The rows of a group are known. So what is hidden of a group needs a cell that has enough rows at every
    site (`large`); without one the whole group is hidden.
    """
    shown = ~small
    for group in np.flatnonzero(small.any(axis=1)):
        enough = np.flatnonzero(large[group])
        shown[group, enough[-1:] if len(enough) else slice(None)] = False
    return np.asarray(shown)


def correlation(session: RowsSession) -> FitProtocol[tuple[RowsDesign, Floats]]:
    """Return the design, and the correlations of its columns without the intercept (p, p)."""
    design = session.opened((yield session.opening()))
    shift, scale = standardization(design.mean, design.spread, design.intercept)
    replies = yield session.request_all("sum_products", {"shift": shift, "scale": scale})
    first = int(design.intercept)
    products = np.asarray(add(replies, "products"))[first:, first:]
    size = np.sqrt(np.diag(products))
    return design, np.clip(products / np.outer(size, size), -1.0, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class RankCorrelations:
    """Correlations of mid-ranks of intervals (p, p), and bounds on their differences from those of ranks."""

    correlations: Floats
    error: Floats


def rank_correlation(
    session: RowsSession, names: Sequence[str], edges: Floats
) -> FitProtocol[RankCorrelations]:
    """Count every column on its intervals, with ends `edges` (p, J), and correlate their mid-ranks."""
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
    return RankCorrelations(found, rank_error(found, counts, squares))


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
