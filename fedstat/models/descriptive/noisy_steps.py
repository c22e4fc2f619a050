"""The step of a site for tables with noise: one bounded vector of whole numbers for each row, summed.

A table is one array, with one charge to the privacy budget: :mod:`fedstat.inference.noisy_tables`. The
request describes every column by public levels or intervals, so nothing fails because of the content of rows:
a missing value, or a level that is not listed, is in no cell, and an infinite number is in an outer interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Literal

import numpy as np
import pandas as pd

from fedstat.codec import from_json, to_json
from fedstat.errors import DescriptionError, MessageError
from fedstat.federation.disclosure.facts import EntityCount, FactorsRequested, FormulaFactor
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.privacy_budget import NoiseRequired, NoiseShares, honest_shares
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, Step, control
from fedstat.federation.tables.columns import LevelValue, read_codes, read_numbers
from fedstat.inference.noisy_tables import PLACES, UNIT, running_weights, squared_length
from fedstat.models.descriptive.steps import FAMILY, MOST_CELLS
from fedstat.privacy.sensitivity import clip_rows
from fedstat.privacy.zcdp import share_of_noise
from fedstat.typing import Array, Bools, Floats, Ints

PartKind = Literal["cells", "running", "moments", "products"]
MOST_INTERVALS = 1024
"""Most intervals of running counts, whose weights are a matrix."""


@dataclass(frozen=True, slots=True)
class CodedColumn:
    """A column in cells: its levels, or intervals that end at `edges`, ascending, and one beyond all.

    Of a number that is summed, the two edges are those that are scaled to -1 and 1.
    """

    name: str
    levels: tuple[LevelValue, ...] = ()
    edges: tuple[float, ...] = ()

    @property
    def cells(self) -> int:
        """Number of cells."""
        return len(self.levels) or len(self.edges) + 1

    @property
    def is_valid(self) -> bool:
        """Whether it has levels or ascending edges."""
        ascend = all(a < b for a, b in pairwise(self.edges)) and all(map(math.isfinite, self.edges))
        return ascend and bool(self.levels) != bool(self.edges)

    def code(self, series: pd.Series) -> Ints:
        """Return the cell of each value (n,), -1 for none."""
        if self.levels:
            return read_codes(series, self.levels)
        numbers = read_numbers(series)
        return np.where(np.isnan(numbers), -1, np.searchsorted(self.edges, numbers)).astype(np.int64)

    def scale(self, series: pd.Series) -> Floats:
        """Return numbers (n,) in units of half of the range from its middle, NaN for none."""
        low, high = self.edges
        return np.asarray((read_numbers(series) - (low + high) / 2.0) / ((high - low) / 2.0))


@dataclass(frozen=True, slots=True)
class TablePart:
    """Sums of one kind, by combinations of the levels of `groups`.

    "cells" counts the rows by combinations of cells of the columns, "running" up to the end of each cell of
    one column (:func:`running_weights`), "moments" sums one, a scaled number and its square, and "products"
    sums one, scaled numbers whose squared length is at most `squared_radius`, and their products.
    """

    kind: PartKind
    columns: tuple[CodedColumn, ...]
    groups: tuple[CodedColumn, ...] = ()
    squared_radius: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the sums: groups, then cells or moments."""
        G = math.prod(one.cells for one in self.groups)
        match self.kind:
            case "cells" | "running":
                return G, math.prod(one.cells for one in self.columns)
            case "moments":
                return G, 3
            case _:
                p = len(self.columns)
                return G, 1 + p + p * (p + 1) // 2

    @property
    def squared(self) -> int:
        """Square of the longest vector that one row adds, in squares of the integers."""
        match self.kind:
            case "cells":
                return UNIT**2
            case "running":
                return squared_length(running_weights(self.columns[0].cells))
            case "moments":
                return 3 * UNIT**2
            case _:
                # The squares and products of a row: (R^4 + sum of fourth powers) / 2, at most R^4.
                R2 = self.squared_radius
                return int(UNIT**4 * (R2**2 + R2 + 1))

    @property
    def is_valid(self) -> bool:
        """Whether it describes sums of a limited number."""
        numbers = self.kind in ("moments", "products")
        fits = all(one.is_valid for one in (*self.columns, *self.groups)) and bool(self.columns)
        fits = fits and all(one.levels for one in self.groups)
        fits = fits and not (numbers and any(len(one.edges) != 2 for one in self.columns))
        if self.kind in ("running", "moments"):
            fits = fits and len(self.columns) == 1 and self.columns[0].cells <= MOST_INTERVALS
        if self.kind == "products":
            fits = fits and 0 < self.squared_radius < UNIT
        return fits and math.prod(self.shape) <= MOST_CELLS

    def sum_rows(self, frame: pd.DataFrame, used: Bools) -> Ints:
        """Sum the vectors of the rows that are used: the shape of the sums."""
        group = _combine(self.groups, frame)
        if self.kind in ("cells", "running"):
            cell = _combine(self.columns, frame)
            counts = _count(group, cell, used & (group >= 0) & (cell >= 0), self.shape)
            return counts @ running_weights(counts.shape[1]).T if self.kind == "running" else counts * UNIT
        Z = np.column_stack([one.scale(frame[one.name]) for one in self.columns])
        has = used & (group >= 0) & ~np.isnan(Z).any(axis=1)
        group, Z = group[has], Z[has]
        out = np.zeros(self.shape, dtype=np.int64)
        if self.kind == "moments":
            z = np.clip(Z[:, 0], -1.0, 1.0)
            rows = np.column_stack([np.ones(len(z)), z, z**2])
            np.add.at(out, group, np.rint(rows * UNIT).astype(np.int64))
            return out
        U = clip_rows(Z, self.squared_radius, PLACES)
        first, second = np.triu_indices(U.shape[1])
        for g in range(len(out)):
            own = U[group == g]
            out[g] = [len(own) * UNIT**2, *(own.sum(axis=0) * UNIT), *(own.T @ own)[first, second]]
        return out


def _combine(columns: tuple[CodedColumn, ...], frame: pd.DataFrame) -> Ints:
    """Return the combination of cells of each row (n,), -1 where one is none."""
    code, known = np.zeros(len(frame), dtype=np.int64), np.ones(len(frame), dtype=bool)
    for one in columns:
        own = one.code(frame[one.name])
        code, known = code * one.cells + np.maximum(own, 0), known & (own >= 0)
    return np.where(known, code, -1)


def _count(group: Ints, cell: Ints, has: Bools, shape: tuple[int, ...]) -> Ints:
    code = group[has] * shape[1] + cell[has]
    return np.bincount(code, minlength=math.prod(shape)).reshape(shape).astype(np.int64)


@dataclass(frozen=True, slots=True)
class NoisyTableRequest:
    """The parts of a table, the columns that rows must have as well, and what the table may cost.

    `rho` is the charge as a fraction, `later` that of later requests of the same analysis. Every site
    receives the same request.
    """

    parts: tuple[TablePart, ...]
    complete: tuple[str, ...]
    rho: str
    later: str = "0"
    shares: NoiseShares | None = None

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns that are read, each once."""
        coded = (one.name for part in self.parts for one in (*part.groups, *part.columns))
        return tuple(dict.fromkeys((*coded, *self.complete)))

    @property
    def squared(self) -> int:
        """Squared sensitivity of all sums together: a row adds one vector to each part."""
        return sum(part.squared for part in self.parts)

    @property
    def variance(self) -> int:
        """Variance of the noise that has to be left, a whole number."""
        return max(math.ceil(self.squared / (2 * Fraction(self.rho))), 1)

    @property
    def required(self) -> NoiseRequired:
        """The noise of one site, and its charge; shares and later requests do not change the request."""
        return NoiseRequired(
            "sums",
            to_json(replace(self, shares=None, later="0")),
            self.squared,
            share_of_noise(self.variance, honest_shares(self.shares)),
            later=Fraction(self.later),
            shares=self.shares,
        )

    def check_at(self, site: str) -> None:
        """Refuse what is no table, from the request alone."""
        try:
            positive = Fraction(self.rho) > 0 and Fraction(self.later) >= 0
        except (ValueError, ZeroDivisionError):
            positive = False
        if not (positive and self.parts and all(part.is_valid for part in self.parts)):
            raise DescriptionError(
                f"{site}: the request for a table with noise needs parts of columns with levels or ascending "
                f"edges, at most {MOST_CELLS:,} sums in each, and a charge above 0"
            )

    def split(self, sums: Array) -> Iterator[Array]:
        """Return the sums of each part in its shape."""
        start = 0
        for part in self.parts:
            size = math.prod(part.shape)
            yield sums[start : start + size].reshape(part.shape)
            start += size


def _declare(data: SiteData, state: State, text: str) -> NoisyTableRequest:
    """Check a request, and report its columns and its noise, before a row is read."""
    try:
        request = from_json(NoisyTableRequest, text, f"{data.name}: the request for a table with noise")
    except MessageError as error:
        raise DescriptionError(str(error)) from error
    request.check_at(data.name)
    state.use_columns(request.needed)
    state.report(FactorsRequested([FormulaFactor(name, (name,)) for name in request.needed]))
    state.report(EntityCount(data.table.n_rows), request.required)
    return request


@step(
    FAMILY,
    requests=control("columns in public cells, and what the table may cost", common=True),
    releases={
        "sums": ArrayDeclaration(
            "noisy aggregate",
            "counts and sums of a table, with noise",
            maskable=True,
            dtype="int64",
            behind=(EntityCount, NoiseRequired),
            noisy=True,
        )
    },
    begins=True,
)
def sum_noisy_table(data: SiteData, state: State, text: str) -> dict[str, Array]:
    """Sum one vector for each row: ``sums`` (m,), without noise, which the disclosure checks add."""
    request = _declare(data, state, text)
    absent = [name for name in request.needed if name not in data.table.columns]
    if absent:
        raise DescriptionError(f"{data.name}: has no column {', '.join(map(repr, absent))}")
    totals = [np.zeros(part.shape, dtype=np.int64) for part in request.parts]
    for chunk in data.table.chunks(request.needed):
        used = np.asarray(chunk[list(request.complete)].notna().to_numpy().all(axis=1), dtype=bool)
        for total, part in zip(totals, request.parts, strict=True):
            total += part.sum_rows(chunk, used)
    return {"sums": np.concatenate([total.ravel() for total in totals])}


def synthetic_sums(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Return zeros in the shape of the sums, for sites without data."""
    request = _declare(data, state, text)
    return {"sums": np.zeros(sum(math.prod(part.shape) for part in request.parts), dtype=np.int64)}, ""


DRY_RUN_STEPS: Mapping[tuple[str, str], Step] = {
    (FAMILY, "sum_noisy_table"): replace(FAMILIES[FAMILY]["sum_noisy_table"], run=synthetic_sums)
}
