"""Criteria that choose one of several penalised fits.

Each takes minus twice the log-likelihood, up to a constant that the fits share. With a dispersion that is
known to be one it is ``2 N f``, f being half the mean deviance; where the dispersion is estimated
(a linear model), it is that of :func:`profiled`, and ``2 N f`` would choose by the unit of the response.
"""

from __future__ import annotations

import numpy as np
from scipy.special import gammaln

from fedstat.errors import ModelError
from fedstat.typing import Floats


def profiled(deviance: Floats | float, nobs: float) -> Floats | float:
    """Return minus twice the Gaussian log-likelihood at its own variance, up to a constant: N log(RSS / N).

    `deviance` is the residual sum of squares, `nobs` N: rows or the sum of the frequency weights.
    """
    log_variance: Floats | float = np.log(np.asarray(deviance) / nobs)
    return nobs * log_variance


def aic(minus_twice_llf: Floats | float, df: Floats | float) -> Floats | float:
    """Return Akaike's criterion, ``-2 l + 2 df``."""
    return minus_twice_llf + 2.0 * df


def bic(minus_twice_llf: Floats | float, df: Floats | float, nobs: float) -> Floats | float:
    """Return Schwarz' criterion, ``-2 l + df log N``."""
    return minus_twice_llf + df * float(np.log(nobs))


def ebic(
    minus_twice_llf: Floats | float,
    df: Floats | float,
    nobs: float,
    *,
    chosen: Floats | float,
    candidates: int,
    gamma: float = 0.5,
) -> Floats | float:
    """Return the extended criterion, ``-2 l + df log N + 2 gamma log C(candidates, chosen)``.

    `chosen` are the columns that were selected, without those that had to be in the model, of so many
    `candidates`; gamma 0 is :func:`bic`. Chen, J. and Chen, Z. (2008). Extended Bayesian information criteria
    for model selection with large model spaces. Biometrika 95, 759-771.
    """
    # log C(n, k) by log-gamma: the binomial coefficient itself overflows.
    k = np.asarray(chosen, dtype=np.float64)
    if not 0.0 <= gamma <= 1.0 or (k > candidates).any():
        raise ModelError(
            f"ebic: expected gamma in [0, 1] and at most {candidates} columns chosen; received gamma = "
            f"{gamma!r} and {k.max():g} columns; count every column that could have been selected"
        )
    ways: Floats = gammaln(candidates + 1.0) - gammaln(k + 1.0) - gammaln(candidates - k + 1.0)
    return bic(minus_twice_llf, df, nobs) + 2.0 * gamma * ways
