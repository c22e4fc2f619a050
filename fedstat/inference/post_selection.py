"""Inference after selection: debiased estimates, and p-values aggregated over random splits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.errors import EstimationError
from fedstat.kernels.penalized.nodewise import INFLATION, relaxed_inverse
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Debiased (desparsified) estimates: intervals for all coefficients after a penalized fit.
#
# One Newton step from a penalized estimate, with a relaxed inverse of the information, removes its bias to
# first order. The remaining error is normal around the true value, even if a coefficient was not selected or
# is near zero.
#
# References
# ----------
# van de Geer, S., Buehlmann, P., Ritov, Y. and Dezeure, R. (2014). On asymptotically optimal confidence
# regions
# and tests for high-dimensional models. Annals of Statistics 42, 1166-1202. doi:10.1214/14-AOS1221.
# Javanmard, A. and Montanari, A. (2014). Confidence intervals and hypothesis testing for high-dimensional
# regression. Journal of Machine Learning Research 15, 2869-2909.
# Xia, L., Nan, B. and Li, Y. (2023). Debiased lasso for generalized linear models with a diverging number of
# covariates. Biometrics 79, 344-357. doi:10.1111/biom.13587.


@dataclass(frozen=True, slots=True, eq=False)
class Debiased:
    """Debiased intercept and p coefficients, with the covariance of their leading, normal part.

    `lambdas` (p,) are those of the nodewise lasso of each column; zero if the inverse itself was used, which
    leaves no bias of first order. `correlation` is the largest of a relaxed column with another one.
    """

    params: Floats
    cov: Floats
    lambdas: Floats
    correlation: float


def debias(
    b: Floats, score: Floats, H: Floats, n: float, scale: float = 1.0, inflation: float = INFLATION
) -> Debiased:
    """Remove the bias of a penalized estimate: ``b + Theta score`` (van de Geer et al. 2014, eq. 5).

    `b` (1 + p,) is the penalized estimate, the intercept (which has no penalty) first; `score` (1 + p,) the
    gradient of the log-likelihood over n at b, for least squares ``X'(y - X b) / n``; `H` (1 + p, 1 + p) the
    information over n at b, for least squares ``X'X / n``; n counts entities, `scale` is the dispersion, and
    `inflation` that of :func:`~fedstat.kernels.penalized.nodewise.relaxed_inverse`.
    """
    # The intercept is profiled out: G is the information of columns centered at m.
    m = H[1:, 0] / H[0, 0]
    G = H[1:, 1:] - H[0, 0] * np.outer(m, m)
    root = np.sqrt(np.maximum(np.diag(G), 0.0))
    flat = int((root <= 1e-8 * np.sqrt(np.diag(H)[1:])).sum())
    if flat:
        raise EstimationError(
            f"debiased estimates: {flat} of {len(root)} columns are constant, given the others of their "
            "group; drop columns that are sums of others"
        )
    R = G / np.outer(root, root)
    Theta, lambdas = relaxed_inverse(R, n, inflation)
    others = np.abs(R - np.diag(np.diag(R)))[lambdas > 0.0]
    # Back from unit diagonal to the columns' own units.
    A = intercept_row(Theta / np.outer(root, root), m, float(H[0, 0]))
    return Debiased(b + A @ score, scale / n * A @ H @ A.T, lambdas, float(others.max(initial=0.0)))


def intercept_row(Theta: Floats, m: Floats, h: float) -> Floats:
    """Extend an inverse for columns that are centered at m by the row of the intercept: (1 + p, 1 + p)."""
    A = np.empty((len(m) + 1, len(m) + 1))
    A[1:, 1:], A[1:, 0] = Theta, -Theta @ m
    A[0] = -m @ A[1:]
    A[0, 0] += 1.0 / h
    return A


# ----------------------------------------------------------------------------------------------------
# P-values of many random splits combined to one, with control of the family-wise error rate.

SMALLEST_QUANTILE = 0.05


def aggregate_splits(p_values: Floats, smallest: float = SMALLEST_QUANTILE) -> Floats:
    """Return a p-value for each column from those of B splits, (B, p) (Meinshausen et al. 2009, eq. 2.3).

    They are adjusted within each split for the columns that it selected, and 1 for those that it did not.
    ``(1 - log g_min) inf_g Q(g) / g`` over g from `smallest` to 1, at most 1, Q being the quantile over
    splits: rejecting those of at most alpha makes any false rejection with probability alpha at most.

    Meinshausen, N., Meier, L. and Buehlmann, P. (2009). p-values for high-dimensional regression. Journal of
    the American Statistical Association 104, 1671-1681. doi:10.1198/jasa.2009.tm08647.
    """
    if p_values.ndim != 2 or not len(p_values) or not 0.0 < smallest < 1.0:
        raise EstimationError(
            f"expected p-values (B, p) of one split or more and a quantile in (0, 1); received an array of "
            f"shape {p_values.shape} and {smallest!r}"
        )
    B = len(p_values)
    shares = np.arange(1, B + 1) / B
    sizes = np.sort(p_values, axis=0) / shares[:, None]
    # The infimum over quantiles is reached at one of the B order statistics.
    best = sizes[shares >= smallest].min(axis=0)
    return np.asarray(np.minimum((1.0 - np.log(smallest)) * best, 1.0))
