"""Tests that all sites share one set of coefficients, and the influence of each site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.linalg import solve_triangular

from fedstat.errors import EstimationError
from fedstat.typing import Bools, Floats, Matrix, Vector

# ----------------------------------------------------------------------------------------------------
# Each site's part of the score: a test of equal coefficients, the estimate without a site.

SHARE = 1e-8
"""Share of the information of all sites below which a site has no information on a direction."""
LOADING = 1e-4
"""Share of a coefficient's standard error in such directions above which it is not determined."""


class JointTest(NamedTuple):
    """Test of equal coefficients: statistic, p-value, degrees of freedom.

    It is chi-squared if `df_denom` is infinite (the score test), and F otherwise (own dispersions).
    """

    statistic: float
    pvalue: float
    df: int
    df_denom: float = float("inf")

    @property
    def own_dispersions(self) -> bool:
        """Whether each site has its own dispersion."""
        return bool(np.isfinite(self.df_denom))

    @property
    def excess(self) -> float:
        """Share of the statistic above its expectation if all sites agree, in [0, 1)."""
        expected = self.df_denom / (self.df_denom - 2.0) if self.own_dispersions else float(self.df)
        return max(0.0, 1.0 - expected / self.statistic) if self.statistic > 0.0 < expected else 0.0

    def __str__(self) -> str:
        distribution = f"F({self.df}, {self.df_denom:.0f})" if self.own_dispersions else f"chi2({self.df})"
        return f"{distribution} = {self.statistic:.2f}"


def quadratic_form(score: Floats, information: Floats) -> tuple[float, float]:
    """Site's part of the score test of equal coefficients, ``U_k' I_k^- U_k`` and the rank of ``I_k``.

    Score (p,) and information (p, p) are those of the site's rows at the estimate of all sites, for
    dispersion one, in any coordinates. Directions without information at the site are those of eigenvalues
    below `SHARE` of the largest, in columns scaled to information one.
    """
    size = np.sqrt(np.diag(information))
    known = size > 0.0
    if not known.any():
        return 0.0, 0.0
    size = size[known]
    shares, Q = np.linalg.eigh(information[np.ix_(known, known)] / np.outer(size, size))
    seen = shares > SHARE * shares[-1]
    return float(((Q.T @ (score[known] / size))[seen] ** 2 / shares[seen]).sum()), float(seen.sum())


def joint_test(form: Floats, score: Floats, information: Floats, scale: float) -> JointTest:
    """Score test of equal coefficients from sums over sites; the statistic of :meth:`SiteScores.joint_test`.

    `form` (2,) are sums of :func:`quadratic_form`; score (p,) and information (p, p) those of all sites at
    their common estimate, for dispersion one; `scale` is the dispersion phi.
    """
    return _test((form[0] - score @ np.linalg.solve(information, score)) / scale, round(form[1]) - len(score))


def _test(statistic: float, df: int) -> JointTest:
    # Zero up to rounding where the sites agree exactly.
    statistic = max(float(statistic), 0.0)
    return JointTest(statistic, float(stats.chi2.sf(statistic, df)) if df else float("nan"), df)


@dataclass(frozen=True, slots=True, eq=False)
class SiteScores:
    """Sites' scores and informations, in coordinates in which all sites' information is the identity.

    With I / phi = L L' the sum over sites: ``z_k = L^{-1} U_k / phi`` (K, p) and ``J_k = L^{-1} I_k L^{-T} /
    phi`` (K, p, p). The eigenvalues of J_k are the shares of site k in the information of a direction, so
    that "none" does not depend on the units of the columns.
    """

    L: Floats
    z: Floats
    J: Floats

    @classmethod
    def of(cls, scores: Floats, informations: Floats, scale: float, names: Sequence[str]) -> SiteScores:
        """Take the sites' parts (K, p), (K, p, p) at the common estimate, for dispersion one."""
        total = informations.sum(axis=0) / scale
        try:
            L = np.linalg.cholesky(total)
        except np.linalg.LinAlgError as error:
            raise EstimationError(
                "expected the sites' informations to sum to a positive definite matrix, received one that is "
                f"not, for {', '.join(names)}; they must be those of the fit itself"
            ) from error
        # L^{-1}, applied from both sides: the sum over sites of J_k is the identity then.
        half = solve_triangular(L, np.eye(len(total)), lower=True)
        return cls(L, scores @ half.T / scale, half @ (informations / scale) @ half.T)

    @property
    def std_errors(self) -> Floats:
        """Standard errors of the common model, shape (p,)."""
        return np.asarray(np.linalg.norm(self._back, axis=1), dtype=np.float64)

    @property
    def _back(self) -> Floats:
        """L^{-T}: maps directions to coefficients."""
        return np.asarray(solve_triangular(self.L, np.eye(len(self.L)), lower=True).T, dtype=np.float64)

    def joint_test(self) -> JointTest:
        """Rao's score test of one vector of coefficients against one for each site.

        ``(sum_k U_k' I_k^- U_k - U' I^{-1} U) / phi`` with ``sum_k rank I_k - p`` degrees of freedom. U, the
        sum of the U_k, is zero at the maximum; its term corrects for a fit that stopped before. For the
        linear model it is Chow's test with phi treated as known.
        """
        total = self.z.sum(axis=0)
        # The score of all sites, zero at the maximum, is the remainder of a stopped fit.
        statistic, df = -float(total @ total), -len(self.L)
        for z, J in zip(self.z, self.J, strict=True):
            shares, Q = np.linalg.eigh(J)
            seen = shares > SHARE
            statistic += float(((Q.T @ z)[seen] ** 2 / shares[seen]).sum())
            df += int(seen.sum())
        return _test(statistic, df)

    def without_each(self, beta: Floats) -> tuple[Floats, Floats]:
        """Estimate without each site, ``beta + (I - I_k)^{-1} (U - U_k)``, and its change; both (K, p).

        One Newton step; exact for the linear model. nan for coefficients that the other sites do not
        determine; the change is in standard errors of the common model.
        """
        steps = np.array([self._step_without(k) for k in range(len(self.z))])
        return beta + steps, steps / self.std_errors

    def _step_without(self, k: int) -> Floats:
        shares, Q = np.linalg.eigh(self.J[k])
        # In these coordinates, the information of the other sites is the complement of site k's.
        others = 1.0 - shares
        seen = others > SHARE
        score = Q.T @ (self.z.sum(axis=0) - self.z[k])
        directions = self._back @ Q
        step = directions[:, seen] @ (score[seen] / others[seen])
        return np.where(self._lost(directions[:, ~seen]), np.nan, step)

    def _lost(self, directions: Floats) -> Bools:
        return np.asarray(np.linalg.norm(directions, axis=1) > LOADING * self.std_errors)


# ----------------------------------------------------------------------------------------------------
# A test of equal coefficients at sites whose residual variances differ.


@dataclass(frozen=True, slots=True, eq=False)
class SiteWelchTerms:
    """Information of a site's own fit b on the common coefficients, at any point c near the common estimate.

    `information` I (p, p) and `score` I (b - c) (p,), both divided by the site's own dispersion, which was
    estimated with `df` degrees of freedom; in any coordinates in which all sites have the same c.
    """

    score: Vector
    information: Matrix
    df: float


def welch_test(parts: Sequence[SiteWelchTerms]) -> JointTest:
    """Test one vector of coefficients against one for each site, each with its own dispersion.

    ``T = sum_k U_k' I_k^- U_k - U' I^{-1} U``, U and I the sums over sites, is Cochran's Q of vectors: the
    generalized least squares of the sites' estimates. The correction for estimated dispersions is that of
    Welch (1951) and Johansen (1980): with H_k = I^{-1} I_k, rank r_k and f1 = sum_k r_k - p, the sums over
    sites ``a = sum tr (1 - H_k)^2 / df_k`` and ``b = sum (r_k - tr H_k)^2 / df_k`` give the first two moments
    of T to order 1 / df, and ``T / (f1 + 2 a - 2 (b + 2 a) / (f1 + 2))`` is F with f1 and ``f1 (f1 + 2) / (b
    + 2 a)`` degrees of freedom. With one coefficient it is Welch's test. Because the dispersion of a site is
    one number, traces of squares replace those of Wishart matrices in Johansen's formula.

    References
    ----------
    Welch, On the comparison of several mean values: an alternative approach, Biometrika 38 (1951) 330-336.
    Johansen, The Welch-James approximation to the distribution of the residual sum of squares in a weighted
    linear regression, Biometrika 67 (1980) 85-92.
    """
    if not parts:  # no site has a fit with all coefficients
        return JointTest(0.0, float("nan"), 0)
    information = np.sum([part.information for part in parts], axis=0)
    score = np.sum([part.score for part in parts], axis=0)
    T = -float(score @ np.linalg.solve(information, score))
    f1, a, b = -len(score), 0.0, 0.0
    for part in parts:
        form, rank = quadratic_form(part.score, part.information)
        H = np.linalg.solve(information, part.information)
        T, f1 = T + form, f1 + round(rank)
        a += (rank - 2.0 * float(np.trace(H)) + float((H * H.T).sum())) / part.df
        b += (rank - float(np.trace(H))) ** 2 / part.df
    if f1 <= 0:
        return JointTest(0.0, float("nan"), 0)
    f2 = f1 * (f1 + 2.0) / (b + 2.0 * a)
    F = max(T, 0.0) / (f1 + 2.0 * a - 2.0 * (b + 2.0 * a) / (f1 + 2.0))
    return JointTest(F, float(stats.f.sf(F, f1, f2)), f1, f2)
