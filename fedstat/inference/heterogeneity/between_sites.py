"""The variance of an effect between sites, and what it says of a further site."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import optimize, special, stats

from fedstat.typing import Floats

NODES = 32
"""Of Gauss and Legendre's rule, over variances and over errors."""
GRID = np.geomspace(1e-6, 1e3, 91)
"""Variances between sites at which a likelihood is tried, in units of the spread or the mean variance."""
BISECTIONS = 60
ROUNDED = 1e-10
"""By how much less a loss, minus twice a log-likelihood, is less by rounding."""
SMALLEST_Q = 1e-12
"""Where all confidence is in a variance of zero, Q would have to be zero for any other."""


def weighted_mean(b: Floats, v: Floats, tau2: Floats | float) -> tuple[Floats, Floats, Floats]:
    """Mean, its variance and the generalised Q at variances between sites (...,), each of that shape."""
    w = 1.0 / (v + np.asarray(tau2)[..., None])
    total = w.sum(axis=-1)
    mean = w @ b / total
    return mean, 1.0 / total, (w * (b - mean[..., None]) ** 2).sum(axis=-1)


def dersimonian_laird(b: Floats, v: Floats) -> float:
    """Variance between sites by moments, ``(Q - (m - 1)) / (sum w - sum w^2 / sum w)``, not below zero."""
    w = 1.0 / v
    _, _, Q = weighted_mean(b, v, 0.0)
    # The expectation of Q is m - 1 where the effects are equal.
    return max(0.0, float(Q - (len(b) - 1)) / float(w.sum() - w @ w / w.sum()))


def restricted_likelihood(b: Floats, v: Floats) -> float:
    """Variance between sites that maximises the restricted likelihood (Viechtbauer 2005)."""

    def loss(tau2: Floats | float) -> Floats:
        _, variance, Q = weighted_mean(b, v, tau2)
        logs = np.log(v + np.asarray(tau2)[..., None]).sum(axis=-1)
        return np.asarray(logs - np.log(variance) + Q)

    # It may have two maxima: the best of a grid is refined, and zero is one of its points.
    grid = np.append(0.0, GRID * max(float(np.var(b, ddof=1)), float(v.mean())))
    best = int(np.argmin(loss(grid)))
    bounds = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    found = optimize.minimize_scalar(
        lambda tau2: float(loss(tau2)), bounds=bounds, method="bounded", options={"xatol": 1e-10 * bounds[1]}
    )
    return float(found.x) if found.fun < float(loss(0.0)) - ROUNDED else 0.0


VARIANCES: dict[str, Callable[[Floats, Floats], float]] = {
    "REML": restricted_likelihood,
    "DL": dersimonian_laird,
}


def further_site(b: Floats, v: Floats, alpha: float) -> tuple[float, float]:
    """Interval of level ``1 - alpha`` for the effect at a further site, from m >= 3 sites' estimates (m,).

    Nagashima, Noma and Furukawa (2019): the effect is ``mean + se T + tau Z``, T of Student with m - 1
    degrees of freedom, Z normal, and tau^2 not one estimate but all values by their confidence: Q at the true
    variance is chi-squared (Viechtbauer 2007). So the interval does not shrink where tau^2 happens to be
    estimated as zero. What they draw at random is integrated here.
    """
    m, unit = len(b), float(np.sqrt(v.mean()))
    b, v = b / unit, v / unit**2
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    nodes, weights = (nodes + 1.0) / 2.0, weights / 2.0
    # Confidence in a variance of zero is an atom; the rest is spread over the positive ones.
    zero = float(stats.chi2.sf(weighted_mean(b, v, 0.0)[2], m - 1))
    Q = np.maximum(stats.chi2.isf(zero + (1.0 - zero) * nodes, m - 1), SMALLEST_Q)
    tau2 = np.append(0.0, _where_q_is(Q, b, v))
    share = np.append(zero, (1.0 - zero) * weights)
    mean, variance, _ = weighted_mean(b, v, tau2)
    se, tau = np.sqrt(variance)[:, None], np.sqrt(tau2)[:, None]
    wide = tau > se
    # The wider of both laws is the smoother one: it is integrated in closed form, the other by the rule.
    shift = mean[:, None] + np.where(wide, se * stats.t.ppf(nodes, m - 1), tau * stats.norm.ppf(nodes))

    def beyond(x: float, level: float) -> float:
        z = (x - shift) / np.where(wide, tau, se)
        return float(share @ np.where(wide, special.ndtr(z), special.stdtr(m - 1, z)) @ weights) - level

    reach = float(np.sqrt(tau2.max() + variance.max())) * stats.t.isf(alpha / 8.0, m - 1)
    low, high = float(mean.min()) - reach, float(mean.max()) + reach
    ends = (optimize.brentq(beyond, low, high, args=(p,)) for p in (alpha / 2.0, 1.0 - alpha / 2.0))
    return unit * next(ends), unit * next(ends)


def _where_q_is(Q: Floats, b: Floats, v: Floats) -> Floats:
    """Variances between sites at which the generalised Q, which falls with them, has these values."""
    low = np.zeros(len(Q))
    high = ((b - b.mean()) ** 2).sum() / Q
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        above = weighted_mean(b, v, middle)[2] > Q
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.asarray((low + high) / 2.0)
