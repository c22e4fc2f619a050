"""Values that a response may have: of distributions and of losses of boosting, so a file below both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedstat.typing import Bools, Floats


@dataclass(frozen=True, slots=True)
class Support:
    """Values that a response may have: `holds` is (n,) -> (n,) of bool.

    The texts name them, and invalid ones.
    """

    holds: Callable[[Floats], Bools]
    expected: str
    otherwise: str


def integers(y: Floats) -> Bools:
    """Return which are nonnegative integers."""
    return np.asarray((y >= 0.0) & (y == np.round(y)) & np.isfinite(y))


REAL = Support(np.isfinite, "finite numbers", "that is not finite")
UNIT = Support(lambda y: (y >= 0.0) & (y <= 1.0), "shares from 0 to 1", "outside 0 to 1")
POSITIVE = Support(lambda y: (y > 0.0) & np.isfinite(y), "positive numbers", "that is not positive")
NOT_NEGATIVE = Support(
    lambda y: (y >= 0.0) & np.isfinite(y), "numbers from zero", "that is negative or not finite"
)
EVENTS = Support(lambda y: np.isin(y, (0.0, 1.0)), "zeros and ones (or true and false)", "other than 0 and 1")
COUNTS = Support(integers, "counts: whole numbers from zero", "that is not a whole number from zero")


def power_support(power: float) -> Support:
    """Return where a variance that is a power of the mean is that of a distribution (Jorgensen 1987)."""
    if power == 0.0:
        return REAL
    return POSITIVE if power >= 2.0 else NOT_NEGATIVE
