"""Rows that a site leaves out, so that the rows of two analyses never differ by few.

Analyses of other columns have other complete rows, and the difference of two sums is a sum over the rows in
which they differ. A site divides its rows into *classes*: rows that were together in every analysis so far.
An analysis uses a class in full or not at all, or divides it into two classes of enough rows:

* If it lacks few rows of a class, further rows of this class are left out with them, until there are enough.
* If it has few rows of a class, it does without them.

So every class has enough rows. A combination of sums over sets of classes is nonzero in complete classes, and
belongs to no fewer rows than the smallest class has. A request that is repeated uses the same rows, after
whatever others.

Most differences do not arise: few rows that lack the same columns are treated as if they lacked more, those
of a larger class that lacks at least the same ones, or else all columns (:func:`usable_rows`). This depends
on the table alone, so the order of the analyses does not matter, and the first one uses the same rows. It is
not done where a level, or a cell of two columns, would have too few rows then.

The rows that are left out further are chosen so that sums by level may be compared, too: if possible, rows
with the levels of those that lack a value in all columns, and rows that have other levels and agree among
themselves. Otherwise a level of a column with few values has no row or enough rows in each part. They do not
all resemble the rows that lack a value: if another level can be had in as many rows, the class has two
levels, so that it reveals no level of a row. The choice depends on values that only the site has; the checks
of the release history judge its result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd

from fedstat.federation.disclosure.release_history import ReleasedSums
from fedstat.federation.disclosure.state import SiteData
from fedstat.federation.tables.columns import missing_cells
from fedstat.federation.tables.table import in_memory, keep_result, plain_columns
from fedstat.typing import Bools, Floats, Ints

FEW_LEVELS = 20
"""Most values of a column whose levels are compared."""
CODES = FEW_LEVELS**2
MOST_COLUMNS, MOST_PATTERNS = 12, 100
"""Columns whose levels are compared, alone and by two; columns that decide which rows are alike."""
LARGE_PART = 200
"""Rows from which the levels of a part of a class are not compared before the sums are."""
MOST_LEFT_OUT = 6
"""Rows of a class that are left out at most, relative to the minimum."""


FEW_INCOMPLETE, MOST_INCOMPLETE = 30, 0.1
"""Rows that lack the same columns are few up to this number; largest share of rows that are treated so."""

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
    """Return whether the policy leaves rows out, and there may be such rows."""
    policy, released = data.policy, data.memory.released
    if policy.small_differences == "refuse" or policy.remember == "nothing" or policy.min_count < 2:
        return False
    return (released is not None and bool(released.sets.any())) or _lacking(data) is not None


@dataclass(frozen=True, slots=True, eq=False)
class Lacking:
    """What rows are treated as lacking: `columns`, `patterns` of them (P, q), and the pattern of each row.

    Rows of a pattern in `unused`, (P,), are in no analysis.
    """

    columns: tuple[str, ...]
    patterns: Bools
    unused: Bools
    which: Ints


def usable_rows(data: SiteData, columns: Collection[str]) -> Bools | None:
    """Return the rows, (n_rows,), that analyses of these columns use where complete; None for all."""
    lacking = _lacking(data)
    if lacking is None:
        return None
    requested = np.array([name in columns for name in lacking.columns])
    lacks = (lacking.patterns & requested).any(axis=1)
    used: Bools = np.logical_not(lacks | lacking.unused)
    return used[lacking.which]


def _lacking(data: SiteData) -> Lacking | None:
    """Return what rows are treated as lacking; None if it is what they lack."""
    key = ("lacking", data.policy.min_level_count, *data.published)
    return data.memory.of_table(key, partial(_find_lacking, data))


def _find_lacking(data: SiteData) -> Lacking | None:
    names = [name for name in plain_columns(data.table) if name in data.published]
    parts = [missing_cells((chunk[name] for name in names), len(chunk)) for chunk in data.table.chunks(names)]
    cells = np.concatenate([np.zeros((0, len(names)), dtype=bool), *parts])
    columns = np.flatnonzero(cells.any(axis=0))
    if not len(columns):
        return None
    patterns, which, counts = np.unique(cells[:, columns], axis=0, return_inverse=True, return_counts=True)
    larger, unused = enlarge_patterns(patterns, counts)
    which = which.ravel().astype(np.min_scalar_type(len(patterns)))
    if unused.any():
        unused = _keep_levels(unused, which, own_levels(data), data.policy.min_level_count)
    if not unused.any() and (larger == patterns).all():
        return None
    return Lacking(tuple(names[j] for j in columns), larger, unused, which)


def _keep_levels(unused: Bools, which: Ints, codes: Ints, least: int) -> Bools:
    """Return the patterns (P,) without which no level, and no cell of two columns, gets few rows."""
    if not codes.shape[1]:
        return unused
    cells = _with_pairs(codes[:, :MOST_COLUMNS])
    counts, kept = _count_cells(cells), unused.copy()
    for k in np.flatnonzero(unused).tolist():
        left = counts - _count_cells(cells[which == k])
        kept[k] = not ((counts >= least) & (left > 0) & (left < least)).any()
        counts = left if kept[k] else counts
    return kept


def _count_cells(cells: Ints) -> Ints:
    """Count the rows of each level by column, (m, q) -> (q, CODES)."""
    return np.array([np.bincount(cell[cell >= 0], minlength=CODES) for cell in cells.T])


def enlarge_patterns(patterns: Bools, counts: Ints) -> tuple[Bools, Bools]:
    """Return patterns of missing columns, (P, q), without those of few rows; and which are in no analysis.

    A pattern of few rows becomes the smallest one of many rows that lacks at least the same columns. If there
    is none, its rows are in no analysis. This ends where too many rows would be concerned.
    """
    larger, unused = patterns.copy(), np.zeros(len(patterns), dtype=bool)
    many, left = counts > FEW_INCOMPLETE, MOST_INCOMPLETE * counts.sum()
    for k in np.argsort(counts, kind="stable").tolist():
        if many[k] or counts[k] > left or not patterns[k].any():
            continue
        left -= counts[k]
        several = np.flatnonzero(many & (patterns >= patterns[k]).all(axis=1))
        unused[k] = not len(several)
        if len(several):
            larger[k] = patterns[several[patterns[several].sum(axis=1).argmin()]]
    return larger, unused


def leave_out_rows(data: SiteData, used: Bools, columns: Collection[str] | None = None) -> Bools:
    """Return the complete rows, (n_rows,), without those that would differ by few from other analyses.

    With `columns` that the analysis reads, without the rows that are treated as lacking one of them.
    """
    usable = None if columns is None else usable_rows(data, columns)
    if usable is not None and (used & ~usable).any():
        used = used & usable
    policy, released = data.policy, data.memory.released
    if released is None or not used.any():
        return used
    inside = np.zeros(released.n_rows, dtype=bool)
    inside[: len(used)] = used
    minimum = ClassMinimum(policy.min_count, policy.min_level_count)
    parts = [*_parts(released.sets, inside)]
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
    """Divide the classes of which an analysis has rows; yield those that are divided with a small part."""
    for one in np.unique(sets[inside]).tolist():
        here = sets == one
        part = Part(np.flatnonzero(here & inside), np.flatnonzero(here & ~inside), one == 0)
        sizes = [len(part.inside)] if part.is_new else [len(part.inside), len(part.outside)]
        if 0 < min(sizes) < LARGE_PART:
            yield part


def _persons(released: ReleasedSums, rows: Ints) -> int:
    return len(rows) if released.persons is None else len(np.unique(released.persons[rows]))


def _persons_before(released: ReleasedSums, rows: Ints) -> int:
    """Count the persons of these rows who were in earlier analyses, by other versions of their records."""
    if released.persons is None:
        return 0
    return len(np.intersect1d(released.persons[rows], released.persons[released.sets != 0]))


def _left_out(released: ReleasedSums, codes: Ints, rank: Ints, part: Part, minimum: ClassMinimum) -> Ints:
    """Return the rows of a class that the analysis does without."""
    if _persons(released, part.inside) < minimum.persons:
        return part.inside
    if part.is_new:
        rare = _rare(codes, part.inside, minimum)
        # Corrected records of a rare level: their persons alone would not be in this analysis.
        return rare[:0] if 0 < _persons_before(released, rare) < minimum.persons else rare
    if len(part.inside) <= minimum.most:
        return part.inside  # also what was left out of the same request before
    chosen = _Choice(released, codes, rank, part, minimum).rows()
    # Too few rows remain: the class is left out.
    return part.inside if _persons(released, np.setdiff1d(part.inside, chosen)) < minimum.persons else chosen


def _rare(codes: Ints, rows: Ints, minimum: ClassMinimum) -> Ints:
    """Return those rows of a new class that have a level of few rows in it; none if they are many.

    Cells of two columns count as levels, unless this would leave out as many rows as a class has.
    """
    for levels_of, most in ((_with_pairs, minimum.persons - 1), (np.asarray, minimum.most)):
        kept = _without_rare(levels_of(codes[rows, :MOST_COLUMNS]), rows, minimum)
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


def _distinct(codes: Ints, first: int) -> Ints:
    """Return columns that divide the rows (m, q) differently, and are known for the first rows."""
    found: dict[bytes, Ints] = {}
    for column in codes[:, (codes[:first] >= 0).all(axis=0)].T:
        _, start, level = np.unique(column, return_index=True, return_inverse=True)
        if len(start) > 1:
            in_order = np.argsort(np.argsort(start))[level.ravel()]
            found.setdefault(in_order.astype(np.int8).tobytes(), column)
    return np.column_stack([*found.values()]) if found else np.zeros((len(codes), 0), dtype=np.int64)


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
        self.every = _distinct(codes[np.concatenate([part.outside, self.pool])], len(part.outside))
        codes = self.every[:, :MOST_COLUMNS]
        places, first = _number_cells(_with_pairs(codes))
        # Cells of one column, then those of two; the last place is that of rows without a level.
        self.first, self.last = first[: codes.shape[1] + 1], int(first[-1])
        outside, self.places = np.split(places, [len(part.outside)])
        self.start = [np.bincount(part.ravel(), minlength=self.last + 1) for part in (outside, self.places)]
        self.rng = np.random.default_rng(int(rank[part.inside].sum()))
        self._begin(0)

    def _begin(self, attempt: int) -> None:
        self.taken = np.zeros(len(self.pool), dtype=bool)
        self.apart, self.rest = (np.append(counts[:-1], 0) for counts in self.start)
        self.noise, self.by_level = attempt * NOISE, attempt % 2 == 1

    def rows(self) -> Ints:
        """Return the rows; those with the fewest levels of few rows if the levels need too many."""
        if (alike := self._alike()) is not None:
            return alike
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

    def _alike(self) -> Ints | None:
        """Return rows whose levels of all columns together are equal in enough rows; None if there are none.

        They are rows with the levels of those that the analysis lacks, and rows of other levels.
        """
        least, lacking = self.minimum.level, len(self.part.outside)
        cells, cell = np.unique(self.every, axis=0, return_inverse=True)
        cell = cell.ravel()
        both = np.split(cell, [lacking])
        outside, inside = (np.bincount(part, minlength=len(cells)) for part in both)
        take = np.where(outside > 0, np.maximum(least - outside, 0), 0)

        def complete(take: Ints) -> Ints:
            return np.where((take > 0) & (inside - take < least), inside, take)

        take = complete(take)
        free = np.flatnonzero((outside == 0) & (inside >= least))
        apart = (cells[free][:, None] != cells[np.flatnonzero(outside)]).sum(axis=(1, 2))
        first = np.array([np.flatnonzero(cell[lacking:] == one)[0] for one in free], dtype=np.int64)
        for one in free[np.lexsort((first, -apart))].tolist():
            take[one] = least
            take = complete(take)
            chosen = self.pool[_first_of_each(cell[lacking:], take)]
            if _persons(self.released, np.concatenate([self.part.outside, chosen])) >= self.minimum.persons:
                break
        else:
            return None
        enough = (outside == 0) | (outside + take >= least)
        return chosen if enough.all() and len(chosen) <= self.minimum.most else None

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
        cells = self.places[place]
        cells = cells[cells < self.last]
        self.apart[cells] += 1
        self.rest[cells] -= 1

    def _lacking(self) -> float:
        """Return how many rows are lacking by level, and by cell of two columns, which count less."""
        moves = _moves(self.apart, self.rest, self.minimum.level)
        levels, pairs = np.split(moves, self.first[-1:])
        return float(levels.sum()) * CODES + float(pairs.sum())

    def _scores(self) -> Floats:
        """Return by how many moves each row of the pool brings the parts closer to enough rows by level.

        In every other attempt, only rows of the level that lacks the fewest rows are candidates: all levels
        together may ask for rows that help none of them to have enough.
        """
        least, nearest, place = self.minimum.level, np.inf, self.last
        moves = _moves(self.apart, self.rest, least)
        gain = moves - _moves(self.apart + 1, np.maximum(self.rest - 1, 0), least)
        gains = gain[self.places]
        scores: Floats = gains.sum(axis=1)
        helps = (gains > 0.0).any(axis=1)
        for first, end in pairwise(self.first.tolist() if self.by_level else ()):
            open_ = first + np.flatnonzero(moves[first:end])
            if len(open_) and moves[open_].min() + (draw := self.rng.random()) < nearest:
                place = open_[moves[open_].argmin()]
                nearest = moves[place] + draw
        scores += self.rng.uniform(0.0, self.noise, len(scores)) if self.noise else 0.0
        candidates = (self.places == place).any(axis=1) & ~self.taken
        if np.isfinite(nearest) and candidates.any():
            helps = candidates
        scores[self.taken | (~helps & helps.any())] = -np.inf
        return scores

    def _mix(self) -> bool:
        """Take a row of other levels, if all rows that are left out have one level of a column."""
        columns = list(pairwise(self.first.tolist()))
        constant = [j for j, cells in enumerate(columns) if (self.apart[slice(*cells)] > 0).sum() == 1]
        if not constant:
            return False
        own = [columns[j][0] + int(self.apart[slice(*columns[j])].argmax()) for j in constant]
        other = (self.places[:, constant] != own) & (self.places[:, constant] < self.last)
        free = np.flatnonzero(~self.taken)
        _, which, counts = np.unique(
            self.places[free][:, : len(columns)], axis=0, return_inverse=True, return_counts=True
        )
        gain = np.zeros(len(self.pool))
        # Of equally many other levels, a row that has equal ones.
        equals = np.minimum(counts[which.ravel()], 2 * self.minimum.level)
        gain[free] = other[free].sum(axis=1) * np.where(equals >= 2 * self.minimum.level, 2.0, 1.0)
        if not gain.max(initial=0.0):
            return False
        self._take(int(gain.argmax()))
        return True


def _first_of_each(cell: Ints, take: Ints) -> Bools:
    """Return the first rows of each cell, as many as `take` says: (m,)."""
    order = np.argsort(cell, kind="stable")
    start = np.cumsum(np.bincount(cell, minlength=len(take))) - np.bincount(cell, minlength=len(take))
    place = np.empty(len(cell), dtype=np.int64)
    place[order] = np.arange(len(cell)) - start[cell[order]]
    return np.asarray(place < take[cell])


def _moves(apart: Ints, rest: Ints, least: int) -> Floats:
    """Return how many rows of each level must move until both parts have none or enough; 0 for never."""
    lacking = np.maximum(least - apart, 0)
    # As many as are lacking, if enough are left; else all of the rest.
    moves = np.where(lacking <= rest - least, lacking, np.where(rest >= lacking, rest, 0))
    return np.where(apart == 0, 0, moves).astype(float)


def _number_cells(cells: Ints) -> tuple[Ints, Ints]:
    """Return places of the cells that occur in columns of levels, (m, q), and the first of each column.

    The last of these (q + 1,) is the place of rows without a level.
    """
    first = CODES * np.arange(cells.shape[1] + 1)
    keys = np.where(cells < 0, first[-1], cells + first[:-1])
    found = np.unique(keys[cells >= 0])
    return np.searchsorted(found, keys), np.searchsorted(found, first)


def _codes(data: SiteData, released: ReleasedSums) -> Ints:
    """Return the levels of columns with few values, (n, q), -1 for none: of the table and the history.

    Rows that are gone have the values under which they were summed.
    """
    own = own_levels(data)
    gone = released.n_rows > len(own)
    patterns = released.spaces.patterns[: MOST_PATTERNS * gone]
    summed = [one.codes.astype(np.int64) for one in patterns]
    codes = np.full((released.n_rows, own.shape[1] + len(summed)), -1, dtype=np.int64)
    codes[: len(own), : own.shape[1]] = own
    for j, one in enumerate(summed, own.shape[1]):
        few = one.max(initial=0) < FEW_LEVELS
        codes[:, j] = one if few else -1
    return codes


def own_levels(data: SiteData) -> Ints:
    """Return the levels of the table's columns of few values, as :func:`_levels_of`, kept in memory."""
    return keep_result(data.table, "columns of few values", lambda: _levels_of(data))


def _levels_of(data: SiteData) -> Ints:
    """Return the levels of the table's own columns with few values, (n_rows, q), -1 for missing cells."""
    found: list[Ints] = []
    read = [*data.table.chunks(data.table.columns)] if in_memory(data.table) else []
    for name in data.table.columns:
        known = data.published.get(name)
        if known is not None and known.kind == "number" and not known.levels:
            continue
        parts = [chunk[name] for chunk in read or data.table.chunks([name])]
        series = parts[0] if read else pd.concat(parts or [pd.Series(dtype=object)], ignore_index=True)
        try:
            code, levels = pd.factorize(series)
        except (TypeError, NotImplementedError):  # a column of arrays
            continue
        if 1 < len(levels) <= FEW_LEVELS and len(found) < MOST_PATTERNS:
            found.append(code.astype(np.int64))
    return np.column_stack(found) if found else np.zeros((data.table.n_rows, 0), dtype=np.int64)


def _rank(used: Bools, codes: Ints) -> Ints:
    """Return an order of the rows that follows from all columns of few values, the same for the same rows."""
    digest = hashlib.blake2b(np.packbits(used).tobytes() + codes.tobytes(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "big"))
    return rng.permutation(len(codes))
