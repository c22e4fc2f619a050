"""Debiased (desparsified) estimates: intervals for all coefficients after a penalized fit.

The lasso is that of the lambda with the smallest AIC, for any penalty that selects: of two fits that predict
equally well, inference needs the one with less shrinkage. For the normal family, everything follows from the
sums of products; other families need some linear predictors and one weighted Gram matrix at that lasso.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedstat.federation.disclosure.row_checks import MIN_ENTITIES_PER_EQUATION
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.post_selection import Debiased, debias
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.penalized.nodewise import INFLATION
from fedstat.kernels.penalized.path import lambda_grid, lambda_max
from fedstat.kernels.penalized.penalties import CoefficientGroups, Penalty
from fedstat.models.vertical.exchange.protocol import ColumnScales
from fedstat.models.vglm import path_setup
from fedstat.models.vglm.normal_path import normal_path
from fedstat.models.vglm.path_following import PathFollower
from fedstat.models.vglm.proximal_newton import LossPoint
from fedstat.typing import Floats

LASSO = Penalty("lasso")
SIZE, RATIO = 50, 1e-3
"""Number of lambdas of the lasso, and ratio of the smallest to the largest."""
ENOUGH, ENOUGH_OTHERS = 5.0, 20.0
"""Entities for each coefficient from which on the inverse itself is used: normal family, and others.

With 300 entities, 30 columns and neighbors correlated at .9, relaxed intervals of nonzero coefficients
covered .91, and those of the inverse .94.
"""


@dataclass(frozen=True, slots=True, eq=False)
class DebiasedFit:
    """Debiased estimates (1 + p,) in the units of the data, with their covariance.

    `scale` is the residual variance of least squares on all columns, or for other families the dispersion at
    the lasso, whose lambda is `lam`; for `relaxed` columns the inverse of the information was relaxed, and
    `correlation` is the largest of one of them with another column.
    """

    params: Floats
    cov: Floats
    scale: float
    lam: float
    relaxed: int
    correlation: float

    @classmethod
    def of(cls, found: Debiased, units: ColumnScales, turn: Floats, scale: float, lam: float) -> DebiasedFit:
        """Convert estimates of (1, X T) to the units of the data; `turn` holds (1, T)."""
        J = path_setup.to_units(np.ones(len(units.scale), dtype=bool), units) @ turn
        relaxed = int(np.count_nonzero(found.lambdas))
        return cls(J @ found.params, J @ found.cov @ J.T, scale, lam, relaxed, found.correlation)


def lasso_setup(setup: path_setup.PathSetup) -> path_setup.PathSetup:
    """Replace a penalty by the plain lasso of single columns; columns without a penalty stay free."""
    weights = np.repeat(setup.groups.penalized.astype(np.float64), setup.groups.sizes)
    return path_setup.PathSetup(
        penalty=LASSO,
        groups=CoefficientGroups.single(len(weights), weights),
        adaptive=0.0,
        lambdas=None,
        size=SIZE,
        ratio=RATIO,
        algorithm="descent",
        tol=setup.tol,
    )


def normal_debiased(S: Floats, units: ColumnScales, setup: path_setup.PathSetup) -> DebiasedFit:
    """Debias the lasso of the normal family; penalty and lambdas of the setup are ignored.

    S (p + 2, p + 2) are sums of products of (1, X, y) of all entities, X and y standardized.
    """
    n, few = float(S[0, 0]), S[0, 0] < MIN_ENTITIES_PER_EQUATION * (len(S) - 1)
    path = normal_path(S, units, lasso_setup(setup))
    best = scaled_lasso(path, n) if few else path_setup.choose_fit(path_setup.score_path(path, n), "aic")
    # Sums of products use the centered response: the intercept is estimated relative to its mean.
    a = path.intercepts[best] + path.coefficients[best] @ units.shift - units.mean
    b = np.concatenate([[a], path.standardized[best]])
    H, c = S[:-1, :-1] / n, units.sd * S[:-1, -1] / n
    selected = int(np.count_nonzero(path.coefficients[best]))
    scale = 2.0 * n * path.loss[best] / (n - 1.0 - selected) if few else residual_variance(S, units)
    enough = n >= ENOUGH * len(H)
    found = debias(b, c - H @ b, H, n, scale, np.inf if enough else INFLATION)
    found = replace(found, params=found.params + np.eye(len(b))[0] * units.mean)
    return DebiasedFit.of(found, units, np.eye(len(b)), scale, float(path.lambdas[best]))


def scaled_lasso(path: path_setup.CoefficientPath, n: float) -> int:
    """Return the last fit whose lambda is at least sqrt(2 log p / n) times its own residual deviation.

    With fewer than two entities for each column, information criteria prefer fits without residuals (Sun and
    Zhang 2012, "Scaled sparse linear regression", Biometrika 99).
    """
    least = np.sqrt(2.0 * path.loss) * np.sqrt(2.0 * np.log(path.coefficients.shape[1]) / n)
    return int(np.flatnonzero(np.append(True, path.lambdas[1:] >= least[1:])).max())


def residual_variance(S: Floats, units: ColumnScales) -> float:
    """Residual variance of least squares on all columns, which has no bias for any selection.

    It needs more entities than columns.
    """
    values, vectors = np.linalg.eigh(S[:-1, :-1])
    kept = values > 1e-10 * values[-1]
    fitted = (S[:-1, -1] @ vectors[:, kept]) ** 2 / values[kept]
    return float(units.sd**2 * (S[-1, -1] - fitted.sum()) / (S[0, 0] - kept.sum()))


def debiased_fit(
    follower: PathFollower, point: LossPoint, H: Floats, distribution: DistributionSpec
) -> FitProtocol[DebiasedFit]:
    """Go to the lasso with the smallest AIC, and debias it there.

    Start from the last point of the fit, with the Hessian (p + 1, p + 1) as far as it is known.
    """
    oracle, setup = follower.oracle, lasso_setup(follower.setup)
    n, scale = oracle.layout.nobs, lambda_max(follower.gradient, LASSO, setup.groups)
    grid = lambda_grid(scale, ratio=RATIO, size=SIZE)
    select = path_setup.Chooser(n, distribution.name, "aic")
    lasso = replace(follower, setup=setup, lambdas=grid, select=select, steps=None, scale=scale)
    lasso.seen, lasso.solved, lasso.errors = {}, {}, []
    path, best, at = yield from lasso.quadratic(point, H)
    H = yield from oracle.hessian(at)
    dispersion = 1.0
    if distribution.estimates_scale:
        dispersion = oracle.layout.counted * at.pearson / (n - 1 - int(path.selected[best].sum()))
    enough = n >= ENOUGH_OTHERS * len(H)
    found = debias(at.b, at.score, H, n, dispersion, np.inf if enough else INFLATION)
    turn = oracle.unit * oracle.turn
    return DebiasedFit.of(found, follower.units, turn, dispersion, float(path.lambdas[best]))
