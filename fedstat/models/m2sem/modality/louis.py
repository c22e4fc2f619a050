"""Scores of categorical columns given a cluster, and their spread over nodes.

References
----------
Louis, T. A. (1982). Finding the observed information matrix when using the EM algorithm. Journal of the Royal
Statistical Society B 44, 226-233.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import block_diag

from fedstat.kernels.mixtures.nodes import GroupedLevels
from fedstat.models.m2sem.modality.levels import LevelColumns
from fedstat.typing import Floats


def complete_information(
    blocks: Sequence[LevelColumns], eta: Floats, counts: Floats, shape: tuple[int, ...]
) -> Floats:
    """Return minus second derivatives (p, p) under expected counts; nodes eta move with means of a shape."""
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
        for k in range(K):
            for t in range(T):
                s = self._at(rows, k * T + t, means + K * Q, means + k * Q)
                a[:, k] += weights[:, k, t, None] * s
                within += (s * (r[:, k] * weights[:, k, t])[:, None]).T @ s
            within -= (a[:, k] * r[:, k, None]).T @ a[:, k]
        return a, within

    def _at(self, rows: GroupedLevels, g: int, p: int, means: int) -> Floats:
        """Return the scores (n, p) at node g, whose cluster's means have the places from `means` on."""
        out, start = np.zeros((len(rows.codes), p)), 0
        for block, own, in_eta in zip(self.blocks, self.own, self.in_eta, strict=True):
            P, d = block.theta.shape
            codes = rows.codes[:, block.columns]
            cell = rows.group[:, None] * P + np.arange(P), np.maximum(codes, 0), g
            seen = (codes >= 0)[:, :, None]
            effective = np.where(seen, own[cell], 0.0)
            if block.covariates.shape[1]:
                effective = np.einsum("npe,ned->npd", effective, block.moving()[rows.group])
            out[:, start : start + P * d] = effective.reshape(len(out), -1)
            out[:, means : means + in_eta.shape[-1]] += np.where(seen, in_eta[cell], 0.0).sum(axis=1)
            start += P * d
        return out
