"""Results of a private GLM: standard errors in two parts, selection, and predictions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import DesignError, ModelError, NotAvailableError, Remedy
from fedstat.federation.audit.ledger import Ledger
from fedstat.inference.estimate import INTERCEPT, Estimate, LedgerLike
from fedstat.inference.notes import Note
from fedstat.inference.summary import CoefficientBlock
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.kernels.penalized.penalties import Penalty
from fedstat.models.checks import HeldRows, check_frame
from fedstat.models.copula.margins import Bins
from fedstat.models.copula_glm import estimation
from fedstat.models.copula_glm.design import ScoredDesign
from fedstat.models.copula_glm.explain import TIMES
from fedstat.models.copula_glm.notes import (
    NO_LIKELIHOOD,
    NO_ROOT,
    NO_RSQUARED,
    NOT_EVALUATED,
    NOTES,
    fit_notes,
)
from fedstat.models.copula_glm.protocol import ReleasedMoments
from fedstat.models.copula_glm.score import CopulaTest, ScoreStep
from fedstat.models.horizontal.prediction import GLMPrediction, PredictedRows
from fedstat.models.results import CoefficientResults, EstimateRecord
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Predictions for the analyst's rows, coded by the public bounds as at the sites.

NONE_HELD = "predictions for the sites' entities are values of single entities, which no budget pays for"


def design_rows(design: ScoredDesign, frame: HeldRows | None) -> PredictedRows:
    """Code complete rows, (m, p + 1) with the column of ones, still without a linear predictor.

    Values outside a range are at its end. A DesignError names an absent column, a column without numbers, and
    one with a level that its bounds do not list.
    """
    frame = check_frame("predict", frame, NONE_HELD)
    needed = sorted(set(design.sources.tolist()))
    absent = [design.bins[j].name for j in needed if design.bins[j].name not in frame.columns]
    if absent:
        raise DesignError(f"predict: the rows lack the column {', '.join(map(repr, absent))}")
    values = {j: _values(design.bins[j], frame[design.bins[j].name]) for j in needed}
    columns = [np.ones(len(frame))]
    for column in design.columns:
        bins, x = design.bins[column.source], values[column.source]
        if bins.levels and not column.above:  # a function of listed numbers
            x = np.append(np.array(bins.levels, dtype=np.float64), np.nan)[
                np.nan_to_num(x, nan=-1.0).astype(int)
            ]
        columns.append(np.where(np.isnan(x), np.nan, column.at(x)))
    X = np.column_stack(columns)
    complete = np.asarray(~np.isnan(X).any(axis=1), dtype=np.bool_)
    return PredictedRows(pd.Series(np.nan, index=frame.index), complete, X[complete])


def _values(bins: Bins, series: pd.Series) -> Floats:
    """Numbers of a column, or positions of its levels if these are not numbers; nan if missing."""
    missing = series.isna().to_numpy(dtype=np.bool_)
    codes = bins.code(series)
    wrong = int(np.count_nonzero((codes < 0) & ~missing))
    if wrong:
        what = "levels that its bounds do not list" if bins.levels else "values that are not numbers"
        raise DesignError(f"predict: the column '{bins.name}' has {what}, in {wrong:,} rows")
    return np.where(missing, np.nan, codes if bins.levels else _numbers(bins, series))


def _numbers(bins: Bins, series: pd.Series) -> Floats:
    numbers = bins.numbers(series)
    clipped: Floats = np.clip(numbers, *bins.range)
    return clipped


# ----------------------------------------------------------------------------------------------------
# Results of a private generalized linear model: errors in two parts, selection, notes.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PrivateGLMRecord(EstimateRecord):
    """Content of a file of results."""

    errors: estimation.MomentErrors | None
    test: CopulaTest | None
    design: ScoredDesign
    distribution: DistributionSpec
    epsilon: float
    delta: float

    def check(self) -> None:
        """Require parts of one fit."""
        d = len(self.estimate.names)
        errors = self.errors
        if errors is None:
            return
        if not (errors.sampling.shape == errors.noise.shape == errors.deviations.shape[1:] == (d,)):
            raise ModelError("estimates and errors do not belong to one fit")


NO_LIKELIHOOD_LINES = ("R-squared", "Log-Likelihood", "AIC", "BIC")
"""Lines of a summary that sums with noise do not determine."""


class PrivateGLMResults(CoefficientResults, saved_as="fedstat copula_glm results 3", record=PrivateGLMRecord):
    """Results of :meth:`fedstat.PrivateCopulaGLM.fit`, with statsmodels' names and meanings.

    Standard errors include sampling and the noise of the release. Tests and intervals use Student's t, with
    one degree of freedom less than the number of simulated releases, and the normal distribution after a step
    (`polish=1`).

    Attributes
    ----------
    epsilon, delta : float
        Values of the release.

    Examples
    --------
    >>> import fedstat as fs, numpy as np, pandas as pd
    >>> rng = np.random.default_rng(0)
    >>> a, b = rng.normal(size=(2, 2_000))
    >>> table = pd.DataFrame({"y": a + rng.normal(size=2_000), "a": a, "b": b})
    >>> budget = fs.Policy(privacy=fs.Budget(epsilon=30.0, delta=1e-6))
    >>> held = {"Registry": ["y"], "Bank": ["a"], "Shop": ["b"]}
    >>> partition = fs.ClientPartition.from_frame(table, columns=held, policy=budget)
    >>> bounds = {name: (-5, 5) for name in table}
    >>> model = fs.PrivateCopulaGLM.from_formula("y ~ a + b", partition, epsilon=20.0, bounds=bounds)
    >>> fit = model.fit(polish=1, draws=20)
    >>> fit.bse_parts.columns.tolist(), fit.budget_too_small, fit.family
    (['sampling', 'noise'], False, 'Gaussian(link=Identity)')
    >>> bool(fit.copula_test["p_value"].min() > 0.001)
    True
    >>> fit.predict(table.head(2)).shape, fit.get_prediction(table.head(2)).summary_frame().shape
    ((2,), (2, 4))
    >>> len(fit.select())
    2
    """

    model_name = "Private GLM"
    method_name = "moments"

    _record: PrivateGLMRecord

    def __init__(self, record: PrivateGLMRecord, ledger: LedgerLike | None = None) -> None:
        super().__init__(record, ledger)
        self._errors, self.epsilon, self.delta = record.errors, record.epsilon, record.delta
        if not any(record.estimate.sites):  # sites hold rows
            self._unit = "rows"
        if record.errors is not None and not record.errors.simulated:
            self.method_name = "moments, one step"

    @classmethod
    def _of(
        cls,
        response: str,
        distribution: DistributionSpec,
        released: ReleasedMoments,
        fit: estimation.MomentFit,
        step: ScoreStep | None,
        errors: estimation.BootstrapErrors | None,
        test: CopulaTest | None,
        budget: tuple[float, float],
        ledger: Ledger,
        draws: int,
        rng: np.random.Generator,
    ) -> Self:
        """Name the numbers of a fit; without a root there are no errors, and none are printed."""
        columns, (epsilon, delta), n = released.design.columns, budget, released.n
        exact = estimation.covariance_without_noise(fit.distribution, fit.release.response, fit.root, n)
        found = None if errors is None else estimation.MomentErrors.of(errors, exact)
        if step is not None:
            found = estimation.MomentErrors.closed(step.sampling, step.noise, exact, draws, rng)
        plan = released.plan
        if plan.rows is None:
            sites = ("", *(column.site for column in columns))
            blocks = [CoefficientBlock(site, len(plan.design[site]), n, 0.0) for site in plan.columns]
        else:
            sites = ("",) * (len(columns) + 1)
            held = plan.rows.records.items()
            blocks = [CoefficientBlock(site, len(sites), records, np.nan) for site, records in held]
        covariance = next((one.covariance for one in (step, errors) if one is not None), None)
        estimate = Estimate(
            params=fit.root.params if step is None else step.params,
            cov=covariance if fit.root.converged else None,
            names=(INTERCEPT, *(column.name for column in columns)),
            sites=sites,
            terms=(INTERCEPT, *(column.term for column in columns)),
            response=response,
            nobs=n,
            df_model=len(columns),
            converged=fit.root.converged,
            convergence=NO_ROOT,
            scale=fit.root.scale**2,
            cov_type="bootstrap" if step is None else "closed form",
            privacy=f"epsilon {epsilon:g}, delta {delta:g}",
            blocks=tuple(blocks),
            reasons={"llf": NO_LIKELIHOOD, "rsquared": NO_RSQUARED, "cov_params": NO_ROOT},
        )
        record = PrivateGLMRecord(
            estimate=estimate,
            notes=tuple(fit_notes(released, found, step, test, delta)),
            errors=found,
            test=test,
            design=released.design,
            distribution=distribution,
            epsilon=epsilon,
            delta=delta,
        )
        return cls(record, ledger)

    # -- errors ----------------------------------------------------------------------------------

    @property
    def df_inference(self) -> float | None:
        """Number of simulated releases behind the standard errors minus one; None for closed-form errors."""
        errors = self._errors
        return float(errors.draws - 1) if errors is not None and errors.simulated else None

    @property
    def bse_parts(self) -> pd.DataFrame:
        """Parts of the standard errors by coefficient: ``sampling`` and ``noise``; their squares add up."""
        errors = self._known_errors
        parts = {"sampling": errors.sampling, "noise": errors.noise}
        return pd.DataFrame(parts, index=list(self.estimate.names))

    @property
    def copula_test(self) -> pd.DataFrame:
        """Test that the columns follow the released Gaussian copula, free with ``fit(polish=1)``.

        A row per coefficient: ``step``, how far the step on the rows moved it, the ``std_error`` of this move
        if the copula and the model hold, ``statistic`` and ``p_value`` (Student's t). Errors include the
        noise of both requests, and come from the simulated releases. A large move states that the moments
        are biased for this table; the estimate after the step has most of this bias removed.

        Raises
        ------
        NotAvailableError
            The fit took no step.
        """
        test = self._record.test
        if test is None:
            raise NotAvailableError(
                "copula_test: the fit took no step on the rows",
                remedy=Remedy("fit(..., polish=1)", "fit({arguments}) takes one"),
            )
        p_values = 2.0 * stats.t.sf(np.abs(test.statistic), test.draws - 1)
        return pd.DataFrame(
            {
                "step": test.moved,
                "std_error": test.moved / test.statistic,
                "statistic": test.statistic,
                "p_value": p_values,
            },
            index=list(self.estimate.names),
        )

    @property
    def budget_too_small(self) -> bool:
        """Whether noise is more than three times the sampling error of the slopes (root mean square).

        It is also True if no coefficients solve the released moments.
        """
        return self._errors is None or self._errors.ratio > TIMES

    # -- prediction ------------------------------------------------------------------------------

    @property
    def family(self) -> str:
        """Distribution of the response and its link."""
        return str(self._record.distribution)

    def predict(self, exog: HeldRows) -> pd.Series:
        """Predict the mean response of the analyst's own rows; it sends no request, and costs nothing.

        Parameters
        ----------
        exog : table of pandas, polars or pyarrow, or dict of columns
            With the columns of the formula, of any site; the response may be absent. Numbers outside the
            bounds of a column count at their end, as in the fit.

        Returns
        -------
        Series
            By row; nan where a column is missing.

        Raises
        ------
        DesignError
            A column is absent, or has values that its bounds do not list.
        ModelError
            There is no frame: values of the sites' entities are not released.
        """
        return self._predicted(exog, None).predicted_mean

    def get_prediction(self, exog: HeldRows) -> GLMPrediction:
        """Predict with standard errors and intervals of the mean, which include the noise of the release.

        Parameters
        ----------
        exog : table of pandas, polars or pyarrow, or dict of columns
            See :meth:`predict`.

        Returns
        -------
        GLMPrediction
            With ``predicted_mean``, ``conf_int(alpha)`` and ``summary_frame(alpha)``.

        Raises
        ------
        DesignError, ModelError
            See :meth:`predict`.
        NotAvailableError
            No coefficients solve the released moments.
        """
        return self._predicted(exog, self._cov())

    def _predicted(self, frame: HeldRows, cov: Floats | None) -> GLMPrediction:
        rows = design_rows(self._record.design, frame)
        linear = rows.linear.copy()
        linear[rows.complete] = rows.X @ self.estimate.params
        errors = linear * np.nan if cov is None else rows.standard_errors(cov)
        return GLMPrediction(linear, errors, self._record.distribution.make(), self._test_distribution)

    def evaluate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Explain why there is no evaluation: the release has no response to compare predictions with.

        Raises
        ------
        NotAvailableError
            Always.

        Examples
        --------
        >>> import fedstat as fs
        >>> try:
        ...     fs.results.PrivateGLMResults.evaluate(None)
        ... except fs.errors.NotAvailableError as error:
        ...     print(str(error).partition(":")[0])
        no evaluation
        """
        raise NotAvailableError(
            NOT_EVALUATED,
            remedy=Remedy("predict(frame)", "Compare {call} with your own responses"),
        )

    # -- selection -------------------------------------------------------------------------------

    def select(self, penalty: str = "scad", a: float | None = None) -> pd.DataFrame:
        """Select columns by a penalized fit, from released values: it costs nothing more.

        The loss is quadratic around the estimate, with the moments of the released distribution and the
        errors above; the penalty is chosen by BIC.

        Parameters
        ----------
        penalty : {"scad", "mcp", "lasso"}
        a : float, optional
            Shape of SCAD (3.7 by default) and MCP (3).

        Returns
        -------
        DataFrame
            One row per column: ``site``, ``term``, ``selected``, ``coef``, the penalized
            estimate, and ``frequency``, the share of simulated releases in which it is selected.

        References
        ----------
        Wang, H. and Leng, C. (2007). Unified lasso estimation by least squares approximation. Journal of the
        American Statistical Association 102, 1039-1048.
        """
        est, chosen, errors = self.estimate, Penalty(penalty, a, 1.0), self._known_errors
        exact, bse = errors.exact[1:, 1:], self.bse.to_numpy()[1:]
        loss = estimation.QuadraticLoss.of(exact, bse, est.nobs)
        slopes = loss.select(est.params[1:], chosen)
        frame = pd.DataFrame({"site": est.sites[1:], "term": est.names[1:]})
        frame["selected"], frame["coef"] = slopes != 0.0, slopes
        draws = est.params[1:] + errors.deviations[:, 1:]
        frame["frequency"] = estimation.selection_frequencies(loss, draws, chosen)
        return frame

    # -- hooks -----------------------------------------------------------------------------------

    @property
    def _known_errors(self) -> estimation.MomentErrors:
        """Source of the standard errors; NotAvailableError if there are none."""
        if self._errors is None:
            raise NotAvailableError("no standard errors: " + self._reason("cov_params"))
        return self._errors

    def _error_parts(self) -> dict[str, Floats]:
        errors = self._errors
        return {} if errors is None else {"sampling": errors.sampling, "noise": errors.noise}

    _SUMMARY = (
        *(line for line in CoefficientResults._SUMMARY if line[0] not in NO_LIKELIHOOD_LINES),
        ("Model Family", "family", ""),
        ("Simulations", "_errors", lambda errors: str(errors.draws) if errors.simulated else ""),
        ("Noise / sampling", "_errors", lambda errors: f"{errors.ratio:.2f}"),
        ("P (copula)", "_record.test", lambda test: f"{test.pvalue:.3f}"),
    )

    def _summary_notes(self) -> Iterator[Note]:
        if self._errors is not None and self.budget_too_small:
            yield NOTES.note("budget_too_small", ratio=self._errors.ratio)
        yield from (note for note in super()._summary_notes() if note.kind != "no_likelihood")
