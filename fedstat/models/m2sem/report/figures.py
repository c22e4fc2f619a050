"""Figures of a fitted mixture: criteria, course and pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from fedstat.models.m2sem.report.plots import plot_cluster_profiles, plot_profile_heat
from fedstat.models.m2sem.report.record import M2SEMRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class ClusterFigures:
    """How good a fitted mixture is, how it came about, and what its clusters look like."""

    _record: M2SEMRecord

    @property
    def llf(self) -> float:
        """Observed log-likelihood."""
        return self._record.loglik

    @property
    def df_model(self) -> int:
        """Number of free parameters."""
        return self._record.parameters

    @property
    def nobs(self) -> int:
        """Number of entities."""
        return self._record.n

    @property
    def bic(self) -> float:
        """Schwarz's criterion; the lower the better."""
        return self._record.bic

    @property
    def icl(self) -> float:
        """BIC and twice the entropy of the posteriors."""
        return self.bic + 2.0 * self._record.uncertainty

    @property
    def converged(self) -> bool:
        """Whether the fit came to an end."""
        return self._record.converged

    @property
    def history(self) -> pd.DataFrame:
        """Penalised log-likelihood of every mixture that was improved, by round."""
        return pd.DataFrame(list(self._record.history), columns=["round", "mixture", "llf"])

    @property
    def path(self) -> pd.DataFrame:
        """What penalties led to which support, and what its refit without penalties is worth."""
        return self._record.path

    # ---- pictures --------------------------------------------------------------------------------

    def plot_profiles(self, selected: bool = True) -> Figure:
        """Draw clusters' means, and mean places of levels, a panel for each modality.

        Parameters
        ----------
        selected : bool
            Whether only columns that tell clusters apart are drawn.

        Returns
        -------
        matplotlib Figure

        Raises
        ------
        NotAvailableError
            No column tells clusters apart.
        """
        return plot_cluster_profiles(self._record, selected)

    def plot_heat(self, ax: Axes | None = None) -> Axes:
        """Draw how far each cluster's columns are from their means over clusters, as a heat map."""
        return plot_profile_heat(self._record, ax)
