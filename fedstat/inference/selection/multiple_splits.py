"""P-values of many random splits as one, with control of any false rejection."""

from __future__ import annotations

import numpy as np

from fedstat.errors import EstimationError
from fedstat.typing import Floats

SMALLEST_QUANTILE = 0.05


def aggregate_splits(p_values: Floats, smallest: float = SMALLEST_QUANTILE) -> Floats:
    """Return a p-value for each column from those of B splits, (B, p) (Meinshausen et al. 2009, eq. 2.3).

    They are adjusted within each split for the columns that it selected, and 1 for those that it did not.
    ``(1 - log g_min) inf_g Q(g) / g`` over g from `smallest` to 1, at most 1, Q being the quantile over
    splits: rejecting those of at most alpha makes any false rejection with probability alpha at most.

    Meinshausen, N., Meier, L. and Buehlmann, P. (2009). p-values for high-dimensional regression. Journal of
    the American Statistical Association 104, 1671-1681. doi:10.1198/jasa.2009.tm08647.
    """
    if p_values.ndim != 2 or not len(p_values) or not 0.0 < smallest < 1.0:
        raise EstimationError(
            f"expected p-values (B, p) of one split or more and a quantile in (0, 1); received an array of "
            f"shape {p_values.shape} and {smallest!r}"
        )
    B = len(p_values)
    shares = np.arange(1, B + 1) / B
    sizes = np.sort(p_values, axis=0) / shares[:, None]
    # The infimum over quantiles is reached at one of the B order statistics.
    best = sizes[shares >= smallest].min(axis=0)
    return np.asarray(np.minimum((1.0 - np.log(smallest)) * best, 1.0))
