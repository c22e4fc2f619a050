"""Covariance of the estimates of a normal law, with every parameter of it accounted for."""

from __future__ import annotations

import numpy as np

from fedstat.inference.covariance import invert_information
from fedstat.models.vertical.covariance import client_order
from fedstat.models.vertical.law.derivatives import differentiate
from fedstat.models.vertical.law.fit import LawFit
from fedstat.typing import Floats


def law_covariance(fit: LawFit, *, expected: bool = False) -> Floats:
    """Covariance (d, d) of (a, s2, beta_1, mu_1, beta_2, ..., Q) in the units of the data.

    The inverse of the observed information, or with `expected` of that of data which are missing completely
    at random and follow the law. An EstimationError where it is not positive definite.
    """
    moments = fit.moments
    information = differentiate(moments, fit.point, fit.moves, expected=expected).information
    owners = [moments.clients[k] for k in moments.owner]
    columns = [f"{name} ({client})" for name, client in zip(moments.names, owners, strict=True)]
    i, j = np.nonzero(np.triu(fit.moves.edges))
    pairs = [f"covariance of {columns[a]} and {columns[b]}" for a, b in zip(i, j, strict=True)]
    means = [f"mean of {column}" for column in columns]
    names = ["Intercept", "residual variance", *columns, *means, *pairs]
    return in_psi(fit, invert_information(information, names))


def in_psi(fit: LawFit, cov: Floats) -> Floats:
    """Bring a covariance of (a, s2, beta, mu, Q) of standardised columns to client order and units."""
    moments = fit.moments
    i, j = np.nonzero(np.triu(fit.moves.edges))
    x, y = moments.scale[:-1], moments.scale[-1]
    factor = np.concatenate([[y, y**2], y / x, x, 1.0 / (x[i] * x[j])])
    head = client_order(moments)
    order = [*head, *range(len(head), len(cov))]
    return np.asarray((cov * np.outer(factor, factor))[np.ix_(order, order)])
