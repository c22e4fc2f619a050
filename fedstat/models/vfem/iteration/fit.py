"""Estimates of all institutions where the maximisation ended, whatever the distribution of the response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.models.vertical.fit import MomentsFit
from fedstat.models.vertical.law.fit import LawFit
from fedstat.models.vertical.law.pairs import Between
from fedstat.models.vertical.newton import TraceRow
from fedstat.models.vfem.blocks.glm_distribution import NORMAL
from fedstat.typing import Bools, Floats


@dataclass(frozen=True, slots=True)
class NormalLaw:
    """Mean (P + 1,) and covariance (P + 1, P + 1) of the columns, site by site, and the response.

    `edges` (P, P) are the entries of the columns' concentration that were not fixed at zero, `between` tells
    whether those of two sites were.
    """

    mean: Floats
    cov: Floats
    edges: Bools
    between: Between = "free"


@dataclass(frozen=True, slots=True)
class VFEMFit:
    """Maximum likelihood estimates, in the units of the data.

    a is the mean of the linear predictor, beta0 + sum_k mu_k'beta_k; s2 the residual variance, 1 where the
    response is not normal; beta, mu (p_k,) and t = beta_k'Sigma_k beta_k go by institution.
    `response_moments` (2,) are mean and variance of a normal response, `null` the log-likelihood of the
    intercept alone for another one. `reason` says why the iteration ended. `law` is that of columns and
    response where blocks are not independent between institutions, or entities have parts of them.
    `estimates_alpha`: that of a negative binomial distribution. `dispersion` of counts are Pearson's
    statistic per entity, and its standard error.
    """

    a: float
    s2: float
    beta: Mapping[str, Floats]
    mu: Mapping[str, Floats]
    t: Mapping[str, float]
    log_likelihood: float
    trace: tuple[TraceRow, ...]
    converged: bool
    reason: str
    distribution: DistributionSpec = NORMAL
    response_moments: Floats | None = None
    null: float | None = None
    law: NormalLaw | None = None
    estimates_alpha: bool = False
    dispersion: tuple[float, float] | None = None

    @property
    def beta0(self) -> float:
        """Intercept at the origin."""
        return self.a - sum(float(self.mu[k] @ self.beta[k]) for k in self.beta)

    def same_family(self, other: VFEMFit) -> bool:
        """Whether two fits have one distribution of the response, but for an alpha that both estimated."""
        if not (self.estimates_alpha and other.estimates_alpha):
            return self.estimates_alpha == other.estimates_alpha and self.distribution == other.distribution
        return replace(self.distribution, alpha=other.distribution.alpha) == other.distribution


def by_client(found: MomentsFit | LawFit, between: Between = "free") -> VFEMFit:
    """Return estimates from moments as the iterative exchange does; `between` is of a law of all columns."""
    moments, law = found.moments, None
    if isinstance(found, LawFit):
        law = NormalLaw(np.append(found.mu, found.a), found.cov, found.moves.edges, between)
    places = {c: moments.places(k) for k, c in enumerate(moments.clients)}
    return VFEMFit(
        a=found.a,
        s2=found.s2,
        beta={c: found.beta[here] for c, here in places.items()},
        mu={c: found.mu[here] for c, here in places.items()},
        t={c: float(t) for c, t in zip(moments.clients, found.t, strict=True)},
        log_likelihood=found.log_likelihood,
        trace=found.trace,
        converged=found.converged,
        reason=found.reason,
        response_moments=moments.response_moments,
        law=law,
    )
