"""The numbers of a comparison of sites, from which its statements are made."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from fedstat.errors import NotAvailableError
from fedstat.inference.heterogeneity.influence import JointTest
from fedstat.typing import Floats

NO_PARTS = (
    "no fit without each site: it needs the sites' own parts of score and information, and masked sums have "
    "none; use fit(masked=False), or fit again without the site"
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SiteComparison:
    """How far sites agree on each coefficient, in numbers.

    `sites` has columns ``nobs`` and ``problem`` (why a site has no estimate of its own); `estimates` and
    `std_errors` are (sites, coefficients), nan where a site does not determine one; `table` is that of
    `Heterogeneity.to_frame`; `joint` tests whether all coefficients are equal at all sites, and takes them to
    have `one_dispersion` where that is estimated, and not each its own. `without_each`
    holds `left_out` and `change`, None where sums were masked. `flagged` coefficients have I2 above one half
    and a p-value of Q, adjusted after Holm, below `alpha`. `covariances` (K, p, p) are of the sites' own
    estimates, and `terms` the term of the formula that each coefficient belongs to.
    """

    sites: pd.DataFrame
    estimates: pd.DataFrame
    std_errors: pd.DataFrame
    table: pd.DataFrame
    joint: JointTest
    one_dispersion: bool
    without_each: tuple[pd.DataFrame, pd.DataFrame] | None
    flagged: tuple[str, ...]
    alpha: float
    covariances: Floats | None = None
    terms: tuple[str, ...] = ()

    @property
    def left_out(self) -> pd.DataFrame:
        """Estimate without each site, (sites, coefficients); nan where the others do not determine one.

        Raises
        ------
        NotAvailableError
            Sums were masked.
        """
        if self.without_each is None:
            raise NotAvailableError(NO_PARTS)
        return self.without_each[0]

    @property
    def change(self) -> pd.DataFrame:
        """Its distance from the estimate of all, in standard errors of the common model; as `left_out`."""
        if self.without_each is None:
            raise NotAvailableError(NO_PARTS)
        return self.without_each[1]
