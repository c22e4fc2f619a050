"""Sites that hold different columns, with invented blocks of the agreed design."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedstat.federation.design.block import CodedBlock
from fedstat.federation.design.by_columns import BlockDesign, Design
from fedstat.federation.design.spec import BlockSpec
from fedstat.federation.door.owner.policy import Policy
from fedstat.federation.door.state import State
from fedstat.federation.forecast.dry_site import DrySite
from fedstat.federation.forecast.invention import draw_effects, draw_response, generator
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.typing import Bools, Floats, Ints


def invent_columns(
    design: Design,
    rows: Mapping[str, Ints],
    policies: Mapping[str, Policy],
    distribution: DistributionSpec,
    session: str,
    kept: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, DrySite]:
    """Let every site have opened a block of the agreed columns and entities, and one of them the response.

    `rows` are the positions of each site's records among all entities, `session` is that of the model; what a
    family has `kept` besides is by site and name.
    """
    rng = generator()
    states = {name: State(name) for name in policies}
    effects = draw_effects(sum(len(block.names) for block in design.blocks))
    predictor, first = np.zeros(design.n), 0
    for block in design.blocks:
        p = len(block.names)
        X = rng.normal(size=(len(block.rows), p))
        # Presence is real, and only numbers are drawn: shapes and counts behind sums follow from presence.
        X = X if block.has is None else np.where(block.has, X, np.nan)
        predictor[block.rows] += np.nan_to_num(X) @ effects[first : first + p]
        first += p
        seen = np.isin(rows[block.client], design.entities[block.rows])
        opened = opened_block(block, X, seen)
        states[block.client].keep("block", opened, opened.fewest, columns=p)
    response = np.full(len(design.response_keep), np.nan)
    response[design.response_keep] = draw_response(distribution, predictor, rng)
    states[design.active].keep("response", response, design.n)
    for holder, items in (kept or {}).items():
        for item, value in items.items():
            states[holder].keep(item, value)
    sites = {
        name: DrySite(name, policy, len(rows[name]), entities=rows[name]) for name, policy in policies.items()
    }
    for name, site in sites.items():
        site.open(session, states[name])
    return sites


def opened_block(block: BlockDesign, X: Floats, seen: Bools) -> CodedBlock:
    """Make a block of (n_seen, p) drawn columns; of their coding the names are known."""
    spec = BlockSpec(block.client, names=block.names, term_names=block.term_names)
    return CodedBlock(spec, seen, X, block.n_partial)
