"""Statements on what a normal law does to skewed columns, and maximum likelihood to small samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from scipy import stats

from fedstat.errors import EstimationError
from fedstat.inference.likelihood import said
from fedstat.models.vertical.fit import MomentsFit
from fedstat.models.vertical.law.fit import LawFit
from fedstat.models.vertical.law.shapes import skewness_of
from fedstat.models.vertical.law.small_sample import first_order_bias
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vfem.statements.corrections import Correction

CORRECTED: Mapping[Correction, str] = {
    "small-sample": (
        "Corrected for the small sample: estimates are without the bias of order 1/n of maximum likelihood, "
        "and standard errors go by the residual variance with its degrees of freedom. The log-likelihood is "
        "that of the maximum."
    ),
    "skewness": (
        "Corrected for skewness: each column is shifted log-normal, as asymmetric as its institution told, "
        "and an entity's missing pattern may depend on the response and on columns that nobody lacks; the "
        "law is the one whose simulated sample has the estimates of the normal law (indirect inference), and "
        "standard errors are those of the simulation. The log-likelihood is that of the normal law."
    ),
}
SKEWED = 1.0
"""Skewness from which a column is named; that of an exponential one is 2."""
LACKING = 0.05
"""Share of the entities that lack a column from which it is named."""
DIFFERENT = 0.01
"""P-value below which the response counts as different between missing patterns."""
LISTED = 6
BIASED = 0.1
"""Bias in standard errors from which a coefficient is named."""
MOST_COLUMNS = 20
"""For which a bias is worked out unasked: it takes as long as some steps of the fit."""


def correction_notes(correction: Correction | None, fit: MomentsFit | LawFit | None) -> Iterator[str]:
    """Say what was corrected, or what of a fit from moments may ask for it."""
    if correction is not None:
        yield CORRECTED[correction]
    if correction is None and isinstance(fit, LawFit):
        yield from bias_notes(fit)
    if correction != "skewness" and fit is not None:
        yield from skewed_notes(fit.moments)


def skewed_notes(moments: PatternMoments) -> Iterator[str]:
    """Name skewed columns that some entities lack, where the response differs between missing patterns."""
    pvalue = response_by_pattern(moments)
    if moments.shape is None or pvalue >= DIFFERENT:
        return
    skewness, lacking = skewness_of(moments.shape), 1.0 - moments.n @ moments.seen / moments.n.sum()
    named = np.flatnonzero((lacking > LACKING) & (np.abs(skewness) > SKEWED))
    named = named[np.argsort(-np.abs(skewness[named]), kind="stable")]
    if not len(named):
        return
    of = [moments.clients[k] for k in moments.owner]
    each = [
        f"{moments.names[c]} ({of[c]}) {skewness[c]:.1f}, {100 * lacking[c]:.0f} % missing"
        for c in named[:LISTED]
    ]
    # The correction was tried for whole blocks only, and is refused elsewhere.
    compare = "compare with fit(correction='skewness'), or " if moments.whole else ""
    more = f" and {len(named) - LISTED} more" if len(named) > LISTED else ""
    yield (
        f"Skewed columns that some entities lack: {'; '.join(each)}{more} (skewness of a log-normal column "
        f"as asymmetric); and the response differs between missing patterns ({said(pvalue)}). The normal law "
        "of what is missing matters there, and with much missing coefficients may be off by several standard "
        f"errors: {compare}take logarithms in the formula where effects are of these."
    )


def response_by_pattern(moments: PatternMoments) -> float:
    """P-value of equal means of the response in all missing patterns, by a chi-square test."""
    used = moments.n > 0.0
    n, first = moments.n[used], moments.grams[used, 0, -1]
    mean, variance = first.sum() / n.sum(), moments.grams[:, -1, -1].sum() / n.sum()
    statistic = float(np.sum((first - n * mean) ** 2 / n) / (variance - mean**2))
    return float(stats.chi2.sf(statistic, len(n) - 1)) if len(n) > 1 else 1.0


def bias_notes(fit: LawFit) -> Iterator[str]:
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
        yield (
            "Few entities share what is needed: the bias of order 1/n of maximum likelihood is "
            f"{share[worst]:+.2f} standard errors for {fit.moments.names[worst]}, and less for other "
            "columns; fit(correction='small-sample') is without it."
        )
