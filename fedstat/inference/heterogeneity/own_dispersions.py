"""A test of equal coefficients at sites whose residual variances differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from fedstat.inference.heterogeneity.influence import JointTest, quadratic_form
from fedstat.typing import Matrix, Vector


@dataclass(frozen=True, slots=True, eq=False)
class OwnPart:
    """What a site's own fit b says of coefficients that all sites would have, at any point c near the common.

    `information` I (p, p) and `score` I (b - c) (p,), both over the site's own dispersion, which was
    estimated on `df` degrees of freedom; in any coordinates in which all sites have the same c.
    """

    score: Vector
    information: Matrix
    df: float


def welch_test(parts: Sequence[OwnPart]) -> JointTest:
    """Test one vector of coefficients against one for each site, each with its own dispersion.

    ``T = sum_k U_k' I_k^- U_k - U' I^{-1} U``, U and I the sums over sites, is Cochran's Q of vectors: the
    generalised least squares of the sites' estimates. That its dispersions are estimated is allowed for as by
    Welch (1951) and Johansen (1980): with H_k = I^{-1} I_k, rank r_k and f1 = sum_k r_k - p, the sums over
    sites ``a = sum tr (1 - H_k)^2 / df_k`` and ``b = sum (r_k - tr H_k)^2 / df_k`` give the first two moments
    of T to order 1 / df, and ``T / (f1 + 2 a - 2 (b + 2 a) / (f1 + 2))`` is F on f1 and ``f1 (f1 + 2) / (b +
    2 a)``. With one coefficient it is Welch's test; as the dispersion of a site is one number, traces of
    squares stand where Johansen has those of Wishart matrices.

    References
    ----------
    Welch, On the comparison of several mean values: an alternative approach, Biometrika 38 (1951) 330-336.
    Johansen, The Welch-James approximation to the distribution of the residual sum of squares in a weighted
    linear regression, Biometrika 67 (1980) 85-92.
    """
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
