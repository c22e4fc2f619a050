"""Newton's method for the partial likelihood of one baseline hazard, from sums by interval over all sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np

from fedstat.codec import to_json
from fedstat.errors import EstimationError
from fedstat.federation.design.formula.expression import quoted_name
from fedstat.federation.design.horizontal_design import agree_coding
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.tables.columns import LevelValue
from fedstat.kernels.partial_likelihood import between, tie_sums
from fedstat.models.cox.interval_steps import IntervalRequest
from fedstat.models.cox.steps import CoxRequest
from fedstat.models.horizontal.clusters import ClusterChoice, Clustering
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.typing import Array, Floats, Matrix, Vector

POINTS, POINTS_WITHOUT_START = 4, 8
"""Coefficient vectors at which sums by interval are requested, from the stratified estimate and from zero."""
NEAR = 1e-3
"""Length of a step, in standard errors, after which the next vector is the last one."""


@dataclass(frozen=True, slots=True, eq=False)
class IntervalSums:
    """Sums over all sites at the end of T = S J intervals, at coefficients of standardized columns.

    `risk` (T, 1 + p) are S0 and S1, `tied` D0 and D1, `events` (2, T) events and their weights.
    """

    gamma: Vector
    risk: Annotated[Floats, "T k"]
    tied: Annotated[Floats, "T k"]
    events: Annotated[Floats, "2 T"]
    ties: str

    @property
    def sums(self) -> Floats:
        """Sums over the events of each interval, (T, 6); see :mod:`fedstat.kernels.partial_likelihood`."""
        d, w = self.events
        mean = np.divide(w, d, out=np.zeros(len(d)), where=d > 0.0)
        S0, D0 = self.risk[:, 0].copy(), self.tied[:, 0].copy()
        return tie_sums(S0, D0, d.copy(), mean, self.ties)

    def lacking(self, g: Floats) -> Floats:
        """Return what the information lacks of the products, each interval times g (T,): (p, p)."""
        return between(self.risk[:, 1:], self.tied[:, 1:], self.sums, g)

    def hazard(self) -> tuple[Floats, Floats, Floats]:
        """Return the hazard of each interval at mean columns, its variance, and its mean column."""
        sums = self.sums
        centers = self.risk[:, 1:] * sums[:, 3:4] - self.tied[:, 1:] * sums[:, 4:5]
        return sums[:, 1], sums[:, 3], centers


@dataclass(frozen=True, slots=True, eq=False)
class CommonFit:
    """Maximum of the partial likelihood with one baseline hazard, for standardized columns.

    `gamma` is one step from the coefficients of `at`, where the sums were requested. `edges` (J,) are the
    ends of the intervals, after those with few rows were merged; there were `requested` ones. `mean_event`
    are the means of the columns over the events.
    """

    gamma: Vector
    information: Matrix
    loglik: float
    null: float
    at: IntervalSums
    edges: Annotated[Floats, "J"]
    request: IntervalRequest
    requested: int
    trace: Annotated[Floats, "V 3"]
    converged: bool
    meat: Matrix | None
    clustering: Clustering | None
    mean_event: Vector


def secant_update(information: Floats, move: Floats, change: Floats) -> Floats:
    """Update an information by the change of the score over a move (Broyden, Fletcher, Goldfarb, Shanno)."""
    along, size = information @ move, float(change @ move)
    if not size > 0.0:
        return information
    return np.asarray(
        information + np.outer(change, change) / size - np.outer(along, along) / float(move @ along)
    )


@dataclass(slots=True, eq=False)
class CommonNewton:
    """Newton's method from the estimate with one baseline for each site."""

    session: RowsSession
    request: CoxRequest
    edges: Floats
    levels: tuple[tuple[LevelValue, ...], ...]
    scale: Floats
    shift: Floats
    trace: list[tuple[float, float, float]] = field(default_factory=list)
    ready: bool = False

    def run(
        self, gamma: Floats, points: int, cov_type: str, clusters: ClusterChoice | None
    ) -> FitProtocol[CommonFit]:
        """Sort the rows into intervals, maximize from a point, and request what the covariance needs."""
        request = IntervalRequest(self.levels, points)
        requested = len(self.edges)
        yield from self.merge(request)
        events, at_zero, columns, offset = yield from self.start(request)
        d, w = events
        mean = np.divide(w, d, out=np.zeros(len(d)), where=d > 0.0)
        null = (
            offset
            - tie_sums(at_zero[0].copy(), at_zero[1].copy(), d.copy(), mean, self.request.ties)[:, 0].sum()
        )
        ones = np.ones(len(d))
        information = np.eye(len(gamma))
        previous: tuple[float, Floats, Floats] | None = None
        for place in range(points):
            # Sums of columns at the first vector, which give the steps, and at the last, for the covariance.
            full = place in (0, points - 1) or self.ready
            at = yield from self.sum_at(gamma, events, full)
            loglik = float(columns @ gamma + offset - at.sums[:, 0].sum())
            score, products = yield from self.products(at, ones)
            if full:
                information = products - at.lacking(ones)
            elif previous is not None:
                if loglik < previous[0] - 1e-9 * (abs(previous[0]) + 1e-3):
                    gamma = (gamma + previous[1]) / 2.0
                    continue
                information = secant_update(information, gamma - previous[1], previous[2] - score)
            step = np.linalg.lstsq(information, score, rcond=1e-12)[0]
            size = float(np.sqrt(max(float(step @ score), 0.0)))
            self.trace.append((loglik, size, float(np.abs(step).max())))
            previous, gamma = (loglik, gamma, score), gamma + step
            # The last step is taken, and not evaluated: the error after it is about the square of its length.
            if place and full:
                break
            self.ready = size < NEAR
        meat, clustering = None, None
        if cov_type != "nonrobust":
            replies = yield self.session.request_all(
                "sum_residuals",
                {
                    "beta": at.gamma,
                    "risk": at.risk,
                    "tied": at.tied,
                    "events": events,
                    "cluster": np.array(clusters is not None),
                    **({} if clusters is None else clusters.arrays(information)),
                },
            )
            if clusters is None:
                meat = np.asarray(add(replies, "meat"))
            else:
                meat, clustering = clusters.added(replies)
        return CommonFit(
            gamma=gamma,
            information=information,
            loglik=loglik + size**2 / 2.0,
            null=float(null),
            at=at,
            edges=self.edges,
            request=request,
            requested=requested,
            trace=np.array(self.trace),
            converged=size < NEAR,
            meat=meat,
            clustering=clustering,
            mean_event=columns / w.sum(),
        )

    def merge(self, request: IntervalRequest) -> FitProtocol[None]:
        """Merge intervals that have too few rows at a site, until there are none or one is left."""
        while True:
            replies = yield self.session.request_all("flag_intervals", self.arrays(), to_json(request))
            small = np.flatnonzero(add(replies, "small"))
            if not len(small) or len(self.edges) == 1:
                return
            gone: list[int] = []
            for place in np.minimum(small, len(self.edges) - 2).tolist():
                # An interval that was merged just now is judged in the next round.
                if place - 1 not in gone:
                    gone.append(place)
            self.edges = np.delete(self.edges, gone)

    def arrays(self) -> dict[str, Array]:
        """Return the arrays that describe the intervals."""
        return {"scale": self.scale, "shift": self.shift, "edges": self.edges}

    def start(self, request: IntervalRequest) -> FitProtocol[tuple[Floats, Floats, Floats, float]]:
        """Sort the rows: events (2, T), S0 and D0 at zero (2, T), and sums over the events."""
        replies = yield self.session.request_all("start_intervals", self.arrays(), to_json(request))
        events = np.asarray(add(replies, "events"))
        if not events[0].any():
            raise EstimationError(
                f"there are no events up to the end of the grid, {self.edges[-1]:g}: extend it"
            )
        columns = np.asarray(add(replies, "columns"))
        return np.round(events, 9), np.asarray(add(replies, "at_risk")), columns[:-1], float(columns[-1])

    def sum_at(self, gamma: Floats, events: Floats, full: bool) -> FitProtocol[IntervalSums]:
        """Request the sums by interval at coefficients, with those of the columns if `full`."""
        replies = yield self.session.request_all("sum_intervals", {"beta": gamma, "full": np.array(full)})
        risk, tied = (np.asarray(add(replies, name)) for name in ("risk", "tied"))
        return IntervalSums(gamma, risk, tied, events, self.request.ties)

    def products(self, at: IntervalSums, g: Floats) -> FitProtocol[tuple[Floats, Floats]]:
        """Request score and products over all rows, each interval times g (T,)."""
        sums = at.sums
        arrays = {"beta": at.gamma, "at_risk": sums[:, 1], "tied": sums[:, 2], "g": g}
        replies = yield self.session.request_all("sum_products", arrays)
        return np.asarray(add(replies, "score")), np.asarray(add(replies, "products"))


@dataclass(frozen=True, slots=True, eq=False)
class IntervalChecks:
    """Sums for tests of a fit with one baseline hazard, at its last coefficients.

    `score`, `cross` and `square` are those of coefficients of x g(t); `baseline` are the sum of (O - E)^2 / E
    over the sites, and its degrees of freedom.
    """

    score: Vector
    cross: Matrix
    square: Matrix
    baseline: tuple[float, float]


def interval_checks(
    session: RowsSession, common: CommonFit, transform: Callable[[Floats], Floats]
) -> FitProtocol[IntervalChecks]:
    """Request the sums for the tests of a fit; `transform` is the function g of time."""
    at = common.at
    g = np.tile(transform(common.edges), len(at.events[0]) // len(common.edges))
    sums = at.sums
    arrays = {
        "beta": at.gamma,
        "at_risk": sums[:, 1],
        "tied": sums[:, 2],
        "g": g,
        "center": common.mean_event,
        "inverse": np.linalg.inv(common.information),
    }
    replies = yield session.request_all("check_intervals", arrays)
    score, cross, square = (np.asarray(add(replies, name)) for name in ("score", "cross", "square"))
    cross, square = cross - at.lacking(g), square - at.lacking(g**2)
    statistic, left = add(replies, "baseline").tolist()
    # The sums are those before the last step.
    score = score - cross @ (common.gamma - at.gamma)
    # The expected events of all sites are their events: one degree of freedom less.
    return IntervalChecks(score, cross, square, (statistic, left - 1.0))


def agree_strata(
    session: RowsSession, strata: Sequence[str], site_column: str
) -> FitProtocol[tuple[tuple[LevelValue, ...], ...]]:
    """Agree on the levels of the columns of strata, which the sites share with one baseline hazard."""
    if not strata:
        return ()
    question = session.agreement.question
    labels = tuple(dict.fromkeys((*question.labels, *question.columns)))
    coded = tuple(f"C({quoted_name(name)})" for name in strata)
    asked = replace(question, terms=coded, columns=tuple(strata), labels=labels, intercept=True)
    found = yield from agree_coding(asked, session.sites, session.session, site_column=site_column)
    return tuple(found.spec.levels[name] for name in strata)
