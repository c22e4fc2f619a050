"""Categorical columns on shared factors, integrated by quadrature."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.linalg import block_diag

from fedstat.errors import ModelError
from fedstat.kernels.latent_factors import (
    GroupedLevels,
    expected_counts,
    node_densities,
    node_means,
    node_weights,
)
from fedstat.kernels.penalized.group_prox import RIDGE, shrink_rows
from fedstat.models.m2sem.modality.base import BEGINNING, Modality
from fedstat.models.m2sem.modality.levels import (
    HALVINGS,
    ROUNDING,
    LevelColumns,
    NominalColumns,
    OrdinalColumns,
)
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Scores of categorical columns given a cluster, and their distribution over nodes.
#
# References
# ----------
# Louis, T. A. (1982). Finding the observed information matrix when using the EM algorithm. Journal of the
# Royal Statistical Society B 44, 226-233.


def complete_information(
    blocks: Sequence[LevelColumns], eta: Floats, counts: Floats, shape: tuple[int, ...]
) -> Floats:
    """Return minus second derivatives (p, p) under expected counts; nodes eta move with the means."""
    K, Q = shape
    own, mixed, second = [], [], np.zeros((K, Q, Q))
    for block in blocks:
        some = counts[:, block.columns, : block.C]
        own += list(block.complete_information(eta, some))
        mixed.append(block.mixed_with_means(eta, some, K).reshape(-1, K * Q))
        second += block.in_means(eta, some, K)[1]
    cross = np.concatenate(mixed)
    return np.block([[block_diag(*own), cross], [cross.T, block_diag(*second)]])


@dataclass(frozen=True, slots=True, eq=False)
class CellSlopes:
    """Slopes of log P(x = c | node) of all blocks of columns, in their parameters and in the means."""

    blocks: Sequence[LevelColumns]
    own: Sequence[Floats]
    in_eta: Sequence[Floats]

    @classmethod
    def of(cls, blocks: Sequence[LevelColumns], eta: Floats) -> CellSlopes:
        """Compute them at nodes eta (K t, Q)."""
        pairs = [block.cell_slopes(eta) for block in blocks]
        return cls(blocks, [pair[0] for pair in pairs], [pair[1] for pair in pairs])

    def spread(self, rows: GroupedLevels, weights: Floats, r: Floats) -> tuple[Floats, Floats]:
        """Return mean scores (n, K, p) over nodes of weights (n, K, t), and covariances under r (n, K)."""
        n, K, T = weights.shape
        Q = self.in_eta[0].shape[-1]
        means = sum(block.theta.size for block in self.blocks)
        a, within = np.zeros((n, K, means + K * Q)), np.zeros((means + K * Q, means + K * Q))
        cells = [self._cells(block, rows) for block in self.blocks]
        own, in_eta = ([_by_node(part) for part in parts] for parts in (self.own, self.in_eta))
        s = np.zeros((n, means + K * Q))
        for k in range(K):
            place = slice(means + k * Q, means + (k + 1) * Q)
            for g in range(k * T, (k + 1) * T):
                self._write_scores(rows, cells, [part[g] for part in own], s)
                s[:, place] = sum(
                    part[g].take(at, axis=0).sum(axis=1) for part, at in zip(in_eta, cells, strict=True)
                )
                a[:, k] += weights[:, k, g - k * T, None] * s
                within += _gram(s, r[:, k] * weights[:, k, g - k * T])
            s[:, place] = 0.0
            within -= _gram(a[:, k], r[:, k])
        return a, within

    @staticmethod
    def _cells(block: LevelColumns, rows: GroupedLevels) -> Ints:
        """Return the places of the cells (n, P) of rows in lines; a missing one has the last, of zeros."""
        P, codes = len(block.theta), rows.codes[:, block.columns]
        cells = (rows.group[:, None] * P + np.arange(P)) * block.C + codes
        return np.where(codes >= 0, cells, -1)

    def _write_scores(
        self, rows: GroupedLevels, cells: Sequence[Ints], own: Sequence[Floats], s: Floats
    ) -> None:
        """Write the scores of rows in the blocks' parameters at one node to s (n, p)."""
        start = 0
        for block, at, part in zip(self.blocks, cells, own, strict=True):
            found = part.take(at, axis=0)
            if block.covariates.shape[1]:
                found = np.einsum("npe,ned->npd", found, block.moving()[rows.group])
            s[:, start : start + block.theta.size] = found.reshape(len(s), -1)
            start += block.theta.size


def _gram(X: Floats, w: Floats) -> Floats:
    """Return ``X' diag(w) X``; of one array, so that half of the products are computed."""
    weighted = X * np.sqrt(w)[:, None]
    return np.asarray(weighted.T @ weighted)


def _by_node(slopes: Floats) -> Floats:
    """Turn slopes (J P, C, G, d) into lines of cells by node, (G, J P C + 1, d); the last is zero."""
    G, d = slopes.shape[2:]
    lines = np.moveaxis(slopes, 2, 0).reshape(G, -1, d)
    return np.concatenate([lines, np.zeros((G, 1, d))], axis=1)


# ----------------------------------------------------------------------------------------------------
# Categorical columns, separated by whether they load on factors.
#
# The likelihood of a column without loadings is the same at all nodes: it is one number for each row, and its
# thresholds need no factors. On a path of penalties, and in fits of selected columns, most columns are of
# this kind.

STILL = 1e-10
"""Change of a threshold below which it counts as zero."""


class ColumnSubset:
    """Some columns of a block, at indices `at` (p,) of it, with the parameters that the block has."""

    def __init__(self, block: LevelColumns, at: Ints) -> None:
        self._block, self._at = block, at
        self._some = block
        if len(at) < len(block.columns):
            self._some = copy.copy(block)
            self._some.columns, self._some.shares = block.columns[at], block.shares[at]

    @property
    def columns(self) -> Ints:
        """Indices of the columns in their modality, (p,)."""
        return self._some.columns

    @property
    def levels(self) -> int:
        """Number of levels."""
        return self._block.C

    def now(self) -> LevelColumns:
        """Return the columns at the present parameters."""
        if self._some is not self._block:
            self._some.theta = self._block.theta[self._at]
        return self._some

    def improve(self, eta: Floats, counts: Floats, table: Floats, penalties: Floats, support: Bools) -> None:
        """Take a step with these columns, and store it in the block."""
        some = self.now()
        some.improve(eta, counts, table, penalties[self.columns], support[self.columns])
        if some is not self._block:
            self._block.theta[self._at] = some.theta


class ColumnsWithoutLoadings:
    """Columns (p,) of rows with codes (n, p) that do not depend on factors."""

    def __init__(self, part: ColumnSubset, codes: Ints, group: Ints, groups: int) -> None:
        self.part = part
        p = len(part.columns)
        self._shape = groups, p, part.levels, 1
        # Missing cells have an index of their own, after all others.
        lines = (group[:, None] * p + np.arange(p)) * part.levels + codes
        self._cells = np.where(codes >= 0, lines, groups * p * part.levels)
        self._logs: tuple[Floats, Floats] | None = None
        self._best: tuple[Floats, Floats] | None = None

    def log_densities(self) -> Floats:
        """Return the sum of log P over these columns, (n,)."""
        some = self.part.now()
        if self._logs is None or not np.array_equal(self._logs[0], some.theta):
            logs = np.append(some.table(np.zeros((1, some.Q))).ravel(), 0.0)
            self._logs = some.theta.copy(), logs[self._cells].sum(axis=1)
        return self._logs[1]

    def improve(self, w: Floats, steps: int) -> None:
        """Take Newton steps for rows of weights w (n,), unless the columns are already at their result."""
        some, eta = self.part.now(), np.zeros((1, self.part.now().Q))
        best = self._best
        if best is not None and np.array_equal(best[0], some.theta) and np.array_equal(best[1], w):
            return
        weights = np.repeat(w, self._cells.shape[1])
        counts = np.asarray(
            np.bincount(self._cells.ravel(), weights, int(np.prod(self._shape)) + 1)[:-1], float
        )
        nothing = np.zeros(int(self.part.columns.max()) + 1)
        for _ in range(steps):
            old = self.part.now().theta.copy()
            table = self.part.now().table(eta)
            self.part.improve(eta, counts.reshape(self._shape), table, nothing, nothing > 0.0)
            if np.abs(self.part.now().theta - old).max() < STILL:
                self._best = self.part.now().theta.copy(), w.copy()
                return


class ColumnsByLoading:
    """Columns that load, block after block, with their cells; and those that do not: `loaded` (P,)."""

    def __init__(
        self, blocks: Sequence[LevelColumns], rows: GroupedLevels, groups: int, loaded: Bools
    ) -> None:
        self.loaded, self._groups = loaded, groups
        self.parts: list[ColumnSubset] = []
        self.rest: list[ColumnsWithoutLoadings] = []
        for block in blocks:
            on = loaded[block.columns]
            if on.any():
                self.parts.append(ColumnSubset(block, np.flatnonzero(on)))
            if not on.all():
                part = ColumnSubset(block, np.flatnonzero(~on))
                codes = rows.codes[:, part.columns]
                self.rest.append(ColumnsWithoutLoadings(part, codes, rows.group, groups))
        order = [part.columns for part in self.parts]
        ends = np.cumsum([0, *map(len, order)]).tolist()
        self.cells = [
            np.s_[:, first:last, : part.levels]
            for part, first, last in zip(self.parts, ends[:-1], ends[1:], strict=True)
        ]
        chosen = np.concatenate(order) if order else np.zeros(0, dtype=np.int64)
        self.rows = GroupedLevels(np.ascontiguousarray(rows.codes[:, chosen]), rows.group)
        self._most = max((part.levels for part in self.parts), default=1)

    def table(self, eta: Floats) -> Floats:
        """Return logs of probabilities at nodes eta (G, Q), (J, p, C, G), of the columns that load."""
        out = np.zeros((self._groups, self.rows.codes.shape[1], self._most, len(eta)))
        for part, cells in zip(self.parts, self.cells, strict=True):
            out[cells] = part.now().table(eta)
        return out

    def log_densities_of_rest(self) -> Floats:
        """Return the sum of log P over the columns that do not load, (n,)."""
        return np.asarray(sum((one.log_densities() for one in self.rest), np.zeros(len(self.rows.codes))))


class SpreadRows(NamedTuple):
    """Rows distributed over nodes for given r (n, K): counts at cells and nodes, densities f (n, K).

    `table` has the logs of levels' probabilities; it and the counts are for the columns that load.
    """

    columns: ColumnsByLoading
    state: Floats
    r: Floats
    levels: Floats
    nodes: Floats
    table: Floats
    f: Floats


# ----------------------------------------------------------------------------------------------------
# Ordinal, binary and nominal columns on shared factors, which are integrated out on nodes.

SEARCH = 7
"""Nodes of each factor for the comparison of models."""
KINDS: dict[str, type[LevelColumns]] = {
    "ordinal": OrdinalColumns,
    "binary": OrdinalColumns,
    "nominal": NominalColumns,
}
SETTLED = 1e-8
"""Gain of a step, relative to the objective, below which no others follow."""
MOST_GROUPS = 500
"""Largest number of groups of rows with the same covariates: each has its own counts."""
CHUNK = 4096
"""Rows whose weights of all nodes are held at a time."""
LOGISTIC_BY_NORMAL = 1.6
"""Standard deviation of the logistic variable that is closest to a normal one."""


class CategoricalModality(Modality):
    """Levels (n, P) of ordinal, binary and nominal columns, -1 where a cell is missing.

    `kinds` (P,) are keys of ``KINDS``, `levels` (P,) the number of levels of each column. Levels without a
    row at the site have probability zero, their maximum likelihood estimate; for new rows, `units` are those
    of the fit. `nodes` are those of each factor, and may be set at any time.
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
        covariates: Floats | None = None,
        units: Floats | None = None,
    ) -> None:
        super().__init__(names, len(codes), factors, covariates)
        self.levels = tuple(levels)
        if units is None:
            units = np.concatenate(
                [np.bincount(x[x >= 0], minlength=C) for x, C in zip(codes.T, levels, strict=True)]
            )
        self._counts = np.split(np.asarray(units, dtype=float), np.cumsum(levels)[:-1])
        self._seen = [np.flatnonzero(counts) for counts in self._counts]
        constant = [name for name, seen in zip(names, self._seen, strict=True) if len(seen) < 2]
        if constant:
            raise ModelError(f"expected columns that vary; received {', '.join(constant)}: leave them out")
        self.codes = np.full(codes.shape, -1, dtype=np.int64)
        for p, seen in enumerate(self._seen):
            unknown = ~np.isin(codes[:, p], seen) & (codes[:, p] >= 0)
            if unknown.any():
                raise ModelError(
                    f"{names[p]}: {int(unknown.sum())} row(s) at levels that do not occur in the fit"
                )
            self.codes[:, p] = np.where(codes[:, p] >= 0, np.searchsorted(seen, codes[:, p]), -1)
        distinct, group = np.unique(self.Z[:, 1:], axis=0, return_inverse=True)
        if len(distinct) > MOST_GROUPS:
            raise ModelError(
                f"covariates of categorical columns have {len(distinct)} combinations of values, expected "
                f"at most {MOST_GROUPS}: round them, or group them into classes"
            )
        self._rows = GroupedLevels(self.codes, group.ravel())
        of = [(KINDS[kind], len(seen)) for kind, seen in zip(kinds, self._seen, strict=True)]
        self._blocks: list[LevelColumns] = []
        for block, C in sorted(set(of), key=lambda one: (one[0].__name__, one[1])):
            columns = np.array([p for p in range(self.P) if of[p] == (block, C)])
            shares = np.array([self._counts[p][self._seen[p]] for p in columns])
            shares /= shares.sum(axis=1, keepdims=True)
            self._blocks.append(block(columns, shares, self.Q, distinct))
        self._groups, self._most = len(distinct), max(block.C for block in self._blocks)
        self._split: ColumnsByLoading | None = None
        self.nodes = nodes

    @property
    def nodes(self) -> int:
        """Nodes for each factor."""
        return self._per_factor

    @nodes.setter
    def nodes(self, T: int) -> None:
        self._per_factor = T
        self._grid = self._nodes(T)
        self._last: tuple[Floats, Floats] | None = None
        self._spreads: list[SpreadRows] = []
        # Posteriors for which steps of means to the mean factors have failed.
        self._by_newton: Floats | None = None

    @property
    def loadings(self) -> Floats:
        """Loadings (R, Q), columns by kind and number of levels; see :attr:`row_columns`."""
        return np.concatenate([block.loadings.reshape(-1, self.Q) for block in self._blocks])

    @property
    def row_columns(self) -> Ints:
        """A column has one row; a nominal column has a row for each occurring level except the first."""
        return np.concatenate([np.repeat(block.columns, block.rows) for block in self._blocks])

    def begin(self, clusters: int) -> None:
        """Start from principal components of levels' numbers, and a factor analysis of one cluster."""
        if self.classes:
            self.locate(clusters)
            return
        S = self._standardized()
        d, E = np.linalg.eigh(S.T @ S / self.n)
        rest = d[: -self.Q].mean() if len(d) > self.Q else 0.0
        L = LOGISTIC_BY_NORMAL * E[:, -self.Q :] * np.sqrt(np.maximum(d[-self.Q :] - rest, 0.05))
        ends = np.cumsum([len(block.columns) * block.rows for block in self._blocks])[:-1]
        for block, own in zip(self._blocks, np.split(L, ends), strict=True):
            block.load(own)
        self.means = np.zeros((1, self.Q))
        everyone = np.ones((self.n, 1))
        for _ in range(BEGINNING):
            spread, _ = self._expect(everyone, np.zeros(self.P), 0.0)
            self._improve_columns(spread, self._eta(), np.zeros(self.P))
        self.means = np.zeros((clusters, self.Q))

    def _reset(self) -> None:
        for block in self._blocks:
            block.reset(self.Q)
        self._split = None
        self.nodes = self._per_factor

    def _standardized(self) -> Floats:
        S = np.concatenate([self._standardized_scores(block) for block in self._blocks], axis=1)
        return S if self.Z.shape[1] == 1 else S - self.Z @ np.linalg.lstsq(self.Z, S)[0]

    def _standardized_scores(self, block: LevelColumns) -> Floats:
        cells = np.repeat(self.codes[:, block.columns] >= 0, block.rows, axis=1)
        scores = np.where(cells, block.scores(self.codes[:, block.columns]), np.nan)
        return np.where(cells, (scores - np.nanmean(scores, axis=0)) / np.nanstd(scores, axis=0), 0.0)

    def _eta(self) -> Floats:
        """Nodes of all clusters, (K t, Q)."""
        return (self.means[:, None] + self._grid.z).reshape(-1, self.Q)

    def _table(self, eta: Floats) -> Floats:
        out = np.zeros((self._groups, self.P, self._most, len(eta)))
        for block in self._blocks:
            out[:, block.columns, : block.C] = block.table(eta)
        return out

    def _columns(self) -> ColumnsByLoading:
        """Separate columns by whether they load, or may."""
        loaded = self.support
        if not loaded.all():
            loaded = loaded.copy()
            for block in self._blocks:
                loaded[block.columns] |= np.any(block.theta[:, block.intercepts :], axis=1)
        if self._split is None or not np.array_equal(self._split.loaded, loaded):
            self._split = ColumnsByLoading(self._blocks, self._rows, self._groups, loaded.copy())
        return self._split

    def log_densities(self) -> Floats:
        """Return log f(x_i | k), (n, K)."""
        state = self.state()
        for spread in self._spreads:
            if np.array_equal(spread.state, state):
                return spread.f
        if self._last is None or not np.array_equal(self._last[0], state):
            columns, K, f = self._columns(), self.clusters, np.zeros((self.n, self.clusters))
            if columns.parts:
                f = node_densities(columns.rows, columns.table(self._eta()), self._grid.log_weights, K)
            self._last = state, f + columns.log_densities_of_rest()[:, None]
        return self._last[1]

    def factors_by_cluster(self) -> Floats:
        """Return E[eta | x_i, k], (n, K, Q)."""
        columns, eta = self._columns(), self._eta()
        return node_means(columns.rows, columns.table(eta), self._grid.log_weights, eta, self.clusters)

    def expected(self, r: Floats) -> float:
        """Return the sum of r log f(x_i | k), and keep the values that the next step needs."""
        return self._expect(r, np.zeros(self.P), 0.0)[1]

    def improve(
        self, r: Floats, row_penalties: Floats | float = 0.0, means_penalty: float = 0.0, steps: int = 1
    ) -> None:
        """Take M-steps for posteriors r (n, K); the factors are integrated out again before each.

        For normal factors, the maximum over means is one step to the mean factors. On nodes that move with
        the means, this step may decrease the sum; it is then replaced by a Newton step on these nodes.
        """
        penalties = np.broadcast_to(np.asarray(row_penalties, dtype=float), (self.P,))
        for block in self._blocks:
            block.theta[~self.support[block.columns], block.intercepts :] = 0.0
        columns = self._columns()
        for one in columns.rest:
            one.improve(r.sum(axis=1), steps)
        if self.silent and not columns.parts:
            self.means = np.zeros_like(self.means)
            return
        spread, value = self._expect(r, penalties, means_penalty)
        on_nodes = self._by_newton is not None and np.array_equal(self._by_newton, r)
        for _ in range(steps):
            eta, means, old = self._eta(), self.means, value
            N, m = self._improve_columns(spread, eta, penalties)
            improved, there = self.state(), spread
            if not on_nodes:
                self._improve_means(N, m, means_penalty)
                spread, value = self._expect(r, penalties, means_penalty)
                on_nodes = value < old - ROUNDING * (1.0 + abs(old))
            if on_nodes:
                self._by_newton = r.copy()
                self.restore(improved)
                self.means = self._step_of_means(there.levels, means, means_penalty)
                self._recenter()
                spread, value = self._expect(r, penalties, means_penalty)
            if value - old < SETTLED * (1.0 + abs(value)):
                break

    def _expect(self, r: Floats, penalties: Floats, means_penalty: float) -> tuple[SpreadRows, float]:
        """Distribute rows over nodes, unless this is done; also return the objective."""
        state, columns = self.state(), self._columns()
        for found in self._spreads:
            if found.columns is columns and np.array_equal(found.state, state) and np.array_equal(found.r, r):
                break
        else:
            table = columns.table(self._eta())
            counts = expected_counts(columns.rows, r, table, self._grid.log_weights)
            f = counts.f + columns.log_densities_of_rest()[:, None]
            found = SpreadRows(columns, state, r.copy(), counts.levels, counts.nodes, table, f)
            # Also keep the state before, because an extrapolation may lead back to it.
            self._spreads = [found, *self._spreads[:1]]
        return found, float((r * found.f).sum()) - self.penalty(penalties, means_penalty)

    def _improve_columns(self, spread: SpreadRows, eta: Floats, penalties: Floats) -> tuple[Floats, Floats]:
        """Improve the parameters of columns; return clusters' weights (K,) and mean factors (K, Q)."""
        for part, cells in zip(spread.columns.parts, spread.columns.cells, strict=True):
            part.improve(eta, spread.levels[cells], spread.table[cells], penalties, self.support)
        N = spread.nodes.sum(axis=1)
        m = np.matmul(spread.nodes[:, None], eta.reshape(len(N), -1, self.Q))[:, 0]
        return N, m / np.maximum(N, 1e-300)[:, None]

    def _step_of_means(self, levels: Floats, means: Floats, penalty: float) -> Floats:
        """Take a proximal Newton step for means (K, Q): counts (P, C, G) are at nodes that move."""
        if self.silent:
            return np.zeros_like(means)
        if self.classes:
            return means
        K, Q = means.shape
        eta, score, info, columns = self._eta(), np.zeros((K, Q)), np.zeros((K, Q, Q)), self._columns()
        for part, cells in zip(columns.parts, columns.cells, strict=True):
            slopes, second = part.now().in_means(eta, levels[cells], K)
            score += slopes
            info += second
        S = block_diag(*info) + RIDGE * (1.0 + np.trace(info.sum(axis=0))) * np.eye(K * Q)
        new = shrink_rows(S[None], (S @ means.ravel() + score.ravel())[None], np.array([penalty]))

        def value(at: Floats) -> float:
            table = columns.table((at[:, None] + self._grid.z).reshape(-1, Q))
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
        """Set the parameters."""
        start = 0
        for block in self._blocks:
            block.theta = state[start : start + block.theta.size].reshape(block.theta.shape).copy()
            start += block.theta.size
        self.means = state[start:].reshape(-1, self.Q).copy()

    def profile(self) -> Floats:
        """Return probabilities of levels by cluster, (K, P, C), nan beyond the levels of a column."""
        out, eta, w = self._empty_profile(), self._eta(), np.exp(self._grid.log_weights)
        for block in self._blocks:
            table = np.exp(block.table_at_zero(eta)).reshape(*block.shares.shape, self.clusters, -1)
            for p, inner in zip(block.columns, table @ w, strict=True):
                out[:, p, self._seen[p]] = inner.T
        return out

    def _empty_profile(self) -> Floats:
        out = np.full((self.clusters, self.P, max(self.levels)), np.nan)
        for p, C in enumerate(self.levels):
            out[:, p, :C] = 0.0
        return out

    @property
    def units(self) -> Floats:
        """Count the rows of every column at every level, (sum of levels,)."""
        return np.concatenate(self._counts)

    @property
    def free(self) -> Bools:
        """Return which parameters of :meth:`state` were estimated."""
        parts = []
        for block in self._blocks:
            free = np.ones(block.theta.shape, dtype=np.bool_)
            free[:, block.intercepts :] = self.support[block.columns, None]
            parts.append(free.ravel())
        return np.concatenate([*parts, np.full(self.means.size, not (self.silent or self.classes))])

    def scores_by_cluster(self, r: Floats) -> tuple[Floats, Floats]:
        """Return scores (n, K, p) given each cluster, and information (p, p): Louis' first two terms."""
        eta, log_weights, K = self._eta(), self._grid.log_weights, self.clusters
        table = self._table(eta)
        counts = expected_counts(self._rows, r, table, log_weights).levels
        H = complete_information(self._blocks, eta, counts, self.means.shape)
        slopes = CellSlopes.of(self._blocks, eta)
        a = np.empty((self.n, K, len(H)))
        for start in range(0, self.n, CHUNK):
            rows = slice(start, start + CHUNK)
            some = GroupedLevels(self.codes[rows], self._rows.group[rows])
            a[rows], within = slopes.spread(some, node_weights(some, table, log_weights, K), r[rows])
            H -= within
        return a, H

    def profile_slopes(self) -> Floats:
        """Return derivatives of the profile in the parameters of :meth:`state`, (K P C, p)."""
        eta, w, (K, Q) = self._eta(), np.exp(self._grid.log_weights), self.means.shape
        out = np.zeros((*self._empty_profile().shape, len(self.state())))
        start, means = 0, out.shape[-1] - K * Q
        for block in self._blocks:
            own, in_eta = block.cell_slopes(eta, zero=True)
            weights = np.exp(block.table_at_zero(eta)) * np.tile(w, K)
            own, in_eta = (
                (weights[..., None] * part).reshape(*weights.shape[:2], K, len(w), -1).sum(axis=3)
                for part in (own, in_eta)
            )
            for j, p in enumerate(block.columns):
                at, seen = start + j * block.theta.shape[1] + block.at_zero, self._seen[p]
                out[:, p, seen[:, None], at] = own[j].transpose(1, 0, 2)
                for k in range(K):
                    out[k, p, seen, means + k * Q : means + (k + 1) * Q] = in_eta[j, :, k]
            start += block.theta.size
        return out.reshape(-1, out.shape[-1])

    def _effects(self) -> tuple[Ints, Floats]:
        out, start = [], 0
        for block in self._blocks:
            (P, d), q = block.theta.shape, block.covariates.shape[1]
            own = block.C - 1 + np.arange(block.rows * q).reshape(block.rows, q)
            out.append((start + np.arange(P)[:, None, None] * d + own).reshape(P * block.rows, q))
            start += P * d
        places = np.concatenate(out)
        return places, np.ones(len(places))

    def draw(self, labels: Ints, rng: np.random.Generator, covariates: Floats | None = None) -> Array:
        """Draw levels (n, P) of rows in clusters (n,)."""
        eta, out = self.draw_factors(labels, rng), np.zeros((len(labels), self.P), dtype=np.int64)
        for block in self._blocks:
            table = block.table_at_zero(eta) if covariates is None else block.table_of(eta, covariates)
            below = np.exp(table).cumsum(axis=1)[:, :-1]
            places = (below < rng.uniform(size=(len(block.columns), 1, len(labels)))).sum(axis=1)
            for p, place in zip(block.columns, places, strict=True):
                out[:, p] = self._seen[p][place]
        return out
