"""Distributions and links of generalized linear models as data.

A distribution (statsmodels: family) crosses between institutions as a few names and numbers in JSON, never
as an object; every party makes the statsmodels family of the same name from it.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, TypeAlias

from statsmodels.genmod import families
from statsmodels.genmod.families import links

from fedstat import records
from fedstat.errors import MessageError, ModelError
from fedstat.kernels.glm.distributions import DISTRIBUTIONS, Distribution, Support, power_support
from fedstat.kernels.glm.links import LINKS, Link, name_powers

Family: TypeAlias = Any
"""An instance of ``statsmodels.genmod.families.Family``."""

NUMBERS = ("power", "alpha", "var_power")


@dataclass(frozen=True, slots=True)
class DistributionSpec:
    """A distribution with its link, by the names of their classes in statsmodels ("Binomial", "Logit").

    `power` is the exponent of the link "Power"; `alpha` the dispersion of "NegativeBinomial", and of the link
    of that name; `var_power` the exponent of Tweedie's variance function, 0 or at least 1, and `eql` whether
    its log-likelihood is the extended quasi-likelihood. A ModelError where the combination means nothing
    here.
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
    def of(cls, family: Family) -> DistributionSpec:
        """Describe a statsmodels family: an instance, or a class for the family with its default link.

        A ModelError where it, or its link, is not one that can be told by name.
        """
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
        return records.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> DistributionSpec:
        """Read what :meth:`to_json` wrote, as if a stranger had written it, or raise a MessageError."""
        try:
            return records.from_json(cls, text, "the family")
        except ModelError as error:
            raise MessageError(f"the family is not one of those that are known: {error}") from error

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
        """What is known of the distribution, whatever the link."""
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
        """What a response may be."""
        return self.entry.support or power_support(self.variance_power or 0.0)

    @property
    def canonical(self) -> bool:
        """Whether the linear predictor is the natural parameter: observed information equals expected."""
        if self.entry.canonical is not None:
            return self.link == self.entry.canonical
        if self.variance_power == 1.0:
            return self.link == "Log"  # the limit of powers
        return self.variance_power is not None and self.link_power == 1.0 - self.variance_power

    @property
    def least_squares(self) -> bool:
        """Whether the estimate minimises the sum of squared residuals."""
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
    if name not in LINKS or LINKS[name].kind is not kind:
        raise ModelError(f"link {name} cannot be told by name; expected one of {', '.join(LINKS)}")
    entry = LINKS[name]
    if entry.cdf is not None and link.dbn is not entry.cdf:
        raise ModelError(f"link {name} has a distribution of its own, which cannot be told by name")
    numbers = {number: float(getattr(link, number)) for number in entry.numbers}
    named = name_powers()
    return (named[numbers["power"]], {}) if numbers.get("power") in named else (name, numbers)
