"""P-values of several tests, adjusted for their number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedstat.typing import Floats


def adjust(p_values: Sequence[float] | Floats, method: str = "holm") -> Floats:
    """Return adjusted p-values (n,) by "holm" (1979), "bonferroni" or "sidak"; NaN stays NaN, uncounted.

    As :func:`statsmodels.stats.multitest.multipletests`, which collects garbage at every call.
    """
    out = np.array(p_values, dtype=np.float64)
    order = np.argsort(out, kind="stable")  # NaN last
    order = order[: len(out) - np.count_nonzero(np.isnan(out))]
    p, n = out[order], len(order)
    if method == "holm":
        out[order] = np.minimum(np.maximum.accumulate(np.arange(n, 0, -1) * p), 1.0)
    else:
        out[order] = np.minimum(n * p, 1.0) if method == "bonferroni" else -np.expm1(n * np.log1p(-p))
    return out
