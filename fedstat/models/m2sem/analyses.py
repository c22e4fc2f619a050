"""Analyses after the fit that need consent: factor scores, and variables that were not clustered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fedstat.codec import from_json, to_json
from fedstat.errors import MessageError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure import facts
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.dry_run.execution import DrySite
from fedstat.federation.message import aggregate, check_lengths, control, presence, schema
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.federation.tables.columns import LevelValue, as_categories, as_numbers, column_kind, find_levels
from fedstat.inference.mixtures import SumsByMostLikelyCluster
from fedstat.models.m2sem.columns import take_columns
from fedstat.models.m2sem.request import FAMILY
from fedstat.models.run import PostFitAnalysis, run_analysis
from fedstat.typing import Array, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# A variable outside the mixture, at one site: its sums by most likely cluster, and the request for them.
#
# Entities with the same most likely cluster have the same weights in means that are corrected for
# classification error. Only sums by these clusters are therefore released.

MOST_CLUSTERS = 1000


@dataclass(frozen=True, slots=True)
class OutsideRequest:
    """A variable of a site, and the number of clusters."""

    variable: str
    clusters: int


BEHIND = (facts.FactorsRequested, facts.GroupSums, facts.RowGroups)


@step(
    FAMILY,
    takes={"cluster": presence("most likely cluster of the site's entities", dtype="int64")},
    releases={
        "entities": aggregate("entities with the variable by cluster"),
        "means": aggregate("means of the variable by cluster", 2),
        "products": aggregate("variation of the variable by cluster", 3),
    },
    rows_behind=BEHIND,
    request=OutsideRequest,
    requests=control("a variable and the number of clusters"),
    replies=schema("levels of a variable", behind=(facts.FactorsRequested,)),
)
def sum_outside(
    data: SiteData, state: State, request: OutsideRequest, cluster: Ints
) -> tuple[dict[str, Array], str]:
    """Sum a variable by most likely cluster, (n_rows,), -1 for none.

    Released are ``entities`` (K,) with a value, ``means`` (K, C) and ``products`` (K, C, C) about the means.
    The components of a categorical variable are its levels, which the text lists; numbers have no levels,
    however few they are.
    """
    K = request.clusters
    check_lengths(data.name, cluster=(cluster, data.table.n_rows))
    if not 1 <= K <= MOST_CLUSTERS or (len(cluster) and not -1 <= cluster.min() <= cluster.max() < K):
        raise MessageError(f"{data.name}: expected clusters from 0 to {K - 1}, or -1")
    column = take_columns(data, state, [request.variable], frozenset())[request.variable]
    levels: tuple[LevelValue, ...] = ()
    if column_kind(column, data.name, request.variable) == "category":
        present = column.dropna()
        levels, counts = find_levels(present), present.value_counts()
        state.report(facts.LevelRowCounts(request.variable, [int(counts[level]) for level in levels]))
    used = column.notna().to_numpy(dtype=np.bool_) & (cluster >= 0)
    rows, code = np.flatnonzero(used), cluster[used]
    values: Floats
    if levels:
        codes = as_categories(column[used], levels, data.name, request.variable).codes
        values = np.eye(len(levels))[codes]
        cells = np.array([values[code == k].sum(axis=0) for k in range(K)])
        for k in range(K):
            state.report(
                facts.LevelRowCounts(f"{request.variable} in cluster {k + 1}", cells[k].astype(int).tolist())
            )
        summed = None
    else:
        values = as_numbers(column[used], data.name, request.variable)[:, None]
        summed = facts.SummedColumns(values, code)
    state.count_entities(len(rows))
    state.report(facts.GroupSums(code, summed=summed), facts.RowGroups("", code, rows))
    sums = sums_by_cluster(values, code, K)
    return {"entities": sums.entities, "means": sums.means, "products": sums.products}, to_json(levels)


def sums_by_cluster(values: Floats, code: Ints, K: int) -> SumsByMostLikelyCluster:
    """Return entities, means and centered products of values (n, C) by cluster (n,)."""
    C = values.shape[1]
    entities, means, products = np.zeros(K), np.zeros((K, C)), np.zeros((K, C, C))
    for k in np.unique(code).tolist():
        part = values[code == k]
        entities[k], means[k] = len(part), part.mean(axis=0)
        products[k] = (part - means[k]).T @ (part - means[k])
    return SumsByMostLikelyCluster(entities, means, products)


def request_outside(
    requester: SecureProductSession, site: str, variable: str, cluster: Ints, K: int
) -> FitProtocol[tuple[tuple[str, ...], SumsByMostLikelyCluster]]:
    """Request from a site sums of a variable by cluster (n_rows,), and its levels (none for numbers)."""
    request = to_json(OutsideRequest(variable, K))
    (reply,) = yield [requester.request(site, "sum_outside", request, cluster=cluster)]
    levels = from_json(tuple[LevelValue, ...], reply.text or "[]", f"{site}: levels of {variable}")
    a = reply.arrays
    return tuple(str(level) for level in levels), SumsByMostLikelyCluster(
        a["entities"], a["means"], a["products"]
    )


# ----------------------------------------------------------------------------------------------------
# Further requests of results to sites: each is an analysis of its own, to which owners consent.


def analysis_of(
    partition: ClientPartition,
    call: str,
    clusters: str,
    columns: Mapping[str, Sequence[str]],
    step: str,
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
    guessed: frozenset[str] = frozenset(),
) -> PostFitAnalysis:
    """Describe one request to sites that read these `columns`, whose arrays have these `shapes` by site."""
    invent = partial(_invent, partition.rows, step, shapes)
    return PostFitAnalysis(
        partition, call, clusters, "a mixture of factor models", invent, columns, guessed=guessed
    )


def _invent(
    rows: Mapping[str, Ints],
    step: str,
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
    policies: Mapping[str, Policy],
) -> dict[str, DrySite]:
    declared, sites = FAMILIES[FAMILY][step], {}
    for name, policy in policies.items():
        answer = _answer(shapes.get(name, {}), declared.text_out is not None or declared.text_in is not None)
        instead = {(FAMILY, step): replace(declared, run=answer, after=None)}
        sites[name] = DrySite(name, policy, len(rows[name]), instead, rows[name])
    return sites


def _answer(shapes: Mapping[str, tuple[int, ...]], with_text: bool) -> Callable[..., Any]:
    """Return a step that releases zeros of these shapes."""

    def give(data: SiteData, state: State, *given: Array, **arrays: Array) -> Any:
        for declared in FAMILIES[FAMILY].values():
            for array in declared.given.values():
                state.reported.update(array.behind)  # facts about rows that do not exist
        state.count_entities(data.table.n_rows)
        out = {name: np.zeros(shape) for name, shape in shapes.items()}
        return (out, "") if with_text else out

    return give


def request_scores(model: Any, site: str, slot: int) -> Floats:
    """Request from a site the factor scores of its entities in a mixture of a model's session."""

    def protocol() -> FitProtocol[Floats]:
        (reply,) = yield [model._requester.request(site, "release_scores", slot=np.array(slot))]
        return reply.arrays["scores"]

    width = sum(one.factors(model.n_factors) for one in model._agreed.modalities[site])
    shapes = {site: {"scores": (len(model._subjects.place[site]), width)}}
    call, columns = f"M2SEMResults.factor_scores({site!r})", {site: model._columns_read(site)}
    analysis = analysis_of(model.partition, call, model._description, columns, "release_scores", shapes)
    return run_analysis(analysis, protocol, model._new_ledger())


def request_outside_sums(
    model: Any, site: str, variable: str, cluster: Ints, ledger: Ledger
) -> tuple[tuple[str, ...], SumsByMostLikelyCluster]:
    """Request from a site sums of a variable by cluster (n_rows,), in a model's session."""
    step, K = "sum_outside", model.n_clusters
    request = partial(request_outside, model._requester, site, variable, cluster, K)
    shapes = {site: {"entities": (K,), "means": (K, 1), "products": (K, 1, 1)}}
    # The columns of a session stay in use.
    columns = {site: (variable, *model._columns_read(site))}
    call = f"M2SEMResults.outside({variable!r})"
    analysis = analysis_of(
        model.partition, call, model._description, columns, step, shapes, frozenset({step})
    )
    return run_analysis(analysis, request, ledger)
