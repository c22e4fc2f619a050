"""Folds of entities that keep the groups of a site's column together, such as the rows of a person."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstat.errors import EstimationError, ModelError, Remedy
from fedstat.federation.design.vertical_design import FoldsRequest, design_request
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.models.checks import check_integer
from fedstat.models.vertical.layout import Layout
from fedstat.typing import Ints


def split_folds(folds: Any, default: int) -> tuple[Any, str]:
    """Return the number of folds, and the column whose entities are in one fold, or ""."""
    if isinstance(folds, tuple):
        if len(folds) != 2 or not isinstance(folds[0], str):
            raise ModelError(
                f"folds: expected a column and a number such as ('person', 5), received {folds!r}"
            )
        return folds[1], folds[0]
    return (default, folds) if isinstance(folds, str) else (folds, "")


@dataclass(frozen=True, slots=True, eq=False)
class GroupFolds:
    """A column of groups and its site; `rows` are the positions of each site's records among all entities."""

    column: str
    site: str
    rows: Mapping[str, Ints]
    session: str
    seed: int

    @classmethod
    def of(cls, column: str, partition: ClientPartition, session: str, seed: int | None) -> GroupFolds | None:
        """Find the site of a column; None without a column, a ModelError if no site has it."""
        if not column:
            return None
        holders = [site for site, held in partition.columns.items() if column in held]
        if not holders:
            raise ModelError(
                f"folds: expected a number or a column of a site, received {column!r}, which no site has"
            )
        if seed is not None:
            check_integer("seed", seed, 0)
        drawn = int(np.random.default_rng().integers(2**31)) if seed is None else int(seed)
        return cls(column, holders[0], partition.rows, session, drawn)

    def draw(self, layout: Layout, folds: int, least: int) -> FitProtocol[Ints]:
        """Request the folds of a layout's entities, (n,): each must have `least` entities or more.

        Entities without a record at the column's site are groups of their own.
        """
        entities = self.rows[layout.active][layout.response_keep]
        own = self.rows[self.site]
        use = np.isin(own, entities)
        request = FoldsRequest(self.column, folds, self.seed)
        (reply,) = yield [design_request(self.site, "draw_folds", self.session, request, use=use)]
        code = np.full(layout.n, -1, dtype=np.int64)
        code[np.searchsorted(entities, own[use])] = reply.arrays["fold"].astype(np.int64)
        alone = np.flatnonzero(code < 0)
        code[alone] = np.random.default_rng(self.seed).permutation(np.arange(len(alone)) % folds)
        fewest = int(np.bincount(code, minlength=folds).min())
        if fewest < least:
            raise EstimationError(
                f"the smallest of {folds} folds by '{self.column}' has {fewest:,} entities, but sums of "
                f"products are released only over {least:,} or more",
                remedy=Remedy("fit(..., select='bic')", "use fewer folds, or {arguments}"),
            )
        return code
