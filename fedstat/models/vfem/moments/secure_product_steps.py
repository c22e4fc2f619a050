"""Which columns the clients of VFEM multiply securely, and how many entities must stand behind a product."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.door.facts import GroupSums
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Step
from fedstat.federation.rounds.product_steps import (
    ROWS,
    Part,
    check_positions,
    product_steps,
    read_part,
)
from fedstat.models.vfem.blocks.client import Client, client_of
from fedstat.models.vfem.blocks.response import Active
from fedstat.models.vfem.moments.staged_columns import STAGES, staged
from fedstat.typing import Floats, Ints

__all__ = [
    "BLOCK",
    "RESPONSE",
    "ROWS",
    "STEPS",
    "check_positions",
    "columns_of",
    "read_part",
]

BLOCK, RESPONSE = "block", "response"


def columns_of(data: SiteData, state: State, which: str) -> tuple[Floats, Floats | None]:
    """Columns that this client multiplies, at a mean square of one, and their units.

    Parameters
    ----------
    which : str
        "block" or "response": standardised columns. Or one of ``covariance_steps.STAGES``: what the
        covariance of the estimates needs.

    Returns
    -------
    columns : (rows, q) array
    units : (q,) array or None
        The columns that are meant are ``columns * units``; None where they are standardised.
    """
    if which == BLOCK:
        return client_of(data, state).X, None
    if which == RESPONSE and "vfem active" in state:
        active: Active = state.use("vfem active")
        return np.asarray((active.y - active.y.mean()) / active.y.std())[:, None], None
    if which not in STAGES:
        raise MessageError(f"{data.name}: has no columns '{which}' in this session")
    columns = staged(data, state, STAGES.index(which))
    units = np.sqrt(np.mean(columns**2, axis=0))
    units[units == 0.0] = 1.0
    return columns / units, units


def behind_product(data: SiteData, state: State, part: Part, rows: Ints, group: Ints) -> GroupSums:
    """Tell what the products of some rows by pattern rest on; one of the columns may be the response."""
    columns = part.product.columns_a + part.product.columns_b - 1
    if part.columns == RESPONSE:
        return GroupSums(group, columns)
    client: Client = state.look_at("vfem")  # the opened columns are of its rows
    code = np.full(len(client.X), -1, dtype=np.int64)
    code[rows] = group
    return client.groups(code, columns, client.staged.get("weights") if part.columns == STAGES[0] else None)


STEPS: Mapping[str, Step] = product_steps(columns_of, behind_product)
