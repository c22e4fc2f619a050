"""One coefficient over sites: Cochran's Q, I2, the mean of random effects, and a further site."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from fedstat.errors import ModelError
from fedstat.inference.heterogeneity.between_sites import VARIANCES, further_site, weighted_mean
from fedstat.typing import Floats

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Combination:
    """What `combine` finds; nan where it does not exist.

    Q with df and p-value is Cochran's test of equal effects over `sites` with an estimate; I2 in [0, 1] is
    the share of the spread of the estimates that is not chance, with its interval; tau2 the variance of the
    effect between sites; ``re_`` the mean effect with its interval, ``pred_`` the interval for a further
    site.
    """

    sites: int
    Q: float = NAN
    df: int = 0
    p_value: float = NAN
    I2: float = NAN
    I2_low: float = NAN
    I2_high: float = NAN
    tau2: float = NAN
    re_estimate: float = NAN
    re_std_error: float = NAN
    re_low: float = NAN
    re_high: float = NAN
    pred_low: float = NAN
    pred_high: float = NAN


@dataclass(frozen=True, slots=True)
class Combining:
    """How `combine` finds tau2, the interval of the mean and that of a further site; in metafor's words.

    `method`: "REML" or "DL". `test`: "knha", Hartung's and Knapp's standard error with t on m - 1 degrees of
    freedom over m sites; "adhoc", the same never below that of known variances; "z", that of known variances
    with a normal quantile. `prediction`: "confidence" as in
    :func:`fedstat.inference.heterogeneity.between_sites.further_site`, or "t", that of metafor's ``predict``.
    """

    method: str = "REML"
    test: str = "adhoc"
    prediction: str = "confidence"

    def __post_init__(self) -> None:
        for what, allowed in CHOICES.items():
            if getattr(self, what) not in allowed:
                listed = ", ".join(map(repr, allowed))
                raise ModelError(
                    f"random_effects: expected {what} to be one of {listed}, received {getattr(self, what)!r}"
                )


CHOICES = {
    "method": tuple(VARIANCES),
    "test": ("adhoc", "knha", "z"),
    "prediction": ("confidence", "t"),
}
USUAL = Combining()


def combine(estimates: Floats, variances: Floats, alpha: float = 0.05, how: Combining = USUAL) -> Combination:
    """Compare sites' own estimates (K,) of one coefficient, with positive variances (K,), and average them.

    Sites where either is nan are left out; `alpha` is one minus the level of intervals. With weights
    w = 1 / variance over m sites: Q = sum w (b - mean)^2 on df = m - 1 (Cochran 1954), I2 = (Q - df) / Q
    (Higgins and Thompson 2002), not below zero. tau2 and the intervals are found as `how` says; that of a
    further site needs three sites. With "DL" I2 is metafor's ``100 tau2 / (tau2 + typical variance)``; with
    "REML" tau2 can be zero where I2, which stays that of Q, is not.

    References
    ----------
    Cochran, The combination of estimates from different experiments, Biometrics 10 (1954) 101-129.
    DerSimonian and Laird, Meta-analysis in clinical trials, Controlled Clinical Trials 7 (1986) 177-188.
    Viechtbauer, Bias and efficiency of meta-analytic variance estimators in the random-effects model,
    J. Educ. Behav. Statist. 30 (2005) 261-293.
    Higgins and Thompson, Quantifying heterogeneity in a meta-analysis, Stat. Medicine 21 (2002) 1539-1558.
    Knapp and Hartung, Improved tests for a random effects meta-regression with a single covariate,
    Stat. Medicine 22 (2003) 2693-2710.
    Nagashima, Noma and Furukawa, Prediction intervals for random-effects meta-analysis: a confidence
    distribution approach, Stat. Methods Med. Res. 28 (2019) 1689-1702.
    """
    known = np.isfinite(estimates) & np.isfinite(variances)
    b, v = estimates[known], variances[known]
    m = len(b)
    if m < 2:
        return Combination(m)
    Q = float(weighted_mean(b, v, 0.0)[2])
    tau2 = VARIANCES[how.method](b, v)
    mean, se, quantile = _mean(b, v, tau2, alpha, how.test)
    pred = NAN, NAN
    if m > 2 and how.prediction == "t":
        further = quantile * (tau2 + se**2) ** 0.5
        pred = mean - further, mean + further
    elif m > 2:
        pred = further_site(b, v, alpha)
    low, high = i2_interval(Q, m, alpha)
    return Combination(
        sites=m,
        Q=Q,
        df=m - 1,
        p_value=float(stats.chi2.sf(Q, m - 1)),
        I2=_i2(Q / (m - 1)),
        I2_low=low,
        I2_high=high,
        tau2=tau2,
        re_estimate=mean,
        re_std_error=se,
        re_low=mean - quantile * se,
        re_high=mean + quantile * se,
        pred_low=pred[0],
        pred_high=pred[1],
    )


def _mean(b: Floats, v: Floats, tau2: float, alpha: float, test: str) -> tuple[float, float, float]:
    """Mean effect, its standard error, and the quantile of its interval."""
    mean, variance, Q = (float(part) for part in weighted_mean(b, v, tau2))
    if test == "z":
        return mean, variance**0.5, float(stats.norm.isf(alpha / 2.0))
    # The spread of the estimates about their mean, against what known variances make of it.
    spread = Q / (len(b) - 1)
    factor = max(spread, 1.0) if test == "adhoc" else spread
    return mean, (variance * factor) ** 0.5, float(stats.t.isf(alpha / 2.0, len(b) - 1))


def i2_interval(Q: float, m: int, alpha: float = 0.05) -> tuple[float, float]:
    """Interval of I2 over m sites from that of ln H, H^2 = Q / (m - 1) (Higgins and Thompson 2002).

    nan for two sites that agree (Q <= 2), where the standard error of ln H is not defined.
    """
    # Two formulas of Higgins and Thompson for the standard error of ln H, by whether Q exceeds m.
    if m < Q:
        se = 0.5 * np.log(Q / (m - 1)) / (np.sqrt(2.0 * Q) - np.sqrt(2.0 * m - 3.0))
    elif m > 2:
        se = np.sqrt((1.0 - 1.0 / (3.0 * (m - 2) ** 2)) / (2.0 * (m - 2)))
    else:
        return NAN, NAN
    half = 2.0 * float(stats.norm.isf(alpha / 2.0) * se)
    H2 = Q / (m - 1)
    return _i2(H2 * np.exp(-half)), _i2(H2 * np.exp(half))


def _i2(H2: float) -> float:
    return max(0.0, 1.0 - 1.0 / float(H2)) if H2 > 0.0 else 0.0
