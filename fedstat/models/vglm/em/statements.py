"""Tests of what is assumed of the missing blocks of a selecting fit."""

from __future__ import annotations

from fedstat.errors import NotAvailableError
from fedstat.models.vertical.fit import MomentsFit, fit_moments
from fedstat.models.vertical.law.fit import LawFit
from fedstat.models.vertical.law.statements import AssumptionStatements
from fedstat.models.vglm.em.blocks import Observed


class BlockStatements(AssumptionStatements):
    """Of a fit with missing="em", on all of its columns; other fits raise NotAvailableError."""

    observed: Observed | None = None

    def _moments(self) -> MomentsFit | LawFit:
        if self.observed is None:
            raise NotAvailableError(
                "this needs the sums by missing pattern of a fit in this session with missing='em'; other "
                "fits and files of results do not hold them"
            )
        # What was selected does not matter: the laws are those of all columns and the response.
        return self.observed.whole or fit_moments(self.observed.exchange.moments)
