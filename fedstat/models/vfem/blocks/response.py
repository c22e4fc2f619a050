"""The response during a fit, at the institution that holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.design.by_columns import response_of
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, check_lengths
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.models.vertical.exchange.steps import KEEP
from fedstat.typing import Bools, Floats, Ints


@dataclass(slots=True)
class Active:
    """The response holder during a fit: y (n,), missing pattern of each entity, and its latest E-step.

    Of that the centred intercept a, the sum of linear predictors eta (n,), the variance v (G,) by pattern
    and the standardised residuals z (n,).
    """

    y: Floats
    code: Ints
    a: float = 0.0
    eta: Floats = field(default_factory=lambda: np.empty(0))
    v: Floats = field(default_factory=lambda: np.empty(0))
    z: Floats = field(default_factory=lambda: np.empty(0))


@dataclass(slots=True)
class GLMResponse:
    """The holder of a response that is not normal: y (n,), missing pattern of each entity, latest evaluation.

    `spec` is its distribution, `offset` (n,) known, `rows` (n,) those of the site's table; m and v (n,) are
    mean and variance of the linear predictors, `terms` (6, n) or (10, n) the likelihood with its derivatives
    there (:mod:`fedstat.kernels.glm.quadrature` and :mod:`fedstat.kernels.glm.count_quadrature`).
    """

    y: Floats
    code: Ints
    spec: DistributionSpec
    rows: Ints
    m: Floats = field(default_factory=lambda: np.empty(0))
    v: Floats = field(default_factory=lambda: np.empty(0))
    terms: Floats = field(default_factory=lambda: np.empty((6, 0)))
    estimates_alpha: bool = False
    offset: Floats | float = 0.0

    def by_pattern(self, values: Floats, patterns: int) -> Floats:
        """Sum rows of numbers per entity by missing pattern: (q, n) -> (G, q)."""
        return np.array([np.bincount(self.code, weights=row, minlength=patterns) for row in values]).T


def active_of(state: State) -> Active:
    """Return this fit's response, or say that the fit was not started here."""
    return state.use("vfem active", Active, "this fit was not started here; ask 'start_response' first")


OPENING: Mapping[str, Declared] = {
    "keep": KEEP,
    "code": Declared("presence", "missing pattern of each entity", dtype="int64"),
}
"""What the response holder is told of a fit."""


def choose_response(data: SiteData, state: State, keep: Bools, code: Ints) -> Floats:
    """Response of the rows in `keep`, in the order of the entities; `code` (n,) are their patterns."""
    response = response_of(state)
    check_lengths(data.name, keep=(keep, len(response)), code=(code, int(np.count_nonzero(keep))))
    if len(code) and code.min() < 0:
        raise MessageError(f"{data.name}: array 'code' holds numbers below zero")
    return np.ascontiguousarray(response[keep])
