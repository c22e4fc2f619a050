"""Site steps for products of columns of two sites, and random projections of columns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from fedstat.federation.disclosure.facts import EntityCount, ExternalWeights
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.message import ArrayDeclaration, check_allocation, check_lengths, control, presence
from fedstat.kernels.sketch import SKETCHES
from fedstat.models.vertical.exchange.steps import ColumnSource
from fedstat.models.vfem.iteration.messages import CROSS_STEPS, FAMILY, declare_sums, declare_weighted_sums
from fedstat.models.vfem.iteration.site_state import BLOCK_STATE_ITEM, BlockState, block_state_of
from fedstat.typing import Array, Floats, Ints

SKETCH_KINDS = tuple(SKETCHES)
STAGES = ("information", "scores", "columns")


def staged(data: SiteData, state: State, stage: int) -> Floats:
    """Columns that a cross-product is wanted of."""
    client = block_state_of(state)
    if STAGES[stage] == "columns":
        return client.X
    return client.staged["root" if STAGES[stage] == "information" else "scores"]


def column_of_stage(stage: int, data: SiteData, state: State, whom: str) -> Floats:
    """Columns of a stage, whoever they are for."""
    return staged(data, state, stage)


PRODUCT_COLUMNS: Mapping[str, ColumnSource] = {
    name: partial(column_of_stage, k) for k, name in enumerate(STAGES)
}
"""Staged columns by name, as secure products ask for them."""


def staged_weights(data: SiteData, state: State) -> tuple[Floats | None, int]:
    """Return the weights of rows in the columns of the information."""
    client: BlockState = state.look_at(BLOCK_STATE_ITEM).block
    return client.staged.get("weights"), 1


def seed_of_stage(shared: int, stage: int) -> int:
    """Seed of the projection of one stage, which is as hard to find as the one that institutions share."""
    # A short seed makes no longer one, and draws what it always drew.
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
    """Release a random projection of the staged columns, the same one at every institution.

    `stage` is a place in ``STAGES``, `kind` in ``SKETCH_KINDS``. Released: ``sketch`` (size, q), and
    ``error``, the root mean squared error of the institution's own products by it, relative to the columns'
    lengths.
    """
    client, columns = block_state_of(state), staged(data, state, int(stage))
    # Structured sketches come in whole ones, of half the entities at most.
    check_allocation(data.name, (int(size) + client.n) * columns.shape[1], columns.size)
    seed = seed_of_stage(data.common_seed, int(stage))
    # A projection of its own at every institution would make each product zero on average.
    draw = SKETCHES[SKETCH_KINDS[int(kind)]]
    projected = draw(columns, client.rows, client.n, int(size), seed)
    exact = columns.T @ columns
    length = np.sqrt(np.diag(exact))
    error = (projected.T @ projected - exact) / np.outer(length, length)
    return {"sketch": projected, "error": np.array(np.sqrt(np.mean(error**2)))}


@step(
    FAMILY,
    f"{CROSS_STEPS} response_products",
    takes={"stage": STAGE},
    releases={"columns": ArrayDeclaration("raw columns", "the columns themselves, centred and weighted", 2)},
)
def release_columns(data: SiteData, state: State, stage: Array) -> dict[str, Array]:
    """Release the staged columns themselves, for another institution to multiply with its own."""
    return {"columns": np.ascontiguousarray(staged(data, state, int(stage)))}


@step(
    FAMILY,
    f"{CROSS_STEPS} multiply_columns release_columns",
    takes={
        "stage": STAGE,
        "columns": ArrayDeclaration("raw columns", "another institution's columns, centred and weighted", 2),
        "rows": presence("positions of that institution's entities", dtype="int64"),
    },
    releases={"products": declare_weighted_sums("cross-products of two institutions' columns", 2)},
)
def multiply_columns(
    data: SiteData, state: State, stage: Array, columns: Floats, rows: Ints
) -> dict[str, Array]:
    """Release products of another site's columns (m, q), on entities at `rows`, with the staged ones."""
    client = block_state_of(state)
    check_lengths(data.name, columns=(columns, len(rows)))
    _, mine, theirs = np.intersect1d(client.rows, rows, assume_unique=True, return_indices=True)
    # Rows that are filled in with their mean hide no other: they count as no entity.
    own, held = staged(data, state, int(stage)), client.held[mine]
    state.tell(ExternalWeights(columns[theirs[held]], "columns"))
    if held.any():  # the product over none is zero, whatever the columns
        state.tell(EntityCount(int(np.count_nonzero(held))))
    return {"products": columns[theirs].T @ own[mine]}
