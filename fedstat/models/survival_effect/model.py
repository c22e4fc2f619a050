"""The effect of a treatment on times: arguments of the analyst, and the fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np

from fedstat.docstrings import inherits_params, inherits_signature
from fedstat.errors import ConvergenceWarning, FormulaError, ModelError, Remedy, warn
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.dry_run.execution import DryRunRecord, DrySite
from fedstat.federation.dry_run.expected_releases import ExpectedReleases, IterationLoop
from fedstat.federation.partition.partition import ClientPartition
from fedstat.models.checks import (
    check_choice,
    check_integer,
    check_masked,
    check_positive,
    checks_arguments,
    takes_parsed,
)
from fedstat.models.descriptive.protocol import MERGED, interval_search
from fedstat.models.descriptive.synthetic import with_synthetic_cells
from fedstat.models.explain import DryRunPlan
from fedstat.models.horizontal.blocks import grid_points, listed_times
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.models.survival_effect.protocol import Grid, SurvivalNewton
from fedstat.models.survival_effect.results import SurvivalEffectResults
from fedstat.models.survival_effect.steps import MOST_TIMES, SurvivalEffectRequest
from fedstat.models.treatment.model import TreatmentEffect, TreatmentPlan, clusters_of_fit
from fedstat.models.treatment.steps import FAMILY
from fedstat.typing import Floats

USUAL_TIMES = 4
"""Times of a curve with errors unless the analyst names others."""


class SurvivalEffectPlan(TreatmentPlan):
    """Facts about the effect of a treatment on times before it is estimated."""

    guessed: ClassVar[frozenset[str]] = frozenset({"flag_times", "count_times", "sum_cells"})

    def loops(self, dry_run: DryRunRecord) -> Sequence[IterationLoop]:
        """Name the evaluations of both models, and the search for intervals."""
        most = int(self.given["maxiter"])
        loops = [IterationLoop(("sum_scores",), most), IterationLoop(("sum_hazards",), most)]
        if self.given["grid"] is not None:
            loops.append(interval_search(len(grid_points(self.given["grid"], self.given["until"]))))
        return loops

    def learned(self, expected: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """State what the cells disclose."""
        yield from super().learned(expected)
        if self.given["grid"] is not None:
            yield (
                "Coordinator",
                "learns numbers of rows, and sums of their weights, by arm, interval of time and event.",
            )

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """State what is unknown."""
        yield from super().notes(expected)
        if self.given["grid"] is not None:
            yield MERGED.format("an arm")


class SurvivalEffect(TreatmentEffect):
    """Effect of a treatment on times to an event, by inverse probability weighting.

    A model of the treatment gives each row the probability of its arm, whose inverse is its weight. Weighted
    Kaplan-Meier curves estimate the survival that all rows would have in each arm, and a weighted Cox model
    the hazard ratio of the arms. Standard errors account for the estimated weights: the equations of both
    models are stacked. The robust variance alone, which takes weights as known, is usually too large. Make
    one with :meth:`from_formula`.

    The effect is causal if, given the columns of the treatment's formula, the arm does not depend on the
    potential times (no unmeasured confounding), every row could have been in every arm, and censoring is
    independent of the times within arms.

    Parameters
    ----------
    formula : Formula
        A parsed formula with ``Surv(...)`` on its left side.
    partition : ClientPartition
        In the horizontal layout.
    treatment : str
        Formula of the treatment.
    **settings
        Those of :meth:`from_formula`.

    Attributes
    ----------
    strata : tuple of str
        Columns of strata with baseline hazards of their own.

    References
    ----------
    Mao, Li, Yang and Shen, "On the propensity score weighting analysis with survival outcome: Estimands,
    estimation, and inference", Statistics in Medicine 37 (2018).

    Hajage, Chauvet, Belin, Lafourcade, Tubach and De Rycke, "Closed-form variance estimator for weighted
    propensity score estimators with survival outcome", Biometrical Journal 60 (2018).

    Lin and Wei, "The robust inference for the Cox proportional hazards model", JASA 84 (1989).

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> formulas = {"formula": "Surv(months, died) ~ 1", "treatment": "arm ~ age + C(stage)"}
    >>> model = fs.SurvivalEffect.from_formula(partition=partition, **formulas)
    >>> model.fit().hazard_ratios().round(2).loc["surgery"].tolist()[:3]
    [0.59, 0.49, 0.71]
    >>> fit = model.fit(grid=1, until=48)
    >>> fit.restricted_means().round(1)["estimate"].to_dict()
    {'drugs': 24.1, 'surgery': 28.0, 'surgery - drugs': 3.9}
    """

    model_name: ClassVar[str] = "Effect of a treatment on times"
    _weights_mean: ClassVar[str] = "for a row that was sampled with another probability"
    method_name: ClassVar[str] = "Inverse probability weighting"
    _times = True
    _plan = SurvivalEffectPlan
    _hints: ClassVar = dict.fromkeys(
        ("family", "trim", "offset", "exposure"),
        "times have no distribution here; for few weights use estimand='ATO'",
    )

    @takes_parsed
    @inherits_signature(TreatmentEffect.__init__, without=tuple(_hints))
    def __init__(
        self,
        formula: Formula,
        partition: ClientPartition,
        *,
        labels: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        if formula.sites[0].terms:
            raise FormulaError(
                f"formula: {formula.sites[0].terms[0]!r} has no place on the right side; weights adjust for "
                "the columns of the treatment's formula",
                remedy=Remedy("from_formula('... ~ 1', ...).fit()", "write 1 there"),
            )
        self.strata = formula.strata
        super().__init__(formula, partition, labels=(*labels, *formula.strata), **settings)
        survival = self.question.survival
        if survival is not None and len(survival.times) > 1:
            raise FormulaError(
                "formula: Surv(start, stop, event) is not available here, since a treatment begins at time "
                "0; write Surv(time, event)"
            )

    def _check_causes(self) -> None:
        """Take one event, and competing events as well."""

    @classmethod
    @checks_arguments
    @inherits_signature(__init__)
    @inherits_params(TreatmentEffect.from_formula)
    def from_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Make a model from the times and a formula of the treatment.

        Parameters
        ----------
        formula : str
            ``Surv(time, event) ~ 1``, or ``Surv(time, event) ~ strata(x)`` for hazard ratios with a baseline
            for each level; competing events are ``Surv(time, C(cause, levels=["none", "relapse",
            "death"]))``; the first one is censoring.
        partition : ClientPartition
            In the horizontal layout.
        treatment, estimand, propensity, link, target, weights, complete, labels, missing, subset
            As in :meth:`TreatmentEffect.from_formula`.
        """
        return super().from_formula(formula, partition, **settings)

    @checks_arguments
    def fit(  # type: ignore[override]
        self,
        grid: float | Sequence[float] | Floats | None = None,
        *,
        until: float | None = None,
        times: Sequence[float] | Floats | None = None,
        baseline: Literal["site", "common"] = "site",
        ties: Literal["efron", "breslow"] = "efron",
        cov_type: Literal["stacked", "cluster"] = "stacked",
        cov_kwds: dict[str, str] | None = None,
        maxiter: int = 50,
        tol: float = 1e-8,
        masked: bool | None = None,
        progress: bool | None = None,
    ) -> SurvivalEffectResults:
        """Estimate hazard ratios, and with a grid of times curves and restricted means.

        Parameters
        ----------
        grid : float or sequence of float, optional
            Width of the intervals of the curves, or their ends, ascending. It is public. As in
            :meth:`KaplanMeier.fit`, intervals with few rows are merged, and events and censored rows within
            one are in random order. An interval needs as many rows of each arm and outcome as a sum
            (``min_count`` of a policy), or none.
            Without a grid there are hazard ratios only.
        until : float, optional
            Last time of a grid that is given by its width; required there. Restricted means are up to the
            last end.
        times : sequence of float, optional
            Times at which curves have standard errors, at most twelve; by default four. A time between two
            ends is replaced by the end before it. Each time needs more sums over the rows of an arm: a strict
            site with few rows may refuse four times and release one, ``times=[36]``.
        baseline : {"site", "common"}
            Whether the hazard ratio supposes a baseline hazard for each site (and stratum), with exact times,
            or one for all sites, with times at the ends of the grid. In a Cox model of the hazard of any
            event, competing events count alike.
        ties : {"efron", "breslow"}
            How events at the same time count.
        cov_type : {"stacked", "cluster"}
            Covariance of the stacked equations of rows; or of clusters within sites, or sites, times
            ``G / (G - 1)``, with Student's t.
        cov_kwds : dict, optional
            ``{"groups": column}`` with ``cov_type="cluster"``.
        maxiter : int
            Most steps of Newton's method, of the propensity and of the Cox model.
        tol : float
            Length of the last step, in standard errors.
        masked : bool, optional
            Whether pairwise masks hide each site's part of the sums; by default with at least three sites,
            and with two where an owner requires it.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        SurvivalEffectResults

        Raises
        ------
        EstimationError
            Columns are collinear, arms are separated (the error names the columns), an arm has no events, or
            a few rows have nearly all weight.
        ModelError
            A common baseline without a grid, or with strata; times without a grid, or too many.
        PolicyError
            A site refuses.

        Warns
        -----
        ConvergenceWarning
            The iteration did not converge.

        Examples
        --------
        >>> import fedstat as fs
        >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
        >>> given = {"treatment": "arm ~ age + C(stage)", "estimand": "ATO"}
        >>> model = fs.SurvivalEffect.from_formula("Surv(months, died) ~ 1", partition, **given)
        >>> fit = model.fit(grid=1, until=48, times=[12, 24], baseline="common")
        >>> fit.tidy().query("quantity == 'survival'").round(2)[["arm", "time", "estimate"]]
                       arm  time  estimate
        0            drugs  12.0      0.77
        1          surgery  12.0      0.85
        2  surgery - drugs  12.0      0.08
        3            drugs  24.0      0.55
        4          surgery  24.0      0.69
        5  surgery - drugs  24.0      0.14
        """
        call = Call.of(self.fit, locals())
        check_choice("baseline", baseline, ("site", "common"))
        check_choice("ties", ties, ("efron", "breslow"))
        check_integer("maxiter", maxiter, 1)
        check_positive("tol", tol)
        if baseline == "common" and (grid is None or self.strata):
            raise ModelError(
                "baseline: a common one needs a grid of times, and has no strata",
                remedy=Remedy("fit(..., baseline='site')", "Leave it out, or give grid= and until="),
            )
        points = None if grid is None else curve_grid(grid_points(grid, until), times)
        if points is None and times is not None:
            raise ModelError(
                "times: they belong to curves, which need a grid",
                remedy=Remedy("fit(..., grid=1, until=60)", "give it, as in {arguments}"),
            )

        named = self._with_columns_of({"cov_kwds": cov_kwds})
        clusters = clusters_of_fit(named, cov_type, cov_kwds)

        def estimate(model: SurvivalEffect, attempt: FitAttempt) -> SurvivalEffectResults:
            session = model._open_session(FAMILY, check_masked(masked, len(model.sites), model._masks_wanted))
            own = baseline == "site"
            request = SurvivalEffectRequest(ties, model.strata, own, points is not None, not own)
            newton = SurvivalNewton(session, model._request("ipw", clusters), maxiter, tol)
            fit = attempt.run(newton.estimate(request, points), session.masked_sites)
            if not fit.converged:
                warn(f"{model.model_name} did not converge after {maxiter} steps", ConvergenceWarning)
            return SurvivalEffectResults._of(model, fit, attempt.ledger)

        return run_fit(named, call, estimate)

    def _invent_sites(self, plan: DryRunPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        sites = super()._invent_sites(plan, policies)
        return with_synthetic_cells(sites, self.agreement, (self.arm,))


def curve_grid(ends: Floats, times: object) -> Grid:
    """Return the grid with the times that have errors."""
    if times is None:
        places = np.linspace(0, len(ends), min(USUAL_TIMES, len(ends)) + 1).astype(int)[1:] - 1
        return Grid(ends, ends[places])
    chosen = listed_times("times", times)
    if len(chosen) > MOST_TIMES:
        raise ModelError(f"times: expected at most {MOST_TIMES}, received {len(chosen)}")
    if chosen[-1] > ends[-1] * (1.0 + 1e-9):
        raise ModelError(f"times: the grid ends at {ends[-1]:g}, received {chosen[-1]:g}")
    return Grid(ends, chosen)
