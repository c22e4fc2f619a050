"""Setup of a path: penalty, groups, adaptive weights, lambdas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedstat.errors import ModelError
from fedstat.kernels.penalised.groups import Groups
from fedstat.kernels.penalised.path import Algorithm, LinearSteps, lambda_grid, lambda_max
from fedstat.kernels.penalised.penalties import Penalty
from fedstat.models.vertical.layout import Layout
from fedstat.typing import Floats

SMALLEST_COEFFICIENT = 1e-8
"""Of standardised columns: an adaptive weight is no larger than the power of its inverse."""


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """What is penalised, and how.

    The groups are of the columns, without the intercept. `adaptive` is the power of the first estimates by
    which penalties are divided, 0 for not at all. `lambdas` descend; None: a grid of `size` and `ratio`.
    `tol` is the largest violation of the stationarity conditions, as a share of lambda_max. `steps` of "lla"
    are local linear approximations from the unpenalised fit; None: all from the lasso.
    """

    penalty: Penalty
    groups: Groups
    adaptive: float
    lambdas: Floats | None
    size: int
    ratio: float
    algorithm: Algorithm
    tol: float
    steps: int | None = None

    @property
    def from_unpenalised(self) -> bool:
        """Whether the unpenalised fit has to be known."""
        return self.adaptive > 0.0 or self.steps is not None

    @property
    def unpenalised(self) -> bool:
        """Whether the only fit is the one without a penalty."""
        return self.lambdas is not None and len(self.lambdas) == 1 and self.lambdas[0] == 0.0

    def adapted(self, b: Floats) -> Setup:
        """Divide the penalties by a power of first estimates: (p,), in the coordinates of the groups."""
        if not self.adaptive:
            return self
        return replace(self, groups=adapted(self.groups, b, self.adaptive))

    def linear_steps(self, b: Floats) -> LinearSteps | None:
        """Return the local linear approximations from the unpenalised fit b (p,), if these are taken."""
        return None if self.steps is None else LinearSteps(b, self.steps)

    def grid(self, gradient: Floats, steps: LinearSteps | None = None) -> Floats:
        """Return the lambdas: those given, or a grid from the gradient (p,) where all penalised are zero."""
        if self.lambdas is not None:
            return self.lambdas
        largest = lambda_max(gradient, self.penalty, self.groups, steps)
        return lambda_grid(largest, ratio=self.ratio, size=self.size)


def adapted(groups: Groups, b: Floats, power: float) -> Groups:
    """Divide the weights of groups by a power of the root mean square of first estimates b (p,)."""
    # A group's norm grows with its size, and so does its multiplier: the root mean square does not.
    sizes = np.maximum(groups.norms(b) / groups.multipliers, SMALLEST_COEFFICIENT)
    return replace(groups, weights=groups.weights * sizes**-power)


def make_groups(layout: Layout, by_term: bool, unpenalised: Sequence[str]) -> Groups:
    """Group the columns of each term, or none, and free columns or terms that must be in the model."""
    unknown = [name for name in unpenalised if name not in (*layout.names, *layout.terms)]
    if unknown:
        raise ModelError(
            f"unpenalised: no column or term {', '.join(map(repr, unknown))}; there are "
            f"{', '.join(dict.fromkeys((*layout.terms, *layout.names)))}"
        )
    free = np.isin(layout.names, unpenalised) | np.isin(layout.terms, unpenalised)
    kinds = list(zip(layout.owners, layout.terms, free.tolist(), strict=True))
    places = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
    labels = np.array([places[kind] for kind in kinds]) if by_term else np.arange(layout.p)
    groups = Groups.of(labels)
    return replace(groups, weights=np.where(free[groups.starts[:-1]], 0.0, 1.0))
