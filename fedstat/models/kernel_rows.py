"""A site's rows in the form of the kernels."""

from __future__ import annotations

import numpy as np

from fedstat.federation.rows import WholeRows
from fedstat.kernels.glm import Rows
from fedstat.typing import Floats


def glm_rows(rows: WholeRows, X: Floats) -> Rows:
    """Put a chunk in the form of the kernels; two columns of counts become proportions and trials."""
    y, trials = rows.y, None
    if y.ndim == 2:
        trials = y.sum(axis=1)
        y = np.divide(y[:, 0], trials, out=np.zeros(len(y)), where=trials > 0.0)
    weights = rows.weights
    return Rows(X, y, rows.offset, weights.get("freq_weights"), weights.get("var_weights"), trials)
