"""Maximum likelihood with blocks that are independent between sites, from moments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from fedstat.errors import EstimationError, ModelError
from fedstat.inference.convergence import rounding_error
from fedstat.inference.covariance import delta_method, invert_information
from fedstat.models.vertical.moments import COLLINEAR, PatternMoments
from fedstat.models.vertical.newton import NewtonAscent, NewtonFit, TraceRow, step_by
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# The observed-data log-likelihood of independent blocks, with the block covariances profiled out.
#
# Sigma_k enters the likelihood of y only through t_k = beta_k'Sigma_k beta_k. Given beta_k, mu_k and t_k, the
# likelihood of the block splits into that of c = x'beta_k ~ N(m_k, t_k), m_k = mu_k'beta_k, and a free
# regression of x on c; its maximum over Sigma_k is in closed form. Columns are centered at the means of their
# own sites. With S_k their covariance, q_k = beta_k'(S_k + mu_k mu_k')beta_k and t_k = exp(lambda_k) q_k,
#
#     l(b, s2, beta, mu, lambda) = sum_g [ -n_g log(2 pi v_g)/2 - SS_g / (2 v_g) ]
#         - sum_k n_k/2 [ log(1 + mu_k'S_k^-1 mu_k) + lambda_k + exp(-lambda_k) - 1 ]
#     r_i = y_i - b - sum_{k seen} x_i'beta_k - sum_{k missing} m_k
#     SS_g = sum of r_i^2,    v_g = s2 + sum_{k missing} t_k
#
# minus the largest value that the blocks' own likelihood can take. It is smooth everywhere, including beta_k
# = 0, and its inverse information is that of the full likelihood for all remaining parameters.


@dataclass(frozen=True, slots=True, eq=False)
class LikelihoodPoint:
    """Parameters of standardized columns: b, log s2, beta (P,), mu (P,), lambda (K,)."""

    b: float
    log_s2: float
    beta: Floats
    mu: Floats
    lam: Floats

    def pack(self) -> Floats:
        """(b, log s2, beta, mu, lambda)."""
        return np.concatenate([[self.b, self.log_s2], self.beta, self.mu, self.lam])

    @staticmethod
    def unpack(phi: Floats, P: int) -> LikelihoodPoint:
        """Read :meth:`pack`."""
        return LikelihoodPoint(
            float(phi[0]), float(phi[1]), phi[2 : 2 + P], phi[2 + P : 2 + 2 * P], phi[2 + 2 * P :]
        )


class StandardizedMoments:
    """Standardized moments, with quantities of the likelihood that are computed once.

    They are given in any units; the likelihood of this module requires moments that are `complete`. Raises
    EstimationError if a site has fewer than two entities, or its columns are constant or collinear.
    """

    def __init__(self, moments: PatternMoments) -> None:
        self.moments = moments.standardized()
        self.missing: Floats = (~self.moments.patterns).astype(float)
        owner = self.moments.owner
        self.member: Floats = (owner[:, None] == np.arange(len(moments.sizes))).astype(float)
        self.within: Floats = self.member @ self.member.T
        self.n_seen: Floats = self.moments.n_seen
        self.count: Floats = self.n_seen[self.moments.unit]
        total = self.moments.grams[:, 1:-1, 1:-1].sum(axis=0)
        # For columns that different entities have, use the geometric mean of both counts: positive
        # semi-definite.
        self.S: Floats = total * self.within / np.sqrt(np.outer(self.count, self.count))
        self._check_rank()
        self.precision: Floats = np.linalg.inv(self.S) * self.within

    @property
    def P(self) -> int:  # noqa: N802
        """Columns."""
        return len(self.member)

    @cached_property
    def places(self) -> tuple[slice, slice, slice]:
        """Return the indices of beta, mu and lambda in :meth:`LikelihoodPoint.pack`."""
        P = self.P
        return slice(2, 2 + P), slice(2 + P, 2 + 2 * P), slice(2 + 2 * P, 2 + 2 * P + self.member.shape[1])

    def start(self) -> LikelihoodPoint:
        """No effects, and every block at its own moments."""
        return LikelihoodPoint(0.0, 0.0, np.zeros(self.P), np.zeros(self.P), np.zeros(self.member.shape[1]))

    def _check_rank(self) -> None:
        for k, site in enumerate(self.moments.sites):
            here = self.moments.places(k)
            values, vectors = np.linalg.eigh(self.S[here, here])
            if values[0] < COLLINEAR * values[-1]:
                loading = zip(self.moments.names[here], vectors[:, 0], strict=True)
                names = ", ".join(c for c, v in loading if abs(v) > 1e-4)
                raise EstimationError(
                    f"{site}: collinear among the {int(self.count[here].min())} entities of this fit: "
                    f"{names}; drop one of them"
                )


@dataclass(frozen=True, slots=True, eq=False)
class Residuals:
    """Values of the likelihood at a point: w = (S + mu mu')beta by site (P,); m, q and t (K,); v (G,).

    `sums` (G, P + 2) are those of (1, x, y) r by pattern, `squares` (G,) those of r^2.
    """

    w: Floats
    m: Floats
    q: Floats
    t: Floats
    v: Floats
    sums: Floats
    squares: Floats


@dataclass(frozen=True, slots=True, eq=False)
class LikelihoodDerivatives:
    """The log-likelihood at a point, in the units of the data, and its derivatives, (d,) and (d, d).

    In the order of :meth:`LikelihoodPoint.pack`. The information is the negative Hessian; `expected` omits
    terms whose expectation is zero under MCAR, and is positive definite.
    """

    log_likelihood: float
    score: Floats
    information: Floats
    expected: Floats


def residuals(standard: StandardizedMoments, point: LikelihoodPoint) -> Residuals:
    """Compute the residuals' sums at a point."""
    moments = standard.moments
    m = (point.mu * point.beta) @ standard.member
    w = standard.S @ point.beta + point.mu * (standard.member @ m)
    q = (point.beta * w) @ standard.member
    t = np.exp(point.lam) * q
    v = np.exp(point.log_s2) + standard.missing @ t
    # r = weights'(1, x, y) for every entity of a pattern: one product with its Gram matrix is the sum of r
    # times the row, and another that of r^2. Missing columns are zero in the Gram matrix.
    weights = np.empty((len(v), standard.P + 2))
    weights[:, 0] = -point.b - standard.missing @ m
    weights[:, 1:-1] = -point.beta
    weights[:, -1] = 1.0
    sums = np.matmul(moments.grams, weights[:, :, None])[:, :, 0]
    return Residuals(w, m, q, t, v, sums, np.sum(weights * sums, axis=1))


def log_likelihood(
    standard: StandardizedMoments, point: LikelihoodPoint, at: Residuals | None = None
) -> float:
    """Profile log-likelihood in the units of the data, minus the blocks' own maximum."""
    at = at or residuals(standard, point)
    moments = standard.moments
    response = np.sum(moments.n * np.log(2.0 * np.pi * at.v) + at.squares / at.v)
    distance = (point.mu * (standard.precision @ point.mu)) @ standard.member
    blocks = standard.n_seen @ (np.log1p(distance) + point.lam + np.expm1(-point.lam))
    return float(-0.5 * (response + blocks) - moments.nobs * np.log(moments.scale[-1]))


def evaluate(standard: StandardizedMoments, point: LikelihoodPoint) -> LikelihoodDerivatives:
    """Log-likelihood, score and information at a point.

    By the chain rule through z = (b, beta, m, s2, t), in which r and v are linear.
    """
    at = residuals(standard, point)
    score_z, information_z, expected_z = by_linear_parameters(standard, at)
    J = jacobian(standard, point, at)
    score, information, expected = block_terms(standard, point)
    score += score_z @ J
    information += J.T @ information_z @ J - curvature(standard, point, at, score_z)
    expected += J.T @ expected_z @ J
    return LikelihoodDerivatives(log_likelihood(standard, point, at), score, information, expected)


def by_linear_parameters(standard: StandardizedMoments, at: Residuals) -> tuple[Floats, Floats, Floats]:
    """Score, information and expected information of z = (b, beta, m, s2, t)."""
    moments, missing, v = standard.moments, standard.missing, at.v
    n, grams = moments.n, moments.grams
    P, K = standard.P, missing.shape[1]
    mean, var = slice(0, 1 + P + K), slice(1 + P + K, 2 + P + 2 * K)
    D = np.column_stack([at.sums[:, :-1], missing * at.sums[:, :1]])  # sums of r times the row of the design
    A = np.column_stack([np.ones(len(v)), missing])  # of v by (s2, t)
    score = np.concatenate([(1.0 / v) @ D, (0.5 * (at.squares / v - n) / v) @ A])
    expected = np.zeros((len(score), len(score)))
    expected[: 1 + P, : 1 + P] = np.tensordot(1.0 / v, grams[:, :-1, :-1], 1)
    by_missing = (missing / v[:, None]).T @ grams[:, 0, :-1]
    expected[1 + P : 1 + P + K, : 1 + P] = by_missing
    expected[: 1 + P, 1 + P : 1 + P + K] = by_missing.T
    expected[1 + P : 1 + P + K, 1 + P : 1 + P + K] = (missing * (n / v)[:, None]).T @ missing
    information = expected.copy()
    expected[var, var] = (A * (0.5 * n / v**2)[:, None]).T @ A
    information[var, var] = (A * (at.squares / v**3 - 0.5 * n / v**2)[:, None]).T @ A
    # Sums of r alone have expectation zero: the expected information has no such block.
    information[mean, var] = (D / v[:, None] ** 2).T @ A
    information[var, mean] = information[mean, var].T
    return score, information, expected


def jacobian(standard: StandardizedMoments, point: LikelihoodPoint, at: Residuals) -> Floats:
    """Differentiate z = (b, beta, m, s2, t) by the parameters."""
    P, K = standard.member.shape
    beta, mu, lam = standard.places
    m, t = slice(1 + P, 1 + P + K), slice(2 + P + K, 2 + P + 2 * K)
    growth = np.exp(point.lam)
    J = np.zeros((2 + P + 2 * K, 2 + 2 * P + K))
    J[0, 0] = 1.0
    J[1 : 1 + P, beta] = np.eye(P)
    J[m, beta], J[m, mu] = (standard.member.T * point.mu), (standard.member.T * point.beta)
    J[1 + P + K, 1] = np.exp(point.log_s2)
    J[t, beta] = 2.0 * growth[:, None] * (standard.member.T * at.w)
    J[t, mu] = 2.0 * (growth * at.m)[:, None] * (standard.member.T * point.beta)
    J[t, lam] = np.diag(at.t)
    return J


def curvature(
    standard: StandardizedMoments, point: LikelihoodPoint, at: Residuals, score_z: Floats
) -> Floats:
    """Sum of the scores of z times the second derivatives of z."""
    P, K = standard.member.shape
    beta, mu, lam = standard.places
    # m, s2 and t are not linear in the parameters: their scores are multiplied by their second derivatives.
    by_m, by_s2, by_t = score_z[1 + P : 1 + P + K], score_z[1 + P + K], score_z[2 + P + K :]
    member = standard.member
    weight = 2.0 * by_t * np.exp(point.lam)
    each = (member @ weight)[:, None] * standard.within
    out = np.zeros((2 + 2 * P + K, 2 + 2 * P + K))
    out[1, 1] = by_s2 * np.exp(point.log_s2)
    out[beta, beta] = each * (standard.S + np.outer(point.mu, point.mu))
    out[mu, mu] = each * np.outer(point.beta, point.beta)
    out[beta, mu] = each * np.outer(point.mu, point.beta) + np.diag(member @ (by_m + weight * at.m))
    out[beta, lam] = member * at.w[:, None] * weight
    out[mu, lam] = member * point.beta[:, None] * (weight * at.m)
    out[lam, lam] = np.diag(by_t * at.t)
    upper = np.triu(out, 1)
    return np.asarray(upper + upper.T + np.diag(np.diag(out)))


def block_terms(standard: StandardizedMoments, point: LikelihoodPoint) -> tuple[Floats, Floats, Floats]:
    """Score and informations of the blocks' own likelihood."""
    _, mu, lam = standard.places
    member, n_seen = standard.member, standard.n_seen
    # n_k/2 log(1 + mu'S^-1 mu) of each site; the expected information omits terms that may be negative.
    u = standard.precision @ point.mu
    spread = 1.0 + member @ ((point.mu * u) @ member)
    size = 2 + 2 * standard.P + len(n_seen)
    score, information, expected = np.zeros(size), np.zeros((size, size)), np.zeros((size, size))
    score[mu] = -standard.count * u / spread
    score[lam] = 0.5 * n_seen * np.expm1(-point.lam)
    expected[mu, mu] = (standard.count / spread)[:, None] * standard.precision
    expected[lam, lam] = np.diag(0.5 * n_seen)
    information[mu, mu] = expected[mu, mu] - standard.within * (
        (2.0 * standard.count / spread**2)[:, None] * np.outer(u, u)
    )
    information[lam, lam] = np.diag(0.5 * n_seen * np.exp(-point.lam))
    return score, information, expected


def block_covariance(standard: StandardizedMoments, point: LikelihoodPoint, at: Residuals) -> Floats:
    """Return Sigma_1..Sigma_K that maximize the likelihood, as one block diagonal matrix (P, P)."""
    # t differs from q only along w = S beta; if beta_k = 0 there is no such direction.
    factor = np.divide(np.expm1(point.lam), at.q, out=np.zeros_like(at.q), where=at.q > 0.0)
    around = standard.S + standard.within * np.outer(point.mu, point.mu)
    return np.asarray(around + standard.within * np.outer(at.w * (standard.member @ factor), at.w))


# ----------------------------------------------------------------------------------------------------
# Maximum likelihood of independent blocks from moments, and the covariance of the estimates.

# ----------------------------------------------------------------------------------------------------
# Maximum likelihood from moments: Newton's method on the profile log-likelihood.
#
# The parameters of :mod:`fedstat.models.vertical.fit` are few and the derivatives exact, so about ten steps
# reach the stationary point that the iterative exchange approaches in hundreds of rounds. If the information
# is not positive definite, the step is Fisher scoring. Steps are halved until the log-likelihood increases.

SMALLEST_STEP = 2.0**-20
LONGEST_LOG = 1.0
"""Largest change of the logarithm of a variance in one step."""
SUFFICIENT = 1e-4
VANISHING, NEARLY_VANISHING = 1e-12, 1e-4
"""Shares of the response's variance: one that counts as zero, and one below which rounding hides the
trend."""


@dataclass(frozen=True, slots=True, eq=False)
class MomentsFit:
    """Maximum likelihood estimates, in the units of the data.

    `standard` and `point` are the fitted moments and the estimates for standardized columns; `a` is the
    centered intercept, `s2` the residual variance; beta and mu are (P,), Sigma (P, P) block diagonal, t (K,)
    is beta_k' Sigma_k beta_k. The largest value that the likelihood of the sites' own blocks can take is
    subtracted from the log-likelihood. The score of the trace is the Newton decrement, the distance to the
    optimum in standard errors, divided by the root of the number of entities.
    """

    standard: StandardizedMoments
    point: LikelihoodPoint
    a: float
    s2: float
    beta: Floats
    mu: Floats
    Sigma: Floats
    t: Floats
    log_likelihood: float
    trace: tuple[TraceRow, ...]
    converged: bool
    reason: str

    @property
    def moments(self) -> PatternMoments:
        """The moments, standardized."""
        return self.standard.moments

    @property
    def params(self) -> Floats:
        """Intercept at the origin of the columns, and coefficients: (1 + P,)."""
        return np.append(self.a - self.mu @ self.beta, self.beta)

    @property
    def rsquared(self) -> float:
        """Share of variance explained for a fully observed entity, 1 - s2 / (s2 + sum t_k)."""
        return float(1.0 - self.s2 / (self.s2 + self.t.sum()))


def fit_moments(
    moments: PatternMoments | StandardizedMoments,
    *,
    tol: float = 1e-9,
    maxiter: int = 200,
    start: LikelihoodPoint | None = None,
) -> MomentsFit:
    """Maximize the observed-data likelihood of VFEM.

    It stops when the optimum is nearer than `tol` standard errors (the Newton decrement), or with
    ``converged=False`` after `maxiter` steps. It starts with no effects and every block at its own moments,
    as the iterative exchange does with ``init="zero"``. Raises EstimationError if the moments do not
    determine an estimate, and ModelError if entities have only some of a site's columns.
    """
    standard = moments if isinstance(moments, StandardizedMoments) else StandardizedMoments(moments)
    if not standard.moments.complete:
        raise ModelError(
            "fit_moments: if entities have only some of a site's columns, fit the joint normal model instead"
        )
    ascent = NewtonAscent(
        standard.moments.nobs,
        partial(evaluate, standard),
        lambda _, at: ascent_direction(at),
        partial(line_search, standard),
    )
    climbed = ascent.ascend(start or standard.start(), tol, maxiter)
    log_s2 = climbed.point.log_s2
    # At the border the score of log s2 vanishes with s2, and the iteration ends there as at a maximum.
    if np.exp(log_s2) < NEARLY_VANISHING and evaluate(standard, climbed.point).information[1, 1] < 1.0:
        raise EstimationError(vanishing_variance_message(standard.moments))
    return estimates_in_units(standard, climbed)


def ascent_direction(at: LikelihoodDerivatives) -> tuple[str, Floats]:
    """Take a Newton step if the information is positive definite, otherwise Fisher scoring."""
    try:
        return step_by(at.score, (("newton", at.information), ("scoring", at.expected)))
    except np.linalg.LinAlgError:
        raise EstimationError(
            "the information on the coefficients is not positive definite; the columns are probably "
            "collinear across sites, or too few entities are shared by several of them: leave out columns "
            "or sites"
        ) from None


def line_search(
    standard: StandardizedMoments, point: LikelihoodPoint, at: LikelihoodDerivatives, direction: Floats
) -> tuple[LikelihoodPoint, float, bool]:
    """Move along a direction of ascent until the log-likelihood has increased enough.

    Returns the point, the largest change of a parameter, and whether the step was shortened. Raises
    EstimationError if the log-likelihood decreases along the direction for every step length, or if a
    variance goes to zero.
    """
    phi, slope = point.pack(), float(at.score @ direction)
    logs = np.abs(np.append(direction[1], direction[standard.places[2]])).max()
    # A variance changes at most by a factor e: the quadratic model is not valid farther away.
    first = min(1.0, LONGEST_LOG / logs) if logs > 0.0 else 1.0
    # Near the maximum, the increase is below the rounding of the log-likelihood, and no step would suffice.
    slack = rounding_error(at.log_likelihood, standard.moments.nobs) / 2.0
    step = first
    while step >= SMALLEST_STEP:
        trial = LikelihoodPoint.unpack(phi + step * direction, standard.P)
        if np.exp(trial.log_s2) <= VANISHING:
            raise EstimationError(vanishing_variance_message(standard.moments))
        if log_likelihood(standard, trial) >= at.log_likelihood + SUFFICIENT * step * slope - slack:
            return trial, float(np.abs(step * direction).max()), step < 1.0
        step /= 2.0
    if np.exp(point.log_s2) < NEARLY_VANISHING:
        raise EstimationError(vanishing_variance_message(standard.moments))
    raise EstimationError(
        "the log-likelihood decreases along every step, however short; the columns are probably collinear "
        "across sites"
    )


def vanishing_variance_message(moments: PatternMoments) -> str:
    """Explain why there is no maximum."""
    return (
        f"a variance goes to zero, where the likelihood has no maximum: {moments.n_complete} of the "
        f"{int(moments.nobs)} entities are complete, and the coefficients may reproduce their "
        "response without error; leave out columns or sites"
    )


def estimates_in_units(standard: StandardizedMoments, climbed: NewtonFit[LikelihoodPoint]) -> MomentsFit:
    """Convert estimates of standardized columns to the units of the data."""
    moments, point = standard.moments, climbed.point
    at = residuals(standard, point)
    x, y = moments.scale[:-1], moments.scale[-1]
    return MomentsFit(
        standard=standard,
        point=point,
        a=float(moments.center[-1] + y * (point.b + at.m.sum())),
        s2=float(y**2 * np.exp(point.log_s2)),
        beta=y * point.beta / x,
        mu=moments.center[:-1] + x * point.mu,
        Sigma=block_covariance(standard, point, at) * np.outer(x, x),
        t=y**2 * at.t,
        log_likelihood=log_likelihood(standard, point, at),
        trace=climbed.trace,
        converged=climbed.converged,
        reason=climbed.reason,
    )


# ----------------------------------------------------------------------------------------------------
# Covariance of (a, s2, beta, mu) from pattern moments: inverse observed or expected information.
#
# In the profile likelihood of :mod:`fedstat.models.vertical.fit`, Sigma_1..Sigma_K are maximized out. The
# inverse of its information is therefore a covariance that accounts for every nuisance parameter.


def information_inverse(fit: MomentsFit, *, expected: bool = False) -> Floats:
    """Covariance of (a, s2, beta_1, mu_1, beta_2, mu_2, ...) in the units of the data.

    The fit must have converged. With `expected`, cross-products between sites are at their expected value,
    zero. Raises EstimationError if the information is not positive definite.
    """
    information = centered_information(fit)
    if expected:
        beta = fit.standard.places[0]
        information[beta, beta] -= products_between(fit)
    cov = invert_information(information, names_of(fit.moments))
    order = site_order(fit.moments)
    return covariance_in_units(fit.moments, cov[np.ix_(order, order)])


def origin_covariance(fit: MomentsFit) -> Floats:
    """Covariance (1 + P, 1 + P) of the intercept at the origin of the columns and the coefficients."""
    (beta, mu, _), P = fit.standard.places, fit.standard.P
    J = np.zeros((1 + P, 2 + 2 * P))
    # a - sum mu'beta: the means are estimates as well, and their errors contribute to that of the intercept.
    J[0, 0] = 1.0
    J[0, beta], J[0, mu] = -fit.mu, -fit.beta
    J[1:, beta] = np.eye(P)
    return delta_method(information_inverse(fit), J[:, site_order(fit.moments)])


def centered_information(fit: MomentsFit) -> Floats:
    """Observed information of (a, s2, beta, mu, lambda) of standardized columns."""
    standard, point = fit.standard, fit.point
    information = evaluate(standard, point).information
    beta, mu, _ = standard.places
    A = np.eye(len(information))  # d(b, log s2, ...) / d(a, s2, ...); b = a - sum mu'beta
    A[0, beta], A[0, mu] = -point.mu, -point.beta
    A[1, 1] = np.exp(-point.log_s2)
    return np.asarray(A.T @ information @ A)


def products_between(fit: MomentsFit) -> Floats:
    """Sum of u_j u_k'/v over the entities that two sites both have, u = x - mu; zero within sites."""
    standard, moments, mu = fit.standard, fit.moments, fit.point.mu
    h = 1.0 / residuals(standard, fit.point).v
    means = moments.seen * mu
    # Sums of u_j u_k' from those of x_j, x_k and x_j x_k', each pattern weighted by its 1/v.
    mixed = (moments.grams[:, 0, 1:-1] * h[:, None]).T @ means
    products = np.tensordot(h, moments.grams[:, 1:-1, 1:-1], 1) - mixed - mixed.T
    products += (means * (h * moments.n)[:, None]).T @ means
    return np.asarray(products * (1.0 - standard.within))


def names_of(moments: PatternMoments) -> list[str]:
    """Name each parameter of the information, for messages."""
    owners = [moments.sites[k] for k in moments.owner]
    columns = [f"{name} ({site})" for name, site in zip(moments.names, owners, strict=True)]
    means = [f"mean of {column}" for column in columns]
    variances = [f"variance of the block of {site}" for site in moments.sites]
    return ["Intercept", "residual variance", *columns, *means, *variances]


def site_order(moments: PatternMoments) -> list[int]:
    """Return the indices of (a, s2, beta_1, mu_1, beta_2, ...) in (a, s2, beta, mu)."""
    P, columns = len(moments.names), np.arange(len(moments.names))
    by_site = [columns[moments.places(k)] for k in range(len(moments.sizes))]
    return [0, 1, *[int(i) for own in by_site for i in (*(2 + own), *(2 + P + own))]]


def covariance_in_units(moments: PatternMoments, cov: Floats) -> Floats:
    """Convert a covariance of (a, s2, beta_1, mu_1, ...) of standardized columns to the units of the data."""
    x, y = moments.scale[:-1], moments.scale[-1]
    factor = np.concatenate([[y, y**2], y / x, x])[site_order(moments)]
    return np.asarray(cov * np.outer(factor, factor))
