"""A site's rows in the form of the kernels."""

from __future__ import annotations

import numpy as np

from fedstat.errors import DesignError
from fedstat.federation.rows import WholeRows
from fedstat.kernels.glm import Rows, check_response
from fedstat.kernels.glm_family import FamilySpec
from fedstat.typing import Floats


def glm_rows(rows: WholeRows, X: Floats) -> Rows:
    """Put a chunk in the form of the kernels; two columns of counts become proportions and trials."""
    y, trials = rows.y, None
    if y.ndim == 2:
        trials = y.sum(axis=1)
        y = np.divide(y[:, 0], trials, out=np.zeros(len(y)), where=trials > 0.0)
    weights = rows.weights
    return Rows(X, y, rows.offset, weights.get("freq_weights"), weights.get("var_weights"), trials)


def require_response(site: str, rows: Rows, family: FamilySpec, response: str) -> None:
    """Require responses that the family can have.

    Raises
    ------
    DesignError
        Some are outside; the message counts them.
    """
    problem = check_response(rows, family)
    if problem:
        raise DesignError(
            f"site {site!r}: {problem} cannot be of family {family.name}: '{response}'. Correct them, or "
            "choose another family."
        )
