"""Covariance of (beta0, beta, s2, mu): observed, expected and robust, as protocols.

With z = r/v, kappa = z^2/v - 1/(2 v^2), e = (1/v - z^2)/2, h_k = sum over the entities that k lacks of
(z/v) dm + kappa dv, C_jk the sum of kappa over those that both lack, and per client (J, j, N) from
:class:`~fedstat.models.vfem.covariance.elimination.Elimination`, the information of psi = (a, s2, beta, mu)
after elimination of Sigma is

    H - h N h' - h j' - j h' - J + Q R^-1 ... ,   (h N + j) C (I + N C)^-1 (h N + j)'

the Woodbury form of the Schur complement. Its inverse is the covariance of psi with every nuisance
parameter accounted for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedstat.federation.rounds.engine import Rounds
from fedstat.inference.covariance import delta_method, invert_information, nearest_psd, symmetrise
from fedstat.models.vertical.layout import Layout
from fedstat.models.vfem.blocks.request import ask
from fedstat.models.vfem.iteration.protocol import EMIteration
from fedstat.models.vfem.moments.cross_products import (
    CrossOptions,
    CrossProducts,
    StagedColumns,
    cross_products,
)
from fedstat.typing import Array, Floats


@dataclass(frozen=True, slots=True)
class Covariance:
    """Covariance of (a, s2, beta_1, mu_1, beta_2, mu_2, ...).

    Parameters
    ----------
    psi : (2 + 2p, 2 + 2p) array
    how : str
        Where cross-products came from.
    size, error : int, float
        Rows and relative error of the sketch.
    moved : float
        How far the cross-products moved to become positive semi-definite, relative.
    asymmetry : float
        Of the supplemented EM estimate before it was made symmetric.
    dealers : str
        Who dealt for secure products.
    left_out : int
        Pairs of clients whose products were not asked for, since too few entities have both.
    """

    psi: Floats
    how: str = "none"
    size: int = 0
    error: float = 0.0
    moved: float = 0.0
    asymmetry: float = 0.0
    dealers: str = ""
    left_out: int = 0

    @classmethod
    def of(cls, psi: Floats, products: CrossProducts, moved: float, asymmetry: float = 0.0) -> Covariance:
        """Put a covariance together with where its cross-products came from."""
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


class Curvatures(Protocol):
    """Second derivatives of the log-likelihood of y by mean and variance, summed by pattern, each (G,)."""

    @property
    def h(self) -> Floats:
        """Of -L_mm."""

    @property
    def z_v(self) -> Floats:
        """Of -L_mv."""

    @property
    def kappa(self) -> Floats:
        """Of -L_vv."""


@dataclass(frozen=True, slots=True)
class NormalCurvatures:
    """NormalCurvatures over the entities of one pattern, each (G,)."""

    n: Floats
    v: Floats
    z: Floats
    z2: Floats

    @property
    def h(self) -> Floats:
        """Of 1/v."""
        return self.n / self.v

    @property
    def z_v(self) -> Floats:
        """Of z/v."""
        return self.z / self.v

    @property
    def kappa(self) -> Floats:
        """Of z^2/v - 1/(2 v^2)."""
        return self.z2 / self.v - 0.5 * self.n / self.v**2

    @property
    def e(self) -> Floats:
        """Of (1/v - z^2)/2."""
        return 0.5 * (self.h - self.z2)


@dataclass(frozen=True, slots=True)
class Places:
    """Where each client's beta and mu stand in psi."""

    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Length of psi."""
        return 2 + 2 * sum(self.sizes)

    def start(self, k: int) -> int:
        """First place of client k."""
        return 2 + 2 * sum(self.sizes[:k])

    def beta(self, k: int) -> slice:
        """Places of beta_k."""
        return slice(self.start(k), self.start(k) + self.sizes[k])

    def mu(self, k: int) -> slice:
        """Places of mu_k."""
        return slice(self.start(k) + self.sizes[k], self.start(k) + 2 * self.sizes[k])

    def both(self, k: int) -> slice:
        """Places of (beta_k, mu_k)."""
        return slice(self.start(k), self.start(k) + 2 * self.sizes[k])


def information_round(iteration: EMIteration) -> Rounds[tuple[NormalCurvatures, list[Mapping[str, Array]]]]:
    """Ask every client for its local sums at the last evaluated point."""
    lay, at = iteration.layout, iteration.latest
    sums = NormalCurvatures(lay.counts, at.v, at.z1, at.z2)
    seen = ~lay.missing
    asks = []
    for j, k in enumerate(lay.clients):
        code, mis, has = lay.code[lay.rows[k]], lay.missing[:, j], seen[:, j]
        totals = np.array([mis @ sums.kappa, mis @ sums.e, has @ sums.h, has @ sums.z])
        asks.append(
            ask(
                k,
                "information",
                iteration.session,
                inverse_v=1.0 / at.v[code],
                others=seen[code],
                sums=totals,
            )
        )
    replies = yield asks
    return sums, [reply.arrays for reply in replies]


def project(
    parts: list[Mapping[str, Array]], products: CrossProducts
) -> tuple[dict[tuple[int, int], Floats], float]:
    """Bring the assembled cross-products to the nearest positive semi-definite matrix, at unit diagonal.

    Returns
    -------
    blocks : dict
        Between clients; the blocks within clients are exact and stay.
    moved : float
    """
    if not products.blocks:
        return {}, 0.0
    edges = np.cumsum([0, *[len(part["gram"]) for part in parts]])
    whole = np.zeros((edges[-1], edges[-1]))
    for j, part in enumerate(parts):
        whole[edges[j] : edges[j + 1], edges[j] : edges[j + 1]] = part["gram"]
    for (j, k), block in products.blocks.items():
        whole[edges[j] : edges[j + 1], edges[k] : edges[k + 1]] = block
        whole[edges[k] : edges[k + 1], edges[j] : edges[j + 1]] = block.T
    root = np.sqrt(np.maximum(np.diag(whole), np.finfo(float).tiny))
    near, moved = nearest_psd(whole / np.outer(root, root))
    near *= np.outer(root, root)
    blocks = {(j, k): near[edges[j] : edges[j + 1], edges[k] : edges[k + 1]] for j, k in products.blocks}
    return blocks, moved


def hessian(
    lay: Layout,
    sums: Curvatures,
    parts: list[Mapping[str, Array]],
    cross: Mapping[tuple[int, int], Floats],
) -> Floats:
    """Negative Hessian of the observed-data log-likelihood in psi, Sigma held fixed."""
    places = Places(tuple(len(part["beta"]) for part in parts))
    mis, seen = lay.missing.astype(float), (~lay.missing).astype(float)
    H = np.zeros((places.total, places.total))
    H[0, 0], H[0, 1], H[1, 1] = sums.h.sum(), sums.z_v.sum(), sums.kappa.sum()
    for k, part in enumerate(parts):
        beta, w = part["beta"], part["w"]
        H[0, places.beta(k)] = part["by_v"][0] + 2.0 * w * (mis[:, k] @ sums.z_v)
        H[0, places.mu(k)] = -beta * (seen[:, k] @ sums.h)
        H[1, places.beta(k)] = part["by_z"][0] + 2.0 * w * (mis[:, k] @ sums.kappa)
        H[1, places.mu(k)] = -beta * (seen[:, k] @ sums.z_v)
        H[places.both(k), places.both(k)] = part["own"]
        H[places.beta(k), places.beta(k)] += part["gram"]
        for j in range(k):
            fill_pair(H, (j, k), lay, sums, parts, cross)
    upper = np.triu(H, 1)
    return upper + upper.T + np.diag(np.diag(H))


def fill_pair(
    H: Floats,
    pair: tuple[int, int],
    lay: Layout,
    sums: Curvatures,
    parts: list[Mapping[str, Array]],
    cross: Mapping[tuple[int, int], Floats],
) -> None:
    """Enter the block of clients j < k into the upper triangle of H."""
    (j, k), places = pair, Places(tuple(len(part["beta"]) for part in parts))
    mis, seen = lay.missing.astype(float), (~lay.missing).astype(float)
    one, two = parts[j], parts[k]
    uu = cross.get(pair, np.zeros((places.sizes[j], places.sizes[k])))
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
class Eliminated:
    """The information of psi without Sigma.

    Parameters
    ----------
    information : (2 + 2p, 2 + 2p) array
    Q : (2 + 2p, K) array
        Weights of Sigma's projected scores in it.
    slope, rest : (2 + 2p, K), (K, K) arrays
        For tau_k = beta_k'(Sigma_k - Sigma_k0) beta_k: given psi its mean moves by -slope' psi, and its
        covariance is `rest`.
    """

    information: Floats
    Q: Floats
    slope: Floats
    rest: Floats


def eliminate(lay: Layout, sums: Curvatures, parts: list[Mapping[str, Array]], H: Floats) -> Eliminated:
    """Schur complement of Sigma_1..Sigma_K; see the module's docstring."""
    places = Places(tuple(len(part["beta"]) for part in parts))
    mis, seen = lay.missing.astype(float), (~lay.missing).astype(float)
    K = len(parts)
    h, j, N = np.zeros((places.total, K)), np.zeros((places.total, K)), np.zeros(K)
    J = np.zeros_like(H)
    for k, part in enumerate(parts):
        h[0, k], h[1, k] = mis[:, k] @ sums.z_v, mis[:, k] @ sums.kappa
        for m, other in enumerate(parts):
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
    return Eliminated(symmetrise(information)[0], h - P @ R, P @ M, N[:, None] * M)


def psi_names(lay: Layout, names: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Name each place of psi, for messages."""
    out = ["Intercept", "residual variance"]
    for k in lay.clients:
        out += [f"{name} ({k})" for name in names[k]] + [f"mean of {name} ({k})" for name in names[k]]
    return out


def information_covariance(
    iteration: EMIteration, options: CrossOptions, names: Mapping[str, tuple[str, ...]], robust: bool = False
) -> Rounds[Covariance]:
    """Invert the observed information; with ``options.how = "none"`` its "expected" form.

    Parameters
    ----------
    iteration : EMIteration
        After it has converged.
    options : CrossOptions
        Where cross-products between clients come from.
    names : mapping of str to tuple of str
        Column names by client.
    robust : bool
        Put the products of the scores between two such inverses.
    """
    lay = iteration.layout
    sums, parts = yield from information_round(iteration)
    wanted = StagedColumns("information", tuple(len(part["gram"]) for part in parts))
    products = yield from cross_products(lay, iteration.session, wanted, options)
    blocks, moved = project(parts, products)
    eliminated = eliminate(lay, sums, parts, hessian(lay, sums, parts, blocks))
    cov = invert_information(eliminated.information, psi_names(lay, names))
    if robust:
        meat = yield from score_products(iteration, options, parts, eliminated)
        cov = cov @ meat @ cov
    return Covariance.of(cov, products, moved)


def score_products(
    iteration: EMIteration, options: CrossOptions, parts: list[Mapping[str, Array]], eliminated: Eliminated
) -> Rounds[Floats]:
    """Sum over entities of the products of the effective scores of psi."""
    lay = iteration.layout
    *clients, response = yield [
        *[ask(k, "scores", iteration.session) for k in lay.clients],
        ask(lay.active, "response_products", iteration.session, missing=lay.missing),
    ]
    wanted = StagedColumns("scores", tuple(len(reply.arrays["gram"]) for reply in clients))
    products = yield from cross_products(lay, iteration.session, wanted, options)
    edges = np.cumsum([0, *[len(reply.arrays["gram"]) for reply in clients], len(response.arrays["gram"])])
    whole = np.zeros((edges[-1], edges[-1]))
    last = slice(edges[-2], edges[-1])
    whole[last, last] = response.arrays["gram"]
    for k, reply in enumerate(clients):
        here = slice(edges[k], edges[k + 1])
        whole[here, here] = reply.arrays["gram"]
        whole[here, last] = reply.arrays["with_response"]
        whole[last, here] = reply.arrays["with_response"].T
    for (j, k), block in products.blocks.items():
        whole[edges[j] : edges[j + 1], edges[k] : edges[k + 1]] = block
        whole[edges[k] : edges[k + 1], edges[j] : edges[j + 1]] = block.T
    A = effective_score_map(parts, eliminated.Q)
    return delta_method(nearest_psd(whole)[0], A)


def effective_score_map(parts: list[Mapping[str, Array]], Q: Floats) -> Floats:
    """Map from the staged columns [F_1 .. F_K, z, -e, -e by absent client] to the score of psi."""
    places = Places(tuple(len(part["beta"]) for part in parts))
    widths = [2 * p + 1 for p in places.sizes]
    starts = np.cumsum([0, *widths])
    K = len(parts)
    A = np.zeros((places.total, starts[-1] + 2 + K))
    A[0, starts[-1]] = 1.0
    A[1, starts[-1] + 1] = 1.0
    for k, part in enumerate(parts):
        p, absent = places.sizes[k], starts[-1] + 2 + k
        A[places.both(k), starts[k] : starts[k] + 2 * p] = np.eye(2 * p)
        A[places.both(k), absent] -= part["j"]
        A[places.beta(k), absent] += 2.0 * part["w"]
        A[:, starts[k] + 2 * p] -= Q[:, k]
        A[:, absent] -= Q[:, k] * float(part["N"])
    return A
