"""Cox's partial likelihood: risk sets, score, information and residuals, within strata.

Rows are at risk on (start, stop]. With r = w exp(eta), S0, S1 are the sums of r and r x over the rows at
risk at an event time, and D0, D1 those over its d events. Breslow's likelihood divides by S0 for every event;
Efron's by phi_l = S0 - l/d D0 for the event l = 0, ..., d - 1, each with the events' mean weight
(Therneau and Grambsch 2000, sections 3.1 and 3.3). The sums of second moments over risk sets are not formed:
the sum over event times of S2/S0 is X' diag(e) X, where e is the expected number of events of each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numba import njit

from fedstat.kernels import INNER
from fedstat.kernels.clusters import Margins, cluster_products
from fedstat.typing import Bools, Floats, Ints

TIES = ("efron", "breslow")


@dataclass(frozen=True, slots=True, eq=False)
class RiskTable:
    """Rows of one site, their event times, and the place of each row among these; strata do not mix.

    Parameters
    ----------
    order : (n,) array of int
        Rows by stratum and descending stop.
    leaving : (n,) array of int
        Rows by stratum and descending start; empty where all starts are zero.
    start, stop, weight : (n,) array
    event : (n,) array of bool
    stratum : (n,) array of int
    times : (T,) array
        Event times by stratum, ascending.
    first : (S + 1,) array of int
        Place of the first event time of each stratum.
    after, until : (n,) array of int
        Number of event times, in all strata before and this one, up to the start and up to the stop.
    deaths, mean_weight : (T,) array
        Events at each time, and the mean of their weights.
    event_rows : (T,) array
        Rows with an event at each time.
    counts : bool
        Whether a weight is the number of rows for which a row stands. Its events are then as many events of
        weight one. Other weights are those of ``coxph(weights=)``: of one event.
    """

    order: Ints
    leaving: Ints
    start: Floats
    stop: Floats
    event: Bools
    weight: Floats
    stratum: Ints
    times: Floats
    first: Ints
    after: Ints
    until: Ints
    deaths: Floats
    mean_weight: Floats
    event_rows: Floats
    counts: bool = False

    @classmethod
    def of(
        cls,
        start: Floats,
        stop: Floats,
        event: Bools,
        weight: Floats | None = None,
        stratum: Ints | None = None,
        grid: tuple[int, int] | None = None,
        counts: bool = False,
    ) -> RiskTable:
        """Sort the rows; strata are numbered from zero.

        With a `grid` (S, J) the event times are 1, ..., J in each of S strata, whether or not rows have them.
        """
        n = len(stop)
        weight = np.ones(n) if weight is None else np.ascontiguousarray(weight, dtype=np.float64)
        stratum = np.zeros(n, dtype=np.int64) if stratum is None else stratum.astype(np.int64)
        if grid is None:
            pairs = np.unique(np.column_stack([stratum[event], stop[event]]), axis=0)
            strata_count = int(stratum.max(initial=-1)) + 1
        else:
            strata_count, J = grid
            pairs = np.column_stack(
                [np.repeat(np.arange(strata_count), J), np.tile(np.arange(1.0, J + 1.0), strata_count)]
            )
        times, strata = np.ascontiguousarray(pairs[:, 1]), pairs[:, 0].astype(np.int64)
        first = np.searchsorted(strata, np.arange(strata_count + 1))
        after, until = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
        for one in range(len(first) - 1):
            low, high = int(first[one]), int(first[one + 1])
            rows = np.flatnonzero(stratum == one)
            after[rows] = low + np.searchsorted(times[low:high], start[rows], side="right")
            until[rows] = low + np.searchsorted(times[low:high], stop[rows], side="right")
        place = until[event] - 1
        event_rows = np.bincount(place, minlength=len(times)).astype(np.float64)
        total = np.bincount(place, weight[event], minlength=len(times)).astype(np.float64)
        deaths = total if counts else event_rows
        truncated = bool((start > 0.0).any())
        return cls(
            order=np.lexsort((-stop, stratum)),
            leaving=np.lexsort((-start, stratum)) if truncated else np.zeros(0, dtype=np.int64),
            start=np.ascontiguousarray(start, dtype=np.float64),
            stop=np.ascontiguousarray(stop, dtype=np.float64),
            event=event,
            weight=weight,
            stratum=stratum,
            times=times,
            first=first,
            after=after,
            until=until,
            deaths=deaths,
            mean_weight=np.divide(total, deaths, out=np.zeros(len(times)), where=deaths > 0.0),
            event_rows=event_rows,
            counts=counts,
        )

    def of_rows(self, totals: Floats) -> Floats:
        """Scale totals (n, ...) so that their squares add up to those of the rows for which a row stands."""
        if not self.counts:
            return totals
        size = np.sqrt(self.weight).reshape(-1, *[1] * (totals.ndim - 1))
        return np.divide(totals, size, out=np.zeros_like(totals), where=size > 0.0)

    def cumulated(self, increments: Floats) -> Floats:
        """Add up increments (T, ...) at the event times up to each, (T + 1, ...)."""
        out = np.zeros((len(increments) + 1, *increments.shape[1:]))
        np.cumsum(increments, axis=0, out=out[1:])
        return out


@njit(cache=True)
def _add_by_time(rows, place, r, X, out):  # type: ignore[no-untyped-def]
    """Add r and r x of some rows to the lines of `out` (T, 1 + p) at their places."""
    for i in rows:
        at = place[i]
        out[at, 0] += r[i]
        for j in range(X.shape[1]):
            out[at, 1 + j] += r[i] * X[i, j]


def risk_sums(table: RiskTable, X: Floats, r: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return S0 (T,), S1 (T, p) over the rows at risk at the event times, and D0, D1 over the events."""
    S, D = np.zeros((2, len(table.times), X.shape[1] + 1))
    last, X = table.until - 1, np.ascontiguousarray(X)
    # Rows that are at risk at no event time have no part, not even one that is subtracted again.
    at_risk = table.until > table.after
    _add_by_time(table.order[at_risk[table.order]], last, r, X, S)
    late = table.leaving[at_risk[table.leaving]]
    late = late[table.after[late] > table.first[table.stratum[late]]]
    if len(late):
        _add_by_time(late, table.after - 1, -r, X, S)
    _add_by_time(table.order[table.event[table.order]], last, r, X, D)
    for low, high in pairwise(table.first):
        np.cumsum(S[low:high][::-1], axis=0, out=S[low:high][::-1])
    return S[:, 0].copy(), S[:, 1:].copy(), D[:, 0].copy(), D[:, 1:].copy()


def tie_sums(S0: Floats, D0: Floats, deaths: Floats, mean_weight: Floats, ties: str) -> Floats:
    """Sum over the events of each time, times their mean weight, with q = l/d: (T, 6).

    The columns are log phi, 1/phi, q/phi, 1/phi^2, q/phi^2, q^2/phi^2.
    """
    d = deaths.astype(np.int64)
    least = S0 - np.maximum(d - 1, 0) / np.maximum(d, 1) * D0 if ties == "efron" else S0
    usable = (d > 0) & (S0 > 0.0) & (least > 0.0)
    event = np.repeat(np.arange(len(d)), np.where(usable, d, 0))
    phi, q = S0[event], np.zeros(len(event))
    if ties == "efron":
        q = (np.arange(len(event)) - np.searchsorted(event, event)) / d[event]
        phi = phi - q * D0[event]
    terms = np.log(phi), 1.0 / phi, q / phi, 1.0 / phi**2, q / phi**2, q**2 / phi**2
    out = np.column_stack([np.bincount(event, term, len(d)) for term in terms]).astype(np.float64)
    # Rows that are no longer at risk had nearly all weight: the sum over the others has no digits.
    out[(d > 0) & ~usable, 0] = np.inf
    return out * mean_weight[:, None]


def between(S1: Floats, D1: Floats, sums: Floats, g: Floats | None = None) -> Floats:
    """Sum products of the mean columns at risk over the events, times g (T,): what the information lacks.

    The sum over l of z_l z_l', z_l = S1 - l/d D1 over phi_l, is that of two vectors, S1 and D1: its 2 x 2
    factor gives two rows. Returns (p, p).
    """
    a, b, c = sums[:, 3], -sums[:, 4], sums[:, 5]
    below = np.divide(b, np.sqrt(a), out=np.zeros(len(a)), where=a > 0.0)
    several = c > 0.0
    rest = np.sqrt(np.maximum(c - below**2, 0.0))
    Z = np.sqrt(a)[:, None] * S1
    Z[several] += below[several, None] * D1[several]
    W = rest[several, None] * D1[several]
    if g is None:
        return np.asarray(Z.T @ Z + W.T @ W)
    return np.asarray(Z.T @ (g[:, None] * Z) + W.T @ (g[several, None] * W))


@dataclass(frozen=True, slots=True, eq=False)
class PartialLikelihood:
    """Risk sets of the rows at one linear predictor.

    Parameters
    ----------
    table : RiskTable
    X : (n, p) array
    r : (n,) array
        Weight times exp(eta - shift).
    shift : float
    loglik : float
    S1, D1 : (T, p) array
        Sums of r x over the rows at risk, and over the events.
    sums : (T, 6) array
        Sums over the events of each time, times their mean weight; see :func:`tie_sums`.
    """

    table: RiskTable
    X: Floats
    r: Floats
    shift: float
    loglik: float
    S1: Floats
    D1: Floats
    sums: Floats

    @classmethod
    def at(cls, table: RiskTable, X: Floats, eta: Floats, ties: str) -> PartialLikelihood:
        """Sum over the risk sets at a linear predictor (n,)."""
        # Risk sets are ratios: a common factor cancels, and keeps the exponentials finite.
        shift = float(eta.max(initial=-np.inf)) if len(eta) else 0.0
        r = table.weight * np.exp(eta - shift)
        S0, S1, D0, D1 = risk_sums(table, X, r)
        sums = tie_sums(S0, D0, table.deaths, table.mean_weight, ties)
        loglik = float((table.weight * (eta - shift))[table.event].sum() - sums[:, 0].sum())
        return cls(table, X, r, shift, loglik, S1, D1, sums)

    def expected(self, g: Floats | None = None) -> Floats:
        """Return the expected number of events of each row, times g (T,) at every event time: (n,)."""
        table, all_at_risk, tied = self.table, self.sums[:, 1], self.sums[:, 2]
        if g is not None:
            all_at_risk, tied = g * all_at_risk, g * tied
        total = table.cumulated(all_at_risk)
        found = total[table.until] - total[table.after]
        found[table.event] -= tied[table.until[table.event] - 1]
        return np.asarray(self.r * found)

    def score(self, g: Floats | None = None) -> Floats:
        """Return the score, with every event time's part times g: (p,)."""
        table = self.table
        observed = np.where(table.event, table.weight, 0.0)
        if g is not None:
            observed[table.event] *= g[table.until[table.event] - 1]
        return np.asarray(self.X.T @ (observed - self.expected(g)))

    def information(self, g: Floats | None = None) -> Floats:
        """Return the information, with every event time's part times g: (p, p)."""
        return self.products(g) - between(self.S1, self.D1, self.sums, g)

    def products(self, g: Floats | None = None) -> Floats:
        """Return the sum over rows of x x', times the expected number of events and g (T,): (p, p)."""
        e = self.expected(g)
        if g is not None:
            return np.asarray(self.X.T @ (e[:, None] * self.X))
        scaled = self.X * np.sqrt(np.maximum(e, 0.0))[:, None]
        return np.asarray(scaled.T @ scaled)

    def means(self) -> Floats:
        """Return the mean column of the rows at risk, averaged over the events of each time: (T, p)."""
        table = self.table
        total = np.where(table.deaths > 0.0, table.deaths * table.mean_weight, 1.0)[:, None]
        return np.asarray((self.S1 * self.sums[:, 1:2] - self.D1 * self.sums[:, 2:3]) / total)

    def cluster_information(self, code: Ints, count: int) -> Floats:
        """Return each cluster's part of the information, (count, p, p); `code` (n,) numbers the clusters.

        It is the sum over the cluster's rows of ``(x - mean)(x - mean)'`` times the expected number of events
        at every event time. With Efron's treatment of ties the means differ between tied events; what their
        mean misses is shared by expected events, so that the parts add up to the information. Rows of
        negative `code` are in no cluster.
        """
        inside, means = code >= 0, self.means()
        total = np.where(self.table.deaths > 0.0, self.table.deaths * self.table.mean_weight, 1.0)
        S1, D1, (a, b, c) = self.S1.T, self.D1.T, self.sums[:, 3:6].T / total
        X, own, p = self.X[inside], code[inside], self.X.shape[1]
        found = cluster_products(X, self.expected()[inside], own, count)
        for j in range(p):
            along = self.expected(means[:, j])[inside]
            for k in range(p):
                part = np.bincount(own, X[:, k] * along, count)
                found[:, j, k] -= part
                found[:, k, j] -= part
            for k in range(j + 1):
                tied = S1[j] * S1[k] * a - (S1[j] * D1[k] + D1[j] * S1[k]) * b + D1[j] * D1[k] * c
                square = 2.0 * means[:, j] * means[:, k] - tied
                part = np.bincount(own, self.expected(square)[inside], count)
                found[:, j, k] += part
                if k != j:
                    found[:, k, j] += part
        return found

    def margins(self, code: Ints, events: Floats) -> Margins:
        """Return the leverages of clusters in the levels of the baseline hazards of the strata.

        `code` (n,) numbers the clusters, `events` (S,) are the weighted events behind each hazard.
        """
        table, means, e, S = self.table, self.means(), self.expected(), len(events)
        pair, place = np.unique(code * S + table.stratum, return_inverse=True)
        observed = np.where(table.event, table.weight, 0.0)
        stratum = pair % S
        total = np.where(events > 0.0, events, 1.0)[stratum]
        cross = [
            np.bincount(place, column * e - self.expected(means[:, j])) for j, column in enumerate(self.X.T)
        ]
        return Margins(
            np.searchsorted(pair // S, np.arange(int(code.max(initial=-1)) + 2)),
            np.bincount(place, e) / total,
            np.bincount(place, observed - e) / np.sqrt(total),
            np.array(cross).T / np.sqrt(total)[:, None],
        )

    def row_scores(self) -> Floats:
        """Return the score residual of every row, weights included: (n, p)."""
        table, S1, D1 = self.table, self.S1, self.D1
        first, tied, square = self.sums[:, 3:4], self.sums[:, 4:5], self.sums[:, 5:6]
        at_risk = table.cumulated(S1 * first - D1 * tied)
        of_events = S1 * tied - D1 * square
        mean = self.means()
        observed = np.where(table.event, table.weight, 0.0)
        out = self.X * (observed - self.expected())[:, None]
        out += self.r[:, None] * (at_risk[table.until] - at_risk[table.after])
        died, place = table.event, table.until[table.event] - 1
        out[died] -= self.r[died, None] * of_events[place] + table.weight[died, None] * mean[place]
        return np.asarray(out)

    def hazard(self) -> tuple[Floats, Floats, Floats]:
        """Return increments of the baseline hazard at the event times, where eta is zero.

        They are the hazard (T,), the variance that it has for known coefficients (T,), and the hazard times
        the mean column of the rows at risk (T, p).
        """
        scale = np.exp(-self.shift)
        centers = self.S1 * self.sums[:, 3:4] - self.D1 * self.sums[:, 4:5]
        return self.sums[:, 1] * scale, self.sums[:, 3] * scale**2, centers * scale


# ----------------------------------------------------------------------------------------------------
# Concordance of a linear predictor with the order of the events.

FEW = 500
"""Rows of a stratum that are compared each with each: sooner than loops are compiled."""


@njit(cache=True, **INNER)
def _add(tree, i, value):  # type: ignore[no-untyped-def]
    i += 1
    while i < len(tree):
        tree[i] += value
        i += i & -i


@njit(cache=True, **INNER)
def _upto(tree, i):  # type: ignore[no-untyped-def]
    total = 0.0
    while i > 0:
        total += tree[i]
        i -= i & -i
    return total


@njit(cache=True, **INNER)
def _compare(tree, total, i, rank, sign, less_at, pairs):  # type: ignore[no-untyped-def]
    """Add the weights in a tree to the pairs of row i: those of lower rank to column `less_at`."""
    less = _upto(tree, rank)
    equal = _upto(tree, rank + 1) - less
    pairs[i, less_at] += sign * less
    pairs[i, 1 - less_at] += sign * (total - less - equal)
    pairs[i, 2] += sign * equal


@njit(cache=True)
def _compare_with_later(stop, start, event, weight, rank, leaving, tree, pairs):  # type: ignore[no-untyped-def]
    """Compare rows that have an event with rows at risk after it; return the pairs tied in time."""
    n, at, out, total, tied_times = len(stop), 0, 0, 0.0, 0.0
    while at < n:
        time, end, died, squares = stop[at], at, 0.0, 0.0
        while end < n and stop[end] == time:
            if event[end]:
                died += weight[end]
                squares += weight[end] ** 2
            else:  # censored at the time: still at risk
                _add(tree, rank[end], weight[end])
                total += weight[end]
            end += 1
        tied_times += 0.5 * (died**2 - squares)
        while out < len(leaving) and start[leaving[out]] >= time:
            i = leaving[out]
            if stop[i] > time:
                _add(tree, rank[i], -weight[i])
                total -= weight[i]
            out += 1
        for i in range(at, end):
            if event[i]:
                _compare(tree, total, i, rank[i], 1.0, 0, pairs)
        for i in range(at, end):
            if event[i]:
                _add(tree, rank[i], weight[i])
                total += weight[i]
        at = end
    return tied_times


@njit(cache=True)
def _compare_with_earlier(stop, start, event, weight, rank, entering, tree, pairs):  # type: ignore[no-untyped-def]
    """Compare rows with events before their stop and after their start: the pairs' other members."""
    k, entered, total = len(stop) - 1, 0, 0.0
    while k >= 0:
        time, end = stop[k], k
        while end >= 0 and stop[end] == time:
            end -= 1
        # What happened up to the start of a row is not compared with it.
        while entered < len(entering) and start[entering[entered]] < time:
            i = entering[entered]
            _compare(tree, total, i, rank[i], -1.0, 1, pairs)
            entered += 1
        for i in range(end + 1, k + 1):
            if event[i]:
                _compare(tree, total, i, rank[i], 1.0, 1, pairs)
        for i in range(end + 1, k + 1):
            if event[i]:
                _add(tree, rank[i], weight[i])
                total += weight[i]
        for i in range(end + 1, k + 1):
            if not event[i]:
                _compare(tree, total, i, rank[i], 1.0, 1, pairs)
        k = end


def _compare_all(
    stop: Floats, start: Floats, event: Bools, weight: Floats, rank: Ints
) -> tuple[Floats, float]:
    """Compare few rows, each with each; return pairs (n, 3) and the pairs tied in time."""
    later = event[:, None] & (start < stop[:, None])
    later &= (stop > stop[:, None]) | ((stop == stop[:, None]) & ~event)
    order = np.sign(rank[:, None] - rank)
    known = [(later & (order == sign)).astype(np.float64) for sign in (1, -1, 0)]
    pairs = np.column_stack([one @ weight + weight @ one for one in known])
    died, squares = (
        np.bincount(np.unique(stop, return_inverse=True)[1], event * w) for w in (weight, weight**2)
    )
    return pairs, 0.5 * float((died**2 - squares).sum())


def concordance(table: RiskTable, eta: Floats) -> tuple[Floats, Floats]:
    """Count pairs whose order is known, over all rows and for each row.

    Returns
    -------
    pairs : (4,) array
        Weighted pairs: concordant (the row with the larger `eta` has its event first), discordant, tied in
        `eta`, tied in time.
    influences : (n, 2) array
        For each row, times its weight: concordant less discordant pairs, and comparable pairs.
    """
    found, tied = np.zeros((len(eta), 3)), 0.0
    for rows in np.split(table.order, np.flatnonzero(np.diff(table.stratum[table.order])) + 1):
        levels, rank = np.unique(eta[rows], return_inverse=True)
        start, counted = table.start[rows], np.zeros((len(rows), 3))
        columns = table.stop[rows], start, table.event[rows], table.weight[rows], rank
        if len(rows) <= FEW:
            found[rows], more = _compare_all(*columns)
            tied += more
            continue
        entering = np.argsort(start, kind="stable")
        leaving = entering[::-1].copy() if len(table.leaving) else entering[:0]
        tied += _compare_with_later(*columns, leaving, np.zeros(len(levels) + 1), counted)
        _compare_with_earlier(*columns, entering, np.zeros(len(levels) + 1), counted)
        found[rows] = counted
    w = table.weight
    if table.counts:  # pairs of the rows for which one row stands
        tied += float((w * (w - 1.0))[table.event].sum()) / 2.0
    pairs = np.append(w @ found / 2.0, tied)
    return pairs, np.column_stack([w * (found[:, 0] - found[:, 1]), w * found.sum(axis=1)])
