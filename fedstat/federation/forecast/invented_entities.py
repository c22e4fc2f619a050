"""Sites with entities to predict, which code none of them: every column that is asked for is zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedstat.federation.design.block import CodedBlock
from fedstat.federation.design.by_columns import FAMILY, STEPS, CodingQuestion, OpenedBlock
from fedstat.federation.design.spec import BlockSpec
from fedstat.federation.door.facts import Entities
from fedstat.federation.door.owner.policy import Policy
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.forecast.dry_site import DrySite
from fedstat.records import from_json, to_json
from fedstat.typing import Array, Ints


def invent_entities(rows: Mapping[str, Ints], policies: Mapping[str, Policy]) -> dict[str, DrySite]:
    """Make sites whose records, at these positions among all entities, all have every column."""
    runs = {"open_new_block": _open_block, "open_response": _open_response}
    instead = {(FAMILY, name): replace(STEPS[name], run=run) for name, run in runs.items()}
    return {
        name: DrySite(name, policy, len(rows[name]), instead, rows[name]) for name, policy in policies.items()
    }


def _open_block(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    spec = BlockSpec.from_json(from_json(CodingQuestion, text, "").spec)
    n, p = data.table.n_rows, len(spec.names)
    # As many as there can be: who has every column is not known before.
    seen = np.ones(n, dtype=np.bool_)
    state.tell(Entities(n))
    state.keep("block", CodedBlock(spec, seen, np.zeros((n, p)), 0), n, columns=p)
    return {"seen": seen}, to_json(OpenedBlock(spec.names, spec.term_names, spec.levels, 0))


def _open_response(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    n = data.table.n_rows
    state.keep("response", np.arange(n, dtype=np.float64), n)
    return {"has": np.ones(n, dtype=np.bool_)}, ""
