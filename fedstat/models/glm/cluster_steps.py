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

from fedstat.errors import DesignError, MessageError, PolicyError
from fedstat.federation.message import Declared, Step
from fedstat.federation.site import SiteData, State
from fedstat.kernels.glm import row_scores
from fedstat.models.glm.steps import BETA, COLUMNS, model_of
from fedstat.models.kernel_rows import glm_rows
from fedstat.typing import Array, Bools, Floats, Ints

BLOCK = 65_536


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Clusters of a site's rows.

    Parameters
    ----------
    code : (n,) array of int
        Cluster of each whole row.
    cluster, stratum : (G,) arrays of int
        Keyed hash of every cluster's label, and of its stratum's; 0 without strata.
    """

    code: Ints
    cluster: Ints
    stratum: Ints


def hash_labels(labels: pd.Index, key: int) -> Ints:
    """Keyed 62-bit hashes of labels; whole numbers and the same number with a fraction of zero agree."""
    secret = key.to_bytes(16, "little", signed=True)
    out = np.empty(len(labels), dtype=np.int64)
    for i, label in enumerate(labels):
        plain = int(label) if isinstance(label, float) and label.is_integer() else label
        digest = hashlib.blake2b(repr(plain).encode(), key=secret, digest_size=8).digest()
        out[i] = (int.from_bytes(digest, "little") >> 2) + 1
    return out


def list_clusters(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
    """Name the site's clusters by keyed hashes.

    Parameters
    ----------
    text : str
        JSON: ``clusters`` and ``strata``, the columns (``strata`` may be null).

    Raises
    ------
    DesignError
        A cluster lies in two strata.
    """
    model, content = model_of(data, state), json.loads(text)
    columns = [name for name in (content["clusters"], content["strata"]) if name is not None]
    if not set(columns) <= set(model.opened.question.labels) or content["clusters"] is None:
        raise MessageError(f"{data.name}: the model did not open columns {columns} as labels")
    frame = pd.concat([rows.frame[columns].astype(object) for rows, _ in model.opened.chunks()])
    code, labels = pd.factorize(frame[content["clusters"]])
    cluster = hash_labels(pd.Index([getattr(x, "item", lambda x=x: x)() for x in labels]), data.shared_seed)
    stratum = np.zeros(len(labels), dtype=np.int64)
    if content["strata"] is not None:
        own, names = pd.factorize(frame[content["strata"]])
        pairs = np.unique(np.column_stack([code, own]), axis=0)
        if len(pairs) != len(labels):
            raise DesignError(
                f"site {data.name!r}: {len(pairs) - len(labels):,} labels of '{content['clusters']}' lie in "
                f"more than one of '{content['strata']}'; give clusters labels that are unique over strata"
            )
        hashes = hash_labels(pd.Index([getattr(x, "item", lambda x=x: x)() for x in names]), data.shared_seed)
        stratum[pairs[:, 0]] = hashes[pairs[:, 1]]
    state.keep("glm groups", Groups(code.astype(np.int64), cluster, stratum), state.entities)
    return {"clusters": np.sort(cluster), "strata": np.unique(stratum)}, ""


def sum_clusters(
    data: SiteData, state: State, beta: Floats, shift: Floats, scale: Floats, shared: Ints
) -> dict[str, Array]:
    """Sum products of clusters' scores by stratum.

    Parameters
    ----------
    beta, shift, scale : (p,) arrays
        As for ``sum_scores``.
    shared : (s,) array of int
        Hashes of clusters that other sites have as well: their scores are released one by one.

    Returns
    -------
    dict
        For the other clusters, by stratum: ``strata`` (S,) hashes, ``counts`` (S,), ``sums`` (S, p),
        ``outer`` (S, p, p). For the shared ones: ``shared`` (s,), ``shared_strata`` (s,), ``shared_sums``
        (s, p).

    Raises
    ------
    PolicyError
        A shared cluster has fewer rows here than the owner wants behind an aggregate.
    """
    model = model_of(data, state)
    T = model.translation(data.name, beta, shift, scale)
    if "glm groups" not in state:
        raise MessageError(f"{data.name}: clusters were not listed; ask 'list_clusters' first")
    groups: Groups = state.use("glm groups")
    scores = cluster_scores(data, state, groups, T @ beta) @ T
    known: Bools = np.isin(groups.cluster, shared)
    sizes = np.bincount(groups.code, minlength=len(groups.cluster))
    if (sizes[known] < data.min_count).any():
        raise PolicyError(
            f"{data.name}: its policy (minimum count) wants at least {data.min_count} rows behind the score "
            "of a cluster that several sites have; some have fewer. Give clusters labels that are unique to "
            "a site"
        )
    strata = np.unique(groups.stratum)
    own = [scores[~known & (groups.stratum == stratum)] for stratum in strata]
    return {
        "strata": strata,
        "counts": np.array([float(len(part)) for part in own]),
        "sums": np.array([part.sum(axis=0) for part in own]),
        "outer": np.array([part.T @ part for part in own]),
        "shared": groups.cluster[known],
        "shared_strata": groups.stratum[known],
        "shared_sums": scores[known],
    }


def cluster_scores(data: SiteData, state: State, groups: Groups, beta: Floats) -> Floats:
    """Sum of the rows' scores by cluster, (G, p)."""
    model = model_of(data, state)
    out = np.zeros((len(groups.cluster), model.p))
    at = 0
    for rows, X in model.opened.chunks():
        all_rows = glm_rows(rows, X)
        for start in range(0, len(X), BLOCK):
            part = all_rows.part(slice(start, start + BLOCK))
            np.add.at(out, groups.code[at : at + len(part.y)], row_scores(part, beta, model.family))
            at += len(part.y)
    return out


HASHES = Declared("presence", "keyed hashes of the labels of clusters")
STRATA = Declared("presence", "keyed hashes of the labels of strata")
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
            "beta": Declared("aggregate", BETA),
            "shared": Declared("presence", "keyed hashes of clusters that several sites have", dtype="int64"),
        },
        {
            "strata": STRATA,
            "counts": Declared("aggregate", "clusters by stratum"),
            "sums": Declared("aggregate", "sums of scores by stratum", 2),
            "outer": Declared("aggregate", "sums of products of clusters' scores by stratum", 3),
            "shared": HASHES,
            "shared_strata": STRATA,
            "shared_sums": Declared("aggregate", "scores of clusters that several sites have", 2),
        },
    ),
}
