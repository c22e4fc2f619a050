"""A site's rows in the form of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from fedstat.errors import DesignError
from fedstat.federation.design.row_steps import OPEN_ROWS
from fedstat.federation.design.site_rows import WholeRows
from fedstat.federation.door.facts import WorkingWeights
from fedstat.federation.message import Declared
from fedstat.kernels.glm.rows import Rows, check_response
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.kernels.glm.sums import Sums, row_weights
from fedstat.typing import Array, Floats

SUMS = (*OPEN_ROWS, WorkingWeights)
"""Facts behind sums over a session's rows at coefficients from outside."""

NOTHING_SUMMED = np.zeros((0, 2))
INSIDE = Declared("control", "whether all means lie inside the family's domain", 0, maskable=True)
AT_THE_START = WorkingWeights(lambda: np.zeros((0, 0)), NOTHING_SUMMED)
"""Working weights where nobody has chosen coefficients yet: they are the data's own."""


def glm_rows(rows: WholeRows, X: Floats) -> Rows:
    """Put a chunk in the form of the kernels; two columns of counts become proportions and trials."""
    y, trials = rows.y, None
    if y.ndim == 2:
        trials = y.sum(axis=1)
        # No trials, no proportion: the row has weight zero, whatever stands there.
        y = np.divide(y[:, 0], trials, out=np.zeros(len(y)), where=trials > 0.0)
    weights = rows.weights
    return Rows(X, y, rows.offset, weights.get("freq_weights"), weights.get("var_weights"), trials)


def require_response(site: str, rows: Rows, distribution: DistributionSpec, response: str) -> None:
    """Require responses that the distribution can have; the error counts the others."""
    problem = check_response(rows, distribution)
    if problem:
        raise DesignError(
            f"site {site!r}: {problem} cannot be of family {distribution.name}: '{response}'. Correct them, "
            "or choose another family."
        )


def working_weights(
    chunks: Callable[[], Iterable[Rows]],
    beta: Floats,
    distribution: DistributionSpec,
    sums: Sums | None = None,
    instead: Mapping[str, Array] | None = None,
) -> WorkingWeights:
    """Tell what weights the rows have at these coefficients, as far as possible by sums at them."""

    def each() -> Floats:
        return np.concatenate([row_weights(rows, beta, distribution) for rows in chunks()], axis=1)

    if sums is None:
        return WorkingWeights(each, instead=instead)
    # Where a mean is outside the family's domain nothing is summed.
    return WorkingWeights(each, sums.spread if np.isfinite(sums.deviance) else NOTHING_SUMMED, instead)


def describe_sums(sums: Sums, T: Floats | None = None) -> dict[str, Array]:
    """Say where sums are defined, and give score, information and totals, for coefficients that T takes here.

    No totals outside the distribution's domain; ``spread`` is true: more than a few rows weigh in them.
    """
    finite, score, information = np.isfinite(sums.deviance), sums.score, sums.information
    return {
        "inside": np.array(finite),
        "spread": np.array(True),
        "score": score if T is None else T.T @ score,
        "information": information if T is None else T.T @ information @ T,
        "totals": np.array([sums.weight, sums.deviance, sums.pearson]) if finite else np.zeros(3),
    }


def summed(what: str, ndim: int = 1, *, optional: bool = False, behind: tuple[type, ...] = SUMS) -> Declared:
    """Declare an array of which nothing is used but the sum over sites."""
    return Declared("aggregate", what, ndim, maskable=True, optional=optional, wide=True, behind=behind)


SCORES = {
    "inside": INSIDE,
    "spread": Declared("control", "whether more than a few rows weigh", 0, maskable=True),
    "score": summed("score"),
    "information": summed("expected information", 2),
    "totals": summed("sums of weights, deviance, Pearson residuals"),
}
"""What :func:`describe_sums` releases."""
