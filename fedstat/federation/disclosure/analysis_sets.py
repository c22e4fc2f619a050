"""Rows that a site leaves out, so that the rows of two analyses never differ by few.

Analyses of other columns have other complete rows, and the difference of two sums is a sum over the rows in
which they differ. A site divides its rows into *classes*: rows that were together in every analysis so far.
An analysis uses a class in full or not at all, or divides it into two classes of enough rows:

* If it lacks few rows of a class, further rows of this class are left out with them, until there are enough.
* If it has few rows of a class, it does without them.

So every class has enough rows. A combination of sums over sets of classes is nonzero in complete classes, and
belongs to no fewer rows than the smallest class has. The first analysis uses all its complete rows. A request
that is repeated uses the same rows, after whatever others.

The rows that are left out further are chosen so that sums by level may be compared, too: a level of a column
with few values has no row or enough rows in each part. They do not all resemble the rows that lack a value:
if another level can be had in as many rows, the class has two levels, so that it reveals no level of a row.
The choice depends on values that only the site has; the checks of the release history judge its result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedstat.federation.disclosure.release_history import ReleasedSums
from fedstat.federation.disclosure.state import SiteData
from fedstat.federation.tables.table import in_memory, keep_result
from fedstat.typing import Bools, Floats, Ints

FEW_LEVELS = 20
"""Most values of a column whose levels are compared."""
CODES = FEW_LEVELS**2
MOST_COLUMNS = 12
"""Columns whose levels are compared, alone and by two."""
LARGE_PART = 200
"""Rows from which the levels of a part of a class are not compared before the sums are."""
MOST_LEFT_OUT = 6
"""Rows of a class that are left out at most, relative to the minimum."""


ATTEMPTS, NOISE = 16, 0.5
"""Choices of rows that are tried, and the random part of the second one's scores."""


@dataclass(frozen=True, slots=True)
class ClassMinimum:
    """Fewest persons of a class, and fewest rows of a level in it."""

    persons: int
    level: int

    @property
    def most(self) -> int:
        """Most rows of one class that are left out without a value that is missing."""
        return MOST_LEFT_OUT * self.persons


def leaves_out(data: SiteData) -> bool:
    """Return whether the policy leaves rows out, and there are earlier analyses."""
    policy, released = data.policy, data.memory.released
    off = policy.small_differences == "refuse" or policy.remember == "nothing" or policy.min_count < 2
    return not off and released is not None and bool(released.sets.any())


def leave_out_rows(data: SiteData, used: Bools) -> Bools:
    """Return the complete rows, (n_rows,), without those that would differ by few from earlier analyses."""
    policy, released = data.policy, data.memory.released
    if released is None or not used.any():
        return used
    inside = np.zeros(released.n_rows, dtype=bool)
    inside[: len(used)] = used
    minimum = ClassMinimum(policy.min_count, policy.min_level_count)
    parts = [part for part in _parts(released.sets, inside) if _is_split(released, part, minimum)]
    if not parts:
        return used
    codes = _codes(data, released)
    rank = _rank(used, codes)
    for part in parts:
        inside[_left_out(released, codes, rank, part, minimum)] = False
    return inside[: len(used)] if inside.any() else used


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows of a class that an analysis has, and those that it lacks; `is_new` if no analysis had them."""

    inside: Ints
    outside: Ints
    is_new: bool


def _parts(sets: Ints, inside: Bools) -> Iterator[Part]:
    """Divide the classes of which an analysis has rows."""
    for one in np.unique(sets[inside]).tolist():
        here = sets == one
        yield Part(np.flatnonzero(here & inside), np.flatnonzero(here & ~inside), one == 0)


def _is_split(released: ReleasedSums, part: Part, minimum: ClassMinimum) -> bool:
    """Return whether a class is divided, and one part is small."""
    if part.is_new:
        return len(part.inside) < LARGE_PART
    return len(part.outside) > 0 and min(len(part.inside), len(part.outside)) < LARGE_PART


def _persons(released: ReleasedSums, rows: Ints) -> int:
    return len(rows) if released.persons is None else len(np.unique(released.persons[rows]))


def _left_out(released: ReleasedSums, codes: Ints, rank: Ints, part: Part, minimum: ClassMinimum) -> Ints:
    """Return the rows of a class that the analysis does without."""
    few = _persons(released, part.inside) < minimum.persons
    if part.is_new:
        return part.inside if few else _rare(codes, part.inside, minimum)
    if few or len(part.inside) <= minimum.most:
        return part.inside  # also what was left out of the same request before
    chosen = _Choice(released, codes, rank, part, minimum).rows()
    # Too few rows remain: the class is left out.
    return part.inside if _persons(released, np.setdiff1d(part.inside, chosen)) < minimum.persons else chosen


def _rare(codes: Ints, rows: Ints, minimum: ClassMinimum) -> Ints:
    """Return those rows of a new class that have a level of few rows in it; none if they are many.

    Cells of two columns count as levels, unless this would leave out as many rows as a class has.
    """
    for levels_of, most in ((_with_pairs, minimum.persons - 1), (np.asarray, minimum.most)):
        kept = _without_rare(levels_of(codes[rows]), rows, minimum)
        if len(kept) < minimum.persons and len(rows) <= minimum.most:
            return rows
        if len(kept) >= minimum.persons and len(rows) - len(kept) <= most:
            return np.setdiff1d(rows, kept)
    return rows[:0]


def _without_rare(levels: Ints, rows: Ints, minimum: ClassMinimum) -> Ints:
    """Return the rows, with levels (m, q), without those of rare levels, until no level is rare."""
    kept = np.ones(len(rows), dtype=bool)
    while kept.any():
        rare = np.zeros(len(rows), dtype=bool)
        for level in levels.T:
            known = kept & (level >= 0)
            count = np.bincount(level[known], minlength=CODES)
            rare |= known & (count[level] < minimum.level)
        if not rare.any():
            break
        kept &= ~rare
    return rows[kept]


def _counts(codes: Ints, rows: Ints) -> list[Ints]:
    """Count the rows of each level by column; the last count is of rows without a level."""
    found = _with_pairs(codes[rows])
    return [np.append(np.bincount(part[part >= 0], minlength=CODES), 0) for part in found.T]


def _with_pairs(codes: Ints) -> Ints:
    """Add the cells of every two columns to levels (m, q), -1 where a level is not known."""
    m, q = codes.shape
    one, other = np.triu_indices(q, 1)
    a, b = codes[:, one], codes[:, other]
    return np.hstack([codes, np.where((a < 0) | (b < 0), -1, a * FEW_LEVELS + b)]).reshape(m, -1)


class _Choice:
    """Chooses the rows of a class that are left out with those that an analysis lacks."""

    def __init__(
        self, released: ReleasedSums, codes: Ints, rank: Ints, part: Part, minimum: ClassMinimum
    ) -> None:
        self.released, self.part, self.minimum = released, part, minimum
        self.pool = part.inside[np.argsort(rank[part.inside], kind="stable")]
        self.levels, self.columns = _with_pairs(codes[self.pool]), codes.shape[1]
        self.start = _counts(codes, part.outside), _counts(codes, part.inside)
        self.rng = np.random.default_rng(int(rank[part.inside].sum()))
        self._begin(0)

    def _begin(self, attempt: int) -> None:
        self.taken = np.zeros(len(self.pool), dtype=bool)
        self.apart, self.rest = ([count.copy() for count in counts] for counts in self.start)
        self.noise, self.by_level = attempt * NOISE, attempt % 2 == 1

    def rows(self) -> Ints:
        """Return the rows; those with the fewest levels of few rows if the levels need too many."""
        least, best = np.inf, self.pool[: self.minimum.most]
        for attempt in range(ATTEMPTS):
            self._begin(attempt)
            chosen, lacking = self._fill()
            if not lacking and self._mix():
                mixed, more = self._fill()
                # Rows of other levels may leave cells of two columns with few rows, but no level.
                chosen, lacking = (mixed, more) if more < CODES else (chosen, lacking)
            if lacking < least:
                least, best = lacking, chosen
            if not least:
                break
        return best

    def _fill(self) -> tuple[Ints, float]:
        """Take rows until no level lacks rows; return the best choice, and how many rows its levels lack."""
        least, best = np.inf, self.pool[:0]
        while self.taken.sum() <= self.minimum.most and not self.taken.all():
            apart = np.concatenate([self.part.outside, self.pool[self.taken]])
            if _persons(self.released, apart) >= self.minimum.persons:
                lacking = self._lacking()
                if lacking < least:
                    least, best = lacking, self.pool[self.taken]
                if not lacking:
                    break
            self._take(int(self._scores().argmax()))
        return best, least

    def _take(self, place: int) -> None:
        self.taken[place] = True
        for j, level in enumerate(self.levels[place].tolist()):
            if level >= 0:
                self.apart[j][level] += 1
                self.rest[j][level] -= 1

    def _lacking(self) -> float:
        """Return how many rows are lacking by level, and by cell of two columns, which count less."""
        moves = [_moves(a, b, self.minimum.level).sum() for a, b in zip(self.apart, self.rest, strict=True)]
        return float(sum(moves[: self.columns])) * CODES + float(sum(moves[self.columns :]))

    def _scores(self) -> Floats:
        """Return by how many moves each row of the pool brings the parts closer to enough rows by level.

        In every other attempt, only rows of the level that lacks the fewest rows are candidates: all levels
        together may ask for rows that help none of them to have enough.
        """
        least, scores = self.minimum.level, np.zeros(len(self.pool))
        helps, nearest = np.zeros(len(self.pool), dtype=bool), np.inf
        for j, (apart, rest) in enumerate(zip(self.apart, self.rest, strict=True)):
            if self.by_level and j < self.columns:
                lacking = _moves(apart, rest, least)
                open_ = np.flatnonzero(lacking[:-1])
                if len(open_) and lacking[open_].min() + (draw := self.rng.random()) < nearest:
                    level = open_[lacking[open_].argmin()]
                    nearest, one = lacking[level] + draw, self.levels[:, j] == level
            gain = _moves(apart, rest, least) - _moves(apart + 1, np.maximum(rest - 1, 0), least)
            gain[-1] = 0.0
            scores += gain[self.levels[:, j]]
            helps |= gain[self.levels[:, j]] > 0.0
        scores += self.rng.uniform(0.0, self.noise, len(scores)) if self.noise else 0.0
        if np.isfinite(nearest) and (one & ~self.taken).any():
            helps = one & ~self.taken
        scores[self.taken | (~helps & helps.any())] = -np.inf
        return scores

    def _mix(self) -> bool:
        """Take a row of other levels, if all rows that are left out have one level of a column."""
        constant = [j for j in range(self.columns) if (self.apart[j] > 0).sum() == 1]
        if not constant:
            return False
        own = [int(self.apart[j].argmax()) for j in constant]
        other = (self.levels[:, constant] != own) & (self.levels[:, constant] >= 0)
        free = np.flatnonzero(~self.taken)
        _, which, counts = np.unique(
            self.levels[free][:, : self.columns], axis=0, return_inverse=True, return_counts=True
        )
        gain = np.zeros(len(self.pool))
        # Of equally many other levels, a row that has equal ones.
        equals = np.minimum(counts[which.ravel()], 2 * self.minimum.level)
        gain[free] = other[free].sum(axis=1) * np.where(equals >= 2 * self.minimum.level, 2.0, 1.0)
        if not gain.max(initial=0.0):
            return False
        self._take(int(gain.argmax()))
        return True


def _moves(apart: Ints, rest: Ints, least: int) -> Floats:
    """Return how many rows of each level must move until both parts have none or enough; 0 for never."""
    moves = np.zeros(len(apart))
    for t in range(2 * least, -1, -1):
        a, b = apart + t, rest - t
        moves[((a == 0) | (a >= least)) & ((b == 0) | (b >= least))] = t
    return moves


def _codes(data: SiteData, released: ReleasedSums) -> Ints:
    """Return the levels of columns with few values, (n, q), -1 for none: of the table and the history.

    Rows that are gone have the values under which they were summed.
    """
    table = data.table
    own = keep_result(table, "columns of few values", lambda: _levels_of(data)) if in_memory(table) else None
    own = _levels_of(data) if own is None else own
    gone = released.n_rows > len(own)
    patterns = released.spaces.patterns[: (MOST_COLUMNS - own.shape[1]) * gone]
    summed = [one.codes.astype(np.int64) for one in patterns]
    codes = np.full((released.n_rows, own.shape[1] + len(summed)), -1, dtype=np.int64)
    codes[: len(own), : own.shape[1]] = own
    for j, one in enumerate(summed, own.shape[1]):
        few = one.max(initial=0) < FEW_LEVELS
        codes[:, j] = one if few else -1
    return codes


def _levels_of(data: SiteData) -> Ints:
    """Return the levels of the table's own columns with few values, (n_rows, q), -1 for missing cells."""
    found: list[Ints] = []
    for name in data.table.columns:
        parts = [chunk[name] for chunk in data.table.chunks([name])]
        series = pd.concat(parts, ignore_index=True) if parts else pd.Series(dtype=object)
        try:
            code, levels = pd.factorize(series)
        except (TypeError, NotImplementedError):  # a column of arrays
            continue
        if 1 < len(levels) <= FEW_LEVELS and len(found) < MOST_COLUMNS:
            found.append(code.astype(np.int64))
    return np.column_stack(found) if found else np.zeros((data.table.n_rows, 0), dtype=np.int64)


def _rank(used: Bools, codes: Ints) -> Ints:
    """Return an order of the rows that follows from all columns of few values, the same for the same rows."""
    digest = hashlib.blake2b(np.packbits(used).tobytes() + codes.tobytes(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "big"))
    return rng.permutation(len(codes))
