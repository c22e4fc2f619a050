"""Noisy Newton steps: bounded sums over rows, their noise, and the choice of both from public numbers.

Every row x of the design, in public coordinates z = A'x, has the weight w = min(1, R^2 / |q|^2). For the
logit and the normal family q = z; for counts with mean mu, q = (mu / m)^1/2 z with a public typical mean m. A
row moves the score sum_i w_i q_i psi_i by at most R max|psi|, and the information sum_i w_i kappa_i q_i q_i'
by at most R^2 max(kappa) (Frobenius norm):

==========  ==========================================  ===================================  =========
family      psi                                         kappa                                max|psi|
==========  ==========================================  ===================================  =========
Binomial    y - mu                                      mu (1 - mu), at most 1/4             1
Gaussian    psi_c((y - eta) / s), Huber's with c = 2    1 where it is not cut, else 0        c
Poisson     psi_c((y - mu) / mu^1/2) less its mean      E psi_c(r) r, at most 1              c + 0.12
==========  ==========================================  ===================================  =========

Weights depend on x alone, so that the estimating equations hold if the model does (Mallows). The first
request sums the rows z, which centers the columns, the second one their products, which give coordinates A in
which columns are about uncorrelated with variance one, and the third one is least squares of a bounded
function of y. The products of each step improve the coordinates of the next one. With the noise of the last
step, of variance sigma^2 by coordinate, the covariance is

    V = I^-1 (J + sigma^2 1 + E) I^-1,        J <= I,

where I is the noisy information, and E = (sigma_I^2 / 2) (|d|^2 1 + d d') the part of its own noise in a last
step of length d. This is noisy Newton of Avella-Medina, Bradshaw and Loh (2023); weights fall with the square
of |q|, since otherwise a long row would have an unbounded part of the information.

References
----------
Avella-Medina, M., Bradshaw, C. and Loh, P.-L. (2023). Differentially private inference via noisy
optimization. Annals of Statistics 51, 2067-2092. arXiv 2103.11003.
Cantoni, E. and Ronchetti, E. (2001). Robust inference for generalized linear models. Journal of the American
Statistical Association 96, 1022-1030.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Literal, TypeAlias

import numpy as np
from scipy.special import chdtri, expit, gammaln, ndtr, pdtr, xlogy

from fedstat.privacy.sensitivity import clip_rows
from fedstat.typing import Bools, Floats, Ints

FamilyName: TypeAlias = Literal["Binomial", "Gaussian", "Poisson"]
Stage: TypeAlias = Literal["means", "products", "start", "step"]
RELEASES: Mapping[str, tuple[str, ...]] = {
    "means": ("score",),
    "products": ("information",),
    "start": ("score",),
    "step": ("score", "information"),
}
"""Sums of each stage."""
CUT = 2.0
"""Huber's c: residuals of rows are cut there, in their standard deviations."""
LARGEST_PREDICTOR = 30.0
MOST_PLACES, MASKED_BITS, CLIPPED_BITS = 26, 45, 59
"""Most binary digits after the point; bits of a masked sum, and of a row's squared length."""
KEPT_SQUARE = (
    CUT**2 * 2.0 * ndtr(-CUT)
    + (2.0 * ndtr(CUT) - 1.0)
    - 2.0 * CUT * math.exp(-(CUT**2) / 2.0) / math.sqrt(2.0 * math.pi)
)
"""E psi_c(r)^2 of a normal r, and P(|r| <= c)."""
KEPT_SHARE = 2.0 * ndtr(CUT) - 1.0
SPREAD_SHARE = 0.3
"""Length of the coordinate that estimates the spread of residuals, as a share of that of the score."""


@dataclass(frozen=True, slots=True)
class NoisyFamily:
    """Bounds of |psi| and kappa; kappa of a usual row, and a unit of the start in units of coefficients."""

    link: str
    psi: float
    kappa: float
    usual: float
    start: float


FAMILIES: Mapping[str, NoisyFamily] = {
    "Binomial": NoisyFamily("Logit", 1.0, 0.25, 0.2, 2.0),
    "Gaussian": NoisyFamily("Identity", CUT, 1.0, KEPT_SHARE, 3.0),
    # Scarf's bound: the mean of a cut variable of mean 0 and variance 1 is at most ((1 + c^2)^1/2 - c) / 2.
    "Poisson": NoisyFamily("Log", CUT + (math.sqrt(1.0 + CUT**2) - CUT) / 2.0, 1.0, 0.9, 1.5),
}


def huber_moments(mu: Floats) -> tuple[Floats, Floats]:
    """Return E psi_c(r) and E psi_c(r) r of r = (y - mu) / mu^1/2, y Poisson: (n,) each."""
    root = np.sqrt(mu)
    below, above = np.ceil(mu - CUT * root) - 1.0, np.floor(mu + CUT * root)

    def at(k: Floats) -> tuple[Floats, Floats, Floats]:
        """F(k), and sums of (j - mu) p_j and (j - mu)^2 p_j up to k."""
        inside = np.maximum(k, 0.0)
        mass = np.where(k < 0.0, 0.0, np.exp(xlogy(inside, mu) - mu - gammaln(inside + 1.0)))
        before = np.where(k < 1.0, 0.0, mass * inside / mu)
        upto = np.where(k < 0.0, 0.0, pdtr(inside, mu))
        return upto, -mu * mass, mu * (upto - mass - mu * before + mu * mass)

    (F1, S1, Q1), (F2, S2, Q2) = at(below), at(above)
    mean = (S2 - S1) / root + CUT * (1.0 - F2 - F1)
    slope = (Q2 - Q1) / mu - CUT / root * (S1 + S2)
    return mean, slope


@dataclass(frozen=True, slots=True, eq=False)
class NoisyPoint:
    """A point of the iteration, in public numbers.

    `transform` (p, p) is A, `beta` (p,) the coefficients of z, `scale` is s of the normal family and m of
    counts. In the stages "means" and "products" rows are summed, in "start" they are multiplied with the
    response less `center` over `half`, cut to -1 and 1.
    """

    family: FamilyName
    stage: Stage
    transform: Floats
    beta: Floats
    scale: float
    squared_radius: float
    center: float
    half: float

    @property
    def extra(self) -> bool:
        """Whether the score has one more coordinate, for the spread of residuals."""
        return self.family == "Gaussian" and self.stage in ("start", "step")

    @property
    def largest(self) -> tuple[float, float, float]:
        """Largest psi, kappa, and coordinate of the spread."""
        if self.stage == "step":
            return FAMILIES[self.family].psi, FAMILIES[self.family].kappa, CUT**2 - KEPT_SQUARE
        return 1.0, 1.0, 1.0

    @property
    def score_radius(self) -> Fraction:
        """Square of the largest length of a row of the score."""
        psi, _, spread = self.largest
        more = (self.spread_unit * spread) ** 2 if self.extra else 0.0
        return Fraction(self.squared_radius * psi**2 + more)

    @property
    def spread_unit(self) -> float:
        """Factor of the coordinate of the spread."""
        psi, _, spread = self.largest
        return SPREAD_SHARE * math.sqrt(self.squared_radius) * psi / spread

    @property
    def information_radius(self) -> Fraction:
        """Square of the largest length of a row of the information."""
        return Fraction((self.squared_radius * self.largest[1]) ** 2)

    def rows(self, X: Floats, y: Floats) -> tuple[Floats, Floats]:
        """Return parts of rows: of the score, (n, p or p + 1), and the information, (n, p (p + 1) / 2)."""
        Z = X @ self.transform
        psi, kappa, q = PARTS[self.family if self.stage == "step" else self.stage](self, Z, y)
        squares = np.einsum("ij,ij->i", q, q)
        w = np.minimum(1.0, self.squared_radius / np.maximum(squares, 1e-300))
        score = (w * psi)[:, None] * q
        if self.extra:
            spread = psi**2 - (KEPT_SQUARE if self.stage == "step" else 0.0)
            score = np.column_stack([score, self.spread_unit * w * spread])
        first, second = np.triu_indices(q.shape[1])
        factor = np.where(first == second, 1.0, math.sqrt(2.0))
        return score, (w * kappa)[:, None] * q[:, first] * q[:, second] * factor


Parts: TypeAlias = tuple[Floats, Floats, Floats]


def _means(point: NoisyPoint, Z: Floats, y: Floats) -> Parts:
    return np.ones(len(Z)), np.ones(len(Z)), Z


def _start(point: NoisyPoint, Z: Floats, y: Floats) -> Parts:
    t = np.log(y + 0.5) if point.family == "Poisson" else y
    return np.clip((t - point.center) / point.half, -1.0, 1.0), np.ones(len(Z)), Z


def _binomial(point: NoisyPoint, Z: Floats, y: Floats) -> Parts:
    mu = expit(Z @ point.beta)
    return y - mu, mu * (1.0 - mu), Z


def _gaussian(point: NoisyPoint, Z: Floats, y: Floats) -> Parts:
    r = (y - Z @ point.beta) / point.scale
    return np.clip(r, -CUT, CUT), (np.abs(r) <= CUT).astype(np.float64), Z


def _poisson(point: NoisyPoint, Z: Floats, y: Floats) -> Parts:
    mu = np.exp(np.clip(Z @ point.beta, -LARGEST_PREDICTOR, LARGEST_PREDICTOR))
    mean, slope = huber_moments(mu)
    psi = np.clip((y - mu) / np.sqrt(mu), -CUT, CUT) - mean
    return psi, slope, np.sqrt(mu / point.scale)[:, None] * Z


PARTS: Mapping[str, Callable[[NoisyPoint, Floats, Floats], Parts]] = {
    "means": _means,
    "products": _means,
    "start": _start,
    "Binomial": _binomial,
    "Gaussian": _gaussian,
    "Poisson": _poisson,
}


def bounded_sums(point: NoisyPoint, X: Floats, y: Floats, places: int) -> tuple[Ints, Ints]:
    """Sum score and information over rows, in units of 2^-places.

    A row with a number that is not finite counts as none.
    """
    with np.errstate(all="ignore"):
        parts = point.rows(X, y)
    whole: Bools = np.asarray(np.isfinite(np.hstack(parts)).all(axis=1))
    radii = point.score_radius, point.information_radius
    score, information = (
        clip_rows(np.where(whole[:, None], part, 0.0), radius, places, nearest=True).sum(axis=0)
        for part, radius in zip(parts, radii, strict=True)
    )
    return score, information


def binary_places(point: NoisyPoint, n: int, sites: int) -> int:
    """Return the binary digits of sums over n rows, which masks of this number of sites carry exactly."""
    largest = max(float(point.score_radius), float(point.information_radius), 1.0)
    of_sums = MASKED_BITS - math.log2(sites * max(n, 2) * math.sqrt(largest))
    return max(0, math.floor(min(MOST_PLACES, of_sums, (CLIPPED_BITS - math.log2(largest)) / 2.0)))


def whole_radius(squared: Fraction, places: int) -> int:
    """Return a squared length in the units of :func:`bounded_sums`, as rows are cut to it."""
    return math.floor(squared * Fraction(4**places))


def unpack_information(packed: Floats, p: int) -> Floats:
    """Return the symmetric matrix of a packed upper triangle: (p, p)."""
    first, second = np.triu_indices(p)
    out = np.zeros((p, p))
    out[first, second] = packed / np.where(first == second, 1.0, math.sqrt(2.0))
    return out + np.triu(out, 1).T


def shrink_information(information: Floats, deviation: float) -> tuple[Floats, float]:
    """Shrink a noisy matrix (p, p) towards a multiple of the identity, by James and Stein: and how far.

    In the coordinates of the earlier steps it is about such a multiple, and noise spreads its eigenvalues.
    """
    p = len(information)
    middle = np.trace(information) / p * np.eye(p)
    apart = information - middle
    expected = deviation**2 * (p * (p + 1) / 2.0 - 1.0)
    kept = max(0.0, 1.0 - expected / max(float((apart**2).sum()), 1e-300))
    return np.asarray(middle + kept * apart), kept


# ----------------------------------------------------------------------------------------------------
# Number of steps, their budgets, and R, from public numbers: rows, columns, family, sites.

STEPS, PRODUCTS, STARTS, LASTS, SCORES, RADII = (
    (2, 3, 4, 5),
    (0.05, 0.1, 0.2),
    (0.02, 0.05, 0.1),
    (0.35, 0.5, 0.65, 0.8),
    (0.5, 0.65, 0.8, 0.92),
    (1.0, 1.5, 2.0, 3.0, 4.0),
)
EXACT_STEPS = 11
FIRST_ERROR, CURVATURE, CONTRACTION = 0.25, 0.35, 0.1
"""Error of the first step without noise, by coordinate of variance one, and what a step leaves of it.

Steps contract only linearly, since the weights of the next one are others.
"""
MEANS = 0.03
"""Share of the budget for the means of the columns."""
SMALLEST = 0.25
"""Smallest eigenvalue of the products of the first step that is expected, for columns that are centered."""
CLEAR, FLOOR = 0.4, 2.0
"""Noise of an eigenvalue over an expected one that a plan may have; deviations below which none counts."""


@dataclass(frozen=True, slots=True)
class NoisyPlan:
    """Budgets of the steps, R^2, and the expected price.

    `rhos` has the budgets of score and information by step. `price` is the ratio of standard errors with and
    without noise, of columns of a normal distribution; infinite where the noise leaves no estimate.
    """

    squared_radius: float
    rhos: tuple[tuple[Fraction, Fraction], ...]
    price: float


@cache
def plan_steps(family: FamilyName, p: int, n: int, rho: Fraction, noise: Fraction) -> NoisyPlan:
    """Choose steps, budgets and R for the least expected error.

    `noise` is the variance of all shares of noise over that which is charged.
    """
    best = NoisyPlan(2.0 * p, (), math.inf)
    for choice in product((*STEPS, EXACT_STEPS), PRODUCTS, STARTS, LASTS, SCORES, RADII):
        steps, products, start, last, score, radius = choice
        middle = (1.0 - MEANS - products - start - last) / (steps - 1)
        if middle <= 0.0:
            continue
        shares = [(MEANS, 0.0), (0.0, products), (start, 0.0)]
        shares += [(one * score, one * (1.0 - score)) for one in (*[middle] * (steps - 1), last)]
        price = _price(
            family, p, n, [(a * float(rho), b * float(rho)) for a, b in shares], radius * p, float(noise)
        )
        if price < best.price:
            parts = [
                (Fraction(a).limit_denominator(10**6), Fraction(b).limit_denominator(10**6))
                for a, b in shares
            ]
            total = sum((a + b for a, b in parts), Fraction(0)) / rho
            best = NoisyPlan(radius * p, tuple((a / total, b / total) for a, b in parts), price)
    return best


def _price(
    family: FamilyName, p: int, n: int, rhos: list[tuple[float, float]], squared_radius: float, noise: float
) -> float:
    """Predict the ratio of errors with and without noise, by the recursion of the errors of all steps."""
    own = FAMILIES[family]
    squares = 1.0 + _chi_squares(p - 1)
    w = np.minimum(1.0, squared_radius / squares)
    rows = n * float((w * squares).mean() / squares.mean())
    known, R = rows * own.usual, math.sqrt(squared_radius)

    def noise_of(radius: float, rho: float) -> float:
        return radius * math.sqrt(noise / (2.0 * rho))

    # No eigenvalue of the products and of the information may be lost in noise.
    of_products = noise_of(squared_radius, rhos[1][1])
    informations = [noise_of(squared_radius * own.kappa, rho) for _, rho in rhos[3:]]
    worst = max(of_products / rows, *(one / known for one in informations))
    if FLOOR * math.sqrt(p) * worst >= CLEAR:
        return math.inf
    of_start = own.start * noise_of(R, rhos[2][0]) / rows
    error = math.sqrt(of_start**2 + (of_products / (SMALLEST * rows)) ** 2 / 2.0 + FIRST_ERROR**2)
    variance = 0.0
    for (rho, _), of_information in zip(rhos[3:], informations, strict=True):
        squared = (noise_of(R * own.psi, rho) / known) ** 2
        squared += (of_information / known) ** 2 / 2.0 * (p + 1) * error**2
        squared += CURVATURE**2 * p * error**4 + (CONTRACTION * error) ** 2
        variance, error = 1.0 / known + squared, math.sqrt(squared)
    return math.sqrt(variance * own.usual * n)


@cache
def _chi_squares(df: int) -> Floats:
    """Return quantiles of a chi-squared variable, (200,); zeros without degrees of freedom."""
    return np.zeros(200) if df < 1 else np.asarray(chdtri(df, 1.0 - (np.arange(200) + 0.5) / 200))


def enough_rows(family: FamilyName, p: int, n: int, rho: Fraction, noise: Fraction) -> int:
    """Return the least number of rows, to two digits, for which a plan has an estimate."""
    low, high = n, 2 * n
    while not math.isfinite(plan_steps(family, p, high, rho, noise).price):
        low, high = high, 2 * high
    while high - low > max(low // 50, 1):
        middle = (low + high) // 2
        low, high = (
            (low, middle)
            if math.isfinite(plan_steps(family, p, middle, rho, noise).price)
            else (middle, high)
        )
    unit = int(10 ** max(len(str(high)) - 2, 0))
    return -(-high // unit) * unit


# ----------------------------------------------------------------------------------------------------
# The iteration, from noisy sums.

STAGES: tuple[Stage, ...] = ("means", "products", "start", "step")
LONGEST_STEP, WIDEST, LEAST_SHARE = 3.0, 0.7, 0.005
MOST_MOVED = 4.0
"""Square of the last step over p^1/2 standard errors, beyond which what it leaves is not small.

In simulations intervals of level .95 covered the truth in .93 to .98 of the cases below it, and in .4 to .95
above.
"""


@dataclass(slots=True, eq=False)
class NoisyIteration:
    """Coefficients from noisy sums, step by step."""

    family: FamilyName
    plan: NoisyPlan
    center: float
    half: float
    transform: Floats
    beta: Floats
    scale: float = 1.0
    step: int = 0
    moments: tuple[Floats, Floats] | None = None
    information: Floats | None = None
    moved: Floats | None = None
    rows: float = 0.0

    @classmethod
    def begin(
        cls, family: FamilyName, plan: NoisyPlan, base: Floats, response: tuple[float, float]
    ) -> NoisyIteration:
        """Begin at zero, with the public range of the response."""
        low, high = np.log(np.maximum(response, 0.0) + 0.5) if family == "Poisson" else response
        middle, half = 0.5 * (low + high), 0.5 * (high - low)
        return cls(family, plan, float(middle), float(half), base, np.zeros(len(base)))

    @property
    def point(self) -> NoisyPoint:
        """The point at which the next sums are needed."""
        return NoisyPoint(
            self.family,
            STAGES[min(self.step, 3)],
            self.transform,
            self.beta,
            self.scale,
            self.plan.squared_radius,
            self.center,
            self.half,
        )

    def take(self, score: Floats, information: Floats, deviation: float) -> None:
        """Take a step by noisy sums; `deviation` is that of the noise on the information."""
        stage, p = self.point.stage, len(self.beta)
        if stage == "means":
            self._center(score)
        elif stage == "start":
            self._start(score)
        else:
            matrix, kept = shrink_information(unpack_information(information, p), deviation)
            values, vectors = np.linalg.eigh(matrix)
            least = FLOOR * deviation * max(math.sqrt(p) * kept, 1.0)
            (self._whiten if stage == "products" else self._newton)(score, np.maximum(values, least), vectors)
        self.step += 1

    @property
    def ones(self) -> Floats:
        """Coefficients of the intercept, which is a column of ones, in the present coordinates: (p,)."""
        return np.linalg.solve(self.transform, np.eye(len(self.beta))[0])

    def _center(self, score: Floats) -> None:
        ones = self.ones
        unit = ones / float(ones @ ones)
        self.rows = max(float(score @ unit), 1.0)  # ones'z = 1 in every row
        mean = score / self.rows
        # z less its mean, apart from the intercept.
        self.transform = self.transform @ (np.eye(len(ones)) - np.outer(ones, mean - unit))

    def _whiten(self, score: Floats, values: Floats, vectors: Floats) -> None:
        G, ones = (vectors * values) @ vectors.T, self.ones
        self.rows = max(float(ones @ G @ ones), 1.0)
        # Of the design's columns: x = T^-1 z.
        back = np.linalg.inv(self.transform)
        products = back.T @ G @ back / self.rows
        self.moments = products[0], np.sqrt(np.maximum(np.diag(products) - products[0] ** 2, 0.0))
        self._turn(vectors * np.sqrt(self.rows / values))

    def _start(self, score: Floats) -> None:
        p, ones = len(self.beta), self.ones
        beta = score[:p] / self.rows  # products are about rows times the identity
        if self.family == "Binomial":
            # The fitted line is a + z'r with z'r of mean zero: the logit of a, and r over the variance there.
            a = float(ones @ beta) / float(ones @ ones)
            share = float(np.clip(self.center + self.half * a, LEAST_SHARE, 1.0 - LEAST_SHARE))
            slopes = self.half * (beta - a * ones) / (share * (1.0 - share))
            slopes *= min(1.0, LONGEST_STEP / max(float(np.linalg.norm(slopes)), 1e-300))
            self.beta = math.log(share / (1.0 - share)) * ones + slopes
            return
        if self.family == "Gaussian":
            spread = (float(score[p]) / self.point.spread_unit - float(beta @ score[:p])) / self.rows
            self.scale = self.half * math.sqrt(max(spread, 1e-4))
        self.beta = self.half * beta + self.center * ones
        if self.family == "Poisson":
            mean = float(ones @ self.beta) / float(ones @ ones)
            spread = min(max(float(self.beta @ self.beta) - mean**2, 0.0), 2.0)
            self.scale = math.exp(float(np.clip(mean + 0.5 * spread, -20.0, 20.0)))

    def _turn(self, turn: Floats) -> None:
        """Change coordinates."""
        self.transform = self.transform @ turn
        self.beta = np.asarray(np.linalg.solve(turn, self.beta), dtype=np.float64)

    def _newton(self, score: Floats, values: Floats, vectors: Floats) -> None:
        p = len(self.beta)
        self.information = (vectors * values) @ vectors.T
        move = vectors @ ((vectors.T @ score[:p]) / values)
        self.moved = move * self.unit * min(1.0, LONGEST_STEP / max(float(np.linalg.norm(move)), 1e-300))
        self.beta = self.beta + self.moved
        if self.family == "Gaussian":
            # E d psi^2 / d log s = -2 E r^2 where it is not cut.
            slope = 2.0 * (KEPT_SQUARE - CUT**2 * (1.0 - KEPT_SHARE)) * self.rows
            change = float(score[p]) / self.point.spread_unit / slope
            self.scale *= math.exp(min(max(change, -WIDEST), WIDEST))
        if self.step + 1 < len(self.plan.rhos):
            self._turn(vectors * np.sqrt(values.mean() / values))

    @property
    def unit(self) -> float:
        """Unit of the coefficients in which score and information are."""
        return {"Binomial": 1.0, "Gaussian": self.scale, "Poisson": 1.0 / math.sqrt(self.scale)}[self.family]

    @property
    def converged(self) -> bool:
        """Whether the last step is short in standard errors."""
        assert self.information is not None and self.moved is not None
        error = math.sqrt(float(np.mean(np.diag(np.linalg.inv(self.information)))) * len(self.beta))
        return bool(float(self.moved @ self.moved) / self.unit**2 < MOST_MOVED * error)

    def covariances(
        self, score_deviation: float, information_deviation: float
    ) -> tuple[Floats, Floats, Floats]:
        """Return coefficients of the design (p,), and the covariances of sampling and noise, (p, p).

        The deviations are those of the noise in the last step.
        """
        assert self.information is not None and self.moved is not None
        p, unit = len(self.beta), self.unit**2
        factor = KEPT_SQUARE / KEPT_SHARE if self.family == "Gaussian" else 1.0
        inverse = np.linalg.inv(self.information)
        d = self.moved / math.sqrt(unit)
        own = score_deviation**2 * np.eye(p) + information_deviation**2 / 2.0 * (
            d @ d * np.eye(p) + np.outer(d, d)
        )
        sampling, noise = unit * factor * inverse, unit * inverse @ own @ inverse
        A = self.transform
        return A @ self.beta, A @ sampling @ A.T, A @ noise @ A.T
