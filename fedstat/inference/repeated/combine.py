"""One analysis on several synthetic tables, combined."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from fedstat.inference.repeated.analyses import MeanResults, read_analyses

ADVISED_TABLES = 20
MEASURED = (
    "Measured on 20 tables of 10,000 rows, logistic, columns a copula: 95 % intervals cover .91 at epsilon 1 "
    "and .89 at epsilon 3 (worst coefficient .79 and .76). PrivateCopulaGLM covers .95."
)


class CombinedResults(MeanResults):
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

    Examples
    --------
    >>> import fedstat as fs, numpy as np, pandas as pd, statsmodels.formula.api as smf
    >>> rng = np.random.default_rng(0)
    >>> tables = [pd.DataFrame(rng.normal(size=(50, 2)), columns=["y", "x"]) for _ in range(5)]
    >>> found = fs.combine([smf.ols("y ~ x", table).fit() for table in tables])
    >>> found.conf_int().shape, "x" in found.summary().as_text()
    ((2, 2), True)
    """

    def __init__(self, params: pd.DataFrame, errors: pd.DataFrame, response: str) -> None:
        super().__init__(params, errors, response)
        self.tables = len(params)
        total = (1.0 + 1.0 / self.tables) * self.between - self.within
        self.floored = total < self.within / self.tables
        self._settle(total.where(~self.floored, self.within / self.tables), float(self.tables - 1))

    def _notes(self) -> list[str]:
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
        return notes


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
    >>> import fedstat as fs, numpy as np, pandas as pd, statsmodels.formula.api as smf
    >>> rng = np.random.default_rng(0)
    >>> tables = [pd.DataFrame(rng.normal(size=(50, 2)), columns=["y", "x"]) for _ in range(5)]
    >>> fs.combine([smf.ols("y ~ x", table).fit() for table in tables]).params.index.tolist()
    ['Intercept', 'x']
    """
    results = list(results)
    advice = f"draw {ADVISED_TABLES} with sample_tables({ADVISED_TABLES}, n)"
    return CombinedResults(*read_analyses("combine", results, "tables", advice))
