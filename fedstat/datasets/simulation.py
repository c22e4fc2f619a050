"""Building blocks of the simulators: the population, missing blocks of records, and the tables of sites."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import pandas as pd
from numpy.polynomial import Polynomial
from numpy.polynomial.hermite_e import hermeval
from scipy.special import ndtri

from fedstat.errors import ModelError
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# The law that simulated covariates and responses are drawn from.
#
# With f_k a standard normal factor of site k,
#
#     x_ij = mu + l_j f_k(i) + sqrt(1 - l_j^2) e_ij,    corr(x_j, x_m) = l_j l_m corr(f_k, f_k'),
#
# and y_i = beta0 + x_i' beta + eps_i with eps_i ~ N(0, sigma2). The loadings l_j alternate in sign, so that
# both signs of correlation occur within a site.

_LOG_SD = 0.75
_WINSOR = float(ndtri(0.99))
_HERMITE_TERMS = 10
_SPREAD = 0.2


@dataclass(frozen=True, slots=True)
class Population:
    """Law of covariates and response: owner (p,), loadings (p,), beta (p,)."""

    sites: tuple[str, ...]
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
        own = math.sqrt(1 - self.factor_correlation) * rng.standard_normal((n, len(self.sites)))
        Z = rng.standard_normal((n, self.owner.size)) * np.sqrt(1 - self.loadings**2)
        Z += self.loadings * (shared + own)[:, self.owner]
        return self.mean + (_skewed(Z) if self.skew else Z)

    def draw_response(self, X: Floats, rng: np.random.Generator) -> Floats:
        """Draw y given X."""
        noise = rng.standard_normal(X.shape[0]) * math.sqrt(self.sigma2())
        y: Floats = self.intercept + X @ self.beta + noise
        return y

    def standardize(self, y: Floats) -> Floats:
        """Center and scale the response by its population moments."""
        center = self.intercept + self.mean * self.beta.sum()
        z: Floats = (y - center) / math.sqrt(self.explained() + self.sigma2())
        return z


def alternating_loadings(p: int, rho: float) -> Floats:
    """Give one site loadings of alternating sign with a mean |l_j l_m| of rho over its pairs."""
    require_argument(0 <= rho < 1, f"rho: expected a mean absolute correlation in [0, 1), received {rho}.")
    # of different size, so that correlations within a site differ
    shape = np.linspace(1 - _SPREAD, 1 + _SPREAD, p) if p > 1 else np.ones(1)
    pairs = np.outer(shape, shape)[np.triu_indices(p, 1)]
    size = math.sqrt(rho / (pairs.mean() if p > 1 else 1.0))
    loadings: Floats = size * shape * (-1.0) ** np.arange(p)
    require_argument(
        abs(loadings).max() < 1, f"rho: {rho} is more than one factor a site can give; lower it."
    )
    return loadings


def factor_correlation(owner: Ints, loadings: Floats, between: float) -> float:
    """Give the correlation of sites' factors for a mean |correlation| of ``between`` across them."""
    across = abs(np.outer(loadings, loadings))[owner[:, None] != owner]
    largest = float(across.mean()) if across.size else 0.0
    require_argument(
        0 <= between <= largest,
        f"between: expected a mean absolute correlation in [0, {largest:.3f}] for this correlation within "
        f"sites, received {between}.",
    )
    return between / largest if between else 0.0


def _lognormal(Z: Floats) -> Floats:
    return np.exp(_LOG_SD * np.clip(Z, -_WINSOR, _WINSOR))


# The margin is a fixed function of a standard normal variable, so its moments are means over a grid of
# that variable's quantiles.
NORMAL_GRID: Floats = ndtri((np.arange(100_000) + 0.5) / 100_000)
_CENTER, _SCALE = float(_lognormal(NORMAL_GRID).mean()), float(_lognormal(NORMAL_GRID).std())


def _skewed(Z: Floats) -> Floats:
    """Standardized lognormal margins, winsorized at 1 % at both ends, of standard normal ones."""
    return (_lognormal(Z) - _CENTER) / _SCALE


def _skewed_correlation(R: Floats) -> Floats:
    """Correlation after :func:`_skewed`: sum_j c_j^2 j! R^j, c_j the Hermite coefficients (Mehler)."""
    margin = _skewed(NORMAL_GRID)
    terms = [0.0]
    for j in range(1, _HERMITE_TERMS + 1):
        he_j = hermeval(NORMAL_GRID, [0.0] * j + [1.0])
        terms.append(float((margin * he_j).mean()) ** 2 / math.factorial(j))
    correlation: Floats = Polynomial(terms)(R)
    return correlation


def require_argument(holds: bool, message: str) -> None:
    """Refuse an argument with a ModelError that says `message`, unless it `holds`."""
    if not holds:
        raise ModelError(message)


# ----------------------------------------------------------------------------------------------------
# Presence of entities at sites: records are lacking completely at random, or at random.

Mechanism: TypeAlias = Literal["mcar", "mar"]

SLOPES = {"mcar": 0.0, "mar": 0.75}


@dataclass(frozen=True, slots=True)
class MissingnessModel:
    """How records come about: ``counts[k]`` of them at site k, of n entities.

    A record at site ``leader`` is more likely with a high response, one at any other site
    with a high response and, where the leader has the entity, a high ``lead``, one of the leader's
    covariates. Whether a record is lacking so depends on nothing that is lacking: missing at random.
    """

    counts: tuple[int, ...]
    leader: int
    slope: float

    def draw(self, y: Floats, lead: Floats, rng: np.random.Generator) -> Bools:
        """Draw who has a record of whom, n x K, from standardized ``y`` and ``lead``."""
        seen, score = self._draw_leader(y, lead, rng)
        for k in self._others():
            seen[:, k] = _first(score, self.counts[k], rng)
        return seen

    def draw_with_complete(self, n_complete: int, y: Floats, lead: Floats, rng: np.random.Generator) -> Bools:
        """Draw as ``draw`` does, with exactly ``n_complete`` entities that every site has."""
        seen, score = self._draw_leader(y, lead, rng)
        *middle, last = self._others()
        # first complete entities, then others with a record: the last site must complete no other entity
        complete = _first(np.where(seen[:, self.leader], score, -np.inf), n_complete, rng)
        for k in middle:
            seen[:, k] = _first(np.where(complete, np.inf, score), self.counts[k], rng)
        lacks_last_only = seen[:, [self.leader, *middle]].all(axis=1) & ~complete
        score = np.where(complete, np.inf, np.where(lacks_last_only, -np.inf, score))
        seen[:, last] = _first(score, self.counts[last], rng)
        return seen

    def _draw_leader(self, y: Floats, lead: Floats, rng: np.random.Generator) -> tuple[Bools, Floats]:
        seen = np.zeros((y.size, len(self.counts)), dtype=np.bool_)
        seen[:, self.leader] = _first(self.slope * y, self.counts[self.leader], rng)
        score: Floats = self.slope * (y + np.where(seen[:, self.leader], lead, 0.0))
        return seen, score

    def _others(self) -> list[int]:
        return [k for k in range(len(self.counts)) if k != self.leader]


def _first(score: Floats, count: int, rng: np.random.Generator) -> Bools:
    """Choose ``count`` entities with logistic odds in ``score``; infinite scores decide."""
    order = np.argsort(-(score + rng.logistic(size=score.size)), kind="stable")
    chosen = np.zeros(score.size, dtype=np.bool_)
    chosen[order[:count]] = True
    return chosen


# ----------------------------------------------------------------------------------------------------
# Tables of a simulation, with the truth.


@dataclass(frozen=True, slots=True)
class SimulatedData:
    """Tables of several sites, drawn from a known linear model.

    Attributes
    ----------
    frames : dict of str to DataFrame
        One table per site, with the key and only the entities that the site has a record of.
        The holder of the response comes first.
    key : str
        Name of the column that identifies an entity.
    response : str
        Name of the response, known for every entity.
    truth : DataFrame
        True coefficients: index ``variable``, columns ``site`` and ``coef``.
    intercept : float
        True intercept beta0, at x = 0.
    sigma2 : float
        Variance of the errors.
    covariance : DataFrame
        Covariance of the covariates in the population, p x p.
    complete : DataFrame
        Key, response and all p covariates of all n entities, before records were withheld.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_sme(500)
    >>> data.response, data.key, len(data.frames), len(data.complete)
    ('NPGR', 'enterprise_id', 6, 500)
    """

    frames: dict[str, pd.DataFrame]
    key: str
    response: str
    truth: pd.DataFrame
    intercept: float
    sigma2: float
    covariance: pd.DataFrame
    complete: pd.DataFrame


def numbered_entities(
    X: Floats, variables: pd.Index[str], y: Floats, key: str, response: str
) -> pd.DataFrame:
    """Table of all entities: their numbers from 1 as the key, the response y (n,), and X (n, p)."""
    complete = pd.DataFrame(X, columns=list(variables))
    complete.insert(0, response, y)
    complete.insert(0, key, np.arange(1, y.size + 1))
    return complete


def assemble(
    population: Population, X: Floats, y: Floats, seen: Bools, key: str, response: str, holder: str
) -> SimulatedData:
    """Lay out what was drawn, X (n, p), y (n,) and seen (n, K), as tables of sites."""
    variables = pd.Index(population.variables, name="variable")
    names = np.asarray(population.variables, dtype=object)
    complete = numbered_entities(X, variables, y, key, response)
    frames = {holder: complete[[key, response]].copy()}
    for k, site in enumerate(population.sites):
        block = complete.loc[seen[:, k], [key, *names[population.owner == k]]].reset_index(drop=True)
        frames[site] = frames[site].merge(block, on=key) if site == holder else block
    return SimulatedData(
        frames=frames,
        key=key,
        response=response,
        truth=pd.DataFrame(
            {"client": np.asarray(population.sites)[population.owner], "coef": population.beta},
            index=variables,
        ),
        intercept=population.intercept,
        sigma2=population.sigma2(),
        covariance=pd.DataFrame(population.covariance(), index=variables, columns=list(variables)),
        complete=complete,
    )
