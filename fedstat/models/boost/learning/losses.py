"""Losses that boosting minimizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from fedstat.errors import DesignError, EstimationError, MessageError, ModelError
from fedstat.kernels.boosting import LOSSES, BoostLoss
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.typing import Floats

LossName: TypeAlias = Literal["binomial", "poisson", "huber", "quantile"]
FAMILIES = {("Binomial", "Logit"): "binomial", ("Poisson", "Log"): "poisson"}
WORDS = ("huber", "quantile")
EVERY = 10
"""Steps between two exchanges of scores, unless a loss has no curvature."""


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss that is no square; `number` is Huber's delta, in units of the response, or the quantile's q."""

    name: LossName
    number: float = 0.0

    def check(self) -> None:
        """Require a number with a meaning."""
        if (self.name == "huber" and self.number <= 0.0) or (
            self.name == "quantile" and not 0.0 < self.number < 1.0
        ):
            raise MessageError(f"the loss {self.name!r} has a number without a meaning")

    @property
    def entry(self) -> BoostLoss:
        """Its functions."""
        return LOSSES[self.name]

    @property
    def title(self) -> str:
        """The loss as a summary prints it."""
        more = {"huber": f", delta {self.number:g}", "quantile": f", q {self.number:g}"}
        link = {"binomial": ", logit", "poisson": ", log"}
        return self.name.capitalize() + more.get(self.name, link.get(self.name, ""))

    def slope(self, y: Floats, f: Floats) -> Floats:
        """Minus the derivative of the loss in the predictor."""
        return self.entry.slope(y, f, self.number)

    def value(self, y: Floats, f: Floats) -> Floats:
        """Loss at a predictor."""
        return self.entry.value(y, f, self.number)

    def weight(self, y: Floats, f: Floats) -> Floats:
        """How fast the slope falls."""
        return self.entry.weight(y, f, self.number)

    def start(self, mean: Floats, sd: float) -> Floats:
        """Predictor to start from, (G,), by the mean of the response at each point.

        One value for all points if the mean at some of them is at the end of its range.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            found = self.entry.start(mean, sd, self.number)
            if not np.isfinite(found).all():
                found = np.full(len(mean), self.entry.start(mean.mean(), sd, self.number))
        if not np.isfinite(found).all():
            raise EstimationError(
                f"the response is the same in all rows, which {self.title} cannot start from; look at it"
            )
        return found

    def check_response(self, site: str, y: Floats) -> None:
        """Require responses that the loss can have."""
        support = self.entry.support
        if not support.holds(y).all():
            raise DesignError(
                f"{site}: the response has values {support.otherwise}, and {self.title} expects "
                f"{support.expected}. Correct them, or take another loss"
            )


def loss_of(family: Any, loss: object, delta: object, q: object) -> tuple[LossSpec | None, DistributionSpec]:
    """Loss that a family or a word asks for, None for squares, and a distribution of such responses."""
    normal = DistributionSpec("Gaussian", "Identity")
    if loss is not None and (family is not None or loss not in WORDS):
        raise ModelError(
            f"loss: expected one of {', '.join(map(repr, WORDS))}, without a family, received {loss!r}"
        )
    for name, value, of in (("delta", delta, "huber"), ("q", q, "quantile")):
        if value is not None and loss != of:
            raise ModelError(f"{name}: it belongs to loss={of!r}, received loss={loss!r}")
    if loss == "quantile":
        return LossSpec("quantile", _number("q", 0.5 if q is None else q, 1.0)), normal
    if loss == "huber":
        if delta is None:
            raise ModelError(
                "delta: loss='huber' needs the residual from which it is linear, in units of the response; "
                "1.345 standard deviations of the errors are usual"
            )
        return LossSpec("huber", _number("delta", delta, np.inf)), normal
    if family is None:
        return None, normal
    spec = DistributionSpec.of(family)
    if spec.least_squares:
        return None, spec
    if (spec.name, spec.link) not in FAMILIES:
        known = " and ".join(f"{name}() with link {link}" for name, link in FAMILIES)
        raise ModelError(f"family: boosting has Gaussian(), {known}; received {spec}")
    return LossSpec(FAMILIES[spec.name, spec.link]), spec  # type: ignore[arg-type]


def _number(name: str, value: object, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < most:
        raise ModelError(
            f"{name}: expected a number above 0{'' if most == np.inf else ' and below 1'}, received {value!r}"
        )
    return float(value)
