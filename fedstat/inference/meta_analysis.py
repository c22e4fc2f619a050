"""Random-effects meta-analysis over sites: of one coefficient, and of all coefficients of a factor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from functools import cache
from typing import Literal

import numpy as np
import pandas as pd
from scipy import optimize, special, stats

from fedstat.errors import EstimationError, ModelError
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import DerivedReport
from fedstat.inference.tables import Sheet, number
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# The variance of an effect between sites, and the interval for a further site.

NODES = 32
"""Nodes of the Gauss-Legendre rule, over variances and over errors."""
GRID = np.geomspace(1e-6, 1e3, 91)
"""Variances between sites at which a likelihood is tried, in units of the spread or the mean variance."""
BISECTIONS = 60
ROUNDED = 1e-10
"""Difference of a loss, minus twice a log-likelihood, that counts as rounding."""
SMALLEST_Q = 1e-12
"""If all confidence is in a variance of zero, Q would have to be zero for any other."""
NOTES = Catalogue(
    info={
        "random_effects": "Multivariate random effects of all coefficients together, with an unstructured "
        "covariance between sites by restricted maximum likelihood. Q and I2 are joint as well.",
        "t_tests": "Standard errors and the test of no effect after Jackson and Riley (2014), who extend "
        "Hartung's and Knapp's.",
    },
)


def weighted_mean(b: Floats, v: Floats, tau2: Floats | float) -> tuple[Floats, Floats, Floats]:
    """Mean, its variance and the generalized Q at variances between sites (...,), each of that shape."""
    w = 1.0 / (v + np.asarray(tau2)[..., None])
    total = w.sum(axis=-1)
    mean = w @ b / total
    return mean, 1.0 / total, (w * (b - mean[..., None]) ** 2).sum(axis=-1)


def dersimonian_laird(b: Floats, v: Floats) -> float:
    """Variance between sites by moments, ``(Q - (m - 1)) / (sum w - sum w^2 / sum w)``, not below zero."""
    w = 1.0 / v
    _, _, Q = weighted_mean(b, v, 0.0)
    # The expectation of Q is m - 1 if the effects are equal.
    return max(0.0, float(Q - (len(b) - 1)) / float(w.sum() - w @ w / w.sum()))


def restricted_likelihood(b: Floats, v: Floats) -> float:
    """Variance between sites that maximizes the restricted likelihood (Viechtbauer 2005)."""

    def loss(tau2: Floats | float) -> Floats:
        _, variance, Q = weighted_mean(b, v, tau2)
        logs = np.log(v + np.asarray(tau2)[..., None]).sum(axis=-1)
        return np.asarray(logs - np.log(variance) + Q)

    # It may have two maxima: the best of a grid is refined, and zero is one of its points.
    grid = np.append(0.0, GRID * max(float(np.var(b, ddof=1)), float(v.mean())))
    best = int(np.argmin(loss(grid)))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]

    def slope(tau2: float) -> float:
        w = 1.0 / (v + tau2)
        share = w / np.add.reduce(w)
        return float(1.0 - share @ share - np.add.reduce(share * w * (b - share @ b) ** 2))

    # The loss is flat at its minimum: its derivative has the digits.
    if slope(low) >= 0.0:
        found = low
    else:
        found = float(optimize.brentq(slope, low, high, xtol=1e-14 * high)) if slope(high) > 0.0 else high
    return found if float(loss(found)) < float(loss(0.0)) - ROUNDED else 0.0


def paule_mandel(b: Floats, v: Floats) -> float:
    """Variance between sites at which the generalized Q is its expectation, m - 1; not below zero."""
    return float(q_profile(np.array([len(b) - 1.0]), b, v)[0])


VARIANCES: dict[str, Callable[[Floats, Floats], float]] = {
    "REML": restricted_likelihood,
    "DL": dersimonian_laird,
    "PM": paule_mandel,
}


def tau2_interval(b: Floats, v: Floats, alpha: float) -> tuple[float, float]:
    """Interval of the variance between sites by the profile of Q, chi-squared there (Viechtbauer 2007).

    Both limits are zero if the estimates are closer to each other than chance allows.
    """
    levels: Floats = np.array([alpha / 2.0, 1.0 - alpha / 2.0])
    low, high = q_profile(np.asarray(stats.chi2.isf(levels, len(b) - 1)), b, v).tolist()
    return low, high


def q_profile(Q: Floats, b: Floats, v: Floats) -> Floats:
    """Variances between sites at which the generalized Q has these values; zero where it is below them."""
    return np.where(weighted_mean(b, v, 0.0)[2] > Q, _where_q_is(Q, b, v), 0.0)


def prediction_interval(b: Floats, v: Floats, alpha: float) -> tuple[float, float]:
    """Interval of level ``1 - alpha`` for the effect at a further site, from m >= 3 sites' estimates (m,).

    Nagashima, Noma and Furukawa (2019): the effect is ``mean + se T + tau Z``, T of Student with m - 1
    degrees of freedom, Z normal. tau^2 is not one estimate but all values, weighted by their confidence: Q at
    the true variance is chi-squared (Viechtbauer 2007). The interval therefore does not shrink if tau^2
    happens to be estimated as zero. Their random draws are replaced by integration here.
    """
    m, unit = len(b), float(np.sqrt(v.mean()))
    b, v = b / unit, v / unit**2
    nodes, weights = _unit_nodes()
    # Confidence in a variance of zero is an atom; the rest is spread over the positive ones.
    zero = float(stats.chi2.sf(weighted_mean(b, v, 0.0)[2], m - 1))
    Q = np.maximum(stats.chi2.isf(zero + (1.0 - zero) * nodes, m - 1), SMALLEST_Q)
    tau2 = np.append(0.0, _where_q_is(Q, b, v))
    share = np.append(zero, (1.0 - zero) * weights)
    mean, variance, _ = weighted_mean(b, v, tau2)
    se, tau = np.sqrt(variance)[:, None], np.sqrt(tau2)[:, None]
    wide = (tau > se)[:, 0]
    # The wider of both distributions is the smoother one: it is integrated in closed form, the other by the
    # rule.
    factor = np.where(wide[:, None], tau, se)
    shift = mean[:, None] + np.where(
        wide[:, None], se * stats.t.ppf(nodes, m - 1), tau * stats.norm.ppf(nodes)
    )
    below = np.empty_like(shift)

    def beyond(x: float, level: float) -> float:
        z = (x - shift) / factor
        below[wide], below[~wide] = special.ndtr(z[wide]), special.stdtr(m - 1, z[~wide])
        return float(share @ below @ weights) - level

    reach = float(np.sqrt(tau2.max() + variance.max())) * stats.t.isf(alpha / 8.0, m - 1)
    low, high = float(mean.min()) - reach, float(mean.max()) + reach
    ends = (optimize.brentq(beyond, low, high, args=(p,)) for p in (alpha / 2.0, 1.0 - alpha / 2.0))
    return unit * next(ends), unit * next(ends)


@cache
def _unit_nodes() -> tuple[Floats, Floats]:
    """Nodes and weights of Gauss and Legendre's rule on (0, 1), (NODES,) each."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    return (nodes + 1.0) / 2.0, weights / 2.0


def _where_q_is(Q: Floats, b: Floats, v: Floats) -> Floats:
    """Variances between sites at which the generalized Q, which falls with them, has these values."""
    low = np.zeros(len(Q))
    high = ((b - b.mean()) ** 2).sum() / Q
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        above = weighted_mean(b, v, middle)[2] > Q
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.asarray((low + high) / 2.0)


# ----------------------------------------------------------------------------------------------------
# One coefficient over sites: Cochran's Q, I2, the mean of random effects, and a further site.

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class RandomEffectsFit:
    """Result of `combine`; nan where it does not exist.

    Q with df and p-value is Cochran's test of equal effects over `sites` with an estimate; I2 in [0, 1] is
    the share of the spread of the estimates beyond chance, with its interval; tau2 the variance of the effect
    between sites; ``re_`` the mean effect with its interval, ``pred_`` the interval for a further site.
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
class RandomEffectsOptions:
    """Methods of `combine` for tau2 and intervals of the mean and a further site, in metafor's words.

    `method`: "REML", "DL" or "PM". `test`: "knha", Hartung's and Knapp's standard error with t on m - 1
    degrees of freedom over m sites; "adhoc", the same never below that of known variances; "z", that of known
    variances with a normal quantile. `prediction`: "confidence" as in
    :func:`fedstat.inference.meta_analysis.prediction_interval`, or "t", that of metafor's ``predict``.
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
USUAL = RandomEffectsOptions()


def combine_sites(
    estimates: Floats, variances: Floats, alpha: float = 0.05, how: RandomEffectsOptions = USUAL
) -> RandomEffectsFit:
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
        return RandomEffectsFit(m)
    Q, p_value, I2 = cochran_test(b, v)
    tau2 = VARIANCES[how.method](b, v)
    mean, se, quantile = _mean(b, v, tau2, alpha, how.test)
    pred = NAN, NAN
    if m > 2 and how.prediction == "t":
        further = quantile * (tau2 + se**2) ** 0.5
        pred = mean - further, mean + further
    elif m > 2:
        pred = prediction_interval(b, v, alpha)
    low, high = i2_interval(Q, m, alpha)
    return RandomEffectsFit(
        sites=m,
        Q=Q,
        df=m - 1,
        p_value=p_value,
        I2=I2,
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


def cochran_test(estimates: Floats, variances: Floats) -> tuple[float, float, float]:
    """Q of equal effects at the sites, (K,), its p-value, and I2; nan if fewer than two have an estimate."""
    known = np.isfinite(estimates) & np.isfinite(variances)
    df = int(np.count_nonzero(known)) - 1
    if df < 1:
        return NAN, NAN, NAN
    Q = float(weighted_mean(estimates[known], variances[known], 0.0)[2])
    return Q, float(special.chdtrc(df, Q)), _i2(Q / df)


def _mean(b: Floats, v: Floats, tau2: float, alpha: float, test: str) -> tuple[float, float, float]:
    """Mean effect, its standard error, and the quantile of its interval."""
    mean, variance, Q = (float(part) for part in weighted_mean(b, v, tau2))
    if test == "z":
        return mean, variance**0.5, float(stats.norm.isf(alpha / 2.0))
    # The spread of the estimates about their mean, compared with its expectation from known variances.
    spread = Q / (len(b) - 1)
    factor = max(spread, 1.0) if test == "adhoc" else spread
    return mean, (variance * factor) ** 0.5, float(-special.stdtrit(len(b) - 1, alpha / 2.0))


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


# ----------------------------------------------------------------------------------------------------
# Coefficients of a factor over sites together: multivariate random-effects meta-analysis.

STARTS = (1.0, 0.1, 0.01)
"""Starting variances between sites for the maximization, in units of those of the estimates."""
HEADER_WIDTHS, WIDTHS = (30, 16, 26, 20), (34, 12, 10, 12, 12, 10)


@dataclass(frozen=True, slots=True, eq=False)
class SiteCoefficients:
    """Estimates of a site that determines some of p coefficients.

    `which` are their indices, `b` (p_k,) the estimates, `S` (p_k, p_k) their covariance.
    """

    which: tuple[tuple[int, ...], ...]
    b: tuple[Floats, ...]
    S: tuple[Floats, ...]
    p: int

    @classmethod
    def of(cls, estimates: Floats, covariances: Floats) -> SiteCoefficients:
        """Read estimates (K, p) and covariances (K, p, p), nan where a site does not determine one."""
        known = np.isfinite(estimates) & (np.diagonal(covariances, axis1=1, axis2=2) > 0.0)
        rows = [np.flatnonzero(one) for one in known]
        sites = [k for k, at in enumerate(rows) if len(at)]
        return cls(
            tuple(tuple(rows[k].tolist()) for k in sites),
            tuple(estimates[k, rows[k]] for k in sites),
            tuple(covariances[k][np.ix_(rows[k], rows[k])] for k in sites),
            estimates.shape[1],
        )

    @property
    def numbers(self) -> int:
        """Estimates of all sites together."""
        return sum(map(len, self.b))

    def mean(self, Psi: Floats) -> tuple[Floats, Floats, float, float, Floats]:
        """Generalized least squares at a covariance between sites (p, p).

        Returned are the mean (p,), its covariance (p, p), the generalized Q, minus twice the restricted
        log-likelihood but for a constant, and its derivative by Psi (p, p).
        """
        p, logs = self.p, 0.0
        A, c = np.zeros((p, p)), np.zeros(p)
        W = []
        for at, b, S in zip(self.which, self.b, self.S, strict=True):
            inside = np.ix_(at, at)
            V = S + Psi[inside]
            W.append(np.linalg.inv(V))
            logs += float(np.linalg.slogdet(V)[1])
            A[inside] += W[-1]
            c[list(at)] += W[-1] @ b
        cov: Floats = np.asarray(np.linalg.inv(A))
        mean, Q, gradient = cov @ c, 0.0, np.zeros((p, p))
        for at, b, w in zip(self.which, self.b, W, strict=True):
            inside = np.ix_(at, at)
            u = w @ (b - mean[list(at)])
            Q += float((b - mean[list(at)]) @ u)
            gradient[inside] += w - np.outer(u, u) - w @ cov[inside] @ w
        return mean, cov, Q, logs + Q + float(np.linalg.slogdet(A)[1]), gradient


def multivariate_restricted_likelihood(effects: SiteCoefficients) -> Floats:
    """Covariance between sites (p, p) that maximizes the restricted likelihood; it may be singular.

    It is sought as L L', L lower triangular, in units of the mean variances of the estimates.
    """
    p, lower = effects.p, np.tril_indices(effects.p)
    sizes = np.zeros((2, p))
    for at, S in zip(effects.which, effects.S, strict=True):
        sizes[:, list(at)] += np.diag(S), np.ones(len(at))
    unit = np.sqrt(sizes[0] / sizes[1])

    def loss(x: Floats) -> tuple[float, Floats]:
        L = np.zeros((p, p))
        L[lower] = x
        L *= unit[:, None]
        value, gradient = effects.mean(L @ L.T)[3:]
        return value, np.asarray((2.0 * gradient @ L * unit[:, None])[lower])

    found = []
    for start in STARTS:
        x = np.diag(np.full(p, start**0.5))[lower]
        for _ in range(3):  # restarted, because the approximation of the curvature is lost near the boundary
            step = optimize.minimize(
                loss, x, jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 2000}
            )
            x = step.x
        found.append(step)
    best = min(found, key=lambda one: float(one.fun))
    L = np.zeros((p, p))
    L[lower] = best.x
    L *= unit[:, None]
    return np.asarray(L @ L.T)


@dataclass(frozen=True, eq=False)  # without slots: it also refers to what it is made of
class FactorCombination(DerivedReport):
    """Mean of several coefficients over sites, and their joint variation between sites.

    Attributes
    ----------
    names : tuple of str, length p
    sites : int
        Sites with an estimate of at least one of them.
    estimate : ndarray, shape (p,)
    cov : ndarray, shape (p, p)
        Of the mean.
    Psi : ndarray, shape (p, p)
        Covariance of the effects between sites.
    statistic, df, df_denom, pvalue : float
        Test of the factor: that all means are zero; F, or with infinite `df_denom` chi-squared over `df`.
    Q, Q_df, Q_pvalue : float
        Test that the effects are the same at all sites (Cochran's, of all coefficients together).
    I2 : float
        Share of Q beyond chance, ``(Q - df) / Q``, not below zero.
    alpha : float
        One minus the level of intervals.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
    >>> both = fit.heterogeneity.random_effects_of(["age", "sex"])
    >>> len(both.to_frame()), both.std_error.shape, both.tau.shape, both.correlation.shape
    (2, (2,), (2,), (2, 2))
    >>> 0.0 <= both.pvalue <= 1.0, "age" in both.summary().as_text()
    (True, True)
    """

    names: tuple[str, ...]
    sites: int
    estimate: Floats
    cov: Floats
    Psi: Floats
    statistic: float
    df: int
    df_denom: float
    pvalue: float
    Q: float
    Q_df: int
    Q_pvalue: float
    I2: float
    alpha: float = 0.05
    sources: InitVar[Iterable[object]] = field(kw_only=True)

    def __post_init__(self, sources: Iterable[object]) -> None:
        DerivedReport.__init__(self, sources)

    @property
    def std_error(self) -> Floats:
        """Standard errors of the means, (p,)."""
        return np.sqrt(np.diag(self.cov))

    @property
    def tau(self) -> Floats:
        """Standard deviations of the effects between sites, (p,)."""
        return np.sqrt(np.diag(self.Psi))

    @property
    def correlation(self) -> pd.DataFrame:
        """Correlation of the effects between sites; nan where one does not vary."""
        with np.errstate(invalid="ignore", divide="ignore"):
            R = self.Psi / np.outer(self.tau, self.tau)
        return pd.DataFrame(R, index=list(self.names), columns=list(self.names))

    def to_frame(self) -> pd.DataFrame:
        """Index coefficient; ``estimate``, ``std_error``, ``conf_low``, ``conf_high``, ``tau``."""
        distribution = stats.norm if np.isinf(self.df_denom) else stats.t(self.df_denom)
        half = float(distribution.isf(self.alpha / 2.0)) * self.std_error
        columns = {
            "estimate": self.estimate,
            "std_error": self.std_error,
            "conf_low": self.estimate - half,
            "conf_high": self.estimate + half,
            "tau": self.tau,
        }
        return pd.DataFrame(columns, index=pd.Index(self.names, name="coefficient"))

    def tidy(self) -> pd.DataFrame:
        """One row for each coefficient.

        Returns
        -------
        DataFrame
            ``term``, ``estimate``, ``std_error``, ``conf_low``, ``conf_high``, ``tau``.
        """
        return self.to_frame().rename_axis("term").reset_index()

    def _glance(self) -> dict[str, float]:
        return {
            "n_sites": self.sites,
            "statistic": self.statistic,
            "df": self.df,
            "df_denom": self.df_denom,
            "p_value": self.pvalue,
            "Q": self.Q,
            "Q_df": self.Q_df,
            "Q_p_value": self.Q_pvalue,
            "I2": self.I2,
        }

    def _sheets(self) -> Iterator[Sheet]:
        """Joint test of the factor, joint heterogeneity, and the coefficients."""
        distribution = f"chi2({self.df})" if np.isinf(self.df_denom) else f"F({self.df}, {self.df_denom:g})"
        value = self.statistic * (self.df if np.isinf(self.df_denom) else 1)
        rows = (
            ("Sites:", str(self.sites), f"No effect, {distribution}:", f"{value:.2f}, P {self.pvalue:.3f}"),
            (
                "Coefficients:",
                str(len(self.names)),
                f"Equal effects, Q({self.Q_df}):",
                f"{self.Q:.2f}, P {self.Q_pvalue:.3f}",
            ),
            ("", "", "I2:", f"{100 * self.I2:.0f} %"),
        )
        head = Sheet(("",) * 4, rows, "lrlr", HEADER_WIDTHS, "Random effects of a factor", gap=2)
        table = tuple(
            (str(name), *(number(v, error=values[1]) for v in values))
            for name, values in zip(self.names, self.to_frame().to_numpy().tolist(), strict=True)
        )
        heads = ("", "rand. eff.", "std err", f"{self.alpha / 2:g}", f"{1 - self.alpha / 2:g}", "tau")
        yield from (head, Sheet(heads, table, "l" + "r" * 5, WIDTHS))

    def _summary_notes(self) -> Iterator[Note]:
        yield NOTES.note("random_effects")
        if not np.isinf(self.df_denom):
            yield NOTES.note("t_tests")

    def __repr__(self) -> str:
        return self.summary().as_text()


def combine_factor(
    names: tuple[str, ...],
    estimates: Floats,
    covariances: Floats,
    *,
    sources: Iterable[object],
    test: Literal["adhoc", "knha", "z"] = "adhoc",
    alpha: float = 0.05,
) -> FactorCombination:
    """Combine sites' estimates (K, p) of several coefficients, with covariances (K, p, p).

    Sites may determine only some, with nan for the others. Q has as many degrees of freedom as there are
    estimates beyond p. With `test` "knha", the covariance of the mean is multiplied by the generalized Q
    divided by these, with "adhoc" by at least one, and tests use t and F; with "z" they are normal and
    chi-squared.

    Raises
    ------
    ModelError
        `test` is none of these.
    EstimationError
        A coefficient is determined at fewer than two sites.

    References
    ----------
    Jackson, D., Riley, R. and White, I. R. (2011). Multivariate meta-analysis: potential and promise.
    Statistics in Medicine 30, 2481-2498.
    Jackson, D. and Riley, R. D. (2014). A refined method for multivariate meta-analysis and meta-regression.
    Statistics in Medicine 33, 541-554.
    """
    if test not in CHOICES["test"]:
        listed = ", ".join(map(repr, CHOICES["test"]))
        raise ModelError(
            f"random effects of a factor: expected test to be one of {listed}, received {test!r}"
        )
    effects = SiteCoefficients.of(estimates, covariances)
    at = np.bincount([j for one in effects.which for j in one], minlength=effects.p)
    few = [name for name, count in zip(names, at.tolist(), strict=True) if count < 2]
    if few:
        raise EstimationError(
            f"no random effects of the factor: fewer than two sites determine {', '.join(few)}"
        )
    Q, p, df = effects.mean(np.zeros((effects.p, effects.p)))[2], effects.p, effects.numbers - effects.p
    Psi = multivariate_restricted_likelihood(effects)
    mean, cov, spread, _, _ = effects.mean(Psi)
    if test != "z":
        factor = spread / df
        cov = cov * (max(factor, 1.0) if test == "adhoc" else factor)
    W = float(mean @ np.linalg.solve(cov, mean))
    return FactorCombination(
        sources=sources,
        names=names,
        sites=len(effects.which),
        estimate=mean,
        cov=cov,
        Psi=Psi,
        statistic=W / p,
        df=p,
        df_denom=np.inf if test == "z" else float(df),
        pvalue=float(stats.chi2.sf(W, p) if test == "z" else stats.f.sf(W / p, p, df)),
        Q=Q,
        Q_df=df,
        Q_pvalue=float(stats.chi2.sf(Q, df)),
        I2=max(0.0, 1.0 - df / Q) if Q > 0.0 else 0.0,
        alpha=alpha,
    )
