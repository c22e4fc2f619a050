"""Claims of standard errors after a selection, and results that make one claim."""

from __future__ import annotations

import pandas as pd

from fedstat.inference.estimate import Estimate, LedgerLike
from fedstat.inference.results import FederatedResults
from fedstat.kernels.glm.specification import DistributionSpec

MISSED, CALLED, APART_MISSED, APART_CALLED = 0.12, 0.54, 0.06, 0.07
"""Intervals that miss and null columns that are rejected, after BIC and by a split: vignette, simulation."""
SIMULATED = (
    " Simulated with 200 entities and 30 skewed columns, of which ten have effects of .05 to 1 residual "
    f"standard deviations: {MISSED:.2f} of the 95 % intervals after BIC missed (false coverage rate), and "
    f"{CALLED:.2f} of the selected columns without an effect had a p-value below .05; with inference='split' "
    f"{APART_MISSED:.2f} and {APART_CALLED:.2f}."
)
CONDITIONAL = (
    "Conditional on selection: standard errors, tests and intervals take the selected columns as given. They "
    "ignore the search among columns, which is harmless only where no true coefficient is near zero. "
    "fit(inference='debiased') and fit(lam=0) have intervals of all columns that do not depend on a "
    "selection, fit(inference='split') those of selected columns on other entities." + SIMULATED
)
DEBIASED = (
    "Debiased: a lasso tuned for prediction (smallest AIC), and one step of Newton with the nodewise lasso's "
    "inverse of the information. Intervals hold for every column by itself, selected or not, near zero or "
    "not, as the number of entities grows, if the model with all columns and its variance are right. They "
    "are not adjusted for the number of columns, and ignore the tuning of the lasso."
)
SPLIT = (
    "Sample splitting: a random half of the entities selected the columns, the other half estimated. "
    "Intervals are conditional on these columns: they are for the coefficients of the model with these "
    "alone, which are those of the model with all columns only where none that matters was left out. Another "
    "split would select otherwise; fit(inference='split', splits=50, folds=10) looks at many (normal family)."
    + SIMULATED
)
COVARIANCES = {"debiased": "debiased", "split": "observed, other half"}
TITLES = {
    "conditional": ", conditional on selection",
    "debiased": ", debiased: all columns, whatever is selected",
    "split": ", sample splitting: selected in one half, estimated in the other",
}
CLAIMS = {"conditional": CONDITIONAL, "debiased": DEBIASED, "split": SPLIT}


class BesideSelection(FederatedResults):
    """Other estimates of a fit that selected: its link, and the deviations of its columns."""

    parent: FederatedResults | None = None

    def _link(self) -> DistributionSpec | None:
        return None if self.parent is None else self.parent._link()

    def _deviations(self) -> pd.Series:
        return super()._deviations() if self.parent is None else self.parent._deviations()


class RefitResults(BesideSelection):
    """Maximum likelihood on the selected columns; inference is conditional on their selection.

    `parent` is the fit that selected the columns.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_selection(300, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> refit = fs.VerticalGLM.from_formula("y ~ .", partition).fit(n_lambdas=5).refit
    >>> refit.method_name, refit.model_name
    ('maximum likelihood', 'Vertical GLM on the selected columns')
    """

    model_name = "Vertical GLM on the selected columns"
    method_name = "maximum likelihood"

    def __init__(self, estimate: Estimate, ledger: LedgerLike | None, claim: str) -> None:
        super().__init__(estimate, ledger)
        self._claim = claim

    def _summary_notes(self) -> list[str]:
        return [*super()._summary_notes(), self._claim]


class DebiasedResults(BesideSelection):
    """Debiased (desparsified) estimates of all columns; no claim depends on what was selected.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_selection(300, seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> fit = fs.VerticalGLM.from_formula("y ~ .", partition).fit(n_lambdas=5, inference="debiased")
    >>> fit.debiased.bse.shape, fit.debiased.model_name
    ((101,), 'Vertical GLM, all columns')
    """

    model_name = "Vertical GLM, all columns"
    method_name = "debiased lasso"

    def _summary_notes(self) -> list[str]:
        return [*super()._summary_notes(), DEBIASED]
