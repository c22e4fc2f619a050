"""What one institution computes in the iterations of VFEM.

Notation of Tang, Wang, Feng and Li (TWFL): a client k holds x_i^k in R^{p_k} for n_k of n entities,
beta_k, mu_k and Sigma_k; the active institution holds y_i, a and s2. Columns are standardised at their
institution once; the maximum likelihood estimate moves along with them.

Released while iterating: one linear predictor per entity, scalars of the iteration, and at the end the
estimates. Under `z`, the other direction, stands (y_i - E[y_i | seen blocks]) / v_g(i).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from fedstat.errors import EstimationError, MessageError
from fedstat.federation.design import block_of
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.federation.site import SiteData, State
from fedstat.kernels.rows import column_sums, gram, row_dots
from fedstat.typing import Array, Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Theta:
    """One client's parameters: beta (p,), mu (p,), Sigma (p, p), of standardised columns."""

    beta: Floats
    mu: Floats
    Sigma: Floats


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A point at which the likelihood was evaluated, its M-step, and the direction of beta."""

    at: Theta
    image: Theta
    direction: Floats
    move: Floats


@dataclass(slots=True)
class Client:
    """One institution's block during a fit.

    Parameters
    ----------
    X : (n_k, p) array
        Standardised columns of the entities it has.
    rows : (n_k,) array of int
        Positions of those entities among the n of the fit, ascending.
    n : int
        Entities of the fit.
    shift, scale : (p,) arrays
        Mean and standard deviation of the columns, in the units of the data.
    """

    X: Floats
    rows: Ints
    n: int
    shift: Floats
    scale: Floats
    s1: Floats
    S2: Floats
    log_det: float
    memory: int
    omega: float = 1.0
    eta: float = 0.0
    current: Theta | None = None
    z: Floats = field(default_factory=lambda: np.empty(0))
    points: list[Theta] = field(default_factory=list)
    evaluated: list[Evaluated | None] = field(default_factory=list)
    base: Evaluated | None = None
    previous: tuple[list[Theta], list[Evaluated | None]] = field(default_factory=lambda: ([], []))
    root: Floats | None = None
    s2_reference: float = 1.0
    staged: dict[str, Array] = field(default_factory=dict)

    @property
    def n_seen(self) -> int:
        """Entities whose block counts as seen."""
        return len(self.X)


def client_of(data: SiteData, state: State) -> Client:
    """Return this fit's client, or say that the fit was not started here."""
    if "vfem" not in state:
        raise EstimationError(f"{data.name}: this fit was not started here; ask 'start' first")
    client: Client = state.use("vfem")
    return client


def start(
    data: SiteData,
    state: State,
    keep: Bools,
    rows: Ints,
    n: Array,
    filled: Array,
    memory: Array,
    beta: Array | None = None,
) -> dict[str, Array]:
    """Standardise the block and set the first point.

    Parameters
    ----------
    keep : (n_seen,) bool
        Rows of the opened block that take part.
    rows : (n_k,) int
        Their positions among the n entities of the fit.
    n : int
        Entities of the fit.
    filled : bool
        Mean-impute the entities that the client does not have (the "impute" baseline): from here on
        the client has them all.
    memory : int
        Number of earlier points that the acceleration may mix.
    beta : (p,) array, optional
        Starting coefficients in the units of the data; zero by default.

    Returns
    -------
    dict
        The first linear predictor and scalars, and the extreme eigenvalues of the local covariance.
    """
    client = stage_client(data, state, keep, rows, int(n), bool(filled), int(memory))
    mean = client.s1 / client.n_seen
    S = client.S2 / client.n_seen - np.outer(mean, mean)
    first = np.zeros(len(mean)) if beta is None else np.asarray(beta, dtype=float) * client.scale
    set_first_point(client, Theta(first, mean, S))
    return describe_points(client) | {"eigenvalues": np.linalg.eigvalsh(S)[[0, -1]]}


def stage_client(
    data: SiteData, state: State, keep: Bools, rows: Ints, n: int, filled: bool, memory: int
) -> Client:
    """Standardise the block's rows of a fit, and keep them; arguments as for :func:`start`."""
    block = block_of(data, state)
    check_lengths(data.name, keep=(keep, len(block.X)), rows=(rows, int(np.count_nonzero(keep))))
    if len(rows) and (rows[0] < 0 or rows[-1] >= n or (np.diff(rows) <= 0).any()):
        raise MessageError(f"{data.name}: array 'rows' must ascend from 0 to below {n}")
    X = np.ascontiguousarray(block.X[keep])
    n_own = len(X)
    if n_own < 2:
        raise EstimationError(
            f"{data.name}: {n_own} of the entities of this fit have its block; two are the least"
        )
    shift, scale = X.mean(axis=0), X.std(axis=0)
    X -= shift
    check_spread(data.name, block.spec.names, X, shift, scale)
    X /= scale
    if filled:
        X, rows = fill_with_mean(X, rows, n)
    client = summarise(X, rows, n, shift, scale, memory)
    state.keep("vfem", client, n_own)
    return client


def fill_with_mean(X: Floats, rows: Ints, n: int) -> tuple[Floats, Ints]:
    """Give every entity that the client lacks the mean, which is zero after standardising."""
    filled = np.zeros((n, X.shape[1]))
    filled[rows] = X
    return filled, np.arange(n)


def summarise(X: Floats, rows: Ints, n: int, shift: Floats, scale: Floats, memory: int) -> Client:
    """Compute the sums that stay fixed during a fit."""
    ones = np.ones(len(X))
    s1, S2 = column_sums(X, ones), gram(X, ones)
    S = S2 / len(X) - np.outer(s1, s1) / len(X) ** 2
    return Client(X, rows, n, shift, scale, s1, S2, float(np.linalg.slogdet(S)[1]), memory)


def check_spread(name: str, columns: tuple[str, ...], centred: Floats, shift: Floats, scale: Floats) -> None:
    """Refuse a block whose covariance is singular on the entities of this fit.

    Raises
    ------
    EstimationError
        Names the columns.
    """
    flat = scale <= 1e-12 * np.maximum(1.0, np.abs(shift))
    if flat.any():
        names = [c for c, bad in zip(columns, flat, strict=True) if bad]
        raise EstimationError(
            f"{name}: constant among the {len(centred)} entities of this fit: {', '.join(names)}; drop them"
        )
    correlation = gram(centred / scale, np.ones(len(centred))) / len(centred)
    eigenvalues, vectors = np.linalg.eigh(correlation)
    if eigenvalues[0] < 1e-10 * eigenvalues[-1]:
        names = [c for c, v in zip(columns, vectors[:, 0], strict=True) if abs(v) > 1e-4]
        raise EstimationError(
            f"{name}: collinear among the {len(centred)} entities of this fit: {', '.join(names)}; "
            "drop one of them"
        )


def set_first_point(client: Client, theta: Theta) -> None:
    """Forget the history and start it at theta."""
    client.points, client.evaluated = [theta], [None]
    client.root = None


def describe_points(client: Client) -> dict[str, Array]:
    """Return the newest linear predictor, and the scalars for any mixture of the points.

    For weights c over the points the coordinator needs mu'beta and t = beta'Sigma beta of the mixed
    parameters: sums of ``c_j c_l mu_j'beta_l`` and ``c_j c_l c_m beta_l'Sigma_j beta_m``. Points before
    the newest stand as differences from it (whose own weight is then one): with large weights of both
    signs the products of the points themselves would cancel.
    """
    *earlier, newest = client.points
    B = np.array([*[p.beta - newest.beta for p in earlier], newest.beta])
    MU = np.array([*[p.mu - newest.mu for p in earlier], newest.mu])
    S = np.array([*[p.Sigma - newest.Sigma for p in earlier], newest.Sigma])
    return {
        "linear_predictor": row_dots(client.X, newest.beta),
        "centres": MU @ B.T,
        "spreads": B @ S @ B.T,
    }


def mix(points: list[Theta], weights: Floats) -> Theta:
    """Affine combination of points."""
    return Theta(
        np.tensordot(weights, [p.beta for p in points], 1),
        np.tensordot(weights, [p.mu for p in points], 1),
        np.tensordot(weights, [p.Sigma for p in points], 1),
    )


def step(
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

    Parameters
    ----------
    weights : (q,) array
        Of the points; they sum to one.
    z : (n_k,) array
        Standardised residuals of the client's entities.
    missing : (3,) array
        Sums of z, z^2 and 1/v over the entities that the client does not have.
    s2 : float
        Residual variance.
    omega : float
        Length of the step of beta.
    forget : bool
        Whether to forget the previous evaluation first, because another client found it inadmissible.

    Returns
    -------
    dict
        ``inside`` is 0, and nothing else comes, when the mixed Sigma has left the positive cone.
        Otherwise the M-step's linear predictor, its scalars, the log-likelihood of the block less its
        maximum, the squared score norm, the largest change, and the products of the newest move
        with the earlier ones.
    """
    client = client_of(data, state)
    check_lengths(data.name, z=(z, client.n_seen), missing=(missing, 3))
    if forget:
        client.points, client.evaluated = client.previous
    client.previous = list(client.points), list(client.evaluated)
    client.omega = float(omega)
    theta = mix(client.points, weights)
    try:
        factor = cho_factor(theta.Sigma, lower=True)
    except np.linalg.LinAlgError:
        return {"inside": np.array(0)}
    change = largest_change(client.current, theta, float(s2))
    client.current, client.z = theta, z
    image, direction, score2 = m_step(client, theta, factor, z, missing, float(s2))
    remember(client, Evaluated(theta, image, direction, whiten_move(client, theta, image, float(s2))))
    return describe_points(client) | {
        "inside": np.array(1),
        "log_likelihood": np.array(block_log_likelihood(client, theta, factor)),
        "score2": np.array(score2),
        "change": np.array(change),
        "products": move_products(client),
        "recentring": recentring(theta, image),
    }


def recentring(old: Theta, new: Theta) -> Array:
    """By how much the centred intercept moves with the means, (mu_new - mu_old)'beta_new."""
    return np.array((new.mu - old.mu) @ new.beta)


def m_step(
    client: Client,
    theta: Theta,
    factor: tuple[Floats, bool],
    z: Floats,
    missing: Floats,
    s2: float,
) -> tuple[Theta, Floats, float]:
    """Local M-step: TWFL (6) for mu_k and Sigma_k, gradient (8) or local Newton for beta_k.

    Returns
    -------
    theta : Theta
        The image.
    direction : (p,) array
        Of beta, before it is shortened.
    score2 : float
        Squared norm of the score in the complete-data information.
    """
    n, n_seen = client.n, client.n_seen
    beta, mu, Sigma = theta.beta, theta.mu, theta.Sigma
    w = Sigma @ beta
    z_mis, z2_mis, h_mis = missing
    n_mis = n - n_seen
    g = s2 * (column_sums(client.X, z) - mu * z.sum() + w * (z2_mis - h_mis))
    mu_new = mu + (client.s1 - n_seen * mu + w * z_mis) / n
    d = mu - mu_new
    cross = np.outer(d, w) * z_mis + np.outer(client.s1, mu_new) * -1.0
    scatter = client.S2 + n_seen * np.outer(mu_new, mu_new) + cross + cross.T
    scatter += n_mis * (Sigma + np.outer(d, d)) + np.outer(w, w) * (z2_mis - h_mis)
    Sigma_new = scatter / n
    direction = client.eta / n * g if client.eta else np.linalg.solve(n * Sigma_new, g)
    R = cho_solve(factor, Sigma_new - Sigma)
    score2 = (
        g @ cho_solve(factor, g) / (n * s2)
        + n * (mu_new - mu) @ cho_solve(factor, mu_new - mu)
        + 0.5 * n * np.sum(R * R.T)
    )
    return Theta(beta + client.omega * direction, mu_new, Sigma_new), direction, float(score2)


def block_log_likelihood(client: Client, theta: Theta, factor: tuple[Floats, bool]) -> float:
    """Log-likelihood of the seen rows at (mu, Sigma) less its unrestricted maximum."""
    n = client.n_seen
    d = client.s1 / n - theta.mu
    S = client.S2 / n - np.outer(client.s1, client.s1) / n**2 + np.outer(d, d)
    log_det = 2.0 * np.log(np.diag(factor[0])).sum()
    p = len(theta.mu)
    return float(-0.5 * n * (log_det + np.trace(cho_solve(factor, S)) - client.log_det - p))


def largest_change(old: Theta | None, new: Theta, s2: float) -> float:
    """Largest change of any parameter, of standardised columns and relative to the residual deviation."""
    if old is None:
        return float("1e300")
    return float(
        max(
            np.abs(new.beta - old.beta).max() / np.sqrt(s2),
            np.abs(new.mu - old.mu).max(),
            np.abs(new.Sigma - old.Sigma).max(),
        )
    )


def whiten_move(client: Client, theta: Theta, image: Theta, s2: float) -> Floats:
    """Return image - theta in coordinates in which the complete-data information is the identity.

    The coordinates stay those of the history's first point, so that products of moves are comparable.
    """
    if client.root is None:
        client.root, client.s2_reference = np.linalg.inv(np.linalg.cholesky(theta.Sigma)), s2
    W, n = client.root, client.n
    return np.concatenate(
        [
            np.sqrt(n / client.s2_reference) * np.linalg.solve(W.T, image.beta - theta.beta),
            np.sqrt(n) * (W @ (image.mu - theta.mu)),
            np.sqrt(n / 2.0) * (W @ (image.Sigma - theta.Sigma) @ W.T).ravel(),
        ]
    )


def remember(client: Client, evaluated: Evaluated) -> None:
    """Append an image to the points; the first, bare point and those beyond the memory are dropped."""
    client.points.append(evaluated.image)
    client.evaluated.append(evaluated)
    if client.evaluated[0] is None or len(client.points) > client.memory + 1:
        del client.points[0], client.evaluated[0]


def move_products(client: Client) -> Floats:
    """Inner products of the newest move with every move that is remembered."""
    newest = client.evaluated[-1]
    assert newest is not None
    return np.array([newest.move @ e.move for e in client.evaluated if e is not None])


def shorten(data: SiteData, state: State, point: Array, omega: Array) -> dict[str, Array]:
    """Go back to an evaluated point and leave it by a shorter step.

    Parameters
    ----------
    point : int
        Which of the remembered points; -1 for that of the last call.
    omega : float
        Length of the step of beta.
    """
    client = client_of(data, state)
    client.base = base = client.evaluated[int(point)] if point >= 0 else client.base
    assert base is not None
    client.current = base.at
    beta = base.at.beta + float(omega) * base.direction
    image = Theta(beta, base.image.mu, base.image.Sigma)
    set_first_point(client, image)
    return describe_points(client) | {"recentring": recentring(base.at, image)}


def set_rate(data: SiteData, state: State, eta: Array) -> dict[str, Array]:
    """Choose the gradient M-step, TWFL (8), with rate eta."""
    client_of(data, state).eta = float(eta)
    return {}


def estimates(data: SiteData, state: State) -> dict[str, Array]:
    """Release the estimates of the last evaluated point, in the units of the data."""
    client = client_of(data, state)
    theta = client.current
    assert theta is not None
    w = theta.Sigma @ theta.beta
    return {
        "beta": theta.beta / client.scale,
        "mu": client.shift + client.scale * theta.mu,
        "t": np.array(theta.beta @ w),
    }


POINTS: Mapping[str, Declared] = {
    "linear_predictor": Declared(
        "per entity", "linear predictor x'beta of the client's block", maskable=True, optional=True
    ),
    "centres": Declared("control", "products mu'beta of the points", 2, optional=True),
    "spreads": Declared("control", "products beta'Sigma beta of the points", 3, optional=True),
}
ITERATION: Mapping[str, Declared] = {
    "inside": Declared("control", "whether the point is admissible", 0),
    "log_likelihood": Declared("control", "log-likelihood", 0, maskable=True, optional=True),
    "score2": Declared("control", "squared score norm", 0, maskable=True, optional=True),
    "change": Declared("control", "largest change of a parameter", 0, optional=True),
    "products": Declared("control", "inner products of moves", maskable=True, optional=True),
}
RECENTRING = Declared("control", "move of the centred intercept", 0, maskable=True, optional=True)

STEPS: Mapping[str, Step] = {
    "start": Step(
        start,
        {
            "keep": Declared("presence", "which of the client's entities take part", dtype="bool"),
            "rows": Declared("presence", "positions of its entities among those of the fit", dtype="int64"),
            "n": Declared("control", "number of entities", 0),
            "filled": Declared("control", "whether missing blocks count as their mean", 0),
            "memory": Declared("control", "memory of the acceleration", 0),
            "beta": Declared("control", "starting coefficients", optional=True),
        },
        {**POINTS, "eigenvalues": Declared("aggregate", "extreme eigenvalues of the local covariance")},
    ),
    "set_rate": Step(set_rate, {"eta": Declared("control", "learning rate", 0)}),
    "step": Step(
        step,
        {
            "weights": Declared("control", "weights of the points"),
            "z": Declared("per entity", "standardised residual of the response"),
            "missing": Declared("aggregate", "sums of z, z^2 and 1/v over entities the client lacks"),
            "s2": Declared("aggregate", "residual variance", 0),
            "omega": Declared("control", "step length", 0),
            "forget": Declared("control", "whether to forget the previous evaluation", 0),
        },
        {**POINTS, **ITERATION, "recentring": RECENTRING},
    ),
    "shorten": Step(
        shorten,
        {
            "point": Declared("control", "point to return to", 0),
            "omega": Declared("control", "step length", 0),
        },
        {**POINTS, "recentring": RECENTRING},
    ),
    "estimates": Step(
        estimates,
        gives={
            "beta": Declared("aggregate", "coefficients"),
            "mu": Declared("aggregate", "means"),
            "t": Declared("aggregate", "variance of the block's linear predictor", 0),
        },
    ),
}
