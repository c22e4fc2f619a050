"""Base results when sites hold different rows: fit statistics, predictions, and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import methodcaller
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar, cast

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, NotAvailableError, Remedy
from fedstat.federation.audit.event_log import AbsentSite
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.design.horizontal_design import RowsDesign, RowsSchema
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.inference.estimate import Estimate, LedgerLike, takes_alpha
from fedstat.inference.evaluation import Evaluation
from fedstat.inference.hypotheses import Constraints, HypothesisTest, wald_test
from fedstat.inference.notes import Note
from fedstat.inference.plots import draw_effect
from fedstat.inference.summary import CoefficientBlock, site_rows_sheet
from fedstat.inference.tables import Sheet
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.checks import HeldRows, check_choice
from fedstat.models.horizontal.effects import effect_contrasts, spans
from fedstat.models.horizontal.evaluation import evaluate_rows
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.notes import BY_KEY, NOTES
from fedstat.models.horizontal.overlap import overlap_notes
from fedstat.models.horizontal.prediction import GLMPrediction, PredictedRows, held_rows, predict_rows
from fedstat.models.horizontal.session import RowsSession
from fedstat.models.horizontal.subgroups import Subgroups, subgroups
from fedstat.models.results import CoefficientResults, EstimateRecord, Results
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Found = TypeVar("Found")
STRAIGHT = 1e-9
"""Size of second differences, relative to the largest, below which they are those of a line."""
NO_LIKELIHOOD = "the family does not define a log-likelihood here"


OFFSET = ("Offset", "basis.agreement.question.offsets", ", ".join)
"""Line of a summary with the offset."""
PROPENSITIES = (
    "Weights",
    "basis.agreement.question.propensities",
    lambda found: "; ".join(one.text for one in found),
)
"""Line of a summary with the propensity models by which rows are weighted."""


def weight_line(label: str, role: str) -> tuple[str, str, Callable[[Any], str]]:
    """Return the line of a summary that names the column of some weights."""
    return label, "basis.agreement.question.weights", methodcaller("get", role, "")


@dataclass(frozen=True, slots=True, eq=False)
class RowsBasis:
    """What results keep of the model: no rows, and enough to code new ones.

    `site_column` is the column that names the sites; `repeated` rows have a `key` that another site has.
    `spread` (A, 4) has the rows of each arm by which rows are weighted, if that was summed, and sums of
    their weights, squares and fourth powers.
    """

    model_name: str
    method_name: str
    agreement: RowsSchema
    site_column: str
    repeated: int = field(default=0, kw_only=True)
    key: str = field(default="", kw_only=True)
    spread: Annotated[Floats, "A 4"] | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, model: HorizontalModel, **more: Any) -> Self:
        """Take it from a model; a family adds `more` of its own."""
        partition, names = model.partition, (model.model_name, model.method_name)
        more |= {"repeated": partition._repeated_rows, "key": ", ".join(partition.key)}
        return cls(*names, model.agreement, partition.site_column, **more)

    @property
    def left_out(self) -> int:
        """Rows that lack one of the model's columns."""
        return sum(row.n_rows - row.n for row in self.agreement.sites)

    @property
    def repeated_note(self) -> Iterator[Note]:
        """Warn of keys that several sites have."""
        if self.repeated:
            # Clusters are those of one column.
            alone = "" if ", " in self.key else self.key
            more: dict[str, Any] = {"remedy": BY_KEY, "key": alone} if alone else {}
            kind = "shared_keys" if self.key else "shared_keys/counted"
            yield NOTES.note(kind, rows=self.repeated, **more)


class RowsFit(Protocol):
    """What results over rows read of a family's fit; sums are over all rows, weights counted."""

    @property
    def design(self) -> RowsDesign:
        """Columns."""

    @property
    def distribution(self) -> DistributionSpec:
        """Of the response, with its link."""

    @property
    def totals(self) -> tuple[float, float, float]:
        """Sum of the frequency weights, deviance, Pearson's statistic."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowsRecord(EstimateRecord):
    """What a file of results holds, whatever the family; `auc` is that of the latest evaluation."""

    fit: RowsFit
    basis: RowsBasis
    auc: float | None = None


def rows_estimate(
    model: HorizontalModel, design: RowsDesign, *, reasons: dict[str, str], llf: float, **found: Any
) -> Estimate:
    """Hand over what was `found`, with the names, rows and sites of the model; `llf` is NaN without one."""
    width = len(design.names)
    return Estimate(
        names=design.names,
        sites=("",) * width,
        terms=design.term_names,
        response=model.formula.response,
        nobs=design.nobs,
        df_model=float(width - design.intercept),
        llf=None if pd.isna(llf) else llf,
        privacy="none (no noise is added)",
        blocks=tuple(
            CoefficientBlock(row.site, width, row.n, 1.0 - row.n / row.n_rows)
            for row in model.agreement.sites
        ),
        reasons={"llf": NO_LIKELIHOOD, **reasons},
        **found,
    )


class OverRows(Results[Any]):
    """What all results over rows say: how these were coded, which rows were left out.

    Attributes
    ----------
    model_name, method_name : str
        Titles of the summary.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> model = fs.TreatmentEffect.from_formula("died ~ 1", partition, treatment="arm ~ age")
    >>> model.balance().absent
    ()
    """

    def __init__(self, record: Any, ledger: LedgerLike | None = None, model: Any = None) -> None:
        super().__init__(record, ledger, model)
        self.model_name, self.method_name = record.basis.model_name, record.basis.method_name

    @property
    def basis(self) -> RowsBasis:
        """What is kept of the model, with which new rows are coded."""
        found: RowsBasis = self._record.basis
        return found

    @property
    def absent(self) -> tuple[AbsentSite, ...]:
        """Sites that were lost, in which round; the fit is that of all others."""
        return self._ledger.absent if isinstance(self._ledger, Ledger) else ()

    def _left_out_note(self, more: str = "") -> Iterator[Note]:
        yield from self.basis.repeated_note
        if not (dropped := self.basis.left_out):
            return
        if subset := self.basis.agreement.question.subset_text:
            rows = sum(row.n_rows for row in self.basis.agreement.sites)
            yield NOTES.note("subset", used=rows - dropped, rows=rows, subset=subset, more=more)
            return
        if sites := ", ".join(map(repr, self.basis.agreement.leaving_out)):
            yield NOTES.note("left_out/complete", rows=dropped, more=more, sites=sites)
        else:
            yield NOTES.note("left_out", rows=dropped, more=more)

    def _summary_notes(self) -> Iterator[Note]:
        yield from super()._summary_notes()
        if dropped := self.basis.agreement.spec.dropped:
            yield NOTES.note("aliased_columns", columns=dropped)
        if splines := self.basis.agreement.question.describe_placed():
            counted = any(entry.step == "count_intervals" for _, entry in getattr(self._ledger, "events", ()))
            yield NOTES.note("knots" if counted else "knots/published", splines=splines)


class DesignResults(OverRows, CoefficientResults):
    """What follows from the design and the coefficients of a fit over rows, whatever the likelihood.

    Attributes
    ----------
    model : HorizontalModel
        For results that were read from a file, the names of response and coefficients only.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition).fit()
    >>> fit.absent, fit.basis.site_column  # no site was lost
    ((), 'hospital')
    """

    _unit = "rows"
    _record: Any
    _model: HorizontalModel | None

    @property
    def _fit(self) -> Any:
        return self._record.fit

    def _spans(self, restricted: CoefficientResults) -> bool:
        """Whether the columns of another fit are combinations of these, as a line is one of a spline."""
        if not isinstance(restricted, DesignResults):
            return False
        here, there = ((fit.basis.agreement, fit._fit.design) for fit in (self, restricted))
        return spans(here, there)

    def _deviations(self) -> pd.Series:
        return pd.Series(self._fit.design.spread, index=list(self.estimate.names))

    def _after_fit(
        self,
        call: str,
        family: str,
        run: Callable[[RowsSession], FitProtocol[Found]],
        model: HorizontalModel | None = None,
    ) -> Found:
        """Run a protocol of a family's steps, masked as the fit; `model` may be a larger one."""
        if self._model is None:
            raise NotAvailableError(
                f"{call.partition('(')[0]}: this result was read from a file and has no partition; fit the "
                "model again"
            )

        def protocol(model: HorizontalModel) -> FitProtocol[Found]:
            session = model._open_session(family, self._fit.masked)
            return session.hide(run(session))

        return (model or self._model)._run_after_fit(call, protocol)

    def _partition_for(self, call: str, partition: ClientPartition | None) -> ClientPartition:
        """Return the given partition, or that of the fit."""
        if partition is None and self._model is None:
            raise NotAvailableError(
                f"{call}: this result was read from a file and has no partition; give one"
            )
        return self._model.partition if partition is None else partition  # type: ignore[union-attr]

    def _held(self, frame: HeldRows | None) -> pd.DataFrame:
        """Take the caller's rows as a pandas table."""
        if frame is None:
            raise NotAvailableError(
                "predict needs a frame of rows that you hold; those of the fit stay at the sites"
            )
        return held_rows(frame)

    def _require_levels(self, call: str) -> None:
        """Refuse what needs the effects of absorbed levels, which no site releases."""
        if effects := self.basis.agreement.question.absorbed_texts:
            raise NotAvailableError(
                f"{call}: it needs the effects of the levels of {' and '.join(map(repr, effects))}, which "
                "were absorbed. Differences of predictions are those of the coefficients, as in effect(); or "
                f"write few levels as a term of the formula, C({effects[0].partition('^')[0]})"
            )

    def _predicted(self, frame: HeldRows | None, params: Floats | None = None) -> PredictedRows:
        self._require_levels("predict")
        params = self.estimate.params if params is None else params
        return predict_rows(self.basis.agreement, self._fit.design, params, self._held(frame))

    def get_prediction(self, exog: HeldRows | None = None) -> GLMPrediction:
        """Predict means with standard errors and intervals; see :meth:`GLMPrediction.summary_frame`.

        Parameters
        ----------
        exog : table of pandas, polars or pyarrow, or dict of columns
            Rows that you hold, with the columns of the model; rows that lack one give NaN.

        Raises
        ------
        NotAvailableError
            No rows are given: those of the fit stay at the sites.

        Examples
        --------
        >>> import fedstat as fs
        >>> table = fs.datasets.make_hospitals().assign(ward=lambda t: t.index // 4)
        >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
        >>> model = fs.FederatedGEE.from_formula("num ~ age", partition, groups="ward")
        >>> model.fit().get_prediction(table.head(2)).summary_frame().columns.tolist()
        ['mean', 'mean_se', 'mean_ci_lower', 'mean_ci_upper']
        """
        rows, errors = self._predicted(exog), self._cov()
        link = cast(DistributionSpec, self._link())
        return GLMPrediction(
            rows.linear, rows.standard_errors(errors), link.make(), self._combined_distribution
        )

    _summed: ClassVar[str] = "rows"
    """What the sums of the fit are over."""

    def _summary_left(self) -> list[tuple[str, str]]:
        question = self.basis.agreement.question
        more = [("Subset", question.subset_text)] if question.subset else []
        if effects := " + ".join(question.absorbed_texts):
            more.append(("Absorbed", f"{effects} ({self._fit.design.absorbed.levels:,} levels)"))
        return [*super()._summary_left(), *more]

    def _site_sheet(self) -> Sheet:
        return self._rows_by_site()

    def _rows_by_site(self, own: Sequence[str] = ()) -> Sheet:
        """One site per row: its rows, and the share that is not used; one row for all if they are alike."""
        rows = [(block.site, block.entities, block.missing) for block in self.estimate.blocks]
        return site_rows_sheet(rows, own, subset=bool(self.basis.agreement.question.subset))

    def _sums_line(self) -> list[tuple[str, str]]:
        K, masked = len(self.estimate.blocks), self._fit.masked
        return (
            [("Sums", f"masked over {K} sites" if masked else "unmasked")] if self._ledger is not None else []
        )

    def _weights_notes(self) -> Iterator[Note]:
        """Warn of weights that few rows carry, and say what standard errors account for."""
        question, spread = self.basis.agreement.question, self.basis.spread
        if not question.propensities:
            return
        if spread is not None:
            levels = [level for one in question.propensities for level in one.levels]
            yield from overlap_notes(levels, spread[:, 0], spread[:, 1:], bounded=True)
        kind = "weights" if self.estimate.cov_type == "stacked" else "weights/known"
        yield NOTES.note(kind)

    def _masking_note(self) -> Iterator[Note]:
        K = len(self.estimate.blocks)
        if self._fit.masked:
            apart = f", except {' and '.join(words)}" if (words := self._site_by_site()) else ""
            yield NOTES.note("masking", what=f"Sums over {self._summed}", sites=K, apart=apart)
        elif K > 1:
            yield NOTES.note("masking/two_sites" if K == 2 else "masking/none")

    def _site_by_site(self) -> list[str]:
        """Name what left site by site although sums are masked."""
        left = getattr(self._ledger, "events", ())
        apart = any((e.step, e.array, e.masked) == ("transform_sums", "sums", False) for _, e in left)
        return ["the sums that transforms such as center() need"] if apart else []

    @takes_alpha
    def effect(
        self,
        column: str,
        values: Sequence[float] | Floats | None = None,
        *,
        reference: float | None = None,
        at: Mapping[str, Any] | None = None,
        exponentiate: bool = False,
        alpha: float = 0.05,
    ) -> pd.DataFrame:
        """Return the effect of a numeric column along its range, with intervals of each value.

        The effect at x is the difference of the linear predictor between x and a reference, (X(x) - X(x0)) b,
        over all terms with the column: splines, polynomials and interactions. Its standard error comes from
        :meth:`cov_params`. The intervals are pointwise; a curve can leave some of them although each has its
        level. An offset does not count. No data leave a site.

        Parameters
        ----------
        column : str
        values : sequence of float, optional
            Values of the column, (m,). By default 101 values between the bounds of its spline. Without a
            spline they range over two standard deviations on each side of the mean, which the fit knows.
        reference : float, optional
            The effect is zero at this value; by default in the middle between the smallest and the largest
            of the values.
        at : mapping, optional
            Values of other columns. Columns with which this one interacts must have one; the others have no
            influence.
        exponentiate : bool
            Give ``estimate`` and its limits as exponentials, such as odds ratios; ``std_error`` stays that of
            the linear predictor.
        alpha : float

        Returns
        -------
        DataFrame
            ``value``, ``estimate``, ``std_error``, ``conf_low``, ``conf_high``; the reference is in
            ``frame.attrs["reference"]``.

        Raises
        ------
        ModelError
            The model does not have the column, it holds categories, or `at` lacks a column that interacts
            with it.
        DesignError
            A value is outside the bounds of a spline, or a term cannot be computed for it.
        NotAvailableError
            The fit has no covariance.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> spline = "cr(age, knots=(45, 55, 65), lower_bound=25, upper_bound=80, constraints='center')"
        >>> fit = fs.GLORE.from_formula(f"num > 0 ~ {spline} + sex", partition).fit()
        >>> fit.effect("age", [40, 50, 60, 70], reference=50, exponentiate=True).round(2)
           value  estimate  std_error  conf_low  conf_high
        0   40.0      0.61       0.16      0.44       0.84
        1   50.0      1.00       0.00      1.00       1.00
        2   60.0      1.92       0.16      1.41       2.61
        3   70.0      4.22       0.29      2.39       7.43
        """
        found = effect_contrasts(self.basis.agreement, self._fit.design, column, values, reference, at or {})
        params, cov = self._effect_part()
        estimate = found.X @ params
        std_error = np.sqrt(np.maximum(((found.X @ cov) * found.X).sum(axis=1), 0.0))
        half = self._combined_distribution.isf(alpha / 2.0) * std_error
        turn = np.exp if exponentiate else np.asarray
        frame = pd.DataFrame(
            {
                "value": found.values,
                "estimate": turn(estimate),
                "std_error": std_error,
                "conf_low": turn(estimate - half),
                "conf_high": turn(estimate + half),
            }
        )
        frame.attrs["reference"] = found.reference
        return frame

    def test_nonlinearity(self, column: str, *, at: Mapping[str, Any] | None = None) -> HypothesisTest:
        """Test whether the effect of a numeric column is a straight line, as "Nonlinear" of rms in R.

        It is Wald's test that all terms with the column, such as a spline or polynomial, add up to a line. In
        a linear model it is the F test against the model with the column itself. No data leave a site.

        Parameters
        ----------
        column : str
        at : mapping, optional
            Values of columns with which this one interacts; see :meth:`effect`.

        Returns
        -------
        statsmodels ContrastResults

        Raises
        ------
        ModelError
            The terms with the column are a line anyway, or see :meth:`effect`.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ poly(age, 3) + sex", partition).fit()
        >>> fit.test_nonlinearity("age").df_denom
        2
        """
        found = effect_contrasts(self.basis.agreement, self._fit.design, column, None, None, at or {})
        params, cov = self._effect_part()
        # Second differences on an equidistant grid are zero for lines alone.
        bends = np.diff(found.X, n=2, axis=0)
        scale = np.abs(found.X).max(axis=0)
        scale[scale == 0.0] = 1.0
        _, s, V = np.linalg.svd(bends / scale, full_matrices=False)
        if not s.max(initial=0.0) > STRAIGHT:
            raise ModelError(f"test_nonlinearity: the effect of {column!r} is a straight line in this model")
        R = V[s > STRAIGHT * s.max()] * scale
        constraints = Constraints(R, np.zeros(len(R)), (f"nonlinear effect of {column} = 0",))
        test: HypothesisTest = wald_test(params, cov, constraints, df=self.df_inference)
        return test

    def with_covariance(self, cov_type: str, cov_kwds: dict[str, str] | None = None) -> Self:
        """Return the same estimates with another covariance, as if `fit` had been called with it.

        Of generalized linear models it is computed at the estimate: without a request for "nonrobust", and
        for "HC0" and "HC1" if the fit has one of them, and otherwise with the rounds of one evaluation. All
        other families, and rows that lack a column of clusters, are fitted again.

        Parameters
        ----------
        cov_type : str
        cov_kwds : dict, optional
            As those of `fit`.

        Returns
        -------
        Results of the same class

        Raises
        ------
        ModelError
            The family has no such covariance.
        NotAvailableError
            The results were read from a file.
        PolicyError
            A site refuses.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.FederatedOLS.from_formula("num ~ age + sex", partition).fit()
        >>> robust = fit.with_covariance("HC1")
        >>> robust.cov_type, bool((robust.params == fit.params).all())
        ('HC1', True)
        >>> robust.with_covariance("nonrobust").bse.equals(fit.bse)
        True
        """
        if self._model is None:
            raise NotAvailableError("with_covariance: this result was read from a file; fit the model again")
        given = {name: value for name, value in self._call.arguments.items() if name != "cov_kwds"}
        given["cov_type"] = cov_type
        if cov_kwds is not None:
            given["cov_kwds"] = cov_kwds
        found: Self = self._model._with_covariance(self, given)
        return found

    def subgroups(self, effect: str, by: str | Sequence[str]) -> Subgroups:
        """Fit the model within the levels of columns, and test whether an effect differs between levels.

        Each level is one fit of its rows, by `subset`, with the arguments of this fit; the test of
        interaction is one fit of all rows for each column. Sites without a row of a level take no part in its
        fit. A level that a site refuses, or whose fit fails, has no estimate, and a note.

        Parameters
        ----------
        effect : str
            A column of the model, or its term, such as ``"arm"`` or ``"C(arm)"``, without products.
        by : str or list of str
            Columns of categories, in the model or not.

        Returns
        -------
        Subgroups
            ``tidy()``, ``summary()``, ``plot()``, and ``tests`` of interaction.

        Raises
        ------
        ModelError
            The model has no such effect, or products with it.
        NotAvailableError
            The results were read from a file.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> fit = fs.FederatedCox.from_formula("Surv(months, died) ~ arm + age", partition).fit()
        >>> fit.subgroups("arm", by=["stage"]).tests["df"].tolist()
        [2.0]
        """
        if self._model is None:
            raise NotAvailableError("subgroups: this result was read from a file; fit the model again")
        if self.basis.agreement.question.propensities:
            raise NotAvailableError(
                "subgroups: the weights belong to all rows. Fit a propensity model with the subset of each "
                "level, and weight the rows of this subset"
            )
        return subgroups(self, effect, by)

    def _effect_part(self) -> tuple[Floats, Floats]:
        """Coefficients of the design's columns, (p,), and their covariance, (p, p)."""
        return self.estimate.params, self._cov()

    @takes_alpha
    def plot_effect(
        self,
        column: str,
        values: Sequence[float] | Floats | None = None,
        ax: Axes | None = None,
        *,
        reference: float | None = None,
        at: Mapping[str, Any] | None = None,
        exponentiate: bool = False,
        alpha: float = 0.05,
    ) -> Axes:
        """Draw the effect of a numeric column along its range, with intervals of each value.

        Arguments are those of :meth:`effect`; `exponentiate` draws on a logarithmic scale.

        Parameters
        ----------
        column : str
        values : sequence of float, optional
        ax : matplotlib Axes, optional
        reference : float, optional
        at : mapping, optional
        exponentiate : bool
        alpha : float

        Returns
        -------
        matplotlib Axes

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ poly(age, 2) * sex", partition).fit()
        >>> ax = fit.plot_effect("age", range(30, 76), reference=50, at={"sex": 1}, exponentiate=True)
        >>> ax.get_ylabel()
        'odds ratio of num > 0'
        """
        frame = self.effect(
            column, values, reference=reference, at=at, exponentiate=exponentiate, alpha=alpha
        )
        effect, ratio, _ = self._effect_words()
        fixed = "".join(f", at {name} = {value}" for name, value in (at or {}).items())
        compared = f"compared with {frame.attrs['reference']:.4g}{fixed}"
        return draw_effect(
            frame,
            column,
            ratio if exponentiate else effect,
            f"{compared}; with pointwise {100 * (1 - alpha):g} % intervals",
            ratios=exponentiate,
            ax=ax,
        )


class RowsResults(DesignResults):
    """What follows from any fit over rows.

    Attributes
    ----------
    family : statsmodels family
    distribution : DistributionSpec
        Its name, link and numbers.
    model : HorizontalModel
        For results that were read from a file, the names of response and coefficients only.
    evaluation_ledger : Ledger or None
        Releases of the latest evaluation.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
    >>> round(fit.deviance), round(fit.pearson_chi2), fit.df_resid, fit.distribution.name
    (1125, 927, 917.0, 'Binomial')
    >>> fit.predict(table.head(3)).shape
    (3,)
    >>> round(fit.evaluate().auc, 2) == round(fit.auc, 2)
    True
    >>> fit.absent, fit.basis.site_column  # no site was lost
    ((), 'hospital')
    """

    evaluation_ledger: Ledger | None = None
    _record: RowsRecord
    _model: HorizontalModel | None

    def __init__(self, record: RowsRecord, ledger: LedgerLike | None = None, model: Any = None) -> None:
        super().__init__(record, ledger, model)
        self.distribution = record.fit.distribution
        self.family: Any = self.distribution.make()

    @property
    def _fit(self) -> RowsFit:
        return self._record.fit

    def _link(self) -> DistributionSpec:
        return self.distribution

    @property
    def deviance(self) -> float:
        """Deviance at the estimate."""
        return self._fit.totals[1]

    @property
    def pearson_chi2(self) -> float:
        """Sum of squared Pearson residuals."""
        return self._fit.totals[2]

    @property
    def df_resid(self) -> float:
        """Sum of the frequency weights less the number of coefficients, those of absorbed levels included."""
        return self._fit.totals[0] - self._fit.design.rank

    # -- prediction ------------------------------------------------------------------------------

    def predict(self, exog: HeldRows | None = None, which: Literal["mean", "linear"] = "mean") -> pd.Series:
        """Predict for rows that the caller holds.

        Parameters
        ----------
        exog : table of pandas, polars or pyarrow, or dict of columns
            With the columns of the model, and of its offset or exposure; rows that lack one give NaN.
        which : {"mean", "linear"}

        Returns
        -------
        Series

        Raises
        ------
        DesignError
            A column is absent, of another type, or holds a level that the fit did not know.
        NotAvailableError
            No frame is given: the rows of the fit stay at the sites.

        Examples
        --------
        >>> import fedstat as fs
        >>> table = fs.datasets.make_hospitals()
        >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> fit.predict(table.head(3)).round(2).tolist()
        [0.19, 0.18, 0.32]
        >>> fit.predict(table.head(3), which="linear").round(2).tolist()
        [-1.42, -1.48, -0.76]
        """
        check_choice("which", which, ("mean", "linear"))
        eta = self._predicted(exog).linear
        if which == "linear":
            return eta
        return pd.Series(self.family.link.inverse(eta.to_numpy()), index=eta.index)

    _GLANCE = (
        *DesignResults._GLANCE,
        ("deviance", "deviance"),
    )

    # -- evaluation ------------------------------------------------------------------------------

    def evaluate(
        self, partition: ClientPartition | None = None, *, recalibrate: bool | None = None
    ) -> Evaluation:
        """Discrimination and calibration from counts in bins of the linear predictor, and from sums.

        The edges of the bins depend on family, link and coefficients, and not on rows.

        Parameters
        ----------
        partition : ClientPartition, optional
            New rows; by default those of the fit, on which the figures flatter: there the slope is 1.
        recalibrate : bool, optional
            Whether to regress the response on the linear predictor, for calibration slope and intercept and
            the Brier score: about five more rounds, with sums as in a fit. By default if the response is
            binary, unless an owner requires masks and there are fewer than three sites.

        Returns
        -------
        Evaluation
            AUC over all and by site with intervals, observed and expected, ``roc()``,
            ``confusion(threshold)``, ``brier``, ``recalibration`` with slope and intercept,
            ``plot_calibration()``.

        Raises
        ------
        PolicyError
            A site refuses.
        NotAvailableError
            No partition is given, and the results were read from a file.

        Examples
        --------
        >>> import fedstat as fs
        >>> table = fs.datasets.make_hospitals()
        >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
        >>> fit = fs.GLORE.from_formula("num > 0 ~ age + sex", partition).fit()
        >>> evaluation = fit.evaluate()
        >>> round(evaluation.auc, 2), round(fit.auc, 2)
        (0.72, 0.72)
        >>> fit.evaluation_ledger.rounds > 0
        True
        """
        self._require_levels("evaluate")
        partition = self._partition_for("evaluate", partition)
        evaluation, self.evaluation_ledger = evaluate_rows(
            self.basis.agreement,
            self._fit.design,
            self.distribution,
            self.estimate.params,
            partition,
            recalibrate=recalibrate,
        )
        if self._model is not None and partition is self._model.partition:
            evaluation = replace(evaluation, own_rows=True)
        # Kept, so that compare() and files can show it without asking the sites again.
        self._record = replace(self._record, auc=evaluation.auc if evaluation.binary else None)
        return evaluation

    @property
    def auc(self) -> float:
        """Area under the curve of the latest :meth:`evaluate`."""
        if self._record.auc is None:
            remedy = Remedy("evaluate()", ": call {call} first, which asks the sites for counts")
            raise NotAvailableError("no AUC", remedy=remedy)
        return self._record.auc
