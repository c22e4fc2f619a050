"""Fits along a path, and maximum likelihood on the columns that one of them selects."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.kernels.penalised.groups import Groups
from fedstat.kernels.penalised.path import PenalisedPath
from fedstat.models.vertical.exchange.protocol import Units
from fedstat.typing import Bools, Floats


@dataclass(frozen=True, slots=True, eq=False)
class Path:
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
    groups: Groups

    @property
    def selected(self) -> Bools:
        """Which coefficients are not zero: (L, p)."""
        return np.asarray(self.coefficients != 0.0)

    @property
    def solved(self) -> Bools:
        """Which fits are solutions with a certificate, and not proposals: (L,)."""
        return np.asarray(np.isfinite(self.kkt))

    @classmethod
    def of(cls, found: PenalisedPath, b: Floats, a: Floats, units: Units, groups: Groups) -> Path:
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


def to_units(support: Bools, units: Units) -> Floats:
    """Matrix that takes (intercept, b) of the support's standardised columns to the units of the data."""
    scale, shift = units.scale[support], units.shift[support]
    J = np.diag(np.concatenate([[1.0], 1.0 / scale]))
    J[0, 1:] = -shift / scale
    return J
