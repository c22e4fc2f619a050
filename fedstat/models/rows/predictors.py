"""The fit of a likelihood with linear predictors: its parameters in the units of the data, and own fits."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedstat.federation.design.horizontal_design import RowsDesign
from fedstat.federation.design.horizontal_steps import standardization, translation
from fedstat.federation.message import Reply
from fedstat.inference.heterogeneity import MaskedSiteSums, SiteFit
from fedstat.kernels.categories import moved
from fedstat.models.horizontal.clusters import Clustering, SharedLabels
from fedstat.models.horizontal.site_results import SiteFitsResults
from fedstat.models.rows.newton import LikelihoodSums, OwnEstimate, Parameters, Products
from fedstat.typing import Array, Floats


def to_units(design: RowsDesign) -> Floats:
    """Matrix from coefficients (p,) of standardized columns to those in the units of the data."""
    shift, scale = standardization(design.mean, design.spread, design.intercept)
    return translation(np.zeros_like(shift), np.ones_like(scale), shift, scale)


def standardized_point(design: RowsDesign, gamma: Floats) -> dict[str, Array]:
    """Return the arrays that name parameters of columns standardized over all sites."""
    shift, scale = standardization(design.mean, design.spread, design.intercept)
    return {"shift": shift, "scale": scale, "beta": gamma}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PredictorFit:
    """Maximum of a likelihood with linear predictors; parameters and sums are for standardized columns.

    `null` is the log-likelihood without covariates; `trace` has log-likelihood, length of the step in
    standard errors, and its largest change of a parameter, by evaluation. `meat` is the sum of outer products
    of the scores of rows, or of the clusters that `clustering` describes.
    """

    gamma: Parameters
    total: LikelihoodSums
    design: RowsDesign
    null: float
    meat: Products | None
    clustering: Clustering | None
    apart: Annotated[Floats, "2"] | None
    trace: Annotated[Floats, "E 3"]
    converged: bool
    local: Annotated[tuple[SiteFit, ...], "K"]
    shared: tuple[SharedLabels, ...] = ()

    @property
    @abstractmethod
    def map(self) -> Floats:
        """Matrix (J p, q) from parameters to the coefficients of all predictors."""

    @property
    def masked(self) -> bool:
        """Whether the coordinator saw only the sums over all sites."""
        return self.total.by_site is None

    @property
    def back(self) -> Floats:
        """Matrix from parameters of standardized columns to those in the units of the data."""
        return moved(self.map, to_units(self.design))

    @property
    def params(self) -> Floats:
        """Parameters in the units of the data."""
        return np.asarray(self.back @ self.gamma)

    @property
    def naive(self) -> Floats:
        """Inverse information in the units of the data."""
        return np.asarray(self.back @ np.linalg.inv(self.total.information) @ self.back.T)

    @property
    def cov(self) -> Floats:
        """Covariance in the units of the data: the inverse information, or the sandwich."""
        if self.meat is None:
            return self.naive
        bread = self.back @ np.linalg.inv(self.total.information)
        return np.asarray(bread @ self.meat @ bread.T)

    @property
    def masked_parts(self) -> MaskedSiteSums | None:
        """Comparison of the sites if sums are masked, in the units of the data."""
        return self.total.masked_parts(np.asarray(np.linalg.inv(self.back)), self.apart)


class PredictorResults(SiteFitsResults):
    """Results of such a fit.

    Attributes
    ----------
    model : HorizontalModel
        For results that were read from a file, the names of response and coefficients only.
    """

    @property
    def iterations(self) -> int:
        """Steps of Newton's method from the fit without covariates, and the last evaluation."""
        return len(self._fit.trace)

    @property
    def df_resid(self) -> float:
        """Rows less the number of parameters."""
        return self.nobs - len(self.estimate.names)

    @property
    def llnull(self) -> float:
        """Log-likelihood without covariates, with the offset."""
        null: float = self._fit.null
        return null


def own_predictor_fit(places: Floats, intercept: bool, site: int, reply: Reply) -> OwnEstimate:
    """Return parameters and covariance of a site's own fit in the units of the data.

    `places` (J p, q) takes parameters to the coefficients of all predictors.
    """
    information, (mean, spread) = reply.arrays["information"], reply.arrays["columns"]
    shift, scale = standardization(mean, spread, intercept)
    L = moved(places, translation(np.zeros_like(shift), np.ones_like(scale), shift, scale))
    known = np.diag(information) > 0.0
    cov = np.zeros_like(information)
    cov[np.ix_(known, known)] = np.linalg.inv(information[np.ix_(known, known)])
    beta, cov = L @ reply.arrays["beta"], L @ cov @ L.T
    # A constant column that is not zero is part of the constants of the predictors that have it.
    lost, M = (spread == 0.0) & (mean != 0.0), places.reshape(-1, len(mean), len(known))
    lost[0] = False
    with_lost = (M[:, lost] != 0.0).any(axis=(1, 2))
    hidden = ~known | (M[with_lost, 0] != 0.0).any(axis=0)
    beta[hidden] = np.nan
    cov[hidden], cov[:, hidden] = np.nan, np.nan
    return beta, cov, None
