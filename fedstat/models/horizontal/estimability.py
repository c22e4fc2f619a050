"""Whether the columns of all sites together are linearly independent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from scipy.linalg import qr, solve_triangular

from fedstat.errors import AliasedColumnsError, EstimationError
from fedstat.federation.design.formula.expression import quoted_name
from fedstat.federation.design.formula.syntax_tree import Arithmetic
from fedstat.federation.design.formula.terms import parse_term
from fedstat.federation.design.horizontal_design import is_interaction
from fedstat.typing import Floats

RANK_TOLERANCE = 1e-12
"""Relative eigenvalue of the information with unit diagonal below which columns are collinear."""
FOLLOWS = 1e-10
"""Share of the information of a column that remains next to those before it, if it follows from them."""
SHARE = 1e-4
"""Share of a combination above which a column is named as a part of it."""


def require_independent(
    information: Floats,
    names: Sequence[str],
    has_constant: Callable[[Floats], bool] | None = None,
    *,
    terms: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> None:
    """Require linearly independent columns; the error names those that are collinear over all sites.

    `information` (p, p) is that of standardized columns. If the first is the intercept, `has_constant` tells
    whether a combination (p,) of the columns has a constant. `terms` are those of the columns, and `columns`
    their names in the design, if these are not `names`.

    Raises AliasedColumnsError if only columns of interactions follow from those before them, as R leaves them
    out, and EstimationError otherwise.
    """
    size = np.sqrt(np.maximum(np.diag(information), 0.0))
    if (size == 0.0).any():
        raise EstimationError(f"design column {names[int(np.argmin(size))]!r} carries no information")
    scaled = information / np.outer(size, size)
    values, vectors = np.linalg.eigh(scaled)
    if values[0] > RANK_TOLERANCE * values[-1]:
        return
    aliased = following(scaled)
    if terms and aliased and all(is_interaction(terms[j]) for j in aliased):
        raise AliasedColumnsError(list(dict.fromkeys((columns or names)[j] for j in aliased)))
    # A root of the information has the dependencies of the design, but none of its rows.
    root = (np.sqrt(np.maximum(values, 0.0)) * vectors).T
    # Pivoting puts dependent columns last.
    R, pivot = qr(root, mode="r", pivoting=True)
    rank = int((np.abs(np.diag(R)) > np.sqrt(RANK_TOLERANCE)).sum())
    rank = min(max(rank, 1), len(names) - 1)
    weights = solve_triangular(R[:rank, :rank], R[:rank, rank:])
    groups, together = [], set[int]()
    for column, weight in zip(pivot[rank:].tolist(), weights.T, strict=True):
        combination = np.zeros(len(names))
        # From columns of unit information back to standardized ones.
        combination[pivot[:rank]] = weight * size[column] / size[pivot[:rank]]
        involved = np.abs(combination) * size > SHARE * size[column]
        combination[column] = -1.0
        if has_constant is not None:
            involved[0] = has_constant(combination)
        involved[column] = True
        together |= set(np.flatnonzero(involved).tolist())
        *others, last = (repr(names[i]) for i in np.flatnonzero(involved).tolist())
        groups.append(f"{last} follows from {', '.join(others)}" if others else f"{last} is zero")
    raise EstimationError(
        f"design columns are collinear over all sites, to six digits or more: {'; '.join(groups)}. Leave "
        f"out one of each group.{_power_advice([terms[j] for j in sorted(together) if j < len(terms)])}"
    )


def _power_advice(terms: Sequence[str]) -> str:
    """Advice for powers of a column far from zero, which differ little in their digits."""
    powers = Counter(
        factor.columns[0]
        for text in dict.fromkeys(filter(None, terms))
        for factor in parse_term(text)
        if isinstance(factor.tree, Arithmetic) and factor.tree.symbol == "**"
    )
    if not powers:
        return ""
    name = quoted_name(max(powers, key=lambda one: powers[one]))
    return f" Or center the column: I(({name} - 2000) ** 2) for powers of a year."


def following(scaled: Floats) -> list[int]:
    """Return the columns that follow from those before them; `scaled` (p, p) has a unit diagonal."""
    left, found = scaled.copy(), []
    for j in range(len(left)):
        if left[j, j] <= FOLLOWS:
            found.append(j)
            continue
        left = left - np.outer(left[:, j], left[j]) / left[j, j]
    return found
