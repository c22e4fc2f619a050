"""Statements of results from the moments that a fit exchanged, at no further message."""

from __future__ import annotations

import pandas as pd

from fedstat.errors import NotAvailableError
from fedstat.models.vertical.exchange.patterns import PatternExchange
from fedstat.models.vertical.fit import MomentsFit
from fedstat.models.vertical.law.fit import LawFit
from fedstat.models.vertical.law.statements import AssumptionStatements
from fedstat.models.vfem.statements.corrections import Correction, refuse_ratio
from fedstat.models.vfem.statements.influence import leave_one_out
from fedstat.models.vfem.statements.outcome import HeldInSession
from fedstat.models.vfem.statements.sparse import COLUMNS, sensitivity


class MomentStatements(AssumptionStatements):
    """Statements of a fit with ``exchange="moments"``; other fits raise NotAvailableError.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> fit = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI + LP", partition).fit()
    >>> fit.leave_one_out().shape, len(fit.sensitivity()), fit.dealers.columns.tolist()
    ((3, 5), 0, ['first', 'second', 'dealer'])
    >>> fit.exchange.smallest > 0
    True
    """

    _held: HeldInSession

    @property
    def correction(self) -> Correction | None:
        """What was corrected of maximum likelihood."""
        raise NotImplementedError

    @property
    def exchange(self) -> PatternExchange | None:
        """The exchange of moments, of a fit in this session."""
        return self._held.exchange

    @property
    def _moments_fit(self) -> MomentsFit | LawFit | None:
        """The fit from the moments, in this session."""
        return self._held.moments_fit

    @property
    def dealers(self) -> pd.DataFrame:
        """Who dealt the random numbers for the product of each pair of institutions."""
        self._moments()
        assert self.exchange is not None
        rows = [(*pair, dealer or "coordinator") for pair, dealer in self.exchange.dealers.items()]
        return pd.DataFrame(rows, columns=["first", "second", "dealer"])

    def sensitivity(self) -> pd.DataFrame:
        """Extremes of the coefficients where two institutions share fewer entities than they have columns.

        Such a pair counts as independent given all other columns. Nothing in the data says so: where none is
        shared every partial covariance of the two has the same likelihood. The extremes are those of a
        partial correlation of one (with several columns, along the direction in which the coefficient moves
        fastest).

        Returns
        -------
        DataFrame
            A row for each such pair and coefficient: ``n`` entities that both have, the estimate, its
            smallest and largest value, ``low`` and ``high``; empty where every pair shares enough.
        """
        fit = self._moments()
        return sensitivity(fit) if isinstance(fit, LawFit) else pd.DataFrame(columns=COLUMNS)

    def leave_one_out(self) -> pd.DataFrame:
        """Fit the model without each column in turn: likelihood ratio, p-value, R-squared.

        With ``between="free"`` the column stays in the law of the columns, where it tells of those that are
        missing, and only its coefficient goes; the row of one without whose coefficient the likelihood has
        no maximum is nan.

        Raises
        ------
        NotAvailableError
            After ``correction="skewness"``.
        """
        refuse_ratio("leave_one_out", self.correction)
        return leave_one_out(self._moments()).to_frame()

    def _moments(self) -> MomentsFit | LawFit:
        if self._moments_fit is None:
            raise NotAvailableError(
                "this needs the moments of a fit in this session with exchange='moments'; the iterative "
                "exchange and files of results do not hold them"
            )
        return self._moments_fit
