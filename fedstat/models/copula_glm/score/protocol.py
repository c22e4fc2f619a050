"""A step on the score, round by round: powers of the linear predictor, residuals, sums with noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations

import numpy as np

from fedstat.errors import SecurityError
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Conversation, Side
from fedstat.models.copula_glm.moments.bootstrap import MomentFit
from fedstat.models.copula_glm.moments.protocol import ReleasedMoments
from fedstat.models.copula_glm.score.asked import PHASES, ScoreAsked, ScoreNoise, ScoreTerms
from fedstat.models.copula_glm.score.step import ScoreStep, plan_score, take_step
from fedstat.models.copula_glm.score.steps import FIRST, SECOND
from fedstat.records import to_json
from fedstat.typing import Ints

FAR = 20.0
"""Standard deviations of noise beyond which shares do not fit together."""


def release_score(
    asking: Conversation, released: ReleasedMoments, fit: MomentFit, rho: Fraction, sites: Sequence[str]
) -> Rounds[ScoreStep]:
    """Ask for the sums of scores times residuals at the estimate, of the rows of the release before."""
    moments, n = released.plan, released.n
    clients = tuple(moments.columns)
    widths = tuple(len(moments.design[client]) for client in clients)
    radii = [float(moments.radius(c)) for c in clients]
    asked = plan_score(fit, moments.holder, n, math.sqrt(1.0 + sum(radii)))
    terms = ScoreTerms(clients, widths, moments.holder, asked.mean)
    plan = ScoreNoise(terms, rho)
    slopes = dict(zip(fit.law.design.clients, fit.law.design.blocks, strict=True))
    yield [
        asking.ask(
            client,
            "begin_score",
            to_json(
                ScoreAsked(
                    terms=terms,
                    site=client,
                    columns=moments.design[client],
                    coefficients=tuple(asked.params[1:][slopes[client]].tolist()) if client in slopes else (),
                    middle=asked.middles[client],
                    variance=plan.variances[client],
                )
            ),
        )
        for client in clients
    ]
    if len(clients) > 1:
        for phase in PHASES[terms.mean.degree]:
            yield from _multiply(asking, terms, phase, released.used, sites)
    replies = yield [asking.ask(client, "release_score") for client in clients]
    shares = np.array([next(iter(reply.arrays.values())) for reply in replies])
    sums = np.ldexp(shares.sum(axis=0).astype(np.float64), -terms.sum_places)
    largest = max(map(abs, terms.mean.range)) + max(map(abs, terms.mean.responses))
    if (np.abs(sums) > n * terms.length * largest + FAR * plan.deviation).any():
        raise SecurityError(
            "the shares of the sums of residuals do not fit together: what was dealt, or a share, is wrong; "
            "nothing of it is used"
        )
    # Intercept first, columns in the order of the law: institutions without columns have none.
    places = [np.arange(terms.size)[place] for place in terms.places.values()]
    first = next(p for c, p in zip(clients, places, strict=True) if c == moments.holder)[0]
    order = np.concatenate([[first], *(p[p != first] for p in places)]).astype(np.int64)
    return take_step(fit, asked, sums[order], n, plan.deviation)


def _multiply(
    asking: Conversation, terms: ScoreTerms, phase: str, used: Mapping[str, Ints], sites: Sequence[str]
) -> Rounds[None]:
    """Let every two institutions multiply, entity by entity or summed over all."""
    n = len(next(iter(used.values())))
    groups = 1 if phase == "score" else n
    code = np.zeros(n, dtype=np.int64) if groups == 1 else np.arange(n)

    def side(client: str, which: str) -> Side:
        columns = {"power": 1, "square": 2, "score": terms.width(client) + 1}[phase]
        return Side(client, f"{phase} {which}", slice(0, columns), used[client], code)

    pairs = [(side(a, FIRST), side(b, SECOND)) for a, b in combinations(terms.sites, 2)]
    agreed = f"{terms.agreed}{phase} "
    yield from asking.keep_shares(pairs, sites, groups, terms.mean.bits, agreed, "take_product")
