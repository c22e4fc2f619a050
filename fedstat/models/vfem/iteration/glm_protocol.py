"""VFEM where the response is not normal, as a protocol: who is asked what, and when it ends.

The observed-data likelihood is maximised by a quasi-Newton method of which every client keeps its own part
(:mod:`fedstat.models.vfem.iteration.quasi_newton`). One iteration is two round trips to the clients: down,
two numbers per entity, and up, inner products; down, the coefficients of a direction, and up, the linear
predictors there. Of linear predictors, inner products and log-likelihoods sums over the clients are
needed only, so that masks may hide each client's part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.rounds.engine import Rounds
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.models.vfem.iteration.fit import VFEMFit
from fedstat.models.vfem.iteration.quasi_newton import Memory, Weights, quasi_newton
from fedstat.models.vfem.iteration.state import Iteration
from fedstat.typing import Floats

SUFFICIENT = 1e-4
ROUNDING = 1e-12
SHORTEST = 2.0**-30
COLLAPSE = 1e-6
"""Share of the first information on the intercept that is left where fitted means run off to 0 and 1."""

MOST_EDGES = 3
"""Iterations in a row that were cut short because linear predictors left all bounds."""

SEPARATED = (
    "the likelihood rises as coefficients grow without bound: columns separate the response, or too few "
    "entities have a block to tell how large its effects are; leave out columns or institutions, or tabulate "
    "each column against the response"
)


@dataclass(frozen=True, slots=True)
class GLMPoint:
    """An evaluated point: intercept, likelihood, and what the clients are sent of it.

    The intercept is that of standardised columns, the log-likelihood that of response and blocks, `change`
    the largest since the accepted point; z and h (n,) are L_m and -L_mm, and `sums` (G, 4) of L_m, L_v, -L_mm
    and L_v^2 by pattern.
    """

    intercept: float
    log_likelihood: float
    change: float
    z: Floats
    h: Floats
    sums: Floats


@dataclass(slots=True)
class QuasiNewtonIteration(Iteration):
    """Steps of a quasi-Newton method, for a response that is not normal.

    The intercept belongs to no client: `memory` is the coordinator's own part of the method. `edges` counts
    the iterations in a row that were cut short because a linear predictor left all bounds.
    """

    distribution: DistributionSpec = field(kw_only=True)
    null: float = 0.0
    memory: Memory = field(init=False)
    point: GLMPoint = field(init=False)
    weights: Weights = field(init=False)
    slope: float = 0.0
    first_information: float = 0.0
    at_the_edge: bool = False
    edges: int = 0

    def start(self) -> Rounds[None]:
        """Open the fit at every site, and evaluate coefficients of zero."""
        lay, options = self.layout, self.options
        asks = [self.ask(k, "glm_start", **self.opening(k), memory=options.memory) for k in lay.clients]
        response = {"keep": lay.response_keep, "code": lay.code}
        asks.append(self.ask(lay.active, "glm_start_response", self.distribution.to_json(), **response))
        *_, reply = yield asks
        mean, self.null = reply.arrays["null"]
        self.memory = Memory(options.memory)
        # At coefficients of zero the maximum over the intercept is known.
        intercept = float(self.distribution.make().link(np.array([mean]))[0])
        zero = {"of_steps": np.zeros(0), "of_scores": np.zeros(1)}
        point = yield from self._evaluate(intercept, [zero] * len(lay.clients), 0.0)
        assert point is not None
        self.point = point

    def _evaluate(
        self, intercept: float, weights: Sequence[Mapping[str, Any]], length: float
    ) -> Rounds[GLMPoint | None]:
        """Evaluate the likelihood along the direction; None where the point is not admissible."""
        lay = self.layout
        replies = yield [
            self.ask(k, "glm_move", length=length, **w) for k, w in zip(lay.clients, weights, strict=True)
        ]
        arrays = [reply.arrays for reply in replies]
        if not all(a["inside"] for a in arrays):
            return None
        # What is missing enters by its pattern: the mean and the variance of the absent linear predictors.
        (reply,) = yield [
            self.ask(
                lay.active,
                "glm_evaluate",
                predictor=intercept + np.sum([a["linear_predictor"] for a in arrays], axis=0),
                centre=lay.missing @ np.array([float(a["centre"]) for a in arrays]),
                spread=lay.missing @ np.array([float(a["spread"]) for a in arrays]),
            )
        ]
        own = reply.arrays
        if not own["inside"]:
            self.at_the_edge = True
            return None
        return GLMPoint(
            intercept,
            float(own["log_likelihood"]) + sum(float(a["log_likelihood"]) for a in arrays),
            max(float(a["change"]) for a in arrays),
            own["z"],
            own["h"],
            own["sums"],
        )

    def take(self) -> Rounds[None]:
        """Accept the evaluated point: ask for products of scores, and combine the next direction."""
        lay, at = self.layout, self.point
        self.memory.take(np.array([at.intercept]), np.array([at.sums[:, 0].sum()]))
        self.first_information = self.first_information or at.h.sum()
        replies = yield [
            self.ask(
                k,
                "glm_score",
                z=at.z[lay.rows[k]],
                h=at.h[lay.rows[k]],
                missing=lay.missing[:, j] @ at.sums,
            )
            for j, k in enumerate(lay.clients)
        ]
        sy, yhy = self.memory.products(self._scale)
        sy = sy + np.sum([reply.arrays["sy"] for reply in replies], axis=0)
        yhy = yhy + np.sum([reply.arrays["yhy"] for reply in replies], axis=0)
        self.weights, self.slope = quasi_newton(sy, yhy)
        # Nothing moved to the first point, which must not pass for convergence.
        self.enter(
            at.log_likelihood,
            float(np.sqrt(yhy[-1, -1] / lay.n)),
            at.change if self.trace else np.inf,
            "quasi-Newton" if self.trace else "start",
        )

    def _scale(self, score: Floats) -> Floats:
        return np.asarray(score / self.point.h.sum())

    def move(self) -> Rounds[bool]:
        """Go along the direction until the log-likelihood has risen enough; False where it does not."""
        weights = {"of_steps": self.weights.steps, "of_scores": self.weights.scores}
        own = float(self.memory.direction(self.weights, self._scale)[0])
        before, length, self.at_the_edge = self.point, 1.0, False
        # Near the maximum the likelihood moves by less than its own rounding.
        slack = ROUNDING * abs(before.log_likelihood)
        while length >= SHORTEST:
            intercept = before.intercept + length * own
            point = yield from self._evaluate(intercept, [weights] * len(self.layout.clients), length)
            needed = before.log_likelihood + SUFFICIENT * length * self.slope - slack
            if point is not None and point.log_likelihood >= needed:
                self.point = point
                self.edges = self.edges + 1 if self.at_the_edge else 0
                return True
            length /= 2.0
        # The clients hold the last point that was tried; the estimates are those of the accepted one.
        yield from self._evaluate(before.intercept, [weights] * len(self.layout.clients), 0.0)
        return False

    def separated(self) -> bool:
        """Whether linear predictors run off, to where the response has no variance or beyond all bounds."""
        # Fitted means of 0 or 1 leave no information on the intercept.
        collapsed = self.point.h.sum() < COLLAPSE * self.first_information
        return bool(collapsed or self.edges >= MOST_EDGES)

    def climb(self) -> Rounds[None]:
        """Go on to a stationary point of the observed-data likelihood.

        Raises EstimationError where the likelihood has no maximum.
        """
        for _ in range(self.options.maxiter):
            yield from self.take()
            if self.converged:
                return
            if self.separated():
                raise EstimationError(SEPARATED)
            moved = yield from self.move()
            if not moved:
                self.reason = "no step raises the log-likelihood"
                return

    def estimate(self) -> Rounds[VFEMFit]:
        """Collect the estimates of the accepted point."""
        by_client = yield from self.ask_estimates("glm_estimates")
        # The intercept was that of standardised columns.
        beta0 = self.point.intercept - sum(float(a["shift"]) for a in by_client.values())
        return self.make_fit(
            by_client,
            a=beta0 + sum(float(a["mu"] @ a["beta"]) for a in by_client.values()),
            s2=1.0,
            log_likelihood=self.point.log_likelihood,
            distribution=self.distribution,
            null=float(self.null),
        )
