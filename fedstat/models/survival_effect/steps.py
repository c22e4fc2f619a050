"""Steps of a site for the effect of a treatment on times: weighted rows by cell and risk set, and influences.

A row has the weight of its arm by the propensity model. Curves need the sums of weights of the cells whose
rows :func:`fedstat.models.descriptive.steps.count_times` counted, and nothing else of single cells. Errors
need sums over all rows of an arm: with estimates k of influence ``phi_ik = w_i g_k``, the derivatives by
the coefficients of the propensity model are ``sum_i g_k dw_i``, and the covariance follows from sums of
products of ``phi_i`` and of the scores of the propensity model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, control
from fedstat.kernels.partial_likelihood import TIES, PartialLikelihood, RiskTable
from fedstat.kernels.treatment import ALL, MEMBERSHIP, PROPENSITY
from fedstat.models.descriptive.steps import CELLS, cells_of, counted_over_sites
from fedstat.models.horizontal.overlap import spread_of
from fedstat.models.horizontal.rows import SUMS, summed
from fedstat.models.rows.objective import STANDARDIZED, RowsWithWeights
from fedstat.models.rows.steps import SPREAD, rows_in
from fedstat.models.survival_effect.estimates import WeightedCells, cell_influences, curve_functionals, ratio
from fedstat.models.treatment.steps import CLUSTERS, FAMILY, ArmRows, SiteTreatment
from fedstat.typing import Array, Floats, Ints

MOST_TIMES = 12
"""Times of a curve with errors: each is a sum over all rows of an arm for every column."""
SLACK = 1e-9
"""Relative rounding error of the sums of a site in those of all sites."""


@dataclass(frozen=True, slots=True)
class SurvivalEffectRequest:
    """Treatment of tied events, columns of strata, and which estimates there are.

    `own` states that each site has a baseline hazard of its own, `common` that all have one; `curves` that
    there are curves.
    """

    ties: str = "efron"
    strata: tuple[str, ...] = ()
    own: bool = True
    curves: bool = False
    common: bool = False

    def check(self) -> None:
        """Refuse unknown ways to treat ties."""
        if self.ties not in TIES:
            raise MessageError(f"ties: expected one of {', '.join(TIES)}")


REQUESTED = control("treatment of ties, strata and estimates", common=True)
LOG_RATIOS = aggregate("logarithms of the hazard ratios of the arms", common=True)
CURVES = (*SUMS, *CELLS)
WEIGHING = (PROPENSITY, MEMBERSHIP)
"""Stages of the models of the weights."""


@dataclass(frozen=True, eq=False)
class WeightedTimes:
    """The rows of a site with the weights of the propensity model at the site's own parameters."""

    site: SiteTreatment
    own: bytes

    @cached_property
    def whole(self) -> ArmRows:
        """All rows of the site."""
        return ArmRows(*map(np.concatenate, zip(*self.site.chunks(), strict=True)))

    @cached_property
    def times(self) -> Floats:
        """Times, (n, 2)."""
        return np.concatenate([rows.times for rows, _ in self.site.opened.chunks() if rows.times is not None])

    @property
    def outcome(self) -> Ints:
        """Outcome of each row, (n,)."""
        if self.drawn:  # each outcome in each arm
            return np.arange(len(self.arm)) // len(self.site.levels) % self.outcomes
        return self.whole.y.astype(np.int64)

    @property
    def drawn(self) -> bool:
        """Whether the rows are those of a dry run, and no rows of a table."""
        return not len(self.site.opened.used)

    @property
    def outcomes(self) -> int:
        """Outcomes of a row: none, and each event."""
        survival = self.site.opened.question.survival
        return 1 + max(len(survival.causes) if survival else 0, 1)

    @property
    def arm(self) -> Ints:
        """Arm of each row, (n,)."""
        return self.whole.arm

    @cached_property
    def weighted(self) -> tuple[Floats, Floats, Floats]:
        """Weights (n,), their derivatives by the predictors, and residuals of the models, (n, W)."""
        site, own, sampled = self.site, np.frombuffer(self.own), self.whole.weight
        w, slopes, _, _ = site.equations.weights(site.predictors(self.whole, own), self.arm)
        residuals = np.sum([site.at(stage).residuals(own) for stage in WEIGHING], axis=0)
        return w * sampled, slopes * sampled[:, None], residuals[:, self.group]

    @property
    def group(self) -> slice:
        """Predictors of the weights."""
        return self.site.equations.weighing

    @property
    def by_arm(self) -> Floats:
        """Weights in the column of the arm of each row, zero in others, (n, A)."""
        inside = self.arm[:, None] == np.arange(len(self.site.levels))
        return np.asarray(inside * self.weighted[0][:, None])

    def by_column(self, factors: Floats) -> Floats:
        """Return factors (n, W) times the columns of the models of the weights, (n, Q)."""
        X, blocks = self.whole.X, self.site.chain.columns[self.group]
        return np.hstack([factors[:, [k]] * X[:, block] for k, block in enumerate(blocks)])

    # -- risk sets of the site --------------------------------------------------------------------

    def likelihood(self, request: SurvivalEffectRequest, log_ratios: Floats) -> PartialLikelihood:
        """Return the weighted partial likelihood of the arms, with the rows at risk within strata."""
        code = self.site.codes(request.strata) if request.strata else None
        start, stop = self.times.T
        table = RiskTable.of(start, stop, self.outcome > 0, self.weighted[0], code)
        X = (self.arm[:, None] == np.arange(1, len(self.site.levels))).astype(np.float64)
        return PartialLikelihood.at(table, X, X @ log_ratios, request.ties)

    # -- cells of all sites -----------------------------------------------------------------------

    def cells(self, edges: Floats) -> tuple[Ints, ...]:
        """Return arm, interval and outcome of each row."""
        return self.arm, np.searchsorted(edges, self.times[:, 1]), self.outcome

    def by_cell(self, edges: Floats, values: Floats | None = None) -> Floats:
        """Sum values (n,), or count the rows, by arm, interval and outcome: (A, L, O)."""
        shape = len(self.site.levels), len(edges) + 1, self.outcomes
        code = np.ravel_multi_index(self.cells(edges), shape)
        found = np.bincount(code, values, int(np.prod(shape))).astype(np.float64)
        return np.asarray(found.reshape(shape))


def weighted_rows(data: SiteData, state: State, **point: Floats) -> tuple[WeightedTimes, Floats]:
    """Return the weighted rows at a point, and the matrix from coefficients of weights to own ones."""
    site = rows_in(state, SiteTreatment)
    if not site.opened.question.has_times or not site.equations.weighs:
        raise MessageError(f"{data.name}: the model opened no times, or has no propensity model")
    own, to_own = site.place(**point)
    rows = WeightedTimes(site, own.tobytes())
    Q = site.chain.places[rows.group.stop - 1].stop
    return rows, to_own[:Q, :Q]


MOST_VECTORS = 2**31
"""Weights of rows at a point, which multiply columns and no products of columns."""
POINTS = "treatment times: points"
"""Weights of rows at the points of a session."""


def report_vectors(state: State, rows: WeightedTimes, key: Any, vectors: Floats) -> None:
    """Report the weights (n, k) by which columns are multiplied in a release."""
    kept = state.look_at(POINTS) if POINTS in state else (None, {})
    known = kept[1] if kept[0] is rows.site.opened else {}
    known = known | {key: vectors}
    opened, n = rows.site.opened, len(vectors)

    def weights(point: Any) -> Floats:
        # A point of earlier steps is that of a stage.
        return known[point] if point in known else rows.site.at(point[1]).vectors(np.frombuffer(point[0]))

    block = RowsWithWeights(weights, rows.whole.X, slice(None), single=MOST_VECTORS)
    state.report(
        *rows.site.at(ALL).cuts(np.frombuffer(rows.own)),
        facts.WorkingWeights(lambda: np.abs(vectors.T)),
        facts.ScoreAndInformation(opened, n, key, lambda: iter([block]), among=opened.places),
    )
    state.keep(POINTS, (opened, known))


def counted_edges(data: SiteData, state: State, rows: WeightedTimes) -> Floats:
    """Return the ends of the intervals on which the same rows were counted in this session."""
    cells, places = cells_of(state), rows.site.opened.places
    if not len(cells.counted) or not (rows.drawn or np.array_equal(cells.rows, places)):
        raise MessageError(f"{data.name}: no times of these rows were counted; request 'count_times' first")
    return cells.counted


@step(
    FAMILY,
    "sum_scores",
    takes=STANDARDIZED,
    releases={"weights": summed("sums of weights by arm, interval and outcome", 3, behind=CURVES)},
)
def sum_cells(data: SiteData, state: State, **point: Floats) -> dict[str, Array]:
    """Sum the weights of the cells that were counted: ``weights`` (A, J + 1, 1 + C)."""
    rows, _ = weighted_rows(data, state, **point)
    edges, w = counted_edges(data, state, rows), rows.weighted[0]
    report_vectors(state, rows, ("weights", rows.own), rows.by_arm)
    if not counted_over_sites(data, state):
        # A site's own sums: no row may have nearly all weight of a cell.
        state.report(facts.WorkingWeights(partial(_weights_of_cells, rows, edges)))
    return {"weights": rows.by_cell(edges, w)}


def _weights_of_cells(rows: WeightedTimes, edges: Floats) -> Floats:
    place, L = rows.cells(edges), len(edges) + 1
    code = (place[0] * L + place[1]) * rows.outcomes + place[2]
    return np.asarray((np.unique(code)[:, None] == code) * rows.weighted[0])


@step(
    FAMILY,
    "sum_scores sum_cells sum_hazards",
    takes={**STANDARDIZED, "log_ratios": LOG_RATIOS},
    request=SurvivalEffectRequest,
    requests=REQUESTED,
    releases={
        "spread": SPREAD,
        "score": summed("score of the weighted partial likelihood"),
        "information": summed("its information", 2),
        "loglik": summed("weighted partial log-likelihood", 0),
    },
)
def sum_hazards(
    data: SiteData, state: State, request: SurvivalEffectRequest, log_ratios: Floats, **point: Floats
) -> dict[str, Array]:
    """Sum score (A - 1,), information and log-likelihood over the site's own risk sets of weighted rows."""
    rows, _ = weighted_rows(data, state, **point)
    require_ratios(data, rows, log_ratios, request)
    now = rows.likelihood(request, log_ratios)
    expected = now.expected()
    observed = np.where(now.table.event, now.table.weight, 0.0)
    key = ("hazards", rows.own, request, log_ratios.tobytes())
    report_vectors(state, rows, key, np.column_stack([observed - expected, expected]))
    return {
        "spread": np.array(True),
        "score": now.score(),
        "information": now.information(),
        "loglik": np.array(now.loglik),
    }


def require_ratios(
    data: SiteData, rows: WeightedTimes, log_ratios: Floats, request: SurvivalEffectRequest
) -> None:
    """Require a logarithm of a hazard ratio for each arm but the first, and strata that were opened."""
    if log_ratios.shape != (len(rows.site.levels) - 1,) or not np.isfinite(log_ratios).all():
        raise MessageError(f"{data.name}: array 'log_ratios' must have a number for each arm but the first")
    if not set(request.strata) <= set(rows.site.opened.question.labels):
        raise MessageError(f"{data.name}: the model opened no such columns of strata")


@step(
    FAMILY,
    "sum_scores sum_cells sum_hazards",
    takes={
        **STANDARDIZED,
        "log_ratios": LOG_RATIOS,
        "weights": aggregate("sums of weights by arm, interval and outcome over all sites", 3, common=True),
        "counts": aggregate("rows by arm, interval and outcome over all sites", 3, common=True),
        "places": control("ends at which curves have errors", common=True),
        "remaining": control("time from each interval to the end of the areas of curves", common=True),
    },
    request=SurvivalEffectRequest,
    requests=REQUESTED,
    releases={
        "slopes": summed("derivatives of the estimates by the coefficients of the propensity model", 2),
        "products": summed("products of the influences of rows, and of scores of the propensity model", 2),
        "spread": summed("sums of weights, their squares and fourth powers, by arm", 2),
        "clusters": CLUSTERS,
    },
)
def sum_influences(
    data: SiteData,
    state: State,
    request: SurvivalEffectRequest,
    log_ratios: Floats,
    weights: Floats,
    counts: Floats,
    places: Ints,
    remaining: Floats,
    **point: Floats,
) -> dict[str, Array]:
    """Sum what the covariance of K estimates needs, by Q coefficients of the propensity model.

    Estimates are those of :func:`fedstat.models.survival_effect.estimates.cell_influences`, and after
    them scores of the logarithms of hazard ratios with baselines of the sites' own. Released are ``slopes``
    (K, Q), ``products`` (K + Q, K + Q), ``spread`` (A, 3), sums of weights, squares and fourth powers by arm,
    and the number of ``clusters``.
    """
    rows, to_own = weighted_rows(data, state, **point)
    require_ratios(data, rows, log_ratios, request)
    w, slopes, residuals = rows.weighted
    parts = []
    if request.curves:
        edges = counted_edges(data, state, rows)
        cells = cells_of_all(data, rows, edges, weights, counts)
        ends = len(cells.ends)
        if len(places) > MOST_TIMES or not (places >= 0).all() or not (places < ends).all():
            raise MessageError(f"{data.name}: array 'places' must name at most {MOST_TIMES} ends")
        if len(remaining) != ends or (np.diff(remaining) > 0.0).any() or remaining[-1] < 0.0:
            raise MessageError(f"{data.name}: array 'remaining' must descend to zero over the intervals")
        functionals = curve_functionals(places, remaining)
        g = cell_influences(cells, functionals, request.ties if request.common else None)
        parts.append(w[:, None] * g[rows.cells(edges)])
    if request.own:
        parts.append(rows.likelihood(request, log_ratios).row_scores())
    influences = np.column_stack(parts) if parts else np.zeros((len(w), 0))
    by_weight = ratio(influences, w[:, None])
    factors = [by_weight[:, :, None] * slopes[:, None], influences[:, :, None] * residuals[:, None]]
    vectors = np.column_stack([w, influences, *(one.reshape(len(w), -1) for one in factors)])
    digest = tuple(one.tobytes() for one in (log_ratios, weights, counts, places, remaining))
    report_vectors(state, rows, ("influences", rows.own, request, digest), vectors)
    scores = rows.by_column(residuals) @ to_own
    state.report(*rows.site.products_of(residuals))
    both = np.column_stack([influences, scores])
    arrays = {
        "slopes": by_weight.T @ (rows.by_column(slopes) @ to_own),
        "spread": spread_of(rows.by_arm)[:, 1:],
    }
    if rows.site.request.clusters:
        both, found = rows.site.by_cluster(state, both)
        arrays |= found
    return arrays | {"products": both.T @ both}


def cells_of_all(
    data: SiteData, rows: WeightedTimes, edges: Floats, weights: Floats, counts: Floats
) -> WeightedCells:
    """Return the sums of all sites by cell; MessageError where they are less than the site's own.

    With other sums, influences could belong to the rows of one cell.
    """
    own = rows.by_cell(edges), rows.by_cell(edges, rows.weighted[0])
    for total, part in zip((counts, weights), own, strict=True):
        if total.shape != part.shape or not (rows.drawn or (part <= total * (1.0 + SLACK)).all()):
            raise MessageError(f"{data.name}: sums by cell are not those of all sites")
    return WeightedCells(edges, weights, counts)
