"""Rules of the FedAvg family: how the coordinator combines the sums of a round, by algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedstat.kernels.server_updates import momentum_step
from fedstat.typing import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Returned:
    """What the sites of a round add up to.

    Parameters
    ----------
    beta : (p,) array
    weight : float
        Sums of ``beta`` and ``weight`` of the step ``run_epochs``.
    """

    beta: Floats
    weight: float


@dataclass(frozen=True, slots=True, eq=False)
class FinalSums:
    """Sums over all sites at the final coefficients, dispersion one.

    Parameters
    ----------
    score : (p,) array
    information : (p, p) array
    totals : (3,) array
        Sum of the frequency weights, deviance and Pearson's statistic.
    rows : float
        Rows, weights counted.
    slope, curvature : arrays or None
        Descent direction and curvature of what q-FedAvg minimises, each up to one factor.
    losses : (K,) array or None
        Half the mean deviance of each site; None where sums were masked.
    """

    score: Floats
    information: Floats
    totals: Floats
    rows: float
    slope: Floats | None = None
    curvature: Floats | None = None
    losses: Floats | None = None

    @property
    def loss(self) -> float:
        """Half the mean deviance over all rows."""
        return float(self.totals[1] / (2.0 * self.rows))


class AveragingRule(Protocol):
    """What the coordinator does with the coefficients that sites return."""

    @property
    def options(self) -> Mapping[str, float]:
        """Options of the rule, by name."""

    @property
    def proximal(self) -> tuple[float, float] | None:
        """The mu and gamma of FedProx that sites are told."""

    @property
    def fair(self) -> tuple[float, float] | None:
        """The q and L of q-FedAvg that sites are told."""

    def combine(self, beta: Floats, returned: Returned) -> Floats:
        """Return the coefficients of the next round."""

    def slope(self, sums: FinalSums) -> tuple[Floats, Floats]:
        """Descent direction and curvature of what the rule minimises: (p,), (p, p)."""


@dataclass(slots=True)
class Averaging:
    """Average weighted by rows (McMahan et al. 2017, Algorithm 1)."""

    proximal: tuple[float, float] | None = None
    fair: None = None

    @property
    def options(self) -> Mapping[str, float]:
        """See :class:`AveragingRule`."""
        return {} if self.proximal is None else dict(zip(("mu", "gamma"), self.proximal, strict=True))

    def combine(self, beta: Floats, returned: Returned) -> Floats:
        """See :class:`AveragingRule`."""
        return returned.beta / returned.weight

    def slope(self, sums: FinalSums) -> tuple[Floats, Floats]:
        """See :class:`AveragingRule`."""
        return sums.score, sums.information


@dataclass(slots=True)
class Momentum(Averaging):
    """The same with momentum at the coordinator (Hsu et al. 2019, section 4.3)."""

    momentum: float = 0.9
    velocity: Floats | None = None

    @property
    def options(self) -> Mapping[str, float]:
        """See :class:`AveragingRule`."""
        return {"momentum": self.momentum}

    def combine(self, beta: Floats, returned: Returned) -> Floats:
        """See :class:`AveragingRule`."""
        velocity = np.zeros_like(beta) if self.velocity is None else self.velocity
        averaged = returned.beta / returned.weight
        beta, self.velocity = momentum_step(beta, averaged, velocity, self.momentum)
        return beta


@dataclass(slots=True)
class Fair:
    """q-FedAvg (Li et al. 2020, Algorithm 2); minimises the sum over sites of F_k^(q+1) / (q+1)."""

    q: float
    lipschitz: float
    proximal: None = None

    @property
    def options(self) -> Mapping[str, float]:
        """See :class:`AveragingRule`."""
        return {"q": self.q, "lipschitz": self.lipschitz}

    @property
    def fair(self) -> tuple[float, float]:
        """See :class:`AveragingRule`."""
        return self.q, self.lipschitz

    def combine(self, beta: Floats, returned: Returned) -> Floats:
        """See :class:`AveragingRule`."""
        return beta - returned.beta / returned.weight

    def slope(self, sums: FinalSums) -> tuple[Floats, Floats]:
        """See :class:`AveragingRule`; both over one power of a loss."""
        assert sums.slope is not None and sums.curvature is not None
        return sums.slope, sums.curvature
