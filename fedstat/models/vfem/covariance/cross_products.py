"""The protocol for sums of products of two sites' columns: four methods.

Each way is a protocol with one signature, named in ``CROSS_PRODUCTS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, TypeAlias

import numpy as np

from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import ProductOperand, SecureProductSession
from fedstat.models.vertical.exchange.protocol import dealing_sites
from fedstat.models.vertical.exchange.steps import BLOCK
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.pattern_merging import min_entities
from fedstat.models.vfem.covariance.cross_product_steps import SKETCH_KINDS, STAGES
from fedstat.models.vfem.iteration.messages import FAMILY, vfem_request
from fedstat.typing import Floats

ALTERNATIVES = ", or exchange='iterative' with cov_type='expected' or fs.Iteration(cross_products='sketch')"


@dataclass(frozen=True, slots=True)
class CrossProductOptions:
    """How cross-products between institutions are had; see :meth:`fedstat.VFEMRegression.fit`.

    A sketch has `size` rows; a secure product rests on `min_count` entities at least, and where the
    coordinator sits, `at`, matters for who may deal.
    """

    how: Literal["secure", "sketch", "exact", "none"] = "secure"
    sketch: Literal["structured", "gaussian"] = "structured"
    size: int = 20_000
    at: str | None = None
    min_count: int = 5


@dataclass(frozen=True, slots=True)
class ProductRequest:
    """What products are wanted of: one of ``STAGES``, and how many columns each institution has of it."""

    stage: str
    widths: tuple[int, ...]

    @property
    def number(self) -> int:
        """The stage as sites are told it."""
        return STAGES.index(self.stage)


@dataclass(frozen=True, slots=True)
class CrossProducts:
    """Products X_j'X_k of the staged columns of every pair of sites number j < k, and how they were had.

    `size` are the rows of a sketch, 0 without one, and `error` the root mean squared error of an entry,
    relative to the lengths of the two columns, as measured on the products within sites. `dealers` dealt
    for secure products; `left_out` counts pairs that were not asked, since too few entities have both.
    """

    blocks: Mapping[tuple[int, int], Floats]
    how: str
    size: int = 0
    error: float = 0.0
    dealers: str = ""
    left_out: int = 0


ProductsProtocol: TypeAlias = Callable[
    [Layout, str, ProductRequest, CrossProductOptions], FitProtocol[CrossProducts]
]


def no_products(
    layout: Layout, session: str, columns: ProductRequest, options: CrossProductOptions
) -> FitProtocol[CrossProducts]:
    """Leave cross-products at zero, their expectation under the model."""
    yield from ()
    return CrossProducts({}, "none")


def multiplied_products(
    layout: Layout, session: str, columns: ProductRequest, options: CrossProductOptions
) -> FitProtocol[CrossProducts]:
    """Multiply in secret: exact, and neither institution nor the coordinator sees anything but the products.

    Rows are weighted by their institution, who knows 1/v of its own entities. A product over few entities
    would disclose rows to who knows one of the two blocks; it is not asked for, and counts as zero, its
    expectation.
    """
    edges = np.cumsum([0, *columns.widths])
    which = BLOCK if columns.stage == "columns" else columns.stage
    sides = [
        ProductOperand(k, which, slice(edges[j], edges[j + 1]), rows, np.zeros_like(rows), layout.own(k))
        for j, (k, rows) in enumerate(layout.rows.items())
    ]
    blocks, pairs, few = {}, {}, 0
    for j, k in combinations(range(len(sides)), 2):
        one, two = sides[j], sides[k]
        common = len(np.intersect1d(one.rows, two.rows, assume_unique=True))
        if common >= min_entities(one.width + two.width - 1, options.min_count):
            pairs[j, k] = one, two
        else:
            blocks[j, k] = np.zeros((one.width, two.width))
            # Without a common entity the product is zero, and nothing is missed.
            few += common > 0
    asking = product_session(session, options.at)
    multiplied = yield from asking.multiply(list(pairs.values()), dealing_sites(layout), 1, layout.n)
    blocks |= {pair: one.products[0] for pair, one in zip(pairs, multiplied, strict=True)}
    dealers = ", ".join(sorted({one.dealer or "the coordinator" for one in multiplied}))
    return CrossProducts(blocks, "secure", dealers=dealers, left_out=few)


def product_session(session: str, at: str | None) -> SecureProductSession:
    """Say who asks, and what VFEM offers where nobody can deal."""
    return SecureProductSession(FAMILY, session, at, ALTERNATIVES)


def check_dealers(layout: Layout, options: CrossProductOptions) -> None:
    """Require somebody to deal for every two institutions, before anything is computed."""
    if options.how == "secure":
        for a, b in combinations(layout.clients, 2):
            product_session("", options.at).dealer(a, b, dealing_sites(layout))


def sketched_products(
    layout: Layout, session: str, columns: ProductRequest, options: CrossProductOptions
) -> FitProtocol[CrossProducts]:
    """Multiply random projections that the institutions draw from a seed which only they share.

    TWFL Algorithm 2, mended: the institutions must use the same projection; independent ones would
    make every cross-product zero on average.
    """
    replies = yield [
        vfem_request(
            k,
            "sketch",
            session,
            stage=columns.number,
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
    layout: Layout, session: str, columns: ProductRequest, options: CrossProductOptions
) -> FitProtocol[CrossProducts]:
    """Hand each institution's columns to the institutions after it, which multiply: it discloses them."""
    number = columns.number
    replies = yield [vfem_request(k, "release_columns", session, stage=number) for k in layout.clients[:-1]]
    released = [reply.arrays["columns"] for reply in replies]
    pairs = list(combinations(range(len(layout.clients)), 2))
    products = yield [
        vfem_request(
            layout.clients[k],
            "multiply_columns",
            session,
            stage=number,
            columns=released[j],
            rows=layout.rows[layout.clients[j]],
        )
        for j, k in pairs
    ]
    blocks = {pair: reply.arrays["products"] for pair, reply in zip(pairs, products, strict=True)}
    return CrossProducts(blocks, "exact")


CROSS_PRODUCTS: Mapping[str, ProductsProtocol] = {
    "none": no_products,
    "secure": multiplied_products,
    "sketch": sketched_products,
    "exact": exchanged_products,
}


def cross_products(
    layout: Layout, session: str, columns: ProductRequest, options: CrossProductOptions
) -> FitProtocol[CrossProducts]:
    """Obtain X_j'X_k for every pair of institutions, as `options` say; a single institution needs none."""
    how = options.how if len(layout.clients) > 1 else "none"
    return (yield from CROSS_PRODUCTS[how](layout, session, columns, options))
