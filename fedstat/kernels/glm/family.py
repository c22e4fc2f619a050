"""Families and links of generalized linear models as data.

A family crosses between institutions as a few names and numbers in JSON, never as an object; every
party makes the statsmodels family of the same name from it.
"""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import scipy.stats
from statsmodels.genmod import families
from statsmodels.genmod.families import links

from fedstat.errors import MessageError, ModelError

Family: TypeAlias = Any
"""An instance of ``statsmodels.genmod.families.Family``."""

FAMILIES = {
    family.__name__: family
    for family in (
        families.Binomial,
        families.Poisson,
        families.NegativeBinomial,
        families.Gamma,
        families.InverseGaussian,
        families.Gaussian,
        families.Tweedie,
    )
}
LINKS = {
    link.__name__: link
    for link in (
        links.Logit,
        links.Probit,
        links.Cauchy,
        links.CLogLog,
        links.LogLog,
        links.Log,
        links.LogC,
        links.Identity,
        links.InversePower,
        links.InverseSquared,
        links.Sqrt,
        links.Power,
        links.NegativeBinomial,
    )
}
POWERS = {1.0: "Identity", 0.5: "Sqrt", -1.0: "InversePower", -2.0: "InverseSquared"}
"""Power links that have a name of their own."""

VARIANCE_POWERS = {"Gaussian": 0.0, "Poisson": 1.0, "Gamma": 2.0, "InverseGaussian": 3.0}
NUMBERS = ("power", "alpha", "var_power")


@dataclass(frozen=True, slots=True)
class FamilySpec:
    """A family with its link, by name.

    Parameters
    ----------
    name : str
        Class in ``statsmodels.genmod.families``, e.g. ``"Binomial"``.
    link : str
        Class in ``statsmodels.genmod.families.links``, e.g. ``"Logit"``.
    power : float, optional
        Exponent of the link ``"Power"``.
    alpha : float, optional
        Dispersion of the family ``"NegativeBinomial"``, and of the link of that name.
    var_power : float, optional
        Exponent of the variance function of ``"Tweedie"``: 0, or at least 1.
    eql : bool
        Whether Tweedie's log-likelihood is the extended quasi-likelihood.

    Raises
    ------
    ModelError
        The combination means nothing here.
    """

    name: str
    link: str
    power: float | None = None
    alpha: float | None = None
    var_power: float | None = None
    eql: bool = False

    def __post_init__(self) -> None:
        if self.name not in FAMILIES:
            raise ModelError(f"no family {self.name!r}; expected one of {', '.join(FAMILIES)}")
        if self.link not in LINKS:
            raise ModelError(f"no link {self.link!r}; expected one of {', '.join(LINKS)}")
        needed = {
            "power": self.link == "Power",
            "alpha": "NegativeBinomial" in (self.name, self.link),
            "var_power": self.name == "Tweedie",
        }
        for number in NUMBERS:
            self._check_number(number, needed[number])
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
    def of(cls, family: Family) -> FamilySpec:
        """Describe a statsmodels family.

        Parameters
        ----------
        family : statsmodels family
            An instance, or a class for the family with its default link.

        Raises
        ------
        ModelError
            It, or its link, is not one that can be told by name.
        """
        if inspect.isclass(family) and issubclass(family, families.Family):
            family = family()
        name = type(family).__name__
        if FAMILIES.get(name) is not type(family):
            raise ModelError(f"family is {name}; expected a statsmodels family: {', '.join(FAMILIES)}")
        link, power, alpha = describe_link(family.link)
        if name == "NegativeBinomial":
            if alpha not in (None, float(family.alpha)):
                raise ModelError(
                    "the NegativeBinomial family and its link differ in alpha; give both the same"
                )
            alpha = float(family.alpha)
        if name == "Tweedie":
            return cls(name, link, power, alpha, float(family.var_power), bool(family.eql))
        return cls(name, link, power, alpha)

    def to_json(self) -> str:
        """Return the specification as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FamilySpec:
        """Read what :meth:`to_json` wrote, as if a stranger had written it.

        Raises
        ------
        MessageError
            It is not such a specification.
        """
        try:
            fields = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise MessageError("the family is not JSON") from error
        if not isinstance(fields, dict) or set(fields) != set(cls.__slots__):
            raise MessageError(f"the family must have the fields {', '.join(cls.__slots__)}")
        if not (isinstance(fields["name"], str) and isinstance(fields["link"], str)):
            raise MessageError("the names of family and link must be text")
        if not isinstance(fields["eql"], bool):
            raise MessageError("eql of the family must be true or false")
        for number in NUMBERS:
            if not (fields[number] is None or type(fields[number]) in (int, float)):
                raise MessageError(f"{number} of the family must be a number or null")
        try:
            numbers = {key: None if fields[key] is None else float(fields[key]) for key in NUMBERS}
            return cls(fields["name"], fields["link"], **numbers, eql=fields["eql"])
        except (ModelError, OverflowError) as error:
            raise MessageError(f"the family is not one of those that are known: {error}") from error

    def make(self) -> Family:
        """Return the statsmodels family."""
        numbers = {"power": self.power} if self.link == "Power" else {}
        if self.link == "NegativeBinomial":
            numbers = {"alpha": self.alpha}
        parts = {"alpha": self.alpha} if self.name == "NegativeBinomial" else {}
        if self.name == "Tweedie":
            parts = {"var_power": self.var_power, "eql": self.eql}
        return FAMILIES[self.name](link=LINKS[self.link](**numbers), check_link=False, **parts)

    @property
    def estimates_scale(self) -> bool:
        """Whether the dispersion is estimated rather than one."""
        return self.name in ("Gaussian", "Gamma", "InverseGaussian", "Tweedie")

    @property
    def variance_power(self) -> float | None:
        """Exponent of a variance function that is a power of the mean, else None."""
        return self.var_power if self.name == "Tweedie" else VARIANCE_POWERS.get(self.name)

    @property
    def link_power(self) -> float | None:
        """Exponent of a link that is a power of the mean, else None."""
        named = {name: power for power, name in POWERS.items()}
        return self.power if self.link == "Power" else named.get(self.link)

    @property
    def canonical(self) -> bool:
        """Whether the linear predictor is the natural parameter: observed information equals expected."""
        if self.name == "Binomial":
            return self.link == "Logit"
        if self.name == "NegativeBinomial":
            return self.link == "NegativeBinomial"
        if self.variance_power == 1.0:
            return self.link == "Log"
        return self.variance_power is not None and self.link_power == 1.0 - self.variance_power


def describe_link(link: Any) -> tuple[str, float | None, float | None]:
    """Return name, power and alpha of a statsmodels link."""
    kind = type(link)
    if kind.__module__ == links.__name__ and kind.__name__.islower():
        kind = kind.__mro__[1]  # a deprecated alias
    name = kind.__name__
    if LINKS.get(name) is not kind:
        raise ModelError(f"link {name} cannot be told by name; expected one of {', '.join(LINKS)}")
    distributions = {"Probit": scipy.stats.norm, "Cauchy": scipy.stats.cauchy}
    if name in distributions and link.dbn is not distributions[name]:
        raise ModelError(f"link {name} has a distribution of its own, which cannot be told by name")
    if issubclass(kind, links.Power):
        power = float(link.power)
        return (POWERS[power], None, None) if power in POWERS else ("Power", power, None)
    return name, None, float(link.alpha) if name == "NegativeBinomial" else None
