"""Distributions and links of generalized linear models as data: one entry each."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import scipy.stats
from scipy.optimize import brentq
from scipy.special import digamma, expit, gammaln, xlog1py, xlogy
from statsmodels.genmod import families
from statsmodels.genmod.families import links

from fedstat import codec
from fedstat.errors import MessageError, ModelError
from fedstat.kernels.glm import quadrature
from fedstat.kernels.responses import (
    COUNTS,
    EVENTS,
    NOT_NEGATIVE,
    POSITIVE,
    REAL,
    UNIT,
    Support,
    power_support,
)
from fedstat.typing import Floats

LOGIT, LOG, IDENTITY = 0, 1, 2
"""The canonical pairs with formulas of their own: Binomial, Poisson, Gaussian."""

# ----------------------------------------------------------------------------------------------------
# Links of generalized linear models: one entry each; no other place lists them.


@dataclass(frozen=True, slots=True)
class Link:
    """A link g, with mean mu and linear predictor eta = g(mu).

    An instance of `kind` is called as ``g(mu)``, and has statsmodels' ``inverse(eta)``, ``deriv(mu)``,
    ``deriv2(mu)`` and ``inverse_deriv(eta)``. `numbers` are its arguments, which are sent between sites with
    the name: ``power`` or ``alpha``. `power` is the exponent of a link that is a fixed power of the mean; eta
    is then positive, unless it is 1 or -1. `sign` is that of all linear predictors with a mean, if others
    would get a wrong one. `closed` states whether every eta has a probability as its mean, which is 0 or 1
    only by rounding; `smallest` replaces a mean that is too small for floating point. `cdf` is the
    distribution of `kind`, if an instance might have another. `effect` names the scale of a coefficient, with
    the name of the response, and `ratio` that of its exponential.
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
"""By the name of the class, by which a link is sent between sites."""


def name_powers() -> Mapping[float, str]:
    """Names of the links that are a power of the mean, by its exponent."""
    return {link.power: name for name, link in LINKS.items() if link.power is not None}


# ----------------------------------------------------------------------------------------------------
# Likelihoods of distributions by half their mean deviance, and points at linear predictors.
#
# The dispersion of the normal, gamma and inverse normal distribution is estimated: its maximum likelihood
# estimate follows from the deviance alone (McCullagh and Nelder 1989, 8.3).

Point: TypeAlias = Callable[[Floats, Floats], tuple[float, Floats, Floats]]
NEARLY_PERFECT = 1e-4
"""Half the mean deviance below which the gamma dispersion comes from its series; its error is 1e-13."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The log-likelihood of n entities: a part of their responses alone, and what the deviance determines.

    `saturated` (n,) is the part that depends on neither coefficients nor dispersion, from responses (n,) and
    the distribution's alpha. If a dispersion is estimated, `term` is the rest per entity as a function of
    half the mean deviance and dispersion, and `likeliest_scale` the dispersion at which it is largest. If the
    canonical link has a mean for every linear predictor, `point` maps these and responses (n,) to half the
    mean deviance, residuals and weights (n,).
    """

    saturated: Callable[[Floats, float | None], Floats] = lambda y, alpha: np.zeros(len(y))
    term: Callable[[float, float], float] | None = None
    likeliest_scale: Callable[[float], float] = lambda loss: 2.0 * loss
    point: Point | None = None


def _normal_point(eta: Floats, y: Floats) -> tuple[float, Floats, Floats]:
    residual = y - eta
    return float(np.mean(residual**2)) / 2.0, residual, np.ones(len(y))


def _normal_term(loss: float, scale: float) -> float:
    return -0.5 * float(np.log(2.0 * np.pi * scale)) - loss / scale


def _binomial_point(eta: Floats, y: Floats) -> tuple[float, Floats, Floats]:
    mean = expit(eta)
    return float(np.mean(np.logaddexp(0.0, eta) - y * eta)), y - mean, mean * expit(-eta)


def _poisson_point(eta: Floats, y: Floats) -> tuple[float, Floats, Floats]:
    # A mean beyond 1e304 is not a fit: the loss is then so large that no step leads there.
    mean = np.exp(np.minimum(eta, 700.0))
    return float(np.mean(xlogy(y, y) - y * eta - (y - mean))), y - mean, mean


def _poisson_saturated(y: Floats, alpha: float | None) -> Floats:
    return np.asarray(xlogy(y, y) - y - gammaln(y + 1.0))


def _negative_binomial_saturated(y: Floats, alpha: float | None) -> Floats:
    assert alpha is not None
    k = 1.0 / alpha
    counted = gammaln(y + k) - gammaln(k) - gammaln(y + 1.0)
    return np.asarray(xlogy(y, y) - xlogy(y, y + k) - xlog1py(k, y / k) + counted)


def _gamma_term(loss: float, scale: float) -> float:
    k = 1.0 / scale
    return k * float(np.log(k)) - k - float(gammaln(k)) - k * loss


def _gamma_scale(loss: float) -> float:
    """Solve ``log k - digamma(k) = loss`` for the shape k, which is between 1 / (2 loss) and 1 / loss."""
    if loss < NEARLY_PERFECT:  # the difference is 1 / (2 k) + 1 / (12 k^2), and cancels
        return 12.0 * loss / (3.0 + float(np.sqrt(9.0 + 12.0 * loss)))
    return 1.0 / float(brentq(lambda k: np.log(k) - digamma(k) - loss, 0.4 / loss, 1.1 / loss, rtol=1e-12))


NORMAL = Likelihood(term=_normal_term, point=_normal_point)
BINOMIAL = Likelihood(point=_binomial_point)
POISSON = Likelihood(_poisson_saturated, point=_poisson_point)
NEGATIVE_BINOMIAL = Likelihood(_negative_binomial_saturated)
GAMMA = Likelihood(lambda y, alpha: -np.log(y), _gamma_term, _gamma_scale)
INVERSE_NORMAL = Likelihood(lambda y, alpha: -1.5 * np.log(y), _normal_term)


# ----------------------------------------------------------------------------------------------------
# Distributions of the response: one entry each; no other place lists them.


@dataclass(frozen=True, slots=True)
class Distribution:
    """Properties of a statsmodels family; `kind` has ``variance``, ``deviance``, ``loglike`` and ``fitted``.

    `estimates_scale` states whether the dispersion is estimated rather than one. `variance_power` is the
    exponent of a variance function that is a fixed power of the mean. `canonical` is the link whose linear
    predictor is the natural parameter; if None, the power of the mean of one minus that exponent. `support`
    is that of a row, which may represent several entities (None: that of the exponent), `single` that of one
    entity, if it is narrower. `loop` is the pair of :func:`~fedstat.kernels.glm.sums.canonical_weights` for
    the canonical link. `numbers` are arguments of `kind`, which are sent between sites with the name.
    `likelihood` is used by fits over sites with different columns, `vertical_links` are the links of such
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
        likelihood=NORMAL,
        vertical_links=("Identity",),
    ),
    "Binomial": Distribution(
        families.Binomial,
        canonical="Logit",
        support=UNIT,
        single=EVENTS,
        loop=LOGIT,
        integrals={"Logit": quadrature.LOGIT, "Probit": quadrature.PROBIT},
        likelihood=BINOMIAL,
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
        likelihood=POISSON,
        vertical_links=("Log",),
    ),
    "Gamma": Distribution(
        families.Gamma,
        True,
        2.0,
        support=POSITIVE,
        likelihood=GAMMA,
        vertical_links=("InversePower", "Log"),
    ),
    "InverseGaussian": Distribution(
        families.InverseGaussian,
        True,
        3.0,
        support=POSITIVE,
        likelihood=INVERSE_NORMAL,
        vertical_links=("InverseSquared", "Log"),
    ),
    "NegativeBinomial": Distribution(
        families.NegativeBinomial,
        canonical="NegativeBinomial",
        support=NOT_NEGATIVE,
        single=COUNTS,
        # The mean over missing columns is that of any family with this link.
        integrals={"Log": quadrature.LOG},
        numbers=("alpha",),
        likelihood=NEGATIVE_BINOMIAL,
        vertical_links=("NegativeBinomial", "Log"),
    ),
    "Tweedie": Distribution(families.Tweedie, True, numbers=("var_power", "eql")),
}
"""By the name of the class, by which a distribution is sent between sites."""


# ----------------------------------------------------------------------------------------------------
# Distributions and links of generalized linear models as data.
#
# A distribution (statsmodels: family) is sent between sites as a few names and numbers in JSON, never as an
# object; every receiver makes the statsmodels family of the same name from it.

Family: TypeAlias = Any
"""An instance of ``statsmodels.genmod.families.Family``."""

NUMBERS = ("power", "alpha", "var_power")


@dataclass(frozen=True, slots=True)
class DistributionSpec:
    """A distribution with its link, by the names of their classes in statsmodels ("Binomial", "Logit").

    `power` is the exponent of the link "Power"; `alpha` the dispersion of "NegativeBinomial", and of the link
    of that name; `var_power` the exponent of Tweedie's variance function, 0 or at least 1, and `eql` whether
    its log-likelihood is the extended quasi-likelihood. Raises ModelError if the combination has no meaning.
    """

    name: str
    link: str
    power: float | None = None
    alpha: float | None = None
    var_power: float | None = None
    eql: bool = False

    def __post_init__(self) -> None:
        if self.name not in DISTRIBUTIONS:
            raise ModelError(f"no family {self.name!r}; expected one of {', '.join(DISTRIBUTIONS)}")
        if self.link not in LINKS:
            raise ModelError(f"no link {self.link!r}; expected one of {', '.join(LINKS)}")
        needed = {*self.link_entry.numbers, *self.entry.numbers}
        for number in NUMBERS:
            self._check_number(number, number in needed)
        self._check_ranges()

    def _check_number(self, number: str, needed: bool) -> None:
        value = getattr(self, number)
        if needed != (value is not None):
            raise ModelError(f"{self}: {number} {'is missing' if needed else 'has no meaning here'}")
        if needed and not math.isfinite(value):
            raise ModelError(f"{self}: {number} must be finite")

    def _check_ranges(self) -> None:
        if self.power == 0.0:
            raise ModelError(f"{self}: a power link of 0 is constant; for the limit, use the link Log")
        if self.alpha is not None and self.alpha <= 0.0:
            raise ModelError(f"{self}: alpha must be positive; for no overdispersion, use Poisson")
        if self.var_power is not None and self.var_power != 0.0 and self.var_power < 1.0:
            raise ModelError(f"{self}: var_power must be 0 or at least 1; there is no such distribution")
        if self.eql and not (self.var_power and 1.0 <= self.var_power <= 2.0):
            raise ModelError(f"{self}: eql is for Tweedie families with var_power between 1 and 2")

    def __str__(self) -> str:
        family = {"alpha": self.alpha, "var_power": self.var_power, "eql": self.eql or None}
        inner = [f"{key}={value:g}" for key, value in family.items() if value is not None]
        link = f"{self.link}({self.power:g})" if self.power is not None else self.link
        return f"{self.name}({', '.join([*inner, f'link={link}'])})"

    @classmethod
    def of(cls, family: Any) -> DistributionSpec:
        """Describe a statsmodels family: an instance; a class or name for the family with its default link.

        Raises ModelError if it, or its link, cannot be identified by name.
        """
        if isinstance(family, str):
            meant = {one.casefold(): one for one in DISTRIBUTIONS} | {"normal": "Gaussian"}
            name = meant.get(family.casefold().replace(" ", "").replace("_", ""))
            if name is None:
                raise ModelError(
                    f"family: expected one of {', '.join(map(str.lower, DISTRIBUTIONS))}, or a family of "
                    f"statsmodels, received {family!r}"
                )
            family = DISTRIBUTIONS[name].kind()
        if inspect.isclass(family) and issubclass(family, families.Family):
            family = family()
        name = type(family).__name__
        if name not in DISTRIBUTIONS or DISTRIBUTIONS[name].kind is not type(family):
            raise ModelError(f"family is {name}; expected a statsmodels family: {', '.join(DISTRIBUTIONS)}")
        link, numbers = describe_link(family.link)
        own = {number: getattr(family, number) for number in DISTRIBUTIONS[name].numbers}
        for number in numbers.keys() & own.keys():
            if numbers[number] != float(own[number]):
                raise ModelError(f"the {name} family and its link differ in {number}; give both the same")
        eql = bool(own.pop("eql", False))
        return cls(
            name, link, **{**numbers, **{number: float(value) for number, value in own.items()}}, eql=eql
        )

    def to_json(self) -> str:
        """Return the specification as JSON."""
        return codec.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> DistributionSpec:
        """Read the output of :meth:`to_json` from an unknown sender, or raise a MessageError."""
        try:
            return codec.from_json(cls, text, "the family")
        except ModelError as error:
            raise MessageError(f"the family is not a known one: {error}") from error

    def make(self) -> Family:
        """Return the statsmodels family."""
        own = {number: getattr(self, number) for number in self.entry.numbers}
        link = self.link_entry.kind(**{number: getattr(self, number) for number in self.link_entry.numbers})
        return self.entry.kind(link=link, check_link=False, **own)

    @property
    def link_entry(self) -> Link:
        """Its link."""
        return LINKS[self.link]

    @property
    def entry(self) -> Distribution:
        """Return the properties of the distribution, which do not depend on the link."""
        return DISTRIBUTIONS[self.name]

    @property
    def estimates_scale(self) -> bool:
        """Whether the dispersion is estimated rather than one."""
        return self.entry.estimates_scale

    @property
    def variance_power(self) -> float | None:
        """Exponent of a variance function that is a power of the mean, else None."""
        return self.entry.variance_power if self.var_power is None else self.var_power

    @property
    def link_power(self) -> float | None:
        """Exponent of a link that is a power of the mean, else None."""
        return self.link_entry.power if self.power is None else self.power

    @property
    def support(self) -> Support:
        """Return the values that a response may have."""
        return self.entry.support or power_support(self.variance_power or 0.0)

    @property
    def canonical(self) -> bool:
        """Whether the linear predictor is the natural parameter: observed information equals expected."""
        if self.entry.canonical is not None:
            return self.link == self.entry.canonical
        if self.variance_power == 1.0:
            return self.link == "Log"  # the limit of power links
        return self.variance_power is not None and self.link_power == 1.0 - self.variance_power

    @property
    def least_squares(self) -> bool:
        """Whether the estimate minimizes the sum of squared residuals."""
        return (self.name, self.link) == ("Gaussian", "Identity")

    @property
    def loop(self) -> int | None:
        """Compiled loop that sums it, or None."""
        return self.entry.loop if self.canonical else None


def describe_link(link: Any) -> tuple[str, dict[str, float]]:
    """Return name and numbers of a statsmodels link."""
    kind = type(link)
    if kind.__module__ == links.__name__ and kind.__name__.islower():
        kind = kind.__mro__[1]  # a deprecated alias
    name = kind.__name__
    keys = [key for key, entry in LINKS.items() if entry.kind is kind]
    if keys and keys != [name]:
        raise ModelError(
            f"link {name} is entered into LINKS as {keys[0]!r}. Sites find a link by the name of its class: "
            f"change the key to {name!r}"
        )
    if not keys:
        raise ModelError(f"link {name} has no known name; expected one of {', '.join(LINKS)}")
    entry = LINKS[name]
    if entry.cdf is not None and link.dbn is not entry.cdf:
        raise ModelError(f"link {name} has its own distribution, which a name cannot describe")
    numbers = {number: float(getattr(link, number)) for number in entry.numbers}
    named = name_powers()
    return (named[numbers["power"]], {}) if numbers.get("power") in named else (name, numbers)
