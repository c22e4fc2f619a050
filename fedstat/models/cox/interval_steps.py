"""Steps of a site for Cox's model with one baseline hazard for all sites: sums by interval of time.

Times are rounded up to a public grid. The risk sets of the sites then add up: S0 and S1, the sums of
r = w exp(eta) and r x over the rows at risk at the end of an interval, and D0 and D1 over its events. Sums
of second moments by interval are not released: a site receives the hazards that follow from S0 and D0, and
releases one sum of products over all rows. S1 is released at two coefficient vectors only, the first and the
last, between which S0 is enough.

Risk sets are nested. Their differences are sums over the rows that leave in an interval, so these rows are
the groups that the rules are about. A party that knows all columns but one has an equation about its values
in a group for each vector with S0, and p more for each with S1. A group needs two rows for each equation, as
folds and missing patterns do. The sites first flag intervals with fewer rows, and
these are merged at all sites, so that the estimate is exactly that of times rounded up to the coarser grid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from fedstat.errors import MessageError
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.row_checks import entities_per_equation
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, check_lengths, control
from fedstat.federation.tables.columns import LevelValue, level_places
from fedstat.kernels.partial_likelihood import PartialLikelihood, RiskTable, risk_sums, tie_sums
from fedstat.models.cox.steps import (
    BETA,
    FAMILY,
    RISK_SETS,
    SCALE,
    SiteRisks,
    risks_of,
)
from fedstat.models.horizontal.clusters import LEVERAGES, LeverageRequest, cluster_releases, sum_corrected
from fedstat.models.horizontal.rows import summed
from fedstat.models.rows.objective import RowsWithWeights
from fedstat.typing import Array, Bools, Floats, Ints

INTERVALS = "cox intervals"
MOST_POINTS = 20


@dataclass(frozen=True, slots=True)
class IntervalRequest:
    """Levels of the columns of strata, and numbers of coefficient vectors: for S0, and of these for S1."""

    stratum_levels: tuple[tuple[LevelValue, ...], ...] = ()
    points: int = 4
    full: int = 2

    def check(self) -> None:
        """Refuse more points than a fit needs."""
        if not 1 <= self.full <= self.points <= MOST_POINTS:
            raise MessageError(f"points, full: expected 1 to {MOST_POINTS}, the second at most the first")

    def equations(self, p: int) -> int:
        """Return the equations about the values of one of p columns in a group."""
        return self.points + self.full * p


@dataclass(slots=True, eq=False)
class SiteIntervals:
    """One fit's rows by interval, with columns standardized over all sites.

    `points` are the coefficients at which sums by interval were released, and whether with S1.
    """

    RECOMPUTED: ClassVar = ("held",)
    """The parts that are made from the rows again when a session is resumed."""

    risks: SiteRisks
    request: IntervalRequest
    edges: Floats
    shift: Floats
    scale: Floats
    least: int
    points: tuple[tuple[bytes, bool], ...] = ()
    held: IntervalRows | None = field(default=None)

    def recompute(self) -> None:
        """Sort the rows again when they are next needed."""
        self.held = None

    @property
    def rows(self) -> IntervalRows:
        """Rows by interval."""
        if self.held is None:
            self.held = self._read()
        return self.held

    def _read(self) -> IntervalRows:
        table, X, offset = self.risks.rows
        opened, J = self.risks.opened, len(self.edges)
        first = int(opened.question.intercept)
        X = X * (opened.scale[first:] / self.scale) + (opened.shift[first:] - self.shift) / self.scale
        stop = np.minimum(np.searchsorted(self.edges, table.stop), J - 1)
        # Rows that are followed for longer than the grid are at risk until its end.
        event = table.event & (table.stop <= self.edges[-1])
        late = table.start > 0.0
        enter = np.where(late, np.searchsorted(self.edges, table.start) + 1, 0)
        # Entry and end in one interval: the row is at risk at no end of an interval.
        kept = np.flatnonzero(enter <= stop)
        columns = opened.in_units(np.concatenate([part for _, part in opened.chunks()]))[kept, first:]
        stratum = self._strata()[kept]
        breslow = self.risks.request.ties == "breslow"
        stop, enter, event = stop[kept], enter[kept], event[kept]
        # With Efron's ties events are summed apart from the others that leave; Breslow's needs their number.
        left = stratum * 2 + (0 if breslow else event.astype(np.int64))
        S = max(int(np.prod([len(levels) for levels in self.request.stratum_levels])), 1)
        return IntervalRows(
            table=RiskTable.of(
                enter, stop + 1.0, event, table.weight[kept], stratum, (S, J), counts=table.counts
            ),
            X=np.ascontiguousarray(X[kept]),
            offset=offset[kept],
            kept=kept,
            columns=columns,
            indicators=indicators(columns),
            left=left * J + stop,
            entered=np.where(late.any(), stratum * (J + 1) + enter, -1),
        )

    def _strata(self) -> Ints:
        names = self.risks.request.strata
        code = np.zeros(self.risks.n, dtype=np.int64)
        if not names:
            return code
        frame = pd.concat([rows.frame[list(names)] for rows, _ in self.risks.opened.chunks()])
        for name, levels in zip(names, self.request.stratum_levels, strict=True):
            own = level_places(frame[name], levels)
            if not len(self.risks.opened.used):
                own = np.arange(len(own)) % len(levels)  # in a dry run, whose groups are drawn
            if (own < 0).any():
                raise MessageError(f"{self.risks.data.name}: column {name!r} has levels that were not agreed")
            code = code * len(levels) + own
        return code

    @property
    def small(self) -> Bools:
        """Intervals (J,) in which a group has rows, but too few: in all, of a level, or of an outcome."""
        rows, J, few = self.rows, len(self.edges), self.risks.data.policy.min_level_count
        two = [*rows.indicators.T, rows.table.event]
        small = np.zeros(J + 1, dtype=bool)
        for code, width, first in ((rows.left, J, 1), (rows.entered, J + 1, 0)):
            if (code < 0).any():
                continue
            n = np.bincount(code)
            counts = np.array([np.bincount(code[one], minlength=len(n)) for one in two])
            either = np.concatenate([counts, n - counts])
            alone = (n > 0) & ((n < self.least) | ((either > 0) & (either < few)).any(axis=0))
            small[np.flatnonzero(alone) % width + first] = True
        # Rows that are at risk from the start enter at no end of an interval.
        small[1] |= small[0]
        return small[1:]

    def at(self, beta: Floats) -> Floats:
        """Return weight times exp(eta) at coefficients (p,) of the columns, (n,)."""
        rows = self.rows
        return np.asarray(rows.table.weight * np.exp(rows.X @ beta + rows.offset))

    def expected_at(self, beta: Floats, sums: Floats, S1: Floats, D1: Floats) -> PartialLikelihood:
        """Return the rows at coefficients (p,) with sums over the events of all sites, (T, 6)."""
        rows = self.rows
        return PartialLikelihood(rows.table, rows.X, self.at(beta), 0.0, 0.0, S1, D1, sums)


@dataclass(frozen=True, slots=True, eq=False)
class IntervalRows:
    """Rows that are at risk at the end of an interval.

    `kept` are their places among the rows of the fit, `columns` the design in the units of the data,
    `indicators` those of its columns that have two values, `left` and `entered` the groups of rows that leave
    and enter together.
    """

    table: RiskTable
    X: Floats
    offset: Floats
    kept: Ints
    columns: Floats
    indicators: Bools
    left: Ints
    entered: Ints


def indicators(columns: Floats) -> Bools:
    """Return the columns (n, q) of two values, as whether a row has the larger one: (n, k)."""
    two = []
    for column in columns.T if len(columns) else ():
        low, high = column.min(), column.max()
        larger = column == high
        if low < high and (larger | (column == low)).all():
            two.append(larger)
    return np.column_stack(two) if two else np.zeros((len(columns), 0), dtype=bool)


def intervals_of(state: State) -> SiteIntervals:
    """Return this fit's rows by interval; MessageError if they were not sorted here."""
    risks_of(state)
    return state.use(INTERVALS, SiteIntervals, "there are no intervals; request 'start_intervals' first")


BY_INTERVAL = (*RISK_SETS, facts.RowGroups, facts.GroupSums, facts.SummedProducts, facts.ColumnSums)
AT_POINT = (*BY_INTERVAL, facts.WorkingWeights, facts.ScoreAndInformation)


def _alone(columns: Floats) -> list[Floats]:
    return [columns]


def _describe(state: State, intervals: SiteIntervals, point: str) -> None:
    """Report the groups by which rows are summed at a point."""
    rows, risks = intervals.rows, intervals.risks
    equations = intervals.request.equations(rows.X.shape[1])
    opened = risks.opened
    # In a dry run the rows are no rows of a table.
    table_rows = np.flatnonzero(opened.used)[rows.kept] if len(opened.used) else rows.kept
    for code in (rows.left, rows.entered):
        if (code >= 0).any():
            # Grids of different fits are compared: rows between them are a group as well.
            state.report(facts.GroupSums(code, equations=equations))
            state.report(facts.RowGroups("", code, table_rows, of_models=True))
            ones = np.ones(len(code))
            for name, column in zip(opened.names, rows.columns.T, strict=False):
                both = np.column_stack([ones, column])
                state.report(facts.SummedProducts(partial(_alone, both), ["all rows", name], code=code))
    counts = [np.bincount(rows.left[one]) for one in rows.indicators.T]
    n = np.bincount(rows.left)
    for one in counts:
        either = np.append(one, n[: len(one)] - one)
        state.report(facts.LevelRowCounts("levels of a column by interval", either.tolist()))
    division = hashlib.sha256(rows.left.tobytes() + rows.entered.tobytes()).hexdigest()[:16]
    cells = [f"interval {division} {cell} {point}" for cell in np.unique(rows.left).tolist()]
    blocks = dict.fromkeys(opened.question.columns, cells)
    state.report(facts.ColumnSums([], opened.used, blocks=blocks))


TAKEN = {
    "scale": SCALE,
    "shift": aggregate("means of the columns over all sites", common=True),
    "edges": aggregate("ends of intervals of time", common=True),
}
LEVELS = control("levels of strata, and number of coefficient vectors", common=True)


def _sorted(
    data: SiteData, state: State, request: IntervalRequest, scale: Floats, shift: Floats, edges: Floats
) -> SiteIntervals:
    risks = risks_of(state)
    p = len(risks.opened.scale) - int(risks.opened.question.intercept)
    check_lengths(data.name, scale=(scale, p), shift=(shift, p))
    if not (scale > 0.0).all() or not len(edges) or edges[0] <= 0.0 or (np.diff(edges) <= 0.0).any():
        raise MessageError(f"{data.name}: 'scale' must be positive, and 'edges' must ascend from above zero")
    if len(request.stratum_levels) != len(risks.request.strata):
        raise MessageError(f"{data.name}: expected the levels of {len(risks.request.strata)} columns")
    policy = data.policy
    equations = entities_per_equation(policy) * request.equations(p)
    least = max(data.min_count, policy.min_level_count, int(np.ceil(equations)))
    return SiteIntervals(risks, request, edges, shift, scale, least)


@step(
    FAMILY,
    "start finish flag_intervals",
    takes=TAKEN,
    request=IntervalRequest,
    requests=LEVELS,
    releases={"small": control("whether an interval has rows, but not enough", maskable=True)},
)
def flag_intervals(
    data: SiteData, state: State, request: IntervalRequest, scale: Floats, shift: Floats, edges: Floats
) -> dict[str, Array]:
    """Flag intervals that end at `edges` (J,) and must be merged: ``small`` (J,)."""
    return {"small": _sorted(data, state, request, scale, shift, edges).small}


@step(
    FAMILY,
    "start flag_intervals",
    takes=TAKEN,
    request=IntervalRequest,
    requests=LEVELS,
    releases={
        "events": summed("events, and their weights, by interval", 2, behind=BY_INTERVAL),
        "at_risk": summed("weights of rows at risk, and of events, at zero", 2, behind=BY_INTERVAL),
        "columns": summed("columns and offset of the rows with an event", behind=BY_INTERVAL),
    },
)
def start_intervals(
    data: SiteData, state: State, request: IntervalRequest, scale: Floats, shift: Floats, edges: Floats
) -> dict[str, Array]:
    """Sort the rows into intervals that end at `edges` (J,), by stratum, and count them: T = S J intervals.

    Released are ``events`` (2, T), ``at_risk`` (2, T), S0 and D0 at coefficients of zero, and ``columns``
    (p + 1,), the sums of the standardized columns and of the offset over the events.
    """
    intervals = _sorted(data, state, request, scale, shift, edges)
    rows = intervals.rows
    table, J = rows.table, len(edges)
    _describe(state, intervals, "zero")
    for event in (False, True):
        place = (table.stratum * J + rows.left % J)[table.event == event]
        state.report(facts.LevelRowCounts("events by interval", np.bincount(place).tolist()))
    state.keep(INTERVALS, intervals, len(rows.kept))
    S0, _, D0, _ = risk_sums(table, rows.X[:, :0], intervals.at(np.zeros(rows.X.shape[1])))
    w = np.where(table.event, table.weight, 0.0)
    return {
        "events": np.array([table.deaths, table.deaths * table.mean_weight]),
        "at_risk": np.array([S0, D0]),
        "columns": np.append(rows.X.T @ w, rows.offset @ w),
    }


def _facts_at(
    intervals: SiteIntervals, vector: Callable[[Any], Floats], point: Any
) -> tuple[facts.WorkingWeights, facts.ScoreAndInformation]:
    rows = intervals.rows
    block = RowsWithWeights(vector, np.column_stack([np.ones(len(rows.X)), rows.X]), slice(None))
    return (
        facts.WorkingWeights(lambda: np.abs(vector(point).reshape(len(rows.X), -1).T)),
        facts.ScoreAndInformation(rows, len(rows.X), point, lambda: iter([block])),
    )


def _vectors(intervals: SiteIntervals) -> Callable[[tuple[bytes, ...]], Floats]:
    """Return what makes the weights of rows at a point: r, or expected events at hazards from outside."""

    def vector(point: tuple[bytes, ...]) -> Floats:
        beta, *hazards = map(np.frombuffer, point)
        if not hazards:
            return intervals.at(beta)[:, None]
        return intervals.expected_at(beta, _hazards(*hazards), *_empty_sums(intervals)).expected()[:, None]

    return vector


def _hazards(at_risk: Floats, tied: Floats) -> Floats:
    sums = np.zeros((len(at_risk), 6))
    sums[:, 1], sums[:, 2] = at_risk, tied
    return sums


def _empty_sums(intervals: SiteIntervals) -> tuple[Floats, Floats]:
    empty = np.zeros((len(intervals.rows.table.times), intervals.rows.X.shape[1]))
    return empty, empty


@step(
    FAMILY,
    "start_intervals sum_intervals sum_products",
    takes={"beta": BETA, "full": control("whether to sum columns as well", 0)},
    releases={
        "risk": summed("weights and weighted columns of the rows at risk, by interval", 2, behind=AT_POINT),
        "tied": summed("weights and weighted columns of the events, by interval", 2, behind=AT_POINT),
    },
)
def sum_intervals(data: SiteData, state: State, beta: Floats, full: Array) -> dict[str, Array]:
    """Sum over the rows at risk at coefficients beta (p,): ``risk`` (T, 1 + p), S0, S1; ``tied``, D0, D1.

    S1 and D1 are left out (T, 1) unless they are requested as well. Breslow's treatment of ties does not need
    D0 and D1; they are then zero.
    """
    intervals = intervals_of(state)
    request, rows, p = intervals.request, intervals.rows, intervals.rows.X.shape[1]
    check_lengths(data.name, beta=(beta, p))
    points = {*intervals.points, (beta.tobytes(), False), *([(beta.tobytes(), True)] if full else [])}
    number, with_columns = (sum(one is which for _, one in points) for which in (False, True))
    if number > request.points or with_columns > request.full:
        raise MessageError(
            f"{data.name}: sums by interval were announced for {request.points} coefficient vectors, "
            f"{request.full} of them with columns; these are more. Start the fit again"
        )
    intervals.points = tuple(sorted(points))
    state.keep(INTERVALS, intervals, len(rows.kept))
    _describe(state, intervals, hashlib.sha256(beta.tobytes()).hexdigest()[:16])
    state.report(*_facts_at(intervals, _vectors(intervals), (beta.tobytes(),)))
    S0, S1, D0, D1 = risk_sums(rows.table, rows.X[:, : p if full else 0], intervals.at(beta))
    tied = np.column_stack([D0, D1])
    if intervals.risks.request.ties == "breslow":
        tied = np.zeros_like(tied)
    return {"risk": np.column_stack([S0, S1]), "tied": tied}


@step(
    FAMILY,
    "sum_intervals sum_products",
    takes={
        "beta": BETA,
        "at_risk": aggregate("hazard of each interval", common=True),
        "tied": aggregate("part of it that its own events do not have", common=True),
        "g": aggregate("weights of the intervals", common=True),
    },
    releases={
        "score": summed("score", behind=AT_POINT),
        "products": summed("products of columns, times expected events", 2, behind=AT_POINT),
    },
)
def sum_products(
    data: SiteData, state: State, beta: Floats, at_risk: Floats, tied: Floats, g: Floats
) -> dict[str, Array]:
    """Sum columns times residuals (p,), and products times expected events (p, p), at hazards from outside.

    `at_risk` and `tied` (T,) are the sums of 1 / phi and l / d / phi over the events of all sites; `g` (T,)
    weights the events of an interval.
    """
    intervals = intervals_of(state)
    T = len(intervals.rows.table.times)
    check_lengths(data.name, beta=(beta, intervals.rows.X.shape[1]))
    check_lengths(data.name, at_risk=(at_risk, T), tied=(tied, T), g=(g, T))
    if (at_risk < 0.0).any() or (tied < 0.0).any() or (tied > at_risk).any():
        raise MessageError(f"{data.name}: 'at_risk' and 'tied' must be hazards")
    _describe(state, intervals, hashlib.sha256(beta.tobytes()).hexdigest()[:16])
    point = (beta.tobytes(), (g * at_risk).tobytes(), (g * tied).tobytes())
    state.report(*_facts_at(intervals, _vectors(intervals), point))
    now = intervals.expected_at(beta, _hazards(at_risk, tied), *_empty_sums(intervals))
    return {"score": now.score(g), "products": now.products(g)}


@step(
    FAMILY,
    "sum_intervals sum_products sum_residuals",
    takes={
        "beta": BETA,
        "at_risk": aggregate("hazard of each interval", common=True),
        "tied": aggregate("part of it that its own events do not have", common=True),
        "g": aggregate("function of time at the ends of the intervals", common=True),
        "center": aggregate("mean of the columns over the events of all sites", common=True),
        "inverse": aggregate("inverse information of all sites", 2, common=True),
    },
    releases={
        "score": summed("scores of coefficients that vary with time", behind=AT_POINT),
        "cross": summed("information between constant and varying coefficients", 2, behind=AT_POINT),
        "square": summed("information of coefficients that vary with time", 2, behind=AT_POINT),
        "baseline": summed(
            "test of one baseline hazard: the site's part, and its degrees of freedom", behind=AT_POINT
        ),
    },
)
def check_intervals(
    data: SiteData,
    state: State,
    beta: Floats,
    at_risk: Floats,
    tied: Floats,
    g: Floats,
    center: Floats,
    inverse: Floats,
) -> dict[str, Array]:
    """Sum what two tests need, at hazards from outside: of effects that vary with time, of one baseline.

    ``score`` (p,), ``cross`` and ``square`` (p, p) are those of the coefficients of x g(t). ``baseline`` (2,)
    has (O - E)^2 / E, with the site's events O and their expected number E, and the share of the variance of
    O - E over E that the estimated coefficients leave. The share is that of a site with few of all rows.
    """
    intervals = intervals_of(state)
    T, p = len(intervals.rows.table.times), intervals.rows.X.shape[1]
    check_lengths(data.name, beta=(beta, p), center=(center, p))
    check_lengths(data.name, at_risk=(at_risk, T), tied=(tied, T), g=(g, T))
    if inverse.shape != (p, p):
        raise MessageError(f"{data.name}: array 'inverse' must be of shape ({p}, {p})")
    if (at_risk < 0.0).any() or (tied < 0.0).any() or (tied > at_risk).any():
        raise MessageError(f"{data.name}: 'at_risk' and 'tied' must be hazards")
    _describe(state, intervals, hashlib.sha256(beta.tobytes()).hexdigest()[:16])
    for factor in (np.ones(T), g, g**2):
        point = (beta.tobytes(), (factor * at_risk).tobytes(), (factor * tied).tobytes())
        state.report(*_facts_at(intervals, _vectors(intervals), point))
    now = intervals.expected_at(beta, _hazards(at_risk, tied), *_empty_sums(intervals))
    e = now.expected()
    expected, events = float(e.sum()), float(now.table.weight[now.table.event].sum())
    baseline = np.zeros(2)
    if expected > 0.0:
        moved = intervals.rows.X.T @ e - expected * center
        baseline[:] = (events - expected) ** 2 / expected, 1.0 - moved @ inverse @ moved / expected
    return {
        "score": now.score(g),
        "cross": now.products(g),
        "square": now.products(g**2),
        "baseline": baseline,
    }


@step(
    FAMILY,
    "sum_products",
    takes={
        "beta": BETA,
        "risk": aggregate("S0 and S1 of all sites", 2, common=True),
        "tied": aggregate("D0 and D1 of all sites", 2, common=True),
        "events": aggregate("events of all sites, and their weights", 2, common=True),
        "cluster": control("whether to sum by cluster", 0),
        **LEVERAGES,
    },
    releases={
        **cluster_releases(AT_POINT),
        "clusters": summed("number of clusters", 0, optional=True, behind=(*AT_POINT, facts.ClusterProducts)),
    },
)
def sum_residuals(
    data: SiteData,
    state: State,
    beta: Floats,
    risk: Floats,
    tied: Floats,
    events: Floats,
    cluster: Array,
    inverse: Floats | None = None,
    power: Array | None = None,
) -> dict[str, Array]:
    """Sum outer products of the scores of rows, ``meat`` (p, p) (Lin and Wei 1989), or as ``finish`` does.

    The site learns the sums by interval over all sites.
    """
    intervals = intervals_of(state)
    rows, risks = intervals.rows, intervals.risks
    T, p = len(rows.table.times), rows.X.shape[1]
    if risk.shape != (T, p + 1) or tied.shape != (T, p + 1) or events.shape != (2, T):
        raise MessageError(f"{data.name}: arrays must have a row for each of {T} intervals")
    mean = np.divide(events[1], events[0], out=np.zeros(T), where=events[0] > 0.0)
    if not (risk[events[0] > 0.0, 0] > 0.0).all():
        raise MessageError(f"{data.name}: array 'risk' must be positive where there are events")
    sums = tie_sums(risk[:, 0].copy(), tied[:, 0].copy(), events[0].copy(), mean, risks.request.ties)
    _describe(state, intervals, hashlib.sha256(beta.tobytes()).hexdigest()[:16])
    point = (beta.tobytes(), sums[:, 1].tobytes(), sums[:, 2].tobytes())
    state.report(*_facts_at(intervals, _vectors(intervals), point))
    table = replace(rows.table, deaths=events[0], mean_weight=mean)
    now = PartialLikelihood(table, rows.X, intervals.at(beta), 0.0, 0.0, risk[:, 1:], tied[:, 1:], sums)
    residual = np.zeros(risks.n)
    residual[rows.kept] = table.of_rows(np.where(table.event, table.weight, 0.0) - now.expected())
    state.report(risks.opened.products_with(residual**2))
    if not cluster:
        scores = table.of_rows(now.row_scores())
        return {"meat": scores.T @ scores}
    code = risks.codes(risks.request.clusters)
    state.report(facts.ClusterProducts(risks.shared_columns(code), risks.request.clusters))
    # Clusters of rows that are at risk at no end of an interval have no part in the likelihood.
    kept, own = np.unique(code[rows.kept], return_inverse=True)
    whole = now.cluster_information(np.zeros_like(own), 1)[0]
    request = LeverageRequest.of(data.name, whole, np.eye(p), inverse, power)
    by_stratum = events[1].reshape(-1, len(intervals.edges)).sum(axis=1)
    scores = np.array([np.bincount(own, column) for column in now.row_scores().T]).T
    margins = now.margins(own, by_stratum) if request.power else None

    def information(part: slice) -> Floats:
        inside = np.where((own >= part.start) & (own < part.stop), own - part.start, -1)
        return now.cluster_information(inside, part.stop - part.start)

    found = sum_corrected(state, request, scores, information, margins)
    return {**found, "clusters": np.array(float(len(kept)))}
