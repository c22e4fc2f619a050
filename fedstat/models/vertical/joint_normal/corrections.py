"""Corrections of the joint normal model for skewed columns and small samples."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtr

from fedstat.errors import EstimationError
from fedstat.models.vertical.joint_normal.edges import not_determined
from fedstat.models.vertical.joint_normal.fit import JointNormalFit, in_psi, maximize_joint_normal
from fedstat.models.vertical.joint_normal.likelihood import (
    JointNormalPoint,
    differentiate_joint_normal,
    observed,
)
from fedstat.models.vertical.moments import PatternMoments
from fedstat.models.vertical.newton import solve_information
from fedstat.typing import Floats, Ints

# ----------------------------------------------------------------------------------------------------
# Shape of a skewed column from one sum: that of a log-normal column with the same mean of z |z|.
#
# The mean of z |z| of a standardized column is zero if it is symmetric. For a log-normal column, exp(s Z)
# with normal Z, it is 2 U / V - 1, where V = exp(2 s^2) - exp(s^2) is the variance, and U is the part of it
# above the mean,
#
#     U = exp(2 s^2) Phi(3 s / 2) - 2 exp(s^2) Phi(s / 2) + exp(s^2) Phi(-s / 2),
#
# because exp(s Z) is above its mean exp(s^2 / 2) if Z is above s / 2. A column that is skewed to the left is
# such a column with the opposite sign.

MAX_LOG_SD = 2.0
"""Largest standard deviation of a logarithm: the skewness is then 414."""


def signed_squares_of(log_sd: Floats) -> Floats:
    """Return the mean of z |z| of log-normal columns, by positive standard deviations of logarithms."""
    square = np.exp(log_sd**2)
    above = square**2 * ndtr(1.5 * log_sd) - 2.0 * square * ndtr(0.5 * log_sd) + square * ndtr(-0.5 * log_sd)
    return np.asarray(2.0 * above / (square**2 - square) - 1.0)


_GRID = np.linspace(0.01, MAX_LOG_SD, 400)
_SHAPES = np.concatenate([[0.0], signed_squares_of(_GRID)])


def log_sd_of(shape: Floats) -> Floats:
    """Return the standard deviation of the logarithm, with the sign of the skewness.

    Zero if the shape is nan.
    """
    known = np.nan_to_num(shape)
    return np.asarray(np.sign(known) * np.interp(np.abs(known), _SHAPES, np.concatenate([[0.0], _GRID])))


def skewness_of(shape: Floats) -> Floats:
    """Return the skewness of the log-normal column with this shape."""
    square = np.exp(log_sd_of(shape) ** 2)
    return np.asarray(np.sign(np.nan_to_num(shape)) * (square + 2.0) * np.sqrt(square - 1.0))


# ----------------------------------------------------------------------------------------------------
# A large sample of a model with skewed columns, with entities in missing patterns as in the data.

ROWS_PER_PATTERN_FIT = 20_000
STEPS, SMALL, LONGEST = 50, 1e-8, 2.0
LARGEST_CORRELATION = 0.999
SMALLEST_EIGENVALUE = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class SkewedModel:
    """A model whose columns have these standard deviations of logarithms, signed, (P,).

    Zero for normal ones.
    """

    point: JointNormalPoint
    log_sd: Floats

    def pack(self) -> Floats:
        """Return a, s2, beta, mu and the standard deviations of logarithms: (2 + 3 P,)."""
        at = self.point
        return np.concatenate([[at.a, at.s2], at.beta, at.mu, self.log_sd])

    def moved(self, by: Floats) -> SkewedModel:
        """Change the parameters that :meth:`pack` returns."""
        at, P = self.point, len(self.log_sd)
        beta, mu, log_sd = np.split(by[2:], [P, 2 * P])
        point = JointNormalPoint(at.mu + mu, at.a + by[0], at.beta + beta, at.s2 + by[1], at.Q)
        return SkewedModel(point, self.log_sd + log_sd)


class ReferenceSample:
    """Random numbers of N entities, from which every model computes its sample.

    `moments` are those of the data, standardized: the patterns, and in each the sums of the response and of
    the columns that no entity lacks.
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

    def draw(self, joint: SkewedModel, rows: slice = slice(None), *, same: bool = False) -> PatternMoments:
        """Sum over some rows of the sample, by pattern, in the units of the standardized data.

        Probabilities of patterns are those that give the sums of the data, or the `same` as in the last draw.
        """
        X, y = self._columns(joint, rows)
        causes = np.column_stack([np.ones(len(y)), X[:, self._always], y])
        if not same:
            self._chances = fit_pattern_probabilities(
                causes[:ROWS_PER_PATTERN_FIT], self._share, self._chances
            )
        code = draw_patterns(self._chances @ causes.T, self._places[rows])
        return sums_by_pattern(self._moments, X, y, code)

    def _columns(self, joint: SkewedModel, rows: slice) -> tuple[Floats, Floats]:
        """Return columns (N, P) and response (N,) of the model."""
        at = joint.point
        Sigma = at.covariates
        sd = np.sqrt(np.diag(Sigma))
        R = correlation_of_scores(Sigma / np.outer(sd, sd), joint.log_sd)
        X = skewed_columns(self._scores[rows] @ np.linalg.cholesky(R).T, joint.log_sd) * sd
        y = at.a + X @ at.beta + np.sqrt(at.s2) * self._errors[rows]
        return X + at.mu, y


def skewed_columns(scores: Floats, log_sd: Floats) -> Floats:
    """Columns with mean zero and variance one of normal scores, (N, P)."""
    out = scores.copy()
    for j in np.flatnonzero(log_sd):
        s, square = log_sd[j], np.exp(log_sd[j] ** 2)
        # If s is negative, the exponential decreases with the score.
        out[:, j] = (
            np.sign(s) * (np.exp(s * scores[:, j]) - np.sqrt(square)) / np.sqrt(square * (square - 1.0))
        )
    return out


def correlation_of_scores(R: Floats, log_sd: Floats) -> Floats:
    """Correlation of the scores of columns with correlation R, (P, P), or the closest one that exists.

    For two log-normal columns log(1 + R f_i f_j) / (s_i s_j), f^2 = exp(s^2) - 1; for one and a normal column
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
    """Coefficients (G, q) of log probabilities of patterns on causes (N, q), that reproduce mean sums.

    `share` (G, q) are the sums of causes by pattern divided by the number of entities. The likelihood
    equations of a multinomial logit are solved by Newton's method. The largest pattern has coefficients zero.
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
    """Convert log probabilities (G, N), up to a constant of each entity, to probabilities."""
    p = np.exp(logs - logs.max(axis=0))
    return np.asarray(p / p.sum(axis=0))


def draw_patterns(logs: Floats, places: Floats) -> Ints:
    """Return the pattern of each entity, (N,), from its uniform number."""
    code = (places > np.cumsum(pattern_probabilities(logs), axis=0)).sum(axis=0)
    return np.asarray(np.minimum(code, len(logs) - 1))


def sums_by_pattern(like: PatternMoments, X: Floats, y: Floats, code: Ints) -> PatternMoments:
    """Compute moments of a sample by pattern; shapes of columns are those of the entities that have them."""
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
    return replace(like, n=n, grams=grams, center=0.0 * unit, scale=unit, shape=squares / count)


# ----------------------------------------------------------------------------------------------------
# Estimates for skewed columns, from the same sums: indirect inference with a simulated sample.
#
# If missingness depends on the response, the distribution of missing columns matters. Here columns are
# monotone functions of jointly normal scores: shifted log-normal, each with the reported mean of z |z|,
# mirrored if that is negative, and normal if it is zero. The response is normal given all columns, on their
# scale. The probability of pattern g is proportional to exp(c_g't) for an entity, where t is the response and
# the columns that no entity lacks; the sums of t by pattern are the reported ones.
#
# Maximum likelihood under a normal model is then biased, by as much as in a large sample from such a model.
# The model is changed until the estimates in its sample equal those of the data (Gourieroux, Monfort and
# Renault 1993). The covariance is that of the estimates in 40 parts of the sample, multiplied by the
# derivative of the estimates with respect to the model.
#
# References
# ----------
# Gourieroux, Monfort and Renault (1993), Indirect inference, Journal of Applied Econometrics 8, S85-S118.

SIMULATION_PARTS = 40
"""Parts of the sample; each has as many entities as the data if these are between the next two numbers."""
SMALLEST_PART, LARGEST_PART = 1_000, 20_000
MAX_SIMULATED_VALUES = 20_000_000
"""Limit of the numbers of the sample that are held at once."""
ROWS_OF_DERIVATIVES = 40_000
CLOSE, FAR, MOST_ROUNDS = 0.1, 0.5, 16
"""Largest change of a coefficient, in standard errors, that ends the search; the correction is incomplete if
it is larger than the second number after most rounds.

Entities of the sample switch between patterns from one model to the next, so changes remain at a few
hundredths.
"""
DIFFERENCE_STEP = 2.0
"""Step of a numerical derivative, in standard errors: entities switch patterns, so no derivative is exact."""
MATCHING_TOLERANCE = 1e-3
NO_SKEWED_MODEL = (
    "correction='skewness': no model with skewed columns has these estimates; take logarithms of such "
    "columns in the formula, or leave out columns that almost no entity has"
)


@dataclass(frozen=True, slots=True, eq=False)
class SkewedFit:
    """A model with skewed columns whose sample, from `world`, has the estimates of `found`.

    `gap` is the largest difference that remains in a coefficient, in standard errors.
    """

    found: JointNormalFit
    joint: SkewedModel
    world: ReferenceSample
    gap: float

    @property
    def incomplete(self) -> bool:
        """Whether the sample does not have the estimates of the data."""
        return not self.gap < FAR

    @property
    def reported(self) -> JointNormalFit:
        """Return the normal model with means and covariances of the skewed one."""
        return replace(self.found, point=self.joint.point)


def without_skewness(fit: JointNormalFit, *, seed: int = 0) -> SkewedFit:
    """Find the model with skewed columns whose sample has the estimates of `fit`, or the closest one found.

    Raises EstimationError if shapes of columns are not known, or the first sample has no estimate.
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
    found = SkewedModel(fit.point.with_concentration(), log_sd_of(fit.moments.shape))
    joint, best, gap, last, step = found, found, np.inf, np.inf, 1.0
    errors = np.sqrt(np.diag(fit.model.leading_inverse(fit.point, 2 + P)))[2:]
    for _ in range(MOST_ROUNDS):
        try:
            there = estimates_of_sample(fit, joint, world.draw(joint))
        except EstimationError:
            if not np.isfinite(gap):
                raise
            step, joint = 0.5 * step, mixture(best, joint, 0.5)
            continue
        new = match_estimates(joint, found, there)
        change = float((np.abs(new.point.beta - joint.point.beta) / errors).max())
        if change < gap:
            best, gap = joint, change
        if change < CLOSE:
            best = new
            break
        # Full steps oscillate in samples with long tails.
        step = 0.5 * step if change >= last else step
        joint, last = mixture(joint, new, step), change
    return SkewedFit(fit, best, world, gap)


def mixture(first: SkewedModel, second: SkewedModel, share: float) -> SkewedModel:
    """Return the model between two, with this share of the second."""
    if share == 1.0:
        return second
    a, b = first.point, second.point

    def between(x: Floats, y: Floats) -> Floats:
        return np.asarray(x + share * (y - x))

    point = JointNormalPoint(
        between(a.mu, b.mu),
        a.a + share * (b.a - a.a),
        between(a.beta, b.beta),
        a.s2 + share * (b.s2 - a.s2),
        np.asarray(np.linalg.inv(between(a.covariates, b.covariates)), dtype=np.float64),
    )
    return SkewedModel(point, between(first.log_sd, second.log_sd))


def match_estimates(joint: SkewedModel, found: SkewedModel, there: SkewedModel) -> SkewedModel:
    """Change a model by the error of the estimates in its sample; less if no valid model would result."""
    known = np.where(found.log_sd == 0.0, 0.0, found.log_sd - there.log_sd)
    Sigma, gap = joint.point.covariates, found.point.covariates - there.point.covariates
    share = 1.0
    while np.linalg.eigvalsh(Sigma + share * gap)[0] < 0.5 * np.linalg.eigvalsh(Sigma)[0]:
        share /= 2.0
    at, goal, seen = joint.point, found.point, there.point
    point = JointNormalPoint(
        at.mu + goal.mu - seen.mu,
        at.a + goal.a - seen.a,
        at.beta + goal.beta - seen.beta,
        at.s2 * float(np.clip(goal.s2 / seen.s2, 0.5, 2.0)),
        np.asarray(np.linalg.inv(Sigma + share * gap)),
    )
    return SkewedModel(point, joint.log_sd + known)


def estimates_of_sample(fit: JointNormalFit, joint: SkewedModel, moments: PatternMoments) -> SkewedModel:
    """Fit a normal model to a sample of a skewed one; also return the shapes of its observed columns."""
    assert moments.shape is not None
    try:
        found = maximize_joint_normal(
            replace(fit.model, moments=moments), joint.point, MATCHING_TOLERANCE, 100
        )
    except (EstimationError, np.linalg.LinAlgError):
        raise EstimationError(
            f"correction='skewness': {int(moments.nobs):,} simulated entities do not determine the "
            "estimate; leave out columns or sites that almost no entity has"
        ) from None
    return SkewedModel(found.point.with_concentration(), log_sd_of(moments.shape))


def simulated_covariance(skewed: SkewedFit) -> Floats:
    """Covariance of (a, s2, beta_1, mu_1, ...), in the units of the data, under skewed columns."""
    fit, joint, world = skewed.found, skewed.joint, skewed.world
    P, n = len(fit.point.beta), fit.moments.nobs
    part = world.N // SIMULATION_PARTS
    parts = [slice(first, first + part) for first in range(0, world.N, part)]
    world.draw(joint)
    samples = [world.draw(joint, rows, same=True) for rows in parts]
    V = (
        np.cov([estimates_of_sample(fit, joint, sample).pack() for sample in samples], rowvar=False)
        * part
        / n
    )
    # The sample has sampling error of its own.
    V *= 1.0 + n / world.N
    some = slice(0, min(world.N, ROWS_OF_DERIVATIVES))
    here = estimates_of_sample(fit, joint, world.draw(joint, some)).pack()
    J, errors = np.eye(len(V)), np.sqrt(np.diag(V))
    shapes = 2 + 2 * P + np.flatnonzero(joint.log_sd)
    # Location is irrelevant: means change only their own estimates, one for one.
    for c in [1, *range(2, 2 + P), *shapes]:
        by = np.zeros(len(V))
        # Towards a normal column, not to longer and longer tails.
        by[c] = (
            DIFFERENCE_STEP
            * errors[c]
            * (-1.0 if c >= 2 + 2 * P and joint.log_sd[c - 2 - 2 * P] > 0.0 else 1.0)
        )
        new = joint.moved(by)
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
# The information is small if sites share few entities. The maximum likelihood estimate of a free covariance
# Omega has no bias of order 1/n except that of the estimated means, for any missing values. Coefficients and
# residual variance are nonlinear functions of it. With V the covariance of the parameters theta = (a, s2,
# beta, mu, Q), the formula of Cox and Snell (1968, equation 20) is one step of Fisher scoring,
#
#     bias(theta) = I^-1 score, at sums n_g (Omega_g - E_g) of squares, E = E2 Omega + Var(mean),
#
# where E2 Omega is the second-order part of the expectation of Omega at the estimate:
#
#     E2 Sigma = Sigma E[dQ Sigma dQ] Sigma,    E2(Sigma beta) = (E2 Sigma) beta - E[Sigma dQ Sigma dbeta],
#     E2(beta'Sigma beta) = beta'(E2 Sigma) beta - 2 beta'E[Sigma dQ Sigma dbeta] + tr(Sigma Var beta).
#
# If nothing is missing, coefficients have no bias, and the residual variance has that of its divisor n.
#
# References
# ----------
# Cox and Snell (1968), A general definition of residuals, Journal of the Royal Statistical Society B 30,
# 248-275.


def bias_corrected(fit: JointNormalFit) -> JointNormalFit:
    """Remove the bias of order 1/n from the estimates at the maximum.

    The residual variance is divided by 1 + bias / s2: if nothing is missing, it is that of least squares,
    with the divisor n - p - 1. Raises EstimationError if so few entities are shared that no valid model
    remains.
    """
    at = fit.point.with_concentration()
    try:
        bias, _ = first_order_bias(fit)
    except np.linalg.LinAlgError:
        raise not_determined(fit.moments, at.Q) from None
    share = 1.0 + bias[1] / at.s2
    moved = fit.moves.step(at, -bias)
    s2 = at.s2 / share if share > 0.0 else -1.0
    if s2 <= 0.0 or np.linalg.eigvalsh(moved.Q)[0] <= 0.0:
        before = "correction='small-sample': the bias is as large as the estimates; "
        raise not_determined(fit.moments, at.Q, before)
    return replace(fit, point=replace(moved, s2=s2))


def first_order_bias(fit: JointNormalFit) -> tuple[Floats, Floats]:
    """Bias (d,) of a, s2, beta, mu and the entries of Q, of standardized columns, and their variances.

    Raises LinAlgError if the information is not positive definite.
    """
    at, moments, moves = fit.point.with_concentration(), fit.moments, fit.moves
    P, d = len(at.beta), 2 + 2 * len(at.beta) + len(moves.entries[0])
    V = solve_information(differentiate_joint_normal(moments, at, moves).information, np.eye(d))
    excess = second_order(fit, V)
    mean = [*range(2 + P, 2 + 2 * P), 0]
    excess += V[np.ix_(mean, mean)]
    expected = differentiate_joint_normal(expected_moments(moments, at, excess), at, moves, expected=True)
    bias = np.asarray(solve_information(expected.information, expected.score))
    # For the intercept at the origin, a - mu'beta, use the bias of the product: it is not zero if means and
    # coefficients are correlated, as they are if missingness depends on the response.
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

    def complete(values: Floats) -> Floats:
        return np.where(moves, values[..., np.where(moves, place, 0)], 0.0)

    with_beta = complete(V[beta, Q])  # of dbeta_c, dQ_ab: (P, P, P)
    c = -Sigma @ np.einsum("cab,bc->a", with_beta, Sigma)
    M = np.zeros((P, P))
    for a in range(P):
        row = np.where(moves[a], place[a], 0)
        own = complete(V[Q, Q][row]) * moves[a][:, None, None]  # of dQ_ac, dQ_de: (c, d, e)
        M[a] = np.einsum("cde,cd->e", own, Sigma)
    second = Sigma @ M @ Sigma
    column = second @ at.beta + c
    last = at.beta @ second @ at.beta + 2.0 * at.beta @ c + np.sum(Sigma * V[beta, beta])
    return np.block([[second, column[:, None]], [column[None, :], np.array([[last]])]])


def expected_moments(moments: PatternMoments, point: JointNormalPoint, excess: Floats) -> PatternMoments:
    """Return the expected sums of a model with the covariance minus `excess`, by the same patterns."""
    seen = observed(moments)
    mean, n = seen * point.mean, moments.n[:, None, None]
    grams = np.zeros_like(moments.grams)
    grams[:, 0, 0] = moments.n
    grams[:, 0, 1:] = grams[:, 1:, 0] = moments.n[:, None] * mean
    both = seen[:, :, None] & seen[:, None, :]
    grams[:, 1:, 1:] = n * (mean[:, :, None] * mean[:, None, :] + both * (point.cov - excess))
    return replace(moments, grams=grams)
