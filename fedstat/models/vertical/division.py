"""One division of the entities for all fits of a partition whose sites remember every answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from fedstat.federation.design.formula.terms import parse_terms, term_columns
from fedstat.federation.partition.partition import ClientPartition
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.merges import MergePlan
from fedstat.typing import Bools, Ints


def divide_as_before(
    layout: Layout, partition: ClientPartition, *, complete: bool = False, partly: bool = False
) -> Layout:
    """Leave out of a fit what earlier fits of the partition set aside; `complete`: whole entities only.

    Where single values of an entity were set aside it counts as missing at that institution, unless entities
    take part `partly`.
    """
    entities, division = _entities(layout, partition), partition.division
    shown = {k: division.seen(k, entities[layout.kept[k]]) for k in layout.clients}
    has = {}
    for k in layout.clients:
        own: Bools = ~division.without_values(k, _read(layout, k), entities[layout.kept[k]])
        if k in layout.has or (partly and not own.all()):
            has[k] = layout.has[k] & own if k in layout.has else own
            own = np.asarray(has[k].any(axis=1, keepdims=True))
        shown[k] = shown[k] & own.all(axis=1)
    used = ~np.isin(entities, division.left_out)
    if complete:
        for k in layout.clients:
            used[layout.kept[k][~shown[k]]] = False
        shown = {k: used[layout.kept[k]] for k in layout.clients}
    aside = sum(int(np.count_nonzero(~own)) for own in shown.values())
    return replace(layout.narrowed(used, shown, has or None), aside=aside)


def keep_division(
    layout: Layout,
    partition: ClientPartition,
    plan: MergePlan,
    released: Mapping[str, Bools],
    columns: Mapping[str, Bools],
) -> None:
    """Let later fits set aside what a plan of merges did, where a site holds them against it.

    `released` tells which of the entities that an institution brought count as seen, and `columns` with which
    columns those of which it has some.
    """
    if all(site.policy.remember != "all" for site in partition.sites.values()) or layout.filled:
        return
    entities = _entities(layout, partition)
    without = {k: entities[layout.kept[k][~released[k]]] for k in layout.clients}
    gone = plan.target[layout.code] < 0
    partition.division.set_aside(without, entities[gone])
    for k, seen in columns.items():
        aside = layout.has[k] & ~seen & released[k][:, None]
        for read, lost in zip(_read(layout, k), aside.T, strict=True):
            partition.division.set_values_aside(k, read, entities[layout.kept[k][lost]])


def division_notes(layout: Layout) -> Iterator[str]:
    """Say of a fit how many records it left out because an earlier one had."""
    if layout.aside:
        yield (
            f"{layout.aside:,} records count as missing, as in an earlier fit of this partition that merged "
            "small missing patterns: sums that brought them back would differ from the earlier ones by few."
        )


def _read(layout: Layout, client: str) -> list[tuple[str, ...]]:
    """Columns of the institution's table that each of its design columns reads."""
    terms = layout.terms[layout.places()[client]]
    return [term_columns(parse_terms(term).terms[0]) for term in terms]


def _entities(layout: Layout, partition: ClientPartition) -> Ints:
    """Positions of the entities of a fit among those of the partition: (n,)."""
    return partition.rows[layout.active][layout.response_keep]
