"""Statements of results from the moments that a fit exchanged, at no further message."""

from __future__ import annotations

from typing import Literal

import pandas as pd

from fedstat.errors import NotAvailableError
from fedstat.models.checks import check_choice
from fedstat.models.vertical.exchange.patterns import PatternExchange
from fedstat.models.vertical.fit import MomentsFit
from fedstat.models.vfem.statements.assumptions import (
    LittleTest,
    independence_tests,
    little_test,
    unrestricted_law,
)
from fedstat.models.vfem.statements.influence import leave_one_out
from fedstat.models.vfem.statements.outcome import HeldInSession


class MomentStatements:
    """Statements of a fit with ``exchange="moments"``; other fits raise NotAvailableError."""

    _held: HeldInSession

    @property
    def exchange(self) -> PatternExchange | None:
        """The exchange of moments, of a fit in this session."""
        return self._held.exchange

    @property
    def moments_fit(self) -> MomentsFit | None:
        """The fit from the moments, in this session."""
        return self._held.moments_fit

    @property
    def dealers(self) -> pd.DataFrame:
        """Who dealt the random numbers for the product of each pair of institutions."""
        self._moments()
        assert self.exchange is not None
        rows = [(*pair, dealer or "coordinator") for pair, dealer in self.exchange.dealers.items()]
        return pd.DataFrame(rows, columns=["first", "second", "dealer"])

    def mcar_test(self, structure: Literal["model", "unrestricted"] = "model") -> LittleTest:
        """Little's test that blocks are missing completely at random.

        Parameters
        ----------
        structure : {"model", "unrestricted"}
            Covariance under the null: blocks independent between clients, as the model has it, or free.

        Returns
        -------
        (statistic, pvalue, df, patterns)
        """
        check_choice("structure", structure, ("model", "unrestricted"))
        fit = self._moments()
        return little_test(fit, unrestricted_law(fit) if structure == "unrestricted" else None)

    def independence_tests(self) -> pd.DataFrame:
        """Test every pair of clients for correlation between their blocks.

        Returns
        -------
        DataFrame
            One row per pair: entities that both have, Bartlett's statistic, p-value, degrees of freedom,
            largest canonical correlation, mean absolute correlation.
        """
        return pd.DataFrame(independence_tests(self._moments().moments))

    def leave_one_out(self) -> pd.DataFrame:
        """Fit the model without each column in turn: likelihood ratio, p-value, R-squared."""
        return leave_one_out(self._moments()).to_frame()

    def _moments(self) -> MomentsFit:
        if self.moments_fit is None:
            raise NotAvailableError(
                "this needs the moments of a fit in this session with exchange='moments'; the iterative "
                "exchange and files of results do not hold them"
            )
        return self.moments_fit
