"""All steps of a split network, and the scoring steps of the response holder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedstat.codec import from_json
from fedstat.errors import MessageError
from fedstat.federation.design.vertical_design import response_of
from fedstat.federation.disclosure.facts import EntityCount, ModelEvaluation
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import aggregate, check_lengths, control, per_entity, presence, schema
from fedstat.models.laser.request import FAMILY, OutcomeReply
from fedstat.models.laser.response_steps import (
    BATCH,
    average,
    read_batch,
    task_predictions,
)
from fedstat.models.laser.scoring import count_scores, log_odds
from fedstat.models.vertical.prediction.evaluation import average_in_groups
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Steps of the site that holds the response: evaluation of predictions.


COUNTS = {
    name: aggregate(what, 2, behind=(EntityCount, ModelEvaluation))
    for name, what in {
        "bins": "entities by class and bin of the probability of their own class",
        "expected": "sums of these probabilities by class and bin",
        "confusion": "entities by class and most probable class",
        "losses": "sums of losses",
    }.items()
}


@step(
    FAMILY,
    "release_heads look calibrate",
    takes={
        **BATCH,
        "group": control("predictions that are averaged", dtype="int64"),
        "vote": control("whether they vote", 0),
    },
    releases=COUNTS,
)
def calibrate(data: SiteData, state: State, group: Ints, vote: Array, **arrays: Array) -> dict[str, Array]:
    """Evaluate trained heads on entities that were not used for training, by group (T,) of tasks.

    Predictions of the tasks of a group, which belong to one set of sites, are averaged; or each has a `vote`.
    """
    batch, outcome, heads = read_batch(data, state, arrays)
    check_lengths(data.name, group=(group, len(batch.head)))
    if not 0 <= group.min() <= group.max() < len(group):
        raise MessageError(f"{data.name}: array 'group' names something that does not exist")
    y, C = outcome.y[batch.rows], max(len(outcome.classes), 1)
    parts = []
    for g in range(int(group.max()) + 1):
        tasks = np.flatnonzero(group == g)
        found = [task_predictions(batch, outcome, heads.networks, t) for t in tasks.tolist()]
        P = average(found, bool(vote))
        served = np.where(batch.weights[batch.code][:, tasks].any(axis=1), 0, -1)
        parts.append(count_scores(P, y, len(outcome.classes), served, 1, data.min_count))
    return _reported(state, [np.concatenate(part) for part in zip(*parts, strict=True)], C)


@step(
    FAMILY,
    takes={
        "predicted": per_entity("predictions", 2, dtype="float64", weighs="predictions"),
        "use": presence("which entities are compared", dtype="bool"),
        "code": presence("sites that have each entity, by number", dtype="int64"),
        "units": control("units of the response, and number of sets", dtype="float64"),
    },
    releases=COUNTS,
    requests=schema("classes of the response"),
)
def score(
    data: SiteData, state: State, text: str, predicted: Floats, use: Bools, code: Ints, units: Floats
) -> dict[str, Array]:
    """Evaluate predictions (n, classes) against the opened response of the rows in `use`, by group.

    `text` has the classes of the fit; rows of another class, or without a response, do not count. A normal
    response is converted to the `units` of the fit: mean and standard deviation; `units[2]` is the number of
    groups. Predictions are averaged as described in :func:`averaged`.
    """
    known = from_json(OutcomeReply, text, f"{data.name}: the classes of the fit").classes
    opened, C = response_of(state), max(len(known), 1)
    check_lengths(data.name, use=(use, len(opened)))
    y = opened[use]
    check_lengths(data.name, predicted=(predicted, len(y)), code=(code, len(y)))
    if (
        predicted.shape[1] != C
        or len(units) != 3
        or not 1 <= units[2] <= max(len(y), 1)
        or not units[1] > 0.0
    ):
        raise MessageError(f"{data.name}: predictions of {predicted.shape[1]} classes, expected {C}")
    has, by = np.isfinite(y), None
    if known:
        if not ((predicted >= 0.0) & (predicted <= 1.0)).all():
            raise MessageError(f"{data.name}: expected probabilities")
        at = np.searchsorted(known, y).clip(0, C - 1)
        there, by = has & (np.array(known)[at] == y), log_odds(predicted)
        y = at.astype(np.float64)
    else:
        there = has
        y = np.where(there, (y - units[0]) / units[1], 0.0)
    # Cells use all entities with a response, because the class of an entity must not define a cell.
    predicted = average_in_groups(data, predicted, np.where(has, code, -1), by)
    code = np.where(there, code, -1)
    state.report(EntityCount(int(there.sum())))
    counts = count_scores(predicted, y, len(known), code, int(units[2]), data.min_count)
    return _reported(state, counts if known else in_one_bin(counts), C)


def in_one_bin(counts: Sequence[Floats]) -> list[Floats]:
    """Put all entities of a group into its last bin: an evaluation by squared errors needs no residuals."""
    bins, expected, *others = counts
    last = np.arange(bins.shape[2]) == bins.shape[2] - 1
    return [np.where(last, part.sum(axis=2, keepdims=True), 0.0) for part in (bins, expected)] + others


def _reported(state: State, counts: Sequence[Floats], classes: int) -> dict[str, Array]:
    """Name the arrays of counts, and report them to the disclosure check."""
    bins, expected, confusion, losses = counts
    state.report(ModelEvaluation(np.concatenate([part.ravel() for part in counts])))
    return {
        "bins": bins.reshape(len(bins) * classes, -1),
        "expected": expected.reshape(len(bins) * classes, -1),
        "confusion": confusion.reshape(len(bins) * classes, -1),
        "losses": losses,
    }
