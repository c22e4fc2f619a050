"""The numbers of a comparison of sites, from which its statements are made."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from fedstat.errors import NotAvailableError
from fedstat.inference.heterogeneity.influence import JointTest

NO_PARTS = (
    "no fit without each site: it needs the sites' own parts of score and information, and masked sums have "
    "none; use fit(masked=False), or fit again without the site"
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SiteComparison:
    """How far sites agree on each coefficient, in numbers.

    Parameters
    ----------
    sites : DataFrame
        Index site; columns ``nobs`` and ``problem`` (why it has no estimate of its own).
    estimates, std_errors : DataFrame, (sites, coefficients)
        The sites' own estimates; nan where a site does not determine a coefficient.
    table : DataFrame
        See :meth:`fedstat.inference.heterogeneity.heterogeneity.Heterogeneity.to_frame`.
    joint : JointTest
        Score test: all coefficients are equal at all sites.
    without_each : (DataFrame, DataFrame) or None
        `left_out` and `change`; None where sums were masked.
    flagged : tuple of str
        Coefficients with I2 above one half and a p-value of Q, adjusted after Holm, below `alpha`.
    alpha : float
        One minus the level of the intervals.
    """

    sites: pd.DataFrame
    estimates: pd.DataFrame
    std_errors: pd.DataFrame
    table: pd.DataFrame
    joint: JointTest
    without_each: tuple[pd.DataFrame, pd.DataFrame] | None
    flagged: tuple[str, ...]
    alpha: float

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
