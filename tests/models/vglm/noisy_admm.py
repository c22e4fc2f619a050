"""ADMM with noise on the linear predictors of every round (Hu et al. 2020): a baseline, all in one process.

It repeats a published idea to show its cost, and is not a private fit: the columns of all sites are in one
place, and the noise comes from numpy's generator. The noise shall hide the record of one entity at one site.
Each site clips its linear predictors to [-clip, clip] and adds noise to every one, in every round.

Accounting. Replacing one record changes the site's coefficients, and therefore the linear predictors of all n
entities: in one round by at most ``2 clip sqrt(n)``, as a vector. A record that outweighs the others comes
within a factor of two of this bound (:meth:`NoisyFit.epsilon`). With fixed coefficients only the entity's own
predictor would change, by ``2 clip``; accounting by rows takes this as the cost
(:meth:`NoisyFit.row_epsilon`).

Some values have no noise and are in neither account: the response, means and standard deviations of the
columns, the largest lambda, and the coefficients at the end of every lambda, from which BIC chooses.

References
----------
Hu, Y., Liu, P., Kong, L. and Niu, D. (2020). Learning privately over distributed features: an ADMM sharing
approach. arXiv 1907.07735.
Boyd, S., Parikh, N., Chu, E., Peleato, B. and Eckstein, J. (2011). Distributed optimization and statistical
learning via the alternating direction method of multipliers. Foundations and Trends in Machine Learning 3,
1-122, section 7.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedstat.errors import ModelError
from fedstat.inference.likelihood import bic, profile_deviance
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.penalized.coordinate_descent import GramSolver
from fedstat.kernels.penalized.path import lambda_grid, lambda_max
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty, Terms
from fedstat.models.vglm.distributions import POINTS
from fedstat.models.vglm.steps import nearest
from fedstat.privacy.gaussian_dp import GaussianAccountant, epsilon_of
from fedstat.typing import Floats

TIGHT = 1e-10


@dataclass(frozen=True, slots=True, eq=False)
class NoisyFit:
    """A path of fits under noise, and what it cost.

    Parameters
    ----------
    lambdas : (L,) array
    coefficients : (L, p) array
        In the units of the data, the clients' columns side by side.
    intercepts : (L,) array
    bic : (L,) array
    chosen : int
        Place of the smallest.
    site_ledger : GaussianAccount
        Of all rounds, at one client.
    row_sensitivity : float
        ``2 clip``, in standard deviations of the noise.
    """

    lambdas: Floats
    coefficients: Floats
    intercepts: Floats
    bic: Floats
    chosen: int
    site_ledger: GaussianAccountant
    row_sensitivity: float

    def epsilon(self, delta: float = 1e-6) -> float:
        """Epsilon of all rounds together for the record of one entity at one client."""
        return self.site_ledger.epsilon(delta)

    def row_epsilon(self, delta: float = 1e-6, *, rounds: int | None = None) -> float:
        """Epsilon of some rounds, or all, as if a record moved its own predictor only; it moves all."""
        times = self.site_ledger.releases if rounds is None else rounds
        mu = self.row_sensitivity * np.sqrt(times)
        return float(np.inf) if np.isinf(mu) else epsilon_of(float(mu), delta)


@dataclass(slots=True, eq=False)
class _Client:
    """Standardized columns Z (n, p_k), Z'Z / n, their groups, and coefficients (p_k,)."""

    Z: Floats
    G: Floats
    groups: CoefficientGroups
    theta: Floats

    @classmethod
    def of(cls, X: Floats) -> _Client:
        """Standardize columns (n, p_k)."""
        Z = np.ascontiguousarray((X - X.mean(axis=0)) / X.std(axis=0))
        return cls(Z, Z.T @ Z / len(Z), CoefficientGroups.single(Z.shape[1]), np.zeros(Z.shape[1]))

    def lasso(self, penalty: Penalty, lam: float, first: bool) -> Terms:
        """Put the tangents of the penalty in its place: at zero, or at the present coefficients."""
        return penalty.at(lam, self.groups).linearized(np.zeros(self.groups.p) if first else self.theta)

    def move(self, step: Floats, lasso: Terms, rho: float) -> Floats:
        """Move the linear predictor as far as the penalty lets it: (n,)."""
        c = self.G @ self.theta + self.Z.T @ step / len(self.Z)
        solver = GramSolver(rho * self.G, rho * c, self.groups)
        every = np.ones(self.groups.p, dtype=np.bool_)
        self.theta = solver.solve(lasso, solver.start(self.theta), every, TIGHT).b
        return np.asarray(self.Z @ self.theta)


@dataclass(slots=True, eq=False)
class _Sharing:
    """ADMM with noise: mean predictor z, dual u and the next step, (n,), and the participating sites."""

    sites: list[_Client]
    y: Floats
    family: str
    noise: float
    clip: float
    rho: float
    random: np.random.Generator
    intercept: float
    z: Floats
    u: Floats
    step: Floats

    @classmethod
    def start(
        cls,
        blocks: Sequence[Floats],
        y: Floats,
        family: DistributionSpec,
        numbers: tuple[float, float, float],
        random: np.random.Generator,
    ) -> _Sharing:
        """Start from the intercept alone."""
        sites = [_Client.of(np.asarray(block, dtype=np.float64)) for block in blocks]
        a, zero = float(family.make().link(y.mean())), np.zeros(len(y))
        z = np.full(len(y), a / (len(sites) + 1))
        return cls(sites, y, family.name, *numbers, random, a, z, zero, zero)

    def largest(self, penalty: Penalty) -> float:
        """Return the smallest lambda at which all coefficients are zero."""
        residual = POINTS[self.family](np.full(len(self.y), self.intercept), self.y)[1]
        gradients = [site.Z.T @ residual / len(self.y) for site in self.sites]
        return max(lambda_max(g, penalty, c.groups) for g, c in zip(gradients, self.sites, strict=True))

    def round(self, lassos: Sequence[Terms]) -> None:
        """Let every client move and release its predictors; move the response's side."""
        n, blocks, total = len(self.y), len(self.sites) + 1, np.zeros(len(self.y))
        for site, lasso in zip(self.sites, lassos, strict=True):
            eta = np.clip(site.move(self.step, lasso, self.rho), -self.clip, self.clip)
            total += eta + self.noise * self.random.standard_normal(n)
        self.intercept += float(self.step.mean())
        mean = (self.intercept + total) / blocks
        self.z = nearest(self.family, mean + self.u, self.y, blocks, self.rho)
        self.u = self.u + mean - self.z
        self.step = self.z - mean - self.u

    def score(self, a: Floats, b: Floats) -> Floats:
        """Return BIC of intercepts (L,) and coefficients (L, p), from predictors without noise."""
        n, Z = len(self.y), np.hstack([site.Z for site in self.sites])
        loss = np.array([POINTS[self.family](a[i] + Z @ b[i], self.y)[0] for i in range(len(a))])
        minus_twice = profile_deviance(2.0 * n * loss, n) if self.family == "Gaussian" else 2.0 * n * loss
        return np.asarray(bic(minus_twice, 1.0 + np.count_nonzero(b, axis=1), n))


def noisy_admm(
    blocks: Sequence[Floats],
    y: Floats,
    family: DistributionSpec,
    penalty: Penalty,
    *,
    noise: float,
    random: np.random.Generator,
    clip: float = 3.0,
    lambdas: Floats | None = None,
    n_lambdas: int = 10,
    ratio: float = 0.01,
    rounds: int = 20,
    rho: float = 1.0,
) -> NoisyFit:
    """Fit a path by ADMM under noise.

    Parameters
    ----------
    blocks : sequence of (n, p_k) array
        Columns of each client.
    y : (n,) array
        A normal response is brought to mean 0 and variance 1.
    family : DistributionSpec
        With its canonical link.
    penalty : Penalty
        A nonconvex one by a single local linear approximation, after half of the rounds.
    noise : float
        Standard deviation on every linear predictor; 0 for none.
    random : numpy Generator
    clip : float
        Largest linear predictor of a client that is released.
    lambdas : (L,) array, optional
        Descending; by default `n_lambdas` from the largest to `ratio` times it.
    rounds : int
        Rounds of each lambda, fixed beforehand.
    rho : float
        Penalty parameter.

    Raises
    ------
    ModelError
        An argument is out of its range.
    """
    if family.name not in POINTS or not family.canonical:
        raise ModelError(
            f"family: expected one of {', '.join(POINTS)} with its canonical link; received {family}"
        )
    if not (noise >= 0.0 and clip > 0.0 and rounds >= 2 and rho > 0.0):
        raise ModelError(
            f"expected noise >= 0, clip > 0, rounds >= 2 and rho > 0; received {noise}, {clip}, {rounds} "
            f"and {rho}"
        )
    mean, sd = (float(np.mean(y)), float(np.std(y))) if family.name == "Gaussian" else (0.0, 1.0)
    sharing = _Sharing.start(blocks, (y - mean) / sd, family, (noise, clip, rho), random)
    if lambdas is None:
        lambdas = lambda_grid(sharing.largest(penalty), ratio=ratio, size=n_lambdas)
    site_ledger, b, a = GaussianAccountant(), [], []
    for lam in lambdas:
        for number in range(rounds):
            if number in (0, rounds // 2):
                first = number == 0 or penalty.convex
                lassos = [site.lasso(penalty, float(lam), first) for site in sharing.sites]
            sharing.round(lassos)
        site_ledger.add(2.0 * clip * np.sqrt(len(y)), noise, rounds)
        b.append(np.concatenate([site.theta for site in sharing.sites]))
        a.append(sharing.intercept)
    scores = sharing.score(np.array(a), np.array(b))
    X = np.hstack(blocks)
    beta = sd * np.array(b) / X.std(axis=0)
    intercepts = mean + sd * np.array(a) - beta @ X.mean(axis=0)
    row = 2.0 * clip / noise if noise > 0.0 else np.inf
    return NoisyFit(lambdas, beta, intercepts, scores, int(np.argmin(scores)), site_ledger, row)
