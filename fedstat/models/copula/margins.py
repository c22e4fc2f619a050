"""Margins: binning of values, and estimation from noisy counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
from scipy.special import ndtr, ndtri

from fedstat.errors import MessageError
from fedstat.federation.tables.columns import LevelValue, read_codes, read_days, read_numbers
from fedstat.federation.tables.published import Form, PublishedColumn, Scale
from fedstat.kernels import copula
from fedstat.models.copula.bounds import MOST_LEVELS
from fedstat.typing import Array, Floats, Ints

LEAST_DEPTH, MOST_DEPTH = 5, 10
"""Levels of the binary tree of a range."""
TAIL = 0.1
"""Share of a range's distribution at either end in which probabilities decrease towards the end."""
CLEAR = 3.0
"""Deviations of noise above which a count of a single value, or a rise in a tail, is not noise."""
MISSING, INVALID = -1, -2
"""Codes of a missing cell, and of a value that is neither a number nor a listed level."""


def tree_depth(n: int, rho: float) -> int:
    """Depth of the tree of a range: as fine as n entities and a column's budget rho can resolve bins."""
    return int(np.clip(round(math.log2(max(n * math.sqrt(rho), 1.0))), LEAST_DEPTH, MOST_DEPTH))


@dataclass(frozen=True, slots=True)
class Bins:
    """Bins of one column: its `levels`, or 2^depth bins of its `range`, equally wide on its `scale`.

    A `nominal` column has no order of levels. Numbers of the `form` "whole" or "date" (days since 1970) have
    bins of whole numbers. With `atoms`, missing cells are counted, and for a range also the values below it,
    above it, and exactly at zero if it contains zero: each of these is a bin without width.
    """

    name: str
    levels: tuple[LevelValue, ...] = ()
    range: tuple[float, float] = (0.0, 1.0)
    scale: Scale = "linear"
    around: float = 1.0
    depth: int = 0
    form: Form = "real"
    nominal: bool = False
    atoms: bool = False

    def check(self) -> None:
        """Require levels that differ, or a range that ascends on its scale, and a valid depth."""
        if self.levels:
            PublishedColumn("number", levels=self.levels).check()
            fits = len(self.levels) <= MOST_LEVELS and (not self.nominal or len(self.levels) > 2)
        else:
            PublishedColumn(
                "number", self.range, scale=self.scale, around=self.around, form=self.form
            ).check()
            fits = LEAST_DEPTH <= self.depth <= MOST_DEPTH and all(map(math.isfinite, self.range))
            fits = fits and not self.nominal
        if not fits:
            raise MessageError("bins: too many levels, or an invalid depth")

    @classmethod
    def of(cls, name: str, column: PublishedColumn, depth: int, atoms: bool = False) -> Bins:
        """Choose the bins of a column from its public description alone."""
        if column.levels and (len(column.levels) <= MOST_LEVELS or column.range is None):
            return cls(name, column.levels, nominal=column.nominal, atoms=atoms)
        assert column.range is not None
        if column.form != "real":
            depth = min(depth, max(_bits(column.range), LEAST_DEPTH))
        return cls(name, (), column.range, column.scale, column.around, depth, column.form, atoms=atoms)

    # ---- bins of a range -----------------------------------------------------------------------------

    @property
    def leaves(self) -> int:
        """Number of bins of the range itself."""
        return 1 << self.depth

    @property
    def step(self) -> int:
        """Whole numbers in each bin of a range of whole numbers."""
        return 1 << max(_bits(self.range) - self.depth, 0)

    @property
    def _before_zero(self) -> int | None:
        """Number of bins of the range below zero; None if zero is no bin of its own."""
        low, high = self._scaled(np.array(self.range)) if self.form == "real" else self.range
        if not self.atoms or self.form == "date" or self.scale == "log" or not low <= 0.0 <= high:
            return None
        if self.form == "whole":
            place, rest = divmod(-low, self.step)
            return None if rest else int(place)
        if low in (0.0, -0.0):
            return 0
        return (
            self.leaves
            if high == 0.0
            else int(np.clip(round(self.leaves * -low / (high - low)), 1, self.leaves - 1))
        )

    @property
    def leaf_edges(self) -> Floats:
        """Values at the edges of the bins of the range itself, (leaves + 1,); zero is one of them."""
        if self.form != "real":
            return self.range[0] - 0.5 + self.step * np.arange(self.leaves + 1.0)
        (low, high), k = self._scaled(np.array(self.range)), self._before_zero
        if k is None or k in (0, self.leaves):
            return self._unscaled(np.linspace(low, high, self.leaves + 1))
        parts = np.linspace(low, 0.0, k + 1), np.linspace(0.0, high, self.leaves - k + 1)[1:]
        return self._unscaled(np.concatenate(parts))

    @property
    def leaf_codes(self) -> Ints:
        """Codes of the bins of the range itself: (leaves,)."""
        leaf, k = np.arange(self.leaves), self._before_zero
        if not self.atoms:
            return leaf
        return 1 + leaf + (0 if k is None else (leaf >= k).astype(np.int64))

    @property
    def atom_codes(self) -> Ints:
        """Codes of the bins without width, ascending: below the range, zero, above the range."""
        if self.levels or not self.atoms:
            return np.zeros(0, dtype=np.int64)
        return np.setdiff1d(np.arange(self.count), self.leaf_codes)

    @property
    def inside(self) -> tuple[int, int]:
        """Codes of the first and the last level, or bin of the range itself."""
        return (0, self.count - 1) if self.levels else (int(self.leaf_codes[0]), int(self.leaf_codes[-1]))

    @property
    def count(self) -> int:
        """Number of bins."""
        if self.levels:
            return len(self.levels)
        return self.leaves + ((2 + (self._before_zero is not None)) if self.atoms else 0)

    @property
    def released(self) -> int:
        """Number of released counts: levels, or nodes of a tree below its root and atoms; missing cells."""
        if self.levels:
            return len(self.levels) + self.atoms
        return 2 * self.leaves - 2 + ((self.count - self.leaves + 1) if self.atoms else 0)

    @property
    def squared_sensitivity(self) -> int:
        """Largest squared change of the counts when one entity is replaced: two counts, on every level.

        An entity in an atom, or with a missing cell, changes one count instead of one on every level.
        """
        return 2 if self.levels else 2 * self.depth

    @property
    def squared_alone(self) -> int:
        """Largest squared change of the counts by a row, or one without a value in its place.

        A value is counted on every level, a missing cell once.
        """
        return (1 if self.levels else self.depth) + self.atoms

    @property
    def edges(self) -> Floats:
        """Values at the edges of the bins of a range: (count + 1,); an atom's edges are equal."""
        edges, k = self.leaf_edges, self._before_zero
        if not self.atoms:
            return edges
        inner = edges if k is None else np.insert(edges, k, edges[k])
        return np.concatenate([inner[:1], inner, inner[-1:]])

    @property
    def middles(self) -> Floats:
        """Representative number of every bin: the level, or the middle."""
        if self.levels:
            return np.array(self.levels, dtype=np.float64)
        edges = self.edges
        return self.as_formed(0.5 * (edges[:-1] + edges[1:]))

    # ---- codes and values ----------------------------------------------------------------------------

    def code(self, values: pd.Series) -> Ints:
        """Return the bin of every value, -1 for none; values outside a range are at its end.

        Missing values, and values that are not numbers or listed levels, are in no bin. An error would reveal
        them, and no budget pays for that.
        """
        if self.levels:
            return read_codes(values, self.levels)
        numbers = self.numbers(values)
        codes, known = np.full(len(numbers), MISSING, np.int64), ~np.isnan(numbers)
        codes[known] = self.code_numbers(numbers[known])
        return codes

    def numbers(self, values: pd.Series) -> Floats:
        """Return numbers of a column with a range, days since 1970 for dates, NaN for none."""
        return read_days(values) if self.form == "date" else read_numbers(values)

    def code_numbers(self, x: Floats) -> Ints:
        """Return the bins of numbers (n,), of which none is missing, in a range."""
        (low, high), k = self.range, self._before_zero
        if self.form != "real":
            x = np.floor(np.clip(x, low - 1.0, high + 1.0) + 0.5)
            place = (np.clip(x, low, high) - low) / self.step
        else:
            t, (a, b) = self._scaled(np.clip(x, low, high)), self._scaled(np.array(self.range))
            if k is None or k in (0, self.leaves):
                place = (t - a) * (self.leaves / (b - a))
            else:
                place = np.where(t < 0.0, (t - a) * (k / -a), k + t * ((self.leaves - k) / b))
                place = np.where(t < 0.0, np.minimum(place, k - 1), np.maximum(place, k))
        leaf = np.clip(place.astype(np.int64), 0, self.leaves - 1)
        if not self.atoms:
            return leaf
        codes = self.leaf_codes[leaf]
        if k is not None:
            codes[x == 0.0] = k + 1
        codes[x < low], codes[x > high] = 0, self.count - 1
        return codes

    def tally(self, codes: Ints) -> Ints:
        """Count codes for release, (released,): bins, or nodes of a tree and atoms; then missing cells."""
        counts = np.bincount(codes - INVALID, minlength=self.count + 2)[1:].astype(np.int64)
        missing, counts = counts[:1], counts[1:]
        parts = (
            [counts] if self.levels else [copula.count_tree(counts[self.leaf_codes]), counts[self.atom_codes]]
        )
        return np.concatenate([*parts, missing] if self.atoms else parts)

    def values(self, codes: Ints) -> Array:
        """Return the levels of codes."""
        known = np.array(self.levels, dtype=object)
        if all(isinstance(level, bool) for level in self.levels):
            known = known.astype(np.bool_)
        elif all(isinstance(level, int) and not isinstance(level, bool) for level in self.levels):
            known = known.astype(np.int64)
        elif all(isinstance(level, int | float) and not isinstance(level, bool) for level in self.levels):
            known = known.astype(np.float64)
        return known[codes]

    def formed(self, numbers: Floats) -> Array:
        """Return numbers of a range in the form of the column: real, whole, or dates."""
        x = self.as_formed(numbers)
        if self.form == "real":
            return x
        whole = x.astype(np.int64)
        return whole if self.form == "whole" else whole.astype("datetime64[D]").astype("datetime64[ns]")

    def written(self, number: float) -> str:
        """Return a number of a range as text."""
        return f"{number:g}" if self.form != "date" else str(self.formed(np.array([number]))[0])[:10]

    def as_formed(self, numbers: Floats) -> Floats:
        """Round numbers (n,) of a form that has whole numbers only."""
        return numbers if self.form == "real" else np.clip(np.floor(numbers + 0.5), *self.range)

    def _scaled(self, x: Floats) -> Floats:
        if self.scale == "log":
            return np.log(x)
        return np.arcsinh(x / self.around) if self.scale == "asinh" else x

    def _unscaled(self, t: Floats) -> Floats:
        if self.scale == "log":
            return np.exp(t)
        return np.sinh(t) * self.around if self.scale == "asinh" else t


def _bits(bounds: tuple[float, float]) -> int:
    """Return the depth at which every whole number of a range has its own bin."""
    return int(bounds[1] - bounds[0]).bit_length()


@dataclass(frozen=True)
class Margin:
    """A released margin: bins and their probabilities (k,), positive in some and summing to 1.

    They are those of the entities whose cell is observed; `missing` is the share of the others. The latent
    normal of an observed cell at a probability u is Phi^-1(u); over all entities it has the mean `shift` and
    the standard deviation `spread`.
    """

    bins: Bins
    probabilities: Floats
    missing: float = 0.0
    shift: float = 0.0
    spread: float = 1.0

    @classmethod
    def of_counts(cls, bins: Bins, counts: Floats, n: int, deviation: float = 0.0) -> Margin:
        """Estimate probabilities from noisy counts (released,) of n entities, and the noise's deviation.

        A count of missing cells, or of an atom, that noise explains is no missing cell, or belongs to the bin
        next to it.
        """
        n, missing = max(n, 1), 0.0
        if bins.atoms:
            found, counts = float(counts[-1]), counts[:-1]
            missing = min(found, n - 1.0) if found > CLEAR * deviation else 0.0
        total = n - missing
        if bins.levels:
            return cls(bins, copula.project_simplex(counts, total) / total, missing / n)
        nodes, atoms = counts[: 2 * bins.leaves - 2], counts[2 * bins.leaves - 2 :].copy()
        clear = atoms > CLEAR * deviation
        unknown = int(np.count_nonzero(clear)) + (missing > 0.0)
        leaf = copula.fit_tree(nodes, total - atoms.sum(), float(len(atoms) + (missing > 0.0)))
        # A value that noise may have made stays with its neighbors in the range.
        for code, count in zip(bins.atom_codes[~clear], atoms[~clear], strict=True):
            leaf[np.abs(bins.leaf_codes - code).argmin()] += count
        atoms[~clear] = 0.0
        if bins.form != "real":  # beyond the range there is no number
            leaf[math.ceil((bins.range[1] - bins.range[0] + 1.0) / bins.step) :] = 0.0
        if unknown:
            off = (total - atoms.sum() - leaf.sum()) / (unknown + 1)
            atoms[clear] = np.maximum(atoms[clear] + off, 0.0)
        inside = max(total - atoms.sum(), 1e-9 * total)
        p = np.diff(copula.cumulate(leaf, inside)) * (inside / total)
        # The sum of bins between two edges has about the noise of two edges of the distribution function.
        noise = CLEAR * math.sqrt(2.0 * edge_variance(bins.depth)) * deviation
        p = copula.taper_tails(p, TAIL, noise / total)
        probabilities = np.zeros(bins.count)
        probabilities[bins.leaf_codes], probabilities[bins.atom_codes] = p, atoms / total
        return cls(bins, probabilities / probabilities.sum(), missing / n)

    def trimmed(self, share: float) -> Margin:
        """Return the margin of a range with tails of at most this share joined to their neighbors.

        A margin that is moved towards a tail would multiply the noise there.
        """
        if self.bins.levels:
            return self
        p, F = self.probabilities.copy(), self.cumulated
        low = int(np.searchsorted(F, share, side="right")) - 1
        high = int(np.searchsorted(F, 1.0 - share))
        p[low], p[high - 1] = p[low] + p[:low].sum(), p[high - 1] + p[high:].sum()
        p[:low], p[high:] = 0.0, 0.0
        return replace(self, probabilities=p)

    @cached_property
    def cumulated(self) -> Floats:
        """Distribution function at the edges: (k + 1,) from 0 to 1."""
        out: Floats = np.clip(np.concatenate([[0.0], np.cumsum(self.probabilities)]), 0.0, 1.0)
        out[-1] = 1.0
        return out

    @cached_property
    def thresholds(self) -> Floats:
        """Latent normals of all entities at the edges: (k + 1,), infinite at the ends."""
        return (np.asarray(ndtri(self.cumulated), dtype=np.float64) - self.shift) / self.spread

    @cached_property
    def everywhere(self) -> Floats:
        """Probabilities of the bins over all entities, as if no cell were missing: (k,)."""
        if self.shift == 0.0 and self.spread == 1.0:
            return self.probabilities
        return np.diff(np.asarray(ndtr(self.thresholds), dtype=np.float64))

    @cached_property
    def scores(self) -> Floats:
        """Rank scores of the bins, of mean 0 and at most sqrt(3) among observed cells: (k,)."""
        scores: Floats = math.sqrt(3.0) * (self.cumulated[:-1] + self.cumulated[1:] - 1.0)
        return scores

    @cached_property
    def coefficients(self) -> Floats:
        """Hermite coefficients of the scores, of latent normals of all entities."""
        return copula.expand_steps(self.thresholds, self.scores)

    @cached_property
    def variance(self) -> float:
        """Mean square of the scores of observed cells: 1 for a continuous column, less with ties."""
        return float(self.probabilities @ self.scores**2)

    @cached_property
    def mean(self) -> float:
        """Mean score over all entities."""
        return float(self.everywhere @ self.scores)

    def quantile(self, z: Floats) -> Array:
        """Return values at latent normals: levels, or numbers spread evenly within their bins."""
        if self.bins.levels:
            at = np.searchsorted(self.thresholds[1:-1], z, side="right")
            return self.bins.values(np.asarray(at, dtype=np.int64))
        return self.bins.formed(self.numbers_at(z))

    def numbers_at(self, z: Floats) -> Floats:
        """Return numbers of a range at latent normals, spread evenly within their bins."""
        from_zero = np.asarray(ndtr(z * self.spread + self.shift))
        # The edges of an empty bin have equal probability: the smallest increase separates them.
        rising = self.cumulated + 1e-12 * np.arange(len(self.cumulated))
        return copula.interpolate_inverse(from_zero, rising, self.bins.edges)


def edge_variance(depth: int) -> float:
    """Return the variance of a tree's distribution function at the mean edge, in units of that of a count.

    Simulated for 5 to 10 levels, after least squares.
    """
    return 0.15 + 0.09 * depth


def tables_of(margins: Sequence[Margin]) -> tuple[Floats, Floats, Ints]:
    """Return thresholds (p, k + 1), scores (p, k) and numbers of bins (p,) of margins, padded."""
    bins = np.array([margin.bins.count for margin in margins], dtype=np.int64)
    thresholds, scores = np.full((len(bins), bins.max() + 1), np.inf), np.zeros((len(bins), bins.max()))
    for j, margin in enumerate(margins):
        thresholds[j, : bins[j] + 1], scores[j, : bins[j]] = margin.thresholds, margin.scores
    return thresholds, scores, bins
