"""Covariance of the estimates of a normal law, with every parameter of it accounted for."""

from __future__ import annotations

import numpy as np

from fedstat.errors import EstimationError
from fedstat.inference.covariance import invert_information, symmetrise
from fedstat.models.vertical.covariance import client_order
from fedstat.models.vertical.law.derivatives import differentiate
from fedstat.models.vertical.law.fit import LawFit, not_determined
from fedstat.models.vertical.newton import solve_information
from fedstat.typing import Floats

MOST_WHOLE = 2_000
"""Parameters of which the whole covariance is kept."""


def law_covariance(fit: LawFit, *, expected: bool = False) -> Floats:
    """Covariance (d, d) of (a, s2, beta_1, mu_1, beta_2, ..., Q) in the units of the data.

    Of more than some sixty columns, the part without Q: all parameters are accounted for, and the rest, which
    only predictions for entities that lack columns need, would take as long again as the fit.

    The inverse of the observed information, or with `expected` of that of data which are missing completely
    at random and follow the law. An EstimationError where it is not positive definite.
    """
    information = differentiate(fit.moments, fit.point, fit.moves, expected=expected).information
    return inverted(fit, information)


def inverted(fit: LawFit, information: Floats, *, scale: bool = True) -> Floats:
    """Invert an information (d, d) of a law; see above. Without `scale` no residual variance is estimated.

    Its place is then zero, in both.
    """
    moments = fit.moments
    owners = [moments.clients[k] for k in moments.owner]
    columns = [f"{name} ({client})" for name, client in zip(moments.names, owners, strict=True)]
    i, j = fit.moves.entries
    pairs = [f"covariance of {columns[a]} and {columns[b]}" for a, b in zip(i, j, strict=True)]
    means = [f"mean of {column}" for column in columns]
    names = np.array(["Intercept", "residual variance", *columns, *means, *pairs])
    free = np.ones(len(names), dtype=bool)
    free[1] = scale
    information, head = information[np.ix_(free, free)], 1 + int(scale) + 2 * len(columns)
    if len(information) > MOST_WHOLE:
        cov = leading_inverse(fit, information, head)
    else:
        cov = invert_information(information, names[free].tolist())
    if not scale:
        cov = np.insert(np.insert(cov, 1, 0.0, axis=0), 1, 0.0, axis=1)
    return in_psi(fit, cov)


def leading_inverse(fit: LawFit, information: Floats, head: int) -> Floats:
    """First rows and columns of the inverse, at the cost of one factor and no eigenvalues."""
    try:
        columns = solve_information(information, np.eye(len(information), head))
    except np.linalg.LinAlgError:
        raise EstimationError(not_determined(fit.moments)) from None
    return symmetrise(columns[:head])[0]


def in_psi(fit: LawFit, cov: Floats) -> Floats:
    """Bring a covariance of (a, s2, beta, mu, Q) of standardised columns to institution order and units."""
    moments = fit.moments
    i, j = fit.moves.entries
    x, y = moments.scale[:-1], moments.scale[-1]
    factor = np.concatenate([[y, y**2], y / x, x, 1.0 / (x[i] * x[j])])
    head = client_order(moments)
    order, factor = [*head, *range(len(head), len(cov))], factor[: len(cov)]
    return np.asarray((cov * np.outer(factor, factor))[np.ix_(order, order)])
