"""Imputations: completed sums and regressions on them, or tables at the sites and fits to these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from fedstat.errors import EstimationError, ModelError
from fedstat.federation.partition.partition import ClientPartition
from fedstat.inference.estimate import LedgerLike, ReceiptLike
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.pooling import PooledResults, pool, pool_analyses
from fedstat.inference.summary import Report
from fedstat.inference.tables import Sheet, number
from fedstat.models.impute.draws import Draw, PatternSums
from fedstat.models.impute.protocol import ImputedRows
from fedstat.typing import Floats

SLOW = 0.1
"""Correlation of successive imputations above which they are reported as dependent."""
NOTES = Catalogue(
    critical={
        "dependent": "Successive imputations are dependent: their parameters have a correlation of up to "
        "{correlation:.2f}. Standard errors are too small. Leave out the columns with the most missing "
        "values.",
    },
    info={
        "law": "Missing values are drawn from the joint normal model of all columns, whose parameters are "
        "drawn as well. They are valid if missingness depends on observed values only (missing at random).",
        "sums": "Each imputation consists of sums of products; no row is imputed. regress() fits linear "
        "models to them. Terms such as squares and interactions are imputed as columns of their own.",
    },
)


@dataclass(frozen=True, slots=True, eq=False)
class LeastSquares:
    """Least squares on one imputation: what :func:`fedstat.pool` reads."""

    params: pd.Series[float]
    bse: pd.Series[float]
    covariance: Floats
    df_resid: float
    model: SimpleNamespace

    def cov_params(self) -> Floats:
        """Covariance of the coefficients."""
        return self.covariance


class Imputations(Report):
    """Imputations of :func:`fedstat.impute`.

    Each imputation is the table of sums of products of all columns after the missing values were drawn. Sums
    are all that means, covariances and linear regressions need.

    Attributes
    ----------
    m : int
        Number of imputations.
    names : tuple of str
        The columns; the response of the formula is the last one.
    nobs : int
        Entities of each imputation.
    ledger : Ledger
        The releases on which the imputations are based.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> imputations = fs.impute(partition, "NPGR ~ ROA + CI", m=5, seed=1)
    >>> imputations
    <Imputations: 5 of 3 columns, 5,000 entities; see .summary()>
    >>> imputations.regress("ROA", ["NPGR", "CI"]).params.index.tolist()
    ['Intercept', 'NPGR', 'CI']
    >>> imputations.sums(0).shape, imputations.tidy()["term"].tolist(), len(imputations.glance())
    ((4, 4), ['ROA', 'CI', 'NPGR'], 1)
    """

    def __init__(
        self,
        patterns: PatternSums,
        draws: Sequence[Draw],
        correlation: float,
        ledger: LedgerLike,
        notes: Sequence[Note] = (),
    ) -> None:
        self.ledger, self._patterns, self._draws = ledger, patterns, tuple(draws)
        self._correlation, self._fit_notes = correlation, tuple(notes)
        self.m, self.names, self.nobs = len(self._draws), patterns.names, round(patterns.n.sum())

    def sums(self, j: int) -> pd.DataFrame:
        """Return the sums of products of (1, columns) in imputation `j`, in the units of the data."""
        labels = ["Intercept", *self.names]
        return pd.DataFrame(self._patterns.in_units(self._draws[j].gram), labels, labels)

    def regress(self, response: str | None = None, columns: Sequence[str] | None = None) -> PooledResults:
        """Regress one of the columns on others by least squares, pooled over the imputations.

        No request is sent to a site.

        Parameters
        ----------
        response : str, optional
            The response; that of the formula by default.
        columns : sequence of str, optional
            The covariates; by default all other columns.

        Returns
        -------
        PooledResults

        Raises
        ------
        ModelError
            A name is not one of the columns, or the response is among the covariates.
        EstimationError
            The covariates are collinear.
        """
        response = self.names[-1] if response is None else response
        chosen = [name for name in self.names if name != response] if columns is None else list(columns)
        unknown = [repr(name) for name in [response, *chosen] if name not in self.names]
        if unknown:
            raise ModelError(
                f"regress: no column {', '.join(unknown)}; the imputations have {', '.join(self.names)}"
            )
        if response in chosen or len(set(chosen)) < len(chosen):
            raise ModelError("regress: name each column once, and the response not among the covariates")
        fits = [self._least_squares(draw.gram, response, chosen) for draw in self._draws]
        return pool_analyses(fits, sources=(self,))

    def _least_squares(self, gram: Floats, response: str, columns: Sequence[str]) -> LeastSquares:
        at = [0, *[1 + self.names.index(name) for name in columns]]
        y = 1 + self.names.index(response)
        # in the units in which columns have mean zero and variance one, which keep their digits
        XX, Xy, n = gram[np.ix_(at, at)], gram[at, y], gram[0, 0]
        if np.linalg.eigvalsh(XX / n)[0] < 1e-10:
            raise EstimationError("regress: the covariates are collinear; leave one of them out")
        beta = np.linalg.solve(XX, Xy)
        df = n - len(at)
        cov = (gram[y, y] - Xy @ beta) / df * np.linalg.inv(XX)
        center, scale = np.append(0.0, self._patterns.center), np.append(1.0, self._patterns.scale)
        # x = (raw - center) / scale of the covariates, and the same of the response
        back = np.diag(1.0 / scale[at])
        back[0, 1:] = -center[at[1:]] / scale[at[1:]]
        back *= scale[y]
        params = back @ beta
        params[0] += center[y]
        cov = back @ cov @ back.T
        names = ["Intercept", *columns]
        bse = pd.Series(np.sqrt(np.diag(cov)), names)
        return LeastSquares(pd.Series(params, names), bse, cov, df, SimpleNamespace(endog_names=response))

    def tidy(self) -> pd.DataFrame:
        """Mean of each column over the imputations, by Rubin's rules, with broom's names."""
        found = []
        for draw in self._draws:
            n, mean = draw.gram[0, 0], draw.gram[0, 1:] / draw.gram[0, 0]
            variance = np.diag(draw.gram)[1:] / n - mean**2
            raw = self._patterns.center + self._patterns.scale * mean
            error = self._patterns.scale * np.sqrt(variance / (n - 1.0))
            labels = list(self.names)
            found.append(SimpleNamespace(params=pd.Series(raw, labels), bse=pd.Series(error, labels)))
        return pool(found, self.nobs - 1.0).tidy()

    def __repr__(self) -> str:
        return f"<Imputations: {self.m} of {len(self.names)} columns, {self.nobs:,} entities; see .summary()>"

    def _glance(self) -> Mapping[str, Any]:
        missing = self._patterns.missing
        return {
            "imputations": self.m,
            "nobs": self.nobs,
            "columns": len(self.names),
            "patterns": len(self._patterns.n),
            "missing": float(missing.mean()),
            "correlation": self._correlation,
        }

    def _sheets(self) -> Iterable[Sheet]:
        means = self.tidy()[["estimate", "std_error"]].to_numpy()
        shares, observed = self._patterns.missing, self._patterns.center
        rows = tuple(
            (name, f"{100 * share:.1f} %", number(center), number(mean), number(error))
            for name, share, center, (mean, error) in zip(self.names, shares, observed, means, strict=True)
        )
        headers = ("column", "missing", "mean observed", "mean imputed", "std err")
        title = f"{self.m} imputations of {self.nobs:,} entities"
        return [Sheet(headers, rows, "lrrrr", (40, 10, 14, 14, 14), title, gap=1)]

    def _summary_notes(self) -> Iterator[Note]:
        yield from self._fit_notes
        if self._correlation > SLOW:
            yield NOTES.note("dependent", correlation=self._correlation)
        yield NOTES.note("law")
        yield NOTES.note("sums")


# ----------------------------------------------------------------------------------------------------
# Sites with different rows: the tables are at the sites.

MIXED = 1.1
"""R-hat of the coefficients above which the chains have not mixed."""
LEAST_ITERATIONS = 5
"""Iterations in the second half, with which R-hat is computed."""
ROW_NOTES = Catalogue(
    warning={
        "not_mixed": "The chains differ: R-hat of the coefficients of {column} is {rhat:.2f} in the "
        "second half of the iterations. More iterations are needed.",
        "few_cells": "Not imputed at every site, since few of its rows lack them: {columns}. These rows are "
        "left out.",
    },
    info={
        "chained": "Each column is drawn given all others, {iterations} times in {chains} chains: numbers by "
        "{numbers}, zeros and ones by logistic, categories by multinomial regression. Draws are valid if "
        "missingness depends on observed values only (missing at random).",
        "at_sites": "Imputed values are at the sites, as long as these run; no site has released one.",
    },
)


class RowImputations(Report):
    """Imputations of :func:`fedstat.impute` where sites hold different rows.

    The imputed values are at the sites. :meth:`table` is a partition whose rows have them, for any model over
    rows; :meth:`fit` fits one to all tables, and pools by Rubin's rules.

    Attributes
    ----------
    m : int
        Number of imputed tables.
    names : tuple of str
        The columns.
    nobs : int
        Rows of all sites.
    ledger : Ledger
        What left the sites.
    trace : DataFrame
        Coefficients of each model by iteration and chain: ``iteration``, ``chain``, ``column``, ``term``,
        ``estimate``.

    Examples
    --------
    >>> import fedstat as fs, numpy as np
    >>> table = fs.datasets.make_hospitals()
    >>> table.loc[table.index % 4 == 0, "thalach"] = np.nan
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> imputations = fs.impute(partition, "num ~ age + thalach", m=2, iterations=2, seed=1)
    >>> model = lambda table: fs.FederatedOLS.from_formula("num ~ age + thalach", table)
    >>> pooled = imputations.fit(lambda table: model(table).fit())
    >>> pooled.params.index.tolist(), imputations.table(0).n_entities
    (['Intercept', 'age', 'thalach'], 920)
    >>> imputations.tidy()["column"].tolist(), len(imputations.trace), len(imputations.glance())
    (['thalach'], 12, 1)
    >>> imputations.receipt().sites().index.tolist() == list(partition.sites)
    True
    """

    def __init__(self, found: ImputedRows) -> None:
        self._found, self._course = found, found.course
        self.m, self.names, self.nobs = found.course.chains, found.course.columns, found.n_rows
        self.ledger = found.course.ledger
        self.trace = pd.DataFrame(found.course.trace)

    def table(self, j: int) -> ClientPartition:
        """Return the sites with the imputed cells of table `j`, counted from zero."""
        if not 0 <= j < self.m:
            raise ModelError(f"table: expected a number from 0 to {self.m - 1}, received {j!r}")
        return self._course.table(j)

    def fit(self, fit: Callable[[ClientPartition], Any]) -> PooledResults:
        """Fit a model to every imputed table, and pool the results by Rubin's rules.

        Parameters
        ----------
        fit : callable
            Makes the results of one table: ``lambda table: fs.GLORE.from_formula("y ~ x", table).fit()``.

        Returns
        -------
        PooledResults
            What the fits release is in their own ledgers.
        """
        return pool_analyses([fit(self.table(j)) for j in range(self.m)], sources=(self,))

    def receipt(self) -> ReceiptLike:
        """Return the receipt of the imputation's own session, signed by every site.

        The models of the chains have receipts of their own.
        """
        found: ReceiptLike | None = self.ledger.receipt
        assert found is not None
        return found

    def tidy(self) -> pd.DataFrame:
        """One row for each imputed column: kind, missing and drawn cells, and R-hat of its coefficients."""
        drawn = self._drawn
        return pd.DataFrame(
            {
                "column": drawn,
                "kind": [self._found.kinds[name] for name in drawn],
                "missing": [self._found.missing[name] for name in drawn],
                "drawn": [self._found.drawn[name] for name in drawn],
                "rhat": [self._rhat(name) for name in drawn],
            }
        )

    @property
    def _drawn(self) -> list[str]:
        """Columns with imputed cells."""
        return [name for name in self.names if self._found.drawn[name]]

    def _rhat(self, column: str) -> float:
        """Largest R-hat of the coefficients of a column in the second half of the iterations; NaN for few."""
        late = self.trace[
            (self.trace["column"] == column) & (self.trace["iteration"] >= self._found.iterations // 2)
        ]
        n = late["iteration"].nunique()
        if n < LEAST_ITERATIONS:
            return float("nan")
        of_chain = late.groupby(["term", "chain"])["estimate"]
        within = of_chain.var(ddof=1).groupby("term").mean()
        between = of_chain.mean().groupby("term").var(ddof=1)
        return float(np.sqrt((n - 1) / n + between / within).max())

    def __repr__(self) -> str:
        return f"<Imputations: {self.m} tables of {self.nobs:,} rows at the sites; see .summary()>"

    def _glance(self) -> Mapping[str, Any]:
        return {
            "imputations": self.m,
            "nobs": self.nobs,
            "columns": len(self.names),
            "iterations": self._found.iterations,
            "drawn": sum(self._found.drawn.values()),
        }

    def _sheets(self) -> Iterable[Sheet]:
        found = self._found
        rows = tuple(
            (
                name,
                found.kinds[name],
                f"{found.missing[name]:,}",
                f"{found.drawn[name]:,}",
                number(self._rhat(name)),
            )
            for name in self._drawn
        )
        title = f"{self.m} imputed tables of {self.nobs:,} rows"
        return [
            Sheet(("column", "kind", "missing", "drawn", "R-hat"), rows, "llrrr", (40, 12, 12, 12, 12), title)
        ]

    def _summary_notes(self) -> Iterator[Note]:
        for name in self._drawn:
            if (rhat := self._rhat(name)) > MIXED:
                yield ROW_NOTES.note("not_mixed", column=name, rhat=rhat)
        if self._found.few:
            yield ROW_NOTES.note("few_cells", columns=", ".join(self._found.few))
        numbers = "predictive mean matching" if self._course.matched else "linear regression"
        yield ROW_NOTES.note("chained", iterations=self._found.iterations, chains=self.m, numbers=numbers)
        yield ROW_NOTES.note("at_sites")
