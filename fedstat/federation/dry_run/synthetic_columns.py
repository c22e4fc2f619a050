"""Synthetic vertical designs for a dry run: drawn blocks of the agreed columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedstat.codec import from_json, to_json
from fedstat.federation.design.block import CodedBlock
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.design.vertical_design import (
    FAMILY,
    BlockDesign,
    CodingRequest,
    Design,
    FoldsRequest,
    OpenedBlock,
)
from fedstat.federation.disclosure.facts import ClusterCounts, EntityCount
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.dry_run.execution import DrySite
from fedstat.federation.dry_run.synthetic_rows import draw_effects, draw_response, synthetic_generator
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Sites that hold different columns, with synthetic blocks of the agreed design.


def synthetic_column_sites(
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
    rng = synthetic_generator()
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
        seen = np.isin(rows[block.site], design.entities[block.rows])
        opened = synthetic_block(block, X, seen)
        states[block.site].keep("block", opened, opened.fewest, columns=p)
    response = np.full(len(design.response_keep), np.nan)
    response[design.response_keep] = draw_response(distribution, predictor, rng)
    states[design.active].keep("response", response, design.n)
    for holder, items in (kept or {}).items():
        for item, value in items.items():
            states[holder].keep(item, value)
    instead = {(FAMILY, "draw_folds"): replace(FAMILIES[FAMILY]["draw_folds"], run=_draw_synthetic_folds)}
    sites = {
        name: DrySite(name, policy, len(rows[name]), instead, rows[name]) for name, policy in policies.items()
    }
    for name, site in sites.items():
        site.open(session, states[name])
    return sites


def _draw_synthetic_folds(
    data: SiteData, state: State, text: str, use: Bools
) -> tuple[dict[str, Array], str]:
    """Draw folds of entities: how many groups there are is not known in advance."""
    m = int(use.sum())
    state.report(EntityCount(m))
    state.reported.add(ClusterCounts)
    return {"fold": np.arange(m) % float(from_json(FoldsRequest, text, "").folds)}, ""


def synthetic_block(block: BlockDesign, X: Floats, seen: Bools) -> CodedBlock:
    """Make a block of (n_seen, p) drawn columns; of their coding the names are known."""
    spec = BlockSpec(block.site, names=block.names, term_names=block.term_names)
    return CodedBlock(spec, seen, X, block.n_partial)


# ----------------------------------------------------------------------------------------------------
# Sites with entities to predict, without coded columns: every requested column is zero.


def synthetic_entity_sites(rows: Mapping[str, Ints], policies: Mapping[str, Policy]) -> dict[str, DrySite]:
    """Make sites whose records, at these positions among all entities, all have every column."""
    runs = {"open_new_block": _open_synthetic_block, "open_response": _open_synthetic_response}
    instead = {(FAMILY, name): replace(FAMILIES[FAMILY][name], run=run) for name, run in runs.items()}
    return {
        name: DrySite(name, policy, len(rows[name]), instead, rows[name]) for name, policy in policies.items()
    }


def _open_synthetic_block(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    spec = BlockSpec.from_json(from_json(CodingRequest, text, "").spec)
    n, p = data.table.n_rows, len(spec.names)
    # As many as there can be: who has every column is not known before.
    seen = np.ones(n, dtype=np.bool_)
    state.report(EntityCount(n))
    state.keep("block", CodedBlock(spec, seen, np.zeros((n, p)), 0), n, columns=p)
    return {"seen": seen}, to_json(OpenedBlock(spec.names, spec.term_names, spec.levels, 0))


def _open_synthetic_response(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    n = data.table.n_rows
    state.keep("response", np.arange(n, dtype=np.float64), n)
    return {"has": np.ones(n, dtype=np.bool_)}, ""
