"""Margins: binning of values, and estimation from noisy counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from scipy.special import ndtr, ndtri

from fedstat.errors import MessageError
from fedstat.federation.tables.columns import LevelValue, read_codes, read_numbers
from fedstat.federation.tables.published import PublishedColumn, Scale
from fedstat.kernels.copula import (
    count_tree,
    cumulate,
    expand_steps,
    fit_tree,
    interpolate_inverse,
    project_simplex,
    taper_tails,
)
from fedstat.models.copula.bounds import MOST_LEVELS
from fedstat.typing import Array, Floats, Ints

LEAST_DEPTH, MOST_DEPTH = 5, 10
"""Levels of the binary tree of a range."""
TAIL = 0.1
"""Share of a range's distribution at either end in which probabilities decrease towards the end."""


def tree_depth(n: int, rho: float) -> int:
    """Depth of the tree of a range: as fine as n entities and a column's budget rho can resolve bins."""
    return int(np.clip(round(math.log2(max(n * math.sqrt(rho), 1.0))), LEAST_DEPTH, MOST_DEPTH))


@dataclass(frozen=True, slots=True)
class Bins:
    """Bins of one column: its `levels`, or 2^depth bins of its `range`, equally wide on its `scale`."""

    name: str
    levels: tuple[LevelValue, ...] = ()
    range: tuple[float, float] = (0.0, 1.0)
    scale: Scale = "linear"
    around: float = 1.0
    depth: int = 0

    def check(self) -> None:
        """Require levels that differ, or a range that ascends on its scale, and a valid depth."""
        if self.levels:
            PublishedColumn("number", levels=self.levels).check()
            fits = len(self.levels) <= MOST_LEVELS
        else:
            PublishedColumn("number", self.range, scale=self.scale, around=self.around).check()
            fits = LEAST_DEPTH <= self.depth <= MOST_DEPTH and all(map(math.isfinite, self.range))
        if not fits:
            raise MessageError("bins: too many levels, or an invalid depth")

    @classmethod
    def of(cls, name: str, column: PublishedColumn, depth: int) -> Bins:
        """Choose the bins of a column from its public description alone."""
        if column.levels and (len(column.levels) <= MOST_LEVELS or column.range is None):
            return cls(name, column.levels)
        assert column.range is not None
        return cls(name, (), column.range, column.scale, column.around, depth)

    @property
    def count(self) -> int:
        """Number of bins."""
        return len(self.levels) or 2**self.depth

    @property
    def released(self) -> int:
        """Number of released counts: those of the bins, or of all nodes of a tree below its root."""
        return len(self.levels) or 2 ** (self.depth + 1) - 2

    @property
    def squared_sensitivity(self) -> int:
        """Largest squared change of the counts when one entity is replaced: two counts, on every level."""
        return 2 if self.levels else 2 * self.depth

    @property
    def edges(self) -> Floats:
        """Values at the edges of the bins of a range: (count + 1,)."""
        low, high = self._scaled(np.array(self.range))
        return self._unscaled(np.linspace(low, high, self.count + 1))

    def code(self, values: pd.Series) -> Ints:
        """Return the bin of every value, -1 for none; values outside a range are at its end.

        Missing values, and values that are not numbers or listed levels, are in no bin. An error would reveal
        them, and no budget pays for that.
        """
        if self.levels:
            return read_codes(values, self.levels)
        numbers = read_numbers(values)
        codes, known = np.full(len(numbers), -1, np.int64), ~np.isnan(numbers)
        low, high = self._scaled(np.array(self.range))
        place_of = (self._scaled(np.clip(numbers[known], *self.range)) - low) * (self.count / (high - low))
        codes[known] = np.clip(place_of.astype(np.int64), 0, self.count - 1)
        return codes

    def tally(self, codes: Ints) -> Ints:
        """Count codes for release, (released,); missing codes are in no bin."""
        counts = np.bincount(codes + 1, minlength=self.count + 1)[1:].astype(np.int64)
        return counts if self.levels else count_tree(counts)

    def values(self, codes: Ints) -> Array:
        """Return the levels of codes."""
        known = np.array(self.levels, dtype=object)
        if all(isinstance(level, int) and not isinstance(level, bool) for level in self.levels):
            known = known.astype(np.int64)
        elif all(isinstance(level, int | float) and not isinstance(level, bool) for level in self.levels):
            known = known.astype(np.float64)
        return known[codes]

    def _scaled(self, x: Floats) -> Floats:
        if self.scale == "log":
            return np.log(x)
        return np.arcsinh(x / self.around) if self.scale == "asinh" else x

    def _unscaled(self, t: Floats) -> Floats:
        if self.scale == "log":
            return np.exp(t)
        return np.sinh(t) * self.around if self.scale == "asinh" else t


@dataclass(frozen=True)
class Margin:
    """A released margin: bins and their probabilities (k,), positive in some and summing to 1."""

    bins: Bins
    probabilities: Floats

    @classmethod
    def of_counts(cls, bins: Bins, counts: Floats, n: int) -> Margin:
        """Estimate probabilities from noisy counts (released,) of n entities."""
        n = max(n, 1)
        if bins.levels:
            return cls(bins, project_simplex(counts, float(n)) / n)
        return cls(bins, taper_tails(np.diff(cumulate(fit_tree(counts, float(n)), float(n))), TAIL))

    @cached_property
    def cumulated(self) -> Floats:
        """Distribution function at the edges: (k + 1,) from 0 to 1."""
        out: Floats = np.clip(np.concatenate([[0.0], np.cumsum(self.probabilities)]), 0.0, 1.0)
        out[-1] = 1.0
        return out

    @cached_property
    def thresholds(self) -> Floats:
        """Latent normals at the edges: (k + 1,), infinite at the ends."""
        return np.asarray(ndtri(self.cumulated), dtype=np.float64)

    @cached_property
    def scores(self) -> Floats:
        """Rank scores of the bins, of mean 0 and at most sqrt(3): (k,)."""
        scores: Floats = math.sqrt(3.0) * (self.cumulated[:-1] + self.cumulated[1:] - 1.0)
        return scores

    @cached_property
    def coefficients(self) -> Floats:
        """Hermite coefficients of the scores."""
        return expand_steps(self.thresholds, self.scores)

    @cached_property
    def variance(self) -> float:
        """Mean square of the scores: 1 for a continuous column, less with ties."""
        return float(self.probabilities @ self.scores**2)

    def quantile(self, z: Floats) -> Array:
        """Return values at latent normals: levels, or numbers spread evenly within their bins."""
        if self.bins.levels:
            at = np.searchsorted(self.thresholds[1:-1], z, side="right")
            return self.bins.values(np.asarray(at, dtype=np.int64))
        from_zero = np.asarray(ndtr(z))
        # The edges of an empty bin have equal probability: the smallest increase separates them.
        rising = self.cumulated + 1e-12 * np.arange(len(self.cumulated))
        return interpolate_inverse(from_zero, rising, self.bins.edges)


def tables_of(margins: Sequence[Margin]) -> tuple[Floats, Floats, Ints]:
    """Return thresholds (p, k + 1), scores (p, k) and numbers of bins (p,) of margins, padded."""
    bins = np.array([margin.bins.count for margin in margins], dtype=np.int64)
    thresholds, scores = np.full((len(bins), bins.max() + 1), np.inf), np.zeros((len(bins), bins.max()))
    for j, margin in enumerate(margins):
        thresholds[j, : bins[j] + 1], scores[j, : bins[j]] = margin.thresholds, margin.scores
    return thresholds, scores, bins
