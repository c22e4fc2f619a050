"""One step from released moments on the score of the rows, and its covariance in closed form.

U = sum_i v_i (y_i - p(w_i)) + noise has mean n E[v (mu - p)] at the true coefficients where the step begins;
of the rows it takes no law of the columns but for what the polynomial leaves, v (mu - p). With H the
derivative of E[v mu] by the coefficients under the released law,

    b_1 = b_0 + H^-1 (U / n - E[v (mu - p)]),    cov = H^-1 (V / n + sigma^2 I / n^2) H^-T.

So the copula matters where it gives a derivative and a small remainder, and no longer for what is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy.special import expit

from fedstat.models.copula_glm.moments.bootstrap import MomentFit
from fedstat.models.copula_glm.moments.response import LARGEST, MeanScore, ScoredResponse
from fedstat.models.copula_glm.score.mean import SharedMean, bits_for, share_cubic, share_line
from fedstat.typing import Floats

OF_STEP = Fraction(1, 2)
"""Share of the budget for the step; the rest is for the release before it."""
WIDE = {"Binomial": 3.5, "Gaussian": 2.5}
"""Half width of a part of the linear predictor, in its deviations under the released law, by family."""
LEAST = 1e-3
"""Smallest half width, in units of the linear predictor."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreQuestion:
    """Where a step begins: coefficients (p + 1,), the middle of each institution's part, the shared mean."""

    params: Floats
    middles: Mapping[str, float]
    mean: SharedMean


@dataclass(frozen=True, slots=True, eq=False)
class ScoreStep:
    """Coefficients after a step (p + 1,), and the parts of their covariance (p + 1, p + 1).

    `remainder` is by how much the law of the columns moved the coefficients through what the polynomial
    leaves, in sampling errors (root mean square).
    """

    params: Floats
    sampling: Floats
    noise: Floats
    remainder: float

    @property
    def covariance(self) -> Floats:
        """Covariance of the coefficients."""
        return self.sampling + self.noise


def plan_score(fit: MomentFit, holder: str, n: int, length: float) -> ScoreQuestion:
    """Choose ranges and polynomial from what was released; `length` is the largest of a row of scores."""
    response, b = fit.release.response, fit.root.params
    parts = _parts_of(fit)
    wide = WIDE[response.family]
    middles = {site: float(part.mean()) for site, part in parts.items()}
    halves = {site: max(wide * float(part.std()), LEAST) for site, part in parts.items()}
    middles.setdefault(holder, 0.0)
    halves.setdefault(holder, 0.0)
    offset = float(b[0]) + sum(middles.values())
    if response.has_scale:
        unit, largest = 1.0 / response.spread, LARGEST[response.family]
        constant = (offset - response.center) * unit
        bits = bits_for(n, length * (largest + abs(constant) + unit * sum(halves.values())))
        return ScoreQuestion(b, middles, share_line(bits, halves, unit, constant, largest))
    w = np.sum(
        [np.clip(part - middles[site], -halves[site], halves[site]) for site, part in parts.items()], axis=0
    )
    bits = bits_for(n, 2.0 * length)
    return ScoreQuestion(b, middles, share_cubic(bits, halves, lambda t: expit(offset + t), w))


def take_step(fit: MomentFit, asked: ScoreQuestion, sums: Floats, n: int, deviation: float) -> ScoreStep:
    """Take the step that sums (p + 1,) of n rows with noise say, intercept first."""
    law, response, root = fit.law, fit.release.response, fit.root
    V = np.column_stack([np.ones(len(law.scores)), law.scores])
    X = np.column_stack([np.ones(len(V)), law.values])
    eta = X @ root.params
    found = _mean_of(response, eta, root.scale)
    w = np.sum([asked.mean.part(s, part - asked.middles[s]) for s, part in _parts_of(fit).items()], axis=0)
    left = found.mean - asked.mean.at(w)
    remainder = V.T @ left / len(V)
    # Derivatives of E[v mu] by coefficients of columns of one spread, so that the inverse is a good one.
    units = np.where(X.std(axis=0) > 0.0, X.std(axis=0), 1.0)
    Hi = np.linalg.inv((V * found.slope[:, None]).T @ (X / units) / len(V)) / units[:, None]
    spread = _variance_of(response, eta, root.scale, found.mean) + left**2
    inner = (V * spread[:, None]).T @ V / len(V) - np.outer(remainder, remainder)
    sampling = Hi @ inner @ Hi.T / n
    moved = Hi @ remainder / np.sqrt(np.diag(sampling))
    return ScoreStep(
        params=root.params + Hi @ (sums / n - remainder),
        sampling=sampling,
        noise=(deviation / n) ** 2 * Hi @ Hi.T,
        remainder=float(np.sqrt(np.mean(moved**2))),
    )


def _parts_of(fit: MomentFit) -> dict[str, Floats]:
    """Return each institution's part of the linear predictor at the points of the law: (N,) each."""
    design, b = fit.law.design, fit.root.params[1:]
    return {
        client: fit.law.values[:, block] @ b[block]
        for client, block in zip(design.clients, design.blocks, strict=True)
    }


def _mean_of(response: ScoredResponse, eta: Floats, scale: float) -> MeanScore:
    """Mean of the response as it is summed, 0 or 1 or the score, and its derivative."""
    found = response.mean(eta, scale)
    if response.has_scale:
        return found
    # Scores of a binary response are -1 and 1.
    return MeanScore((found.mean + 1.0) / 2.0, found.slope / 2.0, found.by_scale)


def _variance_of(response: ScoredResponse, eta: Floats, scale: float, mean: Floats) -> Floats:
    """Variance of the response as it is summed."""
    if response.has_scale:
        return response.mean(eta, scale, 2).mean - mean**2
    return mean * (1.0 - mean)
