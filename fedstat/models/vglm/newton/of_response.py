"""Sums of the response for Newton's method: told once, so that residuals stay with its holder.

With a canonical link the score at linear predictors eta is ``X'y - X'mu(eta)``. The response is in the first
part alone, which does not depend on eta and comes once, from secure products of every institution's columns
with it; the second follows from what the coordinator knows, and says nothing of the response. Beyond
canonical links residuals are weighted by what changes from step to step, and every institution is sent them;
and so where nobody can deal for a product with the holder.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.errors import ModelError
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Conversation, Side
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.models.vertical.exchange.protocol import Units, dealing_sites, list_sides, own_ask
from fedstat.models.vertical.exchange.steps import BLOCK, RESPONSE
from fedstat.models.vertical.layout import Layout
from fedstat.models.vglm.response.distributions import respond_at
from fedstat.typing import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class OfResponse:
    """What is known of the response without a value per entity.

    `sums` (F, p) are those of the standardised columns times the response less its mean, by fold; None where
    residuals are sent.
    """

    distribution: DistributionSpec
    mean: float
    sums: Floats | None = None

    @property
    def step(self) -> str:
        """What the holder is asked at linear predictors."""
        return "respond" if self.sums is not None else "respond_openly"

    def at(self, eta: Floats) -> tuple[Floats, Floats]:
        """Residuals of the mean in the place of every response, and the weights: (n,) each."""
        _, residual, weight = respond_at(self.distribution, eta, np.full(len(eta), self.mean))
        return residual, weight

    def score(self, fold: int | None = None) -> Floats:
        """Add to sums of columns times these residuals what the responses add, of a fold or of all: (p,)."""
        if self.sums is None:
            return np.zeros(1)
        eta = np.asarray(self.distribution.make().link(np.array([self.mean])), dtype=np.float64)
        one = respond_at(self.distribution, eta, np.array([self.mean + 1.0]))[1]
        zero = respond_at(self.distribution, eta, np.array([self.mean]))[1]
        # The derivative of the natural parameter by the linear predictor, which is one number here.
        return np.asarray((one - zero) * (self.sums.sum(axis=0) if fold is None else self.sums[fold]))


def learn_of_response(
    layout: Layout, distribution: DistributionSpec, units: Units, code: Ints, conversation: Conversation
) -> Rounds[tuple[OfResponse, dict[tuple[str, str], str]]]:
    """Multiply the columns with the response by fold, (n,), where that spares residuals; say who dealt."""
    sites, active = dealing_sites(layout), layout.active
    parts = int(code.max()) + 1
    every = np.ones((parts, len(layout.clients)), dtype=bool)
    sides = list_sides(layout, BLOCK, code, every)
    response = Side(active, RESPONSE, slice(0, 1), np.arange(layout.n), code)
    apart, own = [s for s in sides if s.site != active], [s for s in sides if s.site == active]
    sums = np.zeros((parts, 1 + layout.p))
    try:
        for side in apart:
            conversation.dealer(side.site, active, sites)
    except ModelError:
        return OfResponse(distribution, units.mean), {}
    if not distribution.canonical:
        return OfResponse(distribution, units.mean), {}
    if own:
        replies = yield [own_ask(layout, side, parts, conversation) for side in own]
        for side, reply in zip(own, replies, strict=True):
            sums[:, side.place] = reply.arrays["products"]
    pairs = [(side, response) for side in apart]
    multiplied = yield from conversation.multiply(pairs, sites, parts, layout.n)
    for one in multiplied:
        sums[:, one.a.place] = one.products[:, :, 0]
    dealers = {(min(one.a.site, active), max(one.a.site, active)): one.dealer for one in multiplied}
    return OfResponse(distribution, units.mean, units.sd * sums[:, 1:]), dealers
