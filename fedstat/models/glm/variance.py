"""Covariance of the coefficients from sums over sites."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.message import Reply
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.kernels.clusters import corrected_sums
from fedstat.models.glm.fit import GLMFit
from fedstat.models.horizontal.clusters import POWERS, ClusterChoice, Clustering, require_inside
from fedstat.models.horizontal.session import RowsSession, add
from fedstat.typing import Array, Floats, Ints


@dataclass(frozen=True, slots=True)
class CovarianceChoice:
    """Covariance estimator: statsmodels' name for it, columns of clusters and strata, and a correction."""

    cov_type: str
    clusters: str | None = None
    strata: str | None = None
    correction: str = "CR2"


@dataclass(frozen=True, slots=True, eq=False)
class Variance:
    """A covariance (p, p), the numbers of clusters and strata behind it, and the effective ones.

    `spread` (A, 4) has rows, and sums of powers of estimated weights, by arm.
    """

    cov: Floats
    counts: tuple[int, int] | None = None
    clustering: Clustering | None = None
    spread: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ClusterSums:
    """Clusters' scores, summed by stratum.

    `counts` (S,) of clusters, `sums` (S, p) and `outer` (S, p, p) of their scores and outer products;
    `within` (p, p) is the variance between clusters in strata within one site. `clusters` and `strata` count
    all of them, `lonely` the strata within one site that have a single cluster.
    """

    counts: Floats
    sums: Floats
    outer: Floats
    within: Floats
    clusters: int
    strata: int
    lonely: int


def request_clusters(
    session: RowsSession, fit: GLMFit, clusters: str, strata: str | None, choice: ClusterChoice | None
) -> FitProtocol[tuple[list[Reply], dict[str, Array], int]]:
    """Request the clusters' scores from the sites, for a covariance of clusters with its correction.

    Returns replies, the arrays of the request, and the number of clusters. It is an error if a cluster is in
    different strata at different sites.
    """
    text = json.dumps({"clusters": clusters, "strata": strata})
    listed = yield session.request_all("list_clusters", {}, text)
    # Only hashes that several sites list are sent back: a stratum of one site stays private to it.
    several = _at_several(listed, "strata")
    arrays = {
        "beta": fit.gamma,
        "shift": fit.coordinates.shift,
        "scale": fit.coordinates.scale,
        "shared": _at_several(listed, "clusters"),
        "spanning": several if strata is not None else np.zeros(1, dtype=np.int64),
    }
    if choice is not None:
        arrays |= choice.arrays(fit.total.information)
    replies = yield session.request_all("sum_clusters", arrays)
    together = [np.concatenate([r.arrays[name] for r in replies]) for name in ("shared", "shared_strata")]
    pairs = np.unique(np.column_stack(together), axis=0)
    if len(pairs) != len(np.unique(pairs[:, 0])):
        raise EstimationError(
            f"survey variance: labels of '{clusters}' are in different '{strata}' at different sites. Give "
            "clusters labels that are unique over strata"
        )
    listing = np.unique(np.concatenate([reply.arrays["clusters"] for reply in listed]))
    return replies, arrays | {"pairs": pairs}, len(listing)


def _rank_across(replies: Sequence[Reply], fit: GLMFit) -> int:
    """Return the rank of the absorbed levels that are not nested in clusters; one, the mean, if all are."""
    if "nested" not in replies[0].arrays:
        return 0
    across = add(replies, "nested") < len(replies)
    if across.all():
        return fit.design.absorbed.levels
    return max(round(float(add(replies, "levels")[across].sum())), 1)


def cluster_sums(
    session: RowsSession, fit: GLMFit, clusters: str, strata: str | None
) -> FitProtocol[ClusterSums]:
    """Request the clusters' scores by stratum; those of clusters at several sites are added first."""
    replies, arrays, count = yield from request_clusters(session, fit, clusters, strata, None)
    return add_clusters(replies, arrays, arrays["pairs"], count)


def clustered(
    session: RowsSession, fit: GLMFit, choice: CovarianceChoice, by_site: bool
) -> FitProtocol[Variance]:
    """Request the clusters' scores, corrected for leverage as chosen, for the cluster-robust covariance.

    CR1 has statsmodels' factor G / (G - 1) (n - 1) / (n - p), where n counts a row of frequency weight f as f
    rows, as the scores do; absorbed levels count as coefficients unless they are nested in clusters, and as
    one if all are, as in fixest. With `by_site` the sites are the clusters.
    """
    assert choice.clusters is not None
    clusters = ClusterChoice.of(choice.clusters, choice.correction)
    power, columns, n, p = POWERS[choice.correction], fit.coordinates, fit.total.weight, len(fit.gamma)
    point = {"beta": fit.gamma, "shift": columns.shift, "scale": columns.scale}
    shared, across = np.zeros((0, p)), int(fit.design.absorbed.levels > 0)
    if by_site:
        G = len(session.sites)
        replies = yield session.request_all("sum_site", point | clusters.arrays(fit.total.information))
    else:
        replies, _, G = yield from request_clusters(session, fit, choice.clusters, None, clusters)
        across = _rank_across(replies, fit)
        shared = add(replies, "shared_sums")
    if G < 2:
        raise EstimationError("cov_type='cluster' needs at least two clusters; there is one")
    with np.errstate(divide="ignore"):
        meat, clustering = clusters.added(replies, G)
    if len(shared):
        # Clusters over several sites are corrected once their scores are added, and not before.
        together = add(replies, "shared_information") if power else np.zeros((len(shared), p, p))
        inverse = np.asarray(np.linalg.inv(fit.total.information), dtype=np.float64)
        found = corrected_sums(shared, together, inverse, columns.back, power)
        require_inside(found.inside, clusters.without)
        # Without a correction the shares of these clusters are not released.
        shares = 1.0 / clustering.effective + found.concentration
        effective = 1.0 / shares if power else np.full(p, float(G))
        meat, clustering = meat + found.meat, replace(clustering, effective=effective)
    factor = G / (G - 1.0) * (n - 1.0) / (n - p - across) if choice.correction == "CR1" else 1.0
    # Leverages are shares of the expected information, and so is the bread that belongs to them.
    cov = factor * sandwich(fit, meat, expected=clustering.corrected)
    return Variance(cov, (G, 1), clustering)


def _at_several(replies: Sequence[Reply], name: str) -> Ints:
    """Return the hashes that several sites list, (s,)."""
    found, counts = np.unique(np.concatenate([reply.arrays[name] for reply in replies]), return_counts=True)
    return np.asarray(found[counts > 1])


def add_clusters(
    replies: Sequence[Reply], request: Mapping[str, Array], pairs: Ints, clusters: int
) -> ClusterSums:
    """Add up the sites' sums over clusters.

    `request` holds ``shared`` and ``spanning``, the clusters and strata that several sites have; `pairs` (s,
    2) the shared clusters, ascending, and the stratum of each, which is one of `spanning`.
    """
    counts, sums, outer, scores = (add(replies, name) for name in ("counts", "sums", "outer", "shared_sums"))
    # A cluster over several sites is squared once its scores are added, and not before.
    for h, score in zip(np.searchsorted(request["spanning"], pairs[:, 1]), scores, strict=True):
        counts[h] += 1.0
        sums[h] += score
        outer[h] += np.outer(score, score)
    own, lonely = add(replies, "lonely").tolist()
    return ClusterSums(counts, sums, outer, add(replies, "within"), clusters, len(counts) + own, lonely)


def sandwich(fit: GLMFit, meat: Floats, *, expected: bool = False) -> Floats:
    """Return bread, meat, bread in the units of the data.

    The bread is the inverse observed information, as in statsmodels, or the expected one.
    """
    total = fit.total
    bread = total.information if expected or total.observed is None else total.observed
    half = fit.coordinates.back @ np.linalg.inv(bread)
    return np.asarray(half @ meat @ half.T)


def of_rows(fit: GLMFit, cov_type: str) -> Variance:
    """Return the sandwich of the rows' scores, for HC1 times n / (n - p)."""
    assert fit.meat is not None
    # statsmodels' GLM omits the factor of HC1; its OLS has it. Weights count as rows.
    n = fit.total.weight
    return Variance((n / (n - fit.design.rank) if cov_type == "HC1" else 1.0) * sandwich(fit, fit.meat))


def leveraged_sums(session: RowsSession, fit: GLMFit, power: int) -> FitProtocol[Floats]:
    """Request the outer products of the rows' scores over a power of one minus their leverages: (p, p).

    The sites compute leverages by the inverse of the information of all, and keep them. EstimationError if a
    row has leverage one.
    """
    arrays = {
        "beta": fit.gamma,
        "shift": fit.coordinates.shift,
        "scale": fit.coordinates.scale,
        "inverse": np.linalg.inv(fit.total.information),
        "power": np.array(power),
    }
    replies = yield session.request_all("sum_leveraged", arrays)
    if int(add(replies, "inside")) < len(replies):
        raise EstimationError(
            "cov_type: a row has leverage one, for instance the only row of a level. HC2 and HC3 would "
            "divide its residual by zero; use 'HC1', or merge levels"
        )
    return add(replies, "meat")


def model_based(fit: GLMFit) -> Floats:
    """Return the dispersion times the inverse expected information."""
    back = fit.coordinates.back
    return np.asarray(fit.dispersion * back @ np.linalg.inv(fit.total.information) @ back.T)


def linearized(fit: GLMFit, sums: ClusterSums) -> Floats:
    """Linearized covariance of a stratified, clustered sample (Binder 1983), first stage with replacement.

    sum_h n_h / (n_h - 1) sum_i (u_hi - mean_h)(u_hi - mean_h)' between inverse informations, as the survey
    package of R computes it; a stratum with a single cluster is an error.
    """
    # Strata over several sites are counted here, those of one site at the site.
    lonely = sums.lonely + int((sums.counts < 2).sum())
    if lonely:
        raise EstimationError(
            f"survey variance: {lonely} of {sums.strata} strata have a single cluster, so that their "
            "variance cannot be estimated; merge them with similar strata"
        )
    n = sums.counts[:, None, None]
    means = sums.sums[:, :, None] * sums.sums[:, None, :] / n
    return sandwich(fit, sums.within + (n / (n - 1.0) * (sums.outer - means)).sum(axis=0), expected=True)
