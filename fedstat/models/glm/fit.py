"""What a federated GLM is fitted from and ends with: sums over sites at one point, and the fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.message import Reply
from fedstat.inference.heterogeneity.heterogeneity import MaskedParts
from fedstat.kernels.glm.family import FamilySpec
from fedstat.models.glm.coordinates import Coordinates
from fedstat.typing import Array, Floats, Matrix, Vector


@dataclass(frozen=True, slots=True)
class LocalFit:
    """One site's own fit in the units of the data, and its part of the sums at the estimate.

    Parameters
    ----------
    site : str
    n : int
    beta : (p,) array or None
    cov : (p, p) array or None
    problem : str
        Why there is no fit.
    score, information : arrays or None
        At the estimate of all sites, dispersion one; None where sums are masked.
    """

    site: str
    n: int
    beta: Vector | None
    cov: Matrix | None
    problem: str
    score: Vector | None
    information: Matrix | None


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One evaluation: deviance, Newton's step in standard errors, its largest move of a coefficient."""

    deviance: float
    step: float
    move: float


@dataclass(slots=True, eq=False)
class Total:
    """Sums over sites at one point, in standardised coordinates; the parts by site where not masked."""

    score: Vector
    information: Matrix
    observed: Matrix | None
    weight: float
    deviance: float
    pearson: float
    null: Annotated[Floats, "3"] | None
    by_site: Annotated[list[tuple[Vector, Matrix]], "K"] | None

    @classmethod
    def of(cls, replies: Sequence[Reply], hidden: bool) -> Total | None:
        """Add up replies in their order; None where sites give no sums: see ``sum_scores``."""
        if few_weigh(replies) or int(add(replies, "inside")) < len(replies):
            return None
        weight, deviance, pearson = add(replies, "totals").tolist()
        first = replies[0].arrays
        parts = [(reply.arrays["score"], reply.arrays["information"]) for reply in replies]
        return cls(
            add(replies, "score"),
            add(replies, "information"),
            add(replies, "observed") if "observed" in first else None,
            weight,
            deviance,
            pearson,
            add(replies, "null") if "null" in first else None,
            None if hidden else parts,
        )

    def step(self) -> tuple[Floats, Floats]:
        """Newton's step and the matrix behind it: the observed information where it is definite."""
        for matrix in (self.observed, self.information):
            if matrix is None:
                continue
            size = np.sqrt(np.abs(np.diag(matrix)))
            scaled = matrix / np.outer(size, size)
            try:
                np.linalg.cholesky(scaled)
            except np.linalg.LinAlgError:
                continue
            return np.linalg.solve(scaled, self.score / size) / size, matrix
        raise EstimationError("the information is not positive definite")


@dataclass(slots=True, eq=False)
class GLMFit:
    """What the iteration hands over, in standardised coordinates where not said otherwise.

    Parameters
    ----------
    gamma : (p,) array
    total : Total
        At `gamma`.
    coordinates : Coordinates
    dispersion : float
    null : float
        Intercept of the model without covariates.
    fit : (3,) array
        Log-likelihood; log-likelihood and deviance without covariates; NaN where not defined.
    meat : (p, p) array or None
        Sum of the outer products of the rows' scores.
    between : (p, p) array or None
        The same of the sites' scores.
    apart : (2,) array or None
        The sites' parts of the score test of equal coefficients, added up, where sums are masked.
    trace : tuple of TraceRow
    converged : bool
    reason : str
    local : tuple of LocalFit
        In the units of the data.
    n : int
        Rows.
    rounds : int or None
        Newton steps that were asked for; None: to the maximum.
    family : FamilySpec
    """

    gamma: Vector
    total: Total
    coordinates: Coordinates
    dispersion: float
    null: float
    fit: Annotated[Floats, "3"]
    meat: Matrix | None
    between: Matrix | None
    apart: Annotated[Floats, "2"] | None
    trace: tuple[TraceRow, ...]
    converged: bool
    reason: str
    local: Annotated[tuple[LocalFit, ...], "K"]
    n: int
    rounds: int | None
    family: FamilySpec

    @property
    def masked(self) -> bool:
        """Whether the coordinator saw no more of the sums than what all sites add up to."""
        return self.total.by_site is None

    @property
    def masked_parts(self) -> MaskedParts | None:
        """What compares the sites where sums are masked, in the units of the data."""
        if self.apart is None or not self.masked:
            return None
        forward = np.linalg.inv(self.coordinates.back)
        total = self.total
        return MaskedParts(forward.T @ total.score, forward.T @ total.information @ forward, self.apart)

    @property
    def params(self) -> Floats:
        """Coefficients in the units of the data."""
        return self.coordinates.back @ self.gamma


def add(replies: Sequence[Reply], name: str) -> Array:
    """Add an array up over replies, in their order."""
    total: Array = np.sum([reply.arrays[name] for reply in replies], axis=0)
    return total


def few_weigh(replies: Sequence[Reply]) -> bool:
    """Whether a site gave no sums because only few of its rows would weigh in them."""
    return int(add(replies, "spread")) < len(replies)
