"""How well predictions agree with the response of a partition: counted where the response is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from fedstat.errors import DataWarning, MessageError, ModelError, NotAvailableError, warn
from fedstat.federation.design.by_columns import design_ask, response_of
from fedstat.federation.door.facts import Entities, Evaluated
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.forecast.invented_entities import invent_entities
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Conversation
from fedstat.inference.evaluation.bins import bin_edges, merge_small_bins, probabilities
from fedstat.inference.evaluation.evaluation import Evaluation
from fedstat.inference.evaluation.recalibration import Recalibration, recalibrate
from fedstat.kernels.glm.rows import Rows
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.models.consent import FurtherAnalysis
from fedstat.models.vertical.prediction.cells import averaged
from fedstat.models.vertical.prediction.coding import ResponseSource
from fedstat.models.vertical.prediction.protocol import new_ledger
from fedstat.typing import Array, Bools, Floats, Ints

AVERAGED = (
    "Predictions were averaged over a few entities that have similar ones before they were counted, by the "
    "policy of the institution that holds the response."
)
NUMBERS = 9
"""Of a recalibration: whether there is one, intercept, slope, their covariance, and three more."""


def judge_predictions(
    data: SiteData, state: State, text: str, predicted: Floats, use: Bools, code: Ints, groups: Ints
) -> tuple[dict[str, Array], str]:
    """Count how well predicted probabilities (n,) agree with the opened response of the rows in `use`.

    `text` is distribution and link, `code` (n,) the group of each row, of so many `groups`. Released are
    ``bins`` (3 G, B), entities and sums of response and of predictions by bin of the linear predictor, small
    bins counted with a neighbour and small groups not at all; ``squares`` (G,), sums of squared errors;
    ``regression`` (9,), the response of all of these regressed on the linear predictor. Of predictions, see
    :func:`averaged`.
    """
    distribution = DistributionSpec.from_json(text)
    response = response_of(state)
    check_lengths(data.name, use=(use, len(response)))
    y, G = response[use], int(groups)
    check_lengths(data.name, predicted=(predicted, len(y)), code=(code, len(y)))
    if not ((predicted > 0.0) & (predicted < 1.0)).all() or not 1 <= G <= max(len(y), 1):
        raise MessageError(f"{data.name}: expected probabilities, in one group or more")
    there = np.isfinite(y)
    y, predicted, code = y[there], predicted[there], code[there]
    # Where tables are invented, and their responses with them, any number above zero is an event.
    y = (y > 0.0).astype(np.float64)
    if len(code) and not 0 <= code.min() <= code.max() < G:
        raise MessageError(f"{data.name}: array 'code' names a group that is not there")
    link = distribution.make().link
    predicted = averaged(data, predicted, code, np.asarray(link(predicted)))
    eta, edges = np.asarray(link(predicted)), bin_edges(distribution, 0.0, 1.0)
    at, B = np.searchsorted(edges, eta), len(edges) + 1
    bins, squares = np.zeros((3 * G, B)), np.zeros(G)
    counted = np.zeros(len(y), dtype=bool)
    for g in range(G):
        here = code == g
        if np.count_nonzero(here) < max(data.min_count, 1):
            continue
        counted |= here
        cell = merge_small_bins(np.bincount(at[here], minlength=B), data.min_count)[at[here]]
        by_row = (np.ones(len(cell)), y[here], predicted[here])
        bins[3 * g : 3 * g + 3] = [np.bincount(cell, weights=one, minlength=B) for one in by_row]
        squares[g] = float(((y[here] - predicted[here]) ** 2).sum())
    found = None
    if counted.any():
        X = np.column_stack([np.ones(int(counted.sum())), eta[counted]])
        found = recalibrate(Rows(X, y[counted]), distribution)
    state.tell(Entities(int(counted.sum())))
    sums = {"bins": bins, "squares": squares, "regression": _as_array(found)}
    state.tell(Evaluated(np.concatenate([one.ravel() for one in sums.values()])))
    return {**sums, "least": np.array(data.min_count)}, ""


def _as_array(found: Recalibration | None) -> Floats:
    if found is None:
        return np.zeros(NUMBERS)
    numbers = [[1.0], found.params, found.cov[np.triu_indices(2)], found.large, [found.statistic]]
    return np.concatenate([np.asarray(one, dtype=np.float64) for one in numbers])


def _from_array(told: Floats) -> Recalibration | None:
    if not told[0]:
        return None
    cov = np.array([[told[3], told[4]], [told[4], told[5]]])
    return Recalibration(told[1:3], cov, (float(told[6]), float(told[7])), float(told[8]))


def _counted(what: str, ndim: int = 1) -> Declared:
    return Declared("aggregate", what, ndim, behind=(Entities, Evaluated))


STEPS: Mapping[str, Step] = {
    "judge_predictions": Step(
        judge_predictions,
        {
            "predicted": Declared("per entity", "predictions", dtype="float64", weighs="predictions"),
            "use": Declared("presence", "which entities are compared", dtype="bool"),
            "code": Declared("presence", "institutions that have each entity, by number", dtype="int64"),
            "groups": Declared("control", "number of sets of institutions", 0, dtype="int64"),
        },
        {
            "bins": _counted("entities, sums of response and of predictions by bin", 2),
            "squares": _counted("squared errors of predictions"),
            "regression": _counted("response regressed on the linear predictor"),
            "least": Declared("control", "fewest entities of a bin", 0),
        },
        Declared("control", "family and link"),
    )
}


def evaluate_predictions(
    family: str,
    response: ResponseSource,
    distribution: DistributionSpec,
    clients: Sequence[str],
    predict: Callable[[], pd.Series],
    partition: ClientPartition,
) -> Evaluation:
    """Hold what `predict` gives, probabilities of a partition's entities, nan for none, against its response.

    A row for each set of `clients` that entities have. A ModelError where the partition lacks the response, a
    NotAvailableError where this is not binary; a DataWarning of sets that are too small to be counted.
    """
    if distribution.name != "Binomial":
        raise NotAvailableError(
            f"no evaluation: it is of a binary response, and this one is {distribution.name}"
        )
    holder = response.client
    if holder not in partition.sites:
        raise ModelError(f"evaluate: the partition lacks institution '{holder}', which has the response")
    rows, known = partition.rows[holder], predict().to_numpy(dtype=np.float64)
    has = np.zeros(len(known), dtype=np.int64)
    for k, client in enumerate(clients):
        if client in partition.rows:
            has[partition.rows[client]] |= 1 << k
    use = np.isfinite(known[rows])
    if not use.any():
        raise ModelError("evaluate: no entity of the partition has a prediction and is at the holder")
    sets, code = np.unique(has[rows[use]], return_inverse=True)
    question = {"response": response.text, "columns": response.columns}
    # Predictions at the ends of their range tell no more than ones next to them.
    probability = known[rows[use]].clip(1e-12, 1.0 - 1e-12)

    def asking() -> Rounds[Mapping[str, Array]]:
        to = Conversation(family, partition._new_session(), None)
        yield [design_ask(holder, "open_response", to.session, question)]
        (reply,) = yield [
            to.ask(
                holder,
                "judge_predictions",
                distribution.to_json(),
                predicted=probability,
                use=use,
                code=code.astype(np.int64),
                groups=np.array(len(sets)),
            )
        ]
        return reply.arrays

    analysis = FurtherAnalysis(
        partition,
        "evaluate()",
        response.text,
        str(distribution),
        lambda policies: invent_entities(partition.rows, policies),
        {holder: response.columns},
    )
    told = analysis.run(asking(), asking, new_ledger(partition, holder))
    n, observed, expected = told["bins"].reshape(len(sets), 3, -1).swapaxes(0, 1)
    there = n.sum(axis=1) > 0.0
    names = [" + ".join(k for i, k in enumerate(clients) if s >> i & 1) or "none" for s in sets.tolist()]
    if not there.all():
        few = ", ".join(name for name, fine in zip(names, there, strict=True) if not fine)
        warn(f"evaluate: entities of too small sets of institutions are not counted: {few}", DataWarning)
    edges = np.concatenate([[-np.inf], bin_edges(distribution, 0.0, 1.0), [np.inf]])
    squares = told["squares"][there]
    return Evaluation(
        edges=edges,
        sites=tuple(name for name, fine in zip(names, there, strict=True) if fine),
        n=n[there],
        observed=observed[there],
        expected=expected[there],
        least=int(told["least"]),
        means=probabilities(edges, distribution),
        squares=np.append(squares, squares.sum()),
        recalibration=_from_array(told["regression"]),
        remarks=() if partition.sites[holder].policy.evaluation == "any" else (AVERAGED,),
    )
