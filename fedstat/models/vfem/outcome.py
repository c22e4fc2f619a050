"""The outcome of a VFEM fit, with the estimate and the entity counts derived from it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from fedstat.errors import ConvergenceWarning, DataWarning, warn
from fedstat.inference.covariance import delta_method
from fedstat.inference.estimate import INTERCEPT, Estimate
from fedstat.models.vertical.exchange.patterns import PatternExchange, noise_added, values_left_out
from fedstat.models.vertical.joint_normal.assumption_tests import BetweenChoice
from fedstat.models.vertical.joint_normal.edges import Between
from fedstat.models.vertical.joint_normal.fit import JointNormalFit
from fedstat.models.vertical.layout import Layout, site_blocks
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vertical.pattern_merging import LARGEST_SHARE
from fedstat.models.vfem.corrections import SIMULATED, Correction
from fedstat.models.vfem.covariance.information import ParameterLayout, PsiCovariance
from fedstat.models.vfem.iteration.site_state import NORMAL
from fedstat.models.vfem.iteration.state import IterationOptions, VFEMFit
from fedstat.models.vfem.weighted import UnexplainedDifference
from fedstat.typing import Array, Floats

NO_COVARIANCE = {"cov_params": "not available with cov_type='none'"}
NO_LIKELIHOOD = {"llf": "method='weighted' maximizes no likelihood; use wald_test"}
NO_RSQUARED = {"rsquared": "this family has pseudo_rsquared() instead"}


@dataclass(frozen=True, slots=True)
class VFEMOutcome:
    """Options and estimates of a fit; whether it used sums of a larger fit, and its correction.

    `gap` is what an incomplete correction leaves, in standard errors; `choice` states why blocks are
    independent or not if the data chose. `unbiased` is the factor of the residual variance of maximum
    likelihood by which least squares divides by its degrees of freedom instead of the entities.
    """

    method: str
    cov_type: str
    init: str
    options: IterationOptions
    fit: VFEMFit
    covariance: PsiCovariance | None
    refitted: bool = False
    correction: Correction | None = None
    gap: float = 0.0
    choice: BetweenChoice | None = None
    unbiased: float = 1.0


def as_least_squares(layout: Layout, outcome: VFEMOutcome, nobs: int) -> VFEMOutcome:
    """Use the residual variance and Student's t of least squares where no block is missing.

    Maximum likelihood is then least squares, and exact in small samples with these. Robust covariances have
    their own degrees of freedom.
    """
    if outcome.fit.distribution != NORMAL or outcome.method == "weighted" or outcome.correction == "skewness":
        return outcome
    if layout.missing.any():
        return outcome
    df = float(nobs - layout.p - 1)
    factor = nobs / df
    covariance = outcome.covariance
    if covariance is not None and outcome.cov_type != "robust":
        covariance = replace(covariance, psi=covariance.psi * factor, df=df)
    return replace(outcome, covariance=covariance, unbiased=factor)


def as_between(outcome: VFEMOutcome) -> Between:
    """Whether the fitted model lets columns of two sites be correlated.

    Methods without missing blocks have "independent", because their estimates do not depend on it.
    """
    return "independent" if outcome.fit.joint is None else outcome.fit.joint.between


@dataclass(frozen=True, slots=True)
class SessionArtifacts:
    """Objects of a fit that its session keeps and no file holds: row-level values, or moments."""

    fitted: Mapping[str, Array] = field(default_factory=dict)
    exchange: PatternExchange | None = None
    moments_fit: JointNormalFit | None = None
    unexplained: UnexplainedDifference | None = None

    def nobs(self, layout: Layout) -> int:
        """Count the entities that the weights of a fit represent; zero without weights."""
        counted = layout.frequencies and layout.weights is not None and self.exchange is not None
        return round(self.exchange.moments.nobs) if counted and self.exchange is not None else 0

    @property
    def left_out(self) -> int:
        """Entities that count as missing everywhere in the exchange of moments, because they are too few."""
        return 0 if self.exchange is None else self.exchange.plan.left_out


@dataclass(frozen=True, slots=True)
class EntityCounts:
    """Entities of the fit, `dropped` without a response, and `unused` ones that the method leaves out.

    `partial` are those with some but not all of a site's columns; `patterns` has a digest of the entities
    that count as observed at each site, to check whether two fits used the same records.
    """

    n: int
    dropped: int
    partial: Mapping[str, int]
    unused: int
    patterns: Mapping[str, str]


def count_entities(model: VerticalModel, layout: Layout, held: SessionArtifacts) -> EntityCounts:
    """Count what the fit used and left out."""
    design, exchange = model.design, held.exchange
    blocks = {b.site: b for b in design.blocks if b.site in layout.sites}
    partly = exchange is not None and bool(exchange.columns)
    seen = {k: b.rows if partly else b.rows[b.complete] for k, b in blocks.items()}
    if exchange is not None and exchange.plan.changes:
        seen = {k: rows[exchange.released[k]] for k, rows in seen.items()}
    return EntityCounts(
        layout.n - held.left_out,
        design.n_dropped,
        {k: b.n_partial for k, b in blocks.items() if b.n_partial},
        design.n - layout.n,
        {k: digest(design.entities[rows]) for k, rows in seen.items()},
    )


def digest(positions: Array) -> str:
    """Return a short digest of positions."""
    return hashlib.sha256(np.ascontiguousarray(positions, dtype=np.int64).tobytes()).hexdigest()[:16]


def make_estimate(model: VerticalModel, layout: Layout, outcome: VFEMOutcome, nobs: int) -> Estimate:
    """Coefficients with the intercept at the origin, and their covariance by the delta method."""
    fit = outcome.fit
    blocks = [b for b in model.design.blocks if b.site in layout.sites]
    params = np.concatenate([[fit.beta0], *[fit.beta[b.site] for b in blocks]])
    row, normal = fit.trace[-1], fit.distribution == NORMAL
    return Estimate(
        params=params,
        cov=None if outcome.covariance is None else reported_covariance(outcome.covariance, fit),
        names=(INTERCEPT, *[name for b in blocks for name in b.names]),
        sites=("", *[b.site for b in blocks for _ in b.names]),
        terms=(INTERCEPT, *[term for b in blocks for term in b.term_names]),
        response=model.formula.response,
        nobs=nobs,
        df_model=float(len(params) - 1),
        n_parameters=len(params) + 1 if fit.estimates_alpha else None,
        converged=fit.converged,
        convergence=f"{fit.reason}; relative score {row.score:.1e} after {row.iteration} iterations",
        llf=None if np.isnan(fit.log_likelihood) else fit.log_likelihood + layout.log_weights,
        rsquared=explained_share(layout, outcome) if normal else None,
        scale=fit.s2 * layout.variance_of_one * outcome.unbiased,
        privacy=noise_added(layout if normal else None),
        cov_type=cov_name(outcome),
        blocks=site_blocks(layout),
        reasons=NO_COVARIANCE | NO_LIKELIHOOD if normal else NO_COVARIANCE | NO_RSQUARED,
    )


def explained_share(layout: Layout, outcome: VFEMOutcome) -> float:
    """R-squared of an entity with every block; that of the response itself if no block is missing."""
    fit = outcome.fit
    complete = outcome.method != "weighted" and not layout.missing.any()
    if outcome.method in ("cc", "impute", "single") or (complete and outcome.correction != "skewness"):
        assert fit.response_moments is not None
        return 1.0 - fit.s2 / float(fit.response_moments[1])
    return 1.0 - fit.s2 / (
        fit.s2 + sum(fit.t.values()) if fit.joint is None else float(fit.joint.cov[-1, -1])
    )


def cov_name(outcome: VFEMOutcome) -> str:
    """Covariance type as printed."""
    how = outcome.covariance.how if outcome.covariance is not None else ""
    if how == SIMULATED:
        return SIMULATED
    return outcome.cov_type + (f" ({how})" if how in ("sketch", "exact") else "")


def reported_covariance(covariance: PsiCovariance, fit: VFEMFit) -> Floats:
    """Covariance of (beta0, beta) from that of psi, which begins with (a, s2, beta_1, mu_1, ...)."""
    jacobian = origin_jacobian(fit, tuple(fit.beta))
    # If t_1, ..., t_K or a concentration follow psi, no coefficient depends on them.
    d = jacobian.shape[1]
    return delta_method(covariance.psi[:d, :d], jacobian)


def origin_jacobian(fit: VFEMFit, sites: tuple[str, ...]) -> Floats:
    """Jacobian of (beta0, beta) by psi = (a, s2, beta_1, mu_1, ...); beta0 = a - sum mu'beta."""
    places = ParameterLayout(tuple(len(fit.beta[k]) for k in sites))
    J = np.zeros((1 + sum(places.sizes), places.total))
    J[0, 0], at = 1.0, 1
    for j, k in enumerate(sites):
        J[0, places.beta(j)], J[0, places.mu(j)] = -fit.mu[k], -fit.beta[k]
        J[at : at + places.sizes[j], places.beta(j)] = np.eye(places.sizes[j])
        at += places.sizes[j]
    return J


def warn_of_merges(exchange: PatternExchange, n: int) -> None:
    """Warn if many entities count as missing because their patterns are small.

    Also warn of single values that count as missing, even if they are few.
    """
    plan = exchange.plan
    if exchange.columns and exchange.lost:
        warn(
            "missing patterns with too few entities to be released were merged: "
            f"{values_left_out(exchange.lost)} count as missing in {plan.moved + plan.trimmed:,} of {n:,} "
            "entities that have them",
            DataWarning,
        )
    elif plan.changes > LARGEST_SHARE * n:
        warn(
            f"{plan.changes:,} of {n:,} entities ({100 * plan.changes / n:.1f} %) are in missing patterns "
            "with too few entities to be released, and count as missing at sites that have them. Standard "
            "errors increase, and estimates are biased if membership in such a pattern depends on the "
            "values that count as missing",
            DataWarning,
        )


def warn_unless_converged(fit: VFEMFit) -> None:
    """Warn of a fit that stopped before its tolerances, at the caller's line."""
    if not fit.converged:
        warn(
            f"VFEM did not converge: {fit.reason} ({len(fit.trace)} iterations, relative score "
            f"{fit.trace[-1].score:.1e}); {fit.remedy}",
            ConvergenceWarning,
        )
