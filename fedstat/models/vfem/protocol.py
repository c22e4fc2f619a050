"""The protocol of an iterative fit: maximization, fitted values, covariance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedstat.errors import EstimationError, Remedy
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.kernels.responses import COUNTS
from fedstat.models.vertical.exchange.patterns import PatternExchange, SmallPatterns, exchange_patterns
from fedstat.models.vertical.joint_normal.assumption_tests import BetweenChoice
from fedstat.models.vertical.joint_normal.fit import JointNormalFit
from fedstat.models.vertical.layout import Layout
from fedstat.models.vfem.covariance.cross_products import ALTERNATIVES, GLM_ALTERNATIVES, check_dealers
from fedstat.models.vfem.covariance.information import PsiCovariance
from fedstat.models.vfem.covariance.protocol import (
    CovarianceOptions,
    glm_covariance,
    information_covariance,
)
from fedstat.models.vfem.covariance.sem_protocol import sem_covariance
from fedstat.models.vfem.iteration.glm_protocol import QuasiNewtonIteration
from fedstat.models.vfem.iteration.protocol import EMIteration
from fedstat.models.vfem.iteration.state import IterationState, VFEMFit
from fedstat.models.vfem.joint_protocol import JointIteration, joint_estimates_covariance
from fedstat.typing import Array, Floats

MOST_EXCESS = 1.5
"""Pearson's statistic per entity above which estimates of the Poisson family are not returned."""
STANDARD_ERRORS = 3.0
"""Its standard errors above one that are more than chance."""


@dataclass(frozen=True, slots=True)
class IterativeResult:
    """Values that the iterative exchange returns.

    `fitted` are fitted values and residuals (n,) if the coordinator is at the response holder, nan for
    entities that were left out. If columns are correlated between sites, `exchange` has the moments, and
    `linear` the joint normal model of columns and response; `choice` states whether their data chose
    independent blocks.
    """

    fit: VFEMFit
    covariance: PsiCovariance | None
    fitted: Mapping[str, Array]
    exchange: PatternExchange | None = None
    linear: JointNormalFit | None = None
    choice: BetweenChoice | None = None


def fit_normal(
    iteration: EMIteration, first_point: FitProtocol[Mapping[str, Floats] | None], options: CovarianceOptions
) -> FitProtocol[IterativeResult]:
    """Fit a normal response by iteration."""
    cov_type, cross = options.cov_type, options.cross
    check_dealers(iteration.layout, cross, ALTERNATIVES)
    # Before the masks of the fit are set up, because the fit of the first point has its own masks.
    iteration.first = yield from first_point
    fit = yield from iteration.maximize()
    fitted = yield from request_fitted(iteration, "fitted", cross.at)
    covariance = None
    if cov_type == "sem":
        covariance = yield from sem_covariance(iteration, cross, fit.a, fit.s2)
    elif cov_type != "none":
        covariance = yield from information_covariance(iteration, options)
    return IterativeResult(fit, covariance, fitted)


def fit_glm(iteration: QuasiNewtonIteration, options: CovarianceOptions) -> FitProtocol[IterativeResult]:
    """Fit a response that is not normal."""
    check_dealers(iteration.layout, options.cross, GLM_ALTERNATIVES)
    fit = yield from maximize(iteration)
    fitted = yield from request_fitted(iteration, "glm_fitted", options.cross.at)
    covariance = None
    if options.cov_type != "none":
        covariance = yield from glm_covariance(iteration, options)
    return IterativeResult(fit, covariance, fitted)


def maximize(iteration: QuasiNewtonIteration) -> FitProtocol[VFEMFit]:
    """Maximize the likelihood, and request how far counts vary beyond their distribution.

    Raises EstimationError if Poisson counts vary far too much and entities lack blocks.
    """
    fit = yield from iteration.maximize()
    if iteration.distribution.entry.single is not COUNTS:
        return fit
    (reply,) = yield [iteration.request(iteration.layout.active, "glm_pearson")]
    total, squares = (reply.arrays["pearson"] / iteration.layout.n).tolist()
    error = np.sqrt(max(squares - total**2, 0.0) / iteration.layout.n)
    poisson = iteration.distribution.name == "Poisson" and iteration.layout.missing.any()
    if poisson and total > max(MOST_EXCESS, 1.0 + STANDARD_ERRORS * error):
        raise EstimationError(
            f"the counts vary {total:.2f} times as much as the Poisson family with these columns allows "
            "(Pearson chi2 / n), and entities lack blocks: the fit takes the excess for effects of missing "
            "columns, so that its coefficients are biased",
            remedy=Remedy(
                "from_formula(..., family=sm.families.NegativeBinomial()).fit(dispersion='ml')",
                "Use {arguments} and fit(dispersion='ml')",
            ),
        )
    return replace(fit, dispersion=(total, float(error)))


def fit_joint(
    layout: Layout,
    small: SmallPatterns,
    product_session: SecureProductSession,
    make: Callable[[Layout, PatternExchange], JointIteration],
) -> FitProtocol[IterativeResult]:
    """Fit a response that is not normal, with columns that are correlated between sites."""
    exchange = yield from exchange_patterns(layout, small, product_session)
    code = exchange.plan.target[layout.code]
    iteration = make(layout.narrowed(code >= 0, exchange.released, exchange.columns or None), exchange)
    fit = yield from maximize(iteration)
    fitted = {}
    for name, values in (yield from request_fitted(iteration, "glm_fitted", product_session.at)).items():
        fitted[name] = np.full(layout.n, np.nan)
        fitted[name][code >= 0] = values
    covariance = (yield from joint_estimates_covariance(iteration)) if iteration.curved else None
    return IterativeResult(fit, covariance, fitted, exchange, iteration.linear, iteration.choice)


def request_fitted(iteration: IterationState, step: str, at: str | None) -> FitProtocol[Mapping[str, Array]]:
    """Request fitted values if the coordinator is at the response holder; otherwise nothing."""
    active = iteration.layout.active
    if at != active:
        return {}
    (reply,) = yield [iteration.request(active, step)]
    return reply.arrays
