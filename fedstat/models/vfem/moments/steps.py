"""What a client computes in the one-round exchange: sums by missing pattern.

Columns are those of the client's standardised block, or the standardised response at its holder. Products of
two clients' columns are the matter of :mod:`fedstat.models.vfem.moments.secure_product_steps`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.door.facts import Entities, GroupSums, LeftOut
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.models.vfem.blocks.client import client_of, stage_client
from fedstat.models.vfem.blocks.response import Active
from fedstat.models.vfem.moments.secure_product_steps import (
    RESPONSE,
    ROWS,
    check_positions,
    columns_of,
)
from fedstat.typing import Array, Bools, Floats, Ints


def stage_block(
    data: SiteData, state: State, keep: Bools, rows: Ints, n: Array, filled: Array
) -> dict[str, Array]:
    """Standardise the block; nothing leaves. Arguments as for ``start``."""
    stage_client(data, state, keep, rows, int(n), bool(filled), memory=0)
    return {}


def pattern_sums(
    data: SiteData, state: State, code: Ints, groups: Array, response: Array
) -> dict[str, Array]:
    """Sum the client's columns and their products by pattern.

    Parameters
    ----------
    code : (n_k,) array of int
        Released pattern of each of its entities, -1 for those that count as missing here.
    groups : int
        Number of patterns.
    response : bool
        Whether to sum the response, and its products with the block if the client has one, instead.

    Returns
    -------
    dict
        ``sums`` (G, q), ``grams`` (G, q, q), ``units`` (2, q): mean and standard deviation of the columns;
        with `response` the last column is the response.
    """
    G = int(groups)
    X, units = _own_columns(data, state, bool(response))
    check_lengths(data.name, code=(code, len(X)))
    if len(code) and code.max() >= G:
        raise MessageError(f"{data.name}: array 'code' names patterns that there are not")
    if response:
        state.tell(GroupSums(code, 0))
    else:
        state.tell(client_of(data, state).groups(code, X.shape[1]))
    state.tell(LeftOut(int(np.count_nonzero(code < 0))))
    sums, grams = np.zeros((G, X.shape[1])), np.zeros((G, X.shape[1], X.shape[1]))
    for g in np.unique(code[code >= 0]):
        rows = X[code == g]
        sums[g], grams[g] = rows.sum(axis=0), rows.T @ rows
    return {"sums": sums, "grams": grams, "units": units}


def _own_columns(data: SiteData, state: State, response: bool) -> tuple[Floats, Floats]:
    if not response:
        client = client_of(data, state)
        return client.X, np.array([client.shift, client.scale])
    active: Active = state.use("vfem active")
    return columns_of(data, state, RESPONSE)[0], np.array([[active.y.mean()], [active.y.std()]])


def sum_with_response(
    data: SiteData, state: State, code: Ints, groups: Array, rows: Ints
) -> dict[str, Array]:
    """Sum products of the response and the block of one institution that holds both.

    Parameters
    ----------
    code : (n_k,) array of int
        Released pattern of each entity of the block, -1 for those left out.
    groups : int
    rows : (n_k,) array of int
        Their positions among the entities of the response.
    """
    client, y = client_of(data, state), columns_of(data, state, RESPONSE)[0][:, 0]
    X = client.X
    check_lengths(data.name, code=(code, len(X)), rows=(rows, len(X)))
    check_positions(data.name, rows, len(y))
    state.tell(client.groups(code, X.shape[1]))
    products = np.zeros((int(groups), X.shape[1]))
    for g in np.unique(code[code >= 0]):
        here = code == g
        products[g] = X[here].T @ y[rows[here]]
    return {"products": products}


CODE = Declared("presence", "released missing pattern of each of the client's entities", dtype="int64")
GROUPS = Declared("control", "number of missing patterns", 0)
BY_PATTERN = (Entities, GroupSums, LeftOut)
STEPS: Mapping[str, Step] = {
    "stage_block": Step(
        stage_block,
        {
            "keep": Declared("presence", "which of the client's entities take part", dtype="bool"),
            "rows": Declared("presence", "positions of its entities among those of the fit", dtype="int64"),
            "n": Declared("control", "number of entities", 0),
            "filled": Declared("control", "whether missing blocks count as their mean", 0),
        },
    ),
    "pattern_sums": Step(
        pattern_sums,
        {"code": CODE, "groups": GROUPS, "response": Declared("control", "whether the response is meant", 0)},
        {
            "sums": Declared("aggregate", "sums of the columns by missing pattern", 2, behind=BY_PATTERN),
            "grams": Declared(
                "aggregate", "sums of products of the columns by missing pattern", 3, behind=BY_PATTERN
            ),
            "units": Declared(
                "aggregate", "means and standard deviations of the columns", 2, behind=BY_PATTERN
            ),
        },
    ),
    "sum_with_response": Step(
        sum_with_response,
        {"code": CODE, "groups": GROUPS, "rows": ROWS},
        {
            "products": Declared(
                "aggregate",
                "sums of products with the response by missing pattern",
                2,
                behind=(Entities, GroupSums),
            )
        },
    ),
}
