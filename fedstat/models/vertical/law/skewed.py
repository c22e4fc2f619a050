"""Estimates under columns that are skewed, from the same sums: indirect inference with a simulated world.

Where the response has a part in what is missing, the law of what is missing matters. Here columns are
monotone functions of jointly normal scores: shifted log-normal ones, each with the mean of z |z| that was
told, mirrored where that is negative; normal ones where it is zero. The response is normal given all
columns, on their scale. In a pattern g an entity is with probability proportional to exp(c_g't), t the
response and the columns that nobody lacks, with the sums of t by pattern that were told.

Maximum likelihood under a normal law is biased then, by as much in a large sample drawn from such a law.
The law is moved until the estimates in its sample are those that were found (Gourieroux, Monfort and
Renault 1993). The covariance is that of the estimates in 40 parts of the sample, through the derivative of
what is estimated by the law.

References
----------
Gourieroux, Monfort and Renault (1993), Indirect inference, Journal of Applied Econometrics 8, S85-S118.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedstat.errors import EstimationError
from fedstat.models.vertical.law.covariance import in_psi
from fedstat.models.vertical.law.derivatives import LawPoint, differentiate
from fedstat.models.vertical.law.fit import LawFit, climb
from fedstat.models.vertical.law.shapes import log_sd_of
from fedstat.models.vertical.law.world import SkewedLaw, World
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vertical.newton import solve_information
from fedstat.typing import Floats

PARTS = 40
"""Of the sample, each with as many entities as the data where these are between the next two numbers."""
SMALLEST_PART, LARGEST_PART = 1_000, 20_000
MOST_NUMBERS = 20_000_000
"""Of the sample: numbers that are held at once."""
ROWS_OF_DERIVATIVES = 40_000
CLOSE, FAR, MOST_ROUNDS = 0.1, 0.5, 8
"""Largest change of a coefficient, in standard errors, that ends the search, or fails it after most rounds.

Entities of the sample flip between patterns from one law to the next, so that changes stay at some
hundredths.
"""
STEP = 2.0
"""Of a numerical derivative, in standard errors: patterns of entities flip, and no derivative is exact."""
TOL = 1e-3
NO_LAW = (
    "correction='skewness': no law with skewed columns has these estimates; take logarithms of such columns "
    "in the formula, or leave out columns that hardly any entity has"
)


@dataclass(frozen=True, slots=True, eq=False)
class SkewedFit:
    """A law with skewed columns whose sample, of a `world`, has the estimates of `found`."""

    found: LawFit
    law: SkewedLaw
    world: World

    @property
    def reported(self) -> LawFit:
        """Law of the columns and the response, with means and covariances of the skewed one."""
        return replace(self.found, point=self.law.point)


def without_skewness(fit: LawFit, *, seed: int = 0) -> SkewedFit:
    """Find the law with skewed columns whose sample has the estimates of `fit`.

    An EstimationError where there is none, or shapes of columns are not known.
    """
    if fit.moments.shape is None:
        raise EstimationError("correction='skewness' needs the shapes of columns, which were not exchanged")
    n, P = int(fit.moments.nobs), len(fit.point.beta)
    part = min(max(n, SMALLEST_PART), LARGEST_PART, max(MOST_NUMBERS // (PARTS * P), SMALLEST_PART))
    world = World(fit.moments, PARTS * part, seed)
    found = SkewedLaw(fit.point, log_sd_of(fit.moments.shape))
    law, change = found, np.inf
    information = differentiate(fit.moments, fit.point, fit.moves).information
    errors = np.sqrt(np.diag(solve_information(information, np.eye(len(information), 2 + P))))[2:]
    for _ in range(MOST_ROUNDS):
        there = estimated(fit, law, world.draw(law))
        new = matched(law, found, there)
        change = float((np.abs(new.point.beta - law.point.beta) / errors).max())
        law = new
        if change < CLOSE:
            break
    if not change < FAR:
        raise EstimationError(NO_LAW)
    return SkewedFit(fit, law, world)


def matched(law: SkewedLaw, found: SkewedLaw, there: SkewedLaw) -> SkewedLaw:
    """Move a law by what the estimates in its sample lack; less far where no law would be left."""
    known = np.where(found.log_sd == 0.0, 0.0, found.log_sd - there.log_sd)
    Sigma, gap = law.point.covariates, found.point.covariates - there.point.covariates
    share = 1.0
    while np.linalg.eigvalsh(Sigma + share * gap)[0] < 0.5 * np.linalg.eigvalsh(Sigma)[0]:
        share /= 2.0
    at, goal, seen = law.point, found.point, there.point
    point = LawPoint(
        at.mu + goal.mu - seen.mu,
        at.a + goal.a - seen.a,
        at.beta + goal.beta - seen.beta,
        at.s2 * float(np.clip(goal.s2 / seen.s2, 0.5, 2.0)),
        np.asarray(np.linalg.inv(Sigma + share * gap)),
    )
    return SkewedLaw(point, law.log_sd + known)


def estimated(fit: LawFit, law: SkewedLaw, moments: PatternMoments) -> SkewedLaw:
    """Fit a normal law to a sample of a skewed one; with the shapes of its columns as they are seen."""
    assert moments.shape is not None
    try:
        found = climb(moments, law.point, fit.moves, TOL, 100)
    except (EstimationError, np.linalg.LinAlgError):
        raise EstimationError(
            f"correction='skewness': {int(moments.nobs):,} simulated entities do not determine the estimate; "
            "leave out columns or institutions that hardly any entity has"
        ) from None
    return SkewedLaw(found.point, log_sd_of(moments.shape))


def simulated_covariance(skewed: SkewedFit) -> Floats:
    """Covariance of (a, s2, beta_1, mu_1, ...), in the units of the data, under skewed columns."""
    fit, law, world = skewed.found, skewed.law, skewed.world
    P, n = len(fit.point.beta), fit.moments.nobs
    part = world.N // PARTS
    parts = [slice(first, first + part) for first in range(0, world.N, part)]
    world.draw(law)
    samples = [world.draw(law, rows, same=True) for rows in parts]
    V = np.cov([estimated(fit, law, sample).pack() for sample in samples], rowvar=False) * part / n
    # The sample has errors of its own.
    V *= 1.0 + n / world.N
    some = slice(0, min(world.N, ROWS_OF_DERIVATIVES))
    here = estimated(fit, law, world.draw(law, some)).pack()
    J, errors = np.eye(len(V)), np.sqrt(np.diag(V))
    shapes = 2 + 2 * P + np.flatnonzero(law.log_sd)
    # Location is no matter: means move their estimates alone, and one for one.
    for c in [1, *range(2, 2 + P), *shapes]:
        by = np.zeros(len(V))
        # Towards a normal column, not to ever longer tails.
        by[c] = STEP * errors[c] * (-1.0 if c >= 2 + 2 * P and law.log_sd[c - 2 - 2 * P] > 0.0 else 1.0)
        new = law.moved(by)
        J[:, c] = (estimated(fit, new, world.draw(new, some)).pack() - here) / by[c]
    used = np.concatenate([np.arange(2 + 2 * P), shapes])
    try:
        back = np.linalg.inv(J[np.ix_(used, used)])[: 2 + 2 * P]
    except np.linalg.LinAlgError:
        raise EstimationError(NO_LAW) from None
    cov = back @ V[np.ix_(used, used)] @ back.T
    return in_psi(fit, 0.5 * (cov + cov.T))
