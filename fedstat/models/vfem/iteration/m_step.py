"""The local M-step of VFEM: from a point to its image, and what tells how good the point was."""

from __future__ import annotations

import numpy as np
from scipy.linalg import cho_solve

from fedstat.kernels.rows import column_sums
from fedstat.models.vfem.blocks.client import Client, EvaluatedPoint, Theta
from fedstat.typing import Array, Floats


def mix(points: list[Theta], weights: Floats) -> Theta:
    """Affine combination of points."""
    return Theta(
        np.tensordot(weights, [p.beta for p in points], 1),
        np.tensordot(weights, [p.mu for p in points], 1),
        np.tensordot(weights, [p.Sigma for p in points], 1),
    )


def set_first_point(client: Client, theta: Theta) -> None:
    """Forget the history and start it at theta."""
    client.points, client.evaluated = [theta], [None]
    client.root = None


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

    Returns the image, the direction of beta (p,) before it is shortened, and the squared norm of the score in
    the complete-data information.
    """
    n, n_seen = client.n, client.n_seen
    beta, mu, Sigma = theta.beta, theta.mu, theta.Sigma
    w = Sigma @ beta
    z_mis, z2_mis, h_mis = missing
    n_mis = n - n_seen
    # Gradient of s2 times the expected complete-data log-likelihood: seen rows, then missing ones.
    g = s2 * (column_sums(client.X, z) - mu * z.sum() + w * (z2_mis - h_mis))
    # TWFL (6): missing rows stand at their conditional mean, mu + w z.
    mu_new = mu + (client.s1 - n_seen * mu + w * z_mis) / n
    d = mu - mu_new
    cross = np.outer(d, w) * z_mis + np.outer(client.s1, mu_new) * -1.0
    scatter = client.S2 + n_seen * np.outer(mu_new, mu_new) + cross + cross.T
    # Their conditional covariance is Sigma - ww'/v: missing rows bring it along.
    scatter += n_mis * (Sigma + np.outer(d, d)) + np.outer(w, w) * (z2_mis - h_mis)
    Sigma_new = scatter / n
    # Without a rate Newton's step, with the Hessian n Sigma of this block: blocks are independent.
    direction = client.eta / n * g if client.eta else np.linalg.solve(n * Sigma_new, g)
    # Moves are scores times the inverse complete-data information: no derivative is needed.
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


def remember(client: Client, evaluated: EvaluatedPoint) -> None:
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
