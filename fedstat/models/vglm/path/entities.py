"""Entities of a fit: those that all institutions with columns have, or all; folds and halves of them."""

from __future__ import annotations

import numpy as np

from fedstat.errors import DataWarning, EstimationError, warn
from fedstat.federation.design.by_columns import Design
from fedstat.federation.door.guards import ENTITIES_PER_EQUATION
from fedstat.models.vertical.layout import Layout, complete_at, lay_out
from fedstat.typing import Ints


def make_layout(design: Design, *, incomplete: bool = False) -> Layout:
    """Lay out a fit of complete cases, or with `incomplete` of all entities.

    An EstimationError where too few are complete for sums of products to be released.
    """
    use = complete_at(design.blocks, design.n) | incomplete
    layout = lay_out(design, design.blocks, use)
    if layout.most_grams < 1 and not incomplete:
        least = ENTITIES_PER_EQUATION * (layout.p + 1)
        raise EstimationError(
            f"{layout.n:,} of {design.n:,} entities are complete at {', '.join(layout.clients)}; sums of "
            f"products of {layout.p} columns and the response are released over {least:,} or more: leave out "
            "columns, or an institution that lacks many entities"
        )
    return layout


def warn_of_incomplete(layout: Layout) -> None:
    """Warn of entities that are left out, because an institution lacks them."""
    if layout.left_out:
        warn(f"{describe_incomplete(layout)}.", DataWarning)


def describe_incomplete(layout: Layout) -> str:
    """Say which entities are left out, without a full stop."""
    listed = ", ".join(f"{count:,} at {client}" for client, count in layout.absent.items())
    return (
        f"{layout.left_out:,} of {layout.n_design:,} entities with a response "
        f"({100.0 * layout.left_out / layout.n_design:.1f} %) lack an institution's columns ({listed}) and "
        "were left out: right, with larger standard errors, where who lacks columns depends on the columns "
        "alone, and biased where it depends on the response given the columns; "
        'from_formula(..., missing="em") uses all entities, with the normal family'
    )


def deal_folds(n: int, folds: int, least: int, random: np.random.Generator) -> Ints:
    """Assign entities to folds of nearly equal size at random, (n,), if each has `least` or more."""
    if n // folds < least:
        raise EstimationError(
            f"{folds} folds of {n:,} entities have {n // folds:,} each, and sums of products are released "
            f"over {least:,} or more; use {max(n // least, 1)} folds at most, or select='bic'"
        )
    return np.asarray(random.permutation(np.arange(n) % folds), dtype=np.int64)


def halve(layout: Layout, random: np.random.Generator) -> tuple[Layout, Layout]:
    """Divide the entities of a fit into random halves."""
    first = deal_folds(layout.n, 2, 1, random) == 0
    return layout.narrowed(first), layout.narrowed(~first)
