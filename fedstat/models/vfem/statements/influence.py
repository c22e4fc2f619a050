"""Fits without each column in turn, from moments, at no further round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import EstimationError, ModelError
from fedstat.models.vertical.fit import MomentsFit, fit_moments
from fedstat.models.vertical.law.fit import LawFit, without_effects
from fedstat.models.vertical.likelihood import LikelihoodPoint, Standard
from fedstat.models.vertical.moments import PatternMoments
from fedstat.typing import Floats


@dataclass(frozen=True, slots=True, eq=False)
class LeaveOneOut:
    """Fits without each of the P columns.

    The statistic (P,) is the likelihood ratio of the full fit against that without the column, of one degree
    of freedom; `params` (P, 1 + P) are intercept and coefficients without it, nan at its own place.
    """

    names: tuple[str, ...]
    clients: tuple[str, ...]
    log_likelihood: Floats
    rsquared: Floats
    statistic: Floats
    pvalue: Floats
    params: Floats

    def to_frame(self) -> pd.DataFrame:
        """One row per column that is left out."""
        return pd.DataFrame(
            {
                "client": self.clients,
                "statistic": self.statistic,
                "pvalue": self.pvalue,
                "llf": self.log_likelihood,
                "rsquared": self.rsquared,
            },
            index=pd.Index(self.names, name="left out"),
        )


def leave_one_out(fit: MomentsFit | LawFit) -> LeaveOneOut:
    """Fit without each column in turn.

    Where columns depend between institutions the column stays in their law: it has no coefficient, and tells
    of those that are missing; of one without which the likelihood has no maximum the row is nan.

    Raises ModelError where there is one only, EstimationError where a smaller fit has no maximum.
    """
    moments, P = fit.moments, len(fit.moments.names)
    if P < 2:
        raise ModelError("leave_one_out: the fit has one column; without it there is no block left")
    params = np.full((P, 1 + P), np.nan)
    llf, rsquared = np.full(P, np.nan), np.full(P, np.nan)
    for j in range(P):
        keep = np.arange(P) != j
        if isinstance(fit, LawFit):
            try:
                restricted = without_effects(fit, keep)
            except EstimationError:
                continue
            params[j, np.append(True, keep)] = restricted.params[np.append(True, keep)]
            llf[j], rsquared[j] = restricted.log_likelihood, restricted.rsquared
        else:
            smaller = fit_without(fit, moments, j)
            params[j, np.append(True, keep)] = smaller.params
            llf[j], rsquared[j] = smaller.log_likelihood, smaller.rsquared
    statistic = 2.0 * (fit.log_likelihood - llf)
    return LeaveOneOut(
        moments.names,
        tuple(moments.clients[k] for k in moments.owner),
        llf,
        rsquared,
        statistic,
        stats.chi2.sf(statistic, 1),
        params,
    )


def fit_without(fit: MomentsFit, moments: PatternMoments, j: int) -> MomentsFit:
    """Fit all columns but one, from the estimates of all."""
    columns = [name for i, name in enumerate(moments.names) if i != j]
    standard = Standard(moments.submodel(columns))
    keep = np.arange(len(moments.names)) != j
    stay = np.array([client in standard.moments.clients for client in moments.clients])
    point = fit.point
    start = LikelihoodPoint(point.b, point.log_s2, point.beta[keep], point.mu[keep], point.lam[stay])
    return fit_moments(standard, start=start)
