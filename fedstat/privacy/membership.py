"""What a budget lets be told about who is behind a release."""

from __future__ import annotations

import math

from scipy.special import ndtr


def largest_auc(rho: float) -> float:
    """Area under the ROC curve that no test exceeds which asks whether a record is behind a release.

    Noise on sums at rho is as hard to see through as N(0, 1) against N(mu, 1), mu = sqrt(2 rho) (Dong, Roth
    and Su 2022), of which the area is Phi(mu / sqrt(2)). Discrete noise of any use differs by far less than
    is printed.
    """
    return float(ndtr(math.sqrt(rho)))
