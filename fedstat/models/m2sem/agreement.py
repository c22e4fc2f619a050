"""What is agreed before a fit: kinds and levels of columns, modalities, and which entities who has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedstat.errors import EstimationError, ModelError
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Conversation
from fedstat.models.m2sem.client.asked import ColumnTold, CovariatesTold, ModalityAsked, OpenAsked
from fedstat.models.m2sem.course.mixture import Subjects
from fedstat.models.m2sem.modalities import Chosen, check_counted
from fedstat.records import from_json, to_json
from fedstat.typing import Bools, Ints

PER_FACTOR, PER_CLUSTER = 5, 10
"""Fewest entities of an institution for each factor, and in all for each cluster."""


@dataclass(frozen=True, slots=True, eq=False)
class Agreed:
    """Modalities by site, which of its records have a value in them, (n_rows,), and covariates as coded."""

    modalities: Mapping[str, tuple[ModalityAsked, ...]]
    seen: Mapping[str, Bools]
    covariates: Mapping[str, CovariatesTold] = field(default_factory=dict)

    @property
    def columns(self) -> int:
        """Number of columns of all institutions."""
        return sum(len(one.columns) for some in self.modalities.values() for one in some)


def agree_columns(asking: Conversation, chosen: Chosen) -> Rounds[Agreed]:
    """Agree with every institution on its columns."""
    clients = list(chosen.columns)
    replies = yield [asking.ask(c, "describe_columns", to_json(chosen.asked(c))) for c in clients]
    told = {
        reply.site: from_json(dict[str, ColumnTold], reply.text, f"{reply.site}: what it tells of columns")
        for reply in replies
    }
    check_counted(told)
    modalities = {client: chosen.modalities(client, told[client]) for client in clients}
    asked = {c: OpenAsked(modalities[c], chosen.covariates(c)) for c in clients}
    replies = yield [asking.ask(c, "open_columns", to_json(asked[c])) for c in clients]
    covariates = {
        reply.site: from_json(CovariatesTold, reply.text, f"{reply.site}: what it tells of covariates")
        for reply in replies
        if asked[reply.site].adjust is not None
    }
    return Agreed(modalities, {reply.site: reply.arrays["seen"] for reply in replies}, covariates)


def who_has_whom(
    agreed: Agreed,
    rows: Mapping[str, Ints],
    n_entities: int,
    least: Mapping[str, tuple[int, float]],
    *,
    nobody: bool = False,
) -> tuple[Subjects, Ints]:
    """Find the entities that some institution has, and their positions among all.

    An EstimationError where nobody has a value of some entities, unless that may be.
    """
    clients = tuple(sorted(agreed.modalities))
    table = np.zeros((n_entities, len(clients)), dtype=np.bool_)
    for k, client in enumerate(clients):
        table[rows[client][agreed.seen[client]], k] = True
    here = np.flatnonzero(table.any(axis=1))
    if len(here) < n_entities and not nobody:
        with_covariates = ", or lack a covariate of adjust=" if agreed.covariates else ""
        raise EstimationError(
            f"{n_entities - len(here):,} of {n_entities:,} entities have no value in any of these columns at "
            f"any institution{with_covariates}; nothing is known of "
            "their clusters. Leave them out of the partition, or take more columns"
        )
    members, pattern = np.unique(table[here], axis=0, return_inverse=True)
    place = {client: np.flatnonzero(table[here, k]) for k, client in enumerate(clients)}
    return Subjects(clients, place, pattern.ravel().astype(np.int64), members, least), here


def check_sizes(agreed: Agreed, subjects: Subjects, clusters: int, factors: int) -> None:
    """Require entities enough for so many clusters, and columns and entities for so many factors."""
    n = subjects.total
    if clusters > n / PER_CLUSTER:
        raise ModelError(
            f"n_clusters: expected at most {n // PER_CLUSTER} for {n:,} entities, {PER_CLUSTER} for each; "
            f"received {clusters}"
        )
    for client, some in agreed.modalities.items():
        here = len(subjects.place[client])
        if here < PER_FACTOR * factors:
            raise ModelError(
                f"n_factors: '{client}' has {here:,} entities, and {factors} factors need "
                f"{PER_FACTOR * factors}. Take fewer factors, or leave its columns out"
            )
        for one in some:
            if factors > len(one.columns):
                raise ModelError(
                    f"n_factors: modality '{one.name}' of '{client}' has {len(one.columns)} column(s) "
                    f"({', '.join(one.names[:4])}), fewer than {factors} factors. Take n_factors="
                    f"{len(one.columns)}, or join it with others by modalities={{...}}"
                )
