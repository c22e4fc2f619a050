"""What results of VFEM share, whatever the family of the response."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedstat.errors import NotAvailableError
from fedstat.federation.account.ledger import Ledger
from fedstat.inference.plots import plot_convergence
from fedstat.inference.results import FederatedResults
from fedstat.models.vfem.blocks.layout import complete
from fedstat.typing import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class AscentResults(FederatedResults):
    """Results of a climb to a maximum of the observed-data likelihood.

    Attributes
    ----------
    fit_ : Fit or GLMFit
        With the trace of the climb.
    options : Options
        With its tolerances.
    model : VFEMRegression, VFEMGLM or None
        None where the results were read from a file.
    """

    fit_: Any
    options: Any
    model: Any

    @property
    def nobs_by_client(self) -> pd.Series:
        """Entities of the fit that each client has."""
        return pd.Series({b.client: b.entities for b in self.estimate.blocks if b.columns}, dtype=np.int64)

    @property
    def trace(self) -> pd.DataFrame:
        """Log-likelihood, relative score, largest change and seconds of every iteration, and its move."""
        return pd.DataFrame([asdict(row) for row in self.fit_.trace]).set_index("iteration")

    def plot_convergence(self, ax: Axes | None = None) -> Axes:
        """Draw the relative score and the distance to the last log-likelihood over the iterations.

        Parameters
        ----------
        ax : matplotlib Axes, optional
        """
        return plot_convergence(self.trace, tolerance=self.options.tol_score, ax=ax)

    def _summary_right(self) -> list[tuple[str, str]]:
        rows = super()._summary_right()
        last = self.fit_.trace[-1]
        at = None if not isinstance(self._ledger, Ledger) else self._ledger.at
        rows.insert(1, ("Coordinator", f"at {at}" if at else "apart"))
        return [*rows, ("Iterations", str(last.iteration)), ("Relative score", f"{last.score:.1e}")]

    def _by_entity(self, what: str, values: Array | None, clients: Collection[str]) -> pd.Series:
        """Label what the response holder computed, one value per entity of the fit.

        Raises
        ------
        NotAvailableError
            There are no values, or no partition to name the entities.
        """
        if values is None:
            raise NotAvailableError(
                f"no {what} values: one per entity, they stay with the response holder; fit with the "
                "coordinator there, and read them before saving"
            )
        model = self._need_model(what)
        index = model.partition.entities[model.design.entities]
        if len(index) != len(values):
            blocks = tuple(b for b in model.design.blocks if b.client in clients)
            index = index[complete(blocks, model.design.n)]
        return pd.Series(values, index=index, name=what)

    def _need_model(self, what: str) -> Any:
        if self.model is None:
            raise NotAvailableError(
                f"{what}: this result was read from a file and has no partition; give one"
            )
        return self.model
