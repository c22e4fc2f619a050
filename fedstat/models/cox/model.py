"""The model: arguments of the analyst, and the fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import statsmodels.genmod.families as sm_families

from fedstat.codec import to_json
from fedstat.docstrings import inherits_signature
from fedstat.errors import ConvergenceWarning, FormulaError, ModelError, Remedy, warn
from fedstat.federation.design.formula.parse import Formula
from fedstat.federation.design.levels import LevelCounts, SiteColumns
from fedstat.federation.design.site_rows import RowsRequest
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.site import FAMILIES
from fedstat.federation.disclosure.state import SiteData, State
from fedstat.federation.dry_run.execution import DryRunRecord, DrySite
from fedstat.federation.dry_run.expected_releases import ExpectedReleases, IterationLoop
from fedstat.federation.dry_run.synthetic import SYNTHETIC_TIMES, draw_group_codes
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.tables.columns import ColumnKind
from fedstat.models.checks import (
    check_choice,
    check_integer,
    check_masked,
    check_positive,
    checks_arguments,
    takes_parsed,
)
from fedstat.models.cox.common_baseline import POINTS
from fedstat.models.cox.protocol import CoxNewton
from fedstat.models.cox.results import CoxResults
from fedstat.models.cox.steps import FAMILY, CoxRequest
from fedstat.models.explain import DryRunPlan
from fedstat.models.horizontal.blocks import grid_points
from fedstat.models.horizontal.clusters import clusters_of_formula
from fedstat.models.horizontal.model import HorizontalModel, OwnFitsPlan
from fedstat.models.rows.estimated_weights import STACKED
from fedstat.models.run import Call, FitAttempt, run_fit
from fedstat.typing import Array, Floats


class CoxPlan(OwnFitsPlan):
    """Facts about a Cox regression before it is fitted."""

    own_fit = "the standard deviations of its columns"
    guessed: ClassVar[frozenset[str]] = frozenset(
        {
            "flag_intervals",
            "start_intervals",
            "sum_intervals",
            "sum_products",
            "sum_residuals",
            "check_intervals",
        }
    )
    checks = ("sum_time_scores", "check_intervals")

    def arguments(self) -> Mapping[str, Any]:
        """Spread as many intervals over the times of synthetic rows."""
        if self.given["grid"] is None:
            return {}
        J = len(grid_points(self.given["grid"], self.given["until"]))
        return {"grid": SYNTHETIC_TIMES * np.arange(1.0, J + 1.0) / J, "until": None}

    def loops(self, dry_run: DryRunRecord) -> Sequence[IterationLoop]:
        """Name the evaluations of Newton's method."""
        loops = list(super().loops(dry_run))
        if self.given["grid"] is None:
            return loops
        most = int(np.ceil(np.log2(len(grid_points(self.given["grid"], self.given["until"]))))) + 2
        return [
            *loops,
            IterationLoop(("flag_intervals",), most),
            IterationLoop(("sum_intervals", "sum_products"), POINTS),
        ]

    def learned(self, expected: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """State what own fits and intervals disclose."""
        yield from super().learned(expected)
        if self.given["grid"] is not None:
            yield (
                "Coordinator",
                "learns sums of the columns over the rows at risk, and their numbers of events, for every "
                "interval of time; with robust errors the sites learn these as well.",
            )

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """State what is unknown."""
        yield from super().notes(expected)
        if self.given["grid"] is not None:
            yield (
                "The numbers of events, and of rows in a stratum, are not known in advance. The dry run "
                "assumes that half of the rows have the event and that strata are equal. Intervals with too "
                "few rows are merged; a site refuses if the last one has too few as well."
            )


class FederatedCox(HorizontalModel):
    """Cox's proportional hazards model over sites that hold different rows; each site has its own baseline.

    The partial likelihood is the sum of the sites' own, so that the estimate is that of
    ``coxph(... + strata(site))`` on the pooled table, from sums over rows. Make one with
    :meth:`from_formula`.

    With ``fit(baseline="common")`` all sites have one baseline hazard, and the estimate is that of ``coxph``
    on times that are rounded up to a grid. The sites release sums by interval of the grid for it. So that
    none is about few rows, an interval needs, at every site and for rows with and without the event, two rows
    for each of 4 + 2 p equations about a column, with p columns; intervals with fewer are merged first.
    With ``ties="breslow"`` the rows with and without the event count together. This keeps more intervals, but
    Breslow's treatment of ties is biased towards zero where many events share an interval.

    Parameters
    ----------
    formula : Formula
        A parsed formula with ``Surv(...)`` on its left side.
    partition : ClientPartition
        In the horizontal layout.
    **settings
        Those of :meth:`from_formula`. A row of ``freq_weights`` two is equal to two rows; these weights are
        whole numbers. ``var_weights`` are the case weights of R's ``coxph(weights=)``, such as inverse
        probabilities of treatment: the row is one event among ties, and one row in robust errors.

    References
    ----------
    Therneau and Grambsch, "Modeling Survival Data: Extending the Cox Model", Springer (2000).

    Lin and Wei, "The robust inference for the Cox proportional hazards model", JASA 84 (1989).

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    >>> model = fs.FederatedCox.from_formula("Surv(months, died) ~ age + C(arm)", partition)
    >>> model.fit().params.round(2).to_dict()
    {'age': 0.04, 'C(arm)[T.surgery]': -0.51}
    """

    model_name: ClassVar[str] = "Federated Cox model"
    _default_family: ClassVar[Any] = sm_families.Binomial
    _times = True
    _baselines = True
    _goes_on = True
    _plan = CoxPlan
    _hints: ClassVar = dict.fromkeys(
        ("family", "exposure"), "a Cox model has none; it takes offset, freq_weights and var_weights"
    )

    @takes_parsed
    @inherits_signature(HorizontalModel.__init__, without=tuple(_hints))
    def __init__(
        self, formula: Formula, partition: ClientPartition, *, weights: Any = None, **settings: Any
    ) -> None:
        self._weigh(weights, formula, **settings)
        if not formula.intercept:
            raise FormulaError(
                "formula: a Cox model has no intercept, and levels are compared with a reference; leave 0 or "
                "- 1 out"
            )
        if not any(one.terms for one in formula.sites):
            raise FormulaError(
                "formula: a Cox model needs a covariate, as in 'Surv(months, died) ~ age'",
                remedy=Remedy(
                    "KaplanMeier.from_formula('... ~ 1', ...).fit(grid=1, until=60)",
                    "without one use KaplanMeier",
                ),
            )
        super().__init__(formula, partition, **settings)

    @classmethod
    @checks_arguments
    @inherits_signature(__init__)
    def from_formula(cls, formula: str, partition: ClientPartition, **settings: Any) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula : str
            As for :meth:`FederatedGLM.from_formula`, with ``Surv(time, event)`` or
            ``Surv(start, stop, event)`` on the left side; the right side may have ``strata(x)`` and
            ``cluster(id)``.
        partition : ClientPartition
            In the horizontal layout.
        weights, offset, freq_weights, var_weights, labels, complete, missing, subset
            As for :meth:`FederatedGLM.from_formula`.
        """
        return super().from_formula(formula, partition, **settings)

    @checks_arguments
    def fit(
        self,
        *,
        cov_type: Literal["nonrobust", "robust", "cluster", "stacked"] | None = None,
        cov_kwds: dict[str, str] | None = None,
        ties: Literal["efron", "breslow"] = "efron",
        baseline: Literal["site", "common"] = "site",
        grid: float | Sequence[float] | Floats | None = None,
        until: float | None = None,
        maxiter: int = 50,
        tol: float = 1e-8,
        local: bool = True,
        check_assumptions: bool = True,
        masked: bool | None = None,
        progress: bool | None = None,
    ) -> CoxResults:
        """Maximize the partial likelihood of all sites' rows.

        Parameters
        ----------
        cov_type : {"nonrobust", "robust", "cluster", "stacked"}, optional
            "nonrobust" is the inverse information; "robust" the sandwich of the rows' scores; "cluster" that
            of the clusters of ``cluster(id)`` in the formula, within sites, and the default where the formula
            names them. Its scores are corrected for the leverage of clusters (Wang, Turner and Li 2023), and
            tests are Student's t on the effective number of clusters less one. "stacked", the default with
            `weights` of a treatment, accounts for their estimation, and for clusters of the formula; the
            others take the weights as known.
        cov_kwds : dict, optional
            ``{"correction": "CR0"}`` is the sandwich of clusters without a correction, with normal tests, as
            R's ``coxph``.
        ties : {"efron", "breslow"}
            How events at the same time count; Efron's is the more accurate.
        baseline : {"site", "common"}
            Whether every site has a baseline hazard of its own, or all sites have one. Only a common one
            estimates the effect of a column that is constant at every site. It takes times that are rounded
            up to a `grid`, and releases more: sums of the columns over the rows at risk, by interval.
        grid : float or sequence of float, optional
            For a common baseline: width of the intervals, or their ends, ascending. It is public.
        until : float, optional
            Last time of a grid that is given by its width; required there. Rows that are followed longer are
            at risk until then.
        maxiter : int
            Most evaluations of the likelihood that increase it.
        tol : float
            Length of the last step, in standard errors.
        local : bool
            Whether every site also fits its own rows and releases that fit, for the comparison of sites.
        check_assumptions : bool
            Whether to test with the fit, in one more round, that hazard ratios do not change with time, and
            with a common baseline that the sites have one. The summary begins with a test that fails at the
            level 0.01. If a site refuses the sums, the fit stands, and a note says that there is no test.
        masked : bool, optional
            Whether pairwise masks hide each site's part of the sums; by default with at least three sites,
            and with two where an owner requires it.
        progress : bool, optional
            Report the progress of the computation (:func:`fedstat.progress`).

        Returns
        -------
        CoxResults

        Raises
        ------
        EstimationError
            There are no events, columns are collinear, or the maximum is at infinity (the error names the
            columns).
        ModelError
            ``cov_type="cluster"`` without ``cluster(...)`` in the formula.
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
        >>> model = fs.FederatedCox.from_formula("Surv(months, died) ~ age", partition)
        >>> model.fit(ties="breslow", cov_type="robust").hazard_ratios().round(2)
             hazard_ratio  conf_low  conf_high
        age          1.04      1.03       1.05
        """
        call = Call.of(self.fit, locals())
        weighs = bool(self.question.propensities)
        if weighs and (baseline == "common" or cov_type == "nonrobust"):
            raise ModelError(
                "weights: those of a treatment need baseline='site' and errors that allow for weights",
                remedy=Remedy(
                    "fit(cov_type='stacked', baseline='site', grid=None)",
                    "Use {arguments}; SurvivalEffect has a hazard ratio with one baseline",
                ),
            )
        stacked = cov_type == STACKED or (weighs and cov_type is None)
        if stacked and not weighs:
            raise ModelError("cov_type: 'stacked' is for weights of a treatment, and the model has none")
        of_formula = self.formula.clusters
        kind, choice = clusters_of_formula(of_formula, "robust" if stacked else cov_type, cov_kwds)
        kind, clusters = (STACKED, of_formula) if stacked else (kind, of_formula if choice else ())
        check_choice("ties", ties, ("efron", "breslow"))
        check_integer("maxiter", maxiter, 1)
        check_positive("tol", tol)
        check_choice("baseline", baseline, ("site", "common"))
        if baseline == "common" and grid is None:
            raise ModelError(
                "grid: baseline='common' needs the intervals of time",
                remedy=Remedy("fit(..., baseline='common', grid=3, until=60)", ", as in {arguments}"),
            )
        if baseline == "site" and grid is not None:
            raise ModelError(
                "grid: it belongs to baseline='common'",
                remedy=Remedy("fit(..., baseline='common')", "leave it out, or choose this baseline"),
            )
        edges = None if grid is None else grid_points(grid, until)

        def estimate(model: FederatedCox, attempt: FitAttempt) -> CoxResults:
            session = model._open_session(FAMILY, check_masked(masked, len(model.sites), model._masks_wanted))
            request = CoxRequest(ties, model.formula.strata, clusters)
            newton, column = CoxNewton(session, request, maxiter, tol), model.partition.site_column
            # Own fits, and the test of an assumption, take the information as that of a likelihood.
            protocol = newton.run(kind, local and not weighs, edges, column, choice, check_assumptions)
            fit, outcomes = attempt.run(protocol, session.masked_sites)
            if not fit.converged:
                count = maxiter if fit.common is None else len(fit.common.trace)
                warn(f"{model.model_name} did not converge after {count} evaluations", ConvergenceWarning)
            return CoxResults._of(model, fit, kind, outcomes, attempt.ledger)

        return run_fit(self, call, estimate)

    def _invent_sites(self, plan: DryRunPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        sites = super()._invent_sites(plan, policies)

        def survey(data: SiteData, state: State, text: str) -> tuple[dict[str, Array], str]:
            # The levels of strata with a common baseline: the fit agrees on them, so all sites have the same.
            question, n = RowsRequest.from_json(text), data.table.n_rows
            frame = draw_group_codes(replace(question, labels=question.columns), "stratum", n, ())
            levels = {
                name: LevelCounts(None, *zip(*frame[name].value_counts().items(), strict=True))
                for name in question.columns
            }
            kinds: dict[str, ColumnKind] = dict.fromkeys(question.columns, "category")
            return {}, to_json(SiteColumns(n, n, kinds, levels))

        for site in sites.values():
            step = replace(FAMILIES["design"]["survey_rows"], run=survey)
            site._instead = {**site._instead, ("design", "survey_rows"): step}
        return sites
