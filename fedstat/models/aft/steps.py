"""Steps of a site for log-linear times: sums over its rows, its own fit, and averages of survival."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import numpy as np

from fedstat.errors import DesignError, MessageError
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, rows_of
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import control
from fedstat.kernels.lifetimes import LIFETIMES, Lifetimes
from fedstat.models.horizontal.rows import summed
from fedstat.models.rows.objective import PredictorObjective
from fedstat.models.rows.steps import enter_steps
from fedstat.typing import Array, Floats

FAMILY = "aft"
NO_EVENTS, UNBOUNDED = "no events", "a coefficient grows without bound"


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


def predictor_map(p: int, fixed: bool) -> Floats:
    """Matrices (J, p, q) from parameters to the coefficients of x'b and of the logarithm of sigma.

    Sigma has the constant alone, or is one if it is `fixed`.
    """
    if fixed:
        return np.eye(p)[None]
    M = np.zeros((2, p, p + 1))
    M[0, :, :p], M[1, 0, p] = np.eye(p), 1.0
    return M


def first_parameters(response: Floats, p: int, fixed: bool) -> Floats:
    """Parameters (q,) with which all times have one exponential distribution."""
    start = np.zeros(p + (not fixed))
    start[0] = np.log(response[3] / response[1])
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
        "response": summed("sums of weights, weighted events, events and weighted times", behind=OPEN_ROWS)
    }
    unbounded = UNBOUNDED

    request: AFTRequest

    @classmethod
    def begin(cls, data: SiteData, state: State, request: AFTRequest) -> tuple[Self, dict[str, Array]]:
        """Check the rows, and sum events and times: ``response`` (4,)."""
        opened = rows_of(state)
        question = opened.question
        if (
            not question.has_times
            or not question.intercept
            or not {*request.clusters} <= set(question.labels)
        ):
            raise MessageError(f"{data.name}: the model opened no times, or not this column of clusters")
        site = cls(opened, request, state.entities)
        if question.counts_rows and (
            broken := sum(int((rows.weight % 1.0 != 0.0).sum()) for rows in site.chunks())
        ):
            raise DesignError(
                f"site {data.name!r}, column {question.weights['freq_weights']!r}: {broken:,} values are no "
                "whole numbers, and frequency weights are numbers of rows. Give other weights as var_weights"
            )
        if not request.lifetimes.fixed:
            state.report(*site.products_by_event())
        return site, {"response": site.response}

    @property
    def variant(self) -> str:
        """Distribution."""
        return self.request.distribution

    @property
    def response(self) -> Floats:
        """Sums of weights, weighted events, events, and weighted times at risk, (4,)."""
        found = np.zeros(4)
        for one in self.chunks():
            w, d = one.weight, one.event
            found += w.sum(), w @ d, d.sum(), w @ (one.stop - one.start)
        return found

    def chunks(self) -> Iterator[TimedRows]:
        """Yield the rows, part by part."""
        for rows, X in self.opened.chunks():
            if rows.times is None:
                continue
            one = np.ones(len(X))
            yield TimedRows(
                X,
                np.zeros(len(X)) if rows.offset is None else rows.offset,
                one if rows.weight is None else rows.weight,
                rows.y,
                *rows.times.T,
            )

    @property
    def matrices(self) -> Floats:
        """Matrices from parameters to the coefficients of each predictor."""
        return predictor_map(len(self.opened.scale), self.request.lifetimes.fixed)

    def rows_at(self, own: Floats) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
        """Yield columns, log-likelihoods, scores by the predictors, and minus the information."""
        B, terms = self.coefficients(own), self.request.lifetimes.terms
        sigma, J = float(np.exp(B[1, 0])) if len(B) > 1 else 1.0, len(B)
        for X, offset, w, d, start, stop in self.chunks():
            eta = X @ B[0] + offset
            with np.errstate(all="ignore"):
                z = (np.log(stop) - eta) / sigma
                value, first, second = terms(z, d)
                loglik = value - d * np.log(sigma * stop)
                g, H = _by_predictors(z, first, second, sigma)
                g[:, 1] -= d
                H[:, 1, 1] -= d
                if (late := start > 0.0).any():
                    z = (np.log(start[late]) - eta[late]) / sigma
                    value, first, second = terms(z, np.zeros(len(z)))
                    before, curved = _by_predictors(z, first, second, sigma)
                    loglik[late] -= value
                    g[late] -= before
                    H[late] -= curved
            yield X, w * loglik, w[:, None] * g[:, :J], w[:, None, None] * H[:, :J, :J]

    def products_by_event(self) -> Iterator[facts.SummedProducts]:
        """Facts on the products of columns over the rows with and without the event.

        The information depends on the event: matrices at several parameters reveal the products of two
        columns over the rows with it.
        """
        event = np.concatenate([one.event for one in self.chunks()])
        for died, words in ((1.0, "with the event"), (0.0, "without the event")):
            fact = self.opened.products_with((event == died).astype(np.float64))
            yield replace(fact, names=[f"{name} ({words})" for name in fact.names], rows=None)

    @property
    def first(self) -> Floats:
        """Parameters with which all rows have one exponential distribution."""
        return first_parameters(self.response, len(self.opened.scale), self.request.lifetimes.fixed)

    def lacks(self) -> str:
        """Require events."""
        return "" if self.response[2] > 0.0 else NO_EVENTS


def _by_predictors(z: Floats, first: Floats, second: Floats, sigma: float) -> tuple[Floats, Floats]:
    """Return score (n, 2) and curvature (n, 2, 2) of terms by z, by x'b and log sigma."""
    slope = np.column_stack([np.full(len(z), -1.0 / sigma), -z])
    return first[:, None] * slope, second[:, None, None] * slope[:, :, None] * slope[:, None]


enter_steps(SiteTimes)
