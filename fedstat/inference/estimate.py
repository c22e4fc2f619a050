"""Estimates of every model family, under the attribute names that statsmodels uses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.inference.summary import CoefficientBlock
from fedstat.inference.tables import number
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# Estimates as every model family hands them over.

INTERCEPT = "Intercept"


class ReceiptLike(Protocol):
    """What the institutions signed of a run."""

    @property
    def released(self) -> pd.DataFrame:
        """Released numbers against unknown values."""

    @property
    def alarm(self) -> str:
        """One sentence where there are as many of the one as of the other; else empty."""

    def save(self, path: str | Path) -> None:
        """Write it to a file."""


class LedgerLike(Protocol):
    """The account of what passed between the institutions."""

    @property
    def rounds(self) -> int:
        """Round trips."""

    @property
    def bytes(self) -> int:
        """Bytes, both ways together."""

    def kinds_by_client(self) -> Mapping[str, Sequence[str]]:
        """Kinds of values that left each institution."""

    def to_frame(self) -> pd.DataFrame:
        """One row for each array that passed."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Estimate:
    """The numbers that every family hands over; lengths that do not agree, or a name twice, are an error.

    ====================  ==================================================================================
    field                 meaning
    ====================  ==================================================================================
    params, cov           (d,), (d, d); `cov` None where the method has none, nan where a parameter has none
    names, institutions        unique, as printed (``"Sex[T.male]"``); institution ``""`` for one of none
    terms                 term of the formula of each coefficient
    convergence           what to say of the iteration, such as ``"relative score 3e-2 after 500 rounds"``
    llf                   log-likelihood: maximised, or that at the estimate where not `llf_is_maximum`
    density_of            variables whose joint density `llf` is, none: the response given all others; two
                          likelihoods compare only where it agrees
    n_parameters          counted by AIC and BIC; None: ``df_model``, without the intercept, and that
    scale                 residual variance or dispersion
    privacy               what was spent, in words
    reasons               why ``cov_params``, ``llf`` or ``rsquared`` does not exist
    ====================  ==================================================================================
    """

    params: Floats
    cov: Floats | None
    names: tuple[str, ...]
    clients: tuple[str, ...]
    terms: tuple[str, ...]
    response: str
    nobs: int
    df_model: float
    converged: bool
    convergence: str = ""
    llf: float | None = None
    density_of: tuple[str, ...] = ()
    n_parameters: int | None = None
    rsquared: float | None = None
    scale: float = 1.0
    cov_type: str = ""
    privacy: str = "none (exact)"
    blocks: tuple[CoefficientBlock, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    llf_is_maximum: bool = True

    def __post_init__(self) -> None:
        d = len(self.names)
        lengths = {"params": len(self.params), "clients": len(self.clients), "terms": len(self.terms)}
        wrong = [f"{len_} {what}" for what, len_ in lengths.items() if len_ != d]
        if self.cov is not None and self.cov.shape != (d, d):
            wrong.append(f"a covariance of shape {self.cov.shape}")
        if wrong or len(set(self.names)) != d:
            received = " and ".join(wrong) or "a name twice"
            raise EstimationError(f"expected {d} unique names and as many values, received {received}")


# ----------------------------------------------------------------------------------------------------
# The numbers of an estimate with statsmodels' names: coefficients, errors, criteria, account.

Statement = Literal["cov_params", "llf", "rsquared", "ledger"]


class EstimateNumbers:
    """The numbers of a federated fit, and what follows from them alone.

    Any statement that this fit cannot make raises a NotAvailableError that says why.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fit = fs.FederatedOLS.from_formula("num ~ age + sex", partition).fit()
    >>> fit.params.round(3).to_dict()
    {'Intercept': -1.38, 'age': 0.034, 'sex': 0.668}
    >>> bool((fit.tvalues == fit.params / fit.bse).all()), bool((fit.zvalues == fit.tvalues).all())
    (True, True)
    >>> fit.pvalues.index.tolist(), fit.conf_int(0.1).shape, fit.cov_params().shape
    (['Intercept', 'age', 'sex'], (3, 2), (3, 3))
    >>> fit.clients.tolist(), fit.model.endog_names
    (['', '', ''], 'num')
    >>> fit.nobs, fit.df_model, fit.df_resid, fit.use_t, fit.df_inference
    (920, 2.0, 917.0, True, 917.0)
    >>> fit.converged, fit.cov_type, fit.model_name, fit.method_name
    (True, 'nonrobust', 'Federated OLS', '')
    >>> bool(fit.aic < fit.bic), bool(fit.llf < 0.0), round(fit.scale, 2)
    (True, True, 1.12)
    >>> round(fit.rsquared, 3), round(fit.rsquared_adj, 3)
    (0.157, 0.155)
    >>> fit.ledger.rounds > 1, fit.receipt().sites().index.tolist() == list(partition.clients)
    (True, True)
    """

    model_name = "Federated regression"
    method_name = ""
    _model: Any = None

    def __init__(self, estimate: Estimate, ledger: LedgerLike | None = None) -> None:
        self.estimate = estimate
        self._ledger = ledger

    @property
    def model(self) -> Any:
        """The model, with the names that statsmodels' tables read; these alone of results from a file."""
        named = SimpleNamespace() if self._model is None else copy.copy(self._model)
        named.endog_names, named.exog_names = self.estimate.response, list(self.estimate.names)
        return named

    @property
    def params(self) -> pd.Series:
        """Coefficients, by name."""
        return self._series(self.estimate.params)

    @property
    def clients(self) -> pd.Series:
        """Institution of each coefficient; empty for the intercept."""
        return pd.Series(self.estimate.clients, index=list(self.estimate.names), dtype=object)

    @property
    def bse(self) -> pd.Series:
        """Standard errors; nan where the covariance does not determine one."""
        with np.errstate(invalid="ignore"):
            return self._series(np.sqrt(np.diag(self._cov())))

    @property
    def tvalues(self) -> pd.Series:
        """Coefficients over their standard errors; of zero coefficients they have the law of `use_t`."""
        return self.params / self.bse

    @property
    def zvalues(self) -> pd.Series:
        """The same as `tvalues`."""
        return self.tvalues

    @property
    def pvalues(self) -> pd.Series:
        """Two-sided p-values of each coefficient being zero."""
        return self._series(2.0 * self._law.sf(np.abs(self.tvalues.to_numpy())))

    def conf_int(self, alpha: float = 0.05) -> pd.DataFrame:
        """Intervals of level ``1 - alpha``.

        Returns
        -------
        DataFrame
            Rows by name; column 0 the lower, column 1 the upper limit.
        """
        if not 0.0 < alpha < 1.0:
            raise ModelError(f"conf_int: expected alpha between 0 and 1, received {alpha}")
        half = self._law.isf(alpha / 2.0) * self.bse
        return pd.DataFrame({0: self.params - half, 1: self.params + half})

    @property
    def df_inference(self) -> float | None:
        """Degrees of freedom of Student's t behind tests and intervals; None where they are normal."""
        return None

    @property
    def use_t(self) -> bool:
        """Whether tests and intervals are of Student's t; statsmodels reads it where it prints results."""
        return self.df_inference is not None

    @property
    def _law(self) -> Any:
        return stats.norm if self.df_inference is None else stats.t(self.df_inference)

    def cov_params(self) -> pd.DataFrame:
        """Covariance matrix of the coefficients, by name."""
        names = list(self.estimate.names)
        return pd.DataFrame(self._cov(), index=names, columns=names)

    @property
    def llf(self) -> float:
        """Maximised log-likelihood."""
        return self._need("llf", self.estimate.llf)

    @property
    def aic(self) -> float:
        """Akaike's criterion."""
        return -2.0 * self.llf + 2.0 * self._n_parameters

    @property
    def bic(self) -> float:
        """Schwarz's criterion, with the number of entities as sample size."""
        return -2.0 * self.llf + float(np.log(self.nobs)) * self._n_parameters

    @property
    def rsquared(self) -> float:
        """Share of explained variance, as the family defines it."""
        return self._need("rsquared", self.estimate.rsquared)

    @property
    def rsquared_adj(self) -> float:
        """Share of explained variance, adjusted for the number of coefficients."""
        free = self.df_resid + self.df_model
        return 1.0 - free / self.df_resid * (1.0 - self.rsquared)

    @property
    def nobs(self) -> int:
        """Entities in the fit."""
        return self.estimate.nobs

    @property
    def df_model(self) -> float:
        """Degrees of freedom of the model, the intercept not counted."""
        return self.estimate.df_model

    @property
    def df_resid(self) -> float:
        """Entities less the degrees of freedom of model and intercept."""
        return self.nobs - self.df_model - self._k_constant

    @property
    def scale(self) -> float:
        """Residual variance or dispersion."""
        return self.estimate.scale

    @property
    def converged(self) -> bool:
        """Whether the iteration reached its tolerance."""
        return self.estimate.converged

    @property
    def cov_type(self) -> str:
        """How the covariance was estimated."""
        return self.estimate.cov_type

    @property
    def ledger(self) -> LedgerLike:
        """What passed between the institutions."""
        if self._ledger is None:
            raise NotAvailableError("no ledger: " + self._reason("ledger"))
        return self._ledger

    def receipt(self) -> ReceiptLike:
        """Return the account of the run that every institution signed.

        Save it with ``receipt.save(path)``; whoever has the institutions' fingerprints can check it with
        :func:`fedstat.verify_receipt`. Its ``released`` holds released numbers against unknown values.

        Raises
        ------
        NotAvailableError
            The run has none.
        """
        found: ReceiptLike | None = getattr(self._ledger, "receipt", None)
        if found is None:
            raise NotAvailableError("no receipt: the institutions were not asked for one when this run ended")
        return found

    @property
    def _k_constant(self) -> int:
        return int(INTERCEPT in self.estimate.names)

    @property
    def _n_parameters(self) -> float:
        given = self.estimate.n_parameters
        return self.df_model + self._k_constant if given is None else given

    def _series(self, values: Floats) -> pd.Series:
        return pd.Series(values, index=list(self.estimate.names), dtype=np.float64)

    def _cov(self) -> Floats:
        if self.estimate.cov is None:
            raise NotAvailableError("no covariance of the coefficients: " + self._reason("cov_params"))
        return self.estimate.cov

    def _need(self, what: Statement, value: float | None) -> float:
        if value is None:
            raise NotAvailableError(f"no {what}: {self._reason(what)}")
        return value

    def _reason(self, what: Statement) -> str:
        return self.estimate.reasons.get(what, f"{self.model_name} does not define it for this fit")

    def _glance(self) -> dict[str, float]:
        """Columns of :meth:`glance`."""
        return {
            "nobs": self.nobs,
            "n_sites": len(self._institutions()),
            "df_model": self.df_model,
            "df_resid": self.df_resid,
            "r_squared": self._or_nan(lambda: self.rsquared),
            "logLik": self._or_nan(lambda: self.llf),
            "AIC": self._or_nan(lambda: self.aic),
            "BIC": self._or_nan(lambda: self.bic),
            "deviance": float("nan"),
        }

    def _institutions(self) -> list[str]:
        """Names of the institutions behind the fit."""
        blocks = self.estimate.blocks
        return [block.client for block in blocks] or list(dict.fromkeys(filter(None, self.estimate.clients)))

    def _or_nan(self, value: Callable[[], float]) -> float:
        try:
            return value()
        except NotAvailableError:
            return float("nan")

    def _or_dash(self, value: Callable[[], float], digits: int = 4) -> str:
        try:
            return number(value(), digits)
        except NotAvailableError:
            return "-"
