"""Survival curves and their comparison from numbers of events and of rows at risk by group and time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.typing import Floats

CONFIDENCE = ("log-log", "log", "plain")
"""Scales of the intervals of a survival probability."""


@dataclass(frozen=True, slots=True, eq=False)
class SurvivalCounts:
    """Counts on a grid of times, by group.

    Parameters
    ----------
    times : (J,) array
        Ends of the intervals, ascending.
    events, censored : (G, J) array
        Rows with an event, and rows without, whose time ends in each interval.
    beyond : (G,) array
        Rows whose time ends after the last interval.
    entered : (G, J) array, optional
        Rows that enter at the beginning of each interval; by default all enter at time 0.
    at_ends, events_at_ends : (G, J) array, optional
        Of the rows that leave, and of those with an event, the ones whose time is exactly the end of the
        interval. The times of the others are spread over the interval. By default all times are ends.
    """

    times: Floats
    events: Floats
    censored: Floats
    beyond: Floats
    entered: Floats | None = None
    at_ends: Floats | None = None
    events_at_ends: Floats | None = None

    @property
    def at_start(self) -> Floats:
        """Rows at risk at the beginning of each interval or in it, (G, J).

        They entered before its end, and do not leave before its beginning.
        """
        leaving = self.events + self.censored
        if self.entered is not None:
            before = leaving.cumsum(axis=1) - leaving
            return np.asarray(np.maximum(self.entered.cumsum(axis=1) - before, leaving))
        return np.asarray(leaving[:, ::-1].cumsum(axis=1)[:, ::-1] + self.beyond[:, None])

    @property
    def at_risk(self) -> Floats:
        """Numbers by which the events of an interval are divided, (G, J): one minus the ratio survives it.

        If all times are ends, these are the rows at its beginning. Otherwise d events and c censored rows
        within the interval are in random order. If their hazards have a constant ratio, the share
        ``(1 - (d + c) / n)^(d / (d + c))`` survives them, and then the events at the end. The number is that
        of a single time with all events of the interval after which the same share survives.
        """
        n = self.at_start
        if self.at_ends is None or self.events_at_ends is None:
            return n
        leaving = self.events + self.censored - self.at_ends
        d, left = self.events - self.events_at_ends, n - leaving
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(leaving > 0.0, (left / n) ** (d / leaving), 1.0)
            # If nobody stays, the censored rows are at risk for half of the interval (the actuarial
            # estimate).
            share = np.where((left <= 0.0) & (d > 0.0), 1.0 - d / (n - (leaving - d) / 2.0), share)
            share = share * np.where(self.events_at_ends > 0.0, 1.0 - self.events_at_ends / left, 1.0)
            found = np.where(self.events > 0.0, self.events / (1.0 - share), n)
            # To the last digit where all times are ends.
            found = np.where(leaving > 0.0, found, n)
        return np.asarray(found)

    @property
    def log_variance(self) -> Floats:
        """Variance of the logarithm of the share that survives each interval, (G, J).

        Greenwood's sum over events and censored rows in random order is ``d / (n (n - d - c))``: the error of
        a curve that has their exact times. A constant ratio of hazards alone would give a smaller one.
        """
        n, d = self.at_risk, self.events
        with np.errstate(divide="ignore", invalid="ignore"):
            single = d / (n * (n - d))
            if self.at_ends is None or self.events_at_ends is None:
                return np.asarray(single)
            n, at_end = self.at_start, self.events_at_ends
            left = n - (d + self.censored - self.at_ends)
            found = (d - at_end) / (n * left) + np.where(at_end > 0.0, at_end / (left * (left - at_end)), 0.0)
        return np.asarray(np.where(left > 0.0, found, single))

    @property
    def at_risk_at_ends(self) -> Floats:
        """Rows at risk at the end of each interval, (G, J): their time is not earlier.

        Where rows at the very end were not counted, these are the rows whose time is later.
        """
        after = self.at_start - self.events - self.censored
        return after if self.at_ends is None else np.asarray(after + self.at_ends)


def product_limit(
    counts: SurvivalCounts, alpha: float, conf_type: str, noise: Floats | None = None
) -> list[pd.DataFrame]:
    """Estimate the survival function of each group, with Greenwood's errors (Kaplan and Meier 1958).

    Events are divided by :attr:`SurvivalCounts.at_risk`, and errors are from
    :attr:`SurvivalCounts.log_variance`. Until the first event the lower limit is that of Clopper and Pearson
    for no event among the rows at risk. `noise` (G, J) is the variance that noise on the counts adds to the
    logarithm of the curve. Returns frames with columns ``time``, ``n_risk`` (at this time),
    ``n_start`` (at the beginning of the interval), ``n_event``, ``n_censor``, ``survival``, ``std_error``,
    ``conf_low``, ``conf_high``; rows are the intervals with an event or a censored row.
    """
    out = []
    parts = (counts.events, counts.censored, counts.at_risk, counts.at_start, counts.at_risk_at_ends)
    added = np.zeros_like(counts.events) if noise is None else noise
    for d, c, n, start, at_end, variance, more in zip(*parts, counts.log_variance, added, strict=True):
        known = n > 0.0
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            survival = np.asarray(np.cumprod(np.where(known, 1.0 - d / n, np.nan)), dtype=np.float64)
            # Infinite when no row survives.
            se = np.sqrt(np.cumsum(np.where(known, variance, np.nan)) + more)
            low, high = share_interval(survival, se, alpha, conf_type)
            greenwood = survival * se
        certain = (survival == 1.0) & (more == 0.0)
        gone = survival == 0.0
        frame = pd.DataFrame(
            {
                "time": counts.times,
                "n_risk": at_end,
                "n_start": start,
                "n_event": d,
                "n_censor": c,
                "survival": survival,
                "std_error": np.where(gone, np.nan, greenwood),
                "conf_low": np.where(certain, no_event_limit(start, alpha), np.where(gone, np.nan, low)),
                "conf_high": np.where(certain, 1.0, np.where(gone, np.nan, high)),
            }
        )
        out.append(frame[(d + c > 0.0) & known].reset_index(drop=True))
    return out


def no_event_limit(n: Floats, alpha: float) -> Floats:
    """Return the lower limit of a share of n rows (J,) that all have (Clopper and Pearson 1934)."""
    return np.asarray((alpha / 2.0) ** (1.0 / np.maximum(n, 1.0)))


def share_interval(share: Floats, log_error: Floats, alpha: float, conf_type: str) -> tuple[Floats, Floats]:
    """Return the limits of an interval of shares (J,), from the standard errors of their logarithms."""
    z = float(stats.norm.isf(alpha / 2.0))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if conf_type == "log-log":
            half = z * log_error / np.abs(np.log(share))
            return share ** np.exp(half), share ** np.exp(-half)
        if conf_type == "log":
            return share * np.exp(-z * log_error), np.minimum(share * np.exp(z * log_error), 1.0)
        return np.maximum(share * (1.0 - z * log_error), 0.0), np.minimum(share * (1.0 + z * log_error), 1.0)


def curve_quantile(times: Floats, curve: Floats, level: float) -> float:
    """Return the time at which a step function falls to `level` or below; nan where it does not.

    As R's survfit: where the curve equals the level over an interval, the middle of that interval.
    """
    with np.errstate(invalid="ignore"):
        below = np.flatnonzero(curve <= level + 1e-9)
    if not len(below):
        return float("nan")
    first = int(below[0])
    if abs(float(curve[first]) - level) < 1e-9:
        later = np.flatnonzero(curve < level - 1e-9)
        if len(later):
            return float(times[first] + times[int(later[0])]) / 2.0
    return float(times[first])


@dataclass(frozen=True, slots=True, eq=False)
class KnownCurve:
    """A curve with limits, known at times (J,): `values` (J, 3) are the curve, lower and upper limit.

    `start` are the same at time 0, and known without error. Between two times a curve that rises or falls is
    between its values there, and so are its limits.
    """

    times: Floats
    values: Floats
    start: float

    def at(self, points: Floats) -> Floats:
        """Return curve and limits at points (m,), (m, 3): NaN for the curve where it is not known.

        A curve is known at its times, and between two times at which it is the same. Between other times the
        limits are the outer ones of the two. All are NaN after the last time.
        """
        known = np.vstack([np.full(3, self.start), self.values])
        times = np.append(0.0, self.times)
        out = np.full((len(points), 3), np.nan)
        for row, point in enumerate(np.asarray(points, dtype=np.float64)):
            before = int(np.searchsorted(times, point * (1.0 + TIME_TOLERANCE), side="right")) - 1
            if not point <= times[-1] * (1.0 + TIME_TOLERANCE):
                continue
            left = known[max(before, 0)]
            right = known[min(before + 1, len(times) - 1)]
            exact = before < 0 or point <= times[before] * (1.0 + TIME_TOLERANCE) or left[0] == right[0]
            if exact:
                out[row] = left
            else:
                both = np.array([left, right])
                # At a curve of zero there are no limits; the curve is not below zero.
                ends = np.where(np.isnan(both), both[:, :1], both)
                out[row] = np.nan, ends[:, 1].min(), ends[:, 2].max()
        return out

    def between(self, points: Floats) -> str:
        """Say for points that are not known between which times they are, and what to do."""
        times = np.append(0.0, self.times)
        places = np.clip(np.searchsorted(times, points[:MOST_SHOWN]), 1, len(times) - 1)
        named = (
            f"{point:g} (between {times[place - 1]:g} and {times[place]:g})"
            for point, place in zip(points.tolist(), places.tolist(), strict=False)
        )
        more = f" and {len(points) - MOST_SHOWN} more" if len(points) > MOST_SHOWN else ""
        remedy = "Choose times among the ends of intervals, or a grid with these ends"
        return f"at {', '.join(named)}{more}. {remedy}"


MOST_SHOWN = 4
"""Times that a warning names."""
TIME_TOLERANCE = 1e-9
"""Relative difference of a time and the end of an interval that are the same."""
WIDE_STEP = 0.1
"""Fall of a survival curve over one interval above which nothing is read off within the interval."""


def survival_quantiles(
    curve: KnownCurve, level: float, on_ends: bool
) -> tuple[float, float, float, float, float]:
    """Return a quantile of the survival time, its limits, and the interval of time in which it is.

    The limits are those of Brookmeyer and Crowley (1982). If the times are ends of intervals they
    are those of R's survfit, and otherwise the outer ends of the intervals in which the limits of the curve
    cross the level. Where the curve falls by more than :data:`WIDE_STEP` over the interval in which it
    crosses the level, the quantile is NaN.
    """
    times, values = np.append(0.0, curve.times), np.vstack([np.full(3, curve.start), curve.values])
    fall = np.append(0.0, -np.diff(values[:, 0]))
    estimate, low, high = (curve_quantile(curve.times, one, level) for one in curve.values.T)
    after = upto = np.nan
    if np.isfinite(estimate):
        first, last = _crossing(values[:, 0], level), int(np.searchsorted(times, estimate))
        after, upto = float(times[first - 1]), float(times[last])
        if fall[first : last + 1].max() > WIDE_STEP:
            estimate = np.nan
    if np.isfinite(low):
        first = _crossing(values[:, 1], level)
        if not on_ends or fall[first] > WIDE_STEP:
            low = float(times[first - 1])
    return estimate, low, high, after, upto


def _crossing(curve: Floats, level: float) -> int:
    with np.errstate(invalid="ignore"):
        return int(np.flatnonzero(curve <= level + 1e-9)[0])


def restricted_mean(times: Floats, frame: pd.DataFrame, until: float, spread: Floats) -> tuple[float, float]:
    """Return the mean survival time up to `until`, the area below the curve, and its standard error.

    The events of an interval that ends at one of `times` (J,) are spread evenly over the times `spread` (R,)
    in it. With the same times the mean is R's, of times that are rounded up to them.
    """
    places = np.searchsorted(frame["time"], np.append(0.0, times), side="right")
    ends = np.append(0.0, times)
    values = np.append(1.0, frame["survival"])[places]
    # The variance of the logarithm grows by each interval's part of Greenwood's sum.
    with np.errstate(divide="ignore", invalid="ignore"):
        log_variance = (np.append(0.0, frame["std_error"])[places] / values) ** 2
    parts = np.nan_to_num(np.diff(log_variance), nan=0.0, posinf=0.0)
    inner = np.union1d(times, spread[spread <= times[-1]])
    last = np.searchsorted(ends, inner)
    first, steps, done = (
        np.searchsorted(spread, at, side="right") for at in (ends[last - 1], ends[last], inner)
    )
    share = np.where(inner >= ends[last], 1.0, (done - first) / np.maximum(steps - first, 1))
    curve = values[last - 1] + (values[last] - values[last - 1]) * share
    inside = inner < until
    steps_of_time = np.diff(np.concatenate([[0.0], inner[inside], [until]]))
    areas = np.concatenate([[1.0], curve[inside]]) * steps_of_time
    # Each event counts with the area after it, the mean over the times among which it is spread.
    after = np.zeros(len(inner))
    after[inside] = areas[::-1].cumsum()[::-1][1:]
    mean_after = np.bincount(last, after, len(ends))[1:] / np.maximum(
        np.bincount(last, minlength=len(ends))[1:], 1
    )
    return float(areas.sum()), float(np.sqrt(mean_after**2 @ parts))


@dataclass(frozen=True, slots=True, eq=False)
class LogRankSums:
    """Observed and expected events of each group (G,), and the covariance of their differences (G, G)."""

    observed: Floats
    expected: Floats
    covariance: Floats

    def test(self) -> tuple[float, int, float]:
        """Return statistic, degrees of freedom and p-value; groups without expected events are left out."""
        with_rows = np.flatnonzero(self.expected > 0.0)
        df = len(with_rows) - 1
        if df < 1:
            return float("nan"), 0, float("nan")
        kept = with_rows[:-1]
        difference = (self.observed - self.expected)[kept]
        V = self.covariance[np.ix_(kept, kept)]
        statistic = float(difference @ np.linalg.solve(V, difference))
        return statistic, df, float(stats.chi2.sf(statistic, df))


def log_rank(events: Floats, at_risk: Floats, rho: float = 0.0, gamma: float = 0.0) -> LogRankSums:
    """Sum the log-rank test from events and rows at risk, (G, J).

    Times are weighted by ``S^rho (1 - S)^gamma``, S the survival probability of all groups before each time
    (Harrington and Fleming 1982 for gamma 0; Fleming and Harrington 1991, section 7.2).
    """
    d, n = events.sum(axis=0), at_risk.sum(axis=0)
    there = n > 0.0
    d, n, events, at_risk = d[there], n[there], events[:, there], at_risk[:, there]
    survival = np.concatenate([[1.0], np.cumprod(1.0 - d / n)[:-1]])
    weight = survival**rho * (1.0 - survival) ** gamma
    share = at_risk / n
    spread = np.divide(d * (n - d), n - 1.0, out=np.zeros_like(d), where=n > 1.0) * weight**2
    covariance = np.diag(share @ spread) - (share * spread) @ share.T
    return LogRankSums((events * weight).sum(axis=1), (share * (d * weight)).sum(axis=1), covariance)


# ----------------------------------------------------------------------------------------------------
# Competing events.


def cumulative_incidence(
    counts: SurvivalCounts, causes: Floats, alpha: float, conf_type: str
) -> list[list[pd.DataFrame]]:
    """Estimate the cumulative incidence of each event in each group (Aalen and Johansen 1978).

    Standard errors are by the delta method from multinomial events at each time (Marubini and Valsecchi 1995,
    equation 10.12); without late entry they are R's survfit's.

    Parameters
    ----------
    counts : SurvivalCounts
        Of events of any kind.
    causes : (G, J, C) array
        Rows with each event.
    alpha : float
    conf_type : str
        One of :data:`CONFIDENCE`.

    Returns
    -------
    list of list of DataFrame
        By group and event, with columns ``time``, ``n_risk`` (at this time), ``n_start`` (at the beginning of
        the interval), ``n_event``, ``incidence``, ``std_error``, ``conf_low``, ``conf_high``; rows are the
        intervals with an event of any kind or a censored row. Until the first event the upper limit is that
        of Clopper and Pearson for no event among the rows at risk.
    """
    out = []
    parts = (counts.events, counts.censored, counts.at_risk, counts.at_start, counts.at_risk_at_ends, causes)
    for d, c, n, start, at_end, by_cause in zip(*parts, strict=True):
        known = (d + c > 0.0) & (n > 0.0)
        start = start[known]
        d, n, at_end, by_cause, times = (
            d[known],
            n[known],
            at_end[known],
            by_cause[known],
            counts.times[known],
        )
        before = np.concatenate([[1.0], np.cumprod(1.0 - d / n)[:-1]])
        hazard = np.divide(d, n * (n - d), out=np.zeros_like(d), where=n > d)
        frames = []
        for k in by_cause.T:
            share = np.cumsum(before * k / n)
            # Var F(t) = sum over s <= t of (F(t) - F(s))^2 u + w - 2 (F(t) - F(s)) v
            u, v, w = hazard, before * k / n**2, before**2 * k * (n - k) / n**3
            U, W = np.cumsum(u), np.cumsum(share**2 * u + w + 2.0 * share * v)
            UF = np.cumsum(share * u + v)
            error = np.sqrt(np.maximum(share**2 * U - 2.0 * share * UF + W, 0.0))
            none = share <= 0.0
            relative = np.divide(error, share, out=np.zeros_like(error), where=~none)
            low, high = share_interval(np.where(none, 0.5, share), relative, alpha, conf_type)
            frame = {"time": times, "n_risk": at_end, "n_start": start, "n_event": k, "incidence": share}
            limits = {
                "std_error": error,
                "conf_low": np.where(none, 0.0, low),
                "conf_high": np.where(none, 1.0 - no_event_limit(start, alpha), high),
            }
            frames.append(pd.DataFrame(frame | limits))
        out.append(frames)
    return out


def gray_test(events: Floats, others: Floats, at_risk: Floats, rho: float = 0.0) -> tuple[float, int, float]:
    """Compare the cumulative incidence of an event between groups (Gray 1988).

    The score of group i sums ``(1 - F)^rho (d_i - d R_i / R)``, with ``R_i = n_i (1 - F_i) / S_i`` before
    each time. Its variance is that of Gray's section 3 with his correction for ties, from the increments that
    each group's events of both kinds contribute.

    Parameters
    ----------
    events, others, at_risk : (G, J) array
        Rows with the event, rows with another one, and rows at risk.
    rho : float

    Returns
    -------
    statistic, df, p_value : float, int, float
    """
    G = len(events)
    there = at_risk[:, 0] > 0.0
    survival, incidence, overall = np.ones(G), np.zeros(G), 0.0
    score, c = np.zeros(G), np.zeros((G, G))
    variance, square, cross = np.zeros((G, G)), np.zeros(G), np.zeros((G, G))
    for d, o, n in zip(events.T, others.T, at_risk.T, strict=True):
        at = n > 0.0
        total = float(d[at].sum())
        if not (d + o)[at].any():
            continue
        size = np.where(at, n, 1.0)
        h = np.where(at, n / survival, 0.0)
        R, H = h * (1.0 - incidence), h.sum()
        after = np.where(at, survival * (size - d - o) / size, survival)
        F = overall + total / H
        weight = (1.0 - overall) ** rho
        score += np.where(at, weight * (d - total * R / R.sum()), 0.0)
        a = weight * (np.diag(h) - np.outer(h, h) / H)
        c += a * total / (H * (1.0 - overall))
        rest = np.divide(1.0 - F, after, out=np.zeros(G), where=after > 0.0)
        if total > 0.0:
            ties = 1.0 - (total - 1.0) / (H * survival - 1.0) if total > 1.0 else np.ones(G)
            mass = np.where(at, ties * survival * total / (H * size), 0.0)
            part = a - (1.0 - rest) * c
            square += (1.0 - rest) ** 2 * mass
            cross += part * (1.0 - rest) * mass
            variance += (part * mass) @ part.T
        with_others = at & (after > 0.0) & (o > 0.0)
        if with_others.any():
            ties = np.where(o > 1.0, 1.0 - (o - 1.0) / np.maximum(size - 1.0, 1.0), 1.0)
            mass = np.where(with_others, ties * survival**2 * o / size**2, 0.0)
            square += rest**2 * mass
            cross -= c * rest**2 * mass
            variance += (c * rest**2 * mass) @ c.T
        incidence = np.where(at, incidence + survival * d / size, incidence)
        survival, overall = after, F
    variance += (c * square) @ c.T + c @ cross.T + cross @ c.T
    kept = np.flatnonzero(there)[:-1]
    if not len(kept) or not events.any():
        return float("nan"), 0, float("nan")
    statistic = float(score[kept] @ np.linalg.solve(variance[np.ix_(kept, kept)], score[kept]))
    return statistic, len(kept), float(stats.chi2.sf(statistic, len(kept)))
