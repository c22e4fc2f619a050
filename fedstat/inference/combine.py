"""One analysis on several synthetic tables, combined."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import ModelError
from fedstat.inference.summary import STATEMENTS, SummaryContent, coefficient_sheet
from fedstat.inference.tables import SheetSummary

LEAST_TABLES, ADVISED_TABLES = 2, 20
MEASURED = (
    "Measured on 20 tables of 10,000 rows, logistic, columns a copula: 95 % intervals cover .91 at epsilon 1 "
    "and .89 at epsilon 3 (worst coefficient .79 and .76). PrivateCopulaGLM covers .95."
)


class CombinedResults:
    """Coefficients of one analysis on several synthetic tables, with errors that count the synthesis.

    Attributes
    ----------
    params, bse, tvalues, pvalues : Series
        Mean over tables; its standard error; their ratio; two-sided p-values by Student's t.
    df_resid : float
        Degrees of freedom of Student's t: tables less one.
    between, within : Series
        Variance of the estimates between tables (b), and mean of their own variances (v).
    floored : Series of bool
        Where (1 + 1/M) b is below v, so that v / M stands in its place.
    tables : int
        M.
    """

    def __init__(self, params: pd.DataFrame, errors: pd.DataFrame, response: str) -> None:
        # what statsmodels' tables read
        self.model = SimpleNamespace(endog_names=response, exog_names=list(params.columns))
        self.tables = len(params)
        self.params = params.mean().rename(None)
        self.between, self.within = params.var(ddof=1), (errors**2).mean()
        total = (1.0 + 1.0 / self.tables) * self.between - self.within
        self.floored = total < self.within / self.tables
        self.bse = np.sqrt(total.where(~self.floored, self.within / self.tables))
        self.df_resid = float(self.tables - 1)
        self.tvalues: pd.Series = self.params / self.bse
        self.pvalues = pd.Series(2.0 * stats.t.sf(self.tvalues.abs(), self.df_resid), self.params.index)

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
        notes = [
            f"Means over {self.tables} synthetic tables; variances (1 + 1/M) b - v, b between the tables and "
            "v within (Raghunathan, Reiter and Rubin 2003). They are right for tables that were each drawn "
            "from a release of its own, as sample_tables() draws them, where the law of the tables is that "
            "of the data.",
            MEASURED,
        ]
        if self.floored.any():
            names = ", ".join(map(str, self.floored.index[self.floored]))
            notes.insert(1, f"Variances that would be too small or negative are v / M: {names}.")
        if self.tables < ADVISED_TABLES:
            notes.append(f"Fewer than {ADVISED_TABLES} tables: variances themselves vary much.")
        content = SummaryContent("", (), (), frame, True, alpha, (), None, (), "", student=True)
        return SheetSummary([coefficient_sheet(content)], notes)

    def __repr__(self) -> str:
        return self.summary().as_text()


def combine(results: Sequence[object]) -> CombinedResults:
    """Combine one analysis that was done on each of several synthetic tables.

    Parameters
    ----------
    results : sequence
        What statsmodels, fedstat or any other package returned for each table: named `params` and `bse`, the
        same names everywhere. At least 2; 20 or more give variances that can be relied on.

    Returns
    -------
    CombinedResults

    Raises
    ------
    ModelError
        Fewer than two, one without named params and bse, or names that differ.

    References
    ----------
    Raghunathan, T., Reiter, J. and Rubin, D. (2003). Multiple imputation for statistical disclosure
    limitation. Journal of Official Statistics 19, 1-16, equation 3.
    Reiter, J. (2002). Satisfying disclosure requirements with synthetic data sets. Journal of Official
    Statistics 18, 531-543.

    Examples
    --------
    >>> import numpy as np, statsmodels.formula.api as smf, pandas as pd, fedstat as fs
    >>> rng = np.random.default_rng(1)
    >>> tables = [pd.DataFrame(rng.standard_normal((100, 2)), columns=["x", "y"]) for _ in range(20)]
    >>> combined = fs.combine([smf.ols("y ~ x", table).fit() for table in tables])
    >>> combined.tables, list(combined.params.index)
    (20, ['Intercept', 'x'])
    """
    results = list(results)
    if len(results) < LEAST_TABLES:
        raise ModelError(
            f"combine: expected the results of at least {LEAST_TABLES} tables, received {len(results)}; "
            f"draw {ADVISED_TABLES} with sample_tables({ADVISED_TABLES}, n)"
        )
    for place, result in enumerate(results):
        if not all(isinstance(getattr(result, name, None), pd.Series) for name in ("params", "bse")):
            raise ModelError(
                f"combine: result {place} has no named params and bse; received {type(result).__name__}"
            )
    names = [list(result.params.index) for result in results]  # type: ignore[attr-defined]
    for place, here in enumerate(names):
        if here != names[0]:
            other = sorted(set(map(str, here)) ^ set(map(str, names[0]))) or ["in another order"]
            raise ModelError(
                f"combine: result {place} has other coefficients than result 0: {', '.join(other)}; levels "
                "that a table lacks can be declared with C(column, levels=[...])"
            )
    params, errors = (
        pd.DataFrame([getattr(result, what) for result in results]) for what in ("params", "bse")
    )
    if not (np.isfinite(params).all(axis=None) and np.isfinite(errors).all(axis=None)):
        raise ModelError("combine: a coefficient or a standard error is not a finite number")
    response = str(getattr(getattr(results[0], "model", None), "endog_names", "combined"))
    return CombinedResults(params.reset_index(drop=True), errors.reset_index(drop=True), response)
