"""Results of a regression under a privacy budget: errors with their noise, price, and what was charged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import pandas as pd

from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.horizontal_design import RowsDesign, RowsSchema, SiteRowCounts
from fedstat.inference.estimate import INTERCEPT, Estimate, LedgerLike
from fedstat.inference.noisy_tables import price
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import CoefficientBlock
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.checks import HeldRows
from fedstat.models.copula.private_release import row_notes
from fedstat.models.glm.noisy_fit import NOT_CONVERGED, NoisyFit, NoisyQuestion, bounds_warnings
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.prediction import GLMPrediction, held_rows, predict_rows
from fedstat.models.results import CoefficientResults, EstimateRecord
from fedstat.privacy.zcdp import epsilon_of_zcdp
from fedstat.typing import Floats, Vector

NO_LIKELIHOOD = "only noisy sums of scores were released, not a likelihood"
NOTES = Catalogue(
    critical={"not_converged": "{problem}."},
    warning={"bounds": "{problem}."},
    info={
        "price": "Noise makes standard errors {price:.2f} times as large (median). Observations are records; "
        "how many of the {records:,} records are complete is not released.",
        "valid": "Valid if the model holds: long rows of columns have less weight{robust}.",
    },
)
ROBUST = {
    "Binomial": "",
    "Poisson": ", and residuals are cut at 2 standard deviations",
    "Gaussian": ", and residuals are cut at 2 standard deviations. With skewed errors the intercept is not "
    "that of the mean",
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PrivateRegressionRecord(EstimateRecord):
    """Content of a file of results."""

    sampling: Vector
    noise: Vector
    agreement: RowsSchema
    distribution: DistributionSpec
    epsilon: float
    delta: float
    rho: float
    steps: int


class PrivateRegressionResults(
    CoefficientResults, saved_as="fedstat glm private results 1", record=PrivateRegressionRecord
):
    """Results of ``FederatedGLM.fit(epsilon=...)``, with statsmodels' names and meanings.

    Standard errors include sampling and the noise of the last step; tests and intervals are normal.

    Attributes
    ----------
    epsilon, delta : float
        What each site was charged at most, as its accountant computes it.

    Examples
    --------
    >>> import fedstat as fs, numpy as np, pandas as pd
    >>> rng = np.random.default_rng(0)
    >>> a, b = rng.normal(size=(2, 9_000))
    >>> y = rng.uniform(size=9_000) < 1.0 / (1.0 + np.exp(-a))
    >>> table = pd.DataFrame({"site": np.repeat(["A", "B", "C"], 3_000), "y": y.astype(int), "a": a, "b": b})
    >>> budget = fs.Policy(privacy=fs.Budget(epsilon=3.0, delta=1e-6, colluding=1))
    >>> partition = fs.ClientPartition.from_frame(table, by="site", policy=budget)
    >>> model = fs.GLORE.from_formula("y ~ a + b", partition)
    >>> fit = model.fit(epsilon=1.0, bounds={"y": [0, 1], "a": (-5, 5), "b": (-5, 5)})
    >>> bool(abs(fit.params["a"] - 1.0) < 0.3), fit.epsilon <= 1.0, fit.bse_parts.columns.tolist()
    (True, True, ['sampling', 'noise'])
    >>> bool(1.0 < fit.price < 2.0), fit.predict(table.head(2)).shape
    (True, (2,))
    >>> fit.get_prediction(table.head(2)).summary_frame().shape, fit.family
    ((2, 4), 'Binomial(link=Logit)')
    """

    method_name = "noisy Newton"
    _unit = "rows"

    _record: PrivateRegressionRecord

    def __init__(self, record: PrivateRegressionRecord, ledger: LedgerLike | None = None) -> None:
        super().__init__(record, ledger)
        self.epsilon, self.delta = record.epsilon, record.delta
        self.model_name = f"Private {record.distribution.name} regression"

    @classmethod
    def _of(cls, model: HorizontalModel, question: NoisyQuestion, fit: NoisyFit, ledger: Ledger) -> Self:
        names, p = (INTERCEPT, *question.public.names), len(fit.params)
        epsilon = epsilon_of_zcdp(fit.cost, question.delta)
        estimate = Estimate(
            params=fit.params,
            cov=fit.sampling + fit.noise,
            names=names,
            sites=("",) * p,
            terms=(INTERCEPT, *question.public.term_names),
            response=model.formula.response,
            nobs=question.n,
            df_model=float(p - 1),
            converged=fit.iteration.converged,
            convergence=NOT_CONVERGED,
            scale=fit.iteration.scale**2 if question.family == "Gaussian" else 1.0,
            cov_type="noise included",
            privacy=f"epsilon {epsilon:.4g}, delta {question.delta:g} by row",
            blocks=tuple(CoefficientBlock(site, p, n, np.nan) for site, n in question.records.items()),
            reasons={"llf": NO_LIKELIHOOD, "rsquared": NO_LIKELIHOOD},
        )
        sampling, noise = np.sqrt(np.diag(fit.sampling)), np.sqrt(np.diag(fit.noise))
        notes = [NOTES.note("not_converged", problem=NOT_CONVERGED)] if not estimate.converged else []
        notes += [NOTES.note("bounds", problem=text) for text in bounds_warnings(question, fit)]
        notes.append(
            NOTES.note("price", price=price(np.diag(fit.sampling), np.diag(fit.noise)), records=question.n)
        )
        notes += row_notes(question.rows, fit.cost, question.delta)
        notes.append(NOTES.note("valid", robust=ROBUST[question.family]))
        counts = tuple(SiteRowCounts(site, n, n) for site, n in question.records.items())
        record = PrivateRegressionRecord(
            estimate=estimate,
            notes=tuple(notes),
            sampling=sampling,
            noise=noise,
            agreement=RowsSchema(question.question, question.spec, counts),
            distribution=model.distribution,
            epsilon=epsilon,
            delta=question.delta,
            rho=float(fit.cost),
            steps=len(fit.iteration.plan.rhos),
        )
        return cls(record, ledger)

    @property
    def bse_parts(self) -> pd.DataFrame:
        """Parts of the standard errors by coefficient: ``sampling`` and ``noise``; their squares add up."""
        parts = {"sampling": self._record.sampling, "noise": self._record.noise}
        return pd.DataFrame(parts, index=list(self.estimate.names))

    @property
    def price(self) -> float:
        """Median ratio of the standard errors with and without noise."""
        return price(self._record.sampling**2, self._record.noise**2)

    @property
    def family(self) -> str:
        """Distribution of the response and its link."""
        return str(self._record.distribution)

    def predict(self, exog: HeldRows) -> pd.Series:
        """Predict the mean response of the analyst's own rows; it sends no request, and costs nothing.

        Parameters
        ----------
        exog : table of pandas, polars or pyarrow, or dict of columns
            With the columns of the formula; the response may be absent.

        Returns
        -------
        Series
            By row; nan where a column is missing.

        Raises
        ------
        DesignError
            A column is absent, or has levels that its bounds do not list.
        """
        return self._predicted(exog, None).predicted_mean

    def get_prediction(self, exog: HeldRows) -> GLMPrediction:
        """Predict with standard errors and intervals of the mean, which include the noise.

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
        DesignError
            See :meth:`predict`.
        """
        return self._predicted(exog, self._cov())

    def _predicted(self, frame: HeldRows, cov: Floats | None) -> GLMPrediction:
        record, names = self._record, self.estimate.names
        zeros = np.zeros(len(names))
        n = np.array([row.n for row in record.agreement.sites], dtype=np.int64)
        design = RowsDesign(names, self.estimate.terms, True, n, zeros, zeros + 1.0)
        rows = predict_rows(record.agreement, design, self.estimate.params, held_rows(frame))
        errors = rows.linear * np.nan if cov is None else rows.standard_errors(cov)
        return GLMPrediction(rows.linear, errors, record.distribution.make(), self._test_distribution)

    def _error_parts(self) -> dict[str, Floats]:
        return {"sampling": self._record.sampling, "noise": self._record.noise}

    _SUMMARY = (
        *(
            line
            for line in CoefficientResults._SUMMARY
            if line[0] not in ("R-squared", "Log-Likelihood", "AIC", "BIC")
        ),
        ("Model Family", "family", ""),
        ("Steps", "_record.steps", "d"),
        ("Price of noise", "price", ".2f"),
    )

    def _summary_notes(self) -> Iterator[Note]:
        yield from (note for note in super()._summary_notes() if note.kind != "no_likelihood")
