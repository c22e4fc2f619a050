"""Rows of one site, and the sums over rows from which a generalized linear model is fitted."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import config
from scipy.special import xlog1py, xlogy

from fedstat.kernels.glm.distributions import LOG, LOGIT, DistributionSpec, Family
from fedstat.kernels.row_products import row_dots, weighted_sums
from fedstat.typing import Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Rows of one site as input of the kernels of generalized linear models, and the domain of a distribution.

PIECE = 32768
"""Number of rows in a piece of work for one thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of one site.

    X (m, p) is C-contiguous, its intercept a column of ones; y (m,) is a proportion if there are trials. The
    others are (m,) or None: the known part of the linear predictor, frequency weights, variance weights,
    binomial trials.
    """

    X: Floats
    y: Floats
    offset: Floats | None = None
    freq: Floats | None = None
    var: Floats | None = None
    trials: Floats | None = None

    def __len__(self) -> int:
        return len(self.y)

    def part(self, rows: slice | Ints) -> Rows:
        """Return some of the rows; a slice of them without a copy."""
        columns = (self.offset, self.freq, self.var, self.trials)
        return Rows(self.X[rows], self.y[rows], *(None if a is None else a[rows] for a in columns))

    def pieces(self) -> list[Rows]:
        """Return the rows in pieces of at most PIECE; at least one."""
        return [self.part(slice(start, start + PIECE)) for start in range(0, max(len(self), 1), PIECE)]

    @property
    def count(self) -> float:
        """Sum of the frequency weights."""
        return float(len(self) if self.freq is None else self.freq.sum())

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(len(self) if self.weight is None else self.weight.sum())

    @property
    def weight(self) -> Floats | None:
        """Product of all weights: (m,); None if there are none."""
        weight = None
        for factor in (self.freq, self.var, self.trials):
            if factor is not None:
                weight = factor if weight is None else weight * factor
        return weight


def linear_predictor(rows: Rows, beta: Floats) -> Floats:
    """Return ``X beta`` and the offset: (m,)."""
    eta = row_dots(rows.X, beta)
    return eta if rows.offset is None else eta + rows.offset


def canonical_weights(link: int, y: Floats, eta: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return residual, variance, half the unit deviance and the squared Pearson residual of rows, each (n,).

    `link` is LOGIT, LOG or IDENTITY; y and the linear predictor eta are (n,).
    """
    if link == LOGIT:
        # From exp(-|eta|) alone, which cannot overflow; 1 - mu keeps its digits where mu is near one.
        e = np.exp(-np.abs(eta))
        d = 1.0 / (1.0 + e)
        r, V = y - np.where(eta >= 0.0, d, e * d), e * d * d
        half = np.maximum(eta, 0.0) - y * eta + np.log1p(e) + xlogy(y, y) + xlog1py(1.0 - y, -y)
        # At least the machine's epsilon, at which statsmodels clips a probability.
        return r, V, half, r * r / np.maximum(V, 2.0**-52)
    if link == LOG:
        mu = np.maximum(np.exp(eta), 1e-300)
        r = y - mu
        return r, mu, xlogy(y, y / mu) - r, r * r / mu
    r = y - eta
    square = r * r
    return r, np.ones_like(r), 0.5 * square, square


def in_domain(eta: Floats, mu: Floats, distribution: DistributionSpec) -> Bools:
    """Return for which rows distribution and link allow linear predictor and mean: (m,), (m,) -> (m,)."""
    fine = np.isfinite(mu)
    # The inverse of such a power also has a value at negative eta, whose link is not eta (sqrt: eta^2).
    if distribution.link_power not in (None, 1.0, -1.0):
        fine &= eta > 0.0
    if distribution.name == "Binomial":
        closed = distribution.link_entry.closed
        return fine & ((mu >= 0.0) & (mu <= 1.0) if closed else (mu > 0.0) & (mu < 1.0))
    return fine if distribution.variance_power == 0.0 else fine & (mu > 0.0)


def check_response(rows: Rows, distribution: DistributionSpec) -> str:
    """Return the problem of the response: a phrase with the number of rows, or ''."""
    right = distribution.support.holds(np.asarray(rows.y))
    count = len(right) - int(right.sum())
    where = distribution.support.otherwise
    return f"{count} row{'s' if count > 1 else ''} with a response {where}" if count else ""


# ----------------------------------------------------------------------------------------------------
# Sums over rows for the fit and the evaluation of a generalized linear model.
#
# Score and information are those for a dispersion of one. Definitions are those of statsmodels' ``GLM``
# (McCullagh and Nelder 1989, 2.5), whose family objects supply link and variance; the common canonical pairs
# have formulas of their own. Rows are processed in pieces of a fixed size and summed in their order, so the
# sums do not depend on the number of threads, to the last bit.


@dataclass(slots=True)
class Sums:
    """Sums over n rows; the sum of two is that of all their rows.

    `weight` sums the frequency weights. `score` (p,) is the derivative of the log-likelihood, at the starting
    point ``X'Wz``, so that solving with the information gives the first estimate; `information` (p, p) is the
    expected one; both, and `observed` (p, p), are for dispersion one. `deviance` is infinite if a mean is
    outside the family's domain, with score and information zero. `spread` (2, 2) holds sum and sum of
    squares of the working weights, and of the sizes of the scores by linear predictor: zeros if the scores
    have the spread of the weights, are bounded, or are linear in the coefficients.
    """

    n: int
    weight: float
    score: Floats
    information: Floats
    deviance: float
    pearson: float
    observed: Floats | None = None
    spread: Floats = field(default_factory=lambda: np.zeros((2, 2)))

    @property
    def loglik(self) -> float:
        """Log-likelihood for dispersion one, less that of the saturated model."""
        return -self.deviance / 2.0

    @property
    def finite(self) -> bool:
        """Whether all means are inside the family's domain."""
        return bool(np.isfinite(self.deviance))

    def __add__(self, other: Sums) -> Sums:
        total: dict[str, Any] = {}
        for part in fields(self):
            a, b = getattr(self, part.name), getattr(other, part.name)
            total[part.name] = None if a is None or b is None else a + b
        return Sums(**total)


class NullSums(NamedTuple):
    """Sums of the model with an intercept and the offset only; log_likelihood is NaN unless requested."""

    score: float
    information: float
    deviance: float
    log_likelihood: float


def evaluate(
    chunks: Iterable[Rows],
    beta: Floats | None,
    distribution: DistributionSpec,
    *,
    observed: bool = False,
    center: float | None = None,
) -> Sums:
    """Return score, information and fit at beta (p,), summed over rows; None: statsmodels' first IRLS step.

    There must be a chunk (ValueError), which may have no rows; each is used once. `observed` requests this
    information. `center` is the mean response towards which the starting point is drawn; None: each chunk's.
    """
    total: Sums | None = None
    threads: int = config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    # Threads are enough, because loops release the interpreter; their sums come back in the order of the
    # pieces.
    for chunk in chunks:
        middle = float(np.mean(chunk.y)) if center is None and len(chunk) else center or 0.0
        step = partial(
            _evaluate_piece, beta=beta, distribution=distribution, observed=observed, center=middle
        )
        pieces = chunk.pieces()
        with ThreadPoolExecutor(threads) if len(pieces) > 1 else nullcontext() as pool:
            for sums in map(step, pieces) if pool is None else pool.map(step, pieces):
                total = sums if total is None else total + sums
    if total is None:
        raise ValueError("there is no chunk of rows")
    return total


def _evaluate_piece(
    rows: Rows, beta: Floats | None, distribution: DistributionSpec, observed: bool, center: float
) -> Sums:
    loop = distribution.loop
    with np.errstate(all="ignore"):
        if beta is None:
            sums = _start(rows, distribution, center)
        elif loop is None:
            sums = _general(rows, beta, distribution, observed)
        else:
            sums = _canonical(rows, beta, loop, observed)
    finite = np.isfinite(sums.deviance) and np.isfinite(sums.score).all()
    return sums if finite and np.isfinite(sums.information).all() else _outside(rows, observed)


def _canonical(rows: Rows, beta: Floats, loop: int, observed: bool) -> Sums:
    r, V, half, square = canonical_weights(loop, rows.y, linear_predictor(rows, beta))
    a = 1.0 if rows.weight is None else rows.weight
    w = a * V
    score, information = weighted_sums(rows.X, a * r, w)
    deviance, pearson = 2.0 * float(np.sum(a * half)), float(np.sum(a * square))
    weights = np.array([w.sum(), np.einsum("i,i", w, w)])
    # For a canonical link, observed and expected information are the same.
    again = information.copy() if observed else None
    spread = np.array([weights, np.zeros(2)])
    return Sums(len(rows), rows.count, score, information, deviance, pearson, observed=again, spread=spread)


def _outside(rows: Rows, observed: bool) -> Sums:
    """Return sums that make the caller take a shorter step."""
    p = rows.X.shape[1]
    zeros = np.zeros((p, p))
    sums = Sums(len(rows), rows.count, np.zeros(p), zeros, np.inf, np.inf)
    return replace(sums, observed=zeros if observed else None)


@dataclass(frozen=True, slots=True)
class RowMeans:
    """Rows at one linear predictor: the family, and (m,) arrays."""

    family: Family
    eta: Floats
    mu: Floats
    slope: Floats
    V: Floats
    weight: Floats
    inside: Bools

    @property
    def expected(self) -> Floats:
        """Weights of the expected information, without those of the rows."""
        return 1.0 / (self.slope**2 * self.V)

    def residual(self, y: Floats) -> Floats:
        """Scores by linear predictor, without the weights of the rows."""
        return (y - self.mu) / self.slope / self.V

    def curvature(self, y: Floats) -> Floats:
        """Weights of the observed information over those of the expected one."""
        # Minus the derivative of a score by its linear predictor is w (1 + r bend); its expectation is w.
        bend = self.V * self.family.link.deriv2(self.mu) + self.family.variance.deriv(self.mu) * self.slope
        return np.asarray(1.0 + self.residual(y) * bend)

    def squares(self, rows: Rows) -> Floats:
        """Squared scores by linear predictor, as those of as many rows as a frequency weight states."""
        freq = np.ones(len(rows)) if rows.freq is None else rows.freq
        # A row of weight f represents f rows, each with a score of 1/f of its own.
        return np.where(freq > 0.0, (self.weight * self.residual(rows.y)) ** 2 / freq, 0.0)

    def deviances(self, rows: Rows) -> Floats:
        """Parts of the rows in the deviance."""
        var = 1.0 if rows.var is None else rows.var
        freq = 1.0 if rows.freq is None else rows.freq
        return np.asarray(self.family.resid_dev(rows.y, self.mu, var) ** 2 * freq)

    def pearson(self, rows: Rows) -> Floats:
        """Squared Pearson residuals of the rows."""
        return np.asarray((rows.y - self.mu) ** 2 / self.V * self.weight)

    def fit(self, rows: Rows) -> tuple[float, float]:
        """Deviance and sum of squared Pearson residuals."""
        return float(self.deviances(rows).sum()), float(self.pearson(rows).sum())


def row_means(rows: Rows, distribution: DistributionSpec, eta: Floats, mu: Floats | None = None) -> RowMeans:
    """Return the rows at a linear predictor (m,), or at their means."""
    sm_family = distribution.make()
    if distribution.name == "Binomial" and rows.trials is not None:
        sm_family.n = rows.trials
    if mu is None:
        mu = np.asarray(sm_family.fitted(eta), dtype=float)
        mu = np.maximum(mu, distribution.link_entry.smallest)
    weight = np.ones(len(rows)) if rows.weight is None else rows.weight
    slope, V = sm_family.link.deriv(mu), sm_family.variance(mu)
    return RowMeans(sm_family, eta, mu, slope, V, weight, in_domain(eta, mu, distribution))


def _start(rows: Rows, distribution: DistributionSpec, center: float) -> Sums:
    # As statsmodels starts: half way between response and mean, which is inside the domain.
    if distribution.name == "Binomial":
        mu = (rows.y + 0.5) / 2.0
    elif distribution.variance_power == 0.0 or center > 0.0:
        mu = (rows.y + center) / 2.0
    else:
        mu = (rows.y + 0.1) / 2.0  # no events: any positive mean is suitable
    at = row_means(rows, distribution, np.asarray(distribution.make().link(mu), dtype=float), mu)
    z = at.eta + at.slope * (rows.y - mu) - (0.0 if rows.offset is None else rows.offset)
    w = at.weight * at.expected
    usable = np.isfinite(z) & np.isfinite(w)
    w, z = np.where(usable, w, 0.0), np.where(usable, z, 0.0)
    return Sums(len(rows), rows.count, *weighted_sums(rows.X, w * z, w), *at.fit(rows))


def _general(rows: Rows, beta: Floats, distribution: DistributionSpec, observed: bool) -> Sums:
    at = row_means(rows, distribution, linear_predictor(rows, beta))
    if not at.inside.all():
        return _outside(rows, observed)
    r, w = at.residual(rows.y), at.weight * at.expected
    score, information = weighted_sums(rows.X, at.weight * r, w)
    sums = Sums(len(rows), rows.count, score, information, *at.fit(rows))
    sums.spread = _spread(np.array([w, _sizes(at, r, distribution)]))
    if observed and distribution.canonical:
        sums.observed = information.copy()
    elif observed:
        sums.observed = weighted_sums(rows.X, r, w * at.curvature(rows.y))[1]
    return sums


def _sizes(at: RowMeans, r: Floats, distribution: DistributionSpec) -> Floats:
    """Return sizes of the scores by linear predictor: (m,); zero where these are bounded, or linear."""
    if distribution.name == "Binomial" or (
        distribution.variance_power == 0.0 and distribution.link == "Identity"
    ):
        return np.zeros_like(r)
    return np.asarray(np.abs(at.weight * r))


def _spread(sizes: Floats) -> Floats:
    """Return sums and sums of squares: (2, m) -> (2, 2)."""
    return np.column_stack([sizes.sum(axis=1), np.einsum("ij,ij->i", sizes, sizes)])


def row_weights(rows: Rows, beta: Floats, distribution: DistributionSpec) -> Floats:
    """Return the working weights and the sizes of the scores, as in :class:`Sums`, by row: (2, m)."""
    with np.errstate(all="ignore"):
        at = row_means(rows, distribution, linear_predictor(rows, beta))
        return np.array([at.weight * at.expected, _sizes(at, at.residual(rows.y), distribution)])


def mean_vectors(rows: Rows, beta: Floats, distribution: DistributionSpec) -> Floats:
    """Return means and working weights by row, times the rows' weights: (m, 2), (m, 1) where they agree.

    `beta` (p, R) are coefficients of R points, whose means and weights follow one another: (m, 2 R).
    """
    with np.errstate(all="ignore"):
        eta = rows.X @ beta if rows.offset is None else rows.X @ beta + rows.offset[:, None]
        if distribution.loop == LOGIT:
            mu = _logistic(eta)
            pairs = [mu, mu - mu * mu]
        elif distribution.loop == LOG:
            pairs = [np.exp(eta)]
        else:
            at = [row_means(rows, distribution, one) for one in eta.T]
            pairs = [np.array([one.mu for one in at]).T, np.array([one.expected for one in at]).T]
    vectors = np.stack(pairs, axis=2).reshape(len(rows), -1)
    return vectors if rows.weight is None else vectors * rows.weight[:, None]


def times_means(rows: Rows, beta: Floats, distribution: DistributionSpec, wide: Floats) -> Floats:
    """Return the design and :func:`mean_vectors`, side by side, times a matrix (p + k, q)."""
    p, R = beta.shape
    if rows.offset is not None or rows.weight is not None or distribution.loop not in (LOGIT, LOG):
        return np.asarray(rows.X @ wide[:p] + mean_vectors(rows, beta, distribution) @ wide[p:])
    # One pass over the design, which takes most of the time.
    both = rows.X @ np.column_stack([beta, wide[:p]])
    with np.errstate(all="ignore"):
        if distribution.loop == LOG:
            return np.asarray(both[:, R:] + np.exp(both[:, :R]) @ wide[p:])
        mu = _logistic(both[:, :R])
        # A weight is mu - mu^2.
        return np.asarray(both[:, R:] + mu @ (wide[p::2] + wide[p + 1 :: 2]) - (mu * mu) @ wide[p + 1 :: 2])


def _logistic(eta: Floats) -> Floats:
    mu = np.negative(eta)
    np.exp(mu, out=mu)
    mu += 1.0
    return np.divide(1.0, mu, out=mu)


def log_likelihood(
    chunks: Iterable[Rows], beta: Floats, distribution: DistributionSpec, scale: float
) -> float:
    """Return the log-likelihood for a dispersion `scale` as statsmodels' ``GLMResults.llf`` sums it.

    Minus infinity if a mean is outside the family's domain; NaN if statsmodels has no likelihood (Tweedie
    with var_power above 2).
    """
    total = 0.0
    with np.errstate(all="ignore"):
        for rows in (piece for chunk in chunks for piece in chunk.pieces()):
            at = row_means(rows, distribution, linear_predictor(rows, beta))
            if not at.inside.all():
                return -np.inf
            var = np.ones(len(rows)) if rows.var is None else rows.var
            freq = 1.0 if rows.freq is None else rows.freq
            total += float(at.family.loglike(rows.y, at.mu, var, freq, scale))
    return total


def null_sums(
    chunks: Iterable[Rows],
    intercept: float | None,
    distribution: DistributionSpec,
    scale: float | None = None,
) -> NullSums:
    """Return the sums of the model with an intercept and the offset only; the rows' design is not used.

    If `intercept` is None, use the starting point, see :func:`evaluate`; without a scale, the log-likelihood
    is left out.
    """
    constant = [replace(rows, X=np.ones((len(rows), 1))) for rows in chunks]
    beta = None if intercept is None else np.array([float(intercept)])
    sums = evaluate(constant, beta, distribution)
    llf = np.nan if scale is None or beta is None else log_likelihood(constant, beta, distribution, scale)
    return NullSums(float(sums.score[0]), float(sums.information[0, 0]), sums.deviance, llf)
