"""Checks of leverage: columns of a design that single out a few rows.

A sum over all rows of a column that is zero but in one row is that row. The column need not be in the design:
any combination of its columns counts, since score and information of the combination follow from those of the
columns. Such rows have leverage one; a group of k rows has a hat matrix with an eigenvalue of one.

Sums of products with a column z of another site reveal z in row i to the extent that the row makes up the
columns. If a column has a share s of its squared deviations in that row, the sum divided by the length of the
column is z_i, up to sqrt(1 - s) of the deviation of z. A party that knows all columns in row i learns its
fitted value, up to sqrt(1 - h_i), where h_i is the leverage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from scipy.special import betainccinv

from fedstat.errors import PolicyError
from fedstat.federation.audit.event_log import AnswerRecord
from fedstat.federation.crypto.masks import hides
from fedstat.federation.disclosure.facts import DesignDirections, RowBlock, ScoreAndInformation, SummedColumns
from fedstat.federation.disclosure.row_checks import (
    MIN_REMAINING_VARIATION,
    check_concentration,
    refusal,
    remaining_variation,
)
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.typing import Floats, Ints

BLOCK_ROWS = 4096
RANK_DEFICIENCY = 1e-11
"""Eigenvalue of the cross-products, relative to the largest, below which there is no direction."""

SMALLEST_FLOAT = float(np.finfo(float).tiny)
ISOLATION_TOLERANCE = 1e-6
"""How much less than one the share may be of a direction that a group of rows holds alone."""

MEANS_ISOLATION_TOLERANCE = 1e-11
"""The same for directions made of means at coefficients: those of an honest fit come close to one."""

NOVELTY_TOLERANCE = 1e-11
"""Relative length of a vector without those answered before, below which its sums reveal nothing new."""

RELEASED_MEANS = "means answered"
SAMPLE_ROWS = 1024
"""Number of rows in each sample that represents the rows if there are many."""

SEEDS_AT_ONCE = 256
LEVERAGE_TO_EXAMINE = 0.1
MAX_ROW_SHARE = 0.75
"""Share of one row in a column's squared deviations: half of the other column's deviation remains unknown."""
CHANCE_PROBABILITY = 1e-4
"""How often a group of normal rows may have more; of about ten rows one has most of a column by chance."""


def check_leverage(data: SiteData, state: State, fact: DesignDirections) -> None:
    """Require that no direction of the design belongs to a few rows.

    Few means fewer than the owner requires of a level. An owner who allows as many coefficients as rows
    allows this as well.
    """
    few = data.policy.min_level_count - 1
    if few < 1 or fact.n <= few or data.policy.max_parameters >= 1.0:
        return
    gram: Floats = np.asarray(sum(X.T @ X for X in _with_constant(fact.chunks)))
    values, vectors = np.linalg.eigh(gram)
    kept = values > RANK_DEFICIENCY * values[-1]
    basis = vectors[:, kept] / np.sqrt(values[kept])
    high = _high_leverage(
        _with_constant(fact.chunks), basis, LEVERAGE_TO_EXAMINE / few, float(values[kept][0])
    )
    mean = gram[0] / fact.n
    squares = np.diag(gram) - fact.n * mean**2
    deviations = high - mean
    furthest = np.max(deviations**2, axis=0, initial=0.0)
    # No few rows have more, so for most columns nothing else is computed.
    most = few * furthest * (1.0 + few / (fact.n - few))
    close = (most > (1.0 - MIN_REMAINING_VARIATION) * squares) | (furthest > MAX_ROW_SHARE / 2.0 * squares)
    close |= ~np.isfinite(squares)
    for j in np.flatnonzero(close & (squares > RANK_DEFICIENCY * fact.n)).tolist():
        if j:
            rest = remaining_variation(deviations[:, j], fact.n, squares[j], few)
            check_concentration(data, rest, f"design column '{fact.names[j - 1]}'")
            share = float(furthest[j]) / float(squares[j]) * fact.n / (fact.n - 1.0)
            if data.policy.max_share < 1.0 and share > max_row_share(fact.n, 1):
                raise largest_share_error(data, fact.n, 1, share)
    direction = find_isolating_direction(high, basis, few)
    if direction is not None:
        size = np.abs(direction[1:])
        found = [f"'{fact.names[j]}'" for j in np.flatnonzero(size > 0.1 * size.max()).tolist()]
        involved = list(dict.fromkeys(found))
        raise refusal(
            data,
            "minimum rows per level",
            f"requires at least {few + 1} rows behind every combination of columns; {', '.join(involved)} "
            "together single out fewer. Merge levels, or leave a term out",
        )


def largest_share_error(data: SiteData, n: int, p: int, share: float) -> PolicyError:
    """Return the refusal of a column in which the share of one row is too large."""
    return PolicyError.of_rule(
        "largest share",
        data.name,
        "releases no sum over rows if one row makes up nearly all of "
        f"{'a column' if p == 1 else 'a combination of columns'}: it has {share:.2f} of the squared "
        f"deviations, and one of {n:,} rows may have {max_row_share(n, p):.2f}. Transform the column, for "
        "example with a logarithm, or leave it out; the owner can allow it with  max_share = 1.0  in "
        "policy.toml",
    )


def check_group_shares(data: SiteData, state: State, fact: SummedColumns) -> None:
    """Require that no row of a group is nearly all of a column, or of a combination of columns.

    An owner who lets one row have all weight of a sum allows this as well.

    Raises
    ------
    PolicyError
        Names the rule, the site and a remedy, but no column: columns of few rows may identify them.
    """
    if data.policy.max_share >= 1.0 or not fact.values.size:
        return
    code = np.zeros(len(fact.values), dtype=np.int64) if fact.code is None else fact.code
    for group in np.unique(code[code >= 0]):
        X = fact.values[code == group]
        n, p = X.shape
        share, leverage = largest_shares(X)
        if share > max_row_share(n, 1):
            raise largest_share_error(data, n, 1, share)
        if fact.code is not None and leverage > max_row_share(n, p):
            raise largest_share_error(data, n, p, leverage)


@cache
def max_row_share(n: int, p: int) -> float:
    """Return the largest share that one of n rows may have of combinations of p columns.

    That of a normal row has the distribution Beta(p / 2, (n - p - 1) / 2).
    """
    free = n - p - 1
    if free < 1:
        return 1.0
    return max(MAX_ROW_SHARE, float(betainccinv(p / 2.0, free / 2.0, CHANCE_PROBABILITY / n)))


def largest_shares(X: Floats) -> tuple[float, float]:
    """Return the largest share of a row in a column's deviations, and in those of a combination, (n, p).

    Deviations are from the mean of the other rows, so that a single different row has all of them.
    """
    mean = X.mean(axis=0)
    # By blocks, so that the centered copy stays in cache and is never as large as the columns.
    parts = [slice(start, start + BLOCK_ROWS) for start in range(0, len(X), BLOCK_ROWS)]
    gram = sum(((D := X[part] - mean).T @ D for part in parts), np.zeros((X.shape[1], X.shape[1])))
    squares = np.diag(gram)
    varies = squares > RANK_DEFICIENCY * (squares + len(X) * mean**2)
    if not varies.any():
        return 0.0, 0.0
    size, mean = np.sqrt(squares[varies]), mean[varies]
    X = X if varies.all() else X[:, varies]
    values, vectors = np.linalg.eigh(gram[np.ix_(varies, varies)] / np.outer(size, size))
    kept = values > RANK_DEFICIENCY * values[-1]
    basis = vectors[:, kept] / np.sqrt(values[kept]) / size[:, None]
    furthest = np.maximum(X.max(axis=0) - mean, mean - X.min(axis=0)) / size
    U = ((X[part] - mean) @ basis for part in parts)
    own = max(float(np.einsum("ij,ij->i", block, block).max()) for block in U)
    of_others = len(X) / (len(X) - 1.0)
    return of_others * float((furthest**2).max()), of_others * own


def find_isolating_direction(
    X: Floats, basis: Floats, few: int, exact: float = ISOLATION_TOLERANCE
) -> Floats | None:
    """Return coefficients, (p,), of a combination of columns that is zero in all but a few rows, or None.

    Groups are a row of high leverage and the rows that share most of a direction with it, which finds every
    group of up to two.

    Parameters
    ----------
    X : (m, p) array
        Rows of high leverage, and those that may form a group with one of them.
    basis : (p, r) array
        Takes columns to orthonormal ones over all rows.
    exact : float
        How much less than one the share may be.
    """
    U = X @ basis
    own = np.einsum("ij,ij->i", U, U)
    # One of `few` rows has a share of at least 1 / few of a direction that they hold alone.
    high = np.flatnonzero(own >= (1.0 - exact) / few)
    few = min(few, len(U))
    for start in range(0, len(high), SEEDS_AT_ONCE):
        seeds = high[start : start + SEEDS_AT_ONCE]
        H = U[seeds] @ U.T
        middle, apart = (own[seeds, None] + own) / 2.0, (own[seeds, None] - own) / 2.0
        pairs = middle + np.sqrt(apart**2 + H**2)
        pairs[np.arange(len(seeds)), seeds] = np.inf
        groups: Ints = np.argpartition(-pairs, few - 1, axis=1)[:, :few]
        rows = U[groups]
        shares, within = np.linalg.eigh(rows @ rows.transpose(0, 2, 1))
        best = int(np.argmax(shares[:, -1]))
        if shares[best, -1] >= 1.0 - exact:
            direction: Floats = basis @ (rows[best].T @ within[best, :, -1])
            return direction
    return None


def _with_constant(chunks: Callable[[], Iterable[Floats]]) -> Iterable[Floats]:
    """Yield blocks of rows, with a column of ones before the others."""
    for X in chunks():
        for start in range(0, len(X), BLOCK_ROWS):
            part = X[start : start + BLOCK_ROWS]
            yield np.column_stack([np.ones(len(part)), part])


def _high_leverage(blocks: Iterable[Floats], basis: Floats, least: float, smallest: float) -> Floats:
    """Return rows with a leverage of at least `least`; very short rows have less."""
    high = []
    for X in blocks:
        long = X[np.einsum("ij,ij->i", X, X) >= least * smallest]
        U = long @ basis
        high.append(long[np.einsum("ij,ij->i", U, U) >= least])
    return np.concatenate(high)


@dataclass(frozen=True, slots=True, eq=False)
class ReleasedMeans:
    """Vectors over the rows that columns were multiplied with in a session, and their reach.

    `points` are the vectors' origins, in addition to a column of ones and the design. If there are many rows,
    there are disjoint `samples`, one more than a group has rows: `basis` (d, r) maps the vectors to columns
    `Q` (m, r) that are orthonormal over these, and that are at most `reach` (r,) in every row.
    """

    rows: object
    points: tuple[Any, ...] = ()
    samples: tuple[tuple[RowBlock, ...], ...] = ()
    group: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    Q: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    basis: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    reach: Floats = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, fact: ScoreAndInformation, few: int) -> ReleasedMeans:
        """Return the state before the first reply."""
        step = fact.n // SAMPLE_ROWS
        if step <= 2 * few:
            return cls(fact.rows)
        samples = [tuple(part.every(k, step) for part in fact.parts()) for k in range(few + 1)]
        sizes = [sum(len(part.columns) for part in parts) for parts in samples]
        group = np.repeat(np.arange(few + 1), sizes)
        return cls(fact.rows, (), tuple(samples), group, np.zeros((len(group), 0)))

    def with_point(self, fact: ScoreAndInformation, few: int) -> tuple[ReleasedMeans, bool]:
        """Add a point, and return whether the samples show that no few rows are singled out.

        A combination of vectors that is zero in all but a few rows is zero in one of the samples, which have
        no row in common. Over each sample every combination has a length; relative to it, no row's part is
        long.
        """
        points = (*self.points, fact.point)
        if not self.samples:
            return replace(self, points=points), False
        new = self._over_samples(lambda part: part.vectors((fact.point,)))
        Q, basis, reach = self.Q, self.basis, self.reach
        known = np.full(new.shape[1], fact.largest)
        if not self.points:
            X = self._over_samples(lambda part: part.columns)
            new, known = np.column_stack([X, new]), np.append(np.full(X.shape[1], fact.furthest), known)
        rest: list[Floats] = []
        d, r = basis.shape
        Q = np.pad(Q, ((0, 0), (0, new.shape[1])))
        basis = np.pad(basis, ((0, new.shape[1]), (0, new.shape[1])))
        for v, most in zip(new.T, known, strict=True):
            c = v @ Q[:, :r]
            left = v - Q[:, :r] @ c
            again = left @ Q[:, :r]
            left, c = left - Q[:, :r] @ again, c + again
            size, length = float(np.linalg.norm(v)), float(np.linalg.norm(left))
            column = np.zeros(len(basis))
            column[:d], column[d] = -basis[:d, :r] @ c, 1.0
            d += 1
            if length > NOVELTY_TOLERANCE * size:
                Q[:, r], basis[:, r] = left / length, column / length
                reach = np.append(reach, (most + np.abs(c) @ reach) / length)
                r += 1
            else:
                rest.append(column / max(size, SMALLEST_FLOAT))
        Q, basis = Q[:, :r], basis[:, :r]
        first = self.basis.shape[1]
        least = min(
            float(np.linalg.eigvalsh(P.T @ P)[0]) for P in (Q[self.group == k] for k in range(few + 1))
        )
        most = least / (2.0 * MEANS_ISOLATION_TOLERANCE * few)
        beyond = np.zeros(len(rest))
        if rest or float(reach @ reach) >= most:
            wide = np.column_stack([basis[:, first:], *rest])
            found = np.zeros(Q.shape[1] - first)
            for part in fact.parts():
                by_column = part.times(points, wide).T
                found = np.maximum(found, [max(one.max(), -one.min()) for one in by_column[: len(found)]])
                beyond += [one @ one for one in by_column[len(found) :]]
            reach = np.append(reach[:first], found)
        # A combination that the samples do not contain may belong to one row: then all rows are examined.
        nothing = bool((beyond * len(Q) <= NOVELTY_TOLERANCE**2 * fact.n).all())
        return replace(self, points=points, Q=Q, basis=basis, reach=reach), nothing and float(
            reach @ reach
        ) < most

    def _over_samples(self, part_of: Callable[[RowBlock], Floats]) -> Floats:
        return np.concatenate([part_of(part) for parts in self.samples for part in parts])


def check_fitted_means(data: SiteData, state: State, fact: ScoreAndInformation) -> None:
    """Require that means and weights at all coefficients of a session's replies single out no few rows.

    A difference of replies, or any other combination, is a sum over few rows if the combination of these
    vectors is zero in all other rows. An owner who lets one row have all weight of a sum allows this as well,
    but not sums over few groups: with a single row of a rare kind the number of rows shows it, while groups
    of rare sizes are ordinary.
    """
    few, lenient = data.policy.min_level_count - 1, data.policy.max_share >= 1.0
    if few < 1 or fact.n <= few or (lenient and not fact.kind):
        return
    masked_among = state.masked_among
    if fact.groups and (hides(len(masked_among)) if lenient else masked_among_the_same(data, masked_among)):
        return
    key = f"{RELEASED_MEANS} {fact.kind}".strip()
    kept: ReleasedMeans | None = state.look_at(key) if key in state else None
    if kept is None or kept.rows is not fact.rows:
        kept = ReleasedMeans.of(fact, few)
    if fact.point in kept.points:
        return
    now, seen = kept.with_point(fact, few)
    if not seen and _isolates_few_rows(fact, now.points, few):
        allow = "min_level_count = 1" if fact.kind else "max_share = 1.0"
        raise PolicyError.of_rule(
            "minimum rows per level" if fact.kind else "largest share",
            data.name,
            "releases no sums at these coefficients: with those of earlier replies, they single out fewer "
            f"than {few + 1} {_singled_out(fact)}; the owner can allow it with  {allow}  in policy.toml",
        )
    state.keep(key, now)


@dataclass(frozen=True, slots=True)
class MaskedGroups(AnswerRecord):
    """The sites among which a site has masked sums over groups, in alphabetical order."""

    sites: tuple[str, ...]


def _singled_out(fact: ScoreAndInformation) -> str:
    if fact.groups:
        masks = "mask the sums among at least three sites, and always the same ones, or "
        return (
            "groups. Groups of few sizes, or with few designs, have sums of their own: "
            f"{'' if fact.own else masks}leave out groups of rare sizes"
        )
    return (
        "rows. In a fit, few rows then have a combination of levels, or tails are very long: merge levels, "
        "leave a term out, or transform it"
    )


def masked_among_the_same(data: SiteData, sites: tuple[str, ...]) -> bool:
    """Return whether sums are masked among at least three sites, which have always been the same.

    Between sums over different sites the parts of the others cancel.
    """
    if not hides(len(sites)):
        return False
    this = MaskedGroups(tuple(sorted(sites)))
    if data.site_ledger.records(MaskedGroups) - {this}:
        return False
    data.site_ledger.remember(this)
    return True


def _isolates_few_rows(fact: ScoreAndInformation, points: tuple[Any, ...], few: int) -> bool:
    """Return whether a combination of columns and vectors is zero in all but a few rows, from all rows."""

    def blocks() -> Iterator[Floats]:
        return (np.column_stack([part.columns, part.vectors(points)]) for part in fact.parts())

    R: Floats = np.zeros((0, 0))
    for V in blocks():  # triangles, not cross-products, which would lose half of the digits
        R = np.asarray(np.linalg.qr(np.concatenate([R, V]) if len(R) else V, mode="r"))
    size = np.linalg.norm(R, axis=0)
    R, size = R[:, size > 0.0] / size[size > 0.0], np.where(size > 0.0, size, np.inf)
    _, s, directions = np.linalg.svd(R)
    there = s > NOVELTY_TOLERANCE * s[0]
    basis = np.zeros((len(size), int(there.sum())))
    basis[np.isfinite(size)] = directions[: len(s)][there].T / s[there] / size[np.isfinite(size)][:, None]
    high = []
    for V in blocks():
        U = V @ basis
        high.append(U[np.einsum("ij,ij->i", U, U) >= (1.0 - MEANS_ISOLATION_TOLERANCE) / few])
    return (
        find_isolating_direction(np.concatenate(high), np.eye(basis.shape[1]), few, MEANS_ISOLATION_TOLERANCE)
        is not None
    )
