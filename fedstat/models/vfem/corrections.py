"""Corrections of the estimates for skewed columns and small samples, and where they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
from scipy import stats

from fedstat.errors import EstimationError, ModelError, NotAvailableError, Remedy
from fedstat.models.checks import check_choice
from fedstat.models.vertical.joint_normal.corrections import (
    bias_corrected,
    first_order_bias,
    simulated_covariance,
    skewness_of,
    without_skewness,
)
from fedstat.models.vertical.joint_normal.fit import JointNormalFit
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vfem.covariance.information import PsiCovariance

# ----------------------------------------------------------------------------------------------------
# Corrections of maximum likelihood under a normal model, and their covariance.

Correction: TypeAlias = Literal["small-sample", "skewness"]
SIMULATED = "simulated"


@dataclass(frozen=True, slots=True, eq=False)
class CorrectedEstimate:
    """The corrected normal model, its covariance, and what remains to be corrected, in standard errors."""

    reported: JointNormalFit
    covariance: PsiCovariance | None
    gap: float = 0.0


def correct_small_sample(fit: JointNormalFit, covariance: PsiCovariance | None) -> CorrectedEstimate:
    """Remove the first-order bias; standard errors use the residual variance as in least squares."""
    reported = bias_corrected(fit)
    if covariance is not None:
        covariance = replace(covariance, psi=covariance.psi * (reported.s2 / fit.s2))
    return CorrectedEstimate(reported, covariance)


def correct_skewness(fit: JointNormalFit, covariance: PsiCovariance | None) -> CorrectedEstimate:
    """Remove the bias that a normal model of skewed columns causes; standard errors come from the simulation.

    Raises NotAvailableError if entities have only a part of a site's columns: the standard errors were tested
    for complete blocks only.
    """
    if not fit.moments.complete:
        raise NotAvailableError(
            "correction='skewness' requires entities that have all of a site's columns or none, but some "
            "have a part",
            remedy=Remedy(
                "ClientPartition.from_frames(..., partial='drop')",
                "make the ClientPartition with partial='drop'",
            ),
        )
    found = without_skewness(fit)
    psi = None if covariance is None else PsiCovariance(simulated_covariance(found), SIMULATED)
    return CorrectedEstimate(found.reported, psi, found.gap if found.incomplete else 0.0)


CORRECTIONS: Mapping[Correction, Callable[[JointNormalFit, PsiCovariance | None], CorrectedEstimate]] = {
    "small-sample": correct_small_sample,
    "skewness": correct_skewness,
}


def apply_correction(
    fit: JointNormalFit, covariance: PsiCovariance | None, correction: Correction | None
) -> CorrectedEstimate:
    """Apply the requested correction to a fit from moments.

    If nothing is missing, maximum likelihood is least squares, which has no bias to remove.
    """
    least_squares = correction == "small-sample" and bool(fit.moments.seen.all())
    if correction is None or least_squares:
        return CorrectedEstimate(fit, covariance)
    return CORRECTIONS[correction](fit, covariance)


def refuse_ratio(what: str, correction: Correction | None) -> None:
    """Refuse likelihood ratios if the normal model is not the reported one."""
    if correction == "skewness":
        raise NotAvailableError(
            f"{what}: after correction='skewness' the likelihood is that of the normal model, whose ratios "
            "are as biased as its estimates; use wald_test"
        )


def check_correction(
    correction: Correction | None, cov_type: str, method: str, between: str | None, exchange: str = "moments"
) -> None:
    """Refuse a correction unless the fit is from moments, of all entities, with its own covariance type."""
    if correction is None:
        return
    check_choice("correction", correction, get_args(Correction))
    if (method, exchange) != ("vfem", "moments"):
        raise ModelError(f"correction='{correction}' requires method='vfem' and exchange='moments'")
    if correction == "skewness" and between == "independent":
        raise ModelError(
            "correction='skewness' requires between='free'",
            remedy=Remedy(
                "from_formula(..., between=None).fit(...)",
                ": leave between out of from_formula(...), or use correction='small-sample'",
            ),
        )
    if correction == "skewness" and cov_type not in ("observed", "none"):
        raise ModelError(
            "correction='skewness' has its own standard errors, by simulation",
            remedy=Remedy("fit(..., cov_type='observed')", ": leave out cov_type='{cov_type}'").filled(
                cov_type=cov_type
            ),
        )


# ----------------------------------------------------------------------------------------------------
# The effect of a normal model on skewed columns, and of maximum likelihood on small samples.

SKEWED = 1.0
"""Smallest skewness of a column that is reported; an exponential distribution has skewness 2."""
MIN_MISSING_SHARE = 0.05
"""Smallest share of entities that lack a column for it to be reported."""
DIFFERENCE_LEVEL = 0.01
"""P-value below which the response counts as different between missing patterns."""
BIASED = 0.1
"""Smallest bias of a coefficient that is reported, in standard errors."""
MOST_COLUMNS = 20
"""Largest fit for which the bias is computed without a request; it takes as long as some steps of the fit."""


def skewed_columns(moments: PatternMoments) -> list[tuple[str, str, float, float]]:
    """Return skewed columns that some entities lack, if the response differs between missing patterns.

    Each with its site, its skewness, and the share of the entities that lack it; the most skewed first.
    """
    if moments.shape is None or response_by_pattern(moments) >= DIFFERENCE_LEVEL:
        return []
    skewness, lacking = skewness_of(moments.shape), 1.0 - moments.n @ moments.seen / moments.n.sum()
    named = np.flatnonzero((lacking > MIN_MISSING_SHARE) & (np.abs(skewness) > SKEWED))
    named = named[np.argsort(-np.abs(skewness[named]), kind="stable")]
    sites = [moments.sites[k] for k in moments.owner]
    return [(moments.names[c], sites[c], float(skewness[c]), float(lacking[c])) for c in named]


def response_by_pattern(moments: PatternMoments) -> float:
    """P-value of equal means of the response in all missing patterns, by a chi-square test."""
    used = moments.n > 0.0
    n, first = moments.n[used], moments.grams[used, 0, -1]
    mean, variance = first.sum() / n.sum(), moments.grams[:, -1, -1].sum() / n.sum()
    statistic = float(np.sum((first - n * mean) ** 2 / n) / (variance - mean**2))
    return float(stats.chi2.sf(statistic, len(n) - 1)) if len(n) > 1 else 1.0


def largest_bias(fit: JointNormalFit) -> tuple[str, float] | None:
    """Return the coefficient with the largest bias of order 1/n, if large, and the bias in errors."""
    P = len(fit.point.beta)
    if P > MOST_COLUMNS or fit.moments.seen.all():
        return None
    try:
        bias, variance = first_order_bias(fit)
    except (EstimationError, np.linalg.LinAlgError):
        return None
    share = bias[2 : 2 + P] / np.sqrt(variance[2 : 2 + P])
    worst = int(np.abs(share).argmax())
    return (fit.moments.names[worst], float(share[worst])) if abs(share[worst]) > BIASED else None
