"""Products of released columns: rows behind each product, and the history of all released columns.

Every fit releases sums of products of its columns. Where the product of two columns is nonzero in one row
alone, its sum is the value of that row. The columns need not be in one design: the sum of z over the rows
with a = 1 less the sum of z over those with a = b = 1 is the value of the row with a = 1 and b = 0, if there
is one such row. What two fits reveal together are combinations of the columns of both. So the history keeps
an orthonormal basis of all released columns, and no combination of them may be zero in all but a few rows.

The history has columns, and not all of their products. The products of two indicators are counts; those of
an indicator with a column of many values are in it as columns of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedstat.errors import PolicyError
from fedstat.federation.disclosure.facts import SummedProducts
from fedstat.federation.disclosure.leverage import (
    MAX_ROW_SHARE,
    SMALLEST_FLOAT,
    find_isolating_direction,
    max_row_share,
)
from fedstat.federation.disclosure.release_history import ReleasedGroups
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.typing import Array, Bools, Floats, Ints

BLOCK_ROWS, FIRST_ROWS = 4096, 64
NEW_DIRECTION = 1e-6
"""Length of what earlier columns leave of a new one, relative to it, below which it adds nothing.

The history has four bytes per number, so a repeated column is recognized up to 6e-8 of its length.
"""

ISOLATION_TOLERANCE = 1e-4
"""How much less than one the share may be of a combination of columns that a group of rows holds alone."""

MOST_KEPT = 2**26
"""Numbers in the history of columns, above which columns without zeros are not entered."""

ALL_ROWS = "all rows"
REMEDY = "Merge levels, or leave one of the two terms out"


# ----------------------------------------------------------------------------------------------------
# Rows behind the products of two columns.


@dataclass(frozen=True, slots=True, eq=False)
class ProductRows:
    """Rows behind the products of columns.

    Parameters
    ----------
    counts : (q, q) array of int
        Rows in which neither column is zero.
    shares : (q, q) array
        Largest share of one row in the sum of absolute products; zero where a bound shows that it is at most
        :data:`MAX_ROW_SHARE`.
    partly, constant : (q,) arrays of bool
        Columns that are zero in some rows, and of these the ones with a single other value.
    """

    counts: Ints
    shares: Floats
    partly: Bools
    constant: Bools


def product_rows(X: Floats) -> ProductRows:
    """Count the rows behind every product of two columns, (n, q), and find the largest share of one row."""
    n, q = X.shape
    counts, largest = np.full((q, q), n, dtype=np.int64), np.zeros(q)
    blocks = [slice(start, start + BLOCK_ROWS) for start in range(0, n, BLOCK_ROWS)]
    zero = np.zeros(q, dtype=np.bool_)
    for block in blocks:
        A = np.abs(X[block])
        np.maximum(largest, A.max(axis=0, initial=0.0), out=largest)
        zero |= A.min(axis=0, initial=np.inf) == 0.0
    if zero.any():
        Z = X[:, zero] != 0.0
        both = sum(((part := Z[block].astype(np.float32)).T @ part).astype(np.int64) for block in blocks)
        counts[np.ix_(zero, zero)] = both
        counts[~zero] = np.diag(counts)
        counts[:, ~zero] = np.diag(counts)[:, None]
    # Sums over some rows are at most those over all, and mostly show that no share is large.
    for some in (blocks[:1], blocks):
        with np.errstate(all="ignore"):
            sums = sum(((A := np.abs(X[block])).T @ A for block in some), np.zeros((q, q)))
            bound = np.outer(largest, largest) / sums
        if (bound <= MAX_ROW_SHARE).all():
            break
    shares = np.zeros((q, q))
    # Both columns of these products have large values somewhere; they are few, and computed row by row.
    i, j = np.nonzero(np.triu(~(bound <= MAX_ROW_SHARE) & (counts > 0)))
    if len(i):
        with np.errstate(all="ignore"):
            found = np.max([np.abs(X[block][:, i] * X[block][:, j]).max(axis=0) for block in blocks], axis=0)
            shares[i, j] = shares[j, i] = np.nan_to_num(found / sums[i, j], nan=1.0)
    partly = zero & (np.diag(counts) > 0)
    constant = np.zeros(q, dtype=np.bool_)
    for k in np.flatnonzero(partly).tolist():
        values = X[X[:, k] != 0.0, k]
        constant[k] = (values == values[0]).all()
    return ProductRows(counts, shares, partly, constant)


def check_product_rows(data: SiteData, names: Sequence[str], found: ProductRows) -> None:
    """Require no row or enough rows behind every product of two columns, and no row with nearly all of it.

    A column of many values is also checked in the rows without an indicator: its sum over these rows is the
    sum over all rows minus the sum of the product.

    Parameters
    ----------
    names : sequence of str, (q,)
        Columns.
    found : ProductRows

    Raises
    ------
    PolicyError
        Names the two columns, the rule and a remedy.
    """
    policy, counts = data.policy, found.counts
    if policy.products == "any":
        return
    outside = np.diag(counts)[:, None] - counts
    outside[found.constant] = 0
    outside[:, ~found.constant] = 0
    few = [(number > 0) & (number < policy.min_level_count) for number in (np.triu(counts), outside)]
    for pairs, words in zip(few, ("'{}' and '{}' are", "'{}', and not '{}', is"), strict=True):
        for i, j in np.argwhere(pairs)[:1].tolist():
            what = f"'{names[i]}' is" if i == j else words.format(names[i], names[j])
            raise _refusal(
                data,
                f"requires that {what} nonzero in no row or in at least {policy.min_level_count} rows; there "
                "are fewer",
            )
    if policy.max_share >= 1.0:
        return
    for i, j in np.argwhere(np.triu(found.shares > MAX_ROW_SHARE)).tolist():
        if found.shares[i, j] > max_row_share(int(counts[i, j]), 1):
            raise _refusal(
                data,
                "releases no sum of products if one row makes up nearly all of it, as in that of "
                f"'{names[i]}' and '{names[j]}'",
            )


def _refusal(data: SiteData, what: str) -> PolicyError:
    return PolicyError.of_rule("rows behind a product", data.name, f"{what}. {REMEDY}")


# ----------------------------------------------------------------------------------------------------
# History of the columns of all releases.


def check_products(data: SiteData, state: State, fact: SummedProducts) -> None:
    """Check the products of the columns of one request, and the columns with those of all earlier ones.

    Raises
    ------
    PolicyError
        See :func:`check_product_rows`; or columns that, with earlier ones, single out few rows.
    """
    few = data.policy.min_level_count - 1
    if data.policy.products == "any" or few < 1:
        return
    parts = [*fact.chunks()]
    X = _with_indicators(parts[0] if len(parts) == 1 else np.concatenate(parts))
    if not len(X):
        return
    if fact.weights is not None:
        X = X * np.sqrt(fact.weights)[:, None]
    code = np.zeros(len(X), dtype=np.int64) if fact.code is None else fact.code
    groups = np.unique(code[code >= 0])
    found = [product_rows(X if len(groups) == 1 else X[code == group]) for group in groups]
    for one in found:
        check_product_rows(data, fact.names, one)
    if fact.rows is None or data.policy.remember != "all":
        return
    memory = data.memory
    released = memory.released or ReleasedGroups.none(data.table.n_rows)
    parts, size, names = entered_columns(X, fact, product_rows(X) if len(groups) > 1 else found[0])
    if len(size) + released.columns.shape[1] > MOST_KEPT / len(released.cells):
        new = np.hstack(parts)
        sparse = (new == 0.0).any(axis=0)
        parts, size = [new[:, sparse]], size[sparse]
        names = [name for name, kept in zip(names, sparse, strict=True) if kept]
    q = len(size)
    if len(groups) > 1 or len(fact.rows) < len(released.cells):
        new, C = np.hstack(parts), np.zeros((len(released.cells), q * len(groups)))
        for k, group in enumerate(groups):
            C[fact.rows[code == group], k * q : (k + 1) * q] = new[code == group]
        parts = [C]
    basis, coefficients = new_directions(released.columns, parts, np.tile(size, len(groups)))
    if not basis.shape[1]:
        return
    columns = np.hstack([released.columns, basis]) if released.columns.size else basis
    leverage = np.einsum("ij,ij->i", columns, columns)
    direction = None
    if leverage.max(initial=0.0) >= 0.99 / few:
        near = columns[leverage >= ISOLATION_TOLERANCE / few].astype(np.float64)
        direction = find_isolating_direction(near, np.eye(columns.shape[1]), few, ISOLATION_TOLERANCE)
    if direction is None and released.persons is not None:
        direction = isolated_versions(columns.astype(np.float64), released.persons, few)
    if direction is None:
        memory.released = replace(released, columns=columns)
        return
    size = np.abs(coefficients @ direction[released.columns.shape[1] :])
    involved = dict.fromkeys(names[j % q] for j in np.flatnonzero(size > 0.1 * size.max()).tolist())
    raise PolicyError.of_rule(
        "rows behind a product",
        data.name,
        f"refuses columns that, with those of earlier releases, single out fewer than {few + 1} rows: "
        f"{', '.join(map(repr, involved))}. Use the columns of an earlier fit, merge levels, or leave a term "
        "out",
    )


def isolated_versions(U: Floats, persons: Ints, few: int) -> Floats | None:
    """Return a combination of orthonormal columns (n, q) that belongs to few persons, some with two versions.

    The difference of sums before and after a correction belongs to both versions of a record, and reveals
    what changed. One of the persons has a share of at least 1 / few of the combination. Its rows are tried,
    with those of the persons that share most with them.
    """
    own = np.einsum("ij,ij->i", U, U)
    high = np.bincount(persons, own) >= (1.0 - ISOLATION_TOLERANCE) / few
    for person in np.flatnonzero(high).tolist():
        rows = np.flatnonzero(persons == person)
        shared = np.abs(U[rows] @ U.T).max(axis=0)
        closest = persons[np.argsort(-(own / 2.0 + shared))[: 4 * few * len(rows)]].tolist()
        chosen = [person, *(other for other in dict.fromkeys(closest) if other != person)][:few]
        V = U[np.isin(persons, chosen)]
        _, s, directions = np.linalg.svd(V, full_matrices=False)
        if s[0] ** 2 >= 1.0 - ISOLATION_TOLERANCE:
            direction: Floats = directions[0]
            return direction
    return None


def _with_indicators(X: Floats) -> Floats:
    """Replace columns of two values, (n, q), by indicators of the larger one, in whatever coding."""
    two = [j for j in range(X.shape[1]) if _has_values(X[:, j], 2) and (X[:, j] != 0.0).all()]
    if two:
        X = X.copy()
        X[:, two] = X[:, two] == X[:, two].max(axis=0)
    return X


def entered_columns(
    X: Floats, fact: SummedProducts, found: ProductRows
) -> tuple[list[Floats], Floats, list[str]]:
    """Return the columns behind the sums of a request: (n, q) -> parts of (n, r), lengths (r,) and names.

    These are a column of ones and the columns; for a column of three values its square as well, so that
    combinations are its levels. A product of several factors a:z is z in the rows of a: these rows are
    entered too, since later fits may sum anything else over them, and so are the rows that it shares with
    other columns. With weights of many values, such as squared residuals, those of any two columns are
    entered.
    """
    names = list(fact.names)
    joined = found.partly & ~found.constant & np.array(fact.joined or [False] * len(names), dtype=bool)
    more: list[Floats] = [np.ones(len(X))]
    called = [ALL_ROWS]
    if fact.weights is None:
        three = [j for j in range(len(names)) if _has_values(X[:, j], 3)]
        more += [X[:, j] ** 2 for j in three]
        called += [names[j] for j in three]
    group = found.constant | joined  # zeros because of levels, not because of its own values

    def paired(i: int, j: int) -> bool:
        return fact.weights is not None or bool((joined[i] or joined[j]) and group[i] and group[j])

    partly = np.flatnonzero(found.partly).tolist()
    for at, i in enumerate(partly):
        more += [X[:, i] != 0.0] if joined[i] else []
        called += [names[i]] if joined[i] else []
        others = [j for j in partly[at + 1 :] if found.counts[i, j] > 0 and paired(i, j)]
        more += [(X[:, i] != 0.0) & (X[:, j] != 0.0) for j in others]
        called += [f"{names[i]} and {names[j]}" for j in others]
    first = X.shape[1] if fact.weights is None else 0
    parts = [X[:, :first], np.column_stack(more).astype(np.float64, copy=False)]
    size = np.sqrt(np.concatenate([np.einsum("ij,ij->j", part, part) for part in parts]))
    if not ((size > 1e-100) & (size < 1e100)).all():  # squares may be too large or too small for a number
        parts = [part / np.maximum(np.abs(part).max(axis=0), SMALLEST_FLOAT) for part in parts]
        size = np.concatenate([np.linalg.norm(part, axis=0) for part in parts])
    return parts, np.where(size > 0.0, size, 1.0), [*names[:first], *called]


def _has_values(x: Floats, count: int) -> bool:
    """Return whether a column has exactly this number of values; the first rows rule out most."""
    return len(np.unique(x[:FIRST_ROWS])) <= count and len(np.unique(x)) == count


def new_directions(known: Array, parts: Sequence[Floats], size: Floats) -> tuple[Array, Floats]:
    """Orthonormal columns that parts of columns (n, q), of lengths (q,), add to an orthonormal basis (n, r).

    Returns
    -------
    basis : (n, k) array of float32
    coefficients : (q, k) array
        Of the columns, scaled to length one, in the basis, known ones aside.
    """
    n, r, q = len(known), known.shape[1], len(size)
    blocks = [slice(start, start + BLOCK_ROWS) for start in range(0, n, BLOCK_ROWS)]
    gram = np.zeros((r + q, r + q))
    for block in blocks:
        both = np.hstack([known[block], *(part[block] for part in parts)])
        gram += both.T @ both
    gram[r:] /= size[:, None]
    gram[:, r:] /= size
    # Known columns have four bytes a number, and are orthonormal up to 1e-7 only.
    along = np.linalg.solve(gram[:r, :r], gram[:r, r:])
    values, vectors = np.linalg.eigh(gram[r:, r:] - gram[r:, :r] @ along)
    kept = values > NEW_DIRECTION**2
    coefficients = vectors[:, kept] / np.sqrt(values[kept])
    moved = np.vstack([-along @ coefficients, coefficients / size[:, None]])
    basis = np.empty((n, int(kept.sum())), dtype=np.float32)
    for block in blocks:
        basis[block] = np.hstack([known[block], *(part[block] for part in parts)]) @ moved
    return basis, coefficients
