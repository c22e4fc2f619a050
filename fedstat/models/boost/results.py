"""Results of functional boosting: surfaces, path, predictions, and fits of each site alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, NotAvailableError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.tables.curves import Curve
from fedstat.inference.estimate import Estimate, LedgerLike
from fedstat.inference.summary import CoefficientBlock, Note, coefficient_block_sheet, header_sheet
from fedstat.inference.tables import SheetSummary
from fedstat.models.boost.explain import masking_sentence, traced_columns, tracing_sentence
from fedstat.models.boost.learning.baselines import SiteBoosting
from fedstat.models.boost.learning.boosting import (
    NO_SQUARES,
    UNEVEN,
    Boosting,
    BoostPath,
    ScoredBoosting,
    explained,
    first_steps,
)
from fedstat.models.boost.learning.learners import BoostFormula
from fedstat.models.boost.learning.losses import LossSpec
from fedstat.models.boost.learning.prepared_learners import PreparedLearners
from fedstat.models.boost.learning.selection import (
    corrected_aic,
    entry_p_values,
    false_selections,
    path_df,
    selection_frequencies,
)
from fedstat.models.boost.learning.varying import coefficients_along, varying_of
from fedstat.models.boost.report.effects import as_functions, effect_frame, learner_sheet, loss_rows
from fedstat.models.boost.report.plots import BoostPictures
from fedstat.models.boost.report.prediction import predict_boosted, scores
from fedstat.models.boost.report.refit import GIVEN, HALVES, SELECTED, SurfaceFit, fit_surfaces
from fedstat.models.checks import check_choice, check_whole
from fedstat.models.horizontal.results import RowsBasis
from fedstat.models.results import CoefficientResults
from fedstat.progress_line import shows_progress
from fedstat.typing import Bools, Floats

# ----------------------------------------------------------------------------------------------------
# What can be said beyond the path, from the sums of one round.

BASELINE = (
    "aggregation='{}' is a baseline without inference; aggregation='exact' has refits with intervals, tests "
    "and selection frequencies"
)


class BoostStatements:
    """Refits with intervals, halves that select and estimate, selection frequencies, tests of entry.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> model = fs.FedFunctionBoost.from_formula("num ~ age + sex", partition)
    >>> fit = model.fit(steps=20, folds=6)
    >>> type(fit.refit()).__name__, len(fit.entry_test(draws=19)), type(fit.split()).__name__
    ('SurfaceFit', 2, 'SurfaceFit')
    >>> shares, falsely = fit.stability(1, draws=4)
    >>> len(shares), falsely > 0.0
    (2, True)
    >>> try:
    ...     objects = fit.to_skfda()
    ... except (ImportError, fs.errors.FedstatError):  # of curves, with fedstat[skfda]
    ...     objects = {}
    """

    _record: Any
    mstop: int
    _all_folds: Bools

    @property
    def _boosting(self) -> Boosting:
        boosting: Boosting = self._record.boosting
        return boosting

    @property
    def _loss(self) -> LossSpec | None:
        """Loss that is no square."""
        return self._boosting.loss if isinstance(self._boosting, ScoredBoosting) else None

    @cached_property
    def _followed(self) -> tuple[PreparedLearners, BoostPath]:
        return self._boosting.over(self._all_folds, self.mstop)

    def _place(self, learner: str) -> int:
        raise NotImplementedError

    @property
    def offset(self) -> Floats:
        """Curve from which boosting starts, at each point of the response: (G,)."""
        raise NotImplementedError

    def to_skfda(self) -> dict[str, Any]:
        """Effects as objects of scikit-fda, for its pictures and methods.

        Returns
        -------
        dict of str to skfda.FDataGrid
            The ``"offset"`` and each learner's effect by its label: a function of (s, t) or (x, t), of t
            alone with one sample for each column of a linear effect, or of s where the response is a number,
            whose linear effects are none.

        Raises
        ------
        ImportError
            scikit-fda is not installed.
        """
        return as_functions(self._record, self._followed[1], self.offset)

    def refit(self, learners: Sequence[str] | None = None, *, random_state: int = 0) -> SurfaceFit:
        """Fit learners again without the shrinkage of boosting: surfaces with intervals, and tests.

        By generalised least squares, with errors correlated along the response; nothing further is asked of
        the sites.

        Parameters
        ----------
        learners : sequence of str, optional
            By default those that were selected: intervals and tests are then conditional on the selection.
        random_state : int
            Seed of the draws behind simultaneous bands.

        Raises
        ------
        ModelError
            There is no such learner.
        EstimationError
            Too few rows for the learners, or they are collinear.
        """
        self._need_exact()
        chosen = self._selected if learners is None else [self._place(name) for name in learners]
        how = SELECTED if learners is None else GIVEN
        return fit_surfaces(self._record, self._all_folds, chosen, how, random_state)

    def split(self, *, random_state: int = 0) -> SurfaceFit:
        """Select by one half of the folds, after as many steps, and fit the others.

        Intervals and tests are not conditional on the selection then.

        Raises
        ------
        NotAvailableError
            There are fewer than two folds.
        """
        self._need_exact()
        F = self._need_folds()
        half = np.zeros(F, dtype=bool)
        half[np.random.default_rng(random_state).permutation(F)[: F // 2]] = True
        path = self._boosting.over(half, self.mstop)[1]
        return fit_surfaces(
            self._record, ~half, sorted({*path.selected.tolist()} - {0}), HALVES, random_state
        )

    @shows_progress
    def stability(
        self,
        q: int,
        *,
        tau: float = 0.75,
        draws: int = 50,
        random_state: int = 0,
        progress: bool | None = None,
    ) -> tuple[pd.Series, float]:
        """How often halves of the folds select each learner among the first q of their path.

        Parameters
        ----------
        q : int
            Learners that a half selects.
        tau : float
            Frequency, above one half, from which a learner counts as selected.
        draws : int
            Pairs of halves.
        random_state : int
        progress : bool, optional
            Tell how far the computation has come (:func:`fedstat.progress`).

        Returns
        -------
        Series, float
            Frequencies by learner; and a bound on the expected number of learners that reach `tau` in error,
            of Shah and Samworth (2013), for frequencies of these that are unimodal.

        Raises
        ------
        NotAvailableError
            There are fewer than four folds.
        """
        self._need_exact()
        self._need_folds(4)
        check_whole("q", q, 1)
        if tau <= 0.5 or tau > 1.0:
            raise ModelError(f"tau: expected a share above one half, received {tau!r}")
        labels = [one.label for one in self._boosting.design.learners[1:]]
        random = np.random.default_rng(random_state)
        found = selection_frequencies(self._boosting, q, draws, self._record.steps, random)[1:]
        bound = false_selections(q, len(labels), tau, draws)
        return pd.Series(found, pd.Index(labels, name="learner"), name="frequency"), bound

    def entry_test(self, *, draws: int = 999, random_state: int = 0) -> pd.DataFrame:
        """Test for every learner that it has no effect by itself, adjusted for their number.

        The gain of its first step, standardised, against draws of scores without an effect; step-down, so
        that the chance of any false rejection is kept.

        Returns
        -------
        DataFrame
            ``gain`` and ``p_value`` by learner.
        """
        self._need_exact()
        z, p = entry_p_values(self._boosting, draws, np.random.default_rng(random_state))
        labels = [one.label for one in self._boosting.design.learners[1:]]
        return pd.DataFrame({"gain": z, "p_value": p}, index=pd.Index(labels, name="learner"))

    @property
    def _selected(self) -> list[int]:
        return sorted({*self._followed[1].selected.tolist()} - {0})

    def _need_exact(self) -> None:
        if self._boosting.aggregation != "exact":
            raise NotAvailableError(BASELINE.format(self._boosting.aggregation))
        if self._loss is not None:
            raise NotAvailableError(NO_SQUARES)

    def _need_folds(self, least: int = 2) -> int:
        F = self._boosting.moments.folds
        if least > F:
            raise NotAvailableError(f"it needs sums of {least} folds or more: fit(folds=10)")
        return F


# ----------------------------------------------------------------------------------------------------
# Results of functional boosting: surfaces, the path, predictions; all of it from the sums of one round.

NO_ERROR = (
    "a boosted surface is shrunken, and no interval around it covers as often as it says; refit() has "
    "surfaces with intervals, and tests"
)
NO_RSQUARED = "the loss is no square; the summary has the share of the loss that is explained"
NO_LIKELIHOOD = "boosting minimises squares, and stops before their minimum"
AVERAGED = {
    "lsa": "sites' fits, averaged by LSA",
    "average": "sites' fits, averaged by rows",
    "local": "one site's rows alone",
}
"""Baselines, for the summary."""


@dataclass(frozen=True, slots=True, eq=False)
class BoostRecord:
    """What a file of results holds: the sums over all sites, from which the rest follows."""

    basis: RowsBasis
    formula: BoostFormula
    boosting: ScoredBoosting | SiteBoosting | Boosting
    t: Annotated[Floats, "g"]
    curves: Mapping[str, Curve]
    grids: Mapping[str, Floats]
    steps: int
    select: str | None
    masked: bool


class BoostResults(
    BoostStatements,
    BoostPictures,
    CoefficientResults,
    saved_as="fedstat boost results 2",
    record=BoostRecord,
):
    """Results of :meth:`fedstat.FedFunctionBoost.fit`.

    Attributes
    ----------
    params : Series
        Coefficients of every learner's basis.
    mstop : int
        Steps of the path that were taken; by `select`, or all.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    >>> fs.FedFunctionBoost.from_formula("num ~ age + sex", partition).fit(steps=20).mstop
    20
    """

    model_name = "Federated functional boosting"

    _record: BoostRecord

    def __init__(self, record: BoostRecord, ledger: LedgerLike | None = None) -> None:
        super().__init__(record, ledger)
        self._all_folds = np.ones(record.boosting.moments.folds, dtype=bool)
        self.mstop = record.steps
        if record.select is not None:
            criterion = self._cv.mean(axis=0) if record.select == "cv" else self.aicc["aicc"].to_numpy()
            self.mstop = int(np.nanargmin(criterion)) + 1

    @classmethod
    def _of(
        cls, model: Any, boosting: Boosting, steps: int, select: str | None, masked: bool, ledger: Ledger
    ) -> BoostResults:
        """Make results of a fit."""
        held = {name: model.curves[name] for name in model.question.read_curves}
        record = BoostRecord(
            RowsBasis.of(model),
            model.boost,
            boosting,
            model._points,
            {name: curve.declared for name, curve in held.items()},
            {name: curve.shown for name, curve in held.items()},
            steps,
            select,
            masked,
        )
        return cls(record, ledger)

    # -- the path --------------------------------------------------------------------------------

    @cached_property
    def _cv(self) -> Floats:
        return self._boosting.cross_validate(self._record.steps)

    @property
    def offset(self) -> Floats:
        """Curve from which boosting starts, at each point of the response: (G,)."""
        return self._boosting.offset(self._boosting.moments.total)

    @property
    def coef(self) -> Floats:
        """Coefficients (K, L) of all learners' columns in the basis along the response."""
        return self._followed[1].coef

    @property
    def learners(self) -> pd.DataFrame:
        """Degrees of freedom, first step, and shares of steps and of what is explained, by learner."""
        ready, path = self._followed
        P, start = len(self._boosting.design.learners), self._boosting.start_risk()
        return pd.DataFrame(
            {
                "df": ready.df,
                "first_step": first_steps(path.selected, P),
                "steps": np.bincount(path.selected, minlength=P) / len(path.selected),
                "explained": explained(path.selected, path.risk, start, P),
            },
            index=pd.Index([one.label for one in self._boosting.design.learners], name="learner"),
        )

    @property
    def path(self) -> pd.DataFrame:
        """The learner of every step, and ``rsquared`` after it; index ``step``.

        Of a loss that is no square it is ``loss``, the mean over rows and points; what is told at exchanges
        is shared among the steps between.
        """
        path = self._followed[1]
        labels = [one.label for one in self._boosting.design.learners]
        fit = {"rsquared": 1.0 - path.risk / self._total_squares}
        if self._loss is not None:
            fit = {"loss": path.risk / self._boosting.moments.total.cells}
        return pd.DataFrame(
            {"learner": [labels[p] for p in path.selected], **fit},
            index=pd.RangeIndex(1, self.mstop + 1, name="step"),
        )

    @property
    def cv(self) -> pd.DataFrame:
        """Mean loss of the folds that were left out after every step, with its standard error.

        Raises
        ------
        NotAvailableError
            There are no folds.
        """
        F = self._need_folds()
        return pd.DataFrame(
            {"loss": self._cv.mean(axis=0), "se": self._cv.std(axis=0, ddof=1) / np.sqrt(F)},
            index=pd.RangeIndex(1, self._cv.shape[1] + 1, name="step"),
        ).dropna()

    @cached_property
    def aicc(self) -> pd.DataFrame:
        """Degrees of freedom ``df`` and corrected criterion of Akaike ``aicc`` after every step.

        The trace of the boosting operator, and mboost's criterion; points of a curve count as independent,
        and the offset has no degrees of freedom.
        """
        self._need_exact()
        sums = self._boosting.moments.total
        ready, path = self._boosting.over(self._all_folds, self._record.steps)
        df = path_df(ready, sums, path.selected, self._boosting.nu)
        aicc = corrected_aic(df, path.risk, sums.cells)
        index = pd.RangeIndex(1, len(df) + 1, name="step")
        return pd.DataFrame({"df": df, "aicc": aicc}, index=index)

    def steps(self, m: int) -> BoostResults:
        """Results of the same sums after another number of steps."""
        check_whole("m", m, 1)
        return type(self)(replace(self._record, steps=int(m), select=None), self._ledger)

    @property
    def _total_squares(self) -> float:
        total = self._boosting.moments.total
        return total.about(total.mean, self._boosting.basis).yy

    # -- surfaces and predictions ----------------------------------------------------------------

    def surface(self, learner: str) -> pd.DataFrame:
        """Effect of a learner.

        Parameters
        ----------
        learner : str
            Its label, such as ``"bsignal(rcst)"``, or what it is of.

        Returns
        -------
        DataFrame
            ``s`` (of a curve), ``x`` (of a smooth effect) or ``column`` (of a linear one), ``t`` where the
            response is a curve, and ``estimate``: of a curve the weight in its integral.
        """
        return effect_frame(self._record, self._place(learner), self._followed[1])

    def predict(
        self,
        new: pd.DataFrame,
        which: Literal["mean", "linear"] = "mean",
        interval: float | None = None,
    ) -> pd.DataFrame | pd.Series:
        """Predict the response of rows that you hold, with columns as the sites have them.

        Parameters
        ----------
        new : DataFrame
        which : {"mean", "linear"}
            Of a family the mean, or the predictor on the scale of its link; else both are the same.
        interval : float, optional
            Level of intervals, such as .95. A boosted fit has none: they are those of :meth:`refit` to the
            selected learners, conditional on the selection, whose prediction they surround.

        Returns
        -------
        DataFrame (m, G) with the points of the response as columns, or Series (m,) for a number; NaN where
        something is missing. With `interval` a DataFrame as of ``refit().get_prediction(new)``:
        ``mean``, its interval, and ``obs_ci_lower`` and ``obs_ci_upper`` of the response, by row and ``t``.
        """
        if interval is not None:
            if not 0.0 < interval < 1.0:
                raise ModelError(f"interval: expected a level between 0 and 1, received {interval!r}")
            return self.refit().get_prediction(new).summary_frame(alpha=1.0 - interval)
        check_choice("which", which, ("mean", "linear"))
        linear = predict_boosted(self._record, self._followed[1], self.offset, new)
        return linear if self._loss is None or which == "linear" else linear.map(self._loss.entry.mean)

    def score(self, new: pd.DataFrame) -> dict[str, float]:
        """R-squared about the mean of the fit, and mean absolute percentage error, of rows with responses.

        Of a loss that is no square: its mean ``loss``, and the share ``explained`` of that at the offset.
        """
        return scores(self._record, self._loss, self.offset, new, self.predict(new, "linear"))

    def _place(self, learner: str) -> int:
        place = self._boosting.design.place(learner)
        if place < 0:
            labels = ", ".join(repr(one.label) for one in self._boosting.design.learners)
            raise ModelError(f"learner: expected one of {labels}, received {learner!r}")
        return place

    # -- summary ---------------------------------------------------------------------------------

    def summary(self, alpha: float = 0.05) -> SheetSummary:
        """Print the fit: learners in the place of coefficients, which are many."""
        kinds = None if self._ledger is None else self._ledger.kinds_by_client()
        sheets = [
            header_sheet(f"{self.model_name} results", self._summary_left(), self._summary_right()),
            learner_sheet(self.learners),
            coefficient_block_sheet(self.estimate.blocks, kinds),
        ]
        return SheetSummary(sheets, self.notes, "")

    def _summary_left(self) -> list[tuple[str, str]]:
        none = {"Log-Likelihood", "AIC", "BIC", "Covariance Type", "Converged", "Df Model"}
        dropped = none | (set() if self._loss is None else {"R-squared"})
        rows = [row for row in super()._summary_left() if row[0] not in dropped]
        how_sites = AVERAGED.get(self._boosting.aggregation)
        moments = self._boosting.moments
        how = {"cv": f"cross-validation, {moments.folds} folds", "aicc": "AICc"}
        return [
            *rows,
            ("Steps", f"{self.mstop:,} of {self._record.steps:,}"),
            ("Steps by", how.get(str(self._record.select), "given")),
            ("Step length", f"{self._boosting.nu:g}"),
            *([("Response points", f"{moments.total.cells:,.0f}")] if moments.weighted else []),
            ("Penalty", self._boosting.design.penalty),
            *loss_rows(self._boosting, float(self._followed[1].risk[-1])),
            *([] if how_sites is None else [("Baseline", how_sites)]),
        ]

    def _summary_right(self) -> list[tuple[str, str]]:
        rows = super()._summary_right()
        masked = f"masked over {len(self.estimate.blocks)} sites" if self._record.masked else "in clear"
        return [*rows[:-1], ("Sums", masked), rows[-1]]

    def _summary_notes(self) -> Iterator[Note]:
        setting, moments = getattr(self._ledger, "setting", ""), self._boosting.moments
        along = coefficients_along(self._boosting.design.learners)
        told = (moments.weighted, self._boosting.n_scores, along)
        columns = traced_columns(moments.T.shape[1], moments.T.shape[2], *told)
        if setting:
            yield Note("setting", setting)
        yield Note("no_covariance", f"No standard errors, tests and intervals: {self._no_error}.")
        if self._record.select == "cv" and self.mstop == self._record.steps:
            yield Note(
                "more_steps", "The loss of left-out folds still falls at the last step: allow more steps."
            )
        if self._record.select == "aicc" and self._boosting.design.time is not None:
            yield Note(
                "correlated_errors",
                "AICc takes errors at the points of a curve as independent; where they are correlated it "
                'takes too many steps, and select="cv" does not.',
            )
        if self._record.masked:
            yield Note("masking", masking_sentence(len(self.estimate.blocks), moments.weighted))
        yield Note("tracing", f"Tracing: {tracing_sentence(columns, moments.total.n, moments.weighted)}.")
        if left_out := self._record.basis.left_out:
            yield Note("left_out", f"{left_out:,} rows that lack what the model reads were left out.")

    @property
    def _no_error(self) -> str:
        how = self._boosting.aggregation
        if self._loss is not None or varying_of(self._boosting.design.learners):
            return NO_ERROR.split(";", maxsplit=1)[0]  # there is no refit
        if how == "exact" and getattr(self._boosting.moments, "weighted", False):
            return UNEVEN
        return NO_ERROR if how == "exact" else BASELINE.format(how)

    @cached_property
    def estimate(self) -> Estimate:
        """Coefficients of the path."""
        record, design = self._record, self._boosting.design
        K, L = self.coef.shape
        names, terms = [], []
        for p, one in enumerate(design.learners):
            label, k = one.label, design.starts[p + 1] - design.starts[p]
            for i in range(k):
                names += [f"{label}[{i},{j}]" if design.time else f"{label}[{i}]" for j in range(L)]
            terms += [label] * (k * L)
        for one in varying_of(design.learners):
            names += [f"{one.label}[{i}]" for i in range(one.coefficients)]
            terms += [one.label] * one.coefficients
        params = np.concatenate([self.coef.ravel(), self._followed[1].varying])
        of = self._boosting.site
        rows = [row for row in record.basis.agreement.sites if of in ("", row.site)]
        return Estimate(
            params=params,
            cov=None,
            names=tuple(names),
            clients=("",) * len(params),
            terms=tuple(terms),
            response=record.formula.response + ("(t)" if record.formula.functional else ""),
            nobs=int(self._boosting.moments.total.n),
            df_model=float(len(params)),
            converged=True,
            rsquared=None if self._loss else 1.0 - float(self._followed[1].risk[-1]) / self._total_squares,
            privacy="none (no noise is added)",
            blocks=tuple(CoefficientBlock(row.site, K, row.n, 1.0 - row.n / row.n_rows) for row in rows),
            reasons={"rsquared": NO_RSQUARED, "cov_params": self._no_error, "llf": NO_LIKELIHOOD},
        )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: {self.estimate.response}, {self.mstop:,} steps, "
            f"{self.estimate.nobs:,} entities; see .summary()>"
        )


# ----------------------------------------------------------------------------------------------------
# Fits of every site by itself: a baseline.


class LocalBoosts(Mapping[str, BoostResults]):
    """Boosting of every site by itself, by its name: the baseline of those who share nothing.

    ``fit["North"]`` has all that :class:`BoostResults` have but statements beyond the path.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> model = fs.FedFunctionBoost.from_formula("num ~ age + sex", partition)
    >>> fits = model.fit(steps=20, aggregation="local")
    >>> fits.score(table).index.tolist(), len(fits.summary())
    (['Cleveland', 'Hungary', 'Long Beach', 'Switzerland'], 4)
    """

    def __init__(self, fits: Mapping[str, BoostResults]) -> None:
        self._fits = dict(fits)

    def __getitem__(self, site: str) -> BoostResults:
        return self._fits[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fits)

    def __len__(self) -> int:
        return len(self._fits)

    def score(self, new: pd.DataFrame) -> pd.DataFrame:
        """R-squared and mean absolute percentage error of the same rows by every site's fit."""
        return pd.DataFrame({site: one.score(new) for site, one in self.items()}).T.rename_axis("site")

    def summary(self) -> pd.DataFrame:
        """Rows, steps and R-squared of every site's fit, and how many learners it selected."""
        return pd.DataFrame(
            {
                site: {
                    "rows": one.nobs,
                    "steps": one.mstop,
                    "rsquared": one.rsquared,
                    "selected": int((one.learners["steps"] > 0.0).sum()),
                }
                for site, one in self.items()
            }
        ).T.rename_axis("site")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: a fit of each of {len(self)} sites; see .summary()>"
