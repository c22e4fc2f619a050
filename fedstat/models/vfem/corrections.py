"""Corrections of the estimates for skewed columns and small samples, with their notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
from scipy import stats

from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.inference.likelihood import format_pvalue
from fedstat.inference.summary import Note
from fedstat.models.checks import check_choice
from fedstat.models.vertical.fit import MomentsFit
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
# Corrections of maximum likelihood under the normal law, and the covariance that goes with them.

Correction: TypeAlias = Literal["small-sample", "skewness"]
SIMULATED = "simulated"


@dataclass(frozen=True, slots=True, eq=False)
class CorrectedEstimate:
    """The law that is reported, and its covariance."""

    reported: MomentsFit | JointNormalFit
    covariance: PsiCovariance | None


def correct_small_sample(fit: JointNormalFit, covariance: PsiCovariance | None) -> CorrectedEstimate:
    """Take the first-order bias off; standard errors grow with the residual variance, as in least squares."""
    reported = bias_corrected(fit)
    if covariance is not None:
        covariance = replace(covariance, psi=covariance.psi * (reported.s2 / fit.s2))
    return CorrectedEstimate(reported, covariance)


def correct_skewness(fit: JointNormalFit, covariance: PsiCovariance | None) -> CorrectedEstimate:
    """Take off what a normal law of skewed columns does; standard errors come from the simulated sample.

    A NotAvailableError where entities have a part of a site's columns: its standard errors were tried
    for whole blocks only.
    """
    if not fit.moments.whole:
        raise NotAvailableError(
            "correction='skewness' is for entities that have all of a site's columns or none, and "
            "some have a part; make the ClientPartition with partial='drop'"
        )
    found = without_skewness(fit)
    psi = None if covariance is None else PsiCovariance(simulated_covariance(found), SIMULATED)
    return CorrectedEstimate(found.reported, psi)


CORRECTIONS: Mapping[Correction, Callable[[JointNormalFit, PsiCovariance | None], CorrectedEstimate]] = {
    "small-sample": correct_small_sample,
    "skewness": correct_skewness,
}


def apply_correction(
    fit: MomentsFit | JointNormalFit, covariance: PsiCovariance | None, correction: Correction | None
) -> CorrectedEstimate:
    """Correct a fit from moments where asked."""
    if correction is None or not isinstance(fit, JointNormalFit):
        return CorrectedEstimate(fit, covariance)
    return CORRECTIONS[correction](fit, covariance)


def refuse_ratio(what: str, correction: Correction | None) -> None:
    """Refuse likelihood ratios of a normal law that is not the one reported."""
    if correction == "skewness":
        raise NotAvailableError(
            f"{what}: after correction='skewness' the likelihood is that of the normal law, whose ratios are "
            "as wrong as its estimates; use wald_test"
        )


def check_correction(correction: Correction | None, cov_type: str, free: bool) -> None:
    """Refuse a correction of a fit that is none of the free law from moments, or with another covariance."""
    if correction is None:
        return
    check_choice("correction", correction, get_args(Correction))
    if not free:
        raise ModelError(
            f"correction='{correction}' is of method='vfem' with exchange='moments' and between='free'"
        )
    if correction == "skewness" and cov_type not in ("observed", "none"):
        raise ModelError(
            "correction='skewness' has standard errors of its own, by simulation: leave out "
            f"cov_type='{cov_type}'"
        )


# ----------------------------------------------------------------------------------------------------
# Statements on what a normal law does to skewed columns, and maximum likelihood to small samples.

CORRECTED: Mapping[Correction, str] = {
    "small-sample": (
        "Corrected for the small sample: estimates are without the bias of order 1/n of maximum likelihood, "
        "and standard errors go by the residual variance with its degrees of freedom. The log-likelihood is "
        "that of the maximum."
    ),
    "skewness": (
        "Corrected for skewness: each column is shifted log-normal, as asymmetric as its site told, "
        "and an entity's missing pattern may depend on the response and on columns that nobody lacks; the "
        "law is the one whose simulated sample has the estimates of the normal law (indirect inference), and "
        "standard errors are those of the simulation. The log-likelihood is that of the normal law."
    ),
}
SKEWED = 1.0
"""Skewness from which a column is named; that of an exponential one is 2."""
MIN_MISSING_SHARE = 0.05
"""Share of the entities that lack a column from which it is named."""
DIFFERENCE_LEVEL = 0.01
"""P-value below which the response counts as different between missing patterns."""
MAX_LISTED = 6
BIASED = 0.1
"""Bias in standard errors from which a coefficient is named."""
MOST_COLUMNS = 20
"""For which a bias is worked out unasked: it takes as long as some steps of the fit."""


def correction_notes(
    correction: Correction | None, fit: MomentsFit | JointNormalFit | None
) -> Iterator[Note]:
    """Say what was corrected, or what of a fit from moments may ask for it."""
    if correction is not None:
        yield Note("correction", CORRECTED[correction])
    if correction is None and isinstance(fit, JointNormalFit):
        yield from bias_notes(fit)
    if correction != "skewness" and fit is not None:
        yield from skewed_notes(fit.moments)


def skewed_notes(moments: PatternMoments) -> Iterator[Note]:
    """Name skewed columns that some entities lack, where the response differs between missing patterns."""
    pvalue = response_by_pattern(moments)
    if moments.shape is None or pvalue >= DIFFERENCE_LEVEL:
        return
    skewness, lacking = skewness_of(moments.shape), 1.0 - moments.n @ moments.seen / moments.n.sum()
    named = np.flatnonzero((lacking > MIN_MISSING_SHARE) & (np.abs(skewness) > SKEWED))
    named = named[np.argsort(-np.abs(skewness[named]), kind="stable")]
    if not len(named):
        return
    of = [moments.clients[k] for k in moments.owner]
    each = [
        f"{moments.names[c]} ({of[c]}) {skewness[c]:.1f}, {100 * lacking[c]:.0f} % missing"
        for c in named[:MAX_LISTED]
    ]
    # The correction was tried for whole blocks only, and is refused elsewhere.
    compare = "compare with fit(correction='skewness'), or " if moments.whole else ""
    more = f" and {len(named) - MAX_LISTED} more" if len(named) > MAX_LISTED else ""
    yield Note(
        "skewness",
        f"Skewed columns that some entities lack: {'; '.join(each)}{more} (skewness of a log-normal column "
        f"as asymmetric); and the response differs between missing patterns ({format_pvalue(pvalue)}). "
        "The normal law "
        "of what is missing matters there, and with much missing coefficients may be off by several standard "
        f"errors: {compare}take logarithms in the formula where effects are of these.",
        "warning",
    )


def response_by_pattern(moments: PatternMoments) -> float:
    """P-value of equal means of the response in all missing patterns, by a chi-square test."""
    used = moments.n > 0.0
    n, first = moments.n[used], moments.grams[used, 0, -1]
    mean, variance = first.sum() / n.sum(), moments.grams[:, -1, -1].sum() / n.sum()
    statistic = float(np.sum((first - n * mean) ** 2 / n) / (variance - mean**2))
    return float(stats.chi2.sf(statistic, len(n) - 1)) if len(n) > 1 else 1.0


def bias_notes(fit: JointNormalFit) -> Iterator[Note]:
    """Name the coefficient with the largest bias of order 1/n, if it is worth a word."""
    P = len(fit.point.beta)
    if P > MOST_COLUMNS or fit.moments.seen.all():
        return
    try:
        bias, variance = first_order_bias(fit)
    except (EstimationError, np.linalg.LinAlgError):
        return
    share = bias[2 : 2 + P] / np.sqrt(variance[2 : 2 + P])
    worst = int(np.abs(share).argmax())
    if abs(share[worst]) > BIASED:
        yield Note(
            "small_sample_bias",
            "Few entities share what is needed: the bias of order 1/n of maximum likelihood is "
            f"{share[worst]:+.2f} standard errors for {fit.moments.names[worst]}, and less for other "
            "columns; fit(correction='small-sample') is without it.",
            "warning",
        )
