"""Which entities take part in a fit: those that every institution with columns has, or all."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedstat.errors import DataWarning, EstimationError
from fedstat.federation.design.by_columns import Design
from fedstat.federation.door.guards import ENTITIES_PER_EQUATION
from fedstat.typing import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Layout:
    """Who takes part with what.

    Parameters
    ----------
    clients : tuple of str
        Institutions with columns in the model, in partition order.
    active : str
        The institution that holds the response.
    names, terms : tuple of str, (p,)
        Columns in the order of the clients, and the term of each.
    sizes : tuple of int
        Columns of each client.
    n : int
        Entities of the fit.
    keep : mapping of str to (n_seen,) bool
        Which rows of a client's opened block these are.
    response_keep : (rows,) bool
        Which rows of the active institution.
    absent : mapping of str to int
        Entities with a response that a client does not have.
    n_design : int
        Entities with a response.
    rows : mapping of str to (n_k,) int array, optional
        Positions of each client's entities among the n where some lack its block; by default all are there.
    """

    clients: tuple[str, ...]
    active: str
    names: tuple[str, ...]
    terms: tuple[str, ...]
    sizes: tuple[int, ...]
    n: int
    keep: Mapping[str, Bools]
    response_keep: Bools
    absent: Mapping[str, int]
    n_design: int
    rows: Mapping[str, Ints] | None = None

    @property
    def p(self) -> int:
        """Columns of all clients."""
        return len(self.names)

    @property
    def owners(self) -> tuple[str, ...]:
        """Client of each column."""
        return tuple(np.repeat(self.clients, self.sizes).tolist())

    @property
    def left_out(self) -> int:
        """Entities with a response that lack a client's block."""
        return self.n_design - self.n

    def positions(self, client: str) -> Ints:
        """Positions of a client's entities among those of the fit."""
        return np.arange(self.n) if self.rows is None else self.rows[client]

    @property
    def seen(self) -> Bools:
        """Which clients have each entity: (n, K)."""
        out = np.zeros((self.n, len(self.clients)), dtype=bool)
        for k, client in enumerate(self.clients):
            out[self.positions(client), k] = True
        return out

    @property
    def most_grams(self) -> int:
        """Weighted Gram matrices that may be released over the same entities."""
        return self.n // (ENTITIES_PER_EQUATION * (self.p + 1))

    def places(self, first: int = 0) -> dict[str, slice]:
        """Where each client's columns stand, counted from `first`."""
        ends = first + np.cumsum(self.sizes)
        pairs = zip(self.clients, self.sizes, ends.tolist(), strict=True)
        return {client: slice(end - size, end) for client, size, end in pairs}

    def split(self, values: Floats) -> dict[str, Floats]:
        """Split a vector of all columns, (p,), by client."""
        return {client: np.ascontiguousarray(values[at]) for client, at in self.places().items()}


def make_layout(design: Design, *, incomplete: bool = False) -> Layout:
    """Lay out a fit of complete cases, or with `incomplete` of all entities.

    Raises
    ------
    EstimationError
        Too few entities are complete for sums of products to be released.
    """
    blocks = design.blocks
    counts = np.zeros(design.n, dtype=np.int64)
    for block in blocks:
        counts[block.rows] += 1
    use = np.asarray(counts == len(blocks)) | incomplete
    response_keep = design.response_keep.copy()
    response_keep[np.flatnonzero(design.response_keep)[~use]] = False
    layout = Layout(
        tuple(block.client for block in blocks),
        design.active,
        tuple(name for block in blocks for name in block.names),
        tuple(term for block in blocks for term in block.term_names),
        tuple(len(block.names) for block in blocks),
        int(use.sum()),
        {block.client: use[block.rows] for block in blocks},
        response_keep,
        {block.client: design.n - len(block.rows) for block in blocks if len(block.rows) < design.n},
        design.n,
        {block.client: block.rows for block in blocks} if incomplete else None,
    )
    if layout.most_grams < 1 and not incomplete:
        least = ENTITIES_PER_EQUATION * (layout.p + 1)
        raise EstimationError(
            f"{layout.n:,} of {design.n:,} entities are complete at {', '.join(layout.clients)}; sums of "
            f"products of {layout.p} columns and the response are released over {least:,} or more: leave out "
            "columns, or a client that lacks many entities"
        )
    return layout


def warn_of_incomplete(layout: Layout) -> None:
    """Warn of entities that are left out, because an institution lacks them."""
    if layout.left_out:
        warnings.warn(f"{describe_incomplete(layout)}.", DataWarning, stacklevel=3)


def describe_incomplete(layout: Layout) -> str:
    """Say which entities are left out, without a full stop."""
    listed = ", ".join(f"{count:,} at {client}" for client, count in layout.absent.items())
    return (
        f"{layout.left_out:,} of {layout.n_design:,} entities with a response lack an institution's columns "
        f"({listed}) and were left out: estimates are biased unless blocks are missing completely at random; "
        'from_formula(..., missing="em") uses all entities, with the normal family'
    )


def deal_folds(n: int, folds: int, least: int, random: np.random.Generator) -> Ints:
    """Assign entities to folds of nearly equal size at random: (n,).

    Raises
    ------
    EstimationError
        A fold would have fewer than `least` entities.
    """
    if n // folds < least:
        raise EstimationError(
            f"{folds} folds of {n:,} entities have {n // folds:,} each, and sums of products are released "
            f"over {least:,} or more; use {max(n // least, 1)} folds at most, or select='bic'"
        )
    return np.asarray(random.permutation(np.arange(n) % folds), dtype=np.int64)
