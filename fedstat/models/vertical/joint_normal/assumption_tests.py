"""Tests of the assumptions on missing blocks: MCAR, and independence of the blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats
from scipy.linalg import solve_triangular

from fedstat.errors import AssumptionWarning, EstimationError, NotAvailableError, Remedy, warn
from fedstat.inference.likelihood import LRTest, format_pvalue, format_test
from fedstat.inference.notes import Note
from fedstat.models.checks import check_choice
from fedstat.models.vertical.joint_normal.edges import Between, edges_between, undetermined_pairs
from fedstat.models.vertical.joint_normal.fit import JointNormalFit, fit_joint_model, fit_joint_normal
from fedstat.models.vertical.joint_normal.likelihood import inverse_by_pattern, observed
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vertical.notes import NOTES
from fedstat.typing import Bools, Floats

# ----------------------------------------------------------------------------------------------------
# Tests of the assumptions of fits with missing blocks, from their moments: MCAR, and independent blocks.

REJECTED = 0.01
"""P-value, times the number of pairs, below which a warning reports correlated blocks."""


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
        return format_test("Little's test of missingness completely at random", self._asdict())


class BlockIndependence(NamedTuple):
    """Wilks' test that two sites' blocks are uncorrelated, on the n entities that both have.

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


def unrestricted_normal(fit: JointNormalFit) -> JointNormalFit:
    """Return the fit with all estimable covariances free."""
    edges = edges_between(fit.moments, "free")
    return fit if (fit.moves.edges == edges).all() else fit_joint_normal(fit.moments, edges)


def little_test(fit: JointNormalFit, joint: JointNormalFit | None = None) -> LittleTest:
    """Test that the means of observed columns differ between missing patterns by chance alone (MCAR).

    d2 = sum_g n_g (xbar_g - mu_g)' Sigma_g^-1 (xbar_g - mu_g) over the observed columns (and response) of
    pattern g is chi-square with sum_g p_g - p degrees of freedom under MCAR. Sigma is the maximum likelihood
    estimate, as in R's naniar; a factor n / (n - 1) for it would make d2 smaller by the share 1 / n. Mean and
    covariance under the null, `joint`, are by default those of the fit. If its
    blocks are independent between sites, correlation between them may make the test reject as well. Little's
    own test has all covariances free, as :func:`unrestricted_normal`.

    References
    ----------
    Little (1988), A test of missing completely at random for multivariate data with missing values,
    Journal of the American Statistical Association 83, 1198-1202.
    """
    moments = fit.moments
    used = moments.n > 0.0
    if used.sum() < 2:
        raise NotAvailableError("Little's test compares missing patterns, and all entities have the same one")
    at = (joint or fit).point
    seen = observed(moments)[used]
    n = moments.n[used]
    K, _ = inverse_by_pattern(at.cov, seen)
    d = moments.grams[used, 0, 1:] - n[:, None] * (seen * at.mean)
    statistic = float(np.sum(np.einsum("gi,gij,gj->g", d, K, d) / n))
    df = int(seen.sum()) - seen.shape[1]
    return LittleTest(statistic, float(stats.chi2.sf(statistic, df)), df, len(n))


def independence_lr_test(fit: JointNormalFit, restricted: JointNormalFit | None = None) -> LRTest:
    """Likelihood ratio of all covariances free against blocks independent between sites.

    Unlike the pairwise tests, it is valid if missingness depends on observed values (MAR). Its degrees of
    freedom are the pairs of columns of two sites that share enough entities. The statistic is divided by
    :func:`bartlett_factor`. `restricted` is the fit with independent blocks, if available.
    """
    moments = fit.moments
    free, own = (edges_between(moments, joint) for joint in ("free", "independent"))
    between = free & ~own
    df = between.sum() // 2
    if not df:
        raise NotAvailableError("no two sites share enough entities, so correlation between sites is unknown")
    if restricted is None:
        within = (fit.moves.edges == own).all()
        restricted = fit if within else fit_joint_model(moments, "independent")
    statistic = 2.0 * (unrestricted_normal(fit).joint - restricted.joint)
    statistic /= bartlett_factor(moments, between)
    return LRTest(statistic, float(stats.chi2.sf(statistic, df)), float(df))


def bartlett_factor(moments: PatternMoments, between: Bools) -> float:
    """Mean of the likelihood ratio of independent blocks, divided by its degrees of freedom.

    Without missing values it is 1 + d / n to order 1/n, with d = 3/2 + (P^3 - sum p_k^3) / (3 (P^2 - sum
    p_k^2)) for blocks of p_k of the P columns (Box 1949; Anderson 2003, section 9.4). This d is the mean of
    (3 + p_j + p_k) / 2 + (P - p_j - p_k) / 3 over all pairs of columns of two sites j and k. Here each pair
    of `between` (P, P) is divided by the number of entities that have both columns. That is an approximation,
    which simulations support.

    References
    ----------
    Box (1949), A general distribution theory for a class of likelihood criteria, Biometrika 36, 317-346.
    Anderson (2003), An Introduction to Multivariate Statistical Analysis, third edition, Wiley.
    """
    sizes = np.array(moments.sizes)[moments.owner]
    pair = np.add.outer(sizes, sizes)
    d = (3.0 + pair) / 2.0 + (len(sizes) - pair) / 3.0
    n = np.einsum("g,gi,gj->ij", moments.n, moments.seen, moments.seen)
    return float(1.0 + np.mean(d[between] / n[between]))


def worst_pair(moments: PatternMoments) -> tuple[BlockIndependence, float] | None:
    """Find the pair of sites whose blocks are most clearly correlated, and its p-value times the pairs."""
    tests = [test for test in independence_tests(moments) if np.isfinite(test.pvalue)]
    if not tests:
        return None
    worst = min(tests, key=lambda test: (test.pvalue, -test.canonical))
    return worst, min(1.0, worst.pvalue * len(tests))


def most_correlated(moments: PatternMoments, instead: Remedy) -> Iterator[Note]:
    """Name the most clearly correlated blocks, and what to do `instead` if the assumption fails."""
    if found := worst_pair(moments):
        pair, pvalue = found
        yield NOTES.note(
            "most_correlated",
            remedy=instead if pvalue < REJECTED else None,
            first=pair.first,
            second=pair.second,
            canonical=pair.canonical,
            entities=pair.n,
            p=format_pvalue(pvalue),
        )


def warn_of_dependence(
    moments: PatternMoments, assumed: str = "between='independent'", instead: str = "Fit with between='free'"
) -> None:
    """Warn if blocks that are assumed independent, as stated by `assumed`, are correlated."""
    found = worst_pair(moments)
    if found is not None and found[1] < REJECTED:
        pair, pvalue = found
        warn(
            f"{assumed}: the blocks of '{pair.first}' and '{pair.second}' are correlated (largest canonical "
            f"correlation {pair.canonical:.2f} over {pair.n:,} entities, {format_pvalue(pvalue)}); "
            f"coefficients are biased where blocks are missing. {instead}",
            AssumptionWarning,
        )


def independence_tests(moments: PatternMoments) -> list[BlockIndependence]:
    """Test every pair of sites for correlation between their blocks.

    Wilks' Lambda = |S| / (|S_jj| |S_kk|) of the entities that both have, by Bartlett's approximation -(n - 1
    - (p_j + p_k + 1)/2) log Lambda ~ chi-square with p_j p_k degrees of freedom. If missingness depends on
    the response, columns may be correlated in the observed entities but not in the population.
    """
    pairs = combinations(range(len(moments.sizes)), 2)
    return [wilks(moments, j, k) for j, k in pairs]


def wilks(moments: PatternMoments, j: int, k: int) -> BlockIndependence:
    """Wilks' test of one pair of sites."""
    p, q = moments.sizes[j], moments.sizes[k]
    n, S = covariance_of_shared(moments, j, k)
    names = moments.sites[j], moments.sites[k]
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
    """Count and covariance of two sites' columns over the entities that have all of them."""
    columns = 1 + np.flatnonzero(np.isin(moments.owner, (j, k)))
    both = moments.seen[:, columns - 1].all(axis=1)
    total = moments.grams[both].sum(axis=0)
    n = float(moments.n[both].sum())
    if n == 0.0:
        return n, np.zeros((len(columns), len(columns)))
    mean = total[0, columns] / n
    return n, np.asarray(total[np.ix_(columns, columns)] / n - np.outer(mean, mean))


# ----------------------------------------------------------------------------------------------------
# Free covariances or independent blocks, where the data do not determine all covariances.

OPEN = ("lowest", "highest")
"""Columns of a summary with what the data leave open."""
CHOICE_LEVEL = 0.05
"""P-value of the likelihood ratio test below which blocks are not taken as independent."""


@dataclass(frozen=True, slots=True)
class BetweenChoice:
    """The covariance between sites that a fit with ``between=None`` took, and why.

    `unchecked` are the pairs of sites that share too few entities for any covariance of their columns. The
    `pvalue` is that of the independence of the other pairs, None if there are none.
    """

    between: Between
    unchecked: tuple[str, ...]
    pvalue: float | None


def name_undetermined(moments: PatternMoments) -> tuple[str, ...]:
    """Name the pairs of sites whose covariance the data do not determine."""
    names = [name.replace("'", "") for name in moments.unit_names]
    return tuple(f"{names[pair.first]} and {names[pair.second]}" for pair in undetermined_pairs(moments))


def choose_between(moments: PatternMoments, maxiter: int = 200) -> BetweenChoice | None:
    """Choose free covariances or independent blocks; None if the data determine the covariances.

    If two sites share too few entities, a free covariance leaves coefficients open. Blocks are then taken as
    independent, unless the other pairs of sites contradict it: the likelihood ratio test rejects at the level
    `CHOICE_LEVEL`, or Wilks' test of one pair, times the number of pairs, at the level `REJECTED`. The second
    covers pairs with too few entities for the first. If no pair can be tested, covariances are free. Raises
    EstimationError if a free covariance has no estimate, because the data may contradict what independent
    blocks assume as well.
    """
    unchecked = name_undetermined(moments)
    if not unchecked:
        return None
    worst = worst_pair(moments)
    if worst is None:
        return BetweenChoice("free", unchecked, None)
    free = fit_joint_normal(moments, edges_between(moments, "free"), maxiter=maxiter)
    try:
        pvalue = independence_lr_test(free).pvalue
    except NotAvailableError:
        pvalue = worst[1]
    except EstimationError:  # independent blocks have no estimate
        pvalue = 0.0
    if worst[1] < REJECTED:
        pvalue = min(pvalue, worst[1])
    return BetweenChoice("free" if pvalue < CHOICE_LEVEL else "independent", unchecked, pvalue)


def choice_notes(choice: BetweenChoice, *, ranges: bool) -> Iterator[Note]:
    """State why blocks count as independent; with `ranges`, the table has what the data leave open."""
    if choice.between == "free":
        return
    assert choice.pvalue is not None
    yield NOTES.note(
        "assumed_independent",
        pairs="; ".join(choice.unchecked),
        p=format_pvalue(choice.pvalue),
        see=f"; {OPEN[0]}/{OPEN[1]}: .sensitivity()" if ranges else "",
    )
    if ranges:
        yield NOTES.note("between_chosen/ranges", lowest=OPEN[0], highest=OPEN[1])
    else:
        yield NOTES.note("between_chosen")


def contradiction(choice: BetweenChoice | None) -> str:
    """State that the data chose free covariances, and why; empty if they did not choose."""
    if choice is None:
        return ""
    if choice.pvalue is None:
        return "; no other two sites can be checked for independent blocks"
    return f"; the other sites contradict independent blocks ({format_pvalue(choice.pvalue)})"


# ----------------------------------------------------------------------------------------------------
# Results' tests of assumptions on missing blocks, from moments by missing pattern.


class AssumptionTests:
    """Tests of missingness completely at random, and of blocks that are independent between sites.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> fit = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI + LP", partition).fit()
    >>> fit.independence_tests().shape[0], fit.independence_lr_test().df_diff
    (3, 3.0)
    >>> fit.mcar_test()._fields
    ('statistic', 'pvalue', 'df', 'patterns')
    """

    def mcar_test(self, structure: Literal["model", "unrestricted"] = "model") -> LittleTest:
        """Little's test that blocks are missing completely at random.

        Parameters
        ----------
        structure : {"model", "unrestricted"}
            Covariance under the null: that of the model, or free between sites for any model.

        Returns
        -------
        (statistic, pvalue, df, patterns)
        """
        check_choice("structure", structure, ("model", "unrestricted"))
        fit = self._moments()
        return little_test(fit, unrestricted_normal(fit) if structure == "unrestricted" else None)

    def independence_tests(self) -> pd.DataFrame:
        """Test every pair of sites for correlation between their blocks.

        Returns
        -------
        DataFrame
            One row per pair: entities that both have, Bartlett's statistic, p-value, degrees of freedom,
            largest canonical correlation, mean absolute correlation.
        """
        return pd.DataFrame(independence_tests(self._moments().moments))

    def independence_lr_test(self) -> LRTest:
        """Likelihood ratio test of columns that are correlated between sites against independent blocks.

        Unlike :meth:`independence_tests`, it is valid if missingness depends on observed values. Bartlett's
        correction divides the statistic by its approximate mean per degree of freedom, because the chi-square
        distribution rejects too often in small samples. The correction of Box (1949) counts, for each pair
        of columns, the entities that have both.

        Returns
        -------
        (statistic, pvalue, df_diff)

        Raises
        ------
        NotAvailableError
            No two sites share enough entities; or the fit has no moments.
        """
        return independence_lr_test(self._moments())

    def _moments(self) -> JointNormalFit:
        """Return the fit of all columns from the moments; a NotAvailableError if there are none."""
        raise NotImplementedError
