"""Comparing nested fits by their likelihoods."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats

from fedstat.errors import EstimationError, ModelError
from fedstat.inference.estimate import Estimate
from fedstat.inference.numbers import EstimateNumbers


class LRTest(NamedTuple):
    """Likelihood ratio test: statistic, p-value, degrees of freedom."""

    statistic: float
    pvalue: float
    df_diff: float


def lr_test(full: EstimateNumbers, restricted: EstimateNumbers) -> LRTest:
    """Likelihood ratio test of a fit against one that is nested in it.

    A ModelError says that they are not nested or not of the same data, an EstimationError that the restricted
    fit has the larger log-likelihood.
    """
    for fit in (full, restricted):
        if not fit.estimate.llf_is_maximum:
            raise ModelError("compare_lr_test: the log-likelihood of one of the two fits is not a maximum")
    _check_same_data(full.estimate, restricted.estimate)
    _check_nested(full.estimate, restricted.estimate)
    df_diff = full.estimate.df_model - restricted.estimate.df_model
    statistic = 2.0 * (full.llf - restricted.llf)
    # Two equal fits differ by rounding, which is no error.
    if statistic < -1e-8 * abs(full.llf):
        raise EstimationError(
            "compare_lr_test: the restricted fit has the larger log-likelihood "
            f"({restricted.llf:.6g} against {full.llf:.6g}), so one of the two is not at its maximum; "
            f"converged: {full.estimate.converged} (this), {restricted.estimate.converged} (restricted)"
        )
    return LRTest(statistic, float(stats.chi2.sf(statistic, df_diff)), df_diff)


def mcfadden(llf: float, llnull: float) -> float:
    """Pseudo R-squared of McFadden (1974), ``1 - llf / llnull``; for discrete responses.

    `llnull` is the log-likelihood with an intercept (and offset) only. McFadden, D. (1974). Conditional logit
    analysis of qualitative choice behavior. In Zarembka, P. (ed.), Frontiers in Econometrics, 105-142.
    """
    return 1.0 - llf / llnull


def cox_snell(llf: float, llnull: float, nobs: float) -> float:
    """Pseudo R-squared of Cox and Snell, ``1 - exp(2 (llnull - llf) / nobs)``; nobs counts weights.

    For a linear model of which both likelihoods are maximised over the variance it is the R-squared; for a
    discrete response it stays below one even where the fit is perfect. Cox, D. R. and Snell, E. J. (1989).
    Analysis of Binary Data, 2nd edition, p. 208-209.
    """
    return float(-np.expm1(2.0 * (llnull - llf) / nobs))


def _check_same_data(full: Estimate, restricted: Estimate) -> None:
    same = {
        "response": (full.response, restricted.response),
        "number of entities": (full.nobs, restricted.nobs),
        "variables in the likelihood": (_joined(full.density_of), _joined(restricted.density_of)),
    }
    for what, (here, there) in same.items():
        if here != there:
            raise ModelError(
                f"compare_lr_test: expected two fits with the same {what}, received {here!r} and {there!r}; "
                "use wald_test on the larger fit, or refit both on the same data"
            )


def _check_nested(full: Estimate, restricted: Estimate) -> None:
    extra = [name for name in restricted.names if name not in full.names]
    if extra or restricted.df_model >= full.df_model:
        raise ModelError(
            "compare_lr_test: expected a restricted fit with some of the coefficients of this fit; "
            f"not in this fit: {', '.join(extra) or 'none'}; coefficients: {len(full.names)} here, "
            f"{len(restricted.names)} in the restricted fit"
        )


def _joined(variables: tuple[str, ...]) -> str:
    return ", ".join(sorted(variables)) or "the response given all others"
