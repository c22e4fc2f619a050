"""Site steps of the EM iterations of VFEM: local M-steps, and steps of the response holder."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from fedstat.errors import EstimationError
from fedstat.federation import message
from fedstat.federation.disclosure.family import step
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.kernels.row_products import column_sums, row_dots
from fedstat.models.vfem.iteration.site_state import (
    BLOCK_OPENING,
    RESPONSE_OPENING,
    BlockParameters,
    BlockState,
    EvaluatedPoint,
    NormalResponse,
    block_state_of,
    choose_response,
    normal_response_of,
    stage_block_state,
)
from fedstat.models.vfem.iteration.state import FAMILY, declare_sums
from fedstat.typing import Array, Bools, Floats, Ints

# ----------------------------------------------------------------------------------------------------
# The local M-step of VFEM: from a point to its image, and the quality of the point.


def extrapolate(points: list[BlockParameters], weights: Floats) -> BlockParameters:
    """Affine combination of points."""
    return BlockParameters(
        np.tensordot(weights, [p.beta for p in points], 1),
        np.tensordot(weights, [p.mu for p in points], 1),
        np.tensordot(weights, [p.Sigma for p in points], 1),
    )


def set_first_point(site: BlockState, theta: BlockParameters) -> None:
    """Forget the history and start it at theta."""
    site.points, site.evaluated = [theta], [None]
    site.root = None


def recentering(old: BlockParameters, new: BlockParameters) -> Array:
    """Return the change of the centered intercept with the means, (mu_new - mu_old)'beta_new."""
    return np.array((new.mu - old.mu) @ new.beta)


def m_step(
    site: BlockState,
    theta: BlockParameters,
    factor: tuple[Floats, bool],
    z: Floats,
    missing: Floats,
    s2: float,
) -> tuple[BlockParameters, Floats, float]:
    """Local M-step: TWFL (6) for mu_k and Sigma_k, gradient (8) or local Newton for beta_k.

    Returns the image, the direction of beta (p,) before it is shortened, and the squared norm of the score in
    the complete-data information.
    """
    n, n_seen = site.n, site.n_seen
    beta, mu, Sigma = theta.beta, theta.mu, theta.Sigma
    w = Sigma @ beta
    z_mis, z2_mis, h_mis = missing
    n_mis = n - n_seen
    # Gradient of s2 times the expected complete-data log-likelihood: observed rows, then missing ones.
    g = s2 * (column_sums(site.X, z) - mu * z.sum() + w * (z2_mis - h_mis))
    # TWFL (6): missing rows are at their conditional mean, mu + w z.
    mu_new = mu + (site.s1 - n_seen * mu + w * z_mis) / n
    d = mu - mu_new
    cross = np.outer(d, w) * z_mis + np.outer(site.s1, mu_new) * -1.0
    scatter = site.S2 + n_seen * np.outer(mu_new, mu_new) + cross + cross.T
    # Their conditional covariance is Sigma - ww'/v, which missing rows contribute.
    scatter += n_mis * (Sigma + np.outer(d, d)) + np.outer(w, w) * (z2_mis - h_mis)
    Sigma_new = scatter / n
    # Without a rate, this is Newton's step with the Hessian n Sigma of this block: blocks are independent.
    direction = site.eta / n * g if site.eta else np.linalg.solve(n * Sigma_new, g)
    # Steps are scores times the inverse complete-data information: no derivative is needed.
    R = cho_solve(factor, Sigma_new - Sigma)
    score2 = (
        g @ cho_solve(factor, g) / (n * s2)
        + n * (mu_new - mu) @ cho_solve(factor, mu_new - mu)
        + 0.5 * n * np.sum(R * R.T)
    )
    return BlockParameters(beta + site.omega * direction, mu_new, Sigma_new), direction, float(score2)


def block_log_likelihood(site: BlockState, theta: BlockParameters, factor: tuple[Floats, bool]) -> float:
    """Log-likelihood of the observed rows at (mu, Sigma) minus its unrestricted maximum."""
    n = site.n_seen
    d = site.s1 / n - theta.mu
    S = site.S2 / n - np.outer(site.s1, site.s1) / n**2 + np.outer(d, d)
    log_det = 2.0 * np.log(np.diag(factor[0])).sum()
    p = len(theta.mu)
    return float(-0.5 * n * (log_det + np.trace(cho_solve(factor, S)) - site.log_det - p))


def largest_change(old: BlockParameters | None, new: BlockParameters, s2: float) -> float:
    """Largest change of any parameter, of standardized columns and relative to the residual deviation."""
    if old is None:
        return float("1e300")
    return float(
        max(
            np.abs(new.beta - old.beta).max() / np.sqrt(s2),
            np.abs(new.mu - old.mu).max(),
            np.abs(new.Sigma - old.Sigma).max(),
        )
    )


def whiten_move(site: BlockState, theta: BlockParameters, image: BlockParameters, s2: float) -> Floats:
    """Return image - theta in coordinates in which the complete-data information is the identity.

    The coordinates stay those of the history's first point, so that products of steps are comparable.
    """
    if site.root is None:
        site.root, site.s2_reference = np.linalg.inv(np.linalg.cholesky(theta.Sigma)), s2
    W, n = site.root, site.n
    return np.concatenate(
        [
            np.sqrt(n / site.s2_reference) * np.linalg.solve(W.T, image.beta - theta.beta),
            np.sqrt(n) * (W @ (image.mu - theta.mu)),
            np.sqrt(n / 2.0) * (W @ (image.Sigma - theta.Sigma) @ W.T).ravel(),
        ]
    )


def remember_m_step(site: BlockState, evaluated: EvaluatedPoint) -> None:
    """Append an image to the points; the first, bare point and those beyond the memory are dropped."""
    site.points.append(evaluated.image)
    site.evaluated.append(evaluated)
    if site.evaluated[0] is None or len(site.points) > site.memory + 1:
        del site.points[0], site.evaluated[0]


def move_products(site: BlockState) -> Floats:
    """Return inner products of the newest step with every remembered step."""
    newest = site.evaluated[-1]
    assert newest is not None
    return np.array([newest.move @ e.move for e in site.evaluated if e is not None])


# ----------------------------------------------------------------------------------------------------
# Steps of a site in the iterations of VFEM with a normal response.
#
# Notation of Tang, Wang, Feng and Li (TWFL): a site k holds x_i^k in R^{p_k} for n_k of n entities, beta_k,
# mu_k and Sigma_k; the active site holds y_i, a and s2. Columns are standardized at their site once; the
# maximum likelihood estimate is equivariant.
#
# Released while iterating: one linear predictor per entity, scalars of the iteration, and at the end the
# estimates. In the other direction, `z` is (y_i - E[y_i | observed blocks]) / v_g(i).
#
# Only sums over sites of linear predictors, log-likelihoods, squared scores, products of steps and
# recenterings are needed, and masks may hide each site's own. The following are needed by site, and are not
# masked: the scalars of its points (mu'beta and beta'Sigma beta, which are weighted by missing pattern), its
# largest change, and whether a point is admissible.
# change, and whether a point is admissible.


POINTS: Mapping[str, message.ArrayDeclaration] = {
    "linear_predictor": message.per_entity(
        "linear predictor x'beta of the site's block", maskable=True, optional=True
    ),
    "centers": message.control("products mu'beta of the points", 2, optional=True),
    "spreads": message.control("products beta'Sigma beta of the points", 3, optional=True),
}
ITERATION: Mapping[str, message.ArrayDeclaration] = {
    "inside": message.control("whether the point is admissible", 0),
    "log_likelihood": message.control("log-likelihood", 0, maskable=True, optional=True, wide=True),
    "score2": message.control("squared score norm", 0, maskable=True, optional=True, wide=True),
    "change": message.control("largest change of a parameter", 0, optional=True),
    "products": message.control("inner products of moves", maskable=True, optional=True, wide=True),
}
RECENTERING = message.control("move of the centered intercept", 0, maskable=True, optional=True)


@step(
    FAMILY,
    takes={
        **BLOCK_OPENING,
        "memory": message.control("memory of the acceleration", 0),
        "padded": message.control("whether linear predictors have zeros for missing entities", 0),
        "beta": message.control("starting coefficients", optional=True),
    },
    releases={
        **POINTS,
        "eigenvalues": declare_sums("extreme eigenvalues of the local covariance"),
    },
)
def start(
    data: SiteData,
    state: State,
    keep: Bools,
    rows: Ints,
    n: Array,
    filled: Array,
    memory: Array,
    padded: Array,
    beta: Array | None = None,
) -> dict[str, Array]:
    """Standardize the block and set the first point.

    `keep`, `rows`, `n` and `filled` are those of :func:`stage_block_state`; `memory` earlier points may be
    mixed. `padded`: linear predictors are sent for all n entities, zero where the site lacks them, because
    only then can they be added up under masks. `beta` (p,) are starting coefficients in the units of the
    data. Released: the first linear predictor and scalars, and the extreme eigenvalues of the local
    covariance.
    """
    site = stage_block_state(data, state, keep, rows, int(n), bool(filled), int(memory))
    if padded:
        message.check_allocation(data.name, int(n), site.X.size)
    site.padded = bool(padded)
    first = site.first_point(None if beta is None else np.asarray(beta, dtype=float) * site.scale)
    set_first_point(site, first)
    return describe_points(site) | {"eigenvalues": np.linalg.eigvalsh(first.Sigma)[[0, -1]]}


def describe_points(site: BlockState) -> dict[str, Array]:
    """Return the newest linear predictor, and the scalars for any mixture of the points.

    For weights c over the points, the coordinator needs mu'beta and t = beta'Sigma beta of the mixed
    parameters: sums of ``c_j c_l mu_j'beta_l`` and ``c_j c_l c_m beta_l'Sigma_j beta_m``. Points before the
    newest are stored as differences from it (whose own weight is then one), because with large weights of
    both signs the products of the points themselves would cancel.
    """
    *earlier, newest = site.points
    B = np.array([*[p.beta - newest.beta for p in earlier], newest.beta])
    MU = np.array([*[p.mu - newest.mu for p in earlier], newest.mu])
    S = np.array([*[p.Sigma - newest.Sigma for p in earlier], newest.Sigma])
    return {
        "linear_predictor": site.pad(row_dots(site.X, newest.beta)),
        "centers": MU @ B.T,
        "spreads": B @ S @ B.T,
    }


@step(
    FAMILY,
    "residuals set_rate shorten start step",
    takes={
        "weights": message.control("weights of the points"),
        "z": message.per_entity("standardized residual of the response", weighs="residuals"),
        "missing": message.aggregate("sums of z, z^2 and 1/v over entities the site lacks"),
        "s2": message.aggregate("residual variance", 0),
        "omega": message.control("step length", 0),
        "forget": message.control("whether to forget the previous evaluation", 0),
    },
    releases={**POINTS, **ITERATION, "recentering": RECENTERING},
    name="step",
)
def take_step(
    data: SiteData,
    state: State,
    weights: Floats,
    z: Floats,
    missing: Floats,
    s2: Array,
    omega: Array,
    forget: Array,
) -> dict[str, Array]:
    """Evaluate likelihood and score at a mixture of the points, and make the local M-step there.

    `weights` (q,) of the points sum to one; z (n_k,) are standardized residuals of the site's entities,
    `missing` (3,) the sums of z, z^2 and 1/v over those that it lacks, `omega` the length of the step of
    beta. `forget`: drop the previous evaluation first, which another site found inadmissible.

    Released: ``inside``, which is 0, without anything else, if the mixed Sigma has left the positive cone;
    otherwise the M-step's linear predictor and its scalars, the log-likelihood of the block minus its
    maximum, the squared score norm, the largest change, and the products of the newest step with the earlier
    ones.
    """
    site = block_state_of(state)
    message.check_lengths(data.name, z=(z, site.n_seen), missing=(missing, 3))
    state.report(site.weights(z, "residuals"))
    if forget:
        site.points, site.evaluated = site.previous
    # Another site may find the point inadmissible: this evaluation is then undone.
    site.previous = list(site.points), list(site.evaluated)
    site.omega = float(omega)
    theta = extrapolate(site.points, weights)
    try:
        # Weights of both signs may mix covariances to a matrix that is not a covariance.
        factor = cho_factor(theta.Sigma, lower=True)
    except np.linalg.LinAlgError:
        return {"inside": np.array(0)}
    change = largest_change(site.current, theta, float(s2))
    site.current, site.z = theta, z
    image, direction, score2 = m_step(site, theta, factor, z, missing, float(s2))
    remember_m_step(site, EvaluatedPoint(theta, image, direction, whiten_move(site, theta, image, float(s2))))
    return describe_points(site) | {
        "inside": np.array(1),
        "log_likelihood": np.array(block_log_likelihood(site, theta, factor)),
        "score2": np.array(score2),
        "change": np.array(change),
        "products": move_products(site),
        "recentering": recentering(theta, image),
    }


@step(
    FAMILY,
    "shorten step",
    takes={
        "point": message.control("point to return to", 0),
        "omega": message.control("step length", 0),
    },
    releases={**POINTS, "recentering": RECENTERING},
)
def shorten(data: SiteData, state: State, point: Array, omega: Array) -> dict[str, Array]:
    """Go back to an evaluated point (-1: that of the last call), and take a shorter step of beta from it."""
    site = block_state_of(state)
    site.base = base = site.evaluated[int(point)] if point >= 0 else site.base
    assert base is not None
    site.current = base.at
    beta = base.at.beta + float(omega) * base.direction
    image = BlockParameters(beta, base.image.mu, base.image.Sigma)
    set_first_point(site, image)
    return describe_points(site) | {"recentering": recentering(base.at, image)}


@step(FAMILY, "start start_response", takes={"eta": message.control("learning rate", 0)})
def set_rate(data: SiteData, state: State, eta: Array) -> dict[str, Array]:
    """Choose the gradient M-step, TWFL (8), with rate eta."""
    block_state_of(state).eta = float(eta)
    return {}


@step(
    FAMILY,
    "shorten step",
    releases={
        "beta": declare_sums("coefficients"),
        "mu": declare_sums("means"),
        "t": declare_sums("variance of the block's linear predictor", 0),
    },
)
def estimates(data: SiteData, state: State) -> dict[str, Array]:
    """Release the estimates of the last evaluated point, in the units of the data."""
    site = block_state_of(state)
    theta = site.estimate
    return {
        "beta": theta.beta / site.scale,
        "mu": site.shift + site.scale * theta.mu,
        "t": np.array(theta.beta @ (theta.Sigma @ theta.beta)),
    }


# ----------------------------------------------------------------------------------------------------
# Steps of the response holder in the iterations of VFEM: its start, residuals, fitted values.
#
# While iterating, it releases one standardized residual per entity, sums by missing pattern and scalars. If
# the coordinator is at this site, only the residuals that the sites receive leave it.


@step(FAMILY, takes=RESPONSE_OPENING, releases={"moments": declare_sums("mean and variance of the response")})
def start_response(data: SiteData, state: State, keep: Bools, code: Ints) -> dict[str, Array]:
    """Choose the entities of a fit, as :func:`choose_response`; release mean and variance of the response."""
    y = choose_response(data, state, keep, code)
    state.keep("vfem active", NormalResponse(y, code), len(y))
    if y.var() <= 0.0:
        raise EstimationError(
            f"{data.name}: the response is constant among the {len(y)} entities of this fit"
        )
    return {"moments": np.array([y.mean(), y.var()])}


@step(
    FAMILY,
    "deal_product residuals sem_predictor set_rate shorten start_response step",
    takes={
        "a": message.aggregate("centered intercept", 0),
        "s2": message.aggregate("residual variance", 0),
        "eta": message.per_entity("sum of the sites' linear predictors", weighs=""),
        "t_missing": message.control("variance of missing linear predictors, by pattern"),
    },
    releases={
        "z": message.per_entity("standardized residual of the response"),
        "z1": declare_sums("sum of z by pattern"),
        "z2": declare_sums("sum of z^2 by pattern"),
    },
)
def residuals(
    data: SiteData, state: State, a: Array, s2: Array, eta: Floats, t_missing: Floats
) -> dict[str, Array]:
    """E-step of the response: z_i = (y_i - a - eta_i) / v_g(i).

    eta (n,) is the sum of the sites' centered linear predictors over the blocks that an entity has,
    `t_missing` (G,) that of t_k over the sites that are missing in each pattern; v is t_missing plus s2.
    """
    active = normal_response_of(state)
    patterns = int(active.code.max()) + 1
    message.check_lengths(data.name, eta=(eta, len(active.y)), t_missing=(t_missing, patterns))
    active.a, active.eta, active.v = float(a), eta, float(s2) + t_missing
    active.z = (active.y - active.a - eta) / active.v[active.code]
    z1, z2 = (np.bincount(active.code, z, patterns) for z in (active.z, active.z**2))
    return {"z": active.z, "z1": z1, "z2": z2}


@step(
    FAMILY,
    "estimates residuals",
    releases={
        "fitted": message.per_entity("fitted values"),
        "residuals": message.per_entity("residuals"),
    },
)
def fitted(data: SiteData, state: State) -> dict[str, Array]:
    """Release fitted values and residuals, one per entity, to a coordinator at this site."""
    active = normal_response_of(state)
    values = active.a + active.eta
    return {"fitted": values, "residuals": active.y - values}
