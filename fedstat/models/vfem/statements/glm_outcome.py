"""What a fit of VFEM for other families than the normal hands over, and the estimate that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedstat.inference.covariance import delta_method
from fedstat.inference.estimate import INTERCEPT, Estimate
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vfem.blocks.layout import Layout
from fedstat.models.vfem.covariance.protocol import Covariance, Places
from fedstat.models.vfem.iteration.glm_protocol import GLMFit, GLMOptions
from fedstat.models.vfem.statements.outcome import client_blocks, origin_jacobian
from fedstat.typing import Array, Floats


@dataclass(frozen=True, slots=True)
class GLMOutcome:
    """What a fit hands over: how it was made, and the numbers."""

    method: str
    cov_type: str
    masked: bool
    options: GLMOptions
    fit: GLMFit
    covariance: Covariance | None
    fitted: Mapping[str, Array]


def make_estimate(model: VerticalModel, layout: Layout, outcome: GLMOutcome) -> Estimate:
    """Coefficients with the intercept at the origin, and their covariance by the delta method."""
    fit = outcome.fit
    blocks = [b for b in model.design.blocks if b.client in layout.clients]
    params = np.concatenate([[fit.beta0], *[fit.beta[b.client] for b in blocks]])
    row = fit.trace[-1]
    how = "" if outcome.covariance is None else outcome.covariance.how
    return Estimate(
        params=params,
        cov=None if outcome.covariance is None else reported_covariance(outcome.covariance, fit),
        names=(INTERCEPT, *[name for b in blocks for name in b.names]),
        clients=("", *[b.client for b in blocks for _ in b.names]),
        terms=(INTERCEPT, *[term for b in blocks for term in b.term_names]),
        response=model.formula.response,
        nobs=layout.n,
        df_model=float(len(params) - 1),
        converged=fit.converged,
        convergence=f"{fit.reason}; relative score {row.score:.1e} after {row.iteration} iterations",
        llf=fit.log_likelihood,
        scale=1.0,
        privacy="none (no noise is added)",
        cov_type=outcome.cov_type + (f" ({how})" if how in ("sketch", "exact") else ""),
        blocks=client_blocks(model, layout),
        reasons={
            "cov_params": "cov_type='none' was asked for",
            "rsquared": "this family has pseudo_rsquared() instead",
        },
    )


def reported_covariance(covariance: Covariance, fit: GLMFit) -> Floats:
    """Covariance of (beta0, beta) from that of (a, 0, beta_1, mu_1, ..., t)."""
    d = Places(tuple(len(beta) for beta in fit.beta.values())).total
    return delta_method(covariance.psi[:d, :d], origin_jacobian(fit, tuple(fit.beta)))
