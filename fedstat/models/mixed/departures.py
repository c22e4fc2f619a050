"""Tests of what a mixed model assumes, from sums over groups at the estimate."""

from __future__ import annotations

import numpy as np
from scipy import stats

from fedstat.models.mixed.degrees import satterthwaite, satterthwaite_of_weights
from fedstat.models.mixed.protocol import MixedFit, ValueAndDerivatives
from fedstat.typing import Floats

LEAST_LEFT = 0.5
"""Share of a statistic's variance that estimated variances leave, below which they fit it by themselves."""


def compare_errors(fit: MixedFit) -> Floats:
    """Test that squared scores of groups are not larger than the model expects, by coefficient, (p,).

    In the direction of each coefficient the sum of squared scores is its covariance from the data, and their
    expectation the covariance of the model (White 1982, Econometrica 50). A slope that varies between groups
    without a random effect makes it larger (Chesher 1984, Econometrica 52). Estimated variances fit a part of
    it, whose information is subtracted. The sum has a scaled chi-squared distribution with the same mean and
    variance. The p-value is NaN for coefficients whose errors follow from the variances alone, such as those
    of columns that are constant in groups.
    """
    by_group = fit.by_group
    assert by_group is not None
    observed, expected, squares = by_group.tests
    observed = observed / (fit.scale if fit.sums is not None else 1.0)
    variance = 2.0 * squares
    left = variance - _fitted(fit)
    with np.errstate(invalid="ignore", divide="ignore"):
        statistic = (expected + (observed - expected)) / expected
        df = 2.0 * expected**2 / left
        p = stats.chi2.sf(df * statistic, df)
    return np.where(left > LEAST_LEFT * variance, p, np.nan)


def _fitted(fit: MixedFit) -> Floats:
    """Return the parts of the statistics' variances that the estimated variances fit, (p,)."""
    sums = fit.sums if fit.sums is not None else fit.working
    assert sums is not None and fit.by_group is not None
    inverse, logdet, _, _ = sums.parts()
    _, slope, hessian = ValueAndDerivatives(sums.logdet + logdet).scalar()
    K, M = len(slope), inverse.values[0]
    information = np.zeros((K + 1, K + 1))
    information[:K, :K] = -hessian / 2.0
    information[:K, K] = information[K, :K] = slope / 2.0
    information[K, K] = (sums.n - len(M)) / 2.0
    # -d(l'X'V^-1 X l) in each covariance, for l'X'V^-1 X l = 1: those of the inverse, over the inverse.
    slopes = np.array([np.diag(S) for S in inverse.values[1 : 1 + K]]) / np.diag(M)
    shared = np.concatenate([slopes, np.ones((1, len(M)))])
    if fit.sums is None:  # no residual variance is estimated
        information, shared = information[:K, :K], shared[:K]
    return np.asarray(np.einsum("kj,kj->j", shared, np.linalg.pinv(information, hermitian=True) @ shared))


def smallest(p_values: Floats) -> float:
    """Return the p-value of the smallest of several (Bonferroni); one without any."""
    known = p_values[np.isfinite(p_values)]
    return float(min(1.0, len(known) * known.min())) if len(known) else 1.0


def overdispersion(fit: MixedFit) -> float:
    """Test that conditional residuals of counts are not larger than the distribution allows: the p-value.

    The test is Dean's (1992, JASA 87) for an additional variance, with squares that account for leverages; it
    is one-sided. NaN for other responses.
    """
    assert fit.by_group is not None
    excess, variance = fit.by_group.dispersion.tolist()
    return float(stats.norm.sf(excess / np.sqrt(variance))) if variance > 0.0 else float("nan")


def model_df(fit: MixedFit) -> Floats:
    """Return degrees of freedom of tests with errors of the model, (p,), at least one."""
    if fit.sums is not None:
        found = satterthwaite(fit, fit.sums)
    else:
        assert fit.working is not None
        found = satterthwaite_of_weights(fit.working)
    return np.array([max(found.df(row), 1.0) for row in np.eye(len(fit.params))])
