"""Tables with noise: which sums each one needs, and the figures and limits that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd

from fedstat.errors import ModelError
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.noisy_tables import (
    RunningCounts,
    consistent_counts,
    count_limits,
    noisy_correlation,
    noisy_quantiles,
    share_limits,
)
from fedstat.models.descriptive.frames import TableFrame, table_frame
from fedstat.models.descriptive.noisy_model import (
    FIRST_INTERVALS,
    NoiseSetting,
    NoisyCorrelations,
    NoisyRelease,
    NoisyTable,
    NoisyTableSums,
    intervals_of,
    most_intervals,
)
from fedstat.models.descriptive.noisy_steps import CodedColumn, TablePart
from fedstat.models.descriptive.table_one import Groups, TableOne, TableVariable, VariableNoise
from fedstat.typing import Floats

QUARTERS = np.array([0.25, 0.5, 0.75])
Figures = TypeVar("Figures", TableFrame, TableOne)


@dataclass(frozen=True, slots=True)
class RequestedTable(Generic[Figures]):
    """A table that is not requested yet: the model of its sums, and how they are read."""

    model: NoisyTable
    read: Callable[[NoisyRelease], Figures]

    def release(self) -> Figures:
        """Request the sums, and return the table."""
        return self.read(self.model.fit())


def _by(by: str | None) -> str:
    return "" if by is None else f" by {by}"


def _groups(partition: ClientPartition, by: str | None, setting: NoiseSetting) -> tuple[CodedColumn, ...]:
    return () if by is None else (setting.levels(partition, by),)


# ----------------------------------------------------------------------------------------------------
# Counts.


def noisy_crosstab(
    partition: ClientPartition, row: str, column: str, setting: NoiseSetting
) -> RequestedTable[TableFrame]:
    """Count the rows by two categories."""
    setting.require(partition, row, column)
    rows, columns = setting.levels(partition, row), setting.levels(partition, column)
    parts = [TablePart("cells", (columns,), (rows,))]
    model = NoisyTable(partition, parts, setting, f"rows by {row} and {column}")
    index, names = pd.Index(rows.levels, name=row), pd.Index(columns.levels, name=column)
    return RequestedTable(model, partial(_count_frame, model, index, names, "counts"))


def noisy_histogram(
    partition: ClientPartition, column: str, edges: Floats, by: str | None, setting: NoiseSetting
) -> RequestedTable[TableFrame]:
    """Count a number on intervals (low, high], by group; the first includes its lower end."""
    groups = _groups(partition, by, setting)
    ends = (float(np.nextafter(edges[0], -np.inf)), *edges[1:].tolist())
    parts = [TablePart("cells", (CodedColumn(column, edges=ends),), groups)]
    model = NoisyTable(partition, parts, setting, f"histogram of {column}{_by(by)}")
    every = np.concatenate([[-np.inf], edges, [np.inf]])
    index = pd.IntervalIndex.from_arrays(every[:-1], every[1:], name=column)
    names = pd.Index(groups[0].levels if groups else ["rows"], name=by)
    return RequestedTable(model, partial(_count_frame, model, index, names, "histogram"))


def _count_frame(
    model: NoisyTable, index: pd.Index, names: pd.Index, drawn: str, release: NoisyRelease
) -> TableFrame:
    sums = release.sums[0]
    noisy = sums.counts(0)
    if drawn == "histogram":  # groups are columns
        noisy = noisy.T
    n = model.partition.n_entities
    frame = pd.DataFrame(consistent_counts(noisy, sums.of_rows, n), index=index, columns=names)
    missing = n - int(frame.to_numpy().sum())
    limits = partial(count_limits, noisy, sums.of_rows)
    return table_frame(frame, drawn, missing=missing, limits=limits, **release.attrs())


# ----------------------------------------------------------------------------------------------------
# Quantiles.


def noisy_quantile_table(
    partition: ClientPartition, column: str, shares: Floats, by: str | None, setting: NoiseSetting
) -> RequestedTable[TableFrame]:
    """Return quantiles of a number, by group, from running counts."""
    groups = _groups(partition, by, setting)
    coded = _intervals(partition, column, setting, 1.0, groups)
    parts = [TablePart("running", (coded,), groups)]
    model = NoisyTable(partition, parts, setting, f"quantiles of {column}{_by(by)}")
    index = pd.Index(groups[0].levels if groups else ["all rows"], name=by)
    names = pd.Index(shares, name=column)
    return RequestedTable(model, partial(_quantile_frame, model, index, names, np.array(coded.edges)))


def _intervals(
    partition: ClientPartition,
    column: str,
    setting: NoiseSetting,
    share: float,
    groups: tuple[CodedColumn, ...],
) -> CodedColumn:
    """Return a number on as many intervals as the rows of a group can resolve at a share of the charge."""
    rows = partition.n_entities / math.prod(one.cells for one in groups)
    most = most_intervals(rows, float(setting.rho) * share)
    return CodedColumn(column, edges=intervals_of(*setting.range(partition, column), most))


def _quantile_frame(
    model: NoisyTable, index: pd.Index, names: pd.Index, edges: Floats, release: NoisyRelease
) -> TableFrame:
    running, shares = release.sums[0].running(0), names.to_numpy(dtype=np.float64)
    found = np.array([noisy_quantiles(line, edges, shares, 0.05)[0] for line in _lines(running)])
    missing = max(model.partition.n_entities - round(float(running.upto[:, -1].sum())), 0)
    limits = partial(_quantile_limits, running, edges, shares)
    more = {"missing": missing, "limits": limits, "error": float(edges[1] - edges[0]) / 2.0}
    frame = pd.DataFrame(found, index=index, columns=names)
    return table_frame(frame, "quantiles", **more, **release.attrs())


def _lines(running: RunningCounts) -> list[RunningCounts]:
    """Return each line (J,) of running counts (G, J)."""
    return [RunningCounts(line, running.covariance) for line in running.upto]


def _quantile_limits(
    running: RunningCounts, edges: Floats, shares: Floats, alpha: float
) -> tuple[Floats, Floats]:
    found = np.array([noisy_quantiles(line, edges, shares, alpha) for line in _lines(running)])
    return found[:, 1], found[:, 2]


# ----------------------------------------------------------------------------------------------------
# Correlations.


def noisy_corr(
    partition: ClientPartition, names: Sequence[str], setting: NoiseSetting
) -> RequestedTable[TableFrame]:
    """Return correlations of numbers."""
    setting.require(partition, *names)
    columns = [
        CodedColumn(name, edges=intervals_of(*setting.range(partition, name), FIRST_INTERVALS))
        for name in names
    ]
    model = NoisyCorrelations(partition, columns, setting, f"correlations of {', '.join(names)}")
    return RequestedTable(model, partial(_correlation_frame, model, list(names)))


def _correlation_frame(model: NoisyCorrelations, names: list[str], release: NoisyRelease) -> TableFrame:
    moments, radius = model.moments(release.sums[1]), model.requests[1].parts[0].squared_radius
    frame = pd.DataFrame(noisy_correlation(*moments, 0.05, radius)[0], index=names, columns=names)
    rows = model.partition.n_entities
    n = int(np.clip(round(moments[0]), 0, rows))
    more = {"nobs": n, "missing": rows - n, "limits": partial(_correlation_limits, moments, radius)}
    return table_frame(frame, "correlations", **more, **release.attrs())


def _correlation_limits(
    moments: tuple[float, Floats, Floats, float], radius: float, alpha: float
) -> tuple[Floats, Floats]:
    _, low, high = noisy_correlation(*moments, alpha, radius)
    return low, high


# ----------------------------------------------------------------------------------------------------
# The first table of a study.


def noisy_table_one(
    partition: ClientPartition,
    variables: Mapping[str, bool],
    by: str | None,
    nonnormal: Sequence[str],
    setting: NoiseSetting,
) -> RequestedTable[TableOne]:
    """Describe the rows by group, all variables by one array of sums; categories are marked."""
    setting.require(partition, *variables, by)
    groups = _groups(partition, by, setting)
    share = 1.0 / (len(variables) + len(groups))
    parts = [
        *(TablePart("cells", (one,)) for one in groups),
        *(
            _part_of(partition, name, category, name in nonnormal, setting, groups, share)
            for name, category in variables.items()
        ),
    ]
    model = NoisyTable(partition, parts, setting, f"table of {', '.join(variables)}{_by(by)}")
    return RequestedTable(model, partial(_table_one, model, tuple(variables), by, groups))


def _part_of(
    partition: ClientPartition,
    name: str,
    category: bool,
    nonnormal: bool,
    setting: NoiseSetting,
    groups: tuple[CodedColumn, ...],
    share: float,
) -> TablePart:
    """Return the sums of one variable."""
    if category or setting.describe(partition, name).range is None:
        if nonnormal:
            raise ModelError(f"nonnormal: expected numbers of the table, received {name!r}")
        return TablePart("cells", (setting.levels(partition, name),), groups)
    if nonnormal:
        return TablePart("running", (_intervals(partition, name, setting, share, groups),), groups)
    return TablePart("moments", (CodedColumn(name, edges=setting.range(partition, name)),), groups)


def _table_one(
    model: NoisyTable,
    names: tuple[str, ...],
    by: str | None,
    groups: tuple[CodedColumn, ...],
    release: NoisyRelease,
) -> TableOne:
    sums, n, parts = release.sums[0], model.partition.n_entities, model.requests[0].parts
    first = len(groups)
    found = tuple(_variable(name, parts[place], sums, place, n) for place, name in enumerate(names, first))
    every = Groups((), None, 0, ())
    if groups:
        sizes = _rows(sums.counts(0)[0], sums.of_rows, n)
        unknown = n - int(sizes.sum())
        every = Groups(tuple(map(str, groups[0].levels)), sizes, unknown, names)
    noise = (release.epsilon, release.delta)
    return TableOne(found, by, every, n, False, False, [release.ledger], noise=noise)


def _variable(name: str, part: TablePart, sums: NoisyTableSums, place: int, n: int) -> TableVariable:
    """Return the figures of one variable from its sums."""
    figures: dict[str, Any]
    if part.kind == "cells":
        noisy, deviation = sums.counts(place), sums.of_rows
        counts = _rows(noisy, deviation, n)
        rows, levels = counts.sum(axis=1), tuple(map(str, part.columns[0].levels))
        noise = VariableNoise(
            deviation=deviation,
            counts=np.array(count_limits(noisy, deviation, 0.05)),
            shares=np.array(share_limits(noisy, deviation, 0.05)),
        )
        figures = {"levels": levels, "counts": counts}
    elif part.kind == "moments":
        (low, high), moments = part.columns[0].edges, sums.moments(place)
        half, rows = (high - low) / 2.0, _rows(np.nan_to_num(moments.rows), sums.of_rows, n)
        noise = VariableNoise(errors=half * moments.error)
        figures = {"mean": low + half * (1.0 + moments.mean), "variance": half**2 * moments.variance}
    else:
        running, edges = sums.running(place), np.array(part.columns[0].edges)
        whole = RunningCounts(running.upto.sum(axis=0), len(running.upto) * running.covariance)
        lines = [whole, *_lines(running)]
        quarters = np.array([noisy_quantiles(line, edges, QUARTERS, 0.05) for line in lines])
        middles = np.concatenate([edges[:1], (edges[:-1] + edges[1:]) / 2.0, edges[-1:]])
        counts = running.counts
        rows = counts.sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = counts @ middles / rows
            squares = (counts * (middles - mean[:, None]) ** 2).sum(axis=1)
        noise = VariableNoise(quarters=quarters[:, 1:].swapaxes(0, 1))
        variance = squares / np.maximum(rows - 1.0, 1.0)
        rows = _rows(rows, math.sqrt(running.covariance[-1, -1]), n)
        figures = {"mean": mean, "variance": variance, "quarters": quarters[:, 0]}
    return TableVariable(name, n - int(rows.sum()), rows, noise=noise, **figures)


def _rows(noisy: Floats, deviation: float, n: int) -> Floats:
    """Return consistent counts as real numbers."""
    return consistent_counts(noisy, deviation, n).astype(np.float64)
