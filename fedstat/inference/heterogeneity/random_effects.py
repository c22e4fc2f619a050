"""One coefficient over sites: Cochran's Q, I2, and the mean of DerSimonian and Laird."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

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


def combine(estimates: Floats, variances: Floats, alpha: float = 0.05) -> Combination:
    """Compare sites' own estimates (K,) of one coefficient, with positive variances (K,), and average them.

    Sites where either is nan are left out; `alpha` is one minus the level of intervals. With weights
    w = 1 / variance over m sites: Q = sum w (b - mean)^2 on df = m - 1 (Cochran 1954), I2 = (Q - df) / Q
    (Higgins and Thompson 2002) and tau2 = (Q - df) / (sum w - sum w^2 / sum w) (DerSimonian and Laird 1986),
    both not below zero. The interval of the mean is normal, and too short for few sites; that of a further
    site has t on m - 2 degrees of freedom (Higgins, Thompson and Spiegelhalter 2009) and needs three sites.

    References
    ----------
    Cochran, The combination of estimates from different experiments, Biometrics 10 (1954) 101-129.
    DerSimonian and Laird, Meta-analysis in clinical trials, Controlled Clinical Trials 7 (1986) 177-188.
    Higgins and Thompson, Quantifying heterogeneity in a meta-analysis, Stat. Medicine 21 (2002) 1539-1558.
    Higgins, Thompson and Spiegelhalter, A re-evaluation of random-effects meta-analysis, J. R. Statist.
    Soc. A 172 (2009) 137-159.
    """
    known = np.isfinite(estimates) & np.isfinite(variances)
    b, v = estimates[known], variances[known]
    m = len(b)
    if m < 2:
        return Combination(m)
    w = 1.0 / v
    Q = float(w @ (b - w @ b / w.sum()) ** 2)
    # By moments: the expectation of Q is m - 1 where the effects are equal.
    tau2 = max(0.0, (Q - (m - 1)) / float(w.sum() - w @ w / w.sum()))
    w_re = 1.0 / (v + tau2)
    mean, se = float(w_re @ b / w_re.sum()), float(w_re.sum() ** -0.5)
    half = float(stats.norm.isf(alpha / 2.0)) * se
    further = float(stats.t.isf(alpha / 2.0, m - 2)) * (tau2 + se**2) ** 0.5 if m > 2 else NAN
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
        re_low=mean - half,
        re_high=mean + half,
        pred_low=mean - further,
        pred_high=mean + further,
    )


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
