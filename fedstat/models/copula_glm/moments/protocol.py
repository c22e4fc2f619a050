"""The release of a private generalised linear model: who is complete, margins, products of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from typing import TypeVar

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Conversation
from fedstat.federation.tables.published import PublishedColumn
from fedstat.models.copula.margins import Bins
from fedstat.models.copula.protocol import FEWEST, ask_margins, ask_present, ask_products, plan_columns
from fedstat.models.copula_glm.moments.asked import FamilyName, MomentPlan
from fedstat.models.copula_glm.moments.columns import ScoredColumn, ScoredDesign
from fedstat.models.copula_glm.moments.release import MomentRelease, ReleaseNoise, unweighted
from fedstat.models.copula_glm.moments.response import ScoredResponse
from fedstat.records import to_json
from fedstat.typing import Bools, Ints

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MomentQuestion:
    """What is to be released: public descriptions of columns by institution, scores of these, the response.

    Of the columns of the data of its `holder` the response is the last. `rho` is the budget of the moments,
    `of_step` that of a step on the score.
    """

    bounds: Mapping[str, Mapping[str, PublishedColumn]]
    design: Mapping[str, tuple[ScoredColumn, ...]]
    holder: str
    response: FamilyName
    rho: Fraction
    of_step: Fraction = Fraction(0)

    def plan(self, counts: Mapping[str, int]) -> MomentPlan:
        """Plan the noise for so many complete entities of each institution."""
        found = plan_columns(self.bounds, counts, self.rho)
        design = {client: self.design.get(client, ()) for client in self.bounds}
        return MomentPlan(found.rho, found.columns, design, self.holder, self.response, self.of_step)


@dataclass(frozen=True, slots=True, eq=False)
class ReleasedMoments:
    """What `n` complete entities have released, the noise on it, and the plan by which it was asked for.

    `entities` are the complete ones of each institution, `used` positions of those of the fit among all.
    """

    plan: MomentPlan
    design: ScoredDesign
    release: MomentRelease
    noise: ReleaseNoise
    n: int
    entities: Mapping[str, int]
    used: Mapping[str, Ints]


def release_moments(
    asking: Conversation,
    question: MomentQuestion,
    rows: Mapping[str, Ints],
    sites: Sequence[str],
    n_entities: int,
) -> Rounds[ReleasedMoments]:
    """Ask for all that the estimator takes, of the entities that are complete at every institution.

    `rows` are positions of each institution's records among all entities, `sites` those that may deal.
    """
    clients = list(question.bounds)
    asked = {client: to_json(tuple(question.bounds[client])) for client in clients}
    found = yield from ask_present(asking, asked, rows, n_entities)
    entities = {client: found.count(client) for client in clients}
    require_complete(found.table(clients), clients, question.holder)
    used, present = found.everywhere()
    n = int(np.count_nonzero(used))
    plan = question.plan(dict.fromkeys(clients, n))
    margins = yield from ask_margins(asking, plan, present)
    products, noise = yield from ask_products(asking, plan, present, margins, sites)
    # The response is last in the row of its holder, and last of all here.
    last = plan.places()[plan.holder].stop - 1
    order = np.append(np.delete(np.arange(len(products)), last), last)
    *of_columns, y = _in_order(margins, plan.holder)
    response = ScoredResponse(plan.response, y)
    deviations = {c: [plan.count_deviation(c, j) for j in range(len(plan.columns[c]))] for c in clients}
    *counts, of_response = _in_order(deviations, plan.holder)
    here = np.ix_(order, order)
    return ReleasedMoments(
        plan=plan,
        design=whole_design(plan),
        release=MomentRelease(tuple(of_columns), response, unweighted(products[here] / n, plan.response)),
        noise=ReleaseNoise(np.array(counts), float(of_response), noise[here] / n),
        n=n,
        entities=entities,
        used={client: rows[client][present.seen[client]] for client in clients},
    )


def require_complete(table: Bools, clients: Sequence[str], holder: str) -> None:
    """Require enough entities that every site has, (n, K) of bool; says which one to leave out, if not."""
    n = int(np.count_nonzero(table.all(axis=1)))
    if n >= FEWEST:
        return
    others = {
        client: int(np.count_nonzero(np.delete(table, k, axis=1).all(axis=1)))
        for k, client in enumerate(clients)
        if client != holder
    }
    best = max(others, key=others.__getitem__, default="")
    without = (
        f"Leave out the columns of '{best}', without which {others[best]:,} are complete; or make"
        if best and others[best] >= FEWEST
        else "Make"
    )
    raise EstimationError(
        f"{n:,} entities are complete at every institution of the formula, and {FEWEST} or more are needed. "
        f"{without} tables of fs.CopulaSynthesizer(partition, ..., missing='pairs'), which takes every "
        "entity that two institutions have, and fit the model to these"
    )


def whole_design(plan: MomentPlan) -> ScoredDesign:
    """Put the columns of all institutions with some one after the other."""
    clients = [client for client, columns in plan.design.items() if columns]
    bins: list[Bins] = []
    columns: list[ScoredColumn] = []
    first = 0
    for client in clients:
        own = plan.columns[client][: len(plan.columns[client]) - (client == plan.holder)]
        columns += [replace(column, source=first + column.source) for column in plan.design[client]]
        bins += own
        first += len(own)
    return ScoredDesign(tuple(bins), tuple(columns), tuple(clients))


def _in_order(held: Mapping[str, Sequence[T]], holder: str) -> list[T]:
    """List what institutions have of each column of the data, that of the response last."""
    *own, last = held[holder]
    return [*chain.from_iterable(own if client == holder else some for client, some in held.items()), last]
