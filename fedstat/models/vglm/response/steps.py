"""What the holder of the response computes for a vertical generalised linear model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedstat.errors import MessageError, PolicyError
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
    check_entities(data, len(y))
    check_response(data.name, family.name, y)
    check_apart(data, state, "vglm responses summed", np.where(keep, 0, -1))
    state.keep("vglm response", Response(y, family, float(y.mean()), float(y.std())), len(y))
    return {"moments": np.array([y.mean(), y.std(), saturated(family, y) / len(y)])}, ""


def check_entities(data: SiteData, n: int) -> None:
    """Require enough entities of a fit.

    Raises
    ------
    PolicyError
        Names the rule.
    """
    if n < data.min_count:
        raise PolicyError(
            f"{data.name}: its policy (minimum count) wants at least {data.min_count} entities; {n} take "
            "part in this fit"
        )


def sum_response(data: SiteData, state: State, code: Ints, groups: Array) -> dict[str, Array]:
    """Sum the standardised response and its square by fold or missing pattern: ``sums`` (2, G)."""
    y, G = response_of(data, state).standardised, int(groups)
    check_lengths(data.name, code=(code, len(y)))
    check_groups(data.name, code, G)
    check_smallest(data, code)
    here = code >= 0
    return {"sums": np.array([np.bincount(code[here], v[here], minlength=G) for v in (y, y * y)])}


def check_groups(name: str, code: Ints, groups: int) -> None:
    """Require groups from 0, or -1 for entities that take no part, and some that do."""
    if groups < 1 or len(code) == 0 or code.min() < -1 or not 0 <= code.max() < groups:
        raise MessageError(f"{name}: expected patterns or folds from 0 to {groups - 1}, or -1 for none")


def check_smallest(data: SiteData, code: Ints) -> None:
    """Require enough entities of every group that has any.

    Raises
    ------
    PolicyError
        Names the rule.
    """
    smallest = smallest_group(code)
    if smallest < data.min_count:
        raise PolicyError(
            f"{data.name}: its policy (minimum count) wants at least {data.min_count} entities of every "
            f"fold or missing pattern; there are {smallest}. Use fewer folds, or raise min_count"
        )


def smallest_group(code: Ints) -> int:
    """Entities of the smallest group that has any."""
    return int(np.unique(code[code >= 0], return_counts=True)[1].min())


def check_apart(data: SiteData, state: State, place: str, code: Ints) -> None:
    """Refuse sums that differ from earlier ones of the session by few entities, and remember these.

    Parameters
    ----------
    place : str
        Under which name divisions are remembered.
    code : (rows,) array of int
        Group of each row that is open here; -1 of those that take no part.

    Raises
    ------
    PolicyError
        The difference of two sums would be a sum over fewer entities than the owner wants.
    """
    earlier: list[Ints] = state.use(place) if place in state else []
    for known in earlier:
        if np.array_equal(known, code):
            return
        apart = entities_apart(known, code)
        if apart < data.min_count:
            raise PolicyError(
                f"{data.name}: its policy (minimum count) wants at least {data.min_count} entities behind a "
                f"sum; these sums and earlier ones of this session differ by {apart:.0f}. Use the entities "
                "and folds (random_state) of the earlier fit"
            )
    state.keep(place, [*earlier, code])


def entities_apart(a: Ints, b: Ints) -> float:
    """Entities by which a group of one division, or all, differ from one of another: the fewest, save none.

    Parameters
    ----------
    a, b : (rows,) arrays of int
        Group of each row, -1 for none.
    """
    table = np.zeros((a.max() + 2, b.max() + 2), dtype=np.int64)
    np.add.at(table, (a + 1, b + 1), 1)
    of_a, of_b, both = table[1:].sum(axis=1), table[:, 1:].sum(axis=0), table[1:, 1:]
    # All groups together are one more group.
    common = np.block([[both, both.sum(axis=1, keepdims=True)], [both.sum(axis=0), both.sum()]])
    apart = np.append(of_a, of_a.sum())[:, None] + np.append(of_b, of_b.sum()) - 2 * common
    return float(apart[apart > 0].min(initial=len(a) + 1))


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
        {"moments": Declared("aggregate", "mean and standard deviation of the response, a constant")},
        Declared("control", "family of the response"),
    ),
    "sum_response": Step(
        sum_response,
        {
            "code": Declared("presence", "fold or missing pattern of each entity", dtype="int64"),
            "groups": Declared("control", "number of folds or missing patterns", 0),
        },
        {"sums": Declared("aggregate", "sums of the response and its square by fold or pattern", 2)},
    ),
    "respond": Step(
        respond,
        {"eta": Declared("per entity", "sum of the clients' linear predictors", dtype="float64")},
        {
            "loss": Declared("aggregate", "half the mean deviance", 0),
            "residual": Declared("per entity", "residual of the response"),
            "weight": Declared("per entity", "weight of each entity in a Newton step"),
        },
    ),
}
