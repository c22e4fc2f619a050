"""Steps of a site for Cox's model: sums over its own risk sets, its own fit, and residual sums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from fedstat.errors import DesignError, MessageError
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, OpenRows, rows_of
from fedstat.federation.disclosure.facts import (
    ClusterProducts,
    LevelRowCounts,
    OwnFit,
    OwnFitProblem,
    ScoreAndInformation,
    WorkingWeights,
)
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, aggregate, check_lengths, control
from fedstat.inference.homogeneity_tests import quadratic_form
from fedstat.kernels.partial_likelihood import TIES, PartialLikelihood, RiskTable, concordance
from fedstat.models.horizontal.blocks import block_means
from fedstat.models.horizontal.clusters import LEVERAGES, LeverageRequest, cluster_releases, sum_corrected
from fedstat.models.horizontal.newton import maximize_own
from fedstat.models.horizontal.rows import AT_THE_START, NO_MEANS, SUMS, summed
from fedstat.typing import Array, Bools, Floats, Ints

FAMILY = "cox"
TRANSFORMS: Mapping[str, Callable[[Floats], Floats]] = {"log": np.log, "identity": np.asarray}
"""Functions of time with which coefficients may vary in the test of proportional hazards."""
MONOTONE, NO_EVENTS = "monotone likelihood", "no events"
"""Change of a standardized coefficient at convergence from which it grows without bound."""


@dataclass(frozen=True, slots=True)
class CoxRequest:
    """Treatment of tied events, and columns of strata and clusters."""

    ties: str
    strata: tuple[str, ...] = ()
    clusters: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse unknown ways to treat ties."""
        if self.ties not in TIES:
            raise MessageError(f"ties: expected one of {', '.join(TIES)}")


@dataclass(slots=True, eq=False)
class SiteRisks:
    """One fit's rows: without the intercept's column, which has no effect on a partial likelihood."""

    MADE_AGAIN: ClassVar = ("held",)
    """The parts that are made from the rows again when a session is resumed."""

    data: SiteData
    opened: OpenRows
    request: CoxRequest
    held: tuple[RiskTable, Floats, Floats] | None = None

    def make_again(self) -> None:
        """Sort the rows again when they are next needed."""
        self.held = None

    @property
    def rows(self) -> tuple[RiskTable, Floats, Floats]:
        """Risk table, design standardized by the site's own deviations (n, p), and offset (n,)."""
        if self.held is None:
            self.held = self._read()
        return self.held

    @property
    def n(self) -> int:
        """Rows that were opened; in a dry run fewer than the site has."""
        return len(self.rows[0].stop)

    def _read(self) -> tuple[RiskTable, Floats, Floats]:
        chunks = list(self.opened.chunks())
        first = int(self.opened.question.intercept)
        X = np.ascontiguousarray(np.concatenate([part[:, first:] for _, part in chunks]))
        times = np.concatenate([rows.times for rows, _ in chunks if rows.times is not None])
        weights = [rows.weight for rows, _ in chunks if rows.weight is not None]
        offsets = [rows.offset for rows, _ in chunks if rows.offset is not None]
        table = RiskTable.of(
            times[:, 0],
            times[:, 1],
            np.concatenate([rows.y for rows, _ in chunks]) == 1.0,
            np.concatenate(weights) if weights else None,
            self.codes(self.request.strata) if self.request.strata else None,
            counts=self.opened.question.counts_rows,
        )
        return table, X, np.concatenate(offsets) if offsets else np.zeros(len(X))

    def codes(self, names: tuple[str, ...]) -> Ints:
        """Return the number of each row's combination of values of columns, (n,)."""
        frame = pd.concat([rows.frame[list(names)] for rows, _ in self.opened.chunks()])
        return np.asarray(frame.groupby(list(names), sort=True).ngroup(), dtype=np.int64)

    def at(self, own: Floats) -> PartialLikelihood:
        """Sum over the risk sets at coefficients (p,) of the site's own standardized columns."""
        table, X, offset = self.rows
        return PartialLikelihood.at(table, X, X @ own + offset, self.request.ties)

    def to_own(self, scale: Floats) -> Floats:
        """Return factors (p,) from coefficients of columns standardized over all sites to the site's own."""
        first = int(self.opened.question.intercept)
        check_lengths(self.data.name, scale=(scale, len(self.opened.scale) - first))
        if not (scale > 0.0).all():
            raise MessageError(f"{self.data.name}: array 'scale' must be positive")
        return np.asarray(self.opened.scale[first:] / scale)

    def vectors(self, own: Floats, transforms: tuple[str, ...] = ()) -> list[Floats]:
        """Return weights of the rows in score and information, and in those times functions of time."""
        found = self.at(own)
        observed = np.where(found.table.event, found.table.weight, 0.0)
        out = [observed - found.expected(), found.expected()]
        for name in transforms:
            g = TRANSFORMS[name](found.table.times)
            at_events = np.zeros(len(observed))
            at_events[found.table.event] = g[found.table.until[found.table.event] - 1]
            out += [at_events * observed - found.expected(g), found.expected(g), found.expected(g**2)]
        return out

    def facts_at(
        self, own: Floats, instead: Mapping[str, Array] | None = None, transforms: tuple[str, ...] = ()
    ) -> tuple[WorkingWeights | ScoreAndInformation, ...]:
        """Declare the weights that rows have in sums at coefficients of the site's own columns."""

        def each() -> Floats:
            return np.abs(self.vectors(own, transforms)[1:])

        _, X, _ = self.rows
        point = (own.tobytes(), transforms)

        def vectors(point: tuple[bytes, tuple[str, ...]]) -> Floats:
            return np.column_stack(self.vectors(np.frombuffer(point[0]), point[1]))

        block = RowsAtRisk(vectors, np.column_stack([np.ones(len(X)), X]), slice(None))
        means = ScoreAndInformation(self.opened, self.n, point, lambda: iter([block]))
        return NO_MEANS, WorkingWeights(each, instead=instead), means  # none if weights allow another release

    @property
    def key(self) -> str:
        """Digest of the model and of the rows that it is fitted on."""
        text = json.dumps([self.opened.question.to_json(), FAMILY, self.request.ties])
        return hashlib.sha256(text.encode() + self.opened.used.tobytes()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, eq=False)
class RowsAtRisk:
    """A part of the rows, for the check of what sums at several coefficients single out."""

    weights: Callable[[Any], Floats]
    X: Floats
    rows: slice

    @property
    def columns(self) -> Floats:
        """Columns of the design, and a constant."""
        return self.X[self.rows]

    def vectors(self, points: tuple[Any, ...]) -> Floats:
        """Weights of the rows at points, (m, k)."""
        return np.column_stack([self.weights(point) for point in points])[self.rows]

    def times(self, points: tuple[Any, ...], wide: Floats) -> Floats:
        """Columns and vectors at points, times a matrix (p + k, q)."""
        width = self.X.shape[1]
        return np.asarray(self.columns @ wide[:width] + self.vectors(points) @ wide[width:])

    def every(self, first: int, step: int) -> RowsAtRisk:
        """Return every n-th row, from the first on."""
        return replace(self, rows=slice(first, None, step))


def risks_of(state: State) -> SiteRisks:
    """Return this fit's rows; MessageError if the fit was not started here."""
    rows_of(state)
    return state.use(FAMILY, SiteRisks, "this fit was not started here; request 'start' first")


SCALE = aggregate("standard deviations of the columns over all sites", common=True)
BETA = aggregate("coefficients of the standardized columns", common=True)
SPREAD = control("whether more than a few rows weigh", 0, maskable=True)
RISK_SETS = (*OPEN_ROWS, LevelRowCounts)


@step(
    FAMILY,
    releases={"response": summed("sums of weights, weighted events and events", behind=RISK_SETS)},
    request=CoxRequest,
    requests=control("treatment of ties, and columns of strata and clusters", common=True),
)
def start(data: SiteData, state: State, request: CoxRequest) -> dict[str, Array]:
    """Sort the rows into risk sets, and count events: ``response`` (3,)."""
    opened = rows_of(state)
    question = opened.question
    if not question.has_times or not {*request.strata, *request.clusters} <= set(question.labels):
        raise MessageError(f"{data.name}: the model opened no times, or not these columns of groups")
    risks = SiteRisks(data, opened, request)
    # A stratum is a group of rows: with few of them, the sums of two analyses differ by these rows.
    counts = np.bincount(risks.codes(request.strata)) if request.strata else np.array([state.entities])
    state.report(LevelRowCounts(", ".join(request.strata) or "rows", counts.tolist()))
    table, _, _ = risks.rows
    if table.counts and (broken := int((table.weight % 1.0 != 0.0).sum())):
        raise DesignError(
            f"site {data.name!r}, column {question.weights['freq_weights']!r}: {broken:,} values are no "
            "whole numbers, and frequency weights are numbers of rows. Give other weights as var_weights, "
            "which are those of R's coxph"
        )
    if len(table.stop) and (table.stop == table.stop[0]).all() and table.event.any():
        raise DesignError(
            f"site {data.name!r}: all rows have the same time in {question.response!r}, so that events "
            "have no order. Check the column, or leave the site out. Matched sets, as of conditional "
            "logistic regression, order cases before controls: Surv(2 - case, case) ~ x + strata(set)"
        )
    state.keep(FAMILY, risks, state.entities)
    events = table.weight[table.event].sum()
    return {"response": np.array([table.weight.sum(), events, float(table.event.sum())])}


def _own(what: str, ndim: int = 1) -> ArrayDeclaration:
    return aggregate(f"site's own fit: {what}", ndim, behind=(*RISK_SETS, OwnFit))


@step(
    FAMILY,
    "start",
    releases={
        "beta": _own("coefficients"),
        "information": _own("information", 2),
        "deviations": _own("standard deviations of the columns"),
    },
    replies=control("what hindered the fit of the site's rows alone"),
)
def fit_alone(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Fit this site's rows alone, and release that fit; the text has the ``problem`` that prevented it.

    ``beta`` (p,) and ``information`` (p, p) are for columns in units of ``deviations`` (p,), the site's own;
    they are zero for columns that are constant here, and if there is no fit.
    """
    risks = risks_of(state)
    first = int(risks.opened.question.intercept)
    p = len(risks.opened.scale) - first

    def instead(problem: str) -> tuple[dict[str, Array], str]:
        arrays = {"beta": np.zeros(p), "information": np.zeros((p, p)), "deviations": np.zeros(p)}
        return arrays, json.dumps({"problem": problem})

    question, used = risks.opened.question, risks.opened.used
    state.report(OwnFit(p * (p + 5) // 2, question.column_sums(used, True, risks.key), instead))
    varies = risks.opened.varies[first:]
    beta, information, problem = fit_own(risks, varies)
    if problem:
        state.report(OwnFitProblem(problem, risks.key, instead))
    arrays = {"beta": beta, "information": information, "deviations": risks.opened.scale[first:]}
    return arrays, json.dumps({"problem": problem})


def fit_own(risks: SiteRisks, varies: Bools) -> tuple[Floats, Floats, str]:
    """Maximize the partial likelihood of the site's rows: coefficients, information, and a problem or ''."""
    p, inside = len(varies), np.ix_(varies, varies)
    beta, information = np.zeros(p), np.zeros((p, p))
    if not risks.rows[0].event.any():
        return beta, information, NO_EVENTS

    def at(own: Floats) -> tuple[float, Floats, Floats]:
        whole = np.zeros(p)
        whole[varies] = own
        now = risks.at(whole)
        return now.loglik, now.score()[varies], now.information()[inside]

    own, part, problem = maximize_own(at, np.zeros(int(varies.sum())), MONOTONE)
    if not problem:
        beta[varies], information[inside] = own, part
    return beta, information, problem


SCORES = {
    "spread": SPREAD,
    "score": summed("score"),
    "information": summed("information", 2),
    "loglik": summed("partial log-likelihood", 0),
}


@step(
    FAMILY,
    "start fit_alone sum_scores",
    takes={"scale": SCALE, "beta": BETA},
    releases=SCORES,
)
def sum_scores(data: SiteData, state: State, scale: Floats, beta: Floats) -> dict[str, Array]:
    """Sum score (p,), information (p, p) and log-likelihood over the site's risk sets at beta (p,).

    `scale` and `beta` (p,) are for columns standardized over all sites, without the intercept. ``spread`` is
    false, and all else zero, if few rows have nearly all weight at these coefficients.
    """
    risks = risks_of(state)
    to_own = risks.to_own(scale)
    check_lengths(data.name, beta=(beta, len(to_own)))
    p, own = len(beta), to_own * beta
    nothing = {"spread": np.array(False), "loglik": np.array(0.0)}
    # Without coefficients the weights depend on the data alone, and single out no row.
    state.report(
        *risks.facts_at(own, {**nothing, "score": np.zeros(p), "information": np.zeros((p, p))})
        if beta.any()
        else (WorkingWeights(lambda: np.zeros((0, 0)), np.zeros((0, 2))), risks.facts_at(own)[-1])
    )
    now = risks.at(own)
    if not np.isfinite(now.loglik):
        state.report(*AT_THE_START)
        return {**nothing, "score": np.zeros(p), "information": np.zeros((p, p))}
    return {
        "spread": np.array(True),
        "score": to_own * now.score(),
        "information": np.outer(to_own, to_own) * now.information(),
        "loglik": np.array(now.loglik),
    }


@step(
    FAMILY,
    "sum_scores",
    takes={
        "scale": SCALE,
        "beta": BETA,
        **LEVERAGES,
        "meat": control("whether to sum products of scores, and whether by cluster"),
        "apart": control("whether to sum the score test of equal coefficients", 0),
    },
    releases={
        "pairs": summed("pairs of rows: concordant, discordant, tied in prediction, tied in time"),
        "squares": summed("squares of the rows' influences on the concordance"),
        **cluster_releases(SUMS),
        "clusters": summed("number of clusters", 0, optional=True, behind=(*SUMS, ClusterProducts)),
        "apart": summed("score test of equal coefficients: the site's part, and its rank", optional=True),
    },
)
def finish(
    data: SiteData,
    state: State,
    scale: Floats,
    beta: Floats,
    meat: Array,
    apart: Array,
    inverse: Floats | None = None,
    power: Array | None = None,
) -> dict[str, Array]:
    """Sum what the summary needs at the estimate; refused if a few rows have nearly all weight.

    ``pairs`` (4,) and ``squares`` (3,) are those of the concordance within strata. On request it releases
    ``meat`` (p, p), outer products of the scores of rows (Lin and Wei 1989); or what :func:`sum_corrected`
    does for clusters, with their number ``clusters``, where `inverse` (p, p) is the inverse information of
    all sites and `power` that of one less a leverage. ``apart`` (2,) is the site's part of the score test of
    equal coefficients.
    """
    risks = risks_of(state)
    to_own = risks.to_own(scale)
    check_lengths(data.name, beta=(beta, len(to_own)), meat=(meat, 2))
    own = to_own * beta
    state.report(*risks.facts_at(own))
    now, (table, X, offset) = risks.at(own), risks.rows
    pairs, influences = concordance(table, X @ own + offset)
    code = risks.codes(risks.request.clusters) if meat[1] else np.arange(risks.n)
    if not meat[1]:
        influences = table.of_rows(influences)
    s, m = (np.bincount(code, column) for column in influences.T)
    arrays = {"pairs": pairs, "squares": np.array([s @ s, s @ m, m @ m])}
    if meat[0]:
        residual = np.where(table.event, table.weight, 0.0) - now.expected()
        state.report(risks.opened.products_with(table.of_rows(residual) ** 2))
        if meat[1]:
            arrays["clusters"] = np.array(float(code.max() + 1))
            state.report(ClusterProducts(shared_columns(risks, code), risks.request.clusters))
            whole = np.outer(to_own, to_own) * now.information()
            request = LeverageRequest.of(data.name, whole, np.eye(len(beta)), inverse, power)
            # The site's own strata have baseline hazards of their own.
            observed = np.where(table.event, table.weight, 0.0)
            events = np.bincount(table.stratum, observed, len(table.first) - 1).astype(np.float64)
            arrays |= cluster_sums(state, request, now, code, events, to_own)
        else:
            scores = table.of_rows(now.row_scores()) * to_own
            arrays["meat"] = scores.T @ scores
    if apart:
        arrays["apart"] = np.array(quadratic_form(now.score(), now.information()))
    return arrays


def cluster_sums(
    state: State,
    request: LeverageRequest,
    now: PartialLikelihood,
    code: Ints,
    events: Floats,
    to_own: Floats,
) -> dict[str, Array]:
    """Sum over clusters, see :func:`sum_corrected`.

    Wang, Turner and Li (2023) correct scores of clusters of survival times in this form. A cluster also has
    leverage in the level of each baseline hazard, whose weighted events are `events` (S,). `code` (n,)
    numbers the clusters, `to_own` (p,) takes coefficients of all sites' columns to those of `now`.
    """
    scores = np.array([np.bincount(code, column) for column in now.row_scores().T]).T * to_own
    margins = now.margins(code, events) if request.power else None

    def information(part: slice) -> Floats:
        own = np.where((code >= part.start) & (code < part.stop), code - part.start, -1)
        return np.outer(to_own, to_own) * now.cluster_information(own, part.stop - part.start)

    if margins is not None:
        margins = replace(margins, cross=margins.cross * to_own)
    return sum_corrected(state, request, scores, information, margins)


def shared_columns(risks: SiteRisks, code: Ints) -> Ints:
    """Count the clusters of two rows or more in which both of two columns are nonzero, (p, p)."""
    several = np.bincount(code) >= 2
    columns = np.concatenate([risks.opened.in_units(X) for _, X in risks.opened.chunks()]) != 0.0
    there = np.array([np.bincount(code, column) > 0.0 for column in columns.T])[:, several].astype(float)
    return np.asarray(there @ there.T, dtype=np.int64)


@step(
    FAMILY,
    "sum_scores finish",
    takes={"scale": SCALE, "beta": BETA},
    releases={
        "score": summed("scores of coefficients that vary with time"),
        "cross": summed("information between constant and varying coefficients", 2),
        "square": summed("information of coefficients that vary with time", 2),
    },
    requests=control("function of time", common=True),
)
def sum_time_scores(data: SiteData, state: State, text: str, scale: Floats, beta: Floats) -> dict[str, Array]:
    """Sum score and information of the coefficients of x g(t) at an estimate (Grambsch and Therneau 1994)."""
    risks = risks_of(state)
    to_own = risks.to_own(scale)
    check_lengths(data.name, beta=(beta, len(to_own)))
    if text not in TRANSFORMS:
        raise MessageError(f"{data.name}: function of time: expected one of {', '.join(TRANSFORMS)}")
    own, products = to_own * beta, np.outer(to_own, to_own)
    state.report(*risks.facts_at(own, transforms=(text,)))
    now = risks.at(own)
    g = np.asarray(TRANSFORMS[text](now.table.times))
    return {
        "score": to_own * now.score(g),
        "cross": products * now.information(g),
        "square": products * now.information(g**2),
    }


@step(
    FAMILY,
    "sum_scores",
    takes={"scale": SCALE, "beta": BETA, "edges": aggregate("ends of intervals of time", common=True)},
    releases={
        "hazard": summed("baseline hazard by interval, times rows"),
        "variance": summed("its variance for known coefficients, times squared rows"),
        "centers": summed("its product with the mean column at risk, times rows", 2),
    },
)
def sum_hazard(data: SiteData, state: State, scale: Floats, beta: Floats, edges: Floats) -> dict[str, Array]:
    """Sum the baseline hazard over intervals that end at `edges` (J,), for columns of zero.

    An interval has the hazard of the events whose times, averaged over blocks of events, are in it. Later
    events are left out. Released are ``hazard`` and ``variance`` (J,) and ``centers`` (J, p).
    """
    risks = risks_of(state)
    to_own = risks.to_own(scale)
    check_lengths(data.name, beta=(beta, len(to_own)))
    if (np.diff(edges) <= 0.0).any() or len(risks.rows[0].first) > 2:
        raise MessageError(f"{data.name}: 'edges' must ascend, and the model must have no strata")
    own = to_own * beta
    state.report(*risks.facts_at(own))
    found, (table, _, _) = risks.at(own), risks.rows
    # A time with several events stays whole; times are averaged until a block has enough of them.
    events = np.repeat(np.arange(len(table.times)), table.event_rows.astype(np.int64))
    means = block_means(
        np.zeros(len(events), dtype=np.int64), table.times[events], data.policy.min_level_count
    )
    interval = np.searchsorted(edges, means)
    state.report(LevelRowCounts("events by interval", np.bincount(interval).tolist()))
    share = 1.0 / table.event_rows[events]
    first = int(risks.opened.question.intercept)
    # At zero of the data's columns: the site's own columns are shifted.
    zero = float(np.exp(-(risks.opened.shift[first:] / risks.opened.scale[first:]) @ own))
    hazard, variance, centers = found.hazard()
    centers = (centers * risks.opened.scale[first:] + hazard[:, None] * risks.opened.shift[first:]) * zero

    def by_interval(values: Floats) -> Floats:
        out = np.zeros((len(edges) + 1, *values.shape[1:]))
        np.add.at(out, interval, (values[events].T * share).T)
        return out[:-1]

    return {
        "hazard": risks.n * by_interval(hazard * zero),
        "variance": risks.n**2 * by_interval(variance * zero**2),
        "centers": risks.n * by_interval(centers),
    }
