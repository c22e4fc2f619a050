"""Synthetic rows of a table, for a dry run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedstat.codec import from_json
from fedstat.federation.design.horizontal_design import RowsSchema
from fedstat.federation.design.horizontal_steps import OPEN_ROWS
from fedstat.federation.disclosure.facts import LevelRowCounts
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.dry_run.execution import DrySite
from fedstat.models.descriptive.steps import CELLS, FAMILY, CellsRequest, OpenCells
from fedstat.typing import Array, Floats


def with_synthetic_cells(
    sites: Mapping[str, DrySite], agreement: RowsSchema, groups: Sequence[str], category: str = ""
) -> Mapping[str, DrySite]:
    """Let sites open rows that are spread evenly over groups and levels, with one number."""
    sizes = [len(agreement.spec.levels[name]) for name in (*groups, *([category] if category else []))]
    levels = sizes.pop() if category else 1
    G = int(np.prod(sizes, dtype=np.int64))

    def open_cells(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
        n = data.table.n_rows
        place = np.arange(n)
        request = from_json(CellsRequest, text, f"{data.name}: the request of a table")
        opened = OpenCells(data, request, G, levels)
        opened.group, opened.level, opened.rows = place % G, place // G % levels, place
        width = opened.outcomes
        opened.event = (place // (G * levels) + 1) % width
        opened.number, opened.averaged, opened.start = np.ones(n), np.ones(n), np.zeros(n)
        opened.sort_times()
        state.count_entities(n)
        state.reported.update(CELLS)
        state.keep(FAMILY, opened, n, columns=len(groups))
        return {"rows": np.full((G, width), n / (width * G))}, ""

    entry = replace(FAMILIES[FAMILY]["open_cells"], run=open_cells)
    for site in sites.values():
        site._instead = {**site._instead, (FAMILY, "open_cells"): entry}
    return sites


def with_synthetic_ranks(sites: Mapping[str, DrySite]) -> Mapping[str, DrySite]:
    """Let sites count rows that are spread evenly over intervals, with uncorrelated ranks."""

    def report(data: SiteData, state: State) -> None:
        state.count_entities(data.table.n_rows)
        state.reported.update((*OPEN_ROWS, LevelRowCounts))

    def count_columns(data: SiteData, state: State, edges: Floats) -> dict[str, Array]:
        report(data, state)
        shape = len(edges), edges.shape[1] + 1
        return {"counts": np.full(shape, float(data.table.n_rows))}

    def sum_ranks(data: SiteData, state: State, edges: Floats, ranks: Floats) -> dict[str, Array]:
        report(data, state)
        return {"products": np.eye(len(edges)) * data.table.n_rows}

    for site in sites.values():
        for run in (count_columns, sum_ranks):
            entry = replace(FAMILIES[FAMILY][run.__name__], run=run)
            site._instead = {**site._instead, (FAMILY, run.__name__): entry}
    return sites
