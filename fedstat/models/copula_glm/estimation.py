"""Estimates from a release: moment equations, bootstrap errors, and selection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np

from fedstat.codec import Minimum
from fedstat.kernels.penalized.coordinate_descent import gram_path
from fedstat.kernels.penalized.path import PenalizedPath
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty
from fedstat.models.copula_glm.design import ScoredDesign, ScoredResponse
from fedstat.models.copula_glm.released_distribution import (
    MomentRelease,
    ReleasedDistribution,
    ReleaseNoise,
    release_rows,
)
from fedstat.progress_line import counted
from fedstat.typing import Bools, Floats, Ints, Matrix

# ----------------------------------------------------------------------------------------------------
# Coefficients from released moments: the root of E[v (t - m(x'b))] = 0.
#
# v are the cut scores of the columns, t is the score of the response, and m(eta) the mean of t under the
# generalized linear model, including bins and cut. The part with t comes from the release; the part with m is
# an integral over the released distribution of the columns. If this distribution is the true one and the
# model holds, the root is consistent for any bins and cuts.

STEPS = 60
TOLERANCE = 1e-7
LARGEST_STEP = 1.0
"""Limit of a coefficient of a standardized column, in deviations of the response of the normal family."""
SINGULAR = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class MomentRoot:
    """Coefficients with the intercept first, (p + 1,), the scale, and whether they solve the equations."""

    params: Floats
    scale: float
    converged: bool


def solve_moments(
    distribution: ReleasedDistribution,
    response: ScoredResponse,
    products: Floats,
    start: MomentRoot | None = None,
) -> MomentRoot:
    """Solve for the coefficients, from mean products (p,) of scores of the response and the columns."""
    V = np.column_stack([np.ones(len(distribution.scores)), distribution.scores])
    shift, spread = distribution.values.mean(axis=0), distribution.values.std(axis=0)
    spread = np.where(spread > 0.0, spread, 1.0)
    X = np.column_stack([np.ones(len(V)), (distribution.values - shift) / spread])
    target = np.concatenate([[response.mean_score], products])
    unit = response.spread if response.has_scale else 1.0
    if start is None:
        first, scale = response.start()
        b = np.concatenate([[first], np.zeros(X.shape[1] - 1)])
    else:
        slopes, scale = start.params[1:], start.scale
        b = np.concatenate([[start.params[0] + shift @ slopes], slopes * spread])

    def evaluate(b: Floats, scale: float) -> tuple[Floats, Floats]:
        eta = X @ b
        found, *square = (
            response.both_means(eta, scale) if response.has_scale else [response.mean(eta, scale)]
        )
        r = target - V.T @ found.mean / len(V)
        J = (V * found.slope[:, None]).T @ X / len(V)
        if not square:
            return r, J
        r = np.append(r, response.mean_square - square[0].mean.mean())
        below = np.append(square[0].slope @ X / len(V), square[0].by_scale.mean())
        return r, np.vstack([np.column_stack([J, V.T @ found.by_scale / len(V)]), below])

    r, J = evaluate(b, scale)
    converged = False
    for _ in range(STEPS):
        step = np.linalg.lstsq(J, r, rcond=SINGULAR)[0]
        largest = max(np.abs(step[: len(b)]).max() / unit, np.abs(step[len(b) :]).max(initial=0.0))
        if largest < TOLERANCE:
            converged = bool(np.abs(r).max() < np.sqrt(TOLERANCE))
            break
        share = min(1.0, LARGEST_STEP / largest)
        for _ in range(8):
            new = b + share * step[: len(b)]
            new_scale = scale * float(np.exp(share * step[-1])) if response.has_scale else scale
            r_new, J_new = evaluate(new, new_scale)
            if np.linalg.norm(r_new) < np.linalg.norm(r) * (1.0 - 0.1 * share) or share < 0.02:
                break
            share /= 2.0
        b, scale, r, J = new, new_scale, r_new, J_new
    slopes = b[1:] / spread
    return MomentRoot(np.concatenate([[b[0] - shift @ slopes], slopes]), scale, converged)


def covariance_without_noise(
    distribution: ReleasedDistribution, response: ScoredResponse, root: MomentRoot, n: int
) -> Floats:
    """Inverse information of n entities at a root under the columns' distribution: (p + 1, p + 1)."""
    X = np.column_stack([np.ones(len(distribution.values)), distribution.values])
    eta = root.params[0] + distribution.values @ root.params[1:]
    weights = response.weights(eta, root.scale)
    H = (X * weights[:, None]).T @ X / len(X) * n
    units = np.sqrt(np.maximum(np.diag(H), 1e-12))
    return np.asarray(np.linalg.pinv(H / np.outer(units, units), rcond=SINGULAR) / np.outer(units, units))


# ----------------------------------------------------------------------------------------------------
# Estimates from a release, and their errors by simulating data and releases from them.

MOST_ROWS = 20_000
"""Largest number of rows in a simulation; errors for more rows are extrapolated from these."""
POINTS = 2**12
"""Number of integration points in a simulation; their error is the same in all simulations."""


@dataclass(frozen=True, slots=True, eq=False)
class MomentFit:
    """An estimate and the distribution of the columns that it integrates over."""

    root: MomentRoot
    distribution: ReleasedDistribution
    release: MomentRelease


def estimate(
    design: ScoredDesign, release: MomentRelease, points: Floats, start: MomentFit | None = None
) -> MomentFit:
    """Estimate the distribution of the columns, then the coefficients, from those of an earlier fit."""
    earlier = None if start is None else start.distribution
    distribution = ReleasedDistribution.find(
        design, release.margins, release.products[:-1, :-1], points, release.noise, earlier
    )
    root = None if start is None else start.root
    return MomentFit(
        solve_moments(distribution, release.response, release.products[-1, :-1], root), distribution, release
    )


@dataclass(frozen=True, slots=True, eq=False)
class BootstrapErrors:
    """Deviations of estimates in simulated releases without noise, (draws, p + 1), and the effect of noise.

    They have the scale of the fit. `failed` estimates do not solve their equations. `moves` (draws, p + 1)
    are steps from the estimates without noise, if they were requested.
    """

    sampling: Floats
    noise: Floats
    failed: int
    moves: Floats

    @property
    def covariance(self) -> Floats:
        """Covariance of the estimates, (p + 1, p + 1), from sampling and noise together."""
        return np.cov(self.sampling, rowvar=False) + np.cov(self.noise, rowvar=False)


def bootstrap(
    fit: MomentFit,
    n: int,
    noise: ReleaseNoise | None,
    draws: int,
    rng: np.random.Generator,
    move: Callable[[MomentFit, MomentFit, Ints, Floats, Ints], Floats] | None = None,
) -> BootstrapErrors:
    """Draw rows and responses from the model, release them with noise and without, and estimate.

    Both releases have the same rows, so that the difference is the effect of noise. `move` computes the step
    from the estimate of simulated rows.
    """
    design, response, root, distribution = (
        fit.distribution.design,
        fit.release.response,
        fit.root,
        fit.distribution,
    )
    rows, points = min(n, MOST_ROWS), distribution.points[:POINTS]
    share = rows / n
    scaled = None if noise is None else noise.scaled(share)
    sampling, noisy, moves, failed = [], [], [], 0
    for _ in counted(range(draws), "sample"):
        latents = distribution.draw(rows, rng)
        codes = distribution.code(latents)
        values = design.values(latents, distribution.margins, codes)
        eta = root.params[0] + values @ root.params[1:]
        y = response.draw(eta, root.scale, rng)
        exact = release_rows(design, response.family, response.bins, codes, y)
        from_rows = estimate(design, exact, points, fit)
        before = from_rows.root
        sampling.append(before.params)
        failed += not before.converged
        if move is not None:
            moves.append(move(fit, from_rows, codes, values, y))
        if scaled is not None:
            anew = release_rows(design, response.family, response.bins, codes, y, scaled, rng)
            found = estimate(design, anew, points, fit).root
            noisy.append(found.params - before.params)
            failed += not found.converged
    plain = np.array(sampling)
    deviations = np.sqrt(share) * (plain - plain.mean(axis=0))
    return BootstrapErrors(
        deviations,
        np.sqrt(share) * np.array(noisy) if noisy else np.zeros_like(deviations),
        failed,
        np.sqrt(share) * np.array(moves),
    )


# ----------------------------------------------------------------------------------------------------
# Standard errors in two parts, of sampling and of noise.


@dataclass(frozen=True, slots=True, eq=False)
class MomentErrors:
    """Standard errors in two parts, (d,) each, and their source.

    `deviations` (draws, d) are those of the simulated estimates, including noise. `exact` (d, d) is the
    covariance of maximum likelihood on the rows, at the estimate and under the released distribution. Errors
    that are not `simulated` are in closed form, and deviations are drawn from them.
    """

    sampling: Floats
    noise: Floats
    deviations: Floats
    exact: Matrix
    failed: Annotated[int, Minimum(0)]
    simulated: bool = True

    @classmethod
    def of(cls, errors: BootstrapErrors, exact: Floats) -> Self:
        """Summarize simulated releases."""
        return cls(
            sampling=errors.sampling.std(axis=0, ddof=1),
            noise=errors.noise.std(axis=0, ddof=1),
            deviations=errors.sampling + errors.noise,
            exact=exact,
            failed=errors.failed,
        )

    @classmethod
    def closed(
        cls, sampling: Floats, noise: Floats, exact: Floats, draws: int, rng: np.random.Generator
    ) -> Self:
        """Use covariances of sampling and of noise (d, d), and draw deviations for selection."""
        d = len(exact)
        deviations = rng.multivariate_normal(np.zeros(d), sampling + noise, size=draws, method="cholesky")
        of_sampling, of_noise = np.sqrt(np.diag(sampling)), np.sqrt(np.diag(noise))
        return cls(of_sampling, of_noise, deviations, exact, failed=0, simulated=False)

    @property
    def draws(self) -> int:
        """Number of simulated releases."""
        return len(self.deviations)

    @property
    def ratio(self) -> float:
        """Noise over sampling error of the slopes, root mean square."""
        return float(np.sqrt(np.mean((self.noise[1:] / self.sampling[1:]) ** 2)))


# ----------------------------------------------------------------------------------------------------
# Selection of columns from estimates alone: a penalized path on their quadratic loss.
#
# The loss is ``(b - b*)' S^-1 (b - b*)`` in the coefficients, where b* is the estimate and S its covariance
# (Wang and Leng 2007). It is a least squares problem in moments of a valid distribution, hence with a
# positive definite matrix. S is the inverse information at the estimate under that distribution, with the
# standard errors of the bootstrap, so that a noisy coefficient has less weight.
#
# References
# ----------
# Wang, H. and Leng, C. (2007). Unified lasso estimation by least squares approximation. Journal of the
# American Statistical Association 102, 1039-1048.


@dataclass(frozen=True, slots=True, eq=False)
class QuadraticLoss:
    """Precision of n entities' slopes in units in which its diagonal is 1: (p, p), units (p,)."""

    precision: Floats
    units: Floats
    n: int

    @classmethod
    def of(cls, covariance: Floats, errors: Floats, n: int) -> QuadraticLoss:
        """Replace the standard errors (p,) of a covariance of slopes (p, p), and invert it."""
        share = errors / np.sqrt(np.diag(covariance))
        precision = np.linalg.inv(covariance * np.outer(share, share)) / n
        units = np.sqrt(np.diag(precision))
        return cls(precision / np.outer(units, units), units, n)

    def path(self, slopes: Floats, penalty: Penalty) -> tuple[PenalizedPath, Floats]:
        """Compute the path from slopes (p,): coefficients in their own units, and the BIC of every fit."""
        u = slopes * self.units
        found = gram_path(
            self.precision, self.precision @ u, penalty, CoefficientGroups.single(len(u)), algorithm="lla"
        )
        away = found.coefficients - u
        lost = self.n * np.einsum("li,ij,lj->l", away, self.precision, away)
        return found, lost + np.log(self.n) * (found.coefficients != 0.0).sum(axis=1)

    def select(self, slopes: Floats, penalty: Penalty) -> Floats:
        """Slopes of the fit with the smallest BIC, 0 where they are not selected."""
        found, bic = self.path(slopes, penalty)
        return np.asarray(found.coefficients[int(np.argmin(bic))] / self.units)


def selection_frequencies(loss: QuadraticLoss, draws: Floats, penalty: Penalty) -> Floats:
    """Share of estimates (draws, p) that select each column: (p,)."""
    chosen: Bools = np.array([loss.select(slopes, penalty) != 0.0 for slopes in draws])
    return np.asarray(chosen.mean(axis=0))
