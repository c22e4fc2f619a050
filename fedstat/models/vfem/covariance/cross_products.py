"""Sums over entities of products of two sites' columns: four methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Literal, TypeAlias

import numpy as np

from fedstat.federation.disclosure.facts import EntityCount, ExternalWeights
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, check_allocation, check_lengths, control, presence
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import ProductOperand, SecureProductSession
from fedstat.kernels.sketch import SKETCHES
from fedstat.models.vertical.exchange.protocol import dealing_sites
from fedstat.models.vertical.exchange.steps import BLOCK, ColumnSource
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.pattern_merging import min_entities
from fedstat.models.vfem.iteration.site_state import BLOCK_STATE_ITEM, BlockState, block_state_of
from fedstat.models.vfem.iteration.state import (
    CROSS_STEPS,
    FAMILY,
    declare_sums,
    declare_weighted_sums,
    vfem_request,
)
from fedstat.typing import Array, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Site steps for products of columns of two sites, and random projections of columns.

SKETCH_KINDS = tuple(SKETCHES)
STAGES = ("information", "scores", "columns")


def staged(data: SiteData, state: State, stage: int) -> Floats:
    """Columns for a cross-product."""
    site = block_state_of(state)
    if STAGES[stage] == "columns":
        return site.X
    return site.staged["root" if STAGES[stage] == "information" else "scores"]


def column_of_stage(stage: int, data: SiteData, state: State, whom: str) -> Floats:
    """Columns of a stage, for any receiver."""
    return staged(data, state, stage)


PRODUCT_COLUMNS: Mapping[str, ColumnSource] = {
    name: partial(column_of_stage, k) for k, name in enumerate(STAGES)
}
"""Staged columns by name, as secure products request them."""


def staged_weights(data: SiteData, state: State) -> tuple[Floats | None, int]:
    """Return the weights of rows in the columns of the information."""
    site: BlockState = state.look_at(BLOCK_STATE_ITEM).block
    return site.staged.get("weights"), 1


def seed_of_stage(shared: int, stage: int) -> int:
    """Seed of the projection of one stage, which is as hard to guess as the seed that sites share."""
    # A short seed is not made longer, and gives the same numbers in every version.
    words = 2 if shared.bit_length() > 64 else 1
    return int.from_bytes(
        np.random.SeedSequence([shared, stage]).generate_state(words, "<u8").tobytes(), "little"
    )


STAGE = control("which columns", 0)


@step(
    FAMILY,
    f"{CROSS_STEPS} sem_constants",
    takes={
        "stage": STAGE,
        "size": control("rows of the sketch", 0),
        "kind": control("kind of the sketch", 0),
    },
    releases={
        "sketch": ArrayDeclaration("sketch", "random projection of the columns", 2, behind=(EntityCount,)),
        "error": declare_sums("relative error of the sketch within the block", 0),
    },
)
def sketch(data: SiteData, state: State, stage: Array, size: Array, kind: Array) -> dict[str, Array]:
    """Release a random projection of the staged columns, the same one at every site.

    `stage` is an index into ``STAGES``, `kind` into ``SKETCH_KINDS``. Released: ``sketch`` (size, q), and
    ``error``, the root mean squared error of the sketched products within the site, relative to the columns'
    lengths.
    """
    site, columns = block_state_of(state), staged(data, state, int(stage))
    # Structured sketches come in complete blocks, of at most half the entities.
    check_allocation(data.name, (int(size) + site.n) * columns.shape[1], columns.size)
    seed = seed_of_stage(data.common_seed, int(stage))
    # If every site had its own projection, each product would be zero on average.
    draw = SKETCHES[SKETCH_KINDS[int(kind)]]
    projected = draw(columns, site.rows, site.n, int(size), seed)
    exact = columns.T @ columns
    length = np.sqrt(np.diag(exact))
    error = (projected.T @ projected - exact) / np.outer(length, length)
    return {"sketch": projected, "error": np.array(np.sqrt(np.mean(error**2)))}


@step(
    FAMILY,
    f"{CROSS_STEPS} response_products",
    takes={"stage": STAGE},
    releases={"columns": ArrayDeclaration("raw columns", "the columns themselves, centered and weighted", 2)},
)
def release_columns(data: SiteData, state: State, stage: Array) -> dict[str, Array]:
    """Release the staged columns themselves, for another site to multiply with its own."""
    return {"columns": np.ascontiguousarray(staged(data, state, int(stage)))}


@step(
    FAMILY,
    f"{CROSS_STEPS} multiply_columns release_columns",
    takes={
        "stage": STAGE,
        "columns": ArrayDeclaration("raw columns", "another site's columns, centered and weighted", 2),
        "rows": presence("positions of that site's entities", dtype="int64"),
    },
    releases={"products": declare_weighted_sums("cross-products of two sites' columns", 2)},
)
def multiply_columns(
    data: SiteData, state: State, stage: Array, columns: Floats, rows: Ints
) -> dict[str, Array]:
    """Release products of another site's columns (m, q), on entities at `rows`, with the staged ones."""
    site = block_state_of(state)
    check_lengths(data.name, columns=(columns, len(rows)))
    _, mine, theirs = np.intersect1d(site.rows, rows, assume_unique=True, return_indices=True)
    # Rows imputed with their mean hide no other row, so they do not count as entities.
    own, held = staged(data, state, int(stage)), site.held[mine]
    state.report(ExternalWeights(columns[theirs[held]], "columns"))
    if held.any():  # the product over no rows is zero for any columns
        state.report(EntityCount(int(np.count_nonzero(held))))
    return {"products": columns[theirs].T @ own[mine]}


# ----------------------------------------------------------------------------------------------------
# The protocol for sums of products of two sites' columns: four methods.
#
# Each method is a protocol with the same signature, named in ``CROSS_PRODUCTS``.

ALTERNATIVES = ", or exchange='iterative' with cov_type='expected' or fs.Iteration(cross_products='sketch')"
GLM_ALTERNATIVES = ", or cross_products='sketch', or cov_type='none'"
"""What to do if no third party can deal, for a normal response and for others."""


@dataclass(frozen=True, slots=True)
class CrossProductOptions:
    """Method for cross-products between sites; see :meth:`fedstat.VFEMRegression.fit`.

    A sketch has `size` rows. A secure product is over at least `min_count` entities. The place of the
    coordinator, `at`, affects which sites may deal.
    """

    how: Literal["secure", "sketch", "exact", "none"] = "secure"
    sketch: Literal["structured", "gaussian"] = "structured"
    size: int = 20_000
    at: str | None = None
    min_count: int = 5


@dataclass(frozen=True, slots=True)
class ProductRequest:
    """Columns whose products are requested: one of ``STAGES``, and each site's number of columns in it."""

    stage: str
    widths: tuple[int, ...]

    @property
    def number(self) -> int:
        """The stage as it is sent to sites."""
        return STAGES.index(self.stage)


@dataclass(frozen=True, slots=True)
class CrossProducts:
    """Products X_j'X_k of the staged columns of every pair of sites number j < k, and their method.

    `size` is the number of rows of a sketch, 0 without one, and `error` the root mean squared error of an
    entry, relative to the lengths of the two columns, as measured on the products within sites. `dealers`
    dealt for secure products. `left_out` counts pairs without a request, because too few entities have both.
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
    """Leave cross-products at zero, their expected value under the model."""
    yield from ()
    return CrossProducts({}, "none")


def multiplied_products(
    layout: Layout, session: str, columns: ProductRequest, options: CrossProductOptions
) -> FitProtocol[CrossProducts]:
    """Multiply securely: the result is exact, and sites and coordinator learn only the products.

    Each site weights its rows, because it knows 1/v of its own entities. A product over few entities would
    reveal rows to a party that knows one of the two blocks. It is not requested, and counts as zero, its
    expected value.
    """
    edges = np.cumsum([0, *columns.widths])
    which = BLOCK if columns.stage == "columns" else columns.stage
    sides = [
        ProductOperand(
            k,
            which,
            slice(edges[j], edges[j + 1]),
            rows,
            np.zeros_like(rows),
            layout.own(k),
            layout.supports(k),
        )
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
            # Without a common entity the product is zero, and nothing is lost.
            few += common > 0
    requester = product_session(layout, session, options.at)
    multiplied = yield from requester.multiply(list(pairs.values()), dealing_sites(layout), 1, layout.n)
    blocks |= {pair: one.products[0] for pair, one in zip(pairs, multiplied, strict=True)}
    dealers = ", ".join(sorted({one.dealer or "the coordinator" for one in multiplied}))
    return CrossProducts(blocks, "secure", dealers=dealers, left_out=few)


def product_session(
    layout: Layout, session: str, at: str | None, otherwise: str = ALTERNATIVES
) -> SecureProductSession:
    """State which model requests products, and its alternatives if no third party can deal."""
    return SecureProductSession(FAMILY, session, at, otherwise, layout.least)


def check_dealers(layout: Layout, options: CrossProductOptions, otherwise: str) -> None:
    """Require a dealer for every two sites, before anything is computed."""
    if options.how == "secure":
        for a, b in combinations(layout.sites, 2):
            product_session(layout, "", options.at, otherwise).dealer(a, b, dealing_sites(layout))


def sketched_products(
    layout: Layout, session: str, columns: ProductRequest, options: CrossProductOptions
) -> FitProtocol[CrossProducts]:
    """Multiply random projections that the sites draw from a seed which only they share.

    TWFL Algorithm 2, corrected: the sites must use the same projection. Independent projections would make
    every cross-product zero on average.
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
        for k in layout.sites
    ]
    sketches = [reply.arrays["sketch"] for reply in replies]
    error = float(np.sqrt(np.mean([float(reply.arrays["error"]) ** 2 for reply in replies])))
    pairs = combinations(range(len(sketches)), 2)
    blocks = {(j, k): sketches[j].T @ sketches[k] for j, k in pairs}
    return CrossProducts(blocks, "sketch", len(sketches[0]), error)


def exchanged_products(
    layout: Layout, session: str, columns: ProductRequest, options: CrossProductOptions
) -> FitProtocol[CrossProducts]:
    """Send each site's columns to the sites after it, which multiply them: this reveals the columns."""
    number = columns.number
    replies = yield [vfem_request(k, "release_columns", session, stage=number) for k in layout.sites[:-1]]
    released = [reply.arrays["columns"] for reply in replies]
    pairs = list(combinations(range(len(layout.sites)), 2))
    products = yield [
        vfem_request(
            layout.sites[k],
            "multiply_columns",
            session,
            stage=number,
            columns=released[j],
            rows=layout.rows[layout.sites[j]],
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
    """Obtain X_j'X_k for every pair of sites, by the method in `options`; a single site needs none."""
    how = options.how if len(layout.sites) > 1 else "none"
    return (yield from CROSS_PRODUCTS[how](layout, session, columns, options))
