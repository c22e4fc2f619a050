"""Proximal Newton over sites: weighted Gram matrices, sums of the response, and the iteration."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from fedstat.errors import EstimationError, ModelError
from fedstat.federation.message import Request
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.masked_sums import masked_protocol as mask_sums
from fedstat.federation.protocols.secure_products import ProductOperand, SecureProductSession
from fedstat.inference.convergence import rounding_error
from fedstat.inference.recession import CERTAIN, FAR_STEPS, PART, continues, unbounded_text
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.penalized.coordinate_descent import PROXIMAL_HALVINGS, proximal_step
from fedstat.kernels.penalized.path import LinearSteps
from fedstat.kernels.penalized.penalties import Terms
from fedstat.models.vertical.exchange.protocol import (
    ColumnScales,
    dealing_sites,
    multiply_between_sites,
    own_request,
    product_operands,
    standardize_columns,
    symmetrized,
)
from fedstat.models.vertical.exchange.steps import BLOCK, RESPONSE
from fedstat.models.vertical.layout import Layout
from fedstat.models.vglm.distributions import OUTSIDE, respond_at
from fedstat.models.vglm.steps import WEIGHTED
from fedstat.progress_line import ProgressLine, open_line
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Sums of the response for Newton's method: released once, so that residuals stay with its holder.
#
# With a canonical link the score at linear predictors eta is ``X'y - X'mu(eta)``. Only the first part
# contains the response. It does not depend on eta and is computed once, from secure products of every site's
# columns with the response. The second part follows from what the coordinator knows, and reveals nothing
# about the response. For other links, the weights of residuals change from step to step, and every site
# receives the residuals; this is also done if no third party can deal for a product with the holder.


@dataclass(frozen=True, slots=True, eq=False)
class ResponseSummary:
    """Information on the response without row-level values.

    `sums` (F, p) are those of the standardized columns times the response minus its mean, by fold; None if
    residuals are sent.
    """

    distribution: DistributionSpec
    mean: float
    sums: Floats | None = None

    @property
    def step(self) -> str:
        """The request to the holder at linear predictors."""
        return "respond" if self.sums is not None else "respond_openly"

    def at(self, eta: Floats) -> tuple[Floats, Floats]:
        """Residuals as if every response were the mean, and the weights: (n,) each."""
        _, residual, weight = respond_at(self.distribution, eta, np.full(len(eta), self.mean))
        return residual, weight

    def score(self, fold: int | None = None) -> Floats:
        """Add the part of the responses to sums of columns times residuals, of a fold or of all."""
        if self.sums is None:
            return np.zeros(1)
        eta = np.asarray(self.distribution.make().link(np.array([self.mean])), dtype=np.float64)
        one = respond_at(self.distribution, eta, np.array([self.mean + 1.0]))[1]
        zero = respond_at(self.distribution, eta, np.array([self.mean]))[1]
        # The derivative of the natural parameter by the linear predictor, which is a single number here.
        return np.asarray((one - zero) * (self.sums.sum(axis=0) if fold is None else self.sums[fold]))


def request_response_sums(
    layout: Layout,
    distribution: DistributionSpec,
    units: ColumnScales,
    code: Ints,
    product_session: SecureProductSession,
) -> FitProtocol[tuple[ResponseSummary, dict[tuple[str, str], str]]]:
    """Multiply the columns with the response by fold, (n,), if residuals can then stay.

    Return the dealers.
    """
    sites, active = dealing_sites(layout), layout.active
    parts = int(code.max()) + 1
    every = np.ones((parts, len(layout.sites)), dtype=bool)
    sides = product_operands(layout, BLOCK, code, every)
    response = ProductOperand(active, RESPONSE, slice(0, 1), np.arange(layout.n), code)
    apart, own = [s for s in sides if s.site != active], [s for s in sides if s.site == active]
    sums = np.zeros((parts, 1 + layout.p))
    try:
        for side in apart:
            product_session.dealer(side.site, active, sites)
    except ModelError:
        return ResponseSummary(distribution, units.mean), {}
    if not distribution.canonical:
        return ResponseSummary(distribution, units.mean), {}
    if own:
        replies = yield [own_request(layout, side, parts, product_session) for side in own]
        for side, reply in zip(own, replies, strict=True):
            sums[:, side.place] = reply.arrays["products"]
    pairs = [(side, response) for side in apart]
    multiplied = yield from product_session.multiply(pairs, sites, parts, layout.n)
    for one in multiplied:
        sums[:, one.a.place] = one.products[:, :, 0]
    dealers = {(min(one.a.site, active), max(one.a.site, active)): one.dealer for one in multiplied}
    return ResponseSummary(distribution, units.mean, units.sd * sums[:, 1:]), dealers


# ----------------------------------------------------------------------------------------------------
# Weighted sums of products of all columns, for a step of Newton's method.


def request_weighted_gram(
    layout: Layout, weight: Floats, columns: Bools, product_session: SecureProductSession
) -> FitProtocol[tuple[Floats, dict[tuple[str, str], str]]]:
    """Obtain ``(1, X)' W (1, X) / n``, (p + 1, p + 1), with X standardized; also return the dealers.

    Products of `columns` (p,) alone are requested; all others are zero.
    """
    chosen = np.append(True, columns)
    ends = np.cumsum(chosen)
    every = np.ones((1, len(layout.sites)), dtype=bool)
    sides = [
        replace(side, place=slice(int(ends[side.place.start - 1]), int(ends[side.place.stop - 1])))
        for side in product_operands(layout, WEIGHTED, np.zeros(layout.n, dtype=np.int64), every)
    ]
    sides = [side for side in sides if side.width]
    products = np.zeros((1, ends[-1], ends[-1]))
    products[0, 0, 0] = weight.sum()
    # For a canonical link, weights depend only on linear predictors, and reveal nothing about the response.
    replies = yield [
        product_session.request(
            side.site, "weigh", weight=weight, columns=np.flatnonzero(columns[layout.places()[side.site]])
        )
        for side in sides
    ]
    for side, reply in zip(sides, replies, strict=True):
        products[0, 0, side.place] = reply.arrays["sums"]
        products[0, side.place, side.place] = reply.arrays["gram"]
    dealers = yield from multiply_between_sites(layout, sides, products, product_session)
    H = np.zeros((layout.p + 1, layout.p + 1))
    H[np.ix_(chosen, chosen)] = symmetrized(products)[0] / layout.n
    return H, dealers


# ----------------------------------------------------------------------------------------------------
# Steps of proximal Newton over sites, from a point to stationary points of some problems.

MOST_STEPS = 100
"""Largest number of Newton steps for one lambda."""
MOST_LASSOS = 100
MAXIMUM = 1e-10
"""Score at which a likelihood counts as maximal, in units of a residual."""
SLOW = 0.5
"""Share of the violation that a step may leave before a new Hessian is requested."""
SolvedT = TypeVar("SolvedT")


@dataclass(frozen=True, slots=True, eq=False)
class LossPoint:
    """Coefficients b of (1, X T), (p + 1,), with the values that were computed there.

    `loss` is half the mean deviance, `score` (p + 1,) its negative gradient; weight and linear predictor are
    those of every entity, (n,), `squares` and `pearson` the sums of squared residuals, without and with
    division by the weights.
    """

    b: Floats
    loss: float
    score: Floats
    weight: Floats
    eta: Floats
    squares: float
    pearson: float


@dataclass(slots=True, eq=False)
class LossOracle:
    """The sites, the coordinates, and the number of releases.

    Linear predictors are masked if `use_masks`. T (p, p) changes the coordinates of the standardized columns,
    `unit` is that of the linear predictor, and therefore of the coefficients, `tol` the score at which a
    likelihood counts as maximal. `code` (n,) are folds, and `response` is what is known of it. `left`
    weighted Gram matrices may still be released, in addition to the one for standard errors; `points` linear
    predictors and `grams` matrices were released; `dealers` dealt for pairs of sites.
    """

    layout: Layout
    product_session: SecureProductSession
    use_masks: bool
    T: Floats
    left: int
    unit: float = 1.0
    tol: float = MAXIMUM
    points: int = 0
    grams: int = 0
    dealers: Mapping[tuple[str, str], str] = field(default_factory=dict)
    code: Ints | None = None
    response: ResponseSummary = field(init=False)

    def begin(self, distribution: DistributionSpec) -> FitProtocol[ColumnScales]:
        """Standardize the columns, and obtain the sums of the response that are released once."""
        layout, code = self.layout, self.code
        units = yield from standardize_columns(layout, distribution, self.product_session)
        folds = np.zeros(layout.n, dtype=np.int64) if code is None else code
        reported = yield from request_response_sums(layout, distribution, units, folds, self.product_session)
        self.response, self.dealers = reported
        return units

    def request(self, site: str, step: str, text: str = "", **arrays: Any) -> Request:
        """Address one step."""
        return self.product_session.request(site, step, text, **arrays)

    def evaluate(self, b: Floats, highest: float = np.inf) -> FitProtocol[LossPoint | None]:
        """Go to a point; None if the loss is above `highest` minus the penalty of `b`.

        Also None if an entity has no mean.
        """
        layout, self.points = self.layout, self.points + 1
        parts = layout.split(self.T @ b[1:])
        replies = yield [self.request(k, "linear_predictor", beta=parts[k]) for k in layout.sites]
        eta = self.unit * (b[0] + np.sum([reply.arrays["linear_predictor"] for reply in replies], axis=0))
        eta = eta if layout.offset is None else eta + layout.offset
        response = self.response
        bound: dict[str, Any] = (
            {"highest": highest} if response.sums is not None and np.isfinite(highest) else {}
        )
        (reply,) = yield [self.request(layout.active, response.step, eta=eta, **bound)]
        loss, (total, squares, pearson) = float(reply.arrays["loss"]), reply.arrays["sums"].tolist()
        # Before scores are requested: for a point that is not accepted, no sum of columns is released.
        if loss >= OUTSIDE or not loss <= highest:
            return None
        of_mean, weight = self.expected(eta)
        residual = reply.arrays.get("residual", of_mean)
        replies = yield [self.request(k, "sum_scores", residual=residual) for k in layout.sites]
        score = (np.concatenate([reply.arrays["scores"] for reply in replies]) + response.score()) @ self.T
        score = self.unit * np.concatenate([[total], score]) / layout.n
        return LossPoint(b, loss, score, weight, eta, squares, pearson)

    def expected(self, eta: Floats) -> tuple[Floats, Floats]:
        """Residuals as if every response were the mean, and weights, times those of entities: (n,) each."""
        residual, weight = self.response.at(eta)
        case = self.layout.relative
        return case * residual, case * weight

    def hessian(self, point: LossPoint, at: Ints | None = None) -> FitProtocol[Floats]:
        """Obtain the information divided by n at a point: for all of b, or only for its coordinates `at`."""
        self.left, self.grams = self.left - 1, self.grams + 1
        columns = np.ones(self.layout.p, dtype=np.bool_)
        if at is not None:
            columns = (self.T[:, at[at > 0] - 1] != 0.0).any(axis=1)
        H, dealers = yield from request_weighted_gram(
            self.layout, point.weight, columns, self.product_session
        )
        self.dealers = {**self.dealers, **dealers}
        return self.unit**2 * self.turned(H)

    def masked(self, protocol: FitProtocol[SolvedT]) -> FitProtocol[SolvedT]:
        """Run a part of the protocol with masked linear predictors, if they must be masked."""
        return (
            mask_sums(protocol, self.layout.sites, self.product_session.session)
            if self.use_masks
            else protocol
        )

    def turned(self, H: Floats) -> Floats:
        """Convert a matrix of (1, X) to the coordinates of the oracle."""
        return np.asarray(self.turn.T @ H @ self.turn)

    @property
    def turn(self) -> Floats:
        """(1, T), block diagonal: (p + 1, p + 1)."""
        turn = np.eye(len(self.T) + 1)
        turn[1:, 1:] = self.T
        return turn


@dataclass(frozen=True, slots=True, eq=False)
class CertifiedPoint:
    """A point of the path with its certificate."""

    point: LossPoint
    violation: float


@dataclass(slots=True, eq=False)
class ProximalNewton:
    """Iteration over some problems, each from the solution of the one before.

    A problem is the penalty at one lambda, of the coefficients `at` of (1, X T); the others are zero. It ends
    at a violation of `unit`. H (p + 1, p + 1) is the Hessian as far as it is known. With `linearize`, local
    linear approximation is used for nonconvex penalties: those of `only`, the last of which is certified, or
    all to the fixed point.
    """

    oracle: LossOracle
    problems: list[Terms]
    at: Ints
    unit: float
    point: LossPoint
    H: Floats
    linearize: bool
    only: LinearSteps | None = None
    found: list[CertifiedPoint] = field(default_factory=list)
    model: Terms | None = None
    fresh: bool = False
    steps: int = 0
    lassos: int = 0
    line: ProgressLine | None = None
    moves: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)

    def run(self) -> FitProtocol[list[CertifiedPoint]]:
        """Solve all problems."""
        oracle, L = self.oracle, len(self.problems)
        # A single problem is one of the proposals, which are already counted.
        with open_line("lambda", L) if L > 1 else nullcontext() as self.line:
            while True:
                if (yield from oracle.masked(self._descend())):
                    return self.found
                self.H = yield from oracle.hessian(self.point, self.at)
                self.fresh = True

    def _descend(self) -> FitProtocol[bool]:
        """Continue with the present Hessian; False if another one is needed."""
        while len(self.found) < len(self.problems):
            model = self._model()
            before = self._violation(model)
            if before <= self.unit or self.steps >= MOST_STEPS:
                self._settle(model)
                continue
            moved = yield from self._step(model, before)
            # If a step leaves most of the violation, the present Hessian does not belong to this point.
            stale = not moved or self._violation(model) > SLOW * before
            # The Hessian belongs to this point, so the penalty's concave part caused the failure; its tangent
            # is above it.
            if not moved and self.fresh:
                moved = yield from self._step(model.linearized(self.point.b[self.at]), before)
                if not moved:
                    self.steps = MOST_STEPS
            self.steps, self.fresh = self.steps + 1, self.fresh and not moved
            if stale and not self.fresh and self.oracle.left > 0:
                return False
            if not moved:
                self.steps = MOST_STEPS
        return True

    def _model(self) -> Terms:
        """Return the penalty of the present step."""
        if self.model is None:
            terms = self.problems[len(self.found)]
            first = np.zeros(len(self.at)) if self.only is None else self.only.start[self.at]
            self.model = terms.linearized(first) if self.linearize else terms
        return self.model

    def _violation(self, terms: Terms) -> float:
        return terms.violation(self.point.b[self.at], -self.point.score[self.at])

    def _settle(self, model: Terms) -> None:
        """Accept the point for the present problem, or linearize its penalty there and continue."""
        terms = self.problems[len(self.found)]
        if self.only is None:
            violation, most = self._violation(terms), MOST_LASSOS
            again = self.linearize and violation > self.unit and self._violation(model) <= self.unit
        else:
            violation, most = self._violation(model), self.only.number - 1
            again = violation <= self.unit
        # Continue with the tangent at the lasso's solution; a fixed number of steps may end anywhere.
        if again and self.lassos < most:
            self.model, self.steps, self.lassos = terms.linearized(self.point.b[self.at]), 0, self.lassos + 1
            return
        self.found.append(CertifiedPoint(self.point, violation))
        self.model, self.steps, self.lassos = None, 0, 0
        self.moves.clear()
        self.lengths.clear()
        if self.line is not None:
            self.line.step()

    def _step(self, model: Terms, violation: float) -> FitProtocol[bool]:
        """Take one step of proximal Newton, until the objective decreases; False if it does not."""
        at, b, point = self.at, self.point.b[self.at], self.point
        H, score = self.H[np.ix_(at, at)], point.score[at]
        new, decrease = proximal_step(H, score, b, model, tol=max(0.01 * violation, 0.1 * self.unit))
        if not (model.level.any() or model.ridge.any()):
            yield from self._refuse_recession(new - b, decrease)
        current = point.loss + model.value(b)
        for halving in range(PROXIMAL_HALVINGS):
            t = 0.5**halving
            inner = new if halving == 0 else b + t * (new - b)
            full = np.zeros(len(point.b))
            full[at] = inner
            # Armijo's rule, with an allowance for the rounding of the loss.
            bound = current - 1e-4 * t * decrease + 1e-13 * abs(current) - model.value(inner)
            reached = yield from self.oracle.evaluate(full, bound)
            if reached is not None:
                self._learn(reached)
                return True
        return False

    def _refuse_recession(self, step: Floats, decrease: float) -> FitProtocol[None]:
        """Raise EstimationError if the likelihood does not fall far beyond steps that do not shrink.

        See :mod:`fedstat.inference.recession`; without a penalty, coefficients may go to infinity.
        """
        n = self.oracle.layout.n
        self.lengths.append(float(np.sqrt(max(2.0 * n * decrease, 0.0))))
        self.moves.append(float(np.abs(step).max(initial=0.0)))
        if not (continues(self.moves, self.lengths) and self.lengths[-1] < CERTAIN):
            return
        full = self.point.b.copy()
        for length in min(1.0 / self.lengths[-1], FAR_STEPS) / np.array([1.0, 3.0]):
            full[self.at] = self.point.b[self.at] + length * step
            highest = self.point.loss + rounding_error(n * self.point.loss, n) / n
            if (yield from self.oracle.evaluate(full, highest)) is not None:
                whole = np.zeros(len(full))
                whole[self.at] = step
                change = np.abs(self.oracle.turn @ whole)[1:]
                names = self.oracle.layout.names
                growing = np.flatnonzero(change > PART * change.max(initial=0.0))
                raise EstimationError(unbounded_text([names[j] for j in growing]))

    def _learn(self, reached: LossPoint) -> None:
        """Go to a point, and update the curvature on the way (BFGS), because a Hessian costs far more."""
        s, y = reached.b - self.point.b, self.point.score - reached.score
        along = self.H @ s
        # H stays positive definite only if the curvature along the step is positive.
        if s @ y > 1e-10 * (s @ along) > 0.0:
            self.H = self.H - np.outer(along, along) / (s @ along) + np.outer(y, y) / (s @ y)
        self.point = reached


def solve(
    oracle: LossOracle,
    problems: list[Terms],
    point: LossPoint,
    H: Floats,
    unit: float,
    *,
    linearize: bool = False,
    at: Ints | None = None,
    only: LinearSteps | None = None,
) -> FitProtocol[list[CertifiedPoint]]:
    """Solve some problems, each from the solution of the one before; see :class:`ProximalNewton`."""
    moving = np.arange(len(point.b)) if at is None else at
    newton = ProximalNewton(
        oracle=oracle,
        problems=problems,
        at=moving,
        unit=unit,
        point=point,
        H=H.copy(),
        linearize=linearize,
        only=only,
    )
    return (yield from newton.run())
