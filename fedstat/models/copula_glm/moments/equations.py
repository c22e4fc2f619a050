"""Coefficients from released moments: the root of E[v (t - m(x'b))] = 0.

v are the cut scores of the columns, t is the score of the response, and m(eta) the mean of t under the
generalised linear model, bins and cut included. The part with t is as released; the part with m is an
integral over the released law of the columns. Where that law is the true one and the model holds, the root is
consistent, whatever bins and cuts are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.models.copula_glm.moments.law import ReleasedLaw
from fedstat.models.copula_glm.moments.response import ScoredResponse
from fedstat.typing import Floats

STEPS = 60
TOLERANCE = 1e-7
LARGEST_STEP = 1.0
"""Of a coefficient of a standardised column, in standard deviations of the response of the normal family."""
SINGULAR = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class MomentRoot:
    """Coefficients with the intercept first, (p + 1,), the scale, and whether they are a root."""

    params: Floats
    scale: float
    converged: bool


def solve_moments(
    law: ReleasedLaw, response: ScoredResponse, products: Floats, start: MomentRoot | None = None
) -> MomentRoot:
    """Solve for the coefficients, from mean products (p,) of scores of the response and the columns."""
    V = np.column_stack([np.ones(len(law.scores)), law.scores])
    shift, spread = law.values.mean(axis=0), law.values.std(axis=0)
    spread = np.where(spread > 0.0, spread, 1.0)
    X = np.column_stack([np.ones(len(V)), (law.values - shift) / spread])
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


def covariance_without_noise(law: ReleasedLaw, response: ScoredResponse, root: MomentRoot, n: int) -> Floats:
    """Inverse information of n entities at a root under the law of the columns: (p + 1, p + 1)."""
    X = np.column_stack([np.ones(len(law.values)), law.values])
    eta = root.params[0] + law.values @ root.params[1:]
    weights = response.weights(eta, root.scale)
    H = (X * weights[:, None]).T @ X / len(X) * n
    units = np.sqrt(np.maximum(np.diag(H), 1e-12))
    return np.asarray(np.linalg.pinv(H / np.outer(units, units), rcond=SINGULAR) / np.outer(units, units))
