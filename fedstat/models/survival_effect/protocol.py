"""The coordinator of the effect of a treatment on times: propensity, curves, hazard ratios, errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from fedstat.codec import to_json
from fedstat.errors import EstimationError
from fedstat.federation.message import Reply
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.tables.columns import LevelValue
from fedstat.inference.stacked import two_step_products
from fedstat.models.descriptive.protocol import choose_intervals, open_table, request_of, with_ends_apart
from fedstat.models.descriptive.steps import FAMILY as DESCRIPTIVE
from fedstat.models.horizontal.clusters import Clustering, SharedLabels
from fedstat.models.horizontal.session import add
from fedstat.models.rows.newton import LikelihoodNewton, LikelihoodSums
from fedstat.models.rows.predictors import standardized_point
from fedstat.models.survival_effect.estimates import (
    NO_MAXIMUM,
    WeightedCells,
    curve_functionals,
    hazard_ratios,
    remaining_times,
)
from fedstat.models.survival_effect.steps import WEIGHING, SurvivalEffectRequest
from fedstat.models.treatment.protocol import FEW_ROWS, StagedSolution, TreatmentNewton
from fedstat.models.treatment.steps import TreatmentRequest
from fedstat.typing import Array, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Ends of the intervals that the analyst requested, (R,), and times with errors (M,)."""

    ends: Annotated[Floats, "R"]
    times: Annotated[Floats, "M"]

    def places(self, ends: Floats) -> Ints:
        """Return the places of the times among the ends of intervals: the last end that is not later."""
        found = np.searchsorted(ends, self.times * (1.0 + 1e-9), side="right") - 1
        return np.unique(found[found >= 0]).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SurvivalEffectFit:
    """Estimates of curves and hazard ratios, and their covariance.

    `estimates` (E,) are functionals of the incidence of each event in each arm, by arm, event and functional
    (values at `places` of the ends, then the area up to `until`), and after them the logarithms of the hazard
    ratios of the arms. `cov` (E, E) accounts for the estimated weights, `known` (E, E) takes them as known.
    `spread` (A, 3) has the sums of weights, of their squares and fourth powers by arm. `theta` and
    `theta_cov` are the coefficients of the models of the weights.
    """

    treatment: TreatmentRequest
    request: SurvivalEffectRequest
    levels: Annotated[tuple[LevelValue, ...], "A"]
    arms: Annotated[Floats, "A a"]
    spread: Annotated[Floats, "A s"]
    cells: WeightedCells | None
    requested: Annotated[Floats, "R"]
    least: int
    over_sites: bool
    places: tuple[int, ...]
    until: float
    estimates: Annotated[Floats, "E"]
    cov: Annotated[Floats, "E E"]
    known: Annotated[Floats, "E E"]
    names: Annotated[tuple[str, ...], "Q"]
    theta: Annotated[Floats, "Q"]
    theta_cov: Annotated[Floats, "Q Q"]
    converged: bool
    masked: bool
    clustering: Clustering | None = None
    shared: tuple[SharedLabels, ...] = ()


@dataclass(slots=True, eq=False)
class HazardNewton(LikelihoodNewton[LikelihoodSums]):
    """Newton's method for the weighted partial likelihood of the arms, with baselines of the sites' own."""

    def evaluate(self, point: dict[str, Array]) -> FitProtocol[LikelihoodSums | None]:
        """Request the sums over the risk sets at logarithms of hazard ratios."""
        return self.read((yield self.session.request_all("sum_hazards", point, to_json(self.request))))


class SurvivalNewton(TreatmentNewton):
    """The propensity model, then curves and hazard ratios of the weighted rows."""

    def estimate(self, times: SurvivalEffectRequest, grid: Grid | None) -> FitProtocol[SurvivalEffectFit]:
        """Choose intervals, fit the propensity model, and request sums of weights and of influences."""
        session = self.session
        requested = ends = edges = np.zeros(0) if grid is None else grid.ends
        counts = weights = np.zeros((0, 0, 0))
        places, least, over_sites = np.zeros(0, dtype=np.int64), 1, False
        # 1. Intervals in which no cell has few rows, and their counts: as for curves without weights.
        if grid is not None:
            table = replace(session, family=DESCRIPTIVE)
            yield from open_table(table, request_of(table, (self.request.arm,), weighted=True))
            intervals = yield from choose_intervals(table, grid.ends)
            ends, least, over_sites = intervals.ends, intervals.least, intervals.over_sites
            edges = with_ends_apart(ends, intervals.apart)
            taken = {"edges": edges, "earlier": intervals.earlier, "requested": grid.ends}
            counts = np.asarray(add((yield table.request_all("count_times", taken)), "cells"))
            places = grid.places(ends)
        # 2. The models of the weights.
        solution, _ = yield from self.begin(local=False)
        chain = solution.chain
        information = np.zeros_like(solution.back)
        for stage in WEIGHING:
            if stage in chain.equations.stages:
                information += (yield from self.solve(solution, stage)).information
        Q = chain.places[chain.equations.weighing.stop - 1].stop
        information, back = information[:Q, :Q], solution.back[:Q, :Q]
        point = standardized_point(solution.design, solution.theta)
        # 3. Sums of weights by cell, and hazard ratios.
        cells = None
        if grid is not None:
            weights = np.asarray(add((yield session.request_all("sum_cells", point)), "weights"))
            cells = WeightedCells(edges, weights, counts)
        ratios, bread = yield from self.log_ratios(times, point, cells, solution)
        # 4. Derivatives and products of the influences of all rows.
        until = float(ends[-1]) if len(ends) else 0.0
        remaining = remaining_times(ends, requested, until)
        arrays = point | {
            "log_ratios": ratios,
            "weights": weights,
            "counts": counts,
            "places": places,
            "remaining": remaining,
        }
        replies = yield session.request_all("sum_influences", arrays, to_json(times))
        cov, known = covariance(replies, information, bread)
        clustering = self.clustered(replies, 1)
        if clustering is not None:
            cov, known = cov * clustering.factor, known * clustering.factor
        values = ratios
        if cells is not None:
            functionals = curve_functionals(places, remaining)
            values = np.append((cells.incidence @ functionals.T).ravel(), ratios)
        inverse, scores = np.linalg.inv(information), add(replies, "products")[-Q:, -Q:]
        return SurvivalEffectFit(
            treatment=self.request,
            request=times,
            clustering=clustering,
            shared=solution.shared,
            levels=chain.levels,
            arms=solution.arms,
            spread=np.asarray(add(replies, "spread")),
            cells=cells,
            requested=requested,
            least=least,
            over_sites=over_sites,
            places=tuple(places.tolist()),
            until=until,
            estimates=values,
            cov=cov,
            known=known,
            names=tuple(chain.names(solution.design.names)[:Q]),
            theta=back @ solution.theta[:Q],
            theta_cov=back @ inverse @ scores @ inverse @ back.T,
            converged=solution.converged,
            masked=session.masked,
        )

    def log_ratios(
        self,
        times: SurvivalEffectRequest,
        point: dict[str, Array],
        cells: WeightedCells | None,
        solution: StagedSolution,
    ) -> FitProtocol[tuple[Floats, Floats]]:
        """Return logarithms of hazard ratios, and the inverse information by which scores are influences."""
        if not times.own:
            assert cells is not None
            return hazard_ratios(cells, times.ties)[0], np.zeros((0, 0))
        start = np.zeros(len(solution.chain.levels) - 1)
        newton = HazardNewton(self.session, times, self.maxiter, self.tol)

        def at(ratios: Floats) -> dict[str, Array]:
            return point | {"log_ratios": ratios}

        total = yield from newton.evaluate(at(start))
        if total is None:
            raise EstimationError(FEW_ROWS)
        if not (np.diag(total.information) > 0.0).all():
            raise EstimationError(NO_MAXIMUM)
        found, total, _, converged = yield from newton.ascend(
            at,
            start,
            total,
            n=float(np.trace(total.information)),
            at_infinity=lambda *_: EstimationError(NO_MAXIMUM),
            stuck=NO_MAXIMUM,
        )
        solution.converged = solution.converged and converged
        return found, np.asarray(np.linalg.inv(total.information), dtype=np.float64)


def covariance(replies: list[Reply], information: Floats, bread: Floats) -> tuple[Floats, Floats]:
    """Return the covariance of the estimates with estimated weights, and with known ones, (K, K).

    The influence of a row is ``phi + D I^-1 psi`` with the derivatives D, and information I and scores psi of
    the propensity model. The last estimates are scores, which the inverse information `bread` takes to
    influences.
    """
    slopes, products = (np.asarray(add(replies, name)) for name in ("slopes", "products"))
    K, J = len(slopes), len(bread)
    unit = np.eye(K)
    unit[K - J :, K - J :] = bread
    stacked = two_step_products(products, slopes, information)
    return unit @ stacked @ unit.T, unit @ products[:K, :K] @ unit.T
