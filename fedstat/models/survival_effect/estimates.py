"""Curves and hazard ratios of weighted rows, from sums of their weights by arm, interval of time and outcome.

A row in arm a leaves in interval i with outcome c, 0 for none: this is its cell. Every estimate is a function
of the sums of weights by cell. So its derivative by the weight of a row, the influence g, depends on the cell
of the row alone. With weights w that depend on coefficients gamma, whose own influence is b, the influence of
a row on the estimate is ``w g + D b`` with D the sum of ``w g dlog w / dgamma`` (Mao, Li, Yang and Shen 2018;
Hajage, Chauvet, Belin, Lafourcade, Tubach and De Rycke 2018).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from fedstat.errors import EstimationError
from fedstat.kernels.partial_likelihood import PartialLikelihood, RiskTable
from fedstat.models.rows.newton import maximize_own
from fedstat.typing import Bools, Floats, Ints

NO_MAXIMUM = (
    "the weighted partial likelihood has no maximum: an arm has no events, or all of them, while rows of "
    "both arms are at risk. Its hazard ratio would be zero or infinite"
)
ROUNDING = 1e-12
"""Share of the rows at risk below which a difference of their weights is zero."""


def ratio(a: Floats, b: Floats) -> Floats:
    """Return a / b, zero where b is not positive."""
    a, b = np.broadcast_arrays(a, b)
    return np.divide(a, b, out=np.zeros(a.shape), where=b > 0.0)


def ends_of(edges: Floats) -> Floats:
    """Return the ends (J,) of intervals whose last time may be counted apart, from all edges (L,).

    The edge just below an end is no end; see :func:`fedstat.models.descriptive.protocol.with_ends_apart`.
    """
    below = np.append(np.nextafter(edges[:-1], np.inf) == edges[1:], False)
    return np.asarray(edges[~below])


@dataclass(frozen=True, slots=True, eq=False)
class WeightedCells:
    """Sums over rows by arm, interval and outcome: (A, L + 1, 1 + C), the last interval beyond all edges.

    `weights` are sums of weights, `counts` numbers of rows. Rows whose time is exactly the end of an interval
    may be counted apart. The times of the others are spread over the interval: events and censored rows are
    in random order, as for :class:`fedstat.inference.survival_curves.SurvivalCounts`.
    """

    edges: Annotated[Floats, "L"]
    weights: Annotated[Floats, "A M O"]
    counts: Annotated[Floats, "A M O"]

    @property
    def ends(self) -> Floats:
        """Ends of the intervals of the curves, (J,)."""
        return ends_of(self.edges)

    @property
    def place(self) -> Ints:
        """Interval of the curves to which each interval belongs, (L + 1,)."""
        return np.append(np.searchsorted(self.ends, self.edges), len(self.ends))

    @property
    def at_end(self) -> Bools:
        """Which intervals are a single time, the end, (L + 1,)."""
        apart = np.append(False, np.nextafter(self.edges[:-1], np.inf) == self.edges[1:])
        return np.append(apart, False)

    @property
    def at_risk(self) -> Floats:
        """Weights of the rows at risk at the beginning of each interval of the curves, (A, J)."""
        leaving = self.weights.sum(axis=2)
        after = leaving[:, ::-1].cumsum(axis=1)[:, ::-1]
        return np.asarray(after[:, np.searchsorted(self.place, np.arange(len(self.ends)))])

    def by_interval(self, sums: Floats) -> Floats:
        """Add sums of cells up over the intervals of the curves, (A, J + 1, 1 + C)."""
        found = np.zeros((len(self.ends) + 1, len(sums), sums.shape[2]))
        np.add.at(found, self.place, sums.transpose(1, 0, 2))
        return np.asarray(found.transpose(1, 0, 2))

    def _parts(self) -> tuple[Floats, Floats]:
        """Return the sums within the intervals of the curves and at their ends, (A, J, 1 + C) each."""
        last = self.weights * self.at_end[:, None]
        whole, at_end = (self.by_interval(one)[:, :-1] for one in (self.weights, last))
        return whole - at_end, at_end

    def _shares(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Return the share (A, J) that survives each interval, and its derivatives.

        They are by the weight at risk (A, J), of a row that leaves within the interval (A, J, 1 + C), and of
        an event at its end (A, J).
        """
        n, (within, at_end) = self.at_risk, self._parts()
        d, c, last = within[..., 1:].sum(axis=2), within[..., 0], at_end[..., 1:].sum(axis=2)
        gone, left = d + c, n - d - c
        with np.errstate(divide="ignore", invalid="ignore"):
            power = np.where(gone > 0.0, d / gone, 0.0)
            log = np.where(gone > 0.0, np.log(left / n), 0.0)
            within_share = np.exp(power * log)
            at_end_share = 1.0 - np.where(last > 0.0, last / left, 0.0)
            falls = np.where(last > 0.0, within_share * last / left**2, 0.0)
            by_risk = within_share * at_end_share * d / (n * left) + falls
            both = within_share * at_end_share * -power / left - falls
            turn = within_share * at_end_share * log / gone**2
            by_leaving = np.stack([both - turn * d, both + turn * c], axis=2)
            by_end = -within_share / left
            share = within_share * at_end_share
            # If no row stays, censored rows are at risk for half of the interval (the actuarial estimate).
            half, none = n - c / 2.0, (left <= ROUNDING * n) & (d > 0.0)
            actuarial = np.stack([-0.5 * d / half**2, -1.0 / half], axis=2)
            share = np.where(none, 1.0 - d / half, share)
            by_risk, by_leaving = (
                np.where(none, d / half**2, by_risk),
                np.where(none[..., None], actuarial, by_leaving),
            )
        kind = (np.arange(self.weights.shape[2]) > 0).astype(int)
        finite = (
            np.nan_to_num(one, nan=0.0, posinf=0.0, neginf=0.0)
            for one in (by_risk, by_leaving[..., kind], by_end)
        )
        return (np.where(n > 0.0, share, 1.0), *finite)

    @property
    def hazards(self) -> Floats:
        """Share of the rows at risk that have each event in each interval, (A, C, J)."""
        events = self.by_interval(self.weights)[:, :-1, 1:]
        total = events.sum(axis=2)
        share = self._shares()[0]
        return np.asarray((events * ratio(1.0 - share, total)[..., None]).transpose(0, 2, 1))

    @property
    def survival(self) -> Floats:
        """Share without an event at each end, (A, J)."""
        return np.asarray(np.cumprod(self._shares()[0], axis=1))

    @property
    def _before(self) -> Floats:
        S = self.survival
        return np.hstack([np.ones((len(S), 1)), S[:, :-1]])

    @property
    def incidence(self) -> Floats:
        """Share with each event by each end, (A, C, J) (Aalen and Johansen 1978)."""
        return np.asarray(np.cumsum(self._before[:, None] * self.hazards, axis=2))

    def incidence_influences(self) -> Floats:
        """Return the influences of the cells on the incidence of each event by each end: (A, C, J, L + 1, O).

        A row has an influence on the curves of its own arm only, so that the arm of a cell is that of the
        curve.
        """
        (A, width, outcomes), J = self.weights.shape, len(self.ends)
        C, place, at_end = outcomes - 1, self.place, self.at_end
        share, by_risk, by_leaving, by_end = self._shares()
        before, F = self._before, self.incidence
        events = self.by_interval(self.weights)[:, :-1, 1:]
        out = np.zeros((A, C, J, width, outcomes))
        for a in range(A):
            # Derivative of the incidence c by end m by the hazard of event k in interval l.
            later = ratio(F[a, :, :, None] - F[a, :, None, :], share[a])
            slopes = np.repeat(-later[:, None], C, axis=1)
            slopes[np.arange(C), np.arange(C)] += before[a]
            slopes *= np.tri(J)
            # The hazard of event k is its part of all events, times what does not survive.
            total = events[a].sum(axis=1)
            part = ratio(events[a], total[:, None]).T
            by_share = -(slopes * part[:, None]).sum(axis=1)
            at_risk = np.cumsum(by_share * by_risk[a], axis=2)
            out[a] += np.append(at_risk, at_risk[..., -1:], axis=2)[:, :, place, None]
            inside = place < J
            own = np.where(
                at_end[inside, None],
                by_end[a, place[inside], None] * (np.arange(outcomes) > 0),
                by_leaving[a, place[inside]],
            )
            out[a][:, :, inside] += by_share[:, :, place[inside], None] * own
            # An event is one of its kind, and of all.
            kinds = (slopes + by_share[:, None]) * ratio(1.0 - share[a], total)
            out[a][:, :, inside, 1:] += kinds.transpose(0, 2, 3, 1)[:, :, place[inside]]
        return out


def hazard_ratios(cells: WeightedCells, ties: str) -> tuple[Floats, Floats]:
    """Maximize the weighted partial likelihood of times at the ends of intervals, events of any kind.

    All sites have one baseline hazard. Rows are taken by cells, since all rows of a cell have the same
    covariates and the same risk sets. Returns the logarithms of the hazard ratios of the arms after the first
    (A - 1,), and the influences of the cells on them, (A - 1, A, L, O).

    Raises
    ------
    EstimationError
        An arm has no events, or all of them, at the times when both are at risk.
    """
    A, L, _ = cells.weights.shape
    arm, interval, outcome = (one.ravel() for one in np.indices(cells.weights.shape))
    weight, event = cells.weights.ravel(), (outcome > 0) & (interval < L - 1)
    used = weight > 0.0
    X = (arm[used, None] == np.arange(1, A)).astype(np.float64)
    stop = interval[used].astype(np.float64) + 1.0
    table = RiskTable.of(np.zeros(len(stop)), stop, event[used], weight[used], grid=(1, L - 1), counts=True)
    # Tied events are the rows, each with their mean weight.
    deaths = cells.counts[:, :-1, 1:].sum(axis=(0, 2))
    table = replace(table, deaths=deaths, mean_weight=ratio(table.deaths * table.mean_weight, deaths))

    def at(beta: Floats) -> PartialLikelihood:
        return PartialLikelihood.at(table, X, X @ beta, ties)

    def sums(beta: Floats) -> tuple[float, Floats, Floats]:
        now = at(beta)
        return now.loglik, now.score(), now.information()

    beta, _, problem = maximize_own(sums, np.zeros(A - 1), NO_MAXIMUM)
    if problem:
        raise EstimationError(NO_MAXIMUM)
    now, influences = at(beta), np.zeros((A - 1, len(used)))
    influences[:, used] = np.linalg.solve(now.information(), (now.row_scores() / weight[used, None]).T)
    return beta, influences.reshape(A - 1, *cells.weights.shape)


def remaining_times(ends: Floats, requested: Floats, until: float) -> Floats:
    """Return the mean time from the events of each interval to a time, (J,).

    The events of a merged interval are spread evenly over the requested ends (R,) in it.
    """
    place = np.searchsorted(ends, requested)
    left = np.maximum(until - requested, 0.0)
    inside = place < len(ends)
    total, count = (np.bincount(place[inside], one, len(ends)) for one in (left[inside], None))
    return np.asarray(total / count, dtype=np.float64)


def curve_functionals(places: Ints, remaining: Floats) -> Floats:
    """Return the matrix (M + 1, J) from a curve at its ends to its values at M of them, and its area.

    The area is the sum of its increments times the `remaining` times (J,).
    """
    return np.vstack([np.eye(len(remaining))[places], remaining - np.append(remaining[1:], 0.0)])


def cell_influences(cells: WeightedCells, functionals: Floats, ties: str | None) -> Floats:
    """Return the influences of the rows of each cell on all estimates of the cells, (A, L, O, K).

    Estimates are functionals (F, J) of the incidence of each event in each arm, K = A C F, and with `ties`
    the A - 1 logarithms of hazard ratios with a common baseline after them.
    """
    by_arm = np.einsum("fj,acjlo->acflo", functionals, cells.incidence_influences())
    A, C, F, L, outcomes = by_arm.shape
    out = np.zeros((A, L, outcomes, A, C, F))
    for a in range(A):
        out[a, :, :, a] = by_arm[a].transpose(2, 3, 0, 1)
    found = out.reshape(A, L, outcomes, -1)
    if ties is None:
        return found
    _, of_ratios = hazard_ratios(cells, ties)
    return np.concatenate([found, of_ratios.transpose(1, 2, 3, 0)], axis=3)
