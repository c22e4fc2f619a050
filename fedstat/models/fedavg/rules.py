"""Rules of the FedAvg family: how the coordinator combines the sums of a round, by algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, TypeAlias

import numpy as np

from fedstat.kernels.server_updates import momentum_step
from fedstat.typing import Floats, Matrix, Vector


@dataclass(frozen=True, slots=True, eq=False)
class FinalSums:
    """Sums over all sites at the final coefficients, for dispersion one.

    `totals` are the sum of the frequency weights, deviance and Pearson's statistic; `rows` are counted by
    their weights. `slope` and `curvature` are those of what q-FedAvg minimises, each up to one factor;
    `losses` are half the mean deviance of each site, None where sums were masked.
    """

    score: Vector
    information: Matrix
    totals: Annotated[Floats, "3"]
    rows: float
    slope: Vector | None = None
    curvature: Matrix | None = None
    losses: Annotated[Floats, "K"] | None = None

    @property
    def loss(self) -> float:
        """Half the mean deviance over all rows."""
        return float(self.totals[1] / (2.0 * self.rows))


@dataclass(slots=True)
class Averaging:
    """Average weighted by rows (McMahan et al. 2017, Algorithm 1).

    Sites are told `proximal`, the mu and gamma of FedProx, and `fair`, the q and L of q-FedAvg.
    """

    proximal: tuple[float, float] | None = None
    fair: ClassVar[tuple[float, float] | None] = None

    @property
    def options(self) -> Mapping[str, float]:
        """Options of the rule, by name."""
        return {} if self.proximal is None else dict(zip(("mu", "gamma"), self.proximal, strict=True))

    def combine(self, beta: Floats, moved: Floats, weight: float) -> Floats:
        """Return the coefficients of the next round from the sums that ``run_epochs`` released."""
        return moved / weight

    def slope(self, sums: FinalSums) -> tuple[Floats, Floats]:
        """Descent direction and curvature of what the rule minimises: (p,), (p, p)."""
        return sums.score, sums.information


@dataclass(slots=True)
class Momentum(Averaging):
    """The same with momentum at the coordinator (Hsu et al. 2019, section 4.3)."""

    momentum: float = 0.9
    velocity: Floats | None = field(default=None, init=False)

    @property
    def options(self) -> Mapping[str, float]:
        """Share of the move before."""
        return {"momentum": self.momentum}

    def combine(self, beta: Floats, moved: Floats, weight: float) -> Floats:
        """Add a share of the move before to the averaged update."""
        velocity = np.zeros_like(beta) if self.velocity is None else self.velocity
        averaged = moved / weight
        beta, self.velocity = momentum_step(beta, averaged, velocity, self.momentum)
        return beta


@dataclass(slots=True)
class Fair:
    """q-FedAvg (Li et al. 2020, Algorithm 2); minimises the sum over sites of F_k^(q+1) / (q+1)."""

    q: float
    lipschitz: float
    proximal: ClassVar[tuple[float, float] | None] = None

    @property
    def options(self) -> Mapping[str, float]:
        """Fairness, and the estimate of the gradients' Lipschitz constant."""
        return {"q": self.q, "lipschitz": self.lipschitz}

    @property
    def fair(self) -> tuple[float, float] | None:
        """The same, in the order in which sites are told."""
        return self.q, self.lipschitz

    def combine(self, beta: Floats, moved: Floats, weight: float) -> Floats:
        """Take the sum of the sites' Delta_k over that of their h_k from the coefficients."""
        return beta - moved / weight

    def slope(self, sums: FinalSums) -> tuple[Floats, Floats]:
        """Descent direction and curvature of the fair loss, both over one power of a loss."""
        assert sums.slope is not None and sums.curvature is not None
        return sums.slope, sums.curvature


AveragingRule: TypeAlias = Averaging | Momentum | Fair
"""What the coordinator does with the coefficients that sites return."""
