"""Zero-concentrated differential privacy (zCDP) in exact arithmetic: the cost of noise, and budgets.

Discrete Gaussian noise of variance s^2 on integers of which one replaced record changes the Euclidean length
by at most D has rho-zCDP with rho = D^2 / (2 s^2), in any dimension (Canonne, Kamath and Steinke 2020,
theorem 4). Costs of releases add up, also where each is chosen after the ones before; and a rule that refuses
whatever would exceed a total keeps to it (Whitehouse, Ramdas, Rogers and Wu 2023). So costs are fractions,
their sum is exact, and a comparison with the total cannot be lost to rounding.

Between rho and (epsilon, delta) stands, for every order a > 1 (proposition 12 of the first),

    log delta = (a - 1)(a rho - epsilon) - log(a - 1) + a log(1 - 1/a)

which is solved for epsilon or for rho as it stands. The order is searched for in floating point, and any is
valid; the values at it are computed to 50 digits and rounded to the safe side.

References
----------
Canonne, C., Kamath, G. and Steinke, T. (2020). The discrete Gaussian for differential privacy. NeurIPS.
arXiv 2004.00010.
Kairouz, P., Liu, Z. and Steinke, T. (2021). The distributed discrete Gaussian mechanism for federated
learning with secure aggregation. ICML. arXiv 2102.06387.
Whitehouse, J., Ramdas, A., Rogers, R. and Wu, S. (2023). Fully-adaptive composition in differential privacy.
ICML. arXiv 2203.05481.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from fractions import Fraction
from functools import cache

from fedstat.errors import ModelError

GRID = 2**64
DIGITS, GUARD = 50, 45
"""Digits of the arithmetic, and those that are kept, rounded to the safe side."""


def rho_of_noise(squared: Fraction | int, variance: Fraction) -> Fraction:
    """Return what a release costs.

    `squared` is the square of its sensitivity, in units of the integers that the noise is added to, and
    `variance` the parameter of the noise. A ModelError where one of these is out of its range.
    """
    if not (squared >= 0 and variance > 0):
        raise ModelError(f"expected a sensitivity of zero or more and noise, received {squared}, {variance}")
    return Fraction(squared) / (2 * variance)


LEAST_SHARE = 16
"""Least variance of a share of noise; see :func:`rho_of_shares`."""


def share_of_noise(variance: Fraction | int, shares: int) -> Fraction:
    """Return the variance of one of a number of shares that leave a variance together."""
    return (
        Fraction(variance)
        if shares < 2
        else Fraction(max(LEAST_SHARE, math.ceil(Fraction(variance) / shares)))
    )


def rho_of_shares(squared: Fraction | int, variance: Fraction, shares: int) -> Fraction:
    """Return what a sum costs that has independent discrete Gaussian noise of one variance from each site.

    A sum of m discrete Gaussians of variance s^2 is nearly one of variance m s^2: with D the sensitivity in d
    dimensions, rho is at most (D / (m^1/2 s) + tau d^1/2)^2 / 2, where
    tau = 10 sum_{k < m} exp(-2 pi^2 s^2 k / (k + 1)) (Kairouz, Liu and Steinke 2021, theorem 1). With
    s^2 >= 16, tau is below 10^-67 m, so that one unit of the grid is more than the term of tau for any D, d
    and m in use.
    """
    if shares > 1 and variance < LEAST_SHARE:
        raise ModelError(f"expected a share of noise with a variance of at least {LEAST_SHARE}")
    return rho_of_noise(squared, variance * shares) + (Fraction(1, GRID) if shares > 1 else 0)


def round_to_grid(rho: Fraction, up: bool = False) -> Fraction:
    """Round a cost to a multiple of 2^-64: down for a request, up for a charge.

    Sums of any fractions would get longer with every one.
    """
    return Fraction((math.ceil if up else math.floor)(rho * GRID), GRID)


def epsilon_of_zcdp(rho: Fraction | float, delta: float) -> float:
    """Return the epsilon that rho-zCDP has at a delta in (0, 1), rounded up.

    A ModelError where an argument is out of its range.
    """
    _check(delta, rho)
    if rho == 0:
        return 0.0

    def at(log_order: float) -> float:
        a = 1.0 + math.exp(log_order)
        return a * float(rho) + (a * math.log1p(-1.0 / a) - log_order - math.log(delta)) / (a - 1.0)

    # The best order is near 1 + sqrt(log(1/delta) / rho).
    a = _order(at, 0.5 * math.log(-math.log(delta) / max(float(rho), 1e-18)))
    with localcontext(prec=DIGITS):
        exact = Fraction(rho)
        wanted = a * _decimal(exact) + (_constant(a) - Decimal(delta).ln()) / (a - 1)
        up = float(_rounded(wanted, ROUND_CEILING))
    # A float nearest to it may be below it.
    return max(0.0, math.nextafter(up, math.inf))


@cache
def rho_of_budget(epsilon: float, delta: float) -> Fraction:
    """Return the largest rho whose zCDP keeps to an epsilon and delta, rounded down; 0 at a delta of 0.

    Without a delta no Gaussian noise is enough. A ModelError where an argument is out of its range.
    """
    if delta == 0.0:
        return Fraction(0)
    _check(delta, epsilon)

    def at(log_order: float) -> float:
        a = 1.0 + math.exp(log_order)
        gained = (math.log(delta) + log_order - a * math.log1p(-1.0 / a)) / (a - 1.0)
        return -(epsilon + gained) / a

    # Since epsilon is about x^2 + 2 x r at rho = x^2, r^2 = log(1/delta), and the order there 1 + r/x.
    r = math.sqrt(-math.log(delta))
    a = _order(at, math.log(r * (math.sqrt(r * r + epsilon) + r) / max(epsilon, 1e-9)))
    with localcontext(prec=DIGITS):
        rho = (Decimal(epsilon) + (Decimal(delta).ln() - _constant(a)) / (a - 1)) / a
        return max(Fraction(0), Fraction(_rounded(rho, ROUND_FLOOR)))


def _order(at: Callable[[float], float], middle: float) -> Decimal:
    """Find the order a > 1 at which a bound is best."""
    from scipy.optimize import minimize_scalar  # noqa: PLC0415, half of the import time of a policy

    bounds = (middle - 12.0, middle + 12.0)
    found = minimize_scalar(at, bounds=bounds, method="bounded", options={"xatol": 1e-9})
    return 1 + Decimal(math.exp(found.x))


def _constant(a: Decimal) -> Decimal:
    """Return a log(1 - 1/a) - log(a - 1)."""
    return a * (1 - 1 / a).ln() - (a - 1).ln()


def _decimal(value: Fraction) -> Decimal:
    return Decimal(value.numerator) / Decimal(value.denominator)


def _rounded(value: Decimal, rounding: str) -> Decimal:
    """Keep fewer digits than were computed, rounded one way."""
    with localcontext(prec=GUARD, rounding=rounding):
        return +value


def _check(delta: float, other: Fraction | float) -> None:
    if not 0.0 < delta < 1.0:
        raise ModelError(f"delta: expected a number between 0 and 1, received {delta!r}")
    if not 0 <= other < math.inf:
        raise ModelError(f"expected a finite number of zero or more, received {other!r}")
