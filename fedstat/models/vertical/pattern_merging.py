"""Small missing patterns are not released: rules that merge them with other patterns.

Of a pattern with n_g entities and p_g columns seen, the Gram matrix of (1, x, y) is released. Those who know
all of its columns but one, which is the most that the coordinator and other sites together can know,
hold p_g + 1 linear equations in the n_g values of that column, beside its length. With n_g <= p_g + 1 these
determine the column; and to anybody the matrix fixes the rows up to a rotation, which leaves little to choose
where n_g is hardly larger. A pattern is therefore released with at least twice as many entities as
equations, :func:`min_entities`, so that half of every column stays undetermined, whoever colludes. That
is no bound on what columns of few distinct values disclose: where an owner has these judged by their bits, a
pattern needs as many entities as :func:`~fedstat.federation.tables.cardinality.min_group_size` says as well.

An entity may always be treated as if a site lacked it, or columns of it: that is exact when these are
missing completely at random, and costs the information of what is left out. The plan follows from the
counts of the patterns alone, so that the sites can sum over the coarser patterns in the first place; Gram
matrices of finer ones must never be released beside them, or the difference would show the few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import compress
from typing import TypeAlias

import numpy as np

from fedstat.errors import EstimationError, ModelError
from fedstat.federation.disclosure.row_checks import MIN_ENTITIES_PER_EQUATION
from fedstat.federation.tables.cardinality import ColumnCardinality, min_group_size
from fedstat.typing import Bools, Floats, Ints

LARGEST_SHARE = 0.05
"""Share of the entities that may be moved unless a caller allows more, which is then warned of."""
MOST_PATTERNS = 1500
"""Missing patterns beyond which no others are tried than small ones lacking all of what they have in part."""
Pattern: TypeAlias = tuple[bool, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MergePlan:
    """Which pattern counts as which.

    `patterns` (H, U) are released, ascending, by unit: columns of a site that are missing together.
    `target` (G,) is the place among them of every pattern that there was, -1 where its entities are left
    out, because too few would lack every block. `moved` entities count as missing at a site of which
    they have all columns; `trimmed` ones lose a part of a site's columns, or all of the part that
    they have.
    """

    patterns: Bools
    target: Ints
    moved: int
    left_out: int
    trimmed: int = 0

    @property
    def changes(self) -> int:
        """Entities that count otherwise than they are."""
        return self.moved + self.left_out + self.trimmed

    def shows(self, pattern: Ints) -> Bools:
        """Which units count as seen for entities of these released patterns (-1: none), (m, U)."""
        out = np.zeros((len(pattern), self.patterns.shape[1]), dtype=bool)
        out[pattern >= 0] = self.patterns[pattern[pattern >= 0]]
        return out


def min_entities(columns: int, min_count: int) -> int:
    """Fewest entities of a pattern in which so many columns are seen, 1 and the response not counted."""
    return max(min_count, MIN_ENTITIES_PER_EQUATION * (columns + 1))


@dataclass(frozen=True, slots=True)
class ColumnUnits:
    """Columns that are missing together: the site of each unit, and how many columns it has."""

    owner: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether every site is one unit."""
        return len(set(self.owner)) == len(self.owner)

    def any_of(self, patterns: Bools) -> Bools:
        """Which sites have some of their columns seen, (G, K), of units (G, U)."""
        return np.asarray(self._count(patterns) > 0)

    def all_of(self, patterns: Bools) -> Bools:
        """Which sites have all columns seen, (G, K)."""
        return np.asarray(self._count(patterns) == np.bincount(self.owner))

    def _count(self, patterns: Bools) -> Ints:
        member = np.array(self.owner)[:, None] == np.arange(max(self.owner) + 1)
        return np.asarray(patterns.astype(np.int64) @ member)


@dataclass(frozen=True, slots=True)
class PatternRule:
    """How many entities a released pattern needs: `sizes` are the columns of each of K sites.

    `units` are what a pattern is told by; by default every site is one. A site of which a part
    is seen counts with all its columns, as its door counts them. `details` of each site and that of
    the response have the columns of few values where the sites' owners have sums judged by their bits; see
    :mod:`fedstat.federation.tables.cardinality`.
    """

    min_count: int
    sizes: tuple[int, ...]
    details: tuple[ColumnCardinality | None, ...] = ()
    response: ColumnCardinality | None = None
    units: ColumnUnits | None = None

    @property
    def parts(self) -> ColumnUnits:
        """The units."""
        return self.units or ColumnUnits(tuple(range(len(self.sizes))), self.sizes)

    def least(self, pattern: Pattern) -> int:
        """Fewest entities of a pattern."""
        if self.units is not None and not self.units.whole:
            having = {k for k, seen in zip(self.units.owner, pattern, strict=True) if seen}
            pattern = tuple(k in having for k in range(len(self.sizes)))
        return self._least(pattern)

    def _least(self, pattern: Pattern) -> int:
        least = min_entities(sum(compress(self.sizes, pattern)), self.min_count)
        if not self.in_bits:
            return least
        seen = [*compress(zip(self.sizes, self.details, strict=True), pattern), (1, self.response)]
        total = sum(size for size, _ in seen)
        # As a door judges its own columns: of others' it knows the number, and not how many values they have.
        judged = ((detail, ColumnCardinality(total - size)) for size, detail in seen if detail is not None)
        return max([least, *(min_group_size(pair) for pair in judged)])

    @property
    def in_bits(self) -> bool:
        """Whether a site has columns of few values judged by their bits."""
        return any(detail is not None and detail.levelled for detail in (*self.details, self.response))

    @property
    def by_equations(self) -> PatternRule:
        """The rule without the bits of columns of few values."""
        return PatternRule(self.min_count, self.sizes, units=self.units)


def plan_merges(
    patterns: Bools,
    n: Floats,
    rule: PatternRule,
    *,
    largest_share: float = LARGEST_SHARE,
    otherwise: str = "",
) -> MergePlan:
    """Find a coarser pattern for the entities of every pattern (G, U) that has too few, of n (G,).

    Leaving unit u out of n_g entities loses n_g / n_u of what is known of it, n_u the entities that have it,
    in proportion to its columns among those of its site; the units with the smallest sum of these are
    left out. Patterns with more units are moved first, since their entities may fill a coarser one. An
    EstimationError, which ends with `otherwise`, where more than `largest_share` of the entities would have
    to count as missing at a site of which they have all columns, or be left out.
    """
    if rule.min_count < 1:
        raise ModelError(f"plan_merges: expected min_count of at least 1, received {rule.min_count}")
    if len(np.unique(patterns, axis=0)) != len(n):
        raise ModelError("plan_merges: the patterns must be distinct")
    parts, cost = rule.parts, 1.0 / np.maximum(n @ patterns, 1.0)
    if parts.whole:
        plan = merge_patterns(patterns, patterns, n, rule, cost)
    else:
        owner, sizes = list(parts.owner), np.array(parts.sizes)
        cost = cost * sizes / np.array(rule.sizes)[owner]
        few = n < [rule.least(tuple(row)) for row in patterns.tolist()]
        coarse = patterns & (~few[:, None] | parts.all_of(patterns)[:, owner])
        begin = [patterns, coarse] if len(n) <= MOST_PATTERNS else [coarse]
        plans = [merge_patterns(patterns, rows, n, rule, cost) for rows in begin]
        plan = max(plans, key=lambda one: float(n @ one.shows(one.target) @ sizes))
    check_share(plan, n, largest_share, otherwise)
    return plan


def merge_patterns(patterns: Bools, begin: Bools, n: Floats, rule: PatternRule, cost: Floats) -> MergePlan:
    """Merge small patterns, beginning with those that count as others, (G, U)."""
    merging = PatternMerger(rule, cost)
    at = np.array([merging.add(row, float(m)) for row, m in zip(begin, n, strict=True)])
    while (small := merging.next_small()) is not None:
        coarser = merging.best_coarser(small)
        for place in merging.joining(small, coarser):
            at[at == place] = merging.move(place, coarser)
    # Entities without any block have nowhere coarser to go: few of them are left out.
    nothing, counts = (False,) * patterns.shape[1], merging.counts
    if 0 < counts.get(nothing, 0.0) < rule.least(nothing):
        counts.pop(nothing)
    numbers = {pattern: number for number, pattern in enumerate(sorted(counts))}
    target = np.array([numbers.get(merging.patterns[place], -1) for place in at.tolist()])
    released = np.array([*numbers], dtype=bool).reshape(len(numbers), patterns.shape[1])
    plan = MergePlan(released, target, 0, int(n[target < 0].sum()))
    to, parts = plan.shows(target), rule.parts
    whole = (parts.all_of(patterns) & ~parts.any_of(to)).any(axis=1) & (target >= 0)
    less = (patterns != to).any(axis=1) & (target >= 0) & ~whole
    return replace(plan, moved=int(n[whole].sum()), trimmed=int(n[less].sum()))


class PatternMerger:
    """Patterns at hand, with their entities, while small ones are merged."""

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
        """Let entities have a pattern; return its place."""
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
        """Move the entities of a pattern to a coarser one; return the place of that."""
        self.there[place] = False
        return self.add(np.array(coarser, dtype=bool), float(self.n[place]))

    @property
    def small(self) -> Bools:
        """Which patterns have too few."""
        return np.asarray(self.there & (self.n < self.least))

    def next_small(self) -> int | None:
        """Find the small pattern with most units: its entities may fill one that would be too small."""
        found = np.flatnonzero(self.small & (self.n > 0.0) & self.rows.any(axis=1))
        if not len(found):
            return None
        ranks = [(int(self.rows[i].sum()), -float(self.n[i]), self.patterns[i]) for i in found]
        return int(found[max(range(len(found)), key=ranks.__getitem__)])

    def best_coarser(self, place: int) -> Pattern:
        """Choose the coarser pattern that loses least, among those that will have enough entities.

        Enough: with these entities, and those of other small patterns that could join. Candidates are
        the patterns that there are and what this one has in common with another; where entities have parts of
        a site, what it has in common with so many small ones as are enough.
        """
        row, small = self.rows[place], self.small
        common = np.unique(self.rows[self.there] & row, axis=0)
        if not self.rule.parts.whole:
            common = np.unique(np.vstack([common, *self._grown(row, small)]), axis=0)
        common = common[(common != row).any(axis=1)]
        lost = np.where(row & ~common, self.cost, 0.0).sum(axis=1)
        there = np.array([self._there(tuple(c)) for c in common.tolist()])
        # Of equal losses the fullest, so that fewer patterns are left.
        for i in np.lexsort((-there, lost)):
            if self._joined(common[i], small) >= self.rule.least(tuple(common[i].tolist())):
                return tuple(common[i].tolist())
        return (False,) * len(row)

    def joining(self, place: int, coarser: Pattern) -> list[int]:
        """List what goes there: this pattern, and where entities have parts of a site what is needed.

        Of a few sites the other small ones have a choice of their own; of many units they would go
        apart.
        """
        if self.rule.parts.whole:
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
        """Leave out what one small pattern after the other lacks, the cheapest first, until it is enough."""
        others, coarser = self.rows[small], row
        while self._joined(coarser, small) < self.rule.least(tuple(coarser.tolist())):
            more = np.where(coarser & ~others, self.cost, 0.0).sum(axis=1)
            more[more <= 0.0] = np.inf
            if not np.isfinite(more).any():
                return
            coarser = coarser & others[int(more.argmin())]
        yield coarser


def check_share(plan: MergePlan, n: Floats, largest_share: float, otherwise: str) -> None:
    """Refuse a plan that changes too much, with the share of the entities."""
    changed, total = plan.moved + plan.left_out, float(n.sum())
    if changed > largest_share * total:
        raise EstimationError(
            f"{changed:,} of {int(total):,} entities ({100 * changed / total:.1f} %) are in missing patterns "
            "that have too few to be released (min_count, and twice as many as columns and response), and at "
            f"most {100 * largest_share:g} % may count as missing instead (max_moved); leave out columns or "
            f"a site, or allow more (exact where records are missing completely at random){otherwise}"
        )


def select_columns(keep: Bools, shown: Bools) -> Bools:
    """Keep of the rows that are kept, (n,), those that are shown, (m,)."""
    out = keep.copy()
    out[np.flatnonzero(keep)[~shown]] = False
    return out
