"""Evaluation of predictions at the response holder, over groups of entities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedstat.errors import DataWarning, MessageError, ModelError, warn
from fedstat.federation import message
from fedstat.federation.design.vertical_design import design_request, response_of
from fedstat.federation.disclosure.facts import EntityCount, ModelEvaluation
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.inference.evaluation import Accuracy, Evaluation, bin_edges, merge_small_bins, probabilities
from fedstat.inference.recalibration import Recalibration, recalibrate
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.sums import Rows
from fedstat.models.run import PostFitAnalysis, run_analysis
from fedstat.models.vertical.prediction.protocol import ResponseSource, new_ledger
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Averages of external predictions over groups of entities, for a comparison with the response.
#
# The choice of predictions determines what a sum of losses reveals: predictions that differ by powers of two
# reveal every label, and predictions of two levels reveal one. Here predictions are averaged over cells of
# entities that depend on predictions alone. Every count or sum is then a function of sums of the response
# over cells.


def average_in_groups(data: SiteData, predicted: Floats, code: Ints, by: Floats | None = None) -> Floats:
    """Average predictions, (n,) or (n, q), over cells of entities of one group, of `code` (n,), -1 for none.

    A cell has at least the number of entities that the owner requires for a sum. Its entities are neighbors
    in the predictions, or in `by` (n, q), a function of them. If the owner allows any number of evaluations,
    labels can be revealed anyway; predictions are then not averaged.
    """
    if data.policy.evaluation == "any":
        return predicted
    places, out = predicted if by is None else by, np.array(predicted)
    places = places.reshape(len(predicted), -1)
    for group in np.unique(code[code >= 0]):
        for cell in group_codes(places, np.flatnonzero(code == group), max(data.min_count, 1)):
            out[cell] = predicted[cell].mean(axis=0)
    return out


def group_codes(places: Floats, rows: Ints, least: int) -> list[Ints]:
    """Divide rows of `places` (n, q) into cells of `least` or more, by halves of the widest column.

    Examples
    --------
    >>> cells(np.array([[5.0], [1.0], [2.0], [9.0], [8.0]]), np.arange(5), 2)
    [array([1, 2]), array([0, 4, 3])]
    """
    if len(rows) < 2 * least:
        return [rows]
    own = places[rows]
    order = rows[np.argsort(own[:, np.ptp(own, axis=0).argmax()], kind="stable")]
    half = len(rows) // 2
    return [*group_codes(places, order[:half], least), *group_codes(places, order[half:], least)]


def squared_errors(y: Floats, given: Floats, used: Floats, code: Ints, groups: int) -> Floats:
    """Sum squared errors of predictions (n,) by group, (groups,), from `used`, their averages over cells.

    The sums are those of the averages, corrected for the averaging: within cells, the response is assumed to
    vary with its predictions as it does between cells, as far as possible. They depend only on sums over
    cells.
    """
    moved = used - used.mean() if len(used) else used
    slope = float(moved @ y / (moved @ moved)) if moved.any() else 1.0
    errors, within = (np.bincount(code, weights=one**2, minlength=groups) for one in (y - used, given - used))
    most = np.sqrt(errors) * np.sqrt(within)
    return np.asarray(errors + within - 2.0 * (slope * within).clip(-most, most))


# ----------------------------------------------------------------------------------------------------
# Agreement of predictions with the response of a partition, computed where the response is.

GROUP_AVERAGES = (
    "The policy of the site that holds the response requires that similar predictions are averaged over a "
    "few entities before the evaluation."
)
SMALLEST, LARGEST = 1e-290, 1e140
"""Bounds of a positive mean: below the first its logarithm overflows, above the second its square."""
SUM_COUNT = 9
"""Values of a recalibration: whether there is one, intercept, slope, their covariance, and three more."""


def evaluate_at_holder(
    data: SiteData,
    state: State,
    text: str,
    predicted: Floats,
    use: Bools,
    code: Ints,
    groups: Ints,
    center: Floats,
    width: Floats,
) -> tuple[dict[str, Array], str]:
    """Evaluate the agreement of predicted means (n,) with the opened response of the rows in `use`.

    `text` is distribution and link, `code` (n,) the group of each row, from 0 to `groups` - 1; for `center`
    and `width` see :func:`bin_edges`. Released are ``bins`` (3 G, B), entities and sums of response and of
    predictions by bin of the linear predictor, where small bins are merged with a neighbor and small groups
    are left out; ``squares`` (G,), sums of squared errors; ``spread`` (G,) about the mean of the group;
    ``deviance`` (2,) of predictions and of a constant, zero for a binary response; ``regression`` (9,), the
    response of all these rows regressed on the linear predictor. Predictions are averaged as described in
    :func:`averaged`.
    """
    distribution = DistributionSpec.from_json(text)
    family, binary = distribution.make(), distribution.name == "Binomial"
    response = response_of(state)
    message.check_lengths(data.name, use=(use, len(response)))
    y, G = response[use], int(groups)
    message.check_lengths(data.name, predicted=(predicted, len(y)), code=(code, len(y)))
    if not _are_means(predicted, distribution) or not 1 <= G <= max(len(y), 1) or not float(width) > 0.0:
        raise MessageError(f"{data.name}: expected valid means for the family, in one group or more")
    there = np.isfinite(y)
    y, given, code = y[there], predicted[there], code[there]
    # If tables are simulated, and their responses with them, any number above zero is an event.
    y = (y > 0.0).astype(np.float64) if binary else y
    if len(code) and not 0 <= code.min() <= code.max() < G:
        raise MessageError(f"{data.name}: array 'code' names a group that does not exist")
    predicted = average_in_groups(data, given, code, np.asarray(family.link(given)))
    eta, edges = np.asarray(family.link(predicted)), bin_edges(distribution, float(center), float(width))
    at, B = np.searchsorted(edges, eta), len(edges) + 1
    bins, squares, spread = np.zeros((3 * G, B)), np.zeros(G), np.zeros(G)
    counted = np.zeros(len(y), dtype=bool)
    for g in range(G):
        here = code == g
        if np.count_nonzero(here) < max(data.min_count, 1):
            continue
        counted |= here
        cell = merge_small_bins(np.bincount(at[here], minlength=B), data.min_count)[at[here]]
        by_row = (np.ones(len(cell)), y[here], predicted[here])
        bins[3 * g : 3 * g + 3] = [np.bincount(cell, weights=one, minlength=B) for one in by_row]
        if binary:
            squares[g] = float(((y[here] - predicted[here]) ** 2).sum())
        else:
            spread[g] = float(((y[here] - y[here].mean()) ** 2).sum())
    found, deviance = None, np.zeros(2)
    if counted.any():
        X = np.column_stack([np.ones(int(counted.sum())), eta[counted]])
        found = recalibrate(Rows(X, y[counted]), distribution)
        if not binary:
            constant = _inside(np.full(len(X), y[counted].mean()), distribution)
            squares = squared_errors(y[counted], given[counted], predicted[counted], code[counted], G)
            deviance = np.array([family.deviance(y[counted], mu) for mu in (predicted[counted], constant)])
    state.report(EntityCount(int(counted.sum())))
    sums = {"bins": bins, "squares": squares, "spread": spread, "deviance": deviance}
    sums["regression"] = _as_array(found)
    state.report(ModelEvaluation(np.concatenate([one.ravel() for one in sums.values()])))
    return {**sums, "least": np.array(data.min_count)}, ""


def _are_means(predicted: Floats, distribution: DistributionSpec) -> bool:
    """Whether the distribution allows these means, and the link is defined for them."""
    if distribution.name == "Binomial":
        return bool(((predicted > 0.0) & (predicted < 1.0)).all())
    if distribution.name != "Gaussian" and not (predicted > 0.0).all():
        return False
    return bool(np.isfinite(distribution.make().link(predicted)).all())


def _as_array(found: Recalibration | None) -> Floats:
    if found is None:
        return np.zeros(SUM_COUNT)
    numbers = [[1.0], found.params, found.cov[np.triu_indices(2)], found.large, [found.statistic]]
    return np.concatenate([np.asarray(one, dtype=np.float64) for one in numbers])


def _from_array(reported: Floats) -> Recalibration | None:
    if not reported[0]:
        return None
    cov = np.array([[reported[3], reported[4]], [reported[4], reported[5]]])
    return Recalibration(reported[1:3], cov, (float(reported[6]), float(reported[7])), float(reported[8]))


def _sums_of_errors(what: str, ndim: int = 1) -> message.ArrayDeclaration:
    return message.aggregate(what, ndim, behind=(EntityCount, ModelEvaluation))


EVALUATION_STEPS: Mapping[str, message.Step] = {
    "judge_predictions": message.Step(
        evaluate_at_holder,
        {
            "predicted": message.per_entity("predictions", dtype="float64", weighs="predictions"),
            "use": message.presence("which entities are compared", dtype="bool"),
            "code": message.presence("sites that have each entity, by number", dtype="int64"),
            "groups": message.control("number of sets of sites", 0, dtype="int64"),
            "center": message.aggregate("mean of the linear predictors", 0),
            "width": message.aggregate("their deviation", 0),
        },
        {
            "bins": _sums_of_errors("entities, sums of response and of predictions by bin", 2),
            "squares": _sums_of_errors("squared errors of predictions"),
            "spread": _sums_of_errors("squared differences of responses from their mean"),
            "deviance": _sums_of_errors("deviance of predictions, and of a constant"),
            "regression": _sums_of_errors("response regressed on the linear predictor"),
            "least": message.control("fewest entities of a bin", 0),
        },
        message.control("family and link"),
    )
}


def evaluate_predictions(
    family: str,
    response: ResponseSource,
    distribution: DistributionSpec,
    sites: Sequence[str],
    predicted: Callable[[], FitProtocol[tuple[Floats, str]]],
    analysis: PostFitAnalysis,
) -> Evaluation:
    """Compare predicted means of a partition's entities, nan for none, with its response.

    `predicted` requests them, and returns the session; `analysis` describes the analysis to owners, who
    consent once to it and to the requests here. There is a row for each set of `sites` that entities have.
    Raises ModelError if the partition lacks the response; a DataWarning names sets that are too small to be
    counted.
    """
    partition, holder = analysis.partition, response.site
    if holder not in partition.sites:
        raise ModelError(f"evaluate: the partition lacks site '{holder}', which has the response")
    rows = partition.rows[holder]
    has = np.zeros(partition.n_entities, dtype=np.int64)
    for k, site in enumerate(sites):
        if site in partition.rows:
            has[partition.rows[site]] |= 1 << k
    question = {"response": response.text, "columns": response.columns}

    def requester() -> FitProtocol[tuple[Mapping[str, Array], Ints, tuple[float, float]]]:
        known, session = yield from predicted()
        use = np.isfinite(known[rows])
        if not use.any():
            raise ModelError("evaluate: no entity of the partition has both a prediction and a response")
        sets, code = np.unique(has[rows[use]], return_inverse=True)
        means = _inside(known[rows[use]], distribution)
        eta = np.asarray(distribution.make().link(means))
        place = float(eta.mean()), float(eta.std()) or 1.0
        to = SecureProductSession(family, session, None)
        yield [design_request(holder, "open_response", session, question)]
        (reply,) = yield [
            to.request(
                holder,
                "judge_predictions",
                distribution.to_json(),
                predicted=means,
                use=use,
                code=code.astype(np.int64),
                groups=np.array(len(sets)),
                center=np.array(place[0]),
                width=np.array(place[1]),
            )
        ]
        return reply.arrays, sets, place

    columns = {**analysis.columns, holder: (*analysis.columns.get(holder, ()), *response.columns)}
    analysis = replace(analysis, call="evaluate()", columns=columns)
    reported, sets, place = run_analysis(analysis, requester, new_ledger(partition, holder))
    n, observed, expected = reported["bins"].reshape(len(sets), 3, -1).swapaxes(0, 1)
    there = n.sum(axis=1) > 0.0
    names = [" + ".join(k for i, k in enumerate(sites) if s >> i & 1) or "none" for s in sets.tolist()]
    if not there.all():
        few = ", ".join(name for name, fine in zip(names, there, strict=True) if not fine)
        warn(f"evaluate: sets of sites with too few entities are not counted: {few}", DataWarning)
    edges = np.concatenate([[-np.inf], bin_edges(distribution, *place), [np.inf]])
    squares, binary = reported["squares"][there], distribution.name == "Binomial"
    accuracy = Accuracy(
        n=n[there].sum(axis=1),
        total=observed[there].sum(axis=1),
        squares=squares,
        spread=reported["spread"][there],
        deviance=float(reported["deviance"][0]),
        null_deviance=float(reported["deviance"][1]),
    )
    return Evaluation(
        edges=edges,
        sites=tuple(name for name, fine in zip(names, there, strict=True) if fine),
        n=n[there],
        observed=observed[there],
        expected=expected[there],
        binary=binary,
        least=int(reported["least"]),
        means=probabilities(edges, distribution) if binary else None,
        squares=np.append(squares, squares.sum()) if binary else None,
        recalibration=_from_array(reported["regression"]),
        accuracy=None if binary else accuracy,
        remarks=() if partition.sites[holder].policy.evaluation == "any" else (GROUP_AVERAGES,),
        counted=f"entities of one set of sites (as {holder} counts them)",
    )


def _inside(means: Floats, distribution: DistributionSpec) -> Floats:
    """Limit predictions at the ends of their range so that they reveal no more than their neighbors."""
    if distribution.name == "Binomial":
        return means.clip(1e-12, 1.0 - 1e-12)
    return means.clip(-LARGEST if distribution.name == "Gaussian" else SMALLEST, LARGEST)
