"""Counts by cell from all sites."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.codec import to_json
from fedstat.errors import EstimationError
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.survival_curves import LogRankSums
from fedstat.models.descriptive.steps import CellsRequest
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.typing import Floats


@dataclass(frozen=True, slots=True, eq=False)
class CellCounts:
    """Rows by group, interval (the last one beyond all edges) and event, over all sites: (G, J + 1, 2)."""

    edges: Floats
    cells: Floats


def request_of(session: RowsSession, groups: tuple[str, ...], number: str = "") -> CellsRequest:
    """Return the request that opens the rows of a table."""
    agreement = session.agreement
    return CellsRequest(agreement.question.to_json(), agreement.spec.to_json(), groups, number)


def open_table(session: RowsSession, request: CellsRequest) -> FitProtocol[Floats]:
    """Open the rows at all sites, and return their numbers by group, without and with the event: (G, 2)."""
    replies = yield session.request_all("open_cells", {}, to_json(request))
    return np.asarray(add(replies, "rows"))


def count_table(session: RowsSession, edges: Floats) -> FitProtocol[CellCounts]:
    """Count the rows of the open table on intervals."""
    replies = yield session.request_all("count_cells", {"edges": edges})
    return CellCounts(edges, np.asarray(add(replies, "cells")))


@dataclass(frozen=True, slots=True, eq=False)
class SurvivalTable:
    """Counts on a grid, rows by group (G, 2), and the log-rank test stratified by site."""

    rows: Floats
    counts: CellCounts
    by_site: LogRankSums


def survival_table(session: RowsSession, request: CellsRequest, grid: Floats) -> FitProtocol[SurvivalTable]:
    """Count events and censored rows by group on a grid of times."""
    rows = yield from open_table(session, request)
    if not rows[:, 1].any():
        raise EstimationError("there are no events at any site: there is no survival curve")
    counts = yield from count_table(session, grid)
    replies = yield session.request_all("sum_log_rank", {})
    parts = (np.asarray(add(replies, name)) for name in ("observed", "expected", "covariance"))
    return SurvivalTable(rows, counts, LogRankSums(*parts))
