"""The entities that an institution has seen, and means in the place of single missing numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import pandas as pd

from fedstat.errors import DesignError
from fedstat.federation.design.formula.terms import Term, term_columns
from fedstat.federation.tables.columns import Kind, as_numbers, at_column, missing_cells
from fedstat.typing import Bools

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
    client: str,
    use: Bools | None,
    n_rows: int,
) -> ObservedRows:
    """Find the rows that enter the design: of those in `use`, what becomes of a row with some of its columns.

    With "condition" it enters with the terms whose columns are all there.

    A DesignError tells of partial rows where `partial` is "error", and of arguments that do not fit.
    """
    if partial not in get_args(Partial):
        raise DesignError(f"partial: expected one of {get_args(Partial)}, received {partial!r}.")
    used = np.ones(n_rows, dtype=bool) if use is None else np.asarray(use, dtype=bool)
    if used.shape != (n_rows,):
        raise DesignError(f"use: expected one value per row ({n_rows:,}), received shape {used.shape}.")
    missing: Bools = missing_cells(series.values(), n_rows)
    # A row without any of the columns is an entity that the institution never saw, and no partial row.
    some = used & missing.any(axis=1) & ~missing.all(axis=1)
    n_partial = int(some.sum())
    if partial == "error" and n_partial:
        counts = zip(series, missing[some].sum(axis=0).tolist(), strict=True)
        listed = ", ".join(f"{name!r} ({count:,})" for name, count in counts if count)
        raise DesignError(
            f"institution {client!r} has {n_partial:,} entities with some but not all of its columns; "
            f"missing: {listed}. Fill them in, or use partial='condition', partial='drop' or partial='mean'."
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


def column_means(series: Mapping[str, pd.Series], kinds: Mapping[str, Kind], client: str) -> dict[str, float]:
    """Means of the numeric columns over the entities that have them."""
    numeric = {name: one for name, one in series.items() if kinds[name] == "number"}
    return {name: float(np.nanmean(as_numbers(one, client, name))) for name, one in numeric.items()}


def require_categories(series: Mapping[str, pd.Series], client: str) -> None:
    """Require that no category is missing, for a mean cannot stand in for one.

    A DesignError counts those that are.
    """
    for name, one in series.items():
        count = int(one.isna().sum())
        if count:
            raise DesignError(
                f"{at_column(client, name)} lacks the category of {count:,} entities that have other "
                "columns; partial='mean' fills numbers only. Use partial='drop', or give missing a level "
                "of its own."
            )
