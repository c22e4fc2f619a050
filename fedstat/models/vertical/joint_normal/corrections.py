"""Corrections of the joint normal model for skewed columns and small samples."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtr

from fedstat.errors import EstimationError
from fedstat.models.vertical.joint_normal.fit import (
    JointNormalFit,
    JointNormalPoint,
    differentiate_joint_normal,
    in_psi,
    maximize_joint_normal,
    not_determined,
    observed,
)
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vertical.newton import solve_information
from fedstat.typing import Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Estimates for skewed columns by indirect inference with a simulated reference sample.

# ----------------------------------------------------------------------------------------------------
# Shape of a skewed column, told by one sum: that of the logarithm's inverse with the same signed squares.
#
# The mean of z |z| of a standardized column is zero where it is symmetric. Of a log-normal column, exp(s Z)
# with normal Z, it is 2 U / V - 1 with V = exp(2 s^2) - exp(s^2), the variance, and U its part above the
# mean,
#
#     U = exp(2 s^2) Phi(3 s / 2) - 2 exp(s^2) Phi(s / 2) + exp(s^2) Phi(-s / 2),
#
# for exp(s Z) lies above its mean exp(s^2 / 2) where Z lies above s / 2. A column that is skewed to the
# left is such a column with the sign changed.

MAX_LOG_SD = 2.0
"""Largest standard deviation of a logarithm: the skewness is then 414."""


def signed_squares_of(log_sd: Floats) -> Floats:
    """Give the mean of z |z| of log-normal columns, by positive standard deviations of logarithms."""
    square = np.exp(log_sd**2)
    above = square**2 * ndtr(1.5 * log_sd) - 2.0 * square * ndtr(0.5 * log_sd) + square * ndtr(-0.5 * log_sd)
    return np.asarray(2.0 * above / (square**2 - square) - 1.0)


_GRID = np.linspace(0.01, MAX_LOG_SD, 400)
_SHAPES = np.concatenate([[0.0], signed_squares_of(_GRID)])


def log_sd_of(shape: Floats) -> Floats:
    """Give the standard deviation of the logarithm, with the sign of the skewness; zero of shape nan."""
    known = np.nan_to_num(shape)
    return np.asarray(np.sign(known) * np.interp(np.abs(known), _SHAPES, np.concatenate([[0.0], _GRID])))


def skewness_of(shape: Floats) -> Floats:
    """Give the skewness of the log-normal column of this shape."""
    square = np.exp(log_sd_of(shape) ** 2)
    return np.asarray(np.sign(np.nan_to_num(shape)) * (square + 2.0) * np.sqrt(square - 1.0))


# ----------------------------------------------------------------------------------------------------
# A large sample of a law whose columns are skewed, with entities in missing patterns as in the data.

ROWS_PER_PATTERN_FIT = 20_000
STEPS, SMALL, LONGEST = 50, 1e-8, 2.0
LARGEST_CORRELATION = 0.999
SMALLEST_EIGENVALUE = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class SkewedModel:
    """A law whose columns have these standard deviations of logarithms, signed, (P,); zero of normal ones."""

    point: JointNormalPoint
    log_sd: Floats

    def pack(self) -> Floats:
        """Give a, s2, beta, mu and the standard deviations of logarithms: (2 + 3 P,)."""
        at = self.point
        return np.concatenate([[at.a, at.s2], at.beta, at.mu, self.log_sd])

    def moved(self, by: Floats) -> SkewedModel:
        """Move what :meth:`pack` gives."""
        at, P = self.point, len(self.log_sd)
        beta, mu, log_sd = np.split(by[2:], [P, 2 * P])
        point = JointNormalPoint(at.mu + mu, at.a + by[0], at.beta + beta, at.s2 + by[1], at.Q)
        return SkewedModel(point, self.log_sd + log_sd)


class ReferenceSample:
    """Random numbers of N entities, of which every law makes its sample.

    `moments` are those of the data, standardized: which patterns there are, and the sums of the response and
    of the columns that nobody lacks in each.
    """

    def __init__(self, moments: PatternMoments, N: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.N, self._moments = N, moments
        self._scores = random.standard_normal((N, len(moments.names)))
        self._errors, self._places = random.standard_normal(N), random.random(N)
        always = np.flatnonzero(moments.seen.all(axis=0))
        self._always = always
        self._share = moments.grams[:, 0][:, [0, *(1 + always), -1]] / moments.nobs
        self._chances = np.zeros_like(self._share)

    def draw(self, law: SkewedModel, rows: slice = slice(None), *, same: bool = False) -> PatternMoments:
        """Sum over some rows of the sample, by pattern, in the units of the standardized data.

        Chances of patterns are those that give the sums of the data, or the `same` as of the last draw.
        """
        X, y = self._columns(law, rows)
        causes = np.column_stack([np.ones(len(y)), X[:, self._always], y])
        if not same:
            self._chances = fit_pattern_probabilities(
                causes[:ROWS_PER_PATTERN_FIT], self._share, self._chances
            )
        code = draw_patterns(self._chances @ causes.T, self._places[rows])
        return sums_by_pattern(self._moments, X, y, code)

    def _columns(self, law: SkewedModel, rows: slice) -> tuple[Floats, Floats]:
        """Columns (N, P) and response (N,) of the law."""
        at = law.point
        Sigma = at.covariates
        sd = np.sqrt(np.diag(Sigma))
        R = correlation_of_scores(Sigma / np.outer(sd, sd), law.log_sd)
        X = skewed_columns(self._scores[rows] @ np.linalg.cholesky(R).T, law.log_sd) * sd
        y = at.a + X @ at.beta + np.sqrt(at.s2) * self._errors[rows]
        return X + at.mu, y


def skewed_columns(scores: Floats, log_sd: Floats) -> Floats:
    """Columns with mean zero and variance one of normal scores, (N, P)."""
    out = scores.copy()
    for j in np.flatnonzero(log_sd):
        s, square = log_sd[j], np.exp(log_sd[j] ** 2)
        # Of a negative s the exponential falls with the score.
        out[:, j] = (
            np.sign(s) * (np.exp(s * scores[:, j]) - np.sqrt(square)) / np.sqrt(square * (square - 1.0))
        )
    return out


def correlation_of_scores(R: Floats, log_sd: Floats) -> Floats:
    """Correlation of the scores of columns whose own is R, (P, P), as near as there is one.

    Of two log-normal columns log(1 + R f_i f_j) / (s_i s_j), f^2 = exp(s^2) - 1; of one and a normal one
    R f / s.
    """
    skewed = log_sd != 0.0
    s = np.where(skewed, log_sd, 1.0)
    f = np.where(skewed, np.sqrt(np.expm1(s**2)) * np.sign(s), 1.0)
    both = np.outer(skewed, skewed)
    ratio = np.outer(f, f)
    least = np.expm1(-np.abs(np.outer(s, s)))
    logs = np.log1p(np.where(both, np.maximum(R * ratio, LARGEST_CORRELATION * least), 0.0))
    out = np.where(both, logs, R * ratio) / np.outer(s, s)
    out = np.clip(out, -LARGEST_CORRELATION, LARGEST_CORRELATION)
    np.fill_diagonal(out, 1.0)
    values, vectors = np.linalg.eigh(out)
    out = (vectors * values.clip(min=SMALLEST_EIGENVALUE)) @ vectors.T
    root = np.sqrt(np.diag(out))
    return np.asarray(out / np.outer(root, root))


def fit_pattern_probabilities(causes: Floats, share: Floats, start: Floats) -> Floats:
    """Coefficients (G, q) of the logarithms of chances of patterns, by causes (N, q), that give mean sums.

    `share` (G, q) are the sums of causes by pattern over the number of entities; likelihood equations of a
    multinomial logit, by Newton's method. The largest pattern has coefficients zero.
    """
    others = np.delete(np.arange(len(share)), int(share[:, 0].argmax()))
    out, q, N = start.copy(), causes.shape[1], len(causes)
    if not out.any():
        out[others, 0] = np.log(share[others, 0] / share[:, 0].max())
    for _ in range(STEPS if len(others) else 0):
        p = pattern_probabilities(out @ causes.T)[others]
        gap = share[others] - p @ causes / N
        if np.abs(gap).max() < SMALL:
            break
        H = np.empty((len(others), q, len(others), q))
        for a in range(q):
            for b in range(a, q):
                weighed = p * (causes[:, a] * causes[:, b])
                H[:, a, :, b] = H[:, b, :, a] = (np.diag(weighed.sum(axis=1)) - weighed @ p.T) / N
        size = len(others) * q
        step = np.linalg.solve(H.reshape(size, size) + SMALL * np.eye(size), gap.ravel())
        out[others] += np.clip(step, -LONGEST, LONGEST).reshape(-1, q)
    return out


def pattern_probabilities(logs: Floats) -> Floats:
    """Bring logarithms of chances (G, N), up to a constant of each entity, to chances."""
    p = np.exp(logs - logs.max(axis=0))
    return np.asarray(p / p.sum(axis=0))


def draw_patterns(logs: Floats, places: Floats) -> Ints:
    """Pattern of each entity, (N,), by its place between 0 and 1."""
    code = (places > np.cumsum(pattern_probabilities(logs), axis=0)).sum(axis=0)
    return np.asarray(np.minimum(code, len(logs) - 1))


def sums_by_pattern(like: PatternMoments, X: Floats, y: Floats, code: Ints) -> PatternMoments:
    """Moments of a sample by pattern; shapes of columns are those of the entities that have them."""
    G, P = like.seen.shape
    grams, squares = np.zeros((G, P + 2, P + 2)), np.zeros(P)
    n = np.bincount(code, minlength=G).astype(np.float64)
    rows = np.column_stack([np.ones(len(y)), X, y])
    members = [rows[code == g] for g in range(G)]
    for g, Z in enumerate(members):
        here = np.concatenate([[True], like.seen[g], [True]])
        grams[g][np.ix_(here, here)] = Z[:, here].T @ Z[:, here]
    total, count = grams.sum(axis=0), like.seen.T @ n
    mean = total[0, 1:-1] / count
    sd = np.sqrt(np.diag(total)[1:-1] / count - mean**2)
    for g, Z in enumerate(members):
        deviations = (Z[:, 1:-1] - mean) / sd
        squares += like.seen[g] * (deviations * np.abs(deviations)).sum(axis=0)
    unit = np.ones(P + 1)
    return replace(like, n=n, grams=grams, centre=0.0 * unit, scale=unit, shape=squares / count)


# ----------------------------------------------------------------------------------------------------
# Estimates under columns that are skewed, from the same sums: indirect inference with a simulated world.
#
# Where the response has a part in what is missing, the law of what is missing matters. Here columns are
# monotone functions of jointly normal scores: shifted log-normal ones, each with the mean of z |z| that was
# told, mirrored where that is negative; normal ones where it is zero. The response is normal given all
# columns, on their scale. In a pattern g an entity is with probability proportional to exp(c_g't), t the
# response and the columns that nobody lacks, with the sums of t by pattern that were told.
#
# Maximum likelihood under a normal law is biased then, by as much in a large sample drawn from such a law.
# The law is moved until the estimates in its sample are those that were found (Gourieroux, Monfort and
# Renault 1993). The covariance is that of the estimates in 40 parts of the sample, through the derivative
# of what is estimated by the law.
#
# References
# ----------
# Gourieroux, Monfort and Renault (1993), Indirect inference, Journal of Applied Econometrics 8, S85-S118.

SIMULATION_PARTS = 40
"""Of the sample, each with as many entities as the data where these are between the next two numbers."""
SMALLEST_PART, LARGEST_PART = 1_000, 20_000
MAX_SIMULATED_VALUES = 20_000_000
"""Of the sample: numbers that are held at once."""
ROWS_OF_DERIVATIVES = 40_000
CLOSE, FAR, MOST_ROUNDS = 0.1, 0.5, 8
"""Largest change of a coefficient, in standard errors, that ends the search, or fails it after most rounds.

Entities of the sample flip between patterns from one law to the next, so that changes stay at some
hundredths.
"""
DIFFERENCE_STEP = 2.0
"""Of a numerical derivative, in standard errors: patterns of entities flip, and no derivative is exact."""
MATCHING_TOLERANCE = 1e-3
NO_SKEWED_MODEL = (
    "correction='skewness': no law with skewed columns has these estimates; take logarithms of such columns "
    "in the formula, or leave out columns that hardly any entity has"
)


@dataclass(frozen=True, slots=True, eq=False)
class SkewedFit:
    """A law with skewed columns whose sample, of a `world`, has the estimates of `found`."""

    found: JointNormalFit
    law: SkewedModel
    world: ReferenceSample

    @property
    def reported(self) -> JointNormalFit:
        """Law of the columns and the response, with means and covariances of the skewed one."""
        return replace(self.found, point=self.law.point)


def without_skewness(fit: JointNormalFit, *, seed: int = 0) -> SkewedFit:
    """Find the law with skewed columns whose sample has the estimates of `fit`.

    An EstimationError where there is none, or shapes of columns are not known.
    """
    if fit.moments.shape is None:
        raise EstimationError("correction='skewness' needs the shapes of columns, which were not exchanged")
    n, P = int(fit.moments.nobs), len(fit.point.beta)
    part = min(
        max(n, SMALLEST_PART),
        LARGEST_PART,
        max(MAX_SIMULATED_VALUES // (SIMULATION_PARTS * P), SMALLEST_PART),
    )
    world = ReferenceSample(fit.moments, SIMULATION_PARTS * part, seed)
    found = SkewedModel(fit.point, log_sd_of(fit.moments.shape))
    law, change = found, np.inf
    information = differentiate_joint_normal(fit.moments, fit.point, fit.moves).information
    errors = np.sqrt(np.diag(solve_information(information, np.eye(len(information), 2 + P))))[2:]
    for _ in range(MOST_ROUNDS):
        there = estimates_of_sample(fit, law, world.draw(law))
        new = match_estimates(law, found, there)
        change = float((np.abs(new.point.beta - law.point.beta) / errors).max())
        law = new
        if change < CLOSE:
            break
    if not change < FAR:
        raise EstimationError(NO_SKEWED_MODEL)
    return SkewedFit(fit, law, world)


def match_estimates(law: SkewedModel, found: SkewedModel, there: SkewedModel) -> SkewedModel:
    """Move a law by what the estimates in its sample lack; less far where no law would be left."""
    known = np.where(found.log_sd == 0.0, 0.0, found.log_sd - there.log_sd)
    Sigma, gap = law.point.covariates, found.point.covariates - there.point.covariates
    share = 1.0
    while np.linalg.eigvalsh(Sigma + share * gap)[0] < 0.5 * np.linalg.eigvalsh(Sigma)[0]:
        share /= 2.0
    at, goal, seen = law.point, found.point, there.point
    point = JointNormalPoint(
        at.mu + goal.mu - seen.mu,
        at.a + goal.a - seen.a,
        at.beta + goal.beta - seen.beta,
        at.s2 * float(np.clip(goal.s2 / seen.s2, 0.5, 2.0)),
        np.asarray(np.linalg.inv(Sigma + share * gap)),
    )
    return SkewedModel(point, law.log_sd + known)


def estimates_of_sample(fit: JointNormalFit, law: SkewedModel, moments: PatternMoments) -> SkewedModel:
    """Fit a normal law to a sample of a skewed one; with the shapes of its columns as they are seen."""
    assert moments.shape is not None
    try:
        found = maximize_joint_normal(moments, law.point, fit.moves, MATCHING_TOLERANCE, 100)
    except (EstimationError, np.linalg.LinAlgError):
        raise EstimationError(
            f"correction='skewness': {int(moments.nobs):,} simulated entities do not determine the estimate; "
            "leave out columns or sites that hardly any entity has"
        ) from None
    return SkewedModel(found.point, log_sd_of(moments.shape))


def simulated_covariance(skewed: SkewedFit) -> Floats:
    """Covariance of (a, s2, beta_1, mu_1, ...), in the units of the data, under skewed columns."""
    fit, law, world = skewed.found, skewed.law, skewed.world
    P, n = len(fit.point.beta), fit.moments.nobs
    part = world.N // SIMULATION_PARTS
    parts = [slice(first, first + part) for first in range(0, world.N, part)]
    world.draw(law)
    samples = [world.draw(law, rows, same=True) for rows in parts]
    V = np.cov([estimates_of_sample(fit, law, sample).pack() for sample in samples], rowvar=False) * part / n
    # The sample has errors of its own.
    V *= 1.0 + n / world.N
    some = slice(0, min(world.N, ROWS_OF_DERIVATIVES))
    here = estimates_of_sample(fit, law, world.draw(law, some)).pack()
    J, errors = np.eye(len(V)), np.sqrt(np.diag(V))
    shapes = 2 + 2 * P + np.flatnonzero(law.log_sd)
    # Location is no matter: means move their estimates alone, and one for one.
    for c in [1, *range(2, 2 + P), *shapes]:
        by = np.zeros(len(V))
        # Towards a normal column, not to ever longer tails.
        by[c] = (
            DIFFERENCE_STEP
            * errors[c]
            * (-1.0 if c >= 2 + 2 * P and law.log_sd[c - 2 - 2 * P] > 0.0 else 1.0)
        )
        new = law.moved(by)
        J[:, c] = (estimates_of_sample(fit, new, world.draw(new, some)).pack() - here) / by[c]
    used = np.concatenate([np.arange(2 + 2 * P), shapes])
    try:
        back = np.linalg.inv(J[np.ix_(used, used)])[: 2 + 2 * P]
    except np.linalg.LinAlgError:
        raise EstimationError(NO_SKEWED_MODEL) from None
    cov = back @ V[np.ix_(used, used)] @ back.T
    return in_psi(fit, 0.5 * (cov + cov.T))


# ----------------------------------------------------------------------------------------------------
# The first-order bias of maximum likelihood in the joint normal model, and its correction.
#
# The information is that of sums over few entities where sites share few. Of a covariance Omega that
# is free the maximum likelihood estimate has no bias of order 1/n but that of the estimated means, whatever
# is missing; coefficients and residual variance are curved functions of it. With V the covariance of the
# parameters theta = (a, s2, beta, mu, Q), the formula of Cox and Snell (1968, equation 20) is one step of
# Fisher's scoring,
#
#     bias(theta) = I^-1 score, at sums n_g (Omega_g - E_g) of squares, E = E2 Omega + Var(mean),
#
# where E2 Omega is the second-order part of the expectation of Omega at the estimate:
#
#     E2 Sigma = Sigma E[dQ Sigma dQ] Sigma,    E2(Sigma beta) = (E2 Sigma) beta - E[Sigma dQ Sigma dbeta],
#     E2(beta'Sigma beta) = beta'(E2 Sigma) beta - 2 beta'E[Sigma dQ Sigma dbeta] + tr(Sigma Var beta).
#
# With nothing missing coefficients have no bias, and the residual variance has that of its divisor n.
#
# References
# ----------
# Cox and Snell (1968), A general definition of residuals, Journal of the Royal Statistical Society B 30,
# 248-275.


def bias_corrected(fit: JointNormalFit) -> JointNormalFit:
    """Take the bias of order 1/n off a law at its maximum.

    The residual variance is divided by 1 + bias / s2: with nothing missing it is that of least squares, with
    the divisor n - p - 1. An EstimationError where so few entities are shared that no law is left.
    """
    at = fit.point
    try:
        bias, _ = first_order_bias(fit)
    except np.linalg.LinAlgError:
        raise EstimationError(not_determined(fit.moments)) from None
    share = 1.0 + bias[1] / at.s2
    moved = fit.moves.step(at, -bias)
    s2 = at.s2 / share if share > 0.0 else -1.0
    if s2 <= 0.0 or np.linalg.eigvalsh(moved.Q)[0] <= 0.0:
        raise EstimationError(
            "correction='small-sample': the bias is as large as the estimates; " + not_determined(fit.moments)
        )
    return replace(fit, point=replace(moved, s2=s2))


def first_order_bias(fit: JointNormalFit) -> tuple[Floats, Floats]:
    """Bias (d,) of a, s2, beta, mu and the entries of Q, of standardized columns, and their variances.

    A LinAlgError where the information is not positive definite.
    """
    at, moments, moves = fit.point, fit.moments, fit.moves
    P, d = len(at.beta), 2 + 2 * len(at.beta) + len(moves.entries[0])
    V = solve_information(differentiate_joint_normal(moments, at, moves).information, np.eye(d))
    excess = second_order(fit, V)
    mean = [*range(2 + P, 2 + 2 * P), 0]
    excess += V[np.ix_(mean, mean)]
    expected = differentiate_joint_normal(expected_moments(moments, at, excess), at, moves, expected=True)
    bias = np.asarray(solve_information(expected.information, expected.score))
    # Of the intercept at the origin, a - mu'beta, that of the product: with means and coefficients that are
    # correlated, as where the response enters the missingness, it is not zero.
    bias[0] -= np.trace(V[2 + P : 2 + 2 * P, 2 : 2 + P])
    return bias, np.diag(V)


def second_order(fit: JointNormalFit, V: Floats) -> Floats:
    """Second-order part of the expectation of Omega, (P + 1, P + 1), of estimates with covariance V."""
    at, P = fit.point, len(fit.point.beta)
    beta, Q = slice(2, 2 + P), slice(2 + 2 * P, None)
    Sigma = at.covariates
    i, j = fit.moves.entries
    # Moments of dQ_ab with anything, from those of its entries on and above the diagonal.
    place = np.full((P, P), -1)
    place[i, j] = place[j, i] = np.arange(len(i))
    moves = place >= 0

    def whole(values: Floats) -> Floats:
        return np.where(moves, values[..., np.where(moves, place, 0)], 0.0)

    with_beta = whole(V[beta, Q])  # of dbeta_c, dQ_ab: (P, P, P)
    c = -Sigma @ np.einsum("cab,bc->a", with_beta, Sigma)
    M = np.zeros((P, P))
    for a in range(P):
        row = np.where(moves[a], place[a], 0)
        own = whole(V[Q, Q][row]) * moves[a][:, None, None]  # of dQ_ac, dQ_de: (c, d, e)
        M[a] = np.einsum("cde,cd->e", own, Sigma)
    second = Sigma @ M @ Sigma
    column = second @ at.beta + c
    last = at.beta @ second @ at.beta + 2.0 * at.beta @ c + np.sum(Sigma * V[beta, beta])
    return np.block([[second, column[:, None]], [column[None, :], np.array([[last]])]])


def expected_moments(moments: PatternMoments, point: JointNormalPoint, excess: Floats) -> PatternMoments:
    """Return the sums that are expected of a law with the covariance less `excess`, by the same patterns."""
    seen = observed(moments)
    mean, n = seen * point.mean, moments.n[:, None, None]
    grams = np.zeros_like(moments.grams)
    grams[:, 0, 0] = moments.n
    grams[:, 0, 1:] = grams[:, 1:, 0] = moments.n[:, None] * mean
    both = seen[:, :, None] & seen[:, None, :]
    grams[:, 1:, 1:] = n * (mean[:, :, None] * mean[:, None, :] + both * (point.cov - excess))
    return replace(moments, grams=grams)
