"""Columns of the design as functions of one column of the data each, and the scores released of them.

A score is what a column adds to the linear predictor, standardised by the released margin and cut. A category
of k levels enters the model by indicators of k - 1 of them, and has for scores whether a code is at least m,
m = 1, ..., k - 1: these span the same space, and ascend with the code as the copula has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from fedstat.errors import MessageError
from fedstat.models.copula.margins import Bins, Margin
from fedstat.typing import Array, Floats, Ints

FUNCTIONS: Mapping[str, Callable[[Floats], Floats]] = {
    "": np.asarray,
    "log": np.log,
    "sqrt": np.sqrt,
    "exp": np.exp,
}
LARGEST_SCORE = 4.0
SQUARED_RADIUS = Fraction(36, 25)
"""Squared length, for each of its columns, to which an institution's part of a row of scores is cut."""


@dataclass(frozen=True, slots=True)
class ScoredColumn:
    """A column of the design: a function of the numbers of a column of the data, or one of its levels.

    `source` is the place of the column of the data. Of a level, `level` is its place, and its score whether a
    code is at least `above`; both are 0 for a function.
    """

    name: str
    term: str
    client: str
    source: int
    function: str = ""
    level: int = 0
    above: int = 0

    def check(self) -> None:
        """Require a function that there is."""
        if self.function not in FUNCTIONS or min(self.source, self.level, self.above) < 0:
            raise MessageError("a column of the design is none that can be scored")

    def at(self, values: Floats) -> Floats:
        """Return what stands in the linear predictor at numbers of the column of the data, or at codes."""
        if self.above:
            return np.asarray(values == self.level, dtype=np.float64)
        return np.asarray(FUNCTIONS[self.function](values), dtype=np.float64)

    def scores(self, margin: Margin) -> Floats:
        """Score of every bin, (k,), ascending: of mean 0 and variance 1 under the margin before the cut."""
        p, k = margin.probabilities, margin.bins.count
        t = (
            self.at(midpoints(margin.bins))
            if not self.above
            else (np.arange(k) >= self.above).astype(np.float64)
        )
        t = t - p @ t
        spread = np.sqrt(p @ t**2)
        scores: Floats = np.clip(t / spread if spread > 0.0 else 0.0 * t, -LARGEST_SCORE, LARGEST_SCORE)
        return scores


def midpoints(bins: Bins) -> Floats:
    """Return the number that stands for every bin: the level, or the middle."""
    if bins.levels:
        return np.array(bins.levels, dtype=np.float64)
    return 0.5 * (bins.edges[:-1] + bins.edges[1:])


@dataclass(frozen=True)
class ScoredDesign:
    """Columns of the data (d,), those of the design (p,), and where each institution's stand.

    Both are in the order of the institutions, and within one the columns of the design in that of the data.
    """

    bins: tuple[Bins, ...]
    columns: tuple[ScoredColumn, ...]
    clients: tuple[str, ...]

    @cached_property
    def sources(self) -> Ints:
        """Column of the data of each column of the design: (p,)."""
        return np.array([column.source for column in self.columns], dtype=np.int64)

    @cached_property
    def blocks(self) -> tuple[slice, ...]:
        """Columns of the design of each institution."""
        owners = [column.client for column in self.columns]
        ends = np.cumsum([owners.count(client) for client in self.clients]).tolist()
        return tuple(slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True))

    @cached_property
    def squared_radii(self) -> tuple[float, ...]:
        """Squared length to which each institution's part of a row of scores is cut."""
        return tuple(float(SQUARED_RADIUS * (block.stop - block.start)) for block in self.blocks)

    def tables(self, margins: Sequence[Margin]) -> list[Floats]:
        """Scores by bin of every column of the design."""
        return [column.scores(margins[column.source]) for column in self.columns]

    def score(self, codes: Ints, tables: Sequence[Floats]) -> Floats:
        """Score rows of codes (n, d) through these tables: (n, p), cut; see :func:`cut_blocks`."""
        rows = np.column_stack([table[codes[:, j]] for table, j in zip(tables, self.sources, strict=True)])
        return cut_blocks(rows, self.blocks, self.squared_radii)

    def values(self, latents: Floats, margins: Sequence[Margin]) -> Floats:
        """Columns of the design at latent normals (n, d): (n, p)."""
        read: dict[int, Array] = {}
        for column in self.columns:
            if column.source not in read:
                read[column.source] = self._numbers(latents[:, column.source], margins[column.source], column)
        return np.column_stack([column.at(read[column.source]) for column in self.columns])

    def _numbers(self, z: Floats, margin: Margin, column: ScoredColumn) -> Floats:
        """Numbers of a column at latent normals; codes where it is a category."""
        if column.above:
            return np.searchsorted(margin.thresholds[1:-1], z, side="right").astype(np.float64)
        return np.asarray(margin.quantile(z), dtype=np.float64)


def cut_blocks(rows: Floats, blocks: Sequence[slice], squared_radii: Sequence[float]) -> Floats:
    """Shorten each institution's part of rows (n, p) to at most the length of which this is the square."""
    out = np.empty_like(rows)
    for block, radius in zip(blocks, squared_radii, strict=True):
        part = rows[:, block]
        squares = np.einsum("ij,ij->i", part, part)
        out[:, block] = part * np.sqrt(np.minimum(1.0, radius / np.maximum(squares, radius)))[:, None]
    return out
