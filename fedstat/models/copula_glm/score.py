"""One Newton step on the score of the rows, with a mean that sites can compute jointly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil, log2
from typing import Annotated

import numpy as np
from scipy import stats
from scipy.special import expit

from fedstat.codec import Minimum
from fedstat.errors import MessageError
from fedstat.models.copula_glm.design import LARGEST, ExpectedScores, ScoredResponse
from fedstat.models.copula_glm.estimation import MomentFit
from fedstat.typing import Floats, Ints

# ----------------------------------------------------------------------------------------------------
# The mean of a response in a form that sites can share: a polynomial of the sum of their parts.
#
# Site k has a part of the linear predictor, z_k, minus its middle and cut to a public half width h_k. The
# mean is p(w), w = z_1 + ... + z_K: the line itself for the normal family, and a cubic for the logistic one.
# The remainder of the cubic is computed under the released distribution, which has no effect on the charges
# of entities.
#
# All numbers are integers: w in units of 2^-bits, residuals in units of 2^-(3 bits), so that the cube of w
# needs no rounding.

CUBE = 3
MOST_BITS, FEWEST_BITS = 9, 7
SCORE_PLACES = 10
"""Binary digits of the scores that are multiplied with residuals."""
SMALLEST_CUBE = 0.03
"""Smallest size of the cubic's last coefficient; a smaller one would leave its variable too few digits."""
OF_RANGE = 0.1
"""Weight of the whole range in the fit of the cubic, relative to the predictor's distribution."""
GRID = 400


def bits_for(n: int, largest: float) -> int:
    """Return binary digits of z for which sums over n residuals times scores up to `largest` fit 62 bits."""
    left = 62 - SCORE_PLACES - ceil(log2(max(n, 1))) - ceil(log2(largest))
    return min(left // CUBE, MOST_BITS)


@dataclass(frozen=True)
class SharedMean:
    """The polynomial ``constant + linear w + square w^2 + cube w^3`` in integers, and ranges of all parts.

    A part of the linear predictor is multiplied by `unit`, and cut to `halves`, in units of 2^-bits, by site.
    `constant` has 3 bits digits, `linear` and `square` bits; `cube` is -1, 0 or 1. `low` and `high` are the
    smallest and largest response, in units of 2^-(3 bits).
    """

    bits: Annotated[int, Minimum(FEWEST_BITS)]
    unit: float
    constant: int
    linear: int
    square: int
    cube: int
    halves: Mapping[str, int]
    low: int
    high: int

    def check(self) -> None:
        """Require ranges, and numbers that 64 bits hold."""
        fits = self.bits <= MOST_BITS and 0.0 < self.unit < np.inf and self.cube in (-1, 0, 1)
        fits = fits and self.low < self.high and bool(self.halves) and min(self.halves.values()) >= 0
        largest = max(map(abs, (self.constant, self.low, self.high)))
        widest = max(abs(self.linear), abs(self.square), sum(self.halves.values()))
        if not fits or largest >= 2**50 or widest >= 2 ** (self.bits + 8):
            raise MessageError("the mean of a response: expected a polynomial over ranges that 64 bits hold")

    @property
    def places(self) -> int:
        """Binary digits of residuals."""
        return CUBE * self.bits

    @property
    def degree(self) -> int:
        """3 for a cubic, 1 for a line."""
        return CUBE if self.cube or self.square else 1

    def part(self, site: str, predictor: Floats) -> Floats:
        """Cut a site's part of the linear predictor, minus its middle: (n,) in the unit."""
        half = self.halves[site] / 2.0**self.bits
        return np.clip(np.nan_to_num(self.unit * predictor), -half, half)

    def encode(self, part: Floats) -> tuple[Ints, Ints]:
        """Return a part in integers, and its linear term in digits of residuals, the finer of the two."""
        complete = np.rint(np.ldexp(part, self.bits)).astype(np.int64)
        return complete, np.rint(self.linear * np.ldexp(part, 2 * self.bits)).astype(np.int64)

    def at(self, w: Floats) -> Floats:
        """Return the polynomial at real numbers, in the unit."""
        b = self.bits
        line = np.ldexp(float(self.constant), -self.places) + np.ldexp(float(self.linear), -b) * w
        return np.asarray(line + np.ldexp(float(self.square), -b) * w**2 + self.cube * w**3)

    def slope(self, w: Floats) -> Floats:
        """Return its derivative."""
        b = self.bits
        return np.asarray(
            np.ldexp(float(self.linear), -b) + np.ldexp(float(self.square), 1 - b) * w + 3 * self.cube * w**2
        )

    @cached_property
    def reach(self) -> float:
        """Return the largest absolute w."""
        return float(sum(self.halves.values())) / 2.0**self.bits

    @cached_property
    def range(self) -> tuple[float, float]:
        """Smallest and largest possible mean over all w, including the rounding of parts."""
        ends = [-self.reach, self.reach]
        if self.degree == CUBE:
            turns = np.roots(
                [3.0 * self.cube, 2.0 * self.square / 2.0**self.bits, self.linear / 2.0**self.bits]
            )
            ends += [float(t.real) for t in turns if abs(t.imag) < 1e-9 and abs(t.real) < self.reach]
        at = self.at(np.array(ends))
        return float(at.min()) - self.slack, float(at.max()) + self.slack

    @property
    def slack(self) -> float:
        """Largest difference of the linear term from the others, since it is rounded later."""
        each = abs(self.linear) * 2.0 ** (self.bits - 1) + 1.0
        return float(np.ldexp(each * (len(self.halves) + 1), -self.places)) + 2.0**-30

    @property
    def steepest(self) -> float:
        """Return the largest absolute slope over the range."""
        turn = [] if not self.cube else [-self.square / 2.0**self.bits / (3.0 * self.cube)]
        at = np.clip(np.array([-self.reach, self.reach, *turn]), -self.reach, self.reach)
        return float(np.abs(self.slope(at)).max())

    @property
    def responses(self) -> tuple[float, float]:
        """Smallest and largest response."""
        return float(np.ldexp(float(self.low), -self.places)), float(np.ldexp(float(self.high), -self.places))


@dataclass(frozen=True, slots=True)
class ScoreSensitivity:
    """Squared changes of the sums of scores times residuals when one record is replaced.

    `complete` is for the record, `parts` for its part at each site if the others know all the rest.
    """

    complete: float
    parts: Mapping[str, float]

    @classmethod
    def of(cls, mean: SharedMean, radii: Mapping[str, float], holder: str) -> ScoreSensitivity:
        """Bound the sums of (1, v_1, ..., v_K) r, for scores with squared lengths up to `radii`.

        Scores and residual of two records move the sum by u v - u' v'. Its part at others, (1, v_-k), moves
        by (r - r')^2 (1 + sum of their R^2), and its own by (|r| + |r'|)^2 R_k^2. Both are convex in (r, r')
        and in the response, so the corners of their ranges are the worst case. The range is an interval in
        which r and r' differ at most as far as the part at the site can move the mean, and at the holder also
        the response.
        """
        low, high = mean.range
        first, last = mean.responses
        total = sum(radii.values())
        complete = [(first - high, last - low)]
        ends = [(y - high, y - low) for y in (first, last)]
        parts = {}
        for site in mean.halves:
            own = radii.get(site, 0.0)
            moved = mean.steepest * 2.0 * mean.halves[site] / 2.0**mean.bits + 2.0 * mean.slack
            at = (complete, last - first + moved) if site == holder else (ends, moved)
            parts[site] = _worst(*at, own, 1.0 + total - own)
        return cls(_worst(complete, np.inf, total, 1.0), parts)


def _worst(intervals: list[tuple[float, float]], apart: float, own: float, rest: float) -> float:
    """Return the largest (r - r')^2 rest + (|r| + |r'|)^2 own, for r, r' in one interval at a distance."""
    found = []
    for a, b in intervals:
        corners = [(a, a), (b, b), (b, max(a, b - apart)), (a, min(b, a + apart))]
        found += [(r - s) ** 2 * rest + (abs(r) + abs(s)) ** 2 * own for r, s in corners]
    return max(found)


def share_line(
    bits: int, halves: Mapping[str, float], unit: float, constant: float, largest: float
) -> SharedMean:
    """Express a mean ``constant + w``, the linear predictor in a unit, for responses up to `largest`."""
    complete = {site: ceil(unit * h * 2.0**bits) for site, h in halves.items()}
    one = 2.0 ** (CUBE * bits)
    end = ceil(largest * one)
    return SharedMean(bits, unit, round(constant * one), 2**bits, 0, 0, complete, -end, end)


def share_cubic(
    bits: int, halves: Mapping[str, float], mean: Callable[[Floats], Floats], predictors: Floats
) -> SharedMean:
    """Express a mean in [0, 1] of a binary response by a cubic of w, fitted at predictors (N,).

    `mean` is a function of w. In addition to the distribution of w the whole range has a small weight, so
    that no mean at its ends makes residuals, and with them the noise, large.
    """
    H = sum(halves.values())
    t = np.linspace(-1.0, 1.0, GRID)
    counts = np.histogram(np.clip(predictors / H, -1.0, 1.0), np.linspace(-1.0, 1.0, GRID + 1))[0]
    weight = np.sqrt(counts / len(predictors) + OF_RANGE / GRID)
    target, powers = mean(H * t), np.vander(t, 4, increasing=True)
    a = np.linalg.lstsq(powers * weight[:, None], target * weight, rcond=None)[0]
    if abs(a[3]) < SMALLEST_CUBE:
        a[3] = np.copysign(SMALLEST_CUBE, a[3])
        rest = (target - a[3] * t**3) * weight
        a[:3] = np.linalg.lstsq(powers[:, :3] * weight[:, None], rest, rcond=None)[0]
    # In the variable with cubic coefficient one.
    unit = abs(a[3]) ** (1.0 / 3.0) / H
    scale = unit * H
    return SharedMean(
        bits=bits,
        unit=float(unit),
        constant=round(a[0] * 2.0 ** (CUBE * bits)),
        linear=round(a[1] / scale * 2.0**bits),
        square=round(a[2] / scale**2 * 2.0**bits),
        cube=int(np.sign(a[3])),
        halves={site: ceil(unit * h * 2.0**bits) for site, h in halves.items()},
        low=0,
        high=2 ** (CUBE * bits),
    )


# ----------------------------------------------------------------------------------------------------
# One step from released moments on the score of the rows, and its covariance in closed form.
#
# U = sum_i v_i (y_i - p(w_i)) + noise has mean n E[v (mu - p)] at the true coefficients where the step
# begins. The distribution of the columns only enters through the remainder of the polynomial, v (mu - p).
# With H the derivative of E[v mu] by the coefficients under the released distribution,
#
#     b_1 = b_0 + H^-1 (U / n - E[v (mu - p)]),    cov = H^-1 (V / n + sigma^2 I / n^2) H^-T.
#
# So the copula only affects the derivative and a small remainder, and no longer the estimate itself.

OF_STEP = Fraction(1, 2)
"""Share of the budget for the step; the rest is for the release before it."""
WIDE = {"Binomial": 3.5, "Gaussian": 2.5}
"""Half width of a part of the linear predictor, in deviations under the released distribution, by family."""
LEAST = 1e-3
"""Smallest half width, in units of the linear predictor."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreStepStart:
    """Start of a step: coefficients (p + 1,), the middle of each site's part, the shared mean."""

    params: Floats
    middles: Mapping[str, float]
    mean: SharedMean


@dataclass(frozen=True, slots=True, eq=False)
class ScoreStep:
    """Coefficients after a step (p + 1,), and the parts of their covariance (p + 1, p + 1).

    `remainder` is the effect of the columns' distribution on the coefficients through the remainder of the
    polynomial, in sampling errors (root mean square). `moved` (p + 1,) is how far the step went.
    """

    params: Floats
    sampling: Floats
    noise: Floats
    remainder: float
    moved: Floats

    @property
    def covariance(self) -> Floats:
        """Covariance of the coefficients."""
        return self.sampling + self.noise


def plan_score(fit: MomentFit, holder: str, n: int, length: float) -> ScoreStepStart:
    """Choose ranges and polynomial from released values; `length` is the largest of a row of scores."""
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
        return ScoreStepStart(b, middles, share_line(bits, halves, unit, constant, largest))
    w = np.sum(
        [np.clip(part - middles[site], -halves[site], halves[site]) for site, part in parts.items()], axis=0
    )
    bits = bits_for(n, 2.0 * length)
    return ScoreStepStart(b, middles, share_cubic(bits, halves, lambda t: expit(offset + t), w))


def take_step(fit: MomentFit, request: ScoreStepStart, sums: Floats, n: int, deviation: float) -> ScoreStep:
    """Take the step by the sums (p + 1,) of n rows with noise, intercept first."""
    distribution, response, root = fit.distribution, fit.release.response, fit.root
    V = np.column_stack([np.ones(len(distribution.scores)), distribution.scores])
    X = np.column_stack([np.ones(len(V)), distribution.values])
    eta = X @ root.params
    found = _mean_of(response, eta, root.scale)
    w = np.sum(
        [request.mean.part(s, part - request.middles[s]) for s, part in _parts_of(fit).items()], axis=0
    )
    left = found.mean - request.mean.at(w)
    remainder = V.T @ left / len(V)
    Hi = _inverse_slope(V, X, found.slope)
    spread = _variance_of(response, eta, root.scale, found.mean) + left**2
    inner = (V * spread[:, None]).T @ V / len(V) - np.outer(remainder, remainder)
    sampling = Hi @ inner @ Hi.T / n
    away = Hi @ remainder / np.sqrt(np.diag(sampling))
    moved = Hi @ (sums / n - remainder)
    return ScoreStep(
        params=root.params + moved,
        sampling=sampling,
        noise=(deviation / n) ** 2 * Hi @ Hi.T,
        remainder=float(np.sqrt(np.mean(away**2))),
        moved=moved,
    )


def _inverse_slope(V: Floats, X: Floats, slope: Floats) -> Floats:
    """Invert the derivative of E[v mu] by the coefficients, at points with these slopes of mu."""
    # Columns have equal spread, for a well conditioned inverse.
    units = np.where(X.std(axis=0) > 0.0, X.std(axis=0), 1.0)
    return np.asarray(np.linalg.inv((V * slope[:, None]).T @ (X / units) / len(V)) / units[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class CopulaTest:
    """Test that the columns follow the released Gaussian copula, by how far the step on the rows went.

    Under the copula and the generalized linear model, the step corrects errors of sampling and noise only.
    `moved` (p + 1,) are the moves, `statistic` the same in standard errors. These come from `draws` simulated
    steps from simulated releases, and from the planned noise of both requests.
    """

    moved: Floats
    statistic: Floats
    draws: Annotated[int, Minimum(2)]

    @classmethod
    def of(cls, step: ScoreStep, sampled: Floats, noise: Floats) -> CopulaTest:
        """Compare a step with moves of simulated steps without noise, (draws, p + 1).

        `noise` (draws, p + 1) are simulated effects of the moments' noise on their estimates.
        """
        variance = sampled.var(axis=0, ddof=1) + noise.var(axis=0, ddof=1) + np.diag(step.noise)
        return cls(step.moved, step.moved / np.sqrt(np.maximum(variance, 1e-300)), len(sampled))

    @property
    def largest(self) -> int:
        """The coefficient that moved most, intercept first."""
        return int(np.argmax(np.abs(self.statistic)))

    @property
    def pvalue(self) -> float:
        """P-value of the largest move, by Student's t and Bonferroni's inequality."""
        tail = float(stats.t.sf(abs(self.statistic[self.largest]), self.draws - 1))
        return min(1.0, 2.0 * tail * len(self.statistic))


def simulated_move(fit: MomentFit, rows: MomentFit, codes: Ints, values: Floats, y: Ints) -> Floats:
    """Step (p + 1,) from the estimate of simulated rows, without noise and without a polynomial.

    `rows` is the estimate from codes and values (n, p) of columns and the bins y (n,) of responses; the
    derivative is that of the actual `fit`.
    """
    response, b = rows.release.response, rows.root.params
    design, tables = rows.distribution.design, rows.distribution.tables
    V = np.column_stack([np.ones(len(codes)), design.score(codes, tables)])
    eta = b[0] + values @ b[1:]
    score = response.table[y] if response.has_scale else (response.table[y] + 1.0) / 2.0
    left = score - _mean_of(response, eta, rows.root.scale).mean
    known = fit.distribution
    W = np.column_stack([np.ones(len(known.scores)), known.scores])
    X = np.column_stack([np.ones(len(W)), known.values])
    slope = _mean_of(fit.release.response, X @ fit.root.params, fit.root.scale).slope
    return np.asarray(_inverse_slope(W, X, slope) @ (V.T @ left / len(V)))


def _parts_of(fit: MomentFit) -> dict[str, Floats]:
    """Return each site's part of the linear predictor at the points of the distribution: (N,) each."""
    design, b = fit.distribution.design, fit.root.params[1:]
    return {
        site: fit.distribution.values[:, block] @ b[block]
        for site, block in zip(design.sites, design.blocks, strict=True)
    }


def _mean_of(response: ScoredResponse, eta: Floats, scale: float) -> ExpectedScores:
    """Mean of the summed response, 0 or 1 or the score, and its derivative."""
    found = response.mean(eta, scale)
    if response.has_scale:
        return found
    # Scores of a binary response are -1 and 1.
    return ExpectedScores((found.mean + 1.0) / 2.0, found.slope / 2.0, found.by_scale)


def _variance_of(response: ScoredResponse, eta: Floats, scale: float, mean: Floats) -> Floats:
    """Variance of the summed response."""
    if response.has_scale:
        return response.mean(eta, scale, 2).mean - mean**2
    return mean * (1.0 - mean)
