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
    """

    times: Floats
    events: Floats
    censored: Floats
    beyond: Floats
    entered: Floats | None = None

    @property
    def at_risk(self) -> Floats:
        """Rows that entered before the end of each interval, and do not leave before it, (G, J)."""
        leaving = self.events + self.censored
        if self.entered is not None:
            before = leaving.cumsum(axis=1) - leaving
            # Averages of starts and of ends are of different rows: a start may come after its end.
            return np.asarray(np.maximum(self.entered.cumsum(axis=1) - before, leaving))
        return np.asarray(leaving[:, ::-1].cumsum(axis=1)[:, ::-1] + self.beyond[:, None])


def product_limit(counts: SurvivalCounts, conf_level: float, conf_type: str) -> list[pd.DataFrame]:
    """Estimate the survival function of each group, with Greenwood's errors (Kaplan and Meier 1958).

    Events and censored rows count at the end of their interval, so that the estimate is that of times rounded
    up to the grid. Returns frames with columns ``time``, ``n_risk``, ``n_event``, ``n_censor``, ``survival``,
    ``std_error``, ``conf_low``, ``conf_high``; rows are the intervals with an event or a censored row.
    """
    out = []
    for d, c, n in zip(counts.events, counts.censored, counts.at_risk, strict=True):
        known = n > 0.0
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            survival = np.asarray(np.cumprod(np.where(known, 1.0 - d / n, np.nan)), dtype=np.float64)
            # Greenwood's sum: the variance of log S; infinite once nobody survives.
            log_variance = np.cumsum(np.where(known, d / (n * (n - d)), np.nan))
            se = np.sqrt(log_variance)
            low, high = share_interval(survival, se, conf_level, conf_type)
            greenwood = survival * se
        certain = survival == 1.0
        gone = survival == 0.0
        frame = pd.DataFrame(
            {
                "time": counts.times,
                "n_risk": n,
                "n_event": d,
                "n_censor": c,
                "survival": survival,
                "std_error": np.where(gone, np.nan, greenwood),
                "conf_low": np.where(certain, 1.0, np.where(gone, np.nan, low)),
                "conf_high": np.where(certain, 1.0, np.where(gone, np.nan, high)),
            }
        )
        out.append(frame[(d + c > 0.0) & known].reset_index(drop=True))
    return out


def share_interval(
    share: Floats, log_error: Floats, conf_level: float, conf_type: str
) -> tuple[Floats, Floats]:
    """Return the limits of an interval of shares (J,), from the standard errors of their logarithms."""
    z = float(stats.norm.isf((1.0 - conf_level) / 2.0))
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


def survival_quantiles(frame: pd.DataFrame, level: float) -> tuple[float, float, float]:
    """Return a quantile of the survival time and the limits of its interval (Brookmeyer and Crowley 1982)."""
    times = frame["time"].to_numpy()
    curves = (frame[name].to_numpy() for name in ("survival", "conf_low", "conf_high"))
    estimate, low, high = (curve_quantile(times, curve, level) for curve in curves)
    return estimate, low, high


def restricted_mean(frame: pd.DataFrame, until: float) -> tuple[float, float]:
    """Return the mean survival time up to `until`, the area below the curve, and its standard error."""
    inside = frame[frame["time"] <= until]
    times = np.concatenate([[0.0], inside["time"].to_numpy(), [until]])
    survival = np.concatenate([[1.0], inside["survival"].to_numpy()])
    areas = survival * np.diff(times)
    after = areas[::-1].cumsum()[::-1][1:]
    n, d = inside["n_risk"].to_numpy(), inside["n_event"].to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = np.where(d > 0.0, after**2 * d / (n * (n - d)), 0.0)
    return float(areas.sum()), float(np.sqrt(np.where(n > d, parts, 0.0).sum()))


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
    counts: SurvivalCounts, causes: Floats, conf_level: float, conf_type: str
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
    conf_level : float
    conf_type : str
        One of :data:`CONFIDENCE`.

    Returns
    -------
    list of list of DataFrame
        By group and event, with columns ``time``, ``n_risk``, ``n_event``, ``incidence``, ``std_error``,
        ``conf_low``, ``conf_high``; rows are the intervals with an event of any kind or a censored row.
    """
    out = []
    for d, c, n, by_cause in zip(counts.events, counts.censored, counts.at_risk, causes, strict=True):
        known = (d + c > 0.0) & (n > 0.0)
        d, n, by_cause, times = d[known], n[known], by_cause[known], counts.times[known]
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
            low, high = share_interval(np.where(none, 0.5, share), relative, conf_level, conf_type)
            frame = {"time": times, "n_risk": n, "n_event": k, "incidence": share, "std_error": error}
            limits = {"conf_low": np.where(none, 0.0, low), "conf_high": np.where(none, 0.0, high)}
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
