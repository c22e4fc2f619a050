"""Information criteria of the fits of a path, and the choice of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from fedstat.inference.selection.criteria import aic, bic, ebic, profiled
from fedstat.models.vglm.path.fits import Path
from fedstat.models.vglm.response.distributions import minus_twice
from fedstat.typing import Floats

Select: TypeAlias = Literal["bic", "ebic", "aic", "cv"]
TIE = 1e-9
"""Difference of equals, a deviance per entity or a share: more than tolerance and rounding leave."""


@dataclass(frozen=True, slots=True, eq=False)
class Criteria:
    """What speaks for each fit of a path over `n` entities, (L,) each: smaller is better.

    `df` counts the coefficients that are not zero, the intercept included. `cv` is the cross-validated mean
    deviance (of the normal family the mean squared error), with its standard error over folds.
    """

    n: int
    df: Floats
    aic: Floats
    bic: Floats
    ebic: Floats
    cv: Floats | None = None
    cv_se: Floats | None = None


def score_path(path: Path, n: int, distribution: str = "Gaussian") -> Criteria:
    """Compute the information criteria of a path over n entities.

    A dispersion is estimated at every fit, by maximum likelihood.
    """
    chosen = np.count_nonzero(path.coefficients, axis=1).astype(float)
    doubled = (
        profiled(2.0 * n * path.loss, n)
        if distribution == "Gaussian"
        else minus_twice(distribution, path.loss, n)
    )
    df = chosen + 1.0
    free = int(path.groups.sizes[~path.groups.penalised].sum())
    # Columns that must be in the model are no candidates of a search (Chen and Chen 2008).
    extended = ebic(
        doubled,
        df,
        n,
        chosen=np.maximum(chosen - free, 0.0),
        candidates=path.coefficients.shape[1] - free,
    )
    return Criteria(n, df, *(np.asarray(v) for v in (aic(doubled, df), bic(doubled, df, n), extended)))


def choose(criteria: Criteria, select: Select) -> int:
    """Return the place of the best fit; of equals the one with the largest lambda, which selects least.

    Where a concave penalty is flat many lambdas have one fit, and rounding would choose among them.
    """
    values = {"aic": criteria.aic, "bic": criteria.bic, "ebic": criteria.ebic, "cv": criteria.cv}[select]
    assert values is not None
    return first_smallest(values) if select == "cv" else first_smallest(values, criteria.n)


def first_smallest(values: Floats, unit: float | None = None) -> int:
    """Return the place of the smallest value; of those equal to it but for rounding, (L,), the first.

    They differ by less than TIE units, the smallest value itself being one if None.
    """
    best = float(values.min())
    return int(np.argmax(values <= best + TIE * (abs(best) if unit is None else unit)))
