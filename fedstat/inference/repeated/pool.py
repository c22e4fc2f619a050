"""One analysis on several imputations of what is missing, pooled by Rubin's rules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from statsmodels.stats.contrast import ContrastResults

from fedstat.errors import ModelError, NotAvailableError
from fedstat.inference.hypotheses import Hypothesis, HypothesisTest, read_constraints
from fedstat.inference.repeated.analyses import MeanResults, read_analyses
from fedstat.typing import Floats

LEAST_LAMBDA = 1e-4
"""Share of the variance that imputation is taken to have at least, as in mice, for degrees of freedom."""


class PooledResults(MeanResults):
    """Coefficients of one analysis on several imputations, pooled by Rubin's rules (1987).

    `model` has the names that tables of statsmodels read.

    Attributes
    ----------
    params, bse, tvalues, pvalues : Series
        Mean over imputations; its standard error; their ratio; two-sided p-values by Student's t.
    df_resid : Series
        Degrees of freedom of Student's t by coefficient (Barnard and Rubin 1999).
    within, between : Series
        Mean of the variances of the estimates, and variance of the estimates between imputations.
    riv : Series
        Relative increase of the variance by what is missing, ``(1 + 1/m) between / within``.
    lambda_ : Series
        Share of the variance that it makes up, ``(1 + 1/m) between / bse^2``.
    fmi : Series
        Fraction of missing information, ``(riv + 2 / (df + 3)) / (riv + 1)``.
    imputations : int
        m.
    df_complete : float
        Degrees of freedom of the analysis were nothing missing; infinite for none.

    Examples
    --------
    >>> import fedstat as fs, numpy as np, pandas as pd, statsmodels.formula.api as smf
    >>> rng = np.random.default_rng(0)
    >>> tables = [pd.DataFrame(rng.normal(size=(50, 2)), columns=["y", "x"]) for _ in range(5)]
    >>> pooled = fs.pool([smf.ols("y ~ x", table).fit() for table in tables])
    >>> pooled.to_frame().shape[0], pooled.cov_params().shape, pooled.conf_int().shape
    (2, (2, 2), (2, 2))
    >>> bool(pooled.wald_test("x = 0").pvalue <= 1.0), "x" in pooled.summary().as_text()
    (True, True)
    """

    def __init__(
        self,
        params: pd.DataFrame,
        errors: pd.DataFrame,
        response: str,
        covariances: Floats | None,
        df_complete: float,
    ) -> None:
        super().__init__(params, errors, response)
        m = self.imputations = len(params)
        self.df_complete, self._estimates, self._covariances = df_complete, params, covariances
        increase = (1.0 + 1.0 / m) * self.between
        total = self.within + increase
        self.riv, self.lambda_ = increase / self.within, increase / total
        df = pd.Series(barnard_rubin(m, self.lambda_.to_numpy(), df_complete), self.params.index)
        self.fmi = (self.riv + 2.0 / (df + 3.0)) / (self.riv + 1.0)
        self._settle(total, df)

    def cov_params(self) -> pd.DataFrame:
        """Covariance of the pooled coefficients: within imputations, and 1 + 1/m times that between them.

        Raises
        ------
        NotAvailableError
            A result has no covariance.
        """
        between = self._estimates.cov().to_numpy()
        total = self._within() + (1.0 + 1.0 / self.imputations) * between
        return pd.DataFrame(total, index=self.params.index, columns=self.params.index)

    def wald_test(self, hypothesis: Hypothesis) -> ContrastResults:
        """Test several coefficients together: the F test D1 of Li, Raghunathan and Rubin (1991).

        It takes the same share of information to be missing of all that is tested. With few complete degrees
        of freedom those of the denominator are Reiter's (2007).

        Parameters
        ----------
        hypothesis : str, sequence of str, or array
            Linear constraints, as of statsmodels: ``"a = b, c = 0"``, ``["a", "c"]`` (both zero), or a matrix
            with a row each.

        Returns
        -------
        statsmodels ContrastResults
            ``statistic`` (D1), ``pvalue``, ``df_num``, ``df_denom``.

        Raises
        ------
        ModelError
            A name is not a coefficient, or a constraint follows from the others.
        NotAvailableError
            A result has no covariance.

        References
        ----------
        Li, K. H., Raghunathan, T. E. and Rubin, D. B. (1991). Large-sample significance levels from multiply
        imputed data using moment-based statistics and an F reference distribution. Journal of the American
        Statistical Association 86, 1065-1073.
        Reiter, J. P. (2007). Small-sample degrees of freedom for multi-component significance tests with
        multiple imputation for missing data. Biometrika 94, 502-508.
        """
        constraints = read_constraints(hypothesis, [str(name) for name in self.params.index])
        R, m = constraints.R, self.imputations
        k = len(R)
        if np.linalg.matrix_rank(R) < k:
            raise ModelError("wald_test: a constraint follows from the others; leave it out")
        Q = self._estimates.to_numpy() @ R.T
        within = R @ self._within() @ R.T
        r = (1.0 + 1.0 / m) * float(np.trace(np.linalg.solve(within, np.atleast_2d(np.cov(Q.T))))) / k
        d = Q.mean(axis=0) - constraints.q
        D1 = float(d @ np.linalg.solve(within, d)) / (k * (1.0 + r))
        return HypothesisTest(F=D1, df_num=k, df_denom=denominator(k, m, r, self.df_complete))

    def to_frame(self, alpha: float = 0.05) -> pd.DataFrame:
        """One row per coefficient, with what mice's ``pool`` and its summary tell.

        Returns
        -------
        DataFrame
            ``estimate``, ``std_error``, ``statistic``, ``df``, ``p_value``, ``low``, ``high``, ``within``
            (ubar), ``between`` (b), ``riv``, ``lambda``, ``fmi``.
        """
        limits = self.conf_int(alpha)
        return pd.DataFrame(
            {
                "estimate": self.params,
                "std_error": self.bse,
                "statistic": self.tvalues,
                "df": self.df_resid,
                "p_value": self.pvalues,
                "low": limits[0],
                "high": limits[1],
                "within": self.within,
                "between": self.between,
                "riv": self.riv,
                "lambda": self.lambda_,
                "fmi": self.fmi,
            }
        )

    def _within(self) -> Floats:
        if self._covariances is None:
            raise NotAvailableError("a result has no cov_params(): there are tests of single coefficients")
        return np.asarray(self._covariances.mean(axis=0))

    def _parts(self) -> dict[str, Floats]:
        return {"df": np.asarray(self.df_resid), "fmi": self.fmi.to_numpy()}

    def _notes(self) -> list[str]:
        complete = "infinite" if np.isinf(self.df_complete) else f"{self.df_complete:g}"
        return [
            f"Means over {self.imputations} imputations, by Rubin's rules (1987); Student's t with degrees "
            f"of freedom df of Barnard and Rubin (1999), those of the complete data being {complete}. fmi is "
            "the fraction of missing information. wald_test() tests several coefficients together."
        ]


def barnard_rubin(m: int, share: Floats, df_complete: float) -> Floats:
    """Degrees of freedom of one coefficient whose variance has a share from m imputations (1999)."""
    share = np.maximum(share, LEAST_LAMBDA)
    df = (m - 1) / share**2
    if np.isinf(df_complete):
        return df
    observed = (df_complete + 1.0) / (df_complete + 3.0) * df_complete * (1.0 - share)
    return np.asarray(df * observed / (df + observed))


def denominator(k: int, m: int, r: float, df_complete: float) -> float:
    """Degrees of freedom in the denominator of D1 for k coefficients, m imputations and their increase r."""
    t = k * (m - 1)
    if k == 1:
        return float(barnard_rubin(m, np.array(r / (1.0 + r)), df_complete))
    if r <= 0.0:
        return df_complete
    if t <= 4:
        # Too few imputations for moments of the F distribution (Li et al. 1991, equation 2.8).
        return t * (1.0 + 1.0 / k) * (1.0 + 1.0 / r) ** 2 / 2.0
    if np.isinf(df_complete):
        return 4.0 + (t - 4) * (1.0 + (1.0 - 2.0 / t) / r) ** 2
    # Reiter (2007), equation 3.
    a = r * t / (t - 2.0)
    v = (df_complete + 1.0) / (df_complete + 3.0) * df_complete
    c0, c1, c2 = 1.0 / (t - 4.0), v - 2.0 * (1.0 + a), v - 4.0 * (1.0 + a)
    if c2 <= 0.0:
        raise NotAvailableError(
            f"wald_test: too much is missing for {df_complete:g} degrees of freedom of the complete data"
        )
    z = 1.0 / c2 + c0 * (a**2 * c1 / ((1.0 + a) ** 2 * c2))
    z += c0 * (8.0 * a**2 * c1 / ((1.0 + a) * c2**2) + 4.0 * a**2 / ((1.0 + a) * c2))
    z += c0 * (4.0 * a**2 / (c2 * c1) + 16.0 * a**2 * c1 / c2**3) + c0 * (8.0 * a**2 / c2**2)
    return 4.0 + 1.0 / z


def pool(results: Sequence[object], df_complete: float | None = None) -> PooledResults:
    """Pool one analysis that was done on each of several imputations of the missing values.

    Imputations are made where the rows are, one analysis is done over all sites on the first, one on the
    second, and so on; what is pooled are the results, so that it asks no site for anything.

    Parameters
    ----------
    results : sequence
        What statsmodels, fedstat or any other package returned for each imputation: named `params` and `bse`,
        the same names everywhere, and for tests of several coefficients `cov_params()`. At least 2.
    df_complete : float, optional
        Degrees of freedom of the analysis were nothing missing; by default the smallest `df_resid` of the
        results, as in mice, and infinite where one has none.

    Returns
    -------
    PooledResults

    Raises
    ------
    ModelError
        Fewer than two, one without named params and bse, names that differ, or numbers that are not finite.

    See Also
    --------
    combine : the rule for synthetic tables, which have another variance.

    References
    ----------
    Rubin, D. B. (1987). Multiple Imputation for Nonresponse in Surveys, chapter 3. Wiley.
    Barnard, J. and Rubin, D. B. (1999). Small-sample degrees of freedom with multiple imputation. Biometrika
    86, 948-955.

    Examples
    --------
    >>> import numpy as np, pandas as pd, statsmodels.formula.api as smf, fedstat as fs
    >>> rng = np.random.default_rng(1)
    >>> x = rng.standard_normal(60)
    >>> y = 1 + 2 * x + rng.standard_normal(60)
    >>> draws = [np.where(np.arange(60) < 10, rng.standard_normal(60), x) for _ in range(5)]
    >>> pooled = fs.pool([smf.ols("y ~ x", pd.DataFrame({"x": one, "y": y})).fit() for one in draws])
    >>> bool(pooled.fmi["x"] > 0.01), pooled.imputations
    (True, 5)
    >>> pooled.wald_test(["x"]).df_num
    1
    """
    results = list(results)
    found = read_analyses("pool", results, "imputations", "impute more than once")
    if df_complete is None:
        df_complete = min(_df(result) for result in results)
    if not df_complete > 0.0:
        raise ModelError(f"pool: expected positive df_complete, received {df_complete}")
    return PooledResults(*found, _covariances(results, found[0].shape[1]), float(df_complete))


def _df(result: object) -> float:
    try:
        return float(getattr(result, "df_resid", np.inf))
    except (TypeError, ValueError, NotAvailableError):
        return float("inf")


def _covariances(results: Sequence[object], p: int) -> Floats | None:
    """Covariances of all results, (m, p, p); None where one has none."""
    found = []
    for place, result in enumerate(results):
        try:
            one: Floats = np.asarray(result.cov_params(), dtype=np.float64)  # type: ignore[attr-defined]
        except (AttributeError, NotAvailableError):
            return None
        if one.shape != (p, p):
            raise ModelError(f"pool: result {place} has a covariance of shape {one.shape} for {p} params")
        found.append(one)
    return np.array(found)
