"""Fits along a path, information criteria, and the choice of one fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from fedstat.inference.likelihood import aic, bic, ebic, profile_deviance
from fedstat.kernels.penalized.path import PenalizedPath
from fedstat.kernels.penalized.penalties import CoefficientGroups
from fedstat.models.vertical.exchange.protocol import ColumnScales
from fedstat.models.vglm.distributions import minus_twice
from fedstat.typing import Bools, Floats

# ----------------------------------------------------------------------------------------------------
# Fits along a path, and maximum likelihood on the columns that one of them selects.


@dataclass(frozen=True, slots=True, eq=False)
class CoefficientPath:
    """Fits along L values of lambda: intercepts (L,) and coefficients (L, p) in the units of the data.

    `standardised` (L, p) are coefficients of standardised columns, `loss` half the mean deviance; `kkt` the
    largest violation of the stationarity conditions, as a share of `scale`, which is lambda_max; nan where a
    fit is not solved but proposed by a quadratic model of the loss.
    """

    lambdas: Floats
    intercepts: Floats
    coefficients: Floats
    standardised: Floats
    loss: Floats
    kkt: Floats
    converged: Bools
    scale: float
    groups: CoefficientGroups

    @property
    def selected(self) -> Bools:
        """Which coefficients are not zero: (L, p)."""
        return np.asarray(self.coefficients != 0.0)

    @property
    def solved(self) -> Bools:
        """Which fits are solutions with a certificate, and not proposals: (L,)."""
        return np.asarray(np.isfinite(self.kkt))

    @classmethod
    def of(
        cls, found: PenalizedPath, b: Floats, a: Floats, units: ColumnScales, groups: CoefficientGroups
    ) -> CoefficientPath:
        """Bring coefficients b (L, p) of standardised columns, and intercepts a (L,), to the data's units."""
        beta = b / units.scale
        return cls(
            lambdas=found.lambdas,
            intercepts=a - beta @ units.shift,
            coefficients=beta,
            standardised=b,
            loss=found.loss,
            kkt=found.kkt,
            converged=found.converged,
            scale=found.scale,
            groups=groups,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Refit:
    """Maximum likelihood on the columns that were selected, the support (p,).

    `params` (1 + k,) are intercept and coefficients of the support in the units of the data, `cov` is the
    inverse observed information, `scale` the dispersion, `loss` half the mean deviance.
    """

    support: Bools
    params: Floats
    cov: Floats
    llf: float
    scale: float
    loss: float


def to_units(support: Bools, units: ColumnScales) -> Floats:
    """Matrix that takes (intercept, b) of the support's standardised columns to the units of the data."""
    scale, shift = units.scale[support], units.shift[support]
    J = np.diag(np.concatenate([[1.0], 1.0 / scale]))
    J[0, 1:] = -shift / scale
    return J


# ----------------------------------------------------------------------------------------------------
# Information criteria of the fits of a path, and the choice of one.

Select: TypeAlias = Literal["bic", "ebic", "aic", "cv"]
TIE_TOLERANCE = 1e-9
"""Difference of equals, a deviance per entity or a share: more than tolerance and rounding leave."""


@dataclass(frozen=True, slots=True, eq=False)
class PathCriteria:
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


def score_path(path: CoefficientPath, n: int, distribution: str = "Gaussian") -> PathCriteria:
    """Compute the information criteria of a path over n entities.

    A dispersion is estimated at every fit, by maximum likelihood.
    """
    chosen = np.count_nonzero(path.coefficients, axis=1).astype(float)
    doubled = (
        profile_deviance(2.0 * n * path.loss, n)
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
    return PathCriteria(n, df, *(np.asarray(v) for v in (aic(doubled, df), bic(doubled, df, n), extended)))


def choose_fit(criteria: PathCriteria, select: Select) -> int:
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
    return int(np.argmax(values <= best + TIE_TOLERANCE * (abs(best) if unit is None else unit)))
