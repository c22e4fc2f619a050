"""A family of tests: noisy counts of one column by bin or level, under a privacy budget.

It is the smallest family whose releases are charged. Only sites of test modules that import the fixture
`counting` serve it, and processes of sites that tests start.

Each column of each site is a separate request, so that it is charged and remembered separately. For a number
the client sends the edges of the bins; outer bins have no end. A category, or a number with published levels
and without edges, is counted by its published levels. Missing values, and levels that are not published, are
in no cell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from fedstat.codec import from_json, to_json
from fedstat.errors import DescriptionError
from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.privacy_budget import NoiseRequired
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, Request, control
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.tables.columns import read_codes, read_numbers
from fedstat.federation.tables.published import PublishedColumn
from fedstat.typing import Array, Ints

FAMILY = "margins"
MOST_BINS = 4096
FRACTION = re.compile(r"[0-9]{1,40}(/[0-9]{1,40})?")


SQUARED_OF_COUNTS = 2
"""Square of the change of one histogram: a record leaves a cell and enters another."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundedSums:
    """Integers without noise, and the square of their sensitivity in the same units."""

    values: Ints
    squared: int


def cell_counts(code: Ints, cells: int) -> BoundedSums:
    """Count records by cell: (cells,).

    `code` is (n,), or (n, q) for q histograms one after the other, each in `cells` cells; negative in none.
    D^2 = 2 q.
    """
    codes = code.reshape(len(code), -1)
    q = codes.shape[1]
    inside = (codes >= 0) & (codes < cells)
    flat = (codes + cells * np.arange(q))[inside]
    counts = np.bincount(flat, minlength=q * cells).astype(np.int64)
    return BoundedSums(counts, SQUARED_OF_COUNTS * q)


@dataclass(frozen=True, slots=True)
class BinsRequest:
    """Which column is counted, what that may cost, a fraction as a text, and the inner edges of its bins.

    Of m edges there are m + 1 bins, each without its upper edge.
    """

    column: str
    rho: str
    edges: tuple[float, ...] = ()

    def canonical(self, where: str) -> BinsRequest:
        """Return the one form of all that ask for the same; DescriptionError where it is no question."""
        found = FRACTION.fullmatch(self.rho)
        rho = Fraction(self.rho) if found and not re.search("/0+$", self.rho) else Fraction(0)
        # -0.0 is 0.0
        edges = tuple(float(edge) + 0.0 for edge in self.edges)
        ascend = all(a < b for a, b in pairwise(edges)) and all(map(math.isfinite, edges))
        if not rho or not ascend or len(edges) >= MOST_BINS:
            raise DescriptionError(
                f"{where}: expected rho as a fraction above 0, and fewer than {MOST_BINS:,} finite edges "
                "that ascend"
            )
        return BinsRequest(self.column, str(rho), edges)


@step(
    FAMILY,
    releases={
        "counts": ArrayDeclaration(
            "noisy aggregate",
            "counts of a column by bin or level, with noise",
            maskable=True,
            dtype="int64",
            behind=(EntityCount, NoiseRequired),
            noisy=True,
        )
    },
    requests=control("column, edges of its bins, and what the answer may cost"),
)
def count_bins(data: SiteData, state: State, text: str) -> dict[str, Array]:
    """Count a column's values by bin or level: (cells,), without noise, which the site adds.

    Released as a noisy aggregate; one record changes two counts by one.
    """
    where = f"{data.name}: the question about a margin"
    request = from_json(BinsRequest, text, where, DescriptionError, defaults=True).canonical(where)
    column = _published(data, request)
    levels = () if request.edges else column.levels
    variance = Fraction(SQUARED_OF_COUNTS) / (2 * Fraction(request.rho))
    state.use_columns([request.column])
    state.report(EntityCount(data.table.n_rows))
    # The published levels are part of the request: with other levels it is another request.
    canonical = to_json({"asked": request.column, "edges": request.edges, "levels": levels})
    state.report(NoiseRequired("counts", canonical, SQUARED_OF_COUNTS, variance))
    cells = len(levels) or len(request.edges) + 1
    counts = np.zeros(cells, dtype=np.int64)
    for chunk in data.table.chunks((request.column,)):
        series = chunk[request.column]
        code = read_codes(series, levels) if levels else _bins_of(series, request.edges)
        counts += cell_counts(code, cells).values
    return {"counts": counts}


def _published(data: SiteData, request: BinsRequest) -> PublishedColumn:
    """Find the description of a column, by which alone a question is refused."""
    column = data.published.get(request.column)
    if column is None or request.column not in data.table.columns:
        raise DescriptionError.of_rule(
            "privacy budget",
            data.name,
            f"counts published columns only, and the site publishes no column '{request.column}'. Its owner "
            "may describe it in columns.toml",
        )
    if column.kind == "category" and request.edges:
        raise DescriptionError(
            f"{data.name}: column '{request.column}' is published as a category, and is counted by its "
            "levels: ask without edges"
        )
    if not column.levels and not request.edges:
        raise DescriptionError(
            f"{data.name}: column '{request.column}' is published without levels: say the edges of its bins"
        )
    return column


def _bins_of(series: pd.Series, edges: Sequence[float]) -> Ints:
    numbers = read_numbers(series)
    return np.where(np.isnan(numbers), -1, np.searchsorted(edges, numbers, side="right")).astype(np.int64)


def request_margins(
    request: Sequence[tuple[str, BinsRequest]], session: str
) -> FitProtocol[list[tuple[str, BinsRequest, Ints]]]:
    """Request counts of columns from sites in one round; errors are those of the disclosure checks."""
    replies = yield [
        Request(site, FAMILY, "count_bins", {}, session, to_json(question)) for site, question in request
    ]
    return [(*one, reply.arrays["counts"]) for one, reply in zip(request, replies, strict=True)]


STEPS = FAMILIES.pop(FAMILY)


@pytest.fixture(scope="module", autouse=True)
def counting():
    """Let sites answer the family during the tests of a module."""
    FAMILIES[FAMILY] = STEPS
    yield
    FAMILIES.pop(FAMILY, None)
