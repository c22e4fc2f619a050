"""Sums over entities of products of two clients' columns: three ways to get them.

Each way is a protocol with one signature, named in ``CROSS_PRODUCTS``. A secure product between two
clients is one more entry there; what asks for cross-products need not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, TypeAlias

import numpy as np

from fedstat.federation.engine import Rounds
from fedstat.models.vfem.covariance_steps import SKETCH_KINDS, STAGES
from fedstat.models.vfem.layout import Layout
from fedstat.models.vfem.protocol import ask
from fedstat.typing import Floats


@dataclass(frozen=True, slots=True)
class CrossOptions:
    """How cross-products between clients are had; see :meth:`fedstat.VFEMRegression.fit`."""

    how: Literal["sketch", "exact", "none"] = "sketch"
    sketch: Literal["structured", "gaussian"] = "structured"
    size: int = 20_000


@dataclass(frozen=True, slots=True)
class CrossProducts:
    """Products of the staged columns of every pair of clients.

    Parameters
    ----------
    blocks : mapping of (int, int) to array
        X_j'X_k for clients number j < k.
    how : str
    size : int
        Rows of the sketch; 0 without one.
    error : float
        Root mean squared error of an entry, relative to the lengths of the two columns, as measured
        on the products within clients.
    """

    blocks: Mapping[tuple[int, int], Floats]
    how: str
    size: int = 0
    error: float = 0.0


Ask: TypeAlias = Callable[[Layout, str, str, CrossOptions], Rounds[CrossProducts]]


def no_products(layout: Layout, session: str, stage: str, options: CrossOptions) -> Rounds[CrossProducts]:
    """Leave cross-products at zero, their expectation under the model."""
    yield from ()
    return CrossProducts({}, "none")


def sketched_products(
    layout: Layout, session: str, stage: str, options: CrossOptions
) -> Rounds[CrossProducts]:
    """Multiply random projections that the clients draw from a seed which only they share.

    TWFL Algorithm 2, mended: the clients must use the same projection; independent ones would
    make every cross-product zero on average.
    """
    replies = yield [
        ask(
            k,
            "sketch",
            session,
            stage=STAGES.index(stage),
            size=options.size,
            kind=SKETCH_KINDS.index(options.sketch),
        )
        for k in layout.clients
    ]
    sketches = [reply.arrays["sketch"] for reply in replies]
    error = float(np.sqrt(np.mean([float(reply.arrays["error"]) ** 2 for reply in replies])))
    pairs = combinations(range(len(sketches)), 2)
    blocks = {(j, k): sketches[j].T @ sketches[k] for j, k in pairs}
    return CrossProducts(blocks, "sketch", len(sketches[0]), error)


def exchanged_products(
    layout: Layout, session: str, stage: str, options: CrossOptions
) -> Rounds[CrossProducts]:
    """Hand each client's columns to the clients after it, which multiply: it discloses them."""
    number = STAGES.index(stage)
    replies = yield [ask(k, "release_columns", session, stage=number) for k in layout.clients[:-1]]
    columns = [reply.arrays["columns"] for reply in replies]
    pairs = list(combinations(range(len(layout.clients)), 2))
    products = yield [
        ask(
            layout.clients[k],
            "multiply_columns",
            session,
            stage=number,
            columns=columns[j],
            rows=layout.rows[layout.clients[j]],
        )
        for j, k in pairs
    ]
    blocks = {pair: reply.arrays["products"] for pair, reply in zip(pairs, products, strict=True)}
    return CrossProducts(blocks, "exact")


CROSS_PRODUCTS: Mapping[str, Ask] = {
    "none": no_products,
    "sketch": sketched_products,
    "exact": exchanged_products,
}


def cross_products(layout: Layout, session: str, stage: str, options: CrossOptions) -> Rounds[CrossProducts]:
    """Obtain X_j'X_k for every pair of clients, as `options` say; a single client needs none."""
    how = options.how if len(layout.clients) > 1 else "none"
    return (yield from CROSS_PRODUCTS[how](layout, session, stage, options))
