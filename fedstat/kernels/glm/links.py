"""Links of generalized linear models: one entry each, and nothing else names them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.stats
from statsmodels.genmod.families import links


@dataclass(frozen=True, slots=True)
class Link:
    """A link g, with mean mu and linear predictor eta = g(mu).

    An instance of `kind` is called as ``g(mu)``, and has statsmodels' ``inverse(eta)``, ``deriv(mu)``,
    ``deriv2(mu)`` and ``inverse_deriv(eta)``. `numbers` are its arguments, which cross between institutions
    with the name: ``power`` or ``alpha``. `power` is the exponent of a link that is a fixed power of the
    mean; eta is then positive, unless it is 1 or -1. `sign` is that of all linear predictors which have a
    mean, where others would get one that is not theirs. `closed` tells whether every eta has a probability as
    its mean, which is 0 or 1 by rounding only; `smallest` stands for a mean that is smaller than a number can
    be. `cdf` is the distribution of `kind`, where an instance might have another. `effect` is what a
    coefficient adds to, with the name of the response, and `ratio` what its exponential is.
    """

    kind: type[Any]
    numbers: tuple[str, ...] = ()
    power: float | None = None
    sign: float | None = None
    closed: bool = False
    smallest: float = -np.inf
    cdf: Any = None
    effect: str = "linear predictor of {}"
    ratio: str = ""


LINKS: dict[str, Link] = {
    "Logit": Link(links.Logit, closed=True, effect="log odds of {}", ratio="odds ratio"),
    "Probit": Link(links.Probit, closed=True, cdf=scipy.stats.norm),
    "Cauchy": Link(links.Cauchy, closed=True, cdf=scipy.stats.cauchy),
    "CLogLog": Link(links.CLogLog, closed=True),
    "LogLog": Link(links.LogLog, closed=True),
    "Log": Link(links.Log, smallest=1e-300, effect="log mean of {}", ratio="ratio of means"),
    "LogC": Link(links.LogC),
    "Identity": Link(links.Identity, power=1.0, effect="mean of {}"),
    "InversePower": Link(links.InversePower, power=-1.0, sign=1.0),
    "InverseSquared": Link(links.InverseSquared, power=-2.0, sign=1.0),
    "Sqrt": Link(links.Sqrt, power=0.5, sign=1.0),
    "Power": Link(links.Power, numbers=("power",)),
    "NegativeBinomial": Link(links.NegativeBinomial, numbers=("alpha",), sign=-1.0),
}
"""By the name of the class, by which a link crosses between institutions."""


def name_powers() -> Mapping[float, str]:
    """Names of the links that are a power of the mean, by its exponent."""
    return {link.power: name for name, link in LINKS.items() if link.power is not None}
