"""Estimates from a release, and their errors by drawing from them and releasing anew."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.models.copula_glm.moments.columns import ScoredDesign
from fedstat.models.copula_glm.moments.equations import MomentRoot, solve_moments
from fedstat.models.copula_glm.moments.law import ReleasedLaw
from fedstat.models.copula_glm.moments.release import MomentRelease, ReleaseNoise, release_rows
from fedstat.progress_line import counted
from fedstat.typing import Floats

MOST_ROWS = 20_000
"""Rows of a draw; errors of more are found from these."""
POINTS = 2**12
"""By which to integrate in a draw: what this leaves is the same in all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class MomentFit:
    """An estimate and the law of the columns that it integrates over."""

    root: MomentRoot
    law: ReleasedLaw
    release: MomentRelease


def estimate(
    design: ScoredDesign, release: MomentRelease, points: Floats, start: MomentRoot | None = None
) -> MomentFit:
    """Find the law of the columns, then the coefficients."""
    law = ReleasedLaw.find(design, release.margins, release.products[:-1, :-1], points)
    return MomentFit(solve_moments(law, release.response, release.products[-1, :-1], start), law, release)


@dataclass(frozen=True, slots=True, eq=False)
class BootstrapErrors:
    """Deviations of estimates in simulated releases without noise, (draws, p + 1), and what noise adds.

    As large as those of the fit. `failed` estimates are no root of their equations.
    """

    sampling: Floats
    noise: Floats
    failed: int

    @property
    def covariance(self) -> Floats:
        """Covariance of the estimates, (p + 1, p + 1): that of sampling and that of noise together."""
        return np.cov(self.sampling, rowvar=False) + np.cov(self.noise, rowvar=False)


def bootstrap(
    fit: MomentFit, n: int, noise: ReleaseNoise | None, draws: int, rng: np.random.Generator
) -> BootstrapErrors:
    """Draw rows from the law and responses from the model, release them with noise and without, estimate.

    Both releases are of the same rows, so that the difference is what noise adds.
    """
    design, response, root, law = fit.law.design, fit.release.response, fit.root, fit.law
    rows, points = min(n, MOST_ROWS), law.points[:POINTS]
    share = rows / n
    scaled = None if noise is None else noise.scaled(share)
    sampling, noisy, failed = [], [], 0
    for _ in counted(range(draws), "sample"):
        latents = law.draw(rows, rng)
        eta = root.params[0] + design.values(latents, law.margins) @ root.params[1:]
        codes, y = law.code(latents), response.draw(eta, root.scale, rng)
        exact = release_rows(design, response.family, response.bins, codes, y)
        before = estimate(design, exact, points, root).root
        sampling.append(before.params)
        failed += not before.converged
        if scaled is not None:
            anew = release_rows(design, response.family, response.bins, codes, y, scaled, rng)
            found = estimate(design, anew, points, root).root
            noisy.append(found.params - before.params)
            failed += not found.converged
    plain = np.array(sampling)
    deviations = np.sqrt(share) * (plain - plain.mean(axis=0))
    return BootstrapErrors(
        deviations, np.sqrt(share) * np.array(noisy) if noisy else np.zeros_like(deviations), failed
    )
