"""What a client computes in the one-round exchange: sums by missing pattern, and its part of secure products.

Columns are those of the client's standardised block, or the standardised response at its holder. A product of
two clients' columns runs as :mod:`fedstat.federation.secure.product` describes; what one client sends the
other, and what a dealing client sends both, is sealed against the coordinator who carries it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstat.errors import MessageError, PolicyError
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.federation.secure import product as secure
from fedstat.federation.secure.boxes import Channel
from fedstat.federation.secure.steps import keys_of
from fedstat.federation.site import SiteData, State
from fedstat.models.vfem.response_steps import Active
from fedstat.models.vfem.steps import client_of, stage_client
from fedstat.typing import Array, Bools, Floats, Ints

BLOCK, RESPONSE = "block", "response"


@dataclass(frozen=True, slots=True)
class Part:
    """One side of a secure product, as the coordinator describes it to a client.

    Parameters
    ----------
    number : str
        Name of the product in this session.
    product : MatrixProduct
    bits : int
        Fractional bits.
    columns : {"block", "response"}
        What this client multiplies.
    first : bool
        Whether it is the product's client A.
    peer, dealer : str
        The other client; who deals, empty for the coordinator.
    """

    number: str
    product: secure.MatrixProduct
    bits: int
    columns: str
    first: bool
    peer: str
    dealer: str


def read_part(text: str) -> Part:
    """Read the description of a product, as if a stranger had written it."""
    try:
        content: dict[str, Any] = json.loads(text)
        return Part(**(content | {"product": secure.MatrixProduct(**content["product"])}))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise MessageError("the description of a product is not whole") from error


def stage_block(
    data: SiteData, state: State, keep: Bools, rows: Ints, n: Array, filled: Array
) -> dict[str, Array]:
    """Standardise the block; nothing leaves. Arguments as for ``start``."""
    stage_client(data, state, keep, rows, int(n), bool(filled), memory=0)
    return {}


def columns_of(data: SiteData, state: State, which: str) -> Floats:
    """Standardised columns of this client: (rows, p)."""
    if which == BLOCK:
        return client_of(data, state).X
    if which != RESPONSE or "vfem active" not in state:
        raise MessageError(f"{data.name}: has no columns '{which}' in this session")
    active: Active = state.use("vfem active")
    return np.asarray((active.y - active.y.mean()) / active.y.std())[:, None]


def check_patterns(data: SiteData, code: Ints) -> None:
    """Require enough entities of every pattern that is released.

    Raises
    ------
    PolicyError
        A pattern has fewer than the owner wants behind a sum.
    """
    counts = np.unique(code[code >= 0], return_counts=True)[1]
    if len(counts) and counts.min() < data.min_count:
        raise PolicyError(
            f"{data.name}: its policy (minimum count) wants at least {data.min_count} entities of every "
            "missing pattern that is released; a pattern has fewer. Raise the partition's min_count"
        )


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
    check_patterns(data, code)
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
    return columns_of(data, state, RESPONSE), np.array([[active.y.mean()], [active.y.std()]])


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
    X, y = columns_of(data, state, BLOCK), columns_of(data, state, RESPONSE)[:, 0]
    check_lengths(data.name, code=(code, len(X)), rows=(rows, len(X)))
    _check_positions(data.name, rows, len(y))
    check_patterns(data, code)
    products = np.zeros((int(groups), X.shape[1]))
    for g in np.unique(code[code >= 0]):
        here = code == g
        products[g] = X[here].T @ y[rows[here]]
    return {"products": products}


def _check_positions(name: str, rows: Ints, n: int) -> None:
    if len(rows) and (rows.min() < 0 or rows.max() >= n):
        raise MessageError(f"{name}: array 'rows' must lie between 0 and {n - 1}")


def deal_product(data: SiteData, state: State, text: str, group: Ints) -> tuple[dict[str, Array], str]:
    """Deal a multiplication triple to two other clients, sealed."""
    part = read_part(text)
    keys = keys_of(data, state)
    seed_a, seed_b = secure.new_seed(), secure.new_seed()
    Z_b = secure.deal(part.product, seed_a, seed_b, group)
    a, b = (Channel(keys, c, f"deal {part.number}") for c in (part.product.client_a, part.product.client_b))
    return {"for_a": as_bytes(a.seal(seed_a)), "for_b": as_bytes(b.seal(seed_b + Z_b.tobytes()))}, ""


def open_product(
    data: SiteData, state: State, text: str, rows: Ints, dealt: Array
) -> tuple[dict[str, Array], str]:
    """Send the other client this client's columns less a random table.

    Parameters
    ----------
    text : str
        A :class:`Part`.
    rows : (n,) array of int
        Which of its rows take part, in the agreed order.
    dealt : array of uint8
        The dealer's seed (and, at client B, its share of the triple): sealed by a dealing client, plain
        from the coordinator.
    """
    part, keys = read_part(text), keys_of(data, state)
    X = columns_of(data, state, part.columns)
    _check_positions(data.name, rows, len(X))
    material = dealt.tobytes()
    if part.dealer:
        material = Channel(keys, part.dealer, f"deal {part.number}").open(material)
    seed, triple = material[: secure.SEED_BYTES], material[secure.SEED_BYTES :]
    Z_b = np.frombuffer(triple, dtype=np.int64).copy()
    encoded = secure.encode(X[rows], part.bits, data.name)
    opened = (secure.open_a if part.first else secure.open_b)(part.product, seed, encoded)
    channel = Channel(keys, part.peer, f"open {part.number}")
    mask = keys.secret(part.peer, f"mask {part.number}")
    state.keep(f"product {part.number}", (part, seed, Z_b, encoded, channel, mask))
    return {"opened": as_bytes(channel.seal(opened.tobytes()))}, ""


def share_product(
    data: SiteData, state: State, text: str, group: Ints, opened: Array
) -> tuple[dict[str, Array], str]:
    """Release this client's share of the product by pattern; only the sum of both shares means anything.

    Parameters
    ----------
    text : str
        Number of the product.
    group : (n,) array of int
        Pattern of each row that takes part.
    opened : array of uint8
        What the other client opened, sealed.
    """
    name = f"product {json.loads(text)}"
    if name not in state:
        raise MessageError(f"{data.name}: this product was not opened here")
    part, seed, Z_b, encoded, channel, mask = state.use(name)
    state.rest_on(len(group))
    check_patterns(data, group)
    shape = part.product.shape_b if part.first else part.product.shape_a
    other = np.frombuffer(channel.open(opened.tobytes()), dtype=np.int64).reshape(shape).copy()
    if part.first:
        share = secure.share_a(part.product, seed, encoded, other, group, mask)
    else:
        share = secure.share_b(part.product, seed, other, Z_b.reshape(part.product.shape), group, mask)
    state.forget(name)
    return {"share": share}, ""


def as_bytes(message: bytes) -> Array:
    """Bytes as an array that messages carry."""
    return np.frombuffer(message, dtype=np.uint8)


CODE = Declared("presence", "released missing pattern of each of the client's entities", dtype="int64")
GROUPS = Declared("control", "number of missing patterns", 0)
PART = Declared("control", "shape and names of a product of two institutions' columns")
GROUP = Declared("presence", "missing pattern of the entities that both have", dtype="int64")
ROWS = Declared("presence", "which of its entities both have", dtype="int64")
SEALED = Declared("sealed", "columns less a random table, for one other institution", dtype="uint8")
DEALT = Declared("sealed", "seed and share of a random triple, for one institution", dtype="uint8")
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
            "sums": Declared("aggregate", "sums of the columns by missing pattern", 2),
            "grams": Declared("aggregate", "sums of products of the columns by missing pattern", 3),
            "units": Declared("aggregate", "means and standard deviations of the columns", 2),
        },
    ),
    "sum_with_response": Step(
        sum_with_response,
        {"code": CODE, "groups": GROUPS, "rows": ROWS},
        {"products": Declared("aggregate", "sums of products with the response by missing pattern", 2)},
    ),
    "deal_product": Step(deal_product, {"group": GROUP}, {"for_a": DEALT, "for_b": DEALT}, PART),
    "open_product": Step(open_product, {"rows": ROWS, "dealt": DEALT}, {"opened": SEALED}, PART),
    "share_product": Step(
        share_product,
        {"group": GROUP, "opened": SEALED},
        {"share": Declared("masked share", "share of the products by pattern: random but for the sum", 3)},
        Declared("control", "which product"),
    ),
}
