"""Evaluation of predicted survival at the sites of a fit, or at new ones; a family says how it predicts."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fedstat.errors import MessageError, NotAvailableError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.horizontal_design import (
    RowsSchema,
    SiteRowCounts,
    open_requests,
)
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, OpenRows, rows_of
from fedstat.federation.design.site_rows import block_means, count_blocks
from fedstat.federation.disclosure.facts import ColumnSums, GroupSums, LevelRowCounts, ModelEvaluation
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.dry_run.synthetic import SyntheticRows
from fedstat.federation.message import ArrayDeclaration, aggregate, check_lengths, control
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.evaluation import bin_edges, merge_small_bins
from fedstat.inference.survival_evaluation import (
    SurvivalEvaluation,
    SurvivalSums,
    censoring_survival,
    survival_at_ends,
)
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.partial_likelihood import RiskTable, concordance
from fedstat.models.checks import check_layout, check_masked
from fedstat.models.horizontal.rows import summed
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.models.run import PostFitAnalysis, run_analysis
from fedstat.typing import Array, Bools, Floats, Ints

INTERVALS = 200
"""Intervals of equal width up to the last time, on which censoring is counted."""
BINS = bin_edges(DistributionSpec("Poisson", "Log"), 0.0, 1.0)
"""Edges between the bins of the linear predictor about its mean; they depend on no row."""
TIMES_BEHIND = (*OPEN_ROWS, LevelRowCounts, ColumnSums)
CELLS_BEHIND = (*TIMES_BEHIND, GroupSums, ModelEvaluation)


def _times(data: SiteData, opened: OpenRows) -> tuple[Floats, Bools, Floats]:
    """Return times averaged over blocks of rows (n,), whether there was the event, and weights."""
    chunks = [rows for rows, _ in opened.chunks()]
    both = np.concatenate([rows.times for rows in chunks if rows.times is not None])
    event = np.concatenate([rows.y for rows in chunks]) == 1.0
    weights = [np.ones(len(rows.y)) if rows.weight is None else rows.weight for rows in chunks]
    if both[:, 0].any():
        raise MessageError(f"{data.name}: rows that enter late are not evaluated")
    # As for survival curves: intervals of any width are then about blocks of rows.
    averaged = block_means(event.astype(np.int64), both[:, 1], data.policy.min_level_count)
    return averaged, event, np.concatenate(weights)


def _blocks(data: SiteData, opened: OpenRows, event: Bools) -> ColumnSums:
    count = count_blocks(event.astype(np.int64), data.policy.min_level_count)
    division = hashlib.sha256(event.astype(np.int64).tobytes()).hexdigest()[:16]
    names = [f"block {division} {place}" for place in range(count)]
    used = opened.used if len(opened.used) else np.ones(data.table.n_rows, dtype=bool)
    return ColumnSums([], used, blocks=dict.fromkeys(opened.question.response_columns, names))


EDGES = aggregate("upper ends of the intervals", common=True)


CONCORDANCE = {
    "pairs": summed("pairs of rows: concordant, discordant, tied in prediction, tied in time"),
    "squares": summed("squares of the rows' influences on the concordance"),
}
"""What the concordance of a fit needs of each site."""


def concordance_sums(table: RiskTable, risk: Floats, code: Ints | None) -> dict[str, Array]:
    """Return ``pairs`` (4,) and ``squares`` (3,) of a site's rows, by the clusters `code` (n,) if given."""
    pairs, influences = concordance(table, risk)
    if code is None:
        code, influences = np.arange(len(risk)), table.of_rows(influences)
    s, m = (np.bincount(code, column) for column in influences.T)
    return {"pairs": pairs, "squares": np.array([s @ s, s @ m, m @ m])}


class Predicted(NamedTuple):
    """How survival follows from a linear predictor: the risk of rows (n,), and survival at times (n, m)."""

    risk: Callable[[Floats], Floats]
    survival: Callable[[Floats], Floats]


def enter_evaluation(
    family: str,
    takes: Mapping[str, ArrayDeclaration],
    predict: Callable[..., Predicted],
    request: Any = None,
    requests: ArrayDeclaration | None = None,
) -> None:
    """Make the steps ``count_times`` and ``evaluate_times`` of a family.

    `predict` is called with the site's name, the times, the request if there is one, and the arrays that it
    `takes`, as keywords. It raises a MessageError for arrays that do not fit.
    """

    @step(
        family,
        takes={"edges": EDGES},
        releases={"leaving": summed("rows with and without the event by interval", 2, behind=TIMES_BEHIND)},
    )
    def count_times(data: SiteData, state: State, edges: Floats) -> dict[str, Array]:
        """Count events and censored rows up to each of `edges` (J,) and beyond: ``leaving`` (2, J + 1)."""
        opened = rows_of(state)
        if not opened.question.has_times or not len(edges) or (np.diff(edges) <= 0.0).any():
            raise MessageError(f"{data.name}: array 'edges' must ascend, and the model needs times")
        times, event, weight = _times(data, opened)
        code = np.searchsorted(edges, times) * 2 + ~event
        J = len(edges) + 1
        state.report(LevelRowCounts("intervals of time", np.bincount(code, minlength=2 * J).tolist()))
        state.report(_blocks(data, opened, event))
        return {"leaving": np.bincount(code, weight, 2 * J).reshape(J, 2).T.copy()}

    @step(
        family,
        "count_times",
        request=request,
        requests=requests,
        takes={
            "edges": EDGES,
            "free": aggregate("probability of not being censored before each interval", common=True),
            "times": aggregate("times of the evaluation", common=True),
            "beta": aggregate("coefficients in the units of the data", common=True),
            **takes,
        },
        releases={
            "cells": summed("rows by outcome and bin of the linear predictor", 2, behind=CELLS_BEHIND),
            "weights": summed("weights of events by bin", 2, behind=CELLS_BEHIND),
            "predicted": summed("rows, and predicted probabilities, by bin", 2, behind=CELLS_BEHIND),
            "squares": summed("weighted squared errors of predicted survival", behind=CELLS_BEHIND),
            "least": control("fewest rows of a bin", 0),
        },
    )
    def evaluate_times(
        data: SiteData,
        state: State,
        *requested: Any,
        edges: Floats,
        free: Floats,
        times: Floats,
        beta: Floats,
        **arrays: Floats,
    ) -> dict[str, Array]:
        """Count rows by outcome between `times` (m,) and bin of the predictor: ``cells`` (2 m + 1, B).

        Outcomes are an event between two times, a censored row between two, and longer follow-up. Bins that
        have fewer rows than the owner's policy allows are merged with a neighbor. It releases as well
        ``weights`` (m, B) of the events, ``predicted`` (1 + m, B), all rows and their predicted probabilities
        of an event up to each time, and ``squares`` (m,).
        """
        opened, J = rows_of(state), len(edges)
        check_lengths(data.name, free=(free, J + 1), beta=(beta, len(opened.shift)))
        if not (free > 0.0).all() or not np.isin(times, edges).all():
            raise MessageError(f"{data.name}: 'free' must be positive, and 'times' in 'edges'")
        predicted = predict(data.name, times, *requested, **arrays)
        parts = [
            opened.in_units(X) @ beta + (0.0 if rows.offset is None else rows.offset)
            for rows, X in opened.chunks()
        ]
        risk = predicted.risk(np.concatenate(parts))
        return _sums(data, state, opened, edges, free, times, risk, predicted.survival(risk))


def _sums(
    data: SiteData,
    state: State,
    opened: OpenRows,
    edges: Floats,
    free: Floats,
    times: Floats,
    risk: Floats,
    survival: Floats,
) -> dict[str, Array]:
    """Return what ``evaluate_times`` releases, from the rows' risks (n,) and survival at times (n, m)."""
    m, J = len(times), len(edges)
    averaged, event, weight = _times(data, opened)
    place = np.searchsorted(edges, averaged)
    period = np.searchsorted(times, edges[np.minimum(place, J - 1)])
    outcome = np.where(place >= J, 2 * m, np.where(event, period, m + period))
    outcome = np.where((place < J) & (period >= m), 2 * m, outcome)
    state.report(GroupSums(outcome))
    state.report(LevelRowCounts("outcomes by time", np.bincount(outcome).tolist()))
    state.report(_blocks(data, opened, event))
    at, B, least = np.searchsorted(BINS, risk), len(BINS) + 1, data.min_count
    bins = merge_small_bins(np.bincount(at, minlength=B), least)[at]
    cells, weights = np.zeros((2 * m + 1, B)), np.zeros((m, B))
    inverse = weight / free[np.minimum(place, J)]
    for one in range(2 * m + 1):
        rows = outcome == one
        cells[one] = np.bincount(bins[rows], weight[rows], B)
        if one < m and rows.any():
            # The weight of an event reveals its time: few of a bin have the mean weight of the period.
            few = np.bincount(bins[rows], minlength=B) < data.policy.min_level_count
            mean = inverse[rows].sum() / weight[rows].sum()
            weights[one] = np.where(few, cells[one] * mean, np.bincount(bins[rows], inverse[rows], B))
    predicted = np.array([np.bincount(bins, weight * (1.0 - column), B) for column in survival.T])
    squares = np.zeros(m)
    for k in range(m):
        died = (outcome <= k) & event
        later = np.where(outcome < m, outcome, outcome - m) > k
        alive = (outcome == 2 * m) | later
        after = free[np.searchsorted(edges, times[k]) + 1]
        squares[k] = inverse[died] @ survival[died, k] ** 2
        squares[k] += weight[alive] @ (1.0 - survival[alive, k]) ** 2 / after
    arrays = {
        "cells": cells,
        "weights": weights,
        "predicted": np.vstack([np.bincount(bins, weight, B), predicted]),
        "squares": squares,
    }
    state.report(ModelEvaluation(np.concatenate([one.ravel() for one in arrays.values()])))
    return {**arrays, "least": np.array(least)}


def evaluate_survival(
    family: tuple[str, str],
    agreement: RowsSchema,
    arrays: Mapping[str, Array],
    times: Floats,
    partition: ClientPartition,
    text: str = "",
) -> tuple[SurvivalEvaluation, Ledger]:
    """Evaluate predicted survival at times (m,) on a partition.

    `family` is the name of the steps and that of the model; `arrays` are ``beta`` and what its
    :func:`enter_evaluation` takes, and `text` its request.
    """
    check_layout("evaluate()", partition, "horizontal")
    names = tuple(partition.sites)
    agreed = replace(agreement, sites=tuple(SiteRowCounts(name, 0, 0) for name in names))
    wanted = any(site.policy.masked_only for site in partition.sites.values())
    masked = check_masked(None, len(names), wanted)
    arrays = {"times": times, **arrays}

    def protocol() -> FitProtocol[SurvivalEvaluation]:
        session = RowsSession(family[0], names, secrets.token_hex(8), lambda: agreed, masked)
        return session.hide(_protocol(session, times, arrays, text))

    question, ledger = agreement.question, Ledger()
    rows = tuple(SiteRowCounts(name, len(at), len(at)) for name, at in partition.rows.items())
    distribution = DistributionSpec("Binomial", "Logit")
    formula = f"{question.response} ~ {' + '.join(question.terms)}"
    analysis = PostFitAnalysis(
        partition,
        "evaluate()",
        formula,
        family[1],
        SyntheticRows(replace(agreement, sites=rows), distribution).sites,
        dict.fromkeys(partition.sites, question.needed),
    )
    return run_analysis(analysis, protocol, ledger), ledger


def _protocol(
    session: RowsSession, times: Floats, arrays: Mapping[str, Array], text: str
) -> FitProtocol[SurvivalEvaluation]:
    steps = float(times[-1]) / INTERVALS * np.arange(1.0, INTERVALS + 1.0)
    # Of two ends that differ by rounding, the time of the evaluation is kept.
    far = np.abs(steps[:, None] - times).min(axis=1) > 1e-9 * times[-1]
    edges = np.sort(np.append(steps[far], times))
    opening = open_requests(session.agreement, session.session)
    replies = yield opening + session.request_all("count_times", {"edges": edges})
    events, censored = add(replies[len(opening) :], "leaving")
    beyond = float(events[-1] + censored[-1])
    free = censoring_survival(events[:-1], censored[:-1], beyond)
    survival = survival_at_ends(events[:-1], censored[:-1], beyond)
    ends = np.searchsorted(edges, times)
    if free[ends[-1] + 1] <= 0.0 or beyond <= 0.0:
        raise NotAvailableError(
            f"evaluate: no row is followed for longer than {times[-1]:g}, the last time; choose an earlier "
            "one"
        )
    if events[: ends[0] + 1].sum() <= 0.0:
        raise NotAvailableError(
            f"evaluate: there are no events up to {times[0]:g}, the first time; choose a later one"
        )
    replies = yield session.request_all("evaluate_times", {"edges": edges, "free": free, **arrays}, text)
    cells, predicted = np.asarray(add(replies, "cells")), np.asarray(add(replies, "predicted"))
    m = len(times)
    return SurvivalEvaluation(
        times=times,
        sums=SurvivalSums(
            events=cells[:m],
            censored=cells[m : 2 * m],
            weights=np.asarray(add(replies, "weights")),
            beyond=cells[2 * m],
            rows=predicted[0],
            predicted=predicted[1:],
            squares=np.asarray(add(replies, "squares")),
        ),
        free=free[ends + 1],
        survival=survival[ends],
        least=max(int(reply.arrays["least"]) for reply in replies),
    )
