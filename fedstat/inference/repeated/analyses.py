"""The same coefficients of several analyses, and statements about their mean."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import ModelError
from fedstat.inference.summary import STATEMENTS, SummaryContent, coefficient_sheet
from fedstat.inference.tables import SheetSummary

LEAST = 2


def read_analyses(
    call: str, results: Sequence[object], what: str, advice: str
) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """Read params and standard errors, a row for each analysis, and the name of the response.

    A ModelError where there are fewer than two, one has no named params and bse, names differ, or a number is
    not finite; `what` and `advice` say what each is of, and how to come to more.
    """
    if len(results) < LEAST:
        raise ModelError(
            f"{call}: expected the results of at least {LEAST} {what}, received {len(results)}; {advice}"
        )
    for place, result in enumerate(results):
        if not all(isinstance(getattr(result, name, None), pd.Series) for name in ("params", "bse")):
            raise ModelError(
                f"{call}: result {place} has no named params and bse; received {type(result).__name__}"
            )
    names = [list(result.params.index) for result in results]  # type: ignore[attr-defined]
    for place, here in enumerate(names):
        if here != names[0]:
            other = sorted(set(map(str, here)) ^ set(map(str, names[0]))) or ["in another order"]
            raise ModelError(
                f"{call}: result {place} has other coefficients than result 0: {', '.join(other)}; levels "
                "that a table lacks can be declared with C(column, levels=[...])"
            )
    params, errors = (
        pd.DataFrame([getattr(result, part) for result in results]).reset_index(drop=True)
        for part in ("params", "bse")
    )
    if not (np.isfinite(params).all(axis=None) and np.isfinite(errors).all(axis=None)):
        raise ModelError(f"{call}: a coefficient or a standard error is not a finite number")
    return params, errors, str(getattr(getattr(results[0], "model", None), "endog_names", f"{call}d"))


class MeanResults:
    """Mean coefficients of several analyses, with standard errors and Student's t.

    `model` has the names that tables of statsmodels read.

    Attributes
    ----------
    params, bse, tvalues, pvalues : Series
        Mean over analyses; its standard error; their ratio; two-sided p-values by Student's t.
    between, within : Series
        Variance of the estimates between analyses, and mean of their own variances.
    """

    df_resid: float | pd.Series

    def __init__(self, params: pd.DataFrame, errors: pd.DataFrame, response: str) -> None:
        # what statsmodels' tables read
        self.model = SimpleNamespace(endog_names=response, exog_names=list(params.columns))
        self.params = params.mean().rename(None)
        self.between, self.within = params.var(ddof=1), (errors**2).mean()

    def _settle(self, variance: pd.Series, df: float | pd.Series) -> None:
        """Take the variances of the means, and the degrees of freedom."""
        self.bse, self.df_resid = np.sqrt(variance), df
        self.tvalues: pd.Series = self.params / self.bse
        self.pvalues = pd.Series(2.0 * stats.t.sf(self.tvalues.abs(), df), self.params.index)

    def conf_int(self, alpha: float = 0.05) -> pd.DataFrame:
        """Intervals of level ``1 - alpha``: columns 0 and 1, rows by name."""
        if not 0.0 < alpha < 1.0:
            raise ModelError(f"conf_int: expected alpha between 0 and 1, received {alpha}")
        half = stats.t.isf(alpha / 2.0, self.df_resid) * self.bse
        return pd.DataFrame({0: self.params - half, 1: self.params + half})

    def summary(self, alpha: float = 0.05) -> SheetSummary:
        """Coefficients with errors, tests and intervals, and what these rest on."""
        limits = self.conf_int(alpha)
        columns = (self.params, self.bse, self.tvalues, self.pvalues, limits[0], limits[1])
        frame = pd.DataFrame(dict(zip(STATEMENTS, columns, strict=True))).rename_axis("name").reset_index()
        frame["client"] = ""
        content = SummaryContent(
            "", (), (), frame, True, alpha, (), None, (), "", student=True, parts=self._parts()
        )
        return SheetSummary([coefficient_sheet(content)], self._notes())

    def _parts(self) -> dict[str, np.ndarray]:
        return {}

    def _notes(self) -> list[str]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.summary().as_text()
