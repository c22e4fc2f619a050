"""Which entities and blocks take part in a fit, by method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedstat.errors import EstimationError, ModelError
from fedstat.federation.design.by_columns import BlockDesign, Design
from fedstat.models.vertical.merges import keep_only
from fedstat.models.vertical.moments import number_patterns
from fedstat.typing import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Layout:
    """Who has what: agreed before the first iteration.

    Parameters
    ----------
    clients : tuple of str
        Institutions with columns in the model, in partition order.
    active : str
        The institution that holds the response.
    n : int
        Entities of this fit.
    keep : mapping of str to (n_seen,) bool
        Which rows of a client's opened block take part.
    kept : mapping of str to (n_k,) int
        Positions of those rows among the n entities, ascending.
    rows : mapping of str to int array
        Positions of the entities that count as seen: `kept`, or all where the mean fills in.
    response_keep : (rows,) bool
        Which rows of the active institution take part.
    code : (n,) int
        Missing pattern of each entity.
    missing : (G, K) bool
        Which client misses in which pattern.
    counts : (G,) array
        Entities of each pattern.
    filled : bool
        Missing blocks count as seen at their mean, so that nothing is missing.
    """

    clients: tuple[str, ...]
    active: str
    n: int
    keep: Mapping[str, Bools]
    kept: Mapping[str, Ints]
    rows: Mapping[str, Ints]
    response_keep: Bools
    code: Ints
    missing: Bools
    counts: Floats
    filled: bool = False


def make_layout(design: Design, active_rows: Ints, method: str) -> Layout:
    """Lay out a fit.

    Parameters
    ----------
    design : Design
    active_rows : (rows,) array of int
        Positions of the active institution's records among the partition's entities.
    method : {"vfem", "cc", "impute", "single"}

    Raises
    ------
    ModelError
        method="single" where the response holder has no columns.
    EstimationError
        Too few complete entities.
    """
    blocks = design.blocks
    if method == "single":
        blocks = tuple(b for b in blocks if b.client == design.active)
        if not blocks:
            raise ModelError(
                f"method='single' uses the columns of '{design.active}' alone, and it holds none of "
                "the model's; use 'cc', 'impute' or 'vfem'"
            )
    use = complete(blocks, design.n) if method in ("cc", "single") else np.ones(design.n, dtype=bool)
    n, p = int(use.sum()), sum(len(b.names) for b in blocks)
    if n <= p + 1:
        raise EstimationError(
            f"method='{method}': {n} entities are complete at {', '.join(b.client for b in blocks)}, and "
            f"{p + 1} coefficients need more; use method='vfem', or leave clients out"
        )
    place = np.cumsum(use) - 1
    missing = np.ones((n, len(blocks)), dtype=bool)
    keep, kept = {}, {}
    for k, block in enumerate(blocks):
        keep[block.client] = use[block.rows]
        kept[block.client] = place[block.rows[keep[block.client]]].astype(np.int64)
        missing[kept[block.client], k] = False
    if method == "impute":
        missing[:] = False
    first, code, counts = number_patterns(missing)
    return Layout(
        tuple(b.client for b in blocks),
        design.active,
        n,
        keep,
        kept,
        dict.fromkeys(keep, np.arange(n)) if method == "impute" else kept,
        keep_only(design.response_keep, use),
        code,
        missing[first],
        counts,
        filled=method == "impute",
    )


def complete(blocks: tuple[BlockDesign, ...], n: int) -> Bools:
    """Which entities every one of the blocks has."""
    counts = np.zeros(n, dtype=np.int64)
    for block in blocks:
        counts[block.rows] += 1
    return np.asarray(counts == len(blocks))
