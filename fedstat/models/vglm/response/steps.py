"""What the holder of the response computes for a vertical generalised linear model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.door.facts import DivisionOfRows, Entities, GroupSums
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.kernels.glm.family import FamilySpec
from fedstat.models.checks import check_response
from fedstat.models.vglm.response.distributions import respond_at, saturated
from fedstat.typing import Array, Bools, Floats, Ints

RESPONSE = "response"


@dataclass(frozen=True, slots=True)
class Response:
    """The response during a fit: (n,), with mean and standard deviation, and its family."""

    y: Floats
    family: FamilySpec
    mean: float
    sd: float

    @property
    def standardised(self) -> Floats:
        """Mean 0, mean square 1."""
        return np.asarray((self.y - self.mean) / self.sd)


def response_of(data: SiteData, state: State) -> Response:
    """Return this fit's response, or say that it is not here."""
    if "vglm response" not in state:
        raise MessageError(f"{data.name}: this fit has no response here; ask 'stage_response' first")
    response: Response = state.use("vglm response")
    return response


def stage_response(data: SiteData, state: State, text: str, keep: Bools) -> tuple[dict[str, Array], str]:
    """Choose the entities of a fit; release mean and standard deviation of the response.

    Parameters
    ----------
    text : str
        The family, in JSON.
    keep : (rows,) bool
        Rows of the institution that take part.

    Returns
    -------
    dict
        ``moments`` (3,): mean, standard deviation, and the part of the log-likelihood per entity that no
        coefficient changes.
    """
    if "response" not in state:
        raise MessageError(f"{data.name}: no response is open in this session; make the model again")
    opened = state.use("response")
    check_lengths(data.name, keep=(keep, len(opened)))
    y, family = np.ascontiguousarray(opened[keep], dtype=np.float64), FamilySpec.from_json(text)
    state.tell(Entities(len(y)))
    check_response(data.name, family.name, y)
    state.tell(DivisionOfRows("vglm responses summed", np.where(keep, 0, -1)))
    state.keep("vglm response", Response(y, family, float(y.mean()), float(y.std())), len(y))
    return {"moments": np.array([y.mean(), y.std(), saturated(family, y) / len(y)])}, ""


def sum_response(data: SiteData, state: State, code: Ints, groups: Array) -> dict[str, Array]:
    """Sum the standardised response and its square by fold or missing pattern: ``sums`` (2, G)."""
    y, G = response_of(data, state).standardised, int(groups)
    check_lengths(data.name, code=(code, len(y)))
    require_groups(data.name, code, G)
    state.tell(GroupSums(code))
    here = code >= 0
    return {"sums": np.array([np.bincount(code[here], v[here], minlength=G) for v in (y, y * y)])}


def require_groups(name: str, code: Ints, groups: int) -> None:
    """Require groups from 0, or -1 for entities that take no part, and some that do."""
    if groups < 1 or len(code) == 0 or code.min() < -1 or not 0 <= code.max() < groups:
        raise MessageError(f"{name}: expected patterns or folds from 0 to {groups - 1}, or -1 for none")


def respond(data: SiteData, state: State, eta: Floats) -> dict[str, Array]:
    """Compare the response with linear predictors.

    Parameters
    ----------
    eta : (n,) array
        Linear predictor of every entity.

    Returns
    -------
    dict
        ``loss``, half the mean deviance; ``residual`` and ``weight`` (n,): first and minus expected second
        derivative of every entity's log-likelihood by its linear predictor.
    """
    response = response_of(data, state)
    check_lengths(data.name, eta=(eta, len(response.y)))
    if not np.isfinite(eta).all():
        raise MessageError(f"{data.name}: array 'eta' must be finite")
    loss, residual, weight = respond_at(response.family, eta, response.y)
    return {"loss": np.array(loss), "residual": residual, "weight": weight}


STEPS: Mapping[str, Step] = {
    "stage_response": Step(
        stage_response,
        {"keep": Declared("presence", "which of the client's entities take part", dtype="bool")},
        {
            "moments": Declared(
                "aggregate",
                "mean and standard deviation of the response, a constant",
                behind=(Entities, DivisionOfRows),
            )
        },
        Declared("control", "family of the response"),
    ),
    "sum_response": Step(
        sum_response,
        {
            "code": Declared("presence", "fold or missing pattern of each entity", dtype="int64"),
            "groups": Declared("control", "number of folds or missing patterns", 0),
        },
        {
            "sums": Declared(
                "aggregate",
                "sums of the response and its square by fold or pattern",
                2,
                behind=(Entities, GroupSums),
            )
        },
    ),
    "respond": Step(
        respond,
        {"eta": Declared("per entity", "sum of the clients' linear predictors", dtype="float64", weighs="")},
        {
            "loss": Declared("aggregate", "half the mean deviance", 0, behind=(Entities,)),
            "residual": Declared("per entity", "residual of the response"),
            "weight": Declared("per entity", "weight of each entity in a Newton step"),
        },
    ),
}
