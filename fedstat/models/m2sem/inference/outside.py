"""A variable outside the mixture, at one site: its sums by most likely cluster, and the question for them.

Entities with the same most likely cluster have the same weights in means that are corrected for
classification, so that sums by these clusters are all that leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.errors import MessageError
from fedstat.federation.door.facts import (
    DivisionOfRows,
    FactorsAsked,
    GroupSums,
    RowsByLevel,
    SummedColumns,
)
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.products import Conversation
from fedstat.federation.tables.columns import (
    LevelValue,
    as_categories,
    as_numbers,
    column_kind,
    find_levels,
)
from fedstat.inference.mixture.bch import ModalSums
from fedstat.models.m2sem.client.columns import take_columns
from fedstat.records import from_json, to_json
from fedstat.typing import Array, Floats, Ints

MOST_CLUSTERS = 1000


@dataclass(frozen=True, slots=True)
class OutsideAsked:
    """A variable of an institution, by so many clusters."""

    variable: str
    clusters: int


def sum_outside(data: SiteData, state: State, text: str, cluster: Ints) -> tuple[dict[str, Array], str]:
    """Sum a variable by most likely cluster, (n_rows,), -1 for none.

    Released are ``entities`` (K,) with a value, ``means`` (K, C) and ``products`` (K, C, C) about the means;
    components of a categorical variable are its levels, of which the text tells; numbers have none, however
    few they are.
    """
    asked = from_json(OutsideAsked, text, f"{data.name}: the question about a variable outside")
    K = asked.clusters
    check_lengths(data.name, cluster=(cluster, data.table.n_rows))
    if not 1 <= K <= MOST_CLUSTERS or (len(cluster) and not -1 <= cluster.min() <= cluster.max() < K):
        raise MessageError(f"{data.name}: expected clusters from 0 to {K - 1}, or -1")
    column = take_columns(data, state, [asked.variable], frozenset())[asked.variable]
    levels: tuple[LevelValue, ...] = ()
    if column_kind(column, data.name, asked.variable) == "category":
        present = column.dropna()
        levels, counts = find_levels(present), present.value_counts()
        state.tell(RowsByLevel(asked.variable, [int(counts[level]) for level in levels]))
    used = column.notna().to_numpy(dtype=np.bool_) & (cluster >= 0)
    rows, code = np.flatnonzero(used), cluster[used]
    values: Floats
    if levels:
        codes = as_categories(column[used], levels, data.name, asked.variable).codes
        values = np.eye(len(levels))[codes]
        cells = np.array([values[code == k].sum(axis=0) for k in range(K)])
        for k in range(K):
            state.tell(RowsByLevel(f"{asked.variable} in cluster {k + 1}", cells[k].astype(int).tolist()))
        summed = None
    else:
        values = as_numbers(column[used], data.name, asked.variable)[:, None]
        summed = SummedColumns(values, code)
    state.rest_on(len(rows))
    state.tell(GroupSums(code, summed=summed), DivisionOfRows("", code, rows))
    sums = sums_by_cluster(values, code, K)
    return {"entities": sums.entities, "means": sums.means, "products": sums.products}, to_json(levels)


def sums_by_cluster(values: Floats, code: Ints, K: int) -> ModalSums:
    """Entities, means and products about these of values (n, C) by cluster (n,)."""
    C = values.shape[1]
    entities, means, products = np.zeros(K), np.zeros((K, C)), np.zeros((K, C, C))
    for k in np.unique(code).tolist():
        part = values[code == k]
        entities[k], means[k] = len(part), part.mean(axis=0)
        products[k] = (part - means[k]).T @ (part - means[k])
    return ModalSums(entities, means, products)


def ask_outside(
    asking: Conversation, client: str, variable: str, cluster: Ints, K: int
) -> Rounds[tuple[tuple[str, ...], ModalSums]]:
    """Ask an institution for sums of a variable by cluster (n_rows,), and its levels, none of numbers."""
    asked = to_json(OutsideAsked(variable, K))
    (reply,) = yield [asking.ask(client, "sum_outside", asked, cluster=cluster)]
    levels = from_json(tuple[LevelValue, ...], reply.text or "[]", f"{client}: levels of {variable}")
    a = reply.arrays
    return tuple(str(level) for level in levels), ModalSums(a["entities"], a["means"], a["products"])


BEHIND = (FactorsAsked, GroupSums, DivisionOfRows)
OUTSIDE_STEPS = {
    "sum_outside": Step(
        sum_outside,
        {"cluster": Declared("presence", "most likely cluster of the institution's entities", dtype="int64")},
        {
            "entities": Declared("aggregate", "entities with the variable by cluster", behind=BEHIND),
            "means": Declared("aggregate", "means of the variable by cluster", 2, behind=BEHIND),
            "products": Declared("aggregate", "variation of the variable by cluster", 3, behind=BEHIND),
        },
        Declared("control", "a variable and the number of clusters"),
        Declared("schema", "levels of a variable", behind=(FactorsAsked,)),
    ),
}
