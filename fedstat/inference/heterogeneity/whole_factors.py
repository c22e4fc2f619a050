"""Coefficients of a factor over sites together: multivariate random-effects meta-analysis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from scipy import optimize, stats

from fedstat.errors import EstimationError, ModelError
from fedstat.inference.heterogeneity.random_effects import CHOICES
from fedstat.inference.tables import Sheet, SheetSummary, number
from fedstat.typing import Floats

STARTS = (1.0, 0.1, 0.01)
"""Variances between sites from which the likelihood is maximised, in units of those of the estimates."""
HEADER_WIDTHS, WIDTHS = (30, 16, 26, 20), (34, 12, 10, 12, 12, 10)


@dataclass(frozen=True, slots=True, eq=False)
class SiteEffects:
    """What sites that determine some of p coefficients found of these.

    `which` are their places, `b` (p_k,) the estimates, `S` (p_k, p_k) their covariance.
    """

    which: tuple[tuple[int, ...], ...]
    b: tuple[Floats, ...]
    S: tuple[Floats, ...]
    p: int

    @classmethod
    def of(cls, estimates: Floats, covariances: Floats) -> SiteEffects:
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
        """Generalised least squares at a covariance between sites (p, p).

        Returned are the mean (p,), its covariance (p, p), the generalised Q, minus twice the restricted
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


def restricted_likelihood(effects: SiteEffects) -> Floats:
    """Covariance between sites (p, p) that maximises the restricted likelihood; it may be singular.

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
        for _ in range(3):  # afresh, since the approximation of the curvature is lost near the edge
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


@dataclass(frozen=True, slots=True, eq=False)
class FactorCombination:
    """Mean of several coefficients over sites, and how far they vary between these together.

    Attributes
    ----------
    names : tuple of str, length p
    sites : int
        With an estimate of one of them at least.
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
        Share of Q that is not chance, ``(Q - df) / Q``, not below zero.
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
        law = stats.norm if np.isinf(self.df_denom) else stats.t(self.df_denom)
        half = float(law.isf(self.alpha / 2.0)) * self.std_error
        columns = {
            "estimate": self.estimate,
            "std_error": self.std_error,
            "conf_low": self.estimate - half,
            "conf_high": self.estimate + half,
            "tau": self.tau,
        }
        return pd.DataFrame(columns, index=pd.Index(self.names, name="coefficient"))

    def summary(self) -> SheetSummary:
        """Joint test of the factor, joint heterogeneity, and the coefficients."""
        law = f"chi2({self.df})" if np.isinf(self.df_denom) else f"F({self.df}, {self.df_denom:g})"
        value = self.statistic * (self.df if np.isinf(self.df_denom) else 1)
        rows = (
            ("Institutions:", str(self.sites), f"No effect, {law}:", f"{value:.2f}, P {self.pvalue:.3f}"),
            (
                "Coefficients:",
                str(len(self.names)),
                f"Same everywhere, Q({self.Q_df}):",
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
        notes = [
            "Multivariate random effects of all coefficients together, with an unstructured covariance "
            "between institutions by restricted maximum likelihood. Q and I2 are joint as well."
        ]
        if not np.isinf(self.df_denom):
            notes.append(
                "Standard errors and the test of no effect after Jackson and Riley (2014), who extend "
                "Hartung's and Knapp's."
            )
        return SheetSummary([head, Sheet(heads, table, "l" + "r" * 5, WIDTHS)], notes)

    def __repr__(self) -> str:
        return self.summary().as_text()


def combine_factor(
    names: tuple[str, ...],
    estimates: Floats,
    covariances: Floats,
    *,
    test: Literal["adhoc", "knha", "z"] = "adhoc",
    alpha: float = 0.05,
) -> FactorCombination:
    """Combine sites' estimates (K, p) of several coefficients, with covariances (K, p, p).

    Sites may determine some only, nan the others. Q has as many degrees of freedom as there are estimates
    beyond p. With `test` "knha" the covariance of the mean is multiplied by the generalised Q over these,
    with "adhoc" never below one, and tests are of t and F; with "z" they are normal and chi-squared.

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
    effects = SiteEffects.of(estimates, covariances)
    at = np.bincount([j for one in effects.which for j in one], minlength=effects.p)
    few = [name for name, count in zip(names, at.tolist(), strict=True) if count < 2]
    if few:
        raise EstimationError(
            f"no random effects of the factor: fewer than two sites determine {', '.join(few)}"
        )
    Q, p, df = effects.mean(np.zeros((effects.p, effects.p)))[2], effects.p, effects.numbers - effects.p
    Psi = restricted_likelihood(effects)
    mean, cov, spread, _, _ = effects.mean(Psi)
    if test != "z":
        factor = spread / df
        cov = cov * (max(factor, 1.0) if test == "adhoc" else factor)
    W = float(mean @ np.linalg.solve(cov, mean))
    return FactorCombination(
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
