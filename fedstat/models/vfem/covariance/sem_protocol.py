"""The protocol of supplemented EM (Meng and Rubin 1991), from the Jacobian of the EM map.

V = I_oc^-1 (I - DM)^-1 with I_oc the expected complete-data information and DM the Jacobian of the map theta
-> M(theta). Central differences compute it, with two evaluations for every parameter: (beta0, s2, beta, mu)
and the lower triangle of every Sigma_k. Standardized columns are used throughout; the result is in the units
of the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.covariance import delta_method, symmetrize
from fedstat.models.vertical.joint_normal.fit import OBSERVED
from fedstat.models.vertical.layout import Layout
from fedstat.models.vfem.covariance.cross_products import CrossProductOptions, ProductRequest, cross_products
from fedstat.models.vfem.covariance.information import ParameterLayout, PsiCovariance, block_slices, project
from fedstat.models.vfem.iteration.protocol import EMIteration
from fedstat.typing import Array, Floats

DIFFERENCE = 1e-4
"""Half the distance between two evaluations of standardized parameters; balances rounding and curvature."""


@dataclass(frozen=True, slots=True)
class SEMPoint:
    """Parameters of the EM map: beta0, s2, and per site beta, mu, Sigma; complex for a complex step."""

    beta0: complex
    s2: complex
    beta: list[Array]
    mu: list[Array]
    Sigma: list[Array]

    def pack(self) -> Array:
        """(beta0, s2, beta_1, mu_1, ..., vech Sigma_1, ...)."""
        both = [part for pair in zip(self.beta, self.mu, strict=True) for part in pair]
        return np.concatenate(
            [[self.beta0, self.s2], *both, *[S[np.tril_indices(len(S))] for S in self.Sigma]]
        )

    @staticmethod
    def unpack(theta: Array, sizes: tuple[int, ...]) -> SEMPoint:
        """Read :meth:`pack`."""
        places, sites = ParameterLayout(sizes), range(len(sizes))
        at, Sigma = places.total, []
        for p in sizes:
            i, j = np.tril_indices(p)
            S = np.zeros((p, p), dtype=theta.dtype)
            S[i, j] = S[j, i] = theta[at : at + len(i)]
            Sigma.append(S)
            at += len(i)
        beta, mu = [theta[places.beta(k)] for k in sites], [theta[places.mu(k)] for k in sites]
        return SEMPoint(theta[0], theta[1], beta, mu, Sigma)


@dataclass(frozen=True, slots=True)
class CovarianceEvaluation:
    """A point with the replies of the sites.

    a is the mean of the linear predictor and w (p_k,) Sigma_k beta_k by site; v (G,) and `sums` (G, 3) are
    the variance, and the sums of z, z^2 and 1/v, by pattern; `parts` the replies of the sites.
    """

    point: SEMPoint
    a: complex
    w: list[Floats]
    v: Floats
    sums: Floats
    parts: list[Mapping[str, Array]]


@dataclass(frozen=True, slots=True)
class ExactEMMap:
    """Values that stay fixed between evaluations of the exact EM map.

    Per site, the sums of its columns by presence of the others (1 + K, p_k), and their cross-products `S2`;
    `cross` are those between sites, over entities that both have.
    """

    iteration: EMIteration
    sums: list[Floats]
    S2: list[Floats]
    cross: Mapping[tuple[int, int], Floats]

    @property
    def layout(self) -> Layout:
        """Sites that take part."""
        return self.iteration.layout

    @property
    def sizes(self) -> tuple[int, ...]:
        """Columns of each site."""
        return tuple(len(S) for S in self.S2)

    @property
    def places(self) -> list[slice]:
        """Indices of each site's columns after the constant."""
        return block_slices([np.ones(1), *self.S2])[1:]

    def evaluate(self, point: SEMPoint) -> FitProtocol[tuple[SEMPoint, Floats]]:
        """Return the image of a point, and E sum (1, u)(1, u)' there, u = x - mu."""
        lay, request = self.layout, self.iteration.request
        eta = yield from self.predict(point)
        w = [S @ b for S, b in zip(point.Sigma, point.beta, strict=True)]
        t = np.array([b @ v for b, v in zip(point.beta, w, strict=True)])
        a = point.beta0 + sum(float(m @ b) for m, b in zip(point.mu, point.beta, strict=True))
        t_missing = lay.missing @ t
        (response,) = yield [request(lay.active, "residuals", a=a, s2=point.s2, eta=eta, t_missing=t_missing)]
        z, v = response.arrays["z"], point.s2 + t_missing
        sums = np.column_stack([response.arrays["z1"], response.arrays["z2"], lay.counts / v])
        parts = yield from self.request_sums(point, z, sums)
        at = CovarianceEvaluation(point, a, w, v, sums, parts)
        P = self.expected_gram(at)
        return self.image(at, P), P

    def predict(self, point: SEMPoint) -> FitProtocol[Floats]:
        """Sum of the sites' linear predictors around their means: (n,)."""
        lay, request = self.layout, self.iteration.request
        replies = yield [
            request(name, "sem_predictor", beta=point.beta[k], mu=point.mu[k])
            for k, name in enumerate(lay.sites)
        ]
        eta = np.zeros(lay.n)
        for name, reply in zip(lay.sites, replies, strict=True):
            part = reply.arrays["linear_predictor"]
            # With masks, every site sends all entities, zero if it lacks them.
            eta[slice(None) if self.iteration.masked else lay.rows[name]] += part
        return eta

    def request_sums(
        self, point: SEMPoint, z: Floats, sums: Floats
    ) -> FitProtocol[list[Mapping[str, Array]]]:
        """Each site's part of the expected cross-products: residuals z (n,), their sums by pattern."""
        lay, request = self.layout, self.iteration.request
        replies = yield [
            request(
                name,
                "sem_sums",
                z=z[lay.rows[name]],
                missing=lay.missing[:, k] @ sums,
                s2=point.s2,
                beta=point.beta[k],
                mu=point.mu[k],
                Sigma=point.Sigma[k],
            )
            for k, name in enumerate(lay.sites)
        ]
        return [reply.arrays for reply in replies]

    def expected_gram(self, at: CovarianceEvaluation) -> Floats:
        """Compute E sum (1, u)(1, u)' given observed columns."""
        lay, point, w, sums = self.layout, at.point, at.w, at.sums
        mis = lay.missing.astype(float)
        places = self.places
        P = np.zeros((places[-1].stop, places[-1].stop))
        P[0, 0] = lay.n
        for k, here in enumerate(places):
            mu = point.mu[k]
            n_k = (1.0 - mis[:, k]) @ lay.counts
            z, z2, h = mis[:, k] @ sums
            s1 = self.sums[k][0]
            P[0, here] = P[here, 0] = s1 - n_k * mu + w[k] * z
            cross = np.outer(s1, mu)
            P[here, here] = self.S2[k] - cross - cross.T + n_k * np.outer(mu, mu)
            P[here, here] += (lay.n - n_k) * point.Sigma[k] + (z2 - h) * np.outer(w[k], w[k])
            for j, there in enumerate(places[:k]):
                P[there, here] = self._between(j, k, at)
                P[here, there] = P[there, here].T
        return P

    def _between(self, j: int, k: int, at: CovarianceEvaluation) -> Floats:
        point, w, mis = at.point, at.w, self.layout.missing.astype(float)
        both = (1.0 - mis[:, j]) * (1.0 - mis[:, k]) @ self.layout.counts
        seen = (
            self.cross[j, k]
            - np.outer(self.sums[j][1 + k], point.mu[k])
            - np.outer(point.mu[j], self.sums[k][1 + j])
            + both * np.outer(point.mu[j], point.mu[k])
        )
        _, z2, h = (mis[:, j] * mis[:, k]) @ at.sums
        mixed = np.outer(at.parts[j]["u_z"][k], w[k]) + np.outer(w[j], at.parts[k]["u_z"][j])
        return np.asarray(seen + mixed + (z2 - h) * np.outer(w[j], w[k]))

    def image(self, at: CovarianceEvaluation, P: Floats) -> SEMPoint:
        """M-step: regression of the expected response, TWFL (5), and the sites' own moments (6)."""
        n, s2, counts = self.layout.n, at.point.s2, self.layout.counts
        point, v, sums, parts = at.point, at.v, at.sums, at.parts
        gradient = np.concatenate([[s2 * sums[:, 0].sum()], *[part["gradient"] for part in parts]])
        # One regression over all blocks: the sites know only their own parts of the gradient.
        step = np.linalg.solve(P, gradient)
        error = s2 * s2 * sums[:, 1].sum() + np.sum(counts * (v - s2) * s2 / v)
        beta = [b + step[here] for here, b in zip(self.places, point.beta, strict=True)]
        beta0 = at.a + step[0] - sum(float(m @ b) for m, b in zip(point.mu, beta, strict=True))
        return SEMPoint(
            beta0,
            (error - gradient @ step) / n,
            beta,
            [part["mu"] for part in parts],
            [part["Sigma"] for part in parts],
        )


def complete_information(point: SEMPoint, P: Floats, n: int) -> Floats:
    """Return the expected complete-data information of :meth:`SEMPoint.pack` at the estimate."""
    sizes = tuple(len(b) for b in point.beta)
    places = ParameterLayout(sizes)
    theta = point.pack()
    info = np.zeros((len(theta), len(theta)))
    mu = np.concatenate(point.mu)
    shift = np.eye(len(P))
    shift[1:, 0] = mu
    regression = delta_method(P, shift) / point.s2
    order = [0, *[i for k in range(len(sizes)) for i in range(places.beta(k).start, places.beta(k).stop)]]
    info[np.ix_(order, order)] = regression
    info[1, 1] = 0.5 * n / point.s2**2
    at = places.total
    for k, S in enumerate(point.Sigma):
        precision = np.linalg.inv(S)
        info[places.mu(k), places.mu(k)] = n * precision
        i, j = np.tril_indices(len(S))
        basis = np.zeros((len(i), len(S), len(S)))
        basis[np.arange(len(i)), i, j] = basis[np.arange(len(i)), j, i] = 1.0
        left = precision @ basis
        here = slice(at, at + len(i))
        info[here, here] = 0.5 * n * np.einsum("aij,bji->ab", left, left)
        at += len(i)
    return info


def to_psi(point: SEMPoint, scales: list[Floats]) -> Floats:
    """Jacobian of psi = (a, s2, beta, mu) in the units of the data by (beta0, s2, beta, mu)."""
    places = ParameterLayout(tuple(len(b) for b in point.beta))
    A = np.eye(places.total)
    for k, scale in enumerate(scales):
        A[0, places.beta(k)], A[0, places.mu(k)] = point.mu[k], point.beta[k]
        A[places.beta(k), places.beta(k)] /= scale[:, None]
        A[places.mu(k), places.mu(k)] *= scale[:, None]
    return A


def sem_covariance(
    iteration: EMIteration, options: CrossProductOptions, fit_a: float, fit_s2: float
) -> FitProtocol[PsiCovariance]:
    """Covariance of psi by supplemented EM, at the estimates a and s2 of a fit that has converged.

    Raises EstimationError if the EM map does not contract, because no covariance follows from it then.
    """
    lay = iteration.layout
    seen = ~lay.missing
    replies = yield [
        iteration.request(k, "sem_constants", others=seen[lay.code[lay.rows[k]]]) for k in lay.sites
    ]
    parts = [reply.arrays for reply in replies]
    wanted = ProductRequest("columns", tuple(len(part["S2"]) for part in parts))
    products = yield from cross_products(lay, iteration.session, wanted, options)
    blocks, moved = project([part["S2"] for part in parts], products)
    em = ExactEMMap(iteration, [p["s1"] for p in parts], [p["S2"] for p in parts], blocks)
    beta, mu = [p["beta"] for p in parts], [p["mu"] for p in parts]
    beta0 = fit_a - sum(float(m @ b) for m, b in zip(mu, beta, strict=True))
    center = SEMPoint(beta0, fit_s2, beta, mu, [p["Sigma"] for p in parts])
    P, DM = yield from iteration.hide(differentiate_em_map(em, center))
    V = solve_sem(complete_information(center, P, lay.n), DM)
    A = np.zeros((ParameterLayout(em.sizes).total, len(V)))
    A[:, : A.shape[0]] = to_psi(center, [p["scale"] for p in parts])
    symmetric, asymmetry = symmetrize(A @ V @ A.T)
    return PsiCovariance.of(symmetric, products, moved, asymmetry)


def differentiate_em_map(em: ExactEMMap, center: SEMPoint) -> FitProtocol[tuple[Floats, Floats]]:
    """Return E sum (1, u)(1, u)' at a point, and d M_j / d theta_i at (i, j), by central differences."""
    _, P = yield from em.evaluate(center)
    theta = center.pack()
    size = np.full(len(theta), DIFFERENCE)
    places = ParameterLayout(em.sizes)
    root = np.sqrt(center.s2)
    size[0], size[1] = DIFFERENCE * root, DIFFERENCE * center.s2
    for k in range(len(em.sizes)):
        size[places.beta(k)] *= root
    rows = []
    for i, d in enumerate(size):
        ends = []
        for sign in (1.0, -1.0):
            moved = theta.copy()
            moved[i] += sign * d
            image, _ = yield from em.evaluate(SEMPoint.unpack(moved, em.sizes))
            ends.append(image.pack())
        rows.append((ends[0] - ends[1]) / (2.0 * d))
    return P, np.array(rows)


def solve_sem(information: Floats, DM: Floats) -> Floats:
    """V = I_oc^-1 (I - DM)^-1."""
    # (I - DM)^-1 is a geometric series; it is not a covariance if the series diverges.
    if np.abs(np.linalg.eigvals(DM)).max() >= 1.0:
        raise EstimationError(
            "supplemented EM: the EM map does not contract at the estimate", remedy=OBSERVED
        )
    complete = np.linalg.inv(information)
    return np.asarray(np.linalg.solve((np.eye(len(DM)) - DM).T, complete.T).T)
