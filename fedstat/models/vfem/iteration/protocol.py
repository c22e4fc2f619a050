"""The protocol of the EM iterations of VFEM for a normal response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedstat.errors import EstimationError, Remedy
from fedstat.federation.message import Reply
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.models.vertical.layout import Layout
from fedstat.models.vfem.iteration.quasi_newton import anderson_weights, one_hot
from fedstat.models.vfem.iteration.state import SMALLEST_MEMORY, IterationState, VFEMFit
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# The coordinator's record of the sites' points that may be mixed.


@dataclass(slots=True)
class SitePoints:
    """The coordinator's knowledge of the points that may be mixed.

    It needs only the sum of linear predictors over sites. Those of the points are in a ring of rows,
    `predictors` (memory + 2, n), whose latest is `newest`; `padded` if they come for all entities. Per site,
    `centers` (q, q) are products mu'beta of its points, `spreads` (q, q, q) beta'Sigma beta.
    """

    predictors: Floats
    padded: bool
    newest: int = -1
    centers: list[Floats] = field(default_factory=list)
    spreads: list[Floats] = field(default_factory=list)

    def take(self, layout: Layout, replies: Sequence[Reply]) -> None:
        """Enter the newest point of every site."""
        self.newest = (self.newest + 1) % len(self.predictors)
        total = self.predictors[self.newest]
        total[:] = 0.0
        for site, reply in zip(layout.sites, replies, strict=True):
            part = reply.arrays["linear_predictor"]
            if self.padded:
                total += part
            else:
                total[layout.rows[site]] += part
        self.centers = [reply.arrays["centers"] for reply in replies]
        self.spreads = [reply.arrays["spreads"] for reply in replies]

    def mixed(self, weights: Floats, layout: Layout) -> tuple[Floats, Floats]:
        """Return eta (n,), the sum of centered linear predictors, and t (K,) at a mixture of the points."""
        # The newest weight goes to the newest row; rows of forgotten points have weight zero.
        ring = np.zeros(len(self.predictors))
        ring[(self.newest - np.arange(len(weights))[::-1]) % len(ring)] = weights
        differences = np.append(weights[:-1], 1.0)  # from the newest point
        center = np.array([differences @ B @ differences for B in self.centers])
        eta = np.einsum("j,ji->i", ring, self.predictors) - (~layout.missing @ center)[layout.code]
        t = np.array([differences @ (B @ differences) @ differences for B in self.spreads])
        return eta, t


# ----------------------------------------------------------------------------------------------------
# The coordinator's own parameters (a, s2), and the points of them that may be mixed.

VANISHING = 1e-12


@dataclass(frozen=True, slots=True)
class EvaluatedResponse:
    """An evaluated point: a, s2, and by pattern v and the sums of z and z^2."""

    a: float
    s2: float
    v: Floats
    z1: Floats
    z2: Floats


@dataclass(frozen=True, slots=True)
class ResponseStep:
    """One M-step of (a, s2): its start, its end, and the full step of the centered intercept."""

    at: Floats
    image: Floats
    a_move: float


@dataclass(frozen=True, slots=True)
class ResponseScore:
    """Likelihood of the response at a point, the squared score norm, and the largest relative change."""

    log_likelihood: float
    score2: float
    change: float


@dataclass(slots=True)
class ResponsePoints:
    """Points (a, s2), aligned with those of the sites.

    `counts` (G,) are the entities of each pattern, `memory` the earlier points that may be mixed. Mean and
    variance of the response, `moments` (2,), are the first point.
    """

    counts: Floats
    memory: int
    moments: Floats
    points: list[Floats] = field(default_factory=list)
    evaluated: list[ResponseStep | None] = field(default_factory=list)
    base: ResponseStep | None = None
    current: Floats | None = None
    reference: float = 0.0

    def __post_init__(self) -> None:
        self.points, self.evaluated = [self.moments], [None]

    def mixed(self, weights: Floats) -> tuple[float, float]:
        """Mix the points to one (a, s2)."""
        a, s2 = np.tensordot(weights, self.points, 1)
        return float(a), float(s2)

    def vanishing(self, s2: float, v: Floats) -> bool:
        """Whether a variance is zero or negative."""
        return bool(s2 <= VANISHING * self.moments[1] or (v <= 0.0).any())

    def score(self, at: EvaluatedResponse) -> ResponseScore:
        """Evaluate the likelihood and its score at (a, s2)."""
        n, a, s2 = self.counts.sum(), at.a, at.s2
        # v z^2 is r^2 / v, r the residual.
        log_likelihood = -0.5 * np.sum(self.counts * np.log(2.0 * np.pi * at.v) + at.v * at.z2)
        a_move, s2_move = self._moves(at)
        score2 = n * (a_move**2 / s2 + 0.5 * (s2_move / s2) ** 2)
        change = np.inf
        if self.current is not None:
            change = max(abs(a - self.current[0]) / np.sqrt(s2), abs(s2 - self.current[1]) / s2)
        self.current = np.array([a, s2])
        return ResponseScore(float(log_likelihood), float(score2), float(change))

    def _moves(self, at: EvaluatedResponse) -> tuple[float, float]:
        n, s2 = self.counts.sum(), at.s2
        # Expected squared errors: (s2 z)^2 of the observed part of each, and s2 (v - s2) / v of the missing
        # part.
        new = s2 * s2 * at.z2.sum() / n + np.sum(self.counts * (at.v - s2) * s2 / at.v) / n
        return float(s2 * at.z1.sum() / n), float(new - s2)

    def take(self, evaluated: EvaluatedResponse, omega: float, recentering: float) -> Floats:
        """Record the M-step of an evaluated point, and return the products of its step with the others.

        `omega` is the length of the step of the regression; `recentering` is the change of the centered
        intercept with the means of the sites' blocks.
        """
        a_move, s2_move = self._moves(evaluated)
        at = np.array([evaluated.a, evaluated.s2])
        image = at + np.array([omega * a_move + recentering, s2_move])
        self.points.append(image)
        self.evaluated.append(ResponseStep(at, image, a_move))
        if self.evaluated[0] is None or len(self.points) > self.memory + 1:
            del self.points[0], self.evaluated[0]
        self.reference = self.reference or evaluated.s2
        n = self.counts.sum()
        # The complete-data information of (a, s2) is held fixed, as that of the sites is.
        metric = np.array([n / self.reference, 0.5 * n / self.reference**2])
        moves = [e.image - e.at for e in self.evaluated if e is not None]
        return np.array([np.sum(moves[-1] * metric * move) for move in moves])

    def shorten(self, point: int, omega: float, recentering: float) -> None:
        """Go back to an evaluated point (-1: that of the last call), and take a shorter step from it."""
        self.base = base = self.evaluated[point] if point >= 0 else self.base
        assert base is not None
        self.points = [np.array([base.at[0] + omega * base.a_move + recentering, base.image[1]])]
        self.evaluated, self.current, self.reference = [None], base.at, 0.0


# ----------------------------------------------------------------------------------------------------
# The VFEM iteration as a protocol: its requests, and when it ends.
#
# One iteration is one round trip: each site sends the linear predictors of its entities and a few scalars,
# and receives their standardized residuals z and three sums over the entities it lacks. Between the two, the
# coordinator sends one request to the active site, which is answered locally if the coordinator is there.
#
# Only sums over sites of linear predictors, likelihoods, scores and products of steps are used. With
# :attr:`IterationOptions.masked` the sites hide their own parts: they then send linear predictors for all
# entities of the fit, zero where a site lacks them. :mod:`fedstat.models.vfem.notes` states what masks do not
# hide.

ASCENT_TOLERANCE = 1e-12
SMALLEST_STEP = 2.0**-20


@dataclass(slots=True)
class EMIteration(IterationState):
    """Accelerated steps of EM, for a normal response, from coefficients of zero or `first` by site.

    `gram` holds the inner products of the steps that may be mixed, `weights` those of the next mixture;
    `accepted` is the index of the last accepted point among them, `best` its log-likelihood. `omega` is the
    length of the step of beta; `forget` makes the sites drop an evaluation that one of them refused.
    """

    first: Mapping[str, Floats] | None = None
    points: SitePoints = field(init=False)
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

    def start(self) -> FitProtocol[None]:
        """Open the fit at every site."""
        lay = self.layout
        memory = self.options.memory if self.options.acceleration else SMALLEST_MEMORY
        common: dict[str, Any] = {"memory": memory, "padded": self.masked}
        requests = []
        for k in lay.sites:
            first: dict[str, Any] = {} if self.first is None else {"beta": self.first[k]}
            requests.append(self.request(k, "start", **self.opening(k), **common, **first))
        response = self.request(lay.active, "start_response", keep=lay.response_keep, code=lay.code)
        *replies, reply = yield [*requests, response]
        self.response = ResponsePoints(lay.counts, memory, reply.arrays["moments"])
        self.points = SitePoints(np.zeros((memory + 2, lay.n)), self.masked)
        self.points.take(lay, replies)
        if self.options.step == "gradient":
            yield from self._set_rate([r.arrays["eigenvalues"] for r in replies])

    def _set_rate(self, eigenvalues: list[Floats]) -> FitProtocol[None]:
        ends = np.array(eigenvalues)
        # The step with which gradient ascent on a quadratic contracts fastest.
        eta = self.options.learning_rate or 2.0 / (ends[:, 0].min() + ends[:, 1].max())
        yield [self.request(k, "set_rate", eta=eta) for k in self.layout.sites]

    def evaluate(self) -> FitProtocol[list[Reply] | None]:
        """Request likelihood and score at the mixed point; None if it is not admissible."""
        lay = self.layout
        eta, t = self.points.mixed(self.weights, lay)
        a, s2 = self.response.mixed(self.weights)
        v = s2 + lay.missing @ t
        if self.response.vanishing(s2, v):
            return None
        (reply,) = yield [
            self.request(lay.active, "residuals", a=a, s2=s2, eta=eta, t_missing=lay.missing @ t)
        ]
        z, z1, z2 = (reply.arrays[name] for name in ("z", "z1", "z2"))
        # For the entities that it lacks, a site receives three sums by pattern, and no row-level value.
        sums = np.column_stack([z1, z2, lay.counts / v])
        replies = yield [
            self.request(
                k,
                "step",
                weights=self.weights,
                z=z[lay.rows[k]],
                missing=lay.missing[:, j] @ sums,
                s2=s2,
                omega=self.omega,
                forget=self.forget,
            )
            for j, k in enumerate(lay.sites)
        ]
        self.forget = not all(reply.arrays["inside"] for reply in replies)
        if self.forget:
            return None
        # Only now, because a point that one site refuses must never be mixed.
        self.points.take(lay, replies)
        self.latest = EvaluatedResponse(a, s2, v, z1, z2)
        return replies

    # ---- course of the iteration --------------------------------------------------------------

    def take(self, replies: list[Reply]) -> None:
        """Record an evaluation: its likelihood and score, and the products of its step with earlier ones."""
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
        recentering = sum(float(a["recentering"]) for a in arrays)
        products = self.response.take(at, self.omega, recentering)
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
        # Near the maximum, the likelihood changes by less than its own rounding: this is not a decrease.
        slack = ASCENT_TOLERANCE * abs(self.best) + 1e-9 if np.isfinite(self.best) else 0.0
        if row.log_likelihood >= self.best - slack:
            self.best, self.accepted = max(row.log_likelihood, self.best), size - 1
            self.weights, self.move = self._mixture(), "mixed"
            if not self.options.acceleration or np.count_nonzero(self.weights) == 1:
                self.move = "plain"
            return "go"
        # A mixture is a guess, and is replaced by the plain step. The likelihood decreases there only if the
        # steps of beta, which the sites compute separately, add up to a step that is too long.
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
        """Replace an inadmissible mixture by the plain step from the last accepted point."""
        self.weights, self.move = one_hot(self.accepted, len(self.gram)), "plain"

    def shorten(self) -> FitProtocol[None]:
        """Halve the step from the last accepted point, at every site."""
        self.omega /= 2.0
        lay = self.layout
        if self.omega < SMALLEST_STEP:
            raise EstimationError(
                "the log-likelihood decreases along every step, however short; the columns are probably "
                "collinear across sites"
            )
        replies = yield [self.request(k, "shorten", point=self.accepted, omega=self.omega) for k in lay.sites]
        self.points.take(lay, replies)
        recentering = sum(float(reply.arrays["recentering"]) for reply in replies)
        self.response.shorten(self.accepted, self.omega, recentering)
        # Products with steps of another length are not comparable: the history begins again.
        self.gram, self.weights, self.move, self.accepted = np.empty((0, 0)), np.ones(1), "shortened", -1

    def ascend(self) -> FitProtocol[None]:
        """Continue to a stationary point of the observed-data likelihood."""
        failures = 0
        for _ in range(self.options.maxiter):
            replies = yield from self.evaluate()
            if replies is None:
                failures += 1
                # A mixture may overshoot; if the plain step does so too, a variance goes to zero.
                if failures > 2:
                    raise vanishing_residual(self.layout)
                self.plain()
                continue
            failures = 0
            self.take(replies)
            if self.converged:
                return
            if self.choose() == "shorten":
                yield from self.shorten()

    def estimate(self) -> FitProtocol[VFEMFit]:
        """Collect the estimates of the last evaluated point."""
        by_site = yield from self.request_estimates("estimates")
        return self.make_fit(
            by_site,
            a=self.latest.a,
            s2=self.latest.s2,
            log_likelihood=self.trace[-1].log_likelihood,
            response_moments=self.response.moments,
        )


def vanishing_residual(layout: Layout) -> EstimationError:
    """Return the error of an iteration that cannot continue."""
    complete = int(layout.counts[~layout.missing.any(axis=1)].sum())
    return EstimationError(
        f"a variance goes to zero, where the likelihood has no maximum: {complete} of the {layout.n} "
        "entities are complete, and the coefficients may reproduce their response without error",
        remedy=Remedy(
            "fit(..., iteration=fs.Iteration(init='cc'))",
            "Leave out columns or sites, or choose another start by {arguments}",
        ),
    )
