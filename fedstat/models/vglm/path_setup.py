"""The setup of a path: entities, folds, penalty, groups, adaptive weights, lambdas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedstat.errors import DataWarning, EstimationError, ModelError, warn
from fedstat.federation.design.vertical_design import Design
from fedstat.federation.disclosure.row_checks import MIN_ENTITIES_PER_EQUATION
from fedstat.kernels.penalized.path import Algorithm, LinearSteps, lambda_grid, lambda_max
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty
from fedstat.models.vertical.layout import Layout, complete_at, lay_out
from fedstat.typing import Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Entities of a fit: those that all institutions with columns have, or all; folds and halves of them.


def make_layout(design: Design, *, incomplete: bool = False) -> Layout:
    """Lay out a fit of complete cases, or with `incomplete` of all entities.

    An EstimationError where too few are complete for sums of products to be released.
    """
    use = complete_at(design.blocks, design.n) | incomplete
    layout = lay_out(design, design.blocks, use)
    if layout.most_grams < 1 and not incomplete:
        least = MIN_ENTITIES_PER_EQUATION * (layout.p + 1)
        raise EstimationError(
            f"{layout.n:,} of {design.n:,} entities are complete at {', '.join(layout.clients)}; sums of "
            f"products of {layout.p} columns and the response are released over {least:,} or more: leave out "
            "columns, or an institution that lacks many entities"
        )
    return layout


def warn_of_incomplete(layout: Layout) -> None:
    """Warn of entities that are left out, because an institution lacks them."""
    if layout.left_out:
        warn(f"{describe_incomplete(layout)}.", DataWarning)


def describe_incomplete(layout: Layout) -> str:
    """Say which entities are left out, without a full stop."""
    listed = ", ".join(f"{count:,} at {client}" for client, count in layout.absent.items())
    return (
        f"{layout.left_out:,} of {layout.n_design:,} entities with a response "
        f"({100.0 * layout.left_out / layout.n_design:.1f} %) lack an institution's columns ({listed}) and "
        "were left out: right, with larger standard errors, where who lacks columns depends on the columns "
        "alone, and biased where it depends on the response given the columns; "
        'from_formula(..., missing="em") uses all entities, with the normal family'
    )


def assign_folds(n: int, folds: int, least: int, random: np.random.Generator) -> Ints:
    """Assign entities to folds of nearly equal size at random, (n,), if each has `least` or more."""
    if n // folds < least:
        raise EstimationError(
            f"{folds} folds of {n:,} entities have {n // folds:,} each, and sums of products are released "
            f"over {least:,} or more; use {max(n // least, 1)} folds at most, or select='bic'"
        )
    return np.asarray(random.permutation(np.arange(n) % folds), dtype=np.int64)


def halve_entities(layout: Layout, random: np.random.Generator) -> tuple[Layout, Layout]:
    """Divide the entities of a fit into random halves."""
    first = assign_folds(layout.n, 2, 1, random) == 0
    return layout.narrowed(first), layout.narrowed(~first)


# ----------------------------------------------------------------------------------------------------
# Setup of a path: penalty, groups, adaptive weights, lambdas.

SMALLEST_COEFFICIENT = 1e-8
"""Of standardised columns: an adaptive weight is no larger than the power of its inverse."""


@dataclass(frozen=True, slots=True, eq=False)
class PathSetup:
    """What is penalised, and how.

    The groups are of the columns, without the intercept. `adaptive` is the power of the first estimates by
    which penalties are divided, 0 for not at all. `lambdas` descend; None: a grid of `size` and `ratio`.
    `tol` is the largest violation of the stationarity conditions, as a share of lambda_max. `steps` of "lla"
    are local linear approximations from the unpenalised fit; None: all from the lasso.
    """

    penalty: Penalty
    groups: CoefficientGroups
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

    def adapted(self, b: Floats) -> PathSetup:
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


def adapted(groups: CoefficientGroups, b: Floats, power: float) -> CoefficientGroups:
    """Divide the weights of groups by a power of the root mean square of first estimates b (p,)."""
    # A group's norm grows with its size, and so does its multiplier: the root mean square does not.
    sizes = np.maximum(groups.norms(b) / groups.multipliers, SMALLEST_COEFFICIENT)
    return replace(groups, weights=groups.weights * sizes**-power)


def make_groups(layout: Layout, by_term: bool, unpenalised: Sequence[str]) -> CoefficientGroups:
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
    groups = CoefficientGroups.of(labels)
    return replace(groups, weights=np.where(free[groups.starts[:-1]], 0.0, 1.0))
