"""Sums of scores by cluster and stratum at a site, for clustered and for survey variances.

The coordinator must know which clusters occur at several sites, and need not know any label: it is told
keyed hashes, whose key the sites share and it does not have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedstat.errors import DesignError, MessageError
from fedstat.federation.door.facts import ClusterRows
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step
from fedstat.kernels.glm.sums import row_scores
from fedstat.models.glm.steps import BETA, COLUMNS, model_of
from fedstat.models.horizontal.rows import SUMS, glm_rows, summed
from fedstat.typing import Array, Bools, Floats, Ints

BLOCK = 65_536
MOST = 2**24
"""Numbers by clusters or strata of several sites."""


@dataclass(frozen=True, slots=True, eq=False)
class RowClusters:
    """Clusters of a site's rows: `code` (n,) of each whole row, by number.

    `cluster` (G,) are keyed hashes of the clusters' labels, `stratum` (G,) of their strata's; 0 without
    strata.
    """

    code: Ints
    cluster: Ints
    stratum: Ints


def hash_labels(labels: pd.Index, key: int) -> Ints:
    """Keyed 62-bit hashes of labels; whole numbers and the same number with a fraction of zero agree."""
    # The key is the sites' own: without it a coordinator could hash likely labels and compare.
    secret = (key % 2**128).to_bytes(16, "little")
    out = np.empty(len(labels), dtype=np.int64)
    for i, label in enumerate(labels):
        plain = int(label) if isinstance(label, float) and label.is_integer() else label
        digest = hashlib.blake2b(repr(plain).encode(), key=secret, digest_size=8).digest()
        # 62 bits fit an int64; zero stays free for "no strata".
        out[i] = (int.from_bytes(digest, "little") >> 2) + 1
    return out


def list_clusters(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Name the site's clusters and strata by keyed hashes; an error where a cluster lies in two strata.

    `text` is JSON: ``clusters`` and ``strata``, the columns (``strata`` may be null). Released are
    ``clusters`` (G,) and ``strata`` (S,).
    """
    model, content = model_of(state), json.loads(text)
    columns = [content["clusters"], *([] if content["strata"] is None else [content["strata"]])]
    if not set(columns) <= set(model.opened.question.labels):
        raise MessageError(f"{data.name}: the model did not open columns {columns} as labels")
    labels = [
        pd.concat([rows.frame[name].astype(object) for rows, _ in model.opened.chunks()]) for name in columns
    ]
    code, cluster = _hash_column(labels[0], data.common_seed)
    stratum = np.zeros(len(cluster), dtype=np.int64)
    if len(columns) > 1:
        own, strata = _hash_column(labels[1], data.common_seed)
        # One pair for each cluster, unless its rows lie in several strata.
        pairs = np.unique(np.column_stack([code, own]), axis=0)
        if len(pairs) != len(cluster):
            raise DesignError(
                f"site {data.name!r}: {len(pairs) - len(cluster):,} labels of '{columns[0]}' lie in "
                f"more than one of '{columns[1]}'; give clusters labels that are unique over strata"
            )
        stratum[pairs[:, 0]] = strata[pairs[:, 1]]
    state.keep("glm groups", RowClusters(code, cluster, stratum), state.entities)
    return {"clusters": np.sort(cluster), "strata": np.unique(stratum)}, ""


def _hash_column(labels: pd.Series, key: int) -> tuple[Ints, Ints]:
    """Return the label's number for every row, (n,), and the hashes of the labels, (G,)."""
    code, found = pd.factorize(labels)
    plain = [getattr(label, "item", lambda label=label: label)() for label in found]
    return code.astype(np.int64), hash_labels(pd.Index(plain, dtype=object), key)


def sum_clusters(
    data: SiteData,
    state: State,
    beta: Floats,
    shift: Floats,
    scale: Floats,
    shared: Ints,
    spanning: Ints,
) -> dict[str, Array]:
    """Sum products of clusters' scores; refused where too few rows lie behind one of the sums.

    `beta`, `shift` and `scale` (p,) are as for ``sum_scores``. `shared` (s,) are hashes, ascending, of
    clusters that other sites have as well, whose scores are added up one by one; `spanning` (h,) those of
    strata that other sites have as well, whose other clusters are summed by stratum; without strata 0, that
    of all.

    Released for the other clusters of `spanning` strata: ``counts`` (h,), ``sums`` (h, p), ``outer`` (h, p,
    p). For the shared clusters: ``shared_sums`` (s, p), and ``shared``, ``shared_strata``, those that are
    here and their strata. For the strata of this site alone together: ``within`` (p, p), their part of the
    linearised variance, and ``lonely``, how many there are and how many have a single cluster. Clusters and
    strata that are not here have zeros: of all but the hashes only the sums over sites are needed.
    """
    model = model_of(state)
    T = model.translation(data.name, beta, shift, scale)
    groups = state.use("glm groups", RowClusters, "clusters were not listed; ask 'list_clusters' first")
    p = len(beta)
    _check_hashes(data.name, "shared", shared, p)
    _check_hashes(data.name, "spanning", spanning, p * p)
    # Three disjoint kinds: shared clusters, others of spanning strata, and those of this site's own strata.
    single: Bools = np.isin(groups.cluster, shared)
    spans: Bools = np.isin(groups.stratum, spanning) & ~single
    alone: Bools = ~spans & ~single
    rows = np.bincount(groups.code, minlength=len(groups.cluster))
    by_stratum = [int(rows[spans & (groups.stratum == stratum)].sum()) for stratum in spanning]
    # Each sum below is an aggregate of its own: the door counts the rows behind every one.
    state.tell(ClusterRows([*rows[single].tolist(), *by_stratum, int(rows[alone].sum())]))
    state.tell(*model.answered_at(T @ beta))
    scores = cluster_scores(data, state, groups, T @ beta) @ T
    own = [scores[spans & (groups.stratum == stratum)] for stratum in spanning]
    shared_sums = np.zeros((len(shared), p))
    shared_sums[np.searchsorted(shared, groups.cluster[single])] = scores[single]
    within, lonely = _within_strata(scores[alone], groups.stratum[alone])
    return {
        "counts": np.array([float(len(part)) for part in own]),
        "sums": np.array([part.sum(axis=0) for part in own]).reshape(-1, p),
        "outer": np.array([part.T @ part for part in own]).reshape(-1, p, p),
        "shared": groups.cluster[single],
        "shared_strata": groups.stratum[single],
        "shared_sums": shared_sums,
        "within": within,
        "lonely": lonely,
    }


def _check_hashes(site: str, name: str, hashes: Ints, size: int) -> None:
    """Require hashes that ascend, and that stand for no more sums, `size` each, than a message may hold."""
    if (np.diff(hashes) <= 0).any() or len(hashes) * size > MOST:
        raise MessageError(f"{site}: array '{name}' must ascend, and stand for at most {MOST:,} sums")


def _within_strata(scores: Floats, stratum: Ints) -> tuple[Floats, Ints]:
    """Sum n_h / (n_h - 1) sum_i (u_hi - mean_h)(u_hi - mean_h)' over strata; count them and the lonely."""
    p = scores.shape[1]
    total, strata = np.zeros((p, p)), np.unique(stratum)
    lonely = 0
    for one in strata:
        part = scores[stratum == one]
        if len(part) < 2:
            lonely += 1
            continue
        part = part - part.mean(axis=0)
        total += len(part) / (len(part) - 1.0) * (part.T @ part)
    return total, np.array([len(strata), lonely])


def cluster_scores(data: SiteData, state: State, groups: RowClusters, beta: Floats) -> Floats:
    """Sum of the rows' scores by cluster, (G, p)."""
    model = model_of(state)
    out = np.zeros((len(groups.cluster), model.p))
    at = 0
    for rows, X in model.opened.chunks():
        all_rows = glm_rows(rows, X)
        # Scores of all rows at once would be as large as the design.
        for start in range(0, len(X), BLOCK):
            part = all_rows.part(slice(start, start + BLOCK))
            np.add.at(out, groups.code[at : at + len(part.y)], row_scores(part, beta, model.distribution))
            at += len(part.y)
    return out


HASHES = Declared("presence", "keyed hashes of the labels of clusters")
STRATA = Declared("presence", "keyed hashes of the labels of strata")
BEHIND = (*SUMS, ClusterRows)
STEPS: Mapping[str, Step] = {
    "list_clusters": Step(
        list_clusters,
        gives={"clusters": HASHES, "strata": STRATA},
        text_in=Declared("schema", "columns of clusters and strata"),
    ),
    "sum_clusters": Step(
        sum_clusters,
        {
            **COLUMNS,
            "beta": Declared("aggregate", BETA, common=True),
            "shared": Declared(
                "presence", "keyed hashes of clusters that several sites have", dtype="int64", common=True
            ),
            "spanning": Declared(
                "presence", "keyed hashes of strata that several sites have", dtype="int64", common=True
            ),
        },
        {
            "counts": summed("clusters by stratum that several sites have", behind=BEHIND),
            "sums": summed("sums of scores by stratum", 2, behind=BEHIND),
            "outer": summed("sums of products of clusters' scores by stratum", 3, behind=BEHIND),
            "shared": HASHES,
            "shared_strata": STRATA,
            "shared_sums": summed("scores of clusters that several sites have", 2, behind=BEHIND),
            "within": summed("variance between clusters in strata of the site alone", 2, behind=BEHIND),
            "lonely": Declared(
                "aggregate", "number of strata, and of those with one cluster", maskable=True, behind=BEHIND
            ),
        },
    ),
}
