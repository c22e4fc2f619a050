"""Tests of what fits with missing blocks assume, from their moments: MCAR, and independent blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.linalg import solve_triangular

from fedstat.errors import AssumptionWarning, NotAvailableError, warn
from fedstat.inference.likelihood import LRTest, said, told
from fedstat.models.vertical.fit import MomentsFit
from fedstat.models.vertical.law.derivatives import (
    inverse_by_pattern,
    joint_covariance,
    law_likelihood,
    observed,
)
from fedstat.models.vertical.law.fit import LawFit, fit_law
from fedstat.models.vertical.law.pairs import edges_between, fit_between
from fedstat.models.vertical.likelihood import block_covariance, residuals
from fedstat.models.vertical.moments import PatternMoments
from fedstat.typing import Floats

REJECTED = 0.01
"""P-value, times the number of pairs, below which independent blocks are warned of."""


@dataclass(frozen=True, slots=True, eq=False)
class Normal:
    """A normal law of standardised (x, y), (P + 1,), and its log-likelihood of what is seen."""

    mean: Floats
    cov: Floats
    log_likelihood: float


class LittleTest(NamedTuple):
    """Little's test of missingness completely at random: statistic, p-value, degrees of freedom, patterns.

    A tuple of `statistic`, `pvalue`, `df` and the number of `patterns`.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> test = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition).fit().mcar_test()
    >>> 0.0 <= test.pvalue <= 1.0
    True
    """

    statistic: float
    pvalue: float
    df: int
    patterns: int

    def __repr__(self) -> str:
        return told("Little's test of missingness completely at random", self._asdict())


class BlockIndependence(NamedTuple):
    """Wilks' test that two institutions' blocks are uncorrelated, on the n entities that both have.

    Bartlett's chi-square, nan where n is too small; the largest canonical correlation; and the mean absolute
    correlation of a column of the one with a column of the other.
    """

    first: str
    second: str
    n: int
    statistic: float
    pvalue: float
    df: int
    canonical: float
    mean_abs: float


def joint_law(fit: MomentsFit | LawFit) -> Normal:
    """Law of standardised (x, y) at the estimates of a fit."""
    if isinstance(fit, LawFit):
        return Normal(fit.point.mean, fit.point.cov, fit.joint)
    standard, point = fit.standard, fit.point
    at = residuals(standard, point)
    Sigma = block_covariance(standard, point, at)
    cov = joint_covariance(Sigma, point.beta, np.exp(point.log_s2))
    mean = np.append(point.mu, point.b + at.m.sum())
    return Normal(mean, cov, law_likelihood(standard.moments, mean, cov))


def unrestricted_law(fit: MomentsFit | LawFit) -> Normal:
    """Law of standardised (x, y) with all covariances free, where institutions share enough entities."""
    edges = edges_between(fit.moments, "free")
    if not isinstance(fit, LawFit) or (fit.moves.edges != edges).any():
        fit = fit_law(fit.moments, edges)
    return joint_law(fit)


def little_test(fit: MomentsFit | LawFit, law: Normal | None = None) -> LittleTest:
    """Test that the means of what is seen differ between missing patterns by chance alone (MCAR).

    d2 = sum_g n_g (xbar_g - mu_g)' Sigma_g^-1 (xbar_g - mu_g) over the columns and the response that pattern
    g sees, chi-square with sum_g p_g - p degrees of freedom under MCAR. Sigma is the maximum likelihood
    estimate, as in R's naniar; a factor n / (n - 1) for it would make d2 smaller by the share 1 / n. Mean and
    covariance under the null, `law`, are by default those of the model, :func:`joint_law`. Where its blocks
    are independent between institutions correlation between them may make it reject as well; Little's own
    test has all covariances free, as :func:`unrestricted_law`.

    References
    ----------
    Little (1988), A test of missing completely at random for multivariate data with missing values,
    Journal of the American Statistical Association 83, 1198-1202.
    """
    moments = fit.moments
    used = moments.n > 0.0
    if used.sum() < 2:
        raise NotAvailableError("Little's test compares missing patterns, and all entities have the same one")
    law = law or joint_law(fit)
    seen = observed(moments)[used]
    n = moments.n[used]
    K, _ = inverse_by_pattern(law.cov, seen)
    d = moments.grams[used, 0, 1:] - n[:, None] * (seen * law.mean)
    statistic = float(np.sum(np.einsum("gi,gij,gj->g", d, K, d) / n))
    df = int(seen.sum()) - seen.shape[1]
    return LittleTest(statistic, float(stats.chi2.sf(statistic, df)), df, len(n))


def independence_lr_test(fit: MomentsFit | LawFit, restricted: MomentsFit | LawFit | None = None) -> LRTest:
    """Likelihood ratio of all covariances free against blocks independent between institutions.

    Unlike the pairwise tests it is valid when missingness depends on what is seen (MAR). Its degrees of
    freedom are the pairs of columns of two institutions that share enough entities. `restricted` is the fit
    with independent blocks, where it is at hand.
    """
    moments = fit.moments
    free, own = (edges_between(moments, law) for law in ("free", "independent"))
    df = (free & ~own).sum() // 2
    if not df:
        raise NotAvailableError("no two institutions share enough entities, so no correlation can be seen")
    if restricted is None:
        within = not isinstance(fit, LawFit) or (fit.moves.edges == own).all()
        restricted = fit if within else fit_between(moments, "independent")
    statistic = 2.0 * (unrestricted_law(fit).log_likelihood - joint_law(restricted).log_likelihood)
    return LRTest(statistic, float(stats.chi2.sf(statistic, df)), float(df))


def worst_pair(moments: PatternMoments) -> tuple[BlockIndependence, float] | None:
    """Find the pair of sites whose blocks are most clearly correlated, and its p-value times the pairs."""
    tests = [test for test in independence_tests(moments) if np.isfinite(test.pvalue)]
    if not tests:
        return None
    worst = min(tests, key=lambda test: (test.pvalue, -test.canonical))
    return worst, min(1.0, worst.pvalue * len(tests))


def most_correlated(moments: PatternMoments, instead: str) -> Iterator[str]:
    """Say which blocks are most clearly correlated, and what to do `instead` where the assumption fails."""
    if found := worst_pair(moments):
        pair, pvalue = found
        yield (
            f"Most correlated blocks: '{pair.first}' and '{pair.second}', largest canonical correlation "
            f"{pair.canonical:.2f} over {pair.n:,} entities, {said(pvalue)} (times the number of pairs)."
            + (f" The assumption does not hold: {instead}." if pvalue < REJECTED else "")
        )


def warn_of_dependence(
    moments: PatternMoments, assumed: str = "between='independent'", instead: str = "Fit with between='free'"
) -> None:
    """Warn where blocks that count as independent, as `assumed`, are not."""
    found = worst_pair(moments)
    if found is not None and found[1] < REJECTED:
        pair, pvalue = found
        warn(
            f"{assumed}: the blocks of '{pair.first}' and '{pair.second}' are correlated "
            f"(largest canonical correlation {pair.canonical:.2f} over {pair.n:,} entities, {said(pvalue)}); "
            f"coefficients are biased where blocks are missing. {instead}",
            AssumptionWarning,
        )


def independence_tests(moments: PatternMoments) -> list[BlockIndependence]:
    """Test every pair of institutions for correlation between their blocks.

    Wilks' Lambda = |S| / (|S_jj| |S_kk|) of the entities that both have, by Bartlett's approximation
    -(n - 1 - (p_j + p_k + 1)/2) log Lambda ~ chi-square with p_j p_k degrees of freedom. Where missingness
    depends on the response, the entities at hand may be correlated though the population is not.
    """
    pairs = combinations(range(len(moments.sizes)), 2)
    return [wilks(moments, j, k) for j, k in pairs]


def wilks(moments: PatternMoments, j: int, k: int) -> BlockIndependence:
    """Wilks' test of one pair of institutions."""
    p, q = moments.sizes[j], moments.sizes[k]
    n, S = covariance_of_shared(moments, j, k)
    names = moments.clients[j], moments.clients[k]
    if n <= p + q + 1:
        return BlockIndependence(*names, int(n), np.nan, np.nan, p * q, np.nan, np.nan)
    root = np.sqrt(np.diag(S))
    R = S / np.outer(root, root)
    A, B = np.linalg.cholesky(R[:p, :p]), np.linalg.cholesky(R[p:, p:])
    left = solve_triangular(A, R[:p, p:], lower=True)
    canonical = np.linalg.svd(solve_triangular(B, left.T, lower=True), compute_uv=False)
    statistic = -(n - 1.0 - 0.5 * (p + q + 1)) * float(np.log1p(-(canonical**2)).sum())
    pvalue = float(stats.chi2.sf(statistic, p * q))
    mean_abs = float(np.abs(R[:p, p:]).mean())
    return BlockIndependence(*names, int(n), statistic, pvalue, p * q, float(canonical[0]), mean_abs)


def covariance_of_shared(moments: PatternMoments, j: int, k: int) -> tuple[float, Floats]:
    """Count and covariance of two institutions' columns over the entities that have all of them."""
    columns = 1 + np.flatnonzero(np.isin(moments.owner, (j, k)))
    both = moments.seen[:, columns - 1].all(axis=1)
    total = moments.grams[both].sum(axis=0)
    n = float(moments.n[both].sum())
    if n == 0.0:
        return n, np.zeros((len(columns), len(columns)))
    mean = total[0, columns] / n
    return n, np.asarray(total[np.ix_(columns, columns)] / n - np.outer(mean, mean))
