"""Which columns the clients of VFEM multiply securely, and how many entities must stand behind a product."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedstat.errors import MessageError, PolicyError
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Step
from fedstat.federation.rounds.product_steps import (
    ROWS,
    Part,
    check_positions,
    product_steps,
    read_part,
)
from fedstat.models.vertical.merges import least_entities
from fedstat.models.vfem.blocks.client import client_of
from fedstat.models.vfem.blocks.response import Active
from fedstat.models.vfem.moments.staged_columns import STAGES, staged
from fedstat.typing import Floats, Ints

__all__ = [
    "BLOCK",
    "RESPONSE",
    "ROWS",
    "STEPS",
    "check_patterns",
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


def check_patterns(data: SiteData, code: Ints, columns: int) -> None:
    """Require enough entities of every pattern that is released.

    Parameters
    ----------
    code : int array
        Released patterns; negative ones are not.
    columns : int
        Covariates that are seen there, as far as the site knows; see
        :mod:`fedstat.models.vertical.merges`.

    Raises
    ------
    PolicyError
        A pattern has fewer than the owner wants behind a sum, or than hide the rows behind it.
    """
    counts = np.unique(code[code >= 0], return_counts=True)[1]
    least = least_entities(columns, data.min_count)
    if len(counts) and counts.min() < least:
        raise PolicyError(
            f"{data.name}: its policy (minimum count) wants at least {data.min_count} entities of every "
            f"missing pattern that is released, and a Gram matrix of {columns} columns at least {least}; a "
            "pattern has fewer. Raise the partition's min_count"
        )


def check_product(data: SiteData, state: State, part: Part, group: Ints) -> None:
    """Require enough entities of every pattern; one of the columns may be the response."""
    check_patterns(data, group, part.product.columns_a + part.product.columns_b - 1)


STEPS: Mapping[str, Step] = product_steps(columns_of, check_product)
