"""VFEM for other families than the normal, as a protocol: who is asked what, and when it ends.

The observed-data likelihood is climbed by a quasi-Newton method of which every client keeps its own part
(:mod:`fedstat.models.vfem.iteration.quasi_newton`). One iteration is two round trips to the clients: down,
two numbers per entity, and up, inner products; down, the coefficients of a direction, and up, the linear
predictors there. Of linear predictors, inner products and log-likelihoods sums over the clients are
needed only, so that masks may hide each client's part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.message import Ask, Reply
from fedstat.federation.rounds.engine import Rounds
from fedstat.kernels.glm.family import FamilySpec
from fedstat.models.vertical.fit import TraceRow
from fedstat.models.vfem.blocks.layout import Layout
from fedstat.models.vfem.blocks.request import FAMILY, ask
from fedstat.models.vfem.iteration.quasi_newton import Memory, Weights, quasi_newton
from fedstat.typing import Array, Floats

SUFFICIENT = 1e-4
ROUNDING = 1e-12
SHORTEST = 2.0**-30
COLLAPSE = 1e-6
"""Share of the first information on the intercept that is left where fitted means run off to 0 and 1."""

MOST_EDGES = 3
"""Iterations in a row that were cut short because linear predictors left all bounds."""

Turn: TypeAlias = Generator[list[Ask], list[Reply], None]


@dataclass(frozen=True, slots=True)
class GLMOptions:
    """How to climb; see :meth:`fedstat.models.vfem.glm_model.VFEMGLM.fit`."""

    memory: int = 12
    maxiter: int = 200
    tol_score: float = 1e-8
    tol_change: float = 1e-6


@dataclass(frozen=True, slots=True)
class GLMFit:
    """Where the iteration ended, in the units of the data.

    Parameters
    ----------
    family : FamilySpec
    beta0 : float
        Intercept.
    beta, mu : dict of str to (p_k,) arrays
        Coefficients and means by client.
    t : dict of str to float
        beta_k' Sigma_k beta_k.
    log_likelihood, null : float
        Of the fit, and of the model with an intercept only.
    """

    family: FamilySpec
    beta0: float
    beta: Mapping[str, Floats]
    mu: Mapping[str, Floats]
    t: Mapping[str, float]
    log_likelihood: float
    null: float
    trace: tuple[TraceRow, ...]
    converged: bool
    reason: str

    @property
    def a(self) -> float:
        """Mean of the linear predictor, beta0 + sum_k mu_k'beta_k."""
        return self.beta0 + sum(float(self.mu[k] @ self.beta[k]) for k in self.beta)


@dataclass(frozen=True, slots=True)
class GLMPoint:
    """An evaluated point: intercept, likelihood, and what the clients are sent of it.

    Parameters
    ----------
    intercept : float
        With the columns standardised.
    log_likelihood : float
        Of response and blocks.
    change : float
        Largest change since the accepted point.
    z, h : (n,) arrays
        L_m and -L_mm.
    sums : (G, 4) array
        L_m, L_v, -L_mm and L_v^2 by pattern.
    """

    intercept: float
    log_likelihood: float
    change: float
    z: Floats
    h: Floats
    sums: Floats


@dataclass(slots=True)
class GLMAscent:
    """The state of the iteration at the coordinator."""

    layout: Layout
    family: FamilySpec
    options: GLMOptions
    session: str
    report: Callable[[TraceRow], None] | None = None
    null: float = 0.0
    memory: Memory = field(init=False)
    point: GLMPoint = field(init=False)
    weights: Weights = field(init=False)
    slope: float = 0.0
    first_information: float = 0.0
    at_the_edge: bool = False
    edges: int = 0
    trace: list[TraceRow] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    converged: bool = False
    reason: str = "the largest number of iterations was reached"

    def start(self) -> Turn:
        """Open the fit at every site, and evaluate coefficients of zero."""
        lay, options = self.layout, self.options
        response = Ask(
            lay.active,
            FAMILY,
            "glm_start_response",
            {"keep": lay.response_keep, "code": lay.code},
            self.session,
            self.family.to_json(),
        )
        *_, reply = yield [
            *[
                ask(
                    k,
                    "glm_start",
                    self.session,
                    keep=lay.keep[k],
                    rows=lay.kept[k],
                    n=lay.n,
                    filled=lay.filled,
                    memory=options.memory,
                )
                for k in lay.clients
            ],
            response,
        ]
        mean, self.null = reply.arrays["null"]
        self.memory = Memory(options.memory)
        intercept = float(self.family.make().link(np.array([mean]))[0])
        zero = {"of_steps": np.zeros(0), "of_scores": np.zeros(1)}
        point = yield from self._evaluate(intercept, [zero] * len(lay.clients), 0.0)
        assert point is not None
        self.point = point

    def _evaluate(
        self, intercept: float, weights: Sequence[Mapping[str, Array]], length: float
    ) -> Rounds[GLMPoint | None]:
        """Evaluate the likelihood along the direction; None where the point is not admissible."""
        lay = self.layout
        replies = yield [
            ask(k, "glm_move", self.session, length=length, **w)
            for k, w in zip(lay.clients, weights, strict=True)
        ]
        arrays = [reply.arrays for reply in replies]
        if not all(a["inside"] for a in arrays):
            return None
        (reply,) = yield [
            ask(
                lay.active,
                "glm_evaluate",
                self.session,
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

    def take(self) -> Turn:
        """Accept the evaluated point: ask for products of scores, and combine the next direction."""
        lay, at = self.layout, self.point
        self.memory.take(np.array([at.intercept]), np.array([at.sums[:, 0].sum()]))
        self.first_information = self.first_information or at.h.sum()
        replies = yield [
            ask(
                k,
                "glm_score",
                self.session,
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
        self._enter(float(np.sqrt(yhy[-1, -1] / lay.n)))

    def _scale(self, score: Floats) -> Floats:
        return np.asarray(score / self.point.h.sum())

    def _enter(self, score: float) -> None:
        at, options = self.point, self.options
        row = TraceRow(
            len(self.trace) + 1,
            at.log_likelihood,
            score,
            at.change if self.trace else np.inf,
            "quasi-Newton" if self.trace else "start",
            time.perf_counter() - self.began,
        )
        self.trace.append(row)
        if self.report is not None:
            self.report(row)
        self.converged = row.score <= options.tol_score and row.change <= options.tol_change
        if self.converged:
            self.reason = "score and change are below their tolerances"

    def move(self) -> Rounds[bool]:
        """Go along the direction until the log-likelihood has risen enough; False where it does not."""
        weights = {"of_steps": self.weights.steps, "of_scores": self.weights.scores}
        own = float(self.memory.direction(self.weights, self._scale)[0])
        before, length, self.at_the_edge = self.point, 1.0, False
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
        yield from self._evaluate(before.intercept, [weights] * len(self.layout.clients), 0.0)
        return False

    def separated(self) -> bool:
        """Whether linear predictors run off, to where the response has no variance or beyond all bounds."""
        collapsed = self.point.h.sum() < COLLAPSE * self.first_information
        return bool(collapsed or self.edges >= MOST_EDGES)


def climb(ascent: GLMAscent) -> Turn:
    """Iterate to a stationary point of the observed-data likelihood.

    Raises
    ------
    EstimationError
        The likelihood has no maximum.
    """
    for _ in range(ascent.options.maxiter):
        yield from ascent.take()
        if ascent.converged:
            return
        if ascent.separated():
            raise EstimationError(
                "the likelihood rises as coefficients grow without bound: columns separate the response, or "
                "too few entities have a block to tell how large its effects are; leave out columns or "
                "institutions, or tabulate each column against the response"
            )
        moved = yield from ascent.move()
        if not moved:
            ascent.reason = "no step raises the log-likelihood"
            return


def estimate(ascent: GLMAscent) -> Rounds[GLMFit]:
    """Collect the estimates of the accepted point."""
    lay = ascent.layout
    replies = yield [ask(k, "glm_estimates", ascent.session) for k in lay.clients]
    by_client = {k: reply.arrays for k, reply in zip(lay.clients, replies, strict=True)}
    shift = sum(float(a["shift"]) for a in by_client.values())
    return GLMFit(
        ascent.family,
        ascent.point.intercept - shift,
        {k: a["beta"] for k, a in by_client.items()},
        {k: a["mu"] for k, a in by_client.items()},
        {k: float(a["t"]) for k, a in by_client.items()},
        ascent.point.log_likelihood,
        float(ascent.null),
        tuple(ascent.trace),
        ascent.converged,
        ascent.reason,
    )


def maximise(ascent: GLMAscent) -> Rounds[GLMFit]:
    """Maximise the observed-data likelihood of a generalised linear model with missing blocks.

    Parameters
    ----------
    ascent : GLMAscent
        Before its start.
    """
    yield from ascent.start()
    yield from climb(ascent)
    return (yield from estimate(ascent))
