"""Protocol of a whole fit: starts, penalty path, refits, and the final mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.message import Reply
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.convergence import gains_little
from fedstat.models.m2sem import selection
from fedstat.models.m2sem.em import CHANGE, MixtureExchange, MixtureState, StartPlan, start
from fedstat.models.m2sem.information import ObservedInformation, request_information
from fedstat.models.m2sem.request import ModalityRequest
from fedstat.typing import Bools, Floats

PATH_STEPS = 6
FINE_ROUNDS, FINE_STEPS, FINE_GAIN = 8, 2, 0.02


@dataclass(frozen=True, slots=True, eq=False)
class MixtureFit:
    """A fitted mixture; clusters are in the order of their sizes.

    `released` are the releases of the sites. `coarse` is the largest change of a posterior due to fewer
    nodes. `frequencies` are those with which columns, and then their modality, were selected in half-samples.
    `observed` is the information for standard errors.
    """

    state: MixtureState
    r: Floats
    w: Floats
    released: Sequence[Reply]
    history: Sequence[tuple[int, str, float]]
    judged: Sequence[selection.EvaluatedSupport]
    select: str | None
    rounds: int
    converged: bool
    coarse: float
    frequencies: Mapping[str, Floats] | None = None
    observed: ObservedInformation | None = None
    skewed: Mapping[str, Bools] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MixturePlan:
    """Options of a fit; `withheld` states who does not release information for standard errors, and why."""

    clusters: int
    factors: int
    starts: StartPlan
    select: str | None
    local_steps: int
    fine: int
    observed: bool = False
    half_samples: int = 0
    withheld: str = ""


def fit_mixture(
    exchange: MixtureExchange, plan: MixturePlan, modalities: Mapping[str, Sequence[ModalityRequest]]
) -> FitProtocol[MixtureFit]:
    """Fit one mixture, and select the columns and modalities that separate its clusters."""
    yield from exchange.begin([plan.factors])
    (one,) = yield from start(exchange, [(plan.clusters, plan.factors)], plan.starts)
    if one.failed:
        raise EstimationError(
            f"{one.failed}, for every start, so its owner does not release means of clusters (min_count). "
            "Take fewer clusters, or leave that site's columns out"
        )
    judged: list[selection.EvaluatedSupport] = []
    frequencies: Mapping[str, Floats] | None = None
    if plan.select is not None:
        places = [
            np.arange(len(m.columns) + 1) < len(m.columns) for c in sorted(modalities) for m in modalities[c]
        ]
        columns = np.concatenate(places)
        path = selection.SupportPath(exchange, one, plan.select, min(PATH_STEPS, plan.local_steps), columns)
        one = yield from selection.select_support(exchange, path)
        if plan.half_samples and path.met:
            frequencies = yield from selection.select_in_halves(exchange, path, plan.half_samples, kept=[one])
        judged = path.table()
    yield from exchange.ascend([one], plan.local_steps, max(exchange.left - FINE_ROUNDS - 2, 0))
    # Without factors there are no nodes.
    fine = plan.factors > 0 and any(not m.continuous for some in modalities.values() for m in some)
    coarse = 0.0
    converged = one.converged
    if fine and not one.failed:
        one, coarse = yield from refine(exchange, one, plan)
        converged = converged and refined(one)
    if one.failed:
        raise EstimationError(f"{one.failed}; take fewer clusters")
    fit = yield from finish(exchange, one, plan, judged, coarse)
    return replace(fit, frequencies=frequencies, converged=converged, skewed=exchange.skewed)


def refine(
    exchange: MixtureExchange, one: MixtureState, plan: MixturePlan
) -> FitProtocol[tuple[MixtureState, float]]:
    """Continue with more nodes; return how much posteriors differ at the same parameters."""
    finer = selection.continued(one, one.penalties, fixed=one.fixed)
    finer.nodes, finer.name = plan.fine, "more nodes"
    before = one.r
    yield from exchange.improve([finer], 0)
    coarse = float(np.abs(finer.r - before).max(initial=0.0))
    finer.trace = finer.trace[-1:]
    steps = min(FINE_STEPS, plan.local_steps)
    yield from exchange.ascend([finer], steps, FINE_ROUNDS, enough=refined)
    return finer, coarse


def refined(one: MixtureState) -> bool:
    """Whether a mixture that has converged on few nodes has also converged on more of them."""
    return gains_little(one.gain, one.loglik, len(one.r), FINE_GAIN) and one.change < CHANGE


def finish(
    exchange: MixtureExchange,
    one: MixtureState,
    plan: MixturePlan,
    judged: Sequence[selection.EvaluatedSupport],
    coarse: float,
) -> FitProtocol[MixtureFit]:
    """Request parameters and profiles, with the largest cluster first."""
    # One more step, so that sites have one set of posteriors behind their parameters and their information.
    behind = one.sent
    yield from exchange.improve([one], 1)
    order = np.argsort(-behind.sum(axis=0), kind="stable")
    replies = yield from exchange.release(one, order)
    observed = ObservedInformation.none(plan.clusters, plan.withheld) if plan.withheld else None
    if plan.observed:
        r, w = np.ascontiguousarray(behind[:, order]), one.w[order]
        observed = yield from request_information(exchange.requester, one.slot, r, w, exchange.subjects.place)
    r = np.ascontiguousarray(one.r[:, order])
    return MixtureFit(
        state=one,
        r=r,
        w=r.mean(axis=0),
        released=replies,
        history=tuple(exchange.history),
        judged=tuple(judged),
        select=plan.select,
        rounds=exchange.rounds,
        converged=one.converged,
        coarse=coarse,
        observed=observed,
    )
