"""What the response holder computes in the iterations of VFEM.

Released while iterating: one standardised residual per entity, sums by missing pattern and scalars. Where the
coordinator sits at this institution nothing of it leaves, but for the residuals that the clients are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.message import Declared, Step
from fedstat.federation.site import SiteData, State
from fedstat.kernels.rows import standardised_residuals
from fedstat.models.vfem.steps import ITERATION, MEMORY, WEIGHTS
from fedstat.typing import Array, Bools, Floats, Ints

CONE_TOLERANCE = 1e-12


@dataclass(slots=True)
class Active:
    """The response holder during a fit: y (n,), pattern of each entity, and the points (a, s2)."""

    y: Floats
    code: Ints
    counts: Floats
    memory: int
    least_s2: float
    points: list[Floats] = field(default_factory=list)
    evaluated: list[tuple[Floats, Floats] | None] = field(default_factory=list)
    s2_reference: float = 0.0
    current: Floats | None = None
    z: Floats = field(default_factory=lambda: np.empty(0))
    eta: Floats = field(default_factory=lambda: np.empty(0))
    v: Floats = field(default_factory=lambda: np.empty(0))


def start_response(data: SiteData, state: State, keep: Bools, code: Ints, memory: Array) -> dict[str, Array]:
    """Set the first point of (a, s2): mean and variance of the response.

    Parameters
    ----------
    keep : (rows,) bool
        Rows of the active institution that take part, in the order of the entities.
    code : (n,) int
        Missing pattern of each entity.
    memory : int
        As in :func:`start`.
    """
    y = np.ascontiguousarray(state.items["response"][keep])
    counts = np.bincount(code).astype(float)
    first = np.array([y.mean(), y.var()])
    active = Active(y, code, counts, int(memory), CONE_TOLERANCE * float(first[1]))
    if first[1] <= 0.0:
        raise EstimationError(
            f"{data.name}: the response is constant among the {len(y)} entities of this fit"
        )
    active.points, active.evaluated = [first], [None]
    state.items["vfem active"] = active
    state.entities = max(state.entities, len(y))
    return {}


def residuals(
    data: SiteData, state: State, weights: Floats, eta: Floats, t_missing: Floats
) -> dict[str, Array]:
    """E-step of the response: z_i = (y_i - a - eta_i) / v_g(i), and the move of (a, s2).

    Parameters
    ----------
    weights : (q,) array
        Of the points.
    eta : (n,) array
        Sum of the clients' centred linear predictors over the blocks that an entity has.
    t_missing : (G,) array
        Sum of t_k over the clients that miss in each pattern.
    """
    active: Active = state.items["vfem active"]
    a, s2 = point = np.tensordot(weights, active.points, 1)
    if s2 <= active.least_s2 or (s2 + t_missing <= 0.0).any():
        return {"inside": np.array(0)}
    v = s2 + t_missing
    n, counts = len(active.y), active.counts
    z, z1, z2 = standardised_residuals(active.y, eta, active.code, float(a), v)
    image = np.array(
        [
            a + s2 * z1.sum() / n,
            s2 * s2 * z2.sum() / n + np.sum(counts * (v - s2) * s2 / v) / n,
        ]
    )
    move = image - point
    score2 = n * (move[0] ** 2 / s2 + 0.5 * (move[1] / s2) ** 2)
    change = np.abs(point - active.current) / [np.sqrt(s2), s2] if active.current is not None else [1e300]
    active.current, active.z, active.eta, active.v = point, z, eta, v
    active.s2_reference = active.s2_reference or float(s2)
    products = remember_response(active, point, image)
    log_likelihood = -0.5 * np.sum(counts * np.log(2.0 * np.pi * v) + v * z2)
    return {
        "inside": np.array(1),
        "z": z,
        "z1": z1,
        "z2": z2,
        "s2": np.array(s2),
        "log_likelihood": np.array(log_likelihood),
        "score2": np.array(score2),
        "change": np.array(np.max(change)),
        "products": products,
    }


def remember_response(active: Active, point: Floats, image: Floats) -> Floats:
    """Append an image as :func:`remember` does, and return the products of moves."""
    active.points.append(image)
    active.evaluated.append((point, image))
    if active.evaluated[0] is None or len(active.points) > active.memory + 1:
        del active.points[0], active.evaluated[0]
    n, s2 = len(active.y), active.s2_reference
    metric = np.array([n / s2, 0.5 * n / s2**2])
    moves = [e[1] - e[0] for e in active.evaluated if e is not None]
    return np.array([np.sum(moves[-1] * metric * m) for m in moves])


def shorten_response(data: SiteData, state: State, point: Array) -> dict[str, Array]:
    """Go back to an evaluated point; see :func:`shorten`."""
    active: Active = state.items["vfem active"]
    base = active.evaluated[int(point)]
    assert base is not None
    active.points, active.evaluated = [base[1]], [None]
    active.current, active.s2_reference = base[0], 0.0
    return {}


def response_estimates(data: SiteData, state: State) -> dict[str, Array]:
    """Release a, s2, and the mean and variance of the response."""
    active: Active = state.items["vfem active"]
    assert active.current is not None
    return {
        "a": np.array(active.current[0]),
        "s2": np.array(active.current[1]),
        "moments": np.array([active.y.mean(), active.y.var()]),
    }


def fitted(data: SiteData, state: State) -> dict[str, Array]:
    """Release fitted values and residuals, one per entity, to a coordinator at this institution."""
    active: Active = state.items["vfem active"]
    assert active.current is not None
    values = active.current[0] + active.eta
    return {"fitted": values, "residuals": active.y - values}


STEPS: Mapping[str, Step] = {
    "start_response": Step(
        start_response,
        {
            "keep": Declared("presence", "which of the client's entities take part"),
            "code": Declared("presence", "missing pattern of each entity"),
            "memory": MEMORY,
        },
    ),
    "residuals": Step(
        residuals,
        {
            "weights": WEIGHTS,
            "eta": Declared("per entity", "sum of the clients' linear predictors"),
            "t_missing": Declared("control", "variance of missing linear predictors, by pattern"),
        },
        {
            **ITERATION,
            "z": Declared("per entity", "standardised residual of the response", optional=True),
            "z1": Declared("aggregate", "sum of z by pattern", optional=True),
            "z2": Declared("aggregate", "sum of z^2 by pattern", optional=True),
            "s2": Declared("aggregate", "residual variance", 0, optional=True),
        },
    ),
    "shorten_response": Step(shorten_response, {"point": Declared("control", "point to return to", 0)}),
    "response_estimates": Step(
        response_estimates,
        gives={
            "a": Declared("aggregate", "centred intercept", 0),
            "s2": Declared("aggregate", "residual variance", 0),
            "moments": Declared("aggregate", "mean and variance of the response"),
        },
    ),
    "fitted": Step(
        fitted,
        gives={
            "fitted": Declared("per entity", "fitted values"),
            "residuals": Declared("per entity", "residuals"),
        },
    ),
}
