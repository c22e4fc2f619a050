"""Pictures that results of a selection draw of themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from fedstat.inference.estimate import INTERCEPT
from fedstat.inference.results import FederatedResults
from fedstat.kernels.glm.specification import DistributionSpec
from fedstat.models.vglm.report import plots
from fedstat.models.vglm.report.outcome import Selection
from fedstat.models.vglm.report.prediction import Predictor
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class SelectionPictures(FederatedResults):
    """Path, criterion and stability."""

    selection: Selection
    scales: Floats | None = None
    """Standard deviations of the columns, (p,); None of results that were read from a file."""
    _predictor: Predictor

    @property
    def path_params(self) -> pd.DataFrame:
        """Coefficients at every lambda."""
        raise NotImplementedError

    def _frequencies(self) -> Floats:
        raise NotImplementedError

    def plot_path(self, ax: Axes | None = None) -> Axes:
        """Draw the coefficients over lambda, coloured by institution; dotted where they are proposed.

        They are in units of one standard deviation of each column; of results that were read from a file,
        which has no deviations, as shares of their largest size. Names stand at the right edge, of the
        columns that are selected at the chosen lambda first, numbers of columns on top; the chosen lambda is
        marked, and what is not selected there is pale.

        Parameters
        ----------
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Axes
        """
        return plots.plot_path(self.estimate, self.selection, self.path_params.iloc[:, 1:], self.scales, ax)

    def plot_criterion(self, criterion: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw a criterion over lambda, hollow where the fit is proposed; by default the one that chose.

        Parameters
        ----------
        criterion : {"bic", "ebic", "aic", "cv"}, optional
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Axes
            Numbers of selected columns stand on top; the chosen lambda is marked.
        """
        name = self.selection.select if criterion is None else criterion
        return plots.plot_criterion(self.selection, name, ax)

    def plot_stability(self, threshold: float = 0.9, ax: Axes | None = None) -> Axes:
        """Draw how often each column is selected in random halves, over lambda.

        Parameters
        ----------
        threshold : float
            Drawn as a line; columns that reach it down to the chosen lambda, those of :meth:`stable`, are
            named, the others pale.
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Axes
        """
        frequencies = pd.DataFrame(self._frequencies(), columns=list(self.estimate.names[1:]))
        return plots.plot_stability(self.estimate, self.selection, frequencies, threshold, ax)

    def _link(self) -> DistributionSpec:
        return self._predictor.family

    def _deviations(self) -> pd.Series:
        if self.scales is None:
            return super()._deviations()
        return pd.Series([1.0, *self.scales], index=[INTERCEPT, *self.estimate.names[1:]])
