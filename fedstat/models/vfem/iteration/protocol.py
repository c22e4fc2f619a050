"""The VFEM iteration as a protocol: who is asked what, and when it ends.

One iteration is one round trip: up, per institution, the linear predictors of its entities and a few
scalars; down, their standardised residuals z and three sums over the entities it lacks. Between the two
stands one question to the active institution, answered in place where the coordinator sits there.

Of linear predictors, likelihoods, scores and products of moves only sums over institutions enter. With
:attr:`IterationOptions.masked` the institutions hide their own parts of them: linear predictors then go out
over all entities of the fit, zero where an institution lacks them. What that does not hide is said in
:mod:`fedstat.models.vfem.statements.exposure`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.message import Reply
from fedstat.federation.rounds.engine import Rounds
from fedstat.kernels.anderson import anderson_weights, one_hot
from fedstat.models.vertical.layout import Layout
from fedstat.models.vfem.iteration.client_points import Points
from fedstat.models.vfem.iteration.fit import VFEMFit
from fedstat.models.vfem.iteration.options import SMALLEST_MEMORY
from fedstat.models.vfem.iteration.response_points import EvaluatedResponse, ResponsePoints
from fedstat.models.vfem.iteration.state import Iteration
from fedstat.typing import Floats

ASCENT_TOLERANCE = 1e-12
SMALLEST_STEP = 2.0**-20


@dataclass(slots=True)
class EMIteration(Iteration):
    """Accelerated steps of EM, for a normal response, from coefficients of zero or `first` by institution.

    `gram` holds the inner products of the moves that may be mixed, `weights` those of the next mixture;
    `accepted` is the place of the last accepted point among them, `best` its log-likelihood. `omega` is the
    length of the step of beta; `forget` tells the sites to drop an evaluation that one of them refused.
    """

    first: Mapping[str, Floats] | None = None
    points: Points = field(init=False)
    response: ResponsePoints = field(init=False)
    latest: EvaluatedResponse = field(init=False)
    gram: Floats = field(default_factory=lambda: np.empty((0, 0)))
    weights: Floats = field(default_factory=lambda: np.ones(1))
    move: str = "start"
    omega: float = 1.0
    best: float = -np.inf
    accepted: int = 0
    forget: bool = False

    # ---- rounds ------------------------------------------------------------------------------

    def start(self) -> Rounds[None]:
        """Open the fit at every site."""
        lay = self.layout
        memory = self.options.memory if self.options.acceleration else SMALLEST_MEMORY
        common: dict[str, Any] = {"memory": memory, "padded": self.masked}
        asks = []
        for k in lay.clients:
            first: dict[str, Any] = {} if self.first is None else {"beta": self.first[k]}
            asks.append(self.ask(k, "start", **self.opening(k), **common, **first))
        response = self.ask(lay.active, "start_response", keep=lay.response_keep, code=lay.code)
        *replies, reply = yield [*asks, response]
        self.response = ResponsePoints(lay.counts, memory, reply.arrays["moments"])
        self.points = Points(np.zeros((memory + 2, lay.n)), self.masked)
        self.points.take(lay, replies)
        if self.options.step == "gradient":
            yield from self._set_rate([r.arrays["eigenvalues"] for r in replies])

    def _set_rate(self, eigenvalues: list[Floats]) -> Rounds[None]:
        ends = np.array(eigenvalues)
        # The step by which gradient ascent on a quadratic contracts fastest.
        eta = self.options.learning_rate or 2.0 / (ends[:, 0].min() + ends[:, 1].max())
        yield [self.ask(k, "set_rate", eta=eta) for k in self.layout.clients]

    def evaluate(self) -> Rounds[list[Reply] | None]:
        """Ask for likelihood and score at the mixed point; None when it is not admissible."""
        lay = self.layout
        eta, t = self.points.mixed(self.weights, lay)
        a, s2 = self.response.mixed(self.weights)
        v = s2 + lay.missing @ t
        if self.response.vanishing(s2, v):
            return None
        (reply,) = yield [self.ask(lay.active, "residuals", a=a, s2=s2, eta=eta, t_missing=lay.missing @ t)]
        z, z1, z2 = (reply.arrays[name] for name in ("z", "z1", "z2"))
        # Of the entities that it lacks an institution is told three sums by pattern, and no value.
        sums = np.column_stack([z1, z2, lay.counts / v])
        replies = yield [
            self.ask(
                k,
                "step",
                weights=self.weights,
                z=z[lay.rows[k]],
                missing=lay.missing[:, j] @ sums,
                s2=s2,
                omega=self.omega,
                forget=self.forget,
            )
            for j, k in enumerate(lay.clients)
        ]
        self.forget = not all(reply.arrays["inside"] for reply in replies)
        if self.forget:
            return None
        # Only now: a point that one institution refuses must never be mixed.
        self.points.take(lay, replies)
        self.latest = EvaluatedResponse(a, s2, v, z1, z2)
        return replies

    # ---- the way of the iteration ------------------------------------------------------------

    def take(self, replies: list[Reply]) -> None:
        """Enter an evaluation: its likelihood and score, and the products of its move with those before."""
        arrays, at = [reply.arrays for reply in replies], self.latest
        own = self.response.score(at)
        log_likelihood = own.log_likelihood + sum(float(a["log_likelihood"]) for a in arrays)
        score2 = own.score2 + sum(float(a["score2"]) for a in arrays)
        self.enter(
            log_likelihood,
            float(np.sqrt(score2 / self.layout.n)),
            max(own.change, *[float(a["change"]) for a in arrays]),
            self.move,
        )
        recentring = sum(float(a["recentring"]) for a in arrays)
        products = self.response.take(at, self.omega, recentring)
        self._enlarge_gram(products + np.sum([a["products"] for a in arrays], axis=0))

    def _enlarge_gram(self, products: Floats) -> None:
        if len(products) == len(self.gram):  # the oldest point was forgotten
            self.accepted -= 1
        first = len(self.gram) - (len(products) - 1)
        old = self.gram[first:, first:]
        self.gram = np.block([[old, products[:-1, None]], [products[None, :-1], products[-1:, None]]])

    def choose(self) -> Literal["go", "shorten"]:
        """Accept or reject the evaluated point, and set the weights of the next one."""
        row, size = self.trace[-1], len(self.gram)
        # Near the maximum the likelihood moves by less than its own rounding: that is no fall.
        slack = ASCENT_TOLERANCE * abs(self.best) + 1e-9 if np.isfinite(self.best) else 0.0
        if row.log_likelihood >= self.best - slack:
            self.best, self.accepted = max(row.log_likelihood, self.best), size - 1
            self.weights, self.move = self._mixture(), "mixed"
            if not self.options.acceleration or np.count_nonzero(self.weights) == 1:
                self.move = "plain"
            return "go"
        # A mixture is a guess, and given up for the plain step. That one falls only where the steps of beta,
        # which the institutions make side by side, add up to too long a one.
        if self.move != "mixed":
            return "shorten"
        self.weights, self.move = one_hot(self.accepted, size), "plain"
        return "go"

    def _mixture(self) -> Floats:
        size = len(self.gram)
        if not self.options.acceleration or size == 1:
            return one_hot(size - 1, size)
        return anderson_weights(self.gram)

    def plain(self) -> None:
        """Leave an inadmissible mixture for the plain step from the last accepted point."""
        self.weights, self.move = one_hot(self.accepted, len(self.gram)), "plain"

    def shorten(self) -> Rounds[None]:
        """Halve the step from the last accepted point, at every site."""
        self.omega /= 2.0
        lay = self.layout
        if self.omega < SMALLEST_STEP:
            raise EstimationError(
                "the log-likelihood falls along every step, however short; "
                "the columns are probably collinear across institutions"
            )
        replies = yield [self.ask(k, "shorten", point=self.accepted, omega=self.omega) for k in lay.clients]
        self.points.take(lay, replies)
        recentring = sum(float(reply.arrays["recentring"]) for reply in replies)
        self.response.shorten(self.accepted, self.omega, recentring)
        # Products with moves of another length do not compare: the history begins anew.
        self.gram, self.weights, self.move, self.accepted = np.empty((0, 0)), np.ones(1), "shortened", -1

    def climb(self) -> Rounds[None]:
        """Go on to a stationary point of the observed-data likelihood."""
        failures = 0
        for _ in range(self.options.maxiter):
            replies = yield from self.evaluate()
            if replies is None:
                failures += 1
                # A mixture may overshoot; where the plain step does so too, a variance goes to zero.
                if failures > 2:
                    raise EstimationError(vanishing_message(self.layout))
                self.plain()
                continue
            failures = 0
            self.take(replies)
            if self.converged:
                return
            if self.choose() == "shorten":
                yield from self.shorten()

    def estimate(self) -> Rounds[VFEMFit]:
        """Collect the estimates of the last evaluated point."""
        by_client = yield from self.ask_estimates("estimates")
        return self.make_fit(
            by_client,
            a=self.latest.a,
            s2=self.latest.s2,
            log_likelihood=self.trace[-1].log_likelihood,
            response_moments=self.response.moments,
        )


def vanishing_message(layout: Layout) -> str:
    """Say why an iteration has nowhere to go."""
    complete = int(layout.counts[~layout.missing.any(axis=1)].sum())
    return (
        f"a variance goes to zero, where the likelihood has no maximum: {complete} of the {layout.n} "
        "entities are complete, and the coefficients may reproduce their response without error; leave "
        "out columns or institutions, or start elsewhere (init=)"
    )
