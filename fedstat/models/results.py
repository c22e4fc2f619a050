"""Results of every model family: one record, its ledger, notes and summary; and coefficients with tests."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.contrast import ContrastResults, WaldTestResults
from statsmodels.stats.multitest import multipletests

from fedstat.codec import from_json, from_plain, to_json, to_plain
from fedstat.errors import EstimationError, ModelError, NotAvailableError
from fedstat.federation.design.formula.terms import parse_term
from fedstat.federation.message import pack, unpack
from fedstat.inference.estimate import INTERCEPT, Estimate, LedgerLike, ReceiptLike, takes_alpha
from fedstat.inference.hypotheses import (
    Constraints,
    DegreesOfFreedom,
    Hypothesis,
    TermTests,
    given_terms,
    read_constraints,
    t_test,
    wald_test,
    wald_test_terms,
)
from fedstat.inference.likelihood import LRTest, check_nested
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.plots import link_words, per_deviation, plot_coefficients
from fedstat.inference.summary import (
    STATEMENTS,
    WIDTH,
    Columns,
    Lines,
    Report,
    Shown,
    coefficient_block_sheet,
    coefficient_sheet,
    header_sheet,
    lines_of,
)
from fedstat.inference.tables import (
    Sheet,
    SheetSummary,
    exponentials,
    human_bytes,
    human_range,
    number,
    two_digits,
    yes_or_no,
)
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.absent_names import ABSENT
from fedstat.models.checks import check_choice
from fedstat.models.effects import EffectStatements
from fedstat.models.saved import READERS, SavedLedger
from fedstat.typing import Array, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTES = Catalogue(
    critical={
        "not_converged": "NOT CONVERGED: {detail}; do not interpret these numbers",
    },
    warning={
        "undetermined_errors": "The covariance does not determine a standard error (nan) of: {names}. Tests "
        "and intervals of the other coefficients are valid.",
        "receipt": "{alarm}",
        "lost_sites": "{sites}. Parts of sums before that follow by subtraction.",
    },
    info={
        "no_covariance": "No standard errors, tests and intervals: {reason}",
        "no_likelihood": "No log-likelihood, AIC and BIC: {reason}",
    },
    protocol={
        "setting": "{setting}",
    },
)
"""Notes on coefficients of any family."""
WITHOUT_VALUES = ("control", "schema")
"""Kinds of arrays that hold settings, and names, types and levels of columns."""
Statement = Literal["cov_params", "llf", "rsquared", "ledger"]
Record = TypeVar("Record")


class Results(Report, Generic[Record]):
    """Results of any fit: one frozen record of what was found, and the ledger of the run.

    ``class MeansResults(Results[MeansRecord], saved_as="fedstat means results 1", record=MeansRecord)`` names
    the format of a file and the dataclass that it holds. A record holds no value of a row or an entity;
    everything else follows from it. Increase the number of the format when the record changes.

    Parameters
    ----------
    record : dataclass
    ledger : LedgerLike, optional
        None for results that were read from a file without their ledger.
    model : optional
        Reaches the sites of the fit; results that were read from a file have none.

    Attributes
    ----------
    model_name : str
        Name of the model in titles and tables.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
    >>> fit.ledger.rounds > 1, fit.receipt().sites().index.tolist() == list(partition.sites)
    (True, True)
    >>> "Notes:" in fit.summary().as_text()
    True
    >>> fit.glance().shape[0], fit.diagnostics().columns.tolist()
    (1, ['kind', 'severity', 'note', 'values'])
    """

    model_name = "Federated fit"
    _record: Record
    _model: Any = None
    _call: Any = None
    """The call of the fit, to be repeated with other arguments; none for results from a file."""
    _saved_as: ClassVar[str] = ""
    _record_type: ClassVar[type]

    def __init_subclass__(cls, saved_as: str = "", record: type | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if record is not None:
            cls._saved_as, cls._record_type = saved_as, record
            READERS[saved_as] = cls._restore

    def __init__(self, record: Record, ledger: LedgerLike | None = None, model: Any = None) -> None:
        self._record, self._ledger = record, ledger
        if model is not None:
            self._model = model

    # -- ledger ----------------------------------------------------------------------------------

    @property
    def ledger(self) -> LedgerLike:
        """Ledger of all releases of the run."""
        if self._ledger is None:
            raise NotAvailableError(f"no ledger: {self.model_name} does not define it for this fit")
        return self._ledger

    def receipt(self) -> ReceiptLike:
        """Return the receipt of the run, signed by every site.

        Save it with ``receipt.save(path)``; the sites' fingerprints are sufficient to check it with
        :func:`fedstat.verify_receipt`. Its ``released`` compares released numbers with unknown values.

        Raises
        ------
        NotAvailableError
            The run has none.
        """
        found: ReceiptLike | None = getattr(self._ledger, "receipt", None)
        if found is None:
            raise NotAvailableError("no receipt: none was requested from the sites when this run ended")
        return found

    def _left_sites(self) -> str:
        if self._ledger is None:
            return ""
        kinds = dict.fromkeys(kind for row in self._ledger.kinds_by_site().values() for kind in row)
        values = ", ".join(kind for kind in kinds if kind not in WITHOUT_VALUES)
        return f"What left the sites: {values}{' and ' if values else ''}the schema; see disclosure()."

    def disclosure(self) -> SheetSummary:
        """State what left the sites in this run: kinds of values by site, and what follows from them.

        :attr:`ledger` lists every array.

        Returns
        -------
        SheetSummary

        Raises
        ------
        NotAvailableError
            The results have no ledger.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> "masked" in fit.disclosure().as_text()
        True
        """
        ledger, width = self.ledger, WIDTH - 30 - 2
        lines = [("Rounds", f"{ledger.rounds:,}"), ("Traffic", human_bytes(ledger.bytes))]
        kinds = ledger.kinds_by_site().items()
        rows = tuple((site, ", ".join(own) or "nothing") for site, own in kinds)
        sites = Sheet(("sender", "values"), rows, "ll", (30, width), gap=2, wrap=True)
        notes = [str(note) for note in self._ordered_notes() if note.severity == "protocol"]
        return SheetSummary([header_sheet("What left the sites", lines), sites], notes)

    def _summary_notes(self) -> Iterator[Note]:
        # A ledger of another engine may have none: what it lacks is no alarm.
        receipt: ReceiptLike | None = getattr(self._ledger, "receipt", None)
        if receipt is not None and receipt.alarm:
            yield NOTES.note("receipt", alarm=receipt.alarm)
        if lost := "; ".join(map(str, getattr(self._ledger, "absent", ()))):
            yield NOTES.note("lost_sites", sites=lost)
        yield from getattr(self._record, "notes", ())

    # -- files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the results to a file of arrays and JSON; read it with :func:`fedstat.load`.

        It holds the estimates, what follows from them, the ledger, and how columns are coded (with means and
        knots of transforms), and no value of a row.

        Parameters
        ----------
        path : str or Path

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> fit.save("heart.fed")
        >>> bool((fs.load("heart.fed").params == fit.params).all())
        True
        """
        Path(path).write_bytes(self._packed())

    def _saved_record(self) -> Record:
        """Return the record that a file holds; a family completes it where it lacks something."""
        return self._record

    def _packed(self) -> bytes:
        """Return the content of a file of the results."""
        arrays: dict[str, Any] = {}
        content = json.dumps(to_plain(self._saved_record(), arrays))
        ledger = to_json(SavedLedger.of(self._ledger))
        return pack({"format": self._saved_as, "content": content, "ledger": ledger}, arrays)

    @classmethod
    def _restore(cls, header: Mapping[str, str], arrays: Mapping[str, Array]) -> Self:
        """Rebuild results from the content of a file."""
        content = json.loads(header["content"])
        # Earlier versions did not write every field.
        record: Any = from_plain(
            cls._record_type, content, "its content", ModelError, arrays=arrays, defaults=True
        )
        ledger = from_json(SavedLedger | None, header["ledger"], "its ledger", ModelError, defaults=True)  # type: ignore[arg-type]
        return cls(record, None if ledger is None else ledger.restore())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what :meth:`save` writes, and nothing else: no model, no site, no row."""
        return _unpickle, (type(self), self._packed())

    def __copy__(self) -> Self:
        return self._of_fields(self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy all but the model, by which both reach the same sites."""
        memo[id(self._model)] = self._model
        return self._of_fields(copy.deepcopy(self.__dict__, memo))

    @classmethod
    def _of_fields(cls, fields: Mapping[str, Any]) -> Self:
        made = cls.__new__(cls)
        made.__dict__.update(fields)
        return made


def _unpickle(kind: type[Results[Any]], data: bytes) -> Results[Any]:
    return kind._restore(*unpack(data))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EstimateRecord:
    """What a file holds of results with coefficients; a family adds fields of its own."""

    estimate: Estimate
    notes: tuple[Note, ...] = ()


class CoefficientResults(EffectStatements, Results[Any]):
    """Coefficients of a federated fit, with standard errors, tests, intervals, tables and plots.

    Names and meanings are those of statsmodels' likelihood results, with pandas objects out; tests are
    normal, or of Student's t where a family says so (`use_t`, `df_inference`). A family sets `model_name` and
    `method_name`, declares its `_SUMMARY` and `_GLANCE`, and extends `_summary_notes`.

    Parameters
    ----------
    record : EstimateRecord
    ledger : LedgerLike, optional
        None for an estimate that was read from a file without its ledger.
    model : optional

    Raises
    ------
    NotAvailableError
        By any statement that this fit cannot make; the message says why.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fit = fs.FederatedGLM.from_formula("num ~ age + C(cp)", partition).fit()
    >>> fit.f_test("age = 0").distribution
    'F'
    >>> fit.wald_test_terms().table.index.tolist()
    ['Intercept', 'age', 'C(cp)']
    >>> "C(cp)" in fit.summary().as_text()
    True
    >>> bool(fit.plot_coefficients().has_data())
    True
    >>> fit = fs.FederatedOLS.from_formula("num ~ age + sex", partition).fit()
    >>> fit.estimate.names
    ('Intercept', 'age', 'sex')
    >>> fit.params.round(3).to_dict()
    {'Intercept': -1.38, 'age': 0.034, 'sex': 0.668}
    >>> bool((fit.tvalues == fit.params / fit.bse).all()), bool((fit.zvalues == fit.tvalues).all())
    (True, True)
    >>> fit.pvalues.index.tolist(), fit.conf_int(0.1).shape, fit.cov_params().shape
    (['Intercept', 'age', 'sex'], (3, 2), (3, 3))
    >>> fit.coef_sites.tolist(), fit.model.endog_names
    (['', '', ''], 'num')
    >>> fit.nobs, fit.df_model, fit.df_resid, fit.use_t, fit.df_inference
    (920, 2.0, 917.0, True, 917.0)
    >>> fit.converged, fit.cov_type, fit.model_name, fit.method_name
    (True, 'nonrobust', 'Federated OLS', '')
    >>> bool(fit.aic < fit.bic), bool(fit.llf < 0.0), round(fit.scale, 2)
    (True, True, 1.12)
    >>> round(fit.rsquared, 3), round(fit.rsquared_adj, 3)
    (0.157, 0.155)
    """

    _SUMMARY: ClassVar[Lines] = (
        ("Dep. Variable", "estimate.response", ""),
        ("Model", "model_name", ""),
        ("Method", "method_name", ""),
        ("No. Observations", "nobs", ",d"),
        ("Df Model", "estimate.df_model", "g"),
        ("R-squared", "rsquared", number),
        ("Log-Likelihood", "llf", two_digits),
        ("AIC", "aic", two_digits),
        ("BIC", "bic", two_digits),
        ("Covariance Type", "_covariance_words", ""),
        ("Converged", "converged", yes_or_no),
    )
    """Lines of the estimate in the summary; those of the federation differ only where a family has more."""
    _GLANCE: ClassVar[Columns] = (
        ("nobs", "nobs"),
        ("n_sites", "_n_sites"),
        ("df_model", "df_model"),
        ("df_resid", "df_resid"),
        ("r_squared", "rsquared"),
        ("logLik", "llf"),
        ("AIC", "aic"),
        ("BIC", "bic"),
        ("deviance", "_deviance"),
    )
    model_name = "Federated regression"
    method_name = ""
    _unit = "entities"
    _deviance = float("nan")

    @property
    def estimate(self) -> Estimate:
        """Numbers that every family hands over."""
        found: Estimate = self._record.estimate
        return found

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
    def coef_sites(self) -> pd.Series:
        """Site of each coefficient; empty for the intercept."""
        return pd.Series(self.estimate.sites, index=list(self.estimate.names), dtype=object)

    @property
    def bse(self) -> pd.Series:
        """Standard errors; nan where the covariance does not determine one."""
        with np.errstate(invalid="ignore"):
            return self._series(np.sqrt(np.diag(self._cov())))

    @property
    def tvalues(self) -> pd.Series:
        """Coefficients over their standard errors.

        For zero coefficients their distribution follows `use_t`.
        """
        return self.params / self.bse

    @property
    def zvalues(self) -> pd.Series:
        """The same as `tvalues`."""
        return self.tvalues

    @property
    def pvalues(self) -> pd.Series:
        """Two-sided p-values of each coefficient being zero."""
        return self._series(2.0 * self._test_distribution.sf(np.abs(self.tvalues.to_numpy())))

    def __getattr__(self, name: str) -> Any:
        """State what to use instead of a name of statsmodels that these results do not have."""
        if name in ABSENT and not hasattr(type(self), name):
            raise AttributeError(f"{type(self).__name__} has no {name!r}: {ABSENT[name]}")
        # The usual error; or that of a property, which Python would hide.
        return object.__getattribute__(self, name)

    @takes_alpha
    def conf_int(self, alpha: float = 0.05, cols: Sequence[int | str] | None = None) -> pd.DataFrame:
        """Intervals of level ``1 - alpha``.

        Parameters
        ----------
        alpha : float
        cols : sequence of int or str, optional
            Positions or names of some coefficients; the default is all.

        Returns
        -------
        DataFrame
            Rows by name; column 0 the lower, column 1 the upper limit.
        """
        half = self._test_distribution.isf(alpha / 2.0) * self.bse
        limits = pd.DataFrame({0: self.params - half, 1: self.params + half})
        return limits.iloc[self._positions(cols)]

    def _positions(self, cols: Sequence[int | str] | int | str | None) -> list[int]:
        """Positions of coefficients, which are given by name or position."""
        names = list(self.estimate.names)
        if cols is None:
            return list(range(len(names)))
        given = [cols] if isinstance(cols, int | str | np.integer) else list(cols)
        unknown = [one for one in given if isinstance(one, str) and one not in names]
        far = [one for one in given if not isinstance(one, str) and not 0 <= int(one) < len(names)]
        if unknown or far:
            raise ModelError(
                f"no coefficient {', '.join(map(repr, [*unknown, *far]))}; there are {len(names)}: "
                f"{', '.join(names)}"
            )
        return [names.index(one) if isinstance(one, str) else int(one) for one in given]

    @property
    def df_inference(self) -> float | None:
        """Degrees of freedom of Student's t behind tests and intervals; None where they are normal.

        The fewest of :attr:`df` where coefficients have their own, which also serve for predictions.
        """
        by_coefficient = self.estimate.df
        return None if by_coefficient is None else float(by_coefficient.min())

    @property
    def df(self) -> pd.Series:
        """Degrees of freedom of each coefficient's test and interval, by name; infinite where normal.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.FederatedOLS.from_formula("num ~ age + sex", partition).fit()
        >>> fit.df.tolist() == [fit.df_resid] * 3
        True
        """
        found = self.estimate.df
        if found is None:
            found = np.full(len(self.estimate.names), self.df_inference or np.inf)
        return self._series(found)

    @property
    def use_t(self) -> bool:
        """Whether tests and intervals are of Student's t; statsmodels reads it where it prints results."""
        return self.df_inference is not None

    @property
    def _test_distribution(self) -> Any:
        """Distribution of each coefficient's test."""
        return stats.norm if self._df is None else stats.t(self._df)

    @property
    def _combined_distribution(self) -> Any:
        """Distribution of tests of combinations of coefficients, with the fewest degrees of freedom."""
        return stats.norm if self.df_inference is None else stats.t(self.df_inference)

    @property
    def _df(self) -> DegreesOfFreedom:
        """Degrees of freedom of tests: of all coefficients, or by coefficient."""
        return self.df_inference if self.estimate.df is None else self.estimate.df

    def cov_params(
        self, r_matrix: Hypothesis | None = None, column: Sequence[int | str] | int | str | None = None
    ) -> pd.DataFrame:
        """Covariance matrix of the coefficients, by name.

        Parameters
        ----------
        r_matrix : as in `t_test`, optional
            Covariance of these linear combinations instead.
        column : int, str or sequence of these, optional
            Of these coefficients only.
        """
        names = list(self.estimate.names)
        cov = pd.DataFrame(self._cov(), index=names, columns=names)
        if r_matrix is not None and column is not None:
            raise ModelError("cov_params: give only one of r_matrix and column")
        if r_matrix is None:
            at = self._positions(column)
            return cov.iloc[at, at]
        constraints = self._read(r_matrix)
        V = constraints.R @ self._cov() @ constraints.R.T
        return pd.DataFrame(V, index=list(constraints.labels), columns=list(constraints.labels))

    @property
    def llf(self) -> float:
        """Maximized log-likelihood."""
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

    @takes_alpha
    def ratios(self, alpha: float = 0.05) -> pd.DataFrame:
        """Return exponentials of the coefficients that are ratios, with intervals of level ``1 - alpha``.

        Parameters
        ----------
        alpha : float

        Returns
        -------
        DataFrame
            ``odds_ratio``, ``hazard_ratio`` or ``ratio`` (of means), ``conf_low``, ``conf_high``, by
            coefficient, without constants.

        Raises
        ------
        NotAvailableError
            Exponentials are no ratios with the link of this model.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> fit.ratios().round(2).loc["sex"].to_dict()
        {'odds_ratio': 4.41, 'conf_low': 3.06, 'conf_high': 6.38}
        """
        name = self._ratio_name
        if not name:
            raise NotAvailableError(
                "ratios: exponentials of the coefficients are ratios with the logit and the log link, and in "
                "models of hazards"
            )
        limits = self.conf_int(alpha)
        frame = pd.DataFrame({name: self.params, "conf_low": limits[0], "conf_high": limits[1]})
        constants, est = self._constants(), self.estimate
        kept = [not {name, term} & {*constants} for name, term in zip(est.names, est.terms, strict=True)]
        return pd.DataFrame(exponentials(frame[kept]))

    @takes_alpha
    def odds_ratios(self, alpha: float = 0.05) -> pd.DataFrame:
        """Return odds ratios with intervals of level ``1 - alpha``; see :meth:`ratios`.

        Parameters
        ----------
        alpha : float

        Returns
        -------
        DataFrame

        Raises
        ------
        NotAvailableError
            The link is not the logit.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> fit.odds_ratios().round(2).columns.tolist()
        ['odds_ratio', 'conf_low', 'conf_high']
        """
        if self._ratio_name != "odds_ratio":
            raise NotAvailableError(
                "odds_ratios: coefficients are logarithms of odds ratios with the logit link only, of "
                "FederatedOrdinal with distr='logit'"
            )
        return self.ratios(alpha)

    @property
    def _ratio_name(self) -> str:
        """Name of the exponential of a coefficient, such as ``odds_ratio``; empty if it is no ratio."""
        ratio = self._effect_words()[1].partition(" of ")[0].partition(" against ")[0]
        return ratio.replace(" ", "_") if ratio.endswith("ratio") else ""

    # -- tests of hypotheses ----------------------------------------------------------------------

    def t_test(self, r_matrix: Hypothesis) -> ContrastResults:
        """Test linear hypotheses one by one; `use_t` sets the distribution.

        Parameters
        ----------
        r_matrix : str, list of str, array or (array, array)
            ``"ROA = ROE"``, ``["a = b", "2 * c = 1"]``, a matrix R, or the pair (R, q).

        Returns
        -------
        statsmodels ContrastResults

        Raises
        ------
        ModelError
            The hypothesis names what is not a coefficient, or has the wrong shape.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.FederatedGLM.from_formula("num ~ age + sex", partition).fit()
        >>> fit.t_test("age = 0").effect.round(3)
        array([0.034])
        >>> fit.t_test(["age = 0", "sex = 10 * age"]).pvalue.shape
        (2,)
        """
        params, cov = self.estimate.params, self._cov()
        return t_test(params, cov, self._read(r_matrix), df=self._df)

    def wald_test(
        self, r_matrix: Hypothesis, use_f: bool | None = None, *, scalar: bool = True
    ) -> ContrastResults:
        """Test linear hypotheses together (Wald); `r_matrix` as in `t_test`.

        The statistic is a number; with ``scalar=False`` a 1 x 1 array, as in older statsmodels.

        The F form, with `df_inference` or else `df_resid` degrees of freedom in the denominator, is taken by
        default where `use_t`, as in statsmodels.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.FederatedGLM.from_formula("num ~ age + C(cp)", partition).fit()
        >>> both = fit.wald_test("age = 0, C(cp)[T.2] = 0")
        >>> print(str(both).splitlines()[0])
        Wald test (F)
        >>> both.distribution, bool(both.pvalue < 0.001)
        ('F', True)
        """
        df = None
        if self.use_t if use_f is None else use_f:
            df = self.df_resid if self._df is None else self._df
        found = wald_test(self.estimate.params, self._cov(), self._read(r_matrix), df=df)
        if not scalar:
            found.statistic = np.atleast_2d(found.statistic)
        return found

    @takes_alpha
    def t_test_pairwise(
        self,
        term_name: str,
        method: str | Sequence[str] = "hs",
        alpha: float = 0.05,
        *,
        factor_labels: Sequence[str] | None = None,
    ) -> pd.DataFrame:
        """Compare all pairs of levels of a factor, with p-values adjusted for their number.

        Parameters
        ----------
        term_name : str
            A factor with treatment coding, such as ``"C(cp)"``.
        method : str or list of str
            As in :func:`statsmodels.stats.multitest.multipletests`: "hs" is Holm and Sidak.
        alpha : float
            Level of the decision.
        factor_labels : sequence of str, optional
            Labels of the levels, the reference first.

        Returns
        -------
        DataFrame
            One row per pair, as ``result_frame`` of statsmodels: difference, standard error, statistic,
            p-value, limits, and for each method the adjusted p-value and the decision.

        Raises
        ------
        ModelError
            The term is not a factor with treatment coding.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.FederatedGLM.from_formula("num ~ age + C(cp)", partition).fit()
        >>> fit.t_test_pairwise("C(cp)").shape[0]
        6
        """
        names, terms = self.estimate.names, self.estimate.terms
        at = [i for i, term in enumerate(terms) if term == term_name and "[T." in names[i]]
        if not at:
            raise ModelError(
                f"t_test_pairwise: expected a factor with treatment coding, such as 'C(x)'; {term_name!r} is "
                f"none. Terms are {', '.join(dict.fromkeys(terms))}"
            )
        levels = ["reference", *[names[i].rpartition("[T.")[2].rstrip("]") for i in at]]
        labels = levels if factor_labels is None else list(factor_labels)
        if len(labels) != len(levels):
            raise ModelError(f"factor_labels: expected {len(levels)}, received {len(labels)}")
        pairs = list(combinations(range(len(levels)), 2))
        R = np.zeros((len(pairs), len(names)))
        for row, (first, second) in zip(R, pairs, strict=True):
            row[at[second - 1]] = 1.0
            if first:
                row[at[first - 1]] = -1.0
        index = [f"{labels[second]}-{labels[first]}" for first, second in pairs]
        tests = self.t_test(R)
        adjusted = [method] if isinstance(method, str) else list(method)
        frame: pd.DataFrame = tests.summary_frame(alpha=alpha).set_axis(index)
        for one in adjusted:
            reject, pvalues = multipletests(np.asarray(tests.pvalue), alpha=alpha, method=one)[:2]
            frame[f"pvalue-{one}"], frame[f"reject-{one}"] = pvalues, reject
        return frame

    def f_test(self, r_matrix: Hypothesis) -> ContrastResults:
        """Wald test in its F form."""
        return self.wald_test(r_matrix, use_f=True)

    def wald_test_terms(
        self, skip_single: bool = False, combine_terms: Sequence[str] | None = None
    ) -> WaldTestResults:
        """Wald test of every term of the formula.

        Parameters
        ----------
        skip_single : bool
            Leave out the terms with one coefficient.
        combine_terms : sequence of str, optional
            For each text, one more test: all terms that contain it are zero together.
        """
        est = self.estimate
        return wald_test_terms(
            est.params,
            self._cov(),
            est.names,
            est.terms,
            skip_single=skip_single,
            combine_terms=combine_terms or (),
            df=self._df,
        )

    def terms_test(self, typ: Literal[2, 3] = 2) -> TermTests:
        """Test every term given others, as ``car::Anova`` of R and ``anova_lm`` of statsmodels.

        Type 2 tests a term given all terms that do not contain it: a main effect is not adjusted for its
        products. Type 3 tests it given all others; tests of a term with products then depend on the coding of
        factors, and need one such as ``C(x, Sum)``. Tests are Wald's, with the covariance of the fit.

        Parameters
        ----------
        typ : {2, 3}

        Returns
        -------
        statsmodels WaldTestResults
            ``table`` has statistic, p-value and degrees of freedom by term, without the intercept.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.FederatedOLS.from_formula("num ~ age * sex + C(cp)", partition).fit()
        >>> fit.terms_test(2).table.round(3)["statistic"].to_dict()
        {'age': 68.759, 'sex': 38.529, 'C(cp)': 64.115, 'age:sex': 7.403}
        """
        check_choice("typ", typ, (2, 3))
        est, constants = self.estimate, self._constants()
        tested = [text for text in dict.fromkeys(est.terms) if text not in constants]
        factors = {text: {factor.text for factor in parse_term(text)} for text in tested}
        larger = {
            text: [other for other in tested if typ == 2 and factors[text] < factors[other]]
            for text in tested
        }
        return given_terms(est.params, self._cov(), est.terms, larger, df=self._df)

    def _spans(self, restricted: CoefficientResults) -> bool:
        """Whether the columns of another fit are combinations of these; by default names decide."""
        return False

    def compare_lr_test(self, restricted: CoefficientResults) -> LRTest:
        """Likelihood ratio test of this fit against a nested one.

        Parameters
        ----------
        restricted : CoefficientResults
            A fit of the same response on the same entities, with some of the coefficients left out.

        Returns
        -------
        (statistic, pvalue, df_diff)

        Raises
        ------
        ModelError
            The two fits are not nested, or not of the same data.
        NotAvailableError
            One of them has no log-likelihood.
        EstimationError
            The restricted fit has the larger log-likelihood.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> large = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> small = fs.GLORE.from_formula("num > 0 ~ age", partition).fit()
        >>> test = large.compare_lr_test(small)
        >>> test.df_diff, bool(test.pvalue < 0.001)
        (1.0, True)
        """
        return lr_test(self, restricted)

    def get_margeff(self, *args: Any, **kwargs: Any) -> Any:
        """Marginal effects on the mean of the response, of results that have them.

        Raises
        ------
        NotAvailableError
            They are derivatives of the mean at a linear predictor; this fit has no linear predictor, or no
            covariance.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
        >>> fit = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition).fit()
        >>> bool((fit.get_margeff().margeff == fit.params[1:]).all())
        True
        """
        raise NotAvailableError(
            "get_margeff: marginal effects are derivatives of a mean at a linear predictor, and their "
            "errors need a covariance of its coefficients; these results lack one of the two. For a linear "
            "model they are the coefficients; FederatedGLM, VFEMRegression and VerticalGLM have them"
        )

    # -- tables and pictures ---------------------------------------------------------------------

    @takes_alpha
    def tidy(self, alpha: float = 0.05, exponentiate: bool = False) -> pd.DataFrame:
        """One row per coefficient, in the order of the design.

        Parameters
        ----------
        alpha : float
        exponentiate : bool
            Give ``estimate`` and its limits as exponentials, such as odds ratios; ``std_error`` and
            ``statistic`` stay those of the coefficients.

        Returns
        -------
        DataFrame
            ``term``, the name of the coefficient; its ``site``, where coefficients belong to sites;
            ``estimate``, ``std_error``, ``statistic``, ``p_value``, ``conf_low``, ``conf_high``. Where the
            fit has no covariance the last five are nan and ``frame.attrs["note"]`` says why.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> fit.tidy(exponentiate=True)[["term", "estimate", "conf_low", "conf_high"]].round(2)
                term  estimate  conf_low  conf_high
        0  Intercept      0.01      0.01       0.04
        1        age      1.06      1.05       1.08
        2        sex      4.41      3.06       6.38
        """
        frame = self._coefficients(alpha)
        frame = frame if frame["site"].any() else frame.drop(columns="site")
        return _exponentials(frame) if exponentiate else frame

    def _coefficients(self, alpha: float) -> pd.DataFrame:
        """Return the columns of :meth:`tidy`, with an empty ``site`` where there is none."""
        est = self.estimate
        names = {"term": est.names, "site": est.sites}
        columns: dict[str, Any] = {name: pd.Series(list(one), dtype=object) for name, one in names.items()}
        columns["estimate"] = est.params
        if est.cov is None:
            frame = pd.DataFrame(columns | dict.fromkeys(STATEMENTS[1:], np.nan))
            frame.attrs["note"] = self._reason("cov_params")
            return frame
        limits = self.conf_int(alpha)
        found = (self.bse, self.tvalues, self.pvalues, limits[0], limits[1])
        statements = zip(STATEMENTS[1:], found, strict=True)
        return pd.DataFrame(columns | {name: column.to_numpy() for name, column in statements})

    def glance(self) -> pd.DataFrame:
        """Return the fit as one row, with broom's names; ``concat`` combines the rows of several fits.

        Returns
        -------
        DataFrame
            ``nobs``, ``n_sites``, ``df_model``, ``df_resid``, ``r_squared``, ``logLik``, ``AIC``, ``BIC``,
            ``deviance`` and what the family adds; nan where the fit does not define one.

        Examples
        --------
        >>> import fedstat as fs
        >>> hospitals = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> result = fs.GLORE.from_formula("num > 0 ~ age + sex", hospitals).fit()
        >>> result.glance()[["nobs", "n_sites", "df_model", "df_resid"]].astype(int).values.tolist()
        [[920, 4, 2, 917]]
        """
        return super().glance()

    @takes_alpha
    def summary(
        self, alpha: float = 0.05, *, title: str | None = None, notes: Shown = "brief"
    ) -> SheetSummary:
        """Return the fit, coefficients by site, contributions of sites, and notes.

        Parameters
        ----------
        alpha : float
            One minus the level of the intervals.
        title : str, optional
            Replaces the title.
        notes : {"brief", "all"}
            Which notes are below the tables: warnings, and those that describe as long as a summary has no
            more than sixty lines; or all, those on the protocol as well.

        Returns
        -------
        SheetSummary
            A statsmodels ``Summary``: ``print`` it, or take ``as_html()``, ``as_latex()``, ``as_csv()``.
        """
        return self._lay_out(self._sheets(alpha), title, notes)

    def _sheets(self, alpha: float = 0.05) -> Iterator[Sheet]:
        yield header_sheet(self._title(), [*self._summary_left(), *self._summary_right()])
        yield self._coefficient_sheet(alpha)
        # Coefficients below the name of their site say there what the site contributes.
        if self.estimate.blocks and not any(self.estimate.sites):
            yield self._site_sheet()

    def _title(self) -> str:
        return f"{self.model_name} results"

    def _coefficient_sheet(self, alpha: float) -> Sheet:
        inference, z = self.estimate.cov is not None, "t" if self.use_t else "z"
        frame = self._coefficients(alpha)
        about = {
            block.site: f"{block.entities:,} {self._unit}, {block.missing_share} missing"
            for block in self.estimate.blocks
        }
        parts, further = self._error_parts(), self._further_columns()
        return coefficient_sheet(frame, parts, inference, alpha, z, further, about)

    def _site_sheet(self) -> Sheet:
        return coefficient_block_sheet(self.estimate.blocks)

    @takes_alpha
    def plot_coefficients(
        self,
        ax: Axes | None = None,
        *,
        alpha: float = 0.05,
        intercept: bool = False,
        exponentiate: bool = False,
        standardized: bool | Mapping[str, float] = False,
        selected: bool = False,
    ) -> Axes:
        """Plot coefficients with their intervals, grouped and colored by site.

        Parameters
        ----------
        ax : matplotlib Axes, optional
        alpha : float
        intercept : bool
            Whether to draw it; it is on another scale than the rest as a rule.
        exponentiate : bool
            Draw exponentials on a logarithmic scale, such as odds ratios.
        standardized : bool or mapping of str to float
            Draw effects of one standard deviation of each column: that of the fit, or of the mapping by name
            of the coefficient (a Series, say). One of a level is that of its indicator.
        selected : bool
            Leave out coefficients that are exactly zero.

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        NotAvailableError
            The fit did not learn the columns' standard deviations, or was read from a file that lacks them.
        ModelError
            The mapping lacks a coefficient that is drawn.
        """
        frame = self._coefficients(alpha)
        if not intercept:
            frame = frame[~frame["term"].isin(self._constants())]
        if selected:
            frame = frame[frame["estimate"] != 0.0]
        title = "Coefficients"
        effect, ratio, ratios = self._effect_words()
        if standardized is not False:
            frame = per_deviation(frame, self._deviations() if standardized is True else standardized)
            title = "Standardized coefficients"
            effect, ratio = (f"{words}, per standard deviation" for words in (effect, ratio))
        if exponentiate:
            frame = _exponentials(frame.copy())
            limits = frame[["estimate", "conf_low", "conf_high"]]
            # A logarithmic axis has no place for zero and infinity.
            values = limits.to_numpy(dtype=np.float64)
            shown = (np.isfinite(values) & (values > 0.0) | np.isnan(values)).all(axis=1)
            if not shown.all():
                left_out = ", ".join(frame["term"].to_numpy()[~shown].tolist())
                ratios += f" (left out, beyond the range of numbers: {left_out})"
                frame = frame.iloc[np.flatnonzero(shown)]
        return plot_coefficients(
            frame,
            ax=ax,
            title=ratios if exponentiate else title,
            alpha=alpha,
            effect=ratio if exponentiate else effect,
            ratios=exponentiate,
        )

    def __repr__(self) -> str:
        est = self.estimate
        state = "" if est.converged else ", NOT CONVERGED"
        return (
            f"<{type(self).__name__}: {est.response}, {len(est.names)} coefficients, "
            f"{est.nobs:,} {self._unit}{state}; see .summary()>"
        )

    # -- hooks of a family -----------------------------------------------------------------------

    def _constants(self) -> tuple[str, ...]:
        """Name the coefficients that are constants of the model, and no effects."""
        return (INTERCEPT,)

    def _link(self) -> DistributionSpec | None:
        """Distribution of the response, with the link that coefficients are on."""
        return None

    def _effect_words(self) -> tuple[str, str, str]:
        """Name the axis of coefficients, that of their exponentials, and the title for these."""
        return link_words(self._link(), self.estimate.response)

    def _deviations(self) -> pd.Series:
        """Return the standard deviation of each column, by name of its coefficient."""
        raise NotAvailableError(
            "standardized: this fit has no standard deviations of its columns; expected them by name of the "
            'coefficient, as in {"age": 12.4}'
        )

    def _summary_left(self) -> list[tuple[str, str]]:
        """Labels and values of the estimate."""
        return lines_of(self, self._SUMMARY)

    @property
    def _covariance_words(self) -> str:
        """Covariance and what it rests on, for the summary."""
        return "none" if self.estimate.cov is None else self.estimate.cov_type or "-"

    def _summary_right(self) -> list[tuple[str, str]]:
        """Labels and values of the federation, after those of the estimate."""
        blocks, rows = self.estimate.blocks, []
        rows.append(("Sites", str(len(self._sites()))))
        if blocks:
            rows.append(
                (f"{self._unit.capitalize()} by site", human_range(block.entities for block in blocks))
            )
        return [*rows, ("Privacy spent", self.estimate.privacy)]

    def _error_parts(self) -> dict[str, Floats]:
        """Parts of the standard errors to print with them, by heading: (d,) each."""
        return {}

    def _further_columns(self) -> dict[str, Floats]:
        """Columns to print after the intervals, by heading: (d,) each, nan where one is blank."""
        return {}

    def _summary_notes(self) -> Iterator[Note]:
        est, setting = self.estimate, getattr(self._ledger, "setting", "")
        if not self.converged:
            detail = est.convergence or "the iteration stopped before its tolerance"
            yield NOTES.note("not_converged", detail=detail)
        if setting:
            yield NOTES.note("setting", setting=setting)
        if est.cov is None:
            yield NOTES.note("no_covariance", reason=self._reason("cov_params"))
        elif undetermined := [n for n, se in zip(est.names, self.bse, strict=True) if np.isnan(se)]:
            yield NOTES.note("undetermined_errors", names=undetermined)
        if est.llf is None:
            yield NOTES.note("no_likelihood", reason=self._reason("llf"))
        yield from super()._summary_notes()

    # -- behind the scenes -----------------------------------------------------------------------

    def _read(self, hypothesis: Hypothesis) -> Constraints:
        return read_constraints(hypothesis, self.estimate.names)

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

    @property
    def _n_sites(self) -> int:
        return len(self._sites())

    def _sites(self) -> list[str]:
        """Names of the sites behind the fit."""
        blocks = self.estimate.blocks
        return [block.site for block in blocks] or list(dict.fromkeys(filter(None, self.estimate.sites)))


def lr_test(full: CoefficientResults, restricted: CoefficientResults) -> LRTest:
    """Likelihood ratio test of a fit against one that is nested in it.

    A ModelError says that they are not nested or not of the same data, an EstimationError that the restricted
    fit has the larger log-likelihood.
    """
    for fit in (full, restricted):
        if not fit.estimate.llf_is_maximum:
            raise ModelError("compare_lr_test: the log-likelihood of one of the two fits is not a maximum")
    df_diff = check_nested(full.estimate, restricted.estimate, full._spans(restricted))
    statistic = 2.0 * (full.llf - restricted.llf)
    # Two equal fits differ by rounding, which is no error.
    if statistic < -1e-8 * abs(full.llf):
        raise EstimationError(
            "compare_lr_test: the restricted fit has the larger log-likelihood "
            f"({restricted.llf:.6g} against {full.llf:.6g}), so one of the two is not at its maximum; "
            f"converged: {full.estimate.converged} (this), {restricted.estimate.converged} (restricted)"
        )
    return LRTest(statistic, float(stats.chi2.sf(statistic, df_diff)), df_diff)


def _exponentials(frame: pd.DataFrame) -> pd.DataFrame:
    limits = ["estimate", "conf_low", "conf_high"]
    frame[limits] = exponentials(frame[limits])
    return frame
