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
    """

    times: Floats
    events: Floats
    censored: Floats
    beyond: Floats

    @property
    def at_risk(self) -> Floats:
        """Rows whose time does not end before each interval, (G, J)."""
        leaving = self.events + self.censored
        return np.asarray(leaving[:, ::-1].cumsum(axis=1)[:, ::-1] + self.beyond[:, None])


def product_limit(counts: SurvivalCounts, conf_level: float, conf_type: str) -> list[pd.DataFrame]:
    """Estimate the survival function of each group, with Greenwood's errors (Kaplan and Meier 1958).

    Events and censored rows count at the end of their interval, so that the estimate is that of times rounded
    up to the grid. Returns frames with columns ``time``, ``n_risk``, ``n_event``, ``n_censor``, ``survival``,
    ``std_error``, ``conf_low``, ``conf_high``; rows are the intervals with an event or a censored row.
    """
    z, out = float(stats.norm.isf((1.0 - conf_level) / 2.0)), []
    for d, c, n in zip(counts.events, counts.censored, counts.at_risk, strict=True):
        known = n > 0.0
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            survival = np.cumprod(np.where(known, 1.0 - d / n, np.nan))
            # Greenwood's sum: the variance of log S; infinite once nobody survives.
            log_variance = np.cumsum(np.where(known, d / (n * (n - d)), np.nan))
            se = np.sqrt(log_variance)
            if conf_type == "log-log":
                half = z * se / np.abs(np.log(survival))
                low, high = survival ** np.exp(half), survival ** np.exp(-half)
            elif conf_type == "log":
                low, high = survival * np.exp(-z * se), np.minimum(survival * np.exp(z * se), 1.0)
            else:
                low = np.maximum(survival * (1.0 - z * se), 0.0)
                high = np.minimum(survival * (1.0 + z * se), 1.0)
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


def log_rank(events: Floats, at_risk: Floats, rho: float = 0.0) -> LogRankSums:
    """Sum the log-rank test, or G-rho (Harrington and Fleming 1982), from events and rows at risk, (G, J)."""
    d, n = events.sum(axis=0), at_risk.sum(axis=0)
    there = n > 0.0
    d, n, events, at_risk = d[there], n[there], events[:, there], at_risk[:, there]
    survival = np.concatenate([[1.0], np.cumprod(1.0 - d / n)[:-1]])
    weight = survival**rho
    share = at_risk / n
    spread = np.divide(d * (n - d), n - 1.0, out=np.zeros_like(d), where=n > 1.0) * weight**2
    covariance = np.diag(share @ spread) - (share * spread) @ share.T
    return LogRankSums((events * weight).sum(axis=1), (share * (d * weight)).sum(axis=1), covariance)
