"""Records of a GLM fit: coordinates of the columns, and sums over sites at one point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np

from fedstat.errors import EstimationError
from fedstat.federation.design.horizontal_design import RowsDesign
from fedstat.federation.design.horizontal_steps import standardization, translation, varying
from fedstat.federation.message import Reply
from fedstat.inference.heterogeneity import MaskedSiteSums, SiteFit
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.glm.local_fit import solve_positive
from fedstat.models.horizontal.clusters import SharedLabels
from fedstat.models.horizontal.session import add
from fedstat.models.rows.newton import LikelihoodSums, few_weigh
from fedstat.typing import Bools, Floats, Ints, Matrix, Vector


@dataclass(frozen=True, slots=True, eq=False)
class Coordinates:
    """Standardized columns of a design.

    `shift` and `scale` are mean and standard deviation over all sites, 0 and 1 for the intercept; `back`
    converts coefficients of the standardized columns to the units of the data. `own` holds mean and standard
    deviation of every column by site, with which the site standardized for its own fit; None if sites did not
    fit their own rows.
    """

    design: RowsDesign
    shift: Vector
    scale: Vector
    back: Matrix
    own: Annotated[Floats, "K 2 p"] | None = None

    @classmethod
    def of(cls, design: RowsDesign, own: Floats | None = None) -> Coordinates:
        """Standardize by the pooled moments."""
        # Sums over columns far from zero would lose digits, and rank would depend on the columns' units.
        shift, scale = standardization(design.mean, design.spread, design.intercept)
        zeros, ones = np.zeros_like(shift), np.ones_like(scale)
        back: Floats = np.asarray(np.linalg.inv(translation(shift, scale, zeros, ones)))
        return cls(design, shift, scale, back, own)

    def to_site(self, k: int) -> Floats:
        """Matrix that converts standardized coefficients to those of site k's own standardized columns."""
        return translation(*self._standardized(k), self.shift, self.scale)

    def varies(self, k: int) -> Bools:
        """Columns that vary at site k."""
        assert self.own is not None
        return varying(self.own[k, 0], self.own[k, 1], self.design.intercept)

    def _standardized(self, k: int) -> tuple[Floats, Floats]:
        """Shift and scale of site k."""
        assert self.own is not None
        return standardization(self.own[k, 0], self.own[k, 1], self.design.intercept)

    def local(self, k: int, beta: Floats, information: Floats) -> tuple[Floats, Floats]:
        """Return a site's coefficients (p,) and covariance (p, p), for dispersion one, in the data's units.

        They are NaN for columns that are constant at the site. The intercept is NaN as well if one of these
        is not zero, since it then contains the effect of that column.
        """
        assert self.own is not None
        varies = self.varies(k)
        shift, scale = (column[varies] for column in self._standardized(k))
        back = np.linalg.inv(translation(shift, scale, np.zeros_like(shift), np.ones_like(scale)))
        # A site's constant columns cannot be distinguished from its intercept, unless they are zero.
        known = varies.copy()
        if self.design.intercept and (self.own[k, 0][~varies] != 0.0).any():
            known[0] = False
        out, cov = np.full(len(varies), np.nan), np.full((len(varies), len(varies)), np.nan)
        out[varies] = back @ beta[varies]
        cov[np.ix_(varies, varies)] = back @ np.linalg.inv(information[np.ix_(varies, varies)]) @ back.T
        out[~known] = np.nan
        cov[~known, :] = np.nan
        cov[:, ~known] = np.nan
        return out, cov


@dataclass(frozen=True, slots=True)
class NewtonEvaluation:
    """One evaluation: deviance, Newton's step in standard errors, its largest move of a coefficient."""

    deviance: float
    step: float
    move: float


@dataclass(frozen=True, slots=True, eq=False)
class PooledSums(LikelihoodSums):
    """Sums over sites at one point, in standardized coordinates; the log-likelihood is for dispersion one.

    It is less that of the saturated model, and the information is the expected one.
    """

    observed: Matrix | None
    weight: float
    pearson: float
    null: Annotated[Floats, "3"] | None

    @classmethod
    def of(cls, replies: Sequence[Reply], masked: bool) -> Self | None:
        """Add up replies in order; None if sites give no sums: see ``sum_scores``."""
        # Under masks only the number of valid replies is known, so that one invalid reply cancels all.
        if few_weigh(replies) or int(add(replies, "inside")) < len(replies):
            return None
        weight, deviance, pearson = add(replies, "totals").tolist()
        first = replies[0].arrays
        parts = [(reply.arrays["score"], reply.arrays["information"]) for reply in replies]
        return cls(
            score=add(replies, "score"),
            information=add(replies, "information"),
            observed=add(replies, "observed") if "observed" in first else None,
            loglik=-deviance / 2.0,
            weight=weight,
            pearson=pearson,
            null=add(replies, "null") if "null" in first else None,
            by_site=None if masked else parts,
        )

    @property
    def deviance(self) -> float:
        """Deviance."""
        return -2.0 * self.loglik

    def step(self, places: Ints | slice = slice(None)) -> Floats:
        """Return Newton's step with the observed information, if that is positive definite."""
        # Far from the maximum it may be indefinite; Fisher scoring still increases the likelihood.
        for matrix in (self.observed, self.information):
            step = None if matrix is None else solve_positive(matrix, self.score)
            if step is not None:
                return step
        raise EstimationError("the information is not positive definite")


@dataclass(slots=True, eq=False)
class GLMFit:
    """Output of the iteration, in standardized coordinates unless stated otherwise.

    `total` are the sums at `gamma`; `null` is the intercept of the model without covariates. `fit` holds the
    log-likelihood, and log-likelihood and deviance without covariates, NaN if not defined. `meat` is the sum
    of the outer products of the rows' scores, `apart` the sum of the sites' parts of the score test of equal
    coefficients if sums are masked. `local` are the sites' own fits in the units of the data, `n` the rows,
    `rounds` the requested Newton steps (None: to the maximum), and `shared` the comparison of the labels of
    absorbed levels between sites.
    """

    gamma: Vector
    total: PooledSums
    coordinates: Coordinates
    dispersion: float
    null: float
    fit: Annotated[Floats, "3"]
    meat: Matrix | None
    apart: Annotated[Floats, "2"] | None
    trace: tuple[NewtonEvaluation, ...]
    converged: bool
    reason: str
    local: Annotated[tuple[SiteFit, ...], "K"]
    n: int
    rounds: int | None
    distribution: DistributionSpec
    shared: tuple[SharedLabels, ...] = ()

    @property
    def design(self) -> RowsDesign:
        """Columns."""
        return self.coordinates.design

    @property
    def totals(self) -> tuple[float, float, float]:
        """Sum of the frequency weights, deviance, Pearson's statistic."""
        return self.total.weight, self.total.deviance, self.total.pearson

    @property
    def masked(self) -> bool:
        """Whether the coordinator saw only the sums over all sites."""
        return self.total.by_site is None

    @property
    def masked_parts(self) -> MaskedSiteSums | None:
        """Comparison of the sites if sums are masked, in the units of the data."""
        return self.total.masked_parts(np.asarray(np.linalg.inv(self.coordinates.back)), self.apart)

    @property
    def params(self) -> Floats:
        """Coefficients in the units of the data."""
        return self.coordinates.back @ self.gamma
