"""Patterns with few entities are not released: where their entities go instead.

Of a pattern with n_g entities and p_g columns seen, the Gram matrix of (1, x, y) is released. Those who know
all of its columns but one, which is the most that the coordinator and other institutions together can know,
hold p_g + 1 linear equations in the n_g values of that column, beside its length. With n_g <= p_g + 1 these
determine the column; and to anybody the matrix fixes the rows up to a rotation, which leaves little to choose
where n_g is hardly larger. A pattern is therefore released with at least twice as many entities as
equations, :func:`least_entities`, so that half of every column stays undetermined, whoever colludes. That
is no bound on what columns of few distinct values disclose: where an owner has these judged by their bits, a
pattern needs as many entities as :func:`~fedstat.federation.tables.bits.least_for_bits` says as well.

An entity may always be treated as if a client lacked it: that is exact when blocks are missing
completely at random, and costs the information of the block that is left out. The plan follows from the
counts of the patterns alone, so that the sites can sum over the coarser patterns in the first place; Gram
matrices of finer ones must never be released beside them, or the difference would show the few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress
from typing import TypeAlias

import numpy as np

from fedstat.errors import EstimationError, ModelError
from fedstat.federation.door.guards import ENTITIES_PER_EQUATION
from fedstat.federation.tables.bits import ColumnsDetail, least_for_bits
from fedstat.typing import Bools, Floats, Ints

LARGEST_SHARE = 0.05
"""Share of the entities that may be moved unless a caller allows more, which is then warned of."""
Pattern: TypeAlias = tuple[bool, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MergePlan:
    """Which pattern counts as which.

    `patterns` (H, K) are released, ascending; `target` (G,) is the place among them of every pattern that
    there was, -1 where its entities are left out, because too few would lack every block. `moved` entities go
    to a coarser pattern.
    """

    patterns: Bools
    target: Ints
    moved: int
    left_out: int

    @property
    def changes(self) -> int:
        """Entities that count otherwise than they are."""
        return self.moved + self.left_out

    def shows(self, pattern: Ints, client: int) -> Bools:
        """Whether entities of these released patterns (-1: none) count as seen by a client, (m,)."""
        return np.asarray((pattern >= 0) & self.patterns[pattern, client])


def least_entities(columns: int, min_count: int) -> int:
    """Fewest entities of a pattern in which so many columns are seen, 1 and the response not counted."""
    return max(min_count, ENTITIES_PER_EQUATION * (columns + 1))


@dataclass(frozen=True, slots=True)
class Rule:
    """How many entities a released pattern needs: `sizes` are the columns of each of K clients.

    `details` of each client and that of the response have the columns of few values where the sites' owners
    have sums judged by their bits; see :mod:`fedstat.federation.tables.bits`.
    """

    min_count: int
    sizes: tuple[int, ...]
    details: tuple[ColumnsDetail | None, ...] = ()
    response: ColumnsDetail | None = None

    def least(self, pattern: Pattern) -> int:
        """Fewest entities of a pattern."""
        least = least_entities(sum(compress(self.sizes, pattern)), self.min_count)
        if not self.in_bits:
            return least
        seen = [*compress(zip(self.sizes, self.details, strict=True), pattern), (1, self.response)]
        total = sum(size for size, _ in seen)
        # As a door judges its own columns: of others' it knows the number, and not how many values they have.
        judged = ((detail, ColumnsDetail(total - size)) for size, detail in seen if detail is not None)
        return max([least, *(least_for_bits(pair) for pair in judged)])

    @property
    def in_bits(self) -> bool:
        """Whether a site has columns of few values judged by their bits."""
        return any(detail is not None and detail.levelled for detail in (*self.details, self.response))

    @property
    def by_equations(self) -> Rule:
        """The rule without the bits of columns of few values."""
        return Rule(self.min_count, self.sizes)


def plan_merges(
    patterns: Bools, n: Floats, rule: Rule, *, largest_share: float = LARGEST_SHARE, otherwise: str = ""
) -> MergePlan:
    """Find a coarser pattern for the entities of every pattern (G, K) that has too few, of n (G,).

    Leaving block k out of n_g entities loses n_g / n_k of what is known of it, n_k the entities that client k
    has; the blocks with the smallest sum of these are left out. Patterns with more blocks are moved first,
    since their entities may fill a coarser one. An EstimationError, which ends with `otherwise`, where more
    than `largest_share` of the entities would have to move or be left out.
    """
    if rule.min_count < 1:
        raise ModelError(f"plan_merges: expected min_count of at least 1, received {rule.min_count}")
    counts = {tuple(row): float(m) for row, m in zip(patterns.tolist(), n, strict=True)}
    if len(counts) != len(n):
        raise ModelError("plan_merges: the patterns must be distinct")
    cost = 1.0 / np.maximum(n @ patterns, 1.0)
    goes: dict[Pattern, Pattern] = {}
    while small := [p for p, m in counts.items() if 0 < m < rule.least(p) and any(p)]:
        # The one with most blocks first: its entities may fill a coarser pattern that would be too small.
        pattern = max(small, key=lambda p: (sum(p), -counts[p], p))
        coarser = best_coarser(pattern, counts, cost, rule)
        counts[coarser] = counts.get(coarser, 0.0) + counts.pop(pattern)
        goes[pattern] = coarser
    # Entities without any block have nowhere coarser to go: few of them are left out.
    nothing = (False,) * patterns.shape[1]
    if 0 < counts.get(nothing, 0.0) < rule.least(nothing):
        counts.pop(nothing)
    released = sorted(counts)
    target = np.array([find(released, end_of(tuple(row), goes)) for row in patterns.tolist()])
    moves = np.array([tuple(row) in goes for row in patterns.tolist()])
    plan = MergePlan(
        np.array(released, dtype=bool).reshape(len(released), patterns.shape[1]),
        target,
        moved=int(n[moves & (target >= 0)].sum()),
        left_out=int(n[target < 0].sum()),
    )
    check_share(plan, n, largest_share, otherwise)
    return plan


def best_coarser(pattern: Pattern, counts: Mapping[Pattern, float], cost: Floats, rule: Rule) -> Pattern:
    """Choose the coarser pattern that loses least, among those that will have enough entities.

    Enough: with these entities, and those of other small patterns that could join. Candidates are
    the patterns that there are and what this one has in common with another.
    """
    common = {tuple(a and b for a, b in zip(pattern, other, strict=True)) for other in counts}
    nothing = (False,) * len(pattern)
    best, least = nothing, (np.inf, 0.0)
    for candidate in sorted(common - {pattern}):
        others = [p for p, m in counts.items() if m < rule.least(p) and p != candidate]
        joining = sum(counts[p] for p in others if within(candidate, p))
        if counts.get(candidate, 0.0) + joining < rule.least(candidate):
            continue
        lost = float(cost[np.array(pattern) & ~np.array(candidate)].sum())
        # Of equal losses the fullest, so that fewer patterns are left.
        rank = (lost, -counts.get(candidate, 0.0))
        if rank < least:
            best, least = candidate, rank
    return best


def within(coarse: Pattern, fine: Pattern) -> bool:
    """Whether the finer pattern has every block of the coarser one."""
    return all(b or not a for a, b in zip(coarse, fine, strict=True))


def end_of(pattern: Pattern, goes: Mapping[Pattern, Pattern]) -> Pattern:
    """Follow a pattern to where its entities end."""
    while pattern in goes:
        pattern = goes[pattern]
    return pattern


def find(released: list[Pattern], pattern: Pattern) -> int:
    """Place of a pattern among those released, or -1."""
    return released.index(pattern) if pattern in released else -1


def check_share(plan: MergePlan, n: Floats, largest_share: float, otherwise: str) -> None:
    """Refuse a plan that changes too much, with the share of the entities."""
    changed, total = plan.changes, float(n.sum())
    if changed > largest_share * total:
        raise EstimationError(
            f"{changed:,} of {int(total):,} entities ({100 * changed / total:.1f} %) are in missing patterns "
            "that have too few to be released (min_count, and twice as many as columns and response), and at "
            f"most {100 * largest_share:g} % may count as missing instead (max_moved); leave out columns or "
            f"a client, or allow more (exact where records are missing completely at random){otherwise}"
        )


def keep_only(keep: Bools, shown: Bools) -> Bools:
    """Keep of the rows that are kept, (n,), those that are shown, (m,)."""
    out = keep.copy()
    out[np.flatnonzero(keep)[~shown]] = False
    return out
