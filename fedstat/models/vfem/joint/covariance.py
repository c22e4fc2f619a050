"""The covariance of the joint estimates: who is asked what for the observed information of all parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

import numpy as np

from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Side
from fedstat.models.vertical.exchange.protocol import dealing_sites
from fedstat.models.vertical.law.covariance import inverted
from fedstat.models.vertical.law.fit import LawFit
from fedstat.models.vfem.blocks.request import BLOCK
from fedstat.models.vfem.covariance.from_moments import HOW
from fedstat.models.vfem.covariance.psi import Covariance
from fedstat.models.vfem.iteration.glm_protocol import split
from fedstat.models.vfem.joint.derivatives import columns_derivatives, response_information
from fedstat.models.vfem.joint.protocol import JointIteration, boxes_of, is_squares
from fedstat.models.vfem.moments.cross_products import conversation
from fedstat.models.vfem.moments.staged_columns import STAGES
from fedstat.typing import Array, Bools, Floats


def joint_covariance(iteration: JointIteration) -> Rounds[Covariance]:
    """Invert the observed information of (a, beta, mu, Q) at the accepted point.

    Returns that of (a, 0, beta_1, mu_1, ..., beta_K, mu_K, Q).
    """
    curvatures = yield from ask_curvatures(iteration)
    information, law = information_of(iteration, curvatures)
    return Covariance(inverted(law, information, scale=False), HOW)


def information_of(iteration: JointIteration, curvatures: Floats) -> tuple[Floats, LawFit]:
    """Put the information (d, d) together; with the law at the accepted point, which names its parameters."""
    at, edges, seen = iteration.joint, iteration.moves.edges, iteration.seen
    information = response_information(at.law, at.missing, curvatures, seen, edges, iteration.sums)
    information += columns_derivatives(iteration.alone_moments, at.law, edges).information
    moments = iteration.linear.moments
    # The linear predictor has no unit.
    unit = replace(moments, scale=np.append(moments.scale[:-1], 1.0))
    return information, replace(iteration.linear, moments=unit, moves=iteration.moves, point=at.law)


def ask_curvatures(iteration: JointIteration) -> Rounds[Floats]:
    """Sum second derivatives with (1, x, .)(1, x, .)' by pattern, (G, P + 2, P + 2)."""
    lay, places = iteration.layout, iteration.layout.places(1)
    patterns = len(lay.counts)
    wanted = [(one.columns, one.site) for one in iteration.openings]
    each = told_each(iteration)
    (reply,) = yield [
        iteration.ask(lay.active, "joint_curvature", json.dumps(wanted), patterns=patterns, each=each)
    ]
    boxes, h, asks = split(reply.arrays), reply.arrays["h"], []
    for k in lay.clients:
        names, shown = boxes_of(k, wanted, boxes)
        own: Mapping[str, Array] = {} if k == lay.active else {"h": h[lay.rows[k]], **shown}
        code = lay.code[lay.rows[k]]
        asks.append(iteration.ask(k, "joint_information", names, code=code, patterns=patterns, **own))
    replies = yield asks
    out = np.zeros((patterns, lay.p + 2, lay.p + 2))
    out[:, 0, 0], out[:, 0, -1], out[:, -1, -1] = reply.arrays["sums"].T[:3]
    for k, one in zip(lay.clients, replies, strict=True):
        here, grams, cross = places[k], one.arrays["grams"], one.arrays["cross"]
        out[:, 0, here], out[:, here, here] = grams[:, 0, 1:], grams[:, 1:, 1:]
        out[:, here, -1] = cross[:, 1:]
    yield from multiply_weighted(iteration, out)
    upper = np.triu(out)
    return upper + np.triu(out, 1).transpose(0, 2, 1)


def told_each(iteration: JointIteration) -> Bools:
    """Tell in which patterns curvatures leave one by one, (G,).

    Two institutions or more see these, or one alone so few that sums of squares would tell as much.
    """
    lay = iteration.layout
    each: Bools = (~lay.missing).sum(axis=1) > 1
    squares = {one.columns.partition(" ")[2] for one in iteration.openings if is_squares(one.columns)}
    for one in iteration.openings:
        number = one.columns.partition(" ")[2]
        if one.columns.startswith(BLOCK) and number not in squares:
            each[int(number)] = True
    return each


def multiply_weighted(iteration: JointIteration, out: Floats) -> Rounds[None]:
    """Enter products of two institutions' weighted columns by pattern above the diagonal."""
    lay, seen = iteration.layout, ~iteration.layout.missing
    together, places = seen.sum(axis=1) > 1, lay.places(1)
    sides = []
    for k, rows in lay.rows.items():
        code = np.where(together[lay.code[rows]], lay.code[rows], -1)
        sides.append(Side(k, STAGES[0], places[k], rows, code))
    pairs = [
        (sides[j], sides[k]) for j, k in combinations(range(len(sides)), 2) if (seen[:, j] & seen[:, k]).any()
    ]
    asking = conversation(iteration.session, iteration.at)
    multiplied = yield from asking.multiply(pairs, dealing_sites(lay), len(seen), lay.n)
    for one in multiplied:
        out[:, one.a.place, one.b.place] = one.products
