"""Distributions of the response: one entry each, and nothing else names them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from statsmodels.genmod import families

from fedstat.kernels.glm import likelihoods, quadrature
from fedstat.kernels.glm.likelihoods import Likelihood
from fedstat.kernels.glm.loops import IDENTITY, LOG, LOGIT
from fedstat.typing import Bools, Floats


@dataclass(frozen=True, slots=True)
class Support:
    """Values that a response may have: `holds` is (n,) -> (n,) of bool; the texts name them, and others."""

    holds: Callable[[Floats], Bools]
    expected: str
    otherwise: str


def whole(y: Floats) -> Bools:
    """Tell which are whole numbers from zero."""
    return np.asarray((y >= 0.0) & (y == np.round(y)) & np.isfinite(y))


REAL = Support(np.isfinite, "finite numbers", "that is not finite")
UNIT = Support(lambda y: (y >= 0.0) & (y <= 1.0), "shares from 0 to 1", "outside 0 to 1")
POSITIVE = Support(lambda y: (y > 0.0) & np.isfinite(y), "positive numbers", "that is not positive")
NOT_NEGATIVE = Support(
    lambda y: (y >= 0.0) & np.isfinite(y), "numbers from zero", "that is negative or not finite"
)
EVENTS = Support(lambda y: np.isin(y, (0.0, 1.0)), "zeros and ones (or true and false)", "other than 0 and 1")
COUNTS = Support(whole, "counts: whole numbers from zero", "that is no whole number from zero")


def power_support(power: float) -> Support:
    """Return where a variance that is a power of the mean is that of a distribution (Jorgensen 1987)."""
    if power == 0.0:
        return REAL
    return POSITIVE if power >= 2.0 else NOT_NEGATIVE


@dataclass(frozen=True, slots=True)
class Distribution:
    """What statsmodels calls a family; `kind` has ``variance``, ``deviance``, ``loglike`` and ``fitted``.

    `estimates_scale` tells whether the dispersion is estimated rather than one. `variance_power` is the
    exponent of a variance function that is a fixed power of the mean. `canonical` is the link whose linear
    predictor is the natural parameter; where None, the power of the mean of one minus that exponent.
    `support` is that of a row, which may stand for several (None: that of the exponent), `single` of one
    entity, where that is narrower. `loop` is the compiled loop of :mod:`fedstat.kernels.glm.loops` for the
    canonical link. `numbers` are arguments of `kind`, which cross between institutions with the name.
    `likelihood` is what fits over institutions with other columns need, `vertical_links` the links of such
    fits: the canonical one first, others by Fisher scoring.
    """

    kind: type[Any]
    estimates_scale: bool = False
    variance_power: float | None = None
    canonical: str | None = None
    support: Support | None = None
    single: Support | None = None
    loop: int | None = None
    integrals: Mapping[str, int] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    likelihood: Likelihood | None = None
    vertical_links: tuple[str, ...] = ()


DISTRIBUTIONS: dict[str, Distribution] = {
    "Gaussian": Distribution(
        families.Gaussian,
        True,
        0.0,
        support=REAL,
        loop=IDENTITY,
        likelihood=likelihoods.NORMAL,
        vertical_links=("Identity",),
    ),
    "Binomial": Distribution(
        families.Binomial,
        canonical="Logit",
        support=UNIT,
        single=EVENTS,
        loop=LOGIT,
        integrals={"Logit": quadrature.LOGIT, "Probit": quadrature.PROBIT},
        likelihood=likelihoods.BINOMIAL,
        vertical_links=("Logit",),
    ),
    "Poisson": Distribution(
        families.Poisson,
        variance_power=1.0,
        canonical="Log",
        support=NOT_NEGATIVE,
        single=COUNTS,
        loop=LOG,
        integrals={"Log": quadrature.LOG},
        likelihood=likelihoods.POISSON,
        vertical_links=("Log",),
    ),
    "Gamma": Distribution(
        families.Gamma,
        True,
        2.0,
        support=POSITIVE,
        likelihood=likelihoods.GAMMA,
        vertical_links=("InversePower", "Log"),
    ),
    "InverseGaussian": Distribution(
        families.InverseGaussian,
        True,
        3.0,
        support=POSITIVE,
        likelihood=likelihoods.INVERSE_NORMAL,
        vertical_links=("InverseSquared", "Log"),
    ),
    "NegativeBinomial": Distribution(
        families.NegativeBinomial,
        canonical="NegativeBinomial",
        support=NOT_NEGATIVE,
        single=COUNTS,
        # The mean over what is missing is that of any family with this link.
        integrals={"Log": quadrature.LOG},
        numbers=("alpha",),
        likelihood=likelihoods.NEGATIVE_BINOMIAL,
        vertical_links=("NegativeBinomial", "Log"),
    ),
    "Tweedie": Distribution(families.Tweedie, True, numbers=("var_power", "eql")),
}
"""By the name of the class, by which a distribution crosses between institutions."""
