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
    """How good a fitted mixture is, how it came about, and what its clusters look like.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_clusters(300, ["continuous", "ordinal"], p=3, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> fit = fs.M2SEM(partition, n_clusters=2, n_factors=1).fit(n_init=1, seed=0)
    >>> fit.n_clusters, fit.nobs, fit.labels.nunique(), fit.posterior.shape, fit.sizes.shape
    (2, 300, 2, (300, 2), (2, 3))
    >>> fit.llf < 0.0, fit.bic < fit.icl, fit.df_model > 20, fit.converged, 0.0 < fit.entropy <= 1.0
    (True, True, True, True, True)
    >>> fit.history.columns.tolist()[:3], fit.path.columns.tolist()[:3]
    (['round', 'mixture', 'llf'], ['lam1', 'lam2', 'columns'])
    >>> len(fit.modalities), len(fit.features), fit.classification.shape
    (2, 6, (2, 3))
    >>> len(fit.profiles()), len(fit.tidy()), len(fit.tests()), len(fit.contrasts()), len(fit.communalities())
    (15, 30, 6, 15, 6)
    >>> fit.predict(partition).shape, fit.factor_scores("Client 1").shape
    ((300, 2), (300, 1))
    >>> bool(fit.plot_heat().has_data()), len(fit.plot_profiles().axes)
    (True, 2)
    >>> "clusters" in fit.summary().as_text()
    True
    """

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
