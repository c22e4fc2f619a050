"""How close predicted means are to a response that is a number, from sums over rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstat.inference.tables import number
from fedstat.typing import Floats

TINY = 1e-12
"""Of the deviance of predictions: a constant's deviance that is rounding."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Accuracy:
    """Squared errors and deviance of predicted means, beside those of a constant.

    Parameters
    ----------
    n, total : ndarray, shape (K,)
        Rows, and the sum of their responses, by site.
    squares : ndarray, shape (K,)
        Sums of squared differences between response and predicted mean, by site.
    spread : ndarray, shape (K,)
        Sums of squared differences between response and the site's own mean.
    deviance, null_deviance : float
        Of all rows, by the model's distribution: of the predicted means, and of the mean of all responses.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> found = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition).fit().evaluate().accuracy
    >>> len(found.rmse), len(found.rsquared), bool(found.rsquared[-1] > 0.0), "Deviance" in found.note
    (5, 5, True, True)
    >>> bool(abs(found.deviance_explained - found.rsquared[-1]) < 1e-9)
    True
    """

    n: Floats
    total: Floats
    squares: Floats
    spread: Floats
    deviance: float
    null_deviance: float

    @property
    def rmse(self) -> Floats:
        """Root of the mean squared error, (K + 1,): by site, and of all rows."""
        n, squares = (np.append(part, part.sum()) for part in (self.n, self.squares))
        return np.asarray(np.sqrt(squares / n))

    @property
    def rsquared(self) -> Floats:
        """1 - squared errors / spread, (K + 1,): by site about its own mean, and of all about theirs.

        Negative where a constant, the mean of these very rows, is closer; nan where responses do not differ.
        """
        means = self.total / self.n
        between = float(self.n @ (means - self.total.sum() / self.n.sum()) ** 2)
        spread = np.append(self.spread, self.spread.sum() + between)
        squares = np.append(self.squares, self.squares.sum())
        share = np.divide(squares, spread, out=np.full_like(spread, np.nan), where=spread > 0.0)
        return np.asarray(1.0 - share)

    @property
    def deviance_explained(self) -> float:
        """Share of a constant's deviance that predictions take away.

        R-squared of a normal response, but where predictions were averaged before they were counted.
        """
        return (
            1.0 - self.deviance / self.null_deviance
            if self.null_deviance > TINY * abs(self.deviance)
            else float("nan")
        )

    @property
    def note(self) -> str:
        """What is printed below a summary."""
        share = self.deviance_explained
        explained = "" if np.isnan(share) else f"; {100.0 * share:.1f} % explained"
        return (
            f"Deviance, all entities: {number(self.deviance)}, of a constant {number(self.null_deviance)}"
            f"{explained}. R2 is 1 - squared errors / spread about the mean of the entities that are "
            "evaluated."
        )
