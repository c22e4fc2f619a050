"""Corrections of maximum likelihood under the normal law, and the covariance that goes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from fedstat.errors import ModelError, NotAvailableError
from fedstat.models.checks import check_choice
from fedstat.models.vertical.fit import MomentsFit
from fedstat.models.vertical.law.fit import LawFit
from fedstat.models.vertical.law.skewed import simulated_covariance, without_skewness
from fedstat.models.vertical.law.small_sample import without_bias
from fedstat.models.vfem.covariance.psi import Covariance

Correction: TypeAlias = Literal["small-sample", "skewness"]
SIMULATED = "simulated"


@dataclass(frozen=True, slots=True, eq=False)
class Corrected:
    """The law that is reported, and its covariance."""

    reported: MomentsFit | LawFit
    covariance: Covariance | None


def of_small_sample(fit: LawFit, covariance: Covariance | None) -> Corrected:
    """Take the first-order bias off; standard errors grow with the residual variance, as in least squares."""
    reported = without_bias(fit)
    if covariance is not None:
        covariance = replace(covariance, psi=covariance.psi * (reported.s2 / fit.s2))
    return Corrected(reported, covariance)


def of_skewness(fit: LawFit, covariance: Covariance | None) -> Corrected:
    """Take off what a normal law of skewed columns does; standard errors come from the simulated sample.

    A NotAvailableError where entities have a part of an institution's columns: its standard errors were tried
    for whole blocks only.
    """
    if not fit.moments.whole:
        raise NotAvailableError(
            "correction='skewness' is for entities that have all of an institution's columns or none, and "
            "some have a part; make the ClientPartition with partial='drop'"
        )
    found = without_skewness(fit)
    psi = None if covariance is None else Covariance(simulated_covariance(found), SIMULATED)
    return Corrected(found.reported, psi)


CORRECTIONS: Mapping[Correction, Callable[[LawFit, Covariance | None], Corrected]] = {
    "small-sample": of_small_sample,
    "skewness": of_skewness,
}


def correct(
    fit: MomentsFit | LawFit, covariance: Covariance | None, correction: Correction | None
) -> Corrected:
    """Correct a fit from moments where asked."""
    if correction is None or not isinstance(fit, LawFit):
        return Corrected(fit, covariance)
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
