"""Pictures that results of boosting draw of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import pandas as pd

from fedstat.errors import ModelError
from fedstat.models.boost.report.plots import (
    draw_curves,
    draw_cv,
    draw_effects,
    draw_importance,
    draw_path,
    draw_scatter,
    draw_surface,
)
from fedstat.models.boost.report.prediction import HeldCurves, compared
from fedstat.models.checks import check_choice
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Picture: TypeAlias = Literal["surface", "effects", "path", "cv", "importance", "fitted"]
PICTURES = ("surface", "effects", "path", "cv", "importance", "fitted")


class BoostPictures:
    """Effects, the path, left-out folds, importance, and responses beside what is fitted.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> model = fs.FedFunctionBoost.from_formula("num ~ age + sex", partition)
    >>> fit = model.fit(steps=20, select="cv", folds=5)
    >>> fit.coef.shape, fit.offset.shape, round(fit.rsquared, 1), len(fit.effects) == len(fit.importance)
    ((5, 1), (1,), 0.1, False)
    >>> len(fit.learners), len(fit.path) <= 20, len(fit.cv) > 0, len(fit.aicc) > 0
    (3, True, True, True)
    >>> fit.predict(table.head(2)).shape, sorted(fit.score(table)), fit.steps(5).mstop
    ((2,), ['mape', 'rsquared'], 5)
    >>> len(fit.surface(fit.importance.index[0])) > 0, bool(fit.plot("importance").has_data())
    (True, True)
    """

    _record: Any
    mstop: int
    estimate: Any

    @property
    def path(self) -> pd.DataFrame:
        """The learner of every step."""
        raise NotImplementedError

    @property
    def cv(self) -> pd.DataFrame:
        """Loss of left-out folds."""
        raise NotImplementedError

    @property
    def learners(self) -> pd.DataFrame:
        """Shares by learner."""
        raise NotImplementedError

    @property
    def offset(self) -> Floats:
        """Curve from which boosting starts."""
        raise NotImplementedError

    def surface(self, learner: str) -> pd.DataFrame:
        """Effect of a learner."""
        raise NotImplementedError

    def predict(self, new: pd.DataFrame) -> pd.DataFrame | pd.Series:
        """Predict the response of rows."""
        raise NotImplementedError

    @property
    def importance(self) -> pd.Series:
        """Share of each learner in what is explained, the largest first."""
        return self.learners["explained"].sort_values(ascending=False).rename("importance")

    @property
    def effects(self) -> Mapping[str, pd.DataFrame]:
        """Effects of all learners that were taken, by label, as :meth:`surface`; the largest first."""
        taken = self.learners["first_step"] > 0
        return {str(label): self.surface(str(label)) for label in self.importance.index if taken[label]}

    def plot(
        self,
        what: Picture = "surface",
        learner: str | None = None,
        ax: Axes | None = None,
        new: pd.DataFrame | None = None,
    ) -> Any:
        """Draw a picture.

        Parameters
        ----------
        what : {"surface", "effects", "path", "cv", "importance", "fitted"}
            The effect of a learner; those of all that were taken; R-squared or loss along the path; the loss
            of left-out folds; shares in what is explained; responses of `new` rows beside what is fitted.
        learner : str, optional
            For "surface"; by default the one that explains most.
        ax : matplotlib Axes, optional
            Not for "effects", which takes a figure.
        new : DataFrame
            For "fitted": rows that you hold, with responses; of curves the first six are drawn.

        Returns
        -------
        matplotlib Axes; for "effects" an array of them.
        """
        check_choice("what", what, PICTURES)
        if what == "path":
            return draw_path(self.path, ax)
        if what == "cv":
            return draw_cv(self.cv, self.mstop, ax)
        if what == "importance":
            return draw_importance(self.learners, ax)
        if what == "fitted":
            return self._draw_fitted(new, ax)
        response = self.estimate.response
        if what == "effects":
            if ax is not None:
                raise ModelError("ax: the effects of all learners take a figure of their own")
            return draw_effects(self.effects, response)
        best = str(self.importance.drop("1").index[0]) if learner is None else learner
        return draw_surface(self.surface(best), best, response, ax)

    def _draw_fitted(self, new: pd.DataFrame | None, ax: Axes | None) -> Axes:
        if new is None:
            raise ModelError(
                "new: responses beside what is fitted need rows that you hold: plot(..., new=rows)"
            )
        held: HeldCurves = self._record
        functional = held.formula.functional
        rows = new.iloc[:6] if functional else new
        y, found, _ = compared(held, self.offset, rows, self.predict(rows))
        if not functional:
            return draw_scatter(found.ravel(), y.ravel(), self.estimate.response, ax)
        if y.ndim == 1:
            raise ModelError("new: curves are drawn beside fits at the same points, and these have others")
        names = [str(name) for name in rows.index]
        return draw_curves(np.asarray(held.t), y, found, names, self.estimate.response, ax)
