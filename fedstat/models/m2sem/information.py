"""Observed information of a mixture over sites, from local blocks and secure cross-products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.linalg import block_diag, null_space

from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import ProductOperand, SecureProductSession
from fedstat.kernels.ring import fractional_bits
from fedstat.models.m2sem.modality.base import Modality
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Observed information of one site's modalities, except for what it shares with others (Louis 1982).
#
# The factors of different modalities are independent given the cluster. The information between the
# parameters of two modalities is therefore the covariance, between clusters, of their expected scores given
# row and cluster: ``-sum_ik r_ik c_ik d_ik'`` of scores c, d that are centered over the posterior of each
# row.
#
# Rotations and shifts of the factors do not change any density. Parameters are expressed in coordinates
# without these directions, and only quantities that do not depend on them are reported. Loadings and means
# that are fixed at zero are left out.

LOGISTIC = np.pi**2 / 3.0
"""Variance of a logistic variable."""
STEP = 1e-5
"""Step of numerical derivatives of reported quantities, in units of a parameter."""
FLAT, UNKNOWN, NOT_IDENTIFIED = 1e-12, 1e-4, -1.0
"""Eigenvalue of a direction without a score; slope of a share along it, and the placeholder for such a
share."""
NEGLIGIBLE = 1e-10
"""Size of a score, relative to the largest, below which it does not depend on the cluster."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalInformation:
    """Local coordinates of a site: the scores of the first q of d depend on the cluster.

    `own` (d, d) is their information, `with_shares` (K, d) the sums of r c by cluster, `columns` (n, K, q)
    the centered scores times the root of the posterior. `jacobian` (s, d) is that of the reported quantities:
    by modality profiles (K, P, C), flat, then communalities (P,), which are also given for all modalities.
    `effects` (t, d) is that of effects of covariates, in the order of all modalities' rows.
    """

    own: Floats
    with_shares: Floats
    columns: Floats
    jacobian: Floats
    communalities: Floats
    effects: Floats


def local_information(
    modalities: Sequence[Modality], r: Floats, scale: Floats | None = None
) -> LocalInformation:
    """Compute the information of all modalities of a site, at their parameters and posteriors r (n, K).

    Effects are those of one unit of a covariate; `scale` (q,) are the covariates' standard deviations.
    """
    parts = [_of_modality(m, r) for m in modalities]
    q = [part.columns.shape[2] for part in parts]
    columns = np.concatenate([part.columns for part in parts], axis=2)
    own = block_diag(*(part.own for part in parts))
    first = np.cumsum([0, *(len(part.own) for part in parts)])
    at = np.concatenate([np.arange(f, f + w) for f, w in zip(first, q, strict=False)]).astype(np.int64)
    # Between modalities of one site as between those of two.
    own[np.ix_(at, at)] -= np.einsum("ikp,ikq->pq", columns, columns)
    order = np.concatenate([at, np.setdiff1d(np.arange(len(own)), at)])
    return LocalInformation(
        own[np.ix_(order, order)],
        np.concatenate([part.with_shares for part in parts], axis=1)[:, order],
        columns,
        block_diag(*(part.jacobian for part in parts))[:, order],
        np.concatenate([part.communalities for part in parts]),
        _per_unit(block_diag(*(part.effects for part in parts))[:, order], scale),
    )


def _per_unit(effects: Floats, scale: Floats | None) -> Floats:
    return effects if scale is None else effects / np.resize(scale, len(effects))[:, None]


def communalities(m: Modality) -> Floats:
    """Share of a column's variance within clusters that its factors explain: (P,), 0 for nominal columns.

    0 without factors. For ordinal and binary columns, the share of the variance of an underlying logistic
    variable.
    """
    squares = 0.0 * m.row_norms() if m.classes else m.row_norms() ** 2
    single = np.bincount(m.row_columns, minlength=m.P) == 1
    return np.where(single, squares / (squares + getattr(m, "psi", LOGISTIC)), 0.0)


def _of_modality(m: Modality, r: Floats) -> LocalInformation:
    scores, own = m.scores_by_cluster(r)
    centered = scores - np.einsum("nk,nkp->np", r, scores)[:, None]
    largest = np.abs(centered).max(axis=(0, 1), initial=0.0)
    free, flat = free_and_flat(m)
    unidentified = _unidentified(scores, r, free)
    flat = np.hstack([flat, unidentified])
    crossing = free & (largest > NEGLIGIBLE * max(float(np.abs(scores).max(initial=0.0)), 1e-300))
    bases = [_without(flat[one]) for one in (crossing, free & ~crossing)]
    Z = np.zeros((len(own), sum(base.shape[1] for base in bases)))
    q = bases[0].shape[1]
    Z[crossing, :q], Z[free & ~crossing, q:] = bases
    weighted = centered @ Z[:, :q]
    slopes, shared, effects = _slopes(m, free), communalities(m), _of_effects(m)[:, free]
    # With few columns, the data do not determine a share of variance: it changes where no density does.
    unknown = np.abs(slopes[-m.P :] @ flat[free]).max(axis=1, initial=0.0) > UNKNOWN
    slopes[-m.P :][unknown], shared[unknown] = 0.0, NOT_IDENTIFIED
    J = slopes @ Z[free]
    stated = np.vstack([slopes[: -m.P], effects])
    if np.abs(stated @ unidentified[free]).max(initial=0.0) > UNKNOWN * np.abs(slopes).max():
        own = -np.eye(len(own))  # rows do not determine profiles, for instance if loadings diverge
    shares = np.zeros((r.shape[1], Z.shape[1]))
    shares[:, :q] = np.einsum("nk,nkp->kp", r, weighted)
    return LocalInformation(
        Z.T @ own @ Z, shares, np.sqrt(r)[:, :, None] * weighted, J, shared, effects @ Z[free]
    )


def _of_effects(m: Modality) -> Floats:
    """Return the Jacobian (t, p) of effects of covariates with respect to all parameters."""
    places, units = m.effect_places()
    out = np.zeros((places.size, len(m.state())))
    out[np.arange(places.size), places.ravel()] = np.repeat(units, places.shape[1])
    return out


def free_and_flat(m: Modality) -> tuple[Bools, Floats]:
    """Return which of the p parameters are free, and directions (p, d) in which no density changes."""
    state, L = m.state(), m.loadings.copy()
    loading, means = _places(m, state)
    free: Bools = m.free.copy()
    unloaded = ~L.any(axis=1)
    free[loading[unloaded]] = False
    silent = m.silent or not m.means.any()
    free[means] &= not silent
    # Fixed means of latent classes determine the factors.
    directions = [] if m.classes else [*_rotations(m, loading, means, len(state))]
    if not silent and not m.classes:
        directions += [*_shifts(m, state), *_unseen(m, means, len(state))]
    return free, np.array(directions).T.reshape(len(state), -1)


def _places(m: Modality, state: Floats) -> tuple[Ints, Ints]:
    """Return indices, among the parameters, of loadings, (R, Q), and of means, (K, Q)."""
    m.restore(np.arange(len(state), dtype=np.float64))
    loading, means = m.loadings.astype(np.int64), m.means.astype(np.int64)
    m.restore(state)
    return loading, means


def _rotations(m: Modality, loading: Ints, means: Ints, p: int) -> Iterator[Floats]:
    for a, b in combinations(range(m.Q), 2):
        turned = np.zeros(p)
        for places, values in ((loading, m.loadings), (means, m.means)):
            turned[places[:, a]], turned[places[:, b]] = -values[:, b], values[:, a]
        yield turned


def _shifts(m: Modality, state: Floats) -> Iterator[Floats]:
    for c in np.eye(m.Q):
        m.means = m.means - c
        m._shift(c)
        yield m.state() - state
        m.restore(state)


def _unseen(m: Modality, means: Ints, p: int) -> Iterator[Floats]:
    """Return means of factors on which no column loads."""
    for e in null_space(m.loadings).T:
        for places in means:
            unseen = np.zeros(p)
            unseen[places] = e
            yield unseen


def _unidentified(scores: Floats, r: Floats, free: Bools) -> Floats:
    """Return directions (p, d) in which every row's score is zero, as for a factor of two columns."""
    weighted = (np.sqrt(r)[:, :, None] * scores[:, :, free]).reshape(-1, int(free.sum()))
    G = weighted.T @ weighted
    seen = np.diag(G) > FLAT**2 * np.diag(G).max(initial=0.0)
    scale = np.where(seen, np.diag(G), 1.0) ** -0.5
    values, vectors = np.linalg.eigh(G * np.outer(scale, scale))
    out = np.zeros((len(free), int((values < FLAT * values[-1]).sum())))
    out[free] = scale[:, None] * vectors[:, : out.shape[1]]
    return np.asarray(out / np.maximum(np.linalg.norm(out, axis=0), 1e-300))


def _without(flat: Floats) -> Floats:
    """Return orthonormal coordinates (p, d) without some directions (p, f)."""
    return null_space(flat.T) if flat.any() else np.eye(len(flat))


def _slopes(m: Modality, free: Bools) -> Floats:
    """Jacobian of the reported quantities in the free parameters; central differences for communalities."""
    state, columns = m.state(), []
    for j in np.flatnonzero(free).tolist():
        h = STEP * max(1.0, abs(state[j]))
        sides = []
        for moved in (h, -h):
            m.restore(state + moved * np.eye(1, len(state), j)[0])
            sides.append(communalities(m))
        columns.append((sides[0] - sides[1]) / (2.0 * h))
    m.restore(state)
    return np.concatenate([np.nan_to_num(m.profile_slopes()[:, free]), np.array(columns).T])


# ----------------------------------------------------------------------------------------------------
# Observed information of a mixture over sites: own blocks from each site, cross-blocks by secure products.

SCORES = "scores"


@dataclass(frozen=True, slots=True, eq=False)
class SiteInformation:
    """Releases of a site about its d coordinates; it multiplies the first `crossing` with those of others.

    `own` (d, d), `with_shares` (K, d), `jacobian` (s, d) of its reported quantities, with effects of
    covariates at the end, `communalities` of its columns.
    """

    own: Floats
    with_shares: Floats
    jacobian: Floats
    communalities: Floats
    crossing: int


@dataclass(frozen=True, slots=True, eq=False)
class ObservedInformation:
    """Inverse (p, p) of the information of K - 1 shares and all sites' coordinates, in their order.

    `jacobians` (s, d) are those of each site's reported quantities, `communalities` (sum of P,) of its
    columns. `problem` states why there is no inverse.
    """

    cov: Floats
    clusters: int
    jacobians: Mapping[str, Floats]
    communalities: Mapping[str, Floats]
    problem: str = ""

    @classmethod
    def none(cls, clusters: int, problem: str) -> ObservedInformation:
        """Return an information without an inverse, and the reason."""
        return cls(np.zeros((0, 0)), clusters, {}, {}, problem)

    @property
    def available(self) -> bool:
        """Whether there are standard errors."""
        return not self.problem

    def of_site(self, site: str) -> Floats:
        """Covariance (s, s) of a site's reported quantities."""
        at = self.clusters - 1
        for name, jacobian in self.jacobians.items():
            d = jacobian.shape[1]
            if name == site:
                return np.asarray(jacobian @ self.cov[at : at + d, at : at + d] @ jacobian.T)
            at += d
        raise KeyError(site)

    def of_effects(self, site: str, rows: int) -> Floats:
        """Covariance (t, t) of a site's effects of covariates, its last t reported quantities."""
        first = len(self.jacobians[site]) - rows
        return self.of_site(site)[first:, first:]

    def of_shares(self) -> Floats:
        """Covariance (K, K) of the shares of the clusters."""
        free = self.clusters - 1
        J = np.vstack([np.eye(free), -np.ones((1, free))])
        return np.asarray(J @ self.cov[:free, :free] @ J.T)


def request_information(
    requester: SecureProductSession,
    slot: int,
    r: Floats,
    w: Floats,
    place: Mapping[str, Ints],
) -> FitProtocol[ObservedInformation]:
    """Request the information of sites with entities at `place`, and multiply the scores of every two.

    Posteriors r (N, K) and shares w (K,) are those at the present parameters.
    """
    sites = tuple(place)
    K = len(w)
    replies = yield [requester.request(site, "open_scores", slot=np.array(slot)) for site in sites]
    parts = {
        reply.site: SiteInformation(
            reply.arrays["own"],
            reply.arrays["with_shares"],
            reply.arrays["jacobian"],
            reply.arrays["communalities"],
            int(reply.arrays["crossing"]),
        )
        for reply in replies
    }
    sides = sides_of(parts, place, len(r), K)
    pairs = [(a, b) for a, b in combinations(sides, 2) if len(np.intersect1d(place[a.site], place[b.site]))]
    if problem := too_few(parts, place, pairs):
        return ObservedInformation.none(K, problem)
    made = yield from requester.multiply(pairs, sites, 1, len(r) * K, fractional_bits(len(r) * K), "scores ")
    crossed = {(one.a.site, one.b.site): one.products[0] for one in made}
    return invert(assemble(r, w, parts, crossed), K, parts)


def too_few(
    parts: Mapping[str, SiteInformation],
    place: Mapping[str, Ints],
    pairs: Sequence[tuple[ProductOperand, ProductOperand]],
) -> str:
    """Name sites with too few entities for their number of scores; empty if there are none."""
    for site, part in parts.items():
        if len(place[site]) < 2 * part.crossing:
            return _few(f"'{site}' has", len(place[site]), part.crossing)
    for a, b in pairs:
        common = len(np.intersect1d(place[a.site], place[b.site]))
        if common < 2 * (a.width + b.width):
            return _few(f"'{a.site}' and '{b.site}' share", common, a.width + b.width)
    return ""


def _few(who: str, entities: int, columns: int) -> str:
    return (
        f"{who} {entities:,} entities, but sums of products of {columns} scores need {2 * columns:,}: with "
        "fewer, they would reveal single entities. Select columns, take fewer factors or clusters, or use "
        "bootstrap()"
    )


def sides_of(
    parts: Mapping[str, SiteInformation], place: Mapping[str, Ints], n: int, K: int
) -> list[ProductOperand]:
    """Name the columns that sites multiply: one row for each entity and cluster."""
    sides, start = [], 0
    for site, part in parts.items():
        q = part.crossing
        if not q:
            continue
        rows = np.concatenate([k * n + place[site] for k in range(K)])
        sides.append(
            ProductOperand(site, SCORES, slice(start, start + q), rows, np.zeros(len(rows), dtype=np.int64))
        )
        start += q
    return sides


def assemble(
    r: Floats,
    w: Floats,
    parts: Mapping[str, SiteInformation],
    crossed: Mapping[tuple[str, str], Floats],
) -> Floats:
    """Assemble the information of shares w_1 ... w_(K-1) and of all coordinates."""
    K = len(w)
    sizes = [K - 1, *(len(part.own) for part in parts.values())]
    ends = np.cumsum(sizes)
    first = dict(zip(parts, ends[:-1].tolist(), strict=True))
    info = np.zeros((int(ends[-1]), int(ends[-1])))
    # Scores of w_k are 1 / w_k in cluster k and -1 / w_K in the last.
    a = np.vstack([np.diag(1.0 / w[:-1]), np.full((1, K - 1), -1.0 / w[-1])])
    mean = r @ a
    info[: K - 1, : K - 1] = mean.T @ mean
    for site, part in parts.items():
        at = slice(first[site], first[site] + len(part.own))
        info[at, at] = part.own
        info[: K - 1, at] = -a.T @ part.with_shares
        info[at, : K - 1] = info[: K - 1, at].T
    for (one, other), product in crossed.items():
        at = slice(first[one], first[one] + product.shape[0])
        to = slice(first[other], first[other] + product.shape[1])
        info[at, to], info[to, at] = -product, -product.T
    return info


def invert(info: Floats, clusters: int, parts: Mapping[str, SiteInformation]) -> ObservedInformation:
    """Invert the information, or state why it has no inverse."""
    jacobians = {site: part.jacobian for site, part in parts.items()}
    shared = {site: part.communalities for site, part in parts.items()}
    diagonal = np.diag(info)
    scale = np.where(diagonal > 0.0, diagonal, 1.0) ** -0.5
    values, vectors = np.linalg.eigh(info * np.outer(scale, scale))
    if not (diagonal > 0.0).all() or values[0] <= len(info) * np.finfo(np.float64).eps * values[-1]:
        return ObservedInformation(
            np.zeros((0, 0)),
            clusters,
            jacobians,
            shared,
            "the observed information is not positive definite: the fit has not reached a maximum, or a "
            "cluster or an error's variance is at its bound, or columns are too few to determine clusters",
        )
    half = scale[:, None] * vectors / np.sqrt(values)
    return ObservedInformation(half @ half.T, clusters, jacobians, shared)
