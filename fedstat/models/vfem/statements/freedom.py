"""What covariances between institutions cost that a fit leaves free, beside a law without them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedstat.errors import EstimationError, NotAvailableError
from fedstat.inference.likelihood import said
from fedstat.models.vertical.law.assumptions import independence_lr_test
from fedstat.models.vertical.law.fit import LawFit
from fedstat.models.vertical.law.pairs import fit_between
from fedstat.models.vfem.covariance.from_moments import moments_covariance
from fedstat.models.vfem.iteration.fit import by_client
from fedstat.models.vfem.statements.outcome import reported_covariance
from fedstat.typing import Floats

CONTRADICTED = 0.05


def freedom_notes(fit: LawFit, errors: Floats) -> Iterator[str]:
    """Compare standard errors of coefficients with those of independent blocks, and the two laws."""
    if len(fit.moments.sizes) < 2 or fit.moments.seen.all():
        return
    try:
        other = fit_between(fit.moments, "independent")
        covariance = reported_covariance(moments_covariance(other), by_client(other, "independent"))
        pvalue = independence_lr_test(fit, other).pvalue
    except (EstimationError, NotAvailableError):
        return
    ratio = errors / np.sqrt(np.diag(covariance))[1:]
    yield (
        f"Standard errors of coefficients are {np.median(ratio):.2f} times (median; {ratio.min():.2f} to "
        f"{ratio.max():.2f}) those of between='independent', blocks independent between institutions. "
        f"The data {'contradict' if pvalue < CONTRADICTED else 'do not contradict'} such a law (likelihood "
        f"ratio, {said(pvalue)}); where it does not hold its coefficients are biased."
    )
