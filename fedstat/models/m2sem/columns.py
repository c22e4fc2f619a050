"""Columns and covariates of one site, as input of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fedstat.codec import to_json
from fedstat.errors import DescriptionError, DesignError, MessageError, PolicyError
from fedstat.federation.design.block import CodedBlock, apply_block, build_block
from fedstat.federation.design.coding import BlockSpec, read_terms
from fedstat.federation.design.formula.facts import term_facts
from fedstat.federation.design.formula.parse import SiteTerms
from fedstat.federation.design.levels import check_declared
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, control, presence, schema
from fedstat.federation.tables.columns import (
    LevelValue,
    as_categories,
    as_numbers,
    at_column,
    column_kind,
    find_levels,
    pick_columns,
)
from fedstat.models.m2sem.request import (
    FAMILY,
    ColumnReply,
    ColumnsRequest,
    CovariatesReply,
    CovariatesRequest,
    Kind,
    ModalityRequest,
    OpenNewRowsRequest,
    OpenRequest,
    Reported,
)
from fedstat.typing import Array, Bools, Floats

# ----------------------------------------------------------------------------------------------------
# Known covariates at the site whose columns they adjust: coded as in a design, and standardized.


@dataclass(frozen=True, slots=True, eq=False)
class OpenedCovariates:
    """Covariates of the open rows, (n, q), with means and deviations (2, q) of those of the fit."""

    spec: BlockSpec
    X: Floats
    units: Floats

    @property
    def standardized(self) -> Floats:
        """Standardized covariates, (n, q)."""
        return np.asarray((self.X - self.units[0]) / self.units[1])

    def in_units(self, site: str, units: Floats) -> OpenedCovariates:
        """Return the same with the means and deviations of a fit."""
        if units.shape != (2, self.X.shape[1]) or not (units[1] > 0.0).all():
            raise MessageError(f"{site}: expected means and deviations of {self.X.shape[1]} covariates")
        return replace(self, units=units)


def open_covariates(
    data: SiteData, state: State, request: CovariatesRequest, use: Bools
) -> tuple[OpenedCovariates, Bools, CovariatesReply]:
    """Code covariates of the rows in `use`: return them, the rows (n_rows,) that have all, and the reply."""
    terms = SiteTerms(data.name, request.terms, request.columns)
    state.report(term_facts(read_terms(terms.terms, terms.columns)))
    state.use_columns(request.columns)
    block = build_block(
        data.frame, terms, partial="drop", min_count=data.min_count, use=use, published=data.published
    )
    # Levels are released with their names; means, deviations and slopes of covariates with the estimates.
    for name in block.spec.levels:
        state.report(facts.LevelRowCounts(name, data.frame[name][block.seen].value_counts().tolist()))
    state.report(facts.SummedColumns(block.X))
    units = np.array([block.X.mean(axis=0), block.X.std(axis=0)])
    reported = CovariatesReply(block.spec.names, block.spec.levels, int(use.sum() - block.seen.sum()))
    return OpenedCovariates(block.spec, block.X, units), block.seen, reported


def open_new_covariates(
    data: SiteData, state: State, coding: str, use: Bools
) -> tuple[OpenedCovariates, Bools]:
    """Code the covariates of new rows as in a fit: return them, and the rows in `use` that have all."""
    spec = BlockSpec.from_json(coding)
    state.report(term_facts(read_terms(spec.terms, spec.columns)))
    state.use_columns(spec.columns)
    block = apply_block(data.frame, spec, site=data.name)
    return _among(block, use), np.asarray(block.seen & use)


def _among(block: CodedBlock, use: Bools) -> OpenedCovariates:
    X = block.X[use[block.seen]]
    return OpenedCovariates(block.spec, X, np.array([np.zeros(X.shape[1]), np.ones(X.shape[1])]))


# ----------------------------------------------------------------------------------------------------
# Columns of one site as input of a mixture: their kinds, and their values.

COLUMNS_ITEM = "m2sem columns"
FEW_VALUES = 10
"""Whole numbers with at most this many values may be a scale or a code: the analyst states which."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenedModality:
    """A modality's columns over the rows that have some column of the site: nan where a cell is missing.

    Values (n, P) of categorical columns are indices of levels, -1 where missing.
    """

    requested: ModalityRequest
    values: Array


@dataclass(frozen=True, slots=True, eq=False)
class OpenedModalities:
    """Modalities of a site, the rows of its table that have some value in them, (n_rows,), and covariates."""

    modalities: tuple[OpenedModality, ...]
    seen: Bools
    covariates: OpenedCovariates | None = None

    @property
    def standardized(self) -> Floats | None:
        """Standardized covariates of the observed rows, (n, q); None without any."""
        return None if self.covariates is None else self.covariates.standardized


COLUMN_FACTS: tuple[type, ...] = (facts.EntityCount, facts.FactorsRequested)


@step(
    FAMILY,
    request=ColumnsRequest,
    requests=control("names of columns, and their kinds as the analyst states them"),
    replies=schema("whether columns are numbers or categories, and levels"),
    prepares=True,
)
def describe_columns(data: SiteData, state: State, request: ColumnsRequest) -> tuple[dict[str, Array], str]:
    """Report the kinds of columns, and levels of categorical ones; no value of a row, and no range."""
    series = take_columns(data, state, request.columns, frozenset({*request.ordinal, *request.nominal}))
    said: dict[str, Kind] = {
        **dict.fromkeys(request.continuous, "continuous"),
        **dict.fromkeys(request.ordinal, "ordinal"),
        **dict.fromkeys(request.nominal, "nominal"),
    }
    reported = {
        name: _describe_column(data, state, one.dropna(), name, said.get(name))
        for name, one in series.items()
    }
    return {}, to_json(reported)


def take_columns(
    data: SiteData, state: State, names: Sequence[str], leveled: frozenset[str]
) -> dict[str, pd.Series]:
    """Take columns from the table, after the owner's policy has been checked."""
    absent = [name for name in names if name not in data.table.columns]
    if absent or not names:
        raise DescriptionError(
            f"{data.name}: has no column {', '.join(map(repr, absent)) or 'that is asked for'}"
        )
    state.use_columns(names)
    picked = pick_columns(data.frame, names, data.name)
    kinds = {name: column_kind(one, data.name, name) for name, one in picked.items()}
    factors = [
        facts.FormulaFactor(name, (name,), ("C",) if kind == "category" or name in leveled else ())
        for name, kind in kinds.items()
    ]
    state.report(facts.FactorsRequested(factors))
    return picked


def _describe_column(
    data: SiteData, state: State, present: pd.Series, name: str, said: Kind | None
) -> ColumnReply:
    """Determine the kind of a column from the analyst's statement, its type, and its levels."""
    public = data.published.get(name)
    listed = () if public is None else public.levels
    category = column_kind(present, data.name, name) == "category"
    if said == "continuous":
        if category:
            raise DesignError(f"{at_column(data.name, name)} holds categories, which are not continuous")
        return ColumnReply("continuous")
    # If the owner's policy judges requests by the column description, numbers have the kind described there.
    by_description = data.policy.formulas == "simple" and not category and said is None
    if by_description and not listed:
        return ColumnReply("continuous")
    if not category and said is None and not listed:
        distinct = np.unique(as_numbers(present, data.name, name))
        complete = len(distinct) <= FEW_VALUES and bool((distinct == np.round(distinct)).all())
        if len(distinct) > 2 and not complete:
            return ColumnReply("continuous")
    found = find_levels(present)
    ordered = check_declared(data.name, name, found, listed) if listed else found
    levels = tuple(level for level in ordered if level in found)
    if len(levels) < 2:
        raise DesignError(
            f"{at_column(data.name, name)} has the same value in all of its {len(present):,} rows. Leave it "
            "out"
        )
    counts = present.value_counts()
    counted = facts.LevelRowCounts(name, [int(counts[level]) for level in levels])
    if category or said is not None:
        state.report(counted)
    elif len(levels) <= FEW_VALUES:
        try:
            state.report(counted)
        except PolicyError:
            # Measurements may have rare values. The analyst states the kind first, of all such columns at
            # once.
            return ColumnReply("counted")
    return _of_levels(present, levels, category, said)


def _of_levels(
    present: pd.Series, levels: tuple[LevelValue, ...], category: bool, said: Kind | None
) -> ColumnReply:
    kind: Reported
    if len(levels) == 2:
        kind = "binary"
    elif said is not None:
        kind = said
    elif category:
        dtype = present.dtype
        kind = "ordinal" if isinstance(dtype, pd.CategoricalDtype) and dtype.ordered else "nominal"
    elif len(levels) <= FEW_VALUES:
        kind = "counted"
    else:
        return ColumnReply("continuous")
    return ColumnReply(kind, levels)


@step(
    FAMILY,
    releases={"seen": presence("which rows have any of the columns", dtype="bool")},
    request=OpenRequest,
    requests=control("modalities, the levels of their columns, and terms of covariates"),
    replies=schema("names and levels of covariates, and rows without some", behind=COLUMN_FACTS),
    prepares=True,
)
def open_columns(data: SiteData, state: State, request: OpenRequest) -> tuple[dict[str, Array], str]:
    """Open the columns of a site's modalities; ``seen`` (n_rows,) states which rows have any value.

    A row that lacks a covariate does not count as seen, because the effect of the covariate on its columns is
    unknown.
    """
    series, seen = _take(data, state, request.modalities)
    if request.adjust is None:
        return _keep(data, state, request.modalities, series, seen, None), ""
    covariates, seen, reported = open_covariates(data, state, request.adjust, seen)
    return _keep(data, state, request.modalities, series, seen, covariates), to_json(reported)


@step(
    FAMILY,
    releases={"seen": presence("which rows have any of the columns", dtype="bool")},
    request=OpenNewRowsRequest,
    requests=aggregate("modalities, and the coding of covariates, with the state of transforms"),
    prepares=True,
)
def open_new_columns(data: SiteData, state: State, request: OpenNewRowsRequest) -> dict[str, Array]:
    """Open the columns of new rows, whose covariates are coded as in a fit."""
    series, seen = _take(data, state, request.modalities)
    covariates, seen = open_new_covariates(data, state, request.coding, seen)
    return _keep(data, state, request.modalities, series, seen, covariates)


def _take(
    data: SiteData, state: State, request: Sequence[ModalityRequest]
) -> tuple[dict[str, pd.Series], Bools]:
    """Take the columns of modalities from the table, and find the rows that have some value in them."""
    columns = [column for modality in request for column in modality.columns]
    series = take_columns(
        data, state, [c.name for c in columns], frozenset(c.name for c in columns if c.levels)
    )
    missing = [one.isna().to_numpy(dtype=np.bool_) for one in series.values()]
    return series, ~np.all(missing, axis=0)


def _keep(
    data: SiteData,
    state: State,
    request: Sequence[ModalityRequest],
    series: dict[str, pd.Series],
    seen: Bools,
    covariates: OpenedCovariates | None,
) -> dict[str, Array]:
    opened = OpenedModalities(tuple(_open(data, one, series, seen) for one in request), seen, covariates)
    width = len(series) + (0 if covariates is None else covariates.X.shape[1])
    state.keep(COLUMNS_ITEM, opened, int(seen.sum()), columns=width)
    return {"seen": seen}


def _open(
    data: SiteData, request: ModalityRequest, series: dict[str, pd.Series], seen: Bools
) -> OpenedModality:
    """Read one modality."""
    held: list[Floats] = []
    for column in request.columns:
        one = series[column.name][seen]
        if request.continuous:
            held.append(as_numbers(one, data.name, column.name))
            continue
        there = one.notna().to_numpy(dtype=np.bool_)
        codes = np.full(len(one), -1.0)
        codes[there] = as_categories(one[there], column.levels, data.name, column.name).codes
        held.append(codes)
    values = np.column_stack(held)
    return OpenedModality(request, values if request.continuous else values.astype(np.int64))
