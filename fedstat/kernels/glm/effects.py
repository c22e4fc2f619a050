"""Sums over rows for marginal effects, and outer products of scores weighted by leverage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from fedstat.kernels.glm.distributions import LOGIT, DistributionSpec
from fedstat.kernels.glm.sums import Rows, in_domain, linear_predictor, row_means
from fedstat.kernels.row_products import weighted_sums
from fedstat.typing import Floats


@dataclass(frozen=True, slots=True, eq=False)
class EffectSums:
    """Sums over rows of derivatives of a mean, or its logarithm, by the linear predictor.

    `first` (q,) has the first derivative times a constant (q = 1), or times the constant and the columns (q =
    p + 1); `second` (q, p + 1) the second derivative times these, and times the constant and the columns.
    `inside` states whether all means are inside the family's domain.
    """

    first: Floats
    second: Floats
    inside: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class ChangeSums:
    """Sums over rows of the change of a mean, or its logarithm, between two linear predictors.

    `slope` (p + 1,) is the change of its derivative times a constant and the columns, `high` the derivative
    at the second predictor.
    """

    level: float
    slope: Floats
    high: float
    inside: bool = True


def mean_derivatives(eta: Floats, distribution: DistributionSpec, log: bool) -> tuple[Floats, Floats, Floats]:
    """Mean at a linear predictor (m,), or its logarithm, with first and second derivative."""
    link = distribution.make().link
    mu = np.asarray(link.inverse(eta), dtype=float)
    if distribution.loop == LOGIT:
        first = mu * (1.0 - mu)
        second = first * (1.0 - 2.0 * mu)
    else:
        first, second = link.inverse_deriv(eta), link.inverse_deriv2(eta)
    if not log:
        return mu, first, second
    ratio = first / mu
    return np.log(mu), ratio, second / mu - ratio**2


def effect_sums(
    X: Floats, eta: Floats, count: Floats, distribution: DistributionSpec, log: bool, products: bool
) -> EffectSums:
    """Sum over rows (m, p) with linear predictors and counts (m,); with `products` of all columns."""
    with np.errstate(all="ignore"):
        _, first, second = mean_derivatives(eta, distribution, log)
        Z = np.column_stack([np.ones(len(X)), X])
        left = Z if products else Z[:, :1]
        sums = EffectSums((count * first) @ left, left.T @ ((count * second)[:, None] * Z))
    finite = np.isfinite(sums.first).all() and np.isfinite(sums.second).all()
    return replace(sums, inside=bool(finite) and all_inside(eta, distribution))


def change_sums(
    X: Floats, low: Floats, high: Floats, count: Floats, distribution: DistributionSpec, log: bool
) -> ChangeSums:
    """Sum over rows (m, p) with two linear predictors (m,) each."""
    with np.errstate(all="ignore"):
        level, slope, end = changes_between(low, high, distribution, log)
        Z = np.column_stack([np.ones(len(X)), X])
        sums = ChangeSums(float(count @ level), (count * slope) @ Z, float(count @ end))
    finite = np.isfinite(sums.level) and np.isfinite(sums.slope).all() and np.isfinite(sums.high)
    inside = all_inside(low, distribution) and all_inside(high, distribution)
    return replace(sums, inside=bool(finite) and inside)


def changes_between(
    low: Floats, high: Floats, distribution: DistributionSpec, log: bool
) -> tuple[Floats, Floats, Floats]:
    """Return change of the mean, of its derivative, and the derivative at the second predictor: (m,) each."""
    (g0, a0, _), (g1, a1, _) = (mean_derivatives(eta, distribution, log) for eta in (low, high))
    return g1 - g0, a1 - a0, a1


def all_inside(eta: Floats, distribution: DistributionSpec) -> bool:
    """Whether the family has all means."""
    with np.errstate(all="ignore"):
        mu = np.asarray(distribution.make().link.inverse(eta), dtype=float)
    return bool(in_domain(eta, mu, distribution).all())


def leverages(rows: Rows, beta: Floats, distribution: DistributionSpec, inverse: Floats) -> Floats:
    """Leverage of each row, (m,), by the inverse (p, p) of the expected information of all rows.

    Diagonal of ``W^1/2 X (X'WX)^-1 X'W^1/2``; a row of frequency weight f represents f rows, and has the
    leverage of one of them.
    """
    with np.errstate(all="ignore"):
        at = row_means(rows, distribution, linear_predictor(rows, beta))
        weight = at.weight * at.expected
        if rows.freq is not None:
            weight = np.where(rows.freq > 0.0, weight / rows.freq, 0.0)
        return np.asarray(weight * np.einsum("ij,jk,ik->i", rows.X, inverse, rows.X, optimize=True))


def firth_residuals(rows: Rows, beta: Floats, distribution: DistributionSpec, inverse: Floats) -> Floats:
    """Leverage times one half less the mean of each row, (m,), for a logit.

    Their sum with the columns is the derivative of half the logarithm of the information's determinant (Firth
    1993; Heinze and Schemper 2002, equation 3).
    """
    mu = row_means(rows, distribution, linear_predictor(rows, beta)).mu
    return np.asarray(leverages(rows, beta, distribution, inverse) * (0.5 - mu))


def outer_products(
    chunks: Iterable[Rows],
    beta: Floats,
    distribution: DistributionSpec,
    inverse: Floats | None = None,
    power: int = 0,
) -> Floats | None:
    """Sum outer products of the rows' scores: (p, p); None where a mean is outside the family's domain.

    With the `inverse` information (p, p) they are divided by ``(1 - h)^power`` for a leverage h, and there is
    no sum where one is one: power 1 is the middle of HC2, 2 that of HC3 (MacKinnon and White 1985, equations
    12 and 13).
    """
    total = np.zeros((len(beta), len(beta)))
    for rows in (piece for chunk in chunks for piece in chunk.pieces()):
        with np.errstate(all="ignore"):
            at = row_means(rows, distribution, linear_predictor(rows, beta))
            square = at.squares(rows)
            inside = at.inside & np.isfinite(square)
            if inverse is not None:
                rest = 1.0 - leverages(rows, beta, distribution, inverse)
                inside, square = inside & (rest > LEAST_REST), square / rest**power
        if not inside.all():
            return None
        total += weighted_sums(rows.X, square, square)[1]
    return total


LEAST_REST = 1e-9
"""One minus the leverage above which a row counts as fitted exactly."""
