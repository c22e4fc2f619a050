"""Requests to the sites and to the response holder of a split network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from fedstat.codec import Minimum
from fedstat.errors import MessageError
from fedstat.federation.disclosure.family import PER_ENTITY, state_without_terms
from fedstat.models.laser.networks import Optimizer

FAMILY = state_without_terms("laser", PER_ENTITY)
Outcome: TypeAlias = Literal["binary", "multiclass", "normal"]
MOST_EPSILON = 100.0
MOST_UNITS, MOST_LAYERS, MOST_NETWORKS = 4096, 16, 512


@dataclass(frozen=True, slots=True)
class NetworksRequest:
    """Networks of a site, or heads of the holder: how many, their hidden layers, outputs and training.

    `number` separates the random parameters of sites; `raw`: columns enter without standardization;
    `compress`: those with heavy tails enter as asinh of robust units. `module` names a module that
    replaces the networks.
    """

    count: Annotated[int, Minimum(1)]
    hidden: tuple[Annotated[int, Minimum(1)], ...]
    width: Annotated[int, Minimum(1)]
    optimizer: Optimizer
    seed: Annotated[int, Minimum(0)]
    number: Annotated[int, Minimum(0)]
    raw: bool = False
    compress: bool = False
    module: str = ""

    def check(self) -> None:
        """Limit networks to the memory of a site."""
        if max((*self.hidden, self.width)) > MOST_UNITS or len(self.hidden) > MOST_LAYERS:
            raise MessageError(
                f"expected at most {MOST_LAYERS} hidden layers of {MOST_UNITS} units, and at most as many "
                "outputs"
            )
        if self.count > MOST_NETWORKS:
            raise MessageError(f"expected at most {MOST_NETWORKS} networks at one site")


@dataclass(frozen=True, slots=True)
class OutcomeRequest:
    """Kind of the response, the epsilon of its randomized labels (0 without randomization), and weights.

    `balanced`: every class has the same weight in the loss. `response` names it in errors.
    """

    kind: Outcome
    label_epsilon: float = 0.0
    balanced: bool = False
    response: str = "the response"

    def check(self) -> None:
        """Require an epsilon that is valid here."""
        if not 0.0 <= self.label_epsilon < MOST_EPSILON or (self.label_epsilon and self.kind == "normal"):
            raise MessageError("expected an epsilon of zero or more, and only for labels")


@dataclass(frozen=True, slots=True)
class OutcomeReply:
    """Classes of a response in ascending order, and how many entities have each; none for a normal one.

    `label_epsilon` is the total cost of all labels that the site has randomized so far, over all fits.
    """

    classes: tuple[float, ...]
    counts: tuple[int, ...]
    label_epsilon: float = 0.0
