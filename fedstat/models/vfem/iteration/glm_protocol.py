"""The protocol of the quasi-Newton iterations of VFEM for a response that is not normal.

A quasi-Newton method maximizes the observed-data likelihood; every site keeps its own part of the method
(:mod:`fedstat.models.vfem.iteration.quasi_newton`). One iteration takes two round trips to the sites. In the
first, each site receives the sums of its columns with the derivatives at the response holder, and returns
inner products. In the second, it receives the coefficients of a direction, and returns the linear predictors
there. Only sums over sites of linear predictors, inner products and log-likelihoods are needed, so masks may
hide each site's part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedstat.errors import EstimationError, ModelError
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.key_agreement import agree_keys
from fedstat.federation.protocols.running_sums import ColumnOpening, RunningSums
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.inference.convergence import rounding_error
from fedstat.inference.recession import CERTAIN, FAR_STEPS, continues, unbounded_text
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.vertical.exchange.protocol import dealing_sites
from fedstat.models.vertical.pattern_merging import min_entities
from fedstat.models.vfem.iteration.quasi_newton import DirectionWeights, QuasiNewtonMemory, quasi_newton
from fedstat.models.vfem.iteration.site_state import ALPHAS
from fedstat.models.vfem.iteration.state import BLOCK, FAMILY, SQUARES, IterationState, VFEMFit
from fedstat.typing import Array, Bools, Floats

SUFFICIENT = 1e-4
UNREACHED = 1e300
"""A log-likelihood that no point has, in a message: the point is set, and no sums are released."""
ROUNDING = 1e-12
SHORTEST = 2.0**-30
MOST_EDGES = 3
"""Iterations in a row that were shortened because linear predictors grew beyond all bounds."""
COLLAPSE = 1e-6
"""Share of the first information on the intercept that remains when fitted means approach 0 and 1."""
GROWTH = 1.2
"""Least factor by which a coefficient that goes to infinity grows after its direction was suspected."""

NO_EXCESS = ALPHAS[0] + np.log(2.0)
UNDISPERSED = "alpha goes to zero: the counts vary no more than Poisson counts; use family Poisson"


@dataclass(frozen=True, slots=True)
class GLMPoint:
    """An evaluated point: intercept, likelihood, and the values that are sent to the sites.

    `own` is the intercept, for standardized columns, and if the alpha of a negative binomial is estimated its
    logarithm; `of_alpha` (2,) has the score of the latter and the sum of its squares. The log-likelihood is
    that of response and blocks, `change` the largest since the accepted point. `sums` (G, 4) are those of
    L_m, L_v, -L_mm and L_v^2 by pattern, and `shown` is what the response holder has sealed for a site.
    """

    own: Floats
    log_likelihood: float
    change: float
    sums: Floats
    shown: Mapping[str, Array]
    of_alpha: Floats

    @property
    def intercept(self) -> float:
        """Intercept of standardized columns."""
        return float(self.own[0])

    @property
    def information(self) -> float:
        """Information on the intercept."""
        return float(self.sums[:, 2].sum())

    @property
    def score(self) -> Floats:
        """Score of the coordinator's own parameters."""
        return np.append(self.sums[:, 0].sum(), self.of_alpha[:1])

    @property
    def informations(self) -> Floats:
        """Information on each of these; for log alpha that of its scores, which increases with alpha."""
        return np.append(self.information, np.maximum(self.of_alpha[1:], 1.0))


@dataclass(slots=True)
class QuasiNewtonIteration(IterationState):
    """Steps of a quasi-Newton method, for a response that is not normal.

    The intercept belongs to no site: `memory` is the coordinator's own part of the method. `edges` counts the
    iterations in a row that were shortened because a linear predictor grew beyond all bounds. `lengths` are
    the steps in standard errors, `earlier` the coefficients when steps first did not shrink. The coordinator
    is `at` a site or at none. It has log alpha in addition to the intercept if alpha is estimated
    (`estimates_alpha`). `curved`: curvatures will be requested, as sums over `min_count` entities or more.
    `dealers` deal for each site and the response holder; None if no third party can, and the values that
    otherwise stay at the response holder are then sent.
    """

    distribution: DistributionSpec = field(kw_only=True)
    at: str | None = None
    curved: bool = True
    estimates_alpha: bool = False
    min_count: int = 5
    dealers: dict[str, str] | None = None
    openings: Sequence[ColumnOpening] = ()
    mean: float = 0.0
    null: float = 0.0
    memory: QuasiNewtonMemory = field(init=False)
    point: GLMPoint = field(init=False)
    weights: DirectionWeights = field(init=False)
    slope: float = 0.0
    first_information: float = 0.0
    at_the_edge: bool = False
    edges: int = 0
    lengths: list[float] = field(default_factory=list)
    earlier: Floats | None = None

    def maximize(self) -> FitProtocol[VFEMFit]:
        """Maximize the observed-data likelihood."""
        # With keys of all sites, which replace those of the masks.
        yield from self._open()
        return (yield from self.hide(self._complete()))

    def _open(self) -> FitProtocol[None]:
        """Open the fit at every site, and the columns for sums with what stays at the response holder."""
        lay, options = self.layout, self.options
        sites, sums = dealing_sites(lay), self._running()
        try:
            self.dealers = sums.dealers(sites)
        except ModelError:
            self.dealers = None
        if self.dealers:
            yield from agree_keys(sites, self.session)
        requests = [self.request(k, "glm_start", **self.opening(k), memory=options.memory) for k in lay.sites]
        response: dict[str, Any] = {"keep": lay.response_keep, "code": lay.code}
        if self.estimates_alpha:
            response["estimated"] = 1
        requests.append(
            self.request(lay.active, "glm_start_response", self.distribution.to_json(), **response)
        )
        *_, reply = yield requests
        self.mean, self.null = reply.arrays["null"].tolist()
        if self.dealers:
            yield from sums.begin(self.dealers)
            self.openings = sums.openings

    def _running(self) -> RunningSums:
        lay = self.layout
        return RunningSums(
            SecureProductSession(FAMILY, self.session, self.at), lay.active, self._openings(), lay.n
        )

    def _openings(self) -> list[ColumnOpening]:
        """List what all sites except the response holder open for sums with the values that it keeps."""
        lay, openings = self.layout, []
        for k, p in zip(lay.sites, lay.sizes, strict=True):
            if k == lay.active:
                continue
            rows = lay.rows[k]
            # In addition to every iteration, the covariance needs one for each client that may lack them.
            rounds = self.options.maxiter + 1 + (len(lay.sites) + self.estimates_alpha) * self.curved
            openings.append(ColumnOpening(k, BLOCK, 1 + p, np.arange(len(rows)), rows, rounds))
            alone = np.flatnonzero(self.alone(k)[lay.code[rows]])
            width = (p + 1) * (p + 2) // 2
            if self.curved and len(alone) >= min_entities(width, self.min_count):
                openings.append(ColumnOpening(k, SQUARES, width, alone, rows[alone], 1))
        return openings

    @property
    def sealed(self) -> list[tuple[str, str]]:
        """Return columns as they were opened, and the site of each of the sums that an evaluation seals."""
        return [(BLOCK, k) for k in self.dealers or ()]

    def alone(self, site: str) -> Bools:
        """Return which patterns have this site's columns and no others: (G,)."""
        seen = self.layout.seen_at
        return np.asarray(seen[:, self.layout.sites.index(site)] & (seen.sum(axis=1) == 1))

    def start(self) -> FitProtocol[None]:
        """Evaluate coefficients of zero."""
        lay = self.layout
        self.memory = QuasiNewtonMemory(self.options.memory)
        # If all coefficients are zero, the maximum over the intercept is known.
        own = self.distribution.make().link(np.array([self.mean]))
        if self.estimates_alpha:
            own = np.append(own, np.log(self.distribution.alpha or 1.0))
        zero = {"of_steps": np.zeros(0), "of_scores": np.zeros(1)}
        point = yield from self._evaluate(own, [zero] * len(lay.sites), 0.0)
        assert point is not None
        self.point = point

    def _evaluate(
        self, at: Floats, weights: Sequence[Mapping[str, Any]], length: float, needed: float = -np.inf
    ) -> FitProtocol[GLMPoint | None]:
        """Evaluate the likelihood along the direction; None if the point is not admissible.

        Also None if the log-likelihood is below the required one; `at` are the coordinator's own parameters.
        """
        if len(at) > 1 and not ALPHAS[0] <= at[1] <= ALPHAS[1]:
            self.at_the_edge = True
            return None
        lay = self.layout
        replies = yield [
            self.request(k, "glm_move", length=length, **w) for k, w in zip(lay.sites, weights, strict=True)
        ]
        arrays = [reply.arrays for reply in replies]
        if not all(a["inside"] for a in arrays):
            return None
        of_blocks = sum(float(a["log_likelihood"]) for a in arrays)
        more = {} if needed == -np.inf else {"lowest": needed - of_blocks}
        if len(at) > 1:
            more["alpha"] = float(np.exp(at[1]))
        # Missing blocks enter by their pattern: the mean and the variance of the absent linear predictors.
        (reply,) = yield [
            self.request(
                lay.active,
                "glm_evaluate",
                json.dumps(self.sealed),
                predictor=at[0] + np.sum([a["linear_predictor"] for a in arrays], axis=0),
                center=lay.missing @ np.array([float(a["center"]) for a in arrays]),
                spread=lay.missing @ np.array([float(a["spread"]) for a in arrays]),
                **more,
            )
        ]
        reported = reply.arrays
        if not reported["inside"]:
            self.at_the_edge = True
        if "sums" not in reported:
            return None
        shown: dict[str, Array] = {}
        if self.dealers:
            shown = dict(zip(self.dealers, split_by_site(reported), strict=True))
        return GLMPoint(
            own=at,
            log_likelihood=float(reported["log_likelihood"]) + of_blocks,
            change=max(float(a["change"]) for a in arrays),
            sums=reported["sums"],
            shown=shown,
            of_alpha=reported.get("of_alpha", np.zeros(0)),
        )

    def _residuals(self) -> FitProtocol[dict[str, dict[str, Any]]]:
        """Send every site the sums of its columns: sealed, or unsealed if no third party can deal."""
        lay = self.layout
        if self.dealers is not None:
            return {k: {"shown": shown} for k, shown in self.point.shown.items()}
        (reply,) = yield [self.request(lay.active, "glm_residuals")]
        return {k: {"z": reply.arrays["z"][lay.rows[k]]} for k in lay.sites if k != lay.active}

    def take(self) -> FitProtocol[None]:
        """Accept the evaluated point: request products of scores, and combine the next direction."""
        lay, at = self.layout, self.point
        self.memory.take(at.own, at.score)
        self.first_information = self.first_information or at.information
        reported = yield from self._residuals()
        replies = yield [
            self.request(
                k,
                "glm_score",
                missing=lay.missing[:, j] @ at.sums,
                h=~lay.missing[:, j] @ at.sums[:, 2],
                **reported.get(k, {}),
            )
            for j, k in enumerate(lay.sites)
        ]
        sy, yhy = self.memory.products(self._scale)
        sy = sy + np.sum([reply.arrays["sy"] for reply in replies], axis=0)
        yhy = yhy + np.sum([reply.arrays["yhy"] for reply in replies], axis=0)
        self.weights, self.slope = quasi_newton(sy, yhy)
        # The first point has no change, which must not count as convergence.
        self.enter(
            at.log_likelihood,
            float(np.sqrt(yhy[-1, -1] / lay.n)),
            at.change if self.trace else np.inf,
            "quasi-Newton" if self.trace else "start",
        )

    def _scale(self, score: Floats) -> Floats:
        return np.asarray(score / self.point.informations)

    def move(self) -> FitProtocol[bool]:
        """Follow the direction until the log-likelihood has increased enough; False if it does not."""
        weights = {"of_steps": self.weights.steps, "of_scores": self.weights.scores}
        own = self.memory.direction(self.weights, self._scale)
        before, length, self.at_the_edge = self.point, 1.0, False
        # Near the maximum, the likelihood changes by less than its own rounding.
        slack = ROUNDING * abs(before.log_likelihood)
        while length >= SHORTEST:
            at = before.own + length * own
            needed = before.log_likelihood + SUFFICIENT * length * self.slope - slack
            point = yield from self._evaluate(at, [weights] * len(self.layout.sites), length, needed)
            if point is not None:
                self.point = point
                self.edges = self.edges + 1 if self.at_the_edge else 0
                return True
            length /= 2.0
        # The sites hold the last point that was tried; the estimates are those of the accepted one.
        yield from self._evaluate(before.own, [weights] * len(self.layout.sites), 0.0, UNREACHED)
        return False

    def separated(self) -> bool:
        """Whether linear predictors diverge: no variance of the response is left, or no bound holds."""
        # Fitted means of 0 or 1 leave no information on the intercept.
        collapsed = self.point.information < COLLAPSE * self.first_information
        return bool(collapsed or self.edges >= MOST_EDGES)

    def _recede(self) -> FitProtocol[bool]:
        """Examine a direction far beyond the next step if steps do not shrink; True if the point moves there.

        Raises EstimationError if the likelihood does not fall on the way; see
        :mod:`fedstat.inference.recession`.
        """
        if not continues([row.change for row in self.trace], self.lengths):
            return False
        if self.earlier is None:
            self.earlier = yield from self._coefficients()
        weights = {"of_steps": self.weights.steps, "of_scores": self.weights.scores}
        before, edges = self.point, self.at_the_edge
        own = self.memory.direction(self.weights, self._scale)
        needed = before.log_likelihood - rounding_error(before.log_likelihood, self.layout.n)
        for length in min(1.0 / self.lengths[-1], FAR_STEPS) / np.array([1.0, 3.0]):
            point = yield from self._evaluate(
                before.own + length * own, [weights] * len(self.layout.sites), length, needed
            )
            if point is not None:
                break
        self.at_the_edge = edges
        if point is None:
            return False
        if self.lengths[-1] < CERTAIN:
            raise (yield from self._separation())
        self.point = point
        return True

    def _coefficients(self) -> FitProtocol[Floats]:
        """Request the coefficients of the accepted point, (p,)."""
        by_site = yield from self.request_estimates("glm_estimates")
        return np.concatenate([by_site[k]["beta"] for k in self.layout.sites])

    def _separation(self) -> FitProtocol[EstimationError]:
        """Make the error for a likelihood without a maximum, with the columns whose coefficients grow."""
        names: Sequence[str] = self.layout.names
        if self.earlier is not None:
            now = yield from self._coefficients()
            grown = np.abs(now) > GROWTH * np.abs(self.earlier)
            names = [name for name, grows in zip(names, grown, strict=True) if grows] or names
        return EstimationError(unbounded_text(names))

    def ascend(self) -> FitProtocol[None]:
        """Continue to a stationary point of the observed-data likelihood.

        Raises EstimationError if the likelihood has no maximum.
        """
        for _ in range(self.options.maxiter):
            yield from self.take()
            self.lengths.append(float(np.sqrt(max(self.slope, 0.0))))
            if self.converged:
                return
            if self.estimates_alpha and self.point.own[-1] < NO_EXCESS:
                raise EstimationError(UNDISPERSED)
            if self.separated():
                raise (yield from self._separation())
            if (yield from self._recede()):
                continue
            moved = yield from self.move()
            if not moved:
                self.reason = "no step increases the log-likelihood"
                return

    def estimate(self) -> FitProtocol[VFEMFit]:
        """Collect the estimates of the accepted point."""
        by_site = yield from self.request_estimates("glm_estimates")
        distribution = self.distribution
        if self.estimates_alpha:
            distribution = replace(distribution, alpha=float(np.exp(self.point.own[1])))
        # The intercept was that of standardized columns.
        beta0 = self.point.intercept - sum(float(a["shift"]) for a in by_site.values())
        return self.make_fit(
            by_site,
            a=beta0 + sum(float(a["mu"] @ a["beta"]) for a in by_site.values()),
            s2=1.0,
            log_likelihood=self.point.log_likelihood,
            distribution=distribution,
            null=float(self.null),
            estimates_alpha=self.estimates_alpha,
        )


def split_by_site(arrays: Mapping[str, Array]) -> list[Array]:
    """Split a reply into its sealed messages; None if nothing was sealed."""
    if "shown" not in arrays:
        return []
    return list(np.split(arrays["shown"], np.cumsum(arrays["lengths"])[:-1]))
