"""Steps of the response holder in the iterations of VFEM: its start, residuals, fitted values.

Released while iterating: one standardised residual per entity, sums by missing pattern and scalars. Where the
coordinator sits at this institution nothing of it leaves, but for the residuals that the institutions are
sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.kernels.rows import standardised_residuals
from fedstat.models.vfem.blocks.declare import aggregate
from fedstat.models.vfem.blocks.response import OPENING, Active, active_of, choose_response
from fedstat.typing import Array, Bools, Floats, Ints


def start_response(data: SiteData, state: State, keep: Bools, code: Ints) -> dict[str, Array]:
    """Choose the entities of a fit, as :func:`choose_response`; release mean and variance of the response."""
    y = choose_response(data, state, keep, code)
    state.keep("vfem active", Active(y, code), len(y))
    if y.var() <= 0.0:
        raise EstimationError(
            f"{data.name}: the response is constant among the {len(y)} entities of this fit"
        )
    return {"moments": np.array([y.mean(), y.var()])}


def residuals(
    data: SiteData, state: State, a: Array, s2: Array, eta: Floats, t_missing: Floats
) -> dict[str, Array]:
    """E-step of the response: z_i = (y_i - a - eta_i) / v_g(i).

    eta (n,) is the sum of the institutions' centred linear predictors over the blocks that an entity has,
    `t_missing` (G,) that of t_k over the institutions that miss in each pattern; v is s2 more.
    """
    active = active_of(state)
    patterns = int(active.code.max()) + 1
    check_lengths(data.name, eta=(eta, len(active.y)), t_missing=(t_missing, patterns))
    active.a, active.eta, active.v = float(a), eta, float(s2) + t_missing
    active.z, z1, z2 = standardised_residuals(active.y, eta, active.code, active.a, active.v)
    return {"z": active.z, "z1": z1, "z2": z2}


def fitted(data: SiteData, state: State) -> dict[str, Array]:
    """Release fitted values and residuals, one per entity, to a coordinator at this institution."""
    active = active_of(state)
    values = active.a + active.eta
    return {"fitted": values, "residuals": active.y - values}


STEPS: Mapping[str, Step] = {
    "start_response": Step(
        start_response,
        OPENING,
        {"moments": aggregate("mean and variance of the response")},
    ),
    "residuals": Step(
        residuals,
        {
            "a": Declared("aggregate", "centred intercept", 0),
            "s2": Declared("aggregate", "residual variance", 0),
            "eta": Declared("per entity", "sum of the institutions' linear predictors", weighs=""),
            "t_missing": Declared("control", "variance of missing linear predictors, by pattern"),
        },
        {
            "z": Declared("per entity", "standardised residual of the response"),
            "z1": aggregate("sum of z by pattern"),
            "z2": aggregate("sum of z^2 by pattern"),
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
