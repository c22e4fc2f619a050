"""Ordinal, binary and nominal columns on factors that they share, integrated out on nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.linalg import block_diag

from fedstat.errors import ModelError
from fedstat.kernels.mixtures.group_prox import shrink_rows
from fedstat.kernels.mixtures.nodes import (
    ExpectedCounts,
    expected_counts,
    node_densities,
    node_means,
    normal_nodes,
)
from fedstat.models.m2sem.modality.base import BEGINNING, Modality
from fedstat.models.m2sem.modality.levels import (
    HALVINGS,
    RIDGE,
    ROUNDING,
    LevelColumns,
    NominalColumns,
    OrdinalColumns,
)
from fedstat.typing import Floats, Ints

SEARCH, FINAL = 7, 15
"""Nodes of each factor while models are compared, and of the last fit."""
KINDS: dict[str, type[LevelColumns]] = {
    "ordinal": OrdinalColumns,
    "binary": OrdinalColumns,
    "nominal": NominalColumns,
}
LOGISTIC_BY_NORMAL = 1.6
"""Standard deviation of a logistic variable that is most like a normal one."""


class CategoricalModality(Modality):
    """Levels (n, P) of ordinal, binary and nominal columns, -1 where a cell is missing.

    `kinds` (P,) are keys of ``KINDS``. Levels at which the client has no row have probability zero, which is
    their maximum likelihood. `nodes` are those of each factor, and may be set at any time.
    """

    kind = "categorical"

    def __init__(
        self,
        codes: Ints,
        names: Sequence[str],
        factors: int,
        kinds: Sequence[str],
        levels: Sequence[int],
        nodes: int = SEARCH,
    ) -> None:
        super().__init__(names, len(codes), factors, None)
        self.levels = tuple(levels)
        self._seen = [np.unique(column[column >= 0]) for column in codes.T]
        constant = [name for name, seen in zip(names, self._seen, strict=True) if len(seen) < 2]
        if constant:
            raise ModelError(f"expected columns that vary; received {', '.join(constant)}: leave them out")
        self.codes = np.full(codes.shape, -1, dtype=np.int64)
        for p, seen in enumerate(self._seen):
            self.codes[:, p] = np.where(codes[:, p] >= 0, np.searchsorted(seen, codes[:, p]), -1)
        of = [(KINDS[kind], len(seen)) for kind, seen in zip(kinds, self._seen, strict=True)]
        self._blocks: list[LevelColumns] = []
        for block, C in sorted(set(of), key=lambda one: (one[0].__name__, one[1])):
            columns = np.array(
                [p for p in range(self.P) if (KINDS[kinds[p]], len(self._seen[p])) == (block, C)]
            )
            counts = (self.codes[:, columns, None] == np.arange(C)).sum(axis=0)
            self._blocks.append(block(columns, counts / counts.sum(axis=1, keepdims=True), factors))
        self._most = max(block.C for block in self._blocks)
        self.nodes = nodes

    @property
    def nodes(self) -> int:
        """Nodes for each factor."""
        return self._per_factor

    @nodes.setter
    def nodes(self, T: int) -> None:
        self._per_factor = T
        self._grid = normal_nodes(T, self.Q)
        self._last: tuple[Floats, Floats] | None = None

    @property
    def loadings(self) -> Floats:
        """Loadings (R, Q), columns by kind and number of levels; see :attr:`row_columns`."""
        return np.concatenate([block.loadings.reshape(-1, self.Q) for block in self._blocks])

    @property
    def row_columns(self) -> Ints:
        """A column has a row, or of nominal ones a row for each level at hand but the first."""
        return np.concatenate([np.repeat(block.columns, block.rows) for block in self._blocks])

    def begin(self, clusters: int) -> None:
        """Start from principal components of levels' numbers, and a factor analysis of one cluster."""
        scores = [self._standardised(block) for block in self._blocks]
        d, E = np.linalg.eigh(np.concatenate(scores, axis=1).T @ np.concatenate(scores, axis=1) / self.n)
        rest = d[: -self.Q].mean() if len(d) > self.Q else 0.0
        L = LOGISTIC_BY_NORMAL * E[:, -self.Q :] * np.sqrt(np.maximum(d[-self.Q :] - rest, 0.05))
        ends = np.cumsum([score.shape[1] for score in scores])[:-1]
        for block, own in zip(self._blocks, np.split(L, ends), strict=True):
            block.load(own)
        self.means = np.zeros((1, self.Q))
        everyone = np.ones((self.n, 1))
        for _ in range(BEGINNING):
            counts, _ = self._expect(everyone, np.zeros(self.P), 0.0)
            self._improve_columns(counts, self._eta(), np.zeros(self.P))
        self.means = np.zeros((clusters, self.Q))

    def _standardised(self, block: LevelColumns) -> Floats:
        cells = np.repeat(self.codes[:, block.columns] >= 0, block.rows, axis=1)
        scores = np.where(cells, block.scores(self.codes[:, block.columns]), np.nan)
        return np.where(cells, (scores - np.nanmean(scores, axis=0)) / np.nanstd(scores, axis=0), 0.0)

    def _eta(self) -> Floats:
        """Nodes of all clusters, (K t, Q)."""
        return (self.means[:, None] + self._grid.z).reshape(-1, self.Q)

    def _table(self, eta: Floats) -> Floats:
        out = np.zeros((self.P, self._most, len(eta)))
        for block in self._blocks:
            out[block.columns, : block.C] = block.table(eta)
        return out

    def log_densities(self) -> Floats:
        """Return log f(x_i | k), (n, K)."""
        state = self.state()
        if self._last is None or not np.array_equal(self._last[0], state):
            table = self._table(self._eta())
            self._last = state, node_densities(self.codes, table, self._grid.log_weights, self.clusters)
        return self._last[1]

    def factors_by_cluster(self) -> Floats:
        """Return E[eta | x_i, k], (n, K, Q)."""
        eta = self._eta()
        return node_means(self.codes, self._table(eta), self._grid.log_weights, eta, self.clusters)

    def improve(
        self, r: Floats, row_penalties: Floats | float = 0.0, means_penalty: float = 0.0, steps: int = 1
    ) -> None:
        """Take M-steps for posteriors r (n, K), factors integrated out anew before each.

        The maximum over means of normal factors is one step to where the rows are; on nodes that move with
        the means it may lower the sum, and is then taken back for a step of Newton on these nodes.
        """
        penalties = np.broadcast_to(np.asarray(row_penalties, dtype=float), (self.P,))
        counts, value = self._expect(r, penalties, means_penalty)
        for _ in range(steps):
            eta, means, old = self._eta(), self.means, value
            N, m = self._improve_columns(counts, eta, penalties)
            columns = self.state()
            self._improve_means(N, m, means_penalty)
            counts_there, value = self._expect(r, penalties, means_penalty)
            if value < old - ROUNDING * (1.0 + abs(old)):
                self.restore(columns)
                self.means = self._step_of_means(counts.levels, means, means_penalty)
                self._recentre()
                counts_there, value = self._expect(r, penalties, means_penalty)
            counts = counts_there

    def _expect(self, r: Floats, penalties: Floats, means_penalty: float) -> tuple[ExpectedCounts, float]:
        """Spread rows over nodes; return the objective, too."""
        counts = expected_counts(self.codes, r, self._table(self._eta()), self._grid.log_weights)
        self._last = self.state(), counts.f
        return counts, float((r * counts.f).sum()) - self.penalty(penalties, means_penalty)

    def _improve_columns(
        self, counts: ExpectedCounts, eta: Floats, penalties: Floats
    ) -> tuple[Floats, Floats]:
        """Improve what belongs to columns; return clusters' weights (K,) and mean factors (K, Q)."""
        for block in self._blocks:
            at = block.columns
            block.improve(eta, counts.levels[at, : block.C], penalties[at], self.support[at])
        N = counts.nodes.sum(axis=1)
        m = np.einsum("kt,ktq->kq", counts.nodes, eta.reshape(len(N), -1, self.Q))
        return N, m / np.maximum(N, 1e-300)[:, None]

    def _step_of_means(self, levels: Floats, means: Floats, penalty: float) -> Floats:
        """Take a proximal step of Newton for means (K, Q): counts (P, C, G) are at nodes that move."""
        if self.silent:
            return np.zeros_like(means)
        K, Q = means.shape
        parts = [b.slopes(self._eta(), levels[b.columns, : b.C]) for b in self._blocks]
        score = np.sum([part[0] for part in parts], axis=0).reshape(K, -1, Q).sum(axis=1)
        info = np.sum([part[1] for part in parts], axis=0).reshape(K, -1, Q, Q).sum(axis=1)
        S = block_diag(*info) + RIDGE * (1.0 + np.trace(info.sum(axis=0))) * np.eye(K * Q)
        new = shrink_rows(S[None], (S @ means.ravel() + score.ravel())[None], np.array([penalty]))

        def value(at: Floats) -> float:
            table = self._table((at[:, None] + self._grid.z).reshape(-1, Q))
            return float((levels * table).sum() - penalty * np.linalg.norm(at))

        step, old = new.reshape(K, Q) - means, value(means)
        for _ in range(HALVINGS):
            if value(means + step) >= old:
                return means + step
            step = step / 2.0
        return means

    def _shift(self, c: Floats) -> None:
        for block in self._blocks:
            block.shift(c)

    def _information(self) -> Floats:
        return np.asarray(sum(block.information() for block in self._blocks))

    def _free_intercepts(self) -> int:
        return sum(len(block.columns) * block.intercepts for block in self._blocks)

    def state(self) -> Floats:
        """Return intercepts and loadings of every column, by kind and number of levels, then the means."""
        return np.concatenate([*(block.theta.ravel() for block in self._blocks), self.means.ravel()])

    def restore(self, state: Floats) -> None:
        """Take parameters back."""
        start = 0
        for block in self._blocks:
            block.theta = state[start : start + block.theta.size].reshape(block.theta.shape).copy()
            start += block.theta.size
        self.means = state[start:].reshape(-1, self.Q).copy()

    def profile(self) -> Floats:
        """Return probabilities of levels by cluster, (K, P, C), nan beyond those that a column has."""
        shape = (self.P, self._most, self.clusters, len(self._grid.z))
        inner = np.exp(self._table(self._eta())).reshape(shape) @ np.exp(self._grid.log_weights)
        out = np.full((self.clusters, self.P, max(self.levels)), np.nan)
        for p, (seen, C) in enumerate(zip(self._seen, self.levels, strict=True)):
            out[:, p, :C] = 0.0
            out[:, p, seen] = inner[p, : len(seen)].T
        return out
