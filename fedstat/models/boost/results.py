"""Results of functional boosting: surfaces, path, predictions, and fits of each site alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeGuard

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, NotAvailableError, Remedy
from fedstat.inference.estimate import Estimate, LedgerLike
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import CoefficientBlock, Report, site_rows_sheet
from fedstat.inference.tables import Sheet
from fedstat.models.boost.arguments import looks_like_person
from fedstat.models.boost.explain import masking_sentence, traced_columns, tracing_sentence
from fedstat.models.boost.learning import selection
from fedstat.models.boost.learning.boosting import (
    NO_SQUARES,
    UNEVEN,
    Boosting,
    BoostPath,
    ScoredBoosting,
    explained,
    first_steps,
)
from fedstat.models.boost.learning.losses import LossSpec
from fedstat.models.boost.learning.prepared_learners import PreparedLearners
from fedstat.models.boost.learning.varying import coefficients_along, varying_of
from fedstat.models.boost.private.protocol import NoisyBoosting, run_noisy_path
from fedstat.models.boost.report import plots
from fedstat.models.boost.report.effects import as_functions, effect_frame, learner_sheet, loss_rows
from fedstat.models.boost.report.prediction import compared, predict_boosted, scores
from fedstat.models.boost.report.record import BlocksBasis, BoostRecord, PublicBasis, repeated_rows
from fedstat.models.boost.report.refit import (
    GIVEN,
    HALVES,
    SELECTED,
    BoostPrediction,
    SurfaceFit,
    fit_surfaces,
)
from fedstat.models.checks import HeldRows, check_choice, check_integer
from fedstat.models.horizontal.results import RowsBasis
from fedstat.models.results import CoefficientResults
from fedstat.privacy.zcdp import rho_of_budget
from fedstat.progress_line import shows_progress
from fedstat.typing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# ----------------------------------------------------------------------------------------------------
# Reasons why a fit lacks some statistics, and words of the summary.

BASELINE = (
    "aggregation='{}' is a baseline without inference; aggregation='exact' has refits with intervals, tests "
    "and selection frequencies"
)
NO_ERROR = (
    "boosting shrinks its surfaces, so that intervals around them do not reach their nominal coverage; "
    "refit() has surfaces with intervals, and tests"
)
BORDER = (
    "The last of {steps:,} steps has the smallest criterion (select={select!r}), which still decreases: the "
    "fit is shrunken too much. Allow more steps by fit(steps=...)"
)
NO_RSQUARED = "the loss is not squared; the summary has the explained share of the loss"
NO_LIKELIHOOD = "boosting minimizes squares, and stops before their minimum"
AVERAGED = {
    "lsa": "sites' fits, averaged by LSA",
    "average": "sites' fits, averaged by rows",
    "local": "one site's rows alone",
}
"""Baselines, for the summary."""


NO_NOISY_ERROR = (
    "intervals would have to include the noise of the release and the shrinkage of boosting; neither is "
    "available"
)
NO_NOISY_LIKELIHOOD = "only sums with noise were released, not a likelihood"
NO_STEP = (
    "NOISE IS TOO LARGE: no learner gains more than noise alone gains in one of twenty releases. No step "
    "was taken, and predictions are the public mean. Use a larger epsilon, more entities, or fewer "
    "functions of each curve"
)
PUBLIC = (
    "Means, functions and deviations of curves, bounds and levels of columns (to which rows are cut), "
    "numbers of entities, and which site has a record of which entity are public and never taken from the "
    "data. Noise is discrete Gaussian from the operating system's randomness. Each site adds its noise "
    "before it releases anything; no participant, including the dealer, holds a sum without noise."
)
EPSILONS = (0.5, 1.0, 3.0, 10.0)
DRAWS = 10
Picture: TypeAlias = Literal["surface", "effects", "path", "cv", "importance", "fitted"]
PICTURES = ("surface", "effects", "path", "cv", "importance", "fitted")
NOTES = Catalogue(
    warning={
        "no_step": f"{NO_STEP}.",
        "more_steps": f"{BORDER}.",
        "repeated_rows": "{problem}",
    },
    info={
        "no_covariance": "No standard errors, tests and intervals: {reason}.",
        "correlated_errors": "AICc treats errors at the points of a curve as independent. If they are "
        'correlated it takes too many steps; select="cv" does not.',
        "tracing": "Membership inference: {tracing}.",
        "left_out": "{entities:,} {who} left out.",
        "rsquared_by_epsilon": "R-squared by epsilon, simulated as if this fit were the truth ({draws} "
        "draws each; inf is without noise): {table}. The value above comes from the noisy sums.",
        "baseline": "Each fit uses the rows of its site only; R-squared is that of these rows.",
        "public": PUBLIC,
    },
    protocol={
        "setting": "{setting}",
        "masking": "{masked}",
    },
)


# ----------------------------------------------------------------------------------------------------
# Surfaces, the path, predictions, refits: all from the sums of one exchange.


def _of_rows(basis: BlocksBasis | PublicBasis | RowsBasis) -> TypeGuard[RowsBasis]:
    """Return whether sites hold different rows."""
    return isinstance(basis, RowsBasis) and not isinstance(basis, BlocksBasis)


class BoostResults(CoefficientResults, saved_as="fedstat boost results 4", record=BoostRecord):
    """Results of :meth:`fedstat.FedFunctionBoost.fit`.

    Attributes
    ----------
    params : Series
        Coefficients of every learner's basis; for a private fit, of scores on scores of the response.
    mstop : int
        Number of steps taken; chosen by `select`, or all. A private fit stops before the first step that
        gains less than 1.5 times the expected gain from noise; none is taken if noise is large.
    epsilon, delta : float or None
        Values of a private fit; steps, their number and refits cost nothing more.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> model = fs.FedFunctionBoost.from_formula("num ~ age + sex", partition)
    >>> fit = model.fit(steps=20, select="cv", folds=6)
    >>> fit.coef.shape, fit.offset.shape, round(fit.rsquared, 1), len(fit.effects) == len(fit.importance)
    ((5, 1), (1,), 0.1, False)
    >>> len(fit.learners), len(fit.path) <= 20, len(fit.cv) > 0, len(fit.aicc) > 0
    (3, True, True, True)
    >>> fit.predict(table.head(2)).shape, sorted(fit.score(table)), fit.steps(5).mstop
    ((2,), ['mape', 'rmse', 'rsquared'], 5)
    >>> fit.get_prediction(table.head(2)).summary_frame().shape
    (2, 6)
    >>> len(fit.surface(fit.importance.index[0])) > 0, bool(fit.plot("importance").has_data())
    (True, True)
    >>> type(fit.refit()).__name__, len(fit.entry_test(draws=19)), type(fit.split()).__name__
    ('SurfaceFit', 2, 'SurfaceFit')
    >>> shares, falsely = fit.stability(1, draws=4)
    >>> len(shares), falsely > 0.0
    (2, True)
    >>> try:
    ...     objects = fit.to_skfda()
    ... except (ImportError, fs.errors.FedstatError):  # of curves, with fedstat[skfda]
    ...     objects = {}

    A private fit over sites that hold different columns:

    >>> table = table[["age", "sex", "chol"]].dropna()
    >>> held = {"Registry": ["age", "sex"], "Laboratory": ["chol"]}
    >>> budget = fs.Policy(privacy=fs.Budget(epsilon=50.0, delta=1e-6))
    >>> partition = fs.ClientPartition.from_frame(table, columns=held, policy=budget)
    >>> public = {"age": (20, 80), "sex": [0, 1], "chol": (80, 600)}
    >>> model = fs.FedFunctionBoost.from_formula("chol ~ age + sex", partition, epsilon=30.0, public=public)
    >>> fit = model.fit(steps=20)
    >>> fit.epsilon, fit.delta, len(fit.learners), len(fit.by_epsilon) > 0, fit.mstop <= 20
    (30.0, 1e-06, 3, True, True)
    """

    model_name = "Federated functional boosting"

    _record: BoostRecord

    def __init__(self, record: BoostRecord, ledger: LedgerLike | None = None) -> None:
        super().__init__(record, ledger)
        self.model_name = record.basis.model_name
        self._noisy = record.boosting if isinstance(record.boosting, NoisyBoosting) else None
        public = record.basis if isinstance(record.basis, PublicBasis) else None
        self.epsilon = None if public is None else public.epsilon
        self.delta = None if public is None else public.delta
        self._all_folds = np.ones(record.boosting.moments.folds, dtype=bool)
        self.mstop = record.steps
        if record.select is not None:
            criterion = self._cv.mean(axis=0) if record.select == "cv" else self.aicc["aicc"].to_numpy()
            self.mstop = int(np.nanargmin(criterion)) + 1
        # Compute the path at once: it may raise an error, and noise may end it earlier.
        self.mstop = len(self._followed[1].selected)

    @classmethod
    def _of(
        cls,
        source: Any,
        basis: BlocksBasis | PublicBasis | RowsBasis,
        boosting: Boosting,
        steps: int,
        select: str | None = None,
        *,
        masked: bool = False,
        together: str = "",
        ledger: LedgerLike,
    ) -> Self:
        """Make results of a fit; `source` is the source of moments."""
        held = {name: source.curves[name] for name in source.read_curves}
        declared = {name: curve.declared for name, curve in held.items()}
        grids = {name: curve.shown for name, curve in held.items()}
        t = source._points
        # Sites with different columns have one row for each entity.
        horizontal = _of_rows(basis)
        person = looks_like_person(source.partition.pooled_columns) if horizontal else ""
        own, doubled = source.given_and_doubled(boosting)
        record = BoostRecord(
            basis, source.boost, own, t, declared, grids, steps, select, masked, together, person, doubled
        )
        result = cls(record, ledger)
        # A constant response must raise an error in the fit, not at the first use of its results.
        _ = result._followed
        return result

    @property
    def _unit(self) -> str:  # type: ignore[override]
        return "rows" if _of_rows(self._record.basis) else "entities"

    def _site_sheet(self) -> Sheet:
        basis = self._record.basis
        if not _of_rows(basis):
            return super()._site_sheet()
        rows = [(block.site, block.entities, block.missing) for block in self.estimate.blocks]
        return site_rows_sheet(rows, subset=bool(basis.agreement.question.subset))

    @property
    def _boosting(self) -> Boosting:
        boosting: Boosting = self._record.boosting
        return boosting

    @property
    def _loss(self) -> LossSpec | None:
        """Loss other than squares."""
        return self._boosting.loss if isinstance(self._boosting, ScoredBoosting) else None

    @cached_property
    def _followed(self) -> tuple[PreparedLearners, BoostPath]:
        return self._boosting.over(self._all_folds, self.mstop)

    @property
    def _at_border(self) -> bool:
        """Whether the smallest criterion is that of the last step."""
        return self._record.select is not None and self.mstop == self._record.steps

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
        """Degrees of freedom, first step, shares of steps and of the explained variation, by learner."""
        ready, path = self._followed
        P, start = len(self._boosting.design.learners), self._boosting.start_risk()
        return pd.DataFrame(
            {
                "df": ready.df,
                "first_step": first_steps(path.selected, P),
                "steps": np.bincount(path.selected, minlength=P) / max(len(path.selected), 1),
                "explained": explained(path.selected, path.risk, start, P),
            },
            index=pd.Index([one.label for one in self._boosting.design.learners], name="learner"),
        )

    @property
    def path(self) -> pd.DataFrame:
        """The learner of every step, and ``rsquared`` after it; index ``step``.

        For a loss other than squares it is ``loss``, the mean over rows and points; steps between two
        exchanges share the values of the exchanges.
        """
        path = self._followed[1]
        labels = [one.label for one in self._boosting.design.learners]
        fit = {"rsquared": 1.0 - path.risk / self._boosting.total_squares}
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

        The trace of the boosting operator, and mboost's criterion. Points of a curve count as independent,
        and the offset has no degrees of freedom.
        """
        self._need_exact()
        sums = self._boosting.moments.total
        ready, path = self._boosting.over(self._all_folds, self._record.steps)
        df = selection.path_df(ready, sums, path.selected, self._boosting.nu)
        aicc = selection.corrected_aic(df, path.risk, sums.cells)
        index = pd.RangeIndex(1, len(df) + 1, name="step")
        return pd.DataFrame({"df": df, "aicc": aicc}, index=index)

    def steps(self, m: int) -> BoostResults:
        """Return results of the same sums after another number of steps."""
        check_integer("m", m, 1)
        return type(self)(replace(self._record, steps=int(m), select=None), self._ledger)

    # -- surfaces and predictions ----------------------------------------------------------------

    def surface(self, learner: str) -> pd.DataFrame:
        """Effect of a learner.

        Parameters
        ----------
        learner : str
            Its label, such as ``"bsignal(rcst)"``, or the name of its column.

        Returns
        -------
        DataFrame
            ``s`` (for a curve), ``x`` (for a smooth effect) or ``column`` (for a linear one), ``t`` if the
            response is a curve, and ``estimate``: for a curve the weight in its integral.
        """
        return effect_frame(self._record, self._place(learner), self._followed[1])

    def predict(self, exog: HeldRows, which: Literal["mean", "linear"] = "mean") -> pd.DataFrame | pd.Series:
        """Predict the response of the analyst's own rows, with the columns of the sites.

        Parameters
        ----------
        exog : table of pandas, polars or pyarrow, or dict of columns
        which : {"mean", "linear"}
            The mean, or for a family the predictor on the scale of its link; without a family both are the
            same.

        Returns
        -------
        DataFrame (m, G) with the points of the response as columns, or Series (m,) for a number; NaN if a
        value is missing.
        """
        check_choice("which", which, ("mean", "linear"))
        linear = predict_boosted(self._record, self._followed[1], self.offset, exog)
        return linear if self._loss is None or which == "linear" else linear.map(self._loss.entry.mean)

    def get_prediction(self, exog: HeldRows) -> BoostPrediction:
        """Predict with standard errors and intervals, which a boosted fit has not: those of its refit.

        They are the prediction of :meth:`refit` for the selected learners, conditional on the selection.

        Parameters
        ----------
        exog : table of pandas, polars or pyarrow, or dict of columns

        Returns
        -------
        BoostPrediction
            Its ``summary_frame(alpha=0.05)`` has the mean and a response that was not observed, by row and
            ``t`` of a curve.
        """
        return self.refit().get_prediction(exog)

    def score(self, new: pd.DataFrame) -> dict[str, float]:
        """Compare predictions with responses, for your own rows: ``rsquared``, ``rmse`` and ``mape``.

        R-squared is about the offset of the fit, the root of the mean squared error is in units of the
        response, and the mean absolute percentage error is infinite if a response is 0.

        For a loss other than squares: its mean ``loss``, and the share ``explained`` of the loss at the
        offset.
        """
        return scores(self._record, self._loss, self.offset, new, self.predict(new, "linear"))

    def _place(self, learner: str) -> int:
        place = self._boosting.design.place(learner)
        if place < 0:
            labels = ", ".join(repr(one.label) for one in self._boosting.design.learners)
            raise ModelError(f"learner: expected one of {labels}, received {learner!r}")
        return place

    @cached_property
    def by_epsilon(self) -> pd.Series:
        """R-squared of fits of noisy sums by epsilon if this fit were the truth: simulated, at no cost.

        The last row, ``inf``, has no noise: the best value of any fit.
        """
        if self._noisy is None or self.epsilon is None or self.delta is None:
            raise NotAvailableError(
                "by_epsilon: the sums of this fit have no noise, as those under a privacy budget have"
            )
        sums, random, nu = self._noisy.sums, np.random.default_rng(1), self._noisy.nu
        here = float(rho_of_budget(self.epsilon, self.delta))
        found = {}
        for epsilon in sorted({*EPSILONS, self.epsilon}):
            times = float(np.sqrt(here / float(rho_of_budget(epsilon, self.delta))))
            each = []
            for _ in range(DRAWS):
                truth, noisy = sums.drawn(self.coef, times, random)
                each.append(truth.rsquared(run_noisy_path(noisy, self._record.steps, nu).coef))
            found[epsilon] = float(np.mean(each))
        truth, _ = sums.drawn(self.coef, 0.0, random)
        found[np.inf] = truth.rsquared(self.coef)
        return pd.Series(found, name="rsquared").rename_axis("epsilon")

    # -- refits, selection, tests ----------------------------------------------------------------

    def to_skfda(self) -> dict[str, Any]:
        """Effects as objects of scikit-fda, for its plots and methods.

        Returns
        -------
        dict of str to skfda.FDataGrid
            The ``"offset"`` and each learner's effect by its label: a function of (s, t) or (x, t); of t
            alone with one sample for each column of a linear effect; or of s if the response is a number.
            Linear effects are then left out.

        Raises
        ------
        ImportError
            scikit-fda is not installed.
        """
        return as_functions(self._record, self._followed[1], self.offset)

    def refit(
        self, learners: Sequence[str] | None = None, *, doubled: bool = False, seed: int = 0
    ) -> SurfaceFit:
        """Fit learners again without the shrinkage of boosting: surfaces with intervals, and tests.

        Generalized least squares with errors correlated along the response; it sends no further request to
        the sites.

        Parameters
        ----------
        learners : sequence of str, optional
            By default the selected ones: intervals and tests are then conditional on the selection.
        doubled : bool
            Use twice as many knots. Their sums are there if the model has ``check_knots=True``.
        seed : int
            Seed of the draws behind simultaneous bands.

        Raises
        ------
        ModelError
            There is no such learner.
        EstimationError
            Too few rows for the learners, or they are collinear.
        NotAvailableError
            There are no sums for doubled knots.
        """
        self._need_exact()
        record = self._record
        if doubled:
            if record.doubled is None:
                raise NotAvailableError(
                    "there are no sums for doubled knots",
                    remedy=Remedy(
                        "from_formula(..., check_knots=True).fit(...)",
                        "make the model by from_formula(..., {arguments})",
                    ),
                )
            record = replace(record, boosting=record.doubled.boosting(self._boosting), doubled=None)
        chosen = self._selected if learners is None else [self._place(name) for name in learners]
        how = SELECTED if learners is None else GIVEN
        return fit_surfaces(record, self._all_folds, chosen, how, seed, doubled=doubled, sources=(self,))

    def split(self, *, seed: int = 0) -> SurfaceFit:
        """Select learners by one half of the folds, after as many steps, and fit them to the other half.

        Intervals and tests are then not conditional on the selection.

        Raises
        ------
        NotAvailableError
            There are fewer than two folds.
        """
        self._need_exact()
        F = self._need_folds()
        half = np.zeros(F, dtype=bool)
        half[np.random.default_rng(seed).permutation(F)[: F // 2]] = True
        path = self._boosting.over(half, self.mstop)[1]
        chosen = sorted({*path.selected.tolist()} - {0})
        return fit_surfaces(self._record, ~half, chosen, HALVES, seed, sources=(self,))

    @shows_progress
    def stability(
        self,
        q: int | None = None,
        *,
        tau: float = 0.75,
        draws: int = 50,
        seed: int = 0,
        progress: bool | None = None,
    ) -> tuple[pd.Series, float]:
        """Return how often halves of the folds select each learner among the first q of their path.

        Parameters
        ----------
        q : int
            Number of learners that a half selects; it must be given.
        tau : float
            Frequency, above one half, from which a learner counts as selected.
        draws : int
            Pairs of halves.
        seed : int
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        Series, float
            Frequencies by learner; and a bound by Shah and Samworth (2013) on the expected number of learners
            that reach `tau` falsely, for unimodal frequencies of these.

        Raises
        ------
        ModelError
            `q` is missing or invalid, or `tau` is not above one half.
        NotAvailableError
            There are fewer than four folds.
        """
        self._need_exact()
        self._need_folds(4)
        P = len(self._boosting.design.learners) - 1
        if q is None:
            raise ModelError(
                f"q: the number of learners that each half selects is between 1 and {P}, and the bound on "
                "false selections grows with its square",
                remedy=Remedy("stability(..., q=1)", "give it, as in {call}"),
            )
        check_integer("q", q, 1)
        if tau <= 0.5 or tau > 1.0:
            raise ModelError(f"tau: expected a share above one half, received {tau!r}")
        labels = [one.label for one in self._boosting.design.learners[1:]]
        random = np.random.default_rng(seed)
        found = selection.selection_frequencies(self._boosting, q, draws, self._record.steps, random)[1:]
        bound = selection.false_selections(q, len(labels), tau, draws)
        return pd.Series(found, pd.Index(labels, name="learner"), name="frequency"), bound

    def entry_test(self, *, draws: int = 999, seed: int = 0) -> pd.DataFrame:
        """Test for every learner whether it has an effect by itself, adjusted for the number of learners.

        The standardized gain of its first step is compared with draws of scores without an effect. The
        step-down procedure controls the probability of any false rejection.

        Returns
        -------
        DataFrame
            ``gain`` and ``p_value`` by learner.
        """
        self._need_exact()
        z, p = selection.entry_p_values(self._boosting, draws, np.random.default_rng(seed))
        labels = [one.label for one in self._boosting.design.learners[1:]]
        return pd.DataFrame({"gain": z, "p_value": p}, index=pd.Index(labels, name="learner"))

    @property
    def _selected(self) -> list[int]:
        return sorted({*self._followed[1].selected.tolist()} - {0})

    def _need_exact(self) -> None:
        if self._noisy is not None:
            raise NotAvailableError(NO_NOISY_ERROR)
        if self._boosting.aggregation != "exact":
            raise NotAvailableError(BASELINE.format(self._boosting.aggregation))
        if self._loss is not None:
            raise NotAvailableError(NO_SQUARES)

    def _need_folds(self, least: int = 2) -> int:
        F = self._boosting.moments.folds
        if self._noisy is not None:
            raise NotAvailableError(NO_NOISY_ERROR)
        if least > F:
            raise NotAvailableError(
                f"it needs sums of at least {least} folds",
                remedy=Remedy("fit(..., folds=10)", ": fit({arguments})"),
            )
        return F

    # -- plots -----------------------------------------------------------------------------------

    @property
    def importance(self) -> pd.Series:
        """Share of each learner in the explained variation, the largest first."""
        return self.learners["explained"].sort_values(ascending=False).rename("importance")

    @property
    def effects(self) -> Mapping[str, pd.DataFrame]:
        """Effects of all chosen learners, by label, as :meth:`surface`; the largest first."""
        taken = self.learners["first_step"] > 0
        return {str(label): self.surface(str(label)) for label in self.importance.index if taken[label]}

    def plot(
        self,
        what: Picture = "surface",
        learner: str | None = None,
        ax: Axes | None = None,
        new: pd.DataFrame | None = None,
    ) -> Any:
        """Draw a plot.

        Parameters
        ----------
        what : {"surface", "effects", "path", "cv", "importance", "fitted"}
            The effect of a learner; those of all chosen learners; R-squared or loss along the path; the loss
            of left-out folds; shares of the explained variation; responses of `new` rows compared with their
            fits.
        learner : str, optional
            For "surface"; by default the one with the largest share.
        ax : matplotlib Axes, optional
            Not for "effects", which needs a figure.
        new : DataFrame
            For "fitted": the analyst's rows with responses; for curves the first six are drawn.

        Returns
        -------
        matplotlib Axes; for "effects" an array of them.
        """
        check_choice("what", what, PICTURES)
        if what == "path":
            return plots.draw_path(self.path, ax)
        if what == "cv":
            return plots.draw_cv(self.cv, self.mstop, ax)
        if what == "importance":
            return plots.draw_importance(self.learners, ax)
        if what == "fitted":
            return self._draw_fitted(new, ax)
        response = self.estimate.response
        if what == "effects":
            if ax is not None:
                raise ModelError("ax: the effects of all learners need their own figure")
            return plots.draw_effects(self.effects, response)
        best = str(self.importance.drop("1").index[0]) if learner is None else learner
        return plots.draw_surface(self.surface(best), best, response, ax)

    def _draw_fitted(self, new: pd.DataFrame | None, ax: Axes | None) -> Axes:
        if new is None:
            raise ModelError(
                "new: a comparison of responses with fits needs your own rows",
                remedy=Remedy("plot(..., new=rows)", "give them, as in {call}"),
            )
        held = self._record
        functional = held.formula.functional
        rows = new.iloc[:6] if functional else new
        y, found, _ = compared(held, self.offset, rows, self.predict(rows))
        if not functional:
            return plots.draw_scatter(found.ravel(), y.ravel(), self.estimate.response, ax)
        if y.ndim == 1:
            raise ModelError(
                "new: curves are compared with fits at the same points, but these rows have different points"
            )
        names = [str(name) for name in rows.index]
        return plots.draw_curves(np.asarray(held.t), y, found, names, self.estimate.response, ax)

    # -- summary ---------------------------------------------------------------------------------

    def _coefficient_sheet(self, alpha: float) -> Sheet:
        return learner_sheet(self.learners)  # instead of coefficients, which are many

    def _summary_left(self) -> list[tuple[str, str]]:
        none = {"Log-Likelihood", "AIC", "BIC", "Covariance Type", "Converged", "Df Model"}
        dropped = none | (set() if self._loss is None else {"R-squared"})
        rows = [row for row in super()._summary_left() if row[0] not in dropped]
        taken = ("Steps", f"{self.mstop:,} of {self._record.steps:,}")
        length = ("Step length", f"{self._boosting.nu:g}")
        if self._noisy is not None:
            return [
                *rows,
                taken,
                ("Stopped by", "noise" if self.mstop < self._record.steps else "given"),
                length,
            ]
        how_sites = AVERAGED.get(self._boosting.aggregation)
        moments = self._boosting.moments
        of_groups = f" of '{self._record.together}'" * bool(self._record.together)
        how = {"cv": f"cross-validation, {moments.folds} folds{of_groups}", "aicc": "AICc"}
        return [
            *rows,
            taken,
            ("Steps by", how.get(str(self._record.select), "given")),
            length,
            *([("Response points", f"{moments.total.cells:,.0f}")] if moments.weighted else []),
            ("Penalty", self._boosting.design.penalty),
            *loss_rows(self._boosting, float(self._followed[1].risk[-1])),
            *([] if how_sites is None else [("Baseline", how_sites)]),
        ]

    def _summary_right(self) -> list[tuple[str, str]]:
        rows = super()._summary_right()
        if self._noisy is not None:
            return rows
        masked = f"masked over {len(self.estimate.blocks)} sites" if self._record.masked else "unmasked"
        if isinstance(self._record.basis, BlocksBasis):
            masked = "in shares"
        return [*rows[:-1], ("Sums", masked), rows[-1]]

    def _summary_notes(self) -> Iterator[Note]:
        setting, moments = getattr(self._ledger, "setting", ""), self._boosting.moments
        along = coefficients_along(self._boosting.design.learners)
        reported = (moments.weighted, self._boosting.n_scores, along)
        summed = moments if self._record.doubled is None else self._record.doubled
        columns = traced_columns(summed.T.shape[1], summed.T.shape[2], *reported)
        if setting:
            yield NOTES.note("setting", setting=setting)
        basis = self._record.basis
        if isinstance(basis, PublicBasis):
            yield from self._noisy_notes(basis)
            return
        yield NOTES.note("no_covariance", reason=self._no_error)
        if self._at_border:
            yield NOTES.note("more_steps", steps=self.mstop, select=self._record.select)
        if moments.folds > 1 and (repeated := repeated_rows(self._record)):
            yield NOTES.note("repeated_rows", problem=repeated)
        if self._record.select == "aicc" and self._boosting.design.time is not None:
            yield NOTES.note("correlated_errors")
        if self._record.masked:
            yield NOTES.note("masking", masked=masking_sentence(len(self.estimate.blocks), moments.weighted))
        yield NOTES.note("tracing", tracing=tracing_sentence(columns, moments.total.n, moments.weighted))
        if left_out := basis.left_out:
            who = "rows with missing values of the model were"
            if isinstance(basis, BlocksBasis):
                who = "entities without a response, or missing at a site, were"
            yield NOTES.note("left_out", entities=left_out, who=who)
        if isinstance(basis, BlocksBasis):
            yield from basis.notes

    def _noisy_notes(self, basis: PublicBasis) -> Iterator[Note]:
        if not self.mstop:
            yield NOTES.note("no_step")
        yield NOTES.note("no_covariance", reason=NO_NOISY_ERROR)
        yield from basis.notes
        if self.mstop:
            table = ", ".join(f"{value:.2f} at {epsilon:g}" for epsilon, value in self.by_epsilon.items())
            yield NOTES.note("rsquared_by_epsilon", draws=DRAWS, table=table)
        yield NOTES.note("public")

    @property
    def _no_error(self) -> str:
        how = self._boosting.aggregation
        if self._noisy is not None:
            return NO_NOISY_ERROR
        if self._loss is not None or varying_of(self._boosting.design.learners):
            return NO_ERROR.split(";", maxsplit=1)[0]  # there is no refit
        if how == "exact" and getattr(self._boosting.moments, "weighted", False):
            return UNEVEN
        return NO_ERROR if how == "exact" else BASELINE.format(how)

    @cached_property
    def estimate(self) -> Estimate:
        """Coefficients of the path."""
        record, design = self._record, self._boosting.design
        L = self.coef.shape[1]
        names, terms = [], []
        noisy = self._noisy
        by_column = design.time is not None or noisy is not None
        for p, one in enumerate(design.learners):
            label, k = one.label, design.starts[p + 1] - design.starts[p]
            for i in range(k):
                names += [f"{label}[{i},{j}]" if by_column else f"{label}[{i}]" for j in range(L)]
            terms += [label] * (k * L)
        for one in varying_of(design.learners):
            names += [f"{one.label}[{i}]" for i in range(one.coefficients)]
            terms += [one.label] * one.coefficients
        params = np.concatenate([self.coef.ravel(), self._followed[1].varying])
        rsquared = (
            None
            if self._loss or noisy
            else 1.0 - float(self._followed[1].risk[-1]) / self._boosting.total_squares
        )
        privacy, no_likelihood = "none (no noise is added)", NO_LIKELIHOOD
        if noisy is not None:
            rsquared, no_likelihood = noisy.sums.rsquared(self.coef), NO_NOISY_LIKELIHOOD
            privacy = f"epsilon {self.epsilon:g}, delta {self.delta:g}"
        return Estimate(
            params=params,
            cov=None,
            names=tuple(names),
            sites=("",) * len(params),
            terms=tuple(terms),
            response=record.formula.response + ("(t)" if record.formula.functional else ""),
            nobs=int(self._boosting.moments.total.n),
            df_model=float(len(params)),
            converged=True,
            rsquared=rsquared,
            privacy=privacy,
            blocks=self._blocks,
            reasons={"rsquared": NO_RSQUARED, "cov_params": self._no_error, "llf": no_likelihood},
        )

    @property
    def _blocks(self) -> tuple[CoefficientBlock, ...]:
        basis, of = self._record.basis, self._boosting.site
        if not isinstance(basis, RowsBasis) or isinstance(basis, BlocksBasis):
            return basis.blocks
        rows = [row for row in basis.agreement.sites if of in ("", row.site)]
        K = len(self.coef)
        return tuple(CoefficientBlock(row.site, K, row.n, 1.0 - row.n / row.n_rows) for row in rows)

    def __repr__(self) -> str:
        privacy = "" if self.epsilon is None else f"epsilon {self.epsilon:g}, "
        return (
            f"<{type(self).__name__}: {self.estimate.response}, {privacy}{self.mstop:,} steps, "
            f"{self.estimate.nobs:,} entities; see .summary()>"
        )


# ----------------------------------------------------------------------------------------------------
# Fits of every site by itself: a baseline.


class LocalBoosts(Report, Mapping[str, BoostResults]):
    """Boosting of every site by itself, by its name: the baseline without any sharing.

    ``fit["North"]`` has all methods of :class:`BoostResults` that use the path only.

    Examples
    --------
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()
    >>> partition = fs.ClientPartition.from_frame(table, by="hospital")
    >>> model = fs.FedFunctionBoost.from_formula("num ~ age + sex", partition)
    >>> fits = model.fit(steps=20, aggregation="local")
    >>> fits.score(table).index.tolist(), len(fits.tidy())
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
        """Return ``rsquared``, ``rmse`` and ``mape`` of the same rows by every site's fit."""
        return pd.DataFrame({site: one.score(new) for site, one in self.items()}).T.rename_axis("site")

    def tidy(self) -> pd.DataFrame:
        """Return one row per site.

        Returns
        -------
        DataFrame
            ``site``, ``nobs``, ``steps``, ``r_squared``, and ``selected``, the number of selected learners.
        """
        rows = [
            (site, one.nobs, one.mstop, one.rsquared, int((one.learners["steps"] > 0.0).sum()))
            for site, one in self.items()
        ]
        return pd.DataFrame(rows, columns=["site", "nobs", "steps", "r_squared", "selected"])

    def _glance(self) -> dict[str, int]:
        return {"nobs": sum(one.nobs for one in self.values()), "n_sites": len(self)}

    def _sheets(self) -> Iterator[Sheet]:
        rows = tuple(
            (site, f"{nobs:,}", f"{steps:,}", f"{rsquared:.4f}", str(selected))
            for site, nobs, steps, rsquared, selected in self.tidy().itertuples(index=False)
        )
        headers = ("site", "rows", "steps", "R-squared", "selected learners")
        yield Sheet(headers, rows, "lrrrr", (24, 10, 8, 10, 18), "Boosting at each site alone", gap=2)

    def _summary_notes(self) -> Iterator[Note]:
        yield NOTES.note("baseline")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: a fit of each of {len(self)} sites; see .summary()>"
