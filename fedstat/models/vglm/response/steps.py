"""Steps of the response holder: what it says of its response at linear predictors.

With a canonical link that are sums over entities; residuals leave where a fit cannot do without.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.door.facts import DivisionOfRows, Entities, GivenWeights, GroupSums, LeftOut
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.models.vertical.exchange.staged import require_groups, staged_response
from fedstat.models.vertical.exchange.steps import CODE, GROUPS, left_out
from fedstat.models.vglm.response.distributions import OUTSIDE, respond_at
from fedstat.typing import Array, Floats, Ints


def respond(data: SiteData, state: State, eta: Floats, highest: Array | None = None) -> dict[str, Array]:
    """Compare the response with linear predictors (n,), the sums over institutions.

    ``loss`` is half the mean deviance. Of the residuals and weights, first and minus expected second
    derivative of every entity's log-likelihood by its linear predictor, ``sums`` (3,) has the sum of
    residuals, of their squares, and of the squares over the weights; zeros where the loss is above `highest`.
    """
    loss, residual, weight = _compared(data, state, eta)
    if loss >= OUTSIDE or (highest is not None and not loss <= float(highest)):
        # How far it is beyond would be told by the few rows that took it there.
        return {"loss": np.array(OUTSIDE), "sums": np.zeros(3)}
    # Up to what does not depend on the response the loss is the sum of y eta: predictors weigh responses.
    state.tell(GivenWeights(eta - np.median(eta), PREDICTORS))
    # Whoever has sums of columns times the fitted means has those times residuals: they are not to be few.
    state.tell(GivenWeights(residual, "residuals"))
    return {"loss": np.array(loss), "sums": _sums(staged_response(state).distribution, residual, weight)}


def respond_openly(data: SiteData, state: State, eta: Floats) -> dict[str, Array]:
    """As :func:`respond`, with the residual of every entity, (n,)."""
    loss, residual, weight = _compared(data, state, eta)
    sums = _sums(staged_response(state).distribution, residual, weight)
    return {"loss": np.array(loss), "sums": sums, "residual": residual}


def respond_by_fold(data: SiteData, state: State, eta: Floats, code: Ints, groups: Array) -> dict[str, Array]:
    """Sum by fold, (n,): ``losses`` (G,), half the deviance over n, and ``totals`` (G,) of residuals."""
    response, G = staged_response(state), int(groups)
    _, residual, _ = _compared(data, state, eta)
    n = len(residual)
    check_lengths(data.name, code=(code, n))
    require_groups(data.name, code, G, 2)
    folds = [code == g for g in np.unique(code[code >= 0])]
    state.tell(GroupSums(code, 0), left_out(code), DivisionOfRows("", code, response.rows))
    state.tell(*(GivenWeights(eta[here] - np.median(eta), PREDICTORS) for here in folds))
    state.tell(*(GivenWeights(residual[here], "residuals") for here in folds))
    losses, totals = np.zeros((2, G))
    for here in folds:
        loss = respond_at(response.distribution, eta[here], response.y[here])[0]
        losses[code[here][0]], totals[code[here][0]] = loss * here.sum() / n, residual @ here
    return {"losses": losses, "totals": totals}


def _compared(data: SiteData, state: State, eta: Floats) -> tuple[float, Floats, Floats]:
    """Loss, residuals and weights at linear predictors."""
    response = staged_response(state)
    check_lengths(data.name, eta=(eta, len(response.y)))
    if not np.isfinite(eta).all():
        raise MessageError(f"{data.name}: array 'eta' must be finite")
    return respond_at(response.distribution, eta, response.y)


def _sums(distribution: DistributionSpec, residual: Floats, weight: Floats) -> Floats:
    pearson = float(np.sum(residual**2 / weight)) if distribution.estimates_scale and weight.all() else 0.0
    return np.array([residual.sum(), np.sum(residual**2), pearson])


PREDICTORS = "deviations of linear predictors from their median"
TOTAL_PREDICTOR = Declared(
    "per entity", "sum of the institutions' linear predictors", dtype="float64", weighs=""
)
SAID: Mapping[str, Declared] = {
    "loss": Declared("aggregate", "half the mean deviance", 0, behind=(Entities,)),
    "sums": Declared("aggregate", "sums of residuals and of their squares", behind=(Entities,)),
}
FOLDS = (Entities, GroupSums, LeftOut, DivisionOfRows)
STEPS: Mapping[str, Step] = {
    "respond": Step(
        respond,
        {
            "eta": TOTAL_PREDICTOR,
            "highest": Declared("control", "loss above which nothing else is said", 0, optional=True),
        },
        SAID,
    ),
    "respond_openly": Step(
        respond_openly,
        {"eta": TOTAL_PREDICTOR},
        {**SAID, "residual": Declared("per entity", "residual of the response")},
    ),
    "respond_by_fold": Step(
        respond_by_fold,
        {"eta": TOTAL_PREDICTOR, "code": CODE, "groups": GROUPS},
        {
            "losses": Declared("aggregate", "half the deviance by fold", behind=FOLDS),
            "totals": Declared("aggregate", "sums of residuals by fold", behind=FOLDS),
        },
    ),
}
