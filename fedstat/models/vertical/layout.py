"""Who takes part in a fit over sites with different columns, and with what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedstat.federation.design.by_columns import BlockDesign, Design
from fedstat.federation.door.guards import ENTITIES_PER_EQUATION
from fedstat.models.vertical.merges import keep_only
from fedstat.models.vertical.moments import number_patterns
from fedstat.typing import Bools, Floats, Ints


@dataclass(frozen=True, eq=False)
class Layout:
    """Who takes part with what: agreed before anything is computed.

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
    n, n_design : int
        Entities of the fit, and those with a response.
    keep : mapping of str to (n_seen,) bool
        Which rows of a client's opened block take part.
    kept : mapping of str to (n_k,) int
        Positions of those rows among the n entities, ascending.
    response_keep : (rows,) bool
        Which rows of the active institution take part.
    absent : mapping of str to int
        Entities with a response that a client does not have.
    filled : bool
        Missing blocks count as seen at their mean, so that nothing is missing.
    """

    clients: tuple[str, ...]
    active: str
    names: tuple[str, ...]
    terms: tuple[str, ...]
    sizes: tuple[int, ...]
    n: int
    n_design: int
    keep: Mapping[str, Bools]
    kept: Mapping[str, Ints]
    response_keep: Bools
    absent: Mapping[str, int]
    filled: bool = False

    # ---- columns -------------------------------------------------------------------------------

    @property
    def p(self) -> int:
        """Columns of all clients."""
        return sum(self.sizes)

    @property
    def owners(self) -> tuple[str, ...]:
        """Client of each column."""
        return tuple(np.repeat(self.clients, self.sizes).tolist())

    def places(self, first: int = 0) -> dict[str, slice]:
        """Where each client's columns stand, counted from `first`."""
        ends = first + np.cumsum(self.sizes)
        pairs = zip(self.clients, self.sizes, ends.tolist(), strict=True)
        return {client: slice(end - size, end) for client, size, end in pairs}

    def split(self, values: Floats) -> dict[str, Floats]:
        """Split a vector of all columns, (p,), by client."""
        return {client: np.ascontiguousarray(values[at]) for client, at in self.places().items()}

    # ---- entities ------------------------------------------------------------------------------

    @property
    def left_out(self) -> int:
        """Entities with a response that take no part."""
        return self.n_design - self.n

    @property
    def most_grams(self) -> int:
        """Weighted Gram matrices that may be released over the same entities."""
        return self.n // (ENTITIES_PER_EQUATION * (self.p + 1))

    @property
    def rows(self) -> Mapping[str, Ints]:
        """Positions of the entities that count as seen by each client: `kept`, or all where means fill in."""
        return dict.fromkeys(self.clients, np.arange(self.n)) if self.filled else self.kept

    @cached_property
    def _patterns(self) -> tuple[Bools, Ints, Floats]:
        missing = np.ones((self.n, len(self.clients)), dtype=bool)
        for k, client in enumerate(self.clients):
            missing[self.rows[client], k] = False
        first, code, counts = number_patterns(missing)
        return missing[first], code, counts

    @property
    def missing(self) -> Bools:
        """Which client misses in which pattern: (G, K)."""
        return self._patterns[0]

    @property
    def code(self) -> Ints:
        """Missing pattern of each entity: (n,)."""
        return self._patterns[1]

    @property
    def counts(self) -> Floats:
        """Entities of each pattern: (G,)."""
        return self._patterns[2]


def lay_out(design: Design, blocks: Sequence[BlockDesign], use: Bools, *, filled: bool = False) -> Layout:
    """Lay out a fit of some of the entities and blocks of a design.

    Parameters
    ----------
    design : Design
    blocks : sequence of BlockDesign
    use : (n_design,) array of bool
        Which entities take part.
    filled : bool
        See :class:`Layout`.
    """
    place, keep = np.cumsum(use) - 1, {block.client: use[block.rows] for block in blocks}
    return Layout(
        tuple(block.client for block in blocks),
        design.active,
        tuple(name for block in blocks for name in block.names),
        tuple(term for block in blocks for term in block.term_names),
        tuple(len(block.names) for block in blocks),
        int(use.sum()),
        design.n,
        keep,
        {block.client: place[block.rows[keep[block.client]]].astype(np.int64) for block in blocks},
        keep_only(design.response_keep, use),
        {block.client: design.n - len(block.rows) for block in blocks if len(block.rows) < design.n},
        filled,
    )


def complete_at(blocks: Sequence[BlockDesign], n: int) -> Bools:
    """Which of n entities every one of the blocks has."""
    counts = np.zeros(n, dtype=np.int64)
    for block in blocks:
        counts[block.rows] += 1
    return np.asarray(counts == len(blocks))
