"""One division of the entities for all fits of a partition whose sites remember every answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from fedstat.federation.partition.partition import ClientPartition
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.merges import MergePlan
from fedstat.typing import Bools, Ints


def divide_as_before(layout: Layout, partition: ClientPartition, *, complete: bool = False) -> Layout:
    """Leave out of a fit what earlier fits of the partition set aside; `complete`: whole entities only."""
    entities = _entities(layout, partition)
    shown = {k: partition.division.seen(k, entities[layout.kept[k]]) for k in layout.clients}
    used = ~np.isin(entities, partition.division.left_out)
    if complete:
        for k in layout.clients:
            used[layout.kept[k][~shown[k]]] = False
        shown = {k: used[layout.kept[k]] for k in layout.clients}
    aside = sum(int(np.count_nonzero(~own)) for own in shown.values())
    return replace(layout.narrowed(used, shown), aside=aside)


def keep_division(
    layout: Layout, partition: ClientPartition, plan: MergePlan, released: Mapping[str, Bools]
) -> None:
    """Let later fits set aside what a plan of merges did, where a site holds them against it.

    `released` tells which of the entities that a client brought count as seen.
    """
    if all(site.policy.remember != "all" for site in partition.sites.values()) or layout.filled:
        return
    entities = _entities(layout, partition)
    without = {k: entities[layout.kept[k][~released[k]]] for k in layout.clients}
    gone = plan.target[layout.code] < 0
    partition.division.set_aside(without, entities[gone])


def division_notes(layout: Layout) -> Iterator[str]:
    """Say of a fit how many records it left out because an earlier one had."""
    if layout.aside:
        yield (
            f"{layout.aside:,} records count as missing, as in an earlier fit of this partition that merged "
            "small missing patterns: sums that brought them back would differ from the earlier ones by few."
        )


def _entities(layout: Layout, partition: ClientPartition) -> Ints:
    """Positions of the entities of a fit among those of the partition: (n,)."""
    return partition.rows[layout.active][layout.response_keep]
