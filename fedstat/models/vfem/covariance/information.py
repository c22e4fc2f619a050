"""The observed information of (a, s2, beta, mu), and the layout of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from fedstat.inference.covariance import invert_information, nearest_psd, symmetrize
from fedstat.inference.recession import require_bounded
from fedstat.models.vertical.layout import Layout
from fedstat.models.vfem.covariance.cross_products import CrossProducts
from fedstat.typing import Array, Floats

# ----------------------------------------------------------------------------------------------------
# The covariance of psi = (a, s2, beta_1, mu_1, beta_2, mu_2, ...), and the index of each parameter in it.

SCALE_INDEX = 1
"""Index of the residual variance, which only a normal response has."""


@dataclass(frozen=True, slots=True)
class PsiCovariance:
    """Covariance of psi, (2 + 2p, 2 + 2p); if the response is not normal, t_1, ..., t_K follow.

    `how` names the method for cross-products, `size` and `error` the rows and the relative error of a sketch,
    `moved` the relative change of the products to make them positive semi-definite, and `dealers` the dealers
    of secure products. `left_out` counts the pairs of sites with too few common entities for a request.
    `asymmetry` is that of supplemented EM before it was made symmetric. `df` are the degrees of freedom of a
    robust covariance from random groups.
    """

    psi: Floats
    how: str = "none"
    size: int = 0
    error: float = 0.0
    moved: float = 0.0
    asymmetry: float = 0.0
    dealers: str = ""
    left_out: int = 0
    df: float | None = None

    @classmethod
    def of(cls, psi: Floats, products: CrossProducts, moved: float, asymmetry: float = 0.0) -> PsiCovariance:
        """Combine a covariance with the method of its cross-products."""
        return cls(
            psi,
            how=products.how,
            size=products.size,
            error=products.error,
            moved=moved,
            asymmetry=asymmetry,
            dealers=products.dealers,
            left_out=products.left_out,
        )


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """Indices of each site's beta and mu in psi."""

    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Length of psi."""
        return 2 + 2 * sum(self.sizes)

    def start(self, k: int) -> int:
        """First index of site k."""
        return 2 + 2 * sum(self.sizes[:k])

    def beta(self, k: int) -> slice:
        """Return the indices of beta_k."""
        return slice(self.start(k), self.start(k) + self.sizes[k])

    def mu(self, k: int) -> slice:
        """Return the indices of mu_k."""
        return slice(self.start(k) + self.sizes[k], self.start(k) + 2 * self.sizes[k])

    def both(self, k: int) -> slice:
        """Return the indices of (beta_k, mu_k)."""
        return slice(self.start(k), self.start(k) + 2 * self.sizes[k])


def psi_names(sites: Sequence[str], names: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Name each element of psi, for messages."""
    out = ["Intercept", "residual variance"]
    for k in sites:
        out += [f"{name} ({k})" for name in names[k]] + [f"mean of {name} ({k})" for name in names[k]]
    return out


# ----------------------------------------------------------------------------------------------------
# The observed information of psi = (a, s2, beta, mu) with every Sigma_k eliminated, from the sites' sums.
#
# The likelihood of y depends on an entity through the mean m and the variance v of its linear predictor.
# With normal errors its derivatives are
#
#     h = -L_mm = 1/v,    -L_mv = z/v,    kappa = -L_vv = z^2/v - 1/(2 v^2),    e = -L_v = (1/v - z^2)/2
#
# with z = L_m = r/v. For another distribution, these come from the response holder, and everything below
# holds without the residual variance. Let h_k be the sum over the entities that k lacks of -L_mv dm + kappa
# dv, C_jk the sum of kappa over those that both lack, and per site (J, j, N) from
# :class:`~fedstat.models.vfem.covariance.steps.SigmaElimination`. The information of psi is
#
#     H - h N h' - h j' - j h' - J + (h N + j) C (I + N C)^-1 (h N + j)'
#
# the Woodbury form of the Schur complement. Its inverse is the covariance of psi, which accounts for every
# nuisance parameter.


@dataclass(frozen=True, slots=True)
class PatternCurvatures:
    """Sums by missing pattern, each (G,), of h, -L_mv, kappa, e and z; see the module's docstring."""

    h: Floats
    z_v: Floats
    kappa: Floats
    e: Floats
    z: Floats

    @classmethod
    def of_normal(cls, n: Floats, v: Floats, z: Floats, z2: Floats) -> PatternCurvatures:
        """Compute them for a normal response, from counts, variances, and sums of z and z^2 by pattern."""
        return cls(n / v, z / v, z2 / v - 0.5 * n / v**2, 0.5 * (n / v - z2), z)


@dataclass(frozen=True, slots=True, eq=False)
class ScaleSums:
    """Second derivatives by a scale r that is not a variance: -L_mr, -L_vr and -L_rr by pattern, each (G,).

    Also, by site, the sums of its columns with -L_mr.
    """

    m: Floats
    v: Floats
    r: Floats
    by_site: Sequence[Floats]


@dataclass(frozen=True, eq=False)
class InformationSums:
    """Sums by pattern from the response holder, every site's reply on its own block, and those of a scale."""

    layout: Layout
    curvatures: PatternCurvatures
    parts: Sequence[Mapping[str, Array]]
    scale: ScaleSums | None = None

    @cached_property
    def places(self) -> ParameterLayout:
        """Indices of each site's parameters in psi."""
        return ParameterLayout(tuple(len(part["beta"]) for part in self.parts))

    @cached_property
    def missing(self) -> Floats:
        """One where a site misses in a pattern, (G, K)."""
        return self.layout.missing.astype(float)

    @cached_property
    def seen(self) -> Floats:
        """One where it does not."""
        return 1.0 - self.missing


def assemble_information(within: Sequence[Floats], between: Mapping[tuple[int, int], Floats]) -> Floats:
    """Assemble a symmetric matrix from blocks within sites and, for j < k, between them."""
    places = block_slices(within)
    complete = np.zeros((places[-1].stop, places[-1].stop))
    for here, block in zip(places, within, strict=True):
        complete[here, here] = block
    for (j, k), block in between.items():
        complete[places[j], places[k]], complete[places[k], places[j]] = block, block.T
    return complete


def block_slices(within: Sequence[Floats]) -> list[slice]:
    """Return the indices of each of the diagonal blocks."""
    return [slice(a, b) for a, b in pairwise(np.cumsum([0, *[len(block) for block in within]]).tolist())]


def project(within: Sequence[Floats], products: CrossProducts) -> tuple[dict[tuple[int, int], Floats], float]:
    """Project cross-products on the nearest positive semi-definite matrix, at unit diagonal.

    Returns the blocks between sites, and the size of the change. The blocks within sites are exact and stay
    as they are.
    """
    if not products.blocks:
        return {}, 0.0
    complete, places = assemble_information(within, products.blocks), block_slices(within)
    # At unit diagonal, so that the distance does not depend on the units of the columns.
    root = np.sqrt(np.maximum(np.diag(complete), np.finfo(float).tiny))
    near, moved = nearest_psd(complete / np.outer(root, root))
    near *= np.outer(root, root)
    return {(j, k): near[places[j], places[k]] for j, k in products.blocks}, moved


def hessian(at: InformationSums, cross: Mapping[tuple[int, int], Floats]) -> Floats:
    """Negative Hessian of the observed-data log-likelihood in psi, Sigma held fixed."""
    sums, places, mis, seen = at.curvatures, at.places, at.missing, at.seen
    H = np.zeros((places.total, places.total))
    H[0, 0], H[0, 1], H[1, 1] = sums.h.sum(), sums.z_v.sum(), sums.kappa.sum()
    for k, part in enumerate(at.parts):
        beta, w = part["beta"], part["w"]
        H[0, places.beta(k)] = part["by_v"][0] + 2.0 * w * (mis[:, k] @ sums.z_v)
        H[0, places.mu(k)] = -beta * (seen[:, k] @ sums.h)
        H[1, places.beta(k)] = part["by_z"][0] + 2.0 * w * (mis[:, k] @ sums.kappa)
        H[1, places.mu(k)] = -beta * (seen[:, k] @ sums.z_v)
        H[places.both(k), places.both(k)] = part["own"]
        H[places.beta(k), places.beta(k)] += part["gram"]
        for j in range(k):
            # Products without a request are zero, their expected value under the model.
            fill_pair(H, (j, k), at, cross.get((j, k), np.zeros((places.sizes[j], places.sizes[k]))))
    if at.scale is not None:
        fill_scale(H, at, at.scale)
    upper = np.triu(H, 1)
    return upper + upper.T + np.diag(np.diag(H))


def fill_scale(H: Floats, at: InformationSums, scale: ScaleSums) -> None:
    """Enter the row of a scale that is not a variance, above the diagonal of H."""
    H[0, SCALE_INDEX], H[SCALE_INDEX, SCALE_INDEX] = scale.m.sum(), scale.r.sum()
    for k, (part, own) in enumerate(zip(at.parts, scale.by_site, strict=True)):
        H[SCALE_INDEX, at.places.beta(k)] = own + 2.0 * part["w"] * (at.missing[:, k] @ scale.v)
        H[SCALE_INDEX, at.places.mu(k)] = -part["beta"] * (at.seen[:, k] @ scale.m)


def fill_pair(H: Floats, pair: tuple[int, int], at: InformationSums, uu: Floats) -> None:
    """Enter the block of sites j < k, with products `uu` of their columns, above the diagonal of H."""
    (j, k), places, sums = pair, at.places, at.curvatures
    mis, seen, one, two = at.missing, at.seen, at.parts[pair[0]], at.parts[pair[1]]
    both = (mis[:, j] * mis[:, k]) @ sums.kappa
    H[places.beta(j), places.beta(k)] = (
        uu
        + 2.0 * np.outer(one["by_z"][1 + k], two["w"])
        + 2.0 * np.outer(one["w"], two["by_z"][1 + j])
        + 4.0 * both * np.outer(one["w"], two["w"])
    )
    H[places.beta(j), places.mu(k)] = np.outer(
        -one["by_v"][1 + k] - 2.0 * one["w"] * ((mis[:, j] * seen[:, k]) @ sums.z_v), two["beta"]
    )
    H[places.mu(j), places.beta(k)] = np.outer(
        one["beta"], -two["by_v"][1 + j] - 2.0 * two["w"] * ((mis[:, k] * seen[:, j]) @ sums.z_v)
    )
    H[places.mu(j), places.mu(k)] = np.outer(one["beta"], two["beta"]) * ((seen[:, j] * seen[:, k]) @ sums.h)


@dataclass(frozen=True, slots=True)
class ProfiledInformation:
    """The information of psi without Sigma, and the weights Q (2 + 2p, K) of Sigma's projected scores in it.

    Let tau_k = beta_k'(Sigma_k - Sigma_k0) beta_k. Given psi, its mean changes by -slope' psi, and its
    covariance is `rest`, (K, K); it is `share`' times the projected scores.
    """

    information: Floats
    Q: Floats
    slope: Floats
    rest: Floats
    share: Floats


def profile_out_sigma(at: InformationSums, H: Floats) -> ProfiledInformation:
    """Schur complement of Sigma_1..Sigma_K; see the module's docstring."""
    places, mis, seen, sums = at.places, at.missing, at.seen, at.curvatures
    K = len(at.parts)
    h, j, N = np.zeros((places.total, K)), np.zeros((places.total, K)), np.zeros(K)
    J = np.zeros_like(H)
    # Column k: second derivatives by psi and t_k. Sigma_k enters the likelihood of y only through t_k.
    for k, part in enumerate(at.parts):
        of_scale = sums.kappa if at.scale is None else at.scale.v
        h[0, k], h[1, k] = mis[:, k] @ sums.z_v, mis[:, k] @ of_scale
        for m, other in enumerate(at.parts):
            both = (mis[:, k] * mis[:, m]) @ sums.kappa
            h[places.beta(m), k] = 2.0 * other["w"] * both
            if m != k:
                h[places.beta(m), k] += other["by_z"][1 + k]
                h[places.mu(m), k] = -other["beta"] * ((mis[:, k] * seen[:, m]) @ sums.z_v)
        j[places.both(k), k] = part["j"]
        J[places.both(k), places.both(k)] = part["J"]
        N[k] = float(part["N"])
    C = mis.T @ (sums.kappa[:, None] * mis)
    R = C @ np.linalg.inv(np.eye(K) + N[:, None] * C)
    P = h * N + j
    information = H - (h * N) @ h.T - h @ j.T - j @ h.T - J + P @ R @ P.T
    M = np.linalg.inv(np.eye(K) + C * N)
    return ProfiledInformation(symmetrize(information)[0], h - P @ R, P @ M, N[:, None] * M, np.asarray(M))


def psi_covariance(
    at: InformationSums, eliminated: ProfiledInformation, names: list[str], meat: Floats | None = None
) -> Floats:
    """Covariance of (psi, t) without a residual variance, whose place is zero, or with another scale.

    Predicted means depend on t_k = beta_k'Sigma_k beta_k, which changes by 2 w'd beta + beta'd Sigma beta.
    The covariance is robust if there is `meat`, the sum of products of the scores of psi and of the t_k given
    psi.
    """
    places, K, d = at.places, len(at.parts), at.places.total
    rest = np.arange(d) if at.scale is not None else np.delete(np.arange(d), SCALE_INDEX)
    V = np.zeros((d, d))
    own = [0, *(i for k in range(K) for i in np.arange(d)[places.beta(k)])]
    require_bounded(eliminated.information[np.ix_(own, own)], [names[i] for i in own])
    V[np.ix_(rest, rest)] = invert_information(
        eliminated.information[np.ix_(rest, rest)], [names[i] for i in rest]
    )
    along = -eliminated.slope
    if at.scale is None:
        along[SCALE_INDEX] = 0.0
    for k, part in enumerate(at.parts):
        along[places.beta(k), k] += 2.0 * part["w"]
    moves = np.vstack([np.eye(d), along.T])
    if meat is None:
        joint = moves @ V @ moves.T
        joint[d:, d:] += eliminated.rest
        return joint
    influence = np.hstack([moves @ V, np.eye(d + K)[:, d:]])
    return influence @ meat @ influence.T


def score_of_spreads(at: InformationSums, share: Floats) -> Floats:
    """Map from the same columns to the change of the t_k given psi, (K, ..)."""
    places, K = at.places, len(at.parts)
    starts = np.cumsum([0, *[2 * p + 1 for p in places.sizes]])
    A = np.zeros((K, starts[-1] + 2 + K))
    for k, part in enumerate(at.parts):
        A[:, starts[k] + 2 * places.sizes[k]] = share[k]
        A[:, starts[-1] + 2 + k] = share[k] * float(part["N"])
    return A


def effective_score_map(at: InformationSums, Q: Floats) -> Floats:
    """Map from the staged columns [F_1 .. F_K, z, -e, -e by absent site] to the score of psi."""
    places = at.places
    starts = np.cumsum([0, *[2 * p + 1 for p in places.sizes]])
    last, K = starts[-1], len(at.parts)
    A = np.zeros((places.total, last + 2 + K))
    # z is the score of a, and -e that of s2.
    A[0, last] = A[1, last + 1] = 1.0
    for k, part in enumerate(at.parts):
        p, absent = places.sizes[k], last + 2 + k
        A[places.both(k), starts[k] : starts[k] + 2 * p] = np.eye(2 * p)
        A[places.both(k), absent] -= part["j"]
        A[places.beta(k), absent] += 2.0 * part["w"]
        A[:, starts[k] + 2 * p] -= Q[:, k]
        A[:, absent] -= Q[:, k] * float(part["N"])
    return A
