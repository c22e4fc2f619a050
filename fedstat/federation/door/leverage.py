"""Rows that the columns of a design single out.

A sum over all rows of a column that is zero but in one row is that row. The column need not stand in the
design: any combination of columns does, since score and information of the combination follow from those of
the columns. Such rows have leverage one; a group of k rows has a hat matrix with an eigenvalue of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from fedstat.errors import PolicyError
from fedstat.federation.door.guards import check_concentration, rest_of_variation
from fedstat.federation.door.state import SiteData
from fedstat.typing import Floats, Ints

BLOCK = 4096
DEPENDENT = 1e-11
"""Eigenvalue of the cross-products, relative to the largest, below which there is no direction."""

EXACT = 1e-6
"""How much less than one the share may be of a direction that a group of rows holds alone."""

WORTH_A_LOOK = 0.1


def check_leverage(
    data: SiteData, chunks: Callable[[], Iterable[Floats]], n: int, names: Sequence[str]
) -> None:
    """Require that no direction of the design belongs to a few rows.

    Few are fewer than the owner wants of a level. An owner who allows as many coefficients as rows allows
    this as well.

    Parameters
    ----------
    chunks : callable
        Returns the standardised design, (m, p) arrays, the same ones each time.
    n : int
        Rows in all.
    names : sequence of str, (p,)

    Raises
    ------
    PolicyError
        Names the columns.
    """
    few = data.policy.min_level_count - 1
    if few < 1 or n <= few or data.policy.max_parameters >= 1.0:
        return
    gram: Floats = np.asarray(sum(X.T @ X for X in _with_constant(chunks)))
    values, vectors = np.linalg.eigh(gram)
    kept = values > DEPENDENT * values[-1]
    basis = vectors[:, kept] / np.sqrt(values[kept])
    high = _high_leverage(_with_constant(chunks), basis, WORTH_A_LOOK / few, float(values[kept][0]))
    mean = gram[0] / n
    squares = np.diag(gram) - n * mean**2
    for j, name in enumerate(names, 1):
        if squares[j] > DEPENDENT * n:
            rest = rest_of_variation(high[:, j] - mean[j], n, squares[j], few)
            check_concentration(data, rest, f"design column '{name}'")
    direction = find_singled_out(high, basis, few)
    if direction is not None:
        size = np.abs(direction[1:])
        involved = [f"'{names[j]}'" for j in np.flatnonzero(size > 0.1 * size.max()).tolist()]
        raise PolicyError(
            f"{data.name}: its policy (minimum rows per level) wants at least {few + 1} rows behind every "
            f"combination of columns; fewer are singled out by {', '.join(involved)} together. Merge levels, "
            "or leave a term out"
        )


def find_singled_out(X: Floats, basis: Floats, few: int) -> Floats | None:
    """Find a combination of columns that is zero in all but a few rows.

    Groups are a row and those that share most of a direction with it, which finds every group of up to two.

    Parameters
    ----------
    X : (m, p) array
        Rows of high leverage.
    basis : (p, r) array
        Takes columns to orthonormal ones over all rows.

    Returns
    -------
    (p,) array or None
        Coefficients.
    """
    U = X @ basis
    U = U[np.einsum("ij,ij->i", U, U) >= (1.0 - EXACT) / few]
    if not len(U):
        return None
    H = U @ U.T
    own = np.diag(H)
    middle, apart = (own[:, None] + own) / 2.0, (own[:, None] - own) / 2.0
    pairs = middle + np.sqrt(apart**2 + H**2)
    np.fill_diagonal(pairs, np.inf)
    groups: Ints = np.argsort(-pairs, axis=1)[:, :few]
    shares, within = np.linalg.eigh(H[groups[:, :, None], groups[:, None, :]])
    best = int(np.argmax(shares[:, -1]))
    if shares[best, -1] < 1.0 - EXACT:
        return None
    direction: Floats = basis @ (U[groups[best]].T @ within[best, :, -1])
    return direction


def _with_constant(chunks: Callable[[], Iterable[Floats]]) -> Iterable[Floats]:
    """Yield blocks of rows, with a column of ones before the others."""
    for X in chunks():
        for start in range(0, len(X), BLOCK):
            part = X[start : start + BLOCK]
            yield np.column_stack([np.ones(len(part)), part])


def _high_leverage(blocks: Iterable[Floats], basis: Floats, least: float, smallest: float) -> Floats:
    """Rows with a leverage of at least `least`; those short beside the smallest eigenvalue have less."""
    high = []
    for X in blocks:
        long = X[np.einsum("ij,ij->i", X, X) >= least * smallest]
        U = long @ basis
        high.append(long[np.einsum("ij,ij->i", U, U) >= least])
    return np.concatenate(high)
