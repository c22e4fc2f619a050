"""Steps of a site for log-linear times: sums over its rows, its own fit, and averages of survival."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.design.formula.syntax_tree import iter_columns
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, rows_of, translation
from fedstat.federation.design.site_rows import CompleteRows
from fedstat.federation.design.transform_states import ColumnExtremes
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, control
from fedstat.kernels.lifetimes import LIFETIMES, Lifetimes
from fedstat.kernels.partial_likelihood import RiskTable
from fedstat.models.horizontal.rows import require_numbers_of_rows, summed
from fedstat.models.horizontal.time_evaluation import (
    CONCORDANCE,
    Predicted,
    concordance_sums,
    enter_evaluation,
)
from fedstat.models.horizontal.variable_changes import sum_changes_of
from fedstat.models.margins import Change, ChangesRequest, MeanJet
from fedstat.models.rows.objective import STANDARDIZED, PredictorObjective
from fedstat.models.rows.steps import enter_steps, rows_in
from fedstat.typing import Array, Floats, Ints

FAMILY = "aft"
NO_EVENTS, EQUAL_TIMES = "no events", "all times are equal"
WIDER = 1.5
"""Multiple of the deviation of log times at the start: censoring shortens it, and rows weigh more evenly."""
MOST_TIMES = 100
"""Times at which survival is averaged over the rows."""
TIMES = (*OPEN_ROWS, facts.ColumnVariation, facts.ColumnSums, facts.SummedProducts)


@dataclass(frozen=True, slots=True)
class AFTRequest:
    """Distribution of the times, and columns of clusters."""

    distribution: str
    clusters: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse unknown distributions."""
        if self.distribution not in LIFETIMES:
            raise MessageError(f"distribution: expected one of {', '.join(LIFETIMES)}")

    @property
    def lifetimes(self) -> Lifetimes:
        """The distribution."""
        return LIFETIMES[self.distribution]


class TimedRows(NamedTuple):
    """Columns (m, p) of some rows, offsets, weights, events, and when the rows enter and leave, (m,) each."""

    X: Floats
    offset: Floats
    weight: Floats
    event: Floats
    start: Floats
    stop: Floats

    @classmethod
    def of(cls, rows: CompleteRows, X: Floats) -> Self:
        """Take them from rows with times and their design."""
        assert rows.times is not None
        weight = np.ones(len(X)) if rows.weight is None else rows.weight
        offset = np.zeros(len(X)) if rows.offset is None else rows.offset
        return cls(X, offset, weight, rows.y, *rows.times.T)

    def terms(self, B: Floats, lifetimes: Lifetimes) -> tuple[Floats, Floats, Floats]:
        """Return log-likelihoods (m,), scores (m, J) by the predictors, and minus the information, (m, J, J).

        `B` (J, p) are the coefficients of the predictors.
        """
        w, d, J = self.weight, self.event, len(B)
        eta, sigma = self.X @ B[0] + self.offset, sigma_of(B)
        with np.errstate(all="ignore"):
            z = (np.log(self.stop) - eta) / sigma
            value, first, second = lifetimes.terms(z, d)
            loglik = value - d * np.log(sigma * self.stop)
            g, H = by_predictors(z, first, second, sigma)
            g[:, 1] -= d
            H[:, 1, 1] -= d
            if (late := self.start > 0.0).any():
                z = (np.log(self.start[late]) - eta[late]) / sigma
                value, first, second = lifetimes.terms(z, np.zeros(len(z)))
                before, curved = by_predictors(z, first, second, sigma)
                loglik[late] -= value
                g[late] -= before
                H[late] -= curved
            return w * loglik, w[:, None] * g[:, :J], w[:, None, None] * H[:, :J, :J]


def sigma_of(B: Floats) -> float:
    """Return sigma from the coefficients of the predictors, (J, p)."""
    return float(np.exp(B[1, 0])) if len(B) > 1 else 1.0


def by_predictors(z: Floats, first: Floats, second: Floats, sigma: float) -> tuple[Floats, Floats]:
    """Return score (n, 2) and curvature (n, 2, 2) by x'b and log sigma of terms by z."""
    slope = np.column_stack([np.full(len(z), -1.0 / sigma), -z])
    return first[:, None] * slope, second[:, None, None] * slope[:, :, None] * slope[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class TimeBlock(facts.RowBlock):
    """A part of the rows; a point is the bytes of parameters, and `matrices` (J, p, q) lead to predictors."""

    rows: TimedRows
    matrices: Floats
    lifetimes: Lifetimes

    @property
    def columns(self) -> Floats:
        """Columns of the design, a constant among them."""
        return self.rows.X

    @property
    def levels(self) -> Floats:
        """Times and events."""
        return np.column_stack([self.rows.start, self.rows.stop, self.rows.event])

    def vectors(self, points: tuple[Any, ...]) -> Floats:
        """Return the weights of rows in the sums at points, (m, k)."""
        j, k = np.triu_indices(len(self.matrices))
        found = []
        for point in points:
            _, g, H = self.rows.terms(self.matrices @ np.frombuffer(point), self.lifetimes)
            found.append(np.column_stack([g, -H[:, j, k]]))
        return np.column_stack(found)

    def every(self, first: int, step: int) -> TimeBlock:
        """Return every n-th row, from the first on."""
        return replace(self, rows=TimedRows(*(part[first::step] for part in self.rows)))


def predictor_map(p: int, fixed: bool) -> Floats:
    """Matrices (J, p, q) from parameters to the coefficients of x'b and of the logarithm of sigma.

    Sigma has the constant alone, or is one if it is `fixed`.
    """
    if fixed:
        return np.eye(p)[None]
    M = np.zeros((2, p, p + 1))
    M[0, :, :p], M[1, 0, p] = np.eye(p), 1.0
    return M


def first_parameters(response: Floats, p: int, lifetimes: Lifetimes) -> Floats:
    """Parameters with the mean of the logarithms, and a multiple of their deviation or sigma of one.

    `response` (5,) is that of :meth:`SiteTimes.begin`; without a deviation sigma is not finite.
    """
    start, (center, width) = np.zeros(p + (not lifetimes.fixed)), lifetimes.moments
    mean = response[3] / response[0]
    with np.errstate(divide="ignore"):
        deviation = max(response[4] / response[0] - mean**2, 0.0) ** 0.5
        start[p:] = np.log(WIDER * deviation / width)
    start[0] = mean - center * np.exp(start[p:].sum())
    return start


class SiteTimes(PredictorObjective):
    """One fit's rows; its predictors are x'b and the logarithm of sigma.

    A row contributes the density or the survival at its time, given that it survives until its entry. The
    information is that of the parameters b / sigma and 1 / sigma, taken to b and log sigma. It is positive
    for every row that does not enter late, as the likelihood is concave in these. At the maximum over all
    rows it is the observed information of b and log sigma, from which it differs by a multiple of the score.
    """

    family = FAMILY
    request_type = AFTRequest
    requests = control("distribution of the times, and columns of clusters", common=True)
    starts: ClassVar = {
        "response": summed(
            "sums of weights, weighted events, events, weighted log times and their squares", behind=TIMES
        )
    }
    unbounded = "a coefficient grows without bound"
    extra: ClassVar = CONCORDANCE

    request: AFTRequest

    @classmethod
    def begin(cls, data: SiteData, state: State, request: AFTRequest) -> tuple[Self, dict[str, Array]]:
        """Check the rows, and sum events and log times: ``response`` (5,)."""
        opened = rows_of(state)
        question = opened.question
        if (
            not question.has_times
            or not question.intercept
            or not {*request.clusters} <= set(question.labels)
        ):
            raise MessageError(f"{data.name}: the model opened no times, or not this column of clusters")
        site = cls(opened, request, state.entities)
        if question.counts_rows:
            require_numbers_of_rows(opened, site.weight, "survreg")
        state.report(*site.sums_of_times())
        if not request.lifetimes.proportional:
            state.report(*site.products_by_event())
        return site, {"response": site.response}

    @property
    def variant(self) -> str:
        """Distribution."""
        return self.request.distribution

    @property
    def response(self) -> Floats:
        """Sums of weights, weighted events, events, weighted log times and their squares, (5,)."""
        found = np.zeros(5)
        for one in self.chunks():
            w, d, logs = one.weight, one.event, np.log(one.stop)
            found += w.sum(), w @ d, d.sum(), w @ logs, w @ logs**2
        return found

    def sums_of_times(self) -> Iterator[facts.ColumnVariation | facts.ColumnSums | facts.SummedProducts]:
        """Facts on the sums of the logarithms of times."""
        survival, used = self.opened.question.survival, self.opened.used
        assert survival is not None
        extremes = ColumnExtremes(self.data.policy.min_level_count - 1)
        for one in self.chunks():
            extremes.add(np.log(one.stop))
        yield extremes.variation("the logarithms of times")
        columns = tuple(dict.fromkeys(iter_columns(survival.times[-1])))
        factor = facts.FormulaFactor(f"log({', '.join(columns)})", columns, ("log",))
        yield facts.ColumnSums([factor], used)
        weights = self.weight if self.opened.question.weights else None
        yield facts.SummedProducts(
            lambda: (np.log(one.stop)[:, None] for one in self.chunks()),
            [factor.text],
            np.flatnonzero(used),
            weights=weights,
        )

    @property
    def weight(self) -> Floats:
        """Weights of the rows, (n,)."""
        return np.concatenate([np.zeros(0), *(one.weight for one in self.chunks())])

    def chunks(self) -> Iterator[TimedRows]:
        """Yield the rows, part by part."""
        return (TimedRows.of(rows, X) for rows, X in self.opened.chunks() if len(X))

    @property
    def matrices(self) -> Floats:
        """Matrices from parameters to the coefficients of each predictor."""
        return predictor_map(len(self.opened.scale), self.request.lifetimes.fixed)

    def rows_at(self, own: Floats) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
        """Yield columns, log-likelihoods, scores by the predictors, and minus the information."""
        B = self.coefficients(own)
        for rows in self.chunks():
            yield rows.X, *rows.terms(B, self.request.lifetimes)

    def blocks(self) -> Iterator[TimeBlock]:
        """Yield the rows for the check of what sums at several parameters single out."""
        return (TimeBlock(rows, self.matrices, self.request.lifetimes) for rows in self.chunks())

    def weights(self, own: Floats) -> Floats:
        """Return the absolute weights of rows that columns are multiplied with, (k, n).

        Score and information of log sigma are single numbers, as the log-likelihood is.
        """
        found = self.vectors(own).T
        return np.abs(found if self.request.lifetimes.fixed else found[[0, 2, 3]])

    def products_by_event(self) -> Iterator[facts.SummedProducts]:
        """Facts on the products of columns over the rows with and without the event.

        The information depends on the event, unless hazards are proportional: matrices at several parameters
        reveal the products of two columns over the rows with it.
        """
        event = np.concatenate([one.event for one in self.chunks()])
        for here, words in ((event > 0.0, "with the event"), (event <= 0.0, "without the event")):
            if not here.all():
                fact = self.opened.products_with(here.astype(np.float64))
                yield replace(fact, names=[f"{name} ({words})" for name in fact.names], rows=None)

    def at_estimate(self, own: Floats, code: Ints | None) -> dict[str, Array]:
        """Return what the concordance of x'b with the times needs."""
        parts, beta = list(self.chunks()), self.coefficients(own)[0]
        start, stop, event = (
            np.concatenate([getattr(one, name) for one in parts]) for name in ("start", "stop", "event")
        )
        weight = self.weight if self.opened.question.weights else None
        table = RiskTable.of(start, stop, event == 1.0, weight, None, counts=self.opened.question.counts_rows)
        eta = np.concatenate([one.X @ beta + one.offset for one in parts])
        return concordance_sums(table, -eta, code)

    @property
    def first(self) -> Floats:
        """Parameters without effects."""
        return first_parameters(self.response, len(self.opened.scale), self.request.lifetimes)

    def lacks(self) -> str:
        """Require events, and different times."""
        return EQUAL_TIMES if not np.isfinite(self.first).all() else "" if self.response[2] else NO_EVENTS


enter_steps(SiteTimes)


def _predict(site: str, times: Floats, request: AFTRequest, center: Floats, scale: Floats) -> Predicted:
    """Predict from the mean of x'b and from sigma; the risk of Weibull times is a logarithm of hazards."""
    if not float(scale) > 0.0 or not (times > 0.0).all():
        raise MessageError(f"{site}: 'scale' and 'times' must be positive")
    z = (np.log(times) - float(center)) / float(scale)
    return Predicted(
        lambda eta: (float(center) - eta) / float(scale),
        lambda risk: request.lifetimes.survival(z + risk[:, None])[0],
    )


enter_evaluation(
    FAMILY,
    {
        "center": aggregate("mean of x'b of the fit", 0, common=True),
        "scale": aggregate("sigma", 0, common=True),
    },
    _predict,
    AFTRequest,
    control("distribution of the times", common=True),
)


@dataclass(frozen=True, slots=True)
class TimesRequest:
    """Changes of variables with effects on survival at `times`; without any, on the median time."""

    changes: tuple[Change, ...]
    times: tuple[float, ...] = ()

    def check(self) -> None:
        """Refuse times that are not positive, and very many."""
        if len(self.times) > MOST_TIMES or any(not 0.0 < time < np.inf for time in self.times):
            raise MessageError(f"times: expected up to {MOST_TIMES} positive numbers")


def time_jet(lifetimes: Lifetimes, B: Floats, eta: Floats, times: Sequence[float]) -> MeanJet:
    """Return survival at times (m, J), or the median time (m, 1) without any, with two derivatives."""
    sigma, K = sigma_of(B), len(B)
    if not times:
        shift = sigma * lifetimes.quantile(0.5)
        value = np.exp(eta + shift)
        slope = np.array([1.0, shift])
        bend = np.array([[1.0, shift], [shift, shift * (1.0 + shift)]])
        return (
            value[:, None],
            (value[:, None, None] * slope)[..., :K],
            (value[:, None, None, None] * bend)[..., :K, :K],
        )
    z = (np.log(times) - eta[:, None]) / sigma
    share, first, second = lifetimes.survival(z)
    slope = np.stack([np.full_like(z, -1.0 / sigma), -z], axis=-1)
    bend = second[..., None, None] * slope[..., :, None] * slope[..., None, :]
    # z itself changes with log sigma: its second derivatives are 1 / sigma and z.
    bend[..., 0, 1] += first / sigma
    bend[..., 1, 0] += first / sigma
    bend[..., 1, 1] += first * z
    return share, (first[..., None] * slope)[..., :K], bend[..., :K, :K]


@dataclass(frozen=True, slots=True, eq=False)
class SurvivalMeans:
    """Survival at times, or medians, at coefficients (K, p) of the site's own columns."""

    site: SiteTimes
    own: Floats
    times: tuple[float, ...]
    groups: bool = False

    @property
    def point(self) -> tuple[Any, ...]:
        """What identifies the means."""
        return self.own.tobytes(), self.times

    def jet(self, rows: CompleteRows, X: Floats) -> MeanJet:
        """Return means with two derivatives."""
        B = self.site.coefficients(self.own)
        eta = X @ B[0] + (0.0 if rows.offset is None else rows.offset)
        return time_jet(self.site.request.lifetimes, B, eta, self.times)

    def count(self, rows: CompleteRows) -> Floats:
        """Return the weights of rows."""
        return np.ones(len(rows.y)) if rows.weight is None else rows.weight

    def block(self, rows: CompleteRows, X: Floats) -> TimeBlock:
        """Return the rows as other sums have them."""
        return TimeBlock(TimedRows.of(rows, X), self.site.matrices, self.site.request.lifetimes)


@step(
    FAMILY,
    "sum_scores sum_changes",
    takes=STANDARDIZED,
    releases={
        "effects": summed("changes of survival or of medians by each variable", 2),
        "slopes": summed("their derivatives by the coefficients", 4),
        "counts": summed("weights of the rows of a level", optional=True),
    },
    request=TimesRequest,
    requests=control("variables that change, and times", common=True),
)
def sum_changes(
    data: SiteData, state: State, request: TimesRequest, shift: Floats, scale: Floats, beta: Floats
) -> dict[str, Array]:
    """Sum the changes of predicted survival, or medians, by variables, through all terms.

    Released are ``effects`` (V, J), ``slopes`` (V, J, K, p), for standardized columns, and ``counts``.
    """
    site = rows_in(state, SiteTimes)
    own = site.place(shift, scale, beta).own
    means = SurvivalMeans(site, own, request.times)
    changes = ChangesRequest(request.changes)
    sums = sum_changes_of(state, site.opened, changes, site.coefficients(own), means)
    T = translation(site.opened.shift, site.opened.scale, shift, scale)
    return {"effects": sums.effects, "slopes": sums.slopes[..., 1:] @ T, **sums.level_counts}
