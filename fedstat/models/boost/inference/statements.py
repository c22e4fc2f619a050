"""What can be said beyond the path, from the sums of one round."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from fedstat.errors import ModelError, NotAvailableError
from fedstat.models.boost.inference.frequencies import entry_p_values, false_selections, selection_frequencies
from fedstat.models.boost.inference.surface_fit import GIVEN, HALVES, SELECTED, SurfaceFit, fit_surfaces
from fedstat.models.boost.learning.boosting import Boosting, BoostPath
from fedstat.models.boost.learning.losses import LossSpec
from fedstat.models.boost.learning.ready import Ready
from fedstat.models.boost.learning.scored import NO_SQUARES, ScoredBoosting
from fedstat.models.boost.report.skfda_objects import as_functions
from fedstat.models.checks import check_whole
from fedstat.progress_line import tells_progress
from fedstat.typing import Bools, Floats

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
    def _followed(self) -> tuple[Ready, BoostPath]:
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

    @tells_progress
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
