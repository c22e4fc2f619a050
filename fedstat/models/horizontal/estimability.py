"""Whether sums over all sites determine an estimate: collinear columns, and coefficients without bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.linalg import qr, solve_triangular

from fedstat.errors import EstimationError
from fedstat.typing import Floats

RANK_TOLERANCE = 1e-12
"""Relative eigenvalue of the information with unit diagonal below which columns are collinear."""
SHARE = 1e-4
"""Share of a combination above which a column is named as a part of it."""
PATIENCE = 8
"""Number of evaluations after which steps that do not shrink indicate a maximum at infinity."""

SHORT, NOISE = 0.1, 1e-7
"""Largest and smallest length, in standard errors, of a step that does not shrink and gains little."""


def require_independent(
    information: Floats, names: Sequence[str], has_constant: Callable[[Floats], bool] | None = None
) -> None:
    """Require linearly independent columns; the error names those that are collinear over all sites.

    `information` (p, p) is that of standardized columns. If the first is the intercept, `has_constant` tells
    whether a combination (p,) of the columns has a constant.
    """
    size = np.sqrt(np.maximum(np.diag(information), 0.0))
    if (size == 0.0).any():
        raise EstimationError(f"design column {names[int(np.argmin(size))]!r} carries no information")
    scaled = information / np.outer(size, size)
    values, vectors = np.linalg.eigh(scaled)
    if values[0] > RANK_TOLERANCE * values[-1]:
        return
    # A root of the information has the dependencies of the design, but none of its rows.
    root = (np.sqrt(np.maximum(values, 0.0)) * vectors).T
    # Pivoting puts dependent columns last.
    R, pivot = qr(root, mode="r", pivoting=True)
    rank = int((np.abs(np.diag(R)) > np.sqrt(RANK_TOLERANCE)).sum())
    rank = min(max(rank, 1), len(names) - 1)
    weights = solve_triangular(R[:rank, :rank], R[:rank, rank:])
    groups = []
    for column, weight in zip(pivot[rank:].tolist(), weights.T, strict=True):
        combination = np.zeros(len(names))
        # From columns of unit information back to standardized ones.
        combination[pivot[:rank]] = weight * size[column] / size[pivot[:rank]]
        involved = np.abs(combination) * size > SHARE * size[column]
        combination[column] = -1.0
        if has_constant is not None:
            involved[0] = has_constant(combination)
        involved[column] = True
        *others, last = (repr(names[i]) for i in np.flatnonzero(involved).tolist())
        groups.append(f"{last} follows from {', '.join(others)}" if others else f"{last} is zero")
    raise EstimationError(
        f"design columns are collinear over all sites, to six digits or more: {'; '.join(groups)}. Leave "
        "out one of each group."
    )


def diverges(moves: Sequence[float], lengths: Sequence[float]) -> bool:
    """Return whether steps continue without gain: the maximum is at infinity.

    With separated outcomes each step adds about one to a logit, and its length in standard errors shrinks by
    a constant factor; otherwise Newton's steps shrink ever faster once they are short. `moves` are the
    largest changes of a standardized coefficient, `lengths` those of the step in standard errors, both by
    evaluation.
    """
    if len(moves) < PATIENCE or not NOISE < lengths[-1] < SHORT:
        return False
    first, second, third = moves[-3:]
    return second > 0.5 * first and third > 0.5 * second and lengths[-1] < lengths[0]
