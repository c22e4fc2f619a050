"""The coded block of one site: its observed rows, and its part of the design matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
import pandas as pd

from fedstat.errors import DesignError, Remedy
from fedstat.federation.design.checks import check_design, check_levels, check_references, check_varies
from fedstat.federation.design.coding import (
    BlockSpec,
    CodedColumns,
    TransformStates,
    code_design,
    coded_columns,
    fix_states,
    plain_state,
    read_terms,
    restore_state,
)
from fedstat.federation.design.formula.parse import SiteTerms
from fedstat.federation.design.formula.terms import Term, term_columns, term_text
from fedstat.federation.design.levels import check_declared, declared_levels
from fedstat.federation.tables.columns import (
    ColumnKind,
    Columns,
    LevelValue,
    as_categories,
    as_numbers,
    at_column,
    column_kind,
    find_levels,
    missing_cells,
    pick_columns,
)
from fedstat.federation.tables.published import Published
from fedstat.typing import Bools, Floats

# ----------------------------------------------------------------------------------------------------
# The entities of a site, and means instead of single missing numbers.

Partial: TypeAlias = Literal["condition", "drop", "error", "mean"]


@dataclass(frozen=True, slots=True)
class ObservedRows:
    """Rows that enter the design (n_rows,), and how many in use had some of the columns but not all.

    `lacking` (n_seen, terms) says which terms cannot be computed for a row that enters.
    """

    seen: Bools
    n_partial: int
    lacking: Bools


def find_rows(
    series: Mapping[str, pd.Series],
    terms: Sequence[Term],
    partial: Partial,
    site: str,
    use: Bools | None,
    n_rows: int,
) -> ObservedRows:
    """Return the rows that enter the design, by the choice of `partial` for incomplete rows.

    With "condition" a row enters with the terms whose columns have values.

    Raises a DesignError for partial rows if `partial` is "error", and for arguments that do not fit.
    """
    if partial not in get_args(Partial):
        raise DesignError(f"partial: expected one of {get_args(Partial)}, received {partial!r}.")
    used = np.ones(n_rows, dtype=bool) if use is None else np.asarray(use, dtype=bool)
    if used.shape != (n_rows,):
        raise DesignError(f"use: expected one value per row ({n_rows:,}), received shape {used.shape}.")
    missing: Bools = missing_cells(series.values(), n_rows)
    # A row without any of the columns is an entity that the site never saw, and no partial row.
    some = used & missing.any(axis=1) & ~missing.all(axis=1)
    n_partial = int(some.sum())
    if partial == "error" and n_partial:
        counts = zip(series, missing[some].sum(axis=0).tolist(), strict=True)
        listed = ", ".join(f"{name!r} ({count:,})" for name, count in counts if count)
        raise DesignError(
            f"site {site!r} has {n_partial:,} entities with some but not all of its columns; "
            f"missing: {listed}",
            remedy=Remedy(
                "ClientPartition.from_frames(..., partial='condition')",
                "Fill them in, or use partial='condition', partial='drop' or partial='mean'.",
            ),
        )
    seen: Bools = used & ~missing.any(axis=1)
    lacking: Bools = np.zeros((n_rows, len(terms)), dtype=bool)
    if partial == "mean":
        seen = seen | some
    elif partial == "condition":
        place = {name: number for number, name in enumerate(series)}
        for t, term in enumerate(terms):
            lacking[:, t] = missing[:, [place[name] for name in term_columns(term)]].any(axis=1)
        seen = used & ~lacking.all(axis=1)
    return ObservedRows(seen, n_partial, lacking[seen])


def column_means(
    series: Mapping[str, pd.Series], kinds: Mapping[str, ColumnKind], site: str
) -> dict[str, float]:
    """Means of the numeric columns over the entities that have them."""
    numeric = {name: one for name, one in series.items() if kinds[name] == "number"}
    return {name: float(np.nanmean(as_numbers(one, site, name))) for name, one in numeric.items()}


def require_categories(series: Mapping[str, pd.Series], site: str) -> None:
    """Require that no category is missing, because no mean can replace one.

    Raises a DesignError with their number.
    """
    for name, one in series.items():
        count = int(one.isna().sum())
        if count:
            raise DesignError(
                f"{at_column(site, name)} lacks the category of {count:,} entities that have other columns; "
                "partial='mean' fills numbers only",
                remedy=Remedy(
                    "ClientPartition.from_frames(..., partial='drop')",
                    "Use partial='drop', or give missing a level of its own.",
                ),
            )


# ----------------------------------------------------------------------------------------------------
# One site's rows -> its part of the design matrix.

ENOUGH = 2
"""Whole rows for each column from which collinear ones are named."""


@dataclass(frozen=True, slots=True)
class CodedBlock:
    """The coded rows of one site: the design (n_seen, p), C-contiguous, without the intercept.

    `seen` (n_rows,) are the rows in it: those in use whose columns are all there, or with "condition" some of
    them, in which the design is nan at the others; `n_partial` counts rows in use that had some of the
    columns but not all. `cells` counts entities of every cell that contrasts or comparisons make.
    """

    spec: BlockSpec
    seen: Bools
    X: Floats
    n_partial: int
    cells: Mapping[str, list[int]] = field(default_factory=dict)

    @property
    def has(self) -> Bools:
        """Which columns each row has, (n_seen, p)."""
        return ~np.isnan(self.X)

    @property
    def fewest(self) -> int:
        """Rows that have the column which fewest have."""
        return int(self.has.sum(axis=0).min(initial=len(self.X)))

    @property
    def filled(self) -> Floats:
        """The design with the mean of a column where a row lacks it."""
        has = self.has
        return self.X if has.all() else np.where(has, self.X, np.nanmean(self.X, axis=0))


def build_block(
    frame: pd.DataFrame,
    terms: SiteTerms,
    *,
    partial: Partial = "drop",
    min_count: int = 5,
    use: Bools | None = None,
    intercept: bool = True,
    published: Published | None = None,
) -> CodedBlock:
    """Code the rows of one site, and fix levels and transform state from them.

    Text, categories and logical columns get treatment coding: the first level is the reference unless the
    formula names another; levels are sorted, but declared ones, and those of a category, keep their order
    (levels that no entity in use has are left out). Coding is that of formulaic. Without an intercept the
    first factor keeps all its levels.

    A row without any of the columns is an entity that the site does not have, as are rows outside
    `use`. Rows with some of them enter with these ("condition"), count as absent ("drop"), are refused
    ("error"), or get the mean of the others instead of a missing number ("mean").

    Raises a DesignError for a column that is absent, of an unsupported type, infinite or constant; for levels
    that formula or description do not declare; for a level with fewer than `min_count` entities; for a
    transform that is not finite; for exactly collinear columns; and if no row is left.
    """
    site = terms.site
    parsed = read_terms(terms.terms, terms.columns)
    rows, considered = _seen_columns(frame, terms, parsed, partial, use)
    kinds = {name: column_kind(one, site, name) for name, one in considered.items()}
    # Kinds and levels of the rows that enter alone: others may hold levels that no entity in use has.
    coded_names = coded_columns(parsed, kinds)
    if partial != "condition":
        require_categories({name: considered[name] for name in coded_names}, site)
    levels = {name: find_levels(considered[name].dropna()) for name in coded_names}
    listed = declared_levels(parsed, published or {})
    for name in listed.keys() & levels.keys():
        order = check_declared(site, name, levels[name], listed[name])
        levels[name] = tuple(level for level in order if level in levels[name])
    there = {name: one.notna().to_numpy(dtype=bool) for name, one in considered.items()}
    _check_values(there, site)
    means = column_means(considered, kinds, site) if partial in ("condition", "mean") else {}
    considered |= known_levels(considered, levels)
    columns = _prepare(considered, kinds, levels, means, site)
    _check_columns(columns, there, site, min_count, intercept)
    # Before coding, where formulaic would raise without naming the site.
    check_references(parsed, levels, site)
    state: TransformStates = {}
    if rows.lacking.any():
        fix_states(parsed, columns, there, state, site)
    coded = code_design(parsed, columns, state, intercept=intercept, n=int(rows.seen.sum()), site=site)
    # Before the fit, where collinear columns would show as a singular matrix without names.
    check_design(coded.X, coded.names, site, intercept=intercept)
    X = blank(coded, parsed, rows.lacking)
    cells = _cells(coded, parsed, rows.lacking)
    for term, counts in cells.items():
        if min(counts) < min_count:
            raise DesignError(
                f"site {site!r}: the term {term!r} makes a cell with fewer than {min_count} "
                "entities. Merge levels, compare with another number, or leave the term out."
            )
    complete = X[~np.isnan(X).any(axis=1)]
    if (
        len(complete) < len(X)
        and len(complete) > ENOUGH * X.shape[1]
        and (np.ptp(complete, axis=0) > 0.0).all()
    ):
        check_design(complete, coded.names, site, intercept=intercept)
    spec = BlockSpec(
        site=site,
        terms=terms.terms,
        columns=terms.columns,
        names=coded.names,
        term_names=coded.term_names,
        intercept=intercept,
        kinds=kinds,
        levels=levels,
        state=plain_state(state),
        means=means,
    )
    return CodedBlock(spec, rows.seen, X, rows.n_partial, cells)


def _cells(coded: CodedColumns, terms: Sequence[Term], lacking: Bools) -> dict[str, list[int]]:
    """Count the entities of every cell of a term that there is, of those that have the term."""
    place = {term_text(term): number for number, term in enumerate(terms)}
    held = {text: codes[~lacking[:, place[text]]] for text, codes in coded.cells.items()}
    return {text: np.unique(codes, return_counts=True)[1].tolist() for text, codes in held.items()}


def known_levels(
    series: Mapping[str, pd.Series], levels: Mapping[str, tuple[LevelValue, ...]]
) -> dict[str, pd.Series]:
    """Replace a missing level by an existing one: the design is blank there in the end."""
    return {name: series[name].where(series[name].notna(), held[0]) for name, held in levels.items() if held}


def blank(coded: CodedColumns, terms: Sequence[Term], lacking: Bools) -> Floats:
    """Return the design with nan at the terms that rows lack, (n_seen, terms)."""
    if not lacking.any():
        return coded.X
    place = {term_text(term): number for number, term in enumerate(terms)}
    return np.where(lacking[:, [place[name] for name in coded.term_names]], np.nan, coded.X)


def _seen_columns(
    frame: pd.DataFrame, terms: SiteTerms, parsed: Sequence[Term], partial: Partial, use: Bools | None
) -> tuple[ObservedRows, dict[str, pd.Series]]:
    """Find the rows that enter, one at least, and their columns."""
    site = terms.site
    series = pick_columns(frame, terms.columns, site)
    rows = find_rows(series, parsed, partial, site, use, len(frame))
    if not rows.seen.any():
        raise DesignError(
            f"site {site!r} has no entity with all of {', '.join(map(repr, terms.columns))} "
            f"({rows.n_partial:,} with some of them). Use fewer of its columns, or leave the site out."
        )
    return rows, {name: one[rows.seen] for name, one in series.items()}


def _check_values(there: Mapping[str, Bools], site: str) -> None:
    for name, here in there.items():
        if not here.any():
            raise DesignError(
                f"{at_column(site, name)} has no value among {len(here):,} entities in use. Leave it out."
            )


def _check_columns(
    columns: Columns, there: Mapping[str, Bools], site: str, min_count: int, intercept: bool
) -> None:
    for name, category in columns.categories.items():
        check_levels(category[there[name]], site, name, min_count)
    check_varies(columns.numbers, site, intercept=intercept)


def apply_block(
    frame: pd.DataFrame, spec: BlockSpec, *, partial: Partial = "drop", site: str = ""
) -> CodedBlock:
    """Code new rows with the levels and transform state of a specification; not all levels need to occur.

    `site` is the name in messages, if not that of the specification. The specification's means replace
    missing values if `partial` is "mean"; without means "condition" is "drop".

    Raises a DesignError for a column that is absent or of another type, for an unknown level (with the number
    of its rows), for values that are not finite or outside a spline, and for a specification without means.
    """
    spec.check()
    site = site or spec.site
    parsed = read_terms(spec.terms, spec.columns)
    series = pick_columns(frame, spec.columns, site)
    if partial == "condition" and not _has_means(spec):
        partial = "drop"
    rows = find_rows(series, parsed, partial, site, None, len(frame))
    n = int(rows.seen.sum())
    # The kind of a column without rows is not known, and nothing is left to be coded.
    if n == 0:
        return CodedBlock(spec, rows.seen, np.empty((0, len(spec.names))), rows.n_partial)
    considered = {name: one[rows.seen] for name, one in series.items()}
    if partial == "mean" and rows.n_partial:
        _require_means(spec, site)
    considered |= known_levels(considered, spec.levels) if partial == "condition" else {}
    coded = code_rows(considered, parsed, spec, n, site)
    _require_names(coded, spec, site)
    return CodedBlock(spec, rows.seen, blank(coded, parsed, rows.lacking), rows.n_partial)


def code_rows(
    series: Mapping[str, pd.Series], terms: Sequence[Term], spec: BlockSpec, n: int, site: str, by: str = ""
) -> CodedColumns:
    """Code n rows that are all there, or their derivatives `by` a column of numbers.

    Errors are those of :func:`apply_block`. A missing number is replaced by the mean of the specification
    where it has one; its names are not looked at.
    """
    _require_kinds(series, spec, site)
    require_categories({name: series[name] for name in spec.levels}, site)
    columns = _prepare(series, spec.kinds, spec.levels, spec.means, site)
    state: TransformStates = restore_state(spec.state)
    coded = code_design(terms, columns, state, intercept=spec.intercept, n=n, site=site, by=by)
    return without_columns(coded, terms, spec.dropped, site) if spec.dropped else coded


def without_columns(
    coded: CodedColumns, terms: Sequence[Term], dropped: Sequence[str], site: str
) -> CodedColumns:
    """Leave out columns of interactions.

    Raises a DesignError for a column of a single factor: without it, a level of a factor would silently
    belong to another one.
    """
    single = {term_text(term) for term in terms if len(term) == 1}
    names = [name for name, term in zip(coded.names, coded.term_names, strict=True) if term in single]
    if wrong := sorted(set(dropped) & set(names)):
        raise DesignError(f"{site}: columns {', '.join(map(repr, wrong))} are not those of an interaction")
    kept = [j for j, name in enumerate(coded.names) if name not in dropped]
    return replace(
        coded,
        X=coded.X[:, kept],
        names=tuple(coded.names[j] for j in kept),
        term_names=tuple(coded.term_names[j] for j in kept),
    )


def _prepare(
    series: Mapping[str, pd.Series],
    kinds: Mapping[str, ColumnKind],
    levels: Mapping[str, tuple[LevelValue, ...]],
    means: Mapping[str, float],
    site: str,
) -> Columns:
    numeric = [name for name, kind in kinds.items() if kind == "number"]
    numbers = {name: as_numbers(series[name], site, name) for name in numeric}
    for name, mean in means.items():
        numbers[name] = np.where(np.isnan(numbers[name]), mean, numbers[name])
    categories = {name: as_categories(series[name], held, site, name) for name, held in levels.items()}
    return Columns(numbers, categories)


def _require_kinds(series: Mapping[str, pd.Series], spec: BlockSpec, site: str) -> None:
    for name, one in series.items():
        # The other way round is sound: numbers whose levels are known are coded as categories.
        if column_kind(one, site, name) == "category" and spec.kinds[name] == "number":
            raise DesignError(
                f"{at_column(site, name)}: expected numbers as when the model was fitted, found "
                "categories; convert the column."
            )


def _has_means(spec: BlockSpec) -> bool:
    return bool(spec.means) or "number" not in spec.kinds.values()


def _require_means(spec: BlockSpec, site: str) -> None:
    if not _has_means(spec):
        raise DesignError(
            f"site {site!r}: partial='mean' needs the means of the data that the model was fitted "
            "on, and it was fitted without them. Predictions with partial='drop' need none."
        )


def _require_names(coded: CodedColumns, spec: BlockSpec, site: str) -> None:
    if (coded.names, coded.term_names) != (spec.names, spec.term_names):
        raise DesignError(
            f"site {site!r}: the new rows code to {len(coded.names)} design columns that are not "
            f"the {len(spec.names)} of the fitted model; build the specification again."
        )
