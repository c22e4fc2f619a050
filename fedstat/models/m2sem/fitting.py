"""The whole fit of a mixture: starts, path of penalties, refits, the final mixture and its release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.rounds.engine import Rounds
from fedstat.models.m2sem.asked import ModalityAsked
from fedstat.models.m2sem.course import Course, entropy_of
from fedstat.models.m2sem.protocol import Exchange
from fedstat.models.m2sem.selection import Judged, Path, continued, select_support
from fedstat.models.m2sem.starts import StartPlan, start
from fedstat.typing import Floats, Ints

FINAL_ROUNDS, FINE_ROUNDS = 30, 8


@dataclass(frozen=True, slots=True, eq=False)
class FittedModality:
    """A modality as it was released: profiles (K, sum of P C) and lengths of loadings (P,) among it."""

    client: str
    asked: ModalityAsked
    profiles: Floats
    norms: Floats
    relevance: float


@dataclass(frozen=True, slots=True, eq=False)
class MixtureFit:
    """A fitted mixture; clusters are in the order of their sizes.

    `parameters` of all modalities of a client, one after the other. `coarse` is the largest change of a
    posterior that fewer nodes make.
    """

    course: Course
    r: Floats
    w: Floats
    modalities: tuple[FittedModality, ...]
    parameters: Mapping[str, Floats]
    history: Sequence[tuple[int, str, float]]
    judged: Sequence[Judged]
    select: str | None
    rounds: int
    converged: bool
    coarse: float


@dataclass(frozen=True, slots=True)
class FitPlan:
    """What a fit is to do."""

    clusters: int
    factors: int
    starts: StartPlan
    select: str | None
    local_steps: int
    fine: int


def fit_mixture(
    exchange: Exchange, plan: FitPlan, modalities: Mapping[str, Sequence[ModalityAsked]]
) -> Rounds[MixtureFit]:
    """Fit one mixture, and select what tells its clusters apart."""
    yield from exchange.begin([plan.factors])
    (one,) = yield from start(exchange, [(plan.clusters, plan.factors)], plan.starts)
    judged: list[Judged] = []
    if plan.select is not None:
        columns = sum(len(m.columns) for some in modalities.values() for m in some)
        path = Path(exchange, plan.select, plan.local_steps, columns)
        one = yield from select_support(exchange, one, path)
        judged = path.table()
    yield from exchange.ascend([one], plan.local_steps, FINAL_ROUNDS)
    coarse, fine = 0.0, any(not m.continuous for some in modalities.values() for m in some)
    if fine and not one.failed:
        one, coarse = yield from refine(exchange, one, plan)
    if one.failed:
        raise EstimationError(f"{one.failed}; take fewer clusters")
    return (yield from finish(exchange, one, plan, modalities, judged, coarse))


def refine(exchange: Exchange, one: Course, plan: FitPlan) -> Rounds[tuple[Course, float]]:
    """Go on with more nodes; return by how much posteriors differ at the same parameters."""
    finer = continued(one, one.penalties, fixed=one.fixed)
    finer.nodes, finer.name = plan.fine, "more nodes"
    before = one.r
    yield from exchange.improve([finer], 0)
    coarse = float(np.abs(finer.r - before).max(initial=0.0))
    finer.trace = finer.trace[-1:]
    yield from exchange.ascend([finer], plan.local_steps, FINE_ROUNDS)
    return finer, coarse


def finish(
    exchange: Exchange,
    one: Course,
    plan: FitPlan,
    modalities: Mapping[str, Sequence[ModalityAsked]],
    judged: Sequence[Judged],
    coarse: float,
) -> Rounds[MixtureFit]:
    """Have parameters and profiles released, with the largest cluster first."""
    order = np.argsort(-one.r.sum(axis=0), kind="stable")
    replies = yield from exchange.release(one, order)
    r = np.ascontiguousarray(one.r[:, order])
    found: list[FittedModality] = []
    for reply in replies:
        found += of_client(reply.site, modalities[reply.site], reply.arrays)
    return MixtureFit(
        course=one,
        r=r,
        w=r.mean(axis=0),
        modalities=tuple(found),
        parameters={reply.site: reply.arrays["parameters"] for reply in replies},
        history=tuple(exchange.history),
        judged=tuple(judged),
        select=plan.select,
        rounds=exchange.rounds,
        converged=one.converged,
        coarse=coarse,
    )


def of_client(
    client: str, asked: Sequence[ModalityAsked], arrays: Mapping[str, Floats]
) -> list[FittedModality]:
    """Take apart what a client has released."""
    widths = [1 if m.continuous else max(len(c.levels) for c in m.columns) for m in asked]
    ends = np.cumsum([len(m.columns) * width for m, width in zip(asked, widths, strict=True)])
    profiles = np.split(arrays["profiles"], ends[:-1], axis=1)
    norms = np.split(arrays["norms"], np.cumsum([len(m.columns) for m in asked])[:-1])
    pairs = zip(asked, profiles, norms, arrays["relevance"].tolist(), strict=True)
    return [FittedModality(client, *parts) for parts in pairs]
