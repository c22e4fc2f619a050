"""The step of the response holder: loss, residuals and weights at linear predictors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.door.facts import Entities
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.models.vertical.exchange.staged import staged_response
from fedstat.models.vglm.response.distributions import respond_at
from fedstat.typing import Array, Floats


def respond(data: SiteData, state: State, eta: Floats) -> dict[str, Array]:
    """Compare the response with linear predictors (n,), the sums over institutions.

    ``loss`` is half the mean deviance; ``residual`` and ``weight`` (n,) are first and minus expected second
    derivative of every entity's log-likelihood by its linear predictor.
    """
    response = staged_response(state)
    check_lengths(data.name, eta=(eta, len(response.y)))
    if not np.isfinite(eta).all():
        raise MessageError(f"{data.name}: array 'eta' must be finite")
    loss, residual, weight = respond_at(response.distribution, eta, response.y)
    return {"loss": np.array(loss), "residual": residual, "weight": weight}


TOTAL_PREDICTOR = Declared("per entity", "sum of the clients' linear predictors", dtype="float64", weighs="")
STEPS: Mapping[str, Step] = {
    "respond": Step(
        respond,
        {"eta": TOTAL_PREDICTOR},
        {
            "loss": Declared("aggregate", "half the mean deviance", 0, behind=(Entities,)),
            "residual": Declared("per entity", "residual of the response"),
            "weight": Declared("per entity", "weight of each entity in a Newton step"),
        },
    ),
}
