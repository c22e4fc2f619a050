"""Small missing patterns are not released: rules that merge them with other patterns.

For a pattern with n_g entities and p_g observed columns, the Gram matrix of (1, x, y) is released. The
coordinator and other sites together can know at most all of its columns but one. They then have p_g + 1
linear equations in the n_g values of that column, and its length. With n_g <= p_g + 1, these determine the
column. For any receiver, the matrix fixes the rows up to a rotation, which leaves little freedom if n_g is
only slightly larger. A pattern is therefore released only with at least twice as many entities as equations,
:func:`min_entities`, so that half of every column stays undetermined under any collusion. This does not bound
what is revealed about columns of few distinct values. If an owner's policy counts the bits of sums about
these, a pattern also needs as many entities as :func:`~fedstat.federation.tables.cardinality.min_group_size`
states.

An entity may always be treated as if a site lacked it, or some of its columns. This causes no bias if these
are missing completely at random, and loses their information. The plan depends only on the counts of the
patterns, so the sites can sum over the coarser patterns from the start. Gram matrices of finer patterns must
never be released in addition, because the difference would reveal the few entities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import compress
from typing import TypeAlias

import numpy as np

from fedstat.errors import EstimationError, ModelError, Remedy
from fedstat.federation.disclosure.row_checks import MIN_ENTITIES_PER_EQUATION
from fedstat.federation.tables.cardinality import ColumnCardinality, min_group_size
from fedstat.typing import Bools, Floats, Ints

LARGEST_SHARE = 0.05
"""Share of the entities that may be moved by default; if a caller allows more, a warning reports it."""
MOST_PATTERNS = 1500
"""Number of missing patterns above which the search is limited to patterns without the partial sites."""
Pattern: TypeAlias = tuple[bool, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MergePlan:
    """Which pattern counts as which.

    `patterns` (H, U) are released, ascending, by unit: columns of a site that are missing together. `target`
    (G,) is the index among them of every original pattern, -1 if its entities are left out, because too few
    would lack every block. `moved` entities count as missing at a site although they have all its columns;
    `trimmed` ones lose a part of a site's columns, or all of the part that they have.
    """

    patterns: Bools
    target: Ints
    moved: int
    left_out: int
    trimmed: int = 0

    @property
    def changes(self) -> int:
        """Number of entities whose pattern changes."""
        return self.moved + self.left_out + self.trimmed

    def shows(self, pattern: Ints) -> Bools:
        """Return which units count as observed for entities of these released patterns (-1: none), (m, U)."""
        out = np.zeros((len(pattern), self.patterns.shape[1]), dtype=bool)
        out[pattern >= 0] = self.patterns[pattern[pattern >= 0]]
        return out


def min_entities(columns: int, min_count: int, each: float = MIN_ENTITIES_PER_EQUATION) -> int:
    """Fewest entities of a pattern with this many observed columns, without 1 and the response.

    `each` is the number of entities for an equation that all policies allow.
    """
    return max(min_count, int(np.ceil(each * (columns + 1))))


@dataclass(frozen=True, slots=True)
class ColumnUnits:
    """Columns that are missing together: the site of each unit, and how many columns it has."""

    owner: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether every site is one unit."""
        return len(set(self.owner)) == len(self.owner)

    def any_of(self, patterns: Bools) -> Bools:
        """Return which sites have some of their columns observed, (G, K), of units (G, U)."""
        return np.asarray(self._count(patterns) > 0)

    def all_of(self, patterns: Bools) -> Bools:
        """Return which sites have all columns observed, (G, K)."""
        return np.asarray(self._count(patterns) == np.bincount(self.owner))

    def _count(self, patterns: Bools) -> Ints:
        member = np.array(self.owner)[:, None] == np.arange(max(self.owner) + 1)
        return np.asarray(patterns.astype(np.int64) @ member)


@dataclass(frozen=True, slots=True)
class PatternRule:
    """How many entities a released pattern needs: `sizes` are the columns of each of K sites.

    `units` distinguish patterns; by default every site is one. A site with some observed columns counts with
    all its columns, as its disclosure check counts them. `details` of each site and that of the response have
    the columns of few values if the sites' policies count the bits that sums reveal; see
    :mod:`fedstat.federation.tables.cardinality`. For `each` see :func:`min_entities`.
    """

    min_count: int
    sizes: tuple[int, ...]
    details: tuple[ColumnCardinality | None, ...] = ()
    response: ColumnCardinality | None = None
    units: ColumnUnits | None = None
    each: float = MIN_ENTITIES_PER_EQUATION

    @property
    def parts(self) -> ColumnUnits:
        """The units."""
        return self.units or ColumnUnits(tuple(range(len(self.sizes))), self.sizes)

    def least(self, pattern: Pattern) -> int:
        """Fewest entities of a pattern."""
        if self.units is not None and not self.units.complete:
            having = {k for k, seen in zip(self.units.owner, pattern, strict=True) if seen}
            pattern = tuple(k in having for k in range(len(self.sizes)))
        return self._least(pattern)

    def _least(self, pattern: Pattern) -> int:
        least = min_entities(sum(compress(self.sizes, pattern)), self.min_count, self.each)
        if not self.in_bits:
            return least
        seen = [*compress(zip(self.sizes, self.details, strict=True), pattern), (1, self.response)]
        total = sum(size for size, _ in seen)
        # As the disclosure check of a site judges its own columns: it knows only the number of the others'
        # columns.
        judged = ((detail, ColumnCardinality(total - size)) for size, detail in seen if detail is not None)
        return max([least, *(min_group_size(pair) for pair in judged)])

    @property
    def in_bits(self) -> bool:
        """Whether the policy of a site counts the bits of its columns of few values."""
        return any(detail is not None and detail.leveled for detail in (*self.details, self.response))

    @property
    def by_equations(self) -> PatternRule:
        """Return the rule without the bits of columns of few values."""
        return PatternRule(self.min_count, self.sizes, units=self.units, each=self.each)


def plan_merges(
    patterns: Bools,
    n: Floats,
    rule: PatternRule,
    *,
    largest_share: float = LARGEST_SHARE,
    remedy: Remedy | None = None,
) -> MergePlan:
    """Find a coarser pattern for the entities of every pattern (G, U) that has too few, of n (G,).

    Leaving unit u out of n_g entities loses the share n_g / n_u of its information, n_u the number of
    entities that have it, in proportion to its columns among those of its site; the units with the smallest
    sum of these are left out. Patterns with more units are moved first, because their entities may fill a
    coarser one. Raises EstimationError, with the remedy, if more than `largest_share` of the
    entities would count as missing at a site although they have all its columns, or be left out.
    """
    if rule.min_count < 1:
        raise ModelError(f"plan_merges: expected min_count of at least 1, received {rule.min_count}")
    if len(np.unique(patterns, axis=0)) != len(n):
        raise ModelError("plan_merges: the patterns must be distinct")
    parts, cost = rule.parts, 1.0 / np.maximum(n @ patterns, 1.0)
    if parts.complete:
        plan = merge_patterns(patterns, patterns, n, rule, cost)
    else:
        owner, sizes = list(parts.owner), np.array(parts.sizes)
        cost = cost * sizes / np.array(rule.sizes)[owner]
        few = n < [rule.least(tuple(row)) for row in patterns.tolist()]
        coarse = patterns & (~few[:, None] | parts.all_of(patterns)[:, owner])
        begin = [patterns, coarse] if len(n) <= MOST_PATTERNS else [coarse]
        plans = [merge_patterns(patterns, rows, n, rule, cost) for rows in begin]
        plan = max(plans, key=lambda one: float(n @ one.shows(one.target) @ sizes))
    check_share(plan, n, largest_share, remedy)
    return plan


def merge_patterns(patterns: Bools, begin: Bools, n: Floats, rule: PatternRule, cost: Floats) -> MergePlan:
    """Merge small patterns, beginning with those that count as others, (G, U)."""
    merging = PatternMerger(rule, cost)
    at = np.array([merging.add(row, float(m)) for row, m in zip(begin, n, strict=True)])
    while (small := merging.next_small()) is not None:
        coarser = merging.best_coarser(small)
        for place in merging.joining(small, coarser):
            at[at == place] = merging.move(place, coarser)
    # Entities without any block have no coarser pattern: few of them are left out.
    nothing, counts = (False,) * patterns.shape[1], merging.counts
    if 0 < counts.get(nothing, 0.0) < rule.least(nothing):
        counts.pop(nothing)
    numbers = {pattern: number for number, pattern in enumerate(sorted(counts))}
    target = np.array([numbers.get(merging.patterns[place], -1) for place in at.tolist()])
    released = np.array([*numbers], dtype=bool).reshape(len(numbers), patterns.shape[1])
    plan = MergePlan(released, target, 0, int(n[target < 0].sum()))
    to, parts = plan.shows(target), rule.parts
    complete = (parts.all_of(patterns) & ~parts.any_of(to)).any(axis=1) & (target >= 0)
    less = (patterns != to).any(axis=1) & (target >= 0) & ~complete
    return replace(plan, moved=int(n[complete].sum()), trimmed=int(n[less].sum()))


class PatternMerger:
    """Existing patterns, with their entities, while small ones are merged."""

    def __init__(self, rule: PatternRule, cost: Floats) -> None:
        self.rule, self.cost = rule, cost
        self.patterns: list[Pattern] = []
        self.rows = np.zeros((0, len(cost)), dtype=bool)
        self.n, self.least = np.zeros(0), np.zeros(0)
        self.there = np.zeros(0, dtype=bool)
        self._place: dict[Pattern, int] = {}

    @property
    def counts(self) -> dict[Pattern, float]:
        """Entities by pattern."""
        return {p: float(m) for p, m, here in zip(self.patterns, self.n, self.there, strict=True) if here}

    def add(self, row: Bools, n: float) -> int:
        """Assign entities to a pattern; return its index."""
        pattern = tuple(row.tolist())
        place = self._place.setdefault(pattern, len(self.patterns))
        if place == len(self.patterns):
            self.patterns.append(pattern)
            self.rows = np.vstack([self.rows, row])
            self.n, self.there = np.append(self.n, 0.0), np.append(self.there, False)
            self.least = np.append(self.least, self.rule.least(pattern))
        self.n[place] = n + (self.n[place] if self.there[place] else 0.0)
        self.there[place] = True
        return place

    def move(self, place: int, coarser: Pattern) -> int:
        """Move the entities of a pattern to a coarser one; return its index."""
        self.there[place] = False
        return self.add(np.array(coarser, dtype=bool), float(self.n[place]))

    @property
    def small(self) -> Bools:
        """Which patterns have too few."""
        return np.asarray(self.there & (self.n < self.least))

    def next_small(self) -> int | None:
        """Find the small pattern with most units: its entities may fill another that would be too small."""
        found = np.flatnonzero(self.small & (self.n > 0.0) & self.rows.any(axis=1))
        if not len(found):
            return None
        ranks = [(int(self.rows[i].sum()), -float(self.n[i]), self.patterns[i]) for i in found]
        return int(found[max(range(len(found)), key=ranks.__getitem__)])

    def best_coarser(self, place: int) -> Pattern:
        """Choose the coarser pattern with the smallest loss, among those that will have enough entities.

        Enough means: with these entities, and those of other small patterns that could join. Candidates are
        the existing patterns, and the intersections of this one with another. If entities have parts of a
        site, the intersection with as many small ones as are enough is also a candidate.
        """
        row, small = self.rows[place], self.small
        common = np.unique(self.rows[self.there] & row, axis=0)
        if not self.rule.parts.complete:
            common = np.unique(np.vstack([common, *self._grown(row, small)]), axis=0)
        common = common[(common != row).any(axis=1)]
        lost = np.where(row & ~common, self.cost, 0.0).sum(axis=1)
        there = np.array([self._there(tuple(c)) for c in common.tolist()])
        # For equal losses choose the fullest one, so that fewer patterns remain.
        for i in np.lexsort((-there, lost)):
            if self._joined(common[i], small) >= self.rule.least(tuple(common[i].tolist())):
                return tuple(common[i].tolist())
        return (False,) * len(row)

    def joining(self, place: int, coarser: Pattern) -> list[int]:
        """List the patterns that move: this one and, if entities have parts of a site, those needed.

        With few sites, the other small patterns choose for themselves; with many units they would diverge.
        """
        if self.rule.parts.complete:
            return [place]
        row, out = np.array(coarser, dtype=bool), [place]
        n, least = self._there(coarser) + self.n[place], self.rule.least(coarser)
        within = self.small & ~(row & ~self.rows).any(axis=1) & (self.rows != row).any(axis=1)
        others = np.setdiff1d(np.flatnonzero(within), [place])
        for other in others[np.argsort(self.rows[others] @ self.cost, kind="stable")]:
            if n >= least:
                break
            out.append(int(other))
            n += self.n[other]
        return out

    def _there(self, pattern: Pattern) -> float:
        place = self._place.get(pattern)
        return float(self.n[place]) if place is not None and self.there[place] else 0.0

    def _joined(self, row: Bools, small: Bools) -> float:
        """Count the entities of a pattern with those of small ones that have all its units."""
        pattern = tuple(row.tolist())
        within = small & ~(row & ~self.rows).any(axis=1)
        if (place := self._place.get(pattern)) is not None:
            within[place] = False
        return self._there(pattern) + float(self.n[within].sum())

    def _grown(self, row: Bools, small: Bools) -> Iterator[Bools]:
        """Leave out the missing units of small patterns in turn, the cheapest first, until it is enough."""
        others, coarser = self.rows[small], row
        while self._joined(coarser, small) < self.rule.least(tuple(coarser.tolist())):
            more = np.where(coarser & ~others, self.cost, 0.0).sum(axis=1)
            more[more <= 0.0] = np.inf
            if not np.isfinite(more).any():
                return
            coarser = coarser & others[int(more.argmin())]
        yield coarser


def check_share(plan: MergePlan, n: Floats, largest_share: float, remedy: Remedy | None) -> None:
    """Refuse a plan that changes too much, and state the share of the entities."""
    changed, total = plan.moved + plan.left_out, float(n.sum())
    if changed > largest_share * total:
        raise EstimationError(
            f"{changed:,} of {int(total):,} entities ({100 * changed / total:.1f} %) are in missing "
            "patterns with too few entities to be released (min_count, and twice as many as columns and "
            f"response), but at most {100 * largest_share:g} % may count as missing instead; "
            "leave out columns or a site",
            remedy=remedy and remedy.filled(share=math.ceil(100 * changed / total) / 100),
        )


def select_columns(keep: Bools, shown: Bools) -> Bools:
    """Select among the kept rows, (n,), those that are shown, (m,)."""
    out = keep.copy()
    out[np.flatnonzero(keep)[~shown]] = False
    return out
