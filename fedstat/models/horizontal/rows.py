"""A site's rows in the form of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from fedstat.errors import DesignError
from fedstat.federation.design.row_steps import OPEN_ROWS
from fedstat.federation.design.site_rows import WholeRows
from fedstat.federation.door.facts import WorkingWeights
from fedstat.kernels.glm.rows import Rows, check_response
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.kernels.glm.sums import Sums, row_weights
from fedstat.typing import Array, Floats

SUMS = (*OPEN_ROWS, WorkingWeights)
"""Facts behind sums over a session's rows at coefficients from outside."""

NOTHING_SUMMED = np.zeros((0, 2))
AT_THE_START = WorkingWeights(lambda: np.zeros((0, 0)), NOTHING_SUMMED)
"""Working weights where nobody has chosen coefficients yet: they are the data's own."""


def glm_rows(rows: WholeRows, X: Floats) -> Rows:
    """Put a chunk in the form of the kernels; two columns of counts become proportions and trials."""
    y, trials = rows.y, None
    if y.ndim == 2:
        trials = y.sum(axis=1)
        y = np.divide(y[:, 0], trials, out=np.zeros(len(y)), where=trials > 0.0)
    weights = rows.weights
    return Rows(X, y, rows.offset, weights.get("freq_weights"), weights.get("var_weights"), trials)


def require_response(site: str, rows: Rows, family: DistributionSpec, response: str) -> None:
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


def working_weights(
    chunks: Callable[[], Iterable[Rows]],
    beta: Floats,
    family: DistributionSpec,
    sums: Sums | None = None,
    instead: Mapping[str, Array] | None = None,
) -> WorkingWeights:
    """Tell what weights the rows have at these coefficients, as far as possible by sums at them."""

    def each() -> Floats:
        return np.concatenate([row_weights(rows, beta, family) for rows in chunks()], axis=1)

    if sums is None:
        return WorkingWeights(each, instead=instead)
    # Where a mean is outside the family's domain nothing is summed.
    return WorkingWeights(each, sums.spread if np.isfinite(sums.deviance) else NOTHING_SUMMED, instead)
