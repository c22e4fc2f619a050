"""Columns standardised over all sites, in which the iteration runs, and the way back to the data's units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedstat.federation.design.by_rows import RowsDesign, standardisation, translation, varying
from fedstat.typing import Bools, Floats, Matrix, Vector


@dataclass(frozen=True, slots=True, eq=False)
class Coordinates:
    """Standardised columns of a design.

    Parameters
    ----------
    design : RowsDesign
    shift, scale : (p,) arrays
        Mean and standard deviation over all sites; 0 and 1 for the intercept.
    back : (p, p) array
        Matrix that takes coefficients of the standardised columns to the units of the data.
    own : (K, 2, p) array or None
        Mean and standard deviation of every column by site, by which it standardised for its own fit; None
        where sites did not fit their own rows, which is all that they are needed for.
    """

    design: RowsDesign
    shift: Vector
    scale: Vector
    back: Matrix
    own: Annotated[Floats, "K 2 p"] | None = None

    @classmethod
    def of(cls, design: RowsDesign, own: Floats | None = None) -> Coordinates:
        """Standardise by the pooled moments."""
        shift, scale = standardisation(design.mean, design.spread, design.intercept)
        zeros, ones = np.zeros_like(shift), np.ones_like(scale)
        back: Floats = np.asarray(np.linalg.inv(translation(shift, scale, zeros, ones)))
        return cls(design, shift, scale, back, own)

    def to_site(self, k: int) -> Floats:
        """Matrix that takes standardised coefficients to those of site k's own standardised columns."""
        return translation(*self._standardised(k), self.shift, self.scale)

    def varies(self, k: int) -> Bools:
        """Columns that vary at site k."""
        assert self.own is not None
        return varying(self.own[k, 0], self.own[k, 1], self.design.intercept)

    def _standardised(self, k: int) -> tuple[Floats, Floats]:
        """Shift and scale of site k."""
        assert self.own is not None
        return standardisation(self.own[k, 0], self.own[k, 1], self.design.intercept)

    def local(self, k: int, beta: Floats, information: Floats) -> tuple[Floats, Floats]:
        """Coefficients and covariance of a site's own fit in the units of the data.

        Returns
        -------
        beta : (p,) array
            NaN for columns that are constant at the site, and for the intercept where one of them is
            not zero: the intercept then holds its effect.
        cov : (p, p) array
            For dispersion one; rows and columns of NaN likewise.
        """
        assert self.own is not None
        varies = self.varies(k)
        shift, scale = (column[varies] for column in self._standardised(k))
        back = np.linalg.inv(translation(shift, scale, np.zeros_like(shift), np.ones_like(scale)))
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
