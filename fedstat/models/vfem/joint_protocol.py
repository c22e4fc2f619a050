"""Joint maximum likelihood of correlated columns and a non-normal response, with the covariance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from fedstat.errors import EstimationError
from fedstat.federation.disclosure.row_checks import MIN_ENTITIES_PER_EQUATION
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.running_sums import ColumnOpening
from fedstat.federation.protocols.secure_products import ProductOperand
from fedstat.inference.recession import require_bounded
from fedstat.models.vertical.exchange.patterns import PatternExchange, value_names
from fedstat.models.vertical.exchange.protocol import dealing_sites
from fedstat.models.vertical.joint_normal.assumption_tests import BetweenChoice, choose_between
from fedstat.models.vertical.joint_normal.edges import Between, edges_between, not_determined
from fedstat.models.vertical.joint_normal.fit import (
    JointNormalFit,
    all_effects,
    fit_joint_normal,
    inverse_information,
)
from fedstat.models.vertical.joint_normal.likelihood import (
    FreeParameters,
    JointNormalPoint,
    joint_normal_covariance,
)
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vertical.pattern_merging import min_entities
from fedstat.models.vfem.covariance.cross_products import STAGES, product_session
from fedstat.models.vfem.covariance.from_moments import FROM_MOMENTS
from fedstat.models.vfem.covariance.information import PsiCovariance
from fedstat.models.vfem.iteration.glm_protocol import (
    UNDISPERSED,
    UNREACHED,
    GLMPoint,
    QuasiNewtonIteration,
    split_by_site,
)
from fedstat.models.vfem.iteration.glm_steps import seal_all
from fedstat.models.vfem.iteration.quasi_newton import QuasiNewtonMemory, quasi_newton
from fedstat.models.vfem.iteration.site_state import ALPHAS
from fedstat.models.vfem.iteration.state import BLOCK, SQUARES, NormalModel, VFEMFit
from fedstat.models.vfem.joint_likelihood import (
    MissingModel,
    ResponseSums,
    columns_alone,
    columns_derivatives,
    columns_likelihood,
    missing_model,
    response_information,
    response_score,
    without_scale,
)
from fedstat.typing import Array, Bools, Floats

# ----------------------------------------------------------------------------------------------------
# Joint maximum likelihood if columns are correlated between sites and the response is not normal.
#
# The coordinator has the moments of the columns by missing pattern, and all parameters. One iteration takes
# three round trips: to the sites with the coefficients of every pattern, to the response holder with the sum
# of the linear predictors, and to the sites for the sums of their columns with the derivatives there, by
# pattern. The method is that of :mod:`fedstat.models.vfem.iteration.quasi_newton` with one party, and starts
# with the information at the mean weight of each pattern. The first point is the joint normal model of
# columns and response.

LEAST_PATTERN = 16
"""Rounds allowed per entity of the smallest pattern: each round reveals one equation in a column's values
there.

A fit takes about eight rounds.
"""
LEAST_OF_ALPHA = 16
"""Further entities if alpha is estimated, which takes more iterations, and two rounds afterwards."""
ALPHA_ROUNDS = 2
"""Further rounds that the information on alpha needs: scores at a larger and at a smaller alpha."""
ALPHA_STEP = 1e-3
"""Half the distance of their logarithms. The error of a central difference is of the order of its square."""
NEAR = 1e-6
"""Relative score that is accepted if the smallest pattern allows no more rounds."""


@dataclass(frozen=True, slots=True, eq=False)
class JointPoint(GLMPoint):
    """An evaluated point: the model, and the distribution of missing columns in each pattern."""

    joint: JointNormalPoint
    missing: MissingModel
    boxes: tuple[Array, ...]


@dataclass(slots=True)
class JointIteration(QuasiNewtonIteration):
    """Steps of a quasi-Newton method on all parameters, which the coordinator has.

    The layout is that after small patterns were merged; `exchange` has its moments.
    """

    exchange: PatternExchange = field(kw_only=True)
    between: Between | None = field(kw_only=True, default=None)
    choice: BetweenChoice | None = field(init=False, default=None)
    linear: JointNormalFit = field(init=False)
    alone_moments: PatternMoments = field(init=False)
    moves: FreeParameters = field(init=False)
    joint: JointPoint = field(init=False)
    sums: ResponseSums = field(init=False)
    largest: float = field(init=False)
    limit: str = ""
    factor: tuple[Floats, Floats] = field(init=False)
    by_alpha: Floats | None = None
    weighing: Floats = field(init=False)

    def __post_init__(self) -> None:
        moments = reorder_patterns(self.exchange.moments, ~self.layout.missing[:, self.layout.unit])
        if self.between is None:
            self.choice = choose_between(moments)
            self.between = self.choice.between if self.choice else "free"
        self.moves = all_effects(edges_between(moments, self.between))
        self.linear = fit_joint_normal(moments, self.moves.edges)
        self.alone_moments = columns_alone(self.linear.moments)
        # The disclosure checks at the sites refuse more rounds than this; their decision is final.
        some = np.flatnonzero(moments.seen.any(axis=1))
        smallest = int(some[moments.n[some].argmin()])
        entities = int(moments.n[smallest])
        most = entities // MIN_ENTITIES_PER_EQUATION - self.further
        if most < self.options.maxiter:
            lacks = dict.fromkeys(
                what
                for what, seen in zip(value_names(self.layout), moments.seen[smallest], strict=True)
                if not seen
            )
            self.options = replace(self.options, maxiter=most)
            self.limit = (
                f"the smallest missing pattern has {entities} "
                f"entities{' without ' + ', '.join(lacks) if lacks else ''}, which allows {most} iterations"
            )
            self.remedy = (
                f"{'leave out ' + ' or '.join(lacks) + ', or ' if lacks else ''}make the partition with "
                f"min_count={2 * entities}, which merges this pattern with another one"
            )
        n, sd = moments.nobs, float(self.linear.moments.scale[-1])
        own = self.linear.log_likelihood + n * np.log(sd)
        # Without an effect, the models of the columns and of the response (with variance one) are separate.
        self.largest = float(self.linear.joint - own - 0.5 * n * (np.log(2.0 * np.pi) + 1.0))

    @property
    def further(self) -> int:
        """Return the rounds of scores that follow the iterations."""
        return ALPHA_ROUNDS * (self.estimates_alpha and self.curved)

    @property
    def seen(self) -> Bools:
        """Return which columns each pattern observes, (G, P)."""
        return self.alone_moments.seen

    def _openings(self) -> list[ColumnOpening]:
        lay, openings = self.layout, []
        for k, p in zip(lay.sites, lay.sizes, strict=True):
            if k == lay.active:
                continue
            code, rows = lay.code[lay.rows[k]], lay.rows[k]
            squares = np.flatnonzero(self.alone(k))
            for g in np.unique(code):
                only = np.flatnonzero(code == g)
                rounds = self.options.maxiter + 1 + self.curved + self.further
                openings.append(ColumnOpening(k, f"{BLOCK} {g}", 1 + p, only, rows[only], rounds))
                width = (p + 1) * (p + 2) // 2
                if self.curved and g in squares and len(only) >= min_entities(width, self.min_count):
                    openings.append(ColumnOpening(k, f"{SQUARES} {g}", width, only, rows[only], 1))
        return openings

    @property
    def sealed(self) -> list[tuple[str, str]]:
        """Return columns as they were opened, and the site of each of the sums that an evaluation seals."""
        return [(one.columns, one.site) for one in self.openings if not is_squares(one.columns)]

    def start(self) -> FitProtocol[None]:
        """Evaluate the normal model, with coefficients in the scale of the linear predictor at the mean."""
        self.memory = QuasiNewtonMemory(self.options.memory)
        family, moments = self.distribution.make(), self.linear.moments
        at = self.linear.point.with_concentration()
        intercept = float(family.link(np.array([self.mean]))[0])
        slope = float(family.link.deriv(np.array([self.mean]))[0]) * float(moments.scale[-1])
        joint = JointNormalPoint(at.mu, intercept, slope * at.beta, 1.0, at.Q)
        log_alpha = np.log([self.distribution.alpha or 1.0]) if self.estimates_alpha else np.zeros(0)
        while True:
            point = yield from self._at(joint, log_alpha, 0.0, -np.inf)
            if point is not None:
                break
            joint = replace(joint, beta=0.5 * joint.beta)
        self.point = self.joint = point

    def _at(
        self, joint: JointNormalPoint, log_alpha: Floats, change: float, needed: float
    ) -> FitProtocol[JointPoint | None]:
        """Evaluate a model; None if it is not admissible, or its log-likelihood is below the required one.

        `log_alpha` (1,) is estimated, or empty.
        """
        lay, places = self.layout, self.layout.places()
        if len(log_alpha) and not ALPHAS[0] <= log_alpha[0] <= ALPHAS[1]:
            self.at_the_edge = True
            return None
        try:
            of_columns = columns_likelihood(self.alone_moments, joint) - self.largest
            missing = missing_model(joint, self.seen)
        except np.linalg.LinAlgError:
            return None
        replies = yield [
            self.request(k, "joint_predict", slopes=missing.slopes[:, places[k]], code=lay.code[lay.rows[k]])
            for k in lay.sites
        ]
        more = {} if needed == -np.inf else {"lowest": needed - of_columns}
        if len(log_alpha):
            more["alpha"] = float(np.exp(log_alpha[0]))
        (reply,) = yield [
            self.request(
                lay.active,
                "glm_evaluate",
                json.dumps(self.sealed),
                predictor=joint.a + np.sum([reply.arrays["linear_predictor"] for reply in replies], axis=0),
                center=-missing.slopes @ joint.mu,
                spread=np.maximum(missing.variance, 0.0),
                **more,
            )
        ]
        own = reply.arrays
        if not own["inside"]:
            self.at_the_edge = True
        if "sums" not in own:
            return None
        log_likelihood = float(own["log_likelihood"]) + of_columns
        return JointPoint(
            own=np.concatenate([[joint.a], joint.beta, joint.mu, joint.Q[self.moves.entries], log_alpha]),
            log_likelihood=log_likelihood,
            change=change,
            sums=own["sums"],
            shown={},
            of_alpha=own.get("of_alpha", np.zeros(0)),
            joint=joint,
            missing=missing,
            boxes=tuple(split_by_site(own)),
        )

    def _evaluate(
        self, at: Floats, weights: Sequence[Mapping[str, Any]], length: float, needed: float = -np.inf
    ) -> FitProtocol[GLMPoint | None]:
        move, d = at - self.point.own, len(at) - self.estimates_alpha
        joint = self.moves.step(self.joint.joint, np.insert(move[:d], 1, 0.0))
        return (yield from self._at(joint, at[d:], float(np.abs(move).max()), needed))

    def _coefficients(self) -> FitProtocol[Floats]:
        """Return the coefficients of the accepted point, which the coordinator has."""
        yield from ()
        return self.joint.joint.beta

    def take(self) -> FitProtocol[None]:
        """Accept the evaluated point: request the sums of the columns, and combine the next direction."""
        assert isinstance(self.point, JointPoint)
        self.joint = at = self.point
        self.first_information = self.first_information or at.information
        self.sums = yield from self._sums(at)
        score = response_score(at.joint, at.missing, self.sums, self.seen, self.moves.edges)
        score += columns_derivatives(self.alone_moments, at.joint, self.moves.edges).score
        self.factor = self._information(self.sums)
        self.memory.take(at.own, np.append(without_scale(score), at.of_alpha[:1]))
        sy, yhy = self.memory.products(self._scale)
        self.weights, self.slope = quasi_newton(sy, yhy)
        self.enter(
            at.log_likelihood,
            float(np.sqrt(yhy[-1, -1] / self.layout.n)),
            at.change if self.trace else np.inf,
            "quasi-Newton" if self.trace else "start",
        )
        if self.limit and not self.converged and len(self.trace) == self.options.maxiter:
            self.converged, self.reason = self.trace[-1].score <= NEAR, self.limit

    def _sums(self, at: JointPoint, *, weighed: bool = True) -> FitProtocol[ResponseSums]:
        """Request from every site the sums of its columns with L_m by pattern.

        If they are `weighed`, also request what the approximate information needs.
        """
        lay, places = self.layout, self.layout.places(1)
        requests = []
        for k in lay.sites:
            own = {"code": lay.code[lay.rows[k]], "patterns": len(lay.counts)}
            names, shown = sealed_boxes_by_site(k, self.sealed, at.boxes)
            requests.append(self.request(k, "joint_score", names, **own, **shown))
        if weighed:
            requests.append(self.request(lay.active, "joint_weights", patterns=len(lay.counts)))
        replies = list((yield requests))
        if weighed:
            self.weighing = replies.pop().arrays["sums"]
        first = np.zeros((len(lay.counts), 1 + lay.p))
        first[:, 0] = at.sums[:, 0]
        for k, reply in zip(lay.sites, replies, strict=True):
            first[:, places[k]] = reply.arrays["sums"][:, 1:]
        return ResponseSums(first, at.sums[:, 1], at.sums[:, 2])

    def _information(self, sums: ResponseSums) -> tuple[Floats, Floats]:
        """Factor an approximate information, which affects the path but not the solution.

        If the approximate observed information is not positive definite, terms with expectation zero are left
        out.
        """
        at, seen, edges = self.joint, self.seen, self.moves.edges
        curvatures = approximate_curvatures(
            self.linear.moments.grams, at.missing.slopes, sums.h, self.weighing[:, :-1]
        )
        for expected in (False, True):
            if expected:
                curvatures[:, :-1, -1] = curvatures[:, -1, :-1] = 0.0
                curvatures[:, -1, -1] = at.sums[:, 3]
            own = columns_derivatives(self.alone_moments, at.joint, edges, expected=expected).information
            first = None if expected else sums
            own += response_information(at.joint, at.missing, curvatures, seen, edges, first)
            own = without_scale(own)
            root = np.sqrt(np.maximum(np.diag(own), np.finfo(float).tiny))
            try:
                return root, np.tril(cho_factor(own / np.outer(root, root), lower=True)[0])
            except np.linalg.LinAlgError:
                continue
        raise not_determined(self.linear.moments, at.joint.Q)

    def _scale(self, score: Floats) -> Floats:
        root, factor = self.factor
        d = len(root)
        own = cho_solve((factor, True), (score[..., :d] / root).T).T / root
        of_alpha = score[..., d:] / np.maximum(self.joint.of_alpha[1:], 1.0)
        return np.concatenate([own, of_alpha], axis=-1)

    def _differentiate_by_alpha(self) -> FitProtocol[None]:
        """Compute the information on log alpha and all parameters, from scores at two other values."""
        at, scores = self.joint, []
        for sign in (1.0, -1.0):
            point = yield from self._at(at.joint, at.own[-1:] + sign * ALPHA_STEP, 0.0, -np.inf)
            if point is None:
                raise EstimationError(UNDISPERSED)
            sums = yield from self._sums(point, weighed=False)
            score = response_score(at.joint, at.missing, sums, self.seen, self.moves.edges)
            scores.append(np.append(score, point.of_alpha[:1]))
        # The response holder has the last point that was tried; fitted values are those of the accepted one.
        yield from self._at(at.joint, at.own[-1:], 0.0, UNREACHED)
        self.by_alpha = (scores[1] - scores[0]) / (2.0 * ALPHA_STEP)

    def estimate(self) -> FitProtocol[VFEMFit]:
        """Return the estimates of the accepted point in the units of the data."""
        distribution = self.distribution
        if self.estimates_alpha:
            distribution = replace(distribution, alpha=float(np.exp(self.joint.own[-1])))
        if self.further:
            yield from self._differentiate_by_alpha()
        lay, joint, moments = self.layout, self.joint.joint, self.linear.moments
        shift, scale = moments.center[:-1], moments.scale[:-1]
        beta, mu = joint.beta / scale, shift + scale * joint.mu
        Sigma = joint.covariates * np.outer(scale, scale)
        places = lay.places()
        return VFEMFit(
            a=joint.a,
            s2=1.0,
            beta={k: beta[here] for k, here in places.items()},
            mu={k: mu[here] for k, here in places.items()},
            t={k: float(beta[here] @ Sigma[here, here] @ beta[here]) for k, here in places.items()},
            log_likelihood=self.joint.log_likelihood,
            trace=tuple(self.trace),
            converged=self.converged,
            reason=self.reason,
            remedy=self.remedy,
            distribution=distribution,
            null=float(self.null),
            estimates_alpha=self.estimates_alpha,
            joint=NormalModel(
                np.append(mu, joint.a),
                joint_normal_covariance(Sigma, beta, 0.0),
                self.moves.edges,
                self.between or "free",
            ),
        )


def approximate_curvatures(grams: Floats, slopes: Floats, h: Floats, weights: Floats) -> Floats:
    """Approximate sums by pattern of second derivatives with (1, x, .)(1, x, .)': (G, P + 2, P + 2).

    `grams` are those of (1, x, y); `h` (G,) and `weights` (G, 5) are sums of derivatives, with powers of the
    linear predictor s = d'(x - its mean). For normal columns, everything but q s, with q = Cov(x) d / Var(s),
    is independent of s, and derivatives depend on x through s alone.
    """
    out = np.zeros_like(grams)
    n, (h1, h2, c0, c1, vv) = grams[:, 0, 0], weights.T
    mean = grams[:, 0, 1:-1] / n[:, None]
    S = grams[:, 1:-1, 1:-1] / n[:, None, None] - mean[:, :, None] * mean[:, None, :]
    Sd = np.einsum("gij,gj->gi", S, slopes)
    spread = np.sum(Sd * slopes, axis=1)
    q = np.where(spread[:, None] > 0.0, Sd / np.where(spread > 0.0, spread, 1.0)[:, None], 0.0)
    out[:, 0, 0], out[:, -1, -1] = h, vv
    out[:, 0, 1:-1] = h[:, None] * mean + h1[:, None] * q
    out[:, 1:-1, -1] = c0[:, None] * mean + c1[:, None] * q
    out[:, 0, -1] = c0
    out[:, 1:-1, 0], out[:, -1, :-1] = out[:, 0, 1:-1], out[:, :-1, -1]
    both = mean[:, :, None] * q[:, None, :]
    out[:, 1:-1, 1:-1] = (
        h[:, None, None] * (S + mean[:, :, None] * mean[:, None, :])
        + h1[:, None, None] * (both + both.transpose(0, 2, 1))
        + (h2 - h * spread)[:, None, None] * q[:, :, None] * q[:, None, :]
    )
    return out


def reorder_patterns(moments: PatternMoments, seen: Bools) -> PatternMoments:
    """Reorder moments to the patterns of a layout with columns `seen` (G, P)."""
    places = {tuple(row): g for g, row in enumerate(moments.seen.tolist())}
    order = [places[tuple(row)] for row in seen.tolist()]
    return replace(moments, seen=seen, n=moments.n[order], grams=moments.grams[order])


def is_squares(columns: str) -> bool:
    """Whether these are squares and products, opened for the information."""
    return columns.partition(" ")[0] == SQUARES


def sealed_boxes_by_site(
    site: str, sealed: Sequence[tuple[str, str]], boxes: Sequence[Array]
) -> tuple[str, dict[str, Array]]:
    """Select the values sealed for a site, with the names of the columns; empty if there are none."""
    own = [(columns, box) for (columns, k), box in zip(sealed, boxes, strict=True) if k == site]
    shown = {} if not own else seal_all(box for _, box in own)
    return json.dumps([columns for columns, _ in own]), shown


# ----------------------------------------------------------------------------------------------------
# The covariance of the joint estimates: the requests for the observed information of all parameters.


def joint_estimates_covariance(iteration: JointIteration) -> FitProtocol[PsiCovariance]:
    """Invert the observed information of (a, beta, mu, Q) at the accepted point.

    Returns the covariance of (a, 0, beta_1, mu_1, ..., beta_K, mu_K, Q).
    """
    curvatures = yield from request_curvatures(iteration)
    information, joint = information_of(iteration, curvatures)
    if iteration.by_alpha is not None:
        # Inverting what remains after alpha accounts for its estimation.
        cross, own = iteration.by_alpha[:-1], iteration.by_alpha[-1]
        if not own > 0.0:
            raise EstimationError(UNDISPERSED)
        information = information - np.outer(cross, cross) / own
    # The second place is that of a residual variance, which these responses do not have.
    own = np.delete(np.arange(2 + iteration.layout.p), 1)
    require_bounded(information[np.ix_(own, own)], ["Intercept", *iteration.layout.names])
    return PsiCovariance(inverse_information(joint, information, scale=False), FROM_MOMENTS)


def information_of(iteration: JointIteration, curvatures: Floats) -> tuple[Floats, JointNormalFit]:
    """Assemble the information (d, d), and the model at the accepted point, which names its parameters."""
    at, edges, seen = iteration.joint, iteration.moves.edges, iteration.seen
    information = response_information(at.joint, at.missing, curvatures, seen, edges, iteration.sums)
    information += columns_derivatives(iteration.alone_moments, at.joint, edges).information
    moments = iteration.linear.moments
    # The linear predictor has no unit.
    unit = replace(moments, scale=np.append(moments.scale[:-1], 1.0))
    model = replace(iteration.linear.model, moments=unit)
    return information, replace(iteration.linear, model=model, point=at.joint)


def request_curvatures(iteration: JointIteration) -> FitProtocol[Floats]:
    """Sum second derivatives with (1, x, .)(1, x, .)' by pattern, (G, P + 2, P + 2)."""
    lay, places = iteration.layout, iteration.layout.places(1)
    patterns = len(lay.counts)
    wanted = [(one.columns, one.site) for one in iteration.openings]
    each = released_to_sites(iteration)
    (reply,) = yield [
        iteration.request(lay.active, "joint_curvature", json.dumps(wanted), patterns=patterns, each=each)
    ]
    boxes, h, requests = split_by_site(reply.arrays), reply.arrays["h"], []
    for k in lay.sites:
        names, shown = sealed_boxes_by_site(k, wanted, boxes)
        own: Mapping[str, Array] = {} if k == lay.active else {"h": h[lay.rows[k]], **shown}
        code = lay.code[lay.rows[k]]
        requests.append(iteration.request(k, "joint_information", names, code=code, patterns=patterns, **own))
    replies = yield requests
    out = np.zeros((patterns, lay.p + 2, lay.p + 2))
    out[:, 0, 0], out[:, 0, -1], out[:, -1, -1] = reply.arrays["sums"].T[:3]
    for k, one in zip(lay.sites, replies, strict=True):
        here, grams, cross = places[k], one.arrays["grams"], one.arrays["cross"]
        out[:, 0, here], out[:, here, here] = grams[:, 0, 1:], grams[:, 1:, 1:]
        out[:, here, -1] = cross[:, 1:]
    yield from multiply_weighted(iteration, out)
    upper = np.triu(out)
    return upper + np.triu(out, 1).transpose(0, 2, 1)


def released_to_sites(iteration: JointIteration) -> Bools:
    """Return in which patterns curvatures are released one by one, (G,).

    Two or more sites observe these patterns, or a single site has so few entities there that sums of squares
    would reveal as much.
    """
    lay = iteration.layout
    each: Bools = lay.seen_at.sum(axis=1) > 1
    squares = {one.columns.partition(" ")[2] for one in iteration.openings if is_squares(one.columns)}
    for one in iteration.openings:
        number = one.columns.partition(" ")[2]
        if one.columns.startswith(BLOCK) and number not in squares:
            each[int(number)] = True
    return each


def multiply_weighted(iteration: JointIteration, out: Floats) -> FitProtocol[None]:
    """Enter products of two sites' weighted columns by pattern above the diagonal."""
    lay, seen = iteration.layout, iteration.layout.seen_at
    together, places = seen.sum(axis=1) > 1, lay.places(1)
    sides = []
    for k, rows in lay.rows.items():
        code = np.where(together[lay.code[rows]], lay.code[rows], -1)
        sides.append(ProductOperand(k, STAGES[0], places[k], rows, code, supports=lay.supports(k)))
    pairs = [
        (sides[j], sides[k]) for j, k in combinations(range(len(sides)), 2) if (seen[:, j] & seen[:, k]).any()
    ]
    requester = product_session(lay, iteration.session, iteration.at)
    multiplied = yield from requester.multiply(pairs, dealing_sites(lay), len(seen), lay.n)
    for one in multiplied:
        out[:, one.a.place, one.b.place] = one.products
