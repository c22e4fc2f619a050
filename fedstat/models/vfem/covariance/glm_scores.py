"""Products of effective scores where the response is not normal, as a protocol: who is asked what.

Where a fit sends columns openly, or nobody can deal, institutions are told derivatives of the log-likelihood;
elsewhere these stay at the response holder, and all products are secure
(:mod:`fedstat.models.vfem.covariance.glm_score_steps`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.key_agreement import agree_keys
from fedstat.federation.rounds.products import Side
from fedstat.inference.covariance import delta_method, nearest_psd
from fedstat.models.vertical.exchange.protocol import dealing_sites
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.merges import least_entities
from fedstat.models.vfem.covariance.glm_score_steps import (
    BESIDE,
    OF_RESPONSE,
    OF_SQUARES,
    PARTS,
    SHARED,
    SQUARES,
    TIMES,
)
from fedstat.models.vfem.covariance.information import (
    Eliminated,
    InformationSums,
    assemble,
    effective_score_map,
    score_of_spreads,
)
from fedstat.models.vfem.iteration.glm_protocol import QuasiNewtonIteration, split
from fedstat.models.vfem.moments.cross_products import (
    CrossOptions,
    StagedColumns,
    conversation,
    cross_products,
)
from fedstat.typing import Floats

STACKED = max(TIMES.values())


def glm_score_products(
    iteration: QuasiNewtonIteration, options: CrossOptions, sums: InformationSums, eliminated: Eliminated
) -> Rounds[Floats]:
    """Sum over entities of the products of the effective scores of psi, and of the t_k given psi."""
    openly = iteration.dealers is None or options.how == "exact"
    whole = yield from (ask_openly if openly else ask_secretly)(iteration, options)
    scores = np.vstack([effective_score_map(sums, eliminated.Q), score_of_spreads(sums, eliminated.share)])
    return delta_method(nearest_psd(whole)[0], scores)


def ask_openly(iteration: QuasiNewtonIteration, options: CrossOptions) -> Rounds[Floats]:
    """Tell every institution the derivatives of its entities."""
    lay = iteration.layout
    (reply,) = yield [iteration.ask(lay.active, "glm_derivatives_openly")]
    derivatives = reply.arrays["derivatives"]
    replies = yield [
        iteration.ask(k, "glm_scores_openly")
        if k == lay.active
        else iteration.ask(k, "glm_scores_openly", derivatives=derivatives[:, lay.rows[k]])
        for k in lay.clients
    ]
    own = yield from ask_response(iteration, [])
    within = [reply.arrays["gram"] for reply in replies]
    staged = StagedColumns("scores", tuple(len(gram) for gram in within))
    products = yield from cross_products(lay, iteration.session, staged, options)
    K = len(within)
    last = {(k, K): reply.arrays["with_response"] for k, reply in enumerate(replies)}
    return assemble([*within, own["gram"][: 2 + K, : 2 + K]], {**products.blocks, **last})


def ask_response(iteration: QuasiNewtonIteration, told: Sequence[str]) -> Rounds[dict[str, Floats]]:
    """Ask the response holder for products of its own, and what hides derivatives from some institutions."""
    lay = iteration.layout
    text = json.dumps([list(lay.clients), list(told)])
    (reply,) = yield [iteration.ask(lay.active, "glm_response_scores", text, missing=lay.missing)]
    return dict(reply.arrays)


def ask_secretly(iteration: QuasiNewtonIteration, options: CrossOptions) -> Rounds[Floats]:
    """Multiply in secret: nobody sees more of the derivatives than sums."""
    lay, sites, active = iteration.layout, dealing_sites(iteration.layout), iteration.layout.active
    remote, K = [k for k in lay.clients if k != active], len(lay.clients)
    widths = {k: 2 * p + 1 for k, p in zip(lay.clients, lay.sizes, strict=True)}
    yield from agree_keys(sites, iteration.session)
    own = yield from ask_response(iteration, remote)
    boxes = dict(zip(remote, split(own), strict=True))
    yield [
        iteration.ask(k, "glm_scores", json.dumps([active, remote[:i], k == remote[-1]]), shown=boxes[k])
        for i, k in enumerate(remote)
    ]
    q = len(own["gram"])
    pairs: list[tuple[Side, Side]] = []
    for k in remote:
        squares = widths[k] * (widths[k] + 1) // 2
        if len(lay.rows[k]) < least_entities(squares, options.min_count):
            raise EstimationError(
                f"cov_type='robust': {len(lay.rows[k])} entities of '{k}' are too few for products of the "
                f"scores of its {widths[k] // 2} columns; use cov_type='observed', or fewer columns"
            )
        pairs.append((side(lay, active, OF_SQUARES, 1), side(lay, k, SQUARES, squares)))
        pairs.append((side(lay, active, f"{OF_RESPONSE}:{k}", q), side(lay, k, PARTS, widths[k])))
    together = [
        (j, k)
        for j, k in combinations(remote, 2)
        if len(np.intersect1d(lay.rows[j], lay.rows[k], assume_unique=True))
        >= least_entities(widths[j] + widths[k] - 1, options.min_count)
    ]
    for j, k in together:
        pairs.append((side(lay, j, SHARED, widths[j]), side(lay, k, f"{BESIDE}:{j}", widths[k])))
    asking = conversation(iteration.session, options.at)
    found = yield from asking.multiply(pairs, sites, 1, STACKED * lay.n)
    products = [one.products[0] for one in found]
    within, between = dict[str, Floats](), dict[tuple[int, int], Floats]()
    place = {k: j for j, k in enumerate(lay.clients)}
    if active in place:
        within[active] = own["gram"][2 + K :, 2 + K :]
        between[place[active], K] = own["gram"][2 + K :, : 2 + K]
    for i, k in enumerate(remote):
        within[k] = symmetric(products[2 * i][0], widths[k])
        with_response = products[2 * i + 1].T
        between[place[k], K] = with_response[:, : 2 + K]
        if active in place:
            first, second = sorted((place[active], place[k]))
            block = with_response[:, 2 + K :]
            between[first, second] = block if first == place[k] else block.T
    for (j, k), one in zip(together, products[2 * len(remote) :], strict=True):
        between[place[j], place[k]] = one
    return assemble([*[within[k] for k in lay.clients], own["gram"][: 2 + K, : 2 + K]], between)


def side(layout: Layout, site: str, columns: str, width: int) -> Side:
    """Say of which entities stacked columns are: one position for each time that an entity stands there."""
    own = np.arange(layout.n) if columns.startswith((OF_RESPONSE, OF_SQUARES)) else layout.rows[site]
    times = TIMES[columns.partition(":")[0]]
    rows = np.concatenate([own + layout.n * place for place in range(times)])
    return Side(site, columns, slice(0, width), rows, np.zeros_like(rows))


def symmetric(upper: Floats, width: int) -> Floats:
    """Return the symmetric matrix with this upper triangle."""
    out = np.zeros((width, width))
    out[np.triu_indices(width)] = upper
    return np.asarray(out + np.triu(out, 1).T)
