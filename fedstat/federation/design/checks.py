"""Checks of a design before estimation: levels, variation, rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.linalg import qr, solve_triangular

from fedstat.errors import DesignError
from fedstat.federation.design.formula.syntax_tree import Category
from fedstat.federation.design.formula.terms import Term
from fedstat.federation.tables.columns import (
    MAX_SHOWN,
    TEXT_OF_NUMBERS,
    LevelValue,
    at_column,
    list_levels,
    reads_as_numbers,
)
from fedstat.typing import Floats

RANK_TOLERANCE = 1e-9
CLEARLY_INDEPENDENT = 1e-6
CONSTANT_TOLERANCE = 1e-12
SHARE_TOLERANCE = 1e-6


def check_levels(category: pd.Categorical, site: str, name: str, min_count: int) -> None:
    """Require two levels or more, each with enough entities; a DesignError lists those that have too few."""
    levels = category.categories.tolist()
    if len(levels) < 2:
        raise DesignError(
            f"{at_column(site, name)} is constant: every entity has the same level. Leave it out."
        )
    counts = np.bincount(category.codes, minlength=len(levels)).tolist()
    check_counts(at_column(site, name), dict(zip(levels, counts, strict=True)), min_count, "entities")


def check_counts(
    where: str, counts: Mapping[LevelValue, int], min_count: int, counted: str, over: str = "", more: str = ""
) -> None:
    """Require enough of what is counted of every level; a DesignError lists those that have too few."""
    rare = [level for level, count in counts.items() if count < min_count]
    if not rare:
        return
    if len(rare) > MAX_SHOWN:
        remedy = "It looks like an identifier or free text: leave it out, or group it first."
        if reads_as_numbers(list(counts)):
            remedy = f"{TEXT_OF_NUMBERS}."
    else:
        largest = max(counts, key=lambda level: counts[level])
        remedy = f"Merge them with another level (the largest is {largest!r}), or leave their {counted} out."
    listed = list_levels(rare, [counts[level] for level in rare])
    raise DesignError(
        f"{where}: {listed} with fewer than {min_count} {counted}{over}, of {len(counts):,} levels in all. "
        f"{remedy}{more}"
    )


def check_varies(numbers: Mapping[str, Floats], site: str, *, intercept: bool) -> None:
    """Require that no numeric column (n_seen,) is constant; a DesignError names all that are.

    Without an intercept a constant other than zero is allowed.
    """
    constant = []
    for name, values in numbers.items():
        low, high = float(values.min()), float(values.max())
        if high - low <= CONSTANT_TOLERANCE * max(abs(low), abs(high)) and (intercept or not high):
            constant.append(name)
    if not constant:
        return
    if len(constant) == 1:
        raise DesignError(
            f"{at_column(site, constant[0])} is constant over its {len(numbers[constant[0]]):,} entities; "
            "expected a column that varies. Leave it out."
        )
    raise DesignError(
        f"columns {name_all(constant)} at site {site!r} are constant over their entities; expected columns "
        "that vary. Leave them out."
    )


def name_all(names: Sequence[str]) -> str:
    """List names for an error, up to :data:`MAX_SHOWN` of them, and how many others there are."""
    others = len(names) - MAX_SHOWN
    return ", ".join(map(repr, names[:MAX_SHOWN])) + (f" and {others:,} others" if others > 0 else "")


def check_references(terms: Sequence[Term], levels: Mapping[str, Sequence[LevelValue]], site: str) -> None:
    """Require that a reference written in the formula is a level; a DesignError lists the levels."""
    trees = [factor.tree for term in terms for factor in term]
    for tree in trees:
        if not isinstance(tree, Category) or tree.reference is None:
            continue
        if tree.reference not in levels[tree.column]:
            raise DesignError(
                f"{at_column(site, tree.column)}: the reference {tree.reference!r} is not a level; "
                f"expected one of {list_levels(levels[tree.column])}."
            )


def check_design(X: Floats, names: Sequence[str], site: str, *, intercept: bool) -> None:
    """Require columns, (n_seen, p) without the intercept, that vary and are linearly independent.

    With an intercept no column may be a multiple of it. A DesignError names the columns that are constant or
    exactly collinear, or says that there are fewer entities than columns.
    """
    where = f" at site {site!r}" if site else ""
    n, p = X.shape
    if n < p + intercept:
        raise DesignError(
            f"{p} design columns{where} for {n} entities; expected more entities than columns. Use fewer "
            "terms."
        )
    # A column that centering leaves at zero is collinear with the intercept. Lengths of one remove the units.
    centered = X - X.mean(axis=0) if intercept else X
    size = np.abs(X).max(axis=0, initial=0.0)
    norm = np.sqrt(np.einsum("ij,ij->j", centered, centered))
    constant = np.flatnonzero(norm <= CONSTANT_TOLERANCE * size * np.sqrt(n))
    if constant.size:
        found = name_all([names[j] for j in constant.tolist()])
        raise DesignError(
            f"design column{'s' * (len(constant) > 1)} {found}{where} {'are' if len(constant) > 1 else 'is'} "
            f"constant over {n:,} entities. Leave the term out, or merge the levels that it separates."
        )
    if p > 1:
        _check_independent(centered / norm, names, where)


def _check_independent(scaled: Floats, names: Sequence[str], where: str) -> None:
    """Name dependent columns by a pivoted QR; the columns have unit length."""
    # The Gram matrix squares what is small and cannot find dependence, but it clears a sound design fast.
    if np.linalg.eigvalsh(scaled.T @ scaled)[0] > CLEARLY_INDEPENDENT:
        return
    # Pivoting takes the small triangle, (p, p): of the tall matrix it would cost many times as much.
    triangle = np.linalg.qr(scaled, mode="r")
    R, pivot = qr(triangle, mode="r", pivoting=True)
    rank = int((np.abs(np.diag(R)) > RANK_TOLERANCE).sum())
    if rank == len(names):
        return
    shares = np.abs(solve_triangular(R[:rank, :rank], R[:rank, rank:]))
    groups = []
    for column, share in zip(pivot[rank:], shares.T, strict=True):
        together = sorted([column, *pivot[:rank][share > SHARE_TOLERANCE]])
        *others, last = (repr(names[index]) for index in together)
        groups.append(f"{last} follows exactly from {', '.join(others)}")
    raise DesignError(
        f"design columns{where} are exactly collinear: {'; '.join(groups)}. Leave out one of each group."
    )
