from __future__ import annotations
from dataclasses import dataclass
from typing import Self
import numpy as np
from fedstat.federation.audit.ledger import Ledger
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.results import DesignResults, RowsBasis, rows_estimate
from fedstat.models.mixed.protocol import MixedFit
from fedstat.models.results import EstimateRecord

FORMAT = "fedstat mixed results 1"
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MixedRecord(EstimateRecord):
    """What a file of results holds."""
    fit: MixedFit
    basis: RowsBasis

class MixedResults(DesignResults, saved_as=FORMAT, record=MixedRecord):
    @classmethod
    def _of(cls, model: HorizontalModel, fit: MixedFit, ledger: Ledger) -> Self:
        estimate = rows_estimate(model, fit.design, params=fit.params, cov=fit.cov, converged=fit.converged, convergence="", cov_type="x", scale=fit.scale, llf=-0.5*fit.deviance, reasons={})
        return cls(MixedRecord(estimate=estimate, fit=fit, basis=RowsBasis.of(model)), ledger, model)
