"""The coordinator's account of the institutions' points that may be mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fedstat.federation.message import Reply
from fedstat.kernels.rows import add_at, weighted_rows
from fedstat.models.vertical.layout import Layout
from fedstat.typing import Floats


@dataclass(slots=True)
class Points:
    """What the coordinator knows of the points that may be mixed.

    Of linear predictors it needs the sum over institutions only; those of the points stand in a ring of rows,
    `predictors` (memory + 2, n), of which `newest` is the latest; `padded` where they come for all entities.
    Per institution `centres` (q, q) are products mu'beta of its points, `spreads` (q, q, q) beta'Sigma beta.
    """

    predictors: Floats
    padded: bool
    newest: int = -1
    centres: list[Floats] = field(default_factory=list)
    spreads: list[Floats] = field(default_factory=list)

    def take(self, layout: Layout, replies: Sequence[Reply]) -> None:
        """Enter the newest point of every institution."""
        self.newest = (self.newest + 1) % len(self.predictors)
        total = self.predictors[self.newest]
        total[:] = 0.0
        for client, reply in zip(layout.clients, replies, strict=True):
            part = reply.arrays["linear_predictor"]
            if self.padded:
                total += part
            else:
                add_at(total, layout.rows[client], part)
        self.centres = [reply.arrays["centres"] for reply in replies]
        self.spreads = [reply.arrays["spreads"] for reply in replies]

    def mixed(self, weights: Floats, layout: Layout) -> tuple[Floats, Floats]:
        """Return eta (n,), the sum of centred linear predictors, and t (K,) at a mixture of the points."""
        # The newest weight goes to the newest row; rows of forgotten points weigh nothing.
        ring = np.zeros(len(self.predictors))
        ring[(self.newest - np.arange(len(weights))[::-1]) % len(ring)] = weights
        differences = np.append(weights[:-1], 1.0)  # from the newest point
        centre = np.array([differences @ B @ differences for B in self.centres])
        eta = weighted_rows(self.predictors, ring, ~layout.missing @ centre, layout.code)
        t = np.array([differences @ (B @ differences) @ differences for B in self.spreads])
        return eta, t
