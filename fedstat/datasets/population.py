"""The law that simulated covariates and responses are drawn from.

With f_k a standard normal factor of institution k,

    x_ij = mu + l_j f_k(i) + sqrt(1 - l_j^2) e_ij,    corr(x_j, x_m) = l_j l_m corr(f_k, f_k'),

and y_i = beta0 + x_i' beta + eps_i with eps_i ~ N(0, sigma2). The loadings l_j alternate in sign, so that
both signs of correlation occur within an institution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.polynomial import Polynomial
from numpy.polynomial.hermite_e import hermeval
from scipy.special import ndtri

from fedstat.errors import ModelError
from fedstat.typing import Floats, Ints

_LOG_SD = 0.75
_WINSOR = float(ndtri(0.99))
_HERMITE_TERMS = 10
_SPREAD = 0.2


@dataclass(frozen=True, slots=True)
class Population:
    """Law of covariates and response: owner (p,), loadings (p,), beta (p,)."""

    clients: tuple[str, ...]
    variables: tuple[str, ...]
    owner: Ints
    loadings: Floats
    factor_correlation: float
    beta: Floats
    r2: float
    mean: float = 0.0
    intercept: float = 0.0
    skew: bool = False

    def covariance(self) -> Floats:
        """Covariance of the covariates, p x p, with unit variances."""
        same = self.owner[:, None] == self.owner
        R: Floats = np.outer(self.loadings, self.loadings) * np.where(same, 1.0, self.factor_correlation)
        if self.skew:
            R = _skewed_correlation(R)
        np.fill_diagonal(R, 1.0)
        return R

    def explained(self) -> float:
        """Variance of x' beta."""
        return float(self.beta @ self.covariance() @ self.beta)

    def sigma2(self) -> float:
        """Variance of the errors that gives ``r2``."""
        return self.explained() * (1 - self.r2) / self.r2

    def draw_covariates(self, n: int, rng: np.random.Generator) -> Floats:
        """Draw X, n x p."""
        # f_k = sqrt(r) shared + sqrt(1 - r) own_k has variance 1, and any two of them correlation r
        shared = math.sqrt(self.factor_correlation) * rng.standard_normal((n, 1))
        own = math.sqrt(1 - self.factor_correlation) * rng.standard_normal((n, len(self.clients)))
        Z = rng.standard_normal((n, self.owner.size)) * np.sqrt(1 - self.loadings**2)
        Z += self.loadings * (shared + own)[:, self.owner]
        return self.mean + (_skewed(Z) if self.skew else Z)

    def draw_response(self, X: Floats, rng: np.random.Generator) -> Floats:
        """Draw y given X."""
        noise = rng.standard_normal(X.shape[0]) * math.sqrt(self.sigma2())
        y: Floats = self.intercept + X @ self.beta + noise
        return y

    def standardise(self, y: Floats) -> Floats:
        """Centre and scale the response by its population moments."""
        centre = self.intercept + self.mean * self.beta.sum()
        z: Floats = (y - centre) / math.sqrt(self.explained() + self.sigma2())
        return z


def alternating_loadings(p: int, rho: float) -> Floats:
    """Give one institution loadings of alternating sign with a mean |l_j l_m| of rho over its pairs."""
    require(0 <= rho < 1, f"rho: expected a mean absolute correlation in [0, 1), received {rho}.")
    # of different size, so that correlations within an institution differ
    shape = np.linspace(1 - _SPREAD, 1 + _SPREAD, p) if p > 1 else np.ones(1)
    pairs = np.outer(shape, shape)[np.triu_indices(p, 1)]
    size = math.sqrt(rho / (pairs.mean() if p > 1 else 1.0))
    loadings: Floats = size * shape * (-1.0) ** np.arange(p)
    require(abs(loadings).max() < 1, f"rho: {rho} is more than one factor an institution can give; lower it.")
    return loadings


def factor_correlation(owner: Ints, loadings: Floats, between: float) -> float:
    """Give the correlation of institutions' factors for a mean |correlation| of ``between`` across them."""
    across = abs(np.outer(loadings, loadings))[owner[:, None] != owner]
    largest = float(across.mean()) if across.size else 0.0
    require(
        0 <= between <= largest,
        f"between: expected a mean absolute correlation in [0, {largest:.3f}] beside this one within "
        f"institutions, received {between}.",
    )
    return between / largest if between else 0.0


def _lognormal(Z: Floats) -> Floats:
    return np.exp(_LOG_SD * np.clip(Z, -_WINSOR, _WINSOR))


# The margin is a fixed function of a standard normal variable, so its moments are means over a grid of
# that variable's quantiles.
NORMAL_GRID: Floats = ndtri((np.arange(100_000) + 0.5) / 100_000)
_CENTRE, _SCALE = float(_lognormal(NORMAL_GRID).mean()), float(_lognormal(NORMAL_GRID).std())


def _skewed(Z: Floats) -> Floats:
    """Standardised lognormal margins, winsorised at 1 % at both ends, of standard normal ones."""
    return (_lognormal(Z) - _CENTRE) / _SCALE


def _skewed_correlation(R: Floats) -> Floats:
    """Correlation after :func:`_skewed`: sum_j c_j^2 j! R^j, c_j the Hermite coefficients (Mehler)."""
    margin = _skewed(NORMAL_GRID)
    terms = [0.0]
    for j in range(1, _HERMITE_TERMS + 1):
        he_j = hermeval(NORMAL_GRID, [0.0] * j + [1.0])
        terms.append(float((margin * he_j).mean()) ** 2 / math.factorial(j))
    correlation: Floats = Polynomial(terms)(R)
    return correlation


def require(holds: bool, message: str) -> None:
    """Refuse an argument with a ModelError that says `message`, unless it `holds`."""
    if not holds:
        raise ModelError(message)
